"""Work on arrays spread over the cores: numpy lets other threads run while it computes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

__all__ = ["spread"]

Item = TypeVar("Item")
Made = TypeVar("Made")


def spread(function: Callable[[Item], Made], items: Iterable[Item]) -> list[Made]:
    """``function`` of every item, in their order, by as many threads as there are cores; one item needs none."""
    given = list(items)
    return list(_threads().map(function, given)) if len(given) > 1 else list(map(function, given))


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0)), thread_name_prefix="frontier")
