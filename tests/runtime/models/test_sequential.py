"""A plain nn.Sequential is a model: its blocks, its loss, and that plans train it as torch alone would."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeplan.errors import UsageError
from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.models.sequential import sequential_model
from pipeplan.runtime.models.spec import Model
from pipeplan.runtime.training.options import TrainOptions
from pipeplan.runtime.training.trainer import model_of
from runtime_support.plans import Unsplit, model_plan
from runtime_support.threads import run_in_threads

MODULE = """
import torch
from torch import nn

chain = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
x, y = torch.randn(2, 3, 4), torch.randint(3, (2,))
value = (chain, x, y)

def unlabelled():
    return chain, x

def compared():
    return chain, x, torch.randn(2, 3), nn.MSELoss()

def none():
    return nn.Sequential(), x

def odd():
    return chain, x, "labels"

class Ending(nn.Module):
    def forward(self, x):
        return (x - 1).square().sum()

def ending():
    return nn.Sequential(nn.Linear(4, 4), Ending()), torch.randn(2, 4)
"""


@pytest.fixture(autouse=True)
def _folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    torch.set_num_threads(1)
    (tmp_path / "chains_to_load.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("chains_to_load", None)


def test_children_are_blocks() -> None:
    """Those without parameters belong to the block before, or to the first."""
    model = load_model("chains_to_load:value")
    assert [(block.id, block.operator) for block in model.blocks] == [
        ("1", "linear"),
        ("3", "linear"),
        ("5", "linear"),
        ("loss", "loss"),
    ]
    assert model.edges == (("1", "3"), ("3", "5"), ("5", "loss"))
    assert [block.loss for block in model.blocks] == [False, False, False, True]
    assert model.batch(3, 0, 0)["input"].shape == (3, 3, 4)
    assert model.predictions(model.batch(3, 0, 0)) == 3


@pytest.mark.parametrize("name", ["value", "compared", "ending"])
def test_parameters_are_the_seeds_and_the_modules(name: str) -> None:
    """On every rank the same; another seed makes others."""
    found = []
    for seed in (4, 4, 5):
        sys.modules.pop("chains_to_load", None)
        model = load_model(f"chains_to_load:{name}", seed=seed)
        found.append(dict(model.build(model.blocks[0].id, 0).named_parameters()))
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])
    assert not all(torch.equal(found[0][key], found[2][key]) for key in found[0])


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    shared = nn.Linear(6, 6)
    return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), shared, nn.Tanh(), nn.Linear(6, 6), shared, nn.Linear(6, 4))


@pytest.mark.parametrize(
    ("targets", "loss", "mean"),
    [
        (torch.tensor([0, 3]), None, F.cross_entropy),
        (torch.tensor([0, 3]), nn.CrossEntropyLoss(), F.cross_entropy),
        (torch.randn(2, 4), None, F.mse_loss),
        (torch.randn(2, 4), nn.L1Loss(), F.l1_loss),
        (torch.randn(2, 4), lambda made, wanted: (made - wanted).pow(4).sum(), lambda a, b: (a - b).pow(4).mean()),
    ],
)
def test_plans_train_it_as_torch_alone(
    targets: Tensor, loss: Callable[..., Tensor] | None, mean: Callable[..., Tensor]
) -> None:
    """Against the Sequential itself on the whole mini-batch, with the mean loss; one module stands in it twice."""
    whole = layers()
    model = sequential_model("chain", whole, torch.randn(2, 5), targets, loss)
    assert model.tied == ((("2", "0.weight"), ("5", "weight")), (("2", "0.bias"), ("5", "bias")))
    plan = model_plan(model, [0, 1, 2], num_microbatches=2)
    outcome = run_in_threads(plan, model, 3)
    batch = model.mini_batch(plan.mini_batch, 0, 3, dtype=torch.float64)
    expected = mean(whole.double()(batch["input"]), batch["targets"])
    expected.backward()
    assert outcome.loss == pytest.approx(float(expected.detach()), rel=1e-12)
    for block, name in (("0", "0.weight"), ("4", "weight"), ("6", "bias")):
        own = whole.get_submodule(block).get_parameter(name.removeprefix("0."))
        torch.testing.assert_close(outcome.gradients[f"{block}.{name}"], own.grad)
    both = outcome.gradients["2.0.weight"] + outcome.gradients["5.weight"]
    torch.testing.assert_close(both, whole[2].weight.grad)


def test_words_and_words_left_out() -> None:
    """Targets for every word, some -100: neither loss nor count has them."""
    chain = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7))
    words = torch.tensor([[1, 2, 6], [0, 3, 5]])
    model = sequential_model("words", chain, words, words)
    batch = {"input": words, "targets": torch.tensor([[1, -100, 2], [-100, -100, 3]])}
    made = model.build("loss", 0)(chain(words), batch["targets"])
    torch.testing.assert_close(made / 3, F.cross_entropy(chain(words).flatten(0, 1), batch["targets"].flatten()))
    assert model.predictions(batch) == 3


def test_a_loss_that_ends_the_chain() -> None:
    model = load_model("chains_to_load:ending")
    assert [block.loss for block in model.blocks] == [True]
    unsplit = Unsplit(model, TrainOptions("", dtype="float64", learning_rate=0.1, weight_decay=0.0))
    losses = [unsplit.step(0, 4) for _ in range(5)]
    assert losses[-1] < losses[0]


def test_grain_captures_it_instead() -> None:
    captured = load_model("chains_to_load:unlabelled", grain="operator")
    assert len(captured.blocks) > len(load_model("chains_to_load:unlabelled").blocks) == 3


def test_without_targets_it_is_measured_but_not_trained() -> None:
    with pytest.raises(UsageError, match="'chains_to_load:unlabelled' has no loss to train with"):
        model_of(TrainOptions("chains_to_load:unlabelled"))
    assert isinstance(model_of(TrainOptions("chains_to_load:value")), Model)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("none", "'none' is an nn.Sequential without modules"),
        ("odd", r"beside an nn.Sequential and its input stands \(str\); give targets as a tensor"),
        ("chain", "is, or returned, Sequential; give .* with an nn.Sequential also targets"),
    ],
)
def test_refused(name: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        load_model(f"chains_to_load:{name}")


def test_losses_that_do_not_sum_are_refused() -> None:
    with pytest.raises(UsageError, match="its loss MSELoss does not reduce; give it reduction='sum'"):
        sequential_model("m", layers(), torch.randn(2, 5), torch.randn(2, 4), nn.MSELoss(reduction="none"))
