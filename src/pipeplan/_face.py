"""The functions of ``import pipeplan``: what the command line does, with its flags as keyword arguments.

Each parses its arguments as the verb does (:mod:`pipeplan.cli.from_python`), makes the same request by the same
function, and calls :mod:`pipeplan._api`. Nothing is imported until a function is called. ``search``, ``tune`` and
``compare`` spell out the arguments they share, so that help, editors and type checkers know each; a test compares them
with the flags.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, wraps
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

from pipeplan import _api
from pipeplan.errors import ExecutionError, FileError, PipeplanError, SearchTimeoutError, UsageError, choose_from

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from pipeplan._api import (
        Cluster,
        Comparison,
        Cover,
        Evaluated,
        Event,
        Export,
        FrontierResult,
        Inspection,
        KernelChoice,
        Limit,
        LinkPoint,
        LinkResult,
        Model,
        Placement,
        Plan,
        PlanReport,
        Profile,
        Report,
        Result,
        Rules,
        RunOptions,
        RunOutcome,
        Simulation,
        StepResult,
        Tuning,
    )

Path = str | os.PathLike[str]
Duration = str | float
"""Text with a unit, such as ``"3.2ms"``, or seconds."""
Size = str | int
"""Text with a unit, such as ``"16GB"`` or ``"16GiB"``, or bytes."""
Counts = str | int | Iterable[int]
"""One number, several, or ``"1,2,4"``."""
Switch = bool | Literal["auto", "yes", "no"]
Dtype = Literal["float32", "bfloat16", "float16", "float64"]
GradientDtype = Literal["fp32", "bf16", "fp16"]
Kernels = Literal["fused", "eager"]
Optimizer = Literal["adamw", "momentum", "sgd"]
ZeroLevel = int | Literal["auto"]
Granularity = Literal["layer", "half", "operator"]
SearchProgress = Callable[[str, int, int, float], None]
"""Called with what found the best plan, its time, the bound, both in ns, and the seconds so far."""
RunProgress = Callable[[int, int, str], None]
"""Called with the runs done, all runs, and what runs now."""

P = ParamSpec("P")
R = TypeVar("R")


def _public(function: Callable[P, R]) -> Callable[P, R]:
    """A function whose errors name its arguments, and which off the main thread raises no KeyboardInterrupt.

    It takes the flags' other names, too: ``dp=4`` is ``replicas=4``.
    """
    known = [*signature(function).parameters]

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **_by_own_names(function.__name__, known, kwargs))
        except PipeplanError as error:
            error.for_python()
            raise
        except KeyboardInterrupt:
            if threading.current_thread() is threading.main_thread():
                raise
            raise SearchTimeoutError("interrupted before anything was found") from None

    return called


_OTHER_NAMES = {
    "dp": "replicas",
    "for": "for_",
    "vp": "chunks",
    "virtual_stages": "chunks",
    "global_batch_size": "mini_batch",
    "tensor_parallel": "tp",
    "context_parallel": "cp",
    "decode_context_parallel": "dcp",
    "expert_parallel": "ep",
    "expert_tensor_parallel": "etp",
    "pipeline_parallel": "pp",
}
"""The flags' other names, with underscores."""


def _by_own_names(function: str, known: Sequence[str], given: Mapping[str, Any]) -> Any:
    """Arguments by the names that a function has for them. Raises UsageError for one that it has not."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        own = name if name in known else _OTHER_NAMES.get(name, name)
        if own not in known:
            raise UsageError(f"{function}() has no argument {name!r}; {choose_from(name, known)}")
        if own in found or (own != name and own in given):
            raise UsageError(f"{name} and {own} are two names of one argument; give one of them")
        found[own] = value
    return found


def _asked(verb: str, given: Mapping[str, Any]) -> Any:
    """The verb's context with these arguments."""
    from pipeplan.cli.from_python import context_of

    return context_of(verb, given)


# Files ------------------------------------------------------------------------------------------------------------


@_public
def read_profile(path: Path) -> Profile:
    """Read and validate a profile file of any version; ``"-"`` is stdin.

    Raises:
        FileError: it cannot be read, or is not a valid profile; the text has a line for each problem, with its place.

    Example:
        >>> pipeplan.read_profile("profiles/tessel-v.json").microbatch_sizes
        (1,)
    """
    return _api.read_profile(os.fspath(path))


@_public
def read_cluster(path: Path) -> Cluster:
    """Read and validate a cluster file; as :func:`read_profile`.

    Example:
        >>> pipeplan.read_cluster("cluster.json").num_devices
    """
    return _api.read_cluster(os.fspath(path))


@_public
def read_placement(path: Path) -> Placement:
    """Read and validate a placement file; as :func:`read_profile`.

    Example:
        >>> pipeplan.read_placement("placement.json").stages[0].blocks
    """
    return _api.read_placement(os.fspath(path))


@_public
def read_plan(path: Path) -> Plan:
    """Read and validate a plan file; as :func:`read_profile`. Whether it is right :func:`check` says.

    Example:
        >>> pipeplan.read_plan("plan.json").predicted.iteration_ns
    """
    return _api.read_plan(os.fspath(path))


@_public
def write(file: Profile | Cluster | Placement | Plan, path: Path) -> None:
    """Write a profile, a cluster, a placement or a plan, atomically; ``"-"`` is stdout.

    Raises:
        FileError: it cannot be written; an old file stays as it is.

    Example:
        >>> pipeplan.write(result.plan, "plan.json")
    """
    _api.write_file(file, os.fspath(path))


# Planning ---------------------------------------------------------------------------------------------------------


@_public
def search(
    profile: Profile | Path,
    *,
    devices: int | None = None,
    cluster: Cluster | Path | None = None,
    spares: int | None = None,
    profile_for: Mapping[str, Profile | Path] | None = None,
    memory: Size | None = None,
    memory_reserve: Size | None = None,
    precision: str | None = None,
    gradient_dtype: GradientDtype | None = None,
    optimizer: Optimizer | None = None,
    mini_batch: int | None = None,
    microbatch_size: int | None = None,
    microbatches: int | None = None,
    placement: Placement | Path = "auto",
    chunks: int | None = None,
    replicas: int | None = None,
    tp: int | Literal["auto"] = "auto",
    cp: int | Literal["auto"] = "auto",
    cp_exchange: Literal["auto", "gathered", "ring"] = "auto",
    ep: int | Literal["auto"] = "auto",
    etp: int | Literal["auto"] = "auto",
    pp: int | None = None,
    zero: ZeroLevel | None = None,
    zero_group: int | None = None,
    zero_exchange: Literal["auto", "inside"] = "auto",
    shard_shared: Switch = "auto",
    slices: int | Literal["auto", "autopipe"] | None = None,
    late_inputs: Switch = "auto",
    planner: str = "auto",
    recompute: bool | Literal["auto", "none", "selective", "all"] = "auto",
    unroll: int | Literal["auto"] = "auto",
    max_span: int | None = None,
    split_backward: Switch | None = None,
    split_overhead: Duration = 0,
    launch_overhead: Duration | None = None,
    time_limit: Duration = 30,
    seed: int = 0,
    deterministic: bool = False,
    scheduler: str = "auto",
    rules: Rules | Path | None = None,
    start: Plan | Path | None = None,
    for_: str | None = None,
    objective: Literal["cache", "time"] | None = None,
    batch: int | None = None,
    context: int | str | None = None,
    kv: Literal["auto", "dp", "tp", "cp", "cp-q"] | None = None,
    dcp: int | None = None,
    prefill: int | str | None = None,
    keep_together: str | Sequence[str] | None = None,
    kernels: Cover | Path | None = None,
    workers: int | None = None,
    executor: Executor | str | None = None,
    cache: Path | None = None,
    explain: bool = False,
    progress: SearchProgress | None = None,
    within: Limit | None = None,
) -> Result:
    """Search for the best plan: stages, replicas, micro-batch size and schedule, unless arguments fix them.

    The search finds a valid plan early and keeps improving it until it is proved optimal or time is up. On the main
    thread Ctrl-C ends it with the best plan so far; from any thread, ``within.interrupt()`` does. Several searches may
    run at once, each on its own thread; with ``deterministic``, each returns what it would return alone.

    Args:
        profile: the model's blocks and what each one costs, or the path of a profile file.
        devices: number of devices; by default that of the profile's placement, else of the cluster.
        cluster: devices, memory and links, or the path of a cluster file; without one, links are free.
        spares: devices of ``cluster`` to keep spare, in whole nodes; the result's ``spares`` say what that costs.
        profile_for: profiles of the same model on devices that the cluster calls otherwise, by the names of these.
        memory: memory of each device, as ``"16GB"``, ``"16GiB"`` or bytes; by default the cluster's, else unlimited.
        memory_reserve: part of that memory to keep free; by default the cluster's reserve, or 0 with ``memory``.
        precision: number formats of weights, gradients and state, as ``"bf16-mixed"``; by default the profile's.
        gradient_dtype: number format in which gradients accumulate; by default the recipe's.
        optimizer: the optimizer whose state takes memory; by default the profile's.
        mini_batch: samples per iteration (the global batch size).
        microbatch_size: samples per micro-batch, over all replicas; by default searched among the profiled sizes.
        microbatches: micro-batches per iteration; by default four per device.
        placement: ``"auto"`` (the profile's own, else all strategies), ``"all"``, a strategy such as ``"circular"``, a
            :class:`Placement`, or the path of its file.
        chunks: virtual stages: stages per device, for strategies with several.
        replicas: data-parallel size: copies of the whole pipeline; by default searched.
        tp: tensor-parallel size: how many devices split each block. The profile must have costs for it. By default
            searched.
        cp: context-parallel size: how many devices share each sequence. The profile must have costs for it. By
            default searched if it has any.
        cp_exchange: how these have keys and values of all: ``"gathered"`` before attention, or around a ``"ring"``
            beside it; by default the one with which the plan is shorter in the memory there is.
        ep: expert-parallel size: how many devices of a stage share experts, of ``tp`` x ``cp`` x ``replicas``, which it
            divides. The profile must have costs for it. By default searched if it has any.
        etp: expert-tensor-parallel size: how many of the ``ep`` devices split each expert. The profile must have costs
            for it. By default searched if it has any.
        pp: pipeline-parallel size: how many devices, or groups of ``tp`` x ``cp`` x ``replicas``, the model is spread
            over; by default searched.
        zero: sharded state: 0 none, 1 optimizer state and master weights, 2 gradients as well, 3 parameters as well, or
            ``"auto"``, with which the plan is shortest, and the default. Where links are unknown, so that messages
            seem free, that is 1, which sends no more than sums of gradients, and more if nothing fits otherwise.
        zero_group: shard within groups of this many neighbouring replicas; by default over all.
        zero_exchange: when levels 2 and 3 exchange: ``"inside"`` of each action, block by block, as FSDP does that
            wraps each layer; by default whole stages where that is shorter and fits, for as many actions as pays.
        shard_shared: whether shared blocks are split over all devices in the pipeline.
        slices: number of leading micro-batches whose warm-up forwards run in two halves; ``"autopipe"``: as AutoPipe's
            own formula has it.
        late_inputs: whether an action may begin before all its inputs are there, and wait inside for those that only
            later blocks need.
        planner: who chooses the stages: a published planner alone (``"graphpipe"``, ``"autopipe"``, ``"pipedream"``,
            ``"piper"``, ``"dapple"``), or ``"auto"``, which is ours.
        recompute: activation checkpointing everywhere (True, ``"all"``), nowhere (False, ``"none"``), in attention
            cores (``"selective"``), or where the search finds it useful (``"auto"``).
        unroll: micro-batches per repetend, from 1 to 64.
        max_span: how many micro-batches a repetend reaches over, at most (Tessel's N_R). ``"auto"`` then searches for a
            repetend alone, as only that keeps to it.
        split_backward: whether input and weight gradients run separately.
        split_overhead: extra time for each input or weight gradient that is launched separately, as ``"20us"`` or in
            seconds.
        launch_overhead: host time to launch a block, in each of its actions, on top of the profile's costs; by default
            what the profile says, else 0.
        time_limit: as ``"30s"`` or in seconds.
        seed: random seed of the solver and of local search.
        deterministic: ``time_limit`` counts work instead of seconds, so that the same seed gives the same plan on any
            machine; a busy one takes longer.
        scheduler: ``"auto"``, ``"repetend"``, ``"rules"`` or a classic schedule such as ``"1f1b"``.
        rules: for the scheduler ``"rules"``: :class:`Rules`, the name of a built-in set, the path of a TOML file, or
            ``pkg.mod:name``, which is imported.
        start: a plan to start from, such as one of :func:`import_plan`: what is found is never slower. Devices and
            mini-batch are its own unless said.
        for_: a tool, such as ``"megatron"``: the plan stays inside what it can run, and ``.cost`` says what that costs
            (``--for`` of the command line).
        objective: with ``for_`` a server, what its cut is best for: most tokens in the ``"cache"``, or the ``"time"``
            of the busiest stage. By default the cache where a profile of inference says what it keeps and memory is
            limited.
        batch: requests served at once, in total, for ``kv`` or a server's cut; by default the most profiled.
        context: context length of each request at the last step, in tokens; by default the most profiled.
        kv: plan decode steps from a profile of inference, and how devices share KV caches: each has requests of its own
            (``"dp"``), heads (``"tp"``), or a piece of every cache (``"cp"``; ``"cp-q"`` gathers queries only), or
            ``"auto"``: whatever is quickest, mixtures included. The result's ``.decode`` then has the time of a token,
            tokens per second, the caches' sizes and what is sent.
        dcp: decode context-parallel size: how many devices share each request's KV cache, split along its tokens.
        prefill: tokens of new prompts to prefill alongside every decode step; as many as ``context`` for whole prompts.
        keep_together: blocks that no stage has without the others, as ``"layer0.*,layer1.*"``; ``"4"`` for every four
            layers; or several of these.
        kernels: kernel backends that may run blocks where that is quicker, beside eager torch: ``"auto"`` for all that
            the profile has times of, some as ``"inductor,onednn-off"``, or a cover of :func:`choose_kernels`
            (``.file``), or its path. By default eager torch runs all.
        workers: processes that evaluate candidates; by default 1, which is this one, and one per core for auto-tuning
            (``scheduler="rules"`` without ``rules``). They import your main module, so guard what it runs with
            ``if __name__ == "__main__"``.
        executor: a :class:`concurrent.futures.Executor` (not of threads) that evaluates candidates instead, or a name
            such as ``"dask:tcp://host:8786"``. It is left open.
        cache: file for the results of auto-tuning; see :func:`tune`.
        explain: fill ``.explanation`` with the ten best plans that differ, what limits each, and why common layouts
            lose.
        progress: called on the searching thread whenever something better is found, with what found it, its time and
            the bound in ns, and the seconds so far.
        within: a limit to share with other calls, or for another thread to interrupt.

    Returns:
        The plan (``.plan``) with ``.lower_bound_ns``, ``.gap`` (0 is optimal), ``.status`` ("optimal" or "feasible"),
        ``.interrupted`` and ``.timed_out``.

    Raises:
        InfeasibleError: nothing fits; the text says what to change.
        SearchTimeoutError: time was up, or the search interrupted, before there was a plan.
        UsageError: an argument makes no sense, or contradicts another or the profile; the text names it.
        FileError: a file cannot be read.
        KeyboardInterrupt: on the main thread, Ctrl-C before there was a plan.

    Example:
        >>> result = pipeplan.search("profiles/tessel-v.json", time_limit=5)
        >>> result.status, result.gap
        ('optimal', 0.0)
        >>> pipeplan.write(result.plan, "plan.json")
    """
    from pipeplan.cli.search_verbs import search_request
    from pipeplan.cli.shared import require_one_kind_of_workers

    request = search_request(_asked("search", locals()).params)
    if request.tunes and explain:
        raise UsageError("--explain is for searches, not for auto-tuned rules; leave it out")
    require_one_kind_of_workers(request, workers, executor)
    if request.tunes:
        return _api.tune(request, workers=workers, cache=_text(cache), progress=progress, within=within).result
    if cache is not None:
        raise UsageError("--cache is for --scheduler 'rules' without --rules; leave it out")
    how: Any = {"progress": progress, "within": within, "explain": explain, "workers": workers or 1}
    return _api.search(request, executor=executor, **how)


def _text(path: Path | None) -> str | None:
    return None if path is None else os.fspath(path)


@_public
def tune(
    profile: Profile | Path,
    *,
    devices: int | None = None,
    cluster: Cluster | Path | None = None,
    profile_for: Mapping[str, Profile | Path] | None = None,
    memory: Size | None = None,
    memory_reserve: Size | None = None,
    precision: str | None = None,
    gradient_dtype: GradientDtype | None = None,
    optimizer: Optimizer | None = None,
    mini_batch: int | None = None,
    microbatch_size: int | None = None,
    microbatches: int | None = None,
    placement: Placement | Path = "auto",
    chunks: int | None = None,
    replicas: int | None = None,
    tp: int | Literal["auto"] = "auto",
    cp: int | Literal["auto"] = "auto",
    cp_exchange: Literal["auto", "gathered", "ring"] = "auto",
    ep: int | Literal["auto"] = "auto",
    etp: int | Literal["auto"] = "auto",
    pp: int | None = None,
    zero: ZeroLevel | None = None,
    zero_group: int | None = None,
    zero_exchange: Literal["auto", "inside"] = "auto",
    shard_shared: Switch = "auto",
    slices: int | Literal["auto", "autopipe"] | None = None,
    late_inputs: Switch = "auto",
    planner: str = "auto",
    recompute: bool | Literal["auto", "none", "selective", "all"] = "auto",
    unroll: int | Literal["auto"] = "auto",
    max_span: int | None = None,
    split_backward: Switch | None = None,
    split_overhead: Duration = 0,
    launch_overhead: Duration | None = None,
    time_limit: Duration = 30,
    seed: int = 0,
    deterministic: bool = False,
    workers: int | None = None,
    cache: Path | None = None,
    progress: SearchProgress | None = None,
    within: Limit | None = None,
) -> Tuning:
    """Rank all built-in scheduling rules over a grid of depths, replicas, sizes and placements.

    This is ``pipeplan search --scheduler rules``, and returns the whole ranking.

    Args:
        profile: see :func:`search`, as for every argument not listed here.
        workers: number of processes; by default one per core; 1 is this process alone.
        cache: file for results, from which an interrupted tuning resumes.

    Returns:
        The best plan (``.result``), the rules that make it (``.rules``) and all rows by rank (``.rows``).

    Raises:
        InfeasibleError: no cell of the grid fits.
        SearchTimeoutError: time was up before there was a row.
        UsageError: an argument makes no sense, or the cache is not a cache file.

    Example:
        >>> tuning = pipeplan.tune("profiles/tessel-v.json", workers=1, time_limit=5)
        >>> tuning.rows[0].rules
    """
    from pipeplan.cli.search_verbs import search_request

    request = search_request(_asked("search", {**locals(), "scheduler": "rules"}).params)
    return _api.tune(request, workers=workers, cache=_text(cache), progress=progress, within=within)


@_public
def compare(
    profile: Profile | Path,
    *,
    devices: int | None = None,
    cluster: Cluster | Path | None = None,
    spares: int | None = None,
    profile_for: Mapping[str, Profile | Path] | None = None,
    memory: Size | None = None,
    memory_reserve: Size | None = None,
    precision: str | None = None,
    gradient_dtype: GradientDtype | None = None,
    optimizer: Optimizer | None = None,
    mini_batch: int | None = None,
    microbatch_size: int | None = None,
    microbatches: int | None = None,
    placement: Placement | Path = "auto",
    chunks: int | None = None,
    replicas: int | None = None,
    tp: int | Literal["auto"] = "auto",
    cp: int | Literal["auto"] = "auto",
    cp_exchange: Literal["auto", "gathered", "ring"] = "auto",
    ep: int | Literal["auto"] = "auto",
    etp: int | Literal["auto"] = "auto",
    pp: int | None = None,
    zero: ZeroLevel | None = None,
    zero_group: int | None = None,
    zero_exchange: Literal["auto", "inside"] = "auto",
    shard_shared: Switch = "auto",
    slices: int | Literal["auto", "autopipe"] | None = None,
    late_inputs: Switch = "auto",
    planner: str = "auto",
    recompute: bool | Literal["auto", "none", "selective", "all"] = "auto",
    unroll: int | Literal["auto"] = "auto",
    max_span: int | None = None,
    split_backward: Switch | None = None,
    split_overhead: Duration = 0,
    launch_overhead: Duration | None = None,
    time_limit: Duration = 30,
    seed: int = 0,
    deterministic: bool = False,
    rules: Rules | Path | None = None,
    progress: SearchProgress | None = None,
    within: Limit | None = None,
) -> Comparison:
    """Time every classic schedule that applies, and search for a better one.

    Args:
        profile: see :func:`search`, as for every argument not listed here.
        rules: a schedule to add to the known ones: :class:`Rules`, the name of a built-in set, the path of a TOML
            file, or ``pkg.mod:name``.

    Returns:
        ``.rows``, best first, with those that do not fit in memory last; ``.missing`` schedules, with the reason for
        each. If no row fits, ``.shortage`` says what would be enough.

    Raises:
        SearchTimeoutError: time was up before there was a row.
        UsageError: an argument makes no sense, or no placement is possible.

    Example:
        >>> comparison = pipeplan.compare("profiles/tessel-v.json", time_limit=5)
        >>> [(row.schedule, row.iteration_ns) for row in comparison.rows]
    """
    from pipeplan.cli.shared import comparison_request

    request, own = comparison_request(_asked("compare", locals()).params)
    found = _api.compare(request, rules=own, progress=progress, within=within)
    if found.shortage is not None:
        found.shortage.for_python()
    return found


@_public
def frontier(
    profile: Profile | Path,
    *,
    devices: Counts | None = None,
    cluster: Cluster | Path | None = None,
    spares: int | None = None,
    profile_for: Mapping[str, Profile | Path] | None = None,
    memory: Size | None = None,
    memory_reserve: Size | None = None,
    precision: str | None = None,
    gradient_dtype: GradientDtype | None = None,
    optimizer: Optimizer | None = None,
    mode: Literal["all", "min-time", "min-devices", "profile"] = "all",
    plans: bool = False,
    uniform: bool = False,
    mini_batch: int | None = None,
    placement: Placement | Path = "auto",
    zero: ZeroLevel | None = None,
    zero_group: int | None = None,
    zero_exchange: Literal["auto", "inside"] = "auto",
    chunks: int | None = None,
    replicas: int | None = None,
    tp: int | Literal["auto"] = "auto",
    cp: int | Literal["auto"] = "auto",
    cp_exchange: Literal["auto", "gathered", "ring"] = "auto",
    ep: int | Literal["auto"] = "auto",
    etp: int | Literal["auto"] = "auto",
    pp: int | None = None,
    recompute: bool | Literal["auto", "none", "selective", "all"] = "auto",
    split_level: Literal["block", "operator"] = "block",
    device: str | None = None,
    data_parallel_loading: bool = False,
    tolerance: float = 0.0,
    only: Literal["data-parallel", "optcnn", "tofu", "mesh-tensorflow"] | None = None,
    mesh_dimensions: int = 3,
    time_limit: Duration | None = None,
    seed: int = 0,
    deterministic: bool = False,
    workers: int | None = None,
    executor: Executor | str | None = None,
    point: int | None = None,
    progress: SearchProgress | None = None,
    within: Limit | None = None,
) -> FrontierResult:
    """Time against memory against devices: every strategy that no other beats in all three.

    Args:
        profile: the model's blocks and what each one costs, or the path of a profile file.
        devices: numbers of devices to consider, as ``8``, ``[1, 2, 4]`` or ``"1,2,4"``; by default the cluster's, and
            with ``plans`` those of the placement.
        cluster: devices, memory, links and prices, or the path of a cluster file.
        spares: devices of ``cluster`` to keep spare, in whole nodes; the result's ``spares`` say what that costs.
        profile_for: with ``plans``: profiles of kinds of devices, as in :func:`search`.
        memory: memory limit of each device, as ``"16GB"`` or bytes; by default the cluster's.
        memory_reserve: part of that memory to keep free; by default the cluster's reserve, or 0 with ``memory``.
        precision: number formats of weights, gradients and state, as ``"bf16-mixed"``; by default the profile's.
        gradient_dtype: number format in which gradients accumulate; by default the recipe's.
        optimizer: the optimizer whose state takes memory; by default the profile's.
        mode: which points that fit: all; all, with the fastest chosen; those on the fewest devices; or the fastest for
            each number of devices.
        plans: consider pipelines as well, and make every point a plan, instead of one stage on all devices.
        uniform: with ``plans``: only layouts that trainers take as settings, with the same sizes for every stage.
        mini_batch: samples per iteration, on any number of devices.
        placement: with ``plans``: as in :func:`search`; a profile that has one is planned on it alone, on its devices,
            unless this says ``"all"``.
        zero: with ``plans``: sharded state, as in :func:`search`; by default none.
        zero_group: shard within groups of this many neighbouring replicas; by default over all.
        zero_exchange: when levels 2 and 3 exchange: ``"inside"`` of each action, block by block, as FSDP does that
            wraps each layer; by default whole stages where that is shorter and fits, for as many actions as pays.
        chunks, replicas, tp, cp, cp_exchange, ep, etp, pp, recompute: with ``plans``: as in :func:`search`; by default
            searched.
        split_level: what is split as a unit: whole blocks, the way plans run them, or each operator.
        device: preset to estimate split times for, as ``"a100-80gb"``; by default the profile's.
        data_parallel_loading: inputs arrive already split by samples over all devices.
        tolerance: how far points may be off the frontier, as 0.01 for 1 % of memory and time; 0 is exact.
        only: without ``plans``: only what a published planner looks at, to compare with; by default every strategy.
        mesh_dimensions: without ``plans``: most dimensions of the mesh of devices that splits a block or operator.
        time_limit: as ``"60s"`` or in seconds; by default 60 with ``plans``, otherwise none.
        seed: with ``plans``: start value of the random choices.
        deterministic: with ``plans``: ``time_limit`` counts the work of each number of devices' search instead of
            seconds, and all else is tried to its end, so that the same seed gives the same points on any machine.
        workers, executor: with ``plans``: what evaluates the candidates of its searches, as in :func:`search`.
        point: number of the point to choose for :meth:`FrontierResult.plan`, counted from 1.
        progress: called on the searching thread with what is tried, the least time so far in ns, its bound where a
            search on the only number of devices knows one, else 0, and the seconds so far.
        within: a limit to share with other calls, or for another thread to interrupt.

    Returns:
        ``.points``, by devices and memory. ``.plan()`` makes the plan of the chosen point, ``.plan(2)`` of the second.

    Raises:
        InfeasibleError: nothing fits.
        SearchTimeoutError: time was up, or the search interrupted, before there was a point.
        UsageError: an argument makes no sense.

    Example:
        >>> found = pipeplan.frontier(
        ...     "profiles/tessel-v.json", devices=[1, 2], placement="all", plans=True, time_limit=5
        ... )
        >>> [(point.num_devices, point.memory_bytes, point.time_ns) for point in found.points]
    """
    from pipeplan.cli.frontier_verb import frontier_request
    from pipeplan.cli.shared import require_one_kind_of_workers

    context = _asked("frontier", locals())
    request = frontier_request(context)
    require_one_kind_of_workers(request, workers, executor)
    how: Any = {"mode": context.params["mode"], "point": point, "progress": progress, "within": within}
    return _api.frontier(request, workers=workers or 1, executor=executor, **how)


# Plans ------------------------------------------------------------------------------------------------------------


@_public
def check(
    plan: Plan | Path,
    *,
    profile: Profile | Path | None = None,
    cluster: Cluster | Path | None = None,
    profile_for: Mapping[str, Profile | Path] | None = None,
) -> Report:
    """Recompute everything a plan claims, independently of whatever made it.

    Args:
        plan: the plan, or the path of its file.
        profile: also check costs and dependencies against this profile.
        cluster: also check memory and transfer times against this cluster.
        profile_for: profiles of kinds of devices that the plan has beside ``profile``, by the names of the kinds.

    Returns:
        ``.valid``, ``.problems`` with their places, and ``.recomputed`` figures; ``.require()`` raises
        InvalidPlanError unless all is right.

    Raises:
        FileError: a file cannot be read.

    Example:
        >>> pipeplan.check("plan.json", profile="profiles/tessel-v.json").valid
        True
    """
    from pipeplan.cli.shared import checked_against, given_file

    given = _asked("check", locals()).params
    made: Plan = given_file("plan", given["plan_path"])
    return _api.check(made, *checked_against(given, plan=made))


@_public
def simulate(
    plan: Plan | Path,
    *,
    microbatches: int | None = None,
    profile: Profile | Path | None = None,
    cluster: Cluster | Path | None = None,
    profile_for: Mapping[str, Profile | Path] | None = None,
    measured: Path | Sequence[Path] | None = None,
) -> Simulation:
    """Replay a plan: when every action runs if each starts as soon as it can.

    Args:
        plan: the plan, or the path of its file.
        microbatches: repeat the plan's pattern up to this many micro-batches.
        profile: use the times and sizes in this profile.
        cluster: use the devices and links of this cluster.
        profile_for: profiles of kinds of devices that the plan has beside ``profile``, by the names of the kinds.
        measured: a run to compare with, as ``.measured``: the trace that a run of the plan wrote, the log of another
            trainer, or torch.profiler traces of its ranks.

    Returns:
        Starts of all actions, ``.rates``, ``.memory`` of each device and ``.critical_path``; times in ns, sizes in
        bytes. In a notebook it displays as a timeline.

    Raises:
        InvalidPlanError: the plan's programs cannot run.
        UsageError: the number of micro-batches, the profile, the cluster or the trace does not suit the plan.

    Example:
        >>> pipeplan.simulate("plan.json", microbatches=64).rates.bubble_rate
    """
    from pipeplan.cli.shared import checked_against, given_file

    given = _asked("simulate", locals()).params
    made: Plan = given_file("plan", given["plan_path"])
    against = checked_against(given, plan=made)
    found = _api.simulate(made, given["microbatches"], *against)
    return found if measured is None else _api.with_measured(found, given["measured_paths"], *against)


@_public
def report(
    plan: Plan | Path | Sequence[Plan | Path],
    *,
    measured: Path | Sequence[Path] | None = None,
    frontier: FrontierResult | Path | None = None,
) -> PlanReport:
    """Make a report on one to four plans: a page that needs no network.

    Args:
        plan: the plan, or the path of its file; or several of them.
        measured: a run of one of the plans to show beside it: the trace that it wrote, or of one plan what
            ``simulate`` reads.
        frontier: what more memory and more devices bring: what ``frontier`` found, or the path of what ``pipeplan
            frontier --plans --json`` printed.

    Returns:
        ``.html`` is the page's text, ``.markdown`` its first screen for a comment, ``.svg`` the timelines. In a
        notebook it displays as the page.

    Raises:
        InvalidPlanError: the programs of a plan cannot run.
        UsageError: there are more than four plans, or the run is of none of them.

    Example:
        >>> pathlib.Path("report.html").write_text(pipeplan.report("plan.json").html)
    """
    from pipeplan.cli.shared import given_file

    several = [plan] if isinstance(plan, str | os.PathLike | _api.Plan) else plan
    plans = [os.fspath(each) if isinstance(each, os.PathLike) else each for each in several]
    given = _asked("report", locals() | {"plan": plans}).params
    points = given["frontier_path"]
    if isinstance(points, str):
        points = _api.read_frontier(points)
    return _api.report([given_file("plan", each) for each in given["plan_paths"]], given["measured_paths"], points)


@_public
def export(plan: Plan | Path, to: str, *, names: str | None = None, base: str | None = None) -> Export:
    """Write a plan in another tool's format.

    Args:
        plan: the plan, or the path of its file.
        to: who is to read it: ``"torch"``, ``"torchtitan"``, ``"automodel"``, ``"megatron"``, ``"deepspeed"``,
            ``"galvatron"``, ``"vllm"``, ``"sglang"``, ``"tensorrt-llm"``, ``"huggingface"`` or ``"chakra"``.
        names: the model's module names, N for a layer's number, for targets that take them; by default
            those that the plan says, else the target's own.
        base: for ``"torchtitan"``, your own recipe, as ``"pkg.mod:function"``, on which the plan's is based.

    Returns:
        ``.text`` as the tool reads it, ``.beside`` and ``.files`` for further files (beside it, or of a folder), and
        ``.notes`` on what the tool does differently.

    Raises:
        FileError: the file cannot be read.
        UsageError: there is no such target, or it cannot run the plan; the text has the place in the plan.

    Example:
        >>> print(pipeplan.export("plan.json", "vllm").text)
        VLLM_PP_LAYER_PARTITION=6,6,6,6
    """
    from pipeplan.cli.export_verb import template_of
    from pipeplan.cli.shared import given_file

    given = _asked("export", locals()).params
    return _api.export(given_file("plan", given["plan_path"]), given["to"], template_of(given["names"]), given["base"])


@_public
def import_plan(
    source: Path,
    form: Literal["torch", "megatron", "layers"],
    profile: Profile | Path,
    *,
    modules: Path | None = None,
    devices: int | None = None,
    cluster: Cluster | Path | None = None,
    memory: Size | None = None,
    microbatch_size: int | None = None,
    microbatches: int | None = None,
    scheduler: str | None = None,
    recompute: bool | Literal["auto", "none", "selective", "all"] = "auto",
    time_limit: Duration = "30s",
) -> Result:
    """Read what another tool runs today as a plan: to check, simulate, compare and improve.

    Args:
        source: the path of a file, or what it would have: ``"Et*6|t*6|t*6|t*6L"``, ``"6,6,6,6"``.
        form: what it is: a schedule's CSV as torch's ``_PipelineScheduleRuntime`` reads it, a pipeline layout of
            Megatron-LM (its arguments may follow, one per line), or a list of layers per stage, as vLLM takes it.
        profile: of the model that it is about.
        modules: for ``"torch"``, the path of a file that says which modules each stage is; by default
            ``SOURCE.modules.json``, where it is there. Without it stages are cut evenly by time.
        devices: how many there are; by default one for each rank of the pipeline. More are replicas.
        cluster: devices, memory and links.
        memory: of each device; by default the cluster's.
        microbatch_size: samples per micro-batch over all replicas, where the source does not say.
        microbatches: per iteration, where the source does not say.
        scheduler: a schedule by name, instead of the source's own order; for lists of layers by default ``"1f1b"``.
        recompute: what backward computes again, where the source does not say: by default nothing.
        time_limit: for the command.

    Returns:
        ``.plan``, whose stages stand and whose actions run as the source has them, and what is proved of it; ``.notes``
        say what was assumed.

    Raises:
        FileError: a file cannot be read.
        InfeasibleError: it does not fit into memory.
        UsageError: the source cannot be read, or does not suit the profile or what is said beside it.

    Example:
        >>> pipeplan.import_plan("6,6,6,6", "layers", "gpt2-345m.json").plan.predicted.iteration_ns
    """
    from pipeplan.cli.import_verb import import_result

    return import_result({**_asked("import", {**locals(), "from_": form}).params})[1]


# Profiles ---------------------------------------------------------------------------------------------------------


@_public
def profile(
    model: str | Model | object,
    *,
    microbatch: Counts = (1, 2, 4),
    sequence: int | None = None,
    granularity: Granularity | None = None,
    shared: str | Sequence[str] = (),
    shards: Counts = 1,
    expert: Counts = 1,
    load_factor: float | Path = 1.0,
    inference: bool = False,
    batch: Counts = 1,
    context: Counts | None = None,
    dcp: Counts = 1,
    recompute: bool = False,
    dtype: Dtype | None = None,
    precision: str | None = None,
    gradient_dtype: GradientDtype | None = None,
    optimizer: Optimizer | None = None,
    device: Literal["cpu", "cuda"] = "cpu",
    threads: int | None = None,
    processes: int | None = None,
    repeats: int = 10,
    warmup: int = 3,
    seed: int = 0,
    cluster: Cluster | Path | None = None,
    backends: str | None = None,
    backend_rules: str | Sequence[str] = (),
    measure_limit: Duration | None = None,
    progress: RunProgress | None = None,
    within: Limit | None = None,
) -> Profile:
    """Measure a model block by block: forward and backward times, and the memory they hold. Needs torch.

    Use an idle machine, and measure one model at a time: every number is a median.

    Args:
        model: a name of the zoo, a Hugging Face configuration (``"config.json"``, ``"LlamaConfig(...)"``),
            ``"pkg.mod:factory"``; or what such a factory returns: a module and example inputs,
            ``(module, {"input_ids": tensor})``.
        microbatch: samples per run, as ``4``, ``[1, 2, 4]`` or ``"1,2,4"``.
        sequence: length of sequences, for the zoo and configurations.
        granularity: how much of a captured model is one block; by default half a layer.
        shared: blocks to spread over all devices, by id or operator; ``*`` is a wildcard.
        shards: numbers of devices that split each block.
        expert: numbers of devices that share the experts, each holding whole ones; one device's share is measured
            alone, with as many tokens as it sends to the others.
        load_factor: load of the busiest of these devices, as a multiple of the average, by which its experts are
            measured with more tokens; or the path of what a run printed as JSON, which counts it.
        inference: forwards alone.
        batch: of inference, requests at once, as ``microbatch`` is of training.
        context: numbers of devices that share each sequence; whole sequences, the default, are always included. Of
            inference tokens of texts to add prefill, decode and the cache for, as ``"1k,32k"``.
        dcp: of inference, numbers of devices that share caches along their tokens, whose decode steps are measured as
            runs make them.
        recompute: include costs with activation checkpointing.
        dtype: number format; by default that of ``precision``, else float32.
        precision: number formats of weights, gradients and state; by default those of a plain loop in ``dtype``.
        gradient_dtype: number format in which gradients accumulate; by default the recipe's.
        optimizer: the optimizer whose state takes memory; by default AdamW.
        device: where to measure.
        threads: threads of CPU operators; by default torch's choice.
        processes: of inference, how many started here measure at once, as a run's do; the model is given by its name.
        repeats: timed runs of each block and size.
        warmup: untimed runs before them.
        seed: random seed of parameters and samples.
        cluster: the cluster whose links time the collectives of split blocks.
        backends: kernel backends to measure beside eager torch, as ``"inductor,onednn-off"``, for
            :func:`choose_kernels`.
        backend_rules: modules with backends of your own, to name in ``backends``.
        measure_limit: of backends; when it is over no other group is begun.
        progress: called before every run with the runs done, all runs, and what runs now.
        within: a limit; when it ends or is interrupted, measuring ends with ExecutionError.

    Returns:
        The profile, for :func:`search`; ``write(profile, "profile.json")`` keeps it.

    Raises:
        UsageError: an argument makes no sense, or the model cannot be made or captured.
        ExecutionError: a block failed, or the limit was over.
        InfeasibleError: memory ran out at the smallest size.

    Example:
        >>> measured = pipeplan.profile("gpt2-tiny", microbatch=1, repeats=3)
    """
    from pipeplan.cli.profile_verb import backends_asked, backends_measured, measured

    given, watched = _asked("profile", locals()).params, _watched(progress, within)
    _api.require_torch("profile")
    backends_asked(given)
    made = measured(given, _warn, progress=watched)
    return backends_measured(given, made, _warn, keep=lambda so_far: None, progress=watched)


@_public
def choose_kernels(
    profile: Profile | Path,
    *,
    microbatch_size: int | None = None,
    time_limit: Duration = "30s",
    graph_level: bool = False,
    model: str | None = None,
    library: str | None = None,
    measure_limit: Duration = "10min",
    repeats: int = 5,
    device: Literal["cpu", "cuda"] = "cpu",
    threads: int | None = None,
    backend_rules: str | Sequence[str] = (),
    sequence: int | None = None,
    granularity: Granularity | None = None,
    seed: int = 0,
) -> KernelChoice:
    """Choose which kernel backend runs each block of a profile. Nothing is run, but for ``graph_level``.

    Args:
        profile: the profile, or the path of its file, with what backends take: ``profile(..., backends="inductor")``.
        microbatch_size: samples that the times are of; by default the largest at which every block can run.
        time_limit: stop after this long, with the best cover so far.
        graph_level: then hand operators to a ``library`` of whole graphs where the whole ``model`` is measured to gain,
            by an evolutionary search; all other arguments are of this. It is never worse than the cover.
        model: the model that the profile is of, by name.
        library: of whole graphs; by default that which was measured to be the quickest alone.
        measure_limit: no other cover is begun after this long.
        repeats: timed runs of each cover.
        device: where they are timed, as in the profile.
        threads: for CPU operators; by default torch's choice.
        backend_rules: module with backends of your own, or several.
        sequence: length of sequences, as for the profile.
        granularity: what a block is, as for the profile.
        seed: of the search.

    Returns:
        ``.cover`` has the groups with their backends, ``.single`` what the whole model takes by each backend, and
        ``.figures()`` all of it as ``pipeplan kernels --json`` prints it. With ``graph_level`` also ``.level``: its
        ``.groups``, what they were measured to take (``.found``), and the ``.gain`` over the cover.

    Raises:
        ExecutionError: the cover cannot run as a whole.
        FileError: the file cannot be read.
        InfeasibleError: no groups that were measured have every block once.
        SearchTimeoutError: there was no time for any cover.
        UsageError: the profile has no rows of this size.

    Example:
        >>> pipeplan.choose_kernels("profile.json").single
        {'eager': 2400000, 'inductor': 1900000}
    """
    from pipeplan.cli.kernels_verb import evolved, require_graph_level

    given = _asked("kernels", locals()).params
    known = given["profile_path"]
    known = _api.read_profile(known) if isinstance(known, str) else known
    require_graph_level(given)
    choice = _api.choose_kernels(known, given["microbatch_size"], given["time_limit"] / 1e9)
    return evolved(choice, given)


@_public
def estimate(
    model: str | Model | object,
    *,
    device: str,
    microbatch: Counts = (1, 2, 4),
    sequence: int | None = None,
    granularity: Granularity | None = None,
    shared: str | Sequence[str] = (),
    shards: Counts = 1,
    context: Counts | None = None,
    expert: Counts = 1,
    etp: Counts = 1,
    inference: bool = False,
    batch: Counts = 1,
    weights: Literal["int8", "int4", "fp8"] | None = None,
    kv_cache_dtype: Literal["auto", "fp8"] = "auto",
    load_factor: float | Path = 1.0,
    recompute: bool = False,
    dtype: Dtype | None = None,
    precision: str | None = None,
    gradient_dtype: GradientDtype | None = None,
    optimizer: Optimizer | None = None,
    calibrate: Profile | Path | None = None,
    kernels: Kernels | None = None,
    overlap_tensor: bool = False,
    attention: Literal["flash-1", "flash-2", "cudnn"] | None = None,
    cluster: Cluster | Path | None = None,
    progress: RunProgress | None = None,
    within: Limit | None = None,
) -> Profile:
    """Estimate a model for a device you do not have: bytes and work are counted, and nothing runs. Needs torch.

    Args:
        model: see :func:`profile`, as for every argument not listed here.
        device: the preset whose rates to use, as ``"a100-80gb"``.
        context: numbers of devices that share each sequence; whole sequences are always included. By default 2, 4 and
            8, as far as pieces keep 512 tokens and :func:`run` can share them; 1 for none. Of inference tokens of
            texts, as in :func:`profile`.
        expert: numbers of devices that share the experts, each holding whole ones; experts that are split like
            everything else are always included.
        etp: numbers of these devices that split each expert; 1 holds whole ones. :func:`search` chooses among several.
        weights: of inference, the format of the layers' weights; by default ``dtype``.
        kv_cache_dtype: of inference, the format of the cache; ``"auto"`` is ``dtype``.
        load_factor: load of the busiest of these devices, as a multiple of the average; or the path of what a run
            has measured, as ``pipeplan run --json`` prints it.
        dtype: number format; by default that of ``precision``, else the preset's.
        precision: number formats of weights, gradients and state; by default ``"bf16-mixed"`` for bfloat16,
            ``"fp16-mixed"`` for float16.
        calibrate: a measured profile to fit times to, or the path of its file or of a file of published runs.
        kernels: ``"fused"``, the way large models are trained, or ``"eager"``, one per operator, the way eager torch
            runs them; by default fused, except for ``"cpu"`` and with a measured ``calibrate``.
        overlap_tensor: messages among devices that split a block overlap its products, as with Megatron-LM's
            ``--tp-comm-overlap`` and torchtitan's asynchronous tensor parallelism.
        attention: the kernel of fused attention; by default ``"cudnn"`` from Hopper on, else ``"flash-2"``.

    Returns:
        The profile, for :func:`search`.

    Raises:
        UsageError: an argument makes no sense, or the model cannot be made or captured.
        ExecutionError: a block failed, or the limit was over.

    Example:
        >>> estimated = pipeplan.estimate("gpt2-124m", device="a100-80gb", microbatch=[1, 2])
    """
    from pipeplan.cli.profile_verb import estimated

    given = _asked("profile", locals()).params
    _api.require_torch("profile")
    return estimated(given, _warn, progress=_watched(progress, within))


def _warn(remark: str) -> None:
    from pipeplan.errors import in_python

    warnings.warn(in_python(remark), stacklevel=_outside())


def _outside() -> int:
    """The ``stacklevel`` for whom this calls of whoever called pipeplan."""
    inside, level = os.path.dirname(__file__), 0
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        frame, level = frame.f_back, level + 1
    return level + 1


def _watched(progress: RunProgress | None, within: Limit | None) -> RunProgress:
    """What is called before every run; it ends the work when the limit is over."""

    def called(done: int, total: int, what: str) -> None:
        _require_time(within, f"before {what}, after {done} of {total} runs")
        if progress is not None:
            progress(done, total, what)

    return called


def _require_time(within: Limit | None, where: str) -> None:
    if within is not None and within.over:
        how = "interrupted" if within.interrupted else f"the limit of {within.seconds:g} s was over"
        raise ExecutionError(f"{how} {where}")


@_public
def inspect(profile: Profile | Path, *, microbatch: Counts | None = None) -> Inspection:
    """Summarise a profile: its totals, its blocks by kind, and anything that would spoil plans made from it.

    Args:
        profile: the profile, or the path of its file.
        microbatch: micro-batch sizes to report; by default the profiled ones.

    Returns:
        The inspection; its ``.figures()`` are those of ``pipeplan profile --show --json``.

    Raises:
        FileError: the file cannot be read.
        UsageError: a size was not profiled.

    Example:
        >>> pipeplan.inspect("profiles/tessel-v.json").figures()["problems"]
    """
    from pipeplan.cli.shared import given_file

    given = _asked("profile", {"show": profile, "microbatch": microbatch}).params
    return _api.Inspection(given_file("profile", given["show"]), () if microbatch is None else given["microbatch"])


@_public
def measure_links(
    processes: int,
    *,
    cluster: Cluster | Path | None = None,
    min_bytes: Size = "1KiB",
    max_bytes: Size = "64MiB",
    compute: Duration = "5ms",
    repeats: int = 10,
    warmup: int = 3,
    device: Literal["cpu", "cuda"] = "cpu",
    on_point: Callable[[LinkPoint], None] = lambda point: None,
) -> LinkResult:
    """Measure links between processes that are started here. Needs torch; under torchrun use the command line.

    Args:
        processes: how many to start.
        cluster: where the times are put; by default one is made.
        min_bytes: smallest message.
        max_bytes: largest message.
        compute: how long every rank computes before each call, as a run's blocks do; 0 has one call right after the
            other.
        repeats: timed runs of each size.
        warmup: untimed runs before them.
        device: where tensors are.
        on_point: called with each point of a curve.

    Returns:
        The ``.cluster`` with the times.

    Raises:
        UsageError: the cluster does not fit.
        ExecutionError: a rank failed, died or hung.

    Example:
        >>> pipeplan.write(pipeplan.measure_links(2, max_bytes="1MiB").cluster, "cluster.json")
    """
    from pipeplan.cli.profile_verb import link_options
    from pipeplan.cli.shared import given_file

    given = _asked("profile", locals()).params
    _api.require_torch("profile")
    base = given_file("cluster", given["cluster"])
    found = _api.measure_links(link_options(given), processes, base, on_point=on_point, keep=lambda cluster: None)
    assert found is not None, "this is rank 0's parent"
    return found


@_public
def add_links(
    cluster: Cluster | Path, communication_from: Path | Sequence[Path], *, level: str | None = None
) -> LinkResult:
    """Put what nccl-tests printed into a cluster.

    Args:
        cluster: the cluster, or the path of its file.
        communication_from: files with what was printed, as text or JSON.
        level: the cluster's level that was measured; by default the one that its devices span.

    Returns:
        The ``.cluster`` with the times.

    Raises:
        FileError: a file cannot be read, or says nothing that is known.
        UsageError: the cluster has no such level.

    Example:
        >>> pipeplan.write(pipeplan.add_links("cluster.json", ["all_reduce.txt"]).cluster, "measured.json")
    """
    from pipeplan.cli.profile_verb import with_links

    return with_links(_asked("profile", locals()).params)


# Runs -------------------------------------------------------------------------------------------------------------


@_public
def run(
    plan: Plan | Path,
    model: object = None,
    data: object = None,
    *,
    emulate: bool = False,
    blocking: bool = False,
    message_limit: Size = "1MiB",
    stretch: float | Literal["auto"] = "auto",
    sequence: int | None = None,
    instructions: str | None = None,
    backend_rules: str | Sequence[str] = (),
    granularity: Granularity | None = None,
    steps: int = 10,
    local: bool | None = None,
    seed: int = 0,
    optimizer: str | Callable[..., Any] | None = None,
    lr: float | None = None,
    weight_decay: float | None = None,
    lr_schedule: str | Callable[..., Any] = "constant",
    warmup_steps: int = 0,
    lr_steps: int | None = None,
    clip_norm: float | None = None,
    precision: str | None = None,
    autocast: Literal["bfloat16"] | None = None,
    eval_data: object = None,
    eval_every: int | None = None,
    eval_batches: int | None = None,
    tensorboard: Path | None = None,
    checkpoint: Path | None = None,
    checkpoint_every: int | None = None,
    keep_checkpoints: int = 2,
    resume: bool = False,
    init: Path | None = None,
    prompt_file: Path | Sequence[Sequence[int] | str] | None = None,
    new_tokens: int = 16,
    tokenizer: Path | None = None,
    stop_ids: Counts | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    export_weights: Path | None = None,
    dtype: Literal["float32", "float64", "bfloat16"] | None = None,
    device: Literal["cpu", "cuda"] = "cpu",
    backend: Literal["auto", "gloo", "nccl"] = "auto",
    timeout: Duration = 60,
    trace: Path | None = None,
    on_step: Callable[[StepResult], None] = lambda step: None,
    on_evaluation: Callable[[Evaluated], None] = lambda found: None,
    within: Limit | None = None,
) -> RunOutcome:
    """Train with a plan, generate text with one of decode steps, or emulate it. Needs torch.

    In a program that torchrun has started, or another launcher, this process is one of the ranks, and all of them call
    this alike. Else one process per device is started here; where ``model``, ``data``, ``eval_data``, ``optimizer`` or
    ``lr_schedule`` are no text, these are copies of this one (Linux, without CUDA), which nothing needs to import.

    Args:
        plan: the plan, or the path of its file.
        model: a name of the zoo, a Hugging Face configuration, or ``"pkg.mod:factory"``; or what such a function
            returns, as for :func:`profile`: a module and its example inputs, with a loss.
        data: a text, tokens as .npy or .bin, ``"builtin"``, ``"pkg.mod:factory"``, a dataset, or a ``DataLoader`` (or
            anything else to go through again) that gives whole mini-batches, the same on every rank.
        emulate: run without a model: actions only take their predicted time.
        blocking: for comparison: every transfer blocks the devices at both ends.
        message_limit: with ``emulate``, largest message; smaller ones have the plan's bytes.
        stretch: with ``emulate``, all times are this many times the plan's.
        sequence: length of sequences, for the zoo and configurations.
        instructions: module that registers what the plan's instructions do.
        backend_rules: module with kernel backends of your own that the plan's segments name, or several.
        granularity: what a block of a captured model is, as for the profile.
        steps: mini-batches to train on.
        local: whether processes are started here; by default if no launcher has started this one.
        seed: random seed of parameters and samples.
        optimizer: ``"adamw"``, ``"adam"``, ``"momentum"``, ``"sgd"``, ``"pkg.mod:factory"`` or such a function, of
            parameters, which returns a ``torch.optim.Optimizer``; by default the plan's.
        lr: learning rate; by default the optimizer's.
        weight_decay: by default the optimizer's.
        lr_schedule: ``"constant"``, ``"cosine"``, ``"linear"``, ``"pkg.mod:factory"`` or such a function, of an
            optimizer, which returns a torch ``LRScheduler``.
        warmup_steps: steps over which the learning rate grows.
        lr_steps: steps of the schedule; by default all.
        clip_norm: clip the norm of all gradients together to this; inf only reports it.
        precision: recipe to train by: ``"fp32"``, ``"bf16"``, ``"bf16-mixed"``, ``"bf16-autocast"`` or
            ``"fp16-mixed"``; by default the plan's.
        autocast: the same as ``precision="bf16-autocast"``.
        eval_data: samples to evaluate the model on, forwards alone, after the last step; as ``data``.
        eval_every: evaluate every so many steps, too.
        eval_batches: mini-batches of an evaluation; by default all.
        tensorboard: folder of a log for TensorBoard.
        checkpoint: folder for checkpoints, from which any plan of the model can resume.
        checkpoint_every: write one every so many steps; by default at the end.
        keep_checkpoints: how many are kept.
        resume: resume from the last checkpoint; ``steps`` is the total.
        init: safetensors file, or folder of a Hugging Face model, to take the parameters from, by the names that they
            have in the module.
        prompt_file: with a plan of decode steps: the path of a file with one prompt per line, each a JSON list of token
            ids or text; or the prompts themselves, as ``[[1, 2, 3], [4, 5]]``.
        new_tokens: tokens to generate for each prompt.
        tokenizer: folder of a Hugging Face tokenizer, for prompts that are text.
        stop_ids: tokens after which a text ends; by default the tokenizer's end-of-text token.
        temperature: sample tokens from logits divided by this; 0 takes the most likely one.
        top_k: with a temperature, sample from this many most likely tokens only.
        export_weights: where to write them in the end; one file, whatever the plan.
        dtype: of parameters; by default that of the plan's recipe, or float32 where it says none.
        device: where to run.
        backend: what carries tensors.
        timeout: longest time to wait, and longest action, as ``"60s"`` or in seconds.
        trace: where to write the measured timeline beside the predicted one, for :func:`simulate` (``measured=``).
        on_step: called with each step's result as it ends, here; of a launcher's ranks on rank 0.
        on_evaluation: called in the same way with the loss of each evaluation.
        within: a limit at whose end, or interruption, the run ends with ExecutionError; of processes started here.

    Returns:
        ``.result`` with the losses and times of steps and evaluations, ``.warm_ns`` beside ``.predicted_ns``, and
        ``.throughput``; on every rank. With ``prompt_file``, ``.result.requests`` has the generated tokens of each
        prompt, and when each came.

    Raises:
        InvalidPlanError: the plan is not right.
        UsageError: an argument makes no sense, or the ranks refused the model.
        ExecutionError: a rank failed, died or hung, or the limit was over.
        FileError: weights or the trace cannot be written.

    Example:
        >>> outcome = pipeplan.run("plan.json", emulate=True, steps=2, trace="run.trace")
        >>> outcome.warm_ns, outcome.predicted_ns
        >>> pipeplan.simulate("plan.json", measured="run.trace")
    """
    from pipeplan.cli.run_verb import run_options

    _api.require_torch("run")
    launched = local is not True and _api.join_launcher()
    _require_ranks(local, launched)
    given = _asked("run", locals()).params
    options = run_options({**given, "trace": trace is not None})
    first = not launched or os.environ["RANK"] == "0"
    _require_writable({"--export-weights": export_weights, "--trace": trace} if first else {})
    outcome = _run(given["plan_path"], options, _heard(on_step, on_evaluation), within, launched)
    _write_results(outcome, trace if first else None)
    return outcome


def _run(
    plan: Any, options: RunOptions, on_event: Callable[[Event], None], within: Limit | None, launched: bool
) -> RunOutcome:
    """Run as a launcher's rank, or start ranks."""
    from pipeplan.cli.shared import given_file

    asked: Plan = given_file("plan", plan)
    if not launched:
        return _api.run(asked, options, on_event, on_look=partial(_require_time, within), where=asked.where)
    _api.check(asked).require(asked.where)
    return _api.run_as_rank(lambda: asked, options, on_event)


def _heard(
    on_step: Callable[[StepResult], None], on_evaluation: Callable[[Evaluated], None]
) -> Callable[[Event], None]:
    """What calls these with what they are for."""

    def on_event(event: Event) -> None:
        if isinstance(event, _api.StepResult):
            on_step(event)
        elif isinstance(event, _api.Evaluated):
            on_evaluation(event)
        else:
            for remark in event.remarks:
                _warn(remark)

    return on_event


def _write_results(outcome: RunOutcome, trace: Path | None) -> None:
    """Write what remains of a run. Raises FileError, where its weights have not been written, too."""
    from pipeplan.cli.run_verb import trace_of

    if trace is not None:
        _api.write_text(trace_of(outcome), os.fspath(trace))
    if outcome.result.unwritten:
        raise FileError(outcome.result.unwritten)


def _require_writable(files: Mapping[str, Path | None]) -> None:
    """Refuse files {flag: path} that could not be written in the end, before anything runs. Raises FileError."""
    for flag, path in files.items():
        if path is not None:
            _api.require_writable(os.fspath(path), flag)


def _require_ranks(local: bool | None, launched: bool) -> None:
    """Refuse to start ranks in one that a launcher has started, or to be one where none has. Raises UsageError."""
    if local is False and not launched:
        raise UsageError("local=False: no launcher has started this process; start the program with torchrun, or srun")
    if local and int(os.environ.get("WORLD_SIZE", "1")) > 1 and "TORCHELASTIC_RUN_ID" in os.environ:
        raise UsageError("local=True starts all ranks, and torchrun has started this one of several; leave out one")


# Examples ---------------------------------------------------------------------------------------------------------


@_public
def example(
    name: str,
    *,
    devices: int = 4,
    chunks: int | None = None,
    inference: bool = False,
    forward: Duration = "1ms",
    backward: Duration | None = None,
    input_grad: Duration | None = None,
    weight_grad: Duration | None = None,
    shared_forward: Duration | None = None,
    shared_backward: Duration | None = None,
    comm: Duration = 0,
    bytes: Size = 0,
    activation_bytes: Size = "1GB",
    weight_grad_bytes: Size = 0,
    device: str | None = None,
    microbatch: Counts | None = None,
    shards: Counts | None = None,
    cluster: Cluster | Path | None = None,
) -> Profile:
    """A ready profile: a literature shape with its placement, or a paper's model with estimated costs.

    Args:
        name: a shape such as ``"shape-v"``, or a model such as ``"gpt2-124m"``; ``pipeplan example --help`` has all.
        devices: number of devices of a shape.
        chunks: stages per device of shape-circular.
        inference: forwards alone, of a shape or a model.
        forward: forward time of a chain block, as ``"1ms"`` or in seconds.
        backward: backward time of a chain block; by default 3 ms.
        input_grad: input-gradient time of a chain block, instead of ``backward``.
        weight_grad: weight-gradient time of a chain block, with ``input_grad``.
        shared_forward: forward time of a block on all devices.
        shared_backward: backward time of a block on all devices.
        comm: latency between chain blocks, on any cluster.
        bytes: size of the tensor on each edge, carried by a cluster's links; instead of ``comm``.
        activation_bytes: activations held by each chain block.
        weight_grad_bytes: held from the input gradient to the weight gradient.
        device: preset to estimate a model's costs for; by default ``"a100-80gb"``, of graphpipe-case-study
            ``"v100-16gb"``.
        microbatch: samples per micro-batch that a model has costs for.
        shards: numbers of devices that split a model's block.
        cluster: the cluster whose links time the collectives of split blocks.

    Returns:
        The profile, for :func:`search`.

    Raises:
        UsageError: there is no such example, or an argument does not apply to it.

    Example:
        >>> pipeplan.search(pipeplan.example("shape-v"), time_limit=5).status
        'optimal'
    """
    from pipeplan.cli.example_verb import made_example

    found = made_example(_asked("example", locals()))
    if not isinstance(found, _api.Profile):
        raise UsageError(f"{name!r} is a cluster; example_cluster({name!r}) makes it")
    return found


@_public
def example_cluster(
    name: str,
    *,
    devices: int | None = None,
    nominal: bool = False,
    overlap: Literal["none", "sums", "all"] = "sums",
    rack: int | Sequence[int] | None = None,
    oversubscription: float | Sequence[float] | None = None,
    rails: bool = False,
    power: int | None = None,
) -> Cluster:
    """A ready-made cluster, with as many devices as you like.

    Args:
        name: such as ``"cluster-h100"`` or ``"testbed-tessel"``; ``pipeplan example --help`` lists them.
        devices: number of devices; by default the cluster's own.
        nominal: links at the rates of their data sheets, not at what published runs reach of them.
        overlap: exchanges once an iteration that run beside compute: ``"sums"`` of gradients, as ``pipeplan run`` has
            them, ``"all"``, as Megatron-LM and FSDP do, or ``"none"``.
        rack: nodes under one switch, which makes the network a fat tree; with more tiers of switches, of each.
        oversubscription: with ``rack``, what the devices under a switch could send at once over what its uplinks carry,
            as 4 for 4:1; of each tier, by default 1.
        rails: with ``rack``, device i of each node is under switch i of its rack.
        power: with ``rack``, nodes that share a power supply and fail together.

    Returns:
        The cluster, for :func:`search`.

    Raises:
        UsageError: there is no such cluster, or racks do not fit it.

    Example:
        >>> pipeplan.example_cluster("testbed-tessel", devices=8).num_devices
        8
    """
    given = {"devices": devices, "overlap": overlap, "rack": rack, "oversubscription": oversubscription, "power": power}
    asked = _asked("example", {key: value for key, value in given.items() if value is not None}).params
    tree = {"oversubscription": asked["oversubscription"] or (), "power": asked["power"], "rails": rails}
    tree |= {"nominal": nominal, "overlap": asked["overlap"], "racks": asked["racks"] or ()}
    return _api.make_cluster(name, devices and asked["devices"], **tree)
