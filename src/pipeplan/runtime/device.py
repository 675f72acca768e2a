"""The device of a rank."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from pipeplan.errors import UsageError

__all__ = ["rank_device"]


def rank_device(device: str, transport: str, num_threads: int = 0) -> torch.device:
    """The rank's device; on CUDA the ranks of a machine take its devices in turn.

    Args:
        device: ``cpu`` or ``cuda``.
        transport: the torch.distributed backend that carries tensors, ``gloo`` or ``nccl``.
        num_threads: for operators on the CPU, 0 to leave it as it is.

    Raises:
        UsageError: the device and the transport do not go together, or there are too few devices here.
    """
    if num_threads:
        torch.set_num_threads(num_threads)
    if device == "cpu":
        if transport == "nccl":
            raise UsageError("--backend nccl carries CUDA tensors; give --device cuda, or --backend gloo")
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds no CUDA device here; give --device cpu")
    count, rank = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", dist.get_rank()))
    if transport == "nccl" and int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())) > count:
        raise UsageError(f"NCCL needs a CUDA device per rank, and there are {count}; give --backend gloo to share them")
    found = torch.device("cuda", rank % count)
    torch.cuda.set_device(found)
    return found
