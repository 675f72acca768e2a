"""Predicted against measured: actions by kind, devices, and the whole iteration.

An action of several devices begins when the last of them has come to it; what the others wait for it is waiting, not
work. Where replicas run for themselves, that is so for the devices of each replica. Figures of several steps are
medians over the steps; the first step warms up and is left out where there are others.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from pipeplan.errors import UsageError
from pipeplan.files import Plan, sha256_of
from pipeplan.files.run_logs import RunLog
from pipeplan.files.trace import MeasuredTrace, TimedText
from pipeplan.simulator.measured_times import (
    AcrossRanks,
    DeviceTimes,
    KindTimes,
    LoggedComparison,
    LoggedDevice,
    LoggedStage,
    MeasuredComparison,
)
from pipeplan.simulator.simulation import Simulation, simulate
from pipeplan.workload.action import Action
from pipeplan.workload.elements import Stage
from pipeplan.workload.engine import with_links
from pipeplan.workload.kinds import COMPUTE_KINDS, Role, in_order
from pipeplan.workload.task_graph import earliest_starts

_Span = tuple[int, int]


def compared(simulation: Simulation, trace: MeasuredTrace) -> MeasuredComparison:
    """What a simulation predicts against what a run of its plan measured.

    Raises:
        UsageError: the trace is of another plan, or the simulation of another number of micro-batches, or so long that
            it cannot be gone through action by action.
    """
    plan = simulation.plan
    if simulation.workload.num_microbatches != plan.num_microbatches:
        raise UsageError(
            f"--measured: the run had {plan.num_microbatches} micro-batches; leave out --microbatches "
            f"{simulation.workload.num_microbatches}"
        )
    _require_same_plan(plan, trace)
    if plan.loop is not None:  # a trace has every action, too
        plan.require_few_actions(
            "--measured: a trace is compared action by action", "measure a run of fewer --microbatches"
        )
        simulation = simulate(plan.unrolled())
    left_out = 1 if len(trace.steps) > 1 else 0
    steps = [_MeasuredStep(simulation, actions, trace.emulated) for actions in trace.steps[left_out:]]
    iterations = tuple(step.iteration_ns for step in steps)
    return MeasuredComparison(
        emulated=trace.emulated,
        num_left_out=left_out,
        predicted_ns=simulation.rates.makespan_ns,
        iterations_ns=iterations,
        replayed_ns=_replayed(simulation, steps),
        kinds=(*_compute_kinds(simulation, steps), *_message_kinds(simulation, steps)),
        devices=tuple(_device(simulation, steps, device) for device in range(len(plan.devices))),
        stretch=trace.stretch,
    )


def compared_with_log(simulation: Simulation, log: RunLog) -> LoggedComparison:
    """What a simulation predicts against what the log of a run by another tool says; rank ``r`` is device ``r``.

    Raises:
        UsageError: the log is of more devices than the plan has, or says speed in tokens and the plan knows of none.
    """
    count = len(simulation.plan.devices)
    beyond = [rank for rank in log.ranks if rank >= count]
    if beyond:
        raise UsageError(
            f"--measured: the run has a rank {beyond[-1]}, the plan {count} devices; give the plan of the same devices"
        )
    iterations, by = _logged_steps(simulation, log)
    return LoggedComparison(
        tool=log.tool,
        by=by,
        memory=log.memory if log.peak_bytes else "",
        num_left_out=log.left_out,
        predicted_ns=simulation.iteration_ns,
        iterations_ns=iterations,
        kinds=tuple(_logged_kinds(simulation, log)),
        devices=tuple(_logged_device(simulation, log, device) for device in log.ranks if _says_more(log, device)),
        across_ranks=(*_across_ranks(simulation, log), *_after_actions(simulation, log)),
        stages=tuple(_logged_stages(simulation, log)),
    )


def _logged_steps(simulation: Simulation, log: RunLog) -> tuple[tuple[float, ...], str]:
    """Ns of each step, of the rank that says it of most steps, and what they were read from."""
    tokens, samples = simulation.yardstick.tokens_per_sample, simulation.workload.mini_batch
    if log.tokens_per_s and tokens is not None:
        whole = samples * tokens / len(simulation.plan.devices)
        return tuple(1e9 * whole / rate for rate in _longest(log.tokens_per_s)), "tokens per second"
    if log.samples_per_s:
        return tuple(1e9 * samples / rate for rate in _longest(log.samples_per_s)), "samples per second"
    if not any(log.steps_ns.values()):
        raise UsageError(
            "--measured: the log says how many tokens a device works on in a second, and the plan not how many a "
            "sample has; make the plan from a profile with tokens_per_sample"
        )
    return tuple(_longest(log.steps_ns)), "the time of steps"


def _longest(by_rank: Mapping[int, list[float]]) -> list[float]:
    return max(by_rank.values(), key=lambda values: len(values))


def _says_more(log: RunLog, device: int) -> bool:
    return any(device in part for part in (log.forward_ns, log.backward_ns, log.peak_bytes))


def _across_ranks(simulation: Simulation, log: RunLog) -> Iterator[AcrossRanks]:
    if not log.across_ns:
        return
    predicted = [_work_of(simulation, device) for device in range(len(simulation.plan.devices))]
    for role, measured in sorted(log.across_ns.items(), reverse=True):
        own = [each[role == "forward"] for each in predicted]
        yield AcrossRanks(role, (max(own) if measured[0] == measured[1] else min(own), max(own)), measured)


_AFTER = {"sums": "gradients summed", "gather": "parameters gathered", "step": "optimizer's step"}


def _after_actions(simulation: Simulation, log: RunLog) -> Iterator[AcrossRanks]:
    """What follows the last actions, of the rank that takes longest; the step is with what is gathered after it."""
    tail = simulation.rates.tail
    exposed = {"sums": tail.exposed_reduction_ns, "gather": tail.exposed_gather_ns}
    exposed["step"] = tail.exposed_step_ns + tail.exposed_gather_ns
    for name, role in _AFTER.items():
        if (measured := log.after_ns.get(name)) is not None:
            yield AcrossRanks(role, (exposed[name],) * 2, (measured,) * 2)


def _logged_stages(simulation: Simulation, log: RunLog) -> Iterator[LoggedStage]:
    """What an action of each stage takes: of traces by its name, of logs where its devices have no other stage."""
    workload, graph = simulation.workload, simulation.graph
    named: defaultdict[int, list[float]] = defaultdict(list)
    for task in range(graph.num_actions) if log.actions_ns else ():
        named[graph.operation_of[task]] += log.actions_ns.get(graph.label(task), [])
    for item, operation in enumerate(workload.operations):
        if operation.kind not in COMPUTE_KINDS:
            continue
        role = "forward" if operation.role is Role.FORWARD else "backward"
        times = named[item] or _shared_by_actions(simulation, log, item, role)
        if times:
            yield LoggedStage(operation.stage, role, workload.durations[item], statistics.median(times))


def _shared_by_actions(simulation: Simulation, log: RunLog, item: int, role: str) -> list[float]:
    """What each device of an operation says of it in a step, over its actions; nothing where it has others, too."""
    workload = simulation.workload
    devices = workload.resources[item]
    alike = [
        number
        for number, each in enumerate(workload.operations)
        if each.kind in COMPUTE_KINDS
        and (each.role is Role.FORWARD) == (role == "forward")
        and not set(devices).isdisjoint(workload.resources[number])
    ]
    if alike != [item]:
        return []
    said = log.forward_ns if role == "forward" else log.backward_ns
    return [said[device] / len(workload.slots[item]) for device in devices if device in said]


def _work_of(simulation: Simulation, device: int) -> dict[bool, int]:
    """Ns of a device's forwards in a step (True), and of its backwards."""
    workload = simulation.workload
    parts = {True: 0, False: 0}
    for item, operation in enumerate(workload.operations):
        if device in workload.resources[item] and operation.kind in COMPUTE_KINDS:
            parts[operation.role is Role.FORWARD] += workload.work_of(item)
    return parts


def _logged_device(simulation: Simulation, log: RunLog, device: int) -> LoggedDevice:
    parts = _work_of(simulation, device)
    return LoggedDevice(
        device,
        parts[True],
        parts[False],
        simulation.memory[device].peak_bytes,
        log.forward_ns.get(device),
        log.backward_ns.get(device),
        log.peak_bytes.get(device),
    )


def _logged_kinds(simulation: Simulation, log: RunLog) -> Iterator[KindTimes]:
    """Times by kind of the actions that both the plan and the trace have."""
    graph = simulation.graph
    predicted: defaultdict[str, list[int]] = defaultdict(list)
    measured: defaultdict[str, list[float]] = defaultdict(list)
    for task in range(graph.num_actions):
        text = graph.label(task)
        if text in log.actions_ns:
            kind = graph.workload.operations[graph.operation_of[task]].kind
            predicted[kind].append(graph.durations[task])
            measured[kind] += log.actions_ns[text]
    for kind in in_order(predicted):
        yield _kind(kind, predicted[kind], measured[kind])


def _require_same_plan(plan: Plan, trace: MeasuredTrace) -> None:
    if trace.plan_sha256 != sha256_of(plan):
        raise UsageError(
            f"--measured: the trace is of another plan, {trace.plan!r} with sha256 {trace.plan_sha256[:12]}..., not of "
            f"{plan.name!r} with {sha256_of(plan)[:12]}...; give the plan that ran"
        )
    for number, step in enumerate(trace.steps):
        for device, actions in enumerate(step):
            program = plan.whole_programs[device]
            odd = Counter(program) - Counter(text for text, _, _ in actions)
            odd += Counter(text for text, _, _ in actions) - Counter(program)
            if odd:
                raise UsageError(
                    f"--measured: step {number} of the trace has {sorted(odd)[0]} on device {device} less or more "
                    "often than the plan's program; was the trace edited?"
                )


class _MeasuredStep:
    """One step: when each action's work began and ended on each device."""

    def __init__(self, simulation: Simulation, step: Sequence[Sequence[TimedText]], emulated: bool) -> None:
        self.actions = step
        own = {
            (text, device): (s, e) for device, actions in enumerate(step) for text, s, e in actions if "_" not in text
        }
        self.work: dict[tuple[str, int], _Span] = {}
        self.of_companies: defaultdict[str, list[int]] = defaultdict(list)
        for text, devices in _companies(simulation, emulated):
            spans = [own[text, device] for device in devices]
            begin, end = max(start for start, _ in spans), max(end for _, end in spans)
            self.of_companies[text].append(max(0, end - begin))
            self.work |= {
                (text, device): (min(begin, own[text, device][1]), own[text, device][1]) for device in devices
            }
        self.begin_ns, self.end_ns = min(start for start, _ in own.values()), max(end for _, end in own.values())

    @property
    def iteration_ns(self) -> int:
        """From the first compute action's start to the last one's end."""
        return self.end_ns - self.begin_ns

    def outside_ns(self, device: int) -> int:
        """Before the device's first action, or after its last one."""
        if not self.actions[device]:
            return self.iteration_ns
        first = min(start for _, start, _ in self.actions[device])
        last = max(end for _, _, end in self.actions[device])
        return max(0, first - self.begin_ns) + max(0, self.end_ns - last)

    def busy_ns(self, device: int) -> int:
        """Working."""
        spans = (self.work[text, device] for text, _, _ in self.actions[device] if "_" not in text)
        return sum(end - start for start, end in spans)

    def waiting_ns(self, device: int) -> int:
        """Waiting for messages, and for the other devices of an action."""
        messages = sum(end - start for text, start, end in self.actions[device] if "RECV" in text)
        return messages + sum(
            self.work[text, device][0] - start for text, start, _ in self.actions[device] if "_" not in text
        )

    def sending_ns(self, device: int) -> int:
        """Posting messages, or in blocking runs also waiting until they are taken."""
        return sum(end - start for text, start, end in self.actions[device] if "SEND" in text)


def _companies(simulation: Simulation, emulated: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Action by action, the devices that run it together: those of its stage, or of each of its replicas."""
    graph, stages = simulation.graph, simulation.plan.stages
    for task in range(graph.num_actions):
        text = graph.label(task)
        stage = stages[graph.workload.operations[graph.operation_of[task]].stage]
        for devices in (stage.devices,) if emulated else _replicas(stage):
            yield text, devices


def _replicas(stage: Stage) -> list[tuple[int, ...]]:
    return [stage.devices[first : first + stage.shards] for first in range(0, len(stage.devices), stage.shards)]


def _replayed(simulation: Simulation, steps: Sequence[_MeasuredStep]) -> int:
    """The makespan when every action lasts for the median over the steps, of the replica that took longest."""
    graph = simulation.graph
    durations = list(graph.durations)
    for task in range(graph.num_actions):
        durations[task] = round(statistics.median(max(step.of_companies[graph.label(task)]) for step in steps))
    longer = replace(graph, durations=durations)
    starts = earliest_starts(longer, with_links(longer, simulation.orders))
    return max(starts[task] + durations[task] for task in range(graph.num_actions))


def _compute_kinds(simulation: Simulation, steps: Sequence[_MeasuredStep]) -> Iterator[KindTimes]:
    graph = simulation.graph
    predicted: defaultdict[str, list[int]] = defaultdict(list)
    measured: defaultdict[str, list[int]] = defaultdict(list)
    for task in range(graph.num_actions):
        text = graph.label(task)
        kind = Action.parse(text).kind
        predicted[kind].append(graph.durations[task])
        for step in steps:
            measured[kind] += step.of_companies[text]
    for kind in in_order(predicted):
        yield _kind(kind, predicted[kind], measured[kind])


def _message_kinds(simulation: Simulation, steps: Sequence[_MeasuredStep]) -> Iterator[KindTimes]:
    workload = simulation.workload
    predicted: defaultdict[str, list[int]] = defaultdict(list)
    for dependency in workload.dependencies:
        for hop in dependency.hops:
            slots = workload.messages(dependency, hop)
            for number in range(len(slots)):
                sent = hop if slots.name(number)[1] is None else hop.part
                predicted[dependency.payload].append(sent.duration_ns)
    measured = _measured_messages(steps)
    for payload in sorted(predicted, reverse=True):
        for end in ("SEND", "RECV"):
            yield _kind(f"{end}_{payload}", predicted[payload], measured[f"{end}_{payload}"])


def _measured_messages(steps: Sequence[_MeasuredStep]) -> Mapping[str, list[int]]:
    found: defaultdict[str, list[int]] = defaultdict(list)
    for step in steps:
        for actions in step.actions:
            for text, start, end in actions:
                if "_" in text:
                    found[Action.parse(text).kind].append(end - start)
    return found


def _kind(kind: str, predicted: Sequence[int], measured: Sequence[float]) -> KindTimes:
    return KindTimes(
        kind, len(predicted), statistics.mean(predicted), statistics.mean(measured), statistics.median(measured)
    )


def _device(simulation: Simulation, steps: Sequence[_MeasuredStep], device: int) -> DeviceTimes:
    busy = statistics.median(step.busy_ns(device) for step in steps)
    waiting = statistics.median(step.waiting_ns(device) for step in steps)
    sending = statistics.median(step.sending_ns(device) for step in steps)
    outside = statistics.median(step.outside_ns(device) for step in steps)
    iteration = statistics.median(step.iteration_ns for step in steps)
    other = max(0, iteration - busy - waiting - sending - outside)
    return DeviceTimes(simulation.rates.busy_ns[device], busy, waiting, sending, outside, other)
