"""``pipeplan run``: train a model with a plan on torch.distributed."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pipeplan import _api
from pipeplan.cli.output import Outputs, say
from pipeplan.cli.run_steps import Steps
from pipeplan.cli.shared import (
    BYTES,
    DURATION,
    FILE,
    FOLDER,
    FROM_ZERO,
    LARGE_NUMBER,
    MODEL,
    SEED,
    SEQUENCE,
    TOKEN_IDS,
    FiniteRange,
    KnownNames,
    OneOf,
    granularity,
    interrupt_on_sigterm,
    make_folder,
)
from pipeplan.errors import ExecutionError, UsageError
from pipeplan.texts import printable
from pipeplan.units import MAX_STRETCH, format_ns

if TYPE_CHECKING:
    from pipeplan._api import Plan, RunOptions, RunOutcome

_Command = TypeVar("_Command", bound=Callable[..., object])

_LEAST_TIMEOUT_NS = 1_000_000
_OF_ALL_RUNS = ("num_steps", "device", "backend", "timeout_ns", "blocking", "message_limit_bytes", "stretch", "trace")
"""Parameters of every run; the others are those of training."""


class _Stretch(FiniteRange):
    """A factor, or ``auto``, which is 0."""

    name = "factor"

    def __init__(self) -> None:
        super().__init__(1e-6, MAX_STRETCH)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number."""
        return 0.0 if value in ("auto", 0.0) else super().convert(value, param, ctx)


@click.command("run")
@click.argument("plan_path", type=FILE, metavar="PLAN")
@click.option(
    "--model",
    type=MODEL,
    metavar="NAME|CONFIG|pkg.mod:name",
    help="Model to train: from the zoo, a configuration, or your own.",
)
@click.option("--emulate", is_flag=True, help="Run without a model: every action just waits for its predicted time.")
@click.option("--blocking", is_flag=True, help="For comparison: make every transfer block the devices at both ends.")
@click.option(
    *("--message-limit", "message_limit_bytes"),
    type=BYTES,
    default="1MiB",
    help="With --emulate: the largest message to send; smaller ones have the plan's size.",
)
@click.option(
    "--stretch",
    type=_Stretch(),
    default="auto",
    metavar="auto|X",
    help="With --emulate: multiply all times by X; auto is just enough for this machine to keep up.",
)
@SEQUENCE
@click.option(
    "--instructions", metavar="pkg.mod", help="Module that registers the functions of the plan's instructions."
)
@click.option(
    "--backend-rules",
    multiple=True,
    metavar="pkg.mod",
    help="Module with kernel backends of your own that the plan's segments name. May be repeated.",
)
@granularity("Granularity of a captured model's blocks, as in the profile.")
@click.option(
    "--steps",
    "num_steps",
    type=FROM_ZERO,
    default=10,
    help="Mini-batches to train on; 0 only to export.",
)
@click.option("--local", is_flag=True, help="Start one process per device on this machine, without torchrun.")
@SEED
@click.option(
    "--data",
    type=KnownNames(lambda: ["builtin"], files=True),
    metavar="FILE|builtin|pkg.mod:factory",
    help="A text file, tokens as .npy or .bin, builtin (sums spelled out), or your own dataset.  [default: "
    "random samples]",
)
@click.option(
    "--optimizer",
    type=KnownNames(lambda: ["adamw", "adam", "momentum", "sgd"]),
    metavar="adamw|adam|momentum|sgd|pkg.mod:factory",
    help="One of torch's, or a function from parameters to an optimizer.  [default: the plan's]",
)
@click.option("--lr", "learning_rate", type=FiniteRange(0), help="Learning rate.  [default: the optimizer's, 0.001]")
@click.option("--weight-decay", type=FiniteRange(0), help="Weight decay.  [default: the optimizer's, 0.01 for adamw]")
@click.option(
    "--lr-schedule",
    type=KnownNames(lambda: ["constant", "cosine", "linear"]),
    default="constant",
    metavar="constant|cosine|linear|pkg.mod:factory",
    help="Learning-rate schedule; a factory takes the optimizer and returns a torch LRScheduler.",
)
@click.option(
    "--warmup-steps",
    type=FROM_ZERO,
    default=0,
    help="Steps over which the learning rate rises.",
)
@click.option("--lr-steps", type=LARGE_NUMBER, help="Length of the learning-rate schedule.  [default: --steps]")
@click.option(
    "--clip-norm",
    type=FiniteRange(0, min_open=True, infinite=True),
    metavar="X",
    help="Clip the global gradient norm to this; inf only reports it.",
)
@click.option(
    "--precision",
    type=KnownNames(lambda: _api.known_names("recipes")),
    metavar="fp32|bf16|bf16-mixed|bf16-autocast|fp16-mixed",
    help="Precision recipe to train with.  [default: the plan's; fp32 where it has none]",
)
@click.option("--autocast", type=OneOf(["bfloat16"]), help="The same as --precision bf16-autocast.")
@click.option(
    "--eval-data",
    type=KnownNames(lambda: ["builtin"], files=True),
    metavar="FILE|builtin|pkg.mod:factory",
    help="Samples to evaluate the model on, forwards alone, after the last step.",
)
@click.option("--eval-every", type=LARGE_NUMBER, metavar="K", help="Evaluate every K steps, too.")
@click.option("--eval-batches", type=LARGE_NUMBER, metavar="N", help="Mini-batches of an evaluation.  [default: all]")
@click.option("--tensorboard", type=FOLDER, metavar="DIR", help="Write a log for TensorBoard here.")
@click.option(
    "--checkpoint",
    type=FOLDER,
    metavar="DIR",
    help="Write checkpoints here; any plan for the model can resume from them.",
)
@click.option(
    "--checkpoint-every",
    type=LARGE_NUMBER,
    metavar="K",
    help="Write one every K steps.  [default: at the end]",
)
@click.option("--keep-checkpoints", type=LARGE_NUMBER, default=2, help="Number of checkpoints to keep.")
@click.option("--resume", is_flag=True, help="Resume from the last checkpoint; --steps is the total.")
@click.option(
    "--init",
    type=FILE,
    metavar="FILE",
    help="Start from the weights in this safetensors file, or in a Hugging Face model's folder.",
)
@click.option(
    "--prompt-file",
    type=FILE,
    metavar="FILE",
    help="With a plan of decode steps: generate text for these prompts, one per line, each a JSON list of token ids or "
    "text (--tokenizer).",
)
@click.option(
    "--new-tokens", type=LARGE_NUMBER, default=16, help="With --prompt-file: tokens to generate for each prompt."
)
@click.option(
    "--tokenizer",
    type=FOLDER,
    metavar="DIR",
    help="With --prompt-file: folder of a Hugging Face tokenizer, for prompts that are text.",
)
@click.option(
    "--stop-ids",
    type=TOKEN_IDS,
    metavar="ID,...",
    help="With --prompt-file: tokens after which a text ends.  [default: the end-of-text token of --tokenizer]",
)
@click.option(
    "--temperature",
    type=FiniteRange(0),
    default=0.0,
    help="With --prompt-file: sample tokens from logits divided by this; 0 takes the most likely one.",
)
@click.option(
    "--top-k", type=LARGE_NUMBER, metavar="K", help="With --temperature: sample from the K most likely tokens only."
)
@click.option(
    "--export-weights",
    type=FILE,
    metavar="FILE",
    help="Write the weights at the end: one safetensors file with the module's names, from any plan.",
)
@click.option(
    "--dtype",
    type=OneOf(["float32", "float64", "bfloat16"]),
    help="Number format of the parameters.  [default: that of the plan's recipe, or float32]",
)
@click.option("--device", type=OneOf(["cpu", "cuda"]), default="cpu", help="Device that ranks compute on.")
@click.option(
    "--backend",
    type=OneOf(["auto", "gloo", "nccl"]),
    default="auto",
    help="Backend that carries tensors; auto is nccl on cuda, else gloo. With gloo, processes can share a GPU.",
)
@click.option(
    *("--timeout", "timeout_ns"),
    type=DURATION,
    default="60s",
    help="Fail if a wait or an action takes longer than this.",
)
@click.option("--trace", "trace_path", type=FILE, metavar="FILE", help="Write the measured and the predicted timeline.")
@click.option("--json", "as_json", is_flag=True, help="Print losses and times as one JSON object.")
def run_command(
    plan_path: str, model: str | None, emulate: bool, local: bool, trace_path: str | None, as_json: bool, **how: Any
) -> None:
    """Train with PLAN, one process per device, and print the loss of every step; or generate text.

    Start it under torchrun (torchrun --nproc-per-node 4 -m pipeplan run PLAN ...), or give --local. A plan names no
    model: --model does, and its blocks must have the plan's names. With --emulate no model is trained, so --model is
    refused and all other flags about models and training have no effect: actions wait for as long as PLAN says. At the
    end the predicted and the median time of an iteration are printed.

    A plan of decode steps (search --kv) generates text for the prompts of --prompt-file.
    """
    _api.require_torch("run")
    if local and "TORCHELASTIC_RUN_ID" in os.environ and (started := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        raise UsageError(
            f"--local starts all ranks itself, and torchrun has started {started}; leave out one of the two"
        )
    if trace_path == "-":
        raise UsageError("--trace - would mix with the losses on stdout; give a file")
    if (weights := how["export_weights"]) == "-":
        raise UsageError("--export-weights - would mix with the losses on stdout; give a file")
    launched = not local and _api.join_launcher()
    first = local or os.environ.get("RANK", "0") == "0"  # only rank 0 writes the trace
    outputs = Outputs({"--trace": trace_path, "--export-weights": weights} if first else {})
    for name in ("checkpoint", "tensorboard") if first else ():
        if how[name] is not None:
            make_folder(how[name], f"--{name}")
    options = run_options({**how, "model": model, "emulate": emulate, "trace": trace_path is not None})
    shown = Steps(options, quiet=as_json)
    outcome = _run_here(plan_path, options, shown) if local else _run_as_rank(plan_path, options, shown, launched)
    if first:
        tokenizer = how["tokenizer"]
        _tell(outcome, plan_path, outputs, trace_path, as_json=as_json, local=local, tokenizer=tokenizer)
    if (stopped := outcome.stopped_by) is not None:
        if first:
            say(f"pipeplan: ended by {stopped.name}", err=True)
            _say_where_to_resume(options)
        click.get_current_context().exit(128 + stopped)


def _tell(
    outcome: RunOutcome,
    plan_path: str,
    outputs: Outputs,
    trace_path: str | None,
    *,
    as_json: bool,
    local: bool,
    tokenizer: str | None = None,
) -> None:
    """Write and print what came of a run."""
    weights = outcome.options.export_weights if isinstance(outcome.options, _api.TrainOptions) else None
    with outputs:
        if trace_path is not None:  # what becomes of it is said after the results, which are not lost with it
            outputs.write_text(trace_of(outcome), trace_path)
        if weights is not None:
            outputs.note(weights, outcome.result.unwritten)
            outputs.say_written("weights", weights)
        if as_json:
            say(json.dumps(outcome.figures(), allow_nan=False))
        elif isinstance(outcome, _api.DecodeOutcome):
            for line in written_lines(outcome, tokenizer):
                say(line)
            if outcome.is_off and (reason := f"{_crowded(outcome, local=local)}{_late(outcome)}"):
                say(reason.removesuffix("; "))
        else:
            say(comparison_line(outcome))
            if outcome.throughput is not None:
                say(f"trained {outcome.throughput.words}")
            if outcome.result.experts:
                say(load_line(outcome))
            if outcome.is_off:
                say(reason_line(outcome, plan_path, trace_path, local=local))


_ELSEWHERE = ("plan_path", "emulate", "local", "trace_path", "as_json")
"""Parameters that do not say how a rank runs."""


_NAMED = ("model", "data", "eval_data", "optimizer", "lr_schedule")
"""Parameters that are names, or in Python what these would name."""


def _named(value: Any) -> Any:
    return value if value is None or isinstance(value, str) else _api.PythonValue.of(value)


def run_options(given: Mapping[str, Any]) -> RunOptions:
    """How to run, or to train where there is a ``model``, by the names of the flags' parameters. Raises UsageError."""
    if (given["model"] is None) != given["emulate"]:
        raise UsageError("give --model to train, or --emulate to run without a model: one of the two")
    if given["timeout_ns"] < _LEAST_TIMEOUT_NS:
        raise UsageError(f"--timeout {given['timeout_ns']}ns is too short to wait for anything; give at least 1ms")
    given = {name: _named(value) if name in _NAMED else value for name, value in given.items()}
    if given["num_steps"] == 0 and (given["model"] is None or given["export_weights"] is None):
        raise UsageError("--steps 0 does nothing without --export-weights FILE; give at least 1")
    options = _api.RunOptions(**{name: given[name] for name in _OF_ALL_RUNS})
    if given["prompt_file"] is not None:
        return _decode_options(given, options)
    if any(given[name] is not None for name in ("tokenizer", "stop_ids", "top_k")) or given["temperature"]:
        raise UsageError(
            "--tokenizer, --stop-ids, --temperature and --top-k are for --prompt-file; give the prompts with it"
        )
    if given["model"] is not None:
        left = (*_OF_ALL_RUNS, *_ELSEWHERE, *_OF_TEXTS)
        training = {name: value for name, value in given.items() if name not in left}
        if training.pop("autocast") is not None:
            if training["precision"] not in (None, "bf16-autocast"):
                raise UsageError(
                    f"--autocast is --precision bf16-autocast; leave it or --precision {training['precision']} out"
                )
            training["precision"] = "bf16-autocast"
        options = _api.TrainOptions(**training, **options.as_json())
    options.require_consistent()
    return options


_OF_TEXTS = ("prompt_file", "new_tokens", "tokenizer", "stop_ids", "temperature", "top_k")
"""Parameters of writing texts on."""

_OF_BOTH = ("model", "sequence", "grain", "seed", "dtype", "init")
"""Those of training that are of that, too."""


def _decode_options(given: Mapping[str, Any], options: RunOptions) -> RunOptions:
    """How to generate text. Raises UsageError where what is given is for training or emulation."""
    if given["emulate"]:
        raise UsageError("--prompt-file needs a model, and --emulate runs without one; leave out one of the two")
    for name, usual in {
        **_api.OF_TRAINING,
        "data": None,
        "instructions": None,
        "tensorboard": None,
        "backend_rules": (),
    }.items():
        if given[name] != usual:
            raise UsageError(f"--{name.replace('_', '-')} is for training; leave it out with --prompt-file")
    prompts, stop = _api.read_prompts(given["prompt_file"], given["tokenizer"])
    found = _api.DecodeOptions(
        **{name: given[name] for name in _OF_BOTH},
        prompts=prompts,
        new_tokens=given["new_tokens"],
        temperature=given["temperature"],
        top=given["top_k"],
        stop=stop if given["stop_ids"] is None else given["stop_ids"],
        **options.as_json(),
    )
    found.require_consistent()
    return found


def _run_here(plan_path: str, options: RunOptions, shown: Steps) -> RunOutcome:
    plan = _api.read_plan(plan_path)
    interrupt_on_sigterm()
    try:
        with shown.waiting(plan):
            shown.plan = plan
            return _api.run(plan, options, shown.show, on_look=shown.look, where=plan_path)
    except (KeyboardInterrupt, BrokenPipeError, ExecutionError):
        _say_where_to_resume(options)
        raise


def _say_where_to_resume(options: RunOptions) -> None:
    """What a run that did not end well leaves to go on from, on standard error."""
    if not isinstance(options, _api.TrainOptions) or options.checkpoint is None:
        return
    step = _api.last_checkpoint(options.checkpoint)
    last = "none yet" if step is None else f"step {step}: give --resume to go on from there"
    say(f"last whole checkpoint in {options.checkpoint}: {last}", err=True)


def _run_as_rank(plan_path: str, options: RunOptions, shown: Steps, launched: bool) -> RunOutcome:
    def read() -> Plan:
        shown.plan = plan = _api.read_plan(plan_path)
        _api.check(plan).require(plan_path)
        return plan

    if not launched:
        num_ranks = len(read().devices)
        raise UsageError(
            f"no ranks here: start {num_ranks} with torchrun --nproc-per-node {num_ranks} -m pipeplan run ..., srun or "
            "mpirun, or give --local to start them on this machine"
        )
    return _api.run_as_rank(read, options, shown.show)


def written_lines(outcome: RunOutcome, tokenizer: str | None) -> Iterator[str]:
    """The tokens of each text, or its words, then the time of a token beside the predicted one."""
    decode = None if tokenizer is None else _api.tokenizer_of(tokenizer).decode
    for request in outcome.result.requests:
        yield " ".join(map(str, request.ids)) if decode is None else printable(decode(request.ids))
    predicted, measured = outcome.predicted_ns, outcome.warm_ns
    if measured:
        ratio = f" ({measured / predicted - 1:+.1%})" if predicted else ""
        yield f"token predicted {format_ns(predicted)}, median {format_ns(measured)}{ratio}"


def comparison_line(outcome: RunOutcome) -> str:
    """Predicted and measured time of an iteration."""
    if not outcome.result.steps:
        return "no steps (--steps 0)"
    median, predicted = outcome.warm_ns, outcome.predicted_ns
    left = "; first (warm-up) step excluded" if len(outcome.result.steps) > 1 else ""
    ratio = f" ({median / predicted - 1:+.1%})" if predicted else ""
    stretch = outcome.result.stretch
    times = (
        "" if stretch == 1 else f" (the plan's {format_ns(round(predicted / stretch))} stretched {stretch:.3g} times)"
    )
    return f"predicted {format_ns(predicted)}{times}, median {format_ns(median)}{ratio}{left}"


def load_line(outcome: RunOutcome) -> str:
    """How unevenly words chose experts, over all blocks, and where most."""
    loads = outcome.result.experts
    mean, worst = fmean(each.load_factor for each in loads), max(loads, key=lambda each: each.load_factor)
    single = max(loads, key=lambda each: each.most_chosen)
    dropped = sum(each.dropped for each in loads)
    chosen = sum(sum(each.tokens_per_expert) for each in loads)
    shared = [
        f"busiest device {mean:.2f} times the average"
        + f" ({worst.load_factor:.2f} in {worst.block})" * (len(loads) > 1)
    ]
    return "experts: " + ", ".join(
        (shared if worst.load_factor > 1 else [])
        + [f"busiest expert {single.most_chosen:.2f} times the average, in {single.block}"]
        + ([f"{dropped / chosen:.1%} of words beyond capacity"] if dropped else [])
    )


def reason_line(outcome: RunOutcome, plan_path: str, trace_path: str | None, *, local: bool) -> str:
    """Why a run may have taken longer or shorter than predicted, and what says where the time went."""
    shared = f"{_crowded(outcome, local=local)}{_late(outcome)}"
    command = shlex.join(["pipeplan", "simulate", plan_path, "--measured", trace_path or "FILE"])
    return f"{shared}{command if trace_path is not None else f'--trace FILE, then {command},'} shows where time went"


def _crowded(outcome: RunOutcome, *, local: bool) -> str:
    """That cores are shared, if they are: clauses, each with its semicolon."""
    processes = outcome.plan.num_devices if local else int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    cores = os.cpu_count() or 1
    crowded = processes > cores and outcome.options.device == "cpu"
    shared = f"{processes} processes on {cores} cores; " if crowded else ""
    if (others := outcome.others_cores or 0.0) >= _BUSY_CORES and outcome.options.device == "cpu":
        shared += f"other processes use this machine ({others:.1f} of {cores} cores during the run); "
    return shared


def _late(outcome: RunOutcome) -> str:
    """That a late run has short actions beside what is not predicted, if so: a clause with its semicolon."""
    late, action = outcome.warm_ns - outcome.predicted_ns, _mean_action_ns(outcome.plan)
    if outcome.result.stretch == 1 and late > _LATE * outcome.predicted_ns and action < _SHORT_NS:
        return (
            f"the plan's actions are short ({format_ns(round(action))} on average), and the time that processes take "
            "between them is not predicted; "
        )
    return ""


_BUSY_CORES = 0.2
"""Cores from which others are said to use the machine."""

_LATE = 0.2
"""A run is late by more than this part of what was predicted."""

_SHORT_NS = 20_000_000
"""Actions below which emulations on a small machine are late, and are stretched (docs/executor.md)."""


def _mean_action_ns(plan: Plan) -> float:
    """The mean time of what devices compute."""
    workload = plan.workload
    counts = [len(slots) for slots in workload.slots[: len(workload.operations)]]
    work = sum(count * each.duration_ns for count, each in zip(counts, workload.operations, strict=True))
    return work / max(1, sum(counts))


def trace_of(outcome: RunOutcome) -> str:
    """The measured and the predicted timeline of a run, as a file of traces."""
    from pipeplan.reporting.timeline import run_trace

    options = outcome.options
    model = options.model if isinstance(options, _api.TrainOptions) else None
    about: dict[str, object] = {"model": model, "emulated": model is None, "blocking": options.blocking}
    if model is None:
        about["stretch"] = outcome.result.stretch
    return run_trace(outcome.plan, outcome.result.timeline, about)
