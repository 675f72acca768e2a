"""Ranks that srun, mpirun, and pods of Kubeflow's trainers start: found out by what those set, and 4 of them train."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import yaml
from torch.distributed import HashStore, ProcessGroupGloo
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import get_args_parser

from builders.chains import chain_profile
from pipeplan.cli.run_verb import run_command, run_options
from pipeplan.errors import UsageError
from pipeplan.files import Cluster, write_file
from pipeplan.planning.build_plan import provenance_of
from pipeplan.runtime.launch import worker
from pipeplan.runtime.launch.job import RankContext, RunOptions, job_of, run_job
from pipeplan.runtime.launch.launchers import Launched, apart, first_host, join, order_of
from pipeplan.runtime.launch.status import Progress
from pipeplan.runtime.launch.stopping import SIGNALS
from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.parallel.device import require_own_devices
from pipeplan.runtime.training.checkpoint_folder import CheckpointFolder
from runtime_support.plans import model_plan
from runtime_support.threads import board_of_one
from runtime_support.warm import start_warm
from support.marks import slow_but
from support.paths import ROOT

SIZE = 4


def srun(rank: int) -> dict[str, str]:
    """Two tasks on each of two nodes, as a step has it."""
    return {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(SIZE),
        "SLURM_STEP_NODELIST": "localhost,gpu[07-08]",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_NODEID": str(rank // 2),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank % 2),
    }


def mpirun(rank: int) -> dict[str, str]:
    """All on this machine."""
    return {
        "PMIX_NAMESPACE": f"prterun-{os.getpid()}@1",
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(SIZE),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(SIZE),
    }


def pytorchjob(rank: int) -> dict[str, str]:
    """A pod for each rank; nothing is said of who shares a machine."""
    return {"RANK": str(rank), "WORLD_SIZE": str(SIZE), "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}


def trainjob(rank: int) -> dict[str, str]:
    """A pod for each rank, of the kind that is made for torchrun."""
    return {
        "PET_NNODES": str(SIZE),
        "PET_NODE_RANK": str(rank),
        "PET_NPROC_PER_NODE": "1",
        "PET_MASTER_ADDR": "localhost",
        "PET_MASTER_PORT": str(free_port()),
    }


_PORTS: list[int] = []


def free_port() -> int:
    """The same for all ranks of a test."""
    if not _PORTS:
        with socket.socket() as found:
            found.bind(("localhost", 0))
            _PORTS.append(found.getsockname()[1])
    return _PORTS[0]


LAUNCHERS = {each.__name__: each for each in (srun, mpirun, pytorchjob, trainjob)}
SIGNALLED = {"srun": signal.SIGUSR1, "pytorchjob": signal.SIGTERM}
"""What its scheduler sends, and to which rank: srun to a single one, Kubernetes to all pods."""


def joined(environment: Mapping[str, str]) -> tuple[Launched | None, dict[str, str]]:
    """What is found, and said in torchrun's words."""
    own = dict(environment)
    found = join(own)
    return found, {name: own[name] for name in own if name not in environment}


def test_each_launcher_is_told_by_what_it_sets() -> None:
    found, said = joined(srun(3))
    assert found is not None
    assert found.launcher == "srun"
    port = said.pop("MASTER_PORT")
    assert 20_000 <= int(port) < 30_000
    assert joined(srun(0))[1]["MASTER_PORT"] == port
    where = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    assert said == {"RANK": "3", "WORLD_SIZE": "4", **where}
    found, said = joined(mpirun(2))
    assert (said["RANK"], said["LOCAL_RANK"], said["LOCAL_WORLD_SIZE"]) == ("2", "2", "4")
    assert said["MASTER_ADDR"] == "127.0.0.1"
    assert joined(pytorchjob(1))[1] == {}, "and its place on its machine is asked of the ranks"
    found, said = joined(trainjob(1))
    assert (said["RANK"], said["WORLD_SIZE"], said["LOCAL_RANK"], said["LOCAL_WORLD_SIZE"]) == ("1", "4", "0", "1")
    assert said["MASTER_PORT"] == trainjob(1)["PET_MASTER_PORT"]
    assert joined({}) == (None, {})


def test_what_torchrun_sets_holds_inside_of_another_launcher() -> None:
    inside = {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
    }
    for other in (srun(1), trainjob(1)):
        found, said = joined(other | inside)
        assert found is not None
        assert (found.launcher, found.rank, said) == ("torchrun", 5, {})
    batch_script = {name: value for name, value in srun(0).items() if name != "SLURM_STEP_ID"}
    assert joined(batch_script)[0] is None
    assert joined(srun(0) | {"SLURM_STEP_NUM_TASKS": "1"})[0] is None, "a shell in an allocation"


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        (
            mpirun(0) | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            "mpirun does not say where rank 0 is, .* -x MASTER_ADDR=HOST",
        ),
        (
            trainjob(0) | {"PET_NPROC_PER_NODE": "2"},
            "PET_NPROC_PER_NODE is 2: .*; start it with torchrun -m pipeplan run",
        ),
        (srun(0) | {"SLURM_PROCID": "4"}, "srun says that this is rank 4 of 4"),
        (srun(0) | {"SLURM_PROCID": "x"}, "SLURM_PROCID is 'x', and a launcher sets it to a number"),
        ({"RANK": "0", "WORLD_SIZE": "4"}, "RANK and WORLD_SIZE are set and MASTER_ADDR is not"),
    ],
)
def test_what_makes_no_sense_is_said(environment: Mapping[str, str], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        join(dict(environment))


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("gpu[07-09,12],login", "gpu07"), ("a1,b[2-3]", "a1"), ("rack[1-2]node[03,05]", "rack1node03"), ("n", "n")],
)
def test_the_first_host_of_a_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


def test_the_order_of_devices_is_compared_with_machines() -> None:
    assert order_of(["a"] * 4) == ""
    assert order_of(["b", "b", "a", "a"]) == "4 ranks on 2 machines: b has ranks 0-1, a has ranks 2-3"
    assert "warning: 4 ranks on 2 machines: a has ranks 0, 2, b has ranks 1, 3; " in order_of(["a", "b", "a", "b"])
    assert "srun --distribution=block" in order_of(["a", "b", "a", "b"])


def test_ranks_that_the_plan_has_on_one_node_and_that_are_apart_are_said() -> None:
    pairs = ["a", "a", "b", "b", "c", "c"]
    assert {apart(pairs, size) for size in (None, 1, 2)} == {""}
    assert apart([], 4) == apart(["a"] * 6, 2) == apart(["a"] * 4 + ["b"] * 2, 2) == "", "larger nodes are no harm"
    said = apart(pairs, 4)
    assert said.startswith("warning: the plan has ranks 0-3 on one node of 4 devices, and they are on 2 machines")
    assert "here (a, b): " in said
    assert "Start 4 ranks on each machine, or search with a cluster file" in said
    pods = apart([f"pod-{number}" for number in range(64)], 16)
    assert "on 16 machines or containers here (pod-0, " in pods
    assert "pod-7 and 8 more), and so for 3 more of its nodes: " in pods


def test_a_run_compares_the_nodes_of_its_plan(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Rank 0 alone says it; plans have the nodes of their cluster."""
    levels = [("node", 2, 0.0, "1GB"), ("network", 4, 0.0, "1GB")]
    cluster = Cluster.of("two-nodes", 4, levels=levels)
    profile = chain_profile(4)
    made = provenance_of(profile, cluster, {})
    assert (made.node_size, provenance_of(profile, Cluster.of("flat", 4, levels=levels[1:]), {}).node_size) == (2, None)
    plan = model_plan(load_model("gpt2-tiny"), [0, 1, 2, 3]).model_copy(update={"provenance": made})
    progress = MagicMock()
    progress.board.machines = ["a", "b", "b", "b"]
    for rank in (0, 1):
        run_job(MagicMock(), RunOptions(), job_of(plan, RunOptions()), RankContext(rank, progress, MagicMock()))
        assert ("the plan has ranks 0-1 on one node of 2" in capsys.readouterr().err) == (rank == 0)


def test_ranks_of_one_device_are_refused_by_its_identity() -> None:
    require_own_devices(["x", "y"], "nccl")
    require_own_devices(["x", "x"], "gloo")
    require_own_devices([None, None], "nccl")
    with pytest.raises(UsageError, match="ranks 1 and 2 have the same one"):
        require_own_devices(["x", "y", "y"], "nccl")


WARM = ("srun", "pytorchjob", "trainjob")
"""Whose processes are forked from one that has imported torch: 12 s less of processor time for each test."""


@slow_but("name", LAUNCHERS, lambda _: False, lambda _: False)
def test_four_processes_train(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those whose scheduler says so first write a checkpoint, and end in the middle with the signal's exit code."""
    _PORTS.clear()
    monkeypatch.chdir(tmp_path)
    write_file(model_plan(load_model("gpt2-tiny"), [0, 1, 2, 3], num_microbatches=2), "plan.json")
    sent = SIGNALLED.get(name)
    flags = ["--steps", "100000", "--checkpoint", "saved", "--checkpoint-every", "100000"] if sent else ["--steps", "2"]
    command = (sys.executable, "-m", "pipeplan", "run", "plan.json", "--model", "gpt2-tiny", *flags)
    known = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    clean = {key: value for key, value in os.environ.items() if key not in known}
    clean |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    start: Any = start_warm() if name in WARM else subprocess.Popen
    processes = []
    try:
        for rank in range(SIZE):
            with Path(f"out{rank}").open("wb") as out, Path(f"error{rank}").open("wb") as error:
                how = {"stdin": subprocess.PIPE, "pass_fds": (), "process_group": 0}
                env = clean | LAUNCHERS[name](rank)
                processes.append(start(command, stdout=out.fileno(), stderr=error.fileno(), env=env, **how))
        if sent is not None:
            _await_steps(processes, Path("out0"))
            for process in processes if sent is signal.SIGTERM else processes[2:3]:
                os.kill(process.pid, sent)
        codes = [process.wait(300) for process in processes]
    finally:
        for process in processes:
            process.stdin.close()
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
                process.wait(60)
    errors = [Path(f"error{rank}").read_text() for rank in range(SIZE)]
    if sent is None:
        assert codes == [0] * SIZE, errors
        assert re.search(r"step 1  loss \d", Path("out0").read_text())
        return
    assert codes == [128 + sent] * SIZE, errors
    (step,) = CheckpointFolder(str(tmp_path / "saved")).whole()
    assert f"ended by {sent.name}" in errors[0]
    assert f"step {step}: give --resume to go on from there" in errors[0]


def _await_steps(processes: Sequence[Any], output: Path) -> None:
    """Wait until the first step is said, by a process that has begun to train."""
    while "\n" not in output.read_text():
        assert all(process.poll() is None for process in processes), "what they said is in the folder"
        time.sleep(0.05)
    assert output.read_text().startswith("step 0  loss ")


# Recipes of the page ------------------------------------------------------------------------------------------------


def commands() -> list[list[str]]:
    """Every command of the page, as the words that a shell makes of it."""
    text = (ROOT / "docs/launching.md").read_text(encoding="utf-8")
    found = [line for body in re.findall(r"```shell\n(.*?)```", text, re.DOTALL) for line in body.splitlines()]
    for file in yaml_files():
        found += _commands_in(file)
    variables = re.compile(r"\$\([^)]*\)|\$\w+")
    return [shlex.split(variables.sub("1", line), comments=True) for line in found if "pipeplan run" in line]


def yaml_files() -> list[Any]:
    """Every file in YAML of the page."""
    text = (ROOT / "docs/launching.md").read_text(encoding="utf-8")
    bodies = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    return [file for body in bodies for file in yaml.safe_load_all(body)]


def _commands_in(value: Any) -> Iterator[str]:
    """What shells of a file in YAML run: the last word of a command, and the lines of run."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            if key == "command":
                yield each[-1]
            elif key == "run":
                yield from each.splitlines()
            else:
                yield from _commands_in(each)
    elif isinstance(value, list):
        for each in value:
            yield from _commands_in(each)


def test_commands_of_the_page_are_understood() -> None:
    """By the verb, and by torchrun where that starts it."""
    found = commands()
    assert len(found) == 6, "pods of both kinds of a PyTorchJob have the same"
    for words in found:
        run = words.index("run")
        with run_command.make_context("run", words[run + 1 :]) as context:
            assert context.params["plan_path"] == "plan.json"
            assert not context.params["local"]
            run_options({**context.params, "trace": False})
        if "torchrun" in words:
            begin = words.index("torchrun")
            known = get_args_parser().parse_args(words[begin + 1 :])
            assert (known.module, known.training_script) == (True, "pipeplan")
            handled = {signal.Signals[name] for name in known.signals_to_handle.split(",")}
            assert handled == {*STOPS_TORCHRUN, *SIGNALS}
    assert sum("torchrun" in words for words in found) == 2


STOPS_TORCHRUN = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""What it hands on to its ranks without being told to."""


def _values(value: Any, key: str) -> Iterator[Any]:
    """What stands by a key anywhere in a file in YAML; variables of containers are keys, too."""
    if isinstance(value, Mapping):
        own = {value["name"]: value["value"]} if {"name", "value"} == value.keys() else value
        yield from (each for name, each in own.items() if name == key)
        for each in value.values():
            yield from _values(each, key)
    elif isinstance(value, list):
        for each in value:
            yield from _values(each, key)


def test_recipes_leave_time_for_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun kills its ranks before Kubernetes kills torchrun, and neither after half a minute."""
    files = yaml_files()
    graces = [each for file in files for each in _values(file, "terminationGracePeriodSeconds")]
    assert graces == [300, 300, 300], "a master, workers, and pods of torchrun"
    waits = [int(each) for file in files for each in _values(file, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")]
    assert len(waits) == 2
    assert 240 <= min(waits) <= max(waits) < min(graces)
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(waits[0]))
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=1)
    assert getattr(config, "shutdown_timeout", waits[0]) == waits[0], "torch 2.11 has no such option"


@pytest.mark.slow
@pytest.mark.long
def test_torchrun_hands_on_what_it_is_told_to(tmp_path: Path) -> None:
    """By the flag of the page; without it SIGUSR1 ends torchrun and no rank."""
    words = next(words for words in commands() if "torchrun" in words)
    flag = words.index("--signals-to-handle")
    write_file(model_plan(load_model("gpt2-tiny"), [0], num_microbatches=2), str(tmp_path / "plan.json"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *words[flag : flag + 2]]
    training = ["--steps", "100000", "--checkpoint", "saved", "--checkpoint-every", "100000"]
    run = ["-m", "pipeplan", "run", "plan.json", "--model", "gpt2-tiny", *training]
    with subprocess.Popen(
        [*command, *run], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("step 0  loss ")
        process.send_signal(signal.SIGUSR1)
        _, said = process.communicate(timeout=120)
    assert "pipeplan: ended by SIGUSR1" in said
    assert len(CheckpointFolder(str(tmp_path / "saved")).whole()) == 1


class CountedStore:
    """A store that counts what it is asked, where all other ranks have been."""

    def __init__(self, num_ranks: int) -> None:
        texts = [json.dumps([f"n{rank // 8}", f"k{rank // 8}", rank < 8]) for rank in range(num_ranks)]
        self.known = {f"pipeplan/machine/{rank}": text.encode() for rank, text in enumerate(texts)}
        self.here, self.asked = num_ranks - 1, 0

    def set(self, key: str, value: str) -> None:
        self.asked += 1
        self.known.setdefault(key, value.encode())

    def add(self, key: str, count: int) -> int:
        self.asked += 1
        self.here += count
        return self.here

    def get(self, key: str) -> bytes:
        self.asked += 1
        return self.known[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.asked += 1
        return [self.known[key] for key in keys]


@pytest.mark.parametrize("num_ranks", [8, 800])
def test_a_rank_asks_the_store_as_often_among_many_as_among_few(
    num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    store: Any = CountedStore(num_ranks)
    found = worker._machines(store, num_ranks - 1, num_ranks)
    assert store.asked == 5, "who comes last"
    assert [each.name for each in found] == [f"n{rank // 8}" for rank in range(num_ranks)]
    assert [rank for rank, each in enumerate(found) if each.meeting] == [*range(8)]
    store.here, store.asked = 0, 0
    assert worker._machines(store, 0, num_ranks) == found
    assert store.asked == 3


@pytest.mark.skipif(sys.platform != "linux", reason="sockets are counted in /proc")
def test_many_ranks_connect_as_they_first_need_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few connect each with all; of more each opens as many sockets, however many there are."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "")
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT")
    begun = list[str | None]()
    monkeypatch.setattr(
        worker.dist, "init_process_group", lambda *_, **__: begun.append(os.environ.get("TORCH_GLOO_LAZY_INIT"))
    )
    store, kept, opened = HashStore(), list[ProcessGroupGloo](), dict[int, list[float]]()
    for world_size in (64, 65):
        progress = Progress(board_of_one(), 0)
        with monkeypatch.context() as patch:
            patch.setattr(worker.dist, "barrier", lambda: None)
            patch.setattr(worker.dist, "destroy_process_group", lambda: None)
            with worker._process_group(store, progress, world_size, timedelta(seconds=9)):
                pass
        opened[world_size] = [_sockets_of(ranks, kept) / ranks for ranks in (4, 16)]
    assert begun == [None, "1"]
    assert opened[64] == [opened[64][0], opened[64][0] + 12]
    assert opened[65][0] == opened[65][1] < opened[64][0]


def _sockets_of(ranks: int, kept: list[ProcessGroupGloo]) -> int:
    """How many a group of threads opens that has done nothing yet; all ``kept`` ones stay as they are."""
    store, before = HashStore(), len(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(ranks) as pool:
        made = [pool.submit(ProcessGroupGloo, store, rank, ranks, timedelta(seconds=30)) for rank in range(ranks)]
        kept += [each.result() for each in made]
    return len(os.listdir("/proc/self/fd")) - before
