"""Counting what a model's blocks do and hold without running them: bytes, and kernels with their FLOPs and traffic.

Blocks run as they do when measured, but on the meta device, whose tensors have shapes and no data. Attention is the one
that the CPU would choose: the meta device's own holds more. (torch's fake tensors, which say that they are on the CPU,
count the same in about three times as long.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
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

from pipeplan.costs.devices import Kernel
from pipeplan.runtime.models.spec import Model
from pipeplan.runtime.parallel.weight_grads import WeightGradQueue, defer_weight_gradients
from pipeplan.runtime.profiling.benches import Bench, RowKey
from pipeplan.runtime.profiling.build_profile import ModelShare
from pipeplan.runtime.profiling.caches import ATTENDED, attended_kernel
from pipeplan.runtime.profiling.closed_forms import CountedBlock, TracedBlock, TracedCore
from pipeplan.runtime.profiling.flops import product_flops
from pipeplan.runtime.profiling.fusion import BlockTrace, FusedTrace, Step, View
from pipeplan.runtime.profiling.instruments import Usage, blamed, saved_tensors, storages
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
) -> Iterator[CountedBlock]:
    """Every kind of block at every size, with its bytes, and its kernels in F, I and W: operators or ``fused``."""
    for key, each in traced(splits, sizes, dtype, recompute, progress, fused=fused).items():
        yield each.counted(key)


def traced(
    splits: Sequence[ModelShare],
    sizes: Sequence[int],
    dtype: torch.dtype,
    recompute: bool = False,
    progress: Progress | None = None,
    *,
    fused: bool = False,
) -> dict[RowKey, TracedBlock]:
    """The traces of every kind of block at every size; arguments are those of :func:`counted`."""
    shapes = tuple(replace(split, model=without_data(split.model, sizes, dtype)) for split in splits)
    benches = Benches(
        *(shapes, recompute, dtype, _META, 0, UnfinishedProfile(), ()),
        lambda _: Tally(fused=fused),
        CountedBench,
    )
    with attention_of_the_cpu(padded=fused):
        benches.fill(sizes, RunCounter(progress, benches.num_of_size * len(sizes)))
    return {bench.key: bench.traced for bench in benches.all if isinstance(bench, CountedBench)}


class CountedBench(Bench):
    """A block that runs as seldom as can be: what F and I hold is noted while allocations are counted."""

    traced: TracedBlock
    outputs: Sequence[int] = ()
    tally: Tally | None = None

    def measure_memory(self) -> None:
        """As measured, on parameters that have their gradients from the start, where measuring runs once before."""
        for parameter in self.module.parameters():
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        queue, core = WeightGradQueue(), None
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
                held = storages([*saved(), *self._kept_inputs()]) if roots else {}
                needed = meter.numbers(storages(saved()) if roots else {})
                if meter.core.num_kernels and not self.key.recompute:
                    core = meter.core.beside(held, meter.number)
                numbers = meter.numbers(held)
                with queue, meter.phase("I"):
                    self.backward(roots)
                self.note_weight_grads(queue)
                waiting = storages(queue.held)
                deferred = meter.numbers({key: size for key, size in waiting.items() if key not in self._own})
                del roots
                with meter.phase("W"):
                    queue.run()
            self.traced = TracedBlock(
                meter.trace,
                numbers,
                frozenset(meter.numbers(self._own)),
                frozenset(meter.numbers(storages([*self.inputs, *self.samples]))),
                deferred,
                tuple(gradient.nbytes for _, gradient in self.gradients),
                core,
                meter.core.shared_bytes,
                meter.core.mixed_bytes,
                meter.core.heads,
                needed,
                tuple(meter.numbers(storages([each])) for each in self.inputs),
                tuple(self.outputs),
                eager=not meter.fused,
            )

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


class _RunningCore:
    """What the attention cores of one forward do: the storages they make, and those they are given, by identity.

    A storage that is released is forgotten, as its identity may come again; of what was given it stays known by its
    number in the trace, as it would have to be held to compute the core again.
    """

    def __init__(self) -> None:
        self.made: dict[int, int] = {}
        self.given: dict[int, int] = {}
        self.released: list[int] = []
        self.num_kernels = self.shared_bytes = self.mixed_bytes = self.heads = 0
        self.running = False

    @contextmanager
    def inside(self, *given: Tensor | None) -> Iterator[_RunningCore]:
        """What runs inside is a core, of these tensors."""
        self.given |= storages(tensor for tensor in given if tensor is not None)
        self.running = True
        yield self
        self.running = False

    def hand_out(self, made: Tensor) -> None:
        """What the core makes is held by those who take it, whether it is computed again or not."""
        self.made.pop(made.untyped_storage()._cdata, None)

    def release(self, key: int, number: int) -> None:
        """A storage is gone, which had a number in the trace."""
        self.made.pop(key, None)
        if self.given.pop(key, None) is not None:
            self.released.append(number)

    def beside(self, held: Container[int], number: Callable[[int, int], int]) -> TracedCore:
        """What of it a forward holds, and what of what it was given that does not, by their numbers."""
        made = (number(key, size) for key, size in self.made.items() if key in held)
        given = (number(key, size) for key, size in self.given.items() if key not in held)
        return TracedCore(tuple(made), (*self.released, *given))


_CORES: list[_RunningCore] = []
"""That of the forward which runs."""


_NORMS = {_aten.native_layer_norm, _aten.native_batch_norm}
"""Whose statistics the CPU keeps in the format of what they are of, and the meta device in float32."""


class Tally(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has its constructors without types
    """Notes in a ``trace`` what every operator reads, makes and does while phases run, ``fused`` or one by one."""

    def __init__(self, *, fused: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # the same
        self.trace, self.fused = BlockTrace(), fused
        self.usage: dict[str, Usage] = {}
        self._numbers: dict[int, int] = {}  # of storages, by identities that may come again
        self._in_phase = False
        self._known: set[int] = set()
        self.core = _RunningCore()

    def counted(self) -> FusedTrace:
        """The kernels of the phases so far, and what is in use."""
        return FusedTrace(self.trace, eager=not self.fused)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Note what runs inside under a name."""
        self._in_phase = True
        if role_of(name) is Role.FORWARD:
            self.core = _RunningCore()
            _CORES.append(self.core)
        begin = self.trace.tick()
        self.trace.phases.append((name, begin, begin))
        yield
        self.trace.phases[-1] = (name, begin, self.trace.tick())
        if role_of(name) is Role.FORWARD:
            _CORES.remove(self.core)
        self._in_phase = False

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
        if not self._in_phase or not (fresh or func._schema.is_mutable):
            return made
        moved = _moved(func, given, outputs)
        kernel = None if _only_reserves(func) else _kernel(func, args, kwargs or {}, made, given, outputs, moved)
        self.core.num_kernels += kernel is not None and self.core.running
        self._note(func, kernel, moved, given, outputs, fresh)  # a collective on the meta device reserves what it makes
        return made

    def _note(
        self,
        func: Any,
        kernel: Kernel | None,
        moved: tuple[int, ...],
        given: list[Tensor],
        outputs: list[Tensor],
        fresh: list[Tensor],
    ) -> None:
        made = {tensor.untyped_storage()._cdata for tensor in fresh}
        written = outputs if not func._schema.is_mutable else [*outputs, *given[:1]]
        self.trace.steps.append(
            Step(
                at=self.trace.tick(),
                phase=len(self.trace.phases) - 1,
                kernel=kernel,
                reads=tuple(map(self._view, given)),
                writes=tuple(dict.fromkeys(map(self._view, written))),
                made=frozenset(self._numbers[key] for key in made),
                fuses=torch.Tag.pointwise in func.tags or func._overloadpacket in _ROWS,
                adds=func._overloadpacket in _ADDS,
                random=torch.Tag.nondeterministic_seeded in func.tags,
                core=self.core.running,
                moved=moved,
            )
        )

    def _view(self, tensor: Tensor) -> View:
        storage = tensor.untyped_storage()
        number = self.number(storage._cdata, storage.nbytes())
        return View(number, (tensor.storage_offset(), tensor.shape, tensor.stride()), tensor.nbytes)

    def number(self, key: int, size: int) -> int:
        """The number of a storage, by its identity."""
        if key not in self._numbers:
            self._numbers[key] = len(self.trace.sizes)
            self.trace.sizes[self._numbers[key]] = size
        return self._numbers[key]

    def numbers(self, found: Mapping[int, int]) -> tuple[int, ...]:
        """The numbers of storages; of those that no kernel has seen only where none is fused with others."""
        return tuple(self.number(*each) for each in found.items() if not self.fused or each[0] in self._numbers)

    def note_outputs(self, made: object) -> list[int]:
        """These are taken by others; [output] their numbers in the trace, -1 of those that are not in it."""
        tensors = [each for each in tree_leaves(made) if isinstance(each, Tensor)]
        self.trace.outputs.update(self._numbers[key] for key in storages(tensors) if key in self._numbers)
        return [self._numbers.get(each.untyped_storage()._cdata, -1) for each in tensors]

    def _allocate(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self._numbers.pop(key, None)
            self.trace.born[self.number(key, size)] = self.trace.tick()
            if self.core.running:
                self.core.made[key] = size
            finalize(storage, self._release, key)

    def _release(self, key: int) -> None:
        self._known.discard(key)
        number = self._numbers.pop(key)
        self.core.release(key, number)
        self.trace.dead[number] = self.trace.tick()


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


def _moved(func: Any, given: list[Tensor], outputs: list[Tensor]) -> tuple[int, ...]:
    """Bytes that an operator reads and writes, tensor by tensor."""
    is_lookup = func._overloadpacket is _aten.embedding
    read = given[1:] + outputs if is_lookup else given  # rows, not the whole table
    return tuple(tensor.nbytes for tensor in (*read, *outputs))


def _kernel(
    func: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    made: Any,
    given: list[Tensor],
    outputs: list[Tensor],
    moved: Iterable[int],
) -> Kernel:
    """An operator's FLOPs, the bytes it reads and writes, and whether matrix units do it."""
    operator = func._overloadpacket
    if operator is ATTENDED:
        return attended_kernel(*args)
    flops = product_flops(func, args, kwargs, made)
    if flops is None:
        form: Literal["", "rows"] = "rows" if operator in _OF_TABLES else ""
        return Kernel(max((tensor.numel() for tensor in outputs), default=0), sum(moved), form=form)
    kernel = Kernel(flops, sum(moved), matrix=True, weights=operator in (_aten.mm, _aten.addmm))
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
