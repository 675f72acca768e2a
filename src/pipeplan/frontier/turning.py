"""The turning point of a frontier (TensorOpt section 5.1): below it time rises rapidly, above it memory buys little."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["turning_point"]


def turning_point(memory_bytes: npt.ArrayLike, time_ns: npt.ArrayLike) -> int:
    """Which point, of a frontier with memory ascending and time descending.

    The one farthest below the straight line between the ends of the frontier, with memory and time each taken as a
    share of their range; the first where all lie on the line.
    """
    memory, time = np.asarray(memory_bytes, np.float64), np.asarray(time_ns, np.float64)
    if len(memory) < 3:
        return 0
    along = (memory - memory[0]) / (memory[-1] - memory[0])
    above = (time - time[-1]) / (time[0] - time[-1])
    return int(np.argmin(along + above))
