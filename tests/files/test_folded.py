"""Plans whose programs several devices play: the same as those with a program for each, and refused where they lie."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import accumulate
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from builders.folds import Replicas, alike_profile, plan_of_replicas, plans_of, two_levels
from pipeplan.checker import check
from pipeplan.costs import build_workload, stages
from pipeplan.errors import FileError, UsageError
from pipeplan.files import PlacedStage, Placement, Plan, parse, to_json
from pipeplan.files.folded import folded_plan, folded_workload, in_place_0, unfolded
from pipeplan.files.packed import packed, packed_starts, unpacked, unpacked_starts
from pipeplan.interop.export import exported
from pipeplan.planning.alternatives import _work as work_of
from pipeplan.planning.trials import Trial
from pipeplan.simulator.recost import with_costs_of
from pipeplan.simulator.simulation import simulate
from pipeplan.workload.elements import Players, Stage
from pipeplan.workload.folding import Fold
from pipeplan.workload.workload import Workload

_CASES = range(10)


@pytest.mark.parametrize(
    ("seed", "idle", "shared", "looped"),
    [
        *((seed, (0, 0), False, False) for seed in _CASES),
        *((seed, (0, idle), False, False) for seed, idle in ((0, 16), (1, 3), (2, 7), (3, 16), (4, 1))),
        *((seed, (first, idle), False, False) for seed, first, idle in ((0, 16, 0), (2, 8, 5), (3, 24, 9))),
        *((seed, (0, 0), True, False) for seed in _CASES),
        *(
            pytest.param(seed, (0, 0), bool(seed % 2), True, marks=[pytest.mark.slow] * (seed in (3, 9)))
            for seed in _CASES
        ),
        (4, (16, 3), False, True),
    ],
)
def test_a_folded_plan_is_its_unfolded_form(
    seed: int, idle: tuple[int, int], shared: bool, looped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many devices run nothing before and after those that do."""
    before, after = idle
    folded, devices, profile, cluster = plans_of(seed, monkeypatch, after, before, shared=shared, looped=looped)
    assert (folded.loop is not None) == (devices.loop is not None) == looped
    assert len(folded.devices) < len(devices.devices) == folded.num_devices
    assert unfolded(folded) == devices
    assert folded_plan(devices) == folded
    reports = [check(plan, profile, cluster) for plan in (folded, devices)]
    assert [report.problems for report in reports] == [(), ()]
    assert reports[0].recomputed == reports[1].recomputed
    short, long = simulate(folded).figures(), simulate(devices).figures()
    assert _work(folded.workload) == _work(devices.workload)
    own = [short.pop("devices"), long.pop("devices")]
    assert [own[0][_program(folded, device)] for device in range(folded.num_devices)] == own[1]
    assert {key: short[key] for key in short if key != "critical_path"} == {
        key: long[key] for key in long if key != "critical_path"
    }
    assert parse(to_json(folded), Plan) == folded
    assert folded.placed == devices.placed


@pytest.mark.parametrize("seed", range(4))
def test_with_other_costs_it_stays_folded(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    folded, devices, profile, cluster = plans_of(seed, monkeypatch)
    assert cluster.levels[1].bandwidth_bytes_per_s is not None
    slow = cluster.levels[1].model_copy(update={"bandwidth_bytes_per_s": cluster.levels[1].bandwidth_bytes_per_s // 3})
    slower = cluster.model_copy(update={"levels": (cluster.levels[0], slow)})
    rows = profile.blocks[2].costs
    longer = profile.blocks[2].model_copy(
        update={"costs": tuple(row.model_copy(update={"forward_ns": 3 * row.forward_ns}) for row in rows)}
    )
    other = profile.model_copy(update={"blocks": (*profile.blocks[:2], longer, *profile.blocks[3:])})
    for costs in ((None, slower), (other, cluster), (other, slower), (other, None)):
        (plan, found), (_, expected) = (with_costs_of(each, *costs) for each in (folded, devices))
        assert plan is folded
        assert found.players == folded.players
        assert folded_workload(expected, folded.players_each) == found
        assert costs[0] is None or found != folded.workload


@pytest.mark.parametrize("target", ["torch", "megatron", "huggingface", "vllm"])
def test_other_tools_are_told_the_same(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def told(plan: Plan) -> object:
        try:
            return exported(plan, target)
        except UsageError as error:
            return str(error)

    every = [plans_of(seed, monkeypatch)[:2] for seed in range(6)]
    assert [told(folded) for folded, _ in every] == [told(devices) for _, devices in every]


def _work(workload: Workload) -> tuple[int, int]:
    """As alternatives of a search have it, of a schedule that is not looked at."""
    return work_of(cast(Trial, SimpleNamespace(parted=None, best=SimpleNamespace(workload=workload))))


def _program(plan: Plan, device: int) -> int:
    return next(number for number, own in enumerate(plan.players) if own.place(device) is not None)


def test_any_number_of_devices_may_run_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are folded all the same."""
    profile = alike_profile(Random(5), tied=False)
    monkeypatch.setattr(stages, "FOLD_FROM", 1)

    def workload(idle: int) -> Workload:
        placed = tuple(
            PlacedStage(blocks=tuple(f"b{4 * at + block}" for block in range(4)), devices=devices, replicas=4)
            for at, devices in enumerate((tuple(range(4)), tuple(range(4, 8))))
        )
        placement = Placement(strategy="one-to-one", num_devices=8 + idle, stages=placed)
        how: dict[str, Any] = {"num_microbatches": 4, "microbatch_size": 4, "cluster": two_levels(8 + idle, 4)}
        return build_workload(profile, placement, fold_least=4, **how)

    assert [(len(each.players), each.num_devices) for each in map(workload, (0, 3, 4))] == [(2, 8), (3, 11), (3, 12)]


def _on(*devices: range) -> list[Stage]:
    return [
        Stage(blocks=(f"b{n}",), devices=tuple(own), replicas=4, microbatch_size=4) for n, own in enumerate(devices)
    ]


@pytest.mark.parametrize(
    ("used", "count", "idle"),
    [
        ((range(0, 32, 8), range(1, 32, 8)), 32, [(2, (4, 6), (8, 1))]),
        ((range(4), range(4, 8)), 13, [(8, (5,), (1,))]),
        ((range(1, 9, 2), range(2, 10, 2)), 20, [(0, (1,), (1,)), (9, (11,), (1,))]),
        (
            (range(1, 21, 5), range(3, 23, 5)),
            20,
            [(0, (2,), (2,)), (4, (3, 2), (5, 1)), (7, (3,), (5,)), (19, (1,), (1,))],
        ),
    ],
)
def test_devices_without_a_stage_play_empty_programs_by_runs_that_are_alike(
    used: tuple[range, ...], count: int, idle: list[tuple[int, tuple[int, ...], tuple[int, ...]]]
) -> None:
    """A rest of each node, what is left at the end, and what lies between others."""
    fold = Fold.of(_on(*used), 4, count)
    assert fold is not None
    assert fold.count == 4
    busy = {own[0] for own in used}
    assert [(own.first, own.counts, own.steps) for own in fold.players if own.first not in busy] == idle
    assert sorted(device for own in fold.players for device in own.devices) == list(range(count))


def test_a_plan_without_alike_devices_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    _, devices, _, _ = plans_of(1, monkeypatch)
    odd = devices.model_copy(
        update={"programs": (devices.programs[0][::-1], *devices.programs[1:])}
    )  # one device runs its program otherwise
    assert folded_plan(odd) is odd
    assert "players" not in json.loads(to_json(devices))


Damage = Callable[[dict[str, Any]], None]


def _played_by_too_many(plan: dict[str, Any]) -> None:
    plan["players"][0]["counts"][0] += 1


def _played_by_too_few(plan: dict[str, Any]) -> None:
    """One of a program's players runs nothing instead, which is another program."""
    plan["players"][1]["counts"][-1] -= 1
    steps = zip(plan["players"][1]["counts"], plan["players"][1]["steps"], strict=True)
    last = plan["players"][1]["first"] + sum((count - 1) * step for count, step in steps)
    plan["players"].append({"first": last + plan["players"][1]["steps"][-1], "counts": [1], "steps": [1]})
    for key in ("devices", "programs"):
        plan[key].append([] if key == "programs" else plan[key][0])
    plan["predicted"]["memory"].append(plan["predicted"]["memory"][0])


def _twice(plan: dict[str, Any]) -> None:
    plan["players"][1]["first"] = plan["players"][0]["first"]


def _missing(plan: dict[str, Any]) -> None:
    plan["players"][-1]["first"] += 1


def _of_no_program(plan: dict[str, Any]) -> None:
    del plan["players"][-1]


def _crossing(plan: dict[str, Any]) -> None:
    """A stage whose replicas are parts of two programs' players."""
    plan["stages"][0]["devices"] = [0, 1]
    plan["stages"][0]["shards"] *= 2 * plan["stages"][0]["replicas"]
    plan["stages"][0]["replicas"] = 1


def _across(plan: dict[str, Any]) -> None:
    """A stage on two programs, each of whose players have as many replicas of it as there are of one."""
    plan["stages"][0]["devices"] = [0, 1]


def _unlike_sizes(plan: dict[str, Any]) -> None:
    plan["stages"][0]["microbatch_size"] //= 2


def _no_steps(plan: dict[str, Any]) -> None:
    plan["players"][0]["steps"] += [1]


def _no_room(plan: dict[str, Any]) -> None:
    plan["players"][0]["counts"] = [2, plan["players"][0]["counts"][0] // 2]
    plan["players"][0]["steps"] = [1, 1]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_played_by_too_many, "every program that a stage is on is played by as many"),
        (_played_by_too_few, "every program that a stage is on is played by as many"),
        (_twice, "both have device 0"),
        (_missing, "plays no program"),
        (_of_no_program, "players has 1 entries for 2 devices"),
        (_crossing, "no whole replicas"),
        (_across, "no whole replicas"),
        (_unlike_sizes, "players: stages have micro-batches of"),
        (_no_steps, "each count has one"),
        (_no_room, "has no room"),
    ],
)
def test_damaged_players_are_refused(damage: Damage, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folded = next(each for seed in _CASES[::2] if len((each := plans_of(seed, monkeypatch)[0]).devices) == 2)
    content = json.loads(to_json(folded))
    damage(content)
    with pytest.raises(FileError, match=said):
        parse(json.dumps(content), Plan)


@pytest.mark.parametrize("idle", [0, 5])
def test_damaged_programs_are_refused_beside_a_cluster(idle: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program without its last action, and one that does a stage's actions that is not on it."""
    folded, _, profile, cluster = plans_of(3, monkeypatch, idle)
    first, second, *others = folded.programs
    for programs in ((first[:-1], second, *others), (second, *[second] * (len(others) + 1))):
        damaged = folded.model_copy(update={"programs": tuple(programs)})
        for profile_too in (None, profile):
            assert not check(damaged, profile_too, cluster).valid


@pytest.mark.parametrize("unfold", [False, True])
def test_a_cluster_that_is_too_small_is_said(unfold: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, devices, profile, _ = plans_of(1, monkeypatch)
    for size in (1, plan.num_devices - 1):
        report = check(devices if unfold else plan, profile, two_levels(size, size))
        assert f"are {plan.num_devices}, the cluster has {size}" in {problem.message for problem in report.problems}


def test_messages_that_take_unlike_links_in_two_places_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    folded = next(each for seed in _CASES[::2] if len((each := plans_of(seed, monkeypatch)[0]).devices) == 2)
    half = folded.players_each // 2
    report = check(folded, cluster=two_levels(folded.num_devices, folded.players_each + half))
    assert next(problem.message for problem in report.problems if "place" in problem.message) == (
        f"goes over level 'node' in place 0 of its programs, and over 'net' in place {half}"
    )


@pytest.mark.parametrize(("node", "odd"), [(3, True), (5, True), (2, False), (4, False), (1, True)])
def test_groups_that_lie_over_nodes_in_any_place_are_not_timed_without_a_profile(node: int, odd: bool) -> None:
    """Nodes of 5 have the groups of the first places inside, and cut one of others in two.

    What that one sends the plan does not say. So it is with its unfolded form; and where all groups are inside both
    have the same times.
    """
    folded, cluster = plan_of_replicas(Replicas(shards=2, replicas=4)), two_levels(16, node)
    assert folded.players_each == 8
    firsts = [stage.devices[:2] for stage in in_place_0(folded).stages]
    assert all(one // node == other // node for one, other in firsts) == (node in (2, 4, 5))
    found = []
    for plan in (folded, unfolded(folded)):
        if odd:
            with pytest.raises(UsageError, match=rf"2 devices of stages.* in several nodes of {node}, .* --profile"):
                simulate(plan, cluster=cluster)
        else:
            figures = simulate(plan, cluster=cluster).figures()
            found.append({key: each for key, each in figures.items() if key not in ("devices", "critical_path")})
    assert odd or found[0] == found[1]


def test_devices_whose_messages_take_unlike_links_are_not_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two positions of four devices each, side by side, where nodes have six: they stay apart, and as priced."""
    players = [own for own in map(Players.of, (range(4), range(4, 8))) if own is not None]
    found = [Fold(players, players[0].count).alike([(0, 1)], [size]) for size in (4, 6, 8)]
    assert found == [True, False, True]
    monkeypatch.setattr(stages, "FOLD_FROM", 0)
    profile = alike_profile(Random(5), tied=False)
    placed = tuple(
        PlacedStage(blocks=tuple(f"b{4 * place + n}" for n in range(4)), devices=(*own.devices,), replicas=4)
        for place, own in enumerate(players)
    )
    placement = Placement(strategy="by hand", num_devices=8, stages=placed)

    def workload(node: int, least: int) -> Workload:
        sizes = {"num_microbatches": 2, "microbatch_size": 8, "fold_least": least}
        return build_workload(profile, placement, split_backward=True, cluster=two_levels(8, node), **sizes)

    assert workload(4, 2).players_each == 4
    assert workload(6, 2) == workload(6, 0)
    assert len({hop.occupancy_ns for each in workload(6, 2).dependencies for hop in each.hops}) > 1


@pytest.mark.parametrize(
    "devices",
    [(3,), (0, 1, 2, 3), (1, 5, 9), (0, 1, 8, 9, 16, 17), (0, 2, 16, 18, 32, 34, 48, 50)],
)
def test_players_know_their_devices_and_places(devices: tuple[int, ...]) -> None:
    found = Players.of(devices)
    assert found is not None
    assert found.devices == devices
    assert [found.device(place) for place in range(found.count)] == [*devices]
    assert {device: found.place(device) for device in range(60) if found.place(device) is not None} == {
        device: place for place, device in enumerate(devices)
    }


@pytest.mark.parametrize("devices", [(1, 0), (0, 1, 3), (0, 4, 1, 5)])
def test_devices_in_no_regular_steps_are_no_players(devices: tuple[int, ...]) -> None:
    assert Players.of(devices) is None


def test_programs_and_starts_in_short_are_read_whole() -> None:
    steady = [text for number in range(3, 40) for text in (f"0F{number}", f"1SEND_B{number - 3}@2", f"0B{number - 2}")]
    program = ["0F0", "0F1", "0F2", "0B0", *steady, "0B38", "0B39"]
    short = packed(program)
    assert short is not None
    assert short["repeats"] == [[3, 3, 37]]
    assert len(short["order"]) == 9
    assert unpacked([short]) == (tuple(program),)
    starts = {"0F": [0, 5, 10, 15, 40, 45], "0B": [7]}
    gaps = {id_: packed_starts(own) for id_, own in starts.items()}
    assert gaps == {"0F": {"first": 0, "gaps": [[5, 3], [25, 1], [5, 1]]}, "0B": {"first": 7, "gaps": []}}
    assert unpacked_starts(gaps) == {id_: tuple(own) for id_, own in starts.items()}
    assert packed_starts([5, 3]) is None


def test_gaps_that_come_in_turn_are_said_once() -> None:
    """However they begin and end; and what is said so is what there was."""
    gaps = [9, *(7, 7, 8) * 5, 7, 1, 2, 1, 2, 1]
    starts = [0, *accumulate(gaps)]
    short = packed_starts(starts)
    assert short == {"first": 0, "gaps": [[9, 1], [7, 7, 8, 5], [7, 1], [1, 2, 2], [1, 1]]}
    assert unpacked_starts({"0F": short}) == {"0F": tuple(starts)}
    for seed in range(200):
        random = Random(seed)
        unit = random.choices(range(1, 4), k=random.randint(1, 9))
        some = random.choices((1, 2), k=random.randint(0, 12))
        starts = [3, *accumulate([*some, *unit * random.randint(1, 6), *some], initial=4)]
        assert unpacked_starts({"0F": packed_starts(starts)}) == {"0F": tuple(starts)}


@pytest.mark.parametrize(
    "repeats", [[[0, 99, 2]], [[0, 1, 10**9]], [[0, 1]], "no", [[1, 2, 2], [2, 1, 2]], [[0, 1, 0]]]
)
def test_repeats_of_letters_that_are_not_there_are_refused(repeats: Any) -> None:
    with pytest.raises(ValueError, match=r"programs\[0\].repeats\[[01]\] is .*, and not three numbers"):
        unpacked([{"words": ["0F", "0B"], "order": "aabb", "repeats": repeats}])


@pytest.mark.parametrize("gaps", [[[1, 10**12]], None, [[1]], [[1] * 18]])
def test_starts_that_are_none_are_refused(gaps: Any) -> None:
    with pytest.raises(ValueError, match=r"starts_ns\[0F\]"):
        unpacked_starts({"0F": {"first": 0} | ({} if gaps is None else {"gaps": gaps})})
