"""The catalog of rules files: each gives the schedule that its paper draws, counts and bounds."""

from __future__ import annotations

import re
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders.chains import chain_workload
from builders.profiles import profile_of
from builders.requests import request_of
from builders.shapes import shape_workload
from builders.towers import towers
from pipeplan.costs import build_workload
from pipeplan.errors import UsageError
from pipeplan.examples import ShapeCosts, shape
from pipeplan.files import CostRow, Profile
from pipeplan.partition.placement import place, place_submodules
from pipeplan.planning.request import Batch, choose_placement, submodules_of
from pipeplan.planning.steps import search_plan
from pipeplan.schedule.list_scheduling import Policy, list_schedule
from pipeplan.schedule.rules import with_instructions
from pipeplan.schedule.rules.engine import schedule_by_rules
from pipeplan.schedule.rules.language import named_rules, parse_rules, shipped_rules
from pipeplan.workload.engine import with_links
from pipeplan.workload.memory import peak_memory
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.task_graph import Orders, earliest_starts, task_graph
from pipeplan.workload.workload import Workload
from references.known_orders import KNOWN, known_orders
from references.shared_insertion import SharedInsertion
from support.marks import slow_but, some_of
from support.paths import ROOT

CHAINS = {"gpipe", "1f1b", "interleaved-1f1b", "interleaved-zb", "looped-bfs", "zb-h1", "zb-h2"}
SPLIT = {"zb-h1", "zb-h2", "interleaved-zb"}
"""Schedules that need input and weight gradients apart."""


def model(num_blocks: int, forward: int = 1, backward: int = 2, *, split: bool = False) -> Profile:
    """A chain of equal blocks that hold 2 bytes per micro-batch."""
    times = {"input_grad_ns": backward // 2, "weight_grad_ns": backward - backward // 2} if split else {}
    row = CostRow(
        microbatch_size=1,
        forward_ns=forward,
        backward_ns=backward,
        activation_bytes=2,
        weight_grad_bytes=2 if split else 0,
        **times,
    )
    return profile_of([row] * num_blocks)


def placed(name: str, num_devices: int, count: int, *, forward: int = 1, backward: int = 2) -> Workload:
    """A chain of which every stage is one block, placed as the rules say."""
    strategy = named_rules(name).placement or "one-to-one"
    chunks = 1 if strategy in ("one-to-one", "bidirectional") else 2
    profile = model(num_devices * chunks, forward, backward, split=name in SPLIT)
    placement = place(profile, strategy, num_devices, microbatch_size=1)
    return build_workload(profile, placement, num_microbatches=count, microbatch_size=1, split_backward=name in SPLIT)


def ordered(workload: Workload, name: str) -> Orders:
    return schedule_by_rules(task_graph(workload), named_rules(name))


def makespan(workload: Workload, orders: Orders) -> int:
    graph = task_graph(workload)
    starts = earliest_starts(graph, with_links(graph, orders))
    return max(start + duration for start, duration in zip(starts, graph.durations, strict=True))


def bubble_rate(workload: Workload, orders: Orders) -> float:
    durations = task_graph(workload).durations
    work = sum(durations[task] for order in orders for task in order)
    return 1 - work / (makespan(workload, orders) * len(orders))


def held(workload: Workload, orders: Orders) -> list[float]:
    """[device] most activations held at once, in those of a micro-batch on one stage."""
    return [device.activation_bytes / 2 for device in peak_memory(task_graph(workload), orders)]


def texts(workload: Workload, orders: Orders) -> list[str]:
    graph = task_graph(workload)
    return [" ".join(map(graph.label, order)) for order in orders]


LITERAL = {
    "interleaved-1f1b": (
        8,
        [
            "0F0 0F1 0F2 0F3 4F0 4F1 4F2 4F3 0F4 0F5 0F6 4B0 0F7 4B1 4F4 4B2 "
            "4F5 4B3 4F6 0B0 4F7 0B1 0B2 0B3 4B4 4B5 4B6 4B7 0B4 0B5 0B6 0B7",
            "1F0 1F1 1F2 1F3 5F0 5F1 5F2 5F3 1F4 5B0 1F5 5B1 1F6 5B2 1F7 5B3 "
            "5F4 1B0 5F5 1B1 5F6 1B2 5F7 1B3 5B4 5B5 5B6 5B7 1B4 1B5 1B6 1B7",
            "2F0 2F1 2F2 2F3 6F0 6F1 6F2 6B0 6F3 6B1 2F4 6B2 2F5 6B3 2F6 2B0 "
            "2F7 2B1 6F4 2B2 6F5 2B3 6F6 6B4 6F7 6B5 6B6 6B7 2B4 2B5 2B6 2B7",
            "3F0 3F1 3F2 3F3 7F0 7B0 7F1 7B1 7F2 7B2 7F3 7B3 3F4 3B0 3F5 3B1 "
            "3F6 3B2 3F7 3B3 7F4 7B4 7F5 7B5 7F6 7B6 7F7 7B7 3B4 3B5 3B6 3B7",
        ],
    ),
    "zb-h1": (
        5,
        [
            "0F0 0F1 0F2 0F3 0I0 0W0 0F4 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4",
            "1F0 1F1 1F2 1I0 1F3 1I1 1W0 1F4 1I2 1W1 1I3 1W2 1I4 1W3 1W4",
            "2F0 2F1 2I0 2F2 2I1 2F3 2I2 2W0 2F4 2I3 2W1 2I4 2W2 2W3 2W4",
            "3F0 3I0 3F1 3I1 3F2 3I2 3F3 3I3 3W0 3F4 3I4 3W1 3W2 3W3 3W4",
        ],
    ),
    "chimera": (
        4,
        [
            "0F0 0F1 7F0 7B0 7F1 7B1 0B0 0B1",
            "1F0 6F0 1F1 6F1 6B0 1B0 6B1 1B1",
            "5F0 2F0 5F1 2F1 2B0 5B0 2B1 5B1",
            "4F0 4F1 3F0 3B0 3F1 3B1 4B0 4B1",
        ],
    ),
    "hanayo": (
        4,
        [
            "0F0 0F1 0F2 0F3 7F0 7B0 7F1 7B1 7F2 7B2 7F3 7B3 0B0 0B1 0B2 0B3",
            "1F0 1F1 1F2 1F3 6F0 6F1 6B0 6F2 6B1 6F3 6B2 6B3 1B0 1B1 1B2 1B3",
            "2F0 2F1 2F2 5F0 2F3 5F1 5F2 5F3 5B0 5B1 5B2 2B0 5B3 2B1 2B2 2B3",
            "3F0 4F0 3F1 4F1 3F2 4F2 3F3 4F3 4B0 3B0 4B1 4B2 3B1 4B3 3B2 3B3",
        ],
    ),
}
"""Micro-batches and orders on four devices: Megatron-LM (SC'21), Fig. 4; Zero Bubble (ICLR'24), Fig. 3; Chimera
(SC'21), Fig. 2, where each of the two routes has every other micro-batch; Hanayo (SC'23) with one wave."""


@pytest.mark.parametrize("name", LITERAL)
def test_the_orders_of_the_figures(name: str) -> None:
    count, expected = LITERAL[name]
    workload = placed(name, 4, count)
    assert texts(workload, ordered(workload, name)) == expected


@settings(max_examples=some_of(60))
@given(
    st.sampled_from(sorted(CHAINS)),
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(0, 5),
    st.booleans(),
    st.integers(),
)
def test_chains_run_what_the_papers_say_whatever_the_costs(
    name: str, num_devices: int, groups: int, more: int, split: bool, seed: int
) -> None:
    """Interleaved schedules for whole groups of D micro-batches, or fewer than D; the others for any number."""
    random, turns = Random(seed), name.startswith(("interleaved", "looped"))
    chunks = random.choice([2, 3]) if turns else 1
    count = groups * num_devices + (0 if name.startswith("interleaved") else more)
    if name.startswith("interleaved") and random.random() < 0.3:
        count = random.randint(1, num_devices)
    split = split or name in SPLIT
    devices = [(stage % num_devices,) for stage in range(chunks * num_devices)]
    workload = with_random_times(
        chain_workload(num_devices, count, devices=devices, split=(1, 1) if split else None), random
    )
    stages = [list(range(device, chunks * num_devices, num_devices)) for device in range(num_devices)]
    assert texts(workload, ordered(workload, name)) == known_orders(name, stages, count, split=split)


@settings(max_examples=some_of(60))
@given(st.sampled_from([2, 4, 6, 8]), st.integers(1, 12), st.booleans(), st.integers())
def test_chimera_is_direct_concatenation_whatever_the_costs(
    num_devices: int, count: int, split: bool, seed: int
) -> None:
    costs = ShapeCosts(1, None, 1, 1) if split else ShapeCosts(1, 2)
    workload = with_random_times(shape_workload("x", num_devices, count, costs=costs, split=split), Random(seed))
    stages = [[device, 2 * num_devices - 1 - device] for device in range(num_devices)]
    assert texts(workload, ordered(workload, "chimera")) == known_orders("chimera", stages, count, split=split)


@settings(max_examples=some_of(60))
@given(st.integers(1, 5), st.sampled_from([2, 4]), st.integers(1, 9), st.integers())
def test_hanayo_is_a_list_schedule_with_as_many_open_as_devices(
    num_devices: int, chunks: int, count: int, seed: int
) -> None:
    """Against a scheduler that knows nothing of rules: backward first, else the deepest forward, in time."""
    down = list(range(num_devices))
    devices = [(d,) for chunk in range(chunks) for d in (down if chunk % 2 == 0 else down[::-1])]
    workload = with_random_times(chain_workload(num_devices, count, devices=devices), Random(seed))
    policy = Policy(patience=0.0, in_flight=(num_devices,) * num_devices)
    assert ordered(workload, "hanayo") == list_schedule(OneMicrobatch.of(workload), task_graph(workload), policy)


@settings(max_examples=some_of(60))
@given(st.sampled_from(["m", "mllm", "nn"]), st.sampled_from([2, 4, 6]), st.integers(1, 10), st.integers())
def test_shared_stages_are_inserted_into_1f1b_whatever_the_costs(
    kind: str, num_devices: int, count: int, seed: int
) -> None:
    workload = with_random_times(shape_workload(kind, num_devices, count), Random(seed))
    assert ordered(workload, "1f1b+") == SharedInsertion(OneMicrobatch.of(workload)).run()


def with_random_times(workload: Workload, random: Random) -> Workload:
    return replace(
        workload,
        operations=tuple(replace(o, duration_ns=random.randint(1, 30)) for o in workload.operations),
    )


def test_the_known_orders_are_all_judged() -> None:
    assert set(KNOWN) == CHAINS | {"chimera"}


# Documentation -----------------------------------------------------------------------------------------------------

DOCS = ROOT / "docs" / "rules.md"


def test_the_page_shows_every_file_as_it_is() -> None:
    sections = DOCS.read_text().split("\n## ")[1:]
    shown = {section.split("\n")[0]: section.split("```toml\n")[1].split("```")[0] for section in sections}
    assert shown == dict(shipped_rules())


def test_the_page_counts_lines() -> None:
    """A few each: none has more than the 12 of FlexPipe's Fig. 5, and the 20 of Fig. 6 where it has an instruction."""
    counted = dict(re.findall(r"^\| \[`(.*?)`\].* \| (\d+) \|$", DOCS.read_text(), re.MULTILINE))
    lines = {name: sum(bool(line.strip()) for line in text.splitlines()) for name, text in shipped_rules().items()}
    assert {name: int(count) for name, count in counted.items()} == lines
    assert all(count <= (32 if named_rules(name).instructions else 12) for name, count in lines.items())


# What the papers count ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_devices", [2, 4, 8])
@pytest.mark.parametrize("groups", [1, 3])
def test_what_is_in_flight(num_devices: int, groups: int) -> None:
    """In activations of stages; half of a micro-batch's where devices have two."""
    count = groups * num_devices
    falling = list(range(num_devices, 0, -1))
    expected = {
        "gpipe": [count] * num_devices,
        "1f1b": falling,
        "zb-h1": [min(count, num_devices)] * num_devices,
        "zb-h2": [min(count, 2 * num_devices - 1)] * num_devices,
        "looped-bfs": [2 * count] * num_devices,
    }
    for name, most in expected.items():
        workload = placed(name, num_devices, count)
        assert held(workload, ordered(workload, name)) == most, name
    for name, bound in {"chimera": num_devices, "hanayo": 2 * num_devices, "bitpipe": 2 * num_devices}.items():
        workload = placed(name, num_devices, count)
        assert max(held(workload, ordered(workload, name))) <= bound, name


@pytest.mark.parametrize("num_devices", [2, 4, 6, 8])
def test_bubbles_of_both_ways(num_devices: int) -> None:
    """Chimera (SC'21), Table 2: D - 2 slots if F = B. BitPipe: (D - 2) / (3 N + D - 2) if B = 2 F. For N = D."""
    workload = placed("chimera", num_devices, num_devices, forward=1, backward=1)
    assert makespan(workload, ordered(workload, "chimera")) == 2 * num_devices + num_devices - 2
    workload = placed("bitpipe", num_devices, num_devices)
    expected = (num_devices - 2) / (3 * num_devices + num_devices - 2)
    assert bubble_rate(workload, ordered(workload, "bitpipe")) == pytest.approx(expected)


@pytest.mark.parametrize(("num_devices", "count"), [(4, 8), (4, 16), (8, 16), (8, 32)])
def test_vchimera_has_fewer_bubbles_than_what_it_joins(num_devices: int, count: int) -> None:
    """FlexPipe, section 7.1: than Chimera, 1F1B and waves, each device having the same work."""
    rates = {}
    for name in ("vchimera", "chimera", "1f1b", "hanayo"):
        scale = 2 if name in ("chimera", "1f1b") else 1
        workload = placed(name, num_devices, count, forward=scale, backward=2 * scale)
        rates[name] = bubble_rate(workload, ordered(workload, name))
    assert min(rates, key=lambda name: rates[name]) == "vchimera"


TOWERS = {
    "clip-mixed": "circular + one-to-one",
    "clip-mixed-async": "circular + one-to-one",
    "distmm-pipe": "one-to-one + one-to-one",
    "distmm-async": "one-to-one + one-to-one",
}
"""Rules for two submodules, and their placements."""


# Whole plans -------------------------------------------------------------------------------------------------------


def searched(name: str, profile: Profile, num_devices: int | None, count: int) -> str:
    """Search a plan by rules of the catalog, which passes check; its placement's name."""
    rules = named_rules(name)
    placement, devices = choose_placement(profile, "auto", num_devices, rules)
    split = True if name in SPLIT else None
    options = {"scheduler": "rules", "rules": rules, "split_backward": split}
    result = search_plan(request_of(profile, placement, Batch(count, 1), num_devices=devices, **options))
    return result.plan.placement


@slow_but("num_devices", [2, 4, 8], (4).__eq__, (8).__eq__)
@pytest.mark.parametrize("name", sorted(set(shipped_rules()) - {"1f1b+", *TOWERS}))
def test_plans_pass_check(name: str, num_devices: int) -> None:
    if named_rules(name).placement is None:
        assert name == "gpipe"
    profile = model(2 * num_devices, split=True)
    for count in (2, num_devices, 2 * num_devices + 2):
        assert searched(name, profile, num_devices, count).startswith(named_rules(name).placement or "")


@pytest.mark.parametrize("kind", ["m", "mllm", "nn"])
@pytest.mark.parametrize("num_devices", [2, 4, 8])
def test_shared_stages_pass_check(kind: str, num_devices: int) -> None:
    profile = shape(kind, num_devices)
    for count in (1, num_devices, 2 * num_devices + 1):
        searched("1f1b+", profile, None, count)


@slow_but("num_devices", [2, 4, 8], (4).__eq__, (8).__eq__)
@pytest.mark.parametrize("name", TOWERS)
def test_two_towers_pass_check(name: str, num_devices: int) -> None:
    """FlexPipe, Fig. 9 and Fig. 3: one tower interleaved, the other 1F1B; or both 1F1B, and synchronised."""
    profile = towers((2,) * 8, (2,) * 8)
    for count in (4, 2 * num_devices):
        assert searched(name, profile, num_devices, count) == TOWERS[name]


def test_synchronisation_is_every_four_micro_batches_or_each() -> None:
    """DistMM-Pipe's on the last devices of both towers; its improvement where the loss is, which gets messages."""
    runs = {}
    for name in ("distmm-pipe", "distmm-async", "clip-mixed-async"):
        rules = named_rules(name)
        submodules = submodules_of(rules, 4, 1)
        placement = place_submodules(towers((2,) * 8, (2,) * 8), submodules, 4, microbatch_size=1)
        bare = build_workload(towers((2,) * 8, (2,) * 8), placement, num_microbatches=8, microbatch_size=1)
        workload = with_instructions(bare, rules.instructions)
        orders = ordered(workload, name)
        graph = task_graph(workload)
        runs[name] = [[text for text in map(graph.label, order) if "GATHER" in text] for order in orders]
    assert runs["distmm-pipe"] == [[], ["5ALLGATHER0", "5ALLGATHER1"], [], ["5ALLGATHER0", "5ALLGATHER1"]]
    assert runs["distmm-async"] == [[], [], [], [f"5GATHER{m}" for m in range(8)]]
    assert runs["clip-mixed-async"] == [[], [], [], [f"7GATHER{m}" for m in range(8)]]


def test_a_tower_is_placed_with_all_others() -> None:
    rules = parse_rules(
        '[[submodule]]\nblocks = "image.*"\nplacement = "circular"\n[[submodule]]\nblocks = "t*"', "half"
    )
    with pytest.raises(UsageError, match=r"rules 'half': submodule 't\*' has no placement, but others do"):
        choose_placement(towers(), "auto", 4, rules)
    both = parse_rules('placement = "circular"\n[[submodule]]\nblocks = "image.*"\nplacement = "circular"', "both")
    with pytest.raises(UsageError, match="place the model as circular and by submodules"):
        choose_placement(towers(), "auto", 4, both)
