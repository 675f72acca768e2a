"""Made-up samples. Sample i of a step is the same however many samples are asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Generator, Tensor

_STRIDES = 8


def stacked(
    make: Callable[[Generator], Mapping[str, Tensor]], num_samples: int, step: int, seed: int
) -> dict[str, Tensor]:
    """The named tensors of a mini-batch, from ``make``, which makes those of one sample with its own generator."""
    made = [make(_of_sample(seed, step, sample)) for sample in range(num_samples)]
    return {name: torch.stack([sample[name] for sample in made]) for name in made[0]}


def _of_sample(seed: int, step: int, sample: int) -> Generator:
    """Random numbers of one sample alone."""
    return Generator().manual_seed(((seed * 1_000_003 + step) * 1_000_003 + sample) % 2**63)


def token_batch(vocabulary: int, sequence: int, num_samples: int, step: int, seed: int) -> dict[str, Tensor]:
    """Made-up text a model can learn: each sample counts up from a random token by a random small stride.

    ``tokens`` and ``targets`` [num_samples, sequence]; targets are the tokens one place on.
    """

    def text(generator: Generator) -> dict[str, Tensor]:
        start = torch.randint(vocabulary, (1,), generator=generator)
        stride = torch.randint(1, _STRIDES, (1,), generator=generator)
        return next_tokens((start + stride * torch.arange(sequence + 1)) % vocabulary)

    return stacked(text, num_samples, step, seed)


def next_tokens(windows: Tensor) -> dict[str, Tensor]:
    """Windows [..., sequence + 1] of a text as ``tokens`` and ``targets`` [..., sequence], the tokens one place on."""
    return {"tokens": windows[..., :-1], "targets": windows[..., 1:]}


def batch_like(examples: Mapping[str, Tensor], num_samples: int, step: int, seed: int) -> dict[str, Tensor]:
    """Numbers like those of the examples [samples, ...]: integers of the same range, normal numbers otherwise."""

    def sample(generator: Generator) -> dict[str, Tensor]:
        return {name: _random_like(example, generator) for name, example in examples.items()}

    return stacked(sample, num_samples, step, seed)


def _random_like(example: Tensor, generator: Generator) -> Tensor:
    shape = example.shape[1:]
    if example.is_floating_point():
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(example.dtype)
    if example.is_meta or example.numel() == 0:
        return torch.zeros(shape, dtype=example.dtype)
    low, high = int(example.min()), int(example.max())
    return torch.randint(low, high + 1, shape, generator=generator).to(example.dtype)
