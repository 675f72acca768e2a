"""Partitions whose stages may split each block in a way of its own, against every partition and every strategy."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import clusters
from pipeplan.costs import stage_costs
from pipeplan.costs.communication import all_reduce_time
from pipeplan.costs.layouts import Layout, MeshSplit
from pipeplan.files import Block, Cluster, CostRow, Edge, Profile, Source, TiedParameter
from pipeplan.partition.per_block_sharding import GroupSplits
from pipeplan.partition.problem import Way
from pipeplan.partition.stage_frontier import ChainCut, StageFrontiers
from pipeplan.sharding.cost_model import CostModel, CostOptions, cost_model
from pipeplan.sharding.details import StageModels
from pipeplan.sharding.operators import Configuration, sum_ns
from support.marks import some_of

SIZE = 4
TABLE = 40_000
"""Bytes of parameters of a table that blocks share; gradients are as large, and optimizer state twice."""

Taken = tuple[int, int]


STEPPED = 7 * 10**9
"""Bytes per second of a step: of a byte of parameters 7 are moved, which takes a nanosecond."""


def profile_of(
    seed: int, num_blocks: int, *, chain: bool = True, num_tied: int = 0, rate: int | None = None
) -> Profile:
    """Blocks with costs for 1, 2 and 4 samples on 1 and 2 shards; a chain, or each fed by any block before it.

    The first and last ones, ``num_tied`` of them, share a table. The optimizer steps at ``rate`` bytes per second.
    """
    random = Random(seed)
    users = (*(f"b{n}" for n in range(num_tied - 1)), f"b{num_blocks - 1}") if 1 < num_tied <= num_blocks else ()
    blocks = []
    for index in range(num_blocks):
        rows = tuple(
            CostRow(
                microbatch_size=size,
                shards=shards,
                forward_ns=random.randrange(20_000, 50_000) * size // shards,
                backward_ns=random.randrange(20_000, 50_000) * size // shards,
                activation_bytes=random.randrange(50_000) * size // random.choice((1, shards)),
                workspace_bytes=random.randrange(40_000) * size,
            )
            for size in (1, 2, 4)
            for shards in (1, 2)
        )
        parameters = random.randrange(40_000) + (TABLE if f"b{index}" in users else 0)
        blocks.append(
            Block(
                id=f"b{index}", operator="any", costs=rows, parameter_bytes=parameters, optimizer_bytes=2 * parameters
            )
        )
    sources = [index - 1 if chain else random.randrange(index) for index in range(1, num_blocks)]
    edges = [
        Edge(source=f"b{source}", target=f"b{index}", bytes_per_sample=random.randrange(1, 40_000))
        for index, source in enumerate(sources, 1)
    ]
    source = Source(method="literature", device="v100-16gb")
    table = (
        TiedParameter(name="table", blocks=users, parameter_bytes=TABLE, optimizer_bytes=2 * TABLE) if users else None
    )
    tied = (table,) if table else ()
    given = {"blocks": tuple(blocks), "edges": tuple(edges), "tied": tied, "step_bytes_per_s": rate}
    return Profile.model_validate({"name": "small", "source": source, **given})


def cluster_of(num_devices: int) -> Cluster:
    return clusters.cluster_of(num_devices, latency_ns=1000, bandwidth=10**10, name="v100-16gb")


def every_cut(profile: Profile, num_devices: int) -> Iterator[list[tuple[tuple[str, ...], int]]]:
    """Runs of blocks with the devices of their groups, in order."""
    names = profile.topological_order()
    for stages in range(1, min(num_devices, len(names)) + 1):
        for inner in itertools.combinations(range(1, len(names)), stages - 1):
            runs = [names[a:b] for a, b in itertools.pairwise([0, *inner, len(names)])]
            for sizes in itertools.product({1, 2, num_devices}, repeat=stages):
                if sum(sizes) == num_devices:
                    yield list(zip(runs, sizes, strict=True))


def all_alike(profile: Profile, blocks: Sequence[str], devices: int, in_flight: int, number: int) -> Iterator[Taken]:
    """(Bytes, ns) of a stage for every way to run all its blocks."""
    for shards in (1, 2):
        for recompute in (False, True):
            way = Way(SIZE, devices // shards, 0, recompute, shards)
            if devices % shards or SIZE % way.replicas:
                continue
            costs = [stage_costs(profile, [b], SIZE // way.replicas, shards, recompute=recompute) for b in blocks]
            peers = range(0, devices, shards)
            sums = [
                all_reduce_time(cluster_of(devices), peers, cost.gradient_bytes)
                + (cost.gradient_bytes if profile.step_bytes_per_s else 0)
                for cost in costs
            ]
            state = stage_costs(profile, blocks, SIZE // way.replicas, shards, recompute=recompute).static_bytes
            held = state + sum(in_flight * c.activation_bytes for c in costs)
            time = sum(c.forward_ns + c.backward_ns + -(-s // number) for c, s in zip(costs, sums, strict=True))
            yield held + max(cost.workspace_bytes for cost in costs), time


def copies(model: CostModel, chosen: Mapping[str, Configuration], users: Sequence[str]) -> Taken:
    """Bytes and ns that blocks take less as they share a table: of those in one way the first alone has it."""
    users = [name for name in users if name in chosen]
    ways = {chosen[name].name: chosen[name] for name in users}
    if len(users) < 2:
        return 0, 0
    parts = {name: way.splits["shards"].extent if "shards" in way.splits else 1 for name, way in ways.items()}
    again = Fraction(
        sum(Fraction(1, parts[chosen[name].name]) for name in users) - sum(Fraction(1, n) for n in parts.values())
    )
    bytes_ = int(4 * TABLE * again)
    step = int(TABLE * again) // model.options.microbatches if model.step_bytes_per_s else 0
    own = []
    for name in users:
        way = chosen[name]
        split = way.splits.get("samples")
        left = way.gradient_bytes - TABLE // parts[way.name]
        without = round(sum_ns(left, split, model.resharding)) if split else 0
        own.append(share_of(model, way.sync_ns) - share_of(model, without))
    whole = share_of(model, round(sum_ns(TABLE, MeshSplit(model.resharding.devices, 1), model.resharding)))
    return bytes_, sum(own) - (min(own[0], whole) if len(ways) == 1 else whole) + step


def share_of(model: CostModel, time: int) -> int:
    """Of one micro-batch."""
    return -(-time // model.options.microbatches)


def each_its_own(
    model: CostModel, blocks: Sequence[str], in_flight: int, *, again: bool = False, tied: Sequence[str] = ()
) -> Iterator[Taken]:
    """(Bytes, ns) of a stage for every choice of a configuration for each of its blocks, which recompute or not."""
    ways = [[recomputed(model, name, way) if again else way for way in model.configurations[name]] for name in blocks]
    number = model.options.microbatches
    for chosen in itertools.product(*ways):
        by_name = dict(zip(blocks, chosen, strict=True))
        bytes_, ns = copies(model, by_name, tied)
        memory = sum(way.state_bytes + in_flight * way.inside_bytes for way in chosen) - bytes_
        time = sum(way.compute_ns + -(-way.sync_ns // number) - (-stepped(model, way) // number) for way in chosen) - ns
        gone = set()
        for link in model.operators.links:
            source, target = by_name.get(link.source), by_name.get(link.target)
            tensor = model.tensor(link)
            given = source.output if source else Layout()
            if target is not None:
                spent = model.resharding.times(tensor, [given], [target.taken(link.port)])
                back = model.resharding.times(tensor, [target.returned(link.port)], [given._replace(partial=None)])
                time += int(np.ceil(spent + back).item())
            elif source is not None and link.source not in gone:
                gone.add(link.source)
                time += int(np.ceil(model.resharding.times(tensor, [given], [Layout()])).item())
        yield memory + max(way.workspace_bytes for way in chosen), time


def stepped(model: CostModel, way: Configuration) -> int:
    """Ns of the step: gradients, and parameters, of which there are as many, and moments read and written."""
    moments = way.state_bytes - 2 * way.gradient_bytes
    return -(-(3 * way.gradient_bytes + 2 * moments) // 7) if model.step_bytes_per_s else 0


def recomputed(model: CostModel, name: str, way: Configuration) -> Configuration:
    """Of what forward holds the inputs stay: a part of the samples, or all of them."""
    samples = way.splits["samples"].extent if "samples" in way.splits else 1
    taken = sum(model.tensor(link).num_bytes for link in model.operators.links if link.target == name) / samples
    return replace(
        way,
        backward_ns=way.backward_ns + way.forward_ns,
        inside_bytes=min(way.inside_bytes, int(np.ceil(taken))),
        workspace_bytes=way.workspace_bytes + way.inside_bytes,
    )


def users_of(profile: Profile) -> tuple[str, ...]:
    """The blocks that share a table."""
    return profile.tied[0].blocks if profile.tied else ()


class Oracle:
    """What every partition takes at best in some memory, by going through everything."""

    def __init__(self, profile: Profile, num_devices: int, number: int) -> None:
        self.profile, self.num_devices, self.number = profile, num_devices, number
        options = CostOptions(blocks=True, microbatches=number)
        self.models = {
            size: cost_model(profile, cluster_of(num_devices), size, SIZE, options=options) for size in {2, num_devices}
        }
        self.known: dict[object, list[Taken]] = {}

    def stage(self, blocks: tuple[str, ...], devices: int, in_flight: int) -> list[Taken]:
        key = blocks, devices, in_flight
        if key not in self.known:
            found = list(all_alike(self.profile, blocks, devices, in_flight, self.number))
            if devices > 1:
                for again in (False, True):
                    found += each_its_own(
                        self.models[devices], blocks, in_flight, again=again, tied=users_of(self.profile)
                    )
            self.known[key] = found
        return self.known[key]

    def slowest(self, limit: float) -> dict[int, int]:
        """{stages: ns of the slowest stage of the best partition that fits}."""
        best: dict[int, int] = {}
        for cut in every_cut(self.profile, self.num_devices):
            times = [
                min((time for memory, time in self.stage(*stage, self.held(cut, place)) if memory <= limit), default=0)
                for place, stage in enumerate(cut)
            ]
            if all(times):
                best[len(cut)] = min(best.get(len(cut), max(times)), max(times))
        return best

    def held(self, cut: Sequence[object], place: int) -> int:
        return min(len(cut) - place, self.number)


def require_right(cut: ChainCut, oracle: Oracle, limit: float) -> None:
    """A cut takes what it says, and no stage of it more."""
    stages = cut.placement.stages
    assert cut.memory_bytes <= limit
    for place, split in enumerate(cut.stages):
        stage = split.stage
        taken = oracle.stage(stage.blocks, len(stage.devices), oracle.held(stages, place))
        assert (split.memory_bytes, split.time_ns) in taken
        assert split.time_ns <= cut.slowest_ns
        assert (place in cut.given) == bool(stage.configurations)


@settings(max_examples=12)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(2, 4),
    st.sampled_from([2, 4]),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from([0, 2, 3]),
    st.sampled_from([None, STEPPED]),
)
def test_the_slowest_stage_is_as_quick_as_any_strategies_allow(
    seed: int, num_blocks: int, num_devices: int, number: int, chain: bool, num_tied: int, rate: int | None
) -> None:
    num_blocks = min(num_blocks, 3) if num_devices > 2 else num_blocks
    profile = profile_of(seed, num_blocks, chain=chain, num_tied=num_tied, rate=rate)
    oracle = Oracle(profile, num_devices, number)
    given = profile, SIZE, number, num_devices, (False, True), cluster_of(num_devices)
    frontiers = StageFrontiers(*given)
    free = frontiers.fastest(num_devices, None)
    most = max(cut.memory_bytes for cut in free)
    for limit in (None, most, int(0.8 * most), int(0.6 * most), int(0.45 * most)):
        cuts = frontiers.fastest(num_devices, limit)
        bytes_ = float("inf") if limit is None else limit
        assert {cut.num_stages: cut.slowest_ns for cut in cuts} == oracle.slowest(bytes_)
        for cut in cuts:
            require_right(cut, oracle, bytes_)
        for few in (1, 2, 3):
            first = frontiers.fastest(num_devices, limit, most=few)
            assert [cut.placement for cut in first] == [cut.placement for cut in cuts[:few]]


@settings(max_examples=some_of(20))
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 4),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0, 2, 3]),
    st.sampled_from([None, STEPPED]),
)
def test_bounds_of_runs_are_below_all_strategies(
    seed: int, num_blocks: int, in_flight: int, chain: bool, again: bool, num_tied: int, rate: int | None
) -> None:
    profile = profile_of(seed, num_blocks, chain=chain, num_tied=num_tied, rate=rate)
    (splits,) = GroupSplits(profile, cluster_of(2)).of(2, SIZE, 2, (again,))
    frontiers, oracle = splits.holding(in_flight), Oracle(profile, 2, 2)
    names = profile.topological_order()
    for begin, end in itertools.combinations(range(num_blocks + 1), 2):
        tied = users_of(profile)
        taken = list(each_its_own(oracle.models[2], names[begin:end], in_flight, again=again, tied=tied))
        for limit in [float("inf"), *(memory for memory, _ in taken), min(memory for memory, _ in taken) - 1]:
            least = min((time for memory, time in taken if memory <= limit), default=float("inf"))
            assert frontiers.least_times(limit)[begin, end] <= least
            found = frontiers.quickest(names[begin:end], limit)
            assert (float("inf") if found is None else found.time_ns) == least


@pytest.mark.parametrize("chain", [True, False])
@pytest.mark.parametrize("again", [True, False])
def test_stages_cut_out_cost_what_their_own_models_say(chain: bool, again: bool) -> None:
    profile = profile_of(7, 5, chain=chain)
    models = StageModels.of(cost_model(profile, cluster_of(4), 4, SIZE, options=CostOptions(blocks=True)))
    models = (models.recomputing() if again else models).holding(3)
    options = CostOptions(blocks=True, recompute=again, in_flight=3)
    whole = StageModels.of(cost_model(profile, cluster_of(4), 4, SIZE, options=options))
    names = profile.topological_order()
    for begin, end in itertools.combinations(range(len(names) + 1), 2):
        cut, own = models.graph(names[begin:end]), whole.model(names[begin:end]).graph
        assert [node.name for node in cut.nodes] == [node.name for node in own.nodes]
        for one, other in zip([*cut.nodes, *cut.edges], [*own.nodes, *own.edges], strict=True):
            np.testing.assert_array_equal(one.costs.memory_bytes, other.costs.memory_bytes)
            np.testing.assert_array_equal(one.costs.time_ns, other.costs.time_ns)
