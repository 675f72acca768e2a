"""Start-up of ranks of folded plans, for plans of 16, 1,024 and 16,384 devices: a rank's own seconds, and its memory.

The first rank, the middle one and the last, of gpt2-tiny, whose stages are split alike, of gpt2-experts-tiny, whose
stages are not, and of the same where devices share sequences and experts. Each is a process of its own: it reads the
plan and makes all that a training has before its first step, with process groups of torch's fake backend, in a world of
as many ranks. It has its part in finding out whether all ranks run the same: reductions of fixed sizes, which this
backend does not send. What meets before that, in gloo's group of all ranks and in the store, is not in it.

It ends with 1, and says which, where the seconds of a process with more devices, all of them or those after imports, or
its memory, are not within a tenth of those with 16. Each is compared with the one of 16 devices that ran just before,
as machines are quicker and slower from minute to minute, and the median over repeats and models counts. Of the seconds
that repeats take the least are said: what else a machine does can only add to them.

    python benchmarks/folded_ranks.py [--repeats 5]
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
from typing import TYPE_CHECKING, Any

from tables import machine, markdown

if TYPE_CHECKING:
    import torch

    from pipeplan.runtime.launch.status import Progress

DEVICES = (16, 1024, 16384)
WITHIN = 0.1
SPLITS: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "gpt2-tiny": ("gpt2-tiny", (2, 2, 2, 2), {}),
    "gpt2-experts-tiny": ("gpt2-experts-tiny", (1, 2, 2, 1), {}),
    "gpt2-experts-tiny, shared": ("gpt2-experts-tiny", (1, 1, 1, 1), {"context": 2, "expert": 2}),
}
"""{case: model, shards of each stage, what else its devices share}; as many are on each of the stages' positions."""
RANKS = "first", "middle", "last"
MICROBATCHES = 16


def plan_file(case: str, devices: int, folder: Path) -> Path:
    """A plan whose replicas are all that grows with the number of devices."""
    import pipeplan
    from pipeplan.costs import build_workload
    from pipeplan.files import PlacedStage, Placement
    from pipeplan.files.folded import folded_plan
    from pipeplan.planning.build_plan import assemble
    from pipeplan.schedule.search import first_look

    model, shards, shared = SPLITS[case]
    sizes: Any = {name: [1, size] for name, size in shared.items()}
    profile = pipeplan.estimate(model, device="h100-80gb", microbatch=[1, 2], shards=[1, 2], **sizes)
    names, each = [block.id for block in profile.blocks], devices // len(shards)
    cuts = [len(names) * place // len(shards) for place in range(len(shards) + 1)]
    stages = tuple(
        PlacedStage(
            blocks=tuple(names[begin:end]),
            devices=tuple(range(place * each, (place + 1) * each)),
            shards=own,
            replicas=each // own // shared.get("context", 1),
            zero=1,
            **shared,
        )
        for place, (begin, end, own) in enumerate(zip(cuts, cuts[1:], shards, strict=False))
    )
    placement = Placement(strategy="one-to-one", num_devices=devices, stages=stages)
    size = each // min(shards) // shared.get("context", 1)
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
    path = folder / f"{case}-{devices}.json"
    folded = folded_plan(plan)
    assert len(folded.players) < devices
    pipeplan.write(folded, path)
    return path


def rank(path: str, model_name: str, which: str) -> None:
    """Start as a rank, up to where a training has its first step, and say what that took.

    Nobody else is there: what a rank hears of others is what it would say itself.
    """
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from pipeplan.files import read_plan
    from pipeplan.runtime.executor.process_groups import AllRanks
    from pipeplan.runtime.launch.machine import most_resident_bytes
    from pipeplan.runtime.launch.status import Board, Progress
    from pipeplan.runtime.models.load import load_model
    from pipeplan.runtime.parallel.device import Clock
    from pipeplan.runtime.training import trainer
    from pipeplan.runtime.training.options import TrainOptions

    class Alone(AllRanks):
        """Without gloo's group."""

        def __init__(self, device: torch.device, progress: Progress, timeout: timedelta) -> None:
            self.clock = Clock(device)

    imported, held = time.process_time(), most_resident_bytes()
    compared = vars(trainer)["alike_in_groups"]
    unheard = {"of_first": lambda value: value, "alike_in_groups": lambda *said: compared(*said) or True}
    vars(trainer).update(AllRanks=Alone, **unheard)
    plan, model = read_plan(path), load_model(model_name)
    own = {"first": 0, "middle": plan.num_devices // 2, "last": plan.num_devices - 1}[which]
    dist.init_process_group("fake", store=FakeStore(), rank=own, world_size=plan.num_devices)
    with tempfile.TemporaryFile() as file:
        os.truncate(file.fileno(), Board.size(plan.num_devices))
        progress = Progress(Board(file.fileno(), plan.num_devices), own)
        trainer.Trainer(plan, model, TrainOptions(model_name, backend="fake"), progress)
    found = {"import_s": imported, "whole_s": time.process_time(), "memory_mb": most_resident_bytes() / 1e6}
    print(json.dumps(found | {"imports_mb": held / 1e6}))


def whole_s(one: dict[str, float]) -> float:
    return one["whole_s"]


def after_imports(one: dict[str, float]) -> float:
    return one["whole_s"] - one["import_s"]


def memory_mb(one: dict[str, float]) -> float:
    return one["memory_mb"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rank", nargs=3, metavar=("PLAN", "MODEL", "WHICH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(*options.rank)
        return
    with tempfile.TemporaryDirectory() as folder:
        paths = {(case, devices): plan_file(case, devices, Path(folder)) for case, devices in product(SPLITS, DEVICES)}
        found: dict[tuple[str, str, int], list[dict[str, float]]] = defaultdict(list)
        for _, case, which, devices in product(range(options.repeats), SPLITS, RANKS, DEVICES):  # its speed differs
            said = [sys.executable, __file__, "--rank", str(paths[case, devices]), SPLITS[case][0], which]
            done = subprocess.run(said, capture_output=True, text=True, check=True)
            found[case, which, devices].append(json.loads(done.stdout))
        sizes = {key: f"{path.stat().st_size / 1000:.0f}" for key, path in paths.items()}
    rows, ratios, far = [], [], []
    for (case, which, devices), each in found.items():
        whole, memory = min(one["whole_s"] for one in each), median(one["memory_mb"] for one in each)
        few = found[case, which, DEVICES[0]]
        after, least = (min(map(after_imports, own)) for own in (each, few))
        more = median(one["memory_mb"] - one["imports_mb"] for one in each)
        cells = f"{whole:.2f}", f"{after:.3f}", f"{after / least:.2f}", f"{memory:.0f}", f"{more:.1f}"
        rows.append((case, which, f"{devices:,}", sizes[case, devices], *cells))
    compared = {"seconds": whole_s, "seconds after imports": after_imports, "memory": memory_mb}
    for which, devices, (what, of) in product(RANKS, DEVICES[1:], compared.items()):
        pairs = [zip(found[case, which, devices], found[case, which, DEVICES[0]], strict=True) for case in SPLITS]
        ratio = median(of(one) / of(few) for each in pairs for one, few in each)
        ratios.append((which, f"{devices:,}", what, f"{ratio:.3f}"))
        if abs(ratio - 1) > WITHIN:
            far.append(f"{which} of {devices:,}: {ratio:.2f} times the {what} of {DEVICES[0]}")
    header = (
        *("model", "rank", "devices", "plan file, kB", "processor s", "after imports"),
        *(f"of that with {DEVICES[0]}", "memory, MB", "after imports, MB"),
    )
    print(markdown(header, rows))
    print()
    print(markdown(("rank", "devices", "what", f"of that with {DEVICES[0]}, median of pairs"), ratios))
    print(f"\nThe least seconds of {options.repeats}, median memory; {machine()}.")
    if far:
        raise SystemExit("\n".join(far))


if __name__ == "__main__":
    main()
