"""One run of a module on tensors without data, as a list of operators.

The module runs in inference mode, in which torch hands over operators as they are called, before it takes them
apart: ``linear`` and attention stay whole, and changes in place are seen as such. ``torch.export`` gives the same list
in several times as long, because it traces, copies and writes down the graph again and again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from operator import getitem
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from pipeplan.errors import UsageError
from pipeplan.runtime.models.capture.functionalize import (
    TRAINING,
    Changes,
    InTraining,
    OpNode,
    is_in_place,
    name_of_target,
)
from pipeplan.runtime.models.capture.repeats import UnlikeLayers, renamed

REMEDY = "write a function that returns a pipeplan.runtime.models.spec.Model with its blocks (docs/profiling.md)"

_SKIPPED = {"_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range_for_size", "_assert_async"}
_PASSED = {"alias", "lift_fresh", "lift_fresh_copy"}
_DROPPING = {"dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"}
_DETACHING = {"detach", "detach_"}

_Turns = tuple[tuple[str, str], ...]


@dataclass(slots=True)
class _RunLayer:
    """The operators of a layer that others are like: what it was ``given``, and ``made``."""

    given: list[OpNode]
    begin: int
    num_dropouts: int
    turns: _Turns
    operations: list[OpNode] = field(default_factory=list)
    made: list[OpNode] = field(default_factory=list)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has its constructors without types
    """Notes the operators of a forward: dropout that drops nothing left out, changes in place renamed.

    Operators called with training mode on are called, when a block runs, with the mode the block is in then.

    ``elsewhere`` are parameters and buffers of layers that do not run, by identity, with the layer they are like.
    """

    def __init__(self, name: str, elsewhere: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # the same
        self.name, self.elsewhere = name, elsewhere
        self.operations: list[OpNode] = []
        self.num_dropouts = 0
        self.changes = Changes(f"model {name!r}", self._like)
        self._layers: dict[str, _RunLayer] = {}
        self._tensors: dict[tuple[str, str], OpNode] = {}
        self._found: dict[int, OpNode] = {}
        self._alive: list[Tensor] = []  # an identity is that of another tensor once a tensor is gone
        self._stack: list[tuple[str, str, type[nn.Module]]] = []
        self._calls: dict[str, int] = {}
        self._cut_off: dict[OpNode, OpNode | None] = {}
        self._is_off = False

    # What the module is given, and where it is ---------------------------------------------------------------------

    def give(self, kind: str, name: str, tensor: Tensor) -> None:
        """A parameter, buffer or input, by one of its names."""
        if id(tensor) not in self._found:
            op = OpNode(kind, name, value=tensor, needs_grad=kind == "parameter" and tensor.requires_grad)
            self._note(op)
            self._meet(tensor, op)

    def enter(self, path: str, module: nn.Module, *_: object) -> None:
        """Before a module of that path is called."""
        count = self._calls[path] = self._calls.get(path, 0) + 1
        self._stack.append((path, path if count == 1 else f"{path}@{count}", type(module)))

    def leave(self, *_: object) -> None:
        """After it returned."""
        self._stack.pop()

    @property
    def _turns(self) -> _Turns:
        return tuple((path, key) for path, key, _ in self._stack)

    # Operators -----------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator and note it."""
        try:
            made = func(*args, **(kwargs or {}))
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise UsageError(
                f"model {self.name!r} cannot be captured: sizes or numbers depend on the values of tensors in "
                f"{func} of module {self._path or 'at the top'!r}; {REMEDY}"
            ) from error
        target = name_of_target(func)
        if self._is_off or target in _SKIPPED or not any(isinstance(each, Tensor) for each in tree_leaves(made)):
            return made
        idle = target in _DROPPING and not (args[1] and args[2])
        if idle or target in _PASSED or (target in _DETACHING and not self._op(args[0]).needs_grad):
            self.num_dropouts += idle and bool(args[1]) and not self._is_in_dropout
            made, passed = self._another(made, func, args), self._op(args[0])
            self._meet(made, passed)
            return made
        arguments, keywords = tree_map(self._argument, args), tree_map(self._argument, dict(kwargs or {}))
        arguments, keywords = _when_training(func, arguments, keywords)
        like = OpNode("call", "", func, turns=self._turns, value=made)
        if is_in_place(func):
            self.changes.change(func, arguments, keywords, like)
            return made
        like.value = made = self._another(made, func, args)
        op = self._like(func, arguments, keywords, like)
        self._meet_results(made, op)
        return made

    @property
    def _path(self) -> str:
        return self._stack[-1][0] if self._stack else ""

    @property
    def _is_in_dropout(self) -> bool:
        """Whether one of torch's modules for dropout calls an operator, not a function."""
        return bool(self._stack) and self._stack[-1][2].__module__ == nn.Dropout.__module__

    def _meet(self, tensor: Tensor, op: OpNode) -> None:
        self._found[id(tensor)] = op
        self._alive.append(tensor)

    def _meet_results(self, made: Any, op: OpNode) -> None:
        if isinstance(made, Tensor):
            self._meet(made, op)
            if op.needs_grad and not torch.is_grad_enabled():
                self._cut_off[op] = None
            return
        for place, each in enumerate(made):
            if each is not None:
                like = OpNode("call", "", getitem, turns=op.turns, value=each)
                self._meet_results(each, self._like(getitem, (op, place), {}, like))

    def _another(self, made: Any, func: Any, args: Sequence[Any]) -> Any:
        """What an operator made, as an object of its own: `to` may give the very argument."""
        if is_in_place(func) or not any(made is each for each in args):
            return made
        return self.unseen(torch.ops.aten.alias.default, made)

    def unseen(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What a function returns, without a note of it."""
        before, self._is_off = self._is_off, True
        try:
            return function(*arguments)
        finally:
            self._is_off = before

    def _argument(self, value: Any) -> Any:
        return self._op(value) if isinstance(value, Tensor) else value

    def _op(self, tensor: Tensor) -> OpNode:
        """The tensor that currently replaces this one."""
        op = self._found.get(id(tensor))
        if op is None:
            if id(tensor) in self.elsewhere:
                raise UnlikeLayers(self.elsewhere[id(tensor)])
            assert not isinstance(tensor, FakeTensor), "whatever has no data was made or given here"
            constants = sum(kind == "constant" for kind, _ in self._tensors)
            op = self._tensor(OpNode("constant", "", value=tensor), f"constant_{constants}")
            self._meet(tensor, op)
        op = self.changes.newest(op)
        return self._cut(op) if op in self._cut_off and torch.is_grad_enabled() else op

    def _cut(self, op: OpNode) -> OpNode:
        """What was made without gradients, as others take it."""
        cut = self._cut_off[op]
        if cut is None:
            cut = self._cut_off[op] = self._like(torch.ops.aten.detach.default, (op,), {}, op)
            cut.needs_grad = False
        return cut

    def _like(
        self,
        target: Any,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        like: OpNode,
        turns: _Turns | None = None,
    ) -> OpNode:
        """Append a call that gives what ``like`` does, in the ``turns`` of modules, by default in the same."""
        op = OpNode("call", "", target, arguments, keywords, like.turns if turns is None else turns, like.value)
        is_new = op.operator.endswith("_like") or op.operator.startswith("new_")  # of sizes, not of numbers
        op.needs_grad = not is_new and any(each.needs_grad for each in op.sources) and _is_differentiable(op.value)
        self.operations.append(op)
        self.changes.note_view(op)
        return op

    def _note(self, op: OpNode) -> None:
        self.operations.append(op)
        self._tensors[op.kind, op.name] = op

    def returned(self, made: Any) -> OpNode:
        """The operation whose result the module returns; only what it needs is left, and what was given."""
        tensors = [each for each in tree_leaves(made) if isinstance(each, Tensor)]
        if len(tensors) != 1:
            raise UsageError(
                f"model {self.name!r} returns {len(tensors)} tensors; wrap it in a module that returns one, as its loss"
            )
        with torch.enable_grad():
            output = self._op(tensors[0])
        needed, waiting = {output}, [output]
        while waiting:
            more = [source for source in waiting.pop().sources if source not in needed]
            needed.update(more)
            waiting += more
        self.operations = [op for op in self.operations if op in needed or op.kind in ("parameter", "buffer", "input")]
        return output

    # Layers that are alike -----------------------------------------------------------------------------------------

    def needs_grad(self, tensor: Tensor) -> bool:
        """Whether a tensor depends on something that is trained."""
        return self._op(tensor).needs_grad

    def begin(self, first: str, given: Sequence[Tensor]) -> None:
        """Before a layer runs that others are like; ``given`` are its tensors."""
        layer = _RunLayer(list(map(self._op, given)), len(self.operations), self.num_dropouts, self._turns)
        self._layers[first] = layer

    def end(self, first: str, made: Sequence[Tensor]) -> None:
        """After it ran, and made these. Raises UnlikeLayers where something that it was given is changed."""
        layer = self._layers[first]
        if any(self.changes.newest(op) is not op for op in layer.given):
            raise UnlikeLayers(first)
        layer.made = list(map(self._op, made))
        layer.operations = [op for op in self.operations[layer.begin :] if op.kind == "call"]
        layer.num_dropouts = self.num_dropouts - layer.num_dropouts

    def again(self, first: str, other: Mapping[int, Tensor], made: Sequence[Tensor]) -> list[Tensor]:
        """What a layer makes that is like one that ran, and ``made`` these, but for ``other`` tensors, by their place
        among those given. Raises UnlikeLayers.
        """
        layer = self._layers[first]
        copies = self._repeated(layer, {place: self._op(tensor) for place, tensor in other.items()})
        if [op.needs_grad for op in copies] != [op.needs_grad for op in layer.made]:
            raise UnlikeLayers(first)
        found = [self.unseen(_empty_like, each) for each in made]
        for tensor, op in zip(found, copies, strict=True):
            self._meet(tensor, op)
        return found

    def _repeated(self, layer: _RunLayer, other: Mapping[int, OpNode]) -> list[OpNode]:
        """Append the operators of a layer that is like the one that ran; what it makes. Raises UnlikeLayers."""
        turns = self._turns
        (before, key), (own, own_key) = layer.turns[-1], turns[-1]
        place, turn = renamed(before, own), renamed(key, own_key)
        known = {op: other.get(index, op) for index, op in enumerate(layer.given)}

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
            arguments, keywords = map_aggregate(op.arguments, copied), map_aggregate(op.keywords, copied)
            known[op] = self._like(op.target, arguments, keywords, op, (*turns, *inner))
        self.num_dropouts += layer.num_dropouts
        return [copied(op) for op in layer.made]

    def _tensor(self, like: OpNode, name: str) -> OpNode:
        """The parameter, buffer or constant of this name, which looks like another one."""
        if (like.kind, name) not in self._tensors:
            self._note(OpNode(like.kind, name, value=like.value, needs_grad=like.needs_grad))
        return self._tensors[like.kind, name]


def _empty_like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _is_differentiable(value: Any) -> bool:
    found = value if isinstance(value, tuple | list) else (value,)
    return any(isinstance(each, Tensor) and each.is_floating_point() for each in found)


@lru_cache(maxsize=4096)
def _names_of(func: Any) -> tuple[str, ...]:
    """The names of an operator's arguments."""
    return tuple(argument.name for argument in func._schema.arguments)


_MODES = {"train", "training"}
"""What operators call the argument that says whether training mode is on."""


def _when_training(
    func: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, where they were for training mode as ones that depend on the mode when they are used."""
    names = _names_of(func)
    if not (_MODES & set(names) or "dropout_p" in names):
        return arguments, keywords

    def told(name: str, value: Any) -> Any:
        if name in _MODES and value is True:
            return TRAINING
        return InTraining(value) if name == "dropout_p" and value else value

    given = tuple(told(*each) for each in zip(names, arguments, strict=False))
    return given, {name: told(name, value) for name, value in keywords.items()}


@contextmanager
def as_exported(name: str) -> Iterator[None]:
    """Let modules know, as ``torch.export`` does, that they are not to look at numbers. Autocast is refused."""
    flags, enter = ("_is_compiling_flag", "_is_exporting_flag"), torch.autocast.__enter__
    before = {flag: getattr(torch.compiler, flag, False) for flag in flags}

    def refuse(autocast: torch.autocast) -> Any:
        if autocast._enabled:
            raise UsageError(f"model {name!r} uses autocast inside; leave it to --dtype")
        return enter(autocast)  # type: ignore[no-untyped-call]  # torch has it without types

    try:
        for flag in flags:
            setattr(torch.compiler, flag, True)
        torch.autocast.__enter__ = refuse  # type: ignore[method-assign]  # operators no longer show who asked for it
        yield
    finally:
        for flag, value in before.items():
            setattr(torch.compiler, flag, value)
        torch.autocast.__enter__ = enter  # type: ignore[method-assign]  # the same
