"""Estimates: the bytes that measuring finds, work as torch counts it, times by rates or fitted to a measurement."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from builders.requests import request_of
from pipeplan.cli.main import main
from pipeplan.costs.devices import PHASES, device_preset
from pipeplan.costs.inspection import cautions
from pipeplan.costs.uniform.shares import catalog_shares, reaching
from pipeplan.errors import SumError, UsageError
from pipeplan.examples import model as paper_model
from pipeplan.files import Cluster, DeviceKind, LinkLevel, Profile, Source, read_profile
from pipeplan.planning.request import Batch
from pipeplan.planning.steps import search_plan
from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.models.spec import BlockSpec, Model
from pipeplan.runtime.parallel.attention_cores import RecomputedCores
from pipeplan.runtime.profiling.build_profile import splits_of
from pipeplan.runtime.profiling.counting import counted
from pipeplan.runtime.profiling.estimate import estimate_model
from pipeplan.runtime.profiling.flops import ProductCounter
from pipeplan.runtime.profiling.instruments import saved_tensors, storages
from pipeplan.runtime.profiling.measure import profile_model
from support.marks import one_in, slow_but
from support.paths import ROOT

A100 = device_preset("a100-80gb")
WIDTH = 16


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = x + self.project(mixed.transpose(1, 2).flatten(2))
        return result


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x.unsqueeze(1)).flatten(1).unflatten(1, (-1, WIDTH))
        return result


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "norm": lambda: nn.LayerNorm(WIDTH),
    "relu": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()),
    "gelu": lambda: nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)),
    "attention": Attention,
    "images": Images,
}


def chain(*names: str) -> Model:
    blocks = [BlockSpec("first", "linear", BLOCKS["linear"], samples=("x",))]
    for name in names:
        blocks.append(BlockSpec(name, name, BLOCKS[name], sources=(blocks[-1].id,)))
    return Model("chain", tuple(blocks), sequences, lambda batch: 1)


def sequences(num_samples: int, step: int, seed: int) -> dict[str, Tensor]:
    return {"x": torch.randn(num_samples, 8, WIDTH, generator=torch.Generator().manual_seed(seed))}


def estimate(model: Model, sizes: tuple[int, ...] = (1, 3), **options: object) -> Profile:
    usual = {"device": A100, "dtype": torch.float32, "kernels": "eager"}
    return estimate_model(model, sizes, **{**usual, **options})  # type: ignore[arg-type]  # of several types


def bytes_of(profile: Profile, field: str) -> dict[tuple[str, tuple[int, int, str | None, bool]], int]:
    return {(block.id, row.key): getattr(row, field) for block in profile.blocks for row in block.costs}


MODELS: dict[str, Callable[[], Model]] = {
    "chain": lambda: chain("linear", "norm", "relu", "gelu"),
    "images": lambda: chain("attention", "images"),
    "gpt2-tiny": lambda: load_model("gpt2-tiny"),
    "mt5": lambda: load_model(
        "MT5Config(d_model=32, num_layers=1, num_heads=2, d_kv=16, d_ff=64, vocab_size=64)", sequence=8
    ),
}


@slow_but(
    "name, dtype",
    [(name, torch.float32) for name in MODELS] + [(name, torch.bfloat16) for name in MODELS if name != "mt5"],
    ("chain", torch.float32).__eq__,
    lambda case: case[0] == "mt5",
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_bytes_are_those_that_measuring_finds(name: str, dtype: torch.dtype) -> None:
    model = MODELS[name]()
    choices: dict[str, object] = {"recompute": True, "shards": (1, 2) if model.sharded else (1,), "dtype": dtype}
    told = estimate(model, **choices)
    real = profile_model(model, (1, 3), repeats=1, warmup=0, **choices)  # type: ignore[arg-type]  # of several types
    assert told.edges == real.edges
    assert told.step_bytes_per_s is not None
    for field in ("activation_bytes", "weight_grad_bytes"):
        assert bytes_of(told, field) == bytes_of(real, field)
    if dtype is torch.bfloat16:  # matrix products take copies of their own there
        return
    for (id_, key), found in bytes_of(real, "workspace_bytes").items():
        if id_ == "images":  # and so do convolutions
            continue
        recomputed = key[-1]  # keeps the random generator's state, twice for a moment
        libraries = 2200  # what those below torch take for themselves, attention's backward 2,112 at every size
        beside = 2 * 5056 + libraries if recomputed else libraries
        assert bytes_of(told, "workspace_bytes")[id_, key] == pytest.approx(found, rel=0.1, abs=beside)


class Unfused(Attention):
    """Attention with dropout, which the CPU runs step by step."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=0.1)
        result: Tensor = self.project(mixed.transpose(1, 2).flatten(2))
        return result


class Given(TorchFunctionMode):
    """Notes what attention is given."""

    found: tuple[Tensor, ...] = ()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            self.found = args[:3]
        return func(*args, **(kwargs or {}))


@one_in(2, "module", [Attention, Unfused])
def test_less_is_held_where_the_attention_core_is_computed_again(module: type[nn.Module]) -> None:
    """As much as autograd saves around a core in a checkpoint, and what the core is given."""
    blocks = (
        BlockSpec("first", "linear", BLOCKS["linear"], samples=("x",)),
        BlockSpec("core", "attention", module, sources=("first",)),
    )
    told = estimate(Model("core", blocks, sequences, lambda batch: 1), (3,))
    plain, (row,) = (block.costs for block in told.blocks)
    assert plain[0].selective_ns is None
    assert 0 < (row.selective_ns or 0) < row.forward_ns
    real, x = module(), torch.randn(3, 8, WIDTH, requires_grad=True)
    with saved_tensors() as saved, Given() as given, RecomputedCores():
        made = real(x)
    own = storages(real.parameters())
    held = {key: size for key, size in storages([x, *saved(), *given.found]).items() if key not in own}
    assert row.selective_activation_bytes == sum(held.values())
    measured = profile_model(Model("core", blocks, sequences, lambda batch: 1), (3,), repeats=2, warmup=0).blocks
    assert measured[0].costs[0].selective_ns is None
    assert measured[1].costs[0].selective_activation_bytes == row.selective_activation_bytes
    assert (measured[1].costs[0].selective_ns or 0) > 0
    if module is Unfused:  # scores by softmax and after dropout, and what it leaves out
        assert row.activation_bytes - sum(held.values()) >= 3 * 2 * 8 * 8 * (4 + 4 + 1)
    del made


def test_work_is_what_torch_counts() -> None:
    model = load_model("gpt2-124m", sequence=64)
    splits = splits_of(model, (1,), torch.float32, None)
    works = {each.key.block: each.work for each in counted(splits, [2], torch.float32)}
    of_kind = {
        id_: {phase: sum(k.flops for k in work[phase] if k.matrix) for phase in work} for id_, work in works.items()
    }
    flops = {node.spec.id: of_kind[node.kind] for node in splits[0].graph.blocks}
    tokens, hidden = 2 * 64, 768
    linears = {"layer0.ffn": 8 * hidden**2, "layer3.attention": 4 * hidden**2, "head": hidden * 50257}
    for id_, weights in linears.items():
        core = 2 * 2 * 12 * 64 * 64 * 64 if "attention" in id_ else 0  # causal: half of 4 per query, key and number
        assert flops[id_]["forward_ns"] == 2 * tokens * weights + core
        assert flops[id_]["weight_grad_ns"] == 2 * tokens * weights
        assert flops[id_]["input_grad_ns"] == pytest.approx(2 * tokens * weights + 2.5 * core, rel=1e-6)


class Experts(nn.Module):
    """Each row by the weights of its expert, half of the rows each."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, WIDTH, 4 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        ends = torch.arange(1, 3, dtype=torch.int32) * (len(rows) // 2)
        return F.gelu(F.grouped_mm(rows, self.weight, offs=ends))


def test_grouped_products_count_once_per_row_forward_and_twice_backward() -> None:
    blocks = (
        BlockSpec("first", "linear", BLOCKS["linear"], samples=("x",)),
        BlockSpec("experts", "moe", Experts, sources=("first",)),
    )
    splits = splits_of(Model("moe", blocks, sequences, lambda batch: 1), (1,), torch.bfloat16, None)
    (work,) = (each.work for each in counted(splits, [4], torch.bfloat16) if each.key.block == "experts")
    flops = {phase: sum(kernel.flops for kernel in work[phase] if kernel.matrix) for phase in work}
    once = 2 * (4 * 8) * WIDTH * 4 * WIDTH
    assert flops == {"forward_ns": once, "input_grad_ns": 2 * once, "weight_grad_ns": 0}


def test_closed_forms_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """``pipeplan example`` needs no torch, and tells the same of a device that reaches the same."""
    told = estimate(load_model("gpt2-124m"), (1, 2), dtype=torch.bfloat16, context=(1,))
    fitted = reaching(A100, catalog_shares()[A100.name])
    monkeypatch.setattr("pipeplan.examples.models.device_preset", lambda name: fitted)
    forms = paper_model("gpt2-124m", microbatch_sizes=(1, 2))
    for one, other in zip(told.blocks, forms.blocks, strict=True):
        assert one.id == other.id
        for row, form in zip(one.costs, other.costs, strict=True):
            assert row.weight_grad_bytes == pytest.approx(form.weight_grad_bytes, rel=0.01)
            assert row.activation_bytes == pytest.approx(form.activation_bytes, rel=0.01)
    for field in ("forward_ns", "backward_ns"):
        total, formed = (sum(getattr(b.costs[1], field) or 0 for b in p.blocks) for p in (told, forms))
        assert total == pytest.approx(formed, rel=0.27)  # they count fewer kernels than torch starts


def test_profiles_say_tokens_and_flops_of_a_sample() -> None:
    """By hand: 2 for every weight and token, embeddings aside, and 4 x hidden x length of attention for every token."""
    tiny = load_model("gpt2-tiny")
    length, hidden, vocabulary, layers = 16, 32, 64, 4
    by_hand = length * (2 * (12 * hidden**2 * layers + hidden * vocabulary) + 4 * hidden * length * layers)
    told, measured = estimate(tiny, (1,)), profile_model(tiny, (2,), repeats=1, warmup=0)
    for profile in (told, measured):
        assert (profile.tokens_per_sample, profile.forward_flops_per_sample) == (length, by_hand)
    split = estimate_model(tiny, (1,), device=A100, dtype=torch.float32, shards=(2,))
    assert split.forward_flops_per_sample == by_hand, "of the unsplit model"


def test_collectives_that_take_longer_than_a_profile_may_say_are_refused() -> None:
    """The profile was written, and could not be read."""
    level = LinkLevel(name="slow", group_size=2, latency_ns=10**15, bandwidth_bytes_per_s=1)
    cluster = Cluster(
        name="c", source=Source(method="estimated"), devices=(DeviceKind(name="d", count=2),), levels=(level,)
    )
    with pytest.raises(
        SumError, match=r"block 'embedding': forward_ns for 1 sample on 2 devices add up to \d+s, more "
    ):
        estimate(load_model("gpt2-tiny"), (1,), shards=(2,), cluster=cluster)


@pytest.mark.parametrize("name", ["tessel-mt5-tiny", "dlrm-tiny", "mmt-tiny"])
def test_tokens_are_those_of_one_sequence_or_not_known(name: str) -> None:
    """Two sequences, categories beside numbers, and patches are no number of tokens."""
    told = estimate(load_model(name), (1,))
    assert told.tokens_per_sample is None
    assert told.forward_flops_per_sample


def test_products_that_are_not_known_are_not_counted_as_none() -> None:
    blocks = (BlockSpec("halve", "x", nn.Identity, samples=("x",)),)
    model = Model("none", blocks, lambda count, step, seed: {"x": torch.ones(count, 3)}, lambda batch: 1)
    assert estimate(model, (1,)).forward_flops_per_sample is None


def test_times_grow_with_work() -> None:
    told = estimate(load_model("gpt2-124m", sequence=256), (1, 8))
    for block in told.blocks:
        small, large = block.costs
        assert 0 < small.forward_ns < large.forward_ns
        assert small.backward_ns == (small.input_grad_ns or 0) + (small.weight_grad_ns or 0)


@pytest.mark.slow
def test_large_models_need_little_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = load_model(
        "LlamaConfig(num_hidden_layers=2, hidden_size=8192, intermediate_size=28672, "
        "num_attention_heads=64, num_key_value_heads=8)",
        sequence=512,
        meta=True,
    )
    told = estimate(model, (1,), dtype=torch.bfloat16, shards=(1, 8))
    assert 2 * sum(block.parameters for block in told.blocks) > 4 * 10**9
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 10**9


def test_samples_of_which_only_the_form_counts_are_not_made() -> None:
    """A million of them took minutes and gigabytes."""
    asked: list[int] = []

    def batch(num_samples: int, step: int, seed: int) -> dict[str, Tensor]:
        asked.append(num_samples)
        return sequences(num_samples, step, seed)

    told = estimate(replace(chain("linear"), batch=batch), (1_000, 1_000_000))
    assert max(asked) < 10
    assert all(row.activation_bytes for block in told.blocks for row in block.costs)
    for block in told.blocks:
        few, many = block.costs
        assert many.activation_bytes == pytest.approx(1000 * few.activation_bytes, rel=1e-3)


LLAMA = (
    "LlamaConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, "
    "intermediate_size=128, vocab_size=64)"
)
T5 = "T5Config(d_model=64, d_kv=16, d_ff=128, num_layers=1, num_heads=4, vocab_size=64)"


@slow_but(
    "name, sequence",
    [(name, sequence) for name in ("tessel-gpt-tiny", LLAMA, T5) for sequence in (16, 10)],
    lambda case: case in (("tessel-gpt-tiny", 16), (LLAMA, 10)),
    (T5, 16).__ne__,
)
def test_shards_hold_their_part_of_all_activations(name: str, sequence: int) -> None:
    """But where they cannot divide the sequence: rows say which it is."""
    model = load_model(name, sequence=sequence)
    told = estimate(model, (2,), dtype=torch.bfloat16, shards=(1, 4))
    for block in told.blocks:
        whole, share = block.costs
        assert (whole.sequence_parallel, share.sequence_parallel) == (False, sequence == 16)
        if block.operator in ("attention", "cross-attention", "ffn"):
            assert (4 * share.activation_bytes == whole.activation_bytes) == (sequence == 16)


def test_split_blocks_pay_for_their_collectives() -> None:
    told = estimate(load_model("gpt2-tiny"), (4,), shards=(1, 2))
    (ffn,) = (block for block in told.blocks if block.id == "layer0.ffn")
    whole, half = ffn.costs
    assert (whole.shards, half.shards) == (1, 2)
    assert half.weight_grad_bytes < whole.weight_grad_bytes
    assert half.forward_ns > whole.forward_ns  # so small that the ring takes longer than the work it saves


# Calibration ------------------------------------------------------------------------------------------------------


def only(profile: Profile, size: int) -> Profile:
    blocks = tuple(
        block.model_copy(update={"costs": tuple(row for row in block.costs if row.microbatch_size == size)})
        for block in profile.blocks
    )
    return profile.model_copy(update={"blocks": blocks})


def total(profile: Profile, size: int) -> int:
    rows = [row for block in profile.blocks for row in block.costs if row.microbatch_size == size]
    return sum(row.forward_ns + (row.backward_ns or 0) for row in rows)


def test_one_measured_size_tells_the_others() -> None:
    """The shipped profiles are measured: nothing here depends on this machine."""
    measured = read_profile(str(ROOT / "profiles" / "gpt2-124m-cpu.json"))
    said: list[str] = []
    told = estimate(
        load_model("gpt2-124m"),
        (1, 2, 4),
        device=device_preset("cpu"),
        calibration=only(measured, 2),
        tell=said.append,
    )
    for size in (1, 2, 4):
        assert total(told, size) == pytest.approx(total(measured, size), rel=0.2)
    assert "One efficiency per family of operators" in told.source.notes
    assert [each in told.source.notes for each in said] == [True]
    for field in ("activation_bytes", "weight_grad_bytes"):
        # when the shipped ones were measured, the samples of a batch of one had a word behind them
        assert bytes_of(told, field) == pytest.approx(bytes_of(measured, field), abs=8)
    assert "micro-batch sizes [2]" in told.source.notes


@pytest.mark.slow
def test_what_is_measured_here_is_nearer_by_what_was_fitted_to_it() -> None:
    """By the squares of relative errors, which the fit makes least; how quick this machine is does not matter."""
    model = load_model("gpt2-tiny")
    measured = profile_model(model, (1, 4), dtype=torch.float32, repeats=3, warmup=1)
    told, bare = (
        estimate(load_model("gpt2-tiny"), (1, 4), device=device_preset("cpu"), calibration=each)
        for each in (measured, None)
    )

    def squares(profile: Profile) -> float:
        rows = [row for block in profile.blocks for row in block.costs]
        real = [row for block in measured.blocks for row in block.costs]
        pairs = [(getattr(a, name), getattr(b, name)) for a, b in zip(rows, real, strict=True) for name in PHASES]
        return sum((a / b - 1) ** 2 for a, b in pairs if b)

    assert squares(told) < squares(bare)
    assert f"fitted to {measured.name} as measured on {measured.source.device}" in told.source.notes


@pytest.mark.slow
def test_one_model_tells_another() -> None:
    measured = {name: read_profile(str(ROOT / "profiles" / f"{name}-cpu.json")) for name in ("gpt2-124m", "gpt2-345m")}
    told = estimate(
        load_model("gpt2-345m"),
        (1, 2, 4),
        device=device_preset("cpu"),
        calibration=measured["gpt2-124m"],
        reference=load_model("gpt2-124m"),
    )
    for size in (1, 2, 4):
        assert total(told, size) == pytest.approx(total(measured["gpt2-345m"], size), rel=0.2)


# Errors -----------------------------------------------------------------------------------------------------------


def test_a_calibration_of_something_else() -> None:
    measured = read_profile(str(ROOT / "profiles" / "gpt2-124m-cpu.json"))
    with pytest.raises(UsageError, match=r"'gpt2-124m' has no block with the operator.*measure some of its blocks"):
        estimate(chain("linear"), calibration=measured)


class Looks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if float(x.sum()) > 0 else -x


def test_a_block_that_needs_data_is_named() -> None:
    blocks = (BlockSpec("looks", "odd", Looks, samples=("x",)),)
    with pytest.raises(UsageError, match="block 'looks' cannot be built and called on the meta device"):
        estimate(Model("odd", blocks, sequences, lambda batch: 1), (3,))


@pytest.mark.parametrize("sizes", [(), (0, 1)])
def test_sizes_that_make_no_sense(sizes: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="give at least one, each 1 or more"):
        estimate(chain("linear"), sizes)


# pipeplan profile --estimate --------------------------------------------------------------------------------------


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["pipeplan", "profile", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = str(tmp_path / "p.json")
    assert run(monkeypatch, "gpt2-tiny", "--estimate", "--device", "v100-32gb", "--shards", "1,2", "-o", path) == 0
    profile = read_profile(path)
    assert (profile.source.method, profile.source.dtype) == ("estimated", "float16")
    told = capsys.readouterr().err
    assert "written to" in told
    assert "pipeplan: 16 tokens per sample; --sequence changes that\n" in told
    assert "--device changes that" not in told
    rows = [row for block in profile.blocks for row in block.costs]
    assert {(row.repeats, len(row.spread)) for row in rows} == {(0, 0)}, "nothing was timed"
    assert cautions(profile) == []
    plan = search_plan(
        request_of(profile, "one-to-one", Batch(4, 4), num_devices=2, time_limit=0.1, deterministic=True)
    ).plan
    assert len(plan.stages) == 2


def test_command_counts_the_products_of_experts_whatever_was_estimated_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A layer of Mixtral 8x7B takes two experts of three matrices per word: no H100 is quicker than its peak."""
    path, tokens = str(tmp_path / "p.json"), 4 * 1024
    asked = ("--estimate", "--device", "h100-80gb", "--microbatch", "4", "--sequence", "1024", "-o", path)
    assert run(monkeypatch, "MixtralConfig(num_hidden_layers=1)", *asked) == 0
    (moe,) = (block for block in read_profile(path).blocks if block.operator == "moe")
    floor_ns = 1e9 * 2 * tokens * 2 * 3 * 4096 * 14336 / device_preset("h100-80gb").matrix_flops_per_s
    assert moe.costs[0].forward_ns > floor_ns
    assert (moe.costs[0].input_grad_ns or 0) > 2 * floor_ns


class There(nn.Module):
    """Through one matrix and back; what it is like shows in its parameter alone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(WIDTH, width))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix @ self.matrix.T


def test_blocks_that_differ_only_inside_are_not_alike() -> None:
    """Of the same modules, inputs and dimensions that are said; only their parameters have other shapes."""

    def wide(id_: str, source: str, width: int) -> BlockSpec:
        return BlockSpec(id_, "ffn", lambda: There(width), sources=(source,))

    model = replace(chain(), blocks=(*chain().blocks, wide("narrow", "first", 16), wide("broad", "narrow", 4096)))
    rows = {block.id: block.costs[0] for block in estimate(model, (1,)).blocks}
    assert rows["narrow"].activation_bytes < rows["broad"].activation_bytes


def test_formulas_that_are_registered_later_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of grouped products are, when a model with experts is loaded."""
    monkeypatch.setitem(flop_registry, torch.ops.aten.mul, lambda *_, **__: 7)
    with ProductCounter() as counter:
        torch.ones(2) * torch.ones(2)
    assert counter.flops == 7


@pytest.mark.slow
def test_command_fits_another_model_of_the_zoo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path, measured = str(tmp_path / "p.json"), str(ROOT / "profiles" / "gpt2-124m-cpu.json")
    chosen = ("--estimate", "--device", "cpu", "--calibrate", measured, "--microbatch", "1")
    assert run(monkeypatch, "gpt2-345m", *chosen, "-o", path) == 0
    assert "Times are fitted to gpt2-124m" in read_profile(path).source.notes


def test_estimates_are_at_the_shares_of_the_catalog() -> None:
    profile = estimate(chain("linear"), (3,))
    shares = catalog_shares()[A100.name]
    assert shares.notes in profile.source.notes
    barely = replace(A100, name="unknown")
    assert "published runs" not in estimate(chain("linear"), (3,), device=barely).source.notes


def test_command_fits_to_published_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, runs = str(tmp_path / "p.json"), str(ROOT / "benchmarks" / "data" / "published-runs.json")
    asked = ("--estimate", "--device", "h200-141gb", "--calibrate", runs, "--microbatch", "1")
    assert run(monkeypatch, "gpt2-tiny", *asked, "-o", path) == 0
    said = "fitted on 74 published runs of h100-80gb in 33 layouts. Their error is 5.1% in the mean, and was 5.1%"
    assert said in read_profile(path).source.notes
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("gpt2-tiny", "--estimate", "--device", "abacus"), "--device 'abacus' is not a preset"),
        (("gpt2-tiny", "--estimate", "--threads", "2"), "--threads does not go with --estimate"),
        (("gpt2-tiny", "--calibrate", "x.json"), "--calibrate does not go with MODEL"),
        (("gpt2-tiny", "--estimate", "--calibrate", "none.json"), "none.json: cannot be read"),
    ],
)
def test_command_refuses(
    arguments: tuple[str, ...],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    assert run(monkeypatch, *arguments, "-o", str(tmp_path / "p.json")) == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert list(tmp_path.iterdir()) == []
