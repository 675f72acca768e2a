"""What a uniform layout is said in: the model, how it is divided, the machine.

Every field is a number (or a word), or an array of them over layouts: the closed forms are written for both, so that a
table of thousands of layouts takes as long as a few.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias, TypeVar

import numpy as np

Number: TypeAlias = Any
"""A number, or a numpy array of them with one for each layout."""

Word: TypeAlias = Any
"""A text, or a numpy array of them with one for each layout."""


@dataclass(frozen=True, slots=True)
class Transformer:
    """A decoder of alike layers. Sizes are in numbers, not bytes; what the model does not have is 0.

    ``ffn`` is the feed-forward width of a dense layer, ``moe_ffn`` that of each of ``experts``, ``top_k`` of which a
    token goes to, ``shared_ffn`` that of the part every token goes to beside them. Latent attention has ranks
    ``query_rank`` (0: queries are not compressed) and ``latent_rank``, and heads of ``head_size`` without and
    ``rotary_size`` with position, whose values are ``value_size`` wide. ``vocabulary`` is 0 for layers alone.
    """

    layers: Number
    hidden: Number
    heads: Number
    kv_heads: Number
    head_size: Number
    ffn: Number
    gated: Number
    vocabulary: Number
    tied: Number
    sequence: Number
    experts: Number = 0
    top_k: Number = 0
    moe_ffn: Number = 0
    shared_ffn: Number = 0
    query_rank: Number = 0
    latent_rank: Number = 0
    rotary_size: Number = 0
    value_size: Number = 0


@dataclass(frozen=True, slots=True)
class UniformLayout:
    """How a model is trained on tp x pp x cp x dp devices.

    Keys and values go around a ring of the ``context`` devices where ``ring`` is 1, else they are gathered. ``expert``
    devices share the experts, each of which is split over ``expert_tensor``. ``microbatch`` and
    ``global_batch`` are in samples. ``zero`` is the level of sharding over ``zero_group`` devices. Of a layer's forward
    the shares ``again_*`` are computed once more in backward: of the attention ``core``, of latent attention's products
    ``up``, of all other ``products`` with their messages, of what is ``elementwise``. ``overlap_tensor`` and
    ``overlap_data`` say whether messages hide behind compute, ``gradient_bytes`` what a gradient takes on the way.
    ``schedule`` is ``1f1b``, ``zb-1p``, ``zb-2p`` or ``zb-v``; with ``chunks`` above 1, 1F1B is interleaved.
    ``recipe`` and ``optimizer`` are the catalog's of training state.
    """

    tensor: Number
    pipeline: Number
    chunks: Number
    context: Number
    data: Number
    microbatch: Number
    global_batch: Number
    ring: Number = 0
    expert: Number = 1
    expert_tensor: Number = 1
    fused_dispatch: Number = 0
    zero: Number = 0
    zero_group: Number = 1
    sequence_parallel: Number = 1
    again_core: Number = 0.0
    again_up: Number = 0.0
    again_products: Number = 0.0
    again_elementwise: Number = 0.0
    overlap_tensor: Number = 0
    overlap_data: Number = 1
    gradient_bytes: Number = 4
    schedule: Word = "1f1b"
    recipe: Word = "bf16-mixed"
    optimizer: Word = "adamw"
    attention: Word = "flash-2"

    @property
    def microbatches(self) -> Number:
        """Micro-batches of each replica in an iteration."""
        return self.global_batch / (self.data * self.microbatch)


@dataclass(frozen=True, slots=True)
class Machine:
    """Devices and links: rates per second, each way, and the shares of them that are reached.

    A device has a link of ``link_bytes_per_s`` to each of the ``node`` devices nearest to it, and an adapter of
    ``adapter_bytes_per_s`` to all others. ``matrix_share`` is reached of the matrix units' peak, ``bandwidth_share`` of
    the bandwidth of memory and links; ``attention_forward`` and ``attention_backward`` by fused attention, of the peak.
    """

    matrix_flops_per_s: Number
    fp8_flops_per_s: Number
    multiprocessors: Number
    bandwidth_bytes_per_s: Number
    memory_bytes: Number
    node: Number
    link_bytes_per_s: Number
    adapter_bytes_per_s: Number
    matrix_share: Number
    bandwidth_share: Number
    attention_forward: Number
    attention_backward: Number


Said = TypeVar("Said", Transformer, UniformLayout, Machine)


def stacked(said: Sequence[Said]) -> Said:
    """Several as one, with an array over them in each field; numbers as floats, which do not overflow."""

    def column(name: str) -> Any:
        values = np.array([getattr(one, name) for one in said])
        return values if values.dtype.kind == "U" else values.astype(np.float64)

    return type(said[0])(**{each.name: column(each.name) for each in fields(said[0])})
