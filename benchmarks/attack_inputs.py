"""Files and command lines that nobody meant: each ends well or with one clear message, soon, and prints no control."""

from __future__ import annotations

import contextlib
import errno
import gzip
import importlib
import io
import json
import os
import re
import shlex
import signal
import struct
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import IO, Any
from unittest import mock

import click
import tomli_w
from attack_faults import PRELOADED, Forked, children, living
from attack_part import Ended, drawn_for
from attack_plans import GATHER, chain, placed, samples

import pipeplan
from builders.decoders import drawn_decoder, with_pieces
from pipeplan.cli import export_verb, frontier_verb, import_verb, profile_verb, search_verbs
from pipeplan.cli.main import VERBS, cli, main
from pipeplan.cli.output import say_notes
from pipeplan.files import BackendFusion, CostRow, Profile, parse
from pipeplan.interop.export import export_targets
from support.damage import damage, damage_bytes, places

__all__ = ["Inputs"]

ROOT = Path(__file__).parents[1]
CODES = (0, 1, 2, 3)
MOST_SAID = 20_000
"""Characters on standard error: what a file says is not printed whole."""

CANARY = "[bold]canary[/bold]"
"""Markup that must come out as it went in: where a file's text is read as markup, its brackets are gone."""

NASTY: list[Any] = [
    *("\x1b[31mred", "\x9b31m", "\x85", "\u202eabc", "\u2066x\u2069", "a\rb", "\x07", "\ud800", "\u2028", "\x00"),
    *(CANARY, "b[/nope]", "[link=https://example.org]canary[/link]", "[/]", "[@click=x]y[/]", "\\[x", "[red", "]["),
    *("x" * 1_000_000, "-" * 300, "../../../etc/passwd", "/dev/stdin", "${HOME}", "%s%n{0}", "<script>", "\"'`;|&"),
    *(
        "9**9**9",
        "D**D**D",
        "1//0",
        "((((((((((",
        "N" * 500,
        "a.b.c()",
        "__import__('os')",
        "lambda: 0",
        "D or 10**400",
    ),
    *(10**15, 10**16, 10**15 - 1, 999_999_999_999_999, 10**400, -(10**18), 1e-320, 0.1, 65_536, 65_537, 4096),
]
"""Beside those of :mod:`support.damage`."""

ARGUMENTS = [
    *(
        "",
        "-1",
        "0",
        "1",
        "2",
        "3",
        "4",
        "7",
        "1e9",
        "99999999999999999999",
        "nan",
        "inf",
        "-inf",
        "1.5",
        "auto",
        "abc",
    ),
    *(
        "1,2,4",
        "1,,2",
        "0,1",
        "1" * 400,
        "1,2," * 2000,
        "80GB",
        "16GiB",
        "1e400GB",
        "-5GB",
        "3 GB",
        "1ms",
        "5s",
        "-3ms",
    ),
    *(
        "1e300s",
        "0ns",
        "1h",
        "10 years",
        "../x",
        "/",
        "/dev/null",
        "/nowhere/file.json",
        "-",
        "--",
        "-o",
        "--help",
        "'",
    ),
    *("x" * 5000, "é", "\u0663", "[/nope]", "[bold]x[/bold]", "one-to-one", "circular", "v-shape", "bidirectional"),
    *("1f1b", "zb-h1", "chimera", "repetend", "rules", "greedy", "h100-80gb", "cpu", "yes", "no", "all", "none", "@f"),
]

CONFIG = """{"model_type": "gpt2", "n_layer": 1, "n_embd": 8,
 "n_head": 2, "vocab_size": 16, "n_positions": 8}
"""

TEMPLATES: list[tuple[int, str]] = [
    (8, "search {profile} --devices 2 --time-limit 50ms -o {out}"),
    (4, "search {profile} --time-limit 50ms --scheduler 1f1b --json"),
    (5, "search {profile} --cluster {cluster} --time-limit 50ms"),
    (4, "search {profile} --devices 2 --placement {placement} --time-limit 50ms --placement-output {out}"),
    (8, "search {profile} --devices 2 --rules {rules} --time-limit 50ms --microbatches 4"),
    (2, "search {profile} --devices 2 --scheduler rules --cache {cache} --workers 1 --time-limit 100ms"),
    (4, "compare {profile} --devices 2 --time-limit 50ms --microbatches 4"),
    (2, "compare {profile} --cluster {cluster} --time-limit 50ms --json"),
    (4, "frontier {profile} --devices 1,2 --tolerance 0.1 --time-limit 100ms --svg {out}"),
    (3, "frontier {profile} --devices 2 --plans --time-limit 50ms --cluster {cluster}"),
    (9, "check {plan}"),
    (5, "check {plan} --profile {profile} --cluster {cluster}"),
    (5, "check {plan} --json"),
    (8, "simulate {plan}"),
    (3, "simulate {plan} --microbatches 9 --svg - --profile {profile}"),
    (3, "simulate {plan} --trace {out} --cluster {cluster} --json"),
    (8, "simulate {traced} --measured {trace}"),
    (4, "profile --show {profile}"),
    (2, "profile --show {profile} --microbatch 1,2 --json"),
    (8, "profile --communication-from {table} --cluster {cluster} -o {out}"),
    (2, "profile --communication-from {table} --communication-from {tests} --cluster {cluster} -o - --level node"),
    (4, "run {plan} --emulate"),
    (2, "run {plan} --model gpt2-tiny --data {text} --steps 1"),
    (5, "run {plan} --emulate --local --steps 1 --timeout 2s --trace {out}"),
    (3, "run {traced} --model gpt2-tiny --local --steps 2 --timeout 2s --checkpoint {out} --data {text}"),
    (2, "run {traced} --model {config} --local --steps 1 --timeout 2s --json"),
    (1, "profile --communication --processes 2 --max-bytes 1KiB --repeats 1 --cluster {cluster} -o {out}"),
    (1, "profile gpt2-tiny --microbatch 1 --repeats 1 --warmup 0 --cluster {cluster} -o {out}"),
    (2, "profile gpt2-tiny --estimate --device h100-80gb --calibrate {profile} --cluster {cluster} -o {out}"),
    (2, "profile {config} --estimate --device h100-80gb --microbatch 1 -o {out}"),
    (2, "example shape-v --devices 3 --forward 2ms -o {out}"),
    (2, "example gpt2-124m --cluster {cluster} --shards 1,2 -o {out}"),
    (1, "example tessel --devices 4"),
    (1, "example testbed-tessel -o {out}"),
    (3, "search {served} --devices 2 --kv auto --time-limit 50ms -o {out}"),
    (2, "search {served} --devices 2 --kv cp --dcp 2 --batch 4 --context 100 --time-limit 50ms --json"),
    (2, "search {backends} --devices 2 --kernels {cover} --time-limit 50ms -o {out}"),
    (1, "search {backends} --devices 2 --kernels auto --time-limit 50ms"),
    (2, "search {profile} --devices 2 --start {plan} --time-limit 50ms"),
    (2, "search {profile} --devices 2 --for torchtitan --time-limit 50ms --explain"),
    (2, "search {profile} --cluster {cluster} --profile-for device={profile} --time-limit 50ms"),
    (1, "check {decoding} --profile {served}"),
    (4, "kernels {backends} --time-limit 50ms -o {out}"),
    (1, "kernels {backends} --microbatch-size 1 --json"),
    (2, "report {plan} -o {out}"),
    (1, "report {plan} {plan} --markdown --svg {out}"),
    (2, "report {traced} --measured {trace} --frontier {points} -o -"),
    (2, "simulate {traced} --measured {log} --trace {out}"),
    *((1, f"export {{layered}} --to {target} -o {{out}}") for target in export_targets()),
    (2, "export {plan} --to torch --names a,layers.N"),
    (4, "import {csv} --from torch --profile {model} --modules {modules} --time-limit 50ms -o {out}"),
    (2, "import {layout} --from megatron --profile {model} --microbatches 4 --time-limit 50ms --json"),
    (2, "import {counts} --from layers --profile {model} --cluster {cluster} --time-limit 50ms"),
    (2, "run {written} --model gpt2-tiny --local --prompt-file {prompts} --new-tokens 2 --timeout 2s --json"),
    (2, "run {traced} --model gpt2-tiny --local --init {weights} --steps 1 --timeout 2s"),
    (1, "profile gpt2-tiny --estimate --inference --batch 1,2 --context 64 --device h100-80gb -o {out}"),
]
"""How often, and a command: what stands in braces is a file."""

_PLACE = re.compile(r"([^{]*)\{(\w+)\}")
_NEEDS_TORCH = ("run", "profile gpt2", "profile {config}", "profile --communication --processes")
_WITH_TORCH = ("transformers", "pipeplan.runtime.profiling.estimate", "pipeplan.runtime.models.load", *PRELOADED)


@dataclass(frozen=True, slots=True)
class Seed:
    """A valid file: its content, and how that is written."""

    content: Any
    write: Callable[[Any], bytes]


def _json(content: Any) -> bytes:
    return json.dumps(content).encode()


def _toml(content: Any) -> bytes:
    return tomli_w.dumps(content).encode()


def seeds() -> dict[str, list[Seed]]:
    """Small valid files of every kind."""
    made = samples()
    profiles = [json.loads(each.profile.model_dump_json()) for each in made]
    profiles += [json.loads(path.read_text()) for path in sorted((ROOT / "profiles").glob("tessel-?.json"))]
    found = {
        "profile": [*profiles, _golden("gpt2-tiny")],
        "cluster": [json.loads(each.cluster.model_dump_json()) for each in made if each.cluster]
        + [json.loads(path.read_text()) for path in sorted((ROOT / "src/pipeplan/catalog/clusters").glob("*.json"))],
        "placement": [
            json.loads(placed(("b0 b1", (0,), 1, None), ("b2 b3", (1,), 1, None)).model_dump_json()),
            _golden("placement-mmt"),
        ],
        "plan": [each.plan for each in made] + [_golden("plan-shape-zbv"), _golden("plan-gpt2-tiny")],
        "traced": [_golden("plan-gpt2-tiny")],
        "trace": [_golden("trace-gpt2-tiny")],
        "tests": [_nccl_json()],
    }
    known = {kind: [Seed(content, _json) for content in contents] for kind, contents in found.items()}
    rules = [path.read_text() for path in sorted((ROOT / "src/pipeplan/catalog/rules").glob("*.toml"))]
    known["rules"] = [Seed(tomllib.loads(text), _toml) for text in [*rules, GATHER, GATHER]]
    known["table"] = [Seed(_nccl_table(), str.encode)]
    known["config"] = [Seed(CONFIG, str.encode)]
    known["text"] = [Seed("a few words of text, 1 + 2 = 3\n" * 20, str.encode)]
    known["cache"] = [Seed('{"kind": "tuning", "schema_version": 1}\n{"key": "x", "known": 5}\n', str.encode)]
    return known | _served() | _of_backends() | _of_other_tools()


def _served() -> dict[str, list[Seed]]:
    """A profile of decode steps, a plan for it, and prompts."""
    profile = with_pieces(drawn_decoder(0, shards=(1, 2)), 2)
    plan = pipeplan.search(profile, devices=2, kv="auto", time_limit=1.0, deterministic=True).plan
    return {
        "served": [Seed(json.loads(profile.model_dump_json()), _json)],
        "decoding": [Seed(json.loads(plan.model_dump_json()), _json)],
        "prompts": [Seed("[1, 2, 3]\n[5]\n[7, 7, 7, 7]\n", str.encode)],
    }


def _of_backends() -> dict[str, list[Seed]]:
    """A profile with times of two kernel backends, and a cover of its blocks."""

    def rows(blocks: tuple[str, ...], ns: int) -> tuple[CostRow, ...]:
        return (CostRow(microbatch_size=1, backend="fast", forward_ns=ns * len(blocks), backward_ns=ns * len(blocks)),)

    plain = chain(4)
    blocks = [
        block.model_copy(update={"costs": (*block.costs, *(rows((block.id,), 15) if place < 2 else ()))})
        for place, block in enumerate(plain.blocks)
    ]
    last = tuple(block.id for block in blocks[2:])
    fusions = (BackendFusion(blocks=last, costs=rows(last, 20)),)
    profile = plain.model_copy(update={"blocks": tuple(blocks), "fusions": fusions, "backend_change_ns": 2})
    cover = pipeplan.choose_kernels(profile, microbatch_size=1).file
    return {
        "backends": [Seed(json.loads(profile.model_dump_json()), _json)],
        "cover": [Seed(json.loads(cover.model_dump_json()), _json)],
    }


def _of_other_tools() -> dict[str, list[Seed]]:
    """What other tools read and write of one model: schedules, layouts, logs, weights; and a printed frontier."""
    profile = parse(json.dumps(_golden("gpt2-tiny")), Profile)
    plan = pipeplan.import_plan("2,2", "layers", profile, microbatches=4).plan
    schedule = pipeplan.export(plan, "torch")
    tensor = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
    weights = json.dumps({"h.0.ln_1.weight": tensor, "__metadata__": {"format": "pt"}})
    return {
        "model": [Seed(_golden("gpt2-tiny"), _json)],
        "layered": [Seed(json.loads(plan.model_dump_json()), _json)],
        "csv": [Seed(schedule.text, str.encode)],
        "modules": [Seed(json.loads(schedule.beside[".modules.json"]), _json)],
        "layout": [Seed("Ett|ttL\n--num-layers 4\n--pipeline-model-parallel-size 2\n", str.encode)],
        "counts": [Seed("VLLM_PP_LAYER_PARTITION=2,2\n", str.encode)],
        "log": [Seed(_LOG, str.encode)],
        "weights": [Seed(weights, _safetensors)],
        "points": [Seed(json.loads((ROOT / "tests/reporting/frontier.json").read_text()), _json)],
    }


def _safetensors(head: str) -> bytes:
    """A file of weights with these words before its numbers."""
    return struct.pack("<Q", len(head.encode())) + head.encode() + bytes(16)


_LOG = """ [2030-01-01 02:55:39] iteration 1/ 100 | elapsed time per iteration (ms): 9999.9 | lm loss: 2 |
[Rank 1] (after 1 iterations) memory (MB) | allocated: 100.5 | max allocated: 1024.5 | max reserved: 2048.0
 [2030-01-01 02:55:45] iteration 2/ 100 | elapsed time per iteration (ms): 41.5 | lm loss: 2 |
times across ranks (ms):
  forward-compute:
     rank  0: 8.25
     rank  1: 9.75
"""


def _golden(name: str) -> Any:
    return json.loads(gzip.decompress((ROOT / "tests/golden/before/files" / f"{name}.json.gz").read_bytes()))


def _nccl_json() -> Any:
    devices = [{"rank": rank, "hostname": "node00", "device": rank} for rank in range(2)]
    results = [
        {"size": 4**n, "count": 4 ** (n - 1), "out_of_place": {"time": 11.0 + 4**n / 21000}} for n in range(2, 9)
    ]
    return {
        "version": 2,
        "args": ["./build/sendrecv_perf"],
        "config": {"nthreads": 1, "ngpus": 1, "devices": devices},
        "results": results,
    }


def _nccl_table() -> str:
    head = "# nccl-tests version 2.17.1\n# Collective test starting: all_reduce_perf\n"
    head += "# nThread 1 nGpus 1 minBytes 16 maxBytes 65536 step: 4(factor)\n# Using devices\n"
    head += "".join(f"#  Rank {n:2d} Group  0 Pid 500{n} on node00 device {n:2d} [0000:0a:00] A100\n" for n in range(2))
    head += "#\n#       size         count      type   redop    root     time   algbw   busbw  #wrong     time\n"
    rows = [(4**n, 11.0 + 4**n / 21000) for n in range(2, 9)]
    body = "".join(f"{s:12d} {s // 4:12d} float none -1 {t:.2f} 1.00 1.00 0 {t:.2f} 1.00 1.00 0\n" for s, t in rows)
    return head + body + "# Avg bus bandwidth    : 5.4321\n# Collective test concluded: all_reduce_perf\n"


# Drawing one -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Input:
    """A command line, the files that it names, and standard input."""

    arguments: list[str]
    stdin: bytes = b""


def drawn(rng: Random, templates: list[tuple[int, str]], known: dict[str, list[Seed]], folder: Path) -> Input:
    """A command with one or two of its files damaged, or its arguments; the files are written."""
    weights, commands = zip(*templates, strict=True)
    arguments = rng.choices(commands, weights)[0].split()
    places = {at: found for at, text in enumerate(arguments) if (found := _PLACE.fullmatch(text)) and found[2] != "out"}
    damaged = set(rng.sample([*places], min(len(places), rng.choice([1, 1, 1, 2])))) if rng.random() < 0.8 else set()
    stdin = b""
    for at, text in enumerate(arguments):
        if text == "{out}":
            arguments[at] = str(folder / "out")
        elif at in places:
            before, kind = places[at].groups()
            content = _content(rng, known, kind, damaged=at in damaged)
            name = folder / f"{at}-{kind}{_ENDINGS.get(kind, '.json')}"
            name.write_bytes(content)
            arguments[at] = f"{before}{name}"
            if rng.random() < 0.03 and not before:
                arguments[at], stdin = "-", content
    if not damaged or rng.random() < 0.1:
        for _ in range(rng.choice([1, 1, 2, 3])):
            _damage_arguments(rng, arguments)
    return Input(arguments, stdin)


_ENDINGS = {"rules": ".toml", "csv": ".csv", "log": ".log", "weights": ".safetensors"}


def _content(rng: Random, known: dict[str, list[Seed]], kind: str, *, damaged: bool) -> bytes:
    if damaged and rng.random() < 0.04:  # another file
        kind = rng.choice(list(known))
    seed = rng.choice(known[kind])
    if not damaged:
        return seed.write(seed.content)
    if isinstance(seed.content, str):
        text = _damaged_text(rng, seed.content)
        return _safetensors(text.decode("utf-8", "replace")) if seed.write is _safetensors else text
    content = json.loads(json.dumps(seed.content))
    how = rng.randrange(4)
    if how == 0 and _rename(rng, content):
        return _written(seed, content)
    if how == 1:
        for _ in range(rng.choice([1, 1, 2, 3])):
            _other_number(rng, content)
        return _written(seed, content)
    text = damage(rng, seed.content, NASTY)
    if seed.write is not _toml:
        return text
    with contextlib.suppress(ValueError, TypeError, AttributeError, RecursionError):  # not what TOML can say
        return _toml(json.loads(text))
    return _damaged_text(rng, seed.write(seed.content).decode())


def _written(seed: Seed, content: Any) -> bytes:
    """As the file is written, also with text that is none in UTF-8."""
    try:
        return seed.write(content)
    except UnicodeEncodeError:
        return json.dumps(content).encode()


def _rename(rng: Random, content: Any) -> bool:
    """One text, wherever it stands, so that what refers to it goes on doing so; False where there is none."""
    texts = sorted({c[k] for c, k in places(content) if isinstance(c[k], str)})
    if not texts:
        return False
    old, nasty = rng.choice(texts), rng.choice([each for each in NASTY if isinstance(each, str)])
    new = rng.choice([nasty, old + nasty, nasty + old])
    for container, key in places(content):
        if container[key] == old:
            container[key] = new
    for container, _ in places(content):
        if isinstance(container, dict) and old in container:
            container[new] = container.pop(old)
    return True


def _other_number(rng: Random, content: Any) -> None:
    """A number that may be right, or nearly, where it stands."""
    found = [(c, k) for c, k in places(content) if isinstance(c[k], int | float) and not isinstance(c[k], bool)]
    if found:
        container, key = rng.choice(found)
        old = container[key]
        most = [10**15, 10**16, 10**15 - 1, 10**9, 10**6, 65_536, 2**62, 10**12]
        container[key] = rng.choice([*most, old + 1, abs(old - 1), old * 2, old * 1000, 0, 1, 2])


def _damaged_text(rng: Random, text: str) -> bytes:
    """A table or text with other words, lines and bytes."""
    lines = text.splitlines(keepends=True)
    for _ in range(rng.choice([1, 1, 2, 4])):
        at = rng.randrange(len(lines))
        words = re.split(r"(\s+)", lines[at])
        how = rng.randrange(5)
        if how == 0:
            words[rng.randrange(len(words))] = str(rng.choice(NASTY))
        elif how == 1:
            words[rng.randrange(len(words))] = rng.choice(["nan", "inf", "-1", "0", "1e400", "9" * 500, "x", ""])
        elif how == 2:
            del words[rng.randrange(len(words))]
        elif how == 3:
            words *= rng.choice([2, 50])
        else:
            words = words[: rng.randrange(len(words) + 1)]
        lines[at] = "".join(words)
    data = bytearray("".join(lines).encode("utf-8", "surrogatepass"))
    if rng.random() < 0.3:
        damage_bytes(rng, data)
    return bytes(data)


def _damage_arguments(rng: Random, arguments: list[str]) -> None:
    how = rng.randrange(7)
    at = rng.randrange(len(arguments))
    if how == 0:
        arguments[at] = rng.choice(ARGUMENTS)
    elif how == 1 and len(arguments) > 1:
        del arguments[at]
    elif how == 2:
        arguments.insert(at, arguments[rng.randrange(len(arguments))])
    elif how == 3:
        other = rng.randrange(len(arguments))
        arguments[at], arguments[other] = arguments[other], arguments[at]
    elif how == 4:
        arguments[0] = rng.choice([*VERBS, "serch", "", "--version", "-h"])
    else:
        arguments.extend(_option(rng, arguments[0]))


def _option(rng: Random, verb: str) -> list[str]:
    """One of a verb's options with some value."""
    command = cli.get_command(click.Context(cli), verb) or cli
    options = [each for each in command.params if isinstance(each, click.Option) and each.name not in _DEAR]
    option = rng.choice(options or [click.Option(["--seed"])])
    name = rng.choice(option.opts)
    return [name] if option.is_flag else [name, rng.choice(ARGUMENTS)]


_DEAR = ("local", "processes", "communication", "workers", "output_all", "time_limit")
"""Options that start processes, or make others last: they stand in templates."""

_MOST_RANKS = 8
_PATIENCE_S = 5.0
"""After which Ctrl-C ends what runs or measures as long as it is asked to."""

_AT_ONCE_S = 2.0
"""Seconds of work in which it ends then; a machine that is busy otherwise takes longer."""


# Running it --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ran:
    """What a command did: its exit code, or the traceback of an error that it did not handle.

    ``interrupted`` is whether Ctrl-C ended it, after ``stopping_s`` of work, ``left`` are processes that live on, and
    ``notes`` what was said of the answer beside it.
    """

    code: int
    stdout: str
    stderr: str
    error: str = ""
    interrupted: bool = False
    stopping_s: float = 0.0
    left: Sequence[int] = ()
    notes: Sequence[str] = ()


def run(given: Input, folder: Path) -> Ran:
    """The command, in this process, from which its ranks are forked; where it runs or measures long, Ctrl-C ends it."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    stdin = io.TextIOWrapper(io.BytesIO(given.stdin), encoding="utf-8")
    code, error, interrupted = 0, "", list[float]()
    before = set(children(os.getpid()))

    def interrupt(*_: object) -> None:
        interrupted.append(time.process_time())
        raise KeyboardInterrupt

    with (
        contextlib.chdir(folder),
        mock.patch.object(sys, "argv", ["pipeplan", *given.arguments]),
        mock.patch.object(sys, "stdin", stdin),
        mock.patch.object(os, "cpu_count", return_value=1),  # or tuning would start processes, and they all of this
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        _signals_kept(),
        warnings.catch_warnings(),
        _noted() as notes,
        _forked_ranks(interrupt) as said,
        _interrupted_where_it_is_heard(interrupted),
        _measured_for_a_while(interrupt),
    ):
        try:
            main()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
        except BaseException:
            error = traceback.format_exc()
        stopping_s = time.process_time() - interrupted[0] if interrupted else 0.0
        said.seek(0)
        ranks = said.read().decode(errors="replace")
    left = living(sorted(set(children(os.getpid())) - before))
    return Ran(code, _said(out), _said(err) + ranks, error, bool(interrupted), stopping_s, left, notes)


@contextlib.contextmanager
def _noted() -> Iterator[list[str]]:
    """What the verbs say of their answers on standard error."""
    found: list[str] = []

    def say(notes: Iterable[str]) -> None:
        said = [*notes]
        found.extend(said)
        say_notes(said)

    with contextlib.ExitStack() as stack:
        for verb in (export_verb, frontier_verb, import_verb, search_verbs):
            stack.enter_context(mock.patch.object(verb, "say_notes", say))
        yield found


@contextlib.contextmanager
def _forked_ranks(interrupt: Callable[..., None]) -> Iterator[IO[bytes]]:
    """What is started here is forked, no more than a few; the first also sets the alarm. Gives what ranks print."""
    local = sys.modules.get("pipeplan.runtime.launch.local")
    with tempfile.TemporaryFile() as said:
        if local is None:  # nothing is
            yield said
            return
        started: list[Forked] = []

        def start(*arguments: Any, **how: Any) -> Forked:
            if len(started) == _MOST_RANKS:
                raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
            if not started:
                _begin_patience(interrupt)
            started.append(Forked(*arguments, **how))
            return started[-1]

        names = SimpleNamespace(**{**vars(subprocess), "Popen": start})
        with mock.patch.object(local, "subprocess", names), mock.patch.object(local, "_STDERR", said.fileno()):
            yield said


def _begin_patience(interrupt: Callable[..., None]) -> None:
    """Ctrl-C after a while, and again where the first is not heard for so long that it is a hang."""
    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, _PATIENCE_S, 30.0)


@contextlib.contextmanager
def _interrupted_where_it_is_heard(interrupted: list[float]) -> Iterator[None]:
    """Ctrl-C that Python ignores, as it does what is raised in a finalizer or a callback of its collector, comes again.

    A user presses it once more.
    """
    before = sys.unraisablehook

    def again(ignored: Any) -> None:
        if ignored.exc_type is KeyboardInterrupt:
            interrupted.clear()
            signal.setitimer(signal.ITIMER_REAL, 0.1, 30.0)
        else:
            before(ignored)

    with mock.patch.object(sys, "unraisablehook", again):
        yield


@contextlib.contextmanager
def _measured_for_a_while(interrupt: Callable[..., None]) -> Iterator[None]:
    """What measures a model goes on for as long as it is asked to, as 100,000 times for each block."""
    measure = profile_verb._measure

    def measure_until(*given: Any) -> None:
        _begin_patience(interrupt)
        measure(*given)

    try:
        with mock.patch.object(profile_verb, "_measure", measure_until):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _said(text: io.TextIOWrapper) -> str:
    assert isinstance(text.buffer, io.BytesIO)
    return text.buffer.getvalue().decode("utf-8", "surrogatepass")


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def judged(given: Input, ran: Ran) -> Ended:
    """Which of what may happen it was."""
    how = f"exit {ran.code}"
    if ran.error or "Traceback (most recent call last)" in ran.stderr:
        return Ended("traceback", "traceback", ran.error or ran.stderr)
    if ran.left:
        return Ended("orphan", "orphan", f"{ran.left}: {ran.stderr}")
    if ran.stopping_s > _AT_ONCE_S:
        return Ended("goes on after Ctrl-C", "hang", f"for {ran.stopping_s:.1f} s of work: {ran.stderr}")
    if ran.interrupted:
        return Ended("interrupted", "" if ran.code == 130 else "exit", f"exit {ran.code}: {ran.stderr}")
    if ran.code not in CODES:
        return Ended(how, "exit", ran.stderr)
    is_file = any(before in ("-o", "--output", "--svg", "--trace") for before in _before_dashes(given.arguments))
    is_file |= "example" in given.arguments[:1]  # prints a file
    shown = ran.stderr + ("" if is_file else ran.stdout)
    typed = "".join(given.arguments)
    controls = sorted({ascii(letter) for letter in shown if _is_control(letter) and letter not in typed})
    if controls:
        return Ended("control", "control", f"{', '.join(controls)} in {_around(shown, typed)}")
    is_markdown = given.arguments[:1] == ["report"]  # where brackets are written otherwise
    # Where a long text ends early, one of the tags around it may be missing.
    if re.search(r"(?<!\])canary(?!\[/)", shown) and "canary" not in typed and not is_markdown:
        return Ended("control", "control", "markup is read")
    if len(ran.stderr) > MOST_SAID:
        return Ended("flood", "control", f"{len(ran.stderr)} characters of messages")
    if ran.code and not _messages(ran) and not ("--json" in given.arguments and ran.code == 1):
        return Ended(how, "exit", "no message")
    if ran.code and _messages(ran) > 1:
        return Ended(how, "exit", f"{_messages(ran)} messages: {ran.stderr[:2000]}")
    if ran.code == 2 and (ran.notes or any(text.startswith(_OF_RUNS) for text in _lines(ran))):
        return Ended(how, "exit", f"refused, and remarks on what there is not: {ran.stderr[:2000]}")
    return Ended(how)


def _before_dashes(arguments: list[str]) -> list[str]:
    return [before for before, text in zip(arguments, arguments[1:], strict=False) if text == "-"]


def _is_control(letter: str) -> bool:
    return letter not in "\n\t" and unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Zl", "Zp")


def _around(text: str, typed: str) -> str:
    at = next(at for at, letter in enumerate(text) if _is_control(letter) and letter not in typed)
    return ascii(text[max(0, at - 100) : at + 40])


_REMARKS = (
    "warning: ",
    "interrupted",
    "too little memory: ",
    "the plan states",
    "not measured",
)
_OF_RUNS = ("Dropout", "samples are made up")
"""How remarks of ranks begin, which may go before a run that fails, and not before one that is refused."""


def _lines(ran: Ran) -> list[str]:
    """The beginnings of what is said on standard error."""
    return [line[9:].strip() for line in ran.stderr.splitlines() if line.startswith("pipeplan:")]


def _messages(ran: Ran) -> int:
    """How many errors are said: remarks, which go before some, and notes of an answer are not."""
    errors = [text for text in _lines(ran) if not text.startswith((*_REMARKS, *_OF_RUNS))]  # a word or a break
    return len(errors) - len(ran.notes) + len(re.findall(r"^Error: ", ran.stderr, re.MULTILINE))


# The part ----------------------------------------------------------------------------------------------------------


@dataclass
class Inputs:
    """Fuzzed files and command lines."""

    name: str = "inputs"
    count: int = 10_000
    limit_s: float = 10.0
    memory_bytes: int | None = 3 << 30
    known: dict[str, list[Seed]] = field(default_factory=dict)
    with_torch: bool = True

    def prepare(self, folder: Path) -> None:
        """The valid files, and torch, which takes seconds to import."""
        os.environ["COLUMNS"] = "100"
        if self.with_torch:
            os.environ |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        self.known = seeds()
        for module in _WITH_TORCH if self.with_torch else ():
            importlib.import_module(module)
        if self.with_torch:
            from runtime_support.decoding_rank import plan_of

            plan = plan_of("gpt2-tiny", ["samples2"], [[0, 1]], batch=2, groups=1, context=13)
            self.known["written"] = [Seed(json.loads(plan.model_dump_json()), _json)]

    def drawn(self, index: int, seed: int, folder: Path) -> Input:
        """The command and its files."""
        templates = [each for each in TEMPLATES if self.with_torch or not each[1].startswith(_NEEDS_TORCH)]
        return drawn(drawn_for(self.name, seed, index), templates, self.known, folder)

    def attack(self, index: int, seed: int, folder: Path) -> Ended:
        """One command."""
        given = self.drawn(index, seed, folder)
        return judged(given, run(given, folder))

    def show(self, index: int, seed: int, folder: Path) -> str:
        """The command line, with its files in a folder."""
        given = self.drawn(index, seed, folder)
        (folder / "stdin").write_bytes(given.stdin)
        return "pipeplan " + shlex.join(given.arguments)
