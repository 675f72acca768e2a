"""What a frontier is: its points, what is proved of them, and how to make their plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Literal

from pipeplan.model import Plan
from pipeplan.units import format_bytes, format_ns, named_devices

__all__ = ["FrontierPoint", "FrontierResult", "Mode"]

Mode = Literal["all", "min-time", "min-devices", "profile"]
"""All points; all, and choose the quickest; those on fewest devices; or the quickest for each number of devices."""


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """A point: memory of the device that needs most, time of one iteration, and what it is in a few words.

    ``memory_bytes`` is the peak of its plan, ``workspace_bytes`` what of that is workspace.
    ``price_per_hour`` is that of its devices, None where the cluster has no prices. At the turning point more memory
    stops to bring much. ``repeated`` is the part of the computing that several devices do alike, None where nobody
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
    ``chosen`` point is the one that is written as a plan, counted from 1. Partitions ``tried``, and at least so many
    ``untried`` when it was ``interrupted``, are those of whole plans.
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
        marks = ", the turning point" * point.turning_point
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
