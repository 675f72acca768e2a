"""What ranks exchange besides messages: those that run an action together, and all ranks of a run.

There is one process group for each set of ranks that split blocks, or run a custom op, together. An action of several
devices stands in all their programs, in an order that cannot deadlock, so their exchanges meet. All ranks share one
clock, and their mini-batches begin together.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeplan.errors import UsageError
from pipeplan.runtime.executor.channels import Ranks, groups_of, transfer_errors
from pipeplan.runtime.launch.status import Phase, Progress, lost_others
from pipeplan.runtime.models.spec import placed
from pipeplan.runtime.parallel import Share
from pipeplan.runtime.parallel.agreement import all_alike
from pipeplan.runtime.parallel.device import Clock, Mark, Span, gathered, offset_ns
from pipeplan.runtime.parallel.sharding import WHOLE, Shards


class ProcessGroups:
    """What one rank exchanges with ranks that have other shares of its blocks or run its actions with it.

    ``lines`` are sets of ranks, the same on every rank, or ``alone`` those with this one. Modules can be made before
    :meth:`connect`, but not run.
    """

    def __init__(self, lines: Iterable[Ranks], progress: Progress, *, alone: bool = False) -> None:
        self._lines, self._rank, self._alone = frozenset(lines), progress.rank, alone
        self._made = {line: RankGroup(line, progress) for line in self._lines if self._rank in line}

    def shards(self, share: Share) -> Shards:
        """The place of this rank among those that split a block."""
        return placed(share, self.along)

    def along(self, line: Ranks) -> Shards:
        """The position of this rank among consecutive ranks."""
        return Shards(len(line), line.index(self._rank), self._made[line]) if len(line) > 1 else WHOLE

    def of(self, ranks: Ranks) -> RankGroup:
        """The ranks of an action; of a single rank nothing leaves it."""
        return self._made[ranks]

    @property
    def routed(self) -> Counter[int]:
        """{bytes of a row: rows that this rank has given others, of as many as each of them wanted}."""
        return sum((made.routed for made in self._made.values()), Counter[int]())

    def connect(self, transport: str, timeout: timedelta) -> None:
        """Make the groups; all ranks of the run do so together. Raises RuntimeError as the transport does."""
        sets = {tuple(sorted(line)) for line in self._lines if len(line) > 1}
        groups = groups_of(sets, transport, timeout, self._rank if self._alone else None)
        for ranks, made in self._made.items():
            made.group = groups.get(tuple(sorted(ranks)))

    def close(self) -> None:
        """Drop the groups, which must not outlive the process group."""
        for made in self._made.values():
            made.group = None


_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Of one tensor, by torch 2.13's names, for which older ones warn, or by those of torch before."""


@dataclass(frozen=True, slots=True)
class Pending:
    """A collective under way: what is sent must live as long."""

    work: dist.Work
    sent: Tensor
    found: Tensor


class RankGroup:
    """The collectives of ranks that run an action together: a rank's end of them.

    ``ranks`` are in the order of their shares. Each exchange is noted as waiting for the next one of them, so that who
    does not come is found by going round. The ``group`` is made later for blocks that are built before.
    ``routed`` {bytes of a row: rows that this rank has handed over for others in :meth:`route`}.
    """

    def __init__(self, ranks: Ranks, progress: Progress, group: dist.ProcessGroup | None = None) -> None:
        self._ranks, self._rank, self._progress, self.group = ranks, progress.rank, progress, group
        self._next = ranks[(ranks.index(self._rank) + 1) % len(ranks)]
        numbers = {rank: number for number, rank in enumerate(sorted(ranks))}
        self._order = list(map(numbers.__getitem__, ranks))  # a group numbers its ranks in ascending order
        self.routed = Counter[int]()

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks, as a tensor of its own."""
        result = tensor.detach().clone(memory_format=torch.contiguous_format)
        with self._waiting():
            dist.all_reduce(result, group=self.group)
        return result

    def latest(self, ns: int) -> int:
        """The latest of the times that the ranks give."""
        if len(self._ranks) == 1:
            return ns
        found = torch.tensor([ns])
        with self._waiting():
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return int(found)

    def begin_gather(self, tensor: Tensor) -> Callable[[], list[Tensor]]:
        """What waits for the tensors of all ranks, and gives them in the order of their shares."""
        own = tensor.detach().contiguous()
        found = [torch.empty_like(own) for _ in self._ranks]
        with transfer_errors(-1):
            work: Any = dist.all_gather(found, own, group=self.group, async_op=True)

        def came() -> list[Tensor]:
            with self._waiting():
                work.wait()
            return [found[place] for place in self._order]

        return came

    def scatter(self, pieces: Sequence[Tensor]) -> Tensor:
        """The sum over the ranks of their pieces for this one, which is all that each is sent."""
        return torch.stack(self.exchange(pieces)).sum(0)

    def exchange(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """Give each rank its piece, and get theirs, in the order of their shares."""
        numbered = sorted(range(len(pieces)), key=self._order.__getitem__)  # the group's order of ranks
        own = self._carried(torch.stack([pieces[place].detach() for place in numbered]))
        found = torch.empty_like(own)
        with self._waiting():
            dist.all_to_all_single(found, own, group=self.group)
        came = found.to(pieces[0].device)
        return [came[place] for place in self._order]

    def route(self, rows: Tensor, give: Sequence[int], get: Sequence[int]) -> Tensor:
        """Give each rank so many of the rows, one rank's after another's, and get so many of each, in their order."""
        numbered = sorted(range(len(give)), key=self._order.__getitem__)  # the group's order of ranks
        given, got = ([counts[place] for place in numbered] for counts in (give, get))
        pieces = torch.split(rows.detach(), list(give))
        own = self._carried(torch.cat([pieces[place] for place in numbered]))
        found = own.new_empty(sum(get), *own.shape[1:])
        width = math.prod(own.shape[1:]) * own.itemsize
        self.routed[width] += sum(give) - give[self._ranks.index(self._rank)]
        with self._waiting():
            dist.all_to_all_single(found, own, got, given, group=self.group)
        came = torch.split(found.to(rows.device), got)
        return torch.cat([came[place] for place in self._order])

    def begin_passing(self, tensors: Sequence[Tensor], by: int) -> Callable[[], list[Tensor]]:
        """Post sends to the rank so many places on, and receives of the one as far back, in the order of shares.

        Both are posted together, so that no rank waits for another to begin. What waits for them gives what came.
        """
        place, count = self._ranks.index(self._rank), len(self._ranks)
        target, source = (self._ranks[(place + each) % count] for each in (by, -by))
        sent = [self._carried(each) for each in tensors]
        found = [torch.empty_like(each) for each in sent]
        operations = [dist.P2POp(dist.isend, each, target, self.group) for each in sent]
        operations += [dist.P2POp(dist.irecv, each, source, self.group) for each in found]
        with transfer_errors(source):
            works = dist.batch_isend_irecv(operations)

        def came() -> list[Tensor]:
            with self._waiting(source):
                for work in works:
                    work.wait()
            del sent[:]  # which had to live as long
            return [own.to(each.device) for own, each in zip(found, tensors, strict=True)]

        return came

    def start_scatter(self, parts: Tensor) -> Pending:
        """Begin to sum ``parts`` [rank, size], of which each rank, in ascending order, gets its own."""
        carried = self._carried(parts)
        found = torch.empty_like(carried[0])
        with transfer_errors(-1):
            return Pending(_reduce_scatter(found, carried.view(-1), group=self.group, async_op=True), carried, found)

    def start_gather(self, own: Tensor) -> Pending:
        """Begin to gather a flat tensor of each rank, one after another in ascending order."""
        carried = self._carried(own)
        found = carried.new_empty(len(self._ranks) * carried.numel())
        with transfer_errors(-1):
            return Pending(_all_gather(found, carried, group=self.group, async_op=True), carried, found)

    def finish(self, pending: Pending, device: torch.device) -> Tensor:
        """Wait for what was begun."""
        with self._waiting():
            pending.work.wait()
        return pending.found.to(device)

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """The tensor of rank ``source``, on every rank; the others give one of its shape."""
        if len(self._ranks) == 1:
            return tensor
        carried = self._carried(tensor)
        with self._waiting():
            dist.broadcast(carried, source, group=self.group)
        return carried.to(tensor.device)

    def send(self, tensor: Tensor, source: int, target: int) -> Tensor:
        """The tensor of rank ``source``, on rank ``target``, which gives one of its shape; only these two call it."""
        if source == target:
            return tensor
        carried, is_source = self._carried(tensor), self._rank == source
        with self._waiting(target if is_source else source):
            if is_source:
                dist.send(carried, target, group=self.group)
            else:
                dist.recv(carried, source, group=self.group)
        return carried.to(tensor.device)

    def _carried(self, tensor: Tensor) -> Tensor:
        """The tensor where its transport can take it: gloo sends nothing that is on a GPU."""
        own = tensor.detach().contiguous()
        return own.cpu() if dist.get_backend(self.group) == "gloo" else own

    @contextlib.contextmanager
    def _waiting(self, peer: int | None = None) -> Iterator[None]:
        """Note it, and turn what the transport raises into :class:`TransferError`."""
        assert self.group is not None, "groups are made before the first step"
        before = self._progress.board.read(self._rank)
        self._progress.begin(Phase.WAITING, before.counter, self._next if peer is None else peer)
        with transfer_errors(-1):
            yield
        self._progress.begin(before.phase, before.counter)


TimedAction = tuple[int, int, int]
"""Program counter, start and end in ns from the step's beginning."""


class AllRanks:
    """One rank's connection with all others, beside the messages of its program; ``device``'s clock takes the times.

    Construction is collective, and so are ``gather``, ``sum`` and ``begin``; all raise RankError where another rank is
    gone, or does not come in time.
    """

    def __init__(self, device: torch.device, progress: Progress, timeout: timedelta) -> None:
        self._progress = progress
        with lost_others(progress):
            self._group = dist.new_group(timeout=timeout, backend="gloo")
            self.clock = Clock(device, offset_ns())

    def gather(self, value: Any) -> list[Any]:
        """What all ranks pass to this call, by rank."""
        with lost_others(self._progress):
            return gathered(value, self._group)

    def sum(self, number: float) -> float:
        """The sum of what all ranks pass to this call, the same on each."""
        total = torch.tensor([number], dtype=torch.float64)
        with lost_others(self._progress):
            dist.all_reduce(total, group=self._group)
        return float(total.item())

    def begin(self) -> None:
        """Wait until all ranks are ready; times are counted from when the last one was."""
        self._progress.begin(Phase.REPORTING)
        self._anchor = self.clock.anchor()
        begin = torch.tensor([self._anchor[1] - self.clock.offset_ns])
        with lost_others(self._progress):
            dist.all_reduce(begin, dist.ReduceOp.MAX, group=self._group)
        self._begin_ns = int(begin.item())

    def resolve(self, spans: Iterable[Span]) -> list[TimedAction]:
        """When actions ran, in order of time."""
        if self.clock.device.type == "cuda":
            torch.cuda.synchronize(self.clock.device)
        timed = [(counter, self.at(start), self.at(end)) for counter, start, end in spans]
        return sorted(timed, key=lambda action: action[1:])

    def passed_ns(self) -> int:
        """Time until now, when everything given to the device has ended."""
        return self.clock.anchor()[1] - self.clock.offset_ns - self._begin_ns

    def at(self, mark: Mark) -> int:
        """When a mark was passed, once everything before it has ended (after :meth:`resolve`)."""
        return self.clock.resolve(mark, self._anchor) - self._begin_ns

    def close(self) -> None:
        """Drop the group, which must not outlive the process group."""
        self._group = None


def extent(actions: Sequence[TimedAction], until_ns: int = 0) -> tuple[int, int] | None:
    """First start, and last end, or ``until_ns`` where that is later; None of nothing."""
    if not actions:
        return None
    return min(start for _, start, _ in actions), max(until_ns, *(end for *_, end in actions))


def iteration_of(extents: Iterable[tuple[int, int] | None]) -> int:
    """Ns from the first start to the last end, of the :func:`extent` of each rank's work."""
    found = [each for each in extents if each is not None]
    return max(last for _, last in found) - min(first for first, _ in found)


def require_alike(own: Mapping[str, Any]) -> None:
    """Refuse ranks that were started with other things than their ``own``; collective, over the default group.

    Raises UsageError, the same on every rank.
    """
    if all_alike([repr(own)]):
        return
    started = gathered(own)
    for other, said in enumerate(started):
        for key, value in started[0].items():
            if said[key] != value:
                raise UsageError(
                    f"rank {other} was started with {key} {said[key]!r}, rank 0 with {value!r}; start all ranks alike"
                )
