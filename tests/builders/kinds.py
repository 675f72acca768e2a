"""Devices of several kinds, of different speeds or with profiles of their own, and requests for them at random."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from builders.profiles import uneven_chain
from builders.requests import request_of
from pipeplan.costs.kinds import for_kinds
from pipeplan.files import Cluster, CostRow, Profile, Source
from pipeplan.files.cluster import DeviceKind
from pipeplan.planning.request import Batch, Request
from references.unlike_devices import Kind, every_layout
from support.layouts import FIXED

MINI_BATCH = 6

TIMES = ("forward_ns", "backward_ns", "input_grad_ns", "weight_grad_ns")
SIZES = ("activation_bytes", "workspace_bytes")


def cluster_of_kinds(*kinds: Kind) -> Cluster:
    """Devices of these kinds, called kind0, kind1, ..."""
    devices = tuple(
        DeviceKind(name=f"kind{number}", count=kind.count, memory_bytes=kind.memory, speed=float(kind.speed))
        for number, kind in enumerate(kinds)
    )
    return Cluster(name="unlike", source=Source(method="estimated"), devices=devices)


def changed(profile: Profile, of_row: Callable[[CostRow], dict[str, Any]]) -> Profile:
    """The model with other costs."""
    blocks = (
        block.model_copy(update={"costs": tuple(row.model_copy(update=of_row(row)) for row in block.costs)})
        for block in profile.blocks
    )
    return profile.model_copy(update={"blocks": tuple(blocks)})


def drawn(profile: Profile, seed: int, *, sizes: bool) -> Profile:
    """Each time between half and three times as long, and each size, where ``sizes``, too."""
    random_ = random.Random(seed)

    def of_row(row: CostRow) -> dict[str, Any]:
        keys = (*TIMES, *(SIZES if sizes else ()))
        known = {key: value for key in keys if (value := getattr(row, key)) is not None}
        return {key: max(1, round(value * random_.uniform(0.5, 3))) for key, value in known.items()}

    return changed(profile, of_row)


def asked_of_kinds(seed: int, most_blocks: int, most_devices: int, *, own_profiles: bool) -> tuple[Request, int | None]:
    """A request on two kinds of devices, of two speeds or each with its profile, and the best layout's iteration in ns.

    None where no layout fits.
    """
    random_ = random.Random(seed)
    devices = random_.randint(2, most_devices)
    first, recompute = random_.randint(1, devices - 1), random_.random() < 0.5
    speeds = ["1", "1"] if own_profiles else random_.sample(["1", "0.4", "2.5", "1.7"], 2)
    memory = [random_.choice([None, 60, 100, 250]) for _ in speeds]
    profile = uneven_chain(seed, random_.randint(2, most_blocks), (1, 2))
    other = drawn(profile, seed, sizes=random_.random() < 0.5) if own_profiles else None
    kinds = [
        Kind(first, speeds[0], memory[0]),
        Kind(devices - first, speeds[1], memory[1], other),
    ]
    best = min(every_layout(profile, kinds, MINI_BATCH, recompute=recompute), default=None)
    cluster = cluster_of_kinds(*kinds)
    joint = profile if other is None else for_kinds(profile, {"kind1": other}, cluster)
    request = request_of(joint, "auto", Batch(MINI_BATCH, 1), devices, cluster=cluster, **FIXED)
    return replace(request, recompute=None if recompute else False), best
