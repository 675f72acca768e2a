"""The least memory of any strategy, by sizes alone: what is told before anything is priced.

Every operator is taken in the configuration in which it holds least, every tensor in the layout of which a device has
least, and of workspace what some operator cannot do without. Nothing is said of how these follow each other, nor of
what takes time, so that it takes a moment where costs of all layouts take minutes.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

from pipeplan.sharding.cost_model import CostModel, TiedTable
from pipeplan.sharding.expansion import Link, OperatorNode
from pipeplan.sharding.operators import Configuration, OperatorScale, Splittable, num_parts, unpriced
from pipeplan.time_limit import checkpoint


@dataclass(frozen=True, slots=True)
class LeastMemory:
    """Bytes that no strategy takes less than on each device; ``state_bytes`` of them are what training keeps."""

    num_bytes: int
    state_bytes: int


def least_memory(model: CostModel) -> LeastMemory:
    """A lower bound of the peak of every strategy of a model, priced or not, whose operators do not recompute.

    Of what operators share one copy is counted, the smallest that any of them may have.
    """
    sizes = _Sizes(model)
    nodes = [sizes.of(node) for node in model.operators.nodes]
    links = sum(sizes.on_the_way(link) for link in model.operators.links)
    shared = sum(sizes.shared(tied) for tied in model.tied)
    state = sum(node.state_bytes for node in nodes) + shared
    held = sum(node.kept_bytes for node in nodes) + shared + model.options.in_flight * links
    return LeastMemory(held + max((node.workspace_bytes for node in nodes), default=0), state)


class _LeastOf(NamedTuple):
    """The least of an operator, each by itself: all it keeps, the state among that, and workspace."""

    kept_bytes: int = 0
    state_bytes: int = 0
    workspace_bytes: int = 0


@dataclass(slots=True)
class _Sizes:
    """The sizes of a model's configurations, of operators and links that are alike worked out once."""

    model: CostModel
    _ways: dict[Hashable, tuple[Configuration, ...]] = field(default_factory=dict)
    _known: dict[Hashable, _LeastOf] = field(default_factory=dict)
    _held: dict[Hashable, int] = field(default_factory=dict)
    _nodes: dict[str, OperatorNode] = field(init=False)

    def __post_init__(self) -> None:
        self._nodes = {node.name: node for node in self.model.operators.nodes}

    def of(self, node: OperatorNode) -> _LeastOf:
        """Without what it shares with others."""
        checkpoint()
        model = self.model
        tied = tuple(each for each in model.tied if node.name in each.operators)
        key = self._alike(node), model.kept(node), model.fed(node), tied
        if key not in self._known:
            ways = self.ways(node)
            states = [way.state_bytes - sum(_share(each, node, way) for each in tied) for way in ways]
            kept = [
                state + model.options.in_flight * model.kept_bytes(node, way)
                for state, way in zip(states, ways, strict=True)
            ]
            workspaces = [way.workspace_bytes for way in ways]
            self._known[key] = _LeastOf(*(min(each) for each in (kept, states, workspaces) if each))
        return self._known[key]

    def shared(self, tied: TiedTable) -> int:
        """Of one copy of what operators share."""
        nodes = [node for node in self.model.operators.nodes if node.name in tied.operators]
        return min((_share(tied, node, way) for node in nodes for way in self.ways(node)), default=0)

    def on_the_way(self, link: Link) -> int:
        """What a tensor holds beside what its giver keeps: one copy, where it is least."""
        model, need = self.model, self.model.needs(link)
        if need.kept or not need.held:
            return 0
        source, target = (self._nodes[name] for name in (link.source, link.target))
        key = self._alike(source), self._alike(target), replace(link, source="", target="")
        if key not in self._held:
            tensor, givers, takers = model.tensor(link), self.ways(source), self.ways(target)
            given = (model.layouts(link, each, takers[0])[0] for each in givers if takers)
            taken = (model.layouts(link, givers[0], each)[1] for each in takers if givers)
            self._held[key] = min((tensor.local_bytes(each) for each in chain(given, taken)), default=0)
        return self._held[key]

    def ways(self, node: OperatorNode) -> tuple[Configuration, ...]:
        """The configurations of an operator; those of which it has none are told where they are priced."""
        key, options = self._alike(node), self.model.options
        if key not in self._ways:
            devices, most = self.model.resharding.devices, options.mesh_dimensions
            self._ways[key] = tuple(unpriced(*key, devices, rule=options.rule, mesh_dimensions=most))
        return self._ways[key]

    def _alike(self, node: OperatorNode) -> tuple[Splittable, OperatorScale]:
        return node.operation, self.model.scales[node.name]


def _share(tied: TiedTable, node: OperatorNode, way: Configuration) -> int:
    return (tied.state // num_parts(node.operation, way.splits)).total
