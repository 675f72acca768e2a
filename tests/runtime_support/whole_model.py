"""A model in one piece: what the sum over its blocks is held against."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from pipeplan.runtime.models.shapes import outputs_of
from pipeplan.runtime.models.spec import Batch, Model
from pipeplan.runtime.profiling.instruments import blamed, meter_for, saved_tensors, spread_of, steady, storages, timed


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

    def time(self, keep: bool) -> None:
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
        with saved_tensors() as saved:
            output = self.run()
        held = {key: size for key, size in storages([*saved(), output]).items() if key not in own}
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

    To take turns with its blocks, which evens out what disturbs a machine, hand ``time`` of a :class:`WholeBench` to
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
            bench.time(count >= warmup)
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


def replay(model: Model, modules: Mapping[str, nn.Module], batch: Batch) -> Tensor:
    """Run all blocks of a model in one piece; returns what the last gives."""
    values: dict[str, tuple[Tensor, ...]] = {}
    for block in model.blocks:
        taken = [values[source][index] for source, index in block.inputs]
        made = outputs_of(modules[block.id](*taken, *(batch[key] for key in block.samples)))
        assert made is not None, f"block {block.id!r} returned no tensor"
        values[block.id] = made
    return values[model.blocks[-1].id][-1]
