"""Models for the runtime's tests: graphs other than chains, and blocks that fail on purpose."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.models.spec import BlockSpec, Model
from pipeplan.runtime.models.zoo.encoder_decoder import TranslationSize
from pipeplan.runtime.models.zoo.gpt import GPTSize
from pipeplan.runtime.parallel.sharding import WHOLE, Cut, Shards, Split
from pipeplan.runtime.parallel.split_layers import RowLinear, WordEmbedding, cross_entropy

WIDTH = 8


class Mix(nn.Module):
    """Adds up its inputs behind a linear layer each, which devices split by its inputs."""

    def __init__(self, num_inputs: int, shards: Shards = WHOLE) -> None:
        super().__init__()
        self.shards, (self.begin, self.end) = shards, shards.range(WIDTH)
        self.layers = nn.ModuleList(RowLinear(WIDTH, WIDTH, shards) for _ in range(num_inputs))

    def forward(self, *inputs: Tensor) -> Tensor:
        own = [self.shards.shared(x)[..., self.begin : self.end] for x in inputs]
        return torch.tanh(sum(layer(x) for layer, x in zip(self.layers, own, strict=True)))


class SquaredError(nn.Module):
    """A loss with a parameter: the summed squared distance to the targets, of which devices split the width."""

    def __init__(self, shards: Shards = WHOLE) -> None:
        super().__init__()
        self.shards, (self.begin, self.end) = shards, shards.range(WIDTH)
        self.scale = nn.Parameter(torch.ones(self.end - self.begin))

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        own = self.shards.shared(x)[..., self.begin : self.end] * self.scale
        return self.shards.summed(F.mse_loss(own, targets[..., self.begin : self.end], reduction="sum"))


class Shift(nn.Module):
    """One row for all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.linspace(-1, 1, WIDTH)[None])

    def forward(self) -> Tensor:
        return torch.sin(self.row)


def mix_block(id_: str, sources: tuple[str, ...]) -> BlockSpec:
    """A block that mixes the outputs of others, or samples, and can be split over any number of devices."""
    count = len(sources) or 1
    cuts = {f"layers.{index}.weight": Cut(1, even=False) for index in range(count)}
    samples = () if sources else ("x",)
    return BlockSpec(id_, "mix", partial(Mix, count), sources, samples, split=Split(partial(Mix, count), cuts))


def loss_block(id_: str, source: str) -> BlockSpec:
    """The loss of a block's output, which can be split, too."""
    split = Split(SquaredError, {"scale": Cut(even=False)})
    return BlockSpec(id_, "loss", SquaredError, (source,), ("targets",), loss=True, split=split)


def shift_block(id_: str) -> BlockSpec:
    """One row for all samples; whole on every device."""
    return BlockSpec(id_, "shift", Shift, split=Split(lambda shards: Shift()))


class Break(nn.Module):
    """Passes its input on, and does something on the n-th forward of this process."""

    def __init__(self, act: Callable[[], None], at: int) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.act, self.at, self.calls = act, at, 0

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "meta":
            if self.calls == self.at:
                self.act()
            self.calls += 1
        result: Tensor = self.layer(x)
        return result


def vectors(num_samples: int, step: int, seed: int) -> dict[str, Tensor]:
    rows = [torch.Generator().manual_seed(seed * 7919 + step * 104729 + i) for i in range(num_samples)]
    both = torch.stack([torch.randn(2, WIDTH, dtype=torch.float64, generator=generator) for generator in rows])
    return {"x": both[:, 0].contiguous(), "targets": both[:, 1].contiguous()}


def branches() -> Model:
    """Two branches with a skip around them and two losses; one weight is tied over three blocks."""
    weight = ("a", "layers.0.weight")
    return Model(
        "branches",
        (
            BlockSpec("a", "mix", lambda: Mix(1), samples=("x",)),
            BlockSpec("left", "mix", lambda: Mix(1), sources=("a",)),
            BlockSpec("right", "mix", lambda: Mix(1), sources=("a",)),
            BlockSpec("right2", "mix", lambda: Mix(2), sources=("right", "a")),
            BlockSpec("join", "mix", lambda: Mix(3), sources=("left", "right2", "a")),
            BlockSpec("side", "loss", SquaredError, sources=("right2",), samples=("targets",), loss=True),
            BlockSpec("end", "loss", SquaredError, sources=("join",), samples=("targets",), loss=True),
        ),
        vectors,
        lambda batch: batch["targets"].numel(),
        tied=((weight, ("right2", "layers.1.weight"), ("join", "layers.2.weight")),),
    )


class Spare(Mix):
    """Has a parameter that nothing depends on: no gradient, and so no update."""

    def __init__(self) -> None:
        super().__init__(1)
        self.spare = nn.Parameter(torch.ones(2))


def chain() -> Model:
    """Five blocks one after another, then a loss; the first and the last block share a weight."""
    names = [f"b{index}" for index in range(5)]
    blocks = [
        BlockSpec(name, "mix", Spare, sources=(names[i - 1],) if i else (), samples=() if i else ("x",))
        for i, name in enumerate(names)
    ]
    loss = BlockSpec("end", "loss", SquaredError, sources=("b4",), samples=("targets",), loss=True)
    tied = ((("b0", "layers.0.weight"), ("b4", "layers.0.weight")),)
    return Model("chain", (*blocks, loss), vectors, lambda batch: batch["targets"].numel(), tied=tied)


def untied(model: Callable[[], Model]) -> Model:
    """The same, in which blocks share nothing."""
    made = model()
    return replace(made, name=f"untied {made.name}", tied=())


def untied_chain() -> Model:
    """All of whose parameters get gradients."""
    made = untied(chain)
    blocks = (replace(block, build=partial(Mix, 1)) if block.operator == "mix" else block for block in made.blocks)
    return replace(made, blocks=tuple(blocks))


class Shown(Shift):
    """Its parameter itself."""

    def forward(self) -> Tensor:
        return self.row.view(1, WIDTH)


def shown() -> Model:
    """A chain whose first block gives its parameters themselves, to the last block before the loss, too."""
    first = BlockSpec("row", "shown", Shown)
    joins = (
        mix_block("b0", ()),
        mix_block("b1", ("b0", "row")),
        mix_block("b2", ("b1",)),
        mix_block("b3", ("b2", "row")),
    )
    blocks = (first, *joins, loss_block("end", "b3"))
    return Model("shown", blocks, vectors, lambda batch: batch["targets"].numel())


def untied_branches() -> Model:
    return untied(branches)


def gated() -> Model:
    """The chain; from the third step on samples come when the working folder has a file ``go-STEP``."""

    def batch(num_samples: int, step: int, seed: int) -> dict[str, Tensor]:
        while step >= 2 and not Path(f"go-{step}").exists():
            time.sleep(0.01)
        return vectors(num_samples, step, seed)

    return replace(chain(), batch=batch)


def breaking(act: Callable[[], None], at: int = 5) -> Model:
    """A chain of four blocks and a loss, the third of which breaks."""
    names = ["b0", "b1", "b2", "b3"]
    builders: dict[str, Callable[[], nn.Module]] = {name: lambda: Mix(1) for name in names}
    builders["b2"] = lambda: Break(act, at)
    chain = [
        BlockSpec(name, "mix", builders[name], sources=(names[i - 1],) if i else (), samples=() if i else ("x",))
        for i, name in enumerate(names)
    ]
    loss = BlockSpec("end", "loss", SquaredError, sources=("b3",), samples=("targets",), loss=True)
    return Model("breaking", (*chain, loss), vectors, lambda batch: batch["targets"].numel())


def killed() -> Model:
    return breaking(lambda: os.kill(os.getpid(), signal.SIGKILL))


def exchanging() -> Model:
    """The first block asks all ranks for something by itself, when the third has just been killed."""
    model = breaking(lambda: os.kill(os.getpid(), signal.SIGKILL), at=4)
    first, *others = model.blocks
    return replace(model, blocks=(replace(first, build=lambda: Break(dist.barrier, 5)), *others))


def stopped() -> Model:
    return breaking(lambda: os.kill(os.getpid(), signal.SIGSTOP))


def sleeping() -> Model:
    return breaking(lambda: time.sleep(600))


def raising() -> Model:
    def act() -> None:
        raise ValueError("boom")

    return breaking(act)


def breaking_share(act: Callable[[], None], at: int = 5) -> Model:
    """A split block, of which the second share breaks, then two whole ones and a loss."""

    class Breaking(Mix):
        calls = 0

        def forward(self, *inputs: Tensor) -> Tensor:
            if self.shards.index == 1:
                if self.calls == at:
                    act()
                self.calls += 1
            return super().forward(*inputs)

    first = mix_block("b0", ())
    assert first.split is not None
    first = replace(first, split=replace(first.split, build=lambda shards: Breaking(1, shards)))
    blocks = (first, mix_block("b1", ("b0",)), mix_block("b2", ("b1",)), loss_block("end", "b2"))
    return Model("breaking_share", blocks, vectors, lambda batch: batch["targets"].numel())


def share_killed() -> Model:
    return breaking_share(lambda: os.kill(os.getpid(), signal.SIGKILL))


def share_stopped() -> Model:
    return breaking_share(lambda: os.kill(os.getpid(), signal.SIGSTOP))


def share_raising() -> Model:
    def act() -> None:
        raise ValueError("boom")

    return breaking_share(act)


def talking() -> Model:
    """The smallest model of the zoo; prints, as user code does."""
    print("a word from the model")
    return load_model("gpt2-tiny")


def lying() -> Model:
    """Makes another number format than it declares."""

    class Half(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.device.type == "meta" else x.to(torch.float16)

    model = breaking(lambda: None)
    blocks = [
        block if block.id != "b1" else BlockSpec("b1", "half", Half, sources=("b0",), samples=())
        for block in model.blocks
    ]
    return Model("lying", tuple(blocks), vectors, model.predictions)


def odd(rank: int) -> Model:
    """Declares another number format on rank 1 than on the others."""

    class Declared(Mix):
        def forward(self, *inputs: Tensor) -> Tensor:
            made = super().forward(*inputs)
            return made.to(torch.float16) if made.device.type == "meta" and rank == 1 else made

    model = breaking(lambda: None)
    blocks = [
        block if block.id != "b1" else BlockSpec("b1", "mix", lambda: Declared(1), sources=("b0",))
        for block in model.blocks
    ]
    return Model("odd", tuple(blocks), vectors, model.predictions)


def unlike(rank: int, *, wider: bool) -> Model:
    """The chain; on rank 2 a block starts with other numbers, or is wider inside."""

    def build() -> nn.Module:
        module = Spare()
        if rank == 2:
            module.spare.data = torch.ones(3) if wider else torch.zeros(2)
        return module

    model = chain()
    blocks = [replace(block, build=build) if block.id == "b2" else block for block in model.blocks]
    return replace(model, blocks=tuple(blocks))


# Words, which devices split

WORDS = 11
LENGTH = 3


class Lookup(nn.Module):
    """Words and positions: [samples, LENGTH] to [samples, LENGTH, WIDTH]."""

    def __init__(self, shards: Shards = WHOLE) -> None:
        super().__init__()
        self.table = WordEmbedding(WORDS, WIDTH, shards, std=1.0)
        self.position = nn.Parameter(torch.linspace(-1, 1, LENGTH * WIDTH).reshape(LENGTH, WIDTH))

    def forward(self, words: Tensor) -> Tensor:
        result: Tensor = self.table(words) + self.position
        return result


class Predict(nn.Module):
    """A norm, a layer with an output for each word, and the summed loss of the words that are not left out."""

    def __init__(self, shards: Shards = WHOLE) -> None:
        super().__init__()
        begin, end = shards.range(WORDS)
        self.shards, self.norm = shards, nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, end - begin, bias=False)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = self.output(self.shards.shared(self.norm(x)))
        return cross_entropy(logits, targets, WORDS, self.shards).sum()


class Columns(nn.Module):
    """A residual layer whose outputs are split, and a shift that some samples' blocks take whole."""

    def __init__(self, shards: Shards = WHOLE) -> None:
        super().__init__()
        begin, end = shards.range(3 * WIDTH)
        self.shards, self.norm = shards, nn.LayerNorm(WIDTH)
        self.expand = nn.Linear(WIDTH, end - begin)
        self.project = RowLinear(3 * WIDTH, WIDTH, shards)

    def forward(self, *inputs: Tensor) -> Tensor:
        whole = self.norm(torch.stack(torch.broadcast_tensors(*inputs)).sum(0))
        result: Tensor = inputs[0] + self.project(torch.tanh(self.expand(self.shards.shared(whole))))
        return result


def columns_block(id_: str, *sources: str) -> BlockSpec:
    cuts = {"expand.weight": Cut(), "expand.bias": Cut(), "project.weight": Cut(1)}
    return BlockSpec(id_, "columns", Columns, sources, split=Split(Columns, cuts))


def lookup_block(id_: str, words: str = "words") -> BlockSpec:
    return BlockSpec(id_, "lookup", Lookup, samples=(words,), split=Split(Lookup, {"table.weight": Cut(even=False)}))


def predict_block(id_: str, source: str) -> BlockSpec:
    split = Split(Predict, {"output.weight": Cut(even=False)})
    return BlockSpec(id_, "predict", Predict, (source,), ("targets",), loss=True, split=split)


def texts(num_samples: int, step: int, seed: int) -> dict[str, Tensor]:
    """Words, others, and targets of which some are left out."""
    rows = [torch.Generator().manual_seed(seed * 7919 + step * 104729 + i) for i in range(num_samples)]
    drawn = torch.stack([torch.randint(WORDS, (3, LENGTH), generator=generator) for generator in rows])
    words, others, targets = (drawn[:, index].contiguous() for index in range(3))
    return {"words": words, "others": others, "targets": targets.masked_fill(words == 0, -100)}


def _worded(name: str, blocks: tuple[BlockSpec, ...], *tied: str) -> Model:
    """Of whose blocks those named share the table of words; heads have it as their output layer."""
    weights = tuple((id_, "output.weight" if id_ == "head" else "table.weight") for id_ in tied)
    return Model(name, blocks, texts, lambda batch: int((batch["targets"] >= 0).sum()), tied=(weights,) if tied else ())


def worded() -> Model:
    """Words, four blocks, words: Tessel's M where the first is on all devices, FlexPipe's mllm where the last is, too.

    All four blocks take a shift that is the same for all samples.
    """
    chain = [shift_block("shift"), lookup_block("words")]
    for index in range(4):
        chain.append(columns_block(f"b{index}", chain[-1].id, "shift"))
    return _worded("worded", (*chain, predict_block("head", "b3")), "words", "head")


def translating() -> Model:
    """Two chains behind words of one table, the second of which takes the first's end: Tessel's NN."""
    blocks = (
        lookup_block("words"),
        columns_block("b0", "words"),
        columns_block("b1", "b0"),
        lookup_block("others", "others"),
        columns_block("b2", "others", "b1"),
        columns_block("b3", "b2", "b1"),
        predict_block("head", "b3"),
    )
    return _worded("translating", blocks, "words", "others", "head")


def four_heads() -> Model:
    """GPT-2's form with as many heads as devices, which divide sequences of eight words."""
    return GPTSize(layers=4, hidden=16, heads=4, vocabulary=24, positions=8, sequence=8).model("four-heads")


def two_sequences() -> Model:
    """mT5's form with as many heads as devices, which divide both sequences of eight words."""
    size = TranslationSize(layers=2, hidden=16, heads=4, vocabulary=24, sequence=8, biased=True, shared=False)
    return size.model("two-sequences")


def pairing() -> Model:
    """Two towers and a block that joins them, behind which is the loss: Tessel's K."""
    blocks = (
        lookup_block("words"),
        columns_block("left0", "words"),
        columns_block("left1", "left0"),
        lookup_block("others", "others"),
        columns_block("right0", "others"),
        columns_block("right1", "right0"),
        columns_block("join", "left1", "right1"),
        predict_block("head", "join"),
    )
    return _worded("pairing", blocks)
