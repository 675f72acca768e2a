"""How many tests still give a limit in seconds of the clock, which only a counted or a deterministic one should be."""

from __future__ import annotations

import ast
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from support.paths import ROOT

LEFT = {
    "tests/cli/test_interruption.py": (2, "signals to processes of their own, which end them long before"),
    "tests/integration/test_attack.py": (1, "of a process as the attack starts it"),
    "tests/runtime_support/decoding_rank.py": (1, "of a rank, a process of its own; it is far from its end"),
    "tests/test_time_limit.py": (1, "what another process gets"),
}
"""How many real limits are left where, and why: the outer ones of other processes."""

_FLAG = "--time-limit"


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float) and 0 < node.value < math.inf


def _texts(nodes: Sequence[ast.AST]) -> list[object]:
    return [node.value if isinstance(node, ast.Constant) else None for node in nodes]


def _is_counted(node: ast.AST) -> bool:
    """Whether it is marked so that limits count questions in it: a module, or a test."""
    marks: list[ast.expr] = getattr(node, "decorator_list", [])
    if isinstance(node, ast.Module):
        marks = [each.value for each in node.body if isinstance(each, ast.Assign)]
    return any("mark.counted" in ast.unparse(each) for each in marks)


def _called(function: ast.expr) -> str:
    """The last word of what is called."""
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")


def _is_tuning(node: ast.AST) -> bool:
    """Whether it is a call whose limit is of the clock even where its searches are deterministic."""
    return isinstance(node, ast.Call) and _called(node.func) == "tune"


def _nodes(within: ast.AST) -> Iterator[ast.AST]:
    """All of a module but what is counted."""
    if not _is_counted(within):
        yield within
        for each in ast.iter_child_nodes(within):
            yield from _nodes(each)


def _limits(path: Path) -> Iterator[int]:
    """The lines that give one: by a keyword, a key, the first argument of a limit, or the flag of a command."""
    text = path.read_text(encoding="utf-8")
    if not any(word in text for word in ("time_limit", _FLAG, "Budget", "Limit")):
        return
    module = ast.parse(text)
    tuned = {id(each) for node in ast.walk(module) if _is_tuning(node) for each in ast.walk(node)}
    for node in _nodes(module):
        if isinstance(node, ast.Call):
            named = {each.arg: each.value for each in node.keywords}
            if not named.keys() & ({"clock"} if id(node) in tuned else {"clock", "deterministic"}):
                made = _called(node.func)
                yield from (each.lineno for name, each in named.items() if name == "time_limit" and _is_number(each))
                yield from (each.lineno for each in node.args[:1] if made in ("Budget", "Limit") and _is_number(each))
        if isinstance(node, ast.Dict):
            keys = _texts([key for key in node.keys if key is not None])
            values = dict(zip(_texts([key or node for key in node.keys]), node.values, strict=True))
            if "deterministic" not in keys and "time_limit" in values and _is_number(values["time_limit"]):
                yield node.lineno
        given: Sequence[ast.AST] = node.args if isinstance(node, ast.Call) else getattr(node, "elts", ())
        texts = _texts(given)
        after = dict(itertools.pairwise(texts)).get(_FLAG, "0s") if _FLAG in texts else None  # computed, or none at all
        if _FLAG in texts and re.match(r"\d", str(after)) and "--deterministic" not in texts:
            yield node.lineno
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "--deterministic" not in node.value:
            yield from (node.lineno for _ in re.findall(rf"{_FLAG} \d", node.value))


def test_no_more_tests_have_limits_of_the_clock() -> None:
    found = {
        path.relative_to(ROOT).as_posix(): lines
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if (lines := [*_limits(path)])
    }
    counts = {path: len(lines) for path, lines in found.items()}
    assert counts == {path: count for path, (count, _) in LEFT.items()}, found
