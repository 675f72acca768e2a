"""Rules about loops of decode steps: what lets a step begin, and what the profile says of it and of its cache."""

from __future__ import annotations

from pipeplan.checker.facts import Findings
from pipeplan.checker.step_memory import cached_on_each, has_room, said_ways, ways_of
from pipeplan.checker.step_times import Links, chunk_costs_of, links_of, step_ns
from pipeplan.costs.communication import transfer_time
from pipeplan.costs.decoding import bytes_between, phase_costs
from pipeplan.errors import UsageError
from pipeplan.files import Cluster, Plan, Profile
from pipeplan.files.plan import Decode
from pipeplan.texts import counted
from pipeplan.units import format_bytes
from pipeplan.workload.elements import MAX_COUNT, Dependency, Operation, Stage
from pipeplan.workload.kinds import PREFILL

_TOKEN_BYTES = 8


def check_steps(plan: Plan, findings: Findings) -> None:
    """A step begins with its token: F that takes nothing of other stages takes what the last one returned."""
    if plan.decode is None:
        return
    takes = {each.target for each in plan.dependencies if not each.later}
    gives = {each.source for each in plan.dependencies if not each.later}
    returned = {each.target: each.source for each in plan.dependencies if each.later and not each.has_instruction}
    for operation in plan.operations:
        id_ = operation.id
        if id_ in takes or not plan.stages[operation.stage].blocks:
            continue
        if returned.get(id_) is None:
            text = f"{id_} begins a step before the last one has made its token; no entry with later says otherwise"
            findings.add("dependencies", "dependencies", text)
        elif returned[id_] in gives:
            text = f"{id_} takes the token of {returned[id_]}, which is not the last of a step"
            findings.add("dependencies", "dependencies", text)


def of_tokens(profile: Profile) -> Profile:
    """The profile with edges of one token of a sample."""
    edges = (each.model_copy(update={"bytes_per_sample": bytes_between(profile, each, 1)}) for each in profile.edges)
    return profile.model_copy(update={"edges": tuple(edges)})


def check_decode_costs(
    plan: Plan, decode: Decode, profile: Profile, cluster: Cluster | None, findings: Findings, *, timed: bool
) -> None:
    """Times of steps and chunks are what the blocks' rows give, and so are bytes that requests cache on devices.

    What devices of a stage exchange takes time by ``cluster``'s links, which are known if it is ``timed``.
    """
    links = links_of(profile, cluster)
    _check_words(plan, decode, profile, findings)
    for operation in plan.operations:
        if operation.kind == PREFILL:
            _check_chunk(plan, decode, profile, operation, findings)
    for number, stage in enumerate(plan.stages):
        if not stage.blocks:
            continue
        cached = cached_on_each(stage, decode, profile, decode.batch)
        if stage.cached.total != cached:
            text = (
                f"is {stage.cached.total} on each of {counted(len(stage.devices), 'device')}; {decode.batch} requests "
                f"with {decode.context_tokens} tokens cache {cached} bytes ({format_bytes(cached)}) on the fullest"
            )
            findings.add("profile", f"stages[{number}].cache_bytes", text)
        if stage.configurations and not timed:
            continue
        try:
            time = _step_ns(stage, decode, profile, links)
        except UsageError as error:
            findings.add("profile", f"stages[{number}]", str(error))
            continue
        if stage.speed == 1 and plan.operation(f"{number}F").duration_ns != time:
            text = f"is {plan.operation(f'{number}F').duration_ns}, the profile's decode rows give {time}"
            findings.add("profile", f"operations[{number}F].duration_ns", text)


def _check_words(plan: Plan, decode: Decode, profile: Profile, findings: Findings) -> None:
    """How caches are shared is what the stages say, and no more requests fit than it says, and no fewer."""
    ways = said_ways(plan, profile)
    if ways is not None and decode.kv not in ways:
        findings.add(
            "profile", "decode.kv", f"is {decode.kv!r}, its stages share caches by {' or '.join(sorted(ways))}"
        )
    most = decode.max_requests
    if most is None:
        return
    if all(device.usable_bytes is None for device in plan.devices):
        findings.add("profile", "decode.max_requests", f"is {most}, and no device has a memory limit")
    elif not has_room(plan, decode, profile, most):
        findings.add("profile", "decode.max_requests", f"is {most}, for which there is no memory on every device")
    elif most < MAX_COUNT and has_room(plan, decode, profile, most + 1):
        findings.add("profile", "decode.max_requests", f"is {most}, and there is memory for more")


def _check_chunk(plan: Plan, decode: Decode, profile: Profile, operation: Operation, findings: Findings) -> None:
    """A chunk of a prompt as long as texts are by the last step: its time and bytes by the prefill rows."""
    where, number = f"operations[{operation.id}]", operation.attributes.get("stage")
    if not isinstance(number, int) or not 0 <= number < len(plan.stages) or not plan.stages[number].blocks:
        findings.add("profile", f"{where}.stage", f"is {number}, which is no stage with blocks")
        return
    stage, tokens = plan.stages[number], operation.attributes.get("tokens")
    if not isinstance(tokens, int) or tokens != decode.prefill_tokens:
        text = f"is {tokens}, the plan's prefill_tokens are {decode.prefill_tokens}"
        findings.add("profile", f"{where}.tokens", text)
        return
    blocks = [(profile.by_id[name], way.shards) for name, way in zip(stage.blocks, ways_of(stage), strict=True)]
    try:
        time, given, work = chunk_costs_of(blocks, profile, tokens, decode.context_tokens)
    except UsageError as error:
        findings.add("profile", where, str(error))
        return
    expected = {"acquire_bytes": given, "workspace_bytes": work} | ({"duration_ns": time} if stage.speed == 1 else {})
    for key, value in expected.items():
        if getattr(operation, key) != value:
            text = f"is {getattr(operation, key)}, the profile's prefill rows give {value}"
            findings.add("profile", f"{where}.{key}", text)


def _step_ns(stage: Stage, decode: Decode, profile: Profile, links: Links) -> int:
    """A step of the largest group. Raises UsageError where the profile has no rows for it."""
    if stage.configurations:
        return step_ns(stage, decode, profile, links)
    blocks, size = profile.by_id, stage.microbatch_size
    rows = (
        phase_costs(blocks[id_], "decode", size, decode.context_tokens, shards=stage.shards) for id_ in stage.blocks
    )
    return max(1, sum(row.forward_ns for row in rows))


def check_returned(
    plan: Plan, number: int, dependency: Dependency, cluster: Cluster | None, findings: Findings, *, timed: bool
) -> None:
    """A token of every request goes back, and takes its time without keeping a link from others."""
    size = _TOKEN_BYTES * plan.microbatch_size
    for index, hop in enumerate(dependency.hops):
        expected = {"bytes": size}
        if timed:
            expected["latency_ns"] = sum(transfer_time(cluster, hop.source_device, hop.target_device, size))
        for key, value in expected.items():
            if getattr(hop, key) != value:
                text = f"is {getattr(hop, key)}; tokens of {plan.microbatch_size} requests give {value}"
                findings.add("profile", f"dependencies[{number}].hops[{index}].{key}", text)
