"""What a team runs today, in its tool's words, as a placement and an order: to plan, simulate, compare, improve."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any

from pydantic import ValidationError

from pipeplan.costs.layers import layer_of
from pipeplan.errors import FileError, UsageError, choose_from
from pipeplan.files import Modules, PlacedStage, Placement, Profile
from pipeplan.files.modules import StageModules
from pipeplan.files.read_write import read_text
from pipeplan.interop.layer_lists import read_layer_list
from pipeplan.interop.megatron import EMBEDDING, LAYER, LOSS, PREDICTION, order, read_layout, require_layout
from pipeplan.interop.torch_schedule import Order, read_csv
from pipeplan.partition.chain.kernel import balanced_split
from pipeplan.partition.strategies import STRATEGIES
from pipeplan.planning.request import Request, resolve_batch
from pipeplan.schedule.rules.language import Rules
from pipeplan.workload.elements import GATHERED_CONTEXT, MAX_COUNT, MAX_DEVICES, RING, ContextExchange, Recompute

SOURCES = {"torch": "torch", "megatron": "Megatron-LM", "layers": "the layer list"}
"""What can be read, and what it is called: a schedule's CSV, a pipeline layout, a list of layers per stage."""


@dataclass(frozen=True, slots=True)
class Imported:
    """A plan to be: what to ask of a search that has nothing to choose, and ``notes`` on what was assumed."""

    request: Request
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Sourced:
    """What is imported, and what is said beside the source."""

    text: str
    profile: Profile
    devices: int | None
    num_microbatches: int | None
    microbatch_size: int | None
    scheduler: str | None
    modules: Modules | None
    recompute: Recompute


@dataclass(frozen=True, slots=True)
class _Read:
    """Stages with their ranks' devices, and by rank an order, if the source has one."""

    stages: Sequence[PlacedStage]
    groups: Sequence[Sequence[int]]
    ranks: Sequence[int]
    orders: Sequence[Sequence[str]] = ()
    strategy: str = ""
    num_microbatches: int | None = None
    microbatch_size: int | None = None
    scheduler: str = "1f1b"
    notes: tuple[str, ...] = field(default=())


def read_source(source: str) -> str:
    """The text of a file that a tool reads, ``-`` being stdin; or what a person would copy: a layout, or a list.

    Raises:
        FileError: there is no such file, and it is neither.
    """
    try:
        return read_text(source)
    except FileError:
        if not os.path.exists(source) and re.fullmatch(r"[^/\\]*[|,=\]][^/\\]*", source):
            return source
        raise


def imported(
    text: str,
    source: str,
    profile: Profile,
    *,
    devices: int | None = None,
    num_microbatches: int | None = None,
    microbatch_size: int | None = None,
    scheduler: str | None = None,
    modules: Modules | None = None,
    recompute: Recompute = False,
    **others: Any,
) -> Imported:
    """What to ask of a search for the plan that a source says.

    Args:
        text: of the source.
        source: its kind, one of :data:`SOURCES`.
        profile: of the model that it is about.
        devices: how many there are; more than the source's ranks make replicas of each.
        num_microbatches: of an iteration, where the source does not say.
        microbatch_size: samples of all replicas together, where the source does not say.
        scheduler: a schedule by name, instead of the source's own order, or of 1F1B where it has none.
        modules: what each stage of a torch schedule is; without, blocks are cut evenly by time.
        recompute: what backward computes again, where the source does not say.
        others: fields of the request as they stand: cluster, memory, time limit.

    Raises:
        UsageError: the source cannot be read, or does not suit the profile or what is said beside it.
    """
    if source not in SOURCES:
        raise UsageError(f"--from {source!r} is not known; {choose_from(source, list(SOURCES))}")
    if modules is not None and source != "torch":
        raise UsageError(f"--modules is for schedules of torch, not for {source}; leave it out")
    asked = _Sourced(text, profile, devices, num_microbatches, microbatch_size, scheduler, modules, recompute)
    read = {"torch": _torch, "megatron": _megatron, "layers": _layers}[source](asked)
    count = max((max(group) for group in read.groups), default=0) + 1
    try:
        placement = Placement(strategy=read.strategy or _strategy(read), num_devices=count, stages=tuple(read.stages))
        profile.check_placement(placement)
    except ValueError as error:
        why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise UsageError(f"the source does not place profile {profile.name!r}: {why}") from None
    own = scheduler is None and bool(read.orders)
    rules = Rules(name=f"{source} order", order=_by_device(read, count)) if own else None
    request = Request.of(
        profile,
        placement=placement,
        num_microbatches=read.num_microbatches if own else num_microbatches or read.num_microbatches,
        microbatch_size=microbatch_size or read.microbatch_size,
        scheduler="rules" if own else scheduler or read.scheduler,
        rules=rules,
        imported=SOURCES[source],
        **others,
    )
    size = request.batch.microbatch_size
    assumed = [] if own or scheduler else [f"no order is given; {read.scheduler} is assumed (--scheduler)"]
    if num_microbatches is None and read.num_microbatches is None:
        assumed.append(
            f"no number of micro-batches is given; {request.batch.num_microbatches} are assumed (--microbatches)"
        )
    if microbatch_size is None and read.microbatch_size is None:
        assumed.append(f"no micro-batch size is given; {size} samples of all replicas are assumed (--microbatch-size)")
    return Imported(request, (*read.notes, *assumed))


def _by_device(read: _Read, count: int) -> tuple[tuple[str, ...], ...]:
    """[device] its rank's order."""
    rows: list[tuple[str, ...]] = [()] * count
    for group, own in zip(read.groups, read.orders, strict=True):
        for device in group:
            rows[device] = tuple(own)
    return tuple(rows)


def _strategy(read: _Read) -> str:
    """The placement strategy that puts stages where they are, else what it is called when nobody names it."""
    positions = len(read.groups)
    chunks, rest = divmod(len(read.ranks), positions)
    for name, strategy in STRATEGIES.items():
        if not rest and (strategy.chunked or chunks == 1) and strategy.positions(positions, chunks) == [*read.ranks]:
            return name
    return "given"


def _groups(asked: _Sourced, positions: int, width: int = 1) -> list[list[int]]:
    """[rank] its devices: all there are, shared evenly, each a multiple of ``width``."""
    devices = positions * width if asked.devices is None else asked.devices
    if devices % (positions * width):
        each = f" of {width} devices" if width > 1 else ""
        raise UsageError(
            f"--devices {devices} cannot be shared evenly by {positions} pipeline ranks{each}; give a multiple of "
            f"{positions * width}"
        )
    if devices > MAX_DEVICES:
        raise UsageError(f"the source has {devices} devices, more than the {MAX_DEVICES} of a plan")
    size = devices // positions
    return [[*range(rank * size, (rank + 1) * size)] for rank in range(positions)]


# torch ---------------------------------------------------------------------------------------------------------------


def _torch(asked: _Sourced) -> _Read:
    """Orders by rank; the stages as a file of modules says, or cut evenly by time."""
    orders = read_csv(asked.text)
    ranks, count = _ranks_of(orders), _count_of(orders)
    if asked.num_microbatches not in (None, count):
        raise UsageError(
            f"--microbatches {asked.num_microbatches} contradicts the schedule, which has {count}; leave it out, or "
            "give --scheduler"
        )
    texts = [[str(action) for action in own] for own in orders]
    if asked.modules is not None:
        return _of_modules(asked, asked.modules, ranks, texts, count)
    groups = _groups(asked, len(orders))
    blocks = _evenly(asked.profile, len(ranks))
    stages = [_stage(own, groups[rank], asked.recompute) for own, rank in zip(blocks, ranks, strict=True)]
    said = "the schedule says no blocks; stages are cut evenly by time (--modules FILE says which they are)"
    return _Read(stages, groups, ranks, texts, num_microbatches=count, notes=(said,))


def _ranks_of(orders: Sequence[Order]) -> list[int]:
    """[stage] the rank that runs it."""
    found: dict[int, int] = {}
    for rank, own in enumerate(orders):
        if not own:
            raise UsageError(f"row {rank} has no actions; a schedule has a row for each rank, and no other")
        for action in own:
            other = found.setdefault(action.stage, rank)
            if other != rank:
                raise UsageError(f"row {rank} runs {action}, and stage {action.stage} is rank {other}'s")
    missing = next((stage for stage in range(len(found)) if stage not in found), None)
    if not found or missing is not None:
        raise UsageError(f"no row runs stage {missing or 0}; stages are numbered from 0 on, without gaps")
    return [found[stage] for stage in range(len(found))]


def _count_of(orders: Sequence[Order]) -> int:
    return 1 + max(action.microbatch for own in orders for action in own)


def _evenly(profile: Profile, num_stages: int) -> list[list[str]]:
    """[stage] blocks, so that the longest stage is as short as can be."""
    times = []
    for block in profile.blocks:
        row = min(block.rows() or block.costs, key=lambda row: (row.shards, row.microbatch_size))
        times.append(row.forward_ns + (row.backward_ns or 0))
    begins = balanced_split(times, num_stages)
    if begins is None:
        raise UsageError(f"the schedule has {num_stages} stages, the profile only {len(times)} blocks")
    return [[block.id for block in profile.blocks[a:b]] for a, b in pairwise([*begins, len(times)])]


def _of_modules(
    asked: _Sourced, modules: Modules, ranks: Sequence[int], texts: Sequence[Sequence[str]], count: int
) -> _Read:
    theirs = [stage.rank for stage in modules.stages]
    if theirs != [*ranks]:
        raise UsageError(
            f"{modules.where} has stages on ranks {','.join(map(str, theirs))}, and the schedule runs them on "
            f"{','.join(map(str, ranks))}; give the file that was written beside the schedule"
        )
    if modules.num_microbatches != count:
        raise UsageError(
            f"{modules.where} is of {modules.num_microbatches} micro-batches, and the schedule of {count}; give the "
            "file that was written beside the schedule"
        )
    groups = [next(each.devices for each in modules.stages if each.rank == rank) for rank in range(modules.num_ranks)]
    if asked.devices not in (None, sum(map(len, groups))):
        raise UsageError(f"--devices {asked.devices} contradicts {modules.where}, which has {sum(map(len, groups))}")
    stages = [_placed(modules.where, number, each) for number, each in enumerate(modules.stages)]
    return _Read(stages, groups, ranks, texts, modules.placement, count, modules.stages[0].microbatch_size)


def _placed(where: str, number: int, stage: StageModules) -> PlacedStage:
    """A stage of a file of modules, as one of a placement. Raises UsageError."""
    try:
        return PlacedStage(**{name: getattr(stage, name) for name in PlacedStage.model_fields if hasattr(stage, name)})
    except ValidationError as error:
        why = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise UsageError(
            f"{where}: stages[{number}]: {why}; give the file that was written beside the schedule"
        ) from None


# Megatron-LM ---------------------------------------------------------------------------------------------------------

_SIZES = {
    "positions": "--pipeline-model-parallel-size",
    "shards": "--tensor-model-parallel-size",
    "context": "--context-parallel-size",
    "expert": "--expert-model-parallel-size",
    "expert_shards": "--expert-tensor-parallel-size",
    "microbatch": "--micro-batch-size",
    "batch": "--global-batch-size",
    "group": "--microbatch-group-size-per-virtual-pipeline-stage",
}
_ARGUMENT = re.compile(r"(--[a-z-]+)(?:[ =]+(\S+))?")


def _megatron(asked: _Sourced) -> _Read:
    """A layout, and arguments after it, if any; Megatron-LM's own order of actions."""
    first, _, rest = asked.text.strip().partition("\n")
    layout = read_layout(first.strip("'\""))
    arguments = {found[1]: found[2] or "" for found in _ARGUMENT.finditer(rest)}
    sizes = {name: _size(arguments, flag) for name, flag in _SIZES.items() if flag in arguments}
    shards, context, expert = (sizes.get(name, 1) for name in ("shards", "context", "expert"))
    split = sizes.get("expert_shards", shards) if expert > 1 else 1  # by default as many as split all else
    expert *= split
    exchange = _context_exchange(asked.profile, arguments, shards, context)
    positions = sizes.get("positions") or (len(layout) if asked.devices is None else min(len(layout), asked.devices))
    require_layout(layout, positions)
    groups = _groups(asked, positions, shards * context)
    replicas = len(groups[0]) // (shards * context)
    count = asked.num_microbatches
    if count is None and "batch" in sizes and "microbatch" in sizes:
        count, left = divmod(sizes["batch"], sizes["microbatch"] * replicas)
        if left:
            raise UsageError(
                f"--global-batch-size {sizes['batch']} is not a multiple of --micro-batch-size {sizes['microbatch']} x "
                f"{replicas} replicas"
            )
    size = asked.microbatch_size or (sizes["microbatch"] * replicas if "microbatch" in sizes else None)
    notes = [] if PREDICTION not in "".join(layout) else ["the profile has no multi-token prediction; m is left out"]
    ranks = [stage % positions for stage in range(len(layout))]
    zero = 1 if "--use-distributed-optimizer" in arguments and replicas * context > 1 else 0
    stages = [
        PlacedStage(
            blocks=tuple(own),
            devices=tuple(groups[rank]),
            shards=shards,
            context=context,
            context_exchange=exchange,
            expert=expert,
            expert_shards=split if expert > 1 else None,
            replicas=replicas,
            zero=zero,
            recompute=_again(own, arguments, asked.recompute),
        )
        for own, rank in zip(_of_layout(asked.profile, layout), ranks, strict=True)
    ]
    if count is None:
        batch = resolve_batch(asked.profile, positions * len(groups[0]), microbatch_size=size)
        count = batch.num_microbatches
        notes.append(f"no batch is given; {count} micro-batches are assumed (--microbatches)")
    if count > MAX_COUNT:
        raise UsageError(f"the source has {count} micro-batches, more than the {MAX_COUNT} of a plan")
    chunks = len(layout) // positions
    group = sizes.get("group", min(positions, count))
    orders = [
        [f"{stage}{kind}{m}" for kind, stage, m in order(positions, chunks, count, group, rank)]
        for rank in range(positions)
    ]
    strategy = "circular" if chunks > 1 else "one-to-one"
    return _Read(stages, groups, ranks, orders, strategy, count, size, notes=tuple(notes))


_EXCHANGES: Mapping[str, ContextExchange] = {"p2p": RING, "all_gather": GATHERED_CONTEXT}


def _context_exchange(
    profile: Profile, arguments: Mapping[str, str], shards: int, context: int
) -> ContextExchange | None:
    """How devices that share sequences exchange keys and values: by default around a ring, if its costs are known."""
    said = arguments.get("--cp-comm-type")
    if said is not None and said not in _EXCHANGES:
        raise UsageError(f"--cp-comm-type {said}: plans have {' or '.join(_EXCHANGES)}")
    if context == 1:
        return None
    known = any(
        row.ring is not None and (row.shards, row.context) == (shards, context)
        for block in profile.kinds
        for row in block.costs
    )
    return _EXCHANGES[said] if said is not None else RING if known else None


def _size(arguments: Mapping[str, str], flag: str) -> int:
    text = arguments[flag]
    if not re.fullmatch("[1-9][0-9]{0,6}", text):
        raise UsageError(f"{flag} {text}: write a number from 1 on")
    return int(text)


def _again(blocks: Sequence[str], arguments: Mapping[str, str], said: Recompute) -> Recompute:
    """What Megatron-LM's arguments compute again of a stage's blocks."""
    granularity = arguments.get("--recompute-granularity")
    if granularity is None:
        return said
    if granularity == "selective":
        return "selective"
    if arguments.get("--recompute-method") != "block":
        return True
    most = _size(arguments, "--recompute-num-layers")
    layers = [*dict.fromkeys(layer for block in blocks if (layer := layer_of(block)) is not None)]
    return tuple(layer_of(block) in layers[:most] for block in blocks)


def _of_layout(profile: Profile, layout: Sequence[str]) -> list[list[str]]:
    """[stage] its blocks; what is not of a layer is with E before the first, and with L after the last."""
    beginning, layers, end = _parts(profile)
    _require_count("".join(layout).count(LAYER), len(layers), profile)
    waiting, found = iter(layers), []
    for letters in layout:
        own: list[str] = []
        for letter in letters:
            own += {EMBEDDING: beginning, LOSS: end}.get(letter, []) if letter != LAYER else next(waiting)
        found.append(own)
    return _with_none_empty(found)


def _parts(profile: Profile) -> tuple[list[str], list[list[str]], list[str]]:
    """A model's beginning, its layers and its end. Raises UsageError."""
    numbers = [layer_of(block.id) for block in profile.blocks]
    known = [number for number in numbers if number is not None]
    if not known:
        raise UsageError(
            f"no block of profile {profile.name!r} says which layer it is of, as layer0.ffn or layers.0 would (the "
            f"first is {profile.blocks[0].id!r})"
        )
    first, last = numbers.index(known[0]), len(numbers) - numbers[::-1].index(known[-1])
    ids = [block.id for block in profile.blocks]
    inside = list(zip(numbers[first:last], ids[first:last], strict=True))
    layers = [[id_ for _, id_ in same] for _, same in groupby(inside, key=lambda each: each[0])]
    if [number for number, _ in groupby(numbers[first:last])] != [*range(len(layers))]:
        raise UsageError(f"profile {profile.name!r} has not one row of layers, from 0 on in their order")
    return ids[:first], layers, ids[last:]


def _require_count(given: int, known: int, profile: Profile) -> None:
    if given != known:
        raise UsageError(f"the source has {given} layers, and profile {profile.name!r} has {known}")


def _with_none_empty(stages: list[list[str]]) -> list[list[str]]:
    empty = next((number for number, own in enumerate(stages) if not own), None)
    if empty is not None:
        raise UsageError(f"stage {empty} has no block of the profile, and plans have no empty stages")
    return stages


# Lists of layers -----------------------------------------------------------------------------------------------------


def _layers(asked: _Sourced) -> _Read:
    """Layers per rank of one pipeline; more devices than it has are split among its ranks as replicas."""
    counts = read_layer_list(asked.text)
    beginning, layers, end = _parts(asked.profile)
    _require_count(sum(counts), len(layers), asked.profile)
    blocks, at = [], 0
    for count in counts:
        blocks.append([block for layer in layers[at : at + count] for block in layer])
        at += count
    blocks[0] = [*beginning, *blocks[0]]
    blocks[-1] += end
    groups = _groups(asked, len(counts))
    stages = [_stage(own, group, asked.recompute) for own, group in zip(_with_none_empty(blocks), groups, strict=True)]
    return _Read(stages, groups, [*range(len(counts))], strategy="one-to-one")


def _stage(blocks: Sequence[str], devices: Sequence[int], recompute: Recompute) -> PlacedStage:
    return PlacedStage(blocks=tuple(blocks), devices=tuple(devices), replicas=len(devices), recompute=recompute or None)
