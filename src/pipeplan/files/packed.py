"""A program in short: the words that its entries have besides their micro-batches, and a letter for each entry.

A word is an entry's text with its micro-batch left out, such as ``0F`` or ``0SEND_F>2``: a device runs each for one
micro-batch after another, so that which one it is need not be said. Exchanges of state are words as they are. Starts in
short are the gaps between them, which are alike for most micro-batches.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, count, groupby, pairwise, repeat
from typing import Annotated, Any

from annotated_types import MaxLen, MinLen

from pipeplan.workload.action import NUMBER_PATTERN, StateAction
from pipeplan.workload.elements import Element, Index, Items, Meaning, Name, Nanoseconds, Text

MOST_ENTRIES = 4_000_000
"""Of all programs together: a file that says more in short is not read."""

LETTERS = string.ascii_letters + string.digits + "!#$%&()*+,-./:;<=>?@[]^_{|}~"
"""One for each word, in their order."""

_ENTRY = re.compile(f"({NUMBER_PATTERN}[A-Z_]+){NUMBER_PATTERN}((?:>{NUMBER_PATTERN})?(?:@{NUMBER_PATTERN})?)")
_WORD = re.compile(f"({NUMBER_PATTERN}[A-Z_]+)((?:>{NUMBER_PATTERN})?(?:@{NUMBER_PATTERN})?)")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedProgram(Element):
    """A program whose entries of each word are of micro-batches 0, 1, 2 and so on."""

    words: Annotated[Items[Name], MinLen(1), Meaning("what its entries are, without the micro-batch")]
    order: Annotated[Text, Meaning(f"a letter for each entry: of {LETTERS} the one in the place of its word")]
    repeats: Annotated[
        Items[Annotated[Items[Index], MinLen(3), MaxLen(3)]],
        Meaning("letters of the order that stand for more of them: from which on, how many, and how many times"),
    ] = ()


def packed_programs(programs: Sequence[Sequence[str]]) -> list[Any]:
    """Programs in short, where that can be; as they are where they are longer than is read."""
    short = sum(map(len, programs)) <= MOST_ENTRIES
    return [(packed(program) if short else None) or list(program) for program in programs]


def packed(program: Sequence[str]) -> dict[str, Any] | None:
    """A program in short; None where micro-batches are not in turn, or there are more words than letters."""
    words, counts, order = dict[str, int](), list[int](), list[int]()
    for text in program:
        word, number = _read(text)
        place = words.setdefault(word, len(words))
        if place == len(counts):
            counts.append(0)
        if number is not None and number != counts[place]:
            return None
        counts[place] += 1
        order.append(place)
    if not 0 < len(words) <= len(LETTERS):
        return None
    text, repeats = _shorter("".join(LETTERS[place] for place in order))
    return {"words": list(words), "order": text} | ({"repeats": repeats} if repeats else {})


_REPEATED = re.compile(r"(.{2,64}?)\1{3,}")
_LEAST_SPARED = 24
"""Letters that a repetition is not to be written for."""


def _shorter(order: str) -> tuple[str, list[list[int]]]:
    """An order with what repeats there once, and (begin, length, times) of each such place."""
    parts, repeats, done, place = list[str](), list[list[int]](), 0, 0
    for match in _REPEATED.finditer(order):
        unit = match[1]
        times = len(match[0]) // len(unit)
        if (times - 1) * len(unit) < _LEAST_SPARED:
            continue
        before = order[done : match.start()]
        repeats.append([place + len(before), len(unit), times])
        parts += before, unit
        place, done = place + len(before) + len(unit), match.end()
    return "".join((*parts, order[done:])), repeats


def _whole(order: str, repeats: object, where: str, left: int) -> str:
    """An order with all that repeats, at most so many letters. Raises ValueError where that is of ones not there."""
    parts, done, letters = list[str](), 0, len(order)
    for number, each in enumerate(repeats if isinstance(repeats, list | tuple) else (None,)):
        told = isinstance(each, list | tuple) and len(each) == 3 and all(type(one) is int for one in each)
        begin, length, times = each if told and each is not None else (-1, 0, 0)
        letters += length * (times - 1)
        if not (done <= begin < begin + length <= len(order) and times > 0) or letters > left:
            raise ValueError(
                f"{where}.repeats[{number}] is {each!r}, and not three numbers: which of the {len(order)} letters, "
                f"behind those before it, how many, and how many times; no more than {MOST_ENTRIES} in all programs"
            )
        parts += order[done:begin], order[begin : begin + length] * times
        done = begin + length
    return "".join((*parts, order[done:]))


def _read(text: str) -> tuple[str, int | None]:
    """An entry's word, and its micro-batch; a whole text with a part of a micro-batch is a word that comes once."""
    match = _ENTRY.fullmatch(text)
    if match is None:
        return text, None if StateAction.read(text) is not None else -1
    return match[1] + match[4], int(match[3])


def unpacked(given: object) -> object:
    """Programs as they are read: those in short as texts. Raises ValueError, with the place."""
    if not isinstance(given, list):
        return given
    found, left = list[object](), MOST_ENTRIES
    for place, each in enumerate(given):
        if isinstance(each, dict):
            texts = _texts(each, f"programs[{place}]", left)
            left -= len(texts)
            found.append(texts)
        else:
            found.append(tuple(each) if isinstance(each, list) else each)
    return tuple(found)


def _texts(said: dict[str, Any], where: str, left: int) -> tuple[str, ...]:
    words, order = said.get("words"), said.get("order")
    if (
        said.keys() - {"repeats"} != {"words", "order"}
        or not isinstance(words, list | tuple)
        or not isinstance(order, str)
    ):
        raise ValueError(
            f"{where} has keys {', '.join(map(str, said)) or 'none'}; give words, a list, and order, a text"
        )
    every = [_entries(word, f"{where}.words[{number}]") for number, word in enumerate(words)]
    entries = {letter: each.__next__ for letter, each in zip(LETTERS, every, strict=False)}
    for letter in dict.fromkeys(order):
        if letter not in entries:
            raise ValueError(f"{where}.order has {letter!r}, which stands for none of its {len(words)} words")
    whole = _whole(order, said.get("repeats", ()), where, left)
    return tuple([entries[letter]() for letter in whole])


def _entries(word: object, where: str) -> Iterator[str]:
    """The entries of a word, one after another."""
    match = _WORD.fullmatch(word) if isinstance(word, str) else None
    if isinstance(word, str) and word and StateAction.read(word) is not None:
        return repeat(word)
    if match is None:
        raise ValueError(f"{where} is {word!r}, and no entry without its micro-batch, such as 0F")
    return map(f"{match[1]}%d{match[3]}".__mod__, count())


MOST_IN_TURN = 16
"""Gaps that follow each other again and again, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedStarts(Element):
    """When an operation's actions start, by the time from each to the next."""

    first: Annotated[Nanoseconds, Meaning("when the first starts")]
    gaps: Annotated[
        Items[Annotated[Items[Nanoseconds], MinLen(2), MaxLen(1 + MOST_IN_TURN)]],
        Meaning("ns from one start to the next, or several such in turn, and how many times in a row"),
    ]


MOST_STARTS = 4_000_000
"""Of all operations together: a file that says more in short is not read."""


def packed_starts(starts: Sequence[int]) -> dict[str, Any] | None:
    """Starts in short; None where there are none, or one comes before another."""
    gaps = [after - before for before, after in pairwise(starts)]
    if not starts or min(gaps, default=0) < 0:
        return None
    runs = [(gap, len(list(alike))) for gap, alike in groupby(gaps)]
    return {"first": starts[0], "gaps": list(_in_turn(runs))}


def _in_turn(runs: Sequence[tuple[int, int]]) -> Iterator[list[int]]:
    """Each gap and how many times it comes in a row; several that come again and again in turn together."""
    place = 0
    while place < len(runs):
        unit, times = _repeated(runs, place)
        yield [*chain.from_iterable(repeat(*run) for run in unit), times] if len(unit) > 1 else [*unit[0]]
        place += len(unit) * times


def _repeated(runs: Sequence[tuple[int, int]], place: int) -> tuple[Sequence[tuple[int, int]], int]:
    """What begins at a place and is repeated there, and how many times: that which covers most, a run alone else."""
    best, most = (runs[place : place + 1], 1), 1
    for size in range(2, min(MOST_IN_TURN, (len(runs) - place) // 2) + 1):
        unit, times = runs[place : place + size], 1
        if sum(count for _, count in unit) > MOST_IN_TURN:
            break
        while runs[place + times * size : place + (times + 1) * size] == unit:
            times += 1
        if times > 1 and times * size > most:
            best, most = (unit, times), times * size
    return best


def unpacked_starts(given: object) -> object:
    """Starts as they are read: those in short as numbers. Raises ValueError, with the place."""
    if not isinstance(given, dict):
        return given
    found, left = dict[object, object](), MOST_STARTS
    for id_, each in given.items():
        if isinstance(each, dict):
            starts = _starts(each, f"starts_ns[{id_}]", left)
            left -= len(starts)
            found[id_] = starts
        else:
            found[id_] = tuple(each) if isinstance(each, list) else each
    return found


def _starts(said: dict[str, Any], where: str, left: int) -> tuple[int, ...]:
    first, gaps = said.get("first"), said.get("gaps")
    if said.keys() != {"first", "gaps"} or type(first) is not int or not isinstance(gaps, list | tuple):
        raise ValueError(
            f"{where} has keys {', '.join(map(str, said)) or 'none'}; give first, a number, and gaps, a list"
        )
    for number, gap in enumerate(gaps):
        told = isinstance(gap, list | tuple) and all(type(each) is int and each >= 0 for each in gap)
        if not told or not 2 <= len(gap) <= 1 + MOST_IN_TURN:
            raise ValueError(
                f"{where}.gaps[{number}] is none of two numbers: ns, and how many times in a row; or of more, "
                f"at most {MOST_IN_TURN} of ns, which come in turn"
            )
    starts = 1 + sum(len(unit) * times for *unit, times in gaps)
    if starts > left:
        raise ValueError(f"{where} has {starts} starts, and all in short may be {MOST_STARTS} together")
    every = chain.from_iterable(chain.from_iterable(repeat(unit, times)) for *unit, times in gaps)
    return tuple(accumulate(every, initial=first))
