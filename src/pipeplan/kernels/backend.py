"""What a backend says of itself: which groups it takes, and whether it is here; and where backends are found.

A backend is a module with ``BACKENDS``. Ours are in :mod:`pipeplan.kernels.backends`, those of a user in modules that
they name, which also have what builds a group (see :mod:`pipeplan.runtime.backends`).
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pipeplan.errors import UsageError, choose_from
from pipeplan.files.profile import EAGER
from pipeplan.kernels import backends
from pipeplan.kernels.operators import OperatorDag
from pipeplan.kernels.patterns import KernelPattern
from pipeplan.kernels.rules import PatternRule, generate, module_groups


@dataclass(frozen=True, slots=True)
class Backend:
    """A backend's patterns and rules, and what it needs.

    ``whole``: it also takes the whole model; ``modules``: also modules of the model, as large as layers; each of
    operators that it runs: those of its rule, or of its patterns where it has no rule. One that ``compiles_slowly`` is
    offered single operators and the largest groups only, beside modules. ``trains``: it runs backward, too.
    ``packages`` are distributions that must be installed, with the versions that it is for: at least one, and below
    another ("2.1", "2.14"; empty for any). Outputs that are farther from eager's than ``tolerance``, relative to the
    largest number of eager's, are wrong.
    """

    name: str
    patterns: tuple[KernelPattern, ...] = ()
    rule: PatternRule | None = None
    whole: bool = False
    modules: bool = False
    compiles_slowly: bool = False
    trains: bool = True
    devices: tuple[str, ...] = ("cpu", "cuda")
    packages: Mapping[str, tuple[str, str]] | None = None
    tolerance: float = 1e-4
    module: str = ""

    def groups(self, graph: OperatorDag) -> tuple[tuple[str, ...], ...]:
        """What it takes of a model, each group once, the smallest first."""
        found = {group: None for pattern in self.patterns for group in pattern.matches(graph)}
        if self.rule is not None:
            found |= dict.fromkeys(generate(graph, self.rule))
        if self.rule is None:
            runs = {id_ for group in found for id_ in group}
        else:
            runs = {op.id for op in graph if self.rule.op_rule(op)}
        if self.whole and 1 < len(graph) == len(runs):
            found[graph.order] = None
        if self.compiles_slowly:
            found = dict.fromkeys(_single_or_largest(found))
        if self.modules:
            found |= dict.fromkeys(group for group in module_groups(graph) if runs.issuperset(group))
        return tuple(sorted(found, key=lambda group: (len(group), graph.place[group[0]])))

    def absence(self, device: str, *, training: bool) -> str | None:
        """Why it cannot run here; None if it can."""
        if device not in self.devices:
            return f"it runs on {' and '.join(self.devices)} only, and this is {device}"
        if training and not self.trains:
            return "it runs forward only; add --inference"
        for package, (least, below) in (self.packages or {}).items():
            try:
                found = version(package)
            except PackageNotFoundError:
                return f"{package} is not installed; pip install {package}"
            if (least and _parts(found) < _parts(least)) or (below and _parts(found) >= _parts(below)):
                return f"it is for {package} {least or 'any'} up to below {below or 'any'}, and this is {found}"
        return None


def _parts(text: str) -> tuple[int, ...]:
    """A version's leading numbers."""
    numbers = []
    for part in text.partition("+")[0].split("."):
        if not part.isdecimal():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _single_or_largest(groups: Iterable[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """Groups of one operator, and those that are in no larger group."""
    larger: list[frozenset[str]] = []
    for group in sorted(groups, key=len, reverse=True):
        if len(group) == 1:
            yield group
        elif not any(other.issuperset(group) for other in larger):
            larger.append(frozenset(group))
            yield group


def known_backends(modules: Sequence[str] = ()) -> dict[str, Backend]:
    """{name: backend}, ours and those of modules that a user names, which come instead of ours of the same name.

    Raises:
        UsageError: a module is not there, fails, or has no ``BACKENDS``.
    """
    ours = [f"{backends.__name__}.{each.name}" for each in pkgutil.iter_modules(backends.__path__)]
    return {each.name: each for module in (*ours, *modules) for each in _of_module(module)}


def said_of_backends(modules: Sequence[str], device: str) -> dict[str, dict[str, Any]]:
    """{name: what a run must know of a backend, in plain values}, as :func:`known_backends` has them.

    Where its rules are, its tolerance, why it cannot run on the device (None: it can), and whether it trains.
    """
    return {
        name: {
            "module": each.module,
            "tolerance": each.tolerance,
            "absence": each.absence(device, training=False),
            "trains": each.trains,
        }
        for name, each in known_backends(modules).items()
    }


def _of_module(name: str) -> Iterator[Backend]:
    try:
        module = import_module(name)
    except Exception as error:
        raise UsageError(
            f"--backend-rules {name}: it cannot be imported: {type(error).__name__}: {error}; give a module that "
            "Python finds here, such as my_backend for my_backend.py"
        ) from error
    found = getattr(module, "BACKENDS", None)
    if not isinstance(found, tuple | list) or not found or not all(isinstance(each, Backend) for each in found):
        raise UsageError(f"--backend-rules {name}: it has no BACKENDS, a tuple of pipeplan.kernels.backend.Backend")
    for each in found:
        yield replace(each, module=name)


def chosen_backends(names: Sequence[str], known: Mapping[str, Backend]) -> tuple[Backend, ...]:
    """Backends by name, eager first. Raises UsageError where one is not known."""
    for name in names:
        if name not in known:
            raise UsageError(f"--backends {name}: there is no such backend; {choose_from(name, sorted(known))}")
    return tuple(known[name] for name in dict.fromkeys((EAGER, *names)))
