"""What is left of a plan where devices that fail together do: which spare ones take over, and how it goes on.

A plan goes on unchanged but for the numbers of its devices: those of a failed node become those of a spare one, place
by place. Nodes are the smallest domains of failure of the cluster.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeplan.errors import UsageError
from pipeplan.files import Cluster, FailureDomain, Plan, Profile
from pipeplan.files.folded import renamed, unfolded
from pipeplan.simulator.simulation import simulate
from pipeplan.workload.elements import Device, DeviceMemory, Loop, Stage
from pipeplan.workload.kinds import MemoryBytes

FEW_DEVICES = 1024
"""Of plans on more it is simulated for the smallest domain alone what they take on other devices."""

SECONDS_PER_DEVICE = 6e-4
"""What that takes, for each device of the cluster, as all are unfolded for it: 2.3 s on 4,096, 8.6 s on 16,384."""


def are_simulated(cluster: Cluster) -> bool:
    """Whether a plan may take longer where spare nodes take over: not where all nodes are as far from each other."""
    return cluster.is_tree or len(cluster.levels) > 2


@dataclass(frozen=True, slots=True)
class DomainFailure:
    """One domain of a kind fails, such as a node of 8 ``devices``; a plan uses at most ``in_use`` of one.

    ``covered``: whichever it is, spare nodes outside of it can take over; else ``missing`` so many devices more would
    have to be. ``failed`` and ``by`` are an example, device by device: of those domains whose nodes are replaced from
    furthest away the first. The plan then takes ``iteration_ns``; None where that was not worked out.
    ``kept``: all that any stage holds is on other devices, too, so that nothing must be read from a checkpoint.
    """

    domain: str
    devices: int
    in_use: int
    covered: bool
    missing: int
    failed: tuple[int, ...]
    by: tuple[int, ...]
    iteration_ns: int | None
    kept: bool

    def figures(self) -> dict[str, object]:
        """An object of ``failures`` in ``search --json``."""
        return {
            "domain": self.domain,
            "devices": self.devices,
            "in_use": self.in_use,
            "covered": self.covered,
            "missing": self.missing,
            "failed": list(self.failed),
            "taken_over_by": list(self.by),
            "iteration_ns": self.iteration_ns,
            "state_kept": self.kept,
        }


def failures(plan: Plan, cluster: Cluster, profile: Profile | None = None) -> tuple[DomainFailure, ...]:
    """What each kind of domain that fails leaves of a plan for some of a cluster's devices, smallest first.

    With the profile it is worked out what the plan takes on the devices that take over.
    """
    stages = [replace(stage, devices=plan.group_of(stage)) for stage in plan.stages]
    nodes = _Nodes(cluster, {device for stage in stages for device in stage.devices})
    few = plan.num_devices <= FEW_DEVICES
    return tuple(
        _failure(plan, stages, nodes, domain, profile if few or not number else None)
        for number, domain in enumerate(cluster.domains)
    )


class _Nodes:
    """The smallest domains of a cluster: what is used of each, and which are spare."""

    def __init__(self, cluster: Cluster, used: set[int]) -> None:
        self.cluster, self.used = cluster, used
        self.size = cluster.domains[0].group_size
        self.in_use = defaultdict[int, list[int]](list)
        for device in sorted(used):
            self.in_use[device // self.size].append(device)
        count = cluster.num_devices // self.size
        self.spare = [node for node in range(count) if node not in self.in_use]
        whole = zip(cluster.names, cluster.speeds, cluster.usable_bytes, strict=True)
        self.kinds = list(zip(*[iter(whole)] * self.size, strict=False))

    def replaced(self, failed: Sequence[int], domain: FailureDomain) -> dict[int, int]:
        """{failed device: spare one}: a used node's by the nearest spare node's that is left, as far as can be."""
        lost = failed[0] // domain.group_size
        left = [node for node in self.spare if node * self.size // domain.group_size != lost]
        found: dict[int, int] = {}
        for node in dict.fromkeys(device // self.size for device in failed):
            able = [other for other in left if self._can(node, other)]
            if able:
                nearest = min(able, key=lambda other: (self.distance(node, other), other))
                left.remove(nearest)
                found |= {device: device + (nearest - node) * self.size for device in self.in_use[node]}
        return found

    def distance(self, node: int, other: int) -> int:
        """Devices of the smallest group of links that has both."""
        level = self.cluster.level_between(node * self.size, other * self.size)
        return 0 if level is None else level.group_size

    def _can(self, node: int, other: int) -> bool:
        """Whether one's devices are as the other's: kind, speed, and at least its memory."""
        if self.kinds[node] == self.kinds[other]:
            return True
        for device in self.in_use[node]:
            *own, needs = self.kinds[node][device % self.size]
            *others, has = self.kinds[other][device % self.size]
            if own != others or (has is not None and (needs is None or has < needs)):
                return False
        return True


def _failure(
    plan: Plan, stages: Sequence[Stage], nodes: _Nodes, domain: FailureDomain, profile: Profile | None
) -> DomainFailure:
    by_domain = defaultdict[int, list[int]](list)
    for device in sorted(nodes.used):
        by_domain[device // domain.group_size].append(device)
    missing, example, furthest = 0, dict[int, int](), -1
    for failed in by_domain.values():
        found = nodes.replaced(failed, domain)
        missing = max(missing, len(failed) - len(found))
        far = max((nodes.distance(a // nodes.size, b // nodes.size) for a, b in found.items()), default=-1)
        if len(found) == len(failed) and far > furthest:
            example, furthest = found, far
    return DomainFailure(
        domain=domain.name,
        devices=domain.group_size,
        in_use=max(map(len, by_domain.values()), default=0),
        covered=not missing,
        missing=missing,
        failed=tuple(example) if not missing else (),
        by=tuple(example.values()) if not missing else (),
        iteration_ns=_goes_on_in(plan, nodes, example, profile) if example and not missing else None,
        kept=all(_elsewhere(stage, stages, domain.group_size) for stage in stages),
    )


def _elsewhere(stage: Stage, stages: Sequence[Stage], size: int) -> bool:
    """Whether, of whatever domain of this size, some devices outside have all that the stage holds."""
    copies: list[set[int]] = []
    for each in stages:
        if each.blocks == stage.blocks:
            width = math.lcm(each.shards * each.sharers, each.expert)
            copies += [
                {device // size for device in each.devices[at : at + width]}
                for at in range(0, len(each.devices), width)
            ]
    return not set.intersection(*copies)


def _goes_on_in(plan: Plan, nodes: _Nodes, moved: dict[int, int], profile: Profile | None) -> int | None:
    """What an iteration takes then."""
    cluster = nodes.cluster
    if not are_simulated(cluster):
        inside = cluster.levels[0].group_size if len(cluster.levels) > 1 else 1
        if nodes.size % inside == 0:  # a node is as far from all others as any
            return plan.predicted.whole_ns
    if profile is None:
        return None
    where = list(range(cluster.num_devices))
    for device, spare in moved.items():
        where[device], where[spare] = spare, device
    try:
        return simulate(renumbered(plan, cluster, where), profile=profile, cluster=cluster).iteration_ns
    except UsageError:  # what its stages take only the search knows
        return None


def renumbered(plan: Plan, cluster: Cluster, where: Sequence[int]) -> Plan:
    """A plan that does on device ``where[d]`` what it did on d, on all of a cluster's devices; its times stay."""
    plan = unfolded(plan)
    count, planned = cluster.num_devices, len(plan.devices)
    source = sorted(range(count), key=lambda device: where[device])  # [new number] the old one
    contention = plan.devices[0].contention

    def device(new: int) -> Device:
        return Device(
            name=cluster.names[new],
            memory_bytes=cluster.memory_bytes[new],
            reserve_bytes=cluster.reserve_bytes[new],
            contention=contention,
        )

    def on(devices: Sequence[int]) -> tuple[int, ...]:
        return tuple(where[each] for each in devices)

    dependencies = (
        replace(
            each,
            hops=tuple(
                replace(hop, source_device=where[hop.source_device], target_device=where[hop.target_device])
                for hop in each.hops
            ),
        )
        for each in plan.dependencies
    )
    memory = (*plan.predicted.memory, *[DeviceMemory.of(MemoryBytes())] * (count - planned))
    return plan.model_copy(
        update={
            "devices": tuple(map(device, range(count))),
            "stages": tuple(replace(stage, devices=on(stage.devices)) for stage in plan.stages),
            "tied": tuple(replace(each, devices=tuple(map(on, each.devices))) for each in plan.tied),
            "dependencies": tuple(dependencies),
            "programs": tuple(
                tuple(renamed(text, where.__getitem__) for text in plan.programs[old]) if old < planned else ()
                for old in source
            ),
            "loop": None if plan.loop is None else _loop(plan.loop, source, planned),
            "predicted": plan.predicted.model_copy(update={"memory": tuple(memory[old] for old in source)}),
        }
    )


def _loop(loop: Loop, source: Sequence[int], planned: int) -> Loop:
    """A loop whose rounds stand where they stood in the programs of the old numbers; others have none."""
    rounds = (
        replace(
            each,
            begins=tuple(each.begins[old] if old < planned else 0 for old in source),
            ends=tuple(each.ends[old] if old < planned else 0 for old in source),
        )
        for each in loop.rounds
    )
    return replace(loop, rounds=tuple(rounds))
