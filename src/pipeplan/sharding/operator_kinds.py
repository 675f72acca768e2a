"""The kinds of operators: their axes, and what one share of each costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pipeplan.costs import operators as forms
from pipeplan.costs.devices import Kernel
from pipeplan.costs.operators import Operator
from pipeplan.sharding.layouts import ANY, Tensor
from pipeplan.sharding.operators import IMAGE, InnerExchange, Numbers, Splittable, tokens

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
    keeps = (False,)
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

    def allows(self, extents: Mapping[str, int]) -> bool:
        return extents["samples"] == self.devices

    def share(self, numbers: Numbers) -> Operator:
        return Operator()

    def tensor(self) -> Tensor:
        samples = self.axis("samples").size
        return Tensor((samples, ANY, ANY), samples * self.sample_bytes)
