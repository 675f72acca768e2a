"""One layer of a Hugging Face model on two devices: pipeplan's shares beside torch's ``parallelize_module``.

    python benchmarks/tensor_parallel.py            # prints the table of docs/benchmarks/runs.md; two minutes
    python benchmarks/tensor_parallel.py --pairs 40 --width 256

Two processes with one thread each, on gloo. Both have the same parts of the same weights by transformers' own plan,
take and give what is whole on both devices, and add up what they find with the same collectives: torch's modules take
one DTensor for query, key and value together (``PrepareModuleInput``), as torchtitan has it. Forward and backward of
the two take turns; a ratio is of two neighbours.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from tables import interval, machine, markdown
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

WIDTHS = {64: 33, 256: 127, 1024: 127}
"""Hidden size of a layer, and the length of its sequences: odd, so that what is between products stays whole."""

SAMPLES, WARMUP = 2, 3


def configuration(width: int) -> str:
    return (
        f"LlamaConfig(hidden_size={width}, num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=4, "
        f"intermediate_size={4 * width}, vocab_size=64)"
    )


def of_torch(layer: Any, plan: dict[str, str], rotary: nn.Module) -> Callable[[Tensor], Tensor]:
    """The layer as torch parallelizes it by the plan."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        parallelize_module,
    )

    styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    whole = Replicate()
    once = PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": whole}, desired_input_kwarg_layouts={"hidden_states": whole}
    )
    ways: dict[str, Any] = {pattern.removeprefix("layers.*."): styles[way]() for pattern, way in plan.items()}
    ways |= {"self_attn": once, "mlp": PrepareModuleInput(input_layouts=whole, desired_input_layouts=whole)}
    made = parallelize_module(layer, init_device_mesh("cpu", (2,)), ways)

    def run(x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])[None]
        found: Tensor = made(x, position_embeddings=rotary(x, places), position_ids=places)
        return found

    return run


def compared(rank: int, width: int, pairs: int, port: int, found: Any) -> None:
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(minutes=5))
    from pipeplan.runtime.executor.process_groups import RankGroup
    from pipeplan.runtime.launch.status import Progress
    from pipeplan.runtime.models.huggingface import load, load_configuration
    from pipeplan.runtime.parallel import Share
    from pipeplan.runtime.parallel.sharding import Shards, share_of

    text, sequence = configuration(width), WIDTHS[width]
    model = load_configuration(text, sequence=sequence, grain="layer")
    block = next(each for each in model.blocks if each.operator == "layer")
    assert block.split is not None
    share, group = Share(block.id, rank, (0, 1)), RankGroup((0, 1), Progress(_board(), rank), dist.group.WORLD)
    made = block.split.build(Shards(2, rank, group))
    ours = share_of(block.build(), made, lambda name: model.part_of(share, name))
    inner: Any = load(text, sequence=sequence).module.model
    theirs = of_torch(inner.model.layers[0], inner.config.base_model_tp_plan, inner.model.rotary_emb)
    x = torch.randn(SAMPLES, sequence, width, generator=torch.Generator().manual_seed(0))

    def step(run: Callable[[Tensor], Tensor]) -> tuple[float, Tensor, Tensor]:
        given = x.clone().requires_grad_()
        dist.barrier()
        begin = time.perf_counter()
        made = run(given)
        torch.autograd.backward(made, torch.ones_like(made))
        taken = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        assert given.grad is not None
        return float(taken), made.detach(), given.grad

    times: list[tuple[float, float]] = []
    for turn in range(WARMUP + pairs):
        both = [step(ours), step(theirs)] if turn % 2 else [step(theirs), step(ours)][::-1]
        if turn >= WARMUP:
            times.append((both[0][0], both[1][0]))
    apart = max(float((a - b).abs().max()) for a, b in zip(both[0][1:], both[1][1:], strict=True))
    if rank == 0:
        found.put((times, apart))
    dist.destroy_process_group()


def _board() -> Any:
    """Where a rank says what it waits for, which nobody reads here."""
    from pipeplan.runtime.launch.status import Board

    with tempfile.TemporaryFile() as file:
        file.truncate(Board.size(2))
        return Board(file.fileno(), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--width", type=int, action="append", choices=sorted(WIDTHS))
    given = parser.parse_args()
    rows = []
    for number, width in enumerate(given.width or WIDTHS):
        found = multiprocessing.get_context("spawn").SimpleQueue()
        spawn(compared, (width, given.pairs, 29531 + number, found), nprocs=2)  # type: ignore[no-untyped-call]  # torch has it without types
        times, apart = found.get()
        ratios = [ours / theirs for ours, theirs in times]
        low, high = interval(ratios)
        print(f"{width}: {median(ratios):.3f}", file=sys.stderr)
        milliseconds = [f"{1e3 * median(each):.2f}" for each in zip(*times, strict=True)]
        rows.append(
            [
                str(width),
                str(WIDTHS[width]),
                *milliseconds,
                f"{median(ratios):.3f}",
                f"{low:.3f} to {high:.3f}",
                f"{apart:.0e}",
            ]
        )
    heads = ["hidden", "sequence", "pipeplan, ms", "torch, ms", "median ratio", "95 %", "differ by"]
    print(markdown(heads, rows))
    print(f"\n{machine()}")


if __name__ == "__main__":
    main()
