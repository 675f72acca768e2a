"""How large the house is, and how tangled: lines, modules, cycles, names with several meanings, kinds by their letters.

    python benchmarks/house.py [--source src/pipeplan] [--json] [--list]

``lines of code`` are the physical lines that hold code: without blanks, comments, docstrings (strings that stand
alone), imports, and lines that only close brackets. Cycles are groups of modules, or of rooms (what lies directly in
the package), that import each other, with imports inside functions and under TYPE_CHECKING; ``from package import
name`` is an import of the module that ``name`` is, or of the package. Modules *name* a kind's letter where it stands as
a string in their code, and *compare* with it where that is in a comparison. ``--list`` says which cycles, names and
modules they are.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import networkx

KINDS = frozenset("FBIW")
"""What actions were compared with by their letters."""

NOT_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)

CLOSING = frozenset(")]},")


@dataclass(frozen=True, slots=True)
class Module:
    """A file, parsed."""

    name: str
    is_package: bool
    text: str
    tree: ast.Module


def modules_of(source: Path) -> list[Module]:
    """All modules below a package's folder, ``__init__`` under the package's name."""
    found = []
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source.parent).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        text = path.read_text(encoding="utf-8")
        found.append(Module(".".join(parts[: len(parts) - is_package]), is_package, text, ast.parse(text)))
    return found


def lines_of_code(module: Module) -> int:
    """Lines with code: no blanks, comments, docstrings, imports, closing brackets alone."""
    left_out: set[int] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import | ast.ImportFrom) or (isinstance(node, ast.Expr) and is_text(node.value)):
            left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type not in NOT_CODE and token.string not in CLOSING:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - left_out)


def is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def imports_of(module: Module, names: set[str]) -> set[str]:
    """The modules of the package that a module imports, wherever in it the import stands, and packages that this runs.

    To import a module is to import the packages it lies in, other than those that the importing module lies in, too.
    """
    package = module.name if module.is_package else module.name.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            origin = ".".join(part for part in (base, node.module) if part)
            for alias in node.names:
                inner = f"{origin}.{alias.name}"
                found.add(inner if inner in names else origin)
    packages = {outer for name in found & names for outer in outer_packages(name)}
    return (found & names) - {module.name} | packages - {module.name, *outer_packages(module.name)}


def outer_packages(name: str) -> set[str]:
    """The packages that a module lies in."""
    parts = name.split(".")
    return {".".join(parts[:depth]) for depth in range(1, len(parts))}


def cycles(edges: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Groups of nodes that reach each other, by name."""
    graph = networkx.DiGraph(edges)
    return sorted(sorted(group) for group in networkx.strongly_connected_components(graph) if len(group) > 1)


def room_of(name: str) -> str:
    """What lies directly in the package: ``schedule`` of ``pipeplan.schedule.rules.engine``."""
    return name.split(".")[1] if "." in name else name


def shared_names(modules: Iterable[Module]) -> dict[str, list[str]]:
    """{class name: the modules that define it at their top level}, where there are several."""
    where: defaultdict[str, list[str]] = defaultdict(list)
    for module in modules:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef):
                where[node.name.lstrip("_")].append(module.name)
    return {name: found for name, found in sorted(where.items()) if len(set(found)) > 1}


def names_kinds(module: Module) -> bool:
    """Whether a kind's letter stands anywhere as a string."""
    tokens = tokenize.generate_tokens(io.StringIO(module.text).readline)
    return any(token.type == tokenize.STRING and token.string.strip("\"'") in KINDS for token in tokens)


def compares_with_kinds(module: Module) -> bool:
    """Whether anything is compared with a kind's letter."""
    return any(_letters(node) for node in ast.walk(module.tree) if isinstance(node, ast.Compare | ast.match_case))


def _letters(node: ast.Compare | ast.match_case) -> list[str]:
    sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else list(_patterns(node.pattern))
    return [text for side in sides for text in _texts(side) if text and set(text) <= KINDS]


def _patterns(pattern: ast.pattern) -> Iterator[ast.expr]:
    return (each.value for each in ast.walk(pattern) if isinstance(each, ast.MatchValue))


def _texts(node: ast.expr) -> Iterator[str]:
    """The strings a side of a comparison is, or is a display of."""
    for each in node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]:
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            yield each.value


def measure(source: Path) -> tuple[dict[str, int], Mapping[str, object]]:
    """The figures, and what lies behind those that should be small."""
    modules = modules_of(source)
    names = {module.name for module in modules}
    edges = [(module.name, other) for module in modules for other in imports_of(module, names)]
    rooms = {(room_of(a), room_of(b)) for a, b in edges if room_of(a) != room_of(b)}
    by_module, by_room = cycles(edges), cycles(rooms)
    classes = shared_names(modules)
    compared = [module.name for module in modules if compares_with_kinds(module)]
    named = [module.name for module in modules if names_kinds(module)]
    figures = {
        "modules": len(modules),
        "packages": sum(module.is_package for module in modules),
        "lines": sum(len(module.text.splitlines()) for module in modules),
        "lines of code": sum(map(lines_of_code, modules)),
        "cycles among modules": len(by_module),
        "cycles among rooms": len(by_room),
        "class names in several modules": len(classes),
        "modules that name a kind's letter": len(named),
        "modules that compare with a kind's letter": len(compared),
    }
    return figures, {"cycles": by_module, "rooms": by_room, "classes": classes, "named": named, "compared": compared}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, default=Path(__file__).parent.parent / "src" / "pipeplan")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    figures, details = measure(options.source)
    if options.json:
        print(json.dumps(figures | (dict(details) if options.list else {}), indent=1))
        return
    for what, number in figures.items():
        print(f"{number:8,}  {what}")
    if options.list:
        print(json.dumps(details, indent=1))


if __name__ == "__main__":
    main()
