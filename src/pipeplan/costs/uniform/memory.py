"""Peak memory of a device in a uniform layout: training state, activations in flight, workspace."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeplan.costs.uniform.layer import WIDTH, head_of, layer_of, tokens_of
from pipeplan.costs.uniform.state import parameter_bytes
from pipeplan.costs.uniform.step import layers_of_stages
from pipeplan.costs.uniform.words import Machine, Number, Transformer, UniformLayout


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the device that needs most, in the first or the last stage."""

    state_bytes: Number
    activation_bytes: Number
    workspace_bytes: Number

    @property
    def peak_bytes(self) -> Number:
        """All of it."""
        return self.state_bytes + self.activation_bytes + self.workspace_bytes


def memory(model: Transformer, layout: UniformLayout, machine: Machine) -> Memory:
    """Closed forms of what a device holds at its peak."""
    layer, head = layer_of(model, layout, machine), head_of(model, layout, machine)
    whole = layer.whole
    middle, first, last = layers_of_stages(model, layout)
    alone = layout.pipeline == 1
    table = head.parameters
    embedding = np.where(alone, np.where(model.tied > 0, 0, table), table)
    dense = whole.parameters - layer.experts.parameters
    of_first = _state(layout, first * dense + embedding + table * (layout.schedule == "zb-v"))
    of_last = _state(layout, last * dense + table + embedding * alone)
    experts = _state(layout, middle * layer.experts.parameters, of_experts=True)

    entering = WIDTH * tokens_of(model, layout) * model.hidden
    entering = entering / np.where(layout.sequence_parallel > 0, layout.tensor, 1)
    kept = (
        (1 - layout.again_core) * layer.core.saved_bytes
        + (1 - layout.again_up) * layer.up.saved_bytes
        + (1 - layout.again_products) * (layer.products.saved_bytes + layer.experts.saved_bytes)
        + (1 - layout.again_elementwise) * layer.elementwise.saved_bytes
    )
    kept = np.maximum(kept, entering)
    # what one layer's recomputation brings back, and keys and values of others
    most = whole.saved_bytes - kept + layer.context.workspace_bytes
    gathered = np.where(layout.zero == 3, 2 * WIDTH * whole.parameters, 0)
    logits = 2 * head.saved_bytes * (model.vocabulary > 0)
    at_first = _at(of_first + experts, microbatches_in_flight(layout) * first * kept, most + gathered)
    inner = _at(
        _state(layout, middle * dense) + experts, microbatches_in_flight(layout, 1) * middle * kept, most + gathered
    )
    at_last = _at(of_last + experts, last * kept, np.maximum(most, logits) + gathered)
    there = (~np.asarray(alone), layout.pipeline > 2, True)
    parts = [
        [np.where(is_there, part, 0) for part in each]
        for is_there, each in zip(there, (at_first, inner, at_last), strict=True)
    ]
    stages = np.array([np.broadcast_arrays(*each, parts[0][0])[:3] for each in parts])
    worst = stages.sum(axis=1).argmax(axis=0)
    chosen = np.take_along_axis(stages, worst[None, None], axis=0)[0]
    return Memory(*chosen)


def _at(state: Number, held: Number, workspace: Number) -> tuple[Number, Number, Number]:
    return state, held, workspace


def microbatches_in_flight(layout: UniformLayout, stage: int = 0) -> Number:
    """Whole micro-batches whose activations a stage holds at once.

    1F1B: the stages' number; interleaved (p - 1) / (p v) more (Korthikanti et al., section 4.2.3); ZB-H2 2 p - 1
    (Zero Bubble Pipeline Parallelism, table 2).
    """
    stages, chunks = layout.pipeline, layout.chunks
    usual = np.where(layout.schedule == "zb-v", stages, stages * (1 + (stages - 1) / (stages * chunks) * (chunks > 1)))
    early = np.where(layout.schedule == "zb-2p", 2 * (stages - stage) - 1, usual - stage * (layout.schedule != "zb-v"))
    return np.minimum(layout.microbatches, np.maximum(early, 1))


def _state(layout: UniformLayout, parameters: Number, *, of_experts: bool = False) -> Number:
    """State of a number of parameters, with what the level shards divided."""
    shards = np.where(layout.zero > 0, layout.zero_group, 1)
    if of_experts:
        shards = np.clip(shards * layout.tensor / (layout.expert * layout.expert_tensor), 1, shards)
    each, level = parameter_bytes(layout), layout.zero
    return parameters * (
        each.compute / np.where(level > 2, shards, 1)
        + each.gradient / np.where(level > 1, shards, 1)
        + (each.master + each.optimizer) / np.where(level > 0, shards, 1)
    )
