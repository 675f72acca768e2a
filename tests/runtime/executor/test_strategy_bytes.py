"""Bytes that points of frontiers move and hold, beside those that the frontier counts: docs/algorithms/frontier.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from pipeplan.runtime.executor.stage import MiniBatch, StageRunner
from pipeplan.runtime.models.load import load_model
from pipeplan.sharding.cost_model import CostModel
from pipeplan.sharding.details import Details, details_of
from runtime_support.frontiers import PAPERS, chosen, frontier_of
from runtime_support.threads import ThreadGroup, run_in_threads
from support.marks import slow_but

CALLED = {"all_reduce": "sum", "all_gather": "gather", "reduce_scatter": "sum", "all_to_all": "exchange"}
"""What an operator exchanges, as it is counted here."""

HELD = {
    "vgg16-tiny-operators": (1.0, 1.0),
    "wide-resnet-tiny-operators": (1.0, 1.0),
    "candle-uno-tiny": (1.0, 1.0),
    "dlrm-tiny": (0.85, 1.0),
    "lstm-tiny-operators": (0.95, 1.13),
    "gpt2-tiny-operators": (1.0, 1.16),
}
"""What is held, least and most, as a share of what is counted."""
LEAST_MOVED = 0.7
"""What is moved of what is counted, where several blocks make the same again, or a move has several steps."""
SMALL = 32
"""Bytes of losses and targets."""


def size_of(numbers: int, tensor: Tensor) -> int:
    """So many bytes in float32, for which frontiers are; this runs in float64."""
    return numbers // (2 if tensor.is_floating_point() else 1)


class Made(TorchDispatchMode):
    """Notes every storage that operators make, with its bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = call(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr():
                known = StorageWeakRef(tensor.untyped_storage())
                if known.cdata not in self.storages or self.storages[known.cdata][0].expired():
                    self.storages[known.cdata] = known, size_of(tensor.untyped_storage().nbytes(), tensor)
        return made


class Counts:
    """What the first rank moves, by operation, and what each holds after its forward beside parameters and samples."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.moved, self.held = Counter[str](), dict[int, int]()
        forward, gather = StageRunner.forward, ThreadGroup.gather

        def gathered(group: ThreadGroup, tensor: Tensor) -> list[Tensor]:
            with _disable_current_modes():
                found = gather(group, tensor)
            return [each.clone() for each in found]

        def note(operation: str, group: ThreadGroup, tensor: Tensor, times: int = 1) -> None:
            if group._name[group._index] == 0:
                self.moved[operation] += times * size_of(tensor.nbytes, tensor)

        def noted(group: ThreadGroup, tensor: Tensor) -> list[Tensor]:
            note("gather", group, tensor, group._members)
            return gathered(group, tensor)

        def summed(group: ThreadGroup, tensor: Tensor) -> Tensor:
            note("sum", group, tensor)
            return torch.stack(gathered(group, tensor)).sum(0)

        def exchanged(group: ThreadGroup, pieces: Sequence[Tensor]) -> list[Tensor]:
            note("exchange", group, whole := torch.stack(list(pieces)))
            return [found[group._index] for found in gathered(group, whole)]

        def run(stage: StageRunner, own: Any, received: Any, samples: MiniBatch, part: int = 0) -> Any:
            with Made() as made:
                found = forward(stage, own, received, samples, part)
            parameters = [each for module in stage.modules.values() for each in module.parameters()]
            known = {each.untyped_storage()._cdata for each in (*parameters, *samples.tensors.values())}
            there = (size for each, size in made.storages.values() if not each.expired() and each.cdata not in known)
            self.held[stage.part.place] = sum(there)
            return found

        for name, made in {"gather": noted, "sum": summed, "exchange": exchanged}.items():
            monkeypatch.setattr(ThreadGroup, name, made)
        monkeypatch.setattr(StageRunner, "forward", run)


def held_by(model: CostModel, details: Details) -> int:
    """What the frontier counts, less the mini-batch's own tensors."""
    nodes = {node.name: node for node in model.operators.nodes}
    found = sum(each.held_bytes for each in details.tensors)
    for each in details.operators:
        own = not model.fed(nodes[each.name]) and nodes[each.name].operation.keeps_input(0)
        found += each.kept_bytes - (each.configuration.entry_bytes if own else 0)
    return found


def moved_by(model: CostModel, details: Details) -> Counter[str]:
    """What the frontier counts on a device: a scatter as the sum that stands for it, each conversion once."""
    nodes, found = {node.name: node for node in model.operators.nodes}, Counter[str]()
    for each in details.operators:
        operation, splits = nodes[each.name].operation, each.configuration.splits
        extents = {axis.name: splits[axis.name].extent if axis.name in splits else 1 for axis in operation.axes}
        for inner in operation.exchanges(operation.numbers(extents)):
            if inner.axis in splits:
                found[CALLED[inner.operation]] += inner.num_bytes * (inner.forward + inner.backward)
    seen = set[object]()
    for tensor in details.tensors:
        for number, moves in enumerate((tensor.forward, tensor.again, tensor.backward)):
            for move in moves:
                if move.how != "slice" and (number, tensor.link.source, move) not in seen:
                    seen.add((number, tensor.link.source, move))
                    local = -(-tensor.num_bytes // move.source.shards)
                    times = move.along.extent if move.how == "gather" and move.along is not None else 1
                    found["sum" if move.how == "scatter" else move.how] += times * local
    return found


@slow_but("name", PAPERS, "candle-uno-tiny".__eq__, lambda name: name.startswith(("vgg16", "wide-resnet")))
def test_points_of_frontiers_hold_and_move_what_is_counted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    request, found = frontier_of(name)
    counts = Counts(monkeypatch)
    for what, index in chosen(name).items():
        counts.moved.clear()
        model = found.model_of(found.points[index])
        details = details_of(model, found.points[index].strategy)
        run_in_threads(found.plan(request, index), load_model(name), 3)
        least, most = (share * held_by(model, details) for share in HELD[name])
        for place, size in counts.held.items():
            assert least - SMALL <= size <= most + SMALL, (what, place)
        counted, moved = sum(moved_by(model, details).values()), sum(counts.moved.values())
        assert LEAST_MOVED * counted <= moved <= counted + SMALL, what
