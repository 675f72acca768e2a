"""Frontiers of models that run split by operators, on four devices."""

from __future__ import annotations

import functools

import torch

from pipeplan.costs.clusters import named_cluster
from pipeplan.costs.devices import device_preset
from pipeplan.files import Profile
from pipeplan.planning.request import Batch, Request, Splitting
from pipeplan.planning.sharding_frontier import Splits, split_frontier
from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.profiling.estimate import estimate_model

PAPERS = (
    "vgg16-tiny-operators",
    "wide-resnet-tiny-operators",
    "lstm-tiny-operators",
    "gpt2-tiny-operators",
    "dlrm-tiny",
    "candle-uno-tiny",
)
"""VGG16, WideResNet, RNN and a Transformer, and GraphPipe's two that split by operators, too."""

SAMPLES, DEVICES = 4, 4


@functools.cache
def profile_of(name: str) -> Profile:
    return estimate_model(load_model(name), (1, 2, 4), device=device_preset("v100-16gb"), dtype=torch.float32)


@functools.cache
def frontier_of(name: str) -> tuple[Request, Splits]:
    cluster = named_cluster("tensoropt", DEVICES)
    request = Request(profile_of(name), DEVICES, Batch(1, SAMPLES), cluster=cluster)
    return request, split_frontier(request, Splitting(within=0.01))


@functools.cache
def chosen(name: str) -> dict[str, int]:
    """Of a frontier the leanest, the fastest and one between; and the one that makes most tensors again."""
    request, found = frontier_of(name)
    remade = [len(found.described(request, index).stages[0].remade) for index in range(len(found.points))]
    assert max(remade) > 0
    return {"leanest": 0, "middle": len(remade) // 2, "fastest": len(remade) - 1, "again": remade.index(max(remade))}
