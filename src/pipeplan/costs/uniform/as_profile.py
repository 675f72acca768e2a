"""A uniform layout as files: the model's profile with the rows of one layout, its placement, and its cluster.

Rows have the terms of the closed forms, as estimates have them; all else - messages between stages, sums of gradients,
sharded state, the optimizer's step - is what any profile, placement and cluster say.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any, NamedTuple

from pipeplan.costs.uniform.choices import choices
from pipeplan.costs.uniform.layer import WIDTH, LayerCosts, head_of, layer_of, tokens_of
from pipeplan.costs.uniform.state import bytes_of
from pipeplan.costs.uniform.step import again_ns, chunk_layers, gathered_message_ns, layer_ns
from pipeplan.costs.uniform.words import Machine, Number, Transformer, UniformLayout
from pipeplan.files import (
    Block,
    Cluster,
    CostRow,
    Edge,
    PlacedStage,
    Placement,
    Profile,
    Recipe,
    Source,
    TiedParameter,
)
from pipeplan.files.cluster import DeviceKind, LinkLevel
from pipeplan.workload.elements import Again

_SOURCE = Source(method="literature", reference="closed forms of a uniform layout")
_WORDS, _HEAD = "words", "head"


def schedule_of(layout: UniformLayout) -> str:
    """The known schedule of a layout."""
    return "interleaved-1f1b" if layout.schedule == "1f1b" and layout.chunks > 1 else str(layout.schedule)


class _PlannedAgain(NamedTuple):
    """What plans can say of what is computed again: of so many layers of all, or of the cores of all; or neither."""

    layers: float = 0.0
    cores: bool = False

    @classmethod
    def of(cls, layout: UniformLayout) -> _PlannedAgain | None:
        """None: only parts of layers that no plan names."""
        core, *others = layout.again_core, layout.again_up, layout.again_products, layout.again_elementwise
        if not any(others) and core in (0, 1):
            return cls(cores=core == 1)
        return cls(layers=core) if all(each == core for each in others) else None

    def asked(self, layer: int) -> Again:
        """Of one of the layers, which are spread evenly."""
        if self.cores:
            return "selective"
        return int((layer + 1) * self.layers) > int(layer * self.layers)


def profile_of(name: str, model: Transformer, layout: UniformLayout, machine: Machine) -> Profile:
    """The model in blocks: the table of its words, its layers, its head; each with the rows of the layout.

    A layout that computes parts of a layer again which no plan names has that in its rows.
    """
    layer, head = layer_of(model, layout, machine), head_of(model, layout, machine)
    blocks = list(_layers(model, layout, machine, layer))
    whole = model.vocabulary > 0
    apart = layout.zero > 1  # what is divided block by block no block gathers for another
    if whole:
        table = round(float(head.parameters * layout.tensor))
        once = model.tied and apart and layout.pipeline == 1
        logits = _row(layout, (head.forward_ns, head.input_grad_ns, head.weight_grad_ns), 2 * head.saved_bytes)
        words = Block(
            id=_WORDS, operator="embedding", costs=(_row(layout, (0, 0, 0), 0),), parameters=0 if once else table
        )
        blocks = [words, *blocks, Block(id=_HEAD, operator="head", costs=(logits,), parameters=table)]
    tied = TiedParameter(name=_WORDS, blocks=(_WORDS, _HEAD), parameters=blocks[0].parameters)
    size = round(WIDTH * model.sequence * model.hidden)
    return Profile(
        name=name,
        source=_SOURCE,
        tokens_per_sample=int(model.sequence),
        recipe=_recipe(layout),
        step_bytes_per_s=round(machine.bandwidth_bytes_per_s * machine.bandwidth_share) if whole else None,
        blocks=tuple(blocks),
        edges=tuple(
            Edge(source=before.id, target=after.id, bytes_per_sample=size)
            for before, after in zip(blocks, blocks[1:], strict=False)
        ),
        tied=(tied,) if whole and model.tied and not apart else (),
    )


def _recipe(layout: UniformLayout) -> Recipe:
    """The recipe, with gradients in the format that they are summed in."""
    smaller = layout.gradient_bytes < bytes_of(layout.recipe).gradient
    return Recipe(name=layout.recipe, optimizer=layout.optimizer, gradient_dtype="bf16" if smaller else None)


# Layers ---------------------------------------------------------------------------------------------------------------


def _layers(model: Transformer, layout: UniformLayout, machine: Machine, layer: LayerCosts) -> Iterator[Block]:
    """Of a layer alone, which is a model without vocabulary, nothing is kept."""
    whole, shared = model.vocabulary > 0, _sharers(layout)
    dense = float((layer.whole.parameters - layer.experts.parameters) * layout.tensor)
    experts = float(layer.experts.parameters * (shared if shared > 1 else layout.tensor))
    rows = tuple(_rows(model, layout, layer))
    gather = round(float(gathered_message_ns(model, layout, machine)))
    ends = list(accumulate(chunk_layers(int(model.layers), int(layout.pipeline), int(layout.chunks))))[:-1]
    for number in range(int(model.layers)):
        sent, returned = gather * (number in ends), gather * (number + 1 in ends)
        yield Block(
            id=_layer(number),
            operator="layer",
            dimensions={"hidden": int(model.hidden)},
            costs=tuple(_gathering(row, sent, returned) for row in rows) if sent or returned else rows,
            parameters=round(dense + experts) if whole else 0,
            expert_parameters=round(experts) if whole and shared > 1 else 0,
        )


def _layer(number: int) -> str:
    return f"layer{number}"


def _sharers(layout: UniformLayout) -> int:
    """Devices that share experts, those that split each of them included; 1 where they are split as all else."""
    as_all_else = layout.expert == 1 and layout.expert_tensor == layout.tensor
    return 1 if as_all_else else int(layout.expert * layout.expert_tensor)


def _gathering(row: CostRow, forward_ns: int, input_grad_ns: int) -> CostRow:
    """A row of devices that gather what each was sent a part of."""
    return row.model_copy(
        update={
            "forward_ns": row.forward_ns + forward_ns,
            "input_grad_ns": (row.input_grad_ns or 0) + input_grad_ns,
            "backward_ns": (row.backward_ns or 0) + input_grad_ns,
        }
    )


def _rows(model: Transformer, layout: UniformLayout, layer: LayerCosts) -> Iterator[CostRow]:
    """Of a layer: as it is, and where whole layers are computed again such a row."""
    forward, input_grad, weight_grad = layer_ns(layer, layout)
    again, said, held = float(again_ns(layer, layout)), _PlannedAgain.of(layout), float(layer.whole.saved_bytes)
    entering = float(WIDTH * tokens_of(model, layout) * model.hidden)
    entering /= float(layout.tensor) if layout.sequence_parallel else 1.0
    kept, keys = max(float(_kept(layer, layout)), entering), float(layer.context.workspace_bytes)
    experts = {"expert": _sharers(layout), "expert_shards": int(layout.expert_tensor)} if _sharers(layout) > 1 else {}
    if said is None:
        times = forward, input_grad + again, weight_grad
        yield _row(layout, times, kept, held - kept + keys, **experts)
        return
    cores = {"selective_ns": round(again), "selective_activation_bytes": round(min(kept, held))} if said.cores else {}
    yield _row(layout, (forward, input_grad, weight_grad), held, keys, **cores, **experts)
    if said.layers:
        times = forward, input_grad + float(again_ns(layer, layout, whole=True)), weight_grad
        yield _row(layout, times, entering, held - entering + keys, recompute=True, **experts)


def _kept(layer: LayerCosts, layout: UniformLayout) -> Number:
    return (
        (1 - layout.again_core) * layer.core.saved_bytes
        + (1 - layout.again_up) * layer.up.saved_bytes
        + (1 - layout.again_products) * (layer.products.saved_bytes + layer.experts.saved_bytes)
        + (1 - layout.again_elementwise) * layer.elementwise.saved_bytes
    )


def _row(
    layout: UniformLayout, times: tuple[Number, Number, Number], held: Number, workspace: Number = 0, **more: Any
) -> CostRow:
    """A row of the layout's micro-batch; ``times`` are of F, I and W."""
    forward, input_grad, weight_grad = (round(float(each)) for each in times)
    tensor = int(layout.tensor)
    return CostRow(
        microbatch_size=int(layout.microbatch),
        shards=tensor,
        context=int(layout.context),
        sequence_parallel=tensor > 1,  # each device is sent a part, whether it keeps that or gathers it
        forward_ns=forward,
        input_grad_ns=input_grad,
        weight_grad_ns=weight_grad,
        backward_ns=input_grad + weight_grad,
        activation_bytes=round(float(held)),
        workspace_bytes=round(float(workspace)),
        **more,
    )


# Placement and cluster ------------------------------------------------------------------------------------------------


def placement_of(model: Transformer, layout: UniformLayout) -> Placement:
    """The layout's stages: its layers as published layouts cut them, with the tables at both ends."""
    stages, chunks, width = int(layout.pipeline), int(layout.chunks), int(layout.tensor * layout.context * layout.data)
    count = stages * chunks
    v_shape, said = layout.schedule == "zb-v", _PlannedAgain.of(layout)
    said, first, placed = said or _PlannedAgain(), 0, list[PlacedStage]()
    for number, layers in enumerate(chunk_layers(int(model.layers), stages, chunks)):
        own = range(first, first + layers)
        first += layers
        blocks, again = [_layer(each) for each in own], [said.asked(each) for each in own]
        if model.vocabulary > 0 and number == 0:
            blocks, again = [_WORDS, *blocks], [False, *again]
        if model.vocabulary > 0 and number == count - 1:
            blocks, again = [*blocks, _HEAD], [*again, False]
        place = number % stages if not v_shape or number < stages else count - 1 - number
        state = _sharded_state(layout)
        placed.append(
            PlacedStage(
                blocks=tuple(blocks),
                devices=tuple(range(place * width, (place + 1) * width)),
                shards=int(layout.tensor),
                replicas=int(layout.data),
                context=int(layout.context),
                recompute=tuple(again),
                expert=_sharers(layout),
                expert_shards=int(layout.expert_tensor) if _sharers(layout) > 1 else None,
                zero=state[0],
                zero_group=state[1],
            )
        )
    strategy = "v-shape" if v_shape else "circular" if chunks > 1 else "one-to-one"
    return Placement(strategy=strategy, num_devices=stages * width, stages=tuple(placed))


def _sharded_state(layout: UniformLayout) -> tuple[Any, int | None]:
    """Level and group, as stages say them."""
    alone = layout.data * layout.context == 1 or layout.zero_group == 1
    return (0, None) if alone or not layout.zero else (int(layout.zero), int(layout.zero_group))


def cluster_of(name: str, layout: UniformLayout, machine: Machine) -> Cluster:
    """Devices of a machine with the rates that are reached, and as much in the way of compute.

    No stage is on two nodes where it fits into one.
    """
    width = int(layout.tensor * layout.context * layout.data)
    devices, node = width * int(layout.pipeline), int(machine.node)
    if node > width and layout.pipeline > 1:
        node = node // width * width
    step, adapter = round(choices().ring_step_ns), round(machine.adapter_bytes_per_s * machine.bandwidth_share)
    inside = LinkLevel(
        name="node",
        group_size=node,
        latency_ns=step,
        bandwidth_bytes_per_s=round(machine.link_bytes_per_s * machine.bandwidth_share),
    )
    between = LinkLevel(
        name="network",
        group_size=-(-devices // node) * node,
        latency_ns=step,
        bandwidth_bytes_per_s=adapter,
        node_bandwidth_bytes_per_s=adapter * node,
    )
    return Cluster(
        name=name,
        source=_SOURCE,
        devices=(DeviceKind(name="device", count=devices),),
        levels=(inside, between) if devices > node else (inside,),
        contention=choices().contention,
        overlap="all" if layout.overlap_data else "none",
    )
