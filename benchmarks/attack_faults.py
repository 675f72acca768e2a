"""Processes that fail: runs, emulated runs, profiles and measured links, hit anywhere from outside.

A command runs as its user starts it, with its ranks as processes of their own, but all are forked from one that has
imported torch, which saves 4 s of processor time each. At a moment that is drawn, a step, or while a checkpoint is
written, one of its processes is killed, stopped, stopped for a while, told to end, cut off (a connection to
another is shut down) or left without room on the disk; or its launcher stands still for longer than anything may take,
or what it prints goes to a pager that nobody reads for so long. Then: the command ends within 10 s (after its timeout,
where a process stands still), or goes on to its end after a pause, names what failed in one message, leaves no
process, every checkpoint that was whole is, and the same command with ``--resume``, or again, gets to the end, with the
losses of a training that nothing disturbed. Half of the launchers that are killed leave ranks that stand still, and
that only the system can end.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import re
import resource
import runpy
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import SimpleNamespace
from unittest import mock

from attack_part import Ended, drawn_for

__all__ = ["PRELOADED", "Fault", "Faults", "Forked", "children", "left_over", "living", "wrong_message"]

TESTS = Path(__file__).parents[1] / "tests"
SOON_S = 10.0
TIMEOUT_S = 3.0
START_S = 8.0
WHOLE_S = 90.0  # of all processors for a whole command, most of it imports of three processes; seen: 40
STEPS = 12
_SUBREAPER = 36
_ABOVE = 200  # descriptors from here on are free in a new process
PRELOADED = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "pipeplan.cli.run_verb",
    "pipeplan.cli.profile_verb",
    "pipeplan.runtime.training.trainer",
    "pipeplan.runtime.emulation.emulate",
    "pipeplan.runtime.profiling.measure",
    "pipeplan.runtime.profiling.links",
    "pipeplan.runtime.launch.worker",
    "runtime_support.models",
)

COMMANDS = {
    "emulate": "run plan.json --emulate --local --steps 8 --stretch 20000 --timeout 3s --trace trace.json",
    "train": f"run plan.json --model runtime_support.models:chain --local --dtype float64 --steps {STEPS} --timeout 3s "
    "--checkpoint kept --checkpoint-every 1",
    "profile": "profile gpt2-tiny --microbatch 1,2,4 --repeats 60 -o profile.json",
    "links": "profile --communication --processes 2 --max-bytes 4MiB --repeats 8 -o links.json",
}
WEIGHTS = {"emulate": 4, "train": 9, "profile": 4, "links": 2}
PAUSES = ("slow", "launcher slow", "unread")
"""Kinds after which a command goes on."""
KINDS = ("killed", "stopped", "ended", "interrupted", "cut off", "disk full", "launcher killed", *PAUSES)
ON_LAUNCHER = ("ended", "interrupted", "launcher killed", "launcher slow", "unread")

PLACE = r"(in [^;:]+ \(step \d+, program counter |(in|after) step \d+|before its first step|after its last|while )"
SAID = {
    "killed": rf"^rank VICTIM was killed \(SIGKILL\) {PLACE}",
    "stopped": rf"^rank VICTIM hangs {PLACE}",
    "ended": r"interrupted|SIGTERM|ended",
    "interrupted": r"interrupted",
    "cut off": rf"^rank \d+ .*{PLACE}",
    "disk full": r"cannot be written|could not|cannot|No space|too large",
}
"""What the message says in some words, and the rank and place that it names: of a connection either of its ends."""
WRITES = rf"^rank VICTIM (could not write kept/|cannot write kept/|.*{PLACE}.*(No space|too large))"
"""The same of a rank that finds no room for its part of a checkpoint, or before, for what it finds the others by."""
REMARKS = ("warning", "resuming", "2 processes on", "measuring ", "checkpoint ")


# Processes that are forked, not started ---------------------------------------------------------------------------


class Forked:
    """As much of ``subprocess.Popen`` as is asked of a rank, which is forked from here instead of started anew."""

    def __init__(
        self,
        command: Sequence[str],
        stdin: int,
        stdout: int,
        stderr: int,
        pass_fds: Sequence[int],
        process_group: int,
        env: Mapping[str, str],
    ) -> None:
        read, write = os.pipe()
        alone, own = os.pipe()
        self._status: int | None = None
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        self.pid = os.fork()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)  # what Python does when forking swallows exceptions
        if not self.pid:
            os.setpgid(0, process_group)
            os.write(own, b"\n")
            _become(command[2], env, {0: read, 1: stdout, 2: stderr, **{number: number for number in pass_fds}})
        os.close(own)
        if not select.select([alone], [], [], 1.0)[0]:  # it was stopped at once, and is to have a group all the same
            with contextlib.suppress(OSError):
                os.setpgid(self.pid, self.pid)
        os.close(read)
        os.close(alone)
        self.stdin = os.fdopen(write, "wb")

    def poll(self) -> int | None:
        if self._status is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # Ctrl-C came when it had been waited for: subprocess takes that as 0, too
                pid, status = self.pid, 0
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        until = time.monotonic() + (1e9 if timeout is None else timeout)
        while self.poll() is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("a rank", timeout or 0.0)
            time.sleep(0.005)
        assert self._status is not None
        return self._status


@contextlib.contextmanager
def _all_of_it() -> Iterator[None]:
    """What runs inside is all that this forked process does: it ends as a program would."""
    code = 1
    try:
        yield
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _become(module: str, env: Mapping[str, str], descriptors: Mapping[int, int]) -> None:
    """In the forked process: what a new one has, then the module as a program."""
    with _all_of_it():
        _keep(descriptors)
        os.environ.clear()
        os.environ.update(env)
        sys.argv = [module]
        sys.modules.pop(module, None)
        _listen_for_faults()
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def _keep(descriptors: Mapping[int, int]) -> None:
    """These descriptors under these numbers, and no others."""
    moved = {number: fcntl.fcntl(found, fcntl.F_DUPFD, _ABOVE) for number, found in descriptors.items()}
    os.closerange(0, _ABOVE)
    for number, found in moved.items():
        os.dup2(found, number)
        os.close(found)
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, buffering, closefd=False)  # noqa: SIM115  (they are the process's own)
        for number, mode, buffering in ((0, "r", -1), (1, "w", 1), (2, "w", 1))
    )


def _listen_for_faults() -> None:
    """Have a thread that shuts down one of this process's connections when a file of its number appears."""
    wanted = Path(f"cut-{os.getpid()}")

    def wait() -> None:
        while not wanted.exists() or not _cut_off(int(wanted.read_text())):
            time.sleep(0.01)

    threading.Thread(target=wait, daemon=True, name="faults").start()


def _cut_off(number: int) -> bool:
    """Shut down one of this process's connections, in the order in which they were made; False if it has none yet."""
    found = []
    with contextlib.ExitStack() as stack:
        for name in sorted(map(int, os.listdir("/proc/self/fd"))):
            with contextlib.suppress(OSError):  # not one, or no more, or one that listens
                if stat.S_ISSOCK(os.fstat(name).st_mode):
                    each = stack.enter_context(socket.socket(fileno=os.dup(name)))
                    if each.family in (socket.AF_INET, socket.AF_INET6) and each.getpeername():
                        found.append(each)
        if found:
            found[number % len(found)].shutdown(socket.SHUT_RDWR)
    return bool(found)


def start(command: str, folder: Path, out: str = "out") -> int:
    """The command in a process of its own, with its output in files, of which one may be a pipe; its number."""
    pid = os.fork()
    if pid:
        return pid
    with _all_of_it():
        os.chdir(folder)
        named = (("in", os.O_RDWR), (out, os.O_WRONLY), ("err", os.O_WRONLY))
        _keep({number: os.open(name, how | os.O_CREAT | os.O_TRUNC) for number, (name, how) in enumerate(named)})
        os.setsid()
        from pipeplan.cli import main
        from pipeplan.runtime.launch import local

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        _shorten_timeouts()
        names = {**vars(subprocess), "Popen": Forked}
        sys.argv = ["pipeplan", *command.split()]
        begun = mock.patch.object(main, "_open_closed_streams", Path("ready").touch)  # the first thing that it does
        with begun, mock.patch.object(local, "subprocess", SimpleNamespace(**names)):
            main.main()
    raise AssertionError("the process has ended")


class Pager:
    """Reads what a command prints into its file, but not while it is ``paused``."""

    def __init__(self, folder: Path) -> None:
        self._pipe, self._out = folder / "pipe", folder / "out"
        os.mkfifo(self._pipe)
        self._out.touch()
        self._goes_on = threading.Event()
        self._goes_on.set()
        self._thread = threading.Thread(target=self._read, daemon=True, name="pager")

    def begin(self) -> None:
        """Read; the command has begun, as a process that is forked should have no threads."""
        self._thread.start()

    def _read(self) -> None:
        with self._out.open("ab", buffering=0) as out:
            source = os.open(self._pipe, os.O_RDONLY)  # when the command has opened it, too
            while self._goes_on.wait() and (text := os.read(source, 1 << 16)):
                out.write(text)
            os.close(source)

    def paused(self, seconds: float) -> None:
        """Have no room for so long: what the command prints next waits."""
        self._goes_on.clear()
        with contextlib.suppress(OSError):  # the command has ended
            end = os.open(self._pipe, os.O_WRONLY | os.O_NONBLOCK)
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                with contextlib.suppress(BlockingIOError):
                    os.write(end, b"\n")
                    continue
                time.sleep(0.05)
            os.close(end)
        self._goes_on.set()

    def end(self) -> None:
        """All that was printed is in the file, unless somebody keeps the pipe open."""
        self._thread.join(5.0)


def _shorten_timeouts() -> None:
    """In this process, and in the ranks that are forked from it: starting may take minutes, and so may a link."""
    from pipeplan.runtime.launch import local
    from pipeplan.runtime.profiling.links import LinkOptions

    local._START_TIMEOUT_NS = round(START_S * 1e9)
    *others, _ = LinkOptions.__init__.__defaults__ or ()
    LinkOptions.__init__.__defaults__ = (*others, round(TIMEOUT_S * 1e9))  # the command has no flag for it


def children(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have."""
    found = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            found += list(map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split()))
    return found + [inner for each in found for inner in children(each)]


def living(pids: Sequence[int]) -> list[int]:
    """Those that are no zombies."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                found.append(pid)
    return found


def status_of(pid: int, until: float) -> int | None:
    """How a child ended, in the form of ``returncode``; None if it has not by then."""
    while time.monotonic() < until:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    return None


def used_ns(pids: Sequence[int]) -> tuple[int, int]:
    """Ns that all threads of these processes have worked, and waited for a core while they could have."""
    worked = waited = 0
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            for task in os.listdir(f"/proc/{pid}/task"):
                run, wait, _ = Path(f"/proc/{pid}/task/{task}/schedstat").read_text().split()
                worked, waited = worked + int(run), waited + int(wait)
    return worked, waited


def status_before_it_hangs(pid: int, still_s: float, worked_s: float = SOON_S) -> int | None:
    """How a child ended; None once it hangs, however many others the machine works for.

    It hangs when for ``still_s`` none of its processes has worked, or waited for a core, or all of them together have
    worked ``worked_s``: those are seconds that a machine to itself would have taken at least.
    """
    still = worked = 0.0
    last, before = time.monotonic(), used_ns([pid, *children(pid)])
    while still <= still_s and worked <= worked_s:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
        now, used = time.monotonic(), used_ns([pid, *children(pid)])
        run, wait = (max(0, new - old) / 1e9 for new, old in zip(used, before, strict=True))  # less where one ended
        still, worked = still + max(0.0, now - last - run - wait), worked + run
        last, before = now, used
    return None


# What is drawn -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to which process of which command, and when: after so many seconds, or steps, or in a checkpoint."""

    verb: str
    kind: str
    victim: int
    seconds: float
    step: int
    in_checkpoint: bool
    connection: int = 0

    @property
    def is_on_launcher(self) -> bool:
        return self.kind in ON_LAUNCHER


def drawn(rng: Random) -> Fault:
    """A fault anywhere."""
    verb = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    kinds = [kind for kind in KINDS if verb != "profile" or kind not in ("cut off", "stopped")]
    return Fault(
        verb,
        rng.choice(kinds),
        rng.randrange(2),
        rng.choice([0.0, rng.uniform(0, 0.5), rng.uniform(0, 2)]),
        rng.randrange(STEPS) if rng.random() < 0.7 else -1,
        rng.random() < 0.5,
        rng.randrange(8),
    )


def drawn_faults(name: str, seed: int, index: int) -> list[Fault]:
    """Faults of which the first counts that does not come when all is over."""
    rng = drawn_for(name, seed, index)
    return [drawn(rng) for _ in range(4)]


# One attack --------------------------------------------------------------------------------------------------------


@dataclass
class Faults:
    """Faults of processes, one command after another."""

    name: str = "faults"
    count: int = 200
    limit_s: float = 180.0
    memory_bytes: int | None = None
    plan: str = ""
    losses: list[str] = field(default_factory=list)

    def prepare(self, folder: Path) -> None:
        """Import what ranks need, and train once without any fault."""
        import importlib

        os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
        os.environ |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "COLUMNS": "100"}
        for module in PRELOADED:
            importlib.import_module(module)
        from runtime_support import models
        from runtime_support.plans import model_plan

        plan = model_plan(models.chain(), [0, 1, 1, 0], split=True, num_microbatches=4, microbatch_size=1)
        self.plan = plan.model_dump_json()
        self._write(folder)
        pid = start(COMMANDS["train"], folder)
        if status_of(pid, time.monotonic() + 100) != 0:
            raise RuntimeError(f"training without faults fails: {(folder / 'err').read_text()}")
        self.losses = losses_of(folder)
        if len(self.losses) != STEPS:
            raise RuntimeError(f"training without faults has {len(self.losses)} steps")

    def _write(self, folder: Path) -> None:
        (folder / "plan.json").write_text(self.plan)

    def attack(self, index: int, seed: int, folder: Path) -> Ended:
        """One command, one fault, and what is left."""
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)  # whoever is left over becomes a child of this process
        ended = Ended("over before")
        for number, fault in enumerate(drawn_faults(self.name, seed, index)):
            own = folder / str(number)
            own.mkdir()
            self._write(own)
            ended = self._attacked_alone(fault, own)
            if ended.how != "over before":
                break
        return ended

    def _attacked_alone(self, fault: Fault, folder: Path) -> Ended:
        try:
            return self._attacked(fault, folder)
        finally:
            for pid in children(os.getpid()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, 0)[0]:
                    pass

    def show(self, index: int, seed: int, folder: Path) -> str:
        """The fault and its command, with its files."""
        self._write(folder)
        faults = drawn_faults(self.name, seed, index)
        return "\nor, where that came when all was over:\n".join(f"pipeplan {COMMANDS[f.verb]}\n{f}" for f in faults)

    def _attacked(self, fault: Fault, folder: Path) -> Ended:
        pager = Pager(folder) if fault.kind == "unread" else None
        pid = start(COMMANDS[fault.verb], folder, "out" if pager is None else "pipe")
        if pager is not None:
            pager.begin()
        victim, kept = _wait_for(fault, pid, folder)
        steps = _steps(folder)
        if victim is None:
            status_of(pid, time.monotonic() + 60)
            return Ended("over before")
        happened = time.monotonic()
        _inflict(fault, victim, folder, pager)
        still = SOON_S + (START_S + 2.0 if fault.kind in ("stopped", "cut off") else 0.0)
        goes_on = fault.kind in PAUSES or (fault.kind == "disk full" and fault.verb != "train")  # to its end
        code = status_before_it_hangs(pid, still, WHOLE_S if goes_on else still)
        if pager is not None and code is not None:
            pager.end()
        what = f"{fault}, after {time.monotonic() - happened:.1f} s, exit {code}: {_text(folder, 'err')[-1500:]}"
        if code is None:
            return Ended("hang", "hang", what)
        left = left_over()
        for wrong, found in (
            ("orphan", left),
            ("traceback", "Traceback" in _text(folder, "err")),
            ("message", wrong_message(fault, code, _text(folder, "err"), range(steps - 1, _steps(folder) + 2))),
            ("lost", self._lost(fault, folder, kept)),
        ):
            if found:
                return Ended(fault.kind, wrong, f"{found}: {what}")
        return Ended(f"{fault.verb} {fault.kind}")

    def _lost(self, fault: Fault, folder: Path, kept: int) -> str:
        """What is not there any more, or cannot be gone on from; ``kept`` is the last step that was whole before."""
        for name in ("trace.json", "profile.json", "links.json"):
            with contextlib.suppress(FileNotFoundError):
                try:
                    json.loads((folder / name).read_text())
                except ValueError:
                    return f"{name} is half written"
        if fault.verb in ("emulate", "links"):
            return ""
        if fault.verb == "train" and max(whole(folder), default=0) < kept:
            return f"{kept} was whole, and {whole(folder)} are"
        again = COMMANDS[fault.verb]
        done = max(whole(folder), default=0)
        if fault.verb == "train" and done:
            again = f"{again.replace(f'--steps {STEPS}', f'--steps {max(STEPS, done + 1)}')} --resume"
        (folder / "ready").unlink()
        code = status_before_it_hangs(start(again, folder), SOON_S, WHOLE_S)
        if code != 0:
            return f"{again} then ends with {code}: {_text(folder, 'err')[-1000:]}"
        if fault.verb == "train" and losses_of(folder)[: STEPS - done] != self.losses[done:]:
            return f"from step {done} on the losses are {losses_of(folder)} instead of {self.losses[done:]}"
        return ""


def _wait_for(fault: Fault, pid: int, folder: Path) -> tuple[int | None, int]:
    """Wait until it is to happen: the process that it happens to, None where all has ended before; and the last step
    of which a checkpoint has been whole, at any time until then: one that is begun may have removed it."""
    begin = time.monotonic()
    until, kept = begin + fault.seconds, 0
    while True:
        kept = max(kept, *whole(folder), 0)
        if living([pid]) == [] or time.monotonic() - begin > 60:
            return None, kept
        ready = time.monotonic() >= until
        if fault.verb == "train" and fault.step >= 0:
            ready = _steps(folder) > fault.step
            if fault.in_checkpoint:
                ready = ready and any((folder / "kept").glob(".step-*"))
        elif fault.verb == "emulate" and fault.step >= 0:
            ready = ready and _steps(folder) > fault.step
        ranks = [pid] if fault.is_on_launcher or fault.verb == "profile" else living(children(pid))[:2]
        ready = ready and (folder / "ready").exists()
        if ready and len(ranks) > (0 if ranks == [pid] else 1):
            return ranks[min(fault.victim, len(ranks) - 1)], kept
        time.sleep(0.001)


def _inflict(fault: Fault, pid: int, folder: Path, pager: Pager | None) -> None:
    if pager is not None:
        pager.paused(TIMEOUT_S + 1.0)
        return
    numbers = {
        "killed": signal.SIGKILL,
        "launcher killed": signal.SIGKILL,
        "stopped": signal.SIGSTOP,
        "slow": signal.SIGSTOP,
        "launcher slow": signal.SIGSTOP,
        "ended": signal.SIGTERM,
        "interrupted": signal.SIGINT,
    }
    with contextlib.suppress(ProcessLookupError):
        if fault.kind == "launcher killed" and fault.victim:
            for rank in children(pid):
                os.kill(rank, signal.SIGSTOP)
        if fault.kind in numbers:
            os.kill(pid, numbers[fault.kind])
            if fault.kind in PAUSES:
                time.sleep(0.7 if fault.kind == "slow" else TIMEOUT_S + 1.0)
                os.kill(pid, signal.SIGCONT)
        elif fault.kind == "cut off":
            (folder / "cut").write_text(str(fault.connection))
            (folder / "cut").rename(folder / f"cut-{pid}")  # whole, as somebody waits for it
        else:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (512, 512))


def left_over(soon_s: float = 5.0) -> list[int]:
    """Processes that have not ended soon after the command has."""
    until = time.monotonic() + soon_s
    while found := living(children(os.getpid())):
        if time.monotonic() > until:
            return found
        time.sleep(0.02)
    return []


def wrong_message(fault: Fault, code: int, said: str, steps: range) -> str:
    """What is wrong with how it says what happened, which must have been in one of these ``steps``, if in any."""
    told = [" ".join(text.split()) for text in re.split(r"^pipeplan: ", said, flags=re.MULTILINE)[1:]]
    errors = [text for text in told if not text.startswith(REMARKS)]
    if code == 0:  # it had done what the fault would have hit
        return ""
    if code < 0:
        killed = fault.kind == "launcher killed" or (fault.verb == "profile" and fault.kind == "killed")
        return "" if killed or -code == signal.SIGTERM else f"ends by signal {-code}"
    if fault.kind in PAUSES:
        return "a pause ends it"
    if code not in (1, 2, 130) and not (fault.kind == "ended" and code == 128 + signal.SIGTERM):
        return f"exit {code}"
    if len(errors) != 1:
        return f"{len(errors)} messages"
    wanted = SAID.get(fault.kind, "") if (fault.verb, fault.kind) != ("train", "disk full") else WRITES
    wanted = wanted.replace("VICTIM", str(fault.victim))
    found = re.search(wanted, errors[0])
    if not found:
        return f"says nothing of {wanted}"
    step = re.search(r"step (\d+)", found[0]) if fault.verb in ("train", "emulate") else None
    return f"names step {step[1]}, which is not in {steps}" if step and int(step[1]) not in steps else ""


def whole(folder: Path) -> list[int]:
    """The steps of checkpoints that have their names."""
    return sorted(int(path.name[5:]) for path in (folder / "kept").glob("step-*")) if (folder / "kept").exists() else []


def losses_of(folder: Path) -> list[str]:
    """The losses that a training printed."""
    return re.findall(r"^step \d+\s+loss (\S+)", _text(folder, "out"), re.MULTILINE)


def _steps(folder: Path) -> int:
    """How many steps it has told of."""
    return _text(folder, "out").count("step ")


def _text(folder: Path, name: str) -> str:
    path = folder / name
    return path.read_text(errors="replace") if path.exists() else ""
