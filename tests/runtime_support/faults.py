"""Runs in which one rank is made to fail at one place, and whether they end as they should.

Also the rank itself: started as a program it does what its environment says when it begins what it says there.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pipeplan.errors import PipeplanError
from pipeplan.files import Plan
from pipeplan.runtime.launch import local as launch
from pipeplan.runtime.launch.__main__ import take_identity
from pipeplan.runtime.launch.job import RankContext, Report
from pipeplan.runtime.launch.status import Phase, Progress
from pipeplan.runtime.training.options import TrainOptions
from runtime_support.warm import warm_left_over, warm_ranks

__all__ = ["BEFORE_STEPS", "HANGS", "KINDS", "Ending", "Fault", "left_over", "run_with"]

FAULT, MARK = "PIPEPLAN_TEST_FAULT", "PIPEPLAN_TEST_MARK"
RANK = (sys.executable, "-m", "runtime_support.faults")
NUM_STEPS = 3
START_TIMEOUT_NS = 60 * 10**9
"""For runs that hang where they may take long; others have all the time that starting may take."""
BEFORE_STEPS = (Phase.STARTING.name, Phase.LOADING.name, Phase.CONNECTING.name)
SOON_S = 12.0
"""Behind the failure, or the timeout: some seconds on a machine that does other things, too."""

KINDS = {
    "killed": r"rank {rank} was killed \(SIGKILL\) {where}",
    "ended": r"rank {rank} ended with exit code 3 {where}",
    "raised": r"rank {rank} failed {where}: .*boom",
    "stopped": r"rank {rank} hangs {where}; .*raise --timeout",
    "endless": r"rank {rank} hangs {where}; .*raise --timeout",
    "other options": r"rank {rank} was started with seed 1, rank 0 with 0",
    "other plan": r"rank {rank} was started with plan '\w+', rank 0 with '\w+'",
}
"""What can happen to a rank, and how the one message begins then."""

UNDER_TORCHRUN = {
    "killed": r"rank {rank} ended {where}; rank \d lost ",
    "ended": r"rank {rank} ended {where}; rank \d lost ",
}
"""There it is torchrun that sees a process end."""

HANGS = ("stopped", "endless")
DIFFERENCES = ("other options", "other plan")


@dataclass(frozen=True)
class Fault:
    """What happens on which rank when it begins a phase, in a step (the first in which it does), at an action or -1.

    One that starts with other options, or another plan, is found out while connecting.
    """

    kind: str
    rank: int
    phase: str = Phase.RUNNING.name
    step: int = 0
    counter: int = -1

    @property
    def hangs_long(self) -> bool:
        """Whether it hangs in something that may take longer than the longest wait while steps run."""
        return self.kind in HANGS and Phase[self.phase].takes_long

    @property
    def expected_s(self) -> float:
        """Longest time from when it happens until the run has ended, at a timeout of 2 s."""
        if self.kind not in HANGS:
            return SOON_S
        return SOON_S + (START_TIMEOUT_NS / 1e9 if self.hangs_long else 2.0)


@dataclass(frozen=True)
class Ending:
    """How a run ended: the error (nothing if it ended well), seconds since the failure, and whether all is as expected.

    ``left`` are processes that live on.
    """

    error: str
    seconds: float
    expected: str
    is_right: bool
    left: list[int]
    checkpoint_loads: bool

    @property
    def is_clean(self) -> bool:
        """Whether the message names rank, action and cause, no process is left, and the last checkpoint loads."""
        return self.is_right and not self.left and self.checkpoint_loads


def left_over(word: str) -> list[int]:
    """Living processes with the mark in their environment, but not this one; and all forked ranks."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"{MARK}={word}".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:  # it ended meanwhile, or is not ours
            continue
    return [pid for pid in found if pid != os.getpid()] + warm_left_over()


def run_with(fault: Fault, plan: Plan, options: TrainOptions, *, torchrun: bool = False, warm: bool = False) -> Ending:
    """Run a plan with a fault in it, with a timeout of 2 s, clipped gradients, and a checkpoint behind every step.

    Under torchrun only faults in actions are known by their messages.
    """
    options = replace(options, timeout_ns=2 * 10**9, num_steps=NUM_STEPS, num_threads=1, clip_norm=1.0)
    word, start = uuid.uuid4().hex, _under_torchrun if torchrun else _locally
    forked = warm_ranks() if warm else contextlib.nullcontext()
    with forked, tempfile.TemporaryDirectory() as folder, tempfile.NamedTemporaryFile("r") as told:
        os.environ |= {MARK: word, FAULT: json.dumps({**asdict(fault), "told": told.name})}
        shorten_start(fault)
        error = start(plan, replace(options, checkpoint=folder, checkpoint_every=1))
        ended = time.monotonic()
        happened = json.loads(told.read() or "{}")
        loaded = loads(Path(folder), happened.get("step", 0))
    kinds = KINDS | UNDER_TORCHRUN if torchrun else KINDS
    expected = kinds[fault.kind].format(rank=fault.rank, where=re.escape(happened.get("where", "")))
    is_right = bool(re.match(expected, error))
    return Ending(error, ended - happened.get("at", ended), expected, is_right, left_over(word), loaded)


def _locally(plan: Plan, options: TrainOptions) -> str:
    job = {"plan": plan.model_dump_json(), "options": options.as_json()}
    try:
        work = "runtime_support.faults:train_otherwise"
        launch.watch_local(work, plan.programs, job, options.timeout_ns, lambda rank, report: None, RANK)
    except PipeplanError as error:
        return str(error)
    return ""


def _under_torchrun(plan: Plan, options: TrainOptions) -> str:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(plan.model_dump_json())
        file.flush()
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        command += [str(len(plan.programs)), *RANK[1:], "run", file.name, "--model", options.model]
        command += ["--dtype", str(options.dtype or "float32"), "--steps", str(options.num_steps), "--timeout", "2s"]
        command += ["--checkpoint", str(options.checkpoint), "--checkpoint-every", "1"]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    said = [line.removeprefix("pipeplan: ") for line in done.stderr.splitlines() if line.startswith("pipeplan: ")]
    return "\n".join(line for line in said if not line.startswith("checkpoint "))


def loads(folder: Path, step: int) -> bool:
    """Whether there is the checkpoint behind the step before, or this one, and all of it can be read."""
    import torch
    from torch.distributed.checkpoint import FileSystemReader, load

    from pipeplan.runtime.training.checkpoint import CheckpointFolder

    checkpoints = CheckpointFolder(str(folder))
    last = max(checkpoints.whole(), default=0)
    if last == 0:
        return step == 0
    reader = FileSystemReader(checkpoints.of(last))
    kept = reader.read_metadata().state_dict_metadata
    state = {name: torch.full(each.size, torch.nan, dtype=each.properties.dtype) for name, each in kept.items()}
    with warnings.catch_warnings(action="ignore"):  # that there are no other processes
        load(state, storage_reader=reader, no_dist=True)
    return last in (step, step + 1) and all(bool(tensor.isfinite().all()) for tensor in state.values())


def shorten_start(fault: Fault) -> None:
    """In this process."""
    if fault.hangs_long:
        launch._START_TIMEOUT_NS = START_TIMEOUT_NS


# In the rank -----------------------------------------------------------------------------------------------------


def _raise() -> None:
    raise ValueError("boom")


def _forever() -> None:
    while True:
        time.sleep(1)


ACTS: Mapping[str, Callable[[], None]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "ended": lambda: os._exit(3),
    "raised": _raise,
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "endless": _forever,
}


def arm(fault: Fault, told: str) -> None:
    """Let the fault happen, once, when its rank begins what it says."""
    begin, done = Progress.begin, []

    def begin_or_fail(self: Progress, phase: Phase, counter: int = -1, peer: int = -1) -> None:
        begin(self, phase, counter, peer)
        place = counter == fault.counter if fault.counter >= 0 else phase.name == fault.phase
        step = getattr(self, "step", 0)
        if not done and self.rank == fault.rank and place and step >= fault.step:
            done.append(True)
            Path(told).write_text(json.dumps({"where": self.describe(), "at": time.monotonic(), "step": step}))
            ACTS[fault.kind]()

    Progress.begin = begin_or_fail  # type: ignore[method-assign]  # the only way in without a hook in the product


def other(job: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The job of a rank that was started otherwise."""
    changed = dict(job)
    if kind == "other options":
        changed["options"] = {**job["options"], "seed": 1}
    elif kind == "other plan":
        changed["plan"] = json.dumps({**json.loads(job["plan"]), "name": "another"})
    return changed


def fault_here() -> tuple[Fault, str]:
    """What this process is to do, and where it says that it does."""
    wanted = json.loads(os.environ[FAULT])
    told = wanted.pop("told")
    return Fault(**wanted), told


def train_otherwise(job: Report, context: RankContext) -> None:
    """The job of a rank: trains, one of them maybe with something else than the others."""
    from pipeplan.runtime.training.trainer import train_job

    fault, told = fault_here()
    if context.rank == fault.rank and fault.kind in DIFFERENCES:
        Path(told).write_text(json.dumps({"where": "", "at": time.monotonic()}))
        job = other(job, fault.kind)
    train_job(job, context)


def main() -> None:
    """Be a rank that fails: one of those that the parent starts, or under torchrun with a command line behind it."""
    identity = None if "RANK" in os.environ else take_identity()
    fault, told = fault_here()
    shorten_start(fault)
    if fault.kind in ACTS:
        arm(fault, told)
    if identity is None:
        from pipeplan.cli.main import main as run_command

        run_command()
        return
    from pipeplan.runtime.launch.worker import be_rank

    be_rank(identity)


if __name__ == "__main__":
    main()
