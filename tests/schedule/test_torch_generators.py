"""Classic schedules action by action against those that torch.distributed.pipelining generates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules

from builders.chains import chain_workload
from pipeplan.schedule.classic import CLASSIC
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.task_graph import task_graph


def torch_orders(name: str, num_devices: int, num_microbatches: int, chunks: int = 1) -> list[list[str]]:
    """[rank] the compute actions of a schedule of torch, without its idle slots.

    No process group is needed: as long as nothing runs, the classes ask stages for their numbers alone. The order is
    private (``pipeline_order``), the same on releases 2.11 to 2.13.
    """
    kind = getattr(schedules, f"Schedule{name}", None)
    if kind is None:
        pytest.skip(f"this torch has no Schedule{name}")
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
    return [list(_texts(schedule.pipeline_order[rank])) for rank in range(num_devices)]


def _texts(actions: Sequence[Any]) -> Iterator[str]:
    """As pipeplan writes them; an overlapped forward and backward as one after the other."""
    for action in actions:
        if action is None or action.computation_type.value == "REDUCE_GRAD":
            continue
        if action.computation_type.value == "OVERLAP_F_B":
            yield from _texts(action.sub_actions)
            continue
        assert action.computation_type.value in ("F", "B", "I", "W")
        yield f"{action.stage_index}{action.computation_type.value}{action.microbatch_index}"


def our_orders(scheduler: str, groups: Sequence[int], num_microbatches: int, *, split: bool) -> list[list[str]]:
    problem = OneMicrobatch.of(
        chain_workload(
            1 + max(groups),
            num_microbatches,
            devices=[(device,) for device in groups],
            split=(10, 10) if split else None,
        )
    )
    assert CLASSIC[scheduler].applies(problem) is None
    graph = task_graph(problem.workload)
    return [[graph.label(task) for task in order] for order in CLASSIC[scheduler].orders(problem, graph)]


def in_turn(num_devices: int, chunks: int = 1) -> list[int]:
    return [stage % num_devices for stage in range(chunks * num_devices)]


def down_and_up(num_devices: int) -> list[int]:
    return [*range(num_devices), *reversed(range(num_devices))]


def whole_backwards(order: Sequence[str]) -> Iterator[str]:
    """I and W of a micro-batch, one right behind the other, for every whole backward."""
    for text in order:
        yield from (text.replace("B", "I"), text.replace("B", "W")) if "B" in text else (text,)


@pytest.mark.parametrize(("num_devices", "num_microbatches"), [(1, 1), (2, 1), (4, 2), (4, 4), (4, 12), (7, 16)])
def test_gpipe(num_devices: int, num_microbatches: int) -> None:
    ours = our_orders("gpipe", in_turn(num_devices), num_microbatches, split=False)
    assert ours == torch_orders("GPipe", num_devices, num_microbatches)


@pytest.mark.parametrize(("num_devices", "num_microbatches"), [(2, 2), (4, 4), (4, 5), (4, 12), (7, 16)])
def test_one_forward_one_backward(num_devices: int, num_microbatches: int) -> None:
    """Torch's list numbers the forwards of the last stage from 1 on, though it runs them from 0."""
    ours = our_orders("1f1b", in_turn(num_devices), num_microbatches, split=False)
    theirs = torch_orders("1F1B", num_devices, num_microbatches)
    stage = num_devices - 1
    if f"{stage}F0" not in theirs[-1]:
        shifted = {f"{stage}F{m + 1}": f"{stage}F{m}" for m in range(num_microbatches)}
        theirs[-1] = [shifted.get(text, text) for text in theirs[-1]]
    assert ours == theirs


INTERLEAVED = [(2, 2, 2), (2, 2, 4), (4, 2, 4), (4, 2, 12), (4, 3, 8), (3, 4, 9), (4, 2, 10), (8, 2, 32), (4, 2, 3)]
"""Devices, chunks, micro-batches: also groups that are larger (10 on 4 devices are two of 5) or fewer than devices."""


@pytest.mark.parametrize(("num_devices", "chunks", "num_microbatches"), INTERLEAVED)
def test_interleaved(num_devices: int, chunks: int, num_microbatches: int) -> None:
    ours = our_orders("interleaved-1f1b", in_turn(num_devices, chunks), num_microbatches, split=False)
    assert ours == torch_orders("Interleaved1F1B", num_devices, num_microbatches, chunks)


@pytest.mark.parametrize(("num_devices", "chunks", "num_microbatches"), INTERLEAVED)
def test_interleaved_zero_bubble(num_devices: int, chunks: int, num_microbatches: int) -> None:
    ours = our_orders("interleaved-zb", in_turn(num_devices, chunks), num_microbatches, split=True)
    assert ours == torch_orders("InterleavedZeroBubble", num_devices, num_microbatches, chunks)


@pytest.mark.parametrize(("num_devices", "num_microbatches"), [(2, 2), (2, 6), (4, 4), (4, 12), (7, 14), (8, 32)])
def test_zb_h1(num_devices: int, num_microbatches: int) -> None:
    """Torch's with one chunk per device."""
    ours = our_orders("zb-h1", in_turn(num_devices), num_microbatches, split=True)
    assert ours == torch_orders("InterleavedZeroBubble", num_devices, num_microbatches)


@pytest.mark.parametrize(("num_devices", "chunks", "num_microbatches"), [(2, 2, 1), (4, 2, 4), (4, 3, 10), (3, 4, 7)])
def test_looped_breadth_first(num_devices: int, chunks: int, num_microbatches: int) -> None:
    """Torch runs the backwards of a chunk from the last micro-batch to the first; all micro-batches are alike."""
    ours = our_orders("looped-bfs", in_turn(num_devices, chunks), num_microbatches, split=False)
    theirs = torch_orders("LoopedBFS", num_devices, num_microbatches, chunks)
    assert ours == [[turned(text, num_microbatches) for text in order] for order in theirs]


def turned(text: str, num_microbatches: int) -> str:
    """A backward with the micro-batches numbered the other way round."""
    if "B" not in text:
        return text
    stage, m = text.split("B")
    return f"{stage}B{num_microbatches - 1 - int(m)}"


@pytest.mark.parametrize(
    ("num_devices", "num_microbatches"), [(1, 1), (1, 4), (2, 1), (2, 5), (4, 3), (4, 7), (4, 12), (7, 20), (8, 32)]
)
def test_zb_v(num_devices: int, num_microbatches: int) -> None:
    ours = our_orders("zb-v", down_and_up(num_devices), num_microbatches, split=True)
    assert ours == torch_orders("ZBVZeroBubble", num_devices, num_microbatches, 2)


@pytest.mark.parametrize(
    ("num_devices", "num_microbatches"), [(1, 2), (2, 4), (2, 9), (3, 6), (4, 8), (4, 11), (5, 20), (8, 32)]
)
def test_dualpipe_v(num_devices: int, num_microbatches: int) -> None:
    """A forward and a backward that torch overlaps stand one after the other; a whole backward is I, then W."""
    ours = our_orders("dualpipe-v", down_and_up(num_devices), num_microbatches, split=True)
    theirs = torch_orders("DualPipeV", num_devices, num_microbatches, 2)
    assert ours == [list(whole_backwards(order)) for order in theirs]
