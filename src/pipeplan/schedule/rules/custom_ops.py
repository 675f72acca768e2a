"""Instructions in a workload (FlexPipe section 4.2, Fig. 6): operations of new kinds, each with a stage of its own.

The stage has no blocks. Its micro-batches are as many times the workload's as the instruction's unit says; that actions
depend on each other where they hold the same samples then gives the counts that ``check_prev_dep`` and
``check_nxt_dep`` of Fig. 6 state. Other counts can be stated by functions, and stand in the workload as numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from pipeplan.costs.communication import all_gather_time
from pipeplan.errors import UsageError
from pipeplan.files import Cluster
from pipeplan.graphs import CycleError, find_cycle, in_circle, topological_order
from pipeplan.schedule.rules.language import CustomOp, Ready, answer_of
from pipeplan.workload.action import operation_of
from pipeplan.workload.elements import Dependency, Hop, Operation, Stage, slots_of
from pipeplan.workload.kinds import Role, is_instruction
from pipeplan.workload.samples import Slots
from pipeplan.workload.workload import Workload


def with_instructions(workload: Workload, instructions: Iterable[CustomOp], cluster: Cluster | None = None) -> Workload:
    """The workload with these instructions, one after the other; later ones may stand after or before earlier ones.

    Raises:
        UsageError: as :func:`with_instruction`, and an instruction names a later one.
    """
    order = tuple(instructions)
    for number, instruction in enumerate(order):
        _require_earlier(workload, order[number:])
        workload = with_instruction(workload, instruction, cluster)
    return workload


def with_instruction(workload: Workload, instruction: CustomOp, cluster: Cluster | None = None) -> Workload:
    """The workload with an instruction between what it stands after and what it stands before.

    A dependency from the one to the other then goes through it: its messages end at the instruction where it does not
    stand on the devices that sent them, and are the instruction's own matter where it does.

    Raises:
        UsageError: the instruction names what is not there, waits for itself, is never ready, does not get or give what
            it carries on its devices, or its unit does not divide the mini-batch.
    """
    place = f"instruction {instruction.kind}"
    if workload.num_routes > 1:
        raise UsageError(f"{place}: the placement has {workload.num_routes} routes, and instructions need one")
    sources = _named(workload, instruction.after, place, last=True)
    targets = _named(workload, instruction.before, place, last=False)
    stage = _stage(workload, instruction, targets if instruction.devices == "before" else [*sources, *targets])
    if workload.mini_batch % stage.microbatch_size:
        raise UsageError(
            f"{place}: every {instruction.every} micro-batches are {stage.microbatch_size} samples, which do not "
            f"divide the mini-batch of {workload.mini_batch}; choose another number of micro-batches"
        )
    operation = _operation(workload, instruction, stage, cluster)
    grown = replace(workload, stages=(*workload.stages, stage), operations=(*workload.operations, operation))
    joined = _TiedOp(grown, instruction, operation)
    dependencies = joined.dependencies(sources, targets)
    return replace(grown, operations=_sorted(grown.operations, dependencies, place), dependencies=dependencies)


def _require_earlier(workload: Workload, instructions: Sequence[CustomOp]) -> None:
    """The first of these, which the workload has not yet, names none of them."""
    first, kinds = instructions[0], {each.kind for each in instructions}
    for key, names in (("after", first.after), ("before", first.before)):
        for name in names:
            if name in kinds and not _found(workload, name, last=True):
                raise UsageError(
                    f"instruction {first.kind}: {key} names {name}, and an instruction can only stand after or before "
                    f"earlier ones; {_circle(instructions) or f'write {name} in front of {first.kind}'}"
                )


def _circle(instructions: Sequence[CustomOp]) -> str:
    """Which of the instructions would wait for each other; empty if none would."""
    edges: list[tuple[int | str, int | str]] = [(name, each.kind) for each in instructions for name in each.after]
    edges += [(each.kind, name) for each in instructions for name in each.before]
    cycle = find_cycle(edges)
    if cycle is None:
        return ""
    circle = in_circle(cycle, " before ")
    return f"these would wait for each other in a circle: {circle}; leave out one of its steps"


def _stage(workload: Workload, instruction: CustomOp, ends: Sequence[str]) -> Stage:
    """A stage without blocks, on the devices of its ends unless others are given."""
    own = {device for id_ in ends for device in workload.stages[operation_of(id_)[0]].devices}
    given = () if instruction.devices == "before" else instruction.devices
    devices = given or tuple(sorted(own))
    if len(set(devices)) != len(devices) or not set(devices) <= set(range(len(workload.devices))):
        raise UsageError(
            f"instruction {instruction.kind}: devices {list(devices)} must be different ones of the "
            f"{len(workload.devices)} there are"
        )
    size = instruction.every * workload.microbatch_size
    return Stage(blocks=(), devices=devices, shards=len(devices), microbatch_size=size)


def _operation(workload: Workload, instruction: CustomOp, stage: Stage, cluster: Cluster | None) -> Operation:
    duration_ns = instruction.duration_ns
    if duration_ns is None:
        duration_ns = all_gather_time(cluster, stage.devices, instruction.bytes_per_sample * stage.microbatch_size)
    return Operation(
        kind=instruction.kind,
        stage=len(workload.stages),
        duration_ns=max(1, duration_ns),
        attributes=dict(instruction.attributes),
    )


def _named(workload: Workload, names: Sequence[int | str], place: str, *, last: bool) -> list[str]:
    """The operations meant by stages, blocks, operations and kinds of instructions, each once."""
    found = [id_ for name in names for id_ in _meant(workload, name, place, last=last)]
    return list(dict.fromkeys(found))


def _meant(workload: Workload, name: int | str, place: str, *, last: bool) -> list[str]:
    found = _found(workload, name, last=last)
    if not found:
        key = "after" if last else "before"
        raise UsageError(
            f"{place}: {key} names {name!r}, which is no stage (0 to {len(workload.stages) - 1}), no block, no "
            "operation such as 2B and no earlier instruction"
        )
    return found


def _found(workload: Workload, name: int | str, *, last: bool) -> list[str]:
    """The operations that a name means, if any."""
    ids = [operation.id for operation in workload.operations]
    instructions = [operation.id for operation in workload.instructions if operation.kind == name]
    if isinstance(name, int) and f"{name}F" in ids:
        return [f"{name}F"]
    if name in ids:
        return [str(name)]
    # a backward in two parts begins with the input gradient
    split = {f"{each.stage}B": each.id for each in workload.operations if each.role is Role.INPUT_GRAD}
    if name in split:
        return [split[str(name)]]
    return instructions or _of_blocks(workload, str(name), last=last)


def _of_blocks(workload: Workload, pattern: str, *, last: bool) -> list[str]:
    """Forwards of the stages with such blocks: those that no other of them follows, or that follow no other."""
    stages = {
        index
        for index, stage in enumerate(workload.stages)
        if any(fnmatchcase(block, pattern) for block in stage.blocks)
    }
    steps = [edge for edge in workload.stage_edges if stages.issuperset(edge)]
    inner = {source if last else target for source, target in steps}
    return [f"{stage}F" for stage in sorted(stages - inner)]


@dataclass(frozen=True, slots=True)
class _TiedOp:
    """Ties an instruction's operation into a workload that has its stage."""

    workload: Workload
    instruction: CustomOp
    operation: Operation

    def dependencies(self, sources: Sequence[str], targets: Sequence[str]) -> tuple[Dependency, ...]:
        """All of the workload's, those between stages from a source to a target led through the instruction."""
        between = [each for each in self.workload.dependencies if _leads(each, sources, targets)]
        kept = [each for each in self.workload.dependencies if not _leads(each, sources, targets)]
        into = [self._into(id_, [each for each in between if each.source == id_]) for id_ in sources]
        out = [self._out(id_, [each for each in between if each.target == id_]) for id_ in targets]
        return (*kept, *into, *out)

    def _into(self, source: str, between: Sequence[Dependency]) -> Dependency:
        """From a source: without messages if the instruction is on its devices, otherwise by the previous ones."""
        own, devices = self._devices(self.operation.id), self._devices(source)
        hops = [hop for each in between for hop in each.hops if hop.target_device in own]
        hops = [] if set(devices) <= set(own) else list({(h.source_device, h.target_device): h for h in hops}.values())
        missing = sorted(set(own) - set(devices) - {hop.target_device for hop in hops})
        if not set(devices) <= set(own) and missing:
            raise UsageError(
                f"{self._place}: device {missing[0]} gets nothing from {source}, which runs on {list(devices)}; give "
                f"devices that are among those, or where messages of {source} go"
            )
        self._require_whole(source, hops)
        needs = self._needs(source, self.operation.id, self.instruction.check_prev, hops)
        return Dependency(source=source, target=self.operation.id, hops=tuple(hops), needs=needs)

    def _out(self, target: str, between: Sequence[Dependency]) -> Dependency:
        """To a target on the instruction's devices, where what it brings is at once."""
        missing = sorted(set(self._devices(target)) - set(self._devices(self.operation.id)))
        if missing and between:
            raise UsageError(
                f"{self._place}: {target} takes what it brings on device {missing[0]}, where it does not stand; "
                f"give devices with {missing[0]} among them"
            )
        needs = self._needs(self.operation.id, target, self.instruction.check_next, ())
        return Dependency(source=self.operation.id, target=target, needs=needs)

    def _require_whole(self, source: str, hops: Sequence[Hop]) -> None:
        """Messages that went to the target's micro-batches go to the instruction's alike: all of them."""
        if any(hop.run < hop.every for hop in hops):
            raise UsageError(
                f"{self._place}: messages of {source} go to several replicas in turn; give devices with those of "
                f"{source} among them"
            )

    def _needs(self, source: str, target: str, ready: Ready | None, hops: Sequence[Hop]) -> tuple[int, ...] | None:
        """[action of the target] how many actions of the source it waits for; None where samples say the same."""
        if ready is None:
            return None
        if hops:
            raise UsageError(f"{self._place}: {target} cannot count actions of {source}, which sends it messages")
        count, targets = self._count(source), self._count(target)
        found = tuple(self._least(source, target, number, count, ready) for number in range(targets))
        own, others = self._slots(target), self._slots(source)
        by_samples = tuple(others.sharing(own.samples(number)).stop for number in range(targets))
        return None if found == by_samples else found

    def _least(self, source: str, target: str, number: int, count: int, ready: Ready) -> int:
        stages = operation_of(source)[0], operation_of(target)[0]
        every = self.instruction.every
        asked = (
            answer_of(f"{self._place}'s check", ready, stages[0], n, stages[1], number, every) for n in range(count + 1)
        )
        least = next((n for n, is_ready in enumerate(asked) if is_ready), None)
        if least is None:
            raise UsageError(
                f"{self._place}: {target}{number} never becomes ready: its check refuses it even when all {count} "
                f"actions of {source} are done"
            )
        return least

    @property
    def _place(self) -> str:
        return f"instruction {self.instruction.kind}"

    def _devices(self, id_: str) -> tuple[int, ...]:
        return self.workload.stages[operation_of(id_)[0]].devices

    def _slots(self, id_: str) -> Slots:
        stage, kind = operation_of(id_)
        return slots_of(self.workload.stages[stage], kind, self.workload.mini_batch, self.workload.num_routes)

    def _count(self, id_: str) -> int:
        return len(self._slots(id_))


def _leads(dependency: Dependency, sources: Sequence[str], targets: Sequence[str]) -> bool:
    """Whether a dependency joins stages, from one of the sources to one of the targets; a stage's own order stays."""
    own = dependency.source_stage == dependency.target_stage
    return not own and dependency.source in sources and dependency.target in targets


def _sorted(operations: Sequence[Operation], dependencies: Sequence[Dependency], place: str) -> tuple[Operation, ...]:
    """The operations so that dependencies point forward, otherwise as they are; instructions as early as they can.

    Raises:
        UsageError: some wait for each other.
    """
    position = {operation.id: index for index, operation in enumerate(operations)}
    edges = [(each.source, each.target) for each in dependencies]
    try:
        order = topological_order(
            position, edges, key=lambda id_: (not is_instruction(operations[position[id_]].kind), position[id_])
        )
    except CycleError as error:
        raise UsageError(
            f"{place}: {in_circle(error.cycle)} would wait for each other; change after or before"
        ) from None
    return tuple(operations[position[id_]] for id_ in order)
