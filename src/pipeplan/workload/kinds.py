"""Kinds of actions, with the role each one plays, and kinds of memory: the one place where a kind is added.

Code asks for roles, and goes over the kinds of memory. Nothing compares with a kind's letter but the classic schedules
and published planners, which are published in letters; makers of workloads and files name the kinds that they make.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import repeat
from operator import add, sub
from typing import Any


class Role(Enum):
    """What an action is for. Compare with ``is``: members are single objects, and loops compare them often."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INPUT_GRAD = "input_grad"
    WEIGHT_GRAD = "weight_grad"
    NETWORK = "network"
    CACHE = "cache"
    STATE = "state"
    CUSTOM = "custom"

    __hash__ = object.__hash__  # that of Enum runs in Python


PASSES = ((Role.FORWARD, Role.BACKWARD), (Role.FORWARD, Role.INPUT_GRAD, Role.WEIGHT_GRAD))
"""What a stage with blocks may run for a micro-batch, in order."""

FORWARDS = (Role.FORWARD,)
"""What it runs in inference."""

BACKWARD_ROLES = (Role.BACKWARD, Role.INPUT_GRAD)
PARTED_ROLES = (Role.FORWARD, *BACKWARD_ROLES)
"""What exchanges messages with other stages, and may do so between parts of an action."""
"""Roles that return gradients to the stages whose outputs were used."""

GRADIENT_ROLES = (Role.BACKWARD, Role.WEIGHT_GRAD)
"""Roles of actions that add to the gradients of their stage's parameters."""

PARAMETER_ROLES = (Role.FORWARD, Role.BACKWARD, Role.INPUT_GRAD)
"""Roles of actions that compute with their stage's parameters."""


class Resource(Enum):
    """What an action occupies while it runs: the compute of its devices, their network beside it, or a link."""

    COMPUTE = "compute"
    NETWORK = "network"
    LINK = "link"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of action: the name it has in texts, its role, what it occupies.

    ``payload`` is the name under which its results are sent to other stages: ``F`` for outputs, ``B`` for gradients of
    inputs, a custom kind's own name; empty where there is nothing to send.
    """

    name: str
    role: Role
    resource: Resource
    payload: str


COMPUTE_KINDS = ("F", "B", "I", "W")
"""Forward, (full) backward, input gradient, weight gradient."""

SEND, RECV = "SEND", "RECV"
"""The two ends of a message. Its text names the payload, too: ``SEND_F``."""

UNSHARD, RESHARD, REDUCE_GRAD = STATE_ACTIONS = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
"""What a stage's sharded state takes, on the network of its devices: its parameters are gathered, the gathered copy is
given up (which takes no time), its gradients are reduced and scattered. They have no micro-batch."""

_PAYLOADS = ("F", "B", "B", "")
_COMPUTE_ROLES = (Role.FORWARD, Role.BACKWARD, Role.INPUT_GRAD, Role.WEIGHT_GRAD)

KINDS: dict[str, Kind] = {
    **{
        name: Kind(name, role, Resource.COMPUTE, payload)
        for name, role, payload in zip(COMPUTE_KINDS, _COMPUTE_ROLES, _PAYLOADS, strict=True)
    },
    **{name: Kind(name, Role.NETWORK, Resource.LINK, "") for name in (SEND, RECV)},
    **{name: Kind(name, Role.STATE, Resource.NETWORK, "") for name in STATE_ACTIONS},
}
"""[name] every kind with a role of its own; all other words are custom kinds."""


def kind_of(name: str) -> Kind:
    """The kind with this name, in which a SEND or RECV may name its payload; a custom kind for every other word."""
    known = KINDS.get(name)
    if known is not None:
        return known
    end, separator, payload = name.partition("_")
    if separator and end in (SEND, RECV):
        return Kind(name, Role.NETWORK, Resource.LINK, payload)
    return Kind(name, Role.CUSTOM, Resource.COMPUTE, name)


def role_of(name: str) -> Role:
    """The role of the kind with this name."""
    known = KINDS.get(name)
    return kind_of(name).role if known is None else known.role


def payload_of(name: str) -> str:
    """What an operation of this kind sends: ``F`` outputs, ``B`` gradients of inputs, else the instruction's own.

    Of ``W``, which has nothing to send, it is empty.
    """
    return kind_of(name).payload


PREFILL = "PREFILL"
"""The instruction that takes in a chunk of a prompt beside a decode step."""


def is_instruction(name: str) -> bool:
    """Whether a kind is a user's instruction: a word that is none of the known kinds."""
    return role_of(name) is Role.CUSTOM


def in_order(names: Iterable[str]) -> list[str]:
    """Each of the kinds once: F, B, I, W, then all others by name."""
    return sorted(set(names), key=lambda name: ((*COMPUTE_KINDS, name).index(name), name))


class Lifetime(Enum):
    """How long memory is held, and where a plan says how much."""

    ALWAYS = "always"
    """Throughout an iteration: *state*. A stage has a key for it."""

    DECODING = "decoding"
    """Throughout the last of a plan's decode steps, which has most. A stage has a key for it, written where said."""

    MICROBATCH = "microbatch"
    """For each micro-batch, from its first action on a stage to its last on the stage's devices. A stage has a key."""

    RETURNED = "returned"
    """From the action that acquires it to the one that releases it."""

    RUNNING = "running"
    """While an action runs."""


@dataclass(frozen=True, slots=True, eq=False)
class MemoryKind:
    """What memory is for: the name that texts and recipes give it, the key that files give its bytes, how it is held.

    Kinds are single objects, as roles are.
    """

    name: str
    key: str
    lifetime: Lifetime

    def __reduce__(self) -> tuple[object, tuple[str]]:
        """Whoever gets it from another process has the one of its own."""
        return _kind_of_key, (self.key,)


def _kind_of_key(key: str) -> MemoryKind:
    return next(kind for kind in MEMORY_KINDS if kind.key == key)


PARAMETERS = MemoryKind("parameters", "parameter_bytes", Lifetime.ALWAYS)
GRADIENTS = MemoryKind("gradients", "gradient_bytes", Lifetime.ALWAYS)
MASTER = MemoryKind("master", "master_bytes", Lifetime.ALWAYS)
OPTIMIZER = MemoryKind("optimizer", "optimizer_bytes", Lifetime.ALWAYS)
ACTIVATIONS = MemoryKind("activations", "activation_bytes", Lifetime.RETURNED)
WORKSPACE = MemoryKind("workspace", "workspace_bytes", Lifetime.RUNNING)
CACHE = MemoryKind("cache", "cache_bytes", Lifetime.DECODING)

MEMORY_KINDS = (PARAMETERS, GRADIENTS, MASTER, OPTIMIZER, ACTIVATIONS, WORKSPACE, CACHE)
"""Every kind of memory, in the order of tables and files; keys of plans follow, in a new version of the format."""

STATE_KINDS = tuple(kind for kind in MEMORY_KINDS if kind.lifetime is Lifetime.ALWAYS)
KEPT_KINDS = tuple(kind for kind in MEMORY_KINDS if kind.lifetime is Lifetime.MICROBATCH)
CACHE_KINDS = tuple(kind for kind in MEMORY_KINDS if kind.lifetime is Lifetime.DECODING)

_PLACES = {kind: place for place, kind in enumerate(MEMORY_KINDS)}
_OTHERS = (0,) * (len(MEMORY_KINDS) - len(STATE_KINDS))


class MemoryBytes(Mapping[MemoryKind, int]):
    """Bytes by kind of memory, immutable; kinds that are left out have none."""

    __slots__ = ("_sizes",)

    def __init__(self, sizes: Mapping[MemoryKind, int] | Iterable[tuple[MemoryKind, int]] = ()) -> None:
        given = dict(sizes)
        self._sizes = tuple([given.pop(kind, 0) for kind in MEMORY_KINDS])
        if given:
            raise KeyError(*given)

    @classmethod
    def of_keys(cls, part: object, kinds: Iterable[MemoryKind] = MEMORY_KINDS) -> MemoryBytes:
        """What a part of a file says of some kinds under their keys."""
        sizes = [0] * len(MEMORY_KINDS)
        for kind in kinds:
            sizes[_PLACES[kind]] = getattr(part, kind.key)
        return cls._of(sizes)

    @classmethod
    def of_state(cls, sizes: Iterable[int]) -> MemoryBytes:
        """Bytes of ``STATE_KINDS``, in their order, which are the first of all."""
        return cls._of((*sizes, *_OTHERS))

    def keyed(self, kinds: Iterable[MemoryKind] = MEMORY_KINDS) -> dict[str, int]:
        """The bytes of some kinds under the keys that files have for them."""
        return {kind.key: self[kind] for kind in kinds}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> dict[str, Any]:
        """In JSON it is bytes by key, as in files."""
        read = {"type": "no-info", "function": cls._of_json}
        written = {"type": "function-plain", "function": cls.keyed}
        return {"type": "function-plain", "function": read, "serialization": written}

    @classmethod
    def _of_json(cls, value: object) -> MemoryBytes:
        if not isinstance(value, dict) or not value.keys() <= {kind.key for kind in MEMORY_KINDS}:
            raise ValueError("not bytes by kind of memory")
        return cls((kind, int(value.get(kind.key, 0))) for kind in MEMORY_KINDS)

    @property
    def total(self) -> int:
        """The sum over all kinds."""
        return sum(self._sizes)

    def share(self, parts: int | Mapping[MemoryKind, int]) -> MemoryBytes:
        """The largest of as equal parts as can be, kind by kind; of kinds that have no number of parts, the whole."""
        return self._of(-(-size // count) for size, count in zip(self._sizes, _counts(parts), strict=False))

    def __getitem__(self, kind: MemoryKind) -> int:
        return self._sizes[_PLACES[kind]]

    def __iter__(self) -> Iterator[MemoryKind]:
        return iter(MEMORY_KINDS)

    def __len__(self) -> int:
        return len(MEMORY_KINDS)

    def __add__(self, other: MemoryBytes) -> MemoryBytes:
        return self._of(map(add, self._sizes, other._sizes))

    def __sub__(self, other: MemoryBytes) -> MemoryBytes:
        return self._of(map(sub, self._sizes, other._sizes))

    def __floordiv__(self, parts: int | Mapping[MemoryKind, int]) -> MemoryBytes:
        """The smallest of as equal parts as can be, as in :meth:`share`."""
        return self._of(size // count for size, count in zip(self._sizes, _counts(parts), strict=False))

    def __mul__(self, times: int) -> MemoryBytes:
        return self._of(times * size for size in self._sizes)

    def __hash__(self) -> int:
        return hash(self._sizes)

    def __eq__(self, other: object) -> bool:
        return self._sizes == other._sizes if isinstance(other, MemoryBytes) else super().__eq__(other)

    def __repr__(self) -> str:
        return f"MemoryBytes({', '.join(f'{kind.name}={size}' for kind, size in self.items() if size)})"

    @classmethod
    def _of(cls, sizes: Iterable[int]) -> MemoryBytes:
        found = cls.__new__(cls)
        found._sizes = tuple(sizes)
        return found


def _counts(parts: int | Mapping[MemoryKind, int]) -> Iterable[int]:
    """[kind] into how many parts it is cut."""
    return repeat(parts) if isinstance(parts, int) else (parts.get(kind, 1) for kind in MEMORY_KINDS)
