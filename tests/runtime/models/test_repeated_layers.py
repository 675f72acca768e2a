"""Alike layers are traced once, and what comes out is what tracing every one of them gives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from pipeplan.runtime.models.capture import tracing
from pipeplan.runtime.models.capture.functionalize import CapturedGraph, OpNode, leaves_of
from pipeplan.runtime.models.capture.repeats import alike_layers
from pipeplan.runtime.models.huggingface import load
from runtime_support.hugging_face import ARGUMENTS, NAMES, SEQUENCE, text
from support.marks import slow_but

DEEP = 4


def deep(name: str) -> str:
    """A family's small configuration with more layers."""
    return text(name, **{key: DEEP for key in ("n_layer", "num_hidden_layers", "num_layers") if key in ARGUMENTS[name]})


def spelled(graph: CapturedGraph) -> list[tuple[object, ...]]:
    """Every call with all that is known of it; operations by when they were made, tensors by name."""
    calls = [op for op in graph.operations if op.kind == "call"]
    places = {op: place for place, op in enumerate(calls)}

    def said(value: object) -> object:
        if isinstance(value, OpNode):
            return places.get(value, (value.kind, value.name, value.needs_grad, value.shape))
        return repr(value)

    return [
        (
            str(op.target),
            [said(each) for each in leaves_of((op.arguments, op.keywords))],
            op.turns,
            op.needs_grad,
            op.per_sample,
            op.misplaced,
            op.shape,
        )
        for op in calls
    ]


@contextmanager
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Mapping[str, str]]]:
    """The layers that were taken for alike in each attempt at a trace."""
    attempts: list[Mapping[str, str]] = []
    traced = tracing._traced

    def noted(module: nn.Module, inputs: Mapping[str, Tensor], name: str, alike: Mapping[str, str]) -> CapturedGraph:
        attempts.append(alike)
        return traced(module, inputs, name, alike)

    with monkeypatch.context() as patch:
        patch.setattr(tracing, "_traced", noted)
        yield attempts


def both(module: nn.Module, inputs: Mapping[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> list[Mapping[str, str]]:
    """Require a trace of alike layers once to be that of all of them; the attempts that it took."""
    with counting(monkeypatch) as attempts:
        once = tracing.trace(module, inputs, "model")
    whole = tracing._traced(module, inputs, "model", {})
    assert spelled(once) == spelled(whole)
    assert (once.tensors.keys(), once.num_dropouts) == (whole.tensors.keys(), whole.num_dropouts)
    return attempts


@slow_but(
    "name",
    NAMES,
    lambda name: name in ("llama", "t5", "mixtral"),
    lambda name: name not in ("gpt2", "clip"),
)
def test_families(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = load(deep(name), sequence=SEQUENCE, meta=True)
    (alike,) = both(found.module, found.inputs, monkeypatch)
    assert len(alike) >= (1 if name in ("clip", "flava") else DEEP - 2)
    assert not set(alike) & set(alike.values())


def test_windows_in_turn_are_two_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    more = {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 5, "layer_types": kinds}
    found = load(text("qwen2", **more), sequence=SEQUENCE, meta=True)
    (alike,) = both(found.module, found.inputs, monkeypatch)
    assert [path.rpartition(".")[2] for path in alike] == ["2", "3"]
    assert len(set(alike.values())) == 2


class Layer(nn.Module):
    def __init__(self, place: int, scaled: bool = False, width: int = 4) -> None:
        super().__init__()
        self.place, self.scaled = place, scaled
        self.inner = nn.Linear(4, width)
        self.outer = nn.Linear(width, 4)

    def forward(self, given: Tensor, mask: Tensor | None = None) -> Tensor:
        made = self.outer(torch.relu(self.inner(given)))
        made = made / (self.place + 1) if self.scaled else made
        return given + (made if mask is None else made * mask)


class Stack(nn.Module):
    def __init__(self, *layers: nn.Module, masked: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.masked = masked

    def forward(self, input: Tensor) -> Tensor:
        for place, layer in enumerate(self.layers):
            input = layer(input, torch.ones_like(input)) if place in self.masked else layer(input)
        return input.sum()


def stack_of(*layers: nn.Module, masked: tuple[int, ...] = ()) -> tuple[nn.Module, dict[str, Tensor]]:
    return Stack(*layers, masked=masked), {"input": torch.ones(2, 4)}


def test_layers_that_use_their_place_are_each_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = both(*stack_of(*(Layer(place, scaled=True) for place in range(4))), monkeypatch)
    assert len(attempts[0]) == 3
    assert not attempts[-1]


def test_a_place_that_nothing_reads_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer alone is given what needs no gradient."""
    attempts = both(*stack_of(*(Layer(place) for place in range(4))), monkeypatch)
    assert [len(alike) for alike in attempts] == [3, 2]


def test_other_sizes_are_other_kinds() -> None:
    module, _ = stack_of(Layer(0), Layer(1, width=8), Layer(2, width=8), Layer(3))
    assert alike_layers(module) == {"layers.2": "layers.1", "layers.3": "layers.0"}


def test_layers_that_share_parameters_are_not_alike() -> None:
    first, second, third = (Layer(place) for place in range(3))
    second.inner.weight = third.inner.weight
    module, _ = stack_of(first, second, third)
    assert alike_layers(module) == {}


def test_a_layer_called_otherwise_is_not_like_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    both(*stack_of(*(Layer(place) for place in range(3)), masked=(1,)), monkeypatch)
