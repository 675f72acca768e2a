"""Rules about memory (design section 5): what each device holds while each of its actions runs."""

from __future__ import annotations

from pipeplan.check.facts import Facts
from pipeplan.check.programs import Entry, Programs
from pipeplan.check.report import Findings
from pipeplan.model import DeviceMemory

__all__ = ["check_memory"]


def check_memory(facts: Facts, programs: Programs, findings: Findings) -> tuple[int, ...]:
    """Every device stays within its memory and its predicted parts are right; returns the peaks [device] in bytes.

    An action takes ``acquire_bytes`` at its start and gives ``release_bytes`` back at its end, a part of a forward
    takes half; workspace is held while it runs. A device runs one action at a time, so all follows from its order.
    Call it with complete programs only.
    """
    static = _static(facts)
    peaks: list[int] = []
    for device, entries in enumerate(programs.compute):
        levels = _levels(facts, entries)
        highest = max(levels, default=0)
        parameter, gradient, optimizer = static[device]
        base = parameter + gradient + optimizer
        _check_limit(facts, programs, device, base, levels, findings)
        workspace = 0
        if highest > 0:
            operation = entries[levels.index(highest)][0]  # the first moment of the peak
            workspace = facts.plan.operations[operation].workspace_bytes
        parts = {
            "parameter_bytes": parameter,
            "gradient_bytes": gradient,
            "optimizer_bytes": optimizer,
            "activation_bytes": highest - workspace,
            "workspace_bytes": workspace,
            "peak_bytes": base + highest,
        }
        _check_parts(device, facts.plan.predicted.memory[device], parts, findings)
        peaks.append(base + highest)
    return tuple(peaks)


def _static(facts: Facts) -> list[tuple[int, int, int]]:
    """Parameters, gradients and optimizer state [device]."""
    static = [(0, 0, 0)] * len(facts.plan.devices)
    for stage in facts.plan.stages:
        for device in stage.devices:
            parameter, gradient, optimizer = static[device]
            static[device] = (
                parameter + stage.parameter_bytes,
                gradient + stage.gradient_bytes,
                optimizer + stage.optimizer_bytes,
            )
    return static


def _levels(facts: Facts, entries: list[Entry]) -> list[int]:
    """Activations and workspace while each action runs [action], in bytes."""
    effects = [(operation.release_bytes, operation.workspace_bytes) for operation in facts.plan.operations]
    held, levels = 0, []
    for operation, number in entries:
        release, workspace = effects[operation]
        held += facts.acquired(operation, number)
        levels.append(held + workspace)
        held -= release
    return levels


def _check_limit(
    facts: Facts, programs: Programs, device: int, base: int, levels: list[int], findings: Findings
) -> None:
    limit = facts.plan.devices[device].memory_bytes
    if limit is None:
        return
    over = [index for index, level in enumerate(levels) if base + level > limit]
    if over:
        entry = programs.compute[device][over[0]]
        place = f"programs[{device}][{programs.where[device][entry]}] ({facts.label(*entry)})"
        text = (
            f"device {device} holds {base + levels[over[0]]} bytes, {base + levels[over[0]] - limit} more than its "
            f"{limit} (peak {base + max(levels)}, {len(over)} actions above)"
        )
        findings.add("memory", place, text)


def _check_parts(device: int, stated: DeviceMemory, parts: dict[str, int], findings: Findings) -> None:
    for part, value in parts.items():
        if getattr(stated, part) != value:
            text = f"is {getattr(stated, part)}, the programs give {value}"
            findings.add("figures", f"predicted.memory[{device}].{part}", text)
