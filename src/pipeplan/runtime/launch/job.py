"""A rank's job and its answer, in a form that travels between processes as JSON.

Needs no torch: the parent of local ranks and the command line use it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import timedelta
from typing import Any, ClassVar, TypeVar

from pydantic import TypeAdapter

from pipeplan.files import Plan, parse
from pipeplan.files.folded import device_programs
from pipeplan.runtime.launch.launchers import apart
from pipeplan.runtime.launch.status import Progress, tell


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How ranks run a plan, whatever they do with it.

    ``backend`` is ``gloo``, ``nccl`` or ``auto``: NCCL for CUDA devices, gloo otherwise. ``timeout_ns`` bounds
    every single wait (:func:`longest_wait`): for a message, a sum over ranks, and for an action to end. ``trace`` keeps
    the times of all actions of all steps. ``num_threads`` is for CPU operators, 0 to leave it as it is. ``blocking``
    transfers hold up their devices. Emulated messages have the plan's bytes, up to ``message_limit_bytes``; emulated
    times are ``stretch`` times the plan's, 0 for as long as this machine needs to keep them.
    """

    num_steps: int = 10
    device: str = "cpu"
    backend: str = "auto"
    timeout_ns: int = 60_000_000_000
    trace: bool = False
    num_threads: int = 0
    blocking: bool = False
    message_limit_bytes: int = 1 << 20
    stretch: float = 0.0

    @property
    def transport(self) -> str:
        """The torch.distributed backend that carries tensors: ``gloo`` or ``nccl``."""
        if self.backend != "auto":
            return self.backend
        return "nccl" if self.device == "cuda" else "gloo"

    job: ClassVar[str] = "pipeplan.runtime.emulation.emulate:emulate_job"
    """What a rank does with them, as ``module:function``."""

    def require_consistent(self) -> None:
        """Refuse options that mean nothing without another, and names that are none. Raises UsageError."""

    @property
    def has_objects(self) -> bool:
        """Whether they have what only this process has, and copies of it."""
        return False

    def as_json(self) -> dict[str, Any]:
        """Plain values, but for such objects; ``RunOptions(**...)``, or their own class, reads them back."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


_FINDING_OUT, _MOST_FINDING_OUT_NS = 2, 10 * 10**9


def finding_out_ns(timeout_ns: int) -> int:
    """Of a run's timeout, what is left for ranks of several machines to say who is missing, and to end."""
    return min(timeout_ns // _FINDING_OUT, _MOST_FINDING_OUT_NS)


def longest_wait(timeout_ns: int, machines: Sequence[str]) -> timedelta:
    """Of a run's timeout, as long as a rank waits for others: all but what it takes to find out who is missing."""
    apart = len(set(machines)) > 1
    return timedelta(microseconds=(timeout_ns - apart * finding_out_ns(timeout_ns)) / 1000)


@dataclass(frozen=True, slots=True)
class Started:
    """What is known before the first step: its number, and what a :class:`RunResult` has by these names.

    ``remarks`` are what the user is to be warned of.
    """

    first: int
    versions: Mapping[str, str] = field(default_factory=dict)
    tokens_per_sample: int | None = None
    as_planned: bool = True
    remarks: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """One mini-batch: mean loss per prediction before the update, and what a plan predicts as ``iteration_ns``.

    That is the time from the first action until the last rank has stepped its parameters; in inference until the last
    action has ended. ``update_ns`` is of it the longest time a rank took from summed gradients on.
    ``grad_norm`` is the norm of all gradients before they were clipped, None where they are not. Where no model was
    trained the loss is not a number.
    """

    step: int
    loss: float
    iteration_ns: int
    update_ns: int
    grad_norm: float | None = None

    @property
    def finite(self) -> bool:
        """Whether loss and norm of gradients are; if not, parameters are lost, or will be with the next update."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm or 0.0)


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Mean loss per prediction of mini-batches that are not trained on, with the parameters after ``step``.

    ``evaluation_ns`` is how long rank 0 took for all ``num_batches`` of them.
    """

    step: int
    loss: float
    num_batches: int
    evaluation_ns: int


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """Which experts of a block the words of a run's training chose.

    A word counts once for each of its experts: ``tokens_per_expert`` [expert] those that chose it, of which ``dropped``
    in all were beyond a capacity, ``tokens_per_rank`` [place in ``ranks``] those that came to a rank. The fullest of
    devices that share experts had ``load_factor`` times an even share of all that were chosen in each micro-batch:
    less than 1 where many were dropped; 1 where each has all.
    """

    block: str
    tokens_per_expert: tuple[int, ...]
    ranks: tuple[int, ...]
    tokens_per_rank: tuple[int, ...]
    dropped: int
    load_factor: float

    @property
    def most_chosen(self) -> float:
        """Words of the expert that most chose, as a multiple of the average; 1 if there were none."""
        return max(self.tokens_per_expert) * len(self.tokens_per_expert) / (sum(self.tokens_per_expert) or math.inf)


@dataclass(frozen=True, slots=True)
class WrittenText:
    """What was generated for a prompt: its tokens, and when each was chosen, in ns since the run began."""

    ids: tuple[int, ...]
    times_ns: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RunResult:
    """A whole run.

    ``peak_memory_bytes`` [rank] is what the allocator held at most (CUDA), or the most resident memory of the
    process, interpreter and libraries included (CPU). ``timeline`` [step][rank] has the actions of a step as
    (program counter, start, end) in ns from the step's first start, if they were asked for. An emulated run's steps
    took ``stretch`` times what the plan says; its timeline is in the plan's time again. ``unwritten`` says why
    weights are not where they should be, if they are not. ``tokens_per_sample`` is the
    trained model's, if that is known, and ``as_planned`` whether its sizes are the plan's. Of a decoding plan there are
    ``requests`` in the prompts' order, and by rank ``sent_bytes``, by ``BLOCK PURPOSE``, ``wire_bytes``, what its
    connections have sent meanwhile (None where that is not known), and ``cache_bytes``, the room for keys and values.
    ``experts`` are of the blocks whose words choose among some, as far as they are counted. ``stopped_by`` is the
    number of the signal that asked some rank to end, 0 without one.
    """

    steps: tuple[StepResult, ...]
    peak_memory_bytes: tuple[int, ...]
    versions: Mapping[str, str] = field(default_factory=dict)
    timeline: tuple[tuple[tuple[tuple[int, int, int], ...], ...], ...] = ()
    stretch: float = 1.0
    unwritten: str = ""
    tokens_per_sample: int | None = None
    as_planned: bool = True
    evaluations: tuple[Evaluated, ...] = ()
    requests: tuple[WrittenText, ...] = ()
    sent_bytes: tuple[Mapping[str, int], ...] = ()
    wire_bytes: tuple[int | None, ...] = ()
    cache_bytes: tuple[int, ...] = ()
    experts: tuple[ExpertLoad, ...] = ()
    stopped_by: int = 0

    def as_json(self) -> dict[str, Any]:
        """Plain values; :meth:`from_json` reads them back."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RunResult:
        """The result that :meth:`as_json` wrote."""
        return TypeAdapter(cls).validate_python(data)


Event = Started | StepResult | Evaluated
"""What is said of a run while it goes on."""

OnEvent = Callable[[Event], None]
OnLook = Callable[[str], None]
Report = Mapping[str, Any]
Options = TypeVar("Options", bound=RunOptions)


class Reports:
    """A rank's reports on its way to the process that started it, one JSON object a line.

    That process may be stopped, or wait for who reads its output: what its pipe has no room for waits here until the
    next report, so that a rank never waits before it has nothing else to do.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._unsent = bytearray()
        os.set_blocking(descriptor, False)

    def __call__(self, report: Report) -> None:
        """Send a report, or keep it."""
        self._unsent += json.dumps(report).encode() + b"\n"
        with contextlib.suppress(BlockingIOError):
            self._send()

    def close(self) -> None:
        """Wait until everything is sent."""
        os.set_blocking(self._descriptor, True)
        self._send()
        os.close(self._descriptor)

    def _send(self) -> None:
        while self._unsent:
            del self._unsent[: os.write(self._descriptor, self._unsent)]


@dataclass(frozen=True, slots=True)
class RankContext:
    """What a rank has while it does its job: its number, its record, and a way to report to who listens.

    ``alone``: who listens hears this rank and no other.
    """

    rank: int
    progress: Progress
    report: Callable[[Report], None]
    alone: bool = False


def job_of(plan: Plan, options: RunOptions) -> Report:
    """What the ranks of :func:`run_job` get; JSON, but for what :attr:`RunOptions.has_objects`."""
    return {"plan": plan.model_dump_json(), "options": options.as_json()}


def run_job(
    run: Callable[[Plan, Options, Progress, OnEvent], RunResult], options: Options, job: Report, context: RankContext
) -> None:
    """Run the plan of a job, and let rank 0 report what happens and the result, as ``Listener`` reads them.

    Raises UsageError, before anything is run, where a trace would be longer than any that can be written.
    """
    plan = parse(job["plan"], Plan)
    if options.trace:
        plan.require_few_actions(
            "--trace writes down every action of a step", "leave out --trace, or run a plan of fewer --microbatches"
        )
    board = context.progress.board
    board.programs = device_programs(plan)
    if context.rank == 0 and (said := apart(board.machines, plan.provenance.node_size)):
        tell(said)

    def on_event(event: Event) -> None:
        if heard:
            context.report({"event": EVENTS[type(event)], EVENTS[type(event)]: asdict(event)})

    heard = context.rank == 0 or context.alone
    result = run(plan, options, context.progress, on_event)
    if heard:
        context.report({"event": "result", "result": result.as_json()})


EVENTS: Mapping[type[Event], str] = {Started: "start", StepResult: "step", Evaluated: "evaluation"}
"""What events are called in reports."""
