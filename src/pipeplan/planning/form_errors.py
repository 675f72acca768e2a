"""By how much closed forms of the table of layouts have been off, for each kind of row: what looks at rows found.

A kind is a strategy with its usual schedule. What its closed form leaves out all its rows lack, so that of a kind whose
best rows took twice as long as they should others are no better: they are put off until rows of other kinds have been
looked at. So are rows that need no less than one of their kind, with as many positions and stages, that did not fit:
how well memory can be shared depends on how many blocks a stage has.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field

from pipeplan.planning.uniform_space import BoundedChoice


@dataclass(slots=True)
class FormErrors:
    """{kind: the least that a row took, in times of its estimate; actions of the longest, and the same of that}; {cut:
    the least bytes of rows that did not fit}.

    A cut is of a kind, with so many positions and stages on each.
    """

    _times: dict[Hashable, float] = field(default_factory=dict)
    _longest: dict[Hashable, tuple[int, float]] = field(default_factory=dict)
    _short: dict[Hashable, float] = field(default_factory=dict)

    def learn(self, row: BoundedChoice, value_ns: int | None) -> None:
        """What a row took; None where nothing of it fits."""
        if value_ns is None:
            cut = _cut(row)
            self._short[cut] = min(row.usual_bytes, self._short.get(cut, math.inf))
        else:
            kind, times, actions = _kind(row), value_ns / row.usual_ns, row.choice.actions_looked_at
            self._times[kind] = min(times, self._times.get(kind, math.inf))
            self._longest[kind] = max((actions, times), self._longest.get(kind, (0, 0.0)))

    def likely_ns(self, row: BoundedChoice) -> float:
        """What it should take if it is as far off as the longest run of its kind that was looked at."""
        return row.usual_ns * self._longest.get(_kind(row), (0, 1.0))[1]

    def expected_ns(self, row: BoundedChoice) -> float:
        """What it should take, at best; inf where it should not fit, 0 where no row of its kind was looked at."""
        cut = _cut(row)
        if row.usual_bytes >= self._short.get(cut, math.inf):
            return math.inf
        known = 1.0 if cut in self._short else 0.0
        return row.usual_ns * self._times.get(_kind(row), known)


def _kind(row: BoundedChoice) -> Hashable:
    usual = row.choice.usual
    return row.choice.strategy, usual and usual.name


def _cut(row: BoundedChoice) -> Hashable:
    return _kind(row), row.choice.positions, row.choice.per_position
