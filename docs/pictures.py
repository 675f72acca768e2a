"""Draws the pages' pictures with pipeplan itself.

    python docs/pictures.py [NAME ...]

writes all of them into ``docs/pictures``, or those whose name contains one of the given texts. Searches are
deterministic, so that a picture is the same each time; a test compares them with the files.
"""

from __future__ import annotations

import io
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

from rich.console import Console
from rich.text import Text

from pipeplan.cli.main import main
from pipeplan.files import PlacedStage, Placement, read_plan, write_file
from pipeplan.reporting.drawing.svg import timelines_svg
from pipeplan.simulator.simulation import Simulation, simulate

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "pictures"
GPT2 = str(ROOT / "profiles" / "gpt2-124m-cpu.json")


def pipeplan(*arguments: str) -> str:
    """Run the command in this process; what it printed."""
    out, err = io.StringIO(), io.StringIO()
    with patch.object(sys, "argv", ["pipeplan", *arguments]), redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as ended:
            code = ended.code
    if code:
        raise RuntimeError(err.getvalue())
    return out.getvalue()


def searched(profile: str, *flags: str) -> Simulation:
    """The plan of a deterministic search, simulated."""
    pipeplan("search", profile, *flags, "--deterministic", "--time-limit", "3s", "-o", "plan.json")
    return simulate(read_plan("plan.json"))


def shape(name: str, *flags: str) -> str:
    """The file of a shape of the literature."""
    pipeplan("example", f"shape-{name}", *flags, "-o", f"{name}.json")
    return f"{name}.json"


def known_schedules() -> str:
    """The same 4 samples: in one piece, as GPipe does, and by 1F1B."""
    whole = shape("v", "--forward", "4ms", "--backward", "8ms")
    naive = searched(whole, "--scheduler", "gpipe", "--microbatches", "1")
    parts = shape("v", "--forward", "1ms", "--backward", "2ms")
    runs = {"One piece: a device waits for the one before": naive}
    for name, title in (("gpipe", "GPipe: in micro-batches"), ("1f1b", "1F1B: backward as soon as possible")):
        runs[title] = searched(parts, "--scheduler", name, "--microbatches", "4")
    return timelines_svg(runs)


def zero_bubble() -> str:
    """1F1B with backward whole, then with weight gradients apart, then with two stages on each device as a V."""
    times = ("--forward", "1ms", "--input-grad", "1ms", "--weight-grad", "1ms")
    chain, v = shape("v", *times), shape("zbv", *times)
    return timelines_svg(
        {
            "1F1B, backward in one piece": searched(chain, "--scheduler", "1f1b", "--microbatches", "8"),
            "ZB-H2: weight gradients fill the gaps": searched(chain, "--scheduler", "zb-h2", "--microbatches", "8"),
            "ZB-V: two stages on each device": searched(v, "--scheduler", "zb-v", "--microbatches", "8"),
        }
    )


def repetend() -> str:
    """What repeats, in a frame: of a chain, and where an embedding stands on all devices."""
    return timelines_svg(
        {
            "A chain of four stages, 12 micro-batches": simulate(read_plan(_plan("tessel-v")), 12),
            "With an embedding on all devices": simulate(read_plan(_plan("tessel-m")), 12),
        }
    )


def before_after() -> str:
    """GPT-2 124M on four devices of 3 GB that keep all state: 1F1B with as many layers on each, and what is found."""
    asked = ("--memory", "3GB", "--mini-batch", "16", "--zero", "0")
    write_file(_even_layers(), "even.json")
    before = searched(GPT2, "--placement", "even.json", "--scheduler", "1f1b", "--microbatch-size", "1", *asked)
    after = searched(GPT2, "--devices", "4", *asked)
    faster = before.iteration_ns / after.iteration_ns
    return timelines_svg(
        {
            "Before: 1F1B, three layers on each device": before,
            f"After: the plan that pipeplan search finds, {faster:.2f} times as fast": after,
        }
    )


def _even_layers() -> Placement:
    """Three layers on each of four devices, the embedding before the first and the head after the last."""
    layers = [f"layer{number}.{half}" for number in range(12) for half in ("attention", "ffn")]
    blocks = [layers[start : start + 6] for start in range(0, 24, 6)]
    blocks[0].insert(0, "embedding")
    blocks[-1].append("head")
    stages = tuple(PlacedStage(blocks=tuple(each), devices=(device,)) for device, each in enumerate(blocks))
    return Placement(strategy="one-to-one", num_devices=4, stages=stages)


def _plan(name: str) -> str:
    return str(ROOT / "plans" / f"{name}.json")


def first_screen(columns: int) -> str:
    """The first 24 lines that ``pipeplan search`` prints on a terminal."""
    request = ("--devices", "4", "--memory", "3GB", "--placement", "v-shape", "--mini-batch", "16")
    command = ("search", "profiles/gpt2-124m-cpu.json", *request)
    (Path.cwd() / "profiles").symlink_to(ROOT / "profiles")
    terminal = {"COLUMNS": str(columns), "FORCE_COLOR": "1", "TERM": "xterm-256color"}
    with patch.dict(os.environ, terminal):
        printed = pipeplan(*command, "--deterministic", "--time-limit", "3s")
    (Path.cwd() / "profiles").unlink()
    console = Console(record=True, width=columns, file=io.StringIO(), color_system="256", force_terminal=True)
    console.print(Text("$ " + " ".join(["pipeplan", *command])), soft_wrap=False)
    for line in printed.splitlines()[:24]:
        console.print(Text.from_ansi(line), no_wrap=True, crop=True)
    return console.export_svg(title=f"{columns} columns", unique_id=f"search-{columns}")


PICTURES: dict[str, Callable[[], str]] = {
    "known-schedules": known_schedules,
    "zero-bubble": zero_bubble,
    "repetend": repetend,
    "before-after": before_after,
    "search-80": lambda: first_screen(80),
    "search-140": lambda: first_screen(140),
}


def draw(name: str) -> str:
    """The text of a picture's SVG, drawn in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        return PICTURES[name]()


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for each in PICTURES:
        if any(text in each for text in sys.argv[1:] or [""]):
            (FOLDER / f"{each}.svg").write_text(draw(each), encoding="utf-8")
            print(each)
