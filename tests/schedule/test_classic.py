"""Classic schedules: complete, free of deadlock, and as their papers draw and count them.

A *chunk* is a stage of a device. Bubbles are what the makespan has beyond a device's work; *by span* it is the longest
time from a device's first action to its last that counts, as the zero-bubble papers do.
"""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders.chains import chain_workload, hops
from builders.drawn import Placed, stage_graphs
from builders.problems import problems
from builders.shapes import shape_workload, unit_problem
from pipeplan.checker import check
from pipeplan.costs import build_workload
from pipeplan.examples import SHAPES, ShapeCosts, shape
from pipeplan.files import Edge
from pipeplan.partition.placement import place
from pipeplan.partition.strategies import SEARCHED
from pipeplan.planning.build_plan import assemble
from pipeplan.schedule.classic import CLASSIC
from pipeplan.schedule.rules.engine import RulesRun
from pipeplan.schedule.stage_graph import kfkb_orders
from pipeplan.schedule.state import fitting
from pipeplan.workload.elements import Dependency
from pipeplan.workload.memory import fits, peak_memory
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.task_graph import earliest_starts, task_graph
from pipeplan.workload.workload import Workload
from support.marks import slow_but, some_of
from support.paths import ROOT


def problem_of(
    name: str,
    num_devices: int = 4,
    num_microbatches: int = 8,
    *,
    forward: int = 1,
    backward: int = 3,
    split: bool = False,
) -> OneMicrobatch:
    """A shape of the literature; ``split`` has F, I and W alike instead of the times given."""
    times = ShapeCosts(12, None, 12, 12) if split else ShapeCosts(forward, backward)
    costs = replace(times, shared_forward_ns=1, shared_backward_ns=1)
    return OneMicrobatch.of(shape_workload(name, num_devices, num_microbatches, costs=costs, split=split))


def split_chain(num_devices: int, num_microbatches: int) -> OneMicrobatch:
    return OneMicrobatch.of(chain_workload(num_devices, num_microbatches, split=(10, 10)))


def one(num_devices: int, chunks: int = 1) -> list[tuple[int]]:
    """Stage after stage, the devices in turn: one chunk each, or several."""
    return [(stage % num_devices,) for stage in range(chunks * num_devices)]


def waves(num_devices: int, chunks: int = 2) -> list[tuple[int]]:
    """Down and up: a wave for every two chunks."""
    down = list(range(num_devices))
    return [(device,) for chunk in range(chunks) for device in (down if chunk % 2 == 0 else down[::-1])]


def chain(
    groups: list[tuple[int]],
    num_microbatches: int,
    *,
    forward: int = 1,
    backward: int = 2,
    split: tuple[int, int] | None = None,
    deferred: int = 1,
) -> OneMicrobatch:
    """A chain of equal stages without communication, each holding 2 bytes per micro-batch, ``deferred`` after I."""
    num_devices = 1 + max(device for (device,) in groups)
    return OneMicrobatch.of(
        chain_workload(
            num_devices,
            num_microbatches,
            devices=groups,
            forward=forward,
            backward=backward,
            split=split,
            activation_bytes=2,
            weight_grad_bytes=deferred if split else 0,
        )
    )


def orders_of(scheduler: str, problem: OneMicrobatch) -> list[list[int]]:
    assert CLASSIC[scheduler].applies(problem) is None
    return CLASSIC[scheduler].orders(problem, task_graph(problem.workload))


def labels(problem: OneMicrobatch, orders: list[list[int]]) -> list[list[str]]:
    graph = task_graph(problem.workload)
    return [[graph.label(task) for task in order] for order in orders]


def kinds(problem: OneMicrobatch, orders: list[list[int]]) -> list[list[str]]:
    return [[problem.workload.operations[task // problem.num_microbatches].kind for task in order] for order in orders]


def with_edges(workload: Workload, edges: list[tuple[int, int]]) -> Workload:
    """The same stages, one device each, with these edges between them and no others."""
    back = "I" if workload.splits_backward else "B"
    own = [each for each in workload.dependencies if each.source_stage == each.target_stage]
    groups = [stage.devices for stage in workload.stages]
    for a, b in edges:
        own.append(Dependency(source=f"{a}F", target=f"{b}F", hops=hops(groups[a], groups[b], 0)))
        own.append(Dependency(source=f"{b}{back}", target=f"{a}{back}", hops=hops(groups[b], groups[a], 0)))
    return replace(workload, dependencies=tuple(own))


def makespan(problem: OneMicrobatch, orders: list[list[int]]) -> int:
    graph = task_graph(problem.workload)
    starts = earliest_starts(graph, orders)
    return max(start + duration for start, duration in zip(starts, graph.durations, strict=True))


def bubble(problem: OneMicrobatch, orders: list[list[int]]) -> int:
    return makespan(problem, orders) - problem.num_microbatches * max(problem.work)


def span_bubble(problem: OneMicrobatch, orders: list[list[int]]) -> int:
    graph = task_graph(problem.workload)
    starts = earliest_starts(graph, orders)
    spans = [
        max(starts[task] + graph.durations[task] for task in order) - min(starts[task] for task in order)
        for order in orders
    ]
    return max(spans) - problem.num_microbatches * max(problem.work)


def held(problem: OneMicrobatch, orders: list[list[int]]) -> list[float]:
    """[device] most activations held at once, in those of a micro-batch on one chunk."""
    memory = peak_memory(task_graph(problem.workload), orders)
    return [device.activation_bytes / 2 for device in memory]


def most_in_flight(problem: OneMicrobatch, order: list[int]) -> int:
    """Most forwards of a device that have begun and whose last backward part has not ended."""
    count, held, most = problem.num_microbatches, 0, 0
    for task in order:
        kind = problem.workload.operations[task // count].kind
        held += kind == "F"
        most = max(most, held)
        held -= kind in ("B", "W")
    return most


SKIP, TOWERS = "a chain with one edge more, from its first stage to its last", "two chains that meet in the last stage"
GRAPHS = {
    "skip": (SKIP, one, 1),
    "towers": (TOWERS, one, 1),
    "skip circular": (SKIP, one, 2),
    "towers circular": (TOWERS, one, 2),
    "skip zbv": (SKIP, waves, 2),
}
"""{stage graph: its edges, where its stages stand, how many on each device}"""

CHAINS = ["v", "circular", "zbv", "waves"]
CASES = [*SHAPES, "waves", *GRAPHS, *(f"{name} split" for name in (*CHAINS, "x", *GRAPHS))]
"""A shape of the literature, two waves (four chunks), or a stage graph; whole backward or split."""

STAGES = {
    "any": [*SHAPES, "waves", *GRAPHS],
    "any, one per device": ["v", "skip", "towers"],
    "any, C in turn": ["circular", "skip circular", "towers circular"],
    "a chain, one per device": ["v"],
    "a chain, two down and up": ["zbv"],
    "a chain, 2 per wave, down and up": ["zbv", "waves"],
    "two chains, both ways": ["x"],
    "a chain, and stages on all devices": ["m", "mllm", "nn"],
}
"""The cases, without backward, of what the table says under "stages"."""

BACKWARD = {"either": ("", " split"), "split": (" split",), "whole": ("",)}


def documented() -> dict[str, list[str]]:
    """{schedule: the cases it is for}, as the table of docs/algorithms/schedules.md says."""
    page = (ROOT / "docs" / "algorithms" / "schedules.md").read_text(encoding="utf-8")
    found = {}
    for names, stages, backward in re.findall(r"^\| (`.*?) \| (.*?) \| (either|split|whole) \|", page, re.MULTILINE):
        wanted = {f"{stage}{ending}" for stage in STAGES[stages] for ending in BACKWARD[backward]}
        found |= {name: [case for case in CASES if case in wanted] for name in re.findall("`(.*?)`", names)}
    return found


WHERE = documented()
ON_GRAPHS = [name for name, cases in WHERE.items() if "skip" in cases or "skip circular split" in cases]
"""The schedules of stage graphs."""


def case(name: str, num_devices: int = 4, num_microbatches: int = 8) -> OneMicrobatch:
    kind, split = name.removesuffix(" split"), name.endswith(" split")
    if kind == "waves":
        return chain(waves(num_devices, 4), num_microbatches, split=(1, 1) if split else None)
    if kind in GRAPHS:
        edges, stand, chunks = GRAPHS[kind]
        found = chain(stand(num_devices, chunks), num_microbatches, split=(1, 1) if split else None)
        last, ahead = chunks * num_devices - 1, 1 if edges == SKIP else 2
        pairs = {(stage, min(stage + ahead, last)) for stage in range(last)} | ({(0, last)} if last > 0 else set())
        return OneMicrobatch.of(with_edges(found.workload, sorted(pairs)))
    return problem_of(kind, num_devices, num_microbatches, forward=12, backward=24, split=split)


class TestEveryClassic:
    def test_each_applies_where_it_should(self) -> None:
        """Where the page's table says; and a reason where it does not."""
        assert set(WHERE) == set(CLASSIC)
        for scheduler, names in WHERE.items():
            reasons = {name: CLASSIC[scheduler].applies(case(name)) for name in CASES}
            assert {name for name, reason in reasons.items() if reason is None} == set(names)
            assert all(reason.startswith(("it needs ", "beside ")) for reason in reasons.values() if reason)

    @pytest.mark.parametrize(
        ("scheduler", "name", "reason"),
        [
            ("1f1b", "zbv", "it needs one stage per device (--placement one-to-one, and no --vp)"),
            ("zb-h1", "v", "it needs input and weight gradients apart (--split-backward)"),
            ("zb-h1", "zbv", "it needs one stage per device (--placement one-to-one, and no --vp)"),
            ("zb-1p", "zbv split", "it needs a chain with stage d on device d alone (--placement one-to-one)"),
            ("zb-1p", "skip split", "it needs a chain of stages, and forwards of stage 0 go on to stages 1 and 3"),
            ("looped-bfs", "v", "it needs several stages per device in turn (--placement circular)"),
            ("zb-v", "waves split", "it needs a chain with two stages per device, down and up (--placement v-shape)"),
            ("zb-v", "skip zbv split", "it needs a chain of stages, and forwards of stage 0 go on to stages 1 and 7"),
            (
                "hanayo",
                "circular",
                "it needs a chain with stages down and up, an even number per device (--placement v-shape)",
            ),
            (
                "1f1b+",
                "v",
                "it needs a stage on all devices (--shard-shared yes, for shared blocks with costs for 4 shards)",
            ),
            ("1f1b+", "k", "it needs stages that follow each other (--placement sequential puts them in line)"),
            ("chimera", "v", "it needs two chains over the same devices both ways (--placement bidirectional)"),
        ],
    )
    def test_the_reason_names_what_is_missing(self, scheduler: str, name: str, reason: str) -> None:
        assert CLASSIC[scheduler].applies(case(name)) == reason

    @slow_but(
        "scheduler, num_devices",
        [(name, devices) for name in sorted(CLASSIC) for devices in (1, 2, 4, 6)],
        lambda case: case[1] in (1, 4) and (case[1] < 4 or case[0] not in ("gpipe", "greedy")),
        lambda case: case[1] == 6 and case[0] in ("gpipe", "greedy"),
    )
    def test_complete_and_free_of_deadlock(self, scheduler: str, num_devices: int) -> None:
        for name in WHERE[scheduler]:
            if num_devices == 1 and not name.startswith(("v", "zbv", "waves", *GRAPHS)):
                continue
            for num_microbatches in (1, 2, 3, num_devices + 1, 2 * num_devices):
                problem = case(name, num_devices, num_microbatches)
                if scheduler == "dualpipe-v" and num_microbatches < 2 * num_devices:
                    continue
                orders = orders_of(scheduler, problem)
                for order, operations in zip(orders, problem.on_device, strict=True):
                    everything = [x * num_microbatches + m for x in operations for m in range(num_microbatches)]
                    assert sorted(order) == everything
                assert makespan(problem, orders) >= num_microbatches * max(problem.work)

    @pytest.mark.parametrize("scheduler", sorted(CLASSIC))
    def test_the_same_every_time(self, scheduler: str) -> None:
        problem = case(WHERE[scheduler][-1])
        assert orders_of(scheduler, problem) == orders_of(scheduler, problem)

    def test_one_device(self) -> None:
        problem = problem_of("v", 1, 3)
        assert labels(problem, orders_of("1f1b", problem)) == [["0F0", "0B0", "0F1", "0B1", "0F2", "0B2"]]
        assert labels(problem, orders_of("gpipe", problem)) == [["0F0", "0F1", "0F2", "0B0", "0B1", "0B2"]]


class TestStageGraphs:
    """Schedules that are defined by the depth of a stage: from it to the end, on the longest way."""

    @pytest.mark.parametrize(
        ("edges", "in_flight"),
        [
            ([(0, 1), (1, 2), (2, 3), (0, 3)], [4, 3, 2, 1]),  # a chain that is skipped
            ([(0, 2), (1, 2), (2, 3)], [3, 3, 2, 1]),  # two towers
            ([(0, 1), (0, 2), (1, 3), (2, 3)], [3, 2, 2, 1]),  # a diamond
            ([(0, 1), (2, 3)], [2, 1, 2, 1]),  # two chains that nothing joins
        ],
    )
    def test_forwards_ahead(self, edges: list[tuple[int, int]], in_flight: list[int]) -> None:
        """1F1B and ZB-H1 of H micro-batches, ZB-H2 of one less than twice as many, on the device H from the end."""
        problem = OneMicrobatch.of(with_edges(chain(one(4), 9, split=(1, 1), deferred=2).workload, edges))

        def ahead(scheduler: str) -> list[int]:
            return [order.index("I") for order in kinds(problem, orders_of(scheduler, problem))]

        assert ahead("1f1b") == ahead("zb-h1") == in_flight
        assert ahead("zb-h2") == [2 * number - 1 for number in in_flight]
        assert held(problem, orders_of("1f1b", problem)) == in_flight
        assert max(held(problem, orders_of("zb-h1", problem))) == max(in_flight)
        assert max(held(problem, orders_of("zb-h2", problem))) == 2 * max(in_flight) - 1

    def test_interleaved_towers(self) -> None:
        """The towers are on four of six devices each: chunk 0 of A, A, B, B and two that they meet in."""
        edges = [(0, 1), (2, 3), (1, 4), (3, 4), (4, 5), (5, 6), *((s, s + 1) for s in range(6, 11))]
        problem = OneMicrobatch.of(with_edges(chain(one(6, 2), 12).workload, edges))
        orders = kinds(problem, orders_of("interleaved-1f1b", problem))
        turns = [6, 5, 4, 3, 2, 1]  # the second chunks are one chain, so each device has as many behind it
        assert [order.index("B") for order in orders] == [6 + 2 * number - 1 for number in turns]
        parallel = [(0, 1), (1, 4), (2, 3), (3, 4), (4, 5), *((s, s + 6) for s in range(6))]
        problem = OneMicrobatch.of(with_edges(chain(one(6, 2), 12).workload, parallel))
        orders = kinds(problem, orders_of("interleaved-1f1b", problem))
        assert [order.index("B") for order in orders] == [6 + 2 * number - 1 for number in (4, 3, 4, 3, 2, 1)]

    @settings(max_examples=some_of(30))
    @given(stage_graphs(sizes=True) | stage_graphs() | stage_graphs(chunks=2) | stage_graphs(chunks=3))
    @pytest.mark.slow
    def test_every_one_passes_check_wherever_it_applies(self, drawn: Placed) -> None:
        problem, graph = OneMicrobatch.of(drawn.workload), task_graph(drawn.workload)
        applying = [name for name in ON_GRAPHS if CLASSIC[name].applies(problem) is None]
        assert "gpipe" in applying
        for name in applying:
            made = orders_of(name, problem)
            orders = made if problem.reduction is None else problem.reduction.from_reduced(made)
            plan = assemble(graph, orders, 1, Fraction(0), name)
            assert check(plan, drawn.profile, drawn.cluster).problems == ()

    @settings(max_examples=some_of(60))
    @given(stage_graphs())
    def test_1f1b_has_at_most_its_depth_in_flight(self, drawn: Placed) -> None:
        problem = OneMicrobatch.of(drawn.workload)
        depth = [1] * problem.num_devices
        for source, target in sorted(drawn.workload.stage_edges, reverse=True):
            depth[source] = max(depth[source], depth[target] + 1)
        for device, order in enumerate(orders_of("1f1b", problem)):
            assert most_in_flight(problem, order) == min(depth[device], problem.num_microbatches)

    @settings(max_examples=some_of(60))
    @given(stage_graphs(sizes=True))
    def test_1f1b_of_sizes_of_their_own_is_kfkb_with_k_1(self, drawn: Placed) -> None:
        problem, graph = OneMicrobatch.of(drawn.workload), task_graph(drawn.workload)
        made = orders_of("1f1b", problem)
        orders = made if problem.reduction is None else problem.reduction.from_reduced(made)
        assert orders == kfkb_orders(drawn.workload, graph)


class TestGPipe:
    """GPipe (NeurIPS'19), section 2.3 and Fig. 2 (c)."""

    def test_all_forwards_first(self) -> None:
        problem = problem_of("v", 2, 3)
        orders = labels(problem, orders_of("gpipe", problem))
        assert orders[0] == ["0F0", "0F1", "0F2", "0B0", "0B1", "0B2"]

    @pytest.mark.parametrize(("num_devices", "num_microbatches"), [(2, 1), (4, 4), (4, 32), (8, 5)])
    def test_bubble_of_the_iteration(self, num_devices: int, num_microbatches: int) -> None:
        """(K - 1) / (M + K - 1)."""
        problem = problem_of("v", num_devices, num_microbatches)
        end = makespan(problem, orders_of("gpipe", problem))
        assert end == (num_microbatches + num_devices - 1) * 4

    def test_everything_is_in_flight(self) -> None:
        problem = problem_of("v", 4, 8)
        assert [most_in_flight(problem, order) for order in orders_of("gpipe", problem)] == [8] * 4


class TestOneForwardOneBackward:
    """PipeDream (SOSP'19), Fig. 4 in steady state; DAPPLE (PPoPP'21), Fig. 3 (b), with its warmup and end."""

    def test_the_orders_of_the_figure(self) -> None:
        problem = problem_of("v", 4, 5)
        assert [" ".join(order) for order in labels(problem, orders_of("1f1b", problem))] == [
            "0F0 0F1 0F2 0F3 0B0 0F4 0B1 0B2 0B3 0B4",
            "1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1B3 1B4",
            "2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2B4",
            "3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4",
        ]

    def test_device_d_holds_at_most_as_many_as_there_are_devices_from_it_on(self) -> None:
        problem = problem_of("v", 4, 8)
        assert [most_in_flight(problem, order) for order in orders_of("1f1b", problem)] == [4, 3, 2, 1]

    def test_weight_gradients_follow_at_once(self) -> None:
        problem = split_chain(2, 3)
        assert [" ".join(order) for order in labels(problem, orders_of("1f1b", problem))] == [
            "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2",
            "1F0 1I0 1W0 1F1 1I1 1W1 1F2 1I2 1W2",
        ]

    @pytest.mark.parametrize(("num_devices", "num_microbatches"), [(2, 1), (4, 4), (4, 32), (8, 5), (1, 3)])
    def test_bubble_of_the_iteration(self, num_devices: int, num_microbatches: int) -> None:
        """(D - 1) (F + B), whatever the number of micro-batches."""
        problem = chain(one(num_devices), num_microbatches, forward=3, backward=5)
        assert bubble(problem, orders_of("1f1b", problem)) == (num_devices - 1) * 8

    @pytest.mark.parametrize("num_devices", [2, 5, 8])
    def test_as_long_as_gpipe(self, num_devices: int) -> None:
        problem = problem_of("v", num_devices, 11)
        assert makespan(problem, orders_of("1f1b", problem)) == makespan(problem, orders_of("gpipe", problem))


class TestInterleaved:
    """Megatron-LM (SC'21), section 2.2; memory: Korthikanti et al. (MLSys'23), section 4.2."""

    @pytest.mark.parametrize("scheduler", ["interleaved-1f1b", "looped-bfs"])
    @pytest.mark.parametrize("chunks", [2, 3, 4])
    @pytest.mark.parametrize(("num_devices", "groups"), [(2, 1), (3, 4), (4, 1), (4, 3), (8, 2)])
    def test_chunks_divide_the_bubble(self, scheduler: str, chunks: int, num_devices: int, groups: int) -> None:
        """(D - 1) (F + B) of a chunk, not of a device, for whole groups of D micro-batches."""
        problem = chain(one(num_devices, chunks), groups * num_devices, forward=2, backward=5)
        assert bubble(problem, orders_of(scheduler, problem)) == (num_devices - 1) * 7

    @pytest.mark.parametrize("chunks", [2, 3, 4])
    @pytest.mark.parametrize("num_devices", [2, 3, 8])
    def test_memory(self, chunks: int, num_devices: int) -> None:
        """D (1 + (D - 1) / (D C)) micro-batches on device 0, two fewer chunks on each device further on."""
        problem = chain(one(num_devices, chunks), 3 * num_devices)
        first = num_devices * chunks + num_devices - 1
        assert held(problem, orders_of("interleaved-1f1b", problem)) == [first - 2 * d for d in range(num_devices)]

    def test_breadth_first_runs_chunk_after_chunk(self) -> None:
        """Lamy-Poirier (MLSys'23): all micro-batches of a chunk before the next chunk; all are held."""
        problem = chain(one(2, 2), 2)
        orders = orders_of("looped-bfs", problem)
        assert labels(problem, orders)[0] == ["0F0", "0F1", "2F0", "2F1", "2B0", "2B1", "0B0", "0B1"]
        assert held(problem, orders) == [4, 4]

    @pytest.mark.parametrize("chunks", [2, 3])
    @pytest.mark.parametrize(("forward", "input_grad", "weight_grad"), [(1, 1, 1), (3, 4, 2), (5, 4, 4)])
    def test_zero_bubble_memory_and_bubble(self, chunks: int, forward: int, input_grad: int, weight_grad: int) -> None:
        """As ZB-H1's, of a chunk: (D - 1) (F + I - W), and D micro-batches."""
        for count in (4, 12):
            problem = chain(one(4, chunks), count, forward=forward, split=(input_grad, weight_grad), deferred=2)
            orders = orders_of("interleaved-zb", problem)
            assert bubble(problem, orders) == 3 * (forward + input_grad - weight_grad)
            assert max(held(problem, orders)) == 4 * chunks


TIMES = [(1, 1, 1), (2, 2, 1), (1, 2, 1), (2, 1, 1), (3, 4, 2), (4, 5, 4), (5, 4, 4), (10, 11, 9)]
"""F, I and W with W no longer than the others, for which the papers' formulas hold."""

numbers = st.integers(1, 20)


class TestZeroBubble:
    """Zero Bubble Pipeline Parallelism (ICLR'24), section 2.3, Table 2; sections 2.1, 2.2 and 3."""

    @pytest.mark.parametrize(("forward", "input_grad", "weight_grad"), TIMES)
    @pytest.mark.parametrize("num_devices", [2, 4, 7])
    def test_h1(self, num_devices: int, forward: int, input_grad: int, weight_grad: int) -> None:
        """Bubble (D - 1) (F + I - W) in the memory of 1F1B: D micro-batches, though I gave nothing back."""
        for count in (num_devices, num_devices + 1, 3 * num_devices):
            problem = chain(one(num_devices), count, forward=forward, split=(input_grad, weight_grad), deferred=2)
            orders = orders_of("zb-h1", problem)
            assert bubble(problem, orders) == (num_devices - 1) * (forward + input_grad - weight_grad)
            assert held(problem, orders) == [num_devices] * num_devices

    @pytest.mark.parametrize(("forward", "input_grad", "weight_grad"), TIMES)
    @pytest.mark.parametrize("num_devices", [2, 4, 7])
    def test_h2(self, num_devices: int, forward: int, input_grad: int, weight_grad: int) -> None:
        """Bubble by span (D - 1) (F + I - 2 W), none if all are alike; 2 D - 1 micro-batches."""
        most = 2 * num_devices - 1
        for count in (most, most + 1, 4 * num_devices):
            problem = chain(one(num_devices), count, forward=forward, split=(input_grad, weight_grad), deferred=2)
            orders = orders_of("zb-h2", problem)
            assert span_bubble(problem, orders) == (num_devices - 1) * (forward + input_grad - 2 * weight_grad)
            assert held(problem, orders) == [most] * num_devices

    @settings(max_examples=15)
    @given(st.integers(1, 6), st.integers(1, 18), numbers, numbers, numbers, st.integers(0, 5), st.integers(0, 4))
    @pytest.mark.slow
    def test_automatic_is_at_least_as_good_as_handcrafted(
        self, num_devices: int, count: int, forward: int, input_grad: int, weight_grad: int, lag: int, deferred: int
    ) -> None:
        """Within room for D micro-batches as ZB-H1, and 2 D as ZB-H2; a deferred weight gradient may be the larger."""
        problem = OneMicrobatch.of(
            chain_workload(
                num_devices,
                count,
                forward=forward,
                split=(input_grad, weight_grad),
                lag=lag,
                activation_bytes=2,
                weight_grad_bytes=deferred,
            )
        )
        length = {name: makespan(problem, orders_of(name, problem)) for name in ("zb-h1", "zb-h2", "zb-1p", "zb-2p")}
        assert length["zb-1p"] <= length["zb-h1"]
        assert length["zb-2p"] <= min(length["zb-h1"], length["zb-h2"])
        each = max(2, deferred) / 2
        assert max(held(problem, orders_of("zb-1p", problem))) <= num_devices * each
        assert max(held(problem, orders_of("zb-2p", problem))) <= 2 * num_devices * each

    @pytest.mark.parametrize("num_devices", [2, 4, 8])
    def test_automatic_has_no_bubble_by_span_in_twice_the_memory(self, num_devices: int) -> None:
        problem = chain(one(num_devices), 4 * num_devices, split=(1, 1))
        assert span_bubble(problem, orders_of("zb-2p", problem)) == 0

    @pytest.mark.parametrize("room", [1, 2, 3, 5, 9])
    def test_automatic_keeps_to_what_the_devices_have(self, room: int) -> None:
        problem = OneMicrobatch.of(
            chain_workload(4, 10, split=(10, 10), activation_bytes=2, weight_grad_bytes=1, memory_bytes=2 * room)
        )
        assert fits(task_graph(problem.workload), orders_of("zb-auto", problem))


class TestVShape:
    """ZB-V (ICLR'24, section 6); V-Half and V-Min (NeurIPS'24, section 3); DualPipeV. Two chunks per device."""

    @pytest.mark.parametrize("num_devices", [1, 2, 3, 4, 8, 16])
    def test_zb_v(self, num_devices: int) -> None:
        """F = I = W: no bubble by span in the memory of 1F1B, D micro-batches, though I gave nothing back."""
        for count in (2 * num_devices - 1, 2 * num_devices, 3 * num_devices):
            problem = chain(waves(num_devices), count, split=(1, 1), deferred=2)
            orders = orders_of("zb-v", problem)
            assert span_bubble(problem, orders) == 0
            assert held(problem, orders) == [2 * num_devices] * num_devices

    @slow_but("num_devices", [*range(1, 13), 16, 21, 32], lambda devices: devices <= 12)
    def test_v_half(self, num_devices: int) -> None:
        """At most (D + 2) // 2 micro-batches, whatever I gives back; bubble about D / 2 micro-batches' work."""
        tight, half = (
            chain(waves(num_devices), 2 * num_devices + 3, split=(1, 1), deferred=deferred) for deferred in (2, 1)
        )
        for problem in (tight, half):
            assert max(held(problem, orders_of("v-half", problem))) <= 2 * ((num_devices + 2) // 2)
        assert bubble(half, orders_of("v-half", half)) <= (3 if num_devices % 2 == 0 else 3.5) * num_devices

    @slow_but("num_devices", [*range(1, 13), 16, 21, 32], lambda devices: devices <= 12)
    def test_v_min(self, num_devices: int) -> None:
        """At most (D + 4) // 3 micro-batches, though I gave nothing back; bubble 2 D / 3 micro-batches' work."""
        problem = chain(waves(num_devices), 2 * num_devices + 3, split=(1, 1), deferred=2)
        orders = orders_of("v-min", problem)
        assert max(held(problem, orders)) <= 2 * ((num_devices + 4) // 3)
        assert bubble(problem, orders) <= 4 * num_devices

    @pytest.mark.parametrize("scheduler", ["v-half", "v-min"])
    def test_there_is_a_block_for_every_number_of_devices(self, scheduler: str) -> None:
        for num_devices in (*range(1, 25), 32, 48, 64):
            problem = chain(waves(num_devices), 1, split=(1, 1))
            assert [len(order) for order in orders_of(scheduler, problem)] == [6] * num_devices

    @pytest.mark.parametrize("scheduler", ["v-half", "v-min"])
    @pytest.mark.parametrize("num_devices", [3, 4, 9])
    def test_a_block_repeats(self, scheduler: str, num_devices: int) -> None:
        """Every six slots, from some micro-batch on: one more adds just its work."""
        lengths = [
            makespan(problem, orders_of(scheduler, problem))
            for count in range(3 * num_devices, 3 * num_devices + 4)
            for problem in [chain(waves(num_devices), count, split=(1, 1))]
        ]
        assert [after - before for before, after in zip(lengths, lengths[1:], strict=False)] == [6, 6, 6]

    @pytest.mark.parametrize(("forward", "input_grad", "weight_grad"), [(1, 1, 1), (2, 2, 1), (1, 2, 1), (3, 4, 2)])
    @pytest.mark.parametrize("num_devices", [2, 3, 4, 8])
    def test_dualpipe_v(self, num_devices: int, forward: int, input_grad: int, weight_grad: int) -> None:
        """Of DeepSeek's table, with forward and backward one after the other: bubble, and 2 D + 1 chunks everywhere.

        The bubble is at most (D - 1) (F&B + B - 3 W), as a whole backward here hands its gradient on before W.
        """
        problem = chain(
            waves(num_devices), 3 * num_devices, forward=forward, split=(input_grad, weight_grad), deferred=2
        )
        orders = orders_of("dualpipe-v", problem)
        backward = input_grad + weight_grad
        assert bubble(problem, orders) <= (num_devices - 1) * (forward + backward + backward - 3 * weight_grad)
        assert held(problem, orders) == [2 * num_devices + 1] * num_devices

    def test_dualpipe_v_needs_two_micro_batches_per_device(self) -> None:
        assert CLASSIC["dualpipe-v"].applies(case("zbv", 4, 8)) is None
        assert CLASSIC["dualpipe-v"].applies(case("zbv", 4, 7)) == "it needs at least 8 micro-batches, two per device"


class TestHanayo:
    """Hanayo (SC'23): the more waves the shorter the bubble, in the memory of 1F1B."""

    @pytest.mark.parametrize("num_devices", [2, 3, 4, 8])
    def test_waves_shorten_the_bubble(self, num_devices: int) -> None:
        """With D micro-batches and a device's work divided among its chunks; 1F1B has the longest."""
        plain = chain(one(num_devices), num_devices, forward=24, backward=48)
        found = [bubble(plain, orders_of("1f1b", plain))]
        for chunks in (2, 4, 6, 8):
            problem = chain(waves(num_devices, chunks), num_devices, forward=24 // chunks, backward=48 // chunks)
            found.append(bubble(problem, orders_of("hanayo", problem)))
        assert all(after < before for before, after in zip(found, found[1:], strict=False))

    @pytest.mark.parametrize("chunks", [2, 4])
    @pytest.mark.parametrize("split", [None, (1, 1)])
    @pytest.mark.parametrize("count", [1, 4, 5, 8, 13])
    def test_at_most_as_many_micro_batches_open_as_devices(
        self, chunks: int, split: tuple[int, int] | None, count: int
    ) -> None:
        problem = chain(waves(4, chunks), count, split=split, deferred=2)
        assert max(held(problem, orders_of("hanayo", problem))) <= 4 * chunks

    @pytest.mark.parametrize("chunks", [2, 4])
    def test_units_add_up_at_worst(self, chunks: int) -> None:
        """Three times as many micro-batches take at most three times as long."""
        once, thrice = (chain(waves(4, chunks), count) for count in (4, 12))
        assert makespan(thrice, orders_of("hanayo", thrice)) <= 3 * makespan(once, orders_of("hanayo", once))


class TestChimera:
    """Chimera (SC'21), III-A and Table 2."""

    @pytest.mark.parametrize("num_devices", [2, 4, 6, 8, 16])
    def test_one_unit_has_that_many_bubbles(self, num_devices: int) -> None:
        """D micro-batches with equal slots: D/2 - 1 bubbles in the forward and as many in the backward passes."""
        problem = problem_of("x", num_devices, num_devices // 2, forward=1, backward=1)
        assert makespan(problem, orders_of("chimera", problem)) == 2 * num_devices + num_devices - 2

    @pytest.mark.parametrize("units", [1, 2, 5])
    def test_units_close_the_bubbles_between_them(self, units: int) -> None:
        """III-C: with equal slots direct concatenation leaves only the bubbles at the two ends."""
        problem = problem_of("x", 4, 2 * units, forward=1, backward=1)
        assert makespan(problem, orders_of("chimera", problem)) == units * 8 + 2

    def test_both_ways_alike(self) -> None:
        """Device d runs the down stages as device D - 1 - d runs the up stages."""
        problem = problem_of("x", 4, 6)
        orders = labels(problem, orders_of("chimera", problem))
        other = {f"{stage}": f"{(stage + 4) % 8}" for stage in range(8)}
        mirrored = [[other[text[0]] + text[1:] for text in order] for order in reversed(orders)]
        assert orders == mirrored

    @pytest.mark.parametrize("num_devices", [4, 8])
    def test_memory_is_that_of_1f1b_at_its_worst(self, num_devices: int) -> None:
        """Table 2: activations from D/2 + 1 to D of one micro-batch within a unit, most at the ends."""
        problem = problem_of("x", num_devices, num_devices // 2)
        held = [most_in_flight(problem, order) for order in orders_of("chimera", problem)]
        assert held == held[::-1]
        assert (min(held), max(held)) == (num_devices // 2 + 1, num_devices)

    def test_an_odd_number_of_devices_is_refused(self) -> None:
        reason = CLASSIC["chimera"].applies(problem_of("x", 3))
        assert reason == "it needs an even number of devices"


class TestOneForwardOneBackwardPlus:
    """Tessel (HPCA'24), VI-A: shared operations inserted into 1F1B."""

    @pytest.mark.parametrize("name", ["m", "mllm", "nn"])
    def test_the_chain_runs_1f1b(self, name: str) -> None:
        problem = problem_of(name, 4, 6)
        orders = orders_of("1f1b+", problem)
        own = [
            [task for task in order if problem.devices[task // 6] == (device,)] for device, order in enumerate(orders)
        ]
        plain = problem_of("v", 4, 6)
        kinds = [[text[1:] for text in order] for order in labels(plain, orders_of("1f1b", plain))]
        assert [[text[1:] for text in order] for order in labels(problem, own)] == kinds

    @pytest.mark.parametrize("in_line", [False, True])
    def test_edges_beside_those_of_the_line_cost_nothing(self, in_line: bool) -> None:
        """What was made earlier in the line is there already."""
        profile = shape("m", 4)
        assert profile.placement is not None
        line = profile.placement
        order, (first, last) = profile.topological_order(), (line.stages[0].blocks[0], line.stages[-1].blocks[0])
        assert (order[0], order[-1]) == (first, last)
        more = profile.model_copy(update={"edges": (*profile.edges, Edge(source=first, target=last, transfer_ns=0))})
        placed = line.model_copy(update={"strategy": "sequential"}) if in_line else line
        found = [
            OneMicrobatch.of(build_workload(each, where, num_microbatches=6, microbatch_size=1))
            for each, where in ((profile, line), (more, placed))
        ]
        assert CLASSIC["1f1b+"].applies(found[1]) is None
        runs = [orders_of("1f1b+", problem) for problem in found]
        alone = [
            [[task for task in order if len(problem.devices[task // 6]) == 1] for order in orders]
            for problem, orders in zip(found, runs, strict=True)
        ]
        assert alone[0] == alone[1]
        times = []
        for problem, orders in zip(found, runs, strict=True):
            graph = task_graph(problem.workload)
            times.append(graph.makespan(earliest_starts(graph, orders)))
        assert times[0] == times[1]

    @pytest.mark.parametrize("name", ["m", "mllm", "nn"])
    def test_all_devices_meet_in_the_same_order(self, name: str) -> None:
        problem = problem_of(name, 4, 6)
        shared = [
            [task for task in order if len(problem.devices[task // 6]) > 1] for order in orders_of("1f1b+", problem)
        ]
        assert shared[0]
        assert shared == [shared[0]] * 4


def test_schedules_say_for_which_chains_they_may_be() -> None:
    """What a first plan is looked for among: no other strategy has a chain on which they have a meaning."""
    profile = shape("zbv", 4, costs=ShapeCosts(12, None, 12, 12))
    able: dict[str, set[str]] = {name: set() for name in CLASSIC}
    for strategy in SEARCHED:
        placement = place(profile, strategy, 4, microbatch_size=1, memory_bytes=None)
        for is_split in (False, True):
            workload = build_workload(
                profile, placement, num_microbatches=16, microbatch_size=1, split_backward=is_split
            )
            problem = OneMicrobatch.of(workload)
            for name, classic in CLASSIC.items():
                able[name] |= {strategy} if classic.applies(problem) is None else set()
    for name, classic in CLASSIC.items():
        assert able[name] == set(classic.strategies or SEARCHED) or name == "1f1b+"


@settings(max_examples=some_of(25), deadline=None)
@given(problems(max_stages=3, num_microbatches=3))
def test_what_never_fits_is_known_without_orders(problem: OneMicrobatch) -> None:
    gpipe, graph = CLASSIC["gpipe"], task_graph(problem.workload)
    if gpipe.applies(problem) is None and gpipe.never_fits(problem):
        assert fitting(graph, gpipe.orders(problem, graph)) is None


@settings(max_examples=some_of(25), deadline=None)
@given(problems(max_stages=3, num_microbatches=3))
def test_orders_that_may_end_where_they_do_not_fit_are_none_then_and_else_the_same(problem: OneMicrobatch) -> None:
    graph = task_graph(problem.workload)
    for name in ("1f1b", "1f1b+"):
        classic = CLASSIC[name]
        if classic.applies(problem) is not None:
            continue
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("pipeplan.schedule.classic._remembered", {})
            patch.setattr("pipeplan.schedule.classic.MOST_REMEMBERED", 0)
            found, orders = classic.fitting_orders(problem, graph), classic.orders(problem, graph)
        if found is None:
            assert fitting(graph, orders) is None
        else:
            assert found == orders


@pytest.mark.parametrize("name", ["m", "mllm", "nn"])
def test_a_run_of_rules_ends_as_soon_as_a_device_is_full(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for what it holds it is the whole one; with less its first overflow is the end."""
    start, started = RulesRun.start, list[int]()

    def noted(run: RulesRun, task: int) -> None:
        started.append(task)
        start(run, task)

    def problem_in(room: int | None) -> OneMicrobatch:
        costs = ShapeCosts(1, 3, shared_forward_ns=1, shared_backward_ns=1, activation_bytes=1)
        return OneMicrobatch.of(shape_workload(name, 6, 18, costs=costs, memory=room))

    graph = task_graph(problem_in(None).workload)
    whole = CLASSIC["1f1b+"].orders(problem_in(None), graph)
    most = max(memory.peak_bytes for memory in peak_memory(graph, whole))
    monkeypatch.setattr(RulesRun, "start", noted)
    for room in range(1, most + 1):
        started.clear()
        problem = problem_in(room)
        found = CLASSIC["1f1b+"].fitting_orders(problem, task_graph(problem.workload))
        assert found == (whole if room == most else None)
        assert len(started) < graph.num_tasks / 2 or room == most


@pytest.mark.parametrize(("room", "never"), [(8, False), (7, True), (None, False)])
def test_gpipe_of_a_chain_needs_room_for_all_micro_batches(room: int | None, never: bool) -> None:
    problem = unit_problem("v", 4, 8, memory=room)
    graph = task_graph(problem.workload)
    assert CLASSIC["gpipe"].never_fits(problem) == never
    assert (fitting(graph, CLASSIC["gpipe"].orders(problem, graph)) is None) == never
