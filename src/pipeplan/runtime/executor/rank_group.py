"""All ranks of a run: one clock, mini-batches that begin together, and values that the ranks exchange."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pipeplan.errors import UsageError
from pipeplan.runtime.executor.interpreter import Span
from pipeplan.runtime.launch.failures import lost_others
from pipeplan.runtime.launch.status_board import Phase, Progress
from pipeplan.runtime.parallel.device import Clock, Mark, offset_ns

__all__ = ["AllRanks", "TimedAction", "extent", "iteration_of", "require_alike"]

TimedAction = tuple[int, int, int]
"""Program counter, start and end in ns from the step's beginning."""


class AllRanks:
    """One rank's connection with all others, beside the messages of its program.

    Construction is collective, and so are ``gather``, ``sum`` and ``begin``.

    Args:
        device: what computes; its clock takes the times.
        progress: this rank's record.
        timeout: longest wait for the others.

    Raises:
        RankError: another rank is gone, or did not come in time.
    """

    def __init__(self, device: torch.device, progress: Progress, timeout: timedelta) -> None:
        self._progress = progress
        with lost_others(progress):
            self._group = dist.new_group(timeout=timeout, backend="gloo")
            self.clock = Clock(device, offset_ns(progress.rank, dist.get_world_size()))

    def gather(self, value: Any) -> list[Any]:
        """What all ranks pass to this call, by rank."""
        found: list[Any] = [None] * dist.get_world_size()
        with lost_others(self._progress):
            dist.all_gather_object(found, value, group=self._group)
        return found

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


def require_alike(started: Sequence[Mapping[str, Any]]) -> None:
    """Refuse ranks that were started with different things; ``started`` [rank] is with what each was.

    Raises:
        UsageError: two differ; the same error on every rank.
    """
    for other, said in enumerate(started):
        for key, value in started[0].items():
            if said[key] != value:
                raise UsageError(
                    f"rank {other} was started with {key} {said[key]!r}, rank 0 with {value!r}; start all ranks alike"
                )
