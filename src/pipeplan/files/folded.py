"""Plans with a program for each kind of device, and the same with one for each device.

The *folded* form of a plan says every program once, and which devices play it (:mod:`pipeplan.workload.folding`). Both
forms say the same, action by action, and predict the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, overload

from pipeplan.files.plan import Plan
from pipeplan.workload.action import Action
from pipeplan.workload.elements import Dependency, Hop, Loop, Players, program_of
from pipeplan.workload.folding import Fold, devices_of, of_devices, on_devices, ways_to_fold
from pipeplan.workload.workload import Workload


def folded_workload(workload: Workload, least: int = 2) -> Workload:
    """A workload whose programs have as many players as they can, at least so many; itself where that cannot be."""
    for count in ways_to_fold(workload.stages) if not workload.players else ():
        fold = Fold.of(workload.stages, count, len(workload.devices)) if count >= least else None
        found = None if fold is None else _on_programs(workload, fold)
        if found is not None:
            return found
    return workload


def _on_programs(workload: Workload, fold: Fold) -> Workload | None:
    firsts = [own.first for own in fold.players]
    if any(workload.devices[d] != workload.devices[firsts[program]] for d, program in fold.programs.items()):
        return None
    tied = [fold.tied(each) for each in workload.tied]
    dependencies = [_folded_hops(each, fold) for each in workload.dependencies]
    if None in tied or None in dependencies:
        return None
    return replace(
        workload,
        devices=tuple(workload.devices[device] for device in firsts),
        stages=tuple(map(fold.stage, workload.stages)),
        tied=tuple(each for each in tied if each is not None),
        dependencies=tuple(each for each in dependencies if each is not None),
        players=fold.players,
    )


def _folded_hops(dependency: Dependency, fold: Fold) -> Dependency | None:
    """Its messages between programs; None where they are not the same in all places, or between places."""
    by_place: list[list[Hop]] = [[] for _ in range(fold.count)]
    for hop in dependency.hops:
        place = fold.places[hop.source_device]
        if place != fold.places[hop.target_device]:
            return None
        by_place[place].append(fold.hop(hop))
    if any(own != by_place[0] for own in by_place):
        return None
    return replace(dependency, hops=tuple(by_place[0]))


def folded_plan(plan: Plan, least: int = 2) -> Plan:
    """The plan with programs that at least so many devices play each; itself where devices are not alike."""
    if plan.players or plan.is_inference:
        return plan
    workload = folded_workload(plan.workload, least)
    if not workload.players:
        return plan
    fold = Fold(workload.players, workload.players_each)
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
    """The plan with a program for each device; it grows with the number of devices. Its fingerprint stays."""
    if not plan.players:
        return plan
    players, fold = plan.players, Fold(plan.players, plan.players_each)
    places = [(fold.programs[device], fold.places[device]) for device in range(plan.num_devices)]
    return _same_print(
        plan,
        {
            **_groups(plan),
            "dependencies": tuple(replace(each, hops=on_devices(each.hops, players)) for each in plan.dependencies),
            "programs": tuple(program_on(plan.programs[program], players, place) for program, place in places),
            "loop": None if plan.loop is None else _loop(plan.loop, [program for program, _ in places]),
        },
    )


def on_device(plan: Plan, device: int) -> Plan:
    """What one device needs of a plan: groups on devices, and of programs and messages its own. Its fingerprint stays.

    Other devices have empty programs. Of a folded plan's programs only this one is unfolded.
    """
    if not plan.players:
        return plan
    players = plan.players
    program, place = program_of(players, device)
    in_place = [own.device(place) for own in players]
    programs: list[Sequence[str]] = [()] * plan.num_devices
    programs[device] = program_on(plan.programs[program], players, place)

    def own(hops: Sequence[Hop]) -> tuple[Hop, ...]:
        ends = ((hop, hop.source_device, hop.target_device) for hop in hops)
        return tuple(
            replace(hop, source_device=in_place[source], target_device=in_place[target])
            for hop, source, target in ends
            if program in (source, target)
        )

    rounds = () if plan.loop is None else plan.loop.rounds
    loop = plan.loop and replace(
        plan.loop,
        rounds=tuple(
            replace(
                each,
                begins=tuple(of_devices(players, each.begins)),
                ends=tuple(of_devices(players, each.ends)),
            )
            for each in rounds
        ),
    )
    return _same_print(
        plan,
        {
            **_groups(plan),
            "dependencies": tuple(replace(each, hops=own(each.hops)) for each in plan.dependencies),
            "programs": tuple(programs),
            "loop": loop,
        },
    )


def _groups(plan: Plan) -> dict[str, Any]:
    """Devices, stages, and what these share, on devices."""
    groups: dict[tuple[int, ...], tuple[int, ...]] = {}

    def on(programs: tuple[int, ...]) -> tuple[int, ...]:
        if programs not in groups:
            groups[programs] = devices_of(plan.players, programs)
        return groups[programs]

    memory = tuple(of_devices(plan.players, plan.predicted.memory))
    return {
        "players": (),
        "devices": tuple(of_devices(plan.players, plan.devices)),
        "stages": tuple(replace(stage, devices=on(stage.devices)) for stage in plan.stages),
        "tied": tuple(replace(each, devices=tuple(map(on, each.devices))) for each in plan.tied),
        "predicted": plan.predicted.model_copy(update={"memory": memory}),
    }


def _same_print(plan: Plan, changes: dict[str, Any]) -> Plan:
    """Another form of a plan, which is known by the fingerprint of the plan that was read."""
    found = plan.model_copy(update=changes)
    found.__dict__["fingerprint"] = plan.fingerprint
    return found


def device_programs(plan: Plan) -> Sequence[Sequence[str]]:
    """[device] all that it runs, made as it is read."""
    return _DevicePrograms(plan) if plan.players else plan.whole_programs


class _DevicePrograms(Sequence[Sequence[str]]):
    """The programs of a folded plan's devices."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._programs = plan, plan.whole_programs

    def __len__(self) -> int:
        return self._plan.num_devices

    @overload
    def __getitem__(self, index: int) -> Sequence[str]: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Sequence[str]]: ...

    def __getitem__(self, index: int | slice) -> Sequence[str] | Sequence[Sequence[str]]:
        if isinstance(index, slice):
            return tuple(self[number] for number in range(*index.indices(len(self))))
        program, place = program_of(self._plan.players, range(len(self))[index])
        return program_on(self._programs[program], self._plan.players, place)


def in_place_0(plan: Plan) -> Plan:
    """A folded plan on devices but for its programs, with no messages but those between players in place 0.

    What a profile says of stages, and of one replica's messages, it says of this.
    """
    if not plan.players:
        return plan
    firsts = [own.first for own in plan.players]

    def in_place(hop: Hop) -> Hop:
        return replace(hop, source_device=firsts[hop.source_device], target_device=firsts[hop.target_device])

    hops = (replace(each, hops=tuple(map(in_place, each.hops))) for each in plan.dependencies)
    return plan.model_copy(update={**_groups(plan), "dependencies": tuple(hops)})


def program_on(texts: Sequence[str], players: Sequence[Players], place: int) -> Sequence[str]:
    """A program as the device in this place plays it: messages name devices where they named programs."""
    if not any("@" in text for text in texts):
        return texts
    return tuple(renamed(text, lambda program: players[program].device(place)) for text in texts)


def _on_program(text: str, fold: Fold) -> str:
    return renamed(text, fold.programs.__getitem__)


def renamed(text: str, number: Callable[[int], int]) -> str:
    """A message's text with another number of the device at its other end."""
    if "@" not in text:
        return text
    action = Action.parse(text)
    assert action.peer_device is not None
    return str(replace(action, peer_device=number(action.peer_device)))


def _loop(loop: Loop, of: Sequence[int]) -> Loop:
    """A loop whose rounds stand, for each of these, where they stood in the program of this number."""
    rounds = (
        replace(each, begins=tuple(each.begins[n] for n in of), ends=tuple(each.ends[n] for n in of))
        for each in loop.rounds
    )
    return replace(loop, rounds=tuple(rounds))
