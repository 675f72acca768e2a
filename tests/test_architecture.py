"""docs/architecture.md is true: its picture is that of the import contracts and of the code, its names are there."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from types import CodeType, FrameType
from typing import Any

import networkx
import pytest

from builders.profiles import profile_of
from pipeplan.files import CostRow, write_file
from runtime_support.rooms import RUNTIME, SPEC, imports_of, modules
from support.commands import pipeplan
from support.paths import ROOT

PACKAGE = ROOT / "src" / "pipeplan"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
OUTSIDE = {"__init__", "__main__", "_version"}
"""Files of a package that are no rooms."""

TIMES = (3, 7, 2, 9)
FLAGS = ("--devices", "3", "--microbatches", "4", "--memory", "60B", "--deterministic", "--time-limit", "1s")
"""A search of four blocks that is not over before it has tried all its means."""

ROOM = re.compile(r"(?<!\S)(\w+)(?:/|\.py)(?!\S)")
Levels = list[set[str]]


# The picture -----------------------------------------------------------------------------------------------------


@cache
def halves() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The lines of the picture, left and right."""
    lines = PAGE.split("```text\n")[1].split("\n```")[0].splitlines()
    parts = [line.partition("|") for line in lines]
    return tuple(left for left, _, _ in parts), tuple(right for _, _, right in parts)


def levels() -> Levels:
    """The rooms of each line, the highest first."""
    return [set(ROOM.findall(line)) for line in halves()[0]]


def runtime_levels() -> Levels:
    """Those of runtime/."""
    found = [set(ROOM.findall(line)) for line in halves()[1]]
    assert {"runtime"} in found
    return [names for names in found[found.index({"runtime"}) + 1 :] if names]


def below_runtime() -> set[str]:
    """The rooms after the arrow that leads from runtime/."""
    (line,) = (right for right in halves()[1] if right.strip().startswith("<--"))
    return set(line.split()[1:])


def above_runtime() -> set[str]:
    """The rooms from which an arrow leads to runtime/."""
    left, right = halves()
    (index,) = (index for index, line in enumerate(right) if line.strip().startswith("-->"))
    assert ROOM.findall(right[index]) == ["runtime"]
    return set(ROOM.findall(left[index]))


# Contracts and code ----------------------------------------------------------------------------------------------


def contract(begin: str) -> dict[str, Any]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (found,) = (each for each in settings["tool"]["importlinter"]["contracts"] if each["name"].startswith(begin))
    return dict(found)


def layers(begin: str, package: str) -> Levels:
    return [
        {name.strip().removeprefix(f"{package}.") for name in line.split("|")} for line in contract(begin)["layers"]
    ]


def forbidden(begin: str) -> tuple[set[str], set[str]]:
    """Rooms that a contract forbids, and modules of workload/."""
    names = {name.removeprefix("pipeplan.") for name in contract(begin)["forbidden_modules"]}
    parts = {name.removeprefix("workload.") for name in names if name.startswith("workload.")}
    return {name for name in names if "." not in name}, parts


def rooms_in(folder: Path) -> set[str]:
    """Packages and modules of a folder."""
    packages = {path.parent.name for path in folder.glob("*/__init__.py")}
    return packages | {path.stem for path in folder.glob("*.py")} - OUTSIDE


def imports_between(package: str) -> Iterator[tuple[str, str, str]]:
    """(module, its room, the room it imports) of all imports from one room of a package into another."""
    for module in modules():
        for name in imports_of(module):
            ours = all(each.startswith(f"{package}.") for each in (module, name))
            source, target = (each.removeprefix(f"{package}.").partition(".")[0] for each in (module, name))
            if ours and source != target and not {source, target} & OUTSIDE:
                yield module, source, target


def test_the_picture_has_the_rooms_that_exist() -> None:
    assert set().union(*levels(), {"runtime"}) == rooms_in(PACKAGE)
    assert set().union(*runtime_levels()) == rooms_in(PACKAGE / "runtime")


def test_the_picture_is_that_of_the_contracts() -> None:
    assert levels() == layers("Imports go down", "pipeplan")
    assert runtime_levels() == layers("The rooms of runtime/", "pipeplan.runtime")
    everything = set().union(*levels())
    assert below_runtime() == everything - forbidden("runtime/ stands on")[0]
    beside = forbidden("cli/ imports")[0] | {"cli", "_api"}
    (said,) = re.findall(r"^\* `cli/` imports (.*?), and reaches the rest", PAGE, re.MULTILINE | re.DOTALL)
    named = set(re.findall(r"`(\w+)`", said))
    assert everything - beside == named
    assert named <= set(re.findall(r"\w+", contract("cli/ imports")["name"]))


@pytest.mark.parametrize("begin", ["runtime/ stands on", "checker/ knows"])
def test_of_workload_they_import_the_vocabulary(begin: str) -> None:
    (said,) = re.findall(r"vocabulary of `workload/` \((.*?)\)", PAGE, re.DOTALL)
    more = (
        {"tail", "exchanges", "program_network"} if begin.startswith("runtime/") else set()
    )  # emulation waits as long as is predicted
    assert set(re.findall(r"`(\w+)`", said)) | more == rooms_in(PACKAGE / "workload") - forbidden(begin)[1]


def test_imports_follow_the_picture() -> None:
    """Read from the source, imports inside functions too."""
    height = {name: -index for index, names in enumerate(levels()) for name in names}
    for module, source, target in imports_between("pipeplan"):
        if target == "runtime":
            assert {source} == above_runtime(), module
        elif source == "runtime":
            assert target in below_runtime(), module
        else:
            assert height[source] > height[target], module
    inside = {name: -index for index, names in enumerate(runtime_levels()) for name in names}
    assert all(inside[source] > inside[target] for _, source, target in imports_between("pipeplan.runtime"))
    executor = {
        name for module in modules() if module.startswith(f"{RUNTIME}.executor.") for name in imports_of(module)
    }
    assert {name for name in executor if name.startswith(f"{RUNTIME}.models")} == {SPEC}


def packages_of(module: str) -> set[str]:
    """The packages that a module lies in."""
    parts = module.split(".")
    return {".".join(parts[:depth]) for depth in range(1, len(parts))}


def test_no_module_is_needed_for_its_own_import() -> None:
    """Imports inside functions count, and so do the packages around a module, which its import runs."""
    edges = []
    for module in modules():
        for name in imports_of(module) & set(modules()):
            around = packages_of(name) - packages_of(module) - {module}
            edges += [(module, other) for other in {name, *around}]
    groups = networkx.strongly_connected_components(networkx.DiGraph(edges))
    assert [sorted(group) for group in groups if len(group) > 1] == []


def test_a_class_is_defined_in_one_module() -> None:
    """A leading underscore not counted: a word has one meaning."""
    where: dict[str, set[str]] = {}
    for module, path in modules().items():
        for name in re.findall(r"^class _*(\w+)", path.read_text(encoding="utf-8"), re.MULTILINE):
            where.setdefault(name, set()).add(module)
    assert len(where) > 400
    assert {name: found for name, found in where.items() if len(found) > 1} == {}


def test_the_heavy_ones_are_where_the_page_says() -> None:
    where: dict[str, set[str]] = {"torch": set(), "ortools": set()}
    for module in modules():
        for heavy in {name.partition(".")[0] for name in imports_of(module)} & set(where):
            where[heavy].add(module.removeprefix("pipeplan."))
    assert {name.partition(".")[0] for name in where["torch"]} == {"runtime"}
    assert all(name.startswith("schedule.cpsat") for name in where["ortools"])
    assert not any("pydantic" in name for module in modules() if ".workload" in module for name in imports_of(module))


def test_the_readme_draws_rooms_that_exist() -> None:
    """A way through the rooms, not all of them: that is this page's picture."""
    picture = README.split("## Architecture\n\n```")[1].split("```")[0]
    drawn = {name for name, _ in re.findall(r"\b(\w+)(/|\.py)", picture)}
    assert {"files", "costs", "partition", "schedule", "lower", "checker", "runtime"} <= drawn
    assert drawn <= set().union(*levels(), {"runtime"}, *runtime_levels())


# Names on the page -----------------------------------------------------------------------------------------------


def names_in(text: str) -> list[str]:
    """What is named as ``room.module.Name``."""
    known = set().union(*levels(), {"runtime"})
    return [name for name in re.findall(r"`([\w.]+\.\w+)`", text) if name.partition(".")[0] in known - {"pipeplan"}]


def walk() -> list[list[str]]:
    """The names in each step of the walk."""
    steps = re.split(r"^\d+\. ", PAGE.split("## From a profile to a run")[1], flags=re.MULTILINE)[1:]
    return [names_in(step) for step in steps]


@cache
def _body_of(module: str) -> list[ast.stmt]:
    return ast.parse(modules()[module].read_text("utf-8")).body


def defined(name: str) -> bool:
    """Whether a module defines it, or a class in one does."""
    parts = name.split(".")
    module = next(end for end in range(len(parts), 0, -1) if ".".join(["pipeplan", *parts[:end]]) in modules())
    body = _body_of(".".join(["pipeplan", *parts[:module]]))
    for part in parts[module:]:
        found = [each for each in body if getattr(each, "name", None) == part]
        if not found:
            return False
        body = getattr(found[0], "body", [])
    return len(parts) > module


def test_every_name_is_defined_where_the_page_says() -> None:
    names = [name for name in names_in(PAGE) if not name.endswith(".py")]
    assert len(names) > 40
    assert [name for name in names if not defined(name)] == []


def test_ten_types() -> None:
    rows = re.findall(r"^\| ([A-Z]\w+) \|.*\| (.*) \|$", PAGE.split("## Ten types")[1], re.MULTILINE)
    assert len(rows) == 10
    assert all(names_in(where)[0].endswith(f".{name}") for name, where in rows)


def test_a_search_walks_as_the_page_says(tmp_path: Path) -> None:
    """Every function named in steps 1 to 9 is called, and those that begin a step one after the other."""
    rows = [CostRow(microbatch_size=1, forward_ns=t, backward_ns=2 * t, activation_bytes=10 + t) for t in TIMES]
    write_file(profile_of(rows), str(tmp_path / "profile.json"))
    aside = ("runtime.", "examples.")  # other verbs, which have made the profile
    steps = [[name for name in step if not name.startswith(aside)] for step in walk()[:9]]
    called: dict[str, None] = {}

    names = {_code_of(name): name for step in steps for name in step}

    def note(frame: FrameType, _event: str, _: object) -> None:
        if (name := names.get(frame.f_code)) is not None:
            if name.endswith(".planned"):  # which makes the first schedule a plan, too
                called.pop(name, None)
            called.setdefault(name)

    before = sys.gettrace()
    sys.settrace(note)
    try:
        found = pipeplan("search", "profile.json", *FLAGS, "-o", "plan.json", cwd=tmp_path)
    finally:
        sys.settrace(before)
    assert found.returncode == 0, found.stderr
    assert {name for step in steps for name in step} - set(called) == set()
    first = [step[0] for step in steps]
    assert sorted(first, key=list(called).index) == first


def _code_of(name: str) -> CodeType:
    *path, last = name.split(".")
    for end in range(len(path), 0, -1):
        module = ".".join(["pipeplan", *path[:end]])
        if module in modules():
            function: Callable[..., object] = resolve_name(f"{module}:{'.'.join([*path[end:], last])}")
            return getattr(function, "__func__", function).__code__
    raise AssertionError(name)


# Packages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("__init__.py")), ids=lambda path: path.parent.name)
def test_every_package_says_what_lives_in_it(path: Path) -> None:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert text is not None
    head, _, rest = text.partition("\n\n")
    assert head.endswith(".")
    assert re.search(r"\bHere: .*\bNot here: \S", rest, re.DOTALL)


def test_modules_of_tests_have_names_of_their_own() -> None:
    """Of two that are called alike pytest collects one, and all of a run fails for it."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted({name for name in names if names.count(name) > 1}) == []
