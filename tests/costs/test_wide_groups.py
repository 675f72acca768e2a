"""Groups of devices in several nodes: by hand, and beside bytes that are counted link by link."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from pipeplan.checker import check
from pipeplan.costs.blocks import block_costs
from pipeplan.costs.communication import Exchange, LinkPath, dispatch_ns
from pipeplan.costs.wide_groups import (
    GroupSizes,
    best_groups,
    groups_at,
    says_messages,
    waited_in,
    where_it_stands,
    with_best_places,
)
from pipeplan.errors import UsageError
from pipeplan.files import (
    Block,
    Cluster,
    CostRow,
    Edge,
    PlacedStage,
    Placement,
    Plan,
    Profile,
    Recipe,
    RingCosts,
    Source,
)
from pipeplan.files.row_messages import ExpertMessages, MessageTable, RowMessages, SequenceMessages, ShardMessages
from pipeplan.planning.candidates import PlacementCandidate, open_splits, placed, uniform_choices
from pipeplan.planning.request import Request, input_notes
from pipeplan.planning.steps import search_plan
from pipeplan.planning.trials import Trial
from pipeplan.sharding.cost_model import CostModel, CostOptions, cost_model
from pipeplan.sharding.operators import Configuration
from pipeplan.simulator.recost import recosted, with_costs_of
from pipeplan.workload.kinds import Role

KB, MS = 1_000, 1_000_000
INSIDE, BETWEEN = 100 * 10**9, 10**9
QUICK: dict[str, Any] = {
    "time_limit": 0.3,
    "deterministic": True,
    "scheduler": "1f1b",
    "num_parted": 0,
    "split_backward": False,
    "recompute": False,
    "zero": 0,
}


def nodes(count: int, own: int = 8, between: int = BETWEEN, node: int = 8, latency: float = 1e-6) -> Cluster:
    """Nodes of eight with ``own`` adapters each."""
    made = Cluster.of(
        "nodes", count * node, levels=[("node", node, 0, INSIDE), ("net", count * node, latency, between)]
    )
    outer = made.levels[1].model_copy(update={"node_bandwidth_bytes_per_s": own * between})
    return made.model_copy(update={"levels": (made.levels[0], outer)})


def rows(table: MessageTable, work: int, *, moe: bool = False, size: int = 1) -> Iterable[CostRow]:
    """Rows of a block of ``work`` ns on one device, whose messages took 10 ns each where they were made."""
    for shards, context in itertools.product((1, 2, 4, 8), (1, 2, 4)):
        width = shards * context
        said = RowMessages(
            shards=ShardMessages(
                sent=(("F", "all_gather", 8 * KB), ("I", "reduce_scatter", 8 * KB), ("W", "all_gather", 8 * KB)),
                forward_ns=10,
                input_grad_ns=10,
                weight_grad_ns=10,
                products_forward_ns=work // width,
                products_input_grad_ns=work // width,
            )
            if shards > 1
            else None,
            context=SequenceMessages(
                bytes=100 * KB // shards,
                gather_ns=10,
                hops_ns=10,
                core_ns=work // width // 2,
                core_grad_ns=work // width // 2,
                merge_ns=30,
                merge_grad_ns=40,
            )
            if context > 1
            else None,
        )
        yield made(table, said, work // width, {"shards": shards, "context": context, "microbatch_size": size})
    for shards, expert in itertools.product((1, 2), (8, 16)) if moe else ():
        said = RowMessages(
            expert=ExpertMessages(
                bytes=40 * KB,
                experts_per_token=2,
                words_ns=20,
                routing_bytes=4 * KB,
                shared_bytes=8 * KB * (shards - 1),
                shared_ns=7,
            )
        )
        yield made(table, said, work // shards, {"shards": shards, "expert": expert, "microbatch_size": size})


def made(table: MessageTable, said: RowMessages, work: int, how: dict[str, int]) -> CostRow:
    alone = how["shards"] * how.get("context", 1) * how.get("expert", 1) == 1
    row = CostRow(forward_ns=work, input_grad_ns=work, weight_grad_ns=work, backward_ns=2 * work, **how)
    if alone:
        return row
    around, waited = waited_in(said, row, around=True), waited_in(said, row)
    more = around - waited
    ring = RingCosts(forward_ns=more.forward, input_grad_ns=more.input_grad) if said.context else None
    return row.model_copy(
        update={
            "forward_ns": work + waited.forward,
            "input_grad_ns": work + waited.input_grad,
            "weight_grad_ns": work + waited.weight_grad,
            "backward_ns": 2 * work + waited.input_grad + waited.weight_grad,
            "activation_bytes": 1000 // (how["shards"] * how.get("context", 1)),
            "selective_ns": work // 2 + waited.core,
            "selective_activation_bytes": 0,
            "ring": ring,
            "messages": table.place_of(said),
        }
    )


def chain(count: int = 4, work: int = MS, *, moe: bool = False) -> Profile:
    table = MessageTable()
    blocks = tuple(
        Block(
            id=f"b{number}",
            operator="moe" if moe else "attention",
            parameters=64,
            expert_parameters=32 * moe,
            dimensions={"heads": 8},
            costs=tuple(rows(table, work, moe=moe)),
        )
        for number in range(count)
    )
    edges = tuple(Edge(source=f"b{n}", target=f"b{n + 1}", bytes_per_sample=100) for n in range(count - 1))
    source = Source(method="estimated", device="device")
    return Profile(
        name="chain", source=source, blocks=blocks, edges=edges, messages=table.messages, recipe=Recipe(name="fp32")
    )


def row_of(profile: Profile, shards: int = 1, context: int = 1, expert: int = 1) -> CostRow:
    return block_costs(profile.by_id["b0"], 1, shards, context=context, expert=expert)


# By hand --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("own", "crowd"), [(8, 1), (1, 8)], ids=["an adapter each", "one adapter"])
def test_eight_shards_and_two_parts_of_sequences_on_two_nodes(own: int, crowd: int) -> None:
    """Each of eight pairs has one device in each node: half of 12.5 kB goes over, by an adapter of its own or not."""
    profile = chain()
    priced = with_best_places(profile, nodes(2, own))
    before, after = row_of(profile, 8, 2), row_of(priced, 8, 2)
    gather = 1000 + crowd * 100 * KB // 8 // 2  # at a byte a ns
    assert after.forward_ns - before.forward_ns == gather - 10
    assert after.input_grad_ns - (before.input_grad_ns or 0) == 2 * (gather - 10)
    assert (after.weight_grad_ns, after.activation_bytes) == (before.weight_grad_ns, before.activation_bytes)
    assert after.backward_ns == (before.backward_ns or 0) + 2 * (gather - 10)
    assert (after.selective_ns or 0) - (before.selective_ns or 0) == gather - 10
    step = MS // 16 // 2 // 2
    ahead = max(0, gather - step) + 30
    back = 2 * max(0, gather - step) + 40
    assert after.ring == RingCosts(forward_ns=ahead - gather, input_grad_ns=back - 2 * gather)
    for shards, context in ((8, 1), (4, 2), (1, 4)):
        assert row_of(priced, shards, context) == row_of(profile, shards, context), "they are inside of a node"


def test_sixteen_that_share_experts_on_two_nodes() -> None:
    """A token goes once to the other node where one of its two experts is there, and once to each device in there.

    There it goes with what says which experts take it, and comes back without.
    """
    profile = chain(moe=True)
    before, after = (row_of(each, expert=16) for each in (profile, with_best_places(profile, nodes(2))))
    crossing = math.fsum(len({a // 8, b // 8} - {0}) for a in range(16) for b in range(16)) / 256
    inside = math.fsum(len({a, b} - {0}) for a in range(16) for b in range(16)) / 256
    words = round(sum(max(size * crossing, size * inside / (INSIDE / 1e9)) + 1000 for size in (44 * KB, 40 * KB)))
    counts = 1000 + 16 * 16 * 8  # of sixteen, to each of eight in the other node
    assert after.forward_ns - before.forward_ns == counts + words - 20
    assert after.input_grad_ns - (before.input_grad_ns or 0) == words - 20
    assert after.weight_grad_ns == before.weight_grad_ns
    assert row_of(with_best_places(profile, nodes(2)), expert=8) == row_of(profile, expert=8)


def test_a_ring_or_gathered_is_chosen_by_what_they_take_there() -> None:
    """Ten nanoseconds inside of a node are not worth merging for; between nodes most of a gather is hidden."""
    known = Request.of(chain(), cluster=nodes(2), mini_batch=4, **QUICK).profile
    assert (8, 2) in known.rings
    assert (4, 2) not in known.rings


def test_uplinks_of_a_rack_count_where_a_group_leaves_it() -> None:
    """Two nodes are in one of the racks, four are in two, whose uplinks carry a quarter."""
    made = Cluster.of("racks", 32, levels=[("node", 8, 0, INSIDE), ("rack", 16, 0, BETWEEN), ("spine", 32, 0, BETWEEN)])
    levels = [
        each.model_copy(update={"oversubscription": ratio}) for each, ratio in zip(made.levels[1:], (1, 4), strict=True)
    ]
    tree = made.model_copy(update={"levels": (made.levels[0], *levels)})
    profile = chain()
    two, four = (row_of(with_best_places(profile, tree), 8, parts) for parts in (2, 4))
    size = 100 * KB // 8
    assert two.forward_ns - row_of(profile, 8, 2).forward_ns == size // 2 - 10
    crowd = 2  # of four devices in two racks two send over each uplink of a quarter, one after another
    ring = 3 * size // 4 * crowd
    assert four.forward_ns - row_of(profile, 8, 4).forward_ns == ring - 10


# Link by link ---------------------------------------------------------------------------------------------------------


def by_links(cluster: Cluster, groups: Sequence[Sequence[int]], size: int) -> float:
    """Ns of an all-gather in all of these groups: of every link what it carries, and the hops of one ring.

    A group with m devices in each of its nodes has m rings, which carry an m-th each and leave nodes by other devices.
    """
    node, inner, outer = cluster.levels[0].group_size, cluster.levels[0], cluster.levels[1]
    links: Counter[tuple[str, int]] = Counter()
    for group in groups:
        inside = [[d for d in group if d // node == each] for each in sorted({d // node for d in group})]
        channels = min(map(len, inside))
        for ring in range(channels):
            order = [own[(ring + at) % len(own)] for own in inside for at in range(len(own))]
            for one, other in zip(order, [*order[1:], order[0]], strict=True):
                sent = (len(group) - 1) * size / len(group) / channels
                links["device", one] += 0 if one // node == other // node else sent
                links["inside", one] += sent if one // node == other // node else 0
                links["node", one // node] += 0 if one // node == other // node else sent
    of_node = outer.node_bandwidth_bytes_per_s or outer.bandwidth_bytes_per_s
    rates = {"inside": inner.bandwidth_bytes_per_s, "device": outer.bandwidth_bytes_per_s, "node": of_node}
    most = max(1e9 * sent / rates[kind] for (kind, _), sent in links.items())
    count = len({d // node for d in groups[0]})
    return most + (count - 1) * outer.latency_ns + (len(groups[0]) - count) * inner.latency_ns


@pytest.mark.parametrize("seed", range(12))
def test_prices_are_those_of_the_busiest_link(seed: int) -> None:
    rng = random.Random(seed)
    node = rng.choice([4, 8])
    cluster = nodes(rng.choice([2, 4]), rng.choice([1, node]), rng.choice([10**8, 10**9]), node)
    shards, context = rng.choice([(node, 2), (node // 2, 4), (node // 4, 8)])
    first = rng.randrange(cluster.num_devices // (shards * context)) * shards * context
    devices = range(first, first + shards * context)
    found = groups_at(cluster, devices, GroupSizes(shards, context, 1, 1))
    assert found is not None
    price = found.of_arrays("context")
    assert price is not None
    assert found.of_arrays("shards") is None, "those that split blocks are inside of nodes"
    size = rng.randrange(10**4, 10**6)
    own = [devices[shard::shards] for shard in range(shards)]
    assert price(Exchange("all_gather", size)) == pytest.approx(by_links(cluster, own, size), rel=1e-3)
    hops = (pair for each in own for pair in zip(each, [*each[1:], each[0]], strict=True))
    leaving = Counter(one // node for one, other in hops if one // node != other // node)
    of_node = cluster.levels[1].node_bandwidth_bytes_per_s or 0
    rate = min(cluster.levels[1].bandwidth_bytes_per_s, of_node / max(leaving.values()))
    hop = cluster.levels[1].latency_ns + 1e9 * size / context / rate
    assert found.hops_ns(size) == pytest.approx((context - 1) * hop, rel=1e-3), "one piece at a time over one link each"
    best = best_groups(cluster, GroupSizes(shards, context, 1, 1))
    assert best is not None
    quickest = best.of_arrays("context")
    assert quickest is not None
    assert quickest(Exchange("all_gather", size)) == price(Exchange("all_gather", size)), "wherever it begins"


@pytest.mark.parametrize("seed", range(8))
def test_the_best_places_are_no_slower_than_any(seed: int) -> None:
    """So bounds that have them are below plans, wherever their groups are; also where nodes are not filled evenly."""
    rng = random.Random(seed)
    cluster = nodes(4, rng.choice([1, 8]))
    sizes = GroupSizes(*rng.choice([(8, 2), (4, 4), (4, 3), (2, 6), (16, 1), (3, 3)]), rng.choice([1, 12, 16]), 1)
    width = math.lcm(sizes.width, sizes.expert)
    if width > 32:
        width = sizes.width
        sizes = sizes._replace(expert=1)
    table = MessageTable()
    said = RowMessages(
        shards=ShardMessages(sent=(("F", "all_reduce", 10**5),)),
        context=SequenceMessages(
            bytes=10**5, gather_ns=0, hops_ns=0, core_ns=0, core_grad_ns=0, merge_ns=0, merge_grad_ns=0
        ),
        expert=ExpertMessages(bytes=10**4, experts_per_token=2, words_ns=0) if sizes.expert > 1 else None,
    )
    row = CostRow(microbatch_size=1, forward_ns=0, backward_ns=0, messages=table.place_of(said), **sizes._asdict())
    experts = int(sizes.expert > 1)
    block = Block(id="b0", operator="x", parameters=2, expert_parameters=experts, costs=(row,))
    profile = Profile(
        name="x",
        source=Source(method="estimated"),
        blocks=(block,),
        messages=table.messages,
        recipe=Recipe(name="fp32"),
    )
    best = with_best_places(profile, cluster).blocks[0].costs[0].forward_ns
    inside = max(sizes.width, sizes.expert) <= 8
    for _ in range(6):
        begin = rng.randrange(32 // width) * width
        devices = list(range(begin, begin + width)) if rng.random() < 0.5 else rng.sample(range(32), width)
        own = {key: getattr(sizes, key) for key in ("shards", "context", "expert")}
        stage = PlacedStage(blocks=("b0",), devices=tuple(devices), **own)
        groups = groups_at(cluster, stage.devices, sizes)
        if groups is None:
            assert inside
            continue
        assert where_it_stands(profile, stage, cluster).blocks[0].costs[0].forward_ns >= best


def test_words_of_first_devices_go_as_those_of_a_group() -> None:
    """A group of two in each of four nodes sends three quarters of what it sends over adapters of its own."""
    cluster = nodes(4)
    group = [0, 1, 8, 9, 16, 17, 24, 25]
    path = LinkPath.of_group(cluster, group)
    assert path.levels == ((1, INSIDE), (2, BETWEEN))
    crossing = math.fsum(len({a // 2, b // 2} - {0}) for a in range(8) for b in range(8)) / 64
    assert dispatch_ns(KB, 2, 8, path) == pytest.approx(KB * crossing + 1000)
    spread = [0, 8, 16, 24]
    assert dispatch_ns(KB, 1, 4, LinkPath.of_group(cluster, spread)) == pytest.approx(KB * 0.75 + 1000)


# Plans ----------------------------------------------------------------------------------------------------------------


_TIMES = ("gather_ns", "hops_ns", "core_ns", "core_grad_ns", "merge_ns", "merge_grad_ns")


def planned(cluster: Cluster, profile: Profile, **asked: Any) -> Plan:
    found = search_plan(Request.of(profile, cluster=cluster, **{"mini_batch": 4, **QUICK, **asked}))
    assert found.lower_bound_ns <= found.plan.predicted.iteration_ns
    return found.plan


@pytest.mark.parametrize("exchange", ["gathered", "ring"])
def test_plans_say_and_checks_find_what_messages_take_between_nodes(exchange: str) -> None:
    cluster, profile = nodes(4), chain()
    plan = planned(cluster, profile, shards=8, context=2, context_exchange=exchange)
    assert {(stage.shards, stage.context, stage.context_exchange) for stage in plan.stages} == {(8, 2, exchange)}
    assert check(plan, profile, cluster).valid
    assert recosted(plan, profile, cluster).operations == plan.operations
    slower = nodes(4, between=BETWEEN // 10)
    problems = check(plan, profile, slower).problems
    assert any("duration" in str(each) for each in problems), "not only the fingerprint"
    longer = [each.duration_ns for each in recosted(plan, profile, slower).operations]
    assert all(
        own > each.duration_ns
        for own, each in zip(longer, plan.operations, strict=True)
        if each.role.name != "WEIGHT_GRAD"
    )
    said = profile.messages
    louder = profile.model_copy(
        update={"messages": tuple(each.model_copy(update={"context": _twice(each.context)}) for each in said)}
    )
    assert not check(plan, louder, cluster).valid
    with pytest.raises(
        UsageError, match=r"16 devices of stages\[0\] of the plan split blocks or share sequences in several nodes"
    ):
        with_costs_of(plan, None, slower)
    inside = planned(cluster, profile, shards=4, context=2)
    with_costs_of(inside, None, slower)


def _twice(said: SequenceMessages | None) -> SequenceMessages | None:
    return said and said.model_copy(update={"bytes": 2 * said.bytes})


def test_plans_of_shared_experts_are_checked_where_they_lie() -> None:
    cluster, profile = nodes(2), chain(moe=True)
    plan = planned(cluster, profile, shards=1, replicas=16, expert=16, mini_batch=16)
    assert {stage.expert for stage in plan.stages} == {16}
    assert check(plan, profile, cluster).valid
    routed = tuple(
        each.model_copy(update={"expert": each.expert and each.expert.model_copy(update={"routing_bytes": 8 * KB})})
        for each in profile.messages
    )
    problems = check(plan, profile.model_copy(update={"messages": routed}), cluster).problems
    assert any("duration" in str(each) for each in problems), "not only the fingerprint"
    alone = planned(
        Cluster.of("flat", 16, levels=[("all", 16, 0, INSIDE)]),
        profile,
        shards=1,
        replicas=16,
        expert=16,
        mini_batch=16,
    )
    assert alone.predicted.iteration_ns < plan.predicted.iteration_ns


def test_a_group_that_is_told_apart_waits_for_links_that_it_has() -> None:
    """Two shards in two nodes, by a placement of the user's own; beside the same inside of one."""
    cluster, profile = nodes(2), chain(1)
    near, far = (
        Placement.model_validate(
            {
                "strategy": "one-to-one",
                "num_devices": 16,
                "stages": (PlacedStage(blocks=("b0",), devices=own, shards=2),),
            }
        )
        for own in ((0, 1), (0, 8))
    )
    takes = []
    for placement in (near, far):
        plan = planned(cluster, profile, placement=placement)
        assert check(plan, profile, cluster).valid
        takes.append({each.role: each.duration_ns for each in plan.operations})
    assert takes[1][Role.FORWARD] - takes[0][Role.FORWARD] == 1000 + 4 * KB - 10


def test_searches_share_sequences_between_nodes_where_that_is_quicker_alone() -> None:
    """Of quick links a single sample takes all sixteen devices; of slow ones eight."""
    profile = chain(2)
    quick, slow = nodes(2, between=INSIDE, latency=0), nodes(2, between=BETWEEN // 100)
    request = Request.of(profile, cluster=quick, mini_batch=1, **QUICK)
    wide = [each for each in open_splits(request) if each.width > 8]
    assert {(each.shards, each.context) for each in wide} == {(8, 2), (4, 4)}, "of whole nodes"
    found = [search_plan(Request.of(profile, cluster=each, mini_batch=1, **QUICK)).plan for each in (quick, slow)]
    assert [max(stage.shards * stage.context for stage in plan.stages) for plan in found] == [16, 8]
    assert found[0].predicted.iteration_ns < found[1].predicted.iteration_ns
    fixed = planned(slow, profile, shards=8, context=2)
    assert found[1].predicted.iteration_ns < fixed.predicted.iteration_ns


def test_no_layout_over_nodes_is_below_its_bound() -> None:
    request = Request.of(chain(), cluster=nodes(4, between=INSIDE // 10), mini_batch=4, **QUICK)
    looked = 0
    for each in uniform_choices(request):
        if each.choice.width <= 8:
            continue
        candidate = placed(request, each.choice)
        if isinstance(candidate, PlacementCandidate):
            trial = Trial.of(request, candidate)
            trial.look()
            assert trial.value_ns is None or each.least_ns <= trial.value_ns
            looked += trial.value_ns is not None
    assert looked > 3


def test_rows_that_say_nothing_keep_their_times_and_notes_say_so() -> None:
    profile, cluster = chain(), nodes(2)
    silent = profile.model_copy(
        update={
            "messages": (),
            "blocks": tuple(
                each.model_copy(
                    update={"costs": tuple(row.model_copy(update={"messages": None}) for row in each.costs)}
                )
                for each in profile.blocks
            ),
        }
    )
    assert with_best_places(silent, cluster) is silent
    sizes = GroupSizes(8, 2, 1, 1)
    assert (says_messages(profile, sizes), says_messages(silent, sizes)) == (True, False)
    noted = [
        sum("does not say what they are" in note for note in input_notes(request))
        for request in (
            Request.of(each, cluster=cluster, mini_batch=4, shards=8, context=2) for each in (silent, profile)
        )
    ]
    assert noted == [1, 0]
    assert all(each.width <= 8 for each in open_splits(Request.of(silent, cluster=cluster, mini_batch=4)))
    plan = planned(cluster, silent, shards=8, context=2, context_exchange="gathered")
    assert check(plan, silent, cluster).valid
    other = planned(cluster, profile, shards=8, context=2, context_exchange="gathered")
    assert plan.predicted.iteration_ns < other.predicted.iteration_ns


@pytest.mark.parametrize(
    ("place", "told"), [(99, "messages is 99, and the profile's messages are 11"), (-1, "greater than or equal to 0")]
)
def test_rows_name_messages_that_are_there(place: int, told: str) -> None:
    text = chain(1).model_dump()
    text["blocks"][0]["costs"][-1]["messages"] = place
    with pytest.raises(ValueError, match=told):
        Profile.model_validate(text)


def test_links_that_are_all_alike_change_nothing() -> None:
    profile = chain()
    alike = Cluster.of("flat", 16, levels=[("all", 16, 0, BETWEEN)])
    assert with_best_places(profile, alike) is profile
    assert with_best_places(profile, None) is profile
    again = with_best_places(with_best_places(profile, nodes(2)), nodes(2))
    assert row_of(again, 8, 2) == row_of(with_best_places(profile, nodes(2)), 8, 2)
    back = with_best_places(with_best_places(profile, nodes(2)), nodes(2, between=BETWEEN // 2))
    assert row_of(back, 8, 2) == row_of(with_best_places(profile, nodes(2, between=BETWEEN // 2)), 8, 2)


SIZES = [(1, 2, 4, 1), (2, 2, 2, 1), (4, 2, 1, 1), (8, 1, 1, 1), (2, 1, 4, 1), (1, 8, 1, 1)]


@pytest.mark.parametrize(("replicas", "shards", "context", "expert"), SIZES)
def test_configurations_take_what_stages_of_the_same_groups_do(
    replicas: int, shards: int, context: int, expert: int
) -> None:
    """Of nodes of two, so that groups are in several."""
    profile, cluster = chain(2), nodes(4, node=2)
    model = cost_model(profile, cluster, 8, replicas, device="v100-16gb", options=CostOptions(blocks=True))
    stage = PlacedStage(blocks=("b0",), devices=tuple(range(8)), replicas=replicas, shards=shards, context=context)
    axes = (("samples", replicas), ("places", context), ("shards", shards))
    own = find(model, "b0", "-".join(f"{name}{size}" for name, size in axes if size > 1))
    require_alike(own, profile, stage, cluster)


def test_so_it_is_with_experts() -> None:
    profile, cluster = chain(2, moe=True), nodes(2)
    model = cost_model(profile, cluster, 16, 16, device="v100-16gb", options=CostOptions(blocks=True))
    for experts in (8, 16):
        stage = PlacedStage(blocks=("b0",), devices=tuple(range(16)), replicas=16, expert=experts)
        require_alike(
            find(model, "b0", f"samples2-experts{experts}" if experts == 8 else "experts16"), profile, stage, cluster
        )
    far = find(model, "b0", "experts8-samples2")
    near = find(model, "b0", "samples2-experts8")
    assert far.forward_ns > near.forward_ns, "its groups are in both nodes"
    assert (far.expert_bytes, far.state_bytes) == (near.expert_bytes, near.state_bytes)


def find(model: CostModel, block: str, name: str) -> Configuration:
    return next(way for way in model.configurations[block] if way.name == name)


def require_alike(own: Configuration, profile: Profile, stage: PlacedStage, cluster: Cluster) -> None:
    block = where_it_stands(profile, stage, cluster).by_id["b0"]
    row = block_costs(block, 1, stage.shards, context=stage.context, expert=stage.expert)
    assert row.input_grad_ns is not None
    assert row.weight_grad_ns is not None
    assert own.forward_ns == row.forward_ns
    assert own.backward_ns == row.input_grad_ns + row.weight_grad_ns
    assert own.inside_bytes == row.activation_bytes
