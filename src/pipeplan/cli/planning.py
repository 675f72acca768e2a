"""What the verbs that search have in common: their flags, what these mean, a status line, and SIGTERM."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from pipeplan.cli.types import BYTES, DURATION

if TYPE_CHECKING:
    from pipeplan.model import Cluster, Placement, Profile
    from pipeplan.planner import Batch, Options
    from pipeplan.schedule.rules import Rules
    from pipeplan.schedule.search import Progress

__all__ = ["Asked", "Status", "interrupt_on_sigterm", "planning_options", "read_asked"]

_YES_NO = {"auto": None, "yes": True, "no": False}
_RECOMPUTE = {"auto": None, "all": True, "none": False}

_Command = TypeVar("_Command", bound=Callable[..., object])

_OPTIONS = (
    click.argument("profile_path", metavar="PROFILE"),
    click.option("--devices", type=click.IntRange(min=1), help="Number of devices.  [default: the placement's]"),
    click.option("--cluster", "cluster_path", metavar="FILE", help="Cluster file: devices, memory, links."),
    click.option("--memory", type=BYTES, help="Memory of each device, as 16GB or 16GiB.  [default: the cluster's]"),
    click.option("--mini-batch", type=click.IntRange(min=1), help="Samples per iteration."),
    click.option("--microbatch-size", type=click.IntRange(min=1), help="Samples per micro-batch."),
    click.option(
        "--microbatches", type=click.IntRange(min=1), help="Micro-batches per iteration.  [default: 4 x devices]"
    ),
    click.option(
        "--placement",
        default="auto",
        show_default=True,
        metavar="NAME|FILE",
        help="auto (all, or the profile's own), one-to-one, circular, v-shape, bidirectional, "
        "bidirectional-v-shape, or a placement file.",
    ),
    click.option(
        "--chunks",
        type=click.IntRange(min=1),
        help="Stages per device, where there are several.  [default: 2]",
    ),
    click.option("--replicas", type=click.IntRange(min=1), help="Copies of the whole pipeline.  [default: searched]"),
    click.option(
        "--spread",
        type=click.Choice(list(_YES_NO)),
        default="auto",
        show_default=True,
        help="Shared blocks over all devices.",
    ),
    click.option(
        "--slices",
        default="auto",
        show_default=True,
        metavar="auto|M",
        help="Leading micro-batches whose warmup forwards run in halves.",
    ),
    click.option("--recompute", type=click.Choice(list(_RECOMPUTE)), default="auto", show_default=True),
    click.option("--unroll", default="auto", show_default=True, metavar="auto|U", help="Micro-batches per repetend."),
    click.option("--split-backward", type=click.Choice(list(_YES_NO)), default="auto", show_default=True),
    click.option(
        "--split-overhead",
        type=DURATION,
        default="0ns",
        show_default=True,
        help="What each input and weight gradient takes longer for being launched apart.",
    ),
    click.option("--time-limit", type=DURATION, default="30s", show_default=True, help="Stop after this long."),
    click.option("--seed", type=click.IntRange(min=0, max=2**31 - 1), default=0, show_default=True),
    click.option("--deterministic", is_flag=True, help="Same seed, same plan: counts the solver's steps, not seconds."),
    click.option("--json", "as_json", is_flag=True, help="Print the figures as one JSON object."),
)


def planning_options(command: _Command) -> _Command:
    """Give a command the flags of everything that searches."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@dataclass(frozen=True, slots=True)
class Asked:
    """What the flags mean, with the files read."""

    profile: Profile
    cluster: Cluster | None
    placement: Placement | str
    num_devices: int
    batch: Batch
    sizes: tuple[int, ...]
    options: Options
    chunks: int | None
    memory_bytes: int | None


def read_asked(flags: dict[str, Any], scheduler: str = "auto", rules: Rules | None = None) -> Asked:
    """Read the files that the flags of :func:`planning_options` name, and resolve their defaults.

    Where neither flags nor the profile say a placement, that of ``rules`` holds.

    Raises:
        UsageError: files that cannot be read, or flags that contradict each other.
    """
    from pipeplan.model import read_cluster, read_profile
    from pipeplan.planner import Options, choose_placement, resolve_batch

    profile = read_profile(flags["profile_path"])
    cluster = read_cluster(flags["cluster_path"]) if flags["cluster_path"] is not None else None
    options = Options(
        scheduler=scheduler,
        rules=rules,
        unroll=_number(flags["unroll"], "--unroll", 1, 64),
        split_backward=_YES_NO[flags["split_backward"]],
        split_overhead_ns=flags["split_overhead"],
        recompute=_RECOMPUTE[flags["recompute"]],
        replicas=flags["replicas"],
        spread=_YES_NO[flags["spread"]],
        num_parted=_number(flags["slices"], "--slices", 0, 10_000),
        time_limit=flags["time_limit"] / 1e9,
        seed=flags["seed"],
        deterministic=flags["deterministic"],
    )
    devices = flags["devices"]
    if devices is None and cluster is not None and profile.placement is None:
        devices = cluster.num_devices
    placement, num_devices = choose_placement(profile, flags["placement"], devices, rules)
    batch = resolve_batch(
        profile,
        num_devices,
        mini_batch=flags["mini_batch"],
        microbatch_size=flags["microbatch_size"],
        num_microbatches=flags["microbatches"],
        placement=placement,
    )
    fixed = flags["microbatch_size"] is not None or flags["microbatches"] is not None
    sizes = (batch.microbatch_size,) if fixed else profile.microbatch_sizes
    chunks = flags["chunks"] or (rules.chunks if rules is not None and placement == rules.placement else None)
    return Asked(profile, cluster, placement, num_devices, batch, sizes, options, chunks, flags["memory"])


def _number(text: str, flag: str, least: int, most: int) -> int | None:
    """What a flag means that takes auto or a number."""
    if text == "auto":
        return None
    if not text.isdecimal() or not least <= int(text) <= most:
        raise click.BadParameter(f"{text!r} is neither auto nor a number from {least} to {most}", param_hint=flag)
    return int(text)


def interrupt_on_sigterm() -> None:
    """Let SIGTERM end a search as Ctrl-C does: with the best plan so far."""
    signal.signal(signal.SIGTERM, _as_interrupt)


def _as_interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


class Status:
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
