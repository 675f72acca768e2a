"""What a stage takes for each of its blocks beside what a measured profile's rows say.

    python benchmarks/launch_overhead.py          # prints the table of docs/benchmarks/runs.md; takes seconds

Blocks multiply eight numbers by eight others, so that nearly all of their time is launching. They run one by one, as
``profile`` measures rows, and as one stage of the executor; turns alternate. Medians, one thread.
"""

from __future__ import annotations

import time
from statistics import median

import torch
from tables import machine, markdown
from torch import Tensor, nn

from pipeplan.runtime.executor.rank_program import StagePart
from pipeplan.runtime.executor.stage import MiniBatch, StageRunner
from pipeplan.runtime.models.spec import BlockSpec
from pipeplan.runtime.profiling.benches import Bench, RowKey

LENGTHS = (1, 4, 16, 64)
WARMUP, TURNS = 50, 400
WIDTH = 8


class Product(nn.Module):
    """As little as a block with a parameter can do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def stage_of(modules: dict[str, nn.Module]) -> StageRunner:
    """A chain of blocks between two other stages."""
    blocks = tuple(modules)
    sources = dict(zip(blocks, ("before", *blocks), strict=False))
    specs = {id_: BlockSpec(id_, "product", nn.Identity, sources=((sources[id_], 0),)) for id_ in blocks}
    part = StagePart(
        *(1, blocks, (False,) * len(blocks), False),
        *({0: ("before",)}, {2: (blocks[-1],)}, frozenset({0}), frozenset({2})),
    )
    return StageRunner(part, modules, specs)


def measured(length: int) -> list[str]:
    """Microseconds of F and of B for each block: of the stage, and of the row."""
    modules: dict[str, nn.Module] = {f"b{number}": Product() for number in range(length)}
    stage, last = stage_of(modules), f"b{length - 1}"
    x, gradient, samples = torch.randn(1, WIDTH), torch.ones(1, WIDTH), MiniBatch({}, 1.0)
    cpu = torch.device("cpu")
    bench = Bench(RowKey("b0", 1), modules["b0"], (x,), (True,), (), ((0, gradient),), cpu)
    forwards, backwards = [], []
    for turn in range(WARMUP + TURNS):
        bench.time(keep=turn >= WARMUP)
        began = time.perf_counter_ns()
        stage.forward((0,), {"before": x}, samples)
        between = time.perf_counter_ns()
        stage.backward(0, {(0,): [(last, gradient)]})
        if turn >= WARMUP:
            forwards.append(between - began)
            backwards.append(time.perf_counter_ns() - between)
    own = [median(each) / length for each in (forwards, backwards)]
    rows = [bench.median("forward_ns"), bench.median("backward_ns")]
    return [str(length), *(f"{ns / 1e3:.1f}" for ns in (own[0], rows[0], own[1], rows[1], sum(own) - sum(rows)))]


def main() -> None:
    torch.set_num_threads(1)
    heads = ["blocks in a stage", "F of a block, us", "its row", "B of a block", "its row", "both, beside rows"]
    print(markdown(heads, [measured(length) for length in LENGTHS]))
    print(f"\n{machine()}; torch {torch.__version__}")


if __name__ == "__main__":
    main()
