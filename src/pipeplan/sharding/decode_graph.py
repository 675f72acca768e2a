"""The frontier of a decode step: every block in any way to share its requests, its cache or its heads.

The same search as for training (:mod:`pipeplan.sharding.tracking`) over other costs: a block's memory is its parameters
and its cache at the last step, its time a group's step. Between blocks that share requests out differently the hidden
state is gathered, or a device drops what is not its own, at no cost; what leaves a stage is gathered. So data, tensor
and cache parallelism are points of one frontier, and so are mixtures of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from pipeplan.costs.communication import Exchange
from pipeplan.costs.decode_loop import chunk_costs
from pipeplan.costs.decode_splits import DecodeAt, StageLinks, StepCost, StepWay, gathered, known_ways
from pipeplan.costs.decoding import bytes_between
from pipeplan.errors import UsageError
from pipeplan.files import Block, Profile
from pipeplan.sharding.graph import CostEdge, CostGraph, CostNode, contract
from pipeplan.sharding.table import FloatArray, IntArray, Table, product, table
from pipeplan.sharding.tracking import track
from pipeplan.time_limit import checkpoint

TOKEN_BYTES = 8
"""Of a token's number, which the last stage gives for each request."""


@dataclass(frozen=True, slots=True)
class StepChoice:
    """The ways of a run of blocks, ``costs`` [block], with what it takes: ns of a group's turn and bytes on a device.

    A turn is a step, and a chunk of a prompt where prompts join. ``given_bytes`` are what it hands on of all groups,
    whole; ``between_ns`` is what gathering between its blocks and at its end takes.
    """

    costs: tuple[StepCost, ...]
    turn_ns: int
    between_ns: int
    given_bytes: int

    @property
    def kept_bytes(self) -> int:
        """State and cache."""
        return sum(each.kept_bytes for each in self.costs)

    @property
    def step_ns(self) -> int:
        """Of a turn the step."""
        return self.turn_ns - sum(each.chunk_ns for each in self.costs)

    @property
    def working_bytes(self) -> int:
        """The most that a block works in during a step."""
        return max(each.working_bytes for each in self.costs)

    @property
    def memory_bytes(self) -> int:
        """All on each device, with what it gave of every group, as if the next stage had taken nothing yet."""
        return self.kept_bytes + max(each.needed_bytes for each in self.costs) + self.given_bytes


@dataclass
class DecodeRuns:
    """All runs of a chain's blocks on ``devices`` of ``limit`` bytes each; run i..j has blocks i to j - 1.

    ``least`` [begin, end] is ns of the quickest strategy that fits, infinite where none does: a bound, until the run is
    settled, since only the largest of what blocks work in counts, which is not tracked. ``allows`` says which ways are
    looked at. With a ``chunk`` (tokens of a prompt, and of the last chunk of it) turns have one beside each step.

    Raises:
        UsageError: blocks are no chain.
    """

    profile: Profile
    devices: int
    at: DecodeAt
    links: StageLinks
    limit: int | None
    allows: Callable[[Block, StepWay], bool]
    chunk: tuple[int, int] | None = None
    failures: list[UsageError] = field(default_factory=list)
    _settled: dict[tuple[int, int], StepChoice | None] = field(default_factory=dict)
    _tables: dict[object, tuple[int, Table]] = field(default_factory=dict)

    @cached_property
    def order(self) -> tuple[str, ...]:
        """The chain."""
        return chain_of(self.profile)

    @cached_property
    def ways(self) -> Mapping[str, Sequence[StepCost]]:
        """{one of the blocks that are alike: its ways}, those that no other is better than left."""
        found = {}
        for block in self.profile.kinds:
            checkpoint()
            costs, failures = known_ways(self.profile, block, self.devices, self.at, self.links, self.allows)
            costs = [*self._with_chunks(block, costs, failures)]
            self.failures += [] if costs else failures
            found[block.id] = [each for each in costs if not any(_replaces(other, each) for other in costs)]
        return found

    def _with_chunks(self, block: Block, costs: Sequence[StepCost], failures: list[UsageError]) -> Iterator[StepCost]:
        """The ways, with a chunk beside each step; without those that have no costs of chunks."""
        for cost in costs:
            if self.chunk is None:
                yield cost
                continue
            try:
                (chunk,) = chunk_costs(self.profile, [[(block.id, cost.way.shards)]], *self.chunk)
                needed = chunk.workspace_bytes + chunk.given_bytes
                yield cost._replace(chunk_ns=chunk.chunk_ns, chunk_bytes=needed)
            except UsageError as error:
                failures.append(error)

    def of(self, name: str) -> Sequence[StepCost]:
        """A block's ways."""
        return self.ways[self.profile.alike[name]]

    def given_bytes(self, end: int) -> int:
        """What a run that ends there gives of the largest group: its hidden state, or nothing more than tokens."""
        return self.at.largest * self._hidden(end) if end < len(self.order) else 0

    def _hidden(self, end: int) -> int:
        """Bytes of a request's hidden state before a block."""
        return self._hidden_bytes[end]

    @cached_property
    def _hidden_bytes(self) -> list[int]:
        into = self.profile.edges_into
        return [sum(bytes_between(self.profile, edge, 1) for edge in into.get(name, ())) for name in self.order]

    @cached_property
    def least(self) -> FloatArray:
        """See above."""
        count = len(self.order)
        found = np.full((count + 1, count + 1), np.inf)
        if not all(self.ways.values()):
            return found
        working = [min(each.needed_bytes for each in self.of(name)) for name in self.order]
        endings = [self._ending(end) for end in range(1, count + 1)]
        known = dict[object, float]()
        for begin in range(count):
            checkpoint()
            number, costs = self._first(self.order[begin])
            most = 0
            for end in range(begin + 1, count + 1):
                if end > begin + 1:
                    number, costs = self._longer(number, costs, end - 1)
                most = max(most, working[end - 1])
                key = number, most, self.given_bytes(end)
                if key not in known:
                    known[key] = _quickest(costs, endings[end - 1], self._space(end, most))
                found[begin, end] = known[key]
        return found

    def _space(self, end: int, working: int) -> float:
        return np.inf if self.limit is None else self.limit - working - len(self.at.sizes) * self.given_bytes(end)

    def _first(self, name: str) -> tuple[int, Table]:
        return self._known(("first", self.profile.alike[name]), lambda: self._node(name))

    def _longer(self, number: int, costs: Table, last: int) -> tuple[int, Table]:
        """A run with one block more, which is worked out once for all that are alike."""
        names = self.order[last - 1], self.order[last]
        key = number, *(self.profile.alike[name] for name in names), self._hidden(last)
        return self._known(key, lambda: product(contract(costs, self._edge(*names, last)), self._first(names[1])[1]))

    def _known(self, key: object, make: Callable[[], Table]) -> tuple[int, Table]:
        if key not in self._tables:
            made = make()
            self._tables[key] = len(self._tables), made
        return self._tables[key]

    def _node(self, name: str) -> Table:
        ways = self.of(name)
        memory = [0 if self.limit is None else each.kept_bytes for each in ways]
        return table(np.array(memory, np.int64), np.array([each.turn_ns for each in ways], np.int64))

    def _edge(self, source: str, target: str, place: int) -> Table:
        size = self.at.largest * self._hidden(place)
        owners = [each.way.owners for each in self.of(target)]
        key = "edge", self.profile.alike[source], self.profile.alike[target], size
        return self._known(key, lambda: table(0, self._times(self.of(source), owners, size)))[1]

    def _ending(self, end: int) -> IntArray:
        """[way of the last block] ns of gathering what a run gives."""
        return self._gathering(self.of(self.order[end - 1]), end)

    def _gathering(self, sources: Sequence[StepCost], end: int) -> IntArray:
        size = self.given_bytes(end) or self.at.largest * TOKEN_BYTES
        made: IntArray = self._times(sources, [1], size)[:, 0]
        return made

    def _times(self, sources: Sequence[StepCost], targets: Sequence[int], size: int) -> IntArray:
        return np.array([[self._gather_ns(each.way.owners, to, size) for to in targets] for each in sources], np.int64)

    def _gather_ns(self, owners: int, into: int, size: int) -> int:
        """Ns until ``size`` bytes that are shared out lie as they shall."""
        if into % owners == 0:
            return 0  # what is not a device's own is dropped
        into = into if owners % into == 0 else 1
        groups = gathered(owners, into, self.devices)
        return round(self.links.ns(Exchange("all_gather", -(-size // into)), groups))

    # The runs that are wanted -----------------------------------------------------------------------------------------

    def settle(self, begin: int, end: int) -> bool:
        """Find out what a run takes, by its quickest strategy that fits; whether that was new."""
        if (begin, end) in self._settled:
            return False
        self._settled[begin, end] = choice = self._best(begin, end)
        self.least[begin, end] = np.inf if choice is None else choice.turn_ns
        return True

    def choice(self, begin: int, end: int) -> StepChoice:
        """The quickest strategy of a settled run that fits."""
        choice = self._settled[begin, end]
        assert choice is not None
        return choice

    def frontier(self, begin: int, end: int) -> list[StepChoice]:
        """All strategies of a run that no other beats in memory and time, least memory first."""
        found: list[StepChoice] = []
        every = (each for level in self._levels(begin, end) for each in self._tracked(begin, end, level))
        for choice in sorted(every, key=lambda each: (each.memory_bytes, each.turn_ns)):
            if not found or choice.turn_ns < found[-1].step_ns:
                found.append(choice)
        return found

    def _best(self, begin: int, end: int) -> StepChoice | None:
        """Of strategies that work in less and less: where that is much, others fit that are slower."""
        best: StepChoice | None = None
        levels = self._levels(begin, end)
        for level in levels if self.limit is not None else levels[:1]:
            for choice in self._tracked(begin, end, level, quickest=True):
                if best is None or choice.turn_ns < best.turn_ns:
                    best = choice
            if best is not None and best.turn_ns <= self.least[begin, end]:
                break
        return best

    def _levels(self, begin: int, end: int) -> list[int]:
        """What blocks may work in, most first: only what is less than for another choice leads to others."""
        ways = [self.of(name) for name in self.order[begin:end]]
        least = max(min(each.needed_bytes for each in own) for own in ways)
        return sorted({max(each.needed_bytes, least) for own in ways for each in own}, reverse=True)

    def _tracked(self, begin: int, end: int, level: int, *, quickest: bool = False) -> list[StepChoice]:
        """The frontier of ways that work in at most so much; or of it only the quickest that fits."""
        names = self.order[begin:end]
        ways = {name: [each for each in self.of(name) if level is None or each.needed_bytes <= level] for name in names}
        graph = self._graph(begin, end, ways)
        tracked = track(graph)
        space = self._space(end, level)
        points = range(len(tracked.memory_bytes))
        if quickest:
            last = int(np.searchsorted(tracked.memory_bytes, space, side="right")) - 1
            points = range(last, last + 1) if last >= 0 else range(0)
        found = []
        for point in points:
            chosen = tracked.strategy(point).configurations
            costs = tuple(ways[name][chosen[name]] for name in names)
            step = int(tracked.time_ns[point])
            own = sum(each.turn_ns for each in costs)
            found.append(StepChoice(costs, step, step - own, len(self.at.sizes) * self.given_bytes(end)))
        return found

    def _graph(self, begin: int, end: int, ways: Mapping[str, Sequence[StepCost]]) -> CostGraph:
        names, known = self.order[begin:end], dict[object, Table]()

        def once(key: object, make: Callable[[], Table]) -> Table:
            if key not in known:
                known[key] = make()
            return known[key]

        def node(name: str, ends: bool) -> CostNode:
            costs = ways[name]
            memory = np.array([each.kept_bytes for each in costs], np.int64)
            time = np.array([each.turn_ns for each in costs], np.int64)
            after = self._gathering(costs, end) if ends else 0
            made = once((self.profile.alike[name], ends), lambda: table(memory, time + after))
            return CostNode(name, tuple(str(each.way.mesh) for each in costs), made)

        def edge(place: int) -> CostEdge:
            source, target = self.order[place - 1], self.order[place]
            size = self.at.largest * self._hidden(place)
            key = self.profile.alike[source], self.profile.alike[target], size
            owners = [each.way.owners for each in ways[target]]
            return CostEdge(source, target, once(key, lambda: table(0, self._times(ways[source], owners, size))))

        nodes = tuple(node(name, name == names[-1]) for name in names)
        return CostGraph(nodes, tuple(edge(place) for place in range(begin + 1, end)))


def _replaces(other: StepCost, cost: StepCost) -> bool:
    """Whether a way that shares requests out alike is at least as good in all, and better in something, or simpler."""
    if other is cost or other.way.owners != cost.way.owners:
        return False
    mine, its = ((each.turn_ns, each.kept_bytes, each.needed_bytes) for each in (cost, other))
    return all(a <= b for a, b in zip(its, mine, strict=True)) and (its != mine or other.way.order < cost.way.order)


def _quickest(costs: Table, ending: IntArray, space: float) -> float:
    """Ns of the quickest point that fits, of a row of ways with what gathering takes after each."""
    fits = costs.memory_bytes <= space
    times = costs.time_ns + ending[costs.cells]
    return float(times[fits].min()) if fits.any() else np.inf


def chain_of(profile: Profile) -> tuple[str, ...]:
    """A profile's blocks, each of which gives to the next and to no other.

    Raises:
        UsageError: they are no chain.
    """
    order = profile.topological_order()
    place = {name: number for number, name in enumerate(order)}
    for edge in profile.edges:
        if place[edge.target] != place[edge.source] + 1:
            raise UsageError(
                f"{profile.where}: block {edge.source!r} gives to {edge.target!r}, which does not follow it; decode "
                "steps are split for chains of blocks"
            )
    return order
