"""The public face: what can be imported is what is promised, and it costs next to nothing."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from html import unescape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest

import pipeplan
from builders.chains import chain_plan, chain_profile
from builders.profiles import profile_of
from pipeplan import _api, _face
from pipeplan.cli.from_python import arguments_of, context_of
from pipeplan.cli.main import VERBS
from pipeplan.errors import InfeasibleError, UsageError, in_python
from pipeplan.files import CostRow, parse, write_file
from pipeplan.planning.build_plan import Result
from pipeplan.planning.request import Request
from pipeplan.time_limit import INTERRUPTS
from support.commands import pipeplan as command

pytestmark = pytest.mark.counted

HEAVY = ("networkx", "numpy", "ortools", "pydantic", "rich", "torch")

EVERY_MODULE = """
import importlib, pkgutil, pipeplan
for module in pkgutil.walk_packages(pipeplan.__path__, "pipeplan."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
for name in pipeplan.__all__:
    found = getattr(pipeplan, name)
    if name == "__version__":
        continue
    try:
        found(no_such_argument=0)
    except TypeError as error:
        assert "'module' object is not callable" not in str(error), f"{name} is {found}"
    except (ValueError, pipeplan.UsageError) as error:  # a file's class says what is wrong with its keys
        assert "no_such_argument" in str(error)
    else:
        raise AssertionError(f"{name} takes anything")
assert set(dir(pipeplan)) == set(pipeplan.__all__)
"""


def said(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("module", ["pipeplan", "pipeplan.cli.main"])
def test_importing_it_imports_nothing_heavy(module: str) -> None:
    assert said(f"import sys, {module}; print([name for name in {HEAVY} if name in sys.modules])") == "[]\n"


def test_the_functions_behind_it_are_short() -> None:
    """At most 15 lines each, without what says how it is called and what it does."""
    trees = [ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8")) for module in (_api, _face)]
    functions = [node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert {node.name for node in functions} >= {"search", "compare", "frontier", "simulate", "check", "profile", "run"}
    for node in functions:
        first = node.body[ast.get_docstring(node) is not None]
        assert (node.end_lineno or 0) - first.lineno < 15, node.name


def test_no_room_takes_the_name_of_a_public_function() -> None:
    """Importing a submodule puts it over a function of the same name."""
    pytest.importorskip("torch")
    from runtime_support.warm import warm_run

    warm_run(EVERY_MODULE)


# Arguments are the flags ------------------------------------------------------------------------------------------


FUNCTIONS = {
    "search": ("search", "tune"),
    "compare": ("compare",),
    "frontier": ("frontier",),
    "simulate": ("simulate",),
    "check": ("check",),
    "export": ("export",),
    "report": ("report",),
    "import": ("import_plan",),
    "profile": ("profile", "estimate", "inspect", "measure_links", "add_links"),
    "run": ("run",),
    "kernels": ("choose_kernels",),
    "example": ("example", "example_cluster"),
}
"""Verb -> the functions that do the same, between them."""

OTHERWISE = {
    "*": {"json", "output", "svg", "trace", "placement_output", "rules_output", "output_all", "details"},
    "profile": {"show", "estimate", "communication"},  # functions of their own
    "report": {"markdown"},  # of what it returns
}
"""Flags that are about files that are written, about the terminal, or about which function is meant."""

OWN = {"progress", "within", "on_step", "on_evaluation", "on_point"}
"""Arguments that are no flags."""


@pytest.mark.parametrize("verb", FUNCTIONS)
def test_every_flag_is_an_argument_with_the_same_default(verb: str) -> None:
    flags = dict(arguments_of(verb))
    wanted = flags.keys() - OTHERWISE["*"] - OTHERWISE.get(verb, set())
    found: set[str] = set()
    for function in FUNCTIONS[verb]:
        for name, argument in inspect.signature(getattr(pipeplan, function)).parameters.items():
            if name in OWN:
                continue
            if (function, name) == ("inspect", "profile"):
                name = "show"
            if (function, name) == ("import_plan", "form"):
                name = "from_"  # a word of Python's own
            assert name in flags, f"{function}({name}=...) is no flag of {verb}"
            found.add(name)
            if argument.default not in (argument.empty, None):
                given = context_of(verb, {name: argument.default}).params
                left = context_of(verb, {}).params
                assert given == left, f"{function}({name}=...) has another default than {verb}"
    assert wanted <= found
    assert found <= wanted | {"show", *({"trace"} if verb == "run" else ())}


def test_verbs_are_all_there() -> None:
    assert FUNCTIONS.keys() == VERBS.keys()
    assert {name for names in FUNCTIONS.values() for name in names} <= set(pipeplan.__all__)


SAME = [
    ({}, ()),
    ({"memory": "3GB", "time_limit": 5}, ("--memory", "3GB", "--time-limit", "5s")),
    ({"memory": 3_000_000_000, "time_limit": "5s"}, ("--memory", "3GB", "--time-limit", "5s")),
    ({"recompute": True, "shard_shared": False}, ("--recompute", "all", "--shard-shared", "no")),
    ({"recompute": "none", "split_backward": True}, ("--recompute", "none", "--split-backward", "yes")),
    ({"unroll": 3, "slices": 2}, ("--unroll", "3", "--slices", "2")),
    ({"slices": "auto", "split_overhead": 2e-5}, ("--slices", "auto", "--split-overhead", "20us")),
    ({"microbatches": 8, "microbatch_size": "1"}, ("--microbatches", "8", "--microbatch-size", "1")),
    ({"placement": "circular", "chunks": 2}, ("--placement", "circular", "--chunks", "2")),
    ({"rules": "1f1b", "seed": 3, "deterministic": True}, ("--rules", "1f1b", "--seed", "3", "--deterministic")),
]


@pytest.mark.parametrize(("arguments", "flags"), SAME)
def test_python_asks_for_what_the_flags_ask_for(
    tmp_path: Path, arguments: Mapping[str, object], flags: Sequence[str]
) -> None:
    profile = chain_profile(4).model_copy(update={"placement": None})
    write_file(profile, str(tmp_path / "profile.json"))
    asked: list[Request] = []

    def note(request: Request, **_: object) -> Result:
        asked.append(request)
        raise InfeasibleError("enough")

    with mock.patch.object(_api, "search", note):
        for given in (profile, tmp_path / "profile.json"):
            with pytest.raises(InfeasibleError):
                pipeplan.search(given, devices=2, **arguments)
        assert command("search", tmp_path / "profile.json", "--devices", 2, *flags).returncode == 1
    assert asked[0] == asked[1] == asked[2]


WRONG = [
    ({"devices": 0}, "devices=0: 0 is not in the range 1<=x<=65536"),
    ({"devices": 2.5}, "devices=2.5: 2.5 is not a whole number"),
    ({"devices": 2, "memory": "5"}, "memory='5': 5 of what?"),
    ({"devices": 2, "memory": -1}, "memory=-1: -1 bytes are out of range"),
    ({"devices": 2, "time_limit": True}, "time_limit=True: True is not a duration"),
    ({"devices": 2, "time_limit": float("nan")}, "time_limit=nan: nan seconds are out of range"),
    (
        {"devices": 2, "recompute": "some"},
        "recompute='some': 'some' is not known; choose from auto, none, selective, all",
    ),
    ({"devices": 2, "unroll": 0}, "unroll=0: '0' is neither auto nor a number from 1 to 64"),
    ({"devices": 2, "mini_batch": 7, "microbatches": 3}, "mini_batch=7 is not a multiple of microbatches=3"),
    ({}, "has no placement; give devices or a cluster"),
    ({"devices": 2, "cache": "cells.jsonl"}, "cache is for scheduler='rules' without rules"),
    (
        {"devices": 2, "workers": 2, "executor": "dask:tcp://host:1"},
        "executor is not for workers; leave one of them out",
    ),
    ({"devices": 2, "executor": "slurm"}, "executor='slurm' is not known; give dask:ADDRESS"),
    ({"devices": 2, "cluster": 3}, "cluster is a Cluster or the path of its file, not of type int"),
]


@pytest.mark.parametrize(("arguments", "text"), WRONG)
def test_errors_name_arguments(arguments: Mapping[str, object], text: str) -> None:
    profile = chain_profile(4).model_copy(update={"placement": None})
    with pytest.raises(UsageError, match=re.escape(text)) as caught:
        pipeplan.search(profile, **arguments)
    assert "--" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("7 warnings: pipeplan profile --show p.json has all; --memory 2", None),
        ("(--placement circular)", "(placement='circular')"),
        ("(--shard-shared yes, for all blocks)", "(shard_shared='yes', for all blocks)"),
        ("--memory SIZE: plans that fit", "memory=SIZE: plans that fit"),
        ("raise --memory to 3GB or give --scheduler zb-h1", "raise memory to 3GB or give scheduler='zb-h1'"),
        ("--scheduler 1f1b+ does not apply", "scheduler='1f1b+' does not apply"),
        ("torchrun --nproc-per-node 2, or --local", "torchrun --nproc-per-node 2, or local"),
        ("leave --dp out, or give --vp 2", "leave replicas out, or give chunks=2"),
    ],
)
def test_commands_keep_their_dashes_and_values_are_written_as_values(text: str, expected: str | None) -> None:
    assert in_python(text) == (expected or text.replace("--memory 2", "memory=2"))


def test_the_command_line_goes_on_naming_flags(tmp_path: Path) -> None:
    write_file(chain_profile(2), str(tmp_path / "profile.json"))
    done = command("search", tmp_path / "profile.json", "--mini-batch", 7, "--microbatches", 3)
    assert "--mini-batch 7 is not a multiple of --microbatches 3" in done.stderr


def test_wrong_use_of_other_functions() -> None:
    with pytest.raises(UsageError, match="local=False: no launcher has started this process"):
        pipeplan.run("plan.json", model="gpt2-tiny", local=False)
    with pytest.raises(UsageError, match="give model to train, or emulate"):
        pipeplan.run(chain_plan(2, 4))
    with pytest.raises(UsageError, match="tolerance has no effect with plans"):
        pipeplan.frontier(chain_profile(2), devices=2, plans=True, tolerance=0.1)
    with pytest.raises(UsageError, match="forward is for shapes, not for gpt2-124m"):
        pipeplan.example("gpt2-124m", forward="2ms")
    with pytest.raises(UsageError, match=re.escape("example_cluster('testbed-tessel') makes it")):
        pipeplan.example("testbed-tessel")


def test_flags_other_names_are_taken_too() -> None:
    """All that the command line takes for an argument; another name is asked about, and one argument is given once."""
    for verb, functions in FUNCTIONS.items():
        for name, parameter in arguments_of(verb):
            for flag in parameter.opts if parameter.opts[0].startswith("--") else ():
                for function in functions:
                    if name in inspect.signature(getattr(pipeplan, function)).parameters:
                        other = flag.removeprefix("--").replace("-", "_")
                        known = [name]
                        assert _face._by_own_names(function, known, {other: 1}) == {name: 1}
    with pytest.raises(UsageError, match=re.escape("search() has no argument 'replica'; did you mean replicas?")):
        pipeplan.search(chain_profile(2), replica=2)
    with pytest.raises(UsageError, match="dp and replicas are two names of one argument"):
        pipeplan.search(chain_profile(2), dp=2, replicas=2)


# Objects ----------------------------------------------------------------------------------------------------------


def test_what_is_built_in_a_few_lines() -> None:
    blocks = [pipeplan.Block.of(f"b{n}", "1ms", 0.002, activation="64MB", parameters=8) for n in range(4)]
    profile = pipeplan.Profile.of("mine", blocks, bytes_per_sample="4MB")
    assert [(edge.source, edge.target, edge.bytes_per_sample) for edge in profile.edges] == [
        *(("b0", "b1", 4_000_000), ("b1", "b2", 4_000_000), ("b2", "b3", 4_000_000))
    ]
    assert profile.blocks[0].costs[0].backward_ns == 2_000_000
    levels = [("node", 2, "3us", "300GB"), ("rack", 4, 1e-5, 25_000_000_000)]
    cluster = pipeplan.Cluster.of("four", 4, memory="80GB", levels=levels)
    assert cluster.memory_bytes == (80_000_000_000,) * 4
    assert [level.latency_ns for level in cluster.levels] == [3000, 10_000]
    placement = pipeplan.Placement.of([["b0", "b1"], ["b2", "b3"]], devices=[1, 0])
    result = pipeplan.search(profile, placement=placement, deterministic=True, time_limit=1)
    assert [stage.devices for stage in result.plan.stages] == [(1,), (0,)]
    assert pipeplan.check(result.plan, profile=profile).valid


@pytest.fixture(scope="module")
def found() -> Result:
    return pipeplan.search(chain_profile(2), deterministic=True, time_limit=1, microbatches=4)


def test_objects_show_themselves_in_short(found: Result, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    pipeplan.write(found.plan, path)
    assert pipeplan.read_plan(path) == found.plan
    shown = [found, found.plan, chain_profile(2), pipeplan.simulate(path), pipeplan.check(path)]
    for each in shown:
        assert repr(each) == str(each)
        assert len(repr(each)) < 200
        assert repr(each).startswith(f"<{type(each).__name__} ")


def test_objects_show_themselves_in_a_notebook(found: Result) -> None:
    plan, again = found.plan._repr_html_(), found.plan._repr_html_()
    assert plan is not None
    assert plan == again
    assert plan.startswith("<svg id=")
    assert "0F0" in plan or ">0</text>" in plan or 'class="F' in plan
    style = plan.partition("<style>")[2].partition("</style>")[0]
    selectors = re.findall(r"(?:^|\})\s*([^{}]+)\{", style)
    assert selectors
    assert all(each.startswith("#pipeplan-") for each in selectors), "styles of one picture hold for no other"
    compared = pipeplan.compare(chain_profile(2), deterministic=True, time_limit=1, microbatches=4)
    frontier = pipeplan.frontier(chain_profile(2), devices=2, plans=True, time_limit=1)
    for each in (
        found,
        compared,
        frontier,
        chain_profile(2),
        pipeplan.check(found.plan),
        pipeplan.simulate(found.plan),
    ):
        html = each._repr_html_()
        assert html is not None
        assert "<pre" in html
        assert "\x1b" not in html
        assert "--" not in re.sub(r"<svg.*?</svg>", "", html, flags=re.DOTALL), "arguments, not flags"
        assert each.text().splitlines()[0], "as text, too"
        assert "\x1b" not in each.text()
    assert found.text().splitlines()[1].startswith("plan ")
    for each, words in ((found, {"plan", "memory", "next"}), (frontier, {"fastest", "proved", "next"})):
        answer = unescape(str(each._repr_html_()).partition("<svg")[0])
        assert words <= {*answer.split()}, "the first screen's answer comes first"
    assert f"pipeplan.write(found.plan({frontier.chosen}), 'plan.json')" in answer


def test_a_long_plan_is_drawn_on_a_canvas_and_a_very_long_one_not(
    found: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeplan.reporting.notebook.MOST_SVG", 3)
    monkeypatch.setattr("pipeplan.reporting.html.page.MOST_SVG", 3)
    shown = str(found.plan._repr_html_())
    assert shown.startswith('<iframe sandbox="allow-scripts"')
    assert "&lt;canvas" in shown
    monkeypatch.setattr("pipeplan.reporting.notebook._MOST_FRAMED", 3)
    assert "<iframe" not in str(found.plan._repr_html_())


# Threads ----------------------------------------------------------------------------------------------------------


class _Searches(BaseHTTPRequestHandler):
    """A web server that searches: ``/search/NAME`` answers with the plan, ``/cancel/NAME`` interrupts."""

    limits: ClassVar[dict[str, pipeplan.Limit]] = {}
    begun: ClassVar[dict[str, threading.Event]] = {}
    asked: ClassVar[dict[str, Mapping[str, Any]]] = {}

    def do_GET(self) -> None:
        verb, name = self.path[1:].split("/")
        answer = {"thread": threading.current_thread() is threading.main_thread()}
        if verb == "cancel":
            self.limits[name].interrupt()
        else:
            limit = self.limits[name] = pipeplan.Limit(600)
            heard = [signal.getsignal(number) for number in INTERRUPTS]
            begun = self.begun[name]
            result = pipeplan.search(**self.asked[name], within=limit, progress=lambda *_: begun.set())
            answer |= {"interrupted": result.interrupted, "plan": result.plan.model_dump(mode="json")}
            answer |= {"deaf": heard == [signal.getsignal(number) for number in INTERRUPTS]}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: object) -> None:
        pass


def _fetched(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=240) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def test_a_web_server_searches_on_threads_and_cancels_one(tmp_path: Path) -> None:
    profile = profile_of(
        [CostRow(microbatch_size=1, forward_ns=n, backward_ns=2 * n, activation_bytes=20) for n in TIMES]
    )
    write_file(profile, str(tmp_path / "profile.json"))
    asked = {
        "profile": profile,
        "devices": 3,
        "microbatches": 4,
        "memory": 60,
        "deterministic": True,
        "time_limit": 0.5,
    }
    _Searches.asked = {"one": asked, "two": {**asked, "seed": 1}, "long": {**LONG, "time_limit": 500}}
    _Searches.begun = {name: threading.Event() for name in _Searches.asked}
    flags = ("--devices", 3, "--microbatches", 4, "--memory", "60B", "--deterministic", "--time-limit", "0.5s")
    for name, seed in (("one", 0), ("two", 1)):
        done = command("search", tmp_path / "profile.json", *flags, "--seed", seed, "-o", tmp_path / f"{name}.json")
        assert done.returncode == 0, done.stderr
    with ThreadingHTTPServer(("127.0.0.1", 0), _Searches) as server, ThreadPoolExecutor() as users:
        url = f"http://127.0.0.1:{server.server_port}"
        users.submit(server.serve_forever)
        try:
            answers = {name: users.submit(_fetched, f"{url}/search/{name}") for name in _Searches.asked}
            assert _Searches.begun["long"].wait(240)
            _fetched(f"{url}/cancel/long")
            found = {name: answer.result(240) for name, answer in answers.items()}
        finally:
            server.shutdown()
    assert [answer["interrupted"] for answer in found.values()] == [False, False, True]
    assert not any(answer["thread"] for answer in found.values())
    assert all(answer["deaf"] for answer in found.values())
    for name in ("one", "two"):
        written = json.loads((tmp_path / f"{name}.json").read_text())
        written["provenance"]["command"] = found[name]["plan"]["provenance"]["command"] = ""
        assert found[name]["plan"] == written
    assert pipeplan.check(parse(json.dumps(found["long"]["plan"]), pipeplan.Plan)).valid


def test_a_frontier_says_what_is_best_so_far() -> None:
    heard: list[tuple[bool, int]] = []

    def hear(what: str, best_ns: int, bound_ns: int, seconds: float) -> None:
        heard.append((threading.current_thread() is threading.main_thread(), best_ns))

    asked: dict[str, Any] = {"devices": [1, 2], "placement": "all", "plans": True, "time_limit": 1, "progress": hear}
    with ThreadPoolExecutor() as threads:
        found = threads.submit(pipeplan.frontier, chain_profile(2), **asked).result(60)
    assert heard
    assert not any(main for main, _ in heard)
    assert heard[-1][1] >= min(point.time_ns for point in found.points) > 0


def test_interrupted_before_there_is_anything() -> None:
    limit = pipeplan.Limit()
    limit.interrupt()
    with ThreadPoolExecutor() as threads:
        failed = threads.submit(pipeplan.search, LONG["profile"], devices=3, within=limit).exception(60)
    assert isinstance(failed, pipeplan.SearchTimeoutError)
    assert "interrupted" in str(failed)


def test_a_search_leaves_the_programs_own_handlers_alone(found: Result) -> None:
    heard: list[object] = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append(1))

    def end(*_: object) -> None:
        if not heard:
            signal.raise_signal(signal.SIGTERM)

    try:
        result = pipeplan.search(chain_profile(2), deterministic=True, time_limit=1, microbatches=4, progress=end)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [1]
    assert not result.interrupted
    assert result.plan.programs == found.plan.programs


def test_progress_can_end_a_measurement() -> None:
    pytest.importorskip("torch")
    limit, seen = pipeplan.Limit(), list[str]()

    def end(done: int, total: int, what: str) -> None:
        seen.append(what)
        limit.interrupt()

    with pytest.raises(pipeplan.ExecutionError, match=r"interrupted before .*, after 1 of"):
        pipeplan.estimate("gpt2-tiny", device="a100-80gb", microbatch=1, progress=end, within=limit)
    assert len(seen) == 1


TIMES = (3, 7, 2, 9)
LONG: dict[str, Any] = {
    "profile": profile_of(
        [
            CostRow(microbatch_size=1, forward_ns=time, backward_ns=time + 14, activation_bytes=size)
            for time, size in zip((31, 73, 22, 95, 41, 67, 53, 89), (20, 30, 25, 10, 35, 15, 20, 30), strict=True)
        ]
    ),
    "devices": 4,
    "microbatches": 32,
    "memory": 170,
    "deterministic": True,
    "split_backward": False,
}
"""A search that goes on for minutes."""


def test_writing_leaves_the_umask_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is one for all threads, and to read it is to set it."""
    monkeypatch.setattr(os, "umask", mock.Mock(side_effect=AssertionError("the umask was set")))
    pipeplan.write(chain_profile(2), tmp_path / "profile.json")
    other = tmp_path / "other"
    other.touch()
    assert (tmp_path / "profile.json").stat().st_mode == other.stat().st_mode


def test_a_module_of_ones_own_is_estimated() -> None:
    nn, torch = pytest.importorskip("torch.nn"), pytest.importorskip("torch")
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    found = pipeplan.estimate((module, torch.zeros(2, 4), torch.zeros(2, 2)), device="a100-80gb", microbatch=[1, 2])
    assert [block.id for block in found.blocks] == ["0", "2", "loss"]

    def captioner() -> object:
        return module, torch.zeros(2, 4)

    told = "model is captioner itself, not what it returns; call it: profile(captioner())"
    with pytest.raises(UsageError, match=re.escape(told)):
        pipeplan.profile(captioner)
    with pytest.raises(UsageError, match="is, or returned, int"):
        pipeplan.estimate(3, device="a100-80gb")


def test_a_run_ends_with_its_limit() -> None:
    pytest.importorskip("torch")
    from runtime_support.warm import warm_left_over, warm_ranks

    limit, steps = pipeplan.Limit(), list[int]()

    def on_step(step: Any) -> None:
        steps.append(step.step)
        limit.interrupt()

    plan = chain_plan(2, 4)
    with warm_ranks(), pytest.raises(pipeplan.ExecutionError, match="interrupted"):
        pipeplan.run(plan, emulate=True, steps=100_000, on_step=on_step, within=limit)
    assert steps
    assert warm_left_over() == []


def test_a_run_writes_what_a_simulation_compares(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from runtime_support.warm import warm_ranks

    plan, trace = chain_plan(2, 4), tmp_path / "run.trace"
    with pytest.raises(pipeplan.FileError, match="nowhere"):
        pipeplan.run(plan, emulate=True, trace=tmp_path / "nowhere" / "run.trace")
    with warm_ranks():
        pipeplan.run(plan, emulate=True, stretch=1, steps=1, trace=trace)
    compared = pipeplan.simulate(plan, measured=trace)
    assert compared.figures()["measured"]


def test_warnings_name_the_line_that_calls_pipeplan() -> None:
    """They named a line of ours, deep inside."""
    with pytest.warns(UserWarning, match="Dropout x 4 of evaluated run in evaluation mode") as told:
        pipeplan.estimate("runtime_support.losses:evaluated", device="h100-80gb", microbatch=1)
    assert {warning.filename for warning in told} == {__file__}
