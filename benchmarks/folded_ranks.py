"""Start-up of ranks of folded plans, for plans of 16, 1,024 and 16,384 devices: a rank's own seconds, and its memory.

The first rank, the middle one and the last, of gpt2-tiny, whose stages are split alike, and of gpt2-experts-tiny, whose
stages are not. Each is a process of its own: it reads the plan, unfolds its program, builds its blocks, makes its
process groups, of torch's fake backend, in a world of as many ranks, and has its part in finding out whether all ranks
run the same: reductions of fixed sizes, which this backend does not send. The group of all ranks, that gloo connects,
is not in it.

    python benchmarks/folded_ranks.py [--repeats 3]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from datetime import timedelta
from fractions import Fraction
from itertools import product
from pathlib import Path
from statistics import median

from tables import machine, markdown

DEVICES = (16, 1024, 16384)
SHARDS = {"gpt2-tiny": (2, 2, 2, 2), "gpt2-experts-tiny": (1, 2, 2, 1)}
"""{model: shards of each stage}; as many devices are on each of their positions."""
RANKS = "first", "middle", "last"
MICROBATCHES = 16


def plan_file(model: str, devices: int, folder: Path) -> Path:
    """A plan whose replicas are all that grows with the number of devices."""
    import pipeplan
    from pipeplan.costs import build_workload
    from pipeplan.files import PlacedStage, Placement
    from pipeplan.files.folded import folded_plan
    from pipeplan.planning.build_plan import assemble
    from pipeplan.schedule.search import first_look

    profile = pipeplan.estimate(model, device="h100-80gb", microbatch=[1, 2], shards=[1, 2])
    shards = SHARDS[model]
    names, each = [block.id for block in profile.blocks], devices // len(shards)
    cuts = [len(names) * place // len(shards) for place in range(len(shards) + 1)]
    stages = tuple(
        PlacedStage(
            blocks=tuple(names[begin:end]),
            devices=tuple(range(place * each, (place + 1) * each)),
            shards=own,
            replicas=each // own,
            zero=1,
        )
        for place, (begin, end, own) in enumerate(zip(cuts, cuts[1:], shards, strict=False))
    )
    placement = Placement(strategy="one-to-one", num_devices=devices, stages=stages)
    size = each // min(shards)
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
    path = folder / f"{model}-{devices}.json"
    folded = folded_plan(plan)
    assert len(folded.players) < devices
    pipeplan.write(folded, path)
    return path


def rank(path: str, model_name: str, which: str) -> None:
    """Start as a rank, up to where a training would have its first step, and say what that took."""
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
    plan, model = read_plan(path), load_model(model_name)
    own = {"first": 0, "middle": plan.num_devices // 2, "last": plan.num_devices - 1}[which]
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
        timeout, options = timedelta(seconds=60), TrainOptions(model_name).by_plan(plan)
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
                "memory_mb": _most_held() / 1e6,
            }
        )
    )


def _most_held() -> int:
    """Bytes that this process held at most; what getrusage says begins with those of who started it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rank", nargs=3, metavar=("PLAN", "MODEL", "WHICH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(*options.rank)
        return
    with tempfile.TemporaryDirectory() as folder:
        paths = {key: plan_file(*key, Path(folder)) for key in product(SHARDS, DEVICES)}
        found: dict[tuple[str, str, int], list[dict[str, float]]] = defaultdict(list)
        for _, model, which, devices in product(range(options.repeats), SHARDS, RANKS, DEVICES):  # its speed differs
            said = [sys.executable, __file__, "--rank", str(paths[model, devices]), model, which]
            done = subprocess.run(said, capture_output=True, text=True, check=True)
            found[model, which, devices].append(json.loads(done.stdout))
        sizes = {key: f"{path.stat().st_size / 1000:.0f}" for key, path in paths.items()}
    rows = []
    for (model, which, devices), each in found.items():
        whole, memory = (median(one[key] for one in each) for key in ("whole_s", "memory_mb"))
        after = median(one["whole_s"] - one["import_s"] for one in each)
        least = median(one["whole_s"] - one["import_s"] for one in found[model, which, DEVICES[0]])
        cells = f"{whole:.2f}", f"{after:.3f}", f"{after / least:.2f}", f"{memory:.0f}"
        rows.append((model, which, f"{devices:,}", sizes[model, devices], *cells))
    header = (
        *("model", "rank", "devices", "plan file, kB", "processor s", "after imports"),
        *(f"of that with {DEVICES[0]}", "memory, MB"),
    )
    print(markdown(header, rows))
    print(f"\nMedians of {options.repeats}; {machine()}.")


if __name__ == "__main__":
    main()
