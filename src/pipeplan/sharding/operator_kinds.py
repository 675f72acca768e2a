"""The kinds of operators: their axes, and what one share of each costs.

Last come blocks as single operators: with their profile's costs, or, where the executor runs one operator, as it runs
it. What is split inside of a block is summed before it ends, and a block keeps all it needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import ClassVar

from pipeplan.costs import operators as forms
from pipeplan.costs.blocks import block_costs
from pipeplan.costs.devices import DevicePreset, Kernel
from pipeplan.costs.layouts import ANY, Tensor, groups_along
from pipeplan.costs.operators import Operator
from pipeplan.costs.resharding import Resharding
from pipeplan.costs.wide_groups import GroupSizes, groups_on_mesh, row_at
from pipeplan.errors import UsageError
from pipeplan.files import Block, CostRow
from pipeplan.files.row_messages import RowMessages
from pipeplan.sharding.operators import (
    IMAGE,
    Axis,
    InnerExchange,
    Map,
    Numbers,
    Splits,
    Splittable,
    Times,
    sample_splits,
    tokens,
)
from pipeplan.workload.mesh import EXPERTS, PLACES, SAMPLES, SHARDS

_FLOAT32 = 4
_INT64 = 8


@dataclass(frozen=True)
class Product(Splittable):
    """A matrix product with a weight: [samples, places, rows] to [samples, places, columns]."""

    bias: bool = True

    kind = "product"
    inputs = (("samples", "places", "rows"),)
    output = ("samples", "places", "columns")
    weighted = frozenset({"rows", "columns"})

    def share(self, numbers: Numbers) -> Operator:
        layer = forms.linear(tokens(numbers), numbers["rows"], numbers["columns"], self.width, bias=self.bias)
        return layer if self.learns else replace(layer, input_grad=())


@dataclass(frozen=True)
class Convolution(Splittable):
    """A convolution of images: places are rows of the output, rows input channels, columns output channels.

    Where the rows of images are split, neighbours hand each other the edges that the kernel reaches over.
    """

    kernel: int = 3
    stride: int = 1
    bias: bool = False

    kind = "convolution"
    inputs = (("samples", "places", "rows"),)
    output = ("samples", "places", "columns")
    weighted = frozenset({"rows", "columns"})

    def share(self, numbers: Numbers) -> Operator:
        layer = forms.convolution(
            tokens(numbers),  # each pixel of the output as an image of its own, whose stride it is as large as
            self.stride,
            numbers["rows"],
            numbers["columns"],
            self.width,
            kernel=self.kernel,
            stride=self.stride,
            bias=self.bias,
        )
        return layer if self.learns else replace(layer, input_grad=layer.input_grad[1:])

    def entry_bytes(self, numbers: Numbers) -> int:
        return self.stride**2 * super().entry_bytes(numbers)

    def exchanges(self, numbers: Numbers) -> tuple[InnerExchange, ...]:
        length = self.axis("places").unit * self.stride
        edges = self.kernel // 2 * length * numbers["samples"] * numbers["rows"] * self.width
        return (InnerExchange("places", "neighbours", edges, 2, 2),) if edges else ()


@dataclass(frozen=True)
class Norm(Splittable):
    """A norm of each token over its features: a mean and a deviation, summed over shares of the features."""

    bias: bool = True

    kind = "norm"
    weighted = frozenset({"features"})

    def share(self, numbers: Numbers) -> Operator:
        return forms.norm(tokens(numbers), numbers["features"], self.width, bias=self.bias)

    def exchanges(self, numbers: Numbers) -> tuple[InnerExchange, ...]:
        return (InnerExchange("features", "all_reduce", 2 * _FLOAT32 * tokens(numbers)),)


@dataclass(frozen=True)
class BatchNorm(Splittable):
    """A norm of each channel over samples and pixels, whose statistics are summed over shares of these."""

    kind = "batch-norm"
    weighted = frozenset({"features"})

    def share(self, numbers: Numbers) -> Operator:
        return forms.batch_norm(tokens(numbers), 1, numbers["features"], self.width)

    def exchanges(self, numbers: Numbers) -> tuple[InnerExchange, ...]:
        size = 2 * _FLOAT32 * numbers["features"]
        return tuple(InnerExchange(axis, "all_reduce", size) for axis in ("samples", "places"))


@dataclass(frozen=True)
class Activation(Splittable):
    """An element-wise function that keeps its input."""

    kind = "element-wise"

    def share(self, numbers: Numbers) -> Operator:
        return forms.activation(tokens(numbers) * numbers["features"], self.width)


@dataclass(frozen=True)
class Relu(Splittable):
    """An element-wise function that keeps its output."""

    kind = "element-wise"
    keeps: ClassVar[tuple[bool, ...]] = (False,)
    keeps_output = True

    def share(self, numbers: Numbers) -> Operator:
        return forms.relu(tokens(numbers) * numbers["features"], self.width)


@dataclass(frozen=True)
class Add(Splittable):
    """The sum of two tensors."""

    kind = "element-wise"
    inputs = (IMAGE, IMAGE)
    keeps = (False, False)

    def share(self, numbers: Numbers) -> Operator:
        return forms.add(tokens(numbers) * numbers["features"], self.width)


@dataclass(frozen=True)
class MaxPool(Splittable):
    """The largest around every second pixel of every second row; places are rows of the output."""

    kind = "pool"

    def share(self, numbers: Numbers) -> Operator:
        return forms.max_pool(tokens(numbers), 2, numbers["features"], self.width)

    def inside_bytes(self, numbers: Numbers) -> int:
        return _INT64 * tokens(numbers) * numbers["features"]  # where the largest were


@dataclass(frozen=True)
class AveragePool(Splittable):
    """The mean over places; shares of them leave a partial sum."""

    kind = "pool"
    output = ("samples", None, "features")
    keeps = (False,)

    def share(self, numbers: Numbers) -> Operator:
        numbers_in, given = tokens(numbers) * numbers["features"], numbers["samples"] * numbers["features"]
        kernel = Kernel(numbers_in, (numbers_in + given) * self.width)
        return Operator(forward=(kernel,), input_grad=(kernel,))


@dataclass(frozen=True)
class FirstPlace(Splittable):
    """A view of the first place of each sample; who does not have it adds nothing to the partial sum."""

    kind = "pool"
    output = ("samples", None, "features")
    keeps = (False,)

    def share(self, numbers: Numbers) -> Operator:
        return Operator()


@dataclass(frozen=True)
class Concatenation(Splittable):
    """Several tensors joined along places or features, which therefore stay whole; ``sample_numbers`` of a sample."""

    sample_numbers: int = 1

    kind = "element-wise"
    inputs = (("samples", None, None),)
    output = ("samples", None, None)
    keeps = (False,)

    def share(self, numbers: Numbers) -> Operator:
        return forms.concatenate(numbers["samples"] * self.sample_numbers, self.width)

    def tensor(self) -> Tensor:
        samples = self.axis("samples").size
        return Tensor((samples, ANY, ANY), samples * self.sample_numbers * self.width)


@dataclass(frozen=True)
class Attention(Splittable):
    """Fused self-attention of [samples, places, heads * 3 head sizes]: queries, keys and values of a head together.

    Shares of the places gather keys and values, and sum their gradients.
    """

    head_size: int = 64
    causal: bool = False

    kind = "attention"
    keeps_output = True

    def share(self, numbers: Numbers) -> Operator:
        samples, queries, heads = numbers["samples"], numbers["places"], numbers["features"] // self.head_size
        keys = self.axis("places").size * self.axis("places").unit
        return forms.attention_core(samples, queries, keys, heads, self.head_size, self.width, causal=self.causal)

    def inside_bytes(self, numbers: Numbers) -> int:
        return _FLOAT32 * tokens(numbers) * numbers["features"] // self.head_size

    def exchanges(self, numbers: Numbers) -> tuple[InnerExchange, ...]:
        size = 2 * numbers["samples"] * self.axis("places").share(1) * numbers["features"] * self.width
        return (
            InnerExchange("places", "all_gather", size, 1, 1),
            InnerExchange("places", "reduce_scatter", size, 0, 1),
        )


@dataclass(frozen=True)
class CrossAttention(Splittable):
    """Fused attention of queries to the keys and values of another sequence, which is whole on every device."""

    head_size: int = 64
    memory: int = 1

    kind = "attention"
    inputs = (IMAGE, ("samples", None, "features"))
    keeps = (True, True)
    keeps_output = True

    def share(self, numbers: Numbers) -> Operator:
        samples, queries, heads = numbers["samples"], numbers["places"], numbers["features"] // self.head_size
        return forms.attention_core(samples, queries, self.memory, heads, self.head_size, self.width)

    def inside_bytes(self, numbers: Numbers) -> int:
        return _FLOAT32 * tokens(numbers) * numbers["features"] // self.head_size


@dataclass(frozen=True)
class Embedding(Splittable):
    """Rows of a table by indices: [samples, places] to [samples, places, columns]; ``rows`` are its entries."""

    kind = "embedding"
    inputs = (("samples", "places", None),)
    output = ("samples", "places", "columns")
    weighted = frozenset({"rows", "columns"})
    keeps = (False,)

    def share(self, numbers: Numbers) -> Operator:
        return forms.embedding(numbers["samples"], numbers["places"], numbers["rows"], numbers["columns"], self.width)

    def entry_bytes(self, numbers: Numbers) -> int:
        return _INT64 * tokens(numbers)


@dataclass(frozen=True)
class Loss(Splittable):
    """Cross-entropy of [samples, places, classes]; shares of the classes sum three numbers per token."""

    kind = "loss"
    output = (None, None, None)
    combined = frozenset({"samples", "places", "features"})
    keeps = (False,)

    def share(self, numbers: Numbers) -> Operator:
        return forms.vocabulary_loss(tokens(numbers), numbers["features"], self.width)

    def exchanges(self, numbers: Numbers) -> tuple[InnerExchange, ...]:
        return (InnerExchange("features", "all_reduce", 3 * _FLOAT32 * tokens(numbers), 1, 0),)


@dataclass(frozen=True)
class Recurrent(Splittable):
    """An LSTM layer over the ``steps`` of each sample: rows are numbers of its input, columns its cells.

    Shares of the cells gather the state in every step and scatter its gradient; shares of the rows, which take a share
    of the state too, sum the gates and gather the state's gradient.
    """

    steps: int = 1

    kind = "recurrent"
    inputs = (("samples", None, "rows"),)
    output = ("samples", None, "columns")
    weighted = frozenset({"rows", "columns"})
    combined = frozenset({"rows"})

    def share(self, numbers: Numbers) -> Operator:
        cells = self.axis("columns").share(1)
        parts = self.axis("rows").share(1) // numbers["rows"]
        layer = forms.recurrent(
            numbers["samples"],
            self.steps,
            numbers["rows"],
            cells,
            self.width,
            shards=cells // numbers["columns"],
            first=not self.learns,
            state_inputs=cells // parts,
        )
        return replace(layer, forward_exchanges=(), input_grad_exchanges=())

    def entry_bytes(self, numbers: Numbers) -> int:
        return self.steps * super().entry_bytes(numbers)

    def tensor(self) -> Tensor:
        samples, cells = self.axis("samples").share(1), self.axis("columns").share(1)
        return Tensor((samples, 1, cells), samples * self.steps * cells * self.width)

    def exchanges(self, numbers: Numbers) -> tuple[InnerExchange, ...]:
        state = numbers["samples"] * self.axis("columns").share(1) * self.width
        gates, own = (count * numbers["samples"] * numbers["columns"] * self.width for count in (4, 1))
        return (
            InnerExchange("columns", "all_gather", state, self.steps, 0),
            InnerExchange("columns", "reduce_scatter", state, 0, self.steps),
            InnerExchange("rows", "all_reduce", gates, self.steps, 0),
            InnerExchange("rows", "all_gather", own, 0, self.steps),
        )


@dataclass(frozen=True)
class Data(Splittable):
    """Inputs of the model as they are loaded: samples over all devices, which is data parallelism (section 4.2)."""

    devices: int = 1
    sample_bytes: int = 0

    kind = "data"
    inputs = (("samples", None, None),)
    output = ("samples", None, None)
    keeps = (False,)

    def allows(self, splits: Splits) -> bool:
        return (splits[SAMPLES].extent if SAMPLES in splits else 1) == self.devices

    def share(self, numbers: Numbers) -> Operator:
        return Operator()

    def tensor(self) -> Tensor:
        samples = self.axis("samples").size
        return Tensor((samples, ANY, ANY), samples * self.sample_bytes)


_SCALED = (
    "forward_ns",
    "backward_ns",
    "input_grad_ns",
    "weight_grad_ns",
    "activation_bytes",
    "weight_grad_bytes",
    "workspace_bytes",
)


@dataclass(frozen=True)
class WholeBlock(Splittable):
    """A block by its rows: samples can be split, and what its rows split for several devices.

    That are ``shards``, inside of which collectives are in the rows' times, and inputs and output whole on each of
    them; ``places`` of a sequence, of which each device has an early and a late piece, with keys and values of the
    others; and ``experts``, whose devices have samples of their own. Two devices of four that share places have the
    two pieces together that one of two has, so that layouts nest as if each had one run of places.
    ``messages`` are the profile's, and ``rings`` the (shards, places) whose rows have keys and values go around one.
    Of what its rows count of a sample ``uncounted_bytes`` are held on the way to ``held_ports``, or not at all.
    """

    block: Block = field(kw_only=True, hash=False)
    sample_bytes: int = field(kw_only=True)
    messages: tuple[RowMessages, ...] = field(kw_only=True, default=(), compare=False, repr=False)
    rings: frozenset[tuple[int, int]] = field(kw_only=True, default=frozenset(), compare=False)
    held_ports: frozenset[int] = field(kw_only=True, default=frozenset())
    uncounted_bytes: int = field(kw_only=True, default=0)

    kind = "block"
    inputs = (("samples", "places", None),)
    output: ClassVar[Map] = ("samples", "places", None)
    weighted = frozenset({"shards"})
    combined = frozenset({"shards", "experts"})
    keeps = (False,)  # its rows count them

    def allows(self, splits: Splits) -> bool:
        sizes = self.sizes_of(self.numbers({name: split.extent for name, split in splits.items()}))
        if sizes not in _sizes(self.block):
            return False
        if sizes.context > 1 and self.rings and (sizes.shards, sizes.context) not in self.rings:
            return False  # keys and values of a stage come in one way
        if sizes.expert == 1:
            return True
        together = sample_splits(splits)  # a layout has one split of samples
        return len(together) == 1 and self.axis(SAMPLES).size % together[0].extent == 0 and sizes.width == 1

    def share(self, numbers: Numbers) -> Operator:
        return Operator()

    def standing(self, splits: Splits, resharding: Resharding) -> Splittable:
        own = {axis: [splits[name]] for axis, name in _GROUPS.items() if name in splits}
        groups = {axis: groups_along(along, resharding.devices) for axis, along in own.items()}
        wide = groups_on_mesh(resharding.cluster, groups)
        if wide is None:
            return self
        sizes = self.sizes_of(self.numbers({name: split.extent for name, split in splits.items()}))
        rows = tuple(
            row
            if row.messages is None or GroupSizes.of(row) != sizes
            else row_at(row, self.messages[row.messages], wide, around=(row.shards, row.context) in self.rings)[0]
            for row in self.block.costs
        )
        return replace(self, block=self.block.model_copy(update={"costs": rows}))

    def times(self, numbers: Numbers, device: DevicePreset) -> Times:
        row = self._row(numbers)
        if row.input_grad_ns is None or row.weight_grad_ns is None:
            return Times(row.forward_ns, row.backward_ns or 0, 0)
        return Times(row.forward_ns, row.input_grad_ns, row.weight_grad_ns)

    def entry_bytes(self, numbers: Numbers) -> int:
        return self.width * self.samples_of(numbers)

    def keeps_input(self, port: int) -> bool:
        return port in self.held_ports

    def inside_bytes(self, numbers: Numbers) -> int:
        uncounted = self.uncounted_bytes * self.samples_of(numbers) // self.sizes_of(numbers).context
        return max(0, self._row(numbers).activation_bytes - uncounted)

    def workspace_bytes(self, numbers: Numbers) -> int:
        return self._row(numbers).workspace_bytes

    def deferred_bytes(self, numbers: Numbers) -> int | None:
        row = self._row(numbers)
        return None if row.input_grad_ns is None or row.weight_grad_ns is None else row.weight_grad_bytes

    def tensor(self) -> Tensor:
        samples = self.axis("samples").size
        return Tensor((samples, ANY, ANY), samples * self.sample_bytes)

    def sizes_of(self, numbers: Numbers) -> GroupSizes:
        """Over how many devices its rows split it, its sequences and its experts."""
        parts = {axis.name: axis.size // numbers[axis.name] for axis in self.axes}
        return GroupSizes(parts[SHARDS], parts.get(PLACES, 1), parts.get(EXPERTS, 1), 1)

    def samples_of(self, numbers: Numbers) -> int:
        """Samples on a device, whose own they are where it shares experts."""
        return numbers[SAMPLES] // self.sizes_of(numbers).expert

    def _row(self, numbers: Numbers) -> CostRow:
        return row_for(self.block, self.samples_of(numbers), self.sizes_of(numbers))


_GROUPS = {"shards": SHARDS, "context": PLACES, "words": EXPERTS}
"""The axis along which those lie that exchange something, as rows call them."""


@dataclass(frozen=True)
class WordTable(WholeBlock):
    """An embedding: as any block, and by its width, for which its times are taken to grow in proportion."""

    output = ("samples", "places", "hidden")
    weighted = frozenset({"shards", "hidden"})

    def times(self, numbers: Numbers, device: DevicePreset) -> Times:
        part = numbers["hidden"] / self.axis("hidden").size
        return Times(*(part * each for each in super().times(numbers, device)))

    def inside_bytes(self, numbers: Numbers) -> int:
        return super().inside_bytes(numbers) * numbers["hidden"] // self.axis("hidden").size

    def deferred_bytes(self, numbers: Numbers) -> int | None:
        whole = super().deferred_bytes(numbers)
        return None if whole is None else whole * numbers["hidden"] // self.axis("hidden").size

    def tensor(self) -> Tensor:
        samples, hidden = (self.axis(name).size for name in ("samples", "hidden"))
        return Tensor((samples, ANY, hidden), samples * self.sample_bytes)


def shards_axis(block: Block) -> Axis:
    """The axis along which a block's rows for several shards split it."""
    return Axis("shards", math.lcm(*(sizes.shards for sizes in _sizes(block))), called="shards")


def shared_axes(block: Block) -> tuple[Axis, ...]:
    """The axes along which devices share its sequences and its experts by rows that it has for that."""
    most = {PLACES: math.lcm(*(sizes.context for sizes in _sizes(block)))}
    if block.expert_parameters:
        most[EXPERTS] = math.lcm(*(sizes.expert for sizes in _sizes(block)))
    return tuple(Axis(name, size, called=name) for name, size in most.items() if size > 1)


WHOLE = GroupSizes(1, 1, 1, 1)
"""On one device."""


def profiled_sizes(block: Block, sizes: GroupSizes = WHOLE) -> tuple[int, int] | None:
    """The least and most samples that the block has rows for; None without rows for such groups."""
    samples = [row.microbatch_size for row in block.costs if GroupSizes.of(row) == sizes and _plain(row)]
    return (min(samples), max(samples)) if samples else None


def grows_steeply(block: Block, sizes: GroupSizes = WHOLE) -> bool:
    """Whether, somewhere between a block's rows, time grows more than in proportion to samples."""
    rows = sorted(
        (row.microbatch_size, row.forward_ns + row.whole_backward_ns)
        for row in block.costs
        if GroupSizes.of(row) == sizes and _plain(row)
    )
    return any(after * size > before * more for (size, before), (more, after) in pairwise(rows))


def is_profiled(operation: Splittable, splits: Splits) -> bool:
    """A rule: blocks run on each device between sizes that they have rows for, as in every other plan."""
    if not isinstance(operation, WholeBlock):
        return True
    numbers = operation.numbers({name: split.extent for name, split in splits.items()})
    sizes = profiled_sizes(operation.block, operation.sizes_of(numbers))
    return sizes is not None and sizes[0] <= operation.samples_of(numbers) <= sizes[1]


def row_for(block: Block, samples: int, sizes: GroupSizes = WHOLE) -> CostRow:
    """The block's costs for ``samples``; outside of its rows' sizes, the nearest row in proportion."""
    known = profiled_sizes(block, sizes)
    if known is None:
        raise UsageError(
            f"block {block.id!r} has no costs for {sizes.shards} shards without recomputation; profile it with them"
        )
    nearest = min(max(samples, known[0]), known[1])
    row = block_costs(block, nearest, sizes.shards, context=sizes.context, expert=sizes.expert)
    if nearest == samples:
        return row
    changed = {name: round(value * samples / nearest) for name in _SCALED if (value := getattr(row, name)) is not None}
    return row.model_copy(update={**changed, "microbatch_size": samples})


def _plain(row: CostRow) -> bool:
    return not row.recompute and not row.configuration


def _sizes(block: Block) -> set[GroupSizes]:
    """Of which groups it has rows without recomputation; those that split experts are none of a mesh."""
    return {sizes for row in block.costs if _plain(row) and (sizes := GroupSizes.of(row)).expert_shards == 1}


@dataclass(frozen=True)
class ExecutedLayer(Product):
    """A matrix product that shares of the rows sum."""

    kind = "layer"
    combined = frozenset({"rows"})

    def exchanges(self, numbers: Numbers) -> tuple[InnerExchange, ...]:
        return (InnerExchange("rows", "all_reduce", _given_bytes(self, numbers), 1, 0),)


@dataclass(frozen=True)
class ExecutedBentLayer(ExecutedLayer):
    """With a function of each number that keeps its output."""

    keeps_output = True


@dataclass(frozen=True)
class ExecutedConvolution(Convolution):
    """A convolution that shares of the rows sum, of images whose pixels are never split."""

    combined = frozenset({"rows"})

    def exchanges(self, numbers: Numbers) -> tuple[InnerExchange, ...]:
        return (InnerExchange("rows", "all_reduce", _given_bytes(self, numbers), 1, 0),)


@dataclass(frozen=True)
class ExecutedRecurrent(Recurrent):
    """An LSTM layer; nothing is before the first step, whose state has no gradient."""

    def exchanges(self, numbers: Numbers) -> tuple[InnerExchange, ...]:
        return tuple(each._replace(backward=max(each.backward - 1, 0)) for each in super().exchanges(numbers))


def _given_bytes(operation: Product | Convolution, numbers: Numbers) -> int:
    return operation.width * tokens(numbers) * numbers["columns"]


@dataclass(frozen=True)
class _Alone(Splittable):
    """An operator that keeps its own copy of everything its backward needs, each in its layout."""

    keeps: ClassVar[tuple[bool, ...]] = (False,)
    keeps_output = False

    def inside_bytes(self, numbers: Numbers) -> int:
        return self.share(numbers).saved_bytes


@dataclass(frozen=True)
class _LayerAlone(_Alone, ExecutedLayer):
    """A matrix product."""


@dataclass(frozen=True)
class _BentLayerAlone(_Alone, ExecutedBentLayer):
    """A matrix product whose output is kept."""

    def inside_bytes(self, numbers: Numbers) -> int:
        return super().inside_bytes(numbers) + _given_bytes(self, numbers)


@dataclass(frozen=True)
class _ConvolutionAlone(_Alone, ExecutedConvolution):
    """A convolution."""


@dataclass(frozen=True)
class _RecurrentAlone(_Alone, ExecutedRecurrent):
    """An LSTM layer."""


@dataclass(frozen=True)
class _BatchNormAlone(_Alone, BatchNorm):
    """A norm over the batch."""


@dataclass(frozen=True)
class _ReluAlone(_Alone, Relu):
    """A function that keeps its output."""

    def inside_bytes(self, numbers: Numbers) -> int:
        return self.width * tokens(numbers) * numbers["features"]


@dataclass(frozen=True)
class _MaxPoolAlone(_Alone, MaxPool):
    """The largest around every second pixel of every second row."""


@dataclass(frozen=True)
class _NormAlone(_Alone, Norm):
    """A norm."""


@dataclass(frozen=True)
class _AttentionAlone(_Alone, Attention):
    """The middle of attention."""


@dataclass(frozen=True)
class _ActivationAlone(_Alone, Activation):
    """A function of each number."""


_ALONE: dict[type[Splittable], type[Splittable]] = {
    ExecutedLayer: _LayerAlone,
    ExecutedBentLayer: _BentLayerAlone,
    ExecutedConvolution: _ConvolutionAlone,
    ExecutedRecurrent: _RecurrentAlone,
    BatchNorm: _BatchNormAlone,
    Relu: _ReluAlone,
    MaxPool: _MaxPoolAlone,
    Norm: _NormAlone,
    Attention: _AttentionAlone,
    Activation: _ActivationAlone,
}
"""Operators whose backward needs what they take or give, as they keep it by themselves."""


def single_operator(
    block: Block, samples: int, width: int, taken: Sequence[int], *, learns: bool = True, alone: bool = True
) -> Splittable | None:
    """The operator that a block is, by its kind and the names of its dimensions; None if it is not known to be one.

    Args:
        block: of a profile.
        samples: of a micro-batch.
        width: bytes per number.
        taken: bytes per sample of each input.
        learns: whether something before it needs a gradient.
        alone: whether it keeps its own copies of what its backward needs, instead of tensors between operators.
    """
    make = _KINDS.get((block.operator, tuple(sorted(block.dimensions))))
    batch = Axis("samples", samples, called="samples")
    made = make(block.dimensions, batch, width, sum(taken), learns) if make is not None else None
    if made is None or not alone or type(made) not in _ALONE:
        return made
    return _ALONE[type(made)](**{each.name: getattr(made, each.name) for each in fields(made)})


def _linear(sizes: Numbers, batch: Axis, width: int, taken: int, learns: bool) -> Splittable | None:
    """With a function of each number after it; more places than one are for the block to know."""
    if taken > sizes["inputs"] * width:
        return None
    return ExecutedBentLayer(_product_axes(sizes, batch, 1), width, learns=learns)


def _of_images(sizes: Numbers, batch: Axis, width: int, taken: int, learns: bool) -> Splittable:
    """A linear layer with a function of each number after it, of images' numbers channel by channel."""
    _, places, _, columns = _product_axes(sizes, batch, 1)
    rows = Axis("rows", sizes["channels"], sizes["inputs"] // sizes["channels"], "channels")
    return ExecutedBentLayer((batch, places, rows, columns), width, learns=learns)


def _convolution(sizes: Numbers, batch: Axis, width: int, taken: int, learns: bool) -> Splittable:
    rows, columns = Axis("rows", sizes["inputs"], called="inputs"), Axis("columns", sizes["outputs"], called="outputs")
    axes, (kernel, stride) = (batch, _pixels(sizes), rows, columns), (sizes["kernel"], sizes["stride"])
    return ExecutedConvolution(axes, width, learns=learns, kernel=kernel, stride=stride)


def _of_channels(operation: type[Splittable]) -> Callable[[Numbers, Axis, int, int, bool], Splittable]:
    """An operator that knows only of an image's channels."""

    def made(sizes: Numbers, batch: Axis, width: int, taken: int, learns: bool) -> Splittable:
        axes = batch, _pixels(sizes), Axis("features", sizes["hidden"], called="hidden")
        return operation(axes, width, learns=learns)

    return made


def _pixels(sizes: Numbers) -> Axis:
    """All of an image, which is not split."""
    return Axis("places", 1, sizes["side"] ** 2)


def _recurrent(sizes: Numbers, batch: Axis, width: int, taken: int, learns: bool) -> Splittable:
    shared = math.gcd(sizes["inputs"], sizes["cells"])  # a share of the rows takes one of the input and of the state
    rows = Axis("rows", shared, sizes["inputs"] // shared, "inputs")
    axes = batch, rows, Axis("columns", sizes["cells"], called="cells")
    return ExecutedRecurrent(axes, width, learns=learns, steps=sizes["sequence"])


def _product(sizes: Numbers, batch: Axis, width: int, taken: int, learns: bool) -> Splittable:
    return ExecutedLayer(_product_axes(sizes, batch, sizes["sequence"]), width, learns=learns)


def _product_axes(sizes: Numbers, batch: Axis, places: int) -> tuple[Axis, ...]:
    rows, columns = Axis("rows", sizes["inputs"], called="inputs"), Axis("columns", sizes["outputs"], called="outputs")
    return batch, Axis("places", places, called="sequence"), rows, columns


def _attention(sizes: Numbers, batch: Axis, width: int, taken: int, learns: bool) -> Splittable:
    size = sizes["hidden"] // sizes["heads"]
    axes = _image(sizes, batch, Axis("features", sizes["heads"], size, "heads"))
    return Attention(axes, width, learns=learns, head_size=size)


def _of_numbers(operation: type[Splittable]) -> Callable[[Numbers, Axis, int, int, bool], Splittable]:
    """An operator that knows only of features."""

    def made(sizes: Numbers, batch: Axis, width: int, taken: int, learns: bool) -> Splittable:
        return operation(_image(sizes, batch, Axis("features", sizes["hidden"], called="hidden")), width, learns=learns)

    return made


def _loss(sizes: Numbers, batch: Axis, width: int, taken: int, learns: bool) -> Splittable:
    words = Axis("features", sizes["vocabulary"], called="vocabulary")
    return Loss(_image(sizes, batch, words), width, learns=learns)


def _image(sizes: Numbers, batch: Axis, features: Axis) -> tuple[Axis, ...]:
    return batch, Axis("places", sizes["sequence"], called="sequence"), features


_KINDS: dict[tuple[str, tuple[str, ...]], Callable[[Numbers, Axis, int, int, bool], Splittable | None]] = {
    ("linear", ("inputs", "outputs")): _linear,
    ("product", ("inputs", "outputs", "sequence")): _product,
    ("norm", ("hidden", "sequence")): _of_numbers(Norm),
    ("attention-core", ("heads", "hidden", "sequence")): _attention,
    ("activation", ("hidden", "sequence")): _of_numbers(Activation),
    ("add", ("hidden", "sequence")): _of_numbers(Add),
    ("loss", ("sequence", "vocabulary")): _loss,
    ("linear", ("channels", "inputs", "outputs")): _of_images,
    ("convolution", ("inputs", "kernel", "outputs", "side", "stride")): _convolution,
    ("batch-norm", ("hidden", "side")): _of_channels(BatchNorm),
    ("relu", ("hidden", "side")): _of_channels(Relu),
    ("add", ("hidden", "side")): _of_channels(Add),
    ("max-pool", ("hidden", "side")): _of_channels(MaxPool),
    ("mean", ("hidden", "side")): _of_channels(AveragePool),
    ("recurrent", ("cells", "inputs", "sequence")): _recurrent,
}
