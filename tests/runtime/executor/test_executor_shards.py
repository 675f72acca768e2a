"""Blocks split over devices train as an unsplit run, on real processes: the papers' shapes and tensor parallelism."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from pipeplan.checker import check
from pipeplan.costs.blocks import NEVER_AGAIN
from pipeplan.costs.clusters import named_cluster
from pipeplan.costs.devices import device_preset
from pipeplan.errors import UsageError
from pipeplan.files import PlacedStage
from pipeplan.planning.sharding_frontier import plan_of_strategy
from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.profiling.build_profile import splits_of
from pipeplan.runtime.profiling.estimate import estimate_model
from pipeplan.runtime.training.compatibility import require_splittable
from pipeplan.sharding.cost_model import CostOptions, cost_model
from pipeplan.sharding.tracking import track
from pipeplan.workload.mesh import Mesh
from runtime_support import models as runtime_models
from runtime_support.plans import (
    TRAINING,
    Case,
    Reports,
    assert_as_unsplit,
    model_plan,
    placed_plan,
    reports_of,
    split_stage,
)
from runtime_support.threads import ThreadGroup, run_in_threads
from support.marks import always, asked_for, slow_but

WORDED, TRANSLATING, PAIRING, FOUR_HEADS, TWO_SEQUENCES = (
    f"runtime_support.models:{name}" for name in ("worded", "translating", "pairing", "four_heads", "two_sequences")
)
ALL = (0, 1, 2, 3)

Group = tuple[str, tuple[int, ...], int]
"""Blocks of a stage, its devices, and how many of them split each block."""

SHAPES: dict[str, tuple[str, list[Group]]] = {
    "M": (
        WORDED,
        [("words", ALL, 4), ("shift b0", (0,), 1), ("b1", (1,), 1), ("b2", (2,), 1), ("b3 head", (3,), 1)],
    ),
    "mllm": (
        WORDED,
        [
            ("shift", (3,), 1),
            ("words", ALL, 4),
            ("b0", (0,), 1),
            ("b1", (1,), 1),
            ("b2", (2,), 1),
            ("b3", (3,), 1),
            ("head", ALL, 4),
        ],
    ),
    "NN": (
        TRANSLATING,
        [
            ("words", ALL, 4),
            ("b0", (0,), 1),
            ("b1", (1,), 1),
            ("others", ALL, 4),
            ("b2", (2,), 1),
            ("b3 head", (3,), 1),
        ],
    ),
    "K": (
        PAIRING,
        [
            ("words left0", (0,), 1),
            ("left1", (1,), 1),
            ("others right0", (2,), 1),
            ("right1", (3,), 1),
            ("join head", ALL, 4),
        ],
    ),
    "two shards, two replicas": (WORDED, [("shift words b0", (0, 1, 2, 3), 2), ("b1 b2 b3 head", (3, 2, 1, 0), 2)]),
    "shards in another order": (
        WORDED,
        [("shift words", (0, 1), 2), ("b0 b1", (2, 3), 2), ("b2 b3", (1, 3, 0, 2), 2), ("head", (1, 0), 2)],
    ),
    "tensor-parallel GPT-2": (
        "gpt2-tiny",
        [
            ("embedding layer0.attention layer0.ffn layer1.attention", ALL, 2),
            ("layer1.ffn layer2.attention", (2, 0), 1),
            ("layer2.ffn layer3.attention layer3.ffn head", (1, 3), 2),
        ],
    ),
    "slices of equal shards": (
        FOUR_HEADS,
        [
            ("embedding layer0.attention", (0, 1), 2),
            ("layer0.ffn layer1.attention layer1.ffn", (2, 3), 2),
            ("layer2.attention layer2.ffn", (0, 1), 2),
            ("layer3.attention", (0, 1), 2),
            ("layer3.ffn head", (3, 2), 2),
        ],
    ),
    "slices of unequal shards": (
        FOUR_HEADS,
        [
            ("embedding layer0.attention", (0, 1), 2),
            ("layer0.ffn layer1.attention layer1.ffn", ALL, 4),
            ("layer2.attention", (0, 2, 1, 3), 2),
            ("layer2.ffn", (1,), 1),
            ("layer3.attention layer3.ffn head", (0, 1, 3, 2), 4),
        ],
    ),
    "slices of branches": (
        "mmt-tiny",
        [
            ("branch0.embedding branch0.layer0.attention branch0.layer0.ffn", (0, 1), 2),
            ("branch0.layer1.attention branch0.layer1.ffn", (3,), 1),
            (
                "branch1.embedding branch1.layer0.attention branch1.layer0.ffn branch1.layer1.attention "
                "branch1.layer1.ffn concatenation head",
                (2, 0),
                2,
            ),
        ],
    ),
    "slices of replicas": (
        FOUR_HEADS,
        [
            ("embedding layer0.attention layer0.ffn", ALL, 2),
            ("layer1.attention layer1.ffn layer2.attention", (2, 3), 2),
            ("layer2.ffn layer3.attention", (1, 2, 0, 3), 4),
            ("layer3.ffn head", (2, 3, 1, 0), 2),
        ],
    ),
    "slices of two sequences": (
        TWO_SEQUENCES,
        [
            ("encoder.embedding encoder.layer0.attention encoder.layer0.ffn encoder.layer1.attention", (0, 1), 2),
            ("encoder.layer1.ffn encoder.norm decoder.embedding decoder.layer0.attention", (0, 2, 1, 3), 4),
            ("decoder.layer0.cross-attention decoder.layer0.ffn", (0, 1), 2),
            ("decoder.layer1.attention", ALL, 4),
            ("decoder.layer1.cross-attention", (0, 1, 2, 3), 2),
            ("decoder.layer1.ffn head", (2, 3, 1, 0), 4),
        ],
    ),
    "four, three, two and one": (
        TRANSLATING,
        [("words b0", ALL, 4), ("b1", (3, 1, 0), 3), ("others b2", (2, 3), 2), ("b3", (1,), 1), ("head", ALL, 4)],
    ),
}
CONFIGURATIONS: dict[str, tuple[str, list[tuple[str, tuple[int, ...], int, str]]]] = {
    "words over 4, layers 2 x 2": (
        "gpt2-tiny",
        [
            (
                "embedding layer0.attention layer0.ffn layer1.attention layer1.ffn layer2.attention layer2.ffn "
                "layer3.attention layer3.ffn head",
                (2, 0, 1, 3),
                4,
                "shards4 samples2-shards2 samples4 shards2-samples2 samples2-shards2 copies2-shards2 copies4 "
                "samples2-copies2 shards4 shards4",
            )
        ],
    ),
    "a width cut, in two stages": (
        "gpt2-tiny",
        [
            (
                "embedding layer0.attention layer0.ffn layer1.attention layer1.ffn",
                ALL,
                4,
                "hidden2-shards2 samples2-shards2 shards2-samples2 copies2-shards2 samples4",
            ),
            (
                "layer2.attention layer2.ffn layer3.attention layer3.ffn head",
                ALL,
                2,
                "samples2 shards2 samples2 shards2 samples2",
            ),
        ],
    ),
    "matrix products": (
        "candle-uno-tiny",
        [
            (
                "branch0.layer0 branch0.layer1 branch1.layer0 branch1.layer1 branch2.layer0 branch2.layer1 "
                "concatenation head",
                ALL,
                4,
                "columns4 rows4 rows2-columns2 columns2-rows2 samples2-columns2 rows2-samples2 shards4 samples4",
            )
        ],
    ),
    "one shift for all samples": (
        WORDED,
        [
            (
                "shift words b0 b1 b2 b3 head",
                ALL,
                4,
                "shards4 samples4 samples2-shards2 shards2-samples2 copies2-samples2 samples4 samples2-shards2",
            )
        ],
    ),
}
"""Blocks of a stage, its devices, how many of them split each block, and how they do."""

OPERATORS = {
    "embedding": ["hidden4"],
    "norm": ["samples2-places2", "features4", "features2-copies2"],  # the second one behind a sum by places4
    "product": ["rows2-columns2", "samples4", "columns4", "places2-rows2"],
    "attention-core": ["places2-features2", "features4"],
    "activation": ["features4", "samples2-features2"],
    "add": ["places4", "features2-samples2", "copies4"],
    "loss": ["features2-places2"],
}
"""How blocks of a model by operator are split, in turn, on devices in another order than their numbers."""

FRONTIERS = ("gpt2-tiny-operators", "candle-uno-tiny")
"""Models of whose frontier on four devices the middle strategy is trained with."""

SIZES = {
    "two shards, two replicas": [2, 4],
    "slices of replicas": [2, 4, 1, 4],
    "four, three, two and one": [1, 2, 4, 2, 1],
}


def cases() -> dict[str, Callable[[], Case]]:
    """What makes each plan and its options: shapes with split backward, and every other one full or recomputed, too."""
    found: dict[str, Callable[[], Case]] = {}
    kinds = {"full": (False, False), "split": (True, False), "recomputed": (True, True)}
    for number, name in enumerate(SHAPES):
        for kind in ("split", ("full", "recomputed")[number % 2]):
            found[f"{name} {kind}"] = functools.partial(shape_case, name, *kinds[kind])
    for number, name in enumerate(CONFIGURATIONS):
        kind = ("split", "full")[number % 2]
        found[f"{name} {kind}"] = functools.partial(configured_case, name, kind == "split")
    found["by operator"] = by_operator
    for model in FRONTIERS:
        found[f"frontier of {model}"] = functools.partial(middle_of_frontier, model)
    return found


@functools.cache
def shape_case(name: str, split: bool, recompute: bool) -> Case:
    """Blocks split and copied whole."""
    model, groups = SHAPES[name]
    sizes = SIZES.get(name, [2] * len(groups))
    stages = [split_stage(*group, microbatch_size=size) for group, size in zip(groups, sizes, strict=True)]
    plan = placed_plan(
        load_model(model), stages, num_microbatches=4, microbatch_size=2, split=split, recompute=recompute
    )
    return plan, replace(TRAINING, model=model)


@functools.cache
def configured_case(name: str, split: bool) -> Case:
    """Blocks in configurations of their own; where backward is split they are recomputed, too."""
    model, parts = CONFIGURATIONS[name]
    stages = [split_stage(*group, configurations=tuple(ways.split())) for *group, ways in parts]
    plan = placed_plan(load_model(model), stages, num_microbatches=2, microbatch_size=4, split=split, recompute=split)
    return plan, replace(TRAINING, model=model)


@functools.cache
def by_operator() -> Case:
    """Every operator in its own way; slices of places, samples and features become one another."""
    model, turns = load_model("gpt2-tiny-operators"), {name: itertools.cycle(ways) for name, ways in OPERATORS.items()}
    stage = PlacedStage(
        blocks=tuple(block.id for block in model.blocks),
        devices=(3, 1, 0, 2),
        shards=4,
        configurations=tuple(next(turns[block.operator]) for block in model.blocks),
    )
    plan = placed_plan(model, [stage], num_microbatches=2, microbatch_size=4, split=True)
    return plan, replace(TRAINING, model="gpt2-tiny-operators")


@functools.cache
def middle_of_frontier(name: str) -> Case:
    """The plan of the strategy in the middle of a model's frontier, for two micro-batches in flight."""
    cluster = named_cluster("tensoropt", 4)
    preset = device_preset("v100-16gb")
    model = load_model(name)
    shards = (1,) if model.sharded is None else (1, 2, 4)
    profile = estimate_model(model, (1, 2, 4), device=preset, dtype=torch.float32, shards=shards)
    options = CostOptions(blocks=True, microbatches=2, in_flight=2)
    built = cost_model(profile, cluster, 4, 4, options=options)
    found = track(built.graph)
    strategy = found.strategy(len(found.memory_bytes) // 2)
    return plan_of_strategy(profile, built, strategy, cluster=cluster), replace(TRAINING, model=name)


QUICK = (
    "mllm split",
    "slices of two sequences split",
    "slices of branches split",
    "words over 4, layers 2 x 2 split",
    "by operator",
    "frontier of candle-uno-tiny",
)
"""Each kind of splitting once; the others are long."""


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest) -> Reports:
    """[case][rank] what 4 real processes report, started once for all cases."""
    return reports_of({name: make() for name, make in asked_for(request, cases()).items()})


@slow_but("name", cases(), QUICK.__contains__, always)
def test_equals_an_unsplit_run(name: str, reports: Reports) -> None:
    plan, options = cases()[name]()
    check(plan).require(name)
    assert_as_unsplit(load_model(options.model), options, reports[name])


@slow_but("model", FRONTIERS, lambda model: model == "candle-uno-tiny")
def test_the_middle_of_a_frontier_is_a_mixture(model: str) -> None:
    """Neither one way for all blocks nor whole ones: otherwise the case above would say little."""
    plan, _ = middle_of_frontier(model)
    (stage,) = plan.stages
    axes = {name for text in stage.configurations for name, _ in Mesh.parse(text).axes}
    assert len(set(stage.configurations)) >= 3
    assert len(axes) >= 3


def test_messages_are_slices() -> None:
    """Otherwise the cases of slices would send none: of each dependency between stages, in how many it goes."""
    found = [
        {
            (each.source, each.target): each.slices
            for each in plan.dependencies
            if each.source_stage != each.target_stage
        }
        for plan, _ in (cases()[f"slices of {kind} shards split"]() for kind in ("equal", "unequal"))
    ]
    assert found[0] == {
        **{(f"{stage}F", f"{stage + 1}F"): 2 for stage in range(3)},
        **{(f"{stage + 1}I", f"{stage}I"): 2 for stage in range(3)},
        ("3F", "4F"): 2,
        ("4I", "3I"): 2,
    }
    assert found[1] == {
        ("0F", "1F"): 1, ("1I", "0I"): 1,
        ("1F", "2F"): 2, ("2I", "1I"): 4,
        ("2F", "3F"): 1, ("3I", "2I"): 2,
        ("3F", "4F"): 4, ("4I", "3I"): 1,
    }  # fmt: skip


DECODER = (
    "hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64, "
    "vocab_size=64, max_position_embeddings=16"
)
COUNTED = (
    "gpt2-tiny",
    "gpt2-experts-tiny",
    f"LlamaConfig({DECODER})",
    f"MixtralConfig({DECODER}, num_local_experts=4)",
    "GPT2Config(n_embd=32, n_head=4, n_layer=2, vocab_size=64, n_positions=16)",
    "mmt-tiny",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", ["split", *(pytest.param(how, marks=pytest.mark.long) for how in ("full", "recomputed"))]
)
def test_bytes_that_shards_move_are_the_plans(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of models of the zoo and of Hugging Face, with their tables of words, experts and losses.

    Rows are for float32, and this runs in float64, but for which experts are chosen: long integers in both. So what
    several products take is gathered once in F, and once for all their weights' gradients. Of a block that is
    recomputed plans have all of its forward again; torch ends that where backward has all it needs, before the block's
    last scatter, or patches' all-to-all.
    """
    moved = Counter[tuple[str, int]]()
    gather = ThreadGroup.gather

    def note(operation: str, rank: int, tensor: torch.Tensor) -> None:
        moved[operation, rank] += tensor.nbytes // (2 if tensor.is_floating_point() else 1)

    def gathered(self: ThreadGroup, tensor: torch.Tensor) -> list[torch.Tensor]:
        found = gather(self, tensor)
        note("all_gather", self._name[self._index], torch.cat(found))
        return found

    def scattered(self: ThreadGroup, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        together = torch.stack(list(pieces))
        note("reduce_scatter", self._name[self._index], together)
        return torch.stack([found[self._index] for found in gather(self, together)]).sum(0)

    def summed(self: ThreadGroup, tensor: torch.Tensor) -> torch.Tensor:
        note("all_reduce", self._name[self._index], tensor)
        return torch.stack(gather(self, tensor)).sum(0)

    def exchanged(self: ThreadGroup, pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        together = torch.stack(list(pieces))
        note("all_to_all", self._name[self._index], together)
        return [found[self._index] for found in gather(self, together)]

    monkeypatch.setattr(ThreadGroup, "gather", gathered)
    monkeypatch.setattr(ThreadGroup, "exchange", exchanged)
    monkeypatch.setattr(ThreadGroup, "scatter", scattered)
    monkeypatch.setattr(ThreadGroup, "sum", summed)

    def counted(name: str) -> tuple[Counter[str], Counter[str]]:
        """What ranks move by operation, each as much, and what rows are of, of three micro-batches."""
        moved.clear()
        model, priced = load_model(name, sequence=16), Counter[str]()
        blocks = " ".join(block.id for block in model.blocks)
        recompute = tuple(how == "recomputed" and block.operator not in NEVER_AGAIN for block in model.blocks)
        stage = split_stage(blocks, (2, 0, 1, 3), 2).model_copy(update={"recompute": recompute})
        plan = placed_plan(model, [stage], num_microbatches=3, split=how == "split")
        run_in_threads(plan, model, 3)
        for block, again in zip(
            splits_of(model, (2,), torch.float32, None)[-1].model.blocks, plan.stages[0].again, strict=True
        ):
            repeated = [each for each in block.collectives if each.phase == "F" and again]
            if repeated:  # a concatenation has none
                repeated.remove(next(each for each in repeated if each.operation in ("reduce_scatter", "all_to_all")))
            for each in (*block.collectives, *repeated):
                priced[each.operation] += 3 * each.bytes_per_sample
        kinds = sorted({kind for kind, _ in moved})
        found = [Counter({kind: moved[kind, rank] for kind in kinds}) for rank in range(4)]
        assert found == found[:1] * 4
        return found[0], priced

    for name in COUNTED:
        found, priced = counted(name)
        assert found == priced, name
        assert {"all_gather", "reduce_scatter"} <= set(found)


def test_ranks_have_shares(reports: Reports) -> None:
    """Otherwise nothing above would have split anything; 11 words are shared by 4 as 3, 3, 3 and 2."""
    rows = [reports["mllm split"][rank]["shapes"]["words.table.weight"] for rank in ALL]
    assert rows == [[[3, 8]], [[3, 8]], [[3, 8]], [[2, 8]]]


def test_a_parameter_counts_once_whatever_copies_and_shares_there_are(reports: Reports) -> None:
    """What ranks say is theirs to count adds up to the model."""
    for name, ranks in reports.items():
        model = load_model(cases()[name]()[1].model)
        tied = {holder for _, *others in model.tied for holder in others}
        whole = sum(
            parameter.numel()
            for block in model.blocks
            for parameter_name, parameter in block.build().named_parameters()
            if (block.id, parameter_name) not in tied
        )
        assert sum(report["counted"] for report in ranks.values()) == whole, name


def test_a_block_that_cannot_be_split_is_refused() -> None:
    plan = model_plan(runtime_models.branches(), [0, 1])
    stages = (plan.stages[0], replace(plan.stages[1], devices=(0, 1), shards=2))
    told = r"stages\[1\] splits its blocks over 2 devices, and block '\w+' .*it does not say how.*--shard-shared no"
    with pytest.raises(UsageError, match=told):
        require_splittable(plan.model_copy(update={"stages": stages}), runtime_models.branches())
