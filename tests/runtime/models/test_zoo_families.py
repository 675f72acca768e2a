"""Every family of the zoo: the papers' graphs and parameters, what its blocks compute, and plans that train it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import groupby

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from builders.requests import request_of
from pipeplan.catalog import model_sizes
from pipeplan.costs.devices import device_preset
from pipeplan.errors import UsageError
from pipeplan.examples import MODELS
from pipeplan.examples import model as paper_model
from pipeplan.files import PlacedStage
from pipeplan.planning.request import Batch
from pipeplan.planning.steps import search_plan
from pipeplan.runtime.executor.rank_program import programs_of
from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.models.shapes import ShapedBlock, output_shapes, shaped_blocks
from pipeplan.runtime.models.spec import Model
from pipeplan.runtime.models.zoo import ZOO
from pipeplan.runtime.parallel import Share
from pipeplan.runtime.parallel.sharding import Shards, slice_of
from pipeplan.runtime.profiling.estimate import estimate_model
from pipeplan.runtime.training.options import TrainOptions
from runtime_support.plans import Unsplit, placed_plan
from runtime_support.threads import joined, require_equal_to_unsplit, together
from support.marks import slow_but

TINY = sorted(name for name in ZOO if name.endswith("-tiny"))
ALIKE = [name for name in TINY if "capacity" not in name]
"""Those whose losses do not depend on the plan; what experts with a capacity leave out does (test_experts_run.py)."""

PAPERS = sorted(set(ZOO) & set(MODELS))
WIDTH = 2  # bytes of a number in the papers' profiles


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def test_every_family_has_a_tiny_model() -> None:
    sizes = model_sizes()
    operators = {name for name in ZOO if name.endswith("-operators")}
    assert {sizes[name].family for name in TINY} == {sizes[name].family for name in set(ZOO) - operators}
    tiny = {sizes[name].family for name in operators if name.endswith("-tiny-operators")}
    assert tiny == {sizes[name].family for name in operators}
    assert set(ZOO) - set(MODELS) - operators == set(TINY), "all others are the papers'"


@pytest.mark.parametrize("name", PAPERS)
def test_graphs_and_parameters_are_those_of_the_examples(name: str) -> None:
    """So plans searched on ``pipeplan example NAME`` run with ``--model NAME``."""
    profile, model = paper_model(name, microbatch_sizes=(1,)), load_model(name)
    assert [block.id for block in model.blocks] == [block.id for block in profile.blocks]
    assert set(model.edges) == {(edge.source, edge.target) for edge in profile.edges}
    assert [{id_ for id_, _ in group} for group in model.tied] == [set(each.blocks) for each in profile.tied]
    sizes: dict[object, int] = {}  # of blocks that are built alike
    for block, expected in zip(model.blocks, profile.blocks, strict=True):
        assert (block.operator, dict(block.dimensions)) == (expected.operator, expected.dimensions), block.id
        assert block.shared == expected.shared
        key = (block.operator, tuple(block.dimensions.items()), len(block.sources))
        if key not in sizes:
            with torch.device("meta"):
                sizes[key] = sum(parameter.numel() for parameter in block.build().parameters())
        assert sizes[key] == expected.parameters, block.id


@slow_but("name", ["tessel-mt5-1.8b", "tessel-flava", "mmt", "dlrm"], lambda name: name in ("mmt", "dlrm"))
def test_tensors_between_blocks_are_those_of_the_examples(name: str) -> None:
    profile, model = paper_model(name, microbatch_sizes=(1,)), load_model(name)
    specs = output_shapes(model, 1)
    for edge in profile.edges:
        assert math.prod(specs[edge.source][0]) * WIDTH == edge.bytes_per_sample, edge.source


# What blocks compute ----------------------------------------------------------------------------------------------

Weights = dict[str, Tensor]
Run = tuple[Tensor, list[Tensor | None], dict[str, Tensor | None]]


class Written:
    """Models a second time, each one function of all weights: explicit attention, no modules."""

    def __init__(self, weights: dict[str, Weights], heads: int) -> None:
        self.weights, self.heads = weights, heads

    def norm(self, x: Tensor, block: str) -> Tensor:
        own = self.weights[block]
        weight = own["norm.weight"] if "norm.weight" in own else own["weight"]  # of a norm that is a block
        return F.layer_norm(x, x.shape[-1:], weight, own.get("norm.bias"), 1e-5)

    def line(self, x: Tensor, block: str, name: str) -> Tensor:
        own = self.weights[block]
        return x @ own[f"{name}.weight"].t() + own.get(f"{name}.bias", torch.zeros(()))

    def mix(self, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
        made = []
        for q, k, v in zip(*(each.chunk(self.heads, -1) for each in (query, key, value)), strict=True):
            scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
            if causal:
                scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
            made.append(scores.softmax(-1) @ v)
        return torch.cat(made, -1)

    def attention(self, x: Tensor, block: str, causal: bool) -> Tensor:
        three = self.line(self.norm(x, block), block, "qkv").chunk(3, -1)
        return x + self.line(self.mix(*three, causal), block, "project")

    def cross(self, x: Tensor, memory: Tensor, block: str) -> Tensor:
        query = self.line(self.norm(x, block), block, "query")
        mixed = self.mix(query, *self.line(memory, block, "memory").chunk(2, -1), causal=False)
        return x + self.line(mixed, block, "project")

    def ffn(self, x: Tensor, block: str) -> Tensor:
        wide = F.gelu(self.line(self.norm(x, block), block, "expand"), approximate="tanh")
        return x + self.line(wide, block, "project")

    def layers(self, x: Tensor, prefix: str, causal: bool = False) -> Tensor:
        for layer in range(2):
            x = self.ffn(self.attention(x, f"{prefix}{layer}.attention", causal), f"{prefix}{layer}.ffn")
        return x

    def perceptron(self, x: Tensor, prefix: str) -> Tensor:
        for layer in range(2):
            x = self.line(x, f"{prefix}{layer}", "layer").relu()
        return x

    def value(self, x: Tensor, batch: Weights) -> Tensor:
        return (self.line(x, "head", "output").squeeze(-1) - batch["targets"]).square().mean()


def waves(sequence: int, hidden: int) -> Tensor:
    """Vaswani et al. (2017), section 3.5, number by number."""
    return torch.tensor(
        [
            [(math.cos if i % 2 else math.sin)(place / 10_000 ** ((i - i % 2) / hidden)) for i in range(hidden)]
            for place in range(sequence)
        ],
        dtype=torch.float64,
    )


def mt5(own: Written, batch: Weights) -> Tensor:
    table = own.weights["encoder.embedding"]["token.weight"]
    x = own.layers(table[batch["tokens"]] * math.sqrt(32) + waves(8, 32), "encoder.layer")
    encoded = own.norm(x, "encoder.norm")
    x = table[batch["decoder_tokens"]] * math.sqrt(32) + waves(8, 32)
    for layer in range(2):
        at = f"decoder.layer{layer}"
        x = own.attention(x, f"{at}.attention", causal=True)
        x = own.cross(x, encoded, f"{at}.cross-attention")
        x = own.ffn(x, f"{at}.ffn")
    logits = own.norm(x, "head") @ table.t()
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def flava(own: Written, batch: Weights) -> Tensor:
    embedding = own.weights["text.embedding"]
    text = embedding["token.weight"][batch["tokens"]] + embedding["position.weight"]
    image = own.line(batch["patches"], "image.embedding", "embed") + waves(9, 16)
    towers = [own.layers(text, "text.layer", causal=True), own.layers(image, "image.layer")]
    x = own.norm(own.layers(torch.cat(towers, 1), "cross.layer"), "cross.pool")
    return F.cross_entropy(own.line(x[:, 0], "cross.pool", "output"), batch["targets"])


def mmt(own: Written, batch: Weights) -> Tensor:
    branches = [
        own.layers(own.line(batch[f"patches{i}"], f"branch{i}.embedding", "embed") + waves(16, 32), f"branch{i}.layer")
        for i in range(2)
    ]
    return own.value(torch.cat(branches, -1), batch)


def dlrm(own: Written, batch: Weights) -> Tensor:
    found = [own.perceptron(batch[f"dense{i}"], f"dense{i}.layer") for i in range(2)]
    for i in range(2):
        rows = own.weights[f"sparse{i}.embedding"]["table.weight"]
        found.append(torch.stack([torch.cat([rows[index] for index in sample]) for sample in batch[f"sparse{i}"]]))
    return own.value(own.perceptron(torch.cat(found, -1), "top.layer"), batch)


def candle_uno(own: Written, batch: Weights) -> Tensor:
    found = [own.perceptron(batch[f"features{i}"], f"branch{i}.layer") for i in range(3)]
    return own.value(torch.cat(found, -1), batch)


@pytest.mark.parametrize(
    ("name", "heads", "written"),
    [
        ("tessel-mt5-tiny", 4, mt5),
        ("tessel-flava-tiny", 2, flava),
        ("mmt-tiny", 2, mmt),
        ("dlrm-tiny", 1, dlrm),
        ("candle-uno-tiny", 1, candle_uno),
    ],
)
def test_blocks_compute_the_model(name: str, heads: int, written: Callable[[Written, Weights], Tensor]) -> None:
    """Against the model written a second time, in float64, with biases and norms that count."""
    torch.manual_seed(0)
    unsplit = Unsplit(
        load_model(name), TrainOptions(name, seed=7, dtype="float64", learning_rate=0.0, weight_decay=0.0)
    )
    for parameter in dict.fromkeys(unsplit.parameters().values()):
        parameter.data += 0.1 * torch.randn_like(parameter)
    weights: dict[str, Weights] = {
        id_: {_plain(key): value.detach().clone() for key, value in module.named_parameters()}
        for id_, module in unsplit.modules.items()
    }
    batch = unsplit.model.mini_batch(3, 0, 7, dtype=torch.float64)
    assert unsplit.step(0, 3) == pytest.approx(float(written(Written(weights, heads), batch)), rel=1e-6)


def _plain(key: str) -> str:
    """A parameter's name without that of the part that a decoder's block wraps."""
    return key.removeprefix("part.")


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", ["tessel-gpt-tiny", "tessel-mt5-tiny", "tessel-flava-tiny", "dlrm-tiny", "mmt-tiny"])
def test_blocks_split_over_devices_compute_the_same(name: str, count: int) -> None:
    model = load_model(name)
    steps = [
        step for step in shaped_blocks(model, 3, torch.float64) if not step.spec.dimensions.get("heads", count) % count
    ]
    assert len(steps) > len(model.blocks) / 3
    for step in steps:
        require_equal_shares(model, step, count)


def require_equal_shares(model: Model, step: ShapedBlock, count: int) -> None:
    """Outputs and the gradients of all inputs and parameters, which are put together from the shares.

    Shares that divide the sequence take and give slices of it, and have a part of each whole parameter's gradient.
    """
    batch = model.mini_batch(3, 0, 0, dtype=torch.float64)
    inputs = [torch.randn(tensor.shape, dtype=torch.float64) for tensor in step.inputs]
    samples = [batch[key] for key in step.spec.samples]
    weight = torch.randn(step.outputs[0].shape, dtype=torch.float64)
    id_, split = step.spec.id, step.spec.split
    assert split is not None, id_
    divided = split.divides(count)
    output, to_inputs, to_parameters = run_alone(model.build(id_, 1, dtype=torch.float64), inputs, samples, weight)
    ranks = tuple(range(count))
    streams = [model.streams_of(source) for source, _ in step.spec.inputs]

    def share(shards: Shards) -> Run:
        def own(whole: Tensor, parts: int) -> Tensor:
            return slice_of(whole, count, shards.index, parts=parts) if divided and whole.ndim > 1 else whole

        module = model.build_share(Share(id_, shards.index, ranks), 1, shards, dtype=torch.float64)
        taken = [own(each, parts) for each, parts in zip(inputs, streams, strict=True)]
        return run_alone(module, taken, samples, own(weight, split.streams))

    shares = together(count, share)
    for made, returned, _ in [side_by_side(shares, split.streams, streams)] if divided else shares:
        torch.testing.assert_close(made, output, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(returned, to_inputs, rtol=1e-10, atol=1e-10)
    for key, whole in to_parameters.items():
        parts = [found[key] for _, _, found in shares]
        if key in split.cuts:
            parts = [joined(split.cuts[key], parts)]
        elif divided:
            parts = [torch.stack(parts).sum(0)]
        for part in parts:
            torch.testing.assert_close(part, whole, rtol=1e-10, atol=1e-10)


def side_by_side(shares: list[Run], given: int, taken: list[int]) -> Run:
    """What shares that divide the sequence made, but for their parameters' gradients; a loss is whole on each.

    Outputs have ``given`` sequences, one behind the other, and inputs those ``taken``.
    """

    def whole(slices: Sequence[Tensor], parts: int) -> Tensor:
        return torch.cat([each.chunk(parts, 1)[part] for part in range(parts) for each in slices], 1)

    made = [each for each, _, _ in shares]
    inputs = zip(*(returned for _, returned, _ in shares), strict=True)
    back = [whole(each, parts) for each, parts in zip(inputs, taken, strict=True)]
    return whole(made, given) if made[0].ndim > 1 else made[0], back, {}


def run_alone(module: nn.Module, inputs: list[Tensor], samples: list[Tensor], weight: Tensor) -> Run:
    """The output, and the gradients that a gradient ``weight`` of it makes."""
    leaves = [each.clone().requires_grad_() for each in inputs]
    made = module(*leaves, *samples)
    (made * weight).sum().backward()
    return made.detach(), [leaf.grad for leaf in leaves], {key: p.grad for key, p in module.named_parameters()}


def test_heads_that_devices_cannot_share() -> None:
    model = load_model("gpt2-tiny")
    with pytest.raises(UsageError, match=r"layer0.attention.*over 4 devices: it has 2 heads, which 4 devices cannot"):
        model.build_share(Share("layer0.attention", 0, (0, 1, 2, 3)), 0, Shards(4))


@pytest.mark.parametrize("name", TINY)
def test_models_learn(name: str) -> None:
    """The same samples again and again."""
    unsplit = Unsplit(load_model(name), TrainOptions(name, learning_rate=1e-2, weight_decay=0.0))
    losses = [unsplit.step(0, 8) for _ in range(30)]
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("name", TINY)
def test_samples_do_not_depend_on_their_number(name: str) -> None:
    model = load_model(name)
    few, many, others = model.batch(2, 3, 1), model.batch(4, 3, 1), model.batch(4, 4, 1)
    assert all(torch.equal(few[key], many[key][:2]) for key in few)
    assert not all(torch.equal(many[key], others[key]) for key in many)
    assert {key for block in model.blocks for key in block.samples} == set(few)


# Plans -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tessel-mt5-1.8b", "mmt", "dlrm"])
def test_plans_of_the_examples_profiles_are_the_models(name: str) -> None:
    """Every rank finds its blocks, and what travels between them, by name."""
    profile, model = paper_model(name, microbatch_sizes=(1,)), load_model(name)
    plan = search_plan(
        request_of(profile, "one-to-one", Batch(4, 1), num_devices=4, time_limit=0.1, deterministic=True)
    ).plan
    programs = programs_of(plan, [block.id for block in model.blocks], model.edges, model.name)
    blocks = [block for program in programs for part in program.stages.values() for block in part.blocks]
    assert sorted(blocks) == sorted(block.id for block in model.blocks)


@slow_but("name", ALIKE, lambda name: name not in ("tessel-flava-tiny", "tessel-mt5-tiny"))
def test_a_searched_plan_trains_as_an_unsplit_run(name: str) -> None:
    model = load_model(name)
    preset = device_preset("cpu")
    profile = estimate_model(model, (1, 2), device=preset, dtype=torch.float64)
    plan = search_plan(
        request_of(profile, "one-to-one", Batch(2, 2), num_devices=3, time_limit=0.1, deterministic=True)
    ).plan
    assert len(plan.stages) >= 2
    require_equal_to_unsplit(model, plan)


@pytest.mark.parametrize("name", ALIKE)
def test_a_plan_that_splits_blocks_trains_as_an_unsplit_run(name: str) -> None:
    """Shared blocks, or without any the first half, on both of two devices; the others on one each."""
    model = load_model(name)
    ids = [block.id for block in model.blocks]
    shared = {block.id for block in model.blocks if block.shared} or set(ids[: len(ids) // 2])
    stages = []
    for on_both, run in groupby(ids, key=lambda id_: id_ in shared):
        blocks = tuple(run)
        cuts = [blocks] if on_both or len(blocks) < 2 else [blocks[: len(blocks) // 2], blocks[len(blocks) // 2 :]]
        devices = [(0, 1)] if on_both else [(0,), (1,)]
        stages += [
            PlacedStage(blocks=cut, devices=place, shards=len(place)) for cut, place in zip(cuts, devices, strict=False)
        ]
    assert {stage.shards for stage in stages} == {1, 2}
    require_equal_to_unsplit(model, placed_plan(model, stages, num_microbatches=2, split=True))
