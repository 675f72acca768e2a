"""What the runtime needs of a model: named blocks, edges, where samples come from, and shares of split blocks.

Of made-up samples, number i of a step is the same however many are asked for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Generator, Tensor, nn

from pipeplan.errors import UsageError
from pipeplan.runtime.parallel import Share
from pipeplan.runtime.parallel.context import CONTEXT, Ring
from pipeplan.runtime.parallel.sharding import (
    WHOLE,
    Cut,
    ParameterPart,
    Shards,
    Slice,
    Split,
    UnevenError,
    require_even,
    share_of,
)
from pipeplan.runtime.parallel.weight_grads import defer_weight_gradients
from pipeplan.workload.mesh import COPIES, EXPERT_PARTS, EXPERTS, PLACES, SAMPLES, SHARDS, Mesh

Grain = Literal["layer", "half", "operator"]
"""What a block is of a model that is captured: a layer, half of one, or an operator."""

Batch = Mapping[str, Tensor]
"""The named tensors of a mini-batch, each with samples in its first dimension."""

Output = str | tuple[str, int]
"""What a block takes of another: the block's id, or (id, index) of one among several tensors."""


@dataclass(frozen=True, slots=True)
class Collective:
    """What one device's share of a split block needs of the others: ``bytes_per_sample`` of the array it is about.

    It is of F, I or W in ``phase``; B counts as the latter two. All-gather and reduce-scatter count the whole array,
    all-to-all what one device has of it.
    The others are those that split the block, or those that share sequences (``over``).
    """

    operation: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]
    phase: Literal["F", "I", "W"]
    bytes_per_sample: int
    over: Literal["shards", "context"] = "shards"


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """One block of a model.

    It is called with the outputs of ``sources``, then with the tensors of the batch named in ``samples``, each with
    samples in the first dimension, and returns one tensor, or a tuple of tensors. A ``loss`` block returns a scalar:
    the sum of the losses of all its predictions, or a mean, as :mod:`pipeplan.runtime.models.losses` finds out.
    ``build`` makes its module, with random parameters from torch's generator. ``operator``, ``dimensions`` and
    ``shared`` (spread over all devices by some placements) go into the profile, as :attr:`described`. ``collectives``
    are of a block that is one device's share of a larger one. ``split`` says how a stage of several devices runs it;
    None if only whole. ``splits`` are other ways, by the name of an axis of a mesh; those of one ``build`` may be used
    together. ``divided``: it is a share that takes and gives slices of the sequence. ``names`` are those of its
    parameters and kept buffers in the module it is of; without, ``ID.NAME``. ``modules`` are those of that module which
    the block runs, each whole. ``form`` is equal for blocks whose modules
    ``build`` makes alike, whatever the numbers in them; None if not known.
    """

    id: str
    operator: str
    build: Callable[[], nn.Module]
    sources: tuple[Output, ...] = ()
    samples: tuple[str, ...] = ()
    loss: bool = False
    dimensions: Mapping[str, int] = field(default_factory=dict)
    shared: bool = False
    collectives: tuple[Collective, ...] = ()
    split: Split | None = None
    splits: Mapping[str, Split] = field(default_factory=dict)
    divided: bool = False
    names: Mapping[str, str] | None = None
    modules: tuple[str, ...] = ()
    form: Hashable = None

    @property
    def described(self) -> dict[str, Any]:
        """The keys of its profile that describe it, apart from costs."""
        known = {"operator": self.operator, "dimensions": dict(self.dimensions), "shared": self.shared}
        return {**known, "modules": self.modules} if self.modules else known

    @property
    def inputs(self) -> tuple[tuple[str, int], ...]:
        """``sources`` as pairs of block and index of its output."""
        return tuple((source, 0) if isinstance(source, str) else source for source in self.sources)


@dataclass(frozen=True, slots=True)
class Texts:
    """How a language model takes texts: ``batch`` makes its named tensors of windows [samples, ``window``] of tokens.

    Tokens are numbers below ``vocabulary``.
    """

    vocabulary: int
    window: int
    batch: Callable[[Tensor], dict[str, Tensor]]


@dataclass(frozen=True, slots=True)
class CausalDecoder:
    """How a model writes texts on, token by token, and what it keeps of every token for those after it.

    ``at(count)`` is the model that takes so many tokens of each text at once, and gives the logits of the one after the
    last: of a whole prompt (prefill), or with 1 of one token behind those cached (decode). Its blocks have the whole
    model's names. ``placed(count)`` is the same of texts that have begun: its batch says in ``positions`` [samples,
    count] where each token is. ``longest`` is the most tokens of a text, None for any number. Keys and values have
    ``key_heads`` heads before any are copied for those of queries; None: as many as these. With ``latent`` (numbers of
    the latent, of the rotated key) all heads share one latent of a token, from which each makes its own key and value
    (DeepSeek-V2, section 2.1) by the parameter whose name ends with ``latent_weight``, and only that is cached.
    ``windows(block)`` is how far back a block looks; None: to all.
    """

    at: Callable[[int], Model]
    placed: Callable[[int], Model]
    longest: int | None = None
    key_heads: int | None = None
    latent: tuple[int, int] | None = None
    latent_weight: str = ""
    windows: Callable[[str], int | None] = lambda block: None


@dataclass(frozen=True, slots=True)
class Model:
    """Blocks in topological order, and batches for them.

    ``batch(num_samples, step, seed)`` makes the named tensors of a mini-batch; its samples do not depend on how many
    there are. ``predictions(batch)`` counts what the summed loss is divided by. ``loss_of`` is "samples" where the loss
    is known to be a sum over samples, and "micro-batches" where it compares the samples of a micro-batch and is meant
    to; without it runs find out. ``made_up``: ``batch`` invents samples. ``switched_off`` counts the modules, by class,
    that run in evaluation mode and would do something else in training mode. Each group of ``tied`` names (block id,
    parameter name) pairs that stand for one parameter.

    ``sharded(num_devices)`` gives the same blocks and edges, each block one device's share, or whole; None: it cannot
    be split. ``parted(count)`` gives it for such parts of its sequences, of some ``part_length``, if these are known;
    ``outlined(num_devices, count)`` both, of the first of alike layers alone. ``spread(num_devices)`` is the model with
    one device's part of all experts, which multiplies as many words as it sends to the others. ``in_context(count)``
    gives it as so many devices run it that have an early and a late piece of each sequence, whose blocks' ``split``
    builds what exchanges the rest along the axis of context. ``texts``: it can be trained on text. ``settings`` are all
    of the configuration it was made of, if any. ``aliases`` are further names of tensors, and those that ``names``
    have. ``decoder``: it is a causal language model. ``grain``: what captured blocks are. Raises UsageError.
    """

    name: str
    blocks: tuple[BlockSpec, ...]
    batch: Callable[[int, int, int], dict[str, Tensor]]
    predictions: Callable[[Batch], float]
    tied: tuple[tuple[tuple[str, str], ...], ...] = ()
    sharded: Callable[[int], Model] | None = None
    texts: Texts | None = None
    settings: Mapping[str, object] = field(default_factory=dict)
    loss_of: Literal["", "samples", "micro-batches"] = ""
    made_up: bool = False
    switched_off: Mapping[str, int] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    parted: Callable[[int], Model] | None = None
    part_length: Callable[[int], int] = lambda count: 0
    outlined: Callable[[int, int], Model | None] | None = None
    decoder: CausalDecoder | None = None
    spread: Callable[[int, float], Model] | None = None
    in_context: Callable[[int], Model] | None = None
    grain: Grain | None = None

    def __post_init__(self) -> None:
        where, known = f"model {self.name!r}", set[str]()
        if not self.blocks:
            raise UsageError(f"{where} has no blocks")
        for block in self.blocks:
            if block.id in known:
                raise UsageError(f"{where} has two blocks {block.id!r}")
            for source, _ in block.inputs:
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
    def remark(self) -> str:
        """What a user should know about ``switched_off``; empty if nothing."""
        if not self.switched_off:
            return ""
        counts = ", ".join(f"{name} x {count}" for name, count in self.switched_off.items())
        return (
            f"{counts} of {self.name} run in evaluation mode: nothing is dropped, running statistics stay as they are"
        )

    def shared_by(self, context: int) -> Model:
        """As so many devices run it that share sequences. Raises UsageError where it does not say how."""
        if context == 1:
            return self
        if self.in_context is None:
            raise UsageError(
                f"model {self.name!r} does not say how {context} devices share its sequences (context parallelism), as "
                "GPT of the zoo, cut into halves of layers, and Hugging Face decoders do; search with --cp 1"
            )
        return self.in_context(context)

    @property
    def runs_split(self) -> bool:
        """Whether every block says how a stage of several devices runs it."""
        return all(block.split is not None for block in self.blocks)

    def require_shares(self, num_devices: int) -> None:
        """Check that devices can share the parameters of all blocks, without making these. Raises UsageError."""
        counts: dict[str, int] = {}
        with torch.device("meta"):
            for block in reversed({each.form or each.id: each for each in reversed(self.blocks)}.values()):
                if block.split is not None and block.split.cuts:
                    whole = block.build()
                    for name, cut in block.split.cuts.items():
                        counts |= cut.of(f"{name!r} of block {block.id!r}", whole.get_parameter(name))
        require_even(counts, num_devices)

    @property
    def edges(self) -> tuple[tuple[str, str], ...]:
        """Pairs (source block, target block), each once."""
        pairs = [(source, block.id) for block in self.blocks for source, _ in block.inputs]
        return tuple(dict.fromkeys(pairs))

    def build(
        self, id_: str, seed: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> nn.Module:
        """A block's module with the seed's parameters, on a device, with weight gradients that can be deferred.

        Parameters are made in float32 on the CPU and then converted, so that all dtypes and devices agree.
        """
        return self.build_share(Share(id_), seed, WHOLE, dtype=dtype, device=device)

    def build_share(
        self,
        share: Share,
        seed: int,
        shards: Shards,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> nn.Module:
        """As :meth:`build`, with the parts of one of the devices that split the block. Raises UsageError."""
        module = self._share(share, self._whole(share.block, seed), shards)
        return defer_weight_gradients(module.to(device=device, dtype=dtype))

    def _whole(self, id_: str, seed: int) -> nn.Module:
        module = _seeded(self.block(id_), seed)
        for (first, first_parameter), *others in self.tied:
            for block, parameter in others:
                if block == id_:
                    holder = module if first == id_ else _seeded(self.block(first), seed)
                    with torch.no_grad():
                        module.get_parameter(parameter).copy_(holder.get_parameter(first_parameter))
        return module

    def parameter_shapes(self) -> dict[tuple[str, str], tuple[int, ...]]:
        """The whole shape of every parameter, by block and name; of a block's names for one, the tied or first one's.

        Raises UsageError where tied parameters have different shapes.
        """
        found, tied = {}, {holder for group in self.tied for holder in group}
        for block in self.blocks:
            with torch.device("meta"):
                named = list(block.build().named_parameters(remove_duplicate=False))
            aliased = {id(parameter) for name, parameter in named if (block.id, name) in tied}
            for name, parameter in named:
                if (block.id, name) in tied or id(parameter) not in aliased:
                    found[block.id, name] = tuple(parameter.shape)
                    aliased.add(id(parameter))
        for first, *others in self.tied:
            for other in others:
                if found[other] != found[first]:
                    raise UsageError(
                        f"the model ties {other[1]!r} of block {other[0]!r} to {first[1]!r} of block {first[0]!r}, "
                        f"but their shapes are {list(found[other])} and {list(found[first])}"
                    )
        return found

    def part_of(self, share: Share, parameter: str) -> ParameterPart:
        """What a device with this share of a block has of a parameter. Raises UsageError if it cannot be split so."""
        if (experts := self._sharing_experts(share)) is not None and parameter in experts.cuts:
            own = [Slice(experts.cuts[parameter], len(share.experts), share.expert)]
            if share.expert_parts:
                cut = self._cuts_of_each_expert(share.block)[parameter]
                own.append(Slice(cut, len(share.expert_parts), share.expert_part))
            return ParameterPart(tuple(own), *_copies_of(share, lambda name, size: name == COPIES), of_experts=True)
        splits = self._splits_of(share)
        cuts = {name: split.cuts[parameter] for name, split in splits.items() if parameter in split.cuts}
        slices = (
            Slice(cuts[name], axis.size, axis.place(share.index)) for name, axis in share.mesh.named if name in cuts
        )

        def is_copied(name: str, size: int) -> bool:
            return name not in cuts and (name not in splits or not splits[name].adds_up(parameter, size))

        return ParameterPart(tuple(slices), *_copies_of(share, is_copied))

    def slices_of(self, share: Share) -> tuple[str | None, str | None]:
        """Axes along which a share's inputs, and its output, are slices of the last dimension; None where whole."""
        splits = self._splits_of(share)
        taken = [name for name, split in splits.items() if split.takes]
        given = [name for name, split in splits.items() if split.gives]
        return next(iter(taken), None), next(iter(given), None)

    def divides(self, share: Share) -> bool:
        """Whether a share takes and gives slices of the sequence, along the axis of shards."""
        split = self._splits_of(share).get(SHARDS)
        return split is not None and split.divides(share.mesh.size_of(SHARDS))

    def streams_of(self, id_: str) -> int:
        """How many sequences a block's output has, one behind the other."""
        split = self.block(id_).split
        return 1 if split is None else split.streams

    def divides_shards(self, id_: str, count: int) -> bool:
        """Whether so many devices that split a block divide what it takes and gives along the sequence."""
        split = self.block(id_).split
        return split is not None and split.divides(count)

    def in_pieces(self, id_: str, mesh: Mesh) -> bool:
        """Whether devices of a mesh that share places of a block have an early and a late piece of each sequence.

        So they have of blocks that do not say by themselves how places are split.
        """
        return mesh.size_of(PLACES) > 1 and PLACES not in self.block(id_).splits

    def _run_as(self, share: Share) -> BlockSpec:
        """The block as the devices of a share run it: that of pieces, where they have such. Raises UsageError."""
        spec = self.block(share.block)
        if not share.places or PLACES in spec.splits:
            return spec
        return self.shared_by(len(share.places)).block(share.block)

    def _sharing_experts(self, share: Share) -> Split | None:
        """How a share's devices share the block's experts; None where it has none, or each device has all."""
        return self._run_as(share).splits.get(EXPERTS) if share.experts else None

    def _cuts_of_each_expert(self, id_: str) -> Mapping[str, Cut]:
        """How each expert of a block is split: as where devices have parts of all of them."""
        split = self.block(id_).split
        return {} if split is None else split.cuts

    def _splits_of(self, share: Share) -> dict[str, Split]:
        """How a block is split along each axis of its share's mesh that splits it. Raises UsageError."""
        spec = self._run_as(share)
        known = {name: split for name, split in spec.splits.items() if name != EXPERTS}  # which are no share's axis
        known |= {} if spec.split is None else {SHARDS: spec.split}
        axes = [name for name, size in share.mesh.axes if size > 1 and name != COPIES]
        for name in axes:
            if not known:
                raise UsageError(
                    "it does not say how (BlockSpec.split), as blocks of captured modules and of some configurations "
                    "(docs/executor.md) do not, and runs whole only"
                )
            if name not in known:
                raise UsageError(f"it can be split by {', '.join(sorted(known))}, and not by {name}")
        if len({id(known[name].build) for name in axes}) > 1:
            raise UsageError(f"it cannot be split by {' and '.join(axes)} at once")
        return {name: known[name] for name in axes}

    def require_splittable(self, id_: str, mesh: Mesh, context: int = 1) -> None:
        """Check that a block can be split over a mesh of devices, without making its parameters. Raises UsageError.

        So many meshes share sequences, by what the model is in that context.
        """
        spec, (inner, _) = self.block(id_), mesh.plane_without((SAMPLES, PLACES, EXPERTS), 0)
        if mesh.of_samples.size > 1 and not (spec.sources or spec.samples):
            raise UsageError(f"{self._cannot(id_, mesh)}it takes no samples that they could share")
        places, experts = (tuple(range(size)) if (size := mesh.size_of(name)) > 1 else () for name in (PLACES, EXPERTS))
        if self.in_pieces(id_, mesh) and self.in_context is None:
            raise UsageError(f"{self._cannot(id_, mesh)}it does not say that it can be split by {PLACES}")
        if experts and not self.require_shared_experts(id_, len(experts), 1):
            raise UsageError(f"{self._cannot(id_, mesh)}it has no experts that devices could share")
        if experts and any(size > 1 and name != COPIES for name, size in inner.axes):
            raise UsageError(f"{self._cannot(id_, mesh)}devices that share its experts split nothing else of it")
        with torch.device("meta"):
            whole = spec.build()
            for index in {0, inner.size - 1}:  # the largest share and the smallest
                share = Share(id_, index, tuple(range(inner.size)) if inner.size > 1 else (), inner.axes)
                share = replace(
                    share, context=tuple(range(context)) if context > 1 else (), places=places, experts=experts
                )
                self._share(share, whole, _alone(share))

    def _share(self, share: Share, whole: nn.Module, shards: Shards) -> nn.Module:
        spec = self._run_as(share)
        try:
            splits = self._splits_of(share)
            splits |= {PLACES: spec.splits[PLACES]} if share.places and PLACES in spec.splits else {}
            splits |= {EXPERTS: experts} if (experts := self._sharing_experts(share)) is not None else {}
            in_pieces = (share.context or share.places) and not splits
            splits |= {CONTEXT: spec.split} if in_pieces and spec.split is not None else {}
            if share.places and not splits:
                raise UsageError("it does not say how it runs on pieces of sequences")
            if not splits:
                return whole
            made = next(iter(splits.values())).build(shards)
            return share_of(whole, made, partial(self.part_of, share))
        except UsageError as error:
            raise UsageError(self._cannot(share.block, share.mesh) + str(error)) from None

    def require_shared_experts(self, id_: str, num_devices: int, shards: int, each: int = 1) -> bool:
        """Check that devices can share a block's experts, each ``shards`` of which split all else of it.

        Of these devices ``each`` so many have parts of the same experts.

        Returns:
            Whether it has any that could be.

        Raises:
            UsageError: they cannot have equally many, or would not have words of their own.
        """
        spec = self.block(id_)
        if (split := spec.splits.get(EXPERTS)) is None:
            return False
        where = f"experts of block {id_!r} of model {self.name!r} cannot be shared by {num_devices} devices"
        with torch.device("meta"):
            whole = spec.build()
        for name in split.cuts:
            experts = whole.get_parameter(name)
            if (count := experts.shape[0]) * each % num_devices:
                raise UsageError(f"{where}: there are {count}, which is no multiple" + f" of {num_devices // each}")
            if each > 1:
                try:
                    require_even(self._cuts_of_each_expert(id_)[name].of(repr(name), experts), each)
                except UsageError as error:
                    raise UsageError(f"{where}, {each} of which split each expert: {error}") from None
        if shards > 1 and not (spec.split is not None and spec.split.divides(shards)):
            raise UsageError(
                f"{where} of which each {shards} split all else: these have the same words where they cannot divide "
                "the sequence evenly; give a --sequence that is a multiple, or --tp 1"
            )
        return True

    def _cannot(self, id_: str, mesh: Mesh) -> str:
        over = f"{mesh.size} devices" + (f" as {mesh}" if mesh.axes != ((SHARDS, mesh.size),) else "")
        return f"block {id_!r} of model {self.name!r} cannot be split over {over}: "

    def mini_batch(
        self,
        num_samples: int,
        step: int,
        seed: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> dict[str, Tensor]:
        """A mini-batch on a device, its floats of the given dtype. Raises UsageError where ``batch`` fails.

        On the meta device, which has no data, a few samples stand for all: a million may not fit into memory.
        """
        drawn = num_samples if torch.device(device).type != "meta" else min(num_samples, 8)
        try:
            made = self.batch(drawn, step, seed)
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(
                f"model {self.name!r} made no batch of {drawn} samples: {type(error).__name__}: {error}"
            ) from error
        found = {
            name: tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype)
            for name, tensor in made.items()
        }
        for name, tensor in found.items() if drawn < num_samples else ():
            found[name] = tensor.new_empty((num_samples, *tensor.shape[1:])) if tensor.shape[:1] == (drawn,) else tensor
        return found


def unsplittable(count: int, name: str) -> UsageError:
    """What to raise where a model without ``sharded`` is to be split."""
    return UsageError(f"--shards {count}: model {name!r} does not say how it is split; give --shards 1")


_LONGEST_NAME = 40


@contextmanager
def shards_named(count: int, name: str) -> Iterator[None]:
    """Let errors of a split say which flag and which model they are about."""
    try:
        yield
    except UsageError as error:
        shown = name if len(name) <= _LONGEST_NAME else f"{name.partition('(')[0]}(...)"  # a configuration's arguments
        text = f"--shards {count}: model {shown!r} cannot be split: {error}"
        raise (UnevenError(text, count) if isinstance(error, UnevenError) else UsageError(text)) from None


def _seeded(block: BlockSpec, seed: int) -> nn.Module:
    """Build with a generator state that depends only on the seed and the block's id."""
    digest = hashlib.sha256(f"{seed}/{block.id}".encode()).digest()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int.from_bytes(digest[:7], "big"))  # no other device's, as is kept
        return block.build()


def tied_groups(named: Iterable[tuple[str, str, Tensor]]) -> tuple[tuple[tuple[str, str], ...], ...]:
    """From (block, name, parameter): the names of each parameter that several blocks have."""
    holders: dict[int, list[tuple[str, str]]] = {}
    for block, name, parameter in named:
        holders.setdefault(id(parameter), []).append((block, name))
    return tuple(tuple(group) for group in holders.values() if len({block for block, _ in group}) > 1)


def placed(share: Share, along: Callable[[tuple[int, ...]], Shards]) -> Shards:
    """The place of a share's rank on all axes of its mesh; ``along`` is its place in a line of ranks.

    Blocks that say nothing of places have pieces of the sequences, as in a context.
    """
    axes = [name for name, size in share.mesh.axes if size > 1 and name != COPIES]
    found = {name: along(share.along(name)) for name in axes}
    lines = ((PLACES, share.places), (CONTEXT, share.context or share.places))
    of_experts = ((EXPERTS, share.experts), (EXPERT_PARTS, share.expert_parts))
    found |= {name: along(line) for name, line in (*lines, *of_experts) if line}
    found |= {CONTEXT: Ring.of(found[CONTEXT])} if share.ring and CONTEXT in found else {}
    return replace(found.get(SHARDS, WHOLE), along=found)


def _copies_of(share: Share, is_copied: Callable[[str, int], bool]) -> tuple[int, int]:
    """How many devices of a share's mesh have the same, along axes of a name and a size, and which of them it is."""
    copies, copy = 1, 0
    for name, axis in share.mesh.named:
        if is_copied(name, axis.size):
            copies, copy = copies * axis.size, copy * axis.size + axis.place(share.index)
    return copies, copy


def _alone(share: Share) -> Shards:
    """A share's place without the others."""
    own = share.partners[share.index] if share.partners else 0
    return placed(share, lambda line: Shards(len(line), line.index(own) if own in line else 0))


# Made-up samples ---------------------------------------------------------------------------------------------------

_STRIDES = 8


def stacked(
    make: Callable[[Generator], Mapping[str, Tensor]], num_samples: int, step: int, seed: int
) -> dict[str, Tensor]:
    """The named tensors of a mini-batch, from ``make``, which makes those of one sample with its own generator."""
    made = [make(_of_sample(seed, step, sample)) for sample in range(num_samples)]
    return {name: torch.stack([sample[name] for sample in made]) for name in made[0]}


def _of_sample(seed: int, step: int, sample: int) -> Generator:
    """Random numbers of a single sample."""
    return Generator().manual_seed(((seed * 1_000_003 + step) * 1_000_003 + sample) % 2**63)


def token_batch(vocabulary: int, sequence: int, num_samples: int, step: int, seed: int) -> dict[str, Tensor]:
    """Made-up text a model can learn: each sample counts up from a random token by a random small stride.

    ``tokens`` and ``targets`` [num_samples, sequence]; targets are the tokens one place on.
    """

    def text(generator: Generator) -> dict[str, Tensor]:
        start = torch.randint(vocabulary, (1,), generator=generator)
        stride = torch.randint(1, _STRIDES, (1,), generator=generator)
        return next_tokens((start + stride * torch.arange(sequence + 1)) % vocabulary)

    return stacked(text, num_samples, step, seed)


def next_tokens(windows: Tensor) -> dict[str, Tensor]:
    """Windows [..., sequence + 1] of a text as ``tokens`` and ``targets`` [..., sequence], the tokens one place on."""
    return {"tokens": windows[..., :-1], "targets": windows[..., 1:]}


def with_positions(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A batch of texts from their beginning, with the ``positions`` [samples, sequence] of their ``tokens``."""
    return {**batch, "positions": torch.arange(batch["tokens"].shape[1]).expand(batch["tokens"].shape)}


def batch_like(examples: Mapping[str, Tensor], num_samples: int, step: int, seed: int) -> dict[str, Tensor]:
    """Numbers like those of the examples [samples, ...]: integers of the same range, normal numbers otherwise."""

    def sample(generator: Generator) -> dict[str, Tensor]:
        return {name: _random_like(example, generator) for name, example in examples.items()}

    return stacked(sample, num_samples, step, seed)


def _random_like(example: Tensor, generator: Generator) -> Tensor:
    shape = example.shape[1:]
    if example.is_floating_point():
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(example.dtype)
    if example.is_meta or example.numel() == 0:
        return torch.zeros(shape, dtype=example.dtype)
    low, high = int(example.min()), int(example.max())
    return torch.randint(low, high + 1, shape, generator=generator).to(example.dtype)
