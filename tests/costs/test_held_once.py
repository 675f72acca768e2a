"""What a stage holds of tensors between its blocks, beside a second way to count it: one tensor after another."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipeplan
from pipeplan.checker import check
from pipeplan.costs import group_costs
from pipeplan.costs.held_once import counted_again, loose_edges, repeats_of
from pipeplan.costs.kinds import for_kinds
from pipeplan.costs.messages import edge_bytes
from pipeplan.files import Block, Cluster, CostRow, Edge, PlacedStage, Placement, Profile, Source
from pipeplan.files.cluster import DeviceKind
from pipeplan.files.profile import COUNTS, NEEDS
from pipeplan.partition.chain.costs import ChainCosts
from pipeplan.workload.elements import Again
from support.marks import some_of

SIZE = 2
AGAIN: tuple[Again, ...] = (False, True, "selective")


@st.composite
def profiles(draw: Any) -> Profile:
    """Up to six blocks in a line, whose tensors any later ones take; of the same name where several take one."""
    count = draw(st.integers(2, 6))
    edges = []
    for source in range(count - 1):
        takers = draw(st.lists(st.integers(source + 1, count - 1), min_size=1, max_size=3, unique=True))
        gradient, size = draw(st.booleans()), draw(st.integers(1, 50))
        by_source = draw(st.sampled_from(COUNTS)) if gradient else "no"
        how = {"tensor": "0" if len(takers) > 1 else None, "bytes_per_sample": size, "gradient": gradient}
        needs = [draw(st.sampled_from((None, *NEEDS))) for _ in takers]
        edges += [
            Edge(source=f"b{source}", target=f"b{target}", saved=need, saved_by_source=by_source, **how)
            for target, need in zip(takers, needs, strict=True)
        ]
    return profile_of(edges, [draw(st.integers(0, 40)) for _ in range(count)])


def profile_of(edges: list[Edge], own: list[int]) -> Profile:
    """Blocks that hold so much of their own beside what they take and give, as rows of one-block stages count it."""

    def row(block: int, recompute: bool) -> CostRow:
        again: Again = recompute
        taken = [each for each in edges if each.target == f"b{block}" and each.is_counted(again)]
        given = {each.key: each for each in edges if each.source == f"b{block}"}
        inside = 0 if recompute else own[block]
        held = sum(edge_bytes(each, SIZE) for each in taken) + inside
        made = {
            core: sum(edge_bytes(each, SIZE) for each in given.values() if each.saved_by_source == core)
            for core in COUNTS
        }
        core = {} if recompute else {"selective_ns": 1, "selective_activation_bytes": held + made["yes"]}
        more = 0 if recompute else made["yes"] + made["core"]
        return CostRow(
            microbatch_size=SIZE, recompute=recompute, forward_ns=1, backward_ns=2, activation_bytes=held + more, **core
        )

    blocks = (Block(id=f"b{n}", operator="ffn", costs=(row(n, False), row(n, True))) for n in range(len(own)))
    return Profile(name="drawn", source=Source(method="literature"), blocks=tuple(blocks), edges=tuple(edges))


def held_by(profile: Profile, own: list[int], places: range, again: Again) -> int:
    """What a stage of these blocks holds: what is inside of them, and every tensor that something keeps, once."""
    here = {f"b{place}" for place in places}
    kept = {}
    for edge in profile.edges:
        takes, makes = edge.target in here, edge.source in here
        needs = takes and edge.is_saved(again)
        came = takes and not makes and edge.is_counted(again)  # as a stage of one block counts it
        if needs or came or (makes and edge.is_counted_by_source(again)):
            kept[edge.key] = edge_bytes(edge, SIZE)
    inside = 0 if again is True else sum(own[place] for place in places)
    return sum(kept.values()) + inside


@given(profiles(), st.data())
def test_a_stage_holds_every_tensor_once(profile: Profile, data: st.DataObject) -> None:
    """However its blocks run; and so do ranges by prefix sums, which cut chains."""
    count, again = len(profile.blocks), data.draw(st.sampled_from(AGAIN))
    own = [inside_of(profile, place) for place in range(count)]
    order = [block.id for block in profile.blocks]
    ranges = [range(*ends) for ends in combinations(range(count + 1), 2)]
    costs = group_costs(profile, [[order[place] for place in each] for each in ranges], SIZE, recompute=again)
    repeats = repeats_of(profile, order, again, lambda edge: edge_bytes(edge, SIZE))
    single = group_costs(profile, [[block] for block in order], SIZE, recompute=again)
    chain = ChainCosts.of(single, repeats)
    for places, cost in zip(ranges, costs, strict=True):
        assert cost.activation_bytes == held_by(profile, own, places, again)
        assert int(chain.activation(places.start, places.stop)) == cost.activation_bytes
    loose = loose_edges(profile)
    for places, cost in zip(ranges, costs, strict=True):  # what bounds take as held by a block in any stage
        alone = sum(
            group_costs(profile, [[order[place]]], SIZE, recompute=again)[0].activation_bytes for place in places
        )
        most = sum(edge_bytes(edge, SIZE) for place in places for edge in loose.get(order[place], ()))
        assert alone - most <= cost.activation_bytes <= alone


def inside_of(profile: Profile, place: int) -> int:
    """What a block holds beside what it takes and gives."""
    row, id_ = profile.blocks[place].costs[0], profile.blocks[place].id
    taken = sum(edge_bytes(each, SIZE) for each in profile.edges_into.get(id_, ()) if each.is_counted())
    given = {each.key: each for each in profile.edges_from.get(id_, ()) if each.is_counted_by_source()}
    return row.activation_bytes - taken - sum(edge_bytes(each, SIZE) for each in given.values())


@given(profiles(), st.sampled_from(["none", "all", "selective"]), st.integers(1, 5))
@settings(max_examples=some_of(25))
def test_the_checker_counts_the_same(profile: Profile, again: str, cut: int) -> None:
    """By code of its own: a plan with two stages passes, and with other bytes does not."""
    ids = [block.id for block in profile.blocks]
    stages = [own for own in (ids[:cut], ids[cut:]) if own]
    placed = tuple(PlacedStage(blocks=tuple(own), devices=(device,)) for device, own in enumerate(stages))
    placement = Placement(strategy="by-hand", num_devices=len(placed), stages=placed)
    known = profile.model_copy(update={"placement": placement})
    how: dict[str, Any] = {"microbatches": 2, "microbatch_size": SIZE, "scheduler": "gpipe", "recompute": again}
    plan = pipeplan.search(known, **how).plan
    assert check(plan, known).valid
    less = tuple(
        replace(each, acquire_bytes=each.acquire_bytes + 1) if each.id == "0F" else each for each in plan.operations
    )
    found = check(plan.model_copy(update={"operations": less}), known)
    assert any("acquire_bytes" in problem.place for problem in found.problems)


@pytest.mark.parametrize(
    ("here", "there", "saved", "by_source"),
    [
        (("no", "yes"), ("yes", "core"), None, "core"),
        (("again", "core"), ("no", "no"), "again", "no"),
        (("no", "yes"), ("no", "yes"), "no", "yes"),
    ],
)
def test_kinds_of_devices_count_what_holds_on_all(
    here: tuple[Any, Any], there: tuple[Any, Any], saved: Any, by_source: Any
) -> None:
    """Attention on a GPU and on a CPU need not keep the same: a tensor is held where some hold it."""
    one, other = (
        profile_of([Edge(source="b0", target="b1", bytes_per_sample=8, saved=each[0], saved_by_source=each[1])], [3, 4])
        for each in (here, there)
    )
    kinds = tuple(DeviceKind(name=name, count=1) for name in ("near", "far"))
    cluster = Cluster(name="two", source=Source(method="literature"), devices=kinds)
    joined = for_kinds(one, {"far": other}, cluster)
    for each in (joined, *joined.of_kinds.values()):
        assert [(edge.saved, edge.saved_by_source) for edge in each.edges] == [(saved, by_source)]
    assert joined.fingerprint == one.fingerprint
    assert counted_again(one, ["b0", "b1"], [False, False], SIZE) >= counted_again(
        joined, ["b0", "b1"], [False, False], SIZE
    )
