"""Rules against the profile and the cluster of a plan: its costs, dependencies and messages must be theirs."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from functools import cache, partial
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import numpy as np

from pipeplan.checker.decoding import check_decode_costs, check_returned, of_tokens
from pipeplan.checker.facts import Findings, copies_of, deliveries_of, shares_evenly
from pipeplan.checker.forwards import check_forward
from pipeplan.checker.segments import segment_rows
from pipeplan.checker.uplinks import rails_between
from pipeplan.costs import block_costs, held_part, state_of, step_bytes, sum_time, transfer_time, with_recipe
from pipeplan.costs.communication import (
    Exchange,
    all_gather_time,
    all_reduce_time,
    contention_among,
    contention_of_sums,
    time_of_groups,
)
from pipeplan.costs.recipes import bytes_per_parameter, running_bytes, state_recipe, whole_state_of
from pipeplan.costs.wide_groups import GroupSizes, where_it_stands
from pipeplan.errors import UsageError
from pipeplan.files import Block, Cluster, CostRow, Edge, Plan, Profile, Recipe, TiedParameter, sha256_of
from pipeplan.time_limit import checked
from pipeplan.workload.elements import (
    RING,
    Again,
    BlockGroup,
    Bucket,
    Dependency,
    Hop,
    Operation,
    Stage,
    TiedState,
    is_in_line,
)
from pipeplan.workload.kinds import (
    BACKWARD_ROLES,
    GRADIENT_ROLES,
    GRADIENTS,
    MASTER,
    MEMORY_KINDS,
    OPTIMIZER,
    PARAMETERS,
    STATE_KINDS,
    MemoryBytes,
    MemoryKind,
    Role,
    is_instruction,
)
from pipeplan.workload.mesh import EXPERTS, SAMPLES, SHARDS, HeldPart, Mesh

_EdgesByPair = dict[tuple[str, str], list[Edge]]
_Found = TypeVar("_Found")
_EDGE = attrgetter(*(name for name in Edge.model_fields if name not in ("source", "target")))


def check_profile(
    plan: Plan, profile: Profile, cluster: Cluster | None, findings: Findings, factor: Callable[[Hop], Fraction]
) -> None:
    """Recompute every stage, operation and dependency from the profile.

    ``factor`` is by how much longer a message is on its link for what others send over the same uplinks.
    What actions of a stage whose blocks have configurations cost is not the profile's to say; all else is.
    Without ``cluster`` the times of messages are compared only for plans made without one.
    """
    _check_fingerprint("profile", sha256_of(profile), plan.provenance.profile_sha256, findings)
    if plan.mode != profile.mode:
        findings.add("profile", "mode", f"is {plan.mode}, the profile is of {profile.mode}")
        return
    _check_origin(plan, profile, findings)
    if not _has_its_kinds(plan, profile, findings) or not _has_its_blocks(plan, profile, findings):
        return
    try:
        profile = with_recipe(profile, plan.recipe or profile.recipe)
    except UsageError as error:
        findings.add("profile", "recipe", f"is {plan.recipe}: {error}")
        return
    profile = _launched(profile, plan.launch_overhead_ns)
    if plan.decode is not None:
        if profile.tokens_per_sample is None:
            findings.add("profile", "decode", "the profile has no tokens_per_sample, and so nothing of a single token")
            return
        timed = _knows_links(plan, cluster)
        check_decode_costs(plan, plan.decode, profile, cluster, findings, timed=timed)
        profile = of_tokens(profile)
    known = _Known.of(profile, cluster, apart=not plan.read_sha256)
    _check_block_order(plan, known, findings)
    operations: dict[int, list[Operation]] = defaultdict(list)
    for each in plan.operations:
        if not is_instruction(each.kind):
            operations[each.stage].append(each)
    between = _between(plan, profile)
    ends = _gathers_at_ends(plan, between, known, cluster)
    for number, stage in checked(enumerate(plan.stages), 1):
        like = _likeness(number, stage, known)
        rows = [] if plan.decode else _rows(number, stage, stage.microbatch_size // stage.replicas, known, findings)
        if rows or stage.configurations or (plan.decode and stage.blocks):
            _check_state(number, stage, like, profile, known, findings)
        if rows:
            own = operations[number]
            again = known.once(("held too often", like), partial(_held_too_often, stage, known))
            overhead_ns, change_ns = plan.split_overhead_ns, 0
            if stage.segments:
                rows, change_ns, again = segment_rows(number, stage, rows, profile, findings)
                if not rows:
                    continue
            plain, rows = rows, _exchanging(stage, rows, known, cluster)
            timed = _times_known(plan, stage, cluster, known)
            gathers = ends.get(number, (0, 0)) if timed else (None, None)
            gathers = (None if gathers[0] is None else gathers[0] + change_ns, gathers[1])
            if plan.is_inference:
                for operation in own:
                    check_forward(profile, stage, operation, rows, gathers[0], findings)
            else:
                totals = partial(_totals, rows, again)
                plainly = not stage.segments and rows is plain
                own_totals = known.once(("totals", like), totals) if plainly else totals()
                _check_operations(own, own_totals, overhead_ns, gathers, findings, timed=timed)
            if stage.block_groups:
                _check_groups(number, stage, own, rows, known, cluster, findings, timed=timed)
            for operation in own:
                if operation.part_ns is not None and timed:
                    _check_part(number, stage, operation, known, cluster, findings)
                if operation.parts_ns and timed:
                    _check_parts(stage, operation, rows, findings)
    _check_dependencies(plan, profile, between, known, cluster, findings, factor)
    _check_tied(plan, profile, known, findings)
    _check_steps(plan, profile, findings)
    if _knows_links(plan, cluster):
        _check_syncs(plan, profile, known, cluster, findings)
        _check_tied_syncs(plan, cluster, findings)


def _launched(profile: Profile, overhead_ns: int) -> Profile:
    """A profile whose every block takes so much longer in every action."""
    if not overhead_ns:
        return profile

    def longer(row: CostRow) -> CostRow:
        whole = (row.input_grad_ns or 0) + (row.weight_grad_ns or 0) if row.backward_ns is None else row.backward_ns
        times = {"forward_ns": row.forward_ns} | ({} if profile.is_inference else {"backward_ns": whole})
        if row.input_grad_ns is not None and row.weight_grad_ns is not None:
            times |= {"input_grad_ns": row.input_grad_ns, "weight_grad_ns": row.weight_grad_ns}
        return row.model_copy(update={key: time + overhead_ns for key, time in times.items()})

    blocks = (block.model_copy(update={"costs": tuple(map(longer, block.costs))}) for block in profile.blocks)
    others = {kind: _launched(own, overhead_ns) for kind, own in profile.of_kinds.items()}
    return profile.model_copy(update={"blocks": tuple(blocks)}).with_kinds(others)


class _Known(NamedTuple):
    """A profile's blocks by their ids, the edges into each, and what training keeps of them and of what they share.

    ``alike`` {block: the first that is like it}; ``rows``, ``parts`` and ``shares`` are those that were looked at, by
    that and how it runs or is divided. ``expert_shards`` {devices that share experts: the numbers of them that may
    split each}. ``rings`` are (shards, context) for which it has costs of one. ``profile`` is all, and ``cluster``
    where stages are. ``divided`` {block: numbers of devices that divide along the sequence what it takes and gives}.
    ``places`` {block: (its number, one for all that are like it and take as much from as far)}; ``found`` is what
    :meth:`once` gave.
    """

    blocks: dict[str, Block]
    into: dict[str, list[Edge]]
    kept: dict[str, MemoryBytes]
    kept_tied: dict[str, MemoryBytes]
    repeated: dict[str, MemoryBytes]
    recipe: Recipe
    cast: bool
    alike: dict[str, str]
    rows: dict[tuple[object, ...], dict[tuple[object, ...], CostRow]]
    parts: dict[tuple[str, Mesh], tuple[HeldPart, ...]]
    expert_shards: dict[int, set[int]]
    rings: set[tuple[int, int]]
    profile: Profile
    cluster: Cluster | None
    divided: dict[str, frozenset[int]]
    shares: dict[tuple[object, ...], MemoryBytes]
    places: dict[str, tuple[int, int]]
    found: dict[object, Any]

    def once(self, key: object, make: Callable[[], _Found]) -> _Found:
        """What ``make`` gives, the same object for each equal key."""
        if key not in self.found:
            self.found[key] = make()
        found: _Found = self.found[key]
        return found

    @staticmethod
    def of(profile: Profile, cluster: Cluster | None, *, apart: bool) -> _Known:
        """What a profile says, in one pass; plans of version 1 count master copies as the optimizer's bytes."""

        def kept(part: Block | TiedParameter) -> MemoryBytes:
            return named(state_of(part, profile.recipe))

        def named(state: MemoryBytes) -> MemoryBytes:
            return state if apart else MemoryBytes({**state, MASTER: 0, OPTIMIZER: state[MASTER] + state[OPTIMIZER]})

        into: dict[str, list[Edge]] = defaultdict(list)
        for edge in profile.edges:
            into[edge.target].append(edge)
        firsts = {block.id: kept(block) for block in profile.kinds}
        whole = {block.id: named(whole_state_of(block, profile.recipe)) for block in profile.kinds}
        apart_on = {
            block.id: frozenset(row.shards for row in block.costs if row.sequence_parallel) for block in profile.kinds
        }
        splits: dict[int, set[int]] = defaultdict(set)
        rings: set[tuple[int, int]] = set()
        for row in (row for block in profile.kinds for row in block.costs):
            splits[row.expert].add(row.expert_shards)
            if row.ring is not None:
                rings.add((row.shards, row.context))
        return _Known(
            {block.id: block for block in profile.blocks},
            dict(into),
            {id_: firsts[first] for id_, first in profile.alike.items()},
            {each.name: kept(each) for each in profile.tied},
            {id_: whole[first] for id_, first in profile.alike.items()},
            profile.recipe,
            not profile.recipe.is_custom and "workspace" in state_recipe(profile.recipe.name).bytes,
            profile.alike,
            {},
            {},
            dict(splits),
            rings,
            profile,
            cluster,
            {id_: apart_on[first] for id_, first in profile.alike.items()},
            {},
            _places(profile, into),
            {},
        )


def _places(profile: Profile, into: dict[str, list[Edge]]) -> dict[str, tuple[int, int]]:
    """{block: (its number, what it shares with those that are alike and take as much from blocks as far away)}"""
    number_of = {block.id: number for number, block in enumerate(profile.blocks)}
    numbers: dict[tuple[object, ...], int] = {}
    found = {}
    for id_, number in number_of.items():
        taken = [(_EDGE(each), number - number_of[each.source]) for each in into.get(id_, ())]
        found[id_] = number, numbers.setdefault((profile.alike[id_], *taken), len(numbers))
    return found


def _likeness(number: int, stage: Stage, known: _Known) -> object:
    """Equal for stages with the same costs, memory and state by the profile, whatever they say.

    Of blocks that are like each other, take the same from as far, run and are divided in the same manner, on groups
    that lie alike.
    """
    if stage.configurations or stage.kinds or known.profile.tied or not stage.blocks:
        return number
    numbers, likes = zip(*map(known.places.__getitem__, stage.blocks), strict=True)
    return (
        likes,
        tuple(number - numbers[0] for number in numbers),
        stage.again,
        *(stage.microbatch_size, stage.replicas, stage.speed, stage.zero, stage.zero_group, stage.configuration),
        *(stage.shards, stage.context, stage.expert, stage.expert_shards, stage.context_exchange),
        id(where_it_stands(known.profile, stage, known.cluster)),
    )


def _knows_links(plan: Plan, cluster: Cluster | None) -> bool:
    """Whether times of messages are known: without the plan's cluster they are not."""
    return cluster is not None or not plan.provenance.cluster_sha256


def check_cluster(plan: Plan, cluster: Cluster, peaks: Sequence[int], findings: Findings) -> None:
    """The cluster is the plan's, has its devices, and enough memory on each for ``peaks`` [device] in bytes."""
    _check_fingerprint("cluster", sha256_of(cluster), plan.provenance.cluster_sha256, findings)
    if cluster.num_devices < len(plan.devices):
        text = f"are {len(plan.devices)}, the cluster has {cluster.num_devices}"
        findings.add("cluster", "devices", text)
        return
    expected = contention_of_sums(cluster, plan.stages)
    for number, stage in enumerate(plan.stages):
        slowest = min(cluster.speeds[device] for device in stage.devices)
        if stage.blocks and stage.speed != slowest:
            text = f"is {stage.speed:g}, the slowest of its devices in the cluster has {slowest:g}"
            findings.add("cluster", f"stages[{number}].speed", text)
        names = sorted({cluster.names[device] for device in stage.devices})
        if stage.kinds and list(stage.kinds) != names:
            text = f"are {', '.join(stage.kinds)}, in the cluster its devices are {', '.join(names)}"
            findings.add("cluster", f"stages[{number}].kinds", text)
    for device, own in enumerate(plan.devices):
        if own.contention not in (0, expected):  # plans from before it counted beside sums say nothing
            text = f"is {own.contention}, the cluster's is {expected}"
            findings.add("cluster", f"devices[{device}].contention", text)
    for device, (peak, memory) in enumerate(zip(peaks, cluster.usable_bytes, strict=False)):
        if memory is not None and peak > memory:
            beside = f" beside its reserve of {reserve}" if (reserve := cluster.reserve_bytes[device]) else ""
            text = f"takes {peak} bytes, {peak - memory} more than the {memory} of the cluster's device{beside}"
            findings.add("cluster", f"devices[{device}]", text)


def _way(cluster: Cluster, source: int, target: int) -> str:
    """In words, the level that two devices talk over, and whether from rail to rail."""
    level = cluster.level_between(source, target)
    if level is None:
        return "none"
    return repr(level.name) + " between rails" * (rails_between(cluster, source, target) > 1)


def check_places(plan: Plan, cluster: Cluster, findings: Findings) -> None:
    """Messages between two programs take the same way for the players in each place."""
    seen = set[tuple[int, int]]()
    for number, dependency in enumerate(plan.dependencies if plan.players else ()):
        for index, hop in enumerate(dependency.hops):
            pair = hop.source_device, hop.target_device
            if pair in seen:
                continue
            seen.add(pair)
            ends = zip(*(plan.players[each].devices for each in pair), strict=True)
            first, *others = [_way(cluster, *both) for both in ends]
            odd = next((place for place, way in enumerate(others, 1) if way != first), None)
            if odd is not None:
                text = f"goes over level {first} in place 0 of its programs, and over {others[odd - 1]} in place {odd}"
                findings.add("cluster", f"dependencies[{number}].hops[{index}]", text)


def _check_fingerprint(what: str, found: str, stated: str, findings: Findings, key: str = "") -> None:
    if stated not in ("", found):
        text = f"is {stated[:12]}..., but this {what} has {found[:12]}...: the plan was made from another"
        findings.add(what, f"provenance.{key or f'{what}_sha256'}", text)


def _check_origin(plan: Plan, profile: Profile, findings: Findings) -> None:
    """What the plan says of the profile's device and samples, which older plans do not, is what the profile says."""
    stated, tokens = plan.provenance, profile.tokens_per_sample
    if plan.decode is not None:  # a sample is a request's next token
        tokens = 1
    for key, said, found in (
        ("device", stated.device, profile.source.device),
        ("dtype", stated.dtype, profile.source.dtype),
        ("tokens_per_sample", stated.tokens_per_sample, tokens),
        ("forward_flops_per_sample", stated.forward_flops_per_sample, profile.forward_flops_per_sample),
    ):
        if said and said != found:
            findings.add("profile", f"provenance.{key}", f"is {said}, in the profile it is {found or 'not known'}")


def _has_its_kinds(plan: Plan, profile: Profile, findings: Findings) -> bool:
    """Whether kinds of devices have the profiles that the plan was made from, and its stages are on these kinds."""
    stated = plan.provenance.profiles
    if lacking := sorted(set(stated) - set(profile.of_kinds)):
        text = f"has a profile for devices called {lacking[0]!r}; give it, too: --profile-for {lacking[0]}=FILE"
        findings.add("profile", "provenance.profiles", text)
        return False
    for kind, own in profile.of_kinds.items():
        if kind in stated:
            _check_fingerprint("profile", sha256_of(own), stated[kind].sha256, findings, f"profiles.{kind}.sha256")
    for number, stage in enumerate(plan.stages):
        names = sorted({plan.devices[device].name for device in stage.devices})
        if stage.blocks and list(stage.kinds) != (names if profile.of_kinds else []):
            text = f"are {', '.join(stage.kinds) or 'none'}, its devices are {', '.join(names)}"
            findings.add("profile", f"stages[{number}].kinds", text)
            return False
    return True


def _has_its_blocks(plan: Plan, profile: Profile, findings: Findings) -> bool:
    """Whether the plan's stages and the profile have the same blocks."""
    known = {block.id for block in profile.blocks}
    planned = {block for stage in plan.stages for block in stage.blocks}
    for number, stage in enumerate(plan.stages):
        for index, block in enumerate(stage.blocks):
            if block not in known:
                findings.add("profile", f"stages[{number}].blocks[{index}]", f"{block!r} is not in the profile")
    for block in sorted(known - planned):
        findings.add("profile", "stages", f"block {block!r} of the profile is in none")
    by_route: dict[int, set[str]] = defaultdict(set)
    for stage in plan.stages:
        by_route[stage.route].update(stage.blocks)
    return all(blocks == known for blocks in by_route.values())


def _check_block_order(plan: Plan, known: _Known, findings: Findings) -> None:
    """In a stage a block comes after those whose outputs it takes."""
    for number, stage in enumerate(plan.stages):
        place_of = {block: index for index, block in enumerate(stage.blocks)}
        for block, target in place_of.items():
            for edge in known.into.get(block, ()):
                if place_of.get(edge.source, -1) > target:
                    text = f"{block!r} runs before {edge.source!r}, which it needs"
                    findings.add("profile", f"stages[{number}].blocks[{target}]", text)


def _rows(number: int, stage: Stage, samples: int, known: _Known, findings: Findings) -> list[CostRow]:
    """Costs of the stage's blocks on each device for ``samples`` samples there.

    Empty, with a problem noted, if the profile lacks some; and where it cannot have them.
    """
    if stage.configurations or not shares_evenly(stage):  # the latter is refused whatever the profile
        return []
    if stage.expert_shards not in (splits := known.expert_shards.get(stage.expert, {1})):
        have = " and ".join(map(str, sorted(splits)))
        text = f"is {stage.expert_shards}; rows of the profile with expert {stage.expert} have {have}"
        findings.add("profile", f"stages[{number}].expert_shards", text)
        return []
    if stage.context_exchange == RING and (stage.shards, stage.context) not in known.rings:
        text = f"is {RING}; the profile has no costs of one with context {stage.context} on {stage.shards} shards"
        findings.add("profile", f"stages[{number}].context_exchange", text)
        return []
    placed = where_it_stands(known.profile, stage, known.cluster)
    split = stage.shards, stage.context, stage.expert, stage.expert_shards, stage.configuration, stage.context_exchange
    way = known.rows.setdefault((stage.kinds, samples, *split, stage.speed, id(placed)), {})
    try:
        return [
            way.get((known.places[id_][1], again)) or _row(id_, again, stage, samples, known, placed, way)
            for id_, again in zip(stage.blocks, stage.again, strict=True)
        ]
    except UsageError as error:
        findings.add("profile", f"stages[{number}]", str(error))
        return []


def _row(
    id_: str,
    again: Again,
    stage: Stage,
    samples: int,
    known: _Known,
    placed: Profile,
    way: dict[tuple[object, ...], CostRow],
) -> CostRow:
    """Costs of one of a stage's blocks, looked at once for all that are alike. Raises UsageError without any.

    Of kinds of devices each has its own profile, in which others are alike.
    """
    taken = sum(_taken_bytes(edge, samples, stage, known) for edge in known.into.get(id_, ()))
    key = (id_ if stage.kinds else known.alike[id_], again, taken)
    if key not in way:
        own = [placed.of_kinds.get(kind, placed).by_id[id_] for kind in stage.kinds] or [placed.by_id[id_]]
        block = _slowest([_with_ring(block) for block in own] if stage.context_exchange == RING else own)
        row = block_costs(
            _of_configuration(block, stage.configuration),
            samples,
            stage.shards,
            context=stage.context,
            expert=stage.expert,
            expert_shards=stage.expert_shards,
            recompute=again,
            input_bytes=taken,
            recipe=known.recipe,
        )
        way[key] = _on_device(row, stage.speed)
    if not stage.kinds:
        way[known.places[id_][1], again] = way[key]
    return way[key]


def _with_ring(block: Block) -> Block:
    """What the block is where keys and values go around a ring, instead of being gathered as its rows say."""

    def changed(row: CostRow) -> CostRow:
        if row.ring is None:
            return row
        ahead, back = row.ring.forward_ns, row.ring.input_grad_ns + (row.ring.forward_ns if row.recompute else 0)
        update: dict[str, int] = {
            "forward_ns": row.forward_ns + ahead,
            "input_grad_ns": (row.input_grad_ns or 0) + back,
            "workspace_bytes": row.workspace_bytes + row.ring.workspace_bytes,
        }
        if row.backward_ns is not None:
            update["backward_ns"] = row.backward_ns + back
        if row.selective_ns is not None:
            update["selective_ns"] = row.selective_ns + ahead
        return row.model_copy(update=update)

    return block.model_copy(update={"costs": tuple(map(changed, block.costs))})


def _slowest(blocks: Sequence[Block]) -> Block:
    """What the same block is on devices that each take what theirs says: case by case the slowest and largest."""
    first, *others = blocks
    if all(block is first for block in others):
        return first
    rows = []
    for row in first.costs:
        found = [[each for each in block.costs if each.key == row.key] for block in blocks]
        if not all(found):
            continue
        each = [one for (one,) in found]
        said = {key: [getattr(one, key) for one in each] for key in (*_ROW_TIMES, *_ROW_REST)}
        said["backward_ns"] = [
            (one.input_grad_ns or 0) + (one.weight_grad_ns or 0) if one.backward_ns is None else one.backward_ns
            for one in each
        ]
        rows.append(row.model_copy(update={key: None if None in of else max(of) for key, of in said.items()}))
    return first.model_copy(update={"costs": tuple(rows)})


def _on_device(row: CostRow, speed: float) -> CostRow:
    """A row on a device that computes so much in the time in which one of the profile's computes 1."""
    if speed == 1:
        return row
    times = {key: ns for key in _ROW_TIMES if (ns := getattr(row, key)) is not None}
    return row.model_copy(update={key: _slowed(ns, speed) for key, ns in times.items()})


_ROW_TIMES = ("forward_ns", "backward_ns", "input_grad_ns", "weight_grad_ns")
_ROW_REST = (
    *("selective_ns", "selective_activation_bytes"),
    *("activation_bytes", "weight_grad_bytes", "workspace_bytes"),
)


def _slowed(ns: int, speed: float) -> int:
    """Ns over a speed, as it is written, rounded up."""
    over, under = Decimal(repr(speed)).as_integer_ratio()
    return -(-ns * under // over)


def _of_configuration(block: Block, configuration: str | None) -> Block:
    """The block with only the rows of a named configuration, as if they had no name."""
    if configuration is None:
        return block
    rows = [row.model_copy(update={"configuration": None}) for row in block.costs if row.configuration == configuration]
    return block.model_copy(update={"costs": tuple(rows)})


def _check_state(number: int, stage: Stage, like: object, profile: Profile, known: _Known, findings: Findings) -> None:
    """What each device of a stage keeps; levels 2 and 3 are for what is not tied."""
    for tied in profile.tied if stage.zero > 1 and _sharers(stage) > 1 else ():
        if known.kept_tied[tied.name].total and _uses(stage, tied):
            text = f"is {stage.zero}, which exchanges state block by block, and {tied.name!r} is of several blocks"
            findings.add("profile", f"stages[{number}].zero", text)
    expected = known.once(("state", like), lambda: _kept_by(stage, profile, known).keyed(STATE_KINDS))
    _compare(f"stages[{number}]", stage, expected, findings)
    whole = known.once(("whole", like), lambda: sum(_made_in_parts(block, stage, known) for block in stage.blocks))
    whole = min(whole, expected[GRADIENTS.key])
    _compare(f"stages[{number}]", stage, {"whole_gradient_bytes": whole}, findings)


def _made_in_parts(block: str, stage: Stage, known: _Known) -> int:
    """Bytes of a block's gradients of which each shard makes a part, though it has all: of its slice of sequences.

    Replicas that divide gradients have their part of it.
    """
    if stage.configurations or stage.shards not in known.divided[block]:
        return 0
    return _share(known.repeated[block], 1, stage, known)[GRADIENTS]


def _kept_by(stage: Stage, profile: Profile, known: _Known) -> MemoryBytes:
    """Each device holds its part of what training keeps of every block, rounded up; what is tied and split alike, once.

    Of what blocks of one stage split unlike it holds a part for each way.
    """
    held = {
        place: _parts_held(known, stage, place)
        for place, block in enumerate(stage.blocks)
        if stage.configurations or not place or any(block in tied.blocks for tied in profile.tied)
    }
    expected, alike = MemoryBytes(), Counter[tuple[MemoryBytes, int]]()
    experts, shards = stage.expert, stage.shards
    for place, block in enumerate(stage.blocks):
        if stage.configurations:
            mesh = stage.mesh_of(place)
            experts, shards = mesh.size_of(EXPERTS), mesh.size_of(SHARDS)
        own = _NOTHING if experts == 1 else _of_experts(block, experts, known)
        together = _of_shards(block, shards, known)
        rest = together - own if own.total else together
        alike[rest, held.get(place, held[0])[0].num_parts] += 1  # all are cut alike where none says how
        if own.total:
            expected += _share(own, experts, _as_on_experts(stage), known)
    for (state, parts), count in alike.items():
        expected += _share(state, parts, stage, known) * count
    for tied in profile.tied:
        before: set[tuple[HeldPart, ...]] = set()
        for place in (place for place, block in enumerate(stage.blocks) if block in tied.blocks):
            if held[place] in before:
                expected -= _share(known.kept_tied[tied.name], held[place][0].num_parts, stage, known, least=True)
            before.add(held[place])
    return expected


def _of_shards(block: str, shards: int, known: _Known) -> MemoryBytes:
    """What devices that split a block have of it together: of what it does not cut each has all."""
    again = known.repeated[block]
    return known.kept[block] + again * (shards - 1) if again.total and shards > 1 else known.kept[block]


def _share(state: MemoryBytes, parts: int, stage: Stage, known: _Known, *, least: bool = False) -> MemoryBytes:
    """What a device has of what its replica has in so many parts: of what replicas divide only its own part of that.

    The largest part, or the ``least``. Level 1 divides the optimizer's state and master copies; where parameters are
    cast at each use, their master copy is all that is kept of them, and whole. Level 2 divides gradients, too, and
    level 3 everything.
    """
    key = state, parts, stage.zero, _sharers(stage), least
    if key not in known.shares:
        counts = _parts_of_each(parts, stage.zero, _sharers(stage), known.cast)
        more = {kind: 0 if least else counts[kind] - 1 for kind in state}
        known.shares[key] = MemoryBytes((kind, (size + more[kind]) // counts[kind]) for kind, size in state.items())
    return known.shares[key]


@cache
def _parts_of_each(parts: int, zero: int, sharers: int, cast: bool) -> dict[MemoryKind, int]:
    """{kind of memory: into how many parts it is cut}"""
    divided = {OPTIMIZER} if cast else {OPTIMIZER, MASTER}
    divided |= {GRADIENTS} if zero > 1 else set()
    divided |= set(STATE_KINDS) if zero > 2 else set()
    return {kind: parts * (sharers if kind in divided and zero else 1) for kind in MEMORY_KINDS}


_NOTHING = MemoryBytes()


def _of_experts(block: str, experts: int, known: _Known) -> MemoryBytes:
    """What is kept of a block's experts, where so many devices share them: of one nothing is apart."""
    found = known.blocks[block]
    if experts == 1 or not found.expert_parameters:
        return _NOTHING
    part = found.expert_parameters, found.parameters + found.frozen_parameters
    return MemoryBytes((kind, size * part[0] // part[1]) for kind, size in known.kept[block].items())


def _as_on_experts(stage: Stage) -> Stage:
    """A stage whose shards are the devices of a group with all experts, and whose replicas are such groups."""
    across = None if stage.zero_group is None else max(1, stage.zero_group * stage.shards // stage.expert)
    groups = len(stage.devices) // stage.expert
    return replace(stage, shards=stage.expert, replicas=groups, context=1, zero_group=across)


def _on_experts(stage: Stage, known: _Known) -> Stage:
    """The same with what a device keeps of experts, where the stage has them apart: else of nothing."""
    side, kept = _as_on_experts(stage), _NOTHING
    for block in stage.blocks if stage.expert > 1 else ():
        kept += _share(_of_experts(block, stage.expert, known), stage.expert, side, known)
    return side.with_state(kept)


def _sharers(stage: Stage) -> int:
    """How many copies of the parameters have one of what they divide."""
    return stage.replicas * stage.context if stage.zero_group is None else stage.zero_group


def _parts_held(known: _Known, stage: Stage, place: int) -> tuple[HeldPart, ...]:
    """What each device of a replica has of a block's parameters."""
    mesh, block = stage.mesh_of(place), known.blocks[stage.blocks[place]]
    key = known.alike[block.id], mesh
    if key not in known.parts:
        known.parts[key] = tuple(held_part(block, mesh, device) for device in range(stage.shards))
    return known.parts[key]


def _check_part(
    number: int, stage: Stage, forward: Operation, known: _Known, cluster: Cluster | None, findings: Findings
) -> None:
    """One of two parts of a micro-batch takes what the profile says of half the samples."""
    rows = _rows(number, stage, stage.microbatch_size // stage.replicas // 2, known, findings)
    if rows:
        rows = _exchanging(stage, rows, known, cluster)
        expected = {"part_ns": max(1, sum(row.forward_ns for row in rows))}
        _compare(f"operations[{forward.id}]", forward, expected, findings)


def _check_tied(plan: Plan, profile: Profile, known: _Known, findings: Findings) -> None:
    """What several stages have of a tied parameter stands in the plan, part by part, with the devices that have each.

    Where parts are cut unlike there is an entry without bytes, of all devices.
    """
    names = [each.name for each in profile.tied]
    for each in plan.tied:
        if each.name not in names:
            findings.add("profile", "tied", f"{each.name!r} is not tied in the profile")
    for tied in profile.tied:
        stated = [(number, each) for number, each in enumerate(plan.tied) if each.name == tied.name]
        holders = _holders(plan, tied, known)
        expected = [(tuple(those), part.num_parts) for part, those in holders.items()]
        if len({part.kind for part in holders}) > 1:
            whole = {number: stage.devices for number, stage in enumerate(plan.stages) if _uses(stage, tied)}
            expected.append((tuple(whole.items()), 1))
        if [(tuple(zip(each.stages, each.devices, strict=True)), each.parts) for _, each in stated] != expected:
            said = "; ".join(_of_stages(zip(each.stages, each.devices, strict=True)) for _, each in stated)
            given = "; ".join(_of_stages(those) for those, _ in expected)
            text = f"{tied.name!r} is on {said or 'none'}, by the profile on {given or 'none'}"
            findings.add("profile", "tied", text)
            continue
        for (number, each), part in itertools.zip_longest(stated, holders):
            state = MemoryBytes()
            if part is not None:
                kept = known.kept_tied[tied.name]
                shares = [_share(kept, part.num_parts, plan.stages[n], known, least=True) for n in each.stages]
                state = MemoryBytes(
                    (kind, size if _is_cut_alike(kind, plan, each, known) else 0) for kind, size in shares[0].items()
                )
            _compare(f"tied[{number}]", each, state.keyed(STATE_KINDS), findings)


def _is_cut_alike(kind: MemoryKind, plan: Plan, tied: TiedState, known: _Known) -> bool:
    """Whether replicas of all stages with a tied parameter divide a kind of state alike; else each counts its own."""
    whole = MemoryBytes({kind: math.lcm(*(_sharers(plan.stages[n]) for n in tied.stages))})
    return len({_share(whole, 1, plan.stages[n], known) for n in tied.stages}) == 1


def _check_steps(plan: Plan, profile: Profile, findings: Findings) -> None:
    """A step moves what a stage keeps on a device, but for what is tied and stepped with an earlier stage there."""
    parts = defaultdict[str, list[tuple[TiedState, defaultdict[int, set[int]]]]](list)
    for each in plan.tied:
        if not each.is_sum:
            on = defaultdict[int, set[int]](set)
            for n, devices in zip(each.stages, each.devices, strict=True):
                on[n].update(devices)
            parts[each.name].append((each, on))
    for number, stage in enumerate(plan.stages):
        state = stage.state
        for those in parts.values() if not stage.configurations else ():
            first = next((each for each, on in those if stage.devices[0] in on[number]), None)
            if first is None:
                continue
            left = {*stage.devices}
            for _, on in those:  # who has a part in this stage that it has in an earlier one, too
                left -= on[number].intersection(set().union(*(on[n] for n in range(number))))
            if not left:
                state -= first.state
        moved = step_bytes(state, profile.recipe)
        rates = [profile.of_kinds.get(kind, profile).step_bytes_per_s for kind in stage.kinds or ("",)]
        rate = None if None in rates else min(each for each in rates if each is not None)
        expected = 0 if rate is None else _slowed(-(-moved * 10**9 // rate), stage.speed)
        _compare(f"stages[{number}]", stage, {"step_ns": expected}, findings)


def _uses(stage: Stage, tied: TiedParameter) -> bool:
    return not set(stage.blocks).isdisjoint(tied.blocks)


def _of_stages(holders: Iterable[tuple[int, tuple[int, ...]]]) -> str:
    return ", ".join(f"devices {', '.join(map(str, devices))} of stage {stage}" for stage, devices in holders)


def _holders(plan: Plan, tied: TiedParameter, known: _Known) -> dict[HeldPart, list[tuple[int, tuple[int, ...]]]]:
    """{part: (stage, its devices that have it), for each way in which the stage splits it}; none of one stage alone."""
    users = [number for number, stage in enumerate(plan.stages) if _uses(stage, tied)]
    found: dict[HeldPart, list[tuple[int, tuple[int, ...]]]] = defaultdict(list)
    for number in users if len(users) > 1 and known.kept_tied[tied.name].total else ():
        stage = plan.stages[number]
        ways = [_parts_held(known, stage, n) for n, block in enumerate(stage.blocks) if block in tied.blocks]
        for way in dict.fromkeys(ways):
            for part in dict.fromkeys(way):
                at = [device for index, device in enumerate(stage.devices) if way[index % stage.shards] == part]
                found[part].append((number, tuple(at)))
    return found


def _check_tied_syncs(plan: Plan, cluster: Cluster | None, findings: Findings) -> None:
    """Gradients of each part are summed over all that have it; where parts are cut unlike, the whole by all instead.

    Groups of replicas that divide it first sum it so that a device has its rows, unless stages do so unlike, or a
    device is of several: then none divides gradients.
    """
    for number, each in enumerate(plan.tied):
        family = [other for other in plan.tied if other.name == each.name]
        unlike = any(not other.state.total for other in family)
        size = each.state[GRADIENTS]
        if not each.state.total:
            size = max(other.state[GRADIENTS] * other.parts for other in family)
        skipped = unlike and each.state.total
        stages = [plan.stages[n] for n in each.stages]
        (sharers, *others) = {_sharers(stage) if stage.zero else 1 for stage in stages}
        alike = not others and not any(stage.configurations for stage in stages)
        if alike and sharers > 1 and not unlike and sum(map(len, each.devices)) == len(each.all_devices):
            expected = _tied_in_groups(each, stages, sharers, cluster)
        else:
            expected = all_reduce_time(cluster, sorted(each.all_devices), size)
        _compare(f"tied[{number}]", each, {"sync_ns": 0 if skipped else expected}, findings)


def _tied_in_groups(tied: TiedState, stages: Sequence[Stage], sharers: int, cluster: Cluster | None) -> int:
    """Ns to sum what each ``sharers`` replicas divide, in groups of these so that a device has its rows, then those."""
    inner, outer = defaultdict[object, list[int]](list), defaultdict[int, list[int]](list)
    for stage, devices in zip(stages, tied.devices, strict=True):
        having = len(devices) // (stage.replicas * stage.context)  # of the shards
        for place, device in enumerate(devices):
            copy, shard = divmod(place, having)
            outer[copy % sharers].append(device)
            inner[stage, shard, copy // sharers].append(device)
    size = tied.state[GRADIENTS]
    rows = Exchange("all_reduce", (size + sharers - 1) // sharers)
    scattered = round(time_of_groups(cluster, Exchange("reduce_scatter", size), list(inner.values())))
    return scattered + round(time_of_groups(cluster, rows, list(map(sorted, outer.values()))))


def _check_syncs(plan: Plan, profile: Profile, known: _Known, cluster: Cluster | None, findings: Findings) -> None:
    """Gradients are summed over all devices that hold a part of the same blocks, shard by shard; what is tied apart.

    Before that devices of a stage whose blocks have configurations sum among them.
    """
    stages_of: dict[str, list[int]] = defaultdict(list)
    for number, stage in enumerate(plan.stages):
        for block in stage.blocks:
            stages_of[block].append(number)
    actions: dict[int, Operation] = {}
    for each in plan.operations:
        if each.role in GRADIENT_ROLES:
            actions.setdefault(each.stage, each)
    forwards = {each.stage: each.duration_ns for each in plan.operations if each.role is Role.FORWARD}
    contention = contention_of_sums(cluster, plan.stages)
    for number, stage in checked(enumerate(plan.stages), 32):
        if not stage.blocks:
            continue
        apart = [
            each
            for each in plan.tied
            for other, at in zip(each.stages, each.devices, strict=True)
            if other == number and stage.devices[0] in at
        ]
        alike = {other for block in stage.blocks for other in stages_of[block]}
        own = stage.state[GRADIENTS] - sum(each.state[GRADIENTS] for each in apart)
        others = [plan.stages[other] for other in sorted(alike)]
        of_rest = of_experts = (stage, others)
        apart_of_it = 0
        if stage.expert > 1:
            experts = _on_experts(stage, known)
            of_rest = stage.with_state(stage.state - experts.state), others
            of_experts = experts, [_as_on_experts(other) for other in others]
            apart_of_it = experts.state[GRADIENTS]

        time = partial(_both_summed_ns, of_rest, of_experts, known, cluster)
        expected, gathered = time(own, stage.whole_gradient_bytes, apart_of_it)
        if stage.buckets and number in actions:
            names = {each.name for each in apart}
            _check_buckets(number, stage, actions[number], profile, known, names, time, cluster, findings)
        if stage.configurations:
            expected += _inside_ns(stage, profile, {each.name for each in apart}, known, cluster)
        if cluster is not None and cluster.overlap == "all":  # the rest is beside the next iteration's first forward
            hidden = min(gathered, forwards.get(number, 0))
            gathered -= hidden - round(contention * hidden)
        _compare(f"stages[{number}]", stage, {"sync_ns": expected, "gather_ns": gathered}, findings)


def _both_summed_ns(
    rest: tuple[Stage, Sequence[Stage]],
    experts: tuple[Stage, Sequence[Stage]],
    known: _Known,
    cluster: Cluster | None,
    size: int,
    whole: int,
    of_experts: int,
    *,
    last: bool = True,
) -> tuple[int, int]:
    """:func:`_summed_ns` of ``size`` bytes, of which those ``of_experts`` have copies of their own.

    Of the others each shard has ``whole`` ones, which all sum.
    """
    size -= of_experts
    sums, gathers = _summed_ns(*rest, size, min(size, whole), known, cluster, last=last)
    if of_experts:
        more, further = _summed_ns(*experts, of_experts, 0, known, cluster, of_experts=True, last=last)
        sums, gathers = sums + more, gathers + further
    return sums, gathers


def _summed_ns(
    stage: Stage,
    others: Sequence[Stage],
    size: int,
    whole: int,
    known: _Known,
    cluster: Cluster | None,
    *,
    of_experts: bool = False,
    last: bool = True,
) -> tuple[int, int]:
    """Ns to sum gradients of a stage with those of the others that have its blocks, and to gather what is updated.

    Shards sum theirs apart, but for the ``whole`` bytes. The ``last`` of them are those of the first block. Stages that
    keep the same and lie alike take as long: it is worked out once.
    """
    lying = _lying((stage, *others), cluster)
    kept = known.alike[stage.blocks[0]], stage.state, stage.zero, _sharers(stage), stage.reduce_every, stage.expert
    how: dict[str, bool] = {"of_experts": of_experts, "last": last}
    make = partial(_summed_on, stage, others, size, whole, known, cluster, **how)
    return known.once(("summed", size, whole, *how.values(), kept, lying), make)


def _lying(stages: Sequence[Stage], cluster: Cluster | None) -> tuple[object, ...]:
    """Equal for stages that lie alike: one after another on what the outermost links join, which join all equally."""
    unit = cluster.levels[-2].group_size if cluster is not None and len(cluster.levels) > 1 else 1
    devices = np.concatenate([np.array(each.devices, dtype=np.int64) for each in stages])
    _, units = np.unique(devices // unit, return_inverse=True)
    return tuple((each.shards, len(each.devices)) for each in stages), (units * unit + devices % unit).tobytes()


def _summed_on(
    stage: Stage,
    others: Sequence[Stage],
    size: int,
    whole: int,
    known: _Known,
    cluster: Cluster | None,
    *,
    of_experts: bool,
    last: bool,
) -> tuple[int, int]:
    """The same for the devices of one stage."""
    if stage.zero and _sharers(stage) > 1:
        return _sharded_ns(stage, others, size, whole, known, cluster, of_experts=of_experts, last=last)
    holders = sorted({device for other in others for device in other.devices})
    groups = [
        [device for place, device in enumerate(holders) if place % stage.shards == shard]
        for shard in range(stage.shards)
    ]

    def summed(bytes_: int, among: Sequence[Sequence[int]]) -> int:
        return round(time_of_groups(cluster, Exchange("all_reduce", bytes_), among))

    return summed(size - whole, groups) + summed(whole, [holders]), 0


def _check_buckets(
    number: int,
    stage: Stage,
    action: Operation,
    profile: Profile,
    known: _Known,
    apart: Collection[str],
    time: Callable[..., tuple[int, int]],
    cluster: Cluster | None,
    findings: Findings,
) -> None:
    """Bytes of each bucket are those of its blocks, each with what it shares with none before it in the stage.

    Its gradients are there when the blocks before it have as much of the stage's last ``action`` left as their part of
    all blocks' times is.
    """
    if stage.configurations:
        findings.add("profile", f"stages[{number}].buckets", "are of blocks that each are split in a way of their own")
        return
    if cluster is not None and (
        cluster.overlap == "none" or (stage.zero > 1 and (cluster.overlap != "all" or stage.reduce_every is not None))
    ):
        text = f"are beside backward, and in the cluster {cluster.overlap!r} of what such a stage sums overlaps"
        findings.add("cluster", f"stages[{number}].buckets", text)
    rows = _rows(number, stage, stage.microbatch_size // stage.replicas, known, findings)
    spent = [(row.weight_grad_ns or 0) if action.role is Role.WEIGHT_GRAD else row.whole_backward_ns for row in rows]
    end = len(rows)
    for place, bucket in enumerate(stage.buckets[: len(rows)]):
        begin, size, of_experts, whole = end - bucket.blocks, 0, 0, 0
        for index in range(begin, end):
            whole += _made_in_parts(stage.blocks[index], stage, known)
            apart_of_it = _of_experts(stage.blocks[index], stage.expert, known)
            of_experts += _share(apart_of_it, stage.expert, _as_on_experts(stage), known)[GRADIENTS]
            rest = _of_shards(stage.blocks[index], stage.shards, known) - apart_of_it
            size += _share(rest, stage.shards, stage, known)[GRADIENTS]
            for tied in profile.tied:
                again = tied.name in apart or not set(tied.blocks).isdisjoint(stage.blocks[:index])
                if stage.blocks[index] in tied.blocks and again:
                    size -= known.kept_tied[tied.name][GRADIENTS] // stage.shards
        ahead = action.duration_ns * sum(spent[:begin]) // max(1, sum(spent))
        size += of_experts
        whole = min(whole, size)
        summed, _ = time(size, whole, of_experts, last=not begin)
        expected = {"bytes": size, "whole_bytes": whole, "ahead_ns": ahead, "sync_ns": summed}
        _compare(f"stages[{number}].buckets[{place}]", bucket, expected, findings)
        end = begin


def _sharded_ns(
    stage: Stage,
    alike: Sequence[Stage],
    own: int,
    whole: int,
    known: _Known,
    cluster: Cluster | None,
    *,
    of_experts: bool,
    last: bool,
) -> tuple[int, int]:
    """What replicas that divide what they keep take to sum gradients, and to gather what the step has changed.

    Each group sums ``own`` bytes so that a device has its part of the sum, then those with equal parts, in all groups
    of stages that are ``alike``, sum these; of ``whole`` ones those of all shards. Gathered is every trained parameter
    of the stage: those with gradients. Level 2 sums with each micro-batch, so that a device has its part of ``own``
    bytes, and only what the first block made last is still to be reduced; level 3 gathers no more than that block, for
    the next iteration's first forward.
    """
    size = _sharers(stage)
    inner = list(_groups_in(stage, size).values())
    outer: dict[tuple[int, int], set[int]] = defaultdict(set)
    of_all: dict[int, set[int]] = defaultdict(set)
    for each in alike:
        for (shard, _), devices in _groups_in(each, size).items():
            for place, device in enumerate(devices):
                outer[shard, place].add(device)
                of_all[place].add(device)
    gradients, trained = stage.state[GRADIENTS] * (size if stage.zero > 1 else 1), stage.state[PARAMETERS]
    if not known.recipe.is_custom:
        each_takes = bytes_per_parameter(known.recipe)
        trained = gradients * each_takes[MASTER if known.cast else PARAMETERS] // each_takes[GRADIENTS]
    between = 0
    for bytes_, places in ((own - whole, outer.values()), (whole, of_all.values())):
        part = bytes_ if stage.zero > 1 else (bytes_ + size - 1) // size
        between += round(time_of_groups(cluster, Exchange("all_reduce", part), list(map(sorted, places))))
    copy, gradient, _ = _exchanged(stage, stage.blocks[0], known, of_experts=of_experts)
    if stage.reduce_every is not None and stage.zero > 1:  # actions do that
        copy = gradient = 0
    gradient *= last
    scattered = round(time_of_groups(cluster, Exchange("reduce_scatter", own if stage.zero == 1 else gradient), inner))
    kept = trained if gradients else 0
    gathered = round(time_of_groups(cluster, Exchange("all_gather", copy if stage.zero == 3 else kept), inner))
    return scattered + between, gathered


def _groups_in(stage: Stage, size: int) -> dict[tuple[int, int], list[int]]:
    """{(shard, number of a group of replicas): its devices}"""
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for place, device in enumerate(stage.devices):
        found[place % stage.shards, place // stage.shards // size].append(device)
    return found


def _times_known(plan: Plan, stage: Stage, cluster: Cluster | None, known: _Known) -> bool:
    """Whether durations of a stage's actions follow from the profile: with exchanges inside only on known links.

    So it is where a group is in several nodes, or may be, and the profile says what its devices send each other.
    """
    if _knows_links(plan, cluster):
        return True
    sizes, node = GroupSizes.of(stage), plan.provenance.node_size or 1
    most = max(sizes.width, sizes.expert)
    groups = (stage.devices[at : at + most] for at in range(0, len(stage.devices), most))
    if any(len({device // node for device in group}) > 1 for group in groups) and any(
        row.messages is not None for block in stage.blocks for row in known.blocks[block].costs
    ):
        return False
    return stage.zero < 2 or not _sharing(stage)


def _sharing(stage: Stage) -> list[tuple[Stage, bool]]:
    """The stage, and as it is for experts that its devices share, where copies divide what is kept; whether latter."""
    sides = [(stage, False), *([(_as_on_experts(stage), True)] if stage.expert > 1 else [])]
    return [(side, of_experts) for side, of_experts in sides if _sharers(side) > 1]


class _InActions(NamedTuple):
    """Bytes on a device of what is whole while blocks run, as :func:`_exchanged`, and ns to gather and to reduce it."""

    copy: int = 0
    gradient: int = 0
    cast: int = 0
    gather_ns: int = 0
    reduce_ns: int = 0


def _in_actions(stage: Stage, blocks: Iterable[str], known: _Known, cluster: Cluster | None) -> _InActions:
    """What a stage exchanges of blocks at once: that of experts after the rest."""
    blocks, found = list(blocks), _InActions()
    for side, of_experts in _sharing(stage):
        groups = list(_groups_in(side, _sharers(side)).values())
        copy, gradient, cast = map(
            sum, zip(*(_exchanged(side, block, known, of_experts=of_experts) for block in blocks), strict=True)
        )
        gather = round(time_of_groups(cluster, Exchange("all_gather", copy), groups))
        reduce = round(time_of_groups(cluster, Exchange("reduce_scatter", gradient), groups))
        found = _InActions(*map(sum, zip(found, (copy, gradient, cast, gather, reduce), strict=True)))
    return found


def _contention_of(stage: Stage, cluster: Cluster | None) -> float:
    """Of all groups of a stage that exchange."""
    sides = [side for side, _ in _sharing(stage)]
    return contention_among(cluster, [group for side in sides for group in _groups_in(side, _sharers(side)).values()])


def _exchanged(stage: Stage, block: str, known: _Known, *, of_experts: bool = False) -> tuple[int, int, int]:
    """Bytes on a device of what is whole while a block runs: the copy that computes, gradients, the cast part of that.

    Levels 2 and 3 reduce gradients block by block, and level 3 gathers the copy; where parameters are cast at each use
    all of it is made for that, and the block's workspace counts it. Experts that devices share are apart.
    """
    own, found = _of_experts(block, stage.expert, known), known.blocks[block]
    running = running_bytes(found, known.recipe)
    apart = running * found.expert_parameters // max(1, found.parameters + found.frozen_parameters) if own.total else 0
    if of_experts:
        kept, running = own, apart
    else:
        kept = _of_shards(block, stage.shards, known) - own
        running = running_bytes(found, known.recipe, stage.shards) - apart
    cast = math.ceil(running / stage.shards)
    copy = cast if known.cast else math.ceil(kept[PARAMETERS] / stage.shards)
    gathers = stage.zero == 3
    return copy * gathers, math.ceil(kept[GRADIENTS] / stage.shards), cast * gathers


def _exchanging(stage: Stage, rows: list[CostRow], known: _Known, cluster: Cluster | None) -> list[CostRow]:
    """Rows of blocks that exchange what replicas divide, beside their compute: each takes what is longer.

    Before F, B and I its copy is gathered, after B and W its gradients are reduced. Of both there is room for two
    blocks, of which one is exchanged while the other runs.
    """
    if stage.zero < 2 or not _sharing(stage):
        return rows
    if stage.reduce_every is not None:
        return _beside_actions(stage, rows, known, cluster)
    contention = _contention_of(stage, cluster)

    def beside(block: str, row: CostRow) -> CostRow:
        copy, gradient, cast, gather, reduce = _in_actions(stage, [block], known, cluster)
        whole = row.backward_ns
        if whole is None:
            whole = (row.input_grad_ns or 0) + (row.weight_grad_ns or 0)
        changes = {
            "forward_ns": _beside(gather, row.forward_ns, contention),
            "backward_ns": _beside(gather + reduce, whole, contention),
            "workspace_bytes": row.workspace_bytes + copy + copy - cast + gradient + gradient,
        }
        if row.input_grad_ns is not None and row.weight_grad_ns is not None:
            changes |= {
                "input_grad_ns": _beside(gather, row.input_grad_ns, contention),
                "weight_grad_ns": _beside(reduce, row.weight_grad_ns, contention),
            }
        return row.model_copy(update=changes)

    return _changed_rows(stage, rows, known, beside)


def _changed_rows(
    stage: Stage, rows: list[CostRow], known: _Known, change: Callable[[str, CostRow], CostRow]
) -> list[CostRow]:
    """The rows of a stage's blocks, changed once for all that are alike and have the same."""
    found: dict[tuple[str, int], CostRow] = {}
    keys = [(known.alike[block], id(row)) for block, row in zip(stage.blocks, rows, strict=True)]
    for key, block, row in checked(zip(keys, stage.blocks, rows, strict=True), 4):
        if key not in found:
            found[key] = change(block, row)
    return [found[key] for key in keys]


def _beside_actions(stage: Stage, rows: list[CostRow], known: _Known, cluster: Cluster | None) -> list[CostRow]:
    """Rows of blocks whose state actions of programs exchange: compute alone, slower by the cluster's contention.

    An exchange for several actions slows each of them by as much. What is cast for it is no workspace of a block.
    """
    per_use, per_sum = stage.unshard_every or 1, stage.reduce_every or 1
    contention = _contention_of(stage, cluster)

    def slowed(time: int, beside: float) -> int:
        return time + round(contention * beside)

    def beside(block: str, row: CostRow) -> CostRow:
        own = _in_actions(stage, [block], known, cluster)
        gather, reduce = own.gather_ns / per_use, own.reduce_ns / per_sum
        whole = row.backward_ns
        if whole is None:
            whole = (row.input_grad_ns or 0) + (row.weight_grad_ns or 0)
        changes = {
            "forward_ns": slowed(row.forward_ns, gather),
            "backward_ns": slowed(whole, gather + reduce),
            "workspace_bytes": max(0, row.workspace_bytes - own.cast),
        }
        if row.input_grad_ns is not None and row.weight_grad_ns is not None:
            changes |= {
                "input_grad_ns": slowed(row.input_grad_ns, gather),
                "weight_grad_ns": slowed(row.weight_grad_ns, reduce),
            }
        return row.model_copy(update=changes)

    return _changed_rows(stage, rows, known, beside)


def _check_groups(
    number: int,
    stage: Stage,
    operations: Sequence[Operation],
    rows: Sequence[CostRow],
    known: _Known,
    cluster: Cluster | None,
    findings: Findings,
    *,
    timed: bool,
) -> None:
    """A group's bytes are those of its blocks, its exchanges take what these do together, its part of actions as well.

    What an action takes beside its blocks is of the group that it comes to last.
    """
    begin = 0
    for place, group in enumerate(stage.block_groups):
        end = begin + group.blocks
        own = _in_actions(stage, stage.blocks[begin:end], known, cluster)
        expected = {"gathered_bytes": own.copy, "reduced_bytes": own.gradient}
        expected |= {"unshard_ns": own.gather_ns, "reduce_ns": own.reduce_ns} if timed else {}
        for operation in operations if timed else ():
            last = place == (len(stage.block_groups) - 1 if operation.role is Role.FORWARD else 0)
            name = {Role.FORWARD: "forward_ns", Role.WEIGHT_GRAD: "weight_grad_ns"}.get(operation.role, "backward_ns")
            if not last:
                expected[name] = sum(_duration(row, operation.role) or 0 for row in rows[begin:end])
        _compare(f"stages[{number}].block_groups[{place}]", group, expected, findings)
        begin = end


def _beside(exchange: int, compute: int, contention: float) -> int:
    """Ns of compute and an exchange at the same time: the first is slower by the contention meanwhile."""
    slowed = compute + round(contention * exchange)
    return slowed if slowed > exchange else exchange


def _inside_ns(stage: Stage, profile: Profile, apart: set[str], known: _Known, cluster: Cluster | None) -> int:
    """What a replica's devices take to sum gradients over those that share samples or places, block by block.

    What several of its blocks share is summed with the first one's, if that is cheaper or the whole of it is not known
    to be; where they split it unlike, whole over all. Tied parameters of the same blocks count as one.
    """
    shards = [stage.mesh_of(place).size_of(SHARDS) for place in range(len(stage.blocks))]
    sharing = [stage.mesh_of(place).size_of(EXPERTS) for place in range(len(stage.blocks))]
    own = [_of_experts(*each, known)[GRADIENTS] for each in zip(stage.blocks, sharing, strict=True)]
    left = [_of_shards(*each, known)[GRADIENTS] for each in zip(stage.blocks, shards, strict=True)]
    parts = [_parts_held(known, stage, place) for place in range(len(stage.blocks))]
    cuts = [held[0].num_parts for held in parts]
    taken = [0] * len(stage.blocks)

    def time(place: int) -> int:
        rest = -(-(left[place] - own[place]) // cuts[place]) - taken[place] // cuts[place]
        every, among = rest - (-own[place] // sharing[place]), partial(sum_time, cluster, stage.shards)
        mesh = stage.mesh_of(place)
        return among(mesh, every) + among(mesh, rest, along=(EXPERTS,))

    groups: dict[tuple[str, ...], int] = defaultdict(int)
    for tied in sorted(profile.tied, key=lambda each: known.kept_tied[each.name].total, reverse=True):
        kept = known.kept_tied[tied.name]
        if tied.name not in apart and kept.total:
            groups[tied.blocks] += kept[GRADIENTS]
        for place, block in enumerate(stage.blocks):
            taken[place] += kept[GRADIENTS] if tied.name in apart and block in tied.blocks else 0
    total = sum(map(time, range(len(stage.blocks))))
    for place, (block, count) in enumerate(zip(stage.blocks, shards, strict=True)):
        if count in known.divided[block]:  # each shard makes a part of what it has whole
            whole = known.repeated[block][GRADIENTS]
            total += sum_time(cluster, stage.shards, stage.mesh_of(place), whole, along=(SHARDS,))
    for users, size in groups.items():
        places = [stage.blocks.index(block) for block in users if block in stage.blocks]
        if len(places) < 2:
            continue
        with_it = [time(place) for place in places]
        for place in places:
            taken[place] += size
        each = [before - time(place) for before, place in zip(with_it, places, strict=True)]
        whole = sum_time(cluster, stage.shards, Mesh(((SAMPLES, stage.shards),)), size)
        once = whole if len({parts[place] for place in places}) > 1 else min(each[0], whole)
        total += once - sum(each)
    return total


class _Totals(NamedTuple):
    """What actions of one role do in a stage by its blocks' rows: ns, None where rows lack some, and bytes."""

    compute_ns: int | None
    acquire: int
    release: int
    workspace: int


def _totals(rows: Sequence[CostRow], again: int) -> dict[Role, _Totals]:
    """Durations add up over the blocks; activations are taken by F (and I), and given back by B, or by I and W.

    ``again`` bytes are of tensors that blocks count and the stage does not hold.
    """
    held = max(0, sum(row.activation_bytes for row in rows) - again)
    deferred = sum(row.weight_grad_bytes for row in rows)
    workspace = max(row.workspace_bytes for row in rows)
    effects = {
        Role.FORWARD: (held, 0),
        Role.BACKWARD: (0, held),
        Role.INPUT_GRAD: (max(0, deferred - held), max(0, held - deferred)),
        Role.WEIGHT_GRAD: (0, deferred),
    }
    found = {}
    for role, effect in effects.items():
        durations = [_duration(row, role) for row in rows]
        there = [duration for duration in durations if duration is not None]
        found[role] = _Totals(sum(there) if len(there) == len(rows) else None, *effect, workspace)
    return found


def _check_operations(
    operations: Sequence[Operation],
    totals: dict[Role, _Totals],
    split_overhead_ns: int,
    ends: tuple[int | None, int | None],
    findings: Findings,
    *,
    timed: bool,
) -> None:
    """Operations of a stage do what its blocks do in ``totals``.

    ``ends`` are how long F gathers what leaves the stage, and B or I the gradients of what came; None where that is not
    known. What lasts how long is compared only where it is ``timed``.
    """
    gathering = dict(zip((Role.FORWARD, Role.BACKWARD, Role.INPUT_GRAD), (*ends, ends[1]), strict=True))
    for operation in operations:
        place, total = f"operations[{operation.id}]", totals[operation.role]
        if total.compute_ns is None:
            findings.add("profile", place, "the profile has no input_grad_ns and weight_grad_ns for some block")
            continue
        overhead = split_overhead_ns if operation.role in (Role.INPUT_GRAD, Role.WEIGHT_GRAD) else 0
        gather = gathering.get(operation.role, 0)
        expected = {
            **({} if gather is None or not timed else {"duration_ns": max(1, total.compute_ns + overhead + gather)}),
            "acquire_bytes": total.acquire,
            "release_bytes": total.release,
            "workspace_bytes": total.workspace,
        }
        _compare(place, operation, expected, findings)


def _check_parts(stage: Stage, operation: Operation, rows: Sequence[CostRow], findings: Findings) -> None:
    """A part takes what its blocks do, and the last one what no block does; but none less than 1 ns of the longest."""
    times = [_duration(row, operation.role) or 0 for row in rows]
    if operation.role is not Role.FORWARD:
        times.reverse()
    ends = stage.cuts if operation.role is Role.FORWARD else [len(rows) - cut for cut in reversed(stage.cuts)]
    expected = [sum(times[begin:end]) for begin, end in itertools.pairwise((0, *ends, len(rows)))]
    expected[-1] += operation.duration_ns - sum(expected)
    longest = expected.index(max(expected))
    lent = sum(max(0, 1 - ns) for ns in expected)
    expected = [max(1, ns) for ns in expected]
    expected[longest] -= lent
    if list(operation.parts_ns) != expected:
        text = f"is {list(operation.parts_ns)}, the profile gives {expected}"
        findings.add("profile", f"operations[{operation.id}].parts_ns", text)


def _check_part_ends(
    plan: Plan, number: int, dependency: Dependency, edges: Sequence[Edge], findings: Findings
) -> None:
    """What an edge brings leaves no sooner than its block has run, and is there before the block that takes it runs."""
    source, target = plan.stage_of(dependency.source), plan.stage_of(dependency.target)
    back = dependency.source_role is not Role.FORWARD
    for edge in edges:
        makes, takes = (edge.target, edge.source) if back else (edge.source, edge.target)
        made, needed = _part_with(source, makes, back=back), _part_with(target, takes, back=back)
        said = len(source.cuts) if dependency.source_part is None else dependency.source_part
        if said < made:
            text = f"is {said}, but {makes!r} runs in part {made} of {dependency.source}"
            findings.add("profile", f"dependencies[{number}].source_part", text)
        if dependency.target_part > needed:
            text = f"is {dependency.target_part}, but {takes!r} runs in part {needed} of {dependency.target}"
            findings.add("profile", f"dependencies[{number}].target_part", text)


def _part_with(stage: Stage, block: str, *, back: bool) -> int:
    """The part of forward that runs a block, or the part of backward."""
    before = sum(cut <= stage.blocks.index(block) for cut in stage.cuts)
    return len(stage.cuts) - before if back else before


def _duration(row: CostRow, role: Role) -> int | None:
    """Time of one block, None where the row does not have it; a full backward is also I and W after each other."""
    whole = (row.input_grad_ns or 0) + (row.weight_grad_ns or 0) if row.backward_ns is None else row.backward_ns
    times = {
        Role.FORWARD: row.forward_ns,
        Role.BACKWARD: whole,
        Role.INPUT_GRAD: row.input_grad_ns,
        Role.WEIGHT_GRAD: row.weight_grad_ns,
    }
    return times[role]


def _check_dependencies(
    plan: Plan,
    profile: Profile,
    between: dict[tuple[int, int, bool], _Between],
    known: _Known,
    cluster: Cluster | None,
    findings: Findings,
    factor: Callable[[Hop], Fraction],
) -> None:
    """Dependencies between stages are the profile's edges: outputs along them, gradients against them."""
    expected = _expected(plan, profile)
    stated = {(dependency.source, dependency.target) for dependency in plan.dependencies}
    for source, target in sorted(set(expected) - stated):
        if _led_by_instructions(plan, source, target):
            continue
        edges = expected[source, target]
        why = (
            f"the profile has an edge {edges[0].source!r} -> {edges[0].target!r}"
            if edges
            else f"stages of a {plan.placement} placement run one after the other"
        )
        text = f"{source} -> {target} is missing: {why}"
        findings.add("profile", "dependencies", text)
    for number, dependency in enumerate(plan.dependencies):
        pair = dependency.source, dependency.target
        if pair in expected:
            if dependency.has_parts:
                _check_part_ends(plan, number, dependency, expected[pair], findings)
            ends = dependency.source_stage, dependency.target_stage, dependency.source_role is not Role.FORWARD
            tensors = between[ends].tensors.values() if ends in between else ()
            cuts = [between[ends].cut(each, dependency.slices, known) for each in tensors]
            if dependency.slices > 1 and max(cuts, default=1) == 1:
                text = f"is {dependency.slices}, but no block of {pair[1]}'s stage takes slices of what it brings"
                findings.add("profile", f"dependencies[{number}].slices", text)
            sent = [(each[0], cut) for each, cut in zip(tensors, cuts, strict=True)]
            _check_hops(plan, number, dependency, sent, cluster, findings, factor)
        elif dependency.later:
            check_returned(plan, number, dependency, cluster, findings, timed=_knows_links(plan, cluster))
        elif dependency.source_stage != dependency.target_stage and not dependency.has_instruction:
            text = f"{pair[0]} -> {pair[1]} comes from no edge of the profile"
            findings.add("profile", f"dependencies[{number}]", text)


def _led_by_instructions(plan: Plan, source: str, target: str) -> bool:
    """Whether a way of dependencies leads from one operation to another, with only instructions in between."""
    reached, left = {source}, [source]
    while left:
        at = left.pop()
        for dependency in plan.dependencies:
            goes_on = dependency.source == at and dependency.target not in reached
            if goes_on and (dependency.target == target or is_instruction(dependency.target_kind)):
                reached.add(dependency.target)
                left.append(dependency.target)
    return target in reached


def _expected(plan: Plan, profile: Profile) -> _EdgesByPair:
    """Dependencies between stages, each with the edges it comes from."""
    stage_of = {(stage.route, block): n for n, stage in enumerate(plan.stages) for block in stage.blocks}
    forward = {operation.stage: operation.id for operation in plan.operations if operation.role is Role.FORWARD}
    back = {operation.stage: operation.id for operation in plan.operations if operation.role in BACKWARD_ROLES}
    found: _EdgesByPair = defaultdict(list)
    sent: set[tuple[object, ...]] = set()  # a tensor goes to a stage once
    for route, edge in itertools.product(sorted({route for route, _ in stage_of}), profile.edges):
        source, target = stage_of[route, edge.source], stage_of[route, edge.target]
        ways = [(forward, source, target), *([(back, target, source)] if edge.gradient else [])]
        for ids, sender, receiver in ways if source != target else ():
            if not {sender, receiver} <= ids.keys():  # which is refused elsewhere
                continue
            pair = ids[sender], ids[receiver]
            if edge.tensor is None or (pair, edge.source, edge.tensor) not in sent:
                found[pair].append(edge)
                sent.add((pair, edge.source, edge.tensor))
    if is_in_line(plan.placement):  # each stage waits for the one before it, with nothing to send if no edge joins them
        for before, after in itertools.pairwise(sorted(forward)):
            joined = (forward[before], forward[after]) in found
            found.setdefault((forward[before], forward[after]), [])
            if not joined and {before, after} <= back.keys():
                found[back[after], back[before]] = []
    return dict(found)


def _held_too_often(stage: Stage, known: _Known) -> int:
    """Bytes that rows of the stage's blocks count and the stage does not hold: each tensor is there once, if at all.

    What comes from another stage is kept for its gradient; what a block of the stage makes only where the backward of
    that, or of one that takes it, needs it. Slices are other tensors than the whole.
    """
    samples, again = stage.microbatch_size // stage.replicas, dict(zip(stage.blocks, stage.again, strict=True))
    rows: dict[tuple[object, bool], list[int]] = defaultdict(list)
    kept: dict[tuple[object, bool], int] = {}
    for edge in itertools.chain.from_iterable(known.into.get(block, ()) for block in stage.blocks):
        takes, makes = again[edge.target], again.get(edge.source)
        need = edge.saved or ("yes" if edge.gradient else "again")
        if not (takes is True or edge.gradient or need == "yes"):
            continue
        divided = _is_divided(edge.target, stage, known)
        tensor = (edge.source, edge.target if edge.tensor is None else (edge.tensor,)), divided
        size = _taken_bytes(edge, samples, stage, known)
        rows[tensor].append(size)
        if makes is None or need == "yes" or (takes is True and need == "again"):
            kept[tensor] = size
        own = makes is not None and makes is not True and _is_divided(edge.source, stage, known) == divided
        if own and (edge.saved_by_source == "yes" or (edge.saved_by_source == "core" and makes is False)):
            if len(rows[tensor]) == 1:
                rows[tensor].append(size)
            kept[tensor] = size
    return sum(sum(sizes) - kept.get(tensor, 0) for tensor, sizes in rows.items())


def _is_divided(block: str, stage: Stage, known: _Known) -> bool:
    """Whether the devices of a stage divide what the block takes and gives along the sequence."""
    return stage.shards in known.divided[block]


def _taken_bytes(edge: Edge, samples: int, stage: Stage, known: _Known) -> int:
    """What each device of a stage has of what one of its blocks takes: a slice of each sample's sequence, or all."""
    parts = stage.context * (stage.shards if _is_divided(edge.target, stage, known) else 1)
    return _tensor_bytes(edge, samples, parts)


class _Between(NamedTuple):
    """The edges from one stage to another, or those that gradients go back along, by the tensor they carry."""

    tensors: dict[object, list[Edge]]
    sender: Stage
    receiver: Stage
    back: bool

    def cut(self, edges: Sequence[Edge], slices: int, known: _Known) -> int:
        """Of how many slices a message brings each device one: those that its receiver's blocks all take."""
        if slices == 1:
            return 1
        blocks = {edges[0].source} if self.back else {edge.target for edge in edges}
        kept = all(_is_divided(block, self.receiver, known) for block in blocks)
        return slices if kept and not edges[0].broadcast else 1

    def held(self, edges: Sequence[Edge], known: _Known) -> int:
        """Into how many slices its sender's devices divide a tensor."""
        if self.sender.shards == 1:
            return 1
        blocks = {edge.target for edge in edges} if self.back else {edges[0].source}
        divided = any(_is_divided(block, self.sender, known) for block in blocks)
        return self.sender.shards if divided and not edges[0].broadcast else 1


def _between(plan: Plan, profile: Profile) -> dict[tuple[int, int, bool], _Between]:
    """{(stage, stage, whether gradients go back)}: what the first sends to the second."""
    homes = {(stage.route, block): number for number, stage in enumerate(plan.stages) for block in stage.blocks}
    found: dict[tuple[int, int, bool], _Between] = {}
    for index, edge in enumerate(profile.edges):
        key = index if edge.tensor is None else (edge.source, edge.tensor)
        for route in range(plan.num_routes):
            source, target = homes.get((route, edge.source)), homes.get((route, edge.target))
            if source is None or target is None or source == target:
                continue
            for sender, receiver, back in ((source, target, False), (target, source, True)):
                if edge.gradient or not back:
                    ends = plan.stages[sender], plan.stages[receiver]
                    own = found.setdefault((sender, receiver, back), _Between({}, *ends, back))
                    own.tensors.setdefault(key, []).append(edge)
    return found


def _gathers_at_ends(
    plan: Plan, between: dict[tuple[int, int, bool], _Between], known: _Known, cluster: Cluster | None
) -> dict[int, tuple[int | None, int | None]]:
    """[stage] how long F and B gather what leaves in larger slices than its devices have, each tensor once.

    What instructions move, they have whole. The times are not known without the plan's cluster.
    """
    said = {
        (each.source_stage, each.target_stage, each.source_role is not Role.FORWARD): each.slices
        for each in plan.dependencies
        if not each.has_instruction
    }
    gathered: dict[int, tuple[dict[object, int], dict[object, int]]] = defaultdict(lambda: ({}, {}))
    for (number, other, back), own in between.items():
        stage = own.sender
        for name, edges in own.tensors.items():
            held = own.held(edges, known)
            left = math.gcd(held, own.cut(edges, said.get((number, other, back), 1), known))
            if left == held:
                continue
            size = _tensor_bytes(edges[0], stage.microbatch_size // stage.replicas, stage.context * left)
            firsts = range(0, len(stage.devices), held // left)
            times = [all_gather_time(cluster, stage.devices[at : at + held // left], size) for at in firsts]
            gathered[number][back][name, left] = max(times)
    known_links = _knows_links(plan, cluster)

    def total(times: dict[object, int]) -> int | None:
        return sum(times.values()) if known_links or not times else None

    return {number: (total(forth), total(back)) for number, (forth, back) in gathered.items()}


def _check_hops(
    plan: Plan,
    number: int,
    dependency: Dependency,
    sent: Sequence[tuple[Edge, int]],
    cluster: Cluster | None,
    findings: Findings,
    factor: Callable[[Hop], Fraction],
) -> None:
    """Bytes of the samples it carries at most; a fixed time goes before the cluster's and occupies no link.

    Of each tensor that is ``sent`` it carries one of so many slices.
    """
    source, target = plan.stage_of(dependency.source), plan.stage_of(dependency.target)
    if not (source.route == target.route and shares_evenly(source) and shares_evenly(target)):
        return
    if source.context != target.context:  # refused whatever the profile
        return
    carried, makers = deliveries_of(source, target), copies_of(source)
    for index, hop in enumerate(dependency.hops):
        place = f"dependencies[{number}].hops[{index}]"
        samples = max(carried.get((hop.target_device, makers[hop.source_device]), {}).values(), default=0)
        sizes = [(edge, _tensor_bytes(edge, samples, source.context * cut)) for edge, cut in sent]
        expected = {"bytes": sum(size for _, size in sizes)}
        if _knows_links(plan, cluster):
            expected |= _times(hop, sizes, cluster, factor(hop))
        _compare(place, hop, expected, findings)


def _times(hop: Hop, sizes: Sequence[tuple[Edge, int]], cluster: Cluster | None, factor: Fraction) -> dict[str, int]:
    priced = [size for edge, size in sizes if edge.transfer_ns is None]
    fixed = max((edge.transfer_ns for edge, _ in sizes if edge.transfer_ns is not None), default=0)
    latency, occupancy = 0, 0
    if priced:
        latency, occupancy = transfer_time(cluster, hop.source_device, hop.target_device, sum(priced))
    return {"latency_ns": max(latency, fixed), "occupancy_ns": math.ceil(occupancy * factor)}


def _tensor_bytes(edge: Edge, samples: int, parts: int = 1) -> int:
    """Bytes of one of equal parts of each sample, rounded up; a tensor for all samples is whole everywhere."""
    return edge.bytes_per_sample if edge.broadcast else -(-edge.bytes_per_sample * samples // parts)


def _compare(
    place: str,
    stated: Stage | Bucket | BlockGroup | TiedState | Operation | Hop,
    expected: dict[str, int],
    findings: Findings,
) -> None:
    for name, value in expected.items():
        if getattr(stated, name) != value:
            findings.add("profile", f"{place}.{name}", f"is {getattr(stated, name)}, the profile gives {value}")
