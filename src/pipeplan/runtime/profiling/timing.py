"""What time some work takes on a device, undisturbed, and what a series of such times tells."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TypeVar

import torch

from pipeplan.errors import ExecutionError, InfeasibleError

__all__ = ["blamed", "drift_of", "num_outliers", "spread_of", "steady", "timed"]

T = TypeVar("T")

_FEW = 6
"""Fewer runs than this tell nothing of drift or outliers."""
_FAR = 3.0
"""Tukey's fences for what is far out: so many interquartile ranges beyond the quartiles."""


def timed(work: Callable[[], T], device: torch.device) -> tuple[T, int]:
    """What some work returns, and how long it takes in ns: by the processor's clock, or by events on the device."""
    if device.type == "cuda":
        event: Callable[..., torch.cuda.Event] = torch.cuda.Event
        start, end = event(enable_timing=True), event(enable_timing=True)
        torch.cuda.synchronize(device)
        start.record()
        result = work()
        end.record()
        end.synchronize()
        return result, round(start.elapsed_time(end) * 1e6)
    begin = time.perf_counter_ns()
    result = work()
    return result, time.perf_counter_ns() - begin


def spread_of(values: Sequence[int]) -> float:
    """Interquartile range divided by the median; 0 for a single value."""
    median = statistics.median(values)
    if len(values) < 2 or median == 0:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return round((high - low) / median, 4)


def drift_of(values: Sequence[int]) -> float:
    """How much the median of the second half is above that of the first, relative to it; 0 for few values."""
    if len(values) < _FEW:
        return 0.0
    half = len(values) // 2
    before, after = statistics.median(values[:half]), statistics.median(values[-half:])
    return after / before - 1 if before > 0 else 0.0


def num_outliers(values: Sequence[int]) -> int:
    """How many values are far above the others; 0 for few values."""
    if len(values) < _FEW:
        return 0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return sum(value > high + _FAR * (high - low) for value in values)


@contextmanager
def steady(device: torch.device) -> Iterator[None]:
    """No garbage collection but between rounds, and only of what came since."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


@contextmanager
def blamed(what: str) -> Iterator[None]:
    """Say what it was, by block and size, if something goes wrong inside.

    Raises:
        InfeasibleError: memory ran out.
        ExecutionError: anything else failed.
    """
    try:
        yield
    except Exception as error:
        if _is_out_of_memory(error):
            raise InfeasibleError(
                f"memory ran out for {what}: {error}; leave the size out of --microbatch, or lower --sequence"
            ) from error
        raise ExecutionError(
            f"{what} failed: {type(error).__name__}: {error}; it would again: change the block, or leave the size out "
            "of --microbatch (batch normalisation, for one, needs 2 samples or more)"
        ) from error


def _is_out_of_memory(error: Exception) -> bool:
    """CUDA has an error of its own; the CPU allocator raises a RuntimeError like any other."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
