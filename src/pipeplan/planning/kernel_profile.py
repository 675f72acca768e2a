"""A profile with what kernel backends take: measured group by group, by functions that are passed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pipeplan.files import Profile
from pipeplan.kernels.backend import Backend, chosen_backends, known_backends
from pipeplan.kernels.measuring import (
    GroupCandidate,
    KernelLog,
    MeasureGroup,
    candidates_of,
    measured_groups,
    renewed,
)
from pipeplan.kernels.operators import GraphOperator, OperatorDag
from pipeplan.kernels.whole_runs import RunWhole, WholeRuns
from pipeplan.search_constants import KERNELS_ALONE
from pipeplan.time_limit import Limit
from pipeplan.units import format_ns


@dataclass(frozen=True, slots=True)
class BackendsAsked:
    """Backends by name, modules of users that have more, and the seconds that measuring may take."""

    names: tuple[str, ...]
    rules: tuple[str, ...] = ()
    limit_s: float | None = None

    def chosen(self) -> tuple[Backend, ...]:
        """Eager first. Raises UsageError where one is not known, or a module has none."""
        return chosen_backends(self.names, known_backends(self.rules))

    def usable(self, device: str, tell: Callable[[str], None], *, training: bool) -> tuple[Backend, ...]:
        """Those that can run here; of the others is told why not."""
        found = []
        for backend in self.chosen():
            reason = backend.absence(device, training=training)
            if reason is None:
                found.append(backend)
            else:
                tell(f"--backends {backend.name}: left out: {reason}")
        return tuple(found)


class Described(Protocol):
    """A block, as what measures describes it."""

    @property
    def id(self) -> str:
        """Its id."""

    @property
    def kind(self) -> str:
        """Its operator."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Blocks that it takes from."""

    @property
    def attributes(self) -> Mapping[str, Any]:
        """Dimensions, and the functions of torch that it calls."""

    @property
    def alike(self) -> int:
        """Equal for blocks that cost the same."""


def with_backends(
    profile: Profile,
    blocks: Sequence[Described],
    sizes: Sequence[int],
    backends: Sequence[Backend],
    measure: MeasureGroup,
    run: RunWhole,
    asked: BackendsAsked,
    versions: Mapping[str, Mapping[str, str]],
    *,
    keep: Callable[[Profile], None],
    tell: Callable[[str], None],
    progress: Callable[[int, int, str], None] | None = None,
) -> Profile:
    """The profile with rows for every group that backends take, with times of runs of the whole model.

    Args:
        profile: of eager torch, or with rows of backends already, which are not measured again.
        blocks: of the model, as rules see them.
        sizes: micro-batch sizes to measure.
        backends: that can run here.
        measure: builds, compares and times one group.
        run: runs the whole model by a cover and times its groups.
        asked: what is asked, with the seconds that it may take.
        versions: {backend: {library: version}}
        keep: called with the profile so far, before each group.
        tell: called with what a reader must know.
        progress: called before each group with how many are done, how many there are, and which comes.
    """
    graph = OperatorDag(GraphOperator(b.id, b.kind, b.inputs, b.attributes, (b.alike,)) for b in blocks)
    profile, old = renewed(profile, versions)
    if old:
        tell(f"--backends {','.join(old)}: the profile has times of another version of it; they are measured again")
    here = {library: version for own in versions.values() for library, version in own.items()}
    noted = profile.source.model_copy(update={"versions": {**profile.source.versions, **here}})
    log = KernelLog.of(profile.model_copy(update={"source": noted}))
    candidates = candidates_of(graph, backends, profile, sizes)
    limit = Limit(asked.limit_s if asked.limit_s is not None else float("inf"))
    alone = limit.seconds * KERNELS_ALONE
    how: dict[str, Any] = {"keep": keep, "tell": tell, "progress": progress}
    left = measured_groups(log, candidates, measure, over=lambda: limit.elapsed >= alone, **how)
    if log.compile_ns:
        tell(f"backends took {format_ns(log.compile_ns)} to compile, of {limit.elapsed:.1f} s, which no time includes")
    if left:
        tell(_left_out(left))
    if log.found.groups_by_backend and not log.changes:
        tell("no single block was measured by another backend, so that a change of backend is taken to cost nothing")
    alone_s, found = limit.elapsed, log.found
    for size in sizes:
        found = WholeRuns(graph, size, run, left=lambda: limit.seconds - limit.elapsed, **how).settled(found)
    if found.whole_runs != profile.whole_runs:
        tell(f"runs of the whole model took {limit.elapsed - alone_s:.1f} s, with what was compiled again for them")
    return found


def _left_out(left: Sequence[GroupCandidate]) -> str:
    named = ", ".join(each.label for each in left[:3])
    rest = f" and {len(left) - 3} more" if len(left) > 3 else ""
    return f"--measure-limit was over; not measured: {named}{rest}. The same command goes on with these"
