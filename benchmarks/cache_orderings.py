"""What the text of cache parallelism (thesis, section 4.5) says of Figs. 4.2 to 4.5, each sentence as a check.

    python benchmarks/cache_orderings.py --ranges [--figure 4.5]    # with the constants' ranges in which each holds

The simulation is that of ``cache_parallelism.py``. The text has no numbers, only what is better where; what it gives as
a reason is a check of its own. Constants are varied one at a time, by the factors that ``catalog/serving/vllm.toml``
names for each; 0 is as if it cost nothing, or as if attention always ran at full speed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from cache_parallelism import ALL_BATCHES, BATCHES, DEVICES, LAYER, LENGTHS, MODEL, Case, Side, served
from tables import machine, markdown

from pipeplan.catalog import read_table
from pipeplan.costs.cache_volumes import printed_volume, step_volume
from pipeplan.errors import InfeasibleError
from pipeplan.serving.course import ServingResult
from pipeplan.serving.steps import EngineConstants, engine_constants

Served = Callable[[Side, Case], ServingResult]
"""How a side serves a case."""

TEXT: tuple[Side, ...] = ("cp", "tp", "dp")
ALONE: tuple[Side, ...] = ("dp", "dp in step")
LONG, SPREAD = LENGTHS[2:], (LENGTHS[0], LENGTHS[2], LENGTHS[-1])
MOST = 128
"""The maximum batch of Fig. 4.5, whose text has none."""


class Ordering(NamedTuple):
    """A sentence of a figure, how it is checked, and of sides' throughputs how of a whole model's (else None)."""

    figure: str
    says: str
    holds: Callable[[Served], bool]
    whole: Callable[[Served], str] | None = None


def orderings() -> Iterator[Ordering]:
    """All of the text, in its order."""
    for figure, axis in (("4.2", "prefix"), ("4.3", "decode")):
        cases = [Case(axis, tokens, most) for most in BATCHES for tokens in LONG]
        pairs: list[tuple[Side, Side]] = [("cp", "tp"), *((side, dp) for dp in ALONE for side in TEXT[:2])]
        for side, other in pairs:
            says = f"{axis} of 50,000 and more: {side} above {other}"
            yield Ordering(figure, says, partial(_above, side, other, cases), partial(_whole, side, other, axis, LONG))
        for dp in ALONE:
            yield Ordering(figure, f"{axis}: devices of {dp} wait, more than tp's and cp's", partial(_waits, dp, cases))
        says = f"{axis}: dp evicts more than tp and cp, wherever anybody does"
        yield Ordering(figure, says, partial(_evicts_more, cases))
    yield from _of_batches()
    yield from _of_parts()


def _of_batches() -> Iterator[Ordering]:
    """Fig. 4.4."""
    for side in TEXT[:2]:
        cases = [Case("prefix", tokens, most) for tokens in SPREAD for most in ALL_BATCHES]
        says = f"any prefix and batch: dp slower than {side}, and later"
        yield Ordering("4.4", says, partial(_better, side, "dp", cases))
    for tokens in SPREAD[1:]:
        cases = [Case("prefix", tokens, most) for most in ALL_BATCHES]
        says = f"prefix of {tokens:,}: cp quicker than tp, and sooner, with any batch"
        yield Ordering("4.4", says, partial(_better, "cp", "tp", cases))
    short = partial(_whole, "tp", "cp", "prefix", LENGTHS[:1])
    yield Ordering("4.4", "prefix of 10,000: tp above cp for some batch", _wins_short, short)
    says = "that is as cp's attention reaches less there: its kernels beside tp's take more than with 100,000"
    yield Ordering("4.4", says, _reaches_less)
    for axis in ("prefix", "decode"):
        says = f"{axis} of 100,000: past some batch throughput falls, of all three"
        yield Ordering("4.4", says, partial(_falls, axis))
    yield Ordering("4.4", "decode of 100,000: with more of a batch more is evicted", _evicts_by_batch)


def _of_parts() -> Iterator[Ordering]:
    """Fig. 4.5."""
    for tokens in SPREAD:
        at = f"prefix of {tokens:,}"
        yield Ordering("4.5", f"compute, {at}: the three within a tenth", partial(_compute_alike, tokens))
        yield Ordering("4.5", f"compute, {at}: tp slowest", partial(_compute_slowest, tokens))
    yield Ordering("4.5", "communication: tp sends more than cp, as printed", lambda _: _sends_more(printed=True))
    yield Ordering("4.5", "the same, counted alike", lambda _: _sends_more(printed=False))
    yield Ordering("4.5", "communication: tp longer than cp", partial(_longer, "communication", "tp", "cp", "prefix"))
    yield Ordering("4.5", "host: tp longer than cp", partial(_longer, "host", "tp", "cp", "prefix"))
    for axis in ("prefix", "decode"):
        for dp, side in product(ALONE, TEXT[:2]):
            says = f"host, moves and waiting, {axis}: {dp} longer than {side}"
            yield Ordering("4.5", says, partial(_longer, "host", dp, side, axis))


# Checks --------------------------------------------------------------------------------------------------------------


def _above(side: Side, other: Side, cases: Sequence[Case], serve: Served) -> bool:
    return all(serve(side, case).tokens_per_s > serve(other, case).tokens_per_s for case in cases)


def _better(side: Side, other: Side, cases: Sequence[Case], serve: Served) -> bool:
    """In tokens per second and in the time of a step."""
    return _above(side, other, cases, serve) and all(
        serve(side, case).step_ns < serve(other, case).step_ns for case in cases
    )


def _waits(dp: Side, cases: Sequence[Case], serve: Served) -> bool:
    def share(side: Side, case: Case) -> float:
        found = serve(side, case)
        return found.waited_ns / found.end_ns

    return all(share(dp, case) > 0.01 + max(share(side, case) for side in TEXT[:2]) for case in cases)


def _evicts_more(cases: Sequence[Case], serve: Served) -> bool:
    counts = [[serve(side, case).evictions for side in TEXT] for case in cases]
    some = [each for each in counts if any(each)]
    return bool(some) and all(dp > max(others) for *others, dp in some)


def _wins_short(serve: Served) -> bool:
    return any(_above("tp", "cp", [Case("prefix", LENGTHS[0], most)], serve) for most in ALL_BATCHES)


def _reaches_less(serve: Served) -> bool:
    short, long = (_part("compute", "cp", "prefix", each, serve) for each in (LENGTHS[0], LENGTHS[-1]))
    short /= _part("compute", "tp", "prefix", LENGTHS[0], serve)
    return short > 1 and short > long / _part("compute", "tp", "prefix", LENGTHS[-1], serve)


def _falls(axis: str, serve: Served) -> bool:
    rates = ([serve(side, Case(axis, LENGTHS[-1], most)).tokens_per_s for most in ALL_BATCHES] for side in TEXT)
    return all(max(found) > found[-1] for found in rates)


def _evicts_by_batch(serve: Served) -> bool:
    counts = ([serve(side, Case("decode", LENGTHS[-1], most)).evictions for most in ALL_BATCHES] for side in TEXT)
    return all(found == sorted(found) and found[-1] > found[0] for found in counts)


def _part(part: str, side: Side, axis: str, tokens: int, serve: Served) -> float:
    """Ns for each token of all; the host's with moves and what others are waited for."""
    found = serve(side, Case(axis, tokens, MOST))
    ns = {
        "compute": found.busy.compute_ns,
        "communication": found.busy.communication_ns,
        "host": found.busy.host_ns + found.moved_ns + max(0.0, found.waited_ns),
    }
    return ns[part] / found.tokens


def _longer(part: str, side: Side, other: Side, axis: str, serve: Served) -> bool:
    lengths = SPREAD if axis == "prefix" else SPREAD[-1:]
    return all(_part(part, side, axis, each, serve) > _part(part, other, axis, each, serve) for each in lengths)


def _compute_alike(tokens: int, serve: Served) -> bool:
    found = [_part("compute", side, "prefix", tokens, serve) for side in TEXT]
    return max(found) <= 1.1 * min(found)


def _compute_slowest(tokens: int, serve: Served) -> bool:
    cp, tp, dp = (_part("compute", side, "prefix", tokens, serve) for side in TEXT)
    return tp > max(cp, dp)


def _sends_more(*, printed: bool) -> bool:
    """For every number of devices and requests of the table of Fig. 4.1."""
    pairs = [(2, 32), (DEVICES, 32), (8, 32), (DEVICES, 128), (DEVICES, 512)]
    if printed:
        sides = [[printed_volume(side, 4096, 32, each, count) for side in ("tp", "cp")] for count, each in pairs]
    else:
        volumes = [[step_volume(side, LAYER.shape, each, count) for side in ("tp", "cp")] for count, each in pairs]
        sides = [[each.numbers + each.statistics for each in own] for own in volumes]
    return all(tp > cp for tp, cp in sides)


def _whole(side: Side, other: Side, axis: str, lengths: Sequence[int], serve: Served) -> str:
    """Whether that holds of all layers, at every length of which one of the two has room for a request."""

    def rate(each: Side, tokens: int) -> float:
        try:
            return serve(each, Case(axis, tokens, BATCHES[0])).tokens_per_s
        except InfeasibleError:
            return 0.0

    rates = [(rate(side, tokens), rate(other, tokens)) for tokens in lengths]
    fitting = [one > two for one, two in rates if one or two]
    return "neither fits" if not fitting else "yes" if all(fitting) else "no"


# Ranges --------------------------------------------------------------------------------------------------------------

TOGETHER = {"table_ns": ("table_ns", "table_bytes")}
"""An entry of the block table is made and copied."""


def ranges() -> dict[str, tuple[float, ...]]:
    """{constant: the factors looked at}"""
    table = read_table("serving", "vllm")
    return {name.removesuffix("_factors"): tuple(each) for name, each in table.items() if name.endswith("_factors")}


def varied(constants: EngineConstants, name: str, factor: float) -> EngineConstants:
    """With one constant so many times as large; shares of full speed to that power."""

    def of(value: Any) -> Any:
        return tuple((size, share**factor) for size, share in value) if isinstance(value, tuple) else value * factor

    names = TOGETHER.get(name, (name,))
    return replace(constants, **{each: of(getattr(constants, each)) for each in names})


def at(constants: EngineConstants) -> Served:
    """How one layer is served."""
    return lambda side, case: served(side, case, constants)


def row(ordering: Ordering, constants: EngineConstants, *, vary: bool) -> list[str]:
    """Whether it holds, by what if by a constant that was chosen after the text, within which factors of each, and of
    a whole model."""
    here = ordering.holds(at(constants))
    said, found = "yes" if here else "no", []
    for name, factors in ranges().items() if vary else ():
        able = {factor: ordering.holds(at(varied(constants, name, factor))) for factor in factors}
        found.append(words(able))
        if here and name in FITTED and not able[0]:
            said = f"by {name} alone"
    whole = "" if ordering.whole is None else ordering.whole(lambda side, case: served(side, case, constants, MODEL))
    if here and whole == "no":
        whole = "no: turned round"
    return [ordering.figure, ordering.says, said, *found, whole]


FITTED = ("heads",)
"""Constants chosen after the text."""


def words(able: dict[float, bool]) -> str:
    """The factors at which something holds, as runs of neighbours."""
    if all(able.values()):
        return "all"
    runs: list[list[float]] = [[]]
    for factor, holds in able.items():
        if holds:
            runs[-1].append(factor)
        elif runs[-1]:
            runs.append([])
    return ", ".join(_run(run) for run in runs if run) or "none"


def _run(run: Sequence[float]) -> str:
    low, high = (f"{each:g}" if each >= 1 or not each else f"1/{round(1 / each)}" for each in (run[0], run[-1]))
    return low if low == high else f"{low} to {high}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranges", action="store_true", help="vary each constant")
    parser.add_argument("--figure", help="one figure alone")
    parser.add_argument("--state", type=Path, metavar="FILE", help="keep rows there, and go on from those it has")
    asked = parser.parse_args()
    constants, names = engine_constants(), [*ranges()] if asked.ranges else []
    chosen = [each for each in orderings() if asked.figure in (None, each.figure)]
    known = json.loads(asked.state.read_text()) if asked.state and asked.state.exists() else {}
    rows = []
    for each in chosen:
        if (key := f"{each.figure}, {[*names]}: {each.says}") not in known:
            known[key] = row(each, constants, vary=asked.ranges)
            if asked.state:
                asked.state.write_text(json.dumps(known, indent=1))
        rows.append(known[key])
    print(markdown(["Fig.", "ordering of the text", "here", *names, "whole model, batch 32"], rows))
    print(machine())


if __name__ == "__main__":
    main()
