"""Classic schedules of chains, one or several stages per device in turn: GPipe, 1F1B, interleaved, breadth-first."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from pipeplan.schedule.classic.base import Orders, Script, forwards, sorted_by
from pipeplan.schedule.problem import Problem
from pipeplan.simulate.timing import TaskGraph

__all__ = ["gpipe", "interleaved", "interleaved_zero_bubble", "looped_breadth_first", "one_forward_one_backward"]


def gpipe(problem: Problem, graph: TaskGraph) -> Orders:
    """All forwards, then all backwards (GPipe, NeurIPS'19, section 2.3); any placement."""
    first = forwards(problem)
    return sorted_by(problem, lambda x, m: (x not in first, x, m))


def one_forward_one_backward(script: Script, device: int, problem: Problem) -> None:
    """1F1B (PipeDream, SOSP'19, section 3.2; DAPPLE, PPoPP'21): D - d forwards on device d, then one of each.

    Where backward is split, W follows its I at once.
    """
    script.add("F0", problem.num_devices - device).add("B0 F0", problem.num_microbatches)


def interleaved(script: Script, device: int, problem: Problem) -> None:
    """Interleaved 1F1B (Megatron-LM, SC'21, section 2.2): chunks in turn, a group of D micro-batches each.

    Device d of D starts with (C - 1) groups and 2 (D - 1 - d) forwards more, then one forward and one backward.
    """
    steps = _Steps(script, problem)
    _one_each(script, steps, (script.num_chunks - 1) * steps.group + 2 * (problem.num_devices - 1 - device), "B")


def interleaved_zero_bubble(script: Script, device: int, problem: Problem) -> None:
    """Interleaved 1F1B with weight gradients apart (ZB-H1 of several chunks, as torch.distributed.pipelining has it).

    One forward fewer per device further from the end, and device d begins with weight gradients d backwards later.
    """
    steps = _Steps(script, problem)
    warmup = (script.num_chunks - 1) * steps.group + problem.num_devices - 1 - device
    _one_each(script, steps, warmup, "I", weights_after=device)


def looped_breadth_first(script: Script, device: int, problem: Problem) -> None:
    """Breadth-first pipeline parallelism (Lamy-Poirier, MLSys'23): chunk after chunk, all micro-batches of each."""
    for chunk in range(script.num_chunks):
        script.add(f"F{chunk}", problem.num_microbatches)
    for chunk in reversed(range(script.num_chunks)):
        script.add(f"B{chunk}", problem.num_microbatches)


class _Steps:
    """The chunks of forwards (backwards the other way round): group after group, in each one chunk after another.

    N micro-batches make max(1, N // D) groups, as even as they can be, the larger ones first.
    """

    def __init__(self, script: Script, problem: Problem) -> None:
        count = problem.num_microbatches
        groups = max(1, count // problem.num_devices)
        self._sizes = [count // groups + (index < count % groups) for index in range(groups)]
        self._chunks = script.num_chunks

    @property
    def group(self) -> int:
        """Micro-batches in the first group."""
        return self._sizes[0]

    def chunks(self, *, backward: bool = False) -> Iterator[int]:
        """The chunk of each step."""
        for size in self._sizes:
            for chunk in reversed(range(self._chunks)) if backward else range(self._chunks):
                yield from [chunk] * size


def _one_each(script: Script, steps: _Steps, warmup: int, back: str, *, weights_after: int | None = None) -> None:
    """``warmup`` forwards, then a forward and a backward in turn; weight gradients from some backward on."""
    onward = steps.chunks()
    for chunk in islice(onward, warmup):
        script.add(f"F{chunk}")
    for number, chunk in enumerate(steps.chunks(backward=True)):
        for ahead in islice(onward, 1):
            script.add(f"F{ahead}")
        script.add(f"{back}{chunk}")
        if weights_after is not None and number >= weights_after:
            script.add("W")
