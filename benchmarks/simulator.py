"""How long a simulation and a check take: actions a second, for plans of every kind, and seconds by number of actions.

    python benchmarks/simulator.py --part kinds        # prints the table of docs/benchmarks/speed.md
    python benchmarks/simulator.py --part kinds --only zero-3,forwards
    python benchmarks/simulator.py --part sizes --microbatches 128,1024

Every time is the process's own, of one call, on a plan that was just read from its text, so that nothing is known of it
but what its file says; the least of the repeats. ``simulate`` is all figures of ``pipeplan simulate`` but the causes of
idle time, ``with causes`` what ``simulate --json`` prints, ``check`` all rules. Actions are those that devices run, as
``simulate --json`` counts them on each (``num_actions``): replicas and shards run one each. With them are counted, once
each, messages over links that may be busy and exchanges of state, which have times of their own, too. ``timed apart``
are those that do not follow from others: an action of several devices once. What must be imported is imported
beforehand, but compiling, or loading what is compiled, is not.

Sizes: 1F1B with forward, input and weight gradient on 64 devices, all hops 10; then the same over links that a message
takes for as long as two actions, so that each message is one more thing to time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tables import machine, markdown, note

import pipeplan
from pipeplan.checker import check
from pipeplan.costs import build_workload
from pipeplan.costs.late_inputs import with_late_inputs
from pipeplan.examples import ShapeCosts, shape
from pipeplan.files import (
    Block,
    Cluster,
    CostRow,
    DeviceKind,
    Edge,
    LinkLevel,
    PlacedStage,
    Placement,
    Plan,
    Profile,
    Recipe,
    Source,
)
from pipeplan.planning.build_plan import assemble
from pipeplan.schedule.classic import CLASSIC
from pipeplan.simulator.simulation import simulate
from pipeplan.workload.bounds import period_bound, weak_iteration_bound
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.steady_state.repetend import extend
from pipeplan.workload.task_graph import task_graph
from pipeplan.workload.workload import Workload


def workload_of(
    num_devices: int,
    num_microbatches: int,
    occupancy: int = 0,
    *,
    name: str = "v",
    chunks: int | None = None,
    split: bool = True,
) -> Workload:
    """A shape; ``occupancy`` in ns of each message on its link."""
    if split:
        costs = ShapeCosts(100, None, 100, 100, comm_ns=10, activation_bytes=2, weight_grad_bytes=1)
    else:
        costs = ShapeCosts(100, 200, comm_ns=10, activation_bytes=2)
    profile = shape(name, num_devices, chunks=chunks, costs=costs)
    assert profile.placement is not None
    workload = build_workload(
        profile, profile.placement, num_microbatches=num_microbatches, microbatch_size=1, split_backward=split
    )
    dependencies = tuple(
        replace(dependency, hops=tuple(replace(hop, occupancy_ns=occupancy) for hop in dependency.hops))
        for dependency in workload.dependencies
    )
    return replace(workload, dependencies=dependencies)


def plan_of(workload: Workload, scheduler: str = "1f1b") -> Plan:
    """A classic schedule of the workload."""
    problem, graph = OneMicrobatch.of(workload), task_graph(workload)
    made = CLASSIC[scheduler].orders(problem, task_graph(problem.workload))
    orders = made if problem.reduction is None else problem.reduction.from_reduced(made)
    return assemble(graph, orders, weak_iteration_bound(workload), period_bound(problem), scheduler)


def _shape(scheduler: str, *arguments: Any, **options: Any) -> Callable[[int], Plan]:
    return lambda count: plan_of(workload_of(8, count, *arguments, **options), scheduler)


def _searched(count: int) -> Plan:
    """What a search finds with room for three quarters of 1F1B's activations, its repetend run more often."""
    found = pipeplan.search(
        pipeplan.example("shape-v", devices=8, input_grad="1ms", weight_grad="1ms", weight_grad_bytes="500MB"),
        devices=8,
        memory="6GB",
        microbatches=32,
        deterministic=True,
        time_limit="4s",
    ).plan
    graph = task_graph(found.workload)
    from pipeplan.simulator.simulation import orders_of

    more = -(-(count - 32) // (found.repetend.unroll if found.repetend else 1))
    wanted = 32 + more * (found.repetend.unroll if found.repetend else 1)
    larger, orders = extend(found.workload, orders_of(found, graph), found.repetend, wanted)
    return assemble(
        task_graph(larger), orders, weak_iteration_bound(larger), period_bound(OneMicrobatch.of(larger)), "repetend"
    )


def _model(model: str = "gpt2-345m", scheduler: str = "1f1b", **options: Any) -> Callable[[int], Plan]:
    """GPT-2 345M on sixteen A100s in two nodes, as flags have it, with more micro-batches."""

    def made(count: int) -> Plan:
        found = pipeplan.search(
            pipeplan.example(model, device="a100-80gb", shards=[1, 2], microbatch=[1, 2, 4]),
            cluster=pipeplan.example_cluster("cluster-a100", devices=16),
            scheduler=scheduler,
            deterministic=True,
            microbatches=16,
            microbatch_size=4,
            time_limit="4s",
            **options,
        ).plan
        return plan_of(found.written.workload.with_microbatches(count), scheduler)

    return made


def _chain(*, zero: bool = False, late: bool = False) -> Callable[[int], Plan]:
    """Twelve blocks in four stages on pairs of devices; if inputs are late, each takes what the two before it make."""

    def made(count: int) -> Plan:
        row = CostRow(microbatch_size=1, forward_ns=100, backward_ns=200, activation_bytes=100, workspace_bytes=30)
        blocks = tuple(Block(id=f"b{n}", operator="layer", parameters=1000, costs=(row,)) for n in range(12))
        ends = [(b - back, b) for b in range(1, 12) for back in range(1, min(b, 2 if late else 1) + 1)]
        edges = tuple(Edge(source=f"b{a}", target=f"b{b}", bytes_per_sample=8, transfer_ns=21) for a, b in ends)
        source = Source(method="literature")
        profile = Profile(name="chain", source=source, blocks=blocks, edges=edges, recipe=Recipe(name="bf16-mixed"))
        every = (2, 4) if zero else (None, None)
        stages = [
            PlacedStage(
                blocks=tuple(block.id for block in blocks[3 * n : 3 * n + 3]),
                devices=(2 * n, 2 * n + 1),
                replicas=2,
                zero=3 if zero else 0,
                unshard_every=every[0],
                reduce_every=every[1],
            )
            for n in range(4)
        ]
        placement = Placement(strategy="one-to-one", num_devices=8, stages=tuple(stages))
        level = LinkLevel(name="wire", group_size=8, latency_ns=5, bandwidth_bytes_per_s=10**12)
        cluster = Cluster(name="wires", source=source, devices=(DeviceKind(name="small", count=8),), levels=(level,))
        workload = build_workload(profile, placement, num_microbatches=count, microbatch_size=2, cluster=cluster)
        return plan_of(with_late_inputs(profile, workload, cluster) if late else workload)

    return made


def _graph(count: int) -> Plan:
    """Two branches that meet, under GPipe's order."""
    return plan_of(workload_of(8, count, name="k"), "gpipe")


def _unrolled(count: int) -> Plan:
    """A plan with a loop, with all of it written."""
    found = pipeplan.search(
        pipeplan.example("shape-v", devices=8, input_grad="1ms", weight_grad="1ms"),
        devices=8,
        microbatches=count,
        scheduler="1f1b",
        deterministic=True,
        time_limit="4s",
    ).plan
    return found.unrolled()


def _forwards(count: int) -> Plan:
    """Forwards alone in every chunk of an interleaved placement."""
    found = pipeplan.search(
        pipeplan.example("shape-circular", devices=8, chunks=2, inference=True),
        devices=8,
        microbatches=32,
        scheduler="interleaved-1f1b",
        deterministic=True,
        time_limit="4s",
    ).plan
    return plan_of(found.written.workload.with_microbatches(count), "interleaved-1f1b")


KINDS: dict[str, tuple[str, Callable[[int], Plan]]] = {
    "1f1b": ("1F1B, 8 devices", _shape("1f1b", split=False)),
    "split": ("1F1B with F, I and W", _shape("1f1b")),
    "busy links": ("the same, links that are busy", _shape("1f1b", 200)),
    "interleaved": ("interleaved 1F1B, 2 chunks", _shape("interleaved-1f1b", name="circular", chunks=2, split=False)),
    "v-shape": ("ZB-V", _shape("zb-v", name="zbv")),
    "zero bubble": ("ZB-H2", _shape("zb-h2")),
    "searched": ("found under memory, repeated", _searched),
    "graph": ("two branches that meet", _graph),
    "replicas": ("pp 4, dp 4", _model(pp=4, replicas=4, tp=1)),
    "shards": ("pp 4, tp 2, dp 2", _model(pp=4, replicas=2, tp=2)),
    "zero-3": ("pp 4, dp 2, state exchanged by actions", _chain(zero=True)),
    "recomputed": ("pp 4, dp 4, all computed again", _model(pp=4, replicas=4, tp=1, recompute="all")),
    "late inputs": ("pp 4, dp 2, begun before all inputs", _chain(late=True)),
    "forwards": ("inference, 2 chunks", _forwards),
    "unrolled": ("a loop written out", _unrolled),
}


def _least(measure: Callable[[Plan], object], text: str, repeats: int) -> float:
    """Least process time of a call on a plan that was just read."""
    times = []
    for _ in range(repeats):
        plan = Plan.model_validate_json(text)
        begun = time.process_time()
        measure(plan)
        times.append(time.process_time() - begun)
    return min(times)


def counts_of(plan: Plan) -> tuple[int, int]:
    """Actions that devices run, messages and exchanges of state; and how many of all these are timed apart."""
    simulation = simulate(plan)
    graph, workload = simulation.graph, simulation.graph.workload
    beside = graph.num_tasks - graph.num_actions + len(simulation.exchanges)
    ran = sum(len(workload.slots[item]) for device in range(len(plan.devices)) for item in workload.on_resource[device])
    return ran + beside, graph.num_actions + beside


def kind_row(kind: str, count: int, repeats: int) -> list[str]:
    """Actions, and thousands of them a second that are simulated, also with all causes, and checked."""
    words, made = KINDS[kind]
    plan = made(count)
    text = plan.model_dump_json()
    actions, apart = counts_of(Plan.model_validate_json(text))
    entries = sum(map(len, plan.programs))
    measures: tuple[Callable[[Plan], object], ...] = (simulate, lambda each: simulate(each).figures(), check)
    speeds = [f"{actions / _least(measure, text, repeats) / 1e3:,.0f}" for measure in measures]
    note(f"{kind}: {actions} actions, {entries} entries: {', '.join(speeds)} thousand a second")
    return [kind, words, f"{actions:,}", f"{apart:,}", f"{entries:,}", *speeds]


def size_row(num_devices: int, num_microbatches: int, repeats: int) -> list[str]:
    """Actions, seconds with free and with busy links, and microseconds per action or message."""
    cells = []
    for occupancy in (0, 200):
        workload = workload_of(num_devices, num_microbatches, occupancy)
        tasks = len(workload.durations) * num_microbatches
        text = plan_of(workload).model_dump_json()
        simulated, checked = (_least(measure, text, repeats) for measure in (simulate, check))
        cells += [f"{tasks:,}", *(f"{took / tasks * 1e6:.2f}" for took in (simulated, checked))]
        note(f"{num_devices} devices, {num_microbatches} micro-batches: {tasks} in {simulated:.2f}, {checked:.2f} s")
    return [str(num_devices), f"{num_microbatches:,}", *cells]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["all", "kinds", "sizes"], default="all")
    parser.add_argument("--only", default=",".join(KINDS), help="kinds of plans, separated by commas")
    parser.add_argument("--count", type=int, default=1024, help="micro-batches of each kind")
    parser.add_argument("--devices", type=int, default=64)
    parser.add_argument("--microbatches", default="16,128,1024,4096")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    if options.part != "sizes":
        rows = [kind_row(kind, options.count, options.repeats) for kind in options.only.split(",")]
        header = ["kind", "plan", "actions", "timed apart", "entries", "simulate, 1000/s", "with causes", "check"]
        print(markdown(header, rows), end="\n\n")
    if options.part != "kinds":
        counts = map(int, options.microbatches.split(","))
        rows = [size_row(options.devices, count, options.repeats) for count in counts]
        header = ["devices", "micro-batches", "actions", "simulate, us each", "check", "with messages", "simulate"]
        print(markdown([*header, "check"], rows), end="\n\n")
    print(f"Least of {options.repeats}; {machine()}.")


if __name__ == "__main__":
    main()
