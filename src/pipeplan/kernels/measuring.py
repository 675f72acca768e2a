"""Which groups are measured by which backend, in which order, and the profile with what came of it.

The profile is the log: what it has is not measured again. Measuring itself is a function that is passed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from statistics import median
from typing import Protocol

from pipeplan.errors import ExecutionError, InfeasibleError
from pipeplan.files import BackendFusion, BackendRefusal, Block, CostRow, Profile
from pipeplan.files.profile import EAGER
from pipeplan.kernels.backend import Backend
from pipeplan.kernels.covers import KernelMatch
from pipeplan.kernels.operators import OperatorDag
from pipeplan.time_limit import checked

PENDING = "the process was to build or run it, and has not come back"
_DIED = "the process died while it was built or run"


@dataclass(frozen=True, slots=True)
class GroupCandidate:
    """Groups that are alike, of which the first is measured for one backend and micro-batch size.

    ``eager_ns`` is what all of them take in eager torch: what there is to win.
    """

    groups: tuple[tuple[str, ...], ...]
    backend: str
    size: int
    eager_ns: int

    @property
    def label(self) -> str:
        """For progress and texts."""
        first = self.groups[0]
        named = first[0] if len(first) == 1 else f"{first[0]} to {first[-1]}"
        return f"{self.backend}: {named} at micro-batch size {self.size}"


class MeasureGroup(Protocol):
    """What builds a group by a backend, compares and times it."""

    def __call__(self, blocks: Sequence[str], size: int, backend: str) -> tuple[CostRow, int | None]:
        """Its row, and what one change between this backend and eager torch takes, if that was measured.

        Raises ExecutionError or InfeasibleError where the backend refuses, fails, is wrong, or memory runs out.
        """


def plain_row(rows: Iterable[CostRow], size: int, backend: str = EAGER) -> CostRow | None:
    """The row of one device, whole and not recomputed, for a micro-batch size and a backend."""
    key = (size, 1, 1, 1, 1, None, False, backend)
    return next((row for row in rows if row.key == key), None)


def row_ns(row: CostRow) -> int:
    """Forward, and in training backward."""
    return row.forward_ns + row.whole_backward_ns


def matches_of(profile: Profile, graph: OperatorDag, size: int) -> tuple[KernelMatch, ...]:
    """What was measured at a size, whole on one device: blocks alone, and groups that give one result or are all."""
    groups: list[tuple[tuple[str, ...], Sequence[CostRow]]] = [((block.id,), block.costs) for block in profile.blocks]
    groups += [(graph.ordered(fusion.blocks), fusion.costs) for fusion in profile.fusions]
    return tuple(
        KernelMatch(blocks, row.backend, row_ns(row))
        for blocks, costs in checked(groups, 16)
        if len(blocks) == len(graph) or graph.is_one_kernel(blocks)
        for row in costs
        if row is plain_row(costs, size, row.backend)
    )


def renewed(profile: Profile, versions: Mapping[str, Mapping[str, str]]) -> tuple[Profile, tuple[str, ...]]:
    """The profile without what backends took by other versions of their libraries than these; and their names.

    ``versions`` are {backend: {library: version}}.
    """
    known = profile.source.versions
    old = {
        name
        for name, own in versions.items()
        for library, version in own.items()
        if known.get(library, version) != version
    }
    if not old:
        return profile, ()

    def kept(rows: Sequence[CostRow]) -> tuple[CostRow, ...]:
        return tuple(row for row in rows if row.backend not in old)

    blocks = tuple(block.model_copy(update={"costs": kept(block.costs)}) for block in profile.blocks)
    fusions = (each.model_copy(update={"costs": kept(each.costs)}) for each in profile.fusions)
    changed = {
        "blocks": blocks,
        "fusions": tuple(each for each in fusions if each.costs),
        "refusals": tuple(each for each in profile.refusals if each.backend not in old),
        "whole_runs": tuple(run for run in profile.whole_runs if not run.backends & old),
    }
    return profile.model_copy(update=changed), tuple(sorted(old))


def with_more_sizes(profile: Profile, made: Profile) -> Profile:
    """A profile with what blocks take at more micro-batch sizes, of the same model, too."""
    rows = {block.id: block.costs for block in made.blocks}
    kept = {key: getattr(profile, key) for key in Profile.model_fields}
    blocks = (block.model_copy(update={"costs": (*block.costs, *rows[block.id])}) for block in profile.blocks)
    return Profile(**kept | {"blocks": tuple(blocks)})


def candidates_of(
    graph: OperatorDag, backends: Sequence[Backend], profile: Profile, sizes: Sequence[int]
) -> list[GroupCandidate]:
    """All that is to be measured: groups and blocks in turn, of each what eager torch takes longest for first.

    Of equal ones what compiles slowly is last. The largest groups are all of nearly the whole model: were they all
    first, a limit would leave no block that can be in a cover beside another backend's.
    """
    found, slow = [], {backend.name for backend in backends if backend.compiles_slowly}
    for size in sizes:
        eager = {block.id: plain_row(block.costs, size) for block in profile.blocks}
        for backend in backends:
            alike: dict[Hashable, list[tuple[str, ...]]] = defaultdict(list)
            for group in backend.groups(graph) if backend.name != EAGER else ():
                alike[graph.likeness(group)].append(group)
            for groups in alike.values():
                rows = [row for group in groups for id_ in group if (row := eager[id_]) is not None]
                found.append(GroupCandidate(tuple(groups), backend.name, size, sum(map(row_ns, rows))))
    found.sort(key=lambda each: (-each.eager_ns, each.backend in slow))
    several = [each for each in found if len(each.groups[0]) > 1]
    single = [each for each in found if len(each.groups[0]) == 1]
    return [each for pair in zip_longest(several, single) for each in pair if each is not None]


@dataclass(slots=True)
class KernelLog:
    """A profile to which rows of backends come."""

    profile: Profile
    rows: dict[tuple[str, ...], list[CostRow]] = field(default_factory=lambda: defaultdict(list))
    refused: dict[tuple[tuple[str, ...], str, int], str] = field(default_factory=dict)
    changes: list[int] = field(default_factory=list)
    compile_ns: int = 0

    @classmethod
    def of(cls, profile: Profile) -> KernelLog:
        """With what the profile has already."""
        log = cls(profile)
        for block in profile.blocks:
            log.rows[block.id,] += [row for row in block.costs if row.backend != EAGER]
        for fusion in profile.fusions:
            log.rows[fusion.blocks] += fusion.costs
        log.refused |= {
            (each.blocks, each.backend, each.microbatch_size): each.reason
            for each in profile.refusals
            if each.reason != PENDING  # all processes were ended from outside, which says nothing of the backend
        }
        log.changes += [profile.backend_change_ns] * (profile.backend_change_ns > 0)
        return log

    def knows(self, candidate: GroupCandidate) -> bool:
        """Whether it was measured or refused."""
        first = candidate.groups[0]
        refused = (first, candidate.backend, candidate.size) in self.refused
        return refused or plain_row(self.rows[first], candidate.size, candidate.backend) is not None

    def put(self, candidate: GroupCandidate, row: CostRow) -> None:
        """Note a row, for all groups that are alike."""
        for group in candidate.groups:
            self.rows[group].append(row)

    def refuse(self, candidate: GroupCandidate, reason: str) -> None:
        """Note why there is none."""
        for group in candidate.groups:
            self.refused[group, candidate.backend, candidate.size] = reason

    def forget(self, candidate: GroupCandidate) -> None:
        """Take a refusal back."""
        for group in candidate.groups:
            self.refused.pop((group, candidate.backend, candidate.size), None)

    @property
    def found(self) -> Profile:
        """The profile with all of it."""
        kept = {key: getattr(self.profile, key) for key in Profile.model_fields}
        return Profile(
            **kept
            | {
                "blocks": tuple(map(self._block, self.profile.blocks)),
                "fusions": tuple(
                    BackendFusion(blocks=group, costs=tuple(rows))
                    for group, rows in self.rows.items()
                    if len(group) > 1 and rows
                ),
                "backend_change_ns": round(median(self.changes)) if self.changes else 0,
                "refusals": tuple(
                    BackendRefusal(blocks=blocks, backend=backend, microbatch_size=size, reason=reason)
                    for (blocks, backend, size), reason in self.refused.items()
                ),
            }
        )

    def _block(self, block: Block) -> Block:
        own = [row for row in block.costs if row.backend == EAGER]
        return block.model_copy(update={"costs": (*own, *self.rows[block.id,])})


def measured_groups(
    log: KernelLog,
    candidates: Collection[GroupCandidate],
    measure: MeasureGroup,
    *,
    keep: Callable[[Profile], None] = lambda profile: None,
    tell: Callable[[str], None] = lambda text: None,
    progress: Callable[[int, int, str], None] | None = None,
    over: Callable[[], bool] = lambda: False,
) -> list[GroupCandidate]:
    """Measure what the log does not know, until it is ``over``. Returns what was not measured.

    Before a group is built ``keep`` gets the profile with a refusal of it: where the process dies of it, the next one
    passes it over. What refuses is told, and the others go on.
    """
    left = [each for each in candidates if not log.knows(each)]
    for number, candidate in enumerate(left):
        if over():
            return left[number:]
        if progress is not None:
            progress(number, len(left), candidate.label)
        log.refuse(candidate, PENDING)
        keep(log.found)
        try:
            row, change = measure(candidate.groups[0], candidate.size, candidate.backend)
        except (ExecutionError, InfeasibleError) as error:
            log.refuse(candidate, in_short(str(error)))
            tell(f"{candidate.label}: refused: {in_short(str(error), 300)}")
        except BaseException:  # an interruption, or a fault of ours: it says nothing of the backend
            log.forget(candidate)
            keep(log.found)
            raise
        else:
            log.forget(candidate)
            log.put(candidate, row)
            log.compile_ns += row.compile_ns
            log.changes += [] if change is None else [change]
    keep(log.found)
    return []


def settled_pending(profile: Profile) -> tuple[str | None, Profile]:
    """What was being measured when a profile was written last, and the profile with that as what the process died of.

    None, and the profile as it is, where nothing was.
    """
    pending = [each for each in profile.refusals if each.reason == PENDING]
    runs = [each for each in profile.whole_runs if each.reason == PENDING]
    if not pending and not runs:
        return None, profile
    settled = {
        "refusals": tuple(
            each.model_copy(update={"reason": _DIED}) if each in pending else each for each in profile.refusals
        ),
        "whole_runs": tuple(
            each.model_copy(update={"reason": _DIED}) if each in runs else each for each in profile.whole_runs
        ),
    }
    if pending:
        first = pending[0]
        label = GroupCandidate((first.blocks,), first.backend, first.microbatch_size, 0).label
    else:
        label = f"the whole model by {' and '.join(sorted(runs[0].backends))}"
    return label, profile.model_copy(update=settled)


_LONGEST_REASON = 2000


def in_short(text: str, most: int = _LONGEST_REASON) -> str:
    """One line of what a library said, which may be pages."""
    line = " ".join("".join(each if each.isprintable() else " " for each in text).split())
    return line if len(line) <= most else f"{line[:most]}..."
