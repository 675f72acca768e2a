"""How soon the command line answers: wall times of ``pipeplan --help``, its verbs' help, and ``import pipeplan``.

    python benchmarks/startup.py [--repeats 20] [--json FILE]

Every run is a process of its own; ``python -c pass`` is what Python itself takes. Beside the wall times stand the
processor's, which a busy machine hardly changes, and which of the heavy packages a command imports.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from tables import machine, markdown, note

HEAVY = ("ortools", "torch", "numpy", "networkx", "pydantic", "rich")
COMMANDS = {
    "python -c pass": ("-c", "pass"),
    "import pipeplan": ("-c", "import pipeplan"),
    "pipeplan --help": ("-m", "pipeplan", "--help"),
    "pipeplan search --help": ("-m", "pipeplan", "search", "--help"),
    "pipeplan example shape-v": ("-m", "pipeplan", "example", "shape-v"),
}


def milliseconds(arguments: tuple[str, ...], repeats: int) -> tuple[list[float], list[float]]:
    """Wall and processor time of each of the runs, after one that warms up."""
    wall, processor = [], []
    for _ in range(repeats + 1):
        begun, before = time.perf_counter(), _processor_seconds()
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
        wall.append((time.perf_counter() - begun) * 1e3)
        processor.append((_processor_seconds() - before) * 1e3)
    return wall[1:], processor[1:]


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def imported(arguments: tuple[str, ...]) -> list[str]:
    """The heavy packages that a run imports."""
    done = subprocess.run([sys.executable, "-X", "importtime", *arguments], check=True, capture_output=True, text=True)
    names = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    return [name for name in HEAVY if name in names]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, dict[str, object]] = {}
    for name, arguments in COMMANDS.items():
        wall, processor = milliseconds(arguments, options.repeats)
        found[name] = {
            "median_ms": round(median(wall), 1),
            "least_ms": round(min(wall), 1),
            "processor_ms": round(median(processor), 1),
            "imports": imported(arguments),
        }
        note(f"{name}: {found[name]}")
    rows = [
        [name, *(", ".join(x) if isinstance(x, list) else str(x) for x in each.values())]
        for name, each in found.items()
    ]
    print(
        markdown(["command", "median ms", "least ms", "processor ms", "of the heavy packages it imports"], rows),
        end="\n\n",
    )
    print(f"Of {options.repeats} runs; {machine()}.")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
