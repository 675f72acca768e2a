"""How to serve decode steps: stages, their groups of devices, groups of requests, and how each block is shared.

The time between two tokens of a request is the longer of what the busiest stage takes for all groups of requests, and
of one group's way through all stages and back: groups that start a busiest stage apart never wait for each other. For
each number of groups the quickest is found exactly, over every cut of the chain, every size of the device groups and
every way to share a block: a bound for the busiest stage that is tightened until one group's way is the longer, and
under each bound the shortest way by a dynamic program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from pipeplan.costs.communication import transfer_time
from pipeplan.costs.decode_splits import DecodeAt, StageLinks, StepWay
from pipeplan.errors import InfeasibleError, UsageError
from pipeplan.files import Block, Cluster, PlacedStage, Placement, Profile
from pipeplan.planning.decode_room import fits, most_requests, with_rows_of_few
from pipeplan.planning.decoding import ServingAsked
from pipeplan.search_constants import ALL_SIZES, GROUPS_PER_STAGE, MOST_RUN_BYTES
from pipeplan.sharding.decode_graph import TOKEN_BYTES, DecodeRuns, StepChoice, chain_of
from pipeplan.sharding.table import FloatArray, IntArray
from pipeplan.time_limit import Limit, TimeUpError, checkpoint
from pipeplan.units import format_bytes
from pipeplan.workload.elements import MAX_COUNT


@dataclass(frozen=True, slots=True)
class DecodeStage:
    """Blocks ``begin`` to ``end`` - 1 of the chain on ``devices`` from ``first`` on, and how they are shared."""

    begin: int
    end: int
    first: int
    devices: int
    choice: StepChoice


@dataclass(frozen=True, slots=True)
class DecodeChoice:
    """Stages in order for requests ``at`` their last step; ns between two tokens of a request.

    Where prompts join that is a bound: some way to share a block may be the quickest with a chunk and not in its step.
    """

    stages: tuple[DecodeStage, ...]
    at: DecodeAt
    token_ns: int

    @property
    def groups(self) -> int:
        """Groups of requests."""
        return len(self.at.sizes)

    def placement(self, order: Sequence[str]) -> Placement:
        """The stages of a chain's blocks as plans have them."""
        made = (
            PlacedStage(
                blocks=tuple(order[each.begin : each.end]),
                devices=tuple(range(each.first, each.first + each.devices)),
                shards=each.devices,
                configurations=tuple(str(cost.way.mesh) for cost in each.choice.costs) if each.devices > 1 else (),
            )
            for each in self.stages
        )
        devices = sum(each.devices for each in self.stages)
        return Placement(strategy="one-to-one", num_devices=devices, stages=tuple(made))

    @property
    def cache_bytes(self) -> tuple[int, ...]:
        """[stage] on each of its devices, of all groups at the last step."""
        return tuple(sum(cost.cache_bytes for cost in each.choice.costs) for each in self.stages)

    def kv(self, profile: Profile) -> str:
        """How the caches are shared: the plain way that it is, of one device each ``pp``, or a mixture's meshes."""
        order = chain_of(profile)
        ways = dict[str, None]()
        for stage in self.stages:
            for name, cost in zip(order[stage.begin : stage.end], stage.choice.costs, strict=True):
                if profile.by_id[name].cache_bytes_per_token and stage.devices > 1:
                    ways.setdefault(cost.way.form or str(cost.way.mesh))
        return "+".join(ways) or "pp"


@dataclass
class DecodeSearch:
    """What is asked: ``devices`` of ``limit`` bytes for ``batch`` requests with ``context`` tokens at the last step.

    ``positions`` is the number of stages, where it is asked for, ``shards`` and ``samples`` are of every block with a
    cache. Of the numbers of groups some were ``looked_at``, of these some ``refuted`` as no better, and some
    ``left`` for lack of time; ``least_ns`` are the bounds that are known, by number of groups.
    """

    profile: Profile
    devices: int
    batch: int
    context: int
    asked: ServingAsked
    limit: int | None = None
    cluster: Cluster | None = None
    positions: int | None = None
    shards: int | None = None
    samples: int | None = None
    looked_at: int = 0
    refuted: int = 0
    left: int = 0
    failures: list[UsageError] = field(default_factory=list)
    least_ns: dict[int, float] = field(default_factory=dict)

    @cached_property
    def order(self) -> tuple[str, ...]:
        """The chain. Raises UsageError."""
        return chain_of(self.profile)

    @cached_property
    def links(self) -> StageLinks:
        """Among devices of a stage."""
        return StageLinks(self.profile, self.cluster)

    @property
    def most_stages(self) -> int:
        """Of the pipeline."""
        return self.positions or min(self.devices // min(self.sizes, default=self.devices), len(self.order))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Devices of a group, of any number that is looked at and leaves no device over; named ways have several."""
        count = self.devices
        every = range(1, count + 1) if count <= ALL_SIZES else [1 << n for n in range(count.bit_length())]
        least = 2 if self.asked.named and count > 1 else 1
        pieces = self.asked.dcp or 1
        able = {each for each in (*every, count) if least <= each <= count and each % pieces == 0}
        sums = {0}
        for devices in range(1, count + 1):
            sums |= {devices} if any(devices - each in sums for each in able) else set()
        return tuple(each for each in sorted(able) if count - each in sums)

    def allows(self, block: Block, way: StepWay) -> bool:
        """Whether a block may be shared so, by what is asked."""
        devices = way.owners * way.shards * way.copies
        kv, cached = self.asked.kv or "auto", block.cache_bytes_per_token > 0
        if self.shards is not None and way.shards != self.shards:
            return False
        if cached and self.samples is not None and way.samples != self.samples:
            return False
        if cached and self.asked.dcp is not None and way.cache != self.asked.dcp:
            return False
        if kv == "auto" or devices == 1:
            return True
        if kv in ("dp", "tp") or not cached:
            return way.form == ("tp" if kv == "tp" else "dp")
        pieces = self.asked.dcp or devices
        return way.cache == pieces and way.shards == way.copies == 1 and way.by_queries == (kv == "cp-q")

    def best(
        self, limit: Limit | None = None, on_look: Callable[[DecodeChoice, int], None] | None = None
    ) -> DecodeChoice:
        """The quickest; a ``limit`` that is enforced waits for the first that is found.

        ``on_look`` is called with the quickest so far and the number of groups that was looked at.

        Raises:
            InfeasibleError: none fits; the text says how many requests would.
            UsageError: nothing has costs.
            TimeUpError: time was up before there was any.
        """
        if not self.sizes:
            raise self._no_costs()
        self._require_few()
        if not self.may_fit(self.batch):
            raise self._nothing()
        found: DecodeChoice | None = None
        try:
            numbers = self.numbers_of_groups(self.batch)
            for place, groups in enumerate(numbers):
                self.looked_at, self.left = place + 1, len(numbers) - place
                if found is not None and self._least_ns(groups) >= found.token_ns:
                    self.refuted += 1
                else:
                    choice = self.of_groups(groups, self.batch)
                    if choice is not None and (found is None or choice.token_ns < found.token_ns):
                        found = choice
                        if limit is not None:
                            limit.wait_no_longer()
                if on_look is not None and found is not None:
                    on_look(found, groups)
            self.left = 0
        except TimeUpError:
            if found is None:
                raise
        if found is None:
            raise self._nothing()
        return found

    def _require_few(self) -> None:
        """Refuse so many blocks that the times of all runs of them would take too much memory. Raises UsageError."""
        each = 8 * (4 * len(self.sizes) + 3)  # as found, as allowed by a bound, and sorted, of each size of groups
        most, count = math.isqrt(MOST_RUN_BYTES // each) - 1, len(self.order)
        if count > most:
            raise UsageError(
                f"{self.profile.where}: {count} blocks; decode steps are cut between any two of them, whose times "
                f"would take {format_bytes(each * (count + 1) ** 2)} of memory here, and at most {most} are allowed "
                f"with {self.devices} devices; profile larger blocks (--granularity layer)"
            )

    def bound_ns(self, found: DecodeChoice) -> float:
        """Ns between tokens that no choice is below, once the best was ``found`` in the time."""
        numbers = self.numbers_of_groups(self.batch)
        return min([found.token_ns, *map(self._least_ns, numbers[len(numbers) - self.left :])])

    def numbers_of_groups(self, batch: int) -> list[int]:
        """Of so many requests, powers of two first: where time is up, what is left lies between those looked at."""
        most = min(batch, GROUPS_PER_STAGE * self.most_stages)
        first = [1 << power for power in range(most.bit_length()) if 1 << power <= most]
        return [*first, *(each for each in range(1, most + 1) if each not in first)]

    def of_groups(self, groups: int, batch: int) -> DecodeChoice | None:
        """The quickest with so many groups of requests; None where none fits or has costs."""
        at = DecodeAt.of(batch, groups, self.context)
        runs = {size: self.runs(size, at) for size in self.sizes}
        steps = {size: self.runs(size, at, chunks=False) for size in self.sizes} if self.asked.prefill else runs
        cuts = _DecodeCuts(self, runs, steps, at)
        while (found := cuts.best()) is not None:
            new = [own[size].settle(begin, end) for begin, end, size in found.stages for own in (runs, steps)]  # all
            if not any(new):
                return cuts.choice(found)
        self.failures += [each for own in runs.values() for each in own.failures]
        return None

    def _least_ns(self, groups: int) -> float:
        """Ns that no choice with so many groups is below: all work spread evenly, and the quickest of every block."""
        at = DecodeAt.of(self.batch, groups, self.context)
        if groups in self.least_ns:
            return self.least_ns[groups]
        work, way = dict[str, float](), dict[str, float]()
        for size in self.sizes:
            ways = self.runs(size, at).ways
            for name, costs in ways.items():
                turn = min((each.turn_ns for each in costs), default=math.inf)
                work[name] = min(work.get(name, math.inf), size * turn)
                way[name] = min(way.get(name, math.inf), min((each.step_ns for each in costs), default=math.inf))
        alike = [self.profile.alike[name] for name in self.order]
        least = max(groups * sum(work[each] for each in alike) / self.devices, sum(way[each] for each in alike))
        self.least_ns[groups] = least
        return least

    def one_stage(self) -> list[StepChoice]:
        """All ways to share all blocks over all devices that no other beats in memory and time, least memory first."""
        at = DecodeAt.of(self.batch, 1, self.context)
        runs = self.runs(self.devices, at)
        return runs.frontier(0, len(self.order)) if all(runs.ways.values()) else []

    def runs(self, size: int, at: DecodeAt, *, chunks: bool = True) -> DecodeRuns:
        """All runs of blocks on so many devices, with chunks of prompts where these join."""
        chunk = (self.context, self.asked.prefill) if chunks and self.asked.prefill else None
        return DecodeRuns(self.profile, size, at, self.links, self.limit, self.allows, chunk)

    def _nothing(self) -> InfeasibleError | UsageError:
        """Why there is no choice: costs are missing, or the cache does not fit, and how many requests would."""
        if self.limit is None or not self._priced():
            return self._no_costs()
        fit, known = most_requests(replace(self, profile=with_rows_of_few(self.profile), failures=[], least_ns={}))
        room = f"room for {'' if known else 'at most '}{fit} such requests"
        weights = "" if fit else f": {format_bytes(self.limit)} per device hold not even one"
        rows = "" if not fit or self._fits(fit) else " (and profile blocks with fewer requests, too: --batch 1)"
        return InfeasibleError(
            f"a cache for {self.batch} requests of {self.context} tokens does not fit into {format_bytes(self.limit)} "
            f"per device on {self.devices} devices{self.asked.words}; there is {room}{weights}; lower --batch"
            f"{f' to {fit}' if fit else ''}{rows} or --context, raise --memory, or give more --devices"
        )

    def _fits(self, batch: int) -> bool:
        """Whether so many do by the rows that there are, as far as the time allows to say."""
        try:
            return fits(replace(self, failures=[], least_ns={}), batch)
        except TimeUpError:
            return True

    def _priced(self) -> bool:
        """Whether some cut has costs, whatever fits."""
        return fits(replace(self, limit=None, failures=[], least_ns={}), self.batch)

    def may_fit(self, batch: int) -> bool:
        """Whether what all blocks keep at least, on all devices together, is no more than these have."""
        at = DecodeAt.of(batch, 1, self.context)
        least = dict[str, float]()
        for size in self.sizes:
            for name, costs in self.runs(size, at).ways.items():
                kept = min((size * each.kept_bytes for each in costs), default=math.inf)
                least[name] = min(least.get(name, math.inf), kept)
        whole = sum(least[self.profile.alike[name]] for name in self.order)
        return self.limit is None or not math.isfinite(whole) or whole <= self.limit * self.devices

    def _no_costs(self) -> UsageError:
        if not self.sizes:
            return UsageError(f"--dcp {self.asked.dcp} does not divide any group of {self.devices} devices; lower it")
        known = sorted({row.shards for block in self.profile.kinds for row in block.phases if row.phase == "decode"})
        given, wanted = (",".join(map(str, each)) for each in (known, sorted({*known, *self.sizes})))
        remedy = f"profile the model with --shards {wanted} if its heads can be shared so, or give other --devices"
        why = f": the profile has those of --shards {given}; {remedy}"
        why = f": {self.failures[0]}" if self.failures else why
        return UsageError(
            f"no stages of {self.devices} devices have costs of decode steps{self.asked.words} for {self.batch} "
            f"requests of {self.context} tokens{why}"
        )


@dataclass(frozen=True, slots=True)
class _DecodeDraft:
    """Runs (begin, end, devices) in order; by what is known of them, which may be bounds."""

    token_ns: float
    stages: tuple[tuple[int, int, int], ...]


@dataclass
class _DecodeCuts:
    """Cuts of the chain for one number of groups, by what is known of runs [devices of a group], and of their ``steps``
    alone where prompts join: for chunks no group waits on its way.
    """

    search: DecodeSearch
    runs: Mapping[int, DecodeRuns]
    steps: Mapping[int, DecodeRuns]
    at: DecodeAt

    def best(self) -> _DecodeDraft | None:
        """The quickest by what is known; None where there is none."""
        times = np.unique(np.concatenate([own.least.ravel() for own in self.runs.values()]))
        bounds, groups = times[np.isfinite(times)], len(self.at.sizes)
        low, high = 0, len(bounds)  # the first bound for the busiest at which one group's way is no longer than all's
        while low < high:
            middle = (low + high) // 2
            draft = self._shortest(bounds[middle])
            if draft is not None and draft.token_ns <= groups * bounds[middle]:
                high = middle
            else:
                low = middle + 1
        near = (self._shortest(bounds[place]) for place in (low - 1, low) if 0 <= place < len(bounds))
        return min(
            (self._timed(each) for each in near if each is not None), key=lambda each: each.token_ns, default=None
        )

    def _timed(self, draft: _DecodeDraft) -> _DecodeDraft:
        busiest = max(float(self.runs[size].least[begin, end]) for begin, end, size in draft.stages)
        return _DecodeDraft(max(draft.token_ns, len(self.at.sizes) * busiest), draft.stages)

    def _shortest(self, busiest: float) -> _DecodeDraft | None:
        """The quickest way of one group through stages that take at most so long each.

        ``found`` [devices so far, blocks so far] is its ns, a layer for each number of stages where that is given.
        """
        checkpoint()
        count, last = self.search.devices, len(self.search.order)
        most = self.search.positions or 1
        price = {
            size: np.where(own.least <= busiest, self.steps[size].least, np.inf) for size, own in self.runs.items()
        }
        found = np.full((most + 1, count + 1, last + 1), np.inf)
        came = np.zeros((most + 1, count + 1, last + 1, 2), np.int64)
        found[0, 0, 0] = 0.0
        layers = range(1, most + 1) if self.search.positions else [0]
        for layer in layers:
            before = layer - 1 if self.search.positions else 0
            for devices in range(1, count + 1):
                for size in (each for each in price if each <= devices):
                    first = devices - size
                    whole = found[before, first][:, None] + self._hops(first)[:, None] + price[size]
                    begin = whole.argmin(axis=0)
                    value = whole[begin, np.arange(last + 1)]
                    better = value < found[layer, devices]
                    found[layer, devices][better] = value[better]
                    came[layer, devices][better] = np.stack((begin, np.full(last + 1, size)), axis=1)[better]
        end_layer = layers[-1]
        total = float(found[end_layer, count, last])
        if not math.isfinite(total):
            return None
        return _DecodeDraft(total + self._back_ns(), tuple(self._traced(came, end_layer)))

    def _traced(self, came: IntArray, layer: int) -> list[tuple[int, int, int]]:
        devices, end, found = self.search.devices, len(self.search.order), list[tuple[int, int, int]]()
        while end:
            begin, size = map(int, came[layer, devices, end])
            found.append((begin, end, size))
            devices, end, layer = devices - size, begin, layer - 1 if self.search.positions else layer
        return found[::-1]

    def _hops(self, first: int) -> FloatArray:
        """[begin] ns of the message to a stage that begins there, on devices from ``first`` on."""
        some = next(iter(self.runs.values()))
        sizes = [some.given_bytes(begin) if begin else 0 for begin in range(len(self.search.order) + 1)]
        known = {size: sum(transfer_time(self.search.cluster, first - 1, first, size)) for size in set(sizes) if first}
        return np.array([known.get(size, 0) if size else 0 for size in sizes], np.float64)

    def _back_ns(self) -> int:
        """Ns of the tokens' way back to the first stage."""
        size = self.at.largest * TOKEN_BYTES
        return sum(transfer_time(self.search.cluster, self.search.devices - 1, 0, size))

    def choice(self, draft: _DecodeDraft) -> DecodeChoice:
        """A settled draft."""
        stages, first = list[DecodeStage](), 0
        for begin, end, size in draft.stages:
            stages.append(DecodeStage(begin, end, first, size, self.runs[size].choice(begin, end)))
            first += size
        return DecodeChoice(tuple(stages), self.at, round(draft.token_ns))


def max_requests(search: DecodeSearch, chosen: DecodeChoice) -> int | None:
    """The most requests of as many tokens that a choice's stages have memory for; None without a limit.

    No more than a plan can say, where blocks keep little for each or nothing. What blocks work in is taken to grow with
    the requests.
    """
    if search.limit is None:
        return None
    low, high = search.batch, 2 * search.batch
    while low < MAX_COUNT and _needed(search, chosen, high) <= search.limit:
        low, high = high, 2 * high
    while low < MAX_COUNT and low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if _needed(search, chosen, middle) <= search.limit else (low, middle)
    return min(low, MAX_COUNT)


def _needed(search: DecodeSearch, chosen: DecodeChoice, batch: int) -> int:
    """Bytes on the fullest device with so many requests, as many as are asked for or more."""
    at = DecodeAt.of(batch, chosen.groups, search.context)
    return max(_stage_bytes(each, chosen.at, at) for each in chosen.stages)


def _stage_bytes(stage: DecodeStage, asked: DecodeAt, at: DecodeAt) -> int:
    cached = state = 0
    for cost in stage.choice.costs:
        parts = cost.way.samples if cost.way.cache > 1 else cost.way.owners
        cached += at.owned(parts) * (cost.cache_bytes // asked.owned(parts))
        state += cost.state.total
    working = stage.choice.working_bytes + stage.choice.given_bytes
    return state + cached + -(-working * at.largest // asked.largest)
