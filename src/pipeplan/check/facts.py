"""A plan's operations by number, so that checking is quick."""

from __future__ import annotations

from dataclasses import dataclass

from pipeplan.model import Plan

__all__ = ["Facts", "Wait"]

Wait = tuple[int, int, int]
"""What an operation waits for: (operation, lag in ns, number of the dependency)."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Operations are numbered as in the plan; lists are [operation].

    ``groups`` are ``devices`` as sets; ``counts`` is how many actions an operation has, ``sizes`` the samples in each.
    """

    plan: Plan
    ids: list[str]
    position: dict[str, int]
    devices: list[tuple[int, ...]]
    groups: list[frozenset[int]]
    durations: list[int]
    counts: list[int]
    sizes: list[int]
    starts: list[tuple[int, ...]]
    waits: list[list[Wait]]

    @classmethod
    def of(cls, plan: Plan) -> Facts:
        """Number the operations of a plan."""
        ids = [operation.id for operation in plan.operations]
        position = {id_: index for index, id_ in enumerate(ids)}
        counts = [plan.num_instances(id_) for id_ in ids]
        groups = [frozenset(stage.devices) for stage in plan.stages]
        return cls(
            plan=plan,
            ids=ids,
            position=position,
            devices=[plan.devices_of(id_) for id_ in ids],
            groups=[groups[operation.stage] for operation in plan.operations],
            durations=[operation.duration_ns for operation in plan.operations],
            counts=counts,
            sizes=[plan.stage_of(id_).microbatch_size for id_ in ids],
            starts=[plan.starts_ns[id_] for id_ in ids],
            waits=_waits(plan, position),
        )

    @property
    def num_actions(self) -> int:
        """Number of compute actions; one of several devices counts once."""
        return sum(self.counts)

    def label(self, operation: int, microbatch: int) -> str:
        """The action's text: ``2F0``."""
        return f"{self.ids[operation]}{microbatch}"

    def end(self, operation: int, microbatch: int) -> int:
        """When an action ends, in ns."""
        return self.starts[operation][microbatch] + self.durations[operation]

    def sharing(self, operation: int, microbatch: int, other: int) -> range:
        """Micro-batches of another operation that hold samples of this action's micro-batch."""
        size, other_size = self.sizes[operation], self.sizes[other]
        return range(microbatch * size // other_size, -(-(microbatch + 1) * size // other_size))

    def busy(self) -> list[int]:
        """Time that each device computes in one iteration [device], in ns."""
        busy = [0] * len(self.plan.devices)
        for devices, duration, count in zip(self.devices, self.durations, self.counts, strict=True):
            for device in devices:
                busy[device] += duration * count
        return busy


def _waits(plan: Plan, position: dict[str, int]) -> list[list[Wait]]:
    """Of dependencies that stand there twice (which is refused) only the slower counts."""
    slowest: dict[tuple[int, int], tuple[int, int]] = {}
    for number, dependency in enumerate(plan.dependencies):
        pair = position[dependency.target], position[dependency.source]
        if pair not in slowest or slowest[pair][0] < dependency.lag_ns:
            slowest[pair] = dependency.lag_ns, number
    waits: list[list[Wait]] = [[] for _ in position]
    for (target, source), (lag, number) in slowest.items():
        waits[target].append((source, lag, number))
    return waits
