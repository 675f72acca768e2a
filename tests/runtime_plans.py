"""Plans for models that run, made without a planner, and the same training without a plan.

Times in these plans are made up; orders are greedy, so that micro-batches interleave.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from helpers import Orders, plan_of
from torch import nn

from pipeplan.costs import build_workload
from pipeplan.model import Block, CostRow, Edge, PlacedStage, Placement, Plan, Profile, Source
from pipeplan.model.workload import Workload
from pipeplan.runtime.model import Model

PLACEMENTS = {
    "one-to-one": [0, 1, 2, 3],
    "circular": [0, 1, 2, 3, 0, 1, 2, 3],
    "v-shape": [0, 1, 2, 3, 3, 2, 1, 0],
}
"""Device of each stage on 4 devices."""


def profile_of(model: Model) -> Profile:
    """Blocks and edges of a model with made-up costs."""
    row = CostRow(microbatch_size=1, forward_ns=1000, input_grad_ns=1100, weight_grad_ns=900, activation_bytes=64)
    rows = tuple(row.model_copy(update={"microbatch_size": size}) for size in (1, 2, 4))
    rows += tuple(row.model_copy(update={"recompute": True}) for row in rows)
    return Profile(
        name=model.name,
        source=Source(method="estimated"),
        blocks=tuple(Block(id=block.id, operator=block.operator, costs=rows) for block in model.blocks),
        edges=tuple(Edge(source=s, target=t, bytes_per_sample=64, transfer_ns=100) for s, t in model.edges),
    )


def model_plan(
    model: Model,
    devices: Sequence[int],
    *,
    num_microbatches: int = 6,
    microbatch_size: int = 2,
    split: bool = False,
    recompute: bool = False,
    cuts: Sequence[Sequence[str]] | None = None,
    full_names: bool = False,
    orders: Callable[[Workload], Orders] | None = None,
) -> Plan:
    """A plan with stage s on ``devices[s]``; ``cuts`` [stage] are its blocks, else the model is cut evenly."""
    ids = [block.id for block in model.blocks]
    bounds = [round(stage * len(ids) / len(devices)) for stage in range(len(devices) + 1)]
    groups = cuts or [ids[begin:end] for begin, end in zip(bounds, bounds[1:], strict=False)]
    placement = Placement(
        strategy="by-hand",
        num_devices=max(devices) + 1,
        stages=tuple(
            PlacedStage(blocks=tuple(blocks), devices=(device,)) for blocks, device in zip(groups, devices, strict=True)
        ),
    )
    workload = build_workload(
        profile_of(model),
        placement,
        num_microbatches=num_microbatches,
        microbatch_size=microbatch_size,
        split_backward=split,
        recompute=recompute,
    )
    return plan_of(workload, (orders or greedy_orders)(workload), full_names=full_names)


def greedy_orders(workload: Workload) -> Orders:
    """Every device takes, of what can start, backward first, then forward, then weight gradients."""
    operations = {operation.id: operation for operation in workload.operations}
    waiting = {(id_, m) for id_ in operations for m in range(workload.num_microbatches)}
    ends: dict[tuple[str, int], int] = {}
    free = [0] * len(workload.devices)
    orders: Orders = [[] for _ in workload.devices]
    while waiting:
        choices = []
        for id_, m in waiting:
            needed = [(d.source, m, d.lag_ns) for d in workload.dependencies if d.target == id_]
            if all((source, m) in ends for source, m, _ in needed):
                device = workload.stages[operations[id_].stage].devices[0]
                start = max([free[device], *(ends[source, m] + lag for source, m, lag in needed)])
                choices.append((start, "BIFW".index(id_[-1]), m, -operations[id_].stage, id_, device))
        start, _, m, _, id_, device = min(choices)
        waiting.remove((id_, m))
        ends[id_, m] = free[device] = start + operations[id_].duration_ns
        orders[device].append((id_, m))
    return orders


class Unsplit:
    """Training without a plan: all blocks in one process, the whole mini-batch at once, torch's own backward."""

    def __init__(self, model: Model, seed: int, dtype: torch.dtype, learning_rate: float, weight_decay: float) -> None:
        self.model, self.seed = model, seed
        self.modules = {block.id: model.build(block.id, seed, dtype=dtype) for block in model.blocks}
        for (first, first_name), *others in model.tied:
            for block, name in others:
                path, _, leaf = name.rpartition(".")
                shared = self.modules[first].get_parameter(first_name)
                setattr(self.modules[block].get_submodule(path), leaf, shared)
        unique = list(dict.fromkeys(self.parameters().values()))
        self.optimizer = torch.optim.AdamW(unique, lr=learning_rate, weight_decay=weight_decay)

    def parameters(self) -> dict[str, nn.Parameter]:
        """As ``block.name``; tied ones under each of their names."""
        return {
            f"{block}.{name}": parameter
            for block, module in self.modules.items()
            for name, parameter in module.named_parameters(remove_duplicate=False)
        }

    def step(self, step: int, num_samples: int) -> float:
        """Forward, backward and update on one mini-batch; its mean loss."""
        batch = self.model.batch(num_samples, step, self.seed)
        values: dict[str, torch.Tensor] = {}
        losses = []
        for block in self.model.blocks:
            inputs = [values[source] for source in block.sources] + [batch[name] for name in block.samples]
            values[block.id] = self.modules[block.id](*inputs)
            if block.loss:
                losses.append(values[block.id])
        self.optimizer.zero_grad()
        loss = torch.stack(losses).sum() / self.model.predictions(batch)
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())
