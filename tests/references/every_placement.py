"""Every way to place a chain, by enumeration."""

from __future__ import annotations

import itertools

from pipeplan.files import PlacedStage, Placement, Profile


def every_placement(profile: Profile, num_devices: int) -> list[Placement]:
    """Each cut of a chain into stages with each number of replicas that uses all devices."""
    ids, found = [block.id for block in profile.blocks], []
    for count in range(1, min(len(ids), num_devices) + 1):
        for cuts in itertools.combinations(range(1, len(ids)), count - 1):
            ends = [0, *cuts, len(ids)]
            for sizes in itertools.product(range(1, num_devices + 1), repeat=count):
                if sum(sizes) == num_devices:
                    firsts = list(itertools.accumulate(sizes, initial=0))
                    stages = [
                        PlacedStage(
                            blocks=tuple(ids[ends[place] : ends[place + 1]]),
                            devices=tuple(range(firsts[place], firsts[place + 1])),
                            replicas=sizes[place],
                        )
                        for place in range(count)
                    ]
                    found.append(Placement(strategy="drawn", num_devices=num_devices, stages=tuple(stages)))
    return found
