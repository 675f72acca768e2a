"""Which kernel backend runs each block of a profile: the operator level of Collage, from what was measured."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipeplan.errors import InfeasibleError, SearchTimeoutError, UsageError
from pipeplan.files import Cover, CoveredGroup, Profile, WholeRun
from pipeplan.kernels.covers import KernelCover, KernelMatch, algorithm_1
from pipeplan.kernels.evolution import Evolved
from pipeplan.kernels.measuring import matches_of
from pipeplan.kernels.operators import OperatorDag
from pipeplan.kernels.whole_runs import NOISE, Groups, best_run, cover_of
from pipeplan.schedule.cpsat.cover import exact_cover
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.time_limit import TimeUpError
from pipeplan.units import MAX_NS, require_sum


@dataclass(frozen=True, slots=True)
class GraphLevel:
    """What the graph level came to: the groups that take least, measured beside those of the operator level."""

    library: str
    seed: int
    groups: Groups
    operator_ns: int
    found: Evolved

    @property
    def gain(self) -> float:
        """How many times as long the operator level's cover takes."""
        return self.operator_ns / self.found.ns

    def covered(self, known: Mapping[tuple[tuple[str, ...], str], int]) -> tuple[CoveredGroup, ...]:
        """Its groups with ns: as they are ``known`` to take alone, where they are.

        Those of the library that were not measured alone share what the others leave of the whole, by their blocks.
        """
        open_ = sum(len(blocks) for blocks, name in self.groups if (blocks, name) not in known)
        left = max(0, self.found.ns - sum(known.get(group, 0) for group in self.groups))
        return tuple(
            CoveredGroup(
                blocks=blocks,
                backend=name,
                ns=known[blocks, name] if (blocks, name) in known else left * len(blocks) // open_,
            )
            for blocks, name in self.groups
        )

    def figures(self) -> dict[str, Any]:
        """As ``pipeplan kernels --graph-level --json`` prints them in ``graph_level``."""
        return {
            "library": self.library,
            "seed": self.seed,
            "cover": [{"blocks": list(blocks), "backend": name} for blocks, name in self.groups],
            "operator_level_ns": self.operator_ns,
            "measured_ns": self.found.ns,
            "gain": self.gain,
            "curve": [
                {"best_ns": each.best_ns, "mean_ns": each.mean_ns, "measured": each.measured}
                for each in self.found.curve
            ],
            "num_failed": len(self.found.failures),
            "interrupted": self.found.interrupted,
        }


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """The cover that was found, and what it is compared with.

    ``single`` is what the whole model takes by one backend, None where that does not run all of it; ``algorithm_1`` the
    cover of the thesis's programme, and ``lower_bound_ns`` what every cover takes at least. Where the cover ``ran``, it
    is one of those by which the whole model ran, and takes what it took then. ``level`` is what the graph level came
    to, where it was measured (:mod:`pipeplan.planning.kernel_evolution`): the file then has its cover.
    """

    profile: Profile
    size: int
    matches: tuple[KernelMatch, ...]
    cover: KernelCover
    algorithm_1: KernelCover
    lower_bound_ns: int
    single: Mapping[str, int | None]
    ran: bool = False
    level: GraphLevel | None = None

    @property
    def graph(self) -> OperatorDag:
        """The profile's blocks."""
        return OperatorDag.of(self.profile)

    @property
    def of_blocks(self) -> dict[str, dict[str, int | None]]:
        """{block: {backend: what the block alone takes by it, in ns; None where that does not run it}}"""
        own = {(match.blocks[0], match.backend): match.ns for match in self.matches if len(match.blocks) == 1}
        names = (*self.single, *self.refused)
        return {id_: {name: own.get((id_, name)) for name in names} for id_ in self.graph.order}

    @property
    def refused(self) -> list[str]:
        """Backends of which every group at this size was refused."""
        names = {each.backend for each in self.profile.refusals if each.microbatch_size == self.size}
        return sorted(names - self.single.keys())

    @property
    def file(self) -> Cover:
        """The cover as a file.

        Raises:
            SumError: it takes longer than a file can say.
        """
        if self.level is not None:
            known = {(match.blocks, match.backend): match.ns for match in self.matches}
            found = {"predicted_ns": self.level.found.ns, "cover": self.level.covered(known)}
            return replace(self, level=None).file.model_copy(update=found)
        remedy = "choose fewer samples"
        require_sum(self.profile.where, "times of all blocks", self.cover.total_ns, "ns", MAX_NS, remedy)
        return Cover(
            name=self.profile.name,
            profile_sha256=self.profile.fingerprint,
            microbatch_size=self.size,
            predicted_ns=self.cover.total_ns,
            cover=tuple(
                CoveredGroup(blocks=match.blocks, backend=match.backend, ns=match.ns)
                for match in self.cover.as_runs(self.graph)
            ),
        )

    def figures(self) -> dict[str, Any]:
        """As ``pipeplan kernels --json`` prints them."""
        return {
            "profile": self.profile.name,
            "mode": self.profile.mode,
            "microbatch_size": self.size,
            "blocks": list(self.graph.order),
            "backends": [*self.single, *self.refused],
            "block_ns": self.of_blocks,
            "cover": [
                {"blocks": list(match.blocks), "backend": match.backend, "ns": match.ns}
                for match in self.cover.as_runs(self.graph)
            ],
            "predicted_ns": self.cover.total_ns,
            "num_changes": self.cover.num_changes,
            "change_ns": self.profile.backend_change_ns,
            "single_ns": {**self.single, **dict.fromkeys(self.refused)},
            "ran": self.ran,
            "status": "optimal" if self.cover.proved else "feasible",
            "lower_bound_ns": self.lower_bound_ns,
            "algorithm_1_ns": self.algorithm_1.total_ns,
            "num_groups": len(self.matches),
            "num_refused": sum(each.microbatch_size == self.size for each in self.profile.refusals),
            **({} if self.level is None else {"graph_level": self.level.figures()}),
        }


def choose_kernels(profile: Profile, size: int | None = None, budget: Budget | None = None) -> KernelChoice:
    """The cheapest cover of a profile's blocks by backends; of those by which the whole model ran, if it did.

    Args:
        profile: with rows of backends, measured or written by hand.
        size: micro-batch size; by default the largest for which there is a cover.
        budget: time for all of it; the cover is that of Algorithm 1 where none is left for the proof.

    Raises:
        UsageError: there are no rows of this size.
        InfeasibleError: no groups that were measured have every block once.
        SearchTimeoutError: there was no time for any cover.
        KeyboardInterrupt: the budget was interrupted before there was one.
    """
    sizes = sorted({row.microbatch_size for block in profile.blocks for row in block.costs})
    if size is not None and size not in sizes:
        raise UsageError(f"--microbatch-size {size}: the profile has {', '.join(map(str, sizes))}; choose one of these")
    budget = budget or Budget(30.0)
    try:
        with budget.enforced():
            graph = OperatorDag.of(profile)
            size, matches = _largest(profile, graph, sizes if size is None else [size])
            change = profile.backend_change_ns
            first = algorithm_1(graph, matches, change)
            single = {name: _alone(graph, matches, name) for name in sorted({match.backend for match in matches})}
            known = {(match.blocks, match.backend) for match in matches}
            run = best_run(profile, size, known)
            single |= _single_runs(profile, size, known)
    except TimeUpError:
        if budget.interrupted:
            raise KeyboardInterrupt from None
        raise SearchTimeoutError(f"no cover was found in {budget.elapsed:.1f} s; raise --time-limit") from None
    cover, bound = first, first.total_ns
    if not first.proved:
        cover, bound = exact_cover(graph, matches, change, budget, first)
    ran = run is not None
    if run is not None:
        at_once = _at_once(profile, graph, matches, run)
        cover, ran = at_once or cover_of(graph, run, change), at_once is None
        cover = replace(cover, proved=cover.total_ns <= bound)
    return KernelChoice(profile, size, matches, cover, first, min(bound, cover.total_ns), single, ran=ran)


def _largest(profile: Profile, graph: OperatorDag, sizes: list[int]) -> tuple[int, tuple[KernelMatch, ...]]:
    """The largest size at which all blocks can run, or the only one; and what was measured at it.

    Raises:
        InfeasibleError: of several sizes there is none.
    """
    for size in reversed(sizes):
        matches = matches_of(profile, graph, size)
        covered = {id_ for match in matches for id_ in match.blocks}
        if len(sizes) == 1 or len(covered) == len(graph):
            return size, matches
    raise InfeasibleError(f"at none of the micro-batch sizes {', '.join(map(str, sizes))} backends run every block")


def _at_once(profile: Profile, graph: OperatorDag, matches: Sequence[KernelMatch], run: WholeRun) -> KernelCover | None:
    """A cover of all blocks at once, better than a run by more than the noise: alone, it was measured whole, too."""
    refused = {each.cover for each in profile.whole_runs if each.reason and each.microbatch_size == run.microbatch_size}
    own = [
        match
        for match in matches
        if len(match.blocks) == len(graph)
        and match.ns < run.ns * (1 - NOISE)
        and ((match.blocks, match.backend),) not in refused
    ]
    return KernelCover.of(graph, [min(own, key=lambda match: match.ns)], 0) if own else None


def _single_runs(profile: Profile, size: int, known: Collection[tuple[tuple[str, ...], str]]) -> dict[str, int | None]:
    """{backend: what the whole model took by it alone}, where it has run; None where all its runs were refused."""
    found: dict[str, int | None] = {}
    for name in {name for _, name in known}:
        run = best_run(profile, size, [group for group in known if group[1] == name])
        tried = [each for each in profile.whole_runs if each.microbatch_size == size and each.backends == {name}]
        if run is not None:
            found[name] = run.ns
        elif tried:
            found[name] = None
    return found


def _alone(graph: OperatorDag, matches: tuple[KernelMatch, ...], backend: str) -> int | None:
    try:
        return algorithm_1(graph, [match for match in matches if match.backend == backend]).total_ns
    except InfeasibleError:
        return None
