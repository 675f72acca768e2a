"""The auto-tuner against the same grid by brute force; kept, resumed, shared by processes."""

from __future__ import annotations

import errno
import resource
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count, product
from pathlib import Path
from typing import Any

import pytest

from builders.profiles import profile_of
from pipeplan.checker import check
from pipeplan.costs import build_workload
from pipeplan.costs import clusters as testbeds
from pipeplan.errors import InfeasibleError, SearchTimeoutError, UsageError
from pipeplan.files import CostRow, read_profile
from pipeplan.partition.placement import place
from pipeplan.partition.strategies import STRATEGIES
from pipeplan.planning.candidates import grid
from pipeplan.planning.request import Batch, Request
from pipeplan.planning.tuning import Tuning, tune
from pipeplan.planning.tuning_cells import cell_of, rows_of
from pipeplan.reporting.tables import print_ranking
from pipeplan.schedule.rules.sweep import built_in_rules, run_rules
from pipeplan.simulator.metrics import rates
from pipeplan.time_limit import Limit
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.task_graph import task_graph
from support.paths import ROOT

pytestmark = pytest.mark.counted

PROFILES = ROOT / "profiles"
GB = 10**9


def request(memory: int | None = None, *, devices: int = 2, mini_batch: int = 4, **options: object) -> Request:
    """GPT-2 as measured on a CPU, on a few devices."""
    model = read_profile(str(PROFILES / "gpt2-124m-cpu.json"))
    asked = {"time_limit": 600.0} | options
    batch = Batch(mini_batch, 1)
    return Request(model, devices, batch, sizes=(1, 2), memory_bytes=memory, **asked)


def brute(asked: Request, strategies: Iterable[str]) -> int:
    """The shortest iteration of all cells and rules, each made by itself without bounds."""
    best = []
    for strategy, replicas, size, recompute, split in product(
        strategies, (1, 2), asked.sizes, (False, True), (False, True)
    ):
        microbatch = size * replicas
        try:
            placement = place(
                asked.profile,
                strategy,
                asked.num_devices,
                microbatch_size=microbatch,
                memory_bytes=asked.memory,
                recompute=recompute,
                replicas=replicas,
            )
            workload = build_workload(
                asked.profile,
                placement,
                num_microbatches=asked.batch.mini_batch // microbatch,
                microbatch_size=microbatch,
                split_backward=split,
                recompute=recompute,
                memory_bytes=asked.memory,
            )
            problem = OneMicrobatch.of(workload)
        except (InfeasibleError, UsageError):
            continue
        graph = task_graph(problem.workload)
        for rules, fit in product(built_in_rules(problem.workload), (False, True)):
            try:
                found = run_rules(graph, rules.but(fit_memory=fit))
            except (InfeasibleError, UsageError):
                continue
            best.append(rates(graph, found.orders, found.starts).iteration_ns)
    return min(best)


@pytest.mark.parametrize("placement", ["v-shape", pytest.param("auto", marks=[pytest.mark.slow, pytest.mark.long])])
def test_the_best_row_is_that_of_brute_force(placement: str) -> None:
    asked = replace(request(3 * GB), placement=placement, sizes=(2,))
    found = tune(asked)
    assert found.rows[0].iteration_ns == brute(asked, STRATEGIES if placement == "auto" else [placement])
    assert found.result.plan.predicted.iteration_ns == found.rows[0].iteration_ns
    assert found.num_open == 0
    assert check(found.result.plan, asked.profile).valid


def quick() -> Request:
    """A grid of few cells."""
    return replace(request(2 * GB), placement="v-shape", sizes=(1, 2))


@pytest.fixture(scope="module")
def whole() -> Tuning:
    return tune(quick())


def test_rows_are_ranked_and_their_figures_are_the_plans(whole: Tuning) -> None:
    assert list(whole.rows) == sorted(whole.rows, key=lambda row: row.rank)
    assert len({replace(row, rules="") for row in whole.rows}) == len(whole.rows)
    first, predicted = whole.rows[0], whole.result.plan.predicted
    assert (first.iteration_ns, first.makespan_ns) == (predicted.iteration_ns, predicted.makespan_ns)
    assert first.peak_memory_bytes == max(memory.peak_bytes for memory in predicted.memory) <= 2 * GB
    assert first.bubble_rate == predicted.bubble_rate
    assert predicted.iteration_ns >= predicted.lower_bound_ns
    assert {row.split for row in whole.rows} == {True, False}
    summary = whole.figures()
    assert [row["rank"] for row in summary["candidates"]] == list(range(1, len(whole.rows) + 1))  # type: ignore[attr-defined]  # a list of dicts


def test_processes_share_the_work_and_find_the_same(whole: Tuning) -> None:
    assert tune(quick(), workers=2).rows == whole.rows


def test_an_interrupted_tuning_goes_on_where_it_was(whole: Tuning, tmp_path: Path) -> None:
    """Whatever is left of the file, torn lines too, the rows are those of a tuning in one go, and known ones stay."""
    path = tmp_path / "cache.jsonl"
    assert tune(quick(), cache=str(path)).rows == whole.rows
    complete = path.read_bytes()
    lines = complete.splitlines(keepends=True)
    again = tune(quick(), cache=str(path))
    assert (again.rows, again.num_known) == (whole.rows, whole.num_cells - whole.num_skipped - whole.num_unfit)
    assert path.read_bytes() == complete
    path.write_bytes(b"".join(lines[: len(lines) // 2]) + lines[-1][:20])
    assert tune(quick(), cache=str(path)).rows == whole.rows
    assert sorted(path.read_bytes().splitlines()) == sorted(complete.splitlines())


def test_ctrl_c_leaves_the_best_so_far_and_what_is_known(tmp_path: Path) -> None:
    """Ctrl-C as soon as there is a plan: one cell is done by then. The next tuning knows it, and does the rest."""
    asked = replace(request(4 * GB), sizes=(1,))
    heard: list[int] = []

    def press(what: str, best_ns: int, bound_ns: int, seconds: float) -> None:
        heard.append(best_ns)
        raise KeyboardInterrupt

    path = str(tmp_path / "cache.jsonl")
    first = tune(asked, cache=path, progress=press)
    assert first.result.interrupted
    assert [first.rows[0].iteration_ns] == heard
    assert check(first.result.plan, asked.profile).valid
    rest = tune(asked, cache=path)
    assert not rest.result.interrupted
    assert first.num_cells - first.num_open - first.num_unfit - first.num_skipped == 1
    assert rest.num_known > 0
    assert set(first.rows) <= set(rest.rows)
    assert rest.num_open == 0


def test_a_cell_that_is_stopped_has_the_rows_so_far() -> None:
    asked = quick()
    point = next(point for point in grid(asked) if not isinstance(point, UsageError))
    cell = cell_of(asked, point, lambda: False)
    left = iter([False] * 3)
    some = rows_of(asked, cell, lambda: next(left, True))
    every = rows_of(asked, cell, lambda: False)
    assert (some.complete, every.complete) == (False, True)
    assert 0 < len(some.rows) <= 3
    assert {row.rules for row in some.rows} <= {row.rules for row in every.rows}


def test_a_cache_is_of_what_was_asked(whole: Tuning, tmp_path: Path) -> None:
    path = tmp_path / "cache.jsonl"
    tune(quick(), cache=str(path))
    other = tune(replace(quick(), memory_bytes=4 * GB), cache=str(path))
    assert other.num_known == 0


def test_a_file_that_is_no_cache_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{"kind": "plan"}\n')
    with pytest.raises(UsageError, match=r"plan\.json is not a tuning cache"):
        tune(quick(), cache=str(path))
    assert path.read_text() == '{"kind": "plan"}\n'


@contextmanager
def full_disk(most_bytes: int) -> Iterator[None]:
    """No file can be written beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_is_full_half_way_loses_no_plan_and_no_cell(
    whole: Tuning, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    path, write, written = tmp_path / "cache.jsonl", Path.open, []

    def full(self: Path, mode: str = "r", **how: Any) -> Any:
        if self == path and mode == "ab":
            written.append(mode)
            if len(written) == 4:
                raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, mode, **how)

    monkeypatch.setattr(Path, "open", full)
    with pytest.warns(
        UserWarning, match=r"cache.jsonl cannot be written: No space left on device; what is found"
    ) as told:
        assert tune(quick(), cache=str(path)).rows == whole.rows
    assert len(written) == 4, "it is not tried again"
    (kept,) = tmp_path.glob("pipeplan-*")
    assert f"is kept in {kept} from now on" in str(told[0].message)
    again = tune(quick(), cache=str(kept))
    assert again.num_known == whole.num_cells - whole.num_skipped - whole.num_unfit


@pytest.mark.slow
def test_what_was_known_stays_on_a_full_disk(whole: Tuning, tmp_path: Path) -> None:
    path = tmp_path / "cache.jsonl"
    tune(quick(), cache=str(path))
    lines = path.read_bytes().splitlines(keepends=True)
    before = b"".join(lines[: len(lines) // 2])
    path.write_bytes(before + lines[-1][:20])
    with full_disk(16), pytest.warns(UserWarning, match="File too large; what is found is kept in no file from now on"):
        assert tune(quick(), cache=str(path)).rows == whole.rows
    assert path.read_bytes() == before


@pytest.mark.parametrize("where", ["nowhere/cache.jsonl", ".", "full"])
def test_a_cache_that_cannot_be_written_is_refused_before_the_work(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeplan.planning.tuning.Workers", None)
    with full_disk(0 if where == "full" else 1 << 30), pytest.raises(UsageError, match=r"cannot be (written|read): "):
        tune(quick(), cache=str(tmp_path / where))


def test_no_time_and_no_memory_are_said() -> None:
    clock = count(step=100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "process_time", lambda: next(clock))  # it has worked for long
        with pytest.raises(SearchTimeoutError, match="raise --time-limit"):
            tune(replace(quick(), time_limit=0.0))
    with pytest.raises(InfeasibleError, match="raise --memory"):
        tune(replace(quick(), memory_bytes=GB // 10))


def test_a_limit_counts_by_its_own_clock() -> None:
    """As by what the process works: here it stands still, and by the wall's clock there is no time at all."""
    within = Limit(1.0, clock=lambda: 0.0)
    assert tune(replace(quick(), time_limit=1e-9), within=within).rows == tune(quick()).rows


def test_devices_of_a_cluster_are_chosen() -> None:
    """A cluster of two levels: the best plan is one for it, with its memory and links."""
    cluster = testbeds.named_cluster("graphpipe", 8)
    asked = replace(request(devices=8, mini_batch=8, replicas=2), placement="one-to-one", cluster=cluster, sizes=(2,))
    found = tune(asked)
    assert check(found.result.plan, asked.profile, cluster).valid
    assert {row.depth for row in found.rows} == {4}
    assert {row.replicas for row in found.rows} == {2}


def test_rows_say_how_many_devices_split_blocks_and_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    """So that sizes of a row make up the devices: 2 x 2 of them at each position and replica."""
    rows = tuple(
        CostRow(microbatch_size=1, shards=shards, context=context, forward_ns=400 // each, backward_ns=800 // each)
        for shards, context in product((1, 2), (1, 2))
        for each in (shards * context,)
    )
    profile = profile_of([rows[0]] * 4)
    blocks = tuple(block.model_copy(update={"costs": rows}) for block in profile.blocks)
    profile = profile.model_copy(update={"blocks": blocks})
    how: dict[str, Any] = {"placement": "one-to-one", "time_limit": 0.3, "deterministic": True}
    asked = Request.of(profile, devices=8, mini_batch=4, scheduler="rules", shards=2, context=2, **how)
    found = tune(asked).rows
    assert found
    for row in found:
        assert (row.shards, row.context) == (2, 2)
        assert row.depth * row.replicas * row.shards * row.context == 8
    print_ranking(found)
    assert " pp dp tp cp samples " in " ".join(capsys.readouterr().out.split())
