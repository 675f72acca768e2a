"""What sharded state costs beside torch's ``fully_shard``.

    python benchmarks/sharded_overhead.py                 # prints the table of docs/benchmarks/runs.md; some minutes
    python benchmarks/sharded_overhead.py --pairs 40 --levels 3 --widths 256

A chain of feed-forward layers whole on two devices that divide its state, with the same weights and samples under
pipeplan and plain ``fully_shard``, in turn (``beside.py``). A step is forward, backward, reductions and gathering of
parameters, without the optimizer's own work. Level 1 reduces after the last micro-batch, 2 and 3 after each; parameters
are given up after use in level 3 alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from beside import HEADER, NUM_RANKS, TIMEOUT_NS, arguments, cells, in_turn, job_of, printed, told_by
from executor_overhead import chain
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from pipeplan.costs import build_workload
from pipeplan.files import Block, CostRow, Edge, PlacedStage, Placement, Plan, Profile, Source, parse
from pipeplan.planning.build_plan import assemble
from pipeplan.runtime.executor.stage import MiniBatch
from pipeplan.runtime.launch.job import RankContext
from pipeplan.runtime.models.spec import Model
from pipeplan.runtime.training.options import TrainOptions
from pipeplan.runtime.training.trainer import Trainer
from pipeplan.schedule.classic import CLASSIC
from pipeplan.workload.bounds import period_bound, strong_iteration_bound
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.task_graph import task_graph

GATHERED = 3
SIZE = 2 * NUM_RANKS
"""Samples of a micro-batch."""


def plan_of(model: Model, level: int, num_microbatches: int) -> Plan:
    """One stage of all blocks, whose replicas divide what they keep."""
    row = CostRow(microbatch_size=2, forward_ns=10**6, input_grad_ns=10**6, weight_grad_ns=10**6, activation_bytes=64)
    profile = Profile(
        name=model.name,
        source=Source(method="estimated"),
        blocks=tuple(Block(id=block.id, operator=block.operator, costs=(row,)) for block in model.blocks),
        edges=tuple(Edge(source=a, target=b, bytes_per_sample=64, transfer_ns=0) for a, b in model.edges),
    )
    ids = tuple(block.id for block in model.blocks)
    stage = PlacedStage(blocks=ids, devices=(0, 1), replicas=NUM_RANKS, zero=level)
    placement = Placement(strategy="benchmark", num_devices=NUM_RANKS, stages=(stage,))
    workload = build_workload(
        profile, placement, num_microbatches=num_microbatches, microbatch_size=SIZE, split_backward=False
    )
    problem, graph = OneMicrobatch.of(workload), task_graph(workload)
    orders = CLASSIC["1f1b"].orders(problem, graph)
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
        count = len(batch["x"]) // self.size
        for number in range(count):
            last = number == count - 1
            for module in self.modules.values():
                module.set_requires_gradient_sync(self.level > 1 or last)
                module.set_reshard_after_backward(self.level == GATHERED or last)
            rows = slice(number * self.size, (number + 1) * self.size)
            made = batch["x"][rows]
            for block in self.model.blocks[:-1]:
                made = self.modules[block.id](made)
            loss = self.modules[self.model.blocks[-1].id](made, batch["targets"][rows]) / predictions
            loss.backward()

    def clear(self) -> None:
        for module in self.modules.values():
            for each in module.parameters():
                each.grad = None

    def gradients(self) -> list[Tensor]:
        """This rank's rows, by block."""
        found = [each.grad for module in self.modules.values() for each in module.parameters()]
        return [each._local_tensor for each in found if isinstance(each, DTensor)]


def beside_fully_shard(job: Mapping[str, Any], context: RankContext) -> dict[str, Any]:
    """How long steps of both took, and how far gradients are apart."""
    model, plan = chain(job["width"], job["length"], job["layers"]), parse(job["plan"], Plan)
    trainer = Trainer(plan, model, TrainOptions("chain", num_threads=1, timeout_ns=TIMEOUT_NS), context.progress)
    batch = model.mini_batch(plan.mini_batch, 0, 0)
    samples = MiniBatch(batch, model.predictions(batch))
    each = SIZE // NUM_RANKS
    own = [
        each * (NUM_RANKS * number + context.rank) + place
        for number in range(plan.num_microbatches)
        for place in range(each)
    ]
    mine = {name: tensor[own] for name, tensor in batch.items()}
    theirs = Sharded(model, job["level"], each)

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

    steps = {"pipeplan": ours_once, "torch": theirs_once}
    for run in steps.values():
        run()
    pairs = zip(trainer.unique_parameters(), theirs.gradients(), strict=True)
    apart = max(float((own.grad - other).abs().max()) for own, other in pairs if own.grad is not None)
    found = in_turn(steps, job) | {"apart": apart}
    trainer.close()
    return found


def row(level: int, width: int, given: argparse.Namespace) -> list[str]:
    """A row of the table."""
    plan = plan_of(chain(width, given.length, given.layers), level, given.microbatches)
    how = {"length": given.length, "layers": given.layers, "level": level, "width": width}
    job = job_of(given, plan=plan.model_dump_json(), **how)
    return [str(level), str(width), *cells(told_by("sharded_overhead:beside_fully_shard", job, plan.programs))]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--widths", default="64,256,512")
    parser.add_argument("--levels", default="1,2,3")
    parser.add_argument("--length", type=int, default=64, help="vectors per sample")
    parser.add_argument("--layers", type=int, default=2, help="per block, of which there are four")
    parser.add_argument("--microbatches", type=int, default=4)
    given = parser.parse_args()
    widths, levels = ([int(each) for each in text.split(",")] for text in (given.widths, given.levels))
    printed(given, ["ZeRO", "width", *HEADER], [row(level, width, given) for level in levels for width in widths])


if __name__ == "__main__":
    main()
