"""Where classic schedules apply that are for no plain chain: stages on all devices, and two chains both ways."""

from __future__ import annotations

from pipeplan.schedule.classic.base import chains
from pipeplan.workload.one_microbatch import OneMicrobatch

__all__ = ["needs_shared", "needs_two_ways"]


def needs_shared(problem: OneMicrobatch) -> str | None:
    """1F1B+: a chain with one stage on each device, and stages on all devices between them."""
    everywhere = tuple(range(problem.num_devices))
    chain = [stage.devices for stage in problem.workload.stages if stage.devices != everywhere]
    if problem.num_devices == 1 or len(chain) == len(problem.workload.stages):
        return "it needs a stage on all devices"
    if chain != [(device,) for device in everywhere]:
        return "beside the stages on all devices it needs one on each device, in order"
    if len(chains(problem)) != 1:
        return "it needs a chain of stages"
    return None


def needs_two_ways(problem: OneMicrobatch) -> str | None:
    """Chimera: two chains over the same devices in opposite directions."""
    down = [(device,) for device in range(problem.num_devices)]
    ways = [[problem.workload.stages[stage].devices for stage in chain] for chain in chains(problem)]
    if ways != [down, down[::-1]]:
        return "it needs two chains over the same devices both ways (--placement bidirectional)"
    return None if problem.num_devices % 2 == 0 else "it needs an even number of devices"
