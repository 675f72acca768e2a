"""Placement strategies: which device runs which stage of a chain, and where the chain is cut.

A graph that is not a chain is put in a line first: in topological order, keeping the file's order where it can.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pipeplan.costs import stage_costs
from pipeplan.errors import InfeasibleError, UsageError
from pipeplan.model import PlacedStage, Placement, Profile
from pipeplan.partition.balance import balanced_split
from pipeplan.partition.chain import Chain
from pipeplan.partition.level import levelled, roomiest
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

    With one stage per device the cut minimises the longest stage's forward + backward time, then the sum of squares,
    exactly. Where a device runs several stages (``chunks`` of them, 2 by default) it starts from that cut and levels
    the devices' sums: as :mod:`pipeplan.partition.level` says. ``memory_bytes`` [device] holds for one micro-batch in
    flight (:mod:`pipeplan.partition.chain`); None is no limit.

    Raises:
        UsageError: an unknown strategy, devices or chunks that do not apply, or fewer blocks than stages.
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
    chain = Chain.of(costs, devices, memory_bytes or [None] * num_devices)
    begins = _cut(chain, [cost.forward_ns + cost.backward_ns for cost in costs])
    missing = chain.missing(begins)
    if any(missing):
        raise _too_big(chain, begins, order, missing.index(max(missing)))
    return Placement(
        strategy=strategy,
        num_devices=num_devices,
        stages=tuple(
            PlacedStage(blocks=order[begin:end], devices=(device,))
            for (begin, end), device in zip(chain.ranges(begins), devices, strict=True)
        ),
    )


def _stage_devices(strategy: str, num_devices: int, chunks: int | None) -> list[int]:
    if strategy not in STRATEGIES:
        raise UsageError(f"--placement {strategy!r} is not known; choose from auto, {', '.join(STRATEGIES)}, or a file")
    if num_devices < 1:
        raise UsageError(f"{num_devices} devices cannot hold a pipeline; --devices must be at least 1")
    if strategy == "one-to-one" and chunks not in (None, 1):
        raise UsageError(f"--chunks {chunks} does not apply to one-to-one; choose --placement circular or v-shape")
    if chunks is not None and chunks < 1:
        raise UsageError(f"--chunks must be at least 1, not {chunks}")
    return STRATEGIES[strategy](num_devices, 2 if chunks is None else chunks)


def _cut(chain: Chain, times: Sequence[int]) -> tuple[int, ...]:
    """The best cut, or one that comes near to fitting where none is found that fits."""
    crowded = chain.num_stages > len(chain.memory)

    def fits_alone(stage: int, begin: int, end: int) -> bool:
        return chain.fits(chain.devices[stage], [(begin, end)])

    begins = balanced_split(times, chain.num_stages, fits_alone if chain.limited else None)
    if begins is not None and crowded:
        begins = levelled(chain, begins)
    if begins is None or any(chain.missing(begins)):
        begins = roomiest(chain)
        if crowded and not any(chain.missing(begins)):
            begins = levelled(chain, begins)
    return begins


def _too_big(chain: Chain, begins: Sequence[int], order: Sequence[str], device: int) -> InfeasibleError:
    """The error for the device that misses most."""
    stages = [stage for stage, where in enumerate(chain.devices) if where == device]
    held = [
        f"stage {stage} ({order[begin]}{f' .. {order[end - 1]}' if end - begin > 1 else ''})"
        for stage, (begin, end) in enumerate(chain.ranges(begins))
        if stage in stages
    ]
    limit, needed = chain.memory[device] or 0, chain.bytes_of(chain.ranges_on(device, begins))
    return InfeasibleError(
        f"no cut into {chain.num_stages} stages was found that fits; in the one that comes nearest, device {device} "
        f"has {format_bytes(limit)} and needs {format_bytes(needed)} for {', '.join(held)}: "
        f"{format_bytes(needed - limit)} too much, with parameters, gradients, optimizer state, workspace and the "
        "activations of a single micro-batch; raise --memory or --devices, or lower --microbatch-size"
    )
