"""Numbers as JSON shows them."""

from __future__ import annotations

from fractions import Fraction

__all__ = ["number"]


def number(value: Fraction) -> float:
    """An int where it is one, for readable JSON."""
    return int(value) if value.denominator == 1 else float(value)
