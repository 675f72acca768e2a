"""``pipeplan run``: train a model with a plan on torch.distributed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import click

from pipeplan.cli.outputs import require_writable
from pipeplan.cli.training_options import require_consistent, training_options
from pipeplan.cli.types import BYTES, DURATION
from pipeplan.errors import ExecutionError, UsageError

if TYPE_CHECKING:
    from pipeplan.model import Plan
    from pipeplan.runtime.options import RunOptions, RunResult, StepResult

__all__ = ["command"]

_LEAST_TIMEOUT_NS = 1_000_000
_TRAIN = "pipeplan.runtime.training:train_job"
_EMULATE = "pipeplan.runtime.emulation:emulate_job"


@click.command("run", short_help="Run a plan on torch.distributed.")
@click.argument("plan_path", metavar="PLAN")
@click.option("--model", metavar="NAME|CONFIG|pkg.mod:name", help="Of the zoo, a configuration, or your own.")
@click.option("--emulate", is_flag=True, help="Run without a model: actions only take their predicted time.")
@click.option("--blocking", is_flag=True, help="For comparison: every transfer holds up the devices at its two ends.")
@click.option(
    "--message-limit",
    type=BYTES,
    default="1MiB",
    show_default=True,
    help="With --emulate, largest message; others have the plan's bytes.",
)
@click.option("--sequence", type=click.IntRange(min=1), help="Length of sequences, for the zoo and configurations.")
@click.option("--instructions", metavar="pkg.mod", help="Module that registers what the plan's instructions do.")
@click.option("--grain", type=click.Choice(["layer", "half", "operator"]), help="Blocks, as the profile has them.")
@click.option("--steps", type=click.IntRange(min=1), default=10, show_default=True, help="Mini-batches to train on.")
@click.option("--local", is_flag=True, help="Start one process per device here; otherwise torchrun has done so.")
@click.option("--seed", type=click.IntRange(min=0, max=2**31 - 1), default=0, show_default=True)
@training_options
@click.option("--dtype", type=click.Choice(["float32", "float64", "bfloat16"]), default="float32", show_default=True)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option(
    "--backend",
    type=click.Choice(["auto", "gloo", "nccl"]),
    default="auto",
    show_default=True,
    help="What carries tensors; auto is nccl for cuda. With gloo several processes can share a GPU.",
)
@click.option("--timeout", type=DURATION, default="60s", show_default=True, help="Longest wait, and longest action.")
@click.option("--trace", "trace_path", metavar="FILE", help="Write the measured timeline beside the predicted one.")
@click.option("--json", "as_json", is_flag=True, help="Print losses and times as one JSON object.")
def command(
    plan_path: str,
    model: str | None,
    emulate: bool,
    blocking: bool,
    message_limit: int,
    sequence: int | None,
    instructions: str | None,
    grain: Literal["layer", "half", "operator"] | None,
    steps: int,
    local: bool,
    seed: int,
    dtype: str,
    device: str,
    backend: str,
    timeout: int,
    trace_path: str | None,
    as_json: bool,
    **training: Any,
) -> None:
    """Train with PLAN, one process per device, and print the loss of every step.

    Start it under torchrun (torchrun --nproc-per-node 4 -m pipeplan run PLAN ...), or give --local. The model
    comes from here, never from the plan; its blocks must have the plan's names. With --emulate no model is trained,
    so --model is refused and what else is about models and training does nothing: actions wait for as long as PLAN
    says. At the end stands the iteration's predicted time beside the median.
    """
    from pipeplan.cli.run_results import Steps, comparison_line, run_trace, summary_json
    from pipeplan.model import write_text
    from pipeplan.runtime.options import RunOptions
    from pipeplan.runtime.train_options import TrainOptions

    _require_torch()
    if (model is None) != emulate:
        raise UsageError("give --model to train, or --emulate to run without a model: one of the two")
    if trace_path == "-":
        raise UsageError("--trace - would mix with the losses on stdout; give a file")
    if trace_path is not None and (local or os.environ.get("RANK", "0") == "0"):  # only rank 0 writes it
        require_writable(trace_path, "--trace")
    if timeout < _LEAST_TIMEOUT_NS:
        raise UsageError(f"--timeout {timeout}ns is too short to wait for anything; give at least 1ms")
    require_consistent(training)
    options = RunOptions(
        num_steps=steps,
        device=device,
        backend=backend,
        timeout_ns=timeout,
        trace=trace_path is not None,
        blocking=blocking,
        message_limit_bytes=message_limit,
    )
    if model is not None:
        training |= {"sequence": sequence, "grain": grain, "seed": seed, "dtype": dtype, "instructions": instructions}
        options = TrainOptions(model, **options.as_json(), **training)
    work = _EMULATE if emulate else _TRAIN
    shown = Steps(options, quiet=as_json)
    plans: list[Plan] = []

    def read() -> Plan:
        plans.append(_runnable_plan(plan_path))
        return plans[-1]

    result = (_run_here if local else _run_as_rank)(work, read, options, shown.show)
    if result is None:  # not rank 0
        return
    click.echo(summary_json(plans[-1], options, result) if as_json else comparison_line(plans[-1], result))
    if trace_path is not None:  # after the results, which are not lost with it
        write_text(run_trace(plans[-1], options, result), trace_path)


def _require_torch() -> None:
    import importlib.util

    if importlib.util.find_spec("torch") is None:
        raise UsageError("run needs torch, which is not installed: pip install 'pipeplan[torch]'")


def _runnable_plan(path: str) -> Plan:
    """The plan of a file, verified.

    Raises:
        FileError: the file cannot be read.
        InvalidPlanError: ``check`` refuses the plan.
    """
    from pipeplan.check import check
    from pipeplan.model import read_plan

    plan = read_plan(path)
    check(plan).require(path)
    return plan


def _run_here(
    work: str, read: Callable[[], Plan], options: RunOptions, on_step: Callable[[StepResult], None]
) -> RunResult:
    """Start the ranks, with this machine's cores divided among them unless the environment says otherwise."""
    from dataclasses import replace

    from pipeplan.runtime.launch import run_local

    plan = read()
    if "OMP_NUM_THREADS" not in os.environ:
        options = replace(options, num_threads=max(1, (os.cpu_count() or 1) // len(plan.devices)))
    signal.signal(signal.SIGTERM, _as_interrupt)
    try:
        return run_local(work, plan, options, on_step)
    except (KeyboardInterrupt, ExecutionError):
        _say_where_to_resume(options)
        raise


def _say_where_to_resume(options: RunOptions) -> None:
    """What a run that did not end well leaves to go on from, on standard error."""
    from pipeplan.runtime.checkpoint_files import CheckpointFolder
    from pipeplan.runtime.train_options import TrainOptions

    if not isinstance(options, TrainOptions) or options.checkpoint is None:
        return
    whole = CheckpointFolder(options.checkpoint).whole()
    last = f"step {whole[-1]}: give --resume to go on from there" if whole else "none yet"
    click.echo(f"last whole checkpoint in {options.checkpoint}: {last}", err=True)


def _run_as_rank(
    work: str, read: Callable[[], Plan], options: RunOptions, on_step: Callable[[StepResult], None]
) -> RunResult | None:
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        num_ranks = len(read().devices)
        raise UsageError(
            f"no ranks here: start {num_ranks} with torchrun --nproc-per-node {num_ranks} -m pipeplan run ..., or give "
            "--local to start them on this machine"
        )
    from pipeplan.runtime.worker import run_under_torchrun

    return run_under_torchrun(work, read, options, on_step)


def _as_interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """SIGTERM ends a run as Ctrl-C does: with its processes."""
    raise KeyboardInterrupt
