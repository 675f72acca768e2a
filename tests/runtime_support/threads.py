"""All ranks of a plan in one process: a thread each, of which only one runs at a time, and messages in memory."""

from __future__ import annotations

import functools
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import pytest
import torch
from torch import Tensor, nn

from pipeplan.files import Plan
from pipeplan.runtime.executor.channels import TransferError
from pipeplan.runtime.executor.interpreter import Executor
from pipeplan.runtime.executor.rank_program import Program, ProgramStep, program_of, programs_of
from pipeplan.runtime.executor.stage import MiniBatch, StageRunner
from pipeplan.runtime.executor.tensors import StageLayouts, TensorSpec, spec_of
from pipeplan.runtime.launch.status import Board, Cause, Progress
from pipeplan.runtime.models.spec import Model, placed
from pipeplan.runtime.parallel import Share
from pipeplan.runtime.parallel.device import Clock
from pipeplan.runtime.parallel.sharding import Cut, Shards
from pipeplan.runtime.parallel.weight_grads import WeightGradQueue
from pipeplan.runtime.training.evaluation import evaluating
from pipeplan.runtime.training.options import TrainOptions
from pipeplan.runtime.training.trainer import travelling
from pipeplan.workload.kinds import Role
from runtime_support.plans import Unsplit

CPU = torch.device("cpu")
PATIENCE_S = 20.0

Result = TypeVar("Result")


@dataclass
class Mail:
    """What is under way: [source, target] what was sent, in order; [meeting] who brought what. The lock is the turn.

    ``failure`` is the first one of any rank; nobody waits any longer then.
    """

    turn: threading.Condition = field(default_factory=threading.Condition)
    sent: dict[tuple[int, int], list[tuple[str, Sequence[Tensor]]]] = field(default_factory=lambda: defaultdict(list))
    met: dict[object, dict[int, list[Tensor]]] = field(default_factory=lambda: defaultdict(dict))
    failure: BaseException | None = None


class MailChannels:
    """As :class:`~pipeplan.runtime.executor.channels.Channels`; the k-th receive of a pair gets its k-th message."""

    def __init__(self, program: Program, specs: dict[str, TensorSpec], mail: Mail) -> None:
        self._program, self._specs, self._mail = program, specs, mail
        self._posted: dict[int, int] = defaultdict(int)
        self._place: dict[int, int] = {}

    def send(self, step: ProgramStep, tensors: Sequence[Tensor], made: object) -> None:
        """Put into the mail; whoever waits may look."""
        assert made is None
        assert all(tensor.is_contiguous() for tensor in tensors)
        self._mail.sent[self._program.rank, step.peer].append((_label(step), tensors))
        self._mail.turn.notify_all()

    def receive(self, step: ProgramStep) -> None:
        """Know which of the peer's messages it is."""
        self._place[step.counter] = self._posted[step.peer]
        self._posted[step.peer] += 1

    def take(self, step: ProgramStep) -> list[Tensor]:
        """Wait, and let others run; what comes must be what the program means, in shape, too."""
        sent, place = self._mail.sent[step.peer, self._program.rank], self._place.pop(step.counter)
        self._mail.turn.wait_for(lambda: len(sent) > place or self._mail.failure, PATIENCE_S)
        if len(sent) <= place:
            raise TransferError(Cause.TIMEOUT, step.peer, "nothing came")
        label, tensors = sent[place]
        assert label == _label(step)
        keys, count = self._program.keys(step.message), len(step.samples[0])
        expected = [spec_of(self._specs, key).of(count) for key in keys]
        assert [tuple(tensor.shape) for tensor in tensors] == expected
        return list(tensors)

    def moment(self) -> None:
        """No streams here."""

    def unfinished(self) -> list[int]:
        """Mail needs nobody to wait."""
        assert not self._place, "every message of a program has a consumer in it"
        return []


def _label(step: ProgramStep) -> str:
    """What both ends call a message."""
    action = step.action
    return f"{step.message} {action.microbatch} {action.part} {step.samples}"


@dataclass(frozen=True)
class Outcome:
    """Of one mini-batch: the loss, the gradient of every parameter, summed over its copies, and all ranks' buffers."""

    loss: float
    gradients: dict[str, Tensor | None]
    buffers: Sequence[Tensor] = ()


class ThreadGroup:
    """Collectives of threads, one of which runs at a time; ``members`` of them meet under one ``name``."""

    def __init__(self, mail: Mail, name: object, members: int, index: int) -> None:
        self._mail, self._name, self._members, self._index = mail, name, members, index
        self._calls = 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Over all members."""
        return torch.stack(self.gather(tensor)).sum(0)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Wait for all members' k-th call."""
        return [found for (found,) in self._everyones([tensor])]

    def begin_gather(self, tensor: Tensor) -> Callable[[], list[Tensor]]:
        """The same, which all bring at once."""
        came = self.gather(tensor)
        return lambda: came

    def route(self, rows: Tensor, give: Sequence[int], get: Sequence[int]) -> Tensor:
        """As many rows of each member as it gives this one, which knows how many that are."""
        found = [pieces[self._index] for pieces in self._everyones(rows.split(list(give)))]
        assert [len(piece) for piece in found] == list(get)
        return torch.cat(found)

    def begin_passing(self, tensors: Sequence[Tensor], by: int) -> Callable[[], list[Tensor]]:
        """Those of the member so many places back, which all bring at once."""
        came = self._everyones(tensors)[(self._index - by) % self._members]
        return lambda: came

    def _everyones(self, own: Sequence[Tensor]) -> list[list[Tensor]]:
        """[member] what it has brought to its k-th call."""
        here = self._mail.met[self._name, self._calls]
        self._calls += 1
        here[self._index] = [tensor.detach().clone() for tensor in own]
        self._mail.turn.notify_all()
        active, WeightGradQueue._active = WeightGradQueue._active, None  # a process has one; here each thread's turn
        self._mail.turn.wait_for(lambda: len(here) == self._members or self._mail.failure, PATIENCE_S)
        WeightGradQueue._active = active
        assert len(here) == self._members, f"only {sorted(here)} of {self._members} came to {self._name}"
        return [here[index] for index in range(self._members)]

    def scatter(self, pieces: Sequence[Tensor]) -> Tensor:
        """The sum of all members' pieces for this one."""
        return torch.stack(self.exchange(pieces)).sum(0)

    def exchange(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """Each member's piece for this one."""
        return [found[self._index] for found in self.gather(torch.stack(list(pieces)))]


def joined(cut: Cut, shares: Sequence[Tensor]) -> Tensor:
    """The whole from all shares, in order: the inverse of ``cut``."""
    pieces = [share.chunk(cut.parts, cut.dimension) for share in shares]
    return torch.cat([piece for each in zip(*pieces, strict=True) for piece in each], cut.dimension)


def together(count: int, work: Callable[[Shards], Result]) -> list[Result]:
    """What each of so many devices makes that split something."""
    mail = Mail()

    def one(index: int) -> Result:
        with mail.turn:
            try:
                return work(Shards(count, index, ThreadGroup(mail, "all", count, index)))
            except BaseException as error:
                mail.failure = mail.failure or error
                mail.turn.notify_all()
                raise

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


def run_in_threads(plan: Plan, model: Model, seed: int) -> Outcome:
    """Run every rank's program once, in fp64; of a plan of inference as a run does it, of a folded one each its own."""
    run_as = model.shared_by(max(stage.context for stage in plan.stages))
    asked = [block.id for block in model.blocks], run_as.edges, model.name, run_as.divides_shards
    tied = [{block for block, _ in group} for group in model.tied]
    if plan.players:
        programs = tuple(program_of(plan, rank, *asked, tied=tied) for rank in range(plan.num_devices))
    else:
        programs = programs_of(plan, *asked)
    specs = travelling(programs[0], run_as, torch.float64)
    batch = model.mini_batch(plan.mini_batch, 0, seed, dtype=torch.float64)
    samples, mail = MiniBatch(batch, model.predictions(batch)), Mail()
    ranks = [_Rank(program, run_as, specs, mail, seed) for program in programs]
    with ThreadPoolExecutor(len(ranks)) as pool:
        for rank in ranks:
            pool.submit(rank.infer if plan.is_inference else rank.run, samples)
    if mail.failure is not None:
        raise mail.failure
    buffers = [buffer for rank in ranks for module in rank.modules.values() for buffer in module.buffers()]
    return Outcome(sum(rank.loss() for rank in ranks), _summed([rank.modules for rank in ranks], run_as), buffers)


def require_equal_to_unsplit(model: Model, plan: Plan, tolerance: float = 1e-10) -> None:
    """Loss and gradients, of tied parameters their sums."""
    outcome = run_in_threads(plan, model, 3)
    unsplit = Unsplit(model, TrainOptions(model.name, seed=3, dtype="float64", learning_rate=1e-3, weight_decay=0.0))
    assert outcome.loss == pytest.approx(unsplit.step(0, plan.mini_batch), rel=tolerance / 100)
    summed = dict(outcome.gradients)
    for (block, parameter), *others in model.tied:
        for other in others:
            summed[f"{block}.{parameter}"] += summed[".".join(other)]
    for key, whole in unsplit.parameters().items():
        if key in {".".join(holder) for _, *others in model.tied for holder in others}:
            continue
        torch.testing.assert_close(summed[key], whole.grad, rtol=tolerance, atol=tolerance)


class _Rank:
    def __init__(self, program: Program, model: Model, specs: dict[str, TensorSpec], mail: Mail, seed: int) -> None:
        @functools.cache
        def along(line: tuple[int, ...]) -> Shards:
            index = line.index(program.rank)
            return Shards(len(line), index, ThreadGroup(mail, line, len(line), index))

        held = dict.fromkeys(share for part in program.stages.values() for share in part.shares)
        self.modules = {
            share: model.build_share(share, seed, placed(share, along), dtype=torch.float64) for share in held
        }
        stages = {
            index: StageRunner(
                part,
                {share.block: self.modules[share] for share in part.shares},
                {b: model.block(b) for b in part.blocks},
                layouts=StageLayouts.of(part, model, along),
            )
            for index, part in program.stages.items()
        }
        progress = Progress(board_of_one(), 0)
        progress.board.programs = [program.texts]
        channels = MailChannels(program, specs, mail)
        self._mail = mail
        self._executor = Executor(program, stages, channels, specs, progress, Clock(CPU))

    def infer(self, samples: MiniBatch) -> None:
        """Forwards alone of one mini-batch, with nothing kept."""
        with evaluating(self._executor.runners.values(), self.modules.values()):
            self.run(samples)

    def run(self, samples: MiniBatch) -> None:
        """One mini-batch; gradients are left in the parameters."""
        with self._mail.turn:
            try:
                counters = [counter for counter, _, _ in self._executor.run(samples)]
                program = self._executor.program
                exchanged = {step.counter for step in program.steps if step.action.role is Role.STATE}
                ran = sorted(counters)  # what exchanges state goes on beside them, and has no time of its own
                assert ran == [counter for counter in range(len(program.texts)) if counter not in exchanged]
                assert not self._executor._slots, "nothing is kept that is not taken any more"
            except BaseException as error:
                self._mail.failure = self._mail.failure or error
                self._mail.turn.notify_all()

    def loss(self) -> float:
        """This rank's part of the loss."""
        losses = [stage.take_loss() for stage in self._executor.runners.values()]
        return sum(float(loss) for loss in losses if loss is not None)


def _summed(ranks: Sequence[dict[Share, nn.Module]], model: Model) -> dict[str, Tensor | None]:
    """The gradient of every parameter, over its copies; of those that have the same by themselves, one counts."""
    shapes = {block.id: {n: p.shape for n, p in block.build().named_parameters()} for block in model.blocks}
    found: dict[str, Tensor | None] = {}
    for modules in ranks:
        for share, module in modules.items():
            for name, parameter in module.named_parameters():
                part, key = model.part_of(share, name), f"{share.block}.{name}"
                found.setdefault(key, None)
                if part.adds and parameter.grad is not None:
                    whole = torch.zeros(shapes[share.block][name], dtype=parameter.dtype)
                    part.spread(parameter.grad, whole)
                    found[key] = whole if found[key] is None else found[key] + whole
    return found


def board_of_one() -> Board:
    with tempfile.TemporaryFile() as file:
        file.truncate(Board.size(1))
        return Board(file.fileno(), 1)
