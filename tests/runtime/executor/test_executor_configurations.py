"""Blocks of a stage that are each split in a way of their own: any such strategy trains as an unsplit run."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pipeplan.checker import check
from pipeplan.costs import build_workload, held_part, stage_costs
from pipeplan.errors import UsageError
from pipeplan.files import PlacedStage, Plan, Profile, Recipe
from pipeplan.runtime.executor.tensors import StageLayouts, TensorLayout
from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.models.sequential import sequential_model
from pipeplan.runtime.models.spec import Model
from pipeplan.runtime.models.zoo import ZOO
from pipeplan.runtime.models.zoo.gpt import GPTSize
from pipeplan.runtime.parallel import Share
from pipeplan.runtime.parallel.sharding import Cut, ParameterPart, Shards, Slice
from pipeplan.runtime.profiling.build_profile import block_graph_of
from pipeplan.runtime.training.compatibility import require_splittable
from pipeplan.sharding.cost_model import CostOptions, cost_model
from pipeplan.sharding.graph import Strategy
from pipeplan.simulator.simulation import simulate
from pipeplan.workload.mesh import COPIES, PLACES, SAMPLES, SHARDS, Mesh, MeshAxis
from runtime_support.models import branches
from runtime_support.plans import TRAINING, Unsplit, placed_plan, profile_of
from runtime_support.threads import require_equal_to_unsplit, together
from support.marks import one_in, some_of

FLOAT32 = Recipe(name="fp32", optimizer="sgd")
SIZE = 4
"""Samples of a micro-batch."""

OPERATORS = "gpt2-tiny-operators"
PAPERS = ("vgg16-tiny-operators", "wide-resnet-tiny-operators", "lstm-tiny-operators")
MODELS = (
    "gpt2-tiny",
    OPERATORS,
    "tessel-mt5-tiny",
    "mmt-tiny",
    "dlrm-tiny",
    "candle-uno-tiny",
    "runtime_support.models:worded",
)


def meshes(names: tuple[str, ...], devices: int) -> list[Mesh]:
    """All meshes whose axes have these names, none twice, of so many devices."""
    found = [Mesh(((name, devices),)) for name in names]
    for size in (size for size in range(2, devices) if devices % size == 0):
        rest = {name: tuple(other for other in names if other != name) for name in names}
        found += [Mesh(((name, size), *other.axes)) for name in names for other in meshes(rest[name], devices // size)]
    return found


@functools.cache
def ways(name: str, block: str, devices: int) -> list[str]:
    """Every mesh on which a block runs."""
    model, found = load_model(name), []
    names = dict.fromkeys((SAMPLES, COPIES, SHARDS, PLACES, *model.block(block).splits))
    for mesh in meshes(tuple(names), devices):
        if SIZE % mesh.of_samples.size == 0:
            try:
                model.require_splittable(block, mesh)
            except UsageError:
                continue
            found.append(str(mesh))
    return found


@st.composite
def strategies(draw: st.DrawFn) -> tuple[Model, Plan]:
    """One stage on four or eight devices, or two on one group of four."""
    name, devices = draw(st.sampled_from(MODELS)), draw(st.sampled_from([4, 4, 8]))
    model = load_model(name)
    ids = [block.id for block in model.blocks]
    cut = draw(st.sampled_from([len(ids), len(ids) // 2]))
    stages = [
        PlacedStage(
            blocks=tuple(blocks),
            devices=tuple(draw(st.permutations(range(devices)))),
            shards=devices // replicas,
            replicas=replicas,
            microbatch_size=SIZE * replicas,
            recompute=draw(st.booleans()),
            configurations=tuple(draw(st.sampled_from(ways(name, each, devices // replicas))) for each in blocks),
        )
        for blocks, replicas in ((ids[:cut], 1), (ids[cut:], draw(st.sampled_from([1, 2]))))
        if blocks
    ]
    plan = placed_plan(model, stages, num_microbatches=4, microbatch_size=SIZE, split=draw(st.booleans()))
    return model, plan


@pytest.mark.slow
@settings(max_examples=some_of(6))
@given(strategies())
def test_any_strategy_gives_the_gradients_of_an_unsplit_run(case: tuple[Model, Plan]) -> None:
    """Also where stages of a pipeline, or replicas, have strategies of their own."""
    model, plan = case
    check(plan).require("plan")
    require_equal_to_unsplit(model, plan)


def splittable(model: Model) -> Profile:
    """With the sizes of blocks, their parameters, and costs for as many shards as all of them can be split over."""
    sized = block_graph_of(model, torch.float32)
    known = {block.spec.id: block.trainable for block in sized.blocks}
    made = profile_of(model)
    blocks = tuple(
        block.model_copy(
            update={
                "dimensions": model.block(block.id).dimensions,
                "parameters": known[block.id],
                "costs": tuple(row for row in block.costs if row.shards <= 2),
            }
        )
        for block in made.blocks
    )
    return made.model_copy(update={"recipe": FLOAT32, "blocks": blocks, "tied": sized.tied})


@one_in(
    3, "name", ["gpt2-tiny", OPERATORS, "tessel-mt5-tiny", "mmt-tiny", "dlrm-tiny", "candle-uno-tiny", *PAPERS], first=2
)
def test_all_that_a_frontier_of_blocks_offers_can_be_run(name: str) -> None:
    """Every configuration of every block of the zoo, and so every point."""
    model = load_model(name)
    built = cost_model(splittable(model), None, 4, SIZE, device="v100-16gb", options=CostOptions(blocks=True))
    offered = {(node.block, each.name) for node in built.operators.nodes for each in built.configurations[node.name]}
    assert len(offered) > len(model.blocks)
    for block, text in offered:
        model.require_splittable(block, Mesh.parse(text))


@pytest.mark.parametrize("name", ["gpt2-tiny", OPERATORS])
def test_ranks_hold_what_is_tied_as_often_as_a_frontier_says(name: str) -> None:
    """In every configuration of embedding and head: once where both have the same part on each rank, else twice."""
    model = load_model(name)
    built = cost_model(splittable(model), None, 4, SIZE, device="v100-16gb", options=CostOptions(blocks=True))
    (tie,), (holders,) = built.ties, model.tied
    sizes = {block.id: block for block in splittable(model).blocks}
    whole = torch.empty(model.parameter_shapes()[holders[0]], device="meta")

    @functools.cache
    def parts(block: str, parameter: str, text: str) -> list[ParameterPart]:
        """Of every rank."""
        found = []
        for rank in range(4):
            inner, same = Mesh.parse(text).plane_without((SAMPLES, PLACES), rank)
            share = Share(block, same.index(rank), same, inner.axes) if inner.size > 1 else Share(block)
            found.append(model.part_of(share, parameter))
        return found

    found = set()
    for chosen in product(*(range(len(user.ways)) for user in tie.users)):
        own = dict(zip((block for block, _ in holders), chosen, strict=True))
        texts = [built.configurations[block][k].name for block, k in own.items()]
        both = list(zip(*(parts(*holder, text) for holder, text in zip(holders, texts, strict=True)), strict=True))
        held = [[sum(part.within(whole).nbytes for part in each) for each in (those, set(those))] for those in both]
        twice, once = map(max, zip(*held, strict=True))
        choice = Strategy(0, 0, dict.fromkeys(built.configurations, 0) | own, {}, ())
        assert twice - once == built.spared(choice).parameter_bytes, texts
        known = [Mesh.parse(text) for text in texts]
        said = [[held_part(sizes[id_], mesh, rank) for id_, mesh in zip(own, known, strict=True)] for rank in range(4)]
        kinds = [len({part.kind for those in each for part in those}) for each in (said, both)]
        assert kinds[0] == kinds[1], texts
        assert [len(set(those)) for those in said] == [len(set(those)) for those in both], texts
        found.add(twice > once)
    assert found == {True, False}


def test_the_norm_between_encoder_and_decoder_is_an_operator() -> None:
    """The one block of another kind in that model: its ways are those of any norm."""
    model = load_model("tessel-mt5-tiny")
    blocks = tuple(block.id for block in model.blocks)
    for way in ("samples2-places2", "features2-copies2"):
        ways = tuple(way if block == "encoder.norm" else "shards4" for block in blocks)
        stage = PlacedStage(blocks=blocks, devices=(0, 1, 2, 3), shards=4, configurations=ways)
        require_equal_to_unsplit(model, placed_plan(model, [stage], num_microbatches=2, microbatch_size=4))


def test_a_strategy_that_cannot_be_run_says_what_would_do() -> None:
    model = load_model("tessel-mt5-tiny")
    blocks = tuple(block.id for block in model.blocks)
    stage = PlacedStage(blocks=blocks, devices=(0, 1), shards=2, configurations=("places2",) * len(blocks))
    with pytest.raises(UsageError, match=r"by places; write another point of the frontier"):
        require_splittable(placed_plan(model, [stage]), model)


def test_matrix_products_can_be_split_in_every_way() -> None:
    """What the executor runs of the papers' configurations."""
    assert {"rows4", "columns4", "rows2-columns2", "samples2-rows2", "samples4", "copies4", "shards4"} <= set(
        ways("candle-uno-tiny", "branch0.layer1", 4)
    )
    assert "samples2-shards2" in ways("gpt2-tiny", "layer0.attention", 4), "heads and samples"
    assert {"shards4", "hidden4", "shards2-hidden2"} <= set(ways("gpt2-tiny", "embedding", 4)), "words and width"
    assert {"shards4", "samples4"} <= set(ways("gpt2-tiny", "head", 4)), "loss by words, or by samples"
    core = {"places4", "features2-places2", "samples2-places2", "places2-copies2"}
    assert core <= set(ways(OPERATORS, "layer0.attention.core", 4)), "attention by heads and places"
    assert {"features4", "places4"} <= set(ways(OPERATORS, "head.loss", 4))


@given(st.sampled_from([1, 2, 4, 8]), st.data())
@settings(max_examples=some_of(20))
def test_tensors_become_what_the_next_block_takes(devices: int, data: st.DataObject) -> None:
    """From any layout to any other every device gets its part of the same tensor, and its gradient comes back."""
    axes = [MeshAxis(size, stride) for size in (2, 4, 8) for stride in (1, 2, 4) if size * stride <= devices]
    fitting = [
        each
        for each in product([MeshAxis(1, 1), *axes], repeat=4)
        if all(apart(a, b) for a, b in combinations(each, 2))
    ]
    source, target = (TensorLayout(*data.draw(st.sampled_from(fitting))) for _ in range(2))
    whole = torch.arange(1024.0).reshape(8, 16, 8)

    def part(layout: TensorLayout, tensor: torch.Tensor, device: int) -> torch.Tensor:
        for name, axis in layout.axes:
            place = axis.place(device)
            if name == "pieces":
                pieces = tensor.chunk(2 * axis.size, 1)
                tensor = torch.cat((pieces[place], pieces[-1 - place]), 1)
            else:
                tensor = tensor.chunk(axis.size, {"samples": 0, "places": 1, "features": -1}[name])[place]
        return tensor

    def one(shards: Shards) -> tuple[torch.Tensor, torch.Tensor]:
        collectives = shards.collectives
        assert collectives is not None

        class Line:
            """The collectives of some of the devices, by those of all, so that all of them have to meet."""

            def __init__(self, members: tuple[int, ...]) -> None:
                self.members = members

            def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
                found = collectives.gather(tensor)
                return [found[member] for member in self.members]

            def begin_gather(self, tensor: torch.Tensor) -> Callable[[], list[torch.Tensor]]:
                return functools.partial(self.gather, tensor)

            def sum(self, tensor: torch.Tensor) -> torch.Tensor:
                return torch.stack(self.gather(tensor)).sum(0)

            def scatter(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
                return torch.stack(self.exchange(pieces)).sum(0)

            def exchange(self, pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
                place = self.members.index(shards.index)
                return [found[place] for found in self.gather(torch.stack(list(pieces)))]

        def place(axis: MeshAxis) -> Shards:
            return Shards(axis.size, axis.place(shards.index), Line(axis.of(shards.index)))

        own = part(source, whole, shards.index).clone().requires_grad_()
        made = StageLayouts(place=place).converted("a", own * 1, source, target, len(whole))
        made.backward(part(target, torch.cos(whole), shards.index))
        assert own.grad is not None
        return made.detach(), own.grad

    for device, (made, gradient) in enumerate(together(devices, one)):
        assert torch.equal(made, part(target, whole, device))
        assert torch.equal(gradient, part(source, torch.cos(whole), device))


def apart(a: MeshAxis, b: MeshAxis) -> bool:
    """Whether two axes can be of one mesh."""
    if 1 in (a.size, b.size):
        return True
    low, high = sorted((a, b), key=lambda axis: axis.stride)
    return low.size * low.stride <= high.stride


def test_a_block_for_each_operator_computes_as_halves_of_layers() -> None:
    """The same loss and gradients with the same parameters; queries, keys and values lie head by head."""
    size = ZOO[OPERATORS]
    assert isinstance(size, GPTSize)
    names = {"norm": "norm", "qkv": "made", "project": "projection", "expand": "expand"}
    pair = load_model(OPERATORS), replace(size, by_operator=False).model("halves")
    ours, halves = (Unsplit(model, replace(TRAINING, clip_norm=math.inf)) for model in pair)
    own, matched = ours.parameters(), {}
    for name in halves.parameters():
        block, part, leaf = name.rsplit(".", 2)
        whole = name if block == "embedding" else f"{block}.{names.get(part, part)}.{leaf}"
        matched[name] = own[whole]
    with torch.no_grad():
        for name, parameter in halves.parameters().items():
            parameter.copy_(apart_by_heads(matched[name], size.heads) if ".qkv." in name else matched[name])
    assert ours.step(0, 4) == pytest.approx(halves.step(0, 4), abs=1e-12)
    for name, parameter in halves.parameters().items():
        gradient = matched[name].grad
        assert gradient is not None
        assert parameter.grad is not None
        expected = apart_by_heads(gradient, size.heads) if ".qkv." in name else gradient
        torch.testing.assert_close(parameter.grad, expected, atol=1e-12, rtol=0)


def apart_by_heads(together_: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of query, key and value of each head, to all queries', all keys' and all values'."""
    return together_.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)


def test_a_mesh_is_its_text() -> None:
    mesh = Mesh.parse("samples2-shards3-copies2")
    assert (str(mesh), mesh.size) == ("samples2-shards3-copies2", 12)
    assert (mesh.axis("samples"), mesh.axis("shards"), mesh.axis("rows")) == (
        MeshAxis(2, 6),
        MeshAxis(3, 2),
        MeshAxis(1, 1),
    )
    assert mesh.axis("shards").of(9) == (7, 9, 11)
    assert mesh.plane_without(("samples",), 8) == (Mesh.parse("shards3-copies2"), (6, 7, 8, 9, 10, 11))
    for text in ("samples", "samples2-samples2", "2", "samples0", "samples2--shards2", "Samples2", ""):
        with pytest.raises(ValueError, match="is not a mesh"):
            Mesh.parse(text)


def test_parts_of_tiles_make_up_the_whole() -> None:
    """Of a parameter that is cut along two axes, and along a third not."""
    whole, added, seen = torch.arange(48.0).reshape(6, 8), torch.zeros(6, 8), torch.zeros(6, 8)
    for row in range(2):
        for column in range(3):
            for copy in range(2):
                part = ParameterPart((Slice(Cut(1), 2, row), Slice(Cut(0), 3, column)), 2, copy)
                assert part.adds == (copy == 0)
                if part.adds:
                    part.spread(part.within(whole), added)
                ((begin, piece),) = part.places(part.within(whole), whole.shape)
                seen[begin[0] : begin[0] + piece.shape[0], begin[1] : begin[1] + piece.shape[1]] += piece
    assert torch.equal(added, whole)
    assert torch.equal(seen, 2 * whole)


@pytest.mark.parametrize(
    ("texts", "told"),
    [
        (("samples2-shards2", "shards4"), r"are 2 for 10 blocks"),
        (("samples2",) * 10, r"has 'samples2' for 2 devices, and 4 devices split each block"),
        (("samples",) * 10, r"'samples' is not a mesh"),
        (("shards4",) * 9 + ("samples4",), r"has 'samples4', and 2 samples cannot be shared evenly over 4 devices"),
    ],
)
def test_configurations_that_make_no_sense_are_refused(texts: tuple[str, ...], told: str) -> None:
    """By the placement, and by check, which trusts no file."""
    model = load_model("gpt2-tiny")
    blocks, devices = tuple(block.id for block in model.blocks), (0, 1, 2, 3)
    with pytest.raises(ValueError, match=told):
        PlacedStage(blocks=blocks, devices=devices, shards=4, microbatch_size=2, configurations=texts)
    plan = placed_plan(model, [PlacedStage(blocks=blocks, devices=devices, shards=4)], microbatch_size=2)
    stages = (replace(plan.stages[0], configurations=texts),)
    with pytest.raises(Exception, match=told):
        check(plan.model_copy(update={"stages": stages})).require("plan")


@pytest.mark.parametrize(
    ("model", "block", "text", "told"),
    [
        ("gpt2-tiny", "layer0.ffn", "rows4", "as rows4: it can be split by shards, and not by rows"),
        ("gpt2-tiny", "layer0.attention", "samples2-shards4", "has 2 heads, which 4 devices cannot share evenly"),
        (OPERATORS, "layer0.attention.core", "features8", "has 4 heads, which 8 devices cannot share evenly"),
        ("tessel-mt5-tiny", "encoder.embedding", "places2", "it does not say that it can be split by places"),
        ("candle-uno-tiny", "branch0.layer0", "rows2-shards2", "it cannot be split by rows and shards at once"),
        ("candle-uno-tiny", "branch0.layer0", "columns3", "3 devices cannot share evenly"),
        ("runtime_support.models:worded", "shift", "samples2", "it takes no samples that they could share"),
        ("runtime_support.models:branches", "a", "samples2-shards2", "it does not say how"),
    ],
)
def test_what_a_block_cannot_do_is_refused(model: str, block: str, text: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        load_model(model).require_splittable(block, Mesh.parse(text))


def test_any_block_shares_samples() -> None:
    """Without saying how it is split."""
    model = branches()
    stage = PlacedStage(
        blocks=tuple(block.id for block in model.blocks),
        devices=(0, 1, 2, 3),
        shards=4,
        configurations=(
            "samples4",
            "samples2-copies2",
            "copies4",
            "samples4",
            "copies2-samples2",
            "samples4",
            "copies4",
        ),
    )
    plan = placed_plan(model, [stage], num_microbatches=2, microbatch_size=4, split=True)
    require_splittable(plan, model)
    require_equal_to_unsplit(model, plan)


def test_linear_layers_of_a_plain_sequential_are_tiles() -> None:
    """Where nothing but functions of single numbers follows them; an embedding is split by words or by width."""
    children = nn.Sequential(
        nn.Embedding(11, 8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8, bias=False), nn.Tanh(), nn.LayerNorm(8)
    )
    words = torch.arange(12).reshape(4, 3) % 11
    model = sequential_model("plain", children, words, words % 8)
    assert [sorted(block.splits) for block in model.blocks] == [
        ["hidden"],
        ["columns", "rows"],
        ["columns", "rows"],
        [],
        [],
    ]
    blocks = tuple(block.id for block in model.blocks)
    for ways in (
        "hidden4 rows2-columns2 columns2-rows2 copies4 samples4",
        "shards4 columns4 rows4 samples4 samples2-copies2",
    ):
        stage = PlacedStage(blocks=blocks, devices=(0, 1, 2, 3), shards=4, configurations=tuple(ways.split()))
        require_equal_to_unsplit(model, placed_plan(model, [stage], num_microbatches=2, microbatch_size=4, split=True))


def test_what_a_profile_does_not_say_is_not_made_up() -> None:
    """Costs of such a stage are those of the strategy that it is from."""
    model = load_model("candle-uno-tiny")
    blocks = tuple(block.id for block in model.blocks)
    ways = ("samples2-columns2",) * 6 + ("samples4",) * 2
    stage = PlacedStage(blocks=blocks, devices=(0, 1, 2, 3), shards=4, configurations=ways)
    plan = placed_plan(model, [stage], num_microbatches=2, microbatch_size=4)
    assert plan.placed.stages == (stage.model_copy(update={"microbatch_size": 4, "recompute": False}),)
    profile = profile_of(model)
    with pytest.raises(UsageError, match=r"stages\[0\] of the placement splits each block in its own way .*frontier"):
        build_workload(profile, plan.placed, num_microbatches=2, microbatch_size=4)
    given = {0: stage_costs(profile, blocks, 4)}
    parted = stage.model_copy(update={"num_parted": 1})
    placement = plan.placed.model_copy(update={"stages": (parted,)})
    with pytest.raises(UsageError, match="cannot run forwards in two parts"):
        build_workload(profile, placement, num_microbatches=2, microbatch_size=4, given=given)
    check(plan, profile).require("plan")
    with pytest.raises(UsageError, match="are simulated with their own costs: leave out --profile"):
        simulate(plan, profile=profile)
