"""Blocks that run forward alone: measured, or counted without running."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from pipeplan.costs.devices import Kernel
from pipeplan.files import CostRow, PhaseRow
from pipeplan.files.profile import Phase
from pipeplan.runtime.models.shapes import outputs_of
from pipeplan.runtime.models.spec import CausalDecoder
from pipeplan.runtime.profiling.benches import Bench, RowKey
from pipeplan.runtime.profiling.build_profile import ModelShare
from pipeplan.runtime.profiling.caches import CachedAttention, CachedCase
from pipeplan.runtime.profiling.counting import Tally, attention_of_the_cpu, without_data
from pipeplan.runtime.profiling.instruments import Meter, blamed, spread_of, storages, timed
from pipeplan.runtime.profiling.rounds import Benches, Progress, RunCounter, UnfinishedProfile

_META = torch.device("meta")


class BenchMaker(Protocol):
    """What makes a bench of one: plain, or with a cache."""

    def __call__(self, key: RowKey, *of_bench: Any) -> Bench:
        """The bench."""


class ForwardBench(Bench):
    """A block that runs forward, with no gradient; in decode and prefill with ``cached`` attention."""

    cached: CachedAttention | None = None

    def give(self) -> tuple[Tensor, ...]:
        """F: what the block gives."""
        with torch.no_grad():
            if self.cached is None:
                made = outputs_of(self.module(*self.inputs, *self.samples))
            else:
                self.cached.begin()
                with self.cached:
                    made = outputs_of(self.module(*self.inputs, *self.samples))
        assert made is not None, "its shapes are known: tensors come out"
        return made

    def measure_memory(self) -> None:
        """Bytes that it gives, and the most that it has beside these while it runs."""
        with blamed(self.key.label):
            if self.device.type != "meta":
                self.give()  # what only a first run makes
            with self.meter(self.device) as meter, meter.phase("F"):
                made = self.give()
            self._note(meter, made)

    def _note(self, meter: Meter, made: Sequence[Tensor]) -> None:
        self.activation_bytes = self.given(made)
        usage = meter.usage["F"]
        self.workspace_bytes = max(0, usage.peak - usage.start - self.activation_bytes)

    def given(self, made: Sequence[Tensor]) -> int:
        """Bytes of what it gives that it was not given."""
        known = self._own | storages([*self.inputs, *self.samples])
        return sum(size for key, size in storages(made).items() if key not in known)

    def time(self, *, keep: bool) -> None:
        """One forward, and of blocks with a cache the attention core by itself."""
        if self.cached is None:
            self._write_inputs()
        with blamed(self.key.label):
            _, ns = timed(self.give, self.device)
            core = None
            if self.cached is not None and self.cached.found:
                with torch.no_grad():
                    _, core = timed(self.cached.run, self.device)
        if keep:
            self.times.append((ns, 0, 0, 0))
            self.core_times += [] if core is None else [core]

    def _write_inputs(self) -> None:
        """As they are, so that they are in caches as a result that the block before has just written."""
        with torch.no_grad():
            for each in self.inputs:
                apart = all(step for step, size in zip(each.stride(), each.shape, strict=True) if size > 1)
                if each.is_floating_point() and apart:  # what was expanded has one number in several places
                    each.mul_(1.0)

    def row(self) -> CostRow:
        """As a row of the profile, without a phase."""
        return CostRow(
            microbatch_size=self.key.size,
            shards=self.key.shards,
            context=self.key.context,
            forward_ns=self.median("forward_ns"),
            activation_bytes=self.activation_bytes,
            workspace_bytes=self.workspace_bytes,
            repeats=len(self.times),
            spread={"forward_ns": spread_of(self.series("forward_ns"))},
        )

    def phase_row(self) -> PhaseRow:
        """As a row of its phase."""
        assert self.key.phase is not None
        forward = self.median("forward_ns")
        core = sorted(self.core_times)[len(self.core_times) // 2] if self.core_times else 0
        return PhaseRow(
            phase=self.key.phase,
            microbatch_size=self.key.size,
            context_tokens=self.key.tokens,
            shards=self.key.shards,
            forward_ns=forward,
            core_ns=min(forward, core),
            activation_bytes=self.activation_bytes,
            workspace_bytes=self.workspace_bytes,
            repeats=len(self.times),
            spread=spread_of(self.series("forward_ns")),
        )


class CountedForward(ForwardBench):
    """The same on the meta device, where only what it does is noted: its ``kernels``."""

    kernels: Sequence[Kernel] = ()

    def give(self) -> tuple[Tensor, ...]:
        """F, with what others take of it noted."""
        made = super().give()
        if self.tally is not None:
            self.tally.note_outputs(made)
        return made

    tally: Tally | None = None

    def measure_memory(self) -> None:
        """Memory as measured, and the kernels."""
        with blamed(self.key.label), self.meter(self.device) as meter:
            assert isinstance(meter, Tally)
            self.tally = meter
            with meter.phase("F"):
                made = self.give()
            self.activation_bytes, done = self.given(made), meter.counted()
            usage, self.kernels = done.usage["F"], done.kernels["F"]
            self.workspace_bytes = max(0, usage.peak - usage.start - self.activation_bytes)
        self.times = [(0, 0, 0, 0)]
        self.tally = None


def case_of(
    bench: type[ForwardBench],
    phase: Phase | None = None,
    tokens: int = 0,
    decoder: CausalDecoder | None = None,
    width: int = 2,
) -> BenchMaker:
    """What makes benches of a phase, whose caches have ``width`` bytes a number; of plain forwards without one."""

    def made(key: RowKey, *of_bench: Any) -> Bench:
        found = bench(replace(key, phase=phase, tokens=tokens), *of_bench)
        if phase is not None and decoder is not None:
            found.cached = CachedAttention(CachedCase.of(phase, tokens, decoder, key.block, key.shards, width))
        return found

    return made


def counted_forwards(
    splits: Sequence[ModelShare],
    sizes: Sequence[int],
    dtype: torch.dtype,
    case: BenchMaker,
    progress: Progress | None = None,
    *,
    fused: bool,
) -> Iterator[CountedForward]:
    """Every kind of block at every size, with its bytes and kernels."""
    shapes = tuple(replace(split, model=without_data(split.model, sizes, dtype)) for split in splits)
    benches = Benches(
        *(shapes, False, dtype, _META, 0, UnfinishedProfile(), ()),
        lambda _: Tally(fused=fused),
        case,
    )
    with attention_of_the_cpu(padded=fused):
        benches.fill(sizes, RunCounter(progress, benches.num_of_size * len(sizes)))
    for bench in benches.all:
        assert isinstance(bench, CountedForward)
        yield bench
