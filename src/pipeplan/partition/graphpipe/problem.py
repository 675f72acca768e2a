"""What is asked: blocks with their loads, devices, a mini-batch, and the choices every stage has.

A stage chooses a micro-batch size b, a number of replicas r that divides it, and whether it recomputes; each replica
works on b / r samples of every micro-batch. The time of a stage is that of one of its devices for the whole mini-batch
of B samples, an integer number of ns; divided by B it is the paper's time per sample:

    time = (B / b) * sum of (forward + backward) of b / r samples + all-reduce of the gradients over r devices

Its memory is parameters, gradients and optimizer state, the activations of the micro-batches in flight and the
largest workspace. Sending between stages takes no device's time, as everywhere in pipeplan, and is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from pipeplan.costs import block_costs
from pipeplan.errors import UsageError
from pipeplan.model import Block, Profile

__all__ = ["UNLIMITED", "AllReduce", "Choice", "Load", "Problem", "Row", "free"]

UNLIMITED = 1 << 60
"""More micro-batches than there can be."""

AllReduce = Callable[[int, int], int]
"""(bytes, replicas) -> ns; not less for more bytes."""


def free(size: int, replicas: int) -> int:
    """An all-reduce that takes no time."""
    return 0


class Row(NamedTuple):
    """What the entries of a load are for: samples on one replica, and whether activations are computed again."""

    samples: int
    recompute: bool = False


class Choice(NamedTuple):
    """How a stage runs; ``row`` is the place of (``samples_each``, ``recompute``) in every load's tuples."""

    microbatch_size: int
    replicas: int
    row: int
    recompute: bool = False

    @property
    def samples_each(self) -> int:
        """Samples of a micro-batch that one replica works on."""
        return self.microbatch_size // self.replicas


@dataclass(frozen=True, slots=True)
class Load:
    """What blocks that run one after another cost on a device.

    ``times`` in ns, ``activations`` and ``workspaces`` in bytes have one entry per row of the problem;
    ``parameter_bytes`` are what an all-reduce moves, ``static_bytes`` what is held all the time.
    """

    times: tuple[int, ...]
    activations: tuple[int, ...]
    workspaces: tuple[int, ...]
    parameter_bytes: int = 0
    static_bytes: int = 0

    def __add__(self, other: Load) -> Load:
        return Load(
            tuple(map(int.__add__, self.times, other.times)),
            tuple(map(int.__add__, self.activations, other.activations)),
            tuple(map(max, self.workspaces, other.workspaces)),
            self.parameter_bytes + other.parameter_bytes,
            self.static_bytes + other.static_bytes,
        )

    def room(self, row: int, limit: int) -> int:
        """Micro-batches of which so many bytes hold the activations; -1 if they do not even hold the rest."""
        left, each = limit - self.static_bytes - self.workspaces[row], self.activations[row]
        return -1 if left < 0 else left // each if each else UNLIMITED


@dataclass(frozen=True, slots=True)
class Problem:
    """Blocks with their loads and edges, and what they may be put on.

    ``rows`` are the numbers of samples that a replica can have, each of which divides ``mini_batch``, without and with
    recomputation as far as stages may choose. ``memory_bytes`` of every device; None is no limit.
    """

    loads: Mapping[str, Load]
    edges: tuple[tuple[str, str], ...]
    num_devices: int
    mini_batch: int
    rows: tuple[Row, ...]
    choices: tuple[Choice, ...]
    memory_bytes: int | None = None
    all_reduce: AllReduce = free

    @classmethod
    def of(
        cls,
        profile: Profile,
        num_devices: int,
        mini_batch: int,
        *,
        microbatch_sizes: Sequence[int] | None = None,
        memory_bytes: int | None = None,
        recompute: bool | None = False,
        all_reduce: AllReduce = free,
    ) -> Problem:
        """The question about a profile; by default micro-batch sizes are the powers of two that divide the mini-batch.

        With ``recompute`` None every stage chooses whether it recomputes.

        Raises:
            UsageError: sizes of which one does not divide the next, or the mini-batch; or none that the profile has
                costs for on any number of these devices.
        """
        sizes = _checked_sizes(microbatch_sizes, mini_batch)
        most = max(1, num_devices)
        known = [{row.microbatch_size for row in block.costs if row.shards == 1} for block in profile.blocks]
        missing = next((block.id for block, sizes in zip(profile.blocks, known, strict=True) if not sizes), None)
        if missing is not None:
            raise UsageError(
                f"block {missing!r} of {profile.name!r} has no costs on one device alone (shards 1), which stages that "
                "split samples need; add such rows, or give a placement with shards"
            )
        low, high = max(map(min, known)), min(map(max, known))
        pairs = [
            (size, replicas)
            for size in sizes
            for replicas in range(1, min(size, most) + 1)
            if size % replicas == 0 and low <= size // replicas <= high
        ]
        if num_devices < 1 or not pairs:
            raise UsageError(
                f"no stage of {profile.name!r} can run micro-batches of {', '.join(map(str, sizes))} samples on up to "
                f"{num_devices} devices: the profile has costs for {low} to {high} samples per device; choose a "
                f"--microbatch-size or --mini-batch of at least {low}, or more --devices"
            )
        agains = (False, True) if recompute is None else (recompute,)
        samples = sorted({size // replicas for size, replicas in pairs})
        rows = tuple(Row(each, again) for again in agains for each in samples)
        choices = tuple(
            Choice(size, replicas, rows.index(Row(size // replicas, again)), again)
            for again in agains
            for size, replicas in pairs
        )
        edges = tuple((edge.source, edge.target) for edge in profile.edges)
        price = free if all_reduce is free else cache(all_reduce)
        return cls(_loads(profile, rows), edges, num_devices, mini_batch, rows, choices, memory_bytes, price)

    def all_reduce_is_free(self, choice: Choice) -> bool:
        """Whether no stage waits for gradients under this choice."""
        return choice.replicas == 1 or self.all_reduce is free

    def time(self, times: int, parameter_bytes: int, choice: Choice) -> int:
        """Ns for the mini-batch of a stage that takes ``times`` ns for one micro-batch."""
        waiting = 0 if self.all_reduce_is_free(choice) else self.all_reduce(parameter_bytes, choice.replicas)
        return self.mini_batch // choice.microbatch_size * times + waiting

    def time_of(self, load: Load, choice: Choice) -> int:
        """Ns for the mini-batch of a stage with this load."""
        return self.time(load.times[choice.row], load.parameter_bytes, choice)

    def memory_of(self, load: Load, choice: Choice, in_flight: int) -> int:
        """Bytes on each device of a stage that has so many samples in flight."""
        held = -(-in_flight // choice.microbatch_size) * load.activations[choice.row]
        return load.static_bytes + held + load.workspaces[choice.row]

    def fits(self, load: Load, choice: Choice) -> bool:
        """Whether a stage with this load has room for one micro-batch."""
        limit = self.memory_bytes
        return limit is None or self.memory_of(load, choice, choice.microbatch_size) <= limit

    def work(self, load: Load) -> int:
        """Least ns of all devices together for the mini-batch."""
        return min(self.mini_batch // row.samples * time for row, time in zip(self.rows, load.times, strict=True))


def _checked_sizes(sizes: Sequence[int] | None, mini_batch: int) -> list[int]:
    if mini_batch < 1:
        raise UsageError(f"--mini-batch must be at least 1, not {mini_batch}")
    if sizes is None:
        return [1 << power for power in range(mini_batch.bit_length()) if mini_batch % (1 << power) == 0]
    ordered = sorted(set(sizes))
    for size, larger in zip(ordered, [*ordered[1:], mini_batch], strict=True):
        if size < 1 or larger % size:
            raise UsageError(
                f"micro-batches of {size} samples do not divide {larger}; choose sizes of which each divides the next "
                f"and the mini-batch of {mini_batch}"
            )
    return ordered


def _loads(profile: Profile, rows: Sequence[Row]) -> dict[str, Load]:
    per_sample: Counter[str] = Counter()
    fixed: Counter[str] = Counter()
    for edge in profile.edges:
        (fixed if edge.broadcast else per_sample)[edge.target] += edge.bytes_per_sample
    return {
        block.id: _load(block, rows, [per_sample[block.id] * row.samples + fixed[block.id] for row in rows])
        for block in profile.blocks
    }


def _load(block: Block, rows: Sequence[Row], inputs: Sequence[int]) -> Load:
    costs = [
        block_costs(block, row.samples, recompute=row.recompute, input_bytes=size)
        for row, size in zip(rows, inputs, strict=True)
    ]
    backwards = [
        (cost.input_grad_ns or 0) + (cost.weight_grad_ns or 0) if cost.backward_ns is None else cost.backward_ns
        for cost in costs
    ]
    return Load(
        tuple(cost.forward_ns + backward for cost, backward in zip(costs, backwards, strict=True)),
        tuple(cost.activation_bytes for cost in costs),
        tuple(cost.workspace_bytes for cost in costs),
        block.parameter_bytes,
        2 * block.parameter_bytes + block.optimizer_bytes,
    )
