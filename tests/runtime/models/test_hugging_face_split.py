"""Blocks of Hugging Face configurations split over devices: as unsplit runs, in fp64."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeplan.checker import check
from pipeplan.costs.devices import device_preset
from pipeplan.errors import UsageError
from pipeplan.files import PlacedStage, Plan
from pipeplan.runtime.executor.rank_program import programs_of
from pipeplan.runtime.models.huggingface import load
from pipeplan.runtime.models.huggingface.families import FAMILIES, ModelFamily
from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.models.spec import Model
from pipeplan.runtime.parallel.sharding import Cut, Shards
from pipeplan.runtime.profiling.estimate import estimate_model
from pipeplan.runtime.training.compatibility import require_splittable
from pipeplan.runtime.training.options import TrainOptions
from pipeplan.workload.kinds import PARAMETERS
from runtime_support.hugging_face import IN_FLOAT32, LLAMA, SEED, SEQUENCE, WORDS, captured, text, training_of
from runtime_support.known import look_over
from runtime_support.plans import Case, Reports, assert_as_unsplit, placed_plan, reports_of
from runtime_support.threads import placed, require_equal_to_unsplit
from runtime_support.warm import warm_ranks
from support.commands import pipeplan
from support.marks import asked_for, slow_but

FIVE = ("llama", "qwen2", "mixtral", "gpt2", "bert")
"""Three with transformers' own plan, and two with one of ours."""

WHOLE = ("t5", "mt5", "whisper", "gemma3", "llama4")
"""Whose blocks hand on more than whole tensors and slices of one sequence: position biases, sounds, images."""

RUN_SPLIT = [name for name, family in FAMILIES.items() if family.divides and name not in WHOLE]


@functools.cache
def model_of(name: str, sequence: int = SEQUENCE) -> Model:
    return load_model(text(name), sequence=sequence, seed=SEED)


def pipeline(name: str, sequence: int = SEQUENCE, *, split: bool, **more: Any) -> Plan:
    """Two stages of two devices that split each block."""
    model = model_of(name, sequence)
    ids = [block.id for block in model.blocks]
    cut = len(ids) // 2
    stages = [
        PlacedStage(blocks=tuple(own), devices=on, shards=2, **more)
        for own, on in ((ids[:cut], (0, 1)), (ids[cut:], (3, 2)))
    ]
    return placed_plan(model, stages, num_microbatches=3, microbatch_size=2, split=split)


def one_stage(name: str, **more: Any) -> Plan:
    """All devices, two of which split each block, and which are replicas by twos."""
    model = model_of(name)
    stage = PlacedStage(
        blocks=tuple(block.id for block in model.blocks),
        devices=(2, 0, 1, 3),
        shards=2,
        replicas=2,
        microbatch_size=2,
        **more,
    )
    return placed_plan(model, [stage], num_microbatches=3, microbatch_size=2)


CASES: dict[str, Callable[[], Plan]] = {
    **{f"{name} {how}": partial(pipeline, name, split=how == "split") for how in ("split", "full") for name in FIVE},
    "llama zero 1": partial(one_stage, "llama", zero=1),
    "gpt2 zero 3": partial(one_stage, "gpt2", zero=3),
    "mixtral zero 2 recomputed": partial(one_stage, "mixtral", zero=2, recompute=True),
}
"""Each family in a pipeline, with backward split or whole; beside it the other, and divided state."""


@functools.cache
def case_of(name: str) -> Case:
    return CASES[name](), training_of(name.partition(" ")[0])


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest) -> Reports:
    return reports_of({name: case_of(name) for name in asked_for(request, CASES)})


LONG = (
    "llama split",
    "gpt2 split",
    "bert split",
    "gpt2 zero 3",
    "mixtral zero 2 recomputed",
    "llama full",
    "qwen2 full",
    "qwen2 split",
    "gpt2 full",
    "mixtral full",
    "bert full",
)
QUICK = ("mixtral split", "llama zero 1")


@slow_but("name", CASES, QUICK.__contains__, LONG.__contains__)
def test_equals_an_unsplit_run(name: str, reports: Reports) -> None:
    """Losses, norms, gradients and parameters of two clipped steps on four processes."""
    plan, options = case_of(name)
    check(plan).require(name)
    assert isinstance(options, TrainOptions)
    assert_as_unsplit(model_of(name.partition(" ")[0]), options, reports[name])


@slow_but("name", ["gpt2-tiny", *FIVE], ("gpt2-tiny", "llama").__contains__, lambda name: name != "mixtral")
def test_devices_that_split_blocks_hold_what_the_plan_says(name: str) -> None:
    """To the byte: an equal part of all that is cut, and whole what none of them cuts (norms, late biases).

    Words are in rows, of which one device may have one more than the other: plans have half of them all.
    """
    model = load_model(name) if name.endswith("tiny") else model_of(name)
    profile = estimate_model(model, [2], device=device_preset("cpu"), dtype=torch.float32, shards=(1, 2))
    ids = [block.id for block in model.blocks]
    halves = (ids[: len(ids) // 2], (0, 1)), (ids[len(ids) // 2 :], (2, 3))
    stages = [PlacedStage(blocks=tuple(own), devices=on, shards=2) for own, on in halves]
    plan = placed_plan(model, stages, microbatch_size=2, profile=profile)
    check(plan, profile).require(name)
    for rank, program in enumerate(programs_of(plan, ids, model.edges, model.name, model.divides_shards)):
        (part,) = program.stages.values()

        def along(line: tuple[int, ...], rank: int = rank) -> Shards:
            return Shards(len(line), line.index(rank), None)

        twice = 0
        for share in part.shares:
            whole = dict(model.build(share.block, 0).named_parameters())
            for key, own in model.build_share(share, 0, placed(share, along)).named_parameters():
                half_a_row = own.shape != whole[key].shape and 2 * own.nbytes != whole[key].nbytes
                twice += whole[key].nbytes if half_a_row else 2 * own.nbytes
        assert twice == 2 * plan.stages[part.index].state[PARAMETERS]


WHOLE_TOO = ("llama", "mixtral", "falcon")
"""Of several forms; those of others run with sequences that devices cannot divide among the long tests."""
UNLIKE = ("llama", "gpt2", "bert", "mixtral", "deepseek_v3", "falcon", "t5", "whisper", "llama4", "gemma2")
"""One of each kind; the others run among the long tests."""


DEAREST = ("gemma2", "mixtral")
"""Which run in other tests here, or whose kind others show."""


@slow_but(
    "name, sequence",
    list(product(RUN_SPLIT, (SEQUENCE, SEQUENCE - 1))),
    lambda case: case[0] in ("qwen2_moe", "opt"),
    lambda case: case[0] not in (WHOLE_TOO if case[1] < SEQUENCE else UNLIKE) or case[0] in DEAREST,
)
def test_every_family_trains_in_shares(name: str, sequence: int) -> None:
    """Also where devices cannot divide the sequence: then all between split products is whole on each."""
    tolerance = 1e-7 if name in IN_FLOAT32 else 1e-10
    require_equal_to_unsplit(model_of(name, sequence), pipeline(name, sequence, split=True), tolerance)


def test_devices_have_shares_as_the_plan_of_transformers_says() -> None:
    """Of weights and words; norms are whole."""
    cuts = {
        name: cut
        for block in model_of("llama").blocks
        if block.split is not None
        for name, cut in block.split.cuts.items()
    }
    assert {name.removeprefix("self_attn_").removeprefix("mlp_"): cut.dimension for name, cut in cuts.items()} == {
        "embed_tokens_weight": 0,
        **dict.fromkeys(("q_proj_weight", "k_proj_weight", "v_proj_weight", "gate_proj_weight", "up_proj_weight"), 0),
        **dict.fromkeys(("o_proj_weight", "down_proj_weight"), 1),
        "model_lm_head_weight": 0,
    }
    fused = {block.id: block.split for block in model_of("gpt2").blocks}["h.0.attention"]
    assert fused is not None
    assert fused.cuts["attn_c_attn_weight"] == Cut(1, 3), "query, key and value of one layer"


def test_weight_gradients_of_shares_wait_for_w() -> None:
    """As those of whole blocks; experts' do not."""
    model = model_of("llama")
    for block in model.blocks:
        whole = block.build()
        assert block.split is not None
        cut = {id(whole.get_parameter(name)) for name in block.split.cuts}
        assert cut <= {id(each) for each in whole.deferred_weights}  # type: ignore[union-attr]  # a captured block's


def test_what_has_no_plan_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration without a plan of its own, of which none is here, and one with a way that is not known."""
    with monkeypatch.context() as patch:
        patch.setitem(FAMILIES, "bert", ModelFamily("BertConfig", "BertForMaskedLM"))
        refused(r"BertConfig.* cannot be split over devices: transformers has no plan for it", "bert")
    llama = type(captured_config("llama"))
    monkeypatch.setattr(llama, "base_model_tp_plan", {"layers.*.mlp.up_proj": "sideways"})
    refused(r"splits model\.model\.layers\.\*\.mlp\.up_proj as 'sideways'", "llama")


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        (
            None,
            "lm_head is split only as 'colwise_gather_output', and LlamaForCausalLM._tp_plan does not have it",
        ),
        ({"lm_head": "colwise"}, r"and LlamaForCausalLM\._tp_plan has it as 'colwise'; leave --shards out"),
        ({"lm_head": "sideways"}, r"splits model\.lm_head as 'sideways', which pipeplan does not know"),
    ],
)
def test_the_plan_of_the_models_class_decides_about_its_head(
    plan: dict[str, str] | None, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not so where the notation is one of ours."""
    import transformers

    def ways(name: str) -> dict[str, str]:
        found = load(text(name), sequence=SEQUENCE, meta=True).ways
        return {key: way for key, way in found.items() if key.startswith("model.lm_head")}

    assert ways("llama") == {"model.lm_head.weight": "words"}
    for name in ("LlamaForCausalLM", "GPT2LMHeadModel"):
        monkeypatch.setattr(getattr(transformers, name), "_tp_plan", plan)
    assert "words" not in ways("llama").values()
    refused(told, "llama")
    assert set(ways("gpt2").values()) <= {"words"}
    load(text("gpt2"), sequence=SEQUENCE, meta=True, shards=[2])


def refused(told: str, name: str) -> None:
    with pytest.raises(UsageError, match=told):
        load(text(name), sequence=SEQUENCE, meta=True, shards=[2])


def captured_config(name: str) -> Any:
    return load(text(name), sequence=SEQUENCE, meta=True).config


def test_what_does_not_run_split_says_so() -> None:
    """T5's position biases go from block to block in slices; what is cut by operators is for planning."""
    for model in (captured("t5", "half"), load_model(text("llama"), sequence=SEQUENCE, grain="operator")):
        blocks = tuple(block.id for block in model.blocks)
        stage = PlacedStage(blocks=blocks, devices=(0, 1), shards=2)
        plan = placed_plan(captured("t5", "half") if "t5" in model.name else model, [stage])
        with pytest.raises(UsageError, match=r"it does not say how.*--shard-shared no"):
            require_splittable(plan, model)


COMMANDS = {
    "1": "--devices 1 --pp 1 --tp 1",
    "4": "--devices 4 --tp 2 --pp 2",
    "4 sharing sequences": "--devices 4 --tp 1 --pp 2 --cp 2 --cp-exchange gathered",
    "4 around a ring": "--devices 4 --tp 1 --pp 1 --cp 4 --cp-exchange ring",
    "2": "--devices 2 --pp 1 --tp 1 --dp 2 --zero 1",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked",
    [
        ("1", "4", "4 around a ring"),
        pytest.param(("1", "4 sharing sequences", "2"), marks=pytest.mark.long),
    ],
    ids=" and ".join,
)
def test_commands_give_one_loss_on_one_four_and_two_devices(asked: tuple[str, ...], tmp_path: Path) -> None:
    """Estimated for an H100, planned, and trained here: whole, in pipelines of shares and of pieces of sequences, and
    with divided state.
    """
    arguments = {**LLAMA, "num_hidden_layers": 4}
    model = f"LlamaConfig({', '.join(f'{key}={value}' for key, value in arguments.items())})"
    profile = tmp_path / "profile.json"
    estimate = ["--sequence", "32", "--estimate", "--device", "h100-80gb", "--shards", "1,2", "--microbatch", "1,2"]
    estimate += ["--context", "1,2,4"]
    invoke("profile", model, *estimate, "-o", str(profile))
    losses: dict[str, list[float]] = {}
    for ranks, how in ((ranks, COMMANDS[ranks]) for ranks in asked):
        plan = tmp_path / f"{ranks}.json"
        invoke("search", str(profile), *how.split(), "--mini-batch", "8", "-o", str(plan))
        stages = json.loads(plan.read_text())["stages"]
        ways = {stage["context_exchange"] for stage in stages if "context_exchange" in stage}
        assert ways == ({"ring"} if "a ring" in ranks else set())
        training = ["--sequence", "32", "--dtype", "float64", "--steps", "3", "--local", "--json"]
        trained = plan.read_text(), {"model": model, "sequence": 32, "dtype": "float64"}
        with warm_ranks(look_over, [trained]):
            done = pipeplan("run", str(plan), "--model", model, *training)
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert report["num_ranks"] == int(ranks.partition(" ")[0])
        losses[ranks] = [step["loss"] for step in report["steps"]]
    assert len(set(losses["1"])) == 3, "it learns"
    for ranks in asked:
        assert losses[ranks] == pytest.approx(losses["1"], rel=0, abs=1e-9)


def invoke(*arguments: str) -> str:
    done = pipeplan(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_words_of_other_devices_and_padding_have_no_gradient() -> None:
    """BERT's padding word is in the first device's rows, and keeps no gradient there alone.

    Devices gather their slices of the gradient; without the other one its own stands for that, too.
    """
    embedding = model_of("bert").blocks[0]
    assert embedding.split is not None
    tokens = torch.arange(SEQUENCE)[None] % WORDS
    for index in range(2):
        block = embedding.split.build(Shards(2, index))
        (table,) = [each for name, each in block.named_parameters() if "word" in name]
        assert table.shape[0] == ((WORDS + 1) // 2, WORDS // 2)[index]
        block(tokens).square()[..., 0].sum().backward()
        assert table.grad is not None
        found = table.grad.any(1).nonzero().flatten().tolist()
        assert found == (list(range(1, SEQUENCE)) if index == 0 else [])
