"""Which samples have to be brought from one stage to the devices of another, from what each device works on."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Collection

from pipeplan.model import Hop, Stage

__all__ = ["Deliveries", "deliveries_of", "goes_with", "period_of", "replicas_of", "shares_evenly"]

Deliveries = dict[tuple[int, int], dict[int, int]]
"""{(target device, replica of the source): {micro-batch of the source: samples}}, of one period of both stages."""


def shares_evenly(stage: Stage) -> bool:
    """Whether its replicas have whole samples, equally many."""
    return stage.microbatch_size % stage.replicas == 0


def period_of(source: Stage, target: Stage) -> int:
    """After so many micro-batches of the source both stages begin one together again."""
    return math.lcm(source.microbatch_size, target.microbatch_size) // source.microbatch_size


def replicas_of(stage: Stage) -> dict[int, int]:
    """{device: the replica of the stage that stands there}."""
    return {device: index // stage.shards for index, device in enumerate(stage.devices)}


def deliveries_of(source: Stage, target: Stage) -> Deliveries:
    """What each device of the target works on and did not make itself as a device of the source.

    Both stages are on one route and share their micro-batches evenly over their replicas.
    """
    common, makers = _common_samples(source, target), replicas_of(source)
    found: Deliveries = defaultdict(dict)
    for device, user in replicas_of(target).items():
        for (maker, microbatch), samples in common[user].items():
            if maker != makers.get(device):
                found[device, maker][microbatch] = samples
    return dict(found)


def _common_samples(source: Stage, target: Stage) -> dict[int, Counter[tuple[int, int]]]:
    """{replica of the target: {(replica of the source, micro-batch of the source): samples that both have}}.

    The samples of a period, cut wherever a replica of either stage begins, fall into pieces that are each of one.
    """
    period = math.lcm(source.microbatch_size, target.microbatch_size)
    each, others = (stage.microbatch_size // stage.replicas for stage in (source, target))
    cuts = sorted({*range(0, period, each), *range(0, period, others), period})
    found: dict[int, Counter[tuple[int, int]]] = defaultdict(Counter)
    for begin, end in itertools.pairwise(cuts):
        maker, user = begin // each % source.replicas, begin // others % target.replicas
        found[user][maker, begin // source.microbatch_size] += end - begin
    return found


def goes_with(hop: Hop, microbatches: Collection[int], period: int) -> bool:
    """Whether those of a period's micro-batches go by a hop, and no others, in every period."""
    if hop.run == hop.every:
        return len(microbatches) == period
    going = {m for m in range(period) if hop.first <= m % hop.every < hop.first + hop.run}
    return period % hop.every == 0 and going == set(microbatches)
