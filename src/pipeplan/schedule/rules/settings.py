"""Rules in numbers: what they mean for each stage and each device of a workload."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

from pipeplan.errors import UsageError
from pipeplan.graphs import connected_parts
from pipeplan.partition.graph.in_flight import flows
from pipeplan.schedule.rules.language import Rules, Settings, StageTraversal, TypeTraversal
from pipeplan.schedule.rules.values import Limit, evaluate
from pipeplan.time_limit import checked
from pipeplan.workload.elements import Stage
from pipeplan.workload.kinds import BACKWARD_ROLES, Role
from pipeplan.workload.workload import Workload


@dataclass(frozen=True, slots=True)
class Traversal:
    """A stage traversal with its interval as a number; None without one."""

    rules: StageTraversal
    interval: int | None


@dataclass(frozen=True, slots=True)
class DeviceSettings:
    """How one device chooses. ``limit`` is what it may have in flight over all its own stages; None is no limit.

    ``says_late``: ``weights_late`` is from the rules, and holds beside a function that places weight gradients, too.
    """

    types: TypeTraversal
    forward_unit: int
    backward_unit: int
    forward: Traversal
    backward: Traversal
    limit: int | None
    weights_late: int
    weights_fill: bool
    says_late: bool


@dataclass(frozen=True, slots=True)
class _SubmodulePart:
    """The stages of one submodule and route: ``shared`` run on devices of others that have fewer, ``chain`` do not."""

    chain: list[int]
    shared: list[int]


class Resolved:
    """The settings of every stage and device of a workload.

    Raises:
        UsageError: a number cannot be evaluated or is too small, a pattern or device of the rules meets nothing.
    """

    def __init__(self, workload: Workload, rules: Rules) -> None:
        self._workload, self._rules = workload, rules
        self._check_overrides()

    @cached_property
    def in_flight(self) -> list[int | None]:
        """[stage] micro-batches between forward and backward, at most; None is no limit."""
        return [self._stage_limit(stage) for stage in range(len(self._workload.stages))]

    @cached_property
    def depths(self) -> list[tuple[int, int]]:
        """[stage] sort key from the front of the model to its end: the place in its part, then the number."""
        return [(self._sizes[stage]["s"], stage) for stage in range(len(self._workload.stages))]

    @cached_property
    def every(self) -> list[dict[Role, int]]:
        """[stage] {role: steps from one start to the next, at least}; nothing where they may follow at once."""
        return [self._paces(stage) for stage in range(len(self._workload.stages))]

    @cached_property
    def devices(self) -> list[DeviceSettings]:
        """[device]"""
        return [self._device(device) for device in range(len(self._workload.devices))]

    @cached_property
    def is_shared(self) -> list[bool]:
        """[stage] whether it runs on devices of stages of its submodule that stand on fewer."""
        shared = {stage for part in self._parts.values() for stage in part.shared}
        return [stage in shared for stage in range(len(self._workload.stages))]

    def chains(self) -> Iterator[list[tuple[int, ...]]]:
        """For each submodule and route: its stages' devices, except those of stages that run on fewer devices."""
        for part in self._parts.values():
            yield [self._workload.stages[stage].devices for stage in part.chain]

    def _check_overrides(self) -> None:
        count = len(self._workload.devices)
        for rules in self._rules.devices:
            for device in rules.devices:
                if device not in range(count):
                    raise UsageError(f"device: rules for device {device}, but there are devices 0 to {count - 1} only")
        for index, submodule in enumerate(self._rules.submodules):
            if index not in self._submodule_of:
                known = ", ".join(stage.blocks[0] for stage in self._workload.stages[:5] if stage.blocks)
                raise UsageError(
                    f"submodule: blocks = {submodule.blocks!r} matches no stage that an earlier submodule leaves; "
                    f"stages begin with {known}, ..."
                )

    @cached_property
    def _submodule_of(self) -> list[int | None]:
        """[stage] the first submodule of the rules that its first block belongs to."""
        return [self._find_submodule(stage) for stage in self._workload.stages]

    def _find_submodule(self, stage: Stage) -> int | None:
        patterns = enumerate(self._rules.submodules)
        return next((i for i, rules in patterns if stage.blocks and fnmatchcase(stage.blocks[0], rules.blocks)), None)

    @cached_property
    def _parts(self) -> Mapping[tuple[int | None, int], _SubmodulePart]:
        """{(submodule, route): its stages}"""
        stages = self._workload.stages
        members: dict[tuple[int | None, int], list[int]] = {}
        for number in range(len(stages)):
            members.setdefault((self._submodule_of[number], self._connected[number]), []).append(number)
        parts = {}
        for key, numbers in members.items():
            sizes: dict[int, list[int]] = {device: [] for number in numbers for device in stages[number].devices}
            for number in numbers:
                for device in stages[number].devices:
                    sizes[device].append(len(stages[number].devices))
            least = {device: min(there) for device, there in sizes.items()}
            shared = [n for n in numbers if any(least[device] < len(stages[n].devices) for device in stages[n].devices)]
            parts[key] = _SubmodulePart(sorted({*numbers} - {*shared}), shared)
        return parts

    @cached_property
    def _connected(self) -> list[int]:
        """[stage] a stage that stands for its connected part of the stage graph; routes are never connected."""
        stage_of = [operation.stage for operation in self._workload.operations]
        edges = [(stage_of[source], stage_of[target]) for source, target, _ in self._workload.lags]
        stages = range(len(self._workload.stages))
        leader = {stage: min(part) for part in connected_parts(stages, edges) for stage in part}
        return [leader[stage] for stage in stages]

    def _part(self, stage: int) -> _SubmodulePart:
        return self._parts[self._submodule_of[stage], self._connected[stage]]

    @cached_property
    def _sizes(self) -> list[dict[str, int]]:
        """[stage] the names that numbers may use (:data:`~pipeplan.schedule.rules.values.NAMES`)."""
        stages, found = self._workload.stages, [dict[str, int]() for _ in self._workload.stages]
        for part in self._parts.values():
            there: dict[tuple[int, ...], list[int]] = {}
            for number in part.chain:
                there.setdefault(stages[number].devices, []).append(number)
            groups = {devices: index for index, devices in enumerate(there)}
            chunks = {number: index for own in there.values() for index, number in enumerate(own)}
            for stage in checked((*part.chain, *part.shared), 64):
                group = stages[stage].devices
                found[stage] = {
                    "D": len(groups),
                    "d": groups.get(group, 0),
                    "C": len(there.get(group, (stage,))),
                    "c": chunks.get(stage, 0),
                    "S": len(part.chain),
                    "s": bisect_left(part.chain, stage),
                    "N": self._workload.mini_batch // (stages[stage].microbatch_size * self._workload.num_routes),
                    **self._heights[stage],
                }
        return found

    @cached_property
    def _heights(self) -> list[dict[str, int]]:
        """[stage] H and h, so that 1F1B has H - h micro-batches in flight: as many as devices to the end of the graph.

        Where stages have sizes of their own it is as many as GraphPipe's Table 3.2 says. A stage that stands on more
        devices than others has all H.
        """
        heights: list[dict[str, int]] = [{} for _ in self._workload.stages]
        for part in self._parts.values():
            held = self._held(part.chain)
            for stage in (*part.chain, *part.shared):
                size = self._workload.stages[stage].microbatch_size
                most = -(-max(held.values()) // size)
                own = -(-held[self._workload.stages[stage].devices] // size) if stage in part.chain else most
                heights[stage] = {"H": most, "h": most - own}
        return heights

    def _held(self, chain: Sequence[int]) -> dict[tuple[int, ...], int]:
        """{devices: samples in flight with 1F1B}, by edges between stages that are each the c-th of their devices.

        So edges go from devices to later ones, as numbers of stages say, and come to an end. Stages that are not of the
        chain do not count, but what comes before one comes before what follows it.
        """
        sizes: dict[tuple[int, ...], int] = {}
        places: dict[tuple[int, ...], int] = {}
        place: dict[int, tuple[int, int]] = {}  # {stage: (its c, place of its devices)}
        there: Counter[tuple[int, ...]] = Counter()
        for number in chain:
            stage = self._workload.stages[number]
            sizes.setdefault(stage.devices, stage.microbatch_size)
            place[number] = there[stage.devices], places.setdefault(stage.devices, len(places))
            there[stage.devices] += 1
        followers: list[set[int]] = [set() for _ in self._workload.stages]
        for source, target in sorted(self._workload.stage_edges, reverse=True):
            followers[source] |= {target} if target in place else followers[target]
        edges = {
            (place[source][1], place[target][1])
            for source in chain
            for target in followers[source]
            if place[source][0] == place[target][0] and place[source][1] < place[target][1]
        }
        return dict(zip(sizes, flows(list(sizes.values()), edges, sys.maxsize), strict=True))

    def _settings(self, stage: int, device: int) -> Settings:
        """What holds for a stage on a device: the rules, then the submodule's, then the device's."""
        submodule = self._submodule_of[stage]
        settings: Settings = self._rules
        if submodule is not None:
            settings = settings.under(self._rules.submodules[submodule])
        own = next((rules for rules in self._rules.devices if device in rules.devices), None)
        return settings if own is None else settings.under(own)

    def _paces(self, stage: int) -> dict[Role, int]:
        settings, sizes = self._settings(stage, self._workload.stages[stage].devices[0]), self._sizes[stage]
        rules = {Role.FORWARD: settings.forward, **dict.fromkeys(BACKWARD_ROLES, settings.backward)}
        return {
            role: evaluate("every", each.every, sizes)
            for role, each in rules.items()
            if each is not None and each.every is not None
        }

    def _stage_limit(self, stage: int) -> int | None:
        settings, sizes = self._settings(stage, self._workload.stages[stage].devices[0]), self._sizes[stage]
        stopped = f"{stage}F0"
        if self.is_shared[stage]:
            shared = self._part(stage).shared
            place, count = shared.index(stage), len(shared)
            return _limit("in_flight_shared", settings.in_flight_shared, place, count, sizes, stopped)
        return _limit("in_flight", settings.in_flight, sizes["s"], sizes["S"], sizes, stopped)

    @cached_property
    def _stages_on(self) -> list[list[int]]:
        """[device] the stages that it has, in their order."""
        found: list[list[int]] = [[] for _ in self._workload.devices]
        for number, stage in enumerate(self._workload.stages):
            for device in stage.devices:
                found[device].append(number)
        return found

    def _device(self, device: int) -> DeviceSettings:
        there = self._stages_on[device]
        first = next((number for number in there if not self.is_shared[number]), there[0] if there else 0)
        settings, sizes = self._settings(first, device), self._sizes[first]
        types = settings.types or TypeTraversal()
        return DeviceSettings(
            types,
            evaluate("forward_unit", types.forward_unit, sizes),
            evaluate("backward_unit", types.backward_unit, sizes),
            _traversal("forward", settings.forward, sizes),
            _traversal("backward", settings.backward, sizes),
            _limit("in_flight_device", settings.in_flight_device, sizes["d"], sizes["D"], sizes, f"{first}F0"),
            evaluate("weights_late", settings.weights_late or 0, sizes, least=0),
            bool(settings.weights_fill),
            settings.weights_late is not None,
        )


def _traversal(key: str, rules: StageTraversal | None, sizes: Mapping[str, int]) -> Traversal:
    rules = rules or StageTraversal()
    return Traversal(rules, None if rules.interval is None else evaluate(f"{key}.interval", rules.interval, sizes))


def _limit(key: str, limit: Limit | None, place: int, count: int, sizes: Mapping[str, int], stopped: str) -> int | None:
    """The limit of the stage, or device, at this place of its submodule; ``stopped`` is its first action.

    Raises:
        UsageError: it lets nothing start, or there are not as many numbers as places.
    """
    if limit is None:
        return None
    if isinstance(limit, tuple) and len(limit) != count:
        what = "devices" if key == "in_flight_device" else "stages"
        raise UsageError(f"{key} has {len(limit)} numbers for {count} {what}; write one each, or one")
    name, number = (f"{key}[{place}]", limit[place]) if isinstance(limit, tuple) else (key, limit)
    try:
        return evaluate(name, number, sizes)
    except UsageError as error:
        raise UsageError(f"{error}; {stopped} could never start, nor what waits for it") from None
