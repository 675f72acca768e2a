"""Text from files and users: which characters a file's texts may have, and how any text is shown.

A terminal obeys control characters, and shows text in another order than it has where overrides of its direction say
so. So no text of a file may have them, and whatever else is printed, such as a file's name or what an error says, is
printed with these characters written out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from reprlib import Repr
from typing import Any

_BEYOND = (
    r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # marks, overrides and isolates of direction
    r"\u2028\u2029"  # separators of lines and paragraphs
    r"\ud800-\udfff\ufffe\uffff"  # half a character, and none: neither UTF-8 nor XML has them
)
REFUSED = r"\u0000-\u001f\u007f-\u009f" + _BEYOND
"""What no text of a file may have, as inside of a regular expression's ``[...]``, in Python as in JSON Schema."""

_REFUSED = re.compile(f"[{REFUSED}]")
_CONTROLS = re.compile(f"[{REFUSED}]".replace(r"\u0000-\u001f", r"\u0000-\u0009\u000b-\u001f"))

_MAX_RANGES = 4
_LONGEST_SHOWN = 80
_LONGEST_LINE = 2000
_LONGEST_END = 400


def problem_of(text: str) -> str | None:
    """Why a file may not have this text: the first character that no text may have, and where; None if it may."""
    found = None if text.isprintable() else _REFUSED.search(text)
    if found is None:
        return None
    return f"has U+{ord(found.group()):04X} at character {found.start() + 1}, which no text may have; remove it"


def problems_of(value: object, place: str = "") -> Iterator[tuple[str, str]]:
    """(place, problem) of every text, keys included, of what was read from JSON or TOML."""
    if isinstance(value, str):
        if problem := problem_of(value):
            yield place, problem
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from problems_of(key, f"{place}.{printable(key)}".removeprefix("."))
            yield from problems_of(each, f"{place}.{printable(key)}".removeprefix("."))
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from problems_of(each, f"{place}[{index}]")


def of_json(text: str | bytes) -> Any:
    """What a stranger's JSON says.

    Raises:
        ValueError: it is no JSON, or nested deeper than the parser goes.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def escaped(value: Any) -> Any:
    """What was read from JSON, with every text, keys included, written out on one line."""
    if isinstance(value, str):
        return on_one_line(value)
    if isinstance(value, dict):
        return {on_one_line(key): escaped(each) for key, each in value.items()}
    return [escaped(each) for each in value] if isinstance(value, list) else value


def printable(text: str) -> str:
    """The text with every character that no file's text may have written out, as ``\\x1b``; lines stay lines."""
    return text if text.isprintable() else _CONTROLS.sub(_written_out, text)


def on_one_line(text: str) -> str:
    """The same with line breaks written out, too."""
    return text if text.isprintable() else _REFUSED.sub(_written_out, text)


def _written_out(found: re.Match[str]) -> str:
    return found.group().encode("unicode_escape", "surrogatepass").decode()


class _BriefRepr(Repr):
    """Only the first members of lists and tables, and only the beginning of what is long."""

    def repr1(self, x: Any, level: int) -> str:
        """A value, or a member of one."""
        if isinstance(x, str | bytes):
            return shortened(repr(x[:_LONGEST_SHOWN]) + "..." * (len(x) > _LONGEST_SHOWN))
        if isinstance(x, int) and x.bit_length() > 4 * _LONGEST_SHOWN:
            return f"an integer of {x.bit_length()} bits"  # Python does not write the digits of very long ones
        return super().repr1(x, level)


_shown = _BriefRepr()
_shown.maxother = _LONGEST_SHOWN


def shown(value: object) -> str:
    """A value of a file as an error quotes it: on one line, and cut where it is long."""
    return on_one_line(_shown.repr(value))


def shown_key(text: str) -> str:
    """A key of a file as an error names it: without quotes."""
    return shortened(text if text.isprintable() else repr(text[:_LONGEST_SHOWN])[1:-1])


def shortened(text: str, most: int = _LONGEST_SHOWN) -> str:
    """The text, or its beginning and dots."""
    return text if len(text) <= most else text[: most - 3] + "..."


def with_short_lines(text: str) -> str:
    """A message without overlong lines, whatever it quotes; the text after a quotation is kept."""
    if len(text) <= _LONGEST_LINE:
        return text
    return "\n".join(
        line if len(line) <= _LONGEST_LINE else f"{line[: _LONGEST_LINE - _LONGEST_END - 3]}...{line[-_LONGEST_END:]}"
        for line in text.split("\n")
    )


def counted(count: int, noun: str, plural: str = "s") -> str:
    """A number of things in words: ``1 device``, ``2 devices``."""
    return f"{count} {noun}{'' if count == 1 else plural}"


def number_ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers in short: ``0, 1, 4-7``; ``0, 8 .. 56 (8)`` where they are equally far apart.

    The number in brackets is how many there are. Of many at unequal distances only the first and the last are named.
    """
    runs = _runs(numbers)
    names = [f"{first}-{last}" if last > first else str(first) for first, last in runs]
    if len(runs) <= _MAX_RANGES:
        return ", ".join(names)
    steps = {(later[0] - run[0], later[1] - run[1]) for run, later in zip(runs, runs[1:], strict=False)}
    return f"{names[0]}{f', {names[1]}' if len(steps) == 1 else ''} .. {names[-1]} ({len(numbers)})"


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """(first, last) of each run of consecutive numbers."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1] = found[-1][0], number
        else:
            found.append((number, number))
    return found
