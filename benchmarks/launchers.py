"""Who starts the ranks of one machine, and what is known when one fails: ``run --local``'s launcher beside torch's.

    python benchmarks/launchers.py [--repeats 5] [--kept pieces.jsonl --part-seconds 90]

Two ranks meet on gloo, then wait for each other twenty times a second, none longer than 5 s. They are started by
:func:`pipeplan.runtime.launch.local.watch_local`, by ``torch.distributed.elastic.multiprocessing.start_processes``,
which is what torchrun's agent starts workers with, and by ``torchrun --standalone``. Prints a Markdown table: what
starting takes, who may connect to launcher and ranks, and what happens where the launcher is killed, nobody reads what
ranks print, or one of them is killed or stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median

from resumed import Paused, Pieces, resumable
from tables import machine, markdown, note

WAYS = {"pipeplan": "`run --local`", "processes": "`start_processes`", "torchrun": "`torchrun`"}
NUM_RANKS, FAULT_STEP, TIMEOUT_S = 2, 3, 5
STEPS = {"start": 1, "printed": 40, "listening": 60, "orphans": 1200, "killed": 1200, "stopped": 1200}
LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")
"""127.0.0.1, ::1 and ::ffff:127.0.0.1, as the system lists them."""


# A rank -----------------------------------------------------------------------------------------------------------


def work(case: str, folder: str, rank: int, begin: Callable[[int], None] = lambda step: None) -> None:
    """What a rank does once all have met: as many steps as the case has, and what is to go wrong."""
    import torch.distributed as dist

    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=TIMEOUT_S))
    for step in range(STEPS[case]):
        begin(step)
        if step == FAULT_STEP:
            Path(folder, f"{rank}.pid").write_text(str(os.getpid()), encoding="ascii")
            if rank == 1 and case in ("killed", "stopped"):
                os.kill(os.getpid(), signal.SIGKILL if case == "killed" else signal.SIGSTOP)
            if rank == 1 and case == "printed":
                print("x" * (1 << 20), flush=True)
        dist.barrier(group)
        time.sleep(0.05)


def rank_job(job: object, context: object) -> None:
    """The same for a rank of ours, which notes where it is."""
    from pipeplan.runtime.launch.job import RankContext
    from pipeplan.runtime.launch.status import Phase

    assert isinstance(job, dict)
    assert isinstance(context, RankContext)

    def begin(step: int) -> None:
        context.progress.step = step
        context.progress.begin(Phase.RUNNING, 0)

    work(job["case"], job["folder"], context.rank, begin)


def rank_of_torch(case: str, folder: str) -> None:
    """The same for a rank that torch has started."""
    import torch.distributed as dist

    meeting = "env://" if "MASTER_ADDR" in os.environ else f"file://{folder}/meeting"
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=NUM_RANKS)
    work(case, folder, rank)
    dist.barrier()
    dist.destroy_process_group()


# Who starts them --------------------------------------------------------------------------------------------------


def launch(way: str, case: str, folder: str) -> int:
    """Start the ranks in one of the ways, and say what is known at the end."""
    if way == "pipeplan":
        from pipeplan.errors import PipeplanError
        from pipeplan.runtime.launch.local import watch_local

        programs = [(f"{rank}F0",) for rank in range(NUM_RANKS)]
        try:
            watch_local("launchers:rank_job", programs, {"case": case, "folder": folder}, TIMEOUT_S * 10**9, _ignore)
        except PipeplanError as error:
            note(f"told: {error}")
            return 1
        return 0
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes

    arguments = (__file__, "--rank", case, folder)
    context = start_processes(
        "ranks",
        sys.executable,
        dict.fromkeys(range(NUM_RANKS), arguments),
        {rank: {"RANK": str(rank)} for rank in range(NUM_RANKS)},
        DefaultLogsSpecs(log_dir=folder),
    )
    ended = context.wait()
    for failure in sorted(ended.failures.values(), key=lambda each: each.timestamp)[:1] if ended else ():
        note(f"told: local_rank {failure.local_rank}, exitcode {failure.exitcode}")
    return int(bool(ended and ended.failures))


def _ignore(rank: int, report: object) -> None:
    """Nothing is reported."""


def command(way: str, case: str, folder: str) -> list[str]:
    if way == "torchrun":
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_RANKS)]
        return [sys.executable, *torchrun, __file__, "--rank", case, folder]
    return [sys.executable, __file__, "--launch", way, case, folder]


# What happens -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def launched(way: str, case: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A launcher at work, and the folder of its ranks; nothing is left over."""
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            command(way, case, folder),
            text=True,
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        try:
            yield process, Path(folder)
        finally:
            for pid in [process.pid, *(pid for pid in pids(Path(folder)) if alive(pid))]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.communicate()


def pids(folder: Path) -> list[int]:
    return [int(text) for path in folder.glob("*.pid") if (text := path.read_text(encoding="ascii"))]


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(") ")[2][:1] not in "ZX"
    return False


def begun(folder: Path) -> list[int]:
    """The ranks' processes, once all are at the step where something may go wrong."""
    while len(pids(folder)) < NUM_RANKS:
        time.sleep(0.02)
    return pids(folder)


def starting(way: str, repeats: int) -> str:
    """Processor seconds of launcher and ranks, and the wall's, of a run of one step."""
    worked, took = [], []
    for _ in range(repeats):
        before, since = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        with launched(way, "start") as (process, _):
            process.communicate()
        took.append(time.monotonic() - since)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        worked.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return f"{median(worked):.1f} s of work, {median(took):.1f} s"


def listening(way: str) -> str:
    """Sockets of launcher and ranks on which others than this machine's processes may connect."""
    with launched(way, "listening") as (process, folder):
        found = sum(map(open_to_others, [process.pid, *begun(folder)]))
        process.communicate()
    return f"{found} sockets"


def open_to_others(pid: int) -> int:
    links = [os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir() if each.is_symlink()]
    inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return sum(row[9] in inodes and row[3] == "0A" and row[1].split(":")[0] not in LOOPBACK for row in rows)


def orphans(way: str) -> str:
    """Ranks that are left two seconds after the launcher was killed."""
    with launched(way, "orphans") as (process, folder):
        ranks = begun(folder)
        process.kill()
        process.wait()
        time.sleep(2.0)
        return f"{sum(map(alive, ranks))} ranks are left"


def unread(way: str) -> str:
    """Whether the run goes on while nobody reads a megabyte that a rank prints, for longer than ranks wait."""
    with launched(way, "printed") as (process, folder):
        begun(folder)
        time.sleep(TIMEOUT_S + 3.0)
        process.communicate()
        return "goes on" if process.returncode == 0 else "ends with an error"


def fault(way: str, case: str) -> str:
    """What is said of a rank that is killed or stopped, and how long after it everything has ended."""
    with launched(way, case) as (process, folder):
        ranks, since = begun(folder), time.monotonic()
        error = process.communicate()[1]
        took = time.monotonic() - since
        left = sum(map(alive, ranks))
        return f"{told(error)}; {took:.1f} s" + f", {left} left" * bool(left)


def told(error: str) -> str:
    """What a launcher itself says of the first failure, without remedies and effects."""
    if found := re.search(r"^told: (.*)", error, re.MULTILINE):
        return found[1].partition("; ")[0]
    cause = error.partition("Root Cause")[2]
    rank, code = (re.search(rf"{name} *: (.*)", cause) for name in ("rank", "exitcode"))
    return f"rank {rank[1]}, exitcode {code[1]}" if rank and code else error[-200:]


def rows(ways: Sequence[str], repeats: int, pieces: Pieces) -> Iterator[list[str]]:
    questions: dict[str, Callable[[str], str]] = {
        "starting two ranks that meet": lambda way: starting(way, repeats),
        "open to other machines": listening,
        "the launcher is killed": orphans,
        "nobody reads what a rank prints": unread,
        "a rank is killed": lambda way: fault(way, "killed"),
        "a rank is stopped": lambda way: fault(way, "stopped"),
    }
    for question, answer in questions.items():
        yield [question, *(pieces.get(f"{question}, {way}", partial(answer, way)) for way in ways)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    resumable(parser)
    parser.add_argument("--launch", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.launch:
        return launch(*asked.launch)
    if asked.rank:
        rank_of_torch(*asked.rank)
        return 0
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        table = list(rows(list(WAYS), asked.repeats, Pieces(asked.kept, asked.part_seconds)))
    except Paused as paused:
        note(str(paused))
        return 3
    print(markdown(["", *WAYS.values()], table))
    print(f"\n{machine()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
