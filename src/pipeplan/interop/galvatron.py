"""Galvatron's configuration: sizes, and a value for each layer, as lists with commas in JSON."""

from __future__ import annotations

import json
from typing import Any

from pipeplan.catalog import ExportTarget
from pipeplan.errors import UsageError
from pipeplan.files import Plan
from pipeplan.interop.layers import PlanLayers, require_again
from pipeplan.interop.megatron import order as order_1f1b
from pipeplan.interop.ranks import order_of, require_state
from pipeplan.interop.settings import divides_sequence

_SHARED = {0: "ddp", 2: "zero2", 3: "zero3"}
"""By ZeRO level, what all layers divide among replicas."""

_TYPES = {"1F1B": "pipedream_flush", "GPipe": "gpipe"}


def configuration(plan: Plan, layers: PlanLayers, target: ExportTarget) -> dict[str, Any]:
    """What ``galvatron_config_*.json`` has.

    Raises:
        UsageError: the plan has what no value says; the text has the place.
    """
    stage, count = plan.stages[0], layers.count
    require_state(plan, target)
    by_stage = require_again(plan, target)
    divided = int(divides_sequence(plan) and stage.shards > 1)
    return {
        "pp_deg": len(layers.groups),
        "tp_sizes_enc": _each(stage.shards, count),
        "tp_consecutive_flags": _each(1, count),
        "cp_sizes_enc": _each(stage.context, count),
        "dp_types_enc": _each(0, count),
        "use_sp": _each(divided, count),
        "checkpoint": ",".join(str(int(bool(each))) for own in by_stage for each in own),
        "global_bsz": plan.mini_batch,
        "chunks": plan.num_microbatches,
        "pp_division": ",".join(str(each.count) for each in layers.stages),
        "pipeline_type": _TYPES[order_name(plan, layers, target)],
        "default_dp_type": _SHARED[stage.zero],
        "vtp": stage.shards,
        "vsp": divided,
        "embed_sdp": int(stage.zero == 3),
    }


def _each(value: int, count: int) -> str:
    return ",".join([str(value)] * count)


def order_name(plan: Plan, layers: PlanLayers, target: ExportTarget) -> str:
    """Which of the two schedules the plan runs. Raises UsageError where it is neither."""
    count = plan.num_microbatches
    found = [[(a.kind, a.stage, a.microbatch) for a in order_of(plan, devices, target)] for devices in layers.groups]
    flushed = [[(kind, rank, m) for kind in "FB" for m in range(count)] for rank in range(len(found))]
    if found == flushed:
        return "GPipe"
    for rank, own in enumerate(found):
        order = [*order_1f1b(len(found), 1, count, count, rank)]
        if own != order:
            index = next((n for n, pair in enumerate(zip(own, order, strict=False)) if pair[0] != pair[1]), len(own))
            raise UsageError(
                f"programs[{layers.groups[rank][0]}]: its compute action {index} is none of 1F1B's, nor are all orders "
                f"GPipe's, and {target.title} runs these; search with --scheduler 1f1b"
            )
    return "1F1B"


def configuration_text(found: dict[str, Any]) -> str:
    """The file's text."""
    return json.dumps(found, indent=4) + "\n"
