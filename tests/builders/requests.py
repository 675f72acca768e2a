"""Requests of a search, with the devices of a placement that exists."""

from __future__ import annotations

from typing import Any

from pipeplan.files import Placement, Profile
from pipeplan.planning.request import Batch, Request


def request_of(
    profile: Profile, placement: Placement | str, batch: Batch, num_devices: int | None = None, **others: Any
) -> Request:
    """A request; a placement that exists says how many devices there are."""
    count = placement.num_devices if isinstance(placement, Placement) else num_devices
    assert count is not None
    return Request(profile, count, batch, placement, **others)
