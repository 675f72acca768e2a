"""A rank of the executor's tests: runs many plans in one process group and compares with unsplit training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from pipeplan.errors import UsageError
from pipeplan.files import Plan, parse
from pipeplan.runtime.emulation.emulate import emulate
from pipeplan.runtime.launch.__main__ import main
from pipeplan.runtime.launch.job import RankContext, RunOptions
from pipeplan.runtime.launch.status import Phase
from pipeplan.runtime.models.spec import Model
from pipeplan.runtime.parallel import Share
from pipeplan.runtime.parallel.weight_grads import WeightGradQueue
from pipeplan.runtime.training.expert_loads import expert_loads
from pipeplan.runtime.training.options import TrainOptions
from pipeplan.runtime.training.sharded_state import StateUnit
from pipeplan.runtime.training.trainer import Trainer, losses_of, model_of
from runtime_support import models as runtime_models
from runtime_support.known import known_once
from runtime_support.plans import Unsplit


def compare(job: Mapping[str, Any], context: RankContext) -> None:
    """Report, per case, how far losses, gradients and parameters of every step are from unsplit training."""
    torch.set_num_threads(1)
    with known_once():
        compare_all(job, context)


def compare_all(job: Mapping[str, Any], context: RankContext) -> None:
    for name, case in job["cases"].items():
        kind = TrainOptions if "model" in case["options"] else RunOptions
        options = kind(**case["options"])
        plan = parse(case["plan"], Plan)
        context.progress.board.programs = plan.programs
        context.report({"event": "case", "name": name, **run_case(name, plan, options, context)})
        dist.barrier()


def run_case(name: str, plan: Plan, options: RunOptions, context: RankContext) -> dict[str, Any]:
    """What a case is for: ranks that do not agree must all refuse alike; others emulate, or train."""
    if not isinstance(options, TrainOptions):
        emulated = emulate(plan, options, context.progress, lambda step: None)
        return {"iterations_ns": [step.iteration_ns for step in emulated.steps]}
    if name.startswith("refused"):
        seed = options.seed + (context.rank == 2 and "options" in name)
        model = refused_model(name, context.rank)
        try:
            Trainer(plan, model, replace(options, seed=seed), context.progress)
        except UsageError as error:
            return {"refused": str(error)}
        return {"refused": None}
    if name.startswith("mean"):
        written = model_of(options)
        model = losses_of(written, options, context.progress).summed(written)
        return train_both(plan, model, options, context, replace(written, predictions=lambda batch: 1))
    model = runtime_models.branches() if options.model == "branches" else model_of(options)
    return train_both(plan, model, options, context)


def refused_model(name: str, rank: int) -> Model:
    """A model that is not the same on all ranks, unless the options differ."""
    if "tensors" in name:
        return runtime_models.odd(rank)
    if "parameters" in name:
        return runtime_models.unlike(rank, wider="shapes" in name)
    return runtime_models.breaking(lambda: None)


def train_both(
    plan: Plan, model: Model, options: TrainOptions, context: RankContext, whole: Model | None = None
) -> dict[str, Any]:
    """Largest distances over steps; what is compared on this rank is its own part of the model."""
    trainer = Trainer(plan, model, options, context.progress)
    trainer.build_segments()
    unsplit = _unsplit_steps(whole or model, options, plan.mini_batch)
    gradients, begun = _watched(trainer), _begun_inside(trainer)
    _MOVED.clear()
    losses, norms, distances = [], [], {"loss": 0.0, "norm": 0.0, "gradient": 0.0, "parameter": 0.0}
    for step in range(options.num_steps):
        result, _ = trainer.step(step)
        expected = unsplit[step]
        losses.append(result.loss)
        norms.append(result.grad_norm)
        distances["loss"] = max(distances["loss"], abs(result.loss - expected.loss))
        distances["norm"] = max(distances["norm"], abs((result.grad_norm or 0.0) - expected.norm))
        for name, share, parameter in _held(trainer):
            part, wholes = model.part_of(share, name), expected.parameters[f"{share.block}.{name}"]
            own, gradient = (None if each is None else part.within(each) for each in wholes)
            kept, found = trainer.sharded.own(parameter), trainer.sharded.rows.get(id(parameter))
            if found is None or parameter.untyped_storage().nbytes():
                distances["parameter"] = max(distances["parameter"], _distance(parameter, own))
            if found is not None:
                rows = slice(found.begin, found.begin + len(kept))
                own, gradient = (None if each is None else each[rows] for each in (own, gradient))
            distances["gradient"] = max(distances["gradient"], _distance(kept.grad, gradient))
            distances["parameter"] = max(distances["parameter"], _distance(kept, own))
    moved = {" ".join(map(str, ranks)): count for ranks, count in _MOVED.items()}
    evaluation = trainer.evaluation_of(lambda _: trainer.drawn(model, options.num_steps), 1)
    evaluated = evaluation.run(options.num_steps - 1)
    distances["evaluation"] = abs(evaluated.loss - unsplit[-1].evaluated)
    shapes: dict[str, list[list[int]]] = {}
    for name, share, parameter in _held(trainer):
        shapes.setdefault(f"{share.block}.{name}", []).append(list(parameter.shape))
    counted = sum(each.numel() for each in trainer.shared.counted(trainer.unique_parameters()))
    held_parameters = trainer.unique_parameters()
    num_buffers = trainer.executor.channels.buffers.num_made
    state = _state_of(trainer, gradients)
    routed = {str(width): rows for width, rows in trainer.groups.routed.items()}
    loads = [asdict(each) for each in expert_loads(trainer.stages.values(), trainer.all_ranks)]
    trainer.close()
    return {
        "losses": losses,
        "norms": norms,
        "distances": distances,
        "parameters": sorted(shapes),
        "shapes": shapes,
        "counted": counted,
        "bytes": sum(each.nbytes for each in held_parameters),
        "num_buffers": num_buffers,
        "held": state,
        "begun": begun,
        "routed": routed,
        "moved": moved,
        "experts": loads,
    }


def _watched(trainer: Trainer) -> list[int]:
    """Gets the bytes of gradients as they are before some are reduced, and when the programs have ended."""
    found = list[int]()

    def watched(reduce: Callable[[], None]) -> None:
        found.append(_bytes([each.grad for each in trainer.parameters().values()]))
        reduce()

    once = [unit for unit in trainer.sharded.units if unit.level == 1]
    for each in (trainer.sharded, *once):
        each.reduce = partial(watched, each.reduce)  # type: ignore[method-assign]
    return found


def _begun_inside(trainer: Trainer) -> list[tuple[str, bool]]:
    """Gets where sums of gradients have begun that are summed once in an iteration, while programs run.

    And whether more of the action was to come, of its backward, or of what waits for W.
    """
    found = list[tuple[str, bool]]()

    def watched(reduce: Callable[[], None]) -> None:
        at = trainer.progress.board.read(trainer.rank)
        if at.phase in (Phase.RUNNING, Phase.WAITING):
            more = torch._C._current_graph_task_id() != -1 or any(map(len, _RUNNING))
            found.append((trainer.program.texts[at.counter], more))
        reduce()

    for each in (*(bucket for _, bucket in trainer.shared.buckets), *trainer.sharded.units):
        if each.level < 2:
            each.reduce = partial(watched, each.reduce)  # type: ignore[method-assign]
    return found


_RUNNING: list[WeightGradQueue] = []


def _noted(self: WeightGradQueue, run: Callable[[WeightGradQueue], None] = WeightGradQueue.run) -> None:
    _RUNNING.append(self)
    run(self)
    _RUNNING.remove(self)


WeightGradQueue.run = _noted  # type: ignore[method-assign]


_MOVED = Counter[tuple[int, ...]]()
"""{ranks: bytes} that this one sends around a ring of them of gradients and parameters, of what is handed over."""


def _moved(group: dist.ProcessGroup | None, array_bytes: int, passes: int) -> None:
    """An array of all together goes around but for each rank's own share, once or twice."""
    ranks = dist.get_process_group_ranks(group)
    _MOVED[tuple(ranks)] += passes * (len(ranks) - 1) * array_bytes // len(ranks)


def _summed(total: torch.Tensor, *rest: Any, sum_: Callable[..., Any] = dist.all_reduce, **how: Any) -> Any:
    if how.get("async_op") and total.is_floating_point():  # those of gradients, but for whether there are any
        _moved(how["group"], total.nbytes, 2)
    return sum_(total, *rest, **how)


def _scattered(self: StateUnit, reduce: Callable[[StateUnit], None] = StateUnit.reduce) -> None:
    reduce(self)
    if self._reducing is not None:
        sent = self._reducing.sent
        flags = len(sent) * len(self.rows) * sent.itemsize  # whether there are any gradients
        _moved(self._group.group, sent.nbytes - flags, 1)


def _gathered(self: StateUnit, gather: Callable[[StateUnit], None] = StateUnit.gather) -> None:
    gather(self)
    assert self._gathering is not None
    _moved(self._group.group, self._gathering.found.nbytes, 1)


dist.all_reduce, StateUnit.reduce, StateUnit.gather = _summed, _scattered, _gathered  # type: ignore[method-assign]


def _state_of(trainer: Trainer, gradients: Sequence[int]) -> dict[str, int]:
    """Bytes of what is kept between steps; of gradients also before they are reduced."""
    own, optimizer = trainer.unique_parameters(), trainer.updater.optimizer
    kept = [] if optimizer is None else [each for state in optimizer.state.values() for each in state.values()]
    return {
        "parameter_bytes": _bytes([*trainer.parameters().values(), *own]),
        "gradient_bytes": max([*gradients, _bytes([each.grad for each in own])]),
        "optimizer_bytes": _bytes([each for each in kept if each.dim()]),
    }


def _bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Of their storages, each once."""
    storages = (each.untyped_storage() for each in tensors if each is not None)
    return sum({each.data_ptr(): each.nbytes() for each in storages if each.nbytes()}.values())


@dataclass(frozen=True, slots=True)
class _UnsplitStep:
    """What an unsplit run has after a step: parameters, as ``block.name``, with their gradients."""

    loss: float
    norm: float
    parameters: dict[str, tuple[torch.Tensor, torch.Tensor | None]]
    evaluated: float


def _unsplit_steps(model: Model, options: TrainOptions, mini_batch: int) -> list[_UnsplitStep]:
    """All steps of the unsplit run, which the cases with the same training share."""
    key = (model.name, model.loss_of, str(options.as_json()), mini_batch)
    if key not in _KNOWN:
        unsplit, _KNOWN[key] = Unsplit(model, options), []
        for step in range(options.num_steps):
            loss = unsplit.step(step, mini_batch)
            held = {name: (each.detach().clone(), each.grad) for name, each in unsplit.parameters().items()}
            last = step == options.num_steps - 1
            evaluated = unsplit.evaluated(step + 1, mini_batch) if last else 0.0
            _KNOWN[key].append(_UnsplitStep(loss, unsplit.norm, held, evaluated))
    return _KNOWN[key]


_KNOWN: dict[tuple[object, ...], list[_UnsplitStep]] = {}


def _held(trainer: Trainer) -> list[tuple[str, Share, torch.nn.Parameter]]:
    """What this rank has of the model's parameters; tied ones under each of their names."""
    return [
        (name, share, parameter)
        for share, module in trainer.modules.items()
        for name, parameter in module.named_parameters(remove_duplicate=False)
    ]


def _distance(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    if a is None or b is None:
        return 0.0 if a is b else float("inf")
    return float((a.detach().cpu() - b.detach().cpu()).abs().max()) if a.numel() else 0.0


if __name__ == "__main__":
    main()
