"""Two towers that meet in a loss, and instructions between them."""

from __future__ import annotations

from pipeplan.costs import build_workload
from pipeplan.files import Block, Cluster, CostRow, Edge, PlacedStage, Placement, Profile, Source
from pipeplan.workload.workload import Workload

TOWERS = {"image.0": 0, "image.1": 1, "text.0": 2, "text.1": 3, "loss": 1}
"""Device of each block."""


def towers_profile() -> Profile:
    """Two blocks for images, two for texts, and a loss of both outputs."""
    rows = tuple(
        CostRow(microbatch_size=size, forward_ns=10 * size, backward_ns=20 * size, activation_bytes=5 * size)
        for size in (1, 2, 4, 8)
    )
    ways = (("image.0", "image.1"), ("text.0", "text.1"), ("image.1", "loss"), ("text.1", "loss"))
    edges = tuple(Edge(source=source, target=target, bytes_per_sample=8, transfer_ns=3) for source, target in ways)
    blocks = tuple(Block(id=name, operator="block", costs=rows) for name in TOWERS)
    return Profile(name="towers", source=Source(method="literature"), blocks=blocks, edges=edges)


def towers(num_microbatches: int = 8, every: int = 1, cluster: Cluster | None = None) -> Workload:
    """Image blocks on devices 0 and 1, text blocks on 2 and 3; the loss on device 1, of ``every`` micro-batches."""
    stages = tuple(
        PlacedStage(blocks=(block,), devices=(device,), microbatch_size=every if block == "loss" else 1)
        for block, device in TOWERS.items()
    )
    placement = Placement(strategy="towers", num_devices=4, stages=stages)
    return build_workload(
        towers_profile(), placement, num_microbatches=num_microbatches, microbatch_size=1, cluster=cluster
    )
