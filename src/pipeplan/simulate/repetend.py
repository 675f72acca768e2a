"""Replaying a schedule for more micro-batches by repeating its repetend (Tessel III-C).

With ``first[source] >= first[target]`` for every dependency, nothing in a copy waits for a later copy, so prefix,
any number of copies and suffix can be strung together without deadlock. A copy gives back what it takes, so
memory stays as it was.
"""

from __future__ import annotations

from pipeplan.errors import UsageError
from pipeplan.model.elements import Repetend
from pipeplan.model.workload import Workload
from pipeplan.simulate.copies import Entry, begins_of, copy_ranges, require_cut, split_order
from pipeplan.simulate.detection import find_repetend
from pipeplan.simulate.steady import repetend_rate, repetend_time, steady_bubble_rate, work_bound
from pipeplan.simulate.timing import Orders

__all__ = [
    "copy_ranges",
    "extend",
    "find_repetend",
    "repetend_rate",
    "repetend_time",
    "steady_bubble_rate",
    "work_bound",
]


def extend(
    workload: Workload, orders: Orders, repetend: Repetend | None, num_microbatches: int
) -> tuple[Workload, list[list[int]]]:
    """The same schedule for more micro-batches, by repeating the repetend (Tessel III-C).

    Returns the larger workload and, per device and link, its order as task numbers of the larger workload's graph.

    Raises:
        UsageError: no repetend, fewer micro-batches than there are, or a number the unroll does not reach.
        InvalidPlanError: the orders do not contain the repetend as stated.
    """
    before = workload.num_microbatches
    if num_microbatches == before:
        return workload, [list(order) for order in orders]
    if repetend is None:
        raise UsageError(
            f"the plan has no repetend, so it holds for its {before} micro-batches only; search one for "
            f"{num_microbatches}: pipeplan search PROFILE --microbatches {num_microbatches}"
        )
    require_cut(workload, repetend.first)
    copies = _num_copies(before, repetend.unroll, num_microbatches)
    larger = workload.with_microbatches(num_microbatches)
    begins = begins_of(workload, orders, repetend.first, repetend.unroll)
    return larger, [
        _renumbered(split_order(workload, resource, order, begins, repetend.unroll), repetend.unroll, copies, larger)
        for resource, order in enumerate(orders)
    ]


def _num_copies(before: int, unroll: int, wanted: int) -> int:
    """How many copies more give the wanted number of micro-batches."""
    if wanted < before:
        raise UsageError(
            f"the plan has {before} micro-batches and can be replayed with more, not with {wanted}; "
            f"search one for fewer: pipeplan search PROFILE --microbatches {wanted}"
        )
    copies, rest = divmod(wanted - before, unroll)
    if rest:
        raise UsageError(
            f"the plan's {before} micro-batches grow by {unroll} at a time (its repetend's unroll), so {wanted} "
            f"cannot be reached; the nearest are --microbatches {wanted - rest} and {wanted - rest + unroll}"
        )
    return copies


def _renumbered(
    parts: tuple[list[Entry], list[Entry], list[Entry]], unroll: int, copies: int, larger: Workload
) -> list[int]:
    """Prefix, copy shifted by 0, U, ... kU micro-batches, suffix shifted by kU."""
    prefix, copy, suffix = parts
    count = larger.num_microbatches
    renumbered = [item * count + m for item, m in prefix]
    for k in range(copies + 1):
        renumbered += [item * count + m + k * unroll for item, m in copy]
    return renumbered + [item * count + m + copies * unroll for item, m in suffix]
