"""What stages keep for backward, counted by the tensors that autograd saves, is what plans of measured profiles say."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pipeplan.costs.devices import device_preset
from pipeplan.files import PlacedStage, Plan, Profile
from pipeplan.runtime.executor.rank_program import programs_of
from pipeplan.runtime.executor.stage import MiniBatch, StageRunner
from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.models.spec import Grain, Model
from pipeplan.runtime.profiling.estimate import estimate_model
from pipeplan.runtime.profiling.instruments import saved_tensors, storages
from pipeplan.runtime.profiling.measure import profile_model
from pipeplan.workload.kinds import Role
from runtime_support.plans import placed_plan

SIZE, COUNT = 2, 2
"""Samples of a micro-batch, and how many of these there are."""

LLAMA = (
    "LlamaConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, "
    "intermediate_size=64, vocab_size=64)"
)


def plan_of(model: Model, profile: Profile, share: float = 0.5, **how: Any) -> Plan:
    """Two stages, of which the first has this share of the blocks."""
    ids = [block.id for block in model.blocks]
    cut = max(1, int(share * len(ids)))
    halves = ids[:cut], ids[cut:]
    stages = [PlacedStage(blocks=tuple(own), devices=(device,)) for device, own in enumerate(halves)]
    return placed_plan(model, stages, profile=profile, num_microbatches=COUNT, microbatch_size=SIZE, **how)


def held_bytes(model: Model, plan: Plan, dtype: torch.dtype) -> Iterator[int]:
    """[stage] what is kept of a micro-batch after its forward: saved tensors, what came, and its own samples' rows."""
    batch = model.mini_batch(SIZE * COUNT, 0, 0, dtype=dtype)
    programs = programs_of(plan, [block.id for block in model.blocks], model.edges, model.name)
    received: dict[str, torch.Tensor] = {}
    for index, program in enumerate(programs):
        part = program.stages[index]
        modules = {block: model.build(block, 0, dtype=dtype) for block in part.blocks}
        runner = StageRunner(part, modules, {block: model.block(block) for block in part.blocks})
        with saved_tensors() as saved:
            made = runner.forward(tuple(range(SIZE)), {**received}, MiniBatch(batch, 1.0))
        gc.collect()
        (kept,) = runner._held.values()
        known = storages(each for module in modules.values() for each in (*module.parameters(), *module.buffers()))
        found = {key: size for key, size in storages([*saved(), *kept.inputs.values()]).items() if key not in known}
        samples = storages(batch.values())
        yield sum(size // COUNT if key in samples else size for key, size in found.items())
        received = {str(name): tensor.detach() for name, tensor in made.items()}


CASES = [
    ("gpt2-tiny-operators", torch.float32, None, None),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in [
            ("gpt2-tiny", torch.float32, None, None),
            ("mmt-tiny", torch.bfloat16, None, None),
            ("gpt2-tiny-operators", torch.bfloat16, None, None),
            (LLAMA, torch.float32, 16, "layer"),
            (LLAMA, torch.bfloat16, 16, "half"),
        ]
    ),
    *(
        pytest.param(*case, marks=[pytest.mark.slow, pytest.mark.long])
        for case in [
            ("gpt2-tiny", torch.bfloat16, None, None),
            ("mmt-tiny", torch.float32, None, None),
            (LLAMA, torch.float32, 16, "half"),
            (LLAMA, torch.bfloat16, 16, "layer"),
        ]
    ),
]
"""Models, formats, sequences, and how finely a model is cut: blocks that save their inputs, and some that do not."""


@pytest.mark.parametrize(("name", "dtype", "sequence", "grain"), CASES)
def test_stages_keep_what_the_plan_says(
    name: str, dtype: torch.dtype, sequence: int | None, grain: Grain | None
) -> None:
    """To the byte, of profiles measured here, with this attention and in this format; and of estimates for it.

    Where attention cores are computed again, and of estimates, within 1 %.
    """
    model = load_model(name, sequence=sequence, grain=grain)
    profile = profile_model(model, [SIZE], repeats=1, warmup=0, dtype=dtype, recompute=True)
    estimate = estimate_model(model, [SIZE], device=device_preset("cpu"), dtype=dtype, recompute=True)
    ways: list[dict[str, Any]] = [
        {},
        {"split": True},
        {"recompute": True},
        {"recompute": "selective"},
        {"share": 0.3},
        {"share": 0.8},
    ]
    for how in ways:
        plan = plan_of(model, profile, **how)
        found = list(held_bytes(model, plan, dtype))
        assert found == pytest.approx(planned(plan), rel=0.01 if how.get("recompute") == "selective" else 0), how
        assert planned(plan_of(model, estimate, **how)) == pytest.approx(found, rel=0.01), how


def planned(plan: Plan) -> list[int]:
    """[stage] what it keeps of a micro-batch, as the plan says."""
    forwards = [each for each in plan.operations if each.role is Role.FORWARD]
    return [each.acquire_bytes for each in sorted(forwards, key=lambda each: each.stage)]


def test_stages_let_go_of_what_no_later_block_takes() -> None:
    """After each block of a forward there is what backward needs, and what a later block takes: no more."""
    model = load_model("gpt2-tiny-operators")
    profile = profile_model(model, [SIZE], repeats=1, warmup=0, dtype=torch.float32)
    plan = plan_of(model, profile)
    (program, _) = programs_of(plan, [block.id for block in model.blocks], model.edges, model.name)
    part = program.stages[0]
    made: dict[str, weakref.ref[torch.UntypedStorage]] = {}
    specs = {block: model.block(block) for block in part.blocks}
    modules = {block: model.build(block, 0) for block in part.blocks}
    needed = {edge.source for edge in profile.edges if edge.is_saved() and edge.target in part.blocks}
    needed |= {edge.source for edge in profile.edges if edge.saved_by_source != "no"}
    last = {source: block for block in part.blocks for source, _ in specs[block].inputs}
    for block, module in modules.items():

        def note(module: Any, given: Any, output: torch.Tensor, block: str = block) -> None:
            gone = {name for name, each in made.items() if each() is None}
            done = part.blocks[: part.blocks.index(block)]
            assert gone == {name for name in made if name not in needed and last.get(name) in done}
            made[block] = weakref.ref(output.untyped_storage())

        module.register_forward_hook(note)
    runner = StageRunner(part, modules, specs)
    runner.forward(tuple(range(SIZE)), {}, MiniBatch(model.mini_batch(SIZE * COUNT, 0, 0), 1.0))
    assert len(made) == len(part.blocks)
