"""Texts written on by four processes are those that one process writes, whoever has which requests and cached words."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import pipeplan
from builders.chains import chain_plan
from pipeplan import UsageError, _api
from pipeplan.costs.cache_volumes import AttentionShape, Kept, step_volume
from pipeplan.files.placement import PlacedStage
from pipeplan.runtime.decoding.options import DecodeOptions
from pipeplan.runtime.decoding.room import cache_room, room_remarks
from pipeplan.runtime.executor.message_graph import Message
from pipeplan.runtime.executor.rank_program import planned_programs
from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.models.zoo import mixture
from pipeplan.runtime.parallel.experts import routed
from pipeplan.runtime.training.options import TrainOptions
from pipeplan.runtime.training.weights import WeightNames
from runtime_support.decoding_rank import Case, Found, case, distance, logits_of, model_of, plan_of, unsplit, written_by
from runtime_support.warm import warm_ranks

LLAMA = (
    "LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=8, "
    "num_key_value_heads=4, vocab_size=50)"
)
QWEN2 = LLAMA.replace("Llama", "Qwen2")
MIXTRAL = LLAMA.replace("Llama", "Mixtral").replace(")", ", num_local_experts=8, num_experts_per_tok=2)")
DEEPSEEK = (
    "DeepseekV3Config(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, "
    "num_key_value_heads=4, vocab_size=50, q_lora_rank=16, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, "
    "v_head_dim=8, n_routed_experts=4, n_shared_experts=2, num_experts_per_tok=2, n_group=2, topk_group=1, "
    "moe_intermediate_size=24, first_k_dense_replace=2)"
)
"""Layers are dense, as its router has no float64."""

DEEPSEEK_2 = DEEPSEEK.replace("V3", "V2").replace("n_group=2, topk_group=1", 'topk_method="greedy"')

PROMPTS = [[9, 8, 7, 3, 1], [5, 4], [2, 1, 2], [11], [3] * 6, [1, 2, 3, 4, 5, 6, 7]]
"""More than there are slots, so that some join when others have left; no length is another's, nor a multiple of 4."""

SHORT = PROMPTS[:4]
"""Of models that run once: each length of a text is a pass of its own, which takes longer to make than to run."""

ALL, PAIRS = [[0, 1, 2, 3]], [[0, 1], [2, 3]]
TOLERANCE = {"float64": 1e-12, "float32": 1e-5}


def tolerance(each: Case) -> float:
    """That of its dtype; of DeepSeek V2 float32's, in which transformers turns queries and keys whatever the dtype."""
    return TOLERANCE["float32" if each["model"] == DEEPSEEK_2 else each["options"]["dtype"]]


def of_four(kind: str, model: str = LLAMA, **options: Any) -> Case:
    """One stage of four devices: five slots, so that their shares differ."""
    return case(model, [kind], ALL, **{"sizes": (5,), "prompts": PROMPTS, **options})


def of_pairs(kinds: Sequence[str], model: str = LLAMA, **options: Any) -> Case:
    """Two stages of two devices, and two groups, of which one has a slot and so leaves a device without any."""
    return case(model, kinds, PAIRS, **{"sizes": (2, 1), "prompts": PROMPTS, **options})


@functools.cache
def main_cases() -> dict[str, Case]:
    """The main ones of each kind of mixture and model; the others are long."""
    return {
        "experts of fewer requests than devices": case(
            MIXTRAL, [""], ALL, sizes=(3,), prompts=SHORT, mixed=("samples4", "cache4", "experts4")
        ),
        "tp before cp-q, of latents": of_pairs(["shards2", "cacheq2"], DEEPSEEK, prompts=SHORT),
        "cp before tp": of_pairs(["cacheq2", "shards2"]),
        "prompts in parts": of_four("cacheq4", chunk=2),
        "shared along the text and by heads": of_four("cache2-shards2", QWEN2, sizes=(3,), prompts=SHORT),
        "drawn, to a last word": of_pairs(
            ["samples2", "cache2"], "gpt2-tiny", temperature=2.0, seed=5, stop=[47, 59], new_tokens=6, top=40
        ),
        "shards4 in float32": of_four("shards4", dtype="float32"),
    }


def other_cases() -> dict[str, Case]:
    found = {
        f"{kind} in {dtype}": of_four(kind, dtype=dtype)
        for kind in ("samples4", "shards4", "cache4", "cacheq4")
        for dtype in TOLERANCE
    }
    found |= {f"two stages, {kind}": of_pairs([kind] * 2) for kind in ("samples2", "shards2", "cache2", "cacheq2")}
    found |= {
        f"{kind} of {model[:5]} in {dtype}": of_four(kind, model, dtype=dtype)
        for model, kinds in (
            ("gpt2-tiny", ("samples4", "samples2-shards2", "cache4", "cacheq4", "samples2-cache2", "cache2-shards2")),
            (LLAMA, ("samples2-cache2", "cache2-shards2", "samples2-cacheq2", "copies4")),
            (QWEN2, ("shards4", "cacheq4")),
        )
        for kind in kinds
        for dtype in ("float64", "float32")
        if dtype == "float64" or model != "gpt2-tiny"
    }
    found |= {
        f"two stages, {kind}, of {model[:5]} in {dtype}": of_pairs([kind] * 2, model, dtype=dtype)
        for kind in ("samples2", "shards2", "cache2", "cacheq2")
        for model, dtype in ((LLAMA, "float32"), ("gpt2-tiny", "float64"), (QWEN2, "float64"))
    }
    found |= {
        f"{kind} of {model[:10]} in {dtype}": of_four(kind, model, dtype=dtype)
        for model, kinds in (
            (DEEPSEEK, ("samples4", "shards4", "cacheq4", "cache2-shards2", "samples2-cacheq2")),
            (DEEPSEEK_2, ("shards4", "cacheq4")),
        )
        for kind in kinds
        for dtype in TOLERANCE
    }
    found |= {
        "cp of latents": of_four("cache4", DEEPSEEK),
        "more devices than requests": case(LLAMA, ["cache4"], ALL, sizes=(2,), prompts=PROMPTS[:2]),
        "one device at a time": case(LLAMA, [""] * 4, [[0], [1], [2], [3]], sizes=(1, 1, 2, 1), prompts=PROMPTS),
        "blocks in turn": of_four("", mixed=("cache4", "shards4", "samples4")),
        "one word": of_four("cache4", new_tokens=1),
    }
    found |= {
        f"{kind} of {model[:5]} in {dtype}": of_four(kind, model, dtype=dtype)
        for model in ("gpt2-experts-tiny", MIXTRAL)
        for kind, dtype in (("experts4", "float64"), ("experts4", "float32"), ("samples2-experts2", "float64"))
    }
    found |= {
        "two stages with experts": of_pairs(["experts2", "experts2"], MIXTRAL),
        "experts of layers and of prompts in parts": of_four("experts4", "gpt2-experts-tiny", chunk=2),
    }
    return {name: each for name, each in found.items() if each not in main_cases().values()}


def right(cases: dict[str, Case]) -> None:
    for (name, each), found in zip(cases.items(), written_by([*cases.values()], 4), strict=True):
        off = distance(found.texts(), unsplit(each))
        assert off <= tolerance(each), name
        if stop := each["options"].get("stop"):
            ends = {words[-1][0] for words in found.texts().values() if len(words) < each["options"]["new_tokens"]}
            assert ends, "some texts end at such a word"
            assert ends <= {*stop}, name
        if each["model"] == DEEPSEEK:
            assert found.cached == room_of(each), name


def room_of(each: Case) -> Mapping[int, int]:
    """What it is said that caches take."""
    options, decoder = DecodeOptions(model=each["model"], **each["options"]), model_of(each["model"]).decoder
    placed = [PlacedStage.model_validate_json(json.dumps(stage)) for stage in each["stages"]]
    assert decoder is not None
    chunk = options.chunk(each["chunk"], None)
    return cache_room(placed, each["sizes"], options.longest, chunk, decoder, getattr(torch, each["options"]["dtype"]))


def test_more_cache_than_the_plan_counts_is_said() -> None:
    """Of a token a head has a key of 4 numbers and a value of 4: of a window of 4 and of 3 words that enter at once,
    six tokens are kept, and the plan counts nothing."""
    mistral = LLAMA.replace("Llama", "Mistral").replace(")", ", sliding_window=4)")
    plan = plan_of(mistral, ["samples2"], [[0, 1]], batch=2, groups=1, context=13)
    asked = model_of(mistral), 13, 3, torch.float32
    (remark,) = room_remarks(plan, *asked)
    whole = 2 * 6 * 4 * (4 + 4) * 4  # layers, words, heads, numbers, bytes
    assert f"({whole} bytes) on rank 0, and the plan counts 0 (0 bytes) there" in remark
    enough = plan.model_copy(update={"stages": tuple(each.with_cache(whole) for each in plan.stages)})
    assert room_remarks(enough, *asked) == ()
    assert room_remarks(plan, model_of(LLAMA), 13, 3, torch.float32) == ()


@pytest.mark.slow
def test_four_processes_write_what_one_writes() -> None:
    right(main_cases())


@pytest.mark.slow
@pytest.mark.long
def test_every_configuration_writes_what_one_process_writes() -> None:
    right(other_cases())


HIDDEN, HEADS, KEY_HEADS, LAYERS = 32, 8, 4, 2
REQUESTS, STEPS = 8, 4
KINDS: dict[Kept, str] = {"dp": "samples4", "tp": "shards4", "cp": "cache4", "cp-q": "cacheq4"}


@pytest.mark.slow
def test_bytes_that_are_sent_are_those_predicted() -> None:
    """Prompts of one word, so that all is decode; in as many steps as devices each of them keeps each text's word."""
    prompts = [[number + 1] for number in range(REQUESTS)]
    kept: dict[str, Any] = {"prompts": prompts, "sizes": (REQUESTS,), "new_tokens": STEPS}
    cases = [case(LLAMA, [kind], ALL, **kept) for kind in KINDS.values()]
    *found_of, of_experts = written_by([*cases, case(SPARSE, ["experts4"], ALL, **kept)], 4)
    require_words_where_their_experts_are(of_experts)
    for (name, _), found in zip(KINDS.items(), found_of, strict=True):
        shape = AttentionShape.of(HIDDEN, HEADS, KEY_HEADS)
        wanted = step_volume(name, shape, REQUESTS, 4, statistics=1).bytes(8, 8) * STEPS * LAYERS
        assert {sent_in_attention(found, rank, name) for rank in range(4)} == {wanted}, name
        require_what_was_handed_over(found)


def require_what_was_handed_over(found: Found) -> None:
    """What is said to be sent is what the transport was given: tensors to be summed, each number of which a ring sends
    twice but to the last, and what goes to others."""
    for rank in range(4):
        said = dict[bool, int]()
        for name, count in found.sent[rank].items():
            summed = name.endswith(" sums")
            said[summed] = said.get(summed, 0) + count
        given = found.handed[rank]
        assert (said.get(True, 0), said.get(False, 0)) == (given.get("summed", 0) * 2 * 3 // 4, given.get("sent", 0))


@pytest.mark.slow
def test_bytes_on_the_wire_are_those_predicted() -> None:
    """In the connections of processes, as Linux counts them, of messages that are large beside what goes about each."""
    wide = LLAMA.replace("hidden_size=32", "hidden_size=512")
    prompts = [[number % 49 + 1] for number in range(WIDE_REQUESTS)]
    kept: dict[str, Any] = {"prompts": prompts, "sizes": (WIDE_REQUESTS,), "new_tokens": STEPS}
    kinds = {name: kind for name, kind in KINDS.items() if name != "dp"}
    for name, found in zip(
        kinds, written_by([case(wide, [kind], ALL, **kept) for kind in kinds.values()], 4), strict=True
    ):
        shape = AttentionShape.of(512, HEADS, KEY_HEADS)
        predicted = step_volume(name, shape, WIDE_REQUESTS, 4, statistics=1).bytes(8, 8) * STEPS * LAYERS
        for rank in range(4):
            moved, beside = found.wire[rank], sum(found.sent[rank].values()) - sent_in_attention(found, rank, name)
            if moved is None:
                pytest.skip("this system does not count what a process's TCP connections have sent (Linux does)")
            assert 0 <= (moved - beside) / predicted - 1 < 0.02, name


WIDE_REQUESTS = 64


SPARSE, EXPERTS, EACH = "gpt2-experts-tiny", 8, 2


def require_words_where_their_experts_are(found: Found) -> None:
    """Each word goes once to every other device that has one of its experts, with these and their shares, and comes
    back: by what one process chooses that reads the whole texts. How many there will be is said before."""
    rows = torch.zeros(LAYERS, 4, 4, dtype=torch.long)
    for request, written in found.texts().items():
        text = [request + 1, *(word for word, _ in written[:-1])]
        for layer, chosen in enumerate(chosen_of(SPARSE, text)):
            devices = (chosen // (EXPERTS // 4)).tolist()
            for device in (each for own in devices for each in {*own}):
                rows[layer, request // (REQUESTS // 4), device] += 1
    for rank, layer in itertools.product(range(4), range(LAYERS)):
        goes, comes = (int(each.sum() - each[rank]) for each in (rows[layer, rank], rows[layer, :, rank]))
        assert goes + comes > 0
        sent = {name.rpartition(" ")[2]: count for name, count in found.sent[rank].items() if f"layer{layer}.e" in name}
        counts = STEPS * 3 * 4 * 2 * 8
        assert sent == {"exchanges": 8 * (goes * (HIDDEN + 2 * EACH) + comes * HIDDEN) + counts}


def chosen_of(model: str, text: list[int]) -> list[torch.Tensor]:
    """[layer] the experts of each word of a text [words, of each], in one process."""
    noted: list[torch.Tensor] = []

    def note(words: torch.Tensor, chosen: torch.Tensor, *others: Any, **more: Any) -> torch.Tensor:
        noted.append(chosen)
        return routed(words, chosen, *others, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixture, "routed", note)
        logits_of.__wrapped__(model, tuple(text), "float64")
    return noted


def sent_in_attention(found: Found, rank: int, kept: Kept) -> Fraction:
    """Bytes of a rank's layers, each an attention and what follows."""
    purposes = ("sums",) if kept == "tp" else ("attention",)
    return Fraction(
        sum(
            count
            for name, count in found.sent[rank].items()
            if name.startswith("layers.") and name.rpartition(" ")[2] in purposes
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "kinds", [("cp-q",), *(pytest.param(each, marks=pytest.mark.long) for each in (("tp",), ("dp", "cp")))]
)
def test_plans_of_latents_are_run_as_they_count(kinds: tuple[Kept, ...]) -> None:
    """Caches of latents to the byte, and what devices along them send in a step and layer."""
    sizes: dict[str, Any] = {"inference": True, "batch": "1,2,8", "context": "4,16", "shards": "1,2,4", "sequence": 16}
    profile = pipeplan.estimate(DEEPSEEK, device="a5000-24gb", dtype="float32", **sizes)
    context = 1 + 3 * STEPS
    asked: dict[str, Any] = {"devices": 4, "pp": 1, "batch": REQUESTS, "context": context, "deterministic": True}
    plans = {kv: pipeplan.search(profile, kv=kv, **asked) for kv in kinds}
    prompts = [[number + 1] for number in range(REQUESTS)]
    given: dict[str, Any] = {"prompts": prompts, "new_tokens": 3 * STEPS, "dtype": "float32"}
    cases = []
    for kv, found in plans.items():
        assert found.plan.decode is not None
        made = case(DEEPSEEK, [KINDS[kv]], ALL, sizes=found.plan.decode.sizes, **given)
        made["stages"][0]["configurations"] = list(found.plan.stages[0].configurations)
        cases.append(made)
    token = (8 + 4) * 4 * LAYERS  # a latent and a rotated key
    for (kv, found), each, written in zip(plans.items(), cases, written_by(cases, 4), strict=True):
        assert distance(written.texts(), unsplit(each)) <= TOLERANCE["float32"], kv
        assert [written.cached[rank] for rank in range(4)] == [*found.plan.cache_bytes], kv
        whole = REQUESTS * context if kv == "tp" else REQUESTS // 4 * context
        assert written.cached[0] == token * (REQUESTS * -(-context // 4) if kv.startswith("cp") else whole), kv
        assert found.decode is not None
        volume = next(own for own in found.decode.volumes if own.kept == kv)
        sent = {sent_in_attention(written, rank, kv) for rank in range(4)}
        assert sent == {volume.bytes * 3 * STEPS * LAYERS}, kv


def test_a_plan_is_followed_from_a_file_of_weights(tmp_path: Path) -> None:
    """Two devices with two stages each, which take turns as the plan's repetend says; numbers are those of the file."""
    model, others = load_model("gpt2-tiny"), 9
    names = WeightNames.of(model, torch.float32).name_of
    weights = {
        names[block.id, own]: tensor.clone()
        for block in model.blocks
        for own, tensor in model.build(block.id, others).state_dict().items()
    }
    save_file(weights, tmp_path / "weights.safetensors")
    kinds, devices = ["", "", "", ""], [[0], [1], [0], [1]]
    plan = plan_of("gpt2-tiny", kinds, devices, batch=4, groups=2, context=13)
    chunks = plan_of("gpt2-tiny", kinds, devices, batch=4, groups=2, context=13, chunk_tokens=2)
    assert plan.repetend is not None
    options = DecodeOptions(model="gpt2-tiny", prompts=PROMPTS, new_tokens=4, seed=others)
    with warm_ranks():
        found = _api.run(plan, replace(options, init=str(tmp_path / "weights.safetensors"), seed=0))
        in_chunks = _api.run(chunks, options)
    asked = {"prompts": PROMPTS, "new_tokens": 4, "dtype": "float32", "seed": others}
    wanted = unsplit({"model": "gpt2-tiny", "options": asked})
    for run in (found, in_chunks):
        assert [list(each.ids) for each in run.result.requests] == [[word for word, _ in of] for of in wanted.values()]
    assert all(sorted(each.times_ns) == [*each.times_ns] for each in found.result.requests)
    assert found.figures()["predicted_token_ns"] == plan.token_ns
    wire = found.result.wire_bytes
    for sent, moved in zip(found.result.sent_bytes, wire, strict=True):
        if moved is None:
            pytest.skip("this system does not count what a process's TCP connections have sent (Linux does)")
        assert sum(sent.values()) < moved < 3 * sum(sent.values())  # what goes about each message, of a few bytes here


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ([[1] * 12], "a text has 16, and the plan's caches hold 13"),
        ([[1, 64]], "prompt 1 has token 64, and gpt2-tiny has those from 0 to 63"),
    ],
)
def test_prompts_that_do_not_fit_are_refused(prompts: list[list[int]], words: str) -> None:
    plan = plan_of("gpt2-tiny", ["samples2"], [[0, 1]], batch=2, groups=1, context=13)
    with warm_ranks(), pytest.raises(UsageError, match=words):
        _api.run(plan, DecodeOptions(model="gpt2-tiny", prompts=prompts, new_tokens=4))


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(UsageError, match="no decode steps, which --prompt-file needs"):
        _api.run(chain_plan(1, 2), DecodeOptions(model="gpt2-tiny", prompts=[[1]]))
    decoding = plan_of("gpt2-tiny", [""], [[0]], batch=1, groups=1, context=9)
    with warm_ranks(), pytest.raises(UsageError, match=r"after token 64 .*--stop-ids.* has those from 0 to 63"):
        _api.run(decoding, DecodeOptions(model="gpt2-tiny", prompts=[[1]], new_tokens=2, stop=(3, 64)))
    with pytest.raises(UsageError, match="generate text: give --prompt-file"):
        _api.run(decoding, TrainOptions("gpt2-tiny"))


def test_emulated_ranks_take_the_token_of_the_turn_before() -> None:
    """In the first turn there is none; later ones of a group take what its last one made, whatever group is between."""
    plan = plan_of("gpt2-tiny", ["", ""], [[0], [1]], batch=3, groups=3, context=9)
    first, _ = planned_programs(plan)
    takes = [list(step.takes) for step in first.steps if step.message is None]
    way_back = Message("F", 1, 0)
    assert takes[:3] == [[], [], []]
    size = plan.microbatch_size
    assert takes[3:] == [[(way_back, tuple(range(m * size, (m + 1) * size)))] for m in range(plan.num_microbatches - 3)]
