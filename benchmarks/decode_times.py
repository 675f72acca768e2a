"""How long a token takes when texts are written on, beside the prediction: real small models, and emulated plans.

    python benchmarks/decode_times.py --folder F                 # profiles and links; some 4 minutes
    python benchmarks/decode_times.py --folder F --what run      # 2 processes with a thread each; some 2 minutes
    python benchmarks/decode_times.py --folder F --what emulate  # 4 processes that only wait; some 3 minutes

What is in the folder is not made again, so that a part may be broken off. The model's prompts leave room for the new
tokens below the context that the plan is for, whose times are those of the last step; what is compared is the median
token. Emulated is Llama 7B on four a5000-24gb, whose steps take milliseconds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tables import machine, markdown

MODEL = (
    "LlamaConfig(hidden_size=1024, intermediate_size=2816, num_hidden_layers=6, num_attention_heads=16, "
    "num_key_value_heads=8, vocab_size=4000, max_position_embeddings=2048)"
)
LARGE = (
    "LlamaConfig(hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32, "
    "vocab_size=32000, max_position_embeddings=131072)"
)
KINDS = ("dp", "tp", "cp", "cp-q")
BATCH, CONTEXT, NEW = 8, 1024, 48


def pipeplan(*arguments: object) -> str:
    command = [sys.executable, "-m", "pipeplan", *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def prepare(folder: Path) -> None:
    """The links of two processes here, and profiles of both models: of the small one by two processes at once, as it
    runs, whose cores share the memory that weights and caches are read from."""
    made = {
        "links.json": ("profile", "--communication", "--processes", 2, "--max-bytes", "1MiB"),
        "small.json": (
            *("profile", MODEL, "--sequence", 64, *of_contexts("4,8", "1k"), "--shards", "1,2", "--dcp", "2"),
            *("--threads", 1, "--processes", 2, "--repeats", 5, "--warmup", 1, "--cluster", folder / "links.json"),
        ),
        "large.json": (
            *("profile", LARGE, *of_contexts("1,8,32", "1k,32k"), "--shards", "1,2,4"),
            *("--estimate", "--device", "a5000-24gb"),
        ),
    }
    for name, command in made.items():
        if not (folder / name).exists():
            pipeplan(*command, "-o", folder / name)


def of_contexts(batches: str, contexts: str) -> tuple[object, ...]:
    return "--inference", "--batch", batches, "--context", contexts


def searched(folder: Path, profile: str, kind: str, *how: object) -> Path:
    path = folder / f"{Path(profile).stem}-{kind}.json"
    if not path.exists():
        pipeplan("search", folder / profile, "--kv", kind, "--time-limit", "8s", "-o", path, *how)
    return path


def run(folder: Path, repeats: int) -> list[list[str]]:
    """Real models on two processes."""
    prompts = folder / "prompts.txt"
    texts = ([1 + (3 * number + place) % 3999 for place in range(CONTEXT - NEW)] for number in range(BATCH))
    prompts.write_text("\n".join(map(json.dumps, texts)))
    rows = []
    for kind in KINDS:
        plan = searched(
            folder, "small.json", kind, "--cluster", folder / "links.json", "--batch", BATCH, "--context", CONTEXT
        )
        asked = ("--model", MODEL, "--prompt-file", prompts, "--new-tokens", NEW, "--local", "--json")
        found = [json.loads(pipeplan("run", plan, *asked)) for _ in range(repeats)]
        rows += [compared(kind, found[0]["predicted_token_ns"], sorted(each["token_ns"] for each in found))]
    return rows


def emulate(folder: Path, repeats: int) -> list[list[str]]:
    """Estimated plans on four processes that wait; an iteration is a few steps of every group."""
    rows = []
    for kind in (*KINDS, "auto"):
        plan = searched(folder, "large.json", kind, "--devices", 4, "--batch", BATCH, "--context", "8k")
        found: list[dict[str, Any]] = [
            json.loads(pipeplan("run", plan, "--emulate", "--local", "--steps", 5, "--json")) for _ in range(repeats)
        ]
        times = sorted(each["iteration_ns"] for each in found)
        rows += [compared(kind, found[0]["predicted_iteration_ns"], times)]
    return rows


def compared(kind: str, predicted: int, measured: list[int]) -> list[str]:
    median = measured[len(measured) // 2]
    return [kind, f"{predicted / 1e6:.2f} ms", f"{median / 1e6:.2f} ms", f"{median / predicted - 1:+.1%}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--what", choices=["prepare", "run", "emulate"], default="prepare")
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    asked.folder.mkdir(exist_ok=True)
    if asked.what == "prepare":
        prepare(asked.folder)
        return
    rows = (run if asked.what == "run" else emulate)(asked.folder, asked.repeats)
    print(markdown(["--kv", "predicted", "measured", ""], rows))
    print(machine())


if __name__ == "__main__":
    main()
