"""Emulated runs on real processes: programs in order, nothing before the plan allows it, blocking transfers, too."""

from __future__ import annotations

import functools
import math
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from builders.chains import chain_workload
from builders.folds import Replicas, plan_of_replicas
from builders.loops import looped_plans
from builders.plans import plan_of
from builders.shapes import shape_workload
from builders.sharded import chain_of, exchanging, long_plan, plan_on
from builders.sharded import placed as placed_stages
from pipeplan._api import run
from pipeplan.checker import check
from pipeplan.cli.run_verb import comparison_line
from pipeplan.errors import UsageError
from pipeplan.examples import ShapeCosts
from pipeplan.files import PlacedStage, Plan, to_json
from pipeplan.files.folded import unfolded
from pipeplan.runtime.emulation import devices
from pipeplan.runtime.emulation import emulate as emulation
from pipeplan.runtime.executor.channels import Channels
from pipeplan.runtime.executor.message_graph import hops_of
from pipeplan.runtime.executor.process_groups import extent, iteration_of
from pipeplan.runtime.executor.rank_program import ProgramStep, planned_programs
from pipeplan.runtime.launch.job import RunOptions, RunResult, job_of, run_job
from pipeplan.runtime.models.load import load_model
from pipeplan.simulator.simulation import Simulation, simulate
from pipeplan.workload.action import StateAction
from pipeplan.workload.elements import Dependency, Hop
from runtime_support.plans import Case, four_devices, greedy_orders, placed_plan, reports_of
from runtime_support.warm import warm_ranks
from support.marks import always, asked_for, slow_but

RANK = (sys.executable, "-m", "runtime_support.emulation_rank")
MS = 1_000_000
COSTS = ShapeCosts(forward_ns=2 * MS, backward_ns=4 * MS, shared_forward_ns=MS, shared_backward_ns=MS, comm_ns=MS // 2)
SHORT = ShapeCosts(forward_ns=MS // 20, backward_ns=MS // 20, comm_ns=0)
SPLIT = ShapeCosts(forward_ns=2 * MS, input_grad_ns=2 * MS, weight_grad_ns=2 * MS)
SHAPES = ["v", "x", "m", "mllm", "nn", "k", "circular", "zbv"]
BLOCKS = [("b0", "b1"), ("b2",), ("b3",), ("b4", "end")]
BLOCKING = ("v", "k", "parts", "shards and replicas", "messages wait for their link")
PLANS = (
    *SHAPES,
    *("one device", "sizes", "replicas", "parts", "shards and replicas"),
    *("experts are exchanged", "late inputs beside exchanges"),
    *("messages wait for their link", "gradients are summed", "a loop", "a thousand micro-batches"),
    "two programs for four devices",
    "exchanges in a loop",
)


@functools.cache
def plans() -> dict[str, Plan]:
    """Of all forms that ``check`` accepts, on 4 devices or fewer."""
    found = {name: shape_plan(name, SPLIT if name == "zbv" else COSTS) for name in SHAPES}
    found["one device"] = chain(1)
    found["sizes"] = chain(4, sizes=[4, 1, 2, 4])
    found["replicas"] = groups([((0, 1), 4, 0), ((1, 2), 2, 0), ((2, 3), 4, 0), ((3, 0), 2, 0)])
    found["parts"] = groups([((0, 1), 4, 2), ((1, 2), 4, 1), ((2,), 4, 2), ((3, 0), 4, 0)])
    found["shards and replicas"] = shards_and_replicas()
    found |= {"experts are exchanged": experts_exchanged(), "late inputs beside exchanges": late_and_exchanged()}
    for name, plan in found.items():
        check(plan).require(name)
    looped = looped_plans(shape_workload("v", 4, costs=COSTS), 4, 24)["gpipe"]
    assert check(looped).valid
    assert all(program.loop is not None for program in planned_programs(looped))
    found["messages wait for their link"] = with_busy_links(chain(3))
    found["gradients are summed"] = with_sums(chain(2))
    found["a loop"] = looped
    found["a thousand micro-batches"] = thousand = looped_plans(shape_workload("v", 4, costs=SHORT), 20, 1_000)["1f1b"]
    assert (check(thousand).valid, thousand.num_microbatches) == (True, 1_000)
    assert thousand.loop is not None
    found["two programs for four devices"] = folded = plan_of_replicas(Replicas(shards=1, replicas=2))
    assert folded.players_each == 2
    found["exchanges in a loop"] = repeated = long_plan((1, 1), (2, 2), unit_ns=MS // 10).with_copies(10)
    assert any(program.loop is not None for program in planned_programs(repeated))
    assert tuple(found) == PLANS
    return {name: plan if plan.players else four_devices(plan) for name, plan in found.items()}


def shape_plan(name: str, costs: ShapeCosts) -> Plan:
    """The shape on 4 devices, 4 micro-batches in a greedy order."""
    workload = shape_workload(name, 4, 4, costs=costs)
    return plan_of(workload, greedy_orders(workload))


def chain(num_devices: int, sizes: list[int] | None = None) -> Plan:
    """A chain with split backward."""
    split = (MS, 2 * MS)
    workload = chain_workload(num_devices, 4, forward=MS, split=split, lag=MS // 4, sizes=sizes)
    return plan_of(workload, greedy_orders(workload))


def groups(stages: list[tuple[tuple[int, ...], int, int]]) -> Plan:
    """Replicas on these devices, with these micro-batch sizes, so many micro-batches in parts; of microseconds."""
    placed = [
        PlacedStage(blocks=blocks, devices=devices, replicas=len(devices), microbatch_size=size, num_parted=parted)
        for blocks, (devices, size, parted) in zip(BLOCKS, stages, strict=True)
    ]
    return placed_plan(load_model("runtime_support.models:chain"), placed, num_microbatches=4, microbatch_size=4)


def experts_exchanged() -> Plan:
    """ZeRO 3 over four replicas, of which every second has the same experts: they exchange these with it alone."""
    profile = chain_of([10**6] * 3, unit_ns=MS, experts=8 * 10**5)
    plan = plan_on(profile, placed_stages(exchanging([0, 1, 2], (2, 2), (0, 1, 2, 3), expert=2)))
    assert {(stage.zero, stage.expert) for stage in plan.stages} == {(3, 2)}
    return plan


def late_and_exchanged() -> Plan:
    """The last stage has a block that takes the second's output, and before it one that does not; all exchange."""
    profile = chain_of([3 * 10**6] * 4, unit_ns=MS // 2, edges=[(0, 1), (0, 2), (1, 3), (2, 3)])
    both = [exchanging([0], (1, 1), (0, 1)), exchanging([1], (2, 1), (0, 1)), exchanging([2, 3], (1, 2), (2, 3))]
    return plan_on(profile, placed_stages(*both), late=True)


def with_busy_links(plan: Plan) -> Plan:
    """Every message occupies its link for longer than it takes to make the next one; figures are not brought along."""

    def busy(dependency: Dependency) -> Dependency:
        hops = [replace(hop, occupancy_ns=3 * MS, bytes=5000) for hop in dependency.hops]
        return replace(dependency, hops=tuple(hops))

    return plan.model_copy(update={"dependencies": tuple(map(busy, plan.dependencies))})


def with_sums(plan: Plan) -> Plan:
    """Gradients are summed for a minute behind the last action; figures are not brought along."""
    stages = [replace(stage, sync_ns=60_000 * MS) for stage in plan.stages]
    return plan.model_copy(update={"stages": tuple(stages)})


def shards_and_replicas() -> Plan:
    """A stage of 2 shards in 2 replicas, between one device that has a share of it and two that make half of it."""
    workload = chain_workload(4, 4, forward=MS, backward=2 * MS, devices=[(0,), (0, 1, 2, 3), (2, 3)], sizes=[2, 2, 2])
    first, middle, last = workload.stages
    middle = replace(middle, shards=2, replicas=2)
    ends = {
        ("0F", "1F"): [(0, 1), (0, 2), (0, 3)],
        ("1F", "2F"): [(0, 2), (1, 3)],
        ("2B", "1B"): [(2, 0), (3, 1)],
        ("1B", "0B"): [(2, 0)],
    }
    dependencies = tuple(
        replace(d, hops=tuple(hop(*pair) for pair in ends.get((d.source, d.target), []))) for d in workload.dependencies
    )
    workload = replace(workload, stages=(first, middle, last), dependencies=dependencies)
    return plan_of(workload, greedy_orders(workload))


def hop(source: int, target: int) -> Hop:
    return Hop(source_device=source, target_device=target, bytes=100)


@functools.cache
def cases() -> dict[str, Case]:
    """Each plan with transfers beside computing, for two steps where it also runs with blocking ones."""
    options = RunOptions(trace=True, stretch=1.0, timeout_ns=20_000_000_000)
    once, twice = (replace(options, num_steps=num_steps) for num_steps in (1, 2))
    found = {f"{name} beside": (plan, twice if name in BLOCKING else once) for name, plan in plans().items()}
    blocking = replace(once, blocking=True)
    return found | {f"{name} blocking": (plans()[name], blocking) for name in BLOCKING}


LONG = ("x", "m", "nn", "k", "circular", "zbv", "one device", "sizes")
"""Forms that others have, too."""


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, RunResult]:
    """Of the cases of those plans that some test that was collected is of."""
    asked = asked_for(request, dict.fromkeys(PLANS))
    made = {name: case for name, case in cases().items() if name.rpartition(" ")[0] in asked}
    reports = reports_of(made, "runtime_support.emulation_rank:emulate_all", RANK)
    return {name: RunResult.from_json(ranks[0]["result"]) for name, ranks in reports.items()}


def test_an_iteration_ends_when_the_last_rank_has_summed() -> None:
    """A rank that sums nothing ends with its last action; one without actions has no part in it."""
    actions = [(0, 10, 20), (1, 15, 40)]
    assert (extent(actions), extent(actions, 70), extent([], 90)) == ((10, 40), (10, 70), None)
    assert iteration_of([extent(actions), extent([(0, 5, 30)], 35), extent([], 90)]) == 35
    assert iteration_of([extent(actions), extent([(0, 5, 30)], 65)]) == 60


@slow_but(
    "name, transfers",
    [*((name, "beside") for name in PLANS), *((name, "blocking") for name in BLOCKING)],
    lambda case: case[0] not in LONG,
    always,
)
def test_nothing_begins_before_the_plan_allows_it(name: str, transfers: str, results: dict[str, RunResult]) -> None:
    (plan, options), result = cases()[f"{name} {transfers}"], results[f"{name} {transfers}"]
    plan = unfolded(plan.unrolled())
    simulation = simulate(plan)
    assert len(result.timeline) == len(result.steps) == options.num_steps
    for step, ranks in zip(result.steps, result.timeline, strict=True):
        assert math.isnan(step.loss)
        assert step.iteration_ns >= simulation.iteration_ns
        for rank, actions in enumerate(ranks):
            shown = [n for n, text in enumerate(plan.programs[rank]) if StateAction.read(text) is None]
            assert sorted({counter for counter, _, _ in actions}) == shown
            computed = [entry for entry in actions if "_" not in plan.programs[rank][entry[0]]]
            assert computed == sorted(computed), "in the order of the program"
            assert all(before[2] <= after[1] for before, after in zip(computed, computed[1:], strict=False))
        assert_ends_are_late_enough(simulation, ranks)


SYSTEMS_ERROR_NS = 100_000
"""By so much what the system says of waits for a core, which are taken off, may be too long; seen: 8 us."""


def assert_ends_are_late_enough(simulation: Simulation, ranks: tuple[tuple[tuple[int, int, int], ...], ...]) -> None:
    """Every action, on each of its devices, ends no earlier after the first start than the simulation says."""
    plan, graph = simulation.plan, simulation.graph
    earliest = {
        (graph.label(task), device): simulation.starts[task] + graph.durations[task]
        for device, order in enumerate(simulation.orders)
        for task in order
    }
    computed = [
        (plan.programs[rank][counter], rank, start, end)
        for rank, actions in enumerate(ranks)
        for counter, start, end in actions
        if "_" not in plan.programs[rank][counter]
    ]
    begin = min(start for _, _, start, _ in computed)
    assert {(text, rank) for text, rank, _, _ in computed} == set(earliest)
    for text, rank, _, end in computed:
        assert end - begin >= earliest[text, rank] - SYSTEMS_ERROR_NS, f"{text} on {rank}"


def test_messages_have_the_bytes_of_the_plan_up_to_the_limit() -> None:
    plan = with_busy_links(chain(3, sizes=[4, 1, 2]))
    programs, hops = planned_programs(plan), hops_of(plan)
    for limit, expected in ((1 << 20, 5000), (2000, 2000), (1, 0)):
        for spec in devices.specs_of(programs, hops, limit).values():
            (_, words) = spec.shape
            assert expected - 64 < 8 * words * 4 or words == 2


def test_gradients_without_outputs_are_refused() -> None:
    plan = chain(2)
    backward = tuple(d for d in plan.dependencies if (d.source, d.target) != ("0F", "1F"))
    with pytest.raises(UsageError, match="nothing to have a gradient"):
        planned_programs(plan.model_copy(update={"dependencies": backward}))


class LateSleeper:
    """A clock that stands still but for sleeps, each of which ends ``late_ns`` late."""

    def __init__(self) -> None:
        self.ns, self.late_ns = 0, 7

    def monotonic_ns(self) -> int:
        return self.ns

    def sleep(self, seconds: float) -> None:
        self.ns += round(seconds * 1e9) + self.late_ns


def test_a_device_is_free_when_its_action_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever its process gets to know; others' being late counts, but for what they were late to send."""
    time = LateSleeper()
    monkeypatch.setattr(devices, "time", time)
    pace = devices.Pace(100)
    pace.until(1000)
    assert (pace.now(), pace.free_ns(), pace.late_ns()) == (1007, 1000, 7)
    time.ns += 5  # the interpreter
    assert (pace.free_ns(), pace.late_ns()) == (1000, 12)
    begin = pace.now()
    time.ns += 30
    pace.waited(begin, 10)
    assert (pace.now(), pace.free_ns()) == (1042, 1032), "the message would have been here 10 ns sooner"
    pace.waited(begin, 1000)
    assert pace.free_ns() == 1032, "not before the device was free"
    pace.until(1040)
    assert pace.free_ns() == 1040, "what should have ended long ago"
    pace.restart()
    assert pace.free_ns() == pace.now()
    pace.restart()
    begin = pace.now()
    time.ns += 50
    pace.waited(begin, 20)
    assert pace.free_ns() == pace.now() - 20
    pace.stretch = 2.5
    assert pace.stretched(3) == 8
    pace.until(10**300)
    assert time.ns < 1 << 63, "as long as a system lets a process sleep"


def test_waits_for_a_core_are_not_the_message_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """What threads of the receiver waited for one of the cores is left out, but not what they waited before."""
    time, pace = LateSleeper(), devices.Pace(0)
    monkeypatch.setattr(devices, "time", time)
    monkeypatch.setattr(devices, "_blocks", lambda: time.ns)
    rows = torch.tensor([[1000, 3]])
    channels = devices.EmulatedChannels.__new__(devices.EmulatedChannels)
    channels._pace, channels._blocking = pace, False
    channels._queued = SimpleNamespace(ns=lambda: [50, time.ns // 10, 0 if time.ns else 9])

    def take(self: Channels, step: ProgramStep) -> list[torch.Tensor]:
        time.ns += 1200
        return [rows]

    monkeypatch.setattr(Channels, "take", take)
    pace.until(0)
    assert channels.take(None) == [rows]
    assert pace.free_ns() == 1200 - 3 - 120


@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts what threads wait for a core")
def test_it_is_known_how_long_threads_wait_for_a_core() -> None:
    cores = os.sched_getaffinity(0)
    core = min(cores)
    queued = devices.Queued()
    begin = queued.ns()
    spin = f"import os\nos.sched_setaffinity(0, {{{core}}})\nprint(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            other.stdout.readline()
            os.sched_setaffinity(0, {core})
            for _ in range(10_000_000):
                if sum(queued.ns()) > sum(begin):
                    break
            assert sum(queued.ns()) > sum(begin)
        finally:
            os.sched_setaffinity(0, cores)
            other.kill()
    queued.close()
    assert queued.ns() == []


class Steps:
    """An emulation whose ranks need 100 ms for a step, of which all but 30 ms are hidden if there is time for it."""

    def __init__(self, planned_ns: int, late_ns: int = 30 * MS, waits: float = 0.0) -> None:
        self.emulation = emulation._Emulation.__new__(emulation._Emulation)
        self.emulation._pace = self.pace = devices.Pace(0)
        self.emulation._planned_ns, self.emulation._num_ranks = planned_ns, 4
        self.emulation._tried_copies, self.emulation._tried_ns = None, planned_ns
        self.emulation._progress = SimpleNamespace(rank=0)
        self.emulation.step = self.step
        self.planned_ns, self.late_ns, self.waits, self.num = planned_ns, late_ns, waits, 0

    def step(self, step: int, copies: int | None = None) -> tuple[int, list[tuple[int, int, int]]]:
        self.num += 1
        return max(100 * MS, round(self.pace.stretch * self.planned_ns * (1 + self.waits)) + self.late_ns), []


@pytest.mark.parametrize(
    ("planned_ms", "stretch"), [(2000, 1.0), (1100, 1.0), (900, 1.7), (200, 7.5), (100, 15.0), (10, 150.0)]
)
def test_times_are_stretched_as_far_as_this_machine_needs(
    planned_ms: int, stretch: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """Until what comes on top is 2 % of the iteration, or not at all where it is 3 % and less."""
    steps = Steps(planned_ms * MS)
    assert steps.emulation.stretch(0.0) == steps.pace.stretch == stretch
    told = capsys.readouterr().err
    assert (f"all are stretched {stretch:g} times (--stretch)" in told) == (stretch != 1)
    assert (
        stretch == 1
        or "take 100ms for a step without any computing, and a step with the plan's times ends 30ms late" in told
    )


def test_it_says_first_how_long_it_measures(capsys: pytest.CaptureFixture[str]) -> None:
    """Three steps as planned, and where they are late three longer ones; of less than a second nobody need know."""
    said = (
        "pipeplan: timing 3 steps, to see how near the plan's times this machine comes: about {} s (--stretch {} skips "
        "that)"
    )
    Steps(900 * MS).emulation.stretch(0.0)
    first, second, _ = capsys.readouterr().err.splitlines()
    assert first == said.format(3, 1)
    assert second == said.format(5, 2)
    Steps(200_000 * MS).emulation.stretch(0.0)
    assert ": about 600 s (--stretch 1 skips that)" in capsys.readouterr().err
    Steps(10 * MS).emulation.stretch(0.0)
    Steps(MS).emulation.stretch(3.0)
    assert "measuring what" not in capsys.readouterr().err


@pytest.mark.parametrize(("planned_ms", "stretch"), [(2000, 1.0), (1100, 1.0), (900, 1.7), (10, 150.0)])
def test_waits_that_grow_with_times_are_not_the_machine_s(planned_ms: int, stretch: float) -> None:
    """Blocking transfers wait for each other in any stretch; more of it brings nothing."""
    assert Steps(planned_ms * MS, waits=0.4).emulation.stretch(0.0) == stretch


def test_a_factor_that_is_given_is_taken() -> None:
    steps = Steps(MS)
    assert (steps.emulation.stretch(3.0), steps.pace.stretch, steps.num) == (3.0, 3.0, 0)


def test_short_actions_are_stretched_on_real_ranks() -> None:
    """Of a microsecond each, which no machine keeps; the trace is in the plan's time."""
    workload = chain_workload(2, 4, forward=1000, backward=2000)
    plan = plan_of(workload, greedy_orders(workload))
    with warm_ranks():
        outcome = run(plan, RunOptions(num_steps=1, trace=True))
    stretch = outcome.result.stretch
    assert stretch > 1
    assert outcome.predicted_ns == round(plan.predicted.makespan_ns * stretch)
    assert outcome.figures()["stretch"] == stretch
    assert outcome.result.steps[0].iteration_ns >= outcome.predicted_ns
    last = max(end for _, _, end in outcome.result.timeline[0][0])
    assert last < outcome.result.steps[0].iteration_ns
    assert f"stretched {stretch:.3g} times)" in comparison_line(outcome)


def test_exchanges_of_a_very_long_run_are_not_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank once wrote out all actions before it met the others, who did not wait that long."""
    short = long_plan((1, 1), (2, 2))
    plan = short.with_copies(400_000)
    assert 800_000 < plan.num_microbatches <= 1_000_000 < plan.num_unrolled
    steps = [[len(program.steps) for program in planned_programs(each)] for each in (short, plan)]
    assert steps[0] == steps[1]

    def emulated(plan: Plan, *_: object) -> None:
        raise UsageError(f"{plan.num_microbatches} micro-batches in {len(to_json(plan))} bytes")

    monkeypatch.setattr(emulation, "_Emulation", emulated)
    with pytest.raises(UsageError, match=rf"^{plan.num_microbatches} micro-batches in \d{{4,5}} bytes"):
        emulation.emulate(plan, RunOptions(), SimpleNamespace(), lambda _: None)  # type: ignore[arg-type]
    options = RunOptions(trace=True)
    told = rf"micro-batches the plan has {plan.num_unrolled:,} actions, of at most 1,000,000; leave out --trace"
    with pytest.raises(UsageError, match=told):
        run_job(emulation.emulate, options, job_of(plan, options), SimpleNamespace())  # type: ignore[arg-type]
