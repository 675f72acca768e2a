"""What is asked of a search: the flags of ``pipeplan search``, with their files read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeplan.errors import UsageError
from pipeplan.model import Cluster, Placement, Profile, read_placement
from pipeplan.partition import STRATEGIES
from pipeplan.planner.batch import Batch
from pipeplan.planner.by_rules import SUBMODULES, follows_rules, strategy_of
from pipeplan.schedule.rules import Rules
from pipeplan.schedule.search import Progress

__all__ = ["Options", "Request", "choose_placement"]


@dataclass(frozen=True, slots=True)
class Options:
    """How to search. None means: whatever is better.

    ``rules`` are those of the scheduler ``rules``; None are all built-in ones. ``split_overhead_ns`` is what each input
    and each weight gradient takes longer, being launched apart. ``replicas`` is how many copies of the whole pipeline
    share every micro-batch, ``spread`` whether shared blocks stand on all devices, ``num_parted`` how many leading
    micro-batches run their warmup forwards in two parts.
    """

    scheduler: str = "auto"
    rules: Rules | None = None
    unroll: int | None = None
    split_backward: bool | None = None
    split_overhead_ns: int = 0
    recompute: bool | None = None
    replicas: int | None = None
    spread: bool | None = None
    num_parted: int | None = None
    time_limit: float = 30.0
    seed: int = 0
    deterministic: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """A profile, what it may run on, and what is left open.

    ``placement`` is one that exists, a strategy, or ``auto``. ``sizes`` are the micro-batch sizes to choose from, for
    the mini-batch of ``batch``.

    Raises:
        UsageError: ``chunks`` for a placement that exists, or for submodules that rules place.
    """

    profile: Profile
    placement: Placement | str
    num_devices: int
    chunks: int | None
    batch: Batch
    sizes: tuple[int, ...]
    options: Options
    cluster: Cluster | None
    memory_bytes: int | None
    progress: Progress | None

    def __post_init__(self) -> None:
        if self.chunks is not None and (isinstance(self.placement, Placement) or self.placement == SUBMODULES):
            own = "the rules, which place submodules," if self.placement == SUBMODULES else "the placement"
            raise UsageError(
                f"--chunks {self.chunks} would do nothing: {own} of profile {self.profile.name!r} say how many stages "
                "each device has; leave --chunks out, or choose a --placement strategy such as circular"
            )

    @property
    def memory(self) -> list[int | None]:
        """[device] memory: the flag's, else the cluster's, else no limit."""
        if self.memory_bytes is not None or self.cluster is None:
            return [self.memory_bytes] * self.num_devices
        known = self.cluster.memory_bytes[: self.num_devices]
        return [*known, *[None] * (self.num_devices - len(known))]

    @property
    def least_memory(self) -> int | None:
        """What every device has; None without a limit."""
        return min((limit for limit in self.memory if limit is not None), default=None)

    @property
    def recomputes(self) -> Sequence[bool]:
        """Recomputation choices for all stages alike; it never helps where memory has no limit."""
        if self.options.recompute is not None:
            return (self.options.recompute,)
        return (False,) if self.least_memory is None else (False, True)


def choose_placement(
    profile: Profile, wanted: str, num_devices: int | None, rules: Rules | None = None
) -> tuple[Placement | str, int]:
    """What ``--placement`` and ``--devices`` mean: a placement that exists, or a strategy; and how many devices.

    ``wanted`` is ``auto`` (the profile's own placement, else the strategy of the rules, or :data:`SUBMODULES` where
    they have one for each, else all strategies), a strategy, or a placement file.

    Raises:
        UsageError: ``num_devices`` contradicts the placement, is missing, or the strategy is not known; the rules are
            for another placement than the profile's own.
    """
    given: Placement | None = None
    ruled = strategy_of(rules)
    if wanted == "auto":
        given = profile.placement
        if given is None:
            return ruled or wanted, _count(profile, num_devices)
        if rules is not None and not follows_rules(profile, given, rules):
            raise _other_placement(rules, given)
    elif wanted not in STRATEGIES:
        if not Path(wanted).exists():
            raise UsageError(f"--placement {wanted!r} is neither a file nor one of auto, {', '.join(STRATEGIES)}")
        given = read_placement(wanted)
        try:
            profile.check_placement(given)
        except ValueError as error:
            raise UsageError(f"{wanted} does not place profile {profile.name!r}: {error}") from None
    if given is not None:
        if num_devices not in (None, given.num_devices):
            where = "the profile's placement" if wanted == "auto" else wanted
            raise UsageError(
                f"--devices {num_devices} contradicts {where}, which stands on {given.num_devices}; leave --devices "
                "out, or choose a --placement strategy"
            )
        return given, given.num_devices
    return wanted, _count(profile, num_devices)


def _other_placement(rules: Rules, own: Placement) -> UsageError:
    """Rules that are for another placement than the profile's own."""
    strategy = strategy_of(rules)
    chunks = f" with {rules.chunks} stages per device" if rules.chunks else ""
    what = "each submodule on devices of its own" if strategy == SUBMODULES else f"{strategy}{chunks}"
    anew = "take the placement out of the profile" if strategy == SUBMODULES else f"give --placement {strategy}"
    return UsageError(
        f"rules {rules.name!r} are for stages that stand {what}, which those of the profile's own placement "
        f"{own.strategy!r} do not; {anew} to place the model anew, or --placement FILE for stages that do"
    )


def _count(profile: Profile, num_devices: int | None) -> int:
    """The devices that are asked for, or those of the profile's own placement."""
    count = num_devices or (None if profile.placement is None else profile.placement.num_devices)
    if count is None:
        raise UsageError(f"profile {profile.name!r} has no placement; say how many --devices, or give a --cluster")
    return count
