"""What an attention block holds for backward where its core is recomputed, by two ways of torch's checkpoint.

    python benchmarks/recomputed_cores.py         # prints the table of docs/benchmarks/runs.md; seconds

*The core*: ``checkpoint`` around the call of attention alone, as the executor has it. *A policy*: ``checkpoint`` around
the block with ``create_selective_checkpoint_contexts``, which keeps what every operator made but the core, or what
products made alone. Bytes are of the storages that backward or the policy holds on to, each once, without parameters.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from tables import machine, markdown
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.parallel.attention_cores import RecomputedCores

Policy = Callable[..., CheckpointPolicy]


def all_but_the_core(context: object, operator: Any, *_: object, **__: object) -> CheckpointPolicy:
    is_core = "scaled_dot_product" in str(operator)
    return CheckpointPolicy.MUST_RECOMPUTE if is_core else CheckpointPolicy.MUST_SAVE


def products(context: object, operator: Any, *_: object, **__: object) -> CheckpointPolicy:
    is_product = str(operator) in ("aten.mm.default", "aten.addmm.default")
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


def held_bytes(block: nn.Module, run: Callable[[], tuple[Tensor, Iterable[Tensor]]]) -> int:
    """What is held after a forward."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        made, kept = run()
    storages = [each.untyped_storage() for each in (*saved, *kept)]
    own = {each.untyped_storage().data_ptr() for each in block.parameters()}
    del made
    return sum({each.data_ptr(): each.nbytes() for each in storages if each.data_ptr() not in own}.values())


def by_policy(block: nn.Module, x: Tensor, policy: Policy) -> tuple[Tensor, list[Tensor]]:
    contexts: list[Any] = []

    def made() -> Any:
        both = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]  # torch has no types here
        contexts.append(both[0])
        return both

    result: Tensor = checkpoint(block, x, use_reentrant=False, context_fn=made)
    found = [each for kept in contexts[0].storage.values() for each in tree_leaves(list(kept.values()))]
    values = [getattr(each, "val", each) for each in found]
    return result, [each for each in values if isinstance(each, Tensor)]


def by_core(block: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    with RecomputedCores():
        return block(x), []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2-124m")
    parser.add_argument("--sequence", type=int, default=512)
    given = parser.parse_args()
    model = load_model(given.model, sequence=given.sequence)
    spec = next(each for each in model.blocks if each.operator == "attention")
    block, hidden = spec.build(), spec.dimensions["hidden"]
    x = torch.randn(2, given.sequence, hidden, requires_grad=True)
    ways: dict[str, Callable[[], tuple[Tensor, Iterable[Tensor]]]] = {
        "nothing is recomputed": lambda: (block(x), []),
        "the core": partial(by_core, block, x),
        "a policy: all but the core is kept": partial(by_policy, block, x, all_but_the_core),
        "a policy: products are kept": partial(by_policy, block, x, products),
    }
    print(
        markdown(
            ["recomputed", "MB held"], [[name, f"{held_bytes(block, run) / 1e6:.2f}"] for name, run in ways.items()]
        )
    )
    print(f"\n{machine()}")


if __name__ == "__main__":
    main()
