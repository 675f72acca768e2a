"""What the executor costs: beside torch's own pipeline runtime, and per action.

    pip install 'pipeplan[torch]'
    python benchmarks/executor_overhead.py        # prints the tables of docs/benchmarks/runs.md; takes some minutes
    python benchmarks/executor_overhead.py --pairs 40 --widths 64 --what torch
    python benchmarks/executor_overhead.py --what models --models gpt2-tiny,gpt2-124m

*Beside torch* (``--what torch``): a chain of transformer-like layers as a v-shape zero-bubble schedule (ZB-V), with the
same weights and samples under pipeplan and torch's ``ScheduleZBVZeroBubble``, in turn (``beside.py``). A step is the
program alone: no optimizer, no making of samples. Gradients are compared first. *Models* (``--what models``): the same
with GPTs of the zoo in place of the chain, embedding, halves of layers and head being blocks, as many in each stage as
can be; the embedding and the head share their table on both sides.

*Per action* (``--what actions``): from one action's beginning to the next one's, the median over many steps of one
plan. In *interpreter* stages and transport do nothing; in *stages* blocks are a multiplication of one number by
another, so that what is left is mostly torch's autograd; in *gloo* such tensors really travel, and a time is how long
posting one took.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from beside import HEADER, NUM_RANKS, TIMEOUT_NS, arguments, cells, in_turn, job_of, printed, told_by
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from pipeplan.costs import build_workload
from pipeplan.examples import ShapeCosts, shape
from pipeplan.files import Plan, Profile, parse
from pipeplan.planning.build_plan import assemble
from pipeplan.runtime.executor.interpreter import Executor
from pipeplan.runtime.executor.message_graph import TensorKey
from pipeplan.runtime.executor.rank_program import ProgramStep, programs_of
from pipeplan.runtime.executor.stage import MiniBatch
from pipeplan.runtime.executor.tensors import Produced, Received, TensorSpec
from pipeplan.runtime.launch.job import RankContext
from pipeplan.runtime.launch.status import Board, Phase, Progress
from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.models.spec import BlockSpec, Model
from pipeplan.runtime.models.zoo import ZOO
from pipeplan.runtime.models.zoo.layers import ClassHead
from pipeplan.runtime.parallel.device import Clock
from pipeplan.runtime.training.options import TrainOptions
from pipeplan.runtime.training.trainer import Trainer, travelling
from pipeplan.schedule.classic import CLASSIC
from pipeplan.workload.bounds import period_bound, strong_iteration_bound
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.task_graph import task_graph
from pipeplan.workload.workload import Workload

NUM_STAGES = 4
KINDS = ("F", "B", "I", "W", "SEND", "RECV")


def zb_v(num_microbatches: int, *, split: bool = True, blocks: Sequence[str] = ()) -> Plan:
    """Two devices, two stages each, down and up; whole backwards in GPipe's order where they are not split.

    Stages of ``blocks``, if there are any, keep the orders that stages of the same time have, as torch's schedule does.
    """
    costs = ShapeCosts(input_grad_ns=10**6, weight_grad_ns=10**6) if split else ShapeCosts()
    profile = shape("zbv", NUM_RANKS, costs=costs)
    workload = workload_of(profile, num_microbatches, split=split)
    problem, graph = OneMicrobatch.of(workload), task_graph(workload)
    orders = CLASSIC["zb-v" if split else "gpipe"].orders(problem, graph)
    if blocks:
        workload = workload_of(with_blocks(profile, blocks), num_microbatches, split=split)
        problem, graph = OneMicrobatch.of(workload), task_graph(workload)
    return assemble(graph, orders, strong_iteration_bound(problem), period_bound(problem), "benchmark")


def workload_of(profile: Profile, num_microbatches: int, *, split: bool) -> Workload:
    """Of micro-batches of a sample, where the profile places its blocks."""
    assert profile.placement is not None
    return build_workload(
        profile, profile.placement, num_microbatches=num_microbatches, microbatch_size=1, split_backward=split
    )


def with_blocks(profile: Profile, names: Sequence[str]) -> Profile:
    """A chain of these in its stages, each with the costs of a block of the profile's."""
    assert profile.placement is not None
    ends = [round(len(names) * (stage + 1) / NUM_STAGES) for stage in range(NUM_STAGES)]
    stages = [
        stage.model_copy(update={"blocks": tuple(names[begin:end])})
        for stage, begin, end in zip(profile.placement.stages, [0, *ends], ends, strict=False)
    ]
    blocks = tuple(profile.blocks[0].model_copy(update={"id": name}) for name in names)
    edges = tuple(profile.edges[0].model_copy(update={"source": a, "target": b}) for a, b in pairwise(names))
    placement = profile.placement.model_copy(update={"stages": tuple(stages)})
    return profile.model_copy(update={"blocks": blocks, "edges": edges, "placement": placement})


class Layer(nn.Module):
    """A feed-forward layer around a skip."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return result


class Product(nn.Module):
    """As little as a block can do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x)
        return result


class Ending(nn.Module):
    """Layers, then a loss."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(self.layers(x), targets, reduction="sum")


def chain(width: int, length: int, layers: int) -> Model:
    """Four blocks, one per stage of the plan; a sample is ``length`` vectors of ``width``, width 1 does nothing."""

    def stage() -> nn.Module:
        return Product() if width == 1 else nn.Sequential(*(Layer(width) for _ in range(layers)))

    def batch(num_samples: int, step: int, seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed + step)
        both = torch.randn(2, num_samples, length, width, generator=generator)
        return {"x": both[0], "targets": both[1]}

    names = [f"layer{index}" for index in range(NUM_STAGES)]
    blocks = [
        BlockSpec(name, "layer", stage, sources=tuple(names[max(i - 1, 0) : i]), samples=() if i else ("x",))
        for i, name in enumerate(names)
    ]
    blocks[-1] = BlockSpec(
        names[-1], "layer", lambda: Ending(stage()), sources=tuple(names[-2:-1]), samples=("targets",), loss=True
    )
    return Model("chain", tuple(blocks), batch, lambda made: made["targets"].numel())


# Beside torch ----------------------------------------------------------------------------------------------------


def beside_torch(job: Mapping[str, Any], context: RankContext) -> dict[str, Any]:
    """Times of steps, and how far gradients are apart."""
    plan, name = parse(job["plan"], Plan), job["model"]
    model = gpt(name, job["length"]) if name else chain(job["width"], job["length"], job["layers"])
    trainer = Trainer(plan, model, TrainOptions(model.name, num_threads=1, timeout_ns=TIMEOUT_NS), context.progress)
    batch = model.mini_batch(plan.mini_batch, 0, 0)
    samples = MiniBatch(batch, model.predictions(batch))
    theirs = schedule_of_torch(trainer, samples.num_predictions, plan.num_microbatches)
    (first,) = model.blocks[0].samples

    def ours_once() -> None:
        trainer.executor.run(samples)
        for stage in trainer.stages.values():
            stage.take_loss()

    def theirs_once() -> None:
        arguments = (batch[first],) if context.rank == 0 else ()
        targets = {"target": batch["targets"], "losses": []} if context.rank == 0 else {}
        theirs.step(*arguments, **targets, return_outputs=False)

    steps = {"pipeplan": ours_once, "torch": theirs_once}
    for run in steps.values():
        run()
    found = in_turn(steps, job) | {"apart": differences(trainer, theirs)}
    trainer.close()
    return found


def gpt(name: str, length: int) -> Model:
    """One of the zoo, on sequences of this length, or of as many as it takes."""
    return load_model(name, sequence=min(length, ZOO[name].longest))


class Logits(nn.Module):
    """A head of a language model without its loss, which torch's schedules have apart."""

    def __init__(self, head: ClassHead) -> None:
        super().__init__()
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head.output(self.head.norm(x))
        return result


def schedule_of_torch(trainer: Trainer, num_predictions: float, num_microbatches: int) -> Any:
    """torch's ZB-V over copies of the trainer's blocks, which share parameters where those do."""

    def loss(made: Tensor, targets: Tensor) -> Tensor:
        if targets.is_floating_point():
            return F.mse_loss(made, targets, reduction="sum") / num_predictions
        return F.cross_entropy(made.flatten(0, -2), targets.flatten(), reduction="sum") / num_predictions

    stages: list[Any] = []
    known: dict[int, nn.Parameter] = {}
    for index, runner in sorted(trainer.stages.items()):
        copies = [copy_of(runner.specs[name].build(), runner.modules[name], known) for name in runner.part.blocks]
        plain = nn.Sequential(*map(without_loss, copies))
        stages.append(PipelineStage(plain, index, NUM_STAGES, torch.device("cpu")))
    return schedules.ScheduleZBVZeroBubble(stages, num_microbatches, loss, scale_grads=False)


def copy_of(module: nn.Module, ours: nn.Module, known: dict[int, nn.Parameter]) -> nn.Module:
    """The module with the parameters' values of ours; ``known`` are copies by what they are of."""
    module.load_state_dict(ours.state_dict())
    for name, parameter in ours.named_parameters():
        owner, _, last = name.rpartition(".")
        same = known.setdefault(id(parameter), module.get_parameter(name))
        setattr(module.get_submodule(owner), last, same)
    return module


def without_loss(module: nn.Module) -> nn.Module:
    """What makes the predictions."""
    if isinstance(module, Ending):
        return module.layers
    return Logits(module) if isinstance(module, ClassHead) else module


def differences(trainer: Trainer, theirs: Any) -> float:
    """The largest difference of two gradients, as a share of the largest gradient."""
    found, largest = 0.0, 0.0
    for runner, stage in zip([trainer.stages[index] for index in sorted(trainer.stages)], theirs._stages, strict=True):
        for name, module in zip(runner.part.blocks, stage.submod, strict=True):
            for ours, other in zip(runner.modules[name].parameters(), module.parameters(), strict=True):
                assert ours.grad is not None
                found = max(found, float((ours.grad - other.grad).abs().max()))
                largest = max(largest, float(ours.grad.abs().max()))
    return found / largest


# Per action ------------------------------------------------------------------------------------------------------


class Watch(Progress):
    """Notes when each action began, besides what it is for."""

    def __init__(self, board: Board, rank: int) -> None:
        self.begun: dict[int, int] = {}
        super().__init__(board, rank)

    def begin(self, phase: Phase, counter: int = -1, peer: int = -1) -> None:
        """The first note of an action is its beginning."""
        super().begin(phase, counter, peer)
        self.begun.setdefault(counter, time.perf_counter_ns())


class NoStage:
    """A stage that computes nothing: what it makes was made before."""

    def __init__(self, specs: Mapping[str, TensorSpec]) -> None:
        self.idle = True
        self.tensors: dict[TensorKey, Tensor] = {
            name: torch.zeros(spec.of(1), dtype=spec.dtype) for name, spec in specs.items()
        }

    def run(self, step: ProgramStep, inputs: Received, samples: MiniBatch) -> Produced:
        """The tensors, whatever the action."""
        return dict.fromkeys(step.samples, self.tensors)


class NoTransport:
    """Channels to nobody: every message is there when it is asked for."""

    def __init__(self, program: Any, specs: Mapping[str, TensorSpec]) -> None:
        self.tensors = {
            message: [torch.zeros(specs[name].of(1), dtype=specs[name].dtype) for name in names]
            for message, names in program.tensors.items()
        }

    def send(self, step: ProgramStep, tensors: Sequence[Tensor], made: object) -> None:
        """Forget them."""

    def receive(self, step: ProgramStep) -> None:
        """It is here."""

    def take(self, step: ProgramStep) -> list[Tensor]:
        """What was made before."""
        return self.tensors[step.message]

    def moment(self) -> None:
        """No streams here."""

    def unfinished(self) -> list[int]:
        """Nothing is under way."""
        return []


def per_action(job: Mapping[str, Any], context: RankContext) -> dict[str, dict[str, list[int]]]:
    """[what is measured][kind of action] times in ns of this rank's actions."""
    plan = parse(job["plan"], Plan)
    model = chain(1, 1, 1)
    program = programs_of(plan, [block.id for block in model.blocks], model.edges, model.name)[context.rank]
    specs = travelling(program, model, torch.float32)
    trainer = Trainer(plan, model, TrainOptions("chain", num_threads=1, timeout_ns=TIMEOUT_NS), context.progress)
    batch = model.mini_batch(plan.mini_batch, 0, 0)
    samples = MiniBatch(batch, model.predictions(batch))
    none: Any = dict.fromkeys(program.stages, NoStage(specs))
    nobody: Any = NoTransport(program, specs)
    kept = trainer.channels
    found = {}
    for what, stages, channels in (
        ("interpreter", none, nobody),
        ("gloo", none, kept),
        ("stages", trainer.stages, kept),
    ):
        with tempfile.TemporaryFile() as file:
            file.truncate(Board.size(NUM_RANKS))
            watch = Watch(Board(file.fileno(), NUM_RANKS), context.rank)
            watch.board.programs = plan.programs
        executor = Executor(program, stages, channels, specs, watch, Clock(torch.device("cpu")))
        found[what] = timed_actions(executor, watch, samples, job["steps"])
    trainer.close()
    return found


def timed_actions(executor: Executor, watch: Watch, samples: MiniBatch, steps: int) -> dict[str, list[int]]:
    """[kind] from the beginning of an action to the next one's, of all but the last of each step."""
    times: dict[str, list[int]] = defaultdict(list)
    for _ in range(steps):
        dist.barrier()
        watch.begun.clear()
        executor.run(samples)
        for step in executor.program.steps[:-1]:
            kind = step.action.kind.partition("_")[0]
            begun = watch.begun
            times[kind].append(begun[step.counter + 1] - begun[step.counter])
    return times


# ------------------------------------------------------------------------------------------------------------------


def row_beside_torch(given: argparse.Namespace, *, width: int = 0, model: str = "") -> list[str]:
    """A row of the first table, of a chain of this width, or of the second, of a model."""
    blocks = [block.id for block in gpt(model, given.length).blocks] if model else []
    plan = zb_v(given.microbatches, blocks=blocks)
    what = {"model": model, "width": width, "length": given.length, "layers": given.layers}
    job = job_of(given, plan=plan.model_dump_json(), **what)
    return [model or str(width), *cells(told_by("executor_overhead:beside_torch", job, plan.programs))]


def rows_per_action(given: argparse.Namespace) -> list[list[str]]:
    """Medians in us; whole backwards and split ones are of two plans."""
    times: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for split in (True, False):
        plan = zb_v(given.microbatches, split=split)
        job = {"plan": plan.model_dump_json(), "steps": 4 * given.pairs}
        for what, kinds in told_by("executor_overhead:per_action", job, plan.programs).items():
            for kind, found in kinds.items():
                times[what][kind] += found
    shown = {"interpreter": KINDS, "stages": KINDS[:4], "gloo": KINDS[4:]}
    return [
        [what, *(f"{statistics.median(times[what][kind]) / 1e3:.1f}" if kind in kinds else "" for kind in KINDS)]
        for what, kinds in shown.items()
    ]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--widths", default="64,256,512", help="of the layers; 64 is all overhead")
    parser.add_argument("--length", type=int, default=64, help="vectors, or words, per micro-batch")
    parser.add_argument("--layers", type=int, default=2, help="per stage, of which each process has two")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--models", default="gpt2-tiny,gpt2-124m", help="GPTs of the zoo")
    parser.add_argument("--what", choices=("torch", "models", "actions"), help="one of the tables")
    given = parser.parse_args()
    if given.what in (None, "torch"):
        rows = [row_beside_torch(given, width=int(width)) for width in given.widths.split(",")]
        printed(given, ["width", *HEADER], rows)
    if given.what in (None, "models"):
        rows = [row_beside_torch(given, model=name) for name in given.models.split(",")]
        printed(given, ["model", *HEADER], rows)
    if given.what in (None, "actions"):
        printed(given, ["us per action", *KINDS], rows_per_action(given))


if __name__ == "__main__":
    main()
