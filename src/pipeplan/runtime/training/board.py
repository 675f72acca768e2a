"""A log of training for TensorBoard, written by torch's own ``SummaryWriter``."""

from __future__ import annotations

from pipeplan.costs.throughput import Throughput
from pipeplan.runtime.launch.job import Evaluated, StepResult

_MS = 1e6


class BoardLog:
    """Scalars by step, in a folder; a run that goes on from step ``first`` replaces what was logged from there on."""

    def __init__(self, folder: str, first: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # the package of the extra

        self._writer = SummaryWriter(folder, purge_step=first)

    def step(self, result: StepResult, rates: Throughput, learning_rate: float | None) -> None:
        """What is known of a step."""
        known = {
            "train/loss": result.loss,
            "train/gradient_norm": result.grad_norm,
            "train/learning_rate": learning_rate,
            "time/iteration_ms": result.iteration_ns / _MS,
            "time/samples_per_second": rates.samples_per_second,
            "time/tokens_per_second": rates.tokens_per_second,
            "time/share_of_peak": rates.model_flops_utilisation,
        }
        self._write({name: value for name, value in known.items() if value is not None}, result.step)

    def evaluation(self, found: Evaluated) -> None:
        """What an evaluation found."""
        self._write({"evaluation/loss": found.loss}, found.step)

    def close(self) -> None:
        """Have everything written."""
        self._writer.close()

    def _write(self, scalars: dict[str, float], step: int) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()
