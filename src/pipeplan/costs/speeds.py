"""Times on devices of another speed than those whose times a profile has."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cache


def at_speed(ns: int, speed: float) -> int:
    """Ns of what takes ``ns`` at speed 1, rounded up: exactly, with the speed as it is written."""
    return ns if speed == 1 else math.ceil(ns / exactly(speed))


@cache
def exactly(speed: float) -> Fraction:
    """The speed as it is written."""
    return Fraction(repr(speed))
