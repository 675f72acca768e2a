"""A GPT trained in a pipeline whose stages kernel backends run: its losses, and iterations predicted and measured.

    python benchmarks/kernel_runs.py --folder FOLDER          # goes on with the profile that is there
    python benchmarks/kernel_runs.py --folder FOLDER --model gpt2-tiny --sequence 16
    python benchmarks/kernel_runs.py --folder FOLDER --compile # only what a slow compiler takes of a small model

``pipeplan profile --backends`` measures the model on one thread; a cover gives each stage's blocks to a backend of its
own, the others to eager torch, and ``search --kernels COVER`` makes plans of it, beside the one of eager torch and the
one of ``--kernels auto``. On 4 processes losses are compared with those of eager torch's plan; on 2, with one thread
each, so are the iterations that the plans predict with those that are measured, which needs two idle cores. It ends
with 1 where losses are too far off, or where every process has a core and an iteration is off its plan's by over 15 %.
``--compile`` has gpt2-tiny measured by eager torch and inductor with nothing compiled before, and ends with 1 where
that takes longer than two minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from tables import machine, markdown, note

from pipeplan.files import Cover, CoveredGroup, Plan, Profile, read_plan, read_profile, write_file
from pipeplan.kernels.measuring import plain_row, row_ns

BY_STAGE = ("inductor", "onednn-off", "attention-flash", "attention-math")
"""Backends of stages, in turn."""

TOLERANCE = 1e-4
"""Of losses, relative to eager torch's."""

MOST_OFF = 0.15
"""Of an iteration as predicted, relative to what is measured where every process has a core."""

LONGEST_COMPILE_S = 120.0
"""Of gpt2-tiny by eager torch and inductor, with an empty cache of compiled code."""


def pipeplan(*arguments: str, **more: str) -> str:
    """What a verb prints, with ``more`` in its environment. Raises SystemExit with what it says where it fails."""
    one = {**os.environ, "OMP_NUM_THREADS": "1", **more}
    command = [sys.executable, "-m", "pipeplan", *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=one)
    if ran.returncode:
        raise SystemExit(f"pipeplan {' '.join(arguments)}: {ran.stderr}")
    return ran.stdout


def cover_of(profile: Profile, plan: Plan, size: int) -> Cover:
    """The blocks of each stage of a plan, one by one, by a backend of its own where that runs them."""
    stages = {id_: number for number, stage in reversed([*enumerate(plan.stages)]) for id_ in stage.blocks}
    groups = []
    for block in profile.blocks:
        row = plain_row(block.costs, size, BY_STAGE[stages[block.id] % len(BY_STAGE)]) or plain_row(block.costs, size)
        assert row is not None, "eager torch runs every block"
        groups.append(CoveredGroup(blocks=(block.id,), backend=row.backend, ns=row_ns(row)))
    return Cover(
        name=profile.name,
        profile_sha256=profile.fingerprint,
        microbatch_size=size,
        predicted_ns=sum(group.ns for group in groups),
        cover=tuple(groups),
    )


def plans_of(given: argparse.Namespace, profile: Profile, devices: int) -> dict[str, Path]:
    """Plans by what runs their stages: eager torch, a backend for each, and what the search finds best."""
    at, size = given.folder, str(given.microbatch)
    asked = ["search", str(at / "profile.json"), "--devices", str(devices), "--microbatch-size", size]
    asked += [
        "--placement",
        "one-to-one",
        "--mini-batch",
        str(given.microbatch * given.count),
        "--time-limit",
        f"{given.search_seconds}s",
    ]
    found = {name: at / f"{name}.{devices}.json" for name in ("eager", "stages", "auto")}
    pipeplan(*asked, "-o", str(found["eager"]))
    cover = at / f"cover.{devices}.json"
    write_file(cover_of(profile, read_plan(str(found["eager"])), given.microbatch), str(cover))
    pipeplan(*asked, "--kernels", str(cover), "-o", str(found["stages"]))
    pipeplan(*asked, "--kernels", "auto", "-o", str(found["auto"]))
    return found


def ran(given: argparse.Namespace, path: Path) -> dict[str, Any]:
    """Losses and times of a plan that trains here, one process for each device."""
    how = ["--steps", str(given.steps), "--sequence", str(given.sequence), "--seed", "1", "--timeout", "10min"]
    found: dict[str, Any] = json.loads(pipeplan("run", str(path), "--model", given.model, "--local", *how, "--json"))
    return found


def named(plan: Plan) -> str:
    """What runs each of a plan's stages."""
    return "; ".join(" and ".join(dict.fromkeys(stage.backends)) or "eager" for stage in plan.stages)


def compared(losses: Sequence[float], eager: Sequence[float]) -> float:
    """How far losses are from eager torch's at most. Raises SystemExit where that is too far."""
    off = max(abs(one / other - 1) for one, other in zip(losses, eager, strict=True))
    if off > TOLERANCE:
        raise SystemExit(f"losses are off eager torch's by {off:.2g}, and {TOLERANCE:g} is allowed")
    return off


def table(given: argparse.Namespace, devices: int, plans: Mapping[str, Path], missed: list[str]) -> str:
    """Plans that ran on so many processes; whose iterations are too far from what they predict goes to ``missed``."""
    rows, eager = [], list[float]()
    for name, path in plans.items():
        note(f"{devices} processes: {name}")
        plan, found = read_plan(str(path)), ran(given, path)
        losses = [step["loss"] for step in found["steps"]]
        eager = eager or losses
        took = median(step["iteration_ns"] for step in found["steps"][1:])
        said = plan.predicted.iteration_ns
        times = [f"{said / 1e6:.1f}", f"{took / 1e6:.1f}", f"{said / took - 1:+.1%}"]
        if abs(said / took - 1) > MOST_OFF and devices <= (os.cpu_count() or 1):
            missed.append(f"{devices} processes, {name}: {times[-1]} off")
        rows.append([name, named(plan), f"{compared(losses, eager):.1e}", *times])
    return markdown(["plan", "stages by", "losses off", "predicted, ms", "measured, ms", "off"], rows)


def compiled() -> int:
    """Print what measuring gpt2-tiny takes with nothing compiled before; 1 where that is too long."""
    with TemporaryDirectory() as folder:
        path, begun = Path(folder) / "profile.json", time.monotonic()
        pipeplan(
            *("profile", "gpt2-tiny", "--backends", "eager,inductor", "--threads", "1", "-o", str(path)),
            TORCHINDUCTOR_CACHE_DIR=str(Path(folder) / "cache"),
        )
        took = time.monotonic() - begun
        profile = read_profile(str(path))
        groups = {fusion.blocks for fusion in profile.fusions for row in fusion.costs if row.backend == "inductor"}
        single = sum(row.backend == "inductor" for block in profile.blocks for row in block.costs)
    print(f"gpt2-tiny by eager torch and inductor, nothing compiled before: {took:.0f} s of {LONGEST_COMPILE_S:.0f}")
    print(f"rows of inductor: {single} of single blocks, {len(groups)} of groups; refused: {len(profile.refusals)}")
    print(machine())
    return int(took > LONGEST_COMPILE_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="of the profile and plans")
    parser.add_argument("--model", default="gpt2-124m")
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--microbatch", type=int, default=1)
    parser.add_argument("--count", type=int, default=4, help="micro-batches")
    parser.add_argument("--steps", type=int, default=6, help="mini-batches, of which the first has no time")
    parser.add_argument("--devices", type=lambda text: tuple(map(int, text.split(","))), default=(2, 4))
    parser.add_argument("--search-seconds", type=int, default=20)
    parser.add_argument("--measure-limit", default="5min")
    parser.add_argument("--compile", action="store_true", help="only what inductor takes of gpt2-tiny")
    given = parser.parse_args()
    if given.compile:
        raise SystemExit(compiled())
    given.folder.mkdir(parents=True, exist_ok=True)
    path = given.folder / "profile.json"
    pipeplan(
        *("profile", given.model, "--sequence", str(given.sequence), "--microbatch", str(given.microbatch)),
        *("--threads", "1", "--backends", ",".join(BY_STAGE), "--measure-limit", given.measure_limit),
        *("-o", str(path)),
    )
    profile, missed = read_profile(str(path)), list[str]()
    for devices in given.devices:
        print(
            f"{devices} processes\n\n{table(given, devices, plans_of(given, profile, devices), missed)}\n", flush=True
        )
    print(machine())
    for each in missed:
        note(each)
    raise SystemExit(int(bool(missed)))


if __name__ == "__main__":
    main()
