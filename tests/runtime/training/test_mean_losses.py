"""A mean as the loss: found by two samples together and each alone, then trained the same under every plan."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeplan._api import run
from pipeplan.errors import UsageError
from pipeplan.files import PlacedStage
from pipeplan.runtime.models.capture import capture
from pipeplan.runtime.models.load import advice_on, load_model
from pipeplan.runtime.models.losses import find_losses
from pipeplan.runtime.models.sequential import sequential_model
from pipeplan.runtime.models.spec import Model
from pipeplan.runtime.models.zoo import ZOO, zoo_model
from pipeplan.runtime.profiling.measure import profile_model
from pipeplan.runtime.training.options import TrainOptions
from pipeplan.runtime.training.trainer import model_of
from runtime_support import losses
from runtime_support.plans import TRAINING, Case, Reports, assert_as_unsplit, model_plan, placed_plan, reports_of
from runtime_support.warm import warm_ranks
from runtime_support.whole_model import replay
from support.commands import pipeplan
from support.marks import one_in

OPTIONS = replace(TRAINING, model="runtime_support.losses:evaluated", data="runtime_support.losses:Texts")


@functools.cache
def cases() -> dict[str, Case]:
    """A mini-batch of 8 samples, divided in ways that give each share another number of words to predict."""
    model = model_of(OPTIONS)
    ids = [block.id for block in model.blocks]
    stages = [
        PlacedStage(blocks=tuple(ids[:3]), devices=(0,)),
        PlacedStage(blocks=tuple(ids[3:]), devices=(1, 3), replicas=2),
    ]
    return {
        "mean of 1": (model_plan(model, [0, 1, 2, 3], num_microbatches=8, microbatch_size=1, split=True), OPTIONS),
        "mean of 2": (model_plan(model, [0, 1, 2, 3], num_microbatches=4, microbatch_size=2), OPTIONS),
        "mean of 4, 2 per replica": (placed_plan(model, stages, num_microbatches=2, microbatch_size=4), OPTIONS),
    }


@pytest.fixture(scope="module")
def reports() -> Reports:
    return reports_of(cases())


@one_in(2, "name", ["mean of 1", "mean of 2", "mean of 4, 2 per replica"], first=1)
def test_gradients_are_those_of_the_mean_over_the_mini_batch(name: str, reports: Reports) -> None:
    """On real ranks, against torch's own mean of all 8 samples at once."""
    assert_as_unsplit(model_of(OPTIONS), OPTIONS, reports[name])
    for one, other in zip(reports[name][0]["losses"], reports["mean of 1"][0]["losses"], strict=True):
        assert one == pytest.approx(other, rel=1e-12)


def test_runs_train_with_it(capfd: pytest.CaptureFixture[str]) -> None:
    """Gradients were 4 times as long with micro-batches of 1 as with those of 4; what was found is said once."""
    found = []
    options = replace(OPTIONS, num_steps=2, clip_norm=math.inf)
    for devices, size in (([0, 1], 1), ([0], 4)):
        plan = model_plan(model_of(OPTIONS), devices, num_microbatches=8 // size, microbatch_size=size)
        with warm_ranks():
            found.append([(step.loss, step.grad_norm) for step in run(plan, options).result.steps])
        told = capfd.readouterr().err
        assert told.count("Dropout x 4 of evaluated run in evaluation mode") == 1, "not by each of the ranks"
        assert told.count("the loss of evaluated is a mean over the entries") == 1
    assert found[0] == [pytest.approx(step, rel=1e-9) for step in found[1]]


def test_runs_refuse_what_compares_samples() -> None:
    options = TrainOptions("runtime_support.losses:contrast", num_steps=1)
    plan = model_plan(losses.contrast(), [0, 1])
    with warm_ranks(), pytest.raises(UsageError, match="gradients would depend on the micro-batch size"):
        run(plan, options)


# What is found ----------------------------------------------------------------------------------------------------


def named(words: Tensor, classes: Tensor) -> Tensor:
    return F.cross_entropy(words, classes, ignore_index=0)


@pytest.mark.parametrize(
    ("model", "over"),
    [
        (lambda: losses.chain(F.cross_entropy), "the entries of 'targets' that are not -100"),
        (lambda: losses.chain(F.cross_entropy, nn.Dropout(0.5)), "the entries of 'targets' that are not -100"),
        (lambda: losses.chain(named), "the entries of 'targets' that are not 0"),
        (lambda: losses.chain(F.mse_loss, labels=torch.randn(2, 3)), "samples"),
        (lambda: losses.chain(lambda made, _: made.mean()), "samples"),
        (lambda: losses.masked(mask=torch.tensor([0, 1])), "the entries of 'mask' that are not 0"),
        (lambda: losses.masked(mask=torch.rand(2)), "the weights 'mask'"),
        (lambda: capture(*losses.language(), name="language"), "the entries of 'targets' that are not -100"),
    ],
)
def test_means_are_found(model: Callable[[], Model], over: str) -> None:
    made = model()
    found = find_losses(made)
    assert {mean.text for mean in found.means.values()} == {over}
    assert f"is a mean over {over} (two samples together" in found.text


@pytest.mark.parametrize(
    "model",
    [
        lambda: losses.chain(),
        lambda: losses.chain(nn.CrossEntropyLoss()),
        lambda: losses.chain(None, nn.Dropout(0.5)),
        lambda: losses.chain(None, nn.BatchNorm1d(6).eval()),
        lambda: losses.masked(SquaredSum),
    ],
)
def test_sums_stay(model: Callable[[], Model]) -> None:
    made = model()
    found = find_losses(made)
    assert (found.means, found.text) == ({}, "")
    assert found.summed(made) is made


class SquaredSum(nn.Module):
    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        return (output - targets).square().sum()


class Penalty(SquaredSum):
    """With a term that belongs to no sample."""

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        return super().forward(output, targets) + 0.5


CLASSES = torch.tensor([1.0, 2.0, 4.0, 8.0])


def untracked() -> nn.Module:
    return nn.BatchNorm1d(3, track_running_stats=False)


def weighted(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output, targets, CLASSES[:3].to(output))


class WeightedByBatch(nn.Module):
    """What is advised in its place: each sample's weight is in the batch."""

    def forward(self, output: Tensor, targets: Tensor, classes: Tensor, w: Tensor) -> Tensor:
        return (w.flatten() * F.cross_entropy(output, classes.flatten(), reduction="none")).sum() / w.sum()


def test_weights_that_are_an_input_are_found() -> None:
    classes = torch.tensor([[0], [3]])
    found = find_losses(losses.masked(WeightedByBatch, classes=classes, w=CLASSES[classes]))
    assert {mean.text for mean in found.means.values()} == {"the weights 'w'"}


class ByClass(nn.Module):
    """Weights of classes as everyone has them: a buffer, and either torch's argument for it or gathered by hand."""

    def __init__(self, gathered: bool, ignored: int = -100) -> None:
        super().__init__()
        self.output, self.gathered, self.ignored = nn.Linear(4, 4), gathered, ignored
        self.register_buffer("by_class", CLASSES)

    def forward(self, x: Tensor, classes: Tensor) -> Tensor:
        made, by_class = self.output(x), self.get_buffer("by_class")
        if not self.gathered:
            return F.cross_entropy(made, classes, by_class, ignore_index=self.ignored)
        w = by_class[classes]
        return (w * F.cross_entropy(made, classes, reduction="none")).sum() / w.sum()


@pytest.mark.parametrize(("gathered", "ignored"), [(False, -100), (True, -100), (False, 3)])
def test_weights_of_classes_are_found_in_the_block(gathered: bool, ignored: int) -> None:
    """Both were refused, the second with the advice to do what it does."""

    def batch(num_samples: int, step: int, seed: int) -> dict[str, Tensor]:
        return {"x": torch.arange(4.0 * num_samples).sin().view(-1, 4), "classes": torch.arange(num_samples) % 4}

    module = ByClass(gathered, ignored).double()
    model = replace(capture(module, batch(2, 0, 0), name="by class"), batch=batch)
    found = find_losses(model)
    assert next(iter(found.means.values())).text.startswith("the entries of 'classes'")
    summed, given = found.summed(model), model.mini_batch(7, 0, 0, dtype=torch.float64)
    modules = {block.id: summed.build(block.id, 0, dtype=torch.float64) for block in summed.blocks}
    parts = [{name: tensor[rows] for name, tensor in given.items()} for rows in (slice(1), slice(1, 4), slice(4, 7))]
    total = torch.stack([replay(summed, modules, part) for part in parts]).sum()
    torch.testing.assert_close(total / summed.predictions(given), module(**given))


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(weight=CLASSES[:3]), nn.NLLLoss(weight=CLASSES[:3])])
def test_a_module_with_weights_of_classes_is_the_mean_that_torch_has(loss: nn.Module) -> None:
    """Its sum was divided by the number of targets."""
    model = losses.chain(loss)
    found = find_losses(model)
    summed = found.summed(model)
    made, targets = torch.randn(5, 3).log_softmax(-1), torch.tensor([0, 1, 2, 2, -100])
    total = summed.build("loss", 0)(made, targets).float()
    torch.testing.assert_close(total / summed.predictions({"targets": targets}), loss(made, targets))


class Weighted(nn.Module):
    """A mean with weights of the classes, which the batch does not show."""

    def forward(self, output: Tensor, targets: Tensor, classes: Tensor) -> Tensor:
        return F.cross_entropy(output, classes.flatten(), CLASSES.to(output))


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (
            lambda: losses.chain(None, nn.Unflatten(1, (3, 2)), untracked(), nn.Flatten()),
            r"'2' makes other numbers of a sample when another is beside it \(off by .*BatchNorm1d without running",
        ),
        (lambda: losses.contrast(), r"'loss' is [\d.]+ for two samples together and .* neither the sum"),
        (
            lambda: losses.masked(Penalty),
            r"neither the sum .* nor the mean .*\n.*\nwhat to do: return the sum over predictions",
        ),
        (
            lambda: losses.masked(Weighted, classes=torch.tensor([[0], [3]])),
            r"(?s)neither the sum .*\nwhat to do: it lies between.*register_buffer.*an argument w, in the example",
        ),
        (
            lambda: losses.chain(weighted),
            r"(?s)it lies between the two.* in every item of --data beside 'targets'.*or: it adds means over different",
        ),
        (lambda: losses.chain(lambda made, _: made.square().mean().sqrt()), "neither the sum"),
    ],
)
def test_what_compares_samples_is_refused(model: Callable[[], Model], told: str) -> None:
    """When measured and when trained, unless it is meant."""
    made = model()
    with pytest.raises(UsageError, match=told):
        find_losses(made)
    with pytest.raises(UsageError, match=told):
        profile_model(made, [1], repeats=1, warmup=0)
    found = find_losses(replace(made, loss_of="micro-batches"))
    assert "compares the samples of a micro-batch" in found.text


def test_a_mean_that_some_targets_would_make_another_is_refused_when_they_come() -> None:
    """Targets that are shifted inside: what counts is not what is not -100 in the batch."""

    def shifted(made: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(made[:, :-1].flatten(0, 1), targets[:, 1:].flatten())

    words = torch.arange(6).reshape(2, 3)
    model = sequential_model("shifted", nn.Sequential(nn.Embedding(6, 6)), words, words, shifted)
    found = find_losses(model)
    loss = found.summed(model).build("loss", 0)
    made, targets = torch.randn(2, 3, 6), words.clone()
    torch.testing.assert_close(loss(made, targets), 2 * shifted(made, targets))
    targets[0, 1] = -100
    with pytest.raises(ValueError, match="neither that nor a sum where 'targets' has -100"):
        loss(made, targets)


def test_losses_of_several_kinds_are_refused() -> None:
    model = losses.masked(SquaredSum)
    second = replace(losses.masked(nn.MSELoss).block("loss"), id="second")
    with pytest.raises(UsageError, match="of block 'loss' the sum, of block 'second' a mean over samples; let all"):
        find_losses(replace(model, blocks=(*model.blocks, second)))


def test_what_cannot_be_found_out_is_said() -> None:
    found = find_losses(losses.chain(lambda made, _: made.sum() * 0))
    assert found.text == "the loss of chain is taken as a sum: two samples have the loss 0, which does not show it"
    failing = losses.chain(lambda made, _: made.no_such_thing)
    assert "could not be found out: AttributeError" in find_losses(failing).text


def test_profiles_say_it() -> None:
    model = capture(*losses.evaluated(), name="language")
    told: list[str] = []
    profile = profile_model(model, [1], repeats=1, warmup=0, on_mean=told.append)
    assert told[0].startswith("the loss of language is a mean over the entries")
    assert "The loss of language is a mean" in profile.source.notes
    assert "Dropout x 4 of language run in evaluation mode" in profile.source.notes
    remedy = "a module that a function returns in training mode drops (docs/capture.md#dropout-and-batchnorm)"
    assert advice_on(model) == f"{model.remark}; {remedy}"
    assert remedy not in advice_on(replace(model, switched_off={"BatchNorm1d": 2}))


def test_nothing_is_said_of_a_model_whose_profile_is_refused() -> None:
    """Only where its first block runs; it came before the refusal."""
    asked = ("profile", "runtime_support.losses:evaluated", "--device", "h100-80gb", "--microbatch", 1, "-o", "-")
    assert pipeplan(*asked).stderr.startswith("pipeplan: --device h100-80gb is a preset; add --estimate")
    assert pipeplan(*asked, "--estimate").stderr.startswith("pipeplan: Dropout x 4 of evaluated run in evaluation mode")


class Net(nn.Module):
    """With what does something else in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Dropout(0.0))

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.layers(x), 0.5, self.training).sum()


def test_what_runs_in_evaluation_mode_is_counted() -> None:
    """Functions, too; nothing of a module that trains."""
    inputs = {"x": torch.randn(2, 4)}
    model = capture(Net().eval(), inputs, name="net")
    assert model.switched_off == {"BatchNorm1d": 1, "Dropout": 1, "dropout()": 1}
    assert model.remark.startswith("BatchNorm1d x 1, Dropout x 1, dropout() x 1 of net run in evaluation mode")
    assert (load_model("gpt2-tiny").remark, capture(Net(), inputs, name="net").remark) == ("", "")


@pytest.mark.parametrize(
    "model",
    [
        lambda: losses.normalised(),
        lambda: capture(Net(), {"x": torch.randn(2, 4)}, name="chain"),
    ],
)
def test_batch_norms_take_the_statistics_of_micro_batches_and_that_is_said(model: Callable[[], Model]) -> None:
    """A Sequential was refused, a captured module trained with statistics of 0 and 1 that never changed."""
    made = model()
    assert find_losses(made).text == (
        "BatchNorm x 1 of chain, in training mode, takes the mean and variance of each micro-batch, as pipelines do: "
        "what is computed depends on its size"
    )


CAPACITY = "gpt2-experts-capacity-tiny"


def test_what_experts_leave_out_is_said_to_be_of_micro_batches() -> None:
    """Nobody takes it for a mistake that a sample's loss depends on those beside it."""
    model = zoo_model(CAPACITY)
    assert model.loss_of == "micro-batches"
    assert find_losses(model).means == {}
    with pytest.raises(UsageError, match="makes other numbers of a sample when another is beside it"):
        find_losses(replace(model, loss_of=""))


@pytest.mark.parametrize("name", [name for name in ZOO if name.endswith("-tiny") and name != CAPACITY])
def test_losses_of_the_zoo_are_sums(name: str) -> None:
    """That nobody looks at them when they run is right."""
    model = zoo_model(name)
    assert model.loss_of == "samples"
    found = find_losses(replace(model, loss_of=""))
    assert (found.means, found.text) == ({}, "")
