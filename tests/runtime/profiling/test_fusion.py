"""Fused kernels: what they hold is what modules with hand-written ones hold, what they take what closed forms say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeplan.costs.devices import Kernel, device_preset
from pipeplan.costs.uniform.layer import head_of, layer_of
from pipeplan.costs.uniform.shares import catalog_shares, machine_of, shares_for, shares_reached, usual_attention
from pipeplan.costs.uniform.traced import FusedRates
from pipeplan.costs.uniform.words import Transformer, UniformLayout
from pipeplan.errors import UsageError
from pipeplan.files import CostRow, Profile
from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.models.spec import BlockSpec, Model
from pipeplan.runtime.profiling.build_profile import splits_of
from pipeplan.runtime.profiling.counting import counted
from pipeplan.runtime.profiling.estimate import estimate_model
from support.marks import slow_but

H100 = device_preset("h100-80gb")
WIDTH, WIDER, TOKENS, SAMPLES = 128, 320, 24, 2
ROWS = TOKENS * SAMPLES


class Norm(nn.Module):
    """Statistics in float32, as large models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class NormByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        ctx.save_for_backward(x, weight, scale)
        return weight * (x.float() * scale).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return gradient * weight + x, (gradient * x).sum((0, 1))


class GateByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return gradient * up, gradient * gate


class LossByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        ctx.save_for_backward(logits, targets, torch.ones(()).to(logits.device))  # and how many there are
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        logits, *_ = ctx.saved_tensors
        return logits * gradient, None


class FeedForward(nn.Module):
    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.by_hand, self.norm = by_hand, Norm()
        self.gate, self.up = (nn.Linear(WIDTH, WIDER, bias=False) for _ in range(2))
        self.down = nn.Linear(WIDER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.by_hand:
            near: Tensor = NormByHand.apply(x, self.norm.weight)
            acted: Tensor = GateByHand.apply(self.gate(near), self.up(near))
        else:
            near = self.norm(x)
            acted = F.silu(self.gate(near)) * self.up(near)
        result: Tensor = x + self.down(acted)
        return result


class Head(nn.Module):
    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.by_hand, self.product = by_hand, nn.Linear(WIDTH, WIDER, bias=False)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = self.product(x)
        if self.by_hand:
            loss: Tensor = LossByHand.apply(logits, targets)
            return loss
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def chain(*, by_hand: bool) -> Model:
    blocks = (
        BlockSpec("first", "linear", lambda: nn.Linear(WIDTH, WIDTH, bias=False), samples=("x",)),
        BlockSpec("ffn", "ffn", lambda: FeedForward(by_hand), sources=("first",)),
        BlockSpec("head", "head", lambda: Head(by_hand), sources=("ffn",), samples=("targets",)),
    )
    return Model("chain", blocks, batch, lambda _: 1)


def batch(num_samples: int, step: int, seed: int) -> dict[str, Tensor]:
    return {
        "x": torch.zeros(num_samples, TOKENS, WIDTH, dtype=torch.bfloat16),
        "targets": torch.zeros(num_samples, TOKENS, dtype=torch.int64),
    }


def estimated(model: Model, **options: Any) -> Profile:
    return estimate_model(model, (SAMPLES,), **{"device": H100, "dtype": torch.bfloat16, **options})


def rows_of(profile: Profile) -> dict[str, CostRow]:
    return {block.id: block.costs[0] for block in profile.blocks}


def works(*, fused: bool) -> dict[str, dict[str, list[Kernel]]]:
    splits = splits_of(chain(by_hand=False), (1,), torch.bfloat16, None)
    return {each.key.block: dict(each.work) for each in counted(splits, [SAMPLES], torch.bfloat16, fused=fused)}


def test_what_fused_kernels_hold_is_what_modules_with_kernels_by_hand_hold() -> None:
    found, by_hand, eager = (
        rows_of(estimated(chain(by_hand=hand), kernels=kernels))
        for hand, kernels in ((False, "fused"), (True, "eager"), (False, "eager"))
    )
    assert {name: row.activation_bytes for name, row in found.items()} == {
        name: row.activation_bytes for name, row in by_hand.items()
    }
    assert all(found[name].activation_bytes < eager[name].activation_bytes for name in ("ffn", "head"))
    assert all(found[name].weight_grad_bytes == eager[name].weight_grad_bytes for name in found)


def test_a_fused_kernel_reads_and_writes_what_is_outside_once() -> None:
    """A feed-forward block with SwiGLU, counted by hand: n of its input, f of what is wide, w of its weights."""
    n, f, w = 2 * ROWS * WIDTH, 2 * ROWS * WIDER, 2 * WIDTH * WIDER
    scale, weight = 4 * ROWS, 2 * WIDTH
    found = works(fused=True)["ffn"]
    moved = {phase: [kernel.moved_bytes for kernel in kernels] for phase, kernels in found.items()}
    product = n + w + f
    assert moved["forward_ns"] == [n + weight + n + scale, product, product, 2 * f + f, product, 2 * n + n]
    assert moved["weight_grad_ns"] == [product + w] * 3, "a gradient that is there is added to by the product itself"
    first, gates, second, third, norm = moved["input_grad_ns"]
    assert (first, gates, second) == (product, 3 * f + 2 * f, product)
    assert third == product + n, "what two products find of one input is added by the second"
    assert norm == 3 * n + scale + 3 * weight + n, "two gradients and its input; the weight, its gradient both ways"


def test_products_are_the_same_fused_or_not() -> None:
    eager, fused = works(fused=False), works(fused=True)
    for block, phases in eager.items():
        for phase, kernels in phases.items():
            products = [[each.product for each in some if each.matrix] for some in (kernels, fused[block][phase])]
            assert products[0] == products[1]
            assert sum(each.moved_bytes for each in fused[block][phase] if not each.matrix) <= sum(
                each.moved_bytes for each in kernels if not each.matrix
            )


def test_recomputed_blocks_hold_their_inputs_alone() -> None:
    profile = estimated(chain(by_hand=False), recompute=True)
    rows = {row.recompute: row for block in profile.blocks if block.id == "ffn" for row in block.costs}
    assert rows[True].activation_bytes == 2 * ROWS * WIDTH


LLAMA = (
    "LlamaConfig(hidden_size=4096, intermediate_size=14336, num_hidden_layers=1, num_attention_heads=32, "
    "num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192)"
)
NEOX = "GPTNeoXConfig(hidden_size=6144, intermediate_size=24576, num_hidden_layers=1, num_attention_heads=48)"
MIXTRAL = (
    "MixtralConfig(hidden_size=4096, intermediate_size=14336, num_hidden_layers=1, num_attention_heads=32, "
    "num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2, vocab_size=32000)"
)
LAYERS: dict[str, tuple[str, Transformer]] = {
    "llama": (LLAMA, Transformer(1, 4096, 32, 8, 128, 14336, 1, 128256, 0, 4096)),
    "neox": (NEOX, Transformer(1, 6144, 48, 48, 128, 24576, 0, 50432, 0, 2048)),
    "mixtral": (
        MIXTRAL,
        Transformer(1, 4096, 32, 8, 128, 0, 1, 32000, 0, 4096, experts=8, top_k=2, moe_ffn=14336),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_layers_take_what_closed_forms_of_published_runs_say(name: str) -> None:
    """Within 4 %, and hold what they say within 15 %: biases and rotations, and words of experts, are traced alone."""
    pytest.importorskip("transformers")
    text, said = LAYERS[name]
    model = load_model(text, sequence=said.sequence, grain="layer", meta=True)
    profile = estimate_model(model, (1,), device=H100, dtype=torch.bfloat16)
    (row,) = (block.costs[0] for block in profile.blocks if "layers" in block.id)
    shares, kernel = shares_for(H100.name, catalog_shares()), usual_attention(H100)
    machine = machine_of(H100, shares, kernel, node=8, link_bytes_per_s=1e9, adapter_bytes_per_s=1e9)
    layout = UniformLayout(1, 1, 1, 1, 1, 1, 1, attention=kernel)
    whole = layer_of(said, layout, machine).whole
    assert row.forward_ns == pytest.approx(whole.forward_ns, rel=0.04)
    assert row.forward_ns + row.backward_ns == pytest.approx(whole.forward_ns + whole.backward_ns, rel=0.04)
    assert row.activation_bytes == pytest.approx(whole.saved_bytes, rel=0.15)
    head, own = head_of(said, layout, machine), profile.blocks[-1].costs[0]
    assert own.forward_ns + own.backward_ns < head.forward_ns + head.backward_ns, "the closed form's loss is not fused"


@pytest.mark.parametrize(
    ("device", "asked", "eager"),
    [("h100-80gb", None, False), ("cpu", None, True), ("h100-80gb", "eager", True), ("cpu", "fused", False)],
)
def test_accelerators_have_fused_kernels_unless_asked(device: str, asked: str | None, eager: bool) -> None:
    profile = estimated(chain(by_hand=False), device=device_preset(device), kernels=asked)
    assert profile.source.notes is not None
    assert ("operator by operator" in profile.source.notes) == eager
    assert ("Kernels are fused" in profile.source.notes) == (not eager)


def test_devices_without_published_runs_keep_their_own_curves() -> None:
    """A product takes its whole tiles, at what the processor's curve ends at."""
    cpu = device_preset("cpu")
    rates = FusedRates.of(cpu, shares_reached(cpu))
    product = Kernel(2 * 256**3, 0, matrix=True, product=(256, 256, 256, 1))
    assert rates.kernel_ns(product) == pytest.approx(1e9 * product.flops / (cpu.matrix_flops_per_s * 0.8))
    model = chain(by_hand=False)
    found, slower = (
        rows_of(estimated(model, device=cpu, kernels=kernels, dtype=torch.float32)) for kernels in ("fused", "eager")
    )
    assert found["ffn"].activation_bytes < slower["ffn"].activation_bytes


def test_what_was_measured_calibrates_operators_alone() -> None:
    measured = estimated(chain(by_hand=False))
    with pytest.raises(UsageError, match="--kernels fused: what was measured ran operator by operator"):
        estimated(chain(by_hand=False), kernels="fused", calibration=measured)


MODELS: dict[str, Callable[[], Model]] = {
    "gpt2": lambda: load_model("gpt2-tiny"),
    "mt5": lambda: load_model(
        "MT5Config(d_model=32, num_layers=1, num_heads=2, d_kv=16, d_ff=64, vocab_size=64)", sequence=8
    ),
}


@slow_but("name", list(MODELS), lambda name: name == "gpt2")
def test_fused_blocks_never_hold_more(name: str) -> None:
    """Nor beside what they hold, where that is counted with it."""
    eager, fused = (
        rows_of(estimated(MODELS[name](), kernels=kernels, dtype=torch.float32)) for kernels in ("eager", "fused")
    )
    for block, row in fused.items():
        other = eager[block]
        assert row.activation_bytes <= other.activation_bytes
        assert row.activation_bytes + row.workspace_bytes <= 1.5 * (other.activation_bytes + other.workspace_bytes)
