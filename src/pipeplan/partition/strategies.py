"""Placement strategies: which device runs which stage of a chain, and where the chain is cut.

A graph that is not a chain is put in a line in topological order first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipeplan.costs import StageCosts, stage_costs
from pipeplan.errors import InfeasibleError, UsageError
from pipeplan.model import PlacedStage, Placement, Profile
from pipeplan.partition.balance import balanced_split
from pipeplan.units import format_bytes

__all__ = ["STRATEGIES", "place"]

STRATEGIES: dict[str, Callable[[int, int], list[int]]] = {
    "one-to-one": lambda num_devices, chunks: list(range(num_devices)),
    "circular": lambda num_devices, chunks: [stage % num_devices for stage in range(chunks * num_devices)],
    "v-shape": lambda num_devices, chunks: [
        device if chunk % 2 == 0 else num_devices - 1 - device
        for chunk in range(chunks)
        for device in range(num_devices)
    ],
}
"""Strategy -> the device of each stage, given devices and chunks (stages per device)."""


def place(
    profile: Profile,
    strategy: str,
    num_devices: int,
    *,
    chunks: int | None = None,
    microbatch_size: int,
    memory_bytes: Sequence[int | None] | None = None,
    recompute: bool = False,
) -> Placement:
    """Cut the profile's chain into balanced stages and put them on devices.

    The cut minimises the longest stage's forward + backward time, then the sum of squares, exactly, under memory
    (:func:`~pipeplan.partition.balance.balanced_split`). Where a device runs several stages, blocks are then moved
    between neighbouring stages as long as that lowers the busiest device's sum, then the squares of the sums.
    Memory counts parameters, gradients, optimizer state, one micro-batch's activations and workspace.

    Raises:
        UsageError: an unknown strategy, chunks that do not apply, or fewer blocks than stages.
        InfeasibleError: some device cannot hold what it must.
    """
    devices = _stage_devices(strategy, num_devices, chunks)
    order = profile.topological_order()
    if len(order) < len(devices):
        raise UsageError(
            f"{strategy} on {num_devices} devices needs {len(devices)} stages, but profile {profile.name!r} has only "
            f"{len(order)} blocks; lower --devices{' or --chunks' if len(devices) > num_devices else ''}"
        )
    costs = [stage_costs(profile, [block], microbatch_size, recompute=recompute) for block in order]
    chain = _Chain(costs, devices, memory_bytes or [None] * num_devices)
    begins = balanced_split([cost.forward_ns + cost.backward_ns for cost in costs], len(devices), chain.fits)
    if begins is None:
        begins = balanced_split([chain.bytes_of(index, index + 1) for index in range(len(order))], len(devices))
        assert begins is not None
        raise chain.too_big(begins)
    if len(devices) > num_devices:
        begins = chain.levelled(begins)
        if chain.excess(begins) > 0:
            raise chain.too_big(begins)
    ends = (*begins[1:], len(order))
    return Placement(
        strategy=strategy,
        num_devices=num_devices,
        stages=tuple(
            PlacedStage(blocks=order[begin:end], devices=(device,))
            for begin, end, device in zip(begins, ends, devices, strict=True)
        ),
    )


def _stage_devices(strategy: str, num_devices: int, chunks: int | None) -> list[int]:
    if strategy not in STRATEGIES:
        raise UsageError(f"--placement {strategy!r} is not known; choose from auto, {', '.join(STRATEGIES)}, or a file")
    if strategy == "one-to-one" and chunks not in (None, 1):
        raise UsageError(f"--chunks {chunks} does not apply to one-to-one; choose --placement circular or v-shape")
    return STRATEGIES[strategy](num_devices, chunks or 2)


@dataclass(frozen=True, slots=True)
class _Chain:
    """Blocks in a line, and what a choice of cuts means for the devices."""

    costs: Sequence[StageCosts]
    devices: Sequence[int]
    memory: Sequence[int | None]

    def bytes_of(self, begin: int, end: int) -> int:
        """What a stage of these blocks takes at the least: one micro-batch in flight."""
        part = self.costs[begin:end]
        held = sum(2 * cost.parameter_bytes + cost.optimizer_bytes + cost.activation_bytes for cost in part)
        return held + max(cost.workspace_bytes for cost in part)

    def fits(self, stage: int, begin: int, end: int) -> bool:
        """Whether the stage alone fits on its device."""
        limit = self.memory[self.devices[stage]]
        return limit is None or self.bytes_of(begin, end) <= limit

    def loads(self, begins: Sequence[int]) -> list[int]:
        """[device] ns of work."""
        loads = [0] * (max(self.devices) + 1)
        for begin, end, device in self._ranges(begins):
            loads[device] += sum(cost.forward_ns + cost.backward_ns for cost in self.costs[begin:end])
        return loads

    def excess(self, begins: Sequence[int]) -> int:
        """Bytes missing on all devices together."""
        return sum(max(0, missing) for missing in self._missing(begins))

    def too_big(self, begins: Sequence[int]) -> InfeasibleError:
        """The error for the device that misses most."""
        missing = self._missing(begins)
        device = max(range(len(missing)), key=missing.__getitem__)
        stages = [stage for stage, where in enumerate(self.devices) if where == device]
        limit = self.memory[device] or 0
        return InfeasibleError(
            f"device {device} (stage {', '.join(map(str, stages))}) has {format_bytes(limit)} and needs at least "
            f"{format_bytes(limit + missing[device])} for parameters, gradients, optimizer state and one micro-batch: "
            f"{format_bytes(max(1, missing[device]))} too much; raise --memory or --devices, or lower --microbatch-size"
        )

    def levelled(self, begins: tuple[int, ...]) -> tuple[int, ...]:
        """Move cuts by one block while that lowers what is missing, the busiest device, or the squares."""
        value = self._value(begins)
        while True:
            neighbours = [
                (*begins[:index], begins[index] + step, *begins[index + 1 :])
                for index in range(1, len(begins))
                for step in (-1, 1)
            ]
            valid = [each for each in neighbours if self._is_cut(each)]
            best = min(valid, key=self._value, default=begins)
            if self._value(best) >= value:
                return begins
            begins, value = best, self._value(best)

    def _value(self, begins: Sequence[int]) -> tuple[int, int, int]:
        loads = self.loads(begins)
        return self.excess(begins), max(loads), sum(load * load for load in loads)

    def _is_cut(self, begins: Sequence[int]) -> bool:
        ends = (*begins[1:], len(self.costs))
        return all(begin < end for begin, end in zip(begins, ends, strict=True))

    def _missing(self, begins: Sequence[int]) -> list[int]:
        taken = [0] * (max(self.devices) + 1)
        for begin, end, device in self._ranges(begins):
            taken[device] += self.bytes_of(begin, end)
        return [size - limit if limit is not None else 0 for size, limit in zip(taken, self.memory, strict=False)]

    def _ranges(self, begins: Sequence[int]) -> list[tuple[int, int, int]]:
        ends = (*begins[1:], len(self.costs))
        return list(zip(begins, ends, self.devices, strict=True))
