"""Plans on a cluster with a tree: the checker counts messages over uplinks apart from what priced them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from builders import folds
from builders.folds import plans_of
from pipeplan.checker import check
from pipeplan.costs.trees import MessageCrowds
from pipeplan.files import Cluster, DeviceKind, LinkLevel, Source
from pipeplan.files.folded import unfolded
from pipeplan.simulator.simulation import simulate
from pipeplan.workload.elements import Dependency

pytestmark = pytest.mark.filterwarnings("error")


def racks(count: int, node: int, *, rails: bool = False) -> Cluster:
    """Racks of two nodes, and uplinks that carry a quarter of what they could send."""
    sizes = node, 2 * node, 2 * node * -(-count // (2 * node)) * 2
    rates, ratios = (10**9, 3 * 10**8, 2 * 10**8), (None, 1.5, 4.0)
    levels = tuple(
        LinkLevel(
            name=name,
            group_size=size,
            latency_ns=5,
            bandwidth_bytes_per_s=rate,
            oversubscription=ratio,
            rails=rails and name == "rack",
        )
        for name, size, rate, ratio in zip(("node", "rack", "spine"), sizes, rates, ratios, strict=True)
    )
    kinds = (DeviceKind(name="small", count=count, memory_bytes=10**6),)
    return Cluster(name="tree", source=Source(method="estimated"), devices=kinds, levels=levels)


@pytest.mark.parametrize("seed", range(6))
def test_the_checker_agrees_on_messages_over_uplinks(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folded and of devices, priced alike; a message that says the time it has alone is found."""
    monkeypatch.setattr(folds, "two_levels", lambda count, node: racks(count, min(node, 2), rails=seed % 2 == 1))
    folded, plan, profile, cluster = plans_of(seed, monkeypatch)
    assert unfolded(folded) == plan
    for each in (folded, plan):
        report = check(each, profile, cluster)
        assert report.valid, [*map(str, report.problems)]
        alike = simulate(each, profile=profile, cluster=cluster), simulate(each, cluster=cluster)
        assert {found.iteration_ns for found in alike} == {simulate(each).iteration_ns}
    crowds = MessageCrowds(cluster, plan.dependencies)
    crowd = crowds.of(cluster.levels[-1])
    assert crowd > 1, "uplinks are shared"

    def alone(dependency: Dependency) -> Dependency:
        hops = (replace(hop, occupancy_ns=int(hop.occupancy_ns / crowd)) for hop in dependency.hops)
        return replace(dependency, hops=tuple(hops))

    damaged = plan.model_copy(update={"dependencies": tuple(map(alone, plan.dependencies))})
    assert any("occupancy_ns" in each for each in map(str, check(damaged, profile, cluster).problems))
