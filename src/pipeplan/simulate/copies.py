"""Where the orders of a schedule contain a repetend: prefix, copy and suffix on each device.

A repetend (Tessel III-C) is said by ``first`` and ``unroll``: on each device the *copy* is a contiguous run in
which every operation of the device occurs ``unroll`` times, on micro-batches ``first[operation]`` and on. What
runs before it is the prefix, what runs after it the suffix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeplan.errors import InvalidPlanError, UsageError
from pipeplan.model.plan import Repetend
from pipeplan.model.workload import Workload
from pipeplan.simulate.timing import Orders

__all__ = ["Entry", "copy_ranges", "require_cut", "require_equal_sizes", "split_order"]

Entry = tuple[int, int]
"""An action as (operation's index, micro-batch), where all micro-batches have one size."""


def copy_ranges(workload: Workload, orders: Orders, repetend: Repetend) -> list[range]:
    """Positions of the copy in each device's order; empty for a device without actions.

    Raises:
        InvalidPlanError: the orders do not contain the repetend as stated.
    """
    found = []
    for device, order in enumerate(orders):
        prefix, copy, _ = split_order(workload, device, order, repetend.first, repetend.unroll)
        found.append(range(len(prefix), len(prefix) + len(copy)))
    return found


def split_order(
    workload: Workload, device: int, order: Sequence[int], first: Mapping[str, int], unroll: int
) -> tuple[list[Entry], list[Entry], list[Entry]]:
    """Prefix, copy and suffix of one device's order.

    Raises:
        InvalidPlanError: the order is not made like that; the text names the first action out of place.
    """
    entries = [divmod(task, workload.num_microbatches) for task in order]
    begins = {operation: first[workload.operations[operation].id] for operation, _ in entries}
    begin = sum(begins.values())
    end = begin + unroll * len(begins)
    if end > len(entries):
        raise InvalidPlanError(
            f"device {device} runs {len(entries)} actions, too few for the repetend, whose {unroll} of each operation "
            f"would be actions {begin} to {end - 1}"
        )
    parts = entries[:begin], entries[begin:end], entries[end:]
    for index, part in enumerate(parts):
        for operation, m in part:
            if _part_of(m - begins[operation], unroll) != index:
                raise InvalidPlanError(
                    f"device {device} runs {workload.operations[operation].id}{m} "
                    f"{('before', 'inside', 'after')[index]} the repetend, which has its micro-batches "
                    f"{begins[operation]} to {begins[operation] + unroll - 1}"
                )
    return parts


def require_cut(workload: Workload, first: Mapping[str, int]) -> None:
    """Require equal micro-batch sizes, and that no action of a copy waits for a later copy.

    Raises:
        UsageError: stages have micro-batches of unequal sizes.
        InvalidPlanError: ``first`` makes a copy wait for a later one.
    """
    require_equal_sizes(workload)
    for dependency in workload.dependencies:
        source, target = dependency.source, dependency.target
        if first[source] < first[target]:
            raise InvalidPlanError(
                f"repetend.first has {target} from micro-batch {first[target]} and {source}, which it waits for, "
                f"from {first[source]}: a copy would wait for a later one"
            )


def require_equal_sizes(workload: Workload) -> None:
    """Require one micro-batch size for all stages; raises UsageError."""
    for index, stage in enumerate(workload.stages):
        if stage.microbatch_size != workload.microbatch_size:
            raise UsageError(
                f"a repetend needs one micro-batch size for all stages; stages[{index}] has "
                f"{stage.microbatch_size}, the plan {workload.microbatch_size}"
            )


def _part_of(offset: int, unroll: int) -> int:
    """0 before, 1 inside, 2 after the copy, for a micro-batch this far from the copy's first."""
    return 0 if offset < 0 else 1 if offset < unroll else 2
