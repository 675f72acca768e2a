"""Random small scheduling problems for the property tests."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st

from builders.small_plans import with_tail
from pipeplan.costs import build_workload
from pipeplan.files import Block, CostRow, Edge, PlacedStage, Placement, Profile, Source
from pipeplan.workload.one_microbatch import OneMicrobatch

__all__ = ["problems", "with_tails"]

times = st.integers(1, 5)


@st.composite
def problems(draw: st.DrawFn, max_stages: int = 3, num_microbatches: int = 4) -> OneMicrobatch:
    """Two or three stages on two or three devices, joined in any way or not, with lags; most have little memory.

    One stage may have its backward split: four to seven operations in all.
    """
    num_devices = draw(st.sampled_from([2, 2, 3]))
    devices = draw(st.lists(_group(num_devices), min_size=2, max_size=max_stages))
    split = draw(st.none() | st.integers(0, len(devices) - 1))
    profile = Profile(
        name="random",
        source=Source(method="literature"),
        blocks=tuple(draw(_block(index, len(group), index == split)) for index, group in enumerate(devices)),
        edges=draw(_edges(len(devices))),
    )
    stages = tuple(
        PlacedStage(blocks=(f"b{index}",), devices=group, shards=len(group)) for index, group in enumerate(devices)
    )

    def build(memory: list[int | None]) -> OneMicrobatch:
        return OneMicrobatch.of(
            build_workload(
                profile,
                Placement(strategy="random", num_devices=num_devices, stages=stages),
                num_microbatches=num_microbatches,
                microbatch_size=1,
                split_backward=split is not None,
                memory_bytes=memory,
            )
        )

    free = build([None] * num_devices)
    spare = draw(st.sampled_from([0, 1, 2, 3, None]))
    if spare is None:
        return free
    group_of = range(num_devices) if free.reduction is None else free.reduction.groups
    return build([free.needed_bytes(group_of[device]) + spare for device in range(num_devices)])


@st.composite
def with_tails(draw: st.DrawFn, max_stages: int = 2, num_microbatches: int = 2) -> OneMicrobatch:
    """The same, with gradients to sum, of stages and of what they share, steps, and parameters to gather.

    Some stages may sum theirs in two or three buckets.
    """
    problem = draw(problems(max_stages, num_microbatches))
    workload = problem.workload if problem.reduction is None else problem.reduction.workload
    return OneMicrobatch.of(with_tail(workload, draw(st.randoms(use_true_random=False))))


def _group(num_devices: int) -> st.SearchStrategy[tuple[int, ...]]:
    """One device in most cases, else two or all."""
    alone = [(device,) for device in range(num_devices)]
    pairs = list(itertools.combinations(range(num_devices), 2))
    return st.sampled_from([*alone, *alone, *alone, *pairs, tuple(range(num_devices))])


@st.composite
def _block(draw: st.DrawFn, index: int, shards: int, split: bool) -> Block:
    row = {
        "microbatch_size": 1,
        "shards": shards,
        "forward_ns": draw(times),
        "backward_ns": draw(times),
        "activation_bytes": draw(st.sampled_from([2, 1, 3, 0])),
        "workspace_bytes": draw(st.integers(0, 1)),
    }
    if split:
        row |= {"input_grad_ns": draw(times), "weight_grad_ns": draw(times)}
        row |= {"weight_grad_bytes": draw(st.integers(0, 4))}
    return Block(id=f"b{index}", operator="x", costs=(CostRow.model_validate(row),))


@st.composite
def _edges(draw: st.DrawFn, num_stages: int) -> tuple[Edge, ...]:
    """A chain in most cases; else each pair of stages may be joined."""
    chain = draw(st.sampled_from([True, True, False]))
    pairs = [
        (source, target)
        for source, target in itertools.combinations(range(num_stages), 2)
        if (target == source + 1 if chain else draw(st.booleans()))
    ]
    return tuple(Edge(source=f"b{s}", target=f"b{t}", transfer_ns=draw(st.integers(0, 2))) for s, t in pairs)
