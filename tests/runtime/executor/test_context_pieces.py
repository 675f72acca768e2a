"""Devices that share sequences train as an unsplit run, in fp64, on real processes."""

from __future__ import annotations

import functools
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import pipeplan
from pipeplan.checker import check
from pipeplan.errors import UsageError
from pipeplan.files import PlacedStage, Plan
from pipeplan.runtime.executor.rank_program import ProgramStep
from pipeplan.runtime.models.huggingface.families import FAMILIES
from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.models.spec import Model
from pipeplan.runtime.parallel import context_attention, partial_attention, ring
from pipeplan.runtime.parallel.attention_cores import RecomputedCores
from pipeplan.runtime.parallel.context import Ring, own_pieces, own_positions
from pipeplan.runtime.parallel.context_attention import causal_attention
from pipeplan.runtime.parallel.partial_attention import PartialAttention, Reach, looked, looked_back
from pipeplan.runtime.parallel.ring import looks
from pipeplan.runtime.parallel.sharding import Shards
from pipeplan.runtime.profiling.build_profile import splits_of
from pipeplan.runtime.profiling.instruments import saved_tensors, storages
from pipeplan.runtime.training.options import TrainOptions
from pipeplan.workload.mesh import Mesh
from runtime_support.hugging_face import IN_FLOAT32, SEED, SEQUENCE, text, training_of
from runtime_support.plans import TRAINING, Case, Reports, assert_as_unsplit, placed_plan, reports_of
from runtime_support.threads import MailChannels, ThreadGroup, require_equal_to_unsplit, run_in_threads, together
from support.marks import asked_for, slow_but


@functools.cache
def model_of(name: str) -> Model:
    return load_model(name) if name == "gpt2-tiny" else load_model(text(name), sequence=SEQUENCE, seed=SEED)


def plan_of(name: str, *groups: tuple[int, ...], split: bool = False, **more: Any) -> Plan:
    """Stages of a model on these devices, with sequences over two of them, or over ``context``."""
    model = model_of(name)
    ids = [block.id for block in model.blocks]
    bounds = [round(number * len(ids) / len(groups)) for number in range(len(groups) + 1)]
    shards, context, profile = more.pop("shards", 1), more.pop("context", 2), more.pop("profile", None)
    stages = [
        PlacedStage(
            blocks=tuple(ids[bounds[number] : bounds[number + 1]]),
            devices=devices,
            shards=shards,
            context=context,
            replicas=len(devices) // (context * shards),
            microbatch_size=2,
            **more,
        )
        for number, devices in enumerate(groups)
    ]
    return placed_plan(model, stages, num_microbatches=3, microbatch_size=2, split=split, profile=profile)


PIPELINE, TENSOR, DATA = ((0, 1), (3, 2)), ((0, 2, 1, 3),), ((2, 0, 1, 3),)
CASES: dict[str, Callable[[], Plan]] = {
    **{
        f"{name} {what} {'split' if split else 'full'}": partial(plan_of, name, *groups, split=split, **more)
        for name in ("gpt2-tiny", "llama", "mixtral", "mistral")
        for split in (False, True)
        for what, groups, more in (
            ("pipeline", PIPELINE, {}),
            ("tensor", TENSOR, {"shards": 2}),
            ("data", DATA, {}),
            ("data zero 1", DATA, {"zero": 1}),
        )
    },
    "gpt2-tiny two stages on one set": partial(plan_of, "gpt2-tiny", (0, 1, 2, 3), (1, 0, 3, 2), split=True),
    "gpt2-tiny recomputed": partial(plan_of, "gpt2-tiny", *PIPELINE, recompute=True),
    "llama zero 3": partial(plan_of, "llama", *DATA, zero=3),
    **{
        f"{name} {what} ring {'split' if split else 'full'}": partial(
            plan_of, name, *groups, split=split, context_exchange="ring", **more
        )
        for name in ("gpt2-tiny", "llama", "mixtral", "mistral")
        for split in (False, True)
        for what, groups, more in (
            ("pipeline", PIPELINE, {}),
            ("tensor", TENSOR, {"shards": 2}),
            ("data zero 1", DATA, {"zero": 1}),
        )
    },
    "gpt2-tiny four ring": partial(plan_of, "gpt2-tiny", (2, 0, 1, 3), context=4, split=True, context_exchange="ring"),
    "gpt2-tiny recomputed ring": partial(plan_of, "gpt2-tiny", *PIPELINE, recompute=True, context_exchange="ring"),
    "llama cores recomputed ring": partial(
        plan_of, "llama", *PIPELINE, recompute="selective", context_exchange="ring", split=True
    ),
    "llama zero 3 ring": partial(plan_of, "llama", *DATA, zero=3, context_exchange="ring"),
}
"""Sequences shared by pairs of devices, which are stages of a pipeline, split each block, or are replicas.

Keys and values are gathered, or go around a ring; of four devices also between devices that are no neighbours.
"""

MAIN = (
    "gpt2-tiny pipeline split",
    "llama tensor ring split",
    "mistral data zero 1 ring full",
)


@functools.cache
def case_of(name: str) -> Case:
    model = name.partition(" ")[0]
    return CASES[name](), replace(TRAINING, model=model) if model == "gpt2-tiny" else training_of(model)


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest) -> Reports:
    return reports_of({name: case_of(name) for name in asked_for(request, CASES)})


@slow_but("name", CASES, lambda _: False, lambda name: name not in MAIN)
def test_equals_an_unsplit_run(name: str, reports: Reports) -> None:
    """Losses, norms, gradients and parameters of two clipped steps on four processes."""
    plan, options = case_of(name)
    check(plan).require(name)
    assert isinstance(options, TrainOptions)
    assert_as_unsplit(model_of(name.partition(" ")[0]), options, reports[name])


WAYS: dict[str, Callable[[Shards], Shards]] = {"gathered": lambda place: place, "ring": Ring.of}
"""How devices that share sequences have keys and values of all."""

SIZES = {
    "all": (2, None, 2, 8),
    "near": (3, 5, 4, 6),
    "pieces": (2, 7, 2, 8),
    "ring of four": (4, None, 1, 8),
    "itself alone": (3, 1, 4, 8),
    "more than a piece": (3, 9, 2, 8),
}
"""How many devices, how far back a place looks, heads of keys and values, and the size of values."""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("count", "window", "heads", "size"), SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("again", [False, True], ids=["kept", "computed again"])
@pytest.mark.parametrize("kernel", [True, False], ids=["by a kernel", "in plain torch"])
def test_attention_of_pieces_is_that_of_whole_sequences(
    count: int, window: int | None, heads: int, size: int, again: bool, way: str, kernel: bool, monkeypatch: Any
) -> None:
    """Outputs and gradients, also a few queries at a time."""
    if not kernel:
        monkeypatch.setattr(partial_attention, "_has_cpu_kernel", lambda *_: False)
        monkeypatch.setattr(partial_attention, "_MOST_SCORES", 100)
    torch.manual_seed(0)
    places = 24
    shapes = [(2, 4, places, 8), (2, heads, places, 8), (2, heads, places, size)]
    whole = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    weights = torch.randn(2, 4, places, size, dtype=torch.float64)
    distance = torch.arange(places)[:, None] - torch.arange(places)[None, :]
    mask = (distance >= 0) & (distance < (window or places))
    expected = F.scaled_dot_product_attention(*whole, attn_mask=mask, scale=0.3, enable_gqa=True)
    gradients = torch.autograd.grad((expected * weights).sum(), whole)

    def work(place: Shards) -> list[torch.Tensor]:
        context = WAYS[way](place)
        own = [own_pieces(each.detach(), context, 2).requires_grad_() for each in whole]
        with RecomputedCores() if again else nullcontext() as cores:
            made = causal_attention(*own, context, scale=0.3, window=window)
        assert not again or cores.count == 1
        assert not again or made.grad_fn is not None
        return [made, *torch.autograd.grad((made * own_pieces(weights, context, 2)).sum(), own)]

    for index, found in enumerate(together(count, work)):
        for own, each in zip(found, (expected, *gradients), strict=True):
            torch.testing.assert_close(own, own_pieces(each, Shards(count, index), 2), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_narrower_formats_are_rounded_once(way: str, dtype: torch.dtype) -> None:
    """What four devices merge is as far from float64 as what one finds, also where autocast narrows it."""
    torch.manual_seed(0)
    whole = [torch.randn(1, 2, 64, 8) for _ in range(3)]
    exact = F.scaled_dot_product_attention(*(each.to(dtype).double() for each in whole), is_causal=True)
    alone = F.scaled_dot_product_attention(*(each.to(dtype) for each in whole), is_causal=True)
    narrow = torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16)

    def work(place: Shards) -> torch.Tensor:
        with narrow:
            return causal_attention(*(own_pieces(each, place, 2) for each in whole), WAYS[way](place))

    for index, made in enumerate(together(4, work)):
        assert made.dtype == dtype
        far = (made - own_pieces(exact, Shards(4, index), 2)).abs().max()
        assert far <= 2 * (alone - exact).abs().max()


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_kept_but_what_one_device_keeps_of_as_many_places(way: str) -> None:
    """Queries, keys and values made together: as many bytes as torch's attention keeps, and nothing of a step."""

    def kept(attend: Callable[..., torch.Tensor]) -> int:
        both = torch.randn(2, 8, 3, 4, 16, requires_grad=True)
        with saved_tensors() as saved:
            made = attend(*(both * 1.0).permute(2, 0, 3, 1, 4))
            rows = made.transpose(1, 2).flatten(2) @ torch.ones(64, 1)
        assert rows.grad_fn is not None
        return sum(storages(saved()).values())

    alone = kept(partial(F.scaled_dot_product_attention, is_causal=True))
    assert together(2, lambda place: kept(lambda *own: causal_attention(*own, WAYS[way](place)))) == [alone, alone]


def test_operators_of_gpus_take_what_they_are_given() -> None:
    """By their shapes alone: nothing here runs one."""
    with FakeTensorMode(), torch.no_grad():
        for heads in (8, 2):
            query, made = (torch.empty(2, 8, 16, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            key, value = (torch.empty(2, heads, 16, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            for look in (Reach((0, 16), (0, 16), causal=True), Reach((0, 16), (0, 8))):
                part = looked(query, key, value, look, 0.3)
                assert part.made.shape == query.shape
                assert part.sums.dtype == torch.float32
                found = looked_back(made, query, key, value, PartialAttention(made, part.sums), look, 0.3)
                assert [each.shape for each in found] == [query.shape, *2 * [look.of_keys(key).shape]]


def test_pieces_have_the_same_work() -> None:
    """Every place once, and as many pairs of a query and a key on each device."""
    count, length = 4, 32
    own = [own_positions(length // count, Shards(count, index)) for index in range(count)]
    assert torch.cat(own).sort().values.tolist() == list(range(length))
    assert len({int((each + 1).sum()) for each in own}) == 1
    whole = torch.arange(length)[None]
    assert all(torch.equal(own_pieces(whole, Shards(count, n))[0], each) for n, each in enumerate(own))


@pytest.mark.parametrize("window", [None, 7])
def test_devices_look_at_as_much_and_at_nothing_beside(window: int | None) -> None:
    """Pairs of a query and a key that are computed: on each device as many, in each step of a ring; all that are to be,
    and of windows no more than those between the first and the last that any query of a piece looks at."""
    count, places = 4, 64
    query = torch.empty(1, 1, places // count, 1)

    def pairs(look: Reach) -> int:
        queries, keys = (end - begin for begin, end in (look.queries, look.keys))
        return queries * (queries + 1) // 2 if look.causal else queries * keys

    found = []
    for index in range(count):
        place = Shards(count, index)
        steps = [looks(place, index - step, query, window) for step in range(count)]
        found.append([sum(map(pairs, each)) for each in steps])
    if window is None:
        assert len({tuple(own) for own in found}) == 1
        assert sum(map(sum, found)) == places * (places + 1) // 2
    else:
        assert sum(map(sum, found)) <= places * (places // count // 2 + window)


def test_a_device_computes_with_its_own_pieces_while_those_of_others_are_gathered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Forward and backward: one product with its own, one with those of each that came."""
    events = defaultdict[int, list[str]](list)

    def begun(self: ThreadGroup, tensor: torch.Tensor) -> Callable[[], list[torch.Tensor]]:
        came = begin(self, tensor)
        events[self._index].append("begun")

        def wait() -> list[torch.Tensor]:
            events[self._index].append("waited")
            return came()

        return wait

    def noted(given: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*arguments: Any) -> Any:
            events[here.index].append("computed")
            return given(*arguments)

        return noting

    begin, here = ThreadGroup.begin_gather, threading.local()
    monkeypatch.setattr(ThreadGroup, "begin_gather", begun)
    for name in ("looked", "looked_back"):
        monkeypatch.setattr(context_attention, name, noted(getattr(context_attention, name)))

    def work(place: Shards) -> None:
        here.index = place.index
        own = [torch.ones(1, 1, 4, 2, requires_grad=True) for _ in range(3)]
        causal_attention(*own, place).sum().backward()  # in this thread, on a CPU

    together(3, work)
    for index in range(3):
        assert events[index] == 2 * ["begun", "computed", "waited", "computed", "computed"]


def test_a_ring_computes_while_the_next_piece_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward: exchanges are begun before a step's products, and waited for behind them."""
    events = []

    def begun(self: ThreadGroup, tensors: Sequence[torch.Tensor], by: int) -> Callable[[], list[torch.Tensor]]:
        came = begin(self, tensors, by)
        events.append((self._index, "begun"))

        def wait() -> list[torch.Tensor]:
            events.append((self._index, "waited"))
            return came()

        return wait

    def noted(place: Ring, *rest: Any) -> Iterator[Reach]:
        for look in given(place, *rest):
            events.append((place.index, "computed"))
            yield look

    begin, given = ThreadGroup.begin_passing, ring.looks
    monkeypatch.setattr(ThreadGroup, "begin_passing", begun)
    monkeypatch.setattr(ring, "looks", noted)

    def work(place: Shards) -> None:
        own = [torch.ones(1, 1, 4, 2, requires_grad=True) for _ in range(3)]
        causal_attention(*own, Ring.of(place)).sum().backward()

    together(3, work)
    forth, back = ["begun", "computed", "waited"], ["begun", "begun", "computed", "waited", "waited"]
    last = ["begun", "computed", "waited"]
    for index in range(3):
        assert [what for at, what in events if at == index] == [*2 * forth, "computed", *forth, *back, *last]


def test_models_that_cannot_share_sequences_are_refused_by_name() -> None:
    """Those of which nobody knows how, and sequences without an early and a late piece for each device."""
    with pytest.raises(UsageError, match=r"does not say how 2 devices share its sequences.*--cp 1"):
        load_model("mmt-tiny").shared_by(2)
    with pytest.raises(UsageError, match="sequences of 12, of which 4 devices cannot have an early and a late piece"):
        model_of("llama").shared_by(4)


@pytest.mark.parametrize("way", WAYS)
def test_bytes_that_ranks_move_are_the_plan_s(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages between equal pieces as its hops have it, and keys and values as rows of its profile price them.

    The plan is for float32, and runs here in float64.
    """
    moved, sent = Counter[tuple[str, int]](), Counter[tuple[int, int]]()
    gather, send, begin = ThreadGroup.gather, MailChannels.send, ThreadGroup.begin_passing

    def gathered(self: ThreadGroup, tensor: torch.Tensor) -> list[torch.Tensor]:
        moved["all_gather", self._name[self._index]] += tensor.nbytes * self._members // 2
        return gather(self, tensor)

    def scattered(self: ThreadGroup, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        together = torch.stack(list(pieces))
        moved["reduce_scatter", self._name[self._index]] += together.nbytes // 2
        return torch.stack([found[self._index] for found in gather(self, together)]).sum(0)

    def passed(self: ThreadGroup, tensors: Sequence[torch.Tensor], by: int) -> Callable[[], list[torch.Tensor]]:
        moved["F" if by > 0 else "I", self._name[self._index]] += sum(each.nbytes for each in tensors) // 2
        return begin(self, tensors, by)

    def counted(self: MailChannels, step: ProgramStep, tensors: Sequence[torch.Tensor], made: object) -> None:
        sent[self._program.rank, step.peer] += sum(each.nbytes for each in tensors) // 2
        send(self, step, tensors, made)

    monkeypatch.setattr(ThreadGroup, "gather", gathered)
    monkeypatch.setattr(ThreadGroup, "scatter", scattered)
    monkeypatch.setattr(ThreadGroup, "begin_passing", passed)
    monkeypatch.setattr(MailChannels, "send", counted)
    how = {"device": "h100-80gb", "dtype": "float32", "microbatch": 2}
    profile = pipeplan.estimate("gpt2-tiny", context=2, **how)
    plan = plan_of("gpt2-tiny", *PIPELINE, split=True, profile=profile, context_exchange=way)
    model = model_of("gpt2-tiny")
    run_in_threads(plan, model, 3)
    (_, part) = splits_of(model, (1,), torch.float32, None, (2,), alone=True)
    for rank in range(4):
        stage = next(stage for stage in plan.stages if rank in stage.devices)
        collectives = [each for block in part.model.blocks if block.id in stage.blocks for each in block.collectives]
        priced = Counter[str]()
        for each in collectives:
            # a ring's hops are priced as parts of a gather, which moves all but a device's own piece
            one = each.operation if way == "gathered" else each.phase
            priced[one] += plan.mini_batch * each.bytes_per_sample // (1 if way == "gathered" else 2)
        assert {one: moved[one, rank] for one in priced} == priced
        assert min(priced.values()) > 0
    assert {one for one, _ in moved} == ({"all_gather", "reduce_scatter"} if way == "gathered" else {"F", "I"})
    hops = Counter[tuple[int, int]]()
    for dependency in plan.dependencies:
        for hop in dependency.hops:
            hops[hop.source_device, hop.target_device] += hop.bytes * plan.num_microbatches
    assert sent == hops
    assert set(hops) == {(0, 3), (1, 2), (3, 0), (2, 1)}


DECODERS = [name for name, family in FAMILIES.items() if family.is_decoder and family.divides]

ELSEWHERE = ("gemma2", "falcon")
"""Those whose scores are capped, or whose attention is one of its own."""


@slow_but("name", DECODERS, lambda name: False, lambda name: name not in ELSEWHERE)
def test_every_family_of_decoders_shares_sequences(name: str) -> None:
    """Or says by name that it does not."""
    if name in ELSEWHERE:
        with pytest.raises(UsageError, match=r"capped|does not say how 2 devices share"):
            model_of(name).shared_by(2).require_splittable("layers.0.attention", Mesh((("shards", 1),)), 2)
        return
    tolerance = 1e-7 if name in IN_FLOAT32 else 1e-10
    for way in WAYS:
        plan = plan_of(name, *PIPELINE, split=True, context_exchange=way)
        require_equal_to_unsplit(model_of(name), plan, tolerance)
