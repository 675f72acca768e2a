"""Rules about loops of decode steps: what lets a step begin, and what the profile says of it and of its cache."""

from __future__ import annotations

from pipeplan.checker.facts import Findings
from pipeplan.checker.step_times import Links, links_of, step_ns
from pipeplan.costs.communication import transfer_time
from pipeplan.costs.decoding import bytes_between, cached_bytes, phase_costs
from pipeplan.errors import UsageError
from pipeplan.files import Cluster, Plan, Profile
from pipeplan.files.plan import Decode
from pipeplan.units import format_bytes
from pipeplan.workload.elements import Dependency, Stage

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
    """Times of steps are what the blocks' decode rows give, and all that requests cache is on some device.

    What devices of a stage exchange takes time by ``cluster``'s links, which are known if it is ``timed``.
    """
    blocks, links = profile.by_id, links_of(profile, cluster)
    for number, stage in enumerate(plan.stages):
        own = [blocks[name] for name in stage.blocks]
        if not own:
            continue
        whole = decode.batch * sum(cached_bytes(block, decode.context_tokens) for block in own)
        if stage.cached.total * len(stage.devices) < whole:
            text = (
                f"is {stage.cached.total} on each of {len(stage.devices)} devices; {decode.batch} requests with "
                f"{decode.context_tokens} tokens cache {whole} bytes ({format_bytes(whole)}) in its blocks"
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
