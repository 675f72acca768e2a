"""Computing as a model's blocks do before they exchange something, on every rank, for so long.

Exchanges of a run follow computing: threads that carry them must be woken, caches hold other things, and ranks do not
end at the same moment. An exchange right after another one has none of that.
"""

from __future__ import annotations

import statistics

import torch

from pipeplan.runtime.parallel.device import Clock, Mark

_ROWS, _INNER, _COLUMNS, _WEIGHTS = 8, 1024, 2048, 4
"""A product of few rows with 8 MiB of numbers, and as many weights in turn: a small part of a block, which reads them
as decode steps do."""

_TRIES = 5


class Computing:
    """``count`` products, one after another; of what :meth:`run` did last, :meth:`taken_ns` says how long it took."""

    def __init__(self, device: torch.device) -> None:
        self.count = 0
        self._clock = Clock(device)
        self._rows = torch.ones(_ROWS, _INNER, device=device)
        self._weights = [torch.ones(_INNER, _COLUMNS, device=device) for _ in range(_WEIGHTS)]
        self._spans: list[tuple[Mark, Mark]] = []

    def take(self, ns: int, product_ns: float) -> None:
        """Compute for so long from now on, of products that take so long; not at all for 0."""
        self.count = max(1, round(ns / product_ns)) if ns else 0

    def product_ns(self) -> float:
        """How long a product takes now, by the median of a few tries."""
        self.count, tries = _WEIGHTS, []
        for _ in range(_TRIES):
            self.run()
            tries.append(self.taken_ns() / self.count)
        return max(1.0, statistics.median(tries))

    def run(self) -> None:
        """Compute."""
        if not self.count:
            return
        begin = self._clock.mark()
        for number in range(self.count):
            torch.mm(self._rows, self._weights[number % _WEIGHTS])
        self._spans.append((begin, self._clock.mark()))

    def taken_ns(self) -> int:
        """How long all runs took since it was last asked for."""
        anchor = self._clock.anchor()
        taken = sum(self._clock.resolve(end, anchor) - self._clock.resolve(begin, anchor) for begin, end in self._spans)
        self._spans.clear()
        return taken
