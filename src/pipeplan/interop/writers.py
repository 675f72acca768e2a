"""What writes for each target, reads back what it wrote, and compares."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pipeplan.catalog import ExportTarget
from pipeplan.errors import UsageError
from pipeplan.files import Modules, Plan, parse, to_json
from pipeplan.interop import deepspeed, galvatron, megatron, recipes, torch_schedule
from pipeplan.interop.chakra.traces import GROUPS, traces_of
from pipeplan.interop.layer_lists import device_map, first_devices, layer_list, read_device_map, read_layer_list
from pipeplan.interop.layers import PlanLayers, again_of_layers, layers_of, require_again
from pipeplan.interop.names import names_by_template, own_names, read_names
from pipeplan.interop.ranks import PlanRanks, ranks_of, require_state
from pipeplan.interop.settings import (
    MEGATRON_FULL,
    MEGATRON_SELECTIVE,
    divides_sequence,
    megatron_block,
    megatron_sizes,
    megatron_zero,
)


@dataclass(frozen=True, slots=True)
class Asked:
    """What is said beside the plan: a ``template`` of modules, and a ``base`` recipe."""

    template: Sequence[str] = ()
    base: str | None = None


@dataclass(frozen=True, slots=True)
class Written:
    """What a writer made of a plan, of whose ranks, or layers by rank; files as :class:`Export` has them.

    Without ranks every device is one, and the target runs it as it stands in the plan.
    """

    text: str
    ranks: PlanRanks | None
    beside: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    files: Mapping[str, str | bytes] = field(default_factory=dict)


Write = Callable[[Plan, ExportTarget, Asked], Written]

_TOP = re.compile(r"[A-Za-z_]\w*(\.\d+)?")
"""A child of the model, or an item of a list that is one."""


def writer_of(name: str, target: ExportTarget) -> Write | None:
    """What writes for a target; None if nothing does yet."""
    return _layer_list if target.layer_list is not None else _WRITERS.get(name)


def _layer_list(plan: Plan, target: ExportTarget, asked: Asked) -> Written:
    layers = layers_of(plan, target)
    text = layer_list(layers, target)
    _require_same(read_layer_list(text), [stage.count for stage in layers.stages])
    return Written(text, layers)


def _device_map(plan: Plan, target: ExportTarget, asked: Asked) -> Written:
    layers = layers_of(plan, target)
    names, said = _names_of_stages(plan, target, asked.template)
    text = device_map(plan, names)
    _require_same(read_device_map(text), first_devices(plan, names))
    return Written(text, layers, notes=said)


def _megatron(plan: Plan, target: ExportTarget, asked: Asked) -> Written:
    """The layout alone on the first line, bare, then the arguments, one per line, as a shell takes them."""
    layers = layers_of(plan, target)
    layout, positions = megatron.layout_of(layers), len(layers.groups)
    line = megatron.layout_text(layout)
    group = megatron.group_size(plan, layers)
    arguments = [
        f"--num-layers {layers.count}",
        *megatron_sizes(plan.workload, positions, divided=divides_sequence(plan)),
        f"--pipeline-model-parallel-layout {shlex.quote(line)}",
    ]
    if layers.chunks > 1 and group != positions:
        arguments.append(f"--microbatch-group-size-per-virtual-pipeline-stage {group}")
    require_state(plan, target)
    arguments += [*megatron_zero(plan.stages[0]), *_recomputation(plan)]
    if not plan.tied:
        arguments.append("--untie-embeddings-and-output-weights")
    _require_same(megatron.read_layout(line), layout)
    megatron.require_layout(layout, positions, layers.count)
    return Written("\n".join([line, *arguments]) + "\n", layers)


def _torch(plan: Plan, target: ExportTarget, asked: Asked) -> Written:
    """The schedule, and beside it which modules the stages are."""
    ranks = ranks_of(plan, target)
    orders = torch_schedule.orders_of(plan, ranks, target)
    text = torch_schedule.csv_text(orders)
    _require_same(torch_schedule.read_csv(text), orders)
    names: Sequence[Sequence[str] | None]
    try:
        names, said = _names_of_stages(plan, target, asked.template)
    except UsageError as error:
        if asked.template:
            raise
        names, said = [None] * len(plan.stages), (f"stages have no names of modules: {error}",)
    modules = torch_schedule.modules_of(plan, ranks, names)
    beside = to_json(modules)
    _require_same(parse(beside, Modules), modules)
    return Written(text, ranks, {torch_schedule.MODULES_ENDING: beside}, said)


def _names_of_stages(
    plan: Plan, target: ExportTarget, template: Sequence[str]
) -> tuple[list[list[str]], tuple[str, ...]]:
    """[stage] its modules: by a template that was given, else by the plan, else by the target's; and which is assumed.

    Raises:
        UsageError: by a template, and the stages are not of whole layers.
    """
    found = None if template else own_names(plan)
    if found and not (target.top_level and any(not _TOP.fullmatch(name) for own in found for name in own)):
        return found, ()
    by = template or target.names
    none = "the plan's module names are of another model" if found else "the plan has no module names"
    assumed = f"{none}; assuming {target.title}'s ({', '.join(by)}); --names changes them"
    return names_by_template(layers_of(plan, target), read_names(by)), () if template else (assumed,)


def _recomputation(plan: Plan) -> Sequence[str]:
    for number, stage in enumerate(plan.stages):
        if stage.cuts:
            raise UsageError(f"stages[{number}].cuts: Megatron-LM waits for all inputs; search with --late-inputs no")
    by_stage = again_of_layers(plan, "Megatron-LM")
    kinds = {again for layers in by_stage for again in layers}
    if len(kinds) == 1:
        return {True: MEGATRON_FULL, "selective": MEGATRON_SELECTIVE, False: ()}[kinds.pop()]
    most = next((layers.count(True) for layers in by_stage if False in layers), 0)  # a stage with fewer: all of its
    for number, layers in enumerate(by_stage):
        if layers != [index < most for index in range(len(layers))]:
            raise UsageError(
                f"stages[{number}].recompute: Megatron-LM recomputes all layers alike, or the first few of each stage, "
                "as many in all; search with --recompute all, selective or none"
            )
    return megatron_block(most)


def _require_same(read: object, written: object) -> None:
    """What was written means what the plan says; anything else is a mistake of ours."""
    if read != written:
        raise AssertionError(f"an export reads as {read}, and was written for {written}")


def _torchtitan(plan: Plan, target: ExportTarget, asked: Asked) -> Written:
    """A recipe, and the schedule that it reads."""
    layers, names, said, schedule, text = _around_csv(plan, target, asked)
    recipe = recipes.torchtitan_recipe(plan, names, schedule, asked.base)
    _require_same(_assigned(recipe, "MODULES"), names)
    files = {"planned.py": recipe, recipes.SCHEDULE: text}
    more = (
        () if asked.base else ("the recipe has no model; --base pkg.mod:function names yours",),
        ("attention cores are recomputed by the plan, and torchtitan chooses by operations (SelectiveAC)",)
        if any(again == "selective" for stage in plan.stages for again in stage.again)
        else (),
    )
    return Written(recipe, layers, notes=(*said, *(note for notes in more for note in notes)), files=files)


def _automodel(plan: Plan, target: ExportTarget, asked: Asked) -> Written:
    """Blocks of a recipe, and the schedule that they name."""
    layers, names, said, schedule, text = _around_csv(plan, target, asked)
    if not asked.template:
        names = [[*own, *target.names_everywhere] for own in names]
        said = (*said, f"every stage has {', '.join(target.names_everywhere)}, too, as AutoModel's own lists do")
    recipe = recipes.automodel_recipe(plan, names, schedule)
    _require_same([ast.literal_eval(found) for found in re.findall(r"^    - (\[.*\])$", recipe, re.M)], names)
    return Written(recipe, layers, notes=said, files={"recipe.yaml": recipe, recipes.SCHEDULE: text})


def _around_csv(
    plan: Plan, target: ExportTarget, asked: Asked
) -> tuple[PlanLayers, list[list[str]], tuple[str, ...], str, str]:
    """Layers, names of stages and what is assumed of them, a schedule's name for where they stand, the schedule."""
    layers = layers_of(plan, target)
    require_state(plan, target)
    require_again(plan, target)
    orders = torch_schedule.orders_of(plan, layers, target)
    text = torch_schedule.csv_text(orders)
    _require_same(torch_schedule.read_csv(text), orders)
    names, said = _names_of_stages(plan, target, asked.template)
    return layers, names, said, recipes.schedule_name(layers.ranks, len(layers.groups)), text


def _deepspeed(plan: Plan, target: ExportTarget, asked: Asked) -> Written:
    layers = layers_of(plan, target)
    require_state(plan, target)
    require_again(plan, target)
    megatron.group_size(plan, layers, target)
    text = deepspeed.pipeline_module(layers)
    _require_same(_assigned(text, "PARTS"), deepspeed.parts_of(layers))
    sizes = f"num_stages={len(layers.stages)}, partition_method is not read"
    return Written(text, layers, notes=(f"PipelineModule gets {sizes}; your list of layers has one entry each",))


def _galvatron(plan: Plan, target: ExportTarget, asked: Asked) -> Written:
    layers = layers_of(plan, target)
    found = galvatron.configuration(plan, layers, target)
    text = galvatron.configuration_text(found)
    _require_same(json.loads(text), found)
    _require_same(read_layer_list(found["pp_division"]), [stage.count for stage in layers.stages])
    return Written(text, layers)


def _assigned(text: str, name: str) -> object:
    """What a module of Python gives a name, which is read and not run."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == name:
            return ast.literal_eval(node.value)
    return None


def _chakra(plan: Plan, target: ExportTarget, asked: Asked) -> Written:
    """Every device is a rank, and stages may stand anywhere."""
    made = traces_of(plan)
    groups = made.files[GROUPS]
    assert isinstance(groups, str)
    return Written(groups, None, notes=made.notes, files=made.files)


_WRITERS: dict[str, Write] = {
    "automodel": _automodel,
    "chakra": _chakra,
    "deepspeed": _deepspeed,
    "galvatron": _galvatron,
    "huggingface": _device_map,
    "megatron": _megatron,
    "torch": _torch,
    "torchtitan": _torchtitan,
}
