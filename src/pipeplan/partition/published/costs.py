"""What a stage may be, to the published planners: devices and recomputation for a set of blocks, time and memory.

All three planners share one time model, which is also that of :mod:`pipeplan.partition.graphpipe`, so that what they
find can be compared: one micro-batch size b for all stages, r replicas of a stage that each work on b / r samples of
it, and for the mini-batch of B samples

    time of a stage = (B / b) * sum of (forward + backward) of b / r samples + all-reduce of its gradients

Sending between stages takes no device's time and is left out.
Memory is that of 1F1B: a stage with s stages after it holds the activations of s + 1 micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeplan.costs import StageCost, group_costs
from pipeplan.errors import UsageError
from pipeplan.model import Profile

__all__ = ["FOREVER", "AllReduce", "Option", "Options", "Question"]

Integers = NDArray[np.int64]
Mask = NDArray[np.bool_]

AllReduce = Callable[[int, int], int]
"""(bytes, replicas) -> ns."""

FOREVER = 1 << 60
"""Later than anything, in ns; and more micro-batches than there can be."""


@dataclass(frozen=True, slots=True)
class Option:
    """How a stage can run: on so many replicas, with or without recomputation."""

    replicas: int
    recompute: bool = False


@dataclass(frozen=True, slots=True)
class Options:
    """Of some sets of blocks: [set, option] ``times`` in ns for the mini-batch, and with how many stages after it each
    fits at most (-1: not at all)."""

    times: Integers
    most_later: Integers


@dataclass(frozen=True, slots=True)
class Question:
    """Blocks in topological order, the options of every stage, and what each block costs under each option.

    ``forwards``, ``backwards`` (ns), ``activations``, ``workspaces`` (bytes) are [block, option] for one micro-batch,
    ``parameters`` and ``statics`` (bytes) [block].
    """

    names: tuple[str, ...]
    edges: tuple[tuple[int, int], ...]
    num_devices: int
    num_microbatches: int
    options: tuple[Option, ...]
    forwards: Integers
    backwards: Integers
    activations: Integers
    workspaces: Integers
    parameters: Integers
    statics: Integers
    memory_bytes: int | None = None
    all_reduce: AllReduce | None = None

    @classmethod
    def of(
        cls,
        profile: Profile,
        num_devices: int,
        mini_batch: int,
        microbatch_size: int,
        *,
        memory_bytes: int | None = None,
        recompute: Sequence[bool] = (False,),
        all_reduce: AllReduce | None = None,
    ) -> Question:
        """The question about a profile; ``recompute`` lists the choices that every stage has.

        Raises:
            UsageError: a size that does not divide the mini-batch, or for which no stage has costs.
        """
        if num_devices < 1 or microbatch_size < 1 or mini_batch < 1 or mini_batch % microbatch_size:
            raise UsageError(
                f"micro-batches of {microbatch_size} samples do not divide a mini-batch of {mini_batch} on "
                f"{num_devices} devices; choose a --microbatch-size that divides --mini-batch, and at least 1 device"
            )
        order = profile.topological_order()
        options = [
            Option(replicas, again)
            for again in recompute
            for replicas in range(1, min(num_devices, microbatch_size) + 1)
            if microbatch_size % replicas == 0 and _known(profile, microbatch_size // replicas)
        ]
        if not options:
            raise UsageError(
                f"profile {profile.name!r} has no costs for shares of micro-batches of {microbatch_size} samples; "
                "choose another --microbatch-size"
            )
        blocks = [[id_] for id_ in order]
        columns = [
            group_costs(profile, blocks, microbatch_size // each.replicas, recompute=each.recompute) for each in options
        ]
        place = {id_: index for index, id_ in enumerate(order)}

        def table(of: Callable[[StageCost], int]) -> Integers:
            return np.array([[of(cost) for cost in column] for column in columns], dtype=np.int64).T

        return cls(
            tuple(order),
            tuple((place[edge.source], place[edge.target]) for edge in profile.edges),
            num_devices,
            mini_batch // microbatch_size,
            tuple(options),
            table(lambda cost: cost.forward_ns),
            table(lambda cost: cost.backward_ns),
            table(lambda cost: cost.activation_bytes),
            table(lambda cost: cost.workspace_bytes),
            table(lambda cost: cost.parameter_bytes)[:, 0],
            table(lambda cost: 2 * cost.parameter_bytes + cost.optimizer_bytes)[:, 0],
            memory_bytes,
            all_reduce,
        )

    @property
    def replicas(self) -> Integers:
        """[option] its devices."""
        return np.array([option.replicas for option in self.options], dtype=np.int64)

    def price(self, members: Mask) -> Options:
        """Time and memory of stages of these blocks, [set, block] -> [set, option]."""
        chosen = members.astype(np.int64)
        times = self.num_microbatches * (chosen @ (self.forwards + self.backwards)) + self.waits(members)
        return Options(times, self._most_later(members, chosen))

    def waits(self, members: Mask) -> Integers:
        """[set, option] ns of the gradients' all-reduce."""
        sizes = members.astype(np.int64) @ self.parameters
        if self.all_reduce is None:
            return np.zeros((len(sizes), len(self.options)), dtype=np.int64)
        price = self.all_reduce
        return np.array(
            [
                [price(int(size), option.replicas) if option.replicas > 1 else 0 for option in self.options]
                for size in sizes
            ],
            dtype=np.int64,
        ).reshape(len(sizes), len(self.options))

    def _most_later(self, members: Mask, chosen: Integers) -> Integers:
        """[set, option] stages that may come after it, by the micro-batches it has room for."""
        if self.memory_bytes is None:
            return np.full((len(members), len(self.options)), FOREVER, dtype=np.int64)
        workspace = np.stack([self.workspaces[mask].max(axis=0) for mask in members])
        room = self.memory_bytes - (chosen @ self.statics)[:, None] - workspace
        each = chosen @ self.activations
        held = np.where(each > 0, room // np.maximum(each, 1), FOREVER)
        # no more than all micro-batches are ever in flight
        return np.where(room < 0, -1, np.where(held >= self.num_microbatches, FOREVER, held - 1))


def _known(profile: Profile, samples: int) -> bool:
    """Whether every block has costs for so many samples."""
    sizes = [[row.microbatch_size for row in block.costs if row.shards == 1] for block in profile.blocks]
    return all(known and min(known) <= samples <= max(known) for known in sizes)
