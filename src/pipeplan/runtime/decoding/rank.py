"""One rank of a decoding run: its stages turn by turn in the plan's order, and what goes between stages.

Words of a turn go back to the stage that looks them up before the group's next turn; where a word may end a text they
go to all ranks, whose records then agree.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from pipeplan.errors import UsageError
from pipeplan.files import Plan
from pipeplan.runtime.decoding.choosing import WordChoice
from pipeplan.runtime.decoding.layouts import BlockLayout, Placed, Route, positions, routes
from pipeplan.runtime.decoding.requests import Pass, RequestQueue
from pipeplan.runtime.decoding.stage import DecodingStage
from pipeplan.runtime.executor.channels import TransferError, transfer_errors
from pipeplan.runtime.executor.stage import StageError, stage_errors
from pipeplan.runtime.launch.status import Cause, Phase, Progress, RankError
from pipeplan.workload.kinds import PREFILL

Part = Literal["turn", "step", "chunk"]
"""What is run of a turn: texts are written on in its step, prompts are read in its chunk, or both, prompts first."""

Entry = tuple[int, int, Part]
"""A stage, the number of a turn, and what of it."""


@dataclass(frozen=True, slots=True)
class Turns:
    """Which turns of which stages a device runs, in order: its part of a plan's repetend, again and again."""

    entries: Sequence[Entry]
    unroll: int = 1

    @classmethod
    def of(cls, plan: Plan, device: int) -> Turns:
        """Those of a device, later by ``unroll`` each time: steps and, where the plan has them, chunks in its order.

        A plan without chunks says nothing of prompts: those are read before each of its steps.
        """
        own = [number for number, stage in enumerate(plan.stages) if device in stage.devices and stage.blocks]
        chunks = {each.attributes["stage"]: each.id for each in plan.operations if each.kind == PREFILL}
        ids: dict[tuple[int, Part], str] = {(number, "step" if chunks else "turn"): f"{number}F" for number in own}
        ids |= {(number, "chunk"): chunks[number] for number in own if number in chunks}
        repetend = plan.repetend
        if repetend is None or len(ids) == 1:
            return cls([(number, 0, part) for number, part in ids])
        program = {text: place for place, text in enumerate(plan.whole_programs[device])}
        entries = [
            (program[f"{id_}{turn}"], (number, turn, part))
            for (number, part), id_ in ids.items()
            for turn in range(repetend.first[id_], repetend.first[id_] + repetend.unroll)
        ]
        return cls([entry for _, entry in sorted(entries)], repetend.unroll)

    @staticmethod
    def require_known(plan: Plan) -> None:
        """Refuse a plan whose chunks run before it is known who reads: where a text may end, a chunk is of whoever has
        taken its place, which the words of the group's last step say. Raises UsageError."""
        assert plan.decode is not None
        groups, repetend = plan.decode.groups, plan.repetend
        if repetend is None:
            return
        first = repetend.first
        for each in plan.operations:
            step = f"{each.attributes['stage']}F" if each.kind == PREFILL else each.id
            if first[each.id] - first[step] >= groups:
                raise UsageError(
                    f"the plan takes in {each.id} more than a step of its group ahead, and with --tokenizer or "
                    "--stop-ids texts may end sooner, so that it is not known then who reads; search without --prefill"
                )

    def __iter__(self) -> Iterator[Entry]:
        """Entries without end, but of a device without stages."""
        if not self.entries:
            return
        by = -(max(turn for _, turn, _ in self.entries) // self.unroll) * self.unroll
        while True:
            yield from ((stage, turn + by, part) for stage, turn, part in self.entries if turn + by >= 0)
            by += self.unroll


@dataclass(frozen=True, slots=True)
class WrittenWord:
    """A word that a rank has chosen: of which request, the how-manieth of its new ones, and when, in ns."""

    request: int
    place: int
    word: int
    at_ns: int


@dataclass
class DecodingRank:
    """What a rank does: its own ``stages``, by their number among all as ``placed``, in the order of ``turns``.

    ``sources`` [stage] are the blocks of other stages whose outputs it takes.
    """

    placed: Sequence[Placed]
    stages: Mapping[int, DecodingStage]
    sources: Sequence[Sequence[str]]
    turns: Turns
    queue: RequestQueue
    choice: WordChoice
    progress: Progress
    clock: Callable[[], int]
    timeout: timedelta
    counters: Mapping[tuple[int, int], int] = field(default_factory=dict)
    words: list[WrittenWord] = field(default_factory=list)
    _heard: set[int] = field(default_factory=set)
    _here: dict[tuple[int, str, int, int], Tensor] = field(default_factory=dict)
    _under_way: deque[tuple[int, int, dist.Work, Tensor]] = field(default_factory=deque)

    def run(self) -> None:
        """All turns, until every request has ended. Raises RankError, which names the action."""
        try:
            left = {(stage, part) for stage, _, part in self.turns.entries}
            for stage, turn, part in self.turns:
                if (stage, part) in left:
                    self.progress.step = turn // len(self.queue.sizes)
                    self.progress.begin(Phase.RUNNING, self.counters.get((stage, turn % len(self.queue.sizes)), -1))
                    if not self._turn(stage, turn, part):
                        left.discard((stage, part))
                elif not left:
                    break
            while self._under_way:
                self._finish()
        except TransferError as error:
            said = "got nothing from" if error.cause is Cause.TIMEOUT else "lost"
            text = f"rank {self.progress.rank} {said} {error.who} {self.progress.describe()}: {error}"
            raise RankError(error.cause, text, error.peer) from error
        except StageError as error:
            where = f"rank {self.progress.rank} failed {self.progress.describe()}"
            raise RankError(Cause.RAISED, f"{where}: {error}") from error

    @property
    def sent_bytes(self) -> dict[str, int]:
        """What it has sent so far."""
        return next((dict(stage.sent.texts()) for stage in self.stages.values()), {})

    @property
    def cache_bytes(self) -> int:
        """The room that it has for keys and values."""
        return sum(kept.num_bytes for stage in self.stages.values() for kept in stage.caches.values())

    def read_weights(self, path: str) -> None:
        """Take the parameters from a file of weights. Raises UsageError, the same on every rank."""
        for stage in self.stages.values():
            stage.read_weights(path)

    def _turn(self, number: int, turn: int, part: Part) -> bool:
        """A turn of a stage, or a part of it; False where nothing is left to do for any.

        A chunk of a prompt needs no words, but where one may have ended a text and so made room for the prompt.
        """
        groups = len(self.queue.sizes)
        hears = part != "chunk" or bool(self.queue.stop)
        if turn >= groups and hears and self.progress.rank in self._hearers:
            self._hear(turn - groups)
        if self.queue.ends_at(turn):
            return False
        while hears and self._under_way and self._under_way[0][0] <= turn - groups:
            self._finish()  # it was taken: words have come back that were made of it
        stage = self.stages[number]
        for rows in self.queue.turn(turn):
            if part != "turn" and rows.reads != (part == "chunk"):
                continue
            which = int(rows.reads)
            received = {source: self._received(number, source, turn, which, rows) for source in self.sources[number]}
            made = stage.run(rows, received)
            for block, tensor in made.items():
                for taker in self._takers(number, block):
                    self._hand_on(number, taker, block, tensor, turn, which, rows)
            if number == self._last:
                block = stage.stage.blocks[-1]
                self._choose(stage, stage.logits(block, made[block], rows), turn, which, rows)
        return True

    # Between stages ----------------------------------------------------------------------------------------------

    @cached_property
    def _last(self) -> int:
        """The stage that chooses words."""
        return max(number for number, stage in enumerate(self.placed) if stage.blocks)

    def _takers(self, number: int, block: str) -> list[int]:
        """Other stages that take a block's output."""
        return [each for each, wanted in enumerate(self.sources) if each != number and block in wanted]

    @cached_property
    def _tags(self) -> dict[tuple[int, str], int]:
        """{(stage, what it takes): the tag of its messages in steps}; 0 is of words, and in chunks it is one more."""
        pairs = [(number, source) for number, wanted in enumerate(self.sources) for source in wanted]
        return {pair: 2 * tag for tag, pair in enumerate(pairs, 1)}

    def _moves(self, giver: int, taker: int, block: str, rows: Pass) -> list[Route]:
        """How a block's output goes from the devices of one stage to those of another."""
        have, want = self._ranges(giver, block, rows), self._ranges(taker, block, rows)
        ranks = self.placed[giver].devices
        own = [ranks.index(rank) if rank in ranks else None for rank in self.placed[taker].devices]
        return routes(have, want, own)

    def _ranges(self, number: int, block: str, rows: Pass) -> list[range]:
        """[device] the rows that a stage's devices have, or want, of a block's output."""
        stage = self.placed[number]
        if block not in stage.blocks:
            model = next(iter(self.stages.values())).written.model
            block = next(id_ for id_ in stage.blocks if block in dict(model.block(id_).inputs))
        layout, total = BlockLayout.of(stage, stage.blocks.index(block)), self.queue.sizes[rows.group]
        return [positions(rows.slots, layout.slots(device, total)) for device in range(len(stage.devices))]

    def _hand_on(self, giver: int, taker: int, block: str, made: Tensor, turn: int, which: int, rows: Pass) -> None:
        ranks, own = self.placed[giver].devices, self.progress.rank
        have = self._ranges(giver, block, rows)[ranks.index(own)]
        for move in self._moves(giver, taker, block, rows):
            if ranks[move.source] != own:
                continue
            piece = made[move.begin - have.start : move.end - have.start]
            target = self.placed[taker].devices[move.target]
            if target == own:
                self._here[taker, block, turn, which] = piece
            else:
                self.stages[giver].sent.block = block
                self.stages[giver].sent.note("messages", piece.nbytes)
                self._send(piece, target, self._tags[taker, block] + which, turn)

    def _received(self, taker: int, block: str, turn: int, which: int, rows: Pass) -> Tensor:
        """The own rows of what a block of another stage has made."""
        giver = next(number for number, stage in enumerate(self.placed) if block in stage.blocks)
        ranks, own = self.placed[taker].devices, self.progress.rank
        shape, dtype = self.stages[taker].form(block, rows.width)
        found = []
        for move in self._moves(giver, taker, block, rows):
            if ranks[move.target] != own:
                continue
            source = self.placed[giver].devices[move.source]
            if source == own:
                found.append(self._here.pop((taker, block, turn, which)))
            else:
                room = torch.empty((move.end - move.begin, *shape), dtype=dtype)
                found.append(self._receive(room, source, self._tags[taker, block] + which))
        return torch.cat(found) if found else torch.empty((0, *shape), dtype=dtype)

    def _send(self, tensor: Tensor, target: int, tag: int, turn: int) -> None:
        with transfer_errors(target):
            work = dist.isend(tensor := tensor.contiguous(), target, tag=tag)
        assert work is not None, "this rank is a member of the group"
        self._under_way.append((turn, target, work, tensor))

    def _receive(self, room: Tensor, source: int, tag: int) -> Tensor:
        counter = self.progress.board.read(self.progress.rank).counter
        self.progress.begin(Phase.WAITING, counter, source)
        with transfer_errors(source):
            work = dist.irecv(room, source, tag=tag)
            assert work is not None, "this rank is a member of the group"
            work.wait(self.timeout)
        self.progress.begin(Phase.RUNNING, counter)
        return room

    def _finish(self) -> None:
        _, target, work, _ = self._under_way.popleft()
        with transfer_errors(target):
            work.wait(self.timeout)

    # Words -------------------------------------------------------------------------------------------------------

    @cached_property
    def _hearers(self) -> list[int]:
        """Ranks that are told of words: those that look them up, of their own rows; of all where one may end a text."""
        first = next(stage.devices for stage in self.placed if stage.blocks)
        everyone = sorted({rank for stage in self.placed for rank in stage.devices})
        return everyone if self.queue.stop else list(first)

    def _spoken(self, rows: Pass) -> tuple[list[range], list[Route]]:
        """[device of the last stage] the rows of a pass whose words it chooses, and how they go to all hearers."""
        stage = self.placed[self._last]
        have = self._ranges(self._last, stage.blocks[-1], rows)
        own = [stage.devices.index(rank) if rank in stage.devices else None for rank in self._hearers]
        if self.queue.stop:
            return have, routes(have, [range(len(rows.rows))] * len(own), own)
        first = next(number for number, stage in enumerate(self.placed) if stage.blocks)
        return have, routes(have, self._ranges(first, self.placed[first].blocks[0], rows), own)

    def _choose(self, stage: DecodingStage, logits: Tensor, turn: int, which: int, rows: Pass) -> None:
        """Choose the words of the own rows that write, and tell them to those who hear."""
        have, moves = self._spoken(rows)
        own = have[stage.device]
        found = torch.full((len(own),), -1, dtype=torch.long)
        for number, row in enumerate(rows.rows[own.start : own.stop]):
            if row.writes:
                place = row.begin + row.count
                at = place - len(self.queue.prompts[row.request])
                with stage_errors(f"request {row.request + 1}, new token {at + 1}"):
                    found[number] = word = self.choice.of(logits[number], row.request, place)
                self.words.append(WrittenWord(row.request, at, word, self.clock()))
        if self.progress.rank in self._hearers:
            self._here[-1, "words", turn, which] = found
        if not rows.writing:
            return
        for move in moves:
            target = self._hearers[move.target]
            if move.source == stage.device and target != self.progress.rank:
                piece = found[move.begin - own.start : move.end - own.start]
                stage.sent.block = "words"
                stage.sent.note("words", piece.nbytes)
                self._send(piece, target, which, turn)

    def _hear(self, turn: int) -> None:
        """All words of a turn, the own ones among them; once."""
        if turn in self._heard:
            return
        self._heard.add(turn)
        ranks, own = self.placed[self._last].devices, self.progress.rank
        for rows in self.queue.turn(turn):
            which = int(rows.reads)
            mine = self._here.pop((-1, "words", turn, which), None)
            if not rows.writing:
                continue
            have, moves = self._spoken(rows)
            for move in moves:
                if self._hearers[move.target] != own:
                    continue
                if ranks[move.source] == own:
                    assert mine is not None, "a turn's words are chosen before they are asked for"
                    first = have[move.source].start
                    told = mine[move.begin - first : move.end - first]
                else:
                    told = self._receive(
                        torch.empty(move.end - move.begin, dtype=torch.long), ranks[move.source], which
                    )
                for row, word in zip(rows.rows[move.begin : move.end], told.tolist(), strict=True):
                    if row.writes:
                        self.queue.tell(row, word)
