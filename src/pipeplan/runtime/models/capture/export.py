"""A module as a list of operators that hold for any number of samples and any floating-point format.

``torch.export`` writes sizes and formats into its graph as constants. So the module is exported twice, with different
numbers of samples and in different formats, and what differs between the two is what depends on them. Of layers that
are alike the first is exported, and its operators are repeated for the others.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import config as tracing
from torch.fx.node import map_aggregate

from pipeplan.errors import UsageError
from pipeplan.runtime.models.capture.functionalize import (
    DEVICE,
    DTYPE,
    LEAST,
    WIDER,
    CapturedGraph,
    Changes,
    OpNode,
    SampleCount,
    is_in_place,
    name_of_target,
)
from pipeplan.runtime.models.capture.repeats import (
    AGAIN,
    BEGINS,
    ENDS,
    Alike,
    Tracing,
    UnlikeLayers,
    again_of,
    alike_layers,
    is_inside,
    renamed,
    without,
)

_SAMPLES = (2, 3)
"""Samples of the two exports; coprime, so that multiples of one are not multiples of the other."""

_FORMATS = (torch.bfloat16, torch.float64)
"""Formats of the two exports; neither is float32, which models ask for by name."""


def trace(module: nn.Module, inputs: Mapping[str, Tensor], name: str) -> CapturedGraph:
    """Export a module twice and merge the two; ``inputs`` are by the names of the forward's arguments.

    Raises UsageError where it cannot be exported, behaves differently for other samples or formats, or does not return
    one tensor.
    """
    odd = [key for key, each in inputs.items() if not isinstance(each, Tensor) or each.ndim == 0]
    if odd or not inputs:
        raise UsageError(
            f"model {name!r}: {f'input {odd[0]!r} is not a tensor with samples' if odd else 'no example input'}; give "
            "at least one example input, each a tensor with samples in its first dimension"
        )
    alike = alike_layers(module)
    while True:
        try:
            return _traced(module, inputs, name, alike)
        except UnlikeLayers as found:
            alike = without(alike, found.first)


def _traced(module: nn.Module, inputs: Mapping[str, Tensor], name: str, alike: Alike) -> CapturedGraph:
    """As :func:`trace`, for layers that are known to be alike. Raises UnlikeLayers."""
    exports = zip(_SAMPLES, _FORMATS, strict=True)
    readers = [_ExportReader(_export(module, inputs, count, dtype, name, alike), name) for count, dtype in exports]
    (first, output), (second, _) = (reader.read() for reader in readers)
    pairs = _paired(first, second)
    if pairs is None:
        raise UsageError(
            f"model {name!r} runs different operators for {_SAMPLES[0]} and {_SAMPLES[1]} samples, or in "
            f"{_FORMATS[0]} and {_FORMATS[1]}, so that it cannot be captured; {_REMEDY}"
        )
    merge = _Merge({other: one for one, other in pairs if other is not None}, name)
    for one, other in pairs:
        merge(one, other)
    constants = {op.name: op.value for op in second if op.kind == "constant"}  # the first has fewer digits of some
    tensors = {**dict(_named_tensors(module)), **constants}
    return CapturedGraph(tuple(first), output, tensors, readers[0].num_dropouts)


_REMEDY = "write a function that returns a pipeplan.runtime.models.spec.Model with its blocks (docs/profiling.md)"


def _export(
    module: nn.Module, inputs: Mapping[str, Tensor], count: int, dtype: torch.dtype, name: str, alike: Alike
) -> ExportedProgram:
    """The module's forward in evaluation mode, with gradients, for ``count`` samples; nothing is computed."""
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    examples = {key: _fake(value, fakes, dtype, (count, *value.shape[1:])) for key, value in inputs.items()}
    try:
        with torch.enable_grad(), _untold(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The tensor attribute")  # set in forward; the copy is thrown away
            return torch.export.export(_replica(module, fakes, dtype, alike), (), examples, strict=False)
    except UnlikeLayers:
        raise
    except Exception as error:
        reason = " ".join((str(error).strip() or type(error).__name__).splitlines()[:2])[:500]
        shapes = {key: list(value.shape) for key, value in examples.items()}
        raise UsageError(
            f"model {name!r} cannot be captured: torch.export failed for inputs {shapes}: {type(error).__name__}: "
            f"{reason}; let the forward take tensors by name and decide nothing by their values, or {_REMEDY}"
        ) from error


@contextmanager
def _untold() -> Iterator[None]:
    """Without torch's own report of an operator that fails, since the error says the same, and without the lines of
    source that it notes for every operator, which took a sixth of the time.
    """
    log, config = logging.getLogger("torch._subclasses.fake_tensor"), vars(tracing)
    before = log.disabled, config.get("do_not_emit_stack_traces", False)  # torch 2.11 may not ask
    log.disabled = config["do_not_emit_stack_traces"] = True
    try:
        yield
    finally:
        log.disabled, config["do_not_emit_stack_traces"] = before


def _replica(module: nn.Module, fakes: FakeTensorMode, dtype: torch.dtype, alike: Alike) -> nn.Module:
    """A copy of the module in evaluation mode whose tensors have no data, floating-point ones in the format.

    Something else stands for the layers that are ``alike`` to one that is traced.
    """
    tracing = Tracing(alike)
    stand_ins: dict[int, Any] = tracing.stand_ins(module)
    for name, tensor in _named_tensors(module):
        if not is_inside(name, alike):
            stand_ins[id(tensor)] = _stand_in(tensor, fakes, dtype)
    replica = copy.deepcopy(module, stand_ins)
    for each in replica.modules():
        for name in _unregistered(each):
            tensor = each.__dict__.pop(name)
            each.register_buffer(name, tensor)
    tracing.watch(replica.eval(), module)
    return replica


def _stand_in(tensor: Tensor, fakes: FakeTensorMode, dtype: torch.dtype) -> Tensor:
    fake = _fake(tensor, fakes, dtype, tensor.shape)
    return nn.Parameter(fake, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


def _fake(tensor: Tensor, fakes: FakeTensorMode, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    with fakes:
        return torch.empty(shape, dtype=dtype if tensor.is_floating_point() else tensor.dtype, device="cpu")


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
    for path, each in module.named_modules():
        for name in _unregistered(each):
            yield f"{path}.{name}" if path else name, getattr(each, name)


def _unregistered(module: nn.Module) -> list[str]:
    """Attributes that are tensors, but neither parameters nor buffers."""
    return [name for name, value in vars(module).items() if isinstance(value, Tensor)]


# One export -------------------------------------------------------------------------------------------------------

_SKIPPED = {"_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range_for_size", "_assert_async"}
_PASSED = {"dropout", "alias", "lift_fresh_copy"}
_REGIONS = {"wrap_with_set_grad_enabled": False, "wrap_with_autocast": True}
_KINDS = {
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant",
    InputKind.USER_INPUT: "input",
}

_Turns = tuple[tuple[str, str], ...]


@dataclass(slots=True)
class _TracedLayer:
    """The operators of a layer that others are like: what it was ``given``, and ``made``."""

    given: list[OpNode]
    begin: int
    num_dropouts: int
    turns: _Turns
    operations: list[OpNode] = field(default_factory=list)
    made: list[OpNode] = field(default_factory=list)

    def end(self, reader: _ExportReader) -> None:
        """Note what ran. Raises UnlikeLayers where something that it was given is changed."""
        if any(reader.changes.newest(op) is not op for op in self.given):
            raise UnlikeLayers(self.turns[-1][0])
        self.operations = [op for op in reader.operations[self.begin :] if op.kind == "call"]
        self.num_dropouts = reader.num_dropouts - self.num_dropouts


class _ExportReader:
    """Turns an exported program into operations: regions inlined, dropout left out, changes in place renamed."""

    def __init__(self, program: ExportedProgram, name: str) -> None:
        self.program, self.name = program, name
        self.operations: list[OpNode] = []
        self.num_dropouts = 0
        self.layers: dict[int, _TracedLayer] = {}
        self.tensors: dict[tuple[str, str], OpNode] = {}
        self.changes = Changes(f"model {name!r}", self._like)

    def read(self) -> tuple[list[OpNode], OpNode]:
        """The operations, and the one whose result the module returns."""
        given = {}
        for spec in self.program.graph_signature.input_specs:
            if spec.kind not in _KINDS or not hasattr(spec.arg, "name"):
                raise UsageError(f"model {self.name!r} takes {spec.arg}, which is not a tensor; {_REMEDY}")
            given[spec.arg.name] = spec
        found: dict[fx.Node, Any] = {}
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                found[node] = self._given(node, given[node.name])
            elif node.op == "output":
                return self.operations, self._returned(node, found)
            else:
                self._take(node, found, self.program.graph_module)
        raise AssertionError("a graph ends with its output")

    def _given(self, node: fx.Node, spec: Any) -> OpNode:
        kind = _KINDS[spec.kind]
        value = node.meta["val"]
        op = OpNode(kind, spec.target or node.name, value=value, needs_grad=kind == "parameter")
        if kind == "parameter":
            op.needs_grad = bool(self.program.state_dict[spec.target].requires_grad)
        if kind == "constant":
            op.value = self.program.constants[spec.target]
        self.operations.append(op)
        self.tensors[kind, op.name] = op
        return op

    def _returned(self, node: fx.Node, found: dict[fx.Node, Any]) -> OpNode:
        mutated = len(self.program.graph_signature.buffers_to_mutate)
        (returned,) = node.args
        assert isinstance(returned, (list, tuple)), "a graph returns a sequence"
        outputs = [self.changes.newest(found[each]) for each in returned[mutated:] if isinstance(each, fx.Node)]
        tensors = [each for each in outputs if isinstance(each, OpNode) and isinstance(each.value, Tensor)]
        if len(tensors) != 1:
            raise UsageError(
                f"model {self.name!r} returns {len(tensors)} tensors; wrap it in a module that returns one, as its loss"
            )
        return tensors[0]

    def _take(self, node: fx.Node, found: dict[fx.Node, Any], owner: nn.Module, turns: _Turns = ()) -> None:
        target = name_of_target(node.target)
        if node.op == "get_attr":
            found[node] = getattr(owner, str(node.target))
        elif target == BEGINS:
            so_far = len(self.operations), self.num_dropouts
            self.layers[_number_of(node)] = _TracedLayer(self._tensors_of(node, found), *so_far, _turns_of(node))
        elif target == ENDS:
            self.layers[_number_of(node)].end(self)
            self.layers[_number_of(node)].made = self._tensors_of(node, found)
        elif target == AGAIN:
            again = again_of(_number_of(node))
            other = dict(zip(again.places, self._tensors_of(node, found), strict=True))
            found[node] = self._repeat(self.layers[again.call], other, _turns_of(node))
        elif target in _SKIPPED:
            return
        elif target in _REGIONS:
            self._inline(node, found, _REGIONS[target])
        elif target in _PASSED or (target == "detach_" and found[_node(node.args[0])].kind == "constant"):
            found[node] = found[_node(node.args[0])]
            self.num_dropouts += target == "dropout" and not _is_in_dropout(node)
        elif target == "getitem" and isinstance(found[_node(node.args[0])], list):
            found[node] = getitem(found[_node(node.args[0])], node.args[1])
        else:
            found[node] = self._call(node, found, turns)

    def _call(self, node: fx.Node, found: dict[fx.Node, Any], turns: _Turns) -> OpNode:
        def newest(each: fx.Node) -> Any:
            return self.changes.newest(found[each]) if isinstance(found[each], OpNode) else found[each]

        arguments = tuple(fx.node.map_arg(node.args, newest))
        keywords = dict(fx.node.map_arg(dict(node.kwargs), newest))
        if name_of_target(node.target) == "scaled_dot_product_attention":
            arguments, keywords = _without_dropout(arguments, keywords)
        like = OpNode("call", "", node.target, turns=_turns_of(node) or turns, value=node.meta.get("val"))
        if not _is_of_known_size(like.value):
            raise UsageError(
                f"model {self.name!r} cannot be captured: sizes or numbers depend on the values of tensors in "
                f"{node.target} of module {like.path or 'at the top'!r}; {_REMEDY}"
            )
        if is_in_place(node.target):
            return self.changes.change(node.target, arguments, keywords, like)
        return self._like(node.target, arguments, keywords, like)

    def _like(self, target: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], like: OpNode) -> OpNode:
        """Append a call that gives what ``like`` does."""
        op = OpNode("call", "", target, arguments, keywords, like.turns, like.value)
        op.needs_grad = any(source.needs_grad for source in op.sources) and _is_differentiable(op.value)
        self.operations.append(op)
        self.changes.note_view(op)
        return op

    def _tensors_of(self, node: fx.Node, found: Mapping[fx.Node, Any]) -> list[OpNode]:
        """What a mark is given."""
        (listed, _) = node.args
        assert isinstance(listed, (list, tuple)), "a mark takes a list of tensors"
        return [self.changes.newest(found[_node(each)]) for each in listed]

    def _repeat(self, layer: _TracedLayer, other: Mapping[int, OpNode], turns: _Turns) -> list[OpNode]:
        """Append the operators of a layer that is like the one that was traced; what it makes. Raises UnlikeLayers."""
        (before, key), (own, own_key) = layer.turns[-1], turns[-1]
        place, turn = renamed(before, own), renamed(key, own_key)
        known = {op: other.get(place, op) for place, op in enumerate(layer.given)}

        def copied(value: Any) -> Any:
            if not isinstance(value, OpNode):
                return value
            if value not in known:
                if value.kind in ("call", "input"):  # of the model around it, and not among its arguments
                    raise UnlikeLayers(before)
                known[value] = self._tensor(value, place(value.name))
            return known[value]

        for op in layer.operations:
            inner = tuple((place(path), turn(called)) for path, called in op.turns[len(layer.turns) :])
            like = OpNode("call", "", op.target, turns=(*turns, *inner), value=op.value)
            arguments, keywords = map_aggregate(op.arguments, copied), map_aggregate(op.keywords, copied)
            known[op] = self._like(op.target, arguments, keywords, like)
        self.num_dropouts += layer.num_dropouts
        return [copied(op) for op in layer.made]

    def _tensor(self, like: OpNode, name: str) -> OpNode:
        """The parameter, buffer or constant of this name, which looks like another one."""
        if (like.kind, name) not in self.tensors:
            op = OpNode(like.kind, name, value=like.value, needs_grad=like.needs_grad)
            self.operations.append(op)
            self.tensors[like.kind, name] = op
        return self.tensors[like.kind, name]

    def _inline(self, node: fx.Node, found: dict[fx.Node, Any], autocast: bool) -> None:
        """The operators of a region; without gradients, its results are cut off."""
        if autocast and node.args[2]:
            raise UsageError(f"model {self.name!r} uses autocast inside; leave it to --dtype")
        position = 4 if autocast else 1
        inner: fx.GraphModule = found[_node(node.args[position])]
        outer = (found[_node(each)] for each in node.args[position + 1 :])
        known: dict[fx.Node, Any] = {}
        for each in inner.graph.nodes:
            if each.op == "placeholder":
                known[each] = next(outer)
            elif each.op == "output":
                made = [self.changes.newest(known[result]) for result in each.args[0]]
                found[node] = made if autocast or node.args[0] else [self._cut(result) for result in made]
            else:
                self._take(each, known, inner, _turns_of(node))

    def _cut(self, op: OpNode) -> OpNode:
        return self._like(torch.ops.aten.detach.default, (op,), {}, op) if op.needs_grad else op


def _is_in_dropout(node: fx.Node) -> bool:
    """Whether one of torch's modules for dropout calls it, not a function."""
    *_, (_, kind) = (node.meta.get("nn_module_stack") or {"": ("", "")}).values()
    return "torch.nn.modules.dropout." in str(kind)


def _turns_of(node: fx.Node) -> _Turns:
    stack = node.meta.get("nn_module_stack") or {}
    return tuple((str(path), str(key)) for key, (path, _) in stack.items())


def _is_differentiable(value: Any) -> bool:
    found = value if isinstance(value, tuple | list) else (value,)
    return any(isinstance(each, Tensor) and each.is_floating_point() for each in found)


def _is_of_known_size(value: Any) -> bool:
    """Whether it is a tensor, or several, whose sizes do not depend on values."""
    found = value if isinstance(value, tuple | list) else (value,)
    sizes = [size for each in found for size in (each.shape if isinstance(each, Tensor) else (each,))]
    return not any(isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool) for size in sizes)


def _without_dropout(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if len(arguments) > 4:
        arguments = (*arguments[:4], 0.0, *arguments[5:])
    keywords.pop("dropout_p", None)
    return arguments, keywords


# Two exports ------------------------------------------------------------------------------------------------------


def _paired(first: list[OpNode], second: list[OpNode]) -> list[tuple[OpNode, OpNode | None]] | None:
    """Every operation of the first export with that of the second; None if they do not match.

    Conversions to a narrow format may be missing in the second: some models convert only where it is one.
    """
    rest, pairs = iter([*second, None]), list[tuple[OpNode, OpNode | None]]()
    other = next(rest)
    for one in first:
        if other is not None and (one.kind, one.name, str(one.target)) == (other.kind, other.name, str(other.target)):
            pairs.append((one, other))
            other = next(rest)
        elif one.kind == "call" and one.operator == "to" and one.arguments[1:2] == (_FORMATS[0],):
            pairs.append((one, None))
        else:
            return None
    return pairs if other is None else None


class _Merge:
    """Puts markers into the first export where the second differs."""

    def __init__(self, twins: dict[OpNode, OpNode], name: str) -> None:
        self.twins, self.name = twins, name
        self.known = set(twins.values())

    def __call__(self, one: OpNode, other: OpNode | None) -> None:
        """Merge an operation with its twin; a conversion without one is to the model's format."""
        if other is None:
            source = one.arguments[0]
            one.arguments = (source, DTYPE, *one.arguments[2:])
            one.per_sample, one.misplaced = source.per_sample, source.misplaced
            return
        one.arguments = tuple(self._literal(*each, one) for each in zip(one.arguments, other.arguments, strict=True))
        one.keywords = {key: self._literal(value, other.keywords[key], one) for key, value in one.keywords.items()}
        if not isinstance(one.value, Tensor) or one.kind in ("parameter", "buffer", "constant"):
            return
        pairs = list(zip(one.value.shape, other.value.shape, strict=True))
        grows = [index for index, (before, after) in enumerate(pairs) if before != after]
        if 0 in grows and pairs[0][0] * _SAMPLES[1] == pairs[0][1] * _SAMPLES[0]:
            one.per_sample = pairs[0][0] // _SAMPLES[0]
        one.misplaced = bool(grows) and not one.per_sample

    def _literal(self, one: Any, other: Any, op: OpNode) -> Any:
        if isinstance(one, OpNode) and isinstance(other, OpNode):
            return self._matching(one, self.twins[other], op)
        if isinstance(one, tuple | list):
            return [self._literal(*each, op) for each in zip(one, other, strict=True)]
        if isinstance(one, torch.device):
            return DEVICE
        if isinstance(one, torch.dtype) and one != other:
            return {_FORMATS: DTYPE, (torch.float32, _FORMATS[1]): WIDER}.get((one, other)) or self._differing(
                one, other, op
            )
        if type(one) is not type(other) or one != other:
            return self._differing(one, other, op)
        return one

    def _matching(self, one: OpNode, twin: OpNode, op: OpNode) -> OpNode:
        """The operation, if the twin is the same but for conversions that only this export has."""
        source = one
        while source is not twin:
            if source not in self.known and source.kind == "call":
                source = source.arguments[0]
            else:
                self._differing(one.target, twin.target, op)
        return one

    def _differing(self, one: Any, other: Any, op: OpNode) -> Any:
        if isinstance(one, int) and isinstance(other, int) and one * _SAMPLES[1] == other * _SAMPLES[0]:
            return SampleCount(one // _SAMPLES[0])
        if isinstance(one, float) and (one, other) == tuple(torch.finfo(each).min for each in _FORMATS):
            return LEAST
        raise UsageError(
            f"model {self.name!r} cannot be captured: {op.target} in module {op.path or 'at the top'!r} takes {one!r} "
            f"for {_SAMPLES[0]} samples and {other!r} for {_SAMPLES[1]}, not a multiple of them; {_REMEDY}"
        )


def _number_of(mark: fx.Node) -> int:
    _, number = mark.args
    assert isinstance(number, int), "a mark says which layer it is about"
    return number


def _node(argument: object) -> fx.Node:
    """An argument that is the result of another node, as what is passed on, and to regions, always is."""
    assert isinstance(argument, fx.Node)
    return argument
