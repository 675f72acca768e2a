"""Causal attention of two devices that share sequences: pipeplan's two ways beside torch's ``context_parallel``.

    python benchmarks/context_parallel.py            # prints the tables of docs/benchmarks/runs.md; six minutes
    python benchmarks/context_parallel.py --way ring --pairs 40 --sequence 2048

All give each device an early and a late piece. pipeplan gathers keys and values, or sends them around a ring beside the
attention; so does torch, by its ``allgather`` or ``alltoall`` rotation, each beside pipeplan's. ``context_parallel``
itself has no attention on a CPU: what it raises there is printed. So what it calls, ``_templated_ring_attention`` and
its backward, is given torch's attention for CPUs here. Forward and backward of the two take turns (``beside.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from beside import HEADER, NUM_RANKS, arguments, cells, in_turn, job_of, printed, told_by
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as of_torch

from pipeplan.runtime.executor.process_groups import RankGroup
from pipeplan.runtime.launch.job import RankContext
from pipeplan.runtime.parallel.context import Ring, own_pieces
from pipeplan.runtime.parallel.context_attention import causal_attention
from pipeplan.runtime.parallel.sharding import Shards

SEQUENCES, HEADS, SIZE = (256, 1024, 4096), 4, 64

WAYS: dict[str, Callable[[Shards], Shards]] = {"gathered": lambda place: place, "ring": Ring.of}
"""How pipeplan's devices have keys and values of all."""

ATEN = torch.ops.aten


class RingOfTorch(torch.autograd.Function):
    """torch's ring, with its attention for CPUs."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        op: Any = ATEN._scaled_dot_product_flash_attention_for_cpu
        made, sums = of_torch._templated_ring_attention(_everyone(), 2, op, query, key, value, is_causal=True)[:2]
        ctx.save_for_backward(query, key, value, made, sums)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        query, key, value, made, sums = ctx.saved_tensors
        op: Any = ATEN._scaled_dot_product_flash_attention_for_cpu_backward
        how: dict[str, Any] = {"dropout_p": 0.0, "is_causal": True}
        given = (gradients[0], "grad_out", query, key, value, made, sums)
        found = of_torch._templated_ring_attention_backward(_everyone(), 2, op, *given, **how)
        return found[0], found[1], found[2]


def _everyone() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def refused_by_torch(query: Tensor, length: int) -> str:
    """What the public function says on a CPU."""
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    try:
        with context_parallel(mesh, buffers=[torch.zeros(1, length)], buffer_seq_dims=[1]):
            F.scaled_dot_product_attention(query, query, query, is_causal=True)
    except Exception as error:  # whatever it raises is what is to be seen
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return "nothing: it runs"


def beside_torch(job: Mapping[str, Any], context: RankContext) -> dict[str, Any]:
    """How long forwards and backwards of both took, and how far what they make is apart."""
    length, place = job["length"], context.rank
    group = RankGroup(tuple(range(NUM_RANKS)), context.progress, dist.group.WORLD)
    shards = Shards(NUM_RANKS, place, group)
    draw = torch.Generator().manual_seed(0)
    whole = [torch.randn((1, HEADS, length, SIZE), generator=draw) for _ in range(4)]
    *own, gradient = (own_pieces(each, shards, 2) for each in whole)
    last: dict[str, list[Tensor]] = {}

    def step(name: str, attend: Callable[..., Tensor]) -> None:
        given = [each.clone().requires_grad_() for each in own]
        made = attend(*given)
        last[name] = [made.detach(), *torch.autograd.grad(made, given, gradient)]

    own_way = WAYS[job["way"]](shards)
    of_torch.set_rotate_method("alltoall" if job["way"] == "ring" else "allgather")
    steps = {
        "pipeplan": lambda: step("ours", lambda q, k, v: causal_attention(q, k, v, own_way)),
        "torch": lambda: step("theirs", RingOfTorch.apply),
    }
    found = in_turn(steps, job)
    pairs = zip(last["ours"], last["theirs"], strict=True)
    apart = max(float((a - b).abs().max()) for a, b in pairs)
    return found | {"apart": apart, "refused": refused_by_torch(own[0], length)}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--sequence", type=int, action="append")
    parser.add_argument("--way", choices=WAYS, action="append")
    given = parser.parse_args()
    rows, refused = [], ""
    for way in given.way or WAYS:
        for length in given.sequence or SEQUENCES:
            told = told_by("context_parallel:beside_torch", job_of(given, length=length, way=way))
            rows.append([way, str(length), *cells(told)])
            refused = told["refused"]
    printed(given, ["pipeplan's", "sequence", *HEADER], rows)
    print(f"\ncontext_parallel on a CPU: {refused}")


if __name__ == "__main__":
    main()
