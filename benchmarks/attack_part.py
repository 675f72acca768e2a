"""What the parts of ``attack.py`` have in common: how one ends, and what is drawn for it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

__all__ = ["WRONG", "Ended", "Part", "drawn_for"]

WRONG = {
    "traceback": "Python's traceback, or an error of another kind than pipeplan's",
    "hang": "more than 10 s, twice",
    "control": "control characters, or a file's markup read, on the terminal",
    "exit": "an exit code that is none of those promised, or no message with it, or several",
    "accepted": "a damaged plan accepted that waits for ever, takes more memory or other times than it says",
    "bound": "a bound above what can be reached",
    "orphan": "a process that lives on",
    "lost": "a checkpoint or file that was whole is so no more, or a run cannot go on",
    "message": "a failed run that does not say what failed",
}
"""What must not happen."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How one attack ended: in a word, and what is ``wrong``, if anything is, with the details."""

    how: str
    wrong: str = ""
    what: str = ""


class Part(Protocol):
    """A kind of attack. ``limit_s`` is how long one may take, on top of which comes what it says itself."""

    name: str
    count: int
    limit_s: float
    memory_bytes: int | None

    def prepare(self, folder: Path) -> None:
        """Make what all attacks need, once, in the process from which those that attack are forked."""

    def attack(self, index: int, seed: int, folder: Path) -> Ended:
        """Do one, the same whenever seed and index are the same; ``folder`` is empty."""


def drawn_for(part: str, seed: int, index: int) -> random.Random:
    """All chance of one attack."""
    return random.Random(f"{part}/{seed}/{index}")
