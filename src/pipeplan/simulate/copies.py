"""Where the orders of a schedule contain a repetend: prefix, copy and suffix on each device.

A repetend (Tessel III-C) is said by ``first`` and ``unroll``: on each device the *copy* is a contiguous run in
which every operation of the device occurs ``unroll`` times, on micro-batches ``first[operation]`` and on. What
runs before it is the prefix, what runs after it the suffix.

The orders of links are cut likewise, where a message's ``first`` is not stated: it lies between those of the
operations at its ends, and of the places where a link's order can be cut it is the last.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pipeplan.errors import InvalidPlanError, UsageError
from pipeplan.model.elements import Repetend
from pipeplan.model.workload import Workload
from pipeplan.simulate.timing import Orders

__all__ = ["Entry", "begins_of", "copy_ranges", "link_begins", "require_cut", "require_equal_sizes", "split_order"]

Entry = tuple[int, int]
"""An action or message as (item, micro-batch), where all micro-batches have one size."""


def copy_ranges(workload: Workload, orders: Orders, repetend: Repetend) -> list[range]:
    """Positions of the copy in each device's (and link's) order; empty for a device without actions.

    Raises:
        InvalidPlanError: the orders do not contain the repetend as stated.
    """
    begins = begins_of(workload, orders, repetend.first, repetend.unroll)
    found = []
    for resource, order in enumerate(orders):
        prefix, copy, _ = split_order(workload, resource, order, begins, repetend.unroll)
        found.append(range(len(prefix), len(prefix) + len(copy)))
    return found


def begins_of(workload: Workload, orders: Orders, first: Mapping[str, int], unroll: int) -> list[int]:
    """[item] its first micro-batch in the copy: stated for operations, told from the links' orders for transfers.

    Raises:
        InvalidPlanError: a link's order cannot be cut.
    """
    begins = [first[operation.id] for operation in workload.operations] + [0] * len(workload.transfers)
    for link, order in zip(workload.links, orders[len(workload.devices) :], strict=True):
        entries = [divmod(task, workload.num_microbatches) for task in order]
        found = link_begins(workload, entries, begins, unroll, dict.fromkeys(sorted({x for x, _ in entries}), 0))
        if found is None:
            raise InvalidPlanError(
                f"the link from device {link[0]} to {link[1]} carries its messages in an order that has no part for "
                "the repetend"
            )
        for item, begin in found.items():
            begins[item] = begin
    return begins


def link_begins(
    workload: Workload, entries: Sequence[Entry], begins: Sequence[int], unroll: int, passed: Mapping[int, int]
) -> dict[int, int] | None:
    """{transfer: its first micro-batch in the copy} for the last place where a link's order can be cut; None if none.

    No message of a copy waits for a later copy, and none is waited for by an earlier one: ``begins`` [operation]
    bound a transfer's by its source's and its target's. ``passed`` {transfer: micro-batches} are those before the first
    place to be considered.
    """
    ends = {item: workload.transfers[item - len(workload.operations)] for item in passed}
    counts, last = dict(passed), {item: count - 1 for item, count in passed.items()}
    found: dict[int, int] | None = None
    for at in range(sum(passed.values()), sum(begins[ends[item].source] for item in passed) + 1):
        if (
            all(begins[ends[x].target] <= counts[x] <= begins[ends[x].source] for x in counts)
            and all(last[x] == counts[x] - 1 for x in counts)
            and sorted(entries[at : at + unroll * len(counts)])
            == [(x, counts[x] + u) for x in counts for u in range(unroll)]
        ):
            found = dict(counts)
        if at < len(entries):
            item, m = entries[at]
            counts[item], last[item] = counts[item] + 1, max(last[item], m)
    return found


def split_order(
    workload: Workload, resource: int, order: Sequence[int], begins: Sequence[int], unroll: int
) -> tuple[list[Entry], list[Entry], list[Entry]]:
    """Prefix, copy and suffix of the order of a device or link; ``begins`` [item] are micro-batches.

    Raises:
        InvalidPlanError: the order is not made like that; the text names the first action out of place.
    """
    entries = [divmod(task, workload.num_microbatches) for task in order]
    here = {item for item, _ in entries}
    begin = sum(begins[item] for item in here)
    end = begin + unroll * len(here)
    what = f"device {resource}" if resource < len(workload.devices) else "a link"
    if end > len(entries):
        raise InvalidPlanError(
            f"{what} runs {len(entries)} actions, too few for the repetend, whose {unroll} of each operation "
            f"would be actions {begin} to {end - 1}"
        )
    parts = entries[:begin], entries[begin:end], entries[end:]
    ranges = ((-math.inf, 0), (0, unroll), (unroll, math.inf))
    for index, (part, (low, high)) in enumerate(zip(parts, ranges, strict=True)):
        for item, m in part:
            if not low <= m - begins[item] < high:
                raise InvalidPlanError(
                    f"{what} runs {workload.label(item, m)} "
                    f"{('before', 'inside', 'after')[index]} the repetend, which has its micro-batches "
                    f"{begins[item]} to {begins[item] + unroll - 1}"
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
    """Require that all micro-batches are alike on all stages; raises UsageError."""
    for index, stage in enumerate(workload.stages):
        if stage.microbatch_size != workload.microbatch_size:
            raise UsageError(
                f"a repetend needs one micro-batch size for all stages; stages[{index}] has "
                f"{stage.microbatch_size}, the plan {workload.microbatch_size}"
            )
    if not workload.is_uniform:
        raise UsageError("a repetend needs one route, no micro-batch in parts and no dependency with counts of its own")
