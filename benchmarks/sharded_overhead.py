"""What sharded state costs beside torch's ``fully_shard``.

    python benchmarks/sharded_overhead.py                 # prints the table of docs/benchmarks/runs.md; some minutes
    python benchmarks/sharded_overhead.py --pairs 40 --levels 3 --widths 256
    python benchmarks/sharded_overhead.py --driven --levels 2,3
    python benchmarks/sharded_overhead.py --models gpt2-tiny,gpt2-124m

A chain of feed-forward layers whole on two devices that divide its state, with the same weights and samples under
pipeplan and plain ``fully_shard``, in turn (``beside.py``). A step is forward, backward, reductions and gathering of
parameters, without the optimizer's own work. Level 1 reduces after the last micro-batch, 2 and 3 after each; parameters
are given up after use in level 3 alone.

*Plain* is ``fully_shard`` as its own hooks run it. *Driven* is the same classes run by pipeplan's program, as torch's
pipeline runtime runs them by its own: UNSHARD is ``unshard(async_op=True)``, RESHARD is ``reshard()``, REDUCE_GRAD is
what ``perform_reduce_grad`` of ``torch.distributed.pipelining`` does, after the W that made the gradients. Weight
gradients wait for W on both sides, in pipeplan's own linear layers.

With ``--models`` GPTs of the zoo stand in place of the chain; their head has a table of its own, for ``fully_shard``
makes two of one that two modules have, if these are not wrapped as one group.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from beside import HEADER, NUM_RANKS, TIMEOUT_NS, arguments, cells, in_turn, job_of, printed, told_by
from executor_overhead import chain
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from pipeplan.costs import build_workload
from pipeplan.files import (
    Block,
    Cluster,
    CostRow,
    DeviceKind,
    Edge,
    LinkLevel,
    PlacedStage,
    Placement,
    Plan,
    Profile,
    Source,
    parse,
)
from pipeplan.planning.build_plan import assemble
from pipeplan.runtime.executor.stage import MiniBatch
from pipeplan.runtime.launch.job import RankContext
from pipeplan.runtime.models.spec import Model
from pipeplan.runtime.models.zoo import ZOO
from pipeplan.runtime.parallel.weight_grads import WeightGradQueue
from pipeplan.runtime.training.options import TrainOptions
from pipeplan.runtime.training.trainer import Trainer
from pipeplan.schedule.classic import CLASSIC
from pipeplan.workload.action import Action, StateAction
from pipeplan.workload.bounds import period_bound, strong_iteration_bound
from pipeplan.workload.engine import with_links
from pipeplan.workload.kinds import REDUCE_GRAD, RESHARD, UNSHARD
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.task_graph import task_graph

GATHERED = 3
SIZE = 2 * NUM_RANKS
"""Samples of a micro-batch."""
PAIR = Cluster(
    name="pair",
    source=Source(method="estimated"),
    devices=(DeviceKind(name="core", count=NUM_RANKS),),
    levels=(LinkLevel(name="wire", group_size=NUM_RANKS, latency_ns=0, bandwidth_bytes_per_s=10**10),),
)


def plan_of(model: Model, level: int, num_microbatches: int, *, driven: bool = False) -> Plan:
    """One stage of all blocks, whose replicas divide what they keep.

    ``driven``: the backward is split, and the program says when what is exchanged, before and after each action.
    """
    row = CostRow(microbatch_size=2, forward_ns=10**6, input_grad_ns=10**6, weight_grad_ns=10**6, activation_bytes=64)
    profile = Profile(
        name=model.name,
        source=Source(method="estimated"),
        blocks=tuple(Block(id=block.id, operator=block.operator, costs=(row,)) for block in model.blocks),
        edges=tuple(Edge(source=a, target=b, bytes_per_sample=64, transfer_ns=0) for a, b in model.edges),
    )
    ids = tuple(block.id for block in model.blocks)
    stage = PlacedStage(
        blocks=ids,
        devices=(0, 1),
        replicas=NUM_RANKS,
        zero=level,
        unshard_every=1 if driven and level == GATHERED else None,
        reduce_every=1 if driven else None,
    )
    placement = Placement(strategy="benchmark", num_devices=NUM_RANKS, stages=(stage,))
    cluster = PAIR if driven else None
    workload = build_workload(
        profile,
        placement,
        num_microbatches=num_microbatches,
        microbatch_size=SIZE,
        split_backward=driven,
        cluster=cluster,
    )
    problem, graph = OneMicrobatch.of(workload), task_graph(workload)
    orders = with_links(graph, CLASSIC["zb-h1" if driven else "1f1b"].orders(problem, graph)[:NUM_RANKS])
    return assemble(graph, orders, strong_iteration_bound(problem), period_bound(problem), "benchmark")


class Sharded:
    """The model's blocks under ``fully_shard``, one by one."""

    def __init__(self, model: Model, level: int, size: int) -> None:
        self.model, self.level, self.size = model, level, size
        mesh = init_device_mesh("cpu", (NUM_RANKS,))
        self.modules: dict[str, Any] = {block.id: model.build(block.id, 0) for block in model.blocks}
        for module in self.modules.values():
            fully_shard(module, mesh=mesh, reshard_after_forward=level == GATHERED)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other

    def step(self, batch: Mapping[str, Tensor], predictions: float) -> None:
        """Micro-batches one after another; gradients stay."""
        self.clear()
        count = len(batch["targets"]) // self.size
        for number in range(count):
            last = number == count - 1
            for module in self.modules.values():
                module.set_requires_gradient_sync(self.level > 1 or last)
                module.set_reshard_after_backward(self.level == GATHERED or last)
            self.loss(batch, number, predictions).backward()

    def loss(self, batch: Mapping[str, Tensor], number: int, predictions: float) -> Any:
        """A micro-batch's forward."""
        rows = slice(number * self.size, (number + 1) * self.size)
        (first,) = self.model.blocks[0].samples
        made = batch[first][rows]
        for block in self.model.blocks[:-1]:
            made = self.modules[block.id](made)
        return self.modules[self.model.blocks[-1].id](made, batch["targets"][rows]) / predictions

    def clear(self) -> None:
        for module in self.modules.values():
            for each in module.parameters():
                each.grad = None

    def gradients(self) -> list[Tensor]:
        """This rank's rows, by block."""
        found = [each.grad for module in self.modules.values() for each in module.parameters()]
        return [each._local_tensor for each in found if isinstance(each, DTensor)]


class Driven(Sharded):
    """The same, run by a program of one rank with a split backward, for groups of so many blocks."""

    def __init__(self, model: Model, level: int, size: int, program: Sequence[str], groups: Sequence[int]) -> None:
        super().__init__(model, level, size)
        self.program = [StateAction.read(each) or Action.parse(each) for each in program]
        modules = iter(self.modules.values())
        self.groups = [[*itertools.islice(modules, count)] for count in groups]
        for module in self.modules.values():
            module.set_reshard_after_forward(False)  # RESHARD does it
            module.set_reshard_after_backward(False)
            module.set_requires_gradient_sync(False)  # REDUCE_GRAD does it

    def step(self, batch: Mapping[str, Tensor], predictions: float) -> None:
        """The program's actions, in order; gradients stay."""
        self.clear()
        losses: dict[int, Any] = {}
        queues: dict[int, WeightGradQueue] = {}
        if self.level < GATHERED:  # whole during the program
            for module in self.modules.values():
                module.unshard(async_op=True)
        for each in self.program:
            if isinstance(each, StateAction):
                exchange(each.kind, self.groups[each.group or 0])
            elif each.kind == "F":
                losses[each.microbatch] = self.loss(batch, each.microbatch, predictions)
            elif each.kind == "I":
                with queues.setdefault(each.microbatch, WeightGradQueue()):
                    losses.pop(each.microbatch).backward()
            else:
                queues.pop(each.microbatch).run()
        for module in self.modules.values():
            for group in groups_of(module):
                group.finalize_backward()
            if self.level < GATHERED:
                module.reshard()


def exchange(kind: str, modules: Sequence[Any]) -> None:
    """Gather, give up or reduce a group of blocks: as torch's own pipeline runtime does it."""
    for module in modules if kind != REDUCE_GRAD else reversed(modules):
        if kind == UNSHARD:
            module.unshard(async_op=True)
        elif kind == RESHARD:
            module.reshard()
        else:
            reduce_grad(module)


def reduce_grad(module: Any) -> None:
    """What ``perform_reduce_grad`` of torch's pipeline stages calls; there is nothing public for it."""
    module.set_requires_gradient_sync(True)
    for group in groups_of(module):
        group.post_backward()
    module.set_requires_gradient_sync(False)


def groups_of(module: Any) -> Sequence[Any]:
    """Parameters that ``fully_shard`` exchanges together."""
    sharded: Any = fully_shard
    groups: Sequence[Any] = sharded.state(module)._fsdp_param_groups
    return groups


def sides_of(job: Mapping[str, Any], context: RankContext) -> tuple[Trainer, Sharded, dict[str, Callable[[], None]]]:
    """pipeplan's side, torch's, and a step of each."""
    model, plan = model_of(job), parse(job["plan"], Plan)
    trainer = Trainer(plan, model, TrainOptions(model.name, num_threads=1, timeout_ns=TIMEOUT_NS), context.progress)
    batch = model.mini_batch(plan.mini_batch, 0, 0)
    samples = MiniBatch(batch, model.predictions(batch))
    each = SIZE // NUM_RANKS
    own = [
        each * (NUM_RANKS * number + context.rank) + place
        for number in range(plan.num_microbatches)
        for place in range(each)
    ]
    mine = {name: tensor[own] for name, tensor in batch.items()}
    how = model, job["level"], each
    groups = [each.blocks for each in plan.stages[0].block_groups]
    theirs = Driven(*how, plan.programs[context.rank], groups) if job["driven"] else Sharded(*how)

    def ours_once() -> None:
        for parameter in (*trainer.parameters().values(), *trainer.unique_parameters()):
            parameter.grad = None
        trainer.executor.run(samples)
        trainer._reduce()
        trainer._gather()
        for stage in trainer.stages.values():
            stage.take_loss()

    def theirs_once() -> None:
        theirs.step(mine, samples.num_predictions)

    return trainer, theirs, {"pipeplan": ours_once, "torch": theirs_once}


def beside_fully_shard(job: Mapping[str, Any], context: RankContext) -> dict[str, Any]:
    """How long steps of both took, and how far gradients are apart."""
    trainer, theirs, steps = sides_of(job, context)
    for run in steps.values():
        run()
    pairs = zip(trainer.unique_parameters(), theirs.gradients(), strict=True)
    apart = max(float((own.grad - other).abs().max()) for own, other in pairs if own.grad is not None)
    found = in_turn(steps, job) | {"apart": apart}
    trainer.close()
    return found


def model_of(job: Mapping[str, Any]) -> Model:
    """The chain, or a GPT whose head has a table of its own."""
    if not job["model"]:
        return chain(job["width"], job["length"], job["layers"])
    size: Any = ZOO[job["model"]]
    model: Model = replace(size, tied=False, sequence=min(job["length"], size.longest)).model(job["model"])
    return replace(model, loss_of="samples")


def row(level: int, given: argparse.Namespace, *, width: int = 0, model: str = "") -> list[str]:
    """A row of the table."""
    how = {"model": model, "width": width, "length": given.length, "layers": given.layers}
    plan = plan_of(model_of(how), level, given.microbatches, driven=given.driven)
    job = job_of(given, plan=plan.model_dump_json(), level=level, driven=given.driven, **how)
    found = cells(told_by("sharded_overhead:beside_fully_shard", job, plan.programs))
    return [str(level), model or str(width), *found]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--widths", default="64,256,512")
    parser.add_argument("--models", default="", help="GPTs of the zoo instead of chains of these widths")
    parser.add_argument("--levels", default="1,2,3", help="driven: 2 and 3, whose programs say when")
    parser.add_argument("--length", type=int, default=64, help="vectors, or words, per sample")
    parser.add_argument("--layers", type=int, default=2, help="per block, of which there are four")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--driven", action="store_true", help="fully_shard run by the plan's program, split backward")
    given = parser.parse_args()
    levels = [int(each) for each in given.levels.split(",")]
    if given.driven and min(levels) < 2:
        parser.error("--driven is for --levels 2,3: at level 1 programs do not say when state is exchanged")
    if given.models:
        rows = [row(level, given, model=name) for level in levels for name in given.models.split(",")]
    else:
        rows = [row(level, given, width=int(width)) for level in levels for width in given.widths.split(",")]
    printed(given, ["ZeRO", "model" if given.models else "width", *HEADER], rows)


if __name__ == "__main__":
    main()
