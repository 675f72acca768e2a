"""Published runs by the tool's own way: ``profile --estimate``, then ``search`` with the published sizes.

    python benchmarks/published_by_search.py                     # the table of docs/benchmarks/published-runs.md
    python benchmarks/published_by_search.py --only ID ...       # some of its runs
    python benchmarks/published_by_search.py --json
    python benchmarks/published_by_search.py --open 60 [--processor] [--only ID ...]   # a table of real-jobs.md there

With ``--open SECONDS`` nothing is fixed but the model, the samples and the devices: a search of so many seconds beside
one with the published sizes, both in the memory of the device, with rates fitted to the runs of all other sources and
links that reach them (dense models). With ``--processor`` seconds are of the process's own work.

Without it, beside each stands what ``published_runs.py`` prints of the run: its plan as published. Links are those of
the run's own cluster; memory has no limit, so that nothing but what was published is recomputed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from published_runs import RUNS, percent
from tables import markdown

import pipeplan
from pipeplan.costs.devices import device_preset
from pipeplan.costs.uniform.judging import Judged, fit_device, judge, read_runs
from pipeplan.costs.uniform.words import Transformer, UniformLayout
from pipeplan.errors import InfeasibleError
from pipeplan.planning.uniform import planned
from pipeplan.time_limit import Limit, WorkClock

KINDS = {
    "dgxc-2504-llama31-70b-bf16-64": "TP 4, PP 4, VP 5, CP 2, messages overlapped",
    "dgxc-2504-llama31-70b-bf16-512": "the same on 512",
    "dgxc-2504-llama31-405b-bf16-128": "TP 8, PP 4, VP 8, CP 2, layers uneven",
    "dgxc-2501-llama31-8b-bf16-16": "CP 2, ZeRO 1",
    "mpt-13b-s2048-h100_80gb-8-mbs2-noac-bf16": "FSDP on one node",
    "mpt-13b-s2048-h100_80gb-128-mbs16-ac-bf16": "FSDP, recomputed",
    "fmsfsdp-llama2-7b-h100-96": "FSDP in nodes",
    "torchtitan-a100-llama3-70b-full": "FSDP, recomputed",
    "automodel-llama370b-64": "FSDP, CP 2, recomputed",
    "torchtitan-70b-256-tp8-bf16-vanilla": "TP 8, FSDP",
    "torchtitan-70b-256-tp8-bf16-async": "TP 8, FSDP, messages overlapped",
    "internevo-7b-tp1-z8-512": "ZeRO 1 in nodes",
    "internevo-7b-tp2-z4-16": "TP 2, ZeRO 1 over 4",
    "dgxc-2504-grok1-314b-bf16-64": "experts, TP 4, PP 4, VP 8",
    "mbridge-25.11-GPTOSS120B-gb200-bf16-64-gbs1280": "experts over 64",
    "automodel-qwen3moe30b-8": "experts over 8, FSDP",
}
"""Runs of different kinds, with fused attention, and with layers recomputed wholly or not at all."""


def main() -> None:
    """Print the table, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=list(KINDS), metavar="ID")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--open", type=float, metavar="SECONDS")
    parser.add_argument("--processor", action="store_true")
    given = parser.parse_args()
    if given.open is not None:
        beside = list(opened(given.only, given.open, processor=given.processor))
        head = ["run", "measured, s", "its sizes, s", "search, s", "search is", "bound, s", "plan"]
        print(
            json.dumps(list(map(asdict, beside)), indent=1) if given.json else markdown(head, [e.row() for e in beside])
        )
        return
    found = list(compared(given.only))
    if given.json:
        print(json.dumps([each.figures() for each in found], indent=1))
        return
    head = ["run", "kind", "measured, s", "as published, s", "profile and search, s", "apart", "error"]
    print(markdown(head, [each.row() for each in found]))


@dataclass(frozen=True, slots=True)
class BySearch:
    """Seconds of an iteration: measured, of the published plan, and of what is searched with its sizes."""

    run: Judged
    as_published: float
    searched: float

    @property
    def apart(self) -> float:
        """Searched over published, less 1."""
        return self.searched / self.as_published - 1

    @property
    def error(self) -> float:
        """Searched over measured, less 1."""
        return self.searched / self.run.measured.step_s - 1

    def figures(self) -> dict[str, Any]:
        """Its object in JSON."""
        return {
            "id": self.run.id,
            "step_s": self.run.step_s,
            "as_published_s": self.as_published,
            "searched_s": self.searched,
            "apart": self.apart,
        }

    def row(self) -> list[str]:
        """As the table has it."""
        times = (self.run.measured.step_s, self.as_published, self.searched)
        kind = KINDS.get(self.run.id, "")
        return [self.run.id, kind, *(f"{each:.3f}" for each in times), percent(self.apart), percent(self.error)]


def compared(ids: list[str]) -> Iterator[BySearch]:
    """Runs by their ids, one after another."""
    judged = {each.id: each for each in judge(read_runs(RUNS)) if each.error is not None}
    for id_ in ids:
        if id_ not in judged:
            sys.exit(f"no run {id_!r} that is said in {RUNS}")
        run = judged[id_]
        plan = planned(id_, run.known.model, run.known.layout, run.known.machine)
        yield BySearch(run, plan.iteration_ns / 1e9, searched_s(run, plan.cluster))


def searched_s(run: Judged, cluster: pipeplan.Cluster, seconds: float = 15.0) -> float:
    """The iteration of what is found with the run's sizes, on what is estimated of its model."""
    layout = run.known.layout
    experts = int(layout.expert * layout.expert_tensor)
    profile = estimated(
        run,
        cluster,
        microbatch=int(layout.microbatch),
        shards=int(layout.tensor),
        context=int(layout.context),
        expert=max(1, experts),
        etp=int(layout.expert_tensor) if experts > 1 else 1,
    )
    asked: dict[str, Any] = {"memory": "10TB", "mini_batch": int(layout.global_batch), "time_limit": seconds}
    return pipeplan.search(profile, cluster=cluster, **asked, **sizes(layout)).plan.predicted.iteration_ns / 1e9


def estimated(run: Judged, cluster: pipeplan.Cluster, **how: Any) -> pipeplan.Profile:
    """The run's model as its device runs it, in its formats and with its attention."""
    layout = run.known.layout
    return pipeplan.estimate(
        configuration(run.known.model, tied=bool(run.known.model.tied) and layout.zero < 2),
        device=run.known.device,
        sequence=int(run.known.model.sequence),
        precision=layout.recipe,
        gradient_dtype="bf16" if layout.gradient_bytes == 2 and layout.recipe != "fp16-mixed" else None,
        overlap_tensor=bool(layout.overlap_tensor and how["shards"] != 1),
        attention=layout.attention,
        cluster=cluster,
        **how,
    )


@dataclass(frozen=True, slots=True)
class Opened:
    """Seconds of an iteration: measured, of the published sizes, of a search with all open, and that one's bound."""

    id: str
    measured_s: float
    published_s: float | None
    searched_s: float
    bound_s: float
    plan: str
    notes: str

    def row(self) -> list[str]:
        """As the table has it."""
        theirs, longer = "does not fit", ""
        if self.published_s is not None:
            theirs, longer = f"{self.published_s:.3f}", percent(self.searched_s / self.published_s - 1)
        ours, bound = f"{self.searched_s:.3f}", f"{self.bound_s:.3f}"
        return [self.id, f"{self.measured_s:.3f}", theirs, ours, longer, bound, self.plan]


def opened(ids: list[str], seconds: float, *, processor: bool) -> Iterator[Opened]:
    """Dense runs by their ids: their sizes, and all open, by what all other sources' runs reached of the device."""
    rows = read_runs(RUNS)
    judged = {each.id: each for each in judge(rows) if each.error is not None and each.is_dense}
    for id_ in ids:
        if id_ not in judged:
            sys.exit(f"no run {id_!r} of a dense model that is said in {RUNS}")
        run = judged[id_]
        others = [row for row in rows if row["source"] != run.source]
        fit = fit_device(others, run.known.device)
        known = run.known.at(fit.shares)
        layout, preset = known.layout, device_preset(known.device)
        cluster = planned(id_, known.model, layout, known.machine).cluster
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(others, file)
            file.flush()
            how: dict[str, Any] = {"microbatch": (1, 2), "shards": (1, 2, 4, 8), "calibrate": Path(file.name)}
            profile = estimated(run, cluster, **how)
        asked: dict[str, Any] = {
            "cluster": cluster,
            "memory": f"{preset.memory_bytes - preset.reserve_bytes}B",
            "mini_batch": int(layout.global_batch),
            "time_limit": seconds,
        }
        theirs: float | None = None
        with suppress(InfeasibleError):
            within = Limit(seconds, clock=WorkClock()) if processor else None
            theirs = pipeplan.search(profile, within=within, **asked, **sizes(layout)).plan.predicted.iteration_ns / 1e9
        ours = pipeplan.search(profile, within=Limit(seconds, clock=WorkClock()) if processor else None, **asked)
        times = run.measured.step_s, theirs, ours.plan.predicted.iteration_ns / 1e9, ours.lower_bound_ns / 1e9
        yield Opened(id_, *times, said(ours.plan), fit.notes)


def said(plan: pipeplan.Plan) -> str:
    """The sizes of a plan's stages, its schedule, and how many stages each position has."""
    kinds = dict.fromkeys((each.shards, each.context, each.replicas, each.zero) for each in plan.stages)
    sizes = " and ".join(f"tp {shards} cp {context} dp {dp} ZeRO {zero}" for shards, context, dp, zero in kinds)
    positions = len({each.devices for each in plan.stages})
    return f"{sizes}, {len(plan.stages)} stages on {positions} positions, {plan.provenance.scheduler}"


def sizes(layout: UniformLayout) -> dict[str, Any]:
    """A layout as ``search`` is asked for it."""
    found: dict[str, Any] = {"tp": int(layout.tensor), "pp": int(layout.pipeline), "dp": int(layout.data)}
    found["microbatch_size"] = int(layout.microbatch * layout.data)
    found["cp"] = int(layout.context)
    if layout.context > 1:
        found["cp_exchange"] = "ring" if layout.ring else "gathered"
    if layout.expert > 1:
        found |= {"ep": int(layout.expert * layout.expert_tensor), "etp": int(layout.expert_tensor)}
    if layout.pipeline > 1:
        found |= {"chunks": int(layout.chunks), "scheduler": "interleaved-1f1b" if layout.chunks > 1 else "1f1b"}
    found["zero"] = int(layout.zero) if layout.data * layout.context > 1 else 0
    if found["zero"] and layout.zero_group < layout.data * layout.context:
        found["zero_group"] = int(layout.zero_group)
    if found["zero"] > 1:
        found["zero_exchange"] = "inside"
    again = (layout.again_core, layout.again_up, layout.again_products, layout.again_elementwise)
    found["recompute"] = {(0, 0, 0, 0): "none", (1, 0, 0, 0): "selective"}.get(again, "all" if all(again) else "none")
    return found


def configuration(model: Transformer, *, tied: bool) -> str:
    """The model as a Hugging Face configuration; tables that are exchanged block by block are not tied."""
    if not model.gated and model.kv_heads == model.heads:
        return (
            f"GPT2Config(n_embd={model.hidden}, n_inner={model.ffn}, n_layer={model.layers}, n_head={model.heads}, "
            f"vocab_size={model.vocabulary}, n_positions={model.sequence}, attn_pdrop=0.0, "
            f"tie_word_embeddings={tied})"
        )
    kind, more = "LlamaConfig", ""
    if model.experts:
        kind = "Qwen3MoeConfig"
        more = (
            f", num_experts={model.experts}, num_experts_per_tok={model.top_k}, moe_intermediate_size={model.moe_ffn}"
        )
    return (
        f"{kind}(hidden_size={model.hidden}, intermediate_size={model.ffn}, num_hidden_layers={model.layers}, "
        f"num_attention_heads={model.heads}, num_key_value_heads={model.kv_heads}, head_dim={model.head_size}, "
        f"vocab_size={model.vocabulary}, max_position_embeddings={model.sequence}, "
        f"tie_word_embeddings={tied}{more})"
    )


if __name__ == "__main__":
    main()
