"""What the runtime needs of a model: named blocks, which block feeds which, and where samples come from.

A rank builds only its own blocks. Building a block with a seed gives the same parameters whatever else is built,
in which order and on how many ranks, so that a plan and an unsplit run start from the same model.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from pipeplan.errors import UsageError
from pipeplan.runtime.modules import defer_weight_gradients

__all__ = ["BlockSpec", "Model", "ModelFactory", "load_model"]

Batch = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """One block of a model.

    It is called with the outputs of ``sources`` (block ids), then with the tensors of the batch named in
    ``samples``, each with the micro-batch's samples in the first dimension, and returns one tensor. A ``loss``
    block returns a scalar: the sum of the losses of all its predictions, which the caller scales.
    """

    id: str
    operator: str
    build: Callable[[], nn.Module]
    sources: tuple[str, ...] = ()
    samples: tuple[str, ...] = ()
    loss: bool = False
    dimensions: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Model:
    """Blocks in topological order, and batches for them.

    ``batch(num_samples, step, seed)`` makes the named tensors of a mini-batch; its samples do not depend on how
    many there are. ``predictions(batch)`` counts what the summed loss is divided by. Each group of ``tied`` names
    (block id, parameter name) pairs that stand for one parameter: they start equal, and their gradients must be
    summed over the group before every step.
    """

    name: str
    blocks: tuple[BlockSpec, ...]
    batch: Callable[[int, int, int], dict[str, Tensor]]
    predictions: Callable[[Batch], int]
    tied: tuple[tuple[tuple[str, str], ...], ...] = ()

    def block(self, id_: str) -> BlockSpec:
        """The block with this id. Raises KeyError."""
        for block in self.blocks:
            if block.id == id_:
                return block
        raise KeyError(id_)

    @property
    def edges(self) -> tuple[tuple[str, str], ...]:
        """Pairs (source block, target block)."""
        return tuple((source, block.id) for block in self.blocks for source in block.sources)

    def build(
        self, id_: str, seed: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> nn.Module:
        """A block's module with the seed's parameters, on a device, with weight gradients that can be deferred.

        Parameters are made in float32 on the CPU and then converted, so that all dtypes and devices agree.
        """
        module = _seeded(self.block(id_), seed)
        for (first, first_parameter), *others in self.tied:
            for block, parameter in others:
                if block == id_ and first != id_:
                    _copy_parameter(_seeded(self.block(first), seed), first_parameter, module, parameter)
        return defer_weight_gradients(module.to(device=device, dtype=dtype))

    def output_specs(
        self, num_samples: int, dtype: torch.dtype = torch.float32
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every block's output for a micro-batch, found without computing (meta device)."""
        batch = self.batch(num_samples, 0, 0)
        values: dict[str, Tensor] = {}
        with torch.no_grad():
            for block in self.blocks:
                with torch.device("meta"):
                    module = block.build().to(dtype)
                inputs = [values[source] for source in block.sources]
                inputs += [batch[name].to("meta") for name in block.samples]
                values[block.id] = module(*inputs)
        return {id_: (tuple(value.shape), value.dtype) for id_, value in values.items()}


ModelFactory = Callable[[], Model]
"""What ``--model pkg.mod:factory`` names: a function without arguments that returns a Model."""


def load_model(name: str, *, sequence: int | None = None) -> Model:
    """A model by its name in the zoo, or by the import path ``pkg.mod:factory`` of a function that makes one.

    ``sequence`` shortens the sequences of a zoo model.

    Raises:
        UsageError: an unknown name, or a factory that cannot be imported or does not return a Model.
    """
    from pipeplan.runtime.zoo import ZOO, zoo_model

    if name in ZOO:
        return zoo_model(name, sequence=sequence)
    if ":" not in name:
        raise UsageError(f"--model {name!r} is neither in the zoo ({', '.join(ZOO)}) nor of the form pkg.mod:factory")
    if sequence is not None:
        raise UsageError(f"--sequence is for models of the zoo; {name} makes its own")
    module_name, _, attribute = name.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"--model {name!r} cannot be imported: {error}") from None
    model = factory()
    if not isinstance(model, Model):
        raise UsageError(f"--model {name!r} returned {type(model).__name__}, not a pipeplan.runtime.model.Model")
    return model


def _seeded(block: BlockSpec, seed: int) -> nn.Module:
    """Build with a generator state that depends on the seed and the block's id alone."""
    digest = hashlib.sha256(f"{seed}/{block.id}".encode()).digest()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int.from_bytes(digest[:7], "big"))
        return block.build()


def _copy_parameter(source: nn.Module, source_name: str, target: nn.Module, target_name: str) -> None:
    with torch.no_grad():
        target.get_parameter(target_name).copy_(source.get_parameter(source_name))
