"""What a strategy is made of: the configuration of every operator, and what happens to every tensor between two."""

from __future__ import annotations

from dataclasses import dataclass

from pipeplan.frontier.configurations.building import CostModel, Need
from pipeplan.frontier.configurations.expansion import Link
from pipeplan.frontier.configurations.layouts import Layout, Tensor
from pipeplan.frontier.configurations.pricing import Configuration
from pipeplan.frontier.configurations.resharding import Move
from pipeplan.frontier.graph import Strategy

__all__ = ["Details", "OperatorDetail", "TensorDetail", "details_of"]


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
    """A whole strategy; times and bytes add up to its own, but for rounding up to whole ns."""

    operators: tuple[OperatorDetail, ...]
    tensors: tuple[TensorDetail, ...]

    @property
    def memory_bytes(self) -> int:
        """On each device, for one micro-batch in flight."""
        states = sum(each.configuration.state_bytes + each.kept_bytes for each in self.operators)
        return states + sum(each.held_bytes for each in self.tensors)

    @property
    def compute_ns(self) -> int:
        """Forward and backward of the operators, with what they exchange inside."""
        return sum(each.configuration.compute_ns for each in self.operators)

    @property
    def network_ns(self) -> int:
        """Sums of gradients, and tensors on their way."""
        sums = sum(each.configuration.sync_ns for each in self.operators)
        return sums + sum(each.forward_ns + each.backward_ns for each in self.tensors)


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
    return Details(operators, tensors)


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
    held = _held_bytes(tensor, given, taken, need, variant)
    return TensorDetail(link, variant, tensor.num_bytes, held, forward, again, backward, spent[0], spent[1] + spent[2])


def _held_bytes(tensor: Tensor, given: Layout, taken: Layout, need: Need, variant: str) -> int:
    """As :func:`pipeplan.frontier.configurations.building` counts it, for one pair of layouts."""
    if not need.held:
        return 0
    before = 0 if need.kept else tensor.local_bytes(given)
    after = 0 if need.kept and given == taken else tensor.local_bytes(taken)
    if variant == "both" and given != taken:
        return before + after
    return after if variant == "after" else before
