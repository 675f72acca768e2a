"""One device's share of a Hugging Face configuration: all shares together are the model; what they exchange."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeplan.errors import UsageError
from pipeplan.runtime.models.capture.repeats import alike_layers
from pipeplan.runtime.models.huggingface import LoadedModel, load
from pipeplan.runtime.models.huggingface.families import FAMILIES, places_of, scattered_in, share_of
from pipeplan.runtime.parallel.places import Exchanges, positions_at
from pipeplan.runtime.parallel.sharding import Shards
from runtime_support.hugging_face import (
    ALIKE,
    FURTHER,
    HEADS,
    HIDDEN,
    NAMES,
    SEQUENCE,
    TOWERS,
    WORDS,
    batch_for,
    captured,
    eager_experts,
    size,
    text,
)
from runtime_support.threads import together
from support.marks import slow_but

SPLIT = [*NAMES, *FURTHER]
SEEING = ("gemma3", "llama4")


@cache
def filled(name: str) -> LoadedModel:
    """The model in float64, without parameters that are zero: biases, and a projection of Gemma's."""
    found = load(text(name), sequence=None if name == "vit" else SEQUENCE)
    found.module.double()
    generator = torch.Generator().manual_seed(0)
    for parameter in found.module.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.02, generator=generator)
    return found


@pytest.mark.parametrize("name", SPLIT)
def test_shares_together_have_all_parameters(name: str) -> None:
    """What is split once, what is whole on every device; a table's last share may be smaller."""
    found = filled(name)
    split = {id(found.module.get_parameter(key)) for key in found.ways}
    sizes = [(parameter.numel(), id(parameter) in split) for parameter in found.module.parameters()]
    expected = sum(count if is_split else 2 * count for count, is_split in sizes)
    assert sum(size(share_of(found.module, found.ways, 2, rank)) for rank in range(2)) == expected
    assert sum(count for count, is_split in sizes if is_split) > 0.3 * sum(count for count, _ in sizes)


@pytest.mark.parametrize("name", SPLIT)
def test_shares_together_compute_the_same(name: str) -> None:
    """Two shares side by side, with sums where the plan has them, give the words or features of the whole model."""
    found = filled(name)
    batch = batch_for(found, 2)
    with eager_experts(found), torch.no_grad():
        expected = answer(name, found.module, batch)
        shares = [share_of(found.module, found.ways, 2, rank) for rank in range(2)]
        parts = AllShares(found, shares).run(lambda share: answer(name, share, batch))
    made = torch.cat(parts, -1) if expected.shape != parts[0].shape else parts[0]
    assert torch.allclose(made, expected, rtol=1e-9, atol=tolerance(name))


@pytest.mark.slow
@pytest.mark.parametrize("shared", [pytest.param(True, marks=pytest.mark.long), False])
def test_older_falcons_have_one_key_for_all_heads_or_one_for_each(shared: bool) -> None:
    """One that all heads share is whole on every device, so that such shares are for planning only."""
    changes = {"new_decoder_architecture": False, "num_kv_heads": None, "multi_query": shared}
    found = load(text("falcon", **changes), sequence=SEQUENCE)
    found.module.double()
    batch = batch_for(found, 2)
    with torch.no_grad():
        expected = answer("falcon", found.module, batch)
    shares = [share_of(found.module, found.ways, 2, rank) for rank in range(2)]
    made = torch.cat(AllShares(found, shares).run(lambda share: answer("falcon", share, batch)), -1)
    assert torch.allclose(made, expected, rtol=1e-9, atol=1e-9)
    heads = {
        share.get_parameter("model.transformer.h.0.self_attention.query_key_value.weight").shape for share in shares
    }
    size = HIDDEN // HEADS
    assert heads == {(2 * size + 2 * size if shared else 3 * 2 * size, HIDDEN)}
    assert found.runs_split != shared


def tolerance(name: str) -> float:
    """Llama 4 takes means of squares of heads in float32, whose order depends on how many there are."""
    return 1e-7 if name.startswith("llama4") else 1e-9


def answer(name: str, module: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Logits, or for two towers what they say about each sample."""
    given = {"input_ids": batch["tokens"]} if "tokens" in batch else {}
    if "decoder_tokens" in batch:
        given["decoder_input_ids"] = batch["decoder_tokens"]
    if name in SEEING:
        return module.logits(batch["tokens"], batch["pixels"])  # type: ignore[no-any-return]  # a tensor
    if "pixels" in batch:
        given["pixel_values"] = batch["pixels"]
    if "sound" in batch:
        given["input_features"] = batch["sound"]
    made = module.model(**given)
    if name == "clip":
        return torch.cat([made.text_embeds, made.image_embeds])
    return module.head(made.multimodal_embeddings) if name == "flava" else made.logits


@slow_but("name", [name for name in SPLIT if FAMILIES[name].divides], lambda name: name in ("gpt2", "qwen2_moe"))
def test_shares_that_divide_the_sequence_compute_the_same(name: str) -> None:
    """Layers take and give slices of it, and logits are those of the whole model."""
    found = filled(name)
    batch = batch_for(found, 2)
    lengths = set[int]()

    def run(shards: Shards) -> Tensor:
        share = share_of(found.module, found.ways, 2, shards.index)
        places = places_of(share, found.ways, found.family)
        tokens = found.family.tokens(found.config, found.sequence)
        enter = partial(shards.sliced, dimension=1)
        places.hook(share, tokens, Exchanges(enter, shards.joined, shards.scattered, shards.count))
        for layer in places.layers:
            share.get_submodule(layer).register_forward_hook(
                lambda _, __, made: lengths.add((made[0] if isinstance(made, tuple) else made).shape[1])
            )
        for key, way in found.ways.items():
            owner = share.get_submodule(key.rpartition(".")[0])
            if way == "words" and isinstance(owner, nn.Embedding):
                look_up_own(owner, shards)
            if path := scattered_in(share, key, way):
                made_by = share.get_submodule(path)
                if getattr(made_by, "bias", None) is not None:  # is summed, too
                    made_by.bias = nn.Parameter(made_by.bias / shards.count)
                if path not in places.scatters:  # of an image tower
                    made_by.register_forward_hook(lambda _, __, made: shards.summed(made))
        return no_grad(lambda module: answer(name, module, batch), share)

    with eager_experts(found), torch.no_grad():
        expected = answer(name, found.module, batch)
        made = torch.cat(together(2, run), -1)
    assert torch.allclose(made, expected, rtol=1e-9, atol=tolerance(name))
    tokens = found.family.tokens(found.config, found.sequence)
    assert lengths == {
        positions_at(layer, tokens) // 2 for layer in places_of(found.module, found.ways, found.family).layers
    }


def look_up_own(table: nn.Embedding, shards: Shards) -> None:
    """Words of others come with the sum."""
    first, original = shards.index * -(-WORDS // shards.count), table.forward

    def look_up(tokens: Tensor) -> Tensor:
        mine = (tokens >= first) & (tokens < first + table.num_embeddings)
        return shards.summed(original(torch.where(mine, tokens - first, 0)) * mine[..., None])

    table.forward = look_up  # type: ignore[method-assign]  # only here


class AllShares:
    """Shares of a model in threads of their own that add up their parts as devices would."""

    def __init__(self, found: LoadedModel, shares: list[nn.Module]) -> None:
        self.shares = shares
        self.slots: list[Any] = [None] * len(shares)
        self.barrier = threading.Barrier(len(shares), timeout=60)
        for rank, share in enumerate(shares):
            for path in {scattered_in(found.module, key, way): None for key, way in found.ways.items()}:
                if path:
                    share.get_submodule(path).register_forward_hook(partial(self.add_up, rank))
            for key, way in found.ways.items():
                owner = share.get_submodule(key.rpartition(".")[0])
                if way == "words" and isinstance(owner, nn.Embedding):
                    self.split_lookup(rank, owner)

    def add_up(self, rank: int, module: nn.Module, given: Any, made: Any) -> Any:
        """The sum over all shares, with the bias once; beside it a router's scores, which all have."""
        if isinstance(made, tuple):
            return self.add_up(rank, module, given, made[0]), *made[1:]
        bias = getattr(module, "bias", None)
        self.slots[rank] = made if bias is None else made - bias
        self.barrier.wait()
        total: Tensor = sum(self.slots[1:], self.slots[0])
        self.barrier.wait()
        return total if bias is None else total + bias

    def split_lookup(self, rank: int, table: nn.Embedding) -> None:
        """Each share looks up its own words; those of others give nothing."""
        first = rank * -(-WORDS // len(self.shares))
        original = table.forward

        def look_up(tokens: Tensor) -> Tensor:
            mine = (tokens >= first) & (tokens < first + table.num_embeddings)
            made = original(torch.where(mine, tokens - first, 0)) * mine[..., None]
            return self.add_up(rank, nn.Identity(), None, made)

        table.forward = look_up  # type: ignore[method-assign]  # only here

    def run(self, work: Callable[[nn.Module], Tensor]) -> list[Tensor]:
        with ThreadPoolExecutor(len(self.shares)) as pool:
            return list(pool.map(lambda share: no_grad(work, share), self.shares))


def no_grad(work: Callable[[nn.Module], Tensor], share: nn.Module) -> Tensor:
    with torch.no_grad():  # is of a thread
        return work(share)


UNLIKE = [name for name in SPLIT if name not in ALIKE]
KINDS = ("bert", "t5", "clip", "qwen2_moe", "deepseek_v3", "gemma3_text")
"""One family of each kind of blocks; all of them compute the same in shares, and the others' blocks are long tests."""


@slow_but("name", UNLIKE, lambda name: name in ("gpt2", "llama"), lambda name: name not in KINDS)
def test_a_share_has_the_same_blocks_and_edges(name: str) -> None:
    model, share = captured(name, "half"), captured(name, "half", 2)
    assert [block.id for block in share.blocks] == [block.id for block in model.blocks]
    assert share.edges == model.edges
    assert [block.operator for block in share.blocks] == [block.operator for block in model.blocks]
    for before, block in zip(model.blocks, share.blocks, strict=True):
        assert size(block.build()) <= size(before.build())
    assert not any(block.collectives for block in model.blocks)


def test_the_expert_of_all_words_is_split_too() -> None:
    (found,) = {
        (block.dimensions["ffn"], block.dimensions["shared_ffn"])
        for block in captured("qwen2_moe", "half", 2).blocks
        if block.operator == "moe"
    }
    assert found == (24 // 2, 40 // 2)


def test_one_device_needs_no_others() -> None:
    assert not any(block.collectives for block in captured("gpt2", "half").sharded(1).blocks)


HIDDEN_BYTES = SEQUENCE * HIDDEN * 4
WHOLE = [("all_reduce", "I", HIDDEN_BYTES)], [("all_reduce", "F", HIDDEN_BYTES)]
"""What goes into split products, and comes from them, is whole on every device."""
DIVIDED = (
    [("all_gather", "F", HIDDEN_BYTES), ("reduce_scatter", "I", HIDDEN_BYTES), ("all_gather", "W", HIDDEN_BYTES)],
    [("reduce_scatter", "F", HIDDEN_BYTES), ("all_gather", "I", HIDDEN_BYTES)],
)
"""It is divided along the sequence."""


ONE_LENGTH = [each for each in UNLIKE if each not in (*TOWERS, *SEEING, "vit", "whisper")]


@slow_but("name", ONE_LENGTH, lambda name: name in ("gpt2", "llama"), lambda name: name not in KINDS)
def test_collectives_of_half_layers(name: str) -> None:
    divides = FAMILIES[name].divides
    words = ("all_gather", "F", SEQUENCE * 2 * 2 * 4)  # two numbers of each word, of two devices
    taken = {block.id: block.dimensions.get("experts_per_token", 0) for block in captured(name, "half").blocks}
    entering, leaving = DIVIDED if divides else WHOLE
    for block in captured(name, "half", 2).blocks:
        found = sorted((each.operation, each.phase, each.bytes_per_sample) for each in block.collectives)
        assert block.divided == divides
        if block.operator == "moe" and name != "llama4_text":  # whose words are multiplied before experts have them
            chosen = "all_reduce", "I", SEQUENCE * taken[block.id] * 4
            assert found.count(chosen) == 1
            found.remove(chosen)
        if block.operator == "layer" or (block.operator == "moe" and "shared_ffn" in block.dimensions and not divides):
            assert found == sorted(2 * (entering + leaving))
        elif block.operator in ("attention", "ffn", "moe"):
            assert found == sorted(entering + leaving)
        elif block.operator == "cross-attention":
            assert found == sorted(2 * entering + leaving)
        elif block.operator == "embedding" and block.samples:  # another looks up T5's position biases, of heads
            assert found == sorted(leaving)
        elif block.operator == "head":
            assert found == sorted([words, *entering])
        else:
            assert not found


def around(patterns: tuple[list[Any], list[Any]], entering: int, leaving: int = 0) -> list[Any]:
    """Collectives before and after split products, of sequences with so many positions; of no leaving none."""
    before, after = (
        [(how, phase, size // SEQUENCE * length) for how, phase, size in of]
        for of, length in zip(patterns, (entering, leaving), strict=True)
    )
    return before + (after if leaving else [])


@pytest.mark.slow
def test_collectives_of_sequences_that_differ() -> None:
    """Whisper's decoder joins the encoder's, images are whole, and so is what they say to a text's layers."""
    heard, patches, image = 10, (16 // 8) ** 2 + 1, (16 // 4) ** 2
    source, target = around(DIVIDED, heard, heard), around(DIVIDED, SEQUENCE, SEQUENCE)
    across = around(DIVIDED, heard) + target
    tower = around(WHOLE, image + 1, image + 1)
    expected = {
        "whisper": [source] * 4 + [target, across, target] * 2,
        "vit": [around(WHOLE, patches, patches)] * 4,
        "llama4": [tower] * 4 + [target] * 4,
        "gemma3": [around(WHOLE, image, image)] * 4 + [target] * 4,
    }
    for name, of_blocks in expected.items():
        blocks = [each for each in captured(name, "half", 2).blocks if each.operator in HALVES]
        found = [
            [(each.operation, each.phase, each.bytes_per_sample) for each in block.collectives] for block in blocks
        ]
        assert [sorted(each) for each in found] == [sorted(each) for each in of_blocks], name
        divided = {"whisper": [True] * 10, "vit": [False] * 4}.get(name, [False] * 4 + [True] * 4)
        assert [block.divided for block in blocks] == divided


HALVES = ("attention", "cross-attention", "ffn", "moe")


@slow_but("name", ["gpt2", "t5", "clip"], lambda name: name == "gpt2")
def test_collectives_do_not_depend_on_the_grain(name: str) -> None:
    sums = []
    for grain in ("layer", "half", "operator"):
        blocks = captured(name, grain, 2).blocks  # type: ignore[arg-type]  # a grain by its name
        sums.append(Counter(each for block in blocks for each in block.collectives))
    assert sums[0] == sums[1] == sums[2]


@pytest.mark.slow
def test_an_image_tower_reduces_its_own_tokens() -> None:
    share = captured("flava", "half", 2)
    patches = (16 // 8) ** 2 + 1
    found = {block.id.partition(".")[0]: block.collectives for block in share.blocks if block.operator == "ffn"}
    assert {each.bytes_per_sample for each in found["image_model"]} == {patches * HIDDEN * 4}
    assert {each.bytes_per_sample for each in found["multimodal_model"]} == {(patches + SEQUENCE + 1) * HIDDEN * 4}


@pytest.mark.parametrize(
    ("name", "devices", "reason"),
    [
        ("llama", 4, "2 key-value heads in LlamaConfig.*4 devices"),
        ("gpt2", 3, "4 heads in GPT2Config.*3 devices"),
        ("clip", 8, "4 heads in CLIP.*8 devices"),
    ],
)
def test_what_cannot_be_split_is_named(name: str, devices: int, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        captured(name, "half").sharded(devices)  # type: ignore[misc]  # is not None


def test_a_width_that_cannot_be_split_is_named() -> None:
    found = load(text("llama", intermediate_size=63), sequence=SEQUENCE, meta=True)
    with pytest.raises(
        UsageError, match=r"has 63 along dimension 0 of .*gate_proj.*, which 2 devices cannot share evenly"
    ):
        found.sharded(2)


def test_a_share_of_a_model_without_data_has_none() -> None:
    found = load("LlamaConfig(num_hidden_layers=1)", meta=True)
    share = found.sharded(8)
    assert all(tensor.is_meta for tensor in share.module.state_dict().values())
    assert size(share.module) < size(found.module) / 7.9


@pytest.mark.parametrize("name", ["llama", "phi3", "falcon", "whisper"])
def test_layers_of_a_share_are_alike_where_those_of_the_model_are(name: str) -> None:
    """So that they are traced once, too."""
    found = load(text(name), sequence=SEQUENCE, meta=True)
    share = found.sharded(2)
    assert share.divided
    assert alike_layers(share.module) == alike_layers(found.module) != {}


@pytest.mark.slow
def test_the_table_of_families_says_what_is_so() -> None:
    """Of every family: experts, whether devices divide the sequence, and whether a run can split it."""
    page = (Path(__file__).parents[3] / "docs" / "estimating.md").read_text(encoding="utf-8")
    said = {}
    for row in (line.strip("|").split("|") for line in page.splitlines() if line.startswith("|") and "Config`" in line):
        _, classes, *more = (each.strip() for each in row)
        said |= dict.fromkeys(re.findall(r"`(\w+Config)`", classes), tuple(each.partition(",")[0] for each in more))
    shown = {True: "yes", False: "-"}
    for name in SPLIT:
        model, share = captured(name, "half"), captured(name, "half", 2)
        divided = {block.divided for block in share.blocks}
        experts = any("experts" in block.dimensions for block in model.blocks)
        where = "of texts" if len(divided) == 2 else shown[divided == {True}]
        assert said.pop(FAMILIES[name].config) == (shown[experts], "yes", where, shown[model.runs_split]), name
    assert not said
