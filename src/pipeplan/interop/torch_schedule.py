"""Schedules in torch's words: a row of actions for each rank, and which modules its stages are.

The CSV is what ``_PipelineScheduleRuntime._load_csv(path, format="compute_only")`` of
``torch.distributed.pipelining`` reads: torch puts the messages between the actions in an order of its own.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from pipeplan.catalog import ExportTarget
from pipeplan.errors import UsageError
from pipeplan.files import Modules, Plan, StageModules
from pipeplan.interop.ranks import PlanRanks, order_of
from pipeplan.workload.action import Action
from pipeplan.workload.kinds import Role, role_of

MODULES_ENDING = ".modules.json"
"""What the file beside a schedule's has after its name."""

Order = tuple[Action, ...]
"""A rank's compute actions."""


def orders_of(plan: Plan, ranks: PlanRanks, target: ExportTarget) -> list[Order]:
    """[rank] what it runs, where messages go to the next stage and gradients back to the one before.

    Raises:
        UsageError: the plan has others, or actions that torch does not run; the text has the place.
    """
    _require_in_line(plan, target.title)
    return [tuple(order_of(plan, devices, target)) for devices in ranks.groups]


def _require_in_line(plan: Plan, title: str) -> None:
    """Every stage takes the output of the one before it, and of no other."""
    fed = {0}
    for number, each in enumerate(plan.dependencies):
        source, stage = each.source_stage, each.target_stage
        if source == stage or role_of(each.source_kind) is not Role.FORWARD:
            continue
        if each.has_parts:
            raise UsageError(
                f"dependencies[{number}]: {title} waits for all inputs before a stage; search with --late-inputs no"
            )
        if stage != source + 1:
            raise UsageError(
                f"dependencies[{number}] goes from stage {source} to stage {stage}: {title} hands a stage's output to "
                "the next one alone; search with --placement sequential"
            )
        fed.add(stage)
    if missing := [number for number in range(len(plan.stages)) if number not in fed]:
        raise UsageError(
            f"stages[{missing[0]}] takes nothing from stages[{missing[0] - 1}], and {title} runs stages one after "
            "another; search with --placement sequential"
        )


def csv_text(orders: Sequence[Order]) -> str:
    """A row for each rank."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(orders)
    return text.getvalue()


def read_csv(text: str) -> list[Order]:
    """[rank] the compute actions of a schedule's CSV, whose empty fields are steps in which a rank waits.

    Raises:
        UsageError: it has something else.
    """
    found: list[Order] = []
    try:
        rows = list(csv.reader(io.StringIO(text)))
    except csv.Error as error:
        raise UsageError(f"it is no CSV of a schedule: {error}") from None
    for rank, row in enumerate(rows):
        actions = []
        for index, field in enumerate(row):
            if not (entry := field.strip()):
                continue
            try:
                action = Action.parse(entry)
            except ValueError as error:
                raise UsageError(f"row {rank}, field {index}: {error}") from None
            if not action.is_compute:
                raise UsageError(
                    f"row {rank}, field {index} is {entry}: read a schedule of compute actions alone, as torch's "
                    'dump with format="compute_only" has it'
                )
            actions.append(action)
        found.append(tuple(actions))
    return found


def modules_of(plan: Plan, ranks: PlanRanks, names: Sequence[Sequence[str] | None]) -> Modules:
    """Which modules each stage is made of, whose ``names`` are given by stage, and who runs it."""
    stages = tuple(
        StageModules(
            rank=rank,
            devices=plan.group_of(stage),
            blocks=stage.blocks,
            modules=None if own is None else tuple(own),
            microbatch_size=stage.microbatch_size,
            shards=stage.shards,
            replicas=stage.replicas,
            context=stage.context,
            context_exchange=stage.context_exchange,
            expert=stage.expert,
            expert_shards=stage.expert_shards,
            zero=stage.zero,
            zero_group=stage.zero_group,
            recompute=stage.recompute,
        )
        for stage, rank, own in zip(plan.stages, ranks.ranks, names, strict=True)
    )
    return Modules(
        name=plan.name,
        placement=plan.placement,
        num_ranks=len(ranks.groups),
        num_microbatches=plan.num_microbatches,
        stages=stages,
    )
