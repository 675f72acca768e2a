"""``--rules pkg.mod:name``: rules with functions of the user's own, from a module of the working directory."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pipeplan.cli.main import cli
from pipeplan.costs import build_workload
from pipeplan.errors import UsageError
from pipeplan.examples import shape
from pipeplan.files import read_plan, write_file
from pipeplan.schedule.rules import ReadyAction, Rules, State, TypeTraversal, schedule_by_rules
from pipeplan.workload.task_graph import task_graph

pytestmark = pytest.mark.counted

MODULE = """
from pipeplan.schedule.rules import CustomOp, Rules, StageTraversal, TypeTraversal

def not_too_many(state, action):
    held = sum(state.in_flight(stage) for stage in state.stages_on(action.device))
    return action.kind != "F" or held < 3

def in_turn(state, device):
    return "BF" if state.steps(device) % 4 == 3 else "FB"

def last_one(state, ready):
    return ready[-1]

def all_four(stage, done, own_stage, own, every):
    return done >= 4

def one_later(own_stage, done, stage, number, every):
    return done * every > min(number + 1, 3)

def fails(state, action):
    return {}[action.kind]

def far(state, action):
    return state.in_flight(99) < 2

held = Rules(types=TypeTraversal(in_turn), checks=(not_too_many,))
named = Rules(name="mine", checks=(not_too_many,))
deepest = Rules(forward=StageTraversal(last_one))
gather = CustomOp("ALLGATHER", after=(0, 1), before=(2,), every=2, check_prev=all_four, check_next=one_later)
counted = Rules(in_flight=4, instructions=(gather,))
number = 3
broken = Rules(checks=(fails,))
beyond = Rules(checks=(far,))
silent = Rules(checks=(lambda state, action: None,))
kinds = Rules(types=TypeTraversal(lambda state, device: 3))
letters = Rules(types=TypeTraversal(lambda state, device: [1, 2]))
stages = Rules(forward=StageTraversal(lambda state, ready: 7))
unready = Rules(instructions=(CustomOp("ALLGATHER", after=(0, 1), before=(2,), check_prev=fails),))

def made():
    return held

def unmade():
    raise KeyError("size")

class Holder:
    inner = deepest
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with modules of the user's, and the shapes v, k and circular."""
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "raises.py").write_text("raise ZeroDivisionError('at once')")
    (tmp_path / "ends.py").write_text("import sys\nsys.exit(3)")
    (tmp_path / "unread.py").write_text("def :")
    for name, devices in (("v", 4), ("k", 2)):
        write_file(shape(name, devices), str(tmp_path / f"{name}.json"))
    write_file(shape("circular", 2, chunks=2), str(tmp_path / "circular.json"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for file in tmp_path.glob("*.py"):
        sys.modules.pop(file.stem, None)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


def refusal(*arguments: str) -> str:
    """What ``search`` says as it refuses, with exit code 2 and without a plan."""
    error = run("search", *arguments, "-o", "plan.json").exception
    assert isinstance(error, UsageError), error
    assert not Path("plan.json").exists()
    return str(error)


def planned(profile: str, rules: str, *flags: str) -> list[list[str]]:
    """[device] compute actions of the plan that a search with these rules writes; ``check`` accepts it."""
    made = run("search", f"{profile}.json", "--rules", rules, "--microbatches", "4", "-o", "plan.json", *flags)
    assert made.exit_code == 0, made.output
    checked = run("check", "plan.json", "--profile", f"{profile}.json")
    assert checked.exit_code == 0, checked.output
    programs = read_plan("plan.json").programs
    return [[text for text in program if "SEND" not in text and "RECV" not in text] for program in programs]


def orders(profile: str, rules: Rules) -> list[list[str]]:
    """The same, of rules in Python."""
    given = shape("circular", 2, chunks=2) if profile == "circular" else shape(profile, 4)
    assert given.placement is not None
    graph = task_graph(build_workload(given, given.placement, num_microbatches=4, microbatch_size=1))
    return [[graph.label(task) for task in order] for order in schedule_by_rules(graph, rules)]


def at_most_three(state: State, action: ReadyAction) -> bool:
    held = sum(state.in_flight(stage) for stage in state.stages_on(action.device))
    return action.kind != "F" or held < 3


def alternating(state: State, device: int) -> str:
    return "BF" if state.steps(device) % 4 == 3 else "FB"


@pytest.mark.parametrize("name", ["held", "made"])
def test_checks_and_priorities_make_the_plan_that_they_make_in_python(here: Path, name: str) -> None:
    found = planned("v", f"mine:{name}")
    assert found == orders("v", Rules(types=TypeTraversal(alternating), checks=(at_most_three,)))
    assert found != orders("v", Rules(types=TypeTraversal(alternating)))
    assert found != orders("v", Rules(checks=(at_most_three,)))


@pytest.mark.parametrize("name", ["deepest", "Holder.inner"])
def test_a_function_picks_among_stages(here: Path, name: str) -> None:
    found = planned("circular", f"mine:{name}")
    assert found == orders("circular", Rules(forward="depth-first"))  # type: ignore[arg-type]
    assert found != orders("circular", Rules())


def test_readiness_by_counts(here: Path) -> None:
    """Fig. 6: the instruction waits for all four, and what follows it for one micro-batch more than it takes."""
    found = planned("k", "mine:counted")
    for device, texts in enumerate(found):
        assert texts.index("3ALLGATHER0") > texts.index(f"{device}F3")
        assert texts.index("2F1") > texts.index("3ALLGATHER1")
    plan = json.loads((here / "plan.json").read_text())
    needs = {(each["source"], each["target"]): each["needs"] for each in plan["dependencies"] if each.get("needs")}
    assert needs == {("0F", "3ALLGATHER"): [4, 4], ("1F", "3ALLGATHER"): [4, 4], ("3ALLGATHER", "2F"): [1, 2, 2, 2]}


def test_the_plan_says_which_rules(here: Path) -> None:
    for given, said in (("held", "held"), ("named", "mine")):
        planned("v", f"mine:{given}")
        assert json.loads((here / "plan.json").read_text())["provenance"]["options"]["rules"] == said


def test_compare_has_them_as_a_row(here: Path) -> None:
    found = run("compare", "v.json", "--rules", "mine:held", "--microbatches", "4", "--time-limit", "100s", "--json")
    assert found.exit_code == 0, found.output
    rows = {name: row for row in json.loads(found.stdout)["rows"] for name in (row["schedule"], *row.get("same", ()))}
    planned("v", "mine:held")
    assert rows["rules: held"]["makespan_ns"] == read_plan("plan.json").predicted.makespan_ns


NOT_RULES = "not Rules nor a function that returns them"


@pytest.mark.parametrize(
    ("rules", "why"),
    [
        ("nowhere:held", "--rules 'nowhere:held' cannot be imported: ModuleNotFoundError: No module named 'nowhere'"),
        ("mime:held", "did you mean mine?"),
        ("mine:nubmer", "has no attribute 'nubmer'; did you mean number?"),
        ("mine.py:held", "leave out .py: mine:held"),
        ("raises:held", "--rules 'raises:held' cannot be imported: ZeroDivisionError: at once"),
        ("ends:held", "--rules 'ends:held' cannot be imported: SystemExit: 3"),
        ("unread:held", "--rules 'unread:held' cannot be imported: SyntaxError: "),
        ("mine:unmade", "--rules 'mine:unmade': the factory failed: KeyError: 'size'"),
        ("mine:number", f"--rules 'mine:number' is a int, {NOT_RULES}; name some"),
        (
            "mine:not_too_many",
            f"is a function with arguments, {NOT_RULES}; name some, such as Rules(checks=(",
        ),
        ("mine:", f"is a module, {NOT_RULES}"),
        ("no:such.toml", "no:such.toml: there is no such file"),
        ("mine:broken", "rules 'broken': the check fails failed: KeyError: 'F' (mine.py, line 21)"),
        ("mine:beyond", "rules 'beyond': the check far failed: IndexError: list index out of range (mine.py, line 24)"),
        ("mine:silent", "rules 'silent': the check <lambda> returns nothing; let it return True or False"),
        ("mine:kinds", "the order of kinds <lambda> returns 3; let it return kinds such as 'BF' or ['B', 'F']"),
        ("mine:letters", "the order of kinds <lambda> returns [1, 2]; let it return kinds such as 'BF'"),
        ("mine:stages", "the order of stages <lambda> chose 7 on device 0, which is none of those it was given"),
    ],
)
def test_what_is_no_set_of_rules_is_refused(here: Path, rules: str, why: str) -> None:
    assert why in refusal("v.json", "--rules", rules)


def test_a_readiness_check_that_fails_is_named(here: Path) -> None:
    said = refusal("k.json", "--rules", "mine:unready")
    assert "the instruction ALLGATHER's check fails failed: TypeError: fails() takes 2 positional" in said


def test_no_file_names_a_module(here: Path) -> None:
    """Rules files are data: what looks like a module's name in one is a text, and nothing is imported."""
    for text in ("checks = ['raises:held']", "types = 'raises:held'", "forward = 'raises:held'"):
        (here / "file.toml").write_text(text)
        assert "file.toml: not a valid rules file" in refusal("v.json", "--rules", "file.toml")
    (here / "file.toml").write_text(
        "[[instruction]]\nkind = 'ALLGATHER'\nafter = 0\nbefore = 1\ncheck_prev = 'raises:held'"
    )
    assert "check_prev is not known" in refusal("v.json", "--rules", "file.toml")
    assert "raises" not in sys.modules


def test_a_file_goes_before_a_module_of_its_name(here: Path) -> None:
    (here / "mine:held").write_text('in_flight = "D - d"')
    assert planned("v", "mine:held") == orders("v", Rules(in_flight="D - d"))


def test_functions_that_no_process_can_be_sent(here: Path) -> None:
    """Workers are left out, which a note says; the plan is there all the same."""
    text = "from pipeplan.schedule.rules import Rules\nrules = Rules(in_flight='D - d', checks=(lambda s, a: True,))"
    (here / "lambdas.py").write_text(text)
    found = run("search", "v.json", "--rules", "lambdas:rules", "--workers", "2", "--placement", "all", "--json")
    assert found.exit_code == 0, found.output
    assert "workers cannot be sent all that is asked for (Can't pickle" in found.stdout + found.stderr
