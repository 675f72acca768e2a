"""Random graphs of costs, and every strategy of one by full enumeration."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from pipeplan.sharding.graph import CostEdge, CostGraph, CostNode, CostTie, Strategy, TieUser
from pipeplan.sharding.table import Table, table


def costs(rng: np.random.Generator, shape: tuple[int, ...], variants: int, high: int, forbidden: float) -> Table:
    """Random costs, some combinations of which cannot be; the first cell always can."""
    full = (*shape, variants)
    allowed = rng.random(full) >= forbidden
    allowed.reshape(-1, variants)[0, 0] = True
    return table(rng.integers(0, high, full), rng.integers(0, high, full), allowed, copies=variants)


def graph_of(
    rng: np.random.Generator,
    sizes: list[int],
    pairs: list[tuple[int, int]],
    *,
    variants: int = 1,
    high: int = 20,
    forbidden: float = 0.0,
) -> CostGraph:
    """Nodes of so many configurations and the edges given, all costs random."""
    nodes = [
        CostNode(f"n{index}", tuple(map(str, range(size))), costs(rng, (size,), variants, high, forbidden))
        for index, size in enumerate(sizes)
    ]
    edges = [CostEdge(f"n{a}", f"n{b}", costs(rng, (sizes[a], sizes[b]), variants, high, forbidden)) for a, b in pairs]
    return CostGraph(tuple(nodes), tuple(edges))


def tied(rng: np.random.Generator, graph: CostGraph, num_users: int, num_ways: int, high: int) -> CostGraph:
    """The graph with costs on top of some operators' for what they share: bytes for each way of splitting it."""
    users = sorted(rng.choice(len(graph.nodes), min(num_users, len(graph.nodes)), replace=False).tolist())
    sizes, steps = rng.integers(0, high, (2, num_ways))
    nodes, shares = list(graph.nodes), []
    for index in users:
        node = nodes[index]
        ways = rng.integers(0, num_ways, len(node.configurations))
        own = TieUser(node.name, ways, sizes[ways], rng.integers(0, high, len(ways)), steps[ways])
        cells = node.costs.cells
        time = own.time_ns + own.step_ns
        more = node.costs.memory_bytes + own.memory_bytes[cells], node.costs.time_ns + time[cells]
        nodes[index] = replace(node, costs=replace(node.costs, memory_bytes=more[0], time_ns=more[1]))
        shares.append(own)
    tie = CostTie(tuple(shares), int(rng.integers(0, high)))
    return CostGraph(tuple(nodes), graph.edges, (*graph.ties, tie))


def copies(tie: CostTie, chosen: Mapping[str, int]) -> tuple[int, int]:
    """Bytes and ns that its operators take less than each by itself, counted copy by copy."""
    every = [(user, chosen[user.operator]) for user in tie.users]
    held = {int(user.ways[k]): int(user.memory_bytes[k]) for user, k in every}
    first, k = every[0]
    spent = min(int(first.time_ns[k]), tie.apart_ns) if len(held) == 1 else tie.apart_ns
    stepped = {int(user.ways[k]): int(user.step_ns[k]) for user, k in every}
    counted = [
        sum(int(costs[k]) for costs, k in each)
        for each in zip(*(((u.memory_bytes, k), (u.time_ns, k), (u.step_ns, k)) for u, k in every), strict=True)
    ]
    return counted[0] - sum(held.values()), counted[1] - spent + counted[2] - sum(stepped.values())


def chain(num: int) -> list[tuple[int, int]]:
    return [(index, index + 1) for index in range(num - 1)]


def residual(num: int) -> list[tuple[int, int]]:
    """A chain in which every second node also reads what its predecessor read."""
    return chain(num) + [(index, index + 2) for index in range(0, num - 2, 2)]


def branching(rng: np.random.Generator, num: int) -> list[tuple[int, int]]:
    """Any acyclic graph: each later node reads one or two earlier ones, some of them twice."""
    return [(int(rng.integers(0, node)), node) for node in range(1, num) for _ in range(int(rng.integers(1, 3)))]


def hub(num: int) -> list[tuple[int, int]]:
    """A node read by all others (an attention mask), beside a chain."""
    return [(0, node) for node in range(2, num)] + [(node, node + 1) for node in range(1, num - 1)]


def complete(num: int) -> list[tuple[int, int]]:
    return list(itertools.combinations(range(num), 2))


def cost_of(graph: CostGraph, strategy: Strategy) -> tuple[int, int] | None:
    """Memory and time of a strategy, summed anew; None if a point it names is not there."""
    taken = [
        (node.costs, strategy.configurations[node.name], strategy.node_variants[node.name]) for node in graph.nodes
    ]
    for edge, variant in zip(graph.edges, strategy.edge_variants, strict=True):
        cell = strategy.configurations[edge.source] * edge.costs.columns + strategy.configurations[edge.target]
        taken.append((edge.costs, cell, variant))
    points = [_point(*choice) for choice in taken]
    if None in points:
        return None
    found = [point for point in points if point]
    spared = [copies(tie, strategy.configurations) for tie in graph.ties]
    return (
        sum(memory for memory, _ in found) - sum(memory for memory, _ in spared),
        sum(time for _, time in found) - sum(time for _, time in spared),
    )


def _point(costs: Table, cell: int, variant: int) -> tuple[int, int] | None:
    for point in range(int(costs.starts[cell]), int(costs.starts[cell + 1])):
        if costs.picks[0, point] == variant:
            return int(costs.memory_bytes[point]), int(costs.time_ns[point])
    return None


def enumerate_frontier(
    graph: CostGraph,
    allows: Callable[[Mapping[str, int]], bool] = lambda chosen: True,
    workspace: Callable[[Mapping[str, int]], int] = lambda chosen: 0,
) -> list[tuple[int, int]]:
    """The frontier by going through every configuration of every node and every variant of everything.

    Of those configurations that it ``allows`` together, with the ``workspace`` of them on top.
    """
    every: set[tuple[int, int]] = set()
    names = [node.name for node in graph.nodes]
    for cells in itertools.product(*(range(len(node.configurations)) for node in graph.nodes)):
        chosen = dict(zip(names, cells, strict=True))
        if not allows(chosen):
            continue
        factors = [_cell(node.costs, chosen[node.name]) for node in graph.nodes]
        factors += [
            _cell(edge.costs, chosen[edge.source] * edge.costs.columns + chosen[edge.target]) for edge in graph.edges
        ]
        spared = [copies(tie, chosen) for tie in graph.ties]
        sums = {(workspace(chosen) - sum(memory for memory, _ in spared), -sum(time for _, time in spared))}
        for factor in factors:
            sums = {(m + a, t + b) for m, t in sums for a, b in factor}
        every |= sums
    kept: list[tuple[int, int]] = []
    for memory, time in sorted(every):
        if not kept or time < kept[-1][1]:
            kept.append((memory, time))
    return kept


def _cell(costs: Table, cell: int) -> list[tuple[int, int]]:
    points = range(int(costs.starts[cell]), int(costs.starts[cell + 1]))
    return [(int(costs.memory_bytes[point]), int(costs.time_ns[point])) for point in points]
