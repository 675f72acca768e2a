"""What the parts of ``attack.py`` have in common: how one ends, and what is drawn for it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

__all__ = ["WRONG", "Ended", "Part", "drawn_for"]

WRONG = {
    "traceback": ("tracebacks", "Python's traceback, or an error of another kind than pipeplan's"),
    "hang": (
        "hangs",
        "more than 10 s, twice, 10 s of work for a bound, or 2 s of work after Ctrl-C of what runs or measures as it "
        "is asked to; of processes as attack_faults and attack_searches say",
    ),
    "control": ("controls", "control characters, or a file's markup read, on the terminal"),
    "exit": ("exit codes", "one that is none of those promised, or no message with it, or several"),
    "accepted": (
        "wrong acceptances",
        "a damaged plan accepted that waits for ever, takes more memory or other times than it says; a damaged "
        "checkpoint that is read as something else, or what it says is run",
    ),
    "bound": ("wrong bounds", "one above what can be reached"),
    "orphan": ("orphans", "a process that lives on"),
    "lost": ("lost data", "a checkpoint or file that was whole is so no more, or a run cannot go on"),
    "message": ("messages", "a failed run that does not say what failed"),
}
"""What must not happen: its title in the table, and what it is."""


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
