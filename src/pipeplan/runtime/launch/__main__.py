"""What a rank does before it imports torch, which takes seconds: learn its rank, and exit when its parent does."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from typing import Any

from pipeplan.runtime.launch.processes import die_with_parent


def take_identity() -> dict[str, Any]:
    """Who this process is, which its parent has written on standard input; from now on it ends when its parent does."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # what it prints is seen, however it ends then
        sys.stdout.reconfigure(line_buffering=True)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # sent to a single rank it ends it, as SIGTERM does
    line = sys.stdin.buffer.readline()
    if not line:  # the parent has ended before it said anything
        os._exit(1)
    identity: dict[str, Any] = json.loads(line)
    die_with_parent(identity["parent"])
    return identity


def main() -> None:
    """Be a rank that :mod:`pipeplan.runtime.launch.local` has started; ends the process."""
    identity = take_identity()
    from pipeplan.runtime.launch.worker import be_rank  # imports torch

    be_rank(identity)


if __name__ == "__main__":
    main()
