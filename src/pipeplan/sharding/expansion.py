"""From a profile's blocks to the operators in them, as a graph.

Blocks of the kinds that pipeplan itself writes are cut into operators by their dimensions: half a transformer layer
into norm, products, attention and residual. Every other block is one operator that only samples, or the shares its
rows know, can split (:class:`WholeBlock`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from pipeplan.files import Block, Edge, Profile
from pipeplan.files.row_messages import RowMessages
from pipeplan.sharding import operator_kinds as ops
from pipeplan.sharding.operator_kinds import WholeBlock, WordTable, shards_axis, shared_axes, single_operator
from pipeplan.sharding.operators import Axis, Splittable
from pipeplan.units import MAX_BYTES


@dataclass(frozen=True, slots=True)
class OperatorNode:
    """An operator of a block."""

    name: str
    block: str
    operation: Splittable


@dataclass(frozen=True, slots=True)
class Link:
    """A tensor from one operator to an input (``port``) of another; ``gradient``: whether one flows back."""

    source: str
    target: str
    port: int = 0
    gradient: bool = True
    broadcast: bool = False


@dataclass(frozen=True, slots=True)
class OperatorGraph:
    """Operators in topological order, and the tensors between them."""

    nodes: tuple[OperatorNode, ...]
    links: tuple[Link, ...]


@dataclass(frozen=True, slots=True)
class _Flow:
    """What a block hands on: its output, and an encoder's output that it lets through beside it."""

    main: str
    beside: str | None = None


@dataclass(frozen=True, slots=True)
class _BlockNumbers:
    """What is known of a block besides itself: samples, bytes per number, bytes per sample in and out.

    ``kind`` is the block without its names, one object of all that are alike.

    ``shared``: devices may share its sequences and its experts, as its rows have it; of what these send each other, and
    which go around ``rings``, the profile says more.
    """

    block: Block
    kind: Block
    samples: int
    width: int
    taken: tuple[int, ...]
    given: int
    shared: bool = False
    messages: tuple[RowMessages, ...] = ()
    rings: frozenset[tuple[int, int]] = frozenset()

    def size(self, name: str) -> int:
        """One of the block's dimensions."""
        return self.block.dimensions[name]

    @property
    def batch(self) -> Axis:
        """The samples."""
        return Axis("samples", self.samples, called="samples")

    def along(self, name: str, called: str, size: int | None = None, unit: int = 1) -> Axis:
        """An axis by one of the block's dimensions, or of some size."""
        return Axis(name, self.size(called) if size is None else size, unit, called)


class _Builder:
    """The operators of one block as they are put together."""

    def __init__(self, known: _BlockNumbers, inputs: Sequence[_Flow], gradients: Sequence[bool]) -> None:
        self.known, self.inputs, self.gradients = known, inputs, gradients
        self.nodes: list[OperatorNode] = []
        self.links: list[Link] = []

    def add(self, name: str, operation: Splittable, *after: str) -> str:
        """An operator fed by others; returns its name."""
        full = f"{self.known.block.id}/{name}"
        self.nodes.append(OperatorNode(full, self.known.block.id, operation))
        outside = dict(zip((flow.main for flow in self.inputs), self.gradients, strict=True))
        for port, source in enumerate(after):
            self.links.append(Link(source, full, port, outside.get(source, True)))
        return full

    @property
    def entry(self) -> tuple[str, ...]:
        """What the block's first operator takes: its first input, nothing where it has none."""
        return (self.inputs[0].main,) if self.inputs else ()

    @property
    def learns(self) -> bool:
        """Whether anything before it needs a gradient."""
        return any(self.gradients)


def expand(
    profile: Profile,
    samples: int,
    *,
    width: int = 2,
    whole_blocks: bool = False,
    alone: bool = True,
) -> OperatorGraph:
    """The operators of a profile's blocks for a micro-batch of ``samples``; ``width`` is bytes per number.

    With ``whole_blocks`` every block is one operator; those that are an operator as they are keep what they need
    ``alone``, or share it with their neighbours. Devices may share sequences and experts of a block that has rows for
    it, and no tensor that is there for all samples.
    """
    by_id, whole = (
        profile.by_id,
        {id_ for edge in profile.edges if edge.broadcast for id_ in (edge.source, edge.target)},
    )
    kinds = {each.id: each.model_copy(update={"id": "block", "modules": ()}) for each in profile.kinds}
    flows: dict[str, _Flow] = {}
    nodes: list[OperatorNode] = []
    links: list[Link] = []
    for id_ in profile.topological_order():
        incoming = [edge for edge in profile.edges if edge.target == id_]
        outgoing = max((edge.bytes_per_sample for edge in profile.edges if edge.source == id_), default=0)
        taken = tuple(edge.bytes_per_sample for edge in incoming)
        more = id_ not in whole, profile.messages, profile.rings
        known = _BlockNumbers(by_id[id_], kinds[profile.alike[id_]], samples, width, taken, outgoing, *more)
        flow, built = _expanded(known, incoming, flows, whole_blocks=whole_blocks, alone=alone)
        flows[id_] = flow
        nodes += built.nodes
        links += built.links
    if not alone:
        nodes = [*_held_once(profile, nodes, links)]
    return OperatorGraph(tuple(nodes), tuple(links))


def _held_once(profile: Profile, nodes: Sequence[OperatorNode], links: Sequence[Link]) -> Iterator[OperatorNode]:
    """Blocks by their rows without what these count of tensors that others hold, or that no backward needs."""
    operations = {node.name: node.operation for node in nodes}
    incoming: dict[str, list[Edge]] = defaultdict(list)
    for edge in profile.edges:
        incoming[edge.target].append(edge)
    sources: dict[str, list[str]] = defaultdict(list)
    for link in links:
        sources[link.target].append(link.source)
    for node in nodes:
        block = operations[node.name]
        if isinstance(block, WholeBlock) and not any(row.sequence_parallel for row in block.block.costs):
            taken = [
                (port, edge)
                for port, (edge, source) in enumerate(zip(incoming[node.block], sources[node.name], strict=True))
                if edge.is_counted() and not edge.broadcast and (operations[source].keeps_output or not edge.is_saved())
            ]
            held = frozenset(port for port, edge in taken if edge.is_saved())
            uncounted = sum(edge.bytes_per_sample for _, edge in taken)
            yield replace(node, operation=replace(block, held_ports=held, uncounted_bytes=uncounted))
        else:
            yield node


def _expanded(
    known: _BlockNumbers, incoming: Sequence[Edge], flows: Mapping[str, _Flow], *, whole_blocks: bool, alone: bool
) -> tuple[_Flow, _Builder]:
    inputs = [flows[edge.source] for edge in incoming]
    built = _Builder(known, inputs, [edge.gradient for edge in incoming])
    make = _KINDS.get((known.block.operator, tuple(sorted(known.block.dimensions))))
    if not whole_blocks and make is not None and not any(edge.broadcast for edge in incoming):
        with suppress(ZeroDivisionError):  # of dimensions that no such block has, as more heads than numbers
            flow = make(built)
            if all(_is_possible(node.operation) for node in built.nodes):
                return flow, built
        built = _Builder(known, inputs, built.gradients)
    return _Flow(_whole(built, incoming, alone=alone)), built


def _is_possible(operation: Splittable) -> bool:
    """Whether every axis has something, and no tensor is larger than any file may say."""
    numbers = operation.numbers()
    if not all(numbers.values()):
        return False
    sizes = operation.tensor().num_bytes, operation.entry_bytes(numbers), operation.width * operation.parameters
    return max(sizes) <= MAX_BYTES


def _whole(built: _Builder, incoming: Sequence[Edge], *, alone: bool) -> str:
    known = built.known
    single = single_operator(known.block, known.samples, known.width, known.taken, learns=built.learns, alone=alone)
    operation = single if single is not None and _is_possible(single) else _block(known, learns=built.learns)
    name = known.block.id
    built.nodes.append(OperatorNode(name, name, operation))
    for port, (edge, flow) in enumerate(zip(incoming, built.inputs, strict=True)):
        built.links.append(Link(flow.main, name, port, edge.gradient, edge.broadcast))
    return name


def _block(known: _BlockNumbers, *, learns: bool) -> WholeBlock:
    """A block by its rows; an embedding by its width, too, which nothing else changes the sense of."""
    axes = (known.batch, shards_axis(known.kind), *(shared_axes(known.kind) if known.shared else ()))
    by_width = known.block.operator == "embedding" and {"sequence", "hidden"} <= known.block.dimensions.keys()
    return (WordTable if by_width else WholeBlock)(
        axes=(*axes, known.along("hidden", "hidden")) if by_width else axes,
        width=known.width,
        learns=learns,
        block=known.kind,
        sample_bytes=known.given,
        messages=known.messages,
        rings=known.rings,
    )


def _beside(built: _Builder) -> str | None:
    """The tensor that travels with the block's own: what its input brought, or its last input."""
    if len(built.inputs) > 1:
        return built.inputs[-1].main
    return built.inputs[0].beside if built.inputs else None


def _joined(built: _Builder, sample_numbers: int) -> str:
    """The block's first input; all of them joined, where together they are what it takes."""
    known = built.known
    if len(known.taken) > 1 and sum(known.taken) == sample_numbers * known.width:
        join = ops.Concatenation((known.batch,), known.width, sample_numbers=sample_numbers)
        return built.add("concatenation", join, *(flow.main for flow in built.inputs))
    return built.entry[0]


# Transformers: [samples, positions, hidden] between the halves of layers.


def _sequence_axes(known: _BlockNumbers, *more: Axis) -> tuple[Axis, ...]:
    return (known.batch, known.along("places", "sequence"), *more)


def _norm(built: _Builder, *after: str, bias: bool = True) -> str:
    known = built.known
    return built.add(
        "norm", ops.Norm(_sequence_axes(known, known.along("features", "hidden")), known.width, bias=bias), *after
    )


def _residual(built: _Builder, *after: str) -> str:
    known = built.known
    return built.add("add", ops.Add(_sequence_axes(known, known.along("features", "hidden")), known.width), *after)


def _attention(built: _Builder) -> _Flow:
    known = built.known
    entry = _joined(built, known.size("sequence") * known.size("hidden"))
    heads, size = known.size("heads"), known.size("hidden") // known.size("heads")
    axes = _sequence_axes(known, known.along("rows", "hidden"), Axis("columns", heads, 3 * size, "heads"))
    made = built.add("queries-keys-values", ops.Product(axes, known.width), _norm(built, entry))
    own = _sequence_axes(known, Axis("features", heads, size, "heads"))
    mixed = built.add("attention", ops.Attention(own, known.width, head_size=size), made)
    last = built.add("projection", _projection(known, heads, size), mixed)
    beside = _beside(built) if entry in built.entry else None
    return _Flow(_residual(built, last, entry), beside)


def _projection(known: _BlockNumbers, heads: int, size: int) -> Splittable:
    axes = _sequence_axes(known, Axis("rows", heads, size, "heads"), known.along("columns", "hidden"))
    return ops.Product(axes, known.width)


def _cross_attention(built: _Builder) -> _Flow:
    known = built.known
    heads, size, memory = known.size("heads"), known.size("hidden") // known.size("heads"), known.size("memory")
    entry, beside = built.entry[0], _beside(built)
    assert beside is not None
    rows = known.along("rows", "hidden")
    of_queries = ops.Product(_sequence_axes(known, rows, Axis("columns", heads, size, "heads")), known.width)
    queries = built.add("queries", of_queries, _norm(built, entry))
    of_memory = (known.batch, Axis("places", memory, called="memory"), rows, Axis("columns", heads, 2 * size, "heads"))
    keys = built.add("keys-values", ops.Product(of_memory, known.width), beside)
    core = _sequence_axes(known, Axis("features", heads, size, "heads"))
    mixed = built.add("attention", ops.CrossAttention(core, known.width, head_size=size, memory=memory), queries, keys)
    last = built.add("projection", _projection(known, heads, size), mixed)
    return _Flow(_residual(built, last, entry), beside)


def _feed_forward(built: _Builder) -> _Flow:
    known = built.known
    entry = _joined(built, known.size("sequence") * known.size("hidden"))
    up = _sequence_axes(known, known.along("rows", "hidden"), known.along("columns", "ffn"))
    wide = built.add("up", ops.Product(up, known.width), _norm(built, entry))
    inner = _sequence_axes(known, known.along("features", "ffn"))
    active = built.add("activation", ops.Activation(inner, known.width), wide)
    down = _sequence_axes(known, known.along("rows", "ffn"), known.along("columns", "hidden"))
    last = built.add("down", ops.Product(down, known.width), active)
    beside = _beside(built) if entry in built.entry else None
    return _Flow(_residual(built, last, entry), beside)


def _norm_alone(built: _Builder) -> _Flow:
    return _Flow(_norm(built, *built.entry))


def _embedding(built: _Builder) -> _Flow:
    known = built.known
    places = "sequence" if "sequence" in known.block.dimensions else "lookups"
    axes = (
        known.batch,
        known.along("places", places),
        known.along("rows", "vocabulary"),
        known.along("columns", "hidden"),
    )
    return _Flow(built.add("table", ops.Embedding(axes, known.width, learns=False), *built.entry))


def _vocabulary_head(built: _Builder) -> _Flow:
    known = built.known
    axes = _sequence_axes(known, known.along("rows", "hidden"), known.along("columns", "vocabulary"))
    logits = built.add("output", ops.Product(axes, known.width, bias=False), _norm(built, *built.entry))
    classes = _sequence_axes(known, known.along("features", "vocabulary"))
    return _Flow(built.add("loss", ops.Loss(classes, known.width), logits))


def _patch_embedding(built: _Builder) -> _Flow:
    known = built.known
    axes = _sequence_axes(known, known.along("rows", "patch"), known.along("columns", "hidden"))
    return _Flow(built.add("product", ops.Product(axes, known.width, learns=built.learns), *built.entry))


def _token_pool(built: _Builder) -> _Flow:
    known = built.known
    pooled = ops.FirstPlace(_sequence_axes(known, known.along("features", "hidden")), known.width)
    token = built.add("pool", pooled, _norm(built, *built.entry))
    axes = (known.batch, Axis("places", 1), known.along("rows", "hidden"), known.along("columns", "outputs"))
    return _Flow(built.add("product", ops.Product(axes, known.width), token))


# Layers of numbers per sample, or per place of a sample.


def _rows_per_sample(known: _BlockNumbers, inputs: int) -> int:
    return max(1, sum(known.taken) // (inputs * known.width)) if known.taken else 1


def _layer_axes(known: _BlockNumbers, inputs: str, outputs: str) -> tuple[Axis, ...]:
    """Axes of a product. The numbers of one place may be an image's, channel by channel, which then divide them."""
    size = known.size(inputs)
    places = _rows_per_sample(known, size)
    called = "sequence" if "sequence" in known.block.dimensions else "rows"
    return (
        known.batch,
        Axis("places", places, called=called),
        known.along("rows", inputs),
        known.along("columns", outputs),
    )


def _linear(built: _Builder) -> _Flow:
    known = built.known
    axes = _layer_axes(known, "inputs", "outputs")
    product = built.add("product", ops.Product(axes, known.width, learns=built.learns), *built.entry)
    features = (known.batch, axes[1], known.along("features", "outputs"))
    return _Flow(built.add("relu", ops.Relu(features, known.width), product))


def _class_head(built: _Builder) -> _Flow:
    """A head over ``inputs`` numbers; where more come in and no sequence says why, their mean is taken first."""
    known = built.known
    entry, places = built.entry, _rows_per_sample(known, known.size("inputs"))
    if "sequence" not in known.block.dimensions and places > 1:
        side = math.isqrt(places)
        image = (known.batch, Axis("places", side, side, "side"), known.along("features", "inputs"))
        entry = (built.add("pool", ops.AveragePool(image, known.width), *entry),)
        places = 1
    batch = (known.batch, Axis("places", places, called="sequence"))
    axes = (*batch, known.along("rows", "inputs"), known.along("columns", "vocabulary"))
    logits = built.add("output", ops.Product(axes, known.width), *entry)
    return _Flow(built.add("loss", ops.Loss((*batch, known.along("features", "vocabulary")), known.width), logits))


def _value_head(built: _Builder) -> _Flow:
    known = built.known
    axes = _layer_axes(known, "inputs", "outputs")
    values = built.add("product", ops.Product(axes, known.width), *built.entry)
    features = (known.batch, axes[1], known.along("features", "outputs"))
    return _Flow(built.add("loss", ops.Activation(features, known.width), values))


def _concatenation(built: _Builder) -> _Flow:
    known = built.known
    join = ops.Concatenation((known.batch,), known.width, sample_numbers=sum(known.taken) // known.width)
    return _Flow(built.add("join", join, *(flow.main for flow in built.inputs)))


def _recurrent(built: _Builder) -> _Flow:
    known = built.known
    inputs, cells = known.size("inputs"), known.size("cells")
    shared = math.gcd(inputs, cells)  # a share of the rows takes one of the input and one of the state
    axes = (known.batch, Axis("rows", shared, inputs // shared, "inputs"), known.along("columns", "cells"))
    cell = ops.Recurrent(axes, known.width, built.learns, steps=known.size("sequence"))
    return _Flow(built.add("cell", cell, *built.entry))


# Images: [samples, rows of pixels, channels].


def _image_axes(known: _BlockNumbers, side: int, *more: Axis) -> tuple[Axis, ...]:
    return (known.batch, Axis("places", side, side, "side"), *more)


def _relu(built: _Builder, name: str, side: int, channels: Axis, *after: str) -> str:
    features = replace(channels, name="features")
    return built.add(name, ops.Relu(_image_axes(built.known, side, features), built.known.width), *after)


def _pooled(built: _Builder, side: int, channels: Axis, *after: str) -> str:
    features = replace(channels, name="features")
    return built.add("pool", ops.MaxPool(_image_axes(built.known, side, features), built.known.width), *after)


def _convolution(built: _Builder) -> _Flow:
    known = built.known
    side, outputs = known.size("side"), known.along("columns", "outputs")
    axes = _image_axes(known, side, known.along("rows", "inputs"), outputs)
    layer = ops.Convolution(axes, known.width, built.learns, bias=True)
    last = _relu(built, "relu", side, outputs, built.add("convolution", layer, *built.entry))
    halved = known.given * 4 == known.width * side * side * outputs.size
    return _Flow(_pooled(built, side // 2, outputs, last) if halved else last)


def _normed(
    built: _Builder,
    name: str,
    side: int,
    rows: Axis,
    columns: Axis,
    source: Sequence[str],
    *,
    kernel: int,
    stride: int = 1,
) -> str:
    """A convolution and its batch norm; ``side`` is that of its output."""
    known = built.known
    axes = _image_axes(known, side, rows, columns)
    layer = ops.Convolution(axes, known.width, bool(source) and built.learns, kernel=kernel, stride=stride)
    made = built.add(name, layer, *source)
    features = replace(columns, name="features")
    return built.add(f"{name}-norm", ops.BatchNorm(_image_axes(known, side, features), known.width), made)


def _stem(built: _Builder) -> _Flow:
    known = built.known
    side = known.size("side") // 2
    channels = Axis("columns", known.given // (known.width * (side // 2) ** 2), called="channels")
    normed = _normed(built, "convolution", side, Axis("rows", 3), channels, built.entry, kernel=7, stride=2)
    return _Flow(_pooled(built, side // 2, channels, _relu(built, "relu", side, channels, normed)))


def _bottleneck(built: _Builder) -> _Flow:
    known = built.known
    inputs, inner, outputs = (known.along("rows", name) for name in ("inputs", "inner", "outputs"))
    side = known.size("side")
    after = math.isqrt(known.given // (known.width * outputs.size)) if known.given else side
    stride, last = side // after, Axis("columns", outputs.size, called="outputs")
    middle = Axis("columns", inner.size, called="inner")
    first = _normed(built, "first", side, inputs, middle, built.entry, kernel=1)
    first = _relu(built, "first-relu", side, middle, first)
    second = _normed(built, "second", after, inner, middle, [first], kernel=3, stride=stride)
    second = _relu(built, "second-relu", after, middle, second)
    third = _normed(built, "third", after, inner, last, [second], kernel=1)
    aside = built.entry
    if inputs.size != outputs.size or stride > 1:
        aside = (_normed(built, "aside", after, inputs, last, built.entry, kernel=1, stride=stride),)
    features = Axis("features", outputs.size, called="outputs")
    total = built.add("add", ops.Add(_image_axes(known, after, features), known.width), third, *aside)
    return _Flow(_relu(built, "relu", after, last, total))


_KINDS: dict[tuple[str, tuple[str, ...]], Callable[[_Builder], _Flow]] = {
    ("attention", ("heads", "hidden", "sequence")): _attention,
    ("cross-attention", ("heads", "hidden", "memory", "sequence")): _cross_attention,
    ("ffn", ("ffn", "hidden", "sequence")): _feed_forward,
    ("norm", ("hidden", "sequence")): _norm_alone,
    ("embedding", ("hidden", "sequence", "vocabulary")): _embedding,
    ("embedding", ("hidden", "lookups", "vocabulary")): _embedding,
    ("head", ("hidden", "sequence", "vocabulary")): _vocabulary_head,
    ("patch-embedding", ("hidden", "patch", "sequence")): _patch_embedding,
    ("pool", ("hidden", "outputs", "sequence")): _token_pool,
    ("linear", ("inputs", "outputs")): _linear,
    ("head", ("inputs", "vocabulary")): _class_head,
    ("head", ("inputs", "sequence", "vocabulary")): _class_head,
    ("head", ("inputs", "outputs")): _value_head,
    ("concatenation", ("outputs",)): _concatenation,
    ("lstm", ("cells", "inputs", "sequence")): _recurrent,
    ("convolution", ("inputs", "outputs", "side")): _convolution,
    ("stem", ("side",)): _stem,
    ("bottleneck", ("inner", "inputs", "outputs", "side")): _bottleneck,
}
"""How to cut a block, by its kind of operator and the names of its dimensions."""
