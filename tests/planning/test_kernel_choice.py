"""Covers from a profile alone, by the verb and by the function of Python."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

import pipeplan
from builders.profiles import profile_of
from pipeplan.errors import ExecutionError, FileError, InfeasibleError, SearchTimeoutError, SumError, UsageError
from pipeplan.files import BackendFusion, CostRow, Cover, Profile, parse, write_file
from pipeplan.kernels.covers import algorithm_1
from pipeplan.kernels.measuring import matches_of
from pipeplan.kernels.operators import OperatorDag
from pipeplan.kernels.whole_runs import Groups
from pipeplan.planning.kernel_choice import choose_kernels
from pipeplan.planning.kernel_evolution import EvolutionAsked, graph_level, library_of
from pipeplan.schedule.cpsat.cover import exact_cover
from pipeplan.schedule.cpsat.solver import Budget
from pipeplan.units import MAX_NS
from support.commands import pipeplan as command

SLOW, FAST = 100, 60


def row(ns: int, backend: str = "eager", size: int = 1) -> CostRow:
    return CostRow(microbatch_size=size, backend=backend, forward_ns=ns, backward_ns=ns)


def with_rows(change_ns: int = 0) -> Profile:
    """Four blocks: ``fast`` runs the first two faster, and the last two only at once."""
    plain = profile_of([row(SLOW)] * 4)
    blocks = [
        block.model_copy(update={"costs": (*block.costs, row(FAST, "fast"))}) if place < 2 else block
        for place, block in enumerate(plain.blocks)
    ]
    last = tuple(block.id for block in blocks[2:])
    fusion = BackendFusion(blocks=last, costs=(row(3 * FAST, "fast"), row(1, "fast", 2)))
    how = {"blocks": tuple(blocks), "fusions": (fusion,), "backend_change_ns": change_ns}
    return plain.model_copy(update=how)


def test_the_verb_prints_what_the_profile_says(tmp_path: Path) -> None:
    write_file(with_rows(), str(tmp_path / "profile.json"))
    found = json.loads(command("kernels", "profile.json", "--json", "-o", "cover.json", cwd=tmp_path).stdout)
    ids = found["blocks"]
    assert found["cover"] == [
        {"blocks": [ids[0]], "backend": "fast", "ns": 2 * FAST},
        {"blocks": [ids[1]], "backend": "fast", "ns": 2 * FAST},
        {"blocks": ids[2:], "backend": "fast", "ns": 6 * FAST},
    ]
    assert (found["predicted_ns"], found["num_changes"], found["status"]) == (10 * FAST, 0, "optimal")
    assert found["single_ns"] == {"eager": 8 * SLOW, "fast": 10 * FAST}
    assert found["block_ns"][ids[3]] == {"eager": 2 * SLOW, "fast": None}
    cover = parse((tmp_path / "cover.json").read_text(), Cover)
    assert [list(group.blocks) for group in cover.cover] == [[ids[0]], [ids[1]], ids[2:]]
    assert cover.profile_sha256 == pipeplan.read_profile(tmp_path / "profile.json").fingerprint
    shown = command("kernels", "profile.json", cwd=tmp_path).stdout
    assert "no cover of these groups takes less" in shown


class Looks:
    """A clock of which every look takes a second."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        self.seconds += 1
        return self.seconds


def test_the_limit_is_of_all_of_the_choice() -> None:
    profile = profile_of([[row(SLOW + number % 3), row(SLOW + number % 5, "fast")] for number in range(100)])
    profile = profile.model_copy(update={"backend_change_ns": 2})
    looks = Looks()
    whole = choose_kernels(profile, budget=Budget(math.inf, clock=looks))
    assert looks.seconds > 30
    none = 0
    for seconds in range(int(looks.seconds) + 1):
        clock = Looks()
        try:
            found = choose_kernels(profile, budget=Budget(seconds, clock=clock))
        except SearchTimeoutError:
            none += 1
            assert clock.seconds <= seconds + 4
        else:
            assert found.cover.total_ns == whole.cover.total_ns
    assert none > 30
    given_up = Budget(math.inf)
    given_up.interrupt()
    with pytest.raises(KeyboardInterrupt):
        choose_kernels(profile, budget=given_up)


def test_a_proof_that_there_is_no_time_for_leaves_the_cover_that_is_known() -> None:
    profile = with_rows(30)
    graph = OperatorDag.of(profile)
    matches = matches_of(profile, graph, 1)
    known = algorithm_1(graph, matches, 30, 1)
    assert exact_cover(graph, matches, 30, Budget(0.0), known) == (known, 0)
    with pytest.raises(SearchTimeoutError):
        exact_cover(graph, matches, 30, Budget(0.0))


def test_a_cover_that_takes_longer_than_a_file_can_say_is_refused() -> None:
    choice = choose_kernels(profile_of([row(MAX_NS // 2)] * 2))
    assert choice.cover.total_ns > MAX_NS
    with pytest.raises(SumError, match="times of all blocks add up to"):
        _ = choice.file


def test_changes_of_backend_are_counted() -> None:
    profile = with_rows(30)
    slower = BackendFusion(blocks=profile.fusions[0].blocks, costs=(row(SLOW + 110, "fast"),))
    for change, changes in ((30, 0), (10, 1)):
        choice = pipeplan.choose_kernels(
            profile.model_copy(update={"fusions": (slower,), "backend_change_ns": change}), microbatch_size=1
        )
        alone = 4 * FAST + 2 * (SLOW + 110), 4 * FAST + 4 * SLOW + change
        assert choice.cover.total_ns == min(alone)
        assert choice.cover.num_changes == changes


def test_a_backend_that_cannot_run_the_whole_has_no_time() -> None:
    choice = pipeplan.choose_kernels(with_rows().model_copy(update={"fusions": ()}))
    assert choice.single == {"eager": 8 * SLOW, "fast": None}
    assert choice.cover.total_ns == 4 * FAST + 4 * SLOW


def test_sizes_that_are_not_there() -> None:
    with pytest.raises(UsageError, match="microbatch_size=7: the profile has 1"):
        pipeplan.choose_kernels(with_rows(), microbatch_size=7)
    bare = with_rows()
    less = bare.blocks[0].model_copy(update={"costs": (row(1, size=4),)})
    with pytest.raises(InfeasibleError, match="backends run every block"):
        pipeplan.choose_kernels(bare.model_copy(update={"blocks": (less, *bare.blocks[1:])}))


def test_plans_are_made_of_eager_rows(tmp_path: Path) -> None:
    """The same plan, and the fingerprint of the file with all rows."""
    plain, more = profile_of([row(SLOW)] * 4), with_rows()
    found = [
        pipeplan.search(each, devices=2, microbatches=4, time_limit=5, deterministic=True) for each in (plain, more)
    ]
    assert found[0].plan.predicted == found[1].plan.predicted
    assert found[1].plan.provenance.profile_sha256 == more.fingerprint
    write_file(more, str(tmp_path / "profile.json"))
    pipeplan.write(found[1].plan, tmp_path / "plan.json")
    checked = command("check", "plan.json", "--profile", "profile.json", cwd=tmp_path)
    assert checked.returncode == 0, checked.stderr


def test_groups_that_are_wrong_are_refused() -> None:
    good = with_rows().model_dump()
    unknown = {**good, "fusions": [{"blocks": ["none", "such"], "costs": good["fusions"][0]["costs"]}]}
    twice = {**good, "fusions": [good["fusions"][0]] * 2}
    for content, said in ((unknown, "'none', which is not a block"), (twice, "for the same case as")):
        with pytest.raises(FileError, match=said):
            parse(json.dumps(content), Profile)


class Lucky:
    """Whole models of which all blocks at once are quick the first time; the third of all may be interrupted."""

    def __init__(self, ids: tuple[str, ...], *, interrupts: int = 0) -> None:
        self.once, self.left = {((ids, "fast"),)}, interrupts

    def __call__(self, groups: Groups) -> int:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        lucky = groups in self.once
        self.once.discard(tuple(groups))
        return 100 if lucky else 300


class Ends:
    """Whole models of which all blocks at once are quick the first time, and the second time end it."""

    def __init__(self, ids: tuple[str, ...], error: BaseException) -> None:
        self.whole, self.error, self.times = ((ids, "fast"),), error, 0

    def __call__(self, groups: Groups) -> int:
        if groups != self.whole:
            return 300
        self.times += 1
        if self.times > 1:
            raise self.error
        return 100


def test_the_graph_level_gives_operators_to_a_library_where_the_whole_gains() -> None:
    """``fast`` runs the first two blocks in the cover; all four at once take a third of what groups add up to."""
    known = with_rows()
    choice = pipeplan.choose_kernels(known.model_copy(update={"fusions": ()}))
    ids = choice.graph.order

    def measure(groups: Groups) -> int:
        return 100 if groups == ((ids, "fast"),) else 300 - len(groups)

    library = library_of(choice, ["inductor", "fast"], None)
    found = graph_level(choice, library, measure, seed=3)
    assert (library, found.operator_ns, found.found.ns) == ("fast", 296, 100)
    assert found.groups == ((ids, "fast"),)
    assert found.gain == 2.96
    both = replace(choice, level=found)
    assert both.file.predicted_ns == sum(group.ns for group in both.file.cover) == 100
    figures = both.figures()["graph_level"]
    assert (figures["measured_ns"], figures["operator_level_ns"], figures["library"]) == (100, 296, "fast")
    found = graph_level(choice, library, Lucky(choice.graph.order), seed=3)
    assert (found.gain, found.found.ns) == (1.0, 300)
    assert found.groups == tuple((match.blocks, match.backend) for match in choice.cover.as_runs(choice.graph))
    for error in (KeyboardInterrupt(), ExecutionError("it ran once")):
        ended = graph_level(choice, library, Ends(choice.graph.order, error), seed=3)
        assert (ended.gain, ended.found.ns) == (1.0, 300)
        assert ended.found.interrupted is isinstance(error, KeyboardInterrupt)
        assert len(ended.found.failures) == isinstance(error, ExecutionError)
    ended = graph_level(choice, library, Lucky(choice.graph.order, interrupts=3), seed=3)
    assert (ended.gain, ended.found.interrupted) == (1.0, True)  # measured again once
    never = graph_level(choice, library, lambda groups: 300 + (len(groups) == 1), seed=3)
    assert never.groups == tuple((match.blocks, match.backend) for match in choice.cover.as_runs(choice.graph))
    with pytest.raises(UsageError, match="no library of whole graphs that the profile has times of"):
        library_of(choice, ["inductor", "fast"], "inductor")
    with pytest.raises(UsageError, match="times of no library of whole graphs"):
        library_of(choice, ["inductor"], None)


def test_the_graph_level_needs_the_model(tmp_path: Path) -> None:
    write_file(with_rows(), str(tmp_path / "profile.json"))
    with pytest.raises(UsageError, match=r"give (--)?model"):
        pipeplan.choose_kernels(tmp_path / "profile.json", graph_level=True)
    with pytest.raises(UsageError, match=r"is of (--)?graph.level"):
        pipeplan.choose_kernels(tmp_path / "profile.json", library="inductor")
    asked = EvolutionAsked()
    with pytest.raises(UsageError, match="times of fast, which nothing here builds; give --backend-rules"):
        asked.chosen(choose_kernels(with_rows()))
    with pytest.raises(UsageError, match="not of this model measured here: it is of test"):
        pipeplan.choose_kernels(tmp_path / "profile.json", graph_level=True, model="gpt2-tiny")
