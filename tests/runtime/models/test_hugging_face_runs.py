"""Hugging Face configurations train with plans as transformers' own models would, in fp64 to 1e-9.

Ranks are threads, GPT-2's always; with the slow tests T5's are real processes, too.
"""

from __future__ import annotations

import functools

import pytest

from pipeplan.runtime.models.huggingface import load
from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.models.spec import Model
from runtime_support.hugging_face import (
    ARGUMENTS,
    SEED,
    SEQUENCE,
    batch_for,
    captured,
    eager_experts,
    text,
    training_of,
)
from runtime_support.hugging_face import whole as original
from runtime_support.plans import Case, assert_as_unsplit, model_plan, reports_of
from runtime_support.threads import require_equal_to_unsplit, run_in_threads
from support.marks import slow_but

NAMES = ["gpt2", "llama", "bert", "t5"]


@functools.cache
def model_of(name: str) -> Model:
    return load_model(text(name), sequence=SEQUENCE, seed=SEED)


@functools.cache
def case(name: str) -> Case:
    """GPT-2 and T5 with split backward, Llama with recomputation, BERT in a circle."""
    devices = [0, 1, 2, 3, 0, 1] if name == "bert" else [0, 1, 2, 3]
    split, recompute = name in ("gpt2", "t5"), name == "llama"
    return model_plan(model_of(name), devices, num_microbatches=3, split=split, recompute=recompute), training_of(name)


@slow_but("name", NAMES, lambda name: name == "gpt2")
def test_threads_equal_an_unsplit_run(name: str) -> None:
    require_equal_to_unsplit(model_of(name), case(name)[0])


@pytest.mark.slow
def test_real_ranks_equal_an_unsplit_run_and_transformers_own_model() -> None:
    """The latter before the first update: the loss of the model in one piece."""
    plan, options = case("t5")
    reports = reports_of({"t5": (plan, options)})["t5"]
    assert_as_unsplit(model_of("t5"), options, reports)
    whole = load(text("t5"), sequence=SEQUENCE, seed=SEED)
    batch = whole.batch(plan.mini_batch, 0, SEED)
    loss = float(whole.module.double()(**batch).detach()) / whole.predictions(batch)
    for report in reports.values():
        assert report["losses"][0] == pytest.approx(loss, rel=1e-9)


QUICK = ("gpt2", "mixtral", "flava")


@slow_but(
    "name",
    ["gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen3", "bert", "flava", "mt5"],
    QUICK.__contains__,
    lambda name: name not in ("bert", "mt5"),
)
def test_threads_give_transformers_loss(name: str) -> None:
    """All ranks in this process. CLIP's loss is one of whole micro-batches."""
    model, whole = captured(name, "half"), original(name)
    plan = model_plan(model, [0, 1, 2], num_microbatches=2)
    batch = batch_for(whole, plan.mini_batch)
    with eager_experts(whole):
        loss = float(whole.module(**batch).detach()) / whole.predictions(batch)
    assert run_in_threads(plan, model, 0).loss == pytest.approx(loss, rel=1e-9)


def test_parameters_are_the_seeds() -> None:
    assert set(NAMES) <= set(ARGUMENTS)
    again, other = (load_model(text("gpt2"), sequence=SEQUENCE, seed=seed) for seed in (SEED, SEED + 1))
    weights = [model.build("embedding", 0).state_dict() for model in (model_of("gpt2"), again, other)]
    assert all((weights[0][key] == weights[1][key]).all() for key in weights[0])
    assert not all((weights[0][key] == weights[2][key]).all() for key in weights[0])
