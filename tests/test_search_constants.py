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
BOUNDING_CALLS = ("choice", "log", "max", "min", "randint", "range")
"""Functions whose arguments choose or bound."""
NEUTRAL = (0, 1, -1)
"""Numbers that are no choice: nothing, all, one."""
FEW = 2
"""Integers up to which one inside a function is mostly no choice: a neighbour, one of both, halves, twice."""
LARGE = 10
"""Integers beyond which a comparison is with a choice, not with how many there are of something."""

ELSEWHERE = {
    "partition/chain/kernel.py 3": "axes of an array",
    "partition/dapple.py _LASTING": "more than there can be",
    "partition/graph/in_flight.py -4": "less than there can be",
    "partition/graph/search.py -4": "less than there can be",
    "partition/graph/search.py 3": "arrays of an empty front",
    "partition/graph/shapes.py NEVER": "more than there can be",
    "partition/recomputation.py _NOTHING": "an empty array",
    "planning/candidates.py 4": "entries of a micro-batch: forward, backward, a message for each",
    "planning/decode_choice.py 4": "arrays of as many numbers",
    "planning/decode_choice.py 8": "bytes of a number",
    "planning/decode_search.py _WIDTHS": "bytes of a number format",
    "planning/frontier.py 0.01": "what is printed as a whole percent",
    "planning/kernel_choice.py 30.0": "the default time limit of a call",
    "planning/kernel_evolution.py EvolutionAsked.limit_s": "what is asked, by default",
    "planning/kernel_evolution.py EvolutionAsked.repeats": "what is asked, by default",
    "planning/kernel_stages.py 12": "letters of a checksum that are said",
    "planning/next_steps.py / 2": "where a remark stands among others",
    "planning/next_steps.py 0.0005": "what is printed as 0.0 %",
    "planning/next_steps.py 0.4": "where a remark stands among others",
    "planning/own_ways.py / 3": "forward, input and weight gradients, each as long",
    "planning/request.py Request.time_limit": "what is asked, by default",
    "planning/request.py Splitting.mesh_dimensions": "what is asked, by default",
    "planning/sharding_frontier.py _MOST_WORDS": "words of a name",
    "planning/targeted.py 3": "entries of a forward: a message before and after it",
    "planning/uniform_space.py 3": "actions of a micro-batch: forward, input and weight gradients",
    "planning/usual.py / 2": "formulas of papers",
    "planning/usual.py USUAL": "formulas of papers",
    "schedule/classic.py 6": "each schedule by its definition",
    "schedule/classic.py CLASSIC": "each schedule by its definition",
    "schedule/cpsat/solver.py Budget.workers": "what is asked, by default",
    "schedule/list_scheduling.py _FIRST_RULES": "each policy by its definition",
    "schedule/rules/engine.py _NAMED": "names in a text",
    "schedule/rules/given_order.py _NAMED": "names in a text",
    "schedule/rules/language.py 256": "the format of rules",
    "schedule/rules/language.py _MOST_CHARACTERS": "the format of rules",
    "schedule/rules/values.py _LARGEST": "the format of rules",
    "schedule/rules/values.py _LONGEST": "the format of rules",
    "schedule/stage_graph.py 4": "quarters of one",
    "schedule/stage_graph.py _RANKS": "an order of roles",
    "sharding/bounds.py / 2": "halving",
    "sharding/bounds.py 60": "halvings until floats do not change",
    "sharding/bounds.py RELAXED": "what floats are off by",
    "sharding/compiled.py / 2": "room below the largest float",
    "sharding/compiled.py 8": "what floats are off by",
    "sharding/compiled.py _COSTS": "a place in a tuple",
    "sharding/compiled.py _NOTHING": "an empty array",
    "sharding/compiled.py _PIECES": "how threads share work that is the same",
    "sharding/cost_model.py 3": "places in a tuple",
    "sharding/decode_graph.py TOKEN_BYTES": "bytes of a number format",
    "sharding/expansion.py 3": "queries, keys and values",
    "sharding/expansion.py 4": "half as wide and half as high",
    "sharding/graph.py _NO_WAY": "a code",
    "sharding/graph.py _ONE_PAIR": "where a proof applies",
    "sharding/graph.py _UNSURE_USERS": "where a proof applies",
    "sharding/held_bounds.py / 2": "half for each end of a pair",
    "sharding/kernels.py 4": "how often something is made anew whose result is the same",
    "sharding/kernels.py 8": "runs with which a sort begins",
    "sharding/kernels.py _BLOCK": "memory of a sort whose result is the same",
    "sharding/kernels.py _MANY_BUCKETS": "memory of a sort whose result is the same",
    "sharding/kernels.py _MOST_BUCKETS": "memory of a sort whose result is the same",
    "sharding/kernels.py _NEVER": "more than there can be",
    "sharding/kernels.py _SUMS": "memory of a sort whose result is the same",
    "sharding/operator_kinds.py 3": "numbers of each token that a loss exchanges",
    "sharding/operator_kinds.py Attention.head_size": "what a model has, by default",
    "sharding/operator_kinds.py Convolution.kernel": "what a model has, by default",
    "sharding/operator_kinds.py CrossAttention.head_size": "what a model has, by default",
    "sharding/operator_kinds.py _FLOAT32": "bytes of a number format",
    "sharding/operator_kinds.py _INT64": "bytes of a number format",
    "sharding/operators.py MOST_DIMENSIONS": "what is asked, by default",
    "sharding/operators.py _WAYS_PER_QUESTION": "how often the time is looked at",
    "sharding/table.py 8": "what floats are off by",
    "sharding/table.py _PACKED_BITS": "bits of an integer",
    "sharding/threads.py _LOOK_SECONDS": "how often the time is looked at",
    "workload/steady_state/repetend.py 3": "the middle half of a run",
    "workload/steady_state/repetend.py 4": "the middle half of a run",
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
    """What is a number there: constants, defaults of fields, and what weighs or limits inside functions."""
    where = path.relative_to(PACKAGE).as_posix()
    for node in tree.body:
        yield from (f"{where} {name}" for name, value in assigned(node) if chosen(value))
        if isinstance(node, ast.ClassDef):
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.value is not None:
                    numeric = numbers(field.value) if node.name in of_steps - {STEP} else chosen_default(field.value)
                    if numeric:
                        yield f"{where} {node.name}.{field.target.id}"
    yield from (f"{where} {number}" for number in in_functions(tree))


def in_functions(tree: ast.Module) -> Iterator[str]:
    """Numbers inside functions that weigh or limit something, as far as their place shows it.

    Fractions; what something is divided by; and of other integers, beside 0 to 2, those that are defaults of arguments,
    factors and divisors, given to a function that chooses or bounds, alternatives in a row, or large.
    """
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                yield from weighing(node)


def weighing(node: ast.AST) -> Iterator[str]:
    """Each such number that a part of a function has."""
    if isinstance(node, ast.Constant) and isinstance(node.value, float) and node.value not in NEUTRAL:
        if 1e-6 < node.value < 1e9:
            yield f"{node.value}"
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and abs(integer(node.right)) > 1:
        yield f"/ {integer(node.right)}"
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.FloorDiv):
        yield from many(node.left, node.right)
    elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Mult | ast.Div | ast.FloorDiv):
        yield from many(node.value)
    elif isinstance(node, ast.arguments):
        yield from many(*node.defaults, *filter(None, node.kw_defaults))
    elif isinstance(node, ast.Call) and name_of(node.func) in BOUNDING_CALLS:
        yield from many(*node.args)
    elif isinstance(node, ast.Compare):
        yield from many(node.left, *node.comparators, beyond=LARGE)
    elif isinstance(node, ast.Slice):
        yield from many(*filter(None, (node.lower, node.upper)), beyond=LARGE)
    elif isinstance(node, ast.Tuple | ast.List) and sum(map(bool, map(integer, node.elts))) > FEW:
        yield from many(node)


def many(*nodes: ast.expr, beyond: int = FEW) -> Iterator[str]:
    """Those that are integers beyond some, in rows of them, too."""
    for node in nodes:
        if isinstance(node, ast.Tuple | ast.List):
            yield from many(*node.elts, beyond=beyond)
        elif beyond < abs(number := integer(node)) < 1e9:
            yield f"{number}"


def integer(node: ast.expr) -> int:
    """What an expression of integers alone is; 0 for any other."""
    parts = [each for each in ast.walk(node) if isinstance(each, ast.expr)]
    if not all(isinstance(each, ast.Constant | ast.BinOp | ast.UnaryOp) for each in parts):
        return 0
    values = [each.value for each in parts if isinstance(each, ast.Constant)]
    return int(eval(ast.unparse(node), {}, {})) if all(type(value) is int for value in values) else 0


def name_of(function: ast.expr) -> str:
    """The name by which a function is called."""
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


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
    texts = [path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")]
    for text in texts:
        for node in ast.walk(ast.parse(text)) if "pipeplan.search_constants" in text else ():
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
        ("def look(left):\n    return left / 2", "/ 2"),
        ("def look(left):\n    return left // 2**10", "1024"),
        ("def look(tries=3): ...", "3"),
        ("def look(*, ks=(1, 2, 4)): ...", "4"),
        ("def look(left):\n    left *= 4", "4"),
        ("def look(left):\n    return [each for each in (1, 2, 8) if each < left]", "8"),
        ("def look(left):\n    return choice((*left, 5))", "5"),
        ("def look(left):\n    return random.randint(1, 3)", "3"),
        ("def look(left):\n    return left > 64", "64"),
        ("def look(left):\n    return left[:100]", "100"),
    ],
)
def test_another_constant_is_found(text: str, name: str) -> None:
    tree = ast.parse(text)
    for room in SEARCHING:
        path = PACKAGE / room / "some.py"
        assert f"{room}/some.py {name}" in set(constants_of(path, tree, steps({path: tree})))
