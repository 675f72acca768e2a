"""Scripts of a device's actions: what is written is what words mean one by one."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from pipeplan.schedule.classic import Script

pytestmark = pytest.mark.counted

Said = list[tuple[str, int]]


def one_by_one(said: Said, chunks: list[tuple[int, ...]], count: int) -> list[int]:
    """Word by word, as they are explained; a backward that owes a weight gradient waits in line."""
    order, owed = list[int](), list[tuple[int, int]]()
    begun = {(kind, chunk): 0 for kind in "FI" for chunk in range(len(chunks))}
    for word in (word for words, times in said for _ in range(times) for word in words.split()):
        kind, chunk = word[0], int(word[1:]) if word[1:] else None
        if kind == "W":
            first = next((each for each in owed if chunk in (None, each[0])), None)
            if first is not None:
                owed.remove(first)
                order.append(chunks[first[0]][2] * count + first[1])
            continue
        assert chunk is not None
        number = begun["F" if kind == "F" else "I", chunk]
        if number < count:
            begun["F" if kind == "F" else "I", chunk] += 1
            order.append(chunks[chunk][kind != "F"] * count + number)
            if kind == "B":
                order += [operation * count + number for operation in chunks[chunk][2:]]
            elif kind == "I" and len(chunks[chunk]) > 2:
                owed.append((chunk, number))
    return order


@pytest.mark.parametrize("seed", range(20))
def test_scripts_mean_what_their_words_do(seed: int) -> None:
    """With weight gradients apart, with some, and without; of words that run out early, and the end that is added."""
    rng = random.Random(seed)
    count, chunks = rng.randrange(1, 9), [(0, 1, 2), (3, 4, 5)]
    chunks = [each[: rng.choice([2, 3])] for each in chunks]
    stages: Any = [SimpleNamespace(devices=(0,)) for _ in chunks]
    problem: Any = SimpleNamespace(
        num_microbatches=count, workload=SimpleNamespace(stages=stages), stage_operations=chunks
    )
    script, said = Script(problem, 0), Said()
    for _ in range(rng.randrange(1, 9)):
        words = " ".join(rng.choices(["F0", "F1", "I0", "I1", "B0", "B1", "W0", "W1", "W"], k=rng.randrange(1, 7)))
        said.append((words, rng.randrange(-1, 12)))
        script.add(*said[-1])
    assert script.order == one_by_one(said, chunks, count)
    assert script.finish() == one_by_one([*said, ("W", 2 * count)], chunks, count)


def test_a_script_ends_where_its_words_have_nothing_left_to_do() -> None:
    """A number of times that nobody would wait for."""
    stages: Any = [SimpleNamespace(devices=(0,))]
    problem: Any = SimpleNamespace(num_microbatches=3, workload=SimpleNamespace(stages=stages))
    problem.stage_operations = [(0, 1, 2)]
    assert Script(problem, 0).add("F0 I0", 10**12).finish() == [0, 3, 1, 4, 2, 5, 6, 7, 8]
