"""One layer of a Hugging Face model on two devices: pipeplan's shares beside torch's ``parallelize_module``.

    python benchmarks/tensor_parallel.py            # prints the table of docs/benchmarks/runs.md; two minutes
    python benchmarks/tensor_parallel.py --pairs 40 --width 256

Both have the same parts of the same weights by transformers' own plan,
take and give what is whole on both devices, and add up what they find with the same collectives: torch's modules take
one DTensor for query, key and value together (``PrepareModuleInput``), as torchtitan has it. Forward and backward of
the two take turns (``beside.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from beside import HEADER, NUM_RANKS, arguments, cells, in_turn, job_of, printed, told_by
from torch import Tensor, nn

from pipeplan.runtime.executor.process_groups import RankGroup
from pipeplan.runtime.launch.job import RankContext
from pipeplan.runtime.models.huggingface import load, load_configuration
from pipeplan.runtime.parallel import Share
from pipeplan.runtime.parallel.sharding import Shards, share_of

WIDTHS = {64: 33, 256: 127, 1024: 127}
"""Hidden size of a layer, and the length of its sequences: odd, so that what is between products stays whole."""

SAMPLES = 2


def configuration(width: int) -> str:
    return (
        f"LlamaConfig(hidden_size={width}, num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=4, "
        f"intermediate_size={4 * width}, vocab_size=64)"
    )


def of_torch(layer: Any, plan: dict[str, str], rotary: nn.Module) -> Callable[[Tensor], Tensor]:
    """The layer as torch parallelizes it by the plan."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        parallelize_module,
    )

    styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    whole = Replicate()
    once = PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": whole}, desired_input_kwarg_layouts={"hidden_states": whole}
    )
    ways: dict[str, Any] = {pattern.removeprefix("layers.*."): styles[way]() for pattern, way in plan.items()}
    ways |= {"self_attn": once, "mlp": PrepareModuleInput(input_layouts=whole, desired_input_layouts=whole)}
    made = parallelize_module(layer, init_device_mesh("cpu", (2,)), ways)

    def run(x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])[None]
        found: Tensor = made(x, position_embeddings=rotary(x, places), position_ids=places)
        return found

    return run


def beside_dtensors(job: Mapping[str, Any], context: RankContext) -> dict[str, Any]:
    """How long forwards and backwards of both took, and how far what they make is apart."""
    text, sequence = configuration(job["hidden"]), WIDTHS[job["hidden"]]
    model = load_configuration(text, sequence=sequence, grain="layer")
    block = next(each for each in model.blocks if each.operator == "layer")
    assert block.split is not None
    ranks = tuple(range(NUM_RANKS))
    share, group = Share(block.id, context.rank, ranks), RankGroup(ranks, context.progress, dist.group.WORLD)
    made = block.split.build(Shards(NUM_RANKS, context.rank, group))
    ours = share_of(block.build(), made, lambda name: model.part_of(share, name))
    inner: Any = load(text, sequence=sequence).module.model
    theirs = of_torch(inner.model.layers[0], inner.config.base_model_tp_plan, inner.model.rotary_emb)
    x = torch.randn(SAMPLES, sequence, job["hidden"], generator=torch.Generator().manual_seed(0))
    last: dict[str, tuple[Tensor, Tensor]] = {}

    def step(name: str, run: Callable[[Tensor], Tensor]) -> None:
        given = x.clone().requires_grad_()
        made = run(given)
        torch.autograd.backward(made, torch.ones_like(made))
        assert given.grad is not None
        last[name] = made.detach(), given.grad

    found = in_turn({"pipeplan": lambda: step("ours", ours), "torch": lambda: step("theirs", theirs)}, job)
    pairs = zip(last["ours"], last["theirs"], strict=True)
    return found | {"apart": max(float((a - b).abs().max()) for a, b in pairs)}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--width", type=int, action="append", choices=sorted(WIDTHS))
    given = parser.parse_args()
    rows = []
    for width in given.width or WIDTHS:
        told = told_by("tensor_parallel:beside_dtensors", job_of(given, hidden=width))
        rows.append([str(width), str(WIDTHS[width]), *cells(told)])
    printed(given, ["hidden", "sequence", *HEADER], rows)


if __name__ == "__main__":
    main()
