"""A second opinion on plans: runs the programs of a plan's JSON event by event, with nothing of pipeplan's.

It knows the meaning of a plan (docs/files.md, docs/check.md) and no rule of the checker: every action needs its samples
on its devices, messages between two devices arrive in the order in which they were sent, and every SEND may wait for
its RECV. What then happens is compared with what the plan says: starts, makespan, memory, rates, the repetend's period.
"""

from __future__ import annotations

import copy
import math
import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Json", "faults_of", "restated"]

Json = Any
Action = tuple[str, int]
"""Operation, and number of its action in the order of samples."""
Message = tuple[int, int, int]
"""Dependency, hop, and number of the message."""
Entry = tuple[str, Any]
"""("run", an action), ("send", a message) or ("receive", a message)."""

_TEXT = re.compile(
    r"(?P<stage>\d+)(?:(?P<end>SEND|RECV)_)?(?P<kind>[A-Z]+)(?P<m>\d+)(?:\.(?P<part>[01]))?"
    r"(?:>(?P<peer>\d+))?(?:@(?P<device>\d+))?"
)
_PASSES = (["B", "F"], ["F", "I", "W"])
_STATE = ("parameter_bytes", "gradient_bytes", "master_bytes", "optimizer_bytes")
_COPIES = (24, 48)
"""So many more repetitions show a repetend's rate: the steady ones come in cycles, whose lengths mostly divide 24."""


class UnfitError(Exception):
    """The plan cannot be run: what is wrong."""


@dataclass(slots=True)
class Slot:
    """What an action or message works on: micro-batch, part or None, first sample and the one after the last."""

    microbatch: int
    part: int | None
    begin: int
    end: int

    @property
    def samples(self) -> range:
        return range(self.begin, self.end)


class Model:
    """A plan's JSON, read: operations, their actions, hops, their messages."""

    def __init__(self, plan: Json) -> None:
        self.plan = plan
        self.stages = plan["stages"]
        self.operations = {f"{each['stage']}{each['kind']}": each for each in plan["operations"]}
        self.dependencies = plan["dependencies"]
        self.samples = plan["num_microbatches"] * plan["microbatch_size"]
        self.slots = {id_: self._slots(id_) for id_ in self.operations}
        self.hops = [(d, h) for d, each in enumerate(self.dependencies) for h in range(len(each["hops"]))]
        self.messages = {each: self._messages(*each) for each in self.hops}

    def stage_of(self, id_: str) -> Json:
        return self.stages[self.operations[id_]["stage"]]

    def devices(self, id_: str) -> list[int]:
        found: list[int] = self.stage_of(id_)["devices"]
        return found

    def num_parted(self, id_: str) -> int:
        return int(self.stage_of(id_)["num_parted"]) if self.operations[id_]["kind"] == "F" else 0

    def _whole(self, id_: str) -> Iterator[Slot]:
        stage, routes = self.stage_of(id_), self.plan["num_routes"]
        size = stage["microbatch_size"]
        for m in range(self.samples // (size * routes)):
            begin = (m * routes + stage["route"]) * size
            yield Slot(m, None, begin, begin + size)

    def _slots(self, id_: str) -> list[Slot]:
        return list(_parted(self._whole(id_), self.num_parted(id_)))

    def _messages(self, dependency: int, hop: int) -> list[Slot]:
        ends, hop_ = self.dependencies[dependency], self.dependencies[dependency]["hops"][hop]
        parted = min(self.num_parted(ends["source"]), self.num_parted(ends["target"]))
        first, run, every = hop_["first"], hop_["run"], hop_["every"]
        going = (slot for slot in self._whole(ends["source"]) if first <= slot.microbatch % every < first + run)
        return list(_parted(going, parted))

    def share(self, id_: str, device: int, slot: Slot) -> range:
        """The samples of an action that one of its devices works on."""
        stage = self.stage_of(id_)
        replica = stage["devices"].index(device) // stage["shards"]
        each = (slot.end - slot.begin) // stage["replicas"]
        return range(slot.begin + replica * each, slot.begin + (replica + 1) * each)

    def duration(self, action: Action) -> int:
        id_, n = action
        part = self.slots[id_][n].part is not None
        return int(self.operations[id_]["part_ns" if part else "duration_ns"])

    def entry(self, device: int, text: str) -> Entry:
        """What a text in a device's program means. Raises UnfitError."""
        read = _TEXT.fullmatch(text)
        if read is None:
            raise UnfitError(f"{text} means nothing")
        part = None if read["part"] is None else int(read["part"])
        what = int(read["m"]), part
        if read["end"] is None:
            id_ = read["stage"] + read["kind"]
            if id_ not in self.operations or device not in self.devices(id_):
                raise UnfitError(f"{text} does not run on device {device}")
            return "run", (id_, _number(self.slots[id_], what, text))
        sends = read["end"] == "SEND"
        fitting = [each for each in self.hops if self._fits(each, device, read, sends)]
        if len(fitting) != 1:
            raise UnfitError(f"{text} on device {device} is {len(fitting)} messages")
        return ("send" if sends else "receive"), (*fitting[0], _number(self.messages[fitting[0]], what, text))

    def _fits(self, each: tuple[int, int], device: int, read: re.Match[str], sends: bool) -> bool:
        ends, hop = self.dependencies[each[0]], self.dependencies[each[0]]["hops"][each[1]]
        kind = self.operations[ends["source"]]["kind"]
        stages = [self.operations[ends[end]]["stage"] for end in ("source", "target")]
        devices = [hop["source_device"], hop["target_device"]]
        if not sends:
            stages.reverse()
            devices.reverse()
        return (
            ("B" if kind == "I" else kind) == read["kind"]
            and (stages[0], devices[0]) == (int(read["stage"]), device)
            and (read["peer"] is None or stages[1] == int(read["peer"]))
            and (read["device"] is None or devices[1] == int(read["device"]))
        )


def meeting(slots: Sequence[Slot], wanted: Slot) -> range:
    """The numbers of those with some of the wanted samples; slots follow each other."""
    first = bisect_right(slots, wanted.begin, key=lambda slot: slot.end)
    return range(first, max(first, bisect_left(slots, wanted.end, key=lambda slot: slot.begin)))


def _parted(whole: Iterator[Slot], parted: int) -> Iterator[Slot]:
    for slot in whole:
        if slot.microbatch >= parted:
            yield slot
            continue
        middle = (slot.begin + slot.end) // 2
        yield Slot(slot.microbatch, 0, slot.begin, middle)
        yield Slot(slot.microbatch, 1, middle, slot.end)


def _number(slots: Sequence[Slot], what: tuple[int, int | None], text: str) -> int:
    found = [n for n, slot in enumerate(slots) if (slot.microbatch, slot.part) == what]
    if not found:
        raise UnfitError(f"{text} is of a micro-batch that does not come there")
    return found[0]


# Loops -------------------------------------------------------------------------------------------------------------


class Unrolled:
    """A plan's programs and starts with every copy of the rounds of its loop; without a loop as they are written."""

    def __init__(self, plan: Json) -> None:
        self.plan, self.loop = plan, plan.get("loop") or {"copies": 1, "microbatches": 1, "rounds": []}
        written = plan["num_microbatches"] - (self.loop["copies"] - 1) * self.loop["microbatches"]
        if written < 1 or self.loop["copies"] < 1:
            raise UnfitError("a loop of more micro-batches than there are")
        self.model = Model({**plan, "num_microbatches": written})
        self.copies = self.loop["copies"]
        expanded = [self._expanded(d, program) for d, program in enumerate(plan["programs"])]
        self.programs = [[text for text, _, _, _ in each] for each in expanded]
        self.shifts: dict[Action, list[tuple[str, int]]] = defaultdict(list)
        """Of a written action how its copies are called, and how many ns later than written they are."""
        for each in expanded:
            for text, later, original, first in each:
                read = _TEXT.fullmatch(original)
                if read is not None and read["end"] is None and (text, later) not in self.shifts[first]:
                    self.shifts[first].append((text, later))

    def _expanded(self, device: int, program: list[str]) -> list[tuple[str, int, str, Action]]:
        """(text, ns later than written, text as written, its action) of every copy of every entry, in order."""
        rounds = [(each["begins"][device], each["ends"][device], each["round_ns"]) for each in self.loop["rounds"]]
        ends = {_key(text): end for begin, end, _ in rounds for text in program[begin:end]}
        found, at, passed = [], 0, 0
        for begin, end, time in [*rounds, (len(program), len(program), 0)]:
            if not at <= begin <= end:
                raise UnfitError(f"rounds of device {device} overlap")
            for number in range(at, begin):
                after = number >= ends.get(_key(program[number]), len(program))
                copy = self.copies - 1 if after else 0
                found.append(self._copied(device, program[number], copy, passed))
            for copy in range(self.copies if end > begin else 0):
                found += [self._copied(device, text, copy, passed + copy * time) for text in program[begin:end]]
            at, passed = end, passed + (self.copies - 1) * time
        return found

    def _copied(self, device: int, text: str, copy: int, later: int) -> tuple[str, int, str, Action]:
        kind, what = self.model.entry(device, text)
        stage = self.model.operations[what[0] if kind == "run" else self.model.dependencies[what[0]]["source"]]["stage"]
        number, rest = divmod(
            self.loop["microbatches"] * self.plan["microbatch_size"],
            self.model.stages[stage]["microbatch_size"] * self.plan["num_routes"],
        )
        if rest and self.copies > 1:
            raise UnfitError(f"stage {stage} has no whole number of micro-batches in a round")
        read = _TEXT.fullmatch(text)
        assert read is not None
        begin, end = read.span("m")
        action = what if kind == "run" else ("", 0)
        return f"{text[:begin]}{int(read['m']) + copy * number}{text[end:]}", later, text, action

    def starts(self) -> dict[str, list[int]]:
        """Of every action, by operation, as the plan states them."""
        whole = Model(self.plan)
        found = {id_: [-1] * len(slots) for id_, slots in whole.slots.items()}
        for (id_, n), copies in self.shifts.items():
            for text, later in copies:
                _, (_, number) = whole.entry(whole.devices(id_)[0], text)
                found[id_][number] = self.plan["starts_ns"][id_][n] + later
        return found

    def written(self, starts: dict[str, list[int]]) -> dict[str, list[int]]:
        """Of starts of every action those that a plan with this loop would state."""
        whole, found = Model(self.plan), {id_: [-1] * len(slots) for id_, slots in self.model.slots.items()}
        for (id_, n), copies in self.shifts.items():
            text, later = copies[0]
            _, (_, number) = whole.entry(whole.devices(id_)[0], text)
            found[id_][n] = starts[id_][number] - later
        return found


def _key(text: str) -> str:
    """What an entry has in common with its copies."""
    read = _TEXT.fullmatch(text)
    if read is None:
        raise UnfitError(f"{text} means nothing")
    begin, end = read.span("m")
    return text[:begin] + text[end:]


# Running, with messages that wait for each other -------------------------------------------------------------------


@dataclass(slots=True)
class Rehearsal:
    """The programs run with everything that takes two sides done together; raises at the first thing that is wrong."""

    model: Model
    programs: list[list[Entry]]
    made: dict[tuple[str, int], set[int]] = field(default_factory=lambda: defaultdict(set))
    brought: dict[tuple[int, int], set[int]] = field(default_factory=lambda: defaultdict(set))

    def run(self) -> None:
        """Run to the end. Raises UnfitError."""
        at = [0] * len(self.programs)
        moved = True
        while moved:
            moved = False
            for device in range(len(self.programs)):
                while (partners := self._ready(device, at)) is not None:
                    self._do(*self.programs[device][at[device]])
                    for partner in partners:
                        at[partner] += 1
                    moved = True
        stuck = [d for d, program in enumerate(self.programs) if at[d] < len(program)]
        if stuck:
            raise UnfitError(f"deadlock: device {stuck[0]} never gets past {self.programs[stuck[0]][at[stuck[0]]]}")

    def _ready(self, device: int, at: list[int]) -> list[int] | None:
        """The devices that take part in what a device is at, if all of them are there."""
        if at[device] == len(self.programs[device]):
            return None
        kind, what = self.programs[device][at[device]]
        if kind == "run":
            group = self.model.devices(what[0])
            there = all(at[d] < len(self.programs[d]) and self.programs[d][at[d]] == (kind, what) for d in group)
            return group if there else None
        if kind == "receive":
            return None
        hop = self.model.dependencies[what[0]]["hops"][what[1]]
        other = hop["target_device"]
        if at[other] == len(self.programs[other]):
            return None
        its_kind, its = self.programs[other][at[other]]
        if its_kind != "receive" or self.model.dependencies[its[0]]["hops"][its[1]]["source_device"] != device:
            return None
        if its != what:
            raise UnfitError(f"device {other} takes message {its} and is sent {what}")
        return [device, other]

    def _do(self, kind: str, what: Any) -> None:
        if kind == "run":
            self._run(what)
            return
        ends, hop = self.model.dependencies[what[0]], self.model.dependencies[what[0]]["hops"][what[1]]
        slot = self.model.messages[what[0], what[1]][what[2]]
        carried = set(self.model.share(ends["source"], hop["source_device"], slot))
        made = self.made[ends["source"], hop["source_device"]]
        if not carried <= made and not _is_custom(self.model, ends):
            raise UnfitError(f"message {what} is sent before it is made")
        self.brought[what[0], hop["target_device"]] |= carried

    def _run(self, action: Action) -> None:
        id_, n = action
        slot, model = self.model.slots[id_][n], self.model
        for device in model.devices(id_):
            share = set(model.share(id_, device, slot))
            self._require_passes(id_, device, share)
            for number, each in enumerate(model.dependencies):
                if each["target"] != id_ or _is_custom(model, each):
                    continue
                if device in model.devices(each["source"]):
                    share_here = share & self._local(each["source"], device)
                    missing = share_here - self.made[each["source"], device]
                    missing |= (share - share_here) - self.brought[number, device]
                else:
                    missing = share - self.brought[number, device]
                if missing:
                    raise UnfitError(f"{action} runs on device {device} without what {each['source']} makes for it")
            self.made[id_, device] |= share

    def _local(self, id_: str, device: int) -> set[int]:
        """All samples that a device works on of an operation."""
        return {sample for slot in self.model.slots[id_] for sample in self.model.share(id_, device, slot)}

    def _require_passes(self, id_: str, device: int, share: set[int]) -> None:
        """Forward before backward, input before weight gradients."""
        stage, kind = self.model.operations[id_]["stage"], self.model.operations[id_]["kind"]
        before = {"B": "F", "I": "F", "W": "I"}.get(kind)
        if before and not share <= self.made[f"{stage}{before}", device]:
            raise UnfitError(f"{id_} runs before {stage}{before} of its samples")


def _is_custom(model: Model, dependency: Json) -> bool:
    return any(len(model.operations[dependency[end]]["kind"]) > 1 for end in ("source", "target"))


# Timing ------------------------------------------------------------------------------------------------------------


class Timing:
    """When everything runs if it starts as soon as it can: orders of actions on devices, of messages on links.

    A message without occupancy waits for no other, and none for it.
    """

    def __init__(self, model: Model, orders: list[list[Action]], links: dict[tuple[int, int], list[Message]]) -> None:
        self.model = model
        self.before: dict[Any, list[Any]] = defaultdict(list)
        for order in orders:
            for one, other in zip(order, order[1:], strict=False):
                self.before[other].append(one)
        for order_ in links.values():
            occupying = [each for each in order_ if model.dependencies[each[0]]["hops"][each[1]]["occupancy_ns"]]
            for one_, other_ in zip(occupying, occupying[1:], strict=False):
                self.before[other_].append(one_)
        self.waits: dict[str, list[int]] = defaultdict(list)
        for number, each in enumerate(model.dependencies):
            self.waits[each["target"]].append(number)
        self.orders, self.links = orders, links
        self.start: dict[Action, int] = {}
        self.through: dict[Message, int] = {}
        self._time()

    def end(self, action: Action) -> int:
        return self.start[action] + self.model.duration(action)

    def _time(self) -> None:
        """In any order in which what is needed comes first. Raises UnfitError."""
        nodes: list[Any] = [node for order in self.orders for node in order]
        nodes += [node for order in self.links.values() for node in order]
        needs = {node: self._needs(node) for node in nodes}
        after: dict[Any, list[Any]] = defaultdict(list)
        missing = {node: len(before) for node, before in needs.items()}
        for node, before in needs.items():
            for each in before:
                after[each].append(node)
        ready = [node for node, count in missing.items() if not count]
        done = 0
        while ready:
            node = ready.pop()
            done += 1
            if len(node) == 2:
                self.start[node] = self._start(node)
            else:
                self.through[node] = self._sent(node)
            for each in after[node]:
                missing[each] -= 1
                if not missing[each]:
                    ready.append(each)
        if done < len(needs):
            raise UnfitError("some actions wait for each other")

    def _needs(self, node: Any) -> list[Any]:
        found = list(self.before[node])
        if len(node) == 3:
            return found + self._makers(node)
        for number, n in self._inputs(node):
            found.append((self.model.dependencies[number]["source"], n))
        return list(dict.fromkeys(found + self._arriving(node)))

    def _makers(self, message: Message) -> list[Action]:
        source = self.model.dependencies[message[0]]["source"]
        slot = self.model.messages[message[:2]][message[2]]
        return [(source, n) for n in meeting(self.model.slots[source], slot)]

    def _inputs(self, action: Action) -> Iterator[tuple[int, int]]:
        """(dependency, action of its source) for all that an action waits for."""
        slot = self.model.slots[action[0]][action[1]]
        for number in self.waits[action[0]]:
            each = self.model.dependencies[number]
            if each.get("needs") is None:
                numbers = meeting(self.model.slots[each["source"]], slot)
            else:
                numbers = range(each["needs"][action[1]])
            for n in numbers:
                yield number, n

    def _arriving(self, action: Action) -> list[Message]:
        slot, found = self.model.slots[action[0]][action[1]], []
        for number in self.waits[action[0]]:
            for h in range(len(self.model.dependencies[number]["hops"])):
                found += [(number, h, n) for n in meeting(self.model.messages[number, h], slot)]
        return found

    def _start(self, action: Action) -> int:
        begin = max((self.end(each) for each in self.before[action]), default=0)
        part = self.model.slots[action[0]][action[1]].part is not None
        for number, n in self._inputs(action):
            each = self.model.dependencies[number]
            both = part and self.model.slots[each["source"]][n].part is not None
            lag = max((_time_of(hop, both) for hop in each["hops"]), default=0)
            begin = max(begin, self.end((each["source"], n)) + lag)
        for message in self._arriving(action):
            hop = self.model.dependencies[message[0]]["hops"][message[1]]
            begin = max(begin, self.through[message] + hop["latency_ns"])
        return begin

    def _sent(self, message: Message) -> int:
        """When the link is free again."""
        hop = self.model.dependencies[message[0]]["hops"][message[1]]
        part = self.model.messages[message[:2]][message[2]].part is not None
        begin = max([self.end(each) for each in self._makers(message)], default=0)
        begin = max([begin, *(self.through[each] for each in self.before[message])])
        occupied: int = -(-hop["occupancy_ns"] // 2) if part else hop["occupancy_ns"]
        return begin + occupied


def _time_of(hop: Json, part: bool) -> int:
    occupied: int = -(-hop["occupancy_ns"] // 2) if part else hop["occupancy_ns"]
    return int(hop["latency_ns"]) + occupied


# The verdict -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Judged:
    """What a plan's programs come to."""

    starts: dict[str, list[int]]
    predicted: Json
    held_at_the_end: list[int]


def faults_of(plan: Json) -> list[str]:
    """What is wrong with what a plan says; nothing where it runs to its end and comes to what it says."""
    try:
        judged = _judge(plan)
    except UnfitError as error:
        return [str(error)]
    stated_starts = Unrolled(plan).starts() if plan.get("loop") else plan["starts_ns"]
    found = [f"starts of {id_}" for id_, starts in judged.starts.items() if stated_starts.get(id_) != starts]
    stated = plan["predicted"]
    for key, value in judged.predicted.items():
        if key == "memory":
            found += [f"memory of device {d}" for d, each in enumerate(value) if stated["memory"][d] != each]
        elif key == "iteration_ns" and not stated[key]:
            continue
        elif not _close(stated[key], value):
            found.append(f"{key} {stated[key]} is {value}")
    if not 1 <= stated["lower_bound_ns"] <= judged.predicted["iteration_ns"]:
        found.append("a bound above the iteration")
    for device, memory in zip(plan["devices"], judged.predicted["memory"], strict=True):
        if device["memory_bytes"] is not None and memory["peak_bytes"] > device["memory_bytes"]:
            found.append(f"{memory['peak_bytes']} bytes on a device of {device['memory_bytes']}")
    if any(judged.held_at_the_end):
        found.append("memory that is never given back")
    return found


def restated(plan: Json) -> Json:
    """The plan with the starts and figures that its programs come to. Raises UnfitError."""
    judged = _judge(plan)
    new = copy.deepcopy(plan)
    new["starts_ns"] = Unrolled(plan).written(judged.starts) if plan.get("loop") else judged.starts
    new["predicted"] |= judged.predicted
    new["predicted"]["lower_bound_ns"] = min(plan["predicted"]["lower_bound_ns"], judged.predicted["iteration_ns"])
    new["predicted"]["gap"] = judged.predicted["iteration_ns"] / new["predicted"]["lower_bound_ns"] - 1
    return new


def _close(one: Json, other: Json) -> bool:
    if isinstance(one, float) or isinstance(other, float):
        return one is not None and other is not None and math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-6)
    return bool(one == other)


def _judge(plan: Json) -> Judged:
    """Run the programs. Raises UnfitError."""
    model = Model(plan)
    _require_whole(model)
    texts = Unrolled(plan).programs if plan.get("loop") else plan["programs"]
    programs = [[model.entry(d, text) for text in program] for d, program in enumerate(texts)]
    _require_once(model, programs)
    Rehearsal(model, programs).run()
    orders = [[what for kind, what in program if kind == "run"] for program in programs]
    links: dict[tuple[int, int], list[Message]] = defaultdict(list)
    for program in programs:
        for kind, what in program:
            if kind == "send":
                hop = model.dependencies[what[0]]["hops"][what[1]]
                links[hop["source_device"], hop["target_device"]].append(what)
    timing = Timing(model, orders, links)
    starts = {id_: [timing.start[id_, n] for n in range(len(slots))] for id_, slots in model.slots.items()}
    memory, left = zip(*(_memory(model, d, order) for d, order in enumerate(orders)), strict=True)
    return Judged(starts, _figures(model, timing) | {"memory": list(memory)}, list(left))


def _require_whole(model: Model) -> None:
    """Every stage with blocks runs forward and backward, every route all blocks once. Raises UnfitError."""
    kinds: dict[int, list[str]] = defaultdict(list)
    for each in model.operations.values():
        kinds[each["stage"]].append(each["kind"])
    blocks: dict[int, list[str]] = defaultdict(list)
    for number, stage in enumerate(model.stages):
        blocks[stage["route"]] += stage["blocks"]
        if stage["blocks"] and sorted(kinds[number]) not in _PASSES:
            raise UnfitError(f"stage {number} runs {kinds[number]}")
        if stage["microbatch_size"] % stage["replicas"]:
            raise UnfitError(f"stage {number} cannot share its samples")
    if len({tuple(sorted(each)) for each in blocks.values()}) != 1 or len(blocks) != model.plan["num_routes"]:
        raise UnfitError("routes have other blocks")
    if any(len(set(each)) < len(each) for each in blocks.values()):
        raise UnfitError("a block runs twice")


def _require_once(model: Model, programs: list[list[Entry]]) -> None:
    """Every action on each of its devices, every message on both ends, and nothing twice. Raises UnfitError."""
    wanted: list[set[Entry]] = [set() for _ in programs]
    for id_, slots in model.slots.items():
        for device in model.devices(id_):
            wanted[device] |= {("run", (id_, n)) for n in range(len(slots))}
    for (d, h), slots in model.messages.items():
        hop = model.dependencies[d]["hops"][h]
        wanted[hop["source_device"]] |= {("send", (d, h, n)) for n in range(len(slots))}
        wanted[hop["target_device"]] |= {("receive", (d, h, n)) for n in range(len(slots))}
    for device, (program, there) in enumerate(zip(programs, wanted, strict=True)):
        if len(program) != len(set(program)) or set(program) != there:
            raise UnfitError(f"device {device} does not run everything once")


def _memory(model: Model, device: int, order: list[Action]) -> tuple[Json, int]:
    """What a device holds at its peak, and of activations at the end."""
    state = dict.fromkeys(_STATE, 0)
    for stage in model.stages:
        for key in _STATE if device in stage["devices"] else ():
            state[key] += stage[key]
    for tied in model.plan["tied"]:
        here = sum(device in devices for devices in tied["devices"])
        for key in _STATE:
            state[key] -= tied[key] * max(0, here - 1)
    held, peak, parts = 0, -1, (0, 0)
    for id_, n in order:
        operation, part = model.operations[id_], model.slots[id_][n].part
        taken = operation["acquire_bytes"]
        held += taken if part is None else taken // 2 if part else -(-taken // 2)
        if held + operation["workspace_bytes"] > peak:
            peak, parts = held + operation["workspace_bytes"], (held, operation["workspace_bytes"])
        held -= operation["release_bytes"]
        if held < 0:
            raise UnfitError(f"device {device} gives back more than it has taken")
    memory = state | {"activation_bytes": parts[0], "workspace_bytes": parts[1]}
    return memory | {"peak_bytes": sum(memory.values())}, held


def _iteration(model: Model, timing: Timing, ends: Sequence[int]) -> int:
    """Until gradients are summed beside compute, devices have stepped and parameters are gathered."""
    grads = [0] * len(model.stages)
    for id_, n in timing.start:
        stage = model.operations[id_]["stage"]
        if model.operations[id_]["kind"] in ("B", "W"):
            grads[stage] = max(grads[stage], timing.end((id_, n)))
    sums: list[tuple[list[int], set[int], int]] = []
    for number, stage in enumerate(model.stages):
        joined = [number]
        for other in [each for each in sums if any(_share_blocks(stage, model.stages[n]) for n in each[0])]:
            sums.remove(other)
            joined += other[0]
        devices = {d for n in joined for d in model.stages[n]["devices"]}
        sums.append((joined, devices, max(model.stages[n]["sync_ns"] for n in joined)))
    sums.sort(key=lambda each: min(each[0]))
    sums += [
        (each["stages"], {d for ds in each["devices"] for d in ds}, each["sync_ns"]) for each in model.plan["tied"]
    ]
    jobs = [(max(grads[n] for n in numbers), devices, ns) for numbers, devices, ns in sums if ns]
    order = model.plan.get("sum_order") or sorted(range(len(jobs)), key=lambda n: jobs[n][0])
    free = _run([jobs[n] for n in order], [0] * len(ends))
    stepped = [max(each) for each in zip(ends, free, strict=True)]
    for stage in model.stages:
        for device in stage["devices"]:
            stepped[device] += stage.get("step_ns", 0)
    gathers = [(max(stepped[d] for d in s["devices"]), set(s["devices"]), s.get("gather_ns", 0)) for s in model.stages]
    last = _run(sorted((each for each in gathers if each[2]), key=lambda each: each[0]), free)
    return max(*stepped, *last)


def _share_blocks(one: Json, other: Json) -> bool:
    return not set(one["blocks"]).isdisjoint(other["blocks"])


def _run(jobs: Sequence[tuple[int, set[int], int]], free: Sequence[int]) -> list[int]:
    """[device] when its network is free after the jobs (ready, devices, ns), in turn."""
    free = list(free)
    for ready, devices, ns in jobs:
        end = max([ready, *(free[d] for d in devices)]) + ns
        for device in devices:
            free[device] = end
    return free


def _figures(model: Model, timing: Timing) -> Json:
    num = len(model.plan["devices"])
    ends = [max((timing.end(each) for each in order), default=0) for order in timing.orders]
    begins = [min((timing.start[each] for each in order), default=0) for order in timing.orders]
    busy = [sum(model.duration(each) for each in order) for order in timing.orders]
    spans = [end - begin for begin, end in zip(begins, ends, strict=True)]
    longest = spans.index(max(spans))
    makespan = max(ends)
    iteration = _iteration(model, timing, ends)
    figures: Json = {
        "makespan_ns": makespan,
        "iteration_ns": iteration,
        "bubble_rate": 1 - sum(busy) / (num * makespan),
        "bubble_rate_span": 1 - busy[longest] / spans[longest],
        "gap": iteration / max(1, model.plan["predicted"]["lower_bound_ns"]) - 1,
        "period_ns": None,
        "bubble_rate_steady": None,
    }
    repetend = model.plan["repetend"]
    if repetend is not None:
        unroll = repetend["unroll"]
        rate = _repetition(model, timing, repetend)
        work = sum(each["duration_ns"] * len(model.devices(id_)) for id_, each in model.operations.items())
        if abs(rate - repetend["repetend_ns"]) > 1e-6 * rate + max(map(model.duration, timing.start)) / _COPIES[0]:
            raise UnfitError(f"the repetend takes {rate} ns, not {repetend['repetend_ns']}")
        figures["period_ns"] = repetend["repetend_ns"] / unroll
        figures["bubble_rate_steady"] = 1 - work * unroll / (num * repetend["repetend_ns"])
    return figures


# The repetend, by running many of them -----------------------------------------------------------------------------


def _repetition(model: Model, timing: Timing, repetend: Json) -> float:
    """Ns from one repetition to the next once there have been many. Raises UnfitError."""
    ends = []
    for copies in _COPIES:
        longer = Model({**model.plan, "num_microbatches": model.plan["num_microbatches"] + copies * repetend["unroll"]})
        orders = [_extended(model, order, repetend, copies) for order in timing.orders]
        links = {link: _extended_link(model, order, repetend, copies) for link, order in timing.links.items()}
        ran = Timing(longer, orders, links)
        ends.append(max(map(ran.end, ran.start)))
    return (ends[1] - ends[0]) / (_COPIES[1] - _COPIES[0])


def _extended(model: Model, order: list[Action], repetend: Json, copies: int) -> list[Action]:
    """A device's order with more copies of its repetend in it."""
    ids = list(dict.fromkeys(id_ for id_, _ in order))
    first, unroll = repetend["first"], repetend["unroll"]
    begin = sum(first[id_] + model.num_parted(id_) for id_ in ids)
    end = begin + unroll * len(ids)
    block = order[begin:end]
    wanted = {(id_, first[id_] + model.num_parted(id_) + k) for id_ in ids for k in range(unroll)}
    if set(block) != wanted or len(block) != len(wanted):
        raise UnfitError("the repetend is not a part of the programs")
    longer = order[:begin]
    for k in range(copies + 1):
        longer += [(id_, n + k * unroll) for id_, n in block]
    return longer + [(id_, n + copies * unroll) for id_, n in order[end:]]


def _extended_link(model: Model, order: list[Message], repetend: Json, copies: int) -> list[Message]:
    """A link's messages with more copies, at the last place where a run of them repeats."""
    hops = list(dict.fromkeys(message[:2] for message in order))
    unroll, size = repetend["unroll"], repetend["unroll"] * len(hops)
    for begin in reversed(range(len(order) - size + 1)):
        block = order[begin : begin + size]
        if all(_runs(model, order, begin, size, hop, repetend) for hop in hops):
            longer = order[:begin]
            for k in range(copies + 1):
                longer += [(d, h, n + k * unroll) for d, h, n in block]
            return longer + [(d, h, n + copies * unroll) for d, h, n in order[begin + size :]]
    raise UnfitError("the repetend's messages do not repeat")


def _runs(model: Model, order: list[Message], begin: int, size: int, hop: tuple[int, int], repetend: Json) -> bool:
    """Whether a run has a hop's next messages, with all earlier ones before it and the later ones after it."""
    here = sorted(message[2] for message in order[begin : begin + size] if message[:2] == hop)
    before = [message[2] for message in order[:begin] if message[:2] == hop]
    if len(here) != repetend["unroll"] or here != list(range(here[0], here[0] + len(here))):
        return False
    ends, first = model.dependencies[hop[0]], repetend["first"]
    microbatch = model.messages[hop][here[0]].microbatch
    return max(before, default=-1) < here[0] and first[ends["target"]] <= microbatch <= first[ends["source"]]
