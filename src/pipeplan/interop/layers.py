"""A plan's stages as whole layers of a model: what tools that place layers can be told.

Blocks say their layer by their names: ``layer3.ffn``, ``layers.3.attention``, ``model.h.3``. What stands before the
first layer is the model's beginning (embeddings), what stands after the last one its end (norm, head, loss).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipeplan.catalog import ExportTarget
from pipeplan.errors import UsageError
from pipeplan.files import Plan
from pipeplan.partition.strategies import STRATEGIES
from pipeplan.workload.elements import Again, Stage

_LAYER = re.compile(
    r"(?:(?P<within>.*?)\.)??(?P<word>layers?|blocks?|h)\.?(?P<number>0|[1-9]\d{0,6})(?:\.(?P<part>.+))?"
)


@dataclass(frozen=True, slots=True)
class StageLayers:
    """What a stage has: layers ``first`` to ``first + count - 1``, and whether the model's beginning and its end."""

    beginning: bool
    first: int
    count: int
    end: bool


@dataclass(frozen=True, slots=True)
class PlanLayers:
    """A model's layers by stage, [stage] the rank that runs it, and [rank] its devices."""

    stages: tuple[StageLayers, ...]
    ranks: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]

    @property
    def count(self) -> int:
        """Layers of the model."""
        return sum(stage.count for stage in self.stages)

    @property
    def chunks(self) -> int:
        """Stages of a rank, of which all have as many where a placement strategy made them."""
        return len(self.stages) // len(self.groups)


def layers_of(plan: Plan, target: ExportTarget) -> PlanLayers:
    """The layers of a plan that a target can place as the plan does.

    Raises:
        UsageError: it cannot; the text has the place in the plan.
    """
    _require_layers(plan, target.title)
    stages = tuple(_by_stage(plan, target.title))
    groups = tuple(dict.fromkeys(stage.devices for stage in plan.stages))
    found = PlanLayers(stages, tuple(groups.index(stage.devices) for stage in plan.stages), groups)
    _require_apart(plan, found, target.title)
    if target.placements is not None:
        _require_placed(found.ranks, target)
    _require_alike(plan.stages, target)
    return found


def again_of_layers(plan: Plan, title: str) -> list[list[Again]]:
    """[stage][layer] what is computed again of it.

    Raises:
        UsageError: of one layer's blocks not the same.
    """
    found: list[list[Again]] = []
    for number, stage in enumerate(plan.stages):
        layers: dict[str, Again] = {}
        for index, (block, again) in enumerate(zip(stage.blocks, stage.again, strict=True)):
            layer = _LAYER.fullmatch(block)
            if layer is not None and layers.setdefault(layer["number"], again) != again:
                raise UsageError(
                    f"stages[{number}].recompute[{index}], of {block!r}, differs from the rest of layer "
                    f"{layer['number']}; {title} recomputes whole layers: search with "
                    "--recompute all, selective or none"
                )
        found.append(list(layers.values()))
    return found


def _by_stage(plan: Plan, title: str) -> Iterator[StageLayers]:
    """Each stage's layers, numbers rising from 0. Raises UsageError."""
    next_layer, last = 0, len(plan.stages) - 1
    tower: tuple[str | None, str] | None = None
    ended = False
    for number, stage in enumerate(plan.stages):
        _require_blocks(number, stage, title)
        first, beginning = next_layer, False
        for index, block in enumerate(stage.blocks):
            where = f"stages[{number}].blocks[{index}] is {block!r}"
            found = _LAYER.fullmatch(block)
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
    if not any(_LAYER.fullmatch(block) for block in blocks):
        raise UsageError(
            f"no block of the plan says which layer it is of, as layer0.ffn or layers.0 would (the first is "
            f"{(blocks or ['none'])[0]!r}); {title} places layers"
        )


def _require_blocks(number: int, stage: Stage, title: str) -> None:
    """Refuse a stage that is none of layers alone. Raises UsageError."""
    where = f"stages[{number}]"
    if not stage.blocks:
        raise UsageError(f"{where} runs instructions, which {title} has not")
    if stage.route:
        raise UsageError(
            f"{where} is on route {stage.route}: {title} has one way through the stages; search with "
            "--placement one-to-one"
        )
    if stage.configurations:
        raise UsageError(f"{where}.configurations: {title} splits all blocks alike; search with --tp")


def _require_apart(plan: Plan, layers: PlanLayers, title: str) -> None:
    """Refuse ranks that share devices. Raises UsageError."""
    taken: dict[int, int] = {}
    for number, stage in enumerate(plan.stages):
        for device in stage.devices:
            other = taken.setdefault(device, layers.ranks[number])
            if other != layers.ranks[number]:
                raise UsageError(
                    f"stages[{number}] is on device {device}, where another stage is with other devices; {title} has "
                    "the same devices for all stages of a rank"
                )


def _require_placed(ranks: Sequence[int], target: ExportTarget) -> None:
    """Refuse what none of the target's placements has. Raises UsageError."""
    places = target.placements or ()
    positions = max(ranks) + 1
    chunks, rest = divmod(len(ranks), positions)
    for name in places:
        strategy = STRATEGIES[name]
        enough = chunks <= target.most_chunks.get(name, chunks) and (strategy.chunked or chunks == 1)
        if enough and not rest and strategy.positions(positions, chunks) == list(ranks):
            return
    in_turn = next((stage for stage, rank in enumerate(ranks) if rank != stage % positions), positions)
    number = positions if in_turn >= positions or places == ["one-to-one"] else in_turn
    number = min(number, len(ranks) - 1)
    raise UsageError(
        f"stages[{number}] is on rank {ranks[number]}, of ranks {','.join(map(str, ranks))}; {target.title} places "
        f"stages {' or '.join(places)}: search with --placement {places[-1]}"
    )


def _require_alike(stages: Sequence[Stage], target: ExportTarget) -> None:
    """Refuse stages that are split unlike the first. Raises UsageError."""
    keys = ["shards", "context", "expert", "replicas"]
    keys += ["zero", "zero_group", "microbatch_size"] if target.trains else []
    for number, stage in enumerate(stages):
        for key in keys:
            own, first = getattr(stage, key), getattr(stages[0], key)
            if own != first:
                raise UsageError(
                    f"stages[{number}].{key} is {own}, stages[0].{key} {first}; {target.title} has one for all stages"
                )
