"""A plan's sizes as settings of torchtitan, Megatron-LM and transformers' Trainer, one per line.

Names are those of the configuration classes in torchtitan 0.3.0 (config/configs.py, activation_checkpoint.py),
of the arguments of Megatron-LM beside megatron-core 0.16, and of TrainingArguments in transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeplan.catalog import export_target
from pipeplan.costs.zero import GATHERED
from pipeplan.files import Plan
from pipeplan.schedule.state import origin_of
from pipeplan.simulator.simulation import Simulation
from pipeplan.workload.elements import GATHERED_CONTEXT, RING, ContextExchange, Stage
from pipeplan.workload.workload import Workload

_TORCHTITAN_SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved-1f1b": "Interleaved1F1B",
    "looped-bfs": "LoopedBFS",
    "interleaved-zb": "InterleavedZeroBubble",
    "zb-v": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
}
"""Names of ``pipeline_parallel_schedule``."""


def trainer_settings(simulation: Simulation) -> list[tuple[str, list[str]]]:
    """For each trainer its title, what to set in it, and what of the plan it has no setting for."""
    scheduler, divided = simulation.plan.provenance.scheduler, divides_sequence(simulation.plan)
    return [
        ("torchtitan 0.3", torchtitan_settings(simulation.workload, scheduler)),
        ("Megatron-LM", megatron_settings(simulation.workload, scheduler, divided=divided)),
        ("transformers' Trainer", trainer_arguments(simulation.workload)),
    ]


def torchtitan_settings(workload: Workload, scheduler: str) -> list[str]:
    """Lines of a torchtitan configuration; remarks on what it has no setting for begin with ``#``."""
    stage, remark = _uniform(workload, "torchtitan")
    if stage is None:
        return [remark]
    if stage.expert_shards not in (1, stage.shards):
        return [
            f"# no settings: {stage.expert_shards} devices split each expert, and torchtitan's experts are whole or "
            f"split by as many as all else ({stage.shards})"
        ]
    positions, _ = _pipeline(workload)
    group = _zero_group(stage)
    shard = max(1, group // stage.context) if stage.zero > 1 else 1
    lines = [
        f"parallelism.pipeline_parallel_degree = {positions}",
        f"parallelism.tensor_parallel_degree = {stage.shards}",
        f"parallelism.context_parallel_degree = {stage.context}",
        f"parallelism.data_parallel_replicate_degree = {stage.replicas // shard}",
        f"parallelism.data_parallel_shard_degree = {shard}",
        f"training.global_batch_size = {workload.mini_batch}",
    ]
    lines.extend(_rotated(stage))
    if stage.expert > 1:
        lines.insert(3, f"parallelism.expert_parallel_degree = {stage.expert // stage.expert_shards}")
    if stage.expert_shards > 1:
        lines.insert(4, f"parallelism.expert_tensor_parallel_degree = {stage.expert_shards}")
    if stage.zero > 1:
        never = "never" if stage.zero == 2 else "always"
        lines.append(f"parallelism.fsdp_reshard_after_forward = {never!r}")
    samples = workload.microbatch_size // stage.replicas
    if positions > 1:
        lines += [
            f"training.local_batch_size = {workload.mini_batch // stage.replicas}",
            f"parallelism.pipeline_parallel_microbatch_size = {samples}",
        ]
        name = _TORCHTITAN_SCHEDULES.get(origin_of(scheduler)) if "+" not in scheduler else None
        lines.append(
            f"parallelism.pipeline_parallel_schedule = {name!r}"
            if name is not None
            else f"# no name for the schedule ({scheduler}): it takes orders by pipeline_parallel_schedule_csv"
        )
        if name is not None and workload.splits_backward and name not in _SPLIT_BY_TORCH:
            lines.append(f"# {name} runs each backward whole, the plan splits it: {_AS_IT_IS}")
    else:
        lines.append(f"training.local_batch_size = {samples}")
    if stage.zero == 1:
        lines.append("# no setting for ZeRO 1: replicas keep their optimizer state whole or shard everything (FSDP)")
    kept = "activation_checkpoint = {}.Config()"
    near = f"{kept.format('SelectiveAC')}  # by operations; the plan recomputes attention cores"
    return [*lines, *_recomputation(workload, [kept.format("FullAC")], [near])]


def megatron_settings(workload: Workload, scheduler: str, *, divided: bool = False) -> list[str]:
    """Arguments of Megatron-LM, a line each; remarks on what it has no argument for begin with ``#``."""
    stage, remark = _uniform(workload, "megatron")
    if stage is None:
        return [remark]
    positions, chunks = _pipeline(workload)
    lines = megatron_sizes(workload, positions, divided=divided)
    if chunks > 1:
        lines.append(f"--num-virtual-stages-per-pipeline-rank {chunks}")
    lines += megatron_zero(stage)
    if stage.zero > 1:
        lines.append(f"# that is ZeRO 1; the plan's ZeRO {stage.zero} needs an FSDP implementation")
    runs = export_target("megatron").schedule_names
    if positions > 1 and scheduler not in runs:
        lines.append(f"# it runs {' and '.join(runs)} only, not this schedule ({scheduler})")
    elif positions > 1 and workload.splits_backward:
        lines.append("# it runs each backward whole, the plan splits it; search with --split-backward no")
    return [*lines, *_recomputation(workload, MEGATRON_FULL, MEGATRON_SELECTIVE)]


def trainer_arguments(workload: Workload) -> list[str]:
    """Transformers' ``TrainingArguments``, a line each; remarks on what it has no argument for begin with ``#``."""
    first = workload.stages[0]
    if len(workload.stages) > 1 or first.shards * first.context * first.expert > 1 or first.configurations:
        return ["# no settings: it trains copies of the whole model; search with --pp 1 --tp 1 --cp 1 --ep 1"]
    lines = [
        f"per_device_train_batch_size = {workload.microbatch_size // first.replicas}",
        f"gradient_accumulation_steps = {workload.num_microbatches}",
    ]
    recomputing = "activation_checkpointing = True"
    if first.zero == 1:
        lines.append("# ZeRO 1: a DeepSpeed configuration with zero_optimization.stage = 1")
    if first.zero > 1:
        lines.append("fsdp = True")
        recomputing = 'fsdp_config["activation_checkpointing"] = True'
        lines.append(f'fsdp_config = {{"reshard_after_forward": {first.zero == GATHERED}}}')
    if first.zero > 1 and (group := _zero_group(first)) < first.copies:
        sizes = f"dp_replicate_size={first.copies // group}, dp_shard_size={group}"
        lines.append(f"parallelism_config = ParallelismConfig({sizes})")
    return [*lines, *_recomputation(workload, [recomputing], ["# no setting for attention cores alone"])]


_SPLIT_BY_TORCH = ("ZBVZeroBubble", "InterleavedZeroBubble", "DualPipeV")
"""Schedules that torch runs with weight gradients apart."""

_AS_IT_IS = "export --to torch writes its order, or search with --split-backward no"

MEGATRON_FULL = ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"]
"""Every layer is computed again; without a method Megatron-LM refuses that."""

MEGATRON_SELECTIVE = ["--recompute-granularity selective"]


def megatron_block(layers: int) -> list[str]:
    """The first so many layers of every stage, virtual ones too, are computed again."""
    return ["--recompute-granularity full", "--recompute-method block", f"--recompute-num-layers {layers}"]


def divides_sequence(plan: Plan) -> bool:
    """Whether the plan says that devices which split blocks divide the sequence beside that."""
    return plan.provenance.options.get("sequence_parallel") is True


def megatron_sizes(workload: Workload, positions: int, *, divided: bool = False) -> list[str]:
    """Arguments for the sizes of a pipeline whose stages are all split alike, and ``divided`` by sequence beside it."""
    stage = workload.stages[0]
    return [
        f"--pipeline-model-parallel-size {positions}",
        f"--tensor-model-parallel-size {stage.shards}",
        *(["--sequence-parallel"] if divided and stage.shards > 1 else []),
        f"--context-parallel-size {stage.context}",
        *([f"--cp-comm-type {_MEGATRON_EXCHANGES[stage.context_exchange]}"] if stage.context > 1 else []),
        *(_megatron_experts(stage) if stage.expert > 1 else []),
        f"--micro-batch-size {workload.microbatch_size // stage.replicas}",
        f"--global-batch-size {workload.mini_batch}",
    ]


_MEGATRON_EXCHANGES: Mapping[ContextExchange, str] = {RING: "p2p", GATHERED_CONTEXT: "all_gather"}
"""How keys and values of devices that share sequences are exchanged, as Megatron-LM calls it."""


def _rotated(stage: Stage) -> list[str]:
    """How torch's context parallelism exchanges keys and values: all at once, or piece by piece beside attention."""
    if stage.context == 1:
        return []
    method = "alltoall" if stage.context_exchange == RING else "allgather"
    return [f"parallelism.context_parallel_rotate_method = {method!r}"]


def _megatron_experts(stage: Stage) -> list[str]:
    """What its experts' tensor size is by default is that of all else (``--tensor-model-parallel-size``)."""
    sizes = [f"--expert-model-parallel-size {stage.expert // stage.expert_shards}"]
    said = stage.expert_shards != stage.shards
    return sizes + [f"--expert-tensor-parallel-size {stage.expert_shards}"] * said


def megatron_zero(stage: Stage) -> list[str]:
    """Arguments for replicas that divide the optimizer's state."""
    if not stage.zero:
        return []
    instances = stage.copies // _zero_group(stage)
    number = [f"--num-distributed-optimizer-instances {instances}"] if instances > 1 else []
    return ["--use-distributed-optimizer", *number]


def _uniform(workload: Workload, target: str) -> tuple[Stage | None, str]:
    """A stage that represents all stages; or none, and the reason."""
    able = export_target(target)
    stages = workload.stages
    keys = ("shards", "context", "context_exchange", "expert", "expert_shards", "replicas", "zero", "zero_group")
    splits = {tuple(getattr(each, key) for key in keys) for each in stages}
    if len(splits) > 1 or any(each.configurations for each in stages):
        return None, "# no settings: stages differ in how they are split"
    places = able.placements or ()
    if workload.placement not in places and len(stages) > 1:
        return None, f"# no settings: it places stages {' or '.join(places)}, not {workload.placement}"
    return stages[0], ""


def _pipeline(workload: Workload) -> tuple[int, int]:
    """Positions, and stages at each of them."""
    positions = len({stage.devices for stage in workload.stages})
    return positions, len(workload.stages) // positions


def _zero_group(stage: Stage) -> int:
    """How many copies share one of what they divide."""
    return stage.zero_group or stage.copies


def _recomputation(workload: Workload, full: Sequence[str], selective: Sequence[str]) -> list[str]:
    """The settings that all blocks share, or a line that there are none."""
    found = set[object]()
    for stage in workload.stages:
        found.update(stage.recompute if isinstance(stage.recompute, tuple) else [stage.recompute])
    settings = {frozenset({True}): full, frozenset({"selective"}): selective, frozenset({False}): ()}
    return [*settings.get(frozenset(found), ("# recomputation differs from block to block: see --details",))]
