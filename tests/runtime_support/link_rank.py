"""A rank of the tests of link measurement: breaks, lacks an operation or plays two hosts, as the environment says."""

from __future__ import annotations

import os
import signal
import socket
import sys

import torch.distributed as dist

from pipeplan.files import write_file
from pipeplan.runtime.launch.__main__ import main
from pipeplan.runtime.profiling.links import LinkOptions, measure_links

PLAY, OUTPUT = "PIPEPLAN_TEST_PLAY", "PIPEPLAN_TEST_OUTPUT"
RANK = int(os.environ.get("LOCAL_RANK", "0"))


def _die(*args: object, **kwargs: object) -> None:
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def _raise(*args: object, **kwargs: object) -> None:
    if RANK == 1:
        raise ValueError("boom")


def _lack(*args: object, **kwargs: object) -> None:
    raise RuntimeError("Backend gloo does not support all_reduce")


def play(what: str) -> None:
    """Change this process as a test wants it."""
    if what == "two-hosts":
        socket.gethostname = lambda: f"host{RANK // 2}"
    elif what:
        dist.all_reduce = {"dies": _die, "raises": _raise, "lacks": _lack}[what]


if __name__ == "__main__":
    play(os.environ.get(PLAY, ""))
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        main()
    else:
        found = measure_links(
            LinkOptions(largest_bytes=4096, repeats=3, operations=("send", "all_reduce"), timeout_ns=20 * 10**9),
            on_point=lambda point: None,
            keep=lambda cluster: write_file(cluster, os.environ[OUTPUT]),
        )
        sys.exit(0 if (found is None) == (RANK != 0) else 1)
