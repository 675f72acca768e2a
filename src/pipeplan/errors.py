"""Every error pipeplan raises for something a user can cause, and its exit code.

::

    PipeplanError                 1
    |-- UsageError                2   flags that contradict each other or the input
    |   `-- FileError             2   a file that cannot be read, parsed or written
    |-- InfeasibleError           1   a valid question without an answer
    |-- InvalidPlanError          1   a plan that breaks its own rules
    |-- ExecutionError            1   a run that failed on a rank
    `-- SearchTimeoutError        3   time ran out with nothing found

The texts say what, where, the numbers, and which flag to move which way. They are caught once, in
:mod:`pipeplan.cli.main`.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches


def did_you_mean(given: str, known: Sequence[str]) -> str:
    """The question which of the known names is meant; empty where none is near."""
    near = get_close_matches(given.lower(), known)
    return f"did you mean {' or '.join(near)}?" if near else ""


class PipeplanError(Exception):
    """Base of all errors a user can cause; ``exit_code`` is what the command line ends with."""

    exit_code = 1


class UsageError(PipeplanError):
    """The question itself is wrong: an unknown name, flags that contradict each other or the input."""

    exit_code = 2


class FileError(UsageError):
    """A file that cannot be read, parsed, validated or written.

    ``problems`` holds one line per problem, each starting with its path inside the file.
    """

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        self.problems = tuple(problems)
        super().__init__("\n  ".join([message, *self.problems]))


class InfeasibleError(PipeplanError):
    """The question is valid and has no answer, for instance too little memory.

    ``enough_bytes`` per device is memory with which there was found to be one; None where that is not known.
    """

    def __init__(self, message: str, enough_bytes: int | None = None) -> None:
        self.enough_bytes = enough_bytes
        super().__init__(message)


class InvalidPlanError(PipeplanError):
    """A plan that breaks its own rules; ``problems`` has one line per broken rule, naming the place."""

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        self.problems = tuple(problems)
        super().__init__("\n  ".join([message, *self.problems]))


class ExecutionError(PipeplanError):
    """A run failed; the text names the rank, the program counter and the action."""


class SearchTimeoutError(PipeplanError):
    """The time limit passed before any valid plan was found."""

    exit_code = 3
