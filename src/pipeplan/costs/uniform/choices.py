"""What all devices share: the catalog's choices of ``uniform/choices.toml``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from pydantic import ConfigDict, TypeAdapter

from pipeplan.catalog import read_table, require_known


@dataclass(frozen=True, slots=True)
class Kernels:
    """Shares of the peak that a fused attention reaches forward and backward, by generation; none where not fused."""

    source: str
    ampere: tuple[float, float] = (1.0, 1.0)
    hopper: tuple[float, float] = (1.0, 1.0)
    blackwell: tuple[float, float] = (1.0, 1.0)

    __pydantic_config__ = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True)
class Choices:
    """Numbers in addition to a device's own figures; each has its reason in the file."""

    tiles: tuple[tuple[int, int, float], ...]
    tiles_source: str
    unaligned: float
    unaligned_source: str
    full_head: int
    full_head_source: str
    grouped: float
    grouped_source: str
    contention: float
    contention_source: str
    ring_step_ns: float
    ring_step_source: str
    softmax_bytes: tuple[int, int]
    softmax_source: str
    sortings: int
    sortings_source: str
    recomputed: float
    recomputed_source: str
    unknown_shares: tuple[float, float]
    unknown_source: str
    attention: Mapping[str, Kernels]
    generations: Mapping[str, tuple[str, ...]]
    links: Mapping[str, int]
    neighbours: Mapping[str, str]
    adapters: Mapping[str, int]
    adapters_source: str
    pcie: Mapping[str, float]
    slots: Mapping[str, int]

    __pydantic_config__ = ConfigDict(extra="forbid")

    def generation(self, family: str) -> str:
        """The generation of a family of devices; Ampere if it is not listed."""
        return next((name for name, families in self.generations.items() if family in families), "ampere")

    def of_family(self, table: Mapping[str, int], family: str, otherwise: int) -> int:
        """What a table by families or generations has for a family."""
        return table.get(family, table.get(self.generation(family), otherwise))

    def attention_shares(self, kernel: str, family: str) -> tuple[float, float]:
        """Shares of the peak, forward and backward."""
        shares: tuple[float, float] = getattr(self.attention[kernel], self.generation(family))
        return shares


@cache
def choices() -> Choices:
    """The shared choices."""
    table = read_table("uniform", "choices")
    require_known(table, Choices, "uniform/choices.toml")
    return TypeAdapter(Choices).validate_python(table)
