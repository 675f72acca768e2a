"""What many blocks cost, as columns of numbers: thousands in the time of a hundred rows.

As :func:`pipeplan.costs.blocks.block_costs`, :func:`pipeplan.costs.zero.with_exchanges` and
:func:`pipeplan.costs.experts.kept_of` have it block by block, which say what is wrong where a block has no such costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeplan.costs.blocks import StageCost, TiedShare
from pipeplan.costs.speeds import at_speed
from pipeplan.costs.states import States
from pipeplan.costs.zero import Exchanging, Experts, Zero
from pipeplan.files import Block, CostRow
from pipeplan.time_limit import checked
from pipeplan.units import MAX_TOTAL
from pipeplan.workload.elements import Again
from pipeplan.workload.kinds import STATE_KINDS, MemoryBytes

Column = NDArray[np.int64]

MANY = 64
"""From so many blocks on columns are quicker than rows."""

_TIMES = ("forward_ns", "backward_ns", "input_grad_ns", "weight_grad_ns")
_NAMES = (
    *(*_TIMES, "selective_ns"),
    *("activation_bytes", "weight_grad_bytes", "workspace_bytes", "selective_activation_bytes"),
)
_NUMBERS = attrgetter(*_NAMES)
_SUMMED = (*_TIMES, "activation_bytes", "weight_grad_bytes")
_NONE = -1
"""In a column: the row does not say it."""

_EXACT = 2**53
"""Whole numbers below it are the same as floats."""


@dataclass(frozen=True, slots=True)
class Columns:
    """[block] ns and bytes on each device, and [block, kind of state] bytes kept.

    ``split``: has input and weight gradients apart, whose times say nothing elsewhere.
    """

    forward_ns: Column
    backward_ns: Column
    input_grad_ns: Column
    weight_grad_ns: Column
    split: NDArray[np.bool_]
    activation_bytes: Column
    weight_grad_bytes: Column
    workspace_bytes: Column
    state: Column

    @classmethod
    def of(
        cls,
        blocks: Sequence[Block],
        again: Sequence[Again],
        taken: Sequence[int],
        microbatch_size: int,
        shards: int,
        *,
        context: int,
        states: States,
        zero: Zero,
        exchanging: Exchanging,
        experts: Experts,
        speed: float,
    ) -> Columns | None:
        """Of blocks that run so ``again`` and have inputs of ``taken`` bytes; None where rows must say what is wrong.

        ``states`` are what training keeps of each. What actions of programs exchange is not among it.
        """
        chosen = [
            _chosen(*each, microbatch_size, shards, context, experts)
            for each in checked(zip(blocks, again, strict=True))
        ]
        if None in chosen or exchanging.every is not None:
            return None
        numbers = _between([each for each in chosen if each is not None], microbatch_size)
        if numbers is None:
            return None
        _run_again(numbers, again, np.array([each is not None and each[2] for each in chosen]), taken)
        for name in _TIMES if speed != 1 else ():
            numbers[name] = np.array([ns if ns == _NONE else at_speed(ns, speed) for ns in numbers[name].tolist()])
        numbers["workspace_bytes"] += states.cast(shards, experts)
        split = numbers["input_grad_ns"] != _NONE
        halves = np.where(split, numbers["input_grad_ns"] + numbers["weight_grad_ns"], 0)  # of inference neither
        numbers["backward_ns"] = np.where(numbers["backward_ns"] == _NONE, halves, numbers["backward_ns"])
        _exchange(numbers, states, shards, zero, exchanging, experts)
        said = {name: numbers[name] for name in cls.__dataclass_fields__ if name in numbers}
        return cls(**said, split=split, state=states.kept(shards, zero, experts))

    @classmethod
    def of_costs(cls, costs: Sequence[StageCost]) -> Columns:
        """The same of what is known row by row."""
        said = {name: [getattr(cost, name) for cost in costs] for name in cls.__dataclass_fields__ if name in _NAMES}
        numbers = {
            name: np.array([_NONE if each is None else each for each in column], dtype=np.int64)
            for name, column in said.items()
        }
        state = np.array([[cost.state[kind] for kind in STATE_KINDS] for cost in costs], dtype=np.int64)
        return cls(**numbers, split=numbers["input_grad_ns"] != _NONE, state=state)

    def of_some(self, places: Sequence[int]) -> Columns:
        """The blocks in these places, of which some may be there again and again."""
        return Columns(*(getattr(self, name)[places] for name in self.__dataclass_fields__))

    def stages(
        self, sizes: Sequence[int], counted_again: Sequence[int], shared: Sequence[Mapping[TiedShare, int]]
    ) -> Iterator[StageCost]:
        """What blocks cost that run one after another, so many at a time.

        Less the bytes that several of them count again, and what they have of what they share; each as it is there.
        """
        begins = np.cumsum([0, *sizes[:-1]])
        summed = [np.add.reduceat(_summable(getattr(self, name)), begins).tolist() for name in _SUMMED]
        workspaces = np.maximum.reduceat(self.workspace_bytes, begins).tolist()
        split = np.logical_and.reduceat(self.split, begins).tolist()
        states = np.add.reduceat(_summable(self.state), begins).tolist()
        every = zip(*summed, workspaces, split, states, counted_again, shared, strict=True)
        for forward, backward, inputs, weights, held, owed, workspace, splits, kept, again, tied in checked(every, 64):
            state = MemoryBytes.of_state(kept)
            for share, count in tied.items():
                state -= share.state * (count - 1)
            yield StageCost(
                forward,
                backward,
                inputs if splits else None,
                weights if splits else None,
                max(0, held - again),
                owed,
                workspace,
                state,
                frozenset(tied),
            )


def _summable(column: Column) -> NDArray[Any]:
    """A column whose sums are right however large they are: beyond 64 bits of Python's own numbers."""
    return column if len(column) * int(column.max()) <= MAX_TOTAL else column.astype(object)


_Chosen = tuple[CostRow, CostRow, bool]
"""The rows of the nearest sizes, from below and above; and whether running again follows from them."""


def _chosen(
    block: Block, again: Again, microbatch_size: int, shards: int, context: int, experts: Experts
) -> _Chosen | None:
    """The rows that say what a block costs; None where it has none."""
    own, split = (experts.size, experts.split) if block.expert_parameters else (1, 1)
    usable = [
        row
        for row in block.costs
        if row.shards == shards and row.context == context and row.expert == own and row.expert_shards == split
        if not row.configuration
    ]
    wanted = again is True
    rows = [row for row in usable if row.recompute == wanted]
    derived = wanted and not rows
    if derived:
        rows = [row for row in usable if not row.recompute]
    low = high = None
    for row in rows:
        size = row.microbatch_size
        if size == microbatch_size:
            return row, row, derived
        if size < microbatch_size and (low is None or size > low.microbatch_size):
            low = row
        if size > microbatch_size and (high is None or size < high.microbatch_size):
            high = row
    return None if low is None or high is None else (low, high, derived)


def _between(chosen: Sequence[_Chosen], microbatch_size: int) -> dict[str, Column] | None:
    """{name: what rows say, linear between those of two sizes}; None where these do not say the same things."""
    numbers = _table([low for low, _, _ in chosen])
    apart = np.array([low is not high for low, high, _ in chosen])
    if not apart.any():
        return numbers
    above = _table([high for _, high, _ in chosen])
    offset = np.array([microbatch_size - low.microbatch_size for low, _, _ in chosen])
    width = np.array([high.microbatch_size - low.microbatch_size for low, high, _ in chosen]) + ~apart
    for name, before in numbers.items():
        after = above[name]
        most = float(np.abs(after - before).max()) * float(offset.max())
        if ((before == _NONE) != (after == _NONE)).any() or most >= _EXACT:
            return None
        numbers[name] = before + np.rint((after - before) * offset / width).astype(np.int64)
    return None if (numbers["selective_activation_bytes"] > numbers["activation_bytes"]).any() else numbers


def _table(rows: Sequence[CostRow]) -> dict[str, Column]:
    columns = zip(*map(_NUMBERS, checked(rows)), strict=True)
    return {
        name: np.array(
            [_NONE if each is None else each for each in column] if None in column else column, dtype=np.int64
        )
        for name, column in zip(_NAMES, columns, strict=True)
    }


def _run_again(
    numbers: dict[str, Column], again: Sequence[Again], derived: NDArray[np.bool_], taken: Sequence[int]
) -> None:
    """Backwards that first run forward, or the attention core, and need as workspace what that holds."""
    core = np.array([each == "selective" for each in again]) & (numbers["selective_ns"] != _NONE)
    held = numbers["activation_bytes"]
    kept = np.where(derived, np.minimum(np.array([min(each, MAX_TOTAL) for each in taken]), held), held)
    kept = np.where(core, numbers["selective_activation_bytes"], kept)
    made = np.where(core, held - kept, np.where(derived, held, 0))
    longer = np.where(core, numbers["selective_ns"], np.where(derived, numbers["forward_ns"], 0))
    for name in ("backward_ns", "input_grad_ns"):
        numbers[name] = np.where(numbers[name] == _NONE, _NONE, numbers[name] + longer)
    numbers["activation_bytes"] = kept
    numbers["workspace_bytes"] = numbers["workspace_bytes"] + made


def _exchange(
    numbers: dict[str, Column], states: States, shards: int, zero: Zero, exchanging: Exchanging, experts: Experts
) -> None:
    """Compute as long as what is exchanged beside it, of the blocks of which anything is."""
    exchanged = states.exchanged(shards, zero, experts)
    some = exchanged.any
    if not some.any():
        return
    gather, reduce = exchanged.times(exchanging)
    beside = {"forward_ns": gather, "backward_ns": gather + reduce, "input_grad_ns": gather, "weight_grad_ns": reduce}
    for name, ns in beside.items():
        alone = numbers[name]
        slowed = np.maximum(ns, alone + np.rint(exchanging.contention * ns).astype(np.int64))
        numbers[name] = np.where(some & (alone != _NONE), slowed, alone)
    numbers["workspace_bytes"] = numbers["workspace_bytes"] + some * exchanged.workspace_bytes
