"""The classic schedules by name: where each applies, and what makes its orders.

Orders are made by rules of the catalog, from scripts of a device's actions, or by trying many. They have task numbers
as in :mod:`pipeplan.workload.task_graph`. Classic schedules do not look at memory unless they say so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, product

from pipeplan.graphs import connected_parts
from pipeplan.partition.strategies import STRATEGIES
from pipeplan.schedule.list_scheduling import in_flight_limits, list_schedule, policies
from pipeplan.schedule.rules.engine import FullError, schedule_by_rules
from pipeplan.schedule.rules.language import named_rules
from pipeplan.schedule.stage_graph import best_kfkb_orders, greedy_orders, makespan
from pipeplan.search_constants import LEAST_TRIED, MOST_REMEMBERED, SECONDS_PER_RULES, SECONDS_PER_TRIALS, TASKS_TRIED
from pipeplan.time_limit import checked
from pipeplan.workload import task_graph as timing
from pipeplan.workload.memory import fits, peak_memory
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.task_graph import TaskGraph, task_graph
from pipeplan.workload.workload import Workload

Orders = list[list[int]]
Orderer = Callable[[OneMicrobatch, TaskGraph], Orders]
"""Makes the orders of the devices."""


def as_given(make: Callable[[Workload, TaskGraph], timing.Orders]) -> Orderer:
    """Orders that are made for a workload as it is, with micro-batches of any sizes."""

    def orders(problem: OneMicrobatch, graph: TaskGraph) -> Orders:
        if problem.reduction is None or problem.reduction.workload.is_uniform:
            return [list(order) for order in make(problem.workload, graph)]
        workload = problem.reduction.workload
        return problem.reduction.to_reduced(make(workload, task_graph(workload)))

    return orders


def sorted_by(problem: OneMicrobatch, key: Callable[[int, int], tuple[int, ...]]) -> Orders:
    """Every device's actions by key(operation, micro-batch)."""
    count = problem.num_microbatches
    return [
        [x * count + m for x, m in sorted(((x, m) for x in operations for m in range(count)), key=lambda xm: key(*xm))]
        for operations in problem.on_device[: problem.num_devices]
    ]


class Script:
    """A device's actions, written as words: ``F0`` is the next forward of its first chunk, ``F1`` of its second.

    ``B0`` is the whole backward, W right after I where they are apart; ``I0`` its input gradient (or the whole
    backward), ``W0`` the weight gradient of the chunk's oldest micro-batch that still owes one, ``W`` that of the
    oldest of all chunks. A word with nothing left to do is passed over, so that schedules need no ends.
    """

    def __init__(self, problem: OneMicrobatch, device: int) -> None:
        self._count = problem.num_microbatches
        self._chunks = [
            operations
            for stage, operations in zip(problem.workload.stages, problem.stage_operations, strict=True)
            if stage.devices == (device,)
        ]
        self._next = {kind: [0] * len(self._chunks) for kind in "FI"}
        self._owed = [deque[tuple[int, int]]() for _ in self._chunks]  # (when, micro-batch) with an I but no W
        self.order: list[int] = []

    @property
    def num_chunks(self) -> int:
        """Stages of the device."""
        return len(self._chunks)

    def add(self, words: str, times: int = 1) -> Script:
        """Append the words, in order, ``times`` times."""
        each = [(word[0], int(word[1:]) if len(word) > 1 else None) for word in words.split()]
        for _ in checked(range(times)):
            before = len(self.order)
            for kind, chunk in each:
                self._word(kind, chunk)
            if len(self.order) == before:  # nothing is left to do, and will not be
                break
        return self

    def finish(self) -> list[int]:
        """The order, with the weight gradients that are left after it."""
        return self.add("W", self._count * self.num_chunks).order

    def _word(self, kind: str, chunk: int | None) -> None:
        if kind == "W":
            self._weight(chunk)
            return
        assert chunk is not None
        following = self._next["F" if kind == "F" else "I"]
        m = following[chunk]
        if m == self._count:
            return
        following[chunk] = m + 1
        operations = self._chunks[chunk]
        self.order.append(operations[0 if kind == "F" else 1] * self._count + m)
        if kind == "B":
            self.order += [x * self._count + m for x in operations[2:]]
        elif kind == "I" and len(operations) > 2:
            self._owed[chunk].append((len(self.order), m))

    def _weight(self, chunk: int | None) -> None:
        if chunk is None:
            able = (each for each, owed in enumerate(self._owed) if owed)
            chunk = min(able, key=lambda each: self._owed[each][0], default=0)
        if self._owed[chunk]:
            _, m = self._owed[chunk].popleft()
            self.order.append(self._chunks[chunk][2] * self._count + m)


def scripted(write: Callable[[Script, int, OneMicrobatch], object]) -> Orderer:
    """Orders from what ``write(script, device, problem)`` adds to each device's script."""

    def orders(problem: OneMicrobatch, graph: TaskGraph) -> Orders:
        scripts = [Script(problem, device) for device in range(problem.num_devices)]
        for device, script in enumerate(scripts):
            write(script, device, problem)
        return [script.finish() for script in scripts]

    return orders


def by_rules(name: str, *, until_full: bool = False) -> Orderer:
    """The orders by the catalog's rules ``name``; on unit steps they are remembered, as costs do not matter there.

    Where they are not remembered, as there are too many, they are made only ``until_full``: by FullError they end where
    they do not fit.
    """

    def orders(workload: Workload, graph: TaskGraph) -> Orders:
        rules = named_rules(name)
        if rules.time == "true":
            return schedule_by_rules(graph, rules, until_full=until_full)
        key = name, _structure(workload)
        if until_full and key not in _remembered and graph.num_tasks > MOST_REMEMBERED:
            return schedule_by_rules(graph, rules, until_full=True)
        if key not in _remembered:
            _remembered[key] = schedule_by_rules(graph, rules)
            while len(_remembered) > 1 and sum(map(_size, _remembered.values())) > MOST_REMEMBERED:
                del _remembered[next(iter(_remembered))]
        return [list(order) for order in _remembered[key]]

    return as_given(orders)


def by_rules_in_units(name: str) -> Orderer:
    """Units of D micro-batches one after another, each by itself; or all at once, where that is shorter."""

    def orders(problem: OneMicrobatch, graph: TaskGraph) -> Orders:
        sizes = {min(problem.num_devices, problem.num_microbatches), problem.num_microbatches}
        return min((_in_units(problem, name, size) for size in sorted(sizes)), key=lambda found: makespan(graph, found))

    return orders


def _in_units(problem: OneMicrobatch, name: str, size: int) -> Orders:
    """Units of ``size`` micro-batches, the last one cut."""
    count = problem.num_microbatches
    unit = schedule_by_rules(task_graph(problem.workload.with_microbatches(size)), named_rules(name))
    return [
        [
            task // size * count + base + task % size
            for base in range(0, count, size)
            for task in order
            if base + task % size < count
        ]
        for order in unit
    ]


_remembered: dict[Hashable, Orders] = {}
"""{(name, structure): orders}, the oldest first."""


def _size(orders: Orders) -> int:
    return sum(map(len, orders))


def _structure(workload: Workload) -> Hashable:
    """All of a workload that rules on unit steps look at."""
    return (
        workload.mini_batch,
        len(workload.devices),
        workload.num_routes,
        tuple((stage.devices, stage.route, stage.microbatch_size, stage.num_parted) for stage in workload.stages),
        tuple((operation.kind, operation.stage) for operation in workload.operations),
        tuple((source, target) for source, target, _ in workload.edges),
        tuple((transfer.source, transfer.target, transfer.link) for transfer in workload.transfers),
    )


def zero_bubble_v(script: Script, device: int, problem: OneMicrobatch) -> None:
    """ZB-V (Zero Bubble Pipeline Parallelism, ICLR'24, section 6): memory as 1F1B's, no bubble if F = I = W."""
    down, up = problem.num_devices - device, device
    script.add("F0", 2 * down - 1).add("F1 F0", up).add("F1 I1 W1", down)
    script.add("F0 I0 W0 F1 I1 W1", max(problem.num_microbatches, 2 * problem.num_devices - 1) - problem.num_devices)
    script.add("I0 I1", up).add("I0 W0", down).add("W1", problem.num_microbatches)


def dualpipe_v(script: Script, device: int, problem: OneMicrobatch) -> None:
    """DualPipeV (DeepSeek's DualPipe cut in half, 2025), forward and backward that it overlaps one after the other."""
    down, up = problem.num_devices - 1 - device, device + 1
    half = up // 2
    script.add("F0", 2 * down).add("F0 F1", up).add("I1 W F1", down)
    script.add("F0 B1 F1 B0", problem.num_microbatches - 2 * problem.num_devices + up)
    script.add("B1 F1 B0", down)
    script.add("B1 B0", half).add("I1 I0" if up % 2 == 0 else "B1 I0", min(1, up - half)).add("I1 I0", up - half - 1)
    script.add("W I0", down).add("W", up)


def repeated_block(steps: tuple[int, int, int, int]) -> Orderer:
    """A building block repeated every six slots (Pipeline Parallelism with Controllable Memory, NeurIPS'24, section 3).

    From device to device a micro-batch's F of the first chunk moves on by ``steps[0]`` slots, then F of the second,
    I of the second and I of the first by the others; each weight gradient takes the next free slot. The smaller
    the steps, the sooner a micro-batch is through and the less is held: V-Min, V-Half. Orders only; true costs then
    close the slots up. Of the blocks with these steps it is the one that holds least, then the shortest.
    """

    def orders(problem: OneMicrobatch, graph: TaskGraph) -> Orders:
        enough = min(problem.num_microbatches, 2 * problem.num_devices)  # to reach the most that is ever held
        trial = replace(problem, workload=problem.workload.with_microbatches(enough))
        short = task_graph(trial.workload)

        held: dict[int, list[tuple[_Block, Orders]]] = {}
        for block in _blocks(problem.num_devices, steps):
            found = _repeated(trial, block)
            peak = max(device.peak_bytes for device in peak_memory(short, found))
            held.setdefault(peak, []).append((block, found))
        least = held[min(held)]
        best, _ = min(least, key=lambda each: makespan(short, each[1])) if len(least) > 1 else least[0]
        return _repeated(problem, best)

    return orders


_Block = list[tuple[int, ...]]
"""[device] slots of F0, F1, I1, I0, W1, W0 of micro-batch 0; on no device two are alike modulo 6."""


def _repeated(problem: OneMicrobatch, block: _Block) -> Orders:
    stages = problem.stage_operations
    slot_of: dict[int, int] = {}
    for device, (f0, f1, i1, i0, w1, w0) in enumerate(block):
        first, second = stages[device], stages[2 * problem.num_devices - 1 - device]
        slot_of.update(zip((*first, *second), (f0, i0, w0, f1, i1, w1), strict=True))
    return sorted_by(problem, lambda x, m: (slot_of[x] + 6 * m, x))


def _blocks(num_devices: int, steps: tuple[int, int, int, int]) -> Iterator[_Block]:
    """All building blocks with these steps, by the slots that the three turns wait."""
    last = num_devices - 1
    for waits in product(range(6), repeat=3):
        second = last * steps[0] + 1 + waits[0]
        back = second + last * steps[1] + 1 + waits[1]
        home = back + last * steps[2] + 1 + waits[2]
        places = [
            [d * steps[0], second + (last - d) * steps[1], back + d * steps[2], home + (last - d) * steps[3]]
            for d in range(num_devices)
        ]
        if all(len({slot % 6 for slot in taken}) == 4 for taken in places):
            yield [_with_weights(taken) for taken in places]


def _with_weights(taken: list[int]) -> tuple[int, ...]:
    """The slots of F0, F1, I1, I0 and of W1 and W0, each the next free one after its I."""
    for after in taken[2:]:
        used = {slot % 6 for slot in taken}
        taken = [*taken, next(slot for slot in range(after + 1, after + 7) if slot % 6 not in used)]
    return tuple(taken)


def stage_by_stage(problem: OneMicrobatch, graph: TaskGraph) -> Orders:
    """Forwards alone: a device runs all micro-batches of its first stage, then of the next."""
    return sorted_by(problem, lambda x, m: (x, m))


def in_turn(problem: OneMicrobatch, graph: TaskGraph) -> Orders:
    """Forwards alone: all stages of a device for a micro-batch, then for the next."""
    return sorted_by(problem, lambda x, m: (m, x))


def interleaved_forwards(problem: OneMicrobatch, graph: TaskGraph) -> Orders:
    """Forwards alone: as many micro-batches as there are devices through one chunk after another (Megatron-LM)."""
    unit = problem.num_devices
    return sorted_by(problem, lambda x, m: (m // unit, x, m % unit))


def automatic(depth: int | None) -> Orderer:
    """The automatic schedules (section 3): by true costs, the best of the rules' settings within the memory.

    The handcrafted schedules that fit are tried too, so that the automatic ones are never longer; where nothing fits,
    it is the better of those.

    ``depth`` times as many micro-batches' activations as there are devices are kept at most (ZB-1p, ZB-2p), even
    where the devices have more memory; None takes what they have. Forwards run ahead of the next device's by none, one
    or two at least.
    """

    def orders(problem: OneMicrobatch, graph: TaskGraph) -> Orders:
        bounded = problem if depth is None else replace(problem, capacity=_room(problem, depth))
        limits = [None, *(limit for limit in in_flight_limits(bounded) if len(set(limit)) == len(limit))]
        tried = islice(policies(limits[:3]), max(LEAST_TRIED, TASKS_TRIED // graph.num_tasks))
        found = [order for policy in tried if (order := list_schedule(bounded, graph, policy)) is not None]
        written = _handcrafted(problem, graph, depth)
        fitting = [order for order in written if depth is not None or fits(graph, order)]
        return min([*found, *fitting] or written, key=lambda order: makespan(graph, order))

    return orders


def _handcrafted(problem: OneMicrobatch, graph: TaskGraph, depth: int | None) -> list[Orders]:
    """ZB-H2, which needs room for 2 D - 1 micro-batches, and ZB-H1 for D."""
    return [by_rules(name)(problem, graph) for name in (["zb-h1"] if depth == 1 else ["zb-h2", "zb-h1"])]


def _room(problem: OneMicrobatch, depth: int) -> tuple[int | None, ...]:
    """[device] bytes of ``depth`` x D micro-batches, whatever the device has."""
    return tuple(
        sum(problem.acquire[x] for x in operations) * depth * problem.num_devices
        + max(problem.workspace[x] for x in operations)
        for operations in problem.on_device
    )


Condition = Callable[[OneMicrobatch], str | None]
"""None, or why a schedule has no meaning for a placement."""


@dataclass(frozen=True, slots=True)
class Classic:
    """A classic schedule: on which placements it has a meaning, and its orders.

    ``automatic`` ones try many orders and take their time, others a moment: with ``quick_tasks``, for up to that many
    actions. Where a look of more asks for one by name it has those of ``looked``, if there are such. Making its orders
    counts ``seconds_each`` for each action, of at most ``most_counted``, where seconds are deterministic. One that
    ``splits`` runs input and weight gradients apart by its definition, the others whole backwards. ``forwards`` are its
    orders where there are no backwards. ``strategies`` are those whose chains it may be for; none: all. One that
    ``holds_all`` runs all forwards of a device before its backwards. ``fitted`` are the ``trained`` ones, which may end
    by FullError where they do not fit.
    """

    placed: Condition
    trained: Orderer
    automatic: bool = False
    quick_tasks: int | None = None
    seconds_each: float = 0.0
    most_counted: int | None = None
    splits: bool = False
    forwards: Orderer | None = None
    strategies: tuple[str, ...] = ()
    looked: Orderer | None = None
    holds_all: bool = False
    fitted: Orderer | None = None

    def is_quick(self, num_tasks: int) -> bool:
        """Whether it takes only a moment for this many actions."""
        return not self.automatic and (self.quick_tasks is None or num_tasks <= self.quick_tasks)

    def seconds(self, num_tasks: int) -> float:
        """What making its orders counts for this many actions where seconds are deterministic."""
        return self.seconds_each * min(num_tasks, self.most_counted or num_tasks)

    def applies(self, problem: OneMicrobatch) -> str | None:
        """None, or why it has no meaning here: most of them are of training."""
        if self.forwards is None and problem.workload.is_inference:
            return "it needs backwards"
        return self.placed(problem)

    def never_fits(self, problem: OneMicrobatch) -> bool:
        """Whether a device has no room for what it is then known to hold at once, without making any orders."""
        return self.holds_all and any(
            room is not None and problem.num_microbatches * problem.held_between(device) > room
            for device, room in enumerate(problem.capacity[: problem.num_devices])
        )

    def orders_looked_at(self, problem: OneMicrobatch, graph: TaskGraph) -> Orders | None:
        """As :meth:`fitting_orders`, or what takes less to make and is about as short."""
        if self.looked is None or self.is_quick(graph.num_tasks):
            return self.fitting_orders(problem, graph)
        return self.looked(problem, graph)

    def fitting_orders(self, problem: OneMicrobatch, graph: TaskGraph) -> Orders | None:
        """The orders of the devices, where it applies; None where it is known before all are made that none fit."""
        if self.never_fits(problem):
            return None
        if self.fitted is None or problem.reduction is not None or problem.workload.is_inference:
            return self.orders(problem, graph)
        try:
            return self.fitted(problem, graph)
        except FullError:
            return None

    def orders(self, problem: OneMicrobatch, graph: TaskGraph) -> Orders:
        """The orders of the devices, where it applies."""
        make = self.forwards if self.forwards is not None and problem.workload.is_inference else self.trained
        return make(problem, graph)


def always(problem: OneMicrobatch) -> None:
    """Any placement."""


def all_of(*conditions: Condition) -> Condition:
    """Applies where all conditions hold; else the first reason."""
    return lambda problem: next((reason for condition in conditions if (reason := condition(problem))), None)


def chains(problem: OneMicrobatch) -> list[list[int]]:
    """The stages as forwards follow each other, one list per first stage; none where ways part or meet."""
    edges = set(problem.workload.stage_edges)
    following = dict(edges)
    if not len(edges) == len(following) == len(set(following.values())):
        return []
    found = []
    for first in sorted(set(range(len(problem.workload.stages))) - set(following.values())):
        chain = [first]
        while chain[-1] in following:
            chain.append(following[chain[-1]])
        found.append(chain)
    return found


def stands(strategy: str, what: str, allowed: Callable[[int], bool]) -> Condition:
    """Single-device stages where a placement strategy has them, with an ``allowed`` number per device."""

    def applies(problem: OneMicrobatch) -> str | None:
        groups = [stage.devices for stage in problem.workload.stages]
        per_device = len(groups) // problem.num_devices
        expected = [(device,) for device in STRATEGIES[strategy].positions(problem.num_devices, per_device)]
        return None if allowed(per_device) and groups == expected else f"it needs {what} (--placement {strategy})"

    return applies


def one_size(problem: OneMicrobatch) -> str | None:
    """All stages have micro-batches of one size."""
    workload = problem.workload if problem.reduction is None else problem.reduction.workload
    return None if workload.is_uniform else "it needs one micro-batch size for all stages"


def is_chain(problem: OneMicrobatch) -> str | None:
    """Forwards of each stage go on to the stage of the next number, and to no other."""
    count = len(problem.workload.stages)
    if chains(problem) == [list(range(count))]:
        return None
    for stage in range(count - 1):
        after = sorted(target for source, target in set(problem.workload.stage_edges) if source == stage)
        if after != [stage + 1]:
            break
    ways = f"stage{'s' if len(after) > 1 else ''} {' and '.join(map(str, after))}" if after else "none"
    return f"it needs a chain of stages, and forwards of stage {stage} go on to {ways}"


def unparted(problem: OneMicrobatch) -> str | None:
    """Forwards neither branch nor join; if they do, no placement makes a chain of the stages."""
    return None if chains(problem) else is_chain(problem)


one_each = all_of(
    unparted, stands("one-to-one", "a chain with stage d on device d alone", lambda chunks: chunks == 1), is_chain
)
circular = stands("circular", "several stages per device in turn", lambda chunks: chunks > 1)
v_shape = all_of(
    unparted, stands("v-shape", "a chain with two stages per device, down and up", lambda chunks: chunks == 2), is_chain
)
waves = all_of(
    unparted,
    stands("v-shape", "a chain with stages down and up, an even number per device", lambda chunks: chunks % 2 == 0),
    is_chain,
)


def joined(problem: OneMicrobatch) -> str | None:
    """All stages are connected: limits in flight are defined for one graph."""
    parts = connected_parts(range(len(problem.workload.stages)), problem.workload.stage_edges)
    return (
        None if len(parts) == 1 else f"it needs stages that hang together; these are {len(parts)} graphs of their own"
    )


def is_split(problem: OneMicrobatch) -> str | None:
    """Input and weight gradients apart on every stage."""
    if all(len(operations) == 3 for operations in problem.stage_operations):
        return None
    return "it needs input and weight gradients apart (--split-backward)"


def one_stage_each(problem: OneMicrobatch) -> str | None:
    """No device has two stages; micro-batches may have different sizes."""
    workload = problem.workload if problem.reduction is None else problem.reduction.workload
    devices = [device for stage in workload.stages for device in stage.devices]
    if len(set(devices)) == len(devices):
        return None
    return "it needs one stage per device (--placement one-to-one, and no --vp)"


def needs_shared(problem: OneMicrobatch) -> str | None:
    """1F1B+: stages in a line, one on each device, and stages on all devices between them.

    A line may have edges beside those from each stage to the next.
    """
    everywhere = tuple(range(problem.num_devices))
    chain = [stage.devices for stage in problem.workload.stages if stage.devices != everywhere]
    if problem.num_devices == 1 or len(chain) == len(problem.workload.stages):
        shards = problem.num_devices
        return f"it needs a stage on all devices (--shard-shared yes, for shared blocks with costs for {shards} shards)"
    if chain != [(device,) for device in everywhere]:
        return "in addition to the stages on all devices it needs one per device, in order"
    if sorted(problem.workload.stage_depths) != list(range(len(problem.workload.stages))):
        return "it needs stages that follow each other (--placement sequential puts them in line)"
    return None


def needs_two_ways(problem: OneMicrobatch) -> str | None:
    """Chimera: two chains over the same devices in opposite directions."""
    down = [(device,) for device in range(problem.num_devices)]
    ways = [[problem.workload.stages[stage].devices for stage in chain] for chain in chains(problem)]
    if ways != [down, down[::-1]]:
        return "it needs two chains over the same devices both ways (--placement bidirectional)"
    return None if problem.num_devices % 2 == 0 else "it needs an even number of devices"


def enough_for_dualpipe(problem: OneMicrobatch) -> str | None:
    """DualPipeV fills the pipeline both ways before its steady state."""
    if problem.num_microbatches >= 2 * problem.num_devices:
        return None
    return f"it needs at least {2 * problem.num_devices} micro-batches, two per device"


def split(placed: Condition, orders: Orderer, *on: str, tries: float | None = None) -> Classic:
    """A schedule that has no meaning with whole backwards, of chains of these strategies.

    One that ``tries`` many orders is automatic; it counts so many seconds for each action.
    """
    how = all_of(placed, is_split), orders, tries is not None
    return Classic(*how, seconds_each=tries or 0.0, splits=True, strategies=on)


_ONE, _TURNS, _V = "one-to-one", "circular", "v-shape"


CLASSIC: dict[str, Classic] = {
    "gpipe": Classic(always, by_rules("gpipe"), forwards=stage_by_stage, holds_all=True),
    "1f1b": Classic(
        one_stage_each,
        by_rules("1f1b"),
        forwards=in_turn,
        strategies=(_ONE,),
        fitted=by_rules("1f1b", until_full=True),
    ),
    "zb-h1": split(one_stage_each, by_rules("zb-h1"), _ONE),
    "zb-h2": split(one_stage_each, by_rules("zb-h2"), _ONE),
    "zb-1p": split(one_each, automatic(1), _ONE, tries=SECONDS_PER_TRIALS),
    "zb-2p": split(one_each, automatic(2), _ONE, tries=SECONDS_PER_TRIALS),
    "zb-auto": split(one_each, automatic(None), _ONE, tries=SECONDS_PER_TRIALS),
    "interleaved-1f1b": Classic(
        all_of(one_size, circular, joined),
        by_rules("interleaved-1f1b"),
        forwards=interleaved_forwards,
        strategies=(_TURNS,),
    ),
    "interleaved-zb": split(all_of(one_size, circular, joined), by_rules("interleaved-zb"), _TURNS),
    "looped-bfs": Classic(circular, by_rules("looped-bfs"), forwards=stage_by_stage, strategies=(_TURNS,)),
    "zb-v": split(v_shape, scripted(zero_bubble_v), _V),
    "v-half": split(v_shape, repeated_block((2, 1, 2, 1)), _V, tries=SECONDS_PER_RULES),
    "v-min": split(v_shape, repeated_block((1, 1, 1, 1)), _V, tries=SECONDS_PER_RULES),
    "dualpipe-v": Classic(all_of(v_shape, enough_for_dualpipe), scripted(dualpipe_v), splits=True, strategies=(_V,)),
    "hanayo": Classic(waves, by_rules_in_units("hanayo"), strategies=(_V,)),
    "chimera": Classic(all_of(unparted, needs_two_ways), by_rules("chimera"), strategies=("bidirectional",)),
    "kfkb": Classic(one_stage_each, as_given(best_kfkb_orders), strategies=(_ONE,)),
    "greedy": Classic(
        always,
        as_given(greedy_orders),
        quick_tasks=1_500,
        seconds_each=SECONDS_PER_TRIALS,
        most_counted=6_000,
        looked=as_given(partial(greedy_orders, most_starts=0)),
    ),
    "1f1b+": Classic(needs_shared, by_rules("1f1b+"), fitted=by_rules("1f1b+", until_full=True)),
}
"""Every classic schedule by the name ``--scheduler`` takes."""
