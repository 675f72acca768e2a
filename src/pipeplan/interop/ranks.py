"""Pipeline ranks of a plan: groups of devices that run the same stages, as tools count them.

A tool's rank r of its pipeline is the r-th group; what splits a stage over the group's devices is a size beside that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipeplan.catalog import ExportTarget
from pipeplan.errors import UsageError
from pipeplan.files import Plan
from pipeplan.partition.strategies import STRATEGIES
from pipeplan.workload.action import Action, StateAction
from pipeplan.workload.elements import Stage
from pipeplan.workload.kinds import Role, role_of

_TRAINING = (Role.FORWARD, Role.BACKWARD, Role.INPUT_GRAD, Role.WEIGHT_GRAD)


@dataclass(frozen=True, slots=True)
class PlanRanks:
    """[stage] the rank that runs it, and [rank] its devices, or its programs where these are of a folded plan."""

    ranks: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]

    @property
    def chunks(self) -> int:
        """Stages of a rank, of which all have as many where a placement strategy made them."""
        return len(self.ranks) // len(self.groups)


def ranks_of(plan: Plan, target: ExportTarget) -> PlanRanks:
    """The ranks of a plan whose stages a target can place and split as the plan does.

    Raises:
        UsageError: it cannot; the text has the place in the plan.
    """
    for number, stage in enumerate(plan.stages):
        require_blocks(number, stage, target.title)
    groups = tuple(dict.fromkeys(stage.devices for stage in plan.stages))
    found = PlanRanks(tuple(groups.index(stage.devices) for stage in plan.stages), groups)
    _require_apart(plan, found.ranks, target.title)
    if target.placements is not None:
        _require_placed(found.ranks, target)
    _require_alike(plan.stages, target)
    return found


def order_of(plan: Plan, devices: Sequence[int], target: ExportTarget) -> list[Action]:
    """The compute actions of a rank in their order, which all its devices share.

    Raises:
        UsageError: the target does not run one of them; the text has the place.
    """
    first, *others = ([*_compute(plan.whole_programs[device], device, target)] for device in devices)
    for device, other in zip(devices[1:], others, strict=True):
        if other != first:
            raise UsageError(
                f"programs[{device}] runs another order than programs[{devices[0]}]; {target.title} has one for each "
                "rank"
            )
    return first


def _compute(program: Sequence[str], device: int, target: ExportTarget) -> Iterator[Action]:
    for index, text in enumerate(program):
        where = f"programs[{device}][{index}] is {text}"
        if StateAction.read(text) is not None:
            raise UsageError(f"{where}: {target.title} takes no exchanges of state; search with --zero 0 or 1")
        action = Action.parse(text)
        if not action.is_compute:
            continue
        role = role_of(action.kind)
        if role in (Role.INPUT_GRAD, Role.WEIGHT_GRAD) and not target.split_backward:
            raise UsageError(f"{where}: {target.title} runs whole backwards; search with --split-backward no")
        if role not in _TRAINING:
            raise UsageError(f"{where}: {target.title} has no such action")
        if action.part is not None:
            raise UsageError(f"{where}: {target.title} runs micro-batches whole; search with --slices 0")
        yield action


def require_state(plan: Plan, target: ExportTarget) -> None:
    """Refuse what replicas divide, or devices share, and the target's do not. Raises UsageError."""
    stage = plan.stages[0]
    if stage.zero not in target.zero:
        *others, last = map(str, target.zero)
        raise UsageError(
            f"stages[0].zero is {stage.zero}: {target.zero_why}; search with --zero {', '.join(others)} or {last}"
        )
    if stage.expert > 1 and not target.experts:
        raise UsageError(f"stages[0].expert is {stage.expert}: experts are not written for {target.title}; give --ep 1")


def require_blocks(number: int, stage: Stage, title: str) -> None:
    """Refuse a stage that is none of layers alone. Raises UsageError."""
    where = f"stages[{number}]"
    if not stage.blocks:
        raise UsageError(f"{where} runs instructions, which {title} does not have")
    if stage.route:
        raise UsageError(
            f"{where} is on route {stage.route}: {title} has one way through the stages; search with "
            "--placement one-to-one"
        )
    if stage.configurations:
        raise UsageError(f"{where}.configurations: {title} splits all blocks alike; search with --tp")


def _require_apart(plan: Plan, ranks: Sequence[int], title: str) -> None:
    """Refuse ranks that share devices. Raises UsageError."""
    taken: dict[int, int] = {}
    for number, stage in enumerate(plan.stages):
        for device in stage.devices:
            other = taken.setdefault(device, ranks[number])
            if other != ranks[number]:
                raise UsageError(
                    f"stages[{number}] is on device {device}, where another stage is with other devices; {title} has "
                    "the same devices for all stages of a rank"
                )


def _require_placed(ranks: Sequence[int], target: ExportTarget) -> None:
    """Refuse what none of the target's placements has. Raises UsageError."""
    places = target.placements or ()
    positions = max(ranks) + 1
    chunks, rest = divmod(len(ranks), positions)
    for name in places:
        strategy = STRATEGIES[name]
        enough = chunks <= target.most_chunks.get(name, chunks) and (strategy.chunked or chunks == 1)
        if enough and not rest and strategy.positions(positions, chunks) == list(ranks):
            return
    in_turn = next((stage for stage, rank in enumerate(ranks) if rank != stage % positions), positions)
    number = positions if in_turn >= positions or places == ["one-to-one"] else in_turn
    number = min(number, len(ranks) - 1)
    raise UsageError(
        f"stages[{number}] is on rank {ranks[number]}, of ranks {','.join(map(str, ranks))}; {target.title} places "
        f"stages {' or '.join(places)}: search with --placement {places[-1]}"
    )


def _require_alike(stages: Sequence[Stage], target: ExportTarget) -> None:
    """Refuse stages that are split unlike the first. Raises UsageError."""
    keys = ["shards", "context", "context_exchange", "expert", "expert_shards", "replicas"]
    keys += ["zero", "zero_group", "microbatch_size"] if target.trains else []
    for number, stage in enumerate(stages):
        for key in keys:
            own, first = getattr(stage, key), getattr(stages[0], key)
            if own != first:
                raise UsageError(
                    f"stages[{number}].{key} is {own}, stages[0].{key} {first}; {target.title} has one for all stages"
                )
