"""Bytes that processes really move in a decode step, beside those that are predicted (Fig. 4.1 of the thesis).

    python benchmarks/moved_bytes.py --folder F    # a quarter of an hour; what is in the folder is not run again

A layer of hidden 4096 with 32 heads in float32, on as many processes and of as many requests as each row of the table.
Each plan runs twice, a few steps more the second time; what it sends more, by a step, is counted three times: by the
prediction's formula, for the layer; where the executor hands tensors to its transport, of the layer and of all; and by
the system, in all TCP connections of a process. The last knows nothing of rings: gloo's sums are among it as gloo makes
them, and a few bytes about each message.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cache_parallelism import STEPS
from tables import machine, markdown

from pipeplan.costs.cache_volumes import AttentionShape, Kept, step_volume

HIDDEN, HEADS, WORDS = 4096, 32, 64
FEW, MANY = 3, 11
"""New tokens; as many steps between them as devices, or a multiple, so that each keeps as many keys and values."""

KINDS: tuple[Kept, ...] = ("tp", "cp", "cp-q")
"""Who sends something."""
MODEL = (
    f"LlamaConfig(hidden_size={HIDDEN}, intermediate_size=64, num_hidden_layers=1, num_attention_heads={HEADS}, "
    f"vocab_size={WORDS}, max_position_embeddings=64)"
)


def pipeplan(*arguments: object) -> str:
    command = [sys.executable, "-m", "pipeplan", *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def ran(folder: Path, kept: Kept, devices: int, requests: int, new: int) -> dict[str, Any]:
    """The figures of a run of so many new tokens."""
    name = f"{devices}-{requests}"
    path = folder / f"{name}-{kept}-{new}.json"
    if not path.exists():
        profile, plan, prompts = (folder / each for each in (f"{name}.json", f"{name}-{kept}.json", f"{name}.txt"))
        prompts.write_text("\n".join(f"[{1 + number % (WORDS - 1)}]" for number in range(requests)))
        if not profile.exists():
            sizes = ("--batch", f"1,8,{requests}", "--context", "4,16", "--shards", f"1,{devices}")
            of = ("--estimate", "--device", "a5000-24gb", "--dtype", "float32")
            pipeplan("profile", MODEL, "--inference", *sizes, *of, "-o", profile)
        asked = ("--batch", requests, "--context", 16, "--pp", 1, "--time-limit", "5s")
        pipeplan("search", profile, "--devices", devices, "--kv", kept, *asked, "-o", plan)
        how = ("--model", MODEL, "--prompt-file", prompts, "--new-tokens", new, "--local", "--json")
        path.write_text(pipeplan("run", plan, *how))
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def row(folder: Path, kept: Kept, devices: int, requests: int) -> list[str]:
    """Bytes of a step, of the process that sends most."""
    few, many = (ran(folder, kept, devices, requests, new) for new in (FEW, MANY))
    shape = AttentionShape.of(HIDDEN, HEADS)
    predicted = step_volume(kept, shape, requests, devices, statistics=1).bytes(4)

    def more(count: Callable[[dict[str, Any], int], int]) -> float:
        return max((count(many, rank) - count(few, rank)) / (MANY - FEW) for rank in range(devices))

    def layer(figures: dict[str, Any], rank: int) -> int:
        sent = figures["sent_bytes"][rank].items()
        return sum(count for name, count in sent if name.startswith("layers."))

    own, handed = more(layer), more(lambda figures, rank: sum(figures["sent_bytes"][rank].values()))
    said = [str(devices), str(requests), kept, *(f"{each:,.0f}" for each in (predicted, own, own / 4, handed))]
    if many["wire_bytes"][0] is None:
        return [*said, "not counted by this system", "-"]
    wire = more(lambda figures, rank: int(figures["wire_bytes"][rank]))
    return [*said, f"{wire:,.0f}", f"{wire / handed - 1:+.2%}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--kv", choices=KINDS, nargs="+", default=KINDS)
    asked = parser.parse_args()
    asked.folder.mkdir(exist_ok=True)
    rows = [row(asked.folder, kept, *each) for each in STEPS for kept in asked.kv]
    of_layer, of_all = ("layer, predicted", "handed over", "numbers"), ("all, handed over", "on the wire", "more")
    header = ["devices", "requests", "--kv", *of_layer, *of_all]
    print(markdown(header, rows))
    print(machine())


if __name__ == "__main__":
    main()
