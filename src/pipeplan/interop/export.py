"""Plans in the words of other tools: exact, read back and compared; or refused with the place in the plan."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pipeplan.catalog import ExportTarget, export_target, names
from pipeplan.errors import UsageError, choose_from
from pipeplan.files import Modules, Plan, parse, to_json
from pipeplan.interop import megatron, torch_schedule
from pipeplan.interop.layer_lists import device_map, layer_list, read_device_map, read_layer_list
from pipeplan.interop.layers import PlanLayers, again_of_layers, layers_of
from pipeplan.interop.names import names_by_template, own_names, read_names
from pipeplan.interop.ranks import PlanRanks, ranks_of
from pipeplan.interop.settings import (
    MEGATRON_FULL,
    MEGATRON_SELECTIVE,
    divides_sequence,
    megatron_block,
    megatron_sizes,
    megatron_zero,
)
from pipeplan.simulator.simulation import simulate
from pipeplan.units import format_bytes, format_ns


@dataclass(frozen=True, slots=True)
class Export:
    """A plan as a tool reads it: ``text``, and ``notes`` on what the tool does its own way.

    ``beside`` are further files, each by what its name has after the name of the first: ``.modules.json``.
    """

    target: str
    text: str
    notes: tuple[str, ...]
    beside: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class _Written:
    """What a writer made of a plan, of whose ranks, or layers by rank."""

    text: str
    ranks: PlanRanks
    beside: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


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
    written = write(plan, target, template)
    notes = (*written.notes, *_notes(plan, written.ranks, target))
    return Export(to, written.text, notes, written.beside)


_Write = Callable[[Plan, ExportTarget, Sequence[str]], _Written]


def _writer(name: str, target: ExportTarget) -> _Write | None:
    """What writes for a target."""
    return _layer_list if target.layer_list is not None else _WRITERS.get(name)


def _layer_list(plan: Plan, target: ExportTarget, template: Sequence[str]) -> _Written:
    layers = layers_of(plan, target)
    text = layer_list(layers, target)
    _require_same(read_layer_list(text), [stage.count for stage in layers.stages])
    return _Written(text, layers)


def _device_map(plan: Plan, target: ExportTarget, template: Sequence[str]) -> _Written:
    layers = layers_of(plan, target)
    names, said = _names_of_stages(plan, target, template)
    text = device_map(plan, layers, names)
    devices = {name: layers.groups[rank][0] for own, rank in zip(names, layers.ranks, strict=True) for name in own}
    _require_same(read_device_map(text), devices)
    return _Written(text, layers, notes=said)


def _megatron(plan: Plan, target: ExportTarget, template: Sequence[str]) -> _Written:
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
    arguments += [*_zero(plan), *_recomputation(plan)]
    if not plan.tied:
        arguments.append("--untie-embeddings-and-output-weights")
    _require_same(megatron.read_layout(line), layout)
    megatron.require_layout(layout, positions, layers.count)
    return _Written("\n".join([line, *arguments]) + "\n", layers)


def _torch(plan: Plan, target: ExportTarget, template: Sequence[str]) -> _Written:
    """The schedule, and beside it which modules the stages are."""
    ranks = ranks_of(plan, target)
    orders = torch_schedule.orders_of(plan, ranks, target)
    text = torch_schedule.csv_text(orders)
    _require_same(torch_schedule.read_csv(text), orders)
    names: Sequence[Sequence[str] | None]
    try:
        names, said = _names_of_stages(plan, target, template)
    except UsageError as error:
        if template:
            raise
        names, said = [None] * len(plan.stages), (f"stages have no names of modules: {error}",)
    modules = torch_schedule.modules_of(plan, ranks, names)
    beside = to_json(modules)
    _require_same(parse(beside, Modules), modules)
    return _Written(text, ranks, {torch_schedule.MODULES_ENDING: beside}, said)


def _names_of_stages(
    plan: Plan, target: ExportTarget, template: Sequence[str]
) -> tuple[list[list[str]], tuple[str, ...]]:
    """[stage] its modules: by a template that was given, else by the plan, else by the target's; and which is assumed.

    Raises:
        UsageError: by a template, and the stages are not of whole layers.
    """
    if not template and (found := own_names(plan)):
        return found, ()
    by = template or target.names
    assumed = f"the plan has no module names; assuming {target.title}'s ({', '.join(by)}); --names changes them"
    return names_by_template(layers_of(plan, target), read_names(by)), () if template else (assumed,)


_WRITERS: dict[str, _Write] = {"huggingface": _device_map, "megatron": _megatron, "torch": _torch}


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


def _notes(plan: Plan, ranks: PlanRanks, target: ExportTarget) -> Iterator[str]:
    """What of the plan the target does its own way, for a person."""
    stage = plan.stages[0]
    if not target.trains:
        yield f"{target.title} is told where layers are, and not the plan's schedule or its training state"
    if target.trains and stage.shards > 1 and not divides_sequence(plan):
        yield (
            "the plan does not say that its costs are with the sequence divided, too; if they are, as those of older "
            "plans may be (profile --show --details: tp with *), add --sequence-parallel"
        )
    if not target.trains and stage.replicas > 1:
        yield f"this is one pipeline, and the plan has {stage.replicas} of them (data parallel)"
    yield from _of_tied(plan, target)
    if isinstance(ranks, PlanLayers):
        yield from _of_ends(ranks, target)
    in_order = [device for group in ranks.groups for device in group]
    if in_order != list(range(len(in_order))) and target.placements is not None:
        groups = "; ".join(f"rank {rank} on {', '.join(map(str, group))}" for rank, group in enumerate(ranks.groups))
        yield f"the plan's pipeline ranks are not in the order of its devices: {groups}; number the devices so"


def _of_tied(plan: Plan, target: ExportTarget) -> Iterator[str]:
    """What becomes of tables that stages share, and of the plan's time and memory by that."""
    apart = [tied for tied in plan.tied if len(set(tied.stages)) > 1 and not tied.is_sum]
    for tied in apart:
        where = ", ".join(f"stages[{number}]" for number in dict.fromkeys(tied.stages))
        if target.tied and (not target.sums_tied or len(tied.all_devices) > len(plan.stages[0].devices)):
            yield f"{tied.name!r} is shared by {where}; {target.title} has {target.tied}"
    if apart and target.tied and target.trains and not target.sums_tied:
        here, there = simulate(plan), simulate(plan.model_copy(update={"tied": (), "sum_order": ()}))
        most = [max(memory.peak_bytes for memory in each.memory) for each in (here, there)]
        yield (
            f"an iteration without these sums takes {format_ns(there.iteration_ns)} (the plan: "
            f"{format_ns(here.iteration_ns)}), and the fullest device holds {format_bytes(most[1])} (the plan: "
            f"{format_bytes(most[0])})"
        )


def _of_ends(layers: PlanLayers, target: ExportTarget) -> Iterator[str]:
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
    empty = [str(number) for number, each in enumerate(layers.stages) if not each.count]
    if empty:
        yield f"stage {empty[0]} has no layer" if len(empty) == 1 else f"stages {', '.join(empty)} have no layer"
