"""Theorem 3.1 of GraphPipe (thesis 3.10.1): Algorithm 4 as it is printed, and what is left of what is said about it."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from pipeplan.schedule.stage_graph import greedy_orders, kfkb_orders
from pipeplan.workload.task_graph import task_graph
from references.stage_graphs import (
    StageGraph,
    all_words,
    best_of_all,
    connected_graphs,
    forwards_first,
    from_last_to_first,
    in_flight,
    makespan,
    words_of,
)

Timed = Callable[[str], int]


def algorithm_4(count: int, time: Timed) -> str:
    """As printed: a backward next, if the stage is as quick as can be with one forward and one backward from then on.

    Given the stages after it, no order is quicker than all forwards first.
    """
    least, word = time("F" * count + "B" * count), "F"
    while len(word) < 2 * count:
        forwards, backwards = word.count("F"), word.count("B")
        early = backwards < forwards and time(alternating(word, count)) <= least
        word += "B" if early or forwards == count else "F"
    return word


def alternating(word: str, count: int) -> str:
    """Line 5: the word, a backward, a forward, a backward, ... without those that are not there any more."""
    left = {kind: count - word.count(kind) for kind in "FB"}
    for kind in itertools.islice(itertools.cycle("BF"), 4 * count):
        if left[kind] and (kind == "F" or left["B"] > left["F"]):
            word, left[kind] = word + kind, left[kind] - 1
    return word


def capped(word: str, count: int, most: int) -> str:
    """The word, then forwards while fewer than ``most`` micro-batches are in flight, else backwards."""
    while len(word) < 2 * count:
        forwards = word.count("F")
        word += "F" if forwards < count and 2 * forwards - len(word) < most else "B"
    return word


def greedy(case: StageGraph) -> tuple[str, ...]:
    workload = case.workload()
    graph = task_graph(workload)
    return words_of(graph, greedy_orders(workload, graph))


def flight(words: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(map(in_flight, words))


def test_algorithm_4_is_1f1b_on_chains_of_one_size() -> None:
    case = StageGraph.balanced((1, 1, 1), ((0, 1), (1, 2)), 4)
    assert from_last_to_first(case, algorithm_4) == greedy(case) == ("FFFBFBBB", "FFBFBFBB", "FBFBFBFB")


def test_algorithm_4_misses_the_papers_own_figure() -> None:
    """Fig. 3.5: after two backwards it looks whether 1F1B is quick enough from there, not whether it can catch up."""
    case = StageGraph.balanced((2, 1, 2), ((0, 1), (1, 2)), 8)
    printed = from_last_to_first(case, algorithm_4)
    assert printed == ("FFFFBBBB", "FFFFBFBFBFBFBBBB", "FBFBFBFB")
    assert makespan(case, printed) == makespan(case, greedy(case)) == best_of_all(case)[0]
    assert (flight(printed), flight(greedy(case))) == ((4, 4, 1), (3, 4, 1))


def test_the_time_of_a_stage_is_not_that_of_the_iteration() -> None:
    """A branch beside one that takes longer can wait: only the whole iteration shows it."""
    case = StageGraph.balanced((1, 1, 1, 2), ((0, 2), (0, 3), (1, 2)), 2)
    printed = from_last_to_first(case, algorithm_4)
    assert (flight(printed), flight(greedy(case))) == ((2, 2, 1, 1), (2, 1, 1, 1))
    assert best_of_all(case) == (8, [(2, 1, 1, 1)])


@pytest.mark.parametrize(
    ("case", "least", "printed"),
    [
        (StageGraph((1, 1, 1), ((0, 1), (1, 2)), 3, (3, 2, 1), (6, 4, 2)), 30, 33),
        (StageGraph((1, 4, 1), ((0, 2), (1, 2)), 4, (2, 1, 1), (2, 1, 1)), 16, 20),
    ],
)
def test_algorithm_4_is_slow_where_stages_take_unequal_time(case: StageGraph, least: int, printed: int) -> None:
    """What is quickest for the last stages, alone, is not for all."""
    assert makespan(case, from_last_to_first(case, algorithm_4)) == printed
    assert makespan(case, greedy(case)) == best_of_all(case)[0] == least


@pytest.mark.parametrize(("times", "lag"), [((1, 1, 1), 0), ((2, 1, 3), 0), ((3, 1, 2), 2)])
def test_what_is_true_of_one_stage_whatever_times_there_are(times: tuple[int, int, int], lag: int) -> None:
    """Given the stages after it, of all words with so many in flight the one that is full as soon as it can is best.

    Exchanging a backward and the forward right behind it never makes the stage, or one after it, later.
    """
    for edges, sizes in itertools.product(connected_graphs(3), itertools.product((1, 2), repeat=3)):
        case = StageGraph(sizes, edges, 4, times, times, (lag,) * len(edges))
        words: list[str | None] = list(forwards_first(case))
        for most in range(1, case.counts[0] + 1):
            found = {}
            for word in all_words(case.counts[0]):
                if in_flight(word) <= most:
                    words[0] = word
                    found[word] = makespan(case, words) or 2**62
            assert found[capped("", case.counts[0], most)] == min(found.values())


def test_there_may_be_no_best_schedule_where_stages_take_unequal_time() -> None:
    """Two first stages: each can have one micro-batch less in flight, but not both."""
    case = StageGraph((2, 1, 1), ((0, 2), (1, 2)), 6, (3, 1, 1), (6, 2, 2))
    assert best_of_all(case) == (54, [(2, 2, 1), (3, 1, 1)])


@pytest.mark.parametrize(
    ("case", "least", "found"),
    [
        (StageGraph((1, 2), ((0, 1),), 6, (3, 2), (3, 2)), 36, 38),
        (StageGraph((1, 1, 1), ((0, 1), (1, 2)), 4, (3, 2, 1), (6, 4, 2)), 36, 37),
    ],
)
def test_greedy_may_be_slow_where_stages_take_unequal_time(case: StageGraph, least: int, found: int) -> None:
    """A device that never waits for what comes soon runs two backwards where a forward is needed elsewhere."""
    assert best_of_all(case)[0] == least
    assert makespan(case, greedy(case)) == found


def test_table_32_may_be_slow_and_hold_more() -> None:
    """The third stage gives its gradients one by one, though they come to it by fours."""
    case = StageGraph.balanced((1, 2, 1, 4), ((0, 1), (1, 2), (2, 3)), 16, 1, 2)
    workload = case.workload()
    graph = task_graph(workload)
    ones = words_of(graph, kfkb_orders(workload, graph))
    assert (makespan(case, ones), flight(ones)) == (75, (13, 6, 8, 1))
    assert (makespan(case, greedy(case)), flight(greedy(case))) == (72, (12, 5, 8, 1))
