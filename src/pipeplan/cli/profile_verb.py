"""``pipeplan profile``: measure or estimate a model's costs, measure links, or inspect a profile."""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from pipeplan import _api
from pipeplan.cli.output import Outputs, say
from pipeplan.cli.shared import (
    BYTES,
    COUNTS,
    DURATION,
    FILE,
    MEASURED_DEVICE,
    MODEL,
    SEED,
    SEQUENCE,
    TOKENS,
    FiniteRange,
    OneOf,
    Shown,
    given_file,
    granularity,
    interrupt_on_sigterm,
    recipe_options,
    warnings_shown,
)
from pipeplan.cli.survivor import survived
from pipeplan.errors import ExecutionError, FileError, InfeasibleError, UsageError, choose_from
from pipeplan.texts import counted
from pipeplan.units import MAX_LOAD_FACTOR, format_bytes

if TYPE_CHECKING:
    from pipeplan._api import (
        BackendsAsked,
        Cluster,
        LinkOptions,
        LinkPoint,
        LinkResult,
        Model,
        Profile,
        UnfinishedProfile,
    )


class LoadFactor(FiniteRange):
    """A number, or a file with what a run has measured."""

    def __init__(self) -> None:
        super().__init__(0, MAX_LOAD_FACTOR)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number. Raises FileError."""
        is_path = isinstance(value, Path) or (isinstance(value, str) and not _is_number(value))
        return super().convert(_api.read_load_factor(str(value)) if is_path else value, param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Files."""
        return [CompletionItem(incomplete, type="file")]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


OnBlock = Callable[[int, int, str], None]
"""Called before every block: how many are done, of how many, and which one."""

INTERRUPTED = 130


def measure_communication(ctx: click.Context, outputs: Outputs) -> None:
    """Measure links as one of torchrun's ranks, or between processes started here, and write the cluster.

    Rank 0 writes whenever a curve is whole, so that an interruption keeps those before it.
    """
    given = ctx.params
    output: str = given["output"]
    options, base = link_options(given), given_file("cluster", given["cluster"])
    written: list[Cluster] = []

    def keep(cluster: Cluster) -> None:
        if output != "-":
            outputs.write(cluster, output)
        written.append(cluster)

    try:
        if given["processes"]:
            interrupt_on_sigterm()
        else:
            _require_ranks()
        found = _api.measure_links(options, given["processes"], base, on_point=_LinkPoints(options), keep=keep)
    except KeyboardInterrupt:
        kept = f"{len(written[-1].measured)} curves are in {output}" if written and output != "-" else "nothing is kept"
        say(f"pipeplan: interrupted while measuring links; {kept}", err=True)
        ctx.exit(INTERRUPTED)
    if found is None:  # not rank 0
        return
    if output == "-":
        outputs.write(found.cluster, output)
    _print_curves(found, outputs, output, as_json=given["as_json"])


def link_options(given: Mapping[str, Any]) -> LinkOptions:
    """Which messages are measured, and how often."""
    return _api.LinkOptions(
        smallest_bytes=given["min_bytes"],
        largest_bytes=given["max_bytes"],
        **{name: given[name] for name in ("compute_ns", "repeats", "warmup", "device")},
    )


class _LinkPoints:
    """Says what is measured of links: on a terminal every point, elsewhere every curve, when its first point comes."""

    def __init__(self, options: LinkOptions) -> None:
        sizes = f"{format_bytes(options.smallest_bytes)} to {format_bytes(options.largest_bytes)}"
        self._curve: tuple[str, ...] = ()
        say(f"pipeplan: measuring links, {sizes}", err=True)

    def __call__(self, point: LinkPoint) -> None:
        if sys.stderr.isatty():
            say(f"{point.operation} of {point.size} bytes: {point.ns / 1000:.1f} us", err=True)
            return
        curve = (point.operation, point.level, str(point.num_devices))
        if curve != self._curve:
            say(f"pipeplan: {point.operation} on {point.level}, {point.num_devices} devices: measured", err=True)
        self._curve = curve


def _require_ranks() -> None:
    if not _api.join_launcher():
        raise UsageError(
            "no ranks here: start them with torchrun --nproc-per-node N -m pipeplan profile --communication ..., or "
            "give --processes N to start them on this machine"
        )


def add_communication(given: Mapping[str, Any], outputs: Outputs) -> None:
    """Read measured link times, write the cluster with them, and print how well each curve predicts unseen times."""
    found = with_links(given)
    outputs.write(found.cluster, given["output"])
    _print_curves(found, outputs, given["output"], as_json=given["as_json"])


def with_links(given: Mapping[str, Any]) -> LinkResult:
    """The cluster with the times that nccl-tests' outputs have."""
    printed = {path: _read_text(path) for path in given["communication_from"]}
    return _api.add_links(given_file("cluster", given["cluster"]), printed, given["level"])


def _print_curves(found: LinkResult, outputs: Outputs, output: str, *, as_json: bool) -> None:
    figures = found.figures()
    if as_json:
        say(json.dumps(figures))
    elif output != "-":
        for curve in figures["curves"]:
            say(_curve_line(curve))
        outputs.say_written("cluster", output)


_NOISY = 0.25
"""Error from which a curve says little: plans differ by less."""


def _curve_line(curve: dict[str, Any]) -> str:
    error = curve["leave_one_out_error"]
    accuracy = "too few points to judge"
    if error is not None:
        noisy = ": noisy, measure again" if error > _NOISY else ""
        accuracy = f"points predicted from their neighbours are off by {error:.1%} in the median{noisy}"
    sizes = f"{format_bytes(curve['smallest_bytes'])} to {format_bytes(curve['largest_bytes'])}"
    where = f"on {curve['level']}, {curve['num_devices']} devices"
    return f"{curve['operation']} {where}: {curve['num_points']} points, {sizes}, {accuracy}"


def _read_text(path: str) -> str:
    """A file's text, decoding any bytes; - is stdin."""
    return _api.read_bytes(path).decode(errors="replace")


@click.command("profile")
@click.argument("name", type=MODEL, metavar="[MODEL]", required=False)
@click.option("--microbatch", type=COUNTS, default="1,2,4", help="Micro-batch sizes to measure.")
@SEQUENCE
@granularity("Granularity of a captured model's blocks.  [default: half]")
@click.option(
    "--shared",
    multiple=True,
    metavar="BLOCK",
    help="Blocks to spread over all devices, by id or operator; * is a wildcard.",
)
@click.option("--shards", type=COUNTS, default="1", help="Numbers of devices that split each block.")
@click.option(
    "--context",
    type=TOKENS,
    help="Numbers of devices that share each sequence; whole sequences are always included. With --inference: tokens "
    "of texts (8k is 8192) to add prefill, decode and the cache for.  [default: 1; with --estimate 1,2,4,8 as far as "
    "pieces keep 512 tokens and run can share them]",
)
@click.option(
    "--expert",
    type=COUNTS,
    default="1",
    help="Numbers of devices that share the experts.",
)
@click.option(
    "--etp",
    type=COUNTS,
    default="1",
    help="With --expert: how many of these devices split each expert; 1 holds whole ones. Several numbers leave the "
    "choice to searches.",
)
@click.option(
    "--inference", is_flag=True, help="Forwards alone; with --context also prefill and decode with a KV cache."
)
@click.option("--batch", type=COUNTS, default="1", help="With --inference: requests at once.")
@click.option(
    "--dcp",
    type=COUNTS,
    default="1",
    help="With --inference --context: numbers of devices that share caches along their tokens; decode steps with a "
    "piece of each are measured as run makes them.",
)
@click.option(
    "--weights",
    type=OneOf(["int8", "int4", "fp8"]),
    help="With --inference --estimate: format of the layers' weights.  [default: that of --dtype]",
)
@click.option(
    "--kv-cache-dtype",
    type=OneOf(["auto", "fp8"]),
    default="auto",
    help="With --inference --estimate: format of the cache; auto is that of --dtype.",
)
@click.option(
    "--load-factor",
    type=LoadFactor(),
    default=1.0,
    metavar="FACTOR|FILE",
    help="Load of the busiest expert device, as a multiple of the average, or the output of run --json, which says it.",
)
@click.option("--recompute", is_flag=True, help="Include costs with activation checkpointing.")
@click.option(
    "--dtype",
    type=OneOf(["float32", "bfloat16", "float16", "float64"]),
    help="Number format.  [default: float32; for an estimate the preset's]",
)
@recipe_options
@click.option(
    "--device",
    type=MEASURED_DEVICE,
    metavar="cpu|cuda|PRESET",
    default="cpu",
    help="Where to measure, or the preset to estimate for.",
)
@click.option("--threads", type=click.IntRange(1, 4096), help="Threads of CPU operators.  [default: torch's choice]")
@click.option("--repeats", type=click.IntRange(1, 100_000), default=10, help="Timed runs of each block.")
@click.option("--warmup", type=click.IntRange(0, 100_000), default=3, help="Untimed warm-up runs first.")
@SEED
@click.option("--estimate", is_flag=True, help="Run nothing: count bytes and FLOPs, and take the rates of --device.")
@click.option(
    "--calibrate",
    type=FILE,
    metavar="FILE",
    help="Fit the estimate's times to a measured profile, or to published runs.",
)
@click.option(
    "--kernels",
    type=OneOf(["fused", "eager"]),
    help="With --estimate: element-wise kernels fused, the way large models are trained, or one per operator, "
    "the way eager torch runs.  [default: fused; eager for cpu and with a measured --calibrate]",
)
@click.option(
    "--attention",
    type=OneOf(["flash-1", "flash-2", "cudnn"]),
    help="With --estimate: the kernel of fused attention.  [default: cudnn from Hopper on, else flash-2]",
)
@click.option(
    "--overlap-tensor",
    is_flag=True,
    help="With --estimate: messages among devices that split a block overlap its products, as with Megatron-LM's "
    "--tp-comm-overlap and torchtitan's asynchronous tensor parallelism.",
)
@click.option(
    "--backends",
    metavar="NAME,...",
    help="Kernel backends to measure beside eager torch, for blocks and the groups that they run at once: inductor, "
    "torchscript, onednn, onednn-off, attention-flash, attention-math, channels-last, onnxruntime, openvino, and on "
    "CUDA attention-efficient, attention-cudnn, cublas, cublaslt and cuda-graphs.",
)
@click.option(
    "--backend-rules",
    multiple=True,
    metavar="pkg.mod",
    help="Module with backends of your own, to name in --backends. May be repeated.",
)
@click.option(
    "--measure-limit",
    type=DURATION,
    help="With --backends: begin no other group after this long; what takes eager torch longest is measured first.",
)
@click.option(
    "--show",
    type=FILE,
    metavar="PROFILE",
    help="Measure nothing: print this profile, with warnings about anything that would spoil plans.",
)
@click.option(
    *("--communication-from", "communication_from"),
    type=FILE,
    multiple=True,
    metavar="FILE",
    help="Measure nothing: read link times from the output of nccl-tests, as text or JSON. May be repeated.",
)
@click.option("--communication", is_flag=True, help="Measure links, under torchrun or with --processes.")
@click.option(
    "--processes",
    type=click.IntRange(2, 64),
    help="Number of local processes to measure links between; with --inference, number of processes that measure at "
    "once, as a run's do.",
)
@click.option("--min-bytes", type=BYTES, default="1KiB", help="Smallest message.")
@click.option("--max-bytes", type=BYTES, default="64MiB", help="Largest message.")
@click.option(
    *("--compute", "compute_ns"),
    type=DURATION,
    default="5ms",
    help="With --communication: how long every rank computes before each call, as a run's blocks do; 0 has one call "
    "right after the other, as nccl-tests does.",
)
@click.option(
    "--cluster", type=FILE, metavar="CLUSTER", help="Cluster to add link times to, or whose links time collectives."
)
@click.option(
    "--level", metavar="NAME", help="The level of the cluster that was measured.  [default: by the number of devices]"
)
@click.option(
    "-o", "--output", type=FILE, metavar="FILE", help="Where to write the profile, or the cluster; - for stdout."
)
@click.option(
    "--details", is_flag=True, help="Print all costs of each kind of block, not just those of the largest size."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@click.pass_context
def profile_command(ctx: click.Context, /, **_: Any) -> None:
    """Measure MODEL block by block: forward and backward times, and the memory they hold.

    MODEL is a zoo model (gpt2-tiny, gpt2-124m, tessel-mt5-tiny, mmt and others: docs/models.md), a Hugging Face
    configuration (a config.json, 'LlamaConfig(num_hidden_layers=4)', or a known one such as llama3-70b), or
    pkg.mod:factory, a function that returns a model or a module with example inputs. Use an idle machine: every number
    is a median, and the profile says how much the runs vary.

    What was measured before an interruption is kept, and the same command resumes from it.

    --estimate runs nothing and uses the rates of a --device such as a100-80gb. --communication measures links and
    writes a cluster. Two more uses need no torch: --show PROFILE inspects a profile, at the sizes of --microbatch
    alone if given; --communication-from FILE --cluster CLUSTER -o FILE adds nccl-tests' times to a cluster.
    """
    use = _require_one_use(ctx)
    given = ctx.params
    if given["backends"] and given["output"] not in (None, "-"):
        ended = survived(lambda: _api.pending_group(given["output"]), _tell)
        if ended is not None:
            ctx.exit(ended)
    if given["inference"] and _given(ctx, "microbatch"):
        raise UsageError("--microbatch is of training; with --inference give --batch, the requests at once")
    if use == "show":
        asked = given["microbatch"] if _given(ctx, "microbatch") else ()
        _show(given["show"], asked, as_json=given["as_json"], details=given["details"])
        return
    if use in ("estimate", "name"):
        _require_known_names(given, estimates=use == "estimate")
    backends_asked(given)
    renews = ("--cluster",) if use in ("communication", "communication_from") else ()
    with Outputs({"-o": given["output"]}, as_json=given["as_json"], renews=renews) as outputs:
        if use != "communication_from":
            _api.require_torch("profile")
        if use == "communication_from":
            add_communication(given, outputs)
        elif use == "communication":
            measure_communication(ctx, outputs)
        elif use == "estimate":
            _estimate(ctx, outputs)
        else:
            _measure(ctx, outputs)


_RECIPE = ("precision", "gradient_dtype", "optimizer")
_MODEL = {
    *("name", "microbatch", "sequence", "grain", "shared", "shards", "recompute", "dtype", "device", "output"),
    *("details", "inference", "batch", "context"),
    *_RECIPE,
}
_USES = {
    "show": ({"show"}, {"microbatch", "as_json", "details"}),
    "communication_from": ({"communication_from", "cluster", "output"}, {"level", "as_json"}),
    "communication": (
        {"communication", "output"},
        {"processes", "min_bytes", "max_bytes", "compute_ns", "repeats", "warmup", "device", "cluster", "level"}
        | {"as_json"},
    ),
    "estimate": (
        {"name", "output", "estimate"},
        _MODEL
        | {"calibrate", "kernels", "expert", "etp", "load_factor", "cluster", "as_json", "weights", "kv_cache_dtype"}
        | {"overlap_tensor", "attention"},
    ),
    "name": (
        {"name", "output"},
        _MODEL
        | {"threads", "repeats", "warmup", "seed", "cluster", "expert", "load_factor", "as_json", "weights"}
        | {"backends", "backend_rules", "measure_limit", "dcp", "processes", "kv_cache_dtype"},
    ),
}
"""What says which use is meant -> the parameters it needs, and those it may have."""


def _given(ctx: click.Context, parameter: str) -> bool:
    return ctx.get_parameter_source(parameter) is ParameterSource.COMMANDLINE


def _require_one_use(ctx: click.Context) -> str:
    """The use that is meant: every parameter belongs to it, and none that it needs is missing."""
    named = {parameter.name: parameter for parameter in ctx.command.params}
    given = [name for name in named if name and _given(ctx, name)]
    use = next((use for use in _USES if use in given), "name")
    needed, possible = _USES[use]
    if missing := [parameter for name, parameter in named.items() if name in needed and name not in given]:
        raise click.MissingParameter(ctx=ctx, param=missing[0])
    if extra := [name for name in given if name not in needed | possible]:
        raise click.UsageError(f"{_written(named[extra[0]])} does not go with {_written(named[use])}", ctx)
    return use


def _require_known_names(given: Mapping[str, Any], *, estimates: bool) -> None:
    """Refuse a device or a model that is none, before torch is imported for it, which takes seconds."""
    device, presets = given["device"], _api.known_names("devices")
    if estimates and device not in presets:
        raise UsageError(f"--device {device!r} is not a preset; {choose_from(device, presets)}")
    if not estimates and device != "cpu" and device in presets:
        raise UsageError(f"--device {device} is a preset; add --estimate, or measure on cpu or cuda")
    _api.require_model(given["name"])


def _written(parameter: click.Parameter) -> str:
    return parameter.opts[-1] if isinstance(parameter, click.Option) else "MODEL"


def _show(path: str, asked: tuple[int, ...], *, as_json: bool, details: bool) -> None:
    from pipeplan.reporting.profile import print_inspection

    inspection = _api.Inspection(given_file("profile", path), asked)
    if as_json:
        say(json.dumps(inspection.figures()))
    else:
        print_inspection(inspection, details=details)


def _measure(ctx: click.Context, outputs: Outputs) -> None:
    """Measure a model, or go on where an earlier measurement was interrupted, and write the profile."""
    from pipeplan.reporting.profile import print_worst

    given = ctx.params
    begin = time.monotonic()
    asked, partial = backends_asked(given), _api.UnfinishedProfile(_partial_path(given["output"]))
    if partial.path is not None and partial.path.exists():
        say(f"pipeplan: resuming from {partial.path}", err=True)
    shown = Shown("measuring")
    try:
        with warnings_shown(), shown:
            how: dict[str, Any] = {"progress": shown.update, "partial": partial, "on_mean": _tell}
            profile = None if asked is None else _earlier(given, _tell)
            if profile is None:
                profile = measured(given, _tell, **how)
            elif more := tuple(size for size in _sizes(given) if size not in profile.microbatch_sizes):
                sizes = "batch" if given["inference"] else "microbatch"
                profile = _api.with_more_sizes(profile, measured({**given, sizes: more}, _tell, **how))
    except KeyboardInterrupt:
        say(f"pipeplan: interrupted while measuring {shown.what}; {_kept(partial)}", err=True)
        ctx.exit(INTERRUPTED)
    except (ExecutionError, InfeasibleError):
        say(f"pipeplan: measuring ended; {_kept(partial, 'a command with other --microbatch sizes')}", err=True)
        raise
    outputs.write(profile, given["output"])
    if outputs.has(given["output"]):
        partial.remove()
    if asked is not None:
        profile = _with_backends(ctx, profile, outputs)
    _tell_missing(profile, _sizes(given))
    _print(profile, given, outputs, begin)
    if given["output"] != "-":
        single = given["threads"] == 1 or given["device"] != "cpu"
        threads = "" if single else ", or its threads wait for each other; try --threads 1"
        print_worst(profile.of_eager, given["output"], f"other processes use this machine{threads}", sys.stderr)


def backends_asked(given: Mapping[str, Any]) -> BackendsAsked | None:
    """Which kernel backends are to be measured; None where none are asked for. Raises UsageError."""
    if given["backends"] is None:
        for name, flag in (("backend_rules", "--backend-rules"), ("measure_limit", "--measure-limit")):
            if given[name]:
                raise UsageError(f"{flag} is of kernel backends; give --backends NAME,..., too")
        return None
    names = tuple(filter(None, (each.strip() for each in given["backends"].split(","))))
    limit = given["measure_limit"]
    asked = _api.BackendsAsked(names, tuple(given["backend_rules"]), None if limit is None else limit / 1e9)
    asked.chosen()
    return asked


def _earlier(given: Mapping[str, Any], tell: Callable[[str], None]) -> Profile | None:
    """The profile that an earlier command wrote where this one writes, if it is of the same model measured here.

    It may have other micro-batch sizes.
    """
    path = given["output"]
    if path == "-" or not Path(path).is_file():
        return None
    try:
        found = _api.read_profile(path)
        model, _ = _model(given, lambda remark: None)
        how = {name: given[name] for name in ("threads", "device", "dtype", "inference")}
        why = _api.goes_on(found, model, (), **how)
    except FileError as error:
        why = str(error)
    if why:
        tell(f"{path} is measured anew: {why}")
        return None
    tell(f"resuming from {path}: what it has is not measured again")
    return found


def _sizes(given: Mapping[str, Any]) -> tuple[int, ...]:
    """Samples at once, of training or inference."""
    sizes: tuple[int, ...] = given["batch"] if given["inference"] else given["microbatch"]
    return sizes


def _with_backends(ctx: click.Context, profile: Profile, outputs: Outputs) -> Profile:
    """The profile with what kernel backends take, written before each group, so that nothing is lost."""
    given, shown = ctx.params, Shown("measuring backends")
    kept = "nothing is written"

    def keep(so_far: Profile) -> None:
        nonlocal kept
        if given["output"] != "-":  # in one line, a fortieth of the time of a file that is laid out: it is done often
            outputs.write_text(so_far.model_dump_json() + "\n", given["output"])
            kept = f"what was measured is in {given['output']}, and the same command goes on from there"

    try:
        with warnings_shown(), shown:
            found = backends_measured(given, profile, _tell, keep=keep, progress=shown.update)
    except KeyboardInterrupt:
        say(f"pipeplan: interrupted while measuring {shown.what}; {kept}", err=True)
        ctx.exit(INTERRUPTED)
    outputs.write(found, given["output"])
    return found


def backends_measured(given: Mapping[str, Any], profile: Profile, tell: Callable[[str], None], **how: Any) -> Profile:
    """A profile with what the kernel backends take that are asked for, if any are; of sizes that it has."""
    asked = backends_asked(given)
    if asked is None:
        return profile
    model, _ = _model(given, lambda remark: None)
    sizes = [size for size in _sizes(given) if size in profile.microbatch_sizes]
    measuring = {name: given[name] for name in ("threads", "device", "seed", "repeats", "warmup")}
    return _api.profile_backends(model, profile, sizes, asked, tell=tell, **measuring, **how)


_MEASURING = ("threads", "repeats", "warmup", "device", "seed", "shards", "recompute", "load_factor")


def _estimate(ctx: click.Context, outputs: Outputs) -> None:
    """Estimate a model for a device preset, calibrated by a measured profile if there is one, and write the profile."""
    given, begin = ctx.params, time.monotonic()
    with _uncollected():
        with warnings_shown(), Shown("estimating") as shown:
            profile = estimated(given, _tell, progress=shown.update)
        outputs.write(profile, given["output"])
        _print(profile, given, outputs, begin)
    for assumption in _assumed(ctx, profile):
        _tell(assumption)


def _assumed(ctx: click.Context, profile: Profile) -> Iterator[str]:
    """What an estimate is of that nobody has asked for."""
    tokens, made = profile.tokens_per_sample, profile.source
    if tokens is not None and not _given(ctx, "sequence") and _api.takes_sequence(ctx.params["name"]):
        yield f"{tokens} tokens per sample; --sequence changes that"
    if not _given(ctx, "device"):
        yield f"times and memory are of {made.device} in {made.dtype}; --device changes that"


@contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage collection, a sixth of the time of importing torch and of tracing, which leave nothing to collect.

    Nor is what they made gone through when it begins again: the process ends soon.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.freeze()
            gc.enable()


class _Remarks:
    """What a reader must know of a profile, said when its first block is about to run: not of one that is refused."""

    def __init__(self, tell: Callable[[str], None], progress: OnBlock | None) -> None:
        self._tell, self._progress = tell, progress
        self._kept: list[str] = []

    def keep(self, remark: str) -> None:
        """For later."""
        self._kept.append(remark)

    def update(self, done: int, total: int, what: str) -> None:
        """The progress, before which remarks are said."""
        self.say()
        if self._progress is not None:
            self._progress(done, total, what)

    def say(self) -> None:
        """Each remark once, also where nothing was left to run."""
        while self._kept:
            self._tell(self._kept.pop(0))


def measured(
    given: Mapping[str, Any], tell: Callable[[str], None], *, progress: OnBlock | None = None, **how: Any
) -> Profile:
    """The profile of the model that the parameters name; ``tell`` gets what a reader must know of it."""
    if _of_inference(given, estimates=False):
        return _forwards(given, tell, progress, **how)
    remarks = _Remarks(tell, progress)
    model, shards = _model(given, remarks.keep)
    profile = _api.profile(
        model,
        given["microbatch"],
        **{name: given[name] for name in (*_MEASURING, *_RECIPE, "dtype", "expert")} | {"shards": shards},
        context=given["context"] or (1,),
        cluster=given_file("cluster", given["cluster"]),
        progress=remarks.update,
        **({"on_mean": tell} | how),
    )
    remarks.say()
    return profile


def estimated(
    given: Mapping[str, Any], tell: Callable[[str], None], *, progress: OnBlock | None = None, **how: Any
) -> Profile:
    """The same, estimated for a device preset, and calibrated by a measured profile or published runs if given."""
    if _of_inference(given, estimates=True):
        return _forwards(given, tell, progress)
    remarks = _Remarks(tell, progress)
    calibration = given["calibrate"]
    if isinstance(calibration, str):
        calibration = _api.read_calibration(calibration, given["device"])
    runs = calibration if isinstance(calibration, _api.RunsFit) else None
    if runs is not None:
        remarks.keep(runs.notes)
    model, shards = _model(given, remarks.keep, meta=True)
    profile = _api.estimate(
        model,
        given["microbatch"],
        device=given["device"],
        shards=shards,
        **{
            name: given[name]
            for name in ("dtype", *_RECIPE, "context", "expert", "etp", "load_factor", "recompute", "kernels")
        },
        **{name: given[name] for name in ("overlap_tensor", "attention")},
        calibration=None if runs is not None else given_file("profile", calibration),
        runs=runs,
        cluster=given_file("cluster", given["cluster"]),
        progress=remarks.update,
        tell=remarks.keep,
        **how,
    )
    remarks.say()
    return profile


_OF_TRAINING = {
    "recompute": "--recompute is of backward",
    "precision": "--precision is what training keeps; give --dtype or --weights",
    "gradient_dtype": "--gradient-dtype is of training",
    "optimizer": "--optimizer is of training",
    "calibrate": "--calibrate fits forward and backward of training",
    "overlap_tensor": "--overlap-tensor is of training",
    "attention": "--attention is of training",
}


def _of_inference(given: Mapping[str, Any], *, estimates: bool) -> bool:
    """Whether forwards alone are asked for. Raises UsageError where flags do not go together."""
    is_asked: bool = given["inference"]
    if is_asked:
        for name, why in _OF_TRAINING.items():
            if given[name]:
                raise UsageError(f"{why}, and --inference runs forwards alone; leave it out")
        if max(given["etp"]) > 1:
            raise UsageError("--etp splits experts in training; with --inference each device has whole ones")
        if max(given["dcp"]) > 1 and given["context"] in (None, (1,)):
            raise UsageError("--dcp is of decode steps; give --context, the tokens of their texts, too")
        if max(given["dcp"]) > 1 and given["device"] == "cuda":
            raise UsageError("--dcp measures decode steps as run makes them, on CPUs only so far; leave --device out")
        if given["processes"] and not isinstance(given["name"], str):
            raise UsageError(
                "processes started here load the model themselves; give its name, as of the zoo or pkg.mod:factory"
            )
    elif given["dcp"] != (1,) or (not estimates and given["processes"]):
        flag = "--processes" if given["processes"] else "--dcp"
        raise UsageError(f"{flag} is of a profile of inference here; add --inference")
    elif given["batch"] != (1,):
        raise UsageError("--batch is of --inference; for training give --microbatch")
    elif given["weights"] or given["kv_cache_dtype"] != "auto":
        flag = "--weights" if given["weights"] else "--kv-cache-dtype"
        raise UsageError(f"{flag} is of inference; add --inference")
    if not estimates and (given["weights"] or given["kv_cache_dtype"] != "auto"):
        raise UsageError("--weights and --kv-cache-dtype are of estimates; add --estimate and --device PRESET")
    return is_asked


def _forwards(given: Mapping[str, Any], tell: Callable[[str], None], progress: OnBlock | None, **how: Any) -> Profile:
    """The profile of forwards alone of the model that the parameters name."""
    remarks, estimates = _Remarks(tell, progress), given["estimate"] or given["device"] not in ("cpu", "cuda")
    model, shards = _model(given, remarks.keep, meta=estimates)
    of_estimates = ("weights", "kv_cache_dtype", "kernels")
    names = of_estimates if estimates else ("threads", "repeats", "warmup", "seed", "dcp", "processes")
    loaded = {name: given[name] for name in ("sequence", "grain")} | {"shards": shards}
    named: dict[str, Any] = {} if estimates else {"named": (given["name"], loaded)}
    profile = (_api.estimate_inference if estimates else _api.profile_inference)(
        model,
        given["batch"],
        given["context"] if given["context"] not in (None, (1,)) else (),
        shards=shards,
        cluster=given_file("cluster", given["cluster"]),
        progress=remarks.update,
        **{name: given[name] for name in (*names, "expert", "load_factor", "dtype", "device")},
        **named,
    )
    remarks.say()
    return profile


def _model(
    given: Mapping[str, Any], tell: Callable[[str], None], *, meta: bool = False
) -> tuple[Model, tuple[int, ...]]:
    """The model that is named, and those of ``--shards`` that can share it evenly."""
    how = {name: given[name] for name in ("sequence", "grain", "shared", "shards")}
    model, uneven = _api.load_where_even(given["name"], **how, meta=meta)
    for reason in uneven.values():
        tell(f"left out: {reason}")
    for advice in filter(None, (_api.advice_on(model), _api.hindrance_of(model))):
        tell(advice)
    if max(given["shards"]) > 1 and model.sharded is not None and not model.runs_split:
        tell(
            f"pipeplan run cannot split blocks of {model.name}: the rows of --shards are for planning only; "
            "for a plan that runs, search with --tp 1 --shard-shared no"
        )
    return model, tuple(count for count in given["shards"] if count not in uneven)


def _tell(remark: str) -> None:
    say(f"pipeplan: {remark}", err=True)


def _print(profile: Profile, given: Mapping[str, Any], outputs: Outputs, begin: float) -> None:
    """What a profile says in short, once it is written."""
    from pipeplan.reporting.profile import print_blocks

    if given["as_json"]:
        figures = _api.ProfileResult(profile.of_eager, time.monotonic() - begin).figures()
        say(json.dumps(figures | ({"backends": profile.groups_by_backend} if given["backends"] else {})))
    elif given["output"] != "-":
        print_blocks(profile.of_eager, details=given["details"])
        for name, count in profile.groups_by_backend.items():
            say(f"{name}: {counted(count, 'group')}")
        if profile.refusals:
            say(f"refused by backends: {counted(len(profile.refusals), 'group')}, as the profile says")
        outputs.say_written("profile", given["output"])


def _partial_path(output: str) -> Path | None:
    """Where an interrupted measurement is kept: beside the profile, unless that is no ordinary file."""
    path = Path(output)
    if output == "-" or (path.exists() and not path.is_file()):
        return None
    name = path.name.encode()[: _LONGEST_NAME - len(_PARTIAL)].decode(errors="ignore")
    return path.with_name(f"{name}{_PARTIAL}")


_PARTIAL = ".partial"
_LONGEST_NAME = 255
"""Bytes of a file's name, at most, on the usual file systems."""


def _kept(partial: UnfinishedProfile, what: str = "the same command") -> str:
    """Where measurements are, and what resumes from them."""
    if partial.path is None or not partial.path.exists():
        return "nothing is written"
    if partial.path != partial.asked:
        return f"what was measured is kept in {partial.path}: move it to {partial.asked}, and {what} resumes from there"
    return f"what was measured is kept in {partial.path}, and {what} resumes from there"


def _tell_missing(profile: Profile, sizes: tuple[int, ...]) -> None:
    missing = [str(size) for size in sizes if size not in profile.microbatch_sizes]
    if missing:
        say(f"pipeplan: not measured: micro-batch sizes {', '.join(missing)}. {profile.source.notes}", err=True)
