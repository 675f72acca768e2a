"""Why devices idle: every cause where it is known by hand, and sums that are exact for any plan."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders.chains import chain_plan, chain_workload
from builders.orders import gpipe_orders, one_f_one_b
from builders.plans import plan_of
from pipeplan.files import Plan, read_plan
from pipeplan.simulator.simulation import Simulation, simulate
from pipeplan.simulator.waits import CAUSES, waits_of
from pipeplan.workload.memory import memory_curves
from support.marks import some_of
from support.paths import ROOT

PLANS = sorted((ROOT / "plans").glob("*.json"))


def causes(simulation: Simulation, device: int) -> dict[str, int]:
    """Those that there are."""
    return {cause: time for cause, time in waits_of(simulation)[device].by_cause.items() if time}


def require_exact(simulation: Simulation) -> None:
    """Causes, devices and waits in time add up, and no two waits overlap."""
    for device, waits in enumerate(waits_of(simulation)):
        assert tuple(waits.by_cause) == tuple(CAUSES)
        assert sum(waits.by_cause.values()) == simulation.rates.idle_ns[device]
        assert sum(waits.by_device.values()) <= simulation.rates.idle_ns[device]
        assert device not in waits.by_device
        ends = 0
        for wait in waits.waits:
            assert ends <= wait.begin_ns < wait.end_ns <= simulation.written_ns
            ends = wait.end_ns


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_causes_add_up_to_the_idle_time_of_every_shipped_plan(path: Path) -> None:
    require_exact(simulate(read_plan(str(path))))


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_the_curve_of_memory_has_the_peak_that_is_stated(path: Path) -> None:
    simulation = simulate(read_plan(str(path)))
    for device, curve in enumerate(memory_curves(simulation.graph, simulation.starts)):
        assert [time for time, _ in curve] == sorted({time for time, _ in curve})
        held = max(size for _, size in curve)
        assert held + simulation.workload.static_bytes(device) == simulation.memory[device].peak_bytes


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_curves_of_memory_are_the_same_by_orders(path: Path) -> None:
    simulation = simulate(read_plan(str(path)))
    by_events = memory_curves(simulation.graph, simulation.starts)
    assert memory_curves(simulation.graph, simulation.starts, simulation.orders) == by_events


def test_curves_of_memory_follow_orders_where_these_tell_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of long plans adding up every event took a fifth of a report."""
    simulation = simulate(chain_plan(4, 8))
    by_events = memory_curves(simulation.graph, simulation.starts)
    monkeypatch.setattr("pipeplan.workload.memory.changes_of", lambda *_: pytest.fail("events are added up"))
    assert memory_curves(simulation.graph, simulation.starts, simulation.orders) == by_events


@given(
    st.integers(2, 5),
    st.integers(1, 9),
    st.integers(0, 15),
    st.sampled_from([None, 3_000, 6_000]),
    st.sampled_from([one_f_one_b, gpipe_orders]),
    st.sampled_from([None, (9, 11)]),
)
@settings(max_examples=some_of(60), deadline=None)
def test_causes_add_up_whatever_the_plan(
    num_devices: int, num_microbatches: int, lag: int, memory: int | None, orders: object, split: tuple[int, int] | None
) -> None:
    workload = chain_workload(num_devices, num_microbatches, lag=lag, memory_bytes=memory, split=split)
    require_exact(simulate(plan_of(workload, orders(workload))))


@pytest.mark.parametrize("lag", [0, 4])
def test_stages_of_equal_work_only_fill_and_drain(lag: int) -> None:
    """1F1B on four devices: everybody idles for three forwards and three backwards, and for messages."""
    simulation = simulate(chain_plan(4, 8, lag=lag))
    for device in range(4):
        found = causes(simulation, device)
        assert (lag > 0) == ("message" in found)
        assert lag or found.keys() == {"warmup"}
    if not lag:
        assert [causes(simulation, device) for device in range(4)] == [{"warmup": 3 * 10 + 3 * 20}] * 4


def test_a_slow_stage_is_what_the_others_wait_for() -> None:
    """The last of three devices takes twice as long: the first waits for it in the steady state, and says so."""
    workload = chain_workload(3, 12)
    slow = workload.__class__(
        **{
            **{name: getattr(workload, name) for name in workload.__dataclass_fields__},
            "operations": tuple(
                each.__class__(
                    **{
                        **{name: getattr(each, name) for name in each.__dataclass_fields__},
                        "duration_ns": each.duration_ns * (2 if each.stage == 2 else 1),
                    }
                )
                for each in workload.operations
            ),
        }
    )
    simulation = simulate(plan_of(slow, one_f_one_b(slow)))
    require_exact(simulation)
    found = waits_of(simulation)
    assert found[1].by_cause["imbalance"] > found[1].by_cause["warmup"]
    assert found[1].longest is not None
    assert found[1].longest[0] == 2
    assert found[2].by_cause["imbalance"] == 0


def tight(memory: int | None) -> Simulation:
    """Two devices, of which the first runs a forward only after every backward: two in flight would be quicker."""
    workload = chain_workload(2, 6, memory_bytes=memory)
    first = [entry for m in range(6) for entry in (("0F", m), ("0B", m))]
    second = [entry for m in range(6) for entry in (("1F", m), ("1B", m))]
    return simulate(plan_of(workload, [first, second]))


def test_a_forward_that_does_not_fit_is_memory_and_one_that_does_is_the_order() -> None:
    """The first device waits for backwards with the next forward at hand: for memory where there is room for one."""
    for memory, cause in ((1_000, "memory"), (2_000, "order"), (None, "order")):
        found = causes(tight(memory), 0)
        assert found[cause] == 4 * 30, "of the steady state, between the first backward and the last forward"
        assert found.keys() == {cause, "warmup"}


def test_a_device_without_a_stage_waits_for_those_that_have_work() -> None:
    workload = chain_workload(3, 4, devices=[(0,), (1,)])
    orders = one_f_one_b(chain_workload(2, 4))
    simulation = simulate(plan_of(workload, [*orders, []]))
    assert causes(simulation, 2) == {"imbalance": simulation.rates.makespan_ns}
    require_exact(simulation)


def test_rounds_of_a_loop_count_as_often_as_they_run() -> None:
    plan: Plan = chain_plan(3, 9, lag=5, repetend=True, unroll=3)
    long = simulate(plan, 20_001)
    assert long.loop is not None
    require_sums(long)
    short = simulate(plan, 30)
    assert short.loop is None
    require_exact(short)


def require_sums(simulation: Simulation) -> None:
    for device, waits in enumerate(waits_of(simulation)):
        assert sum(waits.by_cause.values()) == simulation.rates.idle_ns[device]
