"""What ``pipeplan run`` tells: steps as they end, the whole run at the end, and its timeline."""

from __future__ import annotations

import json
import math
import statistics
from typing import TYPE_CHECKING

import click

from pipeplan.units import format_ns

if TYPE_CHECKING:
    from pipeplan.model import Plan
    from pipeplan.model.trace import TraceEvent
    from pipeplan.runtime.options import RunOptions, RunResult, StepResult
    from pipeplan.runtime.train_options import TrainOptions

__all__ = ["Steps", "comparison_line", "run_trace", "summary_json"]


class Steps:
    """Prints steps as they end unless ``quiet``, and warns on stderr of the first with numbers that are not finite."""

    def __init__(self, options: RunOptions, *, quiet: bool) -> None:
        from pipeplan.runtime.train_options import TrainOptions

        self._training = options if isinstance(options, TrainOptions) else None
        self._quiet, self._warned = quiet, False

    def show(self, result: StepResult) -> None:
        """Called as a step ends."""
        training = self._training
        if not self._quiet:
            loss = f"  loss {result.loss:.4f}" if training is not None else ""
            norm = "" if result.grad_norm is None else f"  gradients {result.grad_norm:.4g}"
            click.echo(f"step {result.step}{loss}{norm}  iteration {format_ns(result.iteration_ns)}")
        if training is not None and not result.finite and not self._warned:
            self._warned = True
            self._warn(result, training.checkpoint)

    def _warn(self, result: StepResult, checkpoint: str | None) -> None:
        what = (
            f"loss is {result.loss}" if not math.isfinite(result.loss) else f"norm of gradients is {result.grad_norm}"
        )
        kept = "" if checkpoint is None else "; no checkpoint is written after such a step"
        click.echo(f"pipeplan: warning: step {result.step}: the {what}{kept}", err=True)


def comparison_line(plan: Plan, result: RunResult) -> str:
    """Predicted and measured time of an iteration; of several steps the first, which warms up, is left out."""
    times = [step.iteration_ns for step in result.steps]
    median, predicted = round(statistics.median(times[1:] or times)), _predicted_ns(plan)
    left = "; the first step, which warms up, is left out" if len(times) > 1 else ""
    ratio = f" ({median / predicted - 1:+.1%})" if predicted else ""
    return f"predicted {format_ns(predicted)}, median {format_ns(median)}{ratio}{left}"


def summary_json(plan: Plan, options: RunOptions, result: RunResult) -> str:
    """The object of ``--json``, in which what is not finite is null."""
    from pipeplan.runtime.train_options import TrainOptions

    if isinstance(options, TrainOptions):
        return json.dumps(_trained(plan, options, result), allow_nan=False)
    return json.dumps(_emulated(plan, options, result), allow_nan=False)


def _emulated(plan: Plan, options: RunOptions, result: RunResult) -> dict[str, object]:
    """The object of ``--emulate --json``."""
    return {
        "plan": plan.name,
        "num_ranks": len(plan.devices),
        "blocking": options.blocking,
        **_times(plan, result),
        "steps": [{"step": step.step, "iteration_ns": step.iteration_ns} for step in result.steps],
        "versions": dict(result.versions),
    }


def _times(plan: Plan, result: RunResult) -> dict[str, object]:
    """``iteration_ns`` is the median over the steps."""
    return {
        "iteration_ns": round(statistics.median(step.iteration_ns for step in result.steps)),
        "predicted_iteration_ns": _predicted_ns(plan),
    }


def _predicted_ns(plan: Plan) -> int:
    """Of the iteration, sums of gradients included; older plans say when the last action ends, and no more."""
    return plan.predicted.iteration_ns or plan.predicted.makespan_ns


def _trained(plan: Plan, options: TrainOptions, result: RunResult) -> dict[str, object]:
    """The object of ``--json`` of training."""
    return {
        "plan": plan.name,
        "model": options.model,
        "num_ranks": len(plan.devices),
        "device": options.device,
        "dtype": options.dtype,
        "backend": options.transport,
        "num_microbatches": plan.num_microbatches,
        **_times(plan, result),
        "steps": [{name: _finite(value) for name, value in step.as_json().items()} for step in result.steps],
        "peak_memory_bytes": list(result.peak_memory_bytes),
        "predicted_peak_memory_bytes": [memory.peak_bytes for memory in plan.predicted.memory],
        "versions": dict(result.versions),
    }


def _finite(value: float | None) -> float | None:
    """JSON has no other numbers."""
    return value if value is not None and math.isfinite(value) else None


def run_trace(plan: Plan, options: RunOptions, result: RunResult) -> str:
    """The text of ``--trace``: predicted and measured, step after step; in each both begin at the same moment.

    A measured SEND lasts as long as posting it took, a RECV as long as its consumer waited for it.
    """
    from pipeplan.model import sha256_of
    from pipeplan.model.trace import Trace, trace_json
    from pipeplan.report.trace import predicted_trace
    from pipeplan.runtime.train_options import TrainOptions
    from pipeplan.simulate.simulation import simulate

    predicted = predicted_trace(simulate(plan)).events()
    measured = Trace("measured")
    events: list[TraceEvent] = [event for event in predicted if event["ph"] != "X"]
    begin_ns = 0
    for step, ranks in enumerate(result.timeline):
        for rank, actions in enumerate(ranks):
            for counter, start, end in actions:
                measured.add(plan.programs[rank][counter], rank, begin_ns + start, end - start, {"step": step})
        events += [_later(event, begin_ns, step) for event in predicted if event["ph"] == "X"]
        last = max((end for actions in ranks for *_, end in actions), default=0)
        begin_ns += max(last, plan.predicted.makespan_ns) * 21 // 20
    about = {
        "plan": plan.name,
        "plan_sha256": sha256_of(plan),
        "model": options.model if isinstance(options, TrainOptions) else None,
        "emulated": not isinstance(options, TrainOptions),
        "blocking": options.blocking,
        "steps": len(result.steps),
        "makespan_ns": plan.predicted.makespan_ns,
    }
    return trace_json([*events, *measured.events()], about)


def _later(event: TraceEvent, by_ns: int, step: int) -> TraceEvent:
    at, args = event["ts"], event["args"]
    assert isinstance(at, float)
    assert isinstance(args, dict)
    return {**event, "ts": (round(at * 1000) + by_ns) / 1000, "args": {**args, "step": step}}
