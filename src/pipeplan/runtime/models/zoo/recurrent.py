"""LSTM (Hochreiter and Schmidhuber 1997; Gers et al. 2000) over frames, with a state for each, as Sak et al. (2014).

Layers, output layer and loss are blocks, each of which can be split in a way of its own. Between them tensors are
[samples, steps, cells].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from pipeplan.runtime.models.spec import BlockSpec, Model, stacked
from pipeplan.runtime.models.zoo.gpt import loss_by_operator, product_by_operator
from pipeplan.runtime.models.zoo.layers import ZooSize, num_targets
from pipeplan.runtime.parallel.sharding import WHOLE, Cut, Shards, Split
from pipeplan.runtime.parallel.split_layers import draw

_GATES = 4


class LongMemoryTile(nn.Module):
    """An LSTM layer, of whose weights devices have tiles: some of the cells, and of what these take some numbers.

    The gates of a cell lie together, so that slices have whole cells. Devices gather the state in every step, or sum
    the gates. Its weight gradients are made with those of its input.
    """

    def __init__(self, inputs: int, cells: int, shards: Shards = WHOLE) -> None:
        super().__init__()
        self.rows, self.columns = (shards.along.get(name, WHOLE) for name in ("rows", "columns"))
        self.cells = cells // self.columns.count
        gates = _GATES * self.cells
        self.input = nn.Parameter(torch.empty(gates, inputs // self.rows.count))
        self.state = nn.Parameter(torch.empty(gates, cells // self.rows.count))
        self.bias = nn.Parameter(torch.zeros(gates))
        draw(self.input, 1 / math.sqrt(inputs))
        draw(self.state, 1 / math.sqrt(cells))

    def forward(self, x: Tensor) -> Tensor:
        """[samples, steps, inputs of this device] to [samples, steps, cells of this device]."""
        output = memory = x.new_zeros(len(x), self.cells)
        outputs = []
        for taken in F.linear(self.columns.shared(x), self.input).unbind(1):
            part = taken + F.linear(self._taken(output), self.state)
            gates = self.rows.summed(part) + self.bias
            keep, add, new, give = gates.reshape(len(x), self.cells, _GATES).unbind(-1)
            memory = keep.sigmoid() * memory + add.sigmoid() * new.tanh()
            output = give.sigmoid() * memory.tanh()
            outputs.append(output)
        return torch.stack(outputs, 1)

    def _taken(self, output: Tensor) -> Tensor:
        """What this device takes of the state of all cells."""
        if self.columns.count == 1:
            return self.rows.sliced(output)
        whole = self.columns.joined(self.rows.shared(output), -1)
        begin, end = self.rows.range(whole.shape[-1])
        return whole[..., begin:end]


@dataclass(frozen=True, slots=True)
class RecurrentSize(ZooSize):
    """LSTM layers of ``cells`` over the ``steps`` of an utterance, each of ``frame`` numbers, and one of ``states``."""

    layers: int
    cells: int
    frame: int
    steps: int
    states: int

    def model(self, name: str) -> Model:
        """The model of this size; nothing is known of shares."""
        return self._model(name, WHOLE)

    def _model(self, name: str, shards: Shards) -> Model:
        """Layers, an output layer and the loss."""
        blocks: list[BlockSpec] = []
        for layer in range(self.layers):
            inputs = self.cells if layer else self.frame
            build = partial(LongMemoryTile, inputs, self.cells)
            weights = ("input", "state")
            block = BlockSpec(
                f"layer{layer}",
                "recurrent",
                build,
                (blocks[-1].id,) if blocks else (),
                () if blocks else ("frames",),
                dimensions={"sequence": self.steps, "inputs": inputs, "cells": self.cells},
                splits={
                    "rows": Split(build, dict.fromkeys(weights, Cut(1)), takes=True),
                    "columns": Split(build, dict.fromkeys((*weights, "bias"), Cut()), gives=True),
                },
            )
            blocks.append(block)
        output = product_by_operator(
            "head.output", self.steps, blocks[-1].id, self.cells, self.states, std=1 / math.sqrt(self.cells)
        )
        blocks += [output, loss_by_operator(output.id, self.steps, self.states)]
        return Model(name, tuple(blocks), partial(stacked, self._sample), num_targets)

    def _sample(self, generator: Generator) -> dict[str, Tensor]:
        """Random frames, whose states raise their first number."""
        states = torch.randint(self.states, (self.steps,), generator=generator)
        frames = torch.randn(self.steps, self.frame, generator=generator)
        frames[:, 0] += states / self.states
        return {"frames": frames, "targets": states}
