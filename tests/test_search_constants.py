"""The constants of the search are in one file, and each says what it means and whether it was measured."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.paths import ROOT

PACKAGE = ROOT / "src" / "pipeplan"
CONSTANTS = PACKAGE / "search_constants.py"
SEARCHING = ("planning", "schedule", "partition", "sharding", "workload/steady_state")
BOUNDING = ("workload/bounds.py", "workload/few_device_bounds.py")
STEP = "SearchStep"
NEUTRAL = (0, 1, -1)
"""Numbers that are no choice: nothing, all, one."""

ELSEWHERE = {
    "partition/dapple.py _LASTING": "more than there can be",
    "partition/graph/shapes.py NEVER": "more than there can be",
    "partition/recomputation.py _NOTHING": "an empty array",
    "planning/decode_search.py _WIDTHS": "bytes of a number format",
    "planning/frontier.py 0.01": "what is printed as a whole percent",
    "planning/kernel_choice.py 30.0": "the default time limit of a call",
    "planning/kernel_evolution.py EvolutionAsked.limit_s": "what is asked, by default",
    "planning/kernel_evolution.py EvolutionAsked.repeats": "what is asked, by default",
    "planning/next_steps.py 0.0005": "what is printed as 0.0 %",
    "planning/next_steps.py 0.4": "where a remark stands among others",
    "planning/request.py Request.time_limit": "what is asked, by default",
    "planning/request.py Splitting.mesh_dimensions": "what is asked, by default",
    "planning/sharding_frontier.py _MOST_WORDS": "words of a name",
    "planning/usual.py USUAL": "formulas of papers",
    "schedule/classic.py CLASSIC": "each schedule by its definition",
    "schedule/cpsat/solver.py Budget.workers": "what is asked, by default",
    "schedule/list_scheduling.py _FIRST_RULES": "each policy by its definition",
    "schedule/rules/engine.py _NAMED": "names in a text",
    "schedule/rules/given_order.py _NAMED": "names in a text",
    "schedule/rules/language.py _MOST_CHARACTERS": "the format of rules",
    "schedule/rules/values.py _LARGEST": "the format of rules",
    "schedule/rules/values.py _LONGEST": "the format of rules",
    "schedule/stage_graph.py _RANKS": "an order of roles",
    "sharding/bounds.py RELAXED": "what floats are off by",
    "sharding/compiled.py _COSTS": "a place in a tuple",
    "sharding/compiled.py _NOTHING": "an empty array",
    "sharding/compiled.py _PIECES": "how threads share work that is the same",
    "sharding/decode_graph.py TOKEN_BYTES": "bytes of a number format",
    "sharding/graph.py _NO_WAY": "a code",
    "sharding/graph.py _ONE_PAIR": "where a proof applies",
    "sharding/graph.py _UNSURE_USERS": "where a proof applies",
    "sharding/kernels.py _BLOCK": "memory of a sort whose result is the same",
    "sharding/kernels.py _MANY_BUCKETS": "memory of a sort whose result is the same",
    "sharding/kernels.py _MOST_BUCKETS": "memory of a sort whose result is the same",
    "sharding/kernels.py _NEVER": "more than there can be",
    "sharding/kernels.py _SUMS": "memory of a sort whose result is the same",
    "sharding/operator_kinds.py Attention.head_size": "what a model has, by default",
    "sharding/operator_kinds.py Convolution.kernel": "what a model has, by default",
    "sharding/operator_kinds.py CrossAttention.head_size": "what a model has, by default",
    "sharding/operator_kinds.py _FLOAT32": "bytes of a number format",
    "sharding/operator_kinds.py _INT64": "bytes of a number format",
    "sharding/operators.py MOST_DIMENSIONS": "what is asked, by default",
    "sharding/operators.py _WAYS_PER_QUESTION": "how often the time is looked at",
    "sharding/table.py _PACKED_BITS": "bits of an integer",
    "sharding/threads.py _LOOK_SECONDS": "how often the time is looked at",
}
"""Numbers that are none of the search's, and why."""


def files() -> Iterator[Path]:
    for room in SEARCHING:
        yield from sorted((PACKAGE / room).rglob("*.py"))
    yield from (PACKAGE / name for name in BOUNDING)


def numbers(value: ast.AST) -> list[float]:
    found = (each.value for each in ast.walk(value) if isinstance(each, ast.Constant))
    return [each for each in found if isinstance(each, int | float) and not isinstance(each, bool)]


def chosen(value: ast.AST) -> bool:
    """Whether a value is a number, or has some that are not neutral."""
    alone = isinstance(value, ast.Constant | ast.BinOp | ast.UnaryOp)
    return bool(numbers(value)) if alone else any(each not in NEUTRAL for each in numbers(value))


def assigned(node: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    """Upper-case names of a module, and what they are."""
    if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            yield from ((name.id, node.value) for name in names if isinstance(name, ast.Name) and name.id.isupper())


def steps(trees: dict[Path, ast.Module]) -> set[str]:
    """Classes that are steps of a search."""
    bases = {
        node.name: {base.id for base in node.bases if isinstance(base, ast.Name)}
        for tree in trees.values()
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }
    found = {STEP}
    while more := {name for name, own in bases.items() if own & found} - found:
        found |= more
    return found


def constants_of(path: Path, tree: ast.Module, of_steps: set[str]) -> Iterator[str]:
    """What is a number there: constants, defaults of fields, and fractions inside functions of planning/."""
    where = path.relative_to(PACKAGE).as_posix()
    for node in tree.body:
        yield from (f"{where} {name}" for name, value in assigned(node) if chosen(value))
        if isinstance(node, ast.ClassDef):
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.value is not None:
                    numeric = numbers(field.value) if node.name in of_steps - {STEP} else chosen_default(field.value)
                    if numeric:
                        yield f"{where} {node.name}.{field.target.id}"
    if where.startswith("planning/"):
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef):
                for number in numbers(function):
                    if isinstance(number, float) and number not in NEUTRAL and 1e-6 < number < 1e9:
                        yield f"{where} {number}"


def chosen_default(value: ast.expr) -> bool:
    return any(each not in NEUTRAL for each in numbers(value))


def documented(tree: ast.Module) -> dict[str, str]:
    """Each constant's line."""
    found = {}
    for node, after in zip(tree.body, [*tree.body[1:], ast.Pass()], strict=True):
        text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
        found |= {name: str(text) for name, _ in assigned(node)}
    return found


def test_all_constants_of_the_search_are_in_one_file() -> None:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in files()}
    of_steps = steps(trees)
    assert {"EvenCut", "ListScheduling", "Ramps", "StageGraphs"} <= of_steps
    found = {each for path, tree in trees.items() for each in constants_of(path, tree, of_steps)}
    assert found == set(ELSEWHERE)


def test_each_says_what_it_is_and_whether_it_was_measured() -> None:
    said = documented(ast.parse(CONSTANTS.read_text(encoding="utf-8")))
    assert len(said) > 200
    for name, text in said.items():
        assert text[:1].isupper(), name
        assert "easured" in text, name
        assert "\n" not in text, name


def test_each_is_used() -> None:
    used = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "pipeplan.search_constants":
                used |= {each.name for each in node.names}
    assert used == set(documented(ast.parse(CONSTANTS.read_text(encoding="utf-8"))))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("_SOON = 3", "_SOON"),
        ("SOON, LATE = 0.5, 2", "LATE"),
        ("MANY: Final = 2**10", "MANY"),
        ("STEPS = (Look(), Look(share=1 / 25))", "STEPS"),
        ("@dataclass(frozen=True)\nclass Look(SearchStep):\n    seconds: float = 1.0", "Look.seconds"),
        ("@dataclass(frozen=True)\nclass How:\n    most: int = 12", "How.most"),
        ("def look(left):\n    return 0.25 * left", "0.25"),
    ],
)
def test_another_constant_is_found(text: str, name: str) -> None:
    tree = ast.parse(text)
    path = PACKAGE / "planning" / "some.py"
    assert f"planning/some.py {name}" in set(constants_of(path, tree, steps({path: tree})))
