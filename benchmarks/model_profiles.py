"""How far a profile is from the model it is of, and an estimate from what is measured later.

    python benchmarks/model_profiles.py                      # prints the tables of docs/profiling.md; half an hour
    python benchmarks/model_profiles.py --models gpt2-124m --sequence 64 --repeats 3
    python benchmarks/model_profiles.py --device cuda --dtype bfloat16 --keep profiles

For each model and micro-batch size, blocks measured one by one and summed, against the model in one piece: time of
forward and backward, and bytes held between them - the unique storages that autograd saved and the output, less
parameters - also as the allocator sees them. The model in one piece and its blocks take turns, run by run. Then the
profile of the middle size alone calibrates an estimate, which is held against what was measured at the other sizes.
On the CPU set MALLOC_MMAP_MAX_=0 and MALLOC_TRIM_THRESHOLD_=100000000000, lest page faults of the whole model count.
Zoo models in one piece run their blocks in one graph, Hugging Face models run transformers' own forward.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from tables import machine, markdown, note

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from pipeplan.costs.devices import device_preset
from pipeplan.costs.stages import stage_costs
from pipeplan.files import Profile, write_file
from pipeplan.runtime.models.huggingface import load
from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.profiling.estimate import estimate_model
from pipeplan.runtime.profiling.measure import profile_model
from runtime_support.whole_model import WholeBench, WholeModelTimes, replay

MODELS = {
    "gpt2-124m": "gpt2-124m",
    "gpt2-345m": "gpt2-345m",
    "bert-large": "BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)",
    "llama-like": (
        "LlamaConfig(hidden_size=1024, num_hidden_layers=12, num_attention_heads=16, num_key_value_heads=4, "
        "intermediate_size=2816, vocab_size=32000)"
    ),
    "mt5-like": "MT5Config(d_model=512, num_layers=8, vocab_size=32128)",
}
TIMES = ("forward_ns", "backward_ns")
SIZES = (1, 2, 4)


def in_one_piece(name: str, asked: argparse.Namespace) -> list[WholeBench]:
    """A bench of the whole model for each micro-batch size, with the same parameters."""
    dtype, device = getattr(torch, asked.dtype), torch.device(asked.device)
    if MODELS[name] == name:
        model = load_model(name, sequence=asked.sequence)
        modules = {block.id: model.build(block.id, 0, dtype=dtype, device=device) for block in model.blocks}
        batches = [model.mini_batch(size, 0, 0, dtype=dtype, device=device) for size in SIZES]
        runs = [partial(replay, model, modules, batch) for batch in batches]
        owners = tuple(modules.values())
    else:
        whole = load(MODELS[name], sequence=asked.sequence)
        module = whole.module.to(device, dtype)
        batches = [{key: each.to(device) for key, each in whole.batch(size, 0, 0).items()} for size in SIZES]
        runs = [partial(module, **batch) for batch in batches]
        owners = (module,)
    return [WholeBench(run, owners, tuple(batch.values()), device) for run, batch in zip(runs, batches, strict=True)]


def sums(profile: Profile, size: int) -> dict[str, int]:
    """Over all blocks, as one stage: a tensor that several of them take is held once."""
    costs = stage_costs(profile, [block.id for block in profile.blocks], size)
    return {field: getattr(costs, field) for field in (*TIMES, "activation_bytes")}


def against_whole(name: str, profile: Profile, found: Sequence[WholeModelTimes]) -> list[list[str]]:
    """A row for each size: milliseconds, megabytes and the blocks' share of them."""
    rows = []
    for size, whole in zip(SIZES, found, strict=True):
        blocks = sums(profile, size)
        time, whole_time = sum(blocks[each] for each in TIMES), whole.forward_ns + whole.backward_ns
        held = blocks["activation_bytes"]
        rows.append(
            [
                *(name, str(size), f"{whole_time / 1e6:.0f}", f"{time / 1e6:.0f}", f"{time / whole_time - 1:+.1%}"),
                *(f"{whole.retained_bytes / 1e6:.1f}", f"{held / 1e6:.1f}"),
                *(f"{held / whole.retained_bytes - 1:+.2%}", f"{held / whole.allocated_bytes - 1:+.2%}"),
            ]
        )
    return rows


def against_later(name: str, profile: Profile, asked: argparse.Namespace) -> list[list[str]]:
    """A row for each size but the middle one, which calibrates."""
    middle = SIZES[1]
    blocks = tuple(
        block.model_copy(update={"costs": tuple(row for row in block.costs if row.microbatch_size == middle)})
        for block in profile.blocks
    )
    known = profile.model_copy(update={"blocks": blocks})
    estimate = estimate_model(
        load_model(MODELS[name], sequence=asked.sequence, meta=True),
        SIZES,
        device=device_preset(asked.preset),
        dtype=getattr(torch, asked.dtype),
        calibration=known,
    )
    rows = []
    for size in (size for size in SIZES if size != middle):
        real, told = sums(profile, size), sums(estimate, size)
        errors = [told[each] / real[each] - 1 for each in (*TIMES, "activation_bytes")]
        total = sum(told[each] for each in TIMES) / sum(real[each] for each in TIMES) - 1
        rows.append(
            [name, str(middle), str(size), *(f"{error:+.1%}" for error in (total, *errors[:2])), f"{errors[2]:+.2%}"]
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--preset", default="cpu", help="preset of the estimate's rates, which calibration replaces")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--keep", type=Path, help="folder for the measured profiles")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    whole_rows, later_rows = [], []
    for name in asked.models:
        note(name)
        benches = in_one_piece(name, asked)
        profile = profile_model(
            load_model(MODELS[name], sequence=asked.sequence),
            SIZES,
            repeats=asked.repeats,
            warmup=asked.warmup,
            dtype=getattr(torch, asked.dtype),
            device=asked.device,
            beside=[bench.time for bench in benches],
        )
        if asked.keep:
            write_file(profile, str(asked.keep / f"{name}.json"))
        whole_rows += against_whole(name, profile, [bench.result() for bench in benches])
        later_rows += against_later(name, profile, asked)
        print(
            markdown(
                ("model", "size", "whole, ms", "blocks, ms", "", "held, MB", "blocks, MB", "", "allocator"), whole_rows
            )
        )
        print()
        print(markdown(("model", "calibrated on", "size", "F + B", "F", "B", "held"), later_rows))
        print(
            f"\n{machine()}, torch {torch.__version__}, {asked.threads} thread, sequence {asked.sequence}\n", flush=True
        )


if __name__ == "__main__":
    main()
