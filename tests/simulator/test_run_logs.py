"""Logs and traces of other trainers, in the form in which they print them, beside a plan's prediction."""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders.folds import plans_of
from builders.requests import request_of
from pipeplan import _api, example
from pipeplan.errors import FileError, PipeplanError, UsageError
from pipeplan.examples import shape
from pipeplan.files.run_logs import RunLog, read_run
from pipeplan.planning.request import Batch
from pipeplan.planning.steps import search_plan
from pipeplan.reporting.tables import print_measured
from pipeplan.simulator.measured_times import LoggedComparison
from pipeplan.simulator.simulation import Simulation, simulate
from support.commands import pipeplan

MS = 1_000_000

TITAN = """
[rank0]: 2030-01-01 10:00:00,000 - INFO - step:  1  loss:  7.6  memory:  9.00GiB(11.2%)  tps: 12
[rank0]: 2030-01-01 10:00:01,000 - INFO - \x1b[31mstep:  2\x1b[0m  loss:  7.6  memory: 10.50GiB(13.2%)  tps: 1,000
[rank1]: 2030-01-01 10:00:01,000 - INFO - step:  2  loss:  7.6  memory:  8.00GiB(10.0%)  tps: 1,000
[rank0]: 2030-01-01 10:00:01,000 - INFO - [GC] Performing periodical GC collection. 0.06 seconds.
[rank0]: 2030-01-01 10:00:05,000 - INFO - step: 12  loss:  7.5  memory: 10.00GiB(12.5%)  tps: 2,000  mfu: 1%
"""

MEGATRON = """
 [2030-01-01 02:55:39] iteration        1/     100 | elapsed time per iteration (ms): 9999.9 | lm loss: 2 |
[Rank 1] (after 1 iterations) memory (MB) | allocated: 100.5 | max allocated: 1024.5 | max reserved: 2048.0
 [2030-01-01 02:55:45] iteration        2/     100 | elapsed time per iteration (ms): 41.5 | lm loss: 2 |
 [2030-01-01 02:55:50] iteration        3/     100 | elapsed time per iteration (ms): 45.5 | lm loss: 2 |
times across ranks (ms):
  forward-compute:
     rank  0: 8.25
     rank  1: 9.75
  backward-compute:
     rank  0: 24.00
     rank  1: 27.00
  optimizer:
     rank  0: 3.00
"""


@pytest.fixture(scope="module")
def simulation() -> Simulation:
    """Two stages and eight micro-batches: 8 ms forward and 24 ms backward on each device."""
    profile = shape("v", 2).model_copy(update={"tokens_per_sample": 100})
    request = request_of(profile, profile.placement, Batch(8, 1), scheduler="1f1b", time_limit=1, deterministic=True)
    return simulate(search_plan(request).plan)


def _compared(simulation: Simulation, *paths: Path) -> LoggedComparison:
    found = _api.with_measured(simulation, list(map(str, paths))).measured
    assert isinstance(found, LoggedComparison)
    return found


def _written(folder: Path, text: str, name: str = "run.log") -> Path:
    (folder / name).write_text(text)
    return folder / name


def test_torchtitan(simulation: Simulation, tmp_path: Path) -> None:
    """8 samples of 100 tokens on two devices: 400 tokens each, in 0.4 s and 0.2 s; the first step is left out."""
    found = _compared(simulation, _written(tmp_path, TITAN))
    assert (found.tool, found.by, found.memory) == ("torchtitan", "tokens per second", "reserved")
    assert found.iterations_ns == (0.4e9, 0.2e9)
    assert found.num_left_out == 1
    assert [(each.device, each.peak_bytes) for each in found.devices] == [(0, int(10.5 * 2**30)), (1, 8 * 2**30)]


def test_torchtitan_without_tokens(simulation: Simulation, tmp_path: Path) -> None:
    """Then by the clock: ten steps in four seconds."""
    unknown = simulate(
        simulation.plan.model_copy(
            update={"provenance": simulation.plan.provenance.model_copy(update={"tokens_per_sample": None})}
        )
    )
    found = _compared(unknown, _written(tmp_path, TITAN))
    assert (found.by, found.iterations_ns) == ("the time of steps", (1e9, 0.4e9))
    without_times = "\n".join(line.partition("INFO - ")[2] for line in TITAN.splitlines())
    with pytest.raises(UsageError, match="make the plan from a profile with tokens_per_sample"):
        _compared(unknown, _written(tmp_path, without_times))


def test_megatron(simulation: Simulation, tmp_path: Path) -> None:
    found = _compared(simulation, _written(tmp_path, MEGATRON))
    assert (found.tool, found.memory, found.num_left_out) == ("Megatron-LM", "allocated", 1)
    assert found.iterations_ns == (41.5 * MS, 45.5 * MS)
    first, second = found.devices
    assert (first.forward_ns, first.backward_ns, first.peak_bytes) == (8.25 * MS, 24 * MS, None)
    assert (second.forward_ns, second.backward_ns, second.peak_bytes) == (9.75 * MS, 27 * MS, round(1024.5 * 2**20))
    assert (first.predicted_forward_ns, first.predicted_backward_ns) == (8 * MS, 24 * MS)
    count = simulation.workload.num_microbatches
    assert [(each.stage, each.role, each.measured_ns * count) for each in found.stages] == [
        (0, "forward", 8.25 * MS),
        (1, "forward", 9.75 * MS),
        (1, "backward", 27 * MS),
        (0, "backward", 24 * MS),
    ]
    assert {each.predicted_ns * count for each in found.stages} == {8 * MS, 24 * MS}
    assert found.figures()["stages"] == [asdict(each) for each in found.stages]
    text = io.StringIO()
    print_measured(simulation, found, text, 100)
    assert "Megatron-LM, 2 steps by the time of steps; first (warm-up) step excluded" in text.getvalue()
    assert "+12.5%" in text.getvalue()  # 27 ms for 24


ACROSS = """
 [2030-01-01 02:55:45] iteration        2/     100 | elapsed time per iteration (ms): 41.5 | lm loss: 2 |
(min, max) time across ranks (ms):
    forward-backward ...............................: (40.00, 41.00)
    forward-compute ................................: (8.25, 9.75)
    backward-compute ...............................: (24.00, 27.00)
    optimizer ......................................: (3.00, 3.10)
"""


def test_megatrons_timers_as_it_prints_them_by_default(simulation: Simulation, tmp_path: Path) -> None:
    found = _compared(simulation, _written(tmp_path, ACROSS))
    assert found.devices == ()
    assert [(each.role, each.predicted_ns, each.measured_ns) for each in found.across_ranks] == [
        ("forward", (8 * MS, 8 * MS), (8.25 * MS, 9.75 * MS)),
        ("backward", (24 * MS, 24 * MS), (24 * MS, 27 * MS)),
        ("optimizer's step", (0, 0), (3.1 * MS, 3.1 * MS)),
    ]
    assert found.stages == ()  # which rank took how long is not said
    assert found.figures()["across_ranks"] == [asdict(each) for each in found.across_ranks]
    text = io.StringIO()
    print_measured(simulation, found, text, 100)
    assert "backward, most of all ranks" in text.getvalue()
    assert "+12.5%" in text.getvalue()
    only_most = ACROSS.replace("(min, max)", "max").replace("(8.25, 9.75)", "9.75").replace("(24.00, 27.00)", "27.00")
    found = _compared(simulation, _written(tmp_path, only_most))
    assert [each.measured_ns[1] for each in found.across_ranks] == [9.75 * MS, 27 * MS, 3.1 * MS]
    print_measured(simulation, found, text := io.StringIO(), 100)
    assert "least" not in text.getvalue()


ALL = """
 [2030-01-01 02:55:45] iteration        2/     100 | elapsed time per iteration (ms): 41.5 | lm loss: 2 |
times across ranks (ms):
  all-grads-sync:
     rank  0: 1.50
     rank  1: 2.50
  params-all-gather:
     rank  0: 0.50
     rank  1: 0.25
  optimizer:
     rank  0: 3.00
     rank  1: 2.00
"""


def test_what_megatron_times_after_the_last_actions(simulation: Simulation, tmp_path: Path) -> None:
    """The rank that takes longest; the plan has nothing to sum or step."""
    found = _compared(simulation, _written(tmp_path, ALL))
    assert [(each.role, each.predicted_ns, each.measured_ns[1]) for each in found.across_ranks] == [
        ("gradients summed", (0, 0), 2.5 * MS),
        ("parameters gathered", (0, 0), 0.5 * MS),
        ("optimizer's step", (0, 0), 3 * MS),
    ]
    print_measured(simulation, found, text := io.StringIO(), 100)
    assert "gradients summed, most of all ranks" in text.getvalue()


BY_SRUN = """
1:  iteration       10/    1000 | consumed samples:     80 | elapsed time per iteration (ms): 99.5 | lm loss: 7 |
1: time (ms) | forward-compute: 30.50 | forward-recv: 1.25 | backward-compute: 60.25 | optimizer: 1.50
0: [Rank 0] (after 10 iterations) memory (MB) | allocated: 100.25 | max allocated: 512.5 | reserved: 700.0
1:  iteration       20/    1000 | consumed samples:    160 | elapsed time per iteration (ms): 42.5 | lm loss: 6 |
1: time (ms) | forward-compute: 9.50 | forward-recv: 1.25 | backward-compute: 25.25 | optimizer: 1.50
"""


def test_megatrons_former_line_of_times_is_of_the_last_rank(simulation: Simulation, tmp_path: Path) -> None:
    """Before 2022, and in BigScience's; with the number of the task that ``srun --label`` puts before lines."""
    found = _compared(simulation, _written(tmp_path, BY_SRUN))
    assert found.iterations_ns == (42.5 * MS,)
    assert [(each.device, each.forward_ns, each.backward_ns, each.peak_bytes) for each in found.devices] == [
        (0, None, None, round(512.5 * 2**20)),
        (1, 9.5 * MS, 25.25 * MS, None),
    ]


@pytest.mark.parametrize("log", [MEGATRON, ACROSS, ALL])
@pytest.mark.parametrize("before", ["[default0]:", "[rank1]: ", "3: ", "job/0 "])
def test_what_launchers_put_before_lines_changes_nothing(
    simulation: Simulation, tmp_path: Path, before: str, log: str
) -> None:
    """torchrun's ``--tee``, ``srun --label`` and others."""
    labelled = "\n".join(before + line for line in log.splitlines())
    plain = _compared(simulation, _written(tmp_path, log))
    assert _compared(simulation, _written(tmp_path, labelled)) == plain


def test_megatron_bridges_memory(simulation: Simulation, tmp_path: Path) -> None:
    """In decimal gigabytes."""
    line = (
        "[Rank 1] (after 2 iterations) memory (GB) | mem-allocated-gigabytes: 1.5 | mem-max-allocated-gigabytes: 2.5 |"
    )
    found = _compared(simulation, _written(tmp_path, MEGATRON.partition("[Rank 1]")[0] + line))
    assert [(each.device, each.peak_bytes) for each in found.devices] == [(1, 2_500_000_000)]


def test_validation_is_no_step(simulation: Simulation, tmp_path: Path) -> None:
    line = "[rank0]: 2030-01-01 10:00:03,000 - INFO - validate step:  9  loss:  7.6  memory:  9.0GiB(9%)  tps: 9,000\n"
    place = TITAN.index("[rank0]: 2030-01-01 10:00:05")
    with_it = _compared(simulation, _written(tmp_path, TITAN[:place] + line + TITAN[place:]))
    assert with_it == _compared(simulation, _written(tmp_path, TITAN))


OTHERS = {
    "NeMo AutoModel": """
2030-01-01 07:00:01 | INFO | root | step 1 | epoch 0 | loss 9.5 | mem 1.25 GiB | tps 20.00(10.00/gpu) | num 5
2030-01-01 07:00:02 | INFO | root | step 2 | epoch 0 | loss 9.1 | mem 1.50 GiB | tps 20000.00(10000.00/gpu) | num 5
""",
    "NeMo": """
Training epoch 0, iteration 0/99 | lr: 1e-06 | global_step: 0 | reduced_train_loss: 9.5 | train_step_timing in s: 7.25
Training epoch 0, iteration 1/99 | lr: 2e-06 | global_step: 1 | reduced_train_loss: 9.1 | train_step_timing in s: 0.04
""",
    "NeMo's bar": """
Epoch 0: 1% 1/99 [00:09<01:00, global_step=1.000, train_step_timing in s=7.250]\r\
Epoch 0: 2% 2/99 [00:10<01:00, global_step=2.000, train_step_timing in s=0.040]\r\
Epoch 0: 2% 2/99 [00:11<01:00, global_step=2.000, train_step_timing in s=0.040]
""",
    "DeepSpeed": """
steps: 10 loss: 9.5000 iter time (s): 7.250 samples/sec: 1.103
steps: 20 loss: 9.1000 iter time (s): 0.040 samples/sec: 200.000
""",
    "DeepSpeed's timer": """
[2030-01-01 01:00:00,000] [INFO] [timer.py:260:stop] epoch=0/micro_step=40/global_step=10, \
RunningAvgSamplesPerSec=150.5, CurrSamplesPerSec=200.0, MemAllocated=1.0GB, MaxMemAllocated=1.5GB
""",
}


@pytest.mark.parametrize("name", OTHERS)
def test_others(simulation: Simulation, tmp_path: Path, name: str) -> None:
    """8 samples of 100 tokens on two devices in 0.04 s: 10,000 tokens a second and device, 200 samples a second."""
    found = _compared(simulation, _written(tmp_path, OTHERS[name]))
    assert found.tool == name.partition("'")[0]
    assert found.iterations_ns == (0.04e9,)
    expected = [(0, round(1.5 * 2**30))] if "1.5" in OTHERS[name] else []
    assert [(each.device, each.peak_bytes) for each in found.devices] == expected


@pytest.mark.parametrize(
    ("log", "good", "bad"),
    [
        (TITAN, "tps: 1,000", "tps: 0"),
        (TITAN, "10.50GiB", "1e999GiB"),
        (TITAN, "tps: 2,000", "tps: " + "9" * 400),
        (MEGATRON, "(ms): 41.5", "(ms): 0.0"),
        (MEGATRON, "(ms): 41.5", "(ms): 1e999"),
        (MEGATRON, "max allocated: 1024.5", "max allocated: 1e999"),
        (MEGATRON, "0: 8.25", "0: 1e400"),
        (ACROSS, "(8.25, 9.75)", "(1e400, 1e400)"),
        (OTHERS["DeepSpeed's timer"], "150.5", "1e999"),
        (OTHERS["NeMo"], "global_step: 0", "global_step: 1e999"),
    ],
)
def test_figures_that_no_run_has_are_passed_over(
    simulation: Simulation, tmp_path: Path, log: str, good: str, bad: str
) -> None:
    assert good in log
    found = _compared(simulation, _written(tmp_path, log.replace(good, bad)))
    print_measured(simulation, found, io.StringIO(), 100)
    json.dumps(found.figures(), allow_nan=False)


@pytest.mark.parametrize("number", ["1e308", "9" * 400, "NaN", "Infinity", "-5"])
def test_numbers_that_no_trace_has_are_passed_over(tmp_path: Path, number: str) -> None:
    names = {"ProfilerStep#1": "5", "PP:0F0": number, "PP:0F1": "3"}
    events = [f'{{"ph": "X", "name": "{name}", "ts": 5, "dur": {lasts}}}' for name, lasts in names.items()]
    events.append(f'{{"name": "[memory]", "args": {{"Device Type": 1, "Total Reserved": {number}}}}}')
    text = f'{{"schemaVersion": 1, "traceEvents": [{", ".join(events)}]}}'
    found = read_run([str(_written(tmp_path, text))], 1)
    assert isinstance(found, RunLog)
    assert (found.actions_ns, found.peak_bytes) == ({"0F1": [3000.0]}, {})


def _trace(rank: int, steps: int, actions: list[tuple[str, float, float]], **more: Any) -> str:
    """What torch.profiler exports, in microseconds; every step has the same actions."""
    events: list[dict[str, Any]] = []
    for step in range(steps):
        begin = 1e6 * step
        events.append(
            {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{step}", "ts": begin, "dur": 50_000.0}
        )
        events += [
            {"ph": "X", "cat": "user_annotation", "name": name, "ts": begin + start, "dur": lasts}
            for name, start, lasts in actions
        ]
    events.append({"ph": "i", "name": "[memory]", "ts": 1.0, "args": {"Device Type": 1, "Total Reserved": 5 * 10**9}})
    events.append({"ph": "i", "name": "[memory]", "ts": 2.0, "args": {"Device Type": 0, "Total Reserved": 9 * 10**9}})
    return json.dumps({"schemaVersion": 1, "distributedInfo": {"rank": rank}, "traceEvents": events} | more)


def test_a_trace_of_each_rank(simulation: Simulation, tmp_path: Path) -> None:
    actions = [
        [(f"PP:{stage}F0", 0.0, 1100.0), (f"PP:{stage}B0", 2000.0, 3300.0), (f"PP:{stage}SEND_F0", 1200.0, 70.0)]
        for stage in range(2)
    ]
    files = [_written(tmp_path, _trace(rank, 3, own), f"{rank}.json") for rank, own in enumerate(actions)]
    found = _compared(simulation, *files)
    assert (found.tool, found.num_left_out, found.iterations_ns) == ("torch.profiler", 1, (50 * MS, 50 * MS))
    assert [(kind.kind, kind.count, kind.predicted_ns, kind.measured_ns) for kind in found.kinds] == [
        ("F", 2, 1 * MS, 1.1 * MS),
        ("B", 2, 3 * MS, 3.3 * MS),
    ]
    assert [(each.forward_ns, each.backward_ns) for each in found.devices] == [(1.1 * MS, 3.3 * MS)] * 2
    assert {(each.stage, each.role): (each.predicted_ns, each.measured_ns) for each in found.stages} == {
        (stage, role): times
        for stage in range(2)
        for role, times in (("forward", (1 * MS, 1.1 * MS)), ("backward", (3 * MS, 3.3 * MS)))
    }
    assert [each.peak_bytes for each in found.devices] == [5 * 10**9] * 2  # not what the host had
    assert {"tool": "torch.profiler", "ratio": found.ratio}.items() <= found.figures().items()


def test_steps_without_ranges_of_their_own_begin_with_the_same_action(tmp_path: Path) -> None:
    """A profiler without a schedule notes no ProfilerStep."""
    names = ["PP:0F0", "PP:0F1", "PP:0B0", "PP:0B1"] * 3
    events = [{"ph": "X", "name": name, "ts": 10.0 * place, "dur": 4.0} for place, name in enumerate(names)]
    found = read_run([str(_written(tmp_path, json.dumps({"schemaVersion": 1, "traceEvents": events})))], 1)
    assert isinstance(found, RunLog)
    assert (found.left_out, found.steps_ns) == (1, {0: [34_000.0, 34_000.0]})
    assert found.actions_ns["0B1"] == [4000.0, 4000.0]
    assert found.forward_ns == {0: 8000.0}


def test_ranges_of_a_device_go_before_those_of_its_host(tmp_path: Path) -> None:
    """A host only starts kernels."""
    event = {"ph": "X", "name": "PP:0F0", "ts": 5.0}
    events = [event | {"cat": "user_annotation", "dur": 1.0}, event | {"cat": "gpu_user_annotation", "dur": 9.0}]
    found = read_run([str(_written(tmp_path, json.dumps({"schemaVersion": 1, "traceEvents": events})))], 1)
    assert isinstance(found, RunLog)
    assert found.actions_ns == {"0F0": [9000.0]}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("loss 3.2 after 10 steps\n", "no lines with the time or speed of a step as Megatron-LM, torchtitan"),
        ('{"schemaVersion": 1}', "it has no list traceEvents"),
        ('{"schemaVersion": 1, "traceEvents": [7]}', "no range ProfilerStep#N"),
        ('{"schemaVersion": 1, "traceEvents": ', "not readable as JSON"),
        ('{"schemaVersion": 1, "distributedInfo": {"rank": "x"}, "traceEvents": []}', "has to be a rank's number"),
        ('{"traceEvents": []}', "not a trace that pipeplan run --trace has written"),
    ],
)
def test_what_is_none_is_refused(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"run\.log") as caught:
        read_run([str(_written(tmp_path, text))], 2)
    assert words in str(caught.value)


def test_runs_of_other_plans_are_refused(simulation: Simulation, tmp_path: Path) -> None:
    more = _written(tmp_path, _trace(2, 2, []), "two.json")
    with pytest.raises(UsageError, match="the run has a rank 2, the plan 2 devices"):
        _compared(simulation, more)
    same = [_written(tmp_path, _trace(0, 2, []), f"{name}.json") for name in "ab"]
    with pytest.raises(FileError, match="rank 0 is in a file before it, too"):
        _compared(simulation, *same)
    with pytest.raises(FileError, match=r"only traces of torch.profiler come in several files"):
        _compared(simulation, same[0], _written(tmp_path, MEGATRON))


@given(
    st.text(max_size=60) | st.sampled_from((TITAN, MEGATRON, BY_SRUN, *OTHERS.values(), _trace(0, 2, []))),
    st.integers(0, 900),
    st.text(max_size=9),
)
def test_text_that_was_damaged_is_read_or_refused(text: str, place: int, put: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "pipeplan.files.run_logs.read_bytes", lambda path: (text[:place] + put + text[place + 1 :]).encode()
        )
        try:
            found = read_run(["log"], 2)
        except PipeplanError:
            return
    assert not isinstance(found, RunLog) or found.ranks


def test_the_command(simulation: Simulation, tmp_path: Path) -> None:
    from pipeplan.files import write_file

    write_file(simulation.plan, str(tmp_path / "plan.json"))
    log = _written(tmp_path, MEGATRON)
    done = pipeplan("simulate", str(tmp_path / "plan.json"), "--measured", str(log), "--json")
    assert json.loads(done.stdout)["measured"]["iteration_ns"] == 43.5 * MS


# Both in one trace --------------------------------------------------------------------------------------------------


def _events(text: str) -> dict[str, list[dict[str, Any]]]:
    """{process: its actions}, by the names that processes have."""
    events = json.loads(text)["traceEvents"]
    names = {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}
    assert len(set(names.values())) == len(names)
    return {name: [each for each in events if each["ph"] == "X" and each["pid"] == pid] for pid, name in names.items()}


def _shifted(events: list[dict[str, Any]]) -> dict[int, list[tuple[str, int, float]]]:
    """{step: its actions, in ms after the first of them}"""
    steps: dict[int, list[tuple[str, int, float]]] = {}
    for each in events:
        steps.setdefault(each["args"]["step"], []).append((each["name"], each["tid"], each["ts"]))
    begins = {step: min(at for *_, at in own) for step, own in steps.items()}
    return {
        step: sorted((name, tid, round((at - begins[step]) / 1000, 3)) for name, tid, at in own)
        for step, own in steps.items()
    }


def test_a_runs_trace_is_beside_the_prediction(simulation: Simulation, tmp_path: Path) -> None:
    """Each step's prediction begins with it; what is written can be compared with the plan again."""
    from pipeplan.files import write_file
    from pipeplan.reporting.timeline import run_trace

    plan, trace, both = (str(tmp_path / name) for name in ("plan.json", "run.trace", "both.trace"))
    write_file(simulation.plan, plan)
    timeline = [
        [
            [(place, 2 * MS * place, 2 * MS * place + MS) for place in range(len(own))]
            for own in simulation.plan.programs
        ]
        for _ in range(3)
    ]
    (tmp_path / "run.trace").write_text(run_trace(simulation.plan, timeline, {"emulated": True}))
    slower = str(tmp_path / "slower.json")
    write_file(example("shape-v", devices=2, backward="9ms"), slower)
    done = pipeplan("simulate", plan, "--measured", trace, "--trace", both, "--profile", slower, "--json")
    assert done.returncode == 0, done.stderr
    found, given_ = _events(Path(both).read_text()), _events(Path(trace).read_text())
    assert found["measured"] == given_["measured"]
    alone = {(each["name"], each["tid"]): each for each in _events(_alone(plan, slower))["predicted"]}
    for step in range(3):
        begin = min(each["ts"] for each in found["measured"] if each["args"]["step"] == step)
        own = [each for each in found["predicted"] if each["args"]["step"] == step]
        assert len(own) == len(alone)
        for each in own:
            as_alone = alone[each["name"], each["tid"]]
            assert each["ts"] - begin == pytest.approx(as_alone["ts"])
            assert each["dur"] == as_alone["dur"]
    again = pipeplan("simulate", plan, "--measured", both, "--profile", slower, "--json")
    assert json.loads(again.stdout)["measured"] == json.loads(done.stdout)["measured"]


def _alone(plan: str, profile: str) -> str:
    return pipeplan("simulate", plan, "--profile", profile, "--trace", "-").stdout


def test_a_profilers_actions_are_beside_the_prediction(simulation: Simulation, tmp_path: Path) -> None:
    """Actions, messages, exchanges of torch's pipelining by their names; a rank with one stage says only a kind."""
    actions = [
        [
            ("PP:0F0", 0.0, 1100.0),
            ("PP:0SEND_F0", 1200.0, 70.0),
            ("PP:0UNSHARD", 5.0, 9.0),
            ("PP:(0F1;0B0)OVERLAP_F_B", 7.0, 1.0),
        ],
        [("Forward 3", 500.0, 1000.0), ("Backward 3", 2000.0, 3300.0), ("something", 0.0, 1.0)],
    ]
    files = [_written(tmp_path, _trace(rank, 3, own), f"{rank}.json") for rank, own in enumerate(actions)]
    found, run = _api.measured_run(simulation, [*map(str, files)])
    from pipeplan.reporting.beside import trace_beside

    events = _events(trace_beside(found, run))
    expected = [("0F0", 0, 0.0), ("0SEND_F0", 1, 1.2), ("0UNSHARD", 1, 0.005), ("1B3", 1000, 2.0), ("1F3", 1000, 0.5)]
    assert _shifted(events["measured"]) == {0: expected, 1: expected}
    predicted = _shifted(events["predicted"])
    assert predicted[0] == predicted[1]
    assert ("0F0", 0, 0.0) in predicted[0]
    ends = [min(each["ts"] for each in events[name] if each["args"]["step"] == 1) for name in ("predicted", "measured")]
    assert ends[0] == ends[1] > 0


def test_of_a_folded_plan_the_prediction_is_by_the_profile_and_the_cluster_that_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folded, devices, profile, cluster = plans_of(1, monkeypatch)
    slower = cluster.model_copy(
        update={
            "levels": tuple(
                each.model_copy(update={"bandwidth_bytes_per_s": each.bandwidth_bytes_per_s // 2})
                for each in cluster.levels
            )
        }
    )
    log = [str(_written(tmp_path, TITAN))]
    for against in ((None, None), (profile, slower), (None, slower)):
        expected, given = (simulate(plan, None, *against) for plan in (devices, folded))
        found = _api.with_measured(given, log, *against)
        assert found.rates == expected.rates
        assert isinstance(found.measured, LoggedComparison)
        assert found.measured == _api.with_measured(expected, log, *against).measured
    assert simulate(devices).rates != simulate(devices, None, None, slower).rates, "or all would be the same"


@pytest.mark.parametrize("log", [TITAN, MEGATRON])
def test_a_log_has_its_steps_beside_the_prediction(simulation: Simulation, tmp_path: Path, log: str) -> None:
    from pipeplan.reporting.beside import trace_beside

    found, run = _api.measured_run(simulation, [str(_written(tmp_path, log))])
    assert found.measured is not None
    events = _events(trace_beside(found, run))
    assert [each["dur"] * 1000 for each in events["measured"]] == list(found.measured.iterations_ns)
    for step, each in enumerate(events["measured"]):
        own = [one["ts"] for one in events["predicted"] if one["args"]["step"] == step]
        assert min(own) == each["ts"]
