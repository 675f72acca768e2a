"""Options that several verbs share: their types, and those of the verbs that search."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pipeplan import _api
from pipeplan.errors import UsageError
from pipeplan.units import parse_bytes, parse_ns

if TYPE_CHECKING:
    from pipeplan._api import Request, Rules

__all__ = ["BYTES", "COUNTS", "DURATION", "FiniteRange", "planning_options", "read_request"]


_MOST = 1_000_000


class _Duration(click.ParamType[int]):
    """A duration with a unit, as ns: ``3.2ms``."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Nanoseconds."""
        if isinstance(value, int):
            return value
        try:
            return parse_ns(value)
        except UsageError as error:
            self.fail(str(error), param, ctx)


class _Bytes(click.ParamType[int]):
    """A size, as bytes: ``80GB``, ``80GiB``."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Bytes."""
        if isinstance(value, int):
            return value
        try:
            return parse_bytes(value)
        except UsageError as error:
            self.fail(str(error), param, ctx)


class _Counts(click.ParamType[tuple[int, ...]]):
    """Numbers from 1 on, ascending and each once: ``1,2,4``."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """The numbers."""
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in value.split(",")]
        if not all(part.isascii() and part.isdecimal() and 1 <= int(part) <= _MOST for part in parts):
            self.fail(f"{value!r} is not a list of numbers from 1 to {_MOST}; write them as 1,2,4", param, ctx)
        return tuple(sorted({int(part) for part in parts}))


class FiniteRange(click.FloatRange):
    """Numbers from ``min`` on: never ``nan``, which no bound of click's refuses, and ``inf`` only if that is said."""

    def __init__(self, min: float, *, min_open: bool = False, infinite: bool = False) -> None:
        super().__init__(min=min, min_open=min_open)
        self._infinite = infinite

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number."""
        number = float(super().convert(value, param, ctx))
        if math.isnan(number) or (math.isinf(number) and not self._infinite):
            self.fail(f"{value} is not a {'number' if self._infinite else 'finite number'}", param, ctx)
        return number


class _PlacementOption(click.Option):
    """Its help names every placement strategy there is."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """The flag and its help, which is made when it is shown."""
        self.help = f"auto (all, or the profile's own), {', '.join(_api.STRATEGIES)}, or a placement file."
        return super().get_help_record(ctx)


DURATION = _Duration()
BYTES = _Bytes()
COUNTS = _Counts()


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
        cls=_PlacementOption,
        default="auto",
        show_default=True,
        metavar="NAME|FILE",
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


def read_request(flags: dict[str, Any], scheduler: str = "auto", rules: Rules | None = None) -> Request:
    """The request that the flags of :func:`planning_options` make, with the files that they name.

    Raises:
        UsageError: files that cannot be read, or flags that contradict each other.
    """
    profile = _api.read_profile(flags["profile_path"])
    cluster = _api.read_cluster(flags["cluster_path"]) if flags["cluster_path"] is not None else None
    same = ("devices", "placement", "mini_batch", "microbatch_size", "chunks", "replicas", "seed", "deterministic")
    return _api.Request.of(
        profile,
        **{name: flags[name] for name in same},
        cluster=cluster,
        num_microbatches=flags["microbatches"],
        memory_bytes=flags["memory"],
        scheduler=scheduler,
        rules=rules,
        unroll=_number(flags["unroll"], "--unroll", 1, 64),
        split_backward=_YES_NO[flags["split_backward"]],
        split_overhead_ns=flags["split_overhead"],
        recompute=_RECOMPUTE[flags["recompute"]],
        spread=_YES_NO[flags["spread"]],
        num_parted=_number(flags["slices"], "--slices", 0, 10_000),
        time_limit=flags["time_limit"] / 1e9,
    )


def _number(text: str, flag: str, least: int, most: int) -> int | None:
    """What a flag means that takes auto or a number."""
    if text == "auto":
        return None
    if not text.isdecimal() or not least <= int(text) <= most:
        raise click.BadParameter(f"{text!r} is neither auto nor a number from {least} to {most}", param_hint=flag)
    return int(text)
