"""From a schedule of groups of blocks to the same of the blocks themselves: what a plan names, and is checked by."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from pipeplan.costs import build_workload
from pipeplan.costs.joining import JoinedProfile
from pipeplan.costs.stages import FOLD_LEAST
from pipeplan.errors import InfeasibleError, PipeplanError
from pipeplan.files import PlacedStage, Placement
from pipeplan.planning.request import Request
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.schedule.search import SEARCHING, first_look, search_schedule
from pipeplan.schedule.state import Schedule
from pipeplan.workload.elements import Players, Stage
from pipeplan.workload.folding import devices_of
from pipeplan.workload.memory import fits
from pipeplan.workload.steady_state.loop import LoopedOrders, looped
from pipeplan.workload.task_graph import earliest_starts, task_graph
from pipeplan.workload.workload import Workload


def of_blocks(request: Request, schedule: Schedule) -> Schedule:
    """The schedule whose stages have blocks where those of a request have groups of them; as it is without any.

    Orders are the same. Times are, too, but for what is exchanged block by block, and sums of what blocks share where
    the target sums none; where such orders do not suit them, the schedule is made anew.

    Raises:
        InfeasibleError: it does not fit so.
    """
    joined = request.joined
    if joined is None:
        return schedule
    workload = _workload(request, joined, schedule.workload)
    with suppress(PipeplanError):
        found = _with_orders(schedule, workload)
        if found is not None:
            return _as_proved(schedule, found)
    return _anew(request, workload)


def _with_orders(grouped: Schedule, workload: Workload) -> Schedule | None:
    """The same orders with a workload of the same stages; None where they do not fit, or come to no round."""
    graph = task_graph(workload.with_microbatches(grouped.graph.workload.num_microbatches))
    orders, cut = [list(order) for order in graph.on_devices(grouped.orders)], grouped.loop
    run: LoopedOrders | None = None
    if cut is None:
        run = LoopedOrders(graph, orders, earliest_starts(graph, orders), None)
    else:
        begins = cut.begins[: len(graph.workload.operations)]  # messages are last, and come as they are ready
        run = looped(graph, orders, begins, cut.microbatches, workload.num_microbatches, rounds=cut.rounds)
    if run is None or not fits(run.graph, run.orders, run.loop):
        return None
    return grouped.running(run, workload)


def _as_proved(grouped: Schedule, found: Schedule) -> Schedule:
    """With what is proved of groups, where everything takes the same."""
    times = ([operation.duration_ns for operation in each.workload.operations] for each in (grouped, found))
    same = len({tuple(each) for each in times}) == 1 and found.iteration_ns == grouped.iteration_ns
    return replace(found, bound_ns=grouped.bound_ns) if same else found


def _workload(request: Request, joined: JoinedProfile, grouped: Workload) -> Workload:
    placement = Placement(
        strategy=grouped.placement,
        num_devices=grouped.num_devices,
        num_routes=grouped.num_routes,
        stages=tuple(_stage(joined, stage, grouped.players) for stage in grouped.stages),
    )
    return build_workload(
        joined.whole,
        placement,
        num_microbatches=grouped.num_microbatches,
        microbatch_size=grouped.microbatch_size,
        split_backward=grouped.splits_backward,
        split_overhead_ns=request.split_overhead_ns,
        cluster=request.cluster,
        memory_bytes=request.whole_memory,
        reserve_bytes=request.reserve,
        fold_least=FOLD_LEAST if grouped.players else 0,
    )


def _stage(joined: JoinedProfile, stage: Stage, players: Sequence[Players]) -> PlacedStage:
    said = {name: getattr(stage, name) for name in PlacedStage.model_fields}
    said["devices"] = devices_of(players, stage.devices) if players else stage.devices
    said["blocks"] = joined.blocks(stage.blocks)
    said["recompute"] = joined.again(stage.blocks, stage.again)
    return PlacedStage(**said)


def _anew(request: Request, workload: Workload) -> Schedule:
    if request.scheduler in SEARCHING:
        found = first_look(workload)
        if found is not None:
            return found
        raise InfeasibleError("a plan of whole groups of blocks does not fit block by block; raise --memory a little")
    return search_schedule(workload, Budget(1.0, deterministic=True), scheduler=request.scheduler, rules=request.rules)
