"""Start-up of one rank of a folded plan, for plans of 16, 1,024 and 16,384 devices: its own seconds, and its memory.

Each is a process of its own: it reads the plan, unfolds its program, builds its blocks of gpt2-tiny, makes its process
groups, of torch's fake backend, in a world of as many ranks, and has its part in finding out whether all ranks run the
same: reductions of fixed sizes, which this backend does not send. The group of all ranks, that gloo connects, is not in
it.

    python benchmarks/folded_ranks.py [--repeats 3]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from fractions import Fraction
from itertools import product
from pathlib import Path
from statistics import median

from tables import machine, markdown

DEVICES = (16, 1024, 16384)
MODEL, POSITIONS, SHARDS = "gpt2-tiny", 4, 2
MICROBATCHES = 16


def plan_file(devices: int, folder: Path) -> Path:
    """A plan whose replicas are all that grows with the number of devices."""
    import pipeplan
    from pipeplan.costs import build_workload
    from pipeplan.files import PlacedStage, Placement
    from pipeplan.files.folded import folded_plan
    from pipeplan.planning.build_plan import assemble
    from pipeplan.schedule.search import first_look

    profile = pipeplan.estimate(MODEL, device="h100-80gb", microbatch=[1], shards=[1, 2])
    names, each = [block.id for block in profile.blocks], devices // POSITIONS
    cuts = [len(names) * place // POSITIONS for place in range(POSITIONS + 1)]
    stages = tuple(
        PlacedStage(
            blocks=tuple(names[begin:end]),
            devices=tuple(range(place * each, (place + 1) * each)),
            shards=SHARDS,
            replicas=each // SHARDS,
            zero=1,
        )
        for place, (begin, end) in enumerate(zip(cuts, cuts[1:], strict=False))
    )
    placement = Placement(strategy="one-to-one", num_devices=devices, stages=stages)
    size = each // SHARDS
    workload = build_workload(
        profile,
        placement,
        num_microbatches=MICROBATCHES,
        microbatch_size=size,
        cluster=pipeplan.example_cluster("cluster-h100", devices=devices),
    )
    found = first_look(workload, names=("1f1b",))
    assert found is not None
    proved = found.bound_ns, Fraction(0)
    plan = assemble(found.graph, found.orders, *proved, "1f1b", loop=found.loop, recipe=profile.recipe)
    path = folder / f"{devices}.json"
    pipeplan.write(folded_plan(plan), path)
    return path


def rank(path: str) -> None:
    """Start as the last rank, up to where a training would have its first step, and say what that took."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from pipeplan.files import read_plan
    from pipeplan.runtime.executor.process_groups import ProcessGroups
    from pipeplan.runtime.executor.rank_program import program_of
    from pipeplan.runtime.executor.shared_parameters import SharedParameters
    from pipeplan.runtime.launch.status import Board, Progress
    from pipeplan.runtime.models.load import load_model
    from pipeplan.runtime.parallel.agreement import alike_in_groups
    from pipeplan.runtime.training.compatibility import require_agreement
    from pipeplan.runtime.training.options import TrainOptions
    from pipeplan.runtime.training.trainer import autocast_of, dtype_of, travelling

    imported = time.process_time()
    plan, model = read_plan(path), load_model(MODEL)
    own = plan.num_devices - 1
    dist.init_process_group("fake", store=FakeStore(), rank=own, world_size=plan.num_devices)
    tied = [{block for block, _ in group} for group in model.tied]
    blocks = [block.id for block in model.blocks]
    program = program_of(plan, own, blocks, model.edges, model.name, model.divides_shards, tied)
    with tempfile.TemporaryFile() as file:
        os.truncate(file.fileno(), Board.size(plan.num_devices))
        progress = Progress(Board(file.fileno(), plan.num_devices), own)
        groups = ProcessGroups(program.lines.union(each.ranks for each in program.divisions), progress, alone=True)
        shares = dict.fromkeys(share for part in program.stages.values() for share in part.shares)
        modules = {share: model.build_share(share, 0, groups.shards(share)) for share in shares}
        timeout, options = timedelta(seconds=60), TrainOptions(MODEL).by_plan(plan)
        specs = travelling(program, model, dtype_of(options), autocast_of(options))
        require_agreement(own, plan, model, options, program, specs)
        groups.connect("fake", timeout)
        shared = SharedParameters(
            *(model, program.holders, modules, own, "fake", timeout, program.divisions), program.stage_of, alone=True
        )
        alike_in_groups(own, {ranks: str(copies) for ranks, copies in shared.copies().items()})
    print(
        json.dumps(
            {
                "import_s": imported,
                "whole_s": time.process_time(),
                "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
                "holders": len(program.holders),
                "steps": len(program.steps),
            }
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(options.rank)
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        paths = {devices: plan_file(devices, Path(folder)) for devices in DEVICES}
        found: dict[int, list[dict[str, float]]] = {devices: [] for devices in DEVICES}
        for _, devices in product(range(options.repeats), DEVICES):  # in turn: the machine's speed differs
            said = [sys.executable, __file__, "--rank", str(paths[devices])]
            found[devices].append(json.loads(subprocess.run(said, capture_output=True, text=True, check=True).stdout))
        for devices, each in found.items():
            whole, begun, memory = (median(one[key] for one in each) for key in ("whole_s", "import_s", "memory_mb"))
            size = f"{paths[devices].stat().st_size / 1000:.0f}"
            rows.append((f"{devices:,}", size, f"{whole:.2f}", f"{whole - begun:.2f}", f"{memory:.0f}"))
    header = ("devices", "plan file, kB", "processor s of a rank", "of which after imports", "memory, MB")
    print(markdown(header, rows))
    print(f"\nThe median of {options.repeats}; {machine()}.")


if __name__ == "__main__":
    main()
