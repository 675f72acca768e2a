"""Building a profile: a model's graph, found without computing, and the rows of its blocks.

Blocks that are alike are measured or estimated once; from the rows of one of each kind comes a profile of all.
"""

from __future__ import annotations

import hashlib
import platform
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from pipeplan._version import __version__
from pipeplan.costs.blocks import require_row
from pipeplan.costs.communication import Exchange, Prices, time_of_groups
from pipeplan.costs.recipes import unnamed_bytes
from pipeplan.costs.wide_groups import MessageWaits, waited_of_shards
from pipeplan.errors import UsageError
from pipeplan.files import Block, Cluster, CostRow, Edge, Profile, Recipe, Source, TiedParameter
from pipeplan.files.profile import COUNTS, NEEDS, Saved, SavedBySource
from pipeplan.files.row_messages import MessageTable, RowMessages, ShardMessages
from pipeplan.runtime.models.shapes import ShapedBlock, num_whole, shaped_blocks, tokens_per_sample
from pipeplan.runtime.models.spec import BlockSpec, Collective, Model, shards_named, unsplittable
from pipeplan.runtime.profiling.flops import ProductCounter
from pipeplan.runtime.profiling.measured_shares import measured_share
from pipeplan.runtime.profiling.ring_rows import MeasuredRing

Kind = tuple[int, int, int, str]
"""Shards, context and id of the block that is measured for all like it."""

_NUM_SAMPLES, _MORE_SAMPLES = 3, 5  # what grows between them is of samples, the rest is shared by all


@dataclass(frozen=True, slots=True)
class BlockNode:
    """What is known of a block before it runs.

    ``kind`` is the id of the first block like it, ``likeness`` equal for all of them, those of other models included;
    ``input_needs_grad`` is by source; ``roots`` are the outputs, by index, that backward starts from; ``trainable`` and
    ``frozen`` are the numbers in parameters that get a gradient, and in those that do not; ``experts`` of both are of
    experts, and devices that split the block each have the last two of either whole.
    """

    spec: BlockSpec
    kind: str
    likeness: Hashable
    input_needs_grad: tuple[bool, ...]
    roots: tuple[int, ...]
    trainable: int
    frozen: int
    experts: int = 0
    whole_trainable: int = 0
    whole_frozen: int = 0

    def counts(self, shards: int) -> dict[str, Any]:
        """What a profile with costs for so many shards at most says of its parameters."""
        return {
            "parameters": self.trainable,
            "frozen_parameters": self.frozen,
            "expert_parameters": self.experts,
            "whole_parameters": self.whole_trainable if shards > 1 else 0,
            "whole_frozen_parameters": self.whole_frozen if shards > 1 else 0,
        }


@dataclass(frozen=True, slots=True)
class BlockGraph:
    """The blocks of a model in topological order, its edges, what blocks share, and what a sample is."""

    blocks: tuple[BlockNode, ...]
    edges: tuple[Edge, ...]
    tied: tuple[TiedParameter, ...]
    tokens_per_sample: int | None
    forward_flops_per_sample: int | None

    @property
    def fingerprint(self) -> str:
        """Equal for models whose blocks have the same names, dimensions, parameters, likeness and edges."""
        blocks = [
            (
                block.spec.id,
                block.spec.operator,
                sorted(block.spec.dimensions.items()),
                block.spec.samples,
                block.kind,
                block.input_needs_grad,
                (block.trainable, block.frozen),
            )
            for block in self.blocks
        ]
        others = [each.model_dump_json() for each in (*self.edges, *self.tied)]
        return hashlib.sha256(repr((blocks, others)).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class ModelShare:
    """A model of which each block is one device's share among ``shards``, and what is known of it.

    Its samples have one of ``context`` parts of each sequence, and its blocks the experts of one of ``expert`` devices.
    """

    shards: int
    model: Model
    graph: BlockGraph
    context: int = 1
    expert: int = 1


@dataclass(frozen=True, slots=True)
class GraphShare:
    """What is known of a :class:`ModelShare` that was not made."""

    shards: int
    graph: BlockGraph
    context: int
    expert: int = 1


AnyShare: TypeAlias = ModelShare | GraphShare


def kinds_of(splits: Sequence[AnyShare]) -> dict[Hashable, Kind]:
    """Which block is measured for those of a likeness: the first, with the fewest devices."""
    found: dict[Hashable, Kind] = {}
    for split in splits:
        for block in split.graph.blocks:
            found.setdefault(block.likeness, (split.shards, split.context, split.expert, block.spec.id))
    return found


def block_graph_of(model: Model, dtype: torch.dtype) -> BlockGraph:
    """A model's graph, found without computing.

    Blocks are alike that have the same operator, dimensions, modules, parameters and inputs. A block that shares
    parameters with others counts them as its own. Raises UsageError where a block cannot be built or called.
    """
    read = {each for block in model.blocks for each in block.inputs}
    few, steps = _counted(shaped_blocks(model, _NUM_SAMPLES, dtype))
    kinds: dict[Hashable, str] = {}
    blocks: list[BlockNode] = []
    for step in steps:
        id_, named = step.spec.id, _own_parameters(step, model)
        parameters = named.values()
        trained = sum(tensor.numel() for tensor in parameters if tensor.requires_grad)
        roots = _roots(step, read)
        likeness = _likeness(step, roots)
        blocks.append(
            BlockNode(
                step.spec,
                kinds.setdefault(likeness, id_),
                likeness,
                tuple(tensor.requires_grad for tensor in step.inputs),
                roots,
                trained,
                sum(tensor.numel() for tensor in parameters) - trained,
                _in_experts(step.spec, parameters),
                *_whole_on_shards(step.spec, named),
            )
        )
    readers = Counter(each for block in model.blocks for each in set(block.inputs))
    more, larger = _counted(shaped_blocks(model, _MORE_SAMPLES, dtype))
    edges = tuple(edge for pair in zip(steps, larger, strict=True) for edge in _edges(*pair, readers))
    flops = (more - few) // (_MORE_SAMPLES - _NUM_SAMPLES)
    tied = tuple(_tied(model, {step.spec.id: step.module for step in steps}))
    return BlockGraph(tuple(blocks), edges, tied, tokens_per_sample(model, dtype, _NUM_SAMPLES, steps), flops or None)


def _counted(steps: Iterator[ShapedBlock]) -> tuple[int, tuple[ShapedBlock, ...]]:
    """Blocks in their turn, and the FLOPs of all their products: of those with one module, that of the first each."""
    total, found, of_module = 0, list[ShapedBlock](), dict[int, int]()
    with ProductCounter() as counter:
        for step in steps:
            total += of_module.setdefault(id(step.module), counter.flops)
            counter.flops = 0
            found.append(step)
    return total, tuple(found)


def _own_parameters(step: ShapedBlock, model: Model) -> dict[str, nn.Parameter]:
    """A block's parameters by name; of those that are tied to each other inside the block, the first."""
    again: set[str] = set()
    for group in model.tied:
        again.update([name for id_, name in group if id_ == step.spec.id][1:])
    return {name: parameter for name, parameter in step.module.named_parameters() if name not in again}


def _whole_on_shards(spec: BlockSpec, parameters: Mapping[str, nn.Parameter]) -> tuple[int, int]:
    """How many numbers each device that splits the block has of what none of them cuts: trained, and frozen."""
    found = {True: 0, False: 0}
    for name, each in parameters.items():
        found[each.requires_grad] += num_whole(spec, name, each.numel())
    return found[True], found[False]


def _in_experts(spec: BlockSpec, parameters: Iterable[nn.Parameter]) -> int:
    """How many numbers are in weights that are there for each expert."""
    count = spec.dimensions.get("experts")
    return sum(each.numel() for each in parameters if each.ndim == 3 and each.shape[0] == count)


def _tied(model: Model, modules: Mapping[str, nn.Module]) -> Iterator[TiedParameter]:
    """What several blocks share and train; one entry for all that the same blocks share.

    What is frozen has no gradients to sum, so that it is each block's own.
    """
    shared: dict[frozenset[str], list[tuple[str, str]]] = defaultdict(list)
    for group in model.tied:
        shared[frozenset(id_ for id_, _ in group)].append(group[0])
    for blocks, firsts in shared.items():
        if len(blocks) > 1:
            parameters = [modules[id_].get_parameter(name) for id_, name in firsts]
            trained = sum(each.numel() for each in parameters if each.requires_grad)
            if not trained:
                continue
            yield TiedParameter(
                name=".".join(firsts[0]),
                blocks=tuple(block.id for block in model.blocks if block.id in blocks),
                parameters=trained,
            )


def _roots(step: ShapedBlock, read: Collection[tuple[str, int]]) -> tuple[int, ...]:
    """The outputs that others read; of a block that nobody reads, all."""
    indices = range(len(step.outputs))
    return tuple(index for index in indices if (step.spec.id, index) in read) or tuple(indices)


def _edges(few: ShapedBlock, more: ShapedBlock, readers: Mapping[tuple[str, int], int]) -> Iterator[Edge]:
    """An edge for each tensor; what the block takes twice travels once. Those that others read, too, have a name."""
    taken = dict(zip(few.spec.inputs, zip(few.inputs, more.inputs, strict=True), strict=True))
    counts = Counter(source for source, _ in taken)
    for (source, index), tensors in taken.items():
        size, broadcast = _bytes(*tensors)
        yield Edge(
            source=source,
            target=few.spec.id,
            tensor=str(index) if readers[source, index] > 1 or counts[source] > 1 else None,
            bytes_per_sample=size,
            gradient=tensors[0].requires_grad,
            broadcast=broadcast,
        )


def _bytes(few: Tensor, more: Tensor) -> tuple[int, bool]:
    """Bytes for each sample, and False; of a tensor that does not grow with samples, all its bytes, and True."""
    growth = more.nbytes - few.nbytes
    return (growth // (_MORE_SAMPLES - _NUM_SAMPLES), False) if growth > 0 else (few.nbytes, True)


def _likeness(step: ShapedBlock, roots: tuple[int, ...]) -> Hashable:
    """Equal for blocks that cost the same."""
    spec = step.spec
    return (
        spec.operator,
        tuple(sorted(spec.dimensions.items())),
        spec.samples,
        spec.loss,
        _structure(step.module),
        tuple(_form(tensor) for tensor in step.inputs),
        tuple(spec.inputs.index(each) for each in spec.inputs),  # which of them are the same tensor
        roots,
    )


def _structure(module: nn.Module) -> Hashable:
    return (
        type(module),
        repr(module),
        tuple((name, _form(tensor)) for name, tensor in module.named_parameters()),
        tuple((name, _form(tensor)) for name, tensor in module.named_buffers()),
    )


def _form(tensor: Tensor) -> Hashable:
    return tuple(tensor.shape), tensor.dtype, tensor.requires_grad


STATE_NOTES = ("Weight gradients of linear and embedding layers are deferred to W, all others are part of I.",)
"""What every profile that is made here says of its blocks."""


_FLOAT32_BYTES = 4


class CollectivePrice(Protocol):
    """Time in ns of a collective."""

    def __call__(self, collective: Collective, samples: int, devices: int, apart: int = 1) -> int:
        """By the numbers of samples and of devices, which stand so far apart."""


def dtype_of(name: str) -> torch.dtype:
    """The number format of a name such as ``float32``."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


@contextmanager
def on_threads(count: int | None) -> Iterator[None]:
    """Run CPU operators on this many threads inside; None changes nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def splits_of(
    model: Model,
    shards: Sequence[int],
    dtype: torch.dtype,
    cluster: Cluster | None,
    context: Sequence[int] = (1,),
    *,
    alone: bool = False,
) -> tuple[ModelShare, ...]:
    """The model of one device for each number of devices, and of those that share sequences. Raises UsageError.

    Sequences are also whole. What is measured ``alone`` has attention of a part over whole ones.
    """

    def made(whole: Model, part: int, count: int) -> Model:
        share = _share_of(whole, count)
        return measured_share(model, share, part, count) if alone and (part, count) != (1, 1) else share

    sizes = split_sizes(model, shards, context, cluster)
    parts = {part: _part_of(model, part) for part in dict.fromkeys(part for part, _ in sizes)}
    return tuple(
        ModelShare(count, each, _apart(block_graph_of(each, dtype), part), part)
        for part, count in sizes
        for each in (made(parts[part], part, count),)
    )


def split_sizes(
    model: Model, shards: Sequence[int], context: Sequence[int], cluster: Cluster | None
) -> list[tuple[int, int]]:
    """Pairs of parts of sequences and shards, as far as the cluster has devices; sequences are also whole.

    Raises UsageError.
    """
    counts = sorted(set(shards))
    if not counts or counts[0] < 1:
        raise UsageError(f"--shards {list(counts)}: give at least one, each 1 or more")
    if counts[-1] > 1 and model.sharded is None:
        raise unsplittable(counts[-1], model.name)
    if cluster is not None and counts[-1] > cluster.num_devices:
        raise UsageError(
            f"--shards {counts[-1]}: the cluster has {cluster.num_devices} devices; give at most that, or a larger "
            "--cluster"
        )
    parts = sorted({1, *context})
    if parts[0] < 1:
        raise UsageError(f"--context {list(context)}: give numbers of 1 or more")
    if cluster is not None and counts[0] * parts[-1] > cluster.num_devices:
        raise UsageError(
            f"--context {parts[-1]} with --shards {counts[0]}: the cluster has {cluster.num_devices} devices; give "
            "less, or a larger --cluster"
        )
    for part in parts[1:]:
        require_pieces(model, part)
    pairs = [(part, count) for part in parts for count in counts]
    many = [] if cluster is None else [(part, n) for part, n in pairs if part * n > cluster.num_devices]
    if many:
        said = ", ".join(f"--context {part} with --shards {count}" for part, count in many)
        warnings.warn(f"left out, as the cluster has fewer devices: {said}", stacklevel=2)
    return [pair for pair in pairs if pair not in many]


class SharesLike:
    """Shares of a model by its own ``graph``: blocks that are alike in it have shares that are alike.

    Of layers that are, the first alone are made where that is less work.
    """

    def __init__(self, model: Model, graph: BlockGraph, dtype: torch.dtype) -> None:
        self._model, self._graph, self._dtype = model, graph, dtype
        self._parts = {1: model}

    def of(self, part: int, count: int) -> ModelShare:
        """One of ``count`` devices' share of one of so many parts of each sequence. Raises UsageError."""
        if (part, count) == (1, 1):
            return ModelShare(1, self._model, self._graph)
        return self._outlined(part, count) or self._made(part, count)

    def _outlined(self, part: int, count: int) -> ModelShare | None:
        """From a model of the first layers; None where it lacks a kind of block."""
        model = self._model
        if model.outlined is None or (count > 1 and model.sharded is None):
            return None
        with shards_named(count, model.name):
            if part == 1:
                model.require_shares(count)
            outline = model.outlined(count, part)
        known = {} if outline is None else {each.spec.id: each for each in self._graph_of(outline, part).blocks}
        if outline is None or not known.keys() >= {each.kind for each in self._graph.blocks}:
            return None
        blocks = tuple(_in_place_of(each, known[each.kind]) for each in self._graph.blocks)
        return ModelShare(count, outline, replace(self._graph, blocks=blocks), part)

    def _made(self, part: int, count: int) -> ModelShare:
        if part not in self._parts:
            self._parts[part] = _part_of(self._model, part)
        share = _share_of(self._parts[part], count)
        return ModelShare(count, share, self._graph_of(share, part), part)

    def _graph_of(self, model: Model, part: int) -> BlockGraph:
        return _apart(block_graph_of(model, self._dtype), part)


def _in_place_of(whole: BlockNode, share: BlockNode) -> BlockNode:
    """A share of a block that is like another, ``whole`` one, in the place of that."""
    of_share = {name: getattr(share.spec, name) for name in ("dimensions", "collectives", "divided")}
    return replace(share, spec=replace(whole.spec, **of_share), kind=whole.kind)


def part_of(model: Model, parts: int, dtype: torch.dtype, expert: int = 1, load: float = 1.0) -> ModelShare:
    """The model on a device that has one of so many parts of each sequence, and of all experts.

    These multiply ``load`` times as many words as it sends away. Raises UsageError.
    """
    part = with_experts_of_one(_part_of(model, parts), expert, load)
    return ModelShare(1, part, _apart(block_graph_of(part, dtype), parts), parts, expert)


def with_experts_of_one(model: Model, expert: int, load: float = 1.0) -> Model:
    """The model with the experts of one of so many devices, the fullest by ``load``.

    Raises UsageError where it does not say how.
    """
    if expert == 1:
        return model
    if model.spread is None:
        raise UsageError(
            f"--expert {expert}: experts of {model.name} cannot be measured apart; give a Hugging Face "
            "configuration, or add --estimate --device PRESET"
        )
    return model.spread(expert, load)


def _part_of(model: Model, context: int) -> Model:
    """The model whose samples are one of ``context`` parts of each sequence. Raises UsageError."""
    return model if context == 1 else _require_parts(model, context)(context)


def _require_parts(model: Model, context: int) -> Callable[[int], Model]:
    if model.parted is None:
        raise UsageError(
            f"--context {context}: {model.name} makes samples of its own; give a model of the zoo or a configuration"
        )
    return model.parted


def require_pieces(model: Model, context: int) -> None:
    """Check that devices can have an early and a late piece of each sequence. Raises UsageError."""
    _require_parts(model, context)
    own = model.part_length(context)
    if own % 2:
        raise UsageError(
            f"--context {context}: {model.name} has sequences of {own * context}, of which {context} devices "
            "cannot have an early and a late piece each, all of one size; give a --sequence that is a multiple "
            f"of {2 * context}, or another --context"
        )


def _apart(graph: BlockGraph, context: int) -> BlockGraph:
    """The graph of parts of sequences, whose attention is over more than they have: its blocks are like no others."""
    if context == 1:
        return graph
    return replace(graph, blocks=tuple(replace(block, likeness=(context, block.likeness)) for block in graph.blocks))


def _share_of(model: Model, count: int) -> Model:
    """One of ``count`` devices' share. Raises UsageError that names flag and model."""
    if count == 1 or model.sharded is None:
        return model
    with shards_named(count, model.name):
        share = model.sharded(count)
        model.require_shares(count)
    return share


def unsplit_of(splits: Sequence[AnyShare], model: Model, dtype: torch.dtype) -> BlockGraph:
    """The unsplit model, whose sizes are those in a profile."""
    whole = splits[0].shards == splits[0].context == 1
    return splits[0].graph if whole else block_graph_of(model, dtype)


def profile_of_kinds(
    model: Model,
    splits: Sequence[AnyShare],
    unsplit: BlockGraph,
    rows: Iterable[tuple[Kind, CostRow]],
    price: CollectivePrice,
    source: Source,
    recipe: Recipe,
    step_bytes_per_s: int | None,
    more: Mapping[str, Sequence[CostRow]] | None = None,
    rings: Mapping[tuple[Kind, int], MeasuredRing] | None = None,
    said: Mapping[tuple[Kind, int, bool], RowMessages] | None = None,
    table: MessageTable | None = None,
    saved: Mapping[Kind, Sequence[SavedTensors]] | None = None,
) -> Profile:
    """The profile whose blocks have the rows of their kinds, with what collectives take, and ``more``.

    ``rings`` are those of kinds and micro-batch sizes, whether blocks are recomputed or not, which ``said`` tells
    apart: what is known of a row's messages before those of its shards are, and what may run beside them. ``saved``
    says of a kind what its backward needs of inputs and outputs, wherever that was looked at. With a ``table`` rows say
    what their devices send each other. Raises UsageError.
    """
    kinds, of_kind = kinds_of(splits), defaultdict[Kind, list[CostRow]](list)
    for kind, row in rows:
        of_kind[kind].append(row)
    costs: dict[str, list[CostRow]] = defaultdict(list, {id_: list(own) for id_, own in (more or {}).items()})
    for split in splits:
        known: dict[Hashable, list[CostRow]] = {}  # of blocks that are alike
        for block in split.graph.blocks:
            spec, kind = block.spec, kinds[block.likeness]
            like = kind, spec.divided, spec.collectives
            if like not in known:
                update = {"shards": split.shards, "context": split.context, "sequence_parallel": spec.divided}
                known[like] = []
                for row in of_kind[kind]:
                    own, ring = row.model_copy(update=update), (rings or {}).get((kind, row.microbatch_size))
                    messages = (said or {}).get((kind, row.microbatch_size, row.recompute), RowMessages())
                    messages = _of_shards(own, spec.collectives, price, dtype_of(source.dtype), messages)
                    whole = _with_collectives(own, spec.collectives, price, messages.shards, ring)
                    if table is not None and split.shards * split.context > 1:
                        whole = whole.model_copy(update={"messages": table.place_of(messages)})
                    require_row(f"block {spec.id!r}", dict(whole))
                    known[like].append(whole)
            costs[spec.id] += known[like]
    by_block = {id_: sorted(own, key=lambda row: row.key) for id_, own in costs.items()}
    edges = tuple(_edges_saved(unsplit, splits, kinds, saved or {}))
    every = () if table is None else table.messages
    return profile_of(model, replace(unsplit, edges=edges), by_block, source, recipe, step_bytes_per_s, every)


class SavedTensors(NamedTuple):
    """Of each of a block's inputs whether its backward needs it, and of each output."""

    inputs: tuple[Saved, ...]
    outputs: tuple[SavedBySource, ...]


def _edges_saved(
    graph: BlockGraph,
    splits: Sequence[AnyShare],
    kinds: Mapping[Hashable, Kind],
    saved: Mapping[Kind, Sequence[SavedTensors]],
) -> Iterator[Edge]:
    """The edges, which say what blocks need of them where that is so for all sizes and ways to split.

    An input that some need and others do not is one that is needed; an output is counted once only where all do.
    """
    known: dict[str, list[SavedTensors]] = defaultdict(list)
    for split in splits:
        for block in split.graph.blocks:
            own = saved.get(kinds[block.likeness], [SavedTensors((), ())])
            known[block.spec.id] += own
    edges = iter(graph.edges)
    for block in graph.blocks:
        for source, index in dict.fromkeys(block.spec.inputs):
            edge, place = next(edges), block.spec.inputs.index((source, index))
            own, others = known[block.spec.id], known[source]
            if own and all(len(each.inputs) == len(block.spec.inputs) for each in own):
                needs = sorted((each.inputs[place] for each in own), key=NEEDS.index)[-1 if edge.gradient else 0]
                edge = edge.model_copy(update={"saved": None if needs == edge.need else needs})
            if others and all(index < len(each.outputs) for each in others):
                least = min((each.outputs[index] for each in others), key=COUNTS.index)
                edge = edge.model_copy(update={"saved_by_source": least})
            yield edge


def bare_profile(model: Model, graph: BlockGraph) -> Profile:
    """A profile that says nothing of times, for its blocks and edges. Raises UsageError where names do not fit one."""
    nothing = (CostRow(microbatch_size=1, forward_ns=0, backward_ns=0),)
    costs = {block.spec.id: nothing for block in graph.blocks}
    return profile_of(model, graph, costs, Source(method="estimated"), Recipe())


def source_of(method: Literal["measured", "estimated"], device: str, dtype: torch.dtype, notes: str = "") -> Source:
    """Where and when numbers were made; of estimates it does not matter in which Python."""
    python = {"python": platform.python_version()} if method == "measured" else {}
    return Source(
        method=method,
        device=device,
        dtype=str(dtype).removeprefix("torch."),
        versions={"pipeplan": __version__, **python, "torch": torch.__version__},
        date=datetime.now(UTC).date().isoformat(),
        notes=notes,
    )


def priced_by(prices: Prices | None, dtype: torch.dtype, cluster: Cluster | None = None) -> CollectivePrice:
    """What collectives cost, whose bytes are those of float32; nothing without prices.

    On a ``cluster`` devices may stand some apart: those that share sequences, as many as split each block.
    """
    if prices is None:
        return lambda collective, samples, devices, apart=1: 0

    def price(collective: Collective, samples: int, devices: int, apart: int = 1) -> int:
        exchange, width = Exchange(collective.operation, sent_bytes(collective, samples, dtype)), devices * apart
        if apart > 1 and cluster is not None:
            return round(time_of_groups(cluster, exchange, [range(first, width, apart) for first in range(apart)]))
        return round(prices(exchange, devices))

    return price


def sent_bytes(collective: Collective, samples: int, dtype: torch.dtype) -> int:
    """Of the array that a collective is about, in a number format."""
    return collective.bytes_per_sample * samples * dtype.itemsize // _FLOAT32_BYTES


def _of_shards(
    row: CostRow, collectives: Sequence[Collective], price: CollectivePrice, dtype: torch.dtype, said: RowMessages
) -> RowMessages:
    """What is said of a row's messages, with those among its shards and what these take; without any, nothing."""
    those = [each for each in collectives if each.over == "shards"]
    if not those or row.shards == 1:
        return said.model_copy(update={"shards": None})
    size, taken = row.microbatch_size, Counter[str]()
    for each in those:
        taken[each.phase] += price(each, size, *_among(each, row))
    update: dict[str, Any] = {
        "sent": tuple((each.phase, each.operation, sent_bytes(each, size, dtype)) for each in those),
        "forward_ns": taken["F"],
        "input_grad_ns": taken["I"],
        "weight_grad_ns": taken["W"],
    }
    return said.model_copy(update={"shards": (said.shards or ShardMessages()).model_copy(update=update)})


def _with_collectives(
    row: CostRow,
    collectives: Sequence[Collective],
    price: CollectivePrice,
    among_shards: ShardMessages | None,
    ring: MeasuredRing | None = None,
) -> CostRow:
    """The row with the time that its collectives take in F, in I and in W; in B those of both.

    Recomputed cores have keys and values exchanged again, of which a ``ring`` changes times and memory. Of messages
    among shards counts what products do not hide.
    """
    between_parts = [each for each in collectives if each.over == "context"]
    waited = MessageWaits() if among_shards is None else waited_of_shards(among_shards, row.shards)

    def taken(phase: str) -> int:
        return sum(
            price(each, row.microbatch_size, *_among(each, row)) for each in between_parts if each.phase == phase
        )

    gathered = taken("F")
    forward, input_grad, weight_grad = (
        waited.forward + gathered,
        waited.input_grad + taken("I"),
        waited.weight_grad + taken("W"),
    )
    again = forward * row.recompute
    times = {
        "forward_ns": row.forward_ns + forward,
        "backward_ns": (row.backward_ns or 0) + input_grad + weight_grad + again,
        "input_grad_ns": (row.input_grad_ns or 0) + input_grad + again,
        "weight_grad_ns": (row.weight_grad_ns or 0) + weight_grad,
        "selective_ns": None if row.selective_ns is None else row.selective_ns + gathered,
    }
    whole = row.model_copy(update=times)
    return whole if ring is None else whole.model_copy(update={"ring": ring.beside(whole, gathered, taken("I"))})


def _among(collective: Collective, row: CostRow) -> tuple[int, int]:
    """How many devices it is of, and how far apart these stand."""
    return (row.shards, 1) if collective.over == "shards" else (row.context, row.shards)


def profile_of(
    model: Model,
    graph: BlockGraph,
    costs: Mapping[str, Sequence[CostRow]],
    source: Source,
    recipe: Recipe,
    step_bytes_per_s: int | None = None,
    messages: Sequence[RowMessages] = (),
) -> Profile:
    """The model's profile. Raises UsageError where its names do not fit one.

    With the recipe ``custom`` bytes are stated of what a plain loop keeps in the source's number format.
    """
    width = dtype_of(source.dtype).itemsize if recipe.is_custom and source.dtype else None
    tied = [each.model_copy(update=unnamed_bytes(width, each.parameters)) for each in graph.tied]
    try:
        return Profile(
            name=model.name,
            source=source,
            tokens_per_sample=graph.tokens_per_sample,
            forward_flops_per_sample=graph.forward_flops_per_sample,
            recipe=recipe,
            step_bytes_per_s=step_bytes_per_s,
            blocks=tuple(_block(block, costs[block.spec.id], width) for block in graph.blocks),
            edges=graph.edges,
            tied=tuple(tied),
            messages=tuple(messages),
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"model {model.name!r} does not fit a profile: {place}: {first['msg']}") from error


def _block(block: BlockNode, costs: Sequence[CostRow], width: int | None) -> Block:
    return Block(
        id=block.spec.id,
        **block.spec.described,
        **block.counts(max(row.shards for row in costs)),
        **unnamed_bytes(width, block.trainable, block.frozen),
        costs=tuple(costs),
    )
