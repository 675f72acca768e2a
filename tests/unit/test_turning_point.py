"""The turning point of a frontier."""

from __future__ import annotations

from pipeplan.frontier.turning import turning_point


def test_it_is_the_corner() -> None:
    assert turning_point([10, 11, 12, 50, 100], [900, 300, 100, 90, 85]) == 2


def test_units_do_not_matter() -> None:
    memory, time = [10, 11, 12, 50, 100], [900, 300, 100, 90, 85]
    assert turning_point([each * 10**9 for each in memory], [each * 1000 for each in time]) == 2


def test_short_frontiers_turn_at_their_start() -> None:
    assert turning_point([5], [5]) == turning_point([5, 6], [6, 5]) == 0
