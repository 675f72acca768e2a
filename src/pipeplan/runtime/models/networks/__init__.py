"""Networks as plain modules, which are captured: any grain of blocks, inference alone.

Here: what the catalog's networks are made of. Not here: models in blocks that train (zoo), models of others
(huggingface), capturing (capture).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from pipeplan.catalog import networks
from pipeplan.runtime.models.networks.bert import Bert
from pipeplan.runtime.models.networks.dcgan import Generator
from pipeplan.runtime.models.networks.nasnet import NasNet
from pipeplan.runtime.models.networks.resnets import resnet50_3d, resnext50

__all__ = ["NETWORKS", "network"]

NETWORKS: Mapping[str, Callable[[], nn.Module]] = {
    "bert-base": Bert,
    "dcgan": Generator,
    "nasnet-a": NasNet,
    "resnet50-3d": resnet50_3d,
    "resnext50": resnext50,
}
"""What makes a network, by its name in the catalog."""


def network(name: str, *, seed: int = 0, meta: bool = False) -> tuple[nn.Module, dict[str, Tensor]]:
    """A network of the catalog, in evaluation mode, and an example of two samples.

    Args:
        name: one of :data:`NETWORKS`.
        seed: of its parameters.
        meta: leave parameters without data.
    """
    size = networks()[name]
    with torch.random.fork_rng(devices=[]), torch.device("meta" if meta else "cpu"):
        torch.manual_seed(seed)
        module = NETWORKS[name]().eval()
    shape = (2, *size.input)
    if isinstance(module, Bert):
        return module, {"tokens": torch.arange(2 * shape[1]).view(shape) % module.vocabulary}
    return module, {"input": torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape)}
