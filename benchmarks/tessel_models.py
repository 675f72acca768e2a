"""Tessel's GPT and mT5 on its V100s (VI-D, Fig. 13, 14, 16): 1F1B, Chimera, 1F1B+ and the repetend search.

    python benchmarks/tessel_models.py [--model gpt] [--devices 4,8] [--limit 20]
        [--kept pieces.jsonl --part-seconds 90]

Prints Markdown tables. Costs are estimated and iterations simulated: nothing is measured. Mini-batches of 128 samples,
all layers recomputed, micro-batches of 1 to 8 samples, as many GPUs as in Fig. 13. Every schedule has the best layout
that ``pipeplan search`` finds with ``--scheduler`` and all other flags the same, out of those in :func:`layouts`. 1F1B
and Chimera keep embedding and head in their first and last stages, 1F1B+ and the repetend have them on all devices.
1F1B may be one stage on all devices; beside it is that of two and more stages, and that which splits its blocks over 16
or 32 devices, so over several servers, as the paper's had to for the embedding. All have the same time, ``--limit``
seconds, then twice as much, until two doublings shorten none by a thousandth, or they had 160 s: seconds that the
process works, which other work on the machine does not shorten. One search is a piece; pieces that are done are kept in
a file, so that it can be run in parts.

The paper's models do not fit its cluster with 16 bytes of state per parameter, as mixed precision has them (24 billion
parameters are 388 GB, eight V100s have 256). They fit with everything in 16 bits, 8 bytes per parameter, which
``--precision`` says here.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass
from typing import Any

from resumed import Paused, Pieces, resumable, work_of
from tables import machine, markdown, note

import pipeplan
from pipeplan.costs.clusters import named_cluster
from pipeplan.errors import InfeasibleError, SearchTimeoutError, UsageError
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
    "1F1B of stages": {"scheduler": "1f1b", "shard_shared": "no"},
    "1F1B across servers": {"scheduler": "1f1b", "shard_shared": "no"},
    "Chimera": {"scheduler": "chimera", "placement": "bidirectional", "shard_shared": "no"},
    "1F1B+": {"scheduler": "1f1b+", "shard_shared": "yes"},
    "Tessel": {"scheduler": "repetend", "shard_shared": "yes"},
}
SERVER = 8
"""GPUs of a server."""
STILL, DOUBLINGS, MOST_SECONDS = 0.001, 2, 160.0


@dataclass(frozen=True, slots=True)
class Found:
    """A schedule's iteration and what its busiest device computes, in ns; and its layout in words."""

    iteration_ns: int
    busy_ns: int
    layout: str

    @classmethod
    def of(cls, plan: Plan) -> Found:
        workload = plan.workload
        busy = [0] * len(plan.devices)
        for place, on in enumerate(workload.resources):
            for device in on:
                if device < len(busy):  # the rest are links and networks
                    busy[device] += workload.work_of(place)
        return cls(plan.predicted.iteration_ns, max(busy), described(plan))

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


def layouts(name: str, side: str, devices: int) -> list[dict[str, Any]]:
    """Flags of the layouts of a side that one search does not look at together; the side's time is shared out evenly.

    Of GPT, whose replicas never fit, one stage stands on each device between the shared ones. Of mT5 one or two
    replicas do: 1F1B+ in a line, as its encoder stands beside the decoder's embedding, the repetend once or twice
    through the devices, of which the latter is the paper's NN-shape. Chimera's stages are whole devices, or split over
    2 to 8.
    """
    powers = [2**power for power in range(devices.bit_length())]
    both = [number for number in (1, 2) if devices <= 8 or number == 1]
    if side == "1F1B of stages":
        return [{"pp": depth} for depth in powers[1:]]
    if side == "1F1B across servers":
        return [{"tp": split, "pp": devices // split} for split in powers if split > SERVER]
    if side == "Chimera":
        return [{} if split == 1 else {"tp": split} for split in powers[:4] if 2 * split <= devices]
    if side == "1F1B+" and "mt5" in name:
        return [{"placement": "sequential", "replicas": number} for number in both]
    if side == "Tessel":
        placements = ("one-to-one", "circular") if "mt5" in name else ("one-to-one",)
        return [{"placement": placement, "replicas": number} for placement in placements for number in both]
    return [{}]


def searched(name: str, devices: int, side: str, layout: dict[str, Any], seconds: float) -> Found | None:
    """The best plan of one schedule; None where nothing fits or is found."""
    cluster = named_cluster("tessel", devices)
    shards = [count for count in (1, 2, 4, 8, 16, 32) if count <= devices and HEADS.get(name, 64) % count == 0]
    profile = model(name, device="v100-32gb", microbatch_sizes=(1, 2, 4, 8), shards=shards, cluster=cluster)
    same = {"mini_batch": 128, "recompute": "all", "precision": "bf16", "split_backward": "no", "slices": 0}
    flags: dict[str, Any] = {**same, **SIDES[side], **layout}
    limit: dict[str, Any] = {"time_limit": f"{seconds:g}s", "within": work_of(seconds)}
    try:
        return Found.of(pipeplan.search(profile, cluster=cluster, **limit, **flags).plan)
    except (InfeasibleError, SearchTimeoutError, UsageError) as error:  # some layouts are not for so many heads
        note(f"  {side} {layout}: {str(error)[:400]}")
        return None


def one_side(pieces: Pieces, name: str, devices: int, side: str, seconds: float) -> Found | None:
    """The best that a schedule has in ``seconds``, each layout its equal share of them."""
    every, plans = layouts(name, side, devices), []
    for layout in every:

        def piece(layout: dict[str, Any] = layout) -> dict[str, Any] | None:
            found = searched(name, devices, side, layout, seconds / len(every))
            return None if found is None else asdict(found)

        words = ", ".join(f"{flag} {value}" for flag, value in layout.items())
        known = pieces.get(f"{name}, {side}, {words or 'any layout'}, {seconds:g} s of work", piece)
        plans += [Found(**known)] if known else []
    return min(plans, key=lambda plan: plan.iteration_ns, default=None)


def even(pieces: Pieces, name: str, devices: int, limit: float) -> tuple[dict[str, Found | None], float]:
    """[schedule] its best, and the seconds that each had last."""
    best: dict[str, Found | None] = {}
    seconds, still = limit, 0
    while still < DOUBLINGS and seconds <= MOST_SECONDS:
        still += 1
        for side in SIDES:
            known, found = best.get(side), one_side(pieces, name, devices, side, seconds)
            if found is not None and (known is None or found.iteration_ns < (1 - STILL) * known.iteration_ns):
                still = 0
            if known is None or (found is not None and found.iteration_ns < known.iteration_ns):
                best[side] = found
        said = {side: each and f"{each.iteration_ns / 1e9:.2f} s ({each.layout})" for side, each in best.items()}
        note(f"{name}, {seconds:g} s each: {said}")
        seconds *= 2
    return best, seconds / 2


def ratio(other: Found | None, ours: Found | None) -> str:
    return "-" if other is None or ours is None else f"{other.iteration_ns / ours.iteration_ns:.2f}"


def tables(pieces: Pieces, family: str, numbers: list[int], limit: float) -> None:
    """Fig. 13 or 14, and Fig. 16."""
    throughput, parts = [], []
    for devices in numbers:
        name = MODELS[family][devices]
        found, seconds = even(pieces, name, devices, limit)
        ours = found["Tessel"]
        cells = [
            "none found" if each is None else f"{each.iteration_ns / 1e9:.2f} s ({each.layout})"
            for each in found.values()
        ]
        ratios = [ratio(found[side], ours) for side in SIDES if side != "Tessel"]
        throughput.append([name, str(devices), *cells, *ratios, f"{seconds:g} s"])
        parts.append([name, *("-" if each is None else each.parts for each in found.values())])
    over = ["1F1B / Tessel", "of stages", "across servers", "Chimera", "1F1B+", "each had"]
    print(f"\n{family}, Fig. {13 if family == 'gpt' else 14}\n")
    print(markdown(["model", "GPUs", *SIDES, *over], throughput))
    print(f"\n{family}, Fig. 16: what the busiest device computes, and the share of the iteration that it waits\n")
    print(markdown(["model", *SIDES], parts), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), action="append")
    parser.add_argument("--devices", default="4,8,16,32", help="numbers of GPUs")
    parser.add_argument("--limit", type=float, default=20.0, help="seconds that each schedule's search has at first")
    resumable(parser)
    asked = parser.parse_args()
    pieces = Pieces(asked.kept, asked.part_seconds)
    numbers = [int(number) for number in asked.devices.split(",")]
    print(machine())
    try:
        for family in asked.model or MODELS:
            tables(pieces, family, numbers, asked.limit)
    except Paused as paused:
        note(str(paused))
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
