"""Deferred weight gradients: split backward equals full backward, and equals torch's own modules."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeplan.runtime.executor.rank_program import StagePart
from pipeplan.runtime.executor.stage import MiniBatch, StageRunner
from pipeplan.runtime.models.spec import BlockSpec
from pipeplan.runtime.parallel.weight_grads import (
    DeferredEmbedding,
    DeferredLinear,
    WeightGradQueue,
    defer_weight_gradients,
    warn_if_compiled,
)
from pipeplan.runtime.training.compatibility import warn_of_waiting

WIDTH = 6


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    torch.set_num_threads(1)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


# Module shapes ---------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Embeds and projects back with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, WIDTH)
        self.project = nn.Linear(WIDTH, 10, bias=False)
        self.project.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.project(torch.tanh(self.embed(tokens)))


class Twice(nn.Module):
    """Calls one layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))


class Checkpointed(nn.Module):
    """Runs its forward again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 9), nn.GELU(), nn.Linear(9, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.inner, x, use_reentrant=False)


class Across(nn.Module):
    """Linear layers on tensors that are not contiguous, and whose gradients are expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.first(x.transpose(1, 2))
        return self.second(mixed[:, ::2]).sum(dim=(1, 2), keepdim=True).expand(-1, 4, 2)


class Attention(nn.Module):
    """torch's own attention, whose weights no Linear multiplies by."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.after = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.mix(x, x, x, need_weights=False)[0])


def frozen(module: nn.Module, *names: str) -> nn.Module:
    for name in names:
        module.get_parameter(name).requires_grad_(False)
    return module


def vectors(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(*shape)


def tokens(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(0, 10, shape)


SHAPES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (lambda: nn.Linear(WIDTH, 4), vectors(3, WIDTH)),
    "linear without bias": (lambda: nn.Linear(WIDTH, 4, bias=False), vectors(3, WIDTH)),
    "linear on one vector": (lambda: nn.Linear(WIDTH, 4), vectors(WIDTH)),
    "linear on four dimensions": (lambda: nn.Linear(WIDTH, 4), vectors(2, 3, 2, WIDTH)),
    "linear on nothing": (lambda: nn.Linear(WIDTH, 4), vectors(0, WIDTH)),
    "frozen weight": (lambda: frozen(nn.Linear(WIDTH, 4), "weight"), vectors(3, WIDTH)),
    "frozen bias": (lambda: frozen(nn.Linear(WIDTH, 4), "bias"), vectors(3, WIDTH)),
    "frozen layer": (
        lambda: nn.Sequential(nn.Linear(WIDTH, 4), frozen(nn.Linear(4, 4), "weight", "bias")),
        vectors(3, WIDTH),
    ),
    "embedding": (lambda: nn.Embedding(10, WIDTH), tokens(2, 5)),
    "embedding with padding": (lambda: nn.Embedding(10, WIDTH, padding_idx=3), tokens(4, 9)),
    "embedding with a longest norm": (lambda: nn.Embedding(10, WIDTH, max_norm=0.5), tokens(2, 5)),
    "embedding scaled by frequency": (lambda: nn.Embedding(10, WIDTH, scale_grad_by_freq=True), tokens(2, 5)),
    "perceptron": (
        lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH)),
        vectors(2, 5, WIDTH),
    ),
    "convolution": (
        lambda: nn.Sequential(nn.Conv1d(2, 3, 3, padding=1), nn.BatchNorm1d(3), nn.Linear(WIDTH, 4)),
        vectors(4, 2, WIDTH),
    ),
    "recurrent": (lambda: nn.GRUCell(WIDTH, 4), vectors(3, WIDTH)),
    "weight under a parametrization": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 4)),
        vectors(3, WIDTH),
    ),
    "tied": (Tied, tokens(2, 5)),
    "layer used twice": (Twice, vectors(3, WIDTH)),
    "checkpointed": (Checkpointed, vectors(3, WIDTH)),
    "not contiguous": (Across, vectors(3, 5, 4)),
    "attention of torch": (Attention, vectors(2, 4, WIDTH)),
}


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_(x.is_floating_point())


def outcome(module: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    return {"input": x.grad, **{name: parameter.grad for name, parameter in module.named_parameters()}}


def run(module: nn.Module, inputs: list[Tensor], *, split: bool, order: list[int]) -> list[dict[str, Tensor | None]]:
    """Forward of all micro-batches, backward of all, then W in an order: gradients so far after each."""
    leaves = [leaf(x) for x in inputs]
    outputs = [module(x) for x in leaves]
    gradients = [torch.randn(y.shape, generator=torch.Generator().manual_seed(i)) for i, y in enumerate(outputs)]
    queues = [WeightGradQueue() for _ in inputs]
    for i, (y, gradient) in enumerate(zip(outputs, gradients, strict=True)):
        if split:
            with queues[i]:
                y.backward(gradient)
        else:
            y.backward(gradient)
    for i in order:
        queues[i].run()
    return [outcome(module, x) for x in leaves]


def require_equal(found: dict[str, Tensor | None], expected: dict[str, Tensor | None], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        other = found[name]
        assert (value is None) == (other is None), name
        if value is not None and other is not None:
            torch.testing.assert_close(other, value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("shape", SHAPES)
def test_split_equals_full_equals_plain(shape: str) -> None:
    """One micro-batch: split is bitwise full, unless a weight is used twice; full is what torch computes."""
    build, sample = SHAPES[shape]
    plain, inputs = build(), [sample()]
    full, split = (defer_weight_gradients(copy.deepcopy(plain)) for _ in range(2))
    assert [name for name, _ in full.named_parameters()] == [name for name, _ in plain.named_parameters()]
    expected = run(plain, inputs, split=False, order=[0])[0]
    whole = run(full, inputs, split=False, order=[0])[0]
    parted = run(split, inputs, split=True, order=[0])[0]
    require_equal(whole, expected, 1e-12)
    require_equal(parted, whole, 1e-14 if shape in ("tied", "layer used twice") else 0)


@pytest.mark.parametrize("shape", SHAPES)
def test_micro_batches_in_flight(shape: str) -> None:
    """Several micro-batches wait for W at once, and W comes in another order."""
    build, sample = SHAPES[shape]
    plain = build()
    inputs = [sample() for _ in range(3)]
    split = defer_weight_gradients(copy.deepcopy(plain))
    expected = run(plain, inputs, split=False, order=[0, 1, 2])
    for found, wanted in zip(run(split, inputs, split=True, order=[2, 0, 1]), expected, strict=True):
        require_equal(found, wanted, 1e-12)


@pytest.mark.parametrize(
    ("shape", "deferred"),
    [
        ("linear", {"weight", "bias"}),
        ("frozen weight", {"bias"}),
        ("embedding", {"weight"}),
        ("embedding scaled by frequency", set()),
        ("perceptron", {"1.weight", "1.bias", "3.weight", "3.bias"}),
        ("convolution", {"2.weight", "2.bias"}),
        ("recurrent", set()),
        ("weight under a parametrization", set()),
        ("checkpointed", {"inner.1.weight", "inner.1.bias", "inner.3.weight", "inner.3.bias"}),
        ("attention of torch", {"after.weight", "after.bias"}),
    ],
)
def test_what_waits_for_w(shape: str, deferred: set[str]) -> None:
    """I leaves the gradients of deferred parameters alone and computes all others."""
    build, sample = SHAPES[shape]
    module, x = defer_weight_gradients(build()), leaf(sample())
    y = module(x)
    with WeightGradQueue() as queue:
        y.backward(torch.ones_like(y))
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert {name for name, parameter in trained.items() if parameter.grad is None} == deferred
    assert (len(queue) > 0) == bool(deferred)
    queue.run()
    assert all(parameter.grad is not None for parameter in trained.values())
    assert len(queue) == 0
    assert queue.held == ()


def test_bfloat16_and_autocast() -> None:
    layer = nn.Linear(WIDTH, 4, dtype=torch.float32)
    x, gradient = torch.randn(3, WIDTH, dtype=torch.float32), torch.randn(3, 4).to(torch.bfloat16)
    found = []
    for module in (layer, defer_weight_gradients(copy.deepcopy(layer))):
        given = leaf(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = module(given)
        assert y.dtype == torch.bfloat16
        with WeightGradQueue() as queue:
            y.backward(gradient)
        queue.run()
        found.append(outcome(module, given))
    assert {tensor.dtype for tensor in found[1].values() if tensor is not None} == {torch.float32}
    require_equal(found[1], found[0], 0.05)  # bfloat16 has two to three digits


def test_a_queue_holds_no_more_than_it_says() -> None:
    """The graph behind a layer's input goes with I, and so does the gradient of the stage's input."""
    module = defer_weight_gradients(nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, WIDTH)))
    x = torch.randn(3, WIDTH).requires_grad_()
    y = module(x)
    with WeightGradQueue() as queue:
        y.backward(torch.ones_like(y))
    assert x.grad is not None
    gone = weakref.ref(x.grad), weakref.ref(x)
    assert all(tensor.grad_fn is None and tensor.grad is None for tensor in queue.held)
    assert sorted(tuple(tensor.shape) for tensor in queue.held) == [(3, 5), (3, 5), (3, WIDTH), (3, WIDTH)]
    del x, y
    gc.collect()
    assert gone[0]() is None
    assert gone[1]() is None


def test_w_lets_go_as_it_works() -> None:
    queue, seen = WeightGradQueue(), []
    for _ in range(3):
        queue.put(lambda: seen.append(len(queue.held)), (torch.zeros(1),))
    queue.run()
    assert seen == [2, 1, 0]


def test_only_what_is_needed_is_saved() -> None:
    """A frozen weight needs no input, and an input without gradient needs no weight."""

    def saved(module: nn.Module, x: Tensor) -> list[tuple[int, ...]]:
        found: list[tuple[int, ...]] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (found.append(tuple(t.shape)), t)[1], lambda t: t):
            module(x)
        return found

    x = torch.randn(3, WIDTH)
    assert saved(defer_weight_gradients(nn.Linear(WIDTH, 4)), x) == [(3, WIDTH)]
    assert saved(defer_weight_gradients(frozen(nn.Linear(WIDTH, 4), "weight")), leaf(x)) == [(4, WIDTH)]
    assert saved(defer_weight_gradients(nn.Linear(WIDTH, 4)), leaf(x)) == [(3, WIDTH), (4, WIDTH)]


def test_one_queue_at_a_time() -> None:
    with WeightGradQueue() as queue:
        assert WeightGradQueue.active() is queue
        with pytest.raises(AssertionError, match="already being collected"), WeightGradQueue():
            pass
    assert WeightGradQueue.active() is None
    with pytest.raises(ValueError, match="boom"), WeightGradQueue():
        raise ValueError("boom")
    assert WeightGradQueue.active() is None


def test_subclasses_stay_what_they_are() -> None:
    class Mine(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * F.linear(input, self.weight, self.bias)

    module = defer_weight_gradients(nn.ModuleDict({"mine": Mine(2, 2), "plain": nn.Linear(2, 2)}))
    assert type(module["mine"]) is Mine
    assert type(module["plain"]) is DeferredLinear
    assert type(defer_weight_gradients(nn.Embedding(3, 2))) is DeferredEmbedding
    assert type(defer_weight_gradients(nn.Embedding(3, 2, sparse=True))) is nn.Embedding


def test_compiled_parts_are_left_whole_and_told_of() -> None:
    """Those who measure are told; stages compare with their plan."""
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    module[1] = torch.compile(module[1], backend="eager")
    defer_weight_gradients(module)
    assert type(module[0]) is DeferredLinear
    assert type(module[1]._orig_mod) is nn.Linear
    queue = WeightGradQueue()
    queue.put(lambda: None, ())  # of the first
    with pytest.warns(UserWarning, match="^block 'a' is compiled, or a part of it: weight gradients"):
        warn_if_compiled(queue, module, "block 'a'")


def test_compiled_unknowingly() -> None:
    """A converted module that is compiled later computes its weight gradients with I, and that can be noticed."""
    module = defer_weight_gradients(nn.Linear(WIDTH, WIDTH))
    run_compiled = torch.compile(module, backend="eager")
    x = torch.randn(3, WIDTH).requires_grad_()
    y = run_compiled(x)
    with WeightGradQueue() as queue:
        y.backward(torch.ones_like(y))
    assert len(queue) == 0
    assert module.weight.grad is not None
    with pytest.warns(UserWarning, match="^block 'a' is compiled"):
        warn_if_compiled(queue, module, "block 'a'")


class Raw(nn.Module):
    """Multiplies by a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.after = nn.Parameter(torch.ones(WIDTH, WIDTH)), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(x @ self.weight)


SAMPLES = 3


def size_of(module: nn.Module) -> int:
    return sum(each.numel() for each in module.parameters())


def plain() -> nn.Module:
    return defer_weight_gradients(nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize(
    ("make", "waiting", "says"),
    [
        (plain, 2 * SAMPLES * WIDTH, ""),
        (lambda: torch.compile(plain(), backend="eager"), 2 * SAMPLES * WIDTH, "leaves 0 of a micro-batch to W"),
        (lambda: torch.compile(plain(), backend="eager"), 0, ""),
        (lambda: defer_weight_gradients(Raw()), SAMPLES * (WIDTH + 2), ""),
        (lambda: defer_weight_gradients(Raw()), SAMPLES * (4 * WIDTH + 2), "and the plan expects"),
        (lambda: nn.LayerNorm(WIDTH), 0, ""),
        (lambda: frozen(plain(), "weight"), SAMPLES * WIDTH, ""),
    ],
    ids=["plain", "compiled", "compiled as profiled", "raw as profiled", "raw", "norm", "frozen"],
)
@pytest.mark.parametrize("times", [1, 2])
def test_a_stage_says_once_if_less_waits_than_the_plan_expects(
    make: Callable[[], nn.Module], waiting: int, says: str, times: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """``waiting`` are the numbers that the plan expects, in a format ``times`` as short. Gradients are right anyway."""
    module, own = make(), tuple(range(SAMPLES))
    bytes_of = {name: number * 8 // times for name, number in (("w", waiting), ("p", size_of(module)))}
    part = StagePart(
        *(0, ("a",), (False,), True, {}, {1: ("a",)}, frozenset(), frozenset({1})),
        parameter_bytes=bytes_of["p"],
        waiting_bytes=bytes_of["w"],
    )
    stage = StageRunner(part, {"a": module}, {"a": BlockSpec("a", "linear", nn.Identity, samples=("x",))})
    x = torch.randn(SAMPLES, WIDTH)
    for number in range(2):
        made = stage.forward(own, {}, MiniBatch({"x": x}, 1))
        stage.backward(number, {own: [("a", torch.ones_like(made["a"]))]})
        stage.weight_gradients(number)
    warn_of_waiting([] if stage.lack is None else [stage.lack])
    told = capsys.readouterr().err
    assert told.count("\n") == (1 if says else 0)
    assert says in told
    assert not says or told.startswith("pipeplan: warning: stage 0 (blocks 'a') ")
    split = [None if each.grad is None else each.grad.clone() for each in module.parameters()]
    module.zero_grad()
    for _ in range(2):
        module(x).sum().backward()
    for gradient, parameter in zip(split, module.parameters(), strict=True):
        assert gradient is None or torch.allclose(gradient, parameter.grad)


def test_what_many_stages_lack_is_one_warning(capsys: pytest.CaptureFixture[str]) -> None:
    lacks = [(100, 1000.0 + stage, f"stage {stage} (blocks 'b{stage}')") for stage in range(16)]
    warn_of_waiting(lacks)
    told = capsys.readouterr().err
    assert told.count("\n") == told.count("warning") == 1
    assert "stage 15 (blocks 'b15') leaves 100B" in told
    assert "(and 15 other stages leave less than half of it)" in told
    warn_of_waiting(lacks[:1])
    assert "other stages" not in capsys.readouterr().err
    warn_of_waiting(())
    assert capsys.readouterr().err == ""


def test_nothing_to_defer_is_no_cause_to_warn() -> None:
    warn_if_compiled(WeightGradQueue(), nn.LayerNorm(3), "block")
    warn_if_compiled(WeightGradQueue(), frozen(defer_weight_gradients(nn.Linear(2, 2)), "weight"), "block")
