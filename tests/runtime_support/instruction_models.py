"""Two towers with a loss that compares the outputs of several micro-batches, and instructions of our own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from builders.orders import Orders
from pipeplan.files import PlacedStage, Plan
from pipeplan.planning.request import SUBMODULES, Batch, Request
from pipeplan.planning.steps import search_plan
from pipeplan.runtime.executor.custom_ops import Context, register
from pipeplan.runtime.models.spec import BlockSpec, Model
from pipeplan.schedule.rules import CustomOp, Rules
from pipeplan.schedule.rules.engine import schedule_by_rules
from pipeplan.workload.task_graph import task_graph
from pipeplan.workload.workload import Workload
from runtime_support.models import WIDTH, Mix, loss_block, mix_block, vectors
from runtime_support.plans import placed_plan, profile_of

GROUP = 4
"""Samples that are compared with each other: two micro-batches."""


GATHERED = CustomOp("ALLGATHER", after=("image.*", "text.*"), before=("image_loss", "text_loss"), every=2)
"""What both towers made of two micro-batches, on the devices of both losses."""


LOSSES = {("loss",): (1,), ("image_loss",): (1,), ("text_loss",): (3,), ("join", "end"): (1, 3)}
"""Devices of the stages behind both towers."""


class Contrast(nn.Module):
    """The summed loss of finding, for each row of one tower, its partner among the other's rows of a group."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, own: Tensor, others: Tensor) -> Tensor:
        size = min(GROUP, len(own))
        logits = self.scale * own.view(-1, size, WIDTH) @ others.view(-1, size, WIDTH).transpose(1, 2)
        targets = torch.arange(size, device=own.device).repeat(len(own) // size)
        return F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum")


class Both(nn.Module):
    """The loss in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.there, self.back = Contrast(), Contrast()

    def forward(self, images: Tensor, texts: Tensor) -> Tensor:
        result: Tensor = self.there(images, texts) + self.back(texts, images)
        return result


def _towers() -> tuple[BlockSpec, ...]:
    return (
        BlockSpec("image.0", "mix", lambda: Mix(1), samples=("x",)),
        BlockSpec("image.1", "mix", lambda: Mix(1), sources=("image.0",)),
        BlockSpec("text.0", "mix", lambda: Mix(1), samples=("targets",)),
        BlockSpec("text.1", "mix", lambda: Mix(1), sources=("text.0",)),
    )


def _model(*losses: BlockSpec) -> Model:
    return Model("towers", (*_towers(), *losses), vectors, lambda batch: 2 * len(batch["x"]))


def one_loss() -> Model:
    """Both directions in one block, on one device."""
    return _model(BlockSpec("loss", "loss", Both, sources=("image.1", "text.1"), loss=True))


def two_losses() -> Model:
    """Each direction in a block of its own, at the end of its own tower."""
    return _model(
        BlockSpec("image_loss", "loss", Contrast, sources=("image.1", "text.1"), loss=True),
        BlockSpec("text_loss", "loss", Contrast, sources=("text.1", "image.1"), loss=True),
    )


def shared_loss() -> Model:
    """A block that mixes both towers and its loss, which both last devices split."""
    return _model(mix_block("join", ("image.1", "text.1")), loss_block("end", "join"))


def plan_by_rules(model: Model, rules: Rules) -> Plan:
    """Each tower on a device, with the rules' instructions, ordered by the rules."""

    def orders(workload: Workload) -> Orders:
        graph = task_graph(workload)
        ids = [workload.operations[x].id for x in graph.operation_of]
        numbers = [task - graph.offsets[x] for task, x in enumerate(graph.operation_of)]
        return [[(ids[task], numbers[task]) for task in order] for order in schedule_by_rules(graph, rules)]

    return towers_plan(model, rules.instructions, num_devices=2, orders=orders)


def searched_plan(model: Model, rules: Rules) -> Plan:
    """What a search with these rules, which place the towers on four devices, finds for losses of a group."""
    profile = profile_of(model)
    blocks = (
        each.model_copy(update={"costs": tuple(row for row in each.costs if row.shards == 1)})
        for each in profile.blocks
    )
    whole = profile.model_copy(update={"blocks": tuple(blocks)})  # the loss cannot be split
    request = Request(whole, 4, Batch(3, GROUP), SUBMODULES, scheduler="rules", rules=rules, split_backward=False)
    return search_plan(request).plan


def towers_plan(
    model: Model,
    instructions: Sequence[CustomOp],
    *,
    split: bool = False,
    replicas: int = 1,
    num_devices: int = 4,
    orders: Callable[[Workload], Orders] | None = None,
) -> Plan:
    """Images on devices 0 and 1, texts on 2 and 3; losses compare two micro-batches, behind the instructions.

    On two devices each tower has one of them.
    """
    towers = [("image.0", "image.1"), ("text.0", "text.1")]
    if replicas == 1:
        blocks = enumerate(towers[0] + towers[1])
        stages = [PlacedStage(blocks=(block,), devices=(d * num_devices // 4,)) for d, block in blocks]
    else:
        groups = zip(towers, ((0, 1), (2, 3)), strict=True)
        stages = [PlacedStage(blocks=blocks, devices=devices, replicas=2) for blocks, devices in groups]
    for loss, ends in LOSSES.items():
        if loss[0] in {block.id for block in model.blocks}:
            devices = tuple(d * num_devices // 4 for d in ends)
            stages.append(PlacedStage(blocks=loss, devices=devices, shards=len(devices), microbatch_size=GROUP))
    return placed_plan(
        model, stages, num_microbatches=4, microbatch_size=2, split=split, orders=orders, instructions=instructions
    )


def _turned(context: Context) -> dict[str, Tensor]:
    """TURN: the ranks tell each other what they have by hand, the second half of the samples first."""
    made = {}
    for block in sorted({part.block for part in context.parts}):
        pieces = []
        for part in reversed(context.sources(block, -1)):
            own = context.inputs[block] if part.rank == context.rank else context.empty(part)
            pieces.append((part, context.rank_group.broadcast(own * context.attributes["times"], part.rank)))
        made[block] = context.joined(block, pieces)
    return made


register("TURN", _turned)
