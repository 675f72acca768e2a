"""Groups timed within runs of the whole model: what covers are chosen by, once groups were measured alone.

Alone a group finds other numbers in caches and other threads awake than in a run, and of many that were measured alone
the cheapest cover has those whose measurement was luckiest. So the whole model runs by covers, with a reading of the
clock between groups: by each backend alone that can, then by the cheapest cover of what is known, again and again,
until no cover is predicted to take less than the best of those that ran, but for the noise. A machine is faster or
slower for seconds, so covers that took nearly as long as the best run again in turns, and the middle one of a cover's
runs counts. A group takes what it took in the last of these; in none, what it took alone, by as much as others of its
backend took longer or shorter in runs, unless it is most of the model. Running is a function that is passed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Protocol, get_args

from pipeplan.errors import ExecutionError, InfeasibleError
from pipeplan.files import CostRow, Profile, RunGroup, WholeRun
from pipeplan.files.profile import EAGER, TimeKey
from pipeplan.kernels.covers import KernelCover, KernelMatch, algorithm_1
from pipeplan.kernels.measuring import PENDING, in_short, matches_of, plain_row
from pipeplan.kernels.operators import OperatorDag

Groups = tuple[tuple[tuple[str, ...], str], ...]
"""Blocks, and the backend that runs them, in an order in which they can run."""

NOISE = 0.02
"""Two runs of the same cover differ by so much; several backends must be better than one by more than that."""

MOST_MIXED = 8
"""Covers of several backends that a command runs at most, at one micro-batch size."""

NEAR = 0.1
"""Covers that took longer than the best by no more than this run again; the same cover differed by that in minutes."""

MOST_NEAR = 3
"""Covers that run again at most, those that took least."""

RUNS = 3
"""How many times these run in all."""


class RunWhole(Protocol):
    """What runs the whole model by a cover, compares it with eager torch, and times its groups."""

    def __call__(self, groups: Groups, size: int) -> Sequence[tuple[int, int]]:
        """Forward and backward of each group, in ns.

        Raises ExecutionError or InfeasibleError where it cannot run, or gives other numbers.
        """


def best_run(
    profile: Profile, size: int, known: Collection[tuple[tuple[str, ...], str]] | None = None
) -> WholeRun | None:
    """The run that takes least, of one backend where several are not better by more than the noise.

    With ``known`` only of these groups. None: the whole model has not run.
    """
    runs = [
        run
        for run in _runs(profile, size)
        if not run.reason and (known is None or all(group in known for group in run.cover))
    ]
    best = min(runs, key=lambda run: run.ns, default=None)
    alone = min((run for run in runs if len(run.backends) == 1), key=lambda run: run.ns, default=None)
    return alone if best is None or alone is None or best.ns > alone.ns * (1 - NOISE) else best


def cover_of(graph: OperatorDag, run: WholeRun, change_ns: int) -> KernelCover:
    """The cover of a run, with what its groups took there: a change of backend is in what takes a result."""
    pairs = zip(run.groups, _changes_into(graph, run.cover), strict=True)
    matches = (
        KernelMatch(group.blocks, group.backend, max(0, group.forward_ns - changes * change_ns) + group.backward_ns)
        for group, changes in pairs
    )
    return KernelCover.of(graph, matches, change_ns)


def _runs(profile: Profile, size: int) -> list[WholeRun]:
    """One run of each cover: the middle one, or one that was refused."""
    by_cover: dict[Groups, list[WholeRun]] = defaultdict(list)
    for run in profile.whole_runs:
        if run.microbatch_size == size:
            by_cover[run.cover].append(run)
    return [
        next((run for run in own if run.reason), sorted(own, key=lambda run: run.ns)[(len(own) - 1) // 2])
        for own in by_cover.values()
    ]


def _changes_into(graph: OperatorDag, cover: Groups) -> list[int]:
    """How many results each group is the first of its backend to take, that another backend gives."""
    backend = {id_: name for blocks, name in cover for id_ in blocks}
    taken: set[tuple[str, str]] = set()
    found = []
    for blocks, name in cover:
        own = {(source, name) for id_ in blocks for source in graph[id_].inputs if backend[source] != name}
        found.append(len(own - taken))
        taken |= own
    return found


# Rows -------------------------------------------------------------------------------------------------------------

_KEYS: tuple[TimeKey, ...] = get_args(TimeKey)
_Times = tuple[float, float]
"""Forward and backward."""


def with_times_of_runs(profile: Profile, graph: OperatorDag, size: int) -> Profile:
    """The profile whose rows of a size are what groups take in its runs; as it is, where there are none.

    Groups that are alike take what they do in the mean. A group of most of the model that did not run takes what it
    took alone, for that was a run of most of the model, where small groups, by which others are scaled, may take a
    third less. Rows of eager torch for blocks that are split or recomputed go with that of the block as it is; but for
    those with a ring, whose messages are no part of that.
    """
    best = best_run(profile, size)
    if best is None:
        return profile
    taken: dict[Hashable, _Times] = {}
    for run in (*_runs(profile, size), best):  # the best comes last: what is chosen adds up to what it took
        if not run.reason:
            taken |= _of_run(graph, run, profile.backend_change_ns)
    rows = [(blocks, row) for blocks, rows in _groups_with_rows(profile) for row in rows if row.microbatch_size == size]
    factors = _Factors.of(graph, rows, taken)

    def changed(blocks: tuple[str, ...], row: CostRow) -> CostRow:
        if row.microbatch_size != size or row.ring is not None:
            return row
        found = taken.get((graph.likeness(blocks), row.backend))
        if found is not None and _is_plain(row):
            return _timed(row, found, scaled=False)
        if _is_most(graph, blocks):  # it was measured in a run of most of the model
            return row.model_copy(update={"alone": {}, "scaled": False} | _alone_times(row))
        alone = _alone(row)
        own = factors.of_block(blocks[0]) if row.backend == EAGER else factors.of_backend(row.backend)
        return _timed(row, (alone[0] * own[0], alone[1] * own[1]), scaled=True)

    blocks = tuple(
        block.model_copy(update={"costs": tuple(changed((block.id,), row) for row in block.costs)})
        for block in profile.blocks
    )
    fusions = tuple(
        fusion.model_copy(update={"costs": tuple(changed(fusion.blocks, row) for row in fusion.costs)})
        for fusion in profile.fusions
    )
    return profile.model_copy(update={"blocks": blocks, "fusions": fusions})


def _groups_with_rows(profile: Profile) -> Iterator[tuple[tuple[str, ...], Sequence[CostRow]]]:
    for block in profile.blocks:
        yield (block.id,), block.costs
    for fusion in profile.fusions:
        yield fusion.blocks, fusion.costs


def _of_run(graph: OperatorDag, run: WholeRun, change_ns: int) -> dict[Hashable, _Times]:
    """{(likeness of groups, backend): what one of them took in the mean}"""
    found: dict[Hashable, list[tuple[int, int]]] = defaultdict(list)
    for group, changes in zip(run.groups, _changes_into(graph, run.cover), strict=True):
        times = max(0, group.forward_ns - changes * change_ns), group.backward_ns
        found[graph.likeness(group.blocks), group.backend].append(times)
    return {key: (fmean(one for one, _ in own), fmean(two for _, two in own)) for key, own in found.items()}


@dataclass(frozen=True, slots=True)
class _Factors:
    """How many times as long what was measured alone takes in runs: forward and backward."""

    blocks: Mapping[str, _Times]
    backends: Mapping[str, _Times]
    every: _Times

    @classmethod
    def of(
        cls, graph: OperatorDag, rows: Sequence[tuple[tuple[str, ...], CostRow]], taken: Mapping[Hashable, _Times]
    ) -> _Factors:
        """From rows of groups that ran: of a backend that ran smaller groups, without those of most of the model."""
        pairs: dict[str, dict[bool, list[tuple[_Times, _Times]]]] = defaultdict(lambda: defaultdict(list))
        blocks = {}
        for group, row in rows:
            found = taken.get((graph.likeness(group), row.backend)) if _is_plain(row) else None
            if found is not None:
                pairs[row.backend][_is_most(graph, group)].append((found, _alone(row)))
                if row.backend == EAGER:
                    blocks[group[0]] = _ratio([(found, _alone(row))])
        backends = {name: _ratio(own[False] or own[True]) for name, own in pairs.items()}
        return cls(blocks, backends, _ratio([each for own in pairs.values() for each in own[False] or own[True]]))

    def of_backend(self, name: str) -> _Times:
        """That of a backend; of all together, where none of its groups ran."""
        return self.backends.get(name, self.every)

    def of_block(self, id_: str) -> _Times:
        """That of a block in eager torch."""
        return self.blocks.get(id_, self.of_backend(EAGER))


def _is_most(graph: OperatorDag, group: Collection[str]) -> bool:
    """Whether a group is more than half of the model, and more than a block."""
    return len(graph) < 2 * len(group) > 2


def _ratio(pairs: Sequence[tuple[_Times, _Times]]) -> _Times:
    found = []
    for index in (0, 1):
        alone = sum(each[1][index] for each in pairs)
        found.append(sum(each[0][index] for each in pairs) / alone if alone else 1.0)
    return found[0], found[1]


def _is_plain(row: CostRow) -> bool:
    """Whether it is of blocks whole on one device, and not recomputed."""
    return row is plain_row([row], row.microbatch_size, row.backend)


def _alone_times(row: CostRow) -> dict[TimeKey, int]:
    return row.alone or {key: ns for key in _KEYS if (ns := getattr(row, key)) is not None}


def _alone(row: CostRow) -> _Times:
    times = _alone_times(row)
    before = row.model_copy(update={key: times[key] for key in _KEYS if key in times})
    return before.forward_ns, before.whole_backward_ns


def _timed(row: CostRow, times: _Times, *, scaled: bool) -> CostRow:
    """The row with these times; what backward has parts of keeps its proportions."""
    alone, backward = _alone_times(row), _alone(row)[1]
    found: dict[str, Any] = {
        key: round(ns * times[1] / backward) if backward else ns for key, ns in alone.items() if key != "forward_ns"
    }
    return row.model_copy(update={**found, "forward_ns": round(times[0]), "alone": alone, "scaled": scaled})


# Running ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class WholeRuns:
    """Runs a whole model by covers at one micro-batch size, and puts what comes of it into a profile.

    ``left`` says how many seconds there are. Before each run ``keep`` gets the profile, with the run as one that does
    not come back; ``tell`` gets what a reader must know, ``progress`` how many runs are done, how many there are at
    most, and which comes.
    """

    graph: OperatorDag
    size: int
    run: RunWhole
    keep: Callable[[Profile], None] = lambda profile: None
    tell: Callable[[str], None] = lambda text: None
    progress: Callable[[int, int, str], None] | None = None
    left: Callable[[], float] = lambda: float("inf")

    def settled(self, profile: Profile) -> Profile:
        """The profile with the runs that were to be done, and the times of its rows in runs."""
        given = profile.whole_runs
        profile = profile.model_copy(update={"whole_runs": tuple(run for run in given if run.reason != PENDING)})
        first = self._alone(profile)
        for number, cover in enumerate(first):
            profile = self._ran(profile, self._groups(cover), number, len(first) + MOST_MIXED)
        done, over = len(first), False
        for number in range(done, done + MOST_MIXED + 1):
            profile = with_times_of_runs(profile, self.graph, self.size)
            mixed = self._next(profile)
            if mixed is None:
                break
            over = number == done + MOST_MIXED or not self._is_time_for(profile, mixed)
            if over:
                break
            profile = self._ran(profile, mixed, number, done + MOST_MIXED)
        if over:
            self.tell(
                f"micro-batch size {self.size}: other covers than those that ran may take less; covers are chosen "
                "among those that ran"
            )
        profile = with_times_of_runs(self._in_turns(profile), self.graph, self.size)
        self.keep(profile)
        return profile

    def _in_turns(self, profile: Profile) -> Profile:
        """The profile with more runs of covers that took nearly as long as the best, the one that has fewest next."""
        done = 0
        while near := self._near(profile):
            cover = near[0]
            label = self._label(cover)
            if not self._is_time_for(profile, cover):
                self.tell(f"--measure-limit was over; not run again beside others that took nearly as long: {label}")
                break
            profile = self._ran(profile, cover, done, done + len(near))
            done += 1
        return profile

    def _near(self, profile: Profile) -> list[Groups]:
        """Runs that are still to be done of covers nearly as quick as the best."""
        runs = sorted((run for run in _runs(profile, self.size) if not run.reason), key=lambda run: run.ns)
        near = [run.cover for run in runs[:MOST_NEAR] if run.ns <= runs[0].ns * (1 + NEAR)]
        if len(near) == 1:
            return []
        count = Counter(run.cover for run in profile.whole_runs if run.microbatch_size == self.size)
        left = [(count[cover] + more, cover) for cover in near for more in range(RUNS - count[cover])]
        return [cover for _, cover in sorted(left, key=lambda each: each[0])]

    def _alone(self, profile: Profile) -> list[KernelCover]:
        """Covers of one backend each that have not run: of its groups, and of one group; eager torch's, then by ns."""
        known = [run for run in _runs(profile, self.size) if len(run.backends) == 1]
        ran = {(name, len(run.groups) == 1) for run in known for name in run.backends}
        matches = matches_of(profile, self.graph, self.size)
        by_backend: dict[tuple[str, bool], list[KernelMatch]] = defaultdict(list)
        for match in matches:
            by_backend[match.backend, len(match.blocks) == len(self.graph)].append(match)
        found = []
        for key, own in by_backend.items():
            if key not in ran:
                try:
                    found.append(algorithm_1(self.graph, own))
                except InfeasibleError:  # it does not run all blocks
                    continue
        return sorted(found, key=lambda cover: (cover.matches[0].backend != EAGER, cover.total_ns))

    def _next(self, profile: Profile) -> Groups | None:
        """The cheapest cover of what is known, if it has not run and is better than the best that has."""
        runs = _runs(profile, self.size)
        passed = _passed_over(profile, self.size)
        own = [
            match for match in matches_of(profile, self.graph, self.size) if (match.blocks, match.backend) not in passed
        ]
        try:
            cover = algorithm_1(self.graph, own, profile.backend_change_ns)
        except InfeasibleError:
            return None
        best = best_run(profile, self.size)
        if best is not None and cover.total_ns > best.ns * (1 - NOISE):
            return None
        groups = self._groups(cover)
        return None if set(groups) in [set(run.cover) for run in runs] else groups

    def _groups(self, cover: KernelCover) -> Groups:
        return tuple((match.blocks, match.backend) for match in cover.as_runs(self.graph))

    def _is_time_for(self, profile: Profile, groups: Groups) -> bool:
        """Whether what its groups took to build is left: each is built again for the run."""
        known = {
            (blocks, row.backend): row.compile_ns
            for blocks, rows in _groups_with_rows(profile)
            for row in rows
            if row.microbatch_size == self.size
        }
        needed = sum(known[group] for group in groups) / 1e9
        left = self.left()
        return left > 0 and needed <= left

    def _ran(self, profile: Profile, groups: Groups, number: int, most: int) -> Profile:
        """The profile with a run by a cover, if there is time for it."""
        label = self._label(groups)
        if not self._is_time_for(profile, groups):
            self.tell(f"--measure-limit was over; the whole model was not run by {label}")
            return profile
        if self.progress is not None:
            self.progress(number, most, f"the whole model by {label}")
        plain = tuple(RunGroup(blocks=blocks, backend=name) for blocks, name in groups)

        def noted(own: tuple[RunGroup, ...], reason: str = "") -> Profile:
            run = WholeRun(microbatch_size=self.size, groups=own, reason=reason)
            return profile.model_copy(update={"whole_runs": (*profile.whole_runs, run)})

        self.keep(noted(plain, PENDING))
        try:
            times = self.run(groups, self.size)
        except (ExecutionError, InfeasibleError) as error:
            self.tell(f"the whole model by {label}: refused: {in_short(str(error), 300)}")
            return noted(plain, in_short(str(error)))
        except BaseException:  # an interruption, or a fault of ours
            self.keep(profile)
            raise
        return noted(
            tuple(
                each.model_copy(update={"forward_ns": forward, "backward_ns": backward})
                for each, (forward, backward) in zip(plain, times, strict=True)
            )
        )

    def _label(self, groups: Groups) -> str:
        counts = Counter(name for _, name in groups)
        named = ", ".join(f"{name} ({count})" if len(counts) > 1 else name for name, count in counts.most_common())
        return f"{named} at micro-batch size {self.size}, in {len(groups)} group{'s' * (len(groups) > 1)}"


def _passed_over(profile: Profile, size: int) -> set[tuple[tuple[str, ...], str]]:
    """Groups of covers that were refused, which no other run had; if others had all, those that the best has not."""
    runs = _runs(profile, size)
    ran = {group for run in runs if not run.reason for group in run.cover}
    best = best_run(profile, size)
    kept = set() if best is None else set(best.cover)
    found: set[tuple[tuple[str, ...], str]] = set()
    for run in runs:
        if run.reason:
            found |= set(run.cover) - ran or set(run.cover) - kept
    return found
