"""Costs of many blocks as columns: to the last byte those of rows, block by block, and the same refusals."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pipeplan.costs import stages
from pipeplan.costs.columns import Columns
from pipeplan.costs.recipes import RECIPES
from pipeplan.costs.stages import group_costs
from pipeplan.costs.zero import WHOLE, Exchanging, Experts, Zero
from pipeplan.errors import UsageError
from pipeplan.files import Block, Cluster, CostRow, Edge, LinkLevel, Profile, Recipe, Source
from pipeplan.files.cluster import DeviceKind
from pipeplan.files.profile import TiedParameter
from pipeplan.units import MAX_BYTES, MAX_NS
from pipeplan.workload.elements import Recompute
from pipeplan.workload.kinds import MEMORY_KINDS, STATE_KINDS, MemoryBytes
from support.marks import one_in

NUM_BLOCKS = 9
SIZES = (1, 2, 5)
CLUSTER = Cluster(
    name="two levels",
    source=Source(method="literature"),
    devices=(DeviceKind(name="device", count=16),),
    levels=(
        LinkLevel(name="node", group_size=4, latency_ns=5, bandwidth_bytes_per_s=10**10),
        LinkLevel(name="net", group_size=16, latency_ns=50, bandwidth_bytes_per_s=10**9),
    ),
    contention=0.3,
)


def row_of(rng: random.Random, form: str, *, core: bool, most: int, **of: Any) -> CostRow:
    """With a whole backward, two halves of one, or both; with an attention core or without."""
    held = rng.randrange(most)
    times: dict[str, Any] = {"forward_ns": rng.randrange(most // 10)}
    if form != "halves":
        times["backward_ns"] = rng.randrange(most // 10)
    if form != "whole":
        times |= {"input_grad_ns": rng.randrange(most // 10), "weight_grad_ns": rng.randrange(most // 10)}
    if core:
        times |= {
            "selective_ns": rng.randrange(most // 10),
            "selective_activation_bytes": held * of["microbatch_size"] // 9,
        }
    return CostRow(
        **times,
        activation_bytes=held,
        weight_grad_bytes=rng.randrange(most),
        workspace_bytes=rng.choice([0, rng.randrange(most)]),
        sequence_parallel=of["shards"] > 1 and rng.random() < 0.5,
        **of,
    )


SHARING: tuple[dict[str, int], ...] = ({}, {"expert": 2}, {"expert": 2, "expert_shards": 2})


def drawn(rng: random.Random, *, custom: bool, most: int) -> Profile:
    """A chain with detours, two blocks alike: some with experts, some with rows of their own for recomputing."""
    blocks = []
    for number in range(NUM_BLOCKS):
        form, core, again = rng.choice(["whole", "halves", "both"]), rng.random() < 0.5, rng.random() < 0.3
        experts = rng.random() < 0.4 and not custom
        rows = [
            row_of(rng, form, core=core, most=most, microbatch_size=size, shards=shards, context=context, **sharing)
            for size in SIZES
            for shards in (1, 2)
            for context in (1, 2)
            for sharing in (SHARING if experts else SHARING[:1])
        ]
        rows += [row.model_copy(update={"recompute": True, "forward_ns": 3}) for row in rows if again]
        rows.append(rows[0].model_copy(update={"configuration": "rows", "forward_ns": 1}))
        count = rng.randrange(10**6)
        known: dict[str, Any] = {"parameters": count, "frozen_parameters": rng.choice([0, 77])}
        if custom:
            known = {"parameter_bytes": 4 * count, "optimizer_bytes": 8 * count, "master_bytes": rng.choice([0, count])}
            known["gradient_bytes"] = rng.choice([None, 0, count])
        known["expert_parameters"] = count // 3 if experts else 0
        known["whole_parameters"] = 0 if custom else count // 5
        rng.shuffle(rows)
        operator = "head" if number == NUM_BLOCKS - 1 else "layer"
        blocks.append(Block(id=f"b{number}", operator=operator, costs=tuple(rows), **known))
    blocks[7] = blocks[4].model_copy(update={"id": "b7"})
    edges = [
        Edge(source=f"b{n}", target=f"b{n + 1}", tensor="out", bytes_per_sample=rng.randrange(most))
        for n in range(NUM_BLOCKS - 1)
    ]
    edges += [edges[0].model_copy(update={"target": f"b{number}"}) for number in (3, 5)]
    edges.append(Edge(source="b2", target="b6", bytes_per_sample=77, broadcast=True, gradient=False))
    shared = {"parameter_bytes": 9} if custom else {"parameters": 9}
    counts = min(block.parameters + block.parameter_bytes for block in blocks[1:3])
    tied = [TiedParameter(name="words", blocks=("b1", "b2"), **shared)] if counts >= 9 and rng.random() < 0.5 else []
    return Profile(
        name="drawn",
        source=Source(method="literature"),
        recipe=Recipe(name="custom" if custom else rng.choice(RECIPES)),
        blocks=tuple(blocks),
        edges=tuple(edges),
        tied=tuple(tied),
    )


def asked(rng: random.Random) -> tuple[int, int, dict[str, Any]]:
    """Samples, some of which no row has; shards, and how else blocks run."""
    shards, context, level = rng.choice([1, 2]), rng.choice([1, 2]), rng.randrange(4)
    zero = Zero(level, 2) if level else WHOLE
    experts = Experts.among(rng.choice([1, 2]), shards, 2, zero.level, zero.group, split=rng.choice([1, 2]))
    near = Exchanging.on_first(CLUSTER, shards, 2, zero, experts)
    how: dict[str, Any] = {"context": context, "zero": zero, "experts": experts, "speed": rng.choice([1.0, 1.0, 0.37])}
    return rng.choice([*SIZES, 3, 4, 6]), shards, how | {"exchanging": rng.choice([Exchanging(), near])}


def costs(many: int, monkeypatch: pytest.MonkeyPatch, profile: Profile, *asked: Any, **how: Any) -> object:
    """Of groups of blocks, in columns from so ``many`` blocks on; or what is refused."""
    monkeypatch.setattr(stages, "MANY", many)
    try:
        return group_costs(profile, *asked, **how)
    except UsageError as error:
        return str(error)


@pytest.mark.parametrize("most", [10**6, MAX_NS])
@pytest.mark.parametrize("custom", [False, True])
@one_in(2, "seed", range(4))
def test_columns_say_what_rows_say(seed: int, custom: bool, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of single blocks and of stages; between sizes too, where floats do not have all digits rows are asked."""
    rng, used = random.Random(seed), 0
    made = Columns.of

    def counted(*args: Any, **kwargs: Any) -> Columns | None:
        nonlocal used
        found = made(*args, **kwargs)
        used += found is not None
        return found

    monkeypatch.setattr(stages.Columns, "of", counted)
    profile = drawn(rng, custom=custom, most=most)
    ids = [block.id for block in profile.blocks]
    again: Recompute
    for again in (False, True, "selective", tuple(rng.choice([False, True, "selective"]) for _ in ids)):
        for _ in range(12):
            size, shards, how = asked(rng)
            begins = [0] if isinstance(again, tuple) else sorted({0, *rng.sample(range(1, NUM_BLOCKS), 3)})
            stages_ = [tuple(ids[a:b]) for a, b in zip(begins, [*begins[1:], NUM_BLOCKS], strict=True)]
            for groups in (stages_, [(id_,) for id_ in ids] if not isinstance(again, tuple) else stages_):
                found, expected = (
                    costs(many, monkeypatch, profile, groups, size, shards, recompute=again, **how)
                    for many in (1, 10**9)
                )
                assert found == expected
    assert used > 24, "of 96: a sixth has too many samples, and what is tied cannot be gathered"


def test_inputs_of_any_size_are_held_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """More bytes than a column can say: what is held is no more than what is held without."""
    block = {
        "operator": "layer",
        "costs": (CostRow(microbatch_size=9999, forward_ns=1, backward_ns=1, activation_bytes=5),),
    }
    profile = Profile(
        name="wide",
        source=Source(method="literature"),
        blocks=(Block(id="a", **block), Block(id="b", **block)),
        edges=(Edge(source="a", target="b", bytes_per_sample=MAX_BYTES),),
    )
    found, expected = (costs(many, monkeypatch, profile, [("a",), ("b",)], 9999, recompute=True) for many in (1, 10**9))
    assert found == expected
    assert [each.activation_bytes for each in found] == [0, 5]


def test_state_is_what_comes_first_of_all_kinds() -> None:
    assert MEMORY_KINDS[: len(STATE_KINDS)] == STATE_KINDS
    assert MemoryBytes.of_state([1, 2, 3, 4]) == MemoryBytes(dict(zip(STATE_KINDS, (1, 2, 3, 4), strict=True)))
