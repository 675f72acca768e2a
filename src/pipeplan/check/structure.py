"""Rules about stages, operations, dependencies and hops, whatever the schedule."""

from __future__ import annotations

from pipeplan.check.report import Findings
from pipeplan.model import Dependency, Operation, Plan, payload_of

__all__ = ["check_structure"]

_FULL, _SPLIT = {"F", "B"}, {"F", "I", "W"}
_FEEDS = {"F": "F", "B": "BI", "I": "BI", "W": ""}
"""Kind -> the kinds of other stages that hand something to it."""


def check_structure(plan: Plan, findings: Findings) -> None:
    """Kinds of each stage, memory given back, and dependencies that make sense."""
    by_stage: list[dict[str, Operation]] = [{} for _ in plan.stages]
    for operation in plan.operations:
        by_stage[operation.stage][operation.kind] = operation
    pairs = {(dependency.source, dependency.target) for dependency in plan.dependencies}
    for stage, operations in enumerate(by_stage):
        if set(operations) not in (_FULL, _SPLIT):
            has = ", ".join(operations) or "none"
            findings.add("stages", f"stages[{stage}]", f"has operations {has}; a stage runs F and B, or F, I and W")
        else:
            _check_own_order(stage, operations, pairs, findings)
            _check_balance(stage, operations, findings)
    _check_blocks(plan, findings)
    seen: dict[tuple[str, str], int] = {}
    messages: dict[tuple[int, str, int, int, int], str] = {}
    for number, dependency in enumerate(plan.dependencies):
        pair = dependency.source, dependency.target
        if pair in seen:
            text = f"repeats dependencies[{seen[pair]}], {pair[0]} -> {pair[1]}"
            findings.add("dependencies", f"dependencies[{number}]", text)
            continue
        seen[pair] = number
        _check_dependency(number, *pair, findings)
        _check_hops(plan, number, dependency, messages, findings)


def _check_blocks(plan: Plan, findings: Findings) -> None:
    """Every block is in one stage, once."""
    seen: dict[str, int] = {}
    for number, stage in enumerate(plan.stages):
        for index, block in enumerate(stage.blocks):
            if block in seen:
                place = f"stages[{number}].blocks[{index}]"
                findings.add("stages", place, f"block {block!r} is already in stages[{seen[block]}]")
            seen[block] = number


def _check_own_order(
    stage: int, operations: dict[str, Operation], pairs: set[tuple[str, str]], findings: Findings
) -> None:
    """F before B or I, I before W."""
    kinds = ["F", "I", "W"] if "I" in operations else ["F", "B"]
    for before, after in zip(kinds, kinds[1:], strict=False):
        if (f"{stage}{before}", f"{stage}{after}") not in pairs:
            findings.add(
                "dependencies", "dependencies", f"{stage}{after} must wait for {stage}{before}; no entry says so"
            )


def _check_balance(stage: int, operations: dict[str, Operation], findings: Findings) -> None:
    """What a micro-batch takes it gives back, and never more than it holds (design section 5)."""
    held = 0
    for kind in ("F", "B", "I", "W"):
        if kind not in operations:
            continue
        operation = operations[kind]
        held += operation.acquire_bytes - operation.release_bytes
        if held < 0:
            text = f"gives back {-held} bytes more than a micro-batch of stage {stage} holds then"
            findings.add("balance", f"operations[{operation.id}]", text)
            return
    if held:
        text = f"a micro-batch keeps {held} bytes for ever: what its operations acquire and release must be equal"
        findings.add("balance", f"stages[{stage}]", text)


def _check_dependency(number: int, source: str, target: str, findings: Findings) -> None:
    """Outputs feed forwards, gradients feed backwards."""
    if source[:-1] == target[:-1]:
        allowed = source[-1] + target[-1] in ("FB", "FI", "IW")
    else:
        allowed = source[-1] in _FEEDS[target[-1]]
    if not allowed:
        text = (
            f"{source} -> {target} makes no sense: F waits for F, B and I wait for their stage's F and for B or I "
            "of others, W waits for its stage's I"
        )
        findings.add("dependencies", f"dependencies[{number}]", text)


def _check_hops(
    plan: Plan,
    number: int,
    dependency: Dependency,
    messages: dict[tuple[int, str, int, int, int], str],
    findings: Findings,
) -> None:
    """Every target device holds what it needs or gets it by a hop, and no two messages look the same."""
    sources, targets = plan.devices_of(dependency.source), plan.devices_of(dependency.target)
    reached = {hop.target_device for hop in dependency.hops}
    for device in sorted(set(targets) - set(sources) - reached):
        text = (
            f"{dependency.target} runs on device {device}, where {dependency.source} does not; a hop to it is missing"
        )
        findings.add("hops", f"dependencies[{number}].hops", text)
    if dependency.source[-1] == "W":  # refused above; it has nothing to send
        return
    payload = payload_of(dependency.source[-1])
    ends = int(dependency.source[:-1]), payload, int(dependency.target[:-1])
    for index, hop in enumerate(dependency.hops):
        place = f"dependencies[{number}].hops[{index}]"
        if hop.source_device == hop.target_device:
            findings.add("hops", place, f"joins device {hop.source_device} to itself, where a transfer is free")
        key = (*ends, hop.source_device, hop.target_device)
        if key in messages:
            text = f"sends {payload} of stage {ends[0]} to stage {ends[2]} on the same devices as {messages[key]}"
            findings.add("hops", place, text)
        messages[key] = place
