"""A text that a small model can learn, made here: sums in words."""

from __future__ import annotations

__all__ = ["builtin_text"]

_ONES = """
    nought one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
    eighteen nineteen
"""
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_MOST = 49


def builtin_text() -> str:
    """Sentences such as ``two and forty make forty-two.``, of all pairs of numbers up to 49: 90,000 characters."""
    pairs = [(a, b) for a in range(_MOST + 1) for b in range(_MOST + 1)]
    words = [_word(number) for number in range(2 * _MOST + 1)]
    return "".join(f"{words[a]} and {words[b]} make {words[a + b]}.\n" for a, b in pairs)


def _word(number: int) -> str:
    small = _ONES.split()
    if number < len(small):
        return small[number]
    tens, ones = divmod(number, 10)
    return _TENS.split()[tens - 2] + (f"-{small[ones]}" if ones else "")
