"""Whether model and plan, the ranks with each other, and a checkpoint and the training fit together.

A training is all that its losses depend on, so that only the same training goes on from a checkpoint. Its facts are by
the flag that says them, or by ``WHAT in FLAG`` where they are part of what a flag means. Values are texts, numbers or
None, for flags that were not given. A model of other sizes than its plan's runs, but not in the predicted time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
from torch import nn

from pipeplan.errors import UsageError
from pipeplan.files import Plan, sha256_of
from pipeplan.files.recipe import AUTOCAST
from pipeplan.runtime.executor.message_graph import Message, hops_of
from pipeplan.runtime.executor.process_groups import require_alike
from pipeplan.runtime.executor.rank_program import Program, StagePart
from pipeplan.runtime.executor.tensors import TensorSpec, spec_of
from pipeplan.runtime.launch.status import warn
from pipeplan.runtime.models.shapes import num_whole, output_shapes
from pipeplan.runtime.models.spec import Model
from pipeplan.runtime.parallel import Share
from pipeplan.runtime.parallel.agreement import all_alike
from pipeplan.runtime.parallel.device import gathered
from pipeplan.runtime.parallel.weight_grads import deferrable
from pipeplan.runtime.training.data import fingerprint
from pipeplan.runtime.training.options import DTYPES, FORWARDS_IN, MASTERED, RUNNABLE, TrainOptions
from pipeplan.units import format_bytes
from pipeplan.workload.elements import Stage
from pipeplan.workload.kinds import MASTER, Role, role_of
from pipeplan.workload.mesh import COPIES, EXPERTS, PLACES, SAMPLES, SHARDS, Mesh

_PLANNED_IN = {**RUNNABLE, **FORWARDS_IN}
"""The format of parameters, by recipe."""

_COMPUTES_IN = {AUTOCAST: "bfloat16"}
"""That of activations and messages, where it is another."""

_SAMPLES = 2  # some losses compare samples with each other


def identity_of(model: Model, options: TrainOptions, mini_batch: int) -> dict[str, object]:
    """All facts of a training, the same under every plan of this mini-batch. Raises UsageError."""
    named: dict[str, object] = {"--model": model.name, "--mini-batch": mini_batch}
    return named | options.identity | {"--data": fingerprint(model, options.data)} | _inside(model)


def require_identity(path: Path, saved: Mapping[str, object], own: Mapping[str, object]) -> None:
    """Refuse a checkpoint of another training. Raises UsageError, which names the first fact that differs.

    A sequence that nobody asked for may be the same all the same: shapes of blocks say it.
    """
    for fact in dict.fromkeys([*own, *saved]):
        if fact == "--sequence" and None in (saved.get(fact), own.get(fact)):
            continue
        if saved.get(fact) != own.get(fact):
            raise UsageError(
                f"{path} was trained {_said(fact, saved.get(fact))}, and this run is {_said(fact, own.get(fact))}; "
                "resume with the same, or start anew in another folder"
            )


def _said(fact: str, value: object) -> str:
    """A fact in the user's words."""
    if value is None:
        return f"without {fact}"
    what, inside, flag = fact.rpartition(" in ")
    return f"with {what} {value}{inside}{flag}" if inside else f"with {flag} {value}"


def _inside(model: Model) -> dict[str, object]:
    """What a model's name does not say: settings of its configuration, and what its blocks are, take and make."""
    made = output_shapes(model, _SAMPLES)
    facts = {name: _text(value) for name, value in _flat(model.settings)}
    for block in model.blocks:
        about = {
            block.operator: dict(block.dimensions),
            "takes": [*block.inputs, *block.samples],
            "makes": list(made[block.id][0]),
        }
        facts[f"block {block.id}"] = _text(about)
    return {f"{name} in --model": text for name, text in facts.items()}


def _flat(settings: Mapping[str, object], path: str = "") -> Iterator[tuple[str, object]]:
    """Settings by the path of their names."""
    for key in sorted(settings, key=str):
        value = settings[key]
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _text(value: object) -> str:
    """As canonical JSON."""
    return json.dumps(value, sort_keys=True, default=str)


def warning_of_format(plan: Plan, options: TrainOptions) -> str | None:
    """A warning if parameters, activations with messages, or master copies have other formats than in the plan."""
    recipe = None if plan.recipe is None or plan.recipe.is_custom else plan.recipe.name
    planned = DTYPES.get(plan.provenance.dtype) if recipe is None else _PLANNED_IN.get(recipe, "")
    if planned is None:
        return None  # it says nothing
    own = options.number_format
    held = _Formats(planned, _COMPUTES_IN.get(recipe or "", planned), recipe if recipe in MASTERED else None)
    runs = _Formats(own, options.autocast or own, options.precision if options.keeps_masters and recipe else None)
    if runs == held:
        return None
    flag, how = ("--dtype", own) if options.precision is None else ("--precision", options.precision)
    made_for = plan.provenance.dtype if recipe is None else f"the recipe {recipe}"
    remedy = f"profile with --dtype {own}" if recipe is None else "search with the recipe that is to run"
    return (
        f"warning: the plan is for {made_for} and the run is in {how}: {held.than(runs)}neither the plan's times "
        f"nor its memory are the run's, which may need more than a device has; leave {flag} out, or {remedy}"
    )


def warning_of_overlap(plan: Plan) -> str | None:
    """A warning if the plan hides exchanges that a run waits for: its cluster's ``overlap`` is ``all``."""
    stages = [number for number, stage in enumerate(plan.stages) if stage.zero]
    if plan.provenance.options.get("overlap") != "all" or not stages:
        return None
    return (
        f"warning: the plan's cluster has overlap all: stages that divide their state ({stages[0]} is the first) "
        "gather parameters beside the next forward, and sum gradients between groups beside backward, while a run does "
        "both by themselves and takes that much longer; for a run's times search with overlap sums in the cluster"
    )


class _Formats(NamedTuple):
    """What has as many bytes in a run as in its plan: parameters, what blocks make, and the recipe of master copies."""

    parameters: str
    made: str
    masters: str | None

    def than(self, runs: _Formats) -> str:
        """Where a run has others than these, if names of recipes may not say so."""
        if self.parameters and self.parameters != runs.parameters:
            return f"parameters are in {runs.parameters} instead of {self.parameters}, and "
        if self.made and self.made != runs.made:
            return f"activations and messages are in {runs.made} instead of {self.made}, and "
        return ""


def remark_on_experts(model: Model, parts: Iterable[StagePart], modules: Mapping[Share, nn.Module]) -> str | None:
    """Which experts' weight gradients do not wait for W, where backward is split; None where there are none."""
    found = dict[str, None]()
    for share in chain.from_iterable(part.shares for part in parts if part.split):
        waiting = {id(weight) for child in modules[share].modules() for weight in deferrable(child)}
        held = (modules[share].get_parameter(name) for name in _in_experts(share.block, model))
        if any(id(weight) not in waiting for weight in held):
            found[share.block] = None
    if not found:
        return None
    others = f" and {len(found) - 1} other blocks" if len(found) > 1 else ""
    return (
        f"weight gradients of the experts of {next(iter(found))!r}{others} are computed with I and not with W, as "
        "where they are profiled"
    )


def warn_of_waiting(lacks: Sequence[tuple[int, float, str]]) -> None:
    """Say on standard error, in one line, of which stages less than half of what is planned waits for W."""
    if lacks:
        waiting, expected, stage = max(lacks, key=lambda each: each[1] - each[0])
        others = f" (and {len(lacks) - 1} other stages leave less than half of it)" if len(lacks) > 1 else ""
        warn(
            f"{stage} leaves {format_bytes(waiting)} of a micro-batch to W and the plan expects "
            f"{format_bytes(round(expected))}{others}: more weight gradients than it knows are computed with I, which "
            "then takes longer; profile the model as it runs, leave torch.compile out, or search with "
            "--split-backward no"
        )


_FORMATS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""How many times larger a number may be in the run's format than in the profile's."""

_TOLERANCE = 0.01


def warning_of_sizes(
    plan: Plan, programs: Sequence[Program], model: Model, specs: Mapping[str, TensorSpec], dtype: torch.dtype
) -> str | None:
    """What :func:`other_sizes` finds, and what that means. Plans of closed forms are approximate, so nothing stops."""
    found = other_sizes(plan, programs, model, specs, dtype)
    return found and (
        f"warning: {found}: was it profiled with another --sequence? The model runs as it is, but predicted times and "
        "memory are not those of this model"
    )


def other_sizes(
    plan: Plan, programs: Sequence[Program], model: Model, specs: Mapping[str, TensorSpec], dtype: torch.dtype
) -> str | None:
    """The first message or stage whose bytes differ between plan and model; None where none does.

    Plans do not say the profile's number format. Where the parameters of some stage have what another format explains,
    everything must agree with it; else any format may. What the plan knows no bytes of is left out. ``dtype`` is that
    of parameters; what autocast makes shorter counts as if it were not.
    """
    held = {index: sizes for index, sizes in enumerate(_parameters(plan, model, dtype)) if min(sizes) > 0}
    alike = not any(stage.state[MASTER] for stage in plan.stages)  # else messages have another format than parameters
    fitting = {fit for sizes in held.values() for fit in _FORMATS if _agree(sizes, (fit,))}
    formats = fitting if fitting and alike else set(_FORMATS)
    for message, samples, sizes in _messages(plan, programs, specs, dtype):
        if not _agree(sizes, formats):
            planned, sent = (format_bytes(size / samples) for size in sizes)
            way = f"from stage {message.source} to {message.target}"
            return f"the plan expects {planned} per sample {way} and the model sends {sent}"
    for index, sizes in held.items():
        if not _agree(sizes, formats):
            planned, found = map(format_bytes, sizes)
            return f"the plan expects {planned} of parameters on each device of stage {index} and the model has {found}"
    return None


def _agree(sizes: tuple[float, float], formats: Collection[float]) -> bool:
    planned, found = sizes
    return any(abs(found - planned * fit) <= _TOLERANCE * planned * fit for fit in formats)


def _parameters(plan: Plan, model: Model, dtype: torch.dtype) -> Iterator[tuple[float, float]]:
    """Bytes on each device of a stage, by the plan and by the model.

    What blocks of a stage share counts once; with each of them, if only then it is what the plan has: profiles of
    version 1 do not say what is shared. In the same way what devices that split a block do not cut is whole on each of
    them, or cut as all else, as profiles have it that do not say.
    """
    shapes = model.parameter_shapes()
    sizes = {holder: math.prod(shape) * dtype.itemsize for holder, shape in shapes.items()}
    for stage in plan.stages:
        meshes = {block: stage.mesh_of(n) for n, block in enumerate(stage.blocks)}
        parts = {block: _num_parts(mesh) for block, mesh in meshes.items()}
        even = {holder: size / parts[holder[0]] for holder, size in sizes.items() if holder[0] in parts}
        held = {holder: size + _beyond(model, holder, sizes[holder], meshes) for holder, size in even.items()}
        planned = plan.held_parameters(stage)
        found = [size for each in (held, even) for size in _of_stage(stage, model, sizes, each)]
        yield planned, next((size for size in found if _agree((planned, size), _FORMATS)), found[0])


_Holder: TypeAlias = tuple[str, str]
"""A block and the name of a parameter in it."""


def _of_stage(
    stage: Stage, model: Model, sizes: Mapping[_Holder, int], held: Mapping[_Holder, float]
) -> tuple[float, float]:
    """Bytes on each of a stage's devices, of what each has of every parameter: shared ones once, and as often."""
    every = sum(held.values())
    for number, block in enumerate(stage.blocks):
        if (experts := max(stage.expert, stage.mesh_of(number).size_of(EXPERTS))) > 1:
            every += sum(sizes[block, name] / experts - held[block, name] for name in _in_experts(block, model))
    own = [[holder for holder in group if holder in held] for group in model.tied]
    return every - sum(held[holder] for holders in own for holder in holders[1:]), every


def _beyond(model: Model, holder: _Holder, size: int, meshes: Mapping[str, Mesh]) -> float:
    """Bytes of a parameter that each device of its block's mesh has beyond its even part, where shards alone split."""
    parts, shards = _num_parts(meshes[holder[0]]), meshes[holder[0]].size_of(SHARDS)
    return num_whole(model.block(holder[0]), holder[1], size) * (1 - 1 / parts) if parts == shards else 0.0


def _in_experts(block: str, model: Model) -> tuple[str, ...]:
    """Of a block's parameters those that devices can share as experts."""
    split = model.block(block).splits.get(EXPERTS)
    return () if split is None else tuple(split.cuts)


def _num_parts(mesh: Mesh) -> int:
    """Into how many parts a block's parameters are cut, but for experts."""
    parts, _ = mesh.plane_without((SAMPLES, PLACES, COPIES, EXPERTS), 0)
    return parts.size


def _messages(
    plan: Plan, programs: Sequence[Program], specs: Mapping[str, TensorSpec], dtype: torch.dtype
) -> Iterator[tuple[Message, int, tuple[float, float]]]:
    """Outputs that go from stage to stage, with the samples of their longest message and its bytes, as above."""
    longest: dict[tuple[Message, int, int], int] = {}
    by_rank = {program.rank: program for program in programs}
    for program in programs:
        for step in program.steps:
            action, message = step.action, step.message
            if message is not None and action.kind == "SEND_F" and action.part is None:
                ends = (message, program.rank, step.peer)
                longest[ends] = max(longest.get(ends, 0), len(step.samples[0]))
    for (message, source, target), hop in hops_of(plan).items():
        samples = longest.get((message, source, target), 0)
        if samples and hop.bytes:
            keys = by_rank[source].keys(message)
            yield message, samples, (hop.bytes, sum(_bytes(spec_of(specs, key), samples, dtype) for key in keys))


def _bytes(spec: TensorSpec, samples: int, dtype: torch.dtype) -> int:
    each = dtype if spec.dtype.is_floating_point else spec.dtype
    return torch.Size(spec.of(samples)).numel() * each.itemsize


def require_splittable(plan: Plan, model: Model) -> None:
    """Check that the model's blocks can be split as the plan says. Raises UsageError, which names block and stage."""
    _require_shared_experts(plan, model)
    for index, stage in enumerate(plan.stages):
        for number, block in enumerate(stage.blocks) if stage.shards * stage.context > 1 else ():
            try:
                model.require_splittable(block, stage.mesh_of(number), stage.context)
            except UsageError as error:
                raise UsageError(
                    f"stages[{index}] splits its blocks over {stage.shards * stage.context} devices, and {error}; "
                    f"{_remedy(stage)}"
                ) from None


def _require_shared_experts(plan: Plan, model: Model) -> None:
    """Check that the model has experts that devices can share, if the plan has some, and that they can."""
    found = False
    for index, stage in enumerate(plan.stages):
        for block in stage.blocks if stage.expert > 1 else ():
            try:
                found |= model.require_shared_experts(block, stage.expert, stage.shards, stage.expert_shards)
            except UsageError as error:
                raise UsageError(f"stages[{index}] has expert {stage.expert}, and {error}") from None
    most = max(stage.expert for stage in plan.stages)
    if most > 1 and not found:
        raise UsageError(
            f"the plan has experts on {most} devices each, and no block of model {model.name!r} there has experts that "
            "devices could share; give the model of the plan's profile, or search with --ep 1"
        )


def _remedy(stage: Stage) -> str:
    """What to do about a stage whose blocks the model cannot split: strategies come from frontiers, shards do not."""
    if stage.configurations:
        return (
            "write another point of the frontier (pipeplan frontier --point), or train the model of the profile that "
            "it was made from"
        )
    return (
        "search with --tp 1 --shard-shared no or another --placement, give the stage replicas instead of shards, or "
        "train a model of the zoo"
    )


def require_agreement(
    rank: int, plan: Plan, model: Model, options: TrainOptions, program: Program, specs: dict[str, TensorSpec]
) -> None:
    """Refuse to start where ranks run different things; the same error on every rank.

    Transports do not compare what they carry: a wrong size ends the process, a wrong format goes unnoticed.
    """
    carried = {
        f"{message.payload} {message.source} {message.target}": [
            f"{key} {spec_of(specs, key).text(program.microbatch_size)}" for key in program.keys(message)
        ]
        for message, _, _ in program.remote
    }
    require_alike({"plan": sha256_of(plan), **options.said(), "model": model.name})
    every = (f"{message.payload} {message.source} {message.target}" for message in sorted(program.tensors))
    if all_alike([str(carried[name]) if name in carried else None for name in every]):
        return
    ends: dict[str, tuple[int, list[str]]] = {}
    for other, messages in enumerate(gathered(carried)):
        for message, tensors in messages.items():
            first, expected = ends.setdefault(message, (other, tensors))
            if tensors != expected:
                payload, source, target = message.split()
                named = {Role.FORWARD: "outputs", Role.BACKWARD: "gradients"}
                what = named.get(role_of(payload), f"outputs after {payload}")
                raise UsageError(
                    f"ranks {first} and {other} expect different {what} between stages {source} and {target}: "
                    f"{', '.join(expected)} and {', '.join(tensors)}; the model must be the same on all ranks"
                )
