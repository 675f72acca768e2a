"""Actions in parts, before each of which they may wait for messages, and after each of which they send.

A stage as a whole waits for all its inputs. Where a later block is the first to take one, as a concatenation that ends
the stage of one branch takes the other branch's output, what stands before it can run already: that is how GraphPipe's
pipeline of Fig. 3.9 has a depth of 4. Backward is the mirror image: what goes to the other branch leaves as soon as the
blocks that took it have their gradients.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from pipeplan.costs.context import of_stages
from pipeplan.costs.kinds import on_kinds
from pipeplan.costs.stages import group_costs
from pipeplan.costs.wide_groups import where_it_stands
from pipeplan.costs.zero import Exchanging, Experts, Zero
from pipeplan.files import Cluster, Edge, Profile
from pipeplan.workload.elements import Dependency, Operation, Stage
from pipeplan.workload.kinds import PARTED_ROLES, Role
from pipeplan.workload.workload import Workload

Cuts = Sequence[Sequence[int]]
"""[stage] how many of its blocks stand before each of its parts but the first."""


def with_late_inputs(
    profile: Profile, workload: Workload, cluster: Cluster | None = None, cuts: Cuts | None = None
) -> Workload:
    """The workload whose actions have as many parts as there are moments at which they take or give something.

    Or as many as ``cuts`` say. The same workload where all take everything at once. Stages with configurations, and
    those with forwards of halves of micro-batches, stay whole.
    """
    places = _crossings(profile, workload)
    own = defaultdict[int, list[Operation]](list)
    for operation in workload.operations:
        if operation.role in PARTED_ROLES:
            own[operation.stage].append(operation)
    every = zip(workload.stages, _wanted(workload, places) if cuts is None else cuts, strict=True)
    known = [
        _StageParts.of(profile, stage, own[number], wanted, cluster) for number, (stage, wanted) in enumerate(every)
    ]
    if not any(each.cuts for each in known):
        return workload
    return replace(
        workload,
        stages=tuple(replace(stage, cuts=each.cuts) for stage, each in zip(workload.stages, known, strict=True)),
        operations=tuple(replace(each, parts_ns=known[each.stage].times(each)) for each in workload.operations),
        dependencies=tuple(_between_parts(each, known, places) for each in workload.dependencies),
    )


@dataclass(frozen=True, slots=True)
class _Crossing:
    """What of its blocks a pair of stages exchanges: the last that makes, the first that takes, by their places.

    Of outputs, and of gradients, which go from the one that takes to the one that made. None where there are none.
    """

    forward: tuple[int, int]
    backward: tuple[int, int] | None


def _crossings(profile: Profile, workload: Workload) -> dict[tuple[int, int], _Crossing]:
    """{(stage, stage): ...} of stages of a route between which there are edges."""
    places: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    for number, stage in enumerate(workload.stages):
        for place, block in enumerate(stage.blocks):
            places[block].append((stage.route, number, place))
    found: dict[tuple[int, int], list[tuple[Edge, int, int]]] = defaultdict(list)
    for edge in profile.edges:
        for route, source, made in places[edge.source]:
            for other, target, taken in places[edge.target]:
                if route == other and source != target:
                    found[source, target].append((edge, made, taken))
    return {pair: _Crossing(_ends(each), _gradient_ends(each)) for pair, each in found.items()}


_Edges = Sequence[tuple[Edge, int, int]]


def _ends(edges: _Edges) -> tuple[int, int]:
    return max(made for _, made, _ in edges), min(taken for _, _, taken in edges)


def _gradient_ends(edges: _Edges) -> tuple[int, int] | None:
    back = [each for each in edges if each[0].gradient]
    return _ends(back) if back else None


@dataclass(frozen=True, slots=True)
class _StageParts:
    """A stage's parts in the order of its forward: where they begin, and what their blocks take, by role."""

    stage: Stage
    cuts: tuple[int, ...]
    block_ns: Mapping[Role, Sequence[int]]

    @classmethod
    def of(
        cls,
        profile: Profile,
        stage: Stage,
        own: Sequence[Operation],
        wanted: Collection[int],
        cluster: Cluster | None,
    ) -> _StageParts:
        """The parts of a stage cut before ``wanted`` blocks, as far as each part of its ``own`` actions takes time."""
        if stage.configurations or stage.num_parted or stage.segments or not stage.blocks or not wanted:
            return cls(stage, (), {})
        times = _block_times(profile, stage, cluster)
        kept: list[int] = []
        for cut in sorted(set(wanted)):
            parts = cls(stage, (*kept, cut), times)
            if all(min(parts.times(each), default=1) > 0 for each in own):
                kept.append(cut)
        return cls(stage, tuple(kept), times)

    def times(self, operation: Operation) -> tuple[int, ...]:
        """[part] ns, in the order in which the operation runs them; what is of no block is in the last.

        One that takes no time, as the backward of a concatenation, has 1 ns of the longest, so that what it makes is
        sent after the action has started.
        """
        if not self.cuts or operation.role not in PARTED_ROLES:
            return ()
        each = self.block_ns[operation.role]
        parts = [sum(each[begin:end]) for begin, end in pairwise((0, *self.cuts, len(each)))]
        if operation.role is not Role.FORWARD:
            parts.reverse()
        parts[-1] = operation.duration_ns - sum(parts[:-1])
        longest = parts.index(max(parts))
        parts = [max(1, ns) for ns in parts]
        parts[longest] -= sum(parts) - operation.duration_ns
        return tuple(parts)

    def part_of(self, place: int, role: Role) -> int:
        """The part that has a block, among those of forward or of backward."""
        part = sum(cut <= place for cut in self.cuts)
        return part if role is Role.FORWARD else len(self.cuts) - part


def _wanted(workload: Workload, crossings: Mapping[tuple[int, int], _Crossing]) -> list[set[int]]:
    """[stage] before which blocks something comes from another device, and after which something leaves for one."""
    stages = workload.stages
    found: list[set[int]] = [set() for _ in stages]
    for (source, target), crossing in crossings.items():
        apart = set(stages[source].devices) != set(stages[target].devices)
        for made, taken in (crossing.forward, crossing.backward or crossing.forward) if apart else ():
            found[target].add(taken)
            found[source].add(made + 1)
    return [own - {0, len(stage.blocks)} for own, stage in zip(found, stages, strict=True)]


def _block_times(profile: Profile, stage: Stage, cluster: Cluster | None) -> dict[Role, list[int]]:
    """By role, [block] ns."""
    again = dict(zip(stage.blocks, stage.again, strict=True))
    own = on_kinds(where_it_stands(of_stages(profile, [stage]), stage, cluster), stage.kinds)
    costs = [
        group_costs(
            own,
            [(block,)],
            stage.microbatch_size // stage.replicas,
            stage.shards,
            context=stage.context,
            recompute=again[block],
            zero=Zero.of(stage),
            exchanging=Exchanging.of(stage, cluster),
            experts=Experts.of(stage),
            speed=stage.speed,
        )[0]
        for block in stage.blocks
    ]
    return {
        Role.FORWARD: [cost.forward_ns for cost in costs],
        Role.BACKWARD: [cost.backward_ns for cost in costs],
        Role.INPUT_GRAD: [cost.input_grad_ns or 0 for cost in costs],
    }


def _between_parts(
    dependency: Dependency, parts: Sequence[_StageParts], crossings: Mapping[tuple[int, int], _Crossing]
) -> Dependency:
    """A dependency between stages that leaves after the part that makes it, for the part that needs it."""
    source, target, role = dependency.source_stage, dependency.target_stage, dependency.source_role
    forward = role is Role.FORWARD
    crossing = crossings.get((source, target) if forward else (target, source))
    if not dependency.hops or crossing is None or source == target or dependency.has_instruction:
        return dependency
    ends = crossing.forward if forward else crossing.backward
    if ends is None:
        return dependency
    made, taken = ends if forward else ends[::-1]
    part = parts[source].part_of(made, role)
    last = len(parts[source].cuts)
    return replace(
        dependency,
        source_part=part if part < last else None,
        target_part=parts[target].part_of(taken, role),
    )
