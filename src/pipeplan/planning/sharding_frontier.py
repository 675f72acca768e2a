"""A whole model split over devices without a pipeline (TensorOpt's setting): its frontier, and its strategies as plans.

A strategy of whole blocks is what the executor runs: its meshes are the stage's configurations, and what it costs is
the stage's: times of forward and backward with all that is exchanged in them, sums of gradients once per iteration.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from pipeplan.checker import check
from pipeplan.costs import build_workload
from pipeplan.errors import UsageError
from pipeplan.files import Cluster, PlacedStage, Placement, Plan, Profile
from pipeplan.planning.build_plan import assemble, provenance_of
from pipeplan.planning.choices import choices_of_splits
from pipeplan.planning.request import Request, Splitting
from pipeplan.search_constants import WORKSPACE_LEVELS
from pipeplan.sharding.baselines import IMPOSSIBLE, ONLY, fastest_strategy
from pipeplan.sharding.cost_model import CostModel, CostOptions, Unprofiled, cost_model, unpriced_model
from pipeplan.sharding.details import split_blocks
from pipeplan.sharding.graph import CostGraph, Strategy
from pipeplan.sharding.least_memory import LeastMemory, least_memory
from pipeplan.sharding.operator_kinds import is_profiled
from pipeplan.sharding.table import IntArray
from pipeplan.sharding.tracking import Tracked, track
from pipeplan.time_limit import clock_of
from pipeplan.units import named_devices
from pipeplan.workload.bounds import weak_iteration_bound
from pipeplan.workload.elements import Device, Stage
from pipeplan.workload.task_graph import TaskGraph, task_graph
from pipeplan.workload.workload import Workload


@dataclass(frozen=True, slots=True)
class SplitPoint:
    """A strategy and what its plan takes: ``memory_bytes`` is its peak, of which ``workspace_bytes`` is workspace.

    ``model`` is the one whose configurations it has, where that is not the one of all strategies.
    """

    strategy: Strategy
    memory_bytes: int
    workspace_bytes: int
    model: CostModel | None = None

    @property
    def time_ns(self) -> int:
        """The time of one iteration."""
        return self.strategy.time_ns


@dataclass(frozen=True, slots=True)
class Splits:
    """The strategies of a model on a number of devices, and what their costs came from.

    ``points`` are those that no other one found beats in peak memory and time, least memory first. That some point
    takes at most ``factor`` times the memory and time of any strategy is proved of the whole peak if no strategy with
    less workspace was left out (``settled``), and else of what is tracked: all but workspace. Where operators were held
    to a configuration, that is of strategies with those, and ``factor_of_all`` is of all. ``only`` is the planner whose
    strategies alone they are.
    """

    num_devices: int
    model: CostModel
    tracked: Tracked
    points: tuple[SplitPoint, ...]
    settled: bool
    factor: float
    factor_of_all: float
    seconds: float
    only: str | None = None

    @property
    def exact(self) -> bool:
        """Whether no strategy at all beats a point."""
        return self.settled and self.tracked.exact and self.factor == 1 and not self.model.counted_again

    def plan(self, request: Request, index: int) -> Plan:
        """The plan of a point, or why no plan can run it, as :func:`plan_of_strategy` says."""
        return plan_of_strategy(
            request.profile,
            self.model_of(self.points[index]),
            self.points[index].strategy,
            cluster=request.cluster,
            memory_bytes=request.memory_bytes,
            reserve_bytes=request.reserve_bytes,
            choices=choices_of_splits(request, self.only),
        )

    def described(self, request: Request, index: int) -> Workload:
        """The stage of a point on its devices, and its micro-batches, without what it runs: quick to say of thousands.

        Raises:
            UsageError: plans cannot say what its strategy does, as :func:`split_blocks` has it.
        """
        model = self.model_of(self.points[index])
        split, count = split_blocks(model, self.points[index].strategy), self.num_devices
        samples = model.operators.nodes[0].operation.axis("samples").size
        stage = Stage(
            blocks=split.blocks,
            devices=tuple(range(count)),
            shards=count,
            configurations=split.configurations,
            remade=split.remade,
            microbatch_size=samples,
        )
        return Workload(
            name=request.profile.name,
            placement=SCHEDULER,
            num_microbatches=model.options.microbatches,
            microbatch_size=samples,
            devices=(Device(),) * count,
            stages=(stage,),
            operations=(),
            dependencies=(),
        )

    def model_of(self, point: SplitPoint) -> CostModel:
        """The model that the configurations of a point are of."""
        return point.model or self.model

    def words(self, point: SplitPoint) -> str:
        """A strategy in a few words: its most frequent configurations."""
        names = {node.name: node.configurations for node in self.model_of(point).graph.nodes}
        return most_frequent(names[name][index] for name, index in point.strategy.configurations.items())


def most_frequent(configurations: Iterable[str]) -> str:
    """The most frequent of many configurations in words, each after how many blocks have it."""
    counts = Counter(configurations)
    most = [f"{count} {_in_words(name)}" for name, count in counts.most_common(_MOST_WORDS)]
    return ", ".join(most + (["..."] if len(counts) > _MOST_WORDS else []))


def _in_words(configuration: str) -> str:
    """``samples2-shards4`` is split by samples over 2 and shards over 4; ``copies2`` is the same on 2."""
    axes = [_AXIS.fullmatch(axis) for axis in configuration.split("-")]
    split = [f"{axis[1]} over {axis[2]}" for axis in axes if axis is not None and axis[1] != "copies"]
    same = [f"the same on {axis[2]}" for axis in axes if axis is not None and axis[1] == "copies"]
    return " and ".join(["by " * bool(split) + " and ".join(split), *same] if split else same) or configuration


_AXIS = re.compile(r"(.*?)(\d+)")
_MOST_WORDS = 3


def _unbeaten(points: Iterable[SplitPoint]) -> Iterator[SplitPoint]:
    quickest: int | None = None
    for point in sorted(points, key=lambda each: (each.memory_bytes, each.time_ns)):
        if quickest is None or point.time_ns < quickest:
            yield point
            quickest = point.time_ns


def costs_of_splits(request: Request, splitting: Splitting) -> CostModel:
    """What all strategies of a profile on a request's devices cost, worked out, for its mini-batch as one micro-batch.

    Raises:
        UsageError: as :func:`pipeplan.sharding.cost_model.cost_model`.
    """
    given = request.profile, request.cluster, request.num_devices, request.batch.mini_batch
    return cost_model(*given, device=splitting.device, options=_options(splitting)).with_graph()


def least_of_splits(request: Request, splitting: Splitting) -> LeastMemory:
    """What all strategies take at least, which is known in a moment.

    Raises:
        UsageError: as :func:`pipeplan.sharding.cost_model.cost_model`.
    """
    given = request.profile, request.cluster, request.num_devices, request.batch.mini_batch
    return least_memory(unpriced_model(*given, device=splitting.device, options=_options(splitting)))


def _options(splitting: Splitting) -> CostOptions:
    return CostOptions(
        blocks=splitting.whole_blocks,
        alone=False,
        rule=is_profiled if splitting.profiled else None,
        data_parallel_loading=splitting.data_parallel_loading,
        mesh_dimensions=splitting.mesh_dimensions,
    )


def split_frontier(
    request: Request,
    splitting: Splitting,
    *,
    seconds: float = 0.0,
    model: CostModel | None = None,
    as_far: bool = False,
) -> Splits:
    """Track the frontier of a profile on a request's devices, for iterations of its mini-batch as one micro-batch.

    Strategies with less workspace may take ``seconds`` more; the exact frontier of whole blocks looks for some
    in any case. ``model`` has the costs where they are known; one within a factor is tracked ``as_far`` as there is
    time, if that is asked for.

    Raises:
        UsageError: as :func:`pipeplan.sharding.cost_model.cost_model`; or the planner that alone is asked for has no
            strategy.
    """
    clock = clock_of(None)
    begun = clock()
    model = model or costs_of_splits(request, splitting)
    least = WORKSPACE_LEVELS if splitting.whole_blocks and not splitting.within else 0
    rounds = _Rounds(splitting.within, seconds, least, as_far)
    if splitting.only is not None:
        tracked, points, settled = _only(splitting.only, model, rounds)
    else:
        tracked = rounds.first(model.graph)
        points, settled = _points(model, tracked, rounds)
    took = clock() - begun
    proved = rounds.factor, rounds.factor_of_all
    return Splits(request.num_devices, model, tracked, points, settled, *proved, took, splitting.only)


def _only(name: str, model: CostModel, rounds: _Rounds) -> tuple[Tracked, tuple[SplitPoint, ...], bool]:
    """The points of a restricted planner, and whether all of its own strategies were covered."""
    only = ONLY[name]
    points: list[SplitPoint] = []
    last, settled, why = None, True, ""
    for restricted in only.models(model):
        own = replace(rounds, factor=1.0, factor_of_all=1.0)
        try:
            last = own.first(restricted.graph)
        except IMPOSSIBLE as error:  # on this mesh
            why = str(error)
            continue
        if only.blind:
            points.append(_with_its_workspace(restricted, fastest_strategy(restricted)))
        else:
            found, complete = _points(restricted, last, own)
            points += [replace(point, model=restricted) for point in found]
            settled &= complete
        rounds.factor = max(rounds.factor, own.factor)
        rounds.factor_of_all = max(rounds.factor_of_all, own.factor_of_all)
    if last is None:
        raise UsageError(
            f"--only {name} ({only.words}) has no strategy on {named_devices(model.resharding.devices)}: {why}; give "
            "other --devices, --split-level operator, or another --mini-batch"
        )
    unbeaten = tuple(_unbeaten(points))
    taken = {"fastest": unbeaten[-1:], "smallest": unbeaten[:1], "all": unbeaten}
    return last, taken[only.takes], settled


def _with_its_workspace(model: CostModel, strategy: Strategy) -> SplitPoint:
    ways = model.configurations
    workspace = max(ways[name][index].workspace_bytes for name, index in strategy.configurations.items())
    return SplitPoint(strategy, strategy.memory_bytes + workspace, workspace)


@dataclass(slots=True)
class _Rounds:
    """A graph tracked, and then again and again with fewer configurations: ``least`` times, and then for ``seconds``.

    The factors are what all rounds proved. None begins that would take too long, if it took as long as the last.
    """

    within: float
    seconds: float
    least: int
    as_far: bool = False
    factor: float = 1.0
    factor_of_all: float = 1.0
    spent: float = 0.0
    last: float = 0.0

    @property
    def more(self) -> bool:
        """Whether another one is worth its time."""
        return self.least > 0 or self.spent + self.last <= self.seconds

    def first(self, graph: CostGraph) -> Tracked:
        """Track the whole graph."""
        clock = clock_of(None)
        begun = clock()
        tracked = track(graph, within=self.within, as_far=self.as_far)
        self.last = clock() - begun
        self.factor = max(self.factor, tracked.factor)
        self.factor_of_all = max(self.factor_of_all, tracked.factor_of_all)
        return tracked

    def again(self, graph: CostGraph) -> Tracked:
        """Track it with fewer configurations."""
        tracked = self.first(graph)
        self.spent += self.last
        self.least -= 1
        return tracked


def _points(model: CostModel, tracked: Tracked, rounds: _Rounds) -> tuple[tuple[SplitPoint, ...], bool]:
    """The strategies by their peaks, and whether none with less workspace was left out.

    Of workspace only the largest counts, which is not tracked. So the frontier is tracked again with the configurations
    of less workspace than what was found takes, until there are none.
    """
    sizes = {name: np.array([each.workspace_bytes for each in ways]) for name, ways in model.configurations.items()}
    every = {name: np.arange(len(workspaces)) for name, workspaces in sizes.items()}
    found = _with_workspace(tracked, sizes, every)
    most = max(point.workspace_bytes for point in found)
    least = max(int(workspaces.min()) for workspaces in sizes.values())
    while most > least and rounds.more:
        kept = {name: np.flatnonzero(workspaces < most) for name, workspaces in sizes.items()}
        try:
            fewer = rounds.again(model.graph.restricted(kept))
        except ValueError:  # what is left cannot follow each other
            most = least
            break
        smaller = _with_workspace(fewer, sizes, kept)
        found += smaller
        most = max(point.workspace_bytes for point in smaller)
    return tuple(_unbeaten(found)), most <= least


def _with_workspace(tracked: Tracked, sizes: Mapping[str, IntArray], kept: Mapping[str, IntArray]) -> list[SplitPoint]:
    """The strategies of a graph with some configurations as those of the whole graph."""
    found = []
    for point in range(len(tracked.time_ns)):
        strategy = tracked.strategy(point)
        chosen = {name: int(kept[name][index]) for name, index in strategy.configurations.items()}
        workspace = max(int(sizes[name][index]) for name, index in chosen.items())
        whole = replace(strategy, configurations=chosen)
        found.append(SplitPoint(whole, strategy.memory_bytes + workspace, workspace))
    return found


def unprofiled_words(found: Iterable[Unprofiled]) -> str:
    """Which samples on a device there are no costs for; empty where there are costs for all."""
    ranges = sorted({(each.samples, each.low, each.high) for each in found})
    return ", ".join(f"{samples} samples on a device, profiled with {low} to {high}" for samples, low, high in ranges)


def plan_of_strategy(
    profile: Profile,
    model: CostModel,
    strategy: Strategy,
    *,
    cluster: Cluster | None = None,
    memory_bytes: int | None = None,
    reserve_bytes: int | None = None,
    choices: Mapping[str, str] | None = None,
) -> Plan:
    """The plan that runs a strategy of a profile's ``model`` of whole blocks on all of its devices, checked.

    With the micro-batches that the model's options say, and how many hold activations at once; their simulated
    time and memory are the strategy's. ``cluster`` is the model's; ``memory_bytes`` and ``reserve_bytes`` of every
    device, if not its. ``choices`` say who made them, where that is known.

    Raises:
        UsageError: as :func:`split_blocks`.
        InvalidPlanError: it needs more memory than a device has.
    """
    split, options, devices = split_blocks(model, strategy), model.options, model.resharding.devices
    samples = model.operators.nodes[0].operation.axis("samples").size
    stage = PlacedStage(
        blocks=split.blocks,
        devices=tuple(range(devices)),
        shards=devices,
        configurations=split.configurations,
        context_exchange=split.exchange,
        remade=split.remade,
    )
    workload = build_workload(
        profile,
        Placement(strategy=SCHEDULER, num_devices=devices, stages=(stage,)),
        num_microbatches=options.microbatches,
        microbatch_size=samples,
        cluster=cluster,
        memory_bytes=None if memory_bytes is None else [memory_bytes] * devices,
        reserve_bytes=None if reserve_bytes is None else [reserve_bytes] * devices,
        given={0: split.costs},
    )
    graph = task_graph(workload)
    plan = assemble(
        graph,
        [_order(graph, options.in_flight)] * devices,
        weak_iteration_bound(workload),
        Fraction(split.costs.forward_ns + split.costs.backward_ns),
        SCHEDULER,
        recipe=profile.recipe,
        modules=profile.modules,
        where=profile.where,
        provenance=provenance_of(
            profile,
            cluster,
            {"num_microbatches": options.microbatches, "microbatch_size": samples}
            | ({"unprofiled": unprofiled} if (unprofiled := unprofiled_words(model.unprofiled_in(strategy))) else {}),
        ).model_copy(update={"choices": dict(choices or {})}),
    )
    check(plan, profile, cluster if memory_bytes is None and reserve_bytes is None else None).require(
        "the plan of the strategy"
    )
    return plan


SCHEDULER = "strategy"
"""How plans call what places and schedules the one stage."""


def _order(graph: TaskGraph, in_flight: int) -> list[int]:
    """Forwards as far ahead as micro-batches may hold activations at once, each backward as soon as it can."""
    forwards, backwards = (range(graph.offsets[index], graph.offsets[index + 1]) for index in (0, 1))
    ahead = min(in_flight, len(forwards)) - 1
    order = list(forwards[:ahead])
    for microbatch, task in enumerate(backwards):
        order += [*forwards[ahead + microbatch : ahead + microbatch + 1], task]
    return order
