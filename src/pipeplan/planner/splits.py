"""The frontier of a whole model split over devices without a pipeline (TensorOpt's setting)."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass

from pipeplan.frontier.configurations.building import CostModel, CostOptions, cost_model
from pipeplan.frontier.tracking import Tracked, track
from pipeplan.model import Cluster, Profile

__all__ = ["Splits", "split_frontier"]


@dataclass(frozen=True, slots=True)
class Splits:
    """The strategies of a model on so many devices, and what their costs came from."""

    num_devices: int
    model: CostModel
    tracked: Tracked
    seconds: float

    def words(self, point: int) -> str:
        """A strategy in a few words: its most frequent configurations."""
        strategy = self.tracked.strategy(point)
        names = {node.name: node.configurations for node in self.model.graph.nodes}
        counts = Counter(names[name][index] for name, index in strategy.configurations.items())
        most = [f"{name} x{count}" for name, count in counts.most_common(_MOST_WORDS)]
        return ", ".join(most + (["..."] if len(counts) > _MOST_WORDS else []))


_MOST_WORDS = 3


def split_frontier(
    profile: Profile,
    cluster: Cluster | None,
    num_devices: int,
    samples: int,
    *,
    device: str | None = None,
    options: CostOptions | None = None,
    within: float = 0.0,
) -> Splits:
    """Track the frontier of a profile on so many devices, for iterations of one micro-batch of ``samples``.

    ``within`` as in :func:`pipeplan.frontier.tracking.track`.

    Raises:
        UsageError: as :func:`pipeplan.frontier.configurations.building.cost_model`.
    """
    begun = time.monotonic()
    model = cost_model(profile, cluster, num_devices, samples, device=device, options=options or CostOptions())
    return Splits(num_devices, model, track(model.graph, within=within), time.monotonic() - begun)
