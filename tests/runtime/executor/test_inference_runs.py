"""Plans of inference: every rank's forwards give the loss of an unsplit run, and keep nothing that nobody takes."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from torch import Tensor

from pipeplan.checker import check
from pipeplan.costs import build_workload
from pipeplan.costs.forwards import as_inference
from pipeplan.errors import UsageError
from pipeplan.files import PlacedStage, Placement, Plan
from pipeplan.planning.build_plan import assemble
from pipeplan.runtime.executor.interpreter import Executor
from pipeplan.runtime.executor.stage import StageRunner
from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.models.spec import Model
from pipeplan.runtime.training.options import OF_TRAINING, TrainOptions
from pipeplan.workload.task_graph import task_graph
from runtime_support.plans import Unsplit, profile_of
from runtime_support.threads import run_in_threads

SEED = 3
STAGES: dict[str, list[dict[str, object]]] = {
    "one-to-one": [{"devices": (0,)}, {"devices": (1,)}, {"devices": (2,)}],
    "circular": [{"devices": (0,)}, {"devices": (1,)}, {"devices": (0,)}, {"devices": (1,)}],
    "v-shape": [{"devices": (0,)}, {"devices": (1,)}, {"devices": (1,)}, {"devices": (0,)}],
    "replicas": [{"devices": (0, 1), "replicas": 2}, {"devices": (2,)}],
    "shards": [{"devices": (0, 1), "shards": 2}, {"devices": (0, 1), "shards": 2}],
    "sizes": [{"devices": (0,), "microbatch_size": 2}, {"devices": (1,), "microbatch_size": 4}],
    "routes": [
        {"devices": (0,)},
        {"devices": (1,)},
        {"devices": (1,), "route": 1},
        {"devices": (0,), "route": 1},
    ],
}


def model() -> Model:
    return load_model("gpt2-tiny", seed=SEED)


def plan_of(name: str, own: Model) -> Plan:
    ids, stages = [block.id for block in own.blocks], STAGES[name]
    num_routes = 2 if name == "routes" else 1
    count = len(stages) // num_routes
    bounds = [round(n * len(ids) / count) for n in range(count + 1)]
    groups = [tuple(ids[begin:end]) for begin, end in zip(bounds, bounds[1:], strict=False)] * num_routes
    placed = [PlacedStage.model_validate({"blocks": b, **how}) for b, how in zip(groups, stages, strict=True)]
    placement = Placement(
        strategy="by-hand",
        num_devices=1 + max(device for stage in placed for device in stage.devices),
        num_routes=num_routes,
        stages=tuple(placed),
    )
    profile = as_inference(profile_of(own))
    graph = task_graph(build_workload(profile, placement, num_microbatches=4, microbatch_size=2))
    slots, offsets = graph.workload.slots, graph.offsets
    actions = sorted(
        (slots[x].samples(n), x, offsets[x] + n)
        for x in range(len(graph.workload.operations))
        for n in range(len(slots[x]))
    )
    holders = graph.workload.holders
    orders = [[task for _, x, task in actions if device in holders[x]] for device in range(placement.num_devices)]
    return assemble(graph, orders, 1, Fraction(1), "in turn")


@pytest.mark.parametrize("name", STAGES)
def test_forwards_give_the_loss_of_an_unsplit_run(name: str) -> None:
    own = model()
    plan = plan_of(name, own)
    assert plan.is_inference
    check(plan).require("plan")
    outcome = run_in_threads(plan, own, SEED)
    options = TrainOptions(own.name, seed=SEED, dtype="float64", learning_rate=1e-3, weight_decay=0.0)
    assert outcome.loss == pytest.approx(Unsplit(own, options).step(0, plan.mini_batch), rel=1e-12)
    assert all(gradient is None for gradient in outcome.gradients.values())


def test_what_nobody_takes_any_more_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """As each block begins, its stage has only what it or blocks after it take, or what leaves the stage."""
    seen: list[tuple[str, set[str]]] = []
    call = StageRunner._call

    def watched(self: StageRunner, block: str, again: object, values: object, *rest: object) -> Tensor:
        left = set().union(*self.part.outputs.values()) if self.part.outputs else set()
        seen.append((block, {name for name, _ in values._found} - left))  # type: ignore[attr-defined]
        return call(self, block, again, values, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(StageRunner, "_call", watched)
    own = model()
    run_in_threads(plan_of("one-to-one", own), own, SEED)
    later = {
        block.id: {source for after in own.blocks[n:] for source, _ in after.inputs}
        for n, block in enumerate(own.blocks)
    }
    assert len(seen) == 4 * len(own.blocks)
    assert all(held <= later[block] for block, held in seen)
    assert {len(held) for _, held in seen} == {0, 1}


def test_a_rank_holds_what_its_actions_still_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that wait on a device are gone once their message has been sent, or their last taker has run."""
    most: dict[int, int] = {}
    keep = Executor._keep

    def watched(self: Executor, *given: object) -> None:
        keep(self, *given)  # type: ignore[arg-type]
        most[self.program.rank] = max(most.get(self.program.rank, 0), len(self._slots))

    monkeypatch.setattr(Executor, "_keep", watched)
    own = model()
    run_in_threads(plan_of("one-to-one", own), own, SEED)
    assert most == {0: 1, 1: 1, 2: 0}


def test_what_only_training_has_is_refused() -> None:
    plan = plan_of("one-to-one", model())
    given: dict[str, object] = {"learning_rate": 0.1, "optimizer": "sgd", "checkpoint": "here", "clip_norm": 1.0}
    assert given.keys() <= OF_TRAINING.keys()
    for name, value in given.items():
        options = replace(TrainOptions("gpt2-tiny"), **{name: value})  # type: ignore[arg-type]
        flag = f"--{name.replace('_', '-')}"
        with pytest.raises(UsageError, match=f"^{flag} is of training, and plan .* is of inference"):
            options.by_plan(plan)
    assert TrainOptions("gpt2-tiny").by_plan(plan).dtype == "float32"
