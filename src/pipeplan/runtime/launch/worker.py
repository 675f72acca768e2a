"""One rank: a process started by ``run --local`` or by torchrun, from its start to its last report.

Whatever happens here ends in a report that names rank and action, and in an exit that does not hang.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import platform
import re
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple, NoReturn

import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store  # type: ignore[attr-defined]  # public, but not listed
from torch.distributed.rendezvous import rendezvous

from pipeplan.errors import PipeplanError, UsageError
from pipeplan.files import Plan
from pipeplan.runtime.launch.job import (
    OnEvent,
    RankContext,
    Report,
    Reports,
    RunOptions,
    RunResult,
    finding_out_ns,
    job_of,
)
from pipeplan.runtime.launch.launchers import order_of
from pipeplan.runtime.launch.local import Listener, start_timeout_ns
from pipeplan.runtime.launch.machine import keep_to_own_cores
from pipeplan.runtime.launch.status import (
    Board,
    Cause,
    Failure,
    Phase,
    Progress,
    RankError,
    cause_of,
    has_own_cause,
    lost_others,
    tell,
    verdict,
)
from pipeplan.runtime.launch.stopping import STOPPING
from pipeplan.texts import printable

Work = Callable[[Report, RankContext], None]

_INTERRUPTED = 130
_FAILED = "pipeplan/failed/"  # before the number of a rank that has given up
_HEARD = 3  # of the time to find out who is missing, this part is for ranks to tell each other, the rest for ending
_GONE_S, _LOOK_S = 0.2, 0.01  # a process closes its connections a moment before it is seen to have ended
_GLOO = re.compile(r"\[[^\]]*\bgloo\b[^\]]*:\d+\]")
"""How messages of gloo begin: with the place in its source."""


class RankMachine(NamedTuple):
    """A rank's machine: its name, what is the same of all ranks that see its files, processes and clock, and whether
    ranks meet there.

    Ranks of two containers are on two, whatever machine they run on.
    """

    name: str
    key: str
    meeting: bool


def be_rank(identity: Mapping[str, Any]) -> None:
    """Be a rank that :mod:`pipeplan.runtime.launch.local` has started, which has said who it is; ends the process.

    Its job is an inherited file's, or stands in what has been said.
    """
    rank, world_size = identity["rank"], identity["world_size"]
    report = Reports(identity["reports"])
    progress = Progress(Board(identity["board"], world_size), rank)
    failure = None
    try:
        work: Work = resolve_name(identity["work"])
        job = identity["job"]
        if isinstance(job, int):
            job = json.loads(_content(job))
        options = job.get("options", job)
        if options.get("device", "cpu") == "cpu":
            keep_to_own_cores(rank, world_size)  # before torch.distributed has threads
        timeout = _start_timeout(identity["timeout_ns"])
        with (
            STOPPING.heeded() if options.get("checkpoint") else contextlib.nullcontext(),
            _process_group(_local_store(identity["meeting"], timeout), progress, world_size, timeout),
        ):
            work(job, RankContext(rank, progress, report))
            STOPPING.ended = True  # what comes now the process that has started this one takes note of
    except BaseException as error:
        failure = failure_of(error, progress)
    report({"event": "done"} if failure is None else {"event": "failure", "failure": asdict(failure)})
    report.close()
    if failure is not None:
        _leave(failure.exit_code)


def run_under_torchrun(work: str, read_plan: Callable[[], Plan], options: RunOptions, on_event: OnEvent) -> RunResult:
    """Be a rank that torchrun, or what sets the same environment, has started: as :func:`run_local`, for one rank.

    ``read_plan`` reads and verifies the plan. The result is the same on every rank, each of which calls its
    ``on_event``. Where a rank fails, the first to know says so on standard error, and the process ends here with the
    error's exit code. Raises UsageError in a process that has a process group.
    """
    require_no_group()
    listener = Listener(on_event)

    def job() -> Report:
        plan = read_plan()
        _require_ranks(plan, int(os.environ["WORLD_SIZE"]))
        return job_of(plan, options)

    under_torchrun(work, job, options.timeout_ns, listener)
    assert listener.result is not None, "a rank ends well only after it has reported its result"
    return listener.result


def require_no_group() -> None:
    """Refuse to be, or to copy, a process that has a process group. Raises UsageError."""
    if dist.is_initialized():
        raise UsageError(
            "torch.distributed has a process group in this process, and run makes its own: call run before "
            "init_process_group, or after destroy_process_group"
        )


def under_torchrun(
    work: str, job: Callable[[], Report], timeout_ns: int, listen: Callable[[int, Report], None]
) -> None:
    """Be a rank that torchrun has started, and say what goes wrong as :func:`run_under_torchrun` does.

    As :func:`~pipeplan.runtime.launch.local.watch_local`, for one rank: ``listen`` gets what this one reports.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    timeout = _start_timeout(timeout_ns)
    store = _meeting(timeout)
    machines = _machines(store, rank, world_size)
    _stand(machines, rank)
    progress = Progress(_common_board(store, machines, rank), rank)
    STOPPING.is_lost = lambda: progress.board.has_failed
    if rank == 0 and (order := order_of([each.name for each in machines])):
        tell(order)
    try:
        run, given = resolve_name(work), job()
        with _process_group(store, progress, world_size, timeout):
            run(given, RankContext(rank, progress, partial(_heard, listen, rank), alone=True))
    except KeyboardInterrupt:
        _leave(_INTERRUPTED)
    except BaseException as error:
        failure = failure_of(error, progress)
        _say_once(failure, store, progress, timeout_ns)
        _leave(failure.exit_code)


def failure_of(error: BaseException, progress: Progress) -> Failure:
    """What an exception means to those who did not see it."""
    rank, transport = progress.rank, _transport_error(error)
    if isinstance(error, RankError) and (error.cause is not Cause.RAISED or transport is None):
        return Failure(rank, error.cause, str(error), error.exit_code, _origin(error), error.peer)
    if isinstance(error, PipeplanError) and transport is None:
        return Failure(rank, Cause.REFUSED, str(error), error.exit_code)
    text = f"rank {rank} failed {progress.describe()}: {type(error).__name__}: {error}"
    if transport is not None:
        return Failure(rank, cause_of(transport)[0], str(error) if isinstance(error, RankError) else text)
    return Failure(rank, Cause.RAISED, text, details="".join(traceback.format_exception(error)))


def _transport_error(error: BaseException) -> RuntimeError | None:
    """The transport's error that this one comes of: exchanges that a model makes itself fail where others are gone."""
    seen: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in seen:
        if isinstance(at, dist.DistError) or (isinstance(at, RuntimeError) and _GLOO.match(str(at))):
            return at
        seen.append(at)
        at = at.__cause__ or at.__context__
    return None


def _heard(listen: Callable[[int, Report], None], rank: int, report: Report) -> None:
    """Pass on a report to this process's own listener."""
    try:
        listen(rank, report)
    except BrokenPipeError:
        raise RankError(Cause.RAISED, f"rank {rank}: nobody reads standard output any more") from None


_ALL_CONNECTED = 64
"""Of more ranks gloo connects two when one first has something for the other, and not each with all as it starts."""


@contextlib.contextmanager
def _process_group(store: Store, progress: Progress, world_size: int, timeout: timedelta) -> Iterator[None]:
    """The default group, on gloo: for agreeing and reporting, beside the groups that carry tensors."""
    progress.begin(Phase.CONNECTING)
    if world_size > _ALL_CONNECTED:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    with lost_others(progress):
        dist.init_process_group(
            "gloo",
            store=PrefixStore("pipeplan", store),
            rank=progress.rank,
            world_size=world_size,
            timeout=timeout,
        )
    yield
    with lost_others(progress):
        dist.barrier()  # nobody leaves while others still talk to it
        dist.destroy_process_group()


def _local_store(path: str, timeout: timedelta) -> Store:
    """Where local ranks meet: a file that they have inherited."""
    store = FileStore(path)
    store.set_timeout(timeout)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))  # it writes when it goes: where it cannot, it ends the process
    return store


_STORES: list[Store] = []
_RUNS = itertools.count()


def _meeting(timeout: timedelta) -> Store:
    """Where the ranks of this run meet, which the launcher says in the environment.

    A script may have several runs, one after another and the same ones on each rank: they share the store.
    """
    if not _STORES:
        store, _, _ = next(rendezvous("env://", timeout=timeout))
        _STORES.append(store)
    _STORES[0].set_timeout(timeout)
    return PrefixStore(f"run {next(_RUNS)}", _STORES[0])


def _machines(store: Store, rank: int, num_ranks: int) -> list[RankMachine]:
    """[rank] its machine. Who comes last reads all and writes them as one, so that each rank asks the store thrice."""
    seen = [platform.node()]
    with contextlib.suppress(OSError):  # not Linux
        seen += [Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii"), os.readlink("/proc/self/ns/mnt")]
    store.set(f"pipeplan/machine/{rank}", json.dumps([platform.node(), " ".join(seen), _meet_here()]))
    if store.add("pipeplan/machines/here", 1) == num_ranks:
        every = store.multi_get([f"pipeplan/machine/{each}" for each in range(num_ranks)])
        runs = [[len([*own]), json.loads(text)] for text, own in itertools.groupby(every)]
        store.set("pipeplan/machines", json.dumps(runs))
    found = json.loads(store.get("pipeplan/machines"))
    return [RankMachine(*own) for count, own in found for _ in range(count)]


def _meet_here() -> bool:
    """Whether the address at which ranks meet is this machine's."""
    with contextlib.suppress(OSError):
        family, kind, *_, address = socket.getaddrinfo(os.environ["MASTER_ADDR"], 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as own:
            own.bind(address)
            return True
    return False


def _stand(machines: Sequence[RankMachine], rank: int) -> None:
    """Where this rank stands among those of its machine, if no launcher has said so: that is a device's number."""
    here = [other for other, each in enumerate(machines) if each.key == machines[rank].key]
    os.environ.setdefault("LOCAL_RANK", str(here.index(rank)))
    os.environ.setdefault("LOCAL_WORLD_SIZE", str(len(here)))


def _common_board(store: Store, machines: Sequence[RankMachine], rank: int) -> Board:
    """A board for the ranks of this machine, in a file that has no name any more once all have opened it."""
    here, world_size = [other for other, each in enumerate(machines) if each.key == machines[rank].key], len(machines)
    key = f"pipeplan/board/{here[0]}"
    if rank == here[0]:
        descriptor, path = tempfile.mkstemp(prefix="pipeplan-board-")
        os.truncate(descriptor, Board.size(world_size))
        store.set(key, path)
    else:
        path = store.get(key).decode()
        descriptor = os.open(path, os.O_RDWR)
    board = Board(descriptor, world_size)
    board.machines = [each.name for each in machines]
    board.meeting = next((each.name for each in machines if each.meeting), "")
    os.close(descriptor)
    if store.add(f"{key}/opened", 1) == len(here):
        Path(path).unlink()
    return board


def _require_ranks(plan: Plan, world_size: int) -> None:
    if plan.num_devices != world_size:
        raise UsageError(
            f"the plan is for {plan.num_devices} devices and there are {world_size} ranks; start it with "
            f"torchrun --nproc-per-node {plan.num_devices}, or search with --devices {world_size}"
        )


def _say_once(failure: Failure, store: Store, progress: Progress, timeout_ns: int) -> None:
    """Print the failure unless another rank has said one: those that follow are its effects.

    Stopped ranks then go on, for they could not take the signal that torchrun ends them with.
    """
    board, seconds = progress.board, finding_out_ns(timeout_ns) / 1e9 / _HEARD
    number = _told(store, progress.rank, seconds)
    if number > 1:
        progress.begin(Phase.FAILED)
        return
    if not has_own_cause(failure):
        board.silent = _silent(store, progress, seconds) if number else _where_ranks_meet(board, progress.rank)
    until = time.monotonic() + _GONE_S
    while failure.cause is Cause.LOST and not board.gone and time.monotonic() < until:
        time.sleep(_LOOK_S)
    try:
        raise verdict(failure, board, timeout_ns)
    except PipeplanError as said:
        sys.stderr.write(printable(f"{failure.details}pipeplan: {said}\n"))
        _record(said)
    progress.begin(Phase.FAILED)
    board.wake()


def _told(store: Store, rank: int, seconds: float) -> int:
    """Have the store know that this rank gives up: how many have, with it; 0 where the store is gone or silent.

    Then it is better said twice than not at all. A machine that has left the network does not end connections, and
    nothing of torch's ends such a request but its answer.
    """
    found: list[int] = []

    def tell_store() -> None:
        with contextlib.suppress(RuntimeError):
            store.set(f"{_FAILED}{rank}", "")
            found.append(store.add("pipeplan/failures", 1))

    asking = threading.Thread(target=tell_store, daemon=True)
    asking.start()
    asking.join(seconds)
    return next(iter(found), 0)


def _silent(store: Store, progress: Progress, seconds: float) -> list[int]:
    """Ranks of other machines of which nothing is heard: those cut off, when all others have noticed that.

    Others wait as long as this one did, and began to when the step reached them.
    """
    machines, until = progress.board.machines, time.monotonic() + seconds
    silent = [rank for rank, name in enumerate(machines) if name != machines[progress.rank]]
    with contextlib.suppress(RuntimeError):  # the store has ended with its machine's ranks: no more is heard
        while True:
            silent = [rank for rank in silent if not store.check([f"{_FAILED}{rank}"])]
            if len({machines[rank] for rank in silent}) <= 1 or time.monotonic() > until:
                break
            time.sleep(_LOOK_S)
    return silent


def _where_ranks_meet(board: Board, rank: int) -> list[int]:
    """Ranks of the machine where ranks meet, which does not answer, if it is another one."""
    there, machines = board.meeting, board.machines
    return [each for each, name in enumerate(machines) if name == there != machines[rank]]


def _record(error: PipeplanError) -> None:
    """Leave the error where torchrun's agent looks for what its own report, and the scheduler's, is to say."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler  # most runs do without

    with contextlib.suppress(OSError):
        get_error_handler().record_exception(error)


def _content(descriptor: int) -> bytes:
    """All of an inherited file, whose position the ranks share and so must not move."""
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


def _start_timeout(timeout_ns: int) -> timedelta:
    return timedelta(seconds=start_timeout_ns(timeout_ns) / 1e9)


def _origin(error: RankError) -> str:
    """The traceback of what a block or an instruction raised, without ours around it."""
    origin = error.__cause__.__cause__ if error.cause is Cause.RAISED and error.__cause__ is not None else None
    if origin is None:
        return ""
    at = origin.__traceback__
    while at is not None and at.tb_frame.f_globals.get("__name__", "").startswith("pipeplan."):
        at = at.tb_next
    at = at or origin.__traceback__  # models of the zoo are ours, too
    return "".join(traceback.format_exception(type(origin), origin, at, chain=False))


def _leave(code: int) -> NoReturn:
    """End at once: broken connections can hold up or crash an orderly exit."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # nobody may read it any more
            stream.flush()
    os._exit(code)
