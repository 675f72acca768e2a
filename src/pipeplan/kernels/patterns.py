"""The pattern language: what a backend runs as one kernel, said in a line.

As in section 2.3 of the thesis, which extends Relay's: ::

    conv = is_op("convolution")(wildcard()).has_attr({"channels": 512})
    is_op("elementwise")(is_op("norm")(conv))

The last operator of a pattern is its root. A group that matches has the operators that are named; a ``wildcard()``
stands for whatever is taken there, from another group or from outside of the model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pipeplan.kernels.operators import GraphOperator, OperatorDag

Checked = Callable[[Any], bool]
"""What an attribute must be, where it is not a value."""


class KernelPattern(ABC):
    """What all patterns can: stand for alternatives with ``|``, and look for matches."""

    def __or__(self, other: KernelPattern) -> KernelPattern:
        return Alternatives((self, other))

    @abstractmethod
    def groups(self, graph: OperatorDag, id_: str | None) -> Iterator[frozenset[str]]:
        """The operators of each match whose root is this operator; None is what comes from outside of the model."""

    def matches(self, graph: OperatorDag) -> Iterator[tuple[str, ...]]:
        """All groups of a graph that match and are one kernel: no result but the root's is taken outside."""
        seen = set()
        for id_ in graph.order:
            for group in self.groups(graph, id_):
                if group and group not in seen and graph.is_one_kernel(group):
                    seen.add(group)
                    yield graph.ordered(group)


@dataclass(frozen=True, slots=True)
class Wildcard(KernelPattern):
    """Whatever is taken."""

    def groups(self, graph: OperatorDag, id_: str | None) -> Iterator[frozenset[str]]:
        """It matches, and nothing of it is of the group."""
        yield frozenset()


@dataclass(frozen=True, slots=True)
class Alternatives(KernelPattern):
    """Any of these."""

    choices: tuple[KernelPattern, ...]

    def groups(self, graph: OperatorDag, id_: str | None) -> Iterator[frozenset[str]]:
        """Those of each."""
        for each in self.choices:
            yield from each.groups(graph, id_)


@dataclass(frozen=True, slots=True)
class OperatorPattern(KernelPattern):
    """An operator of one of some kinds, or of any if there are none; ``inputs``: patterns of what it takes, in order.

    None: whatever it takes.
    """

    kinds: tuple[str, ...]
    inputs: tuple[KernelPattern, ...] | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, *inputs: KernelPattern) -> OperatorPattern:
        """The same that takes these."""
        return replace(self, inputs=inputs)

    def has_attr(self, attributes: Mapping[str, Any]) -> OperatorPattern:
        """The same with attributes of these values, or for which a function given instead of one holds."""
        return replace(self, attributes={**self.attributes, **attributes})

    def fits(self, operator: GraphOperator) -> bool:
        """Whether kind and attributes are right."""
        known = operator.attributes
        return (not self.kinds or operator.kind in self.kinds) and all(
            name in known and (wanted(known[name]) if callable(wanted) else known[name] == wanted)
            for name, wanted in self.attributes.items()
        )

    def groups(self, graph: OperatorDag, id_: str | None) -> Iterator[frozenset[str]]:
        """The operator with the groups of its inputs; of what is not an operator's result, inputs may be left out."""
        if id_ is None or not self.fits(graph[id_]):
            return
        if self.inputs is None:
            yield frozenset({id_})
            return
        taken: list[str | None] = list(graph[id_].inputs)
        if len(taken) > len(self.inputs):
            return
        taken += [None] * (len(self.inputs) - len(taken))  # weights and samples, which no operator gives
        yield from self._joined(graph, frozenset({id_}), taken, 0)

    def _joined(
        self, graph: OperatorDag, group: frozenset[str], taken: list[str | None], number: int
    ) -> Iterator[frozenset[str]]:
        assert self.inputs is not None
        if number == len(taken):
            yield group
            return
        for more in self.inputs[number].groups(graph, taken[number]):
            yield from self._joined(graph, group | more, taken, number + 1)


def is_op(*kinds: str) -> OperatorPattern:
    """An operator of one of these kinds, of any if none is named; called with patterns, one that takes these."""
    return OperatorPattern(kinds)


def wildcard() -> KernelPattern:
    """Whatever is taken."""
    return Wildcard()
