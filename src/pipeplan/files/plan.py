"""Plan: the file with stages, schedule and a program per device, complete without the profile.

A plan is compact: an *operation* stands for all actions of one kind and stage, and says once what they have
in common (duration, memory effect, dependencies, transfers). The schedule gives the start of each action, the
programs give for each device the order of compute and communication. With a *loop* both are written for a few
micro-batches, of which those in the middle run again and again: warmup, a round with a count, cooldown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from fractions import Fraction
from functools import cached_property
from typing import Annotated, Any, Literal, overload

from pydantic import (
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    StringConstraints,
    model_serializer,
    model_validator,
)

from pipeplan.errors import InvalidPlanError, UsageError
from pipeplan.files.base import (
    MIGRATIONS,
    SAID_ONLY,
    Content,
    CurrentVersion,
    File,
    FileModel,
    current_version,
    said_only,
)
from pipeplan.files.onward import InShort
from pipeplan.files.packed import PackedProgram, PackedStarts, packed_programs, packed_starts, unpacked, unpacked_starts
from pipeplan.files.placement import PlacedStage, Placement
from pipeplan.files.profile import EAGER, INFERENCE, TRAINING, FlopsPerSample, Mode, TokensPerSample
from pipeplan.files.recipe import AUTOCAST, Recipe
from pipeplan.units import format_ns
from pipeplan.workload.action import ACTION_PATTERN, Action, StateAction, operation_of
from pipeplan.workload.elements import (
    GATHERED_CONTEXT,
    MAX_DEVICES,
    RING,
    Count,
    Dependency,
    Device,
    DeviceMemory,
    Index,
    Integer,
    Items,
    Loop,
    Name,
    Nanoseconds,
    Operation,
    OperationId,
    Players,
    Printable,
    Repetend,
    Stage,
    Text,
    TiedState,
    buckets_problem,
    exchange_problem,
    expert_problem,
    group_problem,
    groups_problem,
    odd_neighbour,
    program_of,
    recompute_problem,
    remade_problem,
    segments_problem,
    sharing_problem,
    slots_of,
    speeds_of,
)
from pipeplan.workload.folding import devices_of, each_played, num_playing, of_devices, split_alike, stage_problem
from pipeplan.workload.kinds import GRADIENT_ROLES, GRADIENTS, MASTER, PARAMETERS, PARTED_ROLES, Role
from pipeplan.workload.mesh import Mesh
from pipeplan.workload.network_jobs import gradient_sums
from pipeplan.workload.samples import Slots
from pipeplan.workload.workload import Workload

ActionText = Annotated[str, StringConstraints(pattern=ACTION_PATTERN)]
TimeSum = Annotated[int, Field(ge=0, le=2**62)]


class Predicted(FileModel):
    """What the plan's programs take when every action lasts as stated and starts as soon as it can.

    ``makespan_ns`` is until the last action ends, ``iteration_ns`` until all ends that follows
    (:mod:`pipeplan.workload.tail`); bound and gap are of the iteration.
    """

    makespan_ns: TimeSum
    lower_bound_ns: Annotated[TimeSum, Field(description="proved: no iteration of this placement is shorter")]
    gap: Annotated[float, Field(ge=0, description="iteration / lower_bound - 1")]
    iteration_ns: Annotated[
        TimeSum, Field(description="until gradients are summed, parameters stepped and gathered")
    ] = 0
    period_ns: Annotated[float | None, Field(ge=0, description="per micro-batch, of the repetend")] = None
    period_lower_bound_ns: Annotated[float, Field(ge=0)] = 0.0
    bubble_rate: Annotated[float, Field(ge=0, le=1, description="of the iteration")]
    bubble_rate_span: Annotated[float, Field(ge=0, le=1, description="by busiest device span")]
    bubble_rate_steady: Annotated[float | None, Field(ge=0, le=1, description="of the repetend")] = None
    memory: Annotated[Items[DeviceMemory], InShort()]

    @property
    def whole_ns(self) -> int:
        """The iteration, gradient sums included; older plans only say when the last action ends."""
        return self.iteration_ns or self.makespan_ns


class Decode(FileModel):
    """What a plan of decode steps is for: every request gets a token in every step, of a group of them in turn.

    Micro-batch m of the plan is a step of group ``m % groups``. Times and bytes are those of the last step, at which
    every request has ``context_tokens`` in its text; no step takes more.
    """

    batch: Annotated[Count, Field(description="requests, of all groups together")]
    groups: Annotated[Count, Field(description="of requests that take a step together, one after another")]
    context_tokens: Annotated[Count, Field(description="of a request's text at the last step, its own among them")]
    kv: Annotated[Name, Field(description="how devices share a step: dp, tp, cp, cp-q, or a mixture, in words")] = "dp"
    prefill_tokens: Annotated[
        Index, said_only(0, "of a prompt that joins, which run beside every group's step; 0: none")
    ] = 0
    max_requests: Annotated[
        Index | None, said_only(None, "for which there is memory at that context; null: there is no limit")
    ] = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """[group] its requests, as equally many as can be."""
        ends = [self.batch * number // self.groups for number in range(self.groups + 1)]
        return tuple(end - begin for begin, end in zip(ends, ends[1:], strict=False))

    def tokens_of(self, num_microbatches: int) -> int:
        """Tokens that so many micro-batches, whole steps of all groups, make for the requests that there are."""
        return self.batch * num_microbatches // self.groups


class AlternativeFigures(FileModel):
    """Another plan that a search found: what it is, and how its iteration splits up, in ns.

    ``work_ns`` is what a device computes on average, ``uneven_ns`` what the busiest has more, ``waiting_ns`` what that
    one waits for messages and in bubbles, ``ending_ns`` what follows the last action; they add up to ``iteration_ns``.
    Bytes are those of the device with least left, and of what plans may use of its memory (null: no
    limit).
    """

    what: Text
    iteration_ns: TimeSum
    work_ns: TimeSum
    uneven_ns: TimeSum
    waiting_ns: TimeSum
    ending_ns: TimeSum
    recomputed: Annotated[Index, Field(description="stages that recompute")] = 0
    peak_bytes: TimeSum
    memory_bytes: TimeSum | None = None


class KindSource(FileModel):
    """The profile of a kind of device, and what its numbers are for."""

    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    device: Annotated[str, Printable(512), Field(description="device the profile's numbers are for")] = ""
    dtype: Annotated[str, Printable(64), Field(description="the profile's number format, such as float32")] = ""


class Provenance(FileModel):
    """What the plan was made from, and with."""

    profile: Text = ""
    profile_sha256: Annotated[str, Field(pattern="^([0-9a-f]{64})?$")] = ""
    cluster_sha256: Annotated[str, Field(pattern="^([0-9a-f]{64})?$")] = ""
    node_size: Annotated[
        Count | None,
        said_only(None, "devices that the cluster has on one node, one after another; null: not known, or no nodes"),
    ] = None
    device: Annotated[str, Printable(512), Field(description="device the profile's numbers are for")] = ""
    dtype: Annotated[str, Printable(64), Field(description="the profile's number format, such as float32")] = ""
    method: Annotated[
        str,
        Field(
            pattern="^(measured|estimated|literature)?$",
            description="how the profile's numbers came about, as its source says; empty where that is not known",
        ),
    ] = ""
    tokens_per_sample: TokensPerSample = None
    forward_flops_per_sample: FlopsPerSample = None
    scheduler: Text = ""
    command: Annotated[Text, Field(description="the command line that wrote the plan")] = ""
    options: dict[Name, Text | Integer | float | bool | None] = {}
    rules: Annotated[
        Items[Text],
        Field(description="lines of the rules file that its schedule follows", json_schema_extra={SAID_ONLY: True}),
    ] = ()
    choices: Annotated[
        dict[Name, Text],
        Field(
            description="what made each choice: a flag, a planner, rules, or the search",
            json_schema_extra={SAID_ONLY: True},
        ),
    ] = {}
    alternatives: Annotated[
        Items[AlternativeFigures],
        Field(
            max_length=10,
            description="the best other plans that the search found, in figures, with the plan itself first",
            json_schema_extra={SAID_ONLY: True},
        ),
    ] = ()
    profiles: Annotated[
        dict[Name, KindSource],
        Field(
            description="those of kinds of devices that have one of their own, by the name of the kind",
            json_schema_extra={SAID_ONLY: True},
        ),
    ] = {}
    seed: Integer = 0
    versions: dict[Name, Text] = {}

    @model_serializer(mode="wrap")
    def _without_what_is_not_there(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Plans that follow no rules file, or do not say who chose or what else was found, stay as they were."""
        found: dict[str, Any] = written(self)
        for key in ("rules", "choices", "alternatives", "profiles"):
            if not getattr(self, key):
                found.pop(key, None)
        return found


def _memory_has_master_copies(plan: Content) -> Content:
    """Version 2: predicted memory has them apart; of version 1 they are among the optimizer's bytes.

    Sums of gradients overlap with what runs elsewhere; version 1 had them all at the end, so its iteration is unknown.
    """
    memory = [each | {"master_bytes": 0} for each in plan["predicted"]["memory"]]
    predicted = plan["predicted"] | {"memory": memory}
    if any(stage["sync_ns"] for stage in plan["stages"]):
        predicted["iteration_ns"] = 0
    return plan | {"predicted": predicted}


MIGRATIONS["plan", 1] = _memory_has_master_copies
"""Version 2 also has ``tied``, the recipe, what the profile's numbers are for and what a sample is, by default none."""


_SPLIT_ROLES = frozenset({Role.INPUT_GRAD, Role.WEIGHT_GRAD})
_EXCHANGE = ("unshard_every", "reduce_every", "block_groups")
_PLACED_OTHERWISE = ("devices", "context_exchange", "expert_shards")


MOST_UNROLLED = 1_000_000
"""Actions of a plan with a loop that are written out where they must be: about a gigabyte."""


class Plan(File):
    """A placement, a schedule and a program per device for one mini-batch."""

    schema_version: Annotated[int, CurrentVersion("plan")] = current_version("plan")
    kind: Literal["plan"] = "plan"
    name: Name
    mode: Annotated[
        Mode, said_only(TRAINING, "what its programs run: training, or inference, which is forwards alone")
    ] = TRAINING
    placement: Annotated[Name, Field(description="strategy: one-to-one, circular, v-shape, ...")]
    num_microbatches: Count
    microbatch_size: Annotated[Count, Field(description="mini-batch / num_microbatches")]
    num_routes: Annotated[Count, Field(description="ways through the stages that micro-batches take in turn")] = 1
    recipe: Annotated[
        Recipe | None,
        Field(description="what training keeps of every parameter; null: of version 1, which says only bytes"),
    ] = None
    devices: Annotated[Items[Device], InShort(), Field(min_length=1, max_length=MAX_DEVICES)]
    players: Annotated[
        Items[Players],
        InShort(),
        said_only(
            (),
            "for each of devices, those that play its program, equally many, or any number where it is empty: numbers "
            "of devices elsewhere in the plan are then numbers of programs; none: each device has its own",
        ),
    ] = ()
    stages: Annotated[Items[Stage], InShort(), Field(min_length=1)]
    modules: Annotated[
        dict[Name, Items[Name]],
        InShort(),
        said_only({}, "of the model that the profile was taken from, those that each block is, by block"),
    ] = {}
    tied: Annotated[Items[TiedState], Field(description="parameters that stages share")] = ()
    sum_order: Annotated[
        Items[Index],
        Field(description="numbers of the sums of gradients in the order in which networks run them; none: as ready"),
    ] = ()
    operations: Annotated[Items[Operation], InShort(), Field(min_length=1)]
    dependencies: Annotated[Items[Dependency], InShort()]
    starts_ns: Annotated[
        dict[OperationId, Items[TimeSum]],
        BeforeValidator(unpacked_starts, json_schema_input_type=dict[OperationId, Items[TimeSum] | PackedStarts]),
        InShort(),
        Field(description="start of each micro-batch's action; with players in short, where that can be"),
    ]
    split_overhead_ns: Annotated[Nanoseconds, Field(description="in each I and W beside the profile's time")] = 0
    launch_overhead_ns: Annotated[
        Nanoseconds,
        Field(
            description="in each action, for each block, beside the profile's time", json_schema_extra={SAID_ONLY: True}
        ),
    ] = 0
    programs: Annotated[
        Items[Items[ActionText]],
        BeforeValidator(unpacked, json_schema_input_type=Items[Items[ActionText] | PackedProgram]),
        InShort(),
        Field(description="per device, compute and communication; with players in short, where that can be"),
    ]
    repetend: Repetend | None = None
    loop: Annotated[Loop | None, Field(description="a round that runs more often than starts and programs say")] = None
    decode: Annotated[Decode | None, said_only(None, "where it is a loop of decode steps, what that is for")] = None
    predicted: Predicted
    provenance: Provenance = Provenance()

    def __repr__(self) -> str:
        figures = f"{self.num_devices} devices, {self.num_microbatches} micro-batches"
        return f"<Plan {self.name!r}: {self.placement}, {figures}, iteration {format_ns(self.predicted.iteration_ns)}>"

    def written_by(self, command: str) -> Plan:
        """The same plan, whose provenance has the command line that writes it."""
        return self.model_copy(update={"provenance": self.provenance.model_copy(update={"command": command})})

    def with_alternatives(self, alternatives: tuple[AlternativeFigures, ...]) -> Plan:
        """The same plan, whose provenance has what else its search found."""
        return self.model_copy(update={"provenance": self.provenance.model_copy(update={"alternatives": alternatives})})

    @model_serializer(mode="wrap")
    def _without_what_is_not_there(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Plans without what version 2 may have since stay as they were, and so do their fingerprints."""
        found: dict[str, Any] = written(self)
        if self.loop is None:
            found.pop("loop", None)
        if self.players and "programs" in found:
            found["programs"] = packed_programs(self.programs)
        if self.players and "starts_ns" in found:
            found["starts_ns"] = {id_: packed_starts(own) or list(own) for id_, own in self.starts_ns.items()}
        if not self.sum_order:
            found.pop("sum_order", None)
        if not self.launch_overhead_ns:
            found.pop("launch_overhead_ns", None)
        for device in found.get("devices", ()):
            if not device.get("reserve_bytes"):
                device.pop("reserve_bytes", None)
            if not device.get("contention"):
                device.pop("contention", None)
        for stage in found.get("stages", ()):
            for key in ("step_ns", "gather_ns", "zero", "zero_group", "buckets", *_EXCHANGE):
                if not stage.get(key):
                    stage.pop(key, None)
            for key in ("context", "expert", "expert_shards"):
                if stage.get(key) == 1:
                    del stage[key]
            if stage.get("context_exchange") == GATHERED_CONTEXT:
                del stage["context_exchange"]
            if not stage.get("cuts"):
                stage.pop("cuts", None)
            if stage.get("speed") == 1:
                del stage["speed"]
            for key in ("kinds", "cache_bytes", "segments", "whole_gradient_bytes", "remade"):
                if not stage.get(key):
                    stage.pop(key, None)
            for bucket in stage.get("buckets", ()):
                if not bucket.get("whole_bytes"):
                    bucket.pop("whole_bytes", None)
        for operation in found.get("operations", ()):
            for key in ("parts_ns", "pace_ns"):
                if not operation.get(key):
                    operation.pop(key, None)
        for dependency in found.get("dependencies", ()):
            if dependency.get("source_part") is None:
                dependency.pop("source_part", None)
            if not dependency.get("target_part"):
                dependency.pop("target_part", None)
            if dependency.get("slices") == 1:
                del dependency["slices"]
            if not dependency.get("later"):
                dependency.pop("later", None)
        for memory in found.get("predicted", {}).get("memory", ()):
            if not memory.get("cache_bytes"):
                memory.pop("cache_bytes", None)
        return found

    @model_validator(mode="after")
    def _refers_to_what_is_there(self) -> Plan:
        """Everything named exists and every list has its length; :mod:`pipeplan.checker` does the rest."""
        for number, device in enumerate(self.devices):
            if device.usable_bytes is not None and device.usable_bytes < 0:
                raise ValueError(f"devices[{number}] reserves {device.reserve_bytes} of {device.memory_bytes} bytes")
        self._require_one_per_device("programs", len(self.programs))
        self._require_players()
        for number in range(len(self.stages)):
            self._require_stage(number)
        self._require_blocks_first()
        self._require_tied()
        self._require_sum_order()
        self._require_loop()
        self._require_operations()
        groups = [frozenset(stage.devices) for stage in self.stages]
        for number in range(len(self.dependencies)):
            self._require_dependency(number, groups)
        self._require_decode()
        self._require_starts()
        self._require_one_per_device("predicted.memory", len(self.predicted.memory))
        if self.repetend is not None and set(self.repetend.first) != set(self._by_id):
            odd = sorted(set(self.repetend.first) ^ set(self._by_id))[0]
            raise ValueError(f"repetend.first must name every operation once; {odd} is missing or unknown")
        return self

    def _require_stage(self, number: int) -> None:
        stage = self.stages[number]
        for device in stage.devices:
            if device >= len(self.devices):
                raise ValueError(
                    f"stages[{number}] stands on device {device}, but the plan has {len(self.devices)} devices"
                )
        if len(set(stage.devices)) != len(stage.devices):
            raise ValueError(f"stages[{number}].devices name a device twice")
        if stage.whole_gradient_bytes > stage.state[GRADIENTS]:
            what = f"{stage.whole_gradient_bytes} of {stage.state[GRADIENTS]} gradient_bytes"
            raise ValueError(f"stages[{number}].whole_gradient_bytes is {what}")
        size = len(stage.devices) * self.players_each
        how = stage.context_exchange, stage.configurations
        if problem := group_problem(stage.shards, stage.context, stage.replicas, size, *how):
            raise ValueError(f"stages[{number}]: {problem}")
        own = bool(stage.configurations), stage.expert_shards
        if problem := expert_problem(stage.expert, size, *own):
            raise ValueError(f"stages[{number}]: {problem}")
        if problem := sharing_problem(stage.zero, stage.zero_group, stage.copies, bool(stage.configurations)):
            raise ValueError(f"stages[{number}]: {problem}")
        if problem := recompute_problem(stage.recompute, len(stage.blocks)):
            raise ValueError(f"stages[{number}].recompute {problem}")
        if problem := remade_problem(stage.remade, stage.blocks, stage.configurations, stage.recomputes):
            raise ValueError(f"stages[{number}].remade {problem}")
        for text in dict.fromkeys(stage.configurations):
            try:
                Mesh.parse(text)
            except ValueError as error:
                raise ValueError(f"stages[{number}].configurations: {error}") from None
        self._require_segments(number)
        if stage.route >= self.num_routes:
            raise ValueError(f"stages[{number}] is on route {stage.route}, but the plan has {self.num_routes}")
        if self.mini_batch % (stage.microbatch_size * self.num_routes):
            routes = f" on each of {self.num_routes} routes" if self.num_routes > 1 else ""
            raise ValueError(
                f"stages[{number}].microbatch_size {stage.microbatch_size}{routes} does not divide the mini-batch of "
                f"{self.mini_batch}"
            )
        if stage.num_parted:
            self._require_parts(number)
        if stage.cuts and (list(stage.cuts) != sorted(set(stage.cuts)) or stage.cuts[-1] >= len(stage.blocks)):
            raise ValueError(
                f"stages[{number}].cuts must rise, from at least 1 to less than its {len(stage.blocks)} blocks"
            )
        if stage.cuts and (stage.num_parted or stage.configurations):
            raise ValueError(
                f"stages[{number}].cuts: a stage with num_parted or configurations takes and gives all at once"
            )
        adding = (each for each in self._operations_of.get(number, ()) if each.role in GRADIENT_ROLES)
        duration = max((each.duration_ns for each in adding), default=0) if stage.buckets else 0
        if problem := buckets_problem(stage.buckets, len(stage.blocks), duration):
            raise ValueError(f"stages[{number}].buckets {problem}")
        self._require_exchanges(number)

    def _require_segments(self, number: int) -> None:
        """What kernel backends run is whole, and has no I and W where one of them compiles."""
        stage = self.stages[number]
        others = ("shards", "context", "expert", "recompute", "num_parted", "configurations", "cuts", "buckets")
        own = {key: getattr(stage, key) for key in (*others, "kinds")}
        if problem := segments_problem(stage.segments, stage.blocks, own, stage.zero):
            raise ValueError(f"stages[{number}].segments {problem}")
        if stage.segments and self.launch_overhead_ns:
            raise ValueError(
                f"stages[{number}].segments: backends were measured with launches; leave launch_overhead_ns"
            )
        split = next((each.id for each in self._operations_of.get(number, ()) if each.role in _SPLIT_ROLES), None)
        compiled = next((each.backend for each in stage.segments if each.backend != EAGER), None)
        if split is not None and compiled is not None:
            raise ValueError(
                f"stages[{number}].segments: {compiled} has no weight gradients apart, and the plan has {split}"
            )

    def _require_players(self) -> None:
        """Each device plays one program, as many devices as any other, and groups of them are of whole programs.

        A program that no stage is on any number may play.
        """
        if not self.players:
            return
        self._require_one_per_device("players", len(self.players))
        busy = {program for stage in self.stages for program in stage.devices}
        if not busy <= set(range(len(self.players))):
            return  # what is said of stages names the one that is on none
        each, first = self.players_each, self.stages[0].devices[0]
        played = bytearray(self.num_devices if self.num_devices <= MAX_DEVICES else 0)
        for number, own in enumerate(self.players):
            if problem := own.problem:
                raise ValueError(f"players[{number}] {problem}")
            if own.count != each and number in busy:
                raise ValueError(
                    f"players[{number}] are {own.count} devices, players[{first}] {each}: every program that a stage "
                    "is on is played by as many"
                )
            if self.num_devices > MAX_DEVICES:
                raise ValueError(f"players are {self.num_devices} devices, more than the {MAX_DEVICES} of a plan")
            for run in own.runs:
                these = slice(run.start, run.stop, run.step)
                if any(played[these]):
                    device = next(device for device in run if played[device : device + 1] == b"\1")
                    other, _ = program_of(self.players, device)
                    raise ValueError(f"players[{number}] and players[{other}] both have device {device}")
                played[these] = b"\1" * len(played[these])
        if not all(played):  # as many are beyond
            last = max(run[-1] for own in self.players for run in own.runs)
            raise ValueError(
                f"players: device {played.index(0)} plays no program, while device {last} plays one of "
                f"{self.num_devices} devices"
            )
        if self.is_inference or self.decode is not None:
            raise ValueError("players are for plans of training")
        self._require_groups_of_players(each)

    def _require_groups_of_players(self, each: int) -> None:
        """Stages stand on whole replicas, or all alike; what goes between them is between players of one place."""
        alike = split_alike(self.stages)
        sizes = {stage.microbatch_size for stage in self.stages}
        if len(sizes) > 1:
            raise ValueError(
                f"players: stages have micro-batches of {min(sizes)} and of {max(sizes)}; give all one size"
            )
        for number, stage in enumerate(self.stages):
            if stage.configurations or not stage.blocks:
                what = "configurations" if stage.configurations else "an instruction"
                raise ValueError(f"stages[{number}] has {what}, and its devices are not alike: leave out players")
            if problem := stage_problem(stage, each, alike=alike):
                raise ValueError(f"stages[{number}]: {problem}")

    def _require_exchanges(self, number: int) -> None:
        """Actions that exchange state are of stages that divide it, and that share their devices as a whole or not."""
        stage = self.stages[number]
        every = stage.unshard_every, stage.reduce_every
        if problem := exchange_problem(stage.zero, stage.copies, *every, stage.num_parted):
            raise ValueError(f"stages[{number}]: {problem}")
        if bool(stage.block_groups) != (stage.reduce_every is not None):
            raise ValueError(f"stages[{number}].block_groups are for stages with reduce_every, and for all of these")
        own = (each for each in self.operations if each.stage == number)
        if problem := groups_problem(stage.block_groups, len(stage.blocks), own):
            raise ValueError(f"stages[{number}].block_groups {problem}")
        if stage.block_groups and (other := odd_neighbour(stage, self.stages)) is not None:
            raise ValueError(
                f"stages[{number}] exchanges state by actions and shares only some of its devices with "
                f"stages[{other}]; let both have the same devices, or leave out unshard_every and reduce_every"
            )

    def _require_loop(self) -> None:
        """A round of whole micro-batches of every stage, which the programs have."""
        loop = self.loop
        if loop is None:
            return
        if len(loop.rounds) > 1 and any(stage.block_groups for stage in self.stages):
            raise ValueError("loop.rounds: exchanges of state by actions repeat in one round, not in several")
        if loop.skipped >= self.num_microbatches:
            raise ValueError(
                f"loop: {loop.copies} copies of {loop.microbatches} micro-batches are not fewer than the plan's "
                f"{self.num_microbatches}, of which some are before and after"
            )
        for number, stage in enumerate(self.stages):
            if loop.microbatches * self.microbatch_size % (stage.microbatch_size * self.num_routes):
                raise ValueError(
                    f"loop.microbatches {loop.microbatches} are no whole number of micro-batches of stages[{number}]"
                )
        before = [0] * len(self.devices)
        for number, each in enumerate(loop.rounds):
            place = f"loop.rounds[{number}]"
            self._require_one_per_device(f"{place}.begins", len(each.begins))
            self._require_one_per_device(f"{place}.ends", len(each.ends))
            for device, (begin, end) in enumerate(zip(each.begins, each.ends, strict=True)):
                if not before[device] <= begin <= end <= len(self.programs[device]):
                    raise ValueError(
                        f"{place} has entries {begin} to {end} of programs[{device}], which has "
                        f"{len(self.programs[device])}, of which {before[device]} stand before the round"
                    )
            before = list(each.ends)

    def _require_blocks_first(self) -> None:
        """Stages without blocks are numbered last, so that a placement numbers the others as the plan does."""
        empty = [number for number, stage in enumerate(self.stages) if not stage.blocks]
        later = [number for number, stage in enumerate(self.stages) if stage.blocks and empty and number > empty[0]]
        if later:
            raise ValueError(f"stages[{empty[0]}] has no blocks and stands before stages[{later[0]}], which has some")

    def _require_tied(self) -> None:
        """What is tied is of stages that there are and of their devices, each of which counts as much."""
        left = [dict.fromkeys(stage.devices, stage.state) for stage in self.stages]
        for number, each in enumerate(self.tied):
            if len(each.stages) != len(each.devices):
                raise ValueError(f"tied[{number}] has {len(each.stages)} stages and devices of {len(each.devices)}")
            for stage, devices in zip(each.stages, each.devices, strict=True):
                if stage >= len(left):
                    raise ValueError(f"tied[{number}] names stage {stage}, but there are {len(left)} stages")
                for device in devices:
                    if device not in left[stage]:
                        raise ValueError(f"tied[{number}] names device {device}, which is none of stage {stage}")
                    left[stage][device] -= each.state
                    if min(left[stage][device].values()) < 0:
                        raise ValueError(
                            f"tied[{number}] has more bytes than stage {stage} keeps on device {device} beside what "
                            "is tied before"
                        )

    def _require_sum_order(self) -> None:
        """Each sum of gradients once, or none."""
        sums = len(gradient_sums(self.stages, self.tied)) if self.sum_order else 0
        if sorted(self.sum_order) != [*range(sums)]:
            raise ValueError(f"sum_order must name each of the plan's {sums} sums of gradients once, or none")

    def _require_parts(self, number: int) -> None:
        """Parts are halves of equal micro-batches, so that a part of one stage is a part of the next."""
        stage = self.stages[number]
        if stage.num_parted > self.num_written:
            raise ValueError(
                f"stages[{number}].num_parted {stage.num_parted} is more than the {self.num_written} micro-batches"
            )
        if self.num_routes > 1 or any(other.microbatch_size != self.microbatch_size for other in self.stages):
            raise ValueError(f"stages[{number}].num_parted: parts need one route, and one micro-batch size")
        if stage.microbatch_size % (2 * stage.replicas):
            raise ValueError(
                f"stages[{number}].num_parted: micro-batches of {stage.microbatch_size} samples cannot be halved "
                f"for {stage.replicas} replicas"
            )

    def _require_operations(self) -> None:
        seen: set[str] = set()
        for number, operation in enumerate(self.operations):
            if operation.stage >= len(self.stages):
                raise ValueError(
                    f"operations[{number}] is of stage {operation.stage}, but there are {len(self.stages)} stages"
                )
            if operation.id in seen:
                raise ValueError(f"operations[{number}] repeats operation {operation.id}")
            seen.add(operation.id)
            parted = operation.role is Role.FORWARD and self.stages[operation.stage].num_parted > 0
            if parted != (operation.part_ns is not None):
                raise ValueError(f"operations[{number}].part_ns is for forwards of stages with num_parted, and for all")
            self._require_parts_of(number)

    def _require_parts_of(self, number: int) -> None:
        """Forward and backward of a stage with cuts say what each of their parts takes, and nothing else does."""
        operation = self.operations[number]
        cuts = self.stages[operation.stage].cuts
        count = 1 + len(cuts) if cuts and operation.role in PARTED_ROLES else 0
        if len(operation.parts_ns) != count:
            raise ValueError(
                f"operations[{number}].parts_ns has {len(operation.parts_ns)} parts, and {operation.id} of a stage "
                f"with cuts {list(cuts)} has {count or 'none'}"
            )
        if operation.parts_ns and sum(operation.parts_ns) != operation.duration_ns:
            raise ValueError(
                f"operations[{number}].parts_ns add up to {sum(operation.parts_ns)} ns, the action takes "
                f"{operation.duration_ns}"
            )

    def _require_dependency(self, number: int, groups: Sequence[frozenset[int]]) -> None:
        """``groups`` [stage] are the devices of the stages."""
        dependency = self.dependencies[number]
        for end in (dependency.source, dependency.target):
            if end not in self._by_id:
                raise ValueError(f"dependencies[{number}] names {end}, which is not an operation")
        if dependency.source == dependency.target and not dependency.later:
            raise ValueError(f"dependencies[{number}] joins {dependency.source} to itself")
        if dependency.needs is not None:
            self._require_needs(number)
        if dependency.has_parts:
            self._require_part_ends(number)
        if dependency.later:
            self._require_return(number)
        sources, targets = groups[dependency.source_stage], groups[dependency.target_stage]
        for index, hop in enumerate(dependency.hops):
            place = f"dependencies[{number}].hops[{index}]"
            if hop.source_device not in sources:
                raise ValueError(
                    f"{place} leaves from device {hop.source_device}, where {dependency.source} does not run"
                )
            if hop.target_device not in targets:
                raise ValueError(f"{place} ends on device {hop.target_device}, where {dependency.target} does not run")
            if hop.first + hop.run > hop.every:
                raise ValueError(f"{place}: first {hop.first} + run {hop.run} must be at most every {hop.every}")

    def _require_decode(self) -> None:
        """Steps of all groups, of inference, in which what returns comes to the same group's next step."""
        decode = self.decode
        if decode is None:
            odd = next((number for number, each in enumerate(self.dependencies) if each.later), None)
            if odd is not None:
                raise ValueError(f"dependencies[{odd}].later is for plans of decode steps, and decode is not there")
            return
        if not self.is_inference:
            raise ValueError('decode is there, and the plan\'s mode is training; decode steps are of "inference"')
        if decode.groups > decode.batch:
            raise ValueError(f"decode.groups {decode.groups} are more than its batch of {decode.batch} requests")
        if self.microbatch_size != max(decode.sizes):
            raise ValueError(
                f"microbatch_size {self.microbatch_size} is not that of the largest of {decode.groups} groups of "
                f"{decode.batch} requests, {max(decode.sizes)}"
            )
        if self.num_microbatches % decode.groups:
            raise ValueError(
                f"num_microbatches {self.num_microbatches} are no whole number of steps of {decode.groups} groups"
            )
        for number, each in enumerate(self.dependencies):
            if each.later not in (0, decode.groups):
                raise ValueError(
                    f"dependencies[{number}].later is {each.later}; what returns comes to the next step of its group, "
                    f"{decode.groups} micro-batches later"
                )

    def _require_return(self, number: int) -> None:
        """Between whole actions of equal micro-batches, by messages that are too small to occupy a link."""
        dependency, place = self.dependencies[number], f"dependencies[{number}]"
        if dependency.needs is not None or dependency.has_parts or dependency.slices > 1:
            raise ValueError(f"{place}.later is for dependencies without needs, parts and slices")
        ends = [self.stages[each] for each in (dependency.source_stage, dependency.target_stage)]
        if self.num_routes > 1 or any(stage.microbatch_size != self.microbatch_size for stage in ends):
            raise ValueError(f"{place}.later is between stages of one micro-batch size, on one route")
        busy = next((index for index, hop in enumerate(dependency.hops) if hop.occupancy_ns), None)
        if busy is not None:
            raise ValueError(f"{place}.hops[{busy}].occupancy_ns: what returns occupies no link; say latency_ns")

    def _require_part_ends(self, number: int) -> None:
        """Parts that there are, of what sends a message; what stays on a device is there when its action has ended."""
        dependency, place = self.dependencies[number], f"dependencies[{number}]"
        if not dependency.hops:
            raise ValueError(f"{place} has no messages, for which alone a part can wait, or which it can send")
        ends = (("source_part", dependency.source_part or 0), ("target_part", dependency.target_part))
        for (key, part), id_ in zip(ends, (dependency.source, dependency.target), strict=True):
            count = max(1, len(self._by_id[id_].parts_ns))
            if part >= count:
                raise ValueError(f"{place}.{key} is {part}, but {id_} has {count} part{'s' if count > 1 else ''}")

    def _require_needs(self, number: int) -> None:
        """One count per action of the target, of actions that the source has."""
        dependency, place = self.dependencies[number], f"dependencies[{number}].needs"
        needs, have = dependency.needs or (), self.num_instances(dependency.source)
        if not dependency.has_instruction or dependency.hops:
            raise ValueError(f"{place} is for dependencies of instructions that have no hops")
        if len(needs) != self.num_instances(dependency.target):
            raise ValueError(
                f"{place} has {len(needs)} entries for {self.num_instances(dependency.target)} actions of "
                f"{dependency.target}"
            )
        if max(needs) > have:
            raise ValueError(
                f"{place}[{needs.index(max(needs))}] is {max(needs)}, but {dependency.source} has {have} actions"
            )

    def _require_starts(self) -> None:
        for id_ in self.starts_ns:
            if id_ not in self._by_id:
                raise ValueError(f"starts_ns names {id_}, which is not an operation")
        for id_ in self._by_id:
            if id_ not in self.starts_ns:
                raise ValueError(f"starts_ns leaves out operation {id_}")
            stated, count = len(self.starts_ns[id_]), self.num_instances(id_)
            if stated != count:
                raise ValueError(f"starts_ns[{id_}] has {stated} starts for {count} micro-batches")

    def _require_one_per_device(self, name: str, number: int) -> None:
        if number != len(self.devices):
            raise ValueError(f"{name} has {number} entries for {len(self.devices)} devices")

    @property
    def device_speeds(self) -> list[float]:
        """[device] how much it computes in the time in which one that the profile's times are of computes 1."""
        return of_devices(self.players, speeds_of(self.stages, len(self.devices)))

    @property
    def num_devices(self) -> int:
        """Devices, of which there may be more than programs."""
        return num_playing(self.players) if self.players else len(self.devices)

    @property
    def players_each(self) -> int:
        """How many devices play each program that a stage is on; 1 where every device has its own."""
        return each_played(self.players, self.stages)

    @property
    def mini_batch(self) -> int:
        """Samples in one iteration."""
        return self.num_microbatches * self.microbatch_size

    @property
    def num_written(self) -> int:
        """Micro-batches of which starts and programs say something: all, but those that a loop runs beside."""
        return self.num_microbatches - (0 if self.loop is None else self.loop.skipped)

    @property
    def written(self) -> Plan:
        """What starts and programs say, as a plan without a loop; the predictions are left as they are."""
        if self.loop is None:
            return self
        return self.model_copy(update={"num_microbatches": self.num_written, "loop": None})

    @property
    def whole_programs(self) -> tuple[Sequence[str], ...]:
        """The programs with all that a loop runs, entries made as they are read."""
        loop = self.loop
        if loop is None:
            return self.programs
        return tuple(_LoopedProgram(self, loop, device) for device in range(len(self.programs)))

    def with_copies(self, copies: int) -> Plan:
        """The plan of fewer or more micro-batches whose loop runs so often; the predictions are left as they are."""
        loop = self.loop
        assert loop is not None
        if copies == 1:
            return self.written
        number = self.num_written + (copies - 1) * loop.microbatches
        return self.model_copy(update={"num_microbatches": number, "loop": replace(loop, copies=copies)})

    @property
    def num_unrolled(self) -> int:
        """How many actions of stages it has, all of those counted that a loop runs."""
        return self.num_microbatches * len(self.operations)

    def require_few_actions(self, what: str, instead: str) -> None:
        """Refuse to write out more than :data:`MOST_UNROLLED` that a loop runs.

        ``what`` is done with each, and what to do ``instead``. Raises UsageError.
        """
        if self.loop is not None and self.num_unrolled > MOST_UNROLLED:
            raise UsageError(
                f"{what}, and with {self.num_microbatches:,} micro-batches the plan has {self.num_unrolled:,} actions, "
                f"of at most {MOST_UNROLLED:,}; {instead}"
            )

    def unrolled(self) -> Plan:
        """The same plan with everything written that a loop runs; it grows with the number of micro-batches.

        Raises InvalidPlanError where an operation is in no round of the loop.
        """
        loop = self.loop
        if loop is None:
            return self
        starts: dict[str, tuple[int, ...]] = {}
        for id_, written in self.starts_ns.items():
            before, time, first = self._round_of(id_, loop)
            slots, count = self.slots(id_), self.per_round(operation_of(id_)[0])
            begin = slots.number(first.microbatch, first.part) or 0
            round_ = written[begin : begin + count]
            starts[id_] = (
                *(start + before for start in written[:begin]),
                *(start + before + copy * time for copy in range(loop.copies) for start in round_),
                *(start + before + (loop.copies - 1) * time for start in written[begin + count :]),
            )
        programs = tuple(map(tuple, self.whole_programs))
        return self.model_copy(update={"loop": None, "starts_ns": starts, "programs": programs})

    def _round_of(self, id_: str, loop: Loop) -> tuple[int, int, Action]:
        """The round of an operation: how much later than written it is, its time, the operation's first."""
        device, before = self.devices_of(id_)[0], 0
        for each in loop.rounds:
            here = (text for text in self.programs[device][each.begins[device] : each.ends[device]])
            found = [
                action for text in here if text.startswith(id_) and (action := Action.parse(text)).operation == id_
            ]
            if found:
                return before, each.round_ns, min(found, key=lambda action: action.microbatch)
            before += (loop.copies - 1) * each.round_ns
        raise InvalidPlanError(f"device {device} runs {id_} in no round of the loop")

    def per_round(self, stage: int) -> int:
        """How many of its micro-batches a stage runs in a round of the loop."""
        assert self.loop is not None
        return self.loop.microbatches * self.microbatch_size // (self.stages[stage].microbatch_size * self.num_routes)

    @classmethod
    def of_workload(cls, workload: Workload, **rest: Any) -> Plan:
        """A plan that runs a workload; ``rest`` are its other fields."""
        mode: Mode = INFERENCE if workload.is_inference else TRAINING
        return cls(**{each.name: getattr(workload, each.name) for each in fields(workload)}, mode=mode, **rest)

    @property
    def is_inference(self) -> bool:
        """Whether it is of forwards alone."""
        return self.mode == INFERENCE

    @property
    def workload(self) -> Workload:
        """What the plan's programs run, made anew at each call."""
        return Workload(**{each.name: getattr(self, each.name) for each in fields(Workload)})

    @cached_property
    def _operations_of(self) -> dict[int, list[Operation]]:
        """{stage: its operations}"""
        found: dict[int, list[Operation]] = {}
        for each in self.operations:
            found.setdefault(each.stage, []).append(each)
        return found

    @cached_property
    def _by_id(self) -> dict[str, Operation]:
        return {operation.id: operation for operation in self.operations}

    @property
    def placed(self) -> Placement:
        """Where the plan's stages stand, as a placement says it; stages of instructions are not a placement's.

        Raises:
            ValueError: the stages are not ones of a placement, for example because two have a block.
        """
        return Placement(
            strategy=self.placement,
            num_devices=self.num_devices,
            num_routes=self.num_routes,
            stages=tuple(
                PlacedStage(
                    **{
                        name: getattr(stage, name) for name in PlacedStage.model_fields if name not in _PLACED_OTHERWISE
                    },
                    devices=self.group_of(stage),
                    context_exchange=stage.context_exchange
                    if stage.context > 1 or stage.context_exchange == RING
                    else None,
                    expert_shards=stage.expert_shards if stage.expert > 1 else None,
                )
                for stage in self.stages
                if stage.blocks
            ),
        )

    @property
    def token_ns(self) -> Fraction | None:
        """Ns from a request's token to its next one, in steps that repeat; None where the plan has none that do."""
        if self.decode is None or self.repetend is None:
            return None
        return self.repetend.period * self.decode.groups

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of all requests in a second, likewise."""
        token_ns = self.token_ns
        return None if token_ns is None or self.decode is None else float(self.decode.batch * 10**9 / token_ns)

    @property
    def cache_bytes(self) -> tuple[int, ...]:
        """[device] what it has of requests' keys and values at the last step."""
        found = [0] * len(self.devices)
        for stage in self.stages:
            for device in stage.devices:
                found[device] += stage.cached.total
        return tuple(found)

    def held_parameters(self, stage: Stage) -> int:
        """Bytes of parameters as a device has them: of the copy that computes, or of those that are cast to it."""
        cast = self.recipe is not None and self.recipe.name == AUTOCAST
        return stage.state[PARAMETERS] + stage.state[MASTER] * cast

    def group_of(self, stage: Stage) -> tuple[int, ...]:
        """The devices of a stage, replica after replica."""
        return devices_of(self.players, stage.devices) if self.players else stage.devices

    def operation(self, id_: str) -> Operation:
        """The operation with this id, such as ``2F``."""
        return self._by_id[id_]

    def stage_of(self, id_: str) -> Stage:
        """The stage of an operation."""
        return self.stages[operation_of(id_)[0]]

    def devices_of(self, id_: str) -> tuple[int, ...]:
        """The devices an operation runs on, all at once."""
        return self.stage_of(id_).devices

    def slots(self, id_: str) -> Slots:
        """Which samples each written action of an operation holds."""
        written = self.num_written * self.microbatch_size
        return slots_of(self.stage_of(id_), operation_of(id_)[1], written, self.num_routes)

    def num_instances(self, id_: str) -> int:
        """How many written actions an operation has: one per micro-batch, and one more for each in two parts."""
        return len(self.slots(id_))


class _LoopedProgram(Sequence[str]):
    """A device's program with its loop run as often as the plan says; entries are made as they are read."""

    def __init__(self, plan: Plan, loop: Loop, device: int) -> None:
        self._written, self._copies = plan.programs[device], loop.copies
        self._rounds = [(each.begins[device], each.ends[device]) for each in loop.rounds]
        self._plan, self._device = plan, device
        self._end_of = {
            _without_microbatch(Action.parse(text)): end
            for begin, end in self._rounds
            for text in self._written[begin:end]
            if StateAction.read(text) is None
        }

    def __len__(self) -> int:
        return len(self._written) + (self._copies - 1) * sum(end - begin for begin, end in self._rounds)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...

    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        if isinstance(index, slice):
            return tuple(self[number] for number in range(*index.indices(len(self))))
        number = range(len(self))[index]
        for begin, end in self._rounds:
            copy = min((number - begin) // (end - begin), self._copies - 1) if begin < end <= number else 0
            number -= copy * (end - begin)
            if begin <= number < end:
                return self._later(number, copy)
        if StateAction.read(self._written[number]) is not None:  # of no micro-batch
            return self._written[number]
        end = self._end_of.get(_without_microbatch(Action.parse(self._written[number])), len(self._written))
        return self._later(number, self._copies - 1 if number >= end else 0)

    def _later(self, number: int, copies: int) -> str:
        """The entry written there, some copies of its round later."""
        text = self._written[number]
        if not copies or StateAction.read(text) is not None:
            return text
        action = Action.parse(text)
        return str(replace(action, microbatch=action.microbatch + copies * self._plan.per_round(self._made_by(action))))

    def _made_by(self, action: Action) -> int:
        """The stage whose micro-batches an entry counts: a RECV its sender's, or its own where nothing is sent."""
        if action.is_compute or action.sends:
            return action.stage
        if action.peer_stage is not None:
            return action.peer_stage
        senders = (
            each.source_stage
            for each in self._plan.dependencies
            if (each.target_stage, each.payload) == (action.stage, action.payload)
            and any(hop.target_device == self._device for hop in each.hops)
        )
        return next(senders, action.stage)


def _without_microbatch(action: Action) -> Action:
    """What an entry has in common with those of other micro-batches."""
    return replace(action, microbatch=0, part=None)
