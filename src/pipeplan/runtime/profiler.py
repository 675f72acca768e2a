"""Measuring a model block by block: times, memory, and what travels between blocks.

Every block runs by itself as a stage runs it: its inputs are leaves, and its backward starts from a given gradient.
F and B are timed in one pass; F, I and W in another. The runs of all blocks and sizes take turns, one run of each
per round, so that a slow moment of the machine falls on all of them, and each finds the caches as another left them.
"""

from __future__ import annotations

import gc
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipeplan import __version__
from pipeplan.errors import ExecutionError, InfeasibleError, UsageError
from pipeplan.model import Block, CostRow, Profile, Source
from pipeplan.runtime.footprint import SavedTensors, Usage, meter_for, storages
from pipeplan.runtime.model import BlockSpec, Model
from pipeplan.runtime.modules import WeightGradQueue, warn_if_nothing_waits
from pipeplan.runtime.partial import KeptRow, Partial
from pipeplan.runtime.survey import Survey, SurveyedBlock, survey

__all__ = ["Progress", "profile_model"]

T = TypeVar("T")

Progress = Callable[[int, int, str], None]
"""Called before each run with the runs done, all runs, and what runs now."""

_Time = Literal["forward_ns", "backward_ns", "input_grad_ns", "weight_grad_ns"]
_TIMES: tuple[_Time, ...] = ("forward_ns", "backward_ns", "input_grad_ns", "weight_grad_ns")
_ADAMW_STATES = 2
"""Tensors that AdamW keeps for each parameter, in the parameter's own format."""


def profile_model(
    model: Model,
    microbatch_sizes: Sequence[int],
    *,
    repeats: int = 10,
    warmup: int = 3,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    progress: Progress | None = None,
    partial: Partial | None = None,
) -> Profile:
    """Measure every block of a model for each micro-batch size.

    Blocks that are alike are measured once. Held in memory are one block of each kind with its gradients, and what
    one of them needs to run. A size for which memory runs out is left out, and so are those above it; the profile's
    notes then say so.

    With ``partial`` what was measured is kept in its file every few seconds and when something fails, and a later
    call goes on from there. The file stays until the caller has written the profile.

    Args:
        model: what to measure.
        microbatch_sizes: samples per micro-batch, each at least 1.
        repeats: timed runs behind each median, at least 1.
        warmup: runs of each before them.
        dtype: of parameters and activations.
        device: where to run; times and memory on CUDA are taken on the device.
        seed: of parameters and samples.
        progress: told of every run.
        partial: keeps what was measured.

    Raises:
        UsageError: sizes, repeats or device make no sense, a block cannot be built, or ``partial`` is of another
            model, device or way to measure.
        ExecutionError: a block failed; the text names it and the size.
        InfeasibleError: memory ran out at the smallest size.
    """
    sizes = sorted(set(microbatch_sizes))
    where = _require_usable(sizes, repeats, warmup, device)
    surveyed = survey(model, dtype)
    partial = Partial() if partial is None else partial
    partial.open(_question(model, surveyed, sizes, (repeats, warmup, seed), dtype, where))
    benches = _Benches(model, surveyed, dtype, where, seed, partial)
    rounds = _Rounds(progress, len(surveyed.kinds) * len(sizes) * (1 + warmup + repeats))
    try:
        with _steady(where):
            missing = benches.fill(sizes, rounds)
            rounds.total = rounds.done + sum(bench.runs_left(repeats, warmup) for bench in benches.all)
            missing = benches.time(repeats, warmup, rounds) or missing
    finally:
        benches.keep()
        partial.save()
    costs: dict[str, list[CostRow]] = {}
    for bench in benches.all:
        costs.setdefault(bench.spec.id, []).append(bench.row())
    notes = _notes(surveyed, repeats, warmup, missing)
    return _profile(model, surveyed, costs, _source(dtype, where, notes))


@dataclass(slots=True)
class _Rounds:
    """Counts the runs for whoever wants to see progress."""

    progress: Progress | None
    total: int
    done: int = 0

    def tell(self, what: str) -> None:
        if self.progress is not None:
            self.progress(self.done, self.total, what)
        self.done += 1


@dataclass(slots=True)
class _Benches:
    """All that is measured: one bench per kind of block and micro-batch size, in the order they run."""

    model: Model
    survey: Survey
    dtype: torch.dtype
    device: torch.device
    seed: int
    partial: Partial
    all: list[_Bench] = field(default_factory=list)
    _modules: dict[str, nn.Module] = field(default_factory=dict)

    def fill(self, sizes: Sequence[int], rounds: _Rounds) -> str | None:
        """Build a bench for every kind and size and measure its memory.

        Returns why sizes are missing, if memory did not suffice for all.
        """
        for size in sizes:
            rows: list[_Bench] = []
            try:
                for bench in self._of_size(size):
                    rounds.tell(bench.label)
                    self._measure_memory(bench)
                    rows.append(bench)
            except InfeasibleError as error:
                if not self.all:
                    raise
                return str(error)
            self.all += rows
        return None

    def _measure_memory(self, bench: _Bench) -> None:
        """Measure a bench's memory and keep it, or take both memory and times from what is kept."""
        kept = self.partial.row(bench.spec.id, bench.size)
        if kept is None:
            bench.measure_memory()
            self.partial.put(bench.kept())
        else:
            bench.take_up(kept)

    def time(self, repeats: int, warmup: int, rounds: _Rounds) -> str | None:
        """Run all benches in turns until each has its times.

        Returns why sizes are missing, if memory ran out now at one that fitted before.
        """
        missing = None
        plans = {id(bench): bench.runs_left(repeats, warmup) for bench in self.all}
        for count in range(max(plans.values(), default=0)):
            gc.collect()
            for bench in tuple(self.all):
                if count < plans[id(bench)] and bench in self.all:
                    rounds.tell(bench.label)
                    missing = self._time(bench, keep=count >= warmup) or missing
            if self.partial.is_due:
                self.keep()
                self.partial.save()
        return missing

    def _time(self, bench: _Bench, *, keep: bool) -> str | None:
        try:
            bench.time(keep=keep)
        except InfeasibleError as error:
            fitting = [other for other in self.all if other.size < bench.size]
            if not fitting:
                raise
            self.all = fitting
            return str(error)
        return None

    def keep(self) -> None:
        """Hand what all benches have so far to the partial profile."""
        for bench in self.all:
            self.partial.put(bench.kept())

    def _of_size(self, size: int) -> Iterator[_Bench]:
        """Run the kinds one after another, each on what those before it made, for inputs as they really are."""
        batch = self.model.mini_batch(size, 0, self.seed, dtype=self.dtype, device=self.device)
        outputs: dict[str, Tensor] = {}
        kind_of = {block.spec.id: block.kind for block in self.survey.blocks}
        for block in self.survey.blocks:
            if block.spec.id != block.kind:
                continue
            spec = block.spec
            with _blamed(spec.id, size):
                if spec.id not in self._modules:
                    self._modules[spec.id] = self.model.build(spec.id, self.seed, dtype=self.dtype, device=self.device)
                inputs = tuple(outputs[kind_of[source]] for source, _ in spec.inputs)
                samples = tuple(batch[name] for name in spec.samples)
                with torch.no_grad():
                    output = outputs[spec.id] = self._modules[spec.id](*inputs, *samples)
            gradient = torch.ones_like(output) if spec.loss else self._noise(output)
            yield _Bench(spec, self._modules[spec.id], size, inputs, block.input_needs_grad, samples, gradient)

    def _noise(self, output: Tensor) -> Tensor:
        """A gradient for an output: normal numbers, since those close to zero can be slow."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(output.shape, generator=generator).to(output.device, output.dtype)


@dataclass(slots=True, eq=False)
class _Bench:
    """One block at one micro-batch size, ready to run again and again.

    ``inputs`` are the outputs of its sources, ``needs_grad`` whether each gets a gradient, ``gradient`` is that of
    its output.
    """

    spec: BlockSpec
    module: nn.Module
    size: int
    inputs: tuple[Tensor, ...]
    needs_grad: tuple[bool, ...]
    samples: tuple[Tensor, ...]
    gradient: Tensor
    activation_bytes: int = 0
    weight_grad_bytes: int = 0
    workspace_bytes: int = 0
    times: dict[_Time, list[int]] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """For progress and errors."""
        return f"block {self.spec.id!r} at micro-batch size {self.size}"

    def forward(self) -> GradientEdge | None:
        """F: what backward starts from; None if nothing needs a gradient. The output itself is let go of."""
        leaves = [
            tensor.detach().requires_grad_(needs) for tensor, needs in zip(self.inputs, self.needs_grad, strict=True)
        ]
        output: Tensor = self.module(*leaves, *self.samples)
        return get_gradient_edge(output) if output.requires_grad else None

    def backward(self, root: GradientEdge | None) -> None:
        """B, or I while a queue collects the weight gradients."""
        if root is not None:
            torch.autograd.backward([root], [self.gradient])

    def time(self, *, keep: bool) -> None:
        """Two passes, with full and with split backward; their times are kept unless they warm up."""
        with _blamed(self.spec.id, self.size):
            times = (*self._time_full(), *self._time_split())
        if keep:
            for name, nanoseconds in zip(_TIMES, times, strict=True):
                self.times.setdefault(name, []).append(nanoseconds)

    def _time_full(self) -> tuple[int, int]:
        root, forward_ns = _timed(self.forward, self.gradient.device)
        _, backward_ns = _timed(partial(self.backward, root), self.gradient.device)
        return forward_ns, backward_ns

    def _time_split(self) -> tuple[int, int]:
        root, queue = self.forward(), WeightGradQueue()
        with queue:
            _, input_grad_ns = _timed(partial(self.backward, root), self.gradient.device)
        del root  # the stage has sent the input's gradient away by then
        _, weight_grad_ns = _timed(queue.run, self.gradient.device)
        return input_grad_ns, weight_grad_ns

    def runs_left(self, repeats: int, warmup: int) -> int:
        """Timed runs to come and those to warm up before; 0 if all times are there."""
        left = repeats - len(self._rows_of_times())
        return warmup + left if left > 0 else 0

    def _rows_of_times(self) -> list[tuple[int, int, int, int]]:
        """The times of each run; of one that was interrupted while they were noted, nothing."""
        forward, backward, input_grad, weight_grad = (self.times.get(name, []) for name in _TIMES)
        return list(zip(forward, backward, input_grad, weight_grad, strict=False))

    def kept(self) -> KeptRow:
        """What there is so far."""
        return KeptRow(
            block=self.spec.id,
            microbatch_size=self.size,
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
        columns = zip(*kept.times, strict=True) if kept.times else ((),) * len(_TIMES)
        self.times = {name: list(column) for name, column in zip(_TIMES, columns, strict=True)}

    def measure_memory(self) -> None:
        """Bytes held after F and after I, and what running takes beyond them."""
        with _blamed(self.spec.id, self.size):
            given = self._measure_held()
            usage = self._measure_usage()
        self.workspace_bytes = self._workspace(usage, given)

    def _measure_held(self) -> int:
        """Fill in what waits for B, or for W; returns how much of the former the block was given.

        Held after F are the tensors that autograd saved and the inputs that get a gradient, less what belongs to
        the module. The output is not among them: whoever takes it counts it as an input. Held after I is what
        the deferred weight gradients need.
        """
        own = storages([*self.module.parameters(), *self.module.buffers()])
        with SavedTensors() as saved:
            root = self.forward()
        leaves = [tensor for tensor, needs in zip(self.inputs, self.needs_grad, strict=True) if needs]
        held = _without(storages([*saved.alive(), *leaves]) if root is not None else {}, own)
        with WeightGradQueue() as queue:
            self.backward(root)
        warn_if_nothing_waits(queue, self.module, self.label)
        self.activation_bytes = sum(held.values())
        self.weight_grad_bytes = sum(_without(storages(queue.held), own).values())
        queue.run()
        given = storages([*self.inputs, *self.samples])
        return sum(size for address, size in held.items() if address in given)

    def _measure_usage(self) -> dict[str, Usage]:
        """Allocations while F, B, I and W run; the parameters have their gradients by now, as in a second run."""
        queue = WeightGradQueue()
        with meter_for(self.gradient.device) as meter:
            with meter.phase("F"):
                root = self.forward()
            with meter.phase("B"):
                self.backward(root)
            del root
            root = self.forward()
            with queue, meter.phase("I"):
                self.backward(root)
            del root
            with meter.phase("W"):
                queue.run()
        return meter.usage

    def _workspace(self, usage: dict[str, Usage], given: int) -> int:
        """The most that F, B, I or W takes beyond what the row counts as held while it runs.

        ``given`` bytes of the inputs, and the gradient of the output, were there before anything was counted; I
        counts as holding what F left or what W needs, whichever is more. Outputs and gradients of inputs are part
        of the workspace: they leave when the action ends.
        """
        held, deferred, gradient = self.activation_bytes, self.weight_grad_bytes, self.gradient.nbytes
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
            microbatch_size=self.size,
            forward_ns=self._median("forward_ns"),
            backward_ns=self._median("backward_ns"),
            input_grad_ns=self._median("input_grad_ns"),
            weight_grad_ns=self._median("weight_grad_ns"),
            activation_bytes=self.activation_bytes,
            weight_grad_bytes=self.weight_grad_bytes,
            workspace_bytes=self.workspace_bytes,
            repeats=len(self.times["forward_ns"]),
            spread={name: _spread(self.times[name]) for name in _TIMES},
        )

    def _median(self, name: _Time) -> int:
        return int(statistics.median(self.times[name]))


def _without(found: dict[int, int], own: dict[int, int]) -> dict[int, int]:
    return {address: size for address, size in found.items() if address not in own}


def _timed(work: Callable[[], T], device: torch.device) -> tuple[T, int]:
    """What some work returns, and how long it takes in ns: by the processor's clock, or by events on the device."""
    if device.type == "cuda":
        event: Callable[..., torch.cuda.Event] = torch.cuda.Event
        start, end = event(enable_timing=True), event(enable_timing=True)
        torch.cuda.synchronize(device)
        start.record()
        result = work()
        end.record()
        end.synchronize()
        return result, round(start.elapsed_time(end) * 1e6)
    begin = time.perf_counter_ns()
    result = work()
    return result, time.perf_counter_ns() - begin


def _spread(values: Sequence[int]) -> float:
    """Interquartile range divided by the median; 0 for a single value."""
    median = statistics.median(values)
    if len(values) < 2 or median == 0:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return round((high - low) / median, 4)


@contextmanager
def _blamed(id_: str, size: int) -> Iterator[None]:
    """Say which block, at which size, what goes wrong inside comes from."""
    where = f"block {id_!r} at micro-batch size {size}"
    try:
        yield
    except Exception as error:
        if _is_out_of_memory(error):
            raise InfeasibleError(
                f"memory ran out for {where}: {error}; leave the size out of --microbatch, or lower --sequence"
            ) from error
        raise ExecutionError(f"{where} failed: {type(error).__name__}: {error}") from error


def _is_out_of_memory(error: Exception) -> bool:
    """CUDA has an error of its own; the CPU allocator raises a RuntimeError like any other."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


@contextmanager
def _steady(device: torch.device) -> Iterator[None]:
    """No garbage collection but between rounds, and only of what came since."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def _require_usable(sizes: Sequence[int], repeats: int, warmup: int, device: torch.device | str) -> torch.device:
    if not sizes or sizes[0] < 1:
        raise UsageError(f"micro-batch sizes {list(sizes)}: give at least one, each 1 or more, with --microbatch")
    if repeats < 1 or warmup < 0:
        raise UsageError(f"--repeats {repeats} and --warmup {warmup}: at least 1 timed run and 0 before it")
    try:
        found = torch.device(device)
    except RuntimeError:
        raise UsageError(f"--device {device!r} is not a device; give cpu or cuda") from None
    if found.type not in ("cpu", "cuda"):
        raise UsageError(f"--device {device!r} cannot be measured; give cpu or cuda")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds no CUDA device here; give --device cpu")
    return found


def _profile(model: Model, surveyed: Survey, costs: dict[str, list[CostRow]], source: Source) -> Profile:
    try:
        return Profile(
            name=model.name,
            source=source,
            blocks=tuple(_block(block, costs[block.kind]) for block in surveyed.blocks),
            edges=surveyed.edges,
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"model {model.name!r} does not fit a profile: {place}: {first['msg']}") from error


def _block(block: SurveyedBlock, costs: Sequence[CostRow]) -> Block:
    return Block(
        id=block.spec.id,
        operator=block.spec.operator,
        dimensions=dict(block.spec.dimensions),
        parameter_bytes=block.parameter_bytes,
        optimizer_bytes=_ADAMW_STATES * block.trainable_bytes,
        tied=block.tied,
        costs=tuple(costs),
    )


def _question(
    model: Model,
    surveyed: Survey,
    sizes: Sequence[int],
    runs: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, str]:
    """All that the measurements depend on, by the words an error uses for it."""
    source = _source(dtype, device, "")
    repeats, warmup, seed = map(str, runs)
    return {
        "model": model.name,
        "fingerprint of the model's blocks": surveyed.fingerprint,
        "--microbatch": ",".join(map(str, sizes)),
        "--dtype": source.dtype,
        "device": source.device,
        "--repeats": repeats,
        "--warmup": warmup,
        "--seed": seed,
        **{f"version of {name}": version for name, version in source.versions.items()},
    }


def _source(dtype: torch.dtype, device: torch.device, notes: str) -> Source:
    return Source(
        method="measured",
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        dtype=str(dtype).removeprefix("torch."),
        versions={"pipeplan": __version__, "python": platform.python_version(), "torch": torch.__version__},
        date=datetime.now(UTC).date().isoformat(),
        notes=notes,
    )


def _processor() -> str:
    """The processor's name and how many threads operators use."""
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    except OSError:
        pass  # not Linux
    threads = torch.get_num_threads()
    return f"{name}, {threads} thread{'' if threads == 1 else 's'}"


def _notes(surveyed: Survey, repeats: int, warmup: int, missing: str | None) -> str:
    said = [f"Median of {repeats} runs after {warmup} to warm up, blocks and sizes taking turns."]
    alike = {kind: ids for kind, ids in surveyed.kinds.items() if len(ids) > 1}
    if alike:
        groups = ", ".join(f"{kind} for {len(ids)} blocks" for kind, ids in list(alike.items())[:20])
        said.append(f"Blocks that are alike were measured once: {groups}.")
    said.append("Weight gradients of linear and embedding layers are deferred to W, all others are part of I.")
    said.append("Optimizer state is AdamW's.")
    if missing is not None:
        said.append(f"Larger sizes are missing: {missing[:1000]}.")
    return " ".join(said)
