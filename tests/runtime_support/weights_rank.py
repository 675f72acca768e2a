"""A rank of the weights' tests: trains, writes weights, reads them under another plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from pipeplan.files import Plan, parse
from pipeplan.runtime.launch.__main__ import main
from pipeplan.runtime.launch.job import RankContext
from pipeplan.runtime.training.options import TrainOptions
from pipeplan.runtime.training.trainer import train
from runtime_support.known import known_once


def work(job: Mapping[str, Any], context: RankContext) -> None:
    torch.set_num_threads(1)
    with known_once():
        for leg in job["legs"]:
            plan = parse(leg["plan"], Plan)
            context.progress.board.programs = plan.whole_programs
            result = train(plan, TrainOptions(**leg["options"]), context.progress, lambda step: None)
            dist.barrier()
            context.report({"event": "leg", "unwritten": result.unwritten, "steps": len(result.steps)})


if __name__ == "__main__":
    main()
