"""Models of TensorOpt's and GraphPipe's papers by points of their frontiers, on four processes: losses and memory.

    pip install 'pipeplan[torch]'
    python benchmarks/paper_models.py [--models vgg16-operators,lstm-operators] [--kept pieces.jsonl --part-seconds 300]

Each model is profiled by closed forms, the frontier of its strategies on four devices is tracked, and its leanest point
trained by four processes on gloo, in float32; then the same mini-batches by one process, unsplit. Memory is the most
resident memory of a process, torch itself and gloo's buffers with it: no more than 2 GB, or the size is not among
these. Times are not looked at. A model is a piece; pieces that are done are kept in a file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from resumed import Paused, Pieces, resumable
from tables import machine, markdown, note

from pipeplan.runtime.models.spec import Model
from pipeplan.runtime.models.zoo import ZOO
from pipeplan.runtime.models.zoo.multi_branch import RecommendationSize

DEVICES, SAMPLES = 4, 4
MOST_BYTES = 2 * 10**9
ROUNDING = 1e-4
"""By how much losses of one mini-batch may differ in float32, relatively."""

DLRM = "paper_models:dlrm"
MODELS = ("vgg16-operators", "wide-resnet-operators", "lstm-operators", "candle-uno", DLRM)
"""As large as in the papers, but for DLRM."""

LIGHT = {DLRM: "sgd", "candle-uno": "sgd"}
"""Those that are trained with gradients alone, as Adam's two moments would be too much for 2 GB."""


def dlrm() -> Model:
    """dlrm-8 with three branches of each kind instead of four, and tables of 100,000 rows instead of a million."""
    size = ZOO["dlrm-8"]
    assert isinstance(size, RecommendationSize)
    return replace(size, branches=3, vocabulary=100_000).model("dlrm-8, smaller")


def command(*arguments: object) -> Any:
    """What a verb says in JSON."""
    words = [sys.executable, "-m", "pipeplan", *map(str, arguments), "--json"]
    found = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(words, check=False, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": found})
    if done.returncode:
        raise SystemExit(f"pipeplan {' '.join(map(str, arguments))}: {done.stderr}")
    return json.loads(done.stdout)


def measured(model: str, steps: int) -> dict[str, Any]:
    """Losses of each step, split and not; of the fullest process what is predicted and what it takes."""
    with tempfile.TemporaryDirectory() as folder:
        profile, plan, whole = (Path(folder) / f"{name}.json" for name in ("profile", "plan", "whole"))
        optimizer = LIGHT.get(model, "adamw")
        recipe = "--precision", "fp32", "--optimizer", optimizer
        command(
            "profile", model, "--estimate", "--device", "v100-16gb", "--microbatch", "1,2,4", *recipe, "-o", profile
        )
        asked = "--devices", DEVICES, "--mini-batch", SAMPLES, "--split-level", "block", "--tolerance", 0.01
        command("frontier", profile, *asked, "--point", 1, "-o", plan)
        command("search", profile, "--devices", 1, "--microbatches", 1, "--microbatch-size", SAMPLES, "-o", whole)
        how = "--model", model, *recipe, "--steps", steps, "--local", "--lr", 1e-4, "--timeout", "600s"
        split, one = (command("run", each, *how) for each in (plan, whole))
        stage = json.loads(plan.read_text(encoding="utf-8"))["stages"][0]
    return {
        "optimizer": optimizer,
        "ways": len(set(stage["configurations"])),
        "remade": len(stage.get("remade", ())),
        "losses": [[step["loss"] for step in each["steps"]] for each in (split, one)],
        "predicted": max(split["predicted_peak_memory_bytes"]),
        "peak": max(split["peak_memory_bytes"]),
        "alone": max(one["peak_memory_bytes"]),
    }


def row_of(model: str, found: dict[str, Any]) -> list[str]:
    """A line of the table."""
    split, one = found["losses"]
    apart = max(abs(a - b) / abs(b) for a, b in zip(split, one, strict=True))
    assert abs(split[0] - one[0]) <= ROUNDING * abs(one[0]), f"{model}: {split} split, {one} by one process"
    assert found["peak"] <= MOST_BYTES, f"{model}: a process takes {found['peak']} bytes"
    sizes = (f"{found[key] / 1e9:.2f}" for key in ("predicted", "peak", "alone"))
    kept = str(found["remade"])
    return [model, found["optimizer"], str(found["ways"]), kept, f"{split[0]:.5f}", f"{apart:.1e}", *sizes]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--steps", type=int, default=2)
    resumable(parser)
    given = parser.parse_args()
    pieces, rows = Pieces(given.kept, given.part_seconds), []
    try:
        for model in given.models.split(","):
            found = pieces.get(model, partial(measured, model, given.steps))
            note(f"{model}: {found}")
            rows.append(row_of(model, found))
    except Paused as paused:
        note(str(paused))
        return 3
    header = ["model", "optimizer", "ways to split", "made again", "first loss", "apart from one process at most"]
    print(markdown([*header, "predicted, GB", "peak of a process, GB", "one process alone, GB"], rows))
    print(f"\n{machine()}, torch {version('torch')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
