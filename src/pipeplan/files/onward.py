"""Lists whose elements go on as those before them: stages, operations and messages that are alike but for numbers.

In a list *in short*, ``{"onward": d, "times": n}`` stands for the next d x n elements: each differs from the one d
before it as that one does from the one d before itself, in numbers alone, of which some are inside texts
(``layers.12.ffn``). A dictionary in short is a list of its pairs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge, Le
from pydantic import TypeAdapter

from pipeplan.files.base import SHORT_FORMS, Content, ShortForm
from pipeplan.workload.elements import MAX_COUNT, Count, Element, Meaning

MOST_TOGETHER = 16
"""Elements that go on together, at most."""

MOST_CHARACTERS = 1 << 26
"""Of JSON that a file says in short: one that says more is not read."""

_LISTS = ("devices", "players", "stages", "operations", "dependencies", "programs", "predicted.memory")
_DICTIONARIES = ("modules", "starts_ns")
_MOST_OF_ONE = MOST_CHARACTERS // 2 // len(_LISTS + _DICTIONARIES)
"""That one of them says in short: less than its part, as numbers grow."""
_LEAST_SPARED = 80
"""Characters that elements are not to be left out for."""

_NUMBER = re.compile("([0-9]+)")
_MOST_SHOWN = 60
_MOST_DIGITS = 9
"""Of a number inside a text; what has more, or begins with 0, is text like what is around it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Onward(Element):
    """Elements that go on as those before them (in a folded plan's lists)."""

    onward: Annotated[
        int,
        Ge(1),
        Le(MOST_TOGETHER),
        Meaning("how many elements go on together: each as the one so many before it, which is as the one before that"),
    ]
    times: Annotated[Count, Meaning("how many times they do")]


class InShort:
    """Annotates a list, or a dictionary, that files may say in short."""

    def __get_pydantic_json_schema__(self, core: Any, handler: Any) -> dict[str, Any]:
        named = {**TypeAdapter(Onward).core_schema, "ref": f"{Onward.__module__}.{Onward.__name__}:0"}
        whole, onward = handler(core), handler.generate_json_schema.generate_inner(named)
        if whole.get("type") == "array":
            each = whole["items"]
            return {**whole, "items": {"anyOf": [*each.get("anyOf", [each]), onward]}}
        key = whole.get("propertyNames", {}) | {"type": "string"}
        pair = {"type": "array", "prefixItems": [key, _values(whole)], "minItems": 2, "maxItems": 2}
        return {"anyOf": [whole, {"type": "array", "items": {"anyOf": [pair, onward]}}]}


def _values(whole: dict[str, Any]) -> Any:
    """The schema of a dictionary's values."""
    (values,) = whole.get("patternProperties", {"": whole.get("additionalProperties")}).values()
    return values


def in_short(plan: Content) -> Content:
    """A plan's content with its lists in short, where devices play programs together; else itself."""
    return _each(plan, _said) if plan.get("players") else plan


def whole(plan: Content) -> Content:
    """The content of a plan that may have lists in short. Raises ValueError, with the place in the file."""
    left = _StillToSay()
    return _each(plan, lambda value, place: _read(value, place, left)) if plan.get("players") else plan


SHORT_FORMS["plan", 2] = ShortForm(in_short, whole, '"players"')


def _each(plan: Content, change: Any) -> Content:
    """The content with each list or dictionary that may be in short as ``change(value, place)`` has it."""
    found = dict(plan)
    for place in (*_LISTS, *_DICTIONARIES):
        *outer, key = place.split(".")
        within = found
        for each in outer:
            if not isinstance(within.get(each), dict):
                break
            within[each] = dict(within[each])
            within = within[each]
        else:
            if isinstance(within.get(key), list | dict):
                within[key] = change(within[key], place)
    return found


def _said(value: Any, place: str) -> Any:
    if isinstance(value, list):
        return shorter(value)
    pairs = [[key, each] for key, each in value.items()]
    short = shorter(pairs)
    return value if len(short) == len(pairs) else short


def shorter(elements: Sequence[Any]) -> list[Any]:
    """A list with what goes on said once. It is as it was where nothing does, or where it would say too much."""
    parts = [_parted(each) for each in elements]
    found, place, said = list[Any](), 0, 0
    while place < len(elements):
        together, times = _going_on(parts, place)
        size = len(_text(elements[place : place + together])) * times
        if size > _LEAST_SPARED and said + size <= _MOST_OF_ONE:
            found.append({"onward": together, "times": times})
            said += size
        else:
            together, times = 1, 1
            found.append(elements[place])
        place += together * times
    return found


_Parts = tuple[Hashable, tuple[int, ...]]
"""An element without its numbers, and these."""


def _going_on(parts: Sequence[_Parts], place: int) -> tuple[int, int]:
    """How many elements go on together from a place, and how many times: most in all; times is 0 where none do."""
    best, most = (1, 0), 0
    for together in range(1, min(MOST_TOGETHER, place // 2) + 1):
        end = place
        while end < len(parts) and _goes_on(parts[end - 2 * together], parts[end - together], parts[end]):
            end += 1
        times = (end - place) // together
        if times * together > most:
            best, most = (together, times), times * together
    return best


def _goes_on(first: _Parts, second: _Parts, third: _Parts) -> bool:
    return first[0] == second[0] == third[0] and all(
        c - b == b - a for a, b, c in zip(first[1], second[1], third[1], strict=True)
    )


def _parted(value: Any) -> _Parts:
    numbers = list[int]()
    return _form(value, numbers), tuple(numbers)


def _form(value: Any, numbers: list[int]) -> Hashable:
    """What a value is without its numbers, which are appended."""
    if type(value) is int:
        numbers.append(value)
        return int
    if isinstance(value, str):
        texts = _pieces(value)
        numbers.extend(int(each) for each in texts[1::2])
        return tuple(texts[::2])
    if isinstance(value, list):
        return (list, *(_form(each, numbers) for each in value))
    if isinstance(value, dict):
        return (dict, *((key, _form(each, numbers)) for key, each in value.items()))
    return repr(value)


def _pieces(text: str) -> list[str]:
    """What is around a text's numbers, and these, in turn."""
    found = [""]
    for place, each in enumerate(_NUMBER.split(text)):
        if place % 2 and len(each) <= _MOST_DIGITS and (each == "0" or each[0] != "0"):
            found += each, ""
        else:
            found[-1] += each
    return found


_Mover = Callable[[int], Any]
"""What a value is after so many times more."""


def _mover(before: Any, value: Any) -> _Mover | None:
    """How a value goes on from one before it; None where it stays as it is. Raises ValueError where it cannot."""
    if type(value) is type(before) is int:
        return None if value == before else lambda time: value + time * (value - before)
    if isinstance(value, str) and isinstance(before, str):
        return None if value == before else _text_mover(_pieces(before), _pieces(value))
    if isinstance(value, list) and isinstance(before, list) and len(value) == len(before):
        return _inner_mover(value, [_mover(one, other) for one, other in zip(before, value, strict=True)])
    if isinstance(value, dict) and isinstance(before, dict) and [*value] == [*before]:
        inner = _inner_mover([*value.values()], [_mover(before[key], each) for key, each in value.items()])
        return inner and (lambda time: dict(zip(value, inner(time), strict=True)))
    if type(value) is not type(before) or value != before:
        raise ValueError(f"goes on from {_short(before)} to {_short(value)}, which differ in more than numbers")
    return None


def _text_mover(before: list[str], pieces: list[str]) -> _Mover:
    if before[::2] != pieces[::2]:
        texts = "".join(before), "".join(pieces)
        raise ValueError(f"goes on from {texts[0]!r} to {texts[1]!r}, which differ in more than numbers")
    pairs = [(int(b), int(b) - int(a)) for a, b in zip(before[1::2], pieces[1::2], strict=True)]

    def moved(time: int) -> str:
        found = [*pieces]
        found[1::2] = [_inside_text(number + time * step, pieces) for number, step in pairs]
        return "".join(found)

    return moved


def _inner_mover(values: list[Any], movers: list[_Mover | None]) -> _Mover | None:
    """Of values together."""
    moving = [(place, mover) for place, mover in enumerate(movers) if mover is not None]

    def moved(time: int) -> list[Any]:
        found = [*values]
        for place, mover in moving:
            found[place] = mover(time)
        return found

    return moved if moving else None


def _short(value: Any) -> str:
    text = _text(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _inside_text(number: int, pieces: list[str]) -> str:
    if not 0 <= number < 10**_MOST_DIGITS:
        text = "".join(pieces)
        raise ValueError(f"goes on from {text!r} to the number {number}, and texts have 0 to {10**_MOST_DIGITS - 1}")
    return str(number)


@dataclass(slots=True)
class _StillToSay:
    """How much a file may still say in short."""

    characters: int = MOST_CHARACTERS


def _read(value: Any, place: str, left: _StillToSay) -> Any:
    if isinstance(value, dict) or place not in _DICTIONARIES:
        return longer(value, place, left) if isinstance(value, list) else value
    found = dict[str, Any]()
    for number, pair in enumerate(longer(value, place, left)):
        if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise ValueError(f"{place}[{number}] is no pair of a name and what is said of it, nor onward and times")
        if pair[0] in found:
            raise ValueError(f"{place}[{number}] is of {pair[0]}, as one before it is")
        found[pair[0]] = pair[1]
    return found


def longer(elements: Sequence[Any], place: str, left: _StillToSay | None = None) -> list[Any]:
    """A list with all that goes on. Raises ValueError, with the place, where elements cannot."""
    left = left or _StillToSay()
    found = list[Any]()
    for number, each in enumerate(elements):
        if isinstance(each, dict) and "onward" in each:
            try:
                _require_onward(each, len(found))
                found += _gone_on(found[-2 * each["onward"] :], each["onward"], each["times"], left)
            except ValueError as error:
                raise ValueError(f"{place}[{number}] {error}") from None
        else:
            found.append(each)
    return found


def _require_onward(said: dict[str, Any], before: int) -> None:
    together, times = said.get("onward"), said.get("times")
    if said.keys() != {"onward", "times"} or type(together) is not int or type(times) is not int:
        raise ValueError(f"has keys {', '.join(map(str, said))}; give onward and times, two numbers, and no more")
    if not (1 <= together <= MOST_TOGETHER and 1 <= times <= MAX_COUNT):
        raise ValueError(
            f"lets {together} go on {times} times; onward is 1 to {MOST_TOGETHER}, and times are 1 to {MAX_COUNT}"
        )
    if 2 * together > before:
        raise ValueError(f"goes on from the {2 * together} elements before it, and there are {before}")


def _gone_on(before: Sequence[Any], together: int, times: int, left: _StillToSay) -> list[Any]:
    """What follows twice so many elements."""
    last = before[together:]
    left.characters -= len(_text([*last])) * times
    if left.characters < 0:
        raise ValueError(f"says more in short than the {MOST_CHARACTERS} characters that a file may")
    movers = [_mover(one, other) for one, other in zip(before[:together], last, strict=True)]
    pairs = [*zip(last, movers, strict=True)]
    return [mover(time) if mover else value for time in range(1, times + 1) for value, mover in pairs]


_text = json.JSONEncoder(ensure_ascii=False).encode
