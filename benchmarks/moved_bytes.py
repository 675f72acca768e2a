"""Bytes that four processes really move in a decode step, beside those that are predicted (Fig. 4.1 of the thesis).

    python benchmarks/moved_bytes.py --folder F    # some 4 minutes; what is in the folder is not run again

A layer of hidden 4096 with 32 heads in float32, 32 requests. Each plan runs twice, a few steps more the second time;
what it sends more, by a step, is counted three times: by the prediction's formula, for the layer; where the executor
hands tensors to its transport, of the layer and of all; and by the system, in all TCP connections of a process. The
last knows nothing of rings: gloo's sums are among it as gloo makes them, and a few bytes about each message.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tables import machine, markdown

from pipeplan.costs.cache_volumes import KEPT, AttentionShape, Kept, step_volume

HIDDEN, HEADS, REQUESTS, DEVICES = 4096, 32, 32, 4
FEW, MANY = 3, 11
MODEL = (
    f"LlamaConfig(hidden_size={HIDDEN}, intermediate_size=64, num_hidden_layers=1, num_attention_heads={HEADS}, "
    "vocab_size=64, max_position_embeddings=64)"
)


def pipeplan(*arguments: object) -> str:
    command = [sys.executable, "-m", "pipeplan", *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def ran(folder: Path, kept: Kept, new: int) -> dict[str, Any]:
    """The figures of a run of so many new tokens."""
    path = folder / f"{kept}-{new}.json"
    if not path.exists():
        profile, plan, prompts = folder / "layer.json", folder / f"plan-{kept}.json", folder / "prompts.txt"
        prompts.write_text("\n".join(f"[{1 + number}]" for number in range(REQUESTS)))
        if not profile.exists():
            sizes = ("--batch", f"1,8,{REQUESTS}", "--context", "4,16", "--shards", f"1,{DEVICES}")
            of = ("--estimate", "--device", "a5000-24gb", "--dtype", "float32")
            pipeplan("profile", MODEL, "--inference", *sizes, *of, "-o", profile)
        asked = ("--batch", REQUESTS, "--context", 16, "--pp", 1, "--time-limit", "5s")
        pipeplan("search", profile, "--devices", DEVICES, "--kv", kept, *asked, "-o", plan)
        how = ("--model", MODEL, "--prompt-file", prompts, "--new-tokens", new, "--local", "--json")
        path.write_text(pipeplan("run", plan, *how))
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def row(folder: Path, kept: Kept) -> list[str]:
    """Bytes of a step, of the process that sends most."""
    few, many = ran(folder, kept, FEW), ran(folder, kept, MANY)
    shape = AttentionShape.of(HIDDEN, HEADS)
    predicted = step_volume(kept, shape, REQUESTS, DEVICES, statistics=1).bytes(4)

    def more(count: Callable[[dict[str, Any], int], int]) -> float:
        return max((count(many, rank) - count(few, rank)) / (MANY - FEW) for rank in range(DEVICES))

    def layer(figures: dict[str, Any], rank: int) -> int:
        sent = figures["sent_bytes"][rank].items()
        return sum(count for name, count in sent if name.startswith("layers."))

    handed = more(lambda figures, rank: sum(figures["sent_bytes"][rank].values()))
    wire = more(lambda figures, rank: int(figures["wire_bytes"][rank]))
    counts = predicted, more(layer), handed, wire
    beside = f"{wire / handed - 1:+.2%}" if handed else "-"
    return [kept, *(f"{count:,.0f}" for count in counts), beside, f"{(wire - handed + more(layer)) / 4:,.0f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--kv", choices=KEPT, nargs="+", default=KEPT)
    asked = parser.parse_args()
    asked.folder.mkdir(exist_ok=True)
    header = ["--kv", "layer, predicted", "layer, handed over", "all, handed over", "all, on the wire", "", "numbers"]
    print(markdown(header, [row(asked.folder, kept) for kept in asked.kv]))
    print(machine())


if __name__ == "__main__":
    main()
