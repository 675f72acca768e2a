"""What a kind of device reaches of its peaks: fitted to published runs, and kept in the catalog of devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from pipeplan.costs.devices import PRESETS, device_preset
from pipeplan.costs.uniform.choices import choices

UNKNOWN = 0.65, 0.55
"""Of a device that has no neighbour with fitted shares."""


@dataclass(frozen=True, slots=True)
class Shares:
    """Of the matrix units' peak, and of the bandwidth of memory and links; ``whose`` they are, and on how many layouts
    and runs they were fitted.
    """

    matrix: float
    bandwidth: float
    whose: str
    layouts: int = 0
    runs: int = 0


@cache
def catalog_shares() -> Mapping[str, Shares]:
    """Those of the catalog, by kind of device."""
    return {
        name: Shares(fitted.matrix, fitted.bandwidth, name, fitted.layouts, fitted.runs)
        for name in PRESETS
        if (fitted := device_preset(name).fitted) is not None
    }


def shares_for(kind: str, known: Mapping[str, Shares]) -> Shares:
    """A kind's own shares, else those of its nearest neighbour that has any."""
    seen: list[str] = []
    while kind not in known:
        seen.append(kind)
        kind = choices().neighbours.get(kind, "")
        if not kind or kind in seen:
            return Shares(*UNKNOWN, "nobody")
    return known[kind]
