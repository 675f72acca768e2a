"""What torch's own classes for sharded state and shards keep, when they reduce, and what they take.

    python benchmarks/torch_sharding.py         # prints the tables of docs/benchmarks/runs.md; two minutes

*State*: two processes on gloo; four linear layers, and a table with a head that share their weight, under
``fully_shard``; ``ZeroRedundancyOptimizer`` on a table and a linear layer; a chain of blocks under pipeplan. Bytes,
elements and reductions are counted. *Exchanges*: two processes on gloo, a step of ``sharded_overhead.py`` at level 3 by
pipeplan and by ``fully_shard``, as a program runs them and without: what is gathered and reduced, what runs meanwhile,
what is held, and how many operators run. Times of that are in ``sharded_overhead.py``. *Operators*: one process with
one thread, two devices of which the other sends nothing (torch's ``fake`` backend, and a device of
:class:`~pipeplan.runtime.parallel.sharding.Shards` alone), so that what is left is the work of classes; medians of
processor time.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from beside import TIMEOUT_NS, told_by
from executor_overhead import chain
from sharded_overhead import model_of, plan_of, reduce_grad, sides_of
from tables import machine, markdown
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from pipeplan.files import Plan, parse
from pipeplan.runtime.executor import process_groups
from pipeplan.runtime.launch.job import RankContext
from pipeplan.runtime.parallel.sharding import Shards
from pipeplan.runtime.parallel.weight_grads import WeightGradQueue, defer_weight_gradients
from pipeplan.runtime.training.options import TrainOptions
from pipeplan.runtime.training.trainer import Trainer

WIDTH, LAYERS = 256, 4
STEPS = 10
EXCHANGED = ["who", "width", "gathers, MB", "beside, products", "reductions, MB", "beside, products"]
EXCHANGED += ["MB held", "operators", "processor time, ms"]


# State ------------------------------------------------------------------------------------------------------------


def counted(job: Mapping[str, Any], context: RankContext) -> dict[str, Any]:
    """What the classes keep and do, of this rank, and of all for the optimizer."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    before = live_bytes()
    modules = [defer_weight_gradients(nn.Linear(WIDTH, WIDTH, bias=False).double()) for _ in range(LAYERS)]
    whole = live_bytes() - before
    plain = copy.deepcopy(modules)
    before = live_bytes() - whole
    sharded: list[Any] = modules
    for module in sharded:
        fully_shard(module, mesh=mesh, reshard_after_forward=False)  # whole during the program, as in levels 1 and 2
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    x = torch.full((1, WIDTH), 1.0 + context.rank, dtype=torch.float64)
    with torch.no_grad():
        through(modules, x)
    held = live_bytes() - before - x.nbytes
    return {
        "held": held / whole,
        "hooks": by_hooks(sharded, x),
        "program": by_program(sharded, x),
        "apart": apart(sharded, plain, context.rank),
        "ties": ties(mesh),
        "elements": elements_of_ranks(),
    }


def through(modules: Iterable[nn.Module], x: Any) -> Any:
    """What a chain makes."""
    for module in modules:
        x = module(x)
    return x


def live_bytes() -> int:
    """Of all tensors that there are, each storage once."""
    gc.collect()
    with torch.no_grad():
        tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor) and type(each) is not DTensor]
        storages = [each.untyped_storage() for each in tensors]
    return sum({each.data_ptr(): each.nbytes() for each in storages if each.nbytes()}.values())


def by_hooks(modules: Sequence[Any], x: Tensor) -> list[int]:
    """Reductions begun by a backward that leaves weights to W, by W, and gradients that there are then."""
    queue = WeightGradQueue()
    with reductions() as begun:
        with queue:
            through(modules, x.clone().requires_grad_()).sum().backward()
        back = len(begun)
        queue.run()
    found = [back, len(begun) - back, ready(modules)]
    for module in modules:  # what W has made belongs to no later step
        module.unshard()
        for each in module.parameters():
            each.grad = None
    return found


def by_program(modules: Sequence[Any], x: Tensor) -> list[int]:
    """Gradients that wait for W, reductions begun before REDUCE_GRAD and by it, and gradients that there are then."""
    queue = WeightGradQueue()
    for module in modules:
        module.set_requires_gradient_sync(False)
        module.set_reshard_after_backward(False)
        module.unshard(async_op=True)
    with reductions() as begun:
        with queue:
            through(modules, x.clone().requires_grad_()).square().sum().backward()
        waiting = len(queue)
        queue.run()
        early = len(begun)
        for module in reversed(modules):
            reduce_grad(module)
    for module in modules:
        module.reshard()
    return [waiting, early, len(begun) - early, ready(modules)]


@contextmanager
def reductions() -> Iterator[list[int]]:
    """One for each that ``fully_shard`` begins."""
    begun: list[int] = []
    reduce = dist.reduce_scatter_single

    def noted(*given: Any, **named: Any) -> Any:
        begun.append(1)
        return reduce(*given, **named)

    with patch("torch.distributed.reduce_scatter_single", noted):
        yield begun


def ready(modules: Iterable[nn.Module]) -> int:
    """Of how many parameters this rank's rows have a gradient."""
    each = [parameter for module in modules for parameter in module.parameters()]
    return sum(isinstance(parameter, DTensor) and parameter.grad is not None for parameter in each)


def apart(modules: Iterable[Any], plain: Sequence[Any], rank: int) -> float:
    """The largest difference of this rank's rows of a gradient from those of one process with all samples."""
    for number in range(2):
        through(plain, torch.full((1, WIDTH), 1.0 + number, dtype=torch.float64)).square().sum().backward()
    pairs = [(module.weight.grad._local_tensor, own.weight.grad) for module, own in zip(modules, plain, strict=True)]
    return max(float((found - whole.chunk(2)[rank]).abs().max()) for found, whole in pairs)


def ties(mesh: Any) -> list[int]:
    """Parameters that a table and a head with one weight have: as they are, wrapped one by one, and as a group."""

    def pair() -> list[Any]:
        table, head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
        head.weight = table.weight
        return [table, head]

    one_by_one, group = pair(), pair()
    for module in one_by_one:
        fully_shard(module, mesh=mesh)
    fully_shard(group, mesh=mesh)
    return [len({id(module.weight) for module in found}) for found in (pair(), one_by_one, group)]


def kept(job: Mapping[str, Any], context: RankContext) -> dict[str, float]:
    """What a rank of pipeplan holds of parameters while they are whole, in their own bytes."""
    model, plan = chain(WIDTH, 1, 1), parse(job["plan"], Plan)
    trainer = Trainer(plan, model, TrainOptions("chain", num_threads=1, timeout_ns=TIMEOUT_NS), context.progress)
    for unit in trainer.sharded.units:
        unit.unshard()
        unit.ready()
    parameters = [*trainer.parameters().values(), *(row.own for unit in trainer.sharded.units for row in unit.rows)]
    storages = [each.untyped_storage() for each in parameters]
    held = sum({each.data_ptr(): each.nbytes() for each in storages}.values())
    whole = sum(row.whole.nbytes for unit in trainer.sharded.units for row in unit.rows)
    trainer.close()
    return {"held": held / whole}


def elements_of_ranks() -> list[int]:
    """[rank] the elements that it updates of a table of 1,000 x 256 and a linear layer."""
    parameters = [*nn.Embedding(1000, WIDTH).parameters(), *nn.Linear(WIDTH, WIDTH).parameters()]
    optimizer: Any = ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1)
    return [
        sum(each.numel() for group in rank for each in group["params"]) for rank in optimizer._partition_parameters()
    ]


# Exchanges --------------------------------------------------------------------------------------------------------


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has it without types
    """How many operators have run, how many of them multiply matrices, and the most that the process had in use."""

    operators, products, most = 0, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.operators += 1
        self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        self.most = max(self.most, in_use())
        return found


class _Allocated(ctypes.Structure):
    """What glibc's ``mallinfo2`` gives."""

    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "used", "fordblks", "keepcost")
    _fields_ = [*zip(_names, (ctypes.c_size_t,) * len(_names), strict=True)]


MALLINFO = ctypes.CDLL(None).mallinfo2
MALLINFO.restype = _Allocated


def in_use() -> int:
    """Bytes that this process has of the C library, in which tensors of CPUs and buffers of gloo are."""
    found = MALLINFO()
    return int(found.used + found.hblkhd)


class Begun(dist.Work):
    """A collective under way: how many products run until somebody waits for it."""

    def __init__(self, work: dist.Work, counting: Counting, meanwhile: list[int]) -> None:
        super().__init__()
        self.work, self.counting, self.meanwhile = work, counting, meanwhile
        self.products: int | None = counting.products

    def wait(self, *given: Any) -> Any:
        if self.products is not None:
            self.meanwhile.append(self.counting.products - self.products)
            self.products = None
        return self.work.wait(*given)


def exchanges(job: Mapping[str, Any], context: RankContext) -> dict[str, Any]:
    """[side] of a step: bytes and products meanwhile of each gather and reduction, bytes held, operators."""
    trainer, _, steps = sides_of(job, context)
    found = {name: of_a_step(run) for name, run in steps.items()}
    trainer.close()
    return found


def of_a_step(run: Callable[[], None]) -> dict[str, Any]:
    """What one step exchanges, once two have run."""
    found: dict[str, Any] = {"gather": [], "reduce": []}
    meanwhile: dict[str, list[int]] = {"gather": [], "reduce": []}
    counting = Counting()  # type: ignore[no-untyped-call]  # torch has its base without types

    def noted(kind: str, function: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            tensors = [each for each in (*given, *named.values()) if isinstance(each, Tensor)]
            found[kind].append(tensors[1].nbytes)
            work = function(*given, **named)
            if work is None:
                meanwhile[kind].append(0)
                return None
            return Begun(work, counting, meanwhile[kind])

        return call

    begins = {"_all_gather": "gather", "_reduce_scatter": "reduce"}  # both sides call what this torch names so
    run()
    run()
    before = in_use()  # the last step's gradients are there, as they are on both sides
    with contextlib.ExitStack() as stack:
        for name, kind in begins.items():
            function = getattr(process_groups, name)
            for module, called in ((process_groups, name), (dist, function.__name__)):
                stack.enter_context(patch.object(module, called, noted(kind, function)))
        stack.enter_context(counting)
        run()
    since = time.thread_time_ns()
    for _ in range(STEPS):
        run()
    spent = (time.thread_time_ns() - since) / STEPS / 1e6
    held = counting.most - before
    return {**found, "meanwhile": meanwhile, "held": held, "operators": counting.operators, "spent": spent}


def rows_of_exchanges(width: int) -> list[list[str]]:
    """Of both sides, and of ``fully_shard`` as its hooks run it."""
    rows = []
    for driven in (True, False):
        how = {"model": "", "width": width, "length": 64, "layers": 2, "driven": driven, "level": 3}
        plan = plan_of(model_of(how), 3, 4, driven=driven)
        told = told_by("torch_sharding:exchanges", {"plan": plan.model_dump_json(), **how}, plan.programs)
        for side, each in told.items():
            name = "pipeplan" if side == "pipeplan" else "`fully_shard`"
            cells = [f"{name}, {'program' if driven else 'in actions' if side == 'pipeplan' else 'hooks'}", str(width)]
            for kind in ("gather", "reduce"):
                during = each["meanwhile"][kind]
                cells += [f"{len(each[kind])}, {sum(each[kind]) / 1e6:.2f}"]
                cells += [f"{sum(map(bool, during))}, {sum(during)}"]
            rows.append([*cells, f"{each['held'] / 1e6:.2f}", str(each["operators"]), f"{each['spent']:.1f}"])
    return rows


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


def held_by_pipeplan(level: int) -> float:
    """By a chain of blocks whose parameters two ranks divide."""
    plan = plan_of(chain(WIDTH, 1, 1), level, 1)
    held: float = told_by("torch_sharding:kept", {"plan": plan.model_dump_json()}, plan.programs)["held"]
    return held


def shown(numbers: Iterable[int]) -> str:
    """One after another."""
    return ", ".join(map(str, numbers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--what", default="state,exchanges,operators")
    given = parser.parse_args()
    what = given.what.split(",")
    if "state" in what:
        print(markdown(["class", "what", "found"], rows_of_state()))
    if "exchanges" in what:
        print("\n" + markdown(EXCHANGED, [row for width in (64, 256) for row in rows_of_exchanges(width)]))
    if "operators" in what:
        header = ["forward and backward", "pipeplan, us", "DTensor, us", "ratio"]
        print("\n" + markdown(header, operators(given.repeats)))
    print(f"\n{machine()}, torch {torch.__version__}.")


def rows_of_state() -> list[list[str]]:
    """What classes keep and when they reduce."""
    told = told_by("torch_sharding:counted", {})
    own = [held_by_pipeplan(level) for level in (1, 2, 3)]
    sharded = "`fully_shard`"
    return [
        [sharded, "held of parameters while they are whole, in their own bytes", f"{told['held']:.2f}"],
        ["pipeplan", "the same, ZeRO 1, 2, 3", ", ".join(f"{each:.2f}" for each in own)],
        [sharded, "split backward, hooks: reductions begun by I, by W; gradients in the end", shown(told["hooks"])],
        [
            sharded,
            "split backward, program: gradients that wait for W; reductions before REDUCE_GRAD, by it; gradients then",
            shown(told["program"]),
        ],
        [sharded, "the same: gradients differ from those of one process by", f"{told['apart']:.0e}"],
        [sharded, "parameters of two modules with one weight: plain, one by one, as a group", shown(told["ties"])],
        ["`ZeroRedundancyOptimizer`", "elements that each rank updates", shown(told["elements"])],
    ]


if __name__ == "__main__":
    main()
