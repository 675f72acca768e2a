"""Who started this process as one rank of many: torchrun, srun, Open MPI's mpirun, or a pod of Kubeflow's trainer.

Each says it in environment variables of its own. What torch and the rest of the package read are torchrun's, which
are set from those of the others here. Whatever launcher: where ranks stand among those of their machine is asked of
the ranks themselves, unless it is said, as nobody tells a pod who shares its machine.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from zlib import crc32

from pipeplan.errors import UsageError
from pipeplan.texts import number_ranges

_PORT = "29500"
_FIRST_PORT, _NUM_PORTS = 20_000, 10_000
"""Ports for jobs that have a number: jobs that share a machine should not share one."""


@dataclass(frozen=True, slots=True)
class Launched:
    """What a launcher says; None is what it does not. Ranks meet at ``address`` and ``port``, where rank 0 is."""

    launcher: str
    rank: int
    num_ranks: int
    local_rank: int | None = None
    num_local: int | None = None
    address: str | None = None
    port: str | None = None

    @property
    def environment(self) -> dict[str, str]:
        """The same in torchrun's words."""
        said = {
            "RANK": self.rank,
            "WORLD_SIZE": self.num_ranks,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.num_local,
            "MASTER_ADDR": self.address,
            "MASTER_PORT": self.port,
        }
        return {name: str(value) for name, value in said.items() if value is not None}


def join(environment: MutableMapping[str, str] = os.environ) -> Launched | None:
    """Find out who started this process, and say it in torchrun's words, too; None if nobody did.

    What the environment says of ``MASTER_ADDR`` and ``MASTER_PORT`` holds.

    Raises:
        UsageError: the launcher's variables make no sense, or do not say where rank 0 is.
    """
    found = next(filter(None, (read(environment) for read in _LAUNCHERS)), None)
    if found is None:
        return None
    if not 0 <= found.rank < found.num_ranks:
        raise UsageError(
            f"{found.launcher} says that this is rank {found.rank} of {found.num_ranks}, which does not exist"
        )
    for name, value in found.environment.items():
        environment.setdefault(name, value)
    if "MASTER_ADDR" not in environment:
        raise UsageError(_NO_ADDRESS[found.launcher])
    return found


_NO_ADDRESS = {
    "torchrun": "RANK and WORLD_SIZE are set and MASTER_ADDR is not: set it, and MASTER_PORT, to where rank 0 listens",
    "mpirun": "mpirun does not say where rank 0 is, and its ranks are on several machines: give it "
    "-x MASTER_ADDR=HOST, the first host of --host or of the hostfile",
    "srun": "srun says no SLURM_JOB_NODELIST: set MASTER_ADDR to the host of rank 0",
    "Kubeflow": "the pod has no PET_MASTER_ADDR: set MASTER_ADDR to the host of node 0's pod",
}


def _torchrun(environment: Mapping[str, str]) -> Launched | None:
    """torchrun, or whoever sets the same: Kubeflow's PyTorchJob does, for one process in each pod."""
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    rank, size = (_number(environment, name) for name in ("RANK", "WORLD_SIZE"))
    return Launched("torchrun", rank, size, port=_PORT)


def _srun(environment: Mapping[str, str]) -> Launched | None:
    """A task of a step; a batch script itself is none, whatever it knows of its job."""
    if "SLURM_STEP_ID" not in environment or "SLURM_PROCID" not in environment:
        return None
    sizes = [name for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if name in environment]
    size = _number(environment, sizes[0]) if sizes else 1
    if size == 1:  # a shell in an allocation, or a step that starts torchrun
        return None
    hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    rank, local = _number(environment, "SLURM_PROCID"), _number(environment, "SLURM_LOCALID")
    job = f"{environment.get('SLURM_JOB_ID', '')}.{environment['SLURM_STEP_ID']}"
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE")
    here = None if tasks is None else _of_node(tasks, _number(environment, "SLURM_NODEID"))
    return Launched("srun", rank, size, None if here is None else local, here, hosts and first_host(hosts), _port(job))


def _mpirun(environment: Mapping[str, str]) -> Launched | None:
    """Open MPI. Where rank 0 is it says only to MPI: known if all ranks are here."""
    if "OMPI_COMM_WORLD_RANK" not in environment:
        return None
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    rank, size, local, here = (_number(environment, f"OMPI_COMM_WORLD_{name}") for name in names)
    job = environment.get("PMIX_NAMESPACE", "")
    return Launched("mpirun", rank, size, local, here, "127.0.0.1" if size == here else None, _port(job))


def _kubeflow(environment: Mapping[str, str]) -> Launched | None:
    """A pod of a TrainJob, or of an elastic PyTorchJob, that runs one process and no torchrun."""
    if "PET_NNODES" not in environment or "PET_NODE_RANK" not in environment:
        return None
    each = environment.get("PET_NPROC_PER_NODE", "1")
    if each not in ("1", "auto", "cpu", "gpu"):
        raise UsageError(
            f"PET_NPROC_PER_NODE is {each}: this pod is to have {each} ranks, and this is one process; start it with "
            "torchrun -m pipeplan run ..., which reads PET_*"
        )
    size = environment["PET_NNODES"].partition(":")[0]  # LEAST:MOST of an elastic job
    rank = _number(environment, "PET_NODE_RANK")
    address, port = environment.get("PET_MASTER_ADDR"), environment.get("PET_MASTER_PORT", _PORT)
    return Launched("Kubeflow", rank, _number({"PET_NNODES": size}, "PET_NNODES"), 0, 1, address, port)


_LAUNCHERS: tuple[Callable[[Mapping[str, str]], Launched | None], ...] = (_torchrun, _srun, _mpirun, _kubeflow)
"""In the order in which they are asked: what torchrun has started may have variables of who started torchrun."""


def first_host(hosts: str) -> str:
    """The first host of a list as SLURM writes it: ``gpu[07-09,12],login`` begins with gpu07."""
    first = re.split(r",(?![^\[]*\])", hosts)[0]
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first)


def _of_node(tasks: str, node: int) -> int | None:
    """How many tasks a node has, of ``4(x2),3``."""
    counts: list[int] = []
    for each in tasks.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", each)
        if match is None:
            return None
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[node] if node < len(counts) else None


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not re.fullmatch(r"\d{1,9}", text):
        raise UsageError(f"{name} is {text!r}, and a launcher sets it to a number")
    return int(text)


def _port(job: str) -> str:
    return str(_FIRST_PORT + crc32(job.encode()) % _NUM_PORTS) if job.strip(".") else _PORT


# Machines ---------------------------------------------------------------------------------------------------------


def order_of(machines: Sequence[str]) -> str:
    """``machines`` [rank], in words: who is where, and what to do where neighbours in the plan are not on one machine.

    Plans number the devices of a node one after another. Empty if all are on one machine.
    """
    ranks: dict[str, list[int]] = {}
    for rank, machine in enumerate(machines):
        ranks.setdefault(machine, []).append(rank)
    if len(ranks) == 1:
        return ""
    shown = [f"{machine} has rank{'s' * (len(own) > 1)} {number_ranges(own)}" for machine, own in ranks.items()]
    said = f"{len(machines)} ranks on {len(ranks)} machines: {', '.join(shown[:_SHOWN])}"
    said += f" and {len(shown) - _SHOWN} more" * (len(shown) > _SHOWN)
    if all(own[-1] - own[0] == len(own) - 1 for own in ranks.values()):
        return said
    return (
        f"warning: {said}; device r of the plan is rank r, and plans number the devices of a node one after another: "
        "neighbours that the plan has on one node are on several here. Let ranks fill a machine before the next (srun "
        "--distribution=block, mpirun --map-by slot)"
    )


def apart(machines: Sequence[str], node_size: int | None) -> str:
    """What to know of ranks that the plan has on one node, of so many devices, and that are on several machines here.

    ``machines`` [rank] as above; empty if there are no such ranks, or nothing is known of nodes or machines.
    """
    size = node_size or 1
    nodes = [range(begin, min(begin + size, len(machines))) for begin in range(0, len(machines), size)]
    split = [node for node in nodes if len({machines[rank] for rank in node}) > 1]
    if not split:
        return ""
    here = list(dict.fromkeys(machines[rank] for rank in split[0]))
    shown = ", ".join(here[:_SHOWN]) + f" and {len(here) - _SHOWN} more" * (len(here) > _SHOWN)
    more = f", and so for {len(split) - 1} more of its nodes" * (len(split) > 1)
    return (
        f"warning: the plan has ranks {number_ranges(split[0])} on one node of {size} devices, and they are on "
        f"{len(here)} machines or containers here ({shown}){more}: exchanges inside of a node may take longer than it "
        f"predicts. Start {size} ranks on each machine, or search with a cluster file of nodes as they are"
    )


_SHOWN = 8
