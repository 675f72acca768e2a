"""Groups along the devices, in several orders: where a search may start."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

from pipeplan.partition.mapping.links import Links
from pipeplan.partition.mapping.rooms import Rooms

if TYPE_CHECKING:
    import networkx as nx

__all__ = ["Devices", "lines"]

Devices = tuple[int, ...]

Way = Callable[[Sequence[int], Sequence[int]], list[Devices]]
"""The devices of groups of so many, in order, out of those that are free, in order."""


def lines(links: Links, rooms: Rooms) -> set[tuple[Devices, ...]]:
    """Groups along the devices in several orders and ways, and simply one after another where they have memory so."""
    plain, followed = list(range(len(rooms.groups))), _followed(links, len(rooms.groups))
    orders = [plain, followed, _gathered(links, rooms)]
    orders += [_halved(order, _graph(links), rooms, links.sizes) for order in (plain, followed)]
    ways: list[Way] = [_close, partial(_whole, links.sizes), _dealt]
    found = {_line(order, rooms, way) for order in orders for way in ways}
    naive = tuple(_close(rooms.groups, range(len(rooms.memory))))
    return found | {naive} if all(rooms.fits(g, device) for g, own in enumerate(naive) for device in own) else found


def _followed(links: Links, num_groups: int) -> list[int]:
    """Depth first, from the first group on, along what is busiest."""
    order: dict[int, None] = {}
    for start in range(num_groups):
        stack = [start]
        while stack:
            group = stack.pop()
            if group not in order:
                order[group] = None
                ties = sorted((links.ties[index] for index in links.around[group]), key=lambda tie: tie.most)
                stack += [tie.first + tie.second - group for tie in ties]
    return list(order)


def _gathered(links: Links, rooms: Rooms) -> list[int]:
    """Groups joined over the ties that gain most, while what is joined fits a unit; innermost units first."""
    part = {group: [group] for group in range(len(rooms.groups))}
    ties = sorted(links.ties, key=lambda tie: tie.least - tie.most)
    for size in links.sizes:
        for tie in ties:
            one, other = part[tie.first], part[tie.second]
            if one is not other and sum(rooms.groups[group] for group in one + other) <= size:
                one.extend(other)
                part.update((group, one) for group in other)
    return [group for head, members in part.items() if head == members[0] for group in members]


def _graph(links: Links) -> nx.Graph:
    """Groups, and what each two gain if they talk on the quickest level instead of the slowest."""
    import networkx as nx

    graph = nx.Graph()
    graph.add_nodes_from(range(len(links.around)))
    couples = (tie for tie in links.ties if tie.first != tie.second)
    graph.add_weighted_edges_from((tie.first, tie.second, tie.most - tie.least) for tie in couples)
    return graph


def _halved(order: Sequence[int], graph: nx.Graph, rooms: Rooms, sizes: Sequence[int]) -> list[int]:
    """Groups cut in two where little is lost, and each part again: Kernighan and Lin (1970), from the order's middle.

    The middle is between whole units of the outermost level that has several of them.
    """
    from networkx.algorithms.community import kernighan_lin_bisection

    if len(order) < 3:
        return list(order)
    counts = list(accumulate(rooms.groups[group] for group in order))
    unit = max((size for size in sizes if size < counts[-1]), default=1)
    before = max(1, counts[-1] // (2 * unit)) * unit
    middle = min(bisect_left(counts, before) + 1, len(order) - 1)
    halves = set(order[:middle]), set(order[middle:])
    one, _ = kernighan_lin_bisection(graph.subgraph(order), halves, seed=0)
    parts = [group for group in order if group in one], [group for group in order if group not in one]
    return [group for part in parts for group in _halved(part, graph, rooms, sizes)]


def _line(order: Sequence[int], rooms: Rooms, way: Way) -> tuple[Devices, ...]:
    """Groups in order on the devices in order; those that fewest devices have memory for go first."""
    found: list[Devices] = [()] * len(rooms.groups)
    taken: set[int] = set()
    for members in _by_choice(order, rooms):
        free = [d for d in range(len(rooms.memory)) if d not in taken and rooms.fits(members[0], d)]
        for group, own in zip(members, way([rooms.groups[group] for group in members], free), strict=True):
            found[group] = own
            taken.update(own)
    return tuple(found)


def _by_choice(order: Sequence[int], rooms: Rooms) -> list[list[int]]:
    """Groups by the devices that have memory for them, fewest first: so nobody takes what others must have."""
    memory, members = sorted(rooms.memory), defaultdict[int, list[int]](list)
    for group in order:
        members[bisect_left(memory, rooms.needs[group])].append(group)
    return [members[count] for count in sorted(members, reverse=True)]


def _close(counts: Sequence[int], free: Sequence[int]) -> list[Devices]:
    """One after another."""
    return [tuple(free[end - count : end]) for count, end in zip(counts, accumulate(counts), strict=True)]


def _dealt(counts: Sequence[int], free: Sequence[int]) -> list[Devices]:
    """In turn, so that devices with the same samples are neighbours."""
    turns = sorted(((2 * i + 1) / count, group) for group, count in enumerate(counts) for i in range(count))
    found: list[list[int]] = [[] for _ in counts]
    for (_, group), device in zip(turns, free, strict=False):
        found[group].append(device)
    return [tuple(own) for own in found]


def _whole(sizes: Sequence[int], counts: Sequence[int], free: Sequence[int]) -> list[Devices]:
    """One after another, with devices left out, as far as there are enough, where a group is in fewer units then."""
    found: list[Devices] = []
    spare, place = len(free) - sum(counts), 0
    for count in counts:
        begin = _begin(free, place, count, spare, sizes)
        spare, place = spare - (begin - place), begin + count
        found.append(tuple(free[begin:place]))
    return found


def _begin(free: Sequence[int], place: int, count: int, spare: int, sizes: Sequence[int]) -> int:
    """Where ``count`` devices are in the fewest units, outer units first, with at most ``spare`` left out before."""

    def units(begin: int) -> tuple[int, ...]:
        return (*(free[begin + count - 1] // size - free[begin] // size for size in reversed(sizes)), begin)

    nexts = (bisect_left(free, (free[place] // size + 1) * size, place) for size in sizes)
    return min((place, *(begin for begin in nexts if begin <= place + spare)), key=units)
