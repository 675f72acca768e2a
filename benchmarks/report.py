"""How large the report's page is and how quickly it moves: the table of docs/report.md.

    python benchmarks/report.py [--devices 4 62 64 1024] [--microbatches 16 256] [--unfolded]

1F1B with one stage per device and messages, in Chromium of the distribution's packages, headless and without a GPU, in
a window of 1,280 by 900 pixels. 1,024 devices are 64 stages of 16 replicas, whose devices share a lane each, or with
``--unfolded`` 1,024 stages and lanes; 62 devices with 16 micro-batches are just below the number of bars above which
there is a canvas. *First frame* is from the start of navigation to the first frame of the timeline that
was painted. *Dragging* moves the pointer for two seconds with a quarter of the whole time in view; a frame takes as
long as the browser needs from one animation frame to the next.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tables import machine, markdown

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from pipeplan import _api
from pipeplan.costs import build_workload
from pipeplan.examples import ShapeCosts, shape
from pipeplan.files import Plan
from pipeplan.planning.build_plan import assemble
from pipeplan.schedule.classic import CLASSIC
from pipeplan.workload.bounds import period_bound, weak_iteration_bound
from pipeplan.workload.one_microbatch import OneMicrobatch
from pipeplan.workload.task_graph import task_graph
from support.browser import browser, why_not

HEADINGS = (
    *("devices", "micro-batches", "bars and messages", "page", "made in", "first frame"),
    *("dragging: median frame", "95 % of frames below"),
)

_DRAG = """async (seconds) => {
  const stage = document.querySelector(".stage"), box = stage.getBoundingClientRect(), times = [];
  const event = (name, x) => stage.dispatchEvent(new PointerEvent(name,
    { pointerId: 1, clientX: x, clientY: box.y + 100, bubbles: true, pointerType: "pen" }));
  stage.setPointerCapture = () => {};
  timeline.zoom(4);
  event("pointerdown", box.x + 600);
  const begun = performance.now();
  let before = begun;
  while (performance.now() - begun < 1000 * seconds) {
    await new Promise(requestAnimationFrame);
    const now = performance.now();
    times.push(now - before);
    before = now;
    event("pointermove", box.x + 600 + 300 * Math.sin((now - begun) / 300));
  }
  event("pointerup", box.x + 600);
  return times.slice(1).sort((a, b) => a - b);
}"""


@dataclass(frozen=True)
class Size:
    """A row: ``replicas`` devices share each stage."""

    devices: int
    microbatches: int
    replicas: int = 1

    @property
    def name(self) -> str:
        """The devices in words."""
        return f"{self.devices:,}" + (f" ({self.devices // self.replicas} lanes)" if self.replicas > 1 else "")


def plan_of(size: Size) -> Plan:
    """1F1B on a chain, each stage on its devices."""
    stages = size.devices // size.replicas
    profile = shape("v", stages, costs=ShapeCosts(100_000, 200_000, None, None, comm_ns=10_000, activation_bytes=2**20))
    placement = profile.placement
    assert placement is not None
    placed = tuple(
        stage.model_copy(
            update={
                "devices": tuple(range(number * size.replicas, (number + 1) * size.replicas)),
                "replicas": size.replicas,
            }
        )
        for number, stage in enumerate(placement.stages)
    )
    placement = placement.model_copy(update={"num_devices": size.devices, "stages": placed})
    workload = build_workload(profile, placement, num_microbatches=size.microbatches, microbatch_size=size.replicas)
    problem, graph = OneMicrobatch.of(workload), task_graph(workload)
    orders = CLASSIC["1f1b"].orders(problem, graph)
    return assemble(graph, orders, weak_iteration_bound(workload), period_bound(problem), "1f1b")


def row(launched: Any, size: Size, folder: Path) -> tuple[str, ...]:
    """Make the page and move it."""
    plan = plan_of(size)
    begun = time.perf_counter()
    text = _api.report([plan]).html
    made = time.perf_counter() - begun
    path = folder / "report.html"
    path.write_text(text, encoding="utf-8")
    page = launched.new_context(viewport={"width": 1280, "height": 900}).new_page()
    page.goto(path.as_uri())
    page.wait_for_function("timeline.frameTimes.length > 0")
    first = page.evaluate("new Promise((done) => requestAnimationFrame(() => done(timeline.firstFrame)))")
    times = page.evaluate(_DRAG, 2)
    bars = page.evaluate("timeline.runs.flatMap((run) => run.lanes).reduce((sum, lane) => sum + lane.starts.length, 0)")
    page.close()
    return (
        size.name,
        str(size.microbatches),
        f"{bars:,}",
        f"{len(text.encode()) / 1e6:.2f} MB",
        f"{made:.1f} s",
        f"{first / 1000:.2f} s",
        f"{times[len(times) // 2]:.0f} ms",
        f"{times[int(0.95 * len(times))]:.0f} ms",
    )


def main() -> None:
    """Print a row for each size as it comes, then the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[4, 62, 64, 1024])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[16, 256])
    parser.add_argument("--unfolded", action="store_true", help="1,024 devices with a stage each")
    asked = parser.parse_args()
    if reason := why_not():
        raise SystemExit(reason)
    sizes = [
        Size(devices, count, 16 if devices == 1024 and not asked.unfolded else 1)
        for devices in asked.devices
        for count in asked.microbatches
    ]
    rows = []
    with browser() as launched, tempfile.TemporaryDirectory() as folder:
        for size in sizes:
            rows.append(row(launched, size, Path(folder)))
            print(*rows[-1], sep=" | ", flush=True)
    print(machine())
    print(markdown(HEADINGS, rows))


if __name__ == "__main__":
    main()
