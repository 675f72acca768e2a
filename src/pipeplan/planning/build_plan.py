"""From a schedule to its plan, assembled, checked and with its provenance; and the result of a search."""

from __future__ import annotations

import platform
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from importlib.metadata import version
from typing import Any

from pydantic import ValidationError

from pipeplan._version import __version__
from pipeplan.checker import check
from pipeplan.costs.blocks import places_divided
from pipeplan.costs.throughput import Throughput, Yardstick
from pipeplan.costs.zero import AUTO
from pipeplan.display import Displayed
from pipeplan.errors import UsageError
from pipeplan.files import Cluster, Plan, Predicted, Profile, Provenance, Recipe, sha256_of
from pipeplan.files.plan import Decode, KindSource
from pipeplan.lower import programs
from pipeplan.planning.alternatives import EqualPlan, Explanation
from pipeplan.planning.candidates import PlacementCandidate
from pipeplan.planning.choices import choices_of, stands_in
from pipeplan.planning.decoding import DecodeAnswer
from pipeplan.planning.request import Request
from pipeplan.schedule.rules import Rules
from pipeplan.schedule.rules.language import named_rules, shipped_rules, to_toml
from pipeplan.schedule.state import Schedule
from pipeplan.search_constants import MOST_REPEATED, MOST_WRITTEN, NAMED_SIZES
from pipeplan.simulator.metrics import rates
from pipeplan.simulator.spares import Spares
from pipeplan.texts import counted
from pipeplan.units import format_ns, require_sum
from pipeplan.workload.bounds import period_bound
from pipeplan.workload.elements import MAX_TEXT, Repetend
from pipeplan.workload.engine import with_links
from pipeplan.workload.folding import of_devices
from pipeplan.workload.memory import peak_memory
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.slices import num_sliced, repetend_at, repetend_of, repetend_of_loop
from pipeplan.workload.steady_state.loop import LoopCut, shortened
from pipeplan.workload.steady_state.rate import steady_bubble_rate
from pipeplan.workload.tail import Tail, tail_at
from pipeplan.workload.task_graph import Orders, TaskGraph, earliest_starts
from pipeplan.workload.workload import Workload


def assemble(
    graph: TaskGraph,
    orders: Orders,
    bound_ns: int,
    period_bound_ns: Fraction,
    scheduler: str,
    *,
    loop: LoopCut | None = None,
    split_overhead_ns: int = 0,
    launch_overhead_ns: int = 0,
    recipe: Recipe | None = None,
    modules: Mapping[str, tuple[str, ...]] | None = None,
    provenance: Provenance | None = None,
    where: str = "",
    cut: tuple[Sequence[int], int] | None = None,
    as_written: bool = False,
    decode: Decode | None = None,
) -> Plan:
    """The plan of a workload whose devices run ``orders``, with its predicted figures.

    ``bound_ns`` and ``period_bound_ns`` are what is proved about the workload: with a ``loop``, of all its
    micro-batches. ``recipe`` is what training keeps, ``modules`` are those of blocks, ``where`` is the profile's file.
    ``cut`` [operation] is the first micro-batch of the repetend, and its unroll; None: whatever can be repeated, or
    ``as_written`` what the orders themselves repeat. ``decode`` is what a loop of decode steps is for.

    Raises:
        UsageError: a figure is larger than a plan can say, such as the bytes that a device holds.
    """
    workload = graph.workload
    orders = with_links(graph, orders)
    starts = earliest_starts(graph, orders)
    if loop is None and workload.players and _written(workload) > MOST_WRITTEN:
        run = shortened(graph, orders, starts, MOST_REPEATED)
        if run is not None:
            graph, orders, starts, loop, cut = run.graph, run.orders, run.starts, run.loop, None
            workload = graph.workload
    later = 0 if loop is None else loop.skipped_ns
    graph = graph.summed_best(starts, later)
    workload, figures = graph.workload, rates(graph, orders, starts, loop)
    if cut is not None:
        repetend: Repetend | None = repetend_at(workload, orders, *cut)
    else:
        repetend = repetend_of(graph, orders, repeated=as_written) if loop is None else repetend_of_loop(workload, loop)
    written, repeated = programs(graph, orders, starts, loop)
    by_operation = {
        operation.id: tuple(starts[graph.offsets[index] : graph.offsets[index + 1]])
        for index, operation in enumerate(workload.operations)
    }
    with _sums_of(where or f"plan {workload.name!r}", workload):
        return Plan.of_workload(
            workload.with_microbatches(workload.num_microbatches + (0 if loop is None else loop.skipped)),
            starts_ns=by_operation,
            recipe=recipe,
            modules=dict(modules or {}),
            split_overhead_ns=split_overhead_ns,
            launch_overhead_ns=launch_overhead_ns,
            programs=written,
            repetend=repetend,
            loop=repeated,
            decode=decode,
            predicted=Predicted(
                makespan_ns=figures.makespan_ns,
                lower_bound_ns=bound_ns,
                gap=figures.iteration_ns / bound_ns - 1,
                iteration_ns=figures.iteration_ns,
                period_ns=repetend.period_ns if repetend is not None else None,
                period_lower_bound_ns=number(period_bound_ns),
                bubble_rate=figures.bubble_rate,
                bubble_rate_span=figures.bubble_rate_span,
                bubble_rate_steady=steady_bubble_rate(workload, repetend.period) if repetend is not None else None,
                memory=peak_memory(graph, orders, loop),
            ),
            provenance=(provenance or Provenance()).model_copy(update={"scheduler": scheduler}),
        )


def _written(workload: Workload) -> int:
    return workload.entries * workload.num_microbatches


_REMEDIES = {
    "ns": "have more devices share the work, or choose smaller micro-batches",
    "bytes": "give --memory, which schedules keep below, or choose fewer or smaller micro-batches",
}


@contextmanager
def _sums_of(where: str, workload: Workload) -> Iterator[None]:
    """Say which of a plan's figures adds up to more than a plan can say. Raises UsageError."""
    try:
        yield
    except ValidationError as error:
        largest = max(error.errors(include_url=False), key=lambda each: each["type"] == "less_than_equal")
        if largest["type"] != "less_than_equal":
            raise
        place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in largest["loc"])
        unit, most = place.rpartition("_")[2], largest["ctx"]["le"]
        what = f"{place[1:]} of {workload.num_microbatches} micro-batches"
        require_sum(where, what, largest["input"], unit, most, _REMEDIES.get(unit, "choose fewer micro-batches"))


def planned(request: Request, candidate: PlacementCandidate, schedule: Schedule, whole: Workload) -> Plan:
    """The plan of a candidate's schedule, checked against profile and cluster.

    ``whole`` is the schedule's workload, or the one without forwards in parts; both are of blocks (:func:`.of_blocks`).
    """
    profile = request.block_profile
    problem = OneMicrobatch.of(whole, require_room=False)
    plan = assemble(
        schedule.graph,
        schedule.orders,
        schedule.bound_ns,
        # for every unroll, so for whichever repetend the plan has
        period_bound(problem) / problem.microbatches_per_round,
        schedule.scheduler,
        loop=schedule.loop,
        split_overhead_ns=request.split_overhead_ns,
        launch_overhead_ns=request.launch_overhead_ns,
        recipe=profile.recipe,
        modules=profile.modules,
        provenance=_provenance(request, candidate, schedule.scheduler, schedule.workload),
        where=request.profile.where,
        cut=schedule.repetend,
        as_written=request.rules is not None and bool(request.rules.order),
    )
    # --memory and --memory-reserve go before what the cluster says, so such a plan is not one for it as it stands
    cluster = request.cluster if request.memory_bytes is None and request.reserve_bytes is None else None
    check(plan, request.stated_profile, cluster).require("the plan that was found")
    return plan


def _lines_of(rules: Rules | None) -> tuple[str, ...]:
    """The rules of a file; an explicit order is the plan's own, functions have no text, and others are too long."""
    if rules is None or rules.order or (rules.name in shipped_rules() and named_rules(rules.name) == rules):
        return ()
    try:
        lines = tuple(to_toml(rules).splitlines())
    except UsageError:
        return ()
    return lines if all(len(line) <= MAX_TEXT for line in lines) else ()


def _provenance(request: Request, candidate: PlacementCandidate, scheduler: str, workload: Workload) -> Provenance:
    """What was asked, of what that leaves open the sizes, stages, parts of backward and of forwards, and who chose."""
    made = provenance_of(
        request.stated_profile,
        request.cluster,
        {
            "scheduler": request.scheduler,
            "rules": None if request.rules is None else request.rules.name,
            "unroll": request.unroll,
            **({} if request.max_span is None else {"max_span": request.max_span}),
            "split_backward": request.split_backward,
            "split_overhead_ns": request.split_overhead_ns,
            "recompute": request.recompute,
            "replicas": request.replicas,
            **{key: value for key in ("zero", "zero_group") if (value := getattr(request, key)) is not None},
            **{
                key: value
                for key in ("shards", "context", "context_exchange", "expert", "expert_shards")
                if (value := getattr(request, key)) is not None
            },
            "spread": request.spread,
            "num_parted": request.num_parted,
            **({} if request.planner == "auto" else {"planner": request.planner}),
            **({} if request.late_inputs is None else {"late_inputs": request.late_inputs}),
            **({"launch_overhead_ns": request.launch_overhead_ns} if request.launch_overhead_ns else {}),
            "time_limit_s": request.time_limit,
            "deterministic": request.deterministic,
            "memory_bytes": request.memory_bytes,
            **({} if request.reserve_bytes is None else {"reserve_bytes": request.reserve_bytes}),
            "chunks": request.chunks,
            "num_microbatches": candidate.batch.num_microbatches,
            "microbatch_size": candidate.batch.microbatch_size,
            "stages": candidate.source,
            "backward": "split" if workload.splits_backward else "whole",
            "sliced_microbatches": num_sliced(workload),
            **_sequence_parallel(request.stated_profile, workload),
            **({} if request.only is None else {"for": request.only.name}),
        },
        request.seed,
        ortools=version("ortools"),
    )
    chosen = choices_of(request, candidate.source, scheduler, late_inputs=workload.has_parts)
    rules = () if stands_in(request, candidate.source, scheduler) else _lines_of(request.rules)
    return made.model_copy(update={"rules": rules, "choices": chosen})


def _sequence_parallel(profile: Profile, workload: Workload) -> dict[str, bool]:
    """Where devices that split blocks divide the sequence outside of split products, too, that they do."""
    blocks = profile.by_id
    stages = [stage for stage in workload.stages if stage.shards > 1]
    split = [(blocks[name], stage.shards) for stage in stages for name in stage.blocks if name in blocks]
    return {"sequence_parallel": True} if any(places_divided(*each) > 1 for each in split) else {}


def provenance_of(
    profile: Profile, cluster: Cluster | None, options: Mapping[str, Any], seed: int = 0, **versions: str
) -> Provenance:
    """What a plan was made from, and by what."""
    unlike_run = {} if cluster is None or cluster.overlap == "sums" else {"overlap": cluster.overlap}
    return Provenance(
        profile=profile.name,
        profile_sha256=sha256_of(profile),
        device=profile.source.device,
        dtype=profile.source.dtype,
        method=profile.source.method,
        tokens_per_sample=profile.tokens_per_sample,
        forward_flops_per_sample=profile.forward_flops_per_sample,
        cluster_sha256=sha256_of(cluster) if cluster is not None else "",
        node_size=None if cluster is None else cluster.node_size,
        profiles={
            kind: KindSource(sha256=sha256_of(own), device=own.source.device, dtype=own.source.dtype)
            for kind, own in profile.of_kinds.items()
        },
        options={**options, "recipe": str(profile.recipe), **unlike_run},
        seed=seed,
        versions={"pipeplan": __version__, "python": platform.python_version(), **versions},
    )


def blocks_by_backend(plan: Plan) -> dict[str, int]:
    """{kernel backend: blocks that it runs}; none where eager torch runs all."""
    found = Counter[str]()
    for segment in (segment for stage in plan.stages for segment in stage.segments):
        found[segment.backend] += len(segment.blocks)
    return dict(found)


def number(value: Fraction) -> float:
    """An int where it is one, for readable JSON."""
    return int(value) if value.denominator == 1 else float(value)


def said_of_choices(request: Request, workload: Workload, why: str) -> tuple[str, ...]:
    """What a plan leaves out of what was asked for, and has by default; ``why`` if no micro-batch is sliced."""
    sliced, shared = _slices_left_out(request, workload, why), _sharing_left_out(request, workload)
    return (*sliced, *shared, *_usual_level_said(request, workload))


def _slices_left_out(request: Request, workload: Workload, why: str) -> tuple[str, ...]:
    """A warning that fewer micro-batches are sliced than requested; ``why`` if none is."""
    count = num_sliced(workload)
    least = int(len(workload.stages) > 1)  # by AutoPipe's formula; of one stage there is nothing to halve
    wanted = least if request.num_parted == "autopipe" else request.num_parted or 0
    if count >= wanted:
        return ()
    are = "1 micro-batch is" if count == 1 else f"{count} micro-batches are"
    rest = "no other has a forward in the warm-up of the first stage"
    some = f"only {are} sliced: {rest if count < workload.num_microbatches else 'there are no more'}"
    text = f"--slices {request.num_parted}: {some if count else f'no micro-batch is sliced: {why}'}"
    warnings.warn(text, stacklevel=3)
    return (text,)


def _sharing_left_out(request: Request, workload: Workload) -> tuple[str, ...]:
    """That replicas of the plan divide nothing, where a level of ``--zero`` was asked for, which is warned of."""
    group, devices = request.zero_group, request.num_devices
    if request.zero in (None, 0, AUTO) or any(stage.zero for stage in workload.stages) or request.replicas == 1:
        return ()  # one copy is not asked for beside a level, but is that of a layout in a comparison
    asked = f"--zero {request.zero}{'' if group is None else f' --zero-group {group}'}"
    has = "no replicas" if group is None else f"no replicas in groups of {group}"
    remedy = f"give --replicas {'' if group is None else f'{group}, or a multiple, '}to look at no others"
    if request.replicas is None and isinstance(request.placement, str) and request.placement != "auto":
        remedy = f"--placement {request.placement} looks at no replicas unless --dp says so"
    shards, context, positions = request.shards, request.context or 1, request.positions
    if shards is not None and positions is not None and shards * context * positions == devices:
        remedy = f"--tp {shards} and --pp {positions} leave no room for any; leave --zero out"
    if group is not None and devices % group:
        factor = next(each for each in range(2, devices + 1) if devices % each == 0)
        remedy = f"choose a --zero-group that divides {devices} devices, such as {factor}"
    text = f"{asked} divides nothing: the best plan that was found has {has}; {remedy}"
    warnings.warn(text, stacklevel=3)
    return (text,)


def _usual_level_said(request: Request, workload: Workload) -> tuple[str, ...]:
    """That replicas divide what costs no messages, where nothing says what those of other levels take."""
    asked = request.zero not in (None, AUTO) or request.knows_links
    if asked or max(stage.zero for stage in workload.stages) != 1:
        return ()
    return (
        "replicas divide the optimizer's state (ZeRO 1), which sends no more than sums of gradients; without --cluster "
        "nothing prices what levels 2 and 3 send, and they are left out unless nothing else fits, or --zero asks",
    )


@dataclass(frozen=True, slots=True)
class CandidateCounts:
    """Placements, with sizes, replicas and recomputation: looked at, of these proved no better, not all looked at.

    ``at_least``: there was no time to count all that are ``left``, and there may be more.
    """

    looked_at: int
    refuted: int
    left: int
    at_least: bool = False

    @property
    def not_tried(self) -> str:
        """How many are left, in words; empty where none is."""
        return f"{'at least ' * self.at_least}{counted(self.left, 'placement')} not tried" if self.left else ""

    def figures(self) -> dict[str, object]:
        """As in ``search --json``, which says ``at_least`` where it is so."""
        found = asdict(self)
        if not self.at_least:
            del found["at_least"]
        return found

    @classmethod
    def of_all(cls, counts: Sequence[CandidateCounts]) -> CandidateCounts:
        """Those of several searches together."""
        return cls(
            sum(each.looked_at for each in counts),
            sum(each.refuted for each in counts),
            sum(each.left for each in counts),
            any(each.at_least for each in counts),
        )


@dataclass(frozen=True, slots=True)
class TargetCost:
    """What the limits of the target with this ``title`` cost, by a ``measure``, in ns: of the plan, at least, and free.

    ``bound_ns`` is what no plan is below, whatever runs it; ``free_ns`` the best that was met on the way without the
    limits, of a plan with these ``words``; None where none was.
    """

    title: str
    measure: str
    own_ns: int
    bound_ns: int
    free_ns: int | None
    words: str

    @property
    def over_free(self) -> float | None:
        """How much more that is than the best free plan; less than 0 where that is not better."""
        return None if self.free_ns is None else self.own_ns / self.free_ns - 1

    @property
    def over_bound(self) -> float:
        """How much more that is than the bound over everything."""
        return self.own_ns / self.bound_ns - 1

    @property
    def said(self) -> str:
        """In a sentence."""
        serves = self.measure != "iteration"
        step = "decode step" if self.measure == "decode step" else "forward of a micro-batch"
        measure = f"the busiest stage's {step}" if serves else "an iteration"
        bound = "stages of equal work would take" if serves else "the bound over everything is"
        beside = f"{bound} {format_ns(self.bound_ns)} ({self.over_bound:.1%} away)"
        why = ""
        if self.measure == "busiest stage":
            why = "; the profile says nothing of what inference keeps in a cache, so that the busiest stage decides"
        if self.over_free is None:
            free = "no plan without its limits was met in this time"
        elif self.over_free > 0:
            met = f"{format_ns(self.free_ns or 0)} ({self.words})"
            free = f"{self.over_free:.1%} more than the best without its limits, {met}"
        else:
            free = "nothing better was met without its limits"
        return f"for {self.title} {measure} takes {format_ns(self.own_ns)}: {free}; {beside}{why}"

    def figures(self) -> dict[str, object]:
        """As in JSON."""
        return {**asdict(self), "over_free": self.over_free, "over_bound": self.over_bound}


@dataclass(frozen=True, slots=True)
class CacheCost:
    """What a server's cut has for its cache: tokens of the cut, at most, and of blocks cut anywhere, if that is known.

    Requests of ``context`` tokens, of which a step takes ``batch``; its busiest stage takes ``busiest_ns``. Where the
    server has blocks of ``block_tokens`` tokens, as many of these as are whole.
    """

    title: str
    own_tokens: int
    bound_tokens: int
    free_tokens: int | None
    context: int
    batch: int
    busiest_ns: int
    block_tokens: int

    @property
    def max_requests(self) -> int:
        """Requests of ``context`` tokens that fit at once."""
        return self.own_tokens // self.context

    @property
    def blocks(self) -> int | None:
        """Whole blocks of the server's; None where it has none."""
        return self.own_tokens // self.block_tokens if self.block_tokens else None

    @property
    def said(self) -> str:
        """In a sentence."""
        blocks = f" ({self.blocks:,} blocks of {self.block_tokens})" if self.blocks is not None else ""
        free = "blocks cut anywhere have room for no more"
        if self.free_tokens is not None and self.free_tokens > self.own_tokens:
            free = f"{1 - self.own_tokens / self.free_tokens:.1%} fewer than if blocks were cut anywhere"
        away = f"{1 - self.own_tokens / self.bound_tokens:.1%} fewer than if all stages had room alike"
        return (
            f"for {self.title} the cache of every stage has room for {self.own_tokens:,} tokens{blocks}, "
            f"{self.max_requests} requests of {self.context:,}: {free}; {away}. A decode step of {self.batch} of "
            f"them takes {format_ns(self.busiest_ns)} in the busiest stage"
            + (", and not all fit at once" if self.batch > self.max_requests else "")
        )

    def figures(self) -> dict[str, object]:
        """As in JSON."""
        return {"measure": "cache", **asdict(self), "max_requests": self.max_requests, "blocks": self.blocks}


def _any_of(sizes: Sequence[int]) -> str:
    """``2, 4 or 8``; of many the first, and how many more there are."""
    if len(sizes) > NAMED_SIZES + 1:
        return f"{', '.join(map(str, sizes[:NAMED_SIZES]))} or {len(sizes) - NAMED_SIZES} other sizes"
    *others, last = map(str, sizes)
    return f"{', '.join(others)} or {last}" if others else last


@dataclass(frozen=True, slots=True)
class Result(Displayed):
    """A plan and how it was found; ``seconds`` is the whole search, ``partition_seconds`` choosing the stages.

    No plan that the request leaves open has an iteration below ``lower_bound_ns``, no schedule of the plan's own
    placement one below ``placement_lower_bound_ns``; gaps are of the iteration over each. Where the placement is given
    there is but one of them. ``timed_out``: the search would have gone on. ``notes`` say which of its steps failed,
    and what was asked for and is not. ``explanation``, where it was asked for, has the next best plans. ``sizes_left``
    are the micro-batch sizes per replica, of those that were open, of which nothing was looked at. ``tie`` is a simpler
    plan that is as good as this one. ``request`` is what was asked; None of a result put together by hand. ``cost`` is
    what the limits of the target cost, where there is one; ``start_ns`` what the plan takes here that the search was
    given to start from, if it fits. ``decode`` is what a plan of decode steps is for, ``spares`` what
    spare devices cost.
    """

    plan: Plan
    schedule: Schedule
    seconds: float
    partition_seconds: float | None
    interrupted: bool
    lower_bound_ns: int
    placement_lower_bound_ns: int
    candidates: CandidateCounts
    timed_out: bool = False
    notes: tuple[str, ...] = ()
    explanation: Explanation | None = None
    sizes_left: tuple[int, ...] = ()
    tie: EqualPlan | None = None
    request: Request | None = field(default=None, repr=False, compare=False)
    cost: TargetCost | CacheCost | None = None
    start_ns: int | None = None
    decode: DecodeAnswer | None = None
    spares: Spares | None = None

    def __repr__(self) -> str:
        bound = f"bound {format_ns(self.lower_bound_ns)}, gap {self.gap:.2%}"
        return f"<Result {self.status}, {bound}: {self.plan!r}>"

    @property
    def status(self) -> str:
        """``optimal`` where nothing that the request leaves open is quicker, otherwise ``feasible``."""
        return "optimal" if self.gap == 0 else "feasible"

    @property
    def stands_in(self) -> bool:
        """Whether the plan is an even cut, as what was asked for had none when the search ended."""
        made = self.plan.provenance
        return self.request is not None and stands_in(
            self.request, str(made.options.get("stages")), str(made.scheduler)
        )

    @property
    def gap(self) -> float:
        """How much longer the iteration is than anything that the request leaves open must be."""
        return self.plan.predicted.iteration_ns / self.lower_bound_ns - 1

    @property
    def placement_gap(self) -> float:
        """How much longer the iteration is than any of the plan's own placement must be."""
        return self.plan.predicted.iteration_ns / self.placement_lower_bound_ns - 1

    @property
    def not_tried(self) -> str:
        """What was not tried for lack of time, as ``6 placements not tried, nor micro-batches of 2 or 4``; or empty."""
        sizes = f", nor micro-batches of {_any_of(self.sizes_left)}" if self.sizes_left else ""
        return self.candidates.not_tried and f"{self.candidates.not_tried}{sizes}"

    @property
    def throughput(self) -> Throughput:
        """The throughput of the predicted iteration."""
        plan = self.plan
        measure = Yardstick.of_plan(plan)
        return measure.throughput(plan.mini_batch, plan.predicted.iteration_ns, sum(plan.device_speeds))

    @property
    def tail(self) -> Tail:
        """What follows the plan's last actions."""
        return tail_at(self.plan.workload, self.plan.starts_ns, self.plan.loop)

    def figures(self) -> dict[str, object]:
        """The figures of ``search --json``: all of them the plan's. One that does not repeat has no period."""
        predicted, repetend = self.plan.predicted, self.plan.repetend
        return {
            "name": self.plan.name,
            "status": self.status,
            "scheduler": self.plan.provenance.scheduler,
            "makespan_ns": predicted.makespan_ns,
            "iteration_ns": predicted.iteration_ns,
            **self.tail.figures(),
            **self.throughput.figures(),
            "lower_bound_ns": self.lower_bound_ns,
            "gap": self.gap,
            "placement_lower_bound_ns": self.placement_lower_bound_ns,
            "placement_gap": self.placement_gap,
            "candidates": self.candidates.figures(),
            "timed_out": self.timed_out,
            "period_ns": predicted.period_ns,
            "period_lower_bound_ns": predicted.period_lower_bound_ns,
            "unroll": None if repetend is None else repetend.unroll,
            "span": None if repetend is None else repetend.span,
            "bubble_rate": predicted.bubble_rate,
            "bubble_rate_span": predicted.bubble_rate_span,
            "bubble_rate_steady": predicted.bubble_rate_steady,
            "peak_memory_bytes": of_devices(self.plan.players, [memory.peak_bytes for memory in predicted.memory]),
            "num_microbatches": self.plan.num_microbatches,
            "microbatch_size": self.plan.microbatch_size,
            "samples_per_replica": list(self.schedule.workload.samples_per_replica),
            "num_devices": self.plan.num_devices,
            "idle_devices": list(self.plan.workload.idle_devices),
            "placement": self.plan.placement,
            **({"zero": level} if (level := max(stage.zero for stage in self.plan.stages)) else {}),
            "split_backward": self.schedule.workload.splits_backward,
            "sliced_microbatches": num_sliced(self.schedule.workload),
            **({"late_inputs": True} if self.plan.workload.has_parts else {}),
            **({"kernels": found} if (found := blocks_by_backend(self.plan)) else {}),
            "repeats": repetend is not None,
            "choices": dict(self.plan.provenance.choices),
            "interrupted": self.interrupted,
            "search_seconds": self.seconds,
            "repetend_seconds": self.schedule.repetend_seconds,
            "partition_seconds": self.partition_seconds,
            "notes": list(self.notes),
            **({} if self.cost is None else {"for": self.cost.figures()}),
            **({} if self.decode is None else self.decode.figures()),
            **({} if self.explanation is None else self.explanation.figures()),
            **({} if self.spares is None else {"spares": self.spares.figures()}),
        }
