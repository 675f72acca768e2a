"""Layers per stage as one line, for servers that take such a list, and where each module is, as a ``device_map``."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from pipeplan.catalog import ExportTarget
from pipeplan.errors import UsageError
from pipeplan.files import Plan
from pipeplan.interop.layers import PlanLayers
from pipeplan.texts import of_json


def layer_list(layers: PlanLayers, target: ExportTarget) -> str:
    """The line, such as ``VLLM_PP_LAYER_PARTITION=6,6,6,6``."""
    assert target.layer_list is not None
    counts = target.separator.join(str(stage.count) for stage in layers.stages)
    return target.layer_list.format(counts) + "\n"


def read_layer_list(text: str) -> list[int]:
    """The numbers of such a line, or of the numbers alone. Raises UsageError."""
    found = re.fullmatch(r"(?:[A-Za-z_]+=)?\[?(\d{1,7}(?:, ?\d{1,7})*),?\]?", text.strip())
    if found is None:
        raise UsageError(f"{text.strip()[:80]!r} is not a list of layers; write numbers with commas, as in 6,6,6,6")
    return [int(number) for number in found[1].split(",")]


def device_map(plan: Plan, names: Sequence[Sequence[str]]) -> str:
    """Module -> device, as JSON; ``names`` are each stage's modules. Raises UsageError."""
    for number, stage in enumerate(plan.stages):
        if stage.shards * stage.context * stage.expert > 1:
            raise UsageError(
                f"stages[{number}] splits its blocks over {len(plan.group_of(stage))} devices; a device_map has one "
                "device for each module: search with --tp 1 --cp 1 --ep 1"
            )
    return json.dumps(first_devices(plan, names), indent=2) + "\n"


def first_devices(plan: Plan, names: Sequence[Sequence[str]]) -> dict[str, int]:
    """Module -> the first device of its stage."""
    firsts = [plan.group_of(stage)[0] for stage in plan.stages]
    return {name: device for own, device in zip(names, firsts, strict=True) for name in own}


def read_device_map(text: str) -> dict[str, int]:
    """The device of each module. Raises UsageError."""
    try:
        placed = of_json(text)
    except ValueError as error:
        raise UsageError(f"a device_map is JSON, and this is not: {error}") from None
    if not isinstance(placed, dict) or not all(type(device) is int for device in placed.values()):
        raise UsageError("a device_map has a number of a device for each module")
    return placed
