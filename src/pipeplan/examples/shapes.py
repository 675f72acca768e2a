"""The shapes of the literature: one micro-batch's blocks on D devices, as Tessel's Fig. 1 and 8 draw them.

Chain blocks stand on one device each; *shared* blocks stand on all of them. Every profile carries its placement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pipeplan.errors import UsageError, choose_from
from pipeplan.files import Block, CostRow, Edge, PlacedStage, Placement, Profile, Source
from pipeplan.files.profile import INFERENCE, TRAINING
from pipeplan.units import MAX_NS, format_ns

MAX_DEVICES = 4096
MAX_CHUNKS = 64


@dataclass(frozen=True, slots=True)
class ShapeCosts:
    """What a shape's blocks cost, in ns and bytes.

    A chain block has ``backward_ns``, or ``input_grad_ns`` and ``weight_grad_ns``. For shapes with chunks these,
    and the bytes, are per device and divided among its chunks, so that shapes with and without chunks describe the
    same model. ``comm_ns`` is the latency of every chain edge that changes device; with ``edge_bytes`` instead, which
    are not divided, a cluster's links say what the tensors on all edges take. For ``inference`` there are forwards
    alone, and ``activation_bytes`` are what a block gives.
    """

    forward_ns: int = 1_000_000
    backward_ns: int | None = None
    input_grad_ns: int | None = None
    weight_grad_ns: int | None = None
    shared_forward_ns: int = 1_000_000
    shared_backward_ns: int = 1_000_000
    comm_ns: int = 0
    activation_bytes: int = 1_000_000_000
    weight_grad_bytes: int = 0
    edge_bytes: int = 0
    inference: bool = False

    def full_backward_ns(self) -> int:
        """The whole backward of a chain block: the sum of its parts, as given, or 3 ms; 0 of inference."""
        if self.inference:
            return 0
        if self.input_grad_ns is not None and self.weight_grad_ns is not None:
            return self.input_grad_ns + self.weight_grad_ns
        return 3_000_000 if self.backward_ns is None else self.backward_ns

    def part(self, index: int, parts: int) -> ShapeCosts:
        """The share of one of a device's chunks; the shares add up exactly, the first ones are the larger."""
        whole = self.input_grad_ns is None and not self.inference
        return replace(
            self,
            forward_ns=_share(self.forward_ns, index, parts),
            backward_ns=_share(self.full_backward_ns(), index, parts) if whole else None,
            input_grad_ns=None if self.input_grad_ns is None else _share(self.input_grad_ns, index, parts),
            weight_grad_ns=None if self.weight_grad_ns is None else _share(self.weight_grad_ns, index, parts),
            activation_bytes=_share(self.activation_bytes, index, parts),
            weight_grad_bytes=_share(self.weight_grad_bytes, index, parts),
        )


@dataclass(frozen=True, slots=True)
class _ShapeKind:
    """How to lay a shape out: a builder, where it is drawn, and what it asks of the number of devices."""

    build: Callable[[_ShapeLayout], None]
    reference: str
    notes: str = ""
    even: bool = False
    chunks: int | None = 1  # None: the user chooses


class _ShapeLayout:
    """Collects blocks, edges and stages in topological order."""

    def __init__(self, num_devices: int, chunks: int, costs: ShapeCosts) -> None:
        self.num_devices, self.chunks, self.costs = num_devices, chunks, costs
        self.blocks: list[Block] = []
        self.edges: list[Edge] = []
        self.stages: list[PlacedStage] = []

    def chain(self, devices: Sequence[int], after: str | None = None, prefix: str = "layer", parts: int = 1) -> str:
        """A chain of blocks on these devices, one after another; returns the last one's id."""
        seen: dict[int, int] = {}
        previous_device: int | None = None
        for index, device in enumerate(devices):
            costs = self.costs.part(seen.get(device, 0), parts)
            seen[device] = seen.get(device, 0) + 1
            id_ = f"{prefix}{index}"
            self._add(id_, "layer", (device,), _row(costs))
            if after is not None:
                changes = previous_device is not None and previous_device != device
                self._join(after, id_, self.costs.comm_ns if changes else 0)
            after, previous_device = id_, device
        assert after is not None
        return after

    def shared(self, id_: str, after: Sequence[str] = (), *, holds: bool = False) -> str:
        """A block spread over all devices."""
        row = CostRow(
            microbatch_size=1,
            shards=self.num_devices,
            forward_ns=self.costs.shared_forward_ns,
            backward_ns=None if self.costs.inference else self.costs.shared_backward_ns,
            activation_bytes=self.costs.activation_bytes if holds else 0,
        )
        self._add(id_, "shared", tuple(range(self.num_devices)), row, shared=True)
        for source in after:
            self._join(source, id_, 0)
        return id_

    def _join(self, source: str, target: str, transfer_ns: int) -> None:
        """An edge with a tensor of some bytes, or one that takes a time."""
        size = self.costs.edge_bytes
        self.edges.append(
            Edge(source=source, target=target, bytes_per_sample=size, transfer_ns=None if size else transfer_ns)
        )

    def _add(self, id_: str, operator: str, devices: tuple[int, ...], row: CostRow, *, shared: bool = False) -> None:
        gradients = 0 if self.costs.inference else None
        self.blocks.append(Block(id=id_, operator=operator, shared=shared, gradient_bytes=gradients, costs=(row,)))
        self.stages.append(PlacedStage(blocks=(id_,), devices=devices, shards=len(devices)))


def shape(name: str, num_devices: int, *, chunks: int | None = None, costs: ShapeCosts | None = None) -> Profile:
    """The profile of a shape on ``num_devices`` devices, with its placement.

    Names: ``v`` ``x`` ``m`` ``mllm`` ``nn`` ``k`` ``circular`` ``zbv``. One micro-batch of ``x`` is the pair of a
    micro-batch going down and one going up. ``chunks`` is for ``circular`` only, 2 by default.

    Raises:
        UsageError: an unknown name, a number of devices or chunks the shape does not have, half a split backward, or
            bytes or times that go with another one.
    """
    if name not in SHAPES:
        raise UsageError(f"there is no shape {name!r}; {choose_from(name, list(SHAPES))}")
    kind, costs = SHAPES[name], costs or ShapeCosts()
    _require(name, kind, num_devices, chunks, costs)
    layout = _ShapeLayout(num_devices, kind.chunks or chunks or 2, costs)
    kind.build(layout)
    return Profile(
        name=f"shape-{name}",
        mode=INFERENCE if costs.inference else TRAINING,
        source=Source(method="literature", reference=kind.reference, notes=kind.notes),
        blocks=tuple(layout.blocks),
        edges=tuple(layout.edges),
        placement=Placement(strategy=name, num_devices=num_devices, stages=tuple(layout.stages)),
    )


def _require(name: str, kind: _ShapeKind, num_devices: int, chunks: int | None, costs: ShapeCosts) -> None:
    if not 1 <= num_devices <= MAX_DEVICES:
        raise UsageError(f"shape-{name} stands on 1 to {MAX_DEVICES} devices, not {num_devices}; change --devices")
    if kind.even and num_devices % 2:
        raise UsageError(
            f"shape-{name} has two halves and needs an even number of devices, not {num_devices}; "
            f"give --devices {num_devices + 1}"
        )
    if chunks is not None and kind.chunks is not None:
        raise UsageError(f"--chunks does not apply to shape-{name}, which has {kind.chunks} per device; leave it out")
    if chunks is not None and not 1 <= chunks <= MAX_CHUNKS:
        raise UsageError(f"--chunks must be from 1 to {MAX_CHUNKS}, not {chunks}")
    if costs.edge_bytes and costs.comm_ns:
        raise UsageError("--bytes and --comm both say what a message takes; leave one of them out")
    _require_backward(costs)


def _require_backward(costs: ShapeCosts) -> None:
    given = (costs.backward_ns, costs.input_grad_ns, costs.weight_grad_ns, costs.weight_grad_bytes or None)
    if costs.inference and any(each is not None for each in given):
        raise UsageError(
            "--inference is of forwards alone, and --backward, --input-grad, --weight-grad and --weight-grad-bytes are "
            "of training; leave these out"
        )
    if (costs.input_grad_ns is None) != (costs.weight_grad_ns is None):
        raise UsageError("--input-grad and --weight-grad come together or not at all; give the other one too")
    if costs.backward_ns is not None and costs.input_grad_ns is not None:
        raise UsageError("--backward and --input-grad with --weight-grad say the same twice; give one of them")
    if costs.weight_grad_bytes and costs.input_grad_ns is None:
        raise UsageError(
            "--weight-grad-bytes are held between input and weight gradient; give --input-grad and --weight-grad too"
        )
    if costs.full_backward_ns() > MAX_NS:
        raise UsageError(
            f"--input-grad and --weight-grad together are {format_ns(costs.full_backward_ns())}, above the "
            f"{format_ns(MAX_NS)} a file may state; lower them"
        )


def _share(total: int, index: int, parts: int) -> int:
    return total // parts + (index < total % parts)


def _row(costs: ShapeCosts) -> CostRow:
    return CostRow(
        microbatch_size=1,
        forward_ns=costs.forward_ns,
        backward_ns=None if costs.inference else costs.full_backward_ns(),
        input_grad_ns=costs.input_grad_ns,
        weight_grad_ns=costs.weight_grad_ns,
        activation_bytes=costs.activation_bytes,
        weight_grad_bytes=costs.weight_grad_bytes,
    )


def _v(layout: _ShapeLayout) -> None:
    layout.chain(range(layout.num_devices))


def _x(layout: _ShapeLayout) -> None:
    layout.chain(range(layout.num_devices), prefix="down")
    layout.chain(range(layout.num_devices - 1, -1, -1), prefix="up")


def _m(layout: _ShapeLayout) -> None:
    layout.chain(range(layout.num_devices), after=layout.shared("embedding"))


def _mllm(layout: _ShapeLayout) -> None:
    last = layout.chain(range(layout.num_devices), after=layout.shared("embedding"))
    layout.shared("head", [last])


def _nn(layout: _ShapeLayout) -> None:
    half = layout.num_devices // 2
    encoded = layout.chain(range(half), after=layout.shared("embedding"), prefix="encoder")
    joined = layout.shared("decoder-embedding", [encoded])
    layout.chain(range(half, layout.num_devices), after=joined, prefix="decoder")


def _k(layout: _ShapeLayout) -> None:
    half = layout.num_devices // 2
    text = layout.chain(range(half), prefix="text")
    image = layout.chain(range(half, layout.num_devices), prefix="image")
    layout.shared("cross-encoder", [text, image], holds=True)


def _circular(layout: _ShapeLayout) -> None:
    devices = [stage % layout.num_devices for stage in range(layout.chunks * layout.num_devices)]
    layout.chain(devices, parts=layout.chunks)


def _zbv(layout: _ShapeLayout) -> None:
    down = list(range(layout.num_devices))
    layout.chain([*down, *reversed(down)], parts=2)


_PER_DEVICE = "Costs are given per device and divided among its chunks; the first chunks take the remainders."

SHAPES: dict[str, _ShapeKind] = {
    "v": _ShapeKind(_v, "Tessel (HPCA'24), Fig. 1 (a): V-shape, a chain over the devices"),
    "x": _ShapeKind(
        _x,
        "Tessel (HPCA'24), Fig. 1 (b): X-shape, the bidirectional placement of Chimera (SC'21)",
        notes="One micro-batch is the pair of one going down and one going up, each at full cost.",
    ),
    "m": _ShapeKind(_m, "Tessel (HPCA'24), Fig. 8 (a): M-shape, GPT with its embedding on all devices"),
    "mllm": _ShapeKind(_mllm, "FlexPipe, Fig. 1: MLLM, embedding and head on all devices around a chain"),
    "nn": _ShapeKind(_nn, "Tessel (HPCA'24), Fig. 8 (d): NN-shape, mT5 with its embedding on all devices", even=True),
    "k": _ShapeKind(
        _k, "Tessel (HPCA'24), Fig. 8 (g): K-shape, Flava with two branches and a joint encoder", even=True
    ),
    "circular": _ShapeKind(
        _circular,
        "Megatron-LM (SC'21): interleaved stages, stage s on device s mod D",
        notes=_PER_DEVICE,
        chunks=None,
    ),
    "zbv": _ShapeKind(
        _zbv, "Zero Bubble (ICLR'24): ZB-V, two chunks per device, down then up", notes=_PER_DEVICE, chunks=2
    ),
}
"""Every shape by name."""
