"""What the limits of each target cost on the profiles that ship: rows of the table in docs/export.md.

Four ranks, each of one device, by the clock. ``python benchmarks/targets.py [PROFILE ...]``
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pipeplan
from pipeplan.costs.layers import layer_of
from pipeplan.planning.build_plan import TargetCost
from pipeplan.planning.restrictions import search_targets
from pipeplan.units import format_ns

PROFILES = Path(__file__).parent.parent / "profiles"
SECONDS, RANKS = 7.0, 4


def row(profile: pipeplan.Profile, target: str) -> Iterator[str]:
    """The cells of a target: what a plan takes, and over the best without limits and over the bound."""
    try:
        found = pipeplan.search(profile, devices=RANKS, pp=RANKS, for_=target, time_limit=SECONDS)
    except pipeplan.UsageError as error:
        yield from ("", "", "", str(error).partition(";")[0])
        return
    pipeplan.export(found.plan, target)
    cost = found.cost
    assert isinstance(cost, TargetCost)  # shipped profiles are of training
    yield format_ns(cost.own_ns)
    yield "" if cost.over_free is None else f"{cost.over_free:+.1%}"
    yield f"{cost.over_bound:+.1%}"
    layers = [
        {layer for block in stage.blocks if (layer := layer_of(block)) is not None} for stage in found.plan.stages
    ]
    numbers = ",".join(str(len(own)) for own in layers)
    yield f"{found.plan.placement}, {found.plan.provenance.scheduler}, layers {numbers}"


def main(names: list[str]) -> None:
    """Print a row for every profile and target."""
    for path in sorted(PROFILES.glob("*.json")):
        if names and path.stem not in names:
            continue
        profile = pipeplan.read_profile(path)
        for target in search_targets():
            print(f"| {path.stem} | {target} | {' | '.join(row(profile, target))} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
