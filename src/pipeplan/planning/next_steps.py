"""What to try after a search, each with what it would bring where that is known."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from pipeplan.costs import build_workload
from pipeplan.costs.devices import device_meant
from pipeplan.costs.zero import AUTO
from pipeplan.errors import PipeplanError
from pipeplan.files import File, Placement, Plan, Profile
from pipeplan.planning.build_plan import Result
from pipeplan.planning.candidates import PlacementCandidate, has_table, is_large, sharing, uniform_choices
from pipeplan.planning.divided_state import divides_by_default
from pipeplan.planning.request import Batch, Request
from pipeplan.planning.steps import placement_bound
from pipeplan.search_constants import LEAST_ESTIMATED, LEAST_GAIN, REPLAYED_ACTIONS, REPLAYED_LATE, UNSEARCHED
from pipeplan.simulator.simulation import Simulation, simulate
from pipeplan.texts import counted
from pipeplan.units import format_bytes, format_ns, named_devices
from pipeplan.workload.workload import Workload


@dataclass(frozen=True, slots=True)
class NextStep:
    """A flag or a command, and what it brings, in words; those with more ``weight`` go first."""

    what: str
    brings: str
    weight: float = 0.0


def next_steps(
    request: Request, result: Result, simulation: Simulation, written: str | None, keep: str = "-o plan.json"
) -> list[NextStep]:
    """What applies to a search and its plan: what is known to bring most first, those of unknown gain last.

    ``written`` is the plan's file, if there is one; where there is none, ``keep`` is what writes it.
    """
    steps = _IMPORTED_STEPS if request.imported else _STEPS
    found = [step for each in steps for step in each(request, result, simulation)]
    found.sort(key=lambda step: -step.weight)
    first = {step.what: step for step in reversed(found)}  # of two that say one flag, the one that brings more
    kept = [step for step in found if step is first[step.what]]
    if request.imported:
        return [_search_from(request, written, keep), *kept]
    if written is None:
        return [*kept, NextStep(keep, "writes the plan, for pipeplan simulate, check and run")]
    return [*kept, NextStep(f"pipeplan run {written} --emulate --local --steps 1", "replays it with real processes")]


def _search_from(request: Request, written: str | None, keep: str) -> NextStep:
    """What improves a plan that another tool runs."""
    profile = _path(request.profile)
    if written is None or profile is None:
        return NextStep(keep, "writes the plan, for pipeplan search --start to improve")
    cluster = None if request.cluster is None else _path(request.cluster)
    where = "" if cluster is None else f" --cluster {cluster}"
    memory = "" if request.memory_bytes is None else f" --memory {format_bytes(request.memory_bytes)}"
    return NextStep(
        f"pipeplan search {profile} --start {written}{where}{memory}",
        "a plan that is never slower; --for TOOL keeps it to what one runs",
    )


def _fewer_devices(request: Request, result: Result, simulation: Simulation) -> Iterator[NextStep]:
    idle = simulation.workload.idle_devices
    if idle and not isinstance(request.placement, Placement):
        used = request.num_devices - len(idle)
        yield NextStep(
            f"--devices {used}", f"the same iteration without the {named_devices(len(idle))} that run nothing", 1.0
        )


def _simpler(request: Request, result: Result, simulation: Simulation) -> Iterator[NextStep]:
    tie = result.tie
    if tie is not None:
        left = "" if tie.left_bytes is None else f", {format_bytes(tie.left_bytes)} left"
        stages, more = len(simulation.workload.stages), "no" if tie.longer < 0.0005 else f"{tie.longer:.1%}"
        brings = f"{more} longer, a tie: {counted(tie.num_stages, 'stage')}, not {stages}{left}"
        yield NextStep(tie.flags, brings, 0.4)


def _more_time(request: Request, result: Result, simulation: Simulation) -> Iterator[NextStep]:
    """What is left is counted: the bound over everything knows no memory, and says little of what time brings.

    So it only says where to look first: what is left goes before what is known to bring less than half of its gap.
    """
    if not result.timed_out or result.gap < LEAST_GAIN:
        return
    if result.not_tried:
        brings, weight = result.not_tried, max(result.placement_gap, result.gap / (1 + result.gap)) / 2
    elif result.placement_gap >= LEAST_GAIN:
        brings, weight = (
            f"at most the {result.placement_gap:.1%} to the bound on this placement",
            result.placement_gap / 2,
        )
    else:
        return
    yield NextStep(f"--time-limit {format_ns(2e9 * request.time_limit)}", brings, weight)


def _other_schedules(request: Request, result: Result, simulation: Simulation) -> Iterator[NextStep]:
    """Unlike ``auto``, a named schedule fixes slices and whether backward is split."""
    if request.scheduler == "auto":
        return
    plan = result.plan
    opened = replace(request, scheduler="auto", rules=None, num_parted=None, split_backward=None)
    batch = Batch(plan.num_microbatches, plan.microbatch_size)
    stages = plan.placed.whole
    if request.recompute is None:  # what this schedule recomputes for want of memory, another need not
        kept = tuple(stage.model_copy(update={"recompute": False}) for stage in stages.stages)
        stages = stages.model_copy(update={"stages": kept})
    with suppress(PipeplanError):
        bound = placement_bound(opened, PlacementCandidate(stages, batch, bool(request.recompute), "these stages"))
        gain = 1 - bound / plan.predicted.iteration_ns
        if gain >= LEAST_GAIN:
            without = "" if request.rules is None else "in place of --rules, "
            yield NextStep("--scheduler auto", f"{without}at most {gain:.1%} shorter iterations on these stages", gain)


def _more_microbatches(request: Request, result: Result, simulation: Simulation) -> Iterator[NextStep]:
    workload = simulation.workload
    actions = 2 * sum(len(slots) for slots in workload.slots)
    outright = request.rules is not None and request.rules.order
    most = REPLAYED_LATE if result.timed_out else REPLAYED_ACTIONS
    if simulation.repetend is None or actions > most or outright:
        return
    unroll, count = simulation.repetend.unroll, workload.num_microbatches
    twice = simulate(result.plan, count + max(1, round(count / unroll)) * unroll)
    now, then = (each.throughput.samples_per_second for each in (simulation, twice))
    if now and then and then / now - 1 >= LEAST_GAIN:
        brings = f"{then / now - 1:.1%} more samples/s, idle {simulation.idle.total:.1%} -> {twice.idle.total:.1%}"
        more = 2 * count  # a number that people choose; what is replayed is the one next to it with whole repetends
        about = "" if more == twice.workload.num_microbatches else "about "
        samples = request.sizes and not request.imported
        flag = f"--mini-batch {more * result.plan.microbatch_size}" if samples else f"--microbatches {more}"
        brings = about + brings
        yield NextStep(flag, brings, 1 - now / then)


def _less_recomputation(request: Request, result: Result, simulation: Simulation) -> Iterator[NextStep]:
    count, limit = sum(stage.recomputes for stage in simulation.workload.stages), request.least_memory
    profile = _path(request.profile)
    if not count or request.recompute is not None or limit is None or profile is None:
        return
    where = f"--devices {request.num_devices}"
    if request.cluster is not None:
        cluster = _path(request.cluster)
        if cluster is None:
            return
        where = f"--cluster {cluster} {where}"
    memory, samples = format_bytes(2 * limit), request.batch.mini_batch
    yield NextStep(
        f"pipeplan frontier {profile} {where} --memory {memory} --mini-batch {samples} --plans",
        f"what up to {memory} per device would bring; {'1 stage' if count == 1 else f'{count} stages'} recompute"
        f"{'s' * (count == 1)} to fit",
    )


def _sharded_state(request: Request, result: Result, simulation: Simulation) -> Iterator[NextStep]:
    """What replicas would have to spare if they divided the optimizer's state, or whether there might be some then."""
    workload = simulation.workload
    if request.zero is not None or request.num_devices < 2 or not request.knows_links:
        return
    if any(stage.sharers > 1 for stage in workload.stages):
        return
    if all(stage.copies == 1 for stage in workload.stages):
        recomputed = sum(stage.recomputes for stage in workload.stages)
        asks = request.replicas is None and not isinstance(request.placement, Placement)
        if recomputed and asks and not divides_by_default(request):
            brings = f"replicas that divide state may fit where now {counted(recomputed, 'stage')} recompute"
            yield NextStep("--zero auto", brings + "s" * (recomputed == 1))
        return
    with suppress(PipeplanError):
        placed = result.plan.placed.whole
        placed = sharing(replace(request, placement=placed, chunks=None, zero=AUTO), placed)
        divided = build_workload(
            request.block_profile,
            placed,
            num_microbatches=result.plan.num_microbatches,
            microbatch_size=result.plan.microbatch_size,
            cluster=request.cluster,
        )
        before, after = (each.static_bytes(_fullest(simulation)) for each in (workload, divided))
        if before > after:
            brings = f"the fullest device keeps {format_bytes(after)} instead of {format_bytes(before)} of state"
            gain = (_after_ns(workload) - _after_ns(divided)) / simulation.iteration_ns
            if gain >= LEAST_GAIN:
                brings = f"about {gain:.1%} shorter iterations, and {brings}"
            yield NextStep("--zero auto", brings, max(0.0, gain))


def _after_ns(workload: Workload) -> int:
    """What the slowest stage takes once its last micro-batch is over: sums of gradients, step, gathering."""
    return max(stage.sync_ns + stage.step_ns + stage.gather_ns for stage in workload.stages)


def _no_splits(request: Request, result: Result, simulation: Simulation) -> Iterator[NextStep]:
    """A hint that an estimate has no costs of split blocks, without which tensor parallelism is not searched."""
    source = request.profile.source
    if source.method != "estimated" or device_meant(source.device) is None or request.num_devices < 2:
        return
    if request.shards is None and all(row.shards == 1 for block in request.profile.blocks for row in block.costs):
        brings = "adds costs of split blocks, for tensor parallelism"
        yield NextStep("pipeplan profile ... --shards 1,2,4,8", brings, UNSEARCHED)


def _more_sharing(request: Request, result: Result, simulation: Simulation) -> Iterator[NextStep]:
    """What ZeRO 2 and 3 may bring where a search of whole blocks leaves them out unless it is asked: by the table.

    Of large requests that table takes a second or more, so that it is only said that they were left out.
    """
    if request.zero is not None or request.num_devices < 2 or request.least_memory is None or has_table(request):
        return
    if request.scheduler != "auto" or divides_by_default(request) or not request.knows_links:
        return
    if is_large(request):
        yield NextStep("--zero auto", "looks at ZeRO 2 and 3 (FSDP) as well")
        return
    with suppress(PipeplanError):
        opened = replace(request, zero=AUTO, positions=1)
        about = min((each.usual_ns for level in opened.levels for each in uniform_choices(level)[:1]), default=math.inf)
        gain = 1 - about / result.plan.predicted.iteration_ns
        if gain >= LEAST_ESTIMATED:
            brings = f"up to about {gain:.1%} shorter iterations; ZeRO 2 and 3 (FSDP) are tried as well"
            yield NextStep("--zero auto", brings, gain)


_TRAINABLE = (None, "fp32", "bf16", "bf16-autocast", "bf16-mixed", "fp16-mixed")
"""Recipes that ``pipeplan run`` can train by; None is a profile's that names none."""


def _of_several_tensors(profile: Profile) -> list[str]:
    """Blocks of a model of torch of which others take several tensors: edges without a name have one of their own."""
    if "torch" not in profile.source.versions:
        return []
    taken: dict[str, set[tuple[str, str]]] = {}
    for edge in profile.edges:
        taken.setdefault(edge.source, set()).add(("", edge.target) if edge.tensor is None else (edge.tensor, ""))
    return [block for block, tensors in taken.items() if len(tensors) > 1]


def cannot_train(plan: Plan, profile: Profile | None = None) -> list[str]:
    """What of a plan ``pipeplan run`` can replay, but not train with yet, in words; of its model by the profile."""
    recipe = plan.recipe
    several = [] if profile is None else _of_several_tensors(profile)
    lacks = [f"several tensors of one block ({several[0]})"] if several else []
    if recipe is not None and not (plan.is_inference or recipe.is_custom or recipe.name in _TRAINABLE):
        lacks.append(str(recipe.name))
    return lacks


def _fullest(simulation: Simulation) -> int:
    peaks = [memory.peak_bytes for memory in simulation.memory]
    return peaks.index(max(peaks))


def _path(file: File) -> str | None:
    """The file as a command line names it; None where it was made in Python or came from stdin."""
    return shlex.quote(file.where) if os.path.isfile(file.where) else None


def _memory_limit(request: Request, result: Result, simulation: Simulation) -> Iterator[NextStep]:
    if all(limit is None for limit in request.memory):
        most = format_bytes(max(memory.peak_bytes for memory in simulation.memory))
        device = device_meant(request.profile.source.device)
        if device is None:
            yield NextStep("--memory SIZE", f"plans that fit your devices; this one needs {most}")
        else:
            size = format_bytes(device.memory_bytes)
            yield NextStep(f"--memory {size}", f"plans that fit {device.title}; this one needs {most}")


_IMPORTED_STEPS = (_more_microbatches, _memory_limit)
"""Those whose flags an import has, too; it has nothing else to choose."""

_STEPS = (
    _fewer_devices,
    _simpler,
    _more_time,
    _other_schedules,
    _more_microbatches,
    _sharded_state,
    _more_sharing,
    _no_splits,
    _less_recomputation,
    _memory_limit,
)
