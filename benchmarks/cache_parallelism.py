"""Cache parallelism (thesis, chapter 4): volumes of Fig. 4.1, and Figs. 4.2 to 4.5 simulated, with their orderings.

    python benchmarks/cache_parallelism.py              # all tables, two minutes
    python benchmarks/cache_parallelism.py --ranges     # and the range of each constant in which an ordering holds

One layer of Llama-7B (hidden 4096, 32 heads, feed-forward 11008, 16 bits) on four RTX A5000 of 24 GB with NVLink, only
decode steps. Nothing is measured but the cost of an entry of the block table. The text has no lengths but of the axis
and no constants: what is assumed stands in ``catalog/serving/vllm.toml``, with its source, and below.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, Literal, NamedTuple, get_args

from tables import machine, markdown

from pipeplan.costs.cache_volumes import KEPT, Kept, printed_volume, step_volume
from pipeplan.costs.devices import device_preset
from pipeplan.errors import InfeasibleError
from pipeplan.serving.engine import ServingResult, serve
from pipeplan.serving.requests import about, always, between, drawn
from pipeplan.serving.steps import EngineConstants, ServedLayer, StepCosts, engine_constants
from pipeplan.units import format_bytes

DEVICE, DEVICES = device_preset("a5000-24gb"), 4
LAYER = ServedLayer(hidden=4096, heads=32, kv_heads=32, feed_forward=11008)
MODEL = replace(LAYER, layers=32, beside_bytes=2 * 2 * 32000 * 4096)
LENGTHS, BATCHES = (10_000, 25_000, 50_000, 75_000, 100_000), (32, 128, 512)
ALL_BATCHES = (32, 64, 128, 256, 512)
WRITTEN, PROMPT, ROUNDS = 512, 1_000, 2
"""With long prompts a request writes about 512 tokens; with long answers its prompt has 1,000. Each request that may be
in the batch is followed by another: two rounds of the maximum batch."""

Side = Literal["dp", "dp in step", "tp", "cp", "cp-q"]
SIDES: tuple[Side, ...] = get_args(Side)
"""``dp`` are engines of their own; ``in step`` they take every step together, as processes of one program."""

TEXT: tuple[Side, ...] = ("cp", "tp", "dp")
ALONE: tuple[Side, ...] = ("dp", "dp in step")


class Case(NamedTuple):
    """A point of a figure: whose length is on the axis, that length, and the maximum batch."""

    axis: str
    tokens: int
    most: int


@cache
def served(side: Side, case: Case, constants: EngineConstants, layer: ServedLayer = LAYER) -> ServingResult:
    """All requests at once, lengths drawn with the same seed for every side."""
    if case.axis == "prefix":
        requests = drawn(ROUNDS * case.most, always(case.tokens), about(WRITTEN), seed=1)
    else:
        requests = drawn(ROUNDS * case.most, always(PROMPT), between(1, 2 * case.tokens), seed=1)
    kept: Kept = "dp" if side == "dp in step" else side
    costs = StepCosts(kept, layer, DEVICES, DEVICE, constants)
    return serve(costs, requests, case.most, together=side == "dp in step")


# Tables --------------------------------------------------------------------------------------------------------------


def volumes() -> str:
    """Fig. 4.1: numbers sent per device, step and layer."""
    rows = []
    for devices, requests in ((2, 32), (4, 32), (8, 32), (4, 128), (4, 512)):
        printed = [printed_volume(kept, 4096, 32, requests, devices) for kept in ("cp", "tp")]
        own = [step_volume(kept, LAYER.shape, requests, devices) for kept in ("cp", "tp", "cp-q")]
        counted = [each.numbers + each.statistics for each in own]
        rows.append([str(devices), str(requests), *(f"{int(each):,}" for each in (*printed, *counted))])
    header = ["devices", "requests", "cp, printed", "tp, printed", "cp", "tp", "cp-q"]
    return markdown(header, rows)


def throughput(axis: str, constants: EngineConstants) -> str:
    """Figs. 4.2 and 4.3: tokens per second and layer."""
    rows = []
    for most in BATCHES:
        for tokens in LENGTHS:
            found = [served(side, Case(axis, tokens, most), constants) for side in SIDES]
            moved = ", ".join(str(each.evictions) for each in found)
            rows.append([str(most), f"{tokens:,}", *(f"{each.tokens_per_s:,.0f}" for each in found), moved])
    return markdown(["maximum batch", axis, *SIDES, f"evictions ({', '.join(SIDES)})"], rows)


def latency(constants: EngineConstants) -> str:
    """Fig. 4.4: throughput and latency by the maximum batch."""
    rows = []
    for tokens in (LENGTHS[0], LENGTHS[2], LENGTHS[-1]):
        for kept in KEPT:
            found = [served(kept, Case("prefix", tokens, most), constants) for most in ALL_BATCHES]
            points = [f"{each.tokens_per_s:,.0f} at {each.step_ns / 1e6:.1f}" for each in found]
            rows.append([f"{tokens:,}", kept, *points])
    return markdown(["prefix", "", *(f"batch {most}" for most in ALL_BATCHES)], rows)


def breakdown(constants: EngineConstants) -> str:
    """Fig. 4.5: ms of a step."""
    rows = []
    for axis, tokens in (("prefix", LENGTHS[0]), ("prefix", LENGTHS[-1]), ("decode", LENGTHS[-1])):
        for kept in SIDES:
            found = served(kept, Case(axis, tokens, 128), constants)
            parts = found.busy.compute_ns, found.busy.communication_ns, found.busy.host_ns, found.moved_ns
            waited = found.waited_ns / found.end_ns
            own = [f"{each / found.steps / 1e6:.2f}" for each in parts]
            rows.append([f"{axis} {tokens:,}", kept, *own, f"{waited:.0%}"])
    return markdown(["", "", "compute", "communication", "block table", "moves to the host", "others wait"], rows)


def whole_model(constants: EngineConstants) -> str:
    """The same with the memory of all 32 layers: what is left for a cache, and tokens per second."""
    rows = []
    for kept in KEPT:
        costs = StepCosts(kept, MODEL, DEVICES, DEVICE, constants)
        room = DEVICES * costs.cache_bytes
        pages = room // (DEVICES if kept == "tp" else 1) // costs.token_bytes
        own = [format_bytes(room), f"{pages:,}"]
        for tokens in (1_000, *LENGTHS[:2]):
            try:
                found = served(kept, Case("prefix", tokens, 32), constants, MODEL)
                own.append(f"{found.tokens_per_s:,.0f}")
            except InfeasibleError:
                own.append("does not fit")
        rows.append([kept, *own])
    header = ["", "for the cache, four devices", "tokens of cache"]
    return markdown([*header, *(f"prefix {tokens:,}" for tokens in (1_000, *LENGTHS[:2]))], rows)


# Orderings -----------------------------------------------------------------------------------------------------------

Ordering = Callable[[EngineConstants], bool]
WholeOrdering = Callable[[EngineConstants], str]
LONG = LENGTHS[2:]


def _better(axis: str, kept: Side, other: Side, lengths: Sequence[int], constants: EngineConstants) -> bool:
    cases = [Case(axis, tokens, most) for most in BATCHES for tokens in lengths]
    return all(
        served(kept, case, constants).tokens_per_s > served(other, case, constants).tokens_per_s for case in cases
    )


def _of_whole_model(axis: str, kept: Side, other: Side, lengths: Sequence[int], constants: EngineConstants) -> str:
    """Whether that holds of all layers, at every length of which one of the two has room for a request."""
    rates = [[_rate_of_whole_model(side, axis, tokens, constants) for side in (kept, other)] for tokens in lengths]
    fitting = [one > two for one, two in rates if one or two]
    return "neither fits" if not fitting else "yes" if all(fitting) else "no"


def _rate_of_whole_model(side: Side, axis: str, tokens: int, constants: EngineConstants) -> float:
    """Tokens per second with a maximum batch of 32; 0 where a request does not fit."""
    try:
        return served(side, Case(axis, tokens, BATCHES[0]), constants, MODEL).tokens_per_s
    except InfeasibleError:
        return 0.0


def _wins_short(constants: EngineConstants) -> bool:
    cases = [Case("prefix", LENGTHS[0], most) for most in ALL_BATCHES]
    return any(
        served("tp", case, constants).tokens_per_s > served("cp", case, constants).tokens_per_s for case in cases
    )


def _falls(constants: EngineConstants) -> bool:
    for kept in TEXT:
        found = [served(kept, Case("decode", LENGTHS[-1], most), constants).tokens_per_s for most in ALL_BATCHES]
        if not max(found) > found[-1]:
            return False
    return True


def _parts(kept: Side, constants: EngineConstants, axis: str = "prefix") -> tuple[float, float, float]:
    found = served(kept, Case(axis, LENGTHS[-1], 128), constants)
    host = found.busy.host_ns + found.moved_ns + found.waited_ns
    return found.busy.compute_ns / found.tokens, found.busy.communication_ns / found.tokens, host / found.tokens


def _compute_alike(constants: EngineConstants) -> bool:
    cp, tp = (_parts(kept, constants)[0] for kept in ("cp", "tp"))
    return cp <= tp <= 1.1 * cp


def _orderings() -> Iterator[tuple[str, Ordering, WholeOrdering | None]]:
    """Each ordering, and of those by tokens per second the same of a whole model."""
    for axis in ("prefix", "decode"):
        pairs: list[tuple[Side, Side]] = [("cp", "tp"), *((other, dp) for dp in ALONE for other in TEXT[:2])]
        for pair in pairs:
            asked = axis, *pair, LONG
            name = f"{axis} of 50,000 and more: {' above '.join(pair)}"
            yield name, partial(_better, *asked), partial(_of_whole_model, *asked)
    short = partial(_of_whole_model, "prefix", "tp", "cp", LENGTHS[:1])
    yield "prefix of 10,000: tp above cp for some batch", _wins_short, short
    yield "decode of 100,000: past some batch throughput falls", _falls, None
    yield "compute: tp slowest, by at most a tenth over cp", _compute_alike, None
    yield "communication: tp above cp", lambda each: _parts("tp", each)[1] > _parts("cp", each)[1], None
    yield "host: tp above cp", lambda each: _parts("tp", each)[2] > _parts("cp", each)[2], None
    for dp in ALONE:
        yield f"host, moves and waiting, decode: {dp} above tp", partial(_waits_more, dp), None


def _waits_more(dp: Side, constants: EngineConstants) -> bool:
    return _parts(dp, constants, "decode")[2] > _parts("tp", constants, "decode")[2]


FACTORS = (1 / 16, 1 / 4, 1, 4, 16)


def _varied(constants: EngineConstants, name: str, factor: float) -> EngineConstants:
    """With one constant so many times as large; shares of full speed to that power."""
    value: Any = getattr(constants, name)
    shares = isinstance(value, tuple)
    changed: dict[str, Any] = {
        name: tuple((size, share**factor) for size, share in value) if shares else value * factor
    }
    return replace(constants, **changed)


VARIED = ("table_ns", "host_bytes_per_s", "links_bytes_per_s", "step_ns", "attention", "heads")


def orderings(constants: EngineConstants, *, ranges: bool) -> str:
    """Whether each ordering of the text holds, with which factors of each constant, and for a whole model."""
    rows = []
    for name, holds, whole in _orderings():
        own = "" if whole is None else whole(constants)
        rows.append([name, "yes" if holds(constants) else "no", *_ranges(constants, holds, ranges), own])
    return markdown(["ordering of the text", "here", *(VARIED if ranges else ()), "whole model, batch 32"], rows)


def _ranges(constants: EngineConstants, holds: Ordering, ranges: bool) -> Iterator[str]:
    for name in VARIED if ranges else ():
        able = [factor for factor in FACTORS if holds(_varied(constants, name, factor))]
        yield _words(able)


def _words(able: Sequence[float]) -> str:
    """The factors that hold, as runs of neighbours."""
    if len(able) == len(FACTORS):
        return "all"
    if not able:
        return "none"
    runs: list[list[float]] = []
    for factor in able:
        if runs and FACTORS.index(factor) == FACTORS.index(runs[-1][-1]) + 1:
            runs[-1].append(factor)
        else:
            runs.append([factor])
    return ", ".join(_one(run) for run in runs)


def _one(run: Sequence[float]) -> str:
    low, high = (f"{each:g}" if each >= 1 else f"1/{round(1 / each)}" for each in (run[0], run[-1]))
    return low if low == high else f"{low} to {high}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranges", action="store_true", help="vary each constant")
    asked = parser.parse_args()
    constants = engine_constants()
    print(machine())
    for title, table in (
        ("Fig. 4.1: numbers that a device sends", volumes()),
        ("Fig. 4.2: tokens per second, long prompts", throughput("prefix", constants)),
        ("Fig. 4.3: tokens per second, long answers", throughput("decode", constants)),
        ("Fig. 4.4: tokens per second at ms of a step", latency(constants)),
        ("Fig. 4.5: ms of a step, batch 128", breakdown(constants)),
        ("A whole model", whole_model(constants)),
        ("Orderings", orderings(constants, ranges=asked.ranges)),
    ):
        print(f"\n{title}\n\n{table}", flush=True)


if __name__ == "__main__":
    main()
