"""A rank of the checkpoints' tests: trains in legs, each with a plan of its own, beside unsplit training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from pipeplan.errors import UsageError
from pipeplan.files import Plan, parse
from pipeplan.runtime.launch.__main__ import main
from pipeplan.runtime.launch.job import RankContext
from pipeplan.runtime.training.options import TrainOptions
from pipeplan.runtime.training.trainer import Trainer
from runtime_support.checkpoint_models import Counting
from runtime_support.executor_rank import _distance, _held
from runtime_support.known import known_once, load_once
from runtime_support.plans import Unsplit


def work(job: Mapping[str, Any], context: RankContext) -> None:
    torch.set_num_threads(1)
    with known_once():
        train_all(job, context)


def train_all(job: Mapping[str, Any], context: RankContext) -> None:
    for name, legs in job.items():
        unsplit = Unsplit(load_once(legs[0]["options"]["model"]), TrainOptions(**legs[0]["options"]))
        if "Counting" in (legs[0]["options"]["optimizer"] or ""):
            unsplit.optimizer = Counting(unsplit.unique, lr=1.0, weight_decay=0.0)
        told = [run_leg(leg, unsplit, context) for leg in legs]
        context.report({"event": "case", "name": name, "legs": told})


def run_leg(leg: Mapping[str, Any], unsplit: Unsplit, context: RankContext) -> dict[str, Any]:
    """Train up to a step, write a checkpoint, and forget everything; or be refused."""
    plan, options = parse(leg["plan"], Plan), TrainOptions(**leg["options"])
    context.progress.board.programs = plan.programs
    trainer = Trainer(plan, load_once(options.model), options, context.progress)
    try:
        first = trainer.resume()
    except UsageError as error:
        trainer.close()
        dist.barrier()
        return {"refused": str(error)}
    for step in range(unsplit.num_steps, first):
        unsplit.step(step, plan.mini_batch)
    distance = 0.0
    for step in range(first, leg["until"]):
        result, _ = trainer.step(step)
        expected = unsplit.step(step, plan.mini_batch)
        distance = max(distance, abs(result.loss - expected), abs((result.grad_norm or 0) - unsplit.norm))
    for name, share, parameter in _held(trainer):
        own = trainer.model.part_of(share, name).within(unsplit.parameters()[f"{share.block}.{name}"])
        if (rows := trainer.sharded.rows.get(id(parameter))) is not None:
            own = own[rows.begin : rows.begin + len(rows.own)]
        distance = max(distance, _distance(trainer.sharded.own(parameter), own))
    trainer.save()
    trainer.close()
    dist.barrier()
    return {"first": first, "distance": distance}


if __name__ == "__main__":
    main()
