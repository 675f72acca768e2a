"""How devices best share the decode steps of Llama-7B on four RTX A5000 of 24 GB: each way planned, at several texts.

    python benchmarks/decode_ways.py      # two tables, two minutes of processor time; they do not depend on the machine

With 32 key heads, as it is, and with 2, which four devices cannot share. Estimated rows, links of the device, no
cluster. Weights and the caches of all requests fit at the last step, or the cell says how many requests would.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from tables import markdown

import pipeplan
from pipeplan import InfeasibleError, Profile
from pipeplan.planning.decoding import Sharing
from pipeplan.units import format_ns

MODEL = (
    "LlamaConfig(hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32, "
    "num_key_value_heads={heads}, vocab_size=32000, max_position_embeddings=131072)"
)
WAYS: tuple[Sharing, ...] = ("dp", "tp", "cp", "cp-q", "auto")
CASES = {
    32: ((1, 32_768), (4, 32_768), (8, 1_024), (8, 4_096), (8, 8_192), (32, 1_024), (32, 4_096)),
    2: ((1, 32_768), (4, 32_768), (32, 1_024), (32, 4_096), (32, 32_768)),
}
"""Key heads: requests, and tokens of each one's text at the last step."""


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, choices=[*CASES], help="one of the tables alone")
    given = parser.parse_args()
    for heads, cases in CASES.items():
        if given.heads in (None, heads):
            profile = estimated(heads)
            rows = [[str(batch), f"{tokens:,}", *row(profile, batch, tokens)] for batch, tokens in cases]
            print(f"{heads} key heads\n\n{markdown(('requests', 'tokens', *WAYS), rows)}\n")


def estimated(heads: int) -> Profile:
    """The model's rows, for as many devices as can share its heads."""
    how: dict[str, Any] = {"inference": True, "batch": (1, 8, 32), "context": (1_024, 32_768)}
    shards = [count for count in (1, 2, 4) if heads % count == 0]
    return pipeplan.estimate(MODEL.format(heads=heads), device="a5000-24gb", shards=shards, **how)


def row(profile: Profile, batch: int, tokens: int) -> Iterator[str]:
    """Each way's time between two tokens, its stages and groups of requests."""
    for kv in WAYS:
        try:
            found = pipeplan.search(
                profile, devices=4, memory="24GB", kv=kv, batch=batch, context=tokens, deterministic=True
            )
        except InfeasibleError as error:
            yield str(error).partition("there is ")[2].partition(" such")[0]
            continue
        answer = found.decode
        assert answer is not None
        stages = len({stage.devices for stage in found.plan.stages})
        said = f"{format_ns(round(answer.token_ns))} ({stages} x {4 // stages}"
        said += f", {answer.groups} groups" if answer.groups > 1 else ""
        yield f"{said})" + (f" {answer.kv}" if kv == "auto" else "")


if __name__ == "__main__":
    main()
