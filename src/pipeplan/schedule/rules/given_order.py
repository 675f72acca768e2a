"""Explicit orders: what each device runs, one action after another."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from pipeplan.errors import UsageError
from pipeplan.texts import counted
from pipeplan.workload.action import Action
from pipeplan.workload.task_graph import TaskGraph

Texts = Sequence[Sequence[str]]
"""[device] the texts of its actions."""


def actions_of(order: Texts) -> list[list[Action]]:
    """[device] its actions.

    Raises:
        ValueError: a text is no action, or one that a search does not order; the text names it.
    """
    return [[_action(text, device) for text in texts] for device, texts in enumerate(order)]


def _action(text: str, device: int) -> Action:
    try:
        found = Action.parse(text)
    except ValueError:
        raise ValueError(
            f"order of device {device}: {text!r} is not an action; write stage, kind and micro-batch, as 2F0"
        ) from None
    if not found.is_compute:
        raise ValueError(
            f"order of device {device}: {text} is a message, which comes with what it carries; leave it out"
        )
    return found


def num_microbatches_of(order: Texts) -> int:
    """How many micro-batches an order has."""
    return 1 + max((action.microbatch for action in chain.from_iterable(actions_of(order))), default=0)


def devices_of_stages(order: Texts) -> list[tuple[int, ...]]:
    """[stage] the devices that run it."""
    found: dict[int, dict[int, None]] = {}
    for device, actions in enumerate(actions_of(order)):
        for action in actions:
            found.setdefault(action.stage, {})[device] = None
    return [tuple(found.get(stage, ())) for stage in range(1 + max(found, default=-1))]


def orders_of(graph: TaskGraph, order: Texts) -> list[list[int]]:
    """[device] its actions in the order given, by number.

    Raises:
        UsageError: the order is of other devices or micro-batches, or an action is missing, there twice, or none of its
            device's; the text names it.
    """
    workload = graph.workload
    if len(order) != len(workload.devices):
        raise UsageError(
            f"order has {counted(len(order), 'device')}, the placement {len(workload.devices)}; write a row for each "
            f"device, or choose a placement on {len(order)}: --devices {len(order)} --placement all"
        )
    count = num_microbatches_of(order)
    if count != workload.num_microbatches:
        raise UsageError(
            f"order has {count} micro-batches, the request {workload.num_microbatches}; give --microbatches {count}"
        )
    number = {graph.label(task): task for task in range(graph.num_actions)}
    return [_checked(graph, device, texts, [number.get(text) for text in texts]) for device, texts in enumerate(order)]


def _checked(graph: TaskGraph, device: int, texts: Sequence[str], tasks: Sequence[int | None]) -> list[int]:
    own = [task for task in range(graph.num_actions) if device in graph.devices_of(task)]
    left = set(own)
    for text, task in zip(texts, tasks, strict=True):
        if task not in left:
            what = "is there twice" if task in own else "is not one of its actions"
            stands = f"the device's actions are {_some([graph.label(each) for each in own])}"
            raise UsageError(f"order of device {device}: {text} {what}; {stands}")
        left.remove(task)
    if left:
        missing = _some([graph.label(task) for task in sorted(left)])
        last = max(texts, key=lambda text: Action.parse(text).microbatch, default="")
        count = graph.workload.num_microbatches
        because = f" ({last} makes it {count} micro-batches)" if last and len(left) > 1 else ""
        raise UsageError(f"order of device {device} leaves out {missing}{because}; add what is missing")
    return [task for task in tasks if task is not None]


def _some(labels: Sequence[str]) -> str:
    """The first few."""
    more = f" and {len(labels) - _NAMED} more" if len(labels) > _NAMED else ""
    return ", ".join(labels[:_NAMED]) + more


_NAMED = 6
"""Actions that a text names."""
