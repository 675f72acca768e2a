"""Measuring groups of blocks that kernel backends run: built, compared with eager torch, and timed."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pipeplan.errors import ExecutionError
from pipeplan.files import CostRow, Profile
from pipeplan.runtime.backends.building import BuiltGroup, GroupBuilder, GroupModule
from pipeplan.runtime.backends.comparing import in_one, require_same
from pipeplan.runtime.models.shapes import outputs_of
from pipeplan.runtime.models.spec import Model
from pipeplan.runtime.profiling.benches import Bench, RowKey
from pipeplan.runtime.profiling.build_profile import BlockNode, block_graph_of
from pipeplan.runtime.profiling.forwards import ForwardBench
from pipeplan.runtime.profiling.instruments import saved_tensors, spread_of, steady, timed
from pipeplan.runtime.profiling.measure import measured_source, require_device

_HELD_BYTES = 1 << 30
"""With fewer bytes of values than this, those of another micro-batch size are held, too; so much of built blocks."""

_PASSING_BYTES = 64 << 20
"""At most so much passes the caches between two runs: the parameters of the rest of the model."""


@dataclass(frozen=True, slots=True)
class DescribedBlock:
    """A block for rules: what it takes, its dimensions with the functions that it calls, and a number of its likes."""

    id: str
    kind: str
    inputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    alike: int


class _AsBuilt(nn.Module):
    """A module whose forward a backend runs."""

    def __init__(self, module: nn.Module, built: BuiltGroup) -> None:
        super().__init__()
        self.module, self._call = module, built.call

    def forward(self, *taken: Tensor) -> object:
        """What the group gives."""
        return self._call(*taken)


class _WholeBackwardBench(Bench):
    """Forward and the whole backward: what is compiled has no weight gradients apart."""

    def measure_memory(self) -> None:
        """Bytes held after F, and what F and B take beyond them."""
        with saved_tensors() as saved:
            roots = self.forward()
        given = self.note_activations(roots, saved)
        self.backward(roots)
        with self.meter(self.device) as meter:
            with meter.phase("F"):
                roots = self.forward()
            with meter.phase("B"):
                self.backward(roots)
            del roots
        usage = meter.usage
        nothing = type(usage["F"])(0, 0)
        self.workspace_bytes = self.workspace({**usage, "I": nothing, "W": nothing}, given)

    def time(self, *, keep: bool) -> None:
        """One pass."""
        times = self._time_full()
        if keep:
            self.times.append((*times, 0, 0))

    def row(self) -> CostRow:
        """Without the halves of backward."""
        return CostRow(
            microbatch_size=self.key.size,
            forward_ns=self.median("forward_ns"),
            backward_ns=self.median("backward_ns"),
            activation_bytes=self.activation_bytes,
            workspace_bytes=self.workspace_bytes,
            repeats=len(self.times),
            spread={
                "forward_ns": spread_of(self.series("forward_ns")),
                "backward_ns": spread_of(self.series("backward_ns")),
            },
        )


def difference(
    profile: Profile, model: Model, sizes: Sequence[int], dtype: torch.dtype, *, device: str, inference: bool
) -> str:
    """What a profile is of that is not this model measured here at these micro-batch sizes; empty where nothing is.

    Raises:
        UsageError: there is no such device here.
    """
    here, own = measured_source(dtype, require_device(device)), profile.source
    if profile.name != model.name or profile.is_inference != inference:
        return f"it is of {profile.name}, {profile.mode}"
    if (own.method, own.device, own.dtype) != (here.method, here.device, here.dtype):
        return f"it was {own.method} on {own.device or 'another device'} in {own.dtype or 'another number format'}"
    if other := [name for name, version in here.versions.items() if own.versions.get(name) != version]:
        return f"it was measured with another version of {other[0]}"
    known = {
        node.spec.id: (node.spec.operator, dict(node.spec.dimensions), node.trainable)
        for node in block_graph_of(model, dtype).blocks
    }
    if known != {block.id: (block.operator, dict(block.dimensions), block.parameters) for block in profile.blocks}:
        return "its blocks are others"
    missing = sorted(set(sizes) - set(profile.microbatch_sizes))
    return f"it has no micro-batch size {missing[0]}" if missing else ""


Output = tuple[str, int]
"""A block's output, by its index."""


@dataclass(frozen=True, slots=True)
class WiredGroup:
    """A group as one module, which takes what is ``taken`` of others, and ``samples``, and gives what others take."""

    blocks: tuple[str, ...]
    module: GroupModule
    taken: tuple[Output, ...]
    samples: tuple[str, ...]
    given: tuple[Output, ...]


@dataclass(slots=True)
class _BlockValues:
    """What the blocks of a model give at one micro-batch size, by the kind of block, and the samples."""

    batch: Mapping[str, Tensor]
    outputs: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Of what they give."""
        return sum(tensor.nbytes for made in self.outputs.values() for tensor in made)


class GroupBenches:
    """A model whose groups of blocks are measured.

    Args:
        model: whose blocks.
        dtype: of parameters and activations.
        device: where to run.
        seed: of parameters and samples.
        training: with backward.
        repeats: timed runs of each group.
        warmup: runs before them.
        builders: of each backend.
        tolerances: of each backend, relative to the largest number of eager's output, in float32.
    """

    def __init__(
        self,
        model: Model,
        *,
        dtype: torch.dtype,
        device: str,
        seed: int,
        training: bool,
        repeats: int,
        warmup: int,
        builders: Mapping[str, GroupBuilder],
        tolerances: Mapping[str, float],
    ) -> None:
        self._model, self._dtype, self._device = model, dtype, torch.device(device)
        self._seed, self._training = seed, training
        self._repeats, self._warmup = repeats, warmup
        self._builders, self._tolerances = builders, tolerances
        self._nodes = {node.spec.id: node for node in block_graph_of(model, dtype).blocks}
        self._modules: dict[str, nn.Module] = {}
        self._held = 0
        self._values: dict[int, _BlockValues] = {}
        self._calls: dict[str, frozenset[str]] = {}
        self._readers: dict[tuple[str, int], set[str]] = {}
        for node in self._nodes.values():
            for each in node.spec.inputs:
                self._readers.setdefault(each, set()).add(node.spec.id)

    def described(self, size: int) -> tuple[DescribedBlock, ...]:
        """All blocks; those that are like each other have run once, at a micro-batch size."""
        self._of_size(size)
        numbers = {kind: number for number, kind in enumerate(dict.fromkeys(n.kind for n in self._nodes.values()))}
        return tuple(
            DescribedBlock(
                id_,
                node.spec.operator,
                tuple(source for source, _ in node.spec.inputs),
                {**node.spec.dimensions, "calls": self._calls[node.kind]},
                numbers[node.kind],
            )
            for id_, node in self._nodes.items()
        )

    @property
    def order(self) -> tuple[str, ...]:
        """All blocks, in an order in which they run."""
        return tuple(self._nodes)

    @property
    def training(self) -> bool:
        """Whether groups run backward, too."""
        return self._training

    @property
    def repeats(self) -> int:
        """Timed runs of each group."""
        return self._repeats

    @property
    def device(self) -> torch.device:
        """Where they run."""
        return self._device

    def tolerance(self, backend: str) -> float:
        """How far a backend's numbers may be from eager's, relative to the largest of them, in float32."""
        return self._tolerances[backend]

    @property
    def ends(self) -> frozenset[Output]:
        """Outputs that no block takes: the model's results, and losses."""
        every = ((id_, index) for id_, node in self._nodes.items() for index in node.roots)
        return frozenset(each for each in every if each not in self._readers)

    def batch(self, size: int) -> Mapping[str, Tensor]:
        """The samples of a micro-batch."""
        return self._of_size(size).batch

    @property
    def versions(self) -> dict[str, Mapping[str, str]]:
        """{backend: {library: version}} of what builds groups, beside torch."""
        return {name: each.versions for name, each in self._builders.items()}

    def built(self, wired: WiredGroup, size: int, backend: str) -> BuiltGroup:
        """The group as a backend runs it, compiled for what it takes. Raises ExecutionError where that fails."""
        values = self._of_size(size)
        taken = zip(self._taken(wired, values), self._needs_grad(wired), strict=True)
        inputs = (tensor.requires_grad_(needs) for tensor, needs in taken)
        samples = (values.batch[name] for name in wired.samples)
        try:
            return self._builders[backend].build(wired.module, (*inputs, *samples), training=self._training)
        except Exception as error:
            raise ExecutionError(f"{backend}: {type(error).__name__}: {error}") from error

    def _taken(self, wired: WiredGroup, values: _BlockValues) -> tuple[Tensor, ...]:
        """Tensors of its own such as it takes of others: those that their likes gave."""
        return tuple(values.outputs[self._nodes[source].kind][index].clone() for source, index in wired.taken)

    def _needs_grad(self, wired: WiredGroup) -> tuple[bool, ...]:
        """Whether each of these needs a gradient: in training, if one of the group's blocks says so."""
        needing = {
            each
            for id_ in wired.blocks
            for each, needs in zip(self._nodes[id_].spec.inputs, self._nodes[id_].input_needs_grad, strict=True)
            if needs
        }
        return tuple(self._training and each in needing for each in wired.taken)

    def _of_size(self, size: int) -> _BlockValues:
        """The values of a size, held with those of others as long as these are small."""
        if size not in self._values:
            if sum(each.num_bytes for each in self._values.values()) > _HELD_BYTES:
                self._values.clear()
            batch = self._model.mini_batch(size, 0, self._seed, dtype=self._dtype, device=self._device)
            found = self._values[size] = _BlockValues(batch)
            for id_, node in self._nodes.items():
                if node.kind == id_:
                    found.outputs[id_] = self._run(node, found)
        return self._values[size]

    def _built(self, id_: str) -> nn.Module:
        return self._model.build(id_, self._seed, dtype=self._dtype, device=self._device)

    def _copied(self, node: BlockNode) -> nn.Module:
        """A block as its like has run, so that it has what a first run makes, with parameters of its own.

        Alike blocks with equal parameters a library would merge: of queries, keys and values it computed one. Built
        blocks are kept up to some bytes.
        """
        id_, like = node.spec.id, self._modules[node.kind]
        if id_ in self._modules:
            return copy.deepcopy(self._modules[id_])
        own = copy.deepcopy(like)
        own.load_state_dict(self._built(id_).state_dict())
        self._held += sum(each.nbytes for each in own.parameters())
        if self._held <= _HELD_BYTES:
            self._modules[id_] = copy.deepcopy(own)
        return own

    def _run(self, node: BlockNode, values: _BlockValues) -> tuple[Tensor, ...]:
        id_ = node.spec.id
        if id_ not in self._modules:
            self._modules[id_] = self._built(id_)
        inputs = [values.outputs[self._nodes[source].kind][index] for source, index in node.spec.inputs]
        calls = _CalledNames()
        with torch.no_grad(), calls:
            made = outputs_of(self._modules[id_](*inputs, *(values.batch[name] for name in node.spec.samples)))
        assert made is not None, "its shapes are known: tensors come out"
        self._calls[id_] = frozenset(calls.names)
        return made

    def measure(self, blocks: Sequence[str], size: int, backend: str) -> tuple[CostRow, int | None]:
        """A group's row by a backend, and of a single block what one change between it and eager torch takes, in ns.

        Raises:
            ExecutionError: the backend cannot build or run it, or gives other numbers than eager torch.
        """
        values = self._of_size(size)
        module, bench, made = self._bench(blocks, size, values)
        own = copy.deepcopy(module)
        began = time.perf_counter_ns()
        try:
            built = self._builders[backend].build(own, (*bench.inputs, *bench.samples), training=self._training)
            bench.module = _AsBuilt(own, built)
            with steady(self._device), built.around():
                self._run_once(bench)
                compile_ns = time.perf_counter_ns() - began
                self._compare(module, bench, made, self._tolerances[backend])
                bench.measure_memory()
                self._time(bench)
            change = self._change(module, bench, built) if len(blocks) == 1 else None
        except ExecutionError:
            raise
        except Exception as error:
            raise ExecutionError(f"{type(error).__name__}: {error}") from error
        return bench.row().model_copy(update={"backend": backend, "compile_ns": compile_ns}), change

    def wired(self, blocks: Sequence[str]) -> WiredGroup:
        """A group as one module of its own; of blocks that have run once."""
        inside = {id_: number for number, id_ in enumerate(blocks)}
        nodes = [self._nodes[id_] for id_ in blocks]
        outside = dict.fromkeys(each for node in nodes for each in node.spec.inputs if each[0] not in inside)
        names = dict.fromkeys(name for node in nodes for name in node.spec.samples)
        place = {each: index for index, each in enumerate([*outside, *names])}
        calls = [
            [(inside[each[0]], each[1]) if each[0] in inside else (-1, place[each]) for each in node.spec.inputs]
            + [(-1, place[name]) for name in node.spec.samples]
            for node in nodes
        ]
        given = [
            (node.spec.id, index)
            for node in nodes
            for index in node.roots
            if not (readers := self._readers.get((node.spec.id, index))) or not readers <= inside.keys()
        ]
        modules = [self._copied(node) for node in nodes]
        whole = len(nodes) == len(self._nodes)
        module = GroupModule(modules, calls, [(inside[id_], index) for id_, index in given], whole=whole)
        module.train(modules[0].training)
        return WiredGroup(tuple(blocks), module, tuple(outside), tuple(names), tuple(given))

    def _bench(
        self, blocks: Sequence[str], size: int, values: _BlockValues
    ) -> tuple[GroupModule, Bench, tuple[Tensor, ...]]:
        """The group as one module, the bench in which it runs, and what eager torch makes there."""
        wired = self.wired(blocks)
        module, inputs = wired.module, self._taken(wired, values)
        samples = tuple(values.batch[name] for name in wired.samples)
        with torch.no_grad():
            made = outputs_of(module(*inputs, *samples))
        assert made is not None
        gradients = tuple(
            (number, self._gradient(self._nodes[block], tensor))
            for number, ((block, _), tensor) in enumerate(zip(wired.given, made, strict=True))
            if tensor.is_floating_point()
        )
        kind = _WholeBackwardBench if self._training else ForwardBench
        key = RowKey(blocks[0], size)
        return module, kind(key, module, inputs, self._needs_grad(wired), samples, gradients, self._device), made

    def _gradient(self, node: BlockNode, output: Tensor) -> Tensor:
        """Ones for a loss, else noise."""
        if node.spec.loss:
            return torch.ones_like(output)
        made = torch.randn(output.shape, generator=torch.Generator().manual_seed(self._seed))
        return made.to(output.device, output.dtype)

    def _run_once(self, bench: Bench) -> None:
        """What only a first run makes."""
        if isinstance(bench, ForwardBench):
            bench.give()
        else:
            bench.backward(bench.forward())
            for parameter in bench.module.parameters():
                parameter.grad = None

    def _compare(self, module: nn.Module, bench: Bench, made: Sequence[Tensor], tolerance: float) -> None:
        """Require eager's outputs, which are ``made``, and in training its gradients. Raises ExecutionError."""
        wanted = _numbers(module, bench, training=True) if self._training else made
        require_same(wanted, _numbers(bench.module, bench, training=self._training), tolerance, self._dtype)

    def _time(self, bench: Bench) -> None:
        modules = (self._modules[node.kind] for node in self._nodes.values())
        total = sum(each.nbytes for module in modules for each in module.parameters())
        passing = torch.zeros(min(_PASSING_BYTES, total) // 4, dtype=torch.float32, device=self._device)
        for count in range(self._warmup + self._repeats):
            if self._training:  # gradients are written, parameters are read
                passing.add_(1.0)
            else:
                passing.sum()
            bench.time(keep=count >= self._warmup)

    def _change(self, module: nn.Module, bench: Bench, built: BuiltGroup) -> int:
        """How much longer either takes after the other than after itself, in the mean of both directions."""
        taken = (*bench.inputs, *bench.samples)

        def own() -> object:
            with built.around():
                return bench.module(*taken)

        eager, found = partial(module, *taken), []
        with torch.no_grad(), steady(self._device):
            for _ in range(1 + self._repeats):
                times = [timed(each, self._device)[1] for each in (eager, eager, own, own)]
                found.append(times[0] - times[1] + times[2] - times[3])
        return max(0, round(median(found[1:]) / 2))


class _CalledNames(TorchFunctionMode):
    """Names of the functions and operators of torch that are called inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self._operators = _CalledOperators(self.names)

    def __enter__(self) -> _CalledNames:
        self._operators.__enter__()  # type: ignore[no-untyped-call]  # torch's
        super().__enter__()  # type: ignore[no-untyped-call]  # torch's
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch's
        self._operators.__exit__(*error)  # type: ignore[no-untyped-call]  # torch's

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note and run it."""
        self.names.add(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


class _CalledOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """The same of operators below functions."""

    def __init__(self, names: set[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._names = names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note and run it."""
        self._names.add(func._schema.name.partition("::")[2])
        return func(*args, **(kwargs or {}))


def _numbers(module: nn.Module, bench: Bench, *, training: bool) -> list[Tensor]:
    """A module's outputs, and in training the gradients of its inputs and parameters."""
    leaves = [each.detach().requires_grad_(needs) for each, needs in zip(bench.inputs, bench.needs_grad, strict=True)]
    with torch.set_grad_enabled(training):
        made = outputs_of(module(*leaves, *bench.samples))
        if made is None:
            raise ExecutionError("it gives neither a tensor nor a tuple of tensors")
        parameters = [*module.parameters()]
        pairs = [(made[number], gradient) for number, gradient in bench.gradients if made[number].requires_grad]
        if training and pairs:
            torch.autograd.backward([one for one, _ in pairs], [gradient for _, gradient in pairs])
    gradients = [[each.grad for each in own if each.grad is not None] for own in (leaves, parameters)]
    found = [*made, *gradients[0], *in_one(gradients[1])]
    for each in (*leaves, *parameters):
        each.grad = None
    return [each.detach() for each in found]
