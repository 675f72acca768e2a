"""Plans in the words of other tools: exact, read back and compared; or refused with the place in the plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from pipeplan.catalog import ExportTarget, export_target, names
from pipeplan.errors import UsageError, choose_from
from pipeplan.files import Plan
from pipeplan.files.profile import EAGER
from pipeplan.interop.layers import PlanLayers
from pipeplan.interop.ranks import PlanRanks
from pipeplan.interop.settings import divides_sequence
from pipeplan.interop.writers import Asked, writer_of
from pipeplan.simulator.simulation import simulate
from pipeplan.units import format_bytes, format_ns
from pipeplan.workload.folding import devices_of


@dataclass(frozen=True, slots=True)
class Export:
    """A plan as a tool reads it: ``text``, and ``notes`` on what the tool does its own way.

    ``beside`` are further files, each by what its name has after the name of the first: ``.modules.json``. A target
    that takes a folder has all of them in ``files``, by name, and the first is ``text``.
    """

    target: str
    text: str
    notes: tuple[str, ...]
    beside: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str | bytes] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        """What notebooks show: the text, and below it the notes."""
        return "".join(f"<pre>{escape(each)}</pre>" for each in (self.text, *self.notes))


def export_targets() -> list[str]:
    """The targets that there is a writer for."""
    return [name for name in names("targets") if writer_of(name, export_target(name)) is not None]


def exported(plan: Plan, to: str, template: Sequence[str] = (), base: str | None = None) -> Export:
    """A plan in a target's words; ``template`` names the modules, where the target is told names.

    ``base`` (``pkg.mod:function``) is the user's own recipe, for targets that are given one.

    Raises:
        UsageError: there is no such target, or it cannot run the plan; the text has the place in the plan.
    """
    if to not in names("targets"):
        raise UsageError(f"there is no target {to!r}; {choose_from(to, export_targets())}")
    target = export_target(to)
    write = writer_of(to, target)
    if write is None:
        raise UsageError(f"plans are not written for {target.title} yet; choose from {', '.join(export_targets())}")
    if template and not target.names:
        raise UsageError(f"--names is for targets that take module names, and {target.title} is not")
    if base is not None and to != "torchtitan":
        raise UsageError(f"--base names a recipe of torchtitan, and {target.title} takes none; leave it out")
    if plan.is_inference and target.trains and to not in _OF_ANY_ACTIONS:
        raise UsageError(
            f"plan {plan.name!r} is of inference, and {target.title} trains; choose vllm, sglang or tensorrt-llm, or "
            "search a profile of training"
        )
    if plan.decode is not None and to in _OF_ANY_ACTIONS:
        raise UsageError(
            f"plan {plan.name!r} is a loop of decode steps, whose tokens return to the first stage, which "
            f"{target.title} has no words for; choose vllm, sglang or tensorrt-llm, or pipeplan run --prompt-file"
        )
    written = write(plan, target, Asked(template, base))
    notes = written.notes if written.ranks is None else (*written.notes, *_notes(plan, written.ranks, target))
    backends = dict.fromkeys(name for stage in plan.stages for name in stage.backends if name != EAGER)
    if backends:
        by = ", ".join(backends)
        notes = (*notes, f"the plan's times are of blocks that {by} runs; {target.title} runs all of them its own way")
    return Export(to, written.text, notes, written.beside, written.files)


_OF_ANY_ACTIONS = ("torch", "chakra")
"""Targets that are told a plan's actions, whatever these are."""


def _notes(plan: Plan, ranks: PlanRanks, target: ExportTarget) -> Iterator[str]:
    """What of the plan the target does its own way, for a person."""
    stage = plan.stages[0]
    if not target.trains:
        yield f"{target.title} only learns where the layers are, not the plan's schedule or training state"
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
    on_devices = [devices_of(plan.players, group) if plan.players else group for group in ranks.groups]
    in_order = [device for group in on_devices for device in group]
    if in_order != list(range(len(in_order))) and target.placements is not None:
        groups = "; ".join(f"rank {rank} on {', '.join(map(str, group))}" for rank, group in enumerate(on_devices))
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
        yield f"the plan has no {' and no '.join(missing)}; {target.title} puts it on the neighbouring layer's stage"
    empty = [str(number) for number, each in enumerate(layers.stages) if not each.count]
    if empty:
        yield f"stage {empty[0]} has no layer" if len(empty) == 1 else f"stages {', '.join(empty)} have no layer"
