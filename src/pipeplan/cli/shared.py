"""What verbs share: option types, the flags of a search, progress, interruption, and where results go."""

from __future__ import annotations

import gc
import math
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click
from click.shell_completion import CompletionItem

from pipeplan import _api
from pipeplan.cli.output import say
from pipeplan.errors import FileError, UsageError, choose_from
from pipeplan.units import bytes_of, ns_of

if TYPE_CHECKING:
    from pipeplan._api import Cluster, KernelsAsked, Limit, Plan, Planning, Profile, Progress, Request, Rules


_MOST = 1_000_000
"""As many of anything as a plan counts; which no file has more of."""

NUMBER = click.IntRange(1, _MOST)
_MOST_BY_FAR = 10**9
LARGE_NUMBER = click.IntRange(1, _MOST_BY_FAR)
"""Of what no plan counts one by one: samples, tokens, steps."""

FROM_ZERO = click.IntRange(0, _MOST_BY_FAR)

_MOST_DEVICES = 65_536
NUM_DEVICES = click.IntRange(1, _MOST_DEVICES)

_Command = TypeVar("_Command", bound=Callable[..., object])


class _Quantity(click.ParamType[int]):
    """A number with a unit: a duration as ns (``3.2ms``), a size as bytes (``80GB``, ``80GiB``)."""

    def __init__(self, name: str, parse: Callable[[Any], int]) -> None:
        self.name, self._parse = name, parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Nanoseconds, or bytes. A number that Python gives is of seconds, or of bytes."""
        try:
            return self._parse(value)
        except UsageError as error:
            self.fail(str(error), param, ctx)


class KnownNames(click.ParamType[str]):
    """A name of those that are known, or something else: any text is taken, and completion has the names.

    Args:
        names: makes them, when completion asks.
        files: whether it may be a file, too.
    """

    name = "text"

    def __init__(self, names: Callable[[], Iterable[str]], *, files: bool = False) -> None:
        self._names, self._files = names, files

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The text."""
        return str(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Names that begin like this. Files come first: bash drops what comes before them, and falls back to them."""
        found = [CompletionItem(name) for name in self._names() if name.startswith(incomplete)]
        return [CompletionItem(incomplete, type="file")] * self._files + found


class OneOf(click.Choice[str]):
    """One of some names; of one that is not known it asks which is meant."""

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        """A message that it is none of them, with near matches or all names."""
        return f"{value!r} is not known; {choose_from(str(value), list(map(str, self.choices)))}"


class Switch(OneOf):
    """What may be left open: some names, of which two mean yes and no, as True and False do in Python."""

    def __init__(self, meanings: Mapping[str, bool | str | None]) -> None:
        super().__init__(list(meanings))
        self.meanings = meanings

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The name."""
        names = [name for name, meaning in self.meanings.items() if meaning is value and value is not None]
        return super().convert(names[0] if names else value, param, ctx)


def _is_number(text: str, least: int, most: int) -> bool:
    """Whether it is one of these numbers; thousands of digits are none, nor does Python read them."""
    return text.isdecimal() and len(text) <= len(str(_MOST)) + 10 and least <= int(text) <= most


class _Counts(click.ParamType[tuple[int, ...]]):
    """Numbers from ``least`` to ``most``, ascending and each once: ``1,2,4``; those of ``tokens`` also as ``8k``."""

    name = "numbers"

    def __init__(self, most: int, *, least: int = 1, tokens: bool = False) -> None:
        self._least, self._most, self._tokens = least, most, tokens

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """The numbers."""
        text = (
            value if isinstance(value, str) else ",".join(map(str, value if isinstance(value, Iterable) else [value]))
        )
        parts = [part.strip() for part in text.split(",")]
        if self._tokens:
            parts = [_in_tokens(part) for part in parts]
        if not all(part.isascii() and _is_number(part, self._least, self._most) for part in parts):
            span = f"from {self._least} to {self._most}"
            self.fail(f"{value!r} is not a list of numbers {span}; write them as 1,2,4", param, ctx)
        return tuple(sorted({int(part) for part in parts}))


class Ratios(click.ParamType[tuple[float, ...]]):
    """Ratios of 1 to 1000, as ``4``, ``4:1`` or ``1,2.5``, one for each tier of switches."""

    name = "ratios"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        """The ratios."""
        parts = value.split(",") if isinstance(value, str) else value if isinstance(value, Iterable) else [value]
        try:
            found = tuple(float(str(part).strip().removesuffix(":1")) for part in parts)
        except ValueError:
            found = ()
        if not found or not all(1 <= each <= 1000 for each in found):
            self.fail(f"{value!r} is no list of ratios from 1 to 1000; write them as 4, 4:1 or 1,4", param, ctx)
        return found


_THOUSAND = 1024
"""Tokens of the k of lengths of texts, which models have positions for by powers of two."""


def _in_tokens(part: str) -> str:
    """``8k`` as the number that it means; anything else as it is."""
    number = part[:-1]
    is_short = part[-1:].lower() == "k" and number.isascii() and number.isdecimal() and len(number) < _MOST_DIGITS
    return str(int(number) * _THOUSAND) if is_short else part


_MOST_DIGITS = 10


class TokenCount(click.IntRange):
    """A number of tokens, also as ``8k``."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number."""
        number: Any = _in_tokens(value) if isinstance(value, str) else value
        return super().convert(number, param, ctx)


class _OfKind(click.ParamType[tuple[str, Any]]):
    """A kind of device and its profile: ``a100=FILE``; of Python a name and a profile or its path."""

    name = "kind=file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, Any]:
        """The name and what follows it."""
        kind, given = value.partition("=")[::2] if isinstance(value, str) else value
        if not kind or not given:
            self.fail(f"{value!r} does not say a kind of device and its profile; write KIND=FILE", param, ctx)
        return str(kind), os.fspath(given) if isinstance(given, os.PathLike) else given


class AutoOr(click.ParamType[str | int]):
    """``auto``, or a number from ``least`` to ``most``; or one of ``words``."""

    name = "number"

    def __init__(self, least: int, most: int, *words: str) -> None:
        self._least, self._most, self._words = least, most, ("auto", *words)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str | int:
        """A word, or the number."""
        text = str(value)
        if text in self._words:
            return text
        if not _is_number(text, self._least, self._most):
            words = f"neither {self._words[0]}" if len(self._words) == 1 else f"none of {', '.join(self._words)}"
            self.fail(f"{text!r} is {words} nor a number from {self._least} to {self._most}", param, ctx)
        return int(text)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """The words."""
        return [CompletionItem(word) for word in self._words if word.startswith(incomplete)]


class FiniteRange(click.FloatRange):
    """Numbers from ``min`` to ``max``: never ``nan``, which no bound of click's refuses, ``inf`` only if allowed."""

    def __init__(self, min: float, max: float | None = None, *, min_open: bool = False, infinite: bool = False) -> None:
        super().__init__(min=min, max=max, min_open=min_open)
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
        self.help = (
            f"auto (the profile's own, else all), all (strategies), {', '.join(_api.STRATEGIES)}, or a placement file. "
            "With a strategy there are no replicas and no split blocks unless --dp and --tp say so. Stages that "
            "form a graph, for models with branches, are among those of auto."
        )
        return super().get_help_record(ctx)


class RenamedOption(click.Option):
    """An option that is still taken under the names it ``was`` given before, which help does not show."""

    def __init__(self, *args: Any, was: tuple[str, ...], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._was = was

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        """Let the parser know all names."""
        shown, self.opts = self.opts, [*self.opts, *self._was]
        super().add_to_parser(parser, ctx)
        self.opts = shown


AUTOPIPE_SLICES: Literal["autopipe"] = "autopipe"
"""What ``--slices`` takes beside numbers: as many as AutoPipe's formula has."""

DURATION = _Quantity("duration", ns_of)
BYTES = _Quantity("size", bytes_of)
COUNTS = _Counts(_MOST)
TOKENS = _Counts(_MOST_BY_FAR, tokens=True)
TOKEN_IDS = _Counts(_MOST_BY_FAR, least=0)
NUM_TOKENS = TokenCount(1, _MOST_BY_FAR)
DEVICE_COUNTS = _Counts(_MOST_DEVICES)
FILE = click.Path(readable=False)  # which whoever reads it finds out, and says
FOLDER = click.Path(file_okay=False, readable=False)
PLACEMENT = KnownNames(lambda: _api.known_names("placements"), files=True)
SCHEDULER = KnownNames(lambda: _api.known_names("schedulers"))
MODEL = KnownNames(lambda: _api.known_names("models"), files=True)
EXAMPLE = KnownNames(lambda: _api.known_names("examples"))
DEVICE = KnownNames(lambda: _api.known_names("devices"))
MEASURED_DEVICE = KnownNames(lambda: ["cpu", "cuda", *_api.known_names("devices")])
PLANNER = KnownNames(lambda: _api.known_names("planners"))
RULES = KnownNames(lambda: _api.known_names("rules"), files=True)
TARGET = KnownNames(lambda: _api.export_targets())
SEARCH_TARGET = KnownNames(lambda: _api.search_targets())

RULES_OPTION = partial(click.option, "--rules", "rules_path", type=RULES, metavar="FILE|NAME|pkg.mod:name")
SEED = click.option("--seed", type=click.IntRange(min=0, max=2**31 - 1), default=0, help="Random seed.")

DETERMINISTIC = click.option(
    "--deterministic",
    is_flag=True,
    help="Same seed, same plan. --time-limit then counts work instead of seconds, so a busy machine takes longer.",
)
EXECUTOR = click.option(
    "--executor",
    metavar="NAME",
    help="Evaluate candidates on a Dask cluster instead: dask:ADDRESS, such as dask:tcp://host:8786.",
)
SEQUENCE = click.option("--sequence", type=LARGE_NUMBER, help="Sequence length, for zoo models and configurations.")


def require_one_kind_of_workers(request: Request, workers: int | None, executor: object) -> None:
    """Refuse an executor where processes of ours are asked for, or where it does nothing. Raises UsageError."""
    if executor is not None and (request.tunes or workers is not None):
        beside = "auto-tuning, which has --workers" if request.tunes else "--workers"
        raise UsageError(f"--executor is not for {beside}; leave one of them out")


def granularity(text: str) -> Callable[[_Command], _Command]:
    """What a block of a captured model is."""
    kinds = OneOf(["layer", "half", "operator"])
    return click.option("--granularity", "grain", cls=RenamedOption, was=("--grain",), type=kinds, help=text)


_YES_NO = {"auto": None, "yes": True, "no": False}
_RECOMPUTE: dict[str, bool | Literal["selective"] | None] = {
    "auto": None,
    "none": False,
    "selective": "selective",
    "all": True,
}

_RECIPE = (
    click.option(
        "--precision",
        type=KnownNames(lambda: _api.known_names("recipes")),
        metavar="fp32|bf16|bf16-mixed|bf16-autocast|fp16-mixed|fp8-mixed",
        help="Precision recipe: number formats of weights, gradients and optimizer state.  [default: the profile's]",
    ),
    click.option(
        "--gradient-dtype",
        type=OneOf(["fp32", "bf16", "fp16"]),
        help="Number format in which gradients accumulate.  [default: the recipe's]",
    ),
    click.option(
        "--optimizer",
        type=OneOf(["adamw", "momentum", "sgd"]),
        help="Optimizer whose state takes memory.  [default: the profile's]",
    ),
)


_ZERO = (
    click.option(
        "--zero",
        type=AutoOr(0, 3),
        metavar="auto|0|1|2|3",
        help="Shard state over replicas, as ZeRO and FSDP do. 1: optimizer state and master weights; 2: "
        "gradients as well; 3: parameters as well.  [default: auto, what makes the plan shortest; where links are "
        "unknown, so that messages seem free, 1, which sends no more than sums of gradients, and more if nothing fits]",
    ),
    click.option(
        "--zero-group",
        type=NUMBER,
        metavar="G",
        help="Shard within groups of this many neighbouring replicas, as HSDP does.  [default: all]",
    ),
    click.option(
        "--zero-exchange",
        type=OneOf(["auto", "inside"]),
        default="auto",
        help="When --zero 2 and 3 exchange: inside of each action, block by block, as FSDP does that wraps each layer; "
        "or, if that is shorter and fits, whole stages, for as many actions as pays.",
    ),
)


def zero_options(command: _Command) -> _Command:
    """Give a command the flags of sharded state."""
    for option in reversed(_ZERO):
        command = option(command)
    return command


def recipe_options(command: _Command) -> _Command:
    """Give a command the flags that choose number formats and the optimizer."""
    for option in reversed(_RECIPE):
        command = option(command)
    return command


def asked_profile(flags: Mapping[str, Any], cluster: Cluster | None = None) -> Profile:
    """The profile that the flags name, with the recipe that they ask for. Raises UsageError.

    Beside it those of kinds of the ``cluster``'s devices, where they name some.
    """
    asked = (flags["precision"], flags["gradient_dtype"], flags["optimizer"])
    profile = profile_of_kinds(given_file("profile", flags["profile_path"]), flags.get("profile_for", ()), cluster)
    return _api.with_asked_recipe(profile, *asked)


PROFILE_FOR = click.option(
    "--profile-for",
    type=_OfKind(),
    multiple=True,
    metavar="KIND=FILE",
    help="Profile of the same model on devices that --cluster calls KIND; repeat it for others.  [default: PROFILE]",
)


def profile_of_kinds(
    profile: Profile, given: Iterable[tuple[str, Any]], cluster: Cluster | None, plan: Plan | None = None
) -> Profile:
    """A profile beside those that ``--profile-for`` names for kinds of devices, of a cluster or a plan.

    Raises:
        UsageError: there is no such kind, it is there twice, or is of another model.
    """
    found: dict[str, Profile] = {}
    for kind, own in given:
        if kind in found:
            raise UsageError(f"--profile-for {kind} is there twice; leave one of them out")
        found[kind] = given_file("profile", own)
    return _api.for_kinds(profile, found, cluster, plan) if found else profile


def checked_against(given: Mapping[str, Any], *, plan: Plan) -> tuple[Profile | None, Cluster | None]:
    """The profile and the cluster that flags name beside a plan. Raises UsageError."""
    profile, cluster = (given_file(kind, given[f"{kind}_path"]) for kind in ("profile", "cluster"))
    if profile is None and given["profile_for"]:
        raise UsageError("--profile-for is beside --profile, which the other devices have; give that as well")
    return profile and profile_of_kinds(profile, given["profile_for"], cluster, plan), cluster


_COPIES = (
    click.option(
        *("--chunks", "--vp", "--virtual-stages", "chunks"),
        type=NUMBER,
        help="Virtual stages: stages per device, for placements with several.  [default: 2; searched for circular]",
    ),
    click.option(
        *("--replicas", "--dp", "replicas"),
        type=NUM_DEVICES,
        help="Data-parallel size: copies of the whole pipeline.  [default: searched]",
    ),
)


def _split(short: str, long: str, name: str, said: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A size that the search chooses, or that is given."""
    return click.option(short, long, name, type=AutoOr(1, _MOST), default="auto", metavar="auto|N", help=said)


_SPLITS = (
    _split(
        "--tp",
        "--tensor-parallel",
        "shards",
        "Tensor-parallel size: how many devices split each block. The profile must have costs for it.",
    ),
    _split(
        "--cp",
        "--context-parallel",
        "context",
        "Context-parallel size: how many devices (or --tp groups) share each sequence. The profile must "
        "have costs for it.",
    ),
    click.option(
        "--cp-exchange",
        "context_exchange",
        type=OneOf(["auto", "gathered", "ring"]),
        default="auto",
        help="How these have keys and values of all: gathered before attention, or around a ring beside it.",
    ),
    _split(
        "--ep",
        "--expert-parallel",
        "expert",
        "Expert-parallel size: how many devices of a stage (of --tp x --cp x --dp, which it divides) share "
        "experts. The profile must have costs for it.",
    ),
    _split(
        "--etp",
        "--expert-tensor-parallel",
        "expert_shards",
        "Expert-tensor-parallel size: how many of the --ep devices split each expert, instead of holding whole "
        "ones. The profile must have costs for it.",
    ),
    click.option(
        *("--pp", "--pipeline-parallel", "positions"),
        type=NUMBER,
        help="Pipeline-parallel size: how many devices (or groups of --tp x --cp x --dp) the model is spread over.  "
        "[default: searched]",
    ),
)

RECOMPUTE_OPTION = click.option(
    "--recompute",
    type=Switch(_RECOMPUTE),
    default="auto",
    help="Activation checkpointing: where it is needed, nowhere, in attention cores, or everywhere.",
)


def size_options(command: _Command) -> _Command:
    """Give a command the flags that say how devices are shared out, and what is recomputed."""
    for option in reversed((*_COPIES, *_SPLITS, RECOMPUTE_OPTION)):
        command = option(command)
    return command


def asked_sizes(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a request that the flags of :func:`size_options` say."""
    return {
        **{name: flags[name] for name in ("chunks", "replicas", "positions")},
        **{name: _number(flags[name]) for name in ("shards", "context", "expert", "expert_shards")},
        "context_exchange": None if flags["context_exchange"] == "auto" else flags["context_exchange"],
        "zero_exchange": None if flags["zero_exchange"] == "auto" else flags["zero_exchange"],
        "recompute": asked_recompute(flags),
    }


def asked_recompute(flags: Mapping[str, Any]) -> bool | Literal["selective"] | None:
    """What the flag says of recomputation; None is left open."""
    return _RECOMPUTE[flags["recompute"]]


MEMORY_RESERVE = click.option(
    "--memory-reserve",
    type=BYTES,
    help="Part of that memory to keep free for the CUDA context, communication buffers and the allocator.  "
    "[default: the cluster's; 0 with --memory]",
)

SPARES = click.option(
    "--spares",
    type=NUM_DEVICES,
    metavar="K",
    help="Devices of --cluster to keep spare, whole nodes: plan for the others, and say what that costs and which "
    "failures it covers.",
)

PLACED = click.option("--placement", cls=_PlacementOption, type=PLACEMENT, default="auto", metavar="NAME|FILE")

_OPTIONS = (
    click.argument("profile_path", type=FILE, metavar="PROFILE"),
    click.option("--devices", type=NUM_DEVICES, help="Number of devices.  [default: the placement's]"),
    click.option("--cluster", "cluster_path", type=FILE, metavar="FILE", help="Cluster file: devices, memory, links."),
    SPARES,
    click.option(
        "--memory", type=BYTES, help="Memory of each device, such as 16GB or 16GiB.  [default: the cluster's]"
    ),
    PROFILE_FOR,
    MEMORY_RESERVE,
    *_RECIPE,
    click.option(
        *("--mini-batch", "--global-batch-size", "mini_batch"),
        type=LARGE_NUMBER,
        help="Global batch size: samples per iteration.  [default: 4 micro-batches per device]",
    ),
    click.option("--microbatch-size", type=NUMBER, help="Samples per micro-batch, over all replicas."),
    click.option(
        "--microbatches",
        type=NUMBER,
        help="Micro-batches per iteration.  [default: 4 x devices; searched with --mini-batch]",
    ),
    PLACED,
    *_COPIES,
    *_ZERO,
    *_SPLITS,
    click.option(
        *("--shard-shared", "spread"),
        cls=RenamedOption,
        was=("--spread",),
        type=Switch(_YES_NO),
        default="auto",
        help="Split shared blocks over all devices in the pipeline.",
    ),
    click.option(
        "--slices",
        type=AutoOr(0, 10_000, AUTOPIPE_SLICES),
        metavar="auto|autopipe|M",
        help="Number of leading micro-batches whose warm-up forwards run in two halves; autopipe: as AutoPipe's own "
        "formula has it.  "
        "[default: auto; 0 for a named schedule or --rules]",
    ),
    click.option(
        "--late-inputs",
        type=Switch(_YES_NO),
        default="auto",
        help="Let an action begin before all its inputs are there, and wait inside for those that only later blocks "
        "need; and send what its first blocks make before it ends. auto: where that is shorter.",
    ),
    click.option(
        "--planner",
        type=PLANNER,
        default="auto",
        metavar="auto|NAME",
        help="Who chooses the stages: a published planner alone, by its own algorithm and objective (graphpipe, "
        "autopipe, pipedream, piper, dapple); or auto, which is ours. compare takes all: a row for each.",
    ),
    RECOMPUTE_OPTION,
    click.option(
        "--max-span",
        type=NUMBER,
        metavar="N",
        help="Most micro-batches that a repetend may span; --scheduler auto then searches for a repetend.",
    ),
    click.option("--unroll", type=AutoOr(1, 64), default="auto", metavar="auto|U", help="Micro-batches per repetend."),
    click.option(
        "--split-backward",
        type=Switch(_YES_NO),
        help="Run input and weight gradients separately.  [default: auto; as defined for a named schedule or --rules]",
    ),
    click.option(
        "--split-overhead",
        type=DURATION,
        default="0",
        help="Extra time for each input or weight gradient that is launched separately.",
    ),
    click.option(
        "--launch-overhead",
        type=DURATION,
        help="Host time to launch a block, in each of its actions, on top of the profile's costs.  "
        "[default: what the profile says, else 0]",
    ),
    click.option("--time-limit", type=DURATION, default="30s", help="Stop after this long, with the best plan so far."),
    SEED,
    DETERMINISTIC,
    click.option("--json", "as_json", is_flag=True, help="Print the figures as one JSON object."),
)


def planning_options(command: _Command) -> _Command:
    """Give a command the flags that every search has."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Objects are not looked through for cycles after every 700 new ones: a large profile has a million."""
    often = gc.get_threshold()
    gc.set_threshold(50_000, *often[1:])
    try:
        yield
    finally:
        gc.set_threshold(*often)


@seldom_collected()
def read_request(
    flags: Mapping[str, Any],
    scheduler: str = "auto",
    rules: Rules | None = None,
    *,
    start: Plan | None = None,
    for_: str | None = None,
    keep_together: tuple[str, ...] = (),
    **more: Any,
) -> Request:
    """The request that the flags of :func:`planning_options` make, with the files that they name.

    Raises:
        UsageError: files that cannot be read, or flags that contradict each other.
    """
    cluster = given_file("cluster", flags["cluster_path"])
    profile = asked_profile(flags, cluster)
    same = (
        *("devices", "placement", "mini_batch", "microbatch_size", "zero", "zero_group"),
        *("planner", "seed", "deterministic"),
    )
    said: dict[str, Any] = {}
    if flags["slices"] is not None:
        said["num_parted"] = flags["slices"] if flags["slices"] == AUTOPIPE_SLICES else _number(flags["slices"])
    if flags["split_backward"] is not None:
        said["split_backward"] = _YES_NO[flags["split_backward"]]
    return _api.Request.of(
        profile,
        **{name: flags[name] for name in same},
        **said,
        **asked_sizes(flags),
        cluster=cluster,
        spares=flags["spares"] or 0,
        num_microbatches=flags["microbatches"],
        memory_bytes=flags["memory"],
        reserve_bytes=flags["memory_reserve"],
        scheduler=scheduler,
        rules=rules,
        start=start,
        for_=for_,
        keep_together=keep_together,
        **more,
        unroll=_number(flags["unroll"]),
        max_span=flags["max_span"],
        split_overhead_ns=flags["split_overhead"],
        spread=_YES_NO[flags["spread"]],
        launch_overhead_ns=flags["launch_overhead"],
        late_inputs=_YES_NO[flags["late_inputs"]],
        time_limit=flags["time_limit"] / 1e9,
    )


def comparison_request(flags: Mapping[str, Any]) -> tuple[Request, Rules | None]:
    """The request of a comparison, and the rules of one's own in it: an order of theirs has a number of micro-batches.

    Raises:
        UsageError: as :func:`read_request`.
    """
    rules = given_rules(flags["rules_path"])
    if rules is not None and rules.order and flags["microbatches"] is None and flags["mini_batch"] is None:
        flags = {**flags, "microbatches": _api.num_microbatches_of(rules.order)}
    return read_request(flags), rules


def given_rules(given: Any) -> Rules | None:
    """Rules that are named, by their file or module too, or that Python has already. Raises UsageError."""
    return _api.named_rules(given) if isinstance(given, str) else given


def given_kernels(given: Any) -> KernelsAsked | None:
    """Backends by name, all of them (``auto``), or those of a cover that is named or there. Raises UsageError."""
    if given is None or given == "auto":
        return None if given is None else _api.KernelsAsked()
    if isinstance(given, _api.Cover):
        return _api.KernelsAsked(given.where, cover=given)
    if not isinstance(given, str):
        raise UsageError(
            f"kernels is auto, names of backends, or a Cover or its path, not of type {type(given).__name__}"
        )
    if given == "-" or given.endswith(".json") or os.path.exists(given):
        return _api.KernelsAsked(given, cover=_api.read_cover(given))
    return _api.KernelsAsked(given, names=tuple(name.strip() for name in given.split(",") if name.strip()))


def given_file(kind: Literal["profile", "cluster", "plan"], given: Any) -> Any:
    """A file that is named by its path, or that Python has already; None where there is none. Raises UsageError.

    Of a profile with rows of kernel backends those of eager torch, of which plans are made.
    """
    if isinstance(given, str):
        given = getattr(_api, f"read_{kind}")(given)
    if given is None or isinstance(given, getattr(_api, kind.capitalize())):
        return given.of_eager if kind == "profile" and given is not None else given
    raise UsageError(f"{kind} is a {kind.capitalize()} or the path of its file, not of type {type(given).__name__}")


def _number(given: str | int) -> int | None:
    """What :class:`AutoOr` means: None is left open."""
    return None if given == "auto" else int(given)


# What is said while work goes on, and where results go --------------------------------------------------------------


def make_folder(path: str, option: str) -> Path:
    """Make the folder that an option names, before the work for what it is to have. Raises FileError: it cannot be."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"{path}: cannot be made: {error.strerror or error}; choose a folder with {option}") from error
    return Path(path)


def require_folder(path: str, pattern: str, option: str) -> None:
    """Make the folder that an option names before minutes of work, for files named by a pattern.

    Raises:
        FileError: it cannot be made or written, or has files of this pattern, which could be mistaken for new ones.
    """
    folder = make_folder(path, option)
    _api.require_writable(f"{path}/{pattern}", option)
    there = sorted(each.name for each in folder.glob(pattern))
    if there:
        names = f"{there[0]} of another run" if len(there) == 1 else f"{len(there)} files of another run, as {there[0]}"
        raise FileError(f"{path}: has {names}; remove what is there, or choose another folder with {option}")


def interrupt_on_sigterm() -> None:
    """Let SIGTERM act like Ctrl-C: a search ends with the best plan so far, a run with its processes."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@contextmanager
def limited(seconds: float, what: Planning) -> Iterator[Limit]:
    """The time limit of the command, from when its process began; it is also over at Ctrl-C, SIGTERM and SIGHUP.

    A little of it is kept for writing and printing, which follow.
    What hears them ends with the best so far. Until all is imported for ``what`` is to be done there is nothing to hear
    them, and nothing to lose: they end the command. A hangup that is ignored, as under nohup, stays so.
    """
    interrupt_on_sigterm()
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, signal.default_int_handler)
    with seldom_collected():
        gc.freeze()  # what was read stays: looking through it again and again took a fifth of the time
        try:
            _api.load(what)
            gc.freeze()  # and so does what was imported
            began = click.get_current_context().find_root().obj
            limit = _api.Limit(seconds, started=math.nan if began is None else began)
            limit.reserved = min(_ENDING_SHARE * seconds, _ENDING)
            with warnings_shown(), limit.hearing_interrupts():
                yield limit
        finally:
            gc.unfreeze()


_ENDING, _ENDING_SHARE = 0.75, 0.02
"""Seconds of a limit that are kept for writing and printing, and their part of it at most.

A plan for 4,096 devices takes 0.3 s of work from when it is known until the process is over.
"""


class Status:
    """A line on stderr with the clock, the best value, the bound and the gap, and what is being done.

    Where stderr is no terminal such a line is printed after 5 seconds, and then whenever twice as many have passed, or
    5 more with a best value that is 1 % better; that there is no plan yet is said at once.
    """

    def __init__(self) -> None:
        self._next = _PAUSE
        self._last, self._said_ns = 0.0, 0

    def __enter__(self) -> Progress:
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        from pipeplan.reporting.layout import console_for

        console, text = console_for(sys.stderr), TextColumn("{task.description}", markup=False)
        self._line = Progress(SpinnerColumn(), TimeElapsedColumn(), text, console=console, transient=True)
        if not console.is_terminal:
            return self._say
        self._task = self._line.add_task("starting", total=None)
        with suppress(OSError):  # the terminal may have gone
            self._line.start()
        return self._update

    def _say(self, what: str, best_ns: int, bound_ns: int, seconds: float) -> None:
        if not best_ns and not bound_ns:
            say(f"pipeplan: {what}", err=True)
        elif seconds >= self._next or (best_ns < _BETTER * self._said_ns and seconds >= self._last + _PAUSE):
            say(f"pipeplan: after {seconds:.0f}s: {_state(what, best_ns, bound_ns)}", err=True)
            self._next, self._last, self._said_ns = 2 * seconds, seconds, best_ns

    def _update(self, what: str, best_ns: int, bound_ns: int, seconds: float) -> None:
        self._line.update(self._task, description=_state(what, best_ns, bound_ns))

    def __exit__(self, *_: object) -> None:
        if self._line.live.is_started:
            with suppress(OSError):
                self._line.stop()


_PAUSE = 5.0
"""Seconds between lines in a log, at least."""

_BETTER = 0.99
"""The best over the one last said, from which another line is worth while."""

_LOOSEST = 100
"""The best over a bound beyond which that says nothing yet."""


def _state(what: str, best_ns: int, bound_ns: int) -> str:
    """The best iteration, the bound and the gap as far as they are known, and what is being done."""
    from pipeplan.units import format_ns

    best = [f"best {format_ns(best_ns)}"] if best_ns else []
    known = best_ns <= _LOOSEST * bound_ns
    bound = [f"bound {format_ns(bound_ns)}, gap {best_ns / bound_ns - 1:.1%}"] if best_ns and known else []
    return "; ".join([", ".join([*best, *bound]), what] if best else [what])


@contextmanager
def warnings_shown() -> Iterator[None]:
    """Pipeplan's own warnings in the form of its other messages, on stderr when all is measured, or has failed."""
    caught: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as caught:
            yield
    finally:
        for text in dict.fromkeys(str(warning.message) for warning in caught if warning.category is UserWarning):
            say(f"pipeplan: warning: {text}", err=True)


class Shown:
    """A progress bar on stderr, only on a terminal; ``what`` is being run."""

    def __init__(self, doing: str) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        from pipeplan.reporting.layout import console_for

        self.what = "nothing yet"
        console = console_for(sys.stderr)
        columns = (
            BarColumn(),
            TextColumn("{task.percentage:3.0f}%"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[what]}", markup=False),
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
