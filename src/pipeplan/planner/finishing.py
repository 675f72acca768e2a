"""From a schedule to its plan: assembled, checked, with where it comes from."""

from __future__ import annotations

import platform
from importlib.metadata import version

from pipeplan._version import __version__
from pipeplan.check import check
from pipeplan.model import Plan, Provenance, sha256_of
from pipeplan.model.workload import Workload
from pipeplan.planner.assembly import assemble
from pipeplan.planner.candidates import PlacementCandidate
from pipeplan.planner.request import Request
from pipeplan.schedule.bounds import period_bound
from pipeplan.schedule.problem import Problem
from pipeplan.schedule.state import Schedule

__all__ = ["planned"]


def planned(request: Request, candidate: PlacementCandidate, schedule: Schedule, whole: Workload) -> Plan:
    """The plan of a candidate's schedule, checked against profile and cluster.

    ``whole`` is the schedule's workload, or the one without forwards in parts.
    """
    problem = Problem.of(whole)
    plan = assemble(
        schedule.graph,
        schedule.orders,
        schedule.bound_ns,
        # for every unroll, so for whichever repetend the plan has
        period_bound(problem) / problem.microbatches_per_round,
        schedule.scheduler,
        split_overhead_ns=request.split_overhead_ns,
        provenance=_provenance(request, candidate),
    )
    # --memory goes before the cluster's memory, so such a plan is not one for the cluster as it stands
    cluster = request.cluster if request.memory_bytes is None else None
    check(plan, request.profile, cluster).require("the plan that was found")
    return plan


def _provenance(request: Request, candidate: PlacementCandidate) -> Provenance:
    return Provenance(
        profile=request.profile.name,
        profile_sha256=sha256_of(request.profile),
        cluster_sha256=sha256_of(request.cluster) if request.cluster is not None else "",
        options={
            "scheduler": request.scheduler,
            "rules": None if request.rules is None else request.rules.name,
            "unroll": request.unroll,
            "split_backward": request.split_backward,
            "split_overhead_ns": request.split_overhead_ns,
            "recompute": request.recompute,
            "replicas": request.replicas,
            "spread": request.spread,
            "num_parted": request.num_parted,
            "time_limit_s": request.time_limit,
            "deterministic": request.deterministic,
            "memory_bytes": request.memory_bytes,
            "chunks": request.chunks,
            "num_microbatches": candidate.batch.num_microbatches,
            "microbatch_size": candidate.batch.microbatch_size,
            "stages": candidate.source,
        },
        seed=request.seed,
        versions={"pipeplan": __version__, "python": platform.python_version(), "ortools": version("ortools")},
    )
