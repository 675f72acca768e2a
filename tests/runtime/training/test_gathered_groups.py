"""What a rank has gathered while an action runs is what its plan counts there: groups go as the action leaves them."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from builders.loops import steps_of
from builders.sharded import long_plan
from pipeplan.files import Plan
from pipeplan.runtime.executor.process_groups import RankGroup
from pipeplan.runtime.executor.rank_program import Division, ProgramStep, planned_programs, programs_of
from pipeplan.runtime.executor.shared_parameters import Divided
from pipeplan.runtime.executor.stage import MiniBatch, StageRunner
from pipeplan.runtime.launch.status import Board, Progress
from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.training.sharded_state import ExchangingStage, ShardedStage, ShardedState, with_last_uses
from pipeplan.workload.elements import ONCE
from pipeplan.workload.exchanges import networks_at, passes
from pipeplan.workload.kinds import PARAMETER_ROLES, PARAMETERS, RESHARD, Role
from pipeplan.workload.task_graph import task_graph
from runtime_support.sharded_plans import one_stage, sharded_plan
from runtime_support.warm import warm_ranks
from support.marks import one_in

CHAIN, BRANCHES = "runtime_support.models:untied_chain", "runtime_support.models:untied_branches"
SHOWN = "runtime_support.models:shown"

Place = tuple[str, int, int]
"""Operation and micro-batch, and how many groups the action has come to the end of."""


class Alone:
    """Stands in for a group of ranks, and is the only one of them: nothing leaves it."""

    def of(self, ranks: tuple[int, ...]) -> Alone:
        return self

    def start_gather(self, own: Tensor) -> Tensor:
        return own.clone()

    def start_scatter(self, parts: Tensor) -> Tensor:
        return parts[0].clone()

    def finish(self, pending: Tensor, device: torch.device) -> Tensor:
        return pending


@dataclass
class Watched:
    """A stage's state, of which is noted what has memory as its blocks are entered and left."""

    state: ShardedStage
    step: ProgramStep | None = None
    found: dict[Place, set[int]] = field(default_factory=dict)
    sizes: dict[Place, int] = field(default_factory=dict)

    def begin(self, step: ProgramStep) -> None:
        self.state.begin(step)
        self.step = step

    def enter(self, number: int) -> None:
        self.state.enter(number)
        self.note(number)

    def leave(self, number: int) -> None:
        self.state.leave(number)
        self.note(number + 1)

    def watch(self, number: int, made: Tensor) -> Tensor:
        found = self.state.watch(number, made)
        found.register_hook(  # type: ignore[no-untyped-call]  # torch has it without types
            lambda _: self.note(number, back=True)  # after the state's own
        )
        return found

    def begin_backward(self, *, adds: bool) -> None:
        self.state.begin_backward(adds=adds)

    def end_backward(self) -> None:
        self.state.end_backward()

    def note(self, number: int, *, back: bool = False) -> None:
        """At the beginning of a block, or behind the last; going back the blocks from this one's end on are done."""
        assert self.step is not None
        groups = self.state.part.block_groups
        ends = [sum(groups[: place + 1]) for place in range(len(groups))]
        passed = sum(end - size > number for end, size in zip(ends, groups, strict=True)) if back else 0
        passed = passed if back else sum(end <= number for end in ends)
        place = self.step.action.operation, self.step.action.microbatch, passed
        held = {group for group in range(len(groups)) if any(unit.has_memory for unit in self.state._units_of(group))}
        assert self.found.setdefault(place, held) == held, place
        units = dict.fromkeys(unit for group in held for unit in self.state._units_of(group))
        self.sizes[place] = max(self.sizes.get(place, 0), sum(map(bytes_of, units)))


def bytes_of(unit: Any) -> int:
    """Of parameters that have memory, or of what comes of them."""
    coming: int = 0 if unit._gathering is None else getattr(unit._gathering, "found", unit._gathering).nbytes
    there: int = sum(each.whole.untyped_storage().nbytes() for each in unit.rows)
    return coming + there


def planned(plan: Plan) -> dict[Place, set[int]]:
    """What an action has of its own by the plan's timeline, where it comes to each group and after the last.

    Not what the network gathers meanwhile for actions after it.
    """
    graph, (stage,) = task_graph(plan.workload), plan.stages
    numbers = [(each, n) for each in plan.workload.operations for n in range(plan.num_microbatches)]
    starts = [plan.starts_ns[each.id][n] for each, n in numbers]
    assert graph.offsets[:2] == [0, plan.num_microbatches], "tasks are numbered by operation, then by micro-batch"
    ((_, network),) = networks_at(graph, starts)
    spans = [each for each in network.held if each[0] is PARAMETERS]
    found: dict[Place, set[int]] = {}
    for task, (operation, number) in enumerate(numbers):
        if operation.role not in PARAMETER_ROLES:
            continue
        course = passes(stage.block_groups, operation.role)
        for passed, moment in enumerate([0, *(end for _, _, end in course)]):
            at = starts[task] + moment
            found[operation.id, number, passed] = {
                group for _, _, group, _, begin, end in spans if begin <= starts[task] and at < end
            }
    return found


def in_parts(steps: tuple[ProgramStep, ...], cuts: tuple[int, ...]) -> Iterator[ProgramStep]:
    """Steps of which each F, B and I is in parts."""
    for step in steps:
        if cuts and step.action.role in PARAMETER_ROLES:
            yield from (replace(step, part=part, is_last=part == len(cuts)) for part in range(len(cuts) + 1))
        else:
            yield step


def run(
    plan: Plan, model_name: str, *, told: bool = True, cuts: tuple[int, ...] = ()
) -> tuple[dict[Place, set[int]], dict[str, Tensor]]:
    """What the first rank of a plan of one stage has gathered, and its gradients of the samples that are its own."""
    watched, gradients = watched_run(plan, model_name, told=told, cuts=cuts)
    return watched.found, gradients


def watched_run(
    plan: Plan,
    model_name: str,
    *,
    told: bool = True,
    cuts: tuple[int, ...] = (),
    rank: int = 0,
    ranks: tuple[int, ...] = (0,),
    groups: Any = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Watched, dict[str, Tensor]]:
    """The same of a rank that gathers with others, by default with none."""
    model = load_model(model_name)
    program = programs_of(plan, [block.id for block in model.blocks], model.edges, model.name)[rank]
    program = replace(program, steps=tuple(in_parts(program.steps, cuts)))
    part = replace(program.stages[0], cuts=cuts)
    modules = {block.id: model.build(block.id, 0, dtype=dtype) for block in model.blocks}
    named = {f"{block}.{name}": p for block, module in modules.items() for name, p in module.named_parameters()}
    shapes = {name: p.shape for name, p in named.items()}
    division = Division(part.blocks, ranks, 3)
    divided = [Divided(p, (name.split(".")[0],), division, scattered=True) for name, p in named.items()]
    others: Any = groups or Alone()
    sharded = ShardedState(divided, others, rank)
    state = sharded.stage(part, program.num_gradients(0))
    assert state is not None
    watched = Watched(state)
    specs = {block.id: block for block in map(model.block, part.blocks)}
    runner = ExchangingStage(StageRunner(part, modules, specs, state=watched), watched)  # type: ignore[arg-type]
    batch = MiniBatch(model.mini_batch(plan.mini_batch, 0, 0, dtype=dtype, device=torch.device("cpu")), 1.0)
    for step in (with_last_uses(program) if told else program).steps:
        if step.action.role is Role.STATE:
            state.run(step)
        else:
            runner.run(step, {}, batch)
    sharded.reduce()
    assert runner.idle
    assert not any(unit.has_memory for unit in sharded.units)
    assert {name: p.shape for name, p in named.items()} == shapes
    gradients = {name: sharded.own(p).grad for name, p in named.items()}
    return watched, {name: each for name, each in gradients.items() if each is not None}


def plan_of(model: str, every: int, *, split: bool, recompute: bool, reduced: int = 2) -> Plan:
    stages = one_stage(model, 3, (0, 1), unshard_every=every, reduce_every=reduced)
    return sharded_plan(model, stages, split=split, recompute=recompute)


@pytest.mark.slow
def test_two_ranks_have_the_bytes_that_the_plan_counts(tmp_path: Path) -> None:
    """Tensors of both ranks of a gloo group, at each block of each action, beside the plan's gathered bytes."""
    plan = plan_of(CHAIN, 1, split=False, recompute=False)
    context, sizes = (
        multiprocessing.get_context("forkserver"),
        [each.gathered_bytes for each in plan.stages[0].block_groups],
    )
    with warm_ranks():
        queue = context.Queue()
        processes = [context.Process(target=_counted_rank, args=(rank, str(tmp_path), plan, queue)) for rank in (0, 1)]
        for process in processes:
            process.start()
    answers = dict(queue.get(timeout=120) for _ in processes)
    for process in processes:
        process.join(60)
    expected = planned(plan)
    for found, counted in answers.values():
        assert found.items() <= expected.items()
        begun = [place for place in found if place[2] == 0]
        assert {len(found[place]) for place in begun} == {4}
        for place, held in found.items():
            assert counted[place] == sum(sizes[group] for group in held), place


def _counted_rank(rank: int, folder: str, plan: Plan, queue: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    with tempfile.TemporaryFile() as file:
        file.truncate(Board.size(2))
        progress = Progress(Board(file.fileno(), 2), rank)
    groups = SimpleNamespace(of=lambda ranks: RankGroup(ranks, progress, dist.group.WORLD))
    watched, _ = watched_run(plan, CHAIN, rank=rank, ranks=(0, 1), groups=groups, dtype=torch.float32)
    queue.put((rank, (watched.found, watched.sizes)))
    dist.barrier()
    dist.destroy_process_group()


@one_in(2, "every", [1, 2, 3, ONCE], first=1)
@pytest.mark.parametrize(
    ("model", "split", "recompute", "cuts"),
    [
        (CHAIN, False, False, ()),
        (CHAIN, True, False, ()),
        (CHAIN, False, False, (2,)),  # inside of a group
        (CHAIN, True, False, (3, 5)),
        (BRANCHES, False, True, ()),
        (BRANCHES, True, True, ()),
    ],
)
def test_groups_are_given_up_where_the_plan_says(
    model: str, every: int, split: bool, recompute: bool, cuts: tuple[int, ...]
) -> None:
    """At each block of each action the same groups are there; gradients are those of a run that gives up later."""
    plan = plan_of(model, every, split=split, recompute=recompute)
    assert len(plan.stages[0].block_groups) == 4
    found, gradients = run(plan, model, cuts=cuts)
    expected = planned(plan)
    ends = {place for place in expected if not place[0].endswith("F") and place[2] == 4}  # no block comes after them
    assert found == {place: held for place, held in expected.items() if place not in ends}
    assert min(map(len, found.values())) < 4, "somewhere groups are given up inside of an action"
    later, same = run(plan, model, told=False, cuts=cuts)
    assert {len(held) for (_, _, passed), held in later.items()} == {4}
    assert gradients.keys() == same.keys()
    assert all(torch.equal(gradients[name], same[name]) for name in gradients)


@pytest.mark.parametrize("split", [False, True])
def test_what_gives_its_parameters_themselves_keeps_none_of_them_gathered(split: bool) -> None:
    """One of the blocks gives a view of them, which others read when it has let go of them: by actions, and without."""
    plan = plan_of(SHOWN, 1, split=split, recompute=False, reduced=1)
    found, gradients = run(plan, SHOWN)
    expected = planned(plan)
    assert found.items() <= expected.items()
    _, later = run(plan, SHOWN, told=False)
    _, inside = run(sharded_plan(SHOWN, one_stage(SHOWN, 3, (0, 1)), split=split), SHOWN)
    for other in (later, inside):
        torch.testing.assert_close(gradients, other, rtol=0, atol=1e-12)


@one_in(
    3,
    "first, second, split, late",
    [((1, 1), (2, 2), False, False), ((4, 1), (ONCE, ONCE), True, False), ((2, 1), (1, 2), False, True)],
    first=1,
)
def test_loops_know_what_programs_that_are_written_out_know(first: Any, second: Any, split: bool, late: bool) -> None:
    plan = long_plan(first, second, split=split, late=late)
    for short, long in zip(planned_programs(plan), planned_programs(plan.unrolled()), strict=True):
        steps = with_last_uses(long).steps
        known = [(step.counter, step.part, step.last_of) for step in steps_of(with_last_uses(short))]
        assert known == [(step.counter, step.part, step.last_of) for step in steps]
        marked = [step for step in steps if step.last_of]
        reshards = sum(step.action.kind == RESHARD for step in steps)
        assert sum(len(step.last_of) for step in marked if step.is_last) == reshards > 0
