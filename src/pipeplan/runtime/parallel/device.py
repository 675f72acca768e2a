"""A rank's device: which it is, when its actions ran, and in which number format it computes."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeplan.errors import UsageError
from pipeplan.runtime.parallel.agreement import of_first

Mark = int | torch.cuda.Event
"""A moment: nanoseconds of the host's clock, or an event that has still to be resolved."""

Span = tuple[int, Mark, Mark]
"""Program counter, start and end of an action. A SEND's is its posting; a RECV's is how long it was waited for."""

_ROUNDS = 9


@dataclass(frozen=True, slots=True)
class Clock:
    """Takes marks and turns them into ns of ``time.monotonic_ns`` less ``offset_ns``, one clock for all ranks."""

    device: torch.device
    offset_ns: int = 0

    def mark(self) -> Mark:
        """Now, on the stream that computes."""
        if self.device.type != "cuda":
            return time.monotonic_ns()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has it without types
        event.record(torch.cuda.current_stream(self.device))
        return event

    def anchor(self) -> tuple[Mark, int]:
        """A mark and its time by the host's clock, for :meth:`resolve`."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.mark(), time.monotonic_ns()

    def resolve(self, mark: Mark, anchor: tuple[Mark, int]) -> int:
        """The moment of a mark in ns; on CUDA the stream must have passed it."""
        if isinstance(mark, int):
            return mark - self.offset_ns
        first, at_ns = anchor
        assert isinstance(first, torch.cuda.Event)
        passed_ms: float = first.elapsed_time(mark)
        return at_ns + round(passed_ms * 1e6) - self.offset_ns


def gathered(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """What all ranks pass to this call, by rank; ``group`` is one of all ranks, the default one without it."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value, group=group)
    return found


def offset_ns() -> int:
    """How far this rank's clock is ahead of rank 0's, by when barriers end; 0 on one machine. Collective."""
    stamps = []
    for _ in range(_ROUNDS):
        dist.barrier()
        stamps.append(time.monotonic_ns())
    machine, firsts = of_first((_machine(), stamps))
    if machine == _machine():
        return 0
    return round(statistics.median(own - first for own, first in zip(stamps, firsts, strict=True)))


def _machine() -> str:
    """Names the machine since its start: within it, all processes share the monotonic clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:
        return platform.node()


def rank_device(device: str, transport: str, num_threads: int = 0) -> torch.device:
    """The rank's device, ``cpu`` or ``cuda``; on CUDA the ranks of a machine take its devices in turn.

    ``num_threads`` are for operators on the CPU, 0 to leave it as it is. Raises UsageError where device and transport
    (``gloo`` or ``nccl``) do not go together, or there are too few devices here.
    """
    if num_threads:
        torch.set_num_threads(num_threads)
    if device == "cpu":
        if transport == "nccl":
            raise UsageError("--backend nccl carries CUDA tensors; give --device cuda, or --backend gloo")
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds no CUDA device here; give --device cpu")
    count, rank = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", dist.get_rank()))
    found = torch.device("cuda", rank % count)  # a launcher may let a rank see its own alone
    torch.cuda.set_device(found)
    return found


def identity_of_device(device: torch.device) -> str | None:
    """What no other device is called, on whatever machine; None on the CPU, which ranks share."""
    return None if device.type == "cpu" else f"{_machine()} {torch.cuda.get_device_properties(device).uuid}"


def require_own_devices(found: Sequence[str | None], transport: str) -> None:
    """Refuse ranks that share a device where that cannot be; ``found`` [rank] are their identities.

    Raises:
        UsageError: NCCL is to carry tensors between ranks of one device.
    """
    first: dict[str, int] = {}
    for rank, device in enumerate(found):
        if device is not None and transport == "nccl" and first.setdefault(device, rank) != rank:
            raise UsageError(
                f"NCCL needs a CUDA device per rank, and ranks {first[device]} and {rank} have the same one; start "
                "fewer ranks on their machine, or give --backend gloo to share devices"
            )


@dataclass(frozen=True, slots=True)
class Autocast:
    """``torch.autocast`` for blocks on a kind of device; calling it gives a context to run one in."""

    device: str
    dtype: torch.dtype

    def __call__(self) -> torch.autocast:
        """A context in which a block runs.

        Weights cast while gradients are off, as where weight gradients wait, must not be kept for when they are on.
        """
        return torch.autocast(self.device, dtype=self.dtype, cache_enabled=False)


def precise(tensor: Tensor) -> Tensor:
    """The tensor in float32 at least, in which losses and norms are added up."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
