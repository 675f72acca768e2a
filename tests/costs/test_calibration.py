"""Fitting an efficiency per family of operators to measured blocks."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeplan.costs.calibration import (
    FAMILIES,
    Calibration,
    Family,
    KnownRow,
    calibrate,
    family_of,
    likeness,
    measured_rows,
)
from pipeplan.costs.devices import CORE, PHASES, Kernel, Work, device_preset
from pipeplan.errors import UsageError
from pipeplan.files import Block, CostRow, Profile, Source
from support.marks import some_of

CPU = device_preset("cpu")
TRUE: dict[Family, float] = {"products": 0.83, "attention": 0.41, "element-wise": 1.7, "rows of tables": 0.25}
KERNELS = {
    "products": Kernel(4 * 10**8, 10**7, matrix=True, weights=True),
    "attention": Kernel(10**8, 10**6, matrix=True, form="attention", head_size=64),
    "element-wise": Kernel(10**6, 10**7),
    "rows of tables": Kernel(10**5, 3 * 10**6, form="rows"),
}


def usual(kernel: Kernel) -> float:
    return CPU.kernel_ns(kernel.flops, kernel.moved_bytes, matrix=kernel.matrix)


def kernels(numbers: random.Random, families: tuple[Family, ...] = FAMILIES) -> list[Kernel]:
    return [KERNELS[numbers.choice(families)] for _ in range(numbers.randint(1, 6))]


def known(seed: int, true: dict[Family, float] = TRUE, noise: float = 0.0) -> KnownRow:
    numbers = random.Random(seed)
    work: Work = {phase: kernels(numbers) for phase in PHASES}
    times = {
        phase: round(sum(usual(each) / true[family_of(each)] for each in work[phase]) * (1 + numbers.gauss(0, noise)))
        for phase in PHASES
    }
    backward = times["input_grad_ns"] + times["weight_grad_ns"]
    row = CostRow.model_validate({"microbatch_size": 1, "backward_ns": backward, **times})
    return KnownRow(Block(id=f"b{seed}", operator="x", parameter_bytes=seed, costs=(row,)), row, work)


def test_families() -> None:
    assert {name: family_of(each) for name, each in KERNELS.items()} == {family: family for family in FAMILIES}
    assert family_of(Kernel(1, 1, matrix=True, form="attention_backward")) == "attention"
    assert family_of(Kernel(1, 1, matrix=True, form="grouped")) == "products"


def test_known_efficiencies_are_found_again() -> None:
    rows = [known(seed) for seed in range(12)]
    found = calibrate(rows, usual)
    assert found.efficiencies == pytest.approx(TRUE, rel=1e-4)
    assert found.after < 1e-5 < 0.3 < found.before
    assert found.rows == 12
    other = known(99)
    again = found.row(other.row, {**other.work, CORE: [KERNELS["attention"]]})
    for phase in (*PHASES, "backward_ns"):
        assert getattr(again, phase) == pytest.approx(getattr(other.row, phase), rel=1e-4)
    assert again.selective_ns == round(usual(KERNELS["attention"]) / found.efficiencies["attention"])
    for said in ("products 0.83", "attention 0.41", "element-wise 1.7", "rows of tables 0.25", "12 measured rows"):
        assert said in found.notes


def test_noise_is_what_is_left() -> None:
    found = calibrate([known(seed, noise=0.03) for seed in range(30)], usual)
    assert found.efficiencies == pytest.approx(TRUE, rel=0.1)
    assert 0.005 < found.after < 0.04 < found.before


def test_no_other_efficiencies_are_nearer() -> None:
    """Against a grid around what is found: no neighbour has fewer squares of relative errors."""
    rows = [known(seed, noise=0.2) for seed in range(6)]
    found = calibrate(rows, usual)

    def squares(efficiencies: dict[Family, float]) -> float:
        tried = Calibration(usual, efficiencies, 0, 0, 0)
        return sum((tried.time_ns(each.work[phase]) / ns - 1) ** 2 for each in rows for phase, ns in each.timed)

    best = squares(dict(found.efficiencies))
    for family in FAMILIES:
        for factor in (0.98, 1.02):
            changed = dict(found.efficiencies)
            changed[family] *= factor
            assert squares(changed) >= best


def test_what_was_not_measured_has_the_presets_rates() -> None:
    numbers = random.Random(3)
    work: Work = {phase: kernels(numbers, ("products", "element-wise")) for phase in PHASES}
    times = {phase: round(2 * sum(map(usual, work[phase]))) for phase in PHASES}
    row = CostRow.model_validate({"microbatch_size": 1, **times})
    found = calibrate([KnownRow(Block(id="b", operator="x", costs=(row,)), row, work)], usual)
    assert found.time_ns([KERNELS["rows of tables"]]) == usual(KERNELS["rows of tables"])
    assert "none of attention and rows of tables was measured" in found.notes


@settings(max_examples=some_of(40))
@given(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 10**9)), min_size=1, max_size=6))
def test_efficiencies_are_sane_and_the_fit_is_no_further_in_squares(samples: list[tuple[int, int]]) -> None:
    rows = []
    for seed, ns in samples:
        one = known(seed)
        row = one.row.model_copy(update=dict.fromkeys(PHASES, ns))
        rows.append(KnownRow(one.block, row, one.work))
    found = calibrate(rows, usual)
    assert all(0.01 <= each <= 100 for each in found.efficiencies.values())

    def squares(of: Calibration) -> float:
        return sum((of.time_ns(each.work[phase]) / ns - 1) ** 2 for each in rows for phase, ns in each.timed)

    assert squares(found) <= squares(Calibration(usual, {}, 0, 0, 0)) * (1 + 1e-6)


def test_nothing_to_fit_to() -> None:
    one = known(1)
    free = KnownRow(one.block, one.row.model_copy(update=dict.fromkeys(PHASES, 0)), one.work)
    with pytest.raises(UsageError, match="no times to fit to; measure at least one block"):
        calibrate([free], usual)


def test_rows_of_whole_blocks_each_once() -> None:
    first = known(1)
    sharded = first.row.model_copy(update={"shards": 2})
    recomputed = first.row.model_copy(update={"recompute": True})
    larger = first.row.model_copy(update={"microbatch_size": 2})
    block = first.block.model_copy(update={"costs": (first.row, sharded, recomputed, larger)})
    twin = block.model_copy(update={"id": "twin"})
    profile = Profile(name="p", source=Source(method="measured"), blocks=(block, twin))
    assert [(b.id, row.microbatch_size) for b, row in measured_rows(profile)] == [("b1", 1), ("b1", 2)]
    assert likeness(block) == likeness(twin)
