"""Plans on kinds of devices with profiles of their own are run as any other: what differs is what they predict."""

from __future__ import annotations

from pathlib import Path

import pytest

from builders.kinds import cluster_of_kinds, drawn
from builders.requests import request_of
from pipeplan.checker import check
from pipeplan.costs.kinds import for_kinds
from pipeplan.files import Plan, to_json
from pipeplan.planning.request import Batch
from pipeplan.planning.steps import search_plan
from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.models.spec import Model
from pipeplan.runtime.training.options import TrainOptions
from references.unlike_devices import Kind
from runtime_support.plans import Unsplit, profile_of
from runtime_support.threads import run_in_threads
from runtime_support.warm import warm_ranks
from support.commands import pipeplan

SEED = 3
TINY = "gpt2-tiny"


def planned(own: Model) -> Plan:
    """A stage on each of two kinds, found with a profile for each."""
    profile, cluster = profile_of(own), cluster_of_kinds(Kind(1, "1", None), Kind(1, "1", None))
    joint = for_kinds(profile, {"kind1": drawn(profile, SEED, sizes=True)}, cluster)
    request = request_of(joint, "one-to-one", Batch(8, 2), 2, cluster=cluster, time_limit=0.2, deterministic=True)
    plan = search_plan(request).plan
    check(plan, joint, cluster).require()
    assert {stage.kinds for stage in plan.stages} == {("kind0",), ("kind1",)}
    return plan


def test_its_loss_is_that_of_an_unsplit_run() -> None:
    own = load_model(TINY, seed=SEED)
    plan = planned(own)
    options = TrainOptions(own.name, seed=SEED, dtype="float64", learning_rate=1e-3, weight_decay=0.0)
    found = run_in_threads(plan, own, SEED).loss
    assert found == pytest.approx(Unsplit(own, options).step(0, plan.mini_batch), rel=1e-12)


@pytest.mark.slow
def test_its_processes_train_by_the_command(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(to_json(planned(load_model(TINY, seed=SEED))))
    with warm_ranks():
        done = pipeplan("run", path, "--model", TINY, "--local", "--steps", "1", "--trace", tmp_path / "trace.json")
    assert done.returncode == 0, done.stderr
    assert "step 0" in done.stdout
