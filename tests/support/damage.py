"""Valid content damaged: values, keys, lists, and bytes. Reading what comes of it must do no more than refuse it.

All chance is that of the generator that is given.
"""

from __future__ import annotations

import contextlib
import copy
import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

__all__ = ["Data", "damage", "damage_bytes", "places"]

Data = Any
Place = tuple[Data, Any]
"""A list or dict, and an index or key in it."""


class Raw:
    """Text put into the file as it is, although it may not be JSON."""

    def __init__(self, text: str) -> None:
        self.text = text


def places(data: Data) -> list[Place]:
    """Every value of a file as its container and key."""
    return list(_places(data))


def _places(data: Data) -> Iterator[Place]:
    keys = data.keys() if isinstance(data, dict) else range(len(data))
    for key in keys:
        yield data, key
        if isinstance(data[key], dict | list):
            yield from _places(data[key])


STRANGE: list[Any] = [
    *(None, True, False, -1, 0, 1, 2, 1.5, -0.0, 1e308, 10**6, 10**6 + 1, 10**9, 2**62, 2**63, 2**64, -(2**63)),
    *("", " ", "0F", "2F0", "1SEND_F0", "02F0", "٢F0", "9999999F0", "block0", "plan", "profile", "\x00", "a\nb"),
    *("\u202e", "\U0001f600", "x" * 300, "x" * 100_000),
    *([], {}, [[]], [{}], {"": ""}, {"\x1b[31m": 1}, {"x" * 1000: 1}, [0] * 1000, list(range(1000)), [None], [1, "a"]),
    *map(Raw, ["NaN", "Infinity", "-Infinity", "1e999", "1" * 5000, "1.0", "01", "0x1", "nul", "'x'", "", ",", "}"]),
    *map(Raw, ['"\\ud800"', '"\\u0000"', "[" * 5000, "[" * 150 + "]" * 150, '{"a":' * 5000 + "1" + "}" * 5000]),
]


def strange(rng: random.Random) -> Any:
    """A value that is hardly ever right where it is put."""
    return copy.deepcopy(rng.choice(STRANGE))


def replace_value(rng: random.Random, data: Data) -> None:
    container, key = rng.choice(places(data))
    container[key] = strange(rng)


def nudge(rng: random.Random, data: Data) -> None:
    """Another number, not far or very far from the one that is there."""
    numbers = [(c, k) for c, k in places(data) if isinstance(c[k], int | float) and not isinstance(c[k], bool)]
    container, key = rng.choice(numbers)
    value = container[key]
    container[key] = rng.choice([value + 1, value - 1, value * 2, value + rng.randint(1, 99), -value, value * 10**6])


def delete(rng: random.Random, data: Data) -> None:
    container, key = rng.choice(places(data))
    del container[key]


def add(rng: random.Random, data: Data) -> None:
    containers = [data, *(c[k] for c, k in places(data) if isinstance(c[k], dict | list))]
    container, value = rng.choice(containers), strange(rng)
    if isinstance(container, dict):
        container[rng.choice(["extra", "", "kind", "0F", "\x07", "é", "x" * 200])] = value
    else:
        container.insert(rng.randint(0, len(container)), value)


def rename(rng: random.Random, data: Data) -> None:
    container, key = rng.choice([(c, k) for c, k in places(data) if isinstance(c, dict)])
    container[rng.choice(["", "extra", key + "x", key.upper(), "01F"])] = container.pop(key)


def exchange(rng: random.Random, data: Data) -> None:
    """Two values of one type change places."""
    container, key = rng.choice(places(data))
    if not isinstance(container[key], dict | list):
        other, other_key = rng.choice([(c, k) for c, k in places(data) if type(c[k]) is type(container[key])])
        container[key], other[other_key] = other[other_key], container[key]


def rearrange(rng: random.Random, data: Data) -> None:
    lists = [c[k] for c, k in places(data) if isinstance(c[k], list) and c[k]]
    chosen = rng.choice(lists)
    how = rng.randrange(4)
    if how == 0:
        rng.shuffle(chosen)
    elif how == 1:
        chosen.append(chosen[rng.randrange(len(chosen))])
    elif how == 2:
        del chosen[rng.randrange(len(chosen)) :]
    else:
        i, j = rng.randrange(len(chosen)), rng.randrange(len(chosen))
        chosen[i], chosen[j] = chosen[j], chosen[i]


def retype(rng: random.Random, data: Data) -> None:
    """The same value written as another type."""
    container, key = rng.choice(places(data))
    container[key] = rng.choice([str, lambda value: [value], lambda value: {"value": value}, lambda _: None])(
        container[key]
    )


def edit_text(rng: random.Random, data: Data) -> None:
    texts = [(c, k) for c, k in places(data) if isinstance(c[k], str) and c[k]]
    container, key = rng.choice(texts)
    text = container[key]
    at = rng.randrange(len(text))
    new = rng.choice(["", "0", "1", "9", "F", "B", "W", ">", "@", "é", "\u0660"])
    container[key] = text[:at] + new + text[at + 1 :]


VALUES: list[Callable[[random.Random, Data], None]] = [
    *(replace_value, delete, add, rename, retype, edit_text, exchange, exchange, rearrange, rearrange),
    *([nudge] * 6),
]


def flip(rng: random.Random, text: bytearray) -> None:
    text[rng.randrange(len(text))] = rng.randrange(256)


def cut(rng: random.Random, text: bytearray) -> None:
    del text[rng.randrange(len(text)) :]


def take_out(rng: random.Random, text: bytearray) -> None:
    at = rng.randrange(len(text))
    del text[at : at + rng.randint(1, 40)]


def repeat(rng: random.Random, text: bytearray) -> None:
    at = rng.randrange(len(text))
    text[at:at] = text[at : at + rng.randint(1, 400)]


def put_in(rng: random.Random, text: bytearray) -> None:
    at = rng.randrange(len(text))
    text[at:at] = rng.choice([b"\xef\xbb\xbf", b"\xff", b"\xc3", b"\x00", b"//x\n", b'"', b"[", b"}", b"1e9", b"-"])


BYTES: list[Callable[[random.Random, bytearray], None]] = [flip, flip, cut, take_out, repeat, put_in]


def damage(rng: random.Random, data: Data, more: Sequence[Any] = ()) -> bytes:
    """A file's content with one to three damages, as text; ``more`` are strange values beside :data:`STRANGE`."""
    data = json.loads(json.dumps(data))
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        if data and places(data):
            with contextlib.suppress(IndexError):  # a file without lists, numbers, or texts
                rng.choice(VALUES)(rng, data)
    if more and rng.random() < 0.3 and data and places(data):
        container, key = rng.choice(places(data))
        container[key] = rng.choice(more)
    text = bytearray(_text(data).encode("utf-8", "surrogatepass"))
    if rng.random() < 0.25:
        damage_bytes(rng, text)
    return bytes(text)


def damage_bytes(rng: random.Random, text: bytearray) -> None:
    """One damage to whatever bytes these are."""
    if text:
        rng.choice(BYTES)(rng, text)


def _text(data: Data) -> str:
    """JSON with raw pieces as they are."""
    pieces: list[str] = []

    def mark(value: object) -> str:
        assert isinstance(value, Raw)
        pieces.append(value.text)
        return f"@raw{len(pieces) - 1}@"

    text = json.dumps(data, default=mark, ensure_ascii=False)
    for index, piece in enumerate(pieces):
        text = text.replace(f'"@raw{index}@"', piece)
    return text
