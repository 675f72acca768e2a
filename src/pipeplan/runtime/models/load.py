"""Which model a name means, or what Python has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import isclass, isroutine
from typing import Any

import torch
from torch import Tensor, nn

from pipeplan.errors import UsageError
from pipeplan.files import Profile
from pipeplan.runtime.models.given_names import configuration_text, is_configuration, require_model, value_of
from pipeplan.runtime.models.networks import NETWORKS, network
from pipeplan.runtime.models.sequential import is_plain, sequential_model
from pipeplan.runtime.models.shapes import several_remedy
from pipeplan.runtime.models.spec import Grain, Model, shards_named, unsplittable
from pipeplan.runtime.models.zoo import ZOO, zoo_model
from pipeplan.runtime.parallel.sharding import UnevenError


def load_model(
    name: object,
    *,
    sequence: int | None = None,
    planned_sequence: int | None = None,
    grain: Grain | None = None,
    shared: Sequence[str] = (),
    meta: bool = False,
    seed: int = 0,
    shards: Sequence[int] = (),
) -> Model:
    """The model that a name means.

    Args:
        name: one of the zoo; a Hugging Face configuration, as the path of a ``config.json``, as text such as
            ``LlamaConfig(num_hidden_layers=4)``, or by the catalog's name of a well-known one, ``llama3-70b``, which
            may have other arguments, ``llama3-70b(num_hidden_layers=4)``; or
            ``pkg.mod:name``, which is, or is a function without arguments that returns: a Model; an ``nn.Sequential``,
            an example input, and for training targets and maybe a loss; or any module and its example inputs, which is
            then captured. Or, in Python, what such a function would return.
        sequence: length of the sequences, for the zoo and for configurations.
        planned_sequence: the same where ``sequence`` is None and the model takes such sequences.
        grain: what a block is of a captured model; half a layer without it.
        shared: blocks that placements may spread over all devices, by id or operator, with ``*``.
        meta: parameters without data where possible, for models that are only looked at.
        seed: of the parameters that a function makes; those of the zoo are made later, block by block.
        shards: numbers of devices that it is going to be split over; a configuration that cannot be is refused early.

    Raises:
        UsageError: an unknown name, an option that does not apply, or a model that cannot be made or captured.
    """
    if isroutine(name) or isclass(name):
        made = name.__name__
        raise UsageError(f"model is {made} itself, not what it returns; call it: profile({made}())")
    if not isinstance(name, str):
        kind = type(name[0] if isinstance(name, tuple) and name else name).__name__
        return _with_shared(_taken(name, kind, kind, grain, max(shards, default=1)), shared)
    if name in ZOO:
        _refuse_grain(name, grain)
        size = zoo_model(name, sequence=sequence, planned=planned_sequence)
        return _with_shared(_PartedByName(name, size, {}).added, shared)
    if name in NETWORKS:
        _refuse_sequence(name, sequence)
        if max(shards, default=1) > 1:
            raise unsplittable(max(shards), name)
        captured = _captured(*network(name, seed=seed, meta=meta), name, grain)
        return _with_shared(replace(captured, made_up=True), shared)
    if is_configuration(name):
        said = configuration_text(name)
        from pipeplan.runtime.models.huggingface import load_configuration

        how: dict[str, Any] = {"grain": grain or "half", "meta": meta, "seed": seed, "shards": shards}
        shown = name if len(said) > len(name) else None  # a known model's name for its configuration
        whole = load_configuration(said, sequence=sequence, planned_sequence=planned_sequence, shown=shown, **how)
        return _with_shared(_PartedByName(name, whole, how).added, shared)
    require_model(name)
    _refuse_sequence(name, sequence)
    return _with_shared(_made_by(name, grain, seed, max(shards, default=1)), shared)


def _refuse_sequence(name: str, sequence: int | None) -> None:
    if sequence is not None:
        raise UsageError(f"--sequence is for models of the zoo and configurations; {name} makes its own")


def load_where_even(name: object, *, shards: Sequence[int], **how: Any) -> tuple[Model, dict[int, str]]:
    """The model that a name means, and why some of the numbers of devices cannot share it.

    One list of numbers can thus be given for models with different numbers of heads: those that do not divide a model
    are left out, as long as one above 1 remains.

    Returns:
        What :func:`load_model` makes for the numbers that remain, and the reason for each number left out.

    Raises:
        UsageError: as :func:`load_model`, or no number above 1 remains; the text is about the first one.
    """
    uneven: dict[int, UnevenError] = {}
    while True:
        left = [count for count in shards if count not in uneven]
        try:
            if uneven and max(left, default=1) == 1:
                raise next(iter(uneven.values()))
            model = load_model(name, shards=left, **how)
            _require_shares(model, name, left)
            return model, {count: str(error) for count, error in sorted(uneven.items())}
        except UnevenError as error:
            if error.count in uneven:
                raise
            uneven[error.count] = error


def _require_shares(model: Model, name: object, shards: Sequence[int]) -> None:
    """Refuse shares that are not even, of models that say so only when they are split: all but configurations."""
    if model.sharded is None or (isinstance(name, str) and is_configuration(name)):
        return
    for count in shards:
        if count > 1:
            with shards_named(count, model.name):
                model.sharded(count)
                model.require_shares(count)


@dataclass(frozen=True, slots=True)
class _PartedByName:
    """Gives the ``model`` that a ``name`` means, loaded as ``how`` says, for parts of its sequences."""

    name: str
    model: Model
    how: Mapping[str, Any]

    @property
    def added(self) -> Model:
        """The model, which says how."""
        return replace(self.model, parted=self, part_length=self.length)

    def length(self, count: int) -> int:
        """Of one of ``count`` parts. Raises UsageError: sequences are of several lengths, or cannot be divided so."""
        dimensions = (block.dimensions for block in self.model.blocks)
        sequences = sorted({each["sequence"] for each in dimensions if "sequence" in each})
        if len(sequences) != 1 or not takes_sequence(self.name):
            raise UsageError(
                f"--context {count}: samples of {self.name} are not one sequence each; leave --context out"
            )
        if sequences[0] % count:
            raise UsageError(
                f"--context {count}: {self.name} has sequences of {sequences[0]}, which {count} devices cannot share "
                f"evenly; give a --sequence that is a multiple of {count}, or another --context"
            )
        return sequences[0] // count

    def __call__(self, count: int) -> Model:
        """The model, whose samples are one of ``count`` parts of each sequence. Raises UsageError as ``length``."""
        return load_model(self.name, sequence=self.length(count), **self.how)


def takes_sequence(name: object) -> bool:
    """Whether ``sequence`` may say how long the samples of the model are that a name means."""
    return isinstance(name, str) and ((name in ZOO and ZOO[name].longest > 0) or is_configuration(name))


def _made_by(name: str, grain: Grain | None, seed: int, most_shards: int) -> Model:
    """The model that an import path means; its random parameters are the seed's, the same on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = value_of(name, "model")
    return _taken(made, name, name.partition(":")[2], grain, most_shards)


def _taken(made: object, name: str, short: str, grain: Grain | None, most_shards: int) -> Model:
    """The model that is made of what a function returned, or of what Python has."""
    match made:
        case Model():
            _refuse_grain(name, grain)
            return made
        case (nn.Module(), *_) if most_shards > 1:  # before it is captured
            raise unsplittable(most_shards, name)
        case (nn.Sequential() as chain, Tensor() as input, *rest) if grain is None and is_plain(chain):
            return replace(_chained(name, short, chain, input, rest), made_up=True)
        case (nn.Module() as module, Mapping() as inputs):
            return replace(_captured(module, inputs, short, grain), made_up=True)
        case (nn.Module() as module, Tensor() as input):
            return replace(_captured(module, {"input": input}, short, grain), made_up=True)
    raise UsageError(
        f"model {name!r} is, or returned, {_types(made)}; give a pipeplan.runtime.models.spec.Model, or a module and "
        "its example inputs: a tensor, or tensors by the names of the arguments, with samples in the first dimension; "
        "with an nn.Sequential also targets, to train it"
    )


def _chained(path: str, name: str, chain: nn.Sequential, input: Tensor, rest: Sequence[object]) -> Model:
    match rest:
        case []:
            return sequential_model(name, chain, input)
        case [Tensor() as targets]:
            return sequential_model(name, chain, input, targets)
        case [Tensor() as targets, loss] if callable(loss):
            return sequential_model(name, chain, input, targets, loss)
    raise UsageError(
        f"model {path!r}: beside an nn.Sequential and its input stands {_types(tuple(rest))}; give targets as a "
        "tensor, then maybe a loss, a function of output and targets"
    )


def _types(made: object) -> str:
    """Types, for errors."""
    return f"({', '.join(map(_types, made))})" if isinstance(made, tuple) else type(made).__name__


def _captured(module: nn.Module, inputs: Mapping[str, Tensor], name: str, grain: Grain | None) -> Model:
    from pipeplan.runtime.models.capture import capture

    return capture(module, inputs, name=name, grain=grain or "half")


def _refuse_grain(name: str, grain: Grain | None) -> None:
    if grain is not None:
        raise UsageError(f"--granularity {grain}: {name} has blocks of its own; leave it out")


def _with_shared(model: Model, patterns: Sequence[str]) -> Model:
    """The model with those blocks marked whose id or operator matches a pattern."""
    from fnmatch import fnmatchcase

    marked = set[str]()
    for pattern in patterns:
        found = {
            block.id for block in model.blocks if fnmatchcase(block.id, pattern) or fnmatchcase(block.operator, pattern)
        }
        if not found:
            operators = sorted({block.operator for block in model.blocks})
            raise UsageError(f"--shared {pattern!r} matches no block of {model.name}; its operators are {operators}")
        marked |= found
    blocks = tuple(replace(block, shared=True) if block.id in marked else block for block in model.blocks)
    return replace(model, blocks=blocks) if marked else model


def advice_on(model: Model) -> str:
    """The model's remark, with what to do to train with dropout."""
    drops = any("dropout" in name.lower() for name in model.switched_off)
    remedy = "; a module that a function returns in training mode drops (docs/capture.md#dropout-and-batchnorm)"
    return f"{model.remark}{remedy if drops else ''}"


def hindrance_of(model: Model) -> str:
    """Why plans of a model cannot be trained, and what to do; empty where they can."""
    several = dict.fromkeys(source for block in model.blocks for source, index in block.inputs if index > 0)
    if not several:
        return ""
    shown = ", ".join(list(several)[:3]) + ", ..." * (len(several) > 3)
    return (
        "plans of this profile can be searched, checked and emulated, but pipeplan run cannot train with them: "
        f"{shown} {'hands' if len(several) == 1 else 'hand'} on several tensors; {several_remedy(model)}"
    )


def reference_model(model: Model, calibration: Profile | None) -> Model | None:
    """The model that a calibration is of, where that is another one of the zoo."""
    if calibration is None or calibration.name == model.name or calibration.name not in ZOO:
        return None
    sequences = {block.dimensions.get("sequence") for block in calibration.blocks} - {None}
    return zoo_model(calibration.name, sequence=max(filter(None, sequences), default=None))
