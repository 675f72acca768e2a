"""The mini-batch of an iteration, and how it is cut into micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

from pipeplan.errors import UsageError
from pipeplan.model import Placement, Profile

__all__ = ["Batch", "resolve_batch"]


@dataclass(frozen=True, slots=True)
class Batch:
    """How the mini-batch is cut: ``num_microbatches`` micro-batches of ``microbatch_size`` samples."""

    num_microbatches: int
    microbatch_size: int

    @property
    def mini_batch(self) -> int:
        """Samples in one iteration."""
        return self.num_microbatches * self.microbatch_size


def resolve_batch(
    profile: Profile,
    num_devices: int,
    *,
    mini_batch: int | None = None,
    microbatch_size: int | None = None,
    num_microbatches: int | None = None,
    placement: Placement | str = "auto",
) -> Batch:
    """The mini-batch from any two of its numbers, the rest by default.

    Default size: 1 for a profile with a placement, else the largest size all blocks were profiled with, of those that
    divide a given mini-batch where any does; where all stages of a given placement say one size, that. Default number:
    four micro-batches per device.

    Raises:
        UsageError: the three contradict each other or do not divide.
    """
    if mini_batch is not None and microbatch_size is not None and num_microbatches is not None:
        if mini_batch != microbatch_size * num_microbatches:
            raise UsageError(
                f"--mini-batch {mini_batch} is not --microbatches {num_microbatches} x --microbatch-size "
                f"{microbatch_size} = {microbatch_size * num_microbatches}; leave one of them out"
            )
        return Batch(num_microbatches, microbatch_size)
    stated = {stage.microbatch_size for stage in placement.stages} if isinstance(placement, Placement) else set()
    if microbatch_size is None and num_microbatches is None and len(stated) == 1:
        microbatch_size = stated.pop()
    if microbatch_size is None and mini_batch is not None and num_microbatches is not None:
        return Batch(num_microbatches, _divided(mini_batch, num_microbatches, "--microbatches"))
    if microbatch_size is None:
        sizes = profile.microbatch_sizes
        if profile.placement is None and not sizes:
            raise UsageError("the blocks share no profiled micro-batch size; say one with --microbatch-size")
        dividing = [size for size in sizes if mini_batch is not None and mini_batch % size == 0]
        microbatch_size = 1 if profile.placement is not None else (dividing or sizes)[-1]
    if num_microbatches is None:
        if mini_batch is None:
            num_microbatches = 4 * num_devices
        else:
            num_microbatches = _divided(mini_batch, microbatch_size, "--microbatch-size")
    return Batch(num_microbatches, microbatch_size)


def _divided(total: int, by: int, flag: str) -> int:
    if total % by:
        raise UsageError(
            f"--mini-batch {total} is not a multiple of {flag} {by}; the nearest are "
            f"{total // by * by} and {(total // by + 1) * by}"
        )
    return total // by
