"""Decode rows of devices that share caches or split blocks, measured by as many processes in step with each other.

Each process is one device of a stage, and exchanges what a run exchanges. So a block's time has in it what a device
waits for the others, and the threads that must be woken. The stage has all blocks of a small model, and of another one
of each kind, in the model's order, and takes step after step; what its blocks take together is what its steps take.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from pipeplan.costs.decode_splits import DecodeAt, StageLinks, StepWay, step_cost
from pipeplan.files import Block, Cluster, PhaseRow, PlacedStage, Profile
from pipeplan.runtime.decoding.exchanges import SentBytes
from pipeplan.runtime.decoding.requests import Pass, Row
from pipeplan.runtime.decoding.stage import DecodingStage, WrittenModel, lines_of
from pipeplan.runtime.executor.process_groups import ProcessGroups
from pipeplan.runtime.launch.status import Progress, lost_others
from pipeplan.runtime.parallel.device import gathered
from pipeplan.runtime.profiling.instruments import blamed, mean_of_middle, spread_of

WHOLE = 16
"""Blocks of a model that is measured whole, as it then reads its weights from where a run does."""

_STEPS = 4
"""One after the other, of which the first, that all begin together, does not count."""


class _TimedStage(DecodingStage):
    """Notes how long each of its blocks takes, with what it waits for."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.taken: dict[str, list[int]] = defaultdict(list)

    def _run(self, id_: str, *given: Any) -> Tensor:
        begin = time.perf_counter_ns()
        made = super()._run(id_, *given)
        self.taken[id_].append(time.perf_counter_ns() - begin)
        return made

    def logits(self, block: str, made: Tensor, rows: Pass) -> Tensor:
        """What devices have made of them, gathered: a part of the block's step."""
        begin = time.perf_counter_ns()
        found = super().logits(block, made, rows)
        self.taken[block][-1] += time.perf_counter_ns() - begin
        return found


@dataclass(frozen=True, slots=True)
class SharedStep:
    """A step of ``requests`` together, of ``context`` tokens each, whose devices share blocks by this ``way``."""

    way: StepWay
    requests: int
    context: int

    @property
    def own(self) -> int:
        """Requests by which its rows are found: a device's own."""
        return self.requests // self.way.owners

    def configuration(self, block: Block) -> str:
        """How the block is shared; what has no cache, by requests alone where caches lie in pieces."""
        way = self.way
        if way.cache > 1 and not block.cache_bytes_per_token:
            way = StepWay(samples=way.cache)
        return str(way.mesh)

    def measures(self, row: PhaseRow) -> bool:
        """Whether a row is of such a step."""
        wanted = "decode", self.own, self.context, self.way.shards, 1
        return (row.phase, row.microbatch_size, row.context_tokens, row.shards, row.expert) == wanted and row.dcp == 1


def steps_of(profile: Profile, count: int, *, pieces: bool) -> Iterator[SharedStep]:
    """Steps that so many devices share, of as many requests and tokens as rows are of: by heads, and by pieces."""
    rows = {row.key: row for block in profile.kinds for row in block.phases if row.phase == "decode"}.values()
    found = dict[SharedStep, None]()
    for row in rows:
        size, tokens = row.microbatch_size, row.context_tokens
        if row.shards == count and row.expert == row.dcp == 1:
            found[SharedStep(StepWay(shards=count), size, tokens)] = None
        if pieces and row.shards == row.expert == row.dcp == 1:
            for by_queries in (False, True):
                way = StepWay(cache=count, by_queries=by_queries)
                found[SharedStep(way, size * count, tokens)] = None
    yield from found


@dataclass
class _StepBench:
    """This process's end of a shared step of ``blocks``, of which some are ``alike`` others; they may be ``all``."""

    step: SharedStep
    written: WrittenModel
    blocks: Sequence[Block]
    alike: Mapping[str, str]
    all: bool
    progress: Progress
    dtype: torch.dtype
    seed: int
    times: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        step, devices = self.step, self.step.way.mesh.size
        placed = PlacedStage(
            blocks=tuple(each.id for each in self.blocks),
            devices=tuple(range(devices)),
            shards=devices,
            configurations=tuple(map(step.configuration, self.blocks)),
        )
        self._groups = ProcessGroups(lines_of(placed), self.progress)
        with lost_others(self.progress):
            self._groups.connect("gloo", timedelta(minutes=5))
        self._stage = _TimedStage(
            placed,
            self.written,
            self._groups,
            self.progress,
            SentBytes(),
            (step.requests,),
            step.context,
            lambda rows, own: torch.zeros((len(own), rows.width), dtype=torch.long),
            dtype=self.dtype,
            seed=self.seed,
        )
        self._rows = self._pass()
        known = {each.id for each in self.blocks}
        sources = (source for id_ in placed.blocks for source, _ in self.written.model.block(id_).inputs)
        self._given = {source: self._noise(source) for source in sources if source not in known}
        self._run()
        for caches in self._stage.caches.values():
            for piece in caches.pieces:
                piece.fill()

    @property
    def label(self) -> str:
        """For progress and errors."""
        return f"a step of {self.step.requests} requests of {self.step.context} tokens as {self.step.way.mesh}"

    def _pass(self) -> Pass:
        """The last word of each text."""
        last = self.step.context - 1
        return Pass(0, 1, tuple(Row(slot, slot, last, 1, True) for slot in range(self.step.requests)))

    def _noise(self, source: str) -> Tensor:
        shape, dtype = self._stage.form(source, 1)
        own = self._stage.rows_of(source, self._rows)[self._stage.device]
        return torch.randn((len(own), *shape), dtype=dtype)

    def _run(self) -> None:
        if self.all:  # what follows from its rows is found once for all blocks, in each step anew
            self._rows = self._pass()
        with blamed(self.label), lost_others(self.progress):
            made = self._stage.run(self._rows, self._given)
            last = self.blocks[-1].id
            self._stage.logits(last, made[last], self._rows)

    def time(self, *, keep: bool) -> None:
        """Some steps."""
        self._run()
        self._stage.taken.clear()
        for _ in range(_STEPS - 1):
            self._run()
        of_kind: dict[str, list[int]] = defaultdict(list)
        for id_, taken in self._stage.taken.items():
            of_kind[self.alike[id_]] += taken
        for kind, every in of_kind.items() if keep else ():
            self.times[kind].append(fmean(every))

    def found(self) -> dict[str, list[float]]:
        """{one of blocks that are alike: ns in each run, on the average device}; all call this together, and last."""
        with lost_others(self.progress):
            every: list[Mapping[str, list[float]]] = gathered(dict(self.times))
        self._groups.close()
        return {id_: [fmean(each) for each in zip(*(own[id_] for own in every), strict=True)] for id_ in self.times}


def in_lockstep(
    profile: Profile,
    written: WrittenModel,
    steps: Sequence[SharedStep],
    cluster: Cluster | None,
    progress: Progress,
    on_run: Callable[[int, int, str], object],
    *,
    repeats: int,
    warmup: int,
    dtype: torch.dtype,
    seed: int,
) -> Profile:
    """The profile with what these steps take, measured by as many processes, all of which call this.

    Times have all exchanges in them. Where searches add those, as between pieces of caches, the row is what is left
    beside what the cluster's links say.

    Args:
        profile: has rows of such steps, or of the same without pieces, whose memory is taken.
        written: the model.
        steps: of as many devices as there are processes.
        cluster: whose links searches will take.
        progress: this process's.
        on_run: called before each run, by all together.
        repeats: runs that count.
        warmup: runs before them.
        dtype: of weights, activations and cache.
        seed: of parameters.
    """
    rows = {block.id: list(block.phases) for block in profile.kinds}
    whole, turns = len(profile.blocks) <= WHOLE, warmup + repeats
    blocks = [block for block in profile.blocks if whole or block.id in rows]
    links = StageLinks(profile, cluster)
    for number, step in enumerate(steps):  # one by one: each has its own weights
        bench = _StepBench(step, written, blocks, profile.alike, whole, progress, dtype, seed)
        for turn in range(turns):
            on_run(number * turns + turn, len(steps) * turns, bench.label)
            bench.time(keep=turn >= warmup)
        for id_, times in bench.found().items():
            _put(rows[id_], step, times, _priced(profile, profile.by_id[id_], step, links))
    return profile.model_copy(
        update={
            "blocks": tuple(
                block.model_copy(
                    update={"phases": tuple(sorted(rows[profile.alike[block.id]], key=lambda row: row.key))}
                )
                for block in profile.blocks
            )
        }
    )


def _priced(profile: Profile, block: Block, step: SharedStep, links: StageLinks) -> int:
    """Ns that searches add to the block's row for what it exchanges."""
    if step.way.cache == 1 or not block.cache_bytes_per_token:
        return 0
    return step_cost(profile, block, step.way, DecodeAt((step.requests,), step.context), links).exchange_ns


def _put(rows: list[PhaseRow], step: SharedStep, times: Sequence[float], priced: int) -> None:
    """Put what a block took into its row of such a step; into a new one of pieces of caches, if it has any."""
    place = next((number for number, row in enumerate(rows) if step.measures(row)), None)
    pieces = step.way.cache > 1
    if place is None or (pieces and not rows[place].core_ns):
        return
    forward = max(1, round(mean_of_middle(times)) - priced)
    row = rows[place].model_copy(
        update={
            "forward_ns": forward,
            "core_ns": 0 if pieces else min(rows[place].core_ns, forward),
            "repeats": len(times),
            "spread": spread_of([round(each) for each in times]),
        }
    )
    if pieces:
        own = {"dcp": step.way.cache, "by_queries": step.way.by_queries}
        rows.append(row.model_copy(update=own))
    else:
        rows[place] = row
