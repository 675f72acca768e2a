"""The elements of a workload: devices, stages, operations, and what waits for what.

Plain frozen objects that searches make and copy by the thousand; a plan's file has the same ones. Annotations say what
a field may hold, in annotated-types' terms and in the protocol by which pydantic asks annotations, without needing it.
Nothing reads them here: files enforce them where they are read or written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from itertools import chain
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from annotated_types import Ge, Le, MinLen

from pipeplan.texts import REFUSED, problem_of
from pipeplan.units import MAX_BYTES, MAX_NS
from pipeplan.workload.action import KIND_PATTERN, NUMBER_PATTERN, operation_of
from pipeplan.workload.kinds import (
    CACHE,
    CACHE_KINDS,
    KEPT_KINDS,
    MEMORY_KINDS,
    STATE_KINDS,
    MemoryBytes,
    MemoryKind,
    Role,
    is_instruction,
    payload_of,
    role_of,
)
from pipeplan.workload.mesh import PLACES, SHARDS, Mesh
from pipeplan.workload.samples import Slots

MAX_COUNT = 1_000_000
MAX_DEVICES = 65_536


@dataclass(frozen=True, slots=True)
class Matching:
    """A text that matches a regular expression."""

    pattern: str

    def __get_pydantic_core_schema__(self, source: type, handler: Callable[[type], dict[str, Any]]) -> dict[str, Any]:
        return {**handler(source), "pattern": self.pattern}


@dataclass(frozen=True, slots=True)
class Printable:
    """A text of at most ``most`` characters, none of which moves what a terminal shows (:mod:`pipeplan.texts`)."""

    most: int
    least: int = 0

    def __get_pydantic_core_schema__(self, source: type, handler: Callable[[type], dict[str, Any]]) -> dict[str, Any]:
        text = {**handler(source), "min_length": self.least, "max_length": self.most}
        return {"type": "function-after", "function": {"type": "no-info", "function": _printable}, "schema": text}

    def __get_pydantic_json_schema__(self, core: Any, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        return {**handler(core), "pattern": f"^[^{REFUSED}]*$"}


def _printable(text: str) -> str:
    if problem := problem_of(text):
        raise ValueError(problem)
    return text


@dataclass(frozen=True, slots=True)
class FirstProblemOnly:
    """A list of which only the first problem is reported: noting a million of them would take a gigabyte."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        return {**handler(source), "fail_fast": True}


WRITTEN_WHERE_SAID = "written_where_said"
"""Marks a key that files and canonical texts leave out where it has its default: one that came within a version."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a field means, in the words of its file's JSON Schema; and its default, where that is a new object.

    ``said_only``: files leave it out where it has its default.
    """

    text: str
    default: dict[str, Any] | None = None
    said_only: bool = False

    def __get_pydantic_json_schema__(self, core: Any, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        default = {} if self.default is None else {"default": self.default}
        marked = {WRITTEN_WHERE_SAID: True} if self.said_only else {}
        return {**default, **handler(core), "description": self.text, **marked}


Item = TypeVar("Item")
Items = Annotated[tuple[Item, ...], FirstProblemOnly()]
"""A list of a file."""

Nanoseconds = Annotated[int, Ge(0), Le(MAX_NS)]
PositiveNs = Annotated[int, Ge(1), Le(MAX_NS)]
Bytes = Annotated[int, Ge(0), Le(MAX_BYTES)]
Share = Annotated[float, Ge(0), Le(1)]
Speed = Annotated[float, Ge(0.001), Le(1000)]
SPEED = "how much it computes in the time in which a device that the profile's times are of computes 1"
Count = Annotated[int, Ge(1), Le(MAX_COUNT)]
DeviceCount = Annotated[int, Ge(1), Le(MAX_DEVICES)]
Index = Annotated[int, Ge(0), Le(MAX_COUNT)]
Name = Annotated[str, Printable(256, least=1)]
MAX_TEXT = 8192
"""Characters of a text of a file, at most."""
Text = Annotated[str, Printable(MAX_TEXT)]
"""A text of a file that is no name: a sentence, or one of many words."""
Kind = Annotated[str, Matching(f"^{KIND_PATTERN}$")]
Again = bool | Literal["selective"]
"""What backward computes again of a block: nothing, its attention core (if it has one), or all of it (true)."""
Recompute = Again | Items[Again]
"""The same of a stage's blocks: of all alike, or of each in its order."""
OperationId = Annotated[str, Matching(f"^{NUMBER_PATTERN}{KIND_PATTERN}$")]


ZeroLevel = Annotated[int, Ge(0), Le(3)]
ZERO = (
    "what replicas divide among them (ZeRO): 0 nothing, 1 the optimizer's state and master copies, 2 gradients, too, "
    "3 parameters, too"
)
ZERO_GROUP = "neighbouring replicas (each context times) that together have one copy of what is divided; none: all"
CONTEXT = "devices that share the sequence of each sample, in equal parts (context parallel)"
ContextExchange = Literal["gathered", "ring"]
GATHERED_CONTEXT: ContextExchange = "gathered"
RING: ContextExchange = "ring"
CONTEXT_EXCHANGE = (
    "how these have keys and values of all: gathered before the attention core, or sent around a ring beside it"
)


EXPERT = (
    "neighbouring devices of the stage that share the experts of its blocks, each with whole ones of its own (expert "
    "parallel)"
)


EXPERT_SHARDS = "how many neighbours of these devices split each expert (expert tensor size)"


def group_problem(
    shards: int,
    context: int,
    replicas: int,
    num_devices: int,
    exchange: ContextExchange | None = None,
    configurations: Sequence[str] = (),
) -> str | None:
    """What is wrong with how many devices a stage has, if anything, and with how these exchange keys and values.

    Where ``configurations`` say so they share those of single blocks.
    """
    if exchange == RING and context == 1 and not any(PLACES in each for each in configurations):
        return "context_exchange ring is of devices that share sequences, and context is 1"
    if shards * context * replicas == num_devices:
        return None
    between = f" x context {context}" if context > 1 else ""
    return f"shards {shards}{between} x replicas {replicas} must equal the {num_devices} devices"


def context_problem(contexts: Iterable[int], configured: Iterable[bool]) -> str | None:
    """What is wrong with how stages share sequences, if anything: all share them alike, and split blocks alike.

    A device hands on its own part of a sequence, which must be what the next stage's device takes.
    """
    first: int | None = None
    for number, (context, unlike) in enumerate(zip(contexts, configured, strict=True)):
        first = context if first is None else first
        if context != first:
            return (
                f"stages[{number}] has context {context}, and stages[0] has {first}: a device hands on its own part of "
                "each sequence, so that all stages must have one context"
            )
        if context > 1 and unlike:
            return f"stages[{number}] has context {context}, and blocks with configurations cannot; let context be 1"
    return None


def expert_problem(expert: int, num_devices: int, configured: bool = False, expert_shards: int = 1) -> str | None:
    """What is wrong with how many devices of a stage share experts, if anything: they are groups of neighbours."""
    if expert % expert_shards:
        return f"expert_shards {expert_shards} does not divide the {expert} devices that share experts"
    if expert == 1:
        return None
    if num_devices % expert:
        return f"expert {expert} does not divide the {num_devices} devices, which share experts in equal groups"
    if configured:
        return f"expert is {expert}, and blocks with configurations cannot share experts; let expert be 1"
    return None


def sharing_problem(zero: int, zero_group: int | None, replicas: int, configured: bool = False) -> str | None:
    """What is wrong with how a stage's replicas divide what they keep, if anything.

    ``replicas`` counts all copies of the parameters: those that share a sequence, too.

    ``configured`` says that its blocks have configurations.
    """
    if zero > 1 and configured:
        return f"zero {zero} exchanges state block by block, and blocks with configurations cannot; let zero be 1"
    if zero_group is not None and not zero:
        return f"zero_group is {zero_group}, and zero 0 divides nothing; leave it out, or let zero be 1"
    if zero_group is not None and replicas % zero_group:
        return f"zero_group {zero_group} does not divide the {replicas} replicas"
    return None


Integer = Annotated[int, Ge(-(2**63)), Le(2**63 - 1)]
"""A number that means nothing to pipeplan: of an option, or for an instruction's function."""

Scalar = Text | Integer | float | bool
Attribute = Scalar | tuple[Scalar, ...]
"""What an instruction's function gets beside its tensors."""


class Element:
    """Base of what stands in a file as it is: unknown keys refused, no conversion between types."""

    __slots__ = ()
    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "extra": "forbid",
        "strict": True,
        "allow_inf_nan": False,
        "revalidate_instances": "always",
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Device(Element):
    """A device the plan uses, and its memory (None is no limit), of which the plan leaves ``reserve_bytes`` alone.

    By ``contention`` of its speed it computes less while its network sums gradients beside that.
    """

    name: Name = "device"
    memory_bytes: Bytes | None = None
    reserve_bytes: Annotated[
        Bytes,
        Meaning("of its memory, what the plan leaves to the device's context, communication buffers and allocator"),
    ] = 0
    contention: Annotated[
        Share, Meaning("by what part of its speed it computes less while its network sums gradients", said_only=True)
    ] = 0.0

    @property
    def usable_bytes(self) -> int | None:
        """What a plan may use; None is no limit."""
        return None if self.memory_bytes is None else self.memory_bytes - self.reserve_bytes


Class = TypeVar("Class", bound=type)


def _with_bytes(kinds: Iterable[MemoryKind], meaning: str = "", *, said_only: bool = False) -> Callable[[Class], Class]:
    """Gives a class a key for the bytes of each of these kinds of memory.

    With a meaning they stand after its own keys, and are 0 by default; without, before these, and must be there.
    ``said_only``: files leave them out where they are 0.
    """
    bytes_: Any = Annotated[Bytes, Meaning(meaning, said_only=said_only)] if meaning else Bytes
    keys = {kind.key: bytes_ for kind in kinds}

    def give(cls: Class) -> Class:
        own = cls.__annotations__
        cls.__annotations__ = own | keys if meaning else keys | own
        for key in keys if meaning else ():
            setattr(cls, key, 0)
        return cls

    return give


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket(Element):
    """Gradients of neighbouring blocks of a stage that are summed together, before those of the blocks before them."""

    blocks: Annotated[Count, Meaning("how many: the first bucket has the last blocks of the stage, and so on")]
    bytes: Annotated[Bytes, Meaning("of gradients, on each device of the stage")]
    whole_bytes: Annotated[
        Bytes, Meaning("of these, what is summed over shards, too, as whole_gradient_bytes are", said_only=True)
    ] = 0
    ahead_ns: Annotated[
        Nanoseconds, Meaning("from which on it may be summed, before the last action that adds to gradients ends")
    ] = 0
    sync_ns: Annotated[Nanoseconds, Meaning("summing it, beside compute")] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockGroup(Element):
    """Neighbouring blocks of a stage whose state is gathered and reduced together, by actions of programs.

    Times of compute are its part of the stage's actions: of F, of B or I, and of W. Forwards run the groups in order,
    the others from the last to the first.
    """

    blocks: Annotated[Count, Meaning("how many: the first group has the first blocks of the stage, and so on")]
    gathered_bytes: Annotated[
        Bytes, Meaning("on each device, from UNSHARD to RESHARD; 0 where parameters are not divided")
    ] = 0
    reduced_bytes: Annotated[Bytes, Meaning("of gradients that are not divided yet, to the end of REDUCE_GRAD")] = 0
    unshard_ns: Annotated[Nanoseconds, Meaning("UNSHARD, beside compute")] = 0
    reduce_ns: Annotated[Nanoseconds, Meaning("REDUCE_GRAD, beside compute")] = 0
    forward_ns: Nanoseconds = 0
    backward_ns: Nanoseconds = 0
    weight_grad_ns: Nanoseconds = 0

    def time_in(self, role: Role) -> int:
        """Its part of an action, in ns."""
        return {Role.FORWARD: self.forward_ns, Role.WEIGHT_GRAD: self.weight_grad_ns}.get(role, self.backward_ns)


def groups_problem(groups: Sequence[BlockGroup], num_blocks: int, operations: Iterable[Operation]) -> str | None:
    """What is wrong with a stage's groups of blocks, if anything; ``operations`` are the stage's."""
    if not groups:
        return None
    if (found := sum(each.blocks for each in groups)) != num_blocks:
        return f"have {found} blocks together, the stage has {num_blocks}"
    for operation in operations:
        if (parts := sum(each.time_in(operation.role) for each in groups)) != operation.duration_ns:
            return f"take {parts} ns of {operation.id}, which lasts {operation.duration_ns} ns"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment(Element):
    """Neighbouring blocks of a stage that one kernel backend runs, at once where it is another than eager torch."""

    blocks: Annotated[Items[Name], MinLen(1), Meaning("block ids, in the order they run")]
    backend: Annotated[Name, Meaning("eager torch, or a kernel backend")]


SEGMENTS = (
    "which kernel backend runs which of its blocks, in the order they run; none: eager torch runs all. A stage with a "
    "segment of another backend has no I and W"
)


AFTER: Literal["after"] = "after"
"""What is kept of a tensor is the copy of the block that takes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remade(Element):
    """A tensor between two blocks of a stage, of which one copy is kept for backward, and the other is made again."""

    source: Annotated[Name, Meaning("the block that gives it")]
    target: Annotated[Name, Meaning("the block that takes it in another layout")]
    kept: Annotated[
        Literal["before", "after"], Meaning("the copy in the layout it is given in, or that in the one it is taken in")
    ]


REMADE = (
    "tensors between its blocks of which only one copy is kept for backward, where these have them in two layouts; "
    "none: each keeps its own"
)


def remade_problem(
    remade: Sequence[Remade], blocks: Sequence[str], configurations: Sequence[str], recomputes: bool
) -> str | None:
    """What is wrong with the tensors that a stage makes again, if anything."""
    if not remade:
        return None
    if not configurations or recomputes:
        return "are of stages whose blocks have configurations and are not recomputed"
    seen = set[tuple[str, str]]()
    for each in remade:
        if odd := next((block for block in (each.source, each.target) if block not in blocks), None):
            return f"have {odd!r}, which is not one of its blocks"
        if (each.source, each.target) in seen:
            return f"have the tensor from {each.source!r} to {each.target!r} twice"
        seen.add((each.source, each.target))
    return None


def segments_problem(
    segments: Sequence[Segment], blocks: Sequence[str], others: Mapping[str, object], zero: int = 0
) -> str | None:
    """What is wrong with the segments of a stage, if anything.

    They have its blocks in its order. ``others`` {key: value} is what the stage says that backends were not measured
    with, and so must be 1, or nothing.
    """
    if not segments:
        return None
    found = [block for segment in segments for block in segment.blocks]
    if found != [*blocks]:
        odd = next((b for b in found if b not in blocks), None)
        if odd is not None:
            return f"have block {odd!r}, which the stage does not have: a segment is of one stage"
        missing = next((b for b in blocks if b not in found), None)
        if missing is not None:
            return f"leave out block {missing!r}"
        return "do not have the stage's blocks in its order, each once"
    if said := next((key for key, value in others.items() if value and (value is True or value != 1)), None):
        return f"are for stages whose blocks are whole on each device and run as they are, and it has {said}"
    if zero > 1:
        return f"are for stages that exchange nothing inside of actions, and it has zero {zero}"
    return None


WHOLE_GRADIENTS = (
    "of gradient_bytes, those of parameters that each shard has whole, such as norms', where shards divide sequences: "
    "each makes a part of them, so that they are summed over shards, too"
)

ONCE = MAX_COUNT
"""State exchanged after this many actions is exchanged once per iteration, however many micro-batches there are."""
UNSHARD_EVERY = (
    "forwards and backwards of the stage, one after another on its devices, for which its parameters stay gathered, "
    f"from an UNSHARD to a RESHARD; {ONCE}: all; none: each block is gathered inside of actions"
)
REDUCE_EVERY = (
    f"micro-batches whose gradients add up before a REDUCE_GRAD; {ONCE}: all; none: each block's are reduced inside "
    "of actions"
)


def exchange_problem(
    zero: int, copies: int, unshard_every: int | None, reduce_every: int | None, num_parted: int
) -> str | None:
    """What is wrong with how often a stage's state is exchanged by actions, if anything."""
    if unshard_every is None and reduce_every is None:
        return None
    if zero < 2 or copies == 1:
        return "reduce_every is for stages whose replicas divide gradients (zero 2 and 3); leave it out"
    if reduce_every is None or (unshard_every is None) == (zero == 3):
        return "reduce_every stands with zero 2 alone, and with unshard_every at zero 3; give what is missing"
    if num_parted:
        return f"num_parted is {num_parted}: forwards in two parts cannot be with unshard_every and reduce_every"
    return None


def buckets_problem(buckets: Sequence[Bucket], num_blocks: int, duration_ns: int) -> str | None:
    """What is wrong with a stage's buckets, if anything; its actions that add to gradients take so long."""
    ahead = [each.ahead_ns for each in buckets]
    if buckets and (found := sum(each.blocks for each in buckets)) != num_blocks:
        return f"have {found} blocks together, the stage has {num_blocks}"
    if (odd := next((each for each in buckets if each.whole_bytes > each.bytes), None)) is not None:
        return f"have whole_bytes {odd.whole_bytes} of {odd.bytes} bytes of gradients"
    if buckets and (ahead[-1] or ahead != sorted(ahead, reverse=True) or ahead[0] > duration_ns):
        said = ", ".join(map(str, ahead))
        return f"are ahead by {said} ns; that falls from at most {duration_ns} ns, of one action, to 0"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
@_with_bytes(
    CACHE_KINDS,
    "on each device of the stage, of all requests at the last step that the plan is for",
    said_only=True,
)
@_with_bytes(KEPT_KINDS, "on each device of the stage, for each micro-batch")
@_with_bytes(STATE_KINDS, "on each device of the stage")
class Stage(Element):
    """A stage: blocks, device group, how it is split, and what it keeps on each of its devices.

    Replica r stands on devices ``r * width`` to ``(r + 1) * width - 1`` of ``devices``, where the width is
    ``shards * context``, and works on the r-th of equal shares of each micro-batch's samples. Of these, each ``shards``
    neighbouring devices have one of ``context`` equal parts of every sequence, and a copy of the parameters. Experts
    are divided otherwise: each ``expert`` neighbouring devices of the stage have all of them, whole ones each, or each
    ``expert_shards`` neighbours of these split the same.

    A stage of instructions has no blocks; its micro-batches say how often they run.
    """

    blocks: Items[Name]
    devices: Annotated[Items[Index], MinLen(1)]
    shards: Count = 1
    replicas: Count = 1
    context: Annotated[Count, Meaning(CONTEXT, said_only=True)] = 1
    context_exchange: Annotated[ContextExchange, Meaning(CONTEXT_EXCHANGE, said_only=True)] = GATHERED_CONTEXT
    expert: Annotated[Count, Meaning(EXPERT, said_only=True)] = 1
    expert_shards: Annotated[Count, Meaning(EXPERT_SHARDS, said_only=True)] = 1
    configuration: Name | None = None
    configurations: Annotated[
        Items[Name], Meaning("how each block is split over the shards, such as samples2-shards2; none: all")
    ] = ()
    microbatch_size: Annotated[Count, Meaning("samples in one micro-batch of this stage")]
    recompute: Annotated[
        Recompute,
        Meaning("whether its blocks are recomputed; selective: their attention cores are; a list: each in order"),
    ] = False
    route: Annotated[Index, Meaning("of the plan's routes, the one whose micro-batches come here")] = 0
    num_parted: Annotated[Index, Meaning("leading micro-batches whose forward runs in two parts")] = 0
    zero: Annotated[ZeroLevel, Meaning(ZERO)] = 0
    zero_group: Annotated[Count | None, Meaning(ZERO_GROUP)] = None
    whole_gradient_bytes: Annotated[Bytes, Meaning(WHOLE_GRADIENTS, said_only=True)] = 0
    sync_ns: Annotated[
        Nanoseconds, Meaning("summing gradients over replicas and routes, beside compute; what is tied apart")
    ] = 0
    step_ns: Annotated[
        Nanoseconds,
        Meaning("the optimizer's step of its parameters on each of its devices, after gradients are summed"),
    ] = 0
    gather_ns: Annotated[
        Nanoseconds, Meaning("gathering its updated parameters over replicas that each have a part, after the step")
    ] = 0
    buckets: Annotated[
        Items[Bucket], Meaning("in which gradients are summed as they become ready; none: all at once, in sync_ns")
    ] = ()
    cuts: Annotated[
        Items[Annotated[int, Ge(1), Le(MAX_COUNT)]],
        Meaning(
            "how many of its blocks stand before each part of its forward but the first; none: one part", said_only=True
        ),
    ] = ()
    unshard_every: Annotated[Count | None, Meaning(UNSHARD_EVERY, said_only=True)] = None
    reduce_every: Annotated[Count | None, Meaning(REDUCE_EVERY, said_only=True)] = None
    block_groups: Annotated[
        Items[BlockGroup],
        Meaning("that UNSHARD, RESHARD and REDUCE_GRAD are of, where actions exchange state", said_only=True),
    ] = ()
    speed: Annotated[Speed, Meaning(f"of its slowest device: {SPEED}", said_only=True)] = 1.0
    kinds: Annotated[
        Items[Name],
        Meaning(
            "of its devices, where some kind has a profile of its own: its rows are those of each, row by row the "
            "slowest and largest; none: the profile's",
            said_only=True,
        ),
    ] = ()
    segments: Annotated[Items[Segment], Meaning(SEGMENTS, said_only=True)] = ()
    remade: Annotated[Items[Remade], Meaning(REMADE, said_only=True)] = ()

    @property
    def copies(self) -> int:
        """How many times its parameters are there: every replica has them once for each part of a sequence."""
        return self.replicas * self.context

    @property
    def sharers(self) -> int:
        """Copies that have one of what is divided among them; 1 where nothing is."""
        return (self.zero_group or self.copies) if self.zero else 1

    @property
    def again(self) -> tuple[Again, ...]:
        """[block] what is computed again."""
        return again_of(self.recompute, len(self.blocks))

    @property
    def backends(self) -> tuple[str, ...]:
        """The kernel backends that run its blocks, in the order they begin; none where eager torch runs all."""
        return tuple(dict.fromkeys(each.backend for each in self.segments))

    @property
    def recomputes(self) -> bool:
        """Whether anything is."""
        return any(self.again)

    @property
    def recomputed(self) -> str:
        """The same in words; none where nothing is."""
        blocks, cores = self.again.count(True), self.again.count("selective")
        if blocks == len(self.blocks):
            return "recomputed" if blocks else ""
        of = f"{blocks} of {len(self.blocks)} blocks" if blocks else ""
        attention = "" if not cores else "attention" if cores == len(self.blocks) else f"attention of {cores}"
        found = " and ".join(filter(None, (of, attention)))
        return f"{found} recomputed" if found else ""

    @property
    def state(self) -> MemoryBytes:
        """What each of its devices keeps throughout an iteration."""
        return MemoryBytes.of_keys(self, STATE_KINDS)

    @property
    def cached(self) -> MemoryBytes:
        """What the requests of a decode step have in the cache of each of its devices."""
        return MemoryBytes.of_keys(self, CACHE_KINDS)

    @property
    def kept(self) -> MemoryBytes:
        """What each of its devices keeps for each micro-batch while any action of that is to come there."""
        return MemoryBytes.of_keys(self, KEPT_KINDS)

    def with_state(self, state: MemoryBytes) -> Stage:
        """The stage with other bytes that each of its devices keeps."""
        changes: dict[str, Any] = {**state.keyed(STATE_KINDS)}
        return replace(self, **changes)

    def with_cache(self, size: int) -> Stage:
        """The stage with so many bytes of requests' keys and values on each of its devices."""
        changes: dict[str, Any] = {CACHE.key: size}
        return replace(self, **changes)

    def mesh_of(self, index: int) -> Mesh:
        """How the devices of a replica stand for a block. Raises ValueError where ``check`` would refuse it."""
        return mesh_of(self.configurations, index, self.shards)


def speeds_of(stages: Iterable[Stage], num_devices: int) -> list[float]:
    """[device] that of the fastest of its stages, and so its own where it is the slowest of one; 1 without any."""
    found = dict[int, float]()
    for stage in stages:
        for device in stage.devices:
            found[device] = max(found.get(device, 0.0), stage.speed)
    return [found.get(device, 1.0) for device in range(num_devices)]


def odd_neighbour(stage: Stage, stages: Iterable[Stage]) -> int | None:
    """The first stage that has some of a stage's devices, and not just these."""
    own = set(stage.devices)
    return next(
        (n for n, each in enumerate(stages) if not own.isdisjoint(each.devices) and own != {*each.devices}), None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Players(Element):
    """Devices that play one program, each in a place of its own: those from ``first`` on, in ``counts`` of ``steps``.

    With counts 4, 2 and steps 8, 1 they are first, first + 1, first + 8, first + 9 and so on: the last count is of
    neighbours, each before it of such groups. Steps fall, and a group ends before the next one begins.
    """

    first: Index
    counts: Annotated[Items[Count], MinLen(1)]
    steps: Annotated[Items[Count], MinLen(1)]

    @property
    def count(self) -> int:
        """How many they are."""
        return math.prod(self.counts)

    def device(self, place: int) -> int:
        """The device in a place."""
        found = self.first
        for count, step in zip(reversed(self.counts), reversed(self.steps), strict=True):
            place, own = divmod(place, count)
            found += own * step
        return found

    def place(self, device: int) -> int | None:
        """The place of a device; None where it is none of them."""
        left, found = device - self.first, 0
        for count, step in zip(self.counts, self.steps, strict=True):
            own, left = divmod(left, step)
            if not 0 <= own < count:
                return None
            found = found * count + own
        return found if left == 0 else None

    @property
    def devices(self) -> tuple[int, ...]:
        """All of them, place by place."""
        return tuple(chain.from_iterable(self.runs))

    @property
    def runs(self) -> list[range]:
        """The same as ranges, each of as many as the last count says."""
        found, (*counts, last), (*steps, step) = [self.first], self.counts, self.steps
        for count, each in zip(counts, steps, strict=True):
            found = [begin + own * each for begin in found for own in range(count)]
        return [range(begin, begin + last * step, step) for begin in found]

    @classmethod
    def of(cls, devices: Sequence[int]) -> Players | None:
        """As the fewest counts; None where they stand otherwise."""
        counts, steps, heads = list[int](), list[int](), list(devices)
        while len(heads) > 1:
            step = heads[1] - heads[0]
            run = next((n for n in range(1, len(heads)) if heads[n] - heads[n - 1] != step), len(heads))
            counts, steps, heads = [run, *counts], [step, *steps], heads[::run]
        if not counts:
            counts, steps = [1], [1]
        if min(steps) < 1 or math.prod(counts) != len(devices):
            return None
        found = cls(first=devices[0], counts=tuple(counts), steps=tuple(steps))
        return None if found.problem or found.devices != tuple(devices) else found

    @property
    def problem(self) -> str | None:
        """What is wrong with the numbers, if anything."""
        if len(self.counts) != len(self.steps):
            return f"has {len(self.counts)} counts and {len(self.steps)} steps; each count has one"
        reach = 1
        for count, step in zip(reversed(self.counts), reversed(self.steps), strict=True):
            if step < reach:
                return f"has a step of {step} devices, in which a group of {reach} has no room"
            reach = step * (count - 1) + reach
        return None


def program_of(players: Sequence[Players], device: int) -> tuple[int, int]:
    """The program that a device plays, and its place there. Raises ValueError where it plays none."""
    for program, own in enumerate(players):
        if (place := own.place(device)) is not None:
            return program, place
    raise ValueError(f"device {device} plays none of {len(players)} programs")


@dataclass(frozen=True, slots=True, kw_only=True)
@_with_bytes(STATE_KINDS, "on each device of the stages, which all count it")
class TiedState(Element):
    """A part of a parameter that stages share, and the devices that have it: whole, or one of equal ``parts``.

    Each of ``stages`` counts it in its state on those of its devices that ``devices`` list in the same place. A device
    has it once. A stage is named once for each way in which its blocks split the parameter. Gradients of a part are
    summed over all devices that have it. Where some stages split the parameter unlike others the whole is summed, over
    all: for that there is an entry without bytes, and those of the parts say 0. None of it is in the stages' own
    ``sync_ns``. On a device sums run one after another.
    """

    name: Name
    stages: Annotated[Items[Index], MinLen(1)]
    devices: Annotated[Items[Items[Index]], MinLen(1), Meaning("for each of the stages, its devices that have it")]
    parts: Annotated[Count, Meaning("into how many equal parts the parameter is split")] = 1
    sync_ns: Annotated[Nanoseconds, Meaning("summing its gradients over all these devices, beside compute")] = 0

    @property
    def all_devices(self) -> frozenset[int]:
        """All that have it."""
        return frozenset(device for devices in self.devices for device in devices)

    @property
    def is_sum(self) -> bool:
        """Whether it is the sum of what is split unlike, and nothing that is kept."""
        return not self.state.total

    @property
    def state(self) -> MemoryBytes:
        """What each device keeps of it."""
        return MemoryBytes.of_keys(self, STATE_KINDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation(Element):
    """All actions of one kind and stage. They run on all devices of the stage together.

    A kind that is none of F, B, I and W is an instruction's: an upper-case word for which whoever runs the plan has a
    function, which gets the ``attributes``.
    """

    kind: Kind
    stage: Index
    duration_ns: PositiveNs
    acquire_bytes: Annotated[Bytes, Meaning("taken on each device at the start")] = 0
    release_bytes: Annotated[Bytes, Meaning("given back on each device at the end")] = 0
    workspace_bytes: Annotated[Bytes, Meaning("held on each device while running")] = 0
    part_ns: Annotated[PositiveNs | None, Meaning("of one part of a micro-batch that runs in two")] = None
    parts_ns: Annotated[
        Items[PositiveNs],
        Meaning(
            "of its parts, which run one right after the other: before each it may wait for messages, and what a part "
            "makes is sent when it ends; none: one part",
            said_only=True,
        ),
    ] = ()
    pace_ns: Annotated[
        PositiveNs | None,
        Meaning(
            "from the start of one of its actions to that of the next at least; null: as soon as it can", said_only=True
        ),
    ] = None
    attributes: Annotated[dict[Name, Attribute], Meaning("of an instruction, for its function", default={})] = field(
        default_factory=dict
    )

    def __hash__(self) -> int:
        return hash((self.id, self.duration_ns, self.acquire_bytes, self.release_bytes, self.workspace_bytes))

    def __post_init__(self) -> None:
        operation_of(self.id)
        if self.attributes and not is_instruction(self.kind):
            raise ValueError(f"attributes are for instructions, not for {self.kind}")
        if self.pace_ns is not None and (self.pace_ns <= self.duration_ns or self.part_ns is not None):
            raise ValueError(
                f"pace_ns is {self.pace_ns} of {self.id}: it is for actions that run whole, and more than one takes, "
                f"{self.duration_ns} ns"
            )

    @property
    def wait_ns(self) -> int:
        """From the end of one of its actions to the start of the next at least, by its pace."""
        return 0 if self.pace_ns is None else self.pace_ns - self.duration_ns

    @property
    def role(self) -> Role:
        """What the operation is for."""
        return role_of(self.kind)

    @property
    def id(self) -> str:
        """Stage and kind: ``2F``. With a micro-batch after it, the text of an action."""
        return f"{self.stage}{self.kind}"

    def begin_ns(self, part: int) -> int:
        """When a part begins, after the action's start."""
        return sum(self.parts_ns[:part])

    def left_ns(self, part: int | None) -> int:
        """How long the action goes on when a part of it has ended; None is the last part."""
        return 0 if part is None else sum(self.parts_ns[part + 1 :])


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop(Element):
    """One message of a dependency, once per micro-batch: a SEND on one device and a RECV on another.

    It carries those samples of the source's micro-batch that the target device works on. Where stages have replicas
    or micro-batches of different sizes, those of only some micro-batches may go this way: of every ``every`` the
    ``run`` from number ``first`` on. A micro-batch that both stages run in parts is two messages of half the bytes
    and occupancy.
    """

    source_device: Index
    target_device: Index
    every: Count = 1
    run: Count = 1
    first: Index = 0
    bytes: Bytes = 0
    latency_ns: Annotated[Nanoseconds, Meaning("time that occupies no link")] = 0
    occupancy_ns: Annotated[Nanoseconds, Meaning("time that occupies the link")] = 0

    @property
    def duration_ns(self) -> int:
        """Time from the producer's end until the consumer may start, on an idle link."""
        return self.latency_ns + self.occupancy_ns

    @property
    def pattern(self) -> dict[str, int]:
        """The fields of :class:`~pipeplan.workload.samples.Slots` that say which micro-batches go this way."""
        return {"every": self.every, "run": self.run, "first": self.first}

    @property
    def part(self) -> Hop:
        """The message of one part."""
        return replace(self, bytes=-(-self.bytes // 2), occupancy_ns=self.part_occupancy_ns)

    @property
    def part_occupancy_ns(self) -> int:
        """How long the message of one part occupies the link."""
        return -(-self.occupancy_ns // 2)

    @property
    def part_ns(self) -> int:
        """Time of the message of one part, as :attr:`duration_ns`."""
        return self.latency_ns + self.part_occupancy_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependency(Element):
    """Actions of ``target`` start after the ``source`` actions that hold their samples, and after the hops.

    Where actions have parts, the messages leave when ``source_part`` ends, and it is ``target_part`` that starts after
    them: an action starts so late that none of its parts has to wait, and one that starts sooner waits inside.

    Which samples an action holds is said in :mod:`pipeplan.workload.samples`; between stages of equal size and route
    micro-batch m depends on micro-batch m. Where an instruction is at one of the ends, ``needs`` may say otherwise.

    With ``later`` the target's action is of a micro-batch so many later: in a decoding loop the token that the last
    stage makes of micro-batch m is what the first one takes in the next step of the same requests. The first ones of
    the target then wait for nothing, and the last ones of the source send nothing.

    With ``slices`` the shards of the target keep equal slices of the sequence, in their order, and a hop carries its
    receiver's, of those tensors that all blocks take so.
    """

    source: OperationId
    target: OperationId
    hops: Items[Hop] = ()
    needs: Annotated[
        tuple[Index, ...] | None,
        Meaning("for each action of the target, how many of the source's first ones it waits for"),
    ] = None
    source_part: Annotated[
        Index | None, Meaning("the part of the source that makes it, from 0 on; null: the last", said_only=True)
    ] = None
    target_part: Annotated[Index, Meaning("the part of the target that waits for it, from 0 on", said_only=True)] = 0
    later: Annotated[
        Index, Meaning("by how many micro-batches that of the target is later than that of the source", said_only=True)
    ] = 0
    slices: Annotated[
        Count,
        Meaning(
            "into how many slices of the sequence the target's devices divide what its messages bring, of which each "
            "is sent its own; 1: all of it",
            said_only=True,
        ),
    ] = 1

    @property
    def has_parts(self) -> bool:
        """Whether it leaves before its source's end, or is needed only after its target's start."""
        return self.source_part is not None or self.target_part > 0

    @property
    def source_stage(self) -> int:
        """Number of the source's stage."""
        return operation_of(self.source)[0]

    @property
    def source_kind(self) -> str:
        """The source's kind."""
        return operation_of(self.source)[1]

    @property
    def source_role(self) -> Role:
        """What the source is for."""
        return role_of(self.source_kind)

    @property
    def target_stage(self) -> int:
        """Number of the target's stage."""
        return operation_of(self.target)[0]

    @property
    def target_kind(self) -> str:
        """The target's kind."""
        return operation_of(self.target)[1]

    @property
    def target_role(self) -> Role:
        """What the target is for."""
        return role_of(self.target_kind)

    @property
    def payload(self) -> str:
        """What its messages carry: the source's outputs (F), gradients (B) or an instruction's results."""
        return payload_of(self.source_kind)

    @property
    def has_instruction(self) -> bool:
        """Whether an instruction is at either end."""
        return is_instruction(self.source_kind) or is_instruction(self.target_kind)

    @property
    def lag_ns(self) -> int:
        """Time between the source's end and the target's start: its slowest hop, 0 without hops."""
        return max((hop.duration_ns for hop in self.hops), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetend(Element):
    """The part of the programs that repeats (Tessel III-C).

    On each device it is a contiguous run of compute actions in which every operation of the device occurs
    ``unroll`` times, on micro-batches ``first[operation]``, ``first[operation] + 1``, ...
    """

    unroll: Annotated[Count, Meaning("micro-batches that finish per repetend")]
    repetend_ns: Annotated[PositiveNs, Meaning("time from one repetition to the next")]
    first: Annotated[dict[OperationId, Index], MinLen(1)]

    @property
    def span(self) -> int:
        """How many micro-batches a repetend reaches over (Tessel's N_R)."""
        return max(self.first.values()) - min(self.first.values()) + self.unroll

    @property
    def period(self) -> Fraction:
        """Ns per micro-batch."""
        return Fraction(self.repetend_ns, self.unroll)

    @property
    def period_ns(self) -> float:
        """The same as a number of a file."""
        return float(self.period)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round(Element):
    """A contiguous run of every device's program, messages included, that runs again and again.

    Every operation and every message of it occurs for as many micro-batches in a row as there are samples in a round.
    """

    round_ns: Annotated[PositiveNs, Meaning("time from one copy of the round to the next")]
    begins: Annotated[Items[Index], Meaning("per device, where the round begins in its program")]
    ends: Annotated[Items[Index], Meaning("per device, where it ends: its first entry after the round")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop(Element):
    """A round in the middle of the programs that runs ``copies`` times, while they have it once.

    Each copy is the one before it with later micro-batches, and ``round_ns`` later. What stands after it is numbered,
    and starts, as if the round ran once. There may be several ``rounds``, one after another, each of other operations
    and their messages, as where all forwards run before all backwards: each runs so often before what stands after it.
    """

    copies: Annotated[Count, Ge(2), Meaning("how often each round runs")]
    microbatches: Annotated[Count, Meaning("micro-batches per round")]
    rounds: Annotated[Items[Round], MinLen(1), Meaning("in the order in which they stand in the programs")]

    @property
    def skipped(self) -> int:
        """Micro-batches that run and are not written."""
        return (self.copies - 1) * self.microbatches

    @property
    def round_ns(self) -> int:
        """Time of one copy of all rounds."""
        return sum(each.round_ns for each in self.rounds)

    @property
    def skipped_ns(self) -> int:
        """By how much later than written everything after the last round is."""
        return (self.copies - 1) * self.round_ns


@dataclass(frozen=True, slots=True, kw_only=True)
@_with_bytes(CACHE_KINDS, "of all requests at the last step that the plan is for", said_only=True)
@_with_bytes([kind for kind in MEMORY_KINDS if kind not in CACHE_KINDS])
class DeviceMemory(Element):
    """Memory of one device at the moment it holds most: what there is of every kind adds up to ``peak_bytes``."""

    peak_bytes: Bytes

    @classmethod
    def of(cls, parts: MemoryBytes) -> DeviceMemory:
        """A device with these bytes at its peak."""
        return cls(**parts.keyed(), peak_bytes=parts.total)

    @property
    def parts(self) -> MemoryBytes:
        """What there is of every kind."""
        return MemoryBytes.of_keys(self)


IN_LINE = "sequential"
"""The placement strategy whose stages run one after the other, whatever their blocks need."""


def is_in_line(placement: str) -> bool:
    """Whether the stages of a placement of this name run in line: each waits for the one numbered before it."""
    return placement.partition(",")[0] == IN_LINE


def again_of(recompute: Recompute, num_blocks: int) -> tuple[Again, ...]:
    """[block] what a stage's backward computes again."""
    return recompute if isinstance(recompute, tuple) else (recompute,) * num_blocks


def recompute_of(again: Sequence[Again]) -> Recompute:
    """The same of a stage, in one word where that does."""
    return again[0] if len(set(again)) == 1 else tuple(again)


def recompute_problem(recompute: Recompute | None, num_blocks: int) -> str | None:
    """What is wrong with what a stage computes again, if anything."""
    if isinstance(recompute, tuple) and len(recompute) != num_blocks:
        return f"says it of {len(recompute)} blocks of {num_blocks}; say it of each, or once for all"
    return None


def mesh_of(configurations: tuple[str, ...], index: int, shards: int) -> Mesh:
    """How a stage's block number ``index`` is split over the devices of a replica. Raises ValueError."""
    return Mesh.parse(configurations[index]) if configurations else Mesh(((SHARDS, shards),))


def slots_of(stage: Stage, kind: str, mini_batch: int, num_routes: int) -> Slots:
    """Which samples each action of an operation of this kind and stage holds."""
    parted = stage.num_parted if stage.num_parted and role_of(kind) is Role.FORWARD else 0
    return _slots_of(stage.microbatch_size, stage.route, num_routes, mini_batch, parted)


@lru_cache(maxsize=1024)
def _slots_of(size: int, route: int, num_routes: int, mini_batch: int, parted: int) -> Slots:
    """The same, made once for all that are alike: there are thousands of operations."""
    return Slots(size, size * num_routes, size * route, mini_batch // (size * num_routes), parted)
