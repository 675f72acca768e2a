"""A DeepSpeed ``PipelineModule`` that is cut where the plan is: its list of layers has no other way in."""

from __future__ import annotations

from itertools import accumulate

from pipeplan.interop.layers import PlanLayers

_TEXT = '''"""A plan's stages for DeepSpeed, written by pipeplan: use its class in place of PipelineModule."""

from deepspeed.pipe import PipelineModule

BEFORE, LAYERS, AFTER = {before}, {layers}, {after}
"""Entries of your list of layers: before the first layer (embedding), the layers, after the last (norm, head)."""

PARTS = {parts}
"""[stage] its first entry, and the end."""


class PlannedPipelineModule(PipelineModule):
    """A pipeline of {stages} stages, cut as the plan says whatever the method is."""

    def _partition_layers(self, method="uniform"):
        entries = len(self._layer_specs)
        if entries != PARTS[-1]:
            raise ValueError(
                f"the list of layers has {{entries}} entries, and the plan {{BEFORE}} + {{LAYERS}} + {{AFTER}}"
            )
        if self.num_stages != len(PARTS) - 1:
            raise ValueError(f"the plan is of {{len(PARTS) - 1}} stages, and num_stages is {{self.num_stages}}")
        stage = self._topo.get_coord(self.global_rank).pipe
        self.parts = PARTS
        self._set_bounds(start=PARTS[stage], stop=PARTS[stage + 1])
'''


def pipeline_module(layers: PlanLayers, before: int = 1, after: int = 1) -> str:
    """A module with the class; so many entries of the list of layers are ``before`` and ``after`` the layers."""
    parts = parts_of(layers, before, after)
    return _TEXT.format(before=before, layers=layers.count, after=after, parts=parts, stages=len(parts) - 1)


def parts_of(layers: PlanLayers, before: int = 1, after: int = 1) -> list[int]:
    """[stage] its first entry, and the end."""
    counts = [stage.count for stage in layers.stages]
    counts[0] += before
    counts[-1] += after
    return [0, *accumulate(counts)]
