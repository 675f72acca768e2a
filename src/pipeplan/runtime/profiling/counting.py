"""Counting what a model's blocks do and hold without running them: bytes, and kernels with their FLOPs and traffic.

Blocks run as they do when measured, but on the meta device, whose tensors have shapes and no data. Attention is the one
that the CPU would choose: the meta device's own holds more. (torch's fake tensors, which say that they are on the CPU,
count the same in about three times as long.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, Literal, NamedTuple
from weakref import finalize

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from pipeplan.costs.devices import CORE, Kernel, Work
from pipeplan.files import CostRow
from pipeplan.runtime.models.spec import Model
from pipeplan.runtime.parallel.weight_grads import WeightGradQueue, defer_weight_gradients
from pipeplan.runtime.profiling.benches import Bench
from pipeplan.runtime.profiling.build_profile import ModelShare
from pipeplan.runtime.profiling.caches import ATTENDED, attended_kernel
from pipeplan.runtime.profiling.flops import product_flops
from pipeplan.runtime.profiling.fusion import BlockTrace, FusedTrace, Step, View
from pipeplan.runtime.profiling.instruments import Meter, Usage, blamed, saved_tensors, storages
from pipeplan.runtime.profiling.rounds import Benches, Progress, RunCounter, UnfinishedProfile
from pipeplan.workload.kinds import Role, role_of

_META = torch.device("meta")
_aten = torch.ops.aten


def counted(
    splits: Sequence[ModelShare],
    sizes: Sequence[int],
    dtype: torch.dtype,
    recompute: bool = False,
    progress: Progress | None = None,
    *,
    fused: bool = False,
) -> Iterator[tuple[CountedBench, Work]]:
    """Every kind of block at every size, with its bytes, and its kernels in F, I and W: operators or ``fused``."""
    shapes = tuple(replace(split, model=without_data(split.model, sizes, dtype)) for split in splits)
    tallies: list[Tally] = []

    def tally(_: torch.device) -> Meter:
        tallies.append(Tally(BlockTrace() if fused else None))
        return tallies[-1]

    benches = Benches(shapes, recompute, dtype, _META, 0, UnfinishedProfile(), (), tally, CountedBench)
    with attention_of_the_cpu(padded=fused):
        benches.fill(sizes, RunCounter(progress, benches.num_of_size * len(sizes)))
    for bench, found in zip(benches.all, tallies, strict=True):
        bench.times = [(0, 0, 0, 0)]
        assert isinstance(bench, CountedBench)
        bench.shared_bytes, bench.heads = found.core.shared_bytes, found.core.heads
        bench.mixed_bytes = found.core.mixed_bytes
        kernels, core = found.kernels, found.core.kernels
        if found.trace is not None:
            fused_ones = FusedTrace(found.trace)
            kernels, core = fused_ones.kernels, fused_ones.core
        work: Work = {"forward_ns": kernels["F"], "input_grad_ns": kernels["I"], "weight_grad_ns": kernels["W"]}
        yield bench, work if bench.row().selective_ns is None else {**work, CORE: core}


class CountedBench(Bench):
    """A block that runs as seldom as can be: what F and I hold is noted while allocations are counted.

    ``core_bytes`` are less held where its attention core is computed again; None where it has no core.
    ``shared_bytes`` are those of keys and values, which have ``heads`` heads, ``mixed_bytes`` what the core makes.
    ``outputs`` are the numbers of what it gives in the trace of fused kernels.
    """

    outputs: Sequence[int] = ()
    core_bytes: int | None = None
    shared_bytes: int = 0
    mixed_bytes: int = 0
    heads: int = 0
    tally: Tally | None = None

    def row(self) -> CostRow:
        """Times are not known yet."""
        row = super().row()
        if self.core_bytes is None:
            return row
        held = row.activation_bytes - max(0, self.core_bytes)
        return row.model_copy(update={CORE: 0, "selective_activation_bytes": held})

    def measure_memory(self) -> None:
        """As measured, on parameters that have their gradients from the start, where measuring runs once before."""
        for parameter in self.module.parameters():
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        queue = WeightGradQueue()
        with blamed(self.key.label):
            with self.meter(self.device) as meter:
                assert isinstance(meter, Tally)
                self.tally = meter
                with meter.phase("F"):
                    roots = self.forward()
                with meter.phase("B"):
                    self.backward(roots)
                del roots
                with meter.phase("F"), saved_tensors() as saved:
                    roots = self.forward()
                given = self.note_activations(roots, saved)
                held = storages([*saved(), *self._kept_inputs()]) if roots else {}
                needed = meter.numbered(storages(saved()) if roots else {})
                if meter.core.kernels and not self.key.recompute:
                    self.core_bytes = meter.core.held_of(held) - meter.core.given_beside(held)
                numbers = meter.numbered(held)
                with queue, meter.phase("I"):
                    self.backward(roots)
                self.note_weight_grads(queue)
                del roots
                with meter.phase("W"):
                    queue.run()
            usage = meter.usage
            if meter.trace is not None:
                usage, given = self._note_fused(FusedTrace(meter.trace), meter, numbers, needed)
            self.workspace_bytes = self.workspace(usage, given)

    def _note_fused(
        self, fused: FusedTrace, meter: Tally, held: Mapping[int, int], needed: Mapping[int, int]
    ) -> tuple[dict[str, Usage], int]:
        """Fill in what fused kernels hold; returns what they have in use, and how much of it the block was given.

        ``held`` is what torch holds, ``needed`` what of it its backward needs.
        """
        own, given = meter.numbered(self._own), meter.numbered(storages([*self.inputs, *self.samples]))
        kept = fused.held({storage: size for storage, size in held.items() if storage not in own}, own)
        self.activation_bytes = sum(kept.values())
        if not self.key.recompute:
            used = fused.held({storage: size for storage, size in needed.items() if storage not in own}, own)
            inputs = [meter.numbered(storages([each])).keys() for each in self.inputs]
            self.note_needed([not used.keys().isdisjoint(each) for each in inputs], bool(needed))
            self.saved_outputs = tuple("yes" if each in used else "no" for each in self.outputs)
        return fused.usage, sum(size for storage, size in kept.items() if storage in given)

    def _run(self, *arguments: Tensor) -> object:
        made = super()._run(*arguments)
        if self.tally is not None:
            self.outputs = self.tally.note_outputs(made)
        return made


class _ModelWithoutData(Model):
    """A model whose modules and batches have shapes and no data."""

    def build(
        self, id_: str, seed: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> nn.Module:
        """A block's module on the meta device."""
        with torch.device("meta"):
            module = self.block(id_).build().to("meta", dtype)
        return defer_weight_gradients(module)


def without_data(model: Model, sizes: Sequence[int], dtype: torch.dtype) -> Model:
    """The model, whose modules and batches have shapes and no data."""
    return _ModelWithoutData(model.name, model.blocks, model.batch, model.predictions, model.tied, model.sharded)


@contextmanager
def attention_of_the_cpu(*, padded: bool = False) -> Iterator[None]:
    """Let attention on the meta device run the operators that it runs on the CPU.

    Where it is ``padded``, values that are narrower than queries, as in latent attention, are padded to their width for
    a fused kernel, as transformers does for FlashAttention-2; the CPU runs them step by step.
    """
    _PADDED.append(padded)
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]  # torch has no types here
    library.impl("scaled_dot_product_attention", _attention, "AutogradMeta")  # type: ignore[no-untyped-call]  # the same
    try:
        yield
    finally:
        _PADDED.pop()
        library._destroy()  # type: ignore[no-untyped-call]  # the same


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """As torch has it for tensors on the CPU: fused if it can be, which the CPU is asked."""
    if _CORES:
        with _CORES[-1].inside(query, key, value, attn_mask) as core:
            core.shared_bytes += key.numel() * key.itemsize + value.numel() * value.itemsize
            core.heads = key.shape[-3]
            made = _core(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
            core.mixed_bytes += made.numel() * made.itemsize
            core.hand_out(made)
        return made
    return _core(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def _core(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    width = value.shape[-1]
    if _PADDED[-1] and width < query.shape[-1]:
        value = torch.nn.functional.pad(value, (0, query.shape[-1] - width))
    fused = _is_fused(
        _Look.of(query),
        _Look.of(key),
        _Look.of(value),
        None if attn_mask is None else _Look.of(attn_mask),
        (dropout_p, is_causal, scale, enable_gqa),
    )
    if not fused:
        math = torch.ops.aten._scaled_dot_product_attention_math
        made: Tensor = math(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]
        return made if width == value.shape[-1] else made[..., :width]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        shown = (torch.scalar_tensor(each, dtype=query.dtype, device=query.device) for each in (0.0, -torch.inf))
        attn_mask = torch.where(attn_mask, next(shown), next(shown))
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    made = flash(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return made if width == value.shape[-1] else made[..., :width]


_PADDED = [False]
"""Whether the attention that runs pads values."""


class _Look(NamedTuple):
    """What the choice of an attention depends on of a tensor."""

    shape: torch.Size
    is_dense: bool
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> _Look:
        return cls(tensor.shape, tensor.stride(-1) == 1, tensor.dtype, tensor.requires_grad)

    def tensor(self) -> Tensor:
        """One on the CPU that looks so, and shows a single row again and again."""
        row = torch.zeros(self.shape[-1] if self.is_dense else 1, dtype=self.dtype, requires_grad=self.requires_grad)
        return row.expand(self.shape)


@cache
def _is_fused(query: _Look, key: _Look, value: _Look, mask: _Look | None, rest: tuple[Any, ...]) -> bool:
    dropout_p, is_causal, scale, enable_gqa = rest
    with _disable_current_modes(), torch.device("cpu"):
        shown = (query.tensor(), key.tensor(), value.tensor(), None if mask is None else mask.tensor())
        choice = torch._fused_sdp_choice(*shown, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    return bool(choice == SDPBackend.FLASH_ATTENTION.value)


class _TracedCore:
    """What the attention cores of one forward do: their kernels, the storages they make, and those they are given.

    A storage that is released is forgotten, as its identity may come again; of what was given its bytes are counted, as
    they would have to be held to compute the core again.
    """

    def __init__(self) -> None:
        self.kernels: list[Kernel] = []
        self.made: dict[int, int] = {}
        self.given: dict[int, int] = {}
        self.shared_bytes = self.mixed_bytes = self.heads = 0
        self.released = 0
        self.running = False

    @contextmanager
    def inside(self, *given: Tensor | None) -> Iterator[_TracedCore]:
        """What runs inside is a core, of these tensors."""
        self.given |= storages(tensor for tensor in given if tensor is not None)
        self.running = True
        yield self
        self.running = False

    def hand_out(self, made: Tensor) -> None:
        """What the core makes is held by those who take it, whether it is computed again or not."""
        self.made.pop(made.untyped_storage()._cdata, None)

    def release(self, key: int) -> None:
        """A storage is gone."""
        self.made.pop(key, None)
        self.released += self.given.pop(key, 0)

    def held_of(self, held: Mapping[int, int]) -> int:
        """Bytes of what a forward holds that only its cores need."""
        return sum(size for key, size in self.made.items() if key in held)

    def given_beside(self, held: Mapping[int, int]) -> int:
        """Bytes that cores are given and a forward does not hold."""
        return self.released + sum(size for key, size in self.given.items() if key not in held)


_CORES: list[_TracedCore] = []
"""That of the forward which runs."""


_NORMS = {_aten.native_layer_norm, _aten.native_batch_norm}
"""Whose statistics the CPU keeps in the format of what they are of, and the meta device in float32."""


class Tally(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has its constructors without types
    """Notes every operator's work, and the bytes in use, while phases run; in a ``trace``, what it reads and makes."""

    def __init__(self, trace: BlockTrace | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # the same
        self.trace = trace
        self._numbers: dict[int, int] = {}  # of storages, by identities that may come again
        self.usage: dict[str, Usage] = {}
        self.kernels: dict[str, list[Kernel]] = {}
        self._phase: list[Kernel] | None = None
        self._in_use = self._peak = 0
        self._known: set[int] = set()
        self.core = _TracedCore()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what runs inside under a name."""
        start, self._peak = self._in_use, self._in_use
        self._phase = self.kernels[name] = []
        if role_of(name) is Role.FORWARD:
            self.core = _TracedCore()
            _CORES.append(self.core)
        begin = 0 if self.trace is None else self.trace.tick()
        if self.trace is not None:
            self.trace.phases.append((name, begin, begin))
        yield
        if self.trace is not None:
            self.trace.phases[-1] = (name, begin, self.trace.tick())
        if role_of(name) is Role.FORWARD:
            _CORES.remove(self.core)
        self._phase = None
        self.usage[name] = Usage(start, self._peak)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator and note it."""
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        known = {tensor.untyped_storage()._cdata for tensor in given}
        made = func(*args, **(kwargs or {}))
        if func._overloadpacket in _NORMS and args[0].is_meta:
            made = (made[0], *(each.to(args[0].dtype) for each in made[1:]))
        outputs = [each for each in tree_leaves(made) if isinstance(each, Tensor)]
        fresh = [each for each in outputs if each.untyped_storage()._cdata not in known]
        for tensor in fresh:
            self._allocate(tensor)
        if self._phase is None or not (fresh or func._schema.is_mutable):
            return made
        kernel = None if _only_reserves(func) else _kernel(func, args, kwargs or {}, made, given, outputs)
        if kernel is not None:
            self._phase.append(kernel)
            if self.core.running:
                self.core.kernels.append(kernel)
        if self.trace is not None:  # a collective on the meta device reserves what it makes
            self._note(self.trace, func, kernel, given, outputs, fresh)
        return made

    def _note(
        self,
        trace: BlockTrace,
        func: Any,
        kernel: Kernel | None,
        given: list[Tensor],
        outputs: list[Tensor],
        fresh: list[Tensor],
    ) -> None:
        made = {tensor.untyped_storage()._cdata for tensor in fresh}
        written = outputs if not func._schema.is_mutable else [*outputs, *given[:1]]
        trace.steps.append(
            Step(
                at=trace.tick(),
                phase=len(trace.phases) - 1,
                kernel=kernel,
                reads=tuple(map(self._view, given)),
                writes=tuple(dict.fromkeys(map(self._view, written))),
                made=frozenset(self._numbers[key] for key in made),
                fuses=torch.Tag.pointwise in func.tags or func._overloadpacket in _ROWS,
                adds=func._overloadpacket in _ADDS,
                random=torch.Tag.nondeterministic_seeded in func.tags,
                core=self.core.running,
            )
        )

    def _view(self, tensor: Tensor) -> View:
        storage = tensor.untyped_storage()
        number = self._number(storage._cdata, storage.nbytes())
        return View(number, (tensor.storage_offset(), tensor.shape, tensor.stride()), tensor.nbytes)

    def _number(self, key: int, size: int) -> int:
        """The number of a storage, by its identity."""
        assert self.trace is not None
        if key not in self._numbers:
            self._numbers[key] = len(self.trace.sizes)
            self.trace.sizes[self._numbers[key]] = size
        return self._numbers[key]

    def numbered(self, found: Mapping[int, int]) -> dict[int, int]:
        """Bytes of storages by their numbers in the trace, of those that are in it."""
        return {self._numbers[key]: size for key, size in found.items() if key in self._numbers}

    def note_outputs(self, made: object) -> list[int]:
        """These are taken by others; [output] their numbers in the trace, if there is one."""
        tensors = [each for each in tree_leaves(made) if isinstance(each, Tensor)]
        if self.trace is None:
            return []
        self.trace.outputs |= self.numbered(storages(tensors)).keys()
        return [self._numbers.get(each.untyped_storage()._cdata, -1) for each in tensors]

    def _allocate(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self._in_use += size
            if self.trace is not None:
                self._numbers.pop(key, None)
                self.trace.born[self._number(key, size)] = self.trace.tick()
            if self.core.running:
                self.core.made[key] = size
            self._peak = max(self._peak, self._in_use)
            finalize(storage, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._in_use -= size
        self.core.release(key)
        if self.trace is not None:
            self.trace.dead[self._numbers.pop(key)] = self.trace.tick()


_ATTENTION: dict[Any, Literal["attention", "attention_backward"]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: "attention",
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: "attention_backward",
}
_OF_TABLES = {
    _aten.embedding,
    _aten.embedding_dense_backward,
    _aten.gather,
    _aten.index,
    _aten.index_add,
    _aten.index_put,
    _aten.index_select,
    _aten.scatter,
    _aten.scatter_add,
}
"""Operators on rows of a table that indices name."""
_PRODUCTS = {_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm}
_ADDS = {_aten.add, _aten.add_}
_ROWS = {
    _aten._log_softmax,
    _aten._log_softmax_backward_data,
    _aten._softmax,
    _aten._softmax_backward_data,
    _aten._to_copy,
    _aten.amax,
    _aten.amin,
    _aten.cat,
    _aten.copy_,
    _aten.cumsum,
    _aten.logsumexp,
    _aten.mean,
    _aten.native_dropout,
    _aten.native_layer_norm,
    _aten.native_layer_norm_backward,
    _aten.nll_loss_backward,
    _aten.nll_loss_forward,
    _aten.select_backward,
    _aten.slice_backward,
    _aten.sum,
    _aten.var_mean,
}
"""Beside element-wise operators: reductions, and copies that are put together."""


def _only_reserves(func: Any) -> bool:
    return str(func._overloadpacket).split(".")[-1].startswith(("empty", "new_empty"))


def _kernel(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], made: Any, given: list[Tensor], outputs: list[Tensor]
) -> Kernel:
    """An operator's FLOPs, the bytes it reads and writes, and whether matrix units do it."""
    operator = func._overloadpacket
    if operator is ATTENDED:
        return attended_kernel(*args)
    read = given[1:] + outputs if operator is _aten.embedding else given  # rows, not the whole table
    moved = sum(tensor.nbytes for tensor in (*read, *outputs))
    flops = product_flops(func, args, kwargs, made)
    if flops is None:
        form: Literal["", "rows"] = "rows" if operator in _OF_TABLES else ""
        return Kernel(max((tensor.numel() for tensor in outputs), default=0), moved, form=form)
    kernel = Kernel(flops, moved, matrix=True, weights=operator in (_aten.mm, _aten.addmm))
    if (attention := _ATTENTION.get(operator)) is not None:
        return replace(kernel, form=attention, head_size=given[0].shape[-1])
    if "grouped_mm" in str(operator):  # torch's, and what stands for it on the meta device
        weights = sum(tensor.nbytes for tensor in (*given, *outputs) if tensor.ndim == 3)
        kernel = replace(kernel, form="grouped", expert_bytes=weights)
        if given[0].ndim == 2 and given[1].ndim == 3 and len(outputs) == 1:
            (rows, inner), (groups, _, columns) = given[0].shape, given[1].shape
            return replace(kernel, product=(max(1, rows // groups), inner, columns, groups))
    elif operator in _PRODUCTS:
        left, right = given[-2], given[-1]
        return replace(kernel, product=(left.shape[-2], left.shape[-1], right.shape[-1], math.prod(right.shape[:-2])))
    return kernel
