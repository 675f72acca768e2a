"""What goes wrong on a rank, in its own words: they name rank, action and program counter."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from pipeplan.errors import ExecutionError
from pipeplan.runtime.launch.status_board import Progress

__all__ = ["Cause", "Failure", "RankError", "cause_of", "lost_others"]


class Cause(StrEnum):
    """Why a rank gave up, most telling first."""

    REFUSED = "refused"  # before the first step: model, plan and options do not fit together
    RAISED = "raised"  # an exception in the model's code or ours
    TIMEOUT = "timeout"  # nothing came for as long as --timeout allows
    LOST = "lost"  # the connection to another rank broke


class RankError(ExecutionError):
    """A rank cannot go on; the text names rank, action and program counter. ``peer`` is the rank it lost, or -1."""

    def __init__(self, cause: Cause, message: str, peer: int = -1) -> None:
        self.cause = cause
        self.peer = peer
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class Failure:
    """A rank's own report.

    ``exit_code`` is what the command ends with, ``details`` a traceback or nothing, ``peer`` the rank that was
    lost or -1.
    """

    rank: int
    cause: Cause
    text: str
    exit_code: int = 1
    details: str = ""
    peer: int = -1

    def as_json(self) -> dict[str, Any]:
        """Plain values; :meth:`from_json` reads them back."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Failure:
        """The failure that :meth:`as_json` wrote."""
        return cls(**{**data, "cause": Cause(data["cause"])})


def cause_of(error: RuntimeError) -> tuple[Cause, str]:
    """What an error of a transport means, TIMEOUT or LOST, and its text without place and advice."""
    text = re.sub(r"^\[[^\]]*\] *", "", str(error).strip().partition("\n")[0]).partition(". ")[0]
    return Cause.TIMEOUT if re.search("timed ?out|timeout", text, re.IGNORECASE) else Cause.LOST, text


@contextlib.contextmanager
def lost_others(progress: Progress) -> Iterator[None]:
    """Turn what a collective of all ranks raises into an error that names rank and place."""
    try:
        yield
    except RuntimeError as error:
        cause, text = cause_of(error)
        raise RankError(cause, f"rank {progress.rank} lost the others {progress.describe()}: {text}") from error
