"""Attacks: files and command lines that nobody meant, damaged plans and checkpoints, bounds tried in full, processes
that fail.

    python benchmarks/attack.py --state attack.jsonl                 # all of it; again: goes on where it stopped
    python benchmarks/attack.py --state attack.jsonl --only plans --count 100 --seed 1
    python benchmarks/attack.py --state attack.jsonl --table   # docs/benchmarks/robustness.md, of what was run
    python benchmarks/attack.py --show inputs 123 --folder here      # one attack's files, and its command

Every attack is the same whenever its part, seed and number are, so that a number is all it takes to see it again. They
run in forked processes, two beside each other, with limits of time and memory; what takes too long is tried once more
alone, with as much more time as the machine's load is above its cores. Each line of the state file is an attack that
has ended.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import resource
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tables import machine, markdown, note

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from attack_bounds import Bounds
from attack_checkpoints import Checkpoints
from attack_faults import Faults
from attack_inputs import Inputs
from attack_part import WRONG, Ended, Part
from attack_plans import Plans
from attack_searches import Searches

__all__ = ["PARTS", "attacked"]

PARTS: dict[str, type[Part]] = {
    "inputs": Inputs,
    "plans": Plans,
    "bounds": Bounds,
    "faults": Faults,
    "searches": Searches,
    "checkpoints": Checkpoints,
}
WORKERS = 2


@dataclass(frozen=True, slots=True)
class Attack:
    """One attack, and how it ended."""

    part: str
    seed: int
    index: int
    ended: Ended
    seconds: float
    processor_s: float = 0.0
    commit: str = ""


class Worker:
    """A forked process that does one attack after another, and that can be killed in the middle of one."""

    def __init__(self, part: Part, seed: int) -> None:
        self.part, self.seed = part, seed
        ours, theirs = socket.socketpair()
        self.pid = os.fork()
        if not self.pid:
            ours.close()
            self._work(theirs)
        theirs.close()
        self.stream = ours.makefile("rw", encoding="utf-8")
        self.socket = ours
        self.index, self.until = -1, 0.0

    def _work(self, theirs: socket.socket) -> None:
        """In the forked process: until the other end is closed."""
        os.setsid()
        if self.part.memory_bytes is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (self.part.memory_bytes, self.part.memory_bytes))
        stream = theirs.makefile("rw", encoding="utf-8")
        with contextlib.suppress(ConnectionError):  # it is ended before it has begun, and is not to go on as its parent
            for line in stream:
                begin, used = time.monotonic(), processor_s()
                ended = attacked(self.part, int(line), self.seed)
                took = {"seconds": time.monotonic() - begin, "processor_s": processor_s() - used}
                stream.write(json.dumps({"ended": asdict(ended), **took}) + "\n")
                stream.flush()
        os._exit(0)

    def begin(self, index: int, *, last: bool) -> None:
        """Do one; there is an answer on the socket later. The last time it has as much longer as others slow it."""
        slowed = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)) if last else 1.0
        self.index, self.until = index, time.monotonic() + self.part.limit_s * slowed
        self.stream.write(f"{index}\n")
        self.stream.flush()

    def answer(self) -> tuple[Ended, float, float] | None:
        """How it ended, and its seconds by the clock and of processors; None where the process ended, too."""
        try:
            line = self.stream.readline()
        except ConnectionError:
            line = ""
        if not line:
            return None
        found = json.loads(line)
        return Ended(**found["ended"]), found["seconds"], found["processor_s"]

    def end(self) -> int:
        """Kill it and what it started; the status that it ended with."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.stream.close()
        self.socket.close()
        return os.waitpid(self.pid, 0)[1]


def processor_s() -> float:
    """Seconds that processors have worked for this process and those of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def attacked(part: Part, index: int, seed: int) -> Ended:
    """Do one attack in a folder of its own, here."""
    folder = Path(tempfile.mkdtemp(prefix="attack-"))
    try:
        return part.attack(index, seed, folder)
    except BaseException:  # of the attack itself
        return Ended("traceback", "traceback", traceback.format_exc())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass
class Pool:
    """Workers of one part."""

    part: Part
    seed: int
    numbers: Iterator[int]
    workers: list[Worker] = field(default_factory=list)
    late: list[int] = field(default_factory=list)

    def run(self, count: int, until: float) -> Iterator[Attack]:
        """All numbers, in the order in which they end; those that took too long last, one at a time."""
        yield from self._run(min(count, WORKERS), until, last=False)
        late, self.late = self.late, []
        self.numbers = iter(late)
        yield from self._run(1, until, last=True)

    def _run(self, count: int, until: float, *, last: bool) -> Iterator[Attack]:
        self.workers = [Worker(self.part, self.seed) for _ in range(count)]
        try:
            with selectors.DefaultSelector() as selector:
                for worker in self.workers:
                    self._next(worker, selector, until, last=last)
                while selector.get_map():
                    for key, _ in selector.select(0.2):
                        selector.unregister(key.fileobj)
                        yield from self._ended(key.data, selector, until, last=last)
                    for worker in [key.data for key in selector.get_map().values()]:
                        if time.monotonic() > worker.until:
                            selector.unregister(worker.socket)
                            yield from self._hung(worker, selector, until, last=last)
        finally:
            for worker in self.workers:
                worker.end()

    def _next(self, worker: Worker, selector: selectors.BaseSelector, until: float, *, last: bool) -> None:
        index = next(self.numbers, None) if time.monotonic() < until else None
        if index is not None:
            worker.begin(index, last=last)
            selector.register(worker.socket, selectors.EVENT_READ, worker)

    def _ended(self, worker: Worker, selector: selectors.BaseSelector, until: float, *, last: bool) -> Iterator[Attack]:
        answer = worker.answer()
        if answer is None:
            index, status = worker.index, self._replace(worker, selector, until, last=last)
            yield self._attack(index, Ended("died", "traceback", f"the process ended with status {status}"), 0.0)
            return
        yield self._attack(worker.index, *answer)
        self._next(worker, selector, until, last=last)

    def _hung(self, worker: Worker, selector: selectors.BaseSelector, until: float, *, last: bool) -> Iterator[Attack]:
        index = worker.index
        self._replace(worker, selector, until, last=last)
        if last:
            yield self._attack(index, Ended("hang", "hang", f"more than {self.part.limit_s:g} s"), self.part.limit_s)
        else:
            self.late.append(index)

    def _replace(self, worker: Worker, selector: selectors.BaseSelector, until: float, *, last: bool) -> int:
        status = worker.end()
        self.workers.remove(worker)
        self.workers.append(Worker(self.part, self.seed))
        self._next(self.workers[-1], selector, until, last=last)
        return status

    def _attack(self, index: int, ended: Ended, seconds: float, processor: float = 0.0) -> Attack:
        return Attack(self.part.name, self.seed, index, ended, round(seconds, 3), round(processor, 3), commit())


@functools.cache
def commit() -> str:
    """What is attacked: the commit of the sources, with a + where they differ from it."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--abbrev=10", "--exclude=*"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()


# Keeping what has ended --------------------------------------------------------------------------------------------


def read(state: Path) -> list[Attack]:
    """What a state file has; a line that was being written when all ended is left out."""
    found = []
    for line in state.read_text().splitlines() if state.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            data = json.loads(line)
            found.append(Attack(**{**data, "ended": Ended(**data["ended"])}))
    return found


def go_on(name: str, options: argparse.Namespace) -> None:
    """Do what a part has not done yet, and write it down."""
    part = PARTS[name]()
    done = {each.index for each in read(options.state) if (each.part, each.seed) == (name, options.seed)}
    count = part.count if options.count is None else options.count
    numbers = [index for index in range(count) if index not in done]
    if not numbers:
        return
    with tempfile.TemporaryDirectory() as folder, options.state.open("a") as file:
        part.prepare(Path(folder))
        until = time.monotonic() + 3600 * options.hours
        for number, each in enumerate(Pool(part, options.seed, iter(numbers)).run(WORKERS, until), 1):
            file.write(json.dumps(asdict(each)) + "\n")
            file.flush()
            if each.ended.wrong:
                note(f"{name} {each.index}: {each.ended.wrong}: {each.ended.what.strip()[-300:]}")
            if number % 100 == 0:
                note(f"{name}: {number} of {len(numbers)}")


HEADER = ["", "attacks", *(title for title, _ in WRONG.values()), "slowest, s", "processor, s each"]


def table(attacks: Sequence[Attack]) -> str:
    """What must not happen, and how often it did; each part's ends, and what was attacked, below."""
    by_part: dict[str, list[Attack]] = defaultdict(list)
    for each in attacks:
        by_part[each.part].append(each)
    rows, ends = [], []
    for name in PARTS:
        found = by_part[name]
        if found:
            wrong = Counter(each.ended.wrong for each in found)
            slowest, processor = max(each.seconds for each in found), sum(each.processor_s for each in found)
            counts = [f"{len(found):,}", *(f"{wrong[what]:,}" for what in WRONG)]
            rows.append([name, *counts, f"{slowest:.1f}", f"{processor / len(found):.2f}"])
            counted = Counter(each.ended.how for each in found).most_common()
            ends.append(f"{name}: {', '.join(f'{how} {count:,}' for how, count in counted)}.")
    seeds, commits = ({getattr(each, name) for each in attacks} for name in ("seed", "commit"))
    of = f"Seed {', '.join(map(str, sorted(seeds)))}, commit {', '.join(sorted(commits))}. {machine()}."
    return "\n".join([markdown(HEADER, rows), "", *ends, "", of])


def show(name: str, index: int, options: argparse.Namespace) -> None:
    """One attack's files."""
    part: Any = PARTS[name]()
    with tempfile.TemporaryDirectory() as folder:
        part.prepare(Path(folder))
    options.folder.mkdir(parents=True, exist_ok=True)
    print(part.show(index, options.seed, options.folder.absolute()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, default=Path("attack.jsonl"), help="where what has ended is kept")
    parser.add_argument("--only", choices=list(PARTS), nargs="+", default=list(PARTS))
    parser.add_argument("--count", type=int, help="attacks of each part, instead of all")
    parser.add_argument("--hours", type=float, default=1e6, help="of each part")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--table", action="store_true", help="attack nothing")
    parser.add_argument("--show", nargs=2, metavar=("PART", "NUMBER"), help="one attack's files and command")
    parser.add_argument("--folder", type=Path, default=Path("attack"), help="for --show")
    options = parser.parse_args()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, and so by all that is attacked
    if options.show:
        show(options.show[0], int(options.show[1]), options)
        return
    if not options.table:
        for name in options.only:
            go_on(name, options)
    found = read(options.state)
    print(table(found))
    sys.exit(any(each.ended.wrong for each in found))


if __name__ == "__main__":
    main()
