"""The models of the zoo, and what the runtime relies on of any model."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeplan.errors import UsageError
from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.models.shapes import output_shapes, shaped_blocks
from pipeplan.runtime.models.spec import BlockSpec, Model, token_batch
from pipeplan.runtime.models.zoo import ZOO, zoo_model
from pipeplan.runtime.parallel.weight_grads import DeferredLinear
from support.marks import slow_but


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def num_parameters(model: Model) -> int:
    """Of the whole model, tied ones once."""
    tied = {holder for group in model.tied for holder in group[1:]}
    return sum(
        parameter.numel()
        for step in shaped_blocks(model, 1)
        for name, parameter in step.module.named_parameters()
        if (step.spec.id, name) not in tied
    )


def loss_of(model: Model, modules: dict[str, nn.Module], batch: dict[str, Tensor]) -> Tensor:
    """Mean loss of a model that runs in one piece."""
    values: dict[str, Tensor] = {}
    total = torch.zeros((), dtype=next(modules[model.blocks[0].id].parameters()).dtype)
    for block in model.blocks:
        inputs = [values[source] for source in block.sources] + [batch[name] for name in block.samples]
        values[block.id] = modules[block.id](*inputs)
        if block.loss:
            total = total + values[block.id]
    return total / model.predictions(batch)


# GPT-2 -----------------------------------------------------------------------------------------------------------


@slow_but(
    "name, num_blocks, num",
    [("gpt2-124m", 26, 124_439_808), ("gpt2-345m", 50, 354_823_168)],
    lambda case: case[0] == "gpt2-124m",
)
def test_parameter_counts(name: str, num_blocks: int, num: int) -> None:
    """The published sizes of GPT-2 small and medium, with shorter sequences, too."""
    assert len(load_model(name).blocks) == num_blocks
    assert num_parameters(load_model(name)) == num
    assert num_parameters(load_model(name, sequence=64)) == num


def test_shapes_are_known_without_computing() -> None:
    specs = output_shapes(load_model("gpt2-345m"), 3)
    assert specs["embedding"] == ((3, 1024, 1024), torch.float32)
    assert specs["layer23.ffn"] == ((3, 1024, 1024), torch.float32)
    assert specs["head"] == ((), torch.float32)
    short = output_shapes(load_model("gpt2-124m", sequence=100), 2, torch.bfloat16)
    assert short["layer0.attention"] == ((2, 100, 768), torch.bfloat16)
    assert short["head"] == ((), torch.float32)


def test_graph_of_the_tiny_model() -> None:
    model = load_model("gpt2-tiny")
    ids = [block.id for block in model.blocks]
    assert ids == [
        "embedding",
        *(f"layer{layer}.{half}" for layer in range(4) for half in ("attention", "ffn")),
        "head",
    ]
    assert model.edges == tuple(zip(ids, ids[1:], strict=False))
    assert [block.id for block in model.blocks if block.loss] == ["head"]
    assert model.block("layer2.attention").dimensions == {"sequence": 16, "hidden": 32, "heads": 2}
    assert model.block("layer2.ffn").dimensions == {"sequence": 16, "hidden": 32, "ffn": 128}
    assert model.block("head").dimensions == {"sequence": 16, "hidden": 32, "vocabulary": 64}
    assert model.tied == ((("embedding", "token.weight"), ("head", "output.weight")),)
    with pytest.raises(KeyError):
        model.block("layer4.ffn")


def reference_loss(size: object, weights: dict[str, dict[str, Tensor]], batch: dict[str, Tensor]) -> Tensor:
    """GPT-2 written a second time, from the paper: one function, explicit attention, no modules."""
    layers, heads = size.layers, size.heads
    tokens = batch["tokens"]
    length = tokens.shape[1]
    embedding = weights["embedding"]
    x = embedding["token.weight"][tokens] + embedding["position.weight"][:length]
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    for layer in range(layers):
        part = weights[f"layer{layer}.attention"]
        normed = F.layer_norm(x, x.shape[-1:], part["norm.weight"], part["norm.bias"], 1e-5)
        query, key, value = (normed @ part["qkv.weight"].t() + part["qkv.bias"]).chunk(3, dim=-1)
        heads_of = [
            [each[..., i * each.shape[-1] // heads : (i + 1) * each.shape[-1] // heads] for i in range(heads)]
            for each in (query, key, value)
        ]
        mixed = []
        for q, k, v in zip(*heads_of, strict=True):
            scores = (q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])).masked_fill(~mask, -math.inf)
            mixed.append(scores.softmax(-1) @ v)
        x = x + torch.cat(mixed, -1) @ part["project.weight"].t() + part["project.bias"]
        part = weights[f"layer{layer}.ffn"]
        normed = F.layer_norm(x, x.shape[-1:], part["norm.weight"], part["norm.bias"], 1e-5)
        wide = normed @ part["expand.weight"].t() + part["expand.bias"]
        wide = 0.5 * wide * (1 + torch.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)))
        x = x + wide @ part["project.weight"].t() + part["project.bias"]
    part = weights["head"]
    logits = F.layer_norm(x, x.shape[-1:], part["norm.weight"], part["norm.bias"], 1e-5) @ embedding["token.weight"].t()
    chosen = logits.log_softmax(-1).gather(-1, batch["targets"][..., None])
    return -chosen.mean()


def test_tiny_model_is_gpt2() -> None:
    """Loss and gradients against an independent formula, in float64."""
    model = load_model("gpt2-tiny")
    modules = {block.id: model.build(block.id, 7, dtype=torch.float64) for block in model.blocks}
    modules["head"].output.weight = modules["embedding"].token.weight
    for module in modules.values():  # so that biases and norms count
        for parameter in module.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    batch = model.mini_batch(3, 0, 1, dtype=torch.float64)
    loss = loss_of(model, modules, batch)
    loss.backward()
    copies = copy.deepcopy({id_: dict(module.named_parameters()) for id_, module in modules.items()})
    for parameters in copies.values():
        for parameter in parameters.values():
            parameter.grad = None
    expected = reference_loss(ZOO["gpt2-tiny"], copies, batch)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
    for id_, parameters in copies.items():
        for name, parameter in parameters.items():
            found = modules[id_].get_parameter(name).grad
            if (id_, name) != ("head", "output.weight"):  # here the same parameter, in the copy an unused one
                torch.testing.assert_close(found, parameter.grad, rtol=1e-9, atol=1e-12, msg=f"{id_} {name}")


def test_initial_loss_is_that_of_guessing() -> None:
    model = load_model("gpt2-tiny")
    modules = {block.id: model.build(block.id, 0) for block in model.blocks}
    assert loss_of(model, modules, model.mini_batch(8, 0, 0)).item() == pytest.approx(math.log(64), abs=0.1)


def test_training_lowers_the_loss() -> None:
    """The made-up text has something to learn."""
    model = load_model("gpt2-tiny")
    modules = {block.id: model.build(block.id, 0) for block in model.blocks}
    optimizer = torch.optim.AdamW([p for module in modules.values() for p in module.parameters()], lr=1e-2)
    losses = []
    for step in range(40):
        optimizer.zero_grad()
        loss = loss_of(model, modules, model.mini_batch(16, step, 0))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1


def test_loss_in_bfloat16_keeps_its_digits() -> None:
    model = load_model("gpt2-tiny")
    exact, coarse = (
        loss_of(
            model,
            {block.id: model.build(block.id, 0, dtype=dtype) for block in model.blocks},
            model.mini_batch(64, 0, 0, dtype=dtype),
        ).item()
        for dtype in (torch.float64, torch.bfloat16)
    )
    assert coarse == pytest.approx(exact, rel=2e-3)


def test_untied_head_has_weights_of_its_own() -> None:
    model = replace(ZOO["gpt2-tiny"], tied=False).model("untied")
    assert model.tied == ()
    head, embedding = model.build("head", 0), model.build("embedding", 0)
    assert not torch.equal(head.output.weight, embedding.token.weight)
    assert head.output.weight.std().item() == pytest.approx(0.02, rel=0.1)


# Seeds and batches -----------------------------------------------------------------------------------------------


def test_a_block_does_not_depend_on_what_else_is_built() -> None:
    model = load_model("gpt2-tiny")
    forwards = {block.id: model.build(block.id, 5).state_dict() for block in model.blocks}
    torch.manual_seed(99)
    before = torch.get_rng_state()
    for block in reversed(model.blocks[3:]):
        again = model.build(block.id, 5).state_dict()
        assert all(torch.equal(value, again[name]) for name, value in forwards[block.id].items())
    assert torch.equal(torch.get_rng_state(), before)
    alike, other = forwards["layer0.ffn"]["expand.weight"], forwards["layer1.ffn"]["expand.weight"]
    assert not torch.equal(alike, other)
    assert not torch.equal(alike, model.build("layer0.ffn", 6).state_dict()["expand.weight"])


def test_seeded_parameters_stay_the_same_over_versions() -> None:
    """From a stable hash of seed and id, not from Python's own, which changes from process to process."""
    weight = load_model("gpt2-tiny").build("layer1.attention", 0, dtype=torch.float64).qkv.weight
    assert weight.flatten()[:3].tolist() == pytest.approx([-0.00320761, -0.00856628, -0.01156669], abs=1e-7)


def test_tied_parameters_start_equal() -> None:
    model = load_model("gpt2-tiny")
    head, embedding = model.build("head", 3), model.build("embedding", 3)
    assert torch.equal(head.output.weight, embedding.token.weight)
    assert head.output.weight is not embedding.token.weight


def test_blocks_are_built_with_weight_gradients_that_can_wait() -> None:
    assert type(load_model("gpt2-tiny").build("layer0.ffn", 0).expand) is DeferredLinear


def test_samples_do_not_depend_on_their_number() -> None:
    for model in (load_model("gpt2-tiny"), load_model("gpt2-124m", sequence=20)):
        few, many = model.batch(3, 4, 5), model.batch(8, 4, 5)
        assert all(torch.equal(few[name], many[name][:3]) for name in ("tokens", "targets"))
        assert not torch.equal(many["tokens"], model.batch(8, 5, 5)["tokens"])
        assert not torch.equal(many["tokens"], model.batch(8, 4, 6)["tokens"])
        assert torch.equal(many["tokens"][:, 1:], many["targets"][:, :-1])
        assert model.predictions(many) == many["targets"].numel()


def test_token_batch_stays_within_its_vocabulary() -> None:
    batch = token_batch(vocabulary=3, sequence=9, num_samples=20, step=1, seed=2)
    assert batch["tokens"].shape == batch["targets"].shape == (20, 9)
    assert set(batch["tokens"].flatten().tolist()) == {0, 1, 2}


def test_mini_batch_takes_the_models_number_format() -> None:
    model = Model(
        "mixed",
        (BlockSpec("a", "linear", lambda: nn.Linear(2, 2), samples=("x",)),),
        lambda num_samples, step, seed: {
            "x": torch.ones(num_samples, 2, dtype=torch.float64),
            "n": torch.ones(num_samples, dtype=torch.int32),
        },
        lambda batch: 1,
    )
    batch = model.mini_batch(3, 0, 0, dtype=torch.bfloat16)
    assert (batch["x"].dtype, batch["n"].dtype) == (torch.bfloat16, torch.int32)
    assert output_shapes(model, 3, torch.bfloat16) == {"a": ((3, 2), torch.bfloat16)}


# Finding models --------------------------------------------------------------------------------------------------

MODULE = """
from pipeplan.runtime.models.zoo import ZOO

def tiny():
    return ZOO["gpt2-tiny"].model("mine")

def fails():
    raise KeyError("weights")

number = 3
"""


@pytest.fixture
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_models_here.py").write_text(MODULE)
    (tmp_path / "my_broken_module.py").write_text("import nothing_of_that_name")
    yield tmp_path
    sys.modules.pop("my_models_here", None)


def test_a_factory_of_the_working_directory(working_directory: Path) -> None:
    assert load_model("my_models_here:tiny").name == "mine"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpt2-tiny-too", r"neither in the zoo nor well known \(did you mean gpt2-tiny.*\?\), nor a Hugging Face"),
        ("no-such", r"in the zoo nor well known, nor a Hugging Face .*; docs/models\.md lists the zoo's \d+ models"),
        ("", "neither in the zoo"),
        ("no_such_module_at_all:f", "cannot be imported: ModuleNotFoundError"),
        ("my_models_here:nothing", "cannot be imported: AttributeError"),
        ("my_broken_module:f", "cannot be imported: ModuleNotFoundError: No module named 'nothing_of_that_name'"),
        (":f", "cannot be imported: ValueError"),
        ("my_models_here:fails", "the factory failed: KeyError: 'weights'"),
        ("my_models_here:number", "is, or returned, int; give"),
        ("os:getcwd", "returned, str; give a pipeplan.runtime.models.spec.Model, or a module"),
    ],
)
@pytest.mark.usefixtures("working_directory")
def test_what_is_no_model_is_refused(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_model(name)


def test_sequences() -> None:
    assert zoo_model("gpt2-tiny", sequence=5).batch(2, 0, 0)["tokens"].shape == (2, 5)
    for length in (0, 17):
        with pytest.raises(UsageError, match=f"--sequence {length}: gpt2-tiny takes sequences of 1 to 16"):
            load_model("gpt2-tiny", sequence=length)
    with pytest.raises(UsageError, match="--sequence is for models of the zoo"):
        load_model("os:getcwd", sequence=5)


# The multi-modal transformer -------------------------------------------------------------------------------------


def test_towers_meet_in_the_concatenation_alone() -> None:
    model = load_model("mmt-tiny")
    assert len(model.blocks) == 2 * 5 + 2
    into = [source for source, target in model.edges if target == "concatenation"]
    assert into == ["branch0.layer1.ffn", "branch1.layer1.ffn"]
    across = [(a, b) for a, b in model.edges if a.startswith("branch0") and b.startswith("branch1")]
    assert across == []


def test_towers_see_all_tokens_and_learn() -> None:
    """A change in the last patch reaches the first token, as attention is not causal; the loss falls."""
    model = load_model("mmt-tiny")
    modules = {b.id: model.build(b.id, 0) for b in model.blocks}
    first = modules["branch0.layer0.attention"]
    x = torch.randn(1, 16, 32, requires_grad=True)
    first(x)[0, 0].sum().backward()
    assert float(x.grad[0, -1].abs().max()) > 0
    optimizer = torch.optim.AdamW([p for module in modules.values() for p in module.parameters()], lr=1e-2)
    losses = []
    for step in range(20):
        loss = loss_of(model, modules, model.batch(16, step, 0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])


def test_samples_of_patches_do_not_depend_on_their_number() -> None:
    model = load_model("mmt-tiny", sequence=5)
    few, many = model.batch(2, 3, 1), model.batch(5, 3, 1)
    assert few["patches1"].shape == (2, 5, 12)
    assert all(torch.equal(few[name], many[name][:2]) for name in few)
    assert not torch.equal(few["patches0"], few["patches1"])


# Models that do not fit ------------------------------------------------------------------------------------------


def block(id_: str, *sources: str) -> BlockSpec:
    return BlockSpec(id_, "linear", lambda: nn.Linear(2, 2), sources=sources, samples=() if sources else ("x",))


def model_of(*blocks: BlockSpec, tied: tuple[tuple[tuple[str, str], ...], ...] = ()) -> Model:
    return Model("odd", blocks, lambda n, step, seed: {"x": torch.ones(n, 2)}, lambda batch: 1, tied)


@pytest.mark.parametrize(
    ("blocks", "tied", "message"),
    [
        ((), (), "has no blocks"),
        ((block("a"), block("a", "a")), (), "has two blocks 'a'"),
        ((block("a", "b"), block("b")), (), "block 'a' takes the output of 'b', which is not a block before it"),
        ((block("a"),), ((("a", "weight"), ("b", "weight")),), "ties parameter 'weight' of 'b', which is not a block"),
    ],
)
def test_graphs_that_are_none(
    blocks: tuple[BlockSpec, ...], tied: tuple[tuple[tuple[str, str], ...], ...], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        model_of(*blocks, tied=tied)


def test_ties_within_a_block() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    spec = BlockSpec("a", "pair", build, samples=("x",))
    module = model_of(spec, tied=((("a", "0.weight"), ("a", "1.weight")),)).build("a", 0)
    assert torch.equal(module[0].weight, module[1].weight)


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (BlockSpec("b", "wide", lambda: nn.Linear(3, 3), sources=("a",)), "block 'b' cannot be built and called"),
        (BlockSpec("b", "sampled", lambda: nn.Linear(2, 2), samples=("y",)), "block 'b' .* KeyError: 'y'"),
        (BlockSpec("b", "pair", Pair, sources=("a",)), "block 'b' returns 2 tensors; only models"),
    ],
)
def test_blocks_that_do_not_fit(spec: BlockSpec, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        output_shapes(model_of(block("a"), spec), 1)


def test_batches_that_cannot_be_made() -> None:
    model = Model("odd", (block("a"),), lambda n, step, seed: {}[n], lambda batch: 1)
    with pytest.raises(UsageError, match="made no batch of 4 samples: KeyError: 4"):
        model.mini_batch(4, 0, 0)


def test_shapes_say_who_needs_gradients() -> None:
    """A frozen first block needs none, so nothing flows back to it."""
    frozen = BlockSpec("a", "frozen", lambda: nn.Linear(2, 2).requires_grad_(False), samples=("x",))
    steps = list(shaped_blocks(model_of(frozen, block("b", "a"), block("c", "b")), 2))
    assert [step.outputs[0].requires_grad for step in steps] == [False, True, True]
    assert [tensor.requires_grad for step in steps for tensor in step.inputs] == [False, True]
    assert all(tensor.is_leaf for step in steps for tensor in step.inputs)
