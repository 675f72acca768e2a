"""The report without a browser: what is in the file, what is not, and its other forms."""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from builders.chains import chain_plan, chain_workload
from builders.folds import plans_of
from builders.loops import looped_plans
from pipeplan.errors import FileError, InvalidPlanError, UsageError
from pipeplan.files import Plan, read_plan, sha256_of, write_file
from pipeplan.files.folded import renamed
from pipeplan.files.plan import AlternativeFigures
from pipeplan.interop.chakra.traces import traces_of
from pipeplan.planning.frontier_file import read_frontier
from pipeplan.reporting.drawing.model import predicted_run
from pipeplan.reporting.drawing.payload import drawing_data
from pipeplan.reporting.drawing.svg import COLOURS, DARK
from pipeplan.reporting.html.answer import frontier_command, verdict
from pipeplan.reporting.html.figures import links_table
from pipeplan.reporting.html.report import report_of
from pipeplan.reporting.html.source import ShownPlan
from pipeplan.reporting.terminal import print_simulation, print_stages, print_timeline
from pipeplan.reporting.timeline import device_messages, predicted_trace
from pipeplan.search_constants import MOST_KEPT_BYTES
from pipeplan.simulator.simulation import simulate
from support.commands import pipeplan
from support.paths import GOLDEN, ROOT

GPT = ROOT / "plans" / "gpt2-1.3b-a100-80gb.json"
FRONTIER = Path(__file__).parent / "frontier.json"
HOSTILE = "</script><b>&\"'|`[x](http://evil.example)@me"


class Elements(HTMLParser):
    """Tags with their attributes, and the text of each script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.ids: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id" and value]


def gpt() -> Plan:
    return read_plan(str(GPT))


def everything() -> str:
    plan = gpt()
    best = AlternativeFigures(
        what=HOSTILE, iteration_ns=10, work_ns=7, uneven_ns=1, waiting_ns=2, ending_ns=0, peak_bytes=5
    )
    return report_of(
        [plan.with_alternatives((best,)), chain_plan(4, 8, lag=3)], (), read_frontier(str(FRONTIER)), "pipeplan report"
    ).html


def test_the_page_allows_nothing_from_outside_and_asks_for_nothing() -> None:
    elements = Elements(everything())
    (policy,) = [
        each["content"] for tag, each in elements.found if tag == "meta" and each.get("http-equiv") is not None
    ]
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert "http" not in policy
    for tag, attributes in elements.found:
        assert not {"src", "srcset", "style", "action"} & attributes.keys(), tag
        assert not [name for name in attributes if name.startswith("on")], tag
        assert attributes.get("href", "#") is not None
        assert str(attributes.get("href", "#")).startswith("#")
        assert tag not in ("link", "iframe", "object", "embed", "form", "base")


def test_ids_are_of_one_element_each_and_every_link_leads_to_one() -> None:
    elements = Elements(everything())
    assert len(elements.ids) == len(set(elements.ids))
    links = {attributes["href"] for tag, attributes in elements.found if tag == "a"}
    assert {str(link)[1:] for link in links} <= set(elements.ids)
    assert any("point-" in str(link) for link in links)


def shown_plans() -> dict[str, Plan]:
    """Those that are shipped, and some with loops."""
    shipped = {path.stem: read_plan(str(path)) for path in sorted((ROOT / "plans").glob("*.json"))}
    return shipped | looped_plans(chain_workload(3, 4), 8, 50)


def test_bars_are_what_the_simulation_says_of_each_action() -> None:
    """Also in loops and parts, where numbers and times are not those that are written."""
    for plan in shown_plans().values():
        simulation = simulate(plan)
        for lane in predicted_run(simulation, "", "").lanes:
            assert [bar.task for bar in lane.bars] == simulation.orders[lane.devices[0]]
            for bar in lane.bars:
                assert bar.name == simulation.label(bar.task)
                assert bar.number == simulation.microbatch_text(bar.task)
                assert (bar.start_ns, bar.shown_ns) == (simulation.starts[bar.task], simulation.start_of(bar.task))


@pytest.mark.parametrize("path", sorted((ROOT / "plans").glob("*.json")), ids=lambda path: path.stem)
def test_messages_are_those_of_the_programs(path: Path) -> None:
    """Of each device that leads others, and of a loop what is written: each SEND and RECV once, and no other."""
    plan = read_plan(str(path)).unrolled()
    simulation = simulate(plan)
    found = Counter(end for message in device_messages(simulation) for end in message.ends)
    first = simulation.workload.first_playing
    written = Counter(
        (device, renamed(text, first))
        for device, program in enumerate(plan.programs)
        for text in program
        if "SEND_" in text or "RECV_" in text
    )
    assert found == written


@pytest.mark.parametrize("name", ["gpt2-1.3b-a100-80gb", "tessel-mt5-1.8b-v100-32gb", "tessel-v"])
def test_the_table_of_links_sums_all_messages(name: str) -> None:
    """Of plans with replicas, with micro-batches in parts, and with neither."""
    simulation = simulate(read_plan(str(ROOT / "plans" / f"{name}.json")))
    sums: dict[tuple[int, int], list[int]] = {}
    for message in device_messages(simulation):
        found = sums.setdefault((message.source_device, message.target_device), [0, 0, 0])
        found[:] = [found[0] + 1, found[1] + message.size_bytes, found[2] + message.duration_ns]
    table = links_table(ShownPlan("A", simulation))
    assert table is not None
    cells = {tuple(int(cell.value or 0) for cell in row.cells[1:4]) for row in table.rows}
    assert cells == {tuple(found) for found in sums.values()}


def test_the_same_plans_give_the_same_bytes() -> None:
    assert everything() == everything()


@pytest.mark.parametrize("count", [16, 64])
def test_four_devices_are_below_three_megabytes(count: int) -> None:
    assert len(report_of([chain_plan(4, count, lag=3)]).html.encode()) < 3_000_000


def test_texts_of_files_are_escaped_wherever_they_stand(tmp_path: Path) -> None:
    made = chain_plan(2, 2).provenance.model_copy(update={"command": HOSTILE, "options": {HOSTILE: HOSTILE}})
    plan = chain_plan(2, 2).model_copy(update={"name": HOSTILE, "provenance": made})
    report = report_of([plan, plan], (), None, HOSTILE)
    assert "</script><b>" not in report.html
    assert report.html.count("<script") == 2
    assert "http://evil" not in re.sub(r"` .*? `", "", report.markdown)
    assert "<b>" not in re.sub(r"` .*? `", "", report.markdown)
    assert "@me" not in re.sub(r"` .*? `", "", report.markdown)
    assert "<b>" not in report.svg


def test_the_script_gets_what_the_simulation_has() -> None:
    """Columns, read again as the script does."""
    simulation = simulate(gpt())
    run = predicted_run(simulation, "title", "figures", memory=True, links=True)
    data = json.loads(json.dumps(drawing_data([run])))["runs"][0]

    def listed(column: object) -> list[int]:
        return column if isinstance(column, list) else [column["values"][at] for at in column["of"]]

    seen = 0
    for lane, drawn in zip(data["lanes"], run.lanes, strict=False):
        starts, now = [], 0
        for difference in lane["starts"]:
            now += difference
            starts.append(now)
        tasks = simulation.orders[drawn.devices[0]]
        assert starts == [simulation.starts[task] for task in tasks]
        assert listed(lane["durations"]) == [simulation.graph.durations[task] for task in tasks]
        stems = [lane["names"][at] for at in listed(lane["stems"])]
        names = [stem.replace("#", str(number)) for stem, number in zip(stems, lane["numbers"], strict=True)]
        assert names == [simulation.label(task) for task in tasks]
        seen += len(tasks)
    assert seen == sum(len(simulation.orders[device]) for device in set(simulation.workload.leaders))
    assert [run.lanes[lane].bars[bar].task for lane, bar in data["path"]] == [
        step.task for step in simulation.critical_path
    ]


def test_labels_of_bars_can_be_read() -> None:
    """Contrast of at least 4.5 to 1 (WCAG 2, 1.4.3), white on a kind's colour, dark on that of every second stage."""

    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(one: str, other: str) -> float:
        low, high = sorted((luminance(one), luminance(other)))
        return (high + 0.05) / (low + 0.05)

    for plain, odd in COLOURS.values():
        assert contrast("#ffffff", plain) >= 4.5
        assert contrast(DARK, odd) >= 4.5


# The answer -------------------------------------------------------------------------------------------------------


def answers(html: str) -> dict[str, str]:
    return dict(re.findall(r'<dd data-answer="([^"]+)">([^<]*)</dd>', html))


def test_the_answer_is_ten_lines_that_answer_five_questions() -> None:
    found = answers(report_of([gpt()]).html)
    assert len(found) == 10
    busy = simulate(gpt()).rates.busy_ns
    assert found["busiest"].startswith(f"device {busy.index(max(busy))} ")
    assert "input gradient 36%" in found["busiest"]
    assert re.match(r"device \d+ idles [\d.]+ms: .*; longest for device \d+", found["waits most"])
    assert "pipeplan frontier profiles/gpt2-1.3b-a100-80gb.json --devices 8 --memory 88GB" in found["10 % more memory"]
    assert found["prediction"].startswith("not measured: ")


def test_a_frontier_says_what_a_tenth_more_memory_brings() -> None:
    """Of points on as many devices with at most that memory, the quickest, against the plan."""
    frontier = read_frontier(str(FRONTIER))
    plan = chain_plan(4, 16, memory_bytes=3_000_000_000)
    said = answers(report_of([plan], (), frontier).html)["10 % more memory"]
    assert said.startswith("nothing: no point of the frontier with up to 3.3GB on 4 devices is quicker than")
    slow = chain_plan(4, 16, forward=10**9, backward=10**10, memory_bytes=3_000_000_000)
    said = answers(report_of([slow], (), frontier).html)["10 % more memory"]
    best = min(point.time_ns for point in frontier.points if point.num_devices == 4 and point.memory_bytes <= 3.3e9)
    gain = 1 - best / simulate(slow).iteration_ns
    assert said.startswith(f"{gain:.1%} shorter iterations")
    other = chain_plan(4, 8, memory_bytes=3_000_000_000)
    assert "of 16 samples, the plan of 8" in answers(report_of([other], (), frontier).html)["10 % more memory"]


def test_without_a_frontier_the_page_has_the_command_that_makes_one() -> None:
    made = chain_plan(4, 16).provenance.model_copy(
        update={"command": "pipeplan search my.json --cluster 'c d.json' --mini-batch 16 -o x.json"}
    )
    command = frontier_command(chain_plan(4, 16).model_copy(update={"provenance": made}), 3_300_000_000)
    assert command == (
        "pipeplan frontier my.json --cluster 'c d.json' --devices 4 --memory 3.3GB --mini-batch 16 --plans --json"
    )
    assert frontier_command(chain_plan(2, 2), 10).startswith("pipeplan frontier PROFILE --devices 2")


def test_of_two_plans_the_page_says_which_to_run() -> None:
    quick, slow = chain_plan(4, 8), chain_plan(4, 8, lag=9)
    shown = report_of([slow, quick]).plans
    ratio = shown[0].simulation.iteration_ns / shown[1].simulation.iteration_ns - 1
    assert verdict(shown).startswith(f"Run B: chain: A takes {ratio:.1%} longer per sample")
    assert verdict(report_of([quick, quick]).plans).startswith("A tie: ")
    unfit = chain_plan(4, 8, memory_bytes=1_500)
    assert simulate(unfit).overflow is not None
    assert verdict(report_of([unfit, slow]).plans) == "Run B: chain: the others do not fit into memory."
    assert "none fits" in verdict(report_of([unfit, unfit]).plans)
    wide = verdict(report_of([chain_plan(8, 8), chain_plan(4, 8, lag=900)]).plans)
    assert "longer per sample; it has 8 devices, B 4; the fullest" in wide


def test_plans_of_different_profiles_are_said_to_be_so() -> None:
    def made(profile: str, sha256: str, lag: int = 0) -> Plan:
        plan = chain_plan(2, 4, lag=lag)
        known = {"profile": profile, "profile_sha256": sha256}
        return plan.model_copy(update={"provenance": plan.provenance.model_copy(update=known)})

    one, other = made("one", "1" * 64), made("an\nother", "2" * 64, lag=90)
    told = verdict(report_of([one, other]).plans)
    assert told.startswith(
        "Made from different profiles (one, an\\nother), so compare only if these are of one model. Run A"
    )
    assert verdict(report_of([one, made("one", "1" * 64, lag=90)]).plans).startswith("Run A: ")
    assert verdict(report_of([one, made("one", "")]).plans).startswith("A tie: ")


# What is asked for wrongly ----------------------------------------------------------------------------------------


def test_wrong_inputs_say_what_to_do(tmp_path: Path) -> None:
    write_file(chain_plan(2, 2), str(tmp_path / "plan.json"))
    plan, out = tmp_path / "plan.json", tmp_path / "r.html"
    for arguments, told in (
        ((plan,), "say what to make: -o report.html, --markdown or --svg FILE"),
        ((*[plan] * 5, "-o", out), "a report is on 1 to 4 plans, not on 5"),
        (("-", "-", "-o", out), "only one file can be read from stdin"),
        ((plan, "--markdown", "-o", "-"), "--markdown prints to stdout as well"),
        ((plan, "--frontier", plan, "-o", out), "not what pipeplan frontier --plans --json prints: of: Field required"),
        ((plan, "--frontier", tmp_path / "none", "-o", out), "none"),
    ):
        done = pipeplan("report", *arguments)
        assert done.returncode == 2
        assert told in " ".join(done.stderr.split())
        assert not out.exists()


def test_a_trace_is_of_one_of_the_plans(tmp_path: Path) -> None:
    ran = chain_plan(2, 4, forward=2_000_000, backward=4_000_000, lag=500_000)
    text = (GOLDEN / "measured_chain.trace.json").read_text(encoding="utf-8").replace("PLAN_SHA256", sha256_of(ran))
    (tmp_path / "run.trace").write_text(text, encoding="utf-8")
    report = report_of([chain_plan(3, 2), ran], [str(tmp_path / "run.trace")])
    assert report.plans[0].simulation.measured is None
    assert report.plans[1].step == 2, "of steps 1 and 2, which count, the one with the lower of the middle times"
    assert "emulated 35.11ms, +9.7% to the 32ms" in answers(report.html.partition('data-plan="B"')[2])["prediction"]
    with pytest.raises(UsageError, match="give the plan that ran"):
        report_of([chain_plan(3, 2)], [str(tmp_path / "run.trace")])


NO_POINT = b'{"name": "x", "of": "y", "samples": 1, "points": [{}]}'


TOO_LARGE = [
    b'{"name": "x", "of": "y", "samples": 1, "points": [{"num_devices": 1, "memory_bytes": 1, "time_ns": 1, "what": ""'
    b', "%s": 1%s}]}' % (key, 400 * b"0")
    for key in (b"num_devices", b"memory_bytes", b"time_ns", b"workspace_bytes", b"price_per_hour")
]


@pytest.mark.parametrize("content", TOO_LARGE)
def test_numbers_of_a_frontier_that_nobody_printed_are_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "f.json").write_bytes(content)
    with pytest.raises(FileError, match=r"points\.0\.\w+: Input should be (a finite|less than or equal to \d)"):
        read_frontier(str(tmp_path / "f.json"))


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", NO_POINT, *TOO_LARGE, b"\xff"])
def test_what_is_no_frontier_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "f.json").write_bytes(content)
    with pytest.raises(FileError, match=r"pipeplan frontier PROFILE --plans --json"):
        read_frontier(str(tmp_path / "f.json"))


# Beside the page --------------------------------------------------------------------------------------------------


def test_markdown_has_the_answer_and_a_bar_of_text_for_each_device() -> None:
    text = report_of([gpt()]).markdown
    rows = [line for line in text.splitlines() if re.match(r"\|[^|]+\|.+\|$", line)]
    assert len(rows) == 2 + 10
    bars = re.findall(r"^2 devices, \d\.\. ([FIW·]{72})$", text, flags=re.MULTILINE)
    assert len(bars) == 4
    assert "<svg" not in text
    assert "data:" not in text


def test_the_command_writes_all_three(tmp_path: Path) -> None:
    done = pipeplan("report", GPT, "-o", tmp_path / "r.html", "--svg", tmp_path / "r.svg", "--markdown")
    assert done.returncode == 0
    assert done.stdout.startswith("\n### gpt2")
    assert f"report written to {tmp_path / 'r.html'}" in done.stderr
    assert "<svg" in (tmp_path / "r.svg").read_text()
    assert f"pipeplan report {GPT} -o" in (tmp_path / "r.html").read_text()


@pytest.mark.slow
def test_a_search_keeps_its_best_plans_in_the_plan(tmp_path: Path) -> None:
    request = ("--devices", "4", "--memory", "4GB", "--mini-batch", "8", "--deterministic", "--time-limit", "200ms")
    request += ("--placement", "one-to-one")
    done = pipeplan("search", ROOT / "profiles" / "gpt2-124m-cpu.json", *request, "-o", tmp_path / "p.json")
    assert done.returncode == 0
    plan = read_plan(str(tmp_path / "p.json"))
    kept = plan.provenance.alternatives
    assert 2 <= len(kept) <= 10
    assert kept[0].iteration_ns == plan.predicted.iteration_ns
    assert [each.iteration_ns for each in kept] == sorted(each.iteration_ns for each in kept)
    for each in kept:
        assert each.work_ns + each.uneven_ns + each.waiting_ns + each.ending_ns == each.iteration_ns
    text = (tmp_path / "p.json").read_text(encoding="utf-8")
    begin = text.index('"alternatives"')
    assert text.index("]", begin) - begin <= MOST_KEPT_BYTES
    assert "The best plans of the search that differ" in report_of([plan]).html


def test_a_loop_whose_round_lacks_an_operation_is_refused() -> None:
    """Before it is written out, as it is for a page and for traces."""
    plan = looped_plans(chain_workload(2, 1), 6, 20)["1f1b"]
    assert plan.loop is not None
    rounds = tuple(replace(each, ends=each.begins) for each in plan.loop.rounds)
    odd = plan.model_copy(update={"loop": replace(plan.loop, rounds=rounds)})
    with pytest.raises(InvalidPlanError, match="in no round of the loop"):
        report_of([odd])
    with pytest.raises(UsageError, match="in no round of the loop"):
        traces_of(odd)


def test_a_best_plan_of_no_time_divides_nothing() -> None:
    nothing = dict.fromkeys(("iteration_ns", "work_ns", "uneven_ns", "waiting_ns", "ending_ns", "peak_bytes"), 0)
    best = AlternativeFigures(what="none", memory_bytes=0, **nothing)
    assert "The best plans of the search that differ" in report_of([chain_plan(2, 4).with_alternatives((best,))]).html


@pytest.mark.parametrize(
    ("seed", "idle", "shared"),
    [(0, 0, False), (1, 0, False), (3, 0, False), (4, 5, False), (2, 0, True), (5, 3, True)],
)
def test_a_folded_plan_is_shown_as_its_unfolded_form(
    seed: int, idle: int, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the page, in a comment, as a picture, in the terminal; of alike devices traces have the first."""
    both = plans_of(seed, monkeypatch, idle, idle // 2, shared=shared)[:2]
    reports = [report_of([plan]) for plan in both]
    assert reports[0].markdown == reports[1].markdown
    assert reports[0].svg == reports[1].svg
    pages = [_without_numbers_of_lanes(report.html) for report in reports]
    assert pages[0] == pages[1]
    simulations = [simulate(plan) for plan in both]
    streams = [io.StringIO(), io.StringIO()]
    for simulation, stream in zip(simulations, streams, strict=True):
        print_simulation(simulation, stream)
        print_stages(simulation.workload, stream)
        print_timeline(simulation, stream)
    assert streams[0].getvalue() == streams[1].getvalue()
    figures = [simulation.figures()["critical_path"] for simulation in simulations]
    assert figures[0] == figures[1]
    shown, every = (_events(predicted_trace(simulation).events()) for simulation in simulations)
    firsts = {own.first for own in both[0].players} - set(simulations[0].workload.idle_devices)
    assert {device for _, device, _, _ in every} > firsts
    assert shown == {each for each in every if each[1] in firsts}


def _without_numbers_of_lanes(page: str) -> str:
    """The page as it is read: what scripts find lanes by is left out."""
    text = re.sub(r'<script type="application/json".*?</script>', "", page, flags=re.DOTALL)
    return re.sub(r'(id="plan-A-\w+-|lane:A:|data-(?:lane|device|row)="[^"]*?)\d+', r"\1", text)


def _events(found: list[dict[str, object]]) -> set[tuple[object, ...]]:
    known = [(each["name"], each["args"], each["ts"], each["dur"]) for each in found if each["ph"] == "X"]
    return {(name, dict(args)["device"], at, lasts) for name, args, at, lasts in known if isinstance(args, dict)}
