"""Stages that compute some blocks again, of others the attention core, and of others nothing."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipeplan.files import PlacedStage
from pipeplan.runtime.executor.rank_program import StagePart
from pipeplan.runtime.executor.stage import MiniBatch, StageError, StageRunner
from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.models.spec import BlockSpec
from pipeplan.workload.elements import Again, Recompute
from runtime_support.plans import placed_plan
from runtime_support.threads import require_equal_to_unsplit

MODEL = load_model("gpt2-tiny")
BLOCKS = [block.id for block in MODEL.blocks]
HALF = len(BLOCKS) // 2
MIXED: dict[str, tuple[Recompute, Recompute]] = {
    "blocks": (tuple(n % 2 == 0 for n in range(HALF)), (True, *(False,) * (len(BLOCKS) - HALF - 1))),
    "cores": (tuple("selective" if "attention" in id_ else True for id_ in BLOCKS[:HALF]), "selective"),
}


@pytest.mark.parametrize(("kind", "split"), [("blocks", False), ("cores", True)])
def test_equals_an_unsplit_run_whatever_is_computed_again(kind: str, split: bool) -> None:
    halves = zip((BLOCKS[:HALF], BLOCKS[HALF:]), MIXED[kind], strict=True)
    stages = [
        PlacedStage(blocks=tuple(blocks), devices=(device,), recompute=again)
        for device, (blocks, again) in enumerate(halves)
    ]
    require_equal_to_unsplit(MODEL, placed_plan(MODEL, stages, num_microbatches=3, split=split))


class OperatorRuns(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """How often each operator runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.runs: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count it, and run it."""
        self.runs[str(func._overloadpacket).removeprefix("aten.")] += 1
        return func(*args, **(kwargs or {}))


def runner(module: nn.Module, again: Again) -> StageRunner:
    """A stage of one block, which takes ``x`` and hands its output on."""
    part = StagePart(
        0,
        ("a",),
        (again,),
        False,
        {},
        {1: ("a",)},
        frozenset(),
        frozenset({1}),
        cores=frozenset({"a"} if again else ()),
    )
    return StageRunner(part, {"a": module}, {"a": BlockSpec("a", "attention", nn.Identity, samples=("x",))})


@pytest.mark.parametrize(("again", "cores", "norms"), [(False, 1, 1), ("selective", 2, 1), (True, 2, 2)])
def test_what_is_computed_again_runs_twice(again: Again, cores: int, norms: int) -> None:
    block = next(each for each in MODEL.blocks if each.operator == "attention")
    stage, x = runner(block.build(), again), torch.randn(2, 16, block.dimensions["hidden"])
    with OperatorRuns() as counted:
        made = stage.forward((0, 1), {}, MiniBatch({"x": x}, 1))
        stage.backward(0, {(0, 1): [("a", torch.ones_like(made["a"]))]})
    assert counted.runs["_scaled_dot_product_flash_attention_for_cpu"] == cores
    assert counted.runs["native_layer_norm"] == norms


def test_a_block_without_the_core_that_a_plan_names_is_refused() -> None:
    stage = runner(nn.Linear(4, 4), "selective")
    with pytest.raises(StageError, match=r"block 'a' is to recompute its attention core.*--recompute none or all"):
        stage.forward((0, 1), {}, MiniBatch({"x": torch.randn(2, 4)}, 1))
