"""A program with a loop of its own: model, loss, loader, optimizer and callbacks that it has made itself.

Under a launcher, or alone, when it is copied; it writes what it has seen.

    python -m runtime_support.own_loop PLAN FILE
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler
from torch.utils.data import DataLoader, TensorDataset

import pipeplan
from pipeplan.files import Plan

WIDTH, CLASSES, MINI_BATCH, EPOCH, HELD_OUT = 6, 3, 8, 3, 2
"""Of the samples, and how many mini-batches there are to train and to evaluate on."""

STEPS, CLIP, RATE, DECAY = 7, 0.05, 0.1, 0.9


def weighted(output: Tensor, targets: Tensor) -> Tensor:
    """A loss of one's own: the sum over predictions."""
    return (2.0 * nn.functional.cross_entropy(output, targets, reduction="none")).sum()


def chain() -> nn.Sequential:
    """Dropout drops nothing in training, as its rate is 0; BatchNorm would not be the same in micro-batches."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        layers = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Dropout(0.0), nn.Linear(16, 16), nn.Tanh())
        return layers.append(nn.Linear(16, CLASSES)).double()


def samples(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count * MINI_BATCH, WIDTH, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, inputs[:, :CLASSES].argmax(1))


def trained_on() -> DataLoader[Any]:
    return DataLoader(samples(EPOCH, 1), batch_size=MINI_BATCH, shuffle=True)


def evaluated_on() -> DataLoader[Any]:
    return DataLoader(samples(HELD_OUT, 2), batch_size=MINI_BATCH)


def model() -> tuple[nn.Sequential, Tensor, Tensor, Any]:
    inputs, targets = samples(1, 3).tensors
    return chain(), inputs[:2], targets[:2], weighted


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=RATE, betas=(0.8, 0.9))


def decaying(made: torch.optim.Optimizer) -> LRScheduler:
    return ExponentialLR(made, DECAY)


def run(plan: Plan | str, **options: Any) -> dict[str, Any]:
    """What such a program sees of a run."""
    losses, evaluated = list[float](), list[tuple[int, float]]()
    given = {"steps": STEPS, "optimizer": optimizer, "lr_schedule": lambda made: decaying(made), "dtype": "float64"}
    outcome = pipeplan.run(
        plan,
        model(),
        trained_on(),
        eval_data=evaluated_on(),
        eval_every=3,
        clip_norm=CLIP,
        on_step=lambda step: losses.append(step.loss),
        on_evaluation=lambda found: evaluated.append((found.step, found.loss)),
        **{**given, **options},
    )
    return {
        "heard": [losses, evaluated],
        "losses": [step.loss for step in outcome.result.steps],
        "norms": [step.grad_norm for step in outcome.result.steps],
        "evaluations": [found.loss for found in outcome.result.evaluations],
    }


def main(plan: str, file: str) -> None:
    """Two runs, one after another, on every rank."""
    found = [run(plan, steps=steps) for steps in (STEPS, 2)]
    Path(f"{file}.{os.environ['RANK']}").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
