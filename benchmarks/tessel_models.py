"""Tessel's GPT and mT5 on its V100s (VI-D, Fig. 13, 14, 16): 1F1B, Chimera, 1F1B+ and the repetend search.

    python benchmarks/tessel_models.py --kept rows.jsonl [--model gpt] [--limit 20]       # some 20 minutes for all

Prints Markdown tables. Costs are estimated and iterations simulated: nothing is measured. Mini-batches of 128 samples,
all layers recomputed, micro-batches of 1 to 8 samples, as many GPUs as in Fig. 13. Every schedule has the best layout
that ``pipeplan search`` finds with ``--scheduler`` and all other flags the same: whole devices, or blocks split over
2 to as many as divide the heads. 1F1B and Chimera keep embedding and head in their first and last stages, 1F1B+ and the
repetend have them on all devices. 1F1B may be one stage on all devices; beside it is that of two and more stages. All
have the same time, ``--limit`` seconds, then twice as much, until a doubling shortens none by a thousandth. Models that
are done are kept in a file, and not done again.

The paper's models do not fit its cluster with 16 bytes of state per parameter, as mixed precision has them (24 billion
parameters are 388 GB, eight V100s have 256). They fit with everything in 16 bits, 8 bytes per parameter, which
``--precision`` says here.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tables import machine, markdown, note

import pipeplan
from pipeplan.costs.clusters import named_cluster
from pipeplan.errors import InfeasibleError, SearchTimeoutError
from pipeplan.examples import model
from pipeplan.files import Plan

MODELS = {
    "gpt": {4: "tessel-gpt-11b", 8: "tessel-gpt-24b", 16: "tessel-gpt-47b", 32: "tessel-gpt-77b"},
    "mt5": {4: "tessel-mt5-1.8b", 8: "tessel-mt5-9.5b", 16: "tessel-mt5-43b", 32: "tessel-mt5-88b"},
}
HEADS = {"tessel-gpt-11b": 32, "tessel-gpt-24b": 48, "tessel-mt5-1.8b": 16, "tessel-mt5-9.5b": 24, "tessel-mt5-43b": 48}
"""Table III; all others have 64."""
SIDES: dict[str, dict[str, Any]] = {
    "1F1B": {"scheduler": "1f1b", "shard_shared": "no"},
    "1F1B of stages": {"scheduler": "1f1b", "shard_shared": "no", "pp": "each"},
    "Chimera": {"scheduler": "chimera", "placement": "bidirectional", "shard_shared": "no"},
    "1F1B+": {"scheduler": "1f1b+", "shard_shared": "yes"},
    "Tessel": {"scheduler": "repetend", "placement": "one-to-one", "shard_shared": "yes"},
}
STILL, MOST_SECONDS = 0.001, 160.0


@dataclass(frozen=True, slots=True)
class Found:
    """A schedule's iteration and what its busiest device computes, in ns; and its layout in words."""

    iteration_ns: int
    busy_ns: int
    layout: str

    @classmethod
    def of(cls, plan: Plan) -> Found:
        workload = plan.workload
        busy = dict.fromkeys(range(len(plan.devices)), 0)
        for place, on in enumerate(workload.resources):
            for device in on:
                busy[device] += workload.work_of(place)
        return cls(plan.predicted.iteration_ns, max(busy.values()), described(plan))

    @property
    def parts(self) -> str:
        """Seconds that the busiest device computes, and the share of the iteration that it waits (Fig. 16)."""
        return f"{self.busy_ns / 1e9:.2f} s, {1 - self.busy_ns / self.iteration_ns:.1%}"


def described(plan: Plan) -> str:
    """Stages, their shards and replicas, the samples of a micro-batch."""
    own = [stage for stage in plan.stages if len(stage.devices) < len(plan.devices)] or list(plan.stages)
    shards, replicas = (sorted({getattr(stage, name) for stage in own}) for name in ("shards", "replicas"))
    parts = [f"{len(own)} stage{'s' * (len(own) > 1)}", f"tp {listed(shards)}", f"dp {listed(replicas)}"]
    return f"{' x '.join(parts)}, {plan.microbatch_size}"


def listed(numbers: list[int]) -> str:
    return " to ".join(map(str, dict.fromkeys((numbers[0], numbers[-1]))))


def searched(name: str, devices: int, side: str, seconds: float) -> Found | None:
    """The best plan of one schedule; None where nothing fits."""
    cluster = named_cluster("tessel", devices)
    shards = [count for count in (1, 2, 4, 8, 16, 32) if count <= devices and HEADS.get(name, 64) % count == 0]
    profile = model(name, device="v100-32gb", microbatch_sizes=(1, 2, 4, 8), shards=shards, cluster=cluster)
    flags = {
        "mini_batch": 128,
        "recompute": "all",
        "precision": "bf16",
        "split_backward": "no",
        "slices": 0,
        **SIDES[side],
    }
    if side == "1F1B+" and "mt5" in name:  # its encoder stands beside the decoder's embedding: in a line
        flags["placement"] = "sequential"
    depths = [2**power for power in range(1, devices.bit_length())]
    asked = [{**flags, "pp": depth} for depth in depths] if flags.get("pp") == "each" else [flags]
    plans = []
    for each in asked:
        try:
            found = pipeplan.search(profile, cluster=cluster, time_limit=f"{seconds / len(asked):g}s", **each)
            plans.append(Found.of(found.plan))
        except (InfeasibleError, SearchTimeoutError) as error:
            note(f"  {side}: {str(error)[:200]}")
    return min(plans, key=lambda plan: plan.iteration_ns, default=None)


def even(name: str, devices: int, limit: float) -> tuple[dict[str, Found | None], float]:
    """[schedule] its best, and the seconds that each had last."""
    best: dict[str, Found | None] = {}
    seconds, improving = limit, True
    while improving and seconds <= MOST_SECONDS:
        improving = False
        for side in SIDES:
            known = best.get(side)
            found = searched(name, devices, side, seconds)
            if found is not None and (known is None or found.iteration_ns < (1 - STILL) * known.iteration_ns):
                improving = True
            if known is None or (found is not None and found.iteration_ns < known.iteration_ns):
                best[side] = found
        said = {side: each and f"{each.iteration_ns / 1e9:.2f} s ({each.layout})" for side, each in best.items()}
        note(f"  {seconds:g} s each: {said}")
        seconds *= 2
    return best, seconds / 2


def kept(path: Path | None) -> dict[str, dict[str, Any]]:
    """[model] what was found before."""
    if path is None or not path.exists():
        return {}
    return {row["model"]: row for row in map(json.loads, path.read_text(encoding="utf-8").splitlines())}


def rows_of(
    family: str, limit: float, path: Path | None
) -> Iterator[tuple[int, str, Mapping[str, Found | None], float]]:
    """(devices, model, [schedule] found, seconds)"""
    done = kept(path)
    for devices, name in MODELS[family].items():
        if name not in done:
            note(name)
            found, seconds = even(name, devices, limit)
            sides = {side: each and asdict(each) for side, each in found.items()}
            done[name] = {"model": name, "seconds": seconds, "sides": sides}
            if path is not None:
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(done[name]) + "\n")
        row = done[name]
        yield devices, name, {side: each and Found(**each) for side, each in row["sides"].items()}, row["seconds"]


def ratio(other: Found | None, ours: Found | None) -> str:
    return "-" if other is None or ours is None else f"{other.iteration_ns / ours.iteration_ns:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), action="append")
    parser.add_argument("--limit", type=float, default=20.0, help="seconds that each schedule's search has at first")
    parser.add_argument("--kept", type=Path, help="file of the models that are done")
    asked = parser.parse_args()
    print(machine())
    for family in asked.model or MODELS:
        throughput, parts = [], []
        for devices, name, found, seconds in rows_of(family, asked.limit, asked.kept):
            ours = found["Tessel"]
            cells = [
                "none found" if each is None else f"{each.iteration_ns / 1e9:.2f} s ({each.layout})"
                for each in found.values()
            ]
            ratios = [ratio(found[side], ours) for side in ("1F1B", "1F1B of stages", "1F1B+")]
            throughput.append([name, str(devices), *cells, *ratios, f"{seconds:g} s"])
            parts.append(
                [
                    name,
                    *("-" if each is None else each.parts for each in found.values()),
                ]
            )
        over = ["1F1B / Tessel", "of stages", "1F1B+", "each had"]
        print(f"\n{family}, Fig. {13 if family == 'gpt' else 14}\n")
        print(markdown(["model", "GPUs", *SIDES, *over], throughput))
        print(f"\n{family}, Fig. 16: what the busiest device computes, and the share of the iteration that it waits\n")
        print(markdown(["model", *SIDES], parts))


if __name__ == "__main__":
    main()
