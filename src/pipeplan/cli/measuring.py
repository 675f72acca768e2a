"""The part of ``pipeplan profile`` that measures a model."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeplan.cli.outputs import require_stdout_once, require_writable
from pipeplan.errors import ExecutionError, InfeasibleError, UsageError

if TYPE_CHECKING:
    from pipeplan.model import Profile
    from pipeplan.runtime.model import Model
    from pipeplan.runtime.partial import UnfinishedProfile

__all__ = ["Shown", "asked_model", "measure_and_write", "print_profile", "require_torch", "warnings_told"]

INTERRUPTED = 130


def measure_and_write(ctx: click.Context) -> None:
    """Measure a model, or go on where an earlier measurement was interrupted, and write the profile."""
    given = ctx.params
    output: str = given["output"]
    require_stdout_once(output, given["as_json"])
    require_torch()
    require_writable(output)
    from pipeplan.model import write_file
    from pipeplan.runtime.partial import UnfinishedProfile

    begin = time.monotonic()
    partial = UnfinishedProfile(_partial_path(output))
    if partial.path is not None and partial.path.exists():
        click.echo(f"pipeplan: going on from {partial.path}", err=True)
    shown = Shown("measuring")
    try:
        with _threads(given["threads"]), warnings_told(), shown:
            profile = _measure(given, shown.update, partial)
    except KeyboardInterrupt:
        click.echo(f"pipeplan: interrupted while measuring {shown.what}; {_kept(partial)}", err=True)
        ctx.exit(INTERRUPTED)
    except (ExecutionError, InfeasibleError):
        click.echo(f"pipeplan: measuring ended; {_kept(partial, 'a command with other --microbatch sizes')}", err=True)
        raise
    write_file(profile, output)
    partial.remove()
    _tell_missing(profile, given["microbatch"])
    print_profile(profile, output, time.monotonic() - begin, as_json=given["as_json"])


def print_profile(profile: Profile, output: str, seconds: float, *, as_json: bool) -> None:
    """What a profile says in short, once it is written."""
    from pipeplan.report.inspection import print_blocks

    if as_json:
        click.echo(json.dumps(_summary(profile, seconds)))
    elif output != "-":
        print_blocks(profile)
        click.echo(f"profile written to {output}", err=True)


def _partial_path(output: str) -> Path | None:
    """Where an interrupted measurement is kept: beside the profile, unless that is no ordinary file."""
    path = Path(output)
    return None if output == "-" or (path.exists() and not path.is_file()) else path.with_name(f"{path.name}.partial")


def _kept(partial: UnfinishedProfile, what: str = "the same command") -> str:
    """Where measurements are, and what goes on with them."""
    if partial.path is None or not partial.path.exists():
        return "nothing is written"
    return f"what was measured is kept in {partial.path}, and {what} goes on from there"


def _measure(
    given: Mapping[str, Any], progress: Callable[[int, int, str], None], partial: UnfinishedProfile
) -> Profile:
    import torch

    from pipeplan.model import read_cluster
    from pipeplan.runtime.profiler import profile_model

    return profile_model(
        asked_model(given),
        given["microbatch"],
        repeats=given["repeats"],
        warmup=given["warmup"],
        dtype=getattr(torch, given["dtype"] or "float32"),
        device=given["device"],
        seed=given["seed"],
        shards=given["shards"],
        recompute=given["recompute"],
        cluster=read_cluster(given["cluster"]) if given["cluster"] else None,
        progress=progress,
        partial=partial,
    )


def asked_model(given: Mapping[str, Any], *, meta: bool = False) -> Model:
    """The model that the command line names."""
    from pipeplan.runtime.loading import load_model

    name, sequence, grain, shared = (given[key] for key in ("name", "sequence", "grain", "shared"))
    model = load_model(name, sequence=sequence, grain=grain, shared=shared, meta=meta)
    if max(given["shards"]) > 1 and model.sharded is not None and not model.runs_split:
        click.echo(
            f"pipeplan: blocks of {model.name} run whole only: the rows of --shards are for planning, and plans that "
            "run come from search --spread no",
            err=True,
        )
    return model


def require_torch() -> None:
    """Refuse without torch. Raises UsageError."""
    import importlib.util

    if importlib.util.find_spec("torch") is None:
        raise UsageError("profile needs torch, which is not installed: pip install 'pipeplan[torch]'")


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
def warnings_told() -> Iterator[None]:
    """Pipeplan's own warnings in the form of its other messages, on stderr when all is measured."""
    with warnings.catch_warnings(record=True) as caught:
        yield
    for text in dict.fromkeys(str(warning.message) for warning in caught if warning.category is UserWarning):
        click.echo(f"pipeplan: warning: {text}", err=True)


class Shown:
    """A progress bar on stderr; nothing unless it is a terminal. ``what`` runs now."""

    def __init__(self, doing: str) -> None:
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
        self._task = self._progress.add_task(doing, total=None, what="")

    def __enter__(self) -> Shown:
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
    from pipeplan.report.inspection import alike, sums

    return {
        "profile": profile.name,
        "device": profile.source.device,
        "dtype": profile.source.dtype,
        "num_blocks": len(profile.blocks),
        "num_kinds": len(alike(profile)),
        "parameter_bytes": sum(block.parameter_bytes for block in profile.blocks),
        "optimizer_bytes": sum(block.optimizer_bytes for block in profile.blocks),
        "sizes": [{"microbatch_size": size, **sums(profile, size)} for size in profile.microbatch_sizes],
        "seconds": round(seconds, 3),
    }
