"""Every family of configurations, from its estimate to a plan that is right."""

from __future__ import annotations

import pytest

import pipeplan
from runtime_support.hugging_face import FURTHER, NAMES, SEQUENCE, text
from support.marks import slow_but

SLOW = ("gpt2", "mixtral")
"""One of each kind; all others are long, and their estimates are looked at in test_more_families."""


@pytest.mark.filterwarnings("ignore:pipeplan run cannot split blocks", "ignore:Dropout x")
@slow_but("name", (*NAMES, *FURTHER), lambda _: False, lambda name: name not in SLOW)
@pytest.mark.filterwarnings("ignore:dropout.. x:UserWarning")  # of OPT, in evaluation mode
def test_estimates_are_searched(name: str) -> None:
    """Whatever is left open, and for two stages of two devices that split all blocks."""
    cluster = pipeplan.Cluster.of("four", 4, levels=[("nvlink", 4, "5us", "200GB")])
    profile = pipeplan.estimate(
        text(name),
        sequence=None if name == "vit" else SEQUENCE,
        device="h100-80gb",
        shards=(1, 2),
        microbatch=(1, 2),
    )
    assert {(row.shards, row.microbatch_size) for block in profile.blocks for row in block.costs} == {
        (1, 1),
        (1, 2),
        (2, 1),
        (2, 2),
    }
    for fixed in ({}, {"tp": 2, "pp": 2}):
        found = pipeplan.search(profile, cluster=cluster, mini_batch=8, time_limit="1s", deterministic=True, **fixed)
        assert pipeplan.check(found.plan, profile=profile, cluster=cluster).valid
        if fixed:
            assert {(stage.shards, stage.replicas) for stage in found.plan.stages} == {(2, 1)}
