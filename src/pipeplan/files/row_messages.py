"""What the devices of a group send each other in a cost row, so that it can be priced on other links than it was."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pipeplan.files.base import FileModel, said_only
from pipeplan.workload.elements import Bytes, Count, Items, Nanoseconds

Combining = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]


class ShardMessages(FileModel):
    """What those that split a block send each other: arrays by phase, gathered ones whole.

    They took ``forward_ns``, ``input_grad_ns`` and ``weight_grad_ns``, of which the row has what its products did not
    hide: in F and in I these overlap with the messages where that is so, and gathers for W are beside those of I.
    """

    sent: Annotated[
        Items[tuple[Literal["F", "I", "W"], Combining, Bytes]],
        said_only((), "triples of phase, collective and bytes of the array that it is about"),
    ] = ()
    forward_ns: Annotated[Nanoseconds, said_only(0, "what those of F took when the row was made")] = 0
    input_grad_ns: Annotated[Nanoseconds, said_only(0, "those of I")] = 0
    weight_grad_ns: Annotated[Nanoseconds, said_only(0, "those of W")] = 0
    products_forward_ns: Annotated[
        Nanoseconds | None, said_only(None, "products with weights in F; null: nothing is known to run beside messages")
    ] = None
    products_input_grad_ns: Annotated[Nanoseconds | None, said_only(None, "and in I")] = None
    overlapped: Annotated[bool, said_only(False, "whether messages of F and I overlap with these")] = False


class SequenceMessages(FileModel):
    """What those that share sequences exchange for attention, and what runs beside that around a ring."""

    bytes: Annotated[Bytes, Field(description="keys and values of whole sequences")]
    gather_ns: Annotated[Nanoseconds, Field(description="what one gather of these took when the row was made")]
    hops_ns: Annotated[Nanoseconds, Field(description="what all hops of them around a ring took then")]
    core_ns: Annotated[Nanoseconds, Field(description="the attention core in F, over whole sequences")]
    core_grad_ns: Annotated[Nanoseconds, Field(description="and its gradients in I")]
    merge_ns: Annotated[Nanoseconds, Field(description="adding what a piece gave to the mixture")]
    merge_grad_ns: Annotated[Nanoseconds, Field(description="adding a piece's gradients to those before")]


class ExpertMessages(FileModel):
    """What those that share experts send each other, each way; and those that split what all tokens take."""

    bytes: Annotated[Bytes, Field(description="a device's tokens, each once")]
    experts_per_token: Annotated[Count, Field(description="experts that each of these goes to")]
    words_ns: Annotated[Nanoseconds, Field(description="what it took them to go there and back when the row was made")]
    counts_ns: Annotated[Nanoseconds, said_only(0, "what it took to tell how many will come, in F alone")] = 0
    routing_bytes: Annotated[Bytes, said_only(0, "which of a device's experts take its tokens, and by how much")] = 0
    gathered_bytes: Annotated[Bytes, said_only(0, "what devices that split the same experts gather of tokens")] = 0
    gathered_ns: Annotated[Nanoseconds, said_only(0, "and what that, and scattering sums, took")] = 0
    shared_bytes: Annotated[Bytes, said_only(0, "tokens that those that split shared experts gather")] = 0
    shared_ns: Annotated[Nanoseconds, said_only(0, "and what that, and scattering sums, took")] = 0


class RowMessages(FileModel):
    """What is sent inside a group, for each axis along which it splits the row; none: nothing is sent along it."""

    shards: Annotated[ShardMessages | None, said_only(None, "among those that split the block")] = None
    context: Annotated[SequenceMessages | None, said_only(None, "among those that share sequences")] = None
    expert: Annotated[ExpertMessages | None, said_only(None, "among those that share experts")] = None


class MessageTable:
    """Makes a profile's list of messages, in which each is once."""

    def __init__(self) -> None:
        self._places = dict[RowMessages, int]()

    def place_of(self, messages: RowMessages) -> int:
        """Where in the list it is, at its end where it is new."""
        return self._places.setdefault(messages, len(self._places))

    @property
    def messages(self) -> tuple[RowMessages, ...]:
        """All, in their places."""
        return tuple(self._places)
