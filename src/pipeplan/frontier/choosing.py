"""Points of a frontier that are asked for: the turning point, and the quickest that memory allows."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["least_time", "turning_point"]


def turning_point(memory: Sequence[int], time: Sequence[int]) -> int:
    """Where time stops to fall rapidly with more memory (TensorOpt section 5.1), of a frontier by ascending memory.

    The point farthest below the line from the leanest to the fastest, memory and time each measured by their range:
    before it a part of the memory's range buys a larger part of the time's, after it a smaller one.
    """
    width, height = max(memory[-1] - memory[0], 1), max(time[0] - time[-1], 1)
    gains = [(time[0] - t) / height - (m - memory[0]) / width for m, t in zip(memory, time, strict=True)]
    return max(range(len(gains)), key=gains.__getitem__)


def least_time(memory: Sequence[int], time: Sequence[int], limit: int | None) -> int | None:
    """The quickest point that takes no more than ``limit`` bytes; None if none does."""
    fitting = [index for index, bytes_ in enumerate(memory) if limit is None or bytes_ <= limit]
    return min(fitting, key=time.__getitem__, default=None)
