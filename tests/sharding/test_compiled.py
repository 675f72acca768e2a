"""The compiled loops of frontier tracking against numpy's: the same points, made of the same ones."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeplan.costs.clusters import named_cluster
from pipeplan.examples.models import model
from pipeplan.sharding import compiled, kernels
from pipeplan.sharding.bounds import _of_rows
from pipeplan.sharding.cost_model import CostOptions, cost_model
from pipeplan.sharding.graph import contract
from pipeplan.sharding.table import PointLimit, Table, product, table
from pipeplan.sharding.tracking import Tracked, track
from pipeplan.time_limit import Limit, TimeUpError
from references import cost_graphs as graphs
from support.marks import some_of


def drawn(rng: np.random.Generator, rows: int, columns: int, copies: int, high: int) -> Table:
    shape = (rows, columns, copies)
    memory, time = rng.integers(0, high, shape), rng.integers(0, high, shape)
    return table(memory, time, rng.random(shape) < 0.8, copies=copies)


def same(made: Table, expected: Table) -> None:
    for array in ("starts", "memory_bytes", "time_ns", "picks"):
        np.testing.assert_array_equal(getattr(made, array), getattr(expected, array), array)


sizes = st.integers(1, 4)


@settings(max_examples=some_of(40))
@given(st.integers(0, 2**32 - 1), sizes, sizes, sizes, st.sampled_from([1, 4, 200]), st.sampled_from([3, 30, 1 << 40]))
def test_sums_of_frontiers_are_those_of_numpy(
    seed: int, rows: int, middle: int, columns: int, copies: int, high: int
) -> None:
    rng = np.random.default_rng(seed)
    left, right = drawn(rng, rows, middle, copies, high), drawn(rng, middle, columns, copies, high)
    other = drawn(rng, 1 if seed % 2 else rows, middle, copies, high)
    for limited in (False, True):
        weights = (rng.random(), 1.0)
        limit = PointLimit(weights, rng.uniform(0, 2 * high, (rows, columns))) if limited else None
        same(compiled.contract(kernels, left, right, limit), contract(left, right, limit))
        limit = PointLimit(weights, rng.uniform(0, 2 * high, (rows, middle))) if limited else None
        for pair in ((left, other), (other, left)):
            same(compiled.product(kernels, *pair, limit), product(*pair, limit))


@pytest.mark.parametrize("bent", [0.5, 1.0, 2.0])
def test_sums_of_large_frontiers_are_those_of_numpy(bent: float) -> None:
    """Of 700 points each, on a line and on bent ones, where most sums are of use, or few."""
    rng = np.random.default_rng(7)
    memory = np.sort(rng.integers(0, 100_000, (2, 700)), axis=1)
    time = np.rint(100_000 * (1 - memory / 100_000) ** bent).astype(np.int64)
    left, right = (table(memory[side][None, None], time[side][None, None], copies=700) for side in (0, 1))
    for most in (np.inf, 110_000.0, -np.inf):
        limit = PointLimit((1.0, 1.0), np.array([[most]]))
        same(compiled.product(kernels, left, right, limit), product(left, right, limit))


def test_least_sums_of_costs_are_those_of_numpy() -> None:
    rng = np.random.default_rng(3)
    left, right = rng.random((7, 5)), rng.random((5, 9))
    left[rng.random(left.shape) < 0.3] = np.inf
    np.testing.assert_array_equal(kernels.min_plus(left, right), _of_rows(left, right))


def both(monkeypatch: pytest.MonkeyPatch, *args: object, **kwargs: object) -> tuple[Tracked, Tracked]:
    monkeypatch.setattr(compiled, "COMPILED_AFTER", math.inf)
    by_numpy = track(*args, **kwargs)
    monkeypatch.setattr(compiled, "COMPILED_AFTER", 0)
    return track(*args, **kwargs), by_numpy


@pytest.mark.parametrize("within", [0.0, 1e-15, 0.05])
def test_whole_frontiers_are_those_of_numpy(monkeypatch: pytest.MonkeyPatch, within: float) -> None:
    """The same strategies, and the same factors."""
    rng = np.random.default_rng(11)
    for num, pairs in ((6, graphs.chain(6)), (7, graphs.residual(7)), (7, graphs.branching(rng, 7))):
        graph = graphs.graph_of(rng, rng.integers(3, 7, num).tolist(), pairs, variants=2, high=10_000)
        made, expected = both(monkeypatch, graph, within=within)
        assert made.factor == expected.factor
        np.testing.assert_array_equal(made.memory_bytes, expected.memory_bytes)
        np.testing.assert_array_equal(made.time_ns, expected.time_ns)
        for point in range(len(made.memory_bytes)):
            assert made.strategy(point) == expected.strategy(point)


@pytest.mark.parametrize(
    ("name", "dimensions", "within"),
    [
        pytest.param("wideresnet", 2, 0.01, marks=[pytest.mark.slow, pytest.mark.long]),
        pytest.param("transformer", 2, 0.01, marks=[pytest.mark.slow, pytest.mark.long]),
        pytest.param("wideresnet", 2, 0.0, marks=[pytest.mark.slow, pytest.mark.long]),
        pytest.param("transformer", 2, 0.0, marks=[pytest.mark.slow, pytest.mark.long]),
    ],
)
@pytest.mark.timeout(1800)
def test_frontiers_of_models_are_those_of_numpy(
    monkeypatch: pytest.MonkeyPatch, name: str, dimensions: int, within: float
) -> None:
    profile = model(f"tensoropt-{name}", device="v100-16gb", microbatch_sizes=[256])
    options = CostOptions(mesh_dimensions=dimensions)
    graph = cost_model(profile, named_cluster("tensoropt", 16), 16, 256, options=options).graph
    made, expected = both(monkeypatch, graph, within=within)
    assert made.factor == expected.factor
    np.testing.assert_array_equal(made.memory_bytes, expected.memory_bytes)
    np.testing.assert_array_equal(made.time_ns, expected.time_ns)
    for point in range(0, len(made.memory_bytes), 1 + len(made.memory_bytes) // _STRATEGIES):
        assert made.strategy(point) == expected.strategy(point)


_STRATEGIES = 400
"""Points whose strategies are compared, at least half as many."""


def test_small_frontiers_and_those_without_numba_are_numpys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_offered", 0.0)
    assert compiled.kernels(compiled.COMPILED_AFTER) is None
    assert compiled.kernels(1) is kernels
    compiled._imported.cache_clear()
    monkeypatch.setattr(compiled, "find_spec", lambda name: None)
    assert compiled.kernels(1) is None
    compiled._imported.cache_clear()


def test_a_product_of_a_million_million_sums_ends_when_time_is_up() -> None:
    """After some looks at the clock; else in an hour."""
    line = np.arange(1 << 20)
    large = table(line[None, None], line[None, None, ::-1], copies=len(line))
    looks = itertools.count()
    with pytest.raises(TimeUpError), Limit(3.5, clock=lambda: float(next(looks)), started=0).enforced():
        compiled.product(kernels, large, large)
