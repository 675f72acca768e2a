"""Cache parallelism (thesis, chapter 4): volumes of Fig. 4.1, and Figs. 4.2 to 4.5 simulated.

    python benchmarks/cache_parallelism.py    # half a minute; their orderings are benchmarks/cache_orderings.py

One layer of Llama-7B (hidden 4096, 32 heads, feed-forward 11008, 16 bits) on four RTX A5000 of 24 GB with NVLink, only
decode steps. Nothing is measured but the cost of an entry of the block table. The text has no lengths but of the axis
and no constants: what is taken for them stands in ``catalog/serving/vllm.toml``, each with its source.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, lru_cache
from typing import Literal, NamedTuple, get_args

from tables import machine, markdown

from pipeplan.catalog import read_table
from pipeplan.costs.cache_volumes import KEPT, Kept, printed_volume, step_volume
from pipeplan.costs.devices import device_preset
from pipeplan.errors import InfeasibleError
from pipeplan.serving.course import ServingCourse, ServingResult
from pipeplan.serving.engine import course
from pipeplan.serving.requests import Lengths, ServedRequest, about, always, between, drawn
from pipeplan.serving.steps import EngineConstants, ServedLayer, StepCosts, engine_constants
from pipeplan.units import format_bytes

DEVICE, DEVICES = device_preset("a5000-24gb"), 4
LAYER = ServedLayer(hidden=4096, heads=32, kv_heads=32, feed_forward=11008)
MODEL = replace(LAYER, layers=32, beside_bytes=2 * 2 * 32000 * 4096)
LENGTHS, BATCHES = (10_000, 25_000, 50_000, 75_000, 100_000), (32, 128, 512)
ALL_BATCHES = (32, 64, 128, 256, 512)
STEPS = ((2, 32), (4, 32), (8, 32), (4, 128), (4, 512))
"""Devices and requests of Fig. 4.1's table."""

Side = Literal["dp", "dp in step", "tp", "cp", "cp-q"]
SIDES: tuple[Side, ...] = get_args(Side)
"""``dp`` are engines of their own; ``in step`` they take every step together, as processes of one program."""


class Case(NamedTuple):
    """A point of a figure: whose length is on the axis, that length, and the maximum batch; None is Fig. 4.5's."""

    axis: str
    tokens: int
    most: int | None


class Texts(NamedTuple):
    """What is served, as ``catalog/serving/vllm.toml`` says it."""

    written: float
    prompt: float
    rounds: float
    spread: float
    most: float

    @classmethod
    def usual(cls) -> Texts:
        """Those of the file."""
        table = read_table("serving", "vllm")
        return cls(**{name: table[name] for name in cls._fields})

    def requests(self, case: Case) -> Iterator[ServedRequest]:
        """Lengths drawn with the same seed for every side."""
        count = round(self.rounds * self.batch(case))
        if case.axis == "prefix":
            written = self._spread(about(self.written), self.written)
            return drawn(count, always(case.tokens), written, seed=1)
        written = self._spread(between(1, 2 * case.tokens), case.tokens)
        return drawn(count, always(round(self.prompt)), written, seed=1)

    def batch(self, case: Case) -> int:
        """The maximum batch."""
        return round(self.most) if case.most is None else case.most

    def alone(self, axis: str) -> Texts:
        """Without what says nothing of this axis."""
        return self._replace(**{"prompt" if axis == "prefix" else "written": 0, "most": 0})

    def _spread(self, lengths: Lengths, mean: float) -> Lengths:
        return lambda draw: max(1, round(mean + self.spread * (lengths(draw) - mean)))


@cache
def served(
    side: Side, case: Case, constants: EngineConstants, layer: ServedLayer = LAYER, texts: Texts | None = None
) -> ServingResult:
    """All requests at once, so that constants decide the times alone."""
    blocks, texts = (constants.block_tokens, constants.watermark), texts or Texts.usual()
    resolved = case._replace(most=texts.batch(case))
    return _course(side, resolved, blocks, layer, texts.alone(case.axis)).timed(constants)


@lru_cache(maxsize=300)
def _course(side: Side, case: Case, blocks: tuple[int, float], layer: ServedLayer, texts: Texts) -> ServingCourse:
    """What is done for that, with the catalog's constants but these."""
    kept: Kept = "dp" if side == "dp in step" else side
    constants = replace(engine_constants(), block_tokens=blocks[0], watermark=blocks[1])
    costs = StepCosts(kept, layer, DEVICES, DEVICE, constants)
    return course(costs, texts.requests(case), texts.batch(case), together=side == "dp in step")


# Tables --------------------------------------------------------------------------------------------------------------


def volumes() -> str:
    """Fig. 4.1: numbers sent per device, step and layer."""
    rows = []
    for devices, requests in STEPS:
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
            found = served(kept, Case(axis, tokens, None), constants)
            parts = found.busy.compute_ns, found.busy.communication_ns, found.busy.host_ns, found.moved_ns
            waited = abs(found.waited_ns) / found.end_ns  # of nothing by sums of ns that are rounded
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


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    constants = engine_constants()
    print(machine())
    for title, table in (
        ("Fig. 4.1: numbers that a device sends", volumes()),
        ("Fig. 4.2: tokens per second, long prompts", throughput("prefix", constants)),
        ("Fig. 4.3: tokens per second, long answers", throughput("decode", constants)),
        ("Fig. 4.4: tokens per second at ms of a step", latency(constants)),
        (f"Fig. 4.5: ms of a step, batch {Texts.usual().most}", breakdown(constants)),
        ("A whole model", whole_model(constants)),
    ):
        print(f"\n{title}\n\n{table}", flush=True)


if __name__ == "__main__":
    main()
