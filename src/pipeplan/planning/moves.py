"""Stages of different widths from good plans by moves: of blocks and devices between stages, and of a stage's own ways.

From a plan whose stages are a chain: its longest stage gives a block towards a shorter one, each stage between passing
one on; stages give devices to each other; a stage splits its blocks over its devices otherwise, or computes less again.
What is shorter is kept, and moved on. So uniform layouts become uneven, as in Alpa and GraphPipe, and stages on devices
of kinds with profiles of their own get the blocks that suit these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, chain, pairwise, product

import numpy as np

from pipeplan.costs.zero import Experts, Zero
from pipeplan.errors import PipeplanError
from pipeplan.files import PlacedStage, Placement
from pipeplan.partition.chain.costs import Array, FloatArray
from pipeplan.partition.problem import Pricing
from pipeplan.planning.candidates import PlacementCandidate, any_stages, is_large, kept_choice, open_splits, sharings
from pipeplan.planning.planners import AUTO_PLANNER
from pipeplan.planning.request import Request
from pipeplan.planning.trials import PlanSearch, PlanStep, Trial
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.search_constants import MOVES_LAYOUTS, MOVES_LONGEST, MOVES_NEAR, MOVES_SHARE, MOVES_SHORTEST
from pipeplan.time_limit import checked, checkpoint
from pipeplan.workload.elements import again_of, recompute_of
from pipeplan.workload.workload import Workload


@dataclass(frozen=True)
class Moves(PlanStep):
    """Moves on the best plan, each looked at with known schedules: the first that is shorter is the next one.

    So are the best plans of other layouts that take at most ``near`` times as long, of ``layouts`` in all: which one
    gains most is not known before. In every turn each has a ``share`` of the time that is left. Blocks move from the
    ``longest`` devices to the ``shortest``.
    """

    share: float = MOVES_SHARE
    longest: int = MOVES_LONGEST
    shortest: int = MOVES_SHORTEST
    near: float = MOVES_NEAR
    layouts: int = MOVES_LAYOUTS
    name = "moves"
    of = "what is left, each layout in each turn"
    when = (
        "in turn with the search; the best plan of each of {layouts} layouts, at most {near} times as long as the best "
        "one, of stages in a line; --placement auto, or devices that differ; without --planner, --rules, --slices, "
        "--max-span"
    )
    in_turn = True

    def run(self, search: PlanSearch) -> None:
        """Move as long as that makes it shorter."""
        if not may_move_blocks(search.request):
            return
        for given in self._given(search):
            with search.budget.share(self.share * search.budget.remaining) as share, share.ended():
                moved: Trial | None = given
                while moved is not None:
                    checkpoint()
                    moved = self._moved(search, share, moved)

    def _given(self, search: PlanSearch) -> list[Trial]:
        """The best plan of each of the best layouts."""
        best, found = search.best, dict[object, Trial]()
        most = self.near * (0 if best is None else best.value_ns or 0)
        known = [(trial.value_ns, trial) for trial in search.done if trial.value_ns is not None]
        for value, trial in sorted(known, key=lambda each: (each[0], each[1] is not best)):
            if value <= most and len(found) < self.layouts:
                found.setdefault(_layout(trial), trial)
        return [*found.values()]

    def _moved(self, search: PlanSearch, share: Budget, given: Trial) -> Trial | None:
        """A shorter plan one move from a given one, found with a share of the time; None where there is none."""
        best, request = search.best, search.request
        if best is None or given.best is None or given.value_ns is None or given.value_ns <= search.bound_ns:
            return None
        for candidate in moves(request, given.candidate, given.best.workload, self.longest, self.shortest):
            checkpoint()
            if share.expired:
                return None
            if not search.is_new(candidate):
                continue
            with suppress(PipeplanError):  # it does not fit, or has no costs
                trial = Trial.of(request, candidate, search.steps)
                if trial.hopeless(best):
                    continue
                trial.look_within(request, share, candidate.usual if is_large(request) else None)
                if trial.value_ns is not None and trial.value_ns < given.value_ns:
                    search.trials.append(trial)
                    search.report(trial)
                    return trial
        return None


def _layout(trial: Trial) -> object:
    """What moves of blocks do not change."""
    choice = kept_choice(trial.candidate)
    return trial.candidate.placement.strategy if choice is None else choice.layout


def may_move_blocks(request: Request) -> bool:
    """Whether stages are the search's to choose: not given, a planner's, of rules, or for forwards in parts.

    Nor those of a strategy that is asked for, which by moves might beat what a search of all strategies moves; but
    where devices differ, for there a strategy's own cut does not know what each block takes where.
    """
    said = request.rules, request.max_span, request.num_parted, request.spread
    own = isinstance(request.placement, Placement) or request.planner != AUTO_PLANNER
    strategy = request.placement != "auto" and not request.uneven
    return not (own or strategy or request.tunes or any(said))


def moves(
    request: Request, candidate: PlacementCandidate, workload: Workload, longest: int, shortest: int
) -> Iterator[PlacementCandidate]:
    """What is one move from a candidate, those first that take most from the ``longest`` devices; the same samples.

    None where stages are no chain, or are of several routes or sizes.
    """
    stages = candidate.placement.stages
    groups = {stage.devices for stage in stages}
    order = request.profile.topological_order()
    whole = tuple(block for stage in stages for block in stage.blocks)
    if candidate.placement.num_routes > 1 or whole != order or candidate.given:
        return
    if len(set(chain.from_iterable(groups))) < sum(map(len, groups)):  # some are on parts of others' devices
        return
    if any(each.configurations or each.num_parted for each in stages):
        return
    if any(each.microbatch_size not in (None, candidate.batch.microbatch_size) for each in stages):
        return
    level = _levelled(request, candidate, workload)
    changed = chain([] if level is None else [level], _blocks_moved(stages, workload, longest, shortest))
    if len(groups) == len(stages) and any_stages(request):  # of thousands of devices there are ever so many
        further = _reshaped(request, candidate, workload), _devices_moved(request, candidate, workload)
        changed = chain(changed, *further)
    for each in changed:
        placement = candidate.placement.model_copy(update={"stages": each})
        yield replace(candidate, placement=placement, source=_named(candidate.source))


def _named(source: str) -> str:
    return source if source.endswith(" moved") else f"{source}, moved"


_Stages = tuple[PlacedStage, ...]


def _loads(stages: Sequence[PlacedStage], workload: Workload) -> list[int]:
    """[stage] ns of work of its devices for a micro-batch."""
    work = workload.work_of_stages
    of_devices = Counter[int]()
    for number, stage in enumerate(stages):
        of_devices[stage.devices[0]] += work[number]
    return [of_devices[stage.devices[0]] for stage in stages]


def _levelled(request: Request, candidate: PlacementCandidate, workload: Workload) -> _Stages | None:
    """Blocks moved one after another from the device with most work, by what each takes where it comes, without a look.

    Each time to where the longest of all devices is the shortest then; None where nothing is moved.
    """
    stages, size = candidate.placement.stages, candidate.batch.microbatch_size
    before = _work_before(request, stages, workload, size)
    groups = list(dict.fromkeys(stage.devices for stage in stages))
    place = np.array([groups.index(stage.devices) for stage in stages])
    ends = np.array(list(accumulate((len(each.blocks) for each in stages), initial=0)))
    found = levelled(ends, before, place)
    return None if found is None else _cut(stages, found.tolist())


def levelled(ends: Array, before: Array | FloatArray, place: Array) -> Array | None:
    """Where stages end once blocks are moved so; ``before`` [stage, block] is all work before, on ``place`` [stage]."""
    stages, count = np.arange(len(place)), int(place.max()) + 1

    def loads(ends: Array) -> Array | FloatArray:
        """[group] ns, for several cuts at once [..., group]."""
        own = before[stages, ends[..., 1:]] - before[stages, ends[..., :-1]]
        return np.stack([own[..., place == group].sum(axis=-1) for group in range(count)], axis=-1)

    moved = False
    for _ in range(int(ends[-1])):
        checkpoint()
        now = loads(ends)
        sources = [n for n in range(len(place)) if place[n] == now.argmax() and ends[n + 1] - ends[n] > 1]
        pairs = [(source, target) for source in sources for target in range(len(place)) if target != source]
        if not pairs:
            break
        cuts = np.stack([ends + _shift(len(place), *pair) for pair in pairs])
        after = [*map(_unevenness, loads(cuts))]
        least = min(range(len(pairs)), key=after.__getitem__)
        if after[least] >= _unevenness(now):
            break
        ends, moved = cuts[least], True
    return ends if moved else None


def _unevenness(loads: Array | FloatArray) -> tuple[float, float]:
    """The most, and of equals how far all are apart."""
    return float(loads.max()), float((loads.astype(np.float64) ** 2).sum())


def _work_before(request: Request, stages: _Stages, workload: Workload, size: int) -> Array:
    """[stage, block] ns of a micro-batch's work of all blocks before one, if they ran as that stage does."""
    order = request.profile.topological_order()
    again = [each for stage in stages for each in again_of(stage.recompute or False, len(stage.blocks))]
    kinds = list(dict.fromkeys(again))
    way_of = np.array([kinds.index(each) for each in again])

    @cache
    def before(own: Pricing) -> Array:
        """[block] of a stage that runs blocks so, but for what each recomputes."""
        ways = [own._replace(recompute=each).costs(request.profile, order) for each in kinds]
        times = np.array([[cost.compute_ns for cost in way] for way in ways], dtype=np.int64)
        return np.concatenate(([0], times[way_of, np.arange(len(again))].cumsum()))

    rows = []
    for placed, stage in checked(zip(stages, workload.stages, strict=True), 64):
        split = placed.shards, Zero.of(stage), placed.context, Experts.of(stage)
        own = Pricing(size // placed.replicas, False, *split, exchange=placed.context_exchange)
        rows.append(before(own._replace(speed=stage.speed, kinds=stage.kinds)))
    return np.stack(rows)


def _shift(count: int, source: int, target: int) -> Array:
    """[bound] by what it moves where one block goes from a stage towards another, each stage between passing one on."""
    found = np.zeros(count + 1, dtype=np.int64)
    found[min(source, target) + 1 : max(source, target) + 1] = 1 if target < source else -1
    return found


def _blocks_moved(
    stages: Sequence[PlacedStage], workload: Workload, longest: int, shortest: int
) -> tuple[_Stages, ...]:
    """A block less for a stage of the longest devices, and one more for one of the shortest; all between shift."""
    loads = _loads(stages, workload)
    by_load = sorted(range(len(stages)), key=lambda number: -loads[number])
    devices = list(dict.fromkeys(stages[number].devices for number in by_load))
    slow, quick = devices[:longest], devices[::-1][:shortest]
    sources = [number for number in by_load if stages[number].devices in slow and len(stages[number].blocks) > 1]
    targets = [number for number in by_load[::-1] if stages[number].devices in quick]
    pairs = [(a, b) for a, b in product(sources, targets) if loads[a] > loads[b]]
    pairs += [(a, b) for a in sources for b in (a - 1, a + 1) if 0 <= b < len(stages) and (a, b) not in pairs]
    pairs.sort(key=lambda pair: (loads[pair[1]] - loads[pair[0]], abs(pair[0] - pair[1])))
    return tuple(_shifted(stages, *pair) for pair in pairs)


def _shifted(stages: Sequence[PlacedStage], source: int, target: int) -> _Stages:
    """One block from a stage towards another."""
    ends = np.array(list(accumulate((len(each.blocks) for each in stages), initial=0)))
    return _cut(stages, (ends + _shift(len(stages), source, target)).tolist())


def _cut(stages: Sequence[PlacedStage], ends: Sequence[int]) -> _Stages:
    """The same stages with other blocks, each of which is computed again as before."""
    blocks = [block for each in stages for block in each.blocks]
    again = [each for stage in stages for each in again_of(stage.recompute or False, len(stage.blocks))]
    return tuple(
        stage.model_copy(
            update={
                "blocks": tuple(blocks[begin:end]),
                "recompute": None if stage.recompute is None else recompute_of(tuple(again[begin:end])),
            }
        )
        for stage, (begin, end) in zip(stages, pairwise(ends), strict=True)
    )


def _ways(
    request: Request, candidate: PlacementCandidate, stage: PlacedStage, count: int
) -> Iterator[dict[str, object]]:
    """How a stage may run on so many devices: shards, replicas, and what these divide."""
    splits = sorted({each.shards for each in open_splits(request) if each.context == each.expert == 1})
    if stage.context > 1 or stage.expert > 1:
        return
    for shards in splits:
        replicas, rest = divmod(count, shards)
        if rest or candidate.batch.microbatch_size % replicas:
            continue
        for zero in sharings(request, replicas, shards):
            keys = {"zero": 0, "zero_group": None, "unshard_every": None, "reduce_every": None}
            yield keys | {"shards": shards, "replicas": replicas} | zero.keys(replicas)


def _reshaped(request: Request, candidate: PlacementCandidate, workload: Workload) -> Iterator[_Stages]:
    """A stage otherwise on the same devices, the longest first."""
    stages, loads = candidate.placement.stages, _loads(candidate.placement.stages, workload)
    for number in sorted(range(len(stages)), key=lambda number: -loads[number]):
        stage = stages[number]
        for way in _ways(request, candidate, stage, len(stage.devices)):
            if any(getattr(stage, key) != value for key, value in way.items()):
                yield (*stages[:number], stage.model_copy(update=way), *stages[number + 1 :])


def _devices_moved(request: Request, candidate: PlacementCandidate, workload: Workload) -> Iterator[_Stages]:
    """Devices of the shortest stages for the longest; all numbered anew in the stages' order."""
    stages, loads = candidate.placement.stages, _loads(candidate.placement.stages, workload)
    line = [device for stage in stages for device in stage.devices]
    by_load = sorted(range(len(stages)), key=lambda number: -loads[number])
    for source, target in product(by_load[::-1], by_load):
        if loads[source] >= loads[target]:
            continue
        for given in checked(range(1, len(stages[source].devices)), 1):
            counts = [len(each.devices) for each in stages]
            counts[source], counts[target] = counts[source] - given, counts[target] + given
            own = [list(_ways(request, candidate, stages[at], counts[at])) for at in (source, target)]
            if not all(own):
                continue
            ends = list(accumulate(counts, initial=0))
            where = [tuple(line[begin:end]) for begin, end in pairwise(ends)]
            for less, more in product(*own):
                changes = {source: less, target: more}
                yield tuple(
                    stage.model_copy(update={"devices": devices, **changes.get(number, {})})
                    for number, (stage, devices) in enumerate(zip(stages, where, strict=True))
                )
