"""Roles instead of letters: where kinds may be named, and what adding one in ``workload/kinds.py`` is enough for."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

import pipeplan
from builders.chains import chain_workload
from pipeplan.schedule.list_scheduling import in_flight_limits, list_schedule, policies
from pipeplan.schedule.rules.engine import schedule_by_rules
from pipeplan.schedule.rules.language import Rules
from pipeplan.schedule.stage_graph import Rule, Stages, TrialRun
from pipeplan.workload.action import Action, operation_of
from pipeplan.workload.elements import Dependency, DeviceMemory, Operation, Stage
from pipeplan.workload.engine import with_links
from pipeplan.workload.kinds import (
    ACTIVATIONS,
    COMPUTE_KINDS,
    GRADIENTS,
    KINDS,
    MEMORY_KINDS,
    PARAMETERS,
    Kind,
    MemoryBytes,
    Resource,
    Role,
    in_order,
    is_instruction,
    kind_of,
    payload_of,
    role_of,
)
from pipeplan.workload.memory import peak_memory
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.task_graph import earliest_starts, task_graph
from pipeplan.workload.workload import Workload
from references.memory import followed

ALLOWED = {
    "partition/baselines.py": "steps of the paper's simulator",
    "partition/chain/autopipe.py": "steps of the paper's simulator",
    "schedule/classic.py": "classic schedules are scripts of letters",
}
"""Modules that compare with a kind's letter, and why they may. Tables keyed by letters count as comparisons.

The text grammar, file readers and ``workload/kinds.py`` might, too, and do not."""


def test_only_a_few_modules_compare_with_a_kinds_letter() -> None:
    source = Path(pipeplan.__file__).parent
    found = {
        str(path.relative_to(source)): lines
        for path in sorted(source.rglob("*.py"))
        if (lines := compared_with_letters(path.read_text()))
    }
    assert not {path: lines for path, lines in found.items() if path not in ALLOWED}
    assert found.keys() == ALLOWED.keys(), "a module that no longer compares letters leaves the list"
    assert len(ALLOWED) <= 10


@pytest.mark.parametrize(
    "text",
    [
        "kind == 'F'",
        "'W' != kind",
        "source == target == 'F'",
        "kind in 'BI'",
        "kind not in ('B', 'I')",
        "kind in {'F', 'ALLGATHER'}",
        "'I' in kinds",
        "kind in frozenset('BI')",
        "{'F': 1, 'W': 2}.get(kind)",
        "match kind:\n    case 'B' | 'I':\n        pass",
        "kind.startswith('F')",
        "kind.endswith('B')",
    ],
)
def test_comparisons_are_found(text: str) -> None:
    assert compared_with_letters(text) == [ast.parse(text).body[0].lineno + text.count("\n    case")]


@pytest.mark.parametrize("text", ["kind = 'F'", "f'{stage}F'", "role is Role.FORWARD", "unit == 'GB'", "kind in ''"])
def test_what_only_names_a_letter_is_left_alone(text: str) -> None:
    assert compared_with_letters(text) == []


def compared_with_letters(text: str) -> list[int]:
    """The lines on which something is compared with a kind's letter, looked for among some, or looked up by one."""
    if not re.search(f"[\"'][{''.join(COMPUTE_KINDS)}]+[\"']", text):
        return []  # most modules have none, and need not be parsed
    return sorted({line for node in ast.walk(ast.parse(text)) for line in _lines(node)})


def _lines(node: ast.AST) -> Iterator[int]:
    sides: list[ast.expr | None] = []
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
    elif isinstance(node, ast.MatchValue):
        sides = [node.value]
    elif isinstance(node, ast.Dict) and all(key is not None and _letters(key) for key in node.keys):
        sides = list(node.keys)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        sides = list(node.args) if node.func.attr in ("startswith", "endswith") else []
    yield from (side.lineno for side in sides if side is not None and _letters(side))


def _letters(node: ast.expr) -> bool:
    """Whether an expression is letters of kinds, or a display of some."""
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return any(map(_letters, node.elts))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("set", "frozenset", "tuple"):
        return any(map(_letters, node.args))
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return is_text and bool(node.value) and set(node.value) <= set(COMPUTE_KINDS)


def test_the_kinds_there_are() -> None:
    roles = [Role.FORWARD, Role.BACKWARD, Role.INPUT_GRAD, Role.WEIGHT_GRAD]
    assert [kind_of(name) for name in COMPUTE_KINDS] == [
        Kind(name, role, Resource.COMPUTE, payload)
        for name, role, payload in zip(COMPUTE_KINDS, roles, ["F", "B", "B", ""], strict=True)
    ]
    assert kind_of("SEND_F") == Kind("SEND_F", Role.NETWORK, Resource.LINK, "F")
    assert kind_of("RECV_GATHER") == Kind("RECV_GATHER", Role.NETWORK, Resource.LINK, "GATHER")
    assert kind_of("GATHER") == Kind("GATHER", Role.CUSTOM, Resource.COMPUTE, "GATHER")
    assert [is_instruction(name) for name in ("GATHER", "B", "SEND_F", "SEND")] == [True, False, False, False]


@pytest.mark.parametrize("letter", COMPUTE_KINDS)
def test_a_kind_added_to_the_list_is_known_everywhere(letter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a stage's actions have another name and the same role, the engines give the same orders."""
    given = chain_workload(3, 5, split=None if letter == "B" else (12, 7), weight_grad_bytes=500, memory_bytes=3000)
    before, role = orders_of(given), role_of(letter)

    monkeypatch.setitem(KINDS, "NOVEL", Kind("NOVEL", role, Resource.COMPUTE, payload_of(letter)))
    named = renamed(given, letter, "NOVEL")

    assert any(operation.kind == "NOVEL" for operation in named.operations)
    assert [operation.role for operation in named.operations] == [operation.role for operation in given.operations]
    assert Action.parse("1NOVEL2").role is role
    assert Operation(kind="NOVEL", stage=0, duration_ns=1).role is role
    assert not named.instructions
    assert in_order(["NOVEL", "B"]) == ["B", "NOVEL"]
    assert OneMicrobatch.of(named).roles == OneMicrobatch.of(given).roles
    assert orders_of(named) == before


def test_a_kind_on_the_network_runs_beside_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it gathers is held until it ends, while the device computes; a device has one network."""
    plain = chain_workload(2, 4, forward=10, backward=20, activation_bytes=100)
    gather = Operation(kind="GATHER", stage=0, duration_ns=25, acquire_bytes=7, release_bytes=7)
    wait = Dependency(source="0F", target="0GATHER")
    own = (plain.operations[0], gather, *plain.operations[1:])
    given = replace(plain, operations=own, dependencies=(*plain.dependencies, wait))

    ends = {}
    for resource in (Resource.COMPUTE, Resource.NETWORK):
        monkeypatch.setitem(KINDS, "GATHER", Kind("GATHER", Role.CUSTOM, resource, "GATHER"))
        graph, problem = task_graph(replace(given)), OneMicrobatch.of(replace(given))
        orders = list_schedule(problem, graph, next(policies()))
        assert orders is not None
        starts = earliest_starts(graph, orders)
        ends[resource] = max(start + duration for start, duration in zip(starts, graph.durations, strict=True))
        gathers = range(graph.offsets[1], graph.offsets[2])
        assert all(starts[task] >= starts[task - 4] + 10 for task in gathers)
        assert all(after - before >= 25 for before, after in pairwise(sorted(starts[task] for task in gathers)))
    assert len(orders) == 3
    assert sorted(orders[2]) == list(gathers)
    beside = [other for other in orders[0] for task in gathers if starts[task] <= starts[other] < starts[task] + 25]
    assert beside, "the device computes while its network is busy"
    assert ends[Resource.NETWORK] < ends[Resource.COMPUTE]
    state, memory = followed(graph, starts), peak_memory(graph, orders)
    assert state.held == [0, 0, 0]
    assert [each.peak_bytes for each in memory] == state.peak[:2]
    assert memory[0].parts == MemoryBytes({ACTIVATIONS: 407})


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("shards", [1, 2])
def test_networks_without_an_order_run_what_comes_first(
    monkeypatch: pytest.MonkeyPatch, waits: bool, shards: int
) -> None:
    """Orders of devices are completed by those of networks, also for what waits for nothing."""
    monkeypatch.setitem(KINDS, "GATHER", Kind("GATHER", Role.CUSTOM, Resource.NETWORK, "GATHER"))
    devices = [[*range(shards)], [shards]]
    plain = chain_workload(1 + shards, 4, devices=devices, forward=10, backward=20, activation_bytes=100)
    gather = Operation(kind="GATHER", stage=0, duration_ns=25)
    waits_for = (Dependency(source="0F", target="0GATHER"),) if waits else ()
    operations = (plain.operations[0], gather, *plain.operations[1:])
    dependencies = (*plain.dependencies, *waits_for, Dependency(source="0GATHER", target="0B"))
    graph = task_graph(replace(plain, operations=operations, dependencies=dependencies))
    num_devices, items = len(graph.workload.devices), graph.workload.on_resource
    orders = [[t for x in there for t in range(*graph.offsets[x : x + 2])] for there in items[:num_devices]]
    complete = with_links(graph, orders)
    assert complete[:num_devices] == orders
    gathers = range(graph.offsets[1], graph.offsets[2])
    assert all(order == list(gathers) for order in complete[-shards:])
    assert len(complete) == num_devices + len(graph.workload.links) + shards
    assert peak_memory(graph, complete)


def renamed(workload: Workload, letter: str, name: str) -> Workload:
    """The same workload with another name for one kind."""

    def other(id_: str) -> str:
        stage, kind = operation_of(id_)
        return f"{stage}{name}" if kind == letter else id_

    return replace(
        workload,
        operations=tuple(replace(each, kind=name) if each.kind == letter else each for each in workload.operations),
        dependencies=tuple(
            replace(each, source=other(each.source), target=other(each.target)) for each in workload.dependencies
        ),
    )


def orders_of(workload: Workload) -> list[object]:
    """What every engine makes of a workload: rules in steps and in memory, list scheduling, runs of a stage graph."""
    graph, problem = task_graph(workload), OneMicrobatch.of(workload)
    stages = Stages(graph)
    return [
        schedule_by_rules(graph, Rules()),
        schedule_by_rules(graph, Rules(time="true", fit_memory=True)),
        [list_schedule(problem, graph, policy) for policy in policies(in_flight_limits(problem))],
        (stages.taken, stages.given, stages.needs),
        TrialRun(stages, [Rule(2)] * stages.count).device_orders,
    ]


ADDED = """
import sys
from importlib.util import find_spec, module_from_spec
from pathlib import Path

spec = find_spec("pipeplan.workload.kinds")
kinds = sys.modules[spec.name] = module_from_spec(spec)
listed = "MEMORY_KINDS = ("
source = Path(spec.origin).read_text()
assert source.count(listed) == 1
exec(source.replace(listed, '''
SCALES = MemoryKind("scales", "scale_bytes", Lifetime.ALWAYS)
PROMPTS = MemoryKind("prompts", "prompt_bytes", Lifetime.MICROBATCH)
MEMORY_KINDS = (PROMPTS, SCALES, '''), kinds.__dict__)

from dataclasses import replace
from fractions import Fraction
from builders.chains import chain_workload
from pipeplan.checker import check
from pipeplan.planning.build_plan import assemble
from pipeplan.simulator.simulation import simulate
from pipeplan.workload.task_graph import task_graph

given = chain_workload(2, 3, activation_bytes=10)
stages = tuple(replace(each, scale_bytes=7, prompt_bytes=100) for each in given.stages)
graph = task_graph(replace(given, stages=stages))
orders = [[task for task in range(graph.num_tasks) if device in graph.devices_of(task)] for device in range(2)]
plan = assemble(graph, orders, 1, Fraction(1), "gpipe")
assert [each.prompt_bytes for each in plan.predicted.memory] == [300, 300]
assert [each.peak_bytes for each in plan.predicted.memory] == [337, 337]
print(check(plan).figures()["problems"], simulate(plan).memory[0].parts)
"""


def test_kinds_of_memory_added_to_the_list_are_counted_everywhere() -> None:
    """One kept throughout, one for each micro-batch: from its first action on a stage to its last on the devices."""
    found = subprocess.run([sys.executable, "-c", ADDED], capture_output=True, text=True, check=False)
    assert found.stdout == "[] MemoryBytes(prompts=300, scales=7, activations=30)\n", found.stderr


def test_bytes_by_kind_add_up() -> None:
    state = MemoryBytes({PARAMETERS: 5, GRADIENTS: 3})
    held = state + MemoryBytes({ACTIVATIONS: 2}) * 4
    assert held == MemoryBytes({PARAMETERS: 5, GRADIENTS: 3, ACTIVATIONS: 8})
    assert hash(held) == hash(MemoryBytes(held))
    assert held.total == 16
    assert state.share(2) == MemoryBytes({PARAMETERS: 3, GRADIENTS: 2})
    assert sum([state, state], MemoryBytes()) == state * 2
    assert list(held) == list(MEMORY_KINDS)
    assert DeviceMemory.of(held).parts == held
    assert DeviceMemory.of(held).peak_bytes == 16
    stage = Stage(blocks=("a",), devices=(0,), microbatch_size=1, optimizer_bytes=7)
    assert stage.with_state(state).state == state
    adapter = TypeAdapter(MemoryBytes)
    assert adapter.validate_json(adapter.dump_json(held)) == held
    with pytest.raises(ValidationError):
        adapter.validate_json('{"unheard_bytes": 1}')
    with pytest.raises(KeyError):
        MemoryBytes({replace(PARAMETERS, name="master weights"): 1})
