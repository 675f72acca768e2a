"""How many tests still give a limit in seconds of the clock, which only a counted or a deterministic one should be."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from support.paths import ROOT

LEFT = 134
"""Limits that are left: many are of requests that run by a clock of the test's own, or that are to be cut short."""

_FLAG = "--time-limit"


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float) and 0 < node.value < math.inf


def _texts(nodes: Sequence[ast.AST]) -> list[object]:
    return [node.value if isinstance(node, ast.Constant) else None for node in nodes]


def _limits(path: Path) -> Iterator[int]:
    """The lines that give one: by a keyword, a key, the first argument of a limit, or the flag of a command."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            named = {each.arg: each.value for each in node.keywords}
            if not named.keys() & {"clock", "deterministic"}:
                made = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
                yield from (each.lineno for name, each in named.items() if name == "time_limit" and _is_number(each))
                yield from (each.lineno for each in node.args[:1] if made in ("Budget", "Limit") and _is_number(each))
        if isinstance(node, ast.Dict):
            keys = _texts([key for key in node.keys if key is not None])
            values = dict(zip(_texts([key or node for key in node.keys]), node.values, strict=True))
            if "deterministic" not in keys and "time_limit" in values and _is_number(values["time_limit"]):
                yield node.lineno
        given: Sequence[ast.AST] = node.args if isinstance(node, ast.Call) else getattr(node, "elts", ())
        texts = _texts(given)
        if _FLAG in texts and "--deterministic" not in texts:
            yield node.lineno
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "--deterministic" not in node.value:
            yield from (node.lineno for _ in re.findall(rf"{_FLAG} \d", node.value))


def test_no_more_tests_have_limits_of_the_clock() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}" for path in sorted((ROOT / "tests").rglob("*.py")) for line in _limits(path)
    ]
    assert len(found) == LEFT, "\n".join(found)
