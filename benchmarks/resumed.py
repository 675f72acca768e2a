"""Long benchmarks in parts: pieces that are done are kept in a file, one JSON line each, and not done again."""

from __future__ import annotations

import json
import time
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeplan import Limit

__all__ = ["Paused", "Pieces", "resumable", "work_of"]


def work_of(seconds: float) -> Limit:
    """So many seconds that this process works, all threads together: on a busy machine as much as on a quiet one."""
    return Limit(seconds, clock=time.process_time)


class Paused(Exception):
    """The time of this part is over, and pieces are left; what is done is kept."""

    def __init__(self, left: str) -> None:
        super().__init__(f"paused before {left}; the same command goes on from here")


class Pieces:
    """Results by name, of this run and of the ones before it that kept them in the same file.

    A file's lines are ``{"piece": name, "value": JSON}``. ``seconds`` is when a part ends, None for never: a piece is
    then finished, but none begun, except that every part does one at least.
    """

    def __init__(self, path: Path | None = None, seconds: float | None = None) -> None:
        self._path = path
        self._end = None if seconds is None else time.monotonic() + seconds
        self._made = 0
        lines = path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else []
        self._known: dict[str, Any] = {line["piece"]: line["value"] for line in map(json.loads, lines)}

    def get(self, name: str, make: Callable[[], Any]) -> Any:
        """What ``make`` returns, as JSON has it; done once.

        Raises:
            Paused: it is not known, and the time of this part is over.
        """
        if name not in self._known:
            if self._made and self._end is not None and time.monotonic() > self._end:
                raise Paused(name)
            value = json.loads(json.dumps(make()))
            self._made += 1
            if self._path is not None:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"piece": name, "value": value}) + "\n")
            self._known[name] = value
        return self._known[name]


def resumable(parser: ArgumentParser) -> None:
    """Add ``--kept`` and ``--part-seconds``, which :class:`Pieces` takes."""
    parser.add_argument("--kept", type=Path, help="file of the pieces that are done, which are not done again")
    parser.add_argument("--part-seconds", type=float, help="begin no piece after so long; the next run goes on")
