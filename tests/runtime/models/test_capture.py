"""Captured blocks, run in one piece, compute what the module computes, gradients too, for any number of samples."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pipeplan.errors import UsageError
from pipeplan.runtime.models.capture import capture
from pipeplan.runtime.models.load import hindrance_of
from pipeplan.runtime.models.shapes import output_shapes, several_remedy, shaped_blocks
from pipeplan.runtime.models.spec import Model
from pipeplan.runtime.parallel.weight_grads import WeightGradQueue
from pipeplan.runtime.profiling.build_profile import block_graph_of
from pipeplan.runtime.profiling.instruments import saved_tensors, storages
from pipeplan.runtime.profiling.measure import profile_model
from runtime_support.whole_model import replay
from support.marks import slow_but, some_of

WIDTH, HEADS, SEQUENCE, VOCABULARY = 8, 2, 4, 11
GRAINS: tuple[Literal["layer", "half", "operator"], ...] = ("layer", "half", "operator")
Inputs = dict[str, Tensor]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


# Modules ----------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Attention over a memory, or over itself, with an optional bias on the scores."""

    def __init__(self, *, causal: bool = False) -> None:
        super().__init__()
        self.causal = causal
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        memory = x if memory is None else memory
        query, key, value = (self.split(p(y)) for p, y in ((self.query, x), (self.key, memory), (self.value, memory)))
        if self.causal:
            bias = torch.full((x.shape[1], x.shape[1]), torch.finfo(x.dtype).min, dtype=x.dtype).triu(1)
        if bias is not None:
            bias = bias.expand(x.shape[0], HEADS, -1, -1)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        return self.out(mixed.transpose(1, 2).reshape(x.shape))

    def split(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], HEADS, WIDTH // HEADS).transpose(1, 2)


def feed_forward() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH))


class PreNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(causal=True), feed_forward()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class PostNorm(PreNorm):
    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.mlp(x))


class Language(nn.Module):
    """Tokens to the sum of their losses; the output layer shares the embedding."""

    def __init__(self, layer: Callable[[], nn.Module] = PreNorm, *, tied: bool = True, layers: int = 3) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(SEQUENCE, WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(layers))
        self.norm, self.output = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.output.weight = self.token.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        logits = self.output(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


class EncoderDecoder(nn.Module):
    """A position bias that layers share, one for all samples, with a gradient; masks from the input's padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.bias = nn.Parameter(torch.randn(HEADS, SEQUENCE, SEQUENCE))
        self.encoder = nn.ModuleList(EncoderLayer() for _ in range(2))
        self.decoder = nn.ModuleList(DecoderLayer() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, mask: Tensor, targets: Tensor) -> Tensor:
        x, y = self.embed(tokens), self.embed(targets)
        bias = torch.tanh(self.bias)[None]
        padding = torch.where(mask[:, None, None, :], 0.0, -30.0).to(x.dtype)
        for layer in self.encoder:
            x = layer(x, bias + padding)
        for layer in self.decoder:
            y = layer(y, x, bias)
        return F.cross_entropy(self.head(y).flatten(0, 1), targets.flatten(), reduction="sum")


class EncoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm, self.mlp = Attention(), nn.LayerNorm(WIDTH), feed_forward()

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x), bias=bias)
        return x + self.mlp(x)


class DecoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.cross, self.mlp = Attention(), Attention(), feed_forward()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))

    def forward(self, x: Tensor, memory: Tensor, bias: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x), bias=bias)
        x = x + self.cross(self.norms[1](x), memory)
        return x + self.mlp(self.norms[2](x))


class Towers(nn.Module):
    """Two towers that meet in a loss over all pairs of the micro-batch's samples."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.image = Tower(nn.Embedding(VOCABULARY, WIDTH)), Tower(nn.Linear(5, WIDTH))
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, tokens: Tensor, pixels: Tensor) -> Tensor:
        text, image = self.text(tokens), self.image(pixels)
        scores = self.scale.exp() * text @ image.t()
        return F.cross_entropy(scores, torch.arange(scores.shape[0], device=scores.device), reduction="sum")


class Tower(nn.Module):
    def __init__(self, embed: nn.Module) -> None:
        super().__init__()
        self.embed, self.layers, self.norm = embed, nn.ModuleList(PostNorm() for _ in range(2)), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x).mean(1)


class Reused(nn.Module):
    """One layer three times, and in between one of its parts alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer, self.head = nn.Linear(5, WIDTH), PreNorm(), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(self.layer(self.embed(x)))
        return self.head(self.layer(self.layer.norm1(x)))


class InPlace(nn.Module):
    """Changes tensors in place: of its own, of the layer before, and parts of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x += 1
            x = F.relu(x, inplace=True)
        y = torch.zeros_like(x)
        y[:, 1:] = x[:, :-1]
        y[:, 0] = 2
        return y * x


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.stages = nn.Sequential(
            nn.Sequential(Residual(4), Residual(4)), nn.MaxPool2d(2), nn.Sequential(Residual(4))
        )
        self.head = nn.Linear(4, 3)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.head(F.adaptive_avg_pool2d(self.stages(self.stem(pixels)), 1).flatten(1))


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.norm1.running_mean.normal_()  # type: ignore[operator]  # a buffer, which torch types as maybe a module

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(x + self.norm2(self.conv2(y)))


class Buffers(nn.Module):
    """Buffers, constants, frozen parameters, regions without gradients, several results of one operator."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(SEQUENCE, WIDTH))
        self.constant = torch.randn(WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        constant = self.constant.to(x.dtype)
        x = self.frozen(x + self.table) * constant + torch.tensor([0.1] * WIDTH, dtype=x.dtype, device=x.device)
        for layer in self.layers:
            gate, value = layer(x).chunk(2, dim=-1)
            with torch.no_grad():
                scale = gate.abs().mean(-1, keepdim=True)
            x = x + torch.sigmoid(gate) * value * scale
        return x


class Recurrent(nn.Module):
    """torch's own layers: recurrent, attention that transposes its samples away, weights that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(VOCABULARY, WIDTH), nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, 12, batch_first=True), 2)
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 3))

    def forward(self, tokens: Tensor) -> Tensor:
        mixed, _ = self.lstm(self.embed(tokens))
        return self.head(self.encoder(mixed))


def tokens(**sizes: int) -> Inputs:
    return {name: torch.randint(VOCABULARY, (2, size)) for name, size in sizes.items()}


CASES: dict[str, Callable[[], tuple[nn.Module, Inputs]]] = {
    "sequential": lambda: (
        nn.Sequential(nn.Linear(5, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)),
        {"input": torch.randn(2, 5)},
    ),
    "pre-norm": lambda: (Language(), tokens(tokens=SEQUENCE, targets=SEQUENCE)),
    "post-norm": lambda: (Language(PostNorm, tied=False), tokens(tokens=SEQUENCE, targets=SEQUENCE)),
    "encoder-decoder": lambda: (
        EncoderDecoder(),
        {**tokens(tokens=SEQUENCE, targets=SEQUENCE), "mask": torch.arange(SEQUENCE).repeat(2, 1) < 3},
    ),
    "towers": lambda: (Towers(), {**tokens(tokens=SEQUENCE), "pixels": torch.randn(2, 6, 5)}),
    "reused": lambda: (Reused(), {"x": torch.randn(2, SEQUENCE, 5)}),
    "in-place": lambda: (InPlace(), {"x": torch.randn(2, SEQUENCE, WIDTH)}),
    "conv-net": lambda: (ConvNet(), {"pixels": torch.randn(2, 3, 8, 8)}),
    "recurrent": lambda: (Recurrent(), tokens(tokens=SEQUENCE)),
    "buffers": lambda: (Buffers(), {"x": torch.randn(2, SEQUENCE, WIDTH)}),
}


@cache
def captured(case: str, grain: Literal["layer", "half", "operator"]) -> tuple[nn.Module, Model]:
    torch.manual_seed(0)
    module, inputs = CASES[case]()
    return module, capture(module, inputs, name=case, grain=grain)


def ids(case: str, grain: Literal["layer", "half", "operator"]) -> list[str]:
    return [block.id for block in captured(case, grain)[1].blocks]


# The same output and gradients ------------------------------------------------------------------------------------


def built(model: Model, dtype: torch.dtype = torch.float64) -> dict[str, nn.Module]:
    return {block.id: model.build(block.id, 0, dtype=dtype) for block in model.blocks}


def gradients(model: Model, modules: Mapping[str, nn.Module]) -> list[Tensor]:
    """Of every parameter once, summed over the blocks that share it."""
    group_of = {holder: group for group in model.tied for holder in group}
    sums: dict[object, Tensor] = {}
    for id_, module in modules.items():
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                key = group_of.get((id_, name), (id_, name))
                sums[key] = sums[key] + parameter.grad if key in sums else parameter.grad
    return list(sums.values())


def signature(tensors: list[Tensor]) -> list[tuple[tuple[int, ...], float]]:
    """Shapes, and numbers that tell tensors of one shape apart, whatever order they come in."""
    weights = {each.numel(): torch.linspace(1, 2, each.numel(), dtype=each.dtype) for each in tensors}
    return sorted((tuple(each.shape), float(each.flatten() @ weights[each.numel()])) for each in tensors)


def require_same_set(found: list[Tensor], wanted: list[Tensor]) -> None:
    ours, theirs = signature(found), signature(wanted)
    assert [shape for shape, _ in ours] == [shape for shape, _ in theirs]
    assert [value for _, value in ours] == pytest.approx([value for _, value in theirs], rel=1e-9, abs=1e-9)


def drawn(make: Callable[[], Tensor]) -> Tensor:
    """What is made with the same random numbers each time."""
    torch.manual_seed(0)
    return make()


def require_same(module: nn.Module, model: Model, num_samples: int) -> None:
    """Output and gradients as the module's own, with the same random numbers; gradients are compared as a set, since
    blocks name them anew.
    """
    whole, modules = copy.deepcopy(module).double(), built(model)
    batch = model.mini_batch(num_samples, 0, 0, dtype=torch.float64)
    expected, found = drawn(lambda: whole(**batch)), drawn(lambda: replay(model, modules, batch))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()
    (found * weights).sum().backward()
    require_same_set(gradients(model, modules), [each.grad for each in whole.parameters() if each.grad is not None])


QUICK = ("pre-norm", "recurrent")
"""Cases that are always tried at every grain and in every format."""


@slow_but(
    "case, grain",
    [(case, grain) for case in CASES for grain in GRAINS if (case, grain) != ("recurrent", "operator")],
    lambda case: case[1] == "operator" or case[0] in QUICK,
    lambda case: case[1] == "layer",
)
def test_blocks_compute_what_the_module_computes(case: str, grain: Any) -> None:
    module, model = captured(case, grain)
    for num_samples in (1, 2, 5):
        require_same(module, model, num_samples)


def test_gradients_that_waited_for_w_are_the_same() -> None:
    _, model = captured("pre-norm", "half")
    batch = model.mini_batch(3, 0, 0, dtype=torch.float64)
    modules, others = built(model), built(model)
    drawn(lambda: replay(model, others, batch)).backward()
    with WeightGradQueue() as queue:
        drawn(lambda: replay(model, modules, batch)).backward()
    assert all(each.grad is None for name, each in modules["head"].named_parameters() if each.ndim == 2)
    queue.run()
    require_same_set(gradients(model, modules), gradients(model, others))


@pytest.mark.parametrize(
    "product",
    [
        lambda bias, x, weight: torch.addmm(bias, x, weight),
        lambda bias, x, weight: x.reshape(-1, 1, 5) @ weight + bias,
        lambda bias, x, weight: torch.addmm(bias.detach(), x, weight),
        lambda bias, x, weight: F.linear(x, weight.t().contiguous().t().T, bias),
    ],
    ids=["addmm", "matmul", "bias-detached", "views-of-a-weight"],
)
def test_products_with_transposed_weights(product: Callable[..., Tensor]) -> None:
    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            return product(self.bias, x, self.weight)

    for grain in GRAINS:
        module = Transposed()
        require_same(module, capture(module, {"x": torch.randn(2, 5)}, name="odd", grain=grain), 3)


@pytest.mark.parametrize("trained", [True, False])
def test_weight_gradients_of_transposed_products_wait(trained: bool) -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 3), requires_grad=trained)
            self.norm = nn.LayerNorm(5)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x) @ self.weight

    model = capture(Product(), {"x": torch.randn(2, 5)}, name="product")
    modules = built(model)
    with WeightGradQueue() as queue:
        replay(model, modules, model.mini_batch(3, 0, 0, dtype=torch.float64)).sum().backward()
    assert len(queue) == int(trained)
    assert [tuple(each.shape) for each in gradients(model, modules)] == [(5,), (5,)]
    queue.run()
    assert len(gradients(model, modules)) == 2 + int(trained)


def nested(x: Tensor) -> Tensor:
    x = x * 1
    x[:, 1:, 0] = 3
    x[:, :2][:, :, 2:] *= 2
    return x


def through_an_older_name(x: Tensor) -> Tensor:
    y = x * 1
    z = y
    y.mul_(2).add_(1)
    return z + y


def masked(x: Tensor) -> Tensor:
    return (x * 1).masked_fill_(torch.ones(x.shape[1:], dtype=torch.bool).triu(), 2.0).clamp_(-1, 1)


def broadcast(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 0] = x[:, 1, :1]
    y[:, 2].zero_()
    y[:, 3].fill_(0.1)
    return y


def row_by_row(x: Tensor) -> Tensor:
    made = torch.zeros_like(x)
    for row in range(SEQUENCE):
        made[:, row] = x[:, row] + (made[:, row - 1] if row else 0)
    return made


@pytest.mark.parametrize("change", [nested, through_an_older_name, masked, broadcast, row_by_row])
def test_changes_in_place(change: Callable[[Tensor], Tensor]) -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = change(layer(x))
            return x

    module = Changing()
    for grain in ("layer", "operator"):
        require_same(module, capture(module, {"x": torch.randn(2, SEQUENCE, WIDTH)}, name="odd", grain=grain), 3)


def held(make: Callable[[], Tensor], modules: Iterable[nn.Module]) -> int:
    """Bytes that wait for backward, less parameters and buffers."""
    own = storages([tensor for module in modules for tensor in (*module.parameters(), *module.buffers())])
    with saved_tensors() as saved:
        output = make()
    return sum(size for place, size in storages([*saved(), output]).items() if place not in own)


@pytest.mark.parametrize("case", ["pre-norm", "post-norm", "conv-net"])
def test_blocks_hold_what_the_module_holds(case: str) -> None:
    module, model = captured(case, "half")
    whole, modules, batch = copy.deepcopy(module), built(model, torch.float32), model.mini_batch(4, 0, 0)
    replay(model, modules, batch)  # makes masks and positions, which blocks keep
    found = held(lambda: replay(model, modules, batch), modules.values())
    expected = held(lambda: whole(**batch), [whole])
    assert found == pytest.approx(expected, rel=0.03)


class Noisy(nn.Module):
    """Numbers are dropped and normalised in every way, in part of the module in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self._layer(rate) for rate in (0.1, 0.1, 0.3))
        self.frozen, self.head = self._layer(0.2).eval(), nn.Linear(8, 3)

    @staticmethod
    def _layer(rate: float) -> nn.Module:
        norm = nn.BatchNorm1d(8, track_running_stats=rate < 0.3)
        return nn.Sequential(nn.Linear(8, 8), norm, nn.Dropout(rate, inplace=True), nn.AlphaDropout(rate))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        shape = (len(x), 2, 2, 2)
        x = F.scaled_dot_product_attention(x.view(shape), x.view(shape), x.view(shape), dropout_p=0.2).flatten(1)
        x = x * torch.empty(len(x), 1, dtype=x.dtype, device=x.device).bernoulli_(0.5)  # stochastic depth
        return self.head(F.dropout(self.frozen(x), 0.5)).square().mean()


def test_a_module_in_training_mode_drops_and_normalises_as_it_does() -> None:
    """It was captured in evaluation mode: nothing dropped, and running statistics of 0 and 1 never changed."""
    torch.manual_seed(0)
    module, inputs = Noisy(), {"x": torch.randn(2, 8)}
    model = capture(module, inputs, name="noisy")
    assert model.switched_off == {"BatchNorm1d": 1, "Dropout": 1, "AlphaDropout": 1}
    require_same(module, model, 6)
    whole, modules = copy.deepcopy(module).double(), built(model)
    batch = model.mini_batch(6, 0, 0, dtype=torch.float64)
    for _ in range(2):
        expected, found = drawn(lambda: whole(**batch)), drawn(lambda: replay(model, modules, batch))
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    buffers = [each for block in modules.values() for each in block.buffers() if each.shape == (8,)]
    require_same_set(buffers, [each for each in whole.buffers() if each.shape == (8,)])
    off = drawn(lambda: replay(model, {name: block.eval() for name, block in modules.items()}, batch))
    assert off != drawn(lambda: whole(**batch)), "F.dropout(x, 0.5) is told that training is on, which holds no longer"


def test_one_number_per_channel_is_refused_as_torch_does() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model = capture(module, {"input": torch.randn(2, 4)}, name="net")
    with pytest.raises(ValueError, match="micro-batches of two samples or more"):
        replay(model, built(model), model.mini_batch(1, 0, 0, dtype=torch.float64))
    averaging = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None))
    with pytest.raises(UsageError, match="'1' has momentum=None"):
        capture(averaging, {"input": torch.randn(2, 4)}, name="net")


# What is left alone, what can be built ----------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["pre-norm", "conv-net", "buffers", "recurrent"])
def test_capturing_leaves_the_module_as_it_was(case: str) -> None:
    module, inputs = CASES[case]()
    module.train()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    places = [parameter.data_ptr() for parameter in module.parameters()]
    capture(module, inputs, name=case, grain="layer")
    assert all(each.training for each in module.modules())
    assert [parameter.data_ptr() for parameter in module.parameters()] == places
    torch.testing.assert_close(dict(module.state_dict()), before, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in module.parameters())


def test_a_model_without_data_is_captured_and_gets_numbers_when_built() -> None:
    with torch.device("meta"):
        module = Language()
    example = torch.zeros(2, SEQUENCE, dtype=torch.long)
    model = capture(module, {"tokens": example, "targets": example.clone()}, name="meta")
    modules = built(model)
    assert not any(each.is_meta for module_ in modules.values() for each in module_.parameters())
    norms = [each for name, each in modules["layers.0.ffn"].named_parameters() if "norm" in name]
    assert {float(each.detach().mean()) for each in norms} == {0.0, 1.0}
    loss = replay(model, modules, model.mini_batch(2, 0, 0, dtype=torch.float64))
    assert loss.isfinite()
    assert loss > 0


@slow_but(
    "case, dtype",
    product(CASES, (torch.float32, torch.bfloat16)),
    lambda each: each[0] in QUICK,
    lambda each: each[1] is torch.float32,
)
def test_blocks_run_in_other_formats(case: str, dtype: torch.dtype) -> None:
    module, model = captured(case, "half")
    batch = model.mini_batch(2, 0, 0, dtype=dtype)
    whole = copy.deepcopy(module).to(dtype)
    expected, found = drawn(lambda: whole(**batch)), drawn(lambda: replay(model, built(model, dtype), batch))
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@slow_but("case", CASES, QUICK.__contains__, lambda case: case not in ("encoder-decoder", "towers", "conv-net"))
def test_blocks_can_be_profiled(case: str) -> None:
    _, model = captured(case, "half")
    if case == "towers":
        model = replace(model, loss_of="micro-batches")
    profile = profile_model(model, [1, 2], repeats=1, warmup=0)
    assert [block.id for block in profile.blocks] == ids(case, "half")
    assert all([row.microbatch_size for row in block.costs] == [1, 2] for block in profile.blocks)


# How it is cut ----------------------------------------------------------------------------------------------------


def test_half_layers_end_at_residual_additions() -> None:
    expected = ["embedding", *(f"layers.{i}.{half}" for i in range(3) for half in ("attention", "ffn")), "head"]
    assert ids("pre-norm", "half") == expected
    assert ids("post-norm", "half") == expected
    assert ids("encoder-decoder", "half")[-4:] == [
        *(f"decoder.1.{part}" for part in ("attention", "cross-attention", "ffn")),
        "head",
    ]


class Joined(nn.Module):
    """A loop with residual additions, then a second branch from other words, then both."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(2 * WIDTH, 3)
        self.left = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2))
        self.right = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, tokens: Tensor, others: Tensor) -> Tensor:
        a = self.embed(tokens)
        for layer in self.left:
            a = a + layer(a)
        b = self.embed(others)
        for layer in self.right:
            b = torch.tanh(layer(b))
        return self.head(torch.cat([a, b], dim=-1)).sum()


@pytest.mark.parametrize("grain", ["half", "layer"])
def test_the_last_residual_addition_of_a_loop_is_its_layer_s(grain: Any) -> None:
    """Not of the branch that comes next, which would wait for it and give two tensors: no plan of that could be run."""
    tokens = torch.randint(VOCABULARY, (2, 5))
    module = Joined()
    model = capture(module, {"tokens": tokens, "others": tokens.flip(1)}, name="joined", grain=grain)
    taken = {block.id: {source for source, _ in block.inputs} for block in model.blocks}
    assert taken["embedding-2"] == set()
    assert [len(shaped.outputs) for shaped in shaped_blocks(model, 2)] == [1] * len(model.blocks)
    require_same(module, model, 3)


def test_layers_are_the_elements_of_the_outermost_lists_or_the_modules_at_the_top() -> None:
    assert ids("pre-norm", "layer") == ["embedding", "layers.0", "layers.1", "layers.2", "head"]
    assert ids("conv-net", "layer") == ["stem.0", "stages.0", "stages.2", "linear"]
    assert ids("reused", "layer") == ["embed", "layer", "layer-2", "layer-3", "head"]
    assert ids("recurrent", "half")[:2] == ["embedding", "encoder.layers.0.attention"]
    assert ids("sequential", "layer") == ["0", "2", "4"]


def test_single_operators_keep_their_views() -> None:
    _, model = captured("pre-norm", "operator")
    attention = [block for block in model.blocks if block.operator == "attention"]
    assert [len(block.sources) for block in attention] == [3, 3, 3]
    products = [block for block in model.blocks if block.operator == "linear"]
    assert len(products) == 3 * 6 + 1
    assert ids("pre-norm", "operator")[:4] == ["token", "position", "add", "layers.0.norm1"]


def test_operators_and_dimensions() -> None:
    _, model = captured("encoder-decoder", "half")
    said = {block.id: (block.operator, dict(block.dimensions)) for block in model.blocks}
    sizes = {"sequence": SEQUENCE, "hidden": WIDTH}
    assert said["embedding"] == ("embedding", sizes | {"vocabulary": VOCABULARY})
    assert said["decoder.1.attention"] == ("attention", sizes | {"heads": HEADS})
    assert said["decoder.1.cross-attention"] == ("cross-attention", sizes | {"heads": HEADS})
    assert said["decoder.1.ffn"] == ("ffn", sizes | {"ffn": 3 * WIDTH})
    assert said["head"] == ("head", sizes | {"vocabulary": VOCABULARY})
    assert model.block("head").loss


def test_identical_layers_are_alike() -> None:
    _, model = captured("pre-norm", "half")
    kinds = Counter(block.kind for block in block_graph_of(model, torch.float32).blocks)
    assert set(kinds.values()) == {1, 3}
    assert len(kinds) == 4


def test_masks_and_positions_do_not_cross_and_a_shared_bias_is_broadcast() -> None:
    _, model = captured("pre-norm", "half")
    assert model.edges == tuple(zip(ids("pre-norm", "half"), ids("pre-norm", "half")[1:], strict=False))
    _, model = captured("encoder-decoder", "half")
    shared = [edge for edge in block_graph_of(model, torch.float32).edges if edge.broadcast]
    assert {"encoder.0.attention", "decoder.0.attention", "decoder.1.attention"} & {edge.target for edge in shared}
    assert {edge.source.partition("-")[0] for edge in shared} == {"embedding"}
    assert all(edge.gradient for edge in shared)


def test_shared_parameters_are_tied_and_frozen_ones_stay_frozen() -> None:
    _, model = captured("pre-norm", "half")
    ((first, last),) = model.tied
    assert (first[0], last[0]) == ("embedding", "head")
    _, model = captured("reused", "layer")
    assert {tuple(id_ for id_, _ in group) for group in model.tied} >= {("layer", "layer-2", "layer-3")}
    _, model = captured("buffers", "layer")
    frozen = [each for each in model.build(model.blocks[0].id, 0).parameters() if not each.requires_grad]
    assert len(frozen) == 2


def test_a_sample_of_a_batch_does_not_depend_on_how_many_there_are() -> None:
    _, model = captured("encoder-decoder", "half")
    few, many = model.mini_batch(2, 3, 5), model.mini_batch(4, 3, 5)
    for name, tensor in few.items():
        torch.testing.assert_close(many[name][:2], tensor)
        assert tensor.dtype == many[name].dtype
    assert model.predictions(many) == 4


# What cannot be captured ------------------------------------------------------------------------------------------


class Branches(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if input.sum() > 0 else input


class TakesSome(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input[input[:, 0] > 0])


class TakesNumber(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * input.mean().item()


class CountsSamples(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        for _ in range(input.shape[0]):
            input = super().forward(input)
        return input


class SamplesAndOne(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(torch.cat([input, input.new_zeros(1, input.shape[1])])[: input.shape[0] + 1])


class WritesToBuffer(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, input: Tensor) -> Tensor:
        self.count += 1  # type: ignore[operator]  # a buffer, as above
        return super().forward(input) * self.count


class WritesToParameter(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-1, 1)
        return super().forward(input)


class WritesToView(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        made = super().forward(input)
        view = made.transpose(0, 1)
        made[:, 0] = 0
        return made + view.sum()


class TwoResults(nn.Linear):
    def forward(self, input: Tensor) -> Any:
        return super().forward(input), input


class Autocast(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(input)


class Nothing(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return input * 2


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Branches, ["depend on the values", "write a function"]),
        (TakesSome, ["depend on the values", "write a function"]),
        (TakesNumber, ["depend on the values", "item", "write a function"]),
        (CountsSamples, ["different operators for 2 and 3 samples", "write a function"]),
        (SamplesAndOne, ["3", "4", "not a multiple", "write a function"]),
        (WritesToBuffer, ["buffer 'count'", "in place", "make a new tensor"]),
        (WritesToParameter, ["parameter 'weight'", "in place", "make a new tensor"]),
        (WritesToView, ["in place", "transpose", "make a new tensor"]),
        (TwoResults, ["returns 2 tensors", "wrap it"]),
        (Autocast, ["autocast", "--dtype"]),
    ],
)
def test_what_cannot_be_captured_says_why(module: type[nn.Linear], words: list[str]) -> None:
    with pytest.raises(UsageError) as error:
        capture(module(4, 4), {"input": torch.randn(2, 4)}, name="odd")
    assert "model 'odd'" in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_a_module_without_work_and_inputs_without_samples_are_refused() -> None:
    with pytest.raises(UsageError, match="no work that needs parameters"):
        capture(Nothing(), {"input": torch.arange(4)}, name="nothing")
    with pytest.raises(UsageError, match="samples in its first dimension"):
        capture(nn.Linear(2, 2), {"input": torch.tensor(1.0)}, name="scalar")
    with pytest.raises(UsageError, match="input 'input' is not a tensor"):
        capture(nn.Linear(2, 2), {"input": 3}, name="number")  # type: ignore[dict-item]  # that is the mistake
    with pytest.raises(UsageError, match="'inputs'"):
        capture(nn.Linear(2, 2), {"inputs": torch.randn(2, 2)}, name="other name")


def test_samples_in_another_dimension_do_not_cross() -> None:
    class SequenceFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            x = x.transpose(0, 1)
            for layer in self.layers:
                x = layer(x)
            return x.transpose(0, 1)

    with pytest.raises(UsageError, match="samples not in the first dimension"):
        capture(SequenceFirst(), {"x": torch.randn(2, SEQUENCE, WIDTH)}, name="sequence first")


# Random modules ---------------------------------------------------------------------------------------------------

_OPERATORS = ("linear", "norm", "relu", "relu_", "add", "mul", "again", "table", "halves", "part", "cut", "mean")


class Wired(nn.Module):
    """A random graph of small operators: each takes one or two of the tensors before it."""

    def __init__(self, wires: list[tuple[str, int, int]]) -> None:
        super().__init__()
        self.wires = wires
        self.parts = nn.ModuleList(self.part(operator) for operator, _, _ in wires)
        self.register_buffer("table", torch.randn(SEQUENCE, WIDTH))

    @staticmethod
    def part(operator: str) -> nn.Module:
        return {"linear": nn.Linear(WIDTH, WIDTH), "norm": nn.LayerNorm(WIDTH)}.get(operator, nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        made, used = [self.parts[0](x) + x * self.table], set()
        for (operator, first, second), part in zip(self.wires, self.parts, strict=True):
            one, other = made[first % len(made)], made[second % len(made)]
            used |= {first % len(made), second % len(made)} if operator in ("add", "mul") else {first % len(made)}
            made.append(self.run(operator, part, one, other, self.parts[second % len(self.parts)]))
        return sum(each for index, each in enumerate(made) if index not in used)  # type: ignore[return-value]  # not 0

    def run(self, operator: str, part: nn.Module, one: Tensor, other: Tensor, again: nn.Module) -> Tensor:
        match operator:
            case "add":
                return one + other
            case "mul":
                return one * torch.tanh(other)
            case "relu":
                return torch.relu(one)
            case "relu_":
                return (one + 0.1).relu_()
            case "again":
                return again(one)
            case "table":
                return one + torch.arange(one.shape[1], device=one.device)[:, None] * self.table
            case "halves":
                left, right = one.chunk(2, dim=-1)
                return torch.cat([right, left], dim=-1)
            case "part":
                changed = one * 1
                changed[:, 1:] = one[:, :-1] * 0.5
                return changed
            case "cut":
                return one + other.detach()
            case "mean":
                return one - one.mean(dim=1, keepdim=True).expand(one.shape)
        return part(one)


@settings(max_examples=some_of(10))
@given(
    st.lists(st.tuples(st.sampled_from(_OPERATORS), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=9),
    st.sampled_from(GRAINS),
    st.integers(1, 4),
)
def test_random_graphs(wires: list[tuple[str, int, int]], grain: Any, num_samples: int) -> None:
    torch.manual_seed(0)
    module = Wired([("linear", 0, 0), *wires])
    model = capture(module, {"x": torch.randn(2, SEQUENCE, WIDTH)}, name="random", grain=grain)
    require_same(module, model, num_samples)
    assert len(block_graph_of(model, torch.float32).blocks) == len(model.blocks)


class TwoOn(nn.Module):
    """Two branches that go on together through each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 3)
        self.layers = nn.ModuleList(Both() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        a = b = self.embed(tokens)
        for layer in self.layers:
            a, b = layer(a, b)
        return self.head(a * b).sum()


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(a) + b, self.other(b) + a


def test_a_model_that_no_run_trains_is_said_to_be_so_before_it_is_measured() -> None:
    model = capture(TwoOn(), {"tokens": torch.randint(VOCABULARY, (2, 5))}, name="two", grain="layer")
    said = hindrance_of(model)
    assert said.startswith("plans of this profile can be searched, checked and emulated, but pipeplan run cannot train")
    assert "layers.0, layers.1 hand on several tensors" in said
    with pytest.raises(UsageError, match="returns 2 tensors") as error:
        output_shapes(model, 2)
    assert several_remedy(model) in said
    assert several_remedy(model) in str(error.value)
    assert "--granularity half or operator" in said, "it is cut by layers"
    assert hindrance_of(captured("pre-norm", "half")[1]) == ""
