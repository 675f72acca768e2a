"""What ``pipeplan run`` prints while it goes on: a line for each step and evaluation, and what to be warned of."""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pipeplan import _api
from pipeplan.cli.output import say, say_for_now
from pipeplan.units import format_ns

if TYPE_CHECKING:
    from pipeplan._api import Evaluated, Event, Plan, RunOptions, Started, StepResult, TrainOptions


class Steps:
    """Prints steps as they end unless ``quiet``, and warns on stderr of the first with numbers that are not finite.

    Of ``plan``, once it is known, steps say their throughput, and how long the others will take as these have. Where
    stderr is a terminal, a line there says how long a step has taken so far; ``clock`` returns seconds.
    """

    def __init__(self, options: RunOptions, *, quiet: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._training = options if isinstance(options, _api.TrainOptions) else None
        self._quiet, self._warned = quiet, False
        self._clock, self._stretch = clock, options.stretch or 1.0
        self._since, self._said = clock(), 0
        self._predicted = ""
        self.plan: Plan | None = None
        self._known: Started | None = None
        self._began: list[float] = []

    @contextmanager
    def waiting(self, plan: Plan) -> Iterator[None]:
        """Let :meth:`look` say how long steps take, and what the plan predicts; at the end nothing of it is left."""
        self._predicted = f", predicted {format_ns(round(plan.predicted.whole_ns * self._stretch))}"
        try:
            yield
        finally:
            self._erase()

    def look(self, where: str) -> None:
        """Called again and again while a step runs; ``where`` rank 0 is."""
        seconds = int(self._clock() - self._since)
        if seconds > self._said and sys.stderr.isatty():
            self._said = seconds
            columns = shutil.get_terminal_size().columns
            say_for_now(f"{seconds}s so far{self._predicted}; rank 0 {where}", columns)

    def _erase(self) -> None:
        if self._said:
            say_for_now("", shutil.get_terminal_size().columns)
        self._since, self._said = self._clock(), 0

    def show(self, event: Event) -> None:
        """Called as a run starts, and as steps and evaluations end."""
        self._erase()
        if isinstance(event, _api.Started):
            self._known, self._began = event, [self._clock()]
            for remark in event.remarks:
                say(f"pipeplan: warning: {remark}", err=True)
        elif isinstance(event, _api.Evaluated):
            self._evaluated(event)
        else:
            self._stepped(event)

    def _evaluated(self, found: Evaluated) -> None:
        if not self._quiet:
            of = f"{found.num_batches} mini-batch{'es' * (found.num_batches != 1)}"
            say(f"step {found.step}  evaluation loss {found.loss:.4f}  of {of}, {format_ns(found.evaluation_ns)}")

    def _stepped(self, result: StepResult) -> None:
        training = self._training
        if not self._quiet:
            loss = f"  loss {result.loss:.4f}" if training is not None else ""
            norm = "" if result.grad_norm is None else f"  gradients {result.grad_norm:.4g}"
            more = "" if training is None else "".join(f"  {each}" for each in self._rates(result, training))
            say(f"step {result.step}{loss}{norm}  iteration {format_ns(result.iteration_ns)}{more}")
        if training is not None and not result.finite and not self._warned:
            self._warned = True
            self._warn(result, training.checkpoint)

    def _rates(self, result: StepResult, training: TrainOptions) -> Iterator[str]:
        """The throughput of a step, and how long the steps after it will take."""
        if self._known is None or self.plan is None:
            return
        rates = _api.throughput_of(self.plan, training, self._known, result.iteration_ns)
        yield from filter(None, rates.words.split(", "))
        self._began.append(self._clock())
        first, *_ = steady = self._began[1:] if len(self._began) > 2 else self._began  # the first step warms up
        left = (training.num_steps - result.step - 1) * (steady[-1] - first) / (len(steady) - 1)
        if left > 0:
            yield f"{_time_left(left)} left"

    def _warn(self, result: StepResult, checkpoint: str | None) -> None:
        what = (
            f"loss is {result.loss}" if not math.isfinite(result.loss) else f"norm of gradients is {result.grad_norm}"
        )
        kept = "" if checkpoint is None else "; no checkpoint is written after this step"
        say(f"pipeplan: warning: step {result.step}: the {what}{kept}", err=True)


_HOUR, _MINUTE = 3600, 60


def _time_left(seconds: float) -> str:
    """In the largest unit of which there are two or more, rounded up."""
    for size, unit in ((_HOUR, "h"), (_MINUTE, "min")):
        if seconds >= 2 * size:
            return f"{math.ceil(seconds / size)}{unit}"
    return f"{math.ceil(seconds)}s"
