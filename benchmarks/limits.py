"""Whether time limits hold, when there is a first plan, and how soon a signal ends a search: one process for each row.

``wall`` is from the start of the process until the plan, or the table, begins to be written: its first output on stdout
or the plan's file. ``first plan`` is when the search first knew one, after the profile was read; ``stop`` is from a
SIGTERM, sent at half of the limit, until the same output begins. A row without a plan says how it ended.

    python benchmarks/limits.py [--only PART] [--quick] [--list]
"""

from __future__ import annotations

import argparse
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tables import machine, markdown, note

from pipeplan.examples import shape
from pipeplan.examples.models import model
from pipeplan.files import Block, Cluster, CostRow, Edge, Profile, Source, write_file
from pipeplan.files.cluster import DeviceKind, LinkLevel

MADE_UP = Source(method="literature", reference="made up to measure limits")

MARK = re.compile(r"LIMITS (\w+) ([\d.]+)")

CHILD = """
import sys, time
BEGAN = time.monotonic()
def mark(what):
    print(f"LIMITS {what} {time.monotonic():.3f}", file=sys.stderr, flush=True)
from pipeplan import __main__
__main__.BEGAN = BEGAN
from pipeplan import _api
import pipeplan.files.read_write as files
read = files.read_profile
def read_profile(*given):
    found = read(*given)
    mark("read")
    return found
import pipeplan.files
pipeplan.files.read_profile = files.read_profile = read_profile
def watched(verb):
    own = getattr(_api, verb)
    def run(request, **how):
        told = []
        progress = how.get("progress")
        def hear(what, best, *rest):
            if best and not told:
                told.append(mark("first"))
            elif not best:
                mark("none")
            if progress is not None:
                progress(what, best, *rest)
        if verb != "frontier":
            how["progress"] = hear
        try:
            return own(request, **how)
        finally:
            mark("done")
    setattr(_api, verb, run)
for verb in ("search", "compare", "frontier", "tune"):
    if hasattr(_api, verb):
        watched(verb)
sys.argv = ["pipeplan", *sys.argv[1:]]
__main__.main()
"""
"""Runs the command line and says on stderr when something happened. ``done`` is when what is written is known."""


@dataclass(frozen=True, slots=True)
class Row:
    """A request, its inputs made in the working folder, and its limit in seconds."""

    name: str
    arguments: str
    limit: int
    quick: bool = False


def chain(num_blocks: int) -> Profile:
    """Blocks that are all a little different."""
    blocks = tuple(
        Block(
            id=f"b{number}",
            operator="layer",
            parameter_bytes=10**6 * (1 + number % 7),
            costs=tuple(
                CostRow(
                    microbatch_size=size,
                    forward_ns=size * (1000 + 37 * (number % 11)),
                    backward_ns=size * (2000 + 53 * (number % 13)),
                    activation_bytes=size * 10**5,
                )
                for size in (1, 2)
            ),
        )
        for number in range(num_blocks)
    )
    edges = tuple(
        Edge(source=f"b{number}", target=f"b{number + 1}", bytes_per_sample=10**4) for number in range(num_blocks - 1)
    )
    return Profile(name=f"chain-{num_blocks}", source=MADE_UP, blocks=blocks, edges=edges)


def cluster(num_devices: int, memory_bytes: int) -> Cluster:
    levels = (
        LinkLevel(name="node", group_size=8, latency_ns=5_000, bandwidth_bytes_per_s=300 * 10**9),
        LinkLevel(name="network", group_size=num_devices, latency_ns=20_000, bandwidth_bytes_per_s=25 * 10**9),
    )
    kind = DeviceKind(name="device", count=num_devices, memory_bytes=memory_bytes)
    return Cluster(name=f"{num_devices} devices", source=MADE_UP, devices=(kind,), levels=levels)


INPUTS: dict[str, Callable[[], Profile | Cluster]] = {
    "nn32": lambda: shape("nn", 32),
    "mllm64": lambda: shape("mllm", 64),
    "gpt2-1.3b": lambda: model("gpt2-1.3b"),
    "chain2000": lambda: chain(2_000),
    "chain10000": lambda: chain(10_000),
    "large": lambda: cluster(1_024, 80 * 10**9),
    "small": lambda: cluster(1_024, 300 * 10**6),
}

ROWS = (
    Row("shared blocks, 32 devices", "search nn32.json --microbatches 64", 2, quick=True),
    Row("shared blocks, 64 devices", "search mllm64.json --microbatches 128", 60),
    Row("frontier of plans", "frontier gpt2-1.3b.json --devices 2,4,8,16 --memory 40GB --plans", 120),
    Row("nearly infeasible memory", "search gpt2-1.3b.json --devices 16 --memory 6GB", 30),
    Row("compare, 16 devices", "compare gpt2-1.3b.json --devices 16", 10, quick=True),
    Row("tune, 16 devices", "search gpt2-1.3b.json --devices 16 --scheduler rules", 10, quick=True),
    Row("2,000 blocks, 1,024 devices of 80 GB", "search chain2000.json --cluster large.json", 10, quick=True),
    Row("2,000 blocks, 1,024 devices of 0.3 GB", "search chain2000.json --cluster small.json", 30),
    Row("10,000 blocks, 8 devices", "search chain10000.json --devices 8", 10, quick=True),
    Row("10,000 blocks, 1,024 devices of 80 GB", "search chain10000.json --cluster large.json", 30),
)


def llama(folder: Path) -> Row | None:
    """Llama 70B, estimated; None where torch or transformers is missing."""
    shape_of_it = (
        "LlamaConfig(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, "
        "num_key_value_heads=8)"
    )
    how = [*["profile"], shape_of_it, *["--estimate", "--device", "h100-80gb", "--microbatch", "1", "-o", "llama.json"]]
    done = subprocess.run([sys.executable, "-m", "pipeplan", *how], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        note(f"no row for Llama 70B: {done.stderr.strip()[-200:]}")
        return None
    return Row("Llama 70B, estimated, 64 devices", "search llama.json --devices 64 --memory 80GB", 30)


def timed(row: Row, folder: Path, signal_after: float | None = None) -> tuple[dict[str, float], float, str]:
    """When what was marked happened, the seconds from the signal until what is written is known, and how it ended."""
    output = [] if row.arguments.startswith("compare") else ["-o", "out.json"]
    command = [sys.executable, "-c", CHILD, *row.arguments.split(), "--time-limit", f"{row.limit}s", *output]
    begun = time.monotonic()
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=os.environ
    )
    sent = None
    if signal_after is not None:
        try:
            process.wait(signal_after)
        except subprocess.TimeoutExpired:
            sent = time.monotonic() - begun
            process.send_signal(signal.SIGTERM)
    _, errors = process.communicate()
    marks: dict[str, float] = {}
    for what, when in MARK.findall(errors):
        marks.setdefault(what, float(when) - begun)
    left = [line for line in errors.splitlines() if not MARK.match(line)]
    ended = "" if process.returncode == 0 else f"exit {process.returncode}: {' '.join(left)[-80:]}"
    return marks, math.nan if sent is None else marks.get("done", math.nan) - sent, ended


def measured(row: Row, folder: Path) -> tuple[str, ...]:
    marks, _, ended = timed(row, folder)
    stop = math.nan if row.limit < 10 else timed(row, folder, row.limit / 2)[1]  # it may not have begun by then
    read = marks.get("read", math.nan)
    first = marks.get("first", math.nan) - read
    none = f"none known after {marks['none'] - read:.1f}" if "none" in marks else ""
    cells = (
        row.name,
        f"{row.limit}",
        f"{marks.get('done', math.nan):.1f}",
        f"{first:.1f}{f' ({none})' if none else ''}",
        f"{stop:.2f}",
        ended,
    )
    note(" | ".join(cells))
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a part of a row's name")
    parser.add_argument("--quick", action="store_true", help="rows of at most 10 seconds alone")
    parser.add_argument("--list", action="store_true", help="name the rows, measure nothing")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wanted = [row for row in ROWS if options.only in row.name and (row.quick or not options.quick)]
        if options.list:
            print("\n".join(f"{row.limit:4} s  {row.name}: {row.arguments}" for row in wanted))
            return
        for stem, make in INPUTS.items():
            if any(f"{stem}.json" in row.arguments for row in wanted):
                write_file(make(), str(folder / f"{stem}.json"))
        if not options.quick and options.only in "Llama 70B, estimated, 64 devices" and (row := llama(folder)):
            wanted.append(row)
        rows = [measured(row, folder) for row in wanted]
    header = ("request", "limit, s", "wall, s", "first plan, s after reading", "stop, s", "ended")
    print(markdown(header, rows))
    print(f"\n{machine()}.")


if __name__ == "__main__":
    main()
