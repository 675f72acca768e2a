"""Segments of a rank's stages, built by their kernel backends before the first step, and compared with eager torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipeplan.errors import ExecutionError, UsageError
from pipeplan.files.profile import EAGER
from pipeplan.runtime.backends.building import BuiltGroup, GroupBuilder, GroupModule
from pipeplan.runtime.backends.comparing import in_one, require_same
from pipeplan.runtime.executor.rank_program import StagePart
from pipeplan.runtime.executor.stage import SegmentRun
from pipeplan.runtime.models.spec import BlockSpec
from pipeplan.texts import counted
from pipeplan.units import format_ns
from pipeplan.workload.elements import Segment

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True, slots=True)
class KnownBackend:
    """What builds for a backend, how far from eager's its numbers may be, and why it cannot run here (None: it can)."""

    module: str
    tolerance: float
    absence: str | None = None
    trains: bool = True


@dataclass(slots=True)
class SegmentBuilds:
    """Builds the segments of one stage, each in its turn.

    ``modules`` and ``specs`` are of its blocks, ``shapes`` of what blocks make of one micro-batch, ``samples`` one.
    Blocks before a segment have run in eager torch, so that it takes what it will take.
    """

    part: StagePart
    modules: Mapping[str, nn.Module]
    specs: Mapping[str, BlockSpec]
    shapes: Shapes
    samples: Mapping[str, Tensor]
    known: Mapping[str, KnownBackend]
    dtype: torch.dtype
    device: torch.device
    inference: bool

    def each(self) -> Iterator[tuple[SegmentRun, int]]:
        """Every segment, and ns that building it took.

        Raises:
            ExecutionError: a backend is not known or not here, cannot build or run it, or gives other numbers.
        """
        values = self._received()
        for segment in self.part.segments:
            began = time.perf_counter_ns()
            try:
                yield self._built(segment, values), time.perf_counter_ns() - began
            except Exception as error:
                named = (
                    segment.blocks[0] if len(segment.blocks) == 1 else f"{segment.blocks[0]} to {segment.blocks[-1]}"
                )
                said = str(error) if isinstance(error, ExecutionError) else f"{type(error).__name__}: {error}"
                raise ExecutionError(
                    f"stage {self.part.index}: backend {segment.backend} is to run {named}, and is refused: {said}; "
                    "nothing has run. Search without it (--kernels), or with a profile measured here"
                ) from error

    def _received(self) -> dict[str, Tensor]:
        """Numbers for what comes from other stages, with gradients where the plan returns them."""
        returned = {name for source in self.part.returns for name in self.part.inputs[source]}
        values = {}
        for name in {name for names in self.part.inputs.values() for name in names}:
            shape, dtype = self.shapes[name]
            made = torch.Generator().manual_seed(len(name))
            if dtype.is_floating_point:
                tensor = torch.randn(shape, generator=made).to(self.device, dtype)
                values[name] = tensor.requires_grad_(name in returned and not self.inference)
            else:
                values[name] = torch.zeros(shape, dtype=dtype, device=self.device)
        return values

    def _built(self, segment: Segment, values: dict[str, Tensor]) -> SegmentRun:
        inside = {block: number for number, block in enumerate(segment.blocks)}
        specs = [self.specs[block] for block in segment.blocks]
        taken = dict.fromkeys(source for spec in specs for source, _ in spec.inputs if source not in inside)
        names = dict.fromkeys(name for spec in specs for name in spec.samples)
        given = tuple(block for block in segment.blocks if self._is_given(block, inside))
        place = {each: number for number, each in enumerate([*taken, *names])}
        calls = [
            [(inside[source], 0) if source in inside else (-1, place[source]) for source, _ in spec.inputs]
            + [(-1, place[name]) for name in spec.samples]
            for spec in specs
        ]
        module = GroupModule(
            [self.modules[block] for block in segment.blocks], calls, [(inside[block], 0) for block in given]
        )
        module.train(not self.inference)
        arguments = (*(values[name] for name in taken), *(self.samples[name] for name in names))
        kept = {name: buffer.clone() for name, buffer in module.named_buffers()}
        wanted, made = _numbers(module, arguments, inference=self.inference)
        values |= {block: _as_taken(tensor) for block, tensor in zip(given, made, strict=True)}
        run = SegmentRun(segment.blocks)
        if segment.backend != EAGER:
            built = self._builder(segment.backend).build(module, arguments, training=not self.inference)
            with built.around():
                found, _ = _numbers(built.call, arguments, inference=self.inference, parameters=[*module.parameters()])
            require_same(wanted, found, self.known[segment.backend].tolerance, self.dtype)
            run = _run_of(segment, built, tuple(taken), tuple(names), given)
        with torch.no_grad():  # such as means of batch normalisation, which no step has moved yet
            for name, buffer in module.named_buffers():
                buffer.copy_(kept[name])
        return run

    def _builder(self, backend: str) -> GroupBuilder:
        known = self.known.get(backend)
        if known is None:
            raise ExecutionError(
                f"there is no such backend here; known are {', '.join(sorted(self.known))}; for one of your own give "
                "--backend-rules pkg.mod"
            )
        if known.absence is not None:
            raise ExecutionError(known.absence)
        if not known.trains and not self.inference:
            raise ExecutionError("it runs forward only, and the plan trains")
        return GroupBuilder.of(backend, known.module)

    def _is_given(self, block: str, inside: Mapping[str, int]) -> bool:
        """Whether others of the stage take a block's output, or other stages, or it is a loss."""
        takers = [other for other in self.part.blocks if any(source == block for source, _ in self.specs[other].inputs)]
        leaves = any(block in names for names in self.part.outputs.values())
        return leaves or self.specs[block].loss or any(other not in inside for other in takers)


def _run_of(
    segment: Segment, built: BuiltGroup, taken: tuple[str, ...], samples: tuple[str, ...], given: tuple[str, ...]
) -> SegmentRun:
    return SegmentRun(segment.blocks, built.call, taken, samples, given, built.around)


def _as_taken(tensor: Tensor) -> Tensor:
    """What later segments take, which is the leaf of a graph of their own."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _numbers(
    call: Callable[..., object],
    arguments: Sequence[Tensor],
    *,
    inference: bool,
    parameters: Sequence[nn.Parameter] | None = None,
) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """Outputs and, of training, gradients of all that needs one; and the outputs with their graph."""
    own = parameters if parameters is not None else [*call.parameters()] if isinstance(call, nn.Module) else []
    torch.manual_seed(0)
    with torch.no_grad() if inference else nullcontext():
        found = call(*arguments)
    made = found if isinstance(found, tuple) else (found,)
    if not all(isinstance(each, Tensor) for each in made):
        raise ExecutionError("it gives neither a tensor nor a tuple of tensors")
    leaves = [each for each in arguments if each.requires_grad]
    trained = [each for each in own if each.requires_grad]
    roots = [each for each in made if each.requires_grad]
    wanted = [*leaves, *trained]
    if inference or not roots or not wanted:
        return [each.detach() for each in made], made
    ones = [torch.ones_like(each) for each in roots]
    gradients = torch.autograd.grad(roots, wanted, ones, allow_unused=True)
    zeros = [torch.zeros_like(leaf) if each is None else each for leaf, each in zip(wanted, gradients, strict=True)]
    return [*(each.detach() for each in made), *zeros[: len(leaves)], *in_one(zeros[len(leaves) :])], made


def said_of(stage: int, built: Sequence[tuple[SegmentRun, str, int]]) -> str:
    """That a stage's segments are built, in words; none where eager torch runs all."""
    of = [(backend, ns) for _, backend, ns in built if backend != EAGER]
    if not of:
        return ""
    names = ", ".join(dict.fromkeys(backend for backend, _ in of))
    blocks = sum(len(run.blocks) for run, backend, _ in built if backend != EAGER)
    total = format_ns(sum(ns for _, ns in of))
    parts = f"{counted(blocks, 'block')} in {counted(len(of), 'segment')}"
    return f"stage {stage}: {names} runs {parts}, built in {total}, with eager's numbers"


def require_no_autocast(parts: Sequence[StagePart], *, casts: bool) -> None:
    """Refuse to cast what backends were measured with as it is. Raises UsageError."""
    index = next((part.index for part in parts if part.segments), None)
    if casts and index is not None:
        raise UsageError(
            f"stages[{index}] of the plan has segments of kernel backends, which were measured without autocast; "
            "leave --autocast out, or search without --kernels"
        )
