"""Nodes of all ranks while they are put together: what each waits for, messages between two, collectives of several.

A simulator issues of a rank's nodes that are ready the one with the lowest id, and lets one computing and one sending
run at a time (ASTRA-sim). So ids follow the order of the device: an action, what it sends, then collectives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pipeplan.interop.chakra.wire import CollectiveType, NodeType, TraceNode, Value

_LATER = 2**40
"""A position after all that programs have."""

_CLASSES = {NodeType.COMPUTE: 0, NodeType.RECEIVE: 1, NodeType.SEND: 2, NodeType.COLLECTIVE: 3}


@dataclass(slots=True, eq=False)
class DraftNode:
    """A node that has no id yet.

    ``place`` numbers the rank's computing nodes: of another, it is the one after which it stands. ``position`` is its
    order among others there. ``control`` and ``data`` are what it waits for.
    """

    rank: int
    type: NodeType
    name: str
    micros: int = 0
    attributes: tuple[tuple[str, Value], ...] = ()
    control: list[DraftNode] = field(default_factory=list)
    data: list[DraftNode] = field(default_factory=list)
    place: int = -1
    position: int = _LATER
    id: int = 0

    @property
    def waits_for(self) -> list[DraftNode]:
        """Everything that has to end before it."""
        return [*self.control, *self.data]


Before = tuple[Sequence[DraftNode], Sequence[DraftNode]]
"""What something waits for: by the order of its rank, and for what it needs."""


class Drafts:
    """All nodes of a plan, rank by rank, with the process groups that collectives name."""

    def __init__(self, num_ranks: int) -> None:
        self.of_rank: list[list[DraftNode]] = [[] for _ in range(num_ranks)]
        self.last_compute: list[DraftNode | None] = [None] * num_ranks
        self.groups: dict[tuple[int, ...], int] = {}
        self.small = 0
        self._tags: Counter[tuple[int, int]] = Counter()

    def compute(self, rank: int, name: str, micros: int) -> DraftNode:
        """The next action of a rank, or a part of one: after the one before it."""
        before = self.last_compute[rank]
        found = self._add(DraftNode(rank, NodeType.COMPUTE, name, micros, control=[] if before is None else [before]))
        found.place = 0 if before is None else before.place + 1
        self.last_compute[rank] = found
        return found

    def message(
        self, ends: tuple[int, int], names: tuple[str, str], size: int, before: Before, position: int = _LATER
    ) -> tuple[DraftNode, DraftNode]:
        """The SEND on the one end, and the RECV on the other. A message has a byte at least, as simulators need it."""
        tag = self._tags[ends]
        self._tags[ends] += 1
        self.small += not size
        about = (("comm_src", ends[0]), ("comm_dst", ends[1]), ("comm_tag", tag), ("comm_size", max(1, size)))
        control, data = before
        send = DraftNode(ends[0], NodeType.SEND, names[0], 0, about, [*control], [*data])
        send.place, send.position = max((each.place for each in send.waits_for), default=-1), position
        return self._add(send), self._add(DraftNode(ends[1], NodeType.RECEIVE, names[1], 0, about))

    def meet(self, name: str, before: Mapping[int, Before]) -> dict[int, list[DraftNode]]:
        """{rank: what says there that all ranks have come so far}, by messages of a byte."""
        ranks = [*before]
        if len(ranks) == 2:
            both = (
                self.message((one, other), (f"{name} ready", f"{name} ready"), 1, before[one])[1]
                for one, other in (ranks, ranks[::-1])
            )
            return {rank: [received] for rank, received in zip(ranks[::-1], both, strict=True)}
        first, *others = ranks
        come = [self.message((rank, first), (f"{name} ready", f"{name} ready"), 1, before[rank])[1] for rank in others]
        all_come = (before[first][0], [*before[first][1], *come])
        found = {first: come}
        for rank in others:
            found[rank] = [self.message((first, rank), (f"{name} go", f"{name} go"), 1, all_come)[1]]
        return found

    def collective(
        self, kind: CollectiveType, name: str, size: int, micros: int, before: Mapping[int, Before]
    ) -> dict[int, DraftNode]:
        """{rank: its node} of what the ranks do together."""
        group = self.groups.setdefault(tuple(sorted(before)), len(self.groups) + 1)
        about = (("comm_type", int(kind)), ("comm_size", max(1, size)), ("pg_name", str(group)))
        found = {}
        for rank, (control, data) in before.items():
            node = DraftNode(rank, NodeType.COLLECTIVE, name, micros, about, [*control], [*data])
            node.place = max((each.place for each in node.waits_for), default=-1)
            found[rank] = self._add(node)
        return found

    def nodes(self, rank: int) -> list[TraceNode]:
        """The nodes of a rank, with their ids."""
        own = self.of_rank[rank]
        for each in own:
            for other in each.waits_for:
                if other.type is NodeType.RECEIVE:  # it stands before what needs it, after the action before that
                    place = each.place - (each.type is NodeType.COMPUTE)
                    other.place = place if other.position == _LATER else min(place, other.place)
                    other.position = 0
        made = sorted(range(len(own)), key=lambda n: (own[n].place, _CLASSES[own[n].type], own[n].position, n))
        for number, index in enumerate(made, 1):
            own[index].id = number
        return [_node(own[index]) for index in made]

    def _add(self, draft: DraftNode) -> DraftNode:
        self.of_rank[draft.rank].append(draft)
        return draft


def _node(draft: DraftNode) -> TraceNode:
    control, data = _ids(draft.control), _ids(draft.data)
    attributes = (("is_cpu_op", False), *draft.attributes)
    return TraceNode(draft.id, draft.name, draft.type, control, data, draft.micros, attributes)


def _ids(drafts: Iterable[DraftNode]) -> tuple[int, ...]:
    return tuple(sorted({each.id for each in drafts}))
