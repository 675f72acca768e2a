"""Plans of AutoPipe's models by three planners, and what they take: for the tables of ``autopipe.py``.

AutoPipe (A) replicates the whole pipeline, each replica with micro-batches of its own. DAPPLE (D) lets the replicas of
a stage share every micro-batch. Piper (P) lets them take whole micro-batches in turn. D and P cut between layers, A
between half layers. All plans are simulated alike: 1F1B, transfers, and the gradients' all-reduce of each stage after
its last backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise
from statistics import pstdev
from typing import Any

import numpy as np

from pipeplan.costs import StageCost, group_costs, transfer_time
from pipeplan.costs.clusters import named_cluster
from pipeplan.costs.communication import Exchange, prices_in
from pipeplan.costs.devices import Kernel, device_preset
from pipeplan.costs.operators import Operator, attention_core, cost_row
from pipeplan.examples import model
from pipeplan.examples.layout import WIDTH
from pipeplan.files import Block, Cluster, Profile
from pipeplan.partition.chain.autopipe import Cuts, Step, plan_chain
from pipeplan.partition.chain.autopipe import autopipe as plan_depths
from pipeplan.partition.chain.costs import ChainCosts, StageTimes
from pipeplan.partition.dapple import dapple, latency
from pipeplan.partition.piper import piper
from pipeplan.partition.problem import Partition, PartitionProblem, Pricing, Way, together

__all__ = [
    "DEVICE",
    "FITTED_HEAD",
    "LAYERS",
    "MEMORY",
    "PLANNERS",
    "Case",
    "Stages",
    "autopipe",
    "autopipe_as_stated",
    "cluster",
    "dapple_as_stated",
    "estimated_head",
    "in_steps",
    "one_f_one_b",
    "piper_as_stated",
    "problem_of",
    "whole_pipelines",
]

DEVICE = "rtx3090-24gb"
MEMORY = device_preset(DEVICE).memory_bytes
FITTED_HEAD = 2.0
"""What the head is worth in layers, fitted: the paper does not say. With any from 1.55 to 2.45 the planner cuts GPT-2
345M where the text has it in two stages, 13 and 11 layers (IV-E1); this is the middle. Nothing else was looked at, so
that all other tables are predictions."""
LAYERS = {"gpt2-345m": 24, "gpt2-762m": 36, "gpt2-1.3b": 24, "bert-large": 24}
# Costs -------------------------------------------------------------------------------------------------------------


@cache
def estimated(name: str, samples: int) -> tuple[StageCost, ...]:
    """[block] embedding, attention and FFN of every layer, head. Layers are recomputed, as Megatron-LM's checkpoints
    have it; the ends of the model are not.

    Attention is what PyTorch 1.10 had, not the fused one that examples have: its scores go through memory.
    """
    profile = in_steps(model(name, device=DEVICE, microbatch_sizes=(samples,)))
    alone = [(block,) for block in profile.topological_order()]
    return tuple(group_costs(profile, alone, samples, recompute=True))


def in_steps(profile: Profile) -> Profile:
    """The same with attention that keeps its scores: all of them, where a fused causal one needs half."""
    blocks = tuple(unfused(block) if block.operator == "attention" else block for block in profile.blocks)
    return profile.model_copy(update={"blocks": blocks})


def unfused(block: Block) -> Block:
    """A block of attention without its fused core and with one in steps."""
    heads, size = block.dimensions["heads"], block.dimensions["hidden"] // block.dimensions["heads"]
    sequence = block.dimensions["sequence"]
    rows = []
    for row in block.costs:
        samples = row.microbatch_size
        fused = attention_core(samples, sequence, sequence, heads, size, WIDTH, causal=True)
        stepwise = attention_in_steps(samples * heads, sequence, size)
        less, more = (cost_row(each, samples, device_preset(DEVICE)) for each in (fused, stepwise))
        rows.append(
            row.model_copy(
                update={
                    key: getattr(row, key) + getattr(more, key) - getattr(less, key)
                    for key in ("forward_ns", "backward_ns", "input_grad_ns", "activation_bytes")
                }
            )
        )
    return block.model_copy(update={"costs": tuple(rows)})


def attention_in_steps(count: int, sequence: int, size: int) -> Operator:
    """Scores, softmax, dropout and mixture of ``count`` heads, each a kernel of its own.

    Bytes of a score that softmax and dropout move, and that are kept: Korthikanti et al., section 4.1.
    """
    scores, taken = count * sequence * sequence, count * sequence * size * WIDTH
    product = Kernel(2 * scores * size, 2 * taken + scores * WIDTH, matrix=True)
    return Operator(
        forward=(product, Kernel(8 * scores, 8 * scores), product),
        input_grad=(product, product, Kernel(8 * scores, 9 * scores), product, product),
        saved_bytes=3 * taken + 5 * scores,
        gradient_bytes=4 * taken,
    )


@cache
def cluster(num_devices: int) -> Cluster:
    """Some of the paper's testbed."""
    return named_cluster("autopipe", num_devices)


@cache
def estimated_head(name: str, samples: int) -> float:
    """What the head takes by the estimate, in layers."""
    totals = [each.compute_ns for each in estimated(name, samples)]
    return totals[-1] / sum(totals[1:3])


@dataclass(frozen=True)
class Case:
    """A model in micro-batches on some devices.

    ``head`` is what the head of GPT-2 345M is worth in layers, and those of all models take as much of their estimates;
    None as estimated.
    """

    model: str
    microbatch_size: int
    num_devices: int
    head: float | None

    def costs(self, samples: int) -> list[StageCost]:
        """[block] of so many samples."""
        costs = list(estimated(self.model, samples))
        if self.head is not None:
            part = self.head / estimated_head("gpt2-345m", samples)
            forward, backward = (round(part * each) for each in (costs[-1].forward_ns, costs[-1].backward_ns))
            costs[-1] = replace(costs[-1], forward_ns=forward, backward_ns=backward)
        return costs

    @cached_property
    def loads(self) -> ChainCosts:
        """Of a whole micro-batch."""
        return ChainCosts.of(self.costs(self.microbatch_size), transfer_ns=self.transfer_ns)

    @cached_property
    def layer_begins(self) -> list[int]:
        """The first block of the embedding, of each layer and of the head."""
        return [0, *range(1, 2 * LAYERS[self.model], 2), 2 * LAYERS[self.model] + 1]

    @property
    def transfer_ns(self) -> int:
        """Of a micro-batch's activations over the slowest link between the devices."""
        size = self.microbatch_size * estimated(self.model, 1)[1].activation_bytes  # with recomputation, its input
        return sum(transfer_time(cluster(self.num_devices), 0, self.num_devices - 1, size))

    def sync_ns(self, size: int, replicas: int) -> int:
        """All-reduce of so many bytes of gradients."""
        if replicas == 1:
            return 0
        return round(prices_in(cluster(self.num_devices))(Exchange("all_reduce", size), replicas))

    def parameters(self, begins: Cuts) -> list[int]:
        """[stage] bytes of gradients; of what blocks of a stage share once."""
        return self._summed(self.loads.gradients, begins)

    def statics(self, begins: Cuts) -> list[int]:
        """[stage] bytes that are held all the time."""
        return self._summed(self.loads.statics, begins)

    def _summed(self, sizes: Callable[[Any, Any], Any], begins: Cuts) -> list[int]:
        bounds = np.array((*begins, self.loads.num_blocks))
        found: list[int] = sizes(bounds[:-1], bounds[1:]).tolist()
        return found


# Plans, simulated alike ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stages:
    """Where each stage begins and its replicas, which share every micro-batch or else take whole ones in turn.

    In turn with as many replicas everywhere is AutoPipe's way: whole pipelines side by side.
    """

    begins: Cuts
    replicas: tuple[int, ...]
    shared: bool = False

    def named(self, case: Case) -> str:
        """Layers of each stage, times its replicas where there are several."""
        ends = [0, *(begin - 1 for begin in self.begins[1:]), 2 * LAYERS[case.model]]
        layers = [f"{(end - begin) / 2:g}" for begin, end in pairwise(ends)]
        if len(set(self.replicas)) == 1:
            return ", ".join(layers) + (f" (x {self.replicas[0]})" if self.replicas[0] > 1 else "")
        return ", ".join(f"{each} x {count}" for each, count in zip(layers, self.replicas, strict=True))

    def shares(self, case: Case) -> list[int]:
        """[stage] samples of a micro-batch that one replica works on."""
        return [-(-case.microbatch_size // count) if self.shared else case.microbatch_size for count in self.replicas]

    def loads(self, case: Case) -> StageTimes:
        """Of what one replica works on at a time."""
        each = [ChainCosts.of(case.costs(share)).stages(self.begins) for share in self.shares(case)]
        return StageTimes(
            tuple(loads.forwards[stage] for stage, loads in enumerate(each)),
            tuple(loads.backwards[stage] for stage, loads in enumerate(each)),
            case.transfer_ns,
        )

    def deviation(self, case: Case) -> float:
        """Standard deviation of how long a device of each stage works per micro-batch of the mini-batch, in ns."""
        turns = [1 if self.shared else count for count in self.replicas]
        return pstdev(total / count for total, count in zip(self.loads(case).totals, turns, strict=True))

    def iteration_ns(self, case: Case, num_microbatches: int) -> int:
        """Of 1F1B, until the last stage has summed its gradients."""
        turns = (1,) * len(self.begins) if self.shared else self.replicas
        ends = in_turn(self.loads(case), turns, num_microbatches)
        sizes = case.parameters(self.begins)
        return max(end + case.sync_ns(size, count) for end, size, count in zip(ends, sizes, self.replicas, strict=True))

    def needs(self, case: Case, num_microbatches: int) -> int:
        """Bytes on the device that needs most: a replica in turn holds its share of the micro-batches in flight."""
        turns = (1,) * len(self.begins) if self.shared else self.replicas
        found = []
        for stage, (begin, end) in enumerate(pairwise((*self.begins, case.loads.num_blocks))):
            costs = case.costs(self.shares(case)[stage])[begin:end]
            held = min(in_flight(turns, stage), -(-num_microbatches // turns[stage]))
            found.append(
                case.statics(self.begins)[stage]
                + held * sum(each.activation_bytes for each in costs)
                + max(each.workspace_bytes for each in costs)
            )
        return max(found)


def in_flight(replicas: Sequence[int], stage: int) -> int:
    """Micro-batches that a replica starts before its first backward: what keeps it and all after it busy."""
    return -(-sum(replicas[stage:]) // replicas[stage])


def in_turn(loads: StageTimes, replicas: Sequence[int], num_microbatches: int) -> list[int]:
    """[stage] the end of its last backward, when replicas take micro-batches in turn, each in the order of 1F1B."""
    ends: dict[Step, int] = {}
    waiting = {
        (stage, turn): one_f_one_b(range(turn, num_microbatches, count), in_flight(replicas, stage))
        for stage, count in enumerate(replicas)
        for turn in range(count)
    }
    free = dict.fromkeys(waiting, 0)
    while any(waiting.values()):
        before = len(ends)
        for device, order in waiting.items():
            while order and (arrival := arrival_of(order[0], device[0], ends, loads)) is not None:
                kind, index = order.pop(0)
                lasts = (loads.forwards if kind == "F" else loads.backwards)[device[0]]
                free[device] = ends[kind, device[0], index] = max(free[device], arrival) + lasts
        assert len(ends) > before, "replicas wait for each other"
    return [max(end for (at, _), end in free.items() if at == stage) for stage in range(len(replicas))]


def one_f_one_b(indices: Sequence[int], held: int) -> list[tuple[str, int]]:
    """So many forwards, then backwards and forwards in turn."""
    first = min(held, len(indices))
    order = [("F", index) for index in indices[:first]]
    for place, index in enumerate(indices):
        order.append(("B", index))
        order += [("F", later) for later in indices[first + place : first + place + 1]]
    return order


def arrival_of(action: tuple[str, int], stage: int, ends: Mapping[Step, int], loads: StageTimes) -> int | None:
    """When an action's input is there; None if it is not known yet."""
    kind, index = action
    source = (kind, stage - 1 if kind == "F" else stage + 1, index)
    if not 0 <= source[1] < loads.num_stages:
        return 0 if kind == "F" else ends.get(("F", stage, index))
    return ends[source] + loads.transfer_ns if source in ends else None


# Planners ----------------------------------------------------------------------------------------------------------


def autopipe(case: Case, mini_batch: int) -> Stages:
    """AutoPipe's planner, the depth included."""
    stages = next(plan_depths(whole_pipelines(case, mini_batch))).placement.stages
    return Stages(tuple(int(stage.blocks[0]) for stage in stages), tuple(stage.replicas for stage in stages))


def whole_pipelines(case: Case, mini_batch: int) -> PartitionProblem:
    """What AutoPipe's planner is asked: every number of replicas, each of which takes whole micro-batches in turn.

    That is the same as shares of micro-batches that are larger by the number of replicas.
    """
    size, costs = case.microbatch_size, case.costs(case.microbatch_size)
    names = [str(block) for block in range(len(costs))]
    ways = (Way(size * count, count, 0, True) for count in range(1, case.num_devices + 1))
    return PartitionProblem(
        {name: (cost,) for name, cost in zip(names, costs, strict=True)},
        tuple(pairwise(names)),
        case.num_devices,
        mini_batch,
        (Pricing(size, True),),
        tuple(way for way in ways if mini_batch % way.microbatch_size == 0),
        MEMORY,
        case.sync_ns,
    )


def problem_of(case: Case, mini_batch: int, *, shared: bool) -> PartitionProblem:
    """What DAPPLE's and Piper's planners are asked: layers, and every number of replicas.

    In turn a replica takes one of so many micro-batches, so a stage takes that part of the time per micro-batch, but
    each replica holds whole ones.
    """
    size, devices = case.microbatch_size, case.num_devices
    counts = range(1, (min(size, devices) if shared else devices) + 1)
    bounds = [*case.layer_begins, case.loads.num_blocks]
    each = [case.costs(-(-size // count) if shared else size) for count in counts]
    turns = [1 if shared else count for count in counts]
    layers = {
        str(begin): tuple(
            replace(cost, forward_ns=-(-cost.forward_ns // turn), backward_ns=-(-cost.backward_ns // turn))
            for cost, turn in zip(together(zip(*(row[begin:end] for row in each), strict=True)), turns, strict=True)
        )
        for begin, end in pairwise(bounds)
    }
    return PartitionProblem(
        layers,
        tuple(pairwise(layers)),
        devices,
        mini_batch,
        tuple(Pricing(-(-size // count), True) for count in counts),
        tuple(Way(size, count, row, True) for row, count in enumerate(counts)),
        MEMORY,
        case.sync_ns,
    )


def published(
    planner: Callable[[PartitionProblem], Iterator[Partition]], *, shared: bool
) -> Callable[[Case, int], Stages]:
    """A published planner in the form of ours."""

    def plan(case: Case, mini_batch: int) -> Stages:
        stages = next(planner(problem_of(case, mini_batch, shared=shared))).placement.stages
        return Stages(
            tuple(int(stage.blocks[0]) for stage in stages),
            tuple(stage.replicas for stage in stages),
            shared,
        )

    return plan


PLANNERS: dict[str, Callable[[Case, int], Stages]] = {
    "D": published(dapple, shared=True),
    "P": published(piper, shared=False),
    "A": autopipe,
}


def dapple_as_stated(case: Case, mini_batch: int) -> Stages:
    """Two stages, the first on one device (IV-D); of the cuts between layers that with DAPPLE's least latency.

    Its planner takes it that a share of a micro-batch takes that share of the time. On four devices the text has 7
    layers and 17 (IV-E1).
    """
    count, replicas = mini_batch // case.microbatch_size, (1, case.num_devices - 1)
    if (case.model, case.microbatch_size, case.num_devices) == ("gpt2-345m", 32, 4):
        return Stages((0, case.layer_begins[1 + 7]), replicas, shared=True)

    def value(begin: int) -> int:
        stages, sizes = case.loads.stages((0, begin)), case.parameters((0, begin))
        return latency(
            tuple(
                (stages.forwards[at] // of, stages.backwards[at] // of, case.sync_ns(sizes[at], of))
                for at, of in enumerate(replicas)
            ),
            count,
        )

    return Stages((0, min(case.layer_begins[2:], key=value)), replicas, shared=True)


def piper_as_stated(case: Case, num_stages: int) -> Stages:
    """So many stages (IV-D) with the least slowest one; the text says nothing about layers and replicas."""
    bounds = [*case.layer_begins, case.loads.num_blocks]
    sums = case.loads.compute.tolist()

    @cache
    def best(first: int, stages: int, devices: int) -> tuple[float, tuple[tuple[int, int], ...]]:
        last = len(bounds) - 1
        if stages == 0:
            return (0.0, ()) if first == last else (float("inf"), ())
        found: list[tuple[float, tuple[tuple[int, int], ...]]] = []
        for end in range(first + 1, last + 1):
            for count in range(1, devices - stages + 2):
                rest = best(end, stages - 1, devices - count)
                time_ = (sums[bounds[end]] - sums[bounds[first]]) / count
                found.append((max(time_, rest[0]), ((bounds[first], count), *rest[1])))
        return min(found, default=(float("inf"), ()))

    parts = best(0, num_stages, case.num_devices)[1]
    return Stages(tuple(begin for begin, _ in parts), tuple(count for _, count in parts))


def autopipe_as_stated(case: Case, num_stages: int, mini_batch: int) -> Stages:
    """AutoPipe's cut for a depth (IV-D)."""
    replicas = case.num_devices // num_stages
    found = plan_chain(case.loads, num_stages, mini_batch // case.microbatch_size // replicas)
    return Stages(found.begins, (replicas,) * num_stages)
