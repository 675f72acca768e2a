"""The predicted timeline as a trace, in the form in which a run writes its measured one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pipeplan.model import Action, Dependency, Hop, Plan
from pipeplan.model.trace import Trace, trace_json
from pipeplan.simulate.simulation import Simulation

__all__ = ["predicted_trace", "trace_text"]


def predicted_trace(simulation: Simulation) -> Trace:
    """Every action on each of its devices, and every message on both of its ends, from when it is under way."""
    graph, trace = simulation.graph, Trace("predicted")
    for device, order in enumerate(simulation.orders):
        for task in order:
            trace.add(graph.label(task), device, simulation.starts[task], graph.durations[task])
    workload = simulation.workload
    position = {operation.id: index for index, operation in enumerate(workload.operations)}
    for dependency in workload.dependencies:
        source, target = position[dependency.source], position[dependency.target]
        for hop in dependency.hops:
            slots = workload.messages(dependency, hop)
            names = _Names(simulation.plan, dependency, hop, *slots.name(0))
            item = workload.item_of.get((source, target, hop))
            for number in range(len(slots)):
                begin = _made(simulation, source, slots.samples(number))  # leaves then, unless it waits for its link
                if item is not None:
                    begin = simulation.starts[graph.offsets[item] + number]
                microbatch, part = slots.name(number)
                sent = hop if part is None else hop.part
                for device, name in names.of(microbatch, part):
                    trace.add(name, device, begin, sent.duration_ns, {"bytes": sent.bytes})
    return trace


def _made(simulation: Simulation, operation: int, samples: tuple[int, int]) -> int:
    """When all actions of an operation that hold some of these samples have ended."""
    graph = simulation.graph
    tasks = [graph.offsets[operation] + n for n in graph.workload.slots[operation].sharing(samples)]
    return max(simulation.starts[task] + graph.durations[task] for task in tasks)


def trace_text(simulation: Simulation) -> str:
    """The text of a trace file with the predicted timeline."""
    about = {
        "plan": simulation.plan.name,
        "num_microbatches": simulation.workload.num_microbatches,
        "makespan_ns": simulation.rates.makespan_ns,
    }
    return trace_json(predicted_trace(simulation).events(), about)


class _Names:
    """How the plan's programs call the messages of one hop: with or without the peer."""

    def __init__(self, plan: Plan, dependency: Dependency, hop: Hop, microbatch: int, part: int | None) -> None:
        """``microbatch`` and ``part`` are those of any of the messages."""
        source, target = dependency.source_stage, dependency.target_stage
        payload = dependency.payload
        send = Action(source, f"SEND_{payload}", microbatch, target, hop.target_device, part)
        receive = Action(target, f"RECV_{payload}", microbatch, source, hop.source_device, part)
        self._ends = [
            (hop.source_device, _as_in(plan, hop.source_device, send)),
            (hop.target_device, _as_in(plan, hop.target_device, receive)),
        ]

    def of(self, microbatch: int, part: int | None) -> Iterator[tuple[int, str]]:
        """(device, action text) of the SEND and the RECV of a micro-batch, or of a part of it."""
        for device, name in self._ends:
            yield device, str(replace(name, microbatch=microbatch, part=part))


def _as_in(plan: Plan, device: int, full: Action) -> Action:
    """The form of an action in a device's program, which leaves out peers where only one is possible."""
    program = set(plan.programs[device])
    forms = [
        replace(full, peer_stage=peer_stage, peer_device=peer_device)
        for peer_stage in (full.peer_stage, None)
        for peer_device in (full.peer_device, None)
    ]
    return next((form for form in forms if str(form) in program), full)
