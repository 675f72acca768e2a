"""Which kernel backends may run blocks of stages, the cheapest cover of a stage, and what blocks come to by covers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, Literal

from pipeplan.costs import block_costs
from pipeplan.costs.segments import change_ns, no_row
from pipeplan.errors import InfeasibleError, UsageError, choose_from
from pipeplan.files import CostRow, Cover, PlacedStage, Profile
from pipeplan.files.profile import EAGER
from pipeplan.kernels.covers import KernelMatch, algorithm_1
from pipeplan.kernels.measuring import plain_row, row_ns
from pipeplan.kernels.operators import GraphOperator, OperatorDag
from pipeplan.workload.elements import Segment

AUTO = "auto"

By = Literal["both", "forward", "backward"]

_NS: dict[By, Callable[[CostRow], int]] = {
    "both": row_ns,
    "forward": lambda row: row.forward_ns,
    "backward": lambda row: row.whole_backward_ns,
}
"""What a cover is cheapest by."""


@dataclass(frozen=True, slots=True)
class KernelsAsked:
    """Which backends may run blocks beside eager torch: all that were measured, some ``names``, or those of a cover.

    ``said`` is how that was asked for.
    """

    said: str = AUTO
    names: tuple[str, ...] = ()
    cover: Cover | None = None

    def require(self, profile: Profile) -> None:
        """Refuse what the profile has no times of.

        Raises:
            UsageError: it has none of backends, or not of one that is named, or it is not the cover's.
        """
        own = f"--kernels {self.said}"
        known = profile.kernels
        if known is None:
            raise UsageError(
                f"{own}: profile {profile.name!r} has no times of kernel backends; measure them with profile --backends"
            )
        there = sorted({row.backend for rows in known.rows.values() for row in rows})
        for name in self.names:
            if name != EAGER and name not in there:
                raise UsageError(f"{own}: the profile has no times of backend {name!r}; {choose_from(name, there)}")
        if self.cover is not None:
            self._require_cover(self.cover, profile, own)

    @property
    def kept(self) -> tuple[tuple[str, ...], ...]:
        """Groups of blocks that no stage may have without the others: those that a cover runs at once."""
        if self.cover is None:
            return ()
        return tuple(group.blocks for group in self.cover.cover if len(group.blocks) > 1 and group.backend != EAGER)

    @staticmethod
    def _require_cover(cover: Cover, profile: Profile, own: str) -> None:
        if cover.profile_sha256 != profile.fingerprint:
            raise UsageError(
                f"{own}: the cover is of profile {cover.name!r} with fingerprint {cover.profile_sha256[:12]}..., and "
                f"profile {profile.name!r} has {profile.fingerprint[:12]}...; choose the cover anew with pipeplan "
                "kernels PROFILE -o COVER"
            )
        covered = {block for group in cover.cover for block in group.blocks}
        odd = sorted(covered.symmetric_difference(profile.by_id))
        if odd:
            where = "the cover" if odd[0] in profile.by_id else "the profile"
            raise UsageError(f"{own}: block {odd[0]!r} is not in {where}; choose the cover anew with pipeplan kernels")


@dataclass(slots=True)
class StageKernels:
    """The covers of stages of a profile's blocks, each worked out once."""

    profile: Profile
    asked: KernelsAsked
    _matches: dict[tuple[int, By], tuple[KernelMatch, ...]] = field(default_factory=dict)
    _covers: dict[tuple[tuple[str, ...], int, By], tuple[Segment, ...] | None] = field(default_factory=dict)
    _graph: OperatorDag = field(init=False)

    def __post_init__(self) -> None:
        self.asked.require(self.profile)
        self._graph = OperatorDag.of(self.profile)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples of which some backend has a row."""
        assert self.profile.kernels is not None
        rows = (row for own in self.profile.kernels.rows.values() for row in own)
        return tuple(sorted({row.microbatch_size for row in rows if _allowed(self.asked, row.backend)}))

    def segments(self, blocks: Sequence[str], samples: int, by: By = "both") -> tuple[Segment, ...] | None:
        """The cheapest cover of a stage's blocks for so many samples; none where eager torch is, None without any.

        ``by`` forward and backward together, or one of them, as the first fills a pipeline and the other drains it. Of
        a cover that was asked for it is what that has of them, and None where the stage has a part of a group.
        """
        key = tuple(blocks), samples, by
        if key not in self._covers:
            self._covers[key] = self._segments(*key)
        return self._covers[key]

    def _segments(self, blocks: tuple[str, ...], samples: int, by: By) -> tuple[Segment, ...] | None:
        inside = frozenset(blocks)
        graph = OperatorDag(
            _within(self._graph, id_, inside) for id_ in sorted(blocks, key=self._graph.place.__getitem__)
        )
        own = [
            match
            for match in self.matches(samples, by)
            if inside.issuperset(match.blocks) and (len(match.blocks) in (1, len(blocks)) or self._is_apart(match))
        ]
        try:
            cover = algorithm_1(graph, own, 0 if by == "backward" else change_ns(self.profile))
        except InfeasibleError:
            return None
        return tuple(_joined(cover.as_runs(graph)))

    def matches(self, samples: int, by: By = "both") -> tuple[KernelMatch, ...]:
        """What may run at once of so many samples, with ns of forward and backward, or one of them."""
        if (samples, by) not in self._matches:
            found = [*self._eager(samples, by), *self._of_backends(samples, by)]
            cover = self.asked.cover
            if cover is not None:
                allowed = {(group.blocks, group.backend) for group in cover.cover}
                alone = {block for group in cover.cover if group.backend == EAGER for block in group.blocks}
                found = [
                    match
                    for match in found
                    if (match.blocks, match.backend) in allowed or (match.backend == EAGER and match.blocks[0] in alone)
                ]
                self._require_rows(cover, found, samples)
            self._matches[samples, by] = tuple(found)
        return self._matches[samples, by]

    @staticmethod
    def _require_rows(cover: Cover, found: Collection[KernelMatch], samples: int) -> None:
        there = {(match.blocks, match.backend) for match in found}
        for group in cover.cover:
            if group.backend != EAGER and (group.blocks, group.backend) not in there:
                raise UsageError(no_row(Segment(blocks=group.blocks, backend=group.backend), samples))

    def _eager(self, samples: int, by: By) -> list[KernelMatch]:
        found = []
        for block in self.profile.blocks:
            try:
                row = block_costs(block, samples)
            except UsageError:
                continue
            found.append(KernelMatch((block.id,), EAGER, _NS[by](row)))
        return found

    def _of_backends(self, samples: int, by: By = "both") -> list[KernelMatch]:
        assert self.profile.kernels is not None
        return [
            KernelMatch(blocks, row.backend, _NS[by](row))
            for blocks, rows in self.profile.kernels.rows.items()
            for row in rows
            if _allowed(self.asked, row.backend) and row is plain_row(rows, samples, row.backend)
        ]

    def _is_apart(self, match: KernelMatch) -> bool:
        return self._graph.is_one_kernel(match.blocks)

    def covered(self) -> Profile:
        """The profile in which blocks take their parts of what they do in the model's cheapest cover: to cut stages by.

        Groups of all blocks are left out, which no pipeline has.
        """
        rows: dict[str, dict[int, CostRow]] = {block.id: {} for block in self.profile.blocks}
        for size in self.sizes:
            own = [match for match in self.matches(size) if len(match.blocks) < len(self._graph)]
            try:
                cover = algorithm_1(self._graph, own, change_ns(self.profile))
            except InfeasibleError:
                continue
            for match in cover.matches:
                for id_, row in self._shares(match, size).items():
                    rows[id_][size] = row
        return self._with_rows(rows)

    def least(self, *, several: bool) -> Profile:
        """The profile with which bounds hold of every cover: each block has the least of its parts of all groups.

        Where there are ``several`` stages, none has the group of all blocks.

        A group's blocks share what it takes as they do in eager torch, so that no stage takes less than its blocks.
        """
        rows: dict[str, dict[int, CostRow]] = {block.id: {} for block in self.profile.blocks}
        for size in self.sizes:
            parts: dict[str, list[CostRow]] = {id_: [] for id_ in rows}
            for match in self._of_backends(size):
                if several and len(match.blocks) == len(rows):
                    continue
                for id_, row in self._shares(match, size).items():
                    parts[id_].append(row)
            for block in self.profile.blocks:
                plain = plain_row(block.costs, size)
                if plain is not None and parts[block.id]:
                    rows[block.id][size] = _least(plain, parts[block.id])
        return self._with_rows(rows)

    def _shares(self, match: KernelMatch, size: int) -> Mapping[str, CostRow]:
        """What each block of a group that a backend runs takes of it; none where eager torch does."""
        if match.backend == EAGER or self.profile.kernels is None:
            return {}
        row = self.profile.kernels.row(match.blocks, size, match.backend)
        plain = {id_: plain_row(self.profile.by_id[id_].costs, size) for id_ in match.blocks}
        weights = {id_: 1 if each is None else max(1, row_ns(each)) for id_, each in plain.items()}
        assert row is not None
        whole = sum(weights.values())
        return {id_: _part(row, weight, whole) for id_, weight in weights.items()}

    def _with_rows(self, rows: Mapping[str, Mapping[int, CostRow]]) -> Profile:
        blocks = []
        for block in self.profile.blocks:
            own = rows[block.id]
            costs = tuple(
                own[row.microbatch_size] if row.microbatch_size in own and row is plain_row([row], row.microbatch_size)
                else row
                for row in block.costs
            )  # fmt: skip
            blocks.append(block.model_copy(update={"costs": costs}))
        return self.profile.model_copy(update={"blocks": tuple(blocks)}).without_kernels()


def _allowed(asked: KernelsAsked, backend: str) -> bool:
    return not asked.names or backend in asked.names


def _within(graph: OperatorDag, id_: str, inside: frozenset[str]) -> GraphOperator:
    """An operator of a stage, that takes from others of the stage."""
    own = graph[id_]
    return replace(own, inputs=tuple(each for each in own.inputs if each in inside))


def _joined(matches: Sequence[KernelMatch]) -> list[Segment]:
    """Segments in order: neighbours that eager torch runs are one; none where it runs all."""
    found: list[Segment] = []
    for match in matches:
        if match.backend == EAGER and found and found[-1].backend == EAGER:
            found[-1] = Segment(blocks=(*found[-1].blocks, *match.blocks), backend=EAGER)
        else:
            found.append(Segment(blocks=match.blocks, backend=match.backend))
    return [] if all(each.backend == EAGER for each in found) else found


def _part(row: CostRow, weight: int, whole: int) -> CostRow:
    keys = ("forward_ns", "backward_ns", "input_grad_ns", "weight_grad_ns", "activation_bytes")
    changed: dict[str, Any] = {key: value * weight // whole for key in keys if (value := getattr(row, key)) is not None}
    if row.has_backward:
        changed |= {"backward_ns": row.whole_backward_ns * weight // whole}
    return row.model_copy(update={**changed, "backend": EAGER, "compile_ns": 0, "spread": {}, "repeats": 0})


def _least(plain: CostRow, parts: Sequence[CostRow]) -> CostRow:
    """The least of each number; of a whole backward, I is the least of both, and W what then is left."""

    def least(of: Callable[[CostRow], int]) -> int:
        return min(map(of, (plain, *parts)))

    changed: dict[str, int] = {
        key: least(attrgetter(key)) for key in ("forward_ns", "activation_bytes", "workspace_bytes")
    }
    if plain.has_backward:
        whole = changed["backward_ns"] = least(lambda row: row.whole_backward_ns)
        if plain.input_grad_ns is not None and plain.weight_grad_ns is not None:
            changed["input_grad_ns"] = min(plain.input_grad_ns, whole)
            changed["weight_grad_ns"] = min(plain.weight_grad_ns, whole - changed["input_grad_ns"])
            changed["weight_grad_bytes"] = 0
    return plain.model_copy(update={**changed, "spread": {}})


def may_cover(stage: PlacedStage) -> bool:
    """Whether kernel backends may run a stage's blocks: they are whole on each device, and run as they are."""
    split = stage.shards > 1 or stage.context > 1 or stage.expert > 1 or bool(stage.configurations)
    return not (split or stage.recompute or stage.num_parted or stage.zero > 1)
