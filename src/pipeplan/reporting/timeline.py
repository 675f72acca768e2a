"""The timeline of a simulation: rows of characters, and a trace, with a measured timeline beside it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

from pipeplan.files import Plan, sha256_of
from pipeplan.files.folded import renamed, unfolded
from pipeplan.files.trace import Trace, TraceEvent, trace_json
from pipeplan.simulator.simulation import Simulation, simulate
from pipeplan.workload.action import Action
from pipeplan.workload.elements import Dependency, Hop
from pipeplan.workload.kinds import Role, role_of
from pipeplan.workload.samples import Slots
from pipeplan.workload.task_graph import NEVER

_ROLE_NAMES = {
    Role.FORWARD: "forward",
    Role.BACKWARD: "backward",
    Role.INPUT_GRAD: "input gradient",
    Role.WEIGHT_GRAD: "weight gradient",
}


def kind_name(kind: str) -> str:
    """A kind in words; an instruction has its own."""
    return _ROLE_NAMES.get(role_of(kind), "instruction")


def runs_by_device(simulation: Simulation) -> list[tuple[int, list[str]]]:
    """The critical path as runs of actions on one device: (device, action texts).

    Messages on it, having waited for their link or not, are runs of their link's number, which come after the devices'.
    """
    graph = simulation.graph
    steps = simulation.critical_path
    return [
        (device, [simulation.label(step.task) for step in run])
        for device, run in groupby(steps, key=lambda step: graph.devices_of(step.task)[0])
    ]


def odd_stages(simulation: Simulation, device: int) -> list[int]:
    """Every second of the device's stages that run blocks; those of instructions have none, and are never drawn so."""
    stages = enumerate(simulation.workload.stages)
    return [index for index, stage in stages if device in stage.devices and stage.blocks][1::2]


@dataclass(frozen=True, slots=True)
class TimelineWindow:
    """A part of the run, from ``start_ns`` to ``end_ns``, drawn in ``num_cells`` cells."""

    start_ns: int
    end_ns: int
    num_cells: int

    def cell_of(self, time_ns: int) -> int:
        """The cell boundary nearest to a time, from 0 to ``num_cells``."""
        share = (time_ns - self.start_ns) / (self.end_ns - self.start_ns)
        return min(self.num_cells, max(0, round(share * self.num_cells)))


@dataclass(frozen=True, slots=True)
class TimelineCell:
    """One character of a row: the kind that runs there (None is idle) and a letter or digit of the action, if any."""

    kind: str | None
    text: str = ""


def windows(simulation: Simulation, num_cells: int) -> list[TimelineWindow]:
    """The whole run if an action of median length keeps a cell; otherwise its beginning, its repetend and its end.

    Without a repetend the middle part is from the middle of the run. In parts, an action of median length has
    room for its label, unless the repetend is longer than that. One cell is left between parts. Of a loop's round,
    which is the repetend then, there is one copy, and times are those of what is written.
    """
    makespan = simulation.written_ns
    median = statistics.median(simulation.graph.durations[: simulation.graph.num_actions])
    part_cells = (num_cells - 2) // 3
    length = max(1, round(part_cells * median / len(f"F{simulation.workload.num_microbatches - 1}")))
    repetend = repetend_time_range(simulation)
    if repetend is not None:
        length = max(length, repetend[1] - repetend[0])
    if makespan / median <= num_cells or 3 * length >= makespan:
        return [TimelineWindow(0, makespan, num_cells)]
    middle = (makespan - length) // 2 if repetend is None else repetend[0]
    middle = min(max(middle, length), makespan - 2 * length)
    return [TimelineWindow(start, start + length, part_cells) for start in (0, middle, makespan - length)]


def repetend_time_range(simulation: Simulation) -> tuple[int, int] | None:
    """From the first start of the repetend's first copy, for as long as a repetition takes, in ns."""
    if simulation.repetend is None or simulation.copies is None or simulation.period_ns is None:
        return None
    firsts = [order[copy[0]] for order, copy in zip(simulation.orders, simulation.copies, strict=True) if copy]
    start = min(simulation.starts[task] for task in firsts)
    return start, start + round(simulation.period_ns * simulation.repetend.unroll)


def repetend_words(simulation: Simulation) -> str:
    """What a frame around the repetend is called: with how often it runs, where it is drawn once."""
    return "repetend" if simulation.loop is None else f"repetend \u00d7 {simulation.loop.copies:,}"


def device_row(simulation: Simulation, device: int, window: TimelineWindow) -> list[TimelineCell]:
    """The cells of one device in a window.

    A cell has the kind that takes most of its time, or is idle if nothing runs for half of it. Where an action
    has the cells, its kind and micro-batch stand at its beginning: ``F12``, ``F0.1`` where it is a part of one (``F0``
    where that is too long), or ``f12`` in every second stage of the device.
    """
    kinds, odd = _kinds(simulation, device, window), odd_stages(simulation, device)
    texts = [""] * window.num_cells
    graph, taken = simulation.graph, 0
    for task in _inside(simulation, device, window):
        start, end = simulation.starts[task], simulation.starts[task] + graph.durations[task]
        left, right = window.cell_of(start), window.cell_of(end)
        if start < window.start_ns:
            continue
        operation = graph.workload.operations[graph.operation_of[task]]
        after_idle = taken < left and (left == 1 or (left > 1 and kinds[left - 2] is None))
        left -= after_idle and kinds[left - 1] == operation.kind  # no cell of a bar stands before its label
        taken = right
        kind = operation.kind.lower() if operation.stage in odd else operation.kind
        label = f"{kind}{simulation.microbatch_text(task)}"
        shorter = (label, label.partition(".")[0], kind[:1], "")
        shown = next(each for each in shorter if len(each) <= right - left)
        for offset, letter in enumerate(shown):
            texts[left + offset] = letter
    return [TimelineCell(kind, text if kind else "") for kind, text in zip(kinds, texts, strict=True)]


def _inside(simulation: Simulation, device: int, window: TimelineWindow) -> list[int]:
    """Tasks of the device that run in the window."""
    starts, durations = simulation.starts, simulation.graph.durations
    return [
        task
        for task in simulation.orders[device]
        if starts[task] < window.end_ns and starts[task] + durations[task] > window.start_ns
    ]


def _kinds(simulation: Simulation, device: int, window: TimelineWindow) -> list[str | None]:
    """The kind that prevails in each cell."""
    graph = simulation.graph
    width = (window.end_ns - window.start_ns) / window.num_cells
    taken: list[dict[str, float]] = [{} for _ in range(window.num_cells)]
    for task in _inside(simulation, device, window):
        kind = graph.workload.operations[graph.operation_of[task]].kind
        begin = max(0.0, (simulation.starts[task] - window.start_ns) / width)
        end = min(float(window.num_cells), (simulation.starts[task] + graph.durations[task] - window.start_ns) / width)
        for cell in range(int(begin), min(window.num_cells, int(end) + 1)):
            share = min(end, cell + 1) - max(begin, cell)
            if share > 0:
                taken[cell][kind] = taken[cell].get(kind, 0.0) + share
    return [max(cell, key=cell.__getitem__) if sum(cell.values()) >= 0.5 else None for cell in taken]


# As a trace ---------------------------------------------------------------------------------------------------------


Timeline = Sequence[Sequence[Sequence[tuple[int, int, int]]]]


def predicted_trace(simulation: Simulation) -> Trace:
    """Every action on each of its devices, and every message on both of its ends, from when it is under way.

    Of each of a loop's rounds there is the first copy, and what is after it when it is. Of devices that play one
    program there is the first.
    """
    graph, trace, first = simulation.graph, Trace("predicted"), simulation.workload.first_playing
    for device, order in enumerate(simulation.orders):
        for task in order:
            trace.add(simulation.label(task), first(device), simulation.start_of(task), graph.durations[task])
    for text, devices, begin, duration, size in simulation.exchanges:
        for device in devices:
            trace.add(text, first(device), begin, duration, {"bytes": size})
    for message in device_messages(simulation):
        for device, name in message.ends:
            about = {"bytes": message.size_bytes}
            trace.add(name, first(device), message.begin_ns, message.duration_ns, about)
    return trace


class DeviceMessage(NamedTuple):
    """A message between two devices: when it is under way, as written and in all that runs, in ns.

    ``ends`` are (device, action's text) of its SEND and its RECV; ``number`` is its micro-batch, and its part.
    """

    source_device: int
    target_device: int
    written_ns: int
    begin_ns: int
    duration_ns: int
    size_bytes: int
    payload: str
    number: str
    ends: tuple[tuple[int, str], ...]

    @property
    def name(self) -> str:
        """Its SEND."""
        return self.ends[0][1]


def device_messages(simulation: Simulation, of: Callable[[Hop], bool] = lambda hop: True) -> Iterator[DeviceMessage]:
    """The messages of all hops, or of some; of each of a loop's rounds the first copy, and what is after it.

    Between programs their texts name the first devices that play them.
    """
    graph, loop = simulation.graph, simulation.loop
    workload = graph.workload
    position = {operation.id: index for index, operation in enumerate(workload.operations)}
    for dependency in workload.dependencies:
        source, target = position[dependency.source], position[dependency.target]
        payload, loop_ends, skipped = dependency.payload, NEVER, 0
        if loop is not None:
            loop_ends, skipped = sum(loop.moments[loop.rounds[source]]), loop.skipped_of(source)
        for hop in filter(of, dependency.hops):
            slots = workload.messages(dependency, hop)
            (sends, send, sent_on), (takes, take, taken) = _ends(simulation, dependency, hop, *slots.name(0))
            item, made = workload.item_of.get((source, target, hop)), _made(simulation, source, slots)
            for number in range(len(slots)):
                # leaves when it is made, unless it waits for its link
                written = made(number) if item is None else simulation.starts[graph.offsets[item] + number]
                microbatch, part = slots.name(number)
                if written >= loop_ends:
                    microbatch += skipped
                sent, text = (hop, f"{microbatch}") if part is None else (hop.part, f"{microbatch}.{part}")
                yield DeviceMessage(
                    hop.source_device,
                    hop.target_device,
                    written,
                    written if loop is None else simulation.clock(written),
                    sent.duration_ns,
                    sent.bytes,
                    payload,
                    text,
                    ((sends, send + text + sent_on), (takes, take + text + taken)),
                )


def _made(simulation: Simulation, operation: int, messages: Slots) -> Callable[[int], int]:
    """When all actions of an operation that hold some of a message's samples have ended, of its number."""
    graph = simulation.graph
    slots, first, starts, durations = (
        graph.workload.slots[operation],
        graph.offsets[operation],
        simulation.starts,
        graph.durations,
    )
    if slots == messages and slots.plain and slots.size <= slots.stride:  # each is of one action
        return lambda number: starts[first + number] + durations[first + number]

    def made(number: int) -> int:
        tasks = [first + n for n in slots.sharing(messages.samples(number))]
        return max(starts[task] + durations[task] for task in tasks)

    return made


def trace_text(simulation: Simulation) -> str:
    """The text of a trace file with the predicted timeline."""
    about = {
        "plan": simulation.plan.name,
        "num_microbatches": simulation.workload.num_microbatches,
        "makespan_ns": simulation.rates.makespan_ns,
    }
    if simulation.loop is not None:
        about["loop_copies"] = simulation.loop.copies
    return trace_json(predicted_trace(simulation).events(), about)


def run_trace(plan: Plan, timeline: Timeline, about: Mapping[str, object]) -> str:
    """The text of ``run --trace``: predicted and measured, step after step; in each both begin at the same moment.

    ``timeline`` [step][rank] has (program counter, start, end). A measured SEND lasts as long as posting it took, a
    RECV as long as its consumer waited for it.
    """
    plan = unfolded(plan)  # ranks are devices
    predicted = predicted_trace(simulate(plan.unrolled())).events()
    measured = Trace("measured")
    events: list[TraceEvent] = [event for event in predicted if event["ph"] != "X"]
    begin_ns = 0
    for step, ranks in enumerate(timeline):
        for rank, actions in enumerate(ranks):
            for counter, start, end in actions:
                measured.add(plan.whole_programs[rank][counter], rank, begin_ns + start, end - start, {"step": step})
        events += [later(event, begin_ns, step) for event in predicted if event["ph"] == "X"]
        last = max((end for actions in ranks for *_, end in actions), default=0)
        begin_ns += max(last, plan.predicted.makespan_ns) * 21 // 20
    known = {
        "plan": plan.name,
        "plan_sha256": sha256_of(plan),
        **about,
        "steps": len(timeline),
        "makespan_ns": plan.predicted.makespan_ns,
    }
    return trace_json([*events, *measured.events()], known)


def later(event: TraceEvent, by_ns: int, step: int) -> TraceEvent:
    """An event of a step that begins so much later."""
    at, args = event["ts"], event["args"]
    assert isinstance(at, float)
    assert isinstance(args, dict)
    return {**event, "ts": (round(at * 1000) + by_ns) / 1000, "args": {**args, "step": step}}


def _ends(
    simulation: Simulation, dependency: Dependency, hop: Hop, microbatch: int, part: int | None
) -> list[tuple[int, str, str]]:
    """Of the SEND and the RECV of a hop's messages the device, and what is before and after a micro-batch's number.

    They are called as the plan's programs call them, with or without the peer; ``microbatch`` and ``part`` are those of
    any of the messages.
    """
    plan, first = simulation.plan, simulation.workload.first_playing
    source, target = dependency.source_stage, dependency.target_stage
    send = Action(source, f"SEND_{dependency.payload}", microbatch, target, hop.target_device, part)
    receive = Action(target, f"RECV_{dependency.payload}", microbatch, source, hop.source_device, part)
    found = []
    for device, full in ((hop.source_device, send), (hop.target_device, receive)):
        named = _as_in(plan, device, full)
        text, whole = renamed(str(named), first), f"{named.stage}{named.kind}"
        number = f"{microbatch}" if part is None else f"{microbatch}.{part}"
        found.append((device, whole, text[len(whole) + len(number) :]))
    return found


def _as_in(plan: Plan, device: int, full: Action) -> Action:
    """The form of an action in a device's program, which leaves out peers where only one is possible."""
    program = set(plan.programs[device])
    forms = [
        replace(full, peer_stage=peer_stage, peer_device=peer_device)
        for peer_stage in (full.peer_stage, None)
        for peer_device in (full.peer_device, None)
    ]
    return next((form for form in forms if str(form) in program), full)
