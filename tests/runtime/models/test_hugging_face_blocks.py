"""Blocks of Hugging Face configurations compute what the model computes, and are what one would expect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import networkx as nx
import pytest
import torch
from torch import Tensor, nn

from pipeplan.runtime.models.capture import parameters_of
from pipeplan.runtime.models.huggingface import LoadedModel, load_configuration
from pipeplan.runtime.models.shapes import shaped_blocks
from pipeplan.runtime.models.spec import Grain, Model
from pipeplan.runtime.profiling.build_profile import block_graph_of
from runtime_support.hugging_face import (
    ALIKE,
    ARGUMENTS,
    LAYERS,
    NAMES,
    SEQUENCE,
    TOWERS,
    batch_for,
    captured,
    eager_experts,
    text,
    whole,
)
from runtime_support.whole_model import replay
from support.marks import slow_but


@slow_but(
    "name, grain",
    [(name, "half") for name in NAMES]
    + [(name, grain) for name in ("gpt2", "mixtral", "t5", "flava") for grain in ("layer", "operator")],
    lambda case: case[0] == "gpt2" or (case[1] == "half" and case[0] not in ALIKE),
    lambda case: case[1] == "layer",
)
def test_blocks_run_in_one_piece_are_the_model(name: str, grain: Grain) -> None:
    """Output and the gradients of all parameters, for a number of samples that was not exported."""
    found, model = whole(name), captured(name, grain)
    modules = {block.id: block.build().double() for block in model.blocks}
    batch = batch_for(found, 4)
    found.module.zero_grad()
    with eager_experts(found):
        loss = found.module(**batch)
        loss.backward()
    made = replay(model, modules, batch)
    made.backward()
    assert made.item() == pytest.approx(loss.item(), rel=1e-9)
    own = summed_gradients(found, model, modules)
    for key, parameter in found.module.named_parameters():
        if parameter.grad is None:
            assert key not in own
        else:
            assert torch.allclose(own.pop(key), parameter.grad, rtol=1e-9, atol=1e-9), key
    assert not own


def summed_gradients(found: LoadedModel, model: Model, modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """By the first name that each parameter has in the whole model, summed over the blocks that have it."""
    first = {id(parameter): key for key, parameter in found.module.named_parameters()}
    summed: dict[str, Tensor] = {}
    for block in model.blocks:
        for own, name in parameters_of(block).items():
            gradient = modules[block.id].get_parameter(own).grad
            if gradient is not None:
                key = first[id(found.module.get_parameter(name))]
                summed[key] = summed[key] + gradient if key in summed else gradient
    return summed


@slow_but("name", NAMES, lambda name: name not in ALIKE)
def test_half_layers_are_recognised(name: str) -> None:
    counts = Counter(block.operator for block in captured(name, "half").blocks)
    layers = LAYERS * (2 if name in ("t5", "mt5") else TOWERS.get(name, 1))
    assert counts["attention"] == layers
    assert counts["moe" if name == "mixtral" else "ffn"] == layers
    assert counts["cross-attention"] == (LAYERS if name in ("t5", "mt5") else 0)
    assert counts["head"] == 1
    assert captured(name, "half").blocks[-1].operator == "head"
    tables = {"clip": 2, "flava": 2, "t5": 4, "mt5": 4}.get(name, 1)  # T5's are of words and of distances
    assert counts["embedding"] + counts["convolution"] == tables


@slow_but(
    "name, grain",
    [(name, "half") for name in NAMES] + [(name, "layer") for name in ("gpt2", "mixtral", "t5", "flava")],
    lambda case: case[0] == "gpt2" or (case[1] == "half" and case[0] not in ALIKE),
)
def test_blocks_give_one_tensor_each(name: str, grain: Grain) -> None:
    """As a plan that runs must have it; T5's position bias, which is for all layers, is a block of its own."""
    assert {len(step.outputs) for step in shaped_blocks(captured(name, grain), 2)} == {1}


@slow_but("name", ["gpt2", "mixtral", "bert", "clip"], lambda name: name != "mixtral")
def test_identical_layers_are_alike(name: str) -> None:
    """More layers make no more kinds of blocks."""
    deeper = dict(ARGUMENTS[name])
    for key in ("n_layer", "num_hidden_layers"):
        if key in deeper:
            deeper[key] = LAYERS + 1
    for key in ("text_config", "vision_config"):
        if key in deeper:
            deeper[key] = {**deeper[key], "num_hidden_layers": LAYERS + 1}
    model = load_configuration(text(name, **deeper), sequence=SEQUENCE, meta=True)
    kinds, deep = (
        {each.kind for each in block_graph_of(of, torch.float32).blocks} for of in (captured(name, "half"), model)
    )
    assert len(deep) == len(kinds)
    assert len(model.blocks) > len(captured(name, "half").blocks) > len(kinds)


@pytest.mark.parametrize("name", ["clip", "flava"])
def test_one_tower_does_not_wait_for_the_other(name: str) -> None:
    model = captured(name, "half")
    graph = nx.DiGraph(list(model.edges))
    images = next(block.id for block in model.blocks if "pixels" in block.samples)
    texts = next(block.id for block in model.blocks if "tokens" in block.samples)
    assert not nx.has_path(graph, images, texts)
    assert not nx.has_path(graph, texts, images)
