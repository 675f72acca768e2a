"""Tessel's Fig. 2: how uneven 1F1B's stages are where an embedding is large, by the number of layers.

    python benchmarks/tessel_embedding.py          # half a minute

GPT with layers of GPT 6.7B and a vocabulary of 768,000 on 4 V100s, stages by Piper's algorithm, 1F1B. Costs are
estimated and iterations simulated: nothing is measured. Sequences of 1,024 and 8 bytes of state per parameter, as in
``tessel_models.py``. The head multiplies by the table, so that both ends need a GPU by themselves: of 34.8 GB, 0.4 GB
more than the 32 GiB of the card.
"""

from __future__ import annotations

from tables import machine, markdown

import pipeplan
from pipeplan.costs.clusters import named_cluster
from pipeplan.costs.devices import device_preset
from pipeplan.examples import model
from pipeplan.examples.layout import ModelLayout
from pipeplan.examples.models import Decoder
from pipeplan.files import Plan, Profile

LAYERS, GPUS, MINI_BATCH, MEMORY = (16, 20, 24, 28, 32, 36, 40), 4, 32, "34.8GB"


def gpt(layers: int) -> Profile:
    """The model, beside the 11B of Table III, of which layers and sequence are."""
    known, preset = model("tessel-gpt-11b", device="v100-32gb", microbatch_sizes=(1,)), device_preset("v100-32gb")
    layout = ModelLayout(preset, (1,))
    dimensions = Decoder(layers=layers, hidden=4096, heads=32, sequence=1024, vocabulary=768_000)
    dimensions.build(layout)
    parts = {"blocks": tuple(layout.blocks), "edges": tuple(layout.edges), "tied": layout.tied}
    return known.model_copy(update={"name": f"gpt-{layers}", "forward_flops_per_sample": None, **parts})


def busy_ns(plan: Plan) -> list[int]:
    """What each device computes in an iteration."""
    busy = [0] * len(plan.devices)
    for place, on in enumerate(plan.workload.resources):
        for device in on:
            if device < len(busy):  # the rest are links and networks
                busy[device] += plan.workload.work_of(place)
    return busy


def row(layers: int) -> list[str]:
    plan = pipeplan.search(
        gpt(layers),
        cluster=named_cluster("tessel", GPUS),
        memory=MEMORY,
        precision="bf16",
        planner="piper",
        scheduler="1f1b",
        mini_batch=MINI_BATCH,
        microbatch_size=1,
        replicas=1,
        recompute="all",
        split_backward="no",
        slices=0,
        deterministic=True,
        time_limit="10s",
    ).plan
    busy = busy_ns(plan)
    held = [sum(block.endswith(".ffn") for block in stage.blocks) for stage in plan.stages]
    seconds = plan.predicted.iteration_ns / 1e9
    cells = ", ".join(map(str, held)), ", ".join(f"{each / 1e9:.2f}" for each in busy)
    return [str(layers), *cells, f"{max(busy) / min(busy):.1f}", f"{max(busy) / busy[-1]:.1f}", f"{seconds:.2f}"]


def main() -> None:
    print(machine())
    titles = ["layers", "of each stage", "seconds of each", "slowest / fastest", "slowest / head's", "iteration, s"]
    print(markdown(titles, [row(layers) for layers in LAYERS]))


if __name__ == "__main__":
    main()
