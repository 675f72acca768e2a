"""How a tensor lies on the devices, and the cheapest way from one layout to another (TensorOpt section 4.2).

Every tensor is seen as [samples, places, features]: places are positions of a sequence or rows of an image, features
its hidden numbers or channels. A layout says which split each dimension has, and whether the tensor is *partial*: the
sum of what the devices along one split hold.

Devices 0 to n - 1 form a mesh, the last dimension's coordinate changing fastest. A *split* is one of its dimensions by
itself: a number of devices, a stride apart. Saying splits instead of meshes makes configurations of different meshes
comparable: [2, 8] with the second dimension unused and [2, 2, 4] with the last two unused are one.

Layouts are the nodes of a graph, and an edge joins two of which one becomes the other by one step:

* *gather*: a dimension gives up the minor part of its split, or all of it (all-gather);
* *slice*: a dimension is split along devices that hold the same; every device drops what is not its own, at no cost
  (along a prime number of devices; more are several slices);
* *exchange*: a dimension gives up the minor part of its split to another dimension (all-to-all);
* *sum*: the devices along the partial split, or along a part of it, add up (all-reduce);
* *scatter*: they add up and a dimension is split along them (reduce-scatter);
* *send*: two layouts with pieces of equal shape on other devices: each device sends its piece to another.

The cheapest sequence is a shortest path. It counts as one operation, as the paper fuses it: what lies between the
first and the last layout is not kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import product
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeplan.costs.communication import BusiestPair, Combining, Exchange, busiest_pair, time_of_groups
from pipeplan.files import Cluster
from pipeplan.time_limit import checked

ANY = 0
"""Size of a dimension for which it is not known what divides it; its consumer says so."""

DIMENSIONS = ("samples", "places", "features")


class Layout(NamedTuple):
    """The split of every dimension, None where it is whole on every device, and the split it is partial along."""

    samples: MeshSplit | None = None
    places: MeshSplit | None = None
    features: MeshSplit | None = None
    partial: MeshSplit | None = None

    @property
    def shards(self) -> int:
        """Into how many pieces the tensor is cut."""
        count = 1
        for split in self[:3]:
            count *= split.extent if split else 1
        return count

    @property
    def free(self) -> bool:
        """Whether it is whole everywhere and no sum."""
        return not any(self)

    def used(self) -> tuple[MeshSplit, ...]:
        """Every split in it."""
        return tuple(split for split in self if split)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A whole tensor: what its dimensions can be divided by, and its bytes."""

    sizes: tuple[int, int, int]
    num_bytes: int

    def fits(self, layout: Layout) -> bool:
        """Whether every split divides its dimension."""
        return all(not split or size % split.extent == 0 for size, split in zip(self.sizes, layout[:3], strict=True))

    def local_bytes(self, layout: Layout) -> int:
        """What one device holds."""
        return -(-self.num_bytes // layout.shards)


@cache
def all_layouts(devices: int) -> tuple[Layout, ...]:
    """Every layout on ``devices``, of meshes of any number of dimensions."""
    runs = [
        MeshSplit(extent, stride)
        for extent in range(2, devices + 1)
        for stride in range(1, devices + 1)
        if devices % (extent * stride) == 0
    ]
    return tuple(Layout(*each) for each in _combinations(runs, devices))


def _combinations(runs: Sequence[MeshSplit], devices: int) -> list[tuple[MeshSplit | None, ...]]:
    """Choices for the four entries of a layout, built entry by entry so that few dead ends are visited."""
    found: list[tuple[MeshSplit | None, ...]] = [()]
    for _ in Layout._fields:
        found = [
            (*start, each)
            for start, each in product(found, [None, *runs])
            if nested([split for split in (*start, each) if split], devices)
        ]
    return found


class MeshSplit(NamedTuple):
    """A dimension of a mesh: ``extent`` devices, ``stride`` apart in their numbers."""

    extent: int
    stride: int

    @property
    def reach(self) -> int:
        """The devices of one block of this dimension and all after it."""
        return self.extent * self.stride

    def coordinate(self, device: int) -> int:
        """Where a device is along it."""
        return device // self.stride % self.extent

    @property
    def parts(self) -> tuple[tuple[MeshSplit, MeshSplit], ...]:
        """Every way to see it as two dimensions, the one with the larger stride first."""
        return tuple(
            (MeshSplit(self.extent // low, self.stride * low), MeshSplit(low, self.stride))
            for low in range(2, self.extent)
            if self.extent % low == 0
        )

    def after(self, major: MeshSplit | None) -> MeshSplit | None:
        """The split by ``major`` and then by this one, where the two are one dimension; by this one without it."""
        if major is None:
            return self
        return MeshSplit(major.extent * self.extent, self.stride) if major.stride == self.reach else None


def joined(splits: Iterable[MeshSplit]) -> list[MeshSplit]:
    """Splits of one mesh with those that follow each other as one."""
    found: list[MeshSplit] = []
    for split in sorted(splits, key=lambda each: -each.stride):
        whole = split.after(found[-1]) if found else None
        found[-1:] = [whole] if whole else [*found[-1:], split]
    return found


def nested(splits: Sequence[MeshSplit], devices: int) -> bool:
    """Whether the splits are dimensions of one mesh of ``devices``."""
    outer = devices
    for split in sorted(splits, key=lambda each: -each.stride):
        if outer % split.reach:
            return False
        outer = split.stride
    return True


FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
How = Literal["gather", "slice", "exchange", "sum", "scatter", "send"]

_COLLECTIVES: dict[How, Combining] = {
    "gather": "all_gather",
    "exchange": "all_to_all",
    "sum": "all_reduce",
    "scatter": "reduce_scatter",
}


@dataclass(frozen=True, slots=True)
class Move:
    """One step between two layouts. ``along`` are the devices that talk; ``taken`` and ``given`` are dimensions.

    ``given`` gives up a split (a gather, an exchange), ``taken`` gains one (a slice, an exchange, a scatter).
    """

    how: How
    source: Layout
    target: Layout
    along: MeshSplit | None = None
    given: str = ""
    taken: str = ""


def groups_along(along: Sequence[MeshSplit], devices: int) -> list[list[int]]:
    """The groups of devices that differ in nothing but their coordinates along these splits."""
    found: dict[int, list[int]] = {}
    for device in range(devices):
        rest = device - sum(split.coordinate(device) * split.stride for split in along)
        found.setdefault(rest, []).append(device)
    return list(found.values())


@cache
def moves_between_all(devices: int) -> tuple[Move, ...]:
    """Every step between two layouts on ``devices``."""
    layouts = all_layouts(devices)
    found = [move for layout in checked(layouts, 16) for move in _moves_from(layout, devices)]
    shapes: dict[tuple[int, ...], list[Layout]] = {}
    for layout in layouts:
        shapes.setdefault(tuple(split.extent if split else 1 for split in layout), []).append(layout)
    found += [
        Move("send", source, target)
        for alike in shapes.values()
        for source in checked(alike, 16)
        for target in alike
        if source != target
    ]
    return tuple(found)


def _moves_from(layout: Layout, devices: int) -> Iterator[Move]:
    for name in DIMENSIONS:
        split = getattr(layout, name)
        yield from _gaining(layout, name, [run for run in _free_runs(layout, devices) if not run.parts], "slice")
        for kept, freed in _minor_parts(split):
            rest = layout._replace(**{name: kept})
            yield Move("gather", layout, rest, along=freed, given=name)
            for other in DIMENSIONS:
                for gained in _gaining(rest, other, [freed], "exchange") if other != name else ():
                    yield Move("exchange", layout, gained.target, along=freed, given=name, taken=other)
    for kept, freed in _any_parts(layout.partial):
        rest = layout._replace(partial=kept)
        yield Move("sum", layout, rest, along=freed)
        for name in DIMENSIONS:
            for gained in _gaining(rest, name, [freed], "scatter"):
                yield Move("scatter", layout, gained.target, along=freed, taken=name)


def _gaining(layout: Layout, name: str, runs: Sequence[MeshSplit], how: How) -> Iterator[Move]:
    """The dimension is split along each of these devices too, where that leaves it one split."""
    for run in runs:
        split = run.after(getattr(layout, name))
        if split is not None:
            yield Move(how, layout, layout._replace(**{name: split}), along=run, taken=name)


def _minor_parts(split: MeshSplit | None) -> list[tuple[MeshSplit | None, MeshSplit]]:
    """What can be given up so that the pieces stay in order: all of a split, or its minor part; and what is kept."""
    return [(None, split), *split.parts] if split else []


def _any_parts(split: MeshSplit | None) -> list[tuple[MeshSplit | None, MeshSplit]]:
    """All of a split, or either part of it; a sum has no order."""
    return [*_minor_parts(split), *((minor, major) for major, minor in split.parts)] if split else []


def _free_runs(layout: Layout, devices: int) -> list[MeshSplit]:
    used = layout.used()
    return [run for run in _runs(devices) if nested([*used, run], devices)]


@cache
def _runs(devices: int) -> tuple[MeshSplit, ...]:
    return tuple(layout.samples for layout in all_layouts(devices) if layout.samples and not any(layout[1:]))


class Resharding:
    """The cheapest moves between all layouts of tensors on the first ``devices`` devices of a cluster.

    Times are kept for tensors of the same size, so that layers that are alike cost nothing more.
    """

    def __init__(self, cluster: Cluster | None, devices: int) -> None:
        self.cluster, self.devices = cluster, devices
        self.layouts = all_layouts(devices)
        self.number = {layout: index for index, layout in enumerate(self.layouts)}
        self.moves = sorted(moves_between_all(devices), key=lambda move: self.number[move.target])
        self._sources = np.array([self.number[move.source] for move in checked(self.moves)], np.int64)
        self._targets = np.array([self.number[move.target] for move in checked(self.moves)], np.int64)
        self._examples, self._priced_as = self._alike()
        self._sends: dict[object, BusiestPair | None] = {}
        self._prices: dict[tuple[object, int], float] = {}
        self._weights: dict[Tensor, FloatArray] = {}
        self._distances: dict[tuple[Tensor, Layout], FloatArray] = {}

    def _alike(self) -> tuple[dict[object, Move], IntArray]:
        """A move for every price that a tensor can have, by its key; and of every move which of them is its, [M].

        Most of the moves of many devices send, a third of a million of 64: their keys are compared as numbers.
        """
        numbers: dict[MeshSplit | None, int] = {}
        codes = np.array([[numbers.setdefault(each, len(numbers)) for each in layout] for layout in self.layouts])
        shards = np.array([layout.shards for layout in self.layouts])
        sends = np.flatnonzero([move.how == "send" for move in checked(self.moves)])
        sources, targets = self._sources[sends], self._targets[sends]
        pairs = np.sort(codes[sources] * len(numbers) + codes[targets], axis=1)
        keys = np.column_stack((shards[sources], pairs))
        _, first, of_sends = np.unique(keys, axis=0, return_index=True, return_inverse=True)
        chosen = [self.moves[index] for index in sends[first].tolist()]
        examples: dict[object, Move] = {_price_key(move): move for move in chosen}
        assert len(examples) == len(first), "numbers differ where keys do"
        priced_as = np.zeros(len(self.moves), np.int64)
        priced_as[sends] = of_sends.ravel()
        places = {key: place for place, key in enumerate(examples)}
        for index, move in enumerate(self.moves):
            if move.how != "send":
                key = _price_key(move)
                priced_as[index] = places.setdefault(key, len(places))
                examples.setdefault(key, move)
        return examples, priced_as

    def times(self, tensor: Tensor, sources: Sequence[Layout], targets: Sequence[Layout]) -> FloatArray:
        """Time in ns from each of the sources to each of the targets, [S, T]; infinite where there is no way."""
        missing = [each for each in dict.fromkeys(sources) if (tensor, each) not in self._distances]
        if missing:
            for source, row in zip(missing, self._shortest(tensor, missing), strict=True):
                self._distances[tensor, source] = row
        columns = np.array([self.number[target] for target in targets], np.int64)
        rows = {source: self._distances[tensor, source][columns] for source in dict.fromkeys(sources)}
        return np.stack([rows[source] for source in sources])

    def path(self, tensor: Tensor, source: Layout, target: Layout) -> tuple[Move, ...]:
        """The moves of the cheapest way; of equal ones a way with fewest, as moves may be free.

        Raises:
            ValueError: there is none.
        """
        self.times(tensor, [source], [target])
        distance, weights = self._distances[tensor, source], self._weights_of(tensor)
        if not np.isfinite(distance[self.number[target]]):
            raise ValueError(f"no moves lead from {source} to {target} of {tensor}")
        cheapest = np.isfinite(weights) & (distance[self._sources] + weights == distance[self._targets])
        begin, end = self.number[source], self.number[target]
        onward: dict[int, int] = {end: -1}  # the move that leads from a layout on to the target
        waiting = deque([end])
        while begin not in onward:
            at = waiting.popleft()
            for move in np.flatnonzero(cheapest & (self._targets == at)).tolist():
                before = int(self._sources[move])
                if before not in onward:
                    onward[before] = move
                    waiting.append(before)
        found: list[Move] = []
        while begin != end:
            found.append(self.moves[onward[begin]])
            begin = int(self._targets[onward[begin]])
        return tuple(found)

    def move_ns(self, tensor: Tensor, move: Move) -> float:
        """Time of one move; infinite where the tensor's dimensions cannot be divided so."""
        if not (tensor.fits(move.source) and tensor.fits(move.target)):
            return float("inf")
        return self._priced(_price_key(move), move, tensor)

    def _priced(self, key: object, move: Move, tensor: Tensor) -> float:
        size = tensor.local_bytes(move.target if move.how == "gather" else move.source)
        if (key, size) not in self._prices:
            self._prices[key, size] = self._price(key, move, size)
        return self._prices[key, size]

    def _price(self, key: object, move: Move, size: int) -> float:
        if move.how == "slice":
            return 0.0
        if move.how == "send":
            busiest = self._busiest(key, move)
            return float(busiest.send_time(self.cluster, size)) if self.cluster is not None and busiest else 0.0
        assert move.along is not None
        exchange = Exchange(_COLLECTIVES[move.how], size)
        return time_of_groups(self.cluster, exchange, groups_along([move.along], self.devices))

    def _busiest(self, key: object, move: Move) -> BusiestPair | None:
        """The device that determines how long a send takes, whatever its size."""
        if key not in self._sends:
            self._sends[key] = busiest_pair(self.cluster, senders(move.source, move.target, self.devices))
        return self._sends[key]

    def _weights_of(self, tensor: Tensor) -> FloatArray:
        """Time of every move, [M]."""
        if tensor not in self._weights:
            fits = np.array([tensor.fits(layout) for layout in self.layouts])
            examples = checked(self._examples.items())
            prices = np.array([self._priced(key, move, tensor) for key, move in examples])
            possible = fits[self._sources] & fits[self._targets]
            self._weights[tensor] = np.where(possible, prices[self._priced_as] if self.moves else 0.0, np.inf)
        return self._weights[tensor]

    def _shortest(self, tensor: Tensor, sources: Sequence[Layout]) -> FloatArray:
        """Distances from each source to all layouts, [S, L]."""
        weights = self._weights_of(tensor)
        none = np.full(len(self.layouts), np.inf)
        return np.stack(
            [
                self._distances_from(self.number[source], weights) if tensor.fits(source) else none
                for source in checked(sources, 1)
            ]
        )

    def _distances_from(self, begin: int, weights: FloatArray) -> FloatArray:
        """The same from one, [L], by Bellman and Ford's relaxation, of all edges at once from what has come nearer."""
        distance, nearer = np.full(len(self.layouts), np.inf), np.zeros(len(self.layouts), bool)
        distance[begin], nearer[begin] = 0.0, True
        while len(moves := np.flatnonzero(nearer[self._sources])):
            targets = self._targets[moves]
            starts = np.flatnonzero(np.r_[True, targets[1:] != targets[:-1]])
            offered, reached = (
                np.minimum.reduceat(distance[self._sources[moves]] + weights[moves], starts),
                targets[starts],
            )
            better = offered < distance[reached]
            nearer[:] = False
            nearer[reached[better]] = True
            distance[reached[better]] = offered[better]
        return distance


_WHOLE = (0, 0)
"""A dimension that nothing splits, among splits that are to be sorted."""


def _price_key(move: Move) -> tuple[object, ...]:
    """Equal for moves that cost the same for the same tensor: whichever dimensions they are about."""
    if move.how == "send":
        pairs = sorted(
            (before or _WHOLE, after or _WHOLE) for before, after in zip(move.source, move.target, strict=True)
        )
        return ("send", move.source.shards, *pairs)
    return (move.how, move.along, (move.target if move.how == "gather" else move.source).shards)


def senders(source: Layout, target: Layout, devices: int) -> list[tuple[int, int]]:
    """Who sends its piece to whom, so that a tensor of one layout comes to lie as another with equal pieces.

    The devices that hold the same piece before are matched with those that shall hold it, each with itself first,
    then in order of their numbers.
    """
    before, after = _holders(source, devices), _holders(target, devices)
    pairs = []
    for piece, held in before.items():
        wanted = after[piece]
        stay = sorted(set(held) & set(wanted))
        pairs += [(device, device) for device in stay]
        gone, come = [each for each in held if each not in stay], [each for each in wanted if each not in stay]
        pairs += zip(gone, come, strict=True)
    return pairs


@lru_cache(maxsize=1 << 12)
def _holders(layout: Layout, devices: int) -> dict[tuple[int, ...], list[int]]:
    """The devices of every piece, a piece being its coordinates along the splits of the layout."""
    found: dict[tuple[int, ...], list[int]] = {}
    for device in range(devices):
        piece = tuple(split.coordinate(device) if split else 0 for split in layout)
        found.setdefault(piece, []).append(device)
    return found


def sum_ns(size: int, split: MeshSplit, resharding: Resharding) -> float:
    """Time to add up gradients of ``size`` bytes along a split: the cheapest way from a sum to a whole tensor."""
    if not size:
        return 0.0
    tensor = Tensor((ANY, ANY, ANY), size)
    return float(resharding.times(tensor, [Layout(partial=split)], [Layout()])[0, 0])
