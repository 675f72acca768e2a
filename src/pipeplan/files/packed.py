"""A program in short: the words that its entries have besides their micro-batches, and a letter for each entry.

A word is an entry's text with its micro-batch left out, such as ``0F`` or ``0SEND_F>2``: a device runs each for one
micro-batch after another, so that which one it is need not be said. Exchanges of state are words as they are.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import MinLen

from pipeplan.workload.action import NUMBER_PATTERN, StateAction
from pipeplan.workload.elements import Element, Items, Meaning, Name, Text

LETTERS = string.ascii_letters + string.digits + "!#$%&()*+,-./:;<=>?@[]^_{|}~"
"""One for each word, in their order."""

_ENTRY = re.compile(f"({NUMBER_PATTERN}[A-Z_]+){NUMBER_PATTERN}((?:>{NUMBER_PATTERN})?(?:@{NUMBER_PATTERN})?)")
_WORD = re.compile(f"({NUMBER_PATTERN}[A-Z_]+)((?:>{NUMBER_PATTERN})?(?:@{NUMBER_PATTERN})?)")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedProgram(Element):
    """A program whose entries of each word are of micro-batches 0, 1, 2 and so on."""

    words: Annotated[Items[Name], MinLen(1), Meaning("what its entries are, without the micro-batch")]
    order: Annotated[Text, Meaning(f"a letter for each entry: of {LETTERS} the one in the place of its word")]


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
    return {"words": list(words), "order": "".join(LETTERS[place] for place in order)}


def _read(text: str) -> tuple[str, int | None]:
    """An entry's word, and its micro-batch; a whole text with a part of a micro-batch is a word that comes once."""
    match = None if StateAction.read(text) is not None else _ENTRY.fullmatch(text)
    if match is None:
        return text, None if StateAction.read(text) is not None else -1
    return match[1] + match[4], int(match[3])


def unpacked(given: object) -> object:
    """Programs as they are read: those in short as texts. Raises ValueError, with the place."""
    if not isinstance(given, list):
        return given
    return tuple(_program(each, f"programs[{place}]") for place, each in enumerate(given))


def _program(given: object, where: str) -> object:
    if isinstance(given, dict):
        return tuple(_texts(given, where))
    return tuple(given) if isinstance(given, list) else given


def _texts(said: dict[str, Any], where: str) -> Iterator[str]:
    words, order = said.get("words"), said.get("order")
    if said.keys() != {"words", "order"} or not isinstance(words, list | tuple) or not isinstance(order, str):
        raise ValueError(
            f"{where} has keys {', '.join(map(str, said)) or 'none'}; give words, a list, and order, a text"
        )
    ends = list[tuple[str, str] | None]()
    for number, word in enumerate(words):
        match = _WORD.fullmatch(word) if isinstance(word, str) and StateAction.read(word + " ") is None else None
        state = isinstance(word, str) and bool(word) and StateAction.read(word) is not None
        if match is None and not state:
            raise ValueError(f"{where}.words[{number}] is {word!r}, and no entry without its micro-batch, such as 0F")
        ends.append(None if state or match is None else (match[1], match[3]))
    places = {letter: place for place, letter in enumerate(LETTERS[: len(words)])}
    counts = [0] * len(words)
    for letter in order:
        place = places.get(letter)
        if place is None:
            raise ValueError(f"{where}.order has {letter!r}, which stands for none of its {len(words)} words")
        own = ends[place]
        yield str(words[place]) if own is None else f"{own[0]}{counts[place]}{own[1]}"
        counts[place] += 1
