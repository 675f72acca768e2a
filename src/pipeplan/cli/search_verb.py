"""``pipeplan search``: search a schedule for a profile and write the plan."""

from __future__ import annotations

import json
import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import click

from pipeplan.cli.types import BYTES, DURATION

if TYPE_CHECKING:
    from pipeplan.planner import Result
    from pipeplan.schedule.search import Progress

__all__ = ["command"]

_YES_NO = {"auto": None, "yes": True, "no": False}
_RECOMPUTE = {"auto": None, "all": True, "none": False}


@click.command("search", short_help="Search a schedule for a profile and write the plan.")
@click.argument("profile_path", metavar="PROFILE")
@click.option("--devices", type=click.IntRange(min=1), help="Number of devices.  [default: the profile's placement's]")
@click.option("--cluster", "cluster_path", metavar="FILE", help="Cluster file: devices, memory, links.")
@click.option("--memory", type=BYTES, help="Memory of each device, as 16GB or 16GiB.  [default: the cluster's]")
@click.option("--mini-batch", type=click.IntRange(min=1), help="Samples per iteration.")
@click.option("--microbatch-size", type=click.IntRange(min=1), help="Samples per micro-batch.")
@click.option("--microbatches", type=click.IntRange(min=1), help="Micro-batches per iteration.  [default: 4 x devices]")
@click.option(
    "--placement",
    default="auto",
    show_default=True,
    metavar="NAME|FILE",
    help="auto, one-to-one, circular, v-shape, or a placement file.",
)
@click.option("--chunks", type=click.IntRange(min=1), help="Stages per device for circular and v-shape.  [default: 2]")
@click.option("--recompute", type=click.Choice(list(_RECOMPUTE)), default="auto", show_default=True)
@click.option(
    "--scheduler", default="auto", show_default=True, metavar="NAME", help="auto, repetend, or a classic schedule."
)
@click.option("--unroll", default="auto", show_default=True, metavar="auto|U", help="Micro-batches per repetend.")
@click.option("--split-backward", type=click.Choice(list(_YES_NO)), default="auto", show_default=True)
@click.option("--time-limit", type=DURATION, default="30s", show_default=True, help="Stop after this long.")
@click.option("--seed", type=click.IntRange(min=0, max=2**31 - 1), default=0, show_default=True)
@click.option("--deterministic", is_flag=True, help="Same seed, same plan: counts the solver's steps, not seconds.")
@click.option("-o", "--output", metavar="FILE", help="Where to write the plan; - for stdout.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as one JSON object.")
def command(
    profile_path: str,
    devices: int | None,
    cluster_path: str | None,
    memory: int | None,
    mini_batch: int | None,
    microbatch_size: int | None,
    microbatches: int | None,
    placement: str,
    chunks: int | None,
    recompute: str,
    scheduler: str,
    unroll: str,
    split_backward: str,
    time_limit: int,
    seed: int,
    deterministic: bool,
    output: str | None,
    as_json: bool,
) -> None:
    """Search the best schedule for PROFILE and write the plan.

    The search always has a valid plan and improves it until it is proved optimal, the time limit passes, or
    Ctrl-C; the best plan is written in every case.
    """
    from pipeplan.errors import UsageError
    from pipeplan.model import read_cluster, read_profile, write_file
    from pipeplan.planner import Options, choose_placement, resolve_batch, search_plan

    if output == "-" and as_json:
        raise UsageError("-o - and --json would both print to stdout; write the plan to a file")
    profile = read_profile(profile_path)
    cluster = read_cluster(cluster_path) if cluster_path is not None else None
    options = Options(
        scheduler=scheduler,
        unroll=_unroll(unroll),
        split_backward=_YES_NO[split_backward],
        recompute=_RECOMPUTE[recompute],
        time_limit=time_limit / 1e9,
        seed=seed,
        deterministic=deterministic,
    )
    if devices is None and cluster is not None and profile.placement is None:
        devices = cluster.num_devices
    placed, num_devices = choose_placement(profile, placement, devices)
    batch = resolve_batch(
        profile,
        num_devices,
        mini_batch=mini_batch,
        microbatch_size=microbatch_size,
        num_microbatches=microbatches,
    )
    signal.signal(signal.SIGTERM, _as_interrupt)
    with _Status() as progress:
        result = search_plan(
            profile,
            placed,
            batch,
            options,
            num_devices=num_devices,
            chunks=chunks,
            cluster=cluster,
            memory_bytes=memory,
            progress=progress,
        )
    if output is not None:
        write_file(result.plan, output)
    _print(result, output, as_json)


def _unroll(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal() or not 1 <= int(text) <= 64:
        raise click.BadParameter(f"{text!r} is neither auto nor a number from 1 to 64", param_hint="--unroll")
    return int(text)


def _as_interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """SIGTERM ends a search as Ctrl-C does: with the best plan so far."""
    raise KeyboardInterrupt


class _Status:
    """A line on stderr with the clock, the best value, the bound and the gap; nothing unless stderr is a terminal."""

    def __enter__(self) -> Progress | None:
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        console = Console(stderr=True)
        self._line = Progress(
            SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}"), console=console, transient=True
        )
        if not console.is_terminal:
            return None
        self._line.start()
        self._task = self._line.add_task("searching", total=None)
        return self._update

    def _update(self, what: str, best_ns: int, bound_ns: int, seconds: float) -> None:
        from pipeplan.units import format_ns

        gap = best_ns / bound_ns - 1
        text = f"best {format_ns(best_ns)}  bound {format_ns(bound_ns)}  gap {gap:.2%}  by {what} at {seconds:.1f}s"
        self._line.update(self._task, description=text)

    def __exit__(self, *_: object) -> None:
        if self._line.live.is_started:
            self._line.stop()


def _print(result: Result, output: str | None, as_json: bool) -> None:
    if result.interrupted:
        click.echo("pipeplan: interrupted; this is the best plan so far", err=True)
    if as_json:
        click.echo(json.dumps(result.summary()))
        return
    from pipeplan.report.terminal import print_simulation
    from pipeplan.simulate.simulation import simulate

    if output == "-":
        return
    print_simulation(simulate(result.plan), file=sys.stdout)
    if output is not None:
        click.echo(f"plan written to {output}", err=True)
