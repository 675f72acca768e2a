"""What a reader of a frontier must know beside its points: what was taken for granted, and what is done twice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from pipeplan.frontier.configurations.building import CostModel
from pipeplan.frontier.graph import Strategy
from pipeplan.model import Profile
from pipeplan.planner.request import Request
from pipeplan.units import named_devices

__all__ = ["device_notes", "grain_notes", "remedies", "repeated_share", "request_notes", "share_notes", "sharing_notes"]


def request_notes(request: Request) -> Iterator[str]:
    """What is free, equal or left out, because the cluster is missing or its devices differ."""
    if request.cluster is None:
        if request.num_devices > 1:
            yield "links are free: without --cluster nothing that devices exchange takes time"
        return
    kinds = request.cluster.first(request.num_devices).devices
    if len({(kind.name, kind.memory_bytes) for kind in kinds}) > 1:
        names = ", ".join(f"{kind.count} {kind.name}" for kind in kinds)
        yield f"devices differ ({names}): all count as the profile's, with the memory of the smallest"
    unpriced = [kind.name for kind in kinds if kind.price_per_hour is None]
    if 0 < len(unpriced) < len(kinds):
        yield f"no price_per_hour for {', '.join(unpriced)}: points that use them have no price"


def repeated_share(model: CostModel, strategy: Strategy) -> float:
    """The part of a strategy's computing that several devices do alike, 0 to 1: time of devices beyond one copy."""
    spent = repeated = 0.0
    for name, index in strategy.configurations.items():
        way = model.configurations[name][index]
        copies = model.resharding.devices / prod(split.extent for split in way.splits.values())
        spent += way.compute_ns
        repeated += way.compute_ns * (1 - 1 / copies)
    return repeated / spent if spent else 0.0


def sharing_notes(num_devices: int, samples: int, shares: Sequence[float], model: CostModel) -> Iterator[str]:
    """Why devices of a split model do the same, how much of it there is at its points, and what is not taken apart."""
    if samples % num_devices:
        yield f"{named_devices(num_devices)}: {samples} samples cannot be split evenly over them"
    least, most = min(shares, default=0.0), max(shares, default=0.0)
    if most >= 0.01:
        part = f"{least:.0%} to {most:.0%}" if round(most - least, 2) else f"{most:.0%}"
        yield f"{named_devices(num_devices)}: {part} of the computing is done by several devices alike (copies)"
    blocks = [node for node in model.operators.nodes if node.operation.kind == "block"]
    if blocks and not model.options.blocks:
        count = len({node.block for node in model.operators.nodes})
        yield f"{named_devices(num_devices)}: {len(blocks)} of {count} blocks stay one operator, for lack of dimensions"


def device_notes(device: str | None, model: CostModel) -> Iterator[str]:
    """That the device asked for is that of no time: whole blocks have their rows' times, however they are split."""
    if device and all(node.operation.kind == "block" for node in model.operators.nodes):
        yield f"--device {device} changes nothing: all blocks are split whole, with the times of the profile's rows"


def grain_notes(model: CostModel) -> Iterator[str]:
    """That times by operators are not those by blocks: a block's gradients are summed at once there, here in parts."""
    summed = {name for name, ways in model.configurations.items() if any(way.sync_ns for way in ways)}
    blocks = {node.block for node in model.operators.nodes if node.name in summed}
    if len(summed) > len(blocks):
        yield (
            f"times are not to be compared with those by blocks: gradients are summed for each of {len(summed)} "
            f"operators here, for each of {len(blocks)} blocks there, and every sum costs its latency"
        )


def share_notes(profile: Profile, model: CostModel) -> Iterator[str]:
    """That blocks are split by samples at most, because of the profile; there may be one point only then."""
    axes = [{axis for way in ways for axis in way.splits} for ways in model.configurations.values()]
    stuck = sum(each <= {"samples"} for each in axes)
    if stuck and _one_share(profile, model.options.blocks):
        yield f"{stuck} of {len(axes)} blocks can be split by samples only: {_MORE_WAYS}"


def remedies(profile: Profile, *, whole_blocks: bool) -> str:
    """What would make strategies leaner: blocks whose rows know one share only hold all their parameters."""
    if not _one_share(profile, whole_blocks):
        return "raise --memory or --devices, or lower --mini-batch"
    return f"raise --memory or lower --mini-batch; or let blocks be split: {_MORE_WAYS}"


_MORE_WAYS = (
    "the profile has rows for one share only; a new one with --shards 1,2,4 has more ways, and so has --grain operator "
    "here for blocks whose dimensions are known"
)


def _one_share(profile: Profile, whole_blocks: bool) -> bool:
    return whole_blocks and all(row.shards == 1 for block in profile.blocks for row in block.costs)
