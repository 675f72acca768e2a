"""What decoding is made of, in one process: pieces of caches, requests that come and go, words, prompts and options."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pipeplan import UsageError
from pipeplan.errors import FileError
from pipeplan.files import PlacedStage
from pipeplan.runtime.decoding.attention import attention, merged
from pipeplan.runtime.decoding.cached import BlockCaches, CachedRows, DecodingAttention
from pipeplan.runtime.decoding.choosing import WordChoice
from pipeplan.runtime.decoding.decode import require_blocks
from pipeplan.runtime.decoding.latents import LatentHeads
from pipeplan.runtime.decoding.layouts import BlockLayout, Route, positions, routes
from pipeplan.runtime.decoding.options import DecodeOptions, DecodeOutcome, read_prompts
from pipeplan.runtime.decoding.pieces import CachePiece, Looks, room_for
from pipeplan.runtime.decoding.rank import Turns
from pipeplan.runtime.decoding.requests import Pass, RequestQueue, Row
from pipeplan.runtime.launch.job import RunResult, WrittenText
from pipeplan.runtime.models.zoo import zoo_model
from pipeplan.workload.kinds import PREFILL
from pipeplan.workload.mesh import Mesh
from runtime_support.decoding_rank import plan_of

HEADS, KEY_HEADS, SIZE = 6, 2, 4
TOLERANCE = {torch.float64: 1e-14, torch.float32: 2e-6}


def whole(query: Tensor, key: Tensor, value: Tensor, first: int, window: int | None) -> Tensor:
    """Attention of words from ``first`` on to all before them, by its formula: [heads, words, size]."""
    copies = query.shape[0] // key.shape[0]
    scores = query @ key.repeat_interleave(copies, 0).transpose(1, 2) / math.sqrt(query.shape[-1])
    own, others = torch.arange(first, key.shape[1])[:, None], torch.arange(key.shape[1])[None, :]
    seen = (others <= own) & (others > own - (window or key.shape[1]))
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value.repeat_interleave(copies, 0)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("wide", [SIZE, SIZE - 1])  # torch's operator is for values as wide as queries
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("count", [1, 3, 5])
@pytest.mark.parametrize("lengths", [(7, 2, 5), (6, 6, 6), (1, 1, 1)])
def test_pieces_of_any_number_are_merged_into_all(
    lengths: tuple[int, ...], count: int, window: int | None, wide: int, dtype: torch.dtype
) -> None:
    """Prompts in two passes, then one word each; pieces of short texts are empty, and one slot is left out. With a
    window pieces have room for it and a pass alone."""
    torch.manual_seed(0)
    total = [length + STEPS for length in lengths]
    slots = [0, 1, 3]
    keys, values = ([torch.randn(KEY_HEADS, each, size, dtype=dtype) for each in total] for size in (SIZE, wide))
    queries = [torch.randn(HEADS, each, SIZE, dtype=dtype) for each in total]
    most = -(-max(lengths) // 2)
    pieces = [CachePiece(4, room_for(max(total), window, most, count)) for _ in range(count)]
    until = [[length // 2 for length in lengths], *([length + step for length in lengths] for step in range(STEPS + 1))]
    for begins, ends in pairwise([[0] * len(lengths), *until]):
        new = [number for number, (begin, end) in enumerate(zip(begins, ends, strict=True)) if end > begin]
        width = max(end - begin for begin, end in zip(begins, ends, strict=True))
        rows = tuple(Row(slots[each], slots[each], begins[each], ends[each] - begins[each], True) for each in new)
        given = [[each[number] for number in new] for each in (queries, keys, values)]
        found = [attend(piece, place, count, rows, width, *given, window) for place, piece in enumerate(pieces) if new]
        mixed = merged(*(torch.stack(each) for each in zip(*found, strict=True))) if new else torch.empty(0)
        for made, number in zip(mixed, new, strict=True):
            begin, end = begins[number], ends[number]
            wanted = whole(queries[number][:, begin:end], keys[number][:, :end], values[number][:, :end], begin, window)
            assert (made[:, width - (end - begin) :] - wanted).abs().max() < TOLERANCE[dtype]


STEPS = 3


def attend(
    piece: CachePiece,
    place: int,
    count: int,
    rows: tuple[Row, ...],
    width: int,
    queries: list[Tensor],
    keys: list[Tensor],
    values: list[Tensor],
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """Keep what is this piece's of new words, and attend."""
    looks = Looks(rows, width, place, count, 0)
    for number, row in enumerate(rows):
        for word in range(row.begin, row.begin + row.count):
            chosen = slice(word, word + 1) if (word + row.slot) % count == place else slice(0, 0)
            own = len(range(word + 1)[chosen])
            slot, where = torch.full((own,), row.slot), torch.full((own,), word // count)
            piece.append(slot, where, *(each[number][:, chosen].transpose(0, 1) for each in (keys, values)))
    query = queries[0].new_zeros(len(rows), HEADS, width, SIZE)
    for number, row in enumerate(rows):
        query[number, :, width - row.count :] = queries[number][:, row.begin : row.begin + row.count]
    return piece.attend(query, looks, window, None)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_heads_meet_latents_as_they_meet_what_is_made_of_them(dtype: torch.dtype) -> None:
    """A prompt of three words, then one word; kept are latents and the rotated key alone."""
    torch.manual_seed(1)
    size, rotated, own, wide, words = 5, 2, 3, 4, 4
    weight, other = (torch.randn(HEADS * (own + wide), size, dtype=dtype) for _ in range(2))
    latents = torch.randn(1, 1, words, size, dtype=dtype)
    turned, query = (torch.randn(1, heads, words, width, dtype=dtype) for heads, width in ((1, 2), (HEADS, 5)))

    def attended(part: slice) -> Tensor:
        made = torch.nn.functional.linear(latents[:, :, part], weight).view(1, -1, HEADS, own + wide).transpose(1, 2)
        key, value = made.split([own, wide], -1)
        key = torch.cat([key, turned[:, :, part].expand(-1, HEADS, -1, -1)], -1)
        return torch.nn.functional.scaled_dot_product_attention(query[:, :, part], key, value, scale=0.4)

    mode, caches, found = DecodingAttention(), BlockCaches(1, words, None, None), []
    for begin, count in ((0, 3), (3, 1)):
        rows = CachedRows(Pass(0, count, (Row(0, 0, begin, count, True),)), BlockLayout(Mesh(())), 0, 1)
        mode.begin(caches, rows, None, LatentHeads(weight, rotated))
        with mode:
            found.append(attended(slice(begin, begin + count)))
            assert torch.nn.functional.linear(latents, other).isfinite().all(), "other layers make what they do"
    wanted = torch.cat([attended(slice(0, place + 1))[:, :, -1:] for place in range(words)], 2)
    assert (torch.cat(found, 2) - wanted).abs().max() < 10 * TOLERANCE[dtype]
    assert caches.num_bytes == words * (size + rotated) * dtype.itemsize


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_no_word_is_chosen_of_logits_that_are_not_finite(temperature: float, odd: float) -> None:
    """But for -inf, of words that never come, if there are others."""
    choice, logits = WordChoice(temperature), torch.tensor([0.0, -math.inf, odd])
    with pytest.raises(ValueError, match=r"^1 of 3 logits are no finite numbers"):
        choice.of(logits, 0, 0)
    with pytest.raises(ValueError, match=r"^2 of 2 logits"):
        choice.of(torch.full((2,), -math.inf), 0, 0)
    assert choice.of(torch.tensor([-math.inf, 0.0]), 0, 0) == 1


def test_attention_without_torchs_operator_is_the_same() -> None:
    """As on devices that have none, or where values have another size."""
    query, key, value = (torch.randn(2, 3, words, 4, dtype=torch.float64) for words in (2, 5, 5))
    mask = torch.zeros(2, 1, 2, 5, dtype=torch.float64)
    mask[..., 3:] = -torch.inf
    wide = torch.cat([value, value], -1)
    for one, other in zip(attention(query, key, value, mask, 0.3), attention(query, key, wide, mask, 0.3), strict=True):
        assert torch.allclose(one, other[..., :4] if one.ndim == 4 else other, atol=1e-14)


def test_blocks_that_come_before_what_they_take_are_refused() -> None:
    model = zoo_model("gpt2-tiny")
    ids = [block.id for block in model.blocks]
    require_blocks(model, [PlacedStage(blocks=tuple(ids), devices=(0,))])
    turned = PlacedStage(blocks=(ids[0], ids[2], ids[1], *ids[3:]), devices=(0,))
    with pytest.raises(UsageError, match=rf"block '{ids[2]}' takes the output of '{ids[1]}', which comes after it"):
        require_blocks(model, [turned])


@pytest.mark.parametrize("devices", [[[0], [1], [0], [1]], [[0], [0], [1], [1]], [[0], [1]]])
@pytest.mark.parametrize("groups", [1, 3])
def test_turns_of_devices_are_chunks_and_steps_that_wait_for_each_other(devices: list[list[int]], groups: int) -> None:
    """Each in its device's order, and by what the plan says that it takes: ten steps of every group, none left out."""
    plan = plan_of("gpt2-tiny", [""] * len(devices), devices, batch=3, groups=groups, context=9, chunk_tokens=2)
    chunks = {each.id: each.attributes["stage"] for each in plan.operations if each.kind == PREFILL}
    parts = {id_: (stage, "chunk") for id_, stage in chunks.items()}
    parts |= {f"{stage}F": (stage, "step") for stage in chunks.values()}
    takes = {
        (*parts[each.target], turn): (*parts[each.source], turn - each.later)
        for each in plan.dependencies
        for turn in range(each.later, 10 * groups)
    }
    orders = [
        [(stage, part, turn) for stage, turn, part in itertools.islice(Turns.of(plan, device), 300)]
        for device in range(2)
    ]
    done = set[tuple[int, str, int]]()
    places = [0, 0]
    moved = True
    while moved:
        moved = False
        for device, order in enumerate(orders):
            while places[device] < len(order) and takes.get(order[places[device]]) in {None, *done}:
                done.add(order[places[device]])
                places[device] += 1
                moved = True
    assert done >= {(*part, turn) for part in parts.values() for turn in range(10 * groups)}
    Turns.require_known(plan)


def test_a_groups_prompts_enter_one_after_another_where_a_plan_reads_in_chunks() -> None:
    queue = RequestQueue([[1, 2, 3], [4], [5, 6]], [2], new_words=2, chunk=2, one_by_one=True)
    seen = []
    for turn in range(20):
        if queue.ends_at(turn):
            break
        seen.append([(rows.reads, row.request, row.begin, row.count) for rows in queue.turn(turn) for row in rows.rows])
    read = [each for each in itertools.chain(*seen) if each[0]]
    assert read == [(True, 0, 0, 1), (True, 0, 1, 2), (True, 1, 0, 1), (True, 2, 0, 2)]
    assert all(sum(each[0] for each in turn) <= 1 for turn in seen)
    assert sum(not each[0] for each in itertools.chain(*seen)) == 3  # of each a word comes with its prompt


def test_requests_take_places_that_others_have_left() -> None:
    """Two places and three requests: the third joins when the second, which is told its last word, has left."""
    queue = RequestQueue([[1, 2, 3], [4], [5, 6]], [2], new_words=3, chunk=2, stop=(0, 3))
    seen = []
    for turn in range(20):
        if queue.ends_at(turn):
            break
        passes = queue.turn(turn)
        seen.append(
            [(each.width, [(row.slot, row.request, row.begin, row.count) for row in each.rows]) for each in passes]
        )
        for each in passes:
            for row in each.writing:
                queue.tell(row, 0 if (row.request, turn) == (1, 1) else 9)
    assert seen == [
        [(2, [(0, 0, 0, 1), (1, 1, 0, 1)])],
        [(2, [(0, 0, 1, 2)]), (1, [(1, 1, 1, 1)])],
        [(2, [(1, 2, 0, 2)]), (1, [(0, 0, 3, 1)])],
        [(1, [(0, 0, 4, 1), (1, 2, 2, 1)])],
        [(1, [(1, 2, 3, 1)])],
    ]
    assert [queue.written(request) for request in range(3)] == [[9, 9, 9], [9, 0], [9, 9, 9]]


def test_rows_go_the_shortest_way() -> None:
    """Four devices with shares of five requests; of two halves each takes what it has itself from there."""
    have = [BlockLayout(Mesh.parse("samples4")).slots(device, 5) for device in range(4)]
    assert [list(each) for each in have] == [[0], [1], [2], [3, 4]]
    want = [BlockLayout(Mesh.parse("samples2-shards2")).slots(device, 5) for device in range(4)]
    found = routes(have, want, range(4))
    assert Route(1, 1, 1, 2) in found
    assert sorted((each.target, each.begin) for each in found) == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
        (2, 2),
        (2, 3),
        (3, 2),
        (3, 3),
    ]
    assert positions([0, 3, 4], range(2, 4)) == range(1, 2)


def test_words_are_drawn_by_their_probabilities() -> None:
    logits = torch.tensor([0.0, math.log(3), -torch.inf, math.log(4)])
    choice = WordChoice(1.0, seed=3)
    counts = Counter(choice.of(logits, request, 7) for request in range(4000))
    assert {word: round(count / 4000, 1) for word, count in counts.items()} == {0: 0.1, 1: 0.4, 3: 0.5}
    assert {WordChoice(1.0, 1, seed=3).of(logits, request, 7) for request in range(20)} == {3}
    assert WordChoice().of(logits, 0, 0) == 3


def test_prompts_are_lines(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("[1, 2]\n\n[3]\n")
    assert read_prompts(str(path), None) == ([[1, 2], [3]], ())
    assert read_prompts([(1, 2), "[3]"], None) == ([[1, 2], [3]], ())
    with pytest.raises(UsageError, match=r"prompt 2: \[1.5\] is no JSON list of token ids"):
        read_prompts([[1], [1.5]], None)  # type: ignore[list-item]
    path.write_text("[1]\nOnce upon a time\n")
    with pytest.raises(UsageError, match=r"line 2: 'Once upon a time' is no JSON list of token ids .* --tokenizer DIR"):
        read_prompts(str(path), None)
    with pytest.raises(FileError, match="cannot be read"):
        read_prompts(str(tmp_path / "none.txt"), None)
    with pytest.raises(UsageError, match="there is no such folder"):
        read_prompts(str(path), str(tmp_path / "none"))


@pytest.mark.slow
def test_prompts_of_text_have_a_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<end>": 2, "?": 3}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", unk_token="?").save_pretrained(tmp_path / "of")
    path = tmp_path / "prompts.txt"
    path.write_text("a b\u2028c\n" + json.dumps([1, 1]) + "\r\n", encoding="utf-8")
    assert read_prompts(str(path), str(tmp_path / "of")) == ([[0, 1, 3], [1, 1]], (2,))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prompts": []}, "has no prompts"),
        ({"prompts": [[1], []]}, "prompt 2 is empty"),
        ({"prompts": [[1]], "top": 3}, "without --temperature nothing is sampled"),
        ({"prompts": [[1]], "device": "cuda"}, "on CPUs only"),
        ({"prompts": [[1]], "trace": True}, "no --trace"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        DecodeOptions(model="gpt2-tiny", **options).require_consistent()  # type: ignore[arg-type]


def test_an_outcome_is_of_texts_and_tokens() -> None:
    plan = plan_of("gpt2-tiny", [""], [[0]], batch=1, groups=1, context=9)
    text = WrittenText((1, 2, 3), (10_000, 20_000, 40_000))
    outcome = DecodeOutcome(plan, DecodeOptions(model="gpt2-tiny"), RunResult((), (0,), requests=(text, text)))
    assert re.fullmatch(r"<DecodeOutcome '.*': 2 texts, token 20us, predicted \d.*s>", repr(outcome))
