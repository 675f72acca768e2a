"""A device's network that exchanges state as a program says, while actions start at whatever time they do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from pipeplan.workload.action import Action, StateAction
from pipeplan.workload.elements import Stage
from pipeplan.workload.exchanges import passes
from pipeplan.workload.kinds import GRADIENT_ROLES, PARAMETER_ROLES, RESHARD, UNSHARD, Role


class ProgramNetwork:
    """A network of one device, asked for what its program says; what takes planned ns takes ``stretched`` ones.

    All devices of a stage exchange the same in turn, from starts of actions that they have agreed on, so that each
    knows when the others do.
    """

    def __init__(self, stages: Sequence[Stage], stretched: Callable[[int], int]) -> None:
        self._stages, self._stretched = stages, stretched
        self.restart(0)

    def restart(self, now_ns: int) -> None:
        """An iteration begins: nothing is gathered, and nothing is to be reduced."""
        self._asked = list[StateAction]()
        self._free_ns = self._begun_ns = now_ns
        self._last: tuple[int, Role] | None = None
        self._arrived = defaultdict[tuple[int, int], int](int)
        self._given_up = defaultdict[tuple[int, int], int](int)
        self._ready = defaultdict[tuple[int, int], int](int)
        self._reduced = defaultdict[tuple[int, int], int](int)

    def ask(self, state: StateAction) -> None:
        """The program comes to what exchanges state, or gives it up."""
        self._asked.append(state)

    def exchange(self, action: Action) -> int:
        """Run what was asked for since the action before this one; ns from which on it lets this one start."""
        asked, self._asked = self._asked, []
        for state in asked:
            place, blocks = (state.stage, state.group or 0), self._stages[state.stage].block_groups[state.group or 0]
            if state.kind == RESHARD:
                assert self._last is not None
                self._given_up[place] = self._begun_ns + self._moments(*self._last)[place[1]][1]
                continue
            gathers = state.kind == UNSHARD
            ready = self._given_up[place] if gathers else self._ready[place]
            took = self._stretched(blocks.unshard_ns if gathers else blocks.reduce_ns)
            self._free_ns = max(self._free_ns, self._begun_ns, ready) + took
            (self._arrived if gathers else self._reduced)[place] = self._free_ns
        least = 0
        for group, (before, _) in self._moments(action.stage, action.role).items():
            if action.role in PARAMETER_ROLES:
                least = max(least, self._arrived[action.stage, group] - before)
            if action.role in GRADIENT_ROLES:
                least = max(least, self._reduced[action.stage, group] - before)
        return least

    def begin(self, action: Action, start_ns: int) -> None:
        """An action starts."""
        self._begun_ns, self._last = start_ns, (action.stage, action.role)
        for group, (_, after) in self._moments(*self._last).items() if action.role in GRADIENT_ROLES else ():
            self._ready[action.stage, group] = start_ns + after

    def _moments(self, stage: int, role: Role) -> dict[int, tuple[int, int]]:
        """{group of blocks: when an action comes to it and has done with it, in ns since its start}"""
        course = passes(self._stages[stage].block_groups, role)
        return {group: (self._stretched(begin), self._stretched(end)) for group, begin, end in course}
