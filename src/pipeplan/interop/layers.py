"""A plan's stages as whole layers of a model: what tools that place layers can be told.

Blocks say their layer by their names: ``layer3.ffn``, ``layers.3.attention``, ``model.h.3``. What stands before the
first layer is the model's beginning (embeddings), what stands after the last one its end (norm, head, loss).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipeplan.catalog import ExportTarget
from pipeplan.costs.layers import LAYER
from pipeplan.errors import UsageError
from pipeplan.files import Plan
from pipeplan.interop.ranks import PlanRanks, ranks_of, require_blocks
from pipeplan.workload.elements import Again


@dataclass(frozen=True, slots=True)
class StageLayers:
    """What a stage has: layers ``first`` to ``first + count - 1``, and whether the model's beginning and its end."""

    beginning: bool
    first: int
    count: int
    end: bool


@dataclass(frozen=True, slots=True)
class PlanLayers(PlanRanks):
    """A model's layers by stage, and the ranks that run them."""

    stages: tuple[StageLayers, ...]

    @property
    def count(self) -> int:
        """Layers of the model."""
        return sum(stage.count for stage in self.stages)


def layers_of(plan: Plan, target: ExportTarget) -> PlanLayers:
    """The layers of a plan that a target can place as the plan does.

    Raises:
        UsageError: it cannot; the text has the place in the plan.
    """
    _require_layers(plan, target.title)
    stages = tuple(_by_stage(plan, target.title))
    ranks = ranks_of(plan, target)
    return PlanLayers(ranks.ranks, ranks.groups, stages)


def again_of_layers(plan: Plan, title: str) -> list[list[Again]]:
    """[stage][layer] what is computed again of it.

    Raises:
        UsageError: of one layer's blocks not the same.
    """
    found: list[list[Again]] = []
    for number, stage in enumerate(plan.stages):
        layers: dict[str, Again] = {}
        for index, (block, again) in enumerate(zip(stage.blocks, stage.again, strict=True)):
            layer = LAYER.fullmatch(block)
            if layer is not None and layers.setdefault(layer["number"], again) != again:
                raise UsageError(
                    f"stages[{number}].recompute[{index}], of {block!r}, differs from the rest of layer "
                    f"{layer['number']}; {title} recomputes whole layers: search with "
                    "--recompute all, selective or none"
                )
        found.append(list(layers.values()))
    return found


def require_again(plan: Plan, target: ExportTarget) -> list[list[Again]]:
    """[stage][layer] what is computed again of it, where the target does so.

    Raises:
        UsageError: it does not; the text has the stage.
    """
    by_stage = again_of_layers(plan, target.title)
    if "selective" not in target.recompute:
        number = next((number for number, own in enumerate(by_stage) if "selective" in own), None)
        if number is not None:
            raise UsageError(
                f"stages[{number}].recompute is selective: {target.title} recomputes layers whole; search with "
                "--recompute all or none"
            )
    kinds = {again for layers in by_stage for again in layers}
    if len(kinds) > 1 and not target.by_layer:
        number = next(n for n, own in enumerate(by_stage) if {*own} != kinds or len({*own}) > 1)
        raise UsageError(
            f"stages[{number}].recompute: {target.title} recomputes all layers alike; search with --recompute all or "
            "none"
        )
    return by_stage


def _by_stage(plan: Plan, title: str) -> Iterator[StageLayers]:
    """Each stage's layers, numbers rising from 0. Raises UsageError."""
    next_layer, last = 0, len(plan.stages) - 1
    tower: tuple[str | None, str] | None = None
    ended = False
    for number, stage in enumerate(plan.stages):
        require_blocks(number, stage, title)
        first, beginning = next_layer, False
        for index, block in enumerate(stage.blocks):
            where = f"stages[{number}].blocks[{index}] is {block!r}"
            found = LAYER.fullmatch(block)
            if found is None:
                ended = ended or next_layer > 0
                beginning = beginning or not ended
                if number != (last if ended else 0):
                    part, stands = ("end", "last") if ended else ("beginning", "first")
                    raise UsageError(
                        f"{where}, of the model's {part}, which {title} has on its {stands} stage; place it there"
                    )
                continue
            if tower not in (None, (found["within"], found["word"])):
                raise UsageError(f"{where}, a layer of another part of the model; {title} places one row of layers")
            tower = (found["within"], found["word"])
            layer = int(found["number"])
            if ended or layer not in (next_layer - 1, next_layer):
                raise UsageError(f"{where} where layer {next_layer} comes next; {title} runs layers in their order")
            if layer == next_layer - 1 and next_layer == first:
                raise UsageError(
                    f"{where}, and layer {layer} begins in stages[{number - 1}]: {title} places whole layers; search "
                    "with a --placement file that cuts between layers, or profile with --granularity layer"
                )
            next_layer = layer + 1
        yield StageLayers(beginning, first, next_layer - first, ended)


def _require_layers(plan: Plan, title: str) -> None:
    """Refuse a plan that has none. Raises UsageError."""
    blocks = [block for stage in plan.stages for block in stage.blocks]
    if not any(LAYER.fullmatch(block) for block in blocks):
        raise UsageError(
            f"no block of the plan says which layer it is of, as layer0.ffn or layers.0 would (the first is "
            f"{(blocks or ['none'])[0]!r}); {title} places layers"
        )
