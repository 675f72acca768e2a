"""What happens to parameters after a step: gradients clipped, the optimizer's step, the next learning rate.

Every rank has an optimizer of its own over its own parameters. Copies of a parameter start equal and get equal
gradients, so optimizers that treat each parameter by itself, as torch's do, keep them equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from pipeplan.errors import UsageError
from pipeplan.runtime.models.load import made_by
from pipeplan.runtime.training.options import LR_SCHEDULES, OPTIMIZERS, TrainOptions


class Updater:
    """A rank's optimizer and learning-rate schedule; without parameters both are None. Raises UsageError."""

    def __init__(self, parameters: Sequence[nn.Parameter], options: TrainOptions) -> None:
        self.optimizer = _optimizer(parameters, options) if parameters else None
        self.schedule = _schedule(self.optimizer, options) if self.optimizer is not None else None

    def step(self) -> None:
        """One update with the gradients that are there, at this step's learning rate."""
        if self.optimizer is not None and self.schedule is not None:
            self.optimizer.step()
            self.schedule.step()


def clip_gradients(
    parameters: Sequence[nn.Parameter],
    counted: Sequence[nn.Parameter],
    most: float,
    over_ranks: Callable[[float], float],
) -> float:
    """Scale gradients such that their norm over the whole model is at most ``most``; as torch's ``clip_grad_norm_``.

    ``counted`` are those of this rank's parameters that no other rank counts; ``over_ranks`` adds up a number of every
    rank. Returns the norm before, the same on all ranks.
    """
    own = get_total_norm([parameter.grad for parameter in counted if parameter.grad is not None])
    norm = math.sqrt(over_ranks(float(own) ** 2))
    if parameters:
        clip_grads_with_norm_(parameters, most, torch.tensor(norm, dtype=torch.float64, device=parameters[0].device))
    return norm


def factor_at(shape: str, num_warmup: int, num_steps: int, step: int) -> float:
    """What the learning rate is multiplied by in a step.

    It grows evenly over the first ``num_warmup`` steps, up to 1 in the last of them; then it stays (constant), falls
    evenly (linear) or as half a cosine, and would reach 0 in step ``num_steps``, which is the first not to be run.
    """
    if step < num_warmup:
        return (step + 1) / num_warmup
    done = min(1.0, (step - num_warmup) / max(1, num_steps - num_warmup))
    return {"constant": 1.0, "linear": 1.0 - done, "cosine": (1.0 + math.cos(math.pi * done)) / 2}[shape]


def _optimizer(parameters: Sequence[nn.Parameter], options: TrainOptions) -> Optimizer:
    """Built-in names are torch's classes; what the command line does not set is as their defaults have it."""
    asked = {"lr": options.learning_rate, "weight_decay": options.weight_decay}
    given = {name: value for name, value in asked.items() if value is not None}
    path = OPTIMIZERS.get(options.optimizer, options.optimizer)
    made = made_by(path, "--optimizer", parameters, **given)
    if not isinstance(made, Optimizer):
        raise UsageError(f"--optimizer {path!r} returned {type(made).__name__}, not a torch.optim.Optimizer")
    return made


def _schedule(optimizer: Optimizer, options: TrainOptions) -> LRScheduler:
    shape = options.lr_schedule
    if shape in LR_SCHEDULES:
        return LambdaLR(optimizer, partial(factor_at, shape, options.warmup_steps, options.schedule_steps))
    if options.warmup_steps:
        raise UsageError(
            f"--warmup-steps {options.warmup_steps}: --lr-schedule {shape} has a warmup of its own or none"
        )
    made: Any = made_by(shape, "--lr-schedule", optimizer)
    if not isinstance(made, LRScheduler):
        raise UsageError(f"--lr-schedule {shape!r} returned {type(made).__name__}, not a torch.optim LRScheduler")
    return made
