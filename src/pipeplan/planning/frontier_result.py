"""What a frontier is: its points, what is proved of them, and what a reader must know beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Literal

from pipeplan.files import Plan, Profile
from pipeplan.planning.request import Request
from pipeplan.sharding.cost_model import CostModel
from pipeplan.sharding.graph import Strategy
from pipeplan.units import format_bytes, format_ns, named_devices

Mode = Literal["all", "min-time", "min-devices", "profile"]
"""All points; all, and choose the quickest; those on fewest devices; or the quickest for each number of devices."""


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """A point: memory of the device that needs most, time of one iteration, and what it is in a few words.

    ``memory_bytes`` is the peak of its plan, ``workspace_bytes`` what of that is workspace.
    ``price_per_hour`` is that of its devices, None where the cluster has no prices. At the knee extra
    memory stops paying off. ``repeated`` is the part of the computing that several devices do alike, None where nobody
    counted; ``configurations`` says of every block how it is split.
    """

    num_devices: int
    memory_bytes: int
    time_ns: int
    what: str
    turning_point: bool = False
    chosen: bool = False
    workspace_bytes: int = 0
    price_per_hour: float | None = None
    repeated: float | None = None
    configurations: dict[str, str] = field(default_factory=dict)

    @property
    def price(self) -> float | None:
        """Of one iteration."""
        return None if self.price_per_hour is None else self.price_per_hour * self.time_ns / 3.6e12


@dataclass(frozen=True, slots=True)
class FrontierResult:
    """A frontier, fewest devices and then least memory first, and how to make the ``plans`` of its points.

    ``exact`` says whether every strategy was covered; where it is not, ``notes`` say what was left out. ``factor`` is
    what was proved: no strategy has less memory and less time than all points by more; None where nothing was. Of the
    memory in that proof ``factor_without`` names what was left out: nothing, or "workspace". The
    ``chosen`` point is the one that is written as a plan, counted from 1. Partitions ``tried``, and
    the fewest that were ``untried`` when it was ``interrupted``, are those of whole plans.
    """

    name: str
    mode: Mode
    of: str
    samples: int
    exact: bool
    seconds: float
    points: tuple[FrontierPoint, ...]
    plans: tuple[Callable[[], Plan], ...]
    notes: tuple[str, ...] = ()
    interrupted: bool = False
    factor: float | None = None
    factor_without: tuple[str, ...] = ()
    chosen: int = 1
    tried: int | None = None
    untried: int | None = None

    def plan(self, number: int | None = None) -> Plan:
        """The plan of a point, counted from 1; by default of the chosen one.

        Raises:
            UsageError: plans cannot say what the point's strategy does.
            InvalidPlanError: it needs more memory than a device has.
        """
        return self.plans[(number or self.chosen) - 1]()

    @property
    def proved(self) -> str:
        """How far the points are proved, in a few words."""
        if self.factor is None:
            return "exact" if self.exact else "found, not proved"
        proved = f"proved within {self.factor - 1:.2%}" if self.factor > 1 else "exact"
        return ", ".join([proved, *(f"{each} apart" for each in self.factor_without)])

    @property
    def written(self) -> str:
        """The chosen point in a few words."""
        point = self.points[self.chosen - 1]
        figures = f"{format_bytes(point.memory_bytes)}, {format_ns(point.time_ns)}, {named_devices(point.num_devices)}"
        marks = ", the knee" * point.turning_point
        return f"point {self.chosen} of {len(self.points)} ({figures}{marks})"

    def figures(self) -> dict[str, object]:
        """The object of ``frontier --json``."""
        return {
            "name": self.name,
            "mode": self.mode,
            "of": self.of,
            "samples": self.samples,
            "exact": self.exact,
            "factor": self.factor,
            "factor_without": list(self.factor_without),
            "seconds": self.seconds,
            "chosen": self.chosen,
            "points": [
                {"number": number} | asdict(point) | {"price": point.price}
                for number, point in enumerate(self.points, start=1)
            ],
            "notes": list(self.notes),
            "interrupted": self.interrupted,
            "tried": self.tried,
            "untried": self.untried,
        }


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
    "the profile has rows for one share only; a new one with --shards 1,2,4 has more ways, and so has --split-level "
    "operator here for blocks whose dimensions are known"
)


def _one_share(profile: Profile, whole_blocks: bool) -> bool:
    return whole_blocks and all(row.shards == 1 for block in profile.blocks for row in block.costs)
