"""Points of frontiers over whole plans: pipelines whose stages split each block in a way of its own train as one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import torch

from pipeplan.costs.clusters import named_cluster
from pipeplan.costs.devices import device_preset
from pipeplan.files import Plan
from pipeplan.partition.per_block_sharding import GroupSplits
from pipeplan.planning.build_plan import planned
from pipeplan.planning.candidates import PlacementCandidate
from pipeplan.planning.plan_frontier import chains
from pipeplan.planning.request import Batch, Request
from pipeplan.planning.trials import Trial
from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.models.spec import Model
from pipeplan.runtime.profiling.estimate import estimate_model
from pipeplan.simulator.simulation import simulate
from pipeplan.workload.memory import peak_memory
from runtime_support.threads import require_equal_to_unsplit
from support.marks import slow_but


def pipelines(model: Model, num_devices: int) -> Iterator[Plan]:
    """Plans of partitions in which some stage has blocks that are split differently."""
    shards = (1,) if model.sharded is None else (1, 2)
    profile = estimate_model(model, (1, 2, 4), device=device_preset("v100-16gb"), dtype=torch.float32, shards=shards)
    cluster = named_cluster("tensoropt", num_devices)
    batch, options = Batch(4, 4), {}
    request = Request(profile, num_devices, batch, sizes=(4,), cluster=cluster, **options)
    for asked in chains(request, GroupSplits(profile, cluster)):
        assert isinstance(asked.candidate, PlacementCandidate)
        stages = asked.candidate.placement.stages
        if len(stages) > 1 and any(len(set(stage.configurations)) > 1 for stage in stages):
            trial = Trial.of(asked.request, asked.candidate)
            trial.look()
            if trial.best is None:  # its schedule does not fit
                continue
            peak = max(device.peak_bytes for device in peak_memory(trial.best.graph, trial.best.orders))
            plan = planned(asked.request, trial.candidate, trial.settled, trial.best.workload)
            assert peak == max(device.peak_bytes for device in simulate(plan).memory)
            yield plan


@slow_but("name", ["gpt2-tiny", "gpt2-tiny-operators"], "gpt2-tiny".__eq__)
def test_pipelines_of_split_blocks_train_as_an_unsplit_run(name: str) -> None:
    model = load_model(name)
    plans = list(islice(pipelines(model, 4), 5))
    assert plans
    require_equal_to_unsplit(model, plans[-1])
