"""Rows of blocks whose experts are shared by devices, each with whole ones of its own, or a part of some.

A device routes the words that it has, one of ``shards`` x ``context`` parts of each sequence, sends each to the devices
of its experts, multiplies what comes to it by its own, and sends the results back. As many words come as go, where
experts are chosen evenly, so that the work is that of its own words with all experts, whose products have fewer weights
and more rows each. With a load factor, the fullest device, which all others wait for, has that many times as many.

With an expert tensor size each expert is split over so many neighbours. They gather the words of all of them, multiply
these by their parts, and scatter the sums: a device has so many times as many words, and as much less of each product.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch

from pipeplan.costs.blocks import require_row
from pipeplan.costs.communication import Exchange, LinkPath, Prices, counts_ns, dispatch_ns, places_taken, prices_in
from pipeplan.costs.devices import Kernel, Work
from pipeplan.costs.wide_groups import AROUND, among_parts, waited_for_experts
from pipeplan.errors import UsageError
from pipeplan.files import Cluster, CostRow
from pipeplan.files.row_messages import ExpertMessages
from pipeplan.runtime.models.spec import BlockSpec, Model
from pipeplan.runtime.parallel.experts import DIGIT
from pipeplan.runtime.profiling.build_profile import (
    AnyShare,
    BlockGraph,
    BlockNode,
    Kind,
    ModelShare,
    kinds_of,
    part_of,
)

EXPERTS, TAKEN, WIDTH = "experts", "experts_per_token", "ffn"
"""Dimensions of a block: how many it has, how many each word goes to, and the width of one."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Experts over ``size`` devices, the fullest of which has ``load`` times the even share of words.

    Each ``split`` neighbours of them have parts of the same experts.
    """

    size: int
    load: float = 1.0
    split: int = 1

    @property
    def places(self) -> int:
        """How many have other experts."""
        return self.size // self.split


def has_experts(block: BlockNode) -> bool:
    """Whether a block has experts that words are sent to."""
    return block.experts > 0 and TAKEN in block.spec.dimensions


def spreads_of(
    model: Model, blocks: Sequence[BlockNode], sizes: Collection[int], load: float, splits: Collection[int] = (1,)
) -> list[Spread]:
    """Experts over each of these numbers of devices, ``splits`` of which split each expert, as far as that goes evenly.

    Raises UsageError where a size, or a split, goes with none of the others.
    """
    shared = sorted({*sizes} - {1})
    if min(splits) < 1 or (max(splits) > 1 and not shared):
        raise UsageError(
            f"--etp {_listed(splits)}: give numbers of 1 or more, and --expert, which is how many devices there are"
        )
    if not shared and load != 1:
        raise UsageError(f"--load-factor {load:g} is of devices that share experts; give --expert, or leave it out")
    if not shared:
        return []
    if min(shared) < 1:
        raise UsageError(f"--expert {min(shared)}: give numbers of 1 or more")
    if not 0 < load < float("inf"):
        raise UsageError(f"--load-factor {load}: give a number above 0, of 1 or more where experts drop nothing")
    sparse = [block.spec for block in blocks if has_experts(block)]
    if not sparse:
        raise UsageError(f"--expert {max(shared)}: {model.name} has no experts; leave --expert out")
    for spec, split in product(sparse, splits):
        if spec.dimensions[WIDTH] % split:
            raise UsageError(
                f"--etp {split}: experts of block {spec.id!r} have a width of {spec.dimensions[WIDTH]}, which {split} "
                "devices cannot split evenly"
            )
    problems = {pair: _uneven(sparse, *pair) for pair in product(shared, sorted({*splits}))}
    for size in shared:
        if all(own := [problems[size, split] for split in sorted({*splits})]):
            raise UsageError(f"--expert {size}: {own[0]}")
    for split in splits:
        if all(own := [problems[size, split] for size in shared]):
            raise UsageError(f"--etp {split} goes with no size of --expert {_listed(shared)}: {own[-1]}")
    return [Spread(size, load, split) for (size, split), problem in problems.items() if not problem]


def _uneven(sparse: Sequence[BlockSpec], size: int, split: int) -> str:
    """Why devices cannot share experts evenly, or nothing."""
    if size % split:
        return f"--etp {split} does not divide it; give multiples of {split}"
    for spec in sparse:
        if spec.dimensions[EXPERTS] % (size // split):
            each = f", each {split} of which split the same," if split > 1 else ""
            return (
                f"block {spec.id!r} has {spec.dimensions[EXPERTS]} experts, which {size} devices{each} cannot share "
                f"evenly; give divisors of {split * spec.dimensions[EXPERTS]}"
            )
    return ""


def _listed(counts: Collection[int]) -> str:
    return ",".join(map(str, sorted({*counts})))


def parts_of_words(pairs: Sequence[tuple[int, int]], spreads: Sequence[Spread]) -> list[int]:
    """Parts of sequences that devices of these pairs of parts and shards have of their words, beside whole blocks' own.

    For whole blocks with as many words as a device has, where experts are shared.
    """
    known = {part for part, count in pairs if count == 1}
    return sorted({part * count for part, count in pairs} - known) if spreads else []


def with_own_share(
    model: Model, splits: Sequence[ModelShare], spreads: Sequence[Spread], dtype: torch.dtype
) -> Iterator[ModelShare]:
    """The model with one device's experts, for as many words as it has of its shards, to be measured.

    Raises UsageError where its experts are not known apart, or in blocks with more than them.
    """
    for parts in sorted({split.shards * split.context for split in splits}):
        for spread in spreads:
            share = part_of(model, parts, dtype, spread.size, spread.load)
            sizes = f"--expert {spread.size}" + f" with --shards {parts}" * (parts > 1)
            if [each.spec.id for each in share.graph.blocks] != [each.spec.id for each in splits[0].graph.blocks]:
                raise UsageError(f"{sizes}: blocks are parts of experts; leave --granularity operator out")
            if parts > 1 and any(has_experts(each) and "heads" in each.spec.dimensions for each in share.graph.blocks):
                raise UsageError(f"{sizes}: blocks have attention beside experts; leave --granularity layer out")
            yield share


def measured_expert_rows(
    shares: Sequence[ModelShare],
    splits: Sequence[ModelShare],
    unsplit: BlockGraph,
    spreads: Sequence[Spread],
    rows: Mapping[Kind, Sequence[CostRow]],
    cluster: Cluster | None,
    dtype: torch.dtype,
) -> dict[str, list[CostRow]]:
    """{block: its rows where devices share experts}, by measured ``rows`` of one device's share of these, alone.

    These were measured with as many words as the fullest has, of which they hold what they do.

    What devices send each other, by the sizes of ``unsplit`` blocks, takes the links of the ``cluster``; without one no
    time.
    """
    found: dict[str, list[CostRow]] = defaultdict(list)
    kinds = kinds_of([*splits, *shares])
    own_share = {(share.context, share.expert): share for share in shares}
    prices = None if cluster is None else prices_in(cluster)
    for split, spread in product(splits, spreads):
        parts = split.shards * split.context
        share = own_share[parts, spread.size]
        for block, words in zip(unsplit.blocks, share.graph.blocks, strict=True):
            spec = block.spec
            if "sequence" in spec.dimensions:
                spec = replace(spec, dimensions={**spec.dimensions, "sequence": spec.dimensions["sequence"] // parts})
            for row in rows[kinds[words.likeness]] if has_experts(words) else ():
                said = ExpertMessages(bytes=0, experts_per_token=1, words_ns=0)
                if cluster is not None and prices is not None:
                    own = spec, row.microbatch_size, dtype.itemsize, spread, split
                    said = said_of_experts(*own, LinkPath.in_cluster(cluster, spread.size), prices)
                made = spread_row(row, split, replace(spread, load=1.0), said)
                require_row(f"block {spec.id!r}", dict(made))
                found[spec.id].append(made)
    return found


def spread_row(row: CostRow, split: AnyShare, spread: Spread, said: ExpertMessages, gathered_bytes: int = 0) -> CostRow:
    """What a device of a group has of a block, by the ``row`` of its own words with its own experts' times.

    Words are exchanged, as ``said``, in F, and their gradients in I. What devices that split what all words take wait
    for each other, in F and in I, is one time more in W. ``gathered_bytes`` are the words of others that split the same
    experts: what goes into these, and what parts of them make.
    """
    waited = waited_for_experts(said)
    again = waited.forward * row.recompute
    more = {
        "forward_ns": waited.forward,
        "backward_ns": waited.input_grad + again + waited.weight_grad,
        "input_grad_ns": waited.input_grad + again,
        "weight_grad_ns": waited.weight_grad,
    }
    held = {
        name: -int(-getattr(row, name) * spread.load // 1)
        for name in ("activation_bytes", "workspace_bytes", "selective_activation_bytes")
        if getattr(row, name) is not None
    }
    for name in held:
        held[name] += 0 if row.recompute and name == "activation_bytes" else gathered_bytes
    return row.model_copy(
        update={
            **{name: (getattr(row, name) or 0) + time for name, time in more.items()},
            **held,
            "shards": split.shards,
            "context": split.context,
            "expert": spread.size,
            "expert_shards": spread.split,
            "sequence_parallel": split.shards > 1,
        }
    )


def with_own_experts(work: Work, spread: Spread, spec: BlockSpec, label: str) -> Work:
    """The work of a device that has one of ``size`` parts of a block's experts, and the words of all devices for them.

    Products of one expert are no products of groups.

    Raises UsageError where the experts' products are not one kernel.
    """
    if not any(kernel.expert_bytes for kernels in work.values() for kernel in kernels):
        raise UsageError(
            f"{label}: its experts are not products of groups of rows, whose weights devices could share; leave "
            "--expert out"
        )

    hidden = spec.dimensions["hidden"]

    def own(kernel: Kernel) -> Kernel:
        if not kernel.expert_bytes:
            return kernel
        words, product, width = kernel.moved_bytes - kernel.expert_bytes, kernel.product, spec.dimensions[WIDTH]
        if product is not None:
            rows, inner, columns, groups = product
            width = inner + columns - hidden
            inner, columns = (inner, columns // spread.split) if inner == hidden else (inner // spread.split, columns)
            rows = max(1, round(rows * spread.size * spread.load))
            product = rows, inner, columns, max(1, groups // spread.places)
        more = (spread.split * hidden + width) / (hidden + width)  # words are whole, what is inside of experts in parts
        return replace(
            kernel,
            flops=round(kernel.flops * spread.load),
            moved_bytes=round(words * more * spread.load) + kernel.expert_bytes // spread.size,
            product=product,
            form="" if kernel.form == "grouped" and spec.dimensions[EXPERTS] == spread.places else kernel.form,
        )

    return {phase: [own(kernel) for kernel in kernels] for phase, kernels in work.items()}


def words_ns(spec: BlockSpec, samples: int, width: int, spread: Spread, links: LinkPath, prices: Prices) -> int:
    """Ns for a device's words, whose own part of ``samples`` sequences the block is for, to go there and come back."""
    said = _said_of_words(spec, samples, width, spread, links, prices)
    return said.counts_ns + said.words_ns + said.gathered_ns


def said_of_experts(
    spec: BlockSpec,
    samples: int,
    width: int,
    spread: Spread,
    split: AnyShare,
    links: LinkPath,
    prices: Prices,
) -> ExpertMessages:
    """What goes to a block's experts and comes back, and what devices that split shared experts gather and scatter."""
    shared = 0
    if split.shards > 1 and "shared_ffn" in spec.dimensions:
        shared = samples * split.shards * spec.dimensions["sequence"] * spec.dimensions["hidden"] * width
    of_shared = sum(round(prices(Exchange(how, shared), split.shards)) for how in AROUND) if shared else 0
    found = _said_of_words(spec, samples, width, spread, links, prices)
    return found.model_copy(update={"shared_bytes": shared, "shared_ns": of_shared})


def _routing_bytes(spec: BlockSpec, samples: int, width: int, spread: Spread) -> float:
    """What goes along with words, one way: numbers of a device's experts, and by how much each of these counts."""
    one_digit = width > 2 or spec.dimensions[EXPERTS] // spread.places <= DIGIT
    numbers = (2 if one_digit else 3) * spec.dimensions[TAKEN] * width
    return samples * spec.dimensions["sequence"] * numbers * spread.load


def _said_of_words(
    spec: BlockSpec, samples: int, width: int, spread: Spread, links: LinkPath, prices: Prices
) -> ExpertMessages:
    """What goes to a block's experts and comes back, and what devices that split the same experts gather of it."""
    sent = samples * spec.dimensions["sequence"] * spec.dimensions["hidden"] * width * spread.load
    taken, routing = spec.dimensions[TAKEN], round(_routing_bytes(spec, samples, width, spread))
    both = (dispatch_ns(size, taken, spread.size, links, spread.split) for size in (round(sent) + routing, round(sent)))
    found = ExpertMessages(
        bytes=round(sent),
        experts_per_token=taken,
        words_ns=round(sum(both)),
        counts_ns=round(counts_ns(spread.size, links, spread.split)),
        routing_bytes=routing,
        gathered_bytes=round(sent * places_taken(spread.places, taken) * spread.split) if spread.split > 1 else 0,
    )
    if spread.split == 1:
        return found
    gathered = sum(round(prices(each, spread.split)) for each in among_parts(found))
    return found.model_copy(update={"gathered_ns": gathered})


def gathered_bytes(spec: BlockSpec, samples: int, width: int, spread: Spread) -> int:
    """Bytes of the words that a device gets of others that split the same experts."""
    words = samples * spec.dimensions["sequence"] * spec.dimensions[TAKEN]
    return math.ceil((spread.split - 1) * words * spec.dimensions["hidden"] * width * spread.load)
