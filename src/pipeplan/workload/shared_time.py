"""The time of what occupies every device, cut out of an iteration: nothing else runs in it.

While an operation runs that every device takes part in, nothing else does, and nothing is under way before and after
it. Delete those intervals from a schedule: what is left is a schedule of the other operations in the same memory,
shorter by exactly that time, in which the shared ones are moments at which no device is inside of an action. Messages
may be on their way meanwhile, so that lags count nothing in it. So whatever is a bound on the period or on the makespan
of what is left, together with the shared time it is one on the whole.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from pipeplan.workload.kinds import Resource, kind_of
from pipeplan.workload.one_microbatch import OneMicrobatch


class WithoutSharedTime(NamedTuple):
    """What is left, in which shared operations take no time, and the ns of these: per micro-batch, and in all.

    All that follows the last action is in the latter, too.
    """

    problem: OneMicrobatch
    each_ns: int
    all_ns: int

    @classmethod
    def of(cls, problem: OneMicrobatch) -> WithoutSharedTime | None:
        """None where there is no such operation, a single device, or an action that may begin before its inputs."""
        workload = problem.workload
        used = {device for operation in workload.operations for device in workload.stages[operation.stage].devices}
        shared = [
            len(set(workload.stages[operation.stage].devices)) == len(used)
            and kind_of(operation.kind).resource is Resource.COMPUTE
            for operation in workload.operations
        ]
        if len(used) < 2 or not any(shared) or workload.has_parts or workload.needs:
            return None
        if workload.returns:  # the way round goes through shared operations, too
            return None
        timed = list(zip(workload.operations, shared, strict=True))
        left = replace(
            workload,
            operations=tuple(replace(each, duration_ns=0) if whole else each for each, whole in timed),
            dependencies=tuple(replace(each, hops=()) for each in workload.dependencies),
            stages=tuple(
                replace(each, sync_ns=0, step_ns=0, gather_ns=0, buckets=(), block_groups=())
                for each in workload.stages
            ),
            tied=(),
        )
        each_ns = sum(operation.duration_ns for operation, whole in timed if whole)
        capacity = problem.capacity[: problem.num_devices]
        all_ns = each_ns * problem.num_microbatches + workload.least_after_all
        return cls(OneMicrobatch(left, (*capacity, *[None] * (left.num_resources - len(capacity)))), each_ns, all_ns)
