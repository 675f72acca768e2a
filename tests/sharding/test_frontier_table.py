"""Tables of frontiers against plain loops over sets of points."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeplan.sharding.graph import contract
from pipeplan.sharding.table import PointLimit, Table, gather, product, table
from support.marks import some_of

Cell = list[tuple[int, int]]


def frontier(points: Cell) -> Cell:
    """Algorithm 1 of TensorOpt as printed."""
    kept: Cell = []
    for memory, time in sorted(set(points)):
        if not kept or time < kept[-1][1]:
            kept.append((memory, time))
    return kept


def plus(first: Cell, second: Cell) -> Cell:
    return frontier([(a + c, b + d) for (a, b), (c, d) in itertools.product(first, second)])


def cells_of(made: Table) -> list[Cell]:
    points = list(zip(made.memory_bytes.tolist(), made.time_ns.tolist(), strict=True))
    return [points[start:end] for start, end in itertools.pairwise(made.starts.tolist())]


def random_table(rng: np.random.Generator, rows: int, columns: int, copies: int, high: int) -> Table:
    shape = (rows, columns, copies)
    memory, time = rng.integers(0, high, shape), rng.integers(0, high, shape)
    return table(memory, time, rng.random(shape) < 0.8, copies=copies)


sizes = st.integers(1, 4)
highs = st.sampled_from([3, 20, 1 << 40])


@settings(max_examples=some_of(60))
@given(st.integers(0, 2**32 - 1), sizes, sizes, st.integers(1, 5), highs)
def test_a_table_keeps_the_frontier_of_each_cell(seed: int, rows: int, columns: int, copies: int, high: int) -> None:
    rng = np.random.default_rng(seed)
    shape = (rows, columns, copies)
    memory, time, allowed = rng.integers(0, high, shape), rng.integers(0, high, shape), rng.random(shape) < 0.7
    made = table(memory, time, allowed, copies=copies)
    expected = [
        frontier([(int(memory[r, c, v]), int(time[r, c, v])) for v in range(copies) if allowed[r, c, v]])
        for r in range(rows)
        for c in range(columns)
    ]
    assert cells_of(made) == expected
    for point, variant in enumerate(made.picks[0].tolist()):
        row, column = divmod(made.cell_of(point), columns)
        assert memory[row, column, variant] == made.memory_bytes[point]
        assert time[row, column, variant] == made.time_ns[point]


@settings(max_examples=some_of(60))
@given(st.integers(0, 2**32 - 1), sizes, sizes, sizes, st.integers(1, 4), highs, st.sampled_from([1, 7, 1 << 20]))
def test_contraction_is_the_union_of_products_over_the_middle(
    seed: int, rows: int, middle: int, columns: int, copies: int, high: int, batch: int
) -> None:
    rng = np.random.default_rng(seed)
    left, right = random_table(rng, rows, middle, copies, high), random_table(rng, middle, columns, copies, high)
    a, b = cells_of(left), cells_of(right)
    expected = [
        frontier([point for m in range(middle) for point in plus(a[r * middle + m], b[m * columns + c])])
        for r in range(rows)
        for c in range(columns)
    ]
    made = contract(left, right, batch_points=batch)
    assert cells_of(made) == expected
    for point in range(made.num_points):
        first, second = made.picks[:, point]
        assert left.memory_bytes[first] + right.memory_bytes[second] == made.memory_bytes[point]
        assert left.time_ns[first] + right.time_ns[second] == made.time_ns[point]


@settings(max_examples=some_of(60))
@given(st.integers(0, 2**32 - 1), sizes, sizes, sizes, st.integers(1, 4), highs, st.floats(0.0, 1.0))
def test_what_is_wanted_of_a_contraction_is_in_it_and_nothing_wanted_is_missing(
    seed: int, rows: int, middle: int, columns: int, copies: int, high: int, share: float
) -> None:
    rng = np.random.default_rng(seed)
    left, right = random_table(rng, rows, middle, copies, high), random_table(rng, middle, columns, copies, high)
    limit = PointLimit((share, 1.0), rng.uniform(0, 2 * high, (rows, columns)))
    everything, made = contract(left, right), contract(left, right, limit)
    for cell, points in enumerate(cells_of(everything)):
        wanted = {(m, t) for m, t in points if share * m + t <= limit.most.flat[cell]}
        assert wanted <= set(cells_of(made)[cell])


@settings(max_examples=some_of(40))
@given(st.integers(0, 2**32 - 1), sizes, sizes, st.booleans(), st.integers(1, 4), highs)
def test_products_are_cell_by_cell_and_a_row_serves_all(
    seed: int, rows: int, columns: int, one_row: bool, copies: int, high: int
) -> None:
    rng = np.random.default_rng(seed)
    left = random_table(rng, 1 if one_row else rows, columns, copies, high)
    right = random_table(rng, rows, columns, copies, high)
    a, b = cells_of(left), cells_of(right)
    expected = [plus(a[index % columns if one_row else index], cell) for index, cell in enumerate(b)]
    assert cells_of(product(left, right)) == expected


def test_gathering_transposes_and_selects() -> None:
    rng = np.random.default_rng(0)
    source = random_table(rng, 3, 2, 3, 10)
    turned = gather(source, np.arange(6).reshape(3, 2).T)
    given_cells = cells_of(source)
    assert (turned.rows, turned.columns) == (2, 3)
    assert cells_of(turned) == [given_cells[cell] for cell in (0, 2, 4, 1, 3, 5)]
    assert (source.memory_bytes[turned.picks[0]] == turned.memory_bytes).all()


def test_costs_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="neither"):
        table(np.zeros((2, 2, 2)), np.zeros((2, 2, 2)))
