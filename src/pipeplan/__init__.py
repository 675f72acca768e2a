"""pipeplan: a planner for pipeline-parallel training of large neural networks.

Here: the public face, lazy: what a function needs is imported when it is called. Not here: anything that does the work,
which starts in :mod:`pipeplan._api`; the rooms and their order are in ``docs/architecture.md``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeplan import _api
from pipeplan._api import check, compare, estimate, frontier, profile, run, search, simulate
from pipeplan._version import __version__

if TYPE_CHECKING:
    from pipeplan.files import Cluster, Plan, Profile


__all__ = [
    "Cluster",
    "Plan",
    "Profile",
    "__version__",
    "check",
    "compare",
    "estimate",
    "frontier",
    "profile",
    "run",
    "search",
    "simulate",
]


def __getattr__(name: str) -> object:
    """A type, imported when it is asked for."""
    if name in __all__:
        return getattr(_api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
