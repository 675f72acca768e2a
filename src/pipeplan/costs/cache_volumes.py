"""What devices send each other in a decode step when they split attention: by heads, or along the cache.

Cache parallelism (thesis, section 4.4; the field's word is decode context parallelism): each device has a piece of
every request's cache and all else of its own requests. Before attention, queries, keys and values of all requests are
gathered; after it, what each device found for a request goes to the one whose request it is: the mixture, and per head
the largest score and the sum of exponentials.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

Kept = Literal["dp", "tp", "cp", "cp-q"]
"""How devices share a decode step: each its own requests (``dp``), each some heads of all (``tp``), each a piece of
every cache (``cp``), and the same with queries alone gathered, new keys and values sent to one owner (``cp-q``)."""

KEPT: tuple[Kept, ...] = get_args(Kept)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One layer's attention: numbers of a token's hidden state, of its queries, of what is ``written`` of it to the
    cache (keys and values, or latents) and of the ``mixture`` that is found for it, and heads of the queries.
    """

    hidden: int
    queries: int
    written: int
    mixture: int
    heads: int

    @classmethod
    def of(cls, hidden: int, heads: int, kv_heads: int | None = None, head_size: int | None = None) -> AttentionShape:
        """By heads, as configurations have them: as many for keys, and of hidden / heads, unless it is said."""
        size = head_size or hidden // heads
        return cls(hidden, heads * size, 2 * (kv_heads or heads) * size, heads * size, heads)

    @property
    def keys(self) -> int:
        """Half of what is written, where that is keys and values."""
        return self.written // 2


@dataclass(frozen=True, slots=True)
class StepVolume:
    """What one device sends in a decode step and layer: ``numbers`` of the model's type, ``statistics`` of attention,
    in ``collectives`` of so many ``steps`` altogether.
    """

    numbers: Fraction
    statistics: Fraction
    collectives: int
    steps: int

    def bytes(self, width: int, statistic_width: int = 4) -> float:
        """Bytes, where a number and a statistic have so many."""
        return float(self.numbers * width + self.statistics * statistic_width)


def step_volume(kept: Kept, shape: AttentionShape, requests: int, devices: int, statistics: int = 2) -> StepVolume:
    """What a device sends for ``requests`` (of all devices together), by rings and direct sends.

    ``statistics`` are those of a head: as the text has it the largest score and a sum; the logarithm of the sum of
    exponentials, which torch's attention gives and runs send, is 1.

    Raises:
        ValueError: there is no device or request.
    """
    if requests < 1 or devices < 1:
        raise ValueError(f"{requests} requests on {devices} devices are no decode step")
    others = devices - 1
    part = Fraction(others * requests, devices)
    if kept == "dp" or not others:
        return StepVolume(Fraction(), Fraction(), 0, 0)
    if kept == "tp":
        return StepVolume(4 * part * shape.hidden, Fraction(), 2, 4 * others)
    found = part * shape.mixture, statistics * part * shape.heads
    if kept == "cp":
        return StepVolume(part * (shape.queries + shape.written) + found[0], found[1], 2, 2 * others)
    sent = part * shape.written / devices  # in the exchange of the queries, to those that keep them
    return StepVolume(part * shape.queries + sent + found[0], found[1], 2, 2 * others)


def printed_volume(kept: Kept, hidden: int, heads: int, requests: int, devices: int) -> Fraction:
    """Numbers that a device sends as the text prints it (section 4.4, one byte for each).

    Its two formulas count differently: an all-reduce as if every device sent all of its array to all others, and the
    all-to-all as half of what all devices send. :func:`step_volume` counts all of them alike.

    Raises:
        ValueError: a form that the text does not have.
    """
    others, all_of = devices - 1, Fraction(requests)
    if kept == "tp":
        return 4 * others * all_of * hidden
    if kept == "cp":
        return others * 3 * all_of * hidden / devices + others * all_of * (hidden + 2 * heads) / 2
    raise ValueError(f"the text prints no volume of {kept}")
