"""A rank that is killed, by SIGKILL, when it has done something so many times."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any
from unittest import mock

from pipeplan.runtime.launch.job import RankContext
from pipeplan.runtime.training.trainer import train_job

__all__ = ["killed_after", "work"]


def killed_after(name: str, calls: int) -> Any:
    """While this is entered, the process ends by SIGKILL behind so many calls of what has this name, or at the next."""
    original, counted = resolve_name(name), []

    def counting(*given: Any, **named: Any) -> Any:
        made = original(*given, **named) if calls else None
        counted.append(name)
        if len(counted) >= max(1, calls):
            os.kill(os.getpid(), signal.SIGKILL)
        return made

    return mock.patch(name.replace(":", "."), counting)


def work(job: Mapping[str, Any], context: RankContext) -> None:
    """The job of a rank: trains; if it is the ``victim``, until it is killed."""
    is_victim = context.rank == job["victim"]
    with killed_after(job["at"], job["calls"]) if is_victim else contextlib.nullcontext():
        train_job(job["training"], context)
