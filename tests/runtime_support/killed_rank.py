"""Trainings of which a rank is killed, by SIGKILL, when it has done something for so many times."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from functools import partial
from pkgutil import resolve_name
from typing import Any
from unittest import mock

from pipeplan.runtime.launch.job import RankContext
from pipeplan.runtime.training.trainer import train_job

__all__ = ["killed_after", "work"]


def killed_after(name: str, calls: int, before: Callable[[], None] = lambda: None) -> Any:
    """While this is entered, the process ends by SIGKILL behind so many calls of what has this name, or at the next."""
    original, counted = resolve_name(name), []

    def counting(*given: Any, **named: Any) -> Any:
        made = original(*given, **named) if calls else None
        counted.append(name)
        if len(counted) >= max(1, calls):
            before()
            os.kill(os.getpid(), signal.SIGKILL)
        return made

    return mock.patch(name.replace(":", "."), counting)


def work(job: Mapping[str, Any], context: RankContext) -> None:
    """The job of a rank: trains one folder after another; where it is the ``victim``, until it is killed."""
    patched = killed_after(job["at"], job["calls"]) if context.rank == job["victim"] else mock.MagicMock()
    with patched:
        for each in job["trainings"]:
            named = partial(_report, context, each["name"])
            train_job(each, RankContext(context.rank, context.progress, named))


def _report(context: RankContext, name: str, report: Mapping[str, Any]) -> None:
    context.report({**report, "name": name})
