"""Groups are measured once each, the dearest first; what refuses is noted, and nothing measured is lost."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from builders.profiles import profile_of
from pipeplan.errors import ExecutionError
from pipeplan.files import CostRow, Profile, parse, to_json
from pipeplan.kernels.backend import Backend
from pipeplan.kernels.measuring import KernelLog, candidates_of, measured_groups, renewed, settled_pending
from pipeplan.kernels.operators import OperatorDag
from pipeplan.kernels.rules import PatternRule

TIMES = (100, 300, 100, 300)


class Pairs(PatternRule):
    def fusion_rule(self, graph: OperatorDag, kind: str, source: str, sink: str) -> bool:
        return len(graph.between(source, sink)) <= 2


BACKENDS = (Backend("eager", rule=PatternRule()), Backend("pairs", rule=Pairs()))


def chain() -> Profile:
    return profile_of([CostRow(microbatch_size=1, forward_ns=ns, backward_ns=2 * ns) for ns in TIMES])


class Measuring:
    """Counts what it is asked for; what is in ``fails`` raises."""

    def __init__(self, fails: dict[tuple[str, ...], BaseException] | None = None) -> None:
        self.asked: list[tuple[str, ...]] = []
        self.fails = fails or {}

    def __call__(self, blocks: Sequence[str], size: int, backend: str) -> tuple[CostRow, int | None]:
        self.asked.append(tuple(blocks))
        if (error := self.fails.get(tuple(blocks))) is not None:
            raise error
        row = CostRow(microbatch_size=size, backend=backend, forward_ns=10 * len(blocks), backward_ns=5, compile_ns=7)
        return row, 4 if len(blocks) == 1 else None


def run(profile: Profile, measure: Measuring, kept: list[Profile] | None = None) -> tuple[KernelLog, list[str]]:
    log, told = KernelLog.of(profile), list[str]()
    candidates = candidates_of(OperatorDag.of(profile), BACKENDS, profile, [1])
    keep = [] if kept is None else kept
    measured_groups(log, candidates, measure, keep=keep.append, tell=told.append)
    return log, told


def test_what_another_version_of_a_library_took_is_measured_again() -> None:
    log, _ = run(chain(), Measuring())
    source = log.profile.source.model_copy(update={"versions": {"torch": "2", "of-pairs": "1"}})
    found = log.found.model_copy(update={"source": source})
    for versions in ({"of-pairs": "1"}, {}, {"other": "2"}):
        assert renewed(found, {"pairs": versions}) == (found, ())
    again, names = renewed(found, {"eager": {}, "pairs": {"of-pairs": "2"}})
    assert names == ("pairs",)
    assert again.groups_by_backend == {}
    assert [block.costs for block in again.blocks] == [block.costs for block in chain().blocks]
    measure = Measuring()
    assert run(again, measure)[0].found.fusions == log.found.fusions
    assert measure.asked


def test_what_compiles_slowly_comes_after_what_is_as_dear() -> None:
    profile, rule = chain(), Pairs()
    backends = Backend("slow", rule=rule, compiles_slowly=True), Backend("quick", rule=rule)
    found = candidates_of(OperatorDag.of(profile), backends, profile, [1])
    for of_one in (True, False):
        own = [each for each in found if (len(each.groups[0]) == 1) is of_one]
        assert [each.eager_ns for each in own] == sorted((each.eager_ns for each in own), reverse=True)
        for one in own:
            alike = [each.backend for each in own if each.eager_ns == one.eager_ns]
            assert alike == sorted(alike)  # quick, slow


def test_groups_and_blocks_are_measured_in_turn() -> None:
    profile, backends = chain(), (Backend("all", rule=Pairs(), whole=True),)
    found = candidates_of(OperatorDag.of(profile), backends, profile, [1])
    sizes = [len(each.groups[0]) > 1 for each in found]
    both = 2 * min(sizes.count(True), sizes.count(False))
    assert both > 2
    assert sizes[:both] == [True, False] * (both // 2)


def test_alike_groups_are_measured_once_and_what_is_dearest_first() -> None:
    profile, measure = chain(), Measuring()
    log, told = run(profile, measure)
    first = profile.blocks[0].id
    alike = OperatorDag.of(profile)
    assert len(measure.asked) == len({alike.likeness(group) for group in measure.asked})
    assert measure.asked[-1] == (first,)
    found = log.found
    assert found.groups_by_backend == {"pairs": 7}
    assert (found.backend_change_ns, log.compile_ns) == (4, 7 * len(measure.asked))
    assert told == []
    assert parse(to_json(found), Profile) == found
    assert found.of_eager.blocks == profile.blocks


def test_progress_says_what_comes_and_what_is_left() -> None:
    profile, shown = chain(), list[tuple[int, int, str]]()
    candidates, half = candidates_of(OperatorDag.of(profile), BACKENDS, profile, [1]), Measuring()
    log = KernelLog.of(profile)
    left = measured_groups(log, candidates, half, over=lambda: len(half.asked) == 3)
    assert len(left) == len(candidates) - 3 > 0
    rest = Measuring()
    measured_groups(log, candidates, rest, progress=lambda *each: shown.append(each))
    assert [(done, of) for done, of, _ in shown] == [(number, len(left)) for number in range(len(left))]
    assert [label for *_, label in shown] == [each.label for each in left]
    assert all(blocks[0] in label for blocks, (*_, label) in zip(rest.asked, shown, strict=True))


def test_the_profile_is_the_log() -> None:
    log, _ = run(chain(), Measuring())
    again = Measuring()
    found, _ = run(log.found, again)
    assert again.asked == []
    assert found.found == log.found


def test_what_refuses_is_noted_and_the_others_go_on() -> None:
    last = (chain().blocks[0].id,)
    log, told = run(chain(), Measuring({last: ExecutionError("two\nlines")}))
    assert [each.reason for each in log.found.refusals] == ["two lines"] * sum(
        each.blocks == last for each in log.found.refusals
    )
    assert len(told) == 1
    assert "refused: two lines" in told[0]
    assert log.found.fusions


def test_an_interruption_loses_nothing() -> None:
    kept: list[Profile] = []
    third: tuple[str, ...] = ()
    probe = Measuring()
    run(chain(), probe)
    third = probe.asked[2]
    with pytest.raises(KeyboardInterrupt):
        run(chain(), Measuring({third: KeyboardInterrupt()}), kept)
    assert kept[-1].groups_by_backend
    assert kept[-1].refusals == ()
    again = Measuring()
    log, _ = run(kept[-1], again)
    assert again.asked == probe.asked[2:]
    assert log.found.groups_by_backend == {"pairs": 7}


def test_a_death_refuses_the_group() -> None:
    """Of the profile as it was written last, before the group was built."""
    kept: list[Profile] = []
    run(chain(), Measuring(), kept)
    label, settled = settled_pending(kept[1])
    assert label is not None
    assert label.startswith("pairs: ")
    assert {each.reason for each in settled.refusals} == {"the process died while it was built or run"}
    again = Measuring()
    log, _ = run(settled, again)
    assert len(again.asked) == len(kept) - 3  # without the first, which was measured, and the one that it died of
    assert log.found.refusals == settled.refusals
    assert settled_pending(log.found) == (None, log.found)


def test_what_is_left_when_time_is_over_is_said() -> None:
    profile, measure = chain(), Measuring()
    candidates = candidates_of(OperatorDag.of(profile), BACKENDS, profile, [1])
    left = measured_groups(KernelLog.of(profile), candidates, measure, over=lambda: len(measure.asked) == 2)
    assert len(left) == len(candidates) - 2
    for of_one in (True, False):
        measured, others = (
            [each.eager_ns for each in own if (len(each.groups[0]) == 1) is of_one] for own in (candidates[:2], left)
        )
        assert min(measured) >= max(others)
