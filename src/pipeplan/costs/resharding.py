"""The cheapest way from one layout to another on the devices of a cluster: a shortest path along all moves.

On 64 devices there are 4,021 layouts and a third of a million sends between them, but only some hundred prices for a
tensor: what a send takes is its outermost link and how many leave the busiest node over it. So moves are columns of
numbers, and sends are only named when a path has them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from pipeplan.costs.communication import Exchange, busiest_pair, price_of_groups
from pipeplan.costs.layouts import ANY, How, Layout, MeshSplit, Move, Tensor, all_layouts, groups_along, steps_from
from pipeplan.files import Cluster
from pipeplan.files.row_messages import Combining
from pipeplan.time_limit import checked, checkpoint

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

_COLLECTIVES: dict[How, Combining] = {
    "gather": "all_gather",
    "exchange": "all_to_all",
    "sum": "all_reduce",
    "scatter": "reduce_scatter",
}

_SENDS_AT_ONCE = 1 << 12
"""Sends of all devices that are looked at between two questions for the time."""


@dataclass(frozen=True, slots=True)
class _Price:
    """What moves of a kind take: of an array cut into ``shards``, by the bytes that a device has of it."""

    shards: int
    of_bytes: Callable[[int], float]

    def of(self, tensor: Tensor) -> float:
        """Time in ns for a tensor."""
        return self.of_bytes(-(-tensor.num_bytes // self.shards))


@dataclass(frozen=True, slots=True)
class _Edges:
    """M moves as edges between numbered layouts, in order of where they lead ``to``; ``moves`` says which each is."""

    sources: IntArray  # [M]
    to: IntArray  # [M]
    moves: IntArray  # [M]

    @classmethod
    def of(cls, sources: IntArray, to: IntArray) -> _Edges:
        """The same in order."""
        order = np.argsort(to, kind="stable")
        return cls(sources[order], to[order], order)

    def distances(self, begin: int, weights: FloatArray, count: int) -> FloatArray:
        """From one of ``count`` layouts to all, [count].

        By Bellman and Ford's relaxation, of all edges at once from what has come nearer.
        """
        distance, nearer = np.full(count, np.inf), np.zeros(count, bool)
        distance[begin], nearer[begin] = 0.0, True
        while len(edges := np.flatnonzero(nearer[self.sources])):
            to = self.to[edges]
            starts = np.flatnonzero(np.r_[True, to[1:] != to[:-1]])
            offered = np.minimum.reduceat(distance[self.sources[edges]] + weights[self.moves[edges]], starts)
            reached = to[starts]
            better = offered < distance[reached]
            nearer[:] = False
            nearer[reached[better]] = True
            distance[reached[better]] = offered[better]
        return distance


class Resharding:
    """The cheapest moves between all layouts of tensors on the first ``devices`` devices of a cluster.

    Times are kept for tensors of the same size, so that layers that are alike cost nothing more; and nothing is worked
    out before it is asked for.
    """

    def __init__(self, cluster: Cluster | None, devices: int) -> None:
        self.cluster, self.devices = cluster, devices
        self._weights: dict[Tensor, FloatArray] = {}
        self._distances: dict[tuple[Tensor, Layout], FloatArray] = {}
        self._to_whole: dict[Tensor, FloatArray] = {}

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        """Every layout."""
        return all_layouts(self.devices)

    @cached_property
    def number(self) -> dict[Layout, int]:
        """The place of every layout among them."""
        return {layout: index for index, layout in enumerate(self.layouts)}

    @cached_property
    def _extents(self) -> IntArray:
        """Devices along the split of each dimension, and along the partial one, [L, 4]; 1 where there is none."""
        return np.array([[split.extent if split else 1 for split in layout] for layout in self.layouts], np.int64)

    @cached_property
    def _pieces(self) -> npt.NDArray[np.unsignedinteger]:
        """Which piece of a tensor each device holds, the same number of the same piece of one shape, [L, D]."""
        strides = np.array([[split.stride if split else 1 for split in layout] for layout in self.layouts], np.int64)
        pieces = np.zeros((len(self.layouts), self.devices), np.int64)
        for extent, stride in zip(self._extents.T[..., None], strides.T[..., None], strict=True):
            pieces = pieces * extent + np.arange(self.devices) // stride % extent
        return pieces.astype(np.min_scalar_type(self.devices))  # small numbers are sorted several times as fast

    @cached_property
    def _steps(self) -> tuple[Move, ...]:
        """All moves that are no sends."""
        return tuple(move for layout in checked(self.layouts, 16) for move in steps_from(layout, self.devices))

    @cached_property
    def _sends(self) -> tuple[IntArray, IntArray]:
        """Sources and targets of all sends, between layouts that cut a tensor into pieces of the same shape."""
        checkpoint()
        _, shape = np.unique(self._extents, axis=0, return_inverse=True)
        by_shape = np.split(np.argsort(shape, kind="stable"), np.cumsum(np.bincount(shape.ravel()))[:-1])
        sources = np.concatenate([np.repeat(alike, len(alike)) for alike in by_shape])
        targets = np.concatenate([np.tile(alike, len(alike)) for alike in by_shape])
        return sources[sources != targets], targets[sources != targets]

    @cached_property
    def _ends(self) -> tuple[IntArray, IntArray]:
        """Sources and targets of all moves, the steps first."""
        sources = np.array([self.number[move.source] for move in checked(self._steps)], np.int64)
        targets = np.array([self.number[move.target] for move in checked(self._steps)], np.int64)
        return np.r_[sources, self._sends[0]], np.r_[targets, self._sends[1]]

    @cached_property
    def _forward(self) -> _Edges:
        return _Edges.of(*self._ends)

    @cached_property
    def _backward(self) -> _Edges:
        return _Edges.of(*reversed(self._ends))

    @cached_property
    def _prices(self) -> tuple[tuple[_Price, ...], IntArray]:
        """Every price there is, and of every move which it is, [M]."""
        places: dict[object, int] = {}
        prices: list[_Price] = []
        priced_as = []
        for move in checked(self._steps):
            key = move.how, move.along, _counted(move).shards
            if key not in places:
                places[key] = len(prices)
                prices.append(self._price_of_step(move))
            priced_as.append(places[key])
        of_sends = self._sent_as(*self._sends)
        _, first, which = np.unique(of_sends, axis=0, return_index=True, return_inverse=True)
        sources, targets = (ends[first].tolist() for ends in self._sends)
        sends = [self._price_of_send(*ends) for ends in zip(sources, targets, strict=True)]
        return (*prices, *sends), np.r_[np.array(priced_as, np.int64), which.ravel() + len(prices)]

    def _price_of_step(self, move: Move) -> _Price:
        if move.how == "slice":
            return _Price(1, lambda size: 0.0)
        assert move.along is not None
        price = price_of_groups(self.cluster, groups_along([move.along], self.devices))
        operation = _COLLECTIVES[move.how]
        return _Price(_counted(move).shards, lambda size: price(Exchange(operation, size)))

    def _price_of_send(self, source: int, target: int) -> _Price:
        givers, takers = self._senders(np.array([source]), np.array([target]))
        busiest = busiest_pair(self.cluster, list(zip(givers[0].tolist(), takers[0].tolist(), strict=True)))
        shards = self.layouts[source].shards
        cluster = self.cluster
        if cluster is None or busiest is None:
            return _Price(shards, lambda size: 0.0)
        return _Price(shards, lambda size: float(busiest.send_time(cluster, size)))

    def _sent_as(self, sources: IntArray, targets: IntArray) -> IntArray:
        """What prices of sends go by, [S, 3]: shards, outermost link, and how many leave the busiest node over it."""
        found = np.empty((len(sources), 3), np.int64)
        found[:, 0] = self._extents[sources, :3].prod(axis=1)
        for begin in range(0, len(sources), _SENDS_AT_ONCE):
            checkpoint()
            some = slice(begin, begin + _SENDS_AT_ONCE)
            found[some, 1:] = np.column_stack(self._crowds(*self._senders(sources[some], targets[some])))
        return found

    def _senders(self, sources: IntArray, targets: IntArray) -> tuple[IntArray, IntArray]:
        """Who sends its piece and who takes it, so that a tensor of one layout comes to lie as another, [S, D] each.

        The devices that hold the same piece before are matched with those that shall hold it, each with itself first,
        then in order of their numbers.
        """
        before, after = self._pieces[sources], self._pieces[targets]
        stay = before == after
        ends = (np.where(stay, self.devices, pieces) for pieces in (before, after))
        givers, takers = (np.argsort(pieces, axis=1, kind="stable") for pieces in ends)
        return givers, takers

    def _crowds(self, givers: IntArray, takers: IntArray) -> tuple[IntArray, IntArray]:
        """The outermost link of each send, -1 where none takes time; and how many leave its busiest node, [S] each."""
        levels = () if self.cluster is None else self.cluster.levels
        link = np.full(givers.shape, -1)
        for index, level in reversed([*enumerate(levels)]):
            together = givers // level.group_size == takers // level.group_size
            link[together] = index
        link[givers == takers] = -1
        outermost, leaving = link.max(axis=1), np.zeros(len(givers), np.int64)
        for index in range(1, len(levels)):
            sends, size = np.flatnonzero(outermost == index), levels[index - 1].group_size
            nodes = -(-self.devices // size)
            away = givers[sends] // size != takers[sends] // size
            from_node = givers[sends] // size + nodes * np.arange(len(sends))[:, None]
            counts = np.bincount(from_node[away], minlength=nodes * len(sends)).reshape(len(sends), nodes)
            leaving[sends] = counts.max(axis=1)
        return outermost, leaving

    def times(self, tensor: Tensor, sources: Sequence[Layout], targets: Sequence[Layout]) -> FloatArray:
        """Time in ns from each of the sources to each of the targets, [S, T]; infinite where there is no way."""
        columns = np.array([self.number[target] for target in targets], np.int64)
        rows = {source: self._distances_from(tensor, source)[columns] for source in dict.fromkeys(sources)}
        return np.stack([rows[source] for source in sources])

    def whole_ns(self, tensor: Tensor, source: Layout) -> float:
        """Time in ns until a tensor is whole on every device: of all layouts at once, by the same moves backward."""
        if tensor not in self._to_whole:
            checkpoint()
            weights, end = self._weights_of(tensor), self.number[Layout()]
            self._to_whole[tensor] = self._backward.distances(end, weights, len(self.layouts))
        return float(self._to_whole[tensor][self.number[source]])

    def path(self, tensor: Tensor, source: Layout, target: Layout) -> tuple[Move, ...]:
        """The moves of the cheapest way; of equal ones a way with fewest, as moves may be free.

        Raises:
            ValueError: there is none.
        """
        distance, weights = self._distances_from(tensor, source), self._weights_of(tensor)
        if not np.isfinite(distance[self.number[target]]):
            raise ValueError(f"no moves lead from {source} to {target} of {tensor}")
        edges = self._forward
        cost = weights[edges.moves]
        cheapest = np.isfinite(cost) & (distance[edges.sources] + cost == distance[edges.to])
        begin, end = self.number[source], self.number[target]
        onward: dict[int, int] = {end: -1}  # the edge that leads from a layout on to the target
        waiting = deque([end])
        while begin not in onward:
            at = waiting.popleft()
            for edge in np.flatnonzero(cheapest & (edges.to == at)).tolist():
                before = int(edges.sources[edge])
                if before not in onward:
                    onward[before] = edge
                    waiting.append(before)
        found: list[Move] = []
        while begin != end:
            edge = onward[begin]
            found.append(self._move(int(edges.moves[edge])))
            begin = int(edges.to[edge])
        return tuple(found)

    def _move(self, index: int) -> Move:
        if index < len(self._steps):
            return self._steps[index]
        source, target = (int(ends[index]) for ends in self._ends)
        return Move("send", self.layouts[source], self.layouts[target])

    def every_move(self) -> list[Move]:
        """All of them, which are many on many devices."""
        return [self._move(index) for index in range(len(self._ends[0]))]

    def move_ns(self, tensor: Tensor, move: Move) -> float:
        """Time of one move; infinite where the tensor's dimensions cannot be divided so."""
        if not (tensor.fits(move.source) and tensor.fits(move.target)):
            return float("inf")
        if move.how == "send":
            return self._price_of_send(self.number[move.source], self.number[move.target]).of(tensor)
        return self._price_of_step(move).of(tensor)

    def _weights_of(self, tensor: Tensor) -> FloatArray:
        """Time of every move, [M]."""
        if tensor not in self._weights:
            prices, priced_as = self._prices
            each = np.array([price.of(tensor) for price in checked(prices)], np.float64)
            fits = (np.array(tensor.sizes) % self._extents[:, :3] == 0).all(axis=1)
            sources, targets = self._ends
            self._weights[tensor] = np.where(fits[sources] & fits[targets], each[priced_as], np.inf)
        return self._weights[tensor]

    def _distances_from(self, tensor: Tensor, source: Layout) -> FloatArray:
        """Distances to all layouts, [L]."""
        if (tensor, source) not in self._distances:
            checkpoint()
            count = len(self.layouts)
            known = tensor.fits(source)
            self._distances[tensor, source] = (
                self._forward.distances(self.number[source], self._weights_of(tensor), count)
                if known
                else np.full(count, np.inf)
            )
        return self._distances[tensor, source]


def _counted(move: Move) -> Layout:
    """The layout whose pieces a collective is about: gathered, the larger ones."""
    return move.target if move.how == "gather" else move.source


def sum_ns(size: int, split: MeshSplit, resharding: Resharding) -> float:
    """Time to add up gradients of ``size`` bytes along a split: the cheapest way from a sum to a whole tensor."""
    return resharding.whole_ns(Tensor((ANY, ANY, ANY), size), Layout(partial=split)) if size else 0.0
