"""From rows of blocks that were measured or estimated once for all like them to a profile."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from pydantic import ValidationError

from pipeplan.costs.blocks import state_recipe
from pipeplan.costs.communication import Exchange, Prices
from pipeplan.errors import UsageError
from pipeplan.files import Block, Cluster, CostRow, Profile, Source
from pipeplan.runtime.models.spec import Collective, Model
from pipeplan.runtime.profiling.block_graph import BlockGraph, BlockNode, block_graph_of
from pipeplan.runtime.profiling.rounds import Kind, SharedModel
from pipeplan.workload.kinds import OPTIMIZER

__all__ = ["Price", "costs_of", "dtype_of", "on_threads", "priced_by", "profile_of", "splits_of", "unsplit_of"]

_RECIPE = "adamw"
"""What training is taken to hold of every parameter, a recipe of the catalog."""

_FLOAT32_BYTES = 4

Price = Callable[[Collective, int, int], int]
"""Time in ns of a collective for so many samples among so many devices."""


def dtype_of(name: str) -> torch.dtype:
    """The number format of a name such as ``float32``."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


@contextmanager
def on_threads(count: int | None) -> Iterator[None]:
    """CPU operators inside run on this many threads; None leaves them as they are."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def splits_of(
    model: Model, shards: Sequence[int], dtype: torch.dtype, cluster: Cluster | None
) -> tuple[SharedModel, ...]:
    """The model of one device for each number of devices. Raises UsageError."""
    counts = sorted(set(shards))
    if not counts or counts[0] < 1:
        raise UsageError(f"--shards {list(counts)}: give at least one, each 1 or more")
    if counts[-1] > 1 and model.sharded is None:
        raise UsageError(f"--shards {counts[-1]}: model {model.name!r} does not say how it is split; give --shards 1")
    if cluster is not None and counts[-1] > cluster.num_devices:
        raise UsageError(f"--shards {counts[-1]}: the cluster has {cluster.num_devices} devices")
    models = {count: _share_of(model, count) for count in counts}
    return tuple(SharedModel(count, each, block_graph_of(each, dtype)) for count, each in models.items())


def _share_of(model: Model, count: int) -> Model:
    """One device's share among so many. Raises UsageError that names flag and model."""
    if count == 1 or model.sharded is None:
        return model
    try:
        return model.sharded(count)
    except UsageError as error:
        raise UsageError(f"--shards {count}: model {model.name!r} cannot be split so: {error}") from None


def unsplit_of(splits: Sequence[SharedModel], model: Model, dtype: torch.dtype) -> BlockGraph:
    """The unsplit model, whose sizes are those in a profile."""
    return splits[0].survey if splits[0].shards == 1 else block_graph_of(model, dtype)


def costs_of(
    splits: Sequence[SharedModel], kinds: Mapping[Hashable, Kind], rows: Mapping[Kind, Sequence[CostRow]], price: Price
) -> dict[str, list[CostRow]]:
    """Rows of every block by micro-batch size, shards and recomputation, from the ``rows`` of its kind."""
    found: dict[str, list[CostRow]] = {}
    for split in splits:
        for block in split.survey.blocks:
            for row in rows[kinds[block.likeness]]:
                own = row.model_copy(update={"shards": split.shards})
                found.setdefault(block.spec.id, []).append(_with_collectives(own, block.spec.collectives, price))
    return {id_: sorted(rows, key=lambda row: row.key) for id_, rows in found.items()}


def priced_by(prices: Prices | None, dtype: torch.dtype) -> Price:
    """What collectives cost, whose bytes are those of float32; nothing without prices."""
    if prices is None:
        return lambda collective, samples, devices: 0

    def price(collective: Collective, samples: int, devices: int) -> int:
        size = collective.bytes_per_sample * samples * dtype.itemsize // _FLOAT32_BYTES
        return round(prices(Exchange(collective.operation, size), devices))

    return price


def _with_collectives(row: CostRow, collectives: Sequence[Collective], price: Price) -> CostRow:
    """The row with the time that its collectives take after F, and after I or B."""
    forward, backward = (
        sum(price(each, row.microbatch_size, row.shards) for each in collectives if each.phase == phase)
        for phase in ("F", "I")
    )
    times = {
        "forward_ns": row.forward_ns + forward,
        "backward_ns": (row.backward_ns or 0) + backward + forward * row.recompute,
        "input_grad_ns": (row.input_grad_ns or 0) + backward + forward * row.recompute,
    }
    return row.model_copy(update=times)


def profile_of(model: Model, surveyed: BlockGraph, costs: Mapping[str, Sequence[CostRow]], source: Source) -> Profile:
    """The model's profile. Raises UsageError where its names do not fit one."""
    try:
        return Profile(
            name=model.name,
            source=source,
            blocks=tuple(_block(block, costs[block.spec.id]) for block in surveyed.blocks),
            edges=surveyed.edges,
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"model {model.name!r} does not fit a profile: {place}: {first['msg']}") from error


def _block(block: BlockNode, costs: Sequence[CostRow]) -> Block:
    return Block(
        id=block.spec.id,
        operator=block.spec.operator,
        dimensions=dict(block.spec.dimensions),
        parameter_bytes=block.parameter_bytes,
        optimizer_bytes=state_recipe(_RECIPE).state(block.trainable, block.trainable_bytes)[OPTIMIZER],
        tied=block.tied,
        shared=block.spec.shared,
        costs=tuple(costs),
    )
