"""Layers that are alike are traced once: the first runs, and the others stand in the trace as marks to be filled in.

Nothing is taken for granted. Layers count as alike whose modules, parameters, buffers and settings are equal, but for
numbers that are a layer's own place in its list; and then a trace in which the first one read such a number, or in
which one was called otherwise than the first, is made again with all of them traced.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten


class UnlikeLayers(Exception):
    """Layers that were taken for alike are not; ``first`` is the path of the one that was traced."""

    def __init__(self, first: str) -> None:
        super().__init__(first)
        self.first = first


Alike = Mapping[str, str]
"""Path of a layer that is not traced -> path of the one like it that is."""


def alike_layers(module: nn.Module) -> dict[str, str]:
    """Layers of the outermost lists of modules that look like an earlier one of their list."""
    holders = Counter(id(each) for each in _everything_in(module))
    found: dict[str, str] = {}
    for path, layers in _outermost_lists(module):
        firsts: dict[Hashable, str] = {}
        places = _places(layers)
        for name, layer in layers.named_children():
            own = f"{path}.{name}" if path else name
            if all(holders[each] == count for each, count in Counter(map(id, _everything_in(layer))).items()):
                first = firsts.setdefault(_look(layer, places), own)
                if first != own:
                    found[own] = first
    return found


def without(alike: Alike, first: str) -> dict[str, str]:
    """What is left where a layer is not like those after it: these may be like each other, if there are many."""
    group = [path for path, known in alike.items() if known == first]
    others = {path: known for path, known in alike.items() if known != first}
    return others if _place(first) > _MOST_UNLIKE else others | dict.fromkeys(group[1:], group[0])


def with_first_layers(module: nn.Module) -> nn.Module | None:
    """The module, whose outermost lists end one layer behind the last that is like no earlier one.

    That one may be given something else than the first. Parameters are the module's own. None where no list is longer.
    """
    alike, found = alike_layers(module), None
    for path, layers in _outermost_lists(module):
        own = (f"{path}.{name}" if path else name for name, _ in layers.named_children())
        count = max((place for place, each in enumerate(own) if each not in alike), default=0) + 2
        if path and count < len(layers):
            found = _replaced(found or module, path.split("."), layers[:count])
    return found


def _replaced(module: nn.Module, path: Sequence[str], inner: nn.Module) -> nn.Module:
    """A copy of a module with another one at a path; all else is shared."""
    if not path:
        return inner
    made = copy.copy(module)
    made._modules = dict(module._modules)
    made._modules[path[0]] = _replaced(module.get_submodule(path[0]), path[1:], inner)
    return made


_MOST_UNLIKE = 1
"""Layers of a list that may turn out to be unlike before the others are all traced."""


def _place(path: str) -> int:
    last = path.rpartition(".")[2]
    return int(last) if last.isdecimal() else 0


def is_inside(name: str, alike: Alike) -> bool:
    """Whether a parameter or buffer belongs to a layer that is not traced."""
    parts = name.split(".")
    return any(".".join(parts[:length]) in alike for length in range(1, len(parts)))


def _everything_in(module: nn.Module) -> Iterator[object]:
    """Modules, parameters and buffers, as often as they have names."""
    for _, each in module.named_modules(remove_duplicate=False):
        yield each
        yield from (tensor for tensor in (*each._parameters.values(), *each._buffers.values()) if tensor is not None)


def _outermost_lists(module: nn.Module) -> Iterator[tuple[str, nn.ModuleList]]:
    within: list[str] = []
    for path, each in module.named_modules():
        if isinstance(each, nn.ModuleList) and not any(path.startswith(f"{outer}.") for outer in within):
            within.append(path)
            yield path, each


_OWN = frozenset(vars(nn.Module()))
"""Attributes that every module has."""

_HOOKS = sorted(name for name in _OWN if name.endswith("_hooks"))


_Setting = tuple[str, str]
"""A module's path in a layer, and the name of one of its attributes."""


def _places(layers: nn.ModuleList) -> set[_Setting]:
    """Settings that are, in every layer of a list that has them, the layer's own place in it."""
    are: dict[_Setting, bool] = {}
    for place, layer in enumerate(layers):
        for path, each in layer.named_modules():
            for name, value in vars(each).items():
                if type(value) is int and are.get((path, name), True):
                    are[path, name] = value == place
    return {setting for setting, is_place in are.items() if is_place}


def _look(layer: nn.Module, places: set[_Setting]) -> Hashable:
    """Equal for layers whose modules, tensors and settings are equal, but for those that are the layer's place."""
    return tuple(
        (
            path,
            type(each),
            each.training,
            tuple((name, _form(tensor)) for name, tensor in each._parameters.items()),
            tuple((name, _form(tensor)) for name, tensor in each._buffers.items()),
            tuple(
                (name, _setting(value))
                for name, value in vars(each).items()
                if name not in _OWN and (path, name) not in places
            ),
            tuple((name, id(hook)) for name in _HOOKS for hook in vars(each).get(name, {}).values()),
        )
        for path, each in layer.named_modules(remove_duplicate=False)
    )


def _form(tensor: Tensor | None) -> Hashable:
    return None if tensor is None else (tuple(tensor.shape), tensor.dtype, tensor.requires_grad, type(tensor))


def _setting(value: object) -> Hashable:
    """Equal for settings that are; of objects that say nothing of equality, for the same one."""
    if isinstance(value, (list, tuple)):
        return (type(value), *map(_setting, value))
    if isinstance(value, dict):
        return (dict, *((key, _setting(each)) for key, each in value.items()))
    if isinstance(value, (str, bytes, bool, int, float, complex, torch.dtype, torch.device)) or value is None:
        return (type(value), value)
    return id(value)


# Running the model ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _LayerCall:
    """One call of a layer: what it was given, and what it made, as leaves of nested arguments."""

    structure: Any
    given: list[Any]
    made: list[Any] = field(default_factory=list)
    made_structure: Any = None

    @property
    def tensors(self) -> list[Tensor]:
        """Those it was given."""
        return [each for each in self.given if isinstance(each, Tensor)]

    @property
    def new(self) -> list[Tensor]:
        """Those it made, and was not given, each once."""
        return _once(each for each in self.made if isinstance(each, Tensor) and _place_of(each, self.given) is None)


class LayerRecorder(Protocol):
    """What notes the operators of layers."""

    def needs_grad(self, tensor: Tensor) -> bool:
        """Whether a tensor depends on something that is trained."""

    def begin(self, first: str, given: Sequence[Tensor]) -> None:
        """Before a layer runs that others are like; ``given`` are its tensors."""

    def end(self, first: str, made: Sequence[Tensor]) -> None:
        """After it ran, and made these. Raises UnlikeLayers where something that it was given is changed."""

    def again(self, first: str, other: Mapping[int, Tensor], made: Sequence[Tensor]) -> list[Tensor]:
        """What a layer makes that is like one that ran, and ``made`` these, but for ``other`` tensors, by their place
        among those given. Raises UnlikeLayers.
        """


class Tracing:
    """One run of a replica whose alike layers are traced once; ``alike`` is as :func:`alike_layers` has it."""

    def __init__(self, alike: Alike, recorder: LayerRecorder) -> None:
        self.alike, self.recorder = alike, recorder
        self._calls: dict[str, list[_LayerCall]] = defaultdict(list)

    def stand_ins(self, module: nn.Module) -> dict[int, Any]:
        """For a copy of the module: what replaces each layer that is not traced, by the layer's identity."""
        return {
            id(layer): _StandIn(self, path, self.alike[path], layer)
            for path in self.alike
            for layer in (module.get_submodule(path),)
        }

    def watch(self, replica: nn.Module, module: nn.Module) -> None:
        """In a copy of the module, let the first of each kind mark where it begins and ends, and not read its place."""
        for first in dict.fromkeys(self.alike.values()):
            layers = module.get_submodule(first.rpartition(".")[0])
            assert isinstance(layers, nn.ModuleList), "layers are elements of lists"
            layer = replica.get_submodule(first)
            told: dict[str, list[str]] = defaultdict(list)
            for path, name in _places(layers):
                told[path].append(name)
            for path, names in told.items():
                _tell_when_read(layer.get_submodule(path), names, first)
            layer.register_forward_pre_hook(functools.partial(self._begin, first), with_kwargs=True)
            layer.register_forward_hook(functools.partial(self._end, first), with_kwargs=True)

    def _begin(self, first: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given, structure = tree_flatten((args, kwargs))
        calls = self._calls[first]
        if calls:
            raise UnlikeLayers(first)  # called twice: which call is another layer's like?
        calls.append(_LayerCall(structure, given))
        self.recorder.begin(first, calls[0].tensors)

    def _end(self, first: str, _: nn.Module, args: object, kwargs: object, made: object) -> None:
        (call,) = self._calls[first]
        call.made, call.made_structure = tree_flatten(made)
        if any(type(each) not in _PLAIN for each in call.made if not isinstance(each, Tensor)):
            raise UnlikeLayers(first)
        self.recorder.end(first, call.new)

    def again(self, first: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a layer like the first makes of its arguments. Raises UnlikeLayers."""
        given, structure = tree_flatten((args, kwargs))
        calls = self._calls[first]
        if len(calls) != 1 or calls[0].made_structure is None or structure != calls[0].structure:
            raise UnlikeLayers(first)
        (call,) = calls
        if not self._are_alike(call.given, given):
            raise UnlikeLayers(first)
        pairs = zip(call.tensors, (each for each in given if isinstance(each, Tensor)), strict=True)
        other = {place: two for place, (one, two) in enumerate(pairs) if one is not two}
        made = self.recorder.again(first, other, call.new)
        known = {id(like): fresh for fresh, like in zip(made, call.new, strict=True)}
        return tree_unflatten([self._passed(each, call, given, known) for each in call.made], call.made_structure)

    def _are_alike(self, first: Sequence[Any], other: Sequence[Any]) -> bool:
        """Whether two calls are given the same but for the tensors' numbers."""
        for one, two in zip(first, other, strict=True):
            if isinstance(one, Tensor) and isinstance(two, Tensor):
                if self._layout(one) != self._layout(two):
                    return False
            elif one is not two and (type(one) is not type(two) or type(one) not in _PLAIN or one != two):
                return False
        return [_place_of(each, first) for each in first] == [_place_of(each, other) for each in other]

    def _layout(self, tensor: Tensor) -> Hashable:
        return tuple(tensor.shape), tensor.dtype, tensor.stride(), self.recorder.needs_grad(tensor)

    @staticmethod
    def _passed(leaf: Any, call: _LayerCall, given: Sequence[Any], known: Mapping[int, Tensor]) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        place = _place_of(leaf, call.given)
        return known[id(leaf)] if place is None else given[place]


_PLAIN = (type(None), bool, int, float, str)


def _place_of(leaf: Any, leaves: Sequence[Any]) -> int | None:
    """Where the very tensor is among some leaves; None for others."""
    if not isinstance(leaf, Tensor):
        return None
    return next((place for place, each in enumerate(leaves) if each is leaf), None)


def _once(tensors: Iterator[Tensor]) -> list[Tensor]:
    return list({id(each): each for each in tensors}.values())


def _tell_when_read(module: nn.Module, names: Sequence[str], first: str) -> None:
    """Let reading these attributes of a module say that the layers are not alike."""
    kind, told = type(module), {name: property(functools.partial(_unlike, first)) for name in names}
    for name in names:
        vars(module).pop(name, None)
    module.__class__ = type(kind.__name__, (kind,), {**told, "__module__": kind.__module__})


def _unlike(first: str, _: nn.Module) -> Any:
    raise UnlikeLayers(first)


class _StandIn(nn.Module):
    """Stands for a layer that is not traced; what is asked of it beside being called, the layer answers."""

    def __init__(self, tracing: Tracing, path: str, first: str, layer: nn.Module) -> None:
        super().__init__()
        self.__dict__.update(_tracing=tracing, _path=path, _first=first, _layer=layer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_layer"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the first layer of its kind."""
        return self.__dict__["_tracing"].again(self.__dict__["_first"], args, kwargs)


def renamed(first: str, other: str) -> Callable[[str], str]:
    """Turns names that begin with one layer's into names that begin with another's."""

    def replace(name: str) -> str:
        rest = name.removeprefix(first)
        return other + rest if name.startswith(first) and rest[:1] in ("", ".", "_") else name

    return replace
