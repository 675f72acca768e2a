"""Comparing schedules: rows over both ways of backward, what does not fit, interruptions, the table's notes."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest

import pipeplan as face
from builders.requests import request_of
from pipeplan.errors import InfeasibleError, PipeplanError, SearchTimeoutError, UsageError
from pipeplan.examples import ShapeCosts, shape
from pipeplan.files import CostRow, Profile
from pipeplan.planning import comparison
from pipeplan.planning.build_plan import Result
from pipeplan.planning.comparison import OURS, Comparison, NotThere, compare, compare_on
from pipeplan.planning.request import Batch, Request
from pipeplan.planning.steps import search_plan
from pipeplan.reporting.tables import print_comparison
from pipeplan.reporting.terminal import bottleneck, print_stages
from pipeplan.schedule.classic import CLASSIC, Classic
from pipeplan.schedule.rules.language import named_rules, parse_rules
from pipeplan.time_limit import Limit, checkpoint
from pipeplan.units import format_bytes

pytestmark = pytest.mark.counted

KB = 1000
QUICK = {"time_limit": 0.3, "deterministic": True}


def chain(num_blocks: int, *, placed: bool = False) -> Profile:
    """F = I = W = 100, 2 kB held per micro-batch and half of it after I."""
    costs = ShapeCosts(100, None, 100, 100, comm_ns=10, activation_bytes=2 * KB, weight_grad_bytes=KB)
    profile = shape("v", num_blocks, costs=costs)
    return profile if placed else profile.model_copy(update={"placement": None})


def compared(
    *placements: str, memory: int | None = None, options: dict[str, Any] = QUICK, microbatches: int = 8
) -> Comparison:
    asked = Request(chain(8), 4, Batch(microbatches, 1), memory_bytes=memory, **options)
    return compare_on(placements, asked)


def test_every_schedule_is_a_row_or_has_a_reason_on_each_placement() -> None:
    found = compared("one-to-one", "circular", "v-shape")
    for placement in ("one-to-one", "circular", "v-shape"):
        rows = {row.schedule for row in found.rows if row.placement == placement}
        missing = {absent.schedule for absent in found.missing if absent.placement == placement}
        assert rows | missing == {OURS, *CLASSIC}
        assert not rows & missing
    assert all(absent.why for absent in found.missing)


@pytest.mark.parametrize("num_parted", [None, 2])
def test_every_schedule_is_timed_on_whole_forwards_where_ours_slices_them(num_parted: int | None) -> None:
    """The last stage takes much longer than the others, so that parts of forwards reach it sooner."""
    profile = chain(4)
    last = profile.blocks[-1]
    costs = tuple(
        row.model_copy(
            update={name: 8 * getattr(row, name) for name in ("forward_ns", "input_grad_ns", "weight_grad_ns")}
        )
        for row in last.costs
    )
    sizes = [
        block.model_copy(
            update={
                "costs": tuple(
                    row.model_copy(update={"microbatch_size": size, "forward_ns": size * row.forward_ns // 2})
                    for row in block.costs
                    for size in (1, 2)
                )
            }
        )
        for block in (*profile.blocks[:-1], last.model_copy(update={"costs": costs}))
    ]
    profile = profile.model_copy(update={"blocks": tuple(sizes)})
    asked = Request(profile, 4, Batch(4, 2), num_parted=num_parted, **QUICK)
    sliced = search_plan(replace(asked, placement="one-to-one"))
    assert any(stage.num_parted for stage in sliced.plan.stages), "else this shows nothing"
    found = compare_on(["one-to-one"], asked)
    rows = {row.schedule for row in found.rows}
    assert {OURS, "gpipe", "1f1b", "zb-h1", "zb-h2", "zb-1p", "zb-2p", "zb-auto", "kfkb", "greedy"} == rows
    assert rows | {absent.schedule for absent in found.missing} == {OURS, *CLASSIC}
    parts = {row.schedule: row.sliced_microbatches for row in found.rows}
    assert {schedule for schedule, count in parts.items() if count} == {OURS}
    assert [row.get("sliced_microbatches", 0) for row in json.loads(json.dumps(found.figures()))["rows"]] == [
        parts[row.schedule] for row in found.rows
    ]
    shown = io.StringIO()
    print_comparison(found, shown)
    assert "in 2 parts" in " ".join(shown.getvalue().split())
    again = search_plan(replace(asked, placement=sliced.plan.placed))
    assert again.plan.predicted.makespan_ns <= sliced.plan.predicted.makespan_ns


def test_rows_name_who_made_each_choice() -> None:
    """Those of a search, and of a known schedule what decides its order; flags of all rows are in a note."""
    asked = Request.of(chain(8), devices=4, num_microbatches=4, replicas=1, **QUICK)
    found = compare(asked, rules=named_rules("1f1b+"))
    rows = {row.schedule: row for row in found.rows}
    assert rows[OURS].choices["schedule"].startswith("searched (")
    assert rows["gpipe"].choices["schedule"] == rows["gpipe"].choices["slices"] == "--scheduler gpipe"
    assert rows["rules: 1f1b+"].choices["schedule"] == "--rules 1f1b+"
    for row in found.rows:
        assert row.choices["replicas"] == "--dp 1"
        assert row.choices["placement"].startswith("searched (")
        assert (row.choices["backward"] == f"--split-backward {'yes' if row.split_backward else 'no'}") == row.varied
    assert json.loads(json.dumps(found.figures()))["rows"][0]["choices"] == found.rows[0].choices
    shown = io.StringIO()
    print_comparison(found, shown)
    assert "in every row by a flag: --dp 1; --microbatches 4" in " ".join(shown.getvalue().split())


def test_ours_fits_and_is_at_most_every_classic_schedule_that_fits() -> None:
    for memory in (8 * KB, 16 * KB, None):
        rows = compared("one-to-one", memory=memory).rows
        ours = next(row for row in rows if row.schedule == OURS)
        assert ours.fits
        assert all(ours.makespan_ns <= row.makespan_ns for row in rows if row.fits)


def test_gaps_are_to_one_bound_per_placement_and_only_of_what_fits() -> None:
    rows = compared("one-to-one", "v-shape", memory=16 * KB).rows
    for placement in ("one-to-one", "v-shape"):
        assert len({row.lower_bound_ns for row in rows if row.placement == placement}) == 1
    assert {row.fits for row in rows} == {True, False}
    for row in rows:
        assert (row.gap is None) == (not row.fits) == bool(row.why)
        assert row.gap is None or row.gap >= 0


def test_a_schedule_that_fits_only_one_way_has_two_rows() -> None:
    """GPipe fits 8 micro-batches of 2 kB; split, each takes a third kilobyte from I to W: there is no room for it."""
    profile = chain(4, placed=True)
    blocks = tuple(
        block.model_copy(
            update={"costs": tuple(row.model_copy(update={"weight_grad_bytes": 3 * KB}) for row in block.costs)}
        )
        for block in profile.blocks
    )
    profile = profile.model_copy(update={"blocks": blocks})
    assert profile.placement is not None
    found = compare(request_of(profile, profile.placement, Batch(8, 1), memory_bytes=16 * KB, **QUICK))
    ways = {row.split_backward: row.fits for row in found.rows if row.schedule == "gpipe"}
    assert ways == {False: True, True: False}
    assert sum(row.schedule == OURS for row in found.rows) == 1


def test_a_schedule_has_a_row_as_it_is_defined_and_one_that_says_so_where_splitting_is_shorter() -> None:
    rows = compared("one-to-one").rows
    assert len({row.title for row in rows}) == len(rows)
    times = {row.title: row.iteration_ns for row in rows}
    ways = {row.title: row.split_backward for row in rows}
    assert not ways["1f1b"]
    assert ways["1f1b split"]
    assert ways["zb-h1"]
    assert "zb-h1 split" not in times
    assert times["1f1b split"] < times["1f1b"]
    assert "1f1b split" in printed(compared("one-to-one"))


@pytest.mark.parametrize(("overhead_ns", "split"), [(0, True), (200, False)])
def test_the_overhead_of_splitting_decides_whether_to_split(overhead_ns: int, split: bool) -> None:
    options = QUICK | {"split_overhead_ns": overhead_ns}
    result = search_plan(request_of(chain(8), "one-to-one", Batch(8, 1), num_devices=4, **options))
    assert any(operation.kind == "I" for operation in result.plan.operations) == split
    assert result.plan.provenance.options["split_overhead_ns"] == overhead_ns
    unsplit = search_plan(
        request_of(chain(8), "one-to-one", Batch(8, 1), num_devices=4, **(options | {"split_backward": False}))
    )
    assert result.plan.predicted.makespan_ns <= unsplit.plan.predicted.makespan_ns


def test_overhead_lengthens_input_and_weight_gradients_alone() -> None:
    def durations(overhead_ns: int) -> dict[str, int]:
        options = QUICK | {"split_backward": True, "split_overhead_ns": overhead_ns, "scheduler": "gpipe"}
        plan = search_plan(request_of(chain(8), "one-to-one", Batch(8, 1), num_devices=4, **options)).plan
        return {operation.kind: operation.duration_ns for operation in plan.operations}

    assert durations(0) == {"F": 200, "I": 200, "W": 200}
    assert durations(7) == {"F": 200, "I": 207, "W": 207}


def test_placements_without_enough_blocks_are_named_and_the_others_compared() -> None:
    found = compare_on(["one-to-one", "circular", "v-shape"], Request(chain(3), 4, Batch(8, 1), **QUICK))
    assert {row.placement for row in found.rows} == {"one-to-one"}
    assert [absent.placement for absent in found.missing if absent.schedule is None] == ["circular", "v-shape"]
    text = printed(found)
    assert "nothing on circular: circular on 4 devices needs 8 stages" in text
    assert "nothing on v-shape: v-shape on 4 devices needs 8 stages" in text


def test_nothing_anywhere_is_the_first_reason() -> None:
    with pytest.raises(UsageError, match="needs 8 stages"):
        compare_on(["circular", "v-shape"], Request(chain(3), 4, Batch(8, 1), **QUICK))


def test_what_does_not_fit_anywhere_is_listed_with_what_it_needs() -> None:
    found = compared("one-to-one", "v-shape", memory=1 * KB)
    for placement in ("one-to-one", "v-shape"):
        rows = {row.schedule for row in found.rows if row.placement == placement}
        missing = {absent.schedule for absent in found.missing if absent.placement == placement}
        assert rows | missing == {OURS, *CLASSIC}
    assert not any(row.fits for row in found.rows)
    assert all(f"needs {format_bytes(max(row.peak_memory_bytes))}" in row.why for row in found.rows)
    assert isinstance(found.shortage, InfeasibleError)
    enough = found.shortage.enough_bytes
    assert enough is not None
    assert search_plan(Request(chain(8), 4, Batch(8, 1), "one-to-one", memory_bytes=enough, **QUICK))
    gpipe = next(row for row in found.rows if row.schedule == "gpipe" and row.placement == "one-to-one")
    assert f"{gpipe.title} needs {format_bytes(max(gpipe.peak_memory_bytes))}" in printed(found)
    assert "does not fit on one-to-one (1kB per device): " in printed(found)


@pytest.mark.slow
def test_where_a_search_finds_a_plan_it_is_our_row() -> None:
    """Blocks with 100 MB of parameters and as much for a sample: the largest size fits nowhere without replicas."""
    profile = chain(6)
    sizes = [
        CostRow(microbatch_size=size, forward_ns=size * 1000, backward_ns=size * 2000, activation_bytes=size * 10**8)
        for size in (1, 2, 4)
    ]
    blocks = [block.model_copy(update={"costs": tuple(sizes), "parameter_bytes": 10**8}) for block in profile.blocks]
    profile = profile.model_copy(update={"blocks": tuple(blocks)})
    asked = Request.of(profile, devices=2, mini_batch=16, memory_bytes=1_300_000_000, recompute=False, **QUICK)
    assert asked.batch.microbatch_size == 4
    plan = search_plan(asked).plan
    found = compare(asked)
    assert found.shortage is None
    ours = found.rows[0]
    assert (ours.schedule, ours.fits) == (OURS, True)
    assert ours.iteration_ns == plan.predicted.iteration_ns
    assert {"1f1b", "gpipe"} <= {row.schedule for row in found.rows}
    with pytest.raises(InfeasibleError):
        search_plan(replace(asked, sizes=(), placement="one-to-one"))


def test_an_interruption_while_timing_keeps_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = comparison._row

    def interrupted(name: str, *rest: object) -> object:
        if name == "1f1b":
            raise KeyboardInterrupt
        return timed(name, *rest)  # type: ignore[arg-type]  # passed on

    monkeypatch.setattr(comparison, "_row", interrupted)
    found = compared("one-to-one", "v-shape")
    assert found.interrupted
    rows = {(row.schedule, row.placement) for row in found.rows}
    assert rows == {(OURS, "one-to-one"), ("gpipe", "one-to-one")}
    missing = {(absent.schedule, absent.placement): absent.why for absent in found.missing}
    assert "not enough time" in missing["1f1b", "one-to-one"]
    assert missing["zb-v", "one-to-one"].startswith("it needs"), "which takes no time"
    assert "not enough time" in missing[None, "v-shape"]


def test_after_an_interruption_only_the_first_placement_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that hears it still has its plan; timing the classic schedules beside it would hold up the end."""
    limit, timed = Limit(), []

    def interrupted(asked: Request, **how: Any) -> Result:
        found = search_plan(asked, **how)
        if timed:
            limit.interrupt()
        return found

    def counted(name: str, *rest: object) -> object:
        timed.append(name)
        return classic(name, *rest)  # type: ignore[arg-type]  # passed on

    classic = comparison._classic
    monkeypatch.setattr(comparison, "search_plan", interrupted)
    monkeypatch.setattr(comparison, "_classic", counted)
    found = compare_on(("one-to-one", "v-shape"), Request(chain(8), 4, Batch(8, 1), **QUICK), within=limit)
    assert {row.schedule for row in found.rows if row.placement == "one-to-one"} == {OURS, *timed}
    assert "1f1b" in timed
    assert {absent.why for absent in found.missing if absent.placement == "v-shape"} == {
        "there was not enough time; raise --time-limit"
    }


@pytest.mark.parametrize("why", [SearchTimeoutError, InfeasibleError])
def test_after_the_limit_one_placement_is_waited_for(why: type[PipeplanError], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each search of a large request works for seconds until it has a first plan, however late it is."""
    now, asked_of = [0.0], list[object]()

    def late(asked: Request, **how: Any) -> Result:
        asked_of.append(asked.placement)
        now[0] += 5.0
        if len(asked_of) > 1:
            return search_plan(replace(asked, **QUICK))
        raise why("the first is over after the limit")

    monkeypatch.setattr(comparison, "search_plan", late)
    limit, request = Limit(2.0, clock=lambda: now[0]), Request(chain(8), 4, Batch(8, 1), time_limit=2.0)
    if why is SearchTimeoutError:
        with pytest.raises(SearchTimeoutError, match="the first is over"):
            compare_on(("one-to-one", "v-shape", "circular"), request, within=limit)
        assert asked_of == ["one-to-one"]
    else:  # it may do so with more memory
        found = compare_on(("one-to-one", "v-shape", "circular"), request, within=limit)
        assert {row.placement for row in found.rows} == {"one-to-one"}
        assert asked_of == ["one-to-one"] * 2


def test_a_search_leaves_time_for_every_schedule_that_applies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that takes its whole share of the time; the schedules take more than what it leaves of that."""
    now = [0.0]

    def search_for_long(asked: Request, **_: Any) -> Result:
        now[0] += asked.time_limit
        return search_plan(replace(asked, **QUICK))

    def slow(*given: Any) -> object:
        now[0] += 0.3
        checkpoint()
        return timed(*given)

    timed = comparison._row
    monkeypatch.setattr(comparison, "search_plan", search_for_long)
    monkeypatch.setattr(comparison, "_row", slow)
    asked = Request(chain(8), 4, Batch(8, 1), time_limit=20.0)
    found = compare_on(("one-to-one", "v-shape"), asked, within=Limit(20.0, clock=lambda: now[0]))
    there = [absent for absent in found.missing if absent.placement == "one-to-one"]
    assert not [absent for absent in there if "not enough time" in absent.why]


def test_schedules_of_the_first_placement_are_rows_however_late_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a search may leave nothing of the time limit; GPipe and 1F1B take next to nothing."""
    now = [0.0]

    def search_for_too_long(asked: Request, **_: Any) -> Result:
        now[0] += 1000.0
        return search_plan(replace(asked, **QUICK))

    monkeypatch.setattr(comparison, "search_plan", search_for_too_long)
    asked = Request(chain(8), 4, Batch(8, 1), time_limit=20.0)
    found = compare_on(("one-to-one", "v-shape"), asked, within=Limit(20.0, clock=lambda: now[0]))
    assert {"gpipe", "1f1b", "zb-h1"} <= {row.schedule for row in found.rows}
    assert {absent.placement for absent in found.missing if not absent.reached} == {"v-shape"}


def test_an_interruption_before_anything_is_known_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(comparison, "search_plan", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compared("one-to-one", "v-shape")


def test_orders_that_block_each_other_are_not_applicable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every device's actions the other way round: weight gradients wait for forwards behind them."""
    gpipe = CLASSIC["gpipe"].orders
    backwards = Classic(lambda problem: None, lambda problem, graph: [order[::-1] for order in gpipe(problem, graph)])
    monkeypatch.setitem(CLASSIC, "gpipe", backwards)
    found = compared("one-to-one")
    assert "gpipe" not in {row.schedule for row in found.rows}
    assert "wait for each other" in next(absent.why for absent in found.missing if absent.schedule == "gpipe")


def printed(found: Comparison) -> str:
    stream = io.StringIO()
    print_comparison(found, stream)
    return " ".join(stream.getvalue().split())


def test_what_does_not_apply_is_noted_with_the_placements_where_it_does_not() -> None:
    much = "it needs much"
    missing = (NotThere("a", "v", much), NotThere("b", "v", much), NotThere("c", "v", "no"), NotThere("a", "w", much))
    found = replace(compared("one-to-one"), missing=missing)
    text = printed(found)
    assert "not applicable on v, w: a (it needs much)" in text
    assert "not applicable on v: b (it needs much)" in text
    assert "not applicable on v: c (no)" in text


def test_rows_that_differ_in_nothing_but_their_names_share_a_line() -> None:
    found = compared("one-to-one")
    first = found.rows[0]
    same = tuple(replace(first, schedule=name, cut_short=name == "zb-h1") for name in (OURS, "zb-h1", "zb-auto"))
    other = replace(first, schedule="1f1b", iteration_ns=2 * first.iteration_ns)
    large = replace(first, schedule="gpipe", iteration_ns=first.iteration_ns // 2, fits=False)
    text = printed(replace(found, rows=(*same, other, large), memory_bytes=(1, *found.memory_bytes[1:]), missing=()))
    assert f"{OURS} = zb-h1 =" in text
    assert text.count("zb-h1") == 1
    assert "fits" not in text.replace("does not fit", "")
    assert text.index("1f1b") < text.index("gpipe needs"), "what does not fit has a line below"


def test_a_schedule_with_a_row_is_not_said_to_be_unreached_without_a_word_of_its_layouts() -> None:
    found = compared("one-to-one")
    missing = tuple(NotThere(name, "one-to-one", "no time", reached=False) for name in ("1f1b", "other"))
    text = printed(replace(found, missing=missing))
    assert "other on one-to-one; other layouts of 1f1b on one-to-one; raise --time-limit" in text


def test_what_is_known_is_taken_over_where_the_search_had_too_little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here by letting it find GPipe's schedule alone."""
    assert "cut short" not in printed(compared("one-to-one"))
    monkeypatch.setattr(
        comparison, "search_plan", lambda asked, **how: search_plan(replace(asked, scheduler="gpipe"), **how)
    )
    found = compared("one-to-one")
    assert found.rows[0].schedule == OURS
    assert found.rows[0].iteration_ns == found.rows[1].iteration_ns < found.rows[-1].iteration_ns
    assert [row.cut_short for row in found.rows] == [row.schedule == OURS for row in found.rows]
    assert "cut short: the search on one-to-one had too little time to look at everything" in printed(found)


def test_rows_of_a_search_that_saw_not_everything_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    def hurried(asked: Request, **how: Any) -> Result:
        found = search_plan(asked, **how)
        return replace(found, candidates=replace(found.candidates, left=1))

    monkeypatch.setattr(comparison, "search_plan", hurried)
    assert all(row.cut_short for row in compared("one-to-one").rows)


def test_what_there_was_no_time_for_is_not_reached_and_not_said_to_be_impossible(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, timed = [0.0], comparison._row
    monkeypatch.setattr(comparison, "FIRST_SECONDS", 0.0)

    def late(name: str, *rest: object) -> object:
        if name == "1f1b":
            now[0] = 200.0
            checkpoint()
        return timed(name, *rest)  # type: ignore[arg-type]  # passed on

    monkeypatch.setattr(comparison, "_row", late)
    asked = Request(chain(8), 4, Batch(8, 1), time_limit=100.0)
    found = compare_on(("one-to-one", "v-shape"), asked, within=Limit(100.0, clock=lambda: now[0]))
    assert {row.schedule for row in found.rows} == {OURS, "gpipe"}
    reached = {absent.schedule for absent in found.missing if absent.reached}
    assert "zb-v" in reached, "why it does not apply is known without time"
    assert not {"1f1b", "zb-h1", None} & reached
    assert found.enough_seconds is not None
    assert found.enough_seconds > 200, "the second placement takes as long as the first"
    text = printed(found)
    assert "not reached in the time limit: 1f1b, zb-h1" in text
    assert "; anything on v-shape; raise --time-limit to about " in text
    again = NotThere(None, "one-to-one", "", reached=False)  # in a layout of its own
    text = printed(replace(found, missing=(again,)))
    assert "not reached in the time limit: other layouts of all schedules on one-to-one; raise" in text


def test_a_known_schedule_that_does_not_fit_recomputes_as_search_lets_it() -> None:
    asked = Request(chain(4, placed=True), 4, Batch(8, 1), memory_bytes=10 * KB, **QUICK)
    assert asked.profile.placement is not None
    placed = replace(asked, placement=asked.profile.placement)
    rows = [row for row in compare(placed).rows if row.schedule == "zb-h2"]
    assert [(row.fits, row.recompute) for row in rows] == [(True, True), (False, False)]
    named = search_plan(replace(placed, scheduler="zb-h2", split_backward=True))
    assert any(stage.recompute for stage in named.plan.stages)
    assert rows[0].iteration_ns <= named.plan.predicted.iteration_ns
    assert rows[0].gap is not None
    assert rows[0].gap >= 0
    kept = compare(replace(placed, recompute=False)).rows
    assert not any(row.recompute for row in kept)


def test_rules_are_timed_as_a_search_runs_them() -> None:
    """Those of 1F1B with whole backwards; that split ones are shorter is a row of its own."""
    asked = Request(chain(8), 4, Batch(8, 1), **QUICK)
    found = compare_on(("one-to-one",), asked, rules=named_rules("1f1b"))
    titles = {row.title: row for row in found.rows}
    for rules, classic in (("rules: 1f1b", "1f1b"), ("rules: 1f1b split", "1f1b split")):
        assert titles[rules].split_backward is titles[classic].split_backward is (" split" in classic)
        assert titles[rules].iteration_ns == titles[classic].iteration_ns
    assert [row["varied"] for row in rows_of(found) if row["schedule"] == "1f1b"] == [True, False]


def test_rules_of_ones_own_are_one_more_row() -> None:
    mine = parse_rules('in_flight = "D - d"\nseparate = true', "mine")
    asked = Request(chain(8), 4, Batch(8, 1), **QUICK)
    found = compare_on(("one-to-one",), asked, rules=mine)
    (row,) = (row for row in found.rows if row.schedule == "rules: mine")
    (zb_h1,) = (row for row in found.rows if row.schedule == "zb-h1")
    assert (row.iteration_ns, row.peak_memory_bytes) == (zb_h1.iteration_ns, zb_h1.peak_memory_bytes)
    circular = parse_rules('placement = "circular"\nchunks = 2', "round")
    found = compare_on(("one-to-one",), asked, rules=circular)
    assert ("rules: round", "these rules are for stages that stand otherwise") in [
        (absent.schedule, absent.why) for absent in found.missing
    ]


def split_chain() -> Profile:
    """Four blocks that one, two or four devices can split."""
    rows = tuple(
        CostRow(microbatch_size=1, shards=shards, forward_ns=100 // shards, backward_ns=200 // shards)
        for shards in (1, 2, 4)
    )
    blocks = chain(4).blocks
    return chain(4).model_copy(update={"blocks": tuple(each.model_copy(update={"costs": rows}) for each in blocks)})


def test_every_strategy_has_the_sizes_that_suit_it_and_rows_say_them() -> None:
    """One sample after another on four devices: with whole blocks a pipeline takes twice as long as with split ones."""
    found = compare(Request.of(split_chain(), devices=4, mini_batch=2, **QUICK))
    ours = {row.placement: row for row in found.rows if row.is_ours}
    assert ours["one-to-one"].shards == 4
    assert {ours[each].shards for each in ("circular", "v-shape", "bidirectional")} == {2}
    alone = search_plan(Request.of(split_chain(), devices=2, mini_batch=2, placement="circular", shards=1, **QUICK))
    assert ours["circular"].iteration_ns == 810
    assert alone.plan.predicted.iteration_ns == 1560
    assert all({"shards", "context", "zero", "idle_devices"} <= set(row) for row in rows_of(found))
    assert " tp backward" in printed(found)
    assert " cp " not in printed(found), "what is usual has no column"


def rows_of(found: Comparison) -> list[dict[str, Any]]:
    rows = found.figures()["rows"]
    assert isinstance(rows, list)
    return rows


def test_devices_that_run_nothing_are_said_before_all_else_and_of_every_row() -> None:
    """One sample at a time, of two blocks: six of eight devices have nothing to do."""
    asked = Request.of(chain(2), devices=8, mini_batch=4, microbatch_size=1, **QUICK)
    found = compare(asked)
    assert {tuple(row["idle_devices"]) for row in rows_of(found) if row["placement"] == "one-to-one"} == {
        (2, 3, 4, 5, 6, 7)
    }
    assert printed(found).startswith("in the first row 6 of 8 devices run nothing: 2-7 shape-v: 8 devices, ")
    assert {tuple(row["idle_devices"]) for row in rows_of(found) if row["placement"] == "bidirectional"}
    busy = printed(compared("one-to-one"))
    assert "run nothing" not in busy
    assert "idle devices" not in busy


def test_what_applies_on_some_placement_is_not_noted_as_absent() -> None:
    assert "zb-v" not in printed(compared("one-to-one", "v-shape")).split("not applicable", 1)[1]


def test_stages_and_the_bottleneck() -> None:
    """9 blocks on 4 devices: one device has three of them, and 4 x 900 / 2700 is a third above the mean."""
    plan = search_plan(
        request_of(chain(9), "one-to-one", Batch(4, 1), num_devices=4, **(QUICK | {"scheduler": "gpipe"}))
    ).plan
    longest = next(index for index, stage in enumerate(plan.stages) if len(stage.blocks) == 3)
    assert bottleneck(plan.workload) == (
        f"bottleneck: stage {longest} on device {longest}, 900ns of work per micro-batch, "
        "33.3% above the mean of all devices"
    )
    stream = io.StringIO()
    print_stages(plan.workload, stream)
    assert all(block in stream.getvalue() for stage in plan.stages for block in stage.blocks)


def test_stages_of_several_chunks_share_a_device() -> None:
    """A device's stages count together, and many blocks are shortened to the first and the last."""
    plan = search_plan(
        request_of(chain(12), "circular", Batch(4, 1), num_devices=1, chunks=2, **(QUICK | {"scheduler": "gpipe"}))
    ).plan
    assert bottleneck(plan.workload).startswith("bottleneck: stages 0-1 on device 0, 3.6us of work")
    stream = io.StringIO()
    print_stages(plan.workload, stream)
    first = plan.stages[0].blocks
    assert f"{first[0]} .. {first[-1]} ({len(first)})" in stream.getvalue()


def test_an_order_of_ones_own_has_a_row_where_the_placement_is_open() -> None:
    """It has no replicas, so what it stands beside has none: with them a stage on all devices would be the best."""
    rules = parse_rules('order = ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]', "mine")
    asked = request_of(chain(8), "auto", Batch(2, 1), 2, **QUICK)
    found = compare(asked, rules=rules)
    assert "rules: mine" in {row.schedule for row in found.rows}
    assert {row.replicas for row in found.rows} == {1}


def test_an_order_of_ones_own_says_how_many_microbatches_are_compared() -> None:
    order = ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"]
    found = face.compare(chain(2, placed=True), rules=face.Rules(name="mine", order=order), **QUICK)
    assert "rules: mine" in {row.schedule for row in found.rows}
    assert {row.num_microbatches for row in found.rows} == {3}
