"""Blocks split over devices, without a plan: shares of parameters, and layers whose shares make what the whole does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pipeplan.errors import UsageError
from pipeplan.runtime.models.spec import BlockSpec, Model
from pipeplan.runtime.parallel import Share
from pipeplan.runtime.parallel.sharding import Cut, ParameterPart, Shards, Slice, Split, share_of
from pipeplan.runtime.parallel.split_layers import RowLinear, WordEmbedding, cross_entropy
from pipeplan.runtime.parallel.weight_grads import WeightGradQueue, defer_weight_gradients
from pipeplan.runtime.profiling.instruments import saved_tensors
from pipeplan.workload.mesh import Mesh
from runtime_support.threads import joined, together
from support.marks import some_of

WORDS, WIDTH = 11, 6


class Perceptron(nn.Module):
    """Two layers with a norm before them; the inner width is split."""

    def __init__(self, shards: Shards = Shards()) -> None:  # noqa: B008 - frozen
        super().__init__()
        begin, end = shards.range(12)
        self.shards = shards
        self.norm = nn.LayerNorm(WIDTH)
        self.expand = nn.Linear(WIDTH, end - begin)
        self.project = RowLinear(12, WIDTH, shards)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.project(torch.tanh(self.expand(self.shards.shared(self.norm(x)))))
        return result


class Words(nn.Module):
    """A lookup, and a loss over the same words with a table of its own."""

    def __init__(self, shards: Shards = Shards()) -> None:  # noqa: B008 - frozen
        super().__init__()
        begin, end = shards.range(WORDS)
        self.shards = shards
        self.table = WordEmbedding(WORDS, WIDTH, shards, std=1.0)
        self.output = nn.Linear(WIDTH, end - begin, bias=False)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        logits = self.output(self.shards.shared(x + self.table(words)))
        return cross_entropy(logits, words.roll(1, 0), WORDS, self.shards).sum()


class Slices(nn.Module):
    """Makes slices of its output, which are put side by side."""

    def __init__(self, shards: Shards = Shards()) -> None:  # noqa: B008 - frozen
        super().__init__()
        self.shards = shards
        self.layer = nn.Linear(WIDTH, 12 // shards.count)

    def forward(self, x: Tensor) -> Tensor:
        return self.shards.gathered(self.layer(self.shards.shared(x)))


LAYERS: dict[str, tuple[type[nn.Module], dict[str, Cut]]] = {
    "perceptron": (Perceptron, {"expand.weight": Cut(), "expand.bias": Cut(), "project.weight": Cut(1)}),
    "words": (Words, {"table.weight": Cut(even=False), "output.weight": Cut(even=False)}),
    "slices": (Slices, {"layer.weight": Cut(), "layer.bias": Cut()}),
}


def ran(module: nn.Module, *, split: bool) -> dict[str, Tensor]:
    """Output, and the gradients of input and parameters, of one pass with made-up gradients."""
    x = torch.randn(5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    inputs = (x, torch.tensor([0, 10, 4, 5, 10])) if isinstance(module, Words) else (x,)
    made = module(*inputs)
    queue = WeightGradQueue()
    if split:
        with queue:
            made.backward(torch.cos(made.detach()))
        assert len(queue) > 0
        queue.run()
    else:
        made.backward(torch.cos(made.detach()))
    found = {"output": made.detach(), "input": x.grad}
    return found | {name: parameter.grad for name, parameter in module.named_parameters()}  # type: ignore[dict-item]


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("name", list(LAYERS))
def test_shares_make_what_the_whole_makes(name: str, count: int) -> None:
    """Outputs and gradients of every share, to rounding; weight gradients wait for W."""
    build, cuts = LAYERS[name]
    whole = defer_weight_gradients(build().double())

    def share(shards: Shards) -> dict[str, Tensor]:
        slices = {key: ParameterPart((Slice(cut, shards.count, shards.index),)) for key, cut in cuts.items()}
        module = share_of(whole, build(shards).double(), lambda key: slices.get(key, ParameterPart()))
        return ran(defer_weight_gradients(module), split=True)

    found, expected = together(count, share), ran(whole, split=False)
    for key, value in expected.items():
        shares = [each[key] for each in found]
        for each in [joined(cuts[key], shares)] if key in cuts else shares:
            torch.testing.assert_close(each, value, atol=1e-13, rtol=0)


@pytest.mark.parametrize("flat", [False, True])
def test_products_keep_the_slice_of_what_was_joined(flat: bool) -> None:
    """And gather it again for their weight's gradient, also where they take it as rows."""
    whole = defer_weight_gradients(nn.Linear(WIDTH, 3).double())
    x = torch.randn(2, 4, WIDTH, dtype=torch.float64)

    def share(shards: Shards) -> tuple[Tensor | None, Tensor | None, int]:
        module = defer_weight_gradients(nn.Linear(WIDTH, 3).double())
        module.load_state_dict(whole.state_dict())
        own = x.chunk(2, 1)[shards.index].clone().requires_grad_()
        with saved_tensors() as saved, WeightGradQueue() as queue:
            made = shards.joined(2 * own)
            made = module(made.flatten(0, 1) if flat else made)
            kept = max(tensor.numel() for tensor in saved())
            made.cos().sum().backward()
        queue.run()
        return own.grad, module.weight.grad, kept

    given = x.clone().requires_grad_()
    whole(2 * given).cos().sum().backward()
    found = together(2, share)
    assert {kept for _, _, kept in found} == {x.numel() // 2}
    torch.testing.assert_close(torch.cat([each for each, _, _ in found], 1), 2 * given.grad)  # type: ignore[arg-type, operator]  # are there
    for _, weight, _ in found:
        torch.testing.assert_close(weight, whole.weight.grad)


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 12), st.integers(0, 1))
@settings(max_examples=some_of(60))
def test_shares_of_a_parameter_join_to_it(count: int, parts: int, more: int, dimension: int) -> None:
    """Of equal and unequal shares; what cannot be shared evenly is refused, with the numbers."""
    size = count + more
    whole = torch.arange(6 * size * parts).reshape((size * parts, 6) if dimension == 0 else (6, size * parts))
    cut = Cut(dimension, parts, even=False)
    shares = [cut.cut(whole, count, index) for index in range(count)]
    assert torch.equal(joined(cut, shares), whole)
    sizes = {share.shape[dimension] for share in shares}
    assert max(sizes) - min(sizes) <= parts
    if size % count:
        with pytest.raises(UsageError, match=rf"has {size}.* devices cannot share evenly"):
            Cut(dimension, parts).cut(whole, count, 0)


@given(st.integers(1, 5), st.integers(5, 40), st.randoms(use_true_random=False))
@settings(max_examples=some_of(40))
def test_loss_over_split_words_is_that_of_all(count: int, words: int, random: object) -> None:
    """Also where nothing is to be predicted; values and gradients of the logits."""
    generator = torch.Generator().manual_seed(count * 100 + words)
    logits = 8 * torch.randn(2, 7, words, dtype=torch.float64, generator=generator)
    targets = torch.randint(words, (2, 7), generator=generator)
    targets[0, 3] = -100
    whole = logits.clone().requires_grad_()
    expected = F.cross_entropy(whole.flatten(0, 1), targets.flatten(), reduction="none").view(2, 7)
    expected.sum().backward()

    def share(shards: Shards) -> tuple[Tensor, Tensor | None]:
        begin, end = shards.range(words)
        own = logits[..., begin:end].clone().requires_grad_()
        losses = cross_entropy(own, targets, words, shards)
        losses.sum().backward()
        return losses.detach(), own.grad

    found = together(count, share)
    for losses, _ in found:
        torch.testing.assert_close(losses, expected.detach(), atol=1e-12, rtol=0)
    gradients = torch.cat([gradient for _, gradient in found if gradient is not None], -1)
    torch.testing.assert_close(gradients, whole.grad, atol=1e-12, rtol=0)


def model_of(build: Callable[[], nn.Module], split: Split | None) -> Model:
    return Model("m", (BlockSpec("a", "x", build, split=split, loss=True),), lambda n, s, d: {}, len)


def test_what_cannot_be_split_is_refused_with_its_name() -> None:
    build, cuts = LAYERS["slices"]
    with pytest.raises(UsageError, match="block 'a' of model 'm' cannot be split over 2 devices: it does not say how"):
        model_of(build, None).require_splittable("a", Mesh((("shards", 2),)))
    model_of(build, Split(build, cuts)).require_splittable("a", Mesh((("shards", 4),)))
    with pytest.raises(UsageError, match=r"parameter 'layer.weight' of shape .* has 12 .* 5 devices"):
        model_of(build, Split(build, cuts)).require_splittable("a", Mesh((("shards", 5),)))
    with pytest.raises(UsageError, match=r"parameter 'layer.bias' of a share has shape \[6\], and its cut is \[12\]"):
        model_of(build, Split(build, {"layer.weight": Cut()})).require_splittable("a", Mesh((("shards", 2),)))
    with pytest.raises(UsageError, match=r"other parameters than the whole block, such as 'expand\.bias'"):
        model_of(build, Split(Perceptron, cuts)).require_splittable("a", Mesh((("shards", 2),)))


def test_a_share_has_parts_of_the_seeds_parameters() -> None:
    build, cuts = LAYERS["perceptron"]
    model = model_of(build, Split(build, cuts))
    whole = model.build("a", 3).state_dict()
    shares = [model.build_share(Share("a", index, (0, 1, 2)), 3, Shards(3, index)).state_dict() for index in range(3)]
    for name, value in whole.items():
        found = [share[name] for share in shares]
        assert all(torch.equal(each, value) for each in ([joined(cuts[name], found)] if name in cuts else found))
    assert torch.equal(model.build_share(Share("a"), 3, Shards()).state_dict()["expand.weight"], whole["expand.weight"])
