"""The turning point of a frontier (TensorOpt section 5.1): below it time rises rapidly, above it memory buys little."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["turning_point"]


_ROUNDING = 1e-9


def turning_point(memory_bytes: npt.ArrayLike, time_ns: npt.ArrayLike) -> int | None:
    """Which point, of a frontier with memory ascending and time descending; None where there is no such point.

    The one farthest below the straight line between the ends of the frontier, with memory and time each taken as a
    share of their range. There is none where no point lies below the line.
    """
    memory, time = np.asarray(memory_bytes, np.float64), np.asarray(time_ns, np.float64)
    if len(memory) < 3:
        return None
    along = (memory - memory[0]) / (memory[-1] - memory[0])
    above = (time - time[-1]) / (time[0] - time[-1])
    farthest = int(np.argmin(along + above))
    return farthest if along[farthest] + above[farthest] < 1 - _ROUNDING else None
