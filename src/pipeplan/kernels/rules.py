"""Pattern rules, and the generator that finds all groups that they allow: section 2.3 of the thesis.

Where a backend fuses more than can be enumerated, it says which operators it runs and which groups it fuses, in Python.
The generator visits every operator as a seed and grows from it, each time to the next post-dominator, while the rule
holds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

from pipeplan.kernels.operators import GraphOperator, OperatorDag


class PatternRule:
    """What one backend runs. By default every operator alone; subclasses say less, or more."""

    def op_rule(self, op: GraphOperator) -> bool:
        """Whether the backend runs an operator: by kind, layout, sizes."""
        return True

    def begins(self, op: GraphOperator) -> bool:
        """Whether a group may begin with an operator that the backend runs, or be of it alone."""
        return True

    def type_of(self, op: GraphOperator) -> str:
        """What an operator counts as in :meth:`fusion_rule`; a group counts as its seed does."""
        return op.kind

    def fusion_rule(self, graph: OperatorDag, kind: str, source: str, sink: str) -> bool:
        """Whether all from a seed to one of its post-dominators is one kernel.

        Args:
            graph: of the model.
            kind: what the group counts as so far, by :meth:`type_of` of its seed.
            source: the seed.
            sink: the post-dominator to which the group is to grow.
        """
        return False


def calls(op: GraphOperator, *words: str) -> bool:
    """Whether an operator is of a kind, or calls a function of torch, whose name has one of these words."""
    names = (op.kind, *op.attributes.get("calls", ()))
    return any(word in name for word in words for name in names)


class AllBut(PatternRule):
    """Any operators but some, each alone."""

    def __init__(self, *without: str) -> None:
        """``without``: words in what an operator calls, of those that the backend does not run."""
        self.without = without

    def op_rule(self, op: GraphOperator) -> bool:
        """By what it calls."""
        return not calls(op, *self.without)


class ShortGroups(AllBut):
    """Any operators but some, in groups of up to ``longest``."""

    def __init__(self, longest: int, *without: str) -> None:
        super().__init__(*without)
        self.longest = longest

    def fusion_rule(self, graph: OperatorDag, kind: str, source: str, sink: str) -> bool:
        """As long as the group is short."""
        return len(graph.between(source, sink)) <= self.longest


def check_path(graph: OperatorDag, source: str, sink: str, holds: Callable[[GraphOperator], bool]) -> bool:
    """Whether something holds of all operators after ``source`` on the way to ``sink``, that one among them."""
    return all(holds(graph[id_]) for id_ in graph.between(source, sink) if id_ != source)


def module_groups(graph: OperatorDag) -> Iterator[tuple[str, ...]]:
    """The modules of a model that are one kernel: half layers, layers, cells, by the paths in their operators' ids.

    There are few of them, and most are like others, which groups of that size that begin anywhere are not.
    """
    inside: dict[str, list[str]] = defaultdict(list)
    for id_ in graph.order:
        path = id_
        while path := path.rpartition(".")[0]:
            inside[path].append(id_)
    for group in dict.fromkeys(map(tuple, inside.values())):
        if 1 < len(group) < len(graph) and graph.is_one_kernel(group):
            yield group


def generate(graph: OperatorDag, rule: PatternRule) -> Iterator[tuple[str, ...]]:
    """All groups that a rule allows, each in the graph's order: those of one seed one after the other, growing.

    A group has all operators between its seed and a post-dominator of it, each of which the backend runs, so that it
    gives one result. Growth ends where the fusion rule does not hold.
    """
    runs = {op.id: rule.op_rule(op) for op in graph}
    for seed in graph.order:
        if not runs[seed] or not rule.begins(graph[seed]):
            continue
        yield (seed,)
        kind, sink = rule.type_of(graph[seed]), graph.post_dominator[seed]
        while sink is not None:
            group = graph.between(seed, sink)
            if not all(runs[id_] for id_ in group) or not rule.fusion_rule(graph, kind, seed, sink):
                break
            yield group
            sink = graph.post_dominator[sink]
