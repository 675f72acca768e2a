"""What torch holds on each rank when its own means shard a small model: counted after a step of AdamW."""

from __future__ import annotations

import multiprocessing
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from runtime_support.warm import warm_ranks


def model() -> nn.Sequential:
    """Rows that neither 2 nor 4 ranks divide, fewer rows than ranks, and sizes that are equal."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 3), nn.LayerNorm(3), nn.Linear(3, 5), nn.Linear(5, 1))


def shapes() -> list[tuple[int, ...]]:
    """Of its parameters, in order."""
    return [tuple(each.shape) for each in model().parameters()]


RANKS = 4


def held(folder: Path) -> list[dict[int, dict[str, dict[str, int]]]]:
    """[rank] {ranks of a group: {means: {what: elements}}}, of 4 processes, which are 2 groups of 2 and one of 4."""
    context = multiprocessing.get_context("forkserver")
    with warm_ranks():
        queue = context.Queue()
        processes = [context.Process(target=_rank, args=(rank, str(folder), queue)) for rank in range(RANKS)]
        for process in processes:
            process.start()
    answers = dict(queue.get(timeout=120) for _ in processes)
    for process in processes:
        process.join(60)
    return [answers[rank] for rank in range(RANKS)]


def _rank(rank: int, folder: str, queue: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    pairs, whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "inside")), init_device_mesh("cpu", (RANKS,))
    meshes = {2: pairs["inside"], RANKS: whole}
    means = {"reshard": partial(_cut, reshard=True), "keep": partial(_cut, reshard=False), "zero": _whole}
    queue.put((rank, {ranks: {name: of(mesh) for name, of in means.items()} for ranks, mesh in meshes.items()}))
    dist.barrier()
    dist.destroy_process_group()


def _cut(mesh: Any, *, reshard: bool) -> dict[str, int]:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    sharded = fully_shard(model(), mesh=mesh, reshard_after_forward=reshard)
    optimizer = torch.optim.AdamW(sharded.parameters())
    total = sharded(torch.ones(2, 6)).sum()
    whole = sum(each.numel() for each in sharded.parameters() if not isinstance(each, DTensor))
    total.backward()
    optimizer.step()
    return {
        "whole between": whole,
        "stored": sum(_local(each).untyped_storage().nbytes() // 4 for each in sharded.parameters()),
        "gradients": sum(_local(each.grad).numel() for each in sharded.parameters()),
        "moments": sum(_local(state["exp_avg"]).numel() for state in optimizer.state.values()),
    }


def _local(tensor: torch.Tensor | None) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    assert isinstance(tensor, DTensor)
    return tensor.to_local()


def _whole(mesh: Any) -> dict[str, int]:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # which warns where it is imported
    from torch.nn.parallel import DistributedDataParallel

    replica = DistributedDataParallel(model(), process_group=mesh.get_group())
    optimizer = ZeroRedundancyOptimizer(replica.parameters(), torch.optim.AdamW, process_group=mesh.get_group())
    replica(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    return {
        "stored": sum(each.untyped_storage().nbytes() // 4 for each in replica.parameters()),
        "moments": sum(state["exp_avg"].numel() for state in optimizer.optim.state.values()),
    }
