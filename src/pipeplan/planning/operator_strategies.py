"""Plans whose blocks are each split their own way over the devices of their stage.

Strategies as plans: one stage whose blocks are each split as a point of the cost frontier says (TensorOpt).

A strategy of whole blocks is what the executor runs: its meshes are the stage's configurations, and what it costs is
the stage's: times of forward and backward with all that is exchanged in them, sums of gradients once per iteration.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass, replace
from fractions import Fraction

from pipeplan._version import __version__
from pipeplan.checker import check
from pipeplan.costs import StageCost, build_workload
from pipeplan.errors import UsageError
from pipeplan.files import Cluster, PlacedStage, Placement, Plan, Profile, Provenance, sha256_of
from pipeplan.partition.per_block_sharding import GroupSplits
from pipeplan.planning.build_plan import assemble
from pipeplan.planning.candidates import PlacementCandidate
from pipeplan.sharding.configurations.building import CostModel
from pipeplan.sharding.configurations.details import OUTSIDE, Details, details_of
from pipeplan.sharding.graph import Strategy
from pipeplan.workload.bounds import weak_makespan_bound
from pipeplan.workload.task_graph import TaskGraph, task_graph

__all__ = ["SplitBlocks", "StageSplits", "plan_of_strategy", "split_blocks"]


@dataclass(frozen=True, slots=True)
class SplitBlocks:
    """Blocks in the order they run, how each is split over the devices of a stage, and what that costs per device."""

    blocks: tuple[str, ...]
    configurations: tuple[str, ...]
    costs: StageCost


def split_blocks(model: CostModel, strategy: Strategy) -> SplitBlocks:
    """What a stage runs by a strategy of whole blocks.

    Times add up to the strategy's for one micro-batch; what workspace takes while a block runs comes on top of its
    memory.

    Raises:
        UsageError: the strategy splits operators inside of blocks, loads data by an operator of its own, or makes
            tensors again for backward.
    """
    details = _inside(details_of(model, strategy))
    blocks = tuple(each.name for each in details.operators)
    for each in details.operators:
        if each.name != each.block:
            raise UsageError(
                f"the strategy splits {each.name!r}, an operator of block {each.block!r}, and plans run whole blocks; "
                "track the frontier of whole blocks"
            )
    again = next((each.link for each in details.tensors if each.again), None)
    if again is not None:
        raise UsageError(
            f"the strategy makes the output of {again.source!r} again for the backward of {again.target!r}, and plans "
            "keep what backward needs; track a frontier of blocks that keep it themselves"
        )
    devices = model.resharding.devices
    names = tuple(each.configuration.name for each in details.operators)
    return SplitBlocks(blocks, names if devices > 1 else (), _costs(details, strategy, model.options.microbatches))


def plan_of_strategy(
    profile: Profile,
    model: CostModel,
    strategy: Strategy,
    *,
    cluster: Cluster | None = None,
    memory_bytes: int | None = None,
) -> Plan:
    """The plan that runs a strategy on all of the model's devices, checked.

    With the micro-batches that the model's options say, of which so many hold activations at once; their simulated
    time and memory are the strategy's.

    Args:
        profile: of which the model is.
        model: with whole blocks.
        strategy: of the model's graph.
        cluster: the model's; its first devices are named in the plan.
        memory_bytes: of every device, if not the cluster's.

    Raises:
        UsageError: as :func:`split_blocks`.
        InvalidPlanError: it needs more memory than a device has.
    """
    split, options, devices = split_blocks(model, strategy), model.options, model.resharding.devices
    samples = model.operators.nodes[0].operation.axis("samples").size
    stage = PlacedStage(
        blocks=split.blocks, devices=tuple(range(devices)), shards=devices, configurations=split.configurations
    )
    workload = build_workload(
        profile,
        Placement(strategy="strategy", num_devices=devices, stages=(stage,)),
        num_microbatches=options.microbatches,
        microbatch_size=samples,
        cluster=cluster,
        memory_bytes=None if memory_bytes is None else [memory_bytes] * devices,
        given={0: split.costs},
    )
    graph = task_graph(workload)
    plan = assemble(
        graph,
        [_order(graph, options.in_flight)] * devices,
        weak_makespan_bound(workload),
        Fraction(split.costs.forward_ns + split.costs.backward_ns),
        "strategy",
        provenance=_provenance(profile, cluster, samples, options.microbatches),
    )
    check(plan, profile, cluster if memory_bytes is None else None).require("the plan of the strategy")
    return plan


def _inside(details: Details) -> Details:
    """The operators of a stage, without what stands for other stages; changes of what these exchange with it stay."""
    return replace(details, operators=tuple(each for each in details.operators if each.block != OUTSIDE))


def _costs(details: Details, strategy: Strategy, microbatches: int) -> StageCost:
    """What a stage takes; forward and backward together take what the strategy does, to the nanosecond."""
    chosen = [each.configuration for each in details.operators]
    state = sum(each.state_bytes for each in chosen)
    parameters = min(sum(each.parameter_bytes for each in chosen), state // 2)
    forward = sum(each.forward_ns for each in chosen) + sum(each.forward_ns for each in details.tensors)
    sums = sum(-(-each.sync_ns // microbatches) for each in chosen)
    backward, weights = strategy.time_ns - sums - forward, sum(each.weight_grad_ns for each in chosen)
    deferred = [each.deferred_bytes for each in chosen if each.deferred_bytes is not None]
    parted = len(deferred) == len(chosen)
    return StageCost(
        forward_ns=max(1, forward),
        backward_ns=max(1, backward),
        input_grad_ns=max(1, backward - weights) if parted else None,
        weight_grad_ns=max(1, weights) if parted else None,
        activation_bytes=sum(each.kept_bytes for each in details.operators)
        + sum(each.held_bytes for each in details.tensors),
        weight_grad_bytes=sum(deferred) if parted else 0,
        workspace_bytes=max(each.workspace_bytes for each in chosen),
        parameter_bytes=parameters,
        optimizer_bytes=state - 2 * parameters,
        sync_ns=sum(each.sync_ns for each in chosen),
    )


def _order(graph: TaskGraph, in_flight: int) -> list[int]:
    """Forwards as far ahead as micro-batches may hold activations at once, each backward as soon as it can."""
    forwards, backwards = (range(graph.offsets[index], graph.offsets[index + 1]) for index in (0, 1))
    ahead = min(in_flight, len(forwards)) - 1
    order = list(forwards[:ahead])
    for microbatch, task in enumerate(backwards):
        order += [*forwards[ahead + microbatch : ahead + microbatch + 1], task]
    return order


def _provenance(profile: Profile, cluster: Cluster | None, samples: int, microbatches: int) -> Provenance:
    return Provenance(
        profile=profile.name,
        profile_sha256=sha256_of(profile),
        cluster_sha256=sha256_of(cluster) if cluster is not None else "",
        options={"num_microbatches": microbatches, "microbatch_size": samples},
        versions={"pipeplan": __version__, "python": platform.python_version()},
    )


@dataclass(slots=True)
class StageSplits:
    """The cost frontiers of stages of a profile."""

    known: GroupSplits

    def split(self, candidate: PlacementCandidate, memory_bytes: int | None) -> PlacementCandidate | None:
        """The candidate with every stage on several devices at the quickest point of its frontier that memory allows.

        The k-th stage from the end holds k micro-batches in flight. None where no stage has such a point.
        """
        stages = list(candidate.placement.stages)
        given: dict[int, StageCost] = {}
        for place, stage in enumerate(stages):
            in_flight = min(len(stages) - place, candidate.batch.num_microbatches)
            size = stage.microbatch_size or candidate.batch.microbatch_size
            found = self._quickest(stage, size, in_flight, candidate.batch.mini_batch // size, memory_bytes)
            if found is not None:
                stages[place], given[place] = found
        if not given:
            return None
        placement = candidate.placement.model_copy(update={"stages": tuple(stages)})
        return replace(candidate, placement=placement, source=f"{candidate.source}, split", given=given)

    def _quickest(
        self, stage: PlacedStage, size: int, in_flight: int, num_microbatches: int, memory_bytes: int | None
    ) -> tuple[PlacedStage, StageCost] | None:
        if len(stage.devices) == 1:
            return None
        limit, chosen = float("inf") if memory_bytes is None else memory_bytes, set(stage.blocks)
        points = [
            splits.holding(in_flight).quickest([name for name in splits.order if name in chosen], limit)
            for splits in self.known.of(len(stage.devices), size, num_microbatches, (False, True))
        ]
        point = min((each for each in points if each is not None), key=lambda each: each.time_ns, default=None)
        if point is None:
            return None
        split = split_blocks(point.model, point.strategy)
        ways = {
            "blocks": split.blocks,
            "configurations": split.configurations,
            "shards": len(stage.devices),
            "replicas": 1,
            "recompute": point.recompute,
        }
        return stage.model_copy(update=ways), split.costs
