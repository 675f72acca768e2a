"""Searches with workers of which one, all, or the process that began them is hit from outside, at any moment.

A command runs as its user starts it. Once its workers are there, and while it still has time, one of its processes is
killed, stopped for good or for a while, told to end or interrupted, by the terminal all of them at once. Then: the
command ends soon after its time limit, or after the interruption, leaves no process, and what it says it has found is a
valid plan in its file. Its messages go to a terminal, where the best value stands as soon as there is one: from then on
a command that ends by itself without a plan has lost one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from attack_faults import children, left_over, living
from attack_part import Ended, drawn_for
from limits import chain, cluster

from pipeplan.checker import check
from pipeplan.files import read_plan

__all__ = ["Searches"]

LIMIT_S = 6
SOON_S = 10.0
MOST_DRAWN = 4
COMMAND = f"search chain.json --cluster cluster.json --mini-batch 256 --workers 2 --time-limit {LIMIT_S}s -o found.json"
START = [sys.executable, "-m", "pipeplan"]
_SUBREAPER = 36
_KNOWN = re.compile(r"\bbest [\d.,]+ ?[mun]?s")

WORKER_SIGNALS = {"killed": signal.SIGKILL, "ended": signal.SIGTERM, "stopped": signal.SIGSTOP, "slow": signal.SIGSTOP}
OWN_SIGNALS = {
    "interrupted": signal.SIGINT,
    "told to end": signal.SIGTERM,
    "hung up": signal.SIGHUP,
    "launcher killed": signal.SIGKILL,
    "launcher slow": signal.SIGSTOP,
}
INTERRUPTIONS = ("interrupted", "told to end", "hung up")


@dataclass(frozen=True, slots=True)
class Hit:
    """What happens to a worker, all workers, the launcher or everybody, once workers are there.

    It comes when that ``share`` of the time is over that the search then has until its limit; one that is to hit a
    search which has ``told`` of a value comes no sooner than that stands on the terminal.
    """

    kind: str
    whole: bool
    share: float
    told: bool = False

    @property
    def name(self) -> str:
        """With whom it happens to."""
        who = "workers" if self.whole else "a worker"
        if self.kind in OWN_SIGNALS:
            return f"all {self.kind}" if self.whole and self.kind in INTERRUPTIONS else self.kind
        return f"{who} {self.kind}"


def drawn(rng: Random) -> Hit:
    """Any."""
    return Hit(rng.choice([*WORKER_SIGNALS, *OWN_SIGNALS]), rng.random() < 0.5, rng.random())


def drawn_hits(part: str, seed: int, index: int) -> list[Hit]:
    """A hit, and those that take its place where the search was over before it came."""
    rng = drawn_for(part, seed, index)
    return [drawn(rng) for _ in range(MOST_DRAWN)]


@dataclass
class Searches:
    """Searches with workers, one after another."""

    name: str = "searches"
    count: int = 50
    limit_s: float = 90.0
    memory_bytes: int | None = None
    inputs: dict[str, str] = field(default_factory=dict)

    def prepare(self, folder: Path) -> None:
        """What is searched for: more than the limit has time for."""
        self.inputs = {
            "chain.json": chain(96, (1, 2, 4, 8)).model_dump_json(),
            "cluster.json": cluster(64, 200 * 10**6).model_dump_json(),
        }

    def attack(self, index: int, seed: int, folder: Path) -> Ended:
        """One search, one hit, and what is left."""
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)  # whoever is left over becomes a child of this process
        ended = Ended("over before")
        for number, hit in enumerate(drawn_hits(self.name, seed, index)):
            own = folder / str(number)
            own.mkdir()
            self._write(own)
            ended = self._attacked_alone(hit, own)
            if ended.how != "over before":
                break
        return ended

    def _attacked_alone(self, hit: Hit, folder: Path) -> Ended:
        try:
            return self._attacked(hit, folder)
        finally:
            for pid in children(os.getpid()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _write(self, folder: Path) -> None:
        for name, text in self.inputs.items():
            (folder / name).write_text(text)

    def show(self, index: int, seed: int, folder: Path) -> str:
        """The hit and the command, with its files."""
        self._write(folder)
        hits = map(str, drawn_hits(self.name, seed, index))
        return "\n".join([f"pipeplan {COMMAND}", "\nor, where that came when all was over:\n".join(hits)])

    def _attacked(self, hit: Hit, folder: Path) -> Ended:
        begun = time.monotonic()
        with _terminal() as (slave, said), (folder / "out").open("w") as out:
            process = subprocess.Popen(
                [*START, *COMMAND.split()],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=slave,
                env=os.environ | {"COLUMNS": "200", "TERM": "xterm"},
                start_new_session=True,
            )
            os.close(slave)
            until = time.monotonic() + (self.limit_s if hit.told else 30)
            while process.poll() is None and time.monotonic() < until:
                if workers_of(process.pid) and (_tells_of_a_value(said) or not hit.told):
                    break
                time.sleep(0.01)
            time.sleep(hit.share * max(0.0, begun + LIMIT_S - time.monotonic()))
            workers = workers_of(process.pid)
            if not workers:
                return Ended("over before")
            happened = time.monotonic()
            _inflict(hit, process.pid, workers)
            soon = SOON_S + (0.0 if hit.kind in INTERRUPTIONS else LIMIT_S)
            try:
                code = process.wait(soon)
            except subprocess.TimeoutExpired:
                return Ended(hit.name, "hang", f"{hit}: more than {soon:g} s")
            took = time.monotonic() - happened
        return judged(hit, code, _text(said), folder, took)


def _text(said: list[bytes]) -> str:
    return b"".join(said).decode(errors="replace")


def _tells_of_a_value(said: list[bytes]) -> bool:
    return _KNOWN.search(_text(said)) is not None


def judged(hit: Hit, code: int, said: str, folder: Path, took: float) -> Ended:
    """How a command ended that was hit: by its exit code, what it said on the terminal, and what it left."""
    what = f"{hit}, after {took:.1f} s, exit {code}: {said[-1500:]}"
    known = hit.kind != "launcher killed" and (code == 0 or _KNOWN.search(said) is not None)
    for wrong, found in (
        ("orphan", left_over()),
        ("traceback", _tracebacks(said, hit)),
        ("lost", known and _lost(folder / "found.json")),
        ("exit", not _is_promised(code, hit)),
    ):
        if found:
            return Ended(hit.name, wrong, f"{found}: {what}")
    return Ended(hit.name)


def _tracebacks(said: str, hit: Hit) -> bool:
    """Whether there are any; but for Python's own of a worker that it is still starting as its launcher is killed."""
    own = said.split("Traceback (most recent call last)")[1:]
    if hit.kind == "launcher killed":
        own = [text for text in own if "pipeplan" in text or "EOFError: Ran out of input" not in text]
    return bool(own)


@contextlib.contextmanager
def _terminal() -> Iterator[tuple[int, list[bytes]]]:
    """What a command may write to as to a terminal, to be closed once it has it; and what has been read of that."""
    master, slave = pty.openpty()
    said: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # nobody has the other end any more
            while text := os.read(master, 65_536):
                said.append(text)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield slave, said
    finally:
        reader.join(2.0)  # workers that are left over have it, too
        with contextlib.suppress(OSError):
            os.close(master)


def workers_of(launcher: int) -> list[int]:
    """Processes that evaluate candidates for it."""
    found = []
    for pid in living(children(launcher)):
        with contextlib.suppress(OSError):
            if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def _inflict(hit: Hit, launcher: int, workers: list[int]) -> None:
    with contextlib.suppress(ProcessLookupError):
        if hit.whole and hit.kind in INTERRUPTIONS:
            os.killpg(launcher, OWN_SIGNALS[hit.kind])
            return
        victims = [launcher] if hit.kind in OWN_SIGNALS else workers if hit.whole else workers[:1]
        for pid in victims:
            os.kill(pid, (WORKER_SIGNALS | OWN_SIGNALS)[hit.kind])
        if hit.kind in ("slow", "launcher slow"):
            time.sleep(0.7 if hit.kind == "slow" else LIMIT_S)
            for pid in victims:
                os.kill(pid, signal.SIGCONT)


def _is_promised(code: int, hit: Hit) -> bool:
    """Whether a command that is hit so may end with a code: 3 where no plan was known at its limit."""
    if hit.kind == "launcher killed":
        return code == -signal.SIGKILL
    return code in ((0, 130) if hit.kind in INTERRUPTIONS else (0, 3))


def _lost(path: Path) -> str:
    """What is wrong with a plan that was written."""
    try:
        report = check(read_plan(str(path)))
    except Exception as error:  # whatever half of a file leads to
        return f"{type(error).__name__}: {error}"
    return "" if report.valid else f"it is not valid: {report}"
