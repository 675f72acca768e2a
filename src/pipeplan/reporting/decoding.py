"""The first screen of a search for decode steps: how devices share them, what they take, and what they send."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TextIO

from rich.table import Table
from rich.text import Text

from pipeplan.files import Plan
from pipeplan.planning.build_plan import Result
from pipeplan.planning.decoding import DecodeAnswer
from pipeplan.reporting.layout import Clause, Column, Row, console_for, fitted, flowed, labelled, tables
from pipeplan.texts import counted
from pipeplan.units import format_bytes, format_ns
from pipeplan.workload.mesh import CACHE, CACHE_BY_QUERIES, COPIES, EXPERTS, SAMPLES, SHARDS, Mesh

_LINES = 12
"""Lines of the answer, where the terminal has at least 80 columns."""

_FORMS = {
    "dp": "data parallel: each device has requests of its own",
    "tp": "tensor parallel: each device has some heads of all requests",
    "cp": "decode context parallel: each device has a piece of every cache",
    "cp-q": "decode context parallel, queries alone gathered: each device has a piece of every cache",
    "pp": "a pipeline of single devices",
}


_AXES = {
    SAMPLES: "data parallel",
    CACHE: "decode context parallel",
    CACHE_BY_QUERIES: "decode context parallel (queries alone gathered)",
    EXPERTS: "expert parallel",
    SHARDS: "tensor parallel",
    COPIES: "copies",
}


def way_of(kv: str) -> str:
    """How devices share a plan's caches, in the field's words; a mixture by the sizes of each."""
    return " and ".join(map(_way_in_words, kv.split("+"))) if kv else "caches are not shared"


def _way_in_words(text: str) -> str:
    if text in _FORMS:
        return _FORMS[text].partition(":")[0]
    try:
        axes = Mesh.parse(text).axes
    except ValueError:  # whoever wrote the plan has other words
        return text
    return " x ".join(f"{_AXES.get(name, name)} {size}" for name, size in axes)


def decode_clauses(plan: Plan, token_ns: int | None) -> str:
    """What a plan of decode steps serves, and what that takes."""
    decode = plan.decode
    assert decode is not None
    turns = f", in {decode.groups} groups that take turns" if decode.groups > 1 else ""
    said = [] if token_ns is None else [f"{format_ns(token_ns)} between two tokens of a request"]
    if plan.tokens_per_s is not None:
        said.append(f"{plan.tokens_per_s:,.0f} tokens/s of all")
    said.append(f"{counted(decode.batch, 'request')} of {decode.context_tokens:,} tokens at the last step{turns}")
    if decode.prefill_tokens:
        said.append(f"{decode.prefill_tokens:,} tokens of prompts beside every group's step")
    said.append(f"{way_of(decode.kv)}, {format_bytes(max(plan.cache_bytes))} of cache on the fullest device")
    if decode.max_requests is not None:
        said.append(f"room for {counted(decode.max_requests, 'such request')}")
    return "; ".join(said)


def print_decoding(
    result: Result, written: str | None = None, file: TextIO | None = None, keep: str = "-o plan.json"
) -> None:
    """Print it, to stdout unless ``file`` is given.

    ``written`` is the plan's file, if there is one; ``keep`` is what would write it.
    """
    answer = result.decode
    assert answer is not None
    console = console_for(file)
    limits = sorted({device.memory_bytes for device in result.plan.devices if device.memory_bytes is not None})
    memory = f" of {' or '.join(map(format_bytes, limits))}" if limits else ""
    proved = answer.token_ns <= answer.token_lower_bound_ns * (1 + 1e-9)
    ended = "optimal" if proved else "best plan within the time limit" if result.timed_out else "best plan found"
    ended = "best plan so far" if result.interrupted else ended
    devices = counted(len(result.plan.devices), "device")
    heading = Text.assemble((result.plan.name, "bold"), f": {ended} for decode steps on {devices}{memory}")
    console.print(flowed(heading, console.width))
    console.print(labelled(fitted(list(_rows(result, answer, written, keep)), console.width, _LINES), console.width))
    if answer.volumes:
        first = answer.volumes[0]
        said = f"numbers sent per step and layer, for {first.requests} requests on {first.devices} devices:"
        console.print(flowed(said, console.width), *_volumes(answer), sep="\n")
    if answer.frontier:
        said = "one stage on all devices, every way that no other beats in memory and time:"
        console.print(flowed(said, console.width), *_frontier(answer), sep="\n")
    console.print()


def _rows(result: Result, answer: DecodeAnswer, written: str | None, keep: str) -> Iterator[Row]:
    yield (
        "plan",
        [(f"{_stages(result)}, {answer.kv}", 0), (f" ({_FORMS[answer.kv]})" if answer.kv in _FORMS else "", 1)],
    )
    if answer.kv not in _FORMS:
        yield "", [(way_of(answer.kv), 0)]
    if answer.dcp > 1:
        yield "", [(f"--dcp {answer.dcp}: {answer.dcp} devices share each request's cache along its text", 0)]
    yield (
        "requests",
        [
            (f"{answer.batch} of {answer.context:,} tokens at the last step", 0),
            (f", in {answer.groups} groups that take turns" if answer.groups > 1 else "", 0),
        ],
    )
    yield (
        "speed",
        [
            (f"{format_ns(round(answer.token_ns))} between two tokens of a request", 0),
            (f", {answer.tokens_per_s:,.0f} tokens/s of all", 0),
        ],
    )
    if answer.prefill_tokens and answer.alone_token_ns is not None:
        said = (
            f"{answer.prefill_tokens:,} tokens of prompts beside every group's step; {format_ns(answer.alone_token_ns)}"
        )
        yield "prompts", [(f"{said} between two tokens without them", 0)]
    yield "memory", [*_memory(result, answer)]
    for shares, count in Counter(_shares(result)).items():
        yield "shared", [(f"{counted(count, 'stage')}: {shares}", 0)]
    if written is not None:
        yield "next", [(f"pipeplan check {written}", 0)]
    else:
        yield "next", [(f"{keep} keeps the plan, for check, simulate and run", 0)]


def _stages(result: Result) -> str:
    sizes = Counter(len(stage.devices) for stage in result.plan.stages if stage.blocks)
    return " and ".join(f"{counted(count, 'stage')} of {counted(size, 'device')}" for size, count in sizes.items())


def _memory(result: Result, answer: DecodeAnswer) -> Iterator[Clause]:
    peaks = [each.peak_bytes for each in result.plan.predicted.memory]
    yield (
        f"{format_bytes(max(answer.cache_bytes))} of cache on the fullest device, {format_bytes(max(peaks))} in all",
        0,
    )
    if answer.max_requests is not None:
        yield f"; room for {counted(answer.max_requests, 'such request')}", 0


def _shares(result: Result) -> Iterator[str]:
    """Of each stage of several devices, how often its blocks are shared in each way."""
    for stage in result.plan.stages:
        if stage.configurations:
            yield ", ".join(f"{count} blocks {text}" for text, count in Counter(stage.configurations).items())


def _volumes(answer: DecodeAnswer) -> Iterator[Table]:
    """What a device sends in a step and layer, as the thesis prints it and as counted."""
    every = answer.volumes
    yield from tables(
        [
            Column("a device sends", [each.kept for each in every], key=True),
            Column(
                "as printed (thesis, 4.4)",
                ["-" if each.printed is None else f"{each.printed:,.0f}" for each in every],
            ),
            Column("counted alike", [f"{each.counted:,.0f}" for each in every]),
            Column("bytes, as run", [format_bytes(round(each.bytes)) for each in every]),
        ],
        80,
    )


_SHOWN = 12
"""Points of a frontier that are shown."""


def _frontier(answer: DecodeAnswer) -> Iterator[Table]:
    """The frontier, of many points some at even distances, the first and the last among them."""
    points = answer.frontier
    if len(points) > _SHOWN:
        points = tuple(points[round(n * (len(points) - 1) / (_SHOWN - 1))] for n in range(_SHOWN))
    yield from tables(
        [
            Column("memory", [format_bytes(each.memory_bytes) for each in points], key=True),
            Column("token", [format_ns(each.token_ns) for each in points]),
            Column("blocks", [each.blocks for each in points], words=True),
        ],
        80,
    )
