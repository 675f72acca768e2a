"""Covers are chosen by runs of the whole model: what was measured alone may lie, and nothing runs twice."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest

from builders.profiles import profile_of
from pipeplan.errors import ExecutionError
from pipeplan.files import BackendFusion, CostRow, Profile, parse, to_json
from pipeplan.kernels.measuring import matches_of, plain_row, settled_pending
from pipeplan.kernels.operators import OperatorDag
from pipeplan.kernels.whole_runs import MOST_MIXED, MOST_NEAR, NOISE, RUNS, Groups, WholeRuns, best_run
from pipeplan.planning.kernel_choice import choose_kernels

Group = tuple[tuple[int, ...], str]
"""Blocks by number, and the backend."""


def profile(alone: Mapping[Group, int], *, training: bool = False, change_ns: int = 0) -> Profile:
    """A chain of blocks that are not alike, with what groups take alone; backward takes twice that, in two halves."""

    def row(ns: int, backend: str) -> CostRow:
        halves = {"input_grad_ns": ns, "weight_grad_ns": ns} if backend == "eager" else {"backward_ns": 2 * ns}
        return CostRow(microbatch_size=1, backend=backend, forward_ns=ns, **(halves if training else {}))

    length = 1 + max(number for blocks, _ in alone for number in blocks)
    rows = [[row(ns, name) for (own, name), ns in alone.items() if own == (number,)] for number in range(length)]
    plain = profile_of([CostRow(microbatch_size=1, forward_ns=1, backward_ns=1)] * length)
    blocks = tuple(
        block.model_copy(update={"costs": tuple(costs), "dimensions": {"number": number + 1}})
        for number, (block, costs) in enumerate(zip(plain.blocks, rows, strict=True))
    )
    ids = [block.id for block in blocks]
    fusions: dict[tuple[int, ...], list[CostRow]] = {}
    for (own, name), ns in alone.items():
        if len(own) > 1:
            fusions.setdefault(own, []).append(row(ns, name))
    named = [
        BackendFusion(blocks=tuple(ids[number] for number in own), costs=tuple(costs)) for own, costs in fusions.items()
    ]
    mode = "training" if training else "inference"
    how = {"blocks": blocks, "fusions": tuple(named), "backend_change_ns": change_ns, "mode": mode}
    return parse(to_json(plain.model_copy(update=how)), Profile)


@dataclass
class Machine:
    """Runs covers in what groups really take, with ``change`` for each group after one of another backend.

    ``pace`` says how many times as long everything takes in a run, by its number.
    """

    known: Profile
    true: Mapping[Group, int]
    change: int = 0
    fails: Callable[[tuple[Group, ...]], bool] = lambda cover: False
    pace: Callable[[int], float] = lambda number: 1.0
    ran: list[tuple[Group, ...]] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    kept: list[Profile] = field(default_factory=list)
    shown: list[tuple[int, int, str]] = field(default_factory=list)

    def numbered(self, groups: Groups) -> tuple[Group, ...]:
        place = OperatorDag.of(self.known).place
        return tuple((tuple(place[id_] for id_ in blocks), name) for blocks, name in groups)

    def run(self, groups: Groups, size: int) -> list[tuple[int, int]]:
        cover = self.numbered(groups)
        self.ran.append(cover)
        if self.fails(cover):
            raise ExecutionError("wrong\nnumbers")
        found, before = [], None
        pace = self.pace(len(self.ran) - 1)
        for group in cover:
            ns = round(self.true[group] * pace)
            more = self.change * (before not in (None, group[1]))
            found.append((ns + more, 2 * ns if not self.known.is_inference else 0))
            before = group[1]
        return found

    def first(self) -> list[tuple[Group, ...]]:
        """What ran before anything ran again; that some did at most so often is asserted."""
        counts = Counter(self.ran)
        again = [count for count in counts.values() if count > 1]
        assert len(again) <= MOST_NEAR
        assert all(count == RUNS for count in again)
        assert self.ran[: len(counts)] == list(counts)
        return list(counts)

    def show(self, done: int, most: int, what: str) -> None:
        self.shown.append((done, most, what))

    def settled(self, given: Profile | None = None, left: Callable[[], float] = lambda: float("inf")) -> Profile:
        graph = OperatorDag.of(self.known)
        runs = WholeRuns(graph, 1, self.run, self.kept.append, self.told.append, self.show, left)
        return runs.settled(given or self.known)

    def chosen(self, found: Profile, *, ran: bool = True) -> tuple[Group, ...]:
        choice = choose_kernels(found)
        assert choice.ran == ran
        return self.numbered(tuple((match.blocks, match.backend) for match in choice.cover.as_runs(choice.graph)))


TRUE: dict[Group, int] = {
    **{((number,), "eager"): 100 for number in range(6)},
    **{((number,), "a"): 60 if number < 3 else 120 for number in range(6)},
    **{((number,), "b"): 120 if number < 3 else 70 for number in range(6)},
    ((0, 1), "a"): 100,
    (tuple(range(6)), "a"): 500,
}
BEST = (((0, 1), "a"), ((2,), "a"), ((3,), "b"), ((4,), "b"), ((5,), "b"))


def lying(lies: Mapping[Group, float]) -> dict[Group, int]:
    """All is slower alone than in runs, and some is said to be much quicker."""
    return {group: round(1.3 * ns * lies.get(group, 1)) for group, ns in TRUE.items()}


LIES = {((1,), "b"): 0.3, ((4,), "a"): 0.3, ((2,), "b"): 0.2, (tuple(range(6)), "a"): 2.0}


def test_the_best_cover_is_found_though_times_alone_lie() -> None:
    known = profile(lying(LIES))
    machine = Machine(known, TRUE)
    by_rows = {(machine.numbered(((m.blocks, m.backend),))[0]) for m in choose_kernels(known).cover.matches}
    assert by_rows & set(LIES)
    found = machine.settled()
    assert machine.chosen(found) == BEST
    assert choose_kernels(found).cover.total_ns == sum(TRUE[group] for group in BEST)
    assert choose_kernels(found).single["a"] == 500  # at once, which looked twice as slow alone
    first = len(machine.first())
    assert machine.told == []
    assert [done for done, *_ in machine.shown] == [*range(first), *range(len(machine.ran) - first)]
    assert all(done < most for done, most, _ in machine.shown)
    for cover, (*_, label) in zip(machine.ran, machine.shown, strict=True):
        assert all(name in label for _, name in cover)


def test_rows_are_of_runs_or_scaled_by_what_ran_of_their_backend() -> None:
    found = Machine(profile(lying({})), TRUE).settled()
    for match in matches_of(found, OperatorDag.of(found), 1):
        number = OperatorDag.of(found).place[match.blocks[0]]
        group = tuple(range(number, number + len(match.blocks))), match.backend
        assert match.ns == pytest.approx(TRUE[group], abs=1)
    rows = [row for block in found.blocks for row in block.costs]
    assert {row.alone["forward_ns"] for row in rows} == {round(1.3 * ns) for ns in (60, 70, 100, 120)}
    assert {row.backend for row in rows if not row.scaled} >= {"eager", "a", "b"}
    assert parse(to_json(found), Profile) == found


def test_covers_that_took_nearly_as_long_run_again_in_turns() -> None:
    """The machine is quicker for a moment, in which the slower of two runs, or never."""
    true: dict[Group, int] = {((0,), "eager"): 2000, ((0,), "a"): 1000, ((0,), "b"): 1040, ((0,), "c"): 1200}
    for quick in (None, 2):
        machine = Machine(profile(true), true, pace=lambda number, quick=quick: 0.92 if number == quick else 1.0)
        found = machine.settled()
        assert [cover[0][1] for cover in machine.ran] == [
            "eager",
            "a",
            "b",
            "c",
            *("ab" if quick is None else "ba") * 2,
        ]
        assert machine.chosen(found) == (((0,), "a"),)
        assert choose_kernels(found).single == {"eager": 2000, "a": 1000, "b": 1040, "c": 1200}
        best = best_run(found.model_copy(update={"whole_runs": found.whole_runs[:4]}), 1)
        assert best is not None
        assert best.backends == ({"a"} if quick is None else {"b"})


def test_nothing_runs_in_vain_and_another_command_goes_on() -> None:
    known = profile(lying(LIES))
    first = Machine(known, TRUE)
    found = first.settled()
    again = Machine(known, TRUE)
    assert again.settled(found) == found
    assert again.ran == []
    for count in range(len(first.ran)):  # cut off by the limit, and by hand, after so many runs
        begun = Machine(known, TRUE)
        cut = begun.settled(left=lambda begun=begun, count=count: float(count - len(begun.ran)))
        assert begun.told
        goes_on = Machine(known, TRUE)
        assert goes_on.settled(cut).whole_runs == found.whole_runs
        assert [*begun.ran, *goes_on.ran] == first.ran
        stopped = Machine(known, TRUE)

        def interrupted(cover: tuple[Group, ...], machine: Machine = stopped, count: int = count) -> bool:
            if len(machine.ran) > count:
                raise KeyboardInterrupt
            return False

        stopped.fails = interrupted
        with pytest.raises(KeyboardInterrupt):
            stopped.settled()
        assert [run.ns for run in stopped.kept[-1].whole_runs] == [run.ns for run in found.whole_runs[:count]]


def test_what_ends_early_is_chosen_among_covers_that_ran() -> None:
    """Though rows say that another takes less."""
    known = profile(lying(LIES))
    machine = Machine(known, TRUE)
    found = machine.settled(left=lambda: float(4 - len(machine.ran)))
    assert any("chosen among those that ran" in text for text in machine.told)
    choice = choose_kernels(found)
    assert choice.algorithm_1.total_ns < choice.cover.total_ns
    assert not choice.cover.proved
    assert machine.chosen(found) == ((tuple(range(6)), "a"),)
    nothing = Machine(known, TRUE)
    left = nothing.settled(left=lambda: 0.0)
    assert nothing.ran == []
    assert left == known
    assert not choose_kernels(left).ran
    begun = Machine(profile(lying({(tuple(range(6)), "a"): 0.9})), TRUE)
    cut = begun.settled(left=lambda: float(1 - len(begun.ran)))
    assert len(begun.ran) == 1
    assert begun.chosen(cut, ran=False) == ((tuple(range(6)), "a"),)  # alone it was measured whole, too


@pytest.mark.parametrize("most", [6, 4])
def test_what_is_most_of_the_model_takes_what_it_took_alone(most: int) -> None:
    """Small blocks take a third less in runs; what is measured as nearly the whole model was in such a run already."""
    large, rest = tuple(range(most)), {((number,), name): 10 for number in range(most, 6) for name in "ab"}
    true: dict[Group, int] = {((number,), "eager"): 200 for number in range(6)}
    true |= {(large, "a"): 700, (large, "b"): 650, **rest}
    alone = {group: round(1.5 * ns) if group[1] == "eager" else ns for group, ns in true.items()}
    machine = Machine(profile(alone), true)
    found = machine.settled(left=lambda: float(2 - len(machine.ran)))
    assert [{name for _, name in cover} for cover in machine.ran] == [{"eager"}, {"b"}]
    choice = choose_kernels(found)
    assert {name: (ns or 0) // 100 for name, ns in choice.single.items()} == {"eager": 12, "a": 7, "b": 6}
    assert machine.chosen(found)[0] == (large, "b")
    rows = [row for fusion in found.fusions for row in fusion.costs]
    assert [(row.backend, row.forward_ns, row.scaled) for row in rows] == [("a", 700, False), ("b", 650, False)]
    assert all(row.forward_ns == 200 for block in found.blocks for row in block.costs if row.backend == "eager")
    goes_on = Machine(found, true)
    assert goes_on.settled().whole_runs == Machine(profile(alone), true).settled().whole_runs
    assert {name for _, name in goes_on.ran[0]} == {"a"}


def test_several_backends_must_be_better_by_more_than_the_noise() -> None:
    for gain, mixed in ((0.5 * NOISE, False), (2 * NOISE, True)):
        true: dict[Group, int] = {((n,), "eager"): 1000 for n in range(2)} | {((1,), "a"): round(1000 - 2000 * gain)}
        machine = Machine(profile(true), true)
        names = {name for _, name in machine.chosen(machine.settled())}
        assert names == ({"eager", "a"} if mixed else {"eager"})


def test_what_a_change_of_backend_really_takes_is_seen() -> None:
    """It is measured as nothing, and is more than there is to win."""
    known = profile(lying({}), change_ns=1)
    machine = Machine(known, TRUE, change=200)
    found = machine.settled()
    assert machine.chosen(found) == ((tuple(range(6)), "a"),)
    assert len(machine.first()) <= 4 + MOST_MIXED


@pytest.mark.parametrize("dies", [False, True])
def test_a_run_that_fails_is_refused_and_others_go_on(*, dies: bool) -> None:
    bad = ((5,), "b")
    known = profile(lying({}) | {bad: 20})
    machine = Machine(known, TRUE, fails=lambda cover: bad in cover)
    found: Profile | None = None
    if dies:
        machine.fails = lambda cover: (_ for _ in ()).throw(SystemError) if bad in cover else False
        while found is None:
            try:
                found = machine.settled(settled_pending(machine.kept[-2])[1] if machine.kept else None)
            except SystemError:
                label, _ = settled_pending(machine.kept[-2])
                assert label is not None
                assert label.startswith("the whole model by")
    else:
        found = machine.settled()
        assert [text for text in machine.told if "refused: wrong numbers" in text]
    refused = [run for run in found.whole_runs if run.reason]
    assert all(bad in machine.numbered(run.cover) for run in refused)
    assert refused
    assert Counter(bad in cover for cover in machine.ran)[True] == len(refused)
    chosen = machine.chosen(found)
    assert bad not in chosen
    best = best_run(found, 1)
    assert best is not None
    assert best.ns <= 500


def test_what_is_refused_as_a_whole_is_not_chosen_though_alone_it_was_measured() -> None:
    every = ((tuple(range(6)), "a"),)
    machine = Machine(profile(lying({every[0]: 0.1})), TRUE, fails=lambda cover: cover == every)
    assert machine.chosen(machine.settled()) == BEST
    none = Machine(profile(lying({})), TRUE, fails=lambda cover: {name for _, name in cover} == {"a"})
    single = choose_kernels(none.settled()).single
    assert (single["a"], single["b"], single["eager"]) == (None, 570, 600)


def test_training_keeps_forward_and_backward_apart() -> None:
    true = {group: ns for group, ns in TRUE.items() if len(group[0]) < 6}
    machine = Machine(profile({group: 2 * ns for group, ns in true.items()}, training=True), true)
    found = machine.settled()
    assert machine.chosen(found) == BEST
    for block in found.blocks:
        eager = plain_row(block.costs, 1)
        assert eager is not None
        assert (eager.forward_ns, eager.input_grad_ns, eager.weight_grad_ns, eager.backward_ns) == (100, 100, 100, None)
        assert eager.alone == {"forward_ns": 200, "input_grad_ns": 200, "weight_grad_ns": 200}
    assert choose_kernels(found).cover.total_ns == 3 * sum(true[group] for group in BEST)


def test_groups_that_are_alike_take_their_mean() -> None:
    known = profile_of([CostRow(microbatch_size=1, forward_ns=ns, backward_ns=0) for ns in (10, 10, 30)])
    graph = OperatorDag.of(known)
    times = iter([(12, 0), (16, 0), (24, 0)])
    found = WholeRuns(graph, 1, lambda groups, size: [next(times) for _ in groups]).settled(known)
    assert [block.costs[0].forward_ns for block in found.blocks] == [12, 20, 20]  # the first takes of none
    assert found.blocks[0].costs[0].alone == {"forward_ns": 10, "backward_ns": 0}


def test_random_models_end_no_slower_than_one_backend() -> None:
    for seed in range(20):
        draw = random.Random(seed)
        true: dict[Group, int] = {((n,), name): draw.randint(50, 150) for n in range(7) for name in ("eager", "a", "b")}
        true |= {((n, n + 1), "b"): draw.randint(100, 250) for n in range(6)}
        machine = Machine(profile({group: round(ns * draw.uniform(0.5, 1.5)) for group, ns in true.items()}), true)
        machine.change = draw.choice([0, 20])
        found = machine.settled()
        choice = choose_kernels(found)
        assert machine.chosen(found) in machine.ran
        assert all(ns is None or choice.cover.total_ns <= ns for ns in choice.single.values())
        machine.first()
