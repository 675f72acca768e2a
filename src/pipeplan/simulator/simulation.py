"""Simulating a plan: replaying its programs as they are, for more micro-batches, or with other costs."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from itertools import chain, pairwise, repeat, zip_longest

import numpy as np

from pipeplan.costs.throughput import Throughput, Yardstick
from pipeplan.display import Displayed
from pipeplan.errors import InvalidPlanError, UsageError
from pipeplan.files import Cluster, Plan, Profile
from pipeplan.files.folded import renamed
from pipeplan.simulator.master_stage import master_stage
from pipeplan.simulator.measured_times import LoggedComparison, MeasuredComparison
from pipeplan.simulator.metrics import (
    CriticalStep,
    IdleShares,
    Rates,
    Waited,
    critical_path,
    in_flight,
    puts_off_weight_grads,
    rates,
)
from pipeplan.simulator.recost import with_costs_of
from pipeplan.simulator.waits import Waits, waits_of
from pipeplan.units import format_ns
from pipeplan.workload.action import StateAction, operation_of
from pipeplan.workload.bounds import weak_iteration_bound, work_bound
from pipeplan.workload.columns import IntArray, Lines, distinct
from pipeplan.workload.elements import DeviceMemory, Loop, Repetend
from pipeplan.workload.exchanges import StateTexts, texts_around
from pipeplan.workload.folding import of_devices
from pipeplan.workload.kinds import CACHE, REDUCE_GRAD, RESHARD, UNSHARD, Role, payload_of
from pipeplan.workload.memory import Overflow, overflow, peak_memory
from pipeplan.workload.samples import texts_of
from pipeplan.workload.slices import in_parts, num_sliced, parts_before, repetend_of_loop, whole, with_parts
from pipeplan.workload.steady_state.loop import LoopCut, LoopedOrders, counts_of, longer, looped
from pipeplan.workload.steady_state.rate import CutOrders, require_cut, steady_bubble_rate
from pipeplan.workload.steady_state.repetend import extend, num_copies
from pipeplan.workload.task_graph import Orders, TaskGraph, earliest_starts, task_graph
from pipeplan.workload.workload import Workload

_Name = tuple[str, str]
"""The text before and after the micro-batch in a SEND."""


def orders_of(plan: Plan, graph: TaskGraph) -> list[list[int]]:
    """The orders of each device and link as task numbers of a graph of the plan, maybe with other costs.

    Raises:
        InvalidPlanError: an action is unknown, in the wrong program, there twice, or missing.
    """
    workload, known = graph.workload, dict[tuple[int, ...], dict[str, int]]()
    orders = list[list[int]]()
    for device, program in enumerate(plan.programs):
        here = workload.on_resource[device]  # replicas run the same actions, and mostly have one program
        if device and here == workload.on_resource[device - 1] and program == plan.programs[device - 1]:
            orders.append(orders[-1].copy())
            continue
        if here not in known:
            known[here] = _actions_of(graph, device)
        orders.append(_compute_order(device, program, known[here]))
    if workload.links:
        items = _names(workload)
        sent = {source: _sent_by(graph, plan.programs[source], items[source]) for source in items}
        for link, (source, target) in enumerate(workload.links):
            orders.append(_link_order(graph, link, (source, target), sent[source]))
    return orders


def _compute_order(device: int, program: Sequence[str], number: Mapping[str, int]) -> list[int]:
    found = _looked_up(program, number)
    # a transfer is 1SEND_F0 or 2RECV_F0; but of exchanges of state, nothing else has a dash, or is there twice
    others = len(program) - len(found) - "".join(program).count("_")
    strangers = {text for text in program if "_" not in text and text not in number} if others else ()
    if len(found) != len(number) or not distinct(found) or any(StateAction.read(text) is None for text in strangers):
        computes = [text for text in program if "_" not in text and StateAction.read(text) is None]
        _require_all(device, computes, number)
    order: list[int] = found.tolist()
    return order


def _looked_up(program: Sequence[str], number: Mapping[str, int]) -> IntArray:
    """The numbers of those texts that have one, in their order."""
    found = np.fromiter(map(number.get, program, repeat(-1)), np.int64, len(program))
    return found[found >= 0]


def _actions_of(graph: TaskGraph, device: int) -> dict[str, int]:
    """{what a device's program may say of a compute action: its task}."""
    workload = graph.workload
    number: dict[str, int] = {}
    for item in workload.on_resource[device]:
        before, tasks = workload.operations[item].id, range(graph.offsets[item], graph.offsets[item + 1])
        number.update(zip(map(before.__add__, texts_of(workload.slots[item])), tasks, strict=True))
    return number


def _require_exchanges(plan: Plan, graph: TaskGraph, orders: Orders, starts: Sequence[int]) -> None:
    """State is exchanged where :mod:`pipeplan.workload.exchanges` has it, for it is timed by that. Raises."""
    before, after = texts_around(graph.workload, graph.networks_at(starts))
    own = graph.on_devices(orders)
    for device, order in enumerate(own):
        alike = device and (order, plan.programs[device]) == (own[device - 1], plan.programs[device - 1])
        if alike and (before[device], after[device]) == (before[device - 1], after[device - 1]):
            continue
        found = [text for text in plan.programs[device] if "SEND_" not in text and "RECV_" not in text]
        expected = list[str]()
        for task in order:
            expected += [*before[device].get(task, ()), graph.label(task), *after[device].get(task, ())]
        expected += before[device].get(None, ())
        wrong = next((pair for pair in zip_longest(found, expected) if pair[0] != pair[1]), None)
        if wrong is not None:
            raise InvalidPlanError(
                f"programs[{device}] has {wrong[0] or 'nothing'} where state is exchanged by {wrong[1] or 'nothing'}: "
                "simulate replays exchanges only where pipeplan puts them; pipeplan check says whether the plan is "
                "right as it is"
            )


def _sent_by(graph: TaskGraph, program: Sequence[str], items: Mapping[_Name, int]) -> IntArray:
    """The messages that a device sends over links that may be busy, in the order of the SENDs."""
    return _looked_up(program, _messages_of(graph, items))


def _link_order(graph: TaskGraph, link: int, ends: tuple[int, int], sent: IntArray) -> list[int]:
    """The messages of a link, of those that its source sends, in their order; others are passed over."""
    first, workload = len(graph.workload.operations), graph.workload
    own = [item for item, transfer in enumerate(workload.transfers, first) if transfer.link == link]
    order = sent[np.isin(graph.items[sent], own)]
    count = sum(graph.offsets[item + 1] - graph.offsets[item] for item in own)
    if len(order) != count or not distinct(order):
        raise InvalidPlanError(
            f"programs[{ends[0]}] does not have each SEND to device {ends[1]} once; pipeplan check lists "
            "everything that is wrong with the plan"
        )
    found: list[int] = order.tolist()
    return found


def _messages_of(graph: TaskGraph, items: Mapping[_Name, int]) -> dict[str, int]:
    """{what a device's program may say of a message: its task}, where it may say these names."""
    number: dict[str, int] = {}
    for (before, after), item in items.items():
        tasks = range(*graph.offsets[item : item + 2])
        texts = [f"{before}{text}{after}" for text in texts_of(graph.workload.slots[item])]
        number.update(zip(texts, tasks, strict=True))
    return number


def _begins_of(plan: Plan, loop: Loop, graph: TaskGraph) -> tuple[list[int], list[int]]:
    """[item] in which round of a plan's loop it is, and how many of its actions or messages stand before that."""
    begins, rounds = ([0] * (len(graph.offsets) - 1) for _ in range(2))
    devices = range(len(plan.devices))
    lines = [(device, _actions_of(graph, device)) for device in devices]
    lines += [(device, _messages_of(graph, items)) for device, items in _names(graph.workload).items()]
    for device, number in lines:
        items = [graph.operation_of[number[text]] if text in number else None for text in plan.programs[device]]
        for index, each in enumerate(loop.rounds):
            before = Counter(items[: each.begins[device]])
            for item in items[each.begins[device] : each.ends[device]]:
                if item is not None:
                    begins[item], rounds[item] = before[item], index
    return begins, rounds


def _names(workload: Workload) -> dict[int, dict[_Name, int]]:
    """[device] {what a SEND in its program may say: the transfer it means}, where it can mean only one hop."""
    ids = [operation.id for operation in workload.operations]
    items = {
        (ids[transfer.source], ids[transfer.target], workload.links[transfer.link][0], transfer.hop.target_device): item
        for item, transfer in enumerate(workload.transfers, len(ids))
    }
    meant: dict[int, dict[_Name, list[int | None]]] = {source: {} for source, _ in workload.links}
    for dependency in workload.dependencies:
        for hop in dependency.hops:
            if (here := meant.get(hop.source_device)) is not None:
                item = items.get((dependency.source, dependency.target, hop.source_device, hop.target_device))
                for name in _ways_to_say(dependency.source, dependency.target_stage, hop.target_device):
                    here.setdefault(name, []).append(item)
    return {
        device: {name: item for name, (item, *others) in here.items() if item is not None and not others}
        for device, here in meant.items()
    }


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
        raise InvalidPlanError(f"programs[{device}] {wrong}; pipeplan check lists everything that is wrong")


MAX_ACTIONS = 5_000_000
"""Actions in one simulation; beyond that memory, not time, is the trouble."""


@dataclass(frozen=True, slots=True)
class Simulation(Displayed):
    """One iteration of a plan, replayed: when everything runs, and the figures that follow.

    ``orders`` [device] and ``starts`` [task] are of ``graph``; messages that may have to wait are tasks of it, too.
    ``lower_bound_ns`` and ``period_lower_bound_ns`` are the plan's where it was replayed as it is, otherwise those of
    work and dependencies only.
    ``period_ns`` (per micro-batch) and ``bubble_rate_steady`` come from replaying the repetend without end; None
    without one, or where that does not become periodic. ``copies`` [device] are the positions of the repetend's
    first copy in the orders. ``overflow`` is the device most short of memory, None if all have enough.
    ``as_planned`` says that number of micro-batches and costs are the plan's, ``yardstick`` what a sample is.
    ``exchanges`` are what exchanges state on networks: (action's text, devices, start and duration in ns, bytes).
    ``measured`` sets what a run took beside it, if it was asked for.

    With a ``loop`` its round runs more often than it is there: ``graph``, ``orders``, ``starts``, ``copies`` and
    ``critical_path`` are of what is written, everything else is of all. ``master_stage`` is AutoPipe's, where stages
    are a chain that runs 1F1B, all of it written out.
    """

    plan: Plan
    workload: Workload
    graph: TaskGraph
    orders: list[list[int]]
    starts: list[int]
    rates: Rates
    in_flight: tuple[int, ...]
    memory: tuple[DeviceMemory, ...]
    overflow: Overflow | None
    critical_path: list[CriticalStep]
    lower_bound_ns: int
    period_lower_bound_ns: float
    repetend: Repetend | None
    copies: list[range] | None
    period_ns: float | None
    bubble_rate_steady: float | None
    as_planned: bool
    yardstick: Yardstick
    loop: LoopCut | None = None
    master_stage: int | None = None
    exchanges: tuple[tuple[str, tuple[int, ...], int, int, int], ...] = ()
    measured: MeasuredComparison | LoggedComparison | None = None

    def __repr__(self) -> str:
        count = self.workload.num_microbatches
        return f"<Simulation {self.plan.name!r}: {count} micro-batches, makespan {format_ns(self.rates.makespan_ns)}>"

    @property
    def written_ns(self) -> int:
        """The makespan of what is written."""
        return self.rates.makespan_ns - (0 if self.loop is None else self.loop.skipped_ns)

    def clock(self, written_ns: int) -> int:
        """When something happens that is written at a time, in ns: what is after a loop's round is later."""
        loop, over = self.loop, 0
        if loop is None:
            return written_ns
        for begin, time in loop.moments:
            if written_ns >= begin + time:
                over += time
        return written_ns + (loop.copies - 1) * over

    def start_of(self, task: int) -> int:
        """When a written task starts, in ns."""
        item, loop = self.graph.operation_of[task], self.loop
        return self.starts[task] + (0 if loop is None else loop.later_ns(item, task - self.graph.offsets[item]))

    def label(self, task: int) -> str:
        """A written task as an action's text, with the number it has in the whole run; of alike ones the first's."""
        text = self.workload.label(*self._named(task))
        return renamed(text, self.workload.first_playing) if self.workload.players else text

    def microbatch_text(self, task: int) -> str:
        """The end of that text: its micro-batch, and its part where it has one."""
        item, number = self._named(task)
        return self.workload.slots[item].text(number)

    def _named(self, task: int) -> tuple[int, int]:
        item, loop = self.graph.operation_of[task], self.loop
        number = task - self.graph.offsets[item]
        if loop is not None and loop.is_after(item, number):
            number += loop.skipped_of(item)
        return item, number

    @property
    def throughput(self) -> Throughput:
        """The throughput of the iteration."""
        samples, decode = self.workload.mini_batch, self.plan.decode
        if decode is not None:  # smaller groups take as long as the largest
            samples = decode.tokens_of(self.workload.num_microbatches)
        return self.yardstick.throughput(samples, self.iteration_ns, sum(self.workload.device_speeds))

    @property
    def iteration_ns(self) -> int:
        """The end of everything: gradients summed, parameters stepped and gathered."""
        return self.rates.iteration_ns

    @property
    def token_ns(self) -> float | None:
        """Of a loop of decode steps the ns from a request's token to its next one; None of other plans."""
        decode = self.plan.decode
        return None if decode is None or self.period_ns is None else self.period_ns * decode.groups

    def _decoding(self) -> dict[str, object]:
        """What is said of such a loop, under the keys of ``search --json``."""
        decode = self.plan.decode
        if decode is None:
            return {}
        token_ns = self.token_ns
        return {
            "kv": decode.kv,
            "token_ns": token_ns,
            "tokens_per_s": None if token_ns is None else decode.batch * 1e9 / token_ns,
            "cache_bytes": [memory.parts[CACHE] for memory in self.memory],
            "max_requests": decode.max_requests,
        }

    @property
    def gap(self) -> float:
        """``iteration / lower_bound - 1``."""
        return max(0.0, self.iteration_ns / self.lower_bound_ns - 1) if self.lower_bound_ns else 0.0

    @property
    def idle(self) -> IdleShares:
        """Why devices do not compute all the time."""
        steady = None if self.period_ns is None else self.period_ns * self.workload.num_microbatches
        return IdleShares.of(self.rates, steady, self.workload)

    def exchange_ns(self, device: int) -> int:
        """How long a device's network exchanges state for its actions."""
        return sum(duration for _, devices, _, duration, _ in self.exchanges if device in devices)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the figures must know: that weight gradients which wait are free, where they are."""
        own = [operation for operation in self.workload.operations if operation.role is Role.WEIGHT_GRAD]
        held = any(operation.release_bytes for operation in own)
        if not own or held or not puts_off_weight_grads(self.graph, self.orders):
            return ()
        return ("weight gradients hold nothing in this profile (weight_grad_bytes): W runs later at no cost in memory",)

    def path_times(self) -> tuple[dict[int, int], int]:
        """Time of the critical path in ns: on each device (an action of several counts on its first), in transfers."""
        on_device: dict[int, int] = {}
        graph, transfers = self.graph, 0
        for step in self.critical_path:
            transfers += step.lag_ns
            if step.task < graph.num_actions:
                device = graph.devices_of(step.task)[0]
                on_device[device] = on_device.get(device, 0) + graph.durations[step.task]
            else:
                transfers += graph.durations[step.task]
        return on_device, transfers

    def figures(self) -> dict[str, object]:
        """The object of ``simulate --json``. What only a search knows is null.

        ``devices`` has one entry per device; ``critical_path`` says how its time divides and lists its actions.
        """
        plan, rates, repetend = self.plan, self.rates, self.repetend
        return {
            "status": "optimal" if self.gap == 0 else "feasible",
            "name": plan.name,
            "placement": plan.placement,
            "scheduler": plan.provenance.scheduler,
            **({"choices": dict(plan.provenance.choices)} if plan.provenance.choices else {}),
            "num_devices": plan.num_devices,
            "idle_devices": list(self.workload.idle_devices),
            "num_microbatches": self.workload.num_microbatches,
            "microbatch_size": self.workload.microbatch_size,
            "samples_per_replica": list(self.workload.samples_per_replica),
            **({"sliced_microbatches": sliced} if (sliced := num_sliced(self.workload)) else {}),
            "makespan_ns": rates.makespan_ns,
            "iteration_ns": self.iteration_ns,
            **self.rates.tail.figures(),
            **self.throughput.figures(),
            "lower_bound_ns": self.lower_bound_ns,
            "gap": self.gap,
            "period_ns": self.period_ns,
            "period_lower_bound_ns": self.period_lower_bound_ns,
            "unroll": None if repetend is None else repetend.unroll,
            "span": None if repetend is None else repetend.span,
            "bubble_rate": rates.bubble_rate,
            "bubble_rate_span": rates.bubble_rate_span,
            "bubble_rate_steady": self.bubble_rate_steady,
            "peak_memory_bytes": of_devices(plan.players, [memory.peak_bytes for memory in self.memory]),
            **self._decoding(),
            "fits": self.overflow is None,
            "search_seconds": None,
            "repetend_seconds": None,
            "devices": [_device(self, device, waits) for device, waits in enumerate(waits_of(self))],
            "critical_path": _path(self),
            **({} if (master := self.master_stage) is None else {"master_stage": master}),
            **({} if self.loop is None else {"loop": _loop(self.loop, self.graph.workload.num_microbatches)}),
            **({} if self.measured is None else {"measured": self.measured.figures()}),
        }


def _device(simulation: Simulation, device: int, waits: Waits) -> dict[str, object]:
    rates, reserve = simulation.rates, simulation.workload.devices[device].reserve_bytes
    return {
        "busy_ns": rates.busy_ns[device],
        "idle_ns": rates.idle_ns[device],
        "idle_by_cause_ns": waits.by_cause,
        "span_ns": rates.span_ns[device],
        "in_flight": simulation.in_flight[device],
        "num_actions": _num_actions(simulation, device),
        **({"exchange_ns": simulation.exchange_ns(device)} if simulation.workload.exchanges else {}),
        "memory_limit_bytes": simulation.workload.devices[device].usable_bytes,
        **({"memory_reserve_bytes": reserve} if reserve else {}),
        **{key: size for key, size in asdict(simulation.memory[device]).items() if size or key != CACHE.key},
    }


def _num_actions(simulation: Simulation, device: int) -> int:
    workload = simulation.workload
    return sum(len(workload.slots[item]) for item in workload.on_resource[device])


def _loop(loop: LoopCut, num_written: int) -> dict[str, object]:
    return {
        "copies": loop.copies,
        "microbatches": loop.microbatches,
        "round_ns": loop.round_ns,
        "num_written": num_written,
    }


def _path(simulation: Simulation) -> dict[str, object]:
    on_device, transfers = simulation.path_times()
    first = simulation.workload.first_playing
    return {
        "transfer_ns": transfers,
        "device_ns": {str(first(device)): time for device, time in sorted(on_device.items())},
        "actions": [simulation.label(step.task) for step in simulation.critical_path],
    }


def simulate(
    plan: Plan,
    num_microbatches: int | None = None,
    profile: Profile | None = None,
    cluster: Cluster | None = None,
) -> Simulation:
    """Replay a plan: every device runs its order, and every action starts as soon as it can.

    With ``num_microbatches`` the plan's repetend is repeated; with a profile, times, sizes and messages are
    those it gives for the plan's stages; with a cluster, devices and links are the cluster's.

    Raises:
        UsageError: the plan cannot be replayed for this number of micro-batches, profile or cluster.
        InvalidPlanError: the plan's programs are not orders of its actions, or wait for each other.
    """
    plan, workload = with_costs_of(plan, profile, cluster)
    total = num_microbatches or plan.num_microbatches
    as_planned = workload == plan.workload and total == plan.num_microbatches
    run = _run(plan, workload, total)
    graph, orders, starts, loop = run.graph, run.orders, run.starts, run.loop
    if as_planned and workload.exchanges:
        _require_exchanges(plan, graph, orders, starts)
    workload = workload.with_microbatches(total)
    repetend = plan.repetend
    if repetend is not None and plan.loop is not None and loop is not None:
        repetend = repetend_of_loop(graph.workload, loop)  # with other costs times settle elsewhere
    period, copies = (None, None) if repetend is None else _repetition(graph, orders, repetend, loop)
    lines = Lines.of(orders)
    waited = Waited.of(graph, lines, starts)
    return Simulation(
        plan=plan,
        workload=workload,
        graph=graph,
        orders=orders[: len(workload.devices)],
        starts=starts,
        rates=rates(graph, lines, starts, loop),
        in_flight=in_flight(graph, lines, loop, starts),
        memory=peak_memory(graph, lines, loop, starts),
        overflow=overflow(graph, lines, loop=loop, starts=starts),
        critical_path=critical_path(graph, lines, starts, waited),
        master_stage=None if loop is not None else master_stage(graph, lines, starts, waited),
        lower_bound_ns=plan.predicted.lower_bound_ns if as_planned else weak_iteration_bound(workload),
        period_lower_bound_ns=_period_bound(plan, workload),
        repetend=repetend,
        copies=copies,
        period_ns=None if period is None else float(period),
        bubble_rate_steady=None if period is None else steady_bubble_rate(workload, period),
        as_planned=as_planned,
        yardstick=Yardstick.of_plan(plan)
        if profile is None
        else Yardstick.of(profile, [each.name for each in workload.devices]),
        loop=loop,
        exchanges=_exchanges(graph, starts) if workload.exchanges else (),
    )


def _exchanges(graph: TaskGraph, starts: Sequence[int]) -> tuple[tuple[str, tuple[int, ...], int, int, int], ...]:
    """What exchanges state, as a simulation has it; giving it up takes no time."""
    texts, sizes = StateTexts(graph.workload), dict[tuple[int, str, int], int]()
    for number, stage in enumerate(graph.workload.stages):
        for group, blocks in enumerate(stage.block_groups):
            sizes[number, REDUCE_GRAD, group], sizes[number, UNSHARD, group] = (
                blocks.reduced_bytes,
                blocks.gathered_bytes,
            )
    return tuple(
        (texts[stage, kind, group], devices, start, end - start, sizes[stage, kind, group])
        for devices, network in graph.networks_at(starts)
        for kind, stage, group, start, end, _, _ in network.runs
        if kind != RESHARD
    )


_ANOTHER = ("--microbatches", "--mini-batch", "--global-batch-size", "-o", "--output", "--placement-output")
"""Flags of a search, each with a value, that are not those of one for another number of micro-batches."""


def searched_by(plan: Plan) -> str:
    """The search that made a plan, as a command without its samples and outputs; with what is known, else."""
    made = plan.provenance
    try:
        words = shlex.split(made.command)
    except ValueError:  # a text that somebody wrote
        words = []
    if words[:2] != ["pipeplan", "search"]:
        scheduler = str(made.options.get("scheduler", "auto"))
        ruled = made.options.get("rules") is not None
        asked = "--rules FILE" if ruled else "" if scheduler in ("auto", "rules") else f"--scheduler {scheduler}"
        return f"pipeplan search PROFILE {asked}".rstrip()
    kept = [
        word
        for before, word in pairwise(["", *words])
        if before not in _ANOTHER and word.partition("=")[0] not in _ANOTHER
    ]
    return shlex.join(kept)


LOOPED_ACTIONS = 20_000
"""Actions beyond which a repetend is not written out for more micro-batches, but repeated."""


def _run(plan: Plan, workload: Workload, total: int) -> LoopedOrders:
    """The plan's orders, timed with the costs of a workload, for a number of micro-batches."""
    graph = task_graph(workload.with_microbatches(plan.num_written))
    orders = orders_of(plan, graph)
    if plan.loop is not None:
        return _with_loop(plan, plan.loop, graph, orders, total)
    if total == plan.num_microbatches:
        return LoopedOrders(graph, orders, earliest_starts(graph, orders, _stated(plan, graph)), None)
    again = searched_by(plan)
    found = _repeated(graph, orders, plan.repetend, total, again)
    if found is None:
        _require_size(graph.workload, total)
        graph, orders = _extended(graph, orders, plan.repetend, total, again)
        found = LoopedOrders(graph, orders, earliest_starts(graph, orders), None)
    return found


def _stated(plan: Plan, graph: TaskGraph) -> list[int]:
    """[action] the start that a plan states, which is that of its own costs."""
    return [*chain.from_iterable(plan.starts_ns[operation.id] for operation in graph.workload.operations)]


def _with_loop(plan: Plan, loop: Loop, graph: TaskGraph, orders: list[list[int]], total: int) -> LoopedOrders:
    """The same of a plan with a loop: with its own costs the round is as stated, with others times settle anew.

    Raises:
        UsageError: no number of rounds comes to these micro-batches.
    """
    copies = num_copies(plan.num_written, loop.microbatches, total, searched_by(plan))
    (begins, rounds), counts = _begins_of(plan, loop, graph), counts_of(graph.workload, loop.microbatches)
    if counts is None or {*range(len(loop.rounds))} - {*rounds}:
        raise InvalidPlanError("the plan's loop is of no whole round; pipeplan check lists everything that is wrong")
    if graph.workload == plan.written.workload:
        starts = earliest_starts(graph, orders, _stated(plan, graph))
        firsts = [(own, starts[graph.offsets[item] + begins[item]]) for item, own in enumerate(rounds)]
        moments = tuple(
            (min(start for own, start in firsts if own == number), each.round_ns)
            for number, each in enumerate(loop.rounds)
        )
        cut = LoopCut(loop.microbatches, moments, tuple(begins), counts, tuple(rounds), 1 + copies)
        return LoopedOrders(graph, orders, starts, cut if copies else None)
    found = looped(graph, orders, begins, loop.microbatches, total, rounds=rounds)
    if found is None:
        _require_size(graph.workload, total)
        graph, orders = longer(graph, orders, begins, loop.microbatches, copies, rounds)
        found = LoopedOrders(graph, orders, earliest_starts(graph, orders), None)
    return found


def _repeated(
    graph: TaskGraph, orders: list[list[int]], repetend: Repetend | None, total: int, again: str
) -> LoopedOrders | None:
    """Very many micro-batches by a loop of the repetend; None where there are few, or times do not settle."""
    workload = graph.workload
    if repetend is None or total * len(workload.operations) <= LOOPED_ACTIONS:
        return None
    num_copies(workload.num_microbatches, repetend.unroll, total, again)
    replaced, whole_orders = whole(graph, orders)
    require_cut(replaced.workload, repetend.first)
    cut = CutOrders.of(replaced.workload, whole_orders, repetend.first, repetend.unroll)
    begins = [begin + slots.num_parted for begin, slots in zip(cut.begins, workload.slots, strict=False)]
    parted = bool(num_sliced(workload))
    return looped(graph, graph.on_devices(orders) if parted else orders, begins, repetend.unroll, total)


def _extended(
    graph: TaskGraph, orders: list[list[int]], repetend: Repetend | None, num_microbatches: int, again: str
) -> tuple[TaskGraph, list[list[int]]]:
    """The same for more micro-batches: the repetend is one of whole micro-batches."""
    replaced, whole_orders = whole(graph, orders)
    larger, longer = extend(replaced.workload, whole_orders, repetend, num_microbatches, again)
    if not num_sliced(graph.workload):
        return task_graph(larger), longer
    found = task_graph(with_parts(larger, graph.workload))
    return found, in_parts(longer, found)


def _repetition(
    graph: TaskGraph, orders: list[list[int]], repetend: Repetend, loop: LoopCut | None
) -> tuple[Fraction | None, list[range]]:
    """Ns per micro-batch of the repetend, and on each device the positions of its first copy."""
    replaced, whole_orders = whole(graph, orders)
    if loop is None:
        require_cut(replaced.workload, repetend.first)
    cut = CutOrders.of(replaced.workload, whole_orders, repetend.first, repetend.unroll)
    period = cut.rate if loop is None else Fraction(loop.round_ns, loop.microbatches)
    shifts = [parts_before(graph.workload, device) for device in range(len(graph.workload.devices))]
    return period, [range(c.start + by, c.stop + by) for c, by in zip(cut.ranges, shifts, strict=False)]


def _require_size(workload: Workload, num_microbatches: int) -> None:
    actions = num_microbatches * len(workload.operations)
    if actions > MAX_ACTIONS:
        raise UsageError(
            f"{num_microbatches} micro-batches of {len(workload.operations)} operations are {actions} actions, more "
            f"than the {MAX_ACTIONS} of one simulation; lower --microbatches to "
            f"{MAX_ACTIONS // len(workload.operations)} or less"
        )


def _period_bound(plan: Plan, workload: Workload) -> float:
    """The plan's own bound where costs are the plan's: it holds for any number of micro-batches."""
    own = plan.workload
    if workload.with_microbatches(own.num_microbatches) == own:
        return plan.predicted.period_lower_bound_ns
    return float(work_bound(workload))
