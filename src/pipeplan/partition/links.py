"""What messages between stages take, and sums over given devices: for planners that count them while they choose.

Stages of a line are cut at places between blocks; what passes a *cut* are the tensors that a block before it makes and
one after it takes, and back the gradients of these. A tensor with a fixed time of its own takes that and no link.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np

from pipeplan.costs.communication import transfer_time
from pipeplan.costs.messages import distinct, edge_bytes
from pipeplan.files import Cluster, Edge
from pipeplan.partition.chain.costs import Array
from pipeplan.time_limit import checked

Passing = tuple[Array, Array]
"""[cut] bytes that pass it on their way forward, or back, and the ns that tensors with a time of their own take."""


@dataclass(frozen=True, slots=True)
class CountedLinks:
    """The links of a ``cluster``, and the ``edges`` of the model that run over them.

    ``after`` is the ns of what follows the actions of a stage: (bytes of its gradients, one device of each replica).
    None as cluster: links that carry all at once.
    """

    cluster: Cluster | None
    edges: tuple[Edge, ...]
    after: Callable[[int, tuple[int, ...]], int]

    def levels(self, num_devices: int) -> list[int]:
        """Devices in a group of each level of links, innermost first, as far as there are so many of them.

        The last one has all whole groups of the level below.
        """
        sizes = [level.group_size for level in self.cluster.levels] if self.cluster else []
        inner = [size for size in sizes if 1 < size < num_devices]
        return [*inner, num_devices // inner[-1] * inner[-1] if inner else num_devices]

    def passing(self, order: Sequence[str], samples: int) -> tuple[Passing, Passing]:
        """What passes each cut of blocks in this order, forward and back, for so many samples."""
        place = {block: index for index, block in enumerate(order)}
        forth, back = (np.zeros((2, len(order) + 1), dtype=np.int64) for _ in range(2))
        begun: list[list[tuple[int, Edge]]] = [[] for _ in order]
        for number, edge in enumerate(self.edges):
            begun[place[edge.source]].append((number, edge))
        across: list[tuple[int, Edge]] = []
        for cut in checked(range(1, len(order)), 256):
            still = (each for each in across if cut <= place[each[1].target])
            across = sorted([*still, *begun[cut - 1]], key=itemgetter(0))
            over = distinct(edge for _, edge in across)
            for found, edges in ((forth, over), (back, [edge for edge in over if edge.gradient])):
                found[0, cut] = sum(edge_bytes(edge, samples) for edge in edges if edge.transfer_ns is None)
                found[1, cut] = max((edge.transfer_ns or 0 for edge in edges), default=0)
        return (forth[0], forth[1]), (back[0], back[1])

    def between(self, source: int, target: int, sizes: Array) -> Array:
        """[cut] ns to send so many bytes from one device to another; nothing where there are none."""
        return _by_size(sizes, lambda size: sum(transfer_time(self.cluster, source, target, size)))

    def split(self, sources: Sequence[int], targets: Sequence[int], passing: Passing) -> Array:
        """[cut] ns until what devices have each an equal part of is on others, in equal parts again.

        A device sends, and receives, one part after another.
        """
        shares = _shares(len(sources), len(targets))

        def time(size: int) -> int:
            ports: defaultdict[tuple[bool, int], int] = defaultdict(int)
            longest = 0
            for sender, receiver, share in shares:
                ends = sources[sender], targets[receiver]
                latency, occupancy = transfer_time(self.cluster, *ends, -(-size * share[0] // share[1]))
                longest = max(longest, latency)
                ports[True, sender] += occupancy
                ports[False, receiver] += occupancy
            return longest + max(ports.values())

        return np.maximum(_by_size(passing[0], time), passing[1])

    def bandwidth(self, num_devices: int) -> int | None:
        """Bytes per second between devices that are far from each other; None where links carry all at once."""
        level = self.cluster.level_between(0, num_devices - 1) if self.cluster and num_devices > 1 else None
        return level.bandwidth_bytes_per_s if level else None


def _by_size(sizes: Array, time: Callable[[int], int]) -> Array:
    distinct_sizes, places = np.unique(sizes, return_inverse=True)
    return np.array([time(size) if size else 0 for size in distinct_sizes.tolist()], dtype=np.int64)[places]


def _shares(sources: int, targets: int) -> list[tuple[int, int, tuple[int, int]]]:
    """(sender, receiver, part of the whole as a fraction) where the samples of one are among those of the other."""
    whole = sources * targets
    return [
        (sender, receiver, (both, whole))
        for sender in range(sources)
        for receiver in range(targets)
        if (both := min((sender + 1) * targets, (receiver + 1) * sources) - max(sender * targets, receiver * sources))
        > 0
    ]
