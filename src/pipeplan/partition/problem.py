"""The input and output of a partitioner: blocks with their costs on one side, placements on the other.

A stage chooses a *way* to run: a micro-batch size b, a number of replicas r that divides it, and whether it recomputes;
each replica works on b / r samples of every micro-batch. The time of a stage is that of one of its devices for the
whole mini-batch of B samples, an integer number of ns; divided by B it is GraphPipe's time per sample:

    time = (B / b) * sum of (forward + backward) of b / r samples + all-reduce of the gradients over r devices
           + the optimizer's step (and, where replicas divide state, gathering its parameters), if that is known

Its memory is parameters, gradients and optimizer state, the activations of the micro-batches in flight and the
largest workspace. Sending between stages takes no device's time, as everywhere in pipeplan, and is left out, but for
published planners, which count it: they are given ``links``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, reduce
from itertools import accumulate
from operator import add
from typing import Any, NamedTuple

from pipeplan.costs import StageCost, block_columns, group_costs
from pipeplan.costs.columns import Columns
from pipeplan.costs.context import exchanged_as
from pipeplan.costs.held_once import Repeat, repeats_of
from pipeplan.costs.kinds import on_kinds
from pipeplan.costs.messages import edge_bytes
from pipeplan.costs.zero import ALONE, TOGETHER, WHOLE, Exchanging, Experts, Zero
from pipeplan.errors import InfeasibleError, SearchTimeoutError, UsageError
from pipeplan.files import PlacedStage, Placement, Profile
from pipeplan.partition.chain.costs import ChainCosts
from pipeplan.partition.links import CountedLinks
from pipeplan.partition.series_parallel import topological_order
from pipeplan.search_constants import SHORTAGE_PARTS, SHORTAGE_SECONDS
from pipeplan.time_limit import Limit, TimeUpError
from pipeplan.units import MAX_BYTES, format_bytes, named_devices, rounded_up
from pipeplan.workload.elements import Again, ContextExchange, Recompute

AllReduce = Callable[[int, int], int]
"""(bytes of gradients, replicas) -> ns of what follows a stage's actions; not less for more bytes."""


def free(size: int, replicas: int) -> int:
    """An all-reduce that takes no time."""
    return 0


class Pricing(NamedTuple):
    """What costs are for: samples on one replica, whether activations are computed again, devices of a replica.

    ``zero`` is what copies of the parameters divide of what is kept, and a device has one of ``context``
    parts of each sequence, and its part of ``experts``. Devices have this ``speed``, and are of these ``kinds``, where
    kinds have profiles of their own. Parts of sequences ``exchange`` keys and values so; None: as the profile has it.
    """

    samples: int
    recompute: Again = False
    shards: int = 1
    zero: Zero = WHOLE
    context: int = 1
    experts: Experts = TOGETHER
    speed: float = 1.0
    kinds: tuple[str, ...] = ()
    exchange: ContextExchange | None = None

    def costs(self, profile: Profile, blocks: Iterable[str], exchanging: Exchanging = ALONE) -> list[StageCost]:
        """[block] what each costs as a stage of its own, on each device of a replica, with what it exchanges there.

        Raises:
            UsageError: a block was not profiled so.
        """
        own = self._own(profile)
        return group_costs(own, [(block,) for block in blocks], self.samples, self.shards, **self._how(exchanging))

    def columns(self, profile: Profile, blocks: Sequence[str]) -> Columns:
        """The same as columns, without what is exchanged. Raises as :meth:`costs`."""
        own = self._own(profile)
        return block_columns(own, blocks, self.samples, self.shards, **self._how(ALONE))

    def _own(self, profile: Profile) -> Profile:
        return on_kinds(exchanged_as(profile, (self.shards, self.context), self.exchange), self.kinds)

    def _how(self, exchanging: Exchanging) -> dict[str, Any]:
        how: dict[str, Any] = {"context": self.context, "recompute": self.recompute, "zero": self.zero}
        return how | {"exchanging": exchanging, "experts": self.experts, "speed": self.speed}


class Way(NamedTuple):
    """How a stage runs all its blocks; ``row`` is the place of its :class:`Pricing` among the problem's rows."""

    microbatch_size: int
    replicas: int
    row: int = 0
    recompute: Recompute = False
    shards: int = 1
    zero: Zero = WHOLE

    @property
    def num_devices(self) -> int:
        """Devices of the stage."""
        return self.replicas * self.shards

    def pricing(self) -> Pricing:
        """What its costs are for, where all blocks run alike."""
        assert not isinstance(self.recompute, tuple)
        return Pricing(self.microbatch_size // self.replicas, self.recompute, self.shards, self.zero)

    def placed(self, blocks: Sequence[str], first: int, *, sized: bool = False) -> PlacedStage:
        """Blocks on its devices, from the ``first`` on; ``sized`` stages say their micro-batch size."""
        return PlacedStage(
            blocks=tuple(blocks),
            devices=tuple(range(first, first + self.num_devices)),
            shards=self.shards,
            replicas=self.replicas,
            microbatch_size=self.microbatch_size if sized else None,
            recompute=self.recompute,
            **self.zero.keys(self.replicas),
        )


Costs = tuple[StageCost, ...]
"""[row] what blocks that run one after another cost on a device."""


def together(costs: Iterable[Costs]) -> Costs:
    """What blocks cost that run one after another."""
    return reduce(lambda one, other: tuple(map(add, one, other)), costs)


@dataclass(frozen=True, slots=True)
class Partition:
    """Stages, and what their partitioner minimises: ``value_ns`` for the mini-batch.

    For PipeDream, Piper and GraphPipe that is the slowest stage, for DAPPLE the latency of the pipeline, for AutoPipe
    the simulated iteration. ``optimal`` says that no other partition of those the partitioner is for has less.
    """

    placement: Placement
    value_ns: int
    optimal: bool = False


@dataclass(frozen=True, slots=True)
class PartitionProblem:
    """Blocks with their costs [row] and edges, and what they may be put on.

    ``rows`` are the numbers of samples that a replica can have, each of which divides ``mini_batch``, without and with
    recomputation as far as stages may choose. ``memory_bytes`` of every device; None is no limit. What follows the
    actions of a stage is ``all_reduce``; of one without replicas nothing does unless it ``steps``. ``repeats`` [row]
    are what ranges of blocks count too often, for the blocks in topological ``order``. Where nothing fits, it may
    take ``patience`` seconds by the clock to find out how much memory would do; inf where no clock may count.
    Planners that count messages do so over ``links``; with None messages take no time.
    """

    costs: Mapping[str, Costs]
    edges: tuple[tuple[str, str], ...]
    num_devices: int
    mini_batch: int
    rows: tuple[Pricing, ...]
    ways: tuple[Way, ...]
    memory_bytes: int | None = None
    all_reduce: AllReduce = free
    steps: bool = False
    repeats: tuple[tuple[Repeat, ...], ...] = ()
    patience: float = SHORTAGE_SECONDS
    links: CountedLinks | None = None

    @classmethod
    def of(
        cls,
        profile: Profile,
        num_devices: int,
        mini_batch: int,
        *,
        microbatch_sizes: Sequence[int] | None = None,
        memory_bytes: int | None = None,
        recompute: Sequence[Again] = (False,),
        replicas: int | None = None,
        shards: int = 1,
        context: int = 1,
        zero: Callable[[int], Zero | None] = lambda replicas: WHOLE,
        all_reduce: AllReduce = free,
        steps: bool = False,
        patience: float = SHORTAGE_SECONDS,
        links: CountedLinks | None = None,
    ) -> PartitionProblem:
        """The question about a profile; by default micro-batch sizes are the powers of two that divide the mini-batch.

        ``recompute`` lists the choices that every stage has; ``replicas`` is their number for all stages. Each of the
        devices stands for ``shards`` that split every block, of each of ``context`` parts of sequences. ``zero`` is
        what so many replicas divide of what they keep, None where there cannot be so many.

        Raises:
            UsageError: sizes of which one does not divide the next, or the mini-batch; or none that the profile has
                costs for on any number of these devices.
        """
        pairs = _pairs(
            profile, num_devices, _checked_sizes(microbatch_sizes, mini_batch), replicas, mini_batch, (shards, context)
        )
        divided = [(size, count, each) for size, count in pairs if (each := zero(count)) is not None]
        if not divided:
            raise UsageError(
                f"no stage of {profile.name!r} can have a number of replicas that divides state as --zero-group asks; "
                "leave it out, or choose a larger --microbatch-size"
            )
        priced = sorted({(size // count, each) for size, count, each in divided})
        rows = tuple(Pricing(samples, again, shards, each, context) for again in recompute for samples, each in priced)
        place = {row: index for index, row in enumerate(rows)}
        ways = tuple(
            Way(size, count, place[Pricing(size // count, again, shards, each, context)], again, 1, each)
            for again in recompute
            for size, count, each in divided
        )
        blocks = [block.id for block in profile.blocks]
        columns = [row.costs(profile, blocks) for row in rows]
        return cls(
            dict(zip(blocks, zip(*columns, strict=True), strict=True)),
            tuple((edge.source, edge.target) for edge in profile.edges),
            num_devices,
            mini_batch,
            rows,
            ways,
            memory_bytes,
            free if all_reduce is free else cache(all_reduce),
            steps,
            repeats=_repeats_of(profile, rows),
            patience=patience,
            links=links,
        )

    @property
    def order(self) -> tuple[str, ...]:
        """Blocks in topological order, as near to the given one as edges allow."""
        return topological_order(tuple(self.costs), self.edges)

    def chain(self, blocks: Sequence[str]) -> ChainCosts:
        """The running sums of blocks in this order, [row] first."""
        return ChainCosts.of_rows(list(zip(*(self.costs[block] for block in blocks), strict=True)))

    def waiting(self, parameter_bytes: int, way: Way) -> int:
        """Ns of what follows a stage's actions: the all-reduce of its gradients, and the step."""
        if self.all_reduce is free or (way.replicas == 1 and not self.steps):
            return 0
        return self.all_reduce(parameter_bytes, way.replicas)

    def time(self, compute_ns: int, parameter_bytes: int, way: Way) -> int:
        """Ns for the mini-batch of a stage that takes ``compute_ns`` for one micro-batch."""
        computing = self.mini_batch // way.microbatch_size * compute_ns
        if self.all_reduce is free or (
            way.replicas == 1 and not self.steps
        ):  # as in `waiting`, which this is asked for too often to call
            return computing
        return computing + self.all_reduce(parameter_bytes, way.replicas)

    def time_of(self, costs: Costs, way: Way) -> int:
        """Ns for the mini-batch of a stage with these costs."""
        cost = costs[way.row]
        return self.time(cost.compute_ns, cost.gradient_bytes, way)

    def memory_of(self, costs: Costs, way: Way, in_flight: int) -> int:
        """Bytes on each device of a stage with this number of samples in flight."""
        return costs[way.row].memory_bytes(-(-in_flight // way.microbatch_size))

    def fits(self, costs: Costs, way: Way) -> bool:
        """Whether a stage with these costs fits with one micro-batch in flight."""
        return self.memory_bytes is None or costs[way.row].memory_bytes(1) <= self.memory_bytes

    def work(self, costs: Costs) -> int:
        """Least ns of all devices together for the mini-batch."""
        return min(self.mini_batch // row.samples * cost.compute_ns for row, cost in zip(self.rows, costs, strict=True))

    def placed(self, stages: Sequence[tuple[Sequence[str], Way]], *, sized: bool = False) -> Placement:
        """Stages on the devices in order, each with its way; ``sized`` stages say their micro-batch size."""
        firsts = accumulate((way.num_devices for _, way in stages), initial=0)
        placed = (way.placed(blocks, first, sized=sized) for (blocks, way), first in zip(stages, firsts, strict=False))
        return Placement(strategy="stage graph", num_devices=self.num_devices, stages=tuple(placed))


class NoPartitionError(InfeasibleError):
    """What a planner finds ``nothing`` to say of: no partition of a problem fits into its memory.

    How much would do is found out when the text is asked for, with the problem's ``patience``: a search that goes on to
    other planners need not wait for it. ``fits`` says whether the same planner finds something in so many bytes per
    device.
    """

    def __init__(self, nothing: str, problem: PartitionProblem, fits: Callable[[int], bool]) -> None:
        super().__init__(nothing)
        self._nothing, self._problem, self._fits = nothing, problem, fits

    @cached_property
    def _text(self) -> str:
        limit, devices = self._problem.memory_bytes, named_devices(self._problem.num_devices)
        if limit is None:
            return f"{self._nothing} on {devices}, whatever their memory"
        where = f"{self._nothing} on {devices} of {format_bytes(limit)}"
        try:
            with Limit(self._problem.patience).enforced():
                self.enough_bytes = least_enough(self._fits, limit)
        except (SearchTimeoutError, TimeUpError):
            return f"{where}; there was no time to find out how much would do"
        if self.enough_bytes is None:
            return f"{where}, nor with any more memory"
        enough = format_bytes(self.enough_bytes)
        return f"{where}; {devices} of {enough} would do; raise --memory to {enough}"

    def __str__(self) -> str:
        return self._text

    def __reduce__(self) -> tuple[type[InfeasibleError], tuple[str, int | None]]:
        return InfeasibleError, (str(self), self.enough_bytes)


def least_enough(fits: Callable[[int], bool], too_little: int) -> int | None:
    """Bytes that are enough, where a hundredth less is not; rounded up as they are said. None where none are."""
    low, high = too_little, 2 * max(1, too_little)
    while not fits(high):
        if high > MAX_BYTES:
            return None
        low, high = high, 2 * high
    while high - low > max(1, low // SHORTAGE_PARTS):
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return rounded_up(high)


def _pairs(
    profile: Profile,
    num_devices: int,
    sizes: Sequence[int],
    replicas: int | None,
    mini_batch: int,
    split: tuple[int, int],
) -> list[tuple[int, int]]:
    """(micro-batch size, replicas) for which every block has costs where it is ``split``: shards and context."""
    shards, context = split
    if num_devices < 1:
        raise UsageError(f"no stage of {profile.name!r} can run on {num_devices} devices; give more --devices")
    known = [{row.microbatch_size for row in block.rows(context) if row.shards == shards} for block in profile.blocks]
    missing = next((block.id for block, each in zip(profile.blocks, known, strict=True) if not each), None)
    if missing is not None:
        raise UsageError(
            f"block {missing!r} of {profile.name!r} has no costs "
            f"{'on a single device (shards 1)' if shards == 1 else f'for {shards} shards'}, which stages that "
            "split samples need; add such rows, or give a placement with shards"
        )
    low, high = max(map(min, known)), min(map(max, known))
    pairs = [
        (size, count)
        for size in sizes
        for count in ((replicas,) if replicas else range(1, min(size, num_devices) + 1))
        if size % count == 0 and low <= size // count <= high
    ]
    if not pairs:
        raise UsageError(
            f"no stage of {profile.name!r} can run micro-batches of {', '.join(map(str, sizes))} samples on up to "
            f"{num_devices} devices: the profile has costs for {low} to {high} samples per device; "
            + _sizes_that_do(low, high, num_devices, sizes, replicas, mini_batch)
        )
    return pairs


def _sizes_that_do(
    low: int, high: int, num_devices: int, sizes: Sequence[int], replicas: int | None, mini_batch: int
) -> str:
    """What to choose where no size suits a number of replicas with ``low`` to ``high`` samples each."""
    counts = [replicas] if replicas else range(1, num_devices + 1)
    every = sorted({each * count for count in counts for each in range(low, high + 1)})
    able = [size for size in every if mini_batch % size == 0] or every
    if not able:
        return f"profile it with --microbatch sizes that all blocks share, as from {high} to {low}"
    nearest = min(able, key=lambda size: min(abs(size - each) for each in sizes))
    bound = "of at most" if nearest == able[-1] else "of at least" if nearest == able[0] else "such as"
    remedies = [f"choose a --microbatch-size {bound} {nearest}"]
    more = next((count for count in range(num_devices, max(sizes) + 1) if _shared_by(count, sizes, low, high)), None)
    if replicas is None and more is not None:
        remedies.append(f"--devices of at least {more}")
    return ", or ".join(remedies)


def _shared_by(count: int, sizes: Sequence[int], low: int, high: int) -> bool:
    return any(size % count == 0 and low <= size // count <= high for size in sizes)


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


def _repeats_of(profile: Profile, rows: Sequence[Pricing]) -> tuple[tuple[Repeat, ...], ...]:
    """[row] what ranges of blocks count too often, or too seldom, for tensors between them."""
    order = profile.topological_order()

    def of_row(row: Pricing) -> tuple[Repeat, ...]:
        return repeats_of(profile, order, row.recompute, lambda edge: edge_bytes(edge, row.samples, row.context))

    return tuple(map(of_row, rows))
