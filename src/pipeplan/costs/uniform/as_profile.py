"""A uniform layout as a profile and its placement: one block for each chunk of layers, on one replica of alike ones.

What a chunk takes is that of the closed forms, so that a schedule and the simulator say what the pipeline makes of it.
"""

from __future__ import annotations

from pipeplan.costs.uniform.step import StepTime, chunk_layers
from pipeplan.costs.uniform.words import Transformer, UniformLayout
from pipeplan.files import Block, CostRow, Edge, PlacedStage, Placement, Profile, Source

SCHEDULES = {"1f1b": "1f1b", "zb-1p": "zb-h1", "zb-2p": "zb-h2", "zb-v": "zb-v"}
"""A layout's schedule -> the classic one; with chunks 1F1B is interleaved."""


def schedule_of(layout: UniformLayout) -> str:
    """The classic schedule of a layout."""
    return "interleaved-1f1b" if layout.schedule == "1f1b" and layout.chunks > 1 else SCHEDULES[layout.schedule]


def profile_of(name: str, model: Transformer, layout: UniformLayout, time: StepTime) -> Profile:
    """One replica of the layout: its chunks as blocks, with the times of one layout, and their placement."""
    stages, count = int(layout.pipeline), int(layout.pipeline * layout.chunks)
    layers = chunk_layers(int(model.layers), stages, int(layout.chunks))
    blocks = []
    for place, number in enumerate(layers):
        head = float(time.head_ns) if place == count - 1 else 0.0
        forward, input_grad, weight_grad = (
            round(number * float(each) + head / 3)
            for each in (time.forward_ns, time.input_grad_ns, time.weight_grad_ns)
        )
        row = CostRow(
            microbatch_size=int(layout.microbatch),
            forward_ns=forward,
            input_grad_ns=input_grad,
            weight_grad_ns=weight_grad,
            backward_ns=input_grad + weight_grad,
        )
        blocks.append(Block(id=f"chunk{place}", operator="layers", dimensions={"layers": max(number, 1)}, costs=(row,)))
    message = round(float(time.message_ns)) if time.waits_for_messages else 0
    edges = [
        Edge(source=f"chunk{place}", target=f"chunk{place + 1}", transfer_ns=message) for place in range(count - 1)
    ]
    v_shape = layout.schedule == "zb-v"
    strategy = "v-shape" if v_shape else "circular" if layout.chunks > 1 else "one-to-one"
    devices = [place if not v_shape or place < stages else count - 1 - place for place in range(count)]
    placed = tuple(
        PlacedStage(blocks=(f"chunk{place}",), devices=(device % stages,)) for place, device in enumerate(devices)
    )
    return Profile(
        name=name,
        source=Source(method="literature", reference="closed forms of a uniform layout"),
        blocks=tuple(blocks),
        edges=tuple(edges),
        placement=Placement(strategy=strategy, num_devices=stages, stages=placed),
    )
