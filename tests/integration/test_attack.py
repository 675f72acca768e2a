"""A quick part of ``benchmarks/attack.py``, and that it notices what it looks for."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from support.marks import slow_but
from support.paths import ROOT

sys.path.append(str(ROOT / "benchmarks"))

import attack_bounds
import attack_checkpoints
import attack_faults
import attack_inputs
import attack_plans
import attack_searches
import judge
from attack import Pool, attacked, read
from attack_part import Ended

from pipeplan.checker import Report
from pipeplan.cli import profile_verb
from pipeplan.files import Plan, write_file
from pipeplan.runtime.launch.processes import die_with_parent

PIECE = {"inputs": 75, "plans": 40, "bounds": 10}
"""Attacks in one test."""


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    made: dict[str, Any] = {
        "inputs": attack_inputs.Inputs(with_torch=False),
        "plans": attack_plans.Plans(),
        "bounds": attack_bounds.Bounds(),
    }
    columns = os.environ.get("COLUMNS")
    for part in made.values():
        part.prepare(tmp_path_factory.mktemp("attack"))
    os.environ.pop("COLUMNS")
    if columns is not None:
        os.environ["COLUMNS"] = columns
    return made


def ends(part: Any, first: int, count: int) -> Counter[str]:
    """How the attacks end, none of which may go wrong."""
    found: Counter[str] = Counter()
    for index in range(first, first + count):
        ended = attacked(part, index, 0)
        assert not ended.wrong, f"{part.name} {index}: {ended.wrong}: {ended.what}"
        found[ended.how] += 1
    return found


@slow_but("piece", range(4), lambda piece: piece < 1, lambda piece: piece > 1)
def test_fuzzed_inputs(piece: int, parts: dict[str, Any]) -> None:
    found = ends(parts["inputs"], piece * PIECE["inputs"], PIECE["inputs"])
    assert found["exit 2"] > found["exit 0"] > 0


@slow_but("piece", range(2), lambda piece: piece < 1)
def test_damaged_plans(piece: int, parts: dict[str, Any]) -> None:
    found = ends(parts["plans"], piece * PIECE["plans"], PIECE["plans"])
    assert found["refused by check"] > 10
    assert found["true, and accepted"] > 0, "the judge has something to say"


@slow_but("piece", range(2), lambda piece: piece < 1)
def test_bounds(piece: int, parts: dict[str, Any]) -> None:
    found = ends(parts["bounds"], piece * PIECE["bounds"], PIECE["bounds"])
    assert set(found) == {"makespan", "period", "of everything", "frontier"}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> attack_checkpoints.Checkpoints:
    part = attack_checkpoints.Checkpoints()
    part.prepare(tmp_path_factory.mktemp("attack"))
    return part


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_damaged_checkpoints(checkpoints: attack_checkpoints.Checkpoints) -> None:
    found = ends(checkpoints, 0, 60)
    assert sum(count for how, count in found.items() if "signed" in how) > 10
    assert {how.partition(" refused")[0].partition(",")[0] for how in found} >= {"code", "link", "pipe", "flipped"}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_damage_that_is_read_is_noticed(
    checkpoints: attack_checkpoints.Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flipped bit of a tensor, where nobody compares checksums."""
    monkeypatch.setattr("pipeplan.runtime.training.checkpoint_folder.require_checksums", lambda *_: None)

    def harmed(path: Path, _: object) -> None:
        content = bytearray(path.read_bytes())
        at = content.index(b"\x00\x00\xa0\x41")  # 20.0
        content[at + 3] ^= 1
        path.write_bytes(content)

    monkeypatch.setattr(attack_checkpoints, "DAMAGES", [harmed])
    monkeypatch.setattr(attack_checkpoints, "FILES", ["__0_0.distcp"] * 5)
    monkeypatch.setattr(attack_checkpoints.Checkpoints, "_sign", lambda *_: False)
    assert attacked(checkpoints, 0, 0).wrong == "accepted"


@slow_but(
    "part, most", [("plans", 2), ("faults", 4), ("searches", 2)], lambda _: False, lambda each: each != ("plans", 2)
)
def test_parts_go_on_where_they_stopped(part: str, most: int, tmp_path: Path) -> None:
    state = tmp_path / "state.jsonl"
    counts = (1, most)
    for count in counts:
        command = [sys.executable, str(ROOT / "benchmarks/attack.py"), "--only", part, "--state", str(state)]
        done = subprocess.run([*command, "--count", str(count)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"| {part} | {count} | 0 | 0 |" in done.stdout
    assert sorted(each.index for each in read(state)) == [*range(counts[-1])]


LOSING = """
from pipeplan.cli.output import Outputs
from pipeplan.__main__ import main
if __name__ == "__main__":
    Outputs.write_plan = lambda *_: None
    main()
"""


@pytest.mark.slow  # 3 s each
@pytest.mark.parametrize("loses", [False, True])
def test_a_search_is_interrupted_and_a_plan_that_is_lost_is_noticed(
    loses: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all of its workers, as by Ctrl-C, once it has told of a value; the planted loss writes no plan.

    For all of that there is far more time than it takes, however busy the machine is.
    """
    if loses:
        (tmp_path / "losing.py").write_text(LOSING)
        monkeypatch.setattr(attack_searches, "START", [sys.executable, str(tmp_path / "losing.py")])
    monkeypatch.setattr(attack_searches, "COMMAND", attack_searches.COMMAND.replace(" 6s ", " 600s "))
    monkeypatch.setattr(attack_searches, "SOON_S", 100.0)
    hits = [attack_searches.Hit("interrupted", True, 0.0, told=True)]
    monkeypatch.setattr(attack_searches, "drawn_hits", lambda *_: hits)
    searches = attack_searches.Searches(limit_s=280.0)
    searches.prepare(tmp_path)
    (found,) = Pool(searches, 0, iter([0])).run(1, time.monotonic() + 1000)
    assert found.ended.how == "all interrupted", found.ended.what
    assert found.ended.wrong == ("lost" if loses else ""), found.ended.what


STARTING = """Traceback (most recent call last):
  File "<string>", line 1, in <module>
  File "/lib/python3.11/multiprocessing/spawn.py", line 130, in _main
    preparation_data = reduction.pickle.load(from_parent)
EOFError: Ran out of input"""
"""What Python itself says where it has just started a worker and nobody is there any more to tell it what to run."""


@pytest.mark.parametrize(
    ("kind", "code", "said", "wrong"),
    [
        ("interrupted", 130, "0:00:01 no even cut was found yet that fits", ""),
        ("interrupted", 130, "0:00:01 best 12.5ms, bound 9ms, gap 38.9%; even one-to-one", "lost"),
        ("hung up", 0, "", "lost"),
        ("stopped", 3, "0:00:01 best 567.9ms; even one-to-one", "lost"),
        ("stopped", 3, "pipeplan: no plan was found in 6.0 s", ""),
        ("stopped", 1, "pipeplan: no", "exit"),
        ("launcher killed", -9, "0:00:01 best 12.5ms; even one-to-one", ""),
        ("launcher killed", -9, STARTING, ""),
        ("launcher killed", -9, STARTING.replace("multiprocessing", "pipeplan"), "traceback"),
        ("launcher killed", -9, f"{STARTING}\nTraceback (most recent call last):\nKeyError", "traceback"),
        ("stopped", 3, STARTING, "traceback"),
    ],
)
def test_a_plan_that_a_terminal_has_told_of_must_be_there(
    kind: str,
    code: int,
    said: str,
    wrong: str,
    parts: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attack_searches, "left_over", list)  # other tests of this process have children
    hit = attack_searches.Hit(kind, False, 0.5)
    assert attack_searches.judged(hit, code, said, tmp_path, 0.0).wrong == wrong
    for plan, instead in ((parts["plans"].known[0].plan, ""), ({"cut": "off"}, "lost")):
        (tmp_path / "found.json").write_text(json.dumps(plan))
        told = attack_searches.judged(hit, code, said, tmp_path, 0.0).wrong
        assert told == (instead if wrong == "lost" else wrong)


@pytest.mark.slow
def test_ranks_of_an_input_are_forked_interrupted_and_judged(
    parts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in attack_inputs.PRELOADED:
        importlib.import_module(module)
    (tmp_path / "plan.json").write_text(json.dumps(parts["plans"].known[0].plan))
    asked = attack_inputs.Input(["run", "plan.json", "--emulate", "--local", "--steps"])
    for steps, how, patience in (("1", "exit 0", 100.0), ("1000000", "interrupted", 1.0)):
        monkeypatch.setattr(attack_inputs, "_PATIENCE_S", patience)
        given = replace(asked, arguments=[*asked.arguments, steps])
        ended = attack_inputs.judged(given, attack_inputs.run(given, tmp_path))
        assert (ended.how, ended.wrong) == (how, ""), ended.what
    assert attack_inputs.judged(given, attack_inputs.Ran(0, "", "", left=[7])).wrong == "orphan"
    assert attack_inputs.judged(given, attack_inputs.Ran(0, "", "", interrupted=True)).wrong == "exit"


@pytest.mark.slow  # 2 s
def test_what_measures_as_long_as_it_is_asked_to_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is no hang, unless it goes on then."""
    monkeypatch.setattr(attack_inputs, "_PATIENCE_S", 0.5)
    given = attack_inputs.Input(["profile", "gpt2-tiny", "--repeats", "100000", "-o", "out"])
    ran = attack_inputs.run(given, tmp_path)
    ended = attack_inputs.judged(given, ran)
    assert (ended.how, ended.wrong) == ("interrupted", ""), ended.what
    assert attack_inputs.judged(given, replace(ran, stopping_s=2.5)).wrong == "hang"
    monkeypatch.setattr(attack_inputs, "_AT_ONCE_S", 0.0)
    assert attack_inputs.judged(given, ran).wrong == "hang", "it is measured"


@pytest.mark.slow  # 1 s
def test_an_interruption_that_python_ignores_comes_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a finalizer, in which the first one is raised here."""
    heard = list[str]()

    class Finalized:
        def __del__(self) -> None:
            while not heard:
                heard.append("")
                signal.raise_signal(signal.SIGALRM)

    measure = profile_verb._measure

    def measured(*given: Any) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        Finalized()
        measure(*given)

    monkeypatch.setattr(profile_verb, "_measure", measured)
    given = attack_inputs.Input(["profile", "gpt2-tiny", "--repeats", "100000", "-o", "out"])
    ended = attack_inputs.judged(given, attack_inputs.run(given, tmp_path))
    assert (ended.how, ended.wrong, heard) == ("interrupted", "", [""]), ended.what


# That it notices ----------------------------------------------------------------------------------------------------


def test_a_checker_that_accepts_everything_is_noticed(parts: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    checked = attack_plans.check

    def accept(*given: Any) -> Report:
        return replace(checked(*given), problems=(), num_problems=0)

    monkeypatch.setattr(attack_plans, "check", accept)
    found = Counter(attacked(parts["plans"], index, 0).wrong for index in range(20))
    assert found["accepted"] > 8


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        (("starts_ns", "0F", 1), 10**9, "starts of 0F"),
        (("predicted", "makespan_ns"), 1, "makespan_ns 1 is"),
        (("devices", 0, "memory_bytes"), 1, "on a device of 1"),
        (("operations", 0, "acquire_bytes"), 10**6, "memory"),
        (("operations", 0, "duration_ns"), 10**6, "takes"),  # the repetend
    ],
)
def test_the_judge_by_itself(path: tuple[Any, ...], value: int, told: str, parts: dict[str, Any]) -> None:
    plan = attack_plans.copy.deepcopy(parts["plans"].known[0].plan)
    assert judge.faults_of(plan) == []
    part = plan
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    assert told in "; ".join(judge.faults_of(plan))


def test_the_judge_needs_every_message_and_an_end(parts: dict[str, Any]) -> None:
    plan = parts["plans"].known[0].plan
    without = attack_plans.copy.deepcopy(plan)
    for dependency in without["dependencies"]:
        dependency["hops"] = []
    without["programs"] = [[text for text in program if "_" not in text] for program in plan["programs"]]
    assert "makes for it" in judge.faults_of(without)[0]
    waiting = attack_plans.copy.deepcopy(plan)
    program = waiting["programs"][0]
    program.insert(0, program.pop(next(at for at, text in enumerate(program) if "RECV" in text)))
    assert "deadlock" in judge.faults_of(waiting)[0]


def test_messages_without_occupancy_wait_for_no_other(parts: dict[str, Any]) -> None:
    """Where one message of a link gets some, nothing is late: the others are not behind it, for judge and check."""
    agreed = 0
    for known in parts["plans"].known:
        for number, each in enumerate(known.plan["dependencies"]):
            if (each["source"], each["target"]) != ("3B", "0B") or [hop["occupancy_ns"] for hop in each["hops"]] != [0]:
                continue
            plan = attack_plans.copy.deepcopy(known.plan)
            plan["dependencies"][number]["hops"][0]["occupancy_ns"] = 1
            assert attack_plans.check(attack_plans.parse(json.dumps(plan), Plan)).problems == ()
            assert judge.faults_of(plan) == []
            agreed += 1
    assert agreed


def test_a_bound_that_is_too_high_is_noticed(parts: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    search = attack_bounds.search_plan

    def overstated(request: Any) -> Any:
        found = search(request)
        return replace(found, lower_bound_ns=found.plan.predicted.makespan_ns + 1)

    monkeypatch.setattr(attack_bounds, "search_plan", overstated)
    assert attacked(parts["bounds"], 0, 0).wrong == "bound"
    assert attacked(parts["bounds"], 3, 0).wrong == "bound"


@pytest.mark.parametrize(
    ("said", "code", "wrong"),
    [
        ("pipeplan: no", 2, ""),
        ("pipeplan: no", 9, "exit"),
        ("", 1, "exit"),
        ("pipeplan: no\npipeplan: nor this", 1, "exit"),
        ("pipeplan: \x9b31m", 2, "control"),
        ("pipeplan: a\u202eb", 2, "control"),
        ("pipeplan: " + "x" * 30_000, 2, "control"),
        ("pipeplan: canary", 2, "control"),
        ("pipeplan: [bold]canary[/bold], [bold]canary... and ...canary[/bold]", 2, ""),
        ("pipeplan: [bold]canary[/bold] canary", 2, "control"),
        ("Traceback (most recent call last):", 1, "traceback"),
    ],
)
def test_what_commands_say_is_judged(said: str, code: int, wrong: str) -> None:
    given = attack_inputs.Input(["check", "plan.json"])
    assert attack_inputs.judged(given, attack_inputs.Ran(code, "", said)).wrong == wrong


@pytest.mark.parametrize(
    ("said", "notes", "code", "wrong"),
    [
        ("pipeplan: 8 samples assumed\npipeplan: no plan", ["8 samples assumed"], 1, ""),
        ("pipeplan: 8 samples assumed\npipeplan: no plan", [], 1, "exit"),
        ("pipeplan: 8 samples assumed\npipeplan: give --device", ["8 samples assumed"], 2, "exit"),
        ("pipeplan: samples are made up\npipeplan: rank 0 failed", [], 1, ""),
        ("pipeplan: another model\npipeplan: samples are made up", [], 2, "exit"),
    ],
)
def test_remarks_go_with_answers_and_runs_not_with_refusals(said: str, notes: list[str], code: int, wrong: str) -> None:
    given = attack_inputs.Input(["frontier", "profile.json"])
    assert attack_inputs.judged(given, attack_inputs.Ran(code, "", said, notes=notes)).wrong == wrong


def test_notes_of_an_answer_are_known_from_its_errors(tmp_path: Path) -> None:
    """They were errors where they began with words that the judge had not heard yet."""
    profile = attack_plans.chain(3)
    write_file(profile, str(tmp_path / "profile.json"))
    for memory, how in (("1B", "exit 1"), ("1GB", "exit 0")):
        asked = ["compare", "profile.json", "--devices", "2", "--memory", memory, "--time-limit", "1s", "--json"]
        ran = attack_inputs.run(attack_inputs.Input(asked), tmp_path)
        ended = attack_inputs.judged(attack_inputs.Input(asked), ran)
        assert (ended.how, ended.wrong) == (how, ""), ended.what
        assert next(note.partition(" (")[0] for note in ran.notes) == "32 samples assumed"


def test_instructions_may_hold_up_more_and_passes_no_others(parts: dict[str, Any]) -> None:
    before = parts["plans"].known[12].plan
    ends = [(each["source"], each["target"]) for each in before["dependencies"]]
    assert ("2GATHER", "1F") in ends

    def differs(*pairs: tuple[str, str]) -> str:
        dependencies = [{"source": source, "target": target, "hops": [], "needs": None} for source, target in pairs]
        return attack_plans._differs({**before, "dependencies": dependencies}, before)

    assert differs(*ends, ("2GATHER", "1B")) == "", "no profile says what an instruction holds up"
    assert differs(*ends, ("0F", "1B"))
    assert differs(*(each for each in ends if each != ("2GATHER", "1F"))), "1F has to wait for 0F, through it"


def test_forked_ranks_have_groups_of_their_own_as_started_ones() -> None:
    """In the session of their launcher: the system hangs up on one that stands still as the launcher ends."""
    with open(os.devnull, "r+") as null:
        streams = [null.fileno()] * 3
        rank = attack_faults.Forked(["", "-m", "platform"], *streams, pass_fds=(), process_group=0, env={})
    assert (os.getpgid(rank.pid), os.getsid(rank.pid)) == (rank.pid, os.getsid(0))
    assert rank.wait() == 0
    rank.stdin.close()


@pytest.mark.parametrize("working", [False, True])
def test_hangs_are_counted_by_what_a_command_does(working: bool) -> None:
    """One that stands still, or works for ever; not one that works for less, or that others keep from working."""
    pid = os.fork()
    if not pid:
        while True:
            time.sleep(0.0 if working else 60.0)
    try:
        assert attack_faults.status_before_it_hangs(pid, *((1e9, 0.2) if working else (0.2, 1e9))) is None
    finally:
        os.kill(pid, attack_faults.signal.SIGKILL)
    assert attack_faults.status_before_it_hangs(pid, 10.0) == -9


def launcher(binds: Callable[[int], object], folder: Path) -> int:
    """Start what stands for a command with two ranks, which are bound to its end in some way."""
    read, _ = os.pipe()
    pid = os.fork()
    if pid:
        return pid
    os.dup2(read, 0)  # which a rank reads to its end
    own, ready = os.getpid(), [folder / "first", folder / "ready"]
    for mark in ready:
        if not os.fork():
            os.setsid()
            binds(own)
            mark.touch()
            while True:
                time.sleep(1)
        while not mark.exists():
            time.sleep(0.001)
    while True:
        time.sleep(1)


def test_what_a_killed_launcher_leaves_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ranks stand still then, and end only where the system has been asked to end them."""
    cases: list[tuple[str, Callable[[int], object], str]] = [
        ("emulate", die_with_parent, ""),
        ("emulate", abs, "orphan"),
        ("train", die_with_parent, "lost"),
    ]

    steps = iter([[2]])
    monkeypatch.setattr(
        attack_faults, "whole", lambda folder: next(steps, [1])
    )  # it was, and no more as the fault came
    monkeypatch.setattr(attack_faults, "left_over", partial(attack_faults.left_over, 0.2))
    for verb, binds, wrong in cases:
        fault = attack_faults.Fault(verb, "launcher killed", 1, 0.0, -1, False)
        monkeypatch.setattr(attack_faults, "drawn_faults", lambda *drawn, fault=fault: [fault])
        monkeypatch.setattr(attack_faults, "start", lambda _, folder, *rest, binds=binds: launcher(binds, folder))
        (found,) = Pool(attack_faults.Faults(), 0, iter([0])).run(1, time.monotonic() + 1000)
        assert found.ended.wrong == wrong, found.ended.what


KILLED = "rank 1 was killed (SIGKILL) in 0F3 (step 4, program\ncounter 3 of 40); often because memory ran out\n"


@pytest.mark.parametrize(
    ("kind", "said", "wrong"),
    [
        ("killed", f"checkpoint kept written\nlast: 3\npipeplan: {KILLED}", ""),
        ("killed", "rank 1 was killed (SIGKILL) after step 4: writing a checkpoint", ""),
        ("killed", KILLED.replace("rank 1", "rank 0"), "says nothing"),
        ("killed", KILLED.replace("(step 4, program\ncounter 3 of 40)", ""), "says nothing"),
        ("killed", KILLED.replace("step 4", "step 7"), "names step 7"),
        ("killed", "rank 0 lost rank 1 in 0F3 (step 4, program counter 3 of 40)", "says nothing"),
        ("killed", f"{KILLED}pipeplan: {KILLED}", "2 messages"),
        ("killed", "resuming at step 4", "0 messages"),
        ("stopped", "rank 1 hangs in 3RECV_F0 (step 4, program counter 5 of 40); rank 0 waits for it", ""),
        ("stopped", "rank 0 hangs in 3RECV_F0 (step 4, program counter 5 of 40); rank 1 waits for it", "says nothing"),
        ("cut off", KILLED.replace("SIGKILL", "SIGABRT"), ""),
        ("cut off", "rank 0 lost rank 1 in 0F3 (step 4, program counter 3 of 40)", ""),
        ("cut off", "something is wrong", "says nothing"),
        ("slow", KILLED, "a pause ends it"),
        ("launcher slow", KILLED, "a pause ends it"),
        ("unread", KILLED, "a pause ends it"),
        ("disk full", "rank 1 could not write kept/step-00000004: OSError: [Errno 27] File too large", ""),
        ("disk full", "rank 0 could not write kept/step-00000004: OSError: [Errno 27] File too large", "says nothing"),
        ("disk full", "something is wrong", "says nothing"),
    ],
)
def test_what_a_failed_run_says_is_judged(kind: str, said: str, wrong: str) -> None:
    fault = attack_faults.Fault("train", kind, 1, 0.0, 4, False)
    found = attack_faults.wrong_message(fault, 1, f"pipeplan: {said}", range(3, 6))
    assert found.startswith(wrong), found
    assert bool(found) == bool(wrong), found


@dataclass
class Sleepers:
    """Attacks of which some last for ever, and some end their process."""

    name: str = "sleepers"
    count: int = 4
    limit_s: float = 0.5
    memory_bytes: int | None = None

    def attack(self, index: int, seed: int, folder: Path) -> Ended:
        while index == 1:
            time.sleep(1)
        if index == 2:
            os._exit(7)
        return Ended("fine")


def test_what_hangs_or_dies_is_written_down_and_the_others_go_on() -> None:
    found = {each.index: each.ended for each in Pool(Sleepers(), 0, iter(range(4))).run(2, time.monotonic() + 1000)}
    assert {index: (each.how, each.wrong) for index, each in found.items()} == {
        0: ("fine", ""),
        1: ("hang", "hang"),
        2: ("died", "traceback"),
        3: ("fine", ""),
    }
