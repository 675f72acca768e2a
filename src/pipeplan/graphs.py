"""Small graphs: topological orders, naming a cycle, longest paths, connected parts.

What runs for every action of a workload, or for every candidate of a search, has loops of its own: timing
(``workload.task_graph``), copies of a repetend (``workload.steady_state.rate``), bounds, windows, and series-parallel
reductions on bits (``partition.series_parallel``).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import networkx as nx

Node = TypeVar("Node", bound=Hashable)


class CycleError(ValueError):
    """Nodes that come before each other: ``cycle``, each before the next and the last before the first."""

    def __init__(self, cycle: Sequence[Hashable]) -> None:
        self.cycle = tuple(cycle)
        super().__init__(f"edges form a cycle of {len(cycle)}: {in_circle(cycle)}")


def in_circle(cycle: Sequence[object], arrow: str = " -> ", most: int = 10) -> str:
    """A cycle as text, back to its start; the middle of a long one is left out."""
    half = most // 2
    shown = list(cycle) if len(cycle) <= most else [*cycle[:half], "...", *cycle[-half:]]
    return arrow.join(map(str, [*shown, cycle[0]]))


def find_cycle(edges: Iterable[tuple[Node, Node]]) -> tuple[Node, ...] | None:
    """Nodes of which each has an edge to the next, and the last one to the first; None if there are none."""
    import networkx as nx

    try:
        return tuple(edge[0] for edge in nx.find_cycle(nx.DiGraph(edges)))
    except nx.NetworkXNoCycle:
        return None


_CYCLES_OF = 500
"""Nodes whose shortest cycles are compared."""

_LOOKED_AT = 100_000
"""Nodes looked at for that, in all, once there is a cycle: some 50 ms."""


def short_cycle(following: Mapping[Node, Sequence[Node]]) -> list[Node]:
    """The shortest of the cycles of the first nodes that may have one, each node before the next; [] without any."""
    found: list[Node] = []
    looked_at = 0
    for start in _before_cycles(following)[:_CYCLES_OF]:
        if found and looked_at > _LOOKED_AT:
            break
        shorter, reached = _cycle_of(start, following, len(found))
        found, looked_at = shorter or found, looked_at + reached
    return found


def _before_cycles(following: Mapping[Node, Sequence[Node]]) -> list[Node]:
    """The nodes from which edges lead to a cycle."""
    left = {node: len(others) for node, others in following.items()}
    before: dict[Node, list[Node]] = {node: [] for node in following}
    for node, others in following.items():
        for other in others:
            before[other].append(node)
    ends = [node for node, count in left.items() if not count]
    while ends:
        for other in before[ends.pop()]:
            left[other] -= 1
            if not left[other]:
                ends.append(other)
    return [node for node, count in left.items() if count]


def _cycle_of(start: Node, following: Mapping[Node, Sequence[Node]], most: int) -> tuple[list[Node], int]:
    """The shortest cycle of a node, if it is shorter than ``most`` (any, for 0), else nothing; and nodes looked at."""
    reached, ends, length = {start: start}, [start], 1
    while ends and length != most:
        further = []
        for node in ends:
            for other in following[node]:
                if other == start:
                    cycle = [node]
                    while cycle[-1] != start:
                        cycle.append(reached[cycle[-1]])
                    return cycle[::-1], len(reached)
                if other not in reached:
                    reached[other] = node
                    further.append(other)
        ends, length = further, length + 1
    return [], len(reached)


def topological_order(
    nodes: Iterable[Node], edges: Iterable[tuple[Node, Node]], key: Callable[[Node], Any] | None = None
) -> tuple[Node, ...]:
    """The nodes such that every edge points forward, otherwise by ``key``, or as they are given.

    Raises:
        CycleError: the edges do not allow any order.
        ValueError: an edge has an end that is not among the nodes.
    """
    position = {node: index for index, node in enumerate(nodes)}
    edges = list(edges)
    if key is None and all(position.get(one, len(position)) < position.get(other, -1) for one, other in edges):
        return tuple(position)
    import networkx as nx

    graph = _directed(position, edges)
    if unknown := [node for node in graph if node not in position]:
        raise ValueError(f"edges name what is not a node: {', '.join(map(str, unknown))}")
    try:
        return tuple(nx.lexicographical_topological_sort(graph, key or position.__getitem__))
    except nx.NetworkXUnfeasible:
        raise CycleError([edge[0] for edge in nx.find_cycle(graph)]) from None


def longest_paths(
    order: Sequence[Node], edges: Iterable[tuple[Node, Node, int]], begins: Mapping[Node, int] | None = None
) -> dict[Node, int]:
    """{node: length of the longest path that ends there}, of (source, target, length); ``order`` is topological.

    A path that begins at a node of ``begins`` has that length before.
    """
    place = {node: index for index, node in enumerate(order)}
    found = dict.fromkeys(order, 0) | dict(begins or {})
    for source, target, length in sorted(edges, key=lambda edge: place[edge[0]]):
        found[target] = max(found[target], found[source] + length)
    return found


def connected_parts(nodes: Iterable[Node], edges: Iterable[tuple[Node, Node]]) -> list[set[Node]]:
    """The nodes by what edges join, whichever way they point; those of the first node first."""
    near: dict[Node, list[Node]] = {node: [] for node in nodes}
    for one, other in edges:
        near.setdefault(one, []).append(other)
        near.setdefault(other, []).append(one)
    parts, known = list[set[Node]](), set[Node]()
    for node in near:
        if node not in known:
            part, waiting = {node}, [node]
            while waiting:
                more = [each for each in near[waiting.pop()] if each not in part]
                part.update(more)
                waiting += more
            parts.append(part)
            known |= part
    return parts


def before_and_after(node: Node, edges: Iterable[tuple[Node, Node]]) -> tuple[set[Node], set[Node]]:
    """The nodes with a path to this one, and those to which one leads from it."""
    import networkx as nx

    graph = _directed([node], edges)
    return nx.ancestors(graph, node), nx.descendants(graph, node)


def _directed(nodes: Iterable[Node], edges: Iterable[tuple[Node, Node]]) -> nx.DiGraph[Node]:
    import networkx as nx

    graph: nx.DiGraph[Node] = nx.DiGraph()
    graph.add_nodes_from(nodes)
    graph.add_edges_from(edges)
    return graph
