"""The choice of stages, groups and ways to share: as good as every other one there is, counted one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, product
from typing import Any

import pytest

import pipeplan as face
from builders.clusters import cluster_of
from builders.decoders import drawn_decoder, with_prompts
from pipeplan import Block, Cluster, InfeasibleError, Profile, UsageError
from pipeplan.costs.communication import Exchange, transfer_time
from pipeplan.costs.decode_loop import chunk_costs
from pipeplan.costs.decode_splits import DecodeAt, StageLinks, StepCost, StepWay, step_cost, ways_of
from pipeplan.planning import decode_choice
from pipeplan.planning.decode_choice import DecodeChoice, DecodeSearch, max_requests
from pipeplan.planning.decoding import ServingAsked
from pipeplan.search_constants import GROUPS_PER_STAGE
from support.marks import always, one_in, slow_but

pytestmark = pytest.mark.counted

BATCH, CONTEXT, HIDDEN, TOKEN = 8, 400, 64, 8


def searched(profile: Profile, devices: int, limit: int | None = None, **asked: Any) -> DecodeSearch:
    more = {name: asked.pop(name) for name in ("cluster", "positions", "shards", "samples") if name in asked}
    batch, context = asked.pop("batch", BATCH), asked.pop("context", CONTEXT)
    return DecodeSearch(profile, devices, batch, context, ServingAsked(**asked), limit, **more)


class Every:
    """Every choice, by plain enumeration."""

    def __init__(self, search: DecodeSearch) -> None:
        self.search, self.links = search, StageLinks(search.profile, search.cluster)
        self.blocks = list(search.profile.blocks)

    def gather_ns(self, owners: int, into: int, devices: int, size: int) -> int:
        """Until what is shared out lies as it shall: all have it, or each of a whole number of neighbours."""
        if into % owners == 0:
            return 0
        into = into if owners % into == 0 else 1
        beside, each = devices // owners, owners // into
        groups = [
            [first * each * beside + place * beside + copy for place in range(each)]
            for first in range(into)
            for copy in range(beside)
        ]
        return round(self.links.ns(Exchange("all_gather", -(-size // into)), groups))

    def stages(self, begin: int, end: int, devices: int, at: DecodeAt) -> Iterator[tuple[int, int]]:
        """Ns and bytes of every way to share blocks ``begin`` to ``end`` - 1."""
        ways = [[*self.costs(place, devices, at)] for place in range(begin, end)]
        last = end == len(self.blocks)
        given = 0 if last else HIDDEN * at.largest
        for chosen in product(*ways):
            owners = [cost.way.owners for cost in chosen]
            step = sum(cost.step_ns for cost in chosen)
            step += sum(self.gather_ns(a, b, devices, HIDDEN * at.largest) for a, b in pairwise(owners))
            step += self.gather_ns(owners[-1], 1, devices, given or TOKEN * at.largest)
            working = max(cost.working_bytes for cost in chosen)
            yield step, sum(cost.kept_bytes for cost in chosen) + working + len(at.sizes) * given

    def turns(self, begin: int, end: int, devices: int, at: DecodeAt) -> set[tuple[int, int]]:
        """Ns of steps and of chunks beside them, that no other way to share these blocks is quicker than in both."""
        found = set[tuple[int, int]]()
        given = TOKEN if end == len(self.blocks) else HIDDEN
        for chosen in product(*([*self.costs(place, devices, at)] for place in range(begin, end))):
            owners = [cost.way.owners for cost in chosen]
            step = sum(cost.step_ns for cost in chosen) + self.gather_ns(owners[-1], 1, devices, given * at.largest)
            step += sum(self.gather_ns(a, b, devices, HIDDEN * at.largest) for a, b in pairwise(owners))
            names = [(block.id, cost.way.shards) for block, cost in zip(self.blocks[begin:end], chosen, strict=True)]
            (chunk,) = chunk_costs(self.search.profile, [names], self.search.context, self.search.asked.prefill or 0)
            found.add((step, chunk.chunk_ns))
        return {one for one in found if not any(o != one and o[0] <= one[0] and o[1] <= one[1] for o in found)}

    def costs(self, place: int, devices: int, at: DecodeAt) -> Iterator[StepCost]:
        block = self.blocks[place]
        for way in ways_of(block, devices):
            if self.allowed(block.cache_bytes_per_token > 0, way, devices):
                try:
                    yield step_cost(self.search.profile, block, way, at, self.links)
                except UsageError:
                    continue

    def allowed(self, cached: bool, way: StepWay, devices: int) -> bool:
        """By the names of the meshes."""
        asked, text = self.search.asked, str(way.mesh)
        if cached and asked.dcp is not None and way.cache != asked.dcp:
            return False
        if asked.kv in (None, "auto") or devices == 1:
            return True
        forms = {"dp": "samples", "tp": "shards", "cp": "cache", "cp-q": "cacheq"}
        return text == f"{forms[asked.kv] if cached or asked.kv == 'tp' else 'samples'}{devices}"

    def token_ns(self) -> dict[int, int]:
        """{groups: ns between tokens of the quickest choice that fits}"""
        search, found = self.search, dict[int, int]()
        for groups in range(1, min(search.batch, GROUPS_PER_STAGE * search.most_stages) + 1):
            at = DecodeAt.of(search.batch, groups, search.context)
            best = dict[tuple[int, int, int], int | None]()
            for sizes, ends in self.cuts():
                runs = [*zip((0, *ends), (*ends, len(self.blocks)), sizes, strict=True)]
                for run in runs:
                    if run not in best:
                        fit = (ns for ns, held in self.stages(*run, at) if search.limit is None or held <= search.limit)
                        best[run] = min(fit, default=None)
                steps = [best[run] for run in runs]
                if any(step is None for step in steps):
                    continue
                firsts = [sum(sizes[:number]) for number in range(1, len(sizes))]
                hops = sum(sum(transfer_time(search.cluster, d - 1, d, HIDDEN * at.largest)) for d in firsts)
                back = sum(transfer_time(search.cluster, search.devices - 1, 0, TOKEN * at.largest))
                ns = [step for step in steps if step is not None]
                token = max(groups * max(ns), sum(ns) + hops + back)
                found[groups] = min(found.get(groups, token), token)
        return found

    def cuts(self) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        """Sizes of the groups of devices, and where the blocks are cut."""
        search, count = self.search, len(self.blocks)
        for stages in range(1, min(search.devices, count) + 1):
            if search.positions not in (None, stages):
                continue
            for sizes in product(search.sizes, repeat=stages):
                if sum(sizes) == search.devices:
                    for ends in combinations(range(1, count), stages - 1):
                        yield sizes, ends


def best_of(search: DecodeSearch) -> int:
    return min(Every(search).token_ns().values())


def no_more_than(found: DecodeChoice, search: DecodeSearch) -> bool:
    return search.limit is None or all(each.choice.memory_bytes <= search.limit for each in found.stages)


@one_in(2, "seed", range(4))
@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("cluster", [None, cluster_of(4, latency_ns=900, bandwidth=10**8)])
def test_no_choice_is_quicker(seed: int, devices: int, cluster: Cluster | None) -> None:
    search = searched(drawn_decoder(seed, device="RTX-A5000-24GB"), devices, cluster=cluster)
    assert search.best().token_ns == best_of(search)


@one_in(2, "seed", range(4))
@pytest.mark.parametrize("share", [0.5, 0.6, 0.75])
def test_no_choice_that_fits_is_quicker(seed: int, share: float) -> None:
    """Memory of a share of what one device would need of all."""
    profile = drawn_decoder(seed, layers=1, core_ns=0.05)
    whole = searched(profile, 1).best().stages[0].choice.memory_bytes
    search = searched(profile, 3, round(share * whole))
    every = Every(search).token_ns()
    if not every:
        with pytest.raises(InfeasibleError, match="there is room for"):
            search.best()
        return
    found = search.best()
    assert found.token_ns == min(every.values())
    assert no_more_than(found, search)


@pytest.mark.parametrize("kv", ["dp", "tp", "cp", "cp-q"])
@pytest.mark.parametrize("seed", range(2))
def test_what_is_named_is_the_quickest_of_its_kind(kv: Any, seed: int) -> None:
    search = searched(drawn_decoder(seed, device="RTX-A5000-24GB"), 4, kv=kv)
    found = search.best()
    assert found.kv(search.profile) == kv
    assert found.token_ns == best_of(search)


@slow_but("seed", range(12), lambda _: False, lambda seed: seed >= 3)
@pytest.mark.parametrize("limited", [False, True])
def test_no_choice_is_quicker_on_four_devices(seed: int, limited: bool) -> None:
    profile = drawn_decoder(seed, device="RTX-A5000-24GB" if seed % 2 else "", core_ns=0.01 * 4 ** (seed % 5))
    whole = searched(profile, 1).best().stages[0].choice.memory_bytes
    search = searched(profile, 4, round((0.3 + 0.05 * (seed % 4)) * whole) if limited else None)
    every = Every(search).token_ns()
    if not every:
        with pytest.raises(InfeasibleError):
            search.best()
        return
    found = search.best()
    assert found.token_ns == min(every.values())
    assert no_more_than(found, search)


@pytest.mark.parametrize("seed", range(3))
def test_each_number_of_groups_has_its_quickest(seed: int) -> None:
    """Of those that the search leaves out, none is quicker than what it says that they take at least."""
    search = searched(drawn_decoder(seed), 2)
    for groups, token in Every(search).token_ns().items():
        found = search.of_groups(groups, BATCH)
        assert found is not None
        assert found.token_ns == token >= search._least_ns(groups)


def test_the_number_of_stages_may_be_said() -> None:
    profile = drawn_decoder(1)
    for stages in (1, 2, 3):
        search = searched(profile, 4, positions=stages)
        found = search.best()
        assert len(found.stages) == stages
        assert found.token_ns == best_of(search)


@pytest.mark.parametrize("dcp", [1, 2, 4])
def test_decode_context_parallelism_is_how_many_share_a_cache(dcp: int) -> None:
    search = searched(drawn_decoder(2), 4, dcp=dcp)
    found = search.best()
    costs = [cost for stage in found.stages for cost in stage.choice.costs if cost.cache_bytes]
    assert {cost.way.cache for cost in costs} == {dcp}
    assert found.token_ns == best_of(search)


def with_rows_of_one(profile: Profile) -> Profile:
    """Of one request blocks take and work in as much as of the fewest that they have rows of."""

    def more(block: Block) -> Block:
        fewest = min(row.microbatch_size for row in block.phases)
        rows = [row for row in block.phases if row.microbatch_size == fewest > 1]
        added = (row.model_copy(update={"microbatch_size": 1}) for row in rows)
        return block.model_copy(update={"phases": (*block.phases, *added)})

    return profile.model_copy(update={"blocks": tuple(map(more, profile.blocks))})


@slow_but(
    "batches, devices, kv",
    [((1, 3, 8), 2, None), ((1, 3, 8), 2, "cp"), ((3, 8), 2, None), ((3, 8), 3, None), ((8,), 2, None)],
    lambda case: case[1] == 2 and len(case[0]) > 1 and case != ((1, 3, 8), 2, None),
    always,
)
def test_what_does_not_fit_says_how_many_requests_would(batches: Sequence[int], devices: int, kv: Any) -> None:
    """By plain enumeration; where the profile has no rows of so few, it says that, too."""
    seen = set[int]()
    for seed, limit in product(range(3, 5), (70_000, 120_000, 180_000)):
        profile = drawn_decoder(seed, batches=batches)
        if Every(searched(profile, devices, limit, kv=kv)).token_ns():
            continue
        with pytest.raises(InfeasibleError, match=r"8 requests of 400 tokens .* there is room for") as error:
            searched(profile, devices, limit, kv=kv).best()
        fit, of_one = int(str(error.value).split("room for ")[1].split()[0]), with_rows_of_one(profile)
        assert not fit or Every(searched(of_one, devices, limit, batch=fit, kv=kv)).token_ns()
        assert not any(
            Every(searched(of_one, devices, limit, batch=more, kv=kv)).token_ns() for more in range(fit + 1, 8)
        )
        priced = not fit or Every(searched(profile, devices, limit, batch=fit, kv=kv)).token_ns()
        assert priced or f"to {fit} (and profile blocks with fewer requests, too: --batch 1)" in str(error.value)
        seen.add(fit)
    assert len(seen) > 1


def test_the_most_requests_may_come_in_any_number_of_groups() -> None:
    """Of one or of as many groups as stages only three fit; as with one group, work is that of four at once."""
    profile = drawn_decoder(5, layers=2, batches=(1, 3, 8, 64))
    with pytest.raises(InfeasibleError, match="room for 4 such"):
        searched(profile, 4, 120_000, kv="cp", batch=32).best()
    assert searched(profile, 4, 120_000, kv="cp", batch=4).best().groups not in (1, 2)


def test_the_most_requests_are_those_that_still_fit() -> None:
    profile = drawn_decoder(3)
    search = searched(profile, 2, 1_000_000)
    found = search.best()
    most = max_requests(search, found)
    assert most is not None
    assert most >= BATCH
    meshes = [cost.way for stage in found.stages for cost in stage.choice.costs]
    for batch, fits in ((most, True), (most + 1, False)):
        at = DecodeAt.of(batch, found.groups, CONTEXT)
        need = list[int]()
        for stage in found.stages:
            cached = sum(
                at.owned(cost.way.samples if cost.way.cache > 1 else cost.way.owners)
                * (cost.cache_bytes // found.at.owned(cost.way.samples if cost.way.cache > 1 else cost.way.owners))
                for cost in stage.choice.costs
            )
            work = -(-(stage.choice.working_bytes + stage.choice.given_bytes) * at.largest // found.at.largest)
            need.append(sum(cost.state.total for cost in stage.choice.costs) + cached + work)
        assert (max(need) <= 1_000_000) is fits
    assert meshes
    assert max_requests(searched(profile, 2), found) is None


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"context": 4000}, "rows for contexts of 10, 100, 400, not of 4000"),
        ({"batch": 90}, "rows for batches of 1, 3, 8, not of"),
        ({"kv": "tp", "devices": 3}, "no stages of 3 .* with --kv tp .* --shards 1,2,4; profile .* --shards 1,2,3,4"),
        ({"dcp": 3}, "--dcp 3 does not divide any group of 2 devices"),
        ({"kv": "cp", "context": 9}, "with --kv cp .* not of 9"),
    ],
)
def test_what_has_no_costs_is_said(asked: dict[str, Any], text: str) -> None:
    devices = asked.pop("devices", 2)
    with pytest.raises(UsageError, match=text):
        searched(drawn_decoder(0), devices, **asked).best()


def test_more_blocks_than_there_is_room_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of runs are squares of 4 blocks and one, of two sizes of groups in eleven copies."""
    search = searched(drawn_decoder(3), 2)
    monkeypatch.setattr(decode_choice, "MOST_RUN_BYTES", 88 * 5**2 - 1)
    with pytest.raises(UsageError, match=r"4 blocks; .* and at most 3 are allowed with 2 devices; profile larger"):
        search.best()
    monkeypatch.setattr(decode_choice, "MOST_RUN_BYTES", 88 * 5**2)
    assert search.best().token_ns > 0


def with_prompts_ns(search: DecodeSearch) -> int:
    """Ns between tokens of the quickest choice with a chunk beside every step, which no step waits for on its way."""
    every, found = Every(search), list[int]()
    for groups in range(1, min(search.batch, GROUPS_PER_STAGE * search.most_stages) + 1):
        at = DecodeAt.of(search.batch, groups, search.context)
        for sizes, ends in every.cuts():
            runs = zip((0, *ends), (*ends, len(every.blocks)), sizes, strict=True)
            for chosen in product(*(every.turns(*run, at) for run in runs)):
                found.append(max(groups * max(map(sum, chosen)), sum(step for step, _ in chosen)))
    return min(found)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 4))])
@pytest.mark.parametrize(
    ("tokens", "devices"), [(100, 2), *(pytest.param(*each, marks=pytest.mark.long) for each in ((400, 2), (100, 3)))]
)
def test_no_choice_is_quicker_with_prompts(seed: int, tokens: int, devices: int) -> None:
    """What is proved holds, and what is found is that of these, each of whose blocks is shared in one or two ways."""
    profile = with_prompts(drawn_decoder(seed, 3, shards=(1,)))
    asked: dict[str, Any] = {"batch": BATCH, "context": CONTEXT, "prefill": tokens, "deterministic": True}
    found = face.search(profile, devices=devices, time_limit=10.0, **asked)
    least = with_prompts_ns(searched(profile, devices, prefill=tokens))
    assert found.decode is not None
    assert found.decode.token_lower_bound_ns <= least <= found.decode.token_ns
    assert found.decode.token_ns == least
    assert face.check(found.plan, profile=profile).valid
