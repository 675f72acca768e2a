"""The workload of a plan with other costs: another profile, another cluster. Stages and orders stay."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from pydantic import ValidationError

from pipeplan.costs import build_workload, transfer_time, with_recipe, with_syncs
from pipeplan.costs.buckets import gathered_beside
from pipeplan.costs.communication import contention_of_sums
from pipeplan.costs.context import of_stages
from pipeplan.costs.late_inputs import with_late_inputs
from pipeplan.costs.launches import with_launches
from pipeplan.costs.trees import MessageCrowds, linked_alike, with_shared_uplinks
from pipeplan.costs.wide_groups import GroupSizes, groups_at
from pipeplan.costs.zero import IN_ACTIONS, Zero
from pipeplan.errors import UsageError
from pipeplan.files import Cluster, Placement, Plan, Profile, Recipe
from pipeplan.files.folded import folded_workload, in_place_0, unfolded
from pipeplan.workload.elements import Dependency, Device, Hop, Operation, Players, Stage
from pipeplan.workload.folding import Fold, of_devices
from pipeplan.workload.kinds import Role, is_instruction
from pipeplan.workload.steady_state.pace import at_own_pace
from pipeplan.workload.workload import Workload

_Variant = bool
"""Whether backward is split."""
_Message = tuple[int, str, int]  # source stage, payload, target stage


def with_costs_of(plan: Plan, profile: Profile | None, cluster: Cluster | None) -> tuple[Plan, Workload]:
    """A plan and its work, with what a profile says of it and a cluster of its links, where they are given.

    A folded plan stays so, unless its devices would no longer be alike. Raises UsageError as the functions below.
    """
    if profile is None and cluster is None:
        return plan, plan.workload
    folded = _costed(plan, profile, cluster) if plan.players else None
    if folded is not None:
        return plan, folded
    devices = unfolded(plan)
    workload = _costed(devices, profile, cluster)
    assert workload is not None, "it has a program for each device"
    found = folded_workload(workload, plan.players_each) if plan.players else workload
    return (plan, found) if found.players == plan.players else (devices, workload)


def _costed(plan: Plan, profile: Profile | None, cluster: Cluster | None) -> Workload | None:
    """The same, in which stages that keep a pace have that of their new costs; None of what is no longer folded."""
    found = _with_costs(plan, profile, cluster)
    return at_own_pace(found, plan.workload) if found is not None and plan.workload.paced else found


def _with_costs(plan: Plan, profile: Profile | None, cluster: Cluster | None) -> Workload | None:
    """The work of a plan on the programs that it has; None where their players would no longer be alike."""
    if profile is not None:
        return _recosted(plan, profile, cluster)
    assert cluster is not None
    return relinked(plan, cluster) if not plan.players else _relinked_programs(plan, cluster)


def _relinked_programs(plan: Plan, cluster: Cluster) -> Workload | None:
    """As :func:`relinked` of a folded plan, by one player of each program."""
    fold = Fold(plan.players, plan.players_each)
    found = _each_alone(in_place_0(plan), cluster)
    tied = [fold.tied(each) for each in found.tied]
    firsts = [found.devices[own.first] for own in plan.players]
    pairs = ((hop.source_device, hop.target_device) for each in plan.dependencies for hop in each.hops)
    if (
        not linked_alike(fold, pairs, cluster)
        or None in tied
        or any(found.devices[d] != firsts[program] for d, program in fold.programs.items())
    ):
        return None
    return replace(
        found,
        devices=tuple(firsts),
        stages=tuple(map(fold.stage, found.stages)),
        tied=tuple(each for each in tied if each is not None),
        dependencies=with_shared_uplinks(
            [replace(each, hops=tuple(map(fold.hop, each.hops))) for each in found.dependencies], cluster, plan.players
        ),
        players=plan.players,
    )


def recosted(plan: Plan, profile: Profile, cluster: Cluster | None) -> Workload:
    """The plan's stages with a profile's times, and sizes by its own recipe; links are the cluster's, or cost nothing.

    Raises:
        UsageError: the profile does not have the plan's blocks, or no costs for what the plan does with them, or
            cannot have its recipe.
    """
    found = _recosted(plan, profile, cluster)
    assert found is not None, "what is not folded has a program for each device"
    return found


def _recosted(plan: Plan, profile: Profile, cluster: Cluster | None) -> Workload | None:
    """The same; None of a folded plan whose programs would be others, or played by others."""
    if plan.decode is not None:
        raise UsageError(
            "--profile: what decode steps take depends on how devices share the cache, which a search decides; search "
            "a plan of this profile with --kv"
        )
    placement = _placement(plan, profile)
    _require_kinds(plan, profile)
    if plan.recipe is not None:
        profile = with_recipe(profile, plan.recipe)
    profile = with_launches(of_stages(profile, placement.stages), plan.launch_overhead_ns)
    built = _Built(plan, profile, placement, cluster)
    if built.players != {plan.players}:
        return None
    devices = built.any.devices if cluster is not None else plan.devices
    return replace(
        plan.workload,
        devices=devices,
        stages=tuple(built.stage(index) for index in range(len(plan.stages))),
        operations=tuple(built.operation(operation) for operation in plan.operations),
        dependencies=tuple(built.dependency(index) for index in range(len(plan.dependencies))),
        tied=built.any.tied,
    )


def relinked(plan: Plan, cluster: Cluster) -> Workload:
    """The plan's work on the devices and links of another cluster.

    A plan does not distinguish a fixed latency of the profile from one of the cluster: messages without bytes keep
    their times, others get the cluster's. With the profile, fixed latencies stay.

    Raises:
        UsageError: the cluster has fewer devices than the plan, or a stage has configurations or exchanges state in
            its actions.
    """
    found = _each_alone(plan, cluster)
    return replace(found, dependencies=with_shared_uplinks(found.dependencies, cluster))


def _each_alone(plan: Plan, cluster: Cluster) -> Workload:
    """The same, where no message shares uplinks with others."""
    _require_devices(plan, cluster)
    _require_no_configurations(plan, "--cluster")
    _require_no_exchanges(plan)
    _require_no_shared_experts(plan)
    _require_inside_nodes(plan, cluster)
    _require_as_fast(plan, cluster)
    names = [kind.name for kind in cluster.devices for _ in range(kind.count)]
    memory, reserve = cluster.memory_bytes, cluster.reserve_bytes
    contention = contention_of_sums(cluster, plan.stages)
    stages, tied = with_syncs(plan.stages, plan.tied, plan.recipe or Recipe(), cluster)
    if cluster.overlap == "all":
        stages = gathered_beside(stages, plan.operations, contention)
    return replace(
        plan.workload,
        devices=tuple(
            Device(name=names[d], memory_bytes=memory[d], reserve_bytes=reserve[d], contention=contention)
            for d in range(len(plan.devices))
        ),
        stages=tuple(stages),
        tied=tuple(tied),
        dependencies=tuple(
            replace(
                dependency,
                hops=tuple(_relinked_hop(hop, cluster, beside=dependency.later > 0) for hop in dependency.hops),
            )
            for dependency in plan.dependencies
        ),
    )


def _relinked_hop(hop: Hop, cluster: Cluster, *, beside: bool = False) -> Hop:
    """A message over the cluster's link; ``beside`` others, as the few bytes that return in a decoding loop are."""
    if hop.bytes == 0:
        return hop
    latency, occupancy = transfer_time(cluster, hop.source_device, hop.target_device, hop.bytes)
    if beside:
        latency, occupancy = latency + occupancy, 0
    return replace(hop, latency_ns=latency, occupancy_ns=occupancy)


def _require_devices(plan: Plan, cluster: Cluster) -> None:
    if cluster.num_devices < len(plan.devices):
        raise UsageError(
            f"cluster {cluster.name!r} has {cluster.num_devices} devices, the plan uses {len(plan.devices)}; "
            "give a larger --cluster, or search for a plan for this one"
        )


def _placement(plan: Plan, profile: Profile) -> Placement:
    """The plan's stages as a placement that the profile accepts."""
    try:
        placement = plan.placed
        said = zip(placement.stages, plan.stages, strict=False)  # of each block, as in the plan
        stages = tuple(each.model_copy(update={"recompute": stage.again}) for each, stage in said)
        placement = placement.model_copy(update={"stages": stages})
        profile.check_placement(placement)
    except ValueError as error:
        first = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        text = first.removeprefix("Value error, ").replace("placement", "the plan's placement", 1)
        raise UsageError(
            f"profile {profile.name!r} does not fit the plan: {text}; give the --profile of the model the plan "
            "was searched for, or search for a plan for this one"
        ) from None
    _require_no_configurations(plan, "--profile")
    return placement


def _require_no_configurations(plan: Plan, flag: str) -> None:
    """What devices exchange inside stages with configurations is in their times: neither is worked out anew."""
    for index, stage in enumerate(plan.stages):
        if used := stage.configuration or next(iter(stage.configurations), None):
            raise UsageError(
                f"stages[{index}] of the plan has configuration {used!r}; plans with configurations "
                f"are simulated with their own costs: leave out {flag}"
            )


def _require_no_shared_experts(plan: Plan) -> None:
    """How much of a stage's gradients is of experts, which others sum, only the profile says. Raises UsageError."""
    if (number := next((n for n, stage in enumerate(plan.stages) if stage.expert > 1), None)) is not None:
        raise UsageError(
            f"{plan.stages[number].expert} devices of stages[{number}] of the plan share experts, and which of its "
            "gradients those are only the profile says; give --profile, too"
        )


def _require_inside_nodes(plan: Plan, cluster: Cluster) -> None:
    """What devices in several nodes that split blocks or share sequences send, only the profile says.

    Raises UsageError.
    """
    for number, stage in enumerate(plan.stages):
        if groups_at(cluster, stage.devices, GroupSizes.of(stage)) is not None:
            raise UsageError(
                f"{GroupSizes.of(stage).width} devices of stages[{number}] of the plan split blocks or share sequences "
                f"in several nodes of {cluster.levels[0].group_size}, and what they send each other only the profile "
                "says; give --profile, too"
            )


def _require_kinds(plan: Plan, profile: Profile) -> None:
    """A plan made from several profiles is timed by as many. Raises UsageError."""
    if lacking := sorted(set(plan.provenance.profiles) - set(profile.of_kinds)):
        raise UsageError(
            f"the plan was made with a profile for devices called {lacking[0]!r}; give one, too: "
            f"--profile-for {lacking[0]}=FILE"
        )


def _require_as_fast(plan: Plan, cluster: Cluster) -> None:
    """How long actions take at another speed only the profile says: its rows are rounded one by one."""
    for index, stage in enumerate(plan.stages):
        speed = min(cluster.speeds[device] for device in stage.devices)
        names = sorted({cluster.names[device] for device in stage.devices})
        if stage.kinds and names != sorted(stage.kinds):
            raise UsageError(
                f"stages[{index}] of the plan is on devices called {', '.join(stage.kinds)}, in cluster "
                f"{cluster.name!r} they are {', '.join(names)}, and what its actions take there only profiles say; "
                "give --profile and --profile-for, too"
            )
        if speed != stage.speed:
            raise UsageError(
                f"stages[{index}] of the plan is on devices of speed {stage.speed:g}, in cluster {cluster.name!r} they "
                f"have {speed:g}, and what its actions take there only the profile says; give --profile, too"
            )


def _require_no_exchanges(plan: Plan) -> None:
    """What replicas exchange block by block is in the times of actions, which only the profile has without it."""
    for index, stage in enumerate(plan.stages):
        if Zero.of(stage).level >= IN_ACTIONS:
            raise UsageError(
                f"stages[{index}] of the plan has zero {stage.zero}, and the times of its actions have what replicas "
                "exchange of each block; give --profile as well, or leave out --cluster"
            )


class _Built:
    """Workloads of a profile under the plan's placement, with each stage's backward whole and split."""

    def __init__(self, plan: Plan, profile: Profile, placement: Placement, cluster: Cluster | None) -> None:
        self._plan, self._name, self._cluster = plan, profile.name, cluster
        split = {operation.stage for operation in plan.operations if operation.role is Role.INPUT_GRAD}
        self._variant_of: list[_Variant] = [index in split for index in range(len(plan.stages))]
        self._workloads: dict[_Variant, Workload] = {}
        speeds, on_devices = plan.device_speeds, of_devices(plan.players, plan.devices)
        for variant in dict.fromkeys(self._variant_of):
            built = build_workload(
                profile,
                placement,
                num_microbatches=plan.num_microbatches,
                microbatch_size=plan.microbatch_size,
                split_backward=variant,
                split_overhead_ns=plan.split_overhead_ns,
                cluster=cluster,
                memory_bytes=None if cluster else [device.memory_bytes for device in on_devices],
                reserve_bytes=None if cluster else [device.reserve_bytes for device in on_devices],
                speeds=None if cluster else speeds,
                names=None if cluster else [device.name for device in on_devices],
                whole_messages=any(not stage.blocks for stage in plan.stages),
                fold_least=plan.players_each if plan.players else 0,
            )
            cuts = [stage.cuts for stage in plan.stages if stage.blocks]
            self._workloads[variant] = with_late_inputs(profile, built, cluster, cuts) if any(cuts) else built
        self.any = next(iter(self._workloads.values()))
        self._operations = {v: {op.id: op for op in w.operations} for v, w in self._workloads.items()}
        self._between = {v: _between(w.dependencies) for v, w in self._workloads.items()}

    @property
    def players(self) -> set[tuple[Players, ...]]:
        """Who plays which program in the workloads."""
        return {workload.players for workload in self._workloads.values()}

    def stage(self, index: int) -> Stage:
        """A stage with the profile's state; one of instructions has none."""
        if not self._plan.stages[index].blocks:
            return self._plan.stages[index]
        built = self._workloads[self._variant_of[index]].stages[index]
        stage = self._plan.stages[index].with_state(built.state)
        buckets = built.buckets if stage.buckets else ()
        groups = [[each.blocks for each in those.block_groups] for those in (stage, built)]
        if groups[0] != groups[1]:
            said, own = (", ".join(map(str, each)) for each in groups)
            raise UsageError(
                f"stages[{index}] of the plan exchanges state in groups of {said} blocks, and costs of profile "
                f"{self._name!r} are of groups of {own}; leave out --profile and --cluster, or search for a plan anew"
            )
        return replace(
            stage,
            whole_gradient_bytes=built.whole_gradient_bytes,
            sync_ns=built.sync_ns,
            step_ns=built.step_ns,
            gather_ns=built.gather_ns,
            buckets=buckets,
            block_groups=built.block_groups,
            speed=built.speed,
            kinds=built.kinds,
        )

    def operation(self, operation: Operation) -> Operation:
        """An operation with the profile's time and memory; a profile knows nothing of instructions."""
        if is_instruction(operation.kind):
            return operation
        found = self._operations[self._variant_of[operation.stage]].get(operation.id)
        if found is None:
            raise UsageError(
                f"the plan runs {operation.id} on stage {operation.stage}, for which profile {self._name!r} has no "
                "costs (input_grad_ns and weight_grad_ns); profile it again, or search with --split-backward no"
            )
        return found

    def dependency(self, index: int) -> Dependency:
        """A dependency with the profile's bytes; what stays on one device has none."""
        dependency = self._plan.dependencies[index]
        if dependency.has_instruction:
            return self._relinked(dependency)
        message = _message(dependency)
        between = self._between[self._variant_of[message[0]]]
        if message[0] != message[2] and message not in between:
            raise UsageError(
                f"dependencies[{index}] of the plan hands {dependency.source} to {dependency.target}, but profile "
                f"{self._name!r} has no such edge between their blocks"
            )
        found = between.get(message)
        return dependency if found is None else replace(dependency, hops=found.hops, slices=found.slices)

    def _relinked(self, dependency: Dependency) -> Dependency:
        """A dependency of an instruction keeps its bytes and gets the cluster's times, where there is one."""
        if self._cluster is None:
            return dependency
        hops = tuple(_relinked_hop(hop, self._cluster) for hop in dependency.hops)
        crowds = (
            MessageCrowds(self._cluster, self.any.dependencies, self.any.players) if self._cluster.is_tree else None
        )
        return replace(dependency, hops=hops if crowds is None else tuple(map(crowds.shared, hops)))


def _between(dependencies: Iterable[Dependency]) -> dict[_Message, Dependency]:
    return {_message(d): d for d in dependencies if d.source_stage != d.target_stage}


def _message(dependency: Dependency) -> _Message:
    return dependency.source_stage, dependency.payload, dependency.target_stage
