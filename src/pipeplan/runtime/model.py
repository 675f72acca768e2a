"""What the runtime needs of a model: named blocks, which block feeds which, and where samples come from.

A rank builds only its own blocks. Building a block with a seed gives the same parameters whatever else is built,
in which order and on how many ranks, so that a plan and an unsplit run start from the same model.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from pipeplan.errors import UsageError
from pipeplan.runtime.modules import defer_weight_gradients

__all__ = ["Batch", "BlockSpec", "Model", "ModelFactory", "Rehearsed", "load_model"]

Batch = Mapping[str, Tensor]
"""The named tensors of a mini-batch, each with samples in its first dimension."""


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """One block of a model.

    It is called with the outputs of ``sources`` (block ids), then with the tensors of the batch named in
    ``samples``, each with the micro-batch's samples in the first dimension, and returns one tensor. A ``loss``
    block returns a scalar: the sum of the losses of all its predictions, which the caller scales. ``build`` makes
    its module, with random parameters from torch's generator. ``operator`` and ``dimensions`` go into the profile.
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

    Raises:
        UsageError: no blocks, two of one name, or a source or tie that is not a block before it.
    """

    name: str
    blocks: tuple[BlockSpec, ...]
    batch: Callable[[int, int, int], dict[str, Tensor]]
    predictions: Callable[[Batch], int]
    tied: tuple[tuple[tuple[str, str], ...], ...] = ()

    def __post_init__(self) -> None:
        where, known = f"model {self.name!r}", set[str]()
        if not self.blocks:
            raise UsageError(f"{where} has no blocks")
        for block in self.blocks:
            if block.id in known:
                raise UsageError(f"{where} has two blocks {block.id!r}")
            for source in block.sources:
                if source not in known:
                    raise UsageError(
                        f"{where}: block {block.id!r} takes the output of {source!r}, which is not a block before it"
                    )
            known.add(block.id)
        for group in self.tied:
            for id_, parameter in group:
                if id_ not in known:
                    raise UsageError(f"{where} ties parameter {parameter!r} of {id_!r}, which is not a block")

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
                if block == id_:
                    holder = module if first == id_ else _seeded(self.block(first), seed)
                    _copy_parameter(holder, first_parameter, module, parameter)
        return defer_weight_gradients(module.to(device=device, dtype=dtype))

    def mini_batch(
        self,
        num_samples: int,
        step: int,
        seed: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> dict[str, Tensor]:
        """A mini-batch on a device, its floating-point tensors in the dtype that the blocks are built in.

        Raises:
            UsageError: the model's ``batch`` failed.
        """
        try:
            made = self.batch(num_samples, step, seed)
        except Exception as error:
            raise UsageError(
                f"model {self.name!r} made no batch of {num_samples} samples: {type(error).__name__}: {error}"
            ) from error
        return {
            name: tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype)
            for name, tensor in made.items()
        }

    def rehearse(self, num_samples: int, dtype: torch.dtype = torch.float32) -> Iterator[Rehearsed]:
        """Run all blocks in order on the meta device: shapes, formats and who needs gradients, without computing.

        Gradients are needed where a parameter is among what a value was made from.

        Raises:
            UsageError: a block cannot be built or called this way; the text names it.
        """
        batch = self.mini_batch(num_samples, 0, 0, dtype=dtype, device="meta")
        values: dict[str, Tensor] = {}
        for block in self.blocks:
            inputs = [values[source] for source in block.sources]
            try:
                with torch.device("meta"):
                    module = block.build().to(dtype)
                with torch.enable_grad():
                    output = module(*inputs, *(batch[name] for name in block.samples))
            except Exception as error:
                raise UsageError(
                    f"model {self.name!r}: block {block.id!r} cannot be built and called on the meta device, which "
                    f"tells shapes without computing: {type(error).__name__}: {error}"
                ) from error
            if not isinstance(output, Tensor):
                raise UsageError(
                    f"model {self.name!r}: block {block.id!r} returned {type(output).__name__}; "
                    "a block returns one tensor"
                )
            yield Rehearsed(block, module, tuple(inputs), output)
            values[block.id] = output.detach().requires_grad_(output.requires_grad)

    def output_specs(
        self, num_samples: int, dtype: torch.dtype = torch.float32
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every block's output for a micro-batch, found without computing (meta device).

        Raises:
            UsageError: as :meth:`rehearse`.
        """
        return {
            step.spec.id: (tuple(step.output.shape), step.output.dtype) for step in self.rehearse(num_samples, dtype)
        }


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """One block's turn in :meth:`Model.rehearse`: everything is on the meta device, and has shapes but no data.

    ``inputs`` are the outputs of its sources, as the leaves of a graph of the block's own.
    """

    spec: BlockSpec
    module: nn.Module
    inputs: tuple[Tensor, ...]
    output: Tensor


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
        raise UsageError(f"model {name!r} is neither in the zoo ({', '.join(ZOO)}) nor of the form pkg.mod:factory")
    if sequence is not None:
        raise UsageError(f"--sequence is for models of the zoo; {name} makes its own")
    try:
        model = _imported(name)()
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"model {name!r}: the factory failed: {type(error).__name__}: {error}") from error
    if not isinstance(model, Model):
        raise UsageError(f"model {name!r} returned {type(model).__name__}, not a pipeplan.runtime.model.Model")
    return model


def _imported(path: str) -> Callable[[], object]:
    """What ``pkg.mod:factory`` names; modules of the working directory are found as ``python -m`` finds them."""
    module_name, _, attribute = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        factory: object = getattr(importlib.import_module(module_name), attribute)
    except Exception as error:  # whatever the module raises while it is imported
        raise UsageError(f"model {path!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(factory):
        raise UsageError(f"model {path!r} is a {type(factory).__name__}, not a function that returns a Model")
    return factory


def _seeded(block: BlockSpec, seed: int) -> nn.Module:
    """Build with a generator state that depends on the seed and the block's id alone."""
    digest = hashlib.sha256(f"{seed}/{block.id}".encode()).digest()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int.from_bytes(digest[:7], "big"))
        return block.build()


def _copy_parameter(source: nn.Module, source_name: str, target: nn.Module, target_name: str) -> None:
    with torch.no_grad():
        target.get_parameter(target_name).copy_(source.get_parameter(source_name))
