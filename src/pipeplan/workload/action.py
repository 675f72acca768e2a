"""Actions and their one text form, used in plans, traces, errors and tables.

An action is written as ``torch.distributed.pipelining`` writes it: stage, kind, micro-batch. ``2F0`` is the
forward of stage 2 on micro-batch 0, ``7I3`` an input gradient, ``1SEND_F0`` stage 1 sending what its forward
of micro-batch 0 made, ``2RECV_F0`` stage 2 receiving that micro-batch's forward input.

Stages form a graph and may stand on several devices, so a transfer may need to say with whom:
``1SEND_F0>3`` (to stage 3), ``1SEND_F0>3@2`` (to stage 3's copy on device 2). Both suffixes are left out where
only one answer is possible.

Where a forward runs a micro-batch in two parts, the part follows the micro-batch: ``0F0.0``, ``0F0.1``.

Kinds other than ``F``, ``B``, ``I`` and ``W`` are *instructions*, each an upper-case word: ``5ALLGATHER0``. What they
make for others travels under their own name: ``5SEND_ALLGATHER0``.

What a stage's sharded state takes has no micro-batch, as in torch: ``3UNSHARD``, ``3RESHARD``, ``3REDUCE_GRAD``. Where
the stage's blocks are exchanged in several groups, the group follows: ``3UNSHARD.1``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from pipeplan.workload.kinds import RECV, RESHARD, SEND, STATE_ACTIONS, UNSHARD, Role, role_of

KIND_PATTERN = "([FBIW]|[A-Z]{3,24})"
"""A compute kind, or an instruction's word; ``SEND`` and ``RECV`` are taken."""

_RESERVED = (SEND, RECV, UNSHARD, RESHARD)

NUMBER_PATTERN = "(0|[1-9][0-9]{0,6})"
"""A stage, micro-batch or device: one spelling for each number, so that equal actions are equal texts."""

ACTION_PATTERN = (
    f"^{NUMBER_PATTERN}({KIND_PATTERN}{NUMBER_PATTERN}([.][01])?|(SEND|RECV)_([FB]|[A-Z]{{3,24}}){NUMBER_PATTERN}([.][01])?"
    f"(>{NUMBER_PATTERN})?(@{NUMBER_PATTERN})?|({'|'.join(STATE_ACTIONS)})([.]{NUMBER_PATTERN})?)$"
)

_PARSE = re.compile(
    f"{NUMBER_PATTERN}((?:[FBIW]|[A-Z]{{3,24}})|(?:SEND|RECV)_(?:[FB]|[A-Z]{{3,24}})){NUMBER_PATTERN}(?:[.]([01]))?"
    f"(?:>{NUMBER_PATTERN})?(?:@{NUMBER_PATTERN})?"
)
_OPERATION = re.compile(f"{NUMBER_PATTERN}{KIND_PATTERN}")


_STATE = re.compile(f"{NUMBER_PATTERN}({'|'.join(STATE_ACTIONS)})(?:[.]{NUMBER_PATTERN})?")


@dataclass(frozen=True, slots=True)
class StateAction:
    """One entry of a device's program that gathers, gives up or reduces the state of a stage, or of a group of blocks.

    ``group`` numbers the stage's groups of blocks; None where the stage has but one.
    """

    stage: int
    kind: str
    group: int | None = None

    @classmethod
    def read(cls, text: str) -> StateAction | None:
        """What a text means; None where it is another action's."""
        if text[-1] != "D" and "D." not in text:  # what all three end with; programs are long
            return None
        match = _STATE.fullmatch(text)
        return None if match is None else cls(int(match[1]), match[2], None if match[3] is None else int(match[3]))

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.group is None else f'.{self.group}'}"


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One entry of a device's program.

    ``peer_stage`` and ``peer_device`` are only for transfers: the stage and the device on the other end.
    For a ``RECV`` the stage is the receiver and the micro-batch is the sender's, as in the matching ``SEND``.
    ``part`` is 0 or 1 where the forward runs this micro-batch in two parts.
    """

    stage: int
    kind: str
    microbatch: int
    peer_stage: int | None = None
    peer_device: int | None = None
    part: int | None = None

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action a text means.

        Raises:
            ValueError: the text is not an action.
        """
        match = _PARSE.fullmatch(text)
        if match is None or match[2] in _RESERVED:
            raise ValueError(f"{text!r} is not an action; write stage, kind, micro-batch, as 2F0 or 1SEND_F0")
        stage, kind, microbatch, part, peer_stage, peer_device = match.groups()
        if "_" not in kind and (peer_stage or peer_device):
            raise ValueError(f"{text!r} is not an action: only SEND and RECV have a peer")
        return cls(
            int(stage),
            kind,
            int(microbatch),
            None if peer_stage is None else int(peer_stage),
            None if peer_device is None else int(peer_device),
            None if part is None else int(part),
        )

    def __str__(self) -> str:
        part = "" if self.part is None else f".{self.part}"
        peer_stage = "" if self.peer_stage is None else f">{self.peer_stage}"
        peer_device = "" if self.peer_device is None else f"@{self.peer_device}"
        return f"{self.stage}{self.kind}{self.microbatch}{part}{peer_stage}{peer_device}"

    @property
    def role(self) -> Role:
        """What the action is for."""
        return role_of(self.kind)

    @property
    def is_compute(self) -> bool:
        """Whether the action is an operation's: computing or an instruction; otherwise it sends or receives."""
        return "_" not in self.kind

    @property
    def sends(self) -> bool:
        """Whether the action is a SEND."""
        return self.kind.startswith("SEND_")

    @property
    def operation(self) -> str:
        """Stage and kind without the micro-batch, the id of the operation in a plan: ``2F``."""
        return f"{self.stage}{self.kind}"

    @property
    def payload(self) -> str:
        """For a transfer: ``F`` for outputs, ``B`` for gradients, or the kind of the instruction that made it."""
        return self.kind.rpartition("_")[2]


def is_instruction_word(text: str) -> bool:
    """Whether a text can be the kind of an instruction."""
    return re.fullmatch("[A-Z]{3,24}", text) is not None and text not in _RESERVED


@lru_cache(maxsize=1 << 16)
def operation_of(id_: str) -> tuple[int, str]:
    """Stage and kind of an operation's id: ``(2, "F")`` of ``2F``.

    Raises:
        ValueError: the text is not an operation's id.
    """
    match = _OPERATION.fullmatch(id_)
    if match is None or match[2] in _RESERVED:
        raise ValueError(f"{id_!r} is not an operation; write stage and kind, as 2F or 5ALLGATHER")
    return int(match[1]), match[2]
