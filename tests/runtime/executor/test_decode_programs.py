"""Programs of a loop of decode steps: what returns is taken a step later, and by nobody after the last."""

from __future__ import annotations

import pytest

from pipeplan.files import Plan
from pipeplan.files.plan import Decode
from pipeplan.planning.build_plan import assemble
from pipeplan.runtime.executor.rank_program import Program, planned_programs
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.schedule.decode_loop import decode_schedule
from pipeplan.workload.elements import Dependency, Device, Hop, Operation, Stage
from pipeplan.workload.workload import Workload

pytestmark = pytest.mark.counted


def loop_of_two() -> Plan:
    """Two stages on two devices, two groups of three requests, four steps of each."""
    hops = [(Hop(source_device=source, target_device=1 - source),) for source in (0, 1)]
    workload = Workload(
        name="loop",
        placement="one-to-one",
        num_microbatches=8,
        microbatch_size=3,
        devices=(Device(), Device()),
        stages=tuple(Stage(blocks=(f"b{number}",), devices=(number,), microbatch_size=3) for number in range(2)),
        operations=tuple(Operation(kind="F", stage=number, duration_ns=5) for number in range(2)),
        dependencies=(
            Dependency(source="0F", target="1F", hops=hops[0]),
            Dependency(source="1F", target="0F", hops=hops[1], later=2),
        ),
    )
    found = decode_schedule(workload, Budget(5.0))
    decode = Decode(batch=6, groups=2, context_tokens=9)
    bounds = found.bound_ns, found.period_bound_ns
    return assemble(found.graph, found.orders, *bounds, found.scheduler, cut=found.repetend, decode=decode)


def samples(program: Program, operation: str, side: str) -> list[tuple[int, ...] | None]:
    """The first sample of every message that the operation's actions take or give, None where they have none."""
    steps = [step for step in program.steps if step.action.operation == operation]
    return [tuple(own[0] for _, own in getattr(step, side)) or None for step in steps]


def test_a_token_is_taken_in_the_next_step_of_its_group() -> None:
    first, last = planned_programs(loop_of_two())
    assert samples(first, "0F", "takes") == [None, None, *[(3 * m,) for m in range(6)]]
    assert samples(first, "0F", "gives") == [(3 * m,) for m in range(8)]
    assert samples(last, "1F", "takes") == [(3 * m,) for m in range(8)]
    assert samples(last, "1F", "gives") == [*[(3 * m,) for m in range(6)], None, None]
