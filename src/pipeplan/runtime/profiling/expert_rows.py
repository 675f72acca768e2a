"""Rows of blocks whose experts are shared by devices, each with whole ones of its own (expert tensor size 1).

A device routes the words that it has, one of ``shards`` x ``context`` parts of each sequence, sends each to the devices
of its experts, multiplies what comes to it by its own, and sends the results back. As many words come as go, where
experts are chosen evenly, so that the work is that of its own words with all experts, whose products have fewer weights
and more rows each. With a load factor, the fullest device, which all others wait for, has that many times as many.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from pipeplan.costs.communication import Combining, Exchange, LinkPath, Prices, dispatch_ns
from pipeplan.costs.devices import Kernel, Work
from pipeplan.errors import UsageError
from pipeplan.files import CostRow
from pipeplan.runtime.models.spec import BlockSpec, Model
from pipeplan.runtime.profiling.build_profile import BlockNode, ModelShare, part_of

EXPERTS, TAKEN = "experts", "experts_per_token"
"""Dimensions of a block: how many it has, and how many each word goes to."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Experts over ``size`` devices, the fullest of which has ``load`` times the even share of words."""

    size: int
    load: float = 1.0


def has_experts(block: BlockNode) -> bool:
    """Whether a block has experts that words are sent to."""
    return block.experts > 0 and TAKEN in block.spec.dimensions


def require_sizes(model: Model, blocks: Sequence[BlockNode], sizes: Collection[int], load: float) -> None:
    """Check that experts can be divided evenly over this many devices. Raises UsageError."""
    if not sizes:
        return
    if min(sizes) < 1:
        raise UsageError(f"--expert {min(sizes)}: give numbers of 1 or more")
    if not 1 <= load < float("inf"):
        raise UsageError(f"--load-factor {load}: the fullest device has at least the even share, so give 1 or more")
    sparse = [block.spec for block in blocks if has_experts(block)]
    if not sparse and max(sizes) > 1:
        raise UsageError(f"--expert {max(sizes)}: {model.name} has no experts; leave --expert out")
    for spec in sparse:
        for size in sizes:
            if spec.dimensions[EXPERTS] % size:
                raise UsageError(
                    f"--expert {size}: block {spec.id!r} has {spec.dimensions[EXPERTS]} experts, which {size} devices "
                    f"cannot share evenly; give divisors of {spec.dimensions[EXPERTS]}"
                )


def alone_with_words(
    model: Model, splits: Sequence[ModelShare], sizes: Collection[int], dtype: torch.dtype
) -> Iterator[ModelShare]:
    """The model with whole blocks for as many words as a device has of its shards and context, where not among splits.

    Raises UsageError where devices that split blocks cannot divide the sequence.
    """
    known = {split.context for split in splits if split.shards == 1}
    for parts in sorted({split.shards * split.context for split in splits} if max(sizes, default=1) > 1 else ()):
        if parts not in known:
            yield part_of(model, parts, dtype)


def spread_row(row: CostRow, split: ModelShare, spread: Spread, exchange_ns: float, shared_ns: float) -> CostRow:
    """What a device of a group has of a block, by the ``row`` of its own words with its own experts' times.

    Words are exchanged twice in F, and their gradients twice in I. ``shared_ns`` is what devices that split what all
    words take wait for each other, in F and in I, which is one time more in W.
    """
    ahead = round(2 * exchange_ns + shared_ns)
    again = ahead * row.recompute
    more = {
        "forward_ns": ahead,
        "backward_ns": ahead + again + round(shared_ns / 2),
        "input_grad_ns": ahead + again,
        "weight_grad_ns": round(shared_ns / 2),
    }
    held = {
        name: -int(-getattr(row, name) * spread.load // 1)
        for name in ("activation_bytes", "workspace_bytes", "selective_activation_bytes")
        if getattr(row, name) is not None
    }
    return row.model_copy(
        update={
            **{name: (getattr(row, name) or 0) + time for name, time in more.items()},
            **held,
            "shards": split.shards,
            "context": split.context,
            "expert": spread.size,
            "sequence_parallel": split.shards > 1,
        }
    )


def with_own_experts(work: Work, spread: Spread, label: str) -> Work:
    """The work of a device that has one of ``size`` parts of the experts, and the words of all devices for them.

    Raises UsageError where the experts' products are not one kernel.
    """
    if not any(kernel.expert_bytes for kernels in work.values() for kernel in kernels):
        raise UsageError(
            f"{label}: its experts are not products of groups of rows, whose weights devices could share; leave "
            "--expert out"
        )

    def own(kernel: Kernel) -> Kernel:
        if not kernel.expert_bytes:
            return kernel
        words = kernel.moved_bytes - kernel.expert_bytes
        product = kernel.product
        if product is not None:
            rows, inner, columns, groups = product
            product = max(1, round(rows * spread.size * spread.load)), inner, columns, max(1, groups // spread.size)
        return replace(
            kernel,
            flops=round(kernel.flops * spread.load),
            moved_bytes=round(words * spread.load) + kernel.expert_bytes // spread.size,
            product=product,
        )

    return {phase: [own(kernel) for kernel in kernels] for phase, kernels in work.items()}


def words_ns(spec: BlockSpec, samples: int, width: int, spread: Spread, links: LinkPath) -> float:
    """Ns of one exchange of a device's words, whose own part of ``samples`` sequences the block is for."""
    words = samples * spec.dimensions["sequence"]
    sent = words * spec.dimensions["hidden"] * width * spread.load
    return dispatch_ns(sent, spec.dimensions[TAKEN], spread.size, links)


def shared_ns(spec: BlockSpec, samples: int, split: ModelShare, width: int, prices: Prices) -> float:
    """Time in ns to gather tokens and scatter sums, as in ``spec``, among devices that split the shared experts."""
    if split.shards == 1 or "shared_ffn" not in spec.dimensions:
        return 0.0
    size = samples * split.shards * spec.dimensions["sequence"] * spec.dimensions["hidden"] * width
    return sum(prices(Exchange(how, size), split.shards) for how in _AROUND)


_AROUND: tuple[Combining, ...] = ("all_gather", "reduce_scatter")
