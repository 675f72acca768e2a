"""A model that is not as large as the plan's is told of, and nothing else is."""

from __future__ import annotations

import functools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from builders.orders import gpipe_orders
from builders.plans import plan_of
from builders.shapes import shape_workload
from pipeplan.costs import build_workload
from pipeplan.costs.clusters import named_cluster
from pipeplan.costs.devices import device_preset
from pipeplan.costs.recipes import MEASURED, profiled_recipe
from pipeplan.examples import ShapeCosts
from pipeplan.files import CostRow, PlacedStage, Placement, Plan, Recipe, Source
from pipeplan.planning.sharding_frontier import plan_of_strategy
from pipeplan.runtime.executor.rank_program import planned_programs, programs_of
from pipeplan.runtime.executor.tensors import TensorSpec
from pipeplan.runtime.models import load
from pipeplan.runtime.models.spec import Model
from pipeplan.runtime.profiling.build_profile import block_graph_of, profile_of
from pipeplan.runtime.profiling.estimate import estimate_model
from pipeplan.runtime.training.compatibility import other_sizes, warning_of_sizes
from pipeplan.runtime.training.trainer import travelling
from pipeplan.sharding.cost_model import CostOptions, cost_model
from pipeplan.sharding.tracking import track
from pipeplan.units import format_bytes
from support.marks import one_in

FORMATS = [torch.float16, torch.float32, torch.float64]


@functools.cache
def load_model(name: str, sequence: int | None = None) -> Model:
    return load.load_model(name, sequence=sequence)


@functools.cache
def plan_for(
    name: str,
    dtype: torch.dtype = torch.float32,
    replicas: int = 1,
    shards: int = 1,
    sequence: int | None = None,
    *,
    whole: bool = True,
) -> Plan:
    """Two stages, the second with several devices, from a profile with the model's true sizes.

    Or, if not ``whole``, from one that does not say what devices that split a block have whole.
    """
    model = load_model(name, sequence)
    rows = [CostRow(microbatch_size=n, shards=s, forward_ns=1, backward_ns=2) for n in (1, 2, 4) for s in (1, 2)]
    names = [block.id for block in model.blocks]
    format_, recipe = profiled_recipe(MEASURED, str(dtype).removeprefix("torch."))
    source = Source(method="estimated", dtype=format_)
    profile = profile_of(model, block_graph_of(model, dtype), dict.fromkeys(names, rows), source, recipe)
    if not whole:
        blocks = tuple(block.model_copy(update={"whole_parameters": 0}) for block in profile.blocks)
        assert blocks != profile.blocks
        profile = profile.model_copy(update={"blocks": blocks})
    devices = tuple(range(1, 1 + replicas * shards))
    half = len(names) // 2
    stages = (
        PlacedStage(blocks=tuple(names[:half]), devices=(0,)),
        PlacedStage(blocks=tuple(names[half:]), devices=devices, replicas=replicas, shards=shards),
    )
    placement = Placement(strategy="by-hand", num_devices=1 + len(devices), stages=stages)
    workload = build_workload(profile, placement, num_microbatches=2, microbatch_size=4)
    return plan_of(workload, gpipe_orders(workload))


@functools.cache
def specs_of(name: str, dtype: torch.dtype) -> dict[str, TensorSpec]:
    """Of all outputs of blocks, whichever of them a plan sends."""
    model = load_model(name)
    every: Any = SimpleNamespace(
        tensors={"": [block.id for block in model.blocks if not block.loss]}, microbatch_size=4
    )
    return travelling(every, model, dtype)


def told(plan: Plan, name: str, dtype: torch.dtype = torch.float32) -> str | None:
    model = load_model(name)
    programs = programs_of(plan, [block.id for block in model.blocks], model.edges, model.name)
    return other_sizes(plan, programs, model, specs_of(name, dtype), dtype)


@one_in(2, "name", ["gpt2-tiny", "tessel-mt5-tiny", "mmt-tiny"])
@pytest.mark.parametrize(("replicas", "shards"), [(1, 1), (2, 1), (1, 2)])
def test_nothing_is_told_of_the_same_model(name: str, replicas: int, shards: int) -> None:
    plan = plan_for(name, replicas=replicas, shards=shards)
    assert any(hop.bytes for dependency in plan.dependencies for hop in dependency.hops)
    assert told(plan, name) is None


@pytest.mark.parametrize("name", ["gpt2-tiny", "mmt-tiny"])
def test_nothing_is_told_where_a_profile_divides_what_devices_have_whole(name: str) -> None:
    assert told(plan_for(name, shards=2, whole=False), name) is None


@pytest.mark.parametrize("known", [True, False])
def test_a_table_that_blocks_of_a_stage_share_counts_once_or_with_each(known: bool) -> None:
    """As it is, and as profiles that do not say how large it is count it."""
    model = load_model("gpt2-tiny")
    rows = [CostRow(microbatch_size=n, forward_ns=1, backward_ns=2) for n in (1, 2, 4)]
    names = [block.id for block in model.blocks]
    graph = block_graph_of(model, torch.float32)
    profile = profile_of(model, graph, dict.fromkeys(names, rows), Source(method="estimated"), Recipe(name="fp32"))
    if not known:
        profile = profile.model_copy(update={"tied": ()})
    placement = Placement(strategy="by-hand", num_devices=1, stages=(PlacedStage(blocks=tuple(names), devices=(0,)),))
    workload = build_workload(profile, placement, num_microbatches=2, microbatch_size=4)
    assert told(plan_of(workload, gpipe_orders(workload)), "gpt2-tiny") is None


@one_in(2, "name", ["gpt2-tiny-operators", "candle-uno-tiny"], first=1)
def test_nothing_is_told_of_a_strategy_either(name: str) -> None:
    """Parameters are cut along some of a mesh's axes; devices that share samples, or do the same, have all."""
    model, cluster = load_model(name), named_cluster("tensoropt", 4)
    profile = estimate_model(model, (4,), device=device_preset("v100-16gb"), dtype=torch.float32)
    built = cost_model(profile, cluster, 4, 4, options=CostOptions(blocks=True))
    found = track(built.graph)
    for point in (0, len(found.memory_bytes) // 2, len(found.memory_bytes) - 1):
        assert told(plan_of_strategy(profile, built, found.strategy(point), cluster=cluster), name) is None


@pytest.mark.parametrize("planned", FORMATS)
@pytest.mark.parametrize("run", FORMATS)
def test_another_format_is_no_other_size(planned: torch.dtype, run: torch.dtype) -> None:
    assert told(plan_for("gpt2-tiny", planned), "gpt2-tiny", run) is None


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("sequence", [4, 8, 15])
def test_another_sequence(sequence: int, dtype: torch.dtype) -> None:
    """Also where a twice as long sequence looks like numbers of twice the bytes."""
    plan = plan_for("gpt2-tiny", sequence=sequence)
    planned, sent = format_bytes(sequence * 32 * 4), format_bytes(16 * 32 * dtype.itemsize)
    assert told(plan, "gpt2-tiny", dtype) == (
        f"the plan expects {planned} per sample from stage 0 to 1 and the model sends {sent}"
    )


def test_stages_that_send_nothing_are_told_by_their_parameters() -> None:
    plan = plan_for("gpt2-tiny")
    first = replace(plan.stages[0], parameter_bytes=plan.stages[0].parameter_bytes * 3)
    text = told(plan.model_copy(update={"stages": (first, *plan.stages[1:])}), "gpt2-tiny")
    assert text is not None
    assert "of parameters on each device of stage 0" in text


def test_sizes_the_plan_does_not_know() -> None:
    plan = plan_for("gpt2-tiny", sequence=8)
    stages = tuple(replace(stage, parameter_bytes=0) for stage in plan.stages)
    unknown = tuple(
        replace(dependency, hops=tuple(replace(hop, bytes=0) for hop in dependency.hops))
        for dependency in plan.dependencies
    )
    assert told(plan.model_copy(update={"stages": stages, "dependencies": unknown}), "gpt2-tiny") is None


def test_programs_say_what_the_plan_expects_to_wait_for_w() -> None:
    """Of each device of a stage, in the profile's bytes; nothing where backward is not split."""
    costs = ShapeCosts(1, None, 1, 2, weight_grad_bytes=7)
    for split in (True, False):
        workload = shape_workload("v", 2, 2, costs=costs, split=split)
        plan = plan_of(workload, gpipe_orders(workload))
        parts = [part for program in planned_programs(plan) for part in program.stages.values()]
        assert [part.waiting_bytes for part in parts] == [7 * split, 7 * split]


def test_it_is_a_warning() -> None:
    plan, model = plan_for("gpt2-tiny", sequence=4), load_model("gpt2-tiny")
    programs = programs_of(plan, [block.id for block in model.blocks], model.edges, model.name)
    said = warning_of_sizes(plan, programs, model, travelling(programs[0], model, torch.float32), torch.float32)
    assert said is not None
    assert said.startswith("warning: the plan expects 512B per sample from stage 0 to 1 and the model sends")
    assert "another --sequence?" in said
