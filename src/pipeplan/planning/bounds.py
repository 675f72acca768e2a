"""Lower bounds on the iteration of any plan of a request, whatever it leaves open, and on what it keeps.

Here: bounds by work, by the longest way through the model and by what chains hold, and the bytes of the state. Bounds
of one placement (`workload/bounds.py`) know its stages, its memory and its messages.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from fractions import Fraction
from typing import Any, NamedTuple

from pipeplan.costs import can_split
from pipeplan.costs.after import least_steps_ns
from pipeplan.costs.blocks import asked_again, block_costs
from pipeplan.costs.context import exchanged_as, open_exchanges
from pipeplan.costs.held_once import bytes_into, loose_edges
from pipeplan.costs.speeds import at_speed, exactly
from pipeplan.costs.zero import AUTO, WHOLE, Experts
from pipeplan.errors import UsageError
from pipeplan.files import Block, CostRow, Plan, Profile
from pipeplan.graphs import longest_paths, topological_order
from pipeplan.partition.recomputation import levels_of
from pipeplan.partition.strategies import STRATEGIES
from pipeplan.planning.candidates import is_chain, shards_of, strategy_choices, uniform_choices
from pipeplan.planning.held_bounds import HeldBound, back_ns, undominated, way_of
from pipeplan.planning.request import SUBMODULES, Request, size_of
from pipeplan.planning.uniform_space import Blocks, Choice
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.search_constants import BOUND_SECONDS
from pipeplan.time_limit import Limit, checked, shielded
from pipeplan.workload.elements import Again


def request_bound(request: Request) -> int:
    """Least iteration in ns of any plan, for a request that leaves the placement open.

    All devices work all the time on the quickest costs that each block has, and one micro-batch passes all blocks one
    after another on the fastest; of a chain both by the same costs (:func:`held_bound`), and by what all devices hold
    together. With a strategy it is the least of what each of its choices of replicas, size and recomputation needs, at
    that size. All parameters are stepped once. Messages and summing gradients are left out.
    """
    request = request.levelled
    if request.placement == "auto":
        return max(_any_plan(request), held_bound(request), _of_rows(request))
    bounds = [_of_choice(request, choice) for choice in strategy_choices(request)]
    return min((bound for bound in bounds if bound is not None), default=1)


def bound_is_over(request: Request) -> list[str]:
    """The flags that were given and that :func:`request_bound` goes by: it is of any plan with these, whatever else.

    A schedule whose backward is whole says ``--split-backward no``.

    Of the placement left open neither replicas nor positions, levels of ZeRO or chunks make a difference to it, unless
    they leave rows of the table alone.
    """
    names = {"shards": "tp", "context": "cp", "expert": "ep", "expert_shards": "etp"}
    if request.placement != "auto" or _is_of_rows(request):
        names |= {"positions": "pp", "chunks": "vp", "replicas": "dp", "zero": "zero"}
    given = {flag: value for name, flag in names.items() if (value := getattr(request, name)) not in (None, AUTO)}
    if not request.sizes and len(request.profile.microbatch_sizes) > 1:
        given["microbatch-size"] = request.batch.microbatch_size
    if request.recompute is not None:
        given["recompute"] = request.recompute if isinstance(request.recompute, str) else _ALL[request.recompute]
    if request.split_backward is False and can_split(request.profile):
        given["split-backward"] = "no"
    strategy = [f"--placement {request.placement}"] if request.placement in STRATEGIES else []
    return [*strategy, *(f"--{flag} {value}" for flag, value in given.items())]


_ALL = {True: "all", False: "none"}
"""What ``--recompute`` calls what blocks do alike."""


def _is_of_rows(request: Request) -> bool:
    """Whether every plan is cut as a row of the table of layouts says, so that their bounds are the request's, too."""
    fixed = request.shards, request.context, request.positions, request.replicas
    return not (None in fixed or request.chunks != 1 or request.only is not None or request.spread)


def _of_rows(request: Request) -> int:
    """What no row of the table of layouts is below, where a request fixes all their sizes and one stage a position.

    Then every plan is one of its rows, cut somehow and in some order: of rows that go round in turn the table knows no
    more than the bounds above.
    """
    if not _is_of_rows(request):
        return 0
    rows = uniform_choices(request)
    return min((each.least_ns for each in rows), default=0)


def rows_bound(request: Request) -> int:
    """The same by the quickest row of each block alone: no better, and at once however many blocks there are.

    Between two sizes a block takes no less for a sample than at one of them, but for what rounding takes off.
    """
    profile, splits = request.levelled.profile, _may_split(request)
    others = [exchanged_as(profile, split, each) for split, each in open_exchanges(profile).items()]
    sizes = math.lcm(*{row.microbatch_size for block in profile.kinds for row in block.costs})
    work = 0
    for kind, count in Counter(profile.alike.values()).items():
        rows = [row for each in (profile, *others) for row in each.by_id[kind].costs]
        work += count * min(
            row.shards * row.context * (_compute_ns(splits, row) * (sizes // row.microbatch_size) - 2 * sizes)
            for row in rows
        )
    total = Fraction(max(0, work) * request.batch.mini_batch, sizes) + least_steps_ns(profile)
    return max(1, math.ceil(total / sum(map(exactly, request.speeds))))


def prompt_bound(request: Request, within: Limit) -> int:
    """:func:`request_bound`, or :func:`rows_bound` where that takes more than a moment: for a search that has ended.

    In deterministic mode it is waited for, until ``within`` is interrupted.
    """
    with Budget(deterministic=request.deterministic, whole=within, clock=within.clock).moment(BOUND_SECONDS):
        return request_bound(request)
    with shielded():
        return rows_bound(request)


def open_bound(request: Request, plan: Plan) -> int | None:
    """The same for a search that starts from a plan with all else open; None if the profile fixes the placement."""
    opened = Request.of(
        request.stated_profile,
        devices=request.num_devices,
        cluster=request.cluster,
        memory_bytes=request.memory_bytes,
        start=plan,
    )
    return request_bound(opened) if opened.placement == "auto" else None


def least_state_bytes(request: Request) -> int:
    """Bytes of parameters, gradients and optimizer state that all devices together keep in any plan: each there once.

    Whoever shares them out, by splits of blocks, of experts or of replicas, keeps no less.
    """
    return Blocks.of(request.profile).kept(1, WHOLE, Experts()).static_bytes


def held_bound(request: Request) -> int:
    """Ns that no iteration of any plan of a chain is below, by what it computes, how long a micro-batch takes to pass,
    and what devices hold meanwhile, of all blocks together; 0 where that says nothing.

    Of blocks that each wait for the one before.
    """
    request = request.levelled
    profile, splits = request.profile, _may_split(request)
    limits = [limit for limit in request.memory if limit is not None]
    blocks = Blocks.of(profile)
    if not blocks.chained:
        return 0
    levels = (request.recompute,) if request.recompute is not None else levels_of(profile)
    fastest = max(request.speeds)
    halved = request.num_parted != 0
    ways, loose = [], loose_edges(profile)
    for name in checked(blocks.each, 1):
        block = profile.by_id[name]
        into, not_held = profile.edges_into.get(name, ()), loose.get(name, ())
        rows = {
            (split, size, again, number): row
            for split, size in _shares(request, block)
            for again in dict.fromkeys(asked_again([block], level)[0] for level in levels)
            for number, row in enumerate(
                _costs(profile, block, size, split, (again,), bytes_into(block, into, size, *split[:2]))
            )
        }
        halves = {key: rows.get((key[0], key[1] // 2, *key[2:])) for key in rows if halved and key[1] % 2 == 0}
        found = [
            way_of(row, halves.get(key), bytes_into(block, not_held, key[1], *key[0][:2]), fastest, splits=splits)
            for key, row in rows.items()
        ]
        ways.append(undominated(found))
    limited = len(limits) == request.num_devices
    computing, room = float(sum(request.speeds)), sum(limits) - least_state_bytes(request) if limited else None
    steps = least_steps_ns(profile)
    return HeldBound(ways, blocks.kinds, request.batch.mini_batch, computing, room, steps).least_ns()


def _any_plan(request: Request) -> int:
    profile, splits, recomputes = request.profile, _may_split(request), request.recomputes
    per_sample, alone = Fraction(0), dict[str, _AloneTimes]()
    for kind, count in checked(Counter(profile.alike.values()).items(), 4):
        rows = list(_possible(request, profile.by_id[kind], recomputes))
        each_row = (Fraction(_compute_ns(splits, row) * row.shards * row.context, row.microbatch_size) for row in rows)
        per_sample += count * min(each_row, default=Fraction(0))
        alone[kind] = _AloneTimes.least(rows, splits=splits)
    each = {block: alone[kind] for block, kind in profile.alike.items()}
    work = (per_sample * request.batch.mini_batch + least_steps_ns(profile)) / sum(map(exactly, request.speeds))
    return max(1, math.ceil(work), at_speed(_longest_way(profile, each), max(request.speeds)))


def _possible(request: Request, block: Block, recomputes: Sequence[Again]) -> Iterator[CostRow]:
    """A block's costs for every share of a micro-batch that a device may have, which divides what it is a share of.

    Where what is computed again follows from rows that keep it, which may be asked for too, it takes longer than they.
    """
    if False in recomputes and not any(row.recompute for row in block.costs):
        recomputes = (False,)
    for split, size in _shares(request, block):
        yield from _costs(request.profile, block, size, split, recomputes)


_Split = tuple[int, int, int, int]
"""Shards, parts of a sequence, devices that share experts, and how many of these split each."""


def _shares(request: Request, block: Block) -> Iterator[tuple[_Split, int]]:
    """How a block may be split, and of how many samples, as far as it has costs for that."""
    whole = request.batch.mini_batch if request.sizes else request.batch.microbatch_size
    experts = (request.expert, request.expert_shards) if block.expert_parameters else (None, None)
    asked = request.shards, request.context, *experts
    for split in sorted({row.key[1:5] for row in block.costs}):
        if any(count not in (None, own) for count, own in zip(asked, split, strict=True)):
            continue
        shards, *rest = split
        sizes = [row.microbatch_size for row in block.rows(*rest) if row.shards == shards]
        for size in range(min(sizes, default=1), min(max(sizes, default=0), whole) + 1):
            if whole % size == 0:
                yield split, size


def _costs(
    profile: Profile, block: Block, size: int, split: _Split, recomputes: Sequence[Again], input_bytes: int = 0
) -> Iterator[CostRow]:
    """With this number of samples and this split, for each recomputation and exchange of keys and values."""
    other = open_exchanges(profile).get(split[:2])
    if other is not None:
        own = exchanged_as(profile, split[:2], other)
        yield from _costs_of(own.by_id[block.id], size, split, recomputes, input_bytes)
    yield from _costs_of(block, size, split, recomputes, input_bytes)


def _costs_of(
    block: Block, size: int, split: _Split, recomputes: Sequence[Again], input_bytes: int
) -> Iterator[CostRow]:
    """By its rows as they are."""
    shards, context, expert, expert_shards = split
    how: dict[str, Any] = {"context": context, "expert": expert, "expert_shards": expert_shards}
    how["input_bytes"] = input_bytes
    for recompute in dict.fromkeys(asked_again([block], each)[0] for each in recomputes):
        try:
            yield block_costs(block, size, shards, recompute=recompute, **how)
        except UsageError:  # no such costs: no plan has them
            continue


def _of_choice(request: Request, choice: Choice) -> int | None:
    """Least iteration in ns of a strategy's plans with some replicas, size and recomputation; None: there are none."""
    profile, size = request.profile, choice.batch.microbatch_size // choice.replicas
    positions, count = request.num_devices // (choice.replicas * choice.width), choice.batch.num_microbatches
    own = _own_sizes(request, choice)
    splits = _may_split(request)
    parts = (1, 2) if request.num_parted != 0 and size % 2 == 0 else (1,)  # forwards may run in halves
    if positions < 1:
        return None
    work: int | Fraction = 0
    alone = dict[str, _AloneTimes]()
    priced: dict[tuple[str, int], tuple[_AloneTimes, int] | None] = {}

    def times_of(block: Block, samples: int) -> tuple[_AloneTimes, int] | None:
        """What it takes alone, and ns of a whole micro-batch on as many devices as others have; of alike ones once."""
        key = profile.alike[block.id], samples
        if key in priced:
            return priced[key]
        shards = shards_of(request, choice.replicas, choice.spread, block)
        split = shards, choice.context, choice.expert, choice.expert_shards
        costs = {part: list(_costs(profile, block, samples // part, split, (choice.recompute,))) for part in parts}
        times = {part: min(_compute_ns(splits, each) for each in known) for part, known in costs.items() if known}
        least = min((part * ns for part, ns in times.items()), default=0) * shards // choice.shards
        own = _AloneTimes.least((each for known in costs.values() for each in known), splits=splits)
        priced[key] = (own, least) if 1 in times else None
        return priced[key]

    for block in checked(profile.blocks, 64):
        samples = own.get(block.id, size)
        if (found := times_of(block, samples)) is None:
            return None
        alone[block.id], least = found
        work += least if samples == size else Fraction(least * size, samples)
    fastest = max(request.speeds)
    way = at_speed(_longest_way(profile, alone), fastest)
    each = choice.replicas * choice.width
    steps = least_steps_ns(profile) // each  # one copy, over all devices of each position
    speeds = sorted(map(exactly, request.speeds), reverse=True)[: positions * each]
    bound = max(way, math.ceil((work * count + steps) * each / sum(speeds)))
    if choice.strategy == "one-to-one" and not choice.spread and request.num_parted == 0:
        longest = max(own.all_ns for own in alone.values())
        bound = max(bound, count * at_speed(longest, fastest))  # it runs all of them on one device
        if is_chain(profile) and not splits:  # the last device waits for the others, and they for it
            bound = max(bound, way + (count - 1) * at_speed(alone[profile.blocks[-1].id].all_ns, fastest))
    return bound


def _own_sizes(request: Request, choice: Choice) -> dict[str, int]:
    """{block: samples of a micro-batch of each replica}, where rules give its submodule a size of its own.

    Raises:
        UsageError: a size comes to less than one sample.
    """
    found: dict[str, int] = {}
    for submodule in request.rules.submodules if choice.strategy == SUBMODULES and request.rules is not None else ():
        size = size_of(submodule, choice.batch.microbatch_size)
        if size is not None:
            blocks = (block.id for block in request.profile.blocks if fnmatchcase(block.id, submodule.blocks))
            found |= dict.fromkeys(blocks, max(1, size // choice.replicas))
    return found


def _compute_ns(splits: bool, cost: CostRow) -> int:
    """Least time of a forward and its backward, which is whole, or may be split."""
    return cost.forward_ns + _backward_ns(splits, cost)


def _backward_ns(splits: bool, cost: CostRow) -> int:
    backward = cost.whole_backward_ns
    if splits and cost.input_grad_ns is not None and cost.weight_grad_ns is not None:
        backward = min(backward, cost.input_grad_ns + cost.weight_grad_ns)
    return backward


def _may_split(request: Request) -> bool:
    return request.split_backward is not False and can_split(request.profile)


class _AloneTimes(NamedTuple):
    """What a block takes at least, of any of its rows: its forward, the backward that the block before waits for, all
    of its backward, and both together.
    """

    forward_ns: int
    back_ns: int
    backward_ns: int
    all_ns: int

    @classmethod
    def least(cls, rows: Iterable[CostRow], *, splits: bool) -> _AloneTimes:
        """Of these rows; nothing where there are none."""
        each = [
            (row.forward_ns, back_ns(row, splits=splits), _backward_ns(splits, row), _compute_ns(splits, row))
            for row in rows
        ]
        return cls(*map(min, zip(*each, strict=True))) if each else cls(0, 0, 0, 0)


def _longest_way(profile: Profile, alone: Mapping[str, _AloneTimes]) -> int:
    """One micro-batch through the blocks and back, in ns; messages may stay on a device.

    A backward waits for those after it whose gradients it needs, of what is split for the input gradients alone.
    """
    place = {block.id: index for index, block in enumerate(profile.blocks)}
    count, own = len(place), [alone[block.id] for block in profile.blocks]
    pairs = [(place[edge.source], place[edge.target], edge.gradient) for edge in profile.edges]
    order = topological_order(range(count), [pair[:2] for pair in pairs])
    edges = [(source, target, own[source].forward_ns) for source, target, _ in pairs]
    edges += [(block, count + block, own[block].forward_ns) for block in range(count)]
    edges += [(count + target, count + source, own[target].back_ns) for source, target, needed in pairs if needed]
    begins = longest_paths([*order, *(count + block for block in reversed(order))], edges)
    return max(begins[count + block] + each.backward_ns for block, each in enumerate(own))
