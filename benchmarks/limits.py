"""Whether time limits hold, when there is a first plan, and how soon a signal ends a search: one process for each row.

``until known`` is from the start of the process until all that is written is known. ``first plan`` is when the search
first knew a schedule, and by which all of it is a plan, after the profile was read, with the seconds that reading took
where requests are larger; ``stop`` is from a signal until what is written is known, in runs of their own: a SIGTERM
at half of the limit, and in the rows whose limits once did not hold a SIGINT at a quarter and a SIGHUP at nine tenths.
Every plan that a run wrote is checked, and of a comparison that it has rows. A row without a plan says how it ended;
one that takes more than ``--most`` seconds is killed, and not interrupted.

With ``--work`` all seconds are those that the command's process works, on all its threads, and its limit is of these,
too: a busy machine makes them little longer. Nothing is interrupted then.

    python benchmarks/limits.py [--only PART] [--quick] [--list] [--work] [--llama PROFILE] [--state FILE]
    python benchmarks/limits.py --source OTHER/CHECKOUT --state before.json
    python benchmarks/limits.py --state now.json --before before.json
    python benchmarks/limits.py --state now.json --minutes 8   # again until it says that nothing is left
    python benchmarks/limits.py --state now.json --minutes 0 --page docs/limits.md

With ``--state`` rows are kept as they are measured, and those that are there are not measured again; ``--minutes`` ends
before a row that would take longer. ``--source`` measures another checkout, of whatever version; ``--before`` has its
rows in the table. ``--page docs/limits.md`` prints the page's table with what was measured in it, to be put there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tables import machine, markdown, note

from pipeplan.examples import shape
from pipeplan.examples.models import model
from pipeplan.files import Block, Cluster, CostRow, Edge, Profile, Source
from pipeplan.files.cluster import DeviceKind, LinkLevel

MADE_UP = Source(method="literature", reference="made up to measure limits")

MARK = re.compile(r"LIMITS (\w+) ([\d.]+)")

CHILD = """
import os, sys, time
if "LIMITS_OF_WORK" in os.environ:
    time.monotonic = time.process_time
BEGAN = time.monotonic()
def mark(what):
    print(f"LIMITS {what} {time.monotonic():.3f}", file=sys.stderr, flush=True)
from pipeplan import __main__
__main__.BEGAN = BEGAN
from pipeplan import _api
import pipeplan.files.read_write as files
read = files.read_profile
def read_profile(*given):
    mark("open")
    found = read(*given)
    mark("read")
    return found
import pipeplan.files
pipeplan.files.read_profile = files.read_profile = read_profile
def watched(verb):
    own = getattr(_api, verb)
    def run(request, **how):
        watch_plans()
        told = []
        progress = how.get("progress")
        def hear(what, best, *rest):
            if best and not told:
                told.append(mark("first"))
            elif not (best or rest[0]):
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
def watch_plans():
    import pipeplan.planning.steps as steps
    planned = steps.planned
    def made(*given):
        found = planned(*given)
        mark("made")
        return found
    steps.planned = made
sys.argv = ["pipeplan", *sys.argv[1:]]
if hasattr(__main__, "command"):
    __main__.command()
elif hasattr(__main__, "main"):  # older
    __main__.main()
else:
    from pipeplan.cli.main import main
    main()
"""
"""Runs the command line and says on stderr when something happened. ``done`` is when what is written is known."""


_TERM = ((0.5, signal.SIGTERM),)
_ALL = ((0.25, signal.SIGINT), *_TERM, (0.9, signal.SIGHUP))


@dataclass(frozen=True, slots=True)
class Row:
    """A request, its inputs made in the working folder, and its limit in seconds.

    One of more than 10,000 blocks is ``larger`` than those of which a first plan is promised within three seconds.
    """

    name: str
    arguments: str
    limit: int
    quick: bool = False
    larger: bool = False
    signals: tuple[tuple[float, signal.Signals], ...] = _TERM
    """By which share of the limit a run is sent what; one with a limit below 10 s is sent nothing."""

    @property
    def interrupted(self) -> tuple[tuple[float, signal.Signals], ...]:
        """The signals that runs of it are sent, each with the seconds until it is."""
        return tuple((self.limit * share, sent) for share, sent in self.signals) if self.limit >= 10 else ()


def chain(num_blocks: int, shards: tuple[int, ...] = (1,), contexts: tuple[int, ...] = (1,)) -> Profile:
    """Blocks that are all a little different, each whole or on several devices, with sequences whole or in parts."""
    blocks = tuple(
        Block(
            id=f"b{number}",
            operator="layer",
            parameter_bytes=10**6 * (1 + number % 7),
            costs=tuple(
                CostRow(
                    microbatch_size=size,
                    shards=each,
                    context=parts,
                    forward_ns=size * (1000 + 37 * (number % 11)) // (each * parts),
                    backward_ns=size * (2000 + 53 * (number % 13)) // (each * parts),
                    activation_bytes=size * 10**5 // (each * parts),
                )
                for size in (1, 2)
                for each in shards
                for parts in contexts
            ),
        )
        for number in range(num_blocks)
    )
    edges = tuple(
        Edge(source=f"b{number}", target=f"b{number + 1}", bytes_per_sample=10**4) for number in range(num_blocks - 1)
    )
    return Profile(name=f"chain-{num_blocks}", source=MADE_UP, blocks=blocks, edges=edges)


def layers(profile: Profile) -> Profile:
    """The same with names that say which layer a block is of, two in each, between an embedding and a head."""
    count = len(profile.blocks)
    inner = [f"layers.{number // 2}.{('attention', 'ffn')[number % 2]}" for number in range(count - 2)]
    names = dict(zip((block.id for block in profile.blocks), ["embedding", *inner, "head"], strict=True))
    blocks = (block.model_copy(update={"id": names[block.id]}) for block in profile.blocks)
    ends = ({"source": names[edge.source], "target": names[edge.target]} for edge in profile.edges)
    edges = (edge.model_copy(update=own) for edge, own in zip(profile.edges, ends, strict=True))
    return profile.model_copy(update={"blocks": tuple(blocks), "edges": tuple(edges)})


def forwards(profile: Profile) -> Profile:
    """The same for inference: forwards alone."""
    blocks = (
        block.model_copy(update={"gradient_bytes": 0, "costs": tuple(map(_forward, block.costs))})
        for block in profile.blocks
    )
    edges = (edge.model_copy(update={"gradient": False}) for edge in profile.edges)
    return profile.model_copy(update={"mode": "inference", "blocks": tuple(blocks), "edges": tuple(edges)})


def _forward(row: CostRow) -> CostRow:
    return CostRow(
        microbatch_size=row.microbatch_size,
        shards=row.shards,
        forward_ns=row.forward_ns,
        activation_bytes=row.activation_bytes,
    )


def halves(profile: Profile) -> Profile:
    """The same with backwards that may run in two halves, as long as each other."""
    blocks = (
        block.model_copy(update={"costs": tuple(row.model_copy(update=_halves(row)) for row in block.costs)})
        for block in profile.blocks
    )
    return profile.model_copy(update={"blocks": tuple(blocks)})


def _halves(row: CostRow) -> dict[str, int]:
    assert row.backward_ns is not None
    half = row.backward_ns // 2
    return {"input_grad_ns": row.backward_ns - half, "weight_grad_ns": half}


def apart(profile: Profile) -> Profile:
    """The same with blocks of which no two are alike: each has a dimension that nothing depends on."""
    blocks = (block.model_copy(update={"dimensions": {"mark": n}}) for n, block in enumerate(profile.blocks, 1))
    return profile.model_copy(update={"blocks": tuple(blocks)})


def cluster(num_devices: int, memory_bytes: int) -> Cluster:
    levels = (
        LinkLevel(name="node", group_size=8, latency_ns=5_000, bandwidth_bytes_per_s=300 * 10**9),
        LinkLevel(name="network", group_size=num_devices, latency_ns=20_000, bandwidth_bytes_per_s=25 * 10**9),
    )
    kind = DeviceKind(name="device", count=num_devices, memory_bytes=memory_bytes)
    return Cluster(name=f"{num_devices} devices", source=MADE_UP, devices=(kind,), levels=levels)


def of_two_kinds(joined: Cluster) -> Cluster:
    """The same, of whose devices half are called otherwise."""
    (kind,) = joined.devices
    halves = (kind.model_copy(update={"name": name, "count": kind.count // 2}) for name in (kind.name, "other"))
    return joined.model_copy(update={"devices": tuple(halves)})


INPUTS: dict[str, Callable[[], Profile | Cluster]] = {
    "v4": lambda: shape("v", 4),
    "nn32": lambda: shape("nn", 32),
    "mllm64": lambda: shape("mllm", 64),
    "gpt2-1.3b": lambda: model("gpt2-1.3b"),
    "chain2000": lambda: chain(2_000),
    "chain10000": lambda: chain(10_000),
    "chain20000": lambda: chain(20_000),
    "chain40000": lambda: chain(40_000),
    "split20000": lambda: chain(20_000, (1, 2, 4, 8)),
    "split2000": lambda: chain(2_000, (1, 2, 4, 8)),
    "parts2000": lambda: chain(2_000, (1, 2), (1, 2, 4)),
    "split10000": lambda: chain(10_000, (1, 2, 4, 8)),
    "apart10000": lambda: apart(chain(10_000, (1, 2, 4, 8))),
    "parts10000": lambda: chain(10_000, (1, 2), (1, 2, 4)),
    "layers10000": lambda: layers(chain(10_000, (1, 2, 4, 8))),
    "forwards10000": lambda: forwards(chain(10_000, (1, 2, 4, 8))),
    "halves10000": lambda: halves(chain(10_000, (1, 2, 4, 8))),
    "served10000": lambda: layers(forwards(chain(10_000, (1, 2, 4, 8)))),
    "split80": lambda: chain(80, (1, 2, 4)),
    "split6": lambda: chain(6, (1, 2, 4)),
    "nodes": lambda: cluster(64, 80 * 10**9),
    "large": lambda: cluster(1_024, 80 * 10**9),
    "tiny": lambda: cluster(1_024, 50 * 10**6),
    "small": lambda: cluster(1_024, 300 * 10**6),
    "kinds": lambda: of_two_kinds(cluster(1_024, 80 * 10**9)),
}

ROWS = (
    Row("shared blocks (NN), 32 devices", "search nn32.json --microbatches 64", 2, quick=True),
    Row("shared blocks (MLLM), 64 devices", "search mllm64.json --microbatches 128", 60, signals=_ALL),
    Row(
        "`frontier --plans`, GPT-2 1.3B on 2, 4, 8, 16 devices",
        "frontier gpt2-1.3b.json --devices 2,4,8,16 --memory 40GB --plans",
        30,
        signals=_ALL,
    ),
    Row(
        "the same, within two minutes",
        "frontier gpt2-1.3b.json --devices 2,4,8,16 --memory 40GB --plans",
        120,
        signals=_ALL,
    ),
    Row(
        "nearly infeasible memory: GPT-2 1.3B, 16 devices of 6 GB",
        "search gpt2-1.3b.json --devices 16 --memory 6GB",
        30,
        signals=_ALL,
    ),
    Row(
        "`compare`, shared blocks (MLLM), 64 devices, 6 micro-batches",
        "compare mllm64.json --microbatches 6",
        2,
        quick=True,
    ),
    Row(
        "`compare`, shared blocks (MLLM), 64 devices, 128 micro-batches",
        "compare mllm64.json --microbatches 128",
        30,
        signals=_ALL,
    ),
    Row("`compare`, GPT-2 1.3B on 16 devices", "compare gpt2-1.3b.json --devices 16", 10, quick=True, signals=_ALL),
    Row("tuning, GPT-2 1.3B on 16 devices", "search gpt2-1.3b.json --devices 16 --scheduler rules", 10, quick=True),
    Row("100,000 micro-batches, shape V on 4 devices", "search v4.json --microbatches 100000", 10, quick=True),
    Row("20,000 micro-batches", "search v4.json --microbatches 20000", 10, quick=True),
    Row("`compare`, 100,000 micro-batches", "compare v4.json --microbatches 100000", 10, quick=True),
    Row(
        "`frontier --plans`, 100,000 samples",
        "frontier v4.json --devices 4 --plans --mini-batch 100000",
        10,
        quick=True,
    ),
    Row("tuning, 100,000 micro-batches", "search v4.json --microbatches 100000 --scheduler rules", 10, quick=True),
    Row(
        "`--scheduler gpipe`, 100,000 micro-batches",
        "search v4.json --microbatches 100000 --scheduler gpipe",
        10,
        quick=True,
    ),
    Row("shape V on 4 devices", "search v4.json", 1, quick=True),
    Row(
        "chain of 2,000 blocks, 1,024 devices of 80 GB",
        "search chain2000.json --cluster large.json",
        10,
        quick=True,
        signals=_ALL,
    ),
    Row("chain of 2,000 blocks, 1,024 devices of 0.3 GB", "search chain2000.json --cluster small.json", 30),
    Row("chain of 10,000 blocks, 8 devices", "search chain10000.json --devices 8", 10, quick=True, signals=_ALL),
    Row("chain of 10,000 blocks, 1,024 devices of 80 GB", "search chain10000.json --cluster large.json", 15),
    Row(
        "chain of 2,000 blocks, each on 1, 2, 4 or 8 devices, 1,024 devices of 80 GB",
        "search split2000.json --cluster large.json",
        15,
    ),
    Row(
        "chain of 10,000 blocks, each on 1, 2, 4 or 8 devices, 1,024 devices of 80 GB",
        "search split10000.json --cluster large.json",
        15,
        signals=_ALL,
    ),
    Row("the same, no two blocks alike", "search apart10000.json --cluster large.json", 15),
    Row(
        "the same, no two blocks alike, `--placement bidirectional`",
        "search apart10000.json --cluster large.json --placement bidirectional",
        15,
    ),
    Row("the same chain, within five seconds", "search split10000.json --cluster large.json", 5),
    Row(
        "the same chain, `--scheduler rules`, within five seconds",
        "search split10000.json --cluster large.json --scheduler rules",
        5,
    ),
    Row("`compare`, the same chain, within five seconds", "compare split10000.json --cluster large.json", 5),
    Row("the same chain, `--scheduler 1f1b`", "search split10000.json --cluster large.json --scheduler 1f1b", 15),
    Row("the same chain, `--scheduler gpipe`", "search split10000.json --cluster large.json --scheduler gpipe", 15),
    *(
        Row(f"the same chain, `{flags}`", f"search split10000.json --cluster large.json {flags}", 15)
        for flags in (
            "--placement v-shape",
            "--placement circular",
            "--placement circular --chunks 9",
            "--placement bidirectional",
            "--placement bidirectional-v-shape",
            "--slices 2",
            "--vp 2",
            "--scheduler interleaved-1f1b",
            "--scheduler kfkb",
            "--mini-batch 1000000",
            "--zero 3",
            "--zero 3 --zero-exchange inside",
            "--pp 1024 --dp 1",
            "--planner graphpipe",
            "--planner pipedream",
            "--planner dapple",
            "--planner piper",
            "--planner autopipe",
        )
    ),
    *(
        Row(
            f"the same chain, backwards in halves, `{flags}`",
            f"search halves10000.json --cluster large.json {flags}",
            15,
        )
        for flags in ("--scheduler zb-h1", "--scheduler zb-v", "--placement bidirectional")
    ),
    Row(
        "chain of 80 blocks on 1 to 4 devices each, 64 devices in nodes, 8,192 samples, `--scheduler gpipe`",
        "search split80.json --cluster nodes.json --mini-batch 8192 --scheduler gpipe",
        10,
        quick=True,
    ),
    Row(
        "the same chain in layers, `--for megatron`", "search layers10000.json --cluster large.json --for megatron", 15
    ),
    Row(
        "the same chain in layers, `--for torchtitan`",
        "search layers10000.json --cluster large.json --for torchtitan",
        15,
    ),
    Row(
        "the same chain in layers, of inference, `--for vllm`",
        "search served10000.json --cluster large.json --for vllm",
        15,
    ),
    Row(
        "the same chain in layers, `--keep-together 2`",
        "search layers10000.json --cluster large.json --keep-together 2",
        15,
    ),
    Row("the same chain, of inference", "search forwards10000.json --cluster large.json", 15),
    Row(
        "the same chain, of inference, `--pp 1024 --dp 1`",
        "search forwards10000.json --cluster large.json --pp 1024 --dp 1",
        15,
    ),
    Row(
        "the same chain, half of the devices with `--profile-for`",
        "search split10000.json --cluster kinds.json --profile-for other=split10000.json",
        15,
    ),
    Row("`compare`, the same chain", "compare split10000.json --cluster large.json", 15),
    Row(
        "chain of 10,000 blocks, each on 1 or 2 devices, sequences in 1, 2 or 4 parts, 1,024 devices of 0.3 GB",
        "search parts10000.json --cluster small.json",
        15,
    ),
    Row(
        "chain of 2,000 blocks, each on 1 or 2 devices, sequences in 1, 2 or 4 parts, 1,024 devices of 80 GB",
        "search parts2000.json --cluster large.json",
        15,
    ),
    Row(
        "the same, 1,024 devices of 0.3 GB, `--zero auto`",
        "search parts2000.json --cluster small.json --zero auto",
        15,
    ),
    Row(
        "chain of 6 blocks on 8 devices, stages of any widths, 100,000 micro-batches, `--scheduler 1f1b`",
        "search split6.json --devices 8 --microbatches 100000 --scheduler 1f1b",
        10,
        quick=True,
    ),
    Row(
        "chain of 10,000 blocks, 1,024 devices of 50 MB, which is too little",
        "search chain10000.json --cluster tiny.json",
        15,
    ),
    Row(
        "chain of 20,000 blocks, 1,024 devices of 80 GB", "search chain20000.json --cluster large.json", 15, larger=True
    ),
    Row(
        "chain of 40,000 blocks, 1,024 devices of 80 GB", "search chain40000.json --cluster large.json", 30, larger=True
    ),
    Row(
        "chain of 20,000 blocks, each on 1, 2, 4 or 8 devices, 1,024 devices of 80 GB",
        "search split20000.json --cluster large.json",
        30,
        larger=True,
    ),
    Row(
        "Llama 70B, estimated, 64 devices of 80 GB, 512 samples",
        "search llama.json --devices 64 --memory 80GB --mini-batch 512",
        30,
    ),
    Row(
        "Llama 70B, blocks on 1 to 8 devices, 64 devices in nodes, 256 samples",
        "search llama.json --cluster nodes.json --mini-batch 256",
        30,
        signals=_ALL,
    ),
    Row(
        "Llama 70B, blocks on 1 to 8 devices, 64 devices of 22 GB, 256 samples",
        "search llama.json --devices 64 --memory 22GB --mini-batch 256",
        30,
    ),
    Row(
        "Llama 70B, blocks on 1 to 8 devices, `--scheduler 1f1b`, 256 samples",
        "search llama.json --cluster nodes.json --mini-batch 256 --scheduler 1f1b",
        10,
    ),
    Row(
        "Llama 70B, blocks on 1 to 8 devices, 64 devices in nodes, 256 samples, `--workers 2`",
        "search llama.json --cluster nodes.json --mini-batch 256 --workers 2",
        30,
    ),
    Row(
        "`frontier`, Llama 70B in one stage on 64 devices of 2 TB, 256 samples",
        "frontier llama.json --cluster nodes.json --memory 2TB --mini-batch 256",
        20,
    ),
    Row(
        "`frontier`, Llama 70B in one stage on 64 devices, 256 samples, which do not fit",
        "frontier llama.json --cluster nodes.json --mini-batch 256",
        20,
    ),
)


def llama(folder: Path, given: str | None) -> str | None:
    """The profile of Llama 70B: one that is given, or one estimated here; None if it is there, else why it is not."""
    if given is not None:
        (folder / "llama.json").write_bytes(Path(given).read_bytes())
        return None
    shape_of_it = (
        "LlamaConfig(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, "
        "num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192)"
    )
    sizes = ["--sequence", "4096", "--shards", "1,2,4,8", "--microbatch", "1,2,4"]
    how = ["profile", shape_of_it, "--estimate", "--device", "h100-80gb", *sizes, "-o", "llama.json"]
    done = subprocess.run([sys.executable, "-m", "pipeplan", *how], cwd=folder, capture_output=True, text=True)
    return done.stderr.strip()[-200:] if done.returncode else None


def seconds_of(row: Row) -> float:
    """About how long a row takes where limits hold."""
    return row.limit + 6 + sum(when + 4 for when, _ in row.interrupted)


def page_table(page: str, rows: Sequence[Row], found: Mapping[str, Measured]) -> Iterator[str]:
    """The table of a page with what was measured in it: rows that were not stay, with a star if they have one.

    A new row that was not is empty.
    """
    lines = Path(page).read_text().splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("| request | limit |"))
    old = list(itertools.takewhile(lambda line: line.startswith("|"), lines[begin:]))
    yield from old[:2]
    named = {re.sub(r"( \(proved\))?( \*)?$", "", line.split(" | ")[0].removeprefix("| ")): line for line in old[2:]}
    for row in rows:
        line, measured = named.get(row.name), found.get(row.name)
        if measured is None:
            yield f"| {row.name} | {row.limit} |  |  |  |  |" if line is None else line
            continue
        before = "" if line is None else line.strip("|").split("|")[2].strip()
        proved = " (proved)" * (line is not None and "(proved)" in line)
        known, first, stop, ended = measured.cells(row)
        known = f"{known}, {ended}" if ended else known
        yield " | ".join([f"| {row.name}{proved}", f"{row.limit}", before, known, first, stop]) + " |"


_OVER = "over"
"""How a row ended that took longer than is waited for."""
_NO_ROWS = "no rows"


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds until what is written is known, of reading, until a schedule and a plan are known, and to stop after each
    signal; nan is none.
    """

    known: float
    read: float
    first: float
    made: float
    stops: Sequence[float]
    ended: str

    def broken(self, row: Row) -> str:
        """Which of what is promised this breaks, as words; nothing if it holds.

        The limit to within a tenth or a second, a first plan within three seconds after reading, or, of what is
        larger, within twice what that takes, and half a second to stop; and what is written is a right plan, or has
        rows.
        """
        late = self.known > row.limit + max(1.0, row.limit / 10)
        parts = {
            "limit": late or bool(re.search(rf"(^|: ){_OVER} \d", self.ended)),
            "first plan": self.made > (2 * self.read if row.larger else 3.0),
            "stop": any(stop > 0.5 for stop in self.stops),
            "written": bool(re.search(rf"(^|: )(check: exit|{_NO_ROWS})", self.ended)),
        }
        return ", ".join(name for name, is_so in parts.items() if is_so)

    def cells(self, row: Row) -> tuple[str, ...]:
        """As a table has them; what reading took where a first plan may take as much again."""
        first = " / ".join(f"{each:.1f}" for each in (self.first, self.made) if not math.isnan(each))
        first += f", read in {self.read:.1f}" if first and row.larger else ""
        stops = ", ".join(f"{stop:.2f}" for stop in self.stops if not math.isnan(stop))
        return f"{self.known:.1f}", first, stops, self.ended


class Rows:
    """What was measured of a checkout, by the row's name, kept in a file if there is one."""

    def __init__(self, path: str | None) -> None:
        self._path = None if path is None else Path(path)
        there = json.loads(self._path.read_text()) if self._path is not None and self._path.exists() else {}
        for row in there.values():
            if "stop" in row:  # of a version that sent one signal
                row.update(stops=[row.pop("stop")], read=math.nan)
        self.found = {name: Measured(**row) for name, row in there.items()}

    def keep(self, row: Row, measured: Measured) -> None:
        """Add a row."""
        self.found[row.name] = measured
        if self._path is not None:
            new = self._path.with_suffix(".new")
            new.write_text(json.dumps({name: asdict(each) for name, each in self.found.items()}, indent=1))
            new.replace(self._path)


class Bench:
    """Runs rows in a folder that has their inputs, from the sources of a checkout."""

    def __init__(self, folder: Path, source: str | None, most: float, *, of_work: bool = False) -> None:
        self._folder, self._most, self._of_work = folder, most, of_work
        # imports are read from bytecode, as those of an installed package are
        self._environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        if of_work:
            self._environment["LIMITS_OF_WORK"] = "1"
        if source is not None:
            self._environment["PYTHONPATH"] = str(Path(source).resolve() / "src")

    def measured(self, row: Row) -> Measured:
        """A row, run to its end, and, where it takes long enough, interrupted."""
        marks, _, ended = self._timed(row)
        stops, over = [], ended.startswith(_OVER)
        for when, sent in () if over or self._of_work else row.interrupted:
            _, stop, how = self._timed(row, when, sent)  # what it is sent may come when it has ended
            stops.append(stop)
            ended = "; ".join(part for part in (ended, how and f"{sent.name}: {how}") if part)
        read = marks.get("read", math.nan)
        if "none" in marks:
            ended = f"none known after {marks['none'] - read:.1f}{'; ' if ended else ''}{ended}"
        known, opened, first, made = (marks.get(what, math.nan) for what in ("done", "open", "first", "made"))
        found = Measured(known, read - opened, first - read, made - read, stops, ended)
        note(" | ".join((row.name, *found.cells(row))))
        return found

    def _timed(
        self, row: Row, signal_after: float | None = None, sent_then: signal.Signals = signal.SIGTERM
    ) -> tuple[dict[str, float], float, str]:
        """When what was marked happened, the seconds from the signal until what is written is known, how it ended."""
        compares = row.arguments.startswith("compare")
        output = ["--json"] if compares else ["-o", "out.json"]
        command = [sys.executable, "-c", CHILD, *row.arguments.split(), "--time-limit", f"{row.limit}s", *output]
        begun = time.monotonic()
        with (self._folder / "out.txt").open("w") as out:
            process = subprocess.Popen(
                command,
                cwd=self._folder,
                stdout=out,
                stderr=subprocess.PIPE,
                text=True,
                env=self._environment,
                process_group=0,
            )
        sent = math.nan
        if signal_after is not None:
            try:
                process.wait(signal_after)
            except subprocess.TimeoutExpired:
                sent = time.monotonic() - begun
                process.send_signal(sent_then)
        try:
            _, errors = process.communicate(timeout=max(1.0, self._most - (time.monotonic() - begun)))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with all that it has begun
            _, errors = process.communicate()
        marks: dict[str, float] = {}
        for what, when in MARK.findall(errors):
            marks.setdefault(what, float(when) - (0.0 if self._of_work else begun))
        left = [line for line in errors.splitlines() if not MARK.match(line)]
        ended = "" if process.returncode == 0 else f"exit {process.returncode}: {' '.join(left)[-80:]}"
        if process.returncode == -signal.SIGKILL:
            ended = f"{_OVER} {self._most:g}"
        elif process.returncode == 0:
            ended = self._without_rows() if compares else self._refused()
        stop = marks.get("done", math.nan) - sent
        return marks, stop if stop >= 0 else math.nan, ended  # it may have ended before

    def _without_rows(self) -> str:
        """That a comparison has no rows; nothing if it has some."""
        return "" if json.loads((self._folder / "out.txt").read_text())["rows"] else _NO_ROWS

    def _refused(self) -> str:
        """What ``check`` says against the plan that was written; nothing if it is accepted."""
        command = [sys.executable, "-m", "pipeplan", "check", "out.json"]
        done = subprocess.run(command, cwd=self._folder, capture_output=True, text=True, env=self._environment)
        (self._folder / "out.json").unlink(missing_ok=True)
        return "" if done.returncode == 0 else f"check: exit {done.returncode}: {done.stderr.strip()[-80:]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a part of a row's name")
    parser.add_argument("--quick", action="store_true", help="rows of at most 10 seconds alone")
    parser.add_argument("--list", action="store_true", help="name the rows, measure nothing")
    parser.add_argument("--work", action="store_true", help="seconds of work, not by the clock")
    parser.add_argument("--llama", metavar="PROFILE", help="of Llama 70B  [default: estimated, where torch is there]")
    parser.add_argument("--source", metavar="PATH", help="another checkout to measure")
    parser.add_argument("--state", metavar="FILE", help="where rows are kept, to go on from")
    parser.add_argument("--before", metavar="FILE", help="the state of another checkout, for the table")
    parser.add_argument("--page", metavar="FILE", help="print this page's table with what was measured")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no row that would end after so many")
    parser.add_argument("--most", type=float, default=260.0, help="kill what takes so many seconds")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it, and so would each row,
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # as nohup has it do with this one
    wanted = [row for row in ROWS if options.only in row.name and (row.quick or not options.quick)]
    if options.list:
        print("\n".join(f"{row.limit:4} s  {row.name}: {row.arguments}" for row in wanted))
        print(f"about {sum(map(seconds_of, wanted)) / 60:.0f} minutes where limits hold")
        return
    rows, before = Rows(options.state), Rows(options.before)
    begun = time.monotonic()
    missing = [row for row in wanted if row.name not in rows.found]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for stem, make in INPUTS.items():
            if any(f"{stem}.json" in row.arguments for row in missing):
                (folder / f"{stem}.json").write_text(_text(make()))
        bench = Bench(folder, options.source, options.most, of_work=options.work)
        for row in missing:
            if time.monotonic() + seconds_of(row) > begun + 60 * options.minutes:
                continue
            if "llama.json" in row.arguments and (why := llama(folder, options.llama)):
                note(f"no row for Llama 70B: {why}")
                continue
            rows.keep(row, bench.measured(row))
    left = sum(row.name not in rows.found for row in wanted)
    note(f"{left} rows are left" if left else "nothing is left")
    if options.page:
        print("\n".join(page_table(options.page, ROWS, rows.found)))
        return
    shown = [row for row in wanted if row.name in rows.found]
    header: tuple[str, ...] = ("request", "limit", "until known", "first schedule / plan", "stop", "ended", "breaks")
    table: list[tuple[str, ...]] = [
        (row.name, f"{row.limit}", *rows.found[row.name].cells(row), rows.found[row.name].broken(row)) for row in shown
    ]
    if options.before:
        header = *header[:2], "before", *header[2:]
        olds = [_before(before.found.get(row.name)) for row in shown]
        table = [(*cells[:2], old, *cells[2:]) for old, cells in zip(olds, table, strict=True)]
    print(markdown(header, table))
    print(f"\n{machine()}.")
    if broken := sum(bool(rows.found[row.name].broken(row)) for row in shown):
        raise SystemExit(f"{broken} rows break what is promised")


def _text(made: Profile | Cluster) -> str:
    """A file that other checkouts read, too: a cluster says nothing here that its first version does not."""
    found = {"schema_version": made.schema_version, **made.model_dump(mode="json", exclude_defaults=True)}
    return json.dumps({**found, "kind": made.kind} | ({"schema_version": 1} if isinstance(made, Cluster) else {}))


def _before(measured: Measured | None) -> str:
    """What another checkout did, in one cell."""
    if measured is None:
        return ""
    known = measured.ended if math.isnan(measured.known) else f"{measured.known:.1f}"
    stops = ", ".join(f"{stop:.1f}" for stop in measured.stops if not math.isnan(stop))
    return f"{known} (stop: {stops})" if stops else known


if __name__ == "__main__":
    main()
