"""ASTRA-sim's rules for Chakra traces, written down here again (astra-sim 518bd51, workload/Workload.cc).

A rank issues, of its nodes that wait for nothing, those with the lowest ids first; one that computes and one that sends
or exchanges at a time. A receive occupies nothing. Computing takes ``duration_micros``, or 1 ns without. A message
arrives whether or not it is waited for; a collective begins when the last rank of its group has issued it, and a
group's are in the order in which its ranks issue them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from pipeplan.interop.chakra.wire import NodeType, TraceNode

Key = tuple[int, int]
"""A rank, and the id of one of its nodes."""

Message = Callable[[TraceNode], tuple[int, int]]
"""(ns for which the rank's port is taken, ns after the start at which a message has arrived)."""


def one_port(rank: int, node: TraceNode) -> object:
    """What a node that sends or exchanges occupies in ASTRA-sim."""
    return rank, "sending"


def links_of_plans(rank: int, node: TraceNode) -> object:
    """What it occupies in a plan: a link for each pair, and networks beside these."""
    return (rank, node.attribute("comm_dst")) if node.type is NodeType.SEND else (rank, "network")


@dataclass
class Replay:
    """When every node was ready, began and ended, in ns; ``before`` is who had occupied what a node needed."""

    ready: dict[Key, int] = field(default_factory=dict)
    begin: dict[Key, int] = field(default_factory=dict)
    end: dict[Key, int] = field(default_factory=dict)
    before: dict[Key, Key] = field(default_factory=dict)

    @property
    def iteration_ns(self) -> int:
        return max(self.end.values(), default=0)


def replay(
    ranks: Sequence[Sequence[TraceNode]],
    groups: Mapping[str, Sequence[int]],
    message: Message = lambda node: (0, 0),
    collective: Callable[[TraceNode], int] = lambda node: 0,
    occupies: Callable[[int, TraceNode], object] = one_port,
) -> Replay:
    """Run the traces of all ranks to their end; AssertionError where they wait for each other."""
    found = Replay()
    nodes = {(rank, node.id): node for rank, own in enumerate(ranks) for node in own}
    waiting = {key: len({*node.control, *node.data}) for key, node in nodes.items()}
    users: defaultdict[Key, list[Key]] = defaultdict(list)
    for (rank, number), node in nodes.items():
        for other in {*node.control, *node.data}:
            users[rank, other].append((rank, number))
    free: list[set[int]] = [{node.id for node in own if not waiting[rank, node.id]} for rank, own in enumerate(ranks)]
    found.ready = {(rank, number): 0 for rank, own in enumerate(free) for number in own}
    busy: dict[object, Key | None] = {}
    last: dict[object, Key] = {}
    arrived: dict[tuple[object, ...], int] = {}
    expecting: dict[tuple[object, ...], Key] = {}
    joined: defaultdict[str, dict[int, list[Key]]] = defaultdict(lambda: defaultdict(list))
    events: list[tuple[int, int, str, Key]] = []

    def resource(key: Key) -> object:
        node = nodes[key]
        return (key[0], "compute") if node.type is NodeType.COMPUTE else occupies(key[0], node)

    def ends(key: Key, at: int) -> None:
        heappush(events, (at, len(found.begin), "end", key))

    def start(key: Key, now: int) -> None:
        rank, node = key[0], nodes[key]
        found.begin[key] = now
        if node.type is NodeType.COMPUTE:
            ends(key, now + max(1, 1000 * node.micros))
        elif node.type is NodeType.RECEIVE:
            name = tuple(map(node.attribute, ("comm_src", "comm_dst", "comm_tag")))
            expecting[name] = key
            if name in arrived:
                ends(key, max(now, arrived[name]))
        elif node.type is NodeType.SEND:
            held, lasts = message(node)
            name = tuple(map(node.attribute, ("comm_src", "comm_dst", "comm_tag")))
            ends(key, now + held)
            arrived[name] = now + lasts
            if name in expecting:
                ends(expecting[name], now + lasts)
        else:
            group = str(node.attribute("pg_name"))
            joined[group][rank].append(key)
            number = len(joined[group][rank]) - 1
            members = [joined[group][each] for each in groups[group]]
            if all(len(own) > number for own in members):
                together = [own[number] for own in members]
                assert len({nodes[each].attributes for each in together}) == 1, "ranks do other things together"
                for each in together:
                    ends(each, now + collective(node))

    def issue(rank: int, now: int) -> None:
        for number in sorted(free[rank]):
            key = rank, number
            own = None if nodes[key].type is NodeType.RECEIVE else resource(key)
            if own is not None:
                if busy.get(own) is not None:
                    continue
                busy[own] = key
                if own in last:
                    found.before[key] = last[own]
                last[own] = key
            free[rank].discard(number)
            start(key, now)

    for rank in range(len(ranks)):
        issue(rank, 0)
    while events:
        now, _, _, key = heappop(events)
        found.end[key] = now
        if nodes[key].type is not NodeType.RECEIVE:
            busy[resource(key)] = None
        for user in users[key]:
            waiting[user] -= 1
            if not waiting[user]:
                free[key[0]].add(user[1])
                found.ready[user] = now
        issue(key[0], now)
    missing = [nodes[key].name for key in nodes if key not in found.end]
    assert not missing, f"{len(missing)} nodes never end: {missing[:5]}"
    return found
