"""The orders that a plan's programs state: compute actions on devices, messages on the links where they may wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from pipeplan.errors import InvalidPlanError
from pipeplan.model import Plan
from pipeplan.model.action import operation_of, payload_of
from pipeplan.model.workload import Workload
from pipeplan.simulate.timing import TaskGraph

__all__ = ["orders_of"]

_Name = tuple[str, str]
"""What stands before and behind the micro-batch in a SEND."""


def orders_of(plan: Plan, graph: TaskGraph) -> list[list[int]]:
    """The orders of each device and link as task numbers of a graph of the plan, maybe with other costs.

    Raises:
        InvalidPlanError: an action is unknown, in the wrong program, there twice, or missing.
    """
    workload = graph.workload
    orders = [_compute_order(graph, device, program) for device, program in enumerate(plan.programs)]
    for link, (source, target) in enumerate(workload.links):
        orders.append(_link_order(graph, link, source, target, plan.programs[source]))
    return orders


def _compute_order(graph: TaskGraph, device: int, program: Sequence[str]) -> list[int]:
    workload = graph.workload
    number: dict[str, int] = {}
    for item, operation in enumerate(workload.operations):
        if device in workload.resources[item]:
            id_, tasks = operation.id, range(graph.offsets[item], graph.offsets[item + 1])
            text = workload.slots[item].text
            number.update({f"{id_}{text(m)}": task for m, task in enumerate(tasks)})
    computes = [text for text in program if "_" not in text]  # a transfer is 1SEND_F0 or 2RECV_F0
    _require_all(device, computes, number)
    return [number[text] for text in computes]


def _link_order(graph: TaskGraph, link: int, source: int, target: int, program: Sequence[str]) -> list[int]:
    """The messages of a link in the order of the SENDs; others from the same device are passed over."""
    numbered = enumerate(graph.workload.transfers, len(graph.workload.operations))
    tasks = {item: range(*graph.offsets[item : item + 2]) for item, transfer in numbered if transfer.link == link}
    number: dict[str, int] = {}
    for (before, behind), item in _names(graph.workload, link, source).items():
        text = graph.workload.slots[item].text
        number.update({f"{before}{text(m)}{behind}": task for m, task in enumerate(tasks[item])})
    order = [number[text] for text in program if text in number]
    if not len(order) == len(set(order)) == sum(map(len, tasks.values())):
        raise InvalidPlanError(
            f"programs[{source}] does not have each SEND to device {target} once; pipeplan check tells all that is "
            "wrong with the plan"
        )
    return order


def _names(workload: Workload, link: int, device: int) -> dict[_Name, int]:
    """{what a SEND in the device's program may say: the link's transfer it means}, where it can mean only one hop."""
    ids = [operation.id for operation in workload.operations]
    items = {
        (ids[transfer.source], ids[transfer.target], transfer.hop.target_device): item
        for item, transfer in enumerate(workload.transfers, len(ids))
        if transfer.link == link
    }
    meant: dict[_Name, list[int | None]] = {}
    for dependency in workload.dependencies:
        for hop in dependency.hops:
            if hop.source_device == device:
                item = items.get((dependency.source, dependency.target, hop.target_device))
                for name in _ways_to_say(dependency.source, dependency.target_stage, hop.target_device):
                    meant.setdefault(name, []).append(item)
    return {name: item for name, (item, *others) in meant.items() if item is not None and not others}


def _ways_to_say(source: str, stage: int, device: int) -> list[_Name]:
    """A message with its full name, and with those that leave out who gets it."""
    source_stage, kind = operation_of(source)
    before = f"{source_stage}SEND_{payload_of(kind)}"
    return [(before, to_stage + to_device) for to_stage in ("", f">{stage}") for to_device in ("", f"@{device}")]


def _require_all(device: int, actions: Sequence[str], expected: Mapping[str, int]) -> None:
    """Require each expected action once and no other."""
    present = set(actions)
    wrong = next((f"has {text}, which does not run there" for text in actions if text not in expected), None)
    if wrong is None and len(present) < len(actions):
        wrong = f"has {next(text for text, count in Counter(actions).items() if count > 1)} more than once"
    if wrong is None and len(present) < len(expected):
        wrong = f"leaves out {next(text for text in expected if text not in present)}"
    if wrong is not None:
        raise InvalidPlanError(f"programs[{device}] {wrong}; pipeplan check tells all that is wrong with the plan")
