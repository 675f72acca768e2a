"""The request of a search: its defaults, how its mini-batch is cut, and where rules place its model."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import chain
from typing import Any, Literal, NamedTuple

from pipeplan.catalog import ExportTarget
from pipeplan.costs import can_split
from pipeplan.costs.blocks import splitting_remedy
from pipeplan.costs.context import with_exchanges
from pipeplan.costs.devices import other_device
from pipeplan.costs.inspection import cautions, mean_spread
from pipeplan.costs.joining import JoinedProfile, require_kept, with_groups
from pipeplan.costs.kinds import levelled, same_bytes
from pipeplan.costs.launches import with_launches
from pipeplan.costs.recipes import computing_dtype, require_recipe_of_mode, states_of
from pipeplan.costs.stages import require_apart, require_totals, shared_in
from pipeplan.costs.uniform.shares import faster_than_reached
from pipeplan.costs.wide_groups import with_best_places
from pipeplan.costs.zero import AUTO, GATHERED, WHOLE, Zero
from pipeplan.errors import PipeplanError, UsageError, choose_from
from pipeplan.files import Cluster, PlacedStage, Placement, Plan, Profile, read_placement
from pipeplan.partition.placement import Submodule, follows, not_chunked
from pipeplan.partition.recomputation import levels_of
from pipeplan.partition.strategies import STRATEGIES
from pipeplan.planning.decoding import OPEN, ServingAsked, decoding_of
from pipeplan.planning.kernel_stages import KernelsAsked
from pipeplan.planning.restrictions import (
    Restrictions,
    groups_of,
    joined_for,
    require_ranks,
    restricted_fields,
    target_named,
)
from pipeplan.schedule.classic import CLASSIC
from pipeplan.schedule.rules import Rules, SubmoduleRules
from pipeplan.schedule.rules.given_order import devices_of_stages, num_microbatches_of
from pipeplan.schedule.rules.language import named_rules, shipped_rules
from pipeplan.schedule.rules.values import evaluate
from pipeplan.schedule.search import require_scheduler
from pipeplan.search_constants import NOISY, PER_DEVICE
from pipeplan.texts import counted
from pipeplan.units import MAX_BYTES, format_bytes, format_ns
from pipeplan.workload.elements import MAX_DEVICES, Again, ContextExchange
from pipeplan.workload.kinds import MASTER, OPTIMIZER


@dataclass(frozen=True, slots=True)
class Batch:
    """How the mini-batch is cut: ``num_microbatches`` micro-batches of ``microbatch_size`` samples."""

    num_microbatches: int
    microbatch_size: int

    @property
    def mini_batch(self) -> int:
        """Samples in one iteration."""
        return self.num_microbatches * self.microbatch_size


def resolve_batch(
    profile: Profile,
    num_devices: int,
    *,
    mini_batch: int | None = None,
    microbatch_size: int | None = None,
    num_microbatches: int | None = None,
    placement: Placement | str = "auto",
) -> Batch:
    """The mini-batch from any two of its numbers, the rest by default.

    Default size: 1 for a profile with a placement, else the largest size all blocks were profiled with, of those that
    divide a given mini-batch where any does; where all stages of a given placement say one size, that. Default number:
    four micro-batches per device.

    Raises:
        UsageError: the three contradict each other or do not divide.
    """
    if mini_batch is not None and microbatch_size is not None and num_microbatches is not None:
        if mini_batch != microbatch_size * num_microbatches:
            raise UsageError(
                f"--mini-batch {mini_batch} is not --microbatches {num_microbatches} x --microbatch-size "
                f"{microbatch_size} = {microbatch_size * num_microbatches}; leave one of them out"
            )
        return Batch(num_microbatches, microbatch_size)
    stated = {stage.microbatch_size for stage in placement.stages} if isinstance(placement, Placement) else set()
    if microbatch_size is None and num_microbatches is None and len(stated) == 1:
        microbatch_size = stated.pop()
    if microbatch_size is None and mini_batch is not None and num_microbatches is not None:
        return Batch(num_microbatches, _divided(mini_batch, num_microbatches, "--microbatches"))
    if microbatch_size is None:
        sizes = profile.microbatch_sizes
        if profile.placement is None and not sizes:
            raise UsageError("the blocks share no profiled micro-batch size; give one with --microbatch-size")
        dividing = [size for size in sizes if mini_batch is not None and mini_batch % size == 0]
        microbatch_size = 1 if profile.placement is not None else (dividing or sizes)[-1]
    if num_microbatches is None:
        if mini_batch is None:
            num_microbatches = PER_DEVICE * num_devices
        else:
            num_microbatches = _divided(mini_batch, microbatch_size, "--microbatch-size")
    return Batch(num_microbatches, microbatch_size)


def sizes_between(profile: Profile, mini_batch: int) -> tuple[int, ...]:
    """The profiled micro-batch sizes, and those between them that divide a mini-batch: costs are interpolated there."""
    sizes = profile.microbatch_sizes
    between = range(sizes[0], sizes[-1]) if sizes else ()
    return tuple(sorted({*sizes, *(size for size in between if mini_batch % size == 0)}))


def _divided(total: int, by: int, flag: str) -> int:
    if total % by:
        nearest = [str(count * by) for count in (total // by, total // by + 1) if count]
        divisor = next(count for count in range(min(by, total), 0, -1) if total % count == 0)
        raise UsageError(
            f"--mini-batch {total} is not a multiple of {flag} {by}; choose {flag} {divisor}, or --mini-batch "
            f"{' or '.join(nearest)}"
        )
    return total // by


@dataclass(frozen=True, slots=True)
class Splitting:
    """How a frontier of one stage splits it over all devices.

    ``device`` is a preset whose times are taken instead of the profile's. ``whole_blocks``, as plans run them, or every
    operator inside; these ``profiled`` with as many samples and shards, as in plans that searches find, or also in
    proportion to the nearest size;
    ``data_parallel_loading``: inputs come split by samples. ``within`` as in
    :func:`pipeplan.sharding.tracking.track`. ``only`` names a planner that looks at less than all
    (:data:`pipeplan.sharding.baselines.ONLY`); meshes have up to ``mesh_dimensions``.
    """

    device: str | None = None
    whole_blocks: bool = True
    profiled: bool = False
    data_parallel_loading: bool = False
    within: float = 0.0
    only: str | None = None
    mesh_dimensions: int = 3


def _refuse_training(profile: Profile, asked: Mapping[str, Any]) -> None:
    """Refuse what is asked of inference and only training has. Raises UsageError."""
    flags = {
        "split_backward": "--split-backward yes",
        "recompute": f"--recompute {'all' if asked.get('recompute') is True else asked.get('recompute')}",
        "zero": f"--zero {asked.get('zero')}",
        "zero_group": f"--zero-group {asked.get('zero_group')}",
        "num_parted": f"--slices {asked.get('num_parted')}",
        "late_inputs": "--late-inputs yes",
    }
    if said := next((flag for name, flag in flags.items() if asked.get(name) not in (None, False, 0, AUTO)), None):
        raise UsageError(
            f"{said} is of training, and {profile.where} is of inference, which runs forwards alone; leave it out"
        )


def _require_server(serving: ServingAsked, target: ExportTarget | None) -> None:
    """Refuse what is asked of servers' cuts for other plans, and of plans of decode steps for servers. UsageError."""
    if serving.flag is not None and (target is None or target.trains):
        raise UsageError(f"{serving.flag} is for servers (--for vllm, sglang or tensorrt-llm); leave it out")
    if serving.flag in ("--kv", "--dcp", "--prefill"):
        raise UsageError(
            f"{serving.flag} is for plans of decode steps, and servers share caches in ways of their own; leave it or "
            "--for out"
        )


_NOT_DECODING = {
    "mini_batch": "--mini-batch",
    "microbatch_size": "--microbatch-size",
    "num_microbatches": "--microbatches",
    "chunks": "--vp",
    "rules": "--rules",
    "start": "--start",
    "keep_together": "--keep-together",
    "context": "--cp",
    "expert": "--ep",
    "spread": "--shard-shared",
    "unroll": "--unroll",
    "max_span": "--max-span",
    "split_overhead_ns": "--split-overhead",
    "launch_overhead_ns": "--launch-overhead",
}


def _refuse_beside_decoding(profile: Profile, serving: ServingAsked, asked: Mapping[str, Any]) -> None:
    """Refuse a profile without decode steps, and what a plan of these leaves no room for. Raises UsageError."""
    flag = serving.flag
    if not profile.is_inference:
        raise UsageError(
            f"{flag}: {profile.where} is of training, and decode steps are of inference; profile the model with "
            "--inference --context 1k,32k"
        )
    decoding_of(profile, serving, limited=False)
    if serving.kv in ("dp", "tp") and (serving.dcp or 1) > 1:
        raise UsageError(
            f"--dcp {serving.dcp} shares caches along the text, which --kv {serving.kv} does not; give --kv cp, cp-q "
            "or auto, or leave --dcp out"
        )
    named = {"placement": "auto", "scheduler": "auto", "planner": "auto"}
    other = next((name for name, default in named.items() if asked.get(name, default) not in (default, ALL)), None)
    said = next((text for name, text in _NOT_DECODING.items() if asked.get(name)), None)
    said = f"--{other}" if other is not None else said
    if said is not None:
        beside = "; --cp is of training, --dcp shares caches" if said == "--cp" else ""
        raise UsageError(f"{flag} asks for a plan of decode steps, which {said} is not for; leave it out{beside}")


@dataclass(frozen=True)  # without slots: what is derived is kept
class Request:
    """What is asked of a search: a profile, what it may run on, and what is left open (None: whatever is better).

    ``placement`` is one that exists, whose forwards in parts are not taken over, a strategy, or ``auto``. ``sizes`` are
    the micro-batch sizes that a replica may have, for the mini-batch of ``batch``; without any, all replicas together
    have its own. ``memory_bytes`` per device goes before the cluster's; without either, memory is unlimited. Of it
    plans leave ``reserve_bytes`` alone: if None, nothing of ``memory_bytes``, else what the cluster says.

    ``unroll`` is how many micro-batches finish per repetend, ``max_span`` how many it reaches over at most; only a
    search for a repetend keeps to that, so ``auto`` is that then.

    ``rules`` are those of the scheduler ``rules``; None are all built-in ones. ``split_overhead_ns`` is what each input
    and each weight gradient takes longer, being launched apart. ``profile`` has ``launch_overhead_ns`` in every action
    of every block beside what is ``stated`` (None: nothing). ``replicas`` is how many copies of the whole pipeline
    share every micro-batch, ``zero`` what replicas divide of what they keep: a level, or :data:`AUTO`. None is what is
    shortest: level 0, and then what may be shorter (:mod:`pipeplan.planning.divided_state`), in a table of uniform
    layouts any, and AUTO where nothing fits. Of AUTO ``auto_level`` is one of its ``levels``. Where links are unknown
    messages take no time, and those of levels 2 and 3 would seem free: there both are level 1, which sends as much as
    sums of gradients, and the others only with ``any_level``: where nothing fits, or memory is weighed against time.
    ``zero_group`` is how many of them have one copy of that, None all; ``zero_exchange`` that levels 2 and 3 exchange
    inside of actions (None: where that is better, :mod:`pipeplan.planning.exchanging`). ``shards`` is how many devices
    split each block of a chain, ``context`` how many of them, or groups, share each sequence, ``context_exchange`` how
    these have keys and values of all (None: as is quicker, which ``profile`` has settled), ``expert`` how many devices
    of a stage share experts, ``expert_shards`` how many of these split each, ``positions`` how many devices, or groups
    of them, blocks pass in turn, ``spread`` whether shared blocks stand on all devices, ``num_parted`` how many leading
    micro-batches run their warmup forwards in two parts (or ``autopipe``: as many as its formula has). ``planner`` is
    who chooses the stages: a published planner alone (:mod:`pipeplan.planning.planners`), or ``auto``.
    ``late_inputs`` says whether actions may wait inside for messages (:mod:`pipeplan.costs.late_inputs`); None: where
    that is shorter. ``time_limit`` is in seconds: by the clock, or ``deterministic`` by work that takes about as long.

    A frontier is over ``device_counts``, ascending, up to ``num_devices``; with ``splitting`` that of one stage,
    ``uniform`` one of layouts with the same sizes for every stage alone.
    ``samples_assumed``: nobody said how many samples an iteration has. ``said`` are the choices that were made for the
    search, by field, as the flags that make them. ``start`` is a plan to start from, which what is found is never
    longer than, where it fits (:mod:`pipeplan.planning.start`). Where blocks are kept together ``profile`` is of groups
    of blocks, and ``joined`` knows the blocks of each. ``kernels`` says which kernel backends may run blocks (None:
    eager torch alone). ``only`` is what the target of the plan can run, ``free`` the
    same request without it. ``imported`` says whose stages these are where another tool's were read, and nothing is
    searched. ``folds``: many devices that are alike may share programs. ``spares`` of the cluster's devices are left
    out of ``num_devices`` (:mod:`pipeplan.planning.spares`).

    Raises:
        UsageError: ``chunks`` for a placement that exists, or for submodules that rules place; an iteration of numbers
            that are too large to add up; a reserve that leaves nothing of the memory, or is of none.
    """

    profile: Profile
    num_devices: int
    batch: Batch
    placement: Placement | str = "auto"
    chunks: int | None = None
    sizes: tuple[int, ...] = ()
    cluster: Cluster | None = None
    memory_bytes: int | None = None
    reserve_bytes: int | None = None
    scheduler: str = "auto"
    rules: Rules | None = None
    unroll: int | None = None
    max_span: int | None = None
    split_backward: bool | None = None
    split_overhead_ns: int = 0
    launch_overhead_ns: int = 0
    stated: Profile | None = None
    recompute: Again | None = None
    replicas: int | None = None
    zero: int | Literal["auto"] | None = None
    zero_group: int | None = None
    zero_exchange: Literal["inside"] | None = None
    auto_level: int = 1
    any_level: bool = False
    shards: int | None = None
    context: int | None = None
    context_exchange: ContextExchange | None = None
    expert: int | None = None
    expert_shards: int | None = None
    positions: int | None = None
    spread: bool | None = None
    num_parted: int | Literal["autopipe"] | None = None
    planner: str = "auto"
    late_inputs: bool | None = None
    time_limit: float = 30.0
    seed: int = 0
    deterministic: bool = False
    device_counts: tuple[int, ...] = ()
    splitting: Splitting | None = None
    uniform: bool = False
    folds: bool = True
    samples_assumed: bool = False
    spares: int = 0
    said: tuple[tuple[str, str], ...] = ()
    start: Plan | None = None
    joined: JoinedProfile | None = None
    only: Restrictions | None = None
    free: Request | None = None
    imported: str = ""
    priced: Request | None = None
    serving: ServingAsked = OPEN
    kernels: KernelsAsked | None = None

    def __post_init__(self) -> None:
        require_recipe_of_mode(self.profile)
        if self.profile.is_inference:
            self._forwards_alone()
        require_totals(self.profile, self.batch.num_microbatches, self.batch.microbatch_size, self.cluster)
        if self.reserve_bytes:
            self._require_reserve(self.reserve_bytes)
        if self.recompute == "selective" and "selective" not in levels_of(self.profile):
            raise UsageError(
                f"--recompute selective: no block of profile {self.profile.name!r} says what its attention core takes "
                "(selective_ns); profile the model with --estimate, or give --recompute auto, none or all"
            )
        if self.late_inputs and self.num_parted:
            raise UsageError(
                f"--slices {self.num_parted} needs forwards that take and give all of their samples at once, "
                "which --late-inputs yes does not have; leave one of them out"
            )
        if self.max_span is not None:
            self._require_span(self.max_span)
        if isinstance(self.placement, Placement):
            object.__setattr__(self, "placement", _with_expert_shards(self.profile, self.placement.whole))
        if self.chunks is not None and (isinstance(self.placement, Placement) or self.placement == SUBMODULES):
            own = "the rules, which place submodules," if self.placement == SUBMODULES else "the placement"
            raise UsageError(
                f"--chunks {self.chunks} would do nothing: {own} of profile {self.profile.name!r} say how many stages "
                "each device has; leave --chunks out, or choose a --placement strategy such as circular"
            )
        if self.chunks not in (None, 1):
            self._require_stages(self.chunks)

    def _forwards_alone(self) -> None:
        """Settle what inference does not have."""
        nothing = {"split_backward": False, "recompute": False, "zero": 0, "num_parted": 0, "late_inputs": False}
        for field, value in nothing.items():
            object.__setattr__(self, field, value)

    def _require_stages(self, chunks: int) -> None:
        """That a position may have so many stages: that its strategy is for several, and blocks are enough."""
        only = "one-to-one" if self.num_parted and self.placement == "auto" else self.placement
        if isinstance(only, str) and only in STRATEGIES and not STRATEGIES[only].chunked:
            raise not_chunked(only, chunks)
        positions, blocks = self.positions or 1, len(self.profile.blocks)
        if positions * chunks > blocks:
            beside = f"--chunks {chunks}" + (f" x --pp {positions}" if positions > 1 else "")
            raise UsageError(
                f"{beside} are {positions * chunks} stages, and profile {self.profile.name!r} has {blocks} blocks; "
                f"lower --chunks to {max(1, blocks // positions)}"
            )

    def _require_span(self, most: int) -> None:
        """That a repetend is searched, whose actions run whole."""
        if self.scheduler not in ("auto", "repetend"):
            what = "--rules" if self.rules is not None else f"--scheduler {self.scheduler}"
            raise UsageError(f"--max-span {most} is for a search for a repetend, not for {what}; leave one of them out")
        if self.late_inputs or self.num_parted:
            what = "--late-inputs yes" if self.late_inputs else f"--slices {self.num_parted}"
            raise UsageError(f"--max-span {most} needs actions that run whole, and {what} has others; leave it out")
        if self.unroll is not None and self.unroll > most:
            raise UsageError(
                f"--max-span {most} is less than --unroll {self.unroll}, which every repetend reaches over; raise it"
            )
        object.__setattr__(self, "scheduler", "repetend")
        object.__setattr__(self, "num_parted", 0)

    def _require_reserve(self, reserve: int) -> None:
        known = [size for size in self.whole_memory if size is not None]
        if not known:
            raise UsageError(
                f"--memory-reserve {format_bytes(reserve)}: memory is not limited; give --memory, or a --cluster "
                "whose devices have memory_bytes"
            )
        if reserve >= min(known):
            raise UsageError(
                f"--memory-reserve {format_bytes(reserve)} leaves nothing of devices of {format_bytes(min(known))}; "
                "lower it, or raise --memory"
            )

    def require_sharing(self) -> None:
        """Require that some replicas can do what ``zero`` and ``zero_group`` say.

        Raises:
            UsageError: there can be no replicas, or none that ``zero_group`` divides; a level that blocks cannot have.
        """
        zero, group = self.zero, self.zero_group
        if group is not None and zero in (None, 0):
            raise UsageError(
                f"--zero-group {group} is how many replicas share a copy of what --zero divides; give --zero auto, too"
            )
        if zero in (2, 3):
            require_apart(self.profile, zero, {block.id for block in self.profile.blocks})
        given = self.placement.stages if isinstance(self.placement, Placement) else ()
        most = max(self.device_counts, default=self.num_devices)
        able = [stage.copies for stage in given] or [(self.replicas or most) * (self.context or 1)]
        if zero not in (None, 0) and max(able) == 1:
            what = "no stage of the placement has" if given else f"--devices {most} leaves no room for"
            what = "--replicas 1 leaves no" if self.replicas == 1 else what
            remedy = "leave --replicas out" if self.replicas == 1 else "leave --zero out"
            raise UsageError(f"--zero {zero} divides what replicas keep, and {what} replicas; {remedy}")
        if group is not None and all(count % group for count in able) and (given or self.replicas):
            raise UsageError(
                f"--zero-group {group} does not divide the {' or '.join(map(str, sorted(set(able))))} replicas; choose "
                f"one of {', '.join(str(each) for each in range(1, max(able) + 1) if max(able) % each == 0)}"
            )
        if group is not None and group > most:
            raise UsageError(f"--zero-group {group} is more replicas than --devices {most} has room for; lower it")

    @property
    def stated_profile(self) -> Profile:
        """The profile as it is in its file, whose fingerprint plans carry."""
        return self.stated or self.profile

    @property
    def block_profile(self) -> Profile:
        """The profile whose blocks plans name, with the request's launches: that of no groups."""
        return self.profile if self.joined is None else self.joined.whole

    @property
    def levels(self) -> tuple[Request, ...]:
        """The request with each level that replicas may have, where that is open."""
        if self.zero != AUTO:
            return (self,)
        most = GATHERED if (self.knows_links or self.any_level) and not shared_in(self.profile) else 1
        if self.only is not None:
            able = [level for level in self.only.zero if self.auto_level <= level <= most] or [0]
            return tuple(replace(self, auto_level=level) if level else replace(self, zero=0) for level in able)
        return (self, *(replace(self, auto_level=level) for level in range(self.auto_level + 1, most + 1)))

    def with_any_level(self) -> Request:
        """The request that tries all levels, whatever their messages take: nothing fits otherwise."""
        return replace(self, zero=AUTO, any_level=True)

    @property
    def knows_links(self) -> bool:
        """Whether messages take time, on the links of a cluster."""
        return self.cluster is not None and bool(self.cluster.levels or self.cluster.measured)

    @property
    def _usual_level(self) -> int:
        """The level where nobody has said one: without links 1, where that divides something."""
        if self.knows_links or (self.only is not None and 1 not in self.only.zero):
            return 0
        kept = states_of(self.profile).values()
        return int(self.profile.once("divided", lambda: any(state[OPTIMIZER] + state[MASTER] for state in kept)))

    def sharing(self, replicas: int) -> Zero | None:
        """What this many replicas of a stage share out; None if groups do not divide their number."""
        level = self.auto_level if self.zero == AUTO else self._usual_level if self.zero is None else self.zero
        if replicas == 1 or not level:
            return WHOLE
        group = self.zero_group or replicas
        return None if replicas % group else Zero(level, group) if group > 1 else WHOLE

    @classmethod
    def of(
        cls,
        profile: Profile,
        *,
        devices: int | None = None,
        placement: Placement | str = "auto",
        cluster: Cluster | None = None,
        mini_batch: int | None = None,
        microbatch_size: int | None = None,
        num_microbatches: int | None = None,
        chunks: int | None = None,
        scheduler: str = "auto",
        rules: Rules | None = None,
        start: Plan | None = None,
        for_: str | None = None,
        keep_together: Sequence[str] = (),
        **others: Any,
    ) -> Request:
        """The request that a few words make, the rest by default.

        ``placement`` is as in :func:`choose_placement`, the mini-batch as in :func:`resolve_batch`. Without ``devices``
        they are those of the placement, else all of the cluster's. Micro-batches have any of the profile's sizes, or
        one between them that divides the mini-batch, unless their size or number is said. A named ``scheduler`` or
        ``rules`` are as they are defined: without parts of forwards, backward whole unless the definition splits it.
        ``for_`` names a target in the catalog, inside of whose limits the plan is to be; ``keep_together`` are groups
        as :func:`.groups_of` has them. ``others`` are fields as they stand.

        Raises:
            UsageError: what is said contradicts itself or the profile or the target, or is not enough.
        """
        require_scheduler(scheduler)
        if spares := others.get("spares") or 0:
            devices = planned_for(cluster, devices, spares, placed=isinstance(placement, Placement))
        if start is not None:
            devices = start.num_devices if devices is None and cluster is None else devices
            if mini_batch is None and num_microbatches is None:
                mini_batch = start.mini_batch
        free, settled, serving = None, dict[str, Any](), others.pop("serving", OPEN)
        if profile.is_inference:
            _refuse_training(profile, others)
        target = None if for_ is None else target_named(for_)
        if serving.flag is not None and target is None and serving.objective is None:
            own: dict[str, Any] = {
                "mini_batch": mini_batch,
                "microbatch_size": microbatch_size,
                "num_microbatches": num_microbatches,
            }
            own |= {"chunks": chunks, "scheduler": scheduler, "rules": rules, "start": start, "placement": placement}
            _refuse_beside_decoding(profile, serving, {**own, "keep_together": keep_together, **others})
            placement = ALL
        else:
            _require_server(serving, target)
        if for_ is not None and target is not None:
            if rules is not None and (target.schedules is not None or not target.trains):
                raise UsageError(
                    f"for {target.title} (--for): --rules, and {target.title} has orders of its own; leave --rules out"
                )
            if rules is None and scheduler == "rules":
                raise UsageError(
                    f"for {target.title} (--for): --scheduler rules tunes rules, and may place stages as "
                    f"{target.title} does not; give --rules, or leave --scheduler out"
                )
            same: dict[str, Any] = {"devices": devices, "cluster": cluster, "mini_batch": mini_batch}
            same |= {"microbatch_size": microbatch_size, "num_microbatches": num_microbatches, "chunks": chunks}
            asked = {"chunks": chunks, **others}
            settled = restricted_fields(for_, target, placement, asked)
            free = cls.of(profile, placement=ALL, scheduler=scheduler, **same, **others)
            others |= settled
            placement = ALL if placement == "auto" else placement
        if rules is not None and rules.order:
            rules = _placed(rules)
            if devices is None and profile.placement is None:
                devices = len(rules.order)
            if num_microbatches is None and mini_batch is None:
                num_microbatches = num_microbatches_of(rules.order)
        if devices is None and cluster is not None and (profile.placement is None or placement == ALL):
            devices = cluster.num_devices
        layout = [others.get(name) for name in ("shards", "positions", "replicas")] + [others.get("context") or 1]
        if devices is None and cluster is None and placement == "auto" and all(layout):
            devices = math.prod(each or 1 for each in layout)
        chosen, num_devices = choose_placement(profile, placement, devices, rules)
        require_devices(cluster, num_devices)
        if spares and isinstance(chosen, Placement):
            planned_for(cluster, None, spares, placed=True)
        batch = resolve_batch(
            profile,
            num_devices,
            mini_batch=mini_batch,
            microbatch_size=microbatch_size,
            num_microbatches=num_microbatches,
            placement=chosen,
        )
        fixed = microbatch_size is not None or num_microbatches is not None
        if chunks is None and rules is not None and chosen == rules.placement:
            chunks = rules.chunks
        stated, overhead = profile, others.pop("launch_overhead_ns", None)
        exchange = others.get("context_exchange")
        placed = chosen.stages if isinstance(chosen, Placement) else ()
        begun = start.stages if start is not None and exchange is None else ()
        profile = with_exchanges(with_best_places(profile, cluster), exchange, placed or begun)
        overhead = profile.launch_overhead_ns if overhead is None else overhead
        profile = with_launches(profile, overhead)
        together = None
        kernels: KernelsAsked | None = others.get("kernels")
        if kernels is not None:
            kernels.require(profile)
            _require_for_kernels(kernels, serving, for_, scheduler, rules)
        groups = groups_of(profile, keep_together, () if kernels is None else kernels.kept)
        if isinstance(chosen, Placement):
            require_kept(groups, chosen)
        elif groups and chosen == SUBMODULES:
            raise UsageError("--keep-together is not for rules that place submodules by their blocks; leave it out")
        elif target is not None or groups:
            if others.get("late_inputs"):
                raise UsageError("--late-inputs yes waits inside of what is kept together; leave one of them out")
            others["late_inputs"] = False
            most = max(profile.microbatch_sizes, default=0)
            divisors = [size for size in range(1, most + 1) if batch.mini_batch % size == 0]
            together = joined_for(target, profile, groups, divisors)
            profile = together.profile
            start = None if start is None else _grouped(together, start)
        if for_ is not None and target is not None:
            require_ranks(for_, target, profile, num_devices, others)
        require_sizes(profile, chosen, num_devices, others, cluster)
        made = cls(
            profile,
            num_devices,
            batch,
            chosen,
            chunks,
            () if fixed else sizes_between(stated, batch.mini_batch),
            cluster,
            scheduler=scheduler,
            rules=rules,
            launch_overhead_ns=overhead,
            stated=None if profile is stated else stated,
            start=start,
            joined=together,
            serving=serving,
            only=None if for_ is None or target is None else Restrictions.of(for_, target, stated),
            free=free,
            samples_assumed=mini_batch is None and num_microbatches is None,
            said=(
                *_placement_said(placement, chosen, rules),
                *_batch_said(microbatch_size, num_microbatches),
                *_flags_said({"chunks": chunks, **others}),
                *((field, f"--for {for_}") for field, value in settled.items() if value is not None),
            ),
            **(_as_defined(profile, scheduler, rules) | others),
        )
        made.require_sharing()
        return made

    @property
    def decodes(self) -> bool:
        """Whether a plan of decode steps is asked for."""
        return self.only is None and self.serving.flag is not None

    @property
    def tunes(self) -> bool:
        """Whether rules are asked for and not which: these are found by auto-tuning."""
        return self.scheduler == "rules" and self.rules is None

    @property
    def dictates(self) -> bool:
        """Whether the schedule is one that was asked for by its name or in rules, and none is searched."""
        return self.rules is not None or self.scheduler in CLASSIC

    @cached_property
    def whole_memory(self) -> list[int | None]:
        """[device] memory with its reserve: the flag's, else the cluster's, else no limit."""
        if self.memory_bytes is not None or self.cluster is None:
            return [self.memory_bytes] * self.num_devices
        known = self.cluster.memory_bytes[: self.num_devices]
        return [*known, *[None] * (self.num_devices - len(known))]

    @cached_property
    def reserve(self) -> list[int]:
        """[device] what a plan leaves alone: the flag's, else nothing of the flag's memory, else the cluster's."""
        if self.reserve_bytes is not None or self.memory_bytes is not None or self.cluster is None:
            return [self.reserve_bytes or 0] * self.num_devices
        known = self.cluster.reserve_bytes[: self.num_devices]
        return [*known, *[0] * (self.num_devices - len(known))]

    @cached_property
    def memory(self) -> list[int | None]:
        """[device] what a plan may use: its memory without the reserve; None is no limit."""
        both = zip(self.whole_memory, self.reserve, strict=True)
        return [None if size is None else size - reserve for size, reserve in both]

    def within(self, limit: int | None) -> Request:
        """The same where a plan may use so much of every device, beside the largest reserve; None is no limit."""
        reserve = max(self.reserve)
        if limit is None or limit + reserve > MAX_BYTES:
            return replace(self, memory_bytes=limit, reserve_bytes=None)
        return replace(self, memory_bytes=limit + reserve, reserve_bytes=reserve or None)

    @contextmanager
    def reserve_said(self) -> Iterator[None]:
        """Have errors about memory say that their sizes are those beside the reserve, and what --memory has to hold."""
        try:
            yield
        except PipeplanError as error:
            reserve, text = max(self.reserve), str(error.args[0] if error.args else "")
            if reserve and "--memory" in text and "--memory-reserve" not in text:
                beside = f"{text}; sizes do not include the reserve of {format_bytes(reserve)}"
                if self.reserve_bytes:
                    error.args = (f"{beside}: add that to --memory, or lower --memory-reserve",)
                else:
                    error.args = (f"{beside} of the cluster's devices: --memory has none without --memory-reserve",)
            raise

    @cached_property
    def least_memory(self) -> int | None:
        """What a plan may use of every device; None without a limit."""
        return min((limit for limit in self.memory if limit is not None), default=None)

    @cached_property
    def speeds(self) -> list[float]:
        """[device] how much it computes in the time in which one that the profile's times are of computes 1."""
        known = () if self.cluster is None else self.cluster.speeds[: self.num_devices]
        return [*known, *[1.0] * (self.num_devices - len(known))]

    @cached_property
    def uneven(self) -> bool:
        """Whether some devices are faster than others."""
        asked = self.priced or self
        return len(set(zip(asked.speeds, asked.kinds, strict=True))) > 1

    @cached_property
    def kinds(self) -> list[str | None]:
        """[device] its kind, where that has a profile of its own."""
        names = () if self.cluster is None else self.cluster.names[: self.num_devices]
        own = self.profile.of_kinds
        known = [name if name in own else None for name in names]
        return [*known, *[None] * (self.num_devices - len(known))]

    @cached_property
    def levelled(self) -> Request:
        """The same with one profile for all devices, below those of all kinds, and speeds beside it.

        Itself where no kind has a profile of its own. What is cut for it is priced by the profiles of the kinds; no
        bound of it is above a plan of this one (:mod:`pipeplan.costs.kinds`).
        """
        return self._levelled(roomy=False)

    @cached_property
    def roomy(self) -> Request | None:
        """The same of the most that any kind holds, for what is to fit on all; None where they hold the same."""
        return None if same_bytes(self.profile) else self._levelled(roomy=True)

    def _levelled(self, *, roomy: bool) -> Request:
        if not self.profile.of_kinds or self.cluster is None:
            return self
        profile, cluster = levelled(self.profile, self.cluster, self.num_devices, roomy=roomy)
        return replace(self, profile=profile, cluster=cluster, priced=self)

    @property
    def by_kinds(self) -> bool:
        """Whether kinds of devices have profiles of their own, be it that it is a levelled one."""
        return bool(self.profile.of_kinds) or self.priced is not None

    @property
    def unlinked(self) -> Request:
        """The same with links that cost nothing; devices keep their speeds, where they have others than the profile's.

        What takes no less time than that is so wherever devices are that are alike.
        """
        if self.cluster is None or (set(self.speeds) == {1.0} and not self.profile.of_kinds):
            return replace(self, cluster=None)
        return replace(self, cluster=self.cluster.model_copy(update={"levels": (), "measured": ()}))

    @property
    def unit(self) -> int:
        """Devices of a node: those that the innermost links join; all where there is one kind of links."""
        levels = () if self.cluster is None else self.cluster.levels
        return levels[0].group_size if len(levels) > 1 else self.num_devices

    @property
    def by_devices(self) -> list[Request]:
        """The same for each of the ``device_counts``."""
        return [replace(self, num_devices=count) for count in self.device_counts or (self.num_devices,)]

    @property
    def recomputes(self) -> Sequence[Again]:
        """Recomputation choices for all stages alike; it never helps where memory has no limit."""
        if self.recompute is not None:
            return (self.recompute,)
        if self.only is not None and self.only.alike and self.least_memory is not None:
            return levels_of(self.profile)
        return (False,) if self.least_memory is None else (False, True)


def first_layers_open(request: Request) -> bool:
    """Whether it is open how many layers of each stage recompute, the first ones, for a target that has it so."""
    only, known = request.only, request.joined
    return only is not None and known is not None and only.first_layers and len(request.recomputes) > 1


def _placement_said(asked: Placement | str, chosen: Placement | str, rules: Rules | None) -> Iterator[tuple[str, str]]:
    """Who says where stages stand, if anybody does."""
    if isinstance(chosen, Placement):
        yield "placement", "the profile's placement" if asked == "auto" else "--placement, as given"
    elif asked not in ("auto", ALL):
        yield "placement", f"--placement {asked}"
    elif chosen != "auto" and rules is not None:
        yield "placement", f"--rules {rules.name}"


def _batch_said(size: int | None, count: int | None) -> Iterator[tuple[str, str]]:
    """The flag that says how the mini-batch is cut, if one does."""
    if size is not None or count is not None:
        yield "microbatch", f"--microbatches {count}" if size is None else f"--microbatch-size {size}"


def require_devices(cluster: Cluster | None, num_devices: int) -> None:
    """Check that a cluster has as many. Raises UsageError."""
    if cluster is not None and num_devices > cluster.num_devices:
        raise UsageError(
            f"cluster {cluster.name!r} has {cluster.num_devices} devices, not {num_devices}; lower --devices to "
            f"{cluster.num_devices}, or give a larger --cluster"
        )


def planned_for(cluster: Cluster | None, devices: object, spares: int, *, placed: bool = False) -> int:
    """How many of a cluster's devices are left to plan for.

    Raises:
        UsageError: there is no cluster, the number is said twice, or spares are no whole nodes, or all there are.
    """
    if cluster is None:
        raise UsageError("--spares is of a cluster, whose file says what fails together; give --cluster")
    if devices is not None:
        raise UsageError(
            f"--devices and --spares both say how many of the {cluster.num_devices} devices of cluster "
            f"{cluster.name!r} to plan for; leave one of them out"
        )
    if placed:
        raise UsageError("--spares is for stages that a search places, and here the placement is given; leave it out")
    if spares >= cluster.num_devices:
        raise UsageError(
            f"--spares {spares} leaves none of the {cluster.num_devices} devices of cluster {cluster.name!r} to plan "
            "for; give fewer"
        )
    node = cluster.domains[0]
    if spares % node.group_size:
        below = spares // node.group_size * node.group_size
        either = [str(count) for count in (below, below + node.group_size) if 0 < count < cluster.num_devices]
        raise UsageError(
            f"--spares {spares} are no whole nodes: in cluster {cluster.name!r} {node.group_size} devices fail "
            f"together ({node.name}), and only as many take over; give {' or '.join(either)}"
        )
    return cluster.num_devices - spares


def _flags_said(fields: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The flags of choices that some fields make."""
    for name, flag in _CHOICE_FLAGS.items():
        if (value := fields.get(name)) is not None:
            words = {True: "yes", False: "no"} if name != "recompute" else {True: "all", False: "none"}
            yield name, f"{flag} {words[value] if isinstance(value, bool) else value}"


class AskedSizes(NamedTuple):
    """How many devices split each block, share each sequence, follow each other, are copies; None if open."""

    shards: int | None = None
    context: int | None = None
    positions: int | None = None
    replicas: int | None = None

    def beside(self, *names: str) -> tuple[int, str]:
        """How many devices some of them make together, and their flags."""
        said = [(_SIZE_FLAGS[name], count) for name in names if (count := getattr(self, name)) is not None]
        return math.prod(count for _, count in said), "".join(f" x {flag} {count}" for flag, count in said if count > 1)


_SIZE_FLAGS = {"shards": "--tp", "context": "--cp", "positions": "--pp", "replicas": "--dp"}

_CHOICE_FLAGS = {
    **_SIZE_FLAGS,
    "context_exchange": "--cp-exchange",
    "expert": "--ep",
    "expert_shards": "--etp",
    "chunks": "--chunks",
    "zero": "--zero",
    "zero_group": "--zero-group",
    "zero_exchange": "--zero-exchange",
    "spread": "--shard-shared",
    "unroll": "--unroll",
    "max_span": "--max-span",
    "recompute": "--recompute",
    "split_backward": "--split-backward",
    "num_parted": "--slices",
    "late_inputs": "--late-inputs",
}
"""Flags that choose something for a plan, by the field that they are."""


def require_sizes(
    profile: Profile,
    placement: Placement | str,
    num_devices: int,
    said: Mapping[str, Any],
    cluster: Cluster | None = None,
) -> None:
    """Check that devices can be shared out as ``said``, by the names of a request's fields. Raises UsageError."""
    asked = AskedSizes(*(said.get(name) for name in AskedSizes._fields))
    there = num_devices, cluster
    if asked.context is not None:
        _require_context(profile, placement, there, asked, said.get("spread"))
    if asked.shards is not None:
        _require_shards(profile, placement, there, asked, said.get("spread"))
    if asked.positions is not None:
        _require_positions(profile, placement, there, asked)
    if (expert := said.get("expert")) is not None:
        _require_experts(profile, placement, num_devices, asked, expert, said)
    if (expert_shards := said.get("expert_shards")) is not None:
        _require_expert_shards(profile, placement, expert, expert_shards)


_There = tuple[int, Cluster | None]
"""How many devices are planned for, and the cluster they are in."""


def _more(used: int, there: _There) -> str:
    """What to give for the next multiple of ``used`` devices: a flag, or a cluster that has them."""
    num_devices, cluster = there
    more = -(-num_devices // used) * used
    return f"--devices {more}" if cluster is None or more <= cluster.num_devices else f"a cluster of {more} devices"


def _require_context(
    profile: Profile, placement: Placement | str, there: _There, asked: AskedSizes, spread: bool | None
) -> None:
    """Check that every block has costs for parts of sequences. Raises UsageError with the numbers it has costs for."""
    context, flag, num_devices = asked.context or 1, f"--cp {asked.context}", there[0]
    if context == 1:
        return
    _require_strategy(profile, placement, flag, "how many devices share each sequence")
    if spread:
        raise UsageError(f"{flag} and --shard-shared yes do not go together; leave one of them out")
    known = {block.id: {row.context for row in block.costs} for block in profile.blocks}
    common = sorted(set.intersection(*known.values()))
    without = next((name for name, own in known.items() if context not in own), None)
    if without is not None:
        raise UsageError(
            f"{flag}: block {without!r} of profile {profile.name!r} has costs for context "
            f"{_listed(sorted(known[without]))}, not for {context}; choose --cp {_listed(common)}, or profile with "
            f"--estimate --context {context}"
        )
    others, also = asked.beside("replicas")
    used = context * others
    if num_devices % used:
        fitting = [count for count in common if num_devices % (count * others) == 0]
        more = _more(used, there)
        other = f"choose --cp {_listed(fitting)}, or {more}" if fitting else f"choose {more}"
        raise UsageError(f"{flag}{also} does not divide {num_devices} devices; {other}")


def _require_shards(
    profile: Profile, placement: Placement | str, there: _There, asked: AskedSizes, spread: bool | None
) -> None:
    """Check that every block can be split over this many devices. Raises UsageError with the numbers that work."""
    shards, context, num_devices = asked.shards or 1, asked.context or 1, there[0]
    if shards == 1:
        return
    flag = f"--tp {shards}"
    _require_strategy(profile, placement, flag, "how many devices split each stage")
    if spread:
        raise UsageError(
            f"{flag} has each stage's devices split its blocks, --shard-shared yes all devices the shared ones; "
            "leave one of them out"
        )
    known = {block.id: {row.shards for row in block.rows(context)} for block in profile.blocks}
    common = sorted(set.intersection(*known.values()))
    without = next((name for name, own in known.items() if shards not in own), None)
    if without is not None:
        raise UsageError(
            f"{flag}: block {without!r} of profile {profile.name!r} has costs for "
            f"{_listed(sorted(known[without]))} shards, not for {shards}; " + _other_shards(profile, common, shards)
        )
    others, also = asked.beside("replicas", "context")
    used = shards * others
    if num_devices % used:
        fitting = [count for count in common if num_devices % (count * others) == 0]
        also = also.replace("--dp", "--replicas")
        more = _more(used, there)
        other = f"choose --tp {_listed(fitting)}, or {more}" if fitting else f"choose {more}"
        raise UsageError(f"{flag}{also} does not divide {num_devices} devices; {other}")


def _require_experts(
    profile: Profile,
    placement: Placement | str,
    num_devices: int,
    asked: AskedSizes,
    expert: int,
    others: Mapping[str, Any],
) -> None:
    """Check that this many devices can share experts. Raises UsageError, which lists the numbers that work."""
    flag = f"--ep {expert}"
    if expert == 1:
        return
    _require_strategy(profile, placement, flag, "how many devices share experts")
    if others.get("spread"):
        raise UsageError(f"{flag} and --shard-shared yes do not go together; leave one of them out")
    known = {block.id: {row.expert for row in block.costs} for block in profile.blocks if block.expert_parameters}
    if not known:
        raise UsageError(f"{flag} would do nothing: no block of profile {profile.name!r} has experts; leave it out")
    common = sorted(set.intersection(*known.values()))
    without = next((name for name, own in known.items() if expert not in own), None)
    if without is not None:
        raise UsageError(
            f"{flag}: block {without!r} of profile {profile.name!r} has costs where {_listed(sorted(known[without]))} "
            f"devices share experts, not for {expert}; choose --ep {_listed(common)}, or profile with --estimate "
            f"--expert {expert}"
        )
    given, also = asked.beside("shards", "context", "replicas")
    every = None not in (asked.shards, asked.context, asked.replicas)
    most = given if every else num_devices // (asked.positions or 1)
    if most % expert if every else most < expert:
        fitting = [count for count in common if (most % count == 0 if every else count <= most)]
        where = f"{also.removeprefix(' x ') or '1 device'} at each position" if every else f"{most} devices"
        says = f"does not divide {where}" if every else f"is more than the {where} that a stage can have"
        raise UsageError(f"{flag} {says}; choose --ep {_listed(fitting or [1])}")


def _require_expert_shards(
    profile: Profile, placement: Placement | str, expert: int | None, expert_shards: int
) -> None:
    """Check that experts can be split over this many devices. Raises UsageError, which lists the numbers that work."""
    flag = f"--etp {expert_shards}"
    if expert_shards == 1 and (expert in (None, 1) or not profile.has_experts):
        return
    _require_strategy(profile, placement, flag, "how many devices split each expert")
    if not profile.has_experts:
        raise UsageError(f"{flag} would do nothing: no block of profile {profile.name!r} has experts; leave it out")
    if placement != "auto" and expert is None:
        raise UsageError(f"{flag} is of devices that share experts; give --ep, a multiple of it, or --placement auto")
    known = profile.expert_shards if expert is None else {expert: profile.expert_shards.get(expert, (1,))}
    if any(expert_shards in own for own in known.values()):
        return
    able = sorted(set(chain.from_iterable(known.values())))
    sizes = sorted(profile.expert_shards) if expert is None else [expert]
    fitting = [each for each in sizes if each > 1 and each % expert_shards == 0]
    splits = ",".join(map(str, sorted({*able, expert_shards})))
    profiled = f", or profile with --estimate --expert {','.join(map(str, fitting))} --etp {splits}" if fitting else ""
    those = "" if expert is None else f" where {expert} devices share experts"
    raise UsageError(
        f"{flag}: profile {profile.name!r} has costs{those} with {_listed(able)} of them splitting each, not "
        f"{expert_shards}; choose --etp {_listed(able)}{profiled}"
    )


def _with_expert_shards(profile: Profile, placement: Placement) -> Placement:
    """The placement, each of whose stages that have shared experts says how many devices split each."""
    if all(stage.expert == 1 for stage in placement.stages):
        return placement
    stages = tuple(
        stage
        if stage.expert == 1
        else stage.model_copy(update={"expert_shards": profile.expert_shards_on(stage.expert, stage.expert_shards)})
        for stage in placement.stages
    )
    return placement.model_copy(update={"stages": stages})


def _require_for_kernels(
    kernels: KernelsAsked, serving: ServingAsked, for_: str | None, scheduler: str, rules: Rules | None
) -> None:
    """Refuse what does not weigh backends. Raises UsageError."""
    beside = {
        "--for": for_ is not None,
        serving.flag: serving.flag is not None,
        "--scheduler rules": scheduler == "rules" and rules is None,
    }
    if odd := next((flag for flag, there in beside.items() if there), None):
        raise UsageError(f"--kernels {kernels.said} is not for {odd}; leave one of them out")


def _require_strategy(profile: Profile, placement: Placement | str, flag: str, what: str) -> None:
    """That a strategy places the blocks. Raises UsageError where a placement or rules say ``what`` the flag is for."""
    if isinstance(placement, Placement) or placement == SUBMODULES:
        own = "the rules, which place submodules," if placement == SUBMODULES else "the placement"
        raise UsageError(
            f"{flag} would do nothing: {own} of profile {profile.name!r} say {what}; leave {flag.split()[0]} out, or "
            "choose --placement all or a strategy"
        )


def _require_positions(profile: Profile, placement: Placement | str, there: _There, asked: AskedSizes) -> None:
    """Check that a pipeline can be that long. Raises UsageError with the lengths that it can have."""
    positions, flag, num_devices = asked.positions or 1, f"--pp {asked.positions}", there[0]
    _require_strategy(profile, placement, flag, "which devices run each stage")
    others, _ = asked.beside("shards", "context", "replicas")
    said = [(flag, getattr(asked, name)) for name, flag in _SIZE_FLAGS.items() if name != "positions"]
    beside = "".join(f" x {each} {count}" for each, count in said if count)
    used, blocks = positions * others, len(profile.blocks)
    whole = asked.context is not None or all(row.context == 1 for block in profile.blocks for row in block.costs)
    every = whole and asked.shards is not None and asked.replicas is not None
    able = [each for each in range(1, num_devices + 1) if num_devices % (each * others) == 0 and each <= blocks]
    able = [each for each in able if not every or each * others == num_devices]
    choose = [f"choose --pp {_listed(able)}"] if able else []
    if positions > blocks:
        choose = choose or [f"choose --pp of at most {blocks}"]
        raise UsageError(f"{flag} needs a block for each: {profile.name!r} has only {blocks}; {choose[0]}")
    if num_devices % used or (every and used != num_devices):
        more = _more(used, (used, there[1]) if every else there)
        says = f"is {used} devices, not {num_devices}" if every else f"does not divide {num_devices} devices"
        raise UsageError(f"{flag}{beside} {says}; " + ", or ".join([*choose, f"give {more}"]))


def _other_shards(profile: Profile, common: Sequence[int], shards: int) -> str:
    """What to do if blocks have no costs for that number of shards."""
    remedy = splitting_remedy(profile, [shards])
    if remedy is None:
        heads = math.gcd(*(block.dimensions["heads"] for block in profile.blocks if "heads" in block.dimensions))
        able = _listed([count for count in range(1, heads + 1) if heads % count == 0])
        remedy = (
            f"profile with --shards of {able} (as far as they divide its key-value heads as well): blocks have {heads} "
            f"heads, which do not divide among {shards} devices"
        )
    return f"choose --tp {_listed(common)}, or {remedy}" if common else remedy


def _listed(counts: Sequence[int]) -> str:
    return ", ".join(map(str, counts))


def input_notes(request: Request) -> Iterator[str]:
    """What a reader must know of the costs: samples that nobody named, links that are free or carry nothing, times of
    another device than the cluster's, or of another number format than the recipe's, and warnings of the profile."""
    yield from _request_notes(request)
    profile = request.profile
    found = cautions(profile) if profile.source.method == "measured" else ()
    if found:
        shown = shlex.join(["pipeplan", "profile", "--show", profile.where])
        where = shown if os.path.isfile(profile.where) else "pipeplan.inspect(profile)"
        spread = mean_spread(profile)
        noisy = f", and times that vary by {spread:.0%} on average, and so do predictions" if spread > NOISY else ""
        yield f"the profile has {counted(len(found), 'warning')}{noisy}: {where}"


def _one_of_each(request: Request) -> str | None:
    """What a strategy that is named leaves out, where nothing is said of it and the costs make it a question."""
    named = isinstance(request.placement, str) and request.placement not in ("auto", "all")
    if not named or request.positions is not None or request.spread:
        return None
    splits = any(row.shards > 1 for block in request.profile.kinds for row in block.costs)
    lacks = ["one copy of the pipeline (--dp)"] if request.replicas is None and request.cluster is not None else []
    lacks += ["no block split over devices (--tp)"] if request.shards is None and splits else []
    if not lacks:
        return None
    return f"--placement {request.placement} looks at {' and '.join(lacks)}, unless you say otherwise"


def _request_notes(request: Request) -> Iterator[str]:
    if request.samples_assumed and not request.decodes:
        samples = request.batch.mini_batch
        yield f"{samples} samples assumed ({samples // request.num_devices} per device); --mini-batch changes that"
    profile = request.profile
    if request.launch_overhead_ns and profile.source.method == "measured":
        yield (
            "the times of the profile are measured, and launches are in them: a launch overhead counts them again "
            "(it is for estimated times)"
        )
    computes = computing_dtype(profile.recipe)
    if computes is not None and profile.source.dtype not in ("", computes):
        yield (
            f"times and activations are those of {profile.source.dtype}, as profiled: the recipe {profile.recipe} "
            f"computes in {computes}, and changes only what is kept of parameters"
        )
    cluster, edges = request.cluster, profile.edges
    if cluster is not None:
        preset = None if request.splitting is None else request.splitting.device
        other = other_device(preset or profile.source.device, cluster, request.num_devices, profile.of_kinds)
        if other is not None:
            yield other
        elif profile.source.method == "estimated" and faster_than_reached(cluster):
            yield (
                "the cluster's links are faster than published runs find them, as data sheets have them: what replicas "
                "exchange looks cheaper than it is; pipeplan example cluster-... writes links as runs reach them"
            )
        kinds = cluster.first(min(request.num_devices, cluster.num_devices)).devices
        if any(kind.speed != 1 for kind in kinds):
            each = ", ".join(f"{kind.count} {kind.name} at {kind.speed:g}" for kind in kinds)
            yield f"speeds of devices beside the profile's: {each}; each stage is as fast as its slowest device"
        if profile.of_kinds:
            each = ", ".join(f"{kind.count} {kind.name} by {_profile_of(profile, kind.name)}" for kind in kinds)
            yield f"costs of devices: {each}; where a stage has several kinds, each block takes what the slowest does"
    if request.num_devices == 1:
        return
    if (one := _one_of_each(request)) and not request.decodes:
        yield one
    inside = (request.shards or 1) * (request.context or 1)
    silent = [row for block in request.stated_profile.kinds for row in block.costs if row.messages is None]
    if inside > request.unit and any(row.shards * row.context == inside for row in silent):
        yield (
            f"{inside} devices that split a block are in several nodes of {request.unit}, but the profile has "
            "the time of their messages as it was made, and does not say what they are: inside a node, unless profile "
            "was given this --cluster"
        )
    if request.unit < (most := max((row.expert for row in silent), default=1)):
        yield (
            f"up to {most} devices that share experts are in several nodes of {request.unit}: the profile has the time "
            "of what they send each other as it was made, and does not say what that is: inside a node, unless profile "
            "was given this --cluster"
        )
    timed = sum(edge.transfer_ns is not None for edge in edges)
    if cluster is None:
        apart = sum(bool(edge.transfer_ns) for edge in edges)
        except_ = f", except on {apart} edges whose time the profile states" if apart else ""
        if request.decodes:
            yield "links between stages are free: without --cluster, their messages take no time"
        else:
            yield f"links are free: without --cluster, transfers take no time{except_}"
    elif edges and timed == len(edges):
        yield (
            "no message uses the cluster's links: the profile states the time of every edge (transfer_ns, "
            f"{_between([edge.transfer_ns or 0 for edge in edges])}); give edges bytes_per_sample instead (example has "
            "--bytes)"
        )
    elif edges and not any(edge.bytes_per_sample for edge in edges if edge.transfer_ns is None):
        yield "no edge has bytes_per_sample: of the cluster's links only the latency counts"


def _profile_of(profile: Profile, kind: str) -> str:
    """The file with a kind of device's costs."""
    return profile.of_kinds.get(kind, profile).where


def _between(times: Sequence[int]) -> str:
    """The least and the most of some times, once where they are equal."""
    return " to ".join(dict.fromkeys(map(format_ns, (min(times), max(times)))))


def _as_defined(profile: Profile, scheduler: str, rules: Rules | None) -> dict[str, Any]:
    """The fields that the definition of one schedule settles; none where schedules are searched."""
    if scheduler == "rules" and rules is not None:
        splits = splits_by(rules)
    elif scheduler in CLASSIC:
        splits = CLASSIC[scheduler].splits
    else:
        return {}
    outright = {"replicas": 1} if rules is not None and rules.order else {}
    return {"num_parted": 0, "split_backward": splits and can_split(profile), **outright}


def splits_by(rules: Rules) -> bool:
    """Whether rules split backward by their definition.

    Those that a classic schedule is made by are that schedule: GPipe's say where W goes, for those who split it.
    """
    ships = rules.name in CLASSIC and rules.name in shipped_rules() and rules == named_rules(rules.name)
    return CLASSIC[rules.name].splits if ships else rules.splits_backward


def _grouped(together: JoinedProfile, start: Plan) -> Plan:
    """The plan to start from with stages of what is kept together. Raises UsageError."""
    try:
        return with_groups(together, start)
    except UsageError as error:
        raise UsageError(f"--start: {error}; start from a plan that keeps them so, or leave --start out") from None


def _placed(rules: Rules) -> Rules:
    """Rules with an order, and the strategy that puts stages where it has them, if there is one."""
    stands, count = devices_of_stages(rules.order), len(rules.order)
    if rules.placement is not None or any(len(devices) != 1 for devices in stands):
        return rules
    on = [devices[0] for devices in stands]
    for name, strategy in STRATEGIES.items():
        chunks = len(on) // count if strategy.chunked else 1
        if chunks and on == list(chain.from_iterable(strategy.routes(count, chunks))):
            return rules.but(placement=name, chunks=chunks if strategy.chunked else None)
    return rules


def choose_placement(
    profile: Profile, wanted: Placement | str, num_devices: int | None, rules: Rules | None = None
) -> tuple[Placement | str, int]:
    """What ``--placement`` and ``--devices`` mean: a placement that exists, or a strategy; and how many devices.

    ``wanted`` is ``auto`` (the profile's own placement, else the strategy of the rules, or :data:`SUBMODULES` where
    they have one for each, else all strategies), :data:`ALL` (the same without the profile's own), a strategy, a
    placement file, or a placement.

    Raises:
        UsageError: ``num_devices`` contradicts the placement, is missing, or the strategy is not known; the rules are
            for another placement than the profile's own.
    """
    given: Placement | None = None
    ruled = strategy_of(rules)
    if wanted in ("auto", ALL):
        given = profile.placement if wanted == "auto" else None
        if given is None and ruled is None and rules is not None and rules.order:
            raise UsageError(
                f"no placement strategy puts stages where the order of rules {rules.name!r} has them; give "
                "--placement FILE"
            )
        if given is None:
            return ruled or "auto", _count(profile, num_devices)
        if rules is not None and not follows_rules(profile, given, rules):
            raise _other_placement(rules, given)
    elif isinstance(wanted, Placement):
        given = _placing(profile, wanted)
    elif wanted not in STRATEGIES:
        if not os.path.exists(wanted):
            meant = choose_from(wanted, ("auto", ALL, *STRATEGIES))
            raise UsageError(f"--placement {wanted!r} is neither a file nor a strategy; {meant}")
        given = _placing(profile, read_placement(wanted))
    if given is not None:
        if num_devices not in (None, given.num_devices):
            where = "the profile's placement" if wanted == "auto" else given.where
            raise UsageError(
                f"--devices {num_devices} contradicts {where}, which is for {given.num_devices}; leave --devices out, "
                "or give --placement all, or a strategy"
            )
        return given, given.num_devices
    assert isinstance(wanted, str)
    return wanted, _count(profile, num_devices)


def _placing(profile: Profile, given: Placement) -> Placement:
    """A placement that places the profile. Raises UsageError."""
    try:
        profile.check_placement(given)
    except ValueError as error:
        raise UsageError(f"{given.where} does not place profile {profile.name!r}: {error}") from None
    return given


def _other_placement(rules: Rules, own: Placement) -> UsageError:
    """Rules that are for another placement than the profile's own."""
    strategy = strategy_of(rules)
    chunks = f" with {rules.chunks} stages per device" if rules.chunks else ""
    what = f"{strategy}{chunks}"
    if strategy == SUBMODULES:
        sized = any(each.microbatch_size is not None for each in rules.submodules)
        what = f"each submodule on devices of its own{', with micro-batches of their own' if sized else ''}"
    anew = "take the placement out of the profile" if strategy == SUBMODULES else f"give --placement {strategy}"
    return UsageError(
        f"rules {rules.name!r} are for stages that stand {what}, which those of the profile's own placement "
        f"{own.strategy!r} do not; {anew} to place the model anew, or --placement FILE for stages that do"
    )


def _count(profile: Profile, num_devices: int | None) -> int:
    """The devices that are asked for, or those of the profile's own placement."""
    count = num_devices or (None if profile.placement is None else profile.placement.num_devices)
    if count is None:
        raise UsageError(f"profile {profile.name!r} has no placement; give --devices or a --cluster")
    if count > MAX_DEVICES:
        raise UsageError(f"{count} devices are more than the {MAX_DEVICES} that a plan may have; lower --devices")
    return count


ALL = "all"
"""The name that requests all strategies, whatever placement the profile has."""

SUBMODULES = "submodules"
"""The name in place of a strategy if the rules place each submodule by its own."""


def strategy_of(rules: Rules | None) -> str | None:
    """The strategy that rules name, :data:`SUBMODULES` where they have one for each submodule, None without any.

    Raises:
        UsageError: it is not known; they place the whole model and submodules, or not all submodules.
    """
    if rules is None or _places_submodules(rules):
        return None if rules is None else SUBMODULES
    if rules.placement is not None and rules.placement not in STRATEGIES:
        meant = choose_from(rules.placement, list(STRATEGIES))
        raise UsageError(f"rules {rules.name!r}: placement is {rules.placement!r}; {meant}")
    return rules.placement


def follows_rules(profile: Profile, placement: Placement, rules: Rules) -> bool:
    """Whether a placement is one that rules ask for, wherever it cuts the model."""
    if not _places_submodules(rules):
        return rules.placement is None or follows(profile, placement.stages, rules.placement, rules.chunks)
    taken: set[int] = set()
    for submodule in rules.submodules:
        there = [
            number
            for number, stage in enumerate(placement.stages)
            if number not in taken and fnmatchcase(stage.blocks[0], submodule.blocks)
        ]
        taken.update(there)
        stages = [placement.stages[number] for number in there]
        if not _follows(profile, submodule, stages, placement.num_devices):
            return False
    return True


def _follows(profile: Profile, rules: SubmoduleRules, stages: Sequence[PlacedStage], num_devices: int) -> bool:
    asked = _submodule(rules, num_devices)
    if rules.microbatch_size is not None and not _has_size(rules.microbatch_size, stages):
        return False
    first, end = asked.positions or (0, num_devices)
    inside = all(first <= device < end for stage in stages for device in stage.devices)
    return inside and follows(profile, stages, asked.strategy, asked.chunks)


def _has_size(size: int | str, stages: Sequence[PlacedStage]) -> bool:
    """Whether stages say sizes of their own as rules do; of a text, which the plan's size gives a meaning to, any."""
    said = {stage.microbatch_size for stage in stages}
    return None not in said and (isinstance(size, str) or said <= {size})


def _places_submodules(rules: Rules) -> bool:
    if not any(submodule.placement for submodule in rules.submodules):
        return False
    if rules.placement is not None:
        raise UsageError(f"rules {rules.name!r} place the model as {rules.placement} and by submodules; choose one")
    unplaced = next((submodule.blocks for submodule in rules.submodules if submodule.placement is None), None)
    if unplaced is not None:
        raise UsageError(f"rules {rules.name!r}: submodule {unplaced!r} has no placement, but others do; give it one")
    return True


def submodules_of(rules: Rules, positions: int, microbatch_size: int) -> list[Submodule]:
    """Every submodule as its rules place it, each on devices of its own, with its micro-batch size if they say one.

    In their ``devices`` D is ``positions``, in their ``microbatch_size`` b is the plan's.

    Raises:
        UsageError: a size comes to less than one sample.
    """
    return [
        replace(_submodule(each, positions), microbatch_size=size_of(each, microbatch_size))
        for each in rules.submodules
    ]


def size_of(rules: SubmoduleRules, microbatch_size: int) -> int | None:
    """The samples of a submodule's micro-batches, where the plan's have so many; None: as many. Raises UsageError."""
    if rules.microbatch_size is None:
        return None
    return evaluate(f"microbatch_size of submodule {rules.blocks!r}", rules.microbatch_size, {"b": microbatch_size})


def _submodule(rules: SubmoduleRules, positions: int) -> Submodule:
    assert rules.placement is not None  # _places_submodules
    ends = [evaluate("devices", number, {"D": positions}, least=0) for number in rules.devices or ()]
    return Submodule(rules.blocks, rules.placement, rules.chunks, (ends[0], ends[1]) if ends else None)
