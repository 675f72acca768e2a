"""Rules files: every key of the language, and every error with the file, the key and what is wrong."""

from __future__ import annotations

import contextlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from builders.chains import chain_workload, shared_workload
from pipeplan.errors import FileError, UsageError
from pipeplan.schedule.rules import DeviceRules, Rules, StageTraversal, SubmoduleRules, TypeTraversal
from pipeplan.schedule.rules.language import parse_rules, read_rules, shipped_rules, to_toml
from pipeplan.schedule.rules.sweep import built_in_rules, run_rules, sweep
from pipeplan.workload.bounds import weak_iteration_bound
from pipeplan.workload.task_graph import task_graph
from support.marks import some_of

EVERYTHING = """
name = "all of it"
time = "true"
fit_memory = true
placement = "circular"
chunks = 3
in_flight = [4, "D - d"]
in_flight_device = "2 * D"
in_flight_shared = 8
types = {first = "interleaved", forward_unit = 2, backward_unit = "C", wait = true}
forward = "depth-first"

[backward]
direction = "depth-first"
interval = "D"

[weights]
late = "d"
fill = true

[[device]]
devices = [0, 2]
types = "fwd-first"

[[submodule]]
blocks = "image.*"
placement = "v-shape"
chunks = 2
devices = [0, "D // 2"]
microbatch_size = "2 * b"
in_flight = 1
"""


SAID_OTHERWISE = """
[[instruction]]
kind = "GATHER"
last = true
after = [1, "image \\" *"]
before = "contrast"
devices = "before"
every = 4
duration = "1.5us"
attributes = { scale = 0.5, on = false, names = ["a", "b\\u00e9"], "a key" = -1 }
"""


def test_every_key() -> None:
    assert parse_rules(EVERYTHING, "other") == Rules(
        name="all of it",
        time="true",
        fit_memory=True,
        placement="circular",
        chunks=3,
        in_flight=(4, "D - d"),
        in_flight_device="2 * D",
        in_flight_shared=8,
        types=TypeTraversal("interleaved", 2, "C", wait=True),
        forward=StageTraversal("depth-first"),
        backward=StageTraversal("depth-first", "D"),
        weights_late="d",
        weights_fill=True,
        devices=(DeviceRules(devices=(0, 2), types=TypeTraversal("fwd-first")),),
        submodules=(
            SubmoduleRules(
                blocks="image.*",
                placement="v-shape",
                chunks=2,
                devices=(0, "D // 2"),
                microbatch_size="2 * b",
                in_flight=1,
            ),
        ),
    )


@pytest.mark.parametrize("name", ["", *shipped_rules()])
def test_rules_that_are_written_are_read_again(name: str) -> None:
    text = shipped_rules()[name] if name else EVERYTHING + SAID_OTHERWISE
    rules = parse_rules(text, "all of them")
    assert parse_rules(to_toml(rules), "another name") == rules


def test_built_in_rules_are_written_and_read_again() -> None:
    for rules in built_in_rules(chain_workload(3)):
        assert parse_rules(to_toml(rules), "") == rules


def test_functions_are_not_written() -> None:
    with pytest.raises(UsageError, match="checks has a function"):
        to_toml(Rules(checks=(lambda state, candidate: True,)))


def test_an_empty_file_has_the_rules_that_hold_without(tmp_path: Path) -> None:
    path = tmp_path / "plain.toml"
    path.write_text("")
    assert read_rules(str(path)) == Rules(name="plain")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("first = 'fwd-first'", "first is not known; choose from types, forward, backward"),
        ("[types]\nfrist = 1", "types.frist is not known; did you mean first"),
        ("types = 'first'", "types.first is 'first'; choose from 'bwd-first', 'fwd-first' or 'interleaved'"),
        ("types = 3", "types is 3; write a table [types]"),
        ("[forward]\ninterval = 0", "forward.interval is 0; it must be at least 1"),
        ("[backward]\ninterval = 'D - e'", "backward.interval is 'D - e'; it cannot be evaluated: 'e' is not known"),
        (
            "[backward]\ninterval = 'import os'",
            "backward.interval is 'import os'; it cannot be evaluated: invalid syntax",
        ),
        ("in_flight = -1", "in_flight is -1; it must be at least 0"),
        ("in_flight = [2, -1]", "in_flight[1] is -1; it must be at least 0"),
        ("in_flight = 1.5", "in_flight is 1.5; write an integer"),
        ("in_flight = true", "in_flight is True; write an integer"),
        ("separate = 1", "separate is 1; write true or false"),
        ("separate = true\nweights = {fill = true}", "weights are placed by separate = true"),
        ("time = 'fast'", "time is 'fast'; choose from 'unit' or 'true'"),
        ("chunks = 0", "chunks is 0"),
        ("chunks = 3", "chunks = 3 is for a placement; add placement"),
        ("[[submodule]]\nchunks = 3", "submodule[0].chunks = 3 is for a placement; add placement"),
        ("[[submodule]]\ndevices = [0, 2]", "submodule[0].devices is for the placement"),
        ("[[device]]\ndevices = [0, 0]", "device: there are rules for 0 twice"),
        ("[weights]\nlate = -1", "weights.late is -1; it must be at least 0"),
        ("[[device]]\ntypes = 'fwd-first'", "device[0].devices is empty"),
        ("device = 3", "device is 3; write tables [[device]]"),
        ("[[device]]\ndevices = 'all'", "device[0].devices is 'all'; write a list of device numbers"),
        ("[[submodule]]\ndevices = [1]", "submodule[0].devices is [1]; write the first device and the one after"),
        (f"in_flight = '{'1+' * 20_000}1'", "in_flight is '1+1+"),
        (f"types = '{'x' * 20_000}'", "xxx...; choose from 'bwd-first'"),
        (f"{'x' * 20_000} = 1", "x... is not known; choose from"),
        (f"in_flight = {'9' * 5_000}", "not readable as TOML"),
        ("weights = {soon = 1}", "weights.soon is not known; did you mean weights.late"),
        ("weights = 3", "weights is 3; write a table [weights]"),
        ("[[instruction]]\nafter = ['x']", "instruction[0].kind is missing"),
        (
            "[[instruction]]\nkind = 'AAA'\nafter = 'x'\ndevices = 'all'",
            "devices is 'all'; write a list of device numbers",
        ),
        ("[[instruction]]\nkind = 'AAA'\nafter = 'x'\nattributes = 3", "instruction[0].attributes is 3; write a table"),
        ("checks = []", "checks is not known; did you mean chunks"),
        ("devices = []", "devices is not known; did you mean device"),
        ("[[submodule]]\nblocks = 'x'\nmicrobatch_size = 2", "microbatch_size is for the placement of the submodule"),
        (
            "[[submodule]]\nblocks = 'x'\nplacement = 'circular'\nmicrobatch_size = '2 * D'",
            "microbatch_size is '2 * D'; it cannot be evaluated: 'D' is not known; choose from b",
        ),
        (
            "[[submodule]]\nblocks = 'x'\nplacement = 'circular'\nmicrobatch_size = 0.5",
            "microbatch_size is 0.5; write an integer, or a text such as '2 * b'",
        ),
        ("in_flight = 'b'", "'b' is not known"),
        ("x = [", "not readable as TOML"),
        ("\x00", "not readable as TOML"),
    ],
)
def test_errors_name_file_key_and_value(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(FileError) as error:
        read_rules(str(path))
    assert str(error.value).startswith(f"{path}: not ")
    assert len(str(error.value)) < 500 + len(str(path))
    assert why in str(error.value)


@pytest.mark.parametrize("text", [EVERYTHING, SAID_OTHERWISE, *shipped_rules().values()])
def test_every_key_may_be_missing(text: str) -> None:
    """Without any one of them a file is read, or refused in one line that names what is wrong."""
    refused = {}
    for path in places(tomllib.loads(text)):
        content = tomllib.loads(text)
        table: Any = content
        for key in path[:-1]:
            table = table[key]
        del table[path[-1]]
        try:
            parse_rules(tomli_w.dumps(content), "without")
        except FileError as error:
            refused[path[-1]] = str(error)
    assert all(re.fullmatch(r"without: not a valid rules file: [^\n]+", said) for said in refused.values()), refused
    assert "[[instruction]]" not in text or {"kind", "after"} <= set(refused)


def places(content: Any) -> Iterator[tuple[Any, ...]]:
    """The way to every value of a file."""
    for key in content if isinstance(content, dict) else range(len(content)):
        yield (key,)
        if isinstance(content[key], dict | list):
            yield from ((key, *rest) for rest in places(content[key]))


def test_files_that_are_not_there() -> None:
    with pytest.raises(FileError, match=r"nowhere\.toml: there is no such file"):
        read_rules("nowhere.toml")
    with pytest.raises(UsageError, match="there are no rules 'nothing'"):
        read_rules("nothing")


@settings(max_examples=some_of(75))
@given(st.data())
def test_damaged_files_are_refused_or_read(data: st.DataObject) -> None:
    """Whatever one piece of a file is replaced by, nothing but a FileError comes of it."""
    begin = data.draw(st.integers(0, len(EVERYTHING)))
    end = data.draw(st.integers(begin, min(len(EVERYTHING), begin + 12)))
    piece = data.draw(st.text(max_size=4) | st.sampled_from(["0", "-1", "true", "[]", "{}", "'D // 0'", "1e99", "nan"]))
    with contextlib.suppress(FileError):
        parse_rules(EVERYTHING[:begin] + piece + EVERYTHING[end:], "damaged")


def test_too_much_to_be_rules() -> None:
    with pytest.raises(FileError, match="more than the 1000000"):
        parse_rules("# " + "x" * 1_000_000, "long")


# The sweep -----------------------------------------------------------------------------------------------------


def test_the_built_in_rules_are_those_of_section_6() -> None:
    chain, circular = chain_workload(2, 4), chain_workload(2, 4, devices=[(0,), (1,), (0,), (1,)])
    assert {(r.types, r.forward) for r in built_in_rules(chain)} == {
        (TypeTraversal(first), StageTraversal()) for first in ("bwd-first", "interleaved")
    }
    assert {r.forward for r in built_in_rules(shared_workload())} == {
        StageTraversal("breadth-first"),
        StageTraversal("depth-first"),
    }
    turns = {(r.forward.direction, r.forward.interval) for r in built_in_rules(circular) if r.forward}
    assert turns == {(way, interval) for way in ("breadth-first", "depth-first") for interval in (None, "D")}
    assert len({rules.name for rules in built_in_rules(circular)}) == len(built_in_rules(circular)) == 2 * 16 * 6
    assert not any(rules.types == TypeTraversal("fwd-first") for rules in built_in_rules(circular))
    assert any(rules.types == TypeTraversal("fwd-first") for rules in built_in_rules(circular, forward_first=True))


def test_the_sweep_is_sorted_and_fits() -> None:
    workload = chain_workload(3, 6, memory_bytes=3000, split=(10, 10))
    found = sweep(workload)
    assert [swept.iteration_ns for swept in found] == sorted(swept.iteration_ns for swept in found)
    assert weak_iteration_bound(workload) <= found[0].iteration_ns
    assert all(swept.rules.fit_memory for swept in found)
    assert {swept.rules.separate for swept in found} == {False, True}
    again = run_rules(task_graph(workload), found[0].rules)
    assert again == found[0]


def test_rules_that_do_not_fit_are_left_out_of_the_sweep() -> None:
    workload = chain_workload(2, 4, memory_bytes=2500)
    greedy, careful = Rules(types=TypeTraversal("fwd-first")), Rules(in_flight="D - d")
    assert [swept.rules for swept in sweep(workload, [greedy, careful])] == [careful]
