"""Known schedules of a chain by closed form: what each holds in flight on every position, and how long it waits.

With p positions, m micro-batches and v stages (chunks) on each, position d counted from 0. By these forms layouts are
compared before anything is cut or scheduled, and stages recompute of their blocks what a schedule's memory asks for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeplan.partition.chain.costs import FloatArray
from pipeplan.partition.strategies import STRATEGIES
from pipeplan.schedule.classic import CLASSIC
from pipeplan.workload.memory import peak_memory
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.task_graph import task_graph
from pipeplan.workload.workload import Workload

Numbers = NDArray[Any]
"""Whole numbers, as integers or floats."""

Counts = Callable[[Numbers, Numbers, int, Numbers], list[Numbers]]
"""(p, m, v, d) -> [chunk] micro-batches on position d, of arrays that broadcast."""

Bubble = Callable[[FloatArray, FloatArray, FloatArray, int], FloatArray]
"""(forward, input gradient, weight gradient, v) ns of a position, of one micro-batch -> ns that each further position
adds to what all of them wait."""


@dataclass(frozen=True, slots=True)
class Usual:
    """A known schedule of a strategy.

    ``in_flight`` are micro-batches whose activations a stage holds at most; ``owed`` those of which it holds, at the
    same time, only what the weight gradient needs. One that ``splits`` runs input and weight gradients apart; without a
    name, either way. Others of its strategy are looked at ``beside`` it, which have no closed form here.
    """

    name: str
    strategy: str
    splits: bool
    in_flight: Counts
    bubble: Bubble
    owed: Counts | None = None
    ending: Counts | None = None
    exact: bool = False
    beside: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[Callable[[int], Usual], tuple[int]]:
        """Other processes have the same table."""
        return _usual, (USUAL.index(self),)

    def names(self, splits: bool) -> tuple[str, ...]:
        """It, and the known schedules of its strategy that are quick to make, with backward split or whole."""
        own = [each for each in USUAL if each.strategy == self.strategy and (each.splits == splits or not each.name)]
        able = [each for each in own if each == self or (each.name in CLASSIC and not CLASSIC[each.name].automatic)]
        return tuple(dict.fromkeys(name for each in able for name in (each.name, *each.beside) if name))


def _one_f_one_b(p: Numbers, m: Numbers, v: int, d: Numbers) -> list[Numbers]:
    return [np.minimum(m, p - d)]


def _interleaved(p: Numbers, m: Numbers, v: int, d: Numbers) -> list[Numbers]:
    """Those of the warmup and one more, in groups of p micro-batches, chunk after chunk."""
    forwards = np.minimum(m * v, 2 * (p - 1 - d) + (v - 1) * p + 1)
    whole, rest = np.divmod(forwards, p * v)
    return [np.minimum(m, whole * p + np.clip(rest - chunk * p, 0, p)) for chunk in range(v)]


def _zero_bubble_v(p: Numbers, m: Numbers, v: int, d: Numbers) -> list[Numbers]:
    return [np.minimum(m, 2 * p - 1 - d), np.minimum(m, d + 1)]


def _v_half(p: Numbers, m: Numbers, v: int, d: Numbers) -> list[Numbers]:
    """A micro-batch is on the first chunk for 6 (p - 1) + 3 - 3 d slots and on the second for 3 d + 1, six to each."""
    return [np.minimum(m, p - d // 2), np.minimum(m, 1 + d // 2)]


def _both_ways(p: Numbers, m: Numbers, v: int, d: Numbers) -> list[Numbers]:
    """On each route, half of the micro-batches of 1F1B's first stage; with chunks those that come in between, too."""
    held = np.minimum(m, p * (1 + (v > 1) * (p - 1) / (p * v))) / 2
    return [held + 0 * d] * v


USUAL: tuple[Usual, ...] = (
    Usual("1f1b", "one-to-one", False, _one_f_one_b, lambda f, i, w, v: f + i + w, exact=True),
    Usual(
        "zb-h1",
        "one-to-one",
        True,
        _one_f_one_b,
        lambda f, i, w, v: f + i - w,
        lambda p, m, v, d: [np.minimum(np.maximum(0, m - (p - d)), d)],
    ),
    Usual("interleaved-1f1b", "circular", False, _interleaved, lambda f, i, w, v: (f + i + w) / v),
    Usual(
        "zb-v",
        "v-shape",
        True,
        _zero_bubble_v,
        lambda f, i, w, v: f + i - 2 * w,
        ending=lambda p, m, v, d: [np.minimum(m, d)] * 2,
        beside=("dualpipe-v",),
    ),
    Usual("v-half", "v-shape", True, _v_half, lambda f, i, w, v: f + i, lambda p, m, v, d: [np.minimum(m, 1)] * 2),
    Usual("", "bidirectional", False, _both_ways, lambda f, i, w, v: (f + i + w) / 2, beside=("chimera", "greedy")),
    Usual("", "bidirectional-v-shape", False, _both_ways, lambda f, i, w, v: (f + i + w) / (2 * v), beside=("greedy",)),
)
"""1F1B (PipeDream-Flush), ZB-H1 (Zero Bubble Pipeline Parallelism, section 2: bubble and memory of each), Megatron-LM's
interleaved 1F1B (Narayanan et al. 2021, section 2.2), ZB-V (Zero Bubble, section 6), V-Half (Pipeline Parallelism with
Controllable Memory, section 3, by its building block), and what two routes hold and wait with greedy orders."""


def _usual(number: int) -> Usual:
    return USUAL[number]


def usual_of(strategy: str, chunks: int, splits: bool, scheduler: str) -> list[Usual]:
    """Those of a strategy that may be asked for: with backward whole, or also ``splits``; by name, or ``auto``.

    Where none is, that which holds as much as the first of the strategy: schedules with other names are searched.
    """
    own = [each for each in USUAL if each.strategy == ("one-to-one" if STRATEGIES[strategy].in_line else strategy)]
    if strategy == "v-shape" and chunks != 2:  # rows of chunks in turn hold about as much
        own = [each for each in USUAL if each.strategy == "circular"]
    able = [each for each in own if (splits or not each.splits) and scheduler in ("auto", each.name)]
    return able or own[:1]


def excess(workload: Workload, usual: Usual) -> list[int] | None:
    """[position] bytes by which its devices are too small for the schedule, which true orders say; None: it has none.

    A run of so few micro-batches is looked at that no device ever holds more of a longer one. Devices that run nothing
    are at no position.
    """
    if usual.name not in CLASSIC:
        return None
    rounds = OneMicrobatch.of(workload, require_room=False)
    positions = sorted({device for stage in rounds.workload.stages for device in stage.devices})
    per_device = len(workload.stages) // len(positions)
    enough = (1 + per_device) * len(positions) * rounds.microbatches_per_round
    short = workload.with_microbatches(min(workload.num_microbatches, enough))
    problem = OneMicrobatch.of(short, require_room=False)
    classic = CLASSIC[usual.name]
    if classic.applies(problem) is not None:
        return None
    graph = task_graph(problem.workload)
    peaks = peak_memory(graph, classic.orders(problem, graph))
    both = [(peaks[device].peak_bytes, problem.workload.devices[device].memory_bytes) for device in positions]
    return [0 if limit is None else max(0, peak - limit) for peak, limit in both]
