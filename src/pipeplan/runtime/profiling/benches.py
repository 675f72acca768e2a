"""What is run again and again: one block at one micro-batch size as a stage runs it, and a model in one piece."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import checkpoint

from pipeplan.files import CostRow, FileModel
from pipeplan.runtime.models.shapes import outputs_of
from pipeplan.runtime.models.spec import Model
from pipeplan.runtime.parallel.weight_grads import WeightGradQueue, warn_if_nothing_waits
from pipeplan.runtime.profiling.instruments import (
    Meter,
    SavedTensors,
    Usage,
    blamed,
    meter_for,
    spread_of,
    steady,
    storages,
    timed,
)
from pipeplan.workload.elements import Bytes, Count, Items, Name, Nanoseconds

__all__ = [
    "TIMES",
    "Bench",
    "KeptRow",
    "RowKey",
    "Time",
    "WholeBench",
    "WholeModelTimes",
    "in_one_piece",
    "measure_whole",
]


Time = Literal["forward_ns", "backward_ns", "input_grad_ns", "weight_grad_ns"]
TIMES: tuple[Time, ...] = ("forward_ns", "backward_ns", "input_grad_ns", "weight_grad_ns")

_Roots = list[tuple[GradientEdge, Tensor]]
"""Where backward begins, and with which gradients."""

_WORTH_A_LOOK = 0.01
"""Times below this share of a block's forward and backward may be as unsteady as they like."""


@dataclass(frozen=True, slots=True)
class RowKey:
    """What is measured: a block at a micro-batch size, one device's share of it among ``shards``."""

    block: str
    size: int
    shards: int = 1
    recompute: bool = False

    @property
    def label(self) -> str:
        """For progress and errors."""
        split = f", split over {self.shards} devices" if self.shards > 1 else ""
        return f"block {self.block!r} at micro-batch size {self.size}{split}{', recomputed' * self.recompute}"


class KeptRow(FileModel):
    """Measurements of one kind of block in one case.

    ``times`` are of each timed run: F, B, I, W in ns.
    """

    block: Name
    microbatch_size: Count
    shards: Count = 1
    recompute: bool = False
    activation_bytes: Bytes
    weight_grad_bytes: Bytes
    workspace_bytes: Bytes
    times: Items[tuple[Nanoseconds, Nanoseconds, Nanoseconds, Nanoseconds]] = ()

    @property
    def key(self) -> RowKey:
        """What was measured."""
        return RowKey(self.block, self.microbatch_size, self.shards, self.recompute)


@dataclass(slots=True, eq=False)
class Bench:
    """One block at one micro-batch size, ready to run again and again.

    ``inputs`` are what it takes of its sources, ``needs_grad`` whether each gets a gradient, ``gradients`` those of
    its outputs, by index. With ``recompute`` (in the key) F keeps its inputs alone, and B and I run it again first.
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
    times: dict[Time, list[int]] = field(default_factory=dict)

    def forward(self) -> _Roots:
        """F: what backward starts from; nothing if no gradient is needed. The outputs themselves are let go of."""
        leaves = [
            tensor.detach().requires_grad_(needs) for tensor, needs in zip(self.inputs, self.needs_grad, strict=True)
        ]
        made = outputs_of(self._run(*leaves, *self.samples))
        assert made is not None, "its shapes are known: tensors come out"
        return [
            (get_gradient_edge(made[index]), gradient)
            for index, gradient in self.gradients
            if made[index].requires_grad
        ]

    def _run(self, *arguments: Tensor) -> object:
        if self.key.recompute:
            return checkpoint(self.module, *arguments, use_reentrant=False)
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
        if keep:
            for name, nanoseconds in zip(TIMES, times, strict=True):
                self.times.setdefault(name, []).append(nanoseconds)

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
        left = repeats - len(self._rows_of_times())
        return warmup + left if left > 0 else 0

    def is_unsteady(self, max_spread: float) -> bool:
        """Whether the spread of one of its times that matter is above the one asked for."""
        floor = _WORTH_A_LOOK * (self.median("forward_ns") + self.median("backward_ns"))
        return any(spread_of(self.times[name]) > max_spread for name in TIMES if self.median(name) > floor)

    def median(self, name: Time) -> int:
        """Of the runs so far, in ns."""
        return int(statistics.median(self.times[name]))

    def _rows_of_times(self) -> list[tuple[int, int, int, int]]:
        """The times of each run; of one that was interrupted while they were noted, nothing."""
        forward, backward, input_grad, weight_grad = (self.times.get(name, []) for name in TIMES)
        return list(zip(forward, backward, input_grad, weight_grad, strict=False))

    def kept(self) -> KeptRow:
        """What there is so far."""
        return KeptRow(
            block=self.key.block,
            microbatch_size=self.key.size,
            shards=self.key.shards,
            recompute=self.key.recompute,
            activation_bytes=self.activation_bytes,
            weight_grad_bytes=self.weight_grad_bytes,
            workspace_bytes=self.workspace_bytes,
            times=tuple(self._rows_of_times()),
        )

    def take_up(self, kept: KeptRow) -> None:
        """Go on from what an earlier measurement kept."""
        self.activation_bytes = kept.activation_bytes
        self.weight_grad_bytes = kept.weight_grad_bytes
        self.workspace_bytes = kept.workspace_bytes
        columns = zip(*kept.times, strict=True) if kept.times else ((),) * len(TIMES)
        self.times = {name: list(column) for name, column in zip(TIMES, columns, strict=True)}

    def measure_memory(self) -> None:
        """Bytes held after F and after I, and what running takes beyond them."""
        with blamed(self.key.label):
            given = self._measure_held()
            usage = self._measure_usage()
        self.workspace_bytes = self._workspace(usage, given)

    def _measure_held(self) -> int:
        """Fill in what waits for B, or for W; returns how much of the former the block was given.

        Held after F are the tensors that autograd saved and the inputs that get a gradient, or with recomputation
        all that the block was given; less what belongs to the module. The output is not among them: whoever takes
        it counts it as an input. Held after I is what the deferred weight gradients need.
        """
        own = storages([*self.module.parameters(), *self.module.buffers()])
        with SavedTensors() as saved:
            roots = self.forward()
        held = _without(storages([*saved.alive(), *self._kept_inputs()]) if roots else {}, own)
        with WeightGradQueue() as queue:
            self.backward(roots)
        warn_if_nothing_waits(queue, self.module, self.key.label)
        self.activation_bytes = sum(held.values())
        self.weight_grad_bytes = sum(_without(storages(queue.held), own).values())
        queue.run()
        given = storages([*self.inputs, *self.samples])
        return sum(size for address, size in held.items() if address in given)

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

    def _workspace(self, usage: dict[str, Usage], given: int) -> int:
        """The most that F, B, I or W takes beyond what the row counts as held while it runs.

        ``given`` bytes of the inputs, and the gradients of the outputs, were there before anything was counted; I
        counts as holding what F left or what W needs, whichever is more. Outputs and gradients of inputs are part
        of the workspace: they leave when the action ends.
        """
        held, deferred = self.activation_bytes, self.weight_grad_bytes
        gradient = sum(gradient.nbytes for _, gradient in self.gradients)
        return max(
            0,
            given + usage["F"].peak - held,
            given + gradient + usage["B"].peak - held,
            given + gradient + usage["I"].peak - max(held, deferred),
            usage["W"].peak - usage["W"].start,
        )

    def row(self) -> CostRow:
        """The measurements as a row of the profile."""
        return CostRow(
            microbatch_size=self.key.size,
            shards=self.key.shards,
            recompute=self.key.recompute,
            forward_ns=self.median("forward_ns"),
            backward_ns=self.median("backward_ns"),
            input_grad_ns=self.median("input_grad_ns"),
            weight_grad_ns=self.median("weight_grad_ns"),
            activation_bytes=self.activation_bytes,
            weight_grad_bytes=self.weight_grad_bytes,
            workspace_bytes=self.workspace_bytes,
            repeats=len(self.times["forward_ns"]),
            spread={name: spread_of(self.times[name]) for name in TIMES},
        )


def _without(found: dict[int, int], own: dict[int, int]) -> dict[int, int]:
    return {address: size for address, size in found.items() if address not in own}


@dataclass(frozen=True, slots=True)
class WholeModelTimes:
    """Times of a model's forward and backward in ns, medians with their spread, and what it holds in between.

    ``retained_bytes`` are the storages that autograd saved and the output's, each once, less parameters and buffers.
    ``allocated_bytes`` is the same by the allocator: what it handed out during the forward and has not got back, and
    the tensors that were there before and are among those saved.
    """

    forward_ns: int
    backward_ns: int
    forward_spread: float
    backward_spread: float
    retained_bytes: int
    allocated_bytes: int


@dataclass(slots=True, eq=False)
class WholeBench:
    """A model ready to run again and again; ``run`` is its forward, and returns a tensor to start backward from.

    ``modules`` have its parameters and buffers, which do not count as held; ``given`` are the tensors of its batch.
    """

    run: Callable[[], Tensor]
    modules: Sequence[nn.Module] = ()
    given: Sequence[Tensor] = ()
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    forward_ns: list[int] = field(default_factory=list)
    backward_ns: list[int] = field(default_factory=list)

    def time(self, *, keep: bool) -> None:
        """One forward and backward; their times are kept unless they warm up."""
        with blamed("the model in one piece"):
            output, forward_ns = timed(self.run, self.device)
            gradient = torch.ones_like(output)
            _, backward_ns = timed(partial(torch.autograd.backward, output, gradient), self.device)
        if keep:
            self.forward_ns.append(forward_ns)
            self.backward_ns.append(backward_ns)

    def result(self) -> WholeModelTimes:
        """Medians of the times so far; the memory is measured now. It needs one timed run at least."""
        with blamed("the model in one piece"):
            retained, given = self._retained()
            allocated = given + self._allocated()
        return WholeModelTimes(
            int(statistics.median(self.forward_ns)),
            int(statistics.median(self.backward_ns)),
            spread_of(self.forward_ns),
            spread_of(self.backward_ns),
            retained,
            allocated,
        )

    def _retained(self) -> tuple[int, int]:
        """Bytes of the storages held after forward, and of those among them that were there before."""
        own = storages(tensor for module in self.modules for tensor in (*module.parameters(), *module.buffers()))
        with SavedTensors() as saved:
            output = self.run()
        held = {key: size for key, size in storages([*saved.alive(), output]).items() if key not in own}
        torch.autograd.backward(output, torch.ones_like(output))  # parameters have gradients from here on
        given = storages(self.given)
        return sum(held.values()), sum(size for key, size in held.items() if key in given)

    def _allocated(self) -> int:
        gc.collect()
        with meter_for(self.device) as meter:
            output = self.run()
            with meter.phase("after forward"):
                pass
            torch.autograd.backward(output, torch.ones_like(output))
            del output
        return meter.usage["after forward"].start


def measure_whole(
    run: Callable[[], Tensor],
    *,
    modules: Sequence[nn.Module] = (),
    given: Sequence[Tensor] = (),
    device: torch.device | str = "cpu",
    repeats: int = 10,
    warmup: int = 3,
) -> WholeModelTimes:
    """Measure a model in one piece.

    To take turns with its blocks, which evens out what disturbs a machine, hand a :class:`WholeBench` to
    ``profile_model`` instead, and take its ``result`` afterwards.

    Args:
        run: the forward; backward starts from the tensor it returns, with a gradient of ones.
        modules: parameters and buffers of these do not count as held.
        given: tensors that are there before; they count as held where autograd saves them.
        device: where it runs.
        repeats: timed runs behind each median.
        warmup: runs before them.

    Raises:
        ExecutionError: it failed.
        InfeasibleError: memory ran out.
    """
    bench = WholeBench(run, modules, given, torch.device(device))
    with steady(bench.device):
        for count in range(warmup + repeats):
            gc.collect()
            bench.time(keep=count >= warmup)
        return bench.result()


def in_one_piece(
    model: Model,
    size: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> WholeBench:
    """All blocks of a model in one graph, on one micro-batch; the sum of its losses, or else the last output."""
    modules = {block.id: model.build(block.id, seed, dtype=dtype, device=device) for block in model.blocks}
    batch = model.mini_batch(size, 0, seed, dtype=dtype, device=device)

    def run() -> Tensor:
        values: dict[str, tuple[Tensor, ...]] = {}
        losses: list[Tensor] = []
        for block in model.blocks:
            inputs = [values[source][index] for source, index in block.inputs]
            made = outputs_of(modules[block.id](*inputs, *(batch[name] for name in block.samples)))
            assert made is not None, "blocks return tensors"
            values[block.id] = made
            losses += made[:1] if block.loss else ()
        return sum(losses[1:], losses[0]) if losses else values[model.blocks[-1].id][0]

    return WholeBench(run, tuple(modules.values()), tuple(batch.values()), torch.device(device))
