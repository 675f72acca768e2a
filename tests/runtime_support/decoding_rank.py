"""Ranks that write texts on by one placement after another, and what one process makes of it without any cache."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from math import isfinite
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pipeplan.costs import StageCost
from pipeplan.costs.decode_loop import chunk_costs
from pipeplan.files import Block, CostRow, Edge, PhaseRow, Placement, Plan, Profile, Recipe, Source
from pipeplan.files.placement import PlacedStage
from pipeplan.files.plan import Decode
from pipeplan.planning.decode_plan import decode_plan
from pipeplan.runtime.decoding.choosing import WordChoice
from pipeplan.runtime.decoding.decode import rank_of
from pipeplan.runtime.decoding.options import DecodeOptions
from pipeplan.runtime.decoding.rank import Entry, Turns
from pipeplan.runtime.decoding.wire import sent_over_tcp
from pipeplan.runtime.executor.process_groups import AllRanks
from pipeplan.runtime.launch.job import RankContext, Report
from pipeplan.runtime.launch.local import watch_local
from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.models.spec import Model
from pipeplan.schedule.cpsat.solver import Budget
from runtime_support.plans import RANK
from runtime_support.warm import warm_ranks

Case = dict[str, Any]
"""As keyword arguments of :func:`case`, which can be JSON."""

Written = dict[int, list[tuple[int, list[float]]]]
"""{request: its new words, each with the logits that it was chosen by}."""


@cache
def model_of(name: str) -> Model:
    """The model, of which passes of a width are made once."""
    model = load_model(name, seed=0)
    assert model.decoder is not None
    return replace(model, decoder=replace(model.decoder, placed=cache(model.decoder.placed)))


def stages_of(model: str, kinds: Sequence[str], devices: Sequence[Sequence[int]]) -> list[PlacedStage]:
    """Stages of equally many blocks, on these devices, each split as one text of a mesh says; empty: whole."""
    blocks = [block.id for block in model_of(model).blocks]
    count = len(kinds)
    parts = [
        tuple(blocks[len(blocks) * number // count : len(blocks) * (number + 1) // count]) for number in range(count)
    ]
    return [
        PlacedStage(
            blocks=part, devices=tuple(own), shards=len(own), configurations=(kind,) * len(part) if kind else ()
        )
        for part, kind, own in zip(parts, kinds, devices, strict=True)
    ]


def case(
    model: str,
    kinds: Sequence[str],
    devices: Sequence[Sequence[int]],
    *,
    sizes: Sequence[int] = (3,),
    prompts: Sequence[Sequence[int]],
    mixed: Sequence[str] = (),
    chunk: int = 0,
    **options: Any,
) -> Case:
    """``mixed``: what the blocks of the first stage are in turn, in place of its kind; ``chunk``: as planned."""
    stages = stages_of(model, kinds, devices)
    if mixed:
        own = [mixed[number % len(mixed)] for number in range(len(stages[0].blocks))]
        stages[0] = stages[0].model_copy(update={"configurations": tuple(own)})
    given = {"prompts": [list(each) for each in prompts], "dtype": "float64", "new_tokens": 4, **options}
    return {
        "model": model,
        "stages": [stage.model_dump(mode="json") for stage in stages],
        "sizes": list(sizes),
        "chunk": chunk,
        "options": given,
    }


@dataclass(frozen=True)
class NotedChoice(WordChoice):
    """Notes what it was asked of."""

    noted: dict[tuple[int, int], tuple[int, list[float]]] = field(default_factory=dict)

    def of(self, logits: Tensor, request: int, place: int) -> int:
        word = WordChoice.of(self, logits, request, place)
        self.noted[request, place] = word, logits.double().tolist()
        return word


def write(job: Report, context: RankContext) -> None:
    """Every case in turn; of each this rank reports what it chose and sent."""
    progress, rank = context.progress, context.rank
    all_ranks = AllRanks(torch.device("cpu"), progress, timedelta(seconds=60))
    torch.set_num_threads(1)
    for number, each in enumerate(job["cases"]):
        placed = [PlacedStage.model_validate_json(_json(stage)) for stage in each["stages"]]
        model = model_of(each["model"])
        options = DecodeOptions(model=each["model"], **each["options"])
        own: list[Entry] = [(stage, 0, "turn") for stage, of in enumerate(placed) if rank in of.devices]
        noted = NotedChoice(options.temperature, options.top, options.seed)
        here, groups = rank_of(placed, Turns(own), each["sizes"], model, options, progress, each["chunk"])
        here.choice = noted
        groups.connect("gloo", timedelta(seconds=60))
        before, handed = sent_over_tcp(), Counter[str]()
        if own:
            with counting(handed):
                here.run()
        wire = (sent_over_tcp() or 0) - before if before is not None else None
        all_ranks.sum(0)
        chosen = [[*key, *found] for key, found in noted.noted.items()]
        sent = next((dict(stage.sent.texts()) for stage in here.stages.values()), {})
        cached = sum(kept.num_bytes for stage in here.stages.values() for kept in stage.caches.values())
        told = {"chosen": chosen, "sent": sent, "cached": cached, "handed": dict(handed), "wire": wire}
        context.report({"event": "case", "case": number, **told})
        groups.close()


def look_over(cases: Sequence[Case]) -> None:
    """Make the passes of all cases, in a process from which ranks are forked; and what one of the ranks has of them."""
    progress: Any = SimpleNamespace(rank=0, board=SimpleNamespace(machines=()))
    for each in cases:
        placed = [PlacedStage.model_validate_json(_json(stage)) for stage in each["stages"]]
        options = DecodeOptions(model=each["model"], **each["options"])
        rank_of(placed, Turns([]), each["sizes"], model_of(each["model"]), options, progress, each["chunk"])


@contextlib.contextmanager
def counting(handed: Counter[str]) -> Iterator[None]:
    """Count what goes to the transport inside, by the tensors that it is given: bytes of those that are summed, and of
    those that go to other ranks."""
    sum_of, trade, send = dist.all_reduce, dist.all_to_all_single, dist.isend

    def summed(tensor: Tensor, *others: Any, **more: Any) -> Any:
        handed["summed"] += tensor.nbytes
        return sum_of(tensor, *others, **more)

    def traded(found: Tensor, given: Tensor, gets: Any = None, gives: Any = None, group: Any = None) -> Any:
        own = dist.get_rank(group)
        mine = given.shape[0] // dist.get_world_size(group) if gives is None else gives[own]
        handed["sent"] += given.nbytes - mine * given[:1].nbytes
        return trade(found, given, gets, gives, group=group)

    def sent(tensor: Tensor, *others: Any, **more: Any) -> Any:
        handed["sent"] += tensor.nbytes
        return send(tensor, *others, **more)

    with pytest.MonkeyPatch.context() as patch:
        for name, instead in (("all_reduce", summed), ("all_to_all_single", traded), ("isend", sent)):
            patch.setattr(dist, name, instead)
        yield


def _json(value: object) -> str:
    import json

    return json.dumps(value)


@dataclass
class Found:
    """What the ranks of a case report."""

    written: dict[int, dict[int, tuple[int, list[float]]]] = field(default_factory=dict)
    sent: dict[int, Mapping[str, int]] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    handed: dict[int, Mapping[str, int]] = field(default_factory=dict)
    wire: dict[int, int | None] = field(default_factory=dict)

    def take(self, rank: int, report: Report) -> None:
        for request, place, word, logits in report["chosen"]:
            known = self.written.setdefault(request, {}).setdefault(place, (word, logits))
            assert known == (word, logits), "devices that do the same find the same"
        self.sent[rank], self.cached[rank] = report["sent"], report["cached"]
        self.handed[rank], self.wire[rank] = report["handed"], report["wire"]

    def texts(self) -> Written:
        return {request: [found for _, found in sorted(by.items())] for request, by in sorted(self.written.items())}


def written_by(cases: Sequence[Case], num_ranks: int) -> list[Found]:
    """What ranks write in all cases, started once."""
    found = [Found() for _ in cases]

    def take(rank: int, report: Report) -> None:
        found[report["case"]].take(rank, report)

    with warm_ranks(look_over, list(cases)):
        programs = [["0F0"]] * num_ranks
        watch_local("runtime_support.decoding_rank:write", programs, {"cases": list(cases)}, 60 * 10**9, take, RANK)
    return found


@cache
def _module(model: str, count: int, dtype: str, seed: int) -> Any:
    of = model_of(model).decoder
    assert of is not None
    made = of.at(count)
    return made, {block.id: made.build(block.id, seed, dtype=getattr(torch, dtype)).eval() for block in made.blocks}


@cache
def logits_of(model: str, text: tuple[int, ...], dtype: str, seed: int = 0) -> Tensor:
    """The logits of the word after a text, by all of it at once."""
    made, modules = _module(model, len(text), dtype, seed)
    values: dict[str, Tensor] = {}
    with torch.inference_mode():
        for block in made.blocks:
            given = [values[source] for source, _ in block.inputs]
            values[block.id] = modules[block.id](*given, *[torch.tensor([list(text)])] * len(block.samples))
    return values[made.blocks[-1].id][0]


def unsplit(case: Case) -> Written:
    """What one process writes of a case, reading the whole text again for every word; a seed is of parameters, too."""
    options = DecodeOptions(model=case["model"], **case["options"])
    choice, found = WordChoice(options.temperature, options.top, options.seed), Written()
    for request, prompt in enumerate(options.prompts):
        text = list(prompt)
        for _ in range(options.new_tokens):
            logits = logits_of(case["model"], tuple(text), options.dtype or "float32", options.seed)
            word = choice.of(logits, request, len(text))
            found.setdefault(request, []).append((word, logits.double().tolist()))
            text.append(word)
            if word in options.stop:
                break
    return found


def distance(found: Written, wanted: Written) -> float:
    """The largest difference of logits; words and their numbers are the same."""
    assert {key: [word for word, _ in of] for key, of in found.items()} == {
        key: [word for word, _ in of] for key, of in wanted.items()
    }
    assert all(map(isfinite, (each for of in found.values() for _, own in of for each in own)))
    return max(
        max(abs(one - two) for one, two in zip(own, other, strict=True))
        for key, of in wanted.items()
        for (_, own), (_, other) in zip(found[key], of, strict=True)
    )


def plan_of(
    model: str,
    kinds: Sequence[str],
    devices: Sequence[Sequence[int]],
    *,
    batch: int,
    groups: int,
    context: int,
    chunk_tokens: int = 0,
) -> Plan:
    """The plan of a loop of such stages, whose times are made up; with a chunk of a prompt beside every step."""
    of = model_of(model)
    rows = tuple(
        PhaseRow(phase="decode", microbatch_size=size, context_tokens=context, forward_ns=1000, activation_bytes=8)
        for size in range(1, batch + 1)
    )
    rows += tuple(
        PhaseRow(phase="prefill", microbatch_size=1, context_tokens=tokens, forward_ns=850, activation_bytes=8)
        for tokens in sorted({chunk_tokens, context})
        if chunk_tokens
    )
    plain = CostRow(microbatch_size=1, forward_ns=1000, activation_bytes=8)
    profile = Profile(
        name=of.name,
        mode="inference",
        source=Source(method="estimated", dtype="float32"),
        tokens_per_sample=context,
        recipe=Recipe(name="custom"),
        blocks=tuple(
            Block(id=each.id, operator=each.operator, costs=(plain,), phases=rows, gradient_bytes=0)
            for each in of.blocks
        ),
        edges=tuple(Edge(source=s, target=t, bytes_per_sample=64, gradient=False) for s, t in of.edges),
    )
    stages = tuple(stages_of(model, kinds, devices))
    count = 1 + max(device for own in devices for device in own)
    placement = Placement(strategy="one-to-one", num_devices=count, stages=stages)
    given = [StageCost(1000 * len(stage.blocks), 0) for stage in stages]
    decode = Decode(batch=batch, groups=groups, context_tokens=context, kv="cp", prefill_tokens=chunk_tokens)
    runs = [[(id_, stage.shards) for id_ in stage.blocks] for stage in stages]
    prefill = chunk_costs(profile, runs, context, chunk_tokens) if chunk_tokens else ()
    return decode_plan(profile, placement, given, [0] * len(stages), decode, budget=Budget(10.0), prefill=prefill).plan
