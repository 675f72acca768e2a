"""Requests of a simulation: when they come, how long their prompts are, and how many tokens they are going to write."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

Lengths = Callable[[random.Random], int]
"""Draws a number of tokens."""


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """A request: when it arrives [ns], tokens of its prompt, and tokens that it writes, which nobody knows before."""

    arrival_ns: float
    prefix_tokens: int
    new_tokens: int

    def __post_init__(self) -> None:
        if not (self.arrival_ns >= 0 and self.prefix_tokens > 0 and self.new_tokens > 0):
            raise ValueError(f"{self} is no request: it arrives, has a prompt and writes at least a token")


def always(tokens: int) -> Lengths:
    """All as long."""
    return lambda draw: tokens


def between(low: int, high: int) -> Lengths:
    """Any length from ``low`` to ``high``, as likely."""
    return lambda draw: draw.randint(low, high)


def about(mean: float) -> Lengths:
    """Geometric: after each token as likely to end as after any other; many short ones, a few very long."""
    return lambda draw: 1 + int(math.log(1.0 - draw.random()) / math.log(1.0 - 1.0 / mean)) if mean > 1 else 1


def drawn(
    count: int, prefix: Lengths, new: Lengths, *, per_second: float = math.inf, seed: int = 0
) -> Iterator[ServedRequest]:
    """So many requests, arriving independently at a mean rate (Poisson), or all at once."""
    draw, now = random.Random(seed), 0.0
    for _ in range(count):
        now += 0.0 if math.isinf(per_second) else 1e9 * draw.expovariate(per_second)
        yield ServedRequest(now, prefix(draw), new(draw))
