"""Plans damaged so that they still read: what ``check`` accepts must still be true, as :mod:`judge` sees it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from attack_part import Ended, drawn_for
from judge import Json, UnfitError, faults_of, restated

from pipeplan.checker import check
from pipeplan.errors import FileError, PipeplanError
from pipeplan.examples import ShapeCosts, shape
from pipeplan.files import Block, Cluster, CostRow, Edge, PlacedStage, Placement, Plan, Profile, Source, parse
from pipeplan.files.cluster import DeviceKind, LinkLevel
from pipeplan.planning.request import Request
from pipeplan.planning.steps import search_plan
from pipeplan.schedule.rules.language import parse_rules

__all__ = ["Plans", "Sample", "samples"]

Damage = Callable[[Random, Json], bool]
"""Changes a plan's JSON; False where there is nothing to change."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A valid plan as JSON, and what it was made from."""

    plan: Json
    profile: Profile
    cluster: Cluster | None


def chain(count: int, *, split: bool = False, tied: bool = False) -> Profile:
    """Blocks in a row with unequal costs, for 1, 2 and 4 samples; with a skip connection from the first to the last."""
    blocks = []
    for index in range(count):
        rows = []
        for size in (1, 2, 4):
            times: dict[str, Any] = {"backward_ns": (40 + 7 * index) * size + 3}
            if split:
                times = {"input_grad_ns": (20 + 4 * index) * size, "weight_grad_ns": (15 + 3 * index) * size + 1}
                times["weight_grad_bytes"] = 30 * size
            rows.append(
                CostRow(
                    microbatch_size=size,
                    forward_ns=(20 + 5 * index) * size + 2,
                    activation_bytes=(90 + 11 * index) * size,
                    workspace_bytes=10 + index,
                    **times,
                )
            )
        blocks.append(
            Block(id=f"b{index}", operator="x", parameter_bytes=100 + index, optimizer_bytes=200, costs=tuple(rows))
        )
    edges = [Edge(source=f"b{i}", target=f"b{i + 1}", bytes_per_sample=8 + i) for i in range(count - 1)]
    edges.append(Edge(source="b0", target=f"b{count - 1}", bytes_per_sample=5, gradient=not split))
    data: Json = {
        "name": "chain",
        "source": Source(method="literature"),
        "blocks": tuple(blocks),
        "edges": tuple(edges),
    }
    if tied:
        data["tied"] = ({"name": "words", "blocks": ("b0", f"b{count - 1}"), "parameter_bytes": 60},)
    return Profile.model_validate(data)


def nodes(count: int) -> Cluster:
    """Devices in nodes of two, with links that are busy at times."""
    return Cluster(
        name="nodes",
        source=Source(method="estimated"),
        devices=(DeviceKind(name="device", count=count, memory_bytes=100_000),),
        levels=(
            LinkLevel(name="node", group_size=2, latency_ns=2, bandwidth_bytes_per_s=2 * 10**9),
            LinkLevel(name="network", group_size=4, latency_ns=5, bandwidth_bytes_per_s=5 * 10**8),
        ),
    )


def placed(*stages: tuple[str, tuple[int, ...], int, int | None]) -> Placement:
    """Blocks, devices, replicas and micro-batch size of each stage."""
    made = [
        PlacedStage(
            blocks=tuple(blocks.split()),
            devices=devices,
            replicas=replicas,
            shards=len(devices) // replicas,
            microbatch_size=size,
        )
        for blocks, devices, replicas, size in stages
    ]
    count = 1 + max(device for _, devices, _, _ in stages for device in devices)
    return Placement(strategy="by-hand", num_devices=count, stages=tuple(made))


GATHER = """
types = "bwd-first"
in_flight = "D + 1"
[[instruction]]
kind = "GATHER"
after = [0]
before = [1]
every = 2
duration = "9ns"
"""


def samples() -> list[Sample]:
    """Plans of all kinds: chains, chunks, two ways, shared blocks, replicas, sizes, parts, busy links, instructions."""
    costs = ShapeCosts(forward_ns=10, input_grad_ns=11, weight_grad_ns=9, comm_ns=3, activation_bytes=50)
    whole, split, tied = chain(4), chain(4, split=True), chain(4, tied=True)
    unequal = placed(("b0 b1", (0,), 1, 1), ("b2", (1,), 1, 2), ("b3", (2,), 1, 4))
    copies = placed(("b0", (0,), 1, None), ("b1 b2", (1, 2), 2, None), ("b3", (3,), 1, None))
    asked: list[tuple[Profile, dict[str, Any]]] = [
        (whole, {"devices": 3, "scheduler": "1f1b", "num_microbatches": 6, "microbatch_size": 1}),
        (whole, {"devices": 3, "scheduler": "1f1b", "cluster": nodes(3), "num_microbatches": 5, "microbatch_size": 2}),
        (split, {"devices": 2, "scheduler": "zb-h1", "num_microbatches": 5, "microbatch_size": 2}),
        (tied, {"devices": 2, "scheduler": "gpipe", "cluster": nodes(2), "num_microbatches": 3, "microbatch_size": 1}),
        (
            whole,
            {
                "devices": 2,
                "scheduler": "interleaved-1f1b",
                "strategy": "circular",
                "num_microbatches": 4,
                "microbatch_size": 1,
            },
        ),
        (whole, {"devices": 2, "scheduler": "chimera", "strategy": "bidirectional", "num_microbatches": 4}),
        (whole, {"scheduler": "greedy", "placement": unequal, "num_microbatches": 2, "microbatch_size": 4}),
        (whole, {"scheduler": "1f1b", "placement": copies, "num_microbatches": 4, "microbatch_size": 2}),
        (tied, {"scheduler": "1f1b", "placement": copies, "cluster": nodes(4), "num_microbatches": 3}),
        (whole, {"devices": 3, "scheduler": "1f1b", "num_parted": 2, "num_microbatches": 5, "microbatch_size": 2}),
        (shape("m", 2, costs=costs), {"scheduler": "auto", "num_microbatches": 4, "time_limit": 0.2}),
        (shape("zbv", 2, costs=costs), {"scheduler": "zb-v", "num_microbatches": 5}),
        (whole, {"devices": 2, "rules": GATHER, "num_microbatches": 4, "microbatch_size": 1}),
    ]
    long: list[tuple[Profile, dict[str, Any]]] = [
        (whole, {"devices": 3, "scheduler": "1f1b", "num_microbatches": 2000, "microbatch_size": 1}),
        (split, {"devices": 2, "scheduler": "zb-h1", "cluster": nodes(2), "num_microbatches": 2000}),
        (whole, {"scheduler": "1f1b", "placement": copies, "num_microbatches": 2000, "microbatch_size": 2}),
        (shape("v", 2, costs=costs), {"scheduler": "gpipe", "num_microbatches": 3000}),
        (shape("v", 3, costs=costs), {"scheduler": "gpipe", "num_microbatches": 3000}),
    ]
    return [made(profile, **how) for profile, how in asked] + [shortened(made(each, **how)) for each, how in long]


def shortened(sample: Sample) -> Sample:
    """A plan whose loop runs three times, so that every copy can be looked at."""
    plan = parse(json.dumps(sample.plan), Plan).with_copies(3)
    return replace(sample, plan=restated(json.loads(plan.model_dump_json())))


def made(profile: Profile, **how: Any) -> Sample:
    """A plan as a search for it makes it."""
    placement, rules = how.pop("placement", None), how.pop("rules", None)
    if placement is not None:
        how |= {"devices": placement.num_devices}
    if profile.placement is None:
        how |= {"placement": how.pop("strategy", "one-to-one")}
    if rules is not None:
        how |= {"rules": parse_rules(rules, "gather"), "scheduler": "rules", "placement": "one-to-one"}
    request = Request.of(profile, deterministic=True, **{"time_limit": 1.0, "num_parted": 0, **how})
    if placement is not None:
        request = replace(request, placement=placement)
    plan = search_plan(request).plan
    return Sample(json.loads(plan.model_dump_json()), profile, request.cluster)


# Damages -----------------------------------------------------------------------------------------------------------


def _device(rng: Random, plan: Json) -> list[str]:
    return rng.choice([program for program in plan["programs"] if len(program) > 1])


def _swap(rng: Random, plan: Json) -> bool:
    """Two entries of a program, near each other or not."""
    program = _device(rng, plan)
    i = rng.randrange(len(program))
    j = min(len(program) - 1, i + rng.choice([1, 1, 1, 2, 3, 8]))
    program[i], program[j] = program[j], program[i]
    return i != j


def _swap_kind(rng: Random, plan: Json) -> bool:
    """Two entries of one kind: all that differs is what they are of."""
    program = _device(rng, plan)
    i = rng.randrange(len(program))
    alike = [j for j, text in enumerate(program) if j != i and ("_" in text) == ("_" in program[i])]
    if not alike:
        return False
    j = rng.choice(alike)
    program[i], program[j] = program[j], program[i]
    return True


def _move(rng: Random, plan: Json) -> bool:
    program = _device(rng, plan)
    text = program.pop(rng.randrange(len(program)))
    program.insert(rng.randrange(len(program) + 1), text)
    return True


def _drop(rng: Random, plan: Json) -> bool:
    """An entry, or all of one message or action on all devices."""
    program = _device(rng, plan)
    text = program.pop(rng.randrange(len(program)))
    if rng.random() < 0.3:
        for other in plan["programs"]:
            other[:] = [each for each in other if each != text]
    return True


def _drop_message(rng: Random, plan: Json) -> bool:
    """A SEND and the RECV at the same place of what its link carries."""
    sends = [(p, i) for p, program in enumerate(plan["programs"]) for i, t in enumerate(program) if "SEND" in t]
    if not sends:
        return False
    p, i = rng.choice(sends)
    payload = plan["programs"][p].pop(i).split("_")[1].split(">")[0].split("@")[0]
    for program in plan["programs"]:
        for j, text in enumerate(program):
            if f"RECV_{payload}" in text:
                del program[j]
                return True
    return True


def _twice(rng: Random, plan: Json) -> bool:
    program = _device(rng, plan)
    program.insert(rng.randrange(len(program) + 1), rng.choice(program))
    return True


def _elsewhere(rng: Random, plan: Json) -> bool:
    """An entry on another device, or two devices' programs."""
    one, other = rng.randrange(len(plan["programs"])), rng.randrange(len(plan["programs"]))
    if one == other or not plan["programs"][one]:
        return False
    programs = plan["programs"]
    if rng.random() < 0.3:
        programs[one], programs[other] = programs[other], programs[one]
    else:
        programs[other].insert(rng.randrange(len(programs[other]) + 1), programs[one].pop())
    return True


def _word(rng: Random, plan: Json) -> bool:
    """A number in an entry."""
    program = _device(rng, plan)
    i = rng.randrange(len(program))
    digits = [at for at, letter in enumerate(program[i]) if letter.isdigit()]
    at = rng.choice(digits)
    program[i] = program[i][:at] + rng.choice("0123") + program[i][at + 1 :]
    return True


def _other_number(rng: Random, value: Any) -> Any:
    if isinstance(value, float):
        return rng.choice([value + 0.01, value * 1.5, 0.0, 1.0, value + 1])
    choices = [value + 1, value - 1, value * 2, value // 2, 0, value + rng.randint(2, 40), value * 10, 1]
    return max(0, rng.choice(choices))


def _number(*path: str) -> Damage:
    """A number at a path; ``*`` is any member."""

    def change(rng: Random, plan: Json) -> bool:
        part = plan
        for key in path[:-1]:
            members = list(part.values()) if isinstance(part, dict) and key == "*" else part
            if key == "*" and not members:
                return False
            part = rng.choice(list(members)) if key == "*" else part[key]
            if part is None:
                return False
        key = path[-1]
        numbers = part if isinstance(part, dict) else dict(enumerate(part))
        keys = [k for k in numbers if key in ("*", k) and isinstance(numbers[k], int | float)]
        keys = [k for k in keys if not isinstance(numbers[k], bool)]
        if not keys:
            return False
        chosen = rng.choice(keys)
        part[chosen] = _other_number(rng, part[chosen])
        return True

    return change


def _start(rng: Random, plan: Json) -> bool:
    """A start, a little, or all from one on."""
    starts = rng.choice(list(plan["starts_ns"].values()))
    at, by = rng.randrange(len(starts)), rng.choice([-1, 1, -5, 7, 100])
    for i in range(at, len(starts) if rng.random() < 0.3 else at + 1):
        starts[i] = max(0, starts[i] + by)
    return True


def _exchange_stages(rng: Random, plan: Json) -> bool:
    """What two stages say of one matter."""
    if len(plan["stages"]) < 2:
        return False
    one, other = rng.sample(plan["stages"], 2)
    key = rng.choice(["devices", "blocks", "parameter_bytes", "sync_ns", "route", "microbatch_size", "recompute"])
    one[key], other[key] = other[key], one[key]
    return bool(one[key] != other[key])


def _exchange_operations(rng: Random, plan: Json) -> bool:
    one, other = rng.sample(plan["operations"], 2)
    key = rng.choice(["duration_ns", "acquire_bytes", "release_bytes", "workspace_bytes", "kind", "stage"])
    one[key], other[key] = other[key], one[key]
    return bool(one[key] != other[key])


def _devices(rng: Random, plan: Json) -> bool:
    """The order of a stage's devices, which of them there are, or how they are divided."""
    stage = rng.choice(plan["stages"])
    how = rng.randrange(3)
    if how == 0:
        stage["devices"].reverse()
    elif how == 1:
        stage["devices"][rng.randrange(len(stage["devices"]))] = rng.randrange(len(plan["devices"]))
    else:
        stage["shards"], stage["replicas"] = stage["replicas"], stage["shards"]
    return how == 1 or len(stage["devices"]) > 1


def _memory_of_device(rng: Random, plan: Json) -> bool:
    """A device with too little memory, just enough, or one byte less than that."""
    at = rng.randrange(len(plan["devices"]))
    peak = plan["predicted"]["memory"][at]["peak_bytes"]
    plan["devices"][at]["memory_bytes"] = rng.choice([peak, max(0, peak - 1), peak // 2, peak + 1])
    return True


def _drop_dependency(rng: Random, plan: Json) -> bool:
    plan["dependencies"].pop(rng.randrange(len(plan["dependencies"])))
    return True


def _turn_dependency(rng: Random, plan: Json) -> bool:
    each = rng.choice(plan["dependencies"])
    each["source"], each["target"] = each["target"], each["source"]
    for hop in each["hops"]:
        hop["source_device"], hop["target_device"] = hop["target_device"], hop["source_device"]
    return True


def _other_end(rng: Random, plan: Json) -> bool:
    each = rng.choice(plan["dependencies"])
    operation = rng.choice(plan["operations"])
    each[rng.choice(["source", "target"])] = f"{operation['stage']}{operation['kind']}"
    return True


def _drop_hop(rng: Random, plan: Json) -> bool:
    """A hop, and with it maybe all its messages, which a plan without it does not miss."""
    having = [each for each in plan["dependencies"] if each["hops"]]
    if not having:
        return False
    each = rng.choice(having)
    hop = each["hops"].pop(rng.randrange(len(each["hops"])))
    if rng.random() < 0.7:
        payload = "B" if each["source"][-1] in "BI" else each["source"].lstrip("0123456789")
        stages = each["source"].rstrip("FBIWGATHER"), each["target"].rstrip("FBIWGATHER")
        for device, word in ((hop["source_device"], f"{stages[0]}SEND_"), (hop["target_device"], f"{stages[1]}RECV_")):
            program = plan["programs"][device]
            program[:] = [text for text in program if not text.startswith(word + payload)]
    return True


def _add_dependency(rng: Random, plan: Json) -> bool:
    one, other = rng.sample(plan["operations"], 2)
    ends = {"source": f"{one['stage']}{one['kind']}", "target": f"{other['stage']}{other['kind']}"}
    plan["dependencies"].append({**ends, "hops": [], "needs": None})
    return True


def _repetend(rng: Random, plan: Json) -> bool:
    repetend = plan["repetend"]
    if repetend is None:
        return False
    how = rng.randrange(4)
    if how == 0:
        id_ = rng.choice(list(repetend["first"]))
        repetend["first"][id_] = max(0, repetend["first"][id_] + rng.choice([-1, 1]))
    elif how == 1:
        repetend["repetend_ns"] = max(1, repetend["repetend_ns"] + rng.choice([-1, 1, 10, -10]))
    elif how == 2:
        repetend["unroll"] += 1
        if rng.random() < 0.5:
            repetend["repetend_ns"] *= repetend["unroll"]
    else:
        repetend["first"] = {id_: first + rng.choice([-1, 1]) * (first > 0) for id_, first in repetend["first"].items()}
    if rng.random() < 0.7:
        plan["predicted"]["period_ns"] = repetend["repetend_ns"] / repetend["unroll"]
    return True


def _claim_repetend(rng: Random, plan: Json) -> bool:
    """One where there is none, or another one."""
    ids = [f"{each['stage']}{each['kind']}" for each in plan["operations"]]
    first = {id_: rng.randrange(3) for id_ in ids}
    period = max(each["duration_ns"] for each in plan["operations"]) * rng.randint(1, 4)
    plan["repetend"] = {"unroll": 1, "repetend_ns": period, "first": first}
    plan["predicted"] |= {"period_ns": float(period), "bubble_rate_steady": 0.0}
    return True


def _microbatches(rng: Random, plan: Json) -> bool:
    key = rng.choice(["num_microbatches", "microbatch_size"])
    plan[key] = max(1, plan[key] + rng.choice([-1, 1]))
    if key == "num_microbatches":
        for id_, starts in plan["starts_ns"].items():
            plan["starts_ns"][id_] = [*starts, starts[-1] + 1000][: max(1, len(starts) + rng.choice([-1, 1]))]
    return True


def _loop(rng: Random, plan: Json) -> bool:
    """How often a loop runs, of what, where it stands and how long it takes; or none."""
    loop = plan["loop"]
    if loop is None:
        return False
    each, by = rng.choice(loop["rounds"]), rng.choice([-1, 1, -2, 2])
    how = rng.randrange(8)
    if how == 0:
        loop["copies"] = max(1, loop["copies"] + by)
        plan["num_microbatches"] += by * loop["microbatches"] * (rng.random() < 0.7)
    elif how == 1:
        loop["microbatches"] = max(1, loop["microbatches"] + by)
    elif how == 2:
        each["round_ns"] = max(1, each["round_ns"] + by)
    elif how == 3:
        loop["rounds"].reverse()
        return len(loop["rounds"]) > 1
    elif how == 4 and len(loop["rounds"]) > 1:
        loop["rounds"].remove(each)
    elif how == 5:
        plan["loop"] = None
    else:
        edge = each[rng.choice(["begins", "ends"])]
        at = rng.randrange(len(edge))
        edge[at] = max(0, edge[at] + by)
        if rng.random() < 0.4:
            other = each["begins" if edge is each["ends"] else "ends"]
            other[at] = max(0, other[at] + by)
    return True


def _tied(rng: Random, plan: Json) -> bool:
    if not plan["tied"]:
        return False
    if rng.random() < 0.4:
        plan["tied"].pop()
    else:
        tied = rng.choice(plan["tied"])
        tied["stages"] = rng.choice([tied["stages"][:1], tied["stages"][::-1], [len(plan["stages"]) - 1]])
    return True


PROGRAMS: tuple[Damage, ...] = (_swap, _swap, _swap_kind, _move, _drop, _drop_message, _twice, _elsewhere, _word)
TIMES: tuple[Damage, ...] = (
    _start,
    _start,
    _number("operations", "*", "duration_ns"),
    _number("operations", "*", "part_ns"),
    _number("starts_ns", "*", "*"),
    _number("dependencies", "*", "hops", "*", "latency_ns"),
    _number("dependencies", "*", "hops", "*", "occupancy_ns"),
    _number("stages", "*", "sync_ns"),
    _number("tied", "*", "sync_ns"),
    _exchange_operations,
)
MEMORY: tuple[Damage, ...] = (
    _memory_of_device,
    _memory_of_device,
    _number("operations", "*", "acquire_bytes"),
    _number("operations", "*", "release_bytes"),
    _number("operations", "*", "workspace_bytes"),
    _number("stages", "*", "parameter_bytes"),
    _number("stages", "*", "master_bytes"),
    _number("stages", "*", "optimizer_bytes"),
    _number("tied", "*", "parameter_bytes"),
    _number("predicted", "memory", "*", "*"),
    _tied,
)
PLACES: tuple[Damage, ...] = (
    _exchange_stages,
    _devices,
    _number("stages", "*", "microbatch_size"),
    _number("stages", "*", "replicas"),
    _number("stages", "*", "num_parted"),
    _number("num_routes"),
    _microbatches,
)
ORDER: tuple[Damage, ...] = (
    _drop_dependency,
    _turn_dependency,
    _other_end,
    _drop_hop,
    _drop_hop,
    _add_dependency,
    _number("dependencies", "*", "hops", "*", "*"),
    _number("dependencies", "*", "needs", "*"),
)
FIGURES: tuple[Damage, ...] = (_number("predicted", "*"), _number("predicted", "*"), _repetend, _claim_repetend)
LOOPS: tuple[Damage, ...] = (_loop,)
KINDS = (PROGRAMS, PROGRAMS, TIMES, MEMORY, PLACES, ORDER, FIGURES, LOOPS)


def damaged(rng: Random, plan: Json) -> Json:
    """A plan with one to three damages, half of them with starts and figures restated as the programs then come to."""
    plan = copy.deepcopy(plan)
    wanted = rng.choice([1, 1, 1, 2, 3])
    while wanted:
        try:
            wanted -= rng.choice(rng.choice(KINDS))(rng, plan)
        except (KeyError, IndexError, ValueError, ZeroDivisionError):  # nothing left of what one before took away
            wanted -= 1
    if rng.random() < 0.5:
        try:
            plan = restated(plan)
        except (UnfitError, KeyError, IndexError, ValueError, TypeError, ZeroDivisionError):
            return plan  # it cannot be run, so that no figures are right
    return plan


# The part ----------------------------------------------------------------------------------------------------------


@dataclass
class Plans:
    """Damaged plans."""

    name: str = "plans"
    count: int = 2000
    limit_s: float = 10.0
    memory_bytes: int | None = 4 << 30
    known: list[Sample] = field(default_factory=list)

    def prepare(self, folder: Path) -> None:
        """The plans that are damaged, which are all right."""
        self.known = samples()
        for sample in self.known:
            check(parse(json.dumps(sample.plan), Plan), sample.profile, sample.cluster).require("a sample")
            if faults := faults_of(sample.plan):
                raise AssertionError(f"the judge has {faults} of a valid plan, {sample.plan['provenance']}")

    def attack(self, index: int, seed: int, folder: Path) -> Ended:
        """One damaged plan, checked alone and with what it was made from."""
        rng = drawn_for(self.name, seed, index)
        sample, plan = self._drawn(rng)
        text = json.dumps(plan)
        try:
            read = parse(text, Plan, "plan.json")
        except FileError:
            return Ended("refused when read")
        try:
            alone, beside = check(read), check(read, sample.profile, sample.cluster)
        except PipeplanError as error:
            return Ended("refused", what=str(error))
        if not alone.valid:
            return Ended("refused by check") if _faults(plan) else Ended("refused, though the judge finds nothing")
        if faults := _faults(plan):
            return Ended("accepted", "accepted", "; ".join(faults[:3]))
        if not beside.valid:
            return Ended("true in itself, refused with its profile")
        if what := _differs(plan, sample.plan):
            return Ended("accepted", "accepted", f"accepted with the profile it was made from, and {what}")
        return Ended("true, and accepted")

    def _drawn(self, rng: Random) -> tuple[Sample, Json]:
        """A plan, and what damages make of it, which is not the same."""
        sample = rng.choice(self.known)
        while (plan := damaged(rng, sample.plan)) == sample.plan:
            pass
        return sample, plan

    def show(self, index: int, seed: int, folder: Path) -> str:
        """The damaged plan as a file."""
        rng = drawn_for(self.name, seed, index)
        sample, plan = self._drawn(rng)
        path = folder / "plan.json"
        path.write_text(json.dumps(plan, indent=1))
        (folder / "before.json").write_text(json.dumps(sample.plan, indent=1))
        return f"pipeplan check {path}"


def _faults(plan: Json) -> list[str]:
    """What the judge finds, where a plan makes sense to it."""
    try:
        return faults_of(plan)
    except (KeyError, IndexError, ValueError, TypeError, ZeroDivisionError, StopIteration) as error:
        return [f"makes no sense: {type(error).__name__}: {error}"]


_COSTS = ("duration_ns", "part_ns", "acquire_bytes", "release_bytes", "workspace_bytes")
_STATE = ("parameter_bytes", "gradient_bytes", "master_bytes", "optimizer_bytes", "sync_ns")


def _differs(plan: Json, before: Json) -> str:
    """What has other costs than the profile says, which the plan before it had right, with stages as they were.

    Of instructions no profile says anything: a pass may wait for more of them, and not for fewer passes through them.
    """
    if [[each[key] for key in _STAGE] for each in plan["stages"]] != [
        [each[key] for key in _STAGE] for each in before["stages"]
    ]:
        return ""
    for key, what in (("operations", "operations cost"), ("stages", "stages keep")):
        if _said(plan, key) != _said(before, key):
            return f"{what} something else"
    (now, through), (then, through_then) = _waits(plan), _waits(before)
    return "" if now == then and through >= through_then else "there are other dependencies"


def _waits(plan: Json) -> tuple[list[tuple[str, str]], set[tuple[str, str]]]:
    """Which passes wait for which, and which do so through instructions in between."""
    pairs = sorted((each["source"], each["target"]) for each in plan["dependencies"])
    passes = {f"{each['stage']}{each['kind']}" for each in plan["operations"] if len(each["kind"]) == 1}
    through, new = set[tuple[str, str]](), {pair for pair in pairs if not passes.issuperset(pair)}
    while new - through:
        through |= new
        new = {(a, d) for a, b in through for c, d in through if b == c and b not in passes}
    return [pair for pair in pairs if passes.issuperset(pair)], {pair for pair in through if passes.issuperset(pair)}


_STAGE = ("blocks", "devices", "shards", "replicas", "recompute", "microbatch_size", "num_parted", "route")


def _said(plan: Json, key: str) -> list[Any]:
    """What a plan says of its stages with blocks, or of their operations."""
    if key == "stages":
        return [[stage[each] for each in _STATE] for stage in plan["stages"] if stage["blocks"]]
    ours = [each for each in plan["operations"] if plan["stages"][each["stage"]]["blocks"]]
    return sorted([each["stage"], each["kind"], *map(str, map(each.get, _COSTS))] for each in ours)
