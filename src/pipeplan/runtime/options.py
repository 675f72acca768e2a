"""What a run is asked for and what it answers, in a form that travels between processes as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from pipeplan.errors import UsageError

__all__ = ["LR_SCHEDULES", "OPTIMIZERS", "RunOptions", "RunResult", "StepResult"]

OPTIMIZERS = {"adamw": "torch.optim:AdamW", "adam": "torch.optim:Adam", "sgd": "torch.optim:SGD"}
"""Optimizers by name."""

LR_SCHEDULES = ("constant", "cosine", "linear")


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How to run a plan. ``model`` is a name of the zoo, shortened to ``sequence`` if given, a configuration, or
    ``pkg.mod:factory``; ``grain`` is what a block of a captured model is.

    ``backend`` is ``gloo``, ``nccl`` or ``auto``: NCCL for CUDA devices, gloo otherwise. ``timeout_ns`` bounds
    every single wait: for a message, a sum over ranks, and for an action to end. ``trace`` keeps the times of
    all actions of all steps. ``num_threads`` for CPU operators, 0 to leave it as it is. ``blocking`` transfers hold
    up their devices. ``emulate`` needs no model: actions wait for as long as the plan says; messages then have the
    plan's bytes, up to ``message_limit_bytes``.

    ``instructions`` is a module, ``pkg.mod``, that registers what the plan's instructions do.

    ``optimizer`` is one of ``OPTIMIZERS`` or ``pkg.mod:factory``, a function of parameters that returns one;
    ``learning_rate`` and ``weight_decay`` are handed to it where they are given. ``lr_schedule`` is one of
    ``LR_SCHEDULES`` or ``pkg.mod:factory``, a function of an optimizer; ``lr_steps`` is how many steps it spans, all
    if None. ``clip_norm`` is the largest norm of all gradients together, ``autocast`` the format that operators
    compute in, each None to leave it out.

    ``data`` is where samples come from, see :func:`pipeplan.runtime.data.with_data`; None for those a model makes up.

    ``checkpoint`` is the folder of checkpoints, written every ``checkpoint_every`` steps and behind the last one, but
    not where loss or norm of gradients are not finite; ``keep_checkpoints`` of them are left there. ``resume`` goes on
    from the last: ``num_steps`` counts from the training's beginning.
    """

    model: str
    sequence: int | None = None
    grain: Literal["layer", "half", "operator"] | None = None
    num_steps: int = 10
    seed: int = 0
    optimizer: str = "adamw"
    learning_rate: float | None = None
    weight_decay: float | None = None
    lr_schedule: str = "constant"
    warmup_steps: int = 0
    lr_steps: int | None = None
    clip_norm: float | None = None
    autocast: str | None = None
    data: str | None = None
    checkpoint: str | None = None
    checkpoint_every: int | None = None
    keep_checkpoints: int = 2
    resume: bool = False
    dtype: str = "float32"
    device: str = "cpu"
    backend: str = "auto"
    timeout_ns: int = 60_000_000_000
    trace: bool = False
    num_threads: int = 0
    blocking: bool = False
    emulate: bool = False
    instructions: str | None = None
    message_limit_bytes: int = 1 << 20

    @property
    def transport(self) -> str:
        """The torch.distributed backend that carries tensors: ``gloo`` or ``nccl``."""
        if self.backend != "auto":
            return self.backend
        return "nccl" if self.device == "cuda" else "gloo"

    @property
    def schedule_steps(self) -> int:
        """Steps that the learning-rate schedule spans."""
        return self.num_steps if self.lr_steps is None else self.lr_steps

    def saves_behind(self, step: int) -> bool:
        """Whether a checkpoint is written behind a step."""
        if self.checkpoint is None:
            return False
        every = self.checkpoint_every or self.num_steps
        return (step + 1) % every == 0 or step + 1 == self.num_steps

    @property
    def identity(self) -> dict[str, object]:
        """What a training is, by the flags that say so, as far as these options do: all that its losses depend on."""
        spans = self.schedule_steps if self.lr_schedule in ("cosine", "linear") else None
        return {
            "--sequence": self.sequence,
            "--grain": self.grain or "half",
            "--dtype": self.dtype,
            "--seed": self.seed,
            "--optimizer": self.optimizer,
            "--lr": self.learning_rate,
            "--weight-decay": self.weight_decay,
            "--lr-schedule": self.lr_schedule,
            "--warmup-steps": self.warmup_steps,
            "--lr-steps": spans,
            "--clip-norm": self.clip_norm,
            "--autocast": self.autocast,
        }

    def require_consistent(self) -> None:
        """Refuse options that mean nothing without another, and names that are none. Raises UsageError."""
        _require_known("--optimizer", self.optimizer, OPTIMIZERS)
        _require_known("--lr-schedule", self.lr_schedule, LR_SCHEDULES)
        for flag, given in (("--resume", self.resume), ("--checkpoint-every", self.checkpoint_every)):
            if given and self.checkpoint is None:
                raise UsageError(f"{flag} needs --checkpoint DIR, the folder of checkpoints")

    def as_json(self) -> dict[str, Any]:
        """Plain values; ``RunOptions(**...)`` reads them back."""
        return asdict(self)


def _require_known(flag: str, name: str, known: Iterable[str]) -> None:
    """Refuse what neither has a name nor is to be imported, before processes start for it."""
    if ":" not in name and name not in known:
        raise UsageError(f"{flag} {name!r}: choose {', '.join(known)} or pkg.mod:factory")


@dataclass(frozen=True, slots=True)
class StepResult:
    """One mini-batch: mean loss per prediction before the update, and what a plan predicts as ``iteration_ns``.

    That is the time from the first action until the last rank has ended its actions and summed its gradients.
    ``update_ns`` is the longest time a rank took from there until its parameters were stepped.
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

    def as_json(self) -> dict[str, Any]:
        """Plain values; ``StepResult(**...)`` reads them back."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class RunResult:
    """A whole run.

    ``peak_memory_bytes`` [rank] is what the allocator held at most (CUDA), or the most resident memory of the
    process, interpreter and libraries included (CPU). ``timeline`` [step][rank] has the actions of a step as
    (program counter, start, end) in ns from the step's first start, if they were asked for.
    """

    steps: tuple[StepResult, ...]
    peak_memory_bytes: tuple[int, ...]
    versions: Mapping[str, str] = field(default_factory=dict)
    timeline: tuple[tuple[tuple[tuple[int, int, int], ...], ...], ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Plain values; :meth:`from_json` reads them back."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RunResult:
        """The result that :meth:`as_json` wrote."""
        return cls(
            steps=tuple(StepResult(**step) for step in data["steps"]),
            peak_memory_bytes=tuple(data["peak_memory_bytes"]),
            versions=dict(data["versions"]),
            timeline=tuple(
                tuple(tuple((entry[0], entry[1], entry[2]) for entry in rank) for rank in step)
                for step in data["timeline"]
            ),
        )
