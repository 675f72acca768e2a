"""Tensors between ranks: non-blocking, addressed by message and micro-batch or part, never waited for too early.

On gloo all messages share one group and have a tag each. NCCL ignores tags and matches first in, first out, so
there every directed edge has a group of two ranks of its own; sends run on a side stream that waits only for
what made the tensor, receives on one that waits for nothing. Programs come from the plan in an order that cannot
deadlock even if every send blocked.

What is received starts an autograd graph, may leave its stage as a view of itself, or be kept by a model's code. So no
plan can say when its memory is free, but torch can: it lets go of what backs a tensor with the last tensor on it.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from pipeplan.runtime.executor.message_graph import TensorKey
from pipeplan.runtime.executor.rank_program import Program, ProgramStep
from pipeplan.runtime.executor.tensors import TensorSpec, spec_of
from pipeplan.runtime.launch.status import Cause, transport_errors

Ranks = tuple[int, ...]


class Buffers:
    """Lends memory to tensors and gets it back when the last tensor on it, view or not, is gone.

    Fresh memory costs page faults: from 32 MiB on receiving into it takes several times as long.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[bytearray]] = defaultdict(list)
        self.num_made = 0

    def lend(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor of this shape with anything in it."""
        count = math.prod(shape)
        size = max(count, 1) * dtype.itemsize
        free = self._free[size]
        memory = free.pop() if free else self._make(size)
        lease = memoryview(memory)  # torch holds on to this, and to nothing else of ours
        weakref.finalize(lease, free.append, memory).atexit = False
        return torch.frombuffer(lease, dtype=dtype)[:count].view(shape)

    def _make(self, size: int) -> bytearray:
        self.num_made += 1
        return bytearray(size)


_MAX_UNFINISHED_SENDS = 8
"""Per edge; gloo cannot say whether a send has ended, so the oldest is waited for when there are more."""


class TransferError(RuntimeError):
    """A transfer failed: ``cause`` is TIMEOUT or LOST, ``peer`` the rank at the other end.

    Of ranks that run an action together the transport does not say which is gone or late: -1.
    """

    def __init__(self, cause: Cause, peer: int, message: str) -> None:
        self.cause = cause
        self.peer = peer
        super().__init__(message)

    @property
    def who(self) -> str:
        """The other end."""
        return f"rank {self.peer}" if self.peer >= 0 else "a rank that shares the action"


def transfer_errors(peer: int) -> contextlib.AbstractContextManager[None]:
    """Turn what the transport raises into :class:`TransferError`."""
    return transport_errors(lambda cause, text: TransferError(cause, peer, text))


@dataclass(slots=True)
class _InFlight:
    """A message under way: its works, and the tensors that must live as long or that are filled."""

    works: list[dist.Work]
    tensors: list[Tensor]


class Channels:
    """One rank's ends of all messages, which are outputs as in ``specs``, or their gradients.

    With gloo (``transport``) tensors of a CUDA device pass through host memory.
    """

    def __init__(
        self,
        program: Program,
        specs: Mapping[str, TensorSpec],
        device: torch.device,
        transport: str,
        timeout: timedelta,
    ) -> None:
        self._program = program
        self._specs = specs
        self._device = device
        self._timeout = timeout
        self._nccl = transport == "nccl"
        self._staged = device.type == "cuda" and not self._nccl
        alone = program.rank if program.is_alone else None
        self._groups = groups_of(program.edges, transport, timeout, alone) if self._nccl else {}
        self._sent: dict[int, deque[_InFlight]] = {}
        self._awaited: dict[int, _InFlight] = {}
        self.buffers = Buffers()
        self._index = {message: index for index, message in enumerate(sorted(program.tensors))}
        self._width = max((len(names) for names in program.tensors.values()), default=1)
        self._outbound = _stream(device) if self._nccl else None
        self._inbound = _stream(device) if self._nccl else None
        self._warm_up()

    def send(self, step: ProgramStep, tensors: Sequence[Tensor], made: torch.cuda.Event | None) -> None:
        """Start sending; ``made`` is when the contiguous tensors are ready, on NCCL. Raises TransferError."""
        peer = step.peer
        queue = self._sent.setdefault(peer, deque())
        self._reap(queue, peer)
        ready = [tensor.cpu() if self._staged else tensor for tensor in tensors]
        if self._outbound is not None and made is not None:
            self._outbound.wait_event(made)
        with _on(self._outbound):
            queue.append(self._begun(step, ready))

    def receive(self, step: ProgramStep) -> None:
        """Post the receives of a message; :meth:`take` waits for them. Raises TransferError."""
        assert step.message is not None
        with _on(self._inbound):
            keys, count = self._program.keys(step.message), len(step.samples[0])
            self._awaited[step.counter] = self._begun(step, [self._buffer(key, count) for key in keys])

    def take(self, step: ProgramStep) -> list[Tensor]:
        """The tensors of a posted message, waited for. Raises TransferError."""
        awaited = self._awaited.pop(step.counter)
        self._finish(awaited, step.peer)
        return [self._incoming(buffer) for buffer in awaited.tensors]

    def moment(self) -> torch.cuda.Event | None:
        """On NCCL, the end of what the computing stream has been given so far, for :meth:`send`."""
        if not self._nccl:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has it without types
        event.record(torch.cuda.current_stream(self._device))
        return event

    def deliver(self, step: ProgramStep) -> None:
        """Wait until the peer has posted its RECV and has the message that was just sent. Raises TransferError."""
        self.finish(step.peer)

    def unfinished(self) -> list[int]:
        """Peers with sends that may not have ended."""
        assert not self._awaited, "every message of a program has a consumer in it"
        return [peer for peer, queue in self._sent.items() if queue]

    def finish(self, peer: int) -> None:
        """Wait until all sends to a peer have ended. Raises TransferError."""
        queue = self._sent[peer]
        while queue:
            self._finish(queue.popleft(), peer)

    def close(self) -> None:
        """Drop works and groups, which must not outlive the process group."""
        self._sent.clear()
        self._awaited.clear()
        self._groups.clear()

    def _reap(self, queue: deque[_InFlight], peer: int) -> None:
        """Let go of sends that have ended, so that their tensors are freed."""
        if self._nccl:
            while queue and all(work.is_completed() for work in queue[0].works):
                queue.popleft()
        while not self._nccl and len(queue) >= _MAX_UNFINISHED_SENDS:
            self._finish(queue.popleft(), peer)

    def _finish(self, transfer: _InFlight, peer: int) -> None:
        for work in transfer.works:
            self._wait(work, peer)

    def _wait(self, work: dist.Work, peer: int) -> None:
        with transfer_errors(peer):
            # NCCL would block the host when given a time; its own watchdog has the group's
            work.wait() if self._nccl else work.wait(self._timeout)

    def _tags(self, step: ProgramStep) -> range:
        """One tag per tensor, unlike all others of a step; steps are kept apart by their end."""
        action, message = step.action, step.message
        assert message is not None
        number = 2 * action.microbatch + (action.part or 0)  # of fewer than two per sample
        first = 1 + (self._index[message] * 2 * self._program.mini_batch + number) * self._width
        return range(first, first + self._width)

    def _buffer(self, key: TensorKey, num_samples: int) -> Tensor:
        """On NCCL torch's allocator reuses the memory of GPUs; ours does on hosts."""
        spec = spec_of(self._specs, key)
        if self._nccl:
            return torch.empty(spec.of(num_samples), dtype=spec.dtype, device=self._device)
        return self.buffers.lend(spec.of(num_samples), spec.dtype)

    def _incoming(self, buffer: Tensor) -> Tensor:
        if self._staged:
            return buffer.to(self._device)
        if self._nccl:  # made on another stream than the one that uses it
            buffer.record_stream(torch.cuda.current_stream(self._device))
        return buffer

    def _begun(self, step: ProgramStep, tensors: list[Tensor]) -> _InFlight:
        pairs = zip(tensors, self._tags(step), strict=False)
        return _InFlight([self._start(step.action.sends, step.peer, *pair) for pair in pairs], tensors)

    def _start(self, sends: bool, peer: int, tensor: Tensor, tag: int) -> dist.Work:
        rank = self._program.rank
        start, ends = (dist.isend, (rank, peer)) if sends else (dist.irecv, (peer, rank))
        with transfer_errors(peer):
            work = start(tensor, peer, self._groups.get(ends), tag)
        assert work is not None, "this rank is a member of the group"
        return work

    def _warm_up(self) -> None:
        """One small message over every edge, one by one, to establish connections before the first step is timed."""
        token = torch.zeros(1, device=self._device if self._nccl else "cpu")
        for source, target in self._program.edges:
            if self._program.rank in (source, target):
                sends = self._program.rank == source
                peer = target if sends else source
                self._wait(self._start(sends, peer, token, 0), peer)


def groups_of(
    sets: Iterable[Ranks], transport: str, timeout: timedelta, alone: int | None = None
) -> dict[Ranks, dist.ProcessGroup]:
    """A group for each set of ranks that this rank is in; all ranks make all, in one order. Raises RuntimeError.

    A rank that is ``alone`` knows of no others than its own, which their ranks make together without the others.
    """
    own = sorted(ranks for ranks in set(sets) if alone is None or alone in ranks)
    how: dict[str, Any] = {"timeout": timeout, "backend": transport, "use_local_synchronization": alone is not None}
    with _named_by_ranks() if alone is not None else contextlib.nullcontext():
        made = {ranks: dist.new_group(list(ranks), **how) for ranks in own}
    return {ranks: group for ranks, group in made.items() if isinstance(group, dist.ProcessGroup)}


_MADE = Counter[Ranks]()


@contextlib.contextmanager
def _named_by_ranks() -> Iterator[None]:
    """Groups that only their own ranks make have names by these ranks, and by how many they have made before.

    torch names them by all groups that a rank has made, of which others of its ranks may have made more or fewer; they
    then wait for each other under two names.
    """
    named = distributed_c10d._hash_ranks_to_str

    def name(ranks: list[int]) -> str:
        _MADE[tuple(ranks)] += 1
        return f"pipeplan {ranks} {_MADE[tuple(ranks)]}"

    distributed_c10d._hash_ranks_to_str = name
    try:
        yield
    finally:
        distributed_c10d._hash_ranks_to_str = named


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has it without types


def _on(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[object]:
    """Work on a side stream, if there is one."""
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)
