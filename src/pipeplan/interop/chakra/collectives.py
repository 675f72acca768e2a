"""What devices of a plan do together: exchange divided state, sum gradients, gather parameters; and their steps.

All of it stands on each rank in one order, so that no two ranks wait for each other. Sizes are as ASTRA-sim counts
them: of a reduction what each rank has before it, of a gathering the part that each rank has. Sums are there
where replicas have to sum, whatever links the plan's own times are of.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeplan.costs.zero import GATHERED, IN_ACTIONS, Zero, state_groups, updated_bytes
from pipeplan.errors import UsageError
from pipeplan.files import Plan
from pipeplan.interop.chakra.actions import Actions, micros, uses_of
from pipeplan.interop.chakra.drafts import Before, DraftNode, Drafts
from pipeplan.interop.chakra.wire import CollectiveType
from pipeplan.simulator.simulation import Simulation
from pipeplan.workload.elements import Stage
from pipeplan.workload.exchanges import StateRun, StateTexts, passes
from pipeplan.workload.kinds import GRADIENTS, PARAMETERS, RESHARD, UNSHARD
from pipeplan.workload.network_jobs import NetworkJob

_NOT_SAID = "a plan does not say how many of its bytes go to whom, and a Chakra trace has to"


class TogetherNodes:
    """The networks of a plan's devices: what they do one after another, and then the steps of optimizers."""

    def __init__(self, simulation: Simulation, actions: Actions, sums: Sequence[NetworkJob], to: Drafts) -> None:
        self._simulation, self._actions, self._to = simulation, actions, to
        self._plan, self._workload = simulation.plan, simulation.graph.workload
        self._texts = StateTexts(self._workload)
        self._last: list[DraftNode | None] = [None] * len(self._plan.devices)
        self.meetings = 0
        if self._workload.exchanges:
            self._exchange()
        for job in self._in_order(sums):
            self._sum(job)
        self._step()
        self._gather()

    # During the actions -------------------------------------------------------------------------------------------

    def _exchange(self) -> None:
        uses, counts = uses_of(self._actions), dict[tuple[str, int, int], int]()
        for devices, network in self._simulation.graph.networks_at(self._simulation.starts):
            before = {task: order for order, task in enumerate(self._actions.orders[devices[0]])}
            for run in network.runs:
                kind, stage, group, *_, task, _ = run
                if kind == RESHARD:
                    continue
                key = kind, stage, group
                number = counts[key] = counts.get(key, -1) + 1
                order = self._actions.orders[devices[0]]
                place = len(order) if task is None else before[task]
                self._run(run, number, uses[stage, kind != UNSHARD], order[place - 1] if place else None)

    def _run(self, run: StateRun, number: int, uses: Sequence[int], floor: int | None) -> None:
        """An UNSHARD or REDUCE_GRAD, the ``number``-th of its kind, stage and group, after ``floor`` has begun."""
        exchanged, placed, group, begun, ended, _, _ = run
        stage, gathers = self._plan.stages[placed], exchanged == UNSHARD
        zero, blocks = Zero.of(stage), stage.block_groups[group]
        every = (stage.unshard_every if gathers else stage.reduce_every) or 1
        begin = every * number
        size = -(-blocks.gathered_bytes // zero.group) if gathers else blocks.reduced_bytes
        if not size:
            return
        if stage.expert > 1:
            raise UsageError(f"stages[{placed}].expert is {stage.expert}: {_NOT_SAID}")
        last = uses[min(begin + (0 if gathers else every), len(uses)) - 1] if begin or not gathers else None
        following = begin if gathers else begin + every
        for devices in state_groups(stage.devices, stage.shards, zero.group):
            befores: dict[int, Before] = {}
            for device in devices:
                control, data = ([], []) if floor is None else map(list, self._actions.begin(floor, device))
                if last is not None:
                    data += self._actions.until_moment(last, device, self._moment(placed, group, last)[1])
                befores[device] = (self._after(device, control), data)
            kind = CollectiveType.ALL_GATHER if gathers else CollectiveType.REDUCE_SCATTER
            nodes = self._together(kind, self._texts.of(run), size, ended - begun, befores)
            if following < len(uses):
                task = uses[following]
                for device, node in nodes.items():
                    self._actions.from_moment(task, device, self._moment(placed, group, task)[0]).data.append(node)

    def _moment(self, stage: int, group: int, task: int) -> tuple[int, int]:
        """When an action comes to a stage's group of blocks and has done with it, in ns after its start."""
        operation = self._workload.operations[self._simulation.graph.operation_of[task]]
        course = passes(self._plan.stages[stage].block_groups, operation.role)
        return next((begin, end) for number, begin, end in course if number == group)

    # After them ---------------------------------------------------------------------------------------------------

    def _in_order(self, sums: Sequence[NetworkJob]) -> list[NetworkJob]:
        """As networks run them: in the plan's order, or as they become ready; what takes no time in the plan, too."""
        graph, last = self._simulation.graph, dict[int, int]()
        for stage, task in self._actions.adding.items():
            last[stage] = self._simulation.starts[task] + graph.durations[task]
        own = [job for job in sums if all(stage in last for stage in job.stages)]
        ends = [last.get(stage, 0) for stage in range(len(self._plan.stages))]
        if not self._plan.sum_order:
            return sorted(own, key=lambda job: job.ready(ends))
        timed = [job for job in sums if job.duration_ns]
        place = {id(timed[number]): order for order, number in enumerate(self._plan.sum_order)}
        return sorted(own, key=lambda job: place.get(id(job), len(place)))

    def _sum(self, job: NetworkJob) -> None:
        stages = [self._plan.stages[number] for number in job.stages]
        if job.tied is not None:
            size = self._tied_bytes(job.tied)
            name = f"SUM {self._plan.tied[job.tied].name}"
            if size and len(job.devices) > 1:
                self._reduce(job, name, CollectiveType.ALL_REDUCE, size, job.duration_ns, [job.devices])
            return
        size = max(self._gradient_bytes(number, job.bucket) for number in job.stages)
        if not size or len({device for each in stages for device in each.devices}) == 1:
            return
        self._require_summed(job)
        zero, name = Zero.of(stages[0]), f"{job.stages[0]}SUM{'' if job.bucket is None else f'.{job.bucket}'}"
        groups = [
            group
            for stage in dict.fromkeys(stages)  # copies of one are the same devices
            for group in state_groups(stage.devices, stage.shards, zero.group)
        ]
        parts = 1 if zero.level >= IN_ACTIONS else zero.group
        whole = min(size, max(self._whole_bytes(number, job.bucket) for number in job.stages))
        ways = [
            (CollectiveType.REDUCE_SCATTER, size if zero.level == 1 else 0, groups),
            (CollectiveType.ALL_REDUCE, -(-(size - whole) // parts), _across(groups, stages[0].shards)),
            (CollectiveType.ALL_REDUCE, -(-whole // parts), _across(groups, 1)),
        ]
        ways = [(kind, own, among) for kind, own, among in ways if own and max(map(len, among)) > 1]
        for kind, own, among in ways:
            time = job.duration_ns if (kind, own, among) == ways[-1] else 0  # of all, whose parts it does not say
            self._reduce(job, name, kind, own, time, among)

    def _reduce(
        self,
        job: NetworkJob,
        name: str,
        kind: CollectiveType,
        size: int,
        time_ns: int,
        groups: Sequence[Sequence[int]],
    ) -> None:
        for group in groups:
            befores: dict[int, Before] = {}
            for device in group:
                ready: list[DraftNode] = []
                for stage, ahead in zip(job.stages, job.ahead_ns, strict=True):
                    if device in self._plan.stages[stage].devices:
                        task = self._actions.adding[stage]
                        time = self._simulation.graph.durations[task] - ahead
                        ready += self._actions.until_moment(task, device, time)
                befores[device] = (self._after(device), ready)
            self._together(kind, name, size, time_ns, befores)

    def _step(self) -> None:
        for number, stage in enumerate(self._plan.stages):
            for device in stage.devices if stage.step_ns else ():
                node = self._to.compute(device, f"{number}STEP", micros(stage.step_ns))
                node.data += self._after(device)

    def _gather(self) -> None:
        """The parameters that steps have changed, for stages whose replicas each step a part."""
        stepped = self._simulation.rates.tail.stepped_ns
        order = sorted(
            range(len(self._plan.stages)),
            key=lambda number: max(stepped[device] for device in self._plan.stages[number].devices),
        )
        for number in order:
            stage, zero = self._plan.stages[number], Zero.of(self._plan.stages[number])
            if zero.level in (0, GATHERED) or number not in self._actions.adding:
                continue
            size = -(-_updated(self._plan, stage) // zero.group)
            if not size:
                continue
            self._require_apart(number)
            for group in state_groups(stage.devices, stage.shards, zero.group):
                befores: dict[int, Before] = {}
                for device in group:
                    last = self._to.last_compute[device]
                    befores[device] = (self._after(device), [] if last is None else [last])
                self._together(CollectiveType.ALL_GATHER, f"{number}GATHER", size, stage.gather_ns, befores)

    # Both ---------------------------------------------------------------------------------------------------------

    def _after(self, device: int, control: Sequence[DraftNode] = ()) -> list[DraftNode]:
        last = self._last[device]
        return [*control] if last is None else [*control, last]

    def _together(
        self, kind: CollectiveType, name: str, size: int, time_ns: int, befores: dict[int, Before]
    ) -> dict[int, DraftNode]:
        """A collective of some ranks, which tell each other first that they are there if they may come one by one.

        One that waits for others lets its rank send nothing else, in a simulator whose ranks do one such thing at a
        time.
        """
        if len({self._workload.leaders[device] for device in befores}) > 1:
            come = self._to.meet(name, befores)
            befores = {device: (control, [*data, *come[device]]) for device, (control, data) in befores.items()}
            self.meetings += 1
        nodes = self._to.collective(kind, name, size, micros(time_ns), befores)
        for device, node in nodes.items():
            self._last[device] = node
        return nodes

    def _gradient_bytes(self, number: int, bucket: int | None) -> int:
        stage = self._plan.stages[number]
        if bucket is not None:
            return stage.buckets[bucket].bytes
        apart = 0
        for each in self._plan.tied:
            for own, devices in zip(each.stages, each.devices, strict=True):
                apart += each.state[GRADIENTS] * (own == number and stage.devices[0] in devices)
        return max(0, stage.state[GRADIENTS] - apart)

    def _whole_bytes(self, number: int, bucket: int | None) -> int:
        """Of these, what is summed over shards, too."""
        stage = self._plan.stages[number]
        return stage.whole_gradient_bytes if bucket is None else stage.buckets[bucket].whole_bytes

    def _tied_bytes(self, index: int) -> int:
        """Of gradients that devices sum; 0 of an entry for another way to sum them."""
        each = self._plan.tied[index]
        family = [other for other in self._plan.tied if other.name == each.name]
        whole = any(other.is_sum for other in family)
        if each.is_sum != whole:
            return 0
        size = max(other.state[GRADIENTS] * other.parts for other in family) if whole else each.state[GRADIENTS]
        if not size and any(self._plan.stages[number].state[GRADIENTS] for number in each.stages):
            raise UsageError(f"tied[{index}] ({each.name!r}) is divided unlike by its stages: {_NOT_SAID}")
        return size

    def _require_summed(self, job: NetworkJob) -> None:
        """Refuse sums of which the plan does not say what goes where. Raises UsageError."""
        first = self._plan.stages[job.stages[0]]
        for number in job.stages:
            self._require_apart(number)
            stage = self._plan.stages[number]
            if (stage.shards, Zero.of(stage)) != (first.shards, Zero.of(first)):
                raise UsageError(
                    f"stages[{number}] sums gradients of blocks of stages[{job.stages[0]}], and has other shards or "
                    f"another zero, or zero_group: {_NOT_SAID}"
                )

    def _require_apart(self, number: int) -> None:
        stage = self._plan.stages[number]
        if stage.configurations:
            raise UsageError(f"stages[{number}].configurations: {_NOT_SAID}; search with --tp")
        if stage.expert > 1:
            raise UsageError(f"stages[{number}].expert is {stage.expert}: {_NOT_SAID}; search with --ep 1")
        if stage.zero >= IN_ACTIONS and not stage.block_groups and (stage.sync_ns or stage.gather_ns):
            raise UsageError(
                f"stages[{number}].zero is {stage.zero}, exchanged inside of actions, and {_NOT_SAID}; search with "
                "--zero 1"
            )


def _across(groups: Sequence[Sequence[int]], shards: int) -> list[list[int]]:
    """The ranks that sum the same part: one of each group, shard by shard; or of all, where ``shards`` is 1."""
    return [sorted(set(place)) for shard in range(shards) for place in zip(*groups[shard::shards], strict=True)]


def _updated(plan: Plan, stage: Stage) -> int:
    if plan.recipe is not None:
        return updated_bytes(stage, plan.recipe)
    return stage.state[PARAMETERS] if stage.state[GRADIENTS] else 0
