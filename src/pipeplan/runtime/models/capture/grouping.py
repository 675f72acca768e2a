"""Which operators make a block: layers, half layers or single operators, by the modules that ran them.

Operators that need neither parameters nor gradients - masks, positions, tables - are free: every block that needs them
has its own. The others are cut into groups that follow one another, so that no block waits for a later one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

import torch
from torch import Tensor, nn

from pipeplan.graphs import connected_parts
from pipeplan.runtime.models.capture.functionalize import CapturedGraph, OpNode
from pipeplan.runtime.models.spec import Grain

ATTENTION = {"scaled_dot_product_attention", "context_attention"}
"""Cores of attention: torch's, and that of devices that share sequences."""

HEAVY = {
    *ATTENTION,
    "linear", "addmm", "mm", "bmm", "matmul", "baddbmm", "einsum", "embedding",
    "embedding_bag", "conv1d", "conv2d", "conv3d", "convolution", "cross_entropy_loss", "lstm", "gru", "_grouped_mm",
    "grouped_mm_fallback", "routed_experts", "word_losses",
}  # fmt: skip
"""Operators worth a block of their own."""

VIEWS = {
    "view", "reshape", "transpose", "permute", "unsqueeze", "squeeze", "expand", "slice", "select", "getitem", "split",
    "split_with_sizes", "chunk", "unbind", "t", "contiguous", "flatten", "unflatten", "narrow", "movedim", "to",
    "detach", "numpy_T", "mT", "clone", "expand_as", "view_as",
}  # fmt: skip
"""Operators that only show a tensor in another way, or may."""

_SHOWN = {"view", "transpose", "permute", "unsqueeze", "squeeze", "expand", "slice", "select", "t", "detach", "narrow"}
"""Those that never copy, and give one tensor."""


@dataclass(frozen=True, slots=True)
class OpGroup:
    """The operators of a block in order, and the layer or module they are of; ``in_layer`` if it is a layer.

    ``turn`` distinguishes the times that a layer is called.
    """

    path: str
    in_layer: bool
    operations: tuple[OpNode, ...]
    turn: str = ""

    @property
    def is_heavy(self) -> bool:
        """Whether it has an operator worth a block."""
        return any(op.operator in HEAVY for op in self.operations)

    @property
    def has_parameters(self) -> bool:
        """Whether it takes a parameter of the module."""
        return any(source.kind == "parameter" for op in self.operations for source in op.sources)

    def feeds(self, other: OpGroup) -> bool:
        """Whether the other group takes something of this one."""
        own = set(self.operations)
        return any(source in own for op in other.operations for source in op.sources)

    def with_(self, other: OpGroup) -> OpGroup:
        """The two as one, of this one's module."""
        return replace(self, operations=(*self.operations, *other.operations))


def _free_operations(trace: CapturedGraph) -> set[OpNode]:
    """Those that depend only on sizes, buffers and inputs, and do no work on floating-point inputs."""
    free: set[OpNode] = set()
    numbers: set[OpNode] = set()  # free, and of floating-point inputs
    for op in trace.operations:
        if op.kind != "call":
            if op.kind != "parameter":
                free.add(op)
            if op.kind == "input" and isinstance(op.value, Tensor) and op.value.is_floating_point():
                numbers.add(op)
            continue
        taken = op.sources
        is_view = op.operator in VIEWS
        works = not is_view and any(source in numbers for source in taken)
        if all(source in free for source in taken) and not works and not _is_random(op):
            free.add(op)
            if any(source in numbers for source in taken):
                numbers.add(op)
    return free


def _is_random(op: OpNode) -> bool:
    """Whether it draws random numbers: each block would draw others, and keep them."""
    return torch.Tag.nondeterministic_seeded in getattr(op.target, "tags", ())


def group_operations(trace: CapturedGraph, module: nn.Module, grain: Grain) -> tuple[list[OpGroup], set[OpNode]]:
    """Cut the operators that are not free, and that the output needs, into groups in the order they run.

    Returns the groups, and the free operations; with single operators those that only show a tensor are free, too.
    """
    free = _free_operations(trace)
    needed = made_from(trace.output)
    if grain == "operator":
        free |= {op for op in needed if op.operator in _SHOWN and op is not trace.output}
    kept = [op for op in trace.operations if op.kind == "call" and op in needed and op not in free]
    if grain == "operator":
        return _single(kept), free
    found: list[OpGroup] = []
    for (path, in_layer, turn), run in groupby(_placed(kept, _layers(module)), key=lambda each: each[0]):
        group = OpGroup(path, in_layer, tuple(op for _, op in run), turn)
        found += [group] if in_layer else _apart(group, free, found[-1] if found else None)
    if grain == "half":
        found = [half for group in found for half in (_halves(group, free) if group.in_layer else [group])]
    return _without_commons(_joined(found), free), free


def needed_by(group: OpGroup, free: set[OpNode]) -> list[OpNode]:
    """The group's operations and the free ones that they need, sources first."""
    own, found = set(group.operations), dict[OpNode, None]()
    for op in group.operations:
        waiting = [op]
        while waiting:
            missing = [s for s in waiting[-1].sources if s not in found and (s in free or s in own)]
            if missing:
                waiting.append(missing[0])
            else:
                found[waiting.pop()] = None
    return list(found)


def taken_by(group: OpGroup, free: set[OpNode]) -> list[OpNode]:
    """The results of other groups that it takes, each once."""
    return crossing_of(needed_by(group, free))


def crossing_of(wanted: Sequence[OpNode]) -> list[OpNode]:
    """The results of other groups that some operations take which are needed together, each once."""
    known = set(wanted)
    return list(dict.fromkeys(s for op in wanted for s in op.sources if s.kind == "call" and s not in known))


def made_from(output: OpNode, among: Collection[OpNode] | None = None) -> set[OpNode]:
    """An operation and those that it needs, directly or not; only such as are ``among`` these, if given."""
    found, waiting = {output}, [output]
    while waiting:
        for source in waiting.pop().sources:
            if source not in found and (among is None or source in among):
                found.add(source)
                waiting.append(source)
    return found


def _layers(module: nn.Module) -> set[str]:
    """Paths of the layers: elements of the outermost lists of modules, or without any the modules at the top."""
    top_path, _ = _top(module)
    lists: list[str] = []
    for path, child in module.named_modules():
        if not any(_is_inside(path, each) for each in lists) and _is_list(child, path.rpartition(".")[0] == top_path):
            lists.append(path)
    holders = lists or [top_path]
    return {joined_path(path, name) for path in holders for name, _ in module.get_submodule(path).named_children()}


def _top(module: nn.Module, path: str = "") -> tuple[str, nn.Module]:
    """The module that is left when wrappers around a single one are taken off."""
    children = [(name, child) for name, child in module.named_children() if any(True for _ in child.parameters())]
    if len(children) != 1 or isinstance(module, nn.ModuleList | nn.Sequential):
        return path, module
    name, child = children[0]
    return _top(child, joined_path(path, name)) if any(True for _ in child.children()) else (path, module)


def _is_list(module: nn.Module, at_top: bool) -> bool:
    """Whether it is a list of layers; further down, such as a feed-forward in a layer, not one of single operators."""
    of_operators = not any(True for child in module.children() for _ in child.children())
    return isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 0 and (at_top or not of_operators)


def modules_of(groups: Sequence[OpGroup]) -> list[tuple[str, ...]]:
    """[group] the modules that it runs all of, outermost ones in the order in which they run.

    What a module of several groups does by itself, such as adding to what it was given, is of none.
    """
    users: dict[str, set[int]] = {}
    for number, group in enumerate(groups):
        for path in dict.fromkeys(op.path for op in group.operations):
            for outer in _around(path):
                users.setdefault(outer, set()).add(number)
    found = []
    for group in groups:
        own: dict[str, None] = {}
        for op in group.operations:
            inside = (path for path in _around(op.path) if not group.in_layer or _is_inside(path, group.path))
            own.update(dict.fromkeys([path for path in inside if len(users[path]) == 1][:1]))
        found.append(tuple(own))
    return found


def _around(path: str) -> Iterator[str]:
    """The paths of the modules that a path leads through, from the outside in, itself the last; not the whole."""
    parts = path.split(".")
    return (".".join(parts[: length + 1]) for length in range(len(parts)) if path)


def joined_path(path: str, name: str) -> str:
    """The path of what has this name in a module."""
    return f"{path}.{name}" if path else name


def _is_inside(path: str, outer: str) -> bool:
    return path == outer or not outer or path.startswith(f"{outer}.")


_Place = tuple[str, bool, str]
"""Path, whether it is a layer, and which of its turns."""


def _placed(operations: Sequence[OpNode], layers: Collection[str]) -> Iterator[tuple[_Place, OpNode]]:
    """Every operator with its layer, or else the module around lists of layers that it is in."""
    around = {each.rpartition(".")[0].rpartition(".")[0] for each in layers}
    places: dict[OpNode, _Place] = {}
    for op in operations:
        place = _place(op, layers, around)
        if op.operator == "getitem":  # what an operator with several results gave stays with it
            place = places.get(op.sources[0], place)
        places[op] = place
        yield place, op


def _place(op: OpNode, layers: Collection[str], around: Collection[str]) -> _Place:
    parts = op.path.split(".")
    for length in range(1, len(parts) + 1):
        path = ".".join(parts[:length])
        if path in layers:
            turn = next((turn for called, turn in op.turns if called == path), "")
            return path, True, turn
    parents = [each for each in around if _is_inside(op.path, each)]
    return max(parents, key=len, default=""), False, ""


def _apart(group: OpGroup, free: set[OpNode], before: OpGroup | None) -> list[OpGroup]:
    """Its parts that take nothing of one another, as of two towers; those that begin everything stay together.

    What only ends the group ``before`` it, as the last of a loop's residual additions does, is no part of what follows.
    """
    own = set(group.operations)
    joins = ((op, source) for op in group.operations for source in op.sources if source in own)
    found: list[OpGroup] = []
    for part in sorted(connected_parts(group.operations, joins), key=_first_of(group)):
        piece = replace(group, operations=tuple(op for op in group.operations if op in part))
        are_heavy = found and piece.is_heavy and found[-1].is_heavy
        ended = len(found) == 1 and before is not None and _goes_on(before, found[0]) and piece.is_heavy
        if found and not ended and not (are_heavy and (taken_by(piece, free) or taken_by(found[-1], free))):
            found[-1] = found[-1].with_(piece)
        else:
            found.append(piece)
    return found


def _first_of(group: OpGroup) -> Callable[[set[OpNode]], int]:
    """When the first of some of a group's operations runs."""
    turns = {op: turn for turn, op in enumerate(group.operations)}
    return lambda part: min(turns[op] for op in part)


def _halves(group: OpGroup, free: set[OpNode]) -> list[OpGroup]:
    """Cut a layer where only one tensor goes on: after its residual additions."""
    cuts = _narrow_places(group.operations, free)
    pieces = [
        replace(group, operations=group.operations[begin:end])
        for begin, end in pairwise([0, *cuts, len(group.operations)])
    ]
    joined = pieces[:1]
    for piece in pieces[1:]:
        if piece.is_heavy and joined[-1].is_heavy:
            joined.append(piece)
        else:
            joined[-1] = joined[-1].with_(piece)
    return joined


def _narrow_places(operations: Sequence[OpNode], free: set[OpNode]) -> list[int]:
    """Where exactly one tensor, of those that both sides know, is needed later."""
    last: dict[OpNode, int] = {}
    first: dict[OpNode, int] = {op: index for index, op in enumerate(operations)}
    for index, op in enumerate(operations):
        for source in op.sources:
            if source not in free and source.kind == "call":
                first.setdefault(source, index)
                last[source] = index
    places = []
    for place in range(1, len(operations)):
        alive = [op for op, end in last.items() if first[op] < place <= end]
        if len(alive) == 1 and isinstance(alive[0].value, Tensor):
            places.append(place)
    return places


def _joined(groups: Sequence[OpGroup]) -> list[OpGroup]:
    """Join groups without work of their own: to the one before if that is what they go on with, else to the next.

    A normalisation between layers, or between the last one and something else, stays by itself, so that all layers
    are alike.
    """
    found: list[OpGroup] = []
    for group in groups:
        before = found[-1] if found else None
        if before is None:
            found.append(group)
        elif _goes_on(before, group):
            found[-1] = before.with_(group)
        elif _leads_to(before, group):
            found[-1] = replace(group, operations=(*before.operations, *group.operations))
        else:
            found.append(group)
    return found


def _goes_on(before: OpGroup, group: OpGroup) -> bool:
    """Whether a group without work belongs to the one before."""
    if group.is_heavy or not before.feeds(group):
        return False
    return (group.in_layer and before.in_layer) or not group.has_parameters


def _leads_to(before: OpGroup, group: OpGroup) -> bool:
    """Whether what came before does no work and belongs to this group."""
    alone = not before.in_layer and not (group.in_layer and before.has_parameters)
    return not before.is_heavy and alone and before.feeds(group)


def _without_commons(groups: Sequence[OpGroup], free: set[OpNode]) -> list[OpGroup]:
    """Put what is one for all samples and taken by several groups, such as a position bias, into groups apart."""
    taken = [{source for op in group.operations for source in op.sources} for group in groups]
    takers = Counter(op for sources in taken for op in sources)
    found: list[OpGroup] = []
    for group, inside in zip(groups, taken, strict=True):
        common: dict[OpNode, None] = {}
        for op in group.operations:
            known = all(s in common or s in free or s.kind == "parameter" for s in op.sources)
            if known and not op.per_sample and not op.misplaced:
                common[op] = None
        shared = [op for op in common if takers[op] > (op in inside)]
        needed = {each for op in shared for each in made_from(op)}
        apart = replace(group, in_layer=False, operations=tuple(op for op in common if op in needed))
        rest = tuple(op for op in group.operations if op not in set(apart.operations))
        if apart.is_heavy and rest:
            found += [apart, replace(group, operations=rest)]
        else:
            found.append(group)
    return found


def _single(operations: Sequence[OpNode]) -> list[OpGroup]:
    """A group for each operator, with the views of what it made and the parts of its results."""
    owner: dict[OpNode, int] = {}
    found: list[list[OpNode]] = []
    for op in operations:
        owners = {owner[made] for made in (_maker(source, owner) for source in op.sources) if made is not None}
        if op.operator in VIEWS and len(owners) == 1:
            index = owners.pop()
        else:
            index = len(found)
            found.append([])
        owner[op] = index
        found[index].append(op)
    return [OpGroup(each[0].path, False, tuple(each)) for each in found]


def _maker(op: OpNode, owner: Mapping[OpNode, int]) -> OpNode | None:
    """The operation whose result is shown, past views that every block has for itself."""
    while op not in owner:
        if op.kind != "call" or not op.sources:
            return None
        op = op.sources[0]
    return op
