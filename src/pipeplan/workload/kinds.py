"""Kinds of actions and the role each one plays: the one place where a kind is added.

Code asks for roles. Only the text form of actions, file readers and the classic schedules, which are published in
letters, name kinds by their letters.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

__all__ = [
    "BACKWARD_ROLES",
    "COMPUTE_KINDS",
    "KINDS",
    "RECV",
    "SEND",
    "Kind",
    "Resource",
    "Role",
    "in_order",
    "is_instruction",
    "kind_of",
    "payload_of",
    "role_of",
]


class Role(Enum):
    """What an action is for. Compare with ``is``: members are single objects, and loops compare them often."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INPUT_GRAD = "input_grad"
    WEIGHT_GRAD = "weight_grad"
    NETWORK = "network"
    CACHE = "cache"
    CUSTOM = "custom"

    __hash__ = object.__hash__  # that of Enum runs in Python


BACKWARD_ROLES = (Role.BACKWARD, Role.INPUT_GRAD)
"""Roles that return gradients to the stages whose outputs were used."""


class Resource(Enum):
    """What an action occupies while it runs: the compute of its devices, or a link."""

    COMPUTE = "compute"
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

_PAYLOADS = ("F", "B", "B", "")
_COMPUTE_ROLES = (Role.FORWARD, Role.BACKWARD, Role.INPUT_GRAD, Role.WEIGHT_GRAD)

KINDS: dict[str, Kind] = {
    **{
        name: Kind(name, role, Resource.COMPUTE, payload)
        for name, role, payload in zip(COMPUTE_KINDS, _COMPUTE_ROLES, _PAYLOADS, strict=True)
    },
    **{name: Kind(name, Role.NETWORK, Resource.LINK, "") for name in (SEND, RECV)},
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


def is_instruction(name: str) -> bool:
    """Whether a kind is a user's instruction: a word that is none of the known kinds."""
    return role_of(name) is Role.CUSTOM


def in_order(names: Iterable[str]) -> list[str]:
    """Each of the kinds once: F, B, I, W, then all others by name."""
    return sorted(set(names), key=lambda name: ((*COMPUTE_KINDS, name).index(name), name))
