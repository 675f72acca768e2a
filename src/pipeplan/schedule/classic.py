"""The classic schedules by name: where each applies, and what makes its orders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pipeplan.partition.strategies import STRATEGIES
from pipeplan.schedule.classic_orders import (
    Orderer,
    as_given,
    automatic,
    by_rules,
    by_rules_in_units,
    dualpipe_v,
    repeated_block,
    scripted,
    zero_bubble_v,
)
from pipeplan.schedule.stage_graph import best_kfkb_orders, greedy_orders
from pipeplan.workload.kinds import BACKWARD_ROLES
from pipeplan.workload.one_microbatch import OneMicrobatch

Condition = Callable[[OneMicrobatch], str | None]
"""None, or why a schedule has no meaning for a placement."""


@dataclass(frozen=True, slots=True)
class Classic:
    """A classic schedule: on which placements it has a meaning, and its orders.

    ``automatic`` ones try many orders and take their time.
    """

    placed: Condition
    orders: Orderer
    automatic: bool = False

    def applies(self, problem: OneMicrobatch) -> str | None:
        """None, or why it has no meaning here: all of them are of training."""
        return self.placed(problem) if any(role in BACKWARD_ROLES for role in problem.roles) else "it needs backwards"


def always(problem: OneMicrobatch) -> None:
    """Any placement."""


def all_of(*conditions: Condition) -> Condition:
    """Applies where all conditions hold; else the first reason."""
    return lambda problem: next((reason for condition in conditions if (reason := condition(problem))), None)


def chains(problem: OneMicrobatch) -> list[list[int]]:
    """The stages in the order in which forwards follow each other, one list per first stage."""
    following = dict(problem.workload.stage_edges)
    found = []
    for first in sorted(set(range(len(problem.workload.stages))) - set(following.values())):
        chain = [first]
        while chain[-1] in following:
            chain.append(following[chain[-1]])
        found.append(chain)
    return found


def is_chain(strategy: str, what: str, allowed: Callable[[int], bool]) -> Condition:
    """A chain of single-device stages where a placement strategy has them, with an ``allowed`` number per device."""

    def applies(problem: OneMicrobatch) -> str | None:
        groups = [stage.devices for stage in problem.workload.stages]
        per_device = len(groups) // problem.num_devices
        expected = [(device,) for device in STRATEGIES[strategy].positions(problem.num_devices, per_device)]
        if not allowed(per_device) or groups != expected:
            return f"it needs {what} (--placement {strategy})"
        return None if chains(problem) == [list(range(len(groups)))] else "it needs a chain of stages"

    return applies


one_each = is_chain("one-to-one", "stage d on device d alone", lambda chunks: chunks == 1)
circular = is_chain("circular", "several stages per device in turn", lambda chunks: chunks > 1)
v_shape = is_chain("v-shape", "two stages per device, down and up", lambda chunks: chunks == 2)
waves = is_chain("v-shape", "stages down and up, an even number per device", lambda chunks: chunks % 2 == 0)


def is_split(problem: OneMicrobatch) -> str | None:
    """Input and weight gradients apart on every stage."""
    if all(len(operations) == 3 for operations in problem.stage_operations):
        return None
    return "it needs input and weight gradients apart (--split-backward)"


def one_stage_each(problem: OneMicrobatch) -> str | None:
    """No device has two stages; micro-batches may have different sizes."""
    workload = problem.workload if problem.reduction is None else problem.reduction.workload
    devices = [device for stage in workload.stages for device in stage.devices]
    return None if len(set(devices)) == len(devices) else "it needs one stage per device"


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


def enough_for_dualpipe(problem: OneMicrobatch) -> str | None:
    """DualPipeV fills the pipeline both ways before its steady state."""
    if problem.num_microbatches >= 2 * problem.num_devices:
        return None
    return f"it needs at least {2 * problem.num_devices} micro-batches, two per device"


CLASSIC: dict[str, Classic] = {
    "gpipe": Classic(always, by_rules("gpipe")),
    "1f1b": Classic(one_each, by_rules("1f1b")),
    "zb-h1": Classic(all_of(one_each, is_split), by_rules("zb-h1")),
    "zb-h2": Classic(all_of(one_each, is_split), by_rules("zb-h2")),
    "zb-1p": Classic(all_of(one_each, is_split), automatic(1), automatic=True),
    "zb-2p": Classic(all_of(one_each, is_split), automatic(2), automatic=True),
    "zb-auto": Classic(all_of(one_each, is_split), automatic(None), automatic=True),
    "interleaved-1f1b": Classic(circular, by_rules("interleaved-1f1b")),
    "interleaved-zb": Classic(all_of(circular, is_split), by_rules("interleaved-zb")),
    "looped-bfs": Classic(circular, by_rules("looped-bfs")),
    "zb-v": Classic(all_of(v_shape, is_split), scripted(zero_bubble_v)),
    "v-half": Classic(all_of(v_shape, is_split), repeated_block((2, 1, 2, 1)), automatic=True),
    "v-min": Classic(all_of(v_shape, is_split), repeated_block((1, 1, 1, 1)), automatic=True),
    "dualpipe-v": Classic(all_of(v_shape, enough_for_dualpipe), scripted(dualpipe_v)),
    "hanayo": Classic(waves, by_rules_in_units("hanayo")),
    "chimera": Classic(needs_two_ways, by_rules("chimera")),
    "kfkb": Classic(one_stage_each, as_given(best_kfkb_orders)),
    "greedy": Classic(always, as_given(greedy_orders)),
    "1f1b+": Classic(needs_shared, by_rules("1f1b+")),
}
"""Every classic schedule by the name ``--scheduler`` takes."""
