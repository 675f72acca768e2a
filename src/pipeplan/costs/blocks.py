"""What blocks and stages cost: a block between measured sizes, the sum of a stage."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pipeplan.costs.recipes import running_bytes
from pipeplan.costs.speeds import at_speed
from pipeplan.errors import UsageError
from pipeplan.files import Block, CostRow, Profile, Recipe
from pipeplan.files.profile import EAGER
from pipeplan.texts import counted
from pipeplan.units import MAX_BYTES, MAX_NS, require_sum
from pipeplan.workload.elements import Again, Recompute, again_of
from pipeplan.workload.kinds import GRADIENTS, MemoryBytes
from pipeplan.workload.mesh import HeldPart, Mesh


def block_costs(
    block: Block,
    microbatch_size: int,
    shards: int = 1,
    *,
    context: int = 1,
    expert: int = 1,
    expert_shards: int = 1,
    recompute: Again = False,
    input_bytes: int = 0,
    recipe: Recipe | None = None,
    speed: float = 1.0,
) -> CostRow:
    """The block's row for a micro-batch size, interpolated linearly between its neighbours where it has none.

    On a device of another ``speed`` than those whose times the row has, these are divided by it and rounded up.

    A device has one of ``context`` parts of each sequence, and the experts of one of ``expert`` devices, of which
    ``expert_shards`` split each.

    With a ``recipe`` by which parameters are cast when they are used, the workspace has their part of the copy.

    With ``recompute`` true the block's own rows for it are used; without such rows they follow from the others:
    F keeps only the inputs (``input_bytes`` of this micro-batch on each device), B and I run the forward again first
    and need what it holds as workspace. Where it is ``"selective"`` they run only the attention core again, as the row
    says; a row that says nothing of one stays as it is.

    Raises:
        UsageError: no rows for this shard count, context and expert, or the size is outside the rows' range.
    """
    split = shards, context, *((expert, expert_shards) if block.expert_parameters else (1, 1))
    row = _row_for(block, microbatch_size, split, recompute=recompute, input_bytes=input_bytes)
    if speed != 1:
        times = ((key, getattr(row, key)) for key in _TIMES)
        row = row.model_copy(update={key: at_speed(ns, speed) for key, ns in times if ns is not None})
    running = 0 if recipe is None else running_on(block, recipe, shards, expert)
    return row.model_copy(update={"workspace_bytes": row.workspace_bytes + running}) if running else row


def running_on(block: Block, recipe: Recipe, shards: int, expert: int = 1) -> int:
    """The part of :func:`running_bytes` on one device: experts of one of ``expert``, the rest of one of ``shards``."""
    whole = running_bytes(block, recipe, shards)
    if expert == 1 or not whole or not block.expert_parameters:
        return -(-whole // shards)
    own = running_bytes(block, recipe) * block.expert_parameters // (block.parameters + block.frozen_parameters)
    return -(-(whole - own) // shards) - (-own // expert)


def require_row(where: str, row: Mapping[str, Any]) -> None:
    """Check that what a row adds up, over kernels, samples and collectives, is no more than a profile may state.

    Args:
        where: whose row it is.
        row: by the names of :class:`CostRow`.

    Raises:
        SumError: a time or a size is more.
    """
    of = f"for {counted(row['microbatch_size'], 'sample')} on {counted(row['shards'], 'device')}"
    remedy = "choose fewer samples with --microbatch" if row["shards"] == 1 else "choose fewer samples or quicker links"
    for name, value in row.items():
        unit = name.rpartition("_")[2]
        if unit in _MOST and value is not None:
            require_sum(where, f"{name} {of}", value, unit, _MOST[unit], remedy)


_MOST = {"ns": MAX_NS, "bytes": MAX_BYTES}


_Split = tuple[int, int, int, int]
"""Shards, parts of a sequence, devices that share the block's own experts, and how many of these split each."""


def _row_for(block: Block, microbatch_size: int, split: _Split, *, recompute: Again, input_bytes: int) -> CostRow:
    if recompute == "selective":
        return _core_recomputed(_row_for(block, microbatch_size, split, recompute=False, input_bytes=0))
    measured = (microbatch_size, *split, None, recompute, EAGER)
    exact = next((row for row in block.costs if row.microbatch_size == microbatch_size and row.key == measured), None)
    if exact is not None:
        return exact
    shards, *rest = split
    own = (row for row in block.rows(*rest) if row.shards == shards and row.recompute == recompute)
    rows = sorted((row for row in own if not row.configuration), key=lambda row: row.microbatch_size)
    if not rows and recompute:
        return _recomputed(_row_for(block, microbatch_size, split, recompute=False, input_bytes=0), input_bytes)
    if not rows:
        raise UsageError(_no_costs(block, split))
    below = [row for row in rows if row.microbatch_size <= microbatch_size]
    above = [row for row in rows if row.microbatch_size >= microbatch_size]
    if not below or not above:
        sizes = [row.microbatch_size for row in rows]
        raise UsageError(
            f"block {block.id!r} has costs for micro-batches of {', '.join(map(str, sizes))} samples per replica, not "
            f"for {microbatch_size}; choose a --microbatch-size of {sizes[0]} to {sizes[-1]} per replica, or profile "
            f"it with --microbatch {microbatch_size}"
        )
    return _between(below[-1], above[0], microbatch_size)


def _no_costs(block: Block, split: _Split) -> str:
    """What the block has no costs for, and how to get them."""
    shards, context, expert, expert_shards = split
    known = [row for row in block.costs if row.context == context]
    if not known:
        contexts = sorted({row.context for row in block.costs})
        return (
            f"block {block.id!r} has no costs for context {context}, only for {contexts}; profile it with --estimate "
            f"--context {context}"
        )
    if not (sharing := [row for row in known if row.expert == expert]):
        experts = sorted({row.expert for row in known})
        return (
            f"block {block.id!r} has no costs for expert {expert}, only for {experts}; profile it with --estimate "
            f"--expert {expert}"
        )
    if not (alike := [row for row in sharing if row.expert_shards == expert_shards]):
        splits = sorted({row.expert_shards for row in sharing})
        return (
            f"block {block.id!r} has no costs for expert {expert} with expert_shards {expert_shards}, only with "
            f"{splits}; profile it with --estimate --expert {expert} --etp {expert_shards}"
        )
    every = sorted({row.shards for row in alike})
    return f"block {block.id!r} has no costs for {shards} shards, only for {every}; profile it with them"


def places_divided(block: Block, shards: int) -> int:
    """Into how many slices of the sequence the devices that split a block divide what it takes and gives."""
    return shards if any(row.sequence_parallel for row in block.costs if row.shards == shards) else 1


NEVER_AGAIN = frozenset({"embedding", "patch-embedding", "head", "loss"})
"""Kinds of operator at the ends of a model: what computes words or classes is not computed again as one of all blocks.

That would save next to nothing, and a head takes as long as some layers.
"""


def asked_again(blocks: Sequence[Block], recompute: Recompute) -> tuple[Again, ...]:
    """[block] what is computed again where ``recompute`` is asked for all of them, or said of each."""
    if recompute is not True:
        return again_of(recompute, len(blocks))
    return tuple(block.operator not in NEVER_AGAIN for block in blocks)


_USUAL_SHARDS = (1, 2, 4, 8)


def splitting_remedy(profile: Profile, shards: Sequence[int] = ()) -> str | None:
    """The flag of a new profile whose blocks are split over these numbers of devices, or some usual ones.

    None where the heads of a block rule them out. What else does, such as blocks that do not say how they are split,
    no profile knows; what is returned says so.
    """
    heads = math.gcd(*(block.dimensions["heads"] for block in profile.blocks if "heads" in block.dimensions))
    fitting = shards or [count for count in _USUAL_SHARDS if heads % count == 0]
    if max(fitting) == 1 or any(heads % count for count in fitting):
        return None
    return f"profile with --shards {','.join(map(str, fitting))}, if the model's blocks can be split"


_TIMES = ("forward_ns", "backward_ns", "input_grad_ns", "weight_grad_ns", "selective_ns")
_SIZES = ("activation_bytes", "weight_grad_bytes", "workspace_bytes", "selective_activation_bytes")


def _between(low: CostRow, high: CostRow, microbatch_size: int) -> CostRow:
    if low.microbatch_size == high.microbatch_size:
        return low
    offset, width = microbatch_size - low.microbatch_size, high.microbatch_size - low.microbatch_size
    values: dict[str, object] = {
        "microbatch_size": microbatch_size,
        "shards": low.shards,
        "context": low.context,
        "expert": low.expert,
        "expert_shards": low.expert_shards,
        "recompute": low.recompute,
        "sequence_parallel": low.sequence_parallel,
    }
    for name in (*_TIMES, *_SIZES):
        before, after = getattr(low, name), getattr(high, name)
        if before is not None and after is not None:
            values[name] = before + round((after - before) * offset / width)
    return CostRow.model_validate(values)


def _recomputed(row: CostRow, input_bytes: int) -> CostRow:
    held = min(input_bytes, row.activation_bytes)
    return _again(row, row.forward_ns, held, row.activation_bytes).model_copy(update={"recompute": True})


def _core_recomputed(row: CostRow) -> CostRow:
    if row.selective_ns is None or row.selective_activation_bytes is None:
        return row
    return _again(
        row, row.selective_ns, row.selective_activation_bytes, row.activation_bytes - row.selective_activation_bytes
    )


def _again(row: CostRow, time_ns: int, held: int, made: int) -> CostRow:
    """The row if backward first recomputes something, which takes this long and produces this many bytes."""
    longer = {
        field: getattr(row, field) + time_ns
        for field in ("backward_ns", "input_grad_ns")
        if getattr(row, field) is not None
    }
    return row.model_copy(update={**longer, "activation_bytes": held, "workspace_bytes": row.workspace_bytes + made})


# Stages ---------------------------------------------------------------------------------------------------------------

_CUT_DIMENSIONS = {"rows": "inputs", "columns": "outputs", "hidden": "hidden", "features": "hidden"}
"""The dimension of a block that an axis of a mesh cuts."""


def held_part(block: Block, mesh: Mesh, device: int) -> HeldPart:
    """What a device of a mesh has of a block's parameters.

    What is cut goes by its size, as blocks that share a parameter may call it otherwise; where sizes do not tell, and
    of ``shards``, by the axis itself.
    """
    sizes = {axis: block.dimensions.get(dimension) for axis, dimension in _CUT_DIMENSIONS.items()}

    def cut(axis: str) -> str:
        size, other = sizes.get(axis), {"rows": "columns", "columns": "rows"}.get(axis)
        return axis if size is None or (other and sizes[other] == size) else str(size)

    return mesh.held_part(device, cut)


UNLIMITED = 1 << 60
"""More micro-batches than there can be, and more ns."""


class TiedShare(NamedTuple):
    """One of ``shards`` equal parts of a tied parameter, and what training keeps of it."""

    name: str
    shards: int
    state: MemoryBytes


@dataclass(frozen=True, slots=True)
class StageCost:
    """Costs of a stage on each of its devices, for one micro-batch; times in ns, sizes in bytes.

    ``state`` is held all the time, activations from F to B or I, ``weight_grad_bytes`` from I to W, workspace by one
    action.
    ``input_grad_ns`` and ``weight_grad_ns`` are None where a block of the stage has no split backward. ``tied`` is what
    of the state others may share. Two stages that become one have the sum of their costs, but for the workspace, since
    only one block runs at a time, and for what both share, which is there once.
    """

    forward_ns: int
    backward_ns: int
    input_grad_ns: int | None = None
    weight_grad_ns: int | None = None
    activation_bytes: int = 0
    weight_grad_bytes: int = 0
    workspace_bytes: int = 0
    state: MemoryBytes = field(default_factory=MemoryBytes)
    tied: frozenset[TiedShare] = frozenset()

    @property
    def compute_ns(self) -> int:
        """Forward and backward."""
        return self.forward_ns + self.backward_ns

    @property
    def static_bytes(self) -> int:
        """What is held all the time."""
        return self.state.total

    @property
    def gradient_bytes(self) -> int:
        """What replicas sum."""
        return self.state[GRADIENTS]

    def memory_bytes(self, in_flight: int) -> int:
        """Bytes with ``in_flight`` micro-batches in flight."""
        return self.static_bytes + in_flight * self.activation_bytes + self.workspace_bytes

    def most_in_flight(self, limit: int) -> int:
        """Micro-batches whose activations fit into ``limit`` bytes; -1 if not even the rest fits."""
        left = limit - self.static_bytes - self.workspace_bytes
        return -1 if left < 0 else left // self.activation_bytes if self.activation_bytes else UNLIMITED

    def __add__(self, other: StageCost) -> StageCost:
        state = self.state + other.state
        for each in self.tied & other.tied:
            state -= each.state
        return StageCost(
            self.forward_ns + other.forward_ns,
            self.backward_ns + other.backward_ns,
            _both(self.input_grad_ns, other.input_grad_ns),
            _both(self.weight_grad_ns, other.weight_grad_ns),
            self.activation_bytes + other.activation_bytes,
            self.weight_grad_bytes + other.weight_grad_bytes,
            max(self.workspace_bytes, other.workspace_bytes),
            state,
            self.tied | other.tied,
        )


def _both(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other
