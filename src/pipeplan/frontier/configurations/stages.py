"""Stages of a pipeline as cost models: parts of a model of whole blocks, with what enters and leaves them.

Tensors come to a stage whole on every device of its group, and go on so: its first blocks cut what they take and gather
the gradient that they give, its last ones gather what they give and cut their gradient.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import cached_property

from pipeplan.costs.operators import Operator
from pipeplan.frontier.configurations.building import CostModel
from pipeplan.frontier.configurations.expansion import Link, OperatorGraph, OperatorNode
from pipeplan.frontier.configurations.layouts import Tensor
from pipeplan.frontier.configurations.operation import Numbers, Operation
from pipeplan.frontier.configurations.pricing import Scale
from pipeplan.frontier.graph import CostEdge, CostGraph, CostNode

__all__ = ["OUTSIDE", "StageModels"]

OUTSIDE = "outside of the stage"
"""The block of operators that stand for the rest of the pipeline: they cost nothing and have one configuration."""


@dataclass(frozen=True)
class _Outside(Operation):
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

    ``whole`` has an outside before every operator that takes a tensor and one behind every operator that gives one; no
    stage has all of them. ``before`` are the links from the former, for each of the ``inner`` links, and ``behind``
    those to the latter, by their source.
    """

    whole: CostModel
    inner: tuple[Link, ...]
    before: dict[Link, Link]
    behind: dict[str, Link]

    @classmethod
    def of(cls, model: CostModel) -> StageModels:
        """Of a model of whole blocks."""
        nodes, inner = list(model.operators.nodes), model.operators.links
        before: dict[Link, Link] = {}
        behind: dict[str, Link] = {}
        for number, link in enumerate(inner):
            outside = _outside(f"{OUTSIDE}, before {number}", model.tensor(link), nodes[0].operation.width)
            before[link] = replace(link, source=outside.name)
            nodes.append(outside)
            if link.source not in behind:
                outside = replace(outside, name=f"{OUTSIDE}, behind {number}")
                behind[link.source] = replace(link, target=outside.name, port=0)
                nodes.append(outside)
        operators = OperatorGraph(tuple(nodes), (*inner, *before.values(), *behind.values()))
        scales = {node.name: model.scales.get(node.name, Scale()) for node in nodes}
        return cls(replace(model, operators=operators, scales=scales), inner, before, behind)

    def holding(self, in_flight: int) -> StageModels:
        """With so many micro-batches that hold activations at once."""
        return replace(self, whole=self.whole.holding(in_flight))

    def recomputing(self) -> StageModels:
        """Where every operator keeps its inputs alone."""
        return replace(self, whole=self.whole.recomputing())

    def ends(self, blocks: Collection[str]) -> tuple[Link, ...]:
        """What enters a stage, and what leaves it."""
        entering = [self.before[link] for link in self.inner if link.target in blocks and link.source not in blocks]
        going = [link.source for link in self.inner if link.source in blocks and link.target not in blocks]
        return (*entering, *(self.behind[source] for source in dict.fromkeys(going)))

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
        )

    @cached_property
    def nodes(self) -> dict[str, CostNode]:
        """Operators with their costs, by name; those that are alike share their tables."""
        return {node.name: node for node in self.whole.graph.nodes}

    @cached_property
    def edges(self) -> dict[Link, CostEdge]:
        """Tensors with their costs; those that are alike share their tables."""
        return dict(zip(self.whole.operators.links, self.whole.graph.edges, strict=True))


def _outside(name: str, tensor: Tensor, width: int) -> OperatorNode:
    return OperatorNode(name, OUTSIDE, _Outside((), width, passed=tensor))
