"""Random small scheduling problems for the property tests."""

from __future__ import annotations

from hypothesis import assume
from hypothesis import strategies as st

from pipeplan.costs import build_workload
from pipeplan.errors import InfeasibleError
from pipeplan.model import Block, CostRow, Edge, PlacedStage, Placement, Profile, Source
from pipeplan.schedule.problem import Problem

__all__ = ["problems"]

times = st.integers(1, 5)
groups = st.sampled_from([(0,), (1,), (0, 1)])


@st.composite
def problems(draw: st.DrawFn, max_stages: int = 3, num_microbatches: int = 4) -> Problem:
    """Two or three stages on two devices, joined or not, lags, perhaps a memory cap; of two one may be split."""
    devices = draw(st.lists(groups, min_size=2, max_size=max_stages))
    split = draw(st.sampled_from([None, 0, 1])) if len(devices) == 2 else None
    blocks = []
    for index, group in enumerate(devices):
        held = draw(st.integers(0, 3))
        row = {
            "microbatch_size": 1,
            "shards": len(group),
            "forward_ns": draw(times),
            "backward_ns": draw(times),
            "activation_bytes": held,
            "workspace_bytes": draw(st.integers(0, 1)),
        }
        if index == split:
            row |= {"input_grad_ns": draw(times), "weight_grad_ns": draw(times)}
            row |= {"weight_grad_bytes": draw(st.integers(0, 4))}
        blocks.append(Block(id=f"b{index}", operator="x", costs=(CostRow.model_validate(row),)))
    edges = tuple(
        Edge(source=f"b{index}", target=f"b{index + 1}", transfer_ns=draw(st.integers(0, 2)))
        for index in range(len(devices) - 1)
        if len(devices) == 3 or draw(st.booleans())
    )
    placement = Placement(
        strategy="random",
        num_devices=2,
        stages=tuple(
            PlacedStage(blocks=(f"b{index}",), devices=group, shards=len(group)) for index, group in enumerate(devices)
        ),
    )
    profile = Profile(name="random", source=Source(method="literature"), blocks=tuple(blocks), edges=edges)
    memory = draw(st.none() | st.integers(1, 12))
    workload = build_workload(
        profile,
        placement,
        num_microbatches=num_microbatches,
        microbatch_size=1,
        split_backward=split is not None,
        memory_bytes=[memory, memory],
    )
    try:
        return Problem.of(workload)
    except InfeasibleError:
        assume(False)
        raise
