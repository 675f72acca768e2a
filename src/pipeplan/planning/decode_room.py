"""How many requests there is memory for, whatever their steps take.

That some choice of stages, groups and ways fits does not depend on times, so that none are looked at: of each run of
blocks the least that a device keeps is found under every bound for what its blocks work in, and whether runs that fit
use up all blocks and devices by a dynamic program. Blocks that have no rows of few requests work in as much as with the
fewest that they have rows of.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pipeplan.costs.decode_splits import DecodeAt
from pipeplan.files import Block, PhaseRow, Profile
from pipeplan.sharding.decode_graph import DecodeRuns
from pipeplan.time_limit import TimeUpError, checkpoint

Fits = npt.NDArray[np.bool_]


class RoomSought(Protocol):
    """What is asked, as :class:`.DecodeSearch` has it."""

    devices: int
    batch: int
    context: int
    limit: int | None
    positions: int | None

    @property
    def order(self) -> tuple[str, ...]:
        """The chain."""
        ...

    @property
    def sizes(self) -> Sequence[int]:
        """Devices of a group."""
        ...

    def may_fit(self, batch: int) -> bool:
        """Whether all devices together have memory for so many."""
        ...

    def numbers_of_groups(self, batch: int) -> list[int]:
        """Of so many requests."""
        ...

    def runs(self, size: int, at: DecodeAt) -> DecodeRuns:
        """All runs of blocks on so many devices."""
        ...


def most_requests(search: RoomSought) -> tuple[int, bool]:
    """The most requests, fewer than those asked for, that some choice has memory for; or at most, if time is up.

    Its profile is one :func:`with_rows_of_few`.
    """
    low, high = 0, search.batch - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if search.may_fit(middle) else (low, middle - 1)
    low, step = 0, 1
    try:
        while low < high:  # near the bound mostly, and the less so the wider the steps
            middle = max(low + 1, high - step + 1)
            low, high, step = (middle, high, 1) if fits(search, middle) else (low, middle - 1, 2 * step)
    except TimeUpError:
        return high, False
    return low, True


def fits(search: RoomSought, batch: int) -> bool:
    """Whether some choice has memory for so many requests; without a limit, whether some has costs."""
    failed = dict[int, list[tuple[int, ...]]]()
    for groups in search.numbers_of_groups(batch):
        at = DecodeAt.of(batch, groups, search.context)
        # blocks work in as much as with another number of groups as large, and keep and give no less than that
        need = groups, *(at.owned(parts) for parts in range(1, search.devices + 1))
        known = failed.setdefault(at.largest, [])
        if any(all(one <= other for one, other in zip(each, need, strict=True)) for each in known):
            continue
        if _holds(search, at):
            return True
        known.append(need)
    return False


def _holds(search: RoomSought, at: DecodeAt) -> bool:
    """Whether runs that fit use up all blocks and all devices, in as many stages as are asked for."""
    count = len(search.order)
    fitting = {size: _runs_that_fit(search.runs(size, at), search.limit) for size in search.sizes}
    stages = search.positions
    found = {0: np.arange(count + 1)[None, :] == 0}  # {devices: [stages so far, blocks so far]}, if stages are counted
    if stages is not None:
        found = {0: np.pad(found[0], ((0, stages), (0, 0)))}
    for devices in range(1, search.devices + 1):
        checkpoint()
        reached = np.zeros_like(found[0])
        for size, fit in fitting.items():
            if size <= devices:
                ends = (found[devices - size].astype(np.int64) @ fit.astype(np.int64)) > 0
                reached[1 if stages is not None else 0 :] |= ends[: len(ends) - (stages is not None)]
        found[devices] = reached
    return bool(found[search.devices][-1, count])


def _runs_that_fit(runs: DecodeRuns, limit: int | None) -> Fits:
    """[begin, end] whether a run of blocks does on so many devices."""
    count = len(runs.order)
    found = np.triu(np.ones((count + 1, count + 1), bool), 1)
    if not all(runs.ways.values()):
        return np.zeros_like(found)
    if limit is None:
        return found
    given = np.array([0, *(len(runs.at.sizes) * runs.given_bytes(end) for end in range(1, count + 1))])
    some = np.zeros_like(found)
    for level in sorted({each.needed_bytes for ways in runs.ways.values() for each in ways}):
        checkpoint()
        least = {name: min(_kept(runs, name, level), default=None) for name in runs.ways}
        own = [least[runs.profile.alike[name]] for name in runs.order]
        kept = np.concatenate(([0], np.cumsum([each or 0 for each in own])))
        without = np.concatenate(([0], np.cumsum([each is None for each in own])))
        some |= (kept[None, :] - kept[:, None] + given[None, :] <= limit - level) & (
            without[None, :] == without[:, None]
        )
    return found & some


def _kept(runs: DecodeRuns, name: str, level: int) -> Iterator[int]:
    """What ways keep in which a block works in at most so much."""
    return (each.kept_bytes for each in runs.ways[name] if each.needed_bytes <= level)


def with_rows_of_few(profile: Profile) -> Profile:
    """The profile with rows of one request, where it has none, as those of the fewest."""

    def more(block: Block) -> Block:
        fewest = dict[tuple[object, ...], PhaseRow]()
        for row in block.phases:
            case = row.phase, row.context_tokens, *row.key[3:]
            if case not in fewest or row.microbatch_size < fewest[case].microbatch_size:
                fewest[case] = row
        added = (
            row.model_copy(update={"microbatch_size": 1})
            for row in fewest.values()
            if row.phase == "decode" and row.microbatch_size > 1
        )
        return block.model_copy(update={"phases": (*block.phases, *added)})

    return profile.model_copy(update={"blocks": tuple(map(more, profile.blocks))})
