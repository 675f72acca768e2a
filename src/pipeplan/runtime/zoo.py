"""The zoo: models in plain PyTorch, cut into blocks.

GPT-2 (Radford et al. 2019): learned positions, pre-LayerNorm, GELU with the tanh approximation, causal attention,
and an output layer that shares the token embedding. Half a transformer layer is a block. No dropout. Split over
devices as in Megatron-LM (Shoeybi et al. 2019).

A multi-modal transformer (the form of GraphPipe's MMT, section 3.10.3): a tower of layers for each kind of input, their
outputs concatenated per token, and a linear head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeplan.errors import UsageError
from pipeplan.runtime.model import BlockSpec, Collective, Model

__all__ = ["ZOO", "GPTSize", "TowersSize", "gpt", "token_batch", "towers", "zoo_model"]


_FLOAT32_BYTES = 4
_LOSS_NUMBERS = 3
"""Per token and device, of words split over devices: largest logit, sum of exponentials, the target's logit."""


@dataclass(frozen=True, slots=True)
class GPTSize:
    """Dimensions of a GPT-2 model.

    ``positions`` is the longest sequence it can take, ``sequence`` the one its batches have. With ``tied`` the output
    layer shares the token embedding's weight.
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int = 50257
    positions: int = 1024
    sequence: int = 1024
    tied: bool = True


@dataclass(frozen=True, slots=True)
class TowersSize:
    """Dimensions of a multi-modal transformer: towers of equal layers, whose tokens are patches of numbers.

    ``positions`` and ``sequence`` are as those of a GPT-2 model.
    """

    towers: int
    layers: int
    hidden: int
    heads: int
    patch: int
    positions: int
    sequence: int

    @property
    def tower(self) -> GPTSize:
        """The layers of one tower."""
        return GPTSize(self.layers, self.hidden, self.heads, positions=self.positions, sequence=self.sequence)


ZOO: dict[str, GPTSize | TowersSize] = {
    "gpt2-tiny": GPTSize(layers=4, hidden=32, heads=2, vocabulary=64, positions=16, sequence=16),
    "gpt2-124m": GPTSize(layers=12, hidden=768, heads=12),
    "gpt2-345m": GPTSize(layers=24, hidden=1024, heads=16),
    "mmt-tiny": TowersSize(towers=2, layers=2, hidden=32, heads=2, patch=12, positions=16, sequence=16),
}
"""Models by name."""


class Embedding(nn.Module):
    """Token and position embedding: tokens [samples, sequence] to [samples, sequence, hidden]."""

    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.token = nn.Embedding(size.vocabulary, size.hidden)
        self.position = nn.Embedding(size.positions, size.hidden)
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """[samples, sequence] to [samples, sequence, hidden]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        result: Tensor = self.token(tokens) + self.position(positions)
        return result


class Attention(nn.Module):
    """Self-attention, causal or not, with its LayerNorm and residual: [samples, sequence, hidden] to the same.

    Of one device among several it has a share of the heads; what they project is to be summed over the devices.
    """

    def __init__(self, size: GPTSize, num_devices: int = 1, *, causal: bool = True) -> None:
        super().__init__()
        self.causal = causal
        self.heads, width = size.heads // num_devices, size.hidden // num_devices
        self.norm = nn.LayerNorm(size.hidden)
        self.qkv = _linear(size.hidden, 3 * width)
        self.project = _linear(width, size.hidden, std=0.02 / math.sqrt(2 * size.layers))

    def forward(self, x: Tensor) -> Tensor:
        """[samples, sequence, hidden] to the same."""
        samples, sequence, _ = x.shape
        qkv = self.qkv(self.norm(x)).view(samples, sequence, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        result: Tensor = x + self.project(mixed.transpose(1, 2).reshape(samples, sequence, -1))
        return result


class FeedForward(nn.Module):
    """Two-layer perceptron of width 4 x hidden, or one device's share of that, with its LayerNorm and residual."""

    def __init__(self, size: GPTSize, num_devices: int = 1) -> None:
        super().__init__()
        width = 4 * size.hidden // num_devices
        self.norm = nn.LayerNorm(size.hidden)
        self.expand = _linear(size.hidden, width)
        self.project = _linear(width, size.hidden, std=0.02 / math.sqrt(2 * size.layers))

    def forward(self, x: Tensor) -> Tensor:
        """[samples, sequence, hidden] to the same."""
        result: Tensor = x + self.project(F.gelu(self.expand(self.norm(x)), approximate="tanh"))
        return result


class Head(nn.Module):
    """Final LayerNorm, output layer (shares the token embedding) and the sum of the tokens' cross-entropies."""

    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size.hidden)
        self.output = nn.Linear(size.hidden, size.vocabulary, bias=False)
        nn.init.normal_(self.output.weight, std=0.02)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """[samples, sequence, hidden] and targets [samples, sequence] to a scalar, in float32 at least."""
        logits = self.output(self.norm(x))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # a sum of thousands needs the digits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


class EmbeddingShare(Embedding):
    """The first of several devices' rows of the token embedding, and all positions.

    Words of other devices are zeros here, for the sum over devices to fill in.
    """

    def __init__(self, size: GPTSize, num_devices: int) -> None:
        super().__init__(replace(size, vocabulary=_words(size, num_devices)))

    def forward(self, tokens: Tensor) -> Tensor:
        """[samples, sequence] to [samples, sequence, hidden]."""
        elsewhere = tokens >= self.token.num_embeddings
        found = self.token(tokens.masked_fill(elsewhere, 0)).masked_fill(elsewhere.unsqueeze(-1), 0.0)
        result: Tensor = found + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        return result


class HeadShare(Head):
    """The first of several devices' words of the output layer, and what it knows of the loss.

    Of each token the devices share the sum of exponentials, its shift, and the target's logit.
    """

    def __init__(self, size: GPTSize, num_devices: int) -> None:
        super().__init__(replace(size, vocabulary=_words(size, num_devices)))

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """[samples, sequence, hidden] and targets [samples, sequence] to a scalar, as if all words were here."""
        logits = self.output(self.norm(x))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        elsewhere = targets >= self.output.out_features
        wanted = logits.gather(-1, targets.masked_fill(elsewhere, 0).unsqueeze(-1)).squeeze(-1)
        result: Tensor = (logits.logsumexp(-1) - wanted.masked_fill(elsewhere, 0.0)).sum()
        return result


class Patches(nn.Module):
    """Linear embedding of patches with learned positions: [samples, sequence, patch] to [samples, sequence, hidden]."""

    def __init__(self, size: TowersSize) -> None:
        super().__init__()
        self.embed = _linear(size.patch, size.hidden)
        self.position = nn.Parameter(torch.empty(size.positions, size.hidden))
        nn.init.normal_(self.position, std=0.02)

    def forward(self, patches: Tensor) -> Tensor:
        """[samples, sequence, patch] to [samples, sequence, hidden]."""
        result: Tensor = self.embed(patches) + self.position[: patches.shape[1]]
        return result


class Concatenation(nn.Module):
    """The towers' outputs side by side for every token: [samples, sequence, towers x hidden]."""

    def forward(self, *outputs: Tensor) -> Tensor:
        """[samples, sequence, hidden] each to [samples, sequence, towers x hidden]."""
        return torch.cat(outputs, dim=-1)


class ValueHead(nn.Module):
    """A number for every token by a linear layer, and the sum of their squared errors."""

    def __init__(self, size: TowersSize) -> None:
        super().__init__()
        self.output = _linear(size.towers * size.hidden, 1)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """[samples, sequence, towers x hidden] and targets [samples, sequence] to a scalar."""
        return F.mse_loss(self.output(x).squeeze(-1), targets, reduction="sum")


def gpt(name: str, size: GPTSize) -> Model:
    """A GPT-2 of the given size: embedding, then attention and feed-forward of each layer, then head with loss."""
    return replace(_gpt(name, size, 1), sharded=partial(_share, name, size))


def _share(name: str, size: GPTSize, num_devices: int) -> Model:
    """The first device's share: of heads, of the perceptron's width, and of words, of which the last has fewer."""
    for what, count in (("heads", size.heads), ("hidden", size.hidden)):
        if count % num_devices:
            raise UsageError(
                f"{name} has {count} {what}, which cannot be split over {num_devices} devices; "
                "choose a number that divides them"
            )
    return _gpt(name, size, num_devices)


def _gpt(name: str, size: GPTSize, num_devices: int) -> Model:
    whole, n = num_devices == 1, num_devices
    embedding = partial(Embedding, size) if whole else partial(EmbeddingShare, size, n)
    head = partial(Head, size) if whole else partial(HeadShare, size, n)
    blocks = [_block(size, n, "embedding", "embedding", embedding, samples=("tokens",))]
    for layer in range(size.layers):
        for operator, half in (("attention", Attention), ("ffn", FeedForward)):
            build = partial(half, size, n)
            blocks.append(_block(size, n, f"layer{layer}.{operator}", operator, build, sources=(blocks[-1].id,)))
    last = blocks[-1].id
    blocks.append(_block(size, n, "head", "head", head, sources=(last,), samples=("targets",), loss=True))
    return Model(
        name,
        tuple(blocks),
        lambda num_samples, step, seed: token_batch(size.vocabulary, size.sequence, num_samples, step, seed),
        lambda batch: batch["targets"].numel(),
        tied=((("embedding", "token.weight"), ("head", "output.weight")),) if size.tied else (),
    )


def towers(name: str, size: TowersSize) -> Model:
    """A multi-modal transformer: towers side by side, their outputs concatenated, then head with loss."""
    sizes = {"sequence": size.sequence, "hidden": size.hidden}
    ends = [_tower(size, index, sizes) for index in range(size.towers)]
    joined = BlockSpec(
        "concatenation", "concatenation", Concatenation, tuple(blocks[-1].id for blocks in ends), dimensions=sizes
    )
    head = BlockSpec("head", "head", partial(ValueHead, size), (joined.id,), ("targets",), loss=True, dimensions=sizes)
    return Model(
        name,
        (*(block for blocks in ends for block in blocks), joined, head),
        partial(_patch_batch, size),
        lambda batch: batch["targets"].numel(),
    )


def _tower(size: TowersSize, index: int, sizes: dict[str, int]) -> list[BlockSpec]:
    embedding = partial(Patches, size)
    samples = (f"patches{index}",)
    dimensions = sizes | {"patch": size.patch}
    blocks = [BlockSpec(f"tower{index}.embedding", "patches", embedding, samples=samples, dimensions=dimensions)]
    halves: list[tuple[str, Callable[[], nn.Module], dict[str, int]]] = [
        ("attention", partial(Attention, size.tower, causal=False), {"heads": size.heads}),
        ("ffn", partial(FeedForward, size.tower), {"ffn": 4 * size.hidden}),
    ]
    for layer in range(size.layers):
        for operator, build, split in halves:
            id_ = f"tower{index}.layer{layer}.{operator}"
            blocks.append(BlockSpec(id_, operator, build, (blocks[-1].id,), dimensions=sizes | split))
    return blocks


def _patch_batch(size: TowersSize, num_samples: int, step: int, seed: int) -> dict[str, Tensor]:
    """Random patches for each tower, and for every token the mean of the towers' patches there.

    Sample i of a step is the same however many samples are asked for.
    """
    shape = (size.towers, size.sequence, size.patch)
    patches = torch.stack([torch.randn(shape, generator=_of_sample(seed, step, i)) for i in range(num_samples)])
    named = {f"patches{index}": patches[:, index].contiguous() for index in range(size.towers)}
    return {**named, "targets": patches.mean(dim=(1, 3))}


def zoo_model(name: str, *, sequence: int | None = None) -> Model:
    """A model of the zoo, with shorter sequences if asked; its parameters are the same for all lengths.

    Raises:
        UsageError: the sequence is empty, or longer than the model has positions.
    """
    size = ZOO[name]
    if sequence is not None and not 1 <= sequence <= size.positions:
        raise UsageError(f"--sequence {sequence}: {name} takes sequences of 1 to {size.positions}")
    size = size if sequence is None else replace(size, sequence=sequence)
    return gpt(name, size) if isinstance(size, GPTSize) else towers(name, size)


def _block(
    size: GPTSize,
    num_devices: int,
    id_: str,
    operator: str,
    build: Callable[[], nn.Module],
    *,
    sources: tuple[str, ...] = (),
    samples: tuple[str, ...] = (),
    loss: bool = False,
) -> BlockSpec:
    """A block, or a share of it, with the dimensions that its operator can be split along."""
    split = {"attention": {"heads": size.heads // num_devices}, "ffn": {"ffn": 4 * size.hidden // num_devices}}
    dimensions = {"sequence": size.sequence, "hidden": size.hidden}
    dimensions |= split.get(operator, {"vocabulary": _words(size, num_devices)})
    collectives = _collectives(size, num_devices, operator) if num_devices > 1 else ()
    return BlockSpec(id_, operator, build, sources, samples, loss, dimensions, collectives=collectives)


def _collectives(size: GPTSize, num_devices: int, operator: str) -> tuple[Collective, ...]:
    """As in Megatron-LM: sums of outputs after F and of input gradients after I; of words three numbers per token."""
    hidden = _FLOAT32_BYTES * size.sequence * size.hidden
    gathered = _FLOAT32_BYTES * size.sequence * _LOSS_NUMBERS * num_devices
    first = Collective("all_gather", "F", gathered) if operator == "head" else Collective("all_reduce", "F", hidden)
    return (first,) if operator == "embedding" else (first, Collective("all_reduce", "I", hidden))


def _words(size: GPTSize, num_devices: int) -> int:
    """Words of the first device."""
    return -(-size.vocabulary // num_devices)


def token_batch(vocabulary: int, sequence: int, num_samples: int, step: int, seed: int) -> dict[str, Tensor]:
    """Made-up text a model can learn: each sample counts up from a random token by a random small stride.

    ``tokens`` and ``targets`` [num_samples, sequence]; targets are the tokens one place on. Sample i of a step is
    the same however many samples are asked for.
    """
    rows = []
    for sample in range(num_samples):
        generator = _of_sample(seed, step, sample)
        start = torch.randint(vocabulary, (1,), generator=generator)
        stride = torch.randint(1, 8, (1,), generator=generator)
        rows.append((start + stride * torch.arange(sequence + 1)) % vocabulary)
    text = torch.stack(rows)
    return {"tokens": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}


def _of_sample(seed: int, step: int, sample: int) -> torch.Generator:
    """Random numbers of one sample alone."""
    return torch.Generator().manual_seed(((seed * 1_000_003 + step) * 1_000_003 + sample) % 2**63)


def _linear(inputs: int, outputs: int, std: float = 0.02) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.normal_(layer.weight, std=std)
    nn.init.zeros_(layer.bias)
    return layer
