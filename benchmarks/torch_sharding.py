"""Why sharded state and shards are not on torch's own classes: what these keep, when they reduce, what they take.

    python benchmarks/torch_sharding.py         # prints the tables of docs/benchmarks/runs.md; seconds

*State*: two processes on gloo, four linear layers under ``fully_shard``, and ``ZeroRedundancyOptimizer`` on a table and
a linear layer; bytes and elements are counted. *Operators*: one process with one thread, two devices of which the other
sends nothing (torch's ``fake`` backend, and a device of :class:`~pipeplan.runtime.parallel.sharding.Shards` alone), so
that what is left is the work of classes; medians of processor time.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from beside import told_by
from tables import machine, markdown
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from pipeplan.runtime.launch.job import RankContext
from pipeplan.runtime.parallel.sharding import Shards
from pipeplan.runtime.parallel.weight_grads import WeightGradQueue, defer_weight_gradients

WIDTH, LAYERS = 256, 4


# State ------------------------------------------------------------------------------------------------------------


def counted(job: Mapping[str, Any], context: RankContext) -> dict[str, Any]:
    """What the classes keep and do, of this rank, and of all for the optimizer."""
    before = live_bytes()
    modules = [defer_weight_gradients(nn.Linear(WIDTH, WIDTH, bias=False)) for _ in range(LAYERS)]
    whole = live_bytes() - before
    mesh = init_device_mesh("cpu", (2,))
    for module in modules:
        fully_shard(module, mesh=mesh, reshard_after_forward=False)  # whole during the program, as in levels 1 and 2
    x = torch.ones(1, WIDTH, requires_grad=True)
    with torch.no_grad():
        for module in modules:
            module(x)
    held = live_bytes() - before - x.nbytes
    reduced = reductions_of_split_backward(modules, x)
    return {"held": held / whole, **reduced, "elements": elements_of_ranks()}


def live_bytes() -> int:
    """Of all tensors that there are, each storage once."""
    gc.collect()
    with torch.no_grad():
        tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor) and type(each) is not DTensor]
        storages = [each.untyped_storage() for each in tensors]
    return sum({each.data_ptr(): each.nbytes() for each in storages if each.nbytes()}.values())


def reductions_of_split_backward(modules: list[nn.Module], x: Tensor) -> dict[str, int]:
    """Gradients that are reduced by a backward that leaves weights to W, then by W, and that there are at the end."""
    begun: list[int] = []
    reduce = dist.reduce_scatter_tensor

    def noted(*given: Any, **named: Any) -> Any:
        begun.append(1)
        return reduce(*given, **named)

    queue = WeightGradQueue()
    with patch("torch.distributed.reduce_scatter_tensor", noted):
        made: Any = x
        for module in modules:
            made = module(made)
        with queue:
            made.sum().backward()
        waiting, by_backward = len(queue), len(begun)
        queue.run()
    ready = sum(
        each.grad is not None for module in modules for each in module.parameters() if isinstance(each, DTensor)
    )
    return {"waiting": waiting, "by backward": by_backward, "by W": len(begun) - by_backward, "ready": ready}


def elements_of_ranks() -> list[int]:
    """[rank] the elements that it updates of a table of 1,000 x 256 and a linear layer."""
    parameters = [*nn.Embedding(1000, WIDTH).parameters(), *nn.Linear(WIDTH, WIDTH).parameters()]
    optimizer: Any = ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1)
    return [
        sum(each.numel() for group in rank for each in group["params"]) for rank in optimizer._partition_parameters()
    ]


# Operators --------------------------------------------------------------------------------------------------------


def microseconds(run: Callable[[], Any], leaf: Tensor, repeats: int) -> float:
    """Processor time of it and its backward."""
    found = []
    for number in range(2 * repeats):
        since = time.process_time_ns()
        run().sum().backward()
        found += [(time.process_time_ns() - since) / 1e3] * (number >= repeats)
        leaf.grad = None
    return statistics.median(found)


def operators(repeats: int) -> list[list[str]]:
    """A linear layer of 16 x 16 split by columns, a gather and an exchange of [4, 16, 8] numbers."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh, shards = init_device_mesh("cpu", (2,)), Shards(2, 0)
    samples, weight = torch.ones(4, 16), torch.ones(16, 16)
    part = torch.ones(4, 16, 8, requires_grad=True)
    local_x, local_weight = samples.clone().requires_grad_(), weight[:8].clone().requires_grad_()
    x: Any = distribute_tensor(samples, mesh, [Replicate()]).requires_grad_()
    split = distribute_tensor(weight, mesh, [Shard(0)]).requires_grad_()
    theirs: Any = DTensor.from_local(part.detach(), mesh, [Shard(2)], run_check=False).requires_grad_()
    functional: Any = nn.functional.linear
    cases: dict[str, tuple[Callable[[], Tensor], Tensor, Callable[[], Tensor], Tensor]] = {
        "linear layer, split": (
            lambda: functional(shards.shared(local_x), local_weight),
            local_x,
            lambda: functional(x, split).to_local(),
            x,
        ),
        "gather": (
            lambda: shards.gathered(part),
            part,
            lambda: theirs.redistribute(mesh, [Replicate()]).to_local(),
            theirs,
        ),
        "exchange": (
            lambda: shards.exchanged(part, taken=1, given=2),
            part,
            lambda: theirs.redistribute(mesh, [Shard(1)]).to_local(),
            theirs,
        ),
    }
    rows = []
    for name, (ours, own, other, leaf) in cases.items():
        found = microseconds(ours, own, repeats), microseconds(other, leaf, repeats)
        rows.append([name, *(f"{each:.0f}" for each in found), f"{found[0] / found[1]:.2f}"])
    dist.destroy_process_group()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=300)
    given = parser.parse_args()
    told = told_by("torch_sharding:counted", {})
    rows = [
        ["`fully_shard`", "held of parameters while they are whole, in their own bytes", f"{told['held']:.2f}"],
        ["`fully_shard`", "weight gradients that wait for W", str(told["waiting"])],
        ["`fully_shard`", "reductions begun by the backward, by W", f"{told['by backward']}, {told['by W']}"],
        ["`fully_shard`", "gradients that ranks have of their rows in the end", str(told["ready"])],
        ["`ZeroRedundancyOptimizer`", "elements that each rank updates", ", ".join(map(str, told["elements"]))],
    ]
    print(markdown(["class", "what", "found"], rows))
    print("\n" + markdown(["forward and backward", "pipeplan, us", "DTensor, us", "ratio"], operators(given.repeats)))
    print(f"\n{machine()}, torch {torch.__version__}.")


if __name__ == "__main__":
    main()
