"""State of many blocks as arrays: what it is block by block."""

from __future__ import annotations

import random

import pytest

from builders.profiles import joined
from pipeplan.costs.experts import kept_of
from pipeplan.costs.recipes import RECIPES
from pipeplan.costs.stages import stage_costs
from pipeplan.costs.states import States
from pipeplan.costs.zero import WHOLE, Exchanged, Exchanging, Experts, Zero
from pipeplan.files import Block, Cluster, CostRow, LinkLevel, Recipe, Source
from pipeplan.files.cluster import DeviceKind, MeasuredCurve
from pipeplan.files.profile import TiedParameter
from pipeplan.planning.uniform_space import Blocks
from pipeplan.workload.kinds import STATE_KINDS

ROW = CostRow(microbatch_size=1, forward_ns=1, backward_ns=2)
CLUSTER = Cluster(
    name="two levels",
    source=Source(method="literature"),
    devices=(DeviceKind(name="device", count=32),),
    levels=(
        LinkLevel(name="node", group_size=4, latency_ns=5, bandwidth_bytes_per_s=10**9),
        LinkLevel(name="net", group_size=32, latency_ns=50, bandwidth_bytes_per_s=10**8),
    ),
    measured=(MeasuredCurve(operation="all_gather", level="node", num_devices=4, points=((8, 100), (4096, 900))),),
)


def blocks(rng: random.Random, *, custom: bool) -> list[Block]:
    """Some without parameters, some with experts, some frozen; of some devices that split them have parts whole."""
    found = []
    for number in range(12):
        size = rng.choice([0, 1, 7, rng.randrange(10**6)])
        frozen = rng.choice([0, rng.randrange(100)])
        known = (
            {"parameter_bytes": 4 * size, "optimizer_bytes": 8 * size, "master_bytes": rng.choice([0, 4 * size])}
            if custom
            else {"expert_parameters": rng.randint(0, size)}
        )
        whole = rng.choice([0, (size - known.get("expert_parameters", 0)) // 3])
        known |= {"parameters": size, "frozen_parameters": frozen, "whole_parameters": whole}
        known["whole_frozen_parameters"] = frozen // 2
        found.append(Block(id=f"b{number}", operator="some", costs=(ROW,), **known))
    return found


@pytest.mark.parametrize("recipe", ["custom", *RECIPES])
def test_states_are_those_of_each_block(recipe: str) -> None:
    """Whatever is kept, divided, exchanged, cast at each use, and of experts; and so are the times of exchanges."""
    rng, known = random.Random(recipe), Recipe(name=recipe)
    each = blocks(rng, custom=recipe == "custom")
    states = States.of(each, known)
    for _ in range(40):
        shards, copies, size = rng.choice([1, 2, 4]), rng.choice([1, 2, 4]), rng.choice([1, 2, 4])
        zero = rng.choice([WHOLE, Zero(1, copies), Zero(2, copies), Zero(3, copies)]) if copies > 1 else WHOLE
        experts = (
            Experts.among(size, shards, copies, zero.level, zero.group) if shards * copies % size == 0 else Experts()
        )
        kept, exchanged = states.kept(shards, zero, experts), states.exchanged(shards, zero, experts)
        near = Exchanging.on_first(CLUSTER, shards, copies, zero, experts)
        gather, reduce = exchanged.times(near)
        for place, block in enumerate(each):
            own, state = Exchanged.of(block, known, zero, shards, experts), kept_of(block, known, shards, zero, experts)
            assert kept[place].tolist() == [state[kind] for kind in STATE_KINDS]
            assert own == tuple(int(getattr(exchanged, name)[place]) for name in own._fields)
            assert own.workspace_bytes == exchanged.workspace_bytes[place]
            assert near.times(own) == (gather[place], reduce[place])


def test_what_blocks_share_is_kept_once() -> None:
    """As a stage of all of them keeps it."""
    both = ROW.model_copy(update={"shards": 2})
    chain = joined(
        [Block(id=f"b{number}", operator="some", parameters=101 + number, costs=(both,)) for number in range(4)]
    )
    shared = TiedParameter(name="embedding", blocks=("b0", "b1", "b3"), parameters=57)
    profile = chain.model_copy(update={"recipe": Recipe(name="bf16-mixed"), "tied": (shared,)})
    for zero in (WHOLE, Zero(1, 2), Zero(1, 4)):
        kept = Blocks.of(profile).kept(2, zero, Experts())
        whole = stage_costs(profile, [block.id for block in profile.blocks], 1, zero=zero, shards=2)
        assert (kept.static_bytes, kept.gradient_bytes) == (whole.static_bytes, whole.gradient_bytes)
