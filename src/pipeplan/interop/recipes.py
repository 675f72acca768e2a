"""Recipes around a schedule's CSV: a Python function for torchtitan, a YAML block for NeMo AutoModel."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from pipeplan.errors import UsageError
from pipeplan.files import Plan
from pipeplan.interop.settings import torchtitan_settings
from pipeplan.workload.elements import GATHERED_CONTEXT, RING

SCHEDULE = "schedule.csv"
"""The schedule, in the folder of its recipe."""

_STANDS = {"one-to-one": "1F1B", "circular": "Interleaved1F1B", "v-shape": "ZBVZeroBubble"}
"""A schedule of torch by name, from which both find out which rank has which stages; the order is the CSV's."""


def schedule_name(ranks: Sequence[int], count: int) -> str:
    """The name whose stages stand on these ``ranks`` [stage], of ``count``: loops, or a V of two on each."""
    if len(ranks) == count:
        return _STANDS["one-to-one"]
    return _STANDS["circular" if list(ranks) == [stage % count for stage in range(len(ranks))] else "v-shape"]


# torchtitan ----------------------------------------------------------------------------------------------------------

_PYTHON_NAME = r"[A-Za-z_]\w*"
_BASE = re.compile(rf"({_PYTHON_NAME}(?:\.{_PYTHON_NAME})*):({_PYTHON_NAME})")

_MICROBATCHES = '''

def _set_microbatches(parallelism, size: int, count: int) -> None:
    """By what this torchtitan calls it: a size (0.3.0), or a number."""
    for name, value in (("pipeline_parallel_microbatch_size", size), ("num_pp_microbatches", count)):
        if hasattr(parallelism, name):
            setattr(parallelism, name, value)
            return
    raise AttributeError("this torchtitan has another name for the size of micro-batches than those known")
'''


def torchtitan_recipe(plan: Plan, names: Sequence[Sequence[str]], schedule: str, base: str | None) -> str:
    """A module whose ``planned`` is the recipe ``base`` (``pkg.mod:function``) with the plan in it.

    Raises:
        UsageError: ``base`` is not of that form.
    """
    settings = [*_settings(plan)]
    imports = sorted({line for _, line in settings if line})
    lines = [
        '"""A plan as a recipe of torchtitan, written by pipeplan: MODULE=planned CONFIG=planned ./run_train.sh"""',
        "",
        "from pathlib import Path",
        "",
        *imports,
        *_base(base),
        "",
        "MODULES = [",
        *(f"    {json.dumps(list(own))}," for own in names),
        "]",
        '"""By stage; the order in which ranks run them is that of the schedule beside this file."""',
        "",
        "",
        "def planned():",
        '    """The base recipe, with the plan\'s pipeline."""',
        "    config = base()",
        *(f"    config.{line}" for line, _ in settings),
        "    config.parallelism.module_fqns_per_model_part = MODULES",
        f"    config.parallelism.pipeline_parallel_schedule = {schedule!r}  # where stages stand",
        f"    config.parallelism.pipeline_parallel_schedule_csv = str(Path(__file__).parent / {SCHEDULE!r})",
        f"    _set_microbatches(config.parallelism, {plan.microbatch_size // plan.stages[0].replicas}, "
        f"{plan.num_microbatches})",
        "    return config",
    ]
    return "\n".join(lines) + "\n" + _MICROBATCHES


def _settings(plan: Plan) -> Iterator[tuple[str, str]]:
    """(what is set, the import that it needs); without what the schedule says."""
    for line in torchtitan_settings(plan.workload, plan.provenance.scheduler):
        if line.startswith(("#", "parallelism.pipeline_parallel_schedule", "parallelism.pipeline_parallel_microbatch")):
            continue
        kind = re.search(r"= (\w+)\.Config\(\)", line)
        needed = "" if kind is None else f"from torchtitan.distributed.activation_checkpoint import {kind[1]}"
        yield line, needed


def _base(base: str | None) -> list[str]:
    if base is None:  # text of the recipe, which runs when a base has been named
        return [
            "",
            "",
            "def base():",
            '    """The recipe of your model."""',
            '    raise NotImplementedError("name yours: pipeplan export PLAN --to torchtitan --base pkg.mod:function")',
            "",
        ]
    found = _BASE.fullmatch(base)
    if found is None:
        raise UsageError(f"--base {base!r} is not of the form pkg.mod:function, such as my_recipes:llama3_8b")
    own = found[2] if found[2] == "base" else f"{found[2]} as base"
    return [f"from {found[1]} import {own}"]


# NeMo AutoModel ------------------------------------------------------------------------------------------------------


_EXCHANGED = {
    RING: "  # with keys and values around a ring, as Transformer Engine's attention sends them",
    GATHERED_CONTEXT: "  # with keys and values gathered, as torch's own attention has them",
}


def automodel_recipe(plan: Plan, names: Sequence[Sequence[str]], schedule: str) -> str:
    """The blocks of a recipe that the plan settles, as YAML; everything else of a recipe stays one's own."""
    stage = plan.stages[0]
    if stage.expert_shards > 1:
        raise UsageError(
            f"stages[0].expert_shards is {stage.expert_shards}: NeMo AutoModel's experts are whole; plan with "
            "--etp 1, or --for automodel"
        )
    again = {True: "full", "selective": "selective", False: False}[stage.again[-1] if stage.again else False]
    count = len({each.devices for each in plan.stages})
    lines = [
        "# A plan as blocks of a NeMo AutoModel recipe, written by pipeplan. The path is from where you start.",
        "step_scheduler:",
        f"  global_batch_size: {plan.mini_batch}",
        f"  local_batch_size: {plan.mini_batch // stage.replicas}",
        "distributed:",
        "  strategy: fsdp2",
        f"  dp_size: {stage.replicas}",
        f"  tp_size: {stage.shards}",
        f"  cp_size: {stage.context}{_EXCHANGED.get(stage.context_exchange, '') if stage.context > 1 else ''}",
        f"  pp_size: {count}",
        f"  ep_size: {stage.expert}",
        f"  activation_checkpointing: {json.dumps(again)}",
        "  pipeline:",
        f"    pp_schedule: {json.dumps(schedule)}  # where stages stand",
        f"    pp_schedule_csv: {SCHEDULE}",
        f"    pp_microbatch_size: {plan.microbatch_size // stage.replicas}",
        "    module_fqns_per_model_part:",
        *(f"    - {json.dumps(list(own))}" for own in names),
    ]
    return "\n".join(lines) + "\n"
