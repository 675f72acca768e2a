"""Classic schedules of v-shapes: two stages per device, the chain going down and up; and Hanayo's waves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

from pipeplan.schedule.classic.base import Orders, Script, sorted_by
from pipeplan.schedule.listing import Policy, list_schedule
from pipeplan.schedule.problem import Problem
from pipeplan.simulate.timing import TaskGraph

__all__ = ["dualpipe_v", "enough_for_dualpipe", "hanayo", "repeated_block", "zero_bubble_v"]


def zero_bubble_v(script: Script, device: int, problem: Problem) -> None:
    """ZB-V (Zero Bubble Pipeline Parallelism, ICLR'24, section 6): memory as 1F1B's, no bubble if F = I = W."""
    down, up = problem.num_devices - device, device
    script.add("F0", 2 * down - 1).add("F1 F0", up).add("F1 I1 W1", down)
    script.add("F0 I0 W0 F1 I1 W1", max(problem.num_microbatches, 2 * problem.num_devices - 1) - problem.num_devices)
    script.add("I0 I1", up).add("I0 W0", down).add("W1", problem.num_microbatches)


def enough_for_dualpipe(problem: Problem) -> str | None:
    """DualPipeV fills the pipeline both ways before its steady state."""
    if problem.num_microbatches >= 2 * problem.num_devices:
        return None
    return f"it needs at least {2 * problem.num_devices} micro-batches, two per device"


def dualpipe_v(script: Script, device: int, problem: Problem) -> None:
    """DualPipeV (DeepSeek's DualPipe cut in half, 2025), forward and backward that it overlaps one after the other."""
    down, up = problem.num_devices - 1 - device, device + 1
    half = up // 2
    script.add("F0", 2 * down).add("F0 F1", up).add("I1 W F1", down)
    script.add("F0 B1 F1 B0", problem.num_microbatches - 2 * problem.num_devices + up)
    script.add("B1 F1 B0", down)
    script.add("B1 B0", half).add("I1 I0" if up % 2 == 0 else "B1 I0", min(1, up - half)).add("I1 I0", up - half - 1)
    script.add("W I0", down).add("W", up)


def repeated_block(steps: tuple[int, int, int, int]) -> Callable[[Problem, TaskGraph], Orders]:
    """A building block repeated every six slots (Pipeline Parallelism with Controllable Memory, NeurIPS'24, section 3).

    From device to device a micro-batch's F of the first chunk moves on by ``steps[0]`` slots, then F of the second,
    I of the second and I of the first by the others; each weight gradient takes the next free slot. The smaller
    the steps, the sooner a micro-batch is through and the less is held: V-Min, V-Half. Orders only; true costs then
    close the slots up.
    """

    def orders(problem: Problem, graph: TaskGraph) -> Orders:
        slots = _block(problem.num_devices, steps)
        stages = problem.stage_operations
        slot_of: dict[int, int] = {}
        for device, (f0, f1, i1, i0, w1, w0) in enumerate(slots):
            first, second = stages[device], stages[2 * problem.num_devices - 1 - device]
            slot_of.update(zip((*first, *second), (f0, i0, w0, f1, i1, w1), strict=True))
        return sorted_by(problem, lambda x, m: (slot_of[x] + 6 * m, x))

    return orders


def _block(num_devices: int, steps: tuple[int, int, int, int]) -> list[tuple[int, ...]]:
    """[device] slots of F0, F1, I1, I0, W1, W0 of micro-batch 0; on no device two are alike modulo 6.

    The three turns wait as little as makes that possible.
    """
    last = num_devices - 1
    for waits in sorted(product(range(6), repeat=3), key=lambda waits: (sum(waits), waits)):
        second = last * steps[0] + 1 + waits[0]
        back = second + last * steps[1] + 1 + waits[1]
        home = back + last * steps[2] + 1 + waits[2]
        found = []
        for d in range(num_devices):
            taken = [d * steps[0], second + (last - d) * steps[1], back + d * steps[2], home + (last - d) * steps[3]]
            if len({slot % 6 for slot in taken}) < 4:
                break
            for after in (taken[2], taken[3]):
                used = {slot % 6 for slot in taken}
                taken.append(next(slot for slot in range(after + 1, after + 7) if slot % 6 not in used))
            found.append(tuple(taken))
        else:
            return found
    raise AssertionError(f"no building block with steps {steps} on {num_devices} devices")


def hanayo(problem: Problem, graph: TaskGraph) -> Orders:
    """Hanayo's waves (Liu et al., SC'23): backward first, else the deepest forward, with at most D micro-batches open.

    One wave is a v-shape of two stages per device; W waves have 2 W.
    """
    limit = (problem.num_devices,) * problem.num_devices
    unlimited = Policy(patience=0.0, deep_first=True, in_flight=limit)
    orders = list_schedule(replace(problem, capacity=(None,) * len(problem.capacity)), unlimited)
    assert orders is not None
    return orders
