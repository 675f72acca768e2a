"""Reports in narrow terminals and in pipes: every figure and every number with what it counts is as in wide ones."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TextIO

import pytest
from rich.text import Text

from builders.chains import chain_plan
from pipeplan.costs.inspection import Inspection
from pipeplan.costs.throughput import Yardstick
from pipeplan.files import Profile, read_profile, sha256_of, write_file
from pipeplan.files.trace import read_trace
from pipeplan.planning.comparison import OURS, Comparison, ComparisonRow, NotThere
from pipeplan.planning.frontier import FrontierPoint, FrontierResult
from pipeplan.planning.sharding_frontier import most_frequent
from pipeplan.planning.tuning_cells import TuningRow
from pipeplan.reporting.frontier import print_frontier, print_points
from pipeplan.reporting.frontier_answer import LINES, print_frontier_answer
from pipeplan.reporting.layout import Column, console_for, flowed, tables
from pipeplan.reporting.profile import print_inspection
from pipeplan.reporting.tables import print_comparison, print_measured, print_ranking
from pipeplan.reporting.terminal import print_simulation, print_stages
from pipeplan.simulator.measured import compared
from pipeplan.simulator.simulation import simulate
from support.commands import pipeplan
from support.marks import one_in
from support.paths import GOLDEN, ROOT

KNOWN = Yardstick("A100-SXM4-80GB", "bfloat16", 1024, 2_890_852_728_832)
PLACES = ["one-to-one", "bidirectional-v-shape", "circular"]
SCHEDULES = [OURS, "1f1b", "interleaved-1f1b", "zb-2p"]


def profile() -> Profile:
    """GPT-2 345M, with names of blocks as captured models have them."""
    found = read_profile(str(ROOT / "profiles" / "gpt2-345m-cpu.json"))
    names = {block.id: f"model.transformer.{block.id}.self_attention" for block in found.blocks}
    blocks = tuple(block.model_copy(update={"id": names[block.id]}) for block in found.blocks)
    edges = tuple(
        edge.model_copy(update={"source": names[edge.source], "target": names[edge.target]}) for edge in found.edges
    )
    return found.model_copy(update={"blocks": blocks, "edges": edges})


def row(index: int) -> ComparisonRow:
    time = 250_300_000_000 + index * 1_234_567_891
    names = SCHEDULES[index % 4], PLACES[index % 3], 128, 16, index % 2 > 0, index % 4 > 1
    rates, peaks = (0.1234 + index / 20, 0.2345 + index / 30), (12_340_000_000 + index,)
    why = "device 0 needs 14.55GB, 6.553GB more than its 8GB" if index == 7 else ""
    return ComparisonRow(*names, 4, (4, 4 + index), not why, time, time + 98_765, *rates, peaks, time - 10**10, why=why)


def comparison(file: TextIO) -> None:
    rows = tuple(map(row, range(8)))
    missing = (NotThere("1f1b+", "circular", "it needs a stage on all devices"),)
    print_comparison(
        Comparison("gpt2-345m", 64, 2048, (8 * 10**9,), rows, missing, False, KNOWN, ("links are free",)), file
    )


def ranking(file: TextIO) -> None:
    def row(n: int) -> TuningRow:
        time, names = 10**9 + n * 12_345, (PLACES[n % 3], n % 4 > 1, n % 2 > 0, SCHEDULES[n % 4])
        return TuningRow(16, 4, 8, (2, 2), 128, *names, time, 10**9, 0.1234, 10**10 + n * 10**8)

    print_ranking(list(map(row, range(25))), file)


def frontier(file: TextIO) -> None:
    what = "8 stages: 1 on 2 replicas, 6 on 4 shards, recomputed, 1 on (16 devices, ...); optimised, from zb-h1"
    points = [
        FrontierPoint(2**n, 80 * 10**9 - n * 3_333_333_333, 10**9 + n * 123_456_789, what, n == 1, n == 2, 0, 12.34 * n)
        for n in range(4)
    ]
    notes = ("1, 2, 4 devices: 13% to 57% of the computing is repeated on several devices",) * 2
    print_points(
        FrontierResult("gpt2-345m", "all", "whole plans", 512, False, 1.0, tuple(points), (), notes, yardstick=KNOWN),
        file,
    )


def inspected(file: TextIO) -> None:
    print_inspection(Inspection(profile(), (64,)), file)


def simulated(file: TextIO) -> None:
    plan = chain_plan(
        20,
        24,
        forward=2_345_678,
        backward=4_567_890,
        lag=300_123,
        activation_bytes=3_210_000,
        parameter_bytes=40_123_000,
        workspace_bytes=512_300,
        memory_bytes=400_400_000,
    )
    print_simulation(simulate(plan), file)
    print_stages(plan.workload, file)


def measured(file: TextIO, folder: Path) -> None:
    plan = chain_plan(2, 4, forward=2_000_000, backward=4_000_000, lag=500_000)
    text = (GOLDEN / "measured_chain.trace.json").read_text(encoding="utf-8").replace("PLAN_SHA256", sha256_of(plan))
    (folder / "run.trace").write_text(text, encoding="utf-8")
    simulation = simulate(plan)
    print_measured(simulation, compared(simulation, read_trace(str(folder / "run.trace"), 2)), file)


REPORTS: dict[str, Callable[[TextIO], None]] = {
    "compare": comparison,
    "tune": ranking,
    "frontier": frontier,
    "profile --show": inspected,
    "search, simulate": simulated,
}

FIGURE = re.compile(r"(?<![\w.])[-+]?\d[\d.]*(?:ns|us|ms|s|kB|MB|GB|TB|B|%|x\d+)?(?![\w.])")
COUNTED = re.compile(
    r"(?<![\w.])\d+ (?:samples?|micro-batch(?:es)?|devices?|blocks?|stages?|points?|others?|runs|actions?)\b"
)


def figures(text: str) -> Counter[str]:
    """Every number with its unit, and every number with what it counts; not the times over a timeline's cells."""
    lines = [line for line in text.splitlines() if not re.match(r"device 0ns|.*\|.*|.*\+---|.*┊", line)]
    cells = [line for line in lines if not re.match(r" +\d+ [^ ]*[─·]", line)]
    return Counter(FIGURE.findall("\n".join(cells))) + Counter(COUNTED.findall("\n".join(cells)))


SPARE = ("MFU", "tokens/s")


def without(title: str, text: str) -> str:
    """A wide text without the cells under a heading, which end where it does."""
    heading = next(line for line in text.splitlines() if title in line.split())
    end = heading.index(title) + len(title)
    first = text.splitlines().index(heading)
    lines = [
        f"{line[:end].rpartition(' ')[0]}{line[end:]}" if number > first and line[end - 1 : end].strip() else line
        for number, line in enumerate(text.splitlines())
    ]
    return "\n".join(lines)


def require_whole(wide: str, narrow: str, width: int) -> None:
    """Columns that can be spared may be missing, but no figure of any other."""
    assert max(map(len, narrow.splitlines())) <= width
    assert "…" not in narrow
    for title in SPARE:
        if title in wide and title not in narrow:
            wide = without(title, wide)
    lost = figures(wide) - figures(narrow)
    assert not lost


@one_in(3, "width", [60, 80, 100, 120])
@pytest.mark.parametrize("name", REPORTS)
def test_no_figure_is_cut_or_parted_from_its_unit(name: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = []
    for columns in (400, width):
        monkeypatch.setenv("COLUMNS", str(columns))
        stream = io.StringIO()
        REPORTS[name](stream)
        texts.append(stream.getvalue())
    require_whole(*texts, width)


def test_rates_of_a_frontier_are_shown_as_far_as_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 64 columns a table without tokens per second and utilisation is better than two tables."""
    points = tuple(FrontierPoint(2**n, 10**10, 10**9 - n, "whole x2, samples2-shards4 x12") for n in range(3))
    found = FrontierResult("gpt2-345m", "all", "splits", 512, True, 1.0, points, (), yardstick=KNOWN)
    titles = {}
    for columns in (64, 80, 120):
        monkeypatch.setenv("COLUMNS", str(columns))
        stream = io.StringIO()
        print_points(found, stream)
        assert len(re.findall("^ *─[─ ]+$", stream.getvalue(), re.M)) == 1, "one table"
        titles[columns] = [title for title in ("samples/s", "tokens/s", "MFU") if title in stream.getvalue().split()]
    assert titles == {64: ["samples/s"], 80: ["samples/s", "MFU"], 120: ["samples/s", "tokens/s", "MFU"]}


def test_a_frontier_says_what_its_marks_mean_and_that_times_are_estimated() -> None:
    points = tuple(FrontierPoint(4, 10**9 * n, 10**9 // n, "4 stages", n == 2, n == 1) for n in (1, 2, 4))
    said = []
    for estimated in (True, False):
        yardstick = replace(KNOWN, estimated=estimated)
        found = FrontierResult("chain", "all", "whole plans", 8, False, 1.0, points, (), yardstick=yardstick)
        stream = io.StringIO()
        print_frontier(found, stream)
        said.append(stream.getvalue())
    assert "fastest   estimated " in said[0]
    assert "estimated" not in said[1]
    for word in ("knee", "chosen"):
        assert re.search(rf" {word} ", said[0])
        assert f"\n{word}: " in said[0]


@pytest.mark.parametrize("width", [80, 140])
def test_a_frontier_answers_in_ten_lines(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is fastest, what is smallest, what devices bring and cost, what is proved, and what to do next."""
    monkeypatch.setenv("COLUMNS", str(width))
    what = "3 stages: 1 on (2 devices, blocks split: 12 the same on 2, 1 by hidden over 2), 2 on 1 device; 1f1b"
    points = tuple(
        FrontierPoint(
            count, 10**10 // count + n * 10**9, 8 * 10**9 // count - n * 10**8, what, n == 1, n == 2, 0, count
        )
        for count in (1, 2, 4)
        for n in range(3)
    )
    found = FrontierResult(
        "gpt2-345m", "all", "whole plans", 512, False, 1.0, points, (), (), True, tried=7, yardstick=KNOWN
    )
    texts = []
    for written in (None, "p.json"):
        stream = io.StringIO()
        print_frontier_answer(found, written, stream)
        texts.append(stream.getvalue())
    lines = [line.rstrip() for line in texts[0].rstrip().splitlines()]
    said = dict(line.split(maxsplit=1) for line in lines[1:] if not line.startswith(" "))
    assert said["fastest"].startswith("1.8s per iteration on 4 devices, 4.5GB")
    assert said["smallest"].startswith("2.5GB per device on 4 devices, 2s, 11.1% slower")
    assert said["devices"].startswith("1: 7.8s, 2: 3.8s (2.05x), 4: 1.8s (4.33x)")
    assert said["cheapest"].startswith("2 per 1,000 iterations, on 4 devices")
    assert "found, not proved" in " ".join(lines)
    assert "--point N" in texts[0]
    assert "pipeplan simulate p.json" in texts[1]
    assert len(lines) <= LINES


def test_words_of_a_frontier_are_not_folded_to_a_word_per_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "72")
    point = FrontierPoint(
        8, 10**10, 10**9, "48 by samples over 8, 2 by samples over 4 and shards over 2", price_per_hour=4
    )
    found = FrontierResult("gpt2", "all", "splits", 512, True, 1.0, (point,), (), yardstick=KNOWN)
    stream = io.StringIO()
    print_frontier(found, stream)
    assert "48 by samples" in stream.getvalue()


@pytest.mark.parametrize(
    ("configurations", "words"),
    [
        (["samples8"] * 48 + ["samples4-shards2"] * 2, "48 by samples over 8, 2 by samples over 4 and shards over 2"),
        (["whole", "copies2", "samples2-copies2"], "1 whole, 1 the same on 2, 1 by samples over 2 and the same on 2"),
    ],
)
def test_ways_to_split_are_in_words(configurations: list[str], words: str) -> None:
    assert most_frequent(configurations) == words


@pytest.mark.parametrize("width", [60, 80, 120])
def test_nor_of_measured_beside_predicted(width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = []
    for columns in (400, width):
        monkeypatch.setenv("COLUMNS", str(columns))
        stream = io.StringIO()
        measured(stream, tmp_path)
        texts.append(stream.getvalue())
    require_whole(*texts, width)


def test_commands_in_pipes_are_as_wide_as_columns_says(monkeypatch: pytest.MonkeyPatch) -> None:
    path = ROOT / "profiles" / "gpt2-345m-cpu.json"
    said = {}
    for columns in ("400", "80", "", "0", "wide"):
        monkeypatch.setenv("COLUMNS", columns)
        said[columns] = pipeplan("profile", "--show", path).stdout
    require_whole(said["400"], said["80"], 80)
    assert said["80"] != said["400"]
    assert said[""] == said["0"] == said["wide"], "120 columns, where nobody says how many"
    assert 80 < max(map(len, said[""].splitlines())) <= 120


def test_verdicts_and_errors_are_as_wide_as_columns_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pipes, too; without COLUMNS they are one line there, for those who search them."""
    right = tmp_path / "right.json"
    plan = chain_plan(2, 4, forward=2_000_000, backward=4_000_000, lag=500_000)
    write_file(plan, str(right))
    asked = (("check", right), ("search", right, "--devices", "2"), ("search", right, "--recompute", "al"))
    for arguments in asked:
        texts = {}
        for columns in ("", "60"):
            monkeypatch.setenv("COLUMNS", columns)
            done = pipeplan(*arguments)
            texts[columns] = done.stdout if arguments == asked[0] else done.stderr
        assert max(map(len, texts[""].splitlines())) > 60
        long = max(map(len, texts["60"].split()))
        assert max(map(len, texts["60"].splitlines())) <= max(60, long)
        assert texts["60"].split() == texts[""].split()


def test_a_width_that_is_given_goes_before_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    assert (console_for(io.StringIO()).width, console_for(io.StringIO(), 90).width) == (70, 90)
    monkeypatch.delenv("COLUMNS")
    assert console_for(io.StringIO()).width == 120


def test_lines_break_between_words_but_not_after_numbers() -> None:
    text = "micro-batches of 16 samples, 4 per replica"
    assert flowed(text, 13).plain.split("\n") == ["micro-batches", "of", "16 samples,", "4 per replica"]
    assert flowed("one\ntwo three", 5).plain == "one\ntwo\nthree"
    bold = flowed(Text.assemble("aa ", ("bb", "bold"), " cc"), 2)
    assert (bold.plain, [(span.start, span.end) for span in bold.spans]) == ("aa\nbb\ncc", [(3, 5)])


def test_what_is_too_wide_stands_in_several_tables_under_its_names() -> None:
    names = Column("stage", ["first", "second"], words=True, key=True)
    times = [Column(f"time {n}", [f"{n}23.4ms", f"{n}ms"]) for n in range(6)]
    assert len(tables([names, *times], 200)) == 1
    several = tables([names, *times], 40)
    assert len(several) > 1
    assert {str(table.columns[0].header).strip() for table in several} == {"stage"}


def test_columns_to_spare_are_left_out_where_fewer_tables_are_enough_then() -> None:
    names = Column("stage", ["first"], words=True, key=True)
    columns = [names, *(Column(f"time{n}", ["1.234ms"], spare=n) for n in range(3))]
    shown = {
        width: [str(column.header).strip() for column in tables(columns, width)[0].columns] for width in (50, 30, 20)
    }
    assert shown == {50: ["stage", "time0", "time1", "time2"], 30: ["stage", "time0", "time1"], 20: ["stage", "time0"]}
    long = [names, *(Column(f"time{n}", ["1.234ms"]) for n in range(3)), Column("more", ["1.234ms"], spare=1)]
    there = [str(column.header).strip() for table in tables(long, 32) for column in table.columns]
    assert "more" in there, "it takes a second table anyway"
