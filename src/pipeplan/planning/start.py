"""A plan to start from: what a search is never worse than, and improves."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from pipeplan.costs.stages import FOLD_LEAST
from pipeplan.costs.zero import AUTO
from pipeplan.errors import InfeasibleError, UsageError
from pipeplan.files import PlacedStage, Placement, Plan
from pipeplan.files.folded import folded_plan, unfolded
from pipeplan.planning.candidates import PlacementCandidate
from pipeplan.planning.expanding import of_blocks
from pipeplan.planning.request import Batch, Request
from pipeplan.planning.trials import PlanSearch, PlanStep, Trial, iteration_of
from pipeplan.schedule.state import Schedule, SearchStep
from pipeplan.simulator.simulation import Simulation, simulate
from pipeplan.units import format_bytes, format_ns
from pipeplan.workload.elements import Players
from pipeplan.workload.kinds import Role, role_of
from pipeplan.workload.memory import fits
from pipeplan.workload.slices import in_parts
from pipeplan.workload.steady_state.loop import LoopedOrders, looped
from pipeplan.workload.task_graph import TaskGraph, earliest_starts, task_graph
from pipeplan.workload.workload import Workload


@dataclass(frozen=True)
class StartPlan(PlanStep):
    """The plan that was given to start from, with the profile's times: the first that others must beat."""

    name = "start plan"
    when = "first, once, with --start"
    in_turn = True
    needed = True

    def run(self, search: PlanSearch) -> None:
        """Time it anew, once."""
        start = search.request.start
        if start is None or search.started:
            return
        search.started = True
        trial, schedule = _tried(search.request, start, search.steps)
        if schedule is None:
            need = max(memory.peak_bytes for memory in _replayed(search.request, start).memory)
            search.notes.append(
                f"the plan of --start needs {format_bytes(need)} on a device, more than there is: the search "
                "does not start from it"
            )
            return
        trial.offer(schedule)
        with suppress(InfeasibleError):  # groups fit, and their blocks one by one do not
            search.start_ns = iteration_of(of_blocks(search.request, schedule))
        search.found_first(trial)


def gain_said(start_ns: int | None, found_ns: int) -> tuple[str, ...]:
    """How much shorter the plan that was found is than the one that was started from."""
    if start_ns is None:
        return ()
    if found_ns == start_ns:
        return (f"nothing shorter than the plan of --start was found, which takes {format_ns(start_ns)} here",)
    return (f"{1 - found_ns / start_ns:.1%} shorter than the plan of --start, which takes {format_ns(start_ns)} here",)


def _has_stages(start: Plan, given: Placement) -> bool:
    """Whether a plan's stages are those of a placement, which may leave open what is recomputed and divided."""
    placed, sizes = start.placed, ("num_devices", "num_routes")
    if any(getattr(given, name) != getattr(placed, name) for name in sizes) or len(given.stages) != len(placed.stages):
        return False
    said = (
        (name, getattr(own, name), other)
        for own, other in zip(given.stages, placed.stages, strict=True)
        for name in PlacedStage.model_fields
    )
    return all(value in (None, getattr(other, name)) or (name == "zero" and not value) for name, value, other in said)


def require_start(request: Request, start: Plan) -> None:
    """Refuse to start from a plan that the request does not ask for, or that cannot be timed anew.

    Raises:
        UsageError: what it has that the request has not.
    """
    given = request.placement
    asked: dict[str, tuple[object, object]] = {
        "--devices": (request.num_devices, start.num_devices),
        "--mini-batch": (request.batch.mini_batch, start.mini_batch),
    }
    if request.only is None:  # the schedules of a target are its own
        asked["--scheduler"] = request.scheduler, "auto"  # what improves it is a search
    if request.positions is not None:
        asked["--pp"] = (request.positions, len({stage.devices for stage in start.stages}))
    if given != "auto":
        own_stages = given if isinstance(given, Placement) and _has_stages(start, given) else start.placed
        asked["--placement"] = (given, start.placement if isinstance(given, str) else own_stages)
    if not request.sizes:
        asked["--microbatch-size"] = (request.batch.microbatch_size, start.microbatch_size)
    for flag, (wanted, own) in asked.items():
        if wanted != own:
            theirs = "other stages than the plan's are" if isinstance(wanted, Placement) else f"{flag} {wanted} is"
            own_said = "" if isinstance(wanted, Placement) else f", and the plan has {own}"
            raise UsageError(f"--start: {theirs} asked for{own_said}; leave {flag} out")
    for number, stage in enumerate(start.stages):
        where = f"--start: stages[{number}]"
        sizes = {"--dp": stage.replicas, "--tp": stage.shards, "--cp": stage.context, "--ep": stage.expert}
        sizes["--etp"] = stage.expert_shards
        fixed = {"--dp": request.replicas, "--tp": request.shards, "--cp": request.context, "--ep": request.expert}
        fixed["--etp"] = request.expert_shards
        for flag, size in fixed.items():
            if size is not None and size != sizes[flag]:
                raise UsageError(f"{where} has {flag} {sizes[flag]}, and {size} is asked for; leave {flag} out")
        for has, what in (
            (not stage.blocks, "runs instructions"),
            (stage.configurations, "splits blocks each in a way of its own"),
            (stage.num_parted, "runs forwards in parts (make it with --slices 0)"),
            (stage.cuts, "waits inside of actions (make it with --late-inputs no)"),
        ):
            if has:
                raise UsageError(f"{where} {what}, which cannot be timed anew; start from a plan without")
        again = request.recompute is False and stage.recomputes
        shares = request.zero not in (None, AUTO, stage.zero)
        for has, flag in ((again, "--recompute none"), (shares, f"--zero {request.zero}")):
            if has:
                raise UsageError(f"{where} has recompute {stage.recompute} and zero {stage.zero}; leave {flag} out")
    try:
        request.profile.check_placement(start.placed)
    except ValueError as error:
        raise UsageError(
            f"--start: the plan does not place profile {request.profile.name!r}: {error}; give its own profile"
        ) from None


def _tried(request: Request, start: Plan, steps: Sequence[SearchStep]) -> tuple[Trial, Schedule | None]:
    """The plan's trial, and its orders with the request's times and memory; None if that does not fit."""
    batch = Batch(start.num_microbatches, start.microbatch_size)
    candidate = PlacementCandidate(start.placed, batch, recompute=False, source="start")
    trial = Trial.of(request, candidate, steps)
    replayed = _replayed(request, _as_folded(start, trial.ways[0].players))
    if replayed.workload.players != trial.ways[0].players:  # its devices run unlike programs, or are folded otherwise
        trial, replayed = Trial.of(replace(request, folds=False), candidate, steps), _replayed(request, unfolded(start))
    splits = replayed.workload.splits_backward
    way = next((way for way in trial.ways if way.splits_backward == splits), None)
    if way is None:
        kind = "splits backward" if splits else "runs backward whole"
        raise UsageError(f"--start: the plan {kind}, which is not asked for; leave --split-backward out")
    base = Schedule(
        replayed.workload,
        replayed.graph,
        replayed.orders,
        replayed.starts,
        replayed.rates.makespan_ns,
        replayed.lower_bound_ns,
        start.provenance.scheduler or "start",
        replayed.loop,
    )
    return trial, with_orders(base, way, "")


def _as_folded(start: Plan, players: Sequence[Players]) -> Plan:
    """The plan with the same ``players``, if it can be so."""
    if start.players == players:
        return start
    return folded_plan(unfolded(start), FOLD_LEAST) if players else unfolded(start)


def _replayed(request: Request, start: Plan) -> Simulation:
    """The plan as the request's profile and cluster have it."""
    own = {
        "recipe": None,
        "launch_overhead_ns": 0,  # the request's profile has them
        "split_overhead_ns": request.split_overhead_ns,
    }
    return simulate(start.model_copy(update=own), profile=request.profile, cluster=request.cluster)


def busiest_ns(request: Request, start: Plan) -> int:
    """Ns of a micro-batch's forward on the plan's busiest stage, as the request's profile and cluster have it."""
    operations = _replayed(request, start).workload.operations
    return max(each.duration_ns for each in operations if role_of(each.kind) is Role.FORWARD)


# Orders anew ---------------------------------------------------------------------------------------------------------


def with_orders(base: Schedule, workload: Workload, mark: str) -> Schedule | None:
    """A schedule's orders with the times of another workload; None if they do not fit there."""
    graph = task_graph(workload.with_microbatches(base.graph.workload.num_microbatches))
    run = _again(base, graph, workload.num_microbatches)
    if run is None or not fits(run.graph, run.orders, run.loop):
        return None
    return base.running(run, workload, mark)


def _again(base: Schedule, graph: TaskGraph, num_microbatches: int) -> LoopedOrders | None:
    """A schedule's orders with other times and parts; None where a loop's round does not settle with them."""
    orders = in_parts(base.orders, graph)
    if base.loop is None:
        return LoopedOrders(graph, orders, earliest_starts(graph, orders), None)
    parts = [slots.num_parted for slots in graph.workload.slots[: len(graph.workload.operations)]]
    begins = [begin + more for begin, more in zip(base.loop.begins, parts, strict=False)]  # messages are last
    if any(begin < more for begin, more in zip(base.loop.begins, parts, strict=False)):
        return None
    cut, devices = base.loop, graph.on_devices(orders)
    return looped(graph, devices, begins, cut.microbatches, num_microbatches, rounds=cut.rounds)
