"""What check accepts, and that it refuses each kind of damage and names the place."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import cache
from random import Random
from types import FrameType
from typing import Any

import pytest

import pipeplan
from builders.chains import chain_plan, chain_profile, chain_workload, shared_workload
from builders.clusters import cluster_of
from builders.folds import alike_profile
from builders.orders import gpipe_orders, one_f_one_b, one_f_one_b_repetend, serial_orders
from builders.plans import plan_of
from builders.sharded import sharded_plan
from builders.timed import timed
from pipeplan.checker import RULES, Report, check
from pipeplan.costs import build_workload
from pipeplan.costs.recipes import step_bytes
from pipeplan.errors import InvalidPlanError
from pipeplan.files import Cluster, PlacedStage, Placement, Plan, Profile, Provenance, parse, sha256_of, to_json
from pipeplan.planning.build_plan import assemble
from pipeplan.workload.action import Action
from pipeplan.workload.steady_state.loop import looped
from pipeplan.workload.steady_state.rate import CutOrders
from pipeplan.workload.steady_state.repetend import find_repetend
from pipeplan.workload.task_graph import task_graph
from pipeplan.workload.workload import Workload
from support.paths import ROOT

Data = dict[str, Any]


# Valid plans ---------------------------------------------------------------------------------------------------


def chain() -> Plan:
    """1F1B on 4 devices with a repetend, parameters, workspace, a memory limit and a bound below the makespan."""
    workload = chain_workload(
        4, 8, activation_bytes=1000, workspace_bytes=50, parameter_bytes=100, memory_bytes=4450, forward=10
    )
    return plan_of(
        workload, one_f_one_b(workload), first=one_f_one_b_repetend(workload), lower_bound_ns=300, full_names=True
    )


def split() -> Plan:
    """I and W apart, more held for W than for I, transfers that take time."""
    return chain_plan(3, 6, split=(12, 9), lag=7, weight_grad_bytes=1500)


def shared() -> Plan:
    """A stage on all devices before and behind the chain; one micro-batch after the other."""
    workload = shared_workload(3, 4, lag=3)
    return plan_of(workload, serial_orders(workload), first={operation.id: 0 for operation in workload.operations})


def unequal() -> Plan:
    """Stages with micro-batches of 2, 4 and 1 samples."""
    workload = chain_workload(3, 8, sizes=[2, 4, 1], lag=2)
    return plan_of(workload, gpipe_orders(workload))


def spare() -> Plan:
    """A device that nothing runs on, and two chunks on each of the others."""
    workload = chain_workload(3, 5, devices=[(0,), (1,), (0,), (1,)], lag=1)
    return plan_of(workload, gpipe_orders(workload), full_names=True)


def alternating() -> Plan:
    """Transfers make micro-batches come at unequal distances, equal only every four."""
    return chain_plan(4, 12, lag=5, repetend=True, unroll=4)


def far() -> Plan:
    """Messages that are longer under way than it takes to make the next."""
    workload = chain_workload(2, 4, lag=25)
    return plan_of(workload, gpipe_orders(workload))


def sized_profile(num_blocks: int, lag: int = 0) -> Profile:
    """A chain whose blocks take 10 ns and 6 ns more for each sample, and twice that backward."""
    data = json.loads(to_json(chain_profile(num_blocks, lag=lag, parameter_bytes=50, placed=False)))
    for block in data["blocks"]:
        (row,) = block["costs"]
        block["costs"] = [
            row
            | {"microbatch_size": n, "forward_ns": 10 + 6 * n, "backward_ns": 20 + 12 * n, "activation_bytes": 7 * n}
            for n in (1, 2, 4)
        ]
    return parse(json.dumps(data), Profile)


def placed_on(
    *stages: Data, num_routes: int = 1, microbatch_size: int = 2, lag: int = 0, cluster: Cluster | None = None
) -> Workload:
    """Four micro-batches on stages with one block each, ``block`` if they say so."""
    routes = [stage.get("route", 0) for stage in stages]
    placement = Placement(
        strategy="x",
        num_devices=1 + max(device for stage in stages for device in stage["devices"]),
        num_routes=num_routes,
        stages=tuple(
            PlacedStage(blocks=(f"block{routes[:index].count(route)}",), **stage)
            for index, (route, stage) in enumerate(zip(routes, stages, strict=True))
        ),
    )
    return build_workload(
        sized_profile(routes.count(0), lag),
        placement,
        num_microbatches=4,
        microbatch_size=microbatch_size,
        cluster=cluster,
    )


def sliced() -> Plan:
    """1F1B with forwards in parts; micro-batch 1 is made in parts by stage 0, sent whole, and run whole by stage 1."""
    workload = placed_on(*({"devices": (s,), "num_parted": 2 - s} for s in range(3)))
    return plan_of(workload, one_f_one_b(workload), first=one_f_one_b_repetend(workload))


def far_sliced() -> Plan:
    """Parts that are longer under way than it takes to make the next."""
    workload = placed_on(*({"devices": (s,), "num_parted": 2} for s in range(2)), lag=25)
    return plan_of(workload, gpipe_orders(workload))


def replicated() -> Plan:
    """Stages with replicas and unequal micro-batches: device 0 makes for itself half of what stage 1 works on."""
    workload = placed_on(
        {"devices": (0,), "microbatch_size": 2},
        {"devices": (0, 1), "replicas": 2, "microbatch_size": 4},
        {"devices": (3, 2), "replicas": 2, "microbatch_size": 2},
        {"devices": (1,), "microbatch_size": 1},
    )
    return plan_of(workload, gpipe_orders(workload))


def bidirectional() -> Plan:
    """Two stages on two devices, and their copies the other way round; summing gradients takes 25 ns."""
    stages = ({"devices": (0,)}, {"devices": (1,)}, {"devices": (1,), "route": 1}, {"devices": (0,), "route": 1})
    workload = placed_on(*stages, num_routes=2, microbatch_size=1)
    syncing = tuple(replace(stage, sync_ns=25) for stage in workload.stages)
    return plan_of(replace(workload, stages=syncing), gpipe_orders(workload))


def repeating() -> Plan:
    """1F1B for 40 micro-batches, of which few are written, with messages that take their time."""
    workload = chain_workload(4, 12, lag=7)
    graph, orders, starts = timed(workload, one_f_one_b(workload))
    repetend = find_repetend(graph, orders, starts)
    assert repetend is not None
    begins = CutOrders.of(workload, orders, repetend.first, repetend.unroll).begins
    run = looped(graph, orders, begins, repetend.unroll, 40)
    assert run is not None
    return assemble(run.graph, run.orders, 1, Fraction(0), "1f1b", loop=run.loop)


BASES: dict[str, Callable[[], Plan]] = {
    base.__name__: base
    for base in (
        *(chain, split, shared, unequal, spare, alternating, far, sliced, far_sliced, replicated, bidirectional),
        repeating,
    )
} | {"sharded": sharded_plan}


@cache
def base(name: str) -> Plan:
    return BASES[name]()


@pytest.mark.parametrize("name", BASES)
def test_hand_made_plans_are_valid(name: str) -> None:
    report = check(base(name))
    assert report.problems == ()
    assert report.valid
    report.require()


@pytest.mark.parametrize("late", [False, True])
def test_no_repetend_is_stated_that_has_parts(late: bool) -> None:
    """Two stages on a device, the second with a forward in two parts: the other part before the repetend, or in it."""
    workload = placed_on({"devices": (0,)}, {"devices": (0,), "num_parted": 1})
    forwards = ["0F0", "1F0.0", *(text for m in (1, 2, 3) for text in (f"0F{m}", f"1F{m}"))]
    forwards.insert(8 if late else 2, "1F0.1")
    backwards = [text for m in range(4) for text in (f"1B{m}", f"0B{m}")]
    graph = task_graph(workload)
    task_of = {graph.label(task): task for task in range(graph.num_tasks)}
    order = [task_of[text] for text in (*forwards, *backwards)]
    plan = assemble(graph, [order], 1, Fraction(1), "by hand")
    assert check(plan).valid
    assert (plan.repetend is None) == late


def test_figures() -> None:
    figures = check(base("chain")).recomputed
    assert figures.makespan_ns == (8 + 3) * 30
    assert figures.num_actions == 64
    assert figures.num_transfers == 48
    assert figures.bubble_rate == pytest.approx(3 / 11)
    assert figures.bubble_rate_span == pytest.approx(3 / 11)
    assert figures.bubble_rate_steady == 0
    assert figures.period_ns == 30
    assert figures.peak_memory_bytes == (4450, 3450, 2450, 1450)


def test_figures_of_alternating_copies() -> None:
    assert check(base("alternating")).recomputed.period_ns == 37.5


# Damage --------------------------------------------------------------------------------------------------------


def at(data: Data, device: int, text: str) -> int:
    """Where an action stands in a program, with or without the other end said."""
    program = data["programs"][device]
    return next(index for index, entry in enumerate(program) if entry == text or entry.startswith(text + ">"))


def drop(device: int, text: str) -> Callable[[Data], None]:
    def damage(data: Data) -> None:
        del data["programs"][device][at(data, device, text)]

    return damage


def insert(device: int, before: str, text: str) -> Callable[[Data], None]:
    def damage(data: Data) -> None:
        data["programs"][device].insert(at(data, device, before), text)

    return damage


def write(device: int, text: str, instead: str) -> Callable[[Data], None]:
    def damage(data: Data) -> None:
        data["programs"][device][at(data, device, text)] = instead

    return damage


def swap(device: int, one: str, other: str) -> Callable[[Data], None]:
    def damage(data: Data) -> None:
        program, i, j = data["programs"][device], at(data, device, one), at(data, device, other)
        program[i], program[j] = program[j], program[i]

    return damage


def move(device: int, text: str, before: str) -> Callable[[Data], None]:
    def damage(data: Data) -> None:
        program = data["programs"][device]
        entry = program.pop(at(data, device, text))
        program.insert(at(data, device, before), entry)

    return damage


def put(path: str, value: object) -> Callable[[Data], None]:
    """Set what stands at a path such as ``predicted.memory.0.peak_bytes``."""

    def damage(data: Data) -> None:
        *parents, last = path.split(".")
        part: Any = data
        for key in parents:
            part = part[int(key)] if isinstance(part, list) else part[key]
        part[int(last) if isinstance(part, list) else last] = value

    return damage


def shift(id_: str, microbatch: int, ns: int) -> Callable[[Data], None]:
    def damage(data: Data) -> None:
        data["starts_ns"][id_][microbatch] += ns

    return damage


def dependency(data: Data, source: str, target: str) -> int:
    pairs = [(each["source"], each["target"]) for each in data["dependencies"]]
    return pairs.index((source, target))


def forget(source: str, target: str) -> Callable[[Data], None]:
    def damage(data: Data) -> None:
        del data["dependencies"][dependency(data, source, target)]

    return damage


def depend(source: str, target: str, hops: tuple[Data, ...] = ()) -> Callable[[Data], None]:
    def damage(data: Data) -> None:
        data["dependencies"].append({"source": source, "target": target, "hops": list(hops)})

    return damage


def hops(source: str, target: str, change: Callable[[list[Data]], None]) -> Callable[[Data], None]:
    def damage(data: Data) -> None:
        change(data["dependencies"][dependency(data, source, target)]["hops"])

    return damage


def operation(id_: str, **values: int) -> Callable[[Data], None]:
    def damage(data: Data) -> None:
        next(each for each in data["operations"] if f"{each['stage']}{each['kind']}" == id_).update(values)

    return damage


def without_operation(id_: str) -> Callable[[Data], None]:
    """Take an operation out of everything."""

    def damage(data: Data) -> None:
        data["operations"] = [each for each in data["operations"] if f"{each['stage']}{each['kind']}" != id_]
        data["dependencies"] = [each for each in data["dependencies"] if id_ not in (each["source"], each["target"])]
        data["programs"] = [
            [text for text in program if Action.parse(text).operation != id_] for program in data["programs"]
        ]
        del data["starts_ns"][id_]
        data["repetend"] = None

    return damage


def later(ns: int) -> Callable[[Data], None]:
    """Everything a little later: nothing overlaps, all waits for nothing."""

    def damage(data: Data) -> None:
        data["starts_ns"] = {id_: [start + ns for start in starts] for id_, starts in data["starts_ns"].items()}

    return damage


def no_repetend(data: Data) -> None:
    data["repetend"] = None


def rename_kind(data: Data) -> None:
    """Stage 1 runs W where it ran B."""
    for each in data["operations"]:
        if each["stage"] == 1 and each["kind"] == "B":
            each["kind"] = "W"
    data["starts_ns"]["1W"] = data["starts_ns"].pop("1B")
    data["repetend"]["first"]["1W"] = data["repetend"]["first"].pop("1B")
    for each in data["dependencies"]:
        for end in ("source", "target"):
            each[end] = each[end].replace("1B", "1W")
    data["programs"] = [[text.replace("1B", "1W") for text in program] for program in data["programs"]]


def exchange_sides(data: Data) -> None:
    """On one device only, two micro-batches of the stage on all devices change places with all that is between."""
    program = data["programs"][0]
    first, second = program.index("0F1"), program.index("0F2")
    program[first], program[second] = program[second], program[first]


def unequal_routes(data: Data) -> None:
    """The first stage's micro-batches are half as large, and twice as many."""
    data["microbatch_size"], data["num_microbatches"] = 2, 2
    for stage in data["stages"]:
        stage["microbatch_size"] = 2
    data["starts_ns"] = {id_: starts[:1] for id_, starts in data["starts_ns"].items()}
    data["stages"][0]["microbatch_size"] = 1
    for id_ in ("0F", "0B"):
        data["starts_ns"][id_] *= 2


def more_routes(data: Data) -> None:
    """Four routes, of which two have no stages."""
    data["num_routes"] = 4
    data["starts_ns"] = {id_: starts[:1] for id_, starts in data["starts_ns"].items()}


def replicas_without_samples(data: Data) -> None:
    """Three replicas for one sample."""
    data["stages"][0].update(shards=1, replicas=3)


def repeats(data: Data) -> None:
    data["repetend"] = {"unroll": 1, "repetend_ns": 99, "first": dict.fromkeys(data["starts_ns"], 0)}


EXTRA_HOP = {"source_device": 0, "target_device": 1, "bytes": 1}
SELF_HOP = {"source_device": 1, "target_device": 1}


def later_round(entries: dict[int, int]) -> Callable[[Data], None]:
    """The loop's round stands so many entries later on some devices."""

    def change(data: Data) -> None:
        for device, by in entries.items():
            data["loop"]["rounds"][0]["begins"][device] += by
            data["loop"]["rounds"][0]["ends"][device] += by

    return change


DAMAGES: list[tuple[str, str, Callable[[Data], None], str, str]] = [
    # what, of which plan, how, rule, place
    ("an action left out", "chain", drop(1, "1F2"), "actions", "programs[1]"),
    ("an action twice", "chain", insert(1, "1B0", "1F0"), "actions", "] (1F0)"),
    ("an action of no operation", "chain", insert(1, "1B0", "9F0"), "actions", "] (9F0)"),
    ("an action on another device", "chain", insert(2, "2B0", "1F0"), "actions", "programs[2]["),
    ("an action on one device too few", "shared", drop(2, "0F1"), "actions", "programs[2]"),
    ("a micro-batch too many", "chain", insert(1, "1B0", "1F8"), "actions", "] (1F8)"),
    ("another action instead", "split", write(2, "2W3", "2W4"), "actions", "programs[2]["),
    ("an UNSHARD on one device too few", "sharded", drop(1, "0UNSHARD.1"), "exchanges", "programs[1]"),
    ("a SEND left out", "chain", drop(1, "1SEND_F3"), "transfers", "programs[1]"),
    ("a RECV left out", "chain", drop(2, "2RECV_F3"), "transfers", "programs[2]"),
    ("a SEND twice", "chain", insert(1, "1SEND_F4", "1SEND_F3>2@2"), "transfers", "] (1SEND_F3>2@2)"),
    ("a SEND to a stranger", "chain", write(1, "1SEND_F3", "1SEND_F3>3@3"), "transfers", "] (1SEND_F3>3@3)"),
    ("a SEND of the wrong payload", "chain", write(3, "3SEND_B3", "3SEND_F3"), "transfers", "] (3SEND_F3)"),
    ("a SEND that could mean several", "shared", write(2, "3SEND_F1>4@0", "3SEND_F1"), "transfers", "] (3SEND_F1)"),
    ("a RECV of a micro-batch too many", "chain", write(2, "2RECV_F3", "2RECV_F9"), "transfers", "] (2RECV_F9)"),
    ("a SEND before its producer", "chain", move(1, "1SEND_F3", "1F3"), "transfer-order", "] (1SEND_F3"),
    ("a RECV behind its consumer", "chain", swap(2, "2RECV_F3", "2F3"), "transfer-order", "] (2RECV_F3"),
    ("a RECV behind the first consumer", "unequal", move(2, "2RECV_F0", "2F2"), "transfer-order", "] (2RECV_F0"),
    ("RECVs in another order than SENDs", "split", swap(1, "1RECV_F0", "1RECV_F1"), "fifo", "programs[1][0]"),
    ("SENDs in another order than RECVs", "chain", swap(0, "0SEND_F6", "0SEND_F7"), "fifo", "programs[1]["),
    ("a RECV that its sender comes to late", "chain", move(0, "0RECV_B0", "0SEND_F2"), "deadlock", "(0RECV_B0"),
    ("a group in two orders", "shared", exchange_sides, "deadlock", "programs[0]["),
    ("compute in another order than starts", "split", swap(1, "1W0", "1F2"), "order", "starts_ns["),
    ("a start before the input is there", "chain", shift("2F", 3, -1), "inputs", "starts_ns[2F][3]"),
    ("a start in the middle of another", "split", shift("0F", 1, -5), "exclusive", "starts_ns[0F][1]"),
    ("a start later than it need be", "chain", shift("0B", 7, 1), "earliest", "starts_ns[0B][7]"),
    ("everything later than it need be", "unequal", later(3), "earliest", "starts_ns[0F][0]"),
    (
        "a transfer slower than planned",
        "split",
        hops("0F", "1F", lambda h: h[0].update(latency_ns=8)),
        "inputs",
        "[1F]",
    ),
    (
        "a transfer faster than planned",
        "split",
        hops("0F", "1F", lambda h: h[0].update(latency_ns=6)),
        "earliest",
        "[1F]",
    ),
    (
        "messages that meet on a link",
        "far",
        hops("0F", "1F", lambda h: h[0].update(latency_ns=14, occupancy_ns=11)),
        "links",
        "starts_ns[1F][1]",
    ),
    ("a slower operation", "split", operation("1I", duration_ns=13), "inputs", "starts_ns["),
    ("a quicker operation", "unequal", operation("2B", duration_ns=19), "earliest", "starts_ns["),
    ("less memory than needed", "chain", put("devices.0.memory_bytes", 4449), "memory", "programs[0]["),
    ("more parameters", "spare", put("stages.0.parameter_bytes", 1), "figures", "memory[0].parameter_bytes"),
    ("more activations", "chain", operation("0F", acquire_bytes=1001), "balance", "stages[0]"),
    ("more given back than taken", "chain", operation("2B", release_bytes=1001), "balance", "operations[2B]"),
    ("operations in another order", "chain", lambda data: data["operations"].reverse(), "stages", "stages[0]"),
    ("W gives back too early", "split", operation("1I", release_bytes=2000), "balance", "operations[1I]"),
    ("bytes that nobody gives back", "split", operation("1W", release_bytes=1499), "balance", "stages[1]"),
    ("more workspace", "chain", operation("0F", workspace_bytes=60), "figures", "predicted.memory[0].workspace_bytes"),
    ("another peak", "chain", put("predicted.memory.1.peak_bytes", 3451), "figures", "predicted.memory[1].peak_bytes"),
    ("another part", "chain", put("predicted.memory.1.gradient_bytes", 7), "figures", "memory[1].gradient_bytes"),
    ("other activations", "unequal", put("predicted.memory.2.activation_bytes", 7), "figures", "memory[2].activation"),
    ("another makespan", "chain", put("predicted.makespan_ns", 329), "figures", "predicted.makespan_ns"),
    (
        "a bound above the makespan",
        "chain",
        put("predicted.lower_bound_ns", 331),
        "figures",
        "predicted.lower_bound_ns",
    ),
    ("no bound", "chain", put("predicted.lower_bound_ns", 0), "figures", "predicted.lower_bound_ns"),
    ("another gap", "chain", put("predicted.gap", 0.0), "figures", "predicted.gap"),
    ("another bubble rate", "chain", put("predicted.bubble_rate", 0.2727), "figures", "predicted.bubble_rate"),
    ("another bubble rate by span", "spare", put("predicted.bubble_rate_span", 0.0), "figures", "bubble_rate_span"),
    ("another steady rate", "chain", put("predicted.bubble_rate_steady", 0.1), "figures", "bubble_rate_steady"),
    ("no steady rate", "shared", put("predicted.bubble_rate_steady", None), "figures", "bubble_rate_steady"),
    ("a period of nothing", "split", put("predicted.period_ns", 10.0), "figures", "predicted.period_ns"),
    ("another period", "chain", put("predicted.period_ns", 31.0), "figures", "predicted.period_ns"),
    (
        "a bound above the period",
        "chain",
        put("predicted.period_lower_bound_ns", 30.5),
        "figures",
        "period_lower_bound",
    ),
    ("a repetend gone", "chain", no_repetend, "figures", "predicted.period_ns"),
    ("a repetend too long", "shared", put("repetend.repetend_ns", 169), "repetend", "repetend.repetend_ns"),
    ("a repetend too short", "alternating", put("repetend.repetend_ns", 149), "repetend", "repetend.repetend_ns"),
    ("a repetend with less than the work", "chain", put("repetend.repetend_ns", 29), "figures", "repetend.repetend_ns"),
    ("a repetend twice as long", "chain", put("repetend.unroll", 2), "repetend", "repetend.repetend_ns"),
    ("a repetend beyond the end", "chain", put("repetend.unroll", 8), "repetend", "repetend.first[0F]"),
    ("a repetend in pieces", "chain", put("repetend.first.0F", 5), "repetend", "] (0B0)"),
    ("a repetend that waits for a later one", "chain", put("repetend.first.3F", 2), "repetend", "first[2F]"),
    (
        "a repetend of unequal micro-batches",
        "unequal",
        repeats,
        "repetend",
        "stages[0].microbatch_size",
    ),
    ("a stage without backward", "chain", without_operation("2B"), "stages", "stages[2]"),
    ("a stage with W instead of B", "chain", rename_kind, "stages", "stages[1]"),
    ("a block in two stages", "chain", put("stages.2.blocks", ["block1"]), "stages", "stages[2].blocks[0]"),
    ("B without its F", "chain", forget("1F", "1B"), "dependencies", "dependencies"),
    ("W without its I", "split", forget("1I", "1W"), "dependencies", "dependencies"),
    ("a dependency twice", "chain", depend("1F", "1B"), "dependencies", "dependencies[10]"),
    ("W that feeds another stage", "split", depend("1W", "0W"), "dependencies", "dependencies[10]"),
    ("B that feeds a forward", "spare", depend("2B", "0F"), "dependencies", "dependencies[10]"),
    ("a stage that waits for itself", "chain", depend("1B", "1F"), "dependencies", "dependencies[10]"),
    ("a hop left out", "chain", hops("1F", "2F", lambda h: h.clear()), "hops", "hops"),
    ("a hop left out of many", "shared", hops("3F", "4F", lambda h: h.pop()), "hops", ".hops"),
    (
        "a hop to the device it leaves",
        "shared",
        hops("1B", "0B", lambda h: h.append(SELF_HOP | {"source_device": 0, "target_device": 0})),
        "hops",
        ".hops[",
    ),
    ("a hop twice", "chain", hops("0F", "1F", lambda h: h.append(EXTRA_HOP)), "hops", ".hops[1]"),
    ("a part left out", "sliced", drop(0, "0F0.1"), "actions", "programs[0]"),
    ("a whole micro-batch instead of its parts", "sliced", write(0, "0F0.0", "0F0"), "actions", "] (0F0)"),
    ("a part of a whole micro-batch", "sliced", write(1, "1F1", "1F1.0"), "actions", "] (1F1.0)"),
    ("a backward in parts", "sliced", write(1, "1B0", "1B0.0"), "actions", "] (1B0.0)"),
    ("a part twice", "sliced", write(0, "0F0.1", "0F0.0"), "actions", "] (0F0.0)"),
    ("a message of a part left out", "sliced", drop(0, "0SEND_F0.1"), "transfers", "programs[0]"),
    ("parts sent apart to who runs them together", "sliced", write(0, "0SEND_F1", "0SEND_F1.0"), "transfers", "F1.0)"),
    ("parts sent before the second is made", "sliced", move(0, "0SEND_F1", "0F1.1"), "transfer-order", "(0SEND_F1)"),
    ("a part sent before it is made", "sliced", move(0, "0SEND_F0.1", "0F0.1"), "transfer-order", "(0SEND_F0.1)"),
    ("a part received after it is run", "sliced", swap(1, "1RECV_F0.1", "1F0.1"), "transfer-order", "(1RECV_F0.1)"),
    ("a part that starts early", "sliced", shift("1F", 0, -1), "inputs", "starts_ns[1F][0]"),
    ("a whole that starts after one part alone", "sliced", shift("1F", 2, -1), "inputs", "starts_ns[1F][2]"),
    ("parts that take longer", "sliced", operation("0F", part_ns=17), "inputs", "starts_ns[1F][0]"),
    ("parts that take less", "sliced", operation("0F", part_ns=15), "earliest", "starts_ns[0F][1]"),
    (
        "parts that occupy their link",
        "sliced",
        hops("0F", "1F", lambda h: h[0].update(latency_ns=0, occupancy_ns=6)),
        "inputs",
        "starts_ns[1F][2]",
    ),
    (
        "messages of parts that meet on a link",
        "far_sliced",
        hops("0F", "1F", lambda h: h[0].update(latency_ns=5, occupancy_ns=40)),
        "links",
        "starts_ns[1F][1]",
    ),
    ("memory for half the parts", "sliced", put("predicted.memory.0.peak_bytes", 203), "figures", "[0].peak_bytes"),
    ("a repetend with parts in it", "sliced", put("repetend.first.0F", 1), "repetend", "first[0F]"),
    ("replicas without samples", "shared", replicas_without_samples, "stages", "stages[0].microbatch_size"),
    ("an iteration without its end", "bidirectional", put("predicted.iteration_ns", 1), "figures", "iteration_ns"),
    ("gradients summed for longer", "bidirectional", put("stages.0.sync_ns", 26), "figures", "iteration_ns"),
    ("other micro-batches", "replicated", hops("0F", "1F", lambda h: h[0].update(first=0)), "hops", "hops[0]"),
    ("all micro-batches", "replicated", hops("0F", "1F", lambda h: h[0].update(run=2, first=0)), "hops", "hops[0]"),
    ("another period", "replicated", hops("0F", "1F", lambda h: h[0].update(every=4)), "hops", "hops[0]"),
    (
        "the same way once for each half of the micro-batches",
        "replicated",
        hops("0F", "1F", lambda h: h.append(h[0] | {"first": 0})),
        "hops",
        ".hops[1]",
    ),
    (
        "samples from a replica that does not make them",
        "replicated",
        hops("2F", "3F", lambda h: h[0].update(source_device=2)),
        "hops",
        "].hops",
    ),
    ("a replica's samples left out", "replicated", hops("2F", "3F", lambda h: h.pop()), "hops", "dependencies["),
    (
        "what a device has itself",
        "replicated",
        hops("0F", "1F", lambda h: h.append({"source_device": 0, "target_device": 0})),
        "hops",
        ".hops[1]",
    ),
    ("a SEND of what does not go there", "replicated", write(0, "0SEND_F1", "0SEND_F0"), "transfers", "(0SEND_F0)"),
    ("a SEND of a replica's half left out", "replicated", drop(3, "2SEND_F0"), "transfers", "programs[3]"),
    ("a start before a replica's half is there", "replicated", shift("2F", 0, -1), "inputs", "starts_ns[2F][0]"),
    ("a block on another route", "bidirectional", put("stages.0.route", 1), "stages", "stages[2].blocks[0]"),
    ("a block that one route lacks", "bidirectional", put("stages.3.blocks", ["block7"]), "stages", "stages"),
    ("a route from nowhere", "bidirectional", more_routes, "stages", "num_routes"),
    ("routes of unequal micro-batches", "bidirectional", unequal_routes, "stages", "stages[1].microbatch_size"),
    ("a way from route to route", "bidirectional", depend("0F", "3F"), "dependencies", "dependencies["),
    ("a repetend over routes", "bidirectional", repeats, "repetend", "num_routes"),
    ("a loop whose copies take longer", "repeating", put("loop.rounds.0.round_ns", 31), "loop", "loop"),
    ("a loop that begins later on a device", "repeating", later_round({2: 1}), "loop", ""),
    ("a loop before times repeat", "repeating", later_round({0: -2, 1: -4, 2: -4, 3: -4}), "loop", ""),
    ("a RECV in a loop to which nothing is sent", "repeating", forget("0F", "1F"), "transfers", "programs[1]"),
    ("a loop with more copies than micro-batches say", "repeating", put("predicted.makespan_ns", 9), "figures", ""),
]


def damaged(name: str, damage: Callable[[Data], None]) -> Report:
    data = json.loads(to_json(base(name)))
    damage(data)
    return check(parse(json.dumps(data), Plan))


@pytest.mark.parametrize(
    ("name", "damage", "rule", "place"), [each[1:] for each in DAMAGES], ids=[d[0] for d in DAMAGES]
)
def test_damage_is_refused_and_its_place_named(
    name: str, damage: Callable[[Data], None], rule: str, place: str
) -> None:
    report = damaged(name, damage)
    assert not report.valid
    found = [(problem.rule, problem.place) for problem in report.problems]
    assert any(each == rule and place in where for each, where in found), found
    with pytest.raises(InvalidPlanError, match="not a valid plan"):
        report.require()


def test_every_rule_is_broken_by_some_damage_and_documented() -> None:
    against = {"profile", "cluster"}  # see below
    assert {rule for _, _, _, rule, _ in DAMAGES} == set(RULES) - against
    text = (ROOT / "docs" / "check.md").read_text(encoding="utf-8")
    assert re.findall(r"^\*\*([a-z-]+)\*\* - ", text, re.MULTILINE) == list(RULES)


def test_place_and_numbers_are_in_the_text() -> None:
    problems = [str(problem) for problem in damaged("split", shift("1F", 0, -1)).problems]
    assert (
        "starts_ns[1F][0]: starts at 16 ns, but 0F0 ends at 10 ns and takes 7 ns to arrive: not before 17 ns "
        "(dependencies[6]) [inputs]"
    ) in problems


def test_memory_names_the_action_and_what_is_missing() -> None:
    (problem,) = (p for p in damaged("chain", put("devices.0.memory_bytes", 3450)).problems if p.rule == "memory")
    assert problem.place.endswith("(0F3)")
    assert "holds 4450 bytes, 1000 more than its 3450 (peak 4450, 10 actions above)" in problem.message


def test_deadlock_names_the_circle() -> None:
    report = damaged("chain", move(0, "0RECV_B0", "0SEND_F2"))
    (problem,) = (problem for problem in report.problems if problem.rule == "deadlock")
    assert "device 0 is at programs[0]" in problem.message
    assert "which waits for device 1 is at programs[1]" in problem.message
    assert problem.message.endswith("which waits for device 0 again")


def test_a_circle_of_actions_is_named_where_messages_wait_for_nothing() -> None:
    """Device 0 runs 0F1 only after the backward that 1F0 leads to, and device 1 runs 1F1 first of all."""
    plan = base("chain")
    data = json.loads(to_json(plan))
    for device, action, before in ((0, "0F1", "0B0"), (1, "1F1", "1F0")):
        program = data["programs"][device]
        program.remove(action)
        program.insert(program.index(before) + (device == 0), action)
    (problem,) = (p for p in check(parse(json.dumps(data), Plan)).problems if p.rule == "deadlock")
    named = problem.message.rpartition(": ")[2].split(", then ")
    assert problem.place.endswith(f"({named[0].split()[0]})")
    assert named[0] == named[-1]
    assert set(named) == {
        *("0F1 on device 0", "0B0 on device 0"),
        *("1F1 on device 1", "1F0 on device 1", "1B0 on device 1"),
    }


def test_many_problems_are_counted_and_some_listed() -> None:
    data = json.loads(to_json(base("chain")))
    data["programs"] = [[] for _ in range(4)]
    report = check(parse(json.dumps(data), Plan))
    assert report.num_problems == 8 + 12  # one for each operation and each end of a hop
    assert len(report.problems) == report.num_problems
    data["programs"] = [["9F0"] * 150 for _ in range(4)]
    report = check(parse(json.dumps(data), Plan))
    assert report.num_problems == 8 + 12 + 600
    assert len(report.problems) == 100 + 12
    with pytest.raises(InvalidPlanError, match=r"plan.json: not a valid plan, 620 problems:(.|\n)*and 508 more$"):
        report.require("plan.json")


# Against the profile -------------------------------------------------------------------------------------------


def profile_data(**values: Any) -> Data:
    return json.loads(to_json(chain_profile(3, split=(12, 9), lag=7, weight_grad_bytes=1500, **values)))


def changed(path: str, value: object) -> Profile:
    data = profile_data()
    put(path, value)(data)
    return parse(json.dumps(data), Profile)


def test_the_profile_a_plan_is_of() -> None:
    profile = parse(json.dumps(profile_data()), Profile)
    assert check(base("split"), profile).problems == ()
    known = base("split").model_copy(
        update={"provenance": Provenance(profile="chain", profile_sha256=sha256_of(profile))}
    )
    assert check(known, profile).problems == ()
    (problem,) = check(known, changed("blocks.0.dimensions", {"hidden": 8})).problems
    assert (problem.rule, problem.place) == ("profile", "provenance.profile_sha256")


def test_what_a_sample_is_comes_from_the_profile() -> None:
    profile = changed("tokens_per_sample", 16)
    for tokens, places in ((None, []), (16, []), (17, ["provenance.tokens_per_sample"])):
        plan = base("split").model_copy(update={"provenance": Provenance(tokens_per_sample=tokens)})
        assert [problem.place for problem in check(plan, profile).problems] == places


@pytest.mark.parametrize(
    ("path", "value", "place"),
    [
        ("blocks.1.costs.0.forward_ns", 11, "operations[1F].duration_ns"),
        ("blocks.1.costs.0.input_grad_ns", 11, "operations[1I].duration_ns"),
        ("blocks.1.costs.0.weight_grad_ns", 11, "operations[1W].duration_ns"),
        ("blocks.2.costs.0.activation_bytes", 999, "operations[2F].acquire_bytes"),
        ("blocks.2.costs.0.weight_grad_bytes", 900, "operations[2I].release_bytes"),
        ("blocks.2.costs.0.workspace_bytes", 9, "operations[2W].workspace_bytes"),
        ("blocks.0.parameter_bytes", 9, "stages[0].gradient_bytes"),
        ("blocks.0.optimizer_bytes", 9, "stages[0].optimizer_bytes"),
        ("blocks.0.costs.0.microbatch_size", 2, "stages[0]"),
        ("blocks.0.costs.0.shards", 2, "stages[0]"),
        ("edges.0.bytes_per_sample", 65, "dependencies[6].hops[0].bytes"),
        ("edges.0.transfer_ns", 8, "dependencies[6].hops[0].latency_ns"),
        ("edges.1.gradient", False, "dependencies[9]"),
        ("edges.1.source", "block0", "dependencies"),
    ],
)
def test_costs_are_the_profile_s(path: str, value: object, place: str) -> None:
    found = [(problem.rule, problem.place) for problem in check(base("split"), changed(path, value)).problems]
    assert ("profile", place) in found


def test_blocks_are_the_profile_s() -> None:
    places = [problem.place for problem in check(base("chain"), chain_profile(3)).problems]
    assert places == ["stages[3].blocks[0]"]
    (problem,) = check(base("split"), chain_profile(4, split=(12, 9), lag=7, weight_grad_bytes=1500)).problems
    assert "block 'block3' of the profile is in none" in problem.message


def test_backward_of_a_profile_that_has_only_its_halves() -> None:
    assert check(chain_plan(3, 4, backward=21), chain_profile(3, split=(12, 9))).problems == ()
    problems = check(chain_plan(3, 4, split=(12, 9)), chain_profile(3)).problems
    assert problems[0].place == "operations[0I]"
    assert "no input_grad_ns" in problems[0].message


def test_blocks_of_one_stage_add_up() -> None:
    workload = chain_workload(2, 4, forward=20, backward=40, activation_bytes=2000, parameter_bytes=14)
    stages = (
        replace(workload.stages[0], blocks=("block0", "block1")),
        replace(workload.stages[1], blocks=("block2", "block3")),
    )
    plan = plan_of(replace(workload, stages=stages), gpipe_orders(workload))
    assert check(plan, chain_profile(4, parameter_bytes=7)).problems == ()
    assert not check(plan, chain_profile(4, parameter_bytes=7, workspace_bytes=1)).valid


def test_recomputation_keeps_inputs_and_runs_forward_again() -> None:
    """Without rows for it: B takes F's time more, needs what F held as workspace, and F keeps its 64 input bytes."""
    workload = chain_workload(2, 4, backward=20 + 10)
    effects = {  # operation -> acquired, released, workspace
        "0F": (0, 0, 1005),
        "0B": (0, 0, 1005),
        "1F": (64, 0, 1005),
        "1B": (0, 64, 1005),
    }
    operations = tuple(
        replace(each, **dict(zip(("acquire_bytes", "release_bytes", "workspace_bytes"), effects[each.id], strict=True)))
        for each in workload.operations
    )
    stages = tuple(replace(stage, recompute=True) for stage in workload.stages)
    plan = plan_of(replace(workload, operations=operations, stages=stages), one_f_one_b(workload))
    assert check(plan, chain_profile(2, workspace_bytes=5)).problems == ()
    assert not check(plan, chain_profile(2, workspace_bytes=6)).valid


def test_costs_between_two_profiled_sizes() -> None:
    workload = chain_workload(2, 6, sizes=[3, 3], forward=25, backward=40, activation_bytes=3000)
    plan = plan_of(workload, gpipe_orders(workload))
    data = json.loads(to_json(chain_profile(2, backward=40)))
    for block in data["blocks"]:
        block["costs"].append(block["costs"][0] | {"microbatch_size": 5, "forward_ns": 40, "activation_bytes": 5000})
    data["edges"][0] |= {"bytes_per_sample": 64, "broadcast": True}
    assert check(plan, parse(json.dumps(data), Profile)).problems == ()
    data["edges"][0] |= {"broadcast": False}
    places = [problem.place for problem in check(plan, parse(json.dumps(data), Profile)).problems]
    assert places == ["dependencies[2].hops[0].bytes", "dependencies[3].hops[0].bytes"]


def test_shards_split_parameters_and_replicas_split_samples() -> None:
    data = json.loads(to_json(chain_profile(2, parameter_bytes=7, placed=False)))
    data["blocks"][0]["costs"][0] |= {"shards": 2, "microbatch_size": 2}
    profile = parse(json.dumps(data), Profile)
    stages = (
        PlacedStage(blocks=("block0",), devices=(0, 1), shards=2),
        PlacedStage(blocks=("block1",), devices=(2, 3), replicas=2),
    )
    placement = Placement(strategy="x", num_devices=4, stages=stages)
    workload = build_workload(profile, placement, num_microbatches=4, microbatch_size=2)
    assert [stage.parameter_bytes for stage in workload.stages] == [4, 7]
    plan = plan_of(workload, gpipe_orders(workload))
    assert check(plan, profile).problems == ()
    data["blocks"][1]["costs"][0] |= {"microbatch_size": 2}
    assert [p.place for p in check(plan, parse(json.dumps(data), Profile)).problems] == ["stages[1]"]


def test_parts_cost_what_half_the_samples_cost() -> None:
    profile = sized_profile(3)
    assert check(base("sliced"), profile).problems == ()
    data = json.loads(to_json(profile))
    data["blocks"][1]["costs"][0]["forward_ns"] = 17
    places = [problem.place for problem in check(base("sliced"), parse(json.dumps(data), Profile)).problems]
    assert places == ["operations[1F].part_ns"]


def test_messages_have_the_bytes_of_the_samples_they_carry() -> None:
    """64 bytes for each sample; device 0 makes half of a micro-batch of 4 for device 1, in one micro-batch of 2."""
    plan, profile = base("replicated"), sized_profile(4)
    assert check(plan, profile).problems == ()
    number = [(each.source, each.target) for each in plan.dependencies].index(("0F", "1F"))
    (hop,) = plan.dependencies[number].hops
    assert (hop.every, hop.run, hop.first, hop.bytes) == (2, 1, 1, 128)
    data = json.loads(to_json(plan))
    data["dependencies"][number]["hops"][0]["bytes"] = 256
    places = [problem.place for problem in check(parse(json.dumps(data), Plan), profile).problems]
    assert places == [f"dependencies[{number}].hops[0].bytes"]


# Against the cluster -------------------------------------------------------------------------------------------


def cluster(memory_bytes: int = 5000, count: int = 4, latency_ns: int = 3) -> Cluster:
    return cluster_of(count, memory_bytes=memory_bytes, latency_ns=latency_ns, bandwidth=16 * 10**9, name="device")


def on_cluster() -> tuple[Plan, Profile]:
    """A plan whose messages take 3 ns and 64 bytes at 16 per ns, and its profile, which says no times."""
    data = json.loads(to_json(chain_plan(4, 6, lag=7)))
    for dependency in data["dependencies"]:
        for hop in dependency["hops"]:
            hop |= {"latency_ns": 3, "occupancy_ns": 4}
    data["provenance"]["cluster_sha256"] = sha256_of(cluster())
    profile = json.loads(to_json(chain_profile(4)))
    for edge in profile["edges"]:
        edge["transfer_ns"] = None
    return parse(json.dumps(data), Plan), parse(json.dumps(profile), Profile)


def test_the_cluster_a_plan_is_for() -> None:
    plan, profile = on_cluster()
    assert check(plan, profile, cluster()).problems == ()
    assert check(plan, None, cluster()).problems == ()
    assert check(plan, profile).problems == ()  # what links take cannot be known then


def test_another_cluster() -> None:
    plan, profile = on_cluster()
    places = [(problem.rule, problem.place) for problem in check(plan, profile, cluster(latency_ns=4)).problems]
    assert places == [
        *(("profile", f"dependencies[{number}].hops[0].latency_ns") for number in range(4, 10)),
        ("cluster", "provenance.cluster_sha256"),
    ]
    assert ("cluster", "devices") in [(p.rule, p.place) for p in check(plan, None, cluster(count=3)).problems]
    full = [(p.rule, p.place) for p in check(plan, None, cluster(memory_bytes=3999)).problems]
    assert ("cluster", "devices[0]") in full
    assert ("cluster", "devices[1]") not in full


def test_a_plan_made_without_cluster_says_its_transfer_times_itself() -> None:
    plan, profile = on_cluster()
    alone = plan.model_copy(update={"provenance": Provenance()})
    places = [(problem.rule, problem.place) for problem in check(alone, profile).problems]
    assert ("profile", "dependencies[4].hops[0].occupancy_ns") in places


def test_summing_gradients_takes_what_the_cluster_says() -> None:
    """Over both devices of each block: 2 steps of 3 ns and 25 bytes at 16 per ns."""
    stages = ({"devices": (0,)}, {"devices": (1,)}, {"devices": (1,), "route": 1}, {"devices": (0,), "route": 1})
    workload = placed_on(*stages, num_routes=2, microbatch_size=1, cluster=cluster())
    plan = plan_of(workload, gpipe_orders(workload))
    profile = sized_profile(2)
    assert [stage.sync_ns for stage in plan.stages] == [9] * 4
    assert check(plan, profile, cluster()).problems == ()
    found = {problem.place for problem in check(plan, profile, cluster(latency_ns=4)).problems}
    assert {f"stages[{number}].sync_ns" for number in range(4)} <= found
    alone = plan.model_copy(update={"provenance": Provenance(cluster_sha256="0" * 64)})
    assert check(alone, profile).problems == ()
    assert {f"stages[{number}].sync_ns" for number in range(4)} <= {p.place for p in check(plan, profile).problems}


# Size ----------------------------------------------------------------------------------------------------------


def test_the_work_grows_with_the_actions() -> None:
    """Four times the actions take at most a little more than four times the function calls."""
    small, large = (calls_of(check, chain_plan(n, 4 * n)) for n in (12, 24))
    assert 1.5 * small < large < 4.4 * small


def calls_of(work: Callable[[Plan], object], plan: Plan) -> int:
    """How many functions it calls, of Python or of C."""
    calls = 0

    def hear(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(hear)
    try:
        work(plan)
    finally:
        sys.setprofile(None)
    return calls


def test_alike_problems_of_many_devices_share_a_line() -> None:
    data = json.loads(to_json(chain_plan(24, 2, activation_bytes=1000)))
    for memory in data["predicted"]["memory"]:
        memory["parameter_bytes"] += 5
    report = check(parse(json.dumps(data), Plan))
    with pytest.raises(InvalidPlanError) as caught:
        report.require("plan.json")
    lines = str(caught.value).splitlines()
    assert lines[0] == f"plan.json: not a valid plan, {report.num_problems} problems:"
    assert len(lines) < report.num_problems >= 24
    counts = [int(count) for count in re.findall(r"\((\d+) alike\)", str(caught.value))]
    single = len(lines) - 1 - len(counts)
    assert sum(counts) + single == report.num_problems, "every problem is in one line"
    assert any("memory[0]" in line and "memory[23]" in line for line in lines)


def test_what_an_earlier_stage_of_a_device_has_is_stepped_once() -> None:
    """A table of the first and of the last block, on the device of both, is in the first stage's step."""
    profile = alike_profile(Random(5), tied=True)
    asked: dict[str, Any] = {"mini_batch": 8, "deterministic": True, "time_limit": 0.3, "placement": "v-shape"}
    plan = pipeplan.search(profile, devices=2, **asked).plan
    first, *_, last = plan.stages
    assert first.devices == last.devices
    assert check(plan, profile).valid
    (table,) = plan.tied
    assert profile.recipe is not None
    more = step_bytes(last.state, profile.recipe) - step_bytes(last.state - table.state, profile.recipe)
    assert more > 0
    twice = (*plan.stages[:-1], replace(last, step_ns=last.step_ns + more))  # a byte takes a nanosecond
    problems = check(plan.model_copy(update={"stages": twice}), profile).problems
    assert "stages[3].step_ns" in {each.place for each in problems}
