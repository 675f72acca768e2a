"""Plans for models that run, made without a planner, and the same training without a plan.

Times in these plans are made up; orders are greedy, so that micro-batches interleave.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from builders.orders import Entry, Orders
from builders.plans import plan_of
from pipeplan.costs import build_workload, stage_costs
from pipeplan.costs.late_inputs import with_late_inputs
from pipeplan.files import Block, CostRow, Edge, PlacedStage, Placement, Plan, Profile, RingCosts, Source
from pipeplan.runtime.launch.job import RunOptions
from pipeplan.runtime.launch.local import watch_local
from pipeplan.runtime.models.spec import Model
from pipeplan.runtime.training.options import TrainOptions
from pipeplan.runtime.training.trainer import dtype_of
from pipeplan.schedule.rules import CustomOp, with_instructions
from pipeplan.workload.action import operation_of
from pipeplan.workload.workload import Workload
from references.replay import durations_of, waits_of
from runtime_support.known import look_over
from runtime_support.warm import warm_ranks

RANK = (sys.executable, "-m", "runtime_support.executor_rank")
TOLERANCE = 1e-9

TRAINING = TrainOptions(
    "gpt2-tiny",
    num_steps=2,
    dtype="float64",
    learning_rate=1e-2,
    weight_decay=0.1,
    seed=3,
    lr_schedule="cosine",
    warmup_steps=2,
    lr_steps=5,
    clip_norm=0.1,
)
"""How plans are trained beside an unsplit run: clipped AdamW steps, whose learning rate changes."""

RATES = [0.5, 1.0, 1.0, 0.75, 0.25]
"""What TRAINING multiplies the learning rate by, step by step: two of warmup, then half a cosine over three."""

Case = tuple[Plan, RunOptions]
Reports = dict[str, dict[int, Mapping[str, Any]]]
"""[case][rank] what a real process reports."""

PLACEMENTS = {
    "one-to-one": [0, 1, 2, 3],
    "circular": [0, 1, 2, 3, 0, 1, 2, 3],
    "v-shape": [0, 1, 2, 3, 3, 2, 1, 0],
}
"""Device of each stage on 4 devices."""


def profile_of(model: Model) -> Profile:
    """Blocks and edges of a model with made-up costs."""
    divides = model.divides_shards
    row = CostRow(microbatch_size=1, forward_ns=1000, input_grad_ns=1100, weight_grad_ns=900, activation_bytes=64)
    rows = tuple(row.model_copy(update={"microbatch_size": size}) for size in (1, 2, 4))
    rows += tuple(row.model_copy(update={"recompute": True}) for row in rows)

    def rows_of(block: str) -> tuple[CostRow, ...]:
        split = [{"shards": shards, "sequence_parallel": divides(block, shards)} for shards in (1, 2, 3, 4)]
        split += [{**split[shards - 1], "shards": shards, "context": 2} for shards in (1, 2) if model.in_context]
        split += [{**split[0], "context": 4}] if model.in_context else []
        split = [{**each, "ring": RingCosts()} if "context" in each else each for each in split]
        return tuple(row.model_copy(update=update) for row in rows for update in split)

    return Profile(
        name=model.name,
        source=Source(method="estimated"),
        blocks=tuple(Block(id=block.id, operator=block.operator, costs=rows_of(block.id)) for block in model.blocks),
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
    late: bool = False,
) -> Plan:
    """A plan with stage s on ``devices[s]``; ``cuts`` [stage] are its blocks, else the model is cut evenly."""
    ids = [block.id for block in model.blocks]
    bounds = [round(stage * len(ids) / len(devices)) for stage in range(len(devices) + 1)]
    groups = cuts or [ids[begin:end] for begin, end in zip(bounds, bounds[1:], strict=False)]
    stages = [PlacedStage(blocks=tuple(blocks), devices=(d,)) for blocks, d in zip(groups, devices, strict=True)]
    return placed_plan(
        model,
        stages,
        num_microbatches=num_microbatches,
        microbatch_size=microbatch_size,
        split=split,
        recompute=recompute,
        full_names=full_names,
        orders=orders,
        late=late,
    )


def split_stage(blocks: str, devices: tuple[int, ...], shards: int, *, context: int = 1, **others: Any) -> PlacedStage:
    """Blocks, with spaces between them, each split over that many devices; more devices are replicas.

    In ``context`` as many such groups share sequences.
    """
    parts, replicas = tuple(blocks.split()), len(devices) // (shards * context)
    return PlacedStage(blocks=parts, devices=devices, shards=shards, context=context, replicas=replicas, **others)


def placed_plan(
    model: Model,
    stages: Sequence[PlacedStage],
    *,
    num_microbatches: int = 6,
    microbatch_size: int = 2,
    num_routes: int = 1,
    split: bool = False,
    recompute: bool = False,
    full_names: bool = False,
    orders: Callable[[Workload], Orders] | None = None,
    instructions: Sequence[CustomOp] = (),
    profile: Profile | None = None,
    late: bool = False,
) -> Plan:
    """A plan with these stages; they may have micro-batch sizes, replicas, routes and parts of their own.

    Without a ``profile`` costs are made up, and parameters take nothing. ``late``: actions may wait inside.
    """
    placement = Placement(
        strategy="by-hand",
        num_devices=max(device for stage in stages for device in stage.devices) + 1,
        num_routes=num_routes,
        stages=tuple(stages),
    )
    profile = profile or profile_of(model)
    workload = build_workload(
        profile,
        placement,
        given={
            number: stage_costs(profile, each.blocks, microbatch_size)
            for number, each in enumerate(stages)
            if each.configurations
        },
        num_microbatches=num_microbatches,
        microbatch_size=microbatch_size,
        split_backward=split,
        recompute=recompute,
    )
    workload = with_late_inputs(profile, workload) if late else workload
    workload = with_instructions(workload, instructions)
    return plan_of(workload, (orders or greedy_orders)(workload), full_names=full_names)


def greedy_orders(workload: Workload) -> Orders:
    """Every device takes, of what can start, backward first, then forward, then weight gradients."""
    waits, durations = waits_of(workload), durations_of(workload)
    waiting = set(durations)
    ends: dict[Entry, int] = {}
    free = [0] * len(workload.devices)
    orders: Orders = [[] for _ in workload.devices]
    while waiting:
        choices = []
        for id_, number in waiting:
            needed = waits.get((id_, number), [])
            if all(other in ends for other, _ in needed):
                stage, kind = operation_of(id_)
                group = workload.stages[stage].devices
                start = max([free[device] for device in group] + [ends[other] + lag for other, lag in needed])
                choices.append((start, "BIFW".find(kind), number, -stage, id_, group))
        start, _, number, _, id_, group = min(choices)
        waiting.remove((id_, number))
        ends[id_, number] = start + durations[id_, number]
        for device in group:
            free[device] = ends[id_, number]
            orders[device].append((id_, number))
    return orders


class Unsplit:
    """Training without a plan: all blocks in one process, the whole mini-batch at once, torch's own backward."""

    def __init__(self, model: Model, options: TrainOptions) -> None:
        self.model, self.options, self.norm, self.num_steps = model, options, 0.0, 0
        self.dtype: torch.dtype = dtype_of(options)
        self.modules = {block.id: model.build(block.id, options.seed, dtype=self.dtype) for block in model.blocks}
        for (first, first_name), *others in model.tied:
            for block, name in others:
                path, _, leaf = name.rpartition(".")
                shared = self.modules[first].get_parameter(first_name)
                setattr(self.modules[block].get_submodule(path), leaf, shared)
        self.unique = list(dict.fromkeys(self.parameters().values()))
        self.optimizer = torch.optim.AdamW(self.unique, lr=options.learning_rate, weight_decay=options.weight_decay)

    def parameters(self) -> dict[str, nn.Parameter]:
        """As ``block.name``; tied ones under each of their names."""
        return {
            f"{block}.{name}": parameter
            for block, module in self.modules.items()
            for name, parameter in module.named_parameters(remove_duplicate=False)
        }

    def step(self, step: int, num_samples: int) -> float:
        """Forward, backward, clipping and update on one mini-batch; its mean loss."""
        loss, predictions = self._forward(step, num_samples)
        self.optimizer.zero_grad()
        loss = loss / predictions
        loss.backward()
        self.norm = float(nn.utils.clip_grad_norm_(self.unique, self.options.clip_norm or math.inf))
        rate = 1.0 if self.options.lr_schedule == "constant" else RATES[step]
        self.optimizer.param_groups[0]["lr"] = self.options.learning_rate * rate
        self.optimizer.step()
        self.num_steps = step + 1
        return float(loss.detach())

    def evaluated(self, step: int, num_samples: int) -> float:
        """The mean loss per prediction of a mini-batch, with all modules in evaluation mode."""
        training = [each for module in self.modules.values() for each in module.modules() if each.training]
        for each in training:
            each.training = False
        with torch.no_grad():
            loss, predictions = self._forward(step, num_samples)
        for each in training:
            each.training = True
        return float(loss) / predictions

    def _forward(self, step: int, num_samples: int) -> tuple[torch.Tensor, float]:
        """The summed loss of a mini-batch, and its predictions."""
        batch = self.model.mini_batch(num_samples, step, self.options.seed, dtype=self.dtype)
        values: dict[str, torch.Tensor] = {}
        losses = []
        for block in self.model.blocks:
            inputs = [values[source] for source in block.sources] + [batch[name] for name in block.samples]
            values[block.id] = self.modules[block.id](*inputs)
            if block.loss:
                losses.append(values[block.id])
        return torch.stack(losses).sum(), self.model.predictions(batch)


def four_devices(plan: Plan) -> Plan:
    """The same plan with devices that have nothing to do, so that all cases share one process group."""
    idle = 4 - len(plan.devices)
    memory = plan.predicted.memory + (plan.predicted.memory[0],) * idle
    return plan.model_copy(
        update={
            "devices": plan.devices + (plan.devices[0],) * idle,
            "programs": plan.programs + ((),) * idle,
            "predicted": plan.predicted.model_copy(update={"memory": memory}),
        }
    )


def reports_of(
    cases: Mapping[str, Case], work: str = "runtime_support.executor_rank:compare", command: Sequence[str] = RANK
) -> Reports:
    """What 4 real processes report of all cases, for which they are started once."""
    found: Reports = defaultdict(dict)

    def listen(rank: int, report: Mapping[str, Any]) -> None:
        found[report["name"]][rank] = report

    job = {
        name: {"plan": plan.model_dump_json(), "options": options.as_json()} for name, (plan, options) in cases.items()
    }
    with warm_ranks(look_over, [(case["plan"], case["options"]) for case in job.values()]):
        watch_local(work, [()] * 4, {"cases": job}, 60 * 10**9, listen, command)
    return found


def assert_as_unsplit(model: Model, options: TrainOptions, ranks: Mapping[int, Mapping[str, Any]]) -> None:
    """All ranks know the same losses, and nothing of any rank is farther than rounding from an unsplit run."""
    assert sorted(ranks) == [0, 1, 2, 3]
    for rank, report in ranks.items():
        assert report["losses"] == ranks[0]["losses"], f"rank {rank} knows other losses"
        for what, distance in report["distances"].items():
            assert distance < TOLERANCE, f"rank {rank}: {what} is {distance} off"
    compared = {parameter for report in ranks.values() for parameter in report["parameters"]}
    whole = {f"{block.id}.{p}" for block in model.blocks for p, _ in block.build().named_parameters()}
    assert compared == whole
    assert min(ranks[0]["norms"]) > (options.clip_norm or 0), "gradients are clipped"
    assert len(set(ranks[0]["losses"])) == options.num_steps
