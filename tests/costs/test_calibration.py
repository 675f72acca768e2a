"""Fitting rates and factors to measured blocks."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeplan.costs.devices import (
    PHASES,
    DeviceRates,
    Kernel,
    KnownRow,
    Work,
    calibrate,
    fit_rates,
    likeness,
    measured_rows,
)
from pipeplan.errors import UsageError
from pipeplan.files import Block, CostRow, Profile, Source

TRUE = DeviceRates(flop_ns=0.01, byte_ns=0.1, kernel_ns=2000)


def kernels(seed: int, count: int = 4) -> list[Kernel]:
    numbers = random.Random(seed)
    return [
        Kernel(numbers.randint(10**5, 10**8), numbers.randint(10**4, 10**7), matrix=numbers.random() < 0.5)
        for _ in range(count)
    ]


def work(seed: int) -> Work:
    return {phase: kernels(10 * seed + index) for index, phase in enumerate(PHASES)}


def known(seed: int, size: int = 1, operator: str = "x", slower: float = 1.0, together: float = 1.0) -> KnownRow:
    own = work(100 * seed + size)
    times = {phase: round(slower * TRUE.time_ns(own[phase])) for phase in PHASES}
    backward = round(together * (times["input_grad_ns"] + times["weight_grad_ns"]))
    row = CostRow.model_validate({"microbatch_size": size, "backward_ns": backward, **times})
    return KnownRow(Block(id=f"b{seed}", operator=operator, parameter_bytes=seed, costs=(row,)), row, own)


def test_rates_are_found_again() -> None:
    samples = [(kernels(seed), round(TRUE.time_ns(kernels(seed)))) for seed in range(12)]
    found = fit_rates(samples)
    assert found.flop_ns == pytest.approx(TRUE.flop_ns, rel=1e-2)
    assert found.byte_ns == pytest.approx(TRUE.byte_ns, rel=1e-2)
    for own, ns in samples:
        assert found.time_ns(own) == pytest.approx(ns, rel=1e-2)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 10**9)), min_size=1, max_size=8))
def test_no_rate_is_negative(samples: list[tuple[int, int]]) -> None:
    found = fit_rates([(kernels(seed, 1 + seed % 3), ns) for seed, ns in samples])
    assert min(found.flop_ns, found.byte_ns, found.kernel_ns) >= 0
    assert max(found.flop_ns, found.byte_ns, found.kernel_ns) > 0


def test_nothing_to_fit_to() -> None:
    with pytest.raises(UsageError, match="no times to fit to; measure at least one block"):
        fit_rates([([], 5), (kernels(1), 0)])


def test_exact_where_it_was_measured() -> None:
    rows = [known(1, slower=1.7), known(2, slower=0.4, together=1.2), known(3, operator="y")]
    fitted = calibrate(rows)
    for each in rows:
        again = fitted.row(each.block, each.row, each.work)
        for phase in PHASES:
            assert getattr(again, phase) == pytest.approx(getattr(each.row, phase), rel=1e-6, abs=1)
    assert fitted.row(rows[2].block, rows[2].row, rows[2].work).backward_ns == pytest.approx(
        rows[2].row.backward_ns, rel=1e-6, abs=2
    )
    assert fitted.error > 0


def test_other_blocks_are_as_fast_as_their_kind() -> None:
    usual = [known(seed, operator="usual") for seed in range(20, 30)]
    fitted = calibrate([known(1, slower=3.0, operator="slow"), *usual])
    new = known(5, operator="slow")
    for phase in PHASES:
        own = new.work[phase]
        factor = fitted.time_ns(new.block, phase, 1, own) / fitted.rates.time_ns(own)
        assert factor == pytest.approx(fitted.operators["slow", phase])
        assert factor > 1.5
    stranger = known(6, operator="never seen")
    own = stranger.work[PHASES[0]]
    assert fitted.time_ns(stranger.block, PHASES[0], 1, own) == pytest.approx(fitted.rates.time_ns(own))


def test_the_nearest_size_tells() -> None:
    rows = [known(1, size, slower=slower) for size, slower in ((1, 1.0), (16, 3.0))]
    rows = [KnownRow(rows[0].block, each.row, each.work) for each in rows]
    fitted = calibrate(rows)
    by_size = fitted.blocks[likeness(rows[0].block), PHASES[0]]
    own = work(7)[PHASES[0]]
    for size, nearest in ((1, 1), (3, 1), (5, 16), (64, 16)):
        expected = fitted.rates.time_ns(own) * by_size[nearest]
        assert fitted.time_ns(rows[0].block, PHASES[0], size, own) == pytest.approx(expected)


def test_rows_of_whole_blocks_each_once() -> None:
    first = known(1)
    sharded = first.row.model_copy(update={"shards": 2})
    recomputed = first.row.model_copy(update={"recompute": True})
    larger = first.row.model_copy(update={"microbatch_size": 2})
    block = first.block.model_copy(update={"costs": (first.row, sharded, recomputed, larger)})
    twin = block.model_copy(update={"id": "twin"})
    profile = Profile(name="p", source=Source(method="measured"), blocks=(block, twin))
    assert [(b.id, row.microbatch_size) for b, row in measured_rows(profile)] == [("b1", 1), ("b1", 2)]
