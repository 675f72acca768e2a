"""What pipeplan does, one function each: the command line reads, plans, measures, runs and writes only through these.

Nothing is imported until a function is called, so that ``import pipeplan`` and ``pipeplan --help`` take a moment.
"""

from __future__ import annotations

import importlib
import os
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from concurrent.futures import Executor

    from pipeplan.checker import Report as Report
    from pipeplan.costs.communication import LinkResult as LinkResult
    from pipeplan.costs.inspection import Inspection as Inspection
    from pipeplan.costs.inspection import ProfileResult as ProfileResult
    from pipeplan.costs.uniform.judging import RunsFit as RunsFit
    from pipeplan.files import Cluster as Cluster
    from pipeplan.files import Cover as Cover
    from pipeplan.files import FileModel as FileModel
    from pipeplan.files import Placement as Placement
    from pipeplan.files import Plan as Plan
    from pipeplan.files import Profile as Profile
    from pipeplan.files import read_cluster as read_cluster
    from pipeplan.files import read_cover as read_cover
    from pipeplan.files import read_modules as read_modules
    from pipeplan.files import read_placement as read_placement
    from pipeplan.files import read_plan as read_plan
    from pipeplan.files import read_profile as read_profile
    from pipeplan.files import require_writable as require_writable
    from pipeplan.files import to_json as to_json
    from pipeplan.files import write_elsewhere as write_elsewhere
    from pipeplan.files import write_file as write_file
    from pipeplan.files import write_text as write_text
    from pipeplan.files.read_write import read_bytes as read_bytes
    from pipeplan.files.recipe import GradientDtype
    from pipeplan.files.run_logs import RunLog as RunLog
    from pipeplan.files.trace import MeasuredTrace as MeasuredTrace
    from pipeplan.interop.export import Export as Export
    from pipeplan.interop.export import export_targets as export_targets
    from pipeplan.interop.imports import Imported as Imported
    from pipeplan.interop.imports import imported as imported
    from pipeplan.interop.imports import read_source as read_source
    from pipeplan.interop.settings import trainer_settings as trainer_settings
    from pipeplan.interop.torch_schedule import MODULES_ENDING as MODULES_ENDING
    from pipeplan.kernels.backend import Backend
    from pipeplan.kernels.evolution import Generation
    from pipeplan.partition.strategies import STRATEGIES as STRATEGIES
    from pipeplan.planning.build_plan import Result as Result
    from pipeplan.planning.comparison import Comparison as Comparison
    from pipeplan.planning.decoding import ServingAsked as ServingAsked
    from pipeplan.planning.frontier import FrontierResult as FrontierResult
    from pipeplan.planning.frontier import Mode as Mode
    from pipeplan.planning.frontier import frontier_notes as frontier_notes
    from pipeplan.planning.frontier import frontier_request as frontier_request
    from pipeplan.planning.frontier_file import read_frontier as read_frontier
    from pipeplan.planning.kernel_choice import GraphLevel as GraphLevel
    from pipeplan.planning.kernel_choice import KernelChoice as KernelChoice
    from pipeplan.planning.kernel_evolution import EvolutionAsked as EvolutionAsked
    from pipeplan.planning.kernel_profile import BackendsAsked as BackendsAsked
    from pipeplan.planning.kernel_stages import KernelsAsked as KernelsAsked
    from pipeplan.planning.request import Request as Request
    from pipeplan.planning.request import Splitting as Splitting
    from pipeplan.planning.request import input_notes as input_notes
    from pipeplan.planning.restrictions import search_targets as search_targets
    from pipeplan.planning.tuning import Tuning as Tuning
    from pipeplan.reporting.html.report import PlanReport as PlanReport
    from pipeplan.runtime.decoding.options import DecodeOptions as DecodeOptions
    from pipeplan.runtime.decoding.options import DecodeOutcome as DecodeOutcome
    from pipeplan.runtime.decoding.options import read_prompts as read_prompts
    from pipeplan.runtime.decoding.options import tokenizer_of as tokenizer_of
    from pipeplan.runtime.launch.job import Evaluated as Evaluated
    from pipeplan.runtime.launch.job import Event as Event
    from pipeplan.runtime.launch.job import RunOptions as RunOptions
    from pipeplan.runtime.launch.job import RunResult as RunResult
    from pipeplan.runtime.launch.job import Started as Started
    from pipeplan.runtime.launch.job import StepResult as StepResult
    from pipeplan.runtime.models.given_names import PythonValue as PythonValue
    from pipeplan.runtime.models.load import advice_on as advice_on
    from pipeplan.runtime.models.load import hindrance_of as hindrance_of
    from pipeplan.runtime.models.load import load_where_even as load_where_even
    from pipeplan.runtime.models.load import takes_sequence as takes_sequence
    from pipeplan.runtime.models.spec import Model as Model
    from pipeplan.runtime.profiling.links import Keep, OnPoint
    from pipeplan.runtime.profiling.links import LinkOptions as LinkOptions
    from pipeplan.runtime.profiling.links import LinkPoint as LinkPoint
    from pipeplan.runtime.profiling.rounds import UnfinishedProfile as UnfinishedProfile
    from pipeplan.runtime.training.options import OF_TRAINING as OF_TRAINING
    from pipeplan.runtime.training.options import RunOutcome as RunOutcome
    from pipeplan.runtime.training.options import TrainOptions as TrainOptions
    from pipeplan.runtime.training.options import throughput_of as throughput_of
    from pipeplan.schedule.rules import Rules as Rules
    from pipeplan.schedule.rules.given_order import num_microbatches_of as num_microbatches_of
    from pipeplan.schedule.rules.language import to_toml as to_toml
    from pipeplan.schedule.state import Progress as Progress
    from pipeplan.simulator.simulation import Simulation as Simulation
    from pipeplan.time_limit import Limit as Limit

_PARTS = {
    "pipeplan.checker": ("Report",),
    "pipeplan.costs.inspection": ("Inspection", "ProfileResult"),
    "pipeplan.costs.uniform.judging": ("RunsFit",),
    "pipeplan.files": (
        *("Block", "Cluster", "CostRow", "Cover", "DeviceKind", "Edge", "FailureDomain", "LinkLevel"),
        *("PlacedStage", "Placement", "Plan", "Profile", "Source"),
        *(
            "read_cluster",
            "read_cover",
            "read_modules",
            "read_placement",
            "read_plan",
            "read_profile",
            "require_writable",
        ),
        *("to_json", "write_elsewhere", "write_file", "write_text"),
    ),
    "pipeplan.files.read_write": ("read_bytes",),
    "pipeplan.interop.export": ("Export", "export_targets"),
    "pipeplan.interop.imports": ("Imported", "imported", "read_source"),
    "pipeplan.interop.torch_schedule": ("MODULES_ENDING",),
    "pipeplan.interop.settings": ("trainer_settings",),
    "pipeplan.partition.strategies": ("STRATEGIES",),
    "pipeplan.planning.build_plan": ("Result",),
    "pipeplan.planning.comparison": ("Comparison",),
    "pipeplan.planning.frontier": ("FrontierResult", "frontier_notes", "frontier_request"),
    "pipeplan.planning.frontier_file": ("read_frontier",),
    "pipeplan.planning.tuning": ("Tuning",),
    "pipeplan.planning.restrictions": ("search_targets",),
    "pipeplan.planning.decoding": ("ServingAsked",),
    "pipeplan.planning.kernel_stages": ("KernelsAsked",),
    "pipeplan.planning.kernel_choice": ("GraphLevel", "KernelChoice"),
    "pipeplan.planning.kernel_evolution": ("EvolutionAsked",),
    "pipeplan.planning.kernel_profile": ("BackendsAsked",),
    "pipeplan.planning.request": ("Request", "Splitting", "input_notes"),
    "pipeplan.reporting.html.report": ("PlanReport",),
    "pipeplan.runtime.decoding.options": ("DecodeOptions", "DecodeOutcome", "read_prompts", "tokenizer_of"),
    "pipeplan.runtime.profiling.links": ("LinkOptions",),
    "pipeplan.runtime.models.load": ("advice_on", "hindrance_of", "load_where_even", "takes_sequence"),
    "pipeplan.runtime.models.spec": ("Model",),
    "pipeplan.runtime.launch.job": ("Evaluated", "RunOptions", "Started", "StepResult"),
    "pipeplan.runtime.models.given_names": ("PythonValue",),
    "pipeplan.runtime.profiling.rounds": ("UnfinishedProfile",),
    "pipeplan.runtime.training.options": ("OF_TRAINING", "RunOutcome", "TrainOptions", "throughput_of"),
    "pipeplan.schedule.rules": ("Rules",),
    "pipeplan.schedule.rules.given_order": ("num_microbatches_of",),
    "pipeplan.schedule.rules.language": ("to_toml",),
    "pipeplan.simulator.simulation": ("Simulation",),
    "pipeplan.time_limit": ("Limit",),
}
"""What goes in and out of the functions here, and the modules that have it."""


def __getattr__(name: str) -> object:
    """A part, imported when it is asked for."""
    for module, names in _PARTS.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# Planning ---------------------------------------------------------------------------------------------------------

Planning = Literal["search", "tune", "compare", "frontier", "kernels"]
"""The functions here that search."""

_MODULE_OF: dict[Planning, str] = {
    "search": "targeted",
    "tune": "tuning",
    "compare": "comparison",
    "frontier": "frontier",
    "kernels": "kernel_choice",
}


def load(what: Planning) -> None:
    """Import what a function needs, which takes half a second; the solver comes when it is needed."""
    importlib.import_module(f"pipeplan.planning.{_MODULE_OF[what]}")


def search(
    request: Request,
    *,
    progress: Progress | None = None,
    within: Limit | None = None,
    explain: bool = False,
    workers: int = 1,
    executor: Executor | str | None = None,
) -> Result:
    """The best plan, with ``explain`` the next best ones, too; see :func:`pipeplan.planning.steps.search_plan`.

    An ``executor`` may be named, as on the command line.

    Raises:
        InfeasibleError: nothing fits.
        SearchTimeoutError: time ran out with nothing found.
        UsageError: the request contradicts the profile.
    """
    how: Any = {"progress": progress, "explain": explain}
    by: Any = {"workers": workers, "executor": executor}
    if request.spares:
        from pipeplan.planning.spares import search_spared

        return search_spared(request, lambda asked, part: search(asked, within=part, **how, **by), within)
    if request.decodes:
        from pipeplan.planning.decode_search import search_decoding

        return search_decoding(request, within=within, **how)
    return _search_training(request, executor, workers=workers, within=within, **how)


def _search_training(request: Request, executor: Executor | str | None, *, within: Limit | None, **how: Any) -> Result:
    """The search of a plan that is not of decode steps."""
    found = _search_of(request)
    with _executor(executor, request, within) as (known, limit):
        return found(request, executor=known, within=limit, **how)


@contextmanager
def _executor(
    named: Executor | str | None, request: Request, within: Limit | None
) -> Iterator[tuple[Executor | None, Limit | None]]:
    """The executor, which may be a name as on the command line, and the limit that waiting for it has begun."""
    if not isinstance(named, str):
        yield named, within
        return
    from pipeplan.planning.workers import named_executor
    from pipeplan.time_limit import Limit

    if within is None and not request.deterministic:
        within = Limit(request.time_limit)
    with named_executor(named, within) as found:
        yield found, within


def _search_of(request: Request) -> Callable[..., Result]:
    """What searches for a plan as it is asked for; what does not is not imported."""
    if request.kernels is not None:
        from pipeplan.planning.kernel_search import search_kernels

        return search_kernels
    if request.only is not None:
        from pipeplan.planning.targeted import search_target

        return search_target
    from pipeplan.planning.steps import search_plan

    return search_plan


def tune(
    request: Request,
    *,
    workers: int | None = None,
    cache: str | None = None,
    progress: Progress | None = None,
    within: Limit | None = None,
) -> Tuning:
    """All built-in rules on a grid, by one process per core; see :func:`pipeplan.planning.tuning.tune`.

    Raises:
        InfeasibleError: no cell fits.
        SearchTimeoutError: time ran out with nothing found.
        UsageError: the request contradicts the profile, or the cache is none.
    """
    from pipeplan.planning.tuning import tune

    return tune(request, workers=workers or os.cpu_count() or 1, cache=cache, progress=progress, within=within)


def compare(
    request: Request, *, rules: Rules | None = None, progress: Progress | None = None, within: Limit | None = None
) -> Comparison:
    """Every known schedule, and that of rules, beside the search's; see :func:`pipeplan.planning.comparison.compare`.

    Raises:
        SearchTimeoutError: time ran out with nothing found.
        UsageError: no placement is possible.
    """
    from pipeplan.planning.comparison import compare

    if request.spares:
        from pipeplan.planning.spares import compare_spared

        how: Any = {"rules": rules, "progress": progress}
        return compare_spared(request, lambda asked, part: compare(asked, within=part, **how), within)
    return compare(request, rules=rules, progress=progress, within=within)


def frontier(
    request: Request,
    *,
    mode: Mode = "all",
    point: int | None = None,
    progress: Progress | None = None,
    within: Limit | None = None,
    workers: int = 1,
    executor: Executor | str | None = None,
    written: float = 0,
) -> FrontierResult:
    """Time against memory against devices; see :func:`pipeplan.planning.frontier.search_frontier`.

    An ``executor`` may be named, as on the command line.

    Raises:
        InfeasibleError: nothing fits.
        UsageError: there is no such point.
    """
    from pipeplan.planning.frontier import search_frontier

    how: Any = {"mode": mode, "point": point, "progress": progress, "workers": workers, "written": written}
    with _executor(executor, request, within) as (known, limit):
        how["executor"] = known
        if request.spares:
            from pipeplan.planning.spares import frontier_spared

            return frontier_spared(request, lambda asked, part: search_frontier(asked, within=part, **how), limit)
        return search_frontier(request, within=limit, **how)


# Plans ------------------------------------------------------------------------------------------------------------


def check(plan: Plan, profile: Profile | None = None, cluster: Cluster | None = None) -> Report:
    """What is wrong with a plan, recomputed independently of what made it; see :func:`pipeplan.checker.check`."""
    from pipeplan.checker import check

    return check(plan, profile, cluster)


def simulate(
    plan: Plan, num_microbatches: int | None = None, profile: Profile | None = None, cluster: Cluster | None = None
) -> Simulation:
    """When every action runs; see :func:`pipeplan.simulator.simulation.simulate`.

    Raises:
        InvalidPlanError: the plan's programs cannot run.
        UsageError: number of micro-batches, profile or cluster are not for the plan.
    """
    from pipeplan.simulator.simulation import simulate

    return simulate(plan, num_microbatches, profile, cluster)


def with_measured(
    simulation: Simulation, paths: Sequence[str], profile: Profile | None = None, cluster: Cluster | None = None
) -> Simulation:
    """Predicted beside measured: of a trace that a run of the plan wrote, or what another trainer says of its run.

    ``profile`` and ``cluster`` are what the plan was simulated with.

    Raises:
        FileError: a file cannot be read, or says nothing of a run.
        UsageError: it is of another plan.
    """
    return measured_run(simulation, paths, profile, cluster)[0]


def measured_run(
    simulation: Simulation, paths: Sequence[str], profile: Profile | None = None, cluster: Cluster | None = None
) -> tuple[Simulation, MeasuredTrace | RunLog]:
    """The same, and the run, for :func:`pipeplan.reporting.beside.trace_beside`."""
    from dataclasses import replace

    from pipeplan.files.run_logs import RunLog, read_run
    from pipeplan.simulator.measured import compared, compared_with_log

    if simulation.plan.players:  # what ran did so device by device
        from pipeplan.files.folded import unfolded
        from pipeplan.simulator.simulation import simulate

        simulation = simulate(unfolded(simulation.plan), simulation.workload.num_microbatches, profile, cluster)
    run = read_run(paths, simulation.plan.num_devices)
    measured = compared_with_log(simulation, run) if isinstance(run, RunLog) else compared(simulation, run)
    return replace(simulation, measured=measured), run


def read_load_factor(path: str) -> float:
    """Of devices that share experts, the load of the busiest over the average, as a run has measured it."""
    from pipeplan.files.run_logs import read_load_factor as read

    return read(path)


def report(
    plans: Sequence[Plan], measured: Sequence[str] = (), frontier: FrontierResult | None = None, command: str = ""
) -> PlanReport:
    """Plans as a page; see :func:`pipeplan.reporting.html.report.report_of`. Raises UsageError."""
    from pipeplan.reporting.html.report import report_of

    return report_of(plans, measured, frontier, command)


def export(plan: Plan, to: str, names: Sequence[str] = (), base: str | None = None) -> Export:
    """A plan in another tool's words; see :func:`pipeplan.interop.export.exported`. Raises UsageError."""
    from pipeplan.interop.export import exported

    return exported(plan, to, names, base)


# Profiles ---------------------------------------------------------------------------------------------------------


def require_torch(verb: str) -> None:
    """Refuse without torch. Raises UsageError."""
    import importlib.util

    from pipeplan.errors import UsageError

    if importlib.util.find_spec("torch") is None:
        raise UsageError(f"{verb} needs torch, which is not installed: pip install 'pipeplan[torch]'")


def for_kinds(
    profile: Profile, profiles: Mapping[str, Profile], cluster: Cluster | None = None, plan: Plan | None = None
) -> Profile:
    """A profile beside those of kinds of devices; see :func:`pipeplan.costs.kinds.for_kinds`. Raises UsageError."""
    from pipeplan.costs.kinds import for_kinds

    return for_kinds(profile, profiles, cluster, plan)


def with_asked_recipe(
    profile: Profile,
    precision: str | None = None,
    gradient_dtype: GradientDtype | None = None,
    optimizer: str | None = None,
) -> Profile:
    """The profile with the recipe that a request asks for; None leaves what it says.

    Raises:
        UsageError: there is no such recipe, or the profile cannot have it.
    """
    from pipeplan.costs.recipes import recipe_asked, with_recipe

    return with_recipe(profile, recipe_asked(profile, precision, gradient_dtype, optimizer))


def profile(
    model: Model,
    microbatch_sizes: Sequence[int],
    *,
    dtype: str | None = None,
    precision: str | None = None,
    gradient_dtype: GradientDtype | None = None,
    optimizer: str | None = None,
    threads: int | None = None,
    **how: Any,
) -> Profile:
    """Measure a model block by block; see :func:`pipeplan.runtime.profiling.measure.profile_model`, also for errors."""
    from pipeplan.costs.recipes import MEASURED, measurable, profiled_recipe
    from pipeplan.runtime.profiling.build_profile import dtype_of, on_threads
    from pipeplan.runtime.profiling.measure import profile_model

    dtype, recipe = profiled_recipe(MEASURED, "float32", dtype, precision, gradient_dtype, optimizer)
    with on_threads(threads):
        return profile_model(model, microbatch_sizes, dtype=dtype_of(dtype), recipe=measurable(recipe), **how)


def read_calibration(path: str, device: str) -> Profile | RunsFit:
    """A measured profile, or what a file of published runs says of a preset. Raises FileError and UsageError."""
    from pipeplan.costs.uniform.judging import fit_device, holds_runs, read_runs
    from pipeplan.files import read_profile

    return fit_device(read_runs(path), device) if holds_runs(path) else read_profile(path)


def estimate(
    model: Model,
    microbatch_sizes: Sequence[int],
    *,
    device: str,
    dtype: str | None = None,
    precision: str | None = None,
    gradient_dtype: GradientDtype | None = None,
    optimizer: str | None = None,
    **how: Any,
) -> Profile:
    """Estimate a model for a preset: :func:`pipeplan.runtime.profiling.estimate.estimate_model`, also for errors."""
    from pipeplan.costs.devices import device_preset
    from pipeplan.costs.recipes import ESTIMATED, profiled_recipe
    from pipeplan.runtime.models.load import reference_model
    from pipeplan.runtime.profiling.build_profile import dtype_of
    from pipeplan.runtime.profiling.estimate import estimate_model

    preset = device_preset(device)
    how["reference"] = reference_model(model, how.get("calibration"))
    dtype, recipe = profiled_recipe(ESTIMATED, preset.dtype, dtype, precision, gradient_dtype, optimizer)
    return estimate_model(model, microbatch_sizes, device=preset, dtype=dtype_of(dtype), recipe=recipe, **how)


def profile_inference(
    model: Model,
    batches: Sequence[int],
    contexts: Sequence[int] = (),
    *,
    shards: Sequence[int] = (1,),
    dcp: Sequence[int] = (1,),
    expert: Sequence[int] = (1,),
    dtype: str | None = None,
    threads: int | None = None,
    processes: int | None = None,
    named: tuple[str, dict[str, Any]] | None = None,
    cluster: Cluster | None = None,
    progress: Callable[[int, int, str], None] | None = None,
    **how: Any,
) -> Profile:
    """Measure forwards: :func:`pipeplan.runtime.profiling.inference.measure_inference`, also for errors; with ``dcp``
    also steps whose caches lie in pieces, and with ``processes`` in so many at once, which load the model as ``named``.
    """
    from pipeplan.runtime.decoding.piece_rows import MeasuredForwards, measure_at_once
    from pipeplan.runtime.profiling.build_profile import on_threads
    from pipeplan.runtime.profiling.inference import InferenceRequest

    asked = InferenceRequest(tuple(batches), tuple(contexts), tuple(shards))
    asked.decoder_of(model)
    forwards = MeasuredForwards(asked, tuple(dcp), tuple(expert), dtype=dtype or "float32", **how)
    if processes is not None and named is not None:
        return measure_at_once(processes, forwards, *named, cluster, threads=threads, progress=progress)
    with on_threads(threads):
        return forwards.profile(model, cluster, progress)


def profile_backends(
    model: Model,
    profile: Profile,
    sizes: Sequence[int],
    asked: BackendsAsked,
    *,
    threads: int | None = None,
    device: str = "cpu",
    tell: Callable[[str], None],
    **how: Any,
) -> Profile:
    """A profile with what kernel backends take: :func:`pipeplan.planning.kernel_profile.with_backends`.

    Raises:
        UsageError: a backend is not known, or a module of a user has none.
    """
    from pipeplan.planning.kernel_profile import with_backends
    from pipeplan.runtime.profiling.build_profile import on_threads
    from pipeplan.runtime.profiling.instruments import steady
    from pipeplan.runtime.profiling.whole_covers import WholeRunner

    backends = asked.usable(device, tell, training=not profile.is_inference)
    kept = {name: how.pop(name) for name in ("keep", "progress")}
    with on_threads(threads):
        benches = _group_benches(model, profile, {each.name: each for each in backends}, device, **how)
        blocks, versions, run = benches.described(min(sizes)), benches.versions, WholeRunner(benches).times
        with steady(benches.device):  # what is there already is looked through once, not for each group
            return with_backends(
                profile, blocks, sizes, backends, benches.measure, run, asked, versions, tell=tell, **kept
            )


def _group_benches(model: Model, profile: Profile, backends: Mapping[str, Backend], device: str, **how: Any) -> Any:
    """What measures groups of a model by backends, in the profile's number format."""
    from pipeplan.runtime.backends.building import GroupBuilder
    from pipeplan.runtime.profiling.build_profile import dtype_of
    from pipeplan.runtime.profiling.groups import GroupBenches

    dtype, training = dtype_of(profile.source.dtype), not profile.is_inference
    builders = {name: GroupBuilder.of(name, each.module) for name, each in backends.items()}
    tolerances = {name: each.tolerance for name, each in backends.items()}
    measured: dict[str, Any] = {"dtype": dtype, "device": device, "training": training, **how}
    return GroupBenches(model, builders=builders, tolerances=tolerances, **measured)


def goes_on(profile: Profile, model: Model, sizes: Sequence[int], *, threads: int | None, **how: Any) -> str:
    """Why a profile is not the same model measured here, so that it does not go on; empty where it is.

    See :func:`pipeplan.runtime.profiling.groups.difference`.
    """
    from pipeplan.runtime.profiling.build_profile import dtype_of, on_threads
    from pipeplan.runtime.profiling.groups import difference

    dtype = dtype_of(how.pop("dtype") or "float32")
    with on_threads(threads):
        return difference(profile, model, sizes, dtype, **how)


def with_more_sizes(profile: Profile, made: Profile) -> Profile:
    """Rows of two profiles: :func:`pipeplan.kernels.measuring.with_more_sizes`, also for errors."""
    from pipeplan.kernels.measuring import with_more_sizes

    return with_more_sizes(profile, made)


def pending_group(path: str) -> str | None:
    """The group that a profile in the making says was being built or run; None where there is none, or no profile."""
    from pipeplan.errors import FileError
    from pipeplan.files import read_profile, write_file
    from pipeplan.kernels.measuring import settled_pending

    try:
        label, settled = settled_pending(read_profile(path))
    except FileError:
        return None
    if label is not None:
        write_file(settled, path)
    return label


def choose_kernels(
    profile: Profile, microbatch_size: int | None = None, seconds: float = 30.0, within: Limit | None = None
) -> KernelChoice:
    """Which backend runs each block: :func:`pipeplan.planning.kernel_choice.choose_kernels`, also for errors."""
    from pipeplan.planning.kernel_choice import choose_kernels
    from pipeplan.schedule.cpsat.solver import Budget

    return choose_kernels(profile, microbatch_size, Budget(seconds, whole=within))


def evolve_kernels(
    choice: KernelChoice, model: Model, asked: EvolutionAsked, tell: Callable[[Generation], None] = lambda each: None
) -> GraphLevel:
    """The graph level from a choice on: see :func:`pipeplan.planning.kernel_evolution.graph_level`, also for errors."""
    from pipeplan.planning.kernel_evolution import graph_level
    from pipeplan.runtime.profiling.build_profile import on_threads
    from pipeplan.runtime.profiling.instruments import steady
    from pipeplan.runtime.profiling.whole_covers import WholeCovers
    from pipeplan.time_limit import Limit

    library, backends = asked.chosen(choice)
    with on_threads(asked.threads):
        how = {"seed": asked.seed, "repeats": asked.repeats, "warmup": 1}
        benches = _group_benches(model, choice.profile, backends, asked.device, **how)
        benches.described(choice.size)
        measure, limit = WholeCovers(benches, choice.size, asked.repeats).measure, Limit(asked.limit_s)
        with steady(benches.device):  # as for groups
            return graph_level(choice, library, measure, seed=asked.seed, over=lambda: limit.over, tell=tell)


def estimate_inference(
    model: Model,
    batches: Sequence[int],
    contexts: Sequence[int] = (),
    *,
    device: str,
    shards: Sequence[int] = (1,),
    dtype: str | None = None,
    weights: Any = None,
    kv_cache_dtype: str = "auto",
    **how: Any,
) -> Profile:
    """Estimate forwards: :func:`pipeplan.runtime.profiling.inference.estimate_inference`, also for errors."""
    from pipeplan.costs.devices import device_preset
    from pipeplan.costs.quantized import CACHES
    from pipeplan.runtime.profiling.build_profile import dtype_of
    from pipeplan.runtime.profiling.inference import InferenceRequest, estimate_inference

    preset = device_preset(device)
    asked = InferenceRequest(tuple(batches), tuple(contexts), tuple(shards), weights, CACHES.get(kv_cache_dtype))
    return estimate_inference(model, asked, device=preset, dtype=dtype_of(dtype or preset.dtype), **how)


# Links ------------------------------------------------------------------------------------------------------------


def measure_links(
    options: LinkOptions, processes: int | None, cluster: Cluster | None, *, on_point: OnPoint, keep: Keep
) -> LinkResult | None:
    """Measure links between processes started here, or as one of torchrun's ranks, of which rank 0 has a result.

    Raises:
        UsageError: the cluster does not fit.
        ExecutionError: a rank failed, died or hung.
    """
    from pipeplan.costs.communication import LinkResult
    from pipeplan.runtime.profiling.links import measure_links, measure_local

    if processes is not None:
        return LinkResult(measure_local(processes, options, cluster, on_point=on_point, keep=keep))
    found = measure_links(options, cluster, on_point=on_point, keep=keep)
    return None if found is None else LinkResult(found)


def add_links(cluster: Cluster, printed: Mapping[str, str], level: str | None = None) -> LinkResult:
    """The cluster with the link times that nccl-tests printed: path -> text. Raises UsageError or FileError."""
    from pipeplan.costs.clusters import parse_nccl_tests, with_runs
    from pipeplan.costs.communication import LinkResult
    from pipeplan.texts import on_one_line

    for path, text in printed.items():
        cluster = with_runs(cluster, parse_nccl_tests(text, path), level, on_one_line(os.path.basename(path)))
    return LinkResult(cluster)


# Runs -------------------------------------------------------------------------------------------------------------


def run(
    plan: Plan,
    options: RunOptions,
    on_event: Callable[[Event], None] = lambda event: None,
    *,
    on_look: Callable[[str], None] = lambda where: None,
    where: str = "the plan",
) -> RunOutcome:
    """Run a plan with one process per device here, among which the cores are divided.

    ``on_event`` gets what is known at the start, each step's result as it ends, and each evaluation's; ``on_look``,
    many times a second, where rank 0 is, in words. Ranks of options with objects are copies of this process. Signals
    end it as :func:`run_as_rank`.

    Raises:
        InvalidPlanError: the plan, which is ``where`` it says, is not right.
        UsageError: the ranks refused the model or the options.
        ExecutionError: a rank failed, died or hung.
    """
    from dataclasses import replace

    from pipeplan.runtime.launch.local import run_local
    from pipeplan.runtime.launch.machine import OthersUse

    check(plan).require(where)
    options = _settled(options, plan)
    options = _with_kernels(options) if any(stage.segments for stage in plan.stages) else options
    if options.has_objects or "OMP_NUM_THREADS" not in os.environ:
        cores = 1 if options.has_objects else (os.cpu_count() or 1)  # a copy has no pool of threads
        options = replace(options, num_threads=max(1, cores // plan.num_devices))
    others = OthersUse()
    with _stopping(options):
        result = run_local(options.job, plan, options, on_event, on_look, *_copied(options, plan.num_devices))
    return _outcome(plan, options, result, others.cores())


def _settled(options: RunOptions, plan: Plan) -> RunOptions:
    """The options with what the plan says where they leave it open. Raises UsageError."""
    from pipeplan.runtime.decoding.options import DecodeOptions
    from pipeplan.runtime.training.options import settled

    return options.by_plan(plan) if isinstance(options, DecodeOptions) else settled(options, plan)


def _with_kernels(options: RunOptions) -> RunOptions:
    """Options of a training with the kernel backends that are known here. Raises UsageError."""
    from dataclasses import replace

    from pipeplan.runtime.training.options import TrainOptions

    if not isinstance(options, TrainOptions):
        return options
    from pipeplan.kernels.backend import said_of_backends

    return replace(options, kernels=said_of_backends(tuple(options.backend_rules), options.device))


def _outcome(plan: Plan, options: RunOptions, result: RunResult, others_cores: float | None = None) -> RunOutcome:
    """What came of a run, of texts or of a training."""
    from pipeplan.runtime.decoding.options import DecodeOptions, DecodeOutcome
    from pipeplan.runtime.training.options import RunOutcome

    kind = DecodeOutcome if isinstance(options, DecodeOptions) else RunOutcome
    return kind(plan, options, result, others_cores)


def _copied(options: RunOptions, num_ranks: int) -> tuple[Callable[[Mapping[str, Any]], None], ...]:
    """What copies of this process do, where options have what no other process could. Raises UsageError."""
    from pipeplan.errors import UsageError

    if not options.has_objects:
        return ()
    if options.device != "cpu" or not hasattr(os, "fork"):
        raise UsageError(
            "what this program has made (a model, a loader, a function) reaches processes started here only as "
            "copies of this one, which Linux makes and CUDA does not survive: start the program with torchrun "
            f"--nproc-per-node {num_ranks}, or give names that other processes can import, pkg.mod:name"
        )
    from pipeplan.runtime.launch.worker import be_rank, require_no_group

    require_no_group()
    return (be_rank,)


def run_as_rank(
    read: Callable[[], Plan], options: RunOptions, on_event: Callable[[Event], None] = lambda event: None
) -> RunOutcome:
    """Be one of the ranks that a launcher has started, each of which has the result; ``on_event`` is rank 0's.

    A rank that fails says so, and its process ends with the error's exit code. A training that writes checkpoints ends
    with one after the step in which SIGTERM or SIGUSR1 came, which the outcome's ``stopped_by`` says.
    """
    from pipeplan.runtime.launch.worker import run_under_torchrun

    plans: list[Plan] = []

    def kept() -> Plan:
        plans.append(read())
        return plans[-1]

    heard = on_event if os.environ["RANK"] == "0" else lambda event: None
    with _stopping(options):
        result = run_under_torchrun(options.job, kept, _with_kernels(options), heard)
    return _outcome(plans[-1], _settled(options, plans[-1]), result)


def _stopping(options: RunOptions) -> AbstractContextManager[None]:
    """Around a run: one that writes checkpoints ends with one where SIGTERM or SIGUSR1 comes."""
    from pipeplan.runtime.launch.stopping import STOPPING
    from pipeplan.runtime.training.options import TrainOptions

    saves = isinstance(options, TrainOptions) and options.checkpoint is not None
    return STOPPING.heeded() if saves else nullcontext()


def join_launcher() -> bool:
    """Whether a launcher has started this process as a rank; if so, it is known how. Raises UsageError."""
    from pipeplan.runtime.launch.launchers import join

    return join() is not None


def last_checkpoint(folder: str) -> int | None:
    """The step of the last whole checkpoint in a folder; None if there is none."""
    from pipeplan.runtime.training.checkpoint_folder import CheckpointFolder

    return next(reversed(CheckpointFolder(folder).whole()), None)


# Names ------------------------------------------------------------------------------------------------------------


def known_names(
    kind: Literal["schedulers", "placements", "planners", "models", "examples", "devices", "rules", "recipes"],
) -> list[str]:
    """What the command line completes: names of one kind, from the catalog and the planner's tables, without torch."""
    from pipeplan.catalog import names

    tables: dict[str, Callable[[], list[str]]] = {
        "schedulers": _schedulers,
        "placements": _placements,
        "planners": _planners,
        "models": _models,
        "examples": lambda: [*_shapes(), *chain.from_iterable(example_names().values())],
    }
    return tables[kind]() if kind in tables else list(names(kind))


def _schedulers() -> list[str]:
    from pipeplan.schedule.classic import CLASSIC

    return ["auto", "repetend", "rules", *CLASSIC]


def _placements() -> list[str]:
    from pipeplan.partition.strategies import STRATEGIES

    return ["auto", "all", *STRATEGIES]


def _planners() -> list[str]:
    from pipeplan.planning.planners import EVERY_PLANNER, PLANNERS

    return ["auto", EVERY_PLANNER, *PLANNERS]


def _models() -> list[str]:
    from pipeplan.catalog import configurations, running_models

    return [*running_models(), *configurations()]


def _shapes() -> list[str]:
    from pipeplan.examples import SHAPES

    return [f"shape-{name}" for name in SHAPES]


def named_rules(where: str) -> Rules:
    """The rules that a user names: by ``pkg.mod:name``, which is imported, by their file, or as the catalog does.

    ``name`` is a set of rules, or a function without arguments that returns one.

    Raises:
        UsageError: the module is not there or fails, or has no rules of that name; the file is not there or has none.
    """
    from pipeplan.runtime.models.given_names import instance_at
    from pipeplan.schedule.rules import Rules
    from pipeplan.schedule.rules.language import read_rules

    if ":" not in where or os.path.exists(where) or where.endswith(".toml"):
        return read_rules(where)
    found = instance_at(where, "--rules", Rules, "such as Rules(checks=({name},))")
    return found.but(name=where.partition(":")[2][:256]) if found.name == Rules.name else found


def require_model(name: str) -> None:
    """Refuse a model's name that means nothing, without torch. Raises UsageError."""
    from pipeplan.runtime.models.given_names import require_model as require

    require(name)


# Examples ---------------------------------------------------------------------------------------------------------


def example_names() -> dict[str, list[str]]:
    """The names of models, clusters and testbeds, read from the catalog only."""
    from pipeplan.catalog import model_sizes, names

    models = [name for name, size in model_sizes().items() if size.reference]
    clusters = [name for name in names("clusters") if name.startswith("cluster-")]
    testbeds = [f"testbed-{name}" for name in names("clusters") if name not in clusters]
    return {"models": models, "clusters": clusters, "testbeds": testbeds}


def example_kind(name: str) -> Literal["shapes", "models", "clusters"]:
    """What kind of ready input a name is. Raises UsageError."""
    from pipeplan.errors import UsageError, choose_from
    from pipeplan.examples import MODELS, SHAPES

    shapes, known = [f"shape-{each}" for each in SHAPES], example_names()
    clusters = [*known["clusters"], *known["testbeds"]]
    if name in clusters:
        return "clusters"
    if name in MODELS:
        return "models"
    if name not in shapes:
        raise UsageError(f"there is no example {name!r}; {choose_from(name, [*shapes, *MODELS, *clusters])}")
    return "shapes"


def make_shape(name: str, devices: int, *, chunks: int | None = None, **costs: Any) -> Profile:
    """A literature shape with its placement; ``costs`` are :class:`pipeplan.examples.shapes.ShapeCosts`' fields."""
    from pipeplan.examples import ShapeCosts, shape

    given = {field: value for field, value in costs.items() if value is not None}
    return shape(name.removeprefix("shape-"), devices, chunks=chunks, costs=ShapeCosts(**given))


def make_model(name: str, **how: Any) -> Profile:
    """A paper's model with estimated costs; see :func:`pipeplan.examples.models.model`. Raises UsageError."""
    from pipeplan.examples import model

    return model(name, **how)


def make_cluster(
    name: str,
    num_devices: int | None = None,
    *,
    nominal: bool = False,
    overlap: Literal["none", "sums", "all"] = "sums",
    racks: Sequence[int] = (),
    oversubscription: Sequence[float] = (),
    rails: bool = False,
    power: int | None = None,
) -> Cluster:
    """A cluster of the catalog, cut or extended: :func:`pipeplan.costs.clusters.named_cluster`. Raises UsageError.

    A maker's has links as published runs reach them (:func:`pipeplan.costs.uniform.shares.as_reached`), unless
    ``nominal``. ``overlap`` says which exchanges run beside compute. With ``racks`` it is a tree of switches
    (:func:`pipeplan.costs.clusters.in_tree`).
    """
    from pipeplan.costs.clusters import in_tree, named_cluster
    from pipeplan.costs.uniform.shares import as_reached

    cluster = named_cluster(name.removeprefix("testbed-"), num_devices).model_copy(update={"overlap": overlap})
    if racks or oversubscription or rails or power is not None:
        cluster = in_tree(cluster, racks, oversubscription, rails=rails, power=power)
    return cluster if nominal or name.startswith("testbed-") else as_reached(cluster)
