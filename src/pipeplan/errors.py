"""Every error pipeplan raises for something a user can cause, and its exit code.

::

    PipeplanError                 1
    |-- UsageError                2   flags that contradict each other or the input
    |   |-- FileError             2   a file that cannot be read, parsed or written
    |   |-- SumError              2   numbers of a file that are valid one by one and too large together
    |   `-- NotApplicableError    2   a schedule that is not for the stages at hand
    |       `-- TooLongError      2   one that does not repeat, and has too many actions to be written out
    |-- InfeasibleError           1   a valid question without an answer
    |-- InvalidPlanError          1   a plan that breaks its own rules
    |-- ExecutionError            1   a run that failed on a rank
    `-- SearchTimeoutError        3   time ran out with nothing found

The texts say what, where, the numbers, and which flag to move which way. The command line catches them once, in
:mod:`pipeplan.cli.main`. Where Python asked, they name its arguments instead of flags (:func:`in_python`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from keyword import iskeyword


def did_you_mean(given: str, known: Sequence[str], *, by_word: bool = False) -> str:
    """The question which of the known names is meant; empty where none is near.

    Nearest is one that differs in capitals and punctuation alone; then those that begin with what is given, ``by_word``
    those that have it as one of their words, and those that are spelled much like it, whole or by their beginning.
    """
    text = given.lower()
    near = [name for name in known if _bare(name) == _bare(text)]
    near = near or [name for name in known if len(text) > 2 and name.lower().startswith(text)][:_MOST_NAMES]
    if by_word and not near:
        near = [name for name in known if text in name.lower().split("_")][:_MOST_NAMES]
    near = near or get_close_matches(text, known)
    if not near and len(text) > 2:
        beginnings = {name: name[: len(text)] for name in known}
        close = get_close_matches(text, dict.fromkeys(beginnings.values()), cutoff=0.7)
        begun = [name for name in known if len(name) > 2 and text.startswith(name)]
        near = [*begun, *(name for name, beginning in beginnings.items() if beginning in close)][:_MOST_NAMES]
    return f"did you mean {' or '.join(near)}?" if near else ""


_MOST_NAMES = 3


def _bare(name: str) -> str:
    """A name's letters, digits and signs other than those that join words, in small letters."""
    return re.sub(r"[-_.\s]", "", name.lower())


def choose_from(given: str, known: Sequence[str]) -> str:
    """What to do where a name is not known: the question which one is meant, or all there are."""
    return did_you_mean(given, known) or f"choose from {', '.join(known)}"


def unknown_key(keys: Iterable[str], known: Sequence[str]) -> str | None:
    """What to say of the first key that is not known; None where all are."""
    unknown = next((key for key in keys if key not in known), None)
    return None if unknown is None else f"{unknown} is not known; {choose_from(unknown, known)}"


_COMMAND = r"(?<![\w-])((?:pipeplan [a-z]+|torchrun)(?: (?:[^\s;:,()]|[;:,](?=\S))+)+)"
"""A command to type, to the end of its clause: it stays as it is."""
_WORDS = r"(?:[A-Z]+|yes|no|auto|all|none|circular|sequential|bidirectional|\w+-[\w-]+)(?![\w.])"
"""Values of flags that no sentence goes on with: placeholders, choices of one word, and names with a dash."""
_FLAG = re.compile(rf"{_COMMAND}|(?<![\w-])--([a-z][a-z-]*[a-z])(?: (\d[\w.]*\+?(?![\w.])|'[^']*'(?![\w.])|{_WORDS}))?")


_NAMED_OTHERWISE = {"dp": "replicas", "vp": "chunks"}
"""Short flags of arguments that have a long name alone in the signatures of functions."""


def argument_named(flag: str) -> str:
    """What a flag is called in Python: with underscores, and one more behind a word of the language."""
    name = flag.replace("-", "_")
    return f"{name}_" if iskeyword(name) else name


def in_python(text: str) -> str:
    """A text about flags as one about arguments: ``--mini-batch 7`` is ``mini_batch=7``, ``--memory`` is ``memory``.

    Commands to type, ``pipeplan profile --show p.json``, stay commands.
    """

    def argument(flag: re.Match[str]) -> str:
        if flag[1] is not None:
            return flag[1]
        name, value = argument_named(_NAMED_OTHERWISE.get(flag[2], flag[2])), flag[3]
        if value is None:
            return name
        return f"{name}={value if value.isdecimal() or value.isupper() or value.startswith(_QUOTE) else repr(value)}"

    return _FLAG.sub(argument, text)


_QUOTE = "'"


class PipeplanError(Exception):
    """Base of all errors a user can cause; ``exit_code`` is what the command line ends with."""

    exit_code = 1
    _asked_in_python = False

    def for_python(self) -> None:
        """Name arguments of functions from here on, where the text names flags."""
        self._asked_in_python = True

    def __str__(self) -> str:
        text = super().__str__()
        return in_python(text) if self._asked_in_python else text


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


class SumError(UsageError):
    """Numbers of a file that are valid one by one and add up to more than they may."""


class NotApplicableError(UsageError):
    """A schedule that was asked for and is not for these stages, by its definition."""


class TooLongError(NotApplicableError):
    """A schedule that was asked for, of which nothing repeats, and which written out is more than a plan may be."""


class TooLargeError(UsageError):
    """A planner whose tables of a request would take too much memory: no limit would be long enough."""


class InfeasibleError(PipeplanError):
    """The question is valid and has no answer, for instance too little memory.

    ``enough_bytes`` per device is memory with which there was found to be one; None where that is not known.
    ``would_do`` are changes with which one was found, as figures: ``num_devices``, ``memory_bytes`` of each, ``what``.
    """

    def __init__(
        self, message: str, enough_bytes: int | None = None, would_do: Sequence[Mapping[str, int | str]] = ()
    ) -> None:
        self.enough_bytes = enough_bytes
        self._would_do = tuple(would_do)
        super().__init__(message)

    @property
    def would_do(self) -> tuple[Mapping[str, int | str], ...]:
        """The changes; where Python asked, with its arguments in their words."""
        if not self._asked_in_python:
            return self._would_do
        return tuple(
            {key: in_python(each) if isinstance(each, str) else each for key, each in change.items()}
            for change in self._would_do
        )

    def figures(self) -> dict[str, object]:
        """What ``--json`` has where nothing fits: ``error``, and ``would_do``."""
        return {"error": str(self), "would_do": [dict(each) for each in self.would_do]}


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
