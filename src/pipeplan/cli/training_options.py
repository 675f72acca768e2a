"""The flags of ``pipeplan run`` that say how a model is trained; each has the name of a field of ``TrainOptions``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import click

from pipeplan.cli.types import FiniteRange

__all__ = ["training_options"]

_Command = TypeVar("_Command", bound=Callable[..., object])

_OPTIONS = (
    click.option(
        "--data",
        metavar="FILE|builtin|pkg.mod:factory",
        help="A text, tokens as .npy or .bin, sums in words, or your dataset.  [default: what the model makes up]",
    ),
    click.option(
        "--optimizer",
        default="adamw",
        show_default=True,
        metavar="adamw|adam|sgd|pkg.mod:factory",
        help="One of torch's, or a function of the parameters that returns one.",
    ),
    click.option("--lr", "learning_rate", type=FiniteRange(0), help="[default: the optimizer's, 0.001]"),
    click.option("--weight-decay", type=FiniteRange(0), help="[default: the optimizer's, 0.01 of adamw]"),
    click.option(
        "--lr-schedule",
        default="constant",
        show_default=True,
        metavar="constant|cosine|linear|pkg.mod:factory",
        help="How the learning rate goes on, or a function of the optimizer that returns a torch LRScheduler.",
    ),
    click.option(
        "--warmup-steps", type=click.IntRange(min=0), default=0, show_default=True, help="The learning rate grows."
    ),
    click.option("--lr-steps", type=click.IntRange(min=1), help="Steps of the schedule.  [default: --steps]"),
    click.option(
        "--clip-norm",
        type=FiniteRange(0, min_open=True, infinite=True),
        metavar="X",
        help="Largest norm of all gradients together; inf to have it reported alone.",
    ),
    click.option(
        "--autocast", type=click.Choice(["bfloat16"]), help="Compute in it, with parameters and optimizer in float32."
    ),
    click.option("--checkpoint", metavar="DIR", help="Write checkpoints, which any plan of the model goes on from."),
    click.option(
        "--checkpoint-every", type=click.IntRange(min=1), metavar="K", help="Every K steps.  [default: at the end]"
    ),
    click.option("--keep-checkpoints", type=click.IntRange(min=1), default=2, show_default=True),
    click.option("--resume", is_flag=True, help="Go on from the last checkpoint; --steps counts those before it, too."),
)


def training_options(command: _Command) -> _Command:
    """Give a command the flags of training."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
