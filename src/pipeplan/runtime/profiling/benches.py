"""One block at one micro-batch size, run alone as a stage runs it."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from pipeplan.files import CostRow, FileModel
from pipeplan.files.profile import Phase, Saved, SavedBySource
from pipeplan.runtime.models.shapes import outputs_of
from pipeplan.runtime.parallel.attention_cores import ATTENTION, RecomputedCores
from pipeplan.runtime.parallel.batch_norms import recomputed
from pipeplan.runtime.parallel.weight_grads import WeightGradQueue, warn_if_compiled
from pipeplan.runtime.profiling.build_profile import Kind, SavedTensors
from pipeplan.runtime.profiling.instruments import (
    Meter,
    Usage,
    blamed,
    meter_for,
    saved_tensors,
    spread_of,
    storages,
    timed,
)
from pipeplan.runtime.profiling.ring_rows import AroundRing, MeasuredRing, RingTimes, timed_both_ways
from pipeplan.workload.elements import Bytes, Count, Index, Items, Name, Nanoseconds

Time = Literal["forward_ns", "backward_ns", "input_grad_ns", "weight_grad_ns"]
TIMES: tuple[Time, ...] = ("forward_ns", "backward_ns", "input_grad_ns", "weight_grad_ns")

_Roots = list[tuple[GradientEdge, Tensor]]
"""Where backward begins, and with which gradients."""

_WORTH_A_LOOK = 0.01
"""Times below this share of a block's forward and backward may be as unsteady as they like."""


@dataclass(frozen=True, slots=True)
class RowKey:
    """What is measured: a block at a micro-batch size, one device's share of it among ``shards``.

    Samples have one of ``context`` parts of each sequence, the block the experts of one of ``expert`` devices. Of
    inference with a cache it is of a ``phase``, with texts of so many ``tokens``.
    """

    block: str
    size: int
    shards: int = 1
    recompute: bool = False
    context: int = 1
    phase: Phase | None = None
    tokens: int = 0
    expert: int = 1

    @property
    def kind(self) -> tuple[int, int, int, str]:
        """Shards, context, expert and block."""
        return self.shards, self.context, self.expert, self.block

    @property
    def label(self) -> str:
        """For progress and errors."""
        split = f", split over {self.shards} devices" if self.shards > 1 else ""
        split += f", sequences in {self.context} parts" if self.context > 1 else ""
        split += f", experts over {self.expert} devices" if self.expert > 1 else ""
        split += f", {self.phase} of {self.tokens} tokens" if self.phase else ""
        return f"block {self.block!r} at micro-batch size {self.size}{split}{', recomputed' * self.recompute}"


class KeptRow(FileModel):
    """Measurements of one kind of block in one case; ``times`` are of each timed run: F, B, I, W in ns.

    ``saved_inputs`` and ``saved_outputs`` say of each whether backward needs it; where empty, nobody looked.

    ``core_times`` are those of its attention cores alone; ``ring_times`` and ``ring_workspace_bytes`` what it takes
    where devices that share sequences send keys and values around a ring.
    """

    block: Name
    microbatch_size: Count
    shards: Count = 1
    context: Count = 1
    recompute: bool = False
    phase: Phase | None = None
    tokens: Index = 0
    expert: Count = 1
    activation_bytes: Bytes
    selective_activation_bytes: Bytes | None = None
    weight_grad_bytes: Bytes
    workspace_bytes: Bytes
    times: Items[tuple[Nanoseconds, Nanoseconds, Nanoseconds, Nanoseconds]] = ()
    core_times: Items[Nanoseconds] = ()
    ring_times: Items[tuple[Nanoseconds, Nanoseconds, Nanoseconds, Nanoseconds]] = ()
    ring_workspace_bytes: Bytes | None = None
    saved_inputs: Items[Saved] = ()
    saved_outputs: Items[SavedBySource] = ()

    @property
    def key(self) -> RowKey:
        """What was measured."""
        case = self.shards, self.recompute, self.context, self.phase, self.tokens, self.expert
        return RowKey(self.block, self.microbatch_size, *case)


@dataclass(slots=True, eq=False)
class Bench:
    """One block at one micro-batch size, ready to run again and again.

    ``selective_bytes`` are held where backward computes attention cores again, None where there are none, and
    ``core_times`` what these take. ``ring_workspace_bytes`` and ``ring_times`` are taken where devices with other
    pieces of sequences send keys and values around a ring, None where it has no such attention. ``saved_inputs`` and
    ``saved_outputs`` say which of these its backward needs. ``inputs`` are what it takes of its sources, ``needs_grad``
    whether each gets a gradient, ``gradients`` those of its outputs, by index.
    With ``recompute`` (in the key) F keeps only its inputs, and B and I run it again first.
    """

    key: RowKey
    module: nn.Module
    inputs: tuple[Tensor, ...]
    needs_grad: tuple[bool, ...]
    samples: tuple[Tensor, ...]
    gradients: tuple[tuple[int, Tensor], ...]
    device: torch.device
    meter: Callable[[torch.device], Meter] = meter_for
    activation_bytes: int = 0
    weight_grad_bytes: int = 0
    workspace_bytes: int = 0
    times: list[tuple[int, int, int, int]] = field(default_factory=list)
    selective_bytes: int | None = None
    core_times: list[int] = field(default_factory=list)
    ring_times: list[RingTimes] = field(default_factory=list)
    ring_workspace_bytes: int | None = None
    saved_inputs: tuple[Saved, ...] = ()
    saved_outputs: tuple[SavedBySource, ...] = ()
    _given: list[int] = field(default_factory=list)

    def forward(self) -> _Roots:
        """F: what backward starts from; nothing if no gradient is needed. The outputs themselves are let go of."""
        leaves = [
            tensor.detach().requires_grad_(needs) for tensor, needs in zip(self.inputs, self.needs_grad, strict=True)
        ]
        made = outputs_of(self._run(*leaves, *self.samples))
        assert made is not None, "its shapes are known: tensors come out"
        self._given = [tensor.untyped_storage()._cdata for tensor in made]
        return [
            (get_gradient_edge(made[index]), gradient)
            for index, gradient in self.gradients
            if made[index].requires_grad
        ]

    def _run(self, *arguments: Tensor) -> object:
        if self.key.recompute:
            return recomputed(self.module, *arguments)
        return self.module(*arguments)

    @staticmethod
    def backward(roots: _Roots) -> None:
        """B, or I while a queue collects the weight gradients."""
        if roots:
            edges, gradients = zip(*roots, strict=True)
            torch.autograd.backward(edges, gradients)

    def time(self, *, keep: bool) -> None:
        """Two passes, with full and with split backward; their times are kept unless they warm up."""
        with blamed(self.key.label):
            times = (*self._time_full(), *self._time_split())
            core = None if self.selective_bytes is None else self._time_cores()
            around = None if self.ring_workspace_bytes is None else self._time_around()
        if keep:
            self.times.append(times)
            self.core_times += [] if core is None else [core]
            self.ring_times += [] if around is None else [around]

    def _time_cores(self) -> int:
        """The block's attention cores alone, as backward computes them again."""
        cores = GivenToCores()
        with cores:
            self.forward()
        return timed(cores.run, self.device)[1]

    def _time_around(self) -> RingTimes:
        """Its cores alone, to gathered keys and values and around a ring."""
        cores = GivenToCores()
        with cores:
            self.forward()
        return timed_both_ways(cores.calls, self.device)

    def _time_full(self) -> tuple[int, int]:
        roots, forward_ns = timed(self.forward, self.device)
        _, backward_ns = timed(partial(self.backward, roots), self.device)
        return forward_ns, backward_ns

    def _time_split(self) -> tuple[int, int]:
        roots, queue = self.forward(), WeightGradQueue()
        with queue:
            _, input_grad_ns = timed(partial(self.backward, roots), self.device)
        del roots  # the stage has sent the input's gradient away by then
        _, weight_grad_ns = timed(queue.run, self.device)
        return input_grad_ns, weight_grad_ns

    def runs_left(self, repeats: int, warmup: int) -> int:
        """Timed runs to come and those to warm up before; 0 if all times are there."""
        left = repeats - len(self.times)
        return warmup + left if left > 0 else 0

    def is_unsteady(self, max_spread: float) -> bool:
        """Whether the spread of one of its times that matter is above the one asked for."""
        floor = _WORTH_A_LOOK * (self.median("forward_ns") + self.median("backward_ns"))
        return any(spread_of(self.series(name)) > max_spread for name in TIMES if self.median(name) > floor)

    def median(self, name: Time) -> int:
        """The median of the runs so far, in ns."""
        return int(statistics.median(self.series(name)))

    def series(self, name: Time) -> list[int]:
        """The time of each run, in ns."""
        return [times[TIMES.index(name)] for times in self.times]

    def kept(self) -> KeptRow:
        """What there is so far."""
        return KeptRow(
            block=self.key.block,
            microbatch_size=self.key.size,
            shards=self.key.shards,
            context=self.key.context,
            recompute=self.key.recompute,
            phase=self.key.phase,
            tokens=self.key.tokens,
            expert=self.key.expert,
            activation_bytes=self.activation_bytes,
            selective_activation_bytes=self.selective_bytes,
            weight_grad_bytes=self.weight_grad_bytes,
            workspace_bytes=self.workspace_bytes,
            core_times=tuple(self.core_times),
            ring_times=tuple(self.ring_times),
            ring_workspace_bytes=self.ring_workspace_bytes,
            times=tuple(self.times),
            saved_inputs=self.saved_inputs,
            saved_outputs=self.saved_outputs,
        )

    def take_up(self, kept: KeptRow) -> None:
        """Go on from what an earlier measurement kept."""
        self.activation_bytes = kept.activation_bytes
        self.selective_bytes, self.core_times = kept.selective_activation_bytes, list(kept.core_times)
        self.weight_grad_bytes = kept.weight_grad_bytes
        self.workspace_bytes = kept.workspace_bytes
        self.ring_workspace_bytes, self.ring_times = kept.ring_workspace_bytes, list(kept.ring_times)
        self.times = list(kept.times)
        self.saved_inputs, self.saved_outputs = kept.saved_inputs, kept.saved_outputs

    def measure_memory(self) -> None:
        """Bytes held after F and after I, and what running takes beyond them."""
        with blamed(self.key.label):
            given = self._measure_held()
            usage = self._measure_usage()
            self.workspace_bytes = self.workspace(usage, given)
            if self.selective_bytes is not None and self.key.context > 1:
                with AroundRing():
                    around = self._measure_usage()
                self.ring_workspace_bytes = self.workspace(around, given)

    def _measure_held(self) -> int:
        """Fill in what waits for B, or for W; returns how much of the former the block was given."""
        with saved_tensors() as saved, CountedCores() as cores:
            roots = self.forward()
        given = self.note_activations(roots, saved)
        if cores.count and not self.key.recompute:
            self._note_without_cores()
        with WeightGradQueue() as queue:
            self.backward(roots)
        self.note_weight_grads(queue)
        queue.run()
        return given

    def note_activations(self, roots: _Roots, saved: Callable[[], list[Tensor]]) -> int:
        """Fill in what waits for B after F; returns how much of it the block was given.

        Held are the tensors that autograd saved and the inputs that get a gradient, or with recomputation all that the
        block was given; less what belongs to the module. Outputs count as inputs of those who take them.
        """
        held = _without(storages([*saved(), *self._kept_inputs()]) if roots else {}, self._own)
        self.activation_bytes = sum(held.values())
        if not self.key.recompute:
            needed = storages(saved()) if roots else {}
            self.saved_inputs = needs_of((t.untyped_storage()._cdata in needed for t in self.inputs), bool(needed))
            self.saved_outputs = tuple("yes" if each in needed else "no" for each in self._given)
        given = storages([*self.inputs, *self.samples])
        return sum(size for address, size in held.items() if address in given)

    @property
    def _unsaved_bytes(self) -> int:
        """What the row counts of inputs that backward does not need."""
        both = zip(self.inputs, self.needs_grad, self.saved_inputs, strict=False)
        return sum(storages(tensor for tensor, needs, saved in both if needs and saved != "yes").values())

    def _note_without_cores(self) -> None:
        """Fill in what waits for B where it computes attention cores again: not what they make, but what they take."""
        with saved_tensors() as saved, GivenToCores() as cores:
            roots = self.forward()
        if roots:
            held = _without(storages([*saved(), *self._kept_inputs(), *cores.given]), self._own)
            self.selective_bytes = min(self.activation_bytes, sum(held.values()))
            both = zip(self.saved_outputs, self._given, strict=True)
            self.saved_outputs = tuple(own if own == "no" or key in held else "core" for own, key in both)

    def note_weight_grads(self, queue: WeightGradQueue) -> None:
        """Fill in what waits for W after I."""
        warn_if_compiled(queue, self.module, f"block {self.key.block!r}")
        self.weight_grad_bytes = sum(_without(storages(queue.held), self._own).values())

    @property
    def _own(self) -> dict[int, int]:
        return storages([*self.module.parameters(), *self.module.buffers()])

    def _kept_inputs(self) -> list[Tensor]:
        if self.key.recompute:
            return [*self.inputs, *self.samples]
        return [tensor for tensor, needs in zip(self.inputs, self.needs_grad, strict=True) if needs]

    def _measure_usage(self) -> dict[str, Usage]:
        """Allocations while F, B, I and W run; the parameters have their gradients by now, as in a second run."""
        queue = WeightGradQueue()
        with self.meter(self.device) as meter:
            with meter.phase("F"):
                roots = self.forward()
            with meter.phase("B"):
                self.backward(roots)
            del roots
            roots = self.forward()
            with queue, meter.phase("I"):
                self.backward(roots)
            del roots
            with meter.phase("W"):
                queue.run()
        return meter.usage

    def workspace(self, usage: Mapping[str, Usage], given: int) -> int:
        """The most that F, B, I or W takes beyond what the row counts as held while it runs (:func:`workspace_of`)."""
        gradient = sum(gradient.nbytes for _, gradient in self.gradients)
        counts = self.activation_bytes, self.weight_grad_bytes, given, gradient, self._unsaved_bytes
        return workspace_of(usage, *counts)

    def row(self) -> CostRow:
        """The measurements as a row of the profile."""
        medians: dict[str, Any] = {name: self.median(name) for name in TIMES}
        if self.selective_bytes is not None:
            medians["selective_ns"] = int(statistics.median(self.core_times or [0]))
        own = {"block", "phase", "tokens", "times", "core_times", "ring_times", "ring_workspace_bytes"}
        own |= {"saved_inputs", "saved_outputs"}
        return CostRow(
            **self.kept().model_dump(exclude=own),
            **medians,
            repeats=len(self.times),
            spread={name: spread_of(self.series(name)) for name in TIMES},
        )

    def ring(self) -> MeasuredRing | None:
        """What a ring takes more; None where it has no attention of pieces."""
        if self.ring_workspace_bytes is None or not self.ring_times:
            return None
        return MeasuredRing.of(self.ring_times, self.ring_workspace_bytes - self.workspace_bytes)


def needs_of(inputs: Iterable[bool], any_: bool) -> tuple[Saved, ...]:
    """Of each input whether backward needs it; where that needs ``any_`` tensor, a forward once more needs all.

    torch's checkpoint lets go of what a function takes whose backward needs nothing.
    """
    return tuple("yes" if needs else "again" if any_ else "no" for needs in inputs)


def saved_by_kind(benches: Iterable[Bench]) -> dict[Kind, list[SavedTensors]]:
    """What blocks of a kind need of their inputs and outputs, at each size; of what is computed again that is clear."""
    found: dict[Kind, list[SavedTensors]] = defaultdict(list)
    for bench in benches:
        if not bench.key.recompute:
            found[bench.key.kind].append(SavedTensors(bench.saved_inputs, bench.saved_outputs))
    return found


def workspace_of(
    usage: Mapping[str, Usage], held: int, deferred: int, given: int, gradient: int, unsaved: int = 0
) -> int:
    """The most that F, B, I or W takes beyond what counts as held while it runs, its outputs included, in bytes.

    ``given`` of the inputs, and the ``gradient`` of the outputs, were there before anything was counted; I counts as
    holding what F left or what W needs, whichever is more. ``unsaved`` inputs, which backward does not need, are there
    while F runs, though a stage that makes them itself does not count them as held.
    """
    return max(
        0,
        given + usage["F"].peak - held + unsaved,
        given + gradient + usage["B"].peak - held,
        given + gradient + usage["I"].peak - max(held, deferred),
        usage["W"].peak - usage["W"].start,
    )


class CountedCores(TorchFunctionMode):
    """Attention cores inside are run as they are; ``count`` them."""

    count = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function."""
        self.count += func in ATTENTION
        return func(*args, **(kwargs or {}))


class GivenToCores(RecomputedCores):
    """Notes what cores are ``given``, and can run them again."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[Tensor] = []
        self.calls: list[partial[Any]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function; attention in a checkpoint of its own, and noted."""
        if func in ATTENTION:
            self.given += [each for each in (*args, *(kwargs or {}).values()) if isinstance(each, Tensor)]
            self.calls.append(partial(func, *args, **(kwargs or {})))
        return super().__torch_function__(func, types, args, kwargs)

    def run(self) -> None:
        """All of them, as they were called."""
        for call in self.calls:
            call()


def _without(found: dict[int, int], own: dict[int, int]) -> dict[int, int]:
    return {address: size for address, size in found.items() if address not in own}
