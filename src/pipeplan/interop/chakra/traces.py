"""A plan as Chakra execution traces: written, read back, and compared with the plan."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeplan.errors import InvalidPlanError, UsageError
from pipeplan.files import Plan, sha256_of
from pipeplan.files.folded import unfolded
from pipeplan.interop.chakra.actions import Actions, micros, programs_without_exchanges
from pipeplan.interop.chakra.collectives import TogetherNodes
from pipeplan.interop.chakra.drafts import Drafts
from pipeplan.interop.chakra.wire import NodeType, TraceNode, read_nodes, trace_bytes
from pipeplan.simulator.simulation import orders_of, simulate
from pipeplan.units import format_ns
from pipeplan.workload.kinds import GRADIENT_ROLES
from pipeplan.workload.network_jobs import every_sum

GROUPS = "groups.json"
"""The file of process groups: ASTRA-sim's ``--comm-group-configuration``."""

PREFIX = "plan"
"""Of the files of ranks, ``plan.0.et`` and on: ASTRA-sim's ``--workload-configuration`` is ``FOLDER/plan``."""

MAX_ENTRIES = 2_000_000
"""Entries of all programs beyond which traces would be some hundred megabytes and take minutes."""

_NOTICED = 0.001
"""The part of an action's time from which on it is said what rounding to microseconds makes of it."""


@dataclass(frozen=True, slots=True)
class Traces:
    """The files of a plan by name, first that of the groups, and what the traces leave to a simulator."""

    files: Mapping[str, str | bytes]
    notes: tuple[str, ...]


def traces_of(plan: Plan) -> Traces:
    """One trace for each device, whose number is its rank; a loop is written out, and a folded plan on devices.

    Raises:
        UsageError: a trace cannot say it, with the place in the plan; it would be too large; the plan's programs are
            not orders of its actions, or wait for each other.
    """
    _require_size(plan)
    try:
        plan = unfolded(plan).unrolled()
        simulation = simulate(plan)
    except InvalidPlanError as error:
        raise UsageError(str(error)) from None
    graph, drafts = simulation.graph, Drafts(len(plan.devices))
    sums = every_sum(plan.stages, plan.tied)
    actions = Actions(plan, graph, orders_of(plan, graph), sums, drafts)
    together = TogetherNodes(simulation, actions, sums, drafts)
    nodes = [drafts.nodes(rank) for rank in range(len(plan.devices))]
    about = [("plan", plan.name), ("plan_sha256", sha256_of(plan))]
    groups = {str(number): list(ranks) for ranks, number in drafts.groups.items()}
    files: dict[str, str | bytes] = {GROUPS: json.dumps(groups) + "\n"}
    files |= {f"{PREFIX}.{rank}.et": trace_bytes(own, about) for rank, own in enumerate(nodes)}
    _compare(plan, nodes, files, groups)
    return Traces(files, (*_notes(plan, drafts, together.meetings + actions.meetings),))


def _require_size(plan: Plan) -> None:
    entries = plan.players_each * sum(map(len, plan.whole_programs))
    if entries <= MAX_ENTRIES:
        return
    place = "programs" if plan.loop is None else f"loop.copies is {plan.loop.copies}, so that programs"
    fewer = plan.num_microbatches * MAX_ENTRIES // entries
    raise UsageError(
        f"{place} have {entries} entries together, and a trace has a node for each: more than {MAX_ENTRIES} are not "
        f"written; search with --microbatches {max(1, fewer)} or less"
    )


# Read back ----------------------------------------------------------------------------------------------------------


def _compare(
    plan: Plan,
    nodes: Sequence[Sequence[TraceNode]],
    files: Mapping[str, str | bytes],
    groups: Mapping[str, Sequence[int]],
) -> None:
    """What the files say is what was to be written, which is what the plan's programs say; else it is our mistake."""
    ends: list[Counter[tuple[object, ...]]] = [Counter(), Counter()]
    together: defaultdict[str, list[list[tuple[object, ...]]]] = defaultdict(list)
    for rank, (own, program) in enumerate(zip(nodes, programs_without_exchanges(plan), strict=True)):
        content = files[f"{PREFIX}.{rank}.et"]
        assert isinstance(content, bytes)
        _require(read_nodes(content) == own, f"rank {rank} reads as another trace than was written")
        computed = [node.name.partition(" part ")[0] for node in own if node.type is NodeType.COMPUTE]
        again = [text for text, before in zip(computed, ["", *computed], strict=False) if text != before]
        _require([text for text in again if "STEP" not in text] == program, f"rank {rank} has another order")
        told = Counter(text for text in plan.programs[rank] if "_" in text and "REDUCE_GRAD" not in text)
        moved = [node for node in own if node.type in (NodeType.SEND, NodeType.RECEIVE)]
        plain = Counter(node.name for node in moved if not node.name.endswith((" ready", " go")))
        _require(plain == told, f"rank {rank} has other messages")
        for node in moved:
            keys = ("comm_src", "comm_dst", "comm_tag", "comm_size")
            ends[node.type is NodeType.SEND][tuple(map(node.attribute, keys))] += 1
        by_group: defaultdict[str, list[tuple[object, ...]]] = defaultdict(list)
        for node in own:
            if node.type is NodeType.COLLECTIVE:
                group, *what = (node.attribute(key) for key in ("pg_name", "comm_type", "comm_size"))
                by_group[str(group)].append((*what,))
        for group, those in by_group.items():
            _require(rank in groups[group], f"rank {rank} is not of group {group}")
            together[group].append(those)
    _require(ends[0] == ends[1] and all(count == 1 for count in ends[0].values()), "messages have one end")
    for group, members in together.items():
        alike = len(members) == len(groups[group]) and all(own == members[0] for own in members)
        _require(alike, f"the ranks of group {group} do other things together")


def _require(held: bool, problem: str) -> None:
    if not held:
        raise UsageError(f"what a Chakra trace says differs from the plan: {problem}; see pipeplan check")


# For a person -------------------------------------------------------------------------------------------------------


def _notes(plan: Plan, drafts: Drafts, meetings: int) -> Iterator[str]:
    yield (
        "traces have the bytes of messages and collectives, and not the times that they take in the plan: those are of "
        "the network that is simulated"
    )
    inside = [
        what
        for what, there in (
            ("tensor parallel devices", any(stage.shards > 1 for stage in plan.stages)),
            ("devices with parts of one sequence", any(stage.context > 1 for stage in plan.stages)),
            ("expert parallel devices", any(stage.expert > 1 for stage in plan.stages)),
            ("replicas that divide gradients", any(each.zero > 1 and not each.block_groups for each in plan.stages)),
        )
        if there
    ]
    if inside:
        yield f"what {' and '.join(inside)} exchange inside of actions is in the actions' durations, as in the plan"
    if meetings:
        yield (
            f"{meetings} times devices that may come to something one by one do it together in the plan; messages of a "
            "byte ('ready', 'go') say so"
        )
    if drafts.small:
        yield f"{drafts.small} messages of no bytes are written with one byte, which simulators need"
    slowed = [number for number, device in enumerate(plan.devices) if device.contention]
    if slowed and any(operation.role in GRADIENT_ROLES for operation in plan.operations):
        yield f"devices[{slowed[0]}].contention: a trace cannot say that collectives slow what is computed beside them"
    yield from _rounded(plan)


def _rounded(plan: Plan) -> Iterator[str]:
    off = [
        (abs(1000 * micros(each.duration_ns) - each.duration_ns) / each.duration_ns, each) for each in plan.operations
    ]
    most, operation = max(off, key=lambda each: each[0])
    if most > _NOTICED:
        yield (
            f"durations are whole microseconds: {operation.id} takes {format_ns(operation.duration_ns)} in the plan, "
            f"{micros(operation.duration_ns)} us in the trace"
        )
