"""The graph level of Collage on a profile: operators of the cheapest cover handed to a library of whole graphs.

What covers take is measured by a function that is passed; see :mod:`pipeplan.kernels.evolution`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from statistics import median

from pipeplan.errors import ExecutionError, InfeasibleError, UsageError, choose_from
from pipeplan.files.profile import EAGER
from pipeplan.kernels.backend import Backend, known_backends
from pipeplan.kernels.evolution import Evolution, Generation, Genes, given_to_library, open_operators
from pipeplan.kernels.whole_runs import NOISE, Groups
from pipeplan.planning.kernel_choice import GraphLevel, KernelChoice
from pipeplan.search_constants import KERNELS_TURNS


@dataclass(frozen=True, slots=True)
class EvolutionAsked:
    """Which library of whole graphs (None: the best of those that are known), how and where to measure, for how long.

    ``device`` is ``cpu`` or ``cuda``.
    """

    library: str | None = None
    seed: int = 0
    repeats: int = 5
    threads: int | None = None
    limit_s: float = 600.0
    device: str = "cpu"
    rules: tuple[str, ...] = ()

    def chosen(self, choice: KernelChoice) -> tuple[str, dict[str, Backend]]:
        """The library, and the backends that the profile knows.

        Raises:
            UsageError: it has times of no such library, or one cannot run here.
        """
        known = known_backends(self.rules)
        if unknown := sorted(choice.single.keys() - known.keys()):
            raise UsageError(
                f"--graph-level: the profile has times of {', '.join(unknown)}, which nothing here builds; give "
                "--backend-rules pkg.mod, as profile had it"
            )
        library = library_of(choice, [name for name, each in known.items() if each.whole], self.library)
        backends = {name: known[name] for name in choice.single}
        for name, each in backends.items():
            reason = each.absence(self.device, training=not choice.profile.is_inference)
            if reason is not None and (name == library or any(match.backend == name for match in choice.cover.matches)):
                raise UsageError(f"--graph-level: backend {name}: {reason}")
        return library, backends


def library_of(choice: KernelChoice, wholes: Sequence[str], named: str | None) -> str:
    """The library of whole graphs: as named, or that which takes least alone of those that the profile knows.

    Raises:
        UsageError: the profile has times of none, or not of the one that is named.
    """
    known = [name for name in wholes if name in choice.single]
    if named is not None and named not in known:
        raise UsageError(
            f"--library {named}: no library of whole graphs that the profile has times of; {choose_from(named, known)}"
        )
    if not known:
        raise UsageError(
            f"--graph-level: the profile has times of no library of whole graphs ({', '.join(wholes)}); profile it "
            "with --backends and one of them"
        )
    alone = {name: choice.single[name] for name in known}
    return named or min(known, key=lambda name: (alone[name] is None, alone[name] or 0))


def graph_level(
    choice: KernelChoice,
    library: str,
    measure: Callable[[Groups], int],
    *,
    seed: int = 0,
    over: Callable[[], bool] = lambda: False,
    tell: Callable[[Generation], None] = lambda generation: None,
) -> GraphLevel:
    """Evolve the cheapest cover; its own time, and that of all by the library, are among the first that are measured.

    The best of many that were measured once was also the luckiest: it and the operator level's are measured again in
    turns, and it is the answer only where it is then better by more than the noise: once where it was interrupted, and
    where that is interrupted, too, the operator level's is the answer.

    Raises:
        ExecutionError: the operator level's cover cannot run as a whole.
    """
    graph, cover = choice.graph, choice.cover.as_runs(choice.graph)
    bits = open_operators(graph, cover, library)
    own = {match.blocks[0]: match for match in sorted(choice.matches, key=lambda m: -m.ns) if len(match.blocks) == 1}

    def groups_of(genes: Genes) -> Groups:
        if not any(genes):
            return tuple((match.blocks, match.backend) for match in cover)
        return given_to_library(
            graph, cover, library, compress(bits, genes), lambda id_: own[id_].backend if id_ in own else EAGER
        )

    def measured(genes: Genes) -> int:
        return measure(groups_of(genes))

    first = [tuple([False] * len(bits)), tuple([True] * len(bits))]
    found = Evolution(measured, seed, over=over, tell=tell).run(first)
    if found.genes != first[0]:
        try:
            turns = [
                (measured(first[0]), measured(found.genes)) for _ in range(1 if found.interrupted else KERNELS_TURNS)
            ]
            found.first_ns, found.ns = (round(median(each)) for each in zip(*turns, strict=True))
        except KeyboardInterrupt:
            found.interrupted, found.ns = True, found.first_ns
        except (ExecutionError, InfeasibleError) as error:
            found.failures[found.genes], found.ns = str(error), found.first_ns
    if found.ns > found.first_ns * (1 - NOISE):
        found.genes, found.ns = first[0], found.first_ns
    return GraphLevel(library, seed, groups_of(found.genes), found.first_ns, found)
