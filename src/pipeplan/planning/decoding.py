"""What a decode step takes of the blocks of a server's stage, and what they keep in its cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pipeplan.costs.decoding import cached_bytes, phase_costs
from pipeplan.errors import UsageError
from pipeplan.files import Block, Profile

Objective = Literal["cache", "time"]
"""The most tokens in the cache, or the quickest decode step of the busiest stage."""


@dataclass(frozen=True, slots=True)
class ServingAsked:
    """What a server's cut is to be best for, and of how many requests a step is, with how long texts; None: open."""

    objective: Objective | None = None
    batch: int | None = None
    context: int | None = None

    @property
    def flag(self) -> str | None:
        """The first flag that says something."""
        said = {"--objective": self.objective, "--batch": self.batch, "--context": self.context}
        return next((flag for flag, value in said.items() if value is not None), None)


OPEN = ServingAsked()
"""Nothing is asked."""


class DecodeCost(NamedTuple):
    """Of some blocks on each device that splits them: ns of a step, bytes that it works in, and of a text's cache."""

    step_ns: int
    working_bytes: int
    cached_bytes: int


@dataclass(frozen=True, slots=True)
class Decoding:
    """Decode steps of ``batch`` requests, each with ``context`` tokens so far."""

    objective: Objective
    batch: int
    context: int

    def cost(self, blocks: Sequence[Block], shards: int) -> DecodeCost:
        """Of blocks in one stage. Raises UsageError where the profile has no rows for it."""
        rows = [phase_costs(block, "decode", self.batch, self.context, shards=shards) for block in blocks]
        return DecodeCost(
            sum(row.forward_ns for row in rows),
            max(row.workspace_bytes + row.activation_bytes for row in rows),
            sum(cached_bytes(block, self.context, shards) for block in blocks),
        )


def decoding_of(profile: Profile, asked: ServingAsked, *, limited: bool) -> Decoding | None:
    """Decode steps of a profile that has them, by default of what most it has; None where it has none.

    Where memory is ``limited`` the cache is what a cut is best for, else the time of a step, unless it is said.

    Raises:
        UsageError: something is asked of decode steps, and the profile has none; a cache without a limit.
    """
    rows = [row for block in profile.kinds for row in block.phases if row.phase == "decode"]
    if not rows:
        if asked.flag is not None and (asked.flag, asked.objective) != ("--objective", "time"):
            raise UsageError(
                f"{asked.flag}: {profile.where} says nothing of decode steps and their cache; profile the model with "
                "--inference --context 1k,32k, or leave it out"
            )
        return None
    if asked.objective == "cache" and not limited:
        raise UsageError("--objective cache: memory is unlimited, and so is the cache; give --memory or a --cluster")
    objective = asked.objective or ("cache" if limited else "time")
    batch = asked.batch or max(row.microbatch_size for row in rows)
    return Decoding(objective, batch, asked.context or max(row.context_tokens for row in rows))
