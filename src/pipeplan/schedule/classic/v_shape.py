"""Classic schedules of v-shapes: two stages per device, the chain going down and up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

from pipeplan.schedule.classic.base import Orders, Script, makespan, sorted_by
from pipeplan.workload.memory import peak_memory
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.task_graph import TaskGraph, task_graph

__all__ = ["dualpipe_v", "enough_for_dualpipe", "repeated_block", "zero_bubble_v"]


def zero_bubble_v(script: Script, device: int, problem: OneMicrobatch) -> None:
    """ZB-V (Zero Bubble Pipeline Parallelism, ICLR'24, section 6): memory as 1F1B's, no bubble if F = I = W."""
    down, up = problem.num_devices - device, device
    script.add("F0", 2 * down - 1).add("F1 F0", up).add("F1 I1 W1", down)
    script.add("F0 I0 W0 F1 I1 W1", max(problem.num_microbatches, 2 * problem.num_devices - 1) - problem.num_devices)
    script.add("I0 I1", up).add("I0 W0", down).add("W1", problem.num_microbatches)


def enough_for_dualpipe(problem: OneMicrobatch) -> str | None:
    """DualPipeV fills the pipeline both ways before its steady state."""
    if problem.num_microbatches >= 2 * problem.num_devices:
        return None
    return f"it needs at least {2 * problem.num_devices} micro-batches, two per device"


def dualpipe_v(script: Script, device: int, problem: OneMicrobatch) -> None:
    """DualPipeV (DeepSeek's DualPipe cut in half, 2025), forward and backward that it overlaps one after the other."""
    down, up = problem.num_devices - 1 - device, device + 1
    half = up // 2
    script.add("F0", 2 * down).add("F0 F1", up).add("I1 W F1", down)
    script.add("F0 B1 F1 B0", problem.num_microbatches - 2 * problem.num_devices + up)
    script.add("B1 F1 B0", down)
    script.add("B1 B0", half).add("I1 I0" if up % 2 == 0 else "B1 I0", min(1, up - half)).add("I1 I0", up - half - 1)
    script.add("W I0", down).add("W", up)


def repeated_block(steps: tuple[int, int, int, int]) -> Callable[[OneMicrobatch, TaskGraph], Orders]:
    """A building block repeated every six slots (Pipeline Parallelism with Controllable Memory, NeurIPS'24, section 3).

    From device to device a micro-batch's F of the first chunk moves on by ``steps[0]`` slots, then F of the second,
    I of the second and I of the first by the others; each weight gradient takes the next free slot. The smaller
    the steps, the sooner a micro-batch is through and the less is held: V-Min, V-Half. Orders only; true costs then
    close the slots up. Of the blocks with these steps it is the one that holds least, then the shortest.
    """

    def orders(problem: OneMicrobatch, graph: TaskGraph) -> Orders:
        enough = min(problem.num_microbatches, 2 * problem.num_devices)  # to reach the most that is ever held
        trial = replace(problem, workload=problem.workload.with_microbatches(enough))
        short = task_graph(trial.workload)

        def worth(block: _Block) -> tuple[int, int]:
            found = _repeated(trial, block)
            return max(device.peak_bytes for device in peak_memory(short, found)), makespan(short, found)

        return _repeated(problem, min(_blocks(problem.num_devices, steps), key=worth))

    return orders


_Block = list[tuple[int, ...]]
"""[device] slots of F0, F1, I1, I0, W1, W0 of micro-batch 0; on no device two are alike modulo 6."""


def _repeated(problem: OneMicrobatch, block: _Block) -> Orders:
    stages = problem.stage_operations
    slot_of: dict[int, int] = {}
    for device, (f0, f1, i1, i0, w1, w0) in enumerate(block):
        first, second = stages[device], stages[2 * problem.num_devices - 1 - device]
        slot_of.update(zip((*first, *second), (f0, i0, w0, f1, i1, w1), strict=True))
    return sorted_by(problem, lambda x, m: (slot_of[x] + 6 * m, x))


def _blocks(num_devices: int, steps: tuple[int, int, int, int]) -> Iterator[_Block]:
    """All building blocks with these steps, by the slots that the three turns wait."""
    last = num_devices - 1
    for waits in product(range(6), repeat=3):
        second = last * steps[0] + 1 + waits[0]
        back = second + last * steps[1] + 1 + waits[1]
        home = back + last * steps[2] + 1 + waits[2]
        places = [
            [d * steps[0], second + (last - d) * steps[1], back + d * steps[2], home + (last - d) * steps[3]]
            for d in range(num_devices)
        ]
        if all(len({slot % 6 for slot in taken}) == 4 for taken in places):
            yield [_with_weights(taken) for taken in places]


def _with_weights(taken: list[int]) -> tuple[int, ...]:
    """The slots of F0, F1, I1, I0 and of W1 and W0, each the next free one after its I."""
    for after in taken[2:]:
        used = {slot % 6 for slot in taken}
        taken = [*taken, next(slot for slot in range(after + 1, after + 7) if slot % 6 not in used)]
    return tuple(taken)
