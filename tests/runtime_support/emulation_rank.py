"""A rank of the emulation's tests: emulates many plans in one process group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from pipeplan.files import Plan, parse
from pipeplan.runtime.emulation.emulate import emulate
from pipeplan.runtime.launch.__main__ import main
from pipeplan.runtime.launch.job import RankContext, RunOptions


def emulate_all(job: Mapping[str, Any], context: RankContext) -> None:
    """Report, per case, when everything ran."""
    torch.set_num_threads(1)
    for name, case in job["cases"].items():
        plan = parse(case["plan"], Plan)
        context.progress.board.programs = plan.programs
        result = emulate(plan, RunOptions(**case["options"]), context.progress, lambda step: None)
        if context.rank == 0:
            context.report({"event": "case", "name": name, "result": result.as_json()})
        dist.barrier()


if __name__ == "__main__":
    main()
