"""torch's own schedule generators beside pipeplan's search: same costs, same placement, same memory.

    pip install 'pipeplan[torch]'
    python benchmarks/generators.py        # prints the table of docs/benchmarks/schedules.md; takes some minutes
    python benchmarks/generators.py --devices 4 --limit 5

F = I = W = 100 us per device (``--times``; a whole backward takes I and W), shared among its chunks, communication
10 us on every hop, twice as many micro-batches as devices. A device takes 2 GB with a micro-batch's F and gives 1 GB
back after I, 1 GB after W; the search gets as much memory on every device as torch's schedule needs on the device that
holds most. Whole backwards are searched where torch's schedule has whole ones. Both are timed by pipeplan's simulator,
and checked.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

from tables import machine, markdown, note
from timed import makespan_of, timed_search
from torch.distributed.pipelining import schedules

from pipeplan.costs import build_workload
from pipeplan.examples import ShapeCosts, shape
from pipeplan.schedule.cpsat.solver import load_solver
from pipeplan.workload.memory import peak_memory
from pipeplan.workload.task_graph import TaskGraph, task_graph
from pipeplan.workload.workload import Workload

US, GB = 1_000, 10**9


@dataclass(frozen=True, slots=True)
class Kind:
    """What a schedule of torch stands on: a shape, chunks per device, and whether it splits backward."""

    shape: str
    chunks: int = 1
    split: bool = False


KINDS = {
    "GPipe": Kind("v"),
    "1F1B": Kind("v"),
    "LoopedBFS": Kind("circular", 2),
    "Interleaved1F1B": Kind("circular", 2),
    "InterleavedZeroBubble": Kind("circular", 2, split=True),
    "ZBVZeroBubble": Kind("zbv", 2, split=True),
    "DualPipeV": Kind("zbv", 2, split=True),
}

HEADER = [
    "torch's schedule",
    "devices",
    "memory, GB",
    "makespan, us: torch",
    "pipeplan",
    "ratio",
    "proved gap",
    "seconds: torch",
    "pipeplan, to torch's makespan",
    "to its own",
]


def generated(name: str, chunks: int, num_devices: int, num_microbatches: int) -> dict[int, list[Any]] | None:
    """[rank] the actions of a schedule of torch, None for idle slots; None where this torch has no such schedule.

    The classes ask stages for their numbers alone as long as nothing runs, so plain ones will do, and no process
    group is needed. Where the order stands is private: ``pipeline_order``, in torch 2.13.
    """
    kind = getattr(schedules, f"Schedule{name}", None)
    if kind is None:
        return None
    stages = [
        SimpleNamespace(
            stage_index=chunk * num_devices,
            num_stages=chunks * num_devices,
            group_size=num_devices,
            group_rank=0,
            submod=None,
        )
        for chunk in range(chunks)
    ]
    schedule = kind(stages if issubclass(kind, schedules.PipelineScheduleMulti) else stages[0], num_microbatches)
    return {rank: _from_zero(actions) for rank, actions in schedule.pipeline_order.items()}


def _from_zero(actions: list[Any]) -> list[Any]:
    """1F1B's order counts the last stage's forwards from 1, though torch runs them from 0 (2.13)."""
    first = min((action.microbatch_index for action in actions if _is(action, "F")), default=0)
    return [
        action._replace(microbatch_index=action.microbatch_index - first) if _is(action, "F") else action
        for action in actions
    ]


def _is(action: Any, *kinds: str) -> bool:
    return action is not None and action.computation_type.value in kinds


def workload_of(kind: Kind, times: list[int], num_devices: int, memory: int | None = None) -> Workload:
    """One iteration with twice as many micro-batches as devices; ``times`` of F, I and W in us."""
    forward, input_grad, weight_grad = times
    costs = ShapeCosts(
        forward_ns=forward * US,
        input_grad_ns=input_grad * US,
        weight_grad_ns=weight_grad * US,
        comm_ns=10 * US,
        activation_bytes=2 * GB,
        weight_grad_bytes=GB,
    )
    profile = shape(kind.shape, num_devices, chunks=kind.chunks if kind.shape == "circular" else None, costs=costs)
    assert profile.placement is not None
    return build_workload(
        profile,
        profile.placement,
        num_microbatches=2 * num_devices,
        microbatch_size=1,
        split_backward=kind.split,
        memory_bytes=[memory] * num_devices,
    )


def orders_of(graph: TaskGraph, actions: dict[int, list[Any]]) -> list[list[int]]:
    """The same as pipeplan's orders. Where one stage has whole backwards and split ones, a whole one is I, then W."""
    position = {operation.id: index for index, operation in enumerate(graph.workload.operations)}

    def tasks(action: Any) -> Iterator[int]:
        if getattr(action, "sub_actions", None):  # an overlapped pair, of which a device here runs one at a time
            yield from itertools.chain.from_iterable(map(tasks, action.sub_actions))
        elif _is(action, "F", "B", "I", "W"):
            stage, kind = action.stage_index, action.computation_type.value
            for part in "IW" if kind == "B" and f"{stage}I" in position else kind:
                yield graph.offsets[position[f"{stage}{part}"]] + action.microbatch_index

    return [list(itertools.chain.from_iterable(map(tasks, actions[rank]))) for rank in sorted(actions)]


def row(name: str, num_devices: int, times: list[int], limit: float) -> list[str]:
    kind = KINDS[name]
    begun = time.perf_counter()
    actions = generated(name, kind.chunks, num_devices, 2 * num_devices)
    seconds = time.perf_counter() - begun
    if actions is None:
        return [name, str(num_devices), *["not in this torch"] * (len(HEADER) - 2)]
    graph = task_graph(workload_of(kind, times, num_devices))
    orders = orders_of(graph, actions)
    makespan = makespan_of(graph, orders)
    memory = max(device.peak_bytes for device in peak_memory(graph, orders))
    found = timed_search(workload_of(kind, times, num_devices, memory), limit, makespan)
    cells = [
        name,
        str(num_devices),
        f"{memory / GB:g}",
        f"{makespan / US:g}",
        f"{found.schedule.makespan_ns / US:g}",
        f"{makespan / found.schedule.makespan_ns:.3f}",
        f"{found.schedule.makespan_ns / found.schedule.bound_ns - 1:.1%}",
        f"{seconds:.4f}",
        "not in time" if found.target_seconds is None else f"{found.target_seconds:.4f}",
        f"{found.best_seconds:.2f}",
    ]
    note(" ".join(cells))
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", default=",".join(KINDS), help="the end of torch's class names")
    parser.add_argument("--devices", default="4,8,16")
    parser.add_argument("--limit", type=float, default=20.0, help="seconds for one search")
    parser.add_argument("--times", default="100,100,100", help="us of F, I and W on each device")
    options = parser.parse_args()
    times = [int(time_) for time_ in options.times.split(",")]
    load_solver()
    rows = [
        row(name, int(count), times, options.limit)
        for name in options.schedules.split(",")
        for count in options.devices.split(",")
    ]
    print(markdown(HEADER, rows))
    print(f"\n{machine()}, torch {version('torch')}.")


if __name__ == "__main__":
    main()
