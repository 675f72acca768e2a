"""Placement strategies: where the stages of a chain run. Imports nothing, since the help of flags lists them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Positions = list[list[int]]
"""[route][stage] the position that runs it: positions are devices, or groups of devices that are replicas."""


@dataclass(frozen=True, slots=True)
class PlacementStrategy:
    """Where the stages of a chain run.

    ``positions`` gives [stage] the position that runs it, for a number of positions and of chunks (stages per
    position). ``chunked`` strategies take that number. With ``two_ways`` a second route leads the other way round: each
    of its stages stands on the position opposite to that of the first route's. Stages ``in_line`` run one after the
    other whatever their blocks need: searches try that only where it is asked for.
    """

    positions: Callable[[int, int], list[int]]
    chunked: bool = False
    two_ways: bool = False
    in_line: bool = False

    def routes(self, positions: int, chunks: int) -> Positions:
        """Each route's positions."""
        down = self.positions(positions, chunks)
        return [down, [positions - 1 - position for position in down]] if self.two_ways else [down]


def _zigzag(positions: int, chunks: int) -> list[int]:
    down = list(range(positions))
    return [position for chunk in range(chunks) for position in (down if chunk % 2 == 0 else down[::-1])]


def _in_turn(positions: int, chunks: int) -> list[int]:
    return [stage % positions for stage in range(chunks * positions)]


def _one_each(positions: int, chunks: int) -> list[int]:
    return list(range(positions))


STRATEGIES: dict[str, PlacementStrategy] = {
    "one-to-one": PlacementStrategy(_one_each),
    "circular": PlacementStrategy(_in_turn, chunked=True),
    "v-shape": PlacementStrategy(_zigzag, chunked=True),
    "bidirectional": PlacementStrategy(_one_each, two_ways=True),
    "bidirectional-v-shape": PlacementStrategy(_zigzag, chunked=True, two_ways=True),
    "sequential": PlacementStrategy(_one_each, in_line=True),
}
"""Every strategy by the name ``--placement`` takes."""

SEARCHED: tuple[str, ...] = tuple(name for name, strategy in STRATEGIES.items() if not strategy.in_line)
"""Those that searches try without being asked."""
