"""What a strategy consists of, what a stage runs with it, and the stages of a pipeline as cost models.

Tensors come to a stage whole on every device of its group, and go on so: its first blocks cut what they take and gather
the gradient that they give, its last ones gather what they give and cut their gradient.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np

from pipeplan.costs import StageCost
from pipeplan.costs.layouts import Move, Tensor
from pipeplan.costs.operators import Operator
from pipeplan.errors import UsageError
from pipeplan.sharding.cost_model import VARIANTS, CostModel, Spared, held_bytes, once_ns
from pipeplan.sharding.expansion import Link, OperatorGraph, OperatorNode
from pipeplan.sharding.graph import CostEdge, CostGraph, CostNode, CostTie, Strategy
from pipeplan.sharding.operator_kinds import WholeBlock
from pipeplan.sharding.operators import Configuration, Numbers, OperatorScale, Splittable
from pipeplan.workload.elements import RING, ContextExchange, Remade
from pipeplan.workload.mesh import PLACES


@dataclass(frozen=True, slots=True)
class OperatorDetail:
    """An operator as it is split; ``kept_bytes`` is what it holds for backward on each device, per micro-batch."""

    name: str
    block: str
    configuration: Configuration
    kept_bytes: int


@dataclass(frozen=True, slots=True)
class TensorDetail:
    """A tensor between two operators.

    ``variant`` says which copy is kept, ``held_bytes`` what that takes beside what its giver keeps. ``forward`` are the
    moves to the taker's layout, ``again`` those that make the copy for backward that was not kept, ``backward`` those
    of the gradient; times are of the moves, in ns. ``num_bytes`` is the whole tensor.
    """

    link: Link
    variant: str
    num_bytes: int
    held_bytes: int
    forward: tuple[Move, ...]
    again: tuple[Move, ...]
    backward: tuple[Move, ...]
    forward_ns: int
    backward_ns: int


@dataclass(frozen=True, slots=True)
class Details:
    """A whole strategy; times and bytes less what is ``spared`` add up to its own, but for rounding up to whole ns."""

    operators: tuple[OperatorDetail, ...]
    tensors: tuple[TensorDetail, ...]
    spared: Spared

    @property
    def memory_bytes(self) -> int:
        """On each device, for one micro-batch in flight."""
        states = sum(each.configuration.state_bytes + each.kept_bytes for each in self.operators)
        return states + sum(each.held_bytes for each in self.tensors) - self.spared.memory_bytes

    @property
    def compute_ns(self) -> int:
        """Forward and backward of the operators, with what they exchange inside."""
        return sum(each.configuration.compute_ns for each in self.operators)

    @property
    def network_ns(self) -> int:
        """Sums of gradients, and tensors on their way."""
        sums = sum(each.configuration.sync_ns for each in self.operators)
        moved = sum(each.forward_ns + each.backward_ns for each in self.tensors)
        return sums + moved - self.spared.sync_ns

    @property
    def step_ns(self) -> int:
        """The optimizer's step of one iteration."""
        return sum(each.configuration.step_ns for each in self.operators) - self.spared.step_ns


def details_of(model: CostModel, strategy: Strategy) -> Details:
    """The details of a strategy that frontier tracking found on the model's graph."""
    chosen = {name: model.configurations[name][index] for name, index in strategy.configurations.items()}
    operators = tuple(
        OperatorDetail(node.name, node.block, chosen[node.name], model.kept_bytes(node, chosen[node.name]))
        for node in model.operators.nodes
    )
    tensors = tuple(
        _tensor(model, link, edge.variants[variant], chosen[link.source], chosen[link.target])
        for link, edge, variant in zip(model.operators.links, model.graph.edges, strategy.edge_variants, strict=True)
    )
    return Details(operators, tensors, model.spared(strategy))


def _tensor(model: CostModel, link: Link, variant: str, source: Configuration, target: Configuration) -> TensorDetail:
    tensor, need = model.tensor(link), model.needs(link)
    given, taken, returned = model.layouts(link, source, target)
    kept = given._replace(partial=None)
    forward = model.resharding.path(tensor, given, taken)
    again: tuple[Move, ...] = ()
    if variant == "before" and need.taken:
        again = forward
    elif variant == "after" and need.alone:
        again = model.resharding.path(tensor, taken, kept)
    backward = model.resharding.path(tensor, returned, kept) if link.gradient else ()
    spent = [
        round(sum(model.resharding.move_ns(tensor, move) for move in moves)) for moves in (forward, again, backward)
    ]
    held = held_bytes(tensor, [given], [taken], np.array([[given != taken]]), need)[0, 0, VARIANTS.index(variant)]
    return TensorDetail(
        link, variant, tensor.num_bytes, int(held), forward, again, backward, spent[0], spent[1] + spent[2]
    )


@dataclass(frozen=True, slots=True)
class SplitBlocks:
    """Blocks in the order they run, how each is split over the devices of a stage, and what that costs per device.

    ``remade`` are tensors between them that backward makes again. Where places of blocks are split, ``exchange`` is how
    keys and values come, if costs are of a ring.
    """

    blocks: tuple[str, ...]
    configurations: tuple[str, ...]
    costs: StageCost
    remade: tuple[Remade, ...] = ()
    exchange: ContextExchange | None = None


def split_blocks(model: CostModel, strategy: Strategy) -> SplitBlocks:
    """What a stage runs by a strategy of whole blocks.

    Times add up to the strategy's for one micro-batch; what workspace takes while a block runs comes on top of its
    memory.

    Raises:
        UsageError: the strategy splits operators inside of blocks, or loads data by an operator of its own.
    """
    details = details_of(model, strategy)
    details = replace(details, operators=tuple(each for each in details.operators if each.block != OUTSIDE))
    blocks = tuple(each.name for each in details.operators)
    for each in details.operators:
        if each.name != each.block:
            raise UsageError(
                f"the strategy splits {each.name!r}, an operator of block {each.block!r}, and plans run whole blocks; "
                "track the frontier of whole blocks"
            )
    devices = model.resharding.devices
    names = tuple(each.configuration.name for each in details.operators)
    costs = _stage_cost(details, strategy, model.options.microbatches)
    ringed = {
        node.name for node in model.operators.nodes if isinstance(node.operation, WholeBlock) and node.operation.rings
    }
    around = any(PLACES in each.configuration.splits for each in details.operators if each.name in ringed)
    return SplitBlocks(blocks, names if devices > 1 else (), costs, tuple(_remade(details)), RING if around else None)


def _remade(details: Details) -> Iterator[Remade]:
    for each in details.tensors:
        if each.again:
            kept: Literal["before", "after"] = "after" if each.variant == "after" else "before"
            yield Remade(source=each.link.source, target=each.link.target, kept=kept)


def _stage_cost(details: Details, strategy: Strategy, microbatches: int) -> StageCost:
    """What a stage takes, but for what it keeps and sums: forward and backward together as the strategy, to the ns."""
    chosen = [each.configuration for each in details.operators]
    spared = details.spared
    forward = sum(each.forward_ns for each in chosen) + sum(each.forward_ns for each in details.tensors)
    after = sum(once_ns(each, microbatches) for each in chosen) - spared.time_ns
    backward, weights = strategy.time_ns - after - forward, sum(each.weight_grad_ns for each in chosen)
    deferred = [each.deferred_bytes for each in chosen if each.deferred_bytes is not None]
    parted = len(deferred) == len(chosen)
    return StageCost(
        forward_ns=max(1, forward),
        backward_ns=max(1, backward),
        input_grad_ns=max(1, backward - weights) if parted else None,
        weight_grad_ns=max(1, weights) if parted else None,
        activation_bytes=sum(each.kept_bytes for each in details.operators)
        + sum(each.held_bytes for each in details.tensors),
        weight_grad_bytes=sum(deferred) if parted else 0,
        workspace_bytes=max(each.workspace_bytes for each in chosen),
    )


OUTSIDE = "outside of the stage"
"""The block of operators that represent the rest of the pipeline: they cost nothing and have one configuration."""


@dataclass(frozen=True)
class _OtherStages(Splittable):
    """Other stages, at the far end of a tensor, where it is whole."""

    passed: Tensor = field(kw_only=True)

    kind = OUTSIDE
    inputs = ((None, None, None),)
    output = (None, None, None)
    keeps = (False,)

    def share(self, numbers: Numbers) -> Operator:
        return Operator()

    def tensor(self) -> Tensor:
        return self.passed


@dataclass(frozen=True)
class StageModels:
    """The cost models of all stages that can be cut out of a model.

    ``whole`` has an outside before every operator that takes a tensor and one after every operator that gives one; no
    stage has all of them. ``before`` are the links from the former, for each of the ``inner`` links, and ``after``
    those to the latter, by their source.
    """

    whole: CostModel
    inner: tuple[Link, ...]
    before: dict[Link, Link]
    after: dict[str, Link]

    @classmethod
    def of(cls, model: CostModel) -> StageModels:
        """The stages of a model of whole blocks."""
        nodes, inner = list(model.operators.nodes), model.operators.links
        before: dict[Link, Link] = {}
        after: dict[str, Link] = {}
        for number, link in enumerate(inner):
            ends = _OtherStages((), nodes[0].operation.width, passed=model.tensor(link))
            outside = OperatorNode(f"{OUTSIDE}, before {number}", OUTSIDE, ends)
            before[link] = replace(link, source=outside.name)
            nodes.append(outside)
            if link.source not in after:
                outside = replace(outside, name=f"{OUTSIDE}, after {number}")
                after[link.source] = replace(link, target=outside.name, port=0)
                nodes.append(outside)
        operators = OperatorGraph(tuple(nodes), (*inner, *before.values(), *after.values()))
        scales = {node.name: model.scales.get(node.name, OperatorScale()) for node in nodes}
        return cls(replace(model, operators=operators, scales=scales), inner, before, after)

    def holding(self, in_flight: int) -> StageModels:
        """With this number of micro-batches that hold activations at once."""
        return replace(self, whole=self.whole.holding(in_flight))

    def recomputing(self) -> StageModels:
        """Where every operator keeps only its inputs."""
        return replace(self, whole=self.whole.recomputing())

    def ends(self, blocks: Collection[str]) -> tuple[Link, ...]:
        """What enters a stage, and what leaves it."""
        entering = [self.before[link] for link in self.inner if link.target in blocks and link.source not in blocks]
        going = [link.source for link in self.inner if link.source in blocks and link.target not in blocks]
        return (*entering, *(self.after[source] for source in dict.fromkeys(going)))

    def links(self, blocks: Collection[str]) -> tuple[Link, ...]:
        """The tensors inside a stage, and then its ends."""
        inside = (link for link in self.inner if link.source in blocks and link.target in blocks)
        return (*inside, *self.ends(blocks))

    def model(self, blocks: Collection[str]) -> CostModel:
        """The cost model of a stage."""
        links = self.links(blocks)
        present = {*blocks, *(link.source for link in links), *(link.target for link in links)}
        nodes = tuple(node for node in self.whole.operators.nodes if node.name in present)
        return self.whole.part(OperatorGraph(nodes, links))

    def graph(self, blocks: Collection[str]) -> CostGraph:
        """The graph of the cost model of a stage, of the tables that are known."""
        operators = self.model(blocks).operators
        return CostGraph(
            tuple(self.nodes[node.name] for node in operators.nodes),
            tuple(self.edges[link] for link in operators.links),
            self.ties(blocks),
        )

    def ties(self, blocks: Collection[str]) -> tuple[CostTie, ...]:
        """What blocks of a stage share."""
        return tuple(filter(None, (tie.among(blocks) for tie in self.whole.ties)))

    @cached_property
    def nodes(self) -> dict[str, CostNode]:
        """Operators with their costs, by name; those that are alike share their tables."""
        return {node.name: node for node in self.whole.graph.nodes}

    @cached_property
    def edges(self) -> dict[Link, CostEdge]:
        """Tensors with their costs; those that are alike share their tables."""
        return dict(zip(self.whole.operators.links, self.whole.graph.edges, strict=True))
