"""Devices that share experts train as one device would: GPT-2 with experts, and transformers' mixtures.

Without a capacity all is compared with a run that is not split. With one, words that are too many are left out of each
device's in each micro-batch, so that this is compared with what one process makes of those by themselves.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch

import pipeplan
from pipeplan.checker import check
from pipeplan.costs.communication import places_reached
from pipeplan.errors import UsageError
from pipeplan.files import Cluster, PlacedStage, Plan, Profile
from pipeplan.runtime.executor.rank_program import program_of, programs_of
from pipeplan.runtime.executor.shared_parameters import _families
from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.models.shapes import output_shapes
from pipeplan.runtime.models.spec import Model, placed
from pipeplan.runtime.parallel.context import own_positions
from pipeplan.runtime.parallel.device import Autocast
from pipeplan.runtime.parallel.experts import WordCounts, counting, no_words, routed
from pipeplan.runtime.parallel.grouped_rows import grouped
from pipeplan.runtime.parallel.sharding import Shards
from pipeplan.runtime.parallel.weight_grads import WeightGradQueue
from pipeplan.runtime.training.compatibility import remark_on_experts, require_splittable
from pipeplan.runtime.training.options import TrainOptions
from pipeplan.workload.elements import Stage
from pipeplan.workload.mesh import EXPERTS as EXPERTS_AXIS
from pipeplan.workload.mesh import Mesh
from runtime_support import expert_models
from runtime_support.exchanged_bytes import BETWEEN_STAGES, Given, GivenBytes, hidden_ns, planned_between, planned_of
from runtime_support.expert_models import EACH, EXPERTS, FEW, HIDDEN, SEQUENCE
from runtime_support.hugging_face import SEED, text, training_of
from runtime_support.plans import TRAINING, Case, Reports, assert_as_unsplit, placed_plan, reports_of
from runtime_support.sharded_plans import planned_bytes, sized_profile
from runtime_support.threads import require_equal_to_unsplit, run_in_threads, together
from support.marks import asked_for, one_in, slow_but

ODD = 15
"""Places of a sequence that two devices cannot share evenly: they sum what they have whole."""

ZOO: dict[str, Callable[[], Model]] = {
    "even": expert_models.even,
    "uneven": expert_models.uneven,
    "full": expert_models.full,
    "full_pieces": expert_models.full_pieces,
    "gpt2-tiny": lambda: load_model("gpt2-tiny"),
    "odd": lambda: load_model("gpt2-experts-tiny", sequence=ODD),
    "zoo": lambda: load_model("gpt2-experts-tiny"),
    "zoo with capacity": lambda: load_model("gpt2-experts-capacity-tiny"),
}

MICROBATCH, NUM_MICROBATCHES = 4, 2


@functools.cache
def model_of(name: str) -> Model:
    return ZOO[name]() if name in ZOO else load_model(text(name), sequence=SEQUENCE, seed=SEED)


def one_stage(
    name: str,
    *,
    expert: int,
    shards: int = 1,
    context: int = 1,
    split: bool = False,
    profile: Profile | None = None,
    **more: Any,
) -> Plan:
    """All blocks on four devices, not in the order of their numbers."""
    blocks = tuple(block.id for block in model_of(name).blocks)
    sizes = {"shards": shards, "replicas": 4 // (shards * context), "context": context, "expert": expert}
    stage = PlacedStage(blocks=blocks, devices=(2, 0, 1, 3), microbatch_size=MICROBATCH, **sizes, **more)
    run = {"num_microbatches": NUM_MICROBATCHES, "microbatch_size": MICROBATCH}
    return placed_plan(model_of(name), [stage], **run, split=split, profile=profile)


def two_stages(name: str, **more: Any) -> Plan:
    """A pipeline, each of whose stages has two devices that share experts."""
    ids = [block.id for block in model_of(name).blocks]
    cut = len(ids) // 2
    stages = [
        PlacedStage(blocks=tuple(own), devices=on, replicas=2, expert=2, microbatch_size=MICROBATCH)
        for own, on in ((ids[:cut], (0, 1)), (ids[cut:], (3, 2)))
    ]
    return placed_plan(model_of(name), stages, num_microbatches=3, microbatch_size=MICROBATCH, **more)


TWO, FOUR = ((0, 1), (3, 2)), ((0, 1, 2, 3), (5, 4, 7, 6))
"""The devices of two stages."""


def in_a_pipeline(profile: Profile, pipeline: Sequence[tuple[int, ...]], **how: Any) -> Plan:
    """Two stages on these devices, which share experts, sequences or blocks."""
    ids = [block.id for block in model_of("even").blocks]
    cut = len(ids) // 2
    stages = [
        PlacedStage(blocks=tuple(own), devices=on, microbatch_size=MICROBATCH, **how)
        for own, on in zip((ids[:cut], ids[cut:]), pipeline, strict=True)
    ]
    run = {"num_microbatches": NUM_MICROBATCHES, "microbatch_size": MICROBATCH}
    return placed_plan(model_of("even"), stages, **run, profile=profile)


SPLITS = [
    {"expert": 4},
    {"expert": 2, "split": True},
    {"expert": 4, "shards": 2, "split": True},
    {"expert": 2, "shards": 2, "recompute": True},
    {"expert": 4, "context": 2, "split": True},
    {"expert": 4, "context": 2, "shards": 2},
    {"expert": 4, "expert_shards": 2, "split": True},
    {"expert": 2, "expert_shards": 2},
    {"expert": 1, "shards": 2},
]
"""Over replicas alone, over these and shards, and in groups of shards, over parts of sequences, and shards of these;
backward split or not, and run again. Then two have parts of each expert, of the last that they share; of all in the
last, where shards of their block have."""


@one_in(2, "sizes", SPLITS, first=1, ids=str)
def test_experts_on_several_devices_are_as_on_one(sizes: dict[str, Any]) -> None:
    require_equal_to_unsplit(model_of("uneven"), one_stage("uneven", **sizes))


def block_by_block(name: str, attention: str, experts: str, **more: Any) -> Plan:
    """One stage on four devices whose blocks are split as is said; its ends share samples."""
    blocks = tuple(block.id for block in model_of(name).blocks)
    ends = {blocks[0]: "samples4", blocks[-1]: "samples4"}
    sparse = {block.id for block in model_of(name).blocks if EXPERTS_AXIS in block.splits}
    ways = tuple(ends.get(block) or (experts if block in sparse else attention) for block in blocks)
    stage = PlacedStage(
        blocks=blocks, devices=(2, 0, 1, 3), microbatch_size=MICROBATCH, shards=4, configurations=ways, **more
    )
    return placed_plan(
        model_of(name), [stage], num_microbatches=NUM_MICROBATCHES, microbatch_size=MICROBATCH, split=True
    )


MIXED = [
    ("samples4", "experts4"),
    ("places4", "samples2-experts2"),
    ("samples2-places2", "experts2-samples2"),
    ("places2-shards2", "experts2-copies2"),
    ("shards2-places2", "places2-experts2"),
    ("copies2-places2", "copies4"),
]
"""How attention is split, and how experts: devices share each of both alone, or beside samples, shards and copies."""


@one_in(2, "attention, experts", MIXED, first=1)
def test_blocks_share_sequences_or_experts_by_themselves(attention: str, experts: str) -> None:
    plan = block_by_block("uneven", attention, experts)
    check(plan).require("plan")
    require_splittable(plan, model_of("uneven"))
    require_equal_to_unsplit(model_of("uneven"), plan)


def test_places_of_blocks_send_keys_and_values_around_a_ring() -> None:
    plan = block_by_block("uneven", "places4", "experts4", context_exchange="ring")
    require_equal_to_unsplit(model_of("uneven"), plan)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "attention", "experts"),
    [("llama", "places4", ""), ("llama", "places2-samples2", ""), ("mixtral", "places4", "experts2-samples2")],
)
def test_blocks_of_configurations_share_places_and_experts(name: str, attention: str, experts: str) -> None:
    """Checked as a run checks them first, of which a model in that context has not been made yet."""
    plan = block_by_block(name, attention, experts)
    check(plan).require("plan")
    require_splittable(plan, model_of(name))
    require_equal_to_unsplit(model_of(name), plan)


@pytest.mark.parametrize(
    ("block", "way", "problem"),
    [
        ("layer0.experts", "experts3", "there are 8, which is no multiple of 3"),
        ("layer0.experts", "experts2-shards2", "devices that share its experts split nothing else of it"),
        ("layer0.attention", "experts2", "it has no experts that devices could share"),
        ("layer0.attention", "places3", "has sequences of 16, of which 3 devices cannot have"),
    ],
)
def test_blocks_that_cannot_be_shared_so_are_refused(block: str, way: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        model_of("uneven").require_splittable(block, Mesh.parse(way))


def test_experts_and_samples_lie_side_by_side() -> None:
    with pytest.raises(ValueError, match="has samples and experts apart"):
        Mesh.parse("samples2-copies2-experts2")


FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "phimoe", "llama4_text")
IN_FLOAT32 = ("deepseek_v2", "deepseek_v3", "llama4_text")
"""Whose rotations transformers computes in float32 whatever the format, as of sums of parts."""


@slow_but("name", FAMILIES, lambda _: False, lambda name: name not in ("mixtral", "deepseek_v3"))
def test_transformers_mixtures_share_experts(name: str) -> None:
    """Over replicas, and over replicas and shards, between which all else is split."""
    tolerance = 1e-7 if name in IN_FLOAT32 else 1e-10
    require_equal_to_unsplit(model_of(name), one_stage(name, expert=4, shards=2), tolerance)
    if name != "mixtral":  # which processes run so
        require_equal_to_unsplit(model_of(name), one_stage(name, expert=4, split=True), tolerance)


@pytest.mark.parametrize(
    ("sizes", "own"),
    [
        ({}, {}),
        pytest.param({"shards": 2}, {"samples": 2, "parts": 2}, marks=pytest.mark.slow),
        pytest.param({"context": 2}, {"samples": 2, "parts": 2, "pieces": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_words_beyond_a_capacity_are_left_out_of_each_devices_own(sizes: dict[str, int], own: dict[str, Any]) -> None:
    """As one process does that leaves them out by hand of each device's samples, and of its parts of them."""
    plan = one_stage("full", expert=4, **sizes)
    require_equal_to_unsplit(expert_models.full(**own), plan)
    if not own:
        losses = [run_in_threads(plan, model_of(name), 3).loss for name in ("full", "uneven")]
        assert abs(losses[0] - losses[1]) > 1e-6, "something is left out"


def test_a_model_of_the_zoo_has_a_capacity() -> None:
    """Of which each device leaves out what is beyond it, as the same model without one does not."""
    losses = [
        run_in_threads(one_stage(name, expert=4), model_of(name), 3).loss for name in ("zoo", "zoo with capacity")
    ]
    assert abs(losses[0] - losses[1]) > 1e-6


@pytest.mark.parametrize(("capacity", "stands_in"), [(None, False), (1, False), (2, False), (None, True)])
def test_rows_go_to_their_experts_and_come_back(capacity: int | None, stands_in: bool) -> None:
    """What each word's experts make, by hand: expert e of one weight multiplies by that; one device has no words, or a
    row that stands in for them, which goes nowhere."""
    count, num_experts = 4, 8
    torch.manual_seed(1)
    weights = torch.randn(num_experts, 3, 3, dtype=torch.float64)
    sizes = [5, 0, 7, 2]
    words = [torch.randn(size, 3, dtype=torch.float64) for size in sizes]
    chosen = [
        torch.stack([torch.randperm(num_experts)[:2] for _ in range(size)]) if size else torch.empty(0, 2).long()
        for size in sizes
    ]
    shares = [torch.rand(size, 2, dtype=torch.float64) for size in sizes]
    counts: list[dict[str, WordCounts]] = [{} for _ in range(count)]

    def one(devices: Shards) -> torch.Tensor:
        at = devices.index
        own = weights[2 * at : 2 * at + 2]
        given = words[at], chosen[at], shares[at]
        none = stands_in and not sizes[at]
        if none:
            given = words[0][:1], chosen[0][:1], shares[0][:1]
        with counting(counts[at], "block"), no_words() if none else nullcontext():
            return routed(
                *given,
                num_experts,
                devices,
                lambda rows, ends: grouped(rows, own, ends),
                capacity=capacity,
            )

    for at, made in enumerate(together(count, one)):
        taken = [0] * num_experts
        expected = torch.zeros_like(words[at] if sizes[at] or not stands_in else words[0][:1])
        for word in range(sizes[at]):
            for expert, share in zip(chosen[at][word].tolist(), shares[at][word], strict=True):
                if capacity is None or taken[expert] < capacity:
                    expected[word] += share * (weights[expert] @ words[at][word])
                taken[expert] += 1
        torch.testing.assert_close(made, expected)
    every = torch.cat(chosen).flatten().bincount(minlength=num_experts)
    found = [each["block"] for each in counts]
    assert sum(each.chosen for each in found).tolist() == every.tolist()
    if capacity is None:
        assert [int(each.own) for each in found] == every.view(count, -1).sum(1).tolist()
        assert {int(each.busiest) for each in found} == {int(every.view(count, -1).sum(1).max())}


def test_each_of_many_experts_has_its_own_words_in_bfloat16() -> None:
    """Beyond 256 that format does not have every whole number."""
    own, kind = 300, torch.bfloat16
    factors = 1.0 + torch.arange(2 * own) % 5
    chosen = torch.tensor([[257], [299], [own + 257], [own + 298]])

    def one(devices: Shards) -> torch.Tensor:
        mine = factors[own * devices.index : own * (devices.index + 1)]

        def experts(rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
            number = torch.searchsorted(ends, torch.arange(len(rows)), right=True)
            return (rows * mine[number][:, None]).to(rows.dtype)

        return routed(torch.ones(4, 2, dtype=kind), chosen, torch.ones(4, 1), 2 * own, devices, experts)

    for made in together(2, one):
        assert made.dtype == kind
        assert made.tolist() == factors[chosen].expand(4, 2).tolist()


@pytest.mark.parametrize("split", [False, True])
def test_products_of_experts_are_in_autocasts_format(split: bool) -> None:
    """As those of linear layers, to a thousandth or so of float32; gradients have the parameters' format."""
    weight = torch.randn(2, 4, 3, requires_grad=True)
    rows, ends = torch.randn(5, 3), torch.tensor([1, 5])
    expected = torch.cat([rows[:1] @ weight[0].t(), rows[1:] @ weight[1].t()])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = grouped(rows, weight, ends)
    assert made.dtype is torch.bfloat16
    torch.testing.assert_close(made.float(), expected, rtol=0.05, atol=0.05)
    (gradient,) = torch.autograd.grad(expected.sum(), weight)
    queue = WeightGradQueue()
    with queue if split else nullcontext():
        made.sum().backward()
    assert (weight.grad is None) == split
    queue.run()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, gradient, rtol=0.05, atol=0.05)


def test_shapes_are_known_under_autocast() -> None:
    """Without computing, as a run finds out what its messages are like."""
    model = load_model("gpt2-experts-tiny")
    expected = output_shapes(model, 2, torch.float32)
    assert output_shapes(model, 2, torch.float32, Autocast("cpu", torch.bfloat16)) == expected


def _training(name: str) -> TrainOptions:
    if name in ZOO:
        path = name if name not in ("even", "uneven", "full_pieces") else f"runtime_support.expert_models:{name}"
        return replace(TRAINING, model=path)
    return replace(training_of(name), sequence=SEQUENCE)


CASES: dict[str, Callable[[], Plan]] = {
    "even four": lambda: one_stage("even", expert=4),
    "uneven two shards": lambda: one_stage("uneven", expert=4, shards=2, split=True),
    "uneven zero 1": lambda: one_stage("uneven", expert=2, zero=1),
    "mixtral zero 2": lambda: one_stage("mixtral", expert=2, zero=2, split=True),
    "uneven parts zero 1": lambda: one_stage("uneven", expert=2, expert_shards=2, zero=1),
    "mixtral parts": lambda: one_stage("mixtral", expert=4, expert_shards=2, shards=2, split=True),
    "mixtral zero 3": lambda: one_stage("mixtral", expert=2, shards=2, zero=3),
    "uneven pipeline recomputed": lambda: two_stages("uneven", recompute=True),
    "mixtral two": lambda: one_stage("mixtral", expert=2, split=True),
    "uneven context": lambda: one_stage("uneven", expert=4, context=2, split=True, context_exchange="ring"),
    "even context two": lambda: one_stage("even", expert=2, context=2, zero=1),
    "full_pieces context": lambda: one_stage("full_pieces", expert=4, context=2, split=True),
    "mixtral context": lambda: one_stage("mixtral", expert=2, context=2, split=True),
    "mixtral two stages": lambda: two_stages("mixtral", split=True),
    "qwen2_moe four shards": lambda: one_stage("qwen2_moe", expert=4, shards=2),
    "uneven blocks": lambda: block_by_block("uneven", "places2-samples2", "experts4"),
    "mixtral blocks": lambda: block_by_block("mixtral", "places4", "experts2-samples2"),
}


@functools.cache
def case_of(name: str) -> Case:
    return CASES[name](), _training(name.partition(" ")[0])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("uneven", None),
        pytest.param("mixtral", r"experts of '.*' and \d other blocks are computed with I", marks=pytest.mark.slow),
    ],
)
def test_a_run_says_whose_weight_gradients_do_not_wait(name: str, said: str | None) -> None:
    model = model_of(name)
    for split in (True, False):
        blocks = [block.id for block in model.blocks]
        part = programs_of(one_stage(name, expert=2, split=split), blocks, model.edges, name)[2].stages[0]
        modules = {
            share: model.build_share(share, 0, placed(share, lambda line: Shards(len(line)))) for share in part.shares
        }
        found = remark_on_experts(model, [part], modules)
        assert (found is None) == (said is None or not split)
        assert found is None or re.search(said or "", found)


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest) -> Reports:
    return reports_of({name: case_of(name) for name in asked_for(request, CASES)})


SHORT = (
    "even four",
    "uneven context",
    "even context two",
    "full_pieces context",
    "mixtral context",
)
"""Cases that run with the slow tests; the others with the long ones."""


@slow_but("name", CASES, lambda _: False, lambda name: name not in SHORT)
def test_four_processes_equal_an_unsplit_run(name: str, reports: Reports) -> None:
    """Losses, norms, gradients and parameters of two clipped steps."""
    plan, options = case_of(name)
    check(plan).require(name)
    assert isinstance(options, TrainOptions)
    assert_as_unsplit(model_of(name.partition(" ")[0]), options, reports[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["even four"])
def test_ranks_move_what_the_plan_says_where_words_choose_evenly(name: str, reports: Reports) -> None:
    """Rows of words, counted as they are handed over, with how they are to be taken; and what comes back."""
    options = case_of(name)[1]
    assert isinstance(options, TrainOptions)
    own = NUM_MICROBATCHES * MICROBATCH // 4 * SEQUENCE  # words of a rank in a mini-batch
    one_way = own * places_reached(4, EACH) * 2  # of two layers
    forwards, backwards = options.num_steps + 1, options.num_steps  # an evaluation runs forward alone
    for report in reports[name].values():
        moved = one_way * (forwards + backwards)
        assert report["routed"] == {str((HIDDEN + 2 * EACH) * 8): moved, str(HIDDEN * 8): moved}


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"expert": 4}, marks=pytest.mark.long),
        pytest.param({"expert": 2, "context": 2, "split": True}, marks=pytest.mark.long),
        pytest.param({"expert": 4, "shards": 2}, marks=pytest.mark.long),
        pytest.param({"expert": 4, "shards": 2, "split": True}, marks=pytest.mark.long),
        pytest.param({"expert": 4, "expert_shards": 2}, marks=pytest.mark.long),
        {"expert": 4, "expert_shards": 2, "shards": 2},
        pytest.param({"expert": 1, "shards": 2}, marks=pytest.mark.long),
        pytest.param({"expert": 1, "shards": 2, "split": True}, marks=pytest.mark.long),
        pytest.param({"expert": 1, "shards": 2, "context": 2}, marks=pytest.mark.long),
        pytest.param({"expert": 4, "shards": 2, "context": 2}, marks=pytest.mark.long),
        {"expert": 1, "shards": 2, "name": "odd"},
        {"pipeline": TWO, "expert": 2, "context": 2, "context_exchange": "ring"},
        pytest.param({"pipeline": TWO, "expert": 1, "shards": 2}, marks=pytest.mark.long),
        {"pipeline": FOUR, "expert": 4, "shards": 2, "replicas": 2},
    ],
    ids=str,
)
def test_bytes_that_each_rank_moves_are_the_plans(sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each block, phase and kind of collective, and of messages between stages where there are two.

    With words goes which experts take them, and before them how many come. The plan is for float32, and runs here in
    float64. Its actions take as much longer over slower links, but for what attention hides of a ring, and products of
    what is gathered again for weight gradients.
    """
    how: dict[str, Any] = {"device": "h100-80gb", "dtype": "float32", "microbatch": (1, 2, 4)}
    how |= {"context": sizes.get("context", 2), "expert": sizes.get("expert", 2)}
    how |= {"shards": (1, sizes.get("shards", 1)), "etp": (1, sizes.get("expert_shards", 1))}
    name = sizes.get("name", "even")
    how |= {"sequence": ODD, "context": (1,)} if name == "odd" else {}
    links = (Cluster.of("links", 4, levels=[("node", 4, 0, rate)]) for rate in (10**6, 10**15))
    profile, other = (pipeplan.estimate("gpt2-experts-tiny", cluster=each, **how) for each in links)  # of equal sizes
    plan, fast = (
        in_a_pipeline(each, **sizes) if "pipeline" in sizes else one_stage(profile=each, **{"name": name} | sizes)
        for each in (profile, other)
    )
    given = GivenBytes(monkeypatch, plan.stages)
    run_in_threads(plan, model_of(name), 3)
    assert given.between == planned_between(plan)
    assert len(given.between) == sum(map(len, sizes.get("pipeline", ())))
    for number, stage in enumerate(plan.stages):
        planned = planned_of(profile, stage)
        pairs = zip(plan.operations, fast.operations, strict=True)
        longer = sum(a.duration_ns - b.duration_ns for a, b in pairs if a.stage == number)
        attention = 3e-4 if stage.context_exchange == "ring" else 0  # beside a ring it takes some microseconds
        expected = 1000 * float(sum(planned.values())) - hidden_ns(profile, stage)  # a byte takes a microsecond
        assert longer == pytest.approx(expected, rel=attention, abs=20)
        own = Counter({each: size * plan.num_microbatches for each, size in planned.items()})
        every = sum((given.of_rank[rank] for rank in stage.devices), Counter[Given]())
        del every[BETWEEN_STAGES]
        assert every == Counter({each: size * len(stage.devices) for each, size in own.items()})
        for rank in stage.devices:
            sent = sum(size for (source, _), size in given.between.items() if source == rank)
            chosen = own if stage.expert == 1 else _as_words_choose(own, stage, rank)
            assert given.of_rank[rank] == chosen + Counter({BETWEEN_STAGES: sent})


def _as_words_choose(planned: Counter[Given], stage: Stage, rank: int) -> Counter[Given]:
    """With as many rows as its words and its experts make this rank give, in place of those of all ranks on average.

    Devices side by side may have parts of the same experts. Rows go to the one at the same place among those, and from
    it to the others. A row to experts says which ones, a row back does not.
    """
    parts, places = stage.expert_shards, range(len(stage.devices))
    each, words = parts * EXPERTS // stage.expert, [_words_of(stage, place) for place in places]

    def rows(source: int, target: int) -> int:
        """From a place to the experts of another, or its own."""
        if source // stage.expert != target // stage.expert or source % parts != target % parts:
            return 0
        own = target % stage.expert // parts
        return sum(own in (one // each, other // each) for one, other in words[source])

    def given(place: int) -> Counter[tuple[str, str]]:
        """Bytes by phase and kind of exchange."""
        forth, back = (4 * (HIDDEN + 2 * EACH), 4 * HIDDEN)
        gone = sum(rows(place, other) for other in places if other != place)
        come = sum(rows(other, place) for other in places if other != place)
        begin = place // parts * parts
        here, *others = (
            sum(rows(other, mate) for other in places) for mate in sorted(range(begin, begin + parts), key=place.__ne__)
        )
        found = Counter[tuple[str, str]]()
        for phase, there, returned in (("F", forth, back), ("I", back, forth)):
            found[phase, "all_to_all"] = gone * there + come * returned
            found[phase, "all_gather"] = (parts - 1) * here * there
            found[phase, "reduce_scatter"] = sum(others) * returned
        return found

    every = [given(place) for place in places]
    found, own = Counter(planned), every[stage.devices.index(rank)]
    for one in planned:
        if one.block.endswith("experts"):
            kind = one.phase, one.how
            found[one] += own[kind] - Fraction(sum(one[kind] for one in every), len(every))
    return found


def _words_of(stage: Stage, place: int) -> list[tuple[int, int]]:
    """The experts of each word that a place has in a mini-batch."""
    piece = own_positions(SEQUENCE // stage.context, Shards(stage.context, place // stage.shards % stage.context))
    samples = NUM_MICROBATCHES * MICROBATCH * stage.shards * stage.context // len(stage.devices)
    return samples * [expert_models.evenly()[word] for word in piece.chunk(stage.shards)[place % stage.shards].tolist()]


@slow_but("name", [each for each in CASES if "blocks" not in each], lambda _: False, lambda name: name not in SHORT)
def test_gradients_and_parameters_that_each_rank_moves_are_the_plans(name: str, reports: Reports) -> None:
    """Those of experts over devices that have the same, all else over all copies; in float64, planned for float32.

    What each shard has whole (norms, routers) is summed over shards, too. Of tables that shards cannot divide evenly
    some move a row more than others, and where copies divide such all send as many rows as the one that has most.
    """
    plan, options = case_of(name)
    profile = sized_profile(model_of(name.partition(" ")[0]))
    planned, twice = planned_bytes(plan, profile), 2 * options.num_steps
    for stage in plan.stages:
        moved = [reports[name][rank]["moved"] for rank in stage.devices]
        total = [sum(each.values()) for each in moved]
        expected = [twice * planned[rank] for rank in stage.devices]
        uneven = 0.003 if stage.zero > 1 else 0
        assert sum(total) == pytest.approx(sum(expected), rel=uneven, abs=4)
        assert total == pytest.approx(expected, rel=uneven, abs=4 if stage.shards == 1 else HIDDEN * 8 * twice)
        if len(stage.devices) > stage.expert * stage.shards:
            sharers = {ranks for each in moved for ranks in each if len(ranks.split()) == 4 // stage.expert}
            assert sharers == {"0 3", "1 2"}, "devices (2, 0, 1, 3), of which neighbours share experts"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["even four", "uneven two shards", "uneven context", "uneven blocks"])
def test_the_load_is_counted(name: str, reports: Reports) -> None:
    """By block: evenly 1; else as the places say of which each word chooses which experts."""
    plan, options = case_of(name)
    found = reports[name][0]["experts"]
    assert found == reports[name][3]["experts"]
    assert len(found) == 2
    pairs = expert_models.evenly() if name.startswith("even") else expert_models.unevenly()
    texts = plan.mini_batch * options.num_steps
    chosen = [texts * sum(expert in pair for pair in pairs) for expert in range(EXPERTS)]
    assert chosen.count(0) == (0 if name.startswith("even") else EXPERTS - FEW)
    on_device = [chosen[2 * device] + chosen[2 * device + 1] for device in range(4)]
    for load in found:
        assert load["tokens_per_expert"] == chosen
        assert load["load_factor"] == pytest.approx(max(on_device) * 4 / sum(on_device))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full_pieces context"])
def test_a_load_with_capacity_is_of_all_that_were_chosen(name: str, reports: Reports) -> None:
    """Each device gives an expert no more than the even share of its words, so that none gets more than even routing
    would bring it: by hand, of two samples and two pieces of a sequence."""
    plan, options = case_of(name)
    pairs, count = expert_models.unevenly(), plan.num_microbatches * options.num_steps
    given = [0] * EXPERTS
    for part in range(2):
        own = own_positions(SEQUENCE // 2, Shards(2, part), torch.device("cpu")).tolist()
        for expert in range(EXPERTS):
            words = 2 * sum(expert in pairs[place] for place in own)
            given[expert] += 2 * count * min(words, 2 * len(own) * EACH // EXPERTS)  # two devices have such a part
    chosen = plan.mini_batch * options.num_steps * SEQUENCE * EACH
    on_device = [given[2 * device] + given[2 * device + 1] for device in range(4)]
    assert len(reports[name][0]["experts"]) == 2
    for load in reports[name][0]["experts"]:
        assert sorted(load["tokens_per_rank"]) == sorted(on_device)
        assert load["dropped"] == chosen - sum(given) > 0
        assert load["load_factor"] == pytest.approx(4 * max(on_device) / chosen)
        assert load["load_factor"] <= 1 < 4 * max(on_device) / sum(given)


@pytest.mark.parametrize(
    "sizes", [{"expert": 4, "shards": 2}, {"expert": 2, "zero": 1}, {"expert": 2, "shards": 4}], ids=str
)
def test_a_rank_alone_knows_who_has_what_it_has(sizes: dict[str, int]) -> None:
    """Of parameters and divided state, what all of a plan's programs know, as far as it is of this rank."""
    model, plan = model_of("even"), one_stage("even", **sizes)
    given = [block.id for block in model.blocks], model.edges, model.name
    for rank, whole in enumerate(programs_of(plan, *given)):
        found = program_of(plan, rank, *given, tied=[["embedding", "head"]])
        assert found.lines == {line for line in whole.lines if rank in line}
        groups = [
            {
                (each.name, number): ranks
                for each in _families(model, one.holders)
                for number, ranks in each.groups.items()
            }
            for one in (found, whole)
        ]
        own, expected = ({key: ranks for key, ranks in each.items() if rank in ranks} for each in groups)
        assert own == expected
        assert {each for each in whole.divisions if rank in each.ranks} <= set(found.divisions) <= set(whole.divisions)


def test_what_cannot_run_is_refused() -> None:
    split = one_stage("even", expert=4)
    with pytest.raises(UsageError, match="no block of model 'gpt2-tiny' there has experts"):
        require_splittable(one_stage("gpt2-tiny", expert=4), load_model("gpt2-tiny"))
    odd = replace(expert_models.SIZE, experts=6).model("odd")
    with pytest.raises(UsageError, match=r"has expert 4, and experts of block 'layer0.experts' of model 'odd'"):
        require_splittable(split, odd)
    odd = replace(expert_models.SIZE, sequence=15).model("odd")
    with pytest.raises(UsageError, match="cannot divide the sequence evenly; give a --sequence"):
        require_splittable(one_stage("even", expert=4, shards=2), odd)
