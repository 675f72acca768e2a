"""Conversion between what people type (``3.2ms``, ``80GB``, ``80GiB``) and integers (``_ns``, ``_bytes``)."""

from __future__ import annotations

import re
from collections.abc import Callable

from pipeplan.errors import SumError, UsageError

MAX_NS = 10**15
"""Longest duration a file may state, in ns (11.5 days): sums of a million of them stay in 64 bits less one."""

MAX_BYTES = 10**16
"""Largest size a file may state, in bytes (10 PB)."""


MAX_LOAD_FACTOR = 65_536
"""Times the mean that the busiest of a group's devices may be given: as many as there can be devices."""


MAX_STRETCH = 1e15
"""Times a run may be as long as its plan: one of actions of a few ns takes as long as processes take."""


MAX_PRICE = 1e15
"""Highest price of a device an hour that a file may state, in its currency: sums over devices and hours stay finite."""


MAX_TOTAL = 2**60
"""Most that an iteration may come to, in ns (36.6 years) or bytes (1.15 EB): sums of it are counted in 64 bits."""


def require_sum(where: str, what: str, value: int, unit: str, most: int, remedy: str) -> None:
    """Refuse a sum of valid numbers that is larger than it may be.

    Args:
        where: the file.
        what: which sum, and where in the file or in what is made of it.
        value: what it comes to.
        unit: ``ns`` or ``bytes``.
        most: what it may be.
        remedy: what to change.

    Raises:
        SumError: it is larger.
    """
    if value > most:
        shown = format_bytes if unit == "bytes" else format_ns
        raise SumError(f"{where}: {what} add up to {shown(value)}, more than the {shown(most)} they may; {remedy}")


def ns_of(value: str | float) -> int:
    """Nanoseconds of a duration as text with a unit, see :func:`parse_ns`, or as a number of seconds.

    Raises:
        UsageError: it is neither, or out of range.
    """
    if isinstance(value, str):
        return parse_ns(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{value!r} is not a duration; give seconds, or text with a unit such as '3.2ms'")
    if not 0 <= value * 1e9 <= MAX_NS:
        raise UsageError(f"{value!r} seconds are out of range: a duration is from 0 to {format_ns(MAX_NS)}")
    return round(value * 1e9)


def bytes_of(value: str | int) -> int:
    """Bytes of a size as text with a unit, see :func:`parse_bytes`, or as a number of bytes.

    Raises:
        UsageError: it is neither, or out of range.
    """
    if isinstance(value, str):
        return parse_bytes(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
        raise UsageError(f"{value!r} is not a size; give whole bytes, or text with a unit such as '16GB'")
    if not 0 <= value <= MAX_BYTES:
        raise UsageError(f"{value!r} bytes are out of range: a size is from 0 to {format_bytes(MAX_BYTES)}")
    return int(value)


def parse_ns(text: str) -> int:
    """Nanoseconds of a duration with a unit, such as ``3.2ms``, ``10us``, ``1 s``, ``5min`` or ``1h``; or ``0``.

    Raises:
        UsageError: the text is not a duration, has no unit, or is negative or above ``MAX_NS``.
    """
    import math

    from quantiphy import QuantiPhyError, Quantity

    if _lacks_unit(text, lambda _: "s", "ms", "milliseconds"):
        return 0
    wrong = UsageError(f"{text!r} is not a duration; write a number and a unit, such as 30s, 3.2ms, 10us or 5min")
    if not _NUMBER_AND_UNIT.fullmatch(text.strip()):
        raise wrong
    try:
        number, seconds = text.strip().replace("µs", "us"), 1.0
        for unit, length in (("min", 60.0), ("h", 3600.0)):
            if number.endswith(unit):
                number, seconds = number.removesuffix(unit) + "s", length
        quantity = Quantity(number)
    except QuantiPhyError:
        raise wrong from None
    if quantity.units != "s":
        raise wrong
    if seconds != 1.0:
        quantity = Quantity(quantity * seconds, "s")
    if not math.isfinite(quantity) or not 0 <= quantity * 1e9 <= MAX_NS:
        raise UsageError(f"{text!r} is out of range: a duration is from 0 to {format_ns(MAX_NS)}")
    return round(quantity * 1e9)


def parse_bytes(text: str) -> int:
    """Bytes of a size with a unit, such as ``80GB`` (10^9), ``80GiB`` (2^30), ``512B`` or ``1.5MB``; or ``0``.

    Raises:
        UsageError: the text is not a size, has no unit, or is negative or above ``MAX_BYTES``.
    """
    from pydantic import ByteSize, TypeAdapter, ValidationError

    if _lacks_unit(text, _usual_unit, "B", "bytes"):
        return 0
    wrong = UsageError(f"{text!r} is not a size; write a number and a unit, such as 80GB, 80GiB or 512MB")
    if not _NUMBER_AND_UNIT.fullmatch(text.strip()):
        raise wrong
    try:
        size = int(TypeAdapter(ByteSize).validate_python(text.strip()))
    except (ValidationError, OverflowError, ValueError):
        raise wrong from None
    if not 0 <= size <= MAX_BYTES:
        raise UsageError(f"{text!r} is out of range: a size is from 0 to {format_bytes(MAX_BYTES)}")
    return size


_NUMBER_AND_UNIT = re.compile(r"-?[0-9]*\.?[0-9]+(e-?[0-9]+)?\s*[A-Za-zµ]+")
"""One number and one unit: of more, such as ``3,5GB``, libraries take what they know and leave out the rest."""


def _lacks_unit(text: str, unit: Callable[[float], str], other: str, name: str) -> bool:
    """Whether a text is 0, which needs no unit.

    Raises:
        UsageError: it is another number without one; the text has the two likely readings.
    """
    bare = text.strip()
    if not re.fullmatch(r"[0-9]*\.?[0-9]+", bare):
        return False
    if float(bare) == 0:
        return True
    raise UsageError(f"{bare} of what? {bare}{unit(float(bare))}, or {bare} {name} as {bare}{other}")


def _usual_unit(size: float) -> str:
    """What a size is likely to be in, by its number."""
    return "GB" if size < 1e3 else "MB" if size < 1e6 else "kB"


def format_ns(ns: float) -> str:
    """A duration for people, with four significant digits: ``3.2ms``; nothing is ``0``."""
    for factor, unit in ((1e9, "s"), (1e6, "ms"), (1e3, "us")):
        if abs(ns) >= factor:
            return f"{_digits(_divided(ns, factor))}{unit}"
    return f"{_digits(ns)}ns" if ns else "0"


def format_bytes(size: float) -> str:
    """A size for people in decimal units, with four significant digits: ``1.5GB``; nothing is ``0``."""
    for factor, unit in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(size) >= factor:
            return f"{_digits(_divided(size, factor))}{unit}"
    return f"{_digits(size)}B" if size else "0"


def rounded_up(size: int) -> int:
    """The size with three digits that are not below it, as it can be typed again."""
    unit: int = 10 ** max(0, len(str(size)) - 3)
    return -(-size // unit) * unit


def named_devices(*counts: int) -> str:
    """Numbers of devices in words, least first: ``1 device``, ``1, 2, 4 devices``."""
    return f"{', '.join(map(str, counts))} device{'s' if counts[-1] != 1 else ''}"


_WHOLE = 10**300
"""Beyond it are whole numbers that no float has."""


def _divided(value: float, factor: float) -> float:
    return value / factor if abs(value) < _WHOLE else int(value) // int(factor)


def _digits(value: float) -> str:
    """Four significant digits without an exponent and without trailing zeros."""
    if abs(value) >= 1000:
        return f"{value:.0f}" if abs(value) < _WHOLE // 10**16 else str(int(value))
    return f"{value:.4g}"
