"""Training with a plan: one rank's blocks, optimizer and mini-batches around its executor.

Every rank has an optimizer of its own over its own parameters. Copies of a parameter start equal and get equal
gradients, so optimizers that treat each parameter by itself, as torch's do, keep them equal.
"""

from __future__ import annotations

import math
import os
import platform
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from pipeplan._version import __version__
from pipeplan.errors import ExecutionError, UsageError
from pipeplan.files import Plan
from pipeplan.files.folded import on_device
from pipeplan.files.recipe import ADAMW
from pipeplan.runtime.executor.channels import Channels
from pipeplan.runtime.executor.custom_ops import CustomOpRunner, custom_ops_of
from pipeplan.runtime.executor.interpreter import Executor
from pipeplan.runtime.executor.process_groups import (
    AllRanks,
    ProcessGroups,
    TimedAction,
    extent,
    iteration_of,
)
from pipeplan.runtime.executor.rank_program import Program, ProgramStep, program_of, programs_of
from pipeplan.runtime.executor.shared_parameters import SharedParameters, require_equal_copies
from pipeplan.runtime.executor.stage import MiniBatch, StageRunner
from pipeplan.runtime.executor.tensors import StageLayouts, TensorSpec
from pipeplan.runtime.launch.job import (
    OnEvent,
    RankContext,
    Report,
    RunResult,
    Started,
    StepResult,
    longest_wait,
    run_job,
)
from pipeplan.runtime.launch.machine import most_resident_bytes
from pipeplan.runtime.launch.status import Phase, Progress, lost_others, tell
from pipeplan.runtime.launch.stopping import STOPPING
from pipeplan.runtime.models.given_names import PythonValue, found_at, made_by
from pipeplan.runtime.models.load import advice_on, load_model
from pipeplan.runtime.models.losses import Finding, find_losses
from pipeplan.runtime.models.shapes import output_shapes, tokens_per_sample
from pipeplan.runtime.models.spec import Model
from pipeplan.runtime.parallel import Share
from pipeplan.runtime.parallel.agreement import alike_in_groups, of_first
from pipeplan.runtime.parallel.device import Autocast, gathered, identity_of_device, rank_device, require_own_devices
from pipeplan.runtime.training.board import BoardLog
from pipeplan.runtime.training.checkpoint import (
    Checkpoints,
    OwnedParameter,
    ParameterChunk,
    TrainingState,
    whole_chunk,
)
from pipeplan.runtime.training.checkpoint_folder import CheckpointFolder
from pipeplan.runtime.training.compatibility import (
    identity_of,
    remark_on_experts,
    require_agreement,
    require_splittable,
    warn_of_waiting,
    warning_of_format,
    warning_of_overlap,
    warning_of_sizes,
)
from pipeplan.runtime.training.data import digest_of, num_mini_batches, require_mini_batches, with_data
from pipeplan.runtime.training.evaluation import Drawn, Evaluation, evaluating, require_same
from pipeplan.runtime.training.expert_loads import expert_loads
from pipeplan.runtime.training.kernel_segments import KnownBackend, SegmentBuilds, require_no_autocast, said_of
from pipeplan.runtime.training.master_copies import MASTER, LossScale, MasterCopies, narrowed
from pipeplan.runtime.training.options import (
    IS_RANK,
    LR_SCHEDULES,
    MOMENTUM,
    OPTIMIZERS,
    TrainOptions,
    throughput_of,
)
from pipeplan.runtime.training.sharded_state import ExchangingStage, ShardedStage, ShardedState, with_last_uses
from pipeplan.runtime.training.weights import Holder, WeightNames, read_weights, write_weights


def train_job(job: Report, context: RankContext) -> None:
    """The job of a rank that trains."""
    os.environ[IS_RANK] = str(context.rank)
    try:
        run_job(train, TrainOptions(**job["options"]), job, context)
    finally:
        del os.environ[IS_RANK]  # a launcher's process may be a rank again


def train(plan: Plan, options: TrainOptions, progress: Progress, on_event: OnEvent) -> RunResult:
    """Train for the steps asked for; every rank of the process group calls this.

    ``on_event`` is called on every rank as things happen, with the same. Raises RankError where an action fails, and
    UsageError, the same on every rank, where plan, model and options do not fit together.
    """
    options = options.with_grain_of(plan)
    model = model_of(options, plan.provenance.tokens_per_sample)
    require_mini_batches(model, plan.mini_batch)
    losses = losses_of(model, options, progress)
    trainer = Trainer(plan, losses.summed(model), options, progress)
    evaluation = trainer.evaluation()
    if options.init is not None:
        trainer.read_weights(options.init)
    first = trainer.resume()
    trainer.build_segments()
    known = Started(first, _versions(options), trainer.tokens_per_sample, trainer.as_planned)
    on_event(known)
    log = BoardLog(options.tensorboard, first) if options.tensorboard is not None and progress.rank == 0 else None
    if progress.rank == 0:  # only now: of a run that is refused there is nothing to know
        made_up = model.made_up and options.num_steps > 0
        for text in filter(None, (advice_on(model), losses.brief, _MADE_UP if made_up else "", *trainer.remarks)):
            tell(text)
    steps, timeline, evaluations = [], [], []
    for step in range(first, options.num_steps):
        rate = trainer.updater.learning_rate
        result, actions = trainer.step(step)
        steps.append(result)
        if options.trace:
            timeline.append(tuple(tuple(own) for own in trainer.all_ranks.gather(actions)))
        on_event(result)
        if log is not None:
            log.step(result, throughput_of(plan, trainer.options, known, result.iteration_ns), rate)
        if evaluation is not None and options.evaluates_after(step):
            evaluations.append(evaluation.run(step))
            on_event(evaluations[-1])
            if log is not None:
                log.evaluation(evaluations[-1])
        saves = options.saves_after(step) or trainer.stopping
        if saves and result.finite:  # what is lost must not push good ones out
            trainer.save()
        if trainer.stopping:
            break
    unwritten = "" if options.export_weights is None else trainer.write_weights(options.export_weights)
    peaks = trainer.all_ranks.gather(trainer.peak_memory_bytes())
    experts = expert_loads(trainer.stages.values(), trainer.all_ranks)
    stopped_by = trainer.asked_to_stop()
    if log is not None:
        log.close()
    trainer.close()
    progress.begin(Phase.DONE)
    return RunResult(
        tuple(steps),
        tuple(peaks),
        known.versions,
        tuple(timeline),
        unwritten=unwritten,
        tokens_per_sample=known.tokens_per_sample,
        as_planned=known.as_planned,
        evaluations=tuple(evaluations),
        experts=experts,
        stopped_by=stopped_by,
    )


def model_of(options: TrainOptions, planned_sequence: int | None = None) -> Model:
    """The model to train, its sequences as long as planned where options do not say. Raises UsageError without loss."""
    model = load_model(
        options.model.value if isinstance(options.model, PythonValue) else options.model,
        sequence=options.sequence,
        planned_sequence=planned_sequence,
        grain=options.grain,
        seed=options.seed,
    )
    model = with_data(model, options.data, options.seed)
    if not any(block.loss for block in model.blocks):
        raise UsageError(
            f"model {str(options.model)!r} has no loss to train with: of an nn.Sequential give targets beside the "
            "input; any other module must return its loss, a scalar (docs/training.md)"
        )
    return model


def losses_of(model: Model, options: TrainOptions, progress: Progress) -> Finding:
    """What rank 0 finds out about the model's losses. Raises UsageError, the same on every rank."""
    progress.begin(Phase.LOADING)
    own = _found(model, options) if progress.rank == 0 else None
    progress.begin(Phase.CONNECTING)
    with lost_others(progress):
        found: Finding | str | None = of_first(own)
    if isinstance(found, str):
        raise UsageError(found)
    assert found is not None, "rank 0 has found something, or why there is nothing"
    return found


_MADE_UP = "samples are made up; --data trains on yours"


def _found(model: Model, options: TrainOptions) -> Finding | str:
    """What is found, or why training is refused."""
    device = rank_device(options.device, options.transport, options.num_threads)
    try:
        return find_losses(model, seed=options.seed, device=device)
    except UsageError as error:
        return str(error)


class Trainer:
    """One rank of a training run: its stages, parameters and optimizer.

    Where devices share sequences, blocks are those of ``run_as``, of pieces, and all else is of the whole ``model``.

    Construction is collective: all ranks compare what they run, then connect. Raises UsageError where plan, model or
    options do not fit together, or differ between ranks, and RankError where connecting fails. ``remarks`` are what a
    user should know of them before the first step, on rank 0.
    """

    def __init__(self, plan: Plan, model: Model, options: TrainOptions, progress: Progress) -> None:
        progress.begin(Phase.LOADING)
        options = options.by_plan(plan)
        self.rank, self.model, self.options, self.progress = progress.rank, model, options, progress
        self.run_as = model.shared_by(max(stage.context for stage in plan.stages))
        self.dtype = dtype = dtype_of(options)
        self.inference = plan.is_inference
        standing = Counter(chain.from_iterable([*stage.devices] * len(stage.segments) for stage in plan.stages))
        self.turns = max(standing.values(), default=0)
        asked = [block.id for block in model.blocks], self.run_as.edges, model.name, self.run_as.divides_shards
        run_as = self.run_as
        if plan.players:
            tied = [{block for block, _ in group} for group in model.tied]
            programs: tuple[Program, ...] = (program_of(plan, self.rank, *asked, tied),)
        else:
            programs = programs_of(plan, *asked)
        require_splittable(plan, run_as)
        if options.instructions is not None:
            found_at(options.instructions, "--instructions")
        custom_ops = custom_ops_of(plan)
        self.program = programs[0 if plan.players else self.rank]
        self.device = rank_device(options.device, options.transport, options.num_threads)
        self.autocast = autocast_of(options)
        specs = travelling(self.program, run_as, dtype, self.autocast)
        lines = self.program.lines.union(part.devices for part in self.program.custom_ops.values())
        lines = lines.union(division.ranks for division in self.program.divisions)
        self.groups = ProcessGroups(lines, progress, alone=self.program.is_alone)
        self.modules = self._build()
        progress.begin(Phase.CONNECTING)
        timeout = longest_wait(options.timeout_ns, progress.board.machines)
        with lost_others(self.progress):
            require_agreement(self.rank, plan, model, options, self.program, specs)
            self.tokens_per_sample, self.as_planned, self.compared = None, True, False
            self.remarks: list[str] = []
            self.stopping = 0
            if self.rank == 0:
                sizes = warning_of_sizes(on_device(plan, self.rank), programs, run_as, specs, dtype)
                self.as_planned = sizes is None
                experts = remark_on_experts(run_as, self.program.stages.values(), self.modules)
                said = warning_of_format(plan, options), warning_of_overlap(plan), sizes, experts
                self.remarks += filter(None, said)
                self.tokens_per_sample = tokens_per_sample(model, dtype)
            self.tokens_per_sample, self.as_planned = of_first((self.tokens_per_sample, self.as_planned))
            self.all_ranks = AllRanks(self.device, progress, timeout)
            if options.transport == "nccl":
                require_own_devices(self.all_ranks.gather(identity_of_device(self.device)), options.transport)
            self.groups.connect(options.transport, timeout)
            divisions = self.program.divisions
            self.shared = SharedParameters(
                *(run_as, self.program.holders, self.modules, self.rank, options.transport, timeout, divisions),
                self.program.stage_of,
                alone=self.program.is_alone,
            )
            copies = self.shared.copies()
            if not alike_in_groups(self.rank, {ranks: str(own) for ranks, own in copies.items()}):
                require_equal_copies(self.all_ranks.gather(copies))
            exact = self._narrowed()
            self.sharded = ShardedState(self.shared.divided, self.groups, self.rank, self.shared.buckets)
            self.shared.divide(self.sharded.own)
            self.masters = MasterCopies(self.unique_parameters(), None if exact is None else self._exact(exact))
            self.channels = Channels(self.program, specs, self.device, options.transport, timeout)
        self.exchanged: dict[int, ShardedStage | None] = {}
        self.stages = {index: self._stage(index) for index in self.program.stages}
        self.specs = specs
        self.custom_runners = {
            index: CustomOpRunner(
                part, self.program, custom_ops[part.kind], self.groups.of(part.devices), specs, self.device
            )
            for index, part in self.program.custom_ops.items()
        }
        self.executor = self._executor(self.program)
        self.updater = Updater(self.stepped(), options)
        self.scale = LossScale() if options.scales_loss else None
        self.checkpoints = self._checkpoints()

    def step(self, step: int, *, update: bool = True) -> tuple[StepResult, list[TimedAction]]:
        """Train on mini-batch number ``step``: run the program, sum gradients of copies, step the optimizer.

        Without ``update`` gradients add up and parameters stay. A plan of inference only runs forwards. Collective;
        returns the step's result, the same on all ranks, and when this rank's actions ran. Raises RankError.
        """
        self.progress.step = step
        drawn = self.drawn(self.model, step)
        if self.inference:
            return self._infer(step, drawn)
        for parameter in (*self.parameters().values(), *self.unique_parameters(), *self.stepped()):
            parameter.grad = None
        scale = 1.0 if self.scale is None else self.scale.value
        for stage in self.stages.values():
            stage.loss_scale = scale
        self.all_ranks.begin()
        spans = self.executor.run(drawn.samples)
        self._reduce()
        summed = self.all_ranks.clock.mark()
        self.masters.take_gradients(scale)
        overflows = self.scale is not None and self._overflows(self.scale)
        norm = None if overflows else self._clip()
        self.progress.begin(Phase.UPDATING)
        if update and not overflows:
            self.updater.step()
            self._gather()
        updated = self.all_ranks.clock.mark()
        actions = self.all_ranks.resolve(spans)
        ends = self.all_ranks.at(summed), self.all_ranks.at(updated)
        return self._report(step, actions, ends, norm, drawn.digest), actions

    def _infer(self, step: int, drawn: Drawn) -> tuple[StepResult, list[TimedAction]]:
        """Forwards alone of a mini-batch, with nothing kept for a backward."""
        self.all_ranks.begin()
        with evaluating(self.stages.values(), self.modules.values()):
            spans = self.executor.run(drawn.samples)
        ended = self.all_ranks.clock.mark()
        actions = self.all_ranks.resolve(spans)
        ends = self.all_ranks.at(ended), self.all_ranks.at(ended)
        return self._report(step, actions, ends, None, drawn.digest), actions

    def asked_to_stop(self) -> int:
        """The signal that has come to some rank until now, after the last step, too; 0 if none has. Collective."""
        asked: list[int] = self.all_ranks.gather(STOPPING.take())
        stopped = max(self.stopping, *asked)
        STOPPING.ended = stopped > 0
        return stopped

    def build_segments(self) -> None:
        """Have kernel backends build what they run of this rank's stages, all ranks in turns; collective.

        Raises:
            UsageError: one cannot, or its numbers are not eager torch's; the same on every rank.
        """
        parts = self.program.stages
        require_no_autocast([*parts.values()], casts=self.autocast is not None)
        if not self.turns:
            return
        said: list[str] = []
        own = self._segments(said)
        for _ in range(self.turns):  # whoever waits for others does so for one segment at a time
            self.progress.begin(Phase.LOADING)
            problem = ""
            try:
                next(own, None)
            except ExecutionError as error:
                problem = str(error)
            with lost_others(self.progress):
                problems = gathered(problem)
            if first := next(filter(None, problems), None):
                raise UsageError(first)
        for _ in own:
            pass
        texts = chain.from_iterable(self.all_ranks.gather(said))
        for text in texts if self.rank == 0 else ():
            tell(text)

    def _segments(self, said: list[str]) -> Iterator[None]:
        """Build one after another; what is built of each stage is ``said``."""
        known = {name: KnownBackend(**each) for name, each in self.options.kernels.items()}
        for index, part in self.program.stages.items():
            if not part.segments:
                continue
            runner = self.stages[index]
            samples = self.model.mini_batch(part.samples, 0, self.options.seed, dtype=self.dtype, device=self.device)
            shapes = output_shapes(self.run_as, part.samples, self.dtype)
            builds = SegmentBuilds(
                part, runner.modules, runner.specs, shapes, samples, known, self.dtype, self.device, self.inference
            )
            built = []
            for segment, (run, ns) in zip(part.segments, builds.each(), strict=True):
                built.append((run, segment.backend, ns))
                yield
            runner.segments, runner.inference = [run for run, _, _ in built], self.inference
            said += filter(None, [said_of(index, built)])

    def evaluation(self) -> Evaluation | None:
        """What evaluates, if options say on what. Raises UsageError."""
        options, flag, size = self.options, "--eval-data", self.program.mini_batch
        if options.eval_data is None:
            return None
        model = with_data(self.model, options.eval_data, options.seed, flag, in_order=True)
        require_mini_batches(model, size)
        count = num_mini_batches(model, size, options.eval_batches, f"{flag} {options.eval_data}")
        return self.evaluation_of(partial(self.drawn, model), count)

    def evaluation_of(self, draw: Callable[[int], Drawn], count: int) -> Evaluation:
        """What evaluates on so many mini-batches, which ``draw`` gives by their numbers."""
        modules, forwards = [*self.modules.values()], self._executor(self.program.forwards())
        return Evaluation(draw, count, forwards, self.stages, modules, self.all_ranks)

    def drawn(self, model: Model, step: int) -> Drawn:
        """Mini-batch number ``step`` of a model's; nothing if no block here takes samples or has the loss."""
        self.progress.begin(Phase.SAMPLING)
        specs = [spec for stage in self.stages.values() for spec in stage.specs.values()]
        wanted = {name for spec in specs for name in spec.samples}
        draw = (self.options.seed, step)
        if not wanted and not any(spec.loss for spec in specs):
            return Drawn(MiniBatch({}, 1, draw))
        seed, samples = self.options.seed, self.program.mini_batch
        batch = model.mini_batch(samples, step, seed, dtype=self.dtype, device=self.device)
        tensors = {name: tensor for name, tensor in batch.items() if name in wanted}
        count = model.predictions(batch)
        return Drawn(MiniBatch(tensors, count, draw), count, digest_of(model, batch))

    def resume(self) -> int:
        """Go on from the last checkpoint if asked to: the number of steps done. Collective. Raises UsageError."""
        if self.checkpoints is None:
            return 0
        done = self.checkpoints.begin(self.options.resume)
        self._gather()
        if done >= self.options.num_steps:
            raise UsageError(
                f"--steps {self.options.num_steps}: {self.options.checkpoint} holds {done} steps, and --steps is the "
                "total; give more"
            )
        return done

    def save(self) -> None:
        """Write a checkpoint after the last step. Collective. Raises RankError."""
        assert self.checkpoints is not None, "options name a folder"
        self.checkpoints.save(self.progress.step + 1)

    def read_weights(self, path: str) -> None:
        """Take the parameters from a file of weights. Raises UsageError, the same on every rank."""
        self.progress.begin(Phase.RESUMING)
        names = WeightNames.of(self.model, self.kept_dtype)
        read_weights(path, names, self.model.name, self._weights(names, stored=False))
        self._gather()

    def write_weights(self, path: str) -> str:
        """Write all ranks' parameters into one file; why it is not there, if it is not. Collective."""
        self.progress.begin(Phase.SAVING)
        names = WeightNames.of(self.model, self.kept_dtype)
        held = list(self._weights(names, stored=True))
        return write_weights(path, names, held, self.all_ranks, self.rank)

    def parameters(self) -> dict[str, nn.Parameter]:
        """This rank's parameters as ``block.name``, of a share ``block[0/4].name``; tied ones under each name."""
        return {
            f"{share}.{name}": parameter
            for share, module in self.modules.items()
            for name, parameter in module.named_parameters(remove_duplicate=False)
        }

    def unique_parameters(self) -> list[nn.Parameter]:
        """This rank's parameters, each once; of those that ranks divide, its rows."""
        return list(dict.fromkeys(map(self.sharded.own, self.parameters().values())))

    def stepped(self) -> list[nn.Parameter]:
        """What an optimizer steps of :meth:`unique_parameters`: master copies, where there are some."""
        return list(map(self.masters.of, self.unique_parameters()))

    def peak_memory_bytes(self) -> int:
        """What the allocator held at most (CUDA), or the most resident memory of this process (CPU)."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return most_resident_bytes()

    def close(self) -> None:
        """Drop works and groups; what outlives the process group may die with it at exit."""
        if self.checkpoints is not None:
            self.checkpoints.close()
        self.channels.close()
        self.shared.close()
        self.groups.close()
        self.all_ranks.close()

    def _build(self) -> dict[Share, nn.Module]:
        shares = dict.fromkeys(share for part in self.program.stages.values() for share in part.shares)
        seed, device, dtype = self.options.seed, self.device, self.kept_dtype
        return {
            share: self.run_as.build_share(share, seed, self.groups.shards(share), dtype=dtype, device=device)
            for share in shares
        }

    @property
    def kept_dtype(self) -> torch.dtype:
        """The number format of what is kept of parameters, in checkpoints, too: of master copies, where there are."""
        return MASTER if self.options.keeps_masters else self.dtype

    def _narrowed(self) -> dict[int, Tensor] | None:
        """Have blocks compute in fewer bits than their parameters are kept in; the numbers of these, if so."""
        if self.options.gradients is None:
            return None
        return narrowed(self.modules.values(), self.dtype, getattr(torch, self.options.gradients))

    def _exact(self, known: Mapping[int, Tensor]) -> Callable[[nn.Parameter], Tensor]:
        """What gives the numbers of a parameter, or of this rank's rows of one, before it was rounded."""
        rows = {id(each.own): (known[whole], each) for whole, each in self.sharded.rows.items()}

        def exact(parameter: nn.Parameter) -> Tensor:
            if id(parameter) not in rows:
                return known[id(parameter)]
            whole, own = rows[id(parameter)]
            return whole[own.begin : own.begin + len(parameter)].clone()

        return exact

    def _checkpoints(self) -> Checkpoints | None:
        options = self.options
        if options.checkpoint is None:
            return None
        identity = identity_of(self.model, options, self.program.mini_batch)
        buffers = {".".join(holder): tensor for holder, tensor in self._buffers().items()}
        updater = self.updater
        held = TrainingState(self._owned(), buffers, updater.optimizer, updater.schedule, identity, self.scale)
        folder = CheckpointFolder(options.checkpoint, options.keep_checkpoints)
        return Checkpoints(folder, held, self.all_ranks, self.progress)

    def _owned(self) -> list[OwnedParameter]:
        """This rank's parameters, each once, tied ones by the first of the names they have in the model."""
        first = {holder: group[0] for group in self.run_as.tied for holder in group}
        shapes = self.run_as.parameter_shapes()
        stored = {id(each) for each in self.shared.counted(self.unique_parameters())}
        found: dict[int, OwnedParameter] = {}
        for share, module in self.modules.items():
            for name, parameter in module.named_parameters():
                holder = first.get((share.block, name), (share.block, name))
                part, own, rows = self.run_as.part_of(share, name), self.sharded.own(parameter), None
                if own is not parameter:
                    rows = self.sharded.rows[id(parameter)].place
                kept = self.masters.of(own)
                owned = OwnedParameter(holder, kept, torch.Size(shapes[holder]), part, id(own) in stored, rows)
                found.setdefault(id(parameter), owned)
        return list(found.values())

    def _weights(self, names: WeightNames, *, stored: bool) -> Iterator[tuple[str, Sequence[ParameterChunk]]]:
        """Where this rank's tensors lie in a file of weights: all, or those that it has to store."""
        for owned in self._owned():
            if owned.stored or not stored:
                yield names.name_of[owned.holder], owned.pieces(owned.parameter.detach())
        buffers = {holder: each for holder, each in self._buffers().items() if holder in names.name_of}
        if stored:
            everyones = self.all_ranks.gather(list(buffers))
            elsewhere = {holder for others in everyones[: self.rank] for holder in others}
            buffers = {holder: each for holder, each in buffers.items() if holder not in elsewhere}
        yield from ((names.name_of[holder], [whole_chunk(tensor)]) for holder, tensor in buffers.items())

    def _buffers(self) -> dict[Holder, Tensor]:
        """This rank's buffers that outlive the process, by block and name."""
        return {
            (share.block, name): tensor
            for share, module in self.modules.items()
            for name, tensor in module.state_dict().items()
            if name not in dict(module.named_parameters(remove_duplicate=False))
        }

    def _stage(self, index: int) -> StageRunner:
        part = self.program.stages[index]
        specs = {block: self.run_as.block(block) for block in part.blocks}
        modules = {share.block: self.modules[share] for share in part.shares}
        layouts = StageLayouts.of(part, self.run_as, self.groups.along)
        halves = any(step.action.stage == index and len(step.samples) > 1 for step in self.program.steps)
        summed = replace(part, buckets=()) if halves else part  # backward passes blocks twice where forward did
        state = self.exchanged[index] = self.sharded.stage(summed, self.program.num_gradients(index))
        return StageRunner(part, modules, specs, self.autocast, layouts=layouts, state=state)

    def _executor(self, program: Program) -> Executor:
        told = {i: ExchangingStage(self.stages[i], state) for i, state in self.exchanged.items() if state is not None}
        return Executor(
            with_last_uses(program),
            {**self.stages, **told, **self.custom_runners},
            self.channels,
            self.specs,
            self.progress,
            self.all_ranks.clock,
            self.options.blocking,
            self.options.transport == "gloo",
            traced=self.options.trace,
            exchange=self._exchange,
        )

    def _exchange(self, step: ProgramStep) -> None:
        """Run what exchanges the state of a stage."""
        if (state := self.exchanged[step.action.stage]) is not None:
            state.run(step)

    def _gather(self) -> None:
        """Round what has changed of master copies; make parameters whole again of which ranks have changed rows."""
        self.masters.write()
        if self.sharded.rows:
            with lost_others(self.progress):
                self.sharded.gather()

    def _reduce(self) -> None:
        if self.shared.across_ranks:
            self.progress.begin(Phase.REDUCING)
            with lost_others(self.progress):
                self.sharded.reduce()
                self.shared.sum_gradients()
                self.sharded.take_sums()

    def _clip(self) -> float | None:
        """The norm of all gradients, if they are clipped."""
        if self.options.clip_norm is None:
            return None
        self.progress.begin(Phase.CLIPPING)
        counted = list(map(self.masters.of, self.shared.counted(self.unique_parameters())))
        return clip_gradients(self.stepped(), counted, self.options.clip_norm, self.all_ranks.sum)

    def _overflows(self, scale: LossScale) -> bool:
        """Whether some rank has gradients that are no numbers, so that the step is left out. Collective."""
        used, found = scale.value, self.all_ranks.sum(0.0 if self.masters.are_finite() else 1.0) > 0
        scale.update(found)
        if found and self.rank == 0:
            tell(
                f"step {self.progress.step}: gradients in float16 overflow with a loss scale of {used:g}; parameters "
                f"stay as they are, and the scale is {scale.value:g} now"
            )
        return found

    def _report(
        self, step: int, actions: list[TimedAction], ends: tuple[int, int], norm: float | None, digest: int | None
    ) -> StepResult:
        """Losses added up over the ranks; the iteration from the first compute action's start to the last update.

        ``ends`` are when this rank's gradients were summed, and when its parameters were stepped and gathered. In
        inference the last action ends it.
        """
        losses = [loss for loss in (stage.take_loss() for stage in self.stages.values()) if loss is not None]
        loss = float(sum(loss.double() for loss in losses))
        summed_ns, updated_ns = ends
        computed = [each for each in actions if "_" not in self.program.texts[each[0]]]  # a message is 1SEND_F0
        worked = extent(computed, 0 if self.inference else updated_ns)
        self.progress.begin(Phase.REPORTING)
        lacks = [stage.lack for stage in self.stages.values() if stage.lack is not None and not self.compared]
        self.compared = True
        found = self.all_ranks.gather((loss, worked, updated_ns - summed_ns, lacks, STOPPING.take(), digest))
        self.stopping = max(asked for *_, asked, _ in found)
        require_same([each for *_, each in found], f"step {step}")
        if self.rank == 0:
            warn_of_waiting([each for *_, lacking, _, _ in found for each in lacking])
        iteration_ns = iteration_of(each for _, each, *_ in found)
        return StepResult(step, sum(entry[0] for entry in found), iteration_ns, max(entry[2] for entry in found), norm)


def travelling(
    program: Program, model: Model, dtype: torch.dtype, autocast: Autocast | None = None
) -> dict[str, TensorSpec]:
    """Shape and format of every block output that leaves its stage. Raises UsageError as :meth:`TensorSpec.between`."""
    names = {name for names in program.tensors.values() for name in names}
    size = program.microbatch_size
    once, twice = (output_shapes(model, samples, dtype, autocast) for samples in (size, 2 * size))
    found = {
        name: TensorSpec.between(name, once[name][0], twice[name][0], size, once[name][1]) for name in sorted(names)
    }
    return {name: spec.with_streams(model.streams_of(name)) for name, spec in found.items()}


def dtype_of(options: TrainOptions) -> torch.dtype:
    """The number format of parameters."""
    dtype: torch.dtype = getattr(torch, options.number_format)
    return dtype


def autocast_of(options: TrainOptions) -> Autocast | None:
    """What blocks run under, by the recipe."""
    return None if options.autocast is None else Autocast(options.device, getattr(torch, options.autocast))


def _versions(options: TrainOptions) -> dict[str, str]:
    found = {"pipeplan": __version__, "torch": torch.__version__, "python": platform.python_version()}
    if options.device == "cuda":
        found["device"] = torch.cuda.get_device_name()
    return found


# Updates ------------------------------------------------------------------------------------------------------------


class Updater:
    """A rank's optimizer and learning-rate schedule; without parameters both are None. Raises UsageError."""

    def __init__(self, parameters: Sequence[nn.Parameter], options: TrainOptions) -> None:
        self.optimizer = _optimizer(parameters, options) if parameters else None
        self.schedule = _schedule(self.optimizer, options) if self.optimizer is not None else None

    @property
    def learning_rate(self) -> float | None:
        """That of the next update, of the first group of parameters."""
        return None if self.optimizer is None else float(self.optimizer.param_groups[0]["lr"])

    def step(self) -> None:
        """One update with the gradients that are there, at this step's learning rate."""
        if self.optimizer is not None and self.schedule is not None:
            self.optimizer.step()
            self.schedule.step()


def clip_gradients(
    parameters: Sequence[nn.Parameter],
    counted: Sequence[nn.Parameter],
    most: float,
    over_ranks: Callable[[float], float],
) -> float:
    """Scale gradients such that their norm over the whole model is at most ``most``; as torch's ``clip_grad_norm_``.

    ``counted`` are those of this rank's parameters that no other rank counts; ``over_ranks`` adds up a number of every
    rank. Returns the norm before, the same on all ranks.
    """
    own = get_total_norm([parameter.grad for parameter in counted if parameter.grad is not None])
    norm = math.sqrt(over_ranks(float(own) ** 2))
    if parameters:
        clip_grads_with_norm_(parameters, most, torch.tensor(norm, dtype=torch.float64, device=parameters[0].device))
    return norm


def factor_at(shape: str, num_warmup: int, num_steps: int, step: int) -> float:
    """What the learning rate is multiplied by in a step.

    It grows evenly over the first ``num_warmup`` steps, up to 1 in the last of them; then it stays (constant), falls
    evenly (linear) or as half a cosine, and would reach 0 in step ``num_steps``, which is the first not to be run.
    """
    if step < num_warmup:
        return (step + 1) / num_warmup
    done = min(1.0, (step - num_warmup) / max(1, num_steps - num_warmup))
    return {"constant": 1.0, "linear": 1.0 - done, "cosine": (1.0 + math.cos(math.pi * done)) / 2}[shape]


def _optimizer(parameters: Sequence[nn.Parameter], options: TrainOptions) -> Optimizer:
    """Built-in names are torch's classes; what the command line does not set is as their defaults have it."""
    asked = {"lr": options.learning_rate, "weight_decay": options.weight_decay}
    given = {name: value for name, value in asked.items() if value is not None}
    name = options.optimizer or ADAMW
    if name == "momentum":
        given["momentum"] = MOMENTUM
    path = OPTIMIZERS.get(name, name) if isinstance(name, str) else name
    made = made_by(path, "--optimizer", parameters, **given)
    if not isinstance(made, Optimizer):
        raise UsageError(f"--optimizer {str(path)!r} returned {type(made).__name__}, not a torch.optim.Optimizer")
    return made


def _schedule(optimizer: Optimizer, options: TrainOptions) -> LRScheduler:
    shape = options.lr_schedule
    if isinstance(shape, str) and shape in LR_SCHEDULES:
        return LambdaLR(optimizer, partial(factor_at, shape, options.warmup_steps, options.schedule_steps))
    if options.warmup_steps:
        raise UsageError(
            f"--warmup-steps {options.warmup_steps}: --lr-schedule {shape} has a warmup of its own or none"
        )
    made: Any = made_by(shape, "--lr-schedule", optimizer)
    if not isinstance(made, LRScheduler):
        raise UsageError(f"--lr-schedule {str(shape)!r} returned {type(made).__name__}, not a torch.optim LRScheduler")
    return made
