"""Rules about stages, operations, dependencies and hops, whatever the schedule."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection

from pipeplan.checker.decoding import check_steps
from pipeplan.checker.facts import Findings, copies_of, deliveries_of, goes_with, one_place, period_of, shares_evenly
from pipeplan.checker.forwards import check_gives_back
from pipeplan.files import Plan
from pipeplan.files.placement import configuration_problem
from pipeplan.time_limit import checked
from pipeplan.workload.elements import Dependency, Operation, context_problem
from pipeplan.workload.kinds import BACKWARD_ROLES, COMPUTE_KINDS, FORWARDS, PASSES, Role, in_order, role_of

_FOLLOWS = {pair for each in PASSES for pair in itertools.pairwise(each)}
_FEEDS = {Role.FORWARD: (Role.FORWARD,), Role.BACKWARD: BACKWARD_ROLES, Role.INPUT_GRAD: BACKWARD_ROLES}
"""Role -> the roles of other stages that hand something to it."""

_Seen = dict[tuple[int, str, int, int, int], str]
"""{(source stage, payload, target stage, source device, target device): place of the hop}."""


def check_structure(plan: Plan, findings: Findings) -> None:
    """Kinds of each stage, memory given back, and dependencies that make sense."""
    by_stage: list[dict[str, Operation]] = [{} for _ in plan.stages]
    for operation in plan.operations:
        by_stage[operation.stage][operation.kind] = operation
    pairs = {(dependency.source, dependency.target) for dependency in plan.dependencies}
    for stage, operations in enumerate(by_stage):
        if _check_kinds(plan, stage, operations, findings):
            _check_own_order(stage, operations, pairs, findings)
            if not plan.is_inference:
                _check_balance(stage, operations, findings)
    if plan.is_inference:
        check_gives_back(plan, findings)
    check_steps(plan, findings)
    _check_shares(plan, findings)
    _check_blocks(plan, findings)
    _check_dependencies(plan, findings)


def _check_kinds(plan: Plan, stage: int, operations: dict[str, Operation], findings: Findings) -> bool:
    """A stage with blocks runs F and B, or F, I and W, and of inference F alone; one without runs an instruction."""
    roles = tuple(operations[kind].role for kind in in_order(operations))
    instruction = not plan.stages[stage].blocks
    passes = ((Role.CUSTOM,),) if instruction else (FORWARDS,) if plan.is_inference else PASSES
    if roles in passes:
        return True
    text = "a stage without blocks runs one instruction"
    if not instruction:
        text = f"a stage of {plan.mode} runs {', or '.join(map(_named, passes))}"
    findings.add("stages", f"stages[{stage}]", f"has operations {', '.join(operations) or 'none'}; {text}")
    return False


def _named(roles: tuple[Role, ...]) -> str:
    """The kinds that play these roles, as text: ``F, I and W``."""
    *others, last = (kind for role in roles for kind in COMPUTE_KINDS if role_of(kind) is role)
    return " and ".join([", ".join(others), last]) if others else last


def _check_dependencies(plan: Plan, findings: Findings) -> None:
    """None twice, each between operations that go together, its hops bringing what is needed."""
    seen: dict[tuple[str, str], int] = {}
    messages: _Seen = {}
    for number, dependency in checked(enumerate(plan.dependencies), 16):
        pair = dependency.source, dependency.target
        if pair in seen:
            text = f"repeats dependencies[{seen[pair]}], {pair[0]} -> {pair[1]}"
            findings.add("dependencies", f"dependencies[{number}]", text)
            continue
        seen[pair] = number
        _check_dependency(plan, number, *pair, findings)
        _check_ends(number, dependency, messages, findings)
        if dependency.payload:
            _check_deliveries(plan, number, dependency, findings)
            _check_slices(plan, number, dependency, findings)


def _check_shares(plan: Plan, findings: Findings) -> None:
    """Replicas share each micro-batch's samples evenly, and so do the devices of each configuration.

    Sequences are in as many parts on all stages.
    """
    configured = (bool(stage.configurations) for stage in plan.stages)
    if problem := context_problem((stage.context for stage in plan.stages), configured):
        findings.add("stages", "stages", problem)
    for number, stage in enumerate(plan.stages):
        if not shares_evenly(stage):
            text = f"is {stage.microbatch_size}, which its {stage.replicas} replicas cannot share evenly"
            findings.add("stages", f"stages[{number}].microbatch_size", text)
        samples = stage.microbatch_size // stage.replicas // (2 if stage.num_parted else 1)
        samples = samples if plan.decode is None else 0  # requests of a step need not come out even
        if problem := configuration_problem(stage.configurations, len(stage.blocks), stage.shards, samples):
            findings.add("stages", f"stages[{number}].configurations", problem)


def _check_blocks(plan: Plan, findings: Findings) -> None:
    """Every block is in one stage of each route, once."""
    seen: dict[tuple[int, str], int] = {}
    first: dict[str, int] = {}
    for number, stage in enumerate(plan.stages):
        for other in sorted({first.setdefault(block, number) for block in stage.blocks}):
            if (others := _divided(plan, other)) != (own := _divided(plan, number)):
                text = f"divides state by {own}, stages[{other}] with some of its blocks by {others}"
                findings.add("stages", f"stages[{number}].zero", text)
        for index, block in enumerate(stage.blocks):
            key = stage.route, block
            if key in seen:
                place = f"stages[{number}].blocks[{index}]"
                findings.add("stages", place, f"block {block!r} is already in stages[{seen[key]}]")
            seen[key] = number
    _check_routes(plan, set(seen), findings)


def _divided(plan: Plan, number: int) -> str:
    """What the replicas of a stage divide: nothing where each has a copy of its own."""
    stage = plan.stages[number]
    group = stage.zero_group or stage.copies
    each = f", {stage.expert_shards} for each" if stage.expert_shards > 1 else ""
    experts = f", experts over {stage.expert} devices{each}" if stage.expert > 1 else ""
    return (f"zero {stage.zero} over {group} replicas" if stage.zero and group > 1 else "zero 0") + experts


def _check_routes(plan: Plan, placed: set[tuple[int, str]], findings: Findings) -> None:
    """All routes have the same blocks and one micro-batch size; ``placed`` are the pairs of route and block."""
    size = plan.stages[0].microbatch_size
    for number, stage in enumerate(plan.stages):
        if plan.num_routes > 1 and stage.microbatch_size != size:
            text = f"is {stage.microbatch_size}, that of stages[0] {size}; with several routes all must have one"
            findings.add("stages", f"stages[{number}].microbatch_size", text)
    routes = {route for route, _ in placed}
    unused = next((route for route in range(plan.num_routes) if route not in routes), None)
    if unused is not None:
        findings.add("stages", "num_routes", f"is {plan.num_routes}, but no stage is on route {unused}")
    for route, block in sorted(set(itertools.product(routes, {block for _, block in placed})) - placed):
        text = f"block {block!r} is in no stage of route {route}; every route has all blocks"
        findings.add("stages", "stages", text)


def _check_own_order(
    stage: int, operations: dict[str, Operation], pairs: set[tuple[str, str]], findings: Findings
) -> None:
    """F before B or I, I before W, which are listed so, too."""
    ordered = in_order(operations)
    if (listed := list(operations)) != ordered:
        text = f"has {', '.join(listed)} in this order; a stage's are listed as they run: {', '.join(ordered)}"
        findings.add("stages", f"stages[{stage}]", text)
    for before, after in itertools.pairwise(ordered):
        if (f"{stage}{before}", f"{stage}{after}") not in pairs:
            findings.add(
                "dependencies", "dependencies", f"{stage}{after} must wait for {stage}{before}; no entry says so"
            )


def _check_balance(stage: int, operations: dict[str, Operation], findings: Findings) -> None:
    """What a micro-batch takes it gives back, and never more than it holds."""
    held = 0
    for kind in in_order(operations):
        operation = operations[kind]
        held += operation.acquire_bytes - operation.release_bytes
        if held < 0:
            text = f"gives back {-held} bytes more than a micro-batch of stage {stage} holds then"
            findings.add("balance", f"operations[{operation.id}]", text)
            return
    if held:
        text = f"a micro-batch keeps {held} bytes for ever: what its operations acquire and release must be equal"
        findings.add("balance", f"stages[{stage}]", text)


def _check_dependency(plan: Plan, number: int, source: str, target: str, findings: Findings) -> None:
    """Outputs feed forwards, gradients feed backwards, between stages of one route."""
    dependency = plan.dependencies[number]
    roles = dependency.source_role, dependency.target_role
    if dependency.has_instruction:
        allowed = True
    elif dependency.later:
        allowed = roles == (Role.FORWARD, Role.FORWARD)
    elif dependency.source_stage == dependency.target_stage:
        allowed = roles in _FOLLOWS
    else:
        allowed = roles[0] in _FEEDS.get(roles[1], ())
    routes = [plan.stage_of(id_).route for id_ in (source, target)]
    if routes[0] != routes[1] and dependency.needs is None:
        text = f"{source} -> {target} joins route {routes[0]} to route {routes[1]}, which have no sample in common"
        findings.add("dependencies", f"dependencies[{number}]", text)
    if not allowed:
        text = (
            f"{source} -> {target} makes no sense: F waits for F, B and I wait for their stage's F and for B or I "
            "of others, W waits for its stage's I"
        )
        findings.add("dependencies", f"dependencies[{number}]", text)


def _check_ends(number: int, dependency: Dependency, messages: _Seen, findings: Findings) -> None:
    """No hop goes nowhere, and no two of the plan have the same ends, so that messages can be distinguished."""
    payload = dependency.payload
    if dependency.hops and not payload:
        findings.add("hops", f"dependencies[{number}].hops", f"{dependency.source} makes nothing to send")
    ends = dependency.source_stage, payload, dependency.target_stage
    for index, hop in enumerate(dependency.hops):
        place = f"dependencies[{number}].hops[{index}]"
        if hop.source_device == hop.target_device:
            findings.add("hops", place, f"joins device {hop.source_device} to itself, where a transfer is free")
        key = (*ends, hop.source_device, hop.target_device)
        if key in messages:
            text = f"sends {payload} of stage {ends[0]} to stage {ends[2]} on the same devices as {messages[key]}"
            findings.add("hops", place, text)
        messages[key] = place


def _check_deliveries(plan: Plan, number: int, dependency: Dependency, findings: Findings) -> None:
    """Every device of the target gets just the samples it works on and did not make itself, each from one device."""
    source, target = plan.stage_of(dependency.source), plan.stage_of(dependency.target)
    same_samples = source.microbatch_size == target.microbatch_size or plan.num_routes == 1
    if source.context != target.context:  # refused among stages
        return
    if source.route != target.route or not (same_samples and shares_evenly(source) and shares_evenly(target)):
        return
    source, target = (one_place(stage, plan.players_each) for stage in (source, target))
    needed, period, makers = deliveries_of(source, target), period_of(source, target), copies_of(source)
    brought: dict[tuple[int, int], str] = {}
    for index, hop in enumerate(dependency.hops):
        place = f"dependencies[{number}].hops[{index}]"
        key = hop.target_device, makers[hop.source_device]
        if key in brought:
            findings.add("hops", place, f"brings device {hop.target_device} what {brought[key]} brings it")
        elif key not in needed:
            text = f"brings device {hop.target_device} nothing that it works on and did not make itself"
            findings.add("hops", place, text)
        elif not goes_with(hop, needed[key], period):
            text = f"must go with micro-batches {_some(needed[key])} of every {period}, which device {key[0]} works on"
            findings.add("hops", place, text)
        brought.setdefault(key, place)
    if dependency.has_instruction:  # it brings what it needs, and what others take of it, itself
        return
    for device, copy in sorted(set(needed) - set(brought)):
        devices = " or ".join(map(str, source.devices[copy * source.shards : (copy + 1) * source.shards]))
        text = f"{dependency.target} on device {device} works on samples made on device {devices}; a hop is missing"
        findings.add("hops", f"dependencies[{number}].hops", text)


def _check_slices(plan: Plan, number: int, dependency: Dependency, findings: Findings) -> None:
    """Every device of the target is sent its slice by one that has it, or whose neighbours have the rest of it."""
    source, target = plan.stage_of(dependency.source), plan.stage_of(dependency.target)
    place = f"dependencies[{number}]"
    if dependency.slices == 1:
        return
    if dependency.has_instruction or source is target or source.configurations or target.configurations:
        text = f"is {dependency.slices}, and only stages that split all blocks by shards send each other slices"
        findings.add("hops", f"{place}.slices", text)
        return
    if dependency.slices != target.shards:
        text = f"is {dependency.slices}, but {target.shards} devices split the blocks of {dependency.target}"
        findings.add("hops", f"{place}.slices", text)
        return
    common = math.gcd(source.shards, target.shards)
    held, taken = (
        {device: index % stage.shards * common // stage.shards for index, device in enumerate(stage.devices)}
        for stage in (source, target)
    )
    for index, hop in enumerate(dependency.hops):
        if held[hop.source_device] != taken[hop.target_device]:
            text = f"brings device {hop.target_device} a slice that device {hop.source_device} does not have"
            findings.add("hops", f"{place}.hops[{index}]", text)
    for device in sorted(held.keys() & taken.keys()):
        if held[device] != taken[device]:
            text = (
                f"is {dependency.slices}, but device {device}, which has both stages, has another slice than it takes"
            )
            findings.add("hops", f"{place}.slices", text)
            return


def _some(numbers: Collection[int]) -> str:
    """The first of them, as text."""
    return ", ".join([*map(str, sorted(numbers)[:8]), *(["..."] if len(numbers) > 8 else [])])
