"""The predicted timeline as a trace, and a run's measured one beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from pipeplan.files import Plan, sha256_of
from pipeplan.files.trace import Trace, TraceEvent, trace_json
from pipeplan.simulator.simulation import Simulation, simulate
from pipeplan.workload.action import Action
from pipeplan.workload.elements import Dependency, Hop

__all__ = ["predicted_trace", "run_trace", "trace_text"]

Timeline = Sequence[Sequence[Sequence[tuple[int, int, int]]]]


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


def run_trace(plan: Plan, timeline: Timeline, about: Mapping[str, object]) -> str:
    """The text of ``run --trace``: predicted and measured, step after step; in each both begin at the same moment.

    ``timeline`` [step][rank] has (program counter, start, end). A measured SEND lasts as long as posting it took, a
    RECV as long as its consumer waited for it.
    """
    predicted = predicted_trace(simulate(plan)).events()
    measured = Trace("measured")
    events: list[TraceEvent] = [event for event in predicted if event["ph"] != "X"]
    begin_ns = 0
    for step, ranks in enumerate(timeline):
        for rank, actions in enumerate(ranks):
            for counter, start, end in actions:
                measured.add(plan.programs[rank][counter], rank, begin_ns + start, end - start, {"step": step})
        events += [_later(event, begin_ns, step) for event in predicted if event["ph"] == "X"]
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


def _later(event: TraceEvent, by_ns: int, step: int) -> TraceEvent:
    at, args = event["ts"], event["args"]
    assert isinstance(at, float)
    assert isinstance(args, dict)
    return {**event, "ts": (round(at * 1000) + by_ns) / 1000, "args": {**args, "step": step}}


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
