"""Plans in the words of other tools: exact, read back and compared; or refused with the place in the plan."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from pipeplan.catalog import ExportTarget, export_target, names
from pipeplan.errors import UsageError, choose_from
from pipeplan.files import Plan
from pipeplan.interop import megatron
from pipeplan.interop.layer_lists import device_map, layer_list, read_device_map, read_layer_list, read_names
from pipeplan.interop.layers import PlanLayers, again_of_layers, layers_of
from pipeplan.interop.settings import (
    MEGATRON_FULL,
    MEGATRON_SELECTIVE,
    divides_sequence,
    megatron_block,
    megatron_sizes,
    megatron_zero,
)


@dataclass(frozen=True, slots=True)
class Export:
    """A plan as a tool reads it: ``text``, and ``notes`` on what the tool does its own way."""

    target: str
    text: str
    notes: tuple[str, ...]

    def __str__(self) -> str:
        return self.text


def export_targets() -> list[str]:
    """The targets that there is a writer for."""
    return [name for name in names("targets") if _writer(name, export_target(name)) is not None]


def exported(plan: Plan, to: str, template: Sequence[str] = ()) -> Export:
    """A plan in a target's words; ``template`` names the modules, where the target is told names.

    Raises:
        UsageError: there is no such target, or it cannot run the plan; the text has the place in the plan.
    """
    if to not in names("targets"):
        raise UsageError(f"there is no target {to!r}; {choose_from(to, export_targets())}")
    target = export_target(to)
    write = _writer(to, target)
    if write is None:
        raise UsageError(f"plans are not written for {target.title} yet; choose from {', '.join(export_targets())}")
    if template and not target.names:
        raise UsageError(f"--names is for targets that are told names of modules, and {target.title} is not")
    layers = layers_of(plan, target)
    text = write(plan, layers, target, template or target.names)
    return Export(to, text, tuple(_notes(plan, layers, target, bool(template))))


_Write = Callable[[Plan, PlanLayers, ExportTarget, Sequence[str]], str]


def _writer(name: str, target: ExportTarget) -> _Write | None:
    """What writes for a target."""
    return _layer_list if target.layer_list is not None else _WRITERS.get(name)


def _layer_list(plan: Plan, layers: PlanLayers, target: ExportTarget, template: Sequence[str]) -> str:
    text = layer_list(layers, target)
    _require_same(read_layer_list(text), [stage.count for stage in layers.stages])
    return text


def _device_map(plan: Plan, layers: PlanLayers, target: ExportTarget, template: Sequence[str]) -> str:
    modules = read_names(template)
    text = device_map(plan, layers, modules)
    placed = [
        (stage.first + index, layers.groups[rank][0])
        for stage, rank in zip(layers.stages, layers.ranks, strict=True)
        for index in range(stage.count)
    ]
    together = [([layer for layer, _ in same], device) for device, same in groupby(placed, key=lambda each: each[1])]
    _require_same(read_device_map(text, modules), together)
    return text


def _megatron(plan: Plan, layers: PlanLayers, target: ExportTarget, template: Sequence[str]) -> str:
    """The layout alone on the first line, bare, then the arguments, one per line, as a shell takes them."""
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
    arguments += [*_zero(plan), *_recomputation(plan)]
    if not plan.tied:
        arguments.append("--untie-embeddings-and-output-weights")
    _require_same(megatron.read_layout(line), layout)
    megatron.require_layout(layout, positions, layers.count)
    return "\n".join([line, *arguments]) + "\n"


_WRITERS: dict[str, _Write] = {"huggingface": _device_map, "megatron": _megatron}


def _zero(plan: Plan) -> list[str]:
    stage = plan.stages[0]
    if stage.zero > 1:
        raise UsageError(
            f"stages[0].zero is {stage.zero}: Megatron-LM's pipeline divides the optimizer's state alone (ZeRO 1); "
            "search with --zero 1"
        )
    return megatron_zero(stage)


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


def _notes(plan: Plan, layers: PlanLayers, target: ExportTarget, own_names: bool) -> Iterator[str]:
    """What of the plan the target does its own way, for a person."""
    stage = plan.stages[0]
    if target.names and not own_names:
        yield f"the plan has no module names; assuming Llama's ({', '.join(target.names)}); --names changes them"
    if not target.trains:
        yield f"{target.title} is told where layers are, and not the plan's schedule or its training state"
    if target.trains and stage.shards > 1 and not divides_sequence(plan):
        yield (
            "the plan does not say that its costs are with the sequence divided, too; if they are, as those of older "
            "plans may be (profile --show --details: tp with *), add --sequence-parallel"
        )
    if not target.trains and stage.replicas > 1:
        yield f"this is one pipeline, and the plan has {stage.replicas} of them (data parallel)"
    for tied in plan.tied:
        where = ", ".join(f"stages[{number}]" for number in tied.stages)
        if len(tied.all_devices) > len(stage.devices) and target.tied:
            yield f"{tied.name!r} is shared by {where}; {target.title} has {target.tied}"
    missing = [
        what
        for what, there in (
            ("embedding before the first layer", layers.stages[0].beginning),
            ("head after the last layer", layers.stages[-1].end),
        )
        if not there
    ]
    if missing:
        yield f"the plan has no {' and no '.join(missing)}; {target.title} has it on the stage of the layer beside it"
    in_order = [device for group in layers.groups for device in group]
    if in_order != list(range(len(in_order))) and target.placements is not None:
        groups = "; ".join(f"rank {rank} on {', '.join(map(str, group))}" for rank, group in enumerate(layers.groups))
        yield f"the plan's pipeline ranks are not in the order of its devices: {groups}; number the devices so"
    empty = [str(number) for number, each in enumerate(layers.stages) if not each.count]
    if empty:
        yield f"stage {empty[0]} has no layer" if len(empty) == 1 else f"stages {', '.join(empty)} have no layer"
