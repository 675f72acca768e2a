"""Decode rows of blocks whose caches lie in pieces on several devices, measured as a run has them.

One device's end of a stage is made as for a run, with caches full of noise, and takes its turns; only what it exchanges
goes nowhere. So what is measured has the masks, the packing and the merging of a run; what links take is priced apart.

Several processes may measure at once, as the devices of a run on one machine do: each waits for the others before every
timed run, and so has as little of the memory's bandwidth as then.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeplan.files import Block, Cluster, PhaseRow, PlacedStage, Profile, parse, to_json
from pipeplan.runtime.decoding.exchanges import SentBytes, StageExchange
from pipeplan.runtime.decoding.lockstep import in_lockstep, steps_of
from pipeplan.runtime.decoding.requests import Pass, Row
from pipeplan.runtime.decoding.stage import DecodingStage, WrittenModel, lines_of
from pipeplan.runtime.executor.process_groups import ProcessGroups
from pipeplan.runtime.launch.job import RankContext, Report
from pipeplan.runtime.launch.local import RANK, watch_local
from pipeplan.runtime.launch.status import Board, Phase, Progress, lost_others
from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.models.spec import Model
from pipeplan.runtime.profiling.build_profile import dtype_of
from pipeplan.runtime.profiling.inference import InferenceRequest, measure_inference
from pipeplan.runtime.profiling.instruments import blamed, spread_of, steady, timed
from pipeplan.runtime.profiling.rounds import Progress as OnRun

_CPU = torch.device("cpu")
_AT_ONCE = (
    "Measured by {0} processes of one machine at once. Decode steps that {0} devices share were measured between "
    "them, in step with each other: waiting for each other is in their times, and of pieces of caches what exchanges "
    "take beyond the links given."
)
_TIMEOUT_NS = 600 * 10**9


class SilentExchange(StageExchange):
    """Packs what is given, and unpacks zeros."""

    def _carry(self, found: Tensor, carried: Tensor, sizes: list[int], own: list[int]) -> None:
        found.zero_()


@dataclass(frozen=True, slots=True)
class MeasuredForwards:
    """How forwards are measured: as :func:`measure_inference` has it, and with pieces for each number of ``dcp``."""

    asked: InferenceRequest
    dcp: tuple[int, ...] = (1,)
    expert: tuple[int, ...] = (1,)
    load_factor: float = 1.0
    repeats: int = 10
    warmup: int = 3
    dtype: str = "float32"
    device: str = "cpu"
    seed: int = 0

    def profile(
        self, model: Model, cluster: Cluster | None, progress: OnRun | None, among: Progress | None = None
    ) -> Profile:
        """The profile; ``among`` several processes that all call this, steps that so many devices share are theirs.

        Raises as :func:`measure_inference` does.
        """
        found = measure_inference(
            model,
            self.asked,
            repeats=self.repeats,
            warmup=self.warmup,
            cluster=cluster,
            expert=self.expert,
            load_factor=self.load_factor,
            dtype=dtype_of(self.dtype),
            device=self.device,
            seed=self.seed,
            progress=progress,
        )
        processes = 1 if among is None else dist.get_world_size()
        counts = [each for each in sorted(set(self.dcp)) if each not in (1, processes)]
        found = self._with_pieces(found, model, counts, progress) if counts else found
        steps = [*steps_of(found, processes, pieces=processes in self.dcp)] if processes > 1 else []
        if not steps or among is None or progress is None:
            return found
        how: dict[str, Any] = {
            "repeats": self.repeats,
            "warmup": self.warmup,
            "seed": self.seed,
            "dtype": dtype_of(self.dtype),
        }
        with steady(_CPU):
            return in_lockstep(found, WrittenModel.of(model, 1), steps, cluster, among, progress, **how)

    def _with_pieces(self, found: Profile, model: Model, counts: Sequence[int], progress: OnRun | None) -> Profile:
        written = WrittenModel.of(model, 1)
        firsts = {id_: block for id_, block in found.by_id.items() if found.alike[id_] == id_}
        benches = [
            _PieceBench(written, block, row, count, by_queries=by_queries, dtype=dtype_of(self.dtype), seed=self.seed)
            for block in firsts.values()
            if block.cache_bytes_per_token
            for row in block.phases
            if row.phase == "decode" and row.shards == row.expert == 1
            for count in counts
            for by_queries in (False, True)
        ]
        total = len(benches) * (self.warmup + self.repeats)
        with steady(_CPU):
            for turn in range(self.warmup + self.repeats):
                for number, bench in enumerate(benches):
                    if progress is not None:
                        progress(turn * len(benches) + number, total, bench.label)
                    bench.time(keep=turn >= self.warmup)
        rows: dict[str, list[PhaseRow]] = {}
        for bench in benches:
            rows.setdefault(bench.block.id, []).append(bench.made())
        return found.model_copy(update={"blocks": tuple(_with_rows(found, each, rows) for each in found.blocks)})


def _with_rows(profile: Profile, block: Block, rows: dict[str, list[PhaseRow]]) -> Block:
    own = (*block.phases, *rows.get(profile.alike[block.id], ()))
    return block.model_copy(update={"phases": tuple(sorted(own, key=lambda row: row.key))})


@dataclass
class _PieceBench:
    """A block on the first of ``count`` devices, each with as many requests of its own as a ``row`` without pieces."""

    written: WrittenModel
    block: Block
    row: PhaseRow
    count: int
    by_queries: bool
    dtype: torch.dtype
    seed: int
    times: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        devices = tuple(range(self.count))
        kind = f"cache{'q' * self.by_queries}{self.count}"
        placed = PlacedStage(blocks=(self.block.id,), devices=devices, shards=self.count, configurations=(kind,))
        total, context = self.count * self.row.microbatch_size, self.row.context_tokens
        with tempfile.TemporaryFile() as file:
            file.truncate(Board.size(1))
            progress = Progress(Board(file.fileno(), 1), 0)
        self._stage = DecodingStage(
            placed,
            self.written,
            ProcessGroups(lines_of(placed), progress),
            progress,
            SentBytes(),
            (total,),
            context,
            lambda rows, own: torch.zeros((len(own), rows.width), dtype=torch.long),
            dtype=self.dtype,
            seed=self.seed,
            exchange=SilentExchange,
        )
        self._rows = Pass(0, 1, tuple(Row(slot, slot, context - 1, 1, True) for slot in range(total)))
        self._given = {source: self._noise(source) for source, _ in self.written.model.block(self.block.id).inputs}
        with blamed(self.label):
            self._stage.run(self._rows, self._given)
            for caches in self._stage.caches.values():
                for piece in caches.pieces:
                    piece.fill()

    @property
    def label(self) -> str:
        """For progress and errors."""
        row = self.row
        return (
            f"block {self.block.id!r} with {row.microbatch_size} requests, {self.count} devices with pieces of their "
            f"caches of {row.context_tokens} tokens{', by queries' * self.by_queries}"
        )

    def _noise(self, source: str) -> Tensor:
        shape, dtype = self._stage.form(source, 1)
        return torch.randn((self.row.microbatch_size, *shape), dtype=dtype)

    def time(self, *, keep: bool) -> None:
        """One turn."""
        with blamed(self.label):
            _, ns = timed(lambda: self._stage.run(self._rows, self._given), _CPU)
        if keep:
            self.times.append(ns)

    def made(self) -> PhaseRow:
        """The row; memory is that of the one without pieces."""
        return self.row.model_copy(
            update={
                "dcp": self.count,
                "by_queries": self.by_queries,
                "forward_ns": max(1, round(statistics.median(self.times))),
                "core_ns": 0,
                "repeats": len(self.times),
                "spread": spread_of(self.times),
            }
        )


# Several processes at once -------------------------------------------------------------------------------------------


def measure_at_once(
    num_processes: int,
    how: MeasuredForwards,
    model: str,
    of_model: dict[str, Any],
    cluster: Cluster | None,
    *,
    threads: int | None,
    progress: OnRun | None,
    command: Sequence[str] = RANK,
) -> Profile:
    """What the first of some processes started here measures while the others do the same.

    Raises as :func:`measure_inference` does, and ExecutionError, which names the process.
    """
    job = {
        **asdict(how),
        "model": model,
        "of_model": of_model,
        "cluster": None if cluster is None else to_json(cluster),
        "threads": threads,
    }
    found: list[Profile] = []

    def listen(rank: int, report: Report) -> None:
        if report["event"] == "profile":
            found.append(parse(report["profile"], Profile))
        elif progress is not None:
            progress(*report["run"])

    programs = [("forwards",)] * num_processes
    watch_local("pipeplan.runtime.decoding.piece_rows:measure_job", programs, job, _TIMEOUT_NS, listen, command)
    return found[0]


def measure_job(job: Report, context: RankContext) -> None:
    """The job of a process; the first reports."""
    asked = {**job["asked"], **{name: tuple(job["asked"][name]) for name in ("batches", "contexts", "shards")}}
    names = ("repeats", "warmup", "dtype", "device", "seed")
    counts = tuple(job["dcp"]), tuple(job["expert"])
    how = MeasuredForwards(InferenceRequest(**asked), *counts, **{name: job[name] for name in names})
    if job["threads"]:
        torch.set_num_threads(job["threads"])
    cluster = None if job["cluster"] is None else parse(job["cluster"], Cluster)
    model = load_model(job["model"], **job["of_model"])

    def together(*run: object) -> None:
        context.progress.begin(Phase.WAITING, 0)
        if context.rank == 0:
            context.report({"event": "run", "run": run})
        with lost_others(context.progress):
            dist.barrier()
        context.progress.begin(Phase.RUNNING, 0)

    profile = how.profile(model, cluster, together, context.progress)
    if context.rank == 0:
        said = f"{profile.source.notes} {_AT_ONCE.format(dist.get_world_size())}"
        profile = profile.model_copy(update={"source": profile.source.model_copy(update={"notes": said.strip()})})
        context.report({"event": "profile", "profile": to_json(profile)})
    context.progress.begin(Phase.DONE)
