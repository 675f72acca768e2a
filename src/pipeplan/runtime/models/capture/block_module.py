"""Modules that run the operators of one block, for any number of samples.

``torch.fx.passes.split_module`` was tried in place of code written here (torch 2.13; GPT-2 and T5). Code for any number
of samples survives it, once each block has its own copies of free operations. But it makes a block's parameters into
arguments, under names of the whole module, by which no two layers are alike, and makes masks anew in every call. It
would only save finding what a block takes and gives: about 20 lines of this module.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from pipeplan.runtime.models.capture.functionalize import (
    DTYPE,
    LEAST,
    TRAINING,
    WIDER,
    InTraining,
    Marker,
    OpNode,
    SampleCount,
    leaves_of,
)
from pipeplan.runtime.models.capture.grouping import OpGroup, crossing_of
from pipeplan.runtime.parallel.batch_norms import batch_norm
from pipeplan.runtime.parallel.places import exchange_of
from pipeplan.runtime.parallel.sharding import Shards
from pipeplan.runtime.parallel.weight_grads import addmm, embedding, linear

_INITIAL_STD = 0.02


@dataclass(frozen=True, slots=True)
class BlockRecipe:
    """How to make a block's module again and again.

    It takes the results of ``crossing``, operations of other blocks, then ``inputs`` of the batch, and gives those of
    ``outputs``. ``parameters`` and ``buffers`` are by the names they have in the block, with their names in the
    captured module; the gradients of those ``deferred`` can wait for W. ``counted`` is (which argument, how often its
    first dimension has the samples), None if no operator needs to know how many there are. In training mode
    ``num_batch_norms`` operators normalise by what samples stand beside each other.
    """

    code: str
    globals: Mapping[str, Any]
    crossing: tuple[OpNode, ...]
    inputs: tuple[OpNode, ...]
    outputs: tuple[OpNode, ...]
    parameters: Mapping[str, str]
    buffers: Mapping[str, str]
    counted: tuple[int, int] | None
    has_constants: bool
    deferred: tuple[str, ...]
    num_batch_norms: int = 0

    def form(self, tensors: Mapping[str, Tensor]) -> Hashable:
        """Equal for recipes that make the same modules, but for the numbers in their parameters."""
        parts = (self.parameters, self.buffers)
        looks = tuple(tuple((own, *_look(tensors[name])) for own, name in names.items()) for names in parts)
        shared = len(set(self.parameters.values())) == len(self.parameters)
        return self.code, looks, self.counted, self.deferred, shared

    def build(self, tensors: Mapping[str, Tensor]) -> CapturedBlock:
        """The module, with copies of the tensors, or made-up numbers where those have no data."""
        block = CapturedBlock(self)
        for own, name in self.parameters.items():
            block.register_parameter(own, nn.Parameter(_copy(tensors[name], own), tensors[name].requires_grad))
        for own, name in self.buffers.items():
            block.register_buffer(own, _copy(tensors[name], own))
        return block


def _look(tensor: Tensor) -> tuple[Hashable, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.requires_grad


class CapturedBlock(nn.Module):
    """Runs a block's operators. What depends on nothing but sizes - masks, positions - is made once and kept.

    A device's share of one exchanges with those that have the others by ``shards``; without, it works alone.
    """

    shards: Shards | None = None

    def __init__(self, recipe: BlockRecipe) -> None:
        super().__init__()
        self._counted, self._has_constants = recipe.counted, recipe.has_constants
        self._deferred = recipe.deferred
        self.num_batch_norms = recipe.num_batch_norms
        self._digest = hashlib.sha256(recipe.code.encode()).hexdigest()[:16]
        self._kept_for: tuple[object, ...] | None = None
        scope = dict(recipe.globals)
        exec(recipe.code, scope)  # generated from the operators of the user's own module, never from a file
        self._body: Callable[..., Any] = scope["body"]
        self._constants: Callable[..., tuple[Tensor, ...]] = scope["constants"]

    def forward(self, *arguments: Tensor) -> Any:
        """The block's outputs for the results of other blocks, then the batch's tensors."""
        samples = 0 if self._counted is None else arguments[self._counted[0]].shape[0] // self._counted[1]
        like = self._like(arguments)
        if self._has_constants:
            self._keep_constants(samples, like)
        return self._body(self, samples, like.dtype, like.device, *arguments)

    def _like(self, arguments: Sequence[Tensor]) -> Tensor:
        """A tensor of the format and the device that the block runs with."""
        known = [*self.parameters(), *arguments]
        return next((each for each in known if each.is_floating_point()), known[0])

    def _keep_constants(self, samples: int, like: Tensor) -> None:
        wanted = (samples, like.dtype, like.device, type(like))
        if self._kept_for != wanted:
            with torch.no_grad():
                made = self._constants(self, samples, like.dtype, like.device)
            for index, tensor in enumerate(made):
                self.register_buffer(f"constant{index}", tensor, persistent=False)
            self._kept_for = wanted

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> CapturedBlock:
        """Moved or converted, constants are made anew: they may depend on the format."""
        self._kept_for = None
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch has it without types
        return self

    @property
    def deferred_weights(self) -> tuple[Tensor, ...]:
        """The weights whose gradients can wait for W."""
        return tuple(self.get_parameter(name) for name in self._deferred)

    def extra_repr(self) -> str:
        """Equal for blocks that run the same operators."""
        return self._digest


def _copy(tensor: Tensor, name: str) -> Tensor:
    if torch.get_default_device().type == "meta":
        return torch.empty_like(tensor, device="meta")
    if tensor.is_meta:
        return _made_up(tensor, name)
    return tensor.detach().clone()


def _made_up(tensor: Tensor, name: str) -> Tensor:
    """Numbers as models have them at the start: small random weights, ones for norms, zeros for biases."""
    empty = torch.empty_like(tensor, device=torch.get_default_device())
    if not tensor.is_floating_point() or name.endswith("bias"):
        return empty.zero_()
    return empty.fill_(1) if tensor.ndim < 2 else empty.normal_(std=_INITIAL_STD)


# From operations to code ------------------------------------------------------------------------------------------


class BlockWriter:
    """Writes a group that hands on these ``outputs`` as two functions: one for constants, one for the rest.

    ``wanted`` are its operations and the free ones they need; groups with equal ``text`` are written the same.
    ``fallback`` is an input of the batch that shows how many samples there are, where a block takes no other samples.
    """

    def __init__(
        self, group: OpGroup, wanted: list[OpNode], outputs: tuple[OpNode, ...], fallback: OpNode | None
    ) -> None:
        self.group, self.wanted, self.outputs, self.fallback = group, wanted, outputs, fallback
        self.own = set(group.operations)
        self.crossing = tuple(crossing_of(wanted))
        self.places: dict[OpNode, int] = {}
        self.text = self._text()
        self.parameters: dict[str, str] = {}
        self.buffers: dict[str, str] = {}

    def _text(self) -> Hashable:
        """All that is written, with operations and tensors by when they first occur: kept as ``places``."""
        lines = [self._named(op) for op in self.crossing]
        lines += [(self._named(op), op in self.own, self._line(op)) for op in self.wanted]
        return (*lines, *map(self._named, self.outputs))

    def _line(self, op: OpNode) -> Hashable:
        return op.target, self._spelled(op.arguments), self._spelled(op.keywords)

    def _spelled(self, value: Any) -> Hashable:
        """A value of arguments, so that 1, 1.0 and True differ."""
        if isinstance(value, OpNode):
            return self._named(value)
        if isinstance(value, (tuple, list)):
            return (type(value), *map(self._spelled, value))
        if isinstance(value, dict):
            return tuple((key, self._spelled(each)) for key, each in value.items())
        return type(value), repr(value)

    def _named(self, op: OpNode) -> Hashable:
        if op in self.places:
            return self.places[op]
        self.places[op] = len(self.places)
        shown = (op.name.removeprefix(f"{self.group.path}."), op.needs_grad) if op.kind != "call" else ()
        return (self.places[op], op.kind, op.per_sample, op.shape, *shown)

    def like(self, other: BlockWriter, recipe: BlockRecipe) -> BlockRecipe:
        """The recipe of a group with the same text, by that of the other one."""
        own = list(self.places)
        named = {(op.kind, op.name): own[place] for op, place in other.places.items() if op.kind != "call"}
        return replace(
            recipe,
            crossing=self.crossing,
            inputs=tuple(own[other.places[op]] if op in other.places else op for op in recipe.inputs),
            outputs=self.outputs,
            parameters={key: named["parameter", name].name for key, name in recipe.parameters.items()},
            buffers={key: self._held(named, name).name for key, name in recipe.buffers.items()},
        )

    @staticmethod
    def _held(named: Mapping[tuple[str, str], OpNode], name: str) -> OpNode:
        return named["buffer", name] if ("buffer", name) in named else named["constant", name]

    def _depending_on_inputs(self) -> set[OpNode]:
        known = set(self.wanted)
        found = {op for op in self.wanted if op.kind == "input" or op in self.own}
        for op in self.wanted:
            if any(source in found or self._is_changing(source, known) for source in op.sources):
                found.add(op)
        return found

    @staticmethod
    def _is_changing(source: OpNode, known: set[OpNode]) -> bool:
        """Whether it is trained, or comes from another block."""
        return source.kind == "parameter" or (source.kind == "call" and source not in known)

    def recipe(self) -> BlockRecipe:
        """What a block is made from."""
        self.of_inputs = self._depending_on_inputs()
        self.deferred = {
            source.name for op in self.wanted if _deferring(op) for source in op.sources if source.kind == "parameter"
        }
        crossing = self.crossing
        inputs = [op for op in self.wanted if op.kind == "input"]
        counts = self._counts()
        counted = self._counter([*crossing, *inputs]) if counts else None
        if counts and counted is None and self.fallback is not None:
            inputs.append(self.fallback)
            counted = self._counter([*crossing, *inputs])
        constants = self._constants()
        body_code, body_scope = self._write("body", (*crossing, *inputs), constants)
        constants_code, constants_scope = self._write_constants(constants)
        return BlockRecipe(
            code=f"{constants_code}\n{body_code}",
            globals=constants_scope | body_scope,
            crossing=crossing,
            inputs=tuple(inputs),
            outputs=self.outputs,
            parameters=self.parameters,
            buffers=self.buffers,
            counted=counted,
            has_constants=bool(constants),
            deferred=tuple(own for own, name in self.parameters.items() if name in self.deferred),
            num_batch_norms=sum(op.operator == "batch_norm" and TRAINING in op.arguments for op in self.own),
        )

    def _counts(self) -> bool:
        """Whether any operator has to know how many samples there are."""
        return any(
            isinstance(each, SampleCount) for op in self.wanted for each in leaves_of((op.arguments, op.keywords))
        )

    @staticmethod
    def _counter(arguments: Sequence[OpNode]) -> tuple[int, int] | None:
        return next(((index, op.per_sample) for index, op in enumerate(arguments) if op.per_sample), None)

    def _constants(self) -> list[OpNode]:
        """Results that do not depend on inputs, and that something that does, takes."""
        last = [source for op in self.wanted if op in self.of_inputs for source in op.sources]
        known = set(self.wanted)
        return [op for op in dict.fromkeys(last) if op in known and op not in self.of_inputs and op.kind == "call"]

    def _write(self, name: str, arguments: Sequence[OpNode], constants: Sequence[OpNode]) -> tuple[str, dict[str, Any]]:
        writer = _BlockModuleGraph(self, arguments)
        for index, op in enumerate(constants):
            writer.known[op] = writer.graph.get_attr(f"constant{index}")
        for op in self.wanted:
            if op in self.of_inputs and op.kind == "call":
                writer.add(op)
        results = tuple(writer.known[op] for op in self.outputs)
        return writer.finish(name, results[0] if len(results) == 1 else results)

    def _write_constants(self, constants: Sequence[OpNode]) -> tuple[str, dict[str, Any]]:
        writer = _BlockModuleGraph(self, ())
        for op in self.wanted:
            if op not in self.of_inputs and op.kind == "call":
                writer.add(op)
        return writer.finish("constants", tuple(writer.known[op] for op in constants))

    def attribute(self, op: OpNode) -> str:
        """The name that a parameter or buffer has in the block: relative to its layer."""
        prefix = f"{self.group.path}."
        own = op.name.removeprefix(prefix).replace(".", "_")
        names = self.parameters if op.kind == "parameter" else self.buffers
        while names.get(own, op.name) != op.name:
            own += "_"
        names[own] = op.name
        return own


class _BlockModuleGraph:
    """Collects calls; torch.fx writes them down."""

    def __init__(self, writer: BlockWriter, arguments: Sequence[OpNode]) -> None:
        self.writer, self.graph = writer, fx.Graph()
        self.samples, self.dtype, self.device = (
            self.graph.placeholder(name) for name in ("num_samples", "dtype", "device")
        )
        self.known: dict[OpNode, fx.Node] = {}
        for index, op in enumerate(arguments):
            self.known[op] = self.graph.placeholder(f"given{index}")

    def add(self, op: OpNode) -> None:
        """Append a call."""
        for source in op.sources:
            if source not in self.known:
                self.known[source] = self.graph.get_attr(self.writer.attribute(source))
        arguments, keywords = map_aggregate(op.arguments, self._value), map_aggregate(op.keywords, self._value)
        exchange = exchange_of(op.operator)
        if exchange is not None:
            arguments = (self.graph.get_attr("shards"), *arguments)
        call = exchange or _REPLACED.get(op.operator) or _deferring(op) or op.target
        self.known[op] = self.graph.call_function(call, arguments, keywords)

    def _value(self, value: Any) -> Any:
        if isinstance(value, OpNode):
            return self.known[value]
        if isinstance(value, SampleCount):
            return self.samples if value.factor == 1 else self.graph.call_function(_times, (self.samples, value.factor))
        if isinstance(value, InTraining):
            return self.graph.call_function(_rate, (self.graph.get_attr("training"), value.rate))
        if isinstance(value, Marker):
            return self._marked(value)
        return value

    def _marked(self, marker: Marker) -> fx.Node:
        if marker is TRAINING:
            return self.graph.get_attr("training")
        if marker is LEAST:
            return self.graph.call_function(_least, (self.dtype,))
        if marker is WIDER:
            return self.graph.call_function(torch.promote_types, (self.dtype, torch.float32))
        return self.dtype if marker is DTYPE else self.device

    def finish(self, name: str, result: Any) -> tuple[str, dict[str, Any]]:
        """The source of a function of this name, and what it knows by name."""
        self.graph.output(result)
        code = self.graph.python_code("self")
        return code.src.replace("def forward(", f"def {name}(", 1), code.globals


def _times(samples: int, factor: int) -> int:
    return samples * factor


def _rate(training: bool, rate: float) -> float:
    return rate if training else 0.0


def _least(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).min)


_REPLACED: dict[str, Callable[..., Tensor]] = {"batch_norm": batch_norm}


def _deferring(op: OpNode) -> Callable[..., Tensor] | None:
    """The function that can put off the weight gradient of a call, if there is one for it."""
    name, arguments = op.operator, op.arguments
    if name == "linear" and _is_parameter(arguments[1]):
        return linear
    if name == "addmm" and _is_parameter(arguments[2]) and _is_parameter(arguments[0]) and not op.keywords:
        return addmm
    if name in ("mm", "matmul") and _is_parameter(arguments[1]) and len(arguments[1].shape) == 2:
        return _matmul
    plain = name == "embedding" and not any(arguments[3:]) and not op.keywords
    return _embedding if plain and _is_parameter(arguments[0]) else None


def _is_parameter(value: object) -> bool:
    return isinstance(value, OpNode) and value.kind == "parameter"


def _matmul(input: Tensor, weight: Tensor) -> Tensor:
    return addmm(None, input, weight)


def _embedding(weight: Tensor, indices: Tensor, padding_idx: int = -1, *_: object) -> Tensor:
    return embedding(indices, weight, None if padding_idx == -1 else padding_idx)
