"""What the limits of each target cost on the profiles that ship: rows of the table in docs/export.md.

Counted by work, so that every machine has the same figures. ``python benchmarks/targets.py [PROFILE ...]``
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pipeplan
from pipeplan.planning.restrictions import search_targets
from pipeplan.units import format_ns

PROFILES = Path(__file__).parent.parent / "profiles"
SECONDS = 2.0


def row(profile: pipeplan.Profile, target: str) -> Iterator[str]:
    """The cells of a target: what a plan takes, and over the best without limits and over the bound."""
    ranks = min(4, sum(block.id != "embedding" for block in profile.blocks))
    try:
        found = pipeplan.search(profile, devices=ranks, pp=ranks, for_=target, time_limit=SECONDS, deterministic=True)
    except pipeplan.UsageError as error:
        yield from ("", "", "", str(error).partition(";")[0])
        return
    pipeplan.export(found.plan, target)
    cost = found.cost
    assert cost is not None
    yield format_ns(cost.own_ns)
    yield "" if cost.over_free is None else f"{cost.over_free:+.1%}"
    yield f"{cost.over_bound:+.1%}"
    layers = [sum(block.endswith(("ffn", *"0123456789")) for block in stage.blocks) for stage in found.plan.stages]
    yield f"{found.plan.placement}, {found.plan.provenance.scheduler}, layers {','.join(map(str, layers))}"


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
