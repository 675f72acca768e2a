"""Costs of all runs of a chain's blocks at once: run i..j has blocks i to j - 1, arrays are [n + 1, n + 1]."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["FloatArray", "largest", "none_empty", "sums"]

FloatArray = npt.NDArray[np.float64]


def sums(values: npt.ArrayLike) -> FloatArray:
    """The sum over every run of one value per block, [n]."""
    until = np.concatenate(([0.0], np.cumsum(np.asarray(values, dtype=np.float64))))
    found: FloatArray = until[None, :] - until[:, None]
    return found


def largest(values: npt.ArrayLike) -> FloatArray:
    """The largest of every run of one value per block, [n]; 0 for what is no run."""
    each = np.asarray(values, dtype=np.float64)
    found = np.zeros((len(each) + 1, len(each) + 1))
    for begin in range(len(each)):
        found[begin, begin + 1 :] = np.maximum.accumulate(each[begin:])
    return found


def none_empty(num_blocks: int) -> npt.NDArray[np.bool_]:
    """Which i..j are runs: those with a block."""
    first = np.arange(num_blocks + 1)
    possible: npt.NDArray[np.bool_] = first[:, None] < first[None, :]
    return possible
