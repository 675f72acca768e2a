"""The report in a real browser: what a reader does with it, what they see, and what no file makes it do."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from builders.chains import chain_plan, chain_workload
from builders.orders import one_f_one_b
from pipeplan.files import Plan, read_plan, sha256_of, write_file
from pipeplan.planning.frontier import FrontierPoint, FrontierResult
from pipeplan.planning.frontier_file import read_frontier
from pipeplan.reporting.drawing.model import predicted_run
from pipeplan.reporting.drawing.svg import COLOURS
from pipeplan.reporting.html.report import PlanReport, report_of
from pipeplan.simulator.simulation import simulate
from support.browser import Opened, browser, in_browser, opened, wait_for
from support.commands import pipeplan
from support.marks import slow_but
from support.paths import GOLDEN, ROOT

pytestmark = in_browser

GPT = ROOT / "plans" / "gpt2-1.3b-a100-80gb.json"
SCRIPT = "</script><script>document.title='hacked'</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def launched() -> Iterator[Any]:
    with browser() as found:
        yield found


def written(report: PlanReport, path: Path) -> Path:
    path.write_text(report.html, encoding="utf-8")
    return path


def plans() -> list[Plan]:
    return [read_plan(str(GPT)), chain_plan(4, 8, lag=3)]


@pytest.fixture(scope="module")
def page(launched: Any, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    """Two plans with everything that a page can have; it does not glide away below the pointer."""
    folder = tmp_path_factory.mktemp("report")
    path = written(report_of(plans(), (), frontier()), folder / "report.html")
    return opened(launched, path, reduced_motion="reduce")


def frontier() -> FrontierResult:
    return read_frontier(str(Path(__file__).parent / "frontier.json"))


def view(page: Any) -> tuple[float, float]:
    found = page.evaluate("[timeline.view.from, timeline.view.to]")
    return found[0], found[1]


def settled(page: Any) -> None:
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def focused(page: Any) -> str:
    return str(page.locator(".said").text_content())


# What a reader does -----------------------------------------------------------------------------------------------


def test_it_opens_without_a_request_or_a_complaint(page: Opened) -> None:
    assert page.page.title() == "gpt2-1.3b / chain - pipeplan report"
    assert page.requests == [page.page.url]
    assert page.complaints == []


def test_buttons_keys_and_the_wheel_zoom(page: Opened) -> None:
    shown = page.page
    whole = view(shown)
    shown.get_by_role("button", name="Zoom in").click()
    assert view(shown)[1] - view(shown)[0] == pytest.approx((whole[1] - whole[0]) / 2)
    shown.locator(".stage").focus()
    for key, factor in (("+", 4), ("-", 2), ("0", 1)):
        shown.keyboard.press(key)
        assert view(shown)[1] - view(shown)[0] == pytest.approx((whole[1] - whole[0]) / factor)
    box = shown.locator(".stage").bounding_box()
    shown.mouse.move(box["x"] + box["width"] / 2, box["y"] + 90)
    shown.keyboard.down("Control")
    shown.mouse.wheel(0, -300)
    shown.keyboard.up("Control")
    wait_for(shown, "timeline.view.to - timeline.view.from < 0.5 * timeline.data.end")
    shown.get_by_role("button", name="All", exact=True).click()
    assert view(shown) == whole


def test_dragging_pans_and_bars_move_with_it(page: Opened) -> None:
    shown = page.page
    shown.evaluate("timeline.set(0, timeline.data.end / 4)")
    settled(shown)
    place = "timeline.runs[0].lanes[0].bars[2].getBoundingClientRect().x"
    before = shown.evaluate(place)
    shown.evaluate("timeline.set(timeline.data.end / 8, timeline.data.end * 3 / 8)")
    box = shown.locator(".stage").bounding_box()
    shown.mouse.move(box["x"] + 400, box["y"] + 90)
    shown.mouse.down()
    shown.mouse.move(box["x"] + 500, box["y"] + 90)
    shown.mouse.move(box["x"] + 400 + shown.evaluate("timeline.inner / 2"), box["y"] + 90)
    shown.mouse.up()
    settled(shown)
    assert view(shown)[0] == pytest.approx(0, abs=shown.evaluate("timeline.data.end / 4 / timeline.inner"))
    assert shown.evaluate(place) == pytest.approx(before, abs=1.5)
    shown.evaluate("timeline.fit()")


def test_dragging_moves_groups_and_places_only_what_comes_into_view(page: Opened) -> None:
    """Else a drawing of thousands of bars would not follow the pointer. Bars are then where a drawing anew has them."""
    shown = page.page
    shown.evaluate("timeline.set(timeline.data.end / 4, timeline.data.end / 2)")
    settled(shown)
    shown.evaluate(
        """window.changed = new Set();
        window.watcher = new MutationObserver((all) => all.forEach((each) => changed.add(each.target)));
        watcher.observe(document.querySelector(".stage svg"), { attributes: true, subtree: true });"""
    )
    shown.evaluate("timeline.pan(0.02)")
    settled(shown)
    changed = "[...changed].filter((each) => each.matches('.moving > rect')).length"
    lanes = shown.evaluate("timeline.runs.flatMap((run) => run.lanes).length")
    assert 0 < shown.evaluate(changed) <= 4 * lanes  # cut at an end, or new there
    shown.evaluate("watcher.disconnect()")
    bars = """timeline.runs.flatMap((run) => run.lanes).flatMap((lane) => lane.bars.filter(
        (bar, at) => lane.starts[at] < timeline.view.to && lane.starts[at] + lane.durations[at] > timeline.view.from)
        .map((bar) => bar.getBoundingClientRect()).flatMap(({ left, right }) => [left, right]))"""
    moved = shown.evaluate(bars)
    shown.evaluate("timeline.resize()")
    settled(shown)
    assert moved == pytest.approx(shown.evaluate(bars), abs=0.2)
    shown.evaluate("timeline.fit()")


def test_two_fingers_zoom_and_one_moves(launched: Any, tmp_path: Path) -> None:
    found = opened(
        launched,
        written(report_of(plans()), tmp_path / "report.html"),
        width=390,
        has_touch=True,
        reduced_motion="reduce",
    )
    shown = found.page
    shown.locator(".stage").scroll_into_view_if_needed()
    box = shown.locator(".stage").bounding_box()
    touches = shown.context.new_cdp_session(shown)

    def touch(kind: str, *places: float) -> None:
        points = [{"x": box["x"] + x, "y": box["y"] + 90, "id": number} for number, x in enumerate(places)]
        touches.send("Input.dispatchTouchEvent", {"type": f"touch{kind}", "touchPoints": points})

    whole = view(shown)
    touch("Start", 180)
    touch("Start", 180, 240)
    for apart in (40, 60):
        touch("Move", 210 - apart, 210 + apart)
    touch("End")
    settled(shown)
    zoomed = view(shown)
    assert zoomed[1] - zoomed[0] == pytest.approx((whole[1] - whole[0]) / 2, rel=0.02)
    between = shown.evaluate("[timeline.time(210), timeline.data.end * (210 - timeline.left) / timeline.inner]")
    assert between[0] == pytest.approx(between[1], rel=0.05)
    touch("Start", 200)
    touch("Move", 180)
    touch("Move", 150)
    touch("End")
    settled(shown)
    by = 50 * (zoomed[1] - zoomed[0]) / shown.evaluate("timeline.inner")
    assert view(shown)[0] - zoomed[0] == pytest.approx(by, rel=0.05)
    assert found.complaints == []


def test_the_keyboard_goes_from_action_to_action_and_to_what_they_wait_for(page: Opened) -> None:
    shown = page.page
    shown.evaluate("timeline.focusOn(null)")
    shown.get_by_role("button", name="Links", exact=True).focus()
    shown.keyboard.press("Tab")
    assert shown.evaluate("document.activeElement.className") == "stage"
    shown.keyboard.press("ArrowRight")
    assert focused(shown).startswith("0F0: forward, devices 0-1; 0 to ")
    assert "waits for nothing: it starts the iteration" in focused(shown)
    shown.keyboard.press("ArrowRight")
    assert focused(shown).startswith("0F1: forward")
    shown.keyboard.press("ArrowDown")
    simulation = simulate(plans()[0])
    first = simulation.orders[2][0]
    assert focused(shown).startswith(f"{simulation.label(first)}: ")
    shown.keyboard.press("w")
    assert re.match(r"\dF0: forward, devices", focused(shown))
    shown.keyboard.press("End")
    assert focused(shown).startswith(simulation.label(simulation.orders[0][-1]))
    shown.keyboard.press("Escape")
    assert focused(shown) == ""


def test_the_critical_path_is_followed_step_by_step(page: Opened) -> None:
    shown = page.page
    simulation = simulate(plans()[0])
    labels = [simulation.label(step.task) for step in simulation.critical_path]
    shown.evaluate("timeline.focusOn(null)")
    shown.locator(".stage").focus()
    for label in labels[:5]:
        shown.keyboard.press("n")
        assert focused(shown).startswith(f"{label}: ")
    shown.keyboard.press("p")
    assert focused(shown).startswith(f"{labels[3]}: ")
    assert shown.locator('[data-toggle="path"]').get_attribute("aria-pressed") == "true"
    settled(shown)
    assert shown.evaluate("document.querySelector('path.path').getAttribute('d').split('L').length") == 2 * len(labels)
    shown.get_by_role("button", name="Critical path").click()


def test_hovering_says_what_an_action_is_and_when(page: Opened) -> None:
    shown = page.page
    shown.evaluate("timeline.fit()")
    settled(shown)
    shown.locator(".stage").scroll_into_view_if_needed()
    box = shown.evaluate(
        "(({x, y, width}) => ({x, y, width}))(timeline.runs[0].lanes[1].bars[4].getBoundingClientRect())"
    )
    shown.mouse.move(box["x"] + box["width"] / 2, box["y"] + 8)
    simulation = simulate(plans()[0])
    task = simulation.orders[2][4]
    tip = shown.locator(".tip")
    assert tip.is_visible()
    assert str(tip.text_content()).startswith(f"{simulation.label(task)}: ")
    shown.mouse.move(5, 5)


def test_hovering_over_a_lanes_name_says_what_its_devices_do(page: Opened) -> None:
    shown = page.page
    shown.locator(".stage").scroll_into_view_if_needed()
    box = shown.locator(".stage").bounding_box()
    shown.mouse.move(box["x"] + 30, box["y"] + shown.evaluate("timeline.rows[1].y") + 10)
    lane = predicted_run(simulate(plans()[0]), "", "").lanes[0]
    assert shown.locator(".tip").text_content() == lane.about
    shown.mouse.move(5, 5)
    assert not shown.locator(".tip").is_visible()


def test_plans_are_switched(page: Opened) -> None:
    shown = page.page
    shown.get_by_role("button", name="B: chain").click()
    assert not shown.locator('[data-plan="A"]').first.is_visible()
    assert shown.locator('[data-plan="B"]').first.is_visible()
    assert shown.evaluate("timeline.visibleRuns().map((run) => run.plan)") == ["B"]
    shown.get_by_role("button", name="All plans").click()
    assert shown.evaluate("timeline.visibleRuns().map((run) => run.plan)") == ["A", "B"]


def test_links_lead_into_the_page(page: Opened) -> None:
    shown = page.page
    shown.locator("[data-plan='B'] [data-lane]").first.click()
    assert focused(shown).startswith("0F0: forward, device 0;")
    stage = shown.locator(".said a")
    assert stage.get_attribute("href") == "#plan-B-stage-0"
    target = shown.locator(".frontier a").first.get_attribute("href")
    assert shown.locator(f"tr{target}").count() == 1


def test_figures_are_those_of_simulate(page: Opened, tmp_path: Path) -> None:
    """Read from the page's tables, as numbers and as they are shown."""
    cells = page.page.evaluate(
        """[...document.querySelectorAll("[data-plan='A'] table, [data-plan='B'] table")].flatMap((table) =>
          [...table.tBodies[0].rows].map((row) => ({
            plan: table.closest("[data-plan]").dataset.plan, caption: table.caption.textContent,
            head: [...table.tHead.rows[0].cells].map((cell) => cell.textContent),
            cells: [...row.cells].map((cell) => cell.dataset.value ?? cell.textContent) })))"""
    )
    for letter, plan in zip("AB", plans(), strict=True):
        write_file(plan, str(tmp_path / "plan.json"))
        figures = json.loads(pipeplan("simulate", tmp_path / "plan.json", "--json").stdout)
        found: dict[str, dict[int, dict[str, str]]] = {}
        for row in cells:
            if row["plan"] == letter and row["head"][0] == "device":
                named = dict(zip(row["head"], row["cells"], strict=True))
                first, _, last = named["device"].partition("-")
                for device in range(int(first), int(last or first) + 1):
                    found.setdefault(row["caption"], {})[device] = named
        waits, memory = found["What each device waits for, in sum"], found["Memory of each device at its peak"]
        assert len(waits) == len(memory) == len(figures["devices"])
        for device, known in enumerate(figures["devices"]):
            assert int(waits[device]["busy"]) == known["busy_ns"]
            assert int(waits[device]["idle"]) == known["idle_ns"]
            causes = ("warmup", "message", "memory", "order", "imbalance")
            assert sum(int(waits[device][cause]) for cause in causes) == known["idle_ns"]
            assert {cause: int(waits[device][cause]) for cause in causes} == known["idle_by_cause_ns"]
            assert int(memory[device]["peak"]) == known["peak_bytes"]
            assert int(memory[device]["in flight"]) == known["in_flight"]
        path = page.page.evaluate(
            """(at) => timeline.runs[at].path.map(
              ([lane, bar]) => timeline.words({run: timeline.runs[at], lane, bar})[0])""",
            "AB".index(letter),
        )
        assert [words.partition(":")[0] for words in path] == figures["critical_path"]["actions"]


# What they see ----------------------------------------------------------------------------------------------------


def serious(page: Any) -> list[str]:
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [
        f"{each['id']}: {each['nodes'][0]['html'][:200]}" for each in found if each["impact"] in ("serious", "critical")
    ]


LOOKS = list(itertools.product((1280, 390), ("light", "dark")))


@slow_but("width, scheme", LOOKS, lambda each: each == (390, "light"))
def test_axe_finds_nothing_serious_and_nothing_is_wider_than_the_page(
    launched: Any, tmp_path: Path, width: int, scheme: str
) -> None:
    report = report_of(plans(), (), frontier())
    page = opened(launched, written(report, tmp_path / "report.html"), width=width, color_scheme=scheme).page
    assert serious(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") == width


@pytest.mark.parametrize(("motion", "behavior"), [("reduce", "auto"), ("no-preference", "smooth")])
def test_nothing_glides_for_readers_who_want_less_motion(
    launched: Any, tmp_path: Path, motion: str, behavior: str
) -> None:
    path = written(report_of([chain_plan(2, 4)]), tmp_path / "report.html")
    page = opened(launched, path, reduced_motion=motion).page
    assert page.evaluate("getComputedStyle(document.documentElement).scrollBehavior") == behavior
    moving = """[...document.querySelectorAll("*")].filter((each) => { const { transitionDuration, animationName } =
      getComputedStyle(each); return transitionDuration !== "0s" || animationName !== "none"; }).length"""
    assert page.evaluate(moving) == 0
    assert page.evaluate("document.getAnimations().length") == 0


@slow_but("canvas", [False, True], False.__eq__)
def test_paper_has_all_of_the_timeline_in_light_colours(launched: Any, tmp_path: Path, *, canvas: bool) -> None:
    """Printed from a dark screen on which a part is in view; what is on screen afterwards is as before."""
    report = report_of([many_devices()] if canvas else plans(), (), frontier())
    page = opened(launched, written(report, tmp_path / "report.html"), color_scheme="dark").page
    page.evaluate("timeline.set(timeline.data.end / 2, timeline.data.end * 3 / 4)")
    settled(page)
    zoomed, before = view(page), page.evaluate(CORNER)
    page.evaluate(
        """window.addEventListener("beforeprint", () => { const { width, height } = timeline; window.printed = {
          view: [timeline.view.from, timeline.view.to], corner: (CORNER),
          painted: timeline.painter.canvas ? timeline.painter.canvas.height / timeline.painter.ratio : height,
          first: timeline.painter.canvas ? 0 : timeline.runs[0].lanes[0].bars[0].getBBox().x - timeline.left, height,
          colour: getComputedStyle(document.documentElement).getPropertyValue("--page").trim() }; });""".replace(
            "CORNER", CORNER
        )
    )
    page.pdf(path=tmp_path / "report.pdf", format="A4")
    printed = page.evaluate("window.printed")
    assert printed["view"] == [0, page.evaluate("timeline.data.end")]
    assert printed["painted"] == pytest.approx(printed["height"], abs=1)
    assert printed["first"] == pytest.approx(0, abs=0.1)
    assert printed["colour"] == "#ffffff"
    if canvas:
        assert printed["corner"] == [255, 255, 255]
    assert view(page) == pytest.approx(zoomed)
    assert page.evaluate(CORNER) == before
    page.emulate_media(media="print")
    for hidden in ("nav", ".tools", ".tip", "#timeline-help"):
        assert not page.locator(hidden).first.is_visible()
    page.set_viewport_size({"width": 718, "height": 1000})  # of A4 between its margins
    assert page.evaluate("document.documentElement.scrollWidth") == 718


CORNER = """timeline.painter.canvas
  ? [...timeline.painter.canvas.getContext("2d").getImageData(1, 1, 1, 1).data].slice(0, 3) : null"""


@pytest.mark.slow
def test_a_canvas_has_what_the_svg_has(launched: Any, tmp_path: Path) -> None:
    """Above 4,000 bars."""
    found = opened(launched, written(report_of([many_devices()]), tmp_path / "report.html"), reduced_motion="reduce")
    page = found.page
    assert page.locator(".stage canvas").count() == 1
    assert page.locator(".stage svg").count() == 0
    assert page.evaluate("timeline.runs[0].lanes.length") == 32
    page.locator(".stage").focus()
    page.keyboard.press("ArrowRight")
    assert focused(page).startswith("0F0: forward, device 0; 0 to 10ns")
    page.evaluate("timeline.set(0, timeline.data.end / 40)")
    settled(page)
    colours = """(() => { const c = document.querySelector("canvas"), top = timeline.geometry.top + 10;
      const width = c.width / 2;
      const pixels = c.getContext("2d").getImageData(0, 0, width, top + 1).data;
      const hex = (at) => "#" + [...pixels.slice(at, at + 3)].map((v) => v.toString(16).padStart(2, "0")).join("");
      const places = (y, from) => [...Array(width - from).keys()].map((x) => 4 * (y * width + from + x));
      const row = (y, from) => [...new Set(places(y, from).map(hex))];
      return [row(49, 0), row(top, timeline.left + 6)]; })()"""
    legend, lane = page.evaluate(colours)
    assert {COLOURS["F"][0], COLOURS["B"][0]} <= {*legend}
    assert COLOURS["F"][0] in lane
    assert len(lane) > 2
    assert found.complaints == []
    assert serious(page) == []


def many_devices(num_devices: int = 32, num_microbatches: int = 72) -> Plan:
    """1F1B without the helpers' slow replay: the programs are all that simulation reads."""
    small, full = chain_plan(num_devices, 1), chain_workload(num_devices, num_microbatches)
    programs = tuple(tuple(f"{id_}{m}" for id_, m in order) for order in one_f_one_b(full))
    return small.model_copy(update={"num_microbatches": num_microbatches, "programs": programs})


# What no file makes it do -----------------------------------------------------------------------------------------


def test_names_that_are_scripts_do_nothing(launched: Any, tmp_path: Path) -> None:
    plan = chain_plan(2, 4)
    stages = tuple(
        stage.__class__(**{**{name: getattr(stage, name) for name in stage.__dataclass_fields__}, "blocks": (SCRIPT,)})
        for stage in plan.stages
    )
    made = plan.provenance.model_copy(update={"command": SCRIPT, "profile": SCRIPT, "choices": {SCRIPT: SCRIPT}})
    hostile = plan.model_copy(update={"name": SCRIPT, "placement": SCRIPT, "stages": stages, "provenance": made})
    point = FrontierPoint(2, 1000, 1000, SCRIPT)
    found = FrontierResult(SCRIPT, "all", SCRIPT, 4, True, 0.0, (point,), (), yardstick=frontier().yardstick)
    page = opened(launched, written(report_of([hostile, hostile], (), found, SCRIPT), tmp_path / "report.html"))
    assert page.page.title() != "hacked"
    assert page.page.locator("main img, header img").count() == 0
    assert SCRIPT in page.page.locator("h1").text_content()
    page.page.locator(".stage").focus()
    page.page.keyboard.press("ArrowRight")
    page.page.locator(".stage").hover()
    assert page.requests == [page.page.url]
    assert page.complaints == []


def test_a_measured_run_stands_beside_its_prediction(launched: Any, tmp_path: Path) -> None:
    plan = chain_plan(2, 4, forward=2_000_000, backward=4_000_000, lag=500_000)
    text = (GOLDEN / "measured_chain.trace.json").read_text(encoding="utf-8").replace("PLAN_SHA256", sha256_of(plan))
    (tmp_path / "run.trace").write_text(text, encoding="utf-8")
    write_file(plan, str(tmp_path / "plan.json"))
    report = report_of([plan], [str(tmp_path / "run.trace")])
    page = opened(launched, written(report, tmp_path / "report.html")).page
    assert page.evaluate("timeline.runs.map((run) => run.lanes.filter((lane) => !lane.link).length)") == [2, 2]
    compared = ("--measured", tmp_path / "run.trace", "--json")
    figures = json.loads(pipeplan("simulate", tmp_path / "plan.json", *compared).stdout)["measured"]
    row = page.locator("tr", has_text="measured, the median").locator("td").first
    assert float(str(row.get_attribute("data-value"))) == figures["iteration_ns"]
