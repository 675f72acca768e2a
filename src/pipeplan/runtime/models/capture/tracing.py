"""A module as a list of operators that hold for any number of samples and any floating-point format.

What runs shows sizes and formats as constants. So the module runs twice, with different numbers of samples and in
different formats, and what differs between the two is what depends on them. Of layers that are alike the first runs,
and its operators are repeated for the others.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn.modules.batchnorm import _NormBase

from pipeplan.errors import UsageError
from pipeplan.runtime.models.capture.functionalize import (
    DEVICE,
    DTYPE,
    LEAST,
    WIDER,
    CapturedGraph,
    OpNode,
    SampleCount,
)
from pipeplan.runtime.models.capture.recording import REMEDY, Recorder, as_exported
from pipeplan.runtime.models.capture.repeats import Alike, Tracing, UnlikeLayers, alike_layers, is_inside, without

_SAMPLES = (2, 3)
"""Samples of the two runs; coprime, so that multiples of one are not multiples of the other."""

_FORMATS = (torch.bfloat16, torch.float64)
"""Formats of the two runs; neither is float32, which models ask for by name."""


def trace(module: nn.Module, inputs: Mapping[str, Tensor], name: str) -> CapturedGraph:
    """Export a module twice and merge the two; ``inputs`` are by the names of the forward's arguments.

    Raises UsageError where it cannot be exported, behaves differently for other samples or formats, or does not return
    one tensor.
    """
    odd = [key for key, each in inputs.items() if not isinstance(each, Tensor) or each.ndim == 0]
    if odd or not inputs:
        raise UsageError(
            f"model {name!r}: {f'input {odd[0]!r} is not a tensor with samples' if odd else 'no example input'}; give "
            "at least one example input, each a tensor with samples in its first dimension"
        )
    alike = alike_layers(module)
    while True:
        try:
            return _traced(module, inputs, name, alike)
        except UnlikeLayers as found:
            alike = without(alike, found.first)


def _traced(module: nn.Module, inputs: Mapping[str, Tensor], name: str, alike: Alike) -> CapturedGraph:
    """As :func:`trace`, for layers that are known to be alike. Raises UnlikeLayers."""
    runs = [_run(module, inputs, *each, name, alike) for each in zip(_SAMPLES, _FORMATS, strict=True)]
    (first, output, num_dropouts), (second, _, _) = runs
    pairs = _paired(first, second)
    if pairs is None:
        raise UsageError(
            f"model {name!r} runs different operators for {_SAMPLES[0]} and {_SAMPLES[1]} samples, or in "
            f"{_FORMATS[0]} and {_FORMATS[1]}, so that it cannot be captured; {REMEDY}"
        )
    merge = _Merge({other: one for one, other in pairs if other is not None}, name)
    for one, other in pairs:
        merge(one, other)
    constants = {op.name: op.value for op in second if op.kind == "constant"}  # the first has fewer digits of some
    tensors = {**dict(_named_tensors(module)), **constants}
    return CapturedGraph(tuple(first), output, tensors, num_dropouts)


def _run(
    module: nn.Module, inputs: Mapping[str, Tensor], count: int, dtype: torch.dtype, name: str, alike: Alike
) -> tuple[list[OpNode], OpNode, int]:
    """The operators of the module's forward, in the mode it is in, for ``count`` samples; nothing is computed.

    With the one whose result it returns, and how many calls of functions would drop numbers in training mode.
    """
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    examples = {key: _fake(value, fakes, dtype, (count, *value.shape[1:])) for key, value in inputs.items()}
    absent = {id(tensor): alike[layer] for layer in alike for _, tensor in _named_tensors(module.get_submodule(layer))}
    recorder = Recorder(name, absent)
    replica = _replica(module, fakes, dtype, alike, recorder)
    for kind, named in (
        ("parameter", replica.named_parameters()),
        ("buffer", replica.named_buffers()),
        ("input", examples.items()),
    ):
        for key, tensor in named:
            recorder.give(kind, key, tensor)
    try:
        with torch.inference_mode(), torch.enable_grad(), _untold(), as_exported(name), fakes, recorder:
            made = replica(**examples)
        return recorder.operations, recorder.returned(made), recorder.num_dropouts
    except (UnlikeLayers, UsageError):
        raise
    except Exception as error:
        reason = " ".join((str(error).strip() or type(error).__name__).splitlines()[:2])[:500]
        shapes = {key: list(value.shape) for key, value in examples.items()}
        raise UsageError(
            f"model {name!r} cannot be captured: its forward fails on tensors without data, for inputs {shapes}: "
            f"{type(error).__name__}: {reason}; let it take tensors by name and decide nothing by their values, or "
            f"{REMEDY}"
        ) from error


@contextmanager
def _untold() -> Iterator[None]:
    """Without torch's own report of an operator that fails, since the error says the same."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _replica(
    module: nn.Module, fakes: FakeTensorMode, dtype: torch.dtype, alike: Alike, recorder: Recorder
) -> nn.Module:
    """A copy of the module, in its mode, whose tensors have no data, floating-point ones in the format.

    Something else stands for the layers that are ``alike`` to one that is traced.
    """
    tracing = Tracing(alike, recorder)
    stand_ins: dict[int, Any] = tracing.stand_ins(module)
    for name, tensor in _named_tensors(module):
        if not is_inside(name, alike):
            stand_ins[id(tensor)] = _stand_in(tensor, fakes, dtype)
    replica = copy.deepcopy(module, stand_ins)
    for each in replica.modules():
        for name in _unregistered(each):
            tensor = each.__dict__.pop(name)
            each.register_buffer(name, tensor)
    modules = dict(replica.named_modules())
    for path, each in modules.items():
        if isinstance(each, _NormBase):
            _require_momentum(each, path, recorder.name)
            each.num_batches_tracked = None  # counted for nothing where there is a momentum, and in place
        each.register_forward_pre_hook(partial(recorder.enter, path))
    tracing.watch(replica, module)
    for each in modules.values():
        each.register_forward_hook(recorder.leave)
    return replica


def _require_momentum(norm: _NormBase, path: str, name: str) -> None:
    if norm.training and norm.track_running_stats and norm.momentum is None:
        raise UsageError(
            f"model {name!r}: {path!r} has momentum=None, so its running statistics depend on how often it ran; give "
            "it a momentum, such as 0.1"
        )


def _stand_in(tensor: Tensor, fakes: FakeTensorMode, dtype: torch.dtype) -> Tensor:
    fake = _fake(tensor, fakes, dtype, tensor.shape)
    return nn.Parameter(fake, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


def _fake(tensor: Tensor, fakes: FakeTensorMode, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    with fakes:
        return torch.empty(shape, dtype=dtype if tensor.is_floating_point() else tensor.dtype, device="cpu")


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
    for path, each in module.named_modules():
        for name in _unregistered(each):
            yield f"{path}.{name}" if path else name, getattr(each, name)


def _unregistered(module: nn.Module) -> list[str]:
    """Attributes that are tensors, but neither parameters nor buffers."""
    return [name for name, value in vars(module).items() if isinstance(value, Tensor)]


# Two runs ---------------------------------------------------------------------------------------------------------


def _paired(first: list[OpNode], second: list[OpNode]) -> list[tuple[OpNode, OpNode | None]] | None:
    """Every operation of the first run with that of the second; None if they do not match.

    Conversions to a narrow format may be missing in the second: some models convert only where it is one.
    """
    rest, pairs = iter([*second, None]), list[tuple[OpNode, OpNode | None]]()
    other = next(rest)
    for one in first:
        if other is not None and (one.kind, one.name, str(one.target)) == (other.kind, other.name, str(other.target)):
            pairs.append((one, other))
            other = next(rest)
        elif one.kind == "call" and one.operator == "to" and one.arguments[1:2] == (_FORMATS[0],):
            pairs.append((one, None))
        else:
            return None
    return pairs if other is None else None


class _Merge:
    """Puts markers into the first run where the second differs."""

    def __init__(self, twins: dict[OpNode, OpNode], name: str) -> None:
        self.twins, self.name = twins, name
        self.known = set(twins.values())

    def __call__(self, one: OpNode, other: OpNode | None) -> None:
        """Merge an operation with its twin; a conversion without one is to the model's format."""
        if other is None:
            source = one.arguments[0]
            one.arguments = (source, DTYPE, *one.arguments[2:])
            one.per_sample, one.misplaced = source.per_sample, source.misplaced
            return
        one.arguments = tuple(self._literal(*each, one) for each in zip(one.arguments, other.arguments, strict=True))
        one.keywords = {key: self._literal(value, other.keywords[key], one) for key, value in one.keywords.items()}
        if not isinstance(one.value, Tensor) or one.kind in ("parameter", "buffer", "constant"):
            return
        pairs = list(zip(one.value.shape, other.value.shape, strict=True))
        grows = [index for index, (before, after) in enumerate(pairs) if before != after]
        if 0 in grows and pairs[0][0] * _SAMPLES[1] == pairs[0][1] * _SAMPLES[0]:
            one.per_sample = pairs[0][0] // _SAMPLES[0]
        one.misplaced = bool(grows) and not one.per_sample

    def _literal(self, one: Any, other: Any, op: OpNode) -> Any:
        if isinstance(one, OpNode) and isinstance(other, OpNode):
            return self._matching(one, self.twins[other], op)
        if isinstance(one, tuple | list):
            return [self._literal(*each, op) for each in zip(one, other, strict=True)]
        if isinstance(one, torch.device):
            return DEVICE
        if isinstance(one, torch.dtype) and one != other:
            return {_FORMATS: DTYPE, (torch.float32, _FORMATS[1]): WIDER}.get((one, other)) or self._differing(
                one, other, op
            )
        if type(one) is not type(other) or one != other:
            return self._differing(one, other, op)
        return one

    def _matching(self, one: OpNode, twin: OpNode, op: OpNode) -> OpNode:
        """The operation, if the twin is the same but for conversions that only this run has."""
        source = one
        while source is not twin:
            if source not in self.known and source.kind == "call":
                source = source.arguments[0]
            else:
                self._differing(one.target, twin.target, op)
        return one

    def _differing(self, one: Any, other: Any, op: OpNode) -> Any:
        if isinstance(one, int) and isinstance(other, int) and one * _SAMPLES[1] == other * _SAMPLES[0]:
            return SampleCount(one // _SAMPLES[0])
        if isinstance(one, float) and (one, other) == tuple(torch.finfo(each).min for each in _FORMATS):
            return LEAST
        raise UsageError(
            f"model {self.name!r} cannot be captured: {op.target} in module {op.path or 'at the top'!r} takes {one!r} "
            f"for {_SAMPLES[0]} samples and {other!r} for {_SAMPLES[1]}, not a multiple of them; {REMEDY}"
        )
