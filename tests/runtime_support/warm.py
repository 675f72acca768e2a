"""Ranks forked from a process that has imported torch, instead of started anew: 4 s of processor time less for each.

They are processes as others are, with sessions, signals and connections of their own. What is about starting itself
(the command line, torchrun, a parent that dies, imports that must not work) starts its ranks as users do.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import forkserver, reduction
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from pipeplan.runtime.launch import local

PRELOADED = (
    "torch._dynamo",  # which optimizers and shapes import, whoever asks
    "torch.distributed.checkpoint",
    "pipeplan.runtime.training.trainer",
    "pipeplan.runtime.launch.worker",
    "pipeplan.runtime.models.huggingface.build",
    "transformers.models.llama.modeling_llama",  # with what all models of transformers stand on
    "runtime_support.checkpoint_models",
    "runtime_support.executor_rank",
    "runtime_support.known",
    "runtime_support.plans",
)
_ABOVE = 200  # descriptors from here on are free in a new rank
_SERVER = multiprocessing.get_context("forkserver")


@contextlib.contextmanager
def warm_ranks(look_over: Callable[[Any], None] | None = None, given: Any = None) -> Iterator[None]:
    """Whatever :mod:`pipeplan.runtime.launch.local` starts is forked.

    With a function of a module it is forked from a process that has first called that with what is ``given``: what all
    ranks would find out for themselves, such as how a model is cut into blocks, is found out once.
    """
    _start_server()
    names = {**vars(subprocess), "Popen": WarmRank}
    with mock.patch.object(local, "subprocess", SimpleNamespace(**names)):
        if look_over is None:
            yield
            return
        with _server_that(look_over, given):
            yield


@contextlib.contextmanager
def _server_that(look_over: Callable[[Any], None], given: Any) -> Iterator[None]:
    """Fork from a process that has called a function, itself forked, and that ends with the last rank."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/socket")
        listener.listen()
        ends, alive = os.pipe()
        server = forkserver.ForkServer()
        server._forkserver_address, server._forkserver_alive_fd = f"{folder}/socket", alive  # type: ignore[attr-defined]
        process = _SERVER.Process(
            target=_serve, args=(look_over, given, _Inherited(listener.fileno()), _Inherited(ends))
        )
        process.start()
        os.close(ends)
        listener.close()  # or whoever connects would wait for ever where the function has failed
        server.ensure_running = lambda: None  # type: ignore[method-assign]  # it waits for a child, and this is none
        try:
            with mock.patch.multiple(
                forkserver, _forkserver=server, connect_to_new_process=server.connect_to_new_process
            ):
                yield
        finally:
            os.close(alive)
            process.join()


def _serve(look_over: Callable[[Any], None], given: Any, listener: int, ends: int) -> None:
    look_over(given)
    forkserver.main(listener, ends, [])


def warm_left_over() -> list[int]:
    """Forked ranks that live."""
    server = getattr(forkserver._forkserver, "_forkserver_pid", None)
    return [] if server is None else list(map(int, Path(f"/proc/{server}/task/{server}/children").read_text().split()))


def warm_run(code: str) -> None:
    """Run text in a forked process, which may import what it likes."""
    _start_server()
    process = _SERVER.Process(target=exec, args=(code, {"__name__": "__main__"}))
    process.start()
    process.join()
    assert process.exitcode == 0, "what it said is on stderr"


def share_server() -> None:
    """In a process forked from the one that has started the server: ranks are forked from that."""
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]  # it waits for a child, its own


def _start_server() -> None:
    _SERVER.set_forkserver_preload(list(PRELOADED))
    with mock.patch.dict(os.environ, TORCH_CPP_LOG_LEVEL="ERROR"):  # torch reads it once
        for name in [name for name in os.environ if name.startswith("PIPEPLAN_TEST_")]:
            del os.environ[name]  # it outlives the test that starts it
        forkserver.ensure_running()


def start_warm() -> type[WarmRank]:
    """What starts ranks of one's own, as ``subprocess.Popen`` does."""
    _start_server()
    return WarmRank


class WarmRank:
    """As much of ``subprocess.Popen`` as is asked of a rank, which a module run as a program makes of its process."""

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
        assert (stdin, process_group, command[:2]) == (subprocess.PIPE, 0, (sys.executable, "-m"))
        read, write = os.pipe()
        inherited = {0: read, 1: stdout, 2: stderr, **{number: number for number in pass_fds}}
        descriptors = {number: _Inherited(found) for number, found in inherited.items()}
        self.stdin = os.fdopen(write, "wb")
        self._process = _SERVER.Process(
            target=_be, args=(command[2:], dict(env), os.getcwd(), os.getpid(), descriptors)
        )
        self._process.start()
        os.close(read)
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a rank", timeout or 0.0)
        return self._process.exitcode


class _Inherited:
    """A descriptor of this process, which is another number where it is unpickled."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Callable[[Any], int], tuple[Any]]:
        return _detached, (reduction.DupFd(self.number),)


def _detached(descriptor: Any) -> int:
    number: int = descriptor.detach()
    return number


def _be(
    words: Sequence[str], environment: Mapping[str, str], folder: str, parent: int, descriptors: Mapping[int, int]
) -> None:
    """In the rank: all that a new process has from its parent, then its program, a module and what that is told."""
    os.setpgid(0, 0)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    moved = {number: fcntl.fcntl(found, fcntl.F_DUPFD, _ABOVE) for number, found in descriptors.items()}
    for number, found in moved.items():
        os.dup2(found, number)
        os.close(found)
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, buffering, closefd=False)  # noqa: SIM115  (they are the process's own)
        for number, mode, buffering in ((0, "r", -1), (1, "w", 1), (2, "w", 1))
    )
    os.getppid = lambda: parent  # the server; it ends when the test does, and its ranks with it
    sys.argv = [*words]
    sys.modules.pop(words[0], None)
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)
