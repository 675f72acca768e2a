"""Groups of blocks cost what their blocks cost one after another, in whatever stage they are."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest

from pipeplan import Block, Edge, Profile, UsageError
from pipeplan.costs import joining, stage_costs, stages
from pipeplan.costs.joining import joined
from pipeplan.costs.layers import by_layers, layer_of
from pipeplan.costs.stages import group_costs
from pipeplan.files import CostRow, TiedParameter
from pipeplan.workload.elements import Again


def profile_of(draw: random.Random, count: int) -> Profile:
    """A chain with skips, named tensors, attention cores, several sizes and two numbers of shards."""

    def block(number: int) -> Block:
        rows = []
        core = draw.random() < 0.5
        for shards in (1, 2):
            for size in (1, 2, 4):
                held = draw.randint(10, 99) * size
                more: dict[str, Any] = {"selective_ns": draw.randint(1, 9)} if core else {}
                more |= {"selective_activation_bytes": held // 2} if core else {}
                times = {"forward_ns": draw.randint(1, 99), "input_grad_ns": draw.randint(1, 99)}
                more |= times | {"weight_grad_ns": draw.randint(1, 99), "weight_grad_bytes": draw.randint(0, 9)}
                held_so = {"activation_bytes": held, "workspace_bytes": draw.randint(0, 50)}
                rows.append(CostRow(microbatch_size=size, shards=shards, **held_so, **more))
        operator = draw.choice(["ffn", "ffn", "embedding"])
        state = {"parameter_bytes": 100, "optimizer_bytes": draw.randint(0, 50)}
        return Block(id=f"b{number}", operator=operator, costs=tuple(rows), **state)

    blocks = [block(number) for number in range(count)]
    edges = [Edge(source=one.id, target=other.id, bytes_per_sample=8, tensor="out") for one, other in pairwise(blocks)]
    for _ in range(2):
        source, target = sorted(draw.sample(range(count), 2))
        if target > source + 1:
            edges.append(Edge(source=f"b{source}", target=f"b{target}", bytes_per_sample=8, tensor="out"))
    unique = {(edge.source, edge.target): edge for edge in edges}
    table = TiedParameter(name="table", blocks=("b0", f"b{count - 1}"), parameter_bytes=30)
    return Profile.of("chain", blocks, edges=unique.values()).model_copy(update={"tied": (table,)})


@pytest.mark.parametrize("seed", range(20))
def test_groups_cost_what_their_blocks_cost(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Worked out block by block, or as columns, as of many."""
    draw = random.Random(seed)
    count = draw.randint(3, 8)
    whole = profile_of(draw, count)
    borders = sorted({0, count, *draw.sample(range(1, count), draw.randint(1, count - 1))})
    groups = [[f"b{number}" for number in range(*ends)] for ends in pairwise(borders)]
    with monkeypatch.context() as patched:
        patched.setattr(stages, "MANY", 1 if seed % 2 else 64)
        together = joined(whole, groups, samples=(3,))
    order = together.profile.topological_order()
    assert [list(together.members[name]) for name in order] == groups
    begin, end = sorted(draw.sample(range(len(groups) + 1), 2))
    names = order[begin:end]
    able = [together.profile.by_id[name].operator != "embedding" for name in names]  # ends are never computed again
    ways: list[tuple[Again, ...]] = [(False,) * len(names), tuple(able), ("selective",) * len(names)]
    ways.append(tuple(may and draw.random() < 0.5 for may in able))
    for each in ways:
        for size, shards in ((1, 1), (3, 1), (4, 2)):
            here = stage_costs(together.profile, names, size, shards, recompute=each)
            there = stage_costs(whole, together.blocks(names), size, shards, recompute=together.again(names, each))
            assert (here.forward_ns, here.backward_ns) == (there.forward_ns, there.backward_ns)
            assert (here.input_grad_ns, here.weight_grad_ns) == (there.input_grad_ns, there.weight_grad_ns)
            assert here.weight_grad_bytes == there.weight_grad_bytes
            assert here.activation_bytes >= there.activation_bytes  # a tensor inside of a group and beyond counts twice
            assert here.workspace_bytes >= there.workspace_bytes
            if shards == 1:
                assert here.static_bytes == there.static_bytes


def test_rows_of_all_groups_are_worked_out_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most three times for each size and number of shards, however many groups are unlike: ten thousand blocks took
    half a minute group by group."""
    asked = list[int]()

    def costs(profile: Profile, groups: Any, *rest: Any, **how: Any) -> Any:
        asked.append(len(groups))
        return group_costs(profile, groups, *rest, **how)

    monkeypatch.setattr(joining, "group_costs", costs)
    whole = profile_of(random.Random(1), 40)
    joined(whole, [(f"b{number}", f"b{number + 1}") for number in range(0, 40, 2)])
    assert len(asked) <= 3 * len({(row.microbatch_size, row.shards) for row in whole.blocks[0].costs})
    assert max(asked) == 20


def test_groups_that_keep_more_than_a_block_may_are_refused() -> None:
    blocks = [Block.of(name, "1ms", "2ms", parameters=10**16) for name in "ab"]
    told = "parameter_bytes of blocks 'a' to 'b', which are kept together, add up to 20PB, more than the 10PB they may"
    with pytest.raises(UsageError, match=told):
        joined(Profile.of("large", blocks), [("a", "b")])


def test_layers_by_their_names() -> None:
    assert [layer_of(name) for name in ("layer3.ffn", "model.layers.12", "h.0.attn", "blocks.1", "head", "layer")] == [
        *(3, 12, 0, 1, None, None)
    ]
    order = ["wte", "wpe", "h.0.attn", "h.0.mlp", "h.1", "ln_f", "lm_head"]
    assert by_layers(order, "a tool") == [("wte", "wpe"), ("h.0.attn", "h.0.mlp"), ("h.1",), ("ln_f", "lm_head")]
    for names, said in (
        (["a", "b"], "no block says which layer it is of"),
        (["layer0", "layer2"], "'layer2' stands where layer 1 comes next"),
        (["layer0", "norm", "layer1"], "'layer1' stands where layer 1 comes next"),
        (["x.layer0", "y.layer1"], "a layer of another part of the model"),
    ):
        with pytest.raises(UsageError, match=said):
            by_layers(names, "a tool")
