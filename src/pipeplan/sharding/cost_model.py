"""The cost graph of a profile: every operator with its configurations, every tensor with what lies between them.

A tensor that backward needs is held where it is needed: by the operator that takes it, in the layout it takes it in,
or by the one that gives it. Where these differ there are the paper's three variants (section 4.2, tensor reuse):
*both* copies are kept, or only that *before* or *after* resharding, and the other is made again for backward. A tensor
that several operators need is kept as it was given, and each of them keeps its own copy beside it or makes it again.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from pipeplan.costs import UNLIMITED
from pipeplan.costs.devices import PRESETS, DevicePreset, device_preset
from pipeplan.costs.layouts import Layout, MeshSplit, Tensor
from pipeplan.costs.recipes import expert_state_of, running_bytes, state_of, step_ns, whole_state_of
from pipeplan.costs.resharding import Resharding, sum_ns
from pipeplan.errors import UsageError
from pipeplan.files import Block, Cluster, Profile, Recipe, TiedParameter
from pipeplan.sharding.elimination import Reducing
from pipeplan.sharding.expansion import Link, OperatorGraph, OperatorNode, expand
from pipeplan.sharding.graph import CostEdge, CostGraph, CostNode, CostTie, Strategy, TieUser
from pipeplan.sharding.operator_kinds import WHOLE, Data, WholeBlock, grows_steeply, profiled_sizes, row_for
from pipeplan.sharding.operators import (
    MOST_DIMENSIONS,
    Axis,
    Configuration,
    OperatorScale,
    Rule,
    Splittable,
    Taken,
    configurations,
    num_parts,
    recomputed,
    sync_ns,
    way_of,
)
from pipeplan.sharding.table import BoolArray, IntArray, Table, table
from pipeplan.time_limit import checkpoint
from pipeplan.workload.kinds import GRADIENTS, PARAMETERS, MemoryBytes

VARIANTS = ("before", "after", "both")
"""Which copy of a tensor is kept for backward: as it was given, as it is taken, or both."""


@dataclass(frozen=True, slots=True)
class CostOptions:
    """How a cost graph is made.

    ``blocks``: every block is one operator, by its rows; with ``alone`` each keeps what its backward needs by itself.
    ``data_parallel_loading``: inputs come split by samples over all devices. ``microbatches`` of one iteration share
    the sum of gradients; ``in_flight`` of them hold activations at once. ``rule`` restricts configurations, ``reuse``
    False keeps what every operator needs where it needs it, and ``aligned`` lets no tensor change its layout on the
    way, but for sums. Meshes have up to ``mesh_dimensions``.
    With ``recompute`` every operator keeps only its inputs, and backward runs its forward again.
    """

    blocks: bool = False
    alone: bool = True
    data_parallel_loading: bool = False
    microbatches: int = 1
    in_flight: int = 1
    rule: Rule | None = None
    reuse: bool = True
    aligned: bool = False
    mesh_dimensions: int = MOST_DIMENSIONS
    recompute: bool = False


class TensorNeed(NamedTuple):
    """Whether backward needs a tensor where it was given and where it is taken, and whether it is kept anyway."""

    given: bool
    taken: bool
    kept: bool

    @property
    def alone(self) -> bool:
        """Whether the giver's need is this tensor's to see to."""
        return self.given and not self.kept

    @property
    def held(self) -> bool:
        """Whether some copy must be held on the way."""
        return self.taken or self.given


class TiedTable(NamedTuple):
    """Tied parameters that the same operators share, and what training keeps of all of them."""

    names: tuple[str, ...]
    operators: tuple[str, ...]
    state: MemoryBytes

    @property
    def gradient_bytes(self) -> int:
        """Only of the gradients, which are summed."""
        return self.state[GRADIENTS]


class Spared(NamedTuple):
    """What is there once, though several operators count it.

    On each device, of one micro-batch and (``sync_ns`` and ``step_ns``, which make up ``time_ns``) of one iteration;
    times of sums are negative where these take longer.
    """

    memory_bytes: int = 0
    parameter_bytes: int = 0
    time_ns: int = 0
    sync_ns: int = 0
    step_ns: int = 0


class Unprofiled(NamedTuple):
    """Samples on one device for which a block has no rows, but ``low`` to ``high``.

    The nearest row was taken in proportion, and operators inside a block were worked out at that number. If more
    samples never take less time, nor more than in proportion, computing takes at most ``less_ns`` less than that, and
    at most ``more_ns`` more. Where the block's own rows grow more than in proportion nothing is known on the side to
    which they do: None.
    """

    samples: int
    low: int
    high: int
    less_ns: int | None
    more_ns: int | None


@dataclass(frozen=True)
class CostModel:
    """Operators, tensors and configurations of a profile on some devices, and their costs as a graph.

    ``tied`` is what operators share, but for ``untied``, which every one of them has by itself here. The optimizer
    steps what ``recipe`` keeps at ``step_bytes_per_s``; where that is None no step is counted.
    """

    operators: OperatorGraph
    resharding: Resharding
    device: DevicePreset
    scales: dict[str, OperatorScale]
    options: CostOptions
    blocks: Mapping[str, Block]
    tied: tuple[TiedTable, ...] = ()
    untied: tuple[str, ...] = ()
    recipe: Recipe = field(default_factory=Recipe)
    step_bytes_per_s: int | None = None

    @cached_property
    def configurations(self) -> dict[str, tuple[Configuration, ...]]:
        """Of every operator by name; operators that are alike share them.

        Raises:
            UsageError: an operator has none.
        """
        known: dict[tuple[Splittable, OperatorScale], tuple[Configuration, ...]] = {}
        found = {}
        for node in self.operators.nodes:
            checkpoint()
            key = (node.operation, self.scales[node.name])
            if key not in known:
                known[key] = configurations(
                    *key,
                    self.device,
                    self.resharding,
                    rule=self.options.rule,
                    mesh_dimensions=self.options.mesh_dimensions,
                    step_ns=self._step_ns,
                )
            if not known[key]:
                raise UsageError(_nothing_fits(node, self.resharding.devices))
            found[node.name] = known[key]
        return self._recomputed(found) if self.options.recompute else found

    def _step_ns(self, state: MemoryBytes) -> int:
        return step_ns(state, self.recipe, self.step_bytes_per_s)

    def _recomputed(self, ways: Mapping[str, tuple[Configuration, ...]]) -> dict[str, tuple[Configuration, ...]]:
        known: dict[object, tuple[Configuration, ...]] = {}
        found = {}
        for node in self.operators.nodes:
            plain, inputs = ways[node.name], self._inputs(node)
            key = id(plain), inputs
            if key not in known:
                known[key] = tuple(recomputed(way, inputs) for way in plain)
            found[node.name] = known[key]
        return found

    def _inputs(self, node: OperatorNode) -> frozenset[Taken]:
        """What an operator takes and is not held on the way to it."""
        return frozenset(
            Taken(self.tensor(link), link.port, link.broadcast)
            for link in self._links_into.get(node.name, ())
            if not node.operation.keeps_input(link.port)
        )

    @cached_property
    def _links_into(self) -> dict[str, list[Link]]:
        found: dict[str, list[Link]] = defaultdict(list)
        for link in self.operators.links:
            found[link.target].append(link)
        return dict(found)

    @cached_property
    def graph(self) -> CostGraph:
        """The costs; alike operators and tensors share their tables."""
        return CostGraph(tuple(self._cost_nodes()), self._cost_edges, self.ties)

    def with_graph(self) -> CostModel:
        """The same, when its graph has been worked out, which takes longer than all else, and stays."""
        _ = self.graph
        return self

    @cached_property
    def ties(self) -> tuple[CostTie, ...]:
        """What operators share, with the time of a micro-batch."""
        return self._ties(lambda state: state.total, self.options.microbatches)

    @property
    def counted_again(self) -> tuple[str, ...]:
        """Tied parameters of which a strategy may count more than devices have."""
        unsure = (each.names for each, tie in zip(self.tied, self.ties, strict=True) if not tie.sure)
        return (*(name for names in unsure for name in names), *self.untied)

    def spared(self, strategy: Strategy) -> Spared:
        """What of a strategy's costs is there once, though several operators count it."""
        memory, *times = _spared(self.ties, strategy)
        parameters, sums, steps = _spared(self._tied_parameters, strategy)
        return Spared(memory, parameters, sum(times), sums, steps)

    @cached_property
    def _tied_parameters(self) -> tuple[CostTie, ...]:
        """What operators share by only its parameters, with the time of an iteration."""
        return self._ties(lambda state: state[PARAMETERS], 1)

    def _ties(self, size: Callable[[MemoryBytes], int], microbatches: int) -> tuple[CostTie, ...]:
        """What operators share, by some of the bytes that are kept of it and its part of the sums' time."""
        numbers: dict[object, int] = {}
        before: Counter[str] = Counter()
        found = []
        for each in self.tied:
            users = [name for name in each.operators if name in self.configurations]
            if len(users) > 1:
                made = (self._tie_user(name, each, before[name], size, microbatches, numbers) for name in users)
                found.append(CostTie(tuple(made), -(-self._whole_sum_ns(each.gradient_bytes) // microbatches)))
                before.update(dict.fromkeys(users, each.gradient_bytes))
        return tuple(found)

    def _tie_user(
        self,
        name: str,
        tied: TiedTable,
        before: int,
        size: Callable[[MemoryBytes], int],
        microbatches: int,
        numbers: dict[object, int],
    ) -> TieUser:
        """An operator that shares it, which shares ``before`` bytes of gradients with others, too."""
        operation = self._nodes[name].operation
        ways, memory, time, step = [], [], [], []
        for way in self.configurations[name]:
            parts = num_parts(operation, way.splits)
            ways.append(numbers.setdefault(way_of(operation, way.splits), len(numbers)))
            memory.append(size(tied.state // parts))
            left = (way.gradient_bytes - shared // parts for shared in (before, before + tied.gradient_bytes))
            how = self.resharding, way.expert_bytes
            sums = [-(-sync_ns(operation, way.splits, each, *how) // microbatches) for each in left]
            time.append(sums[0] - sums[1])
            step.append(self._step_ns(tied.state // parts) // microbatches)
        return TieUser(name, *(np.array(each, np.int64) for each in (ways, memory, time, step)))

    def _whole_sum_ns(self, size: int) -> int:
        """Time to add up gradients of ``size`` bytes over all devices."""
        devices = self.resharding.devices
        return round(sum_ns(size, MeshSplit(devices, 1), self.resharding)) if devices > 1 else 0

    def _cost_nodes(self) -> Iterator[CostNode]:
        tables: dict[object, Table] = {}
        for node in self.operators.nodes:
            checkpoint()
            chosen = self.configurations[node.name]
            alike = (id(chosen), self.kept(node), self.fed(node))
            if alike not in tables:
                tables[alike] = self._node_table(node, chosen)
            yield CostNode(node.name, tuple(each.name for each in chosen), tables[alike])

    @cached_property
    def _cost_edges(self) -> tuple[CostEdge, ...]:
        tables: dict[object, Table] = {}
        edges = []
        for link in self.operators.links:
            checkpoint()
            needs = self.needs(link)
            ends = self.configurations[link.source], self.configurations[link.target]
            key = (id(ends[0]), id(ends[1]), needs, replace(link, source="", target=""), self.tensor(link))
            if key not in tables:
                tables[key] = self._edge_table(link, *ends, needs)
            edges.append(CostEdge(link.source, link.target, tables[key], VARIANTS))
        return tuple(edges)

    def unprofiled(self, name: str, way: Configuration) -> Unprofiled | None:
        """What a configuration of an operator takes beyond the sizes that its block was profiled with."""
        node = self._nodes[name]
        numbers = node.operation.numbers({axis: split.extent for axis, split in way.splits.items()})
        sizes = node.operation.sizes_of(numbers) if isinstance(node.operation, WholeBlock) else WHOLE
        low, high = profiled_sizes(self.blocks[node.block], sizes) or (1, math.inf)
        samples = low if isinstance(node.operation, Data) else numbers.get("samples", low) // sizes.expert
        if low <= samples <= high:
            return None
        nearest = {**numbers, "samples": sizes.expert * round(min(max(samples, low), high))}
        ours, theirs = (sum(node.operation.times(each, self.device)) for each in (numbers, nearest))
        in_proportion = theirs * samples * sizes.expert / nearest["samples"]
        less, more = round(ours - min(theirs, in_proportion)), round(max(theirs, in_proportion) - ours)
        steep = grows_steeply(self.blocks[node.block], sizes)
        return Unprofiled(
            samples,
            low,
            round(high),
            None if steep and samples < low else max(0, less),
            None if steep and samples > low else max(0, more),
        )

    def unprofiled_in(self, strategy: Strategy) -> list[Unprofiled]:
        """The same of all operators of a strategy; a choice that many strategies share is looked at once."""
        for name, index in strategy.configurations.items():
            if (name, index) not in self._beyond:
                self._beyond[name, index] = self.unprofiled(name, self.configurations[name][index])
        every = (self._beyond[chosen] for chosen in strategy.configurations.items())
        return [each for each in every if each is not None]

    @cached_property
    def _beyond(self) -> dict[tuple[str, int], Unprofiled | None]:
        return {}

    @cached_property
    def extrapolates(self) -> bool:
        """Whether any configuration is priced beyond the sizes of its block's rows."""
        alike = {(id(ways), self._nodes[name].block): (name, ways) for name, ways in self.configurations.items()}
        return any(self.unprofiled(name, way) is not None for name, ways in alike.values() for way in ways)

    def holding(self, in_flight: int) -> CostModel:
        """The same with this number of micro-batches that hold activations at once."""
        changed = self._with_known(replace(self, options=replace(self.options, in_flight=in_flight)))
        if not any(edge.costs.memory_bytes.any() for edge in self._cost_edges):  # then they do not change, either
            vars(changed)["_cost_edges"] = self._cost_edges
        return changed

    def recomputing(self) -> CostModel:
        """The same where every operator keeps only its inputs, which changes nothing between operators."""
        changed = replace(self, options=replace(self.options, recompute=True))
        vars(changed)["configurations"] = changed._recomputed(self.configurations)
        vars(changed)["_cost_edges"] = self._cost_edges
        return changed

    def part(self, operators: OperatorGraph) -> CostModel:
        """Only of some of its operators."""
        return self._with_known(replace(self, operators=operators))

    def _with_known(self, changed: CostModel) -> CostModel:
        """What was changed does not change configurations: they need not be priced again."""
        vars(changed)["configurations"] = {
            node.name: self.configurations[node.name] for node in changed.operators.nodes
        }
        return changed

    def kept_bytes(self, node: OperatorNode, chosen: Configuration) -> int:
        """What an operator itself holds for backward, on each device and per micro-batch."""
        own = not self.fed(node) and node.operation.keeps_input(0)
        output = node.operation.tensor().local_bytes(chosen.output) if self.kept(node) else 0
        return chosen.inside_bytes + (chosen.entry_bytes if own else 0) + output

    def layouts(self, link: Link, source: Configuration, target: Configuration) -> tuple[Layout, Layout, Layout]:
        """How a link's tensor is given, how it is taken, and how its gradient comes back."""
        given = Layout() if link.broadcast else source.output
        taken = Layout() if link.broadcast else target.taken(link.port)
        returned = target.returned(link.port) if link.gradient else given
        if link.broadcast:  # one tensor for all samples: its gradient is a sum over those that are split
            returned = Layout(partial=returned.samples or returned.partial)
        return given, taken, returned

    def _node_table(self, node: OperatorNode, chosen: Sequence[Configuration]) -> Table:
        memory = [each.state_bytes + self.options.in_flight * self.kept_bytes(node, each) for each in chosen]
        time = [each.compute_ns + once_ns(each, self.options.microbatches) for each in chosen]
        return table(memory, time)

    def _edge_table(
        self, link: Link, sources: Sequence[Configuration], targets: Sequence[Configuration], need: TensorNeed
    ) -> Table:
        """Variants before, after and both, [Ks, Kt, 3]: bytes kept on the edge and time to reshard."""
        tensor = self.tensor(link)
        given = [self.layouts(link, each, targets[0])[0] for each in sources]
        taken, returned = zip(*(self.layouts(link, sources[0], each)[1:] for each in targets), strict=True)
        kept = [each._replace(partial=None) for each in given]
        there = self.resharding.times(tensor, given, taken)
        again = self.resharding.times(tensor, taken, kept).T
        always = there + (self.resharding.times(tensor, returned, kept).T if link.gradient else 0)
        time = np.stack((always + (there if need.taken else 0), always + (again if need.alone else 0), always), axis=-1)
        moved = self._numbers(given)[:, None] != self._numbers(taken)[None, :]
        possible = np.isfinite(time)
        if self.options.aligned:
            possible &= (self._numbers(kept)[:, None] == self._numbers(taken)[None, :])[..., None]
        if not self.options.reuse:
            possible[..., 0] &= ~moved | (not need.taken)
            possible[..., 1] &= ~moved | (not need.alone)
        whole = np.ceil(np.where(possible, time, 0)).astype(np.int64)
        held = self.options.in_flight * held_bytes(tensor, given, taken, moved, need)
        return table(held, whole, possible, copies=len(VARIANTS))

    def _numbers(self, layouts: Sequence[Layout]) -> IntArray:
        return np.array([self.resharding.number[each] for each in layouts], np.int64)

    def tensor(self, link: Link) -> Tensor:
        """The tensor of a link."""
        return self._nodes[link.source].operation.tensor()

    @cached_property
    def _nodes(self) -> dict[str, OperatorNode]:
        return {node.name: node for node in self.operators.nodes}

    @cached_property
    def _takers(self) -> dict[str, list[Link]]:
        """Links of every operator's output, those first whose backward needs it."""
        found: dict[str, list[Link]] = defaultdict(list)
        for link in self.operators.links:
            found[link.source].append(link)
        return {name: sorted(links, key=self._taken, reverse=True) for name, links in found.items()}

    def _taken(self, link: Link) -> bool:
        return self._nodes[link.target].operation.keeps_input(link.port)

    def fed(self, node: OperatorNode) -> bool:
        """Whether it takes what another one gives."""
        return node.name in self._links_into

    def kept(self, node: OperatorNode) -> bool:
        """Whether the output is kept as it was given, by the operator itself: several others need it, or none do."""
        needing = sum(self._taken(link) for link in self._takers.get(node.name, []))
        return needing > 1 or (node.operation.keeps_output and not self._takers.get(node.name))

    def needs(self, link: Link) -> TensorNeed:
        """Who needs a link's tensor: the first of several answers for the giver's copy, unless the giver keeps it."""
        source = self._nodes[link.source]
        first = self._takers[link.source][0] is link
        return TensorNeed(source.operation.keeps_output and first, self._taken(link), self.kept(source))


def once_ns(way: Configuration, microbatches: int) -> int:
    """A micro-batch's part of what all micro-batches share: gradient sums and the optimizer's step."""
    return -(-way.sync_ns // microbatches) - (-way.step_ns // microbatches)


def _spared(ties: Iterable[CostTie], strategy: Strategy) -> tuple[int, int, int]:
    """Bytes, ns of sums and ns of the step that sharing saves a strategy."""
    every = [tie.spared([strategy.configurations[user.operator] for user in tie.users]) for tie in ties]
    memory, sums, steps = (sum(each[place] for each in every) for place in range(3))
    return memory, sums, steps


def held_bytes(
    tensor: Tensor, given: Sequence[Layout], taken: Sequence[Layout], moved: BoolArray, need: TensorNeed
) -> IntArray:
    """Bytes that a tensor holds beyond what its giver keeps, of each variant: before, after, both, [Ks, Kt, 3].

    ``moved`` [Ks, Kt]: whether the layouts differ.
    """
    before = np.array([tensor.local_bytes(each) for each in given], np.int64)[:, None] * (need.held and not need.kept)
    after = np.array([tensor.local_bytes(each) for each in taken], np.int64)[None, :] * need.held
    own = np.where(moved | (not need.kept), after, 0)  # the same layout as what is kept anyway costs nothing more
    return np.stack(np.broadcast_arrays(before, own, np.where(moved, before + after, before)), axis=-1)


def cost_model(
    profile: Profile,
    cluster: Cluster | None,
    devices: int,
    samples: int,
    *,
    device: str | None = None,
    options: CostOptions = CostOptions(),
) -> CostModel:
    """Configurations and costs of a profile on the first ``devices`` of a cluster, for one micro-batch of ``samples``.

    Times of operators are closed forms for a ``device`` preset (by default the profile's own device, else the
    cluster's), in proportion to the times that the profile has for their block. What blocks share is there once where
    they split it alike.

    Raises:
        UsageError: the device is not known, or an operator cannot be split so.
    """
    return _reducible(unpriced_model(profile, cluster, devices, samples, device=device, options=options))


def unpriced_model(
    profile: Profile,
    cluster: Cluster | None,
    devices: int,
    samples: int,
    *,
    device: str | None = None,
    options: CostOptions = CostOptions(),
) -> CostModel:
    """The same before anything is priced, which is known at once; tied tensors are all there, treatable or not.

    Raises:
        UsageError: as :func:`cost_model`.
    """
    preset = device_preset(device) if device else _preset_of(profile, cluster)
    width = 4 if profile.source.dtype == "float32" else 2
    operators = expand(profile, samples, width=width, whole_blocks=options.blocks, alone=options.alone)
    if options.data_parallel_loading:
        operators = _loaded(operators, devices)
    resharding = Resharding(cluster, devices)
    blocks = profile.by_id
    tied, own = _tied_tables(profile, operators)
    scales = _scales(profile, operators, preset, own)
    known = CostModel(operators, resharding, preset, scales, options, blocks, tied)
    return replace(known, recipe=profile.recipe, step_bytes_per_s=profile.step_bytes_per_s)


def _reducible(model: CostModel) -> CostModel:
    """The model with as many tied tensors, largest first, as can be treated exactly."""
    while model.tied and not Reducing().exact(model.graph.lowered()):
        model = replace(model, tied=model.tied[:-1], untied=(*model.tied[-1].names, *model.untied))
    return model


class _HeldTied(NamedTuple):
    """What an operator shares with others: how many parameters, and what training keeps of them."""

    numbers: int = 0
    state: MemoryBytes = MemoryBytes()


def _tied_tables(profile: Profile, operators: OperatorGraph) -> tuple[tuple[TiedTable, ...], dict[str, _HeldTied]]:
    """What operators share, the most bytes first; and by operator what of its parameters is tied."""
    by_block: dict[str, list[OperatorNode]] = defaultdict(list)
    for node in operators.nodes:
        if node.operation.parameters or node.operation.kind == "block":
            by_block[node.block].append(node)
    own: dict[str, _HeldTied] = defaultdict(_HeldTied)
    found: dict[tuple[str, ...], TiedTable] = {}
    kept = {each.name: state_of(each, profile.recipe) for each in profile.tied}
    for each in sorted(profile.tied, key=lambda tied: -kept[tied.name].total):
        state = kept[each.name]
        holders = [_holder(by_block[id_], each, own) for id_ in each.blocks if by_block[id_]]
        for node in holders:
            own[node.name] = _HeldTied(own[node.name].numbers + _numbers(each, node), own[node.name].state + state)
        users = tuple(node.name for node in holders)
        if state.total and len(users) > 1:
            before = found.get(users, TiedTable((), users, MemoryBytes()))
            found[users] = TiedTable((*before.names, each.name), users, before.state + state)
    return tuple(found.values()), own


def _numbers(tied: TiedParameter, node: OperatorNode) -> int:
    """How many parameters it has, in an operator's number format where the profile says only bytes."""
    return tied.parameters or tied.parameter_bytes // node.operation.width


def _holder(nodes: Sequence[OperatorNode], tied: TiedParameter, own: Mapping[str, _HeldTied]) -> OperatorNode:
    """The operator of a block that has a tied parameter: the smallest in which there is room for it."""

    def room(node: OperatorNode) -> int:
        if node.operation.kind == "block":
            return UNLIMITED
        return node.operation.parameters - own.get(node.name, _HeldTied()).numbers

    return min((node for node in nodes if room(node) >= _numbers(tied, node)), key=room, default=None) or max(
        nodes, key=room
    )


def _preset_of(profile: Profile, cluster: Cluster | None) -> DevicePreset:
    names = [profile.source.device, *([kind.name for kind in cluster.devices] if cluster is not None else [])]
    for name in names:
        for preset in map(device_preset, PRESETS):
            if name in (preset.name, preset.title):
                return preset
    if profile.source.dtype == "float32" and profile.source.method == "measured":
        return device_preset("cpu")
    said = profile.source.device
    why = f"is for {said!r}, of which nothing more is known" if said else "does not say which device its times are of"
    raise UsageError(
        f"profile {profile.name!r} {why}, and the times of split blocks are worked out for a known one; "
        f"give --device, one of {', '.join(PRESETS)}"
    )


def _loaded(operators: OperatorGraph, devices: int) -> OperatorGraph:
    """The operators with one before each that takes the model's inputs, which loads them split by samples."""
    fed = {link.target for link in operators.links}
    nodes, links = [], []
    for node in operators.nodes:
        if node.name not in fed:
            loader = _loader(node, devices)
            nodes.append(loader)
            links.append(Link(loader.name, node.name, gradient=False))
        nodes.append(node)
    return OperatorGraph(tuple(nodes), (*links, *operators.links))


def _nothing_fits(node: OperatorNode, devices: int) -> str:
    sizes = ", ".join(f"{axis.called or axis.name} {axis.size}" for axis in node.operation.axes)
    return f"operator {node.name!r} ({sizes}) cannot be split over {devices} devices as asked; allow copies"


def _loader(node: OperatorNode, devices: int) -> OperatorNode:
    operation = node.operation
    samples = operation.axis("samples").size
    if samples % devices:
        raise UsageError(
            f"{samples} samples cannot be loaded in equal parts by {devices} devices; choose a multiple of {devices}, "
            "or leave out --data-parallel-loading"
        )
    sample_bytes = operation.entry_bytes(operation.numbers()) // samples
    batch = (Axis("samples", samples, called="samples"),)
    data = Data(batch, operation.width, learns=False, devices=devices, sample_bytes=sample_bytes)
    return OperatorNode(f"{node.name}/data", node.block, data)


def _scales(
    profile: Profile, operators: OperatorGraph, preset: DevicePreset, tied: Mapping[str, _HeldTied]
) -> dict[str, OperatorScale]:
    by_block: dict[str, list[OperatorNode]] = defaultdict(list)
    for node in operators.nodes:
        by_block[node.block].append(node)
    return {
        node.name: scale
        for block in profile.blocks
        for node, scale in zip(
            by_block[block.id], _block_scales(block, profile.recipe, by_block[block.id], preset, tied), strict=True
        )
    }


def _block_scales(
    block: Block, recipe: Recipe, nodes: Sequence[OperatorNode], preset: DevicePreset, tied: Mapping[str, _HeldTied]
) -> Iterable[OperatorScale]:
    """Its operators in proportion: times so that they add up to its row's, bytes to its parameters'.

    What is ``tied`` is where it is; the rest goes by the parameters beside it.
    """
    forward, backward = _measured_over_computed(block, nodes, preset)
    held = [tied.get(node.name, _HeldTied()) for node in nodes]
    counts = [node.operation.parameters if node.operation.kind != "block" else 1 for node in nodes]
    beside = [max(0, count - own.numbers) for count, own in zip(counts, held, strict=True)]
    weights = beside if any(beside) else counts
    total, running = max(1, sum(weights)), running_bytes(block, recipe)
    left = state_of(block, recipe) - sum((own.state for own in held), MemoryBytes())
    repeated, cast = whole_state_of(block, recipe), running_bytes(block, recipe, 2) - running
    dividing = frozenset(row.shards for row in block.costs if row.sequence_parallel)
    of_experts: tuple[MemoryBytes, int] = MemoryBytes(), 0
    if block.expert_parameters:  # then it is one operator
        part = running * block.expert_parameters // (block.parameters + block.frozen_parameters)
        of_experts = expert_state_of(block, recipe), part
    for own, weight, count in zip(held, weights, counts, strict=True):
        state = own.state + left * weight // total
        both = -(-running * count // max(1, sum(counts))), repeated * weight // total
        again = -(-cast * count // max(1, sum(counts)))
        yield OperatorScale(forward, backward, state, *both, again, dividing, *of_experts)


def _measured_over_computed(block: Block, nodes: Sequence[OperatorNode], preset: DevicePreset) -> tuple[float, float]:
    """Times of the block's row over those of its operators, forward and backward, at the nearest size it has."""
    samples = nodes[0].operation.axis("samples").size
    sizes = [row.microbatch_size for row in block.rows() if row.shards == 1]
    if nodes[0].operation.kind == "block" or not sizes:
        return 1.0, 1.0
    row = row_for(block, min(sizes, key=lambda size: abs(size - samples)))
    times = [
        node.operation.times({**node.operation.numbers(), "samples": row.microbatch_size}, preset) for node in nodes
    ]
    computed_forward = sum(each.forward_ns for each in times)
    computed_backward = sum(each.input_grad_ns + each.weight_grad_ns for each in times)
    if row.input_grad_ns is not None and row.weight_grad_ns is not None:
        backward = row.input_grad_ns + row.weight_grad_ns
    else:
        backward = row.backward_ns or 0
    return (
        row.forward_ns / computed_forward if computed_forward and row.forward_ns else 1.0,
        backward / computed_backward if computed_backward and backward else 1.0,
    )
