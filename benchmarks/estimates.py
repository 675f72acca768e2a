"""What one measured size, or another model, tells of what was not measured: on the shipped profiles of GPT-2.

    python benchmarks/estimates.py        # prints the table of docs/estimating.md

Nothing runs here but the estimates: the measured profiles are in ``profiles/``.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import torch
from tables import markdown

from pipeplan.costs.devices import device_preset
from pipeplan.files import Profile, read_profile
from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.profiling.estimate import estimate_model

PROFILES = Path(__file__).parents[1] / "profiles"
CASES = (
    ("gpt2-124m", (2,), "gpt2-124m"),
    ("gpt2-124m", (1,), "gpt2-124m"),
    ("gpt2-345m", (2,), "gpt2-345m"),
    ("gpt2-345m", (1,), "gpt2-345m"),
    ("gpt2-124m", (2,), "gpt2-345m"),
    ("gpt2-124m", (1, 2, 4), "gpt2-345m"),
)
SIZES = (1, 2, 4)
FIELDS = ("forward_ns", "backward_ns", "input_grad_ns", "weight_grad_ns")


def only(profile: Profile, sizes: tuple[int, ...]) -> Profile:
    """The profile without other micro-batch sizes."""
    blocks = tuple(
        block.model_copy(update={"costs": tuple(row for row in block.costs if row.microbatch_size in sizes)})
        for block in profile.blocks
    )
    return profile.model_copy(update={"blocks": blocks})


def total(profile: Profile, size: int, *fields: str) -> int:
    """Sum over all blocks."""
    rows = [row for block in profile.blocks for row in block.costs if row.microbatch_size == size]
    return sum(getattr(row, field) for row in rows for field in fields)


def per_block(told: Profile, real: Profile, size: int) -> float:
    """Median error of a block's forward and backward."""
    errors = []
    for one, other in zip(told.blocks, real.blocks, strict=True):
        row, form = (next(r for r in block.costs if r.microbatch_size == size) for block in (one, other))
        errors.append(abs((row.forward_ns + row.whole_backward_ns) / (form.forward_ns + form.whole_backward_ns) - 1))
    return statistics.median(errors)


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    for source, sizes, target in CASES:
        measured, real = (read_profile(str(PROFILES / f"{name}-cpu.json")) for name in (source, target))
        told = estimate_model(
            load_model(target),
            SIZES,
            device=device_preset("cpu"),
            dtype=torch.float32,
            calibration=only(measured, sizes),
            reference=load_model(source),
        )
        for size in SIZES:
            if source == target and size in sizes:
                continue
            both = total(told, size, *FIELDS[:2]) / total(real, size, *FIELDS[:2]) - 1
            apart = [total(told, size, field) / total(real, size, field) - 1 for field in FIELDS]
            where = f"{source.removeprefix('gpt2-')}, size {', '.join(map(str, sizes))}"
            errors = [f"{error:+.1%}" for error in (both, *apart)]
            rows.append(
                [where, f"{target.removeprefix('gpt2-')}, size {size}", *errors, f"{per_block(told, real, size):.1%}"]
            )
    print(markdown(("fitted to", "told", "F + B", "F", "B", "I", "W", "median block"), rows))


if __name__ == "__main__":
    main()
