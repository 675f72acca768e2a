"""Every key that a verb prints with ``--json`` or writes into a file, as sorted paths.

    PYTHONPATH=src:tests python -m golden.json_keys    # writes before/json_keys.json

The commands are the tables ``keys`` and ``keys_torch`` of ``before/requests.toml``, {verb and case: arguments}. A path
is ``rows[].schedule``; names that are data, such as those of operations, are ``*``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from golden.runner import BEFORE, arguments_of, inputs, pipeplan, requests

__all__ = ["KEYS", "keys_of", "paths"]

KEYS = BEFORE / "json_keys.json"

_DATA = re.compile(r"\d+\D?")
_FREE = ("versions", "options", "configurations")
"""What has different keys wherever it stands."""


def keys_of(case: str, text: str) -> list[str]:
    """The paths of all keys of what a command prints, or writes to ``out.json``.

    The working folder is that of :func:`runner.inputs`. Raises AssertionError if it prints no JSON.
    """
    written = Path("out.json")
    written.unlink(missing_ok=True)
    done = pipeplan(case.split()[0], *arguments_of(text))
    text = written.read_text(encoding="utf-8") if written.exists() else done.out
    assert text.startswith("{"), f"{case}: exit {done.code}: {done.err}"
    return sorted(set(paths(json.loads(text))))


def paths(value: Any, before: str = "") -> Iterator[str]:
    """The path of every key in a JSON value."""
    if isinstance(value, list):
        for each in value:
            yield from paths(each, f"{before}[]")
    elif isinstance(value, dict) and before.rpartition(".")[2] not in _FREE:
        for key, each in value.items():
            path = f"{before}.{'*' if _DATA.fullmatch(key) else key}".lstrip(".")
            yield path
            yield from paths(each, path)


def main() -> None:
    found = {}
    with inputs():
        for case, text in (requests("keys") | requests("keys_torch")).items():
            found[case] = keys_of(case, text)
            print(f"{len(found[case]):4} keys  {case}", flush=True)
    KEYS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
