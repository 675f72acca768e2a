"""What ranks that run in threads give each other, by block, phase and kind of exchange; and what profiles say of it."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from pipeplan.costs.communication import COUNTS_BYTES, places_reached
from pipeplan.costs.messages import Crossings, gathers
from pipeplan.costs.wide_groups import AROUND, GroupSizes, among_parts
from pipeplan.files import CostRow, Plan, Profile
from pipeplan.files.row_messages import RowMessages
from pipeplan.runtime.executor.rank_program import ProgramStep
from pipeplan.runtime.executor.stage import StageRunner
from pipeplan.runtime.parallel import sharding
from pipeplan.runtime.parallel.sharding import Regathered
from pipeplan.workload.elements import Stage
from runtime_support.threads import MailChannels, ThreadGroup


class Given(NamedTuple):
    """An exchange: of which block, in which phase, and how; of messages between stages only how."""

    block: str
    phase: str
    how: str


BETWEEN_STAGES = Given("", "", "send")
"""Messages between stages."""

LEAVING = Given("", "", "all_gather")
"""What shards gather of what leaves a stage in larger slices than theirs, after its blocks."""

Bytes = Counter[Given]
"""By exchange, what a rank gives others, as float32."""

Pair = tuple[int, int]
"""The ranks that send and receive messages between stages."""


def of_array(how: str, array_bytes: int, devices: int) -> Fraction:
    """What each of some devices gives in a collective about an array, which is whole where it is gathered."""
    return Fraction((devices - 1) * (2 if how == "all_reduce" else 1) * array_bytes, devices)


class GivenBytes:
    """Counts what each rank gives others while it is patched in, in float64 as half of that; and ``between`` ranks.

    Devices of ``stages`` that split the same experts gather and scatter by routing.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stages: Sequence[Stage]) -> None:
        self.of_rank: dict[int, Bytes] = defaultdict(Counter)
        self.between: Counter[Pair] = Counter()
        self._here = threading.local()
        self._parts = {
            stage.devices[at : at + stage.expert_shards]
            for stage in stages
            for at in range(0, len(stage.devices), stage.expert_shards)
            if stage.expert_shards > 1
        }
        self._count_collectives(monkeypatch)
        self._know_blocks(monkeypatch)

    def _count_collectives(self, monkeypatch: pytest.MonkeyPatch) -> None:
        counts = self

        def summed(group: ThreadGroup, tensor: Tensor) -> Tensor:
            counts._note(group, "all_reduce", of_array("all_reduce", _size(tensor), group._members))
            return torch.stack([found for (found,) in group._everyones([tensor])]).sum(0)

        def gathered(group: ThreadGroup, tensor: Tensor) -> list[Tensor]:
            counts._note(group, "all_gather", (group._members - 1) * _size(tensor))
            return [found for (found,) in group._everyones([tensor])]

        def exchanged(group: ThreadGroup, pieces: Sequence[Tensor], how: str = "all_to_all") -> list[Tensor]:
            counts._note(group, how, sum(map(_size, pieces)) - _size(pieces[group._index]))
            return [found[group._index] for found in group._everyones(pieces)]

        def scattered(group: ThreadGroup, pieces: Sequence[Tensor]) -> Tensor:
            return torch.stack(exchanged(group, pieces, "reduce_scatter")).sum(0)

        def routed(group: ThreadGroup, rows: Tensor, give: Sequence[int], get: Sequence[int]) -> Tensor:
            pieces, how = rows.split(list(give)), "all_to_all"
            if group._name in counts._parts:  # each gives all the same, or all what is added up
                how = "all_gather" if all(torch.equal(piece, pieces[0]) for piece in pieces) else "reduce_scatter"
            counts._note(group, how, sum(map(_size, pieces)) - _size(pieces[group._index]))
            return route(group, rows, give, get)

        def passed(group: ThreadGroup, tensors: Sequence[Tensor], by: int) -> Callable[[], list[Tensor]]:
            counts._note(group, "send", sum(map(_size, tensors)))
            return begin_passing(group, tensors, by)

        def sent(channels: MailChannels, step: ProgramStep, tensors: Sequence[Tensor], made: object) -> None:
            size = sum(map(_size, tensors))
            counts.of_rank[channels._program.rank][BETWEEN_STAGES] += size
            counts.between[channels._program.rank, step.peer] += size
            send(channels, step, tensors, made)

        route, begin_passing, send = ThreadGroup.route, ThreadGroup.begin_passing, MailChannels.send
        patched = {"sum": summed, "gather": gathered, "exchange": exchanged, "scatter": scattered}
        for name, made in {**patched, "route": routed, "begin_passing": passed}.items():
            monkeypatch.setattr(ThreadGroup, name, made)
        monkeypatch.setattr(MailChannels, "send", sent)

    def _know_blocks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """In forward the block that runs, in backward that whose output's gradient is known last; in W that of old."""
        here, call, differentiate = self._here, StageRunner._call, StageRunner._differentiate

        def called(stage: StageRunner, block: str, *given: Any) -> Tensor:
            here.block = block
            made = call(stage, block, *given)
            if made.requires_grad:
                made.register_hook(lambda _: setattr(here, "block", block))
            here.block = LEAVING.block
            return made

        def differentiated(*given: Any, **how: Any) -> None:
            differentiate(*given, **how)
            here.block = LEAVING.block

        def regathered(share: Tensor, exchange: Callable[[Tensor], Tensor]) -> Regathered:
            block = here.block

            def again(own: Tensor) -> Tensor:
                before, here.block, here.phase = here.block, block, "W"
                try:
                    return exchange(own)
                finally:
                    here.block, here.phase = before, None

            return Regathered(share, again)

        monkeypatch.setattr(StageRunner, "_call", called)
        monkeypatch.setattr(StageRunner, "_differentiate", differentiated)
        monkeypatch.setattr(sharding, "Regathered", regathered)

    def _note(self, group: ThreadGroup, how: str, given: Fraction | int) -> None:
        in_backward = torch._C._current_graph_task_id() != -1
        phase = getattr(self._here, "phase", None) or ("I" if in_backward else "F")
        what = LEAVING._replace(how=how) if self._here.block == LEAVING.block else Given(self._here.block, phase, how)
        self.of_rank[group._name[group._index]][what] += given


def _size(tensor: Tensor) -> int:
    return tensor.nbytes // 2 if tensor.is_floating_point() else tensor.nbytes


# What a profile says --------------------------------------------------------------------------------------------------


def row_of(profile: Profile, block: str, stage: Stage) -> CostRow:
    """What a block costs on a stage, which keeps all for backward."""
    own = GroupSizes.of(stage)
    alone = own._replace(expert=1, expert_shards=1)
    samples = stage.microbatch_size // stage.replicas
    rows = {GroupSizes.of(row): row for row in profile.by_id[block].costs if row.microbatch_size == samples}
    return rows.get(own) or rows[alone]


def planned_of(profile: Profile, stage: Stage) -> Bytes:
    """What a device of a stage gives others with each micro-batch, where experts are chosen evenly."""
    found: Bytes = Counter()
    around = stage.context_exchange == "ring"
    for block in stage.blocks:
        row = row_of(profile, block, stage)
        if row.messages is not None:
            for (phase, how), size in _of_row(profile.messages[row.messages], row, around=around).items():
                found[Given(block, phase, how)] += size
    return found


def planned_between(plan: Plan) -> Counter[Pair]:
    """What ranks send each other in a mini-batch, between stages of the same micro-batches."""
    found: Counter[Pair] = Counter()
    for each in plan.dependencies:
        for hop in each.hops:
            found[hop.source_device, hop.target_device] += hop.bytes * plan.num_microbatches
    return found


def planned_leaving(plan: Plan, profile: Profile, number: int) -> Bytes:
    """What a device of a stage gives others of its shards with each micro-batch, so that tensors can leave it."""
    every = gathers(Crossings(profile, plan.stages))
    own = [*every.get((number, True), ()), *every.get((number, False), ())]
    return +Counter({LEAVING: sum(of_array("all_gather", each.array_bytes, each.devices) for each in own)})


def _of_row(said: RowMessages, row: CostRow, *, around: bool) -> Counter[tuple[str, str]]:
    found = Counter[tuple[str, str]]()
    if said.shards is not None:
        for phase, how, size in said.shards.sent:
            found[phase, how] += of_array(how, size, row.shards)
    if said.context is not None:
        there = of_array("all_gather", said.context.bytes, row.context)
        ways = [("F", "send"), ("I", "send"), ("I", "send")]
        for each in ways if around else [("F", "all_gather"), ("I", "all_gather"), ("I", "reduce_scatter")]:
            found[each] += there
    if said.expert is not None:
        own, split = said.expert, row.expert_shards
        places = row.expert // split
        reached = Fraction(places_reached(places, own.experts_per_token))
        for phase in "FI":
            found[phase, "all_to_all"] += (2 * own.bytes + own.routing_bytes) * reached
            for how in AROUND:
                found[phase, how] += of_array(how, own.shared_bytes, row.shards)
            for each, how in zip(among_parts(own), AROUND if phase == "F" else AROUND[::-1], strict=True):
                found[phase, how] += of_array(how, each.array_bytes, split)  # backward scatters what forward gathers
        found["F", "all_to_all"] += COUNTS_BYTES * places * (places - 1 + split - 1)
        found["W", "all_gather"] += of_array("all_gather", own.shared_bytes, row.shards)
    return +found


def hidden_ns(profile: Profile, stage: Stage) -> int:
    """What products of I hide of gathers for W, on links so slow that nothing else is."""
    found = 0
    for block in stage.blocks:
        row = row_of(profile, block, stage)
        said = None if row.messages is None else profile.messages[row.messages].shards
        if said is not None:
            found += min(said.weight_grad_ns, said.products_input_grad_ns or 0)
    return found
