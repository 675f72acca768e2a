"""Programs with a loop of their own: ``pipeplan.run(plan, model, data)`` is the plain loop, and says what it sees."""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import pipeplan
from pipeplan.errors import ExecutionError, UsageError
from pipeplan.files import Plan, write_file
from pipeplan.runtime.models.given_names import PythonValue
from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.models.spec import Model
from pipeplan.runtime.training.data import digest_of, num_mini_batches, require_mini_batches, with_data
from pipeplan.runtime.training.evaluation import require_same
from runtime_support import own_loop
from runtime_support.own_loop import MINI_BATCH, STEPS
from runtime_support.plans import model_plan
from runtime_support.warm import warm_ranks
from support.commands import pipeplan as pipeplan_command

TOLERANCE = 1e-9


def plan() -> Plan:
    """Two stages on two devices."""
    return model_plan(load_model(own_loop.model()), [0, 1, 1, 1], num_microbatches=4, microbatch_size=2, split=True)


def batches_of(data: object, count: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """The mini-batches that a run gets."""
    source = with_data(load_model(own_loop.model()), PythonValue.of(data), seed)
    return [source.batch(MINI_BATCH, step, 0) for step in range(count)]


@functools.cache
def plain() -> dict[str, list[float]]:
    """The plain loop, in one process."""
    module, _, _, loss = own_loop.model()
    optimizer = own_loop.optimizer(module.parameters())
    schedule = own_loop.decaying(optimizer)
    found: dict[str, list[float]] = {"losses": [], "norms": [], "evaluations": []}
    for step, batch in enumerate(batches_of(own_loop.trained_on(), STEPS)):
        optimizer.zero_grad()
        mean = loss(module(batch["input"]), batch["targets"]) / MINI_BATCH
        mean.backward()
        found["norms"].append(float(nn.utils.clip_grad_norm_(module.parameters(), own_loop.CLIP)))
        optimizer.step()
        schedule.step()
        found["losses"].append(float(mean.detach()))
        if (step + 1) % 3 == 0 or step + 1 == STEPS:
            with torch.no_grad():
                held = [loss(module(inputs), targets) for inputs, targets in own_loop.evaluated_on()]
            found["evaluations"].append(float(sum(held)) / (len(held) * MINI_BATCH))
    return found


def assert_as_plain(found: dict[str, Any]) -> None:
    for what, expected in plain().items():
        assert found[what] == pytest.approx(expected, rel=0, abs=TOLERANCE), what
    assert min(found["norms"]) > own_loop.CLIP, "gradients are clipped"


def test_copies_of_a_program_train_what_it_has_made() -> None:
    """Nothing of it can be imported by others, and what its callbacks append to is here."""
    found = own_loop.run(plan())
    assert_as_plain(found)
    assert found["heard"] == [found["losses"], list(zip([2, 5, 6], found["evaluations"], strict=True))]


@pytest.mark.slow
@pytest.mark.long
def test_a_launchers_ranks_run_one_after_another(tmp_path: Path) -> None:
    """Each has the outcome; callbacks are rank 0's."""
    write_file(plan(), str(tmp_path / "plan.json"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = ["-m", "runtime_support.own_loop", str(tmp_path / "plan.json"), str(tmp_path / "seen")]
    subprocess.run([*command, *script], check=True, timeout=250)
    ranks = [json.loads((tmp_path / f"seen.{rank}").read_text()) for rank in (0, 1)]
    for rank, (first, second) in enumerate(ranks):
        assert_as_plain(first)
        assert second["losses"] == first["losses"][:2]
        assert (first["heard"] == [[], []]) == (rank == 1)


def broken(made: object) -> torch.optim.Optimizer:
    raise KeyError("weights")


def test_what_fails_in_a_copy_ends_the_run() -> None:
    with pytest.raises(UsageError, match="optimizer='broken': the factory failed: KeyError: 'weights'"):
        own_loop.run(plan(), optimizer=broken)

    chain, inputs, targets, _ = own_loop.model()
    with pytest.raises(ExecutionError, match=r"rank 1 failed in 3F0 .*: block 'loss': ZeroDivisionError: as asked"):
        pipeplan.run(plan(), (chain, inputs, targets, failing), own_loop.trained_on(), steps=1, dtype="float64")


def failing(output: Tensor, targets: Tensor) -> Tensor:
    """On the rank that has the loss in the plan."""
    if os.environ.get("LOCAL_RANK") == "1" and not output.is_meta:
        raise ZeroDivisionError("as asked")
    return own_loop.weighted(output, targets)


# Who starts ranks ---------------------------------------------------------------------------------------------------


def test_what_cannot_be_copied_is_refused() -> None:
    with pytest.raises(UsageError, match="start the program with torchrun --nproc-per-node 2"):
        own_loop.run(plan(), device="cuda")


def test_ranks_are_started_here_or_by_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="local=False: no launcher has started this process"):
        own_loop.run(plan(), local=False)
    for name, value in {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "::1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="local=True starts all ranks, and torchrun has started this one"):
        own_loop.run(plan(), local=True)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    with pytest.raises(UsageError, match="call run before init_process_group"):
        own_loop.run(plan())
    monkeypatch.delenv("RANK")
    with pytest.raises(UsageError, match="call run before init_process_group"):
        own_loop.run(plan())


# Loaders ------------------------------------------------------------------------------------------------------------


def values(batches: list[dict[str, Tensor]]) -> list[list[float]]:
    return [batch["input"][:, 0].tolist() for batch in batches]


def test_a_loader_begins_anew_in_another_order() -> None:
    """The order depends on the seed alone, whoever else draws random numbers, and is torch's own for it."""
    first, second, third = (values(batches_of(own_loop.trained_on(), 7, seed)) for seed in (0, 0, 1))
    assert first == second != third
    epochs = [sorted(value for batch in first[begin : begin + 3] for value in batch) for begin in (0, 3)]
    assert epochs[0] == epochs[1]
    assert first[:3] != first[3:6]
    torch.manual_seed(0)
    assert values([{"input": inputs} for inputs, _ in own_loop.trained_on()]) == first[:3]


def test_a_loader_has_generators_of_its_own() -> None:
    """A generator is seeded anew by epoch, too, so that a run that resumes goes on where it was."""

    def loader() -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(77)
        return DataLoader(own_loop.samples(3, 1), batch_size=MINI_BATCH, shuffle=True, generator=generator)

    whole = values(batches_of(loader(), 6))
    source = with_data(load_model(own_loop.model()), PythonValue.of(loader()))
    assert values([source.batch(MINI_BATCH, 4, 0)]) == whole[4:5]
    assert values([source.batch(2, 0, 0)]) == [whole[0][:2]], "looked at from the beginning again"


def test_epochs_are_told_to_samplers() -> None:
    told = list[int]()

    class Told(DistributedSampler[Any]):
        def set_epoch(self, epoch: int) -> None:
            told.append(epoch)
            super().set_epoch(epoch)

    data = own_loop.samples(2, 1)
    batches_of(DataLoader(data, batch_size=MINI_BATCH, sampler=Told(data, 1, 0)), 5)
    assert told == [0, 1, 2]


class Batches:
    """As much of a loader as is asked for."""

    def __init__(self, *batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def test_batches_are_tuples_or_dicts_or_single_tensors() -> None:
    inputs, targets = own_loop.samples(1, 1).tensors
    for batch in ((inputs, targets), [inputs, targets], {"targets": targets, "more": 0, "input": inputs}):
        (found,) = batches_of(Batches(batch), 1)
        assert found.keys() == {"input", "targets"}
        assert torch.equal(found["targets"], targets)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (lambda: Batches(torch.ones(8, 2)), r"a mini-batch is Tensor, and .* \['input', 'targets'\]: give a dict"),
        (lambda: Batches((1, 2, 3)), "a mini-batch is tuple of 3, and the model takes"),
        (lambda: Batches({"inputs": torch.ones(8, 2)}), r"a mini-batch is \['inputs'\], and"),
        (lambda: [torch.ones(2)], r"an item is Tensor, and .* \['input', 'targets'\]"),
        (lambda: iter([own_loop.samples(1, 1).tensors]), "gives no mini-batch 1: it has ended, and begins no second"),
        (lambda: DataLoader(own_loop.samples(1, 1), batch_size=5), "a mini-batch has 3 samples, and the plan's has 8"),
        (lambda: 3, r"--data 'int' is int; give a dataset"),
    ],
)
def test_what_is_no_mini_batch_is_refused(data: Any, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        batches_of(data(), 2)


def test_a_loader_of_other_mini_batches_is_refused_before_anything_runs() -> None:
    source = with_data(load_model(own_loop.model()), PythonValue.of(DataLoader(own_loop.samples(2, 1), batch_size=4)))
    with pytest.raises(UsageError, match=r"batch_size=8, drop_last=True\), or search with --mini-batch 4"):
        require_mini_batches(source, MINI_BATCH)
    require_mini_batches(source, 4)


def test_ranks_compare_what_their_loaders_gave() -> None:
    data = own_loop.samples(4, 1)
    sources = [
        with_data(load_model(own_loop.model()), PythonValue.of(DataLoader(data, batch_size=8, sampler=sampler)))
        for sampler in (DistributedSampler(data, 2, rank, shuffle=False) for rank in (0, 1))
    ]
    mine, other = (digest_of(source, source.batch(8, 0, 0)) for source in sources)
    require_same([mine, None, mine], "step 0")
    with pytest.raises(UsageError, match=r"ranks 0 and 2 have got different samples for step 0: .*DistributedSampler"):
        require_same([mine, None, other], "step 0")
    model = load_model("gpt2-tiny")
    assert digest_of(model, model.batch(8, 0, 0)) is None


def counted(data: object, most: int | None = None) -> int:
    source: Model = with_data(load_model(own_loop.model()), PythonValue.of(data), in_order=True)
    return num_mini_batches(source, MINI_BATCH, most, "--eval-data")


class Items(Dataset[Any]):
    def __init__(self, count: int) -> None:
        self.inputs, self.targets = own_loop.samples(math.ceil(count / MINI_BATCH), 1).tensors
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input": self.inputs[index], "targets": self.targets[index]}


def test_evaluations_go_through_all_there_is() -> None:
    assert (counted(own_loop.evaluated_on()), counted(own_loop.evaluated_on(), 1)) == (2, 1)
    assert counted(Items(27)) == 3, "whole mini-batches"
    assert counted(own_loop.samples(3, 1)) == 3, "items are tuples"
    source = with_data(load_model(own_loop.model()), PythonValue.of(Items(27)), in_order=True)
    assert torch.equal(source.batch(MINI_BATCH, 1, 0)["input"], Items(27).inputs[8:16])
    endless: Iterator[Any] = iter(())
    assert counted(endless, 5) == 5
    with pytest.raises(UsageError, match="does not know how many mini-batches it has; give --eval-batches"):
        counted(endless)
    with pytest.raises(UsageError, match="fewer samples than a mini-batch of the plan, which has 8"):
        counted(Items(5))


# What is printed and logged -----------------------------------------------------------------------------------------


def test_a_run_evaluates_and_logs(tmp_path: Path) -> None:
    """From the command line; the log has what is printed, and goes on after a checkpoint."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_file(model_plan(load_model("gpt2-tiny"), [0, 1], num_microbatches=4), str(tmp_path / "plan.json"))
    command = ["run", tmp_path / "plan.json", "--model", "gpt2-tiny", "--local", "--data", "builtin", "--clip-norm", 1]
    evaluating = ["--eval-data", "builtin", "--eval-batches", 2, "--eval-every", 2, "--json"]
    saving = ["--checkpoint", tmp_path / "saved", "--tensorboard", tmp_path / "logs", "--lr-schedule", "linear"]
    with warm_ranks():
        done = [
            json.loads(pipeplan_command(*command, *evaluating, *saving, "--lr-steps", 4, *more).stdout)
            for more in (["--steps", 3], ["--steps", 4, "--resume"])
        ]
    evaluations = [each for run in done for each in run["evaluations"]]
    assert [each["step"] for each in evaluations] == [1, 2, 3]
    log = EventAccumulator(str(tmp_path / "logs")).Reload()
    logged = {name: {each.step: each.value for each in log.Scalars(name)} for name in log.Tags()["scalars"]}
    steps = [each for run in done for each in run["steps"]]
    assert logged["train/loss"] == pytest.approx({each["step"]: each["loss"] for each in steps})
    assert logged["train/gradient_norm"] == pytest.approx({each["step"]: each["grad_norm"] for each in steps})
    assert logged["train/learning_rate"] == pytest.approx({0: 1e-3, 1: 7.5e-4, 2: 5e-4, 3: 2.5e-4})
    assert logged["evaluation/loss"] == pytest.approx({each["step"]: each["loss"] for each in evaluations})
    assert logged["time/tokens_per_second"].keys() == logged["time/samples_per_second"].keys() == {0, 1, 2, 3}
    assert evaluations[-1]["loss"] < evaluations[0]["loss"]
