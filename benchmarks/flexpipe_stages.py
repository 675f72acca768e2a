"""FlexPipe's Fig. 2 and 8 (i): how uneven the stages of its 5B model are, and what each placement of stages costs.

    python benchmarks/flexpipe_stages.py          # half a minute

Fig. 2: even 1F1B, as Megatron-LM has it, on 8 stages of 8 layers, the embedding on the first and the head on the last;
the slowest stage to the fastest, by time and by memory, with costs estimated for an A800. Fig. 8 (i): a chain of eight
alike blocks on 4 devices, 8 micro-batches, whole backwards; each placement by the best built-in rules. Nothing is
measured.
"""

from __future__ import annotations

from typing import Any

from flexpipe import LAYERS, MINI_BATCH, VOCABULARIES, even, profile_of
from tables import machine, markdown

import pipeplan
from pipeplan.costs import group_costs
from pipeplan.examples.shapes import shape
from pipeplan.partition.placement import place

DEPTH, REPLICAS, SIZE = 8, 4, 2
PLACEMENTS = ("one-to-one", "circular", "v-shape", "bidirectional", "bidirectional-v-shape")


def uneven(vocabulary: str) -> list[str]:
    """Times and bytes of the stages that have least and most."""
    profile = profile_of(f"flexpipe-gpt-5b-{vocabulary}")
    options: dict[str, Any] = {
        "memory_bytes": None,
        "recompute": False,
        "replicas": REPLICAS,
        "spread": False,
        "cut": even(LAYERS["5b"]),
    }
    cut = place(profile, "one-to-one", DEPTH * REPLICAS, microbatch_size=SIZE * REPLICAS, **options)
    costs = group_costs(profile, [stage.blocks for stage in cut.stages], SIZE)
    count = MINI_BATCH // (SIZE * REPLICAS)
    held = [min(count, DEPTH - stage) for stage in range(DEPTH)]
    times = [each.compute_ns for each in costs]
    sizes = [
        each.static_bytes + flying * each.activation_bytes + each.workspace_bytes
        for each, flying in zip(costs, held, strict=True)
    ]
    cells = [f"{min(of) / unit:.1f} to {max(of) / unit:.1f}" for of, unit in ((times, 1e6), (sizes, 1e9))]
    return [vocabulary, cells[0], f"{max(times) / min(times):.2f}", cells[1], f"{max(sizes) / min(sizes):.2f}"]


def placed(placement: str) -> list[str]:
    """What the best rules make of it: bubbles, activations, messages, and copies of the parameters."""
    options: dict[str, Any] = {
        "microbatches": 8,
        "replicas": 1,
        "recompute": "none",
        "scheduler": "rules",
        "split_backward": "no",
    }
    chain = shape("circular", 4, chunks=2)
    plan = pipeplan.search(chain, devices=4, placement=placement, time_limit="10s", **options).plan
    blocks = [block for stage in plan.stages for block in stage.blocks]
    peak = max(memory.peak_bytes for memory in plan.predicted.memory)
    sent = sum("SEND" in action for program in plan.programs for action in program)
    return [
        placement,
        f"{plan.predicted.bubble_rate:.1%}",
        f"{peak / 1e9:g}",
        f"{sent}",
        f"{len(blocks) // len(set(blocks))}",
    ]


def main() -> None:
    print("Fig. 2, 5B, by vocabulary\n")
    header = ["vocabulary", "stages, ms", "slowest / fastest", "GB", "most / least"]
    print(markdown(header, [uneven(each) for each in VOCABULARIES["5b"]]))
    print("\nFig. 8 (i)\n")
    header = ["placement", "bubbles", "activations at most, of micro-batches", "messages", "copies of parameters"]
    print(markdown(header, [placed(each) for each in PLACEMENTS]))
    print(f"\n{machine()}")


if __name__ == "__main__":
    main()
