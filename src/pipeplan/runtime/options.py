"""What a run is asked for and what it answers, in a form that travels between processes as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["RunOptions", "RunResult", "StepResult"]


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How to run a plan. ``model`` is a name of the zoo, shortened to ``sequence`` if given, or ``pkg.mod:factory``.

    ``backend`` is ``gloo``, ``nccl`` or ``auto``: NCCL for CUDA devices, gloo otherwise. ``timeout_ns`` bounds
    every single wait: for a message, a sum over ranks, and for an action to end. ``trace`` keeps the times of
    all actions of all steps. ``num_threads`` for CPU operators, 0 to leave it as it is.
    """

    model: str
    sequence: int | None = None
    num_steps: int = 10
    seed: int = 0
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    dtype: str = "float32"
    device: str = "cpu"
    backend: str = "auto"
    timeout_ns: int = 60_000_000_000
    trace: bool = False
    num_threads: int = 0

    @property
    def transport(self) -> str:
        """The torch.distributed backend that carries tensors: ``gloo`` or ``nccl``."""
        if self.backend != "auto":
            return self.backend
        return "nccl" if self.device == "cuda" else "gloo"

    def as_json(self) -> dict[str, Any]:
        """Plain values; ``RunOptions(**...)`` reads them back."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class StepResult:
    """One mini-batch: mean loss per prediction before the update, and the time from the first action to the last.

    ``update_ns`` is the longest time a rank took from its last action until its parameters were stepped.
    """

    step: int
    loss: float
    iteration_ns: int
    update_ns: int

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
