"""Plans with a program for each kind of device, and the same with one for each device.

The *folded* form of a plan says every program once, and which devices play it (:mod:`pipeplan.workload.folding`). Both
forms say the same, action by action, and predict the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import TypeVar

from pipeplan.files.plan import Plan
from pipeplan.workload.action import Action
from pipeplan.workload.elements import Hop, Loop, Players
from pipeplan.workload.folding import Fold, devices_of, folded, of_devices, on_devices
from pipeplan.workload.workload import Workload

Said = TypeVar("Said")


def folded_plan(plan: Plan, least: int = 2) -> Plan:
    """The plan with programs that at least so many devices play each; itself where devices are not alike."""
    if plan.players or plan.is_inference:
        return plan
    workload = folded(plan.workload, least)
    if not workload.players:
        return plan
    fold = Fold(workload.players)
    firsts = [own.first for own in workload.players]
    programs = [tuple(_on_program(text, fold) for text in plan.programs[device]) for device in firsts]
    found = plan.model_copy(
        update={
            **{each.name: getattr(workload, each.name) for each in fields(Workload)},
            "programs": tuple(programs),
            "loop": None if plan.loop is None else _loop(plan.loop, firsts),
            "predicted": plan.predicted.model_copy(
                update={"memory": tuple(plan.predicted.memory[device] for device in firsts)}
            ),
        }
    )
    return found if _says(found, plan) else plan


def _says(found: Plan, plan: Plan) -> bool:
    """Whether a folded plan says the same as a plan of devices."""
    back = unfolded(found)
    return back.programs == plan.programs and back.loop == plan.loop and back.predicted == plan.predicted


def unfolded(plan: Plan) -> Plan:
    """The plan with a program for each device; it grows with the number of devices."""
    if not plan.players:
        return plan
    players, fold = plan.players, Fold(plan.players)
    places = [(fold.programs[device], fold.places[device]) for device in range(plan.num_devices)]
    programs = tuple(program_on(plan.programs[program], players, place) for program, place in places)
    groups: dict[tuple[int, ...], tuple[int, ...]] = {}

    def on(programs: tuple[int, ...]) -> tuple[int, ...]:
        if programs not in groups:
            groups[programs] = devices_of(players, programs)
        return groups[programs]

    return plan.model_copy(
        update={
            "players": (),
            "devices": _by_program(plan.devices, places),
            "stages": tuple(replace(stage, devices=on(stage.devices)) for stage in plan.stages),
            "tied": tuple(replace(each, devices=tuple(map(on, each.devices))) for each in plan.tied),
            "dependencies": tuple(replace(each, hops=on_devices(each.hops, players)) for each in plan.dependencies),
            "programs": programs,
            "loop": None if plan.loop is None else _loop(plan.loop, [program for program, _ in places]),
            "predicted": plan.predicted.model_copy(update={"memory": _by_program(plan.predicted.memory, places)}),
        }
    )


def in_place_0(plan: Plan) -> Plan:
    """A folded plan on devices but for its programs, with no messages but those between players in place 0.

    What a profile says of stages, and of one replica's messages, it says of this.
    """
    if not plan.players:
        return plan
    firsts = [own.first for own in plan.players]
    groups = {stage.devices: plan.group_of(stage) for stage in plan.stages}

    def in_place(hop: Hop) -> Hop:
        return replace(hop, source_device=firsts[hop.source_device], target_device=firsts[hop.target_device])

    return plan.model_copy(
        update={
            "players": (),
            "devices": tuple(of_devices(plan.players, plan.devices)),
            "stages": tuple(replace(stage, devices=groups[stage.devices]) for stage in plan.stages),
            "tied": tuple(
                replace(each, devices=tuple(devices_of(plan.players, own) for own in each.devices))
                for each in plan.tied
            ),
            "dependencies": tuple(replace(each, hops=tuple(map(in_place, each.hops))) for each in plan.dependencies),
        }
    )


def program_on(texts: Sequence[str], players: Sequence[Players], place: int) -> Sequence[str]:
    """A program as the device in this place plays it: messages name devices where they named programs."""
    if not any("@" in text for text in texts):
        return texts
    return tuple(_renamed(text, lambda program: players[program].device(place)) for text in texts)


def _on_program(text: str, fold: Fold) -> str:
    return _renamed(text, fold.programs.__getitem__)


def _renamed(text: str, number: Callable[[int], int]) -> str:
    """A message's text with another number of the device at its other end."""
    if "@" not in text:
        return text
    action = Action.parse(text)
    assert action.peer_device is not None
    return str(replace(action, peer_device=number(action.peer_device)))


def _by_program(said: Sequence[Said], places: Sequence[tuple[int, int]]) -> tuple[Said, ...]:
    return tuple(said[program] for program, _ in places)


def _loop(loop: Loop, of: Sequence[int]) -> Loop:
    """A loop whose rounds stand, for each of these, where they stood in the program of this number."""
    rounds = (
        replace(each, begins=tuple(each.begins[n] for n in of), ends=tuple(each.ends[n] for n in of))
        for each in loop.rounds
    )
    return replace(loop, rounds=tuple(rounds))
