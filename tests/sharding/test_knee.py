"""The turning point of a frontier."""

from __future__ import annotations

from pipeplan.sharding.tracking import knee


def test_it_is_the_corner() -> None:
    assert knee([10, 11, 12, 50, 100], [900, 300, 100, 90, 85]) == 2


def test_units_do_not_matter() -> None:
    memory, time = [10, 11, 12, 50, 100], [900, 300, 100, 90, 85]
    assert knee([each * 10**9 for each in memory], [each * 1000 for each in time]) == 2


def test_there_is_none_without_a_point_below_the_line() -> None:
    assert knee([5], [5]) is knee([5, 6], [6, 5]) is None
    assert knee([1, 2, 3], [3, 2, 1]) is None  # on the line
    assert knee([1, 3, 4], [79, 68, 60]) is None  # above it
