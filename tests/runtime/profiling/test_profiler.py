"""Measured profiles: what is in them, what their memory figures mean, and what happens when a block fails."""

from __future__ import annotations

import json
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeplan.cli.main import main
from pipeplan.costs import state_of
from pipeplan.costs.stages import can_split, stage_costs
from pipeplan.errors import ExecutionError, FileError, InfeasibleError, UsageError
from pipeplan.files import CostRow, Profile, Recipe, parse, read_profile, to_json
from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.models.spec import BlockSpec, Model
from pipeplan.runtime.parallel import device
from pipeplan.runtime.parallel.weight_grads import WeightGradQueue
from pipeplan.runtime.profiling.build_profile import block_graph_of
from pipeplan.runtime.profiling.instruments import meter_for, saved_tensors, storages
from pipeplan.runtime.profiling.measure import profile_model
from pipeplan.workload.kinds import GRADIENTS, OPTIMIZER, PARAMETERS, MemoryBytes
from support.marks import one_in
from support.paths import ROOT

WIDTH = 8
FLOAT = 4


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def chain(*modules: Callable[[], nn.Module], operators: str = "", tied: Any = ()) -> Model:
    """Blocks a, b, c, ... one after another on vectors of WIDTH numbers, all of operator ``layer``."""
    ids = "abcdefgh"[: len(modules)]
    blocks = tuple(
        BlockSpec(
            id_,
            dict(zip(ids, operators, strict=False)).get(id_, "layer"),
            build,
            sources=(ids[index - 1],) if index else (),
            samples=() if index else ("x",),
        )
        for index, (id_, build) in enumerate(zip(ids, modules, strict=True))
    )
    return Model("chain", blocks, vectors, lambda batch: 1, tied)


def vectors(num_samples: int, step: int, seed: int) -> dict[str, Tensor]:
    return {"x": torch.randn(num_samples, WIDTH, generator=torch.Generator().manual_seed(seed + step))}


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def measure(model: Model, sizes: tuple[int, ...] = (1,), **options: Any) -> Profile:
    return profile_model(model, sizes, **{"repeats": 1, "warmup": 0, **options})


def row_of(profile: Profile, id_: str, size: int = 1) -> CostRow:
    (block,) = (block for block in profile.blocks if block.id == id_)
    (row,) = (row for row in block.costs if row.microbatch_size == size)
    return row


# What is in a profile --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny() -> Profile:
    torch.set_num_threads(1)
    return profile_model(load_model("gpt2-tiny"), [4, 1, 2, 1], repeats=3, warmup=1)


def test_blocks_and_edges(tiny: Profile) -> None:
    model = load_model("gpt2-tiny")
    assert tiny.name == "gpt2-tiny"
    assert tiny.step_bytes_per_s is not None
    assert [block.id for block in tiny.blocks] == [block.id for block in model.blocks]
    assert [(edge.source, edge.target) for edge in tiny.edges] == list(model.edges)
    assert {(edge.bytes_per_sample, edge.gradient, edge.broadcast) for edge in tiny.edges} == {
        (16 * 32 * FLOAT, True, False)
    }
    assert {block.operator: block.dimensions for block in tiny.blocks} == {
        "embedding": {"sequence": 16, "hidden": 32, "vocabulary": 64},
        "attention": {"sequence": 16, "hidden": 32, "heads": 2},
        "ffn": {"sequence": 16, "hidden": 32, "ffn": 128},
        "head": {"sequence": 16, "hidden": 32, "vocabulary": 64},
    }
    assert parse(to_json(tiny), Profile) == tiny


def test_parameters(tiny: Profile) -> None:
    by_id = {block.id: block for block in tiny.blocks}
    hidden = 32
    assert by_id["embedding"].parameters == (64 + 16) * hidden
    assert by_id["layer1.attention"].parameters == 4 * hidden * hidden + 4 * hidden + 2 * hidden
    assert by_id["head"].parameters == 64 * hidden + 2 * hidden
    assert tiny.recipe == Recipe(name="fp32")
    assert not any(block.frozen_parameters or block.stated for block in tiny.blocks)
    (table,) = tiny.tied
    assert (table.name, table.blocks) == ("embedding.token.weight", ("embedding", "head"))
    assert table.parameters == 64 * hidden


def test_rows(tiny: Profile) -> None:
    assert tiny.microbatch_sizes == (1, 2, 4)
    assert can_split(tiny)
    for block in tiny.blocks:
        assert [row.microbatch_size for row in block.costs] == [1, 2, 4]
        for row in block.costs:
            assert row.repeats == 3
            assert min(row.forward_ns, row.backward_ns or 0, row.input_grad_ns or 0, row.weight_grad_ns or 0) > 0
            assert set(row.spread) == {"forward_ns", "backward_ns", "input_grad_ns", "weight_grad_ns"}
    halves = {block.operator: block.costs for block in tiny.blocks}
    for block in tiny.blocks:  # one attention and one ffn are measured, for all
        assert block.costs == halves[block.operator]


def test_where_it_comes_from(tiny: Profile) -> None:
    source = tiny.source
    assert (source.method, source.dtype) == ("measured", "float32")
    assert source.device.endswith(", 1 thread")
    assert source.versions["torch"] == torch.__version__
    assert set(source.versions) == {"pipeplan", "python", "torch"}
    assert len(source.date) == 10
    assert "layer0.attention for 4 blocks, layer0.ffn for 4 blocks" in source.notes
    assert "Median of 3 runs after 1 to warm up" in source.notes


@one_in(2, "dtype", [torch.float64, torch.bfloat16], first=1)
def test_other_number_formats(dtype: torch.dtype) -> None:
    found = measure(load_model("gpt2-tiny"), dtype=dtype)
    size = torch.empty(0, dtype=dtype).element_size()
    assert found.source.dtype == str(dtype).removeprefix("torch.")
    assert {edge.bytes_per_sample for edge in found.edges} == {16 * 32 * size}
    assert found.recipe.name == {"float64": "custom", "bfloat16": "bf16"}[found.source.dtype]
    assert found.blocks[0].parameters == (64 + 16) * 32
    kept = MemoryBytes({PARAMETERS: size, GRADIENTS: size, OPTIMIZER: 2 * size})
    assert state_of(found.blocks[0], found.recipe) == kept * ((64 + 16) * 32)
    assert row_of(found, "layer0.ffn").weight_grad_bytes == 10 * 16 * 32 * size


# Which blocks are alike ------------------------------------------------------------------------------------------


def kinds(model: Model) -> dict[str, list[str]]:
    """Blocks by the first of those that are alike."""
    found: dict[str, list[str]] = {}
    for block in block_graph_of(model, torch.float32).blocks:
        found.setdefault(block.kind, []).append(block.spec.id)
    return found


def test_alike_are_equal_blocks_with_equal_inputs() -> None:
    def frozen() -> nn.Module:
        return linear().requires_grad_(False)

    assert kinds(chain(linear, linear, linear)) == {"a": ["a"], "b": ["b", "c"]}  # a's input needs no gradient
    assert kinds(chain(frozen, frozen, linear, linear)) == {
        "a": [
            "a",
        ],
        "b": ["b"],
        "c": ["c"],
        "d": ["d"],
    }
    assert kinds(chain(linear, linear, linear, operators="xyz")) == {"a": ["a"], "b": ["b"], "c": ["c"]}

    def wide() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH))

    def wider() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH))

    assert kinds(chain(linear, wide, wider, wide)) == {"a": ["a"], "b": ["b", "d"], "c": ["c"]}
    assert kinds(chain(linear, nn.ReLU, nn.GELU, nn.GELU)) == {"a": ["a"], "b": ["b"], "c": ["c", "d"]}


def test_dimensions_tell_blocks_apart() -> None:
    blocks = [BlockSpec("a", "layer", linear, samples=("x",))]
    blocks += [
        BlockSpec(id_, "layer", linear, sources=("a",), dimensions={"window": window})
        for id_, window in (("b", 1), ("c", 2), ("d", 1))
    ]
    assert kinds(Model("windows", tuple(blocks), vectors, lambda batch: 1)) == {"a": ["a"], "b": ["b", "d"], "c": ["c"]}


class Bias(nn.Module):
    """Makes one tensor for all samples, from a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * 2


class Add(nn.Module):
    def forward(self, *inputs: Tensor) -> Tensor:
        return sum(inputs[1:], inputs[0])


def test_edges_of_a_graph() -> None:
    """Shared by all samples, without gradient, and used twice."""
    blocks = (
        BlockSpec("bias", "bias", Bias, samples=("x",)),
        BlockSpec("given", "given", nn.Identity, samples=("x",)),
        BlockSpec("join", "add", Add, sources=("given", "bias", "given")),
        BlockSpec("end", "linear", linear, sources=("join",)),
    )
    found = measure(Model("graph", blocks, vectors, lambda batch: 1), (2, 5))
    assert [
        (edge.source, edge.target, edge.bytes_per_sample, edge.gradient, edge.broadcast) for edge in found.edges
    ] == [
        ("given", "join", WIDTH * FLOAT, False, False),
        ("bias", "join", WIDTH * FLOAT, True, True),
        ("join", "end", WIDTH * FLOAT, True, False),
    ]
    given = row_of(found, "given", 5)
    assert (given.activation_bytes, given.weight_grad_bytes) == (0, 0)


def test_frozen_parameters_need_neither_gradient_nor_optimizer() -> None:
    def build() -> nn.Module:
        module = nn.Sequential(linear(), linear())
        module[0].requires_grad_(False)
        return module

    (block,) = measure(chain(build)).blocks
    half = WIDTH * WIDTH + WIDTH
    assert (block.parameters, block.frozen_parameters) == (half, half)
    assert state_of(block, Recipe(name="fp32")) == MemoryBytes(
        {PARAMETERS: 2 * FLOAT * half, GRADIENTS: FLOAT * half, OPTIMIZER: 2 * FLOAT * half}
    )


# Memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 4])
def test_what_gpt2_holds(tiny: Profile, size: int) -> None:
    """In tensors of [samples, sequence, hidden]; mean and deviation of a norm are one number per token.

    F of attention: input, normed, query, key and value, mixed; a logarithm per token and head. F of ffn: input,
    normed, expanded (4) and activated (4). W: inputs and output gradients of the two linear layers of each.
    """
    tokens = size * 16
    wide, one, index = tokens * 32 * FLOAT, tokens * FLOAT, tokens * 8
    attention, ffn = row_of(tiny, "layer0.attention", size), row_of(tiny, "layer0.ffn", size)
    assert attention.activation_bytes == 6 * wide + 2 * one + 2 * one
    assert attention.weight_grad_bytes == (1 + 3 + 1 + 1) * wide
    assert ffn.activation_bytes == 10 * wide + 2 * one
    assert ffn.weight_grad_bytes == (1 + 4 + 4 + 1) * wide
    head = row_of(tiny, "head", size)
    logits = tokens * 64 * FLOAT
    assert head.weight_grad_bytes == wide + logits
    # input, normed, log-probabilities, targets; the batch's tensors may be views of something a little larger
    assert 0 <= head.activation_bytes - (2 * wide + 2 * one + logits + index) <= size * 8 + 16
    embedding = row_of(tiny, "embedding", size)
    assert 0 <= embedding.activation_bytes - (index + 16 * 8) <= size * 8
    # the gradient of tokens, that of positions (summed over samples), and the indices
    assert 0 <= embedding.weight_grad_bytes - (wide + 16 * 32 * FLOAT + index + 16 * 8) <= size * 8


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "perceptron": lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)),
    "convolution": lambda: nn.Sequential(nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 2, 3, padding=1), nn.Flatten()),
    "softmax": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Softmax(-1)),
    "dropout": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH)),
    "recurrent": lambda: nn.GRUCell(WIDTH, WIDTH),
}


@one_in(2, "kind", BLOCKS, first=1)
def test_held_bytes_are_those_of_the_allocator(kind: str) -> None:
    """Counted from what autograd saves; here against what was allocated and not given back."""
    model, size = chain(linear, BLOCKS[kind]), 64
    row = row_of(measure(model, (size,)), "b", size)
    module, given = model.build("b", 0), torch.randn(size, WIDTH)
    module(given).sum().backward()  # parameters have gradients from here on
    gradient, queue = torch.randn(size, WIDTH), WeightGradQueue()
    with meter_for(torch.device("cpu")) as meter:
        x = given.detach().requires_grad_()
        output = module(x)
        root = torch.autograd.graph.get_gradient_edge(output)
        del output
        with meter.phase("after F"):
            pass
        with queue:
            torch.autograd.backward([root], [gradient])
        del root, x
        with meter.phase("after I"):
            pass
        queue.run()
    assert row.activation_bytes == meter.usage["after F"].start + given.nbytes
    # of the tensors that were there before, W may need the input and the gradient of the output
    outside = row.weight_grad_bytes - meter.usage["after I"].start
    assert outside in (0, given.nbytes, gradient.nbytes, given.nbytes + gradient.nbytes)


def test_stages_add_up() -> None:
    """A stage holds what its blocks hold: no tensor between them is missed or counted twice."""
    half = BLOCKS["perceptron"]
    apart = measure(chain(linear, half, half, half), (16,))
    whole = measure(chain(linear, lambda: nn.Sequential(half(), half(), half())), (16,))
    stage = stage_costs(apart, ["b", "c", "d"], 16)
    assert stage.activation_bytes == row_of(whole, "b", 16).activation_bytes
    assert stage.weight_grad_bytes == row_of(whole, "b", 16).weight_grad_bytes
    assert stage.state[PARAMETERS] == FLOAT * whole.blocks[1].parameters


class Scratch(nn.Module):
    """Takes memory for a moment, in the forward or in the backward."""

    def __init__(self, forward: int, backward: int) -> None:
        super().__init__()
        self.layer, self.sizes = linear(), (forward, backward)

    def forward(self, x: Tensor) -> Tensor:
        take(self.sizes[0])
        y = self.layer(x)
        if y.requires_grad and y.device.type != "meta":
            y.register_hook(lambda gradient: take(self.sizes[1]))
        return y


def take(size: int) -> None:
    torch.zeros(size, dtype=torch.uint8)


MEGABYTE = 1_000_000


@pytest.mark.parametrize(("forward", "backward"), [(MEGABYTE, 0), (0, MEGABYTE), (0, 0)])
def test_workspace_is_what_running_takes(forward: int, backward: int) -> None:
    row = row_of(measure(chain(linear, lambda: Scratch(forward, backward)), (16,)), "b", 16)
    tensor = 16 * WIDTH * FLOAT
    outside = 2 * tensor + 2 * FLOAT * (WIDTH * WIDTH + WIDTH)  # of outputs and gradients
    assert max(forward, backward) <= row.workspace_bytes <= max(forward, backward) + outside


class ScratchInW(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        queue = WeightGradQueue.active()
        if queue is not None:
            queue.put(lambda: take(MEGABYTE), ())
        return gradient


def test_workspace_of_w_counts() -> None:
    class Block(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.device.type == "meta" else ScratchInW.apply(x)

    assert MEGABYTE <= row_of(measure(chain(linear, Block)), "b").workspace_bytes < 1.1 * MEGABYTE


def test_workspace_has_the_output_and_the_gradients() -> None:
    """B of one linear layer: both its gradients, input and output, less nothing; F's output is smaller than that."""
    row = row_of(measure(chain(linear, lambda: nn.Linear(WIDTH, 100, bias=False)), (50,)), "b", 50)
    assert row.activation_bytes == 50 * WIDTH * FLOAT
    weight, given, made = 100 * WIDTH * FLOAT, 50 * WIDTH * FLOAT, 50 * 100 * FLOAT
    assert row.workspace_bytes == made + given + weight


def test_tensors_that_backward_does_not_need_are_not_counted() -> None:
    class Discards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = linear()

        def forward(self, x: Tensor) -> Tensor:
            torch.tanh(self.layer(x))  # saved for a backward that nobody can call
            return self.layer(x)

    assert row_of(measure(chain(linear, Discards), (4,)), "b", 4).activation_bytes == 4 * WIDTH * FLOAT


def test_saved_tensors_are_those_that_live() -> None:
    x = torch.randn(3, requires_grad=True)
    with saved_tensors() as saved:
        y = (x * 2).exp()
    assert list(storages(saved())) == [y.untyped_storage()._cdata]
    y.sum().backward()
    assert saved() == []
    gone = weakref.ref(y)
    del y
    assert gone() is None


# Times -----------------------------------------------------------------------------------------------------------

FORWARD, INPUT_GRAD, WEIGHT_GRAD = 5, 50, 200


class Clock:
    """Stands still but where a block says that time has passed."""

    def __init__(self) -> None:
        self.now = 0

    def monotonic_ns(self) -> int:
        return self.now

    def pass_by(self, nanoseconds: int) -> None:
        self.now += nanoseconds


CLOCK = Clock()


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        CLOCK.pass_by(FORWARD)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        CLOCK.pass_by(INPUT_GRAD)
        queue = WeightGradQueue.active()
        if queue is None:
            CLOCK.pass_by(WEIGHT_GRAD)
        else:
            queue.put(lambda: CLOCK.pass_by(WEIGHT_GRAD), ())
        return gradient


class SlowBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.device.type == "meta" else Slow.apply(self.layer(x))


def test_times_are_of_the_right_action(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "time", CLOCK)
    row = row_of(measure(chain(linear, SlowBlock), repeats=3), "b")
    assert (row.forward_ns, row.backward_ns) == (FORWARD, INPUT_GRAD + WEIGHT_GRAD)
    assert (row.input_grad_ns, row.weight_grad_ns) == (INPUT_GRAD, WEIGHT_GRAD)


def test_median_and_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warm-up runs are dropped; the spread is the interquartile range over the median."""
    runs = [[9999] * 4, [10, 100, 30, 7], [50, 300, 30, 7], [20, 200, 30, 7], [40, 500, 30, 7], [30, 400, 90, 7]]
    ticks = (tick for durations in runs for duration in durations for tick in (0, 0, *[duration] * 3))
    monkeypatch.setattr(device, "time", SimpleNamespace(monotonic_ns=lambda: next(ticks)))
    monkeypatch.setattr("pipeplan.runtime.profiling.measure.measured_rate", lambda *_, **__: None)
    row = row_of(measure(chain(linear), repeats=5, warmup=1), "a")
    assert (row.forward_ns, row.backward_ns, row.input_grad_ns, row.weight_grad_ns) == (30, 300, 30, 7)
    assert row.repeats == 5
    assert row.spread == {
        "forward_ns": pytest.approx((40 - 20) / 30, abs=1e-4),
        "backward_ns": pytest.approx((400 - 200) / 300, abs=1e-4),
        "input_grad_ns": 0,
        "weight_grad_ns": 0,
    }


def test_runs_take_turns() -> None:
    told: list[tuple[int, int, str]] = []
    measure(chain(linear, nn.GELU), (1, 3), repeats=2, warmup=1, progress=lambda *each: told.append(each))
    turn = [f"block {id_!r} at micro-batch size {size}" for size in (1, 3) for id_ in "ab"]
    assert told == [(index, 16, turn[index % 4]) for index in range(16)]


@pytest.mark.parametrize("written", [None, "", '{"traceEvents": ['])
def test_a_full_disk_is_no_fault_of_a_block(written: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch's profiler cannot write what it saw it writes a part, or nothing, and does not say so."""

    def export(_: object, path: str) -> None:
        if written is not None:
            Path(path).write_text(written)

    monkeypatch.setattr("torch.profiler.profile.export_chrome_trace", export)
    with pytest.raises(FileError, match="what torch's profiler saw cannot be written there; make room"):
        profile_model(load_model("gpt2-tiny"), (1,), repeats=1, warmup=0)


def test_a_compiled_block_is_told_of() -> None:
    """What it computes with I cannot wait for W."""

    def build() -> nn.Module:
        return torch.compile(nn.Sequential(linear()), backend="eager")

    with pytest.warns(UserWarning, match="^block 'b' is compiled, or a part of it: weight gradients"):
        row = row_of(measure(chain(linear, build)), "b")
    assert row.weight_grad_bytes == 0


# Failures --------------------------------------------------------------------------------------------------------


class Fails(nn.Module):
    """Raises from a number of samples on, in the forward or in the backward."""

    def __init__(self, error: BaseException, at: int, *, backward: bool = False) -> None:
        super().__init__()
        self.layer, self.error, self.at, self.backward = linear(), error, at, backward

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if x.device.type != "meta" and x.shape[0] >= self.at:
            if not self.backward:
                raise self.error
            if y.requires_grad:
                y.register_hook(self.fail)
        return y

    def fail(self, gradient: Tensor) -> None:
        raise self.error


NO_MEMORY = (torch.OutOfMemoryError("tried"), MemoryError("tried"), RuntimeError("can't allocate memory: tried"))


@pytest.mark.parametrize("error", NO_MEMORY, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("backward", [False, True])
def test_sizes_that_do_not_fit_are_left_out(error: Exception, backward: bool) -> None:
    model = chain(linear, lambda: Fails(error, 4, backward=backward), linear)
    found = measure(model, (1, 2, 4, 8))
    assert {tuple(row.microbatch_size for row in block.costs) for block in found.blocks} == {(1, 2)}
    assert "Larger sizes are missing: memory ran out for block 'b' at micro-batch size 4" in found.source.notes


def test_no_size_fits() -> None:
    with pytest.raises(InfeasibleError, match=r"memory ran out for block 'b' at micro-batch size 4: .*--microbatch"):
        measure(chain(linear, lambda: Fails(MemoryError("x"), 1)), (4, 8))


@pytest.mark.parametrize("backward", [False, True])
def test_a_block_that_fails_is_named(backward: bool) -> None:
    model = chain(linear, lambda: Fails(ValueError("boom"), 2, backward=backward))
    with pytest.raises(ExecutionError, match="block 'b' at micro-batch size 2 failed: ValueError: boom"):
        measure(model, (1, 2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sizes": ()}, "give at least one"),
        ({"sizes": (0, 1)}, "each 1 or more"),
        ({"repeats": 0}, "at least 1 timed run"),
        ({"warmup": -1}, "at least 1 timed run and 0 before it"),
        ({"device": "abacus"}, "is not a device"),
        ({"device": "meta"}, "cannot be measured"),
    ],
)
def test_questions_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        measure(chain(linear), **options)


def test_names_that_fit_no_profile() -> None:
    model = Model("odd", (BlockSpec("line\nbreak", "layer", linear, samples=("x",)),), vectors, lambda batch: 1)
    with pytest.raises(UsageError, match=r"does not fit a profile: .*id"):
        measure(model)


# On CUDA ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, which only some machines have")
def test_cuda_agrees_with_cpu_on_what_is_held() -> None:
    model = chain(linear, BLOCKS["perceptron"])
    here, there = (row_of(measure(model, (64,), device=device, repeats=3), "b", 64) for device in ("cpu", "cuda"))
    assert there.weight_grad_bytes == here.weight_grad_bytes
    assert there.activation_bytes == here.activation_bytes
    assert there.workspace_bytes > 0
    assert min(there.forward_ns, there.backward_ns or 0, there.input_grad_ns or 0, there.weight_grad_ns or 0) > 0


# pipeplan profile ------------------------------------------------------------------------------------------------


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., int]]:
    """The command in this process and a folder of its own; returns the exit code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def call(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["pipeplan", "profile", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0)

    yield call
    sys.modules.pop("models_to_measure", None)


QUICK = ("--repeats", "1", "--warmup", "0", "--threads", "1")


def test_command_writes_a_profile(run: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert (
        run(
            "gpt2-tiny",
            *QUICK,
            "--microbatch",
            "2,1",
            "--sequence",
            "8",
            "--dtype",
            "float64",
            "--details",
            "-o",
            "p.json",
        )
        == 0
    )
    found = read_profile(str(tmp_path / "p.json"))
    assert found.microbatch_sizes == (1, 2)
    assert found.source.dtype == "float64"
    assert found.blocks[0].dimensions["sequence"] == 8
    out, err = capsys.readouterr()
    lines = [line.split() for line in out.splitlines()]
    assert [line[:3] for line in lines if line and line[0] == "layer0.ffn"] == [
        ["layer0.ffn", "4", "1"],
        ["layer0.ffn", "4", "2"],
    ]
    written, count, *warnings = err.splitlines()
    assert written == "profile written to p.json"
    assert "warning" in count
    assert any("costs rest on 1 timed run" in line for line in warnings)


def test_command_prints_sums(run: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run("gpt2-tiny", *QUICK, "--microbatch", "1", "-o", "p.json", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    found = read_profile(str(tmp_path / "p.json"))
    assert (printed["num_blocks"], printed["num_kinds"]) == (10, 4)
    once = sum(block.parameters for block in found.blocks) - found.tied[0].parameters
    assert printed["parameters"] == once, "a tied table counts once"
    assert (printed["recipe"]["name"], printed["parameter_bytes"]) == ("fp32", FLOAT * once)
    (sums,) = printed["sizes"]
    assert sums["microbatch_size"] == 1
    for field in ("forward_ns", "weight_grad_ns", "activation_bytes"):
        assert sums[field] == sum(getattr(block.costs[0], field) for block in found.blocks)


def test_command_to_stdout(run: Callable[..., int], capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing else is written, not even by the libraries below."""
    assert run("gpt2-tiny", *QUICK, "--microbatch", "1", "-o", "-") == 0
    out, err = capfd.readouterr()
    assert parse(out, Profile).name == "gpt2-tiny"
    assert err == ""


def test_the_documented_model(run: Callable[..., int], tmp_path: Path) -> None:
    """docs/profiling.md has a model to start from."""
    text = (ROOT / "docs" / "profiling.md").read_text(encoding="utf-8")
    examples = [each.split("```")[0] for each in text.split("```python\n")[1:]]
    (code,) = [each for each in examples if "def perceptron" in each]
    (tmp_path / "models_to_measure.py").write_text(code)
    assert run("models_to_measure:perceptron", *QUICK, "-o", "p.json") == 0
    found = read_profile(str(tmp_path / "p.json"))
    assert len(found.blocks) == 9
    assert all((row.weight_grad_ns or 0) > 0 for block in found.blocks for row in block.costs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing", "-o", "p.json"), "model 'nothing' is neither in the zoo"),
        (("gpt2-tiny",), "Missing option '-o'"),
        (("gpt2-tiny", "-o", "-", "--json"), "would both print to stdout"),
        (("gpt2-tiny", "-o", "no/such/folder/p.json"), "there is no folder"),
        (("gpt2-tiny", "-o", "."), "cannot be written"),
        (("gpt2-tiny", "-o", "p.json", "--microbatch", "1,x"), "not a list of numbers"),
        (("gpt2-tiny", "-o", "p.json", "--microbatch", "0"), "not a list of numbers"),
        (("gpt2-tiny", "-o", "p.json", "--sequence", "99"), "takes sequences of 1 to 16"),
        (("gpt2-tiny", "-o", "p.json", "--repeats", "0"), "0 is not in the range"),
    ],
)
def test_command_refuses(
    arguments: tuple[str, ...],
    message: str,
    run: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    assert run(*arguments) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert out == ""
    assert list(tmp_path.iterdir()) == []


def test_command_without_torch(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert run("gpt2-tiny", "-o", "p.json") == 2
    assert "profile needs torch, which is not installed: pip install 'pipeplan[torch]'" in capsys.readouterr().err


MODULE = """
import torch
from torch import nn
from pipeplan.runtime.profiling import instruments
from pipeplan.runtime.models.spec import BlockSpec, Model

class Odd(nn.Linear):
    def forward(self, x):
        if x.device.type != "meta" and x.shape[0] > 4:
            raise MemoryError("no room")
        return super().forward(x)

def batch(num_samples, step, seed):
    return {"x": torch.ones(num_samples, 2)}

def model():
    return Model("odd", (BlockSpec("odd", "odd", lambda: Odd(2, 2), samples=("x",)),), batch, len)
"""


def test_command_tells_of_missing_sizes(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "models_to_measure.py").write_text(MODULE)
    assert run("models_to_measure:model", *QUICK, "--microbatch", "1,2,5,8", "-o", "p.json") == 0
    assert "not measured: micro-batch sizes 5, 8" in capsys.readouterr().err
    assert read_profile(str(tmp_path / "p.json")).microbatch_sizes == (1, 2)


def test_what_blocks_share_is_listed_with_its_bytes() -> None:
    """What the same blocks share together, inside a block counted once; frozen ones, with nothing to sum, are not."""

    def two() -> nn.Module:
        return nn.Sequential(linear(), linear())

    def frozen() -> nn.Module:
        module = linear()
        module.weight.requires_grad_(False)  # type: ignore[operator, union-attr]  # a parameter
        return module

    tied = (
        (("a", "0.weight"), ("a", "1.weight"), ("c", "0.weight")),
        (("a", "0.bias"), ("c", "0.bias")),
        (("b", "weight"), ("d", "weight")),
    )
    found = block_graph_of(chain(two, frozen, two, frozen, tied=tied), torch.float32)
    weight, bias = WIDTH * WIDTH, WIDTH
    assert [(each.name, each.blocks, each.parameters) for each in found.tied] == [
        ("a.0.weight", ("a", "c"), weight + bias)
    ]
    assert [(block.trainable, block.frozen) for block in found.blocks[:3]] == [
        (weight + 2 * bias, 0),
        (bias, weight),
        (2 * weight + 2 * bias, 0),
    ]


@pytest.mark.parametrize("tie", [True, False])
def test_hugging_face_ties_as_its_configuration_says(tie: bool) -> None:
    sizes = "vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2"
    name = f"LlamaConfig({sizes}, num_key_value_heads=2, max_position_embeddings=16, tie_word_embeddings={tie})"
    graph = block_graph_of(load_model(name, sequence=8), torch.float32)
    assert [(each.parameters, len(each.blocks)) for each in graph.tied] == [(96 * 32, 2)] * tie
