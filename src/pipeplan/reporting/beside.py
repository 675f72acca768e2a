"""A trace with two processes: what a simulation predicts, and what a run measured, step beside step.

Each step's prediction begins when the step's first action, or the step itself, was measured to begin.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from pipeplan.files.run_logs import RunLog
from pipeplan.files.trace import MEASURED_PROCESS_ID, MeasuredTrace, TimedText, Trace, TraceEvent, trace_json
from pipeplan.reporting.timeline import later, predicted_trace
from pipeplan.simulator.simulation import Simulation, simulate
from pipeplan.workload.action import Action, StateAction

Step = Sequence[Sequence[TimedText]]
"""[device] actions of one step: text, start and end in ns."""


def trace_beside(simulation: Simulation, run: MeasuredTrace | RunLog) -> str:
    """The text of a trace file with both.

    A plan's own trace keeps every action, and can be compared with the plan again. Of a profiler's there are the
    actions that it names, on one clock of all ranks; of a log only its steps, one after another. Raises UsageError
    where the plan has more actions than can be written out.
    """
    drawn = simulation
    if simulation.loop is not None and simulation.as_planned:  # what was measured has every action, too
        simulation.plan.require_few_actions(
            "--trace has every action beside what was measured", "leave out --trace, or measure a run of fewer"
        )
        drawn = replace(simulate(simulation.plan.unrolled()), measured=simulation.measured)
    predicted = predicted_trace(drawn).events()
    about: dict[str, object] = {"plan": simulation.plan.name, "makespan_ns": drawn.rates.makespan_ns}
    events = [event for event in predicted if event["ph"] != "X"]
    if isinstance(run, RunLog) and not run.timeline:
        about |= {"tool": run.tool}
        begins, measured = _logged(simulation, run)
    else:
        steps, more = _steps(simulation, run)
        about |= more
        begins = [min((start for own in step for _, start, _ in own), default=0) for step in steps]
        measured = _measured(steps)
    moving = [event for event in predicted if event["ph"] == "X"]
    for number, begin in enumerate(begins):
        events += [later(event, begin, number) for event in moving]
    return trace_json([*events, *measured], {**about, "steps": len(begins)})


def _steps(simulation: Simulation, run: MeasuredTrace | RunLog) -> tuple[Sequence[Step], dict[str, object]]:
    """The steps that were measured, and what the file says of where they are from."""
    if isinstance(run, MeasuredTrace):
        plans_own: dict[str, object] = {"plan_sha256": run.plan_sha256, "emulated": run.emulated}
        return run.steps, {**plans_own, **({"stretch": run.stretch} if run.stretch != 1 else {})}
    devices = range(len(simulation.plan.devices))
    first = min((start for own in run.timeline.values() for step in own for _, start, _ in step), default=0)
    count = max(map(len, run.timeline.values()))
    steps = [
        [[*_named(simulation, device, run.timeline.get(device, ())[number : number + 1], first)] for device in devices]
        for number in range(count)
    ]
    return steps, {"tool": run.tool}


def _named(
    simulation: Simulation, device: int, step: Iterable[Sequence[TimedText]], first_ns: int
) -> Iterator[TimedText]:
    """Actions by their texts; ``Forward 3`` is one of the device's stage, where it has one."""
    own = [number for number, stage in enumerate(simulation.plan.stages) if device in stage.devices]
    for text, start, end in (each for actions in step for each in actions):
        kind, _, number = text.partition(" ")
        if number and len(own) == 1:
            text = f"{own[0]}{'F' if kind == 'Forward' else 'B'}{number}"
        if StateAction.read(text) is not None or _is_action(text):
            yield text, start - first_ns, end - first_ns


def _is_action(text: str) -> bool:
    try:
        return bool(Action.parse(text))
    except ValueError:
        return False


def _measured(steps: Sequence[Step]) -> list[TraceEvent]:
    trace = Trace("measured")
    for number, step in enumerate(steps):
        for device, actions in enumerate(step):
            for text, start, end in actions:
                trace.add(text, device, start, end - start, {"step": number})
    return trace.events()


def _logged(simulation: Simulation, run: RunLog) -> tuple[list[int], list[TraceEvent]]:
    """When the steps of a log begin, one after another, and a bar for each."""
    assert simulation.measured is not None
    begins, at, rows = list[int](), 0, list[TraceEvent]()
    name = {"name": "process_name", "ph": "M", "pid": MEASURED_PROCESS_ID, "args": {"name": "measured"}}
    for number, time in enumerate(simulation.measured.iterations_ns):
        begins.append(at)
        rows.append(
            {
                "name": f"step {number}",
                "cat": "step",
                "ph": "X",
                "ts": at / 1000,
                "dur": time / 1000,
                "pid": MEASURED_PROCESS_ID,
                "tid": 0,
                "args": {"step": number, "tool": run.tool},
            }
        )
        at += round(time)
    return begins, [name, *rows]
