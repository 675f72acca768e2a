"""Layers per stage as one line, for servers that take such a list, and where each module is, as a ``device_map``."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from pipeplan.catalog import ExportTarget
from pipeplan.errors import UsageError
from pipeplan.files import Plan
from pipeplan.interop.layers import PlanLayers


def layer_list(layers: PlanLayers, target: ExportTarget) -> str:
    """The line, such as ``VLLM_PP_LAYER_PARTITION=6,6,6,6``."""
    assert target.layer_list is not None
    counts = target.separator.join(str(stage.count) for stage in layers.stages)
    return target.layer_list.format(counts) + "\n"


def read_layer_list(text: str) -> list[int]:
    """The numbers of such a line, or of the numbers alone. Raises UsageError."""
    found = re.fullmatch(r"(?:[A-Za-z_]+=)?\[?(\d+(?:, ?\d+)*),?\]?", text.strip())
    if found is None:
        raise UsageError(f"{text.strip()[:80]!r} is no list of layers; write numbers with commas, as 6,6,6,6")
    return [int(number) for number in found[1].split(",")]


Names = tuple[tuple[str, ...], ...]
"""Modules of a model's beginning, of its layer N, and of its end; the last are one entry or more."""


def read_names(template: Sequence[str]) -> Names:
    """Modules by what they are: ``["model.embed_tokens", "model.layers.N", "model.norm", "lm_head"]``.

    The one with a component ``N`` is a layer; what stands before it is the model's beginning.

    Raises:
        UsageError: there is no such template.
    """
    layers = [index for index, name in enumerate(template) if "N" in name.split(".")]
    if len(layers) != 1 or not all(re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", name) for name in template):
        raise UsageError(
            f"--names {','.join(template)!r}: write modules with commas, one of them a layer with N for its number, as "
            "model.embed_tokens,model.layers.N,model.norm,lm_head"
        )
    at = layers[0]
    layer = r"\.".join(r"\d+" if part == "N" else part for part in template[at].split("."))
    for index, name in enumerate(template):
        if template.index(name) != index or re.fullmatch(layer, name):
            raise UsageError(f"--names {','.join(template)!r}: {name!r} is named twice; give every module once")
    return tuple(template[:at]), (template[at],), tuple(template[at + 1 :])


def device_map(plan: Plan, layers: PlanLayers, names: Names) -> str:
    """Module -> device, as JSON. Raises UsageError."""
    for number, stage in enumerate(plan.stages):
        if stage.shards * stage.context * stage.expert > 1:
            raise UsageError(
                f"stages[{number}] splits its blocks over {len(stage.devices)} devices; a device_map has one device "
                "for each module: search with --tp 1 --cp 1 --ep 1"
            )
    return json.dumps(dict(_modules(layers, names)), indent=2) + "\n"


def _modules(layers: PlanLayers, names: Names) -> list[tuple[str, int]]:
    """Each module and the first device of its rank; what no block says is with the layer beside it."""
    beginning, (layer,), end = names
    devices = [layers.groups[rank][0] for rank in layers.ranks]
    found = [(name, devices[0]) for name in beginning]
    for stage, device in zip(layers.stages, devices, strict=True):
        found += [(numbered(layer, stage.first + index), device) for index in range(stage.count)]
    return found + [(name, devices[-1]) for name in end]


def numbered(template: str, layer: int) -> str:
    """A module's name with its layer's number."""
    return ".".join(str(layer) if part == "N" else part for part in template.split("."))


def read_device_map(text: str, names: Names) -> list[tuple[list[int], int]]:
    """The layers on each device, in the order in which they run, and the device: neighbours on one are together."""
    placed: dict[str, int] = json.loads(text)
    found: list[tuple[list[int], int]] = []
    layer = 0
    while (name := numbered(names[1][0], layer)) in placed:
        if not found or found[-1][1] != placed[name]:
            found.append(([], placed[name]))
        found[-1][0].append(layer)
        layer += 1
    others = [*names[0], *names[2]]
    if set(placed) != {*others, *(numbered(names[1][0], each) for each in range(layer))}:
        raise UsageError("the device_map has modules that its names do not")
    return found
