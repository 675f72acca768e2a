"""Deterministic searches, recorded and compared; driven through the command line, so that moved modules change nothing.

    PYTHONPATH=src:tests python -m golden.runner record tests/golden/current [--only NAME] [--plans FOLDER]
    PYTHONPATH=src:tests python -m golden.runner compare [identical|limits] [--only NAME] [--plans FOLDER]

``before/`` has the requests (``requests.toml``), their input files, and the answers of the commit the reorganisation
started from; it is never recorded anew. A step that changes plans on purpose records ``current/``. *identical* compares
with ``current/`` where that exists, else with ``before/``: every plan and every figure is the same, but for what is
masked, seconds and versions. *limits* compares with ``before/``: no makespan is more than 0.1 % longer, and their sum
is not longer. ``--only`` takes a part of a request's name; ``--plans`` keeps the masked plans, to compare by hand.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import os
import re
import runpy
import shlex
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from time import process_time
from typing import Any
from unittest.mock import patch

__all__ = [
    "BEFORE",
    "VERBS",
    "Output",
    "answer",
    "arguments_of",
    "differences",
    "expected_answers",
    "inputs",
    "longer",
    "pipeplan",
    "recorded",
    "requests",
]

HERE = Path(__file__).parent
BEFORE = HERE / "before"
CURRENT = HERE / "current"
ANSWERS = "answers.json"
VERBS = ("search", "compare", "frontier", "simulate", "check")

Json = Any
Answer = dict[str, Json]


@dataclass(frozen=True, slots=True)
class Output:
    """What a command ended with and printed."""

    code: int
    out: str
    err: str


def pipeplan(*arguments: str) -> Output:
    """Run what ``python -m pipeplan`` does with these arguments in this process, which goes on."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with patch.object(sys, "argv", ["pipeplan", *arguments]), redirect_stdout(out), redirect_stderr(err):
        try:
            runpy.run_module("pipeplan.__main__", run_name="pipeplan")["main"]()
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    return Output(code, out.getvalue(), err.getvalue())


def requests(table: str = "search") -> dict[str, str]:
    """{name: arguments} of a table in ``requests.toml``; ``{stem}`` is the file of that name in ``before/files``."""
    found: dict[str, str] = tomllib.loads((BEFORE / "requests.toml").read_text(encoding="utf-8"))[table]
    return found


@contextmanager
def inputs() -> Iterator[Path]:
    """A folder with the files of ``before/files`` unpacked; it is the working folder meanwhile."""
    with tempfile.TemporaryDirectory() as name, chdir(name):
        for packed in sorted((BEFORE / "files").glob("*.gz")):
            Path(packed.stem).write_bytes(gzip.decompress(packed.read_bytes()))
        yield Path(name)


def arguments_of(text: str) -> list[str]:
    """The arguments of a request, with file names for ``{stem}``."""
    return shlex.split(re.sub(r"{(.*?)}", r"\1.json", text))


def answer(verb: str, text: str, plans: Path | None = None) -> Answer:
    """Exit code and message, or the masked figures and digests of the masked plan, section by section.

    Raises:
        KeyboardInterrupt: a search heard a signal and ended early, which is no answer.
    """
    plan = Path("plan.json")
    plan.unlink(missing_ok=True)
    output = ["--deterministic", "-o", plan.name] if verb == "search" else []
    done = pipeplan(verb, *arguments_of(text), *output, "--json")
    found: Answer = {"exit": done.code}
    if done.code:
        found["message"] = ":".join(done.err.strip().split(":")[:2])  # what would do is looked for against the clock
    if verb == "search" and done.out and json.loads(done.out).get("interrupted"):
        raise KeyboardInterrupt(f"{verb} {text}")
    if done.out:
        found["figures"] = _short(masked(json.loads(done.out)))
    if plan.exists():
        content = masked(json.loads(plan.read_text(encoding="utf-8")))
        found["plan"] = _digest(content)
        found["sections"] = {key: _digest(value)[:12] for key, value in sorted(content.items())}
        if plans is not None:
            plans.write_text(json.dumps(content, indent=1, sort_keys=True), encoding="utf-8")
    return found


def masked(value: Json) -> Json:
    """Without seconds of the search, versions and dates; nor sentences in lists, whose wording is not the matter."""
    if isinstance(value, list):
        return [masked(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {key: masked(each) for key, each in value.items() if not _is_masked(key)}


def _is_masked(key: str) -> bool:
    return key.endswith("seconds") or key in _UNSTABLE


_UNSTABLE = (
    *("versions", "date", "command", "method", "problems", "remarks", "why", "what", "notes", "choices"),
    "alternatives",  # of a plan: other plans, in figures
    "node_size",  # what plans say of their cluster since
)


def _short(value: Json) -> Json:
    """Long lists as digests, so that the answers stay small."""
    if isinstance(value, dict):
        return {key: _short(each) for key, each in value.items()}
    if isinstance(value, list) and len(json.dumps(value)) > 400:
        return {"length": len(value), "digest": _digest(value)[:12]}
    return value


def _digest(value: Json) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def recorded(folder: Path) -> dict[str, Answer]:
    """The answers a folder has."""
    found: dict[str, Answer] = json.loads((folder / ANSWERS).read_text(encoding="utf-8"))
    return found


def expected_answers() -> dict[str, Answer]:
    """What *identical* compares with: the answers of the last step that changed plans on purpose."""
    return recorded(CURRENT if (CURRENT / ANSWERS).exists() else BEFORE)


def differences(name: str, expected: Json, found: Json) -> list[str]:
    """Every place where two answers differ, a line each."""
    if isinstance(expected, dict) and isinstance(found, dict):
        return [
            line
            for key in sorted(expected.keys() | found.keys())
            for line in differences(f"{name}: {key}", expected.get(key), found.get(key))
        ]
    return [] if expected == found else [f"{name}: {expected!r} is now {found!r}"]


def longer(expected: Mapping[str, Answer], found: Mapping[str, Answer]) -> list[str]:
    """Makespans more than 0.1 % longer, plans no longer found, and a longer sum."""
    lines, sums = [], [0, 0]
    for name, now in found.items():
        before = expected[name]
        makespan, new = (each.get("figures", {}).get("makespan_ns") for each in (before, now))
        if makespan is None:
            continue
        if new is None:
            lines.append(f"{name}: has no plan: {now['message']}")
            continue
        sums[0] += makespan
        sums[1] += new
        if 1000 * new > 1001 * makespan:
            lines.append(f"{name}: {makespan} ns is now {new}, {new / makespan - 1:+.3%}")
    if sums[1] > sums[0]:
        lines.append(f"the sum, {sums[0]} ns, is now {sums[1]}, {sums[1] / sums[0] - 1:+.4%}")
    return lines


def _answers(only: str, plans: Path | None, verbs: Sequence[str]) -> Iterator[tuple[str, Answer]]:
    with inputs():
        for verb in verbs:
            for name, text in requests(verb).items():
                if only not in f"{verb} {name}":
                    continue
                begun = process_time()
                kept = None if plans is None else plans / f"{name.replace('/', '-')}.json"
                found = answer(verb, text, kept)
                print(f"{process_time() - begun:6.1f} s  {verb} {name}: {_line(found)}", file=sys.stderr, flush=True)
                yield f"{verb} {name}", found


def _line(found: Answer) -> str:
    if found["exit"]:
        return f"exit {found['exit']}: {found['message']}"
    figures = found["figures"]
    return " ".join(str(figures[key]) for key in ("status", "scheduler", "placement", "makespan_ns") if key in figures)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(dest="mode", required=True)
    record, compare = modes.add_parser("record"), modes.add_parser("compare")
    record.add_argument("folder", type=Path)
    compare.add_argument("level", choices=("identical", "limits"), nargs="?", default="identical")
    for each in (record, compare):
        each.add_argument("--only", default="")
        each.add_argument("--plans", type=Path)
    options = parser.parse_args()
    plans = options.plans and options.plans.absolute()
    if plans is not None:
        plans.mkdir(parents=True, exist_ok=True)
    if options.mode == "record":
        folder = options.folder.absolute()
        folder.mkdir(parents=True, exist_ok=True)
        known = recorded(folder) if options.only else {}
        found = known | dict(_answers(options.only, plans, VERBS))
        text = json.dumps(dict(sorted(found.items())), indent=1)
        (folder / ANSWERS).write_text(text + "\n", encoding="utf-8")
        return 0
    return _compare(options.level, options.only, plans)


def _compare(level: str, only: str, plans: Path | None) -> int:
    if level == "limits":
        lines = longer(recorded(BEFORE), dict(_answers(only, plans, VERBS[:1])))
    else:
        expected = expected_answers()
        lines = [
            line
            for name, found in _answers(only, plans, VERBS)
            for line in differences(name, expected.get(name), found)
        ]
    print(*lines or [f"{level}: nothing to report"], sep="\n")
    return 1 if lines else 0


if __name__ == "__main__":
    os.environ.setdefault("COLUMNS", "120")
    sys.exit(main())
