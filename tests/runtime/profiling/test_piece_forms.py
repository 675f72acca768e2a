"""Closed forms for pieces of sequences and micro-batches, against blocks that were made and traced at every size."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import pytest
import torch

import pipeplan
from pipeplan.files import Profile
from pipeplan.runtime.models.load import load_where_even
from pipeplan.runtime.profiling.benches import RowKey
from pipeplan.runtime.profiling.build_profile import GraphShare, Kind, block_graph_of, kinds_of, splits_of
from pipeplan.runtime.profiling.closed_forms import CountedBlock, Extent, Growth, NoClosedForm
from pipeplan.runtime.profiling.counting import counted
from pipeplan.runtime.profiling.shares import ShareCounter
from runtime_support.hugging_face import FURTHER, NAMES, text
from support.marks import always, slow_but

SHARDS, PARTS, SIZES, PLACES = (1, 2), (1, 2, 4), (1, 2, 4), 64
WITHOUT = {"clip", "flava", "t5", "mt5", "vit", "whisper", "gemma3", "llama4"}
"""Families whose samples are not one sequence each."""

LONGER = {"gpt2": {"n_positions": PLACES}} | {name: {"max_position_embeddings": PLACES} for name in ("bert", "opt")}
"""What lets the tiny configurations of tests take sequences of so many places."""

FAMILIES = [name for name in (*NAMES, *FURTHER) if name not in WITHOUT]


def test_two_extents_tell_what_a_number_is_made_of() -> None:
    draw = random.Random(1)
    for _ in range(200):
        samples, places, parts = draw.randrange(1, 5), 2 ** draw.randrange(6, 12), 2 ** draw.randrange(1, 6)
        more = samples * draw.choice((3, 5, 7))
        growth = Growth(Extent(samples, 1), Extent(more, parts))
        at = Extent(draw.randrange(1, 9), 2 ** draw.randrange(0, 6))
        scale = growth.at(at)
        for of_samples, of_places in product((0, 1), (0, 1, 2)):
            own = draw.randrange(1, 10**6)

            def number(count: int, length: int, own: int = own, kind: tuple[int, int] = (of_samples, of_places)) -> int:
                return int(own * count ** kind[0] * length ** kind[1])

            pair = number(samples, places), number(more, places // parts)
            assert scale(*pair) == number(at.samples, places // at.parts)
    with pytest.raises(NoClosedForm, match="no multiples of samples and places"):
        growth.at(at)(places + 1, places // parts + 1)
    with pytest.raises(NoClosedForm, match="is not whole at"):
        Growth(Extent(1, 1), Extent(3, 2)).at(Extent(1, 4))(6, 3)
    with pytest.raises(ValueError, match="do not tell samples from places"):
        Growth(Extent(1, 1), Extent(2, 2))


def differences(
    configuration: str, *, sequence: int = PLACES, fused: bool = True, again: bool = False
) -> tuple[int, list[str]]:
    """How many shares closed forms gave, and where they are not what a trace of such a share says."""
    dtype = torch.bfloat16
    model, _ = load_where_even(configuration, shards=SHARDS, sequence=sequence, grain=None, shared=(), meta=True)
    counter = ShareCounter(model, block_graph_of(model, dtype), dtype, fused, again)
    found = counter.count([*product(PARTS, SHARDS)], SIZES)
    made = splits_of(model, SHARDS, dtype, None, PARTS)
    own = {each.key: each for each in found.blocks}
    wanted = {each.key: each for each in counted(made, SIZES, dtype, again, fused=fused)}
    kinds, of_made, unlike = kinds_of(list(found.shares.values())), kinds_of(made), list[str]()
    for split in made:
        blocks = found.shares[split.context, split.shards].graph.blocks
        for one, other in zip(blocks, split.graph.blocks, strict=True):
            specs = [(own.id, own.dimensions, own.collectives, own.divided) for own in (one.spec, other.spec)]
            where = f"{other.spec.id} in {split.context} parts over {split.shards}"
            unlike += [where] * (specs[0] != specs[1])
            for size, recomputed in product(SIZES, (False, True)[: 1 + again]):
                block = own[key_of(kinds[one.likeness], size, recomputed)]
                like = wanted[key_of(of_made[other.likeness], size, recomputed)]
                unlike += [f"{where}, {size} samples"] * (figures(block) != figures(like))
    return sum(isinstance(each, GraphShare) for each in found.shares.values()), unlike


def key_of(kind: Kind, size: int, recomputed: bool) -> RowKey:
    shards, context, expert, id_ = kind
    return RowKey(id_, size, shards, recomputed, context, expert=expert)


def figures(block: CountedBlock) -> object:
    """All that it comes to, whatever it is for."""
    return block.row.model_copy(update={"shards": 1, "context": 1}), block.work, *block[3:]


@slow_but("name", FAMILIES, "llama".__eq__, always)
def test_closed_forms_are_what_traces_say(name: str) -> None:
    """Byte by byte and kernel by kernel, of every block, for whole sequences and pieces, whole and split."""
    closed, unlike = differences(text(name, **LONGER.get(name, {})))
    assert unlike == []
    assert closed == len(SHARDS) * (len(PARTS) - 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2-124m", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "how",
    [{"fused": False}, pytest.param({"again": True}, marks=pytest.mark.long)],
    ids=["operators", "recomputed"],
)
def test_so_they_are_operator_by_operator_and_where_blocks_are_recomputed(name: str, how: dict[str, bool]) -> None:
    configuration = text(name) if name == "llama" else name
    assert differences(configuration, **how) == (len(SHARDS) * (len(PARTS) - 1), [])


LLAMA = text("llama", max_position_embeddings=4096)
HOW: dict[str, Any] = {"device": "h100-80gb", "microbatch": (1, 2)}


def parts_in(profile: Profile) -> set[int]:
    return {row.context for block in profile.blocks for row in block.costs}


def test_estimates_have_pieces_unless_none_are_wanted() -> None:
    """As many as keep 512 tokens each, by the very rows that are there where they are asked for."""
    own, asked = (pipeplan.estimate(LLAMA, sequence=2048, context=each, **HOW) for each in (None, (2, 4)))
    assert own.blocks == asked.blocks
    assert parts_in(own) == {1, 2, 4}
    whole = pipeplan.estimate(LLAMA, sequence=2048, context=1, **HOW)
    assert parts_in(whole) == {1}
    kept = [tuple(row for row in block.costs if row.context == 1) for block in own.blocks]
    assert kept == [block.costs for block in whole.blocks]
    assert "Sequences are only whole" not in own.source.notes + whole.source.notes


@pytest.mark.filterwarnings("ignore:Dropout x")
@pytest.mark.parametrize(
    ("name", "how", "why"),
    [
        (LLAMA, {"sequence": 1023}, "sequences of 1023, which 2 devices cannot share evenly"),
        (LLAMA, {"sequence": 512}, "pieces of 256 places are shorter than 512"),
        (
            text("bert", max_position_embeddings=4096),
            {"sequence": 2048},
            "run does not know how devices share",
        ),
        ("runtime_support.models:chain", {}, "run does not know how devices share"),
    ],
    ids=["uneven", "short", "both ways", "no sequences"],
)
def test_what_has_no_pieces_says_why(name: str, how: dict[str, Any], why: str) -> None:
    found = pipeplan.estimate(name, **how, **HOW)
    assert parts_in(found) == {1}
    assert "Sequences are only whole: " in found.source.notes
    assert why in found.source.notes


def test_what_a_cluster_has_no_devices_for_is_left_out_without_a_word() -> None:
    found = pipeplan.estimate(LLAMA, sequence=4096, shards=(1, 2), cluster=pipeplan.Cluster.of("four", 4), **HOW)
    pairs = {(row.shards, row.context) for block in found.blocks for row in block.costs}
    assert pairs == {(1, 1), (1, 2), (1, 4), (2, 1), (2, 2)}
