"""``pipeplan profile``: measure a model block by block and write the profile."""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeplan.errors import FileError, UsageError

if TYPE_CHECKING:
    from pipeplan.model import Block, Profile

__all__ = ["command"]

INTERRUPTED = 130
_PLAIN_WIDTH = 120


def _sizes(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    """Micro-batch sizes from ``1,2,4``: ascending, each once."""
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isascii() and part.isdecimal() and 1 <= int(part) <= 1_000_000 for part in parts):
        raise click.BadParameter(f"{value!r} is not a list of micro-batch sizes; write numbers from 1 on, as 1,2,4")
    return tuple(sorted({int(part) for part in parts}))


@click.command("profile", short_help="Measure a model block by block and write the profile.")
@click.argument("name", metavar="MODEL")
@click.option("--microbatch", "sizes", callback=_sizes, default="1,2,4", show_default=True, help="Samples per run.")
@click.option("--sequence", type=click.IntRange(min=1), help="Shorter sequences for a model of the zoo.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float64"]), default="float32", show_default=True)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--threads", type=click.IntRange(1, 4096), help="Threads of CPU operators.  [default: torch's choice]")
@click.option("--repeats", type=click.IntRange(1, 100_000), default=10, show_default=True, help="Timed runs.")
@click.option("--warmup", type=click.IntRange(0, 100_000), default=3, show_default=True, help="Runs before them.")
@click.option("--seed", type=click.IntRange(min=0, max=2**31 - 1), default=0, show_default=True)
@click.option("-o", "--output", required=True, metavar="FILE", help="Where to write the profile; - for stdout.")
@click.option("--json", "as_json", is_flag=True, help="Print the sums as one JSON object instead of a table.")
@click.pass_context
def command(
    ctx: click.Context,
    name: str,
    sizes: tuple[int, ...],
    sequence: int | None,
    dtype: str,
    device: str,
    threads: int | None,
    repeats: int,
    warmup: int,
    seed: int,
    output: str,
    as_json: bool,
) -> None:
    """Measure MODEL block by block: times of forward and backward, and what memory they hold.

    MODEL is a name of the zoo (gpt2-tiny, gpt2-124m, gpt2-345m) or pkg.mod:factory, a function that returns a
    pipeplan.runtime.model.Model. Use a quiet machine: every number is a median, and the profile says how far the
    runs behind it lie apart.
    """
    if output == "-" and as_json:
        raise UsageError("-o - and --json would both print to stdout; write the profile to a file")
    _require_torch()
    _require_writable(output)
    from pipeplan.model import write_file

    begin = time.monotonic()
    shown = _Shown()
    try:
        with _threads(threads), _warnings_told(), shown:
            profile = _measure(name, sizes, sequence, dtype, device, repeats, warmup, seed, shown.update)
    except KeyboardInterrupt:
        click.echo(f"pipeplan: interrupted while measuring {shown.what}; nothing is written", err=True)
        ctx.exit(INTERRUPTED)
    write_file(profile, output)
    _tell_missing(profile, sizes)
    if as_json:
        click.echo(json.dumps(_summary(profile, time.monotonic() - begin)))
    elif output != "-":
        _print_table(profile)
        click.echo(f"profile written to {output}", err=True)


def _measure(
    name: str,
    sizes: tuple[int, ...],
    sequence: int | None,
    dtype: str,
    device: str,
    repeats: int,
    warmup: int,
    seed: int,
    progress: Callable[[int, int, str], None],
) -> Profile:
    import torch

    from pipeplan.runtime.model import load_model
    from pipeplan.runtime.profiler import profile_model

    return profile_model(
        load_model(name, sequence=sequence),
        sizes,
        repeats=repeats,
        warmup=warmup,
        dtype=getattr(torch, dtype),
        device=device,
        seed=seed,
        progress=progress,
    )


def _require_torch() -> None:
    import importlib.util

    if importlib.util.find_spec("torch") is None:
        raise UsageError("profile needs torch, which is not installed: pip install 'pipeplan[torch]'")


def _require_writable(path: str) -> None:
    """Find out before minutes of measuring."""
    folder = Path(path).absolute().parent
    if path == "-":
        return
    if not folder.is_dir():
        raise FileError(f"{path}: cannot be written: there is no folder {folder}")
    if Path(path).is_dir() or not os.access(path if Path(path).exists() else folder, os.W_OK):
        raise FileError(f"{path}: cannot be written; choose another file with -o")


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Set the threads of CPU operators, and put them back."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _warnings_told() -> Iterator[None]:
    """Pipeplan's own warnings in the form of its other messages, on stderr when all is measured."""
    with warnings.catch_warnings(record=True) as caught:
        yield
    for text in dict.fromkeys(str(warning.message) for warning in caught if warning.category is UserWarning):
        click.echo(f"pipeplan: warning: {text}", err=True)


class _Shown:
    """A progress bar on stderr; nothing unless it is a terminal. ``what`` runs now."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self.what = "nothing yet"
        console = Console(stderr=True)
        columns = (
            BarColumn(),
            TextColumn("{task.percentage:3.0f}%"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[what]}"),
        )
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task("measuring", total=None, what="")

    def __enter__(self) -> _Shown:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, done: int, total: int, what: str) -> None:
        """Called before each run."""
        self.what = what
        self._progress.update(self._task, completed=done, total=total, what=what)


def _tell_missing(profile: Profile, sizes: tuple[int, ...]) -> None:
    missing = [str(size) for size in sizes if size not in profile.microbatch_sizes]
    if missing:
        click.echo(f"pipeplan: not measured: micro-batch sizes {', '.join(missing)}. {profile.source.notes}", err=True)


def _summary(profile: Profile, seconds: float) -> dict[str, object]:
    """Sums over all blocks, for each micro-batch size."""
    return {
        "profile": profile.name,
        "device": profile.source.device,
        "dtype": profile.source.dtype,
        "num_blocks": len(profile.blocks),
        "num_kinds": len(_alike(profile)),
        "parameter_bytes": sum(block.parameter_bytes for block in profile.blocks),
        "optimizer_bytes": sum(block.optimizer_bytes for block in profile.blocks),
        "sizes": [
            {"microbatch_size": size, **_sums(profile.blocks, index)}
            for index, size in enumerate(profile.microbatch_sizes)
        ],
        "seconds": round(seconds, 3),
    }


_SUMMED = (
    "forward_ns",
    "backward_ns",
    "input_grad_ns",
    "weight_grad_ns",
    "activation_bytes",
    "weight_grad_bytes",
)


def _sums(blocks: tuple[Block, ...], index: int) -> dict[str, int]:
    """Sums of the blocks' rows of one size, and the largest workspace."""
    rows = [block.costs[index] for block in blocks]
    found = {field: sum(getattr(row, field) for row in rows) for field in _SUMMED}
    return {**found, "workspace_bytes": max(row.workspace_bytes for row in rows)}


def _alike(profile: Profile) -> dict[object, list[Block]]:
    """Blocks that share their measurements, by these."""
    found: dict[object, list[Block]] = {}
    for block in profile.blocks:
        key = (block.operator, *(row.model_dump_json() for row in block.costs))
        found.setdefault(key, []).append(block)
    return found


_HEADINGS = (
    *("block", "alike", "samples", "forward", "backward", "I", "W", "spread"),
    *("held", "for W", "workspace"),
)


def _print_table(profile: Profile) -> None:
    """One row for each kind of block and micro-batch size."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from pipeplan.units import format_bytes, format_ns

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in _HEADINGS:
        table.add_column(heading, justify="left" if heading == "block" else "right")
    for blocks in _alike(profile).values():
        for row in blocks[0].costs:
            times = (row.forward_ns, row.backward_ns, row.input_grad_ns, row.weight_grad_ns)
            sizes = (row.activation_bytes, row.weight_grad_bytes, row.workspace_bytes)
            table.add_row(
                blocks[0].id,
                str(len(blocks)),
                str(row.microbatch_size),
                *(format_ns(time or 0) for time in times),
                f"{max(row.spread.values()):.1%}",
                *(format_bytes(size) for size in sizes),
            )
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_PLAIN_WIDTH)
    console.print(f"{profile.name} on {profile.source.device}, {profile.source.dtype}")
    console.print(table)
