"""Measured beside the plain costs of a block: shares of split blocks, recomputation, several outputs, whole models."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from pipeplan.cli.main import cli
from pipeplan.costs.communication import Exchange, prices_in
from pipeplan.costs.stages import stage_costs
from pipeplan.errors import ExecutionError, UsageError
from pipeplan.files import Block, Cluster, CostRow, Profile, Source, read_profile
from pipeplan.files.cluster import DeviceKind, LinkLevel
from pipeplan.runtime.models.huggingface import build
from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.models.shapes import shaped_blocks
from pipeplan.runtime.models.spec import BlockSpec, Collective, Model
from pipeplan.runtime.models.zoo import ZOO
from pipeplan.runtime.models.zoo.gpt import GPTSize
from pipeplan.runtime.models.zoo.layers import FeedForward, SelfAttention
from pipeplan.runtime.parallel.sharding import Shards
from pipeplan.runtime.parallel.weight_grads import WeightGradQueue, defer_weight_gradients
from pipeplan.runtime.profiling.benches import Bench
from pipeplan.runtime.profiling.build_profile import block_graph_of
from pipeplan.runtime.profiling.instruments import drift_of, meter_for, num_outliers
from pipeplan.runtime.profiling.measure import profile_model
from pipeplan.runtime.profiling.rounds import RowKey, UnfinishedProfile
from runtime_support.whole_model import in_one_piece, measure_whole
from support.marks import always, one_in, slow_but

LLAMA = "LlamaConfig(num_hidden_layers=1, vocab_size=100"
WIDTH = 8
FLOAT = 4
TINY = ZOO["gpt2-tiny"]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def vectors(num_samples: int, step: int, seed: int) -> dict[str, Tensor]:
    return {"x": torch.randn(num_samples, WIDTH, generator=torch.Generator().manual_seed(seed + step))}


def of_blocks(*blocks: BlockSpec, sharded: Callable[[int], Model] | None = None) -> Model:
    return Model("blocks", blocks, vectors, lambda batch: 1, sharded=sharded)


def measure(model: Model, sizes: tuple[int, ...] = (1,), **options: object) -> Profile:
    return profile_model(model, sizes, **{"repeats": 1, "warmup": 0, **options})  # type: ignore[arg-type]  # of several types


def block_of(profile: Profile, id_: str) -> Block:
    (block,) = (block for block in profile.blocks if block.id == id_)
    return block


def row_of(profile: Profile, id_: str, *, shards: int = 1, recompute: bool = False) -> CostRow:
    (row,) = (row for row in block_of(profile, id_).costs if (row.shards, row.recompute) == (shards, recompute))
    return row


def perceptron(width: int = 32) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, width), nn.GELU(), nn.Linear(width, WIDTH))


def chain(build: Callable[[], nn.Module]) -> Model:
    first = BlockSpec("a", "layer", lambda: nn.Linear(WIDTH, WIDTH), samples=("x",))
    return of_blocks(first, BlockSpec("b", "layer", build, sources=("a",)))


# Several outputs -------------------------------------------------------------------------------------------------


class Parts(nn.Module):
    """Wide, narrow, one for all samples, and one without a gradient; the last nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.bias = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(1, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.layer(x)
        return y, y[:, :2].contiguous(), self.bias * 2, x > 0, y.exp()


class Join(nn.Module):
    def forward(self, *parts: Tensor) -> Tensor:
        return torch.cat([part.to(parts[0].dtype).expand(len(parts[0]), -1) for part in parts], dim=1)


def parts(*sources: tuple[str, int] | str) -> Model:
    return of_blocks(
        BlockSpec("parts", "parts", Parts, samples=("x",)),
        BlockSpec("join", "join", Join, sources=sources),
    )


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        (("parts",), [(None, WIDTH * FLOAT, True, False)]),
        ((("parts", 0), ("parts", 1)), [("0", WIDTH * FLOAT, True, False), ("1", 2 * FLOAT, True, False)]),
        ((("parts", 0), ("parts", 1), "parts"), [("0", WIDTH * FLOAT, True, False), ("1", 2 * FLOAT, True, False)]),
        ((("parts", 3),), [(None, WIDTH, False, False)]),
        ((("parts", 1), ("parts", 3)), [("1", 2 * FLOAT, True, False), ("3", WIDTH, False, False)]),
        ((("parts", 2),), [(None, WIDTH * FLOAT, True, True)]),
        ((("parts", 0), ("parts", 2)), [("0", WIDTH * FLOAT, True, False), ("2", WIDTH * FLOAT, True, True)]),
    ],
)
def test_an_edge_for_each_tensor(
    sources: tuple[tuple[str, int] | str, ...], expected: list[tuple[str | None, int, bool, bool]]
) -> None:
    edges = block_graph_of(parts(*sources), torch.float32).edges
    assert {(edge.source, edge.target) for edge in edges} == {("parts", "join")}
    assert [(edge.tensor, edge.bytes_per_sample, edge.gradient, edge.broadcast) for edge in edges] == expected


def test_blocks_with_several_outputs_are_measured() -> None:
    found = measure(parts(("parts", 0), ("parts", 1), ("parts", 3)), (4,), recompute=True)
    row = row_of(found, "join")
    assert row.activation_bytes == 4 * (WIDTH + 2) * FLOAT  # the inputs that get a gradient
    assert row_of(found, "join", recompute=True).activation_bytes == row.activation_bytes + 4 * WIDTH
    read = block_graph_of(parts(("parts", 0), ("parts", 1)), torch.float32).blocks[0]
    assert read.roots == (0, 1)  # backward of the exponential would ask for its gradient


def test_only_what_is_read_gets_a_gradient() -> None:
    """The exponential that nobody reads is not held for a backward that never comes."""
    found = measure(parts(("parts", 1)), (4,))
    assert row_of(found, "parts").activation_bytes == 4 * WIDTH * FLOAT  # x, for the weight's gradient


def test_inputs_from_like_blocks_are_two_tensors() -> None:
    class Multiply(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x * y

    def linear() -> nn.Module:
        return nn.Linear(WIDTH, WIDTH)

    twins = [BlockSpec(id_, "layer", linear, samples=("x",)) for id_ in "ab"]
    apart = of_blocks(*twins, BlockSpec("c", "multiply", Multiply, sources=("a", "b")))
    same = of_blocks(*twins, BlockSpec("c", "multiply", Multiply, sources=("a", "a")))
    assert [each.kind for each in block_graph_of(apart, torch.float32).blocks[:2]] == ["a", "a"]
    assert row_of(measure(apart), "c").activation_bytes == 2 * WIDTH * FLOAT
    assert row_of(measure(same), "c").activation_bytes == WIDTH * FLOAT


# Recomputation ---------------------------------------------------------------------------------------------------


def bench(module: nn.Module, *, recompute: bool) -> Bench:
    generator = torch.Generator().manual_seed(1)
    given, gradient = (torch.randn(5, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    key, inputs = RowKey("b", 5, recompute=recompute), (given,)
    return Bench(key, module, inputs, (True,), (), ((0, gradient),), torch.device("cpu"))


@pytest.mark.parametrize("split", [False, True])
def test_recomputation_gives_the_same_gradients(split: bool) -> None:
    """In float64, dropout included, with weight gradients at once and later."""
    module = defer_weight_gradients(nn.Sequential(perceptron(), nn.Dropout(0.5), perceptron()).double())
    found = []
    for recompute in (False, True):
        module.zero_grad()
        torch.manual_seed(3)
        roots, queue = (one := bench(module, recompute=recompute)).forward(), WeightGradQueue()
        if split:
            with queue:
                one.backward(roots)
            assert len(queue) == 4
            queue.run()
        else:
            one.backward(roots)
        found.append([parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None])
    assert len(found[0]) == 12
    for kept, again in zip(*found, strict=True):
        torch.testing.assert_close(kept, again, rtol=0, atol=0)


def test_recomputed_rows() -> None:
    """Inputs alone are held; B runs the forward again, and holds then what F held before, as workspace."""
    size = 64
    found = measure(chain(perceptron), (size,), recompute=True)
    kept, again = row_of(found, "b"), row_of(found, "b", recompute=True)
    assert again.activation_bytes == size * WIDTH * FLOAT < kept.activation_bytes
    assert again.weight_grad_bytes == kept.weight_grad_bytes
    least = kept.activation_bytes - again.activation_bytes
    assert least <= again.workspace_bytes <= least + kept.workspace_bytes
    assert "F keeps a block's inputs alone" in found.source.notes


def test_recomputed_inputs_are_what_the_allocator_has() -> None:
    one = bench(perceptron().double(), recompute=True)
    one.backward(one.forward())
    with meter_for(torch.device("cpu")) as meter:
        roots = one.forward()
        with meter.phase("after F"):
            pass
        one.backward(roots)
        del roots
    # the input was there before; kept is the state of the random generator, for dropout
    assert meter.usage["after F"].start <= torch.get_rng_state().nbytes


def test_recomputation_runs_the_forward_again() -> None:
    calls: list[bool] = []

    class Calls(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if x.device.type != "meta":
                calls.append(torch.is_grad_enabled())
            return super().forward(x)

    model = chain(lambda: Calls(WIDTH, WIDTH))
    measure(model)
    plain = len(calls)
    calls.clear()
    measure(model, recompute=True)
    # one to hand on; F and F again, three times for memory and twice for time, after the rows without
    assert len(calls) == plain + 2 * (plain - 1)


# Shares ----------------------------------------------------------------------------------------------------------


def shares(num_devices: int) -> Model:
    """A whole block, a split one, and the whole block again."""
    hidden = 4 * FLOAT * WIDTH
    collectives = (Collective("all_reduce", "F", hidden), Collective("all_reduce", "I", 3 * hidden))
    wide = 32 // num_devices
    blocks = (
        BlockSpec("first", "layer", lambda: nn.Linear(WIDTH, WIDTH), samples=("x",)),
        BlockSpec(
            "split",
            "layer",
            lambda: perceptron(wide),
            sources=("first",),
            dimensions={"ffn": wide},
            collectives=collectives if num_devices > 1 else (),
        ),
        BlockSpec("last", "layer", lambda: nn.Linear(WIDTH, WIDTH), sources=("split",)),
    )
    return of_blocks(*blocks, sharded=shares)


def test_shares_are_measured_alone() -> None:
    found = measure(shares(1), (2,), shards=(1, 2, 4), recompute=True)
    for block in found.blocks:
        cases = [(row.shards, row.recompute) for row in block.costs]
        assert cases == [(shards, recompute) for shards in (1, 2, 4) for recompute in (False, True)]
    whole, half = row_of(found, "split"), row_of(found, "split", shards=2)
    assert whole.weight_grad_bytes - half.weight_grad_bytes == 2 * 2 * 16 * FLOAT  # half of expanded and its gradient
    assert block_of(found, "split").dimensions == {"ffn": 32}
    assert "collectives are not among their times" in found.source.notes


def test_blocks_that_are_not_split_are_measured_once() -> None:
    found = measure(shares(1), shards=(1, 2, 4))
    assert len({row.model_copy(update={"shards": 1}).model_dump_json() for row in block_of(found, "last").costs}) == 1
    told: list[str] = []
    measure(shares(1), shards=(1, 2), progress=lambda done, total, what: told.append(what))
    assert len(set(told)) == 4  # three blocks, one of them twice
    assert any("split over 2 devices" in what for what in told)


def test_shares_without_the_whole() -> None:
    found = measure(shares(1), shards=(2,))
    assert [row.shards for row in block_of(found, "split").costs] == [2]
    (split,) = (block for block in found.blocks if block.id == "split")
    assert split.parameters == 2 * WIDTH + 2 * WIDTH * 32 + 32 + WIDTH  # of the whole


def cluster(num_devices: int) -> Cluster:
    level = LinkLevel(name="node", group_size=num_devices, latency_ns=1000, bandwidth_bytes_per_s=10**9)
    source = Source(method="literature", device="none")
    return Cluster(
        name="c", source=source, devices=(DeviceKind(name="d", count=num_devices, memory_bytes=10**9),), levels=(level,)
    )


@one_in(2, "dtype, scale", [(torch.float32, 2), (torch.bfloat16, 1)], first=1)
def test_collectives_take_the_time_of_links(dtype: torch.dtype, scale: int, tmp_path: Path) -> None:
    """Times are kept from the first measurement, so that the difference is that of the links alone."""
    plain, priced = (
        measure(
            shares(1),
            (3,),
            shards=(1, 2),
            recompute=True,
            dtype=dtype,
            cluster=links,
            partial=UnfinishedProfile(tmp_path / "p"),
        )
        for links in (None, cluster(2))
    )
    price = prices_in(cluster(2))
    forward, back = (round(price(Exchange("all_reduce", n * 3 * 2 * scale * 4 * WIDTH), 2)) for n in (1, 3))
    for recompute in (False, True):
        before, after = (row_of(each, "split", shards=2, recompute=recompute) for each in (plain, priced))
        assert after.forward_ns - before.forward_ns == forward
        assert (after.backward_ns or 0) - (before.backward_ns or 0) == back + forward * recompute
        assert (after.input_grad_ns or 0) - (before.input_grad_ns or 0) == back + forward * recompute
        assert after.weight_grad_ns == before.weight_grad_ns
    assert row_of(plain, "split") == row_of(priced, "split")
    assert "by the links of the cluster" in priced.source.notes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shards": (0, 2)}, "each 1 or more"),
        ({"shards": ()}, "give at least one"),
        ({"shards": (1, 2)}, "does not say how it is split; give --shards 1"),
        ({"shards": (1, 2), "cluster": cluster(1)}, "does not say how"),
    ],
)
def test_splits_that_make_no_sense(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        measure(chain(perceptron), **options)


def test_more_shards_than_devices() -> None:
    with pytest.raises(UsageError, match="--shards 4: the cluster has 2 devices"):
        measure(shares(1), shards=(1, 4), cluster=cluster(2))


# GPT-2, split ----------------------------------------------------------------------------------------------------


def sizes_of(model: Model) -> dict[str, int]:
    return {step.spec.id: sum(p.numel() for p in step.module.parameters()) for step in shaped_blocks(model, 1)}


def split(model: Model, num_devices: int) -> Model:
    assert model.sharded is not None
    return model.sharded(num_devices)


@pytest.mark.parametrize("name", ["gpt2-tiny", "gpt2-124m"])
def test_shares_add_up_to_the_parameters(name: str) -> None:
    """All is there once, but norms, positions and the biases of outputs are on every device; words are rounded up."""
    size, model = ZOO[name], load_model(name)
    whole, share = sizes_of(model), sizes_of(split(model, 2))
    hidden, words = size.hidden, 2 * -(-size.vocabulary // 2) - size.vocabulary
    twice = {"embedding": size.positions * hidden, "attention": 3 * hidden, "ffn": 3 * hidden, "head": 2 * hidden}
    for block in model.blocks:
        rounded = words * hidden * (block.operator in ("embedding", "head"))
        assert 2 * share[block.id] == whole[block.id] + twice[block.operator] + rounded


def matrix_flops(model: Model) -> int:
    bench = in_one_piece(model, 2)
    with FlopCounterMode(display=False) as counter:
        bench.run().backward()
    return counter.get_total_flops()


def test_shares_add_up_to_the_work() -> None:
    model = replace(TINY, heads=4).model("g")
    assert matrix_flops(model) == 4 * matrix_flops(split(model, 4))


def test_edges_of_a_share_are_slices_of_those_of_the_whole() -> None:
    model = load_model("gpt2-tiny")
    whole, share = (block_graph_of(each, torch.float32).edges for each in (model, split(model, 2)))
    assert [edge.model_copy(update={"bytes_per_sample": 2 * edge.bytes_per_sample}) for edge in share] == list(whole)
    assert [block.id for block in split(model, 2).blocks] == [block.id for block in model.blocks]


@pytest.mark.parametrize("half", [SelfAttention, FeedForward])
def test_outputs_of_shares_add_up(half: Callable[..., nn.Module]) -> None:
    whole, x = half(TINY.stack).double(), torch.randn(2, 16, 32, dtype=torch.float64)
    made = [half(TINY.stack, Shards(2, rank)).double() for rank in range(2)]
    with torch.no_grad():
        for rank, share in enumerate(made):
            for name, parameter in share.named_parameters():
                parameter.copy_(_part(whole.get_parameter(name), name, rank))
        bias = whole.get_parameter("project.bias")
        total = x + bias + sum(share(x) - x - bias for share in made)
        torch.testing.assert_close(total, whole(x))


def _part(whole: Tensor, name: str, rank: int) -> Tensor:
    """One of two devices' part of a parameter, laid out as the modules have it."""
    if name.startswith(("qkv", "expand")):
        groups = 3 if name.startswith("qkv") else 1
        return torch.cat([part.chunk(2)[rank] for part in whole.chunk(groups)])
    return whole.chunk(2, dim=1)[rank] if name == "project.weight" else whole


@pytest.mark.parametrize(
    "size", [TINY, GPTSize(layers=1, hidden=9, heads=3, vocabulary=50257, positions=1024, sequence=1024)]
)
def test_heads_that_cannot_be_split(size: GPTSize) -> None:
    told = r"it has (2|3) heads, which 5 devices cannot share evenly; these numbers of devices can: 1, \1$"
    with pytest.raises(UsageError, match=told):
        split(size.model("odd"), 5)


def test_a_number_of_devices_that_cannot_be_names_flag_and_model() -> None:
    with pytest.raises(UsageError, match=r"^--shards 4: model 'gpt2-tiny' cannot be split: it has 2 heads, which 4"):
        measure(load_model("gpt2-tiny"), shards=(1, 2, 4))


@pytest.mark.parametrize("how", [[], ["--estimate", "--device", "v100-16gb"]])
@pytest.mark.parametrize(
    ("name", "shards", "what"),
    [
        ("dlrm-tiny", 3, r"16 along dimension 0 of 'layer.weight' of block 'dense0.layer0'"),
        (f"{LLAMA}, num_attention_heads=28, num_key_value_heads=4, hidden_size=112)", 8, "28 heads in LlamaConfig"),
        (
            f"{LLAMA}, num_attention_heads=4, hidden_size=64, intermediate_size=63)",
            2,
            r"63 along dimension 0 of \S*gate_proj.weight",
        ),
    ],
)
def test_shards_that_cannot_be_are_refused_before_any_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: list[str], name: str, shards: int, what: str
) -> None:
    """No block of these is built but on the meta device, and none is traced; what would do is said, and does."""

    def work(*_: object, **__: object) -> NoReturn:
        raise AssertionError("something was built or traced")

    monkeypatch.setattr("pipeplan.runtime.models.huggingface.build.capture", work)
    monkeypatch.setattr("pipeplan.runtime.models.spec._seeded", work)
    made = build._module
    monkeypatch.setattr(build, "_module", lambda *given: made(*given) if given[3] else work())  # on the meta device
    asked = ["profile", name, "--microbatch", "1", *how, "-o", str(tmp_path / "p.json"), "--shards"]
    refused = CliRunner().invoke(cli, [*asked, str(shards)]).exception
    told = rf"--shards {shards}: model .* cannot be split: it has {what}, which {shards} devices .* can: 1((?:, \d+)*)$"
    found = re.fullmatch(told, str(refused))
    assert found is not None, refused
    for count in ("1" + found[1]).split(", ")[-2:]:
        assert "cannot be split" not in str(CliRunner().invoke(cli, [*asked, count]).exception)


@pytest.mark.parametrize(
    ("name", "kept", "what"),
    [
        ("gpt2-tiny", [1, 2], r"2 heads, which {} devices"),
        (
            f"{LLAMA}, num_attention_heads=12, num_key_value_heads=4, hidden_size=48)",
            [1, 2],
            "12 heads in .*, which {}",
        ),
    ],
)
def test_shards_that_cannot_be_are_left_out_where_others_can(
    tmp_path: Path, name: str, kept: list[int], what: str
) -> None:
    path = tmp_path / "p.json"
    how = ["--microbatch", "1", "--sequence", "8", "--estimate", "--device", "v100-16gb", "-o", str(path), "--shards"]
    done = CliRunner().invoke(cli, ["profile", name, *how, "1,2,5,8"])
    assert done.exit_code == 0, done.exception
    for count in (5, 8):
        assert re.search(rf"left out: --shards {count}: model .* it has {what.format(count)}", done.stderr), done.stderr
    assert {row.shards for block in read_profile(str(path)).blocks for row in block.costs} == set(kept)
    alone = CliRunner().invoke(cli, ["profile", name, *how, "1,5"])
    assert str(alone.exception).startswith("--shards 5: model ")


def test_a_module_that_does_not_say_how_it_is_split_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    made = (nn.Bilinear(2, 2, 2), {"input1": torch.ones(2, 2), "input2": torch.ones(2, 2)})
    monkeypatch.setattr("pipeplan.runtime.models.load.value_of", lambda *_: made)
    monkeypatch.setattr("pipeplan.runtime.models.load._captured", None)
    with pytest.raises(UsageError, match=r"--shards 2: model 'my:own' does not say how it is split; give --shards 1"):
        load_model("my:own", shards=(1, 2))


@slow_but("dtype", [torch.float16, torch.bfloat16], lambda dtype: dtype is torch.bfloat16, always)
def test_all_cases_in_short_formats(dtype: torch.dtype) -> None:
    found = measure(load_model("gpt2-tiny"), shards=(1, 2), recompute=True, dtype=dtype)
    wide = 16 * 32 * 2
    for block in found.blocks:
        assert {(row.shards, row.recompute) for row in block.costs} == {
            (1, False),
            (1, True),
            (2, False),
            (2, True),
        }
    assert row_of(found, "layer0.ffn").activation_bytes >= 10 * wide
    half = row_of(found, "layer0.ffn", shards=2)
    assert half.sequence_parallel
    assert not row_of(found, "layer0.ffn").sequence_parallel
    assert half.weight_grad_bytes == (0.5 + 2 + 2 + 1) * wide, "of the input a slice, of the output's gradient all"
    assert row_of(found, "layer0.attention", recompute=True).activation_bytes == wide


# Models in one piece ---------------------------------------------------------------------------------------------


def test_blocks_hold_what_the_whole_holds() -> None:
    model = load_model("gpt2-tiny")
    whole = in_one_piece(model, 4)
    found = measure(model, (4,), repeats=3, beside=[whole.time])
    result = whole.result()
    assert result.retained_bytes == result.allocated_bytes
    blocks = sum(row.activation_bytes for block in found.blocks for row in block.costs)
    assert blocks == pytest.approx(result.retained_bytes, rel=0.001)
    assert len(whole.forward_ns) == len(whole.backward_ns) == 3


def test_tensors_that_several_blocks_take() -> None:
    """Each counts them; a model in one piece does not."""

    def block(id_: str, *sources: str) -> BlockSpec:
        return BlockSpec(id_, "layer", perceptron if len(sources) < 2 else Stack, sources, () if sources else ("x",))

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3 * WIDTH, WIDTH)

        def forward(self, *given: Tensor) -> Tensor:
            return self.layer(torch.cat(given, dim=1))

    model = of_blocks(block("a"), block("b", "a"), block("c", "a"), block("d", "a", "b", "c"))
    whole = in_one_piece(model, 8)
    found = measure(model, (8,), beside=[whole.time])
    apart = sum(block.costs[0].activation_bytes for block in found.blocks)
    held = stage_costs(found, [block.id for block in found.blocks], 8).activation_bytes
    # three take a, and d, whose backward needs what it makes of them, counts b and c; the last output nobody takes
    assert apart - held == (2 + 2) * 8 * WIDTH * FLOAT
    assert held == whole.result().retained_bytes - 8 * WIDTH * FLOAT


def test_a_module_in_one_piece() -> None:
    module, x = perceptron(), torch.randn(64, WIDTH)
    found = measure_whole(lambda: module(x), modules=[module], given=[x], repeats=3, warmup=1)
    wide = 64 * FLOAT
    # x, which the norm saves; normed, expanded and activated; the output; a mean and a deviation for each sample
    assert found.retained_bytes == found.allocated_bytes == wide * (WIDTH + WIDTH + 32 + 32 + WIDTH + 2)
    assert min(found.forward_ns, found.backward_ns) > 0


def test_a_whole_that_fails() -> None:
    with pytest.raises(ExecutionError, match="the model in one piece failed: RuntimeError"):
        measure_whole(lambda: torch.ones(2) @ torch.ones(3))


# What a series of times tells ------------------------------------------------------------------------------------


def test_drift_and_outliers() -> None:
    assert drift_of([100] * 5 + [120] * 5) == pytest.approx(0.2)
    assert drift_of([100, 120] * 6) == 0
    assert drift_of([1, 2, 3]) == 0
    assert num_outliers([100, 101, 99, 100, 102, 98, 500]) == 1
    assert num_outliers([100, 101, 99, 100, 102, 98, 103]) == 0
    assert num_outliers([1, 1000]) == 0


def test_unsteady_blocks_run_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to five times as often, and others no more than asked for."""
    monkeypatch.setattr(Bench, "is_unsteady", lambda bench, most: bench.key.block == "b" and len(bench.times) < 7)
    found = measure(chain(perceptron), repeats=3, max_spread=0.1)
    assert (row_of(found, "a").repeats, row_of(found, "b").repeats) == (3, 7)
    monkeypatch.setattr(Bench, "is_unsteady", lambda bench, most: True)
    assert {
        row.repeats for block in measure(chain(perceptron), repeats=3, max_spread=0.1).blocks for row in block.costs
    } == {15}
