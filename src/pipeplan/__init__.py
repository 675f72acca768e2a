"""pipeplan: a planner for pipeline-parallel training of large neural networks.

Here: the public face, lazy: what a function needs is imported when it is called. Not here: anything that does the work,
which starts in :mod:`pipeplan._api`; the rooms and their order are in ``docs/architecture.md``.

Functions take files or objects, and the flags of the command line as keyword arguments; a plain number is seconds for a
duration and bytes for a size::

    import pipeplan

    result = pipeplan.search("profile.json", devices=4, memory="16GB", time_limit=10)
    pipeplan.write(result.plan, "plan.json")

Objects show themselves in a notebook, by :mod:`pipeplan.reporting.notebook`, which is imported then.
"""

from __future__ import annotations

from pipeplan._version import __version__

TYPE_CHECKING = False  # as in typing, which with all that functions need takes a moment, in which Ctrl-C is a traceback
if TYPE_CHECKING:
    from pipeplan._api import (
        Comparison,
        Export,
        FrontierResult,
        Inspection,
        KernelChoice,
        Limit,
        Model,
        PlanReport,
        Report,
        Result,
        Rules,
        RunOutcome,
        Simulation,
        Tuning,
    )
    from pipeplan._face import (
        add_links,
        check,
        choose_kernels,
        compare,
        estimate,
        example,
        example_cluster,
        export,
        frontier,
        import_plan,
        inspect,
        measure_links,
        profile,
        read_cluster,
        read_placement,
        read_plan,
        read_profile,
        report,
        run,
        search,
        simulate,
        tune,
        write,
    )
    from pipeplan.errors import (
        ExecutionError,
        FileError,
        InfeasibleError,
        InvalidPlanError,
        PipeplanError,
        SearchTimeoutError,
        UsageError,
    )
    from pipeplan.files import (
        Block,
        Cluster,
        CostRow,
        DeviceKind,
        Edge,
        FailureDomain,
        LinkLevel,
        PlacedStage,
        Placement,
        Plan,
        Profile,
        Source,
    )

__all__ = [
    "Block",
    "Cluster",
    "Comparison",
    "CostRow",
    "DeviceKind",
    "Edge",
    "ExecutionError",
    "Export",
    "FailureDomain",
    "FileError",
    "FrontierResult",
    "InfeasibleError",
    "Inspection",
    "InvalidPlanError",
    "KernelChoice",
    "Limit",
    "LinkLevel",
    "Model",
    "PipeplanError",
    "PlacedStage",
    "Placement",
    "Plan",
    "PlanReport",
    "Profile",
    "Report",
    "Result",
    "Rules",
    "RunOutcome",
    "SearchTimeoutError",
    "Simulation",
    "Source",
    "Tuning",
    "UsageError",
    "__version__",
    "add_links",
    "check",
    "choose_kernels",
    "compare",
    "estimate",
    "example",
    "example_cluster",
    "export",
    "frontier",
    "import_plan",
    "inspect",
    "measure_links",
    "profile",
    "read_cluster",
    "read_placement",
    "read_plan",
    "read_profile",
    "report",
    "run",
    "search",
    "simulate",
    "tune",
    "write",
]


def __getattr__(name: str) -> object:
    """A function, an error or a type, imported when it is asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pipeplan import _api, _face, errors

    for room in (_face, errors):
        if name in vars(room):
            return vars(room)[name]
    return getattr(_api, name)


def __dir__() -> list[str]:
    return sorted(__all__)
