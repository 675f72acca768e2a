"""Ranks without torch, and a process that starts some: what is about processes alone, in a moment."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

from pipeplan.runtime.launch import local
from pipeplan.runtime.launch.__main__ import take_identity
from pipeplan.runtime.launch.job import Report, Reports
from pipeplan.runtime.launch.status import Board, Phase, Progress

RANK = (sys.executable, "-m", "runtime_support.plain_rank")
STANDS_STILL = "RANKS_STAND_STILL"
"""In the environment: ranks stop before they know who they are, or whose."""

PARENT = (sys.executable, "-m", "runtime_support.plain_rank", "parent")


def rank() -> None:
    """Print some letters, report so many lines of some bytes, then stay as long as the job says, or be killed."""
    if STANDS_STILL in os.environ:
        os.kill(os.getpid(), signal.SIGSTOP)
    identity = take_identity()
    progress = Progress(Board(identity["board"], identity["world_size"]), identity["rank"])
    report = Reports(identity["reports"])
    job = json.loads(os.pread(identity["job"], 1 << 20, 0))
    progress.begin(Phase.RUNNING, 0)
    for stream in (sys.stdout, sys.stderr) if "prints" in job else ():
        print("x" * job["prints"], file=stream)
    if job.get("dies"):
        os.kill(os.getpid(), signal.SIGKILL)
    for line in range(job["lines"]):
        report({"event": "line", "line": line, "filler": "x" * job["bytes"]})
    time.sleep(job["stay_s"])
    progress.begin(Phase.DONE)
    report({"event": "done"})
    if "done" in job:  # but for what there is no room for
        Path(job["done"], str(identity["rank"])).touch()
    report.close()


def parent(job: Report) -> None:
    """Run two ranks with little patience, and say what is heard; one that ``stops`` does so at the first report, for an
    hour by its clock.
    """
    local._LATE_NS, local._PAUSE_NS = 0, 200_000_000
    num_heard = 0

    def listen(rank: int, report: Report) -> None:
        nonlocal num_heard
        num_heard += 1
        if report["line"] == 0:
            print("begun", flush=True)
        if num_heard == 1 and job["stops"]:
            os.kill(os.getpid(), signal.SIGSTOP)
            now = time.monotonic_ns
            mock.patch.object(time, "monotonic_ns", side_effect=lambda: now() + 3600 * 10**9).start()

    local.watch_local("", [("0F0",)] * 2, job, job["timeout_ns"], listen, RANK)
    print(f"heard {num_heard}", flush=True)


def main(arguments: Sequence[str]) -> None:
    """Be what the command line says."""
    if arguments:
        parent(json.loads(arguments[1]))
    else:
        rank()


if __name__ == "__main__":
    main(sys.argv[1:])
