"""A chain of blocks and what it costs to run a range of them: all that AutoPipe's planner looks at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from pipeplan.costs import StageCost, group_costs
from pipeplan.model import Profile

__all__ = ["Cuts", "Loads", "StageLoads", "line_costs"]

Cuts = tuple[int, ...]
"""The first block of each stage."""


@dataclass(frozen=True, slots=True)
class StageLoads:
    """``forwards`` and ``backwards`` [stage] of a micro-batch, and what one transfer between stages takes, in ns."""

    forwards: tuple[int, ...]
    backwards: tuple[int, ...]
    transfer_ns: int = 0

    @property
    def num_stages(self) -> int:
        """Stages of the chain."""
        return len(self.forwards)

    @property
    def totals(self) -> tuple[int, ...]:
        """[stage] forward and backward."""
        return tuple(map(int.__add__, self.forwards, self.backwards))


@dataclass(frozen=True, slots=True)
class Loads:
    """Running sums of the forward and backward times of blocks in a line, [block + 1], in ns.

    ``transfer_ns`` is the same between all stages, as in the paper: at sub-layer grain what is sent always has the
    same size (III-B).
    """

    forwards: tuple[int, ...]
    backwards: tuple[int, ...]
    transfer_ns: int = 0

    @classmethod
    def of(cls, forwards: Sequence[int], backwards: Sequence[int], transfer_ns: int = 0) -> Loads:
        """Blocks with these times [block]."""
        return cls((0, *accumulate(forwards)), (0, *accumulate(backwards)), transfer_ns)

    @classmethod
    def of_costs(cls, costs: Sequence[StageCost], transfer_ns: int = 0) -> Loads:
        """Blocks with these ``costs`` [block]."""
        return cls.of([cost.forward_ns for cost in costs], [cost.backward_ns for cost in costs], transfer_ns)

    @classmethod
    def of_profile(
        cls, profile: Profile, microbatch_size: int, *, recompute: bool = False, transfer_ns: int = 0
    ) -> Loads:
        """The blocks of a profile in topological order.

        Raises:
            UsageError: the profile has no costs for this micro-batch size.
        """
        return cls.of_costs(line_costs(profile, microbatch_size, recompute=recompute), transfer_ns)

    @property
    def num_blocks(self) -> int:
        """Blocks in the chain."""
        return len(self.forwards) - 1

    @property
    def totals(self) -> tuple[int, ...]:
        """[block + 1] running sums of forward and backward."""
        return tuple(map(int.__add__, self.forwards, self.backwards))

    def stages(self, begins: Cuts) -> StageLoads:
        """What each stage takes when the chain is cut so."""
        bounds = (*begins, self.num_blocks)
        return StageLoads(
            tuple(self.forwards[end] - self.forwards[begin] for begin, end in pairwise(bounds)),
            tuple(self.backwards[end] - self.backwards[begin] for begin, end in pairwise(bounds)),
            self.transfer_ns,
        )


def line_costs(profile: Profile, microbatch_size: int, *, recompute: bool = False) -> list[StageCost]:
    """[block] the costs of a profile's blocks in topological order, each as a stage of its own.

    Raises:
        UsageError: the profile has no costs for this micro-batch size.
    """
    order = profile.topological_order()
    return group_costs(profile, [[block] for block in order], microbatch_size, recompute=recompute)
