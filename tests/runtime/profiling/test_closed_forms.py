"""Closed forms of work and of what backward keeps, against what torch counts and what autograd saves."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from pipeplan.costs.operators import (
    Operator,
    activation,
    add,
    attention_core,
    batch_norm,
    convolution,
    embedding,
    linear,
    max_pool,
    norm,
    relu,
    sequence_of,
    vocabulary_loss,
)
from pipeplan.examples.layout import Stack, bottleneck, class_loss, dense, image_stem, long_memory, table_rows
from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.models.shapes import shaped_blocks
from pipeplan.runtime.profiling.instruments import saved_tensors, storages

WIDTH = 4  # float32


def kept(module: nn.Module, *inputs: Tensor) -> int:
    """Bytes that a row's ``activation_bytes`` are: what autograd holds after a forward, and inputs with gradients."""
    with saved_tensors() as saved:
        output = module(*inputs)
        own = storages([*module.parameters(), *module.buffers()])
        held = storages([*saved(), *(each for each in inputs if each.requires_grad)])
        assert output.requires_grad
    return sum(size for address, size in held.items() if address not in own)


def flops(module: nn.Module, *inputs: Tensor) -> tuple[int, int]:
    """Matrix work of a forward and of a backward, as torch counts it."""
    with FlopCounterMode(display=False) as forward:
        output = module(*inputs)
    with FlopCounterMode(display=False) as backward:
        output.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


def matrix_flops(form: Operator) -> tuple[int, int]:
    """The same of a closed form: products alone, backward with weight gradients."""
    forward = sum(kernel.flops for kernel in form.forward if kernel.matrix)
    return forward, sum(kernel.flops for kernel in (*form.input_grad, *form.weight_grad) if kernel.matrix)


def require_equal(form: Operator, module: nn.Module, *inputs: Tensor, rel: float = 0.0) -> None:
    """Parameters and work are exact, saved bytes within ``rel``."""
    assert form.parameters == sum(parameter.numel() for parameter in module.parameters())
    assert matrix_flops(form) == flops(module, *inputs)
    assert form.saved_bytes == pytest.approx(kept(module, *inputs), rel=rel)


def image(samples: int, channels: int, side: int) -> Tensor:
    return torch.randn(samples, channels, side, side, requires_grad=True)


class CrossAttention(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(hidden)
        self.query = nn.Linear(hidden, hidden)
        self.memory = nn.Linear(hidden, 2 * hidden)
        self.project = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        samples, tokens, hidden = x.shape
        query = self.query(self.norm(x)).view(samples, tokens, self.heads, -1).transpose(1, 2)
        both = self.memory(memory).view(samples, memory.shape[1], 2, self.heads, -1)
        key, value = both.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value)
        result: Tensor = x + self.project(mixed.transpose(1, 2).reshape(samples, tokens, hidden))
        return result


class Recurrent(nn.Module):
    """An LSTM layer, written out."""

    def __init__(self, inputs: int, cells: int) -> None:
        super().__init__()
        self.of_inputs, self.of_state = nn.Linear(inputs, 4 * cells), nn.Linear(cells, 4 * cells, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        cells = self.of_state.in_features
        output, cell = x.new_zeros(x.shape[0], cells), x.new_zeros(x.shape[0], cells)
        outputs = []
        for step in self.of_inputs(x).unbind(1):
            gates = (step + self.of_state(output)).chunk(4, dim=1)
            take, forget, give = (gate.sigmoid() for gate in gates[:3])
            cell = forget * cell + take * gates[3].tanh()
            output = give * cell.tanh()
            outputs.append(output)
        return torch.stack(outputs, dim=1)


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, inner: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            *(nn.Conv2d(inputs, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU()),
            *(nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU()),
            *(nn.Conv2d(inner, outputs, 1, bias=False), nn.BatchNorm2d(outputs)),
        )
        changed = inputs != outputs or stride > 1
        short = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.short = short if changed else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.path(x) + self.short(x))


class PooledClasses(nn.Module):
    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs, classes)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.layer(x.mean((2, 3))).float(), targets, reduction="sum")


def half(module: nn.Module, *inputs: Tensor) -> tuple[nn.Module, list[Tensor]]:
    """In bfloat16, as the papers' models are."""
    taken = [
        each.detach().bfloat16().requires_grad_(each.requires_grad) if each.is_floating_point() else each
        for each in inputs
    ]
    return module.bfloat16(), taken


def test_convolutions() -> None:
    """A block that ends in pooling needs nothing of its output; one that ends in ReLU does, and counts it."""
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU()]
    form = sequence_of(
        *(convolution(2, 32, 3, 8, WIDTH), relu(2 * 32 * 32 * 8, WIDTH), convolution(2, 32, 8, 16, WIDTH)),
        *(relu(2 * 32 * 32 * 16, WIDTH), max_pool(2, 32, 16, WIDTH)),
    )
    require_equal(form, nn.Sequential(*layers, nn.MaxPool2d(2)), image(2, 3, 32))
    form = sequence_of(convolution(2, 32, 3, 8, WIDTH), relu(2 * 32 * 32 * 8, WIDTH, ends=True))
    require_equal(form, nn.Sequential(*layers[:2]), image(2, 3, 32))


@pytest.mark.parametrize(("kernel", "stride"), [(1, 1), (3, 1), (1, 2), (3, 2), (7, 2)])
def test_convolutions_with_strides(kernel: int, stride: int) -> None:
    form = sequence_of(
        convolution(2, 32, 4, 12, WIDTH, kernel=kernel, stride=stride, bias=False),
        batch_norm(2, 32 // stride, 12, WIDTH),
    )
    module = nn.Sequential(nn.Conv2d(4, 12, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(12))
    require_equal(form, module, image(2, 4, 32))


@pytest.mark.parametrize(("inputs", "outputs", "stride"), [(32, 32, 1), (16, 32, 1), (32, 64, 2)])
def test_bottlenecks(inputs: int, outputs: int, stride: int) -> None:
    form = bottleneck(16, inputs, 24, outputs, stride=stride)(2, 1)
    module, (x,) = half(Bottleneck(inputs, 24, outputs, stride), image(2, inputs, 16))
    require_equal(form, module, x, rel=6e-3)  # on the CPU a batch norm's statistics have 16 bits


def test_a_residual_networks_ends() -> None:
    stem = nn.Sequential(nn.Conv2d(3, 16, 7, 2, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    module, (x,) = half(stem, torch.randn(2, 3, 32, 32))
    require_equal(image_stem(32, 16)(2, 1), module, x, rel=6e-3)
    module, (x, targets) = half(PooledClasses(64, 40), image(8, 64, 7), torch.randint(40, (8,)))
    form = class_loss(1, 64, 40, pooled_side=7)(8, 1)
    taken = x.untyped_storage().nbytes()  # an input with a gradient is held, though the mean needs it not
    assert form.saved_bytes + taken == pytest.approx(kept(module, x, targets), abs=16)


@pytest.mark.parametrize("first", [False, True])
def test_recurrent_layers(first: bool) -> None:
    form = long_memory(5, 24, 32, first=first)(3, 1)
    module, (x,) = half(Recurrent(24, 32), torch.randn(3, 5, 24, requires_grad=not first))
    require_equal(form, module, x)


@pytest.mark.parametrize("first", [False, True])
def test_linear_layers_that_end_in_relu(first: bool) -> None:
    module, (x,) = half(nn.Sequential(nn.Linear(24, 40), nn.ReLU()), torch.randn(5, 24, requires_grad=not first))
    require_equal(dense(24, 40, first=first)(5, 1), module, x)


def test_blocks_that_end_in_relu_count_their_output_twice_inside_a_stage() -> None:
    """Their sum is too large by one such tensor for each boundary inside a stage, and exact for a block alone."""
    layers = [nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU()]
    module, (x,) = half(nn.Sequential(*layers), torch.randn(5, 24, requires_grad=True))
    block = dense(24, 24, first=False)(5, 1)
    assert 3 * block.saved_bytes == kept(module, x) + 2 * 5 * 24 * 2


class AttentionShare(nn.Module):
    """Self-attention with its norm and residual, by some of the heads; the other shares' part of the sum is missing."""

    def __init__(self, hidden: int, heads: int, shards: int) -> None:
        super().__init__()
        self.heads = heads // shards
        self.norm = nn.LayerNorm(hidden)
        self.inputs = nn.Linear(hidden, 3 * hidden // shards)
        self.project = nn.Linear(hidden // shards, hidden)

    def forward(self, x: Tensor) -> Tensor:
        samples, tokens, _ = x.shape
        three = self.inputs(self.norm(x)).view(samples, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*three).transpose(1, 2).reshape(samples, tokens, -1)
        result: Tensor = x + self.project(mixed)
        return result


class FeedForwardShare(nn.Module):
    def __init__(self, hidden: int, shards: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            *(nn.LayerNorm(hidden), nn.Linear(hidden, 4 * hidden // shards), nn.GELU()),
            nn.Linear(4 * hidden // shards, hidden),
        )

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.path(x)
        return result


@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("kind", ["attention", "ffn"])
def test_shares_of_transformer_halves(kind: str, shards: int) -> None:
    stack = Stack(1, 128, 8, 64)
    form = stack.attention(2, shards) if kind == "attention" else stack.feed_forward(2, shards)
    share = AttentionShare(128, 8, shards) if kind == "attention" else FeedForwardShare(128, shards)
    module, (x,) = half(share, torch.randn(2, 64, 128, requires_grad=True))
    assert form.parameters == sum(parameter.numel() for parameter in module.parameters())
    assert form.saved_bytes == pytest.approx(kept(module, x), rel=0.01)  # a norm's statistics have 16 bits on the CPU
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:  # fused, it counts no work on the CPU
        module(x)
    assert matrix_flops(form)[0] == counter.get_total_flops()
    assert [each.operation for each in form.forward_exchanges] == (["all_reduce"] if shards > 1 else [])


def test_perceptron() -> None:
    module = nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1))
    form = sequence_of(
        *(linear(5, 24, 40, WIDTH), relu(5 * 40, WIDTH), linear(5, 40, 40, WIDTH), relu(5 * 40, WIDTH)),
        linear(5, 40, 1, WIDTH),
    )
    require_equal(form, module, torch.randn(5, 24, requires_grad=True))


def test_cross_attention() -> None:
    samples, tokens, memory, hidden, heads = 2, 48, 80, 64, 4
    form = sequence_of(
        norm(samples * tokens, hidden, WIDTH),
        linear(samples * tokens, hidden, hidden, WIDTH),
        linear(samples * memory, hidden, 2 * hidden, WIDTH),
        attention_core(samples, tokens, memory, heads, hidden // heads, WIDTH),
        linear(samples * tokens, hidden, hidden, WIDTH),
        add(samples * tokens * hidden, WIDTH),
    )
    x = torch.randn(samples, tokens, hidden, requires_grad=True)
    encoded = torch.randn(samples, memory, hidden, requires_grad=True)
    module = CrossAttention(hidden, heads)
    assert form.saved_bytes == pytest.approx(kept(module, x, encoded), rel=0.01)
    assert form.parameters == sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("module", "form"),
    [
        (nn.GELU(), activation(6 * 32, WIDTH)),
        (nn.LayerNorm(32), norm(6, 32, WIDTH)),
        (nn.Linear(32, 7), linear(6, 32, 7, WIDTH)),
    ],
)
def test_single_operators(module: nn.Module, form: Operator) -> None:
    assert form.saved_bytes == kept(module, torch.randn(6, 32, requires_grad=True))


class Loss(nn.Module):
    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits, targets, reduction="sum")


def test_loss_and_embedding() -> None:
    logits, targets = torch.randn(64, 50, requires_grad=True), torch.randint(50, (64,))
    held = kept(Loss(), logits, targets) - logits.untyped_storage().nbytes()  # it needs not its input
    assert vocabulary_loss(64, 50, WIDTH).saved_bytes == pytest.approx(held, abs=16)  # a scalar or two beside
    table = nn.Embedding(50, 16)
    assert embedding(4, 16, 50, 16, WIDTH).saved_bytes == kept(table, torch.randint(50, (4, 16)))


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_gpt2s_shares_have_the_parameters_and_collectives_of_a_real_ones(shards: int) -> None:
    """Of transformers' GPT-2, split: float32 there, 16 bits here.

    Of the loss papers' models sum three numbers of each word, as Megatron-LM does; ours gather two of each device.
    """
    pytest.importorskip("transformers")
    sequence, hidden, vocabulary = 33, 64, 100  # odd: devices do not divide it, as papers' models have it
    text = f"GPT2Config(n_embd={hidden}, n_head=4, n_layer=1, vocab_size={vocabulary}, n_positions={sequence})"
    whole = load_model(text, sequence=sequence)
    assert whole.sharded is not None
    share = whole if shards == 1 else whole.sharded(shards)
    stack = Stack(1, hidden, 4, sequence, causal=True)
    forms = {
        "embedding": table_rows(1, shards, sequence, vocabulary, hidden, positions=sequence),
        "attention": stack.attention(1, shards),
        "ffn": stack.feed_forward(1, shards),
        "head": stack.vocabulary_head(1, shards, vocabulary, bias=False, before=None),
    }
    for block in shaped_blocks(share, 1):
        form, spec = forms[block.spec.operator], block.spec
        assert form.parameters == sum(parameter.numel() for parameter in block.module.parameters())
        for phase, exchanges in (("F", form.forward_exchanges), ("I", form.input_grad_exchanges)):
            wide = [(each.operation, each.bytes_per_sample) for each in spec.collectives if each.phase == phase]
            if spec.loss and phase == "F" and shards > 1:
                assert [(each.operation, each.array_bytes) for each in exchanges] == [("all_reduce", 12 * sequence)]
                assert wide == [("all_gather", 8 * sequence * shards)]
                continue
            assert [(each.operation, 2 * each.array_bytes) for each in exchanges] == wide
