"""What the text of cache parallelism (thesis, section 4.5) says of Figs. 4.2 to 4.5, each sentence as a check.

    python benchmarks/cache_orderings.py --ranges [--figure 4.5]    # with the constants' ranges in which each holds

The simulation is that of ``cache_parallelism.py``. The text has no numbers, only what is better where; what it gives as
a reason is a check of its own. Constants, and lengths of what is served, are varied one at a time, by the factors that
``catalog/serving/vllm.toml`` names for each; 0 is as if it cost nothing, as if attention always ran at full speed, or
as if all texts were as long. Beside them the same sentence of a whole model, whose weights leave less for the cache.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from cache_parallelism import (
    ALL_BATCHES,
    BATCHES,
    LAYER,
    LENGTHS,
    MODEL,
    STEPS,
    Case,
    Side,
    Texts,
    served,
)
from tables import machine, markdown

from pipeplan.catalog import read_table
from pipeplan.costs.cache_volumes import printed_volume, step_volume
from pipeplan.errors import InfeasibleError
from pipeplan.serving.course import ServingResult
from pipeplan.serving.steps import DecodeTime, EngineConstants, engine_constants

Served = Callable[[Side, Case], ServingResult]
"""How a side serves a case."""

TEXT: tuple[Side, ...] = ("cp", "tp", "dp")
ALONE: tuple[Side, ...] = ("dp", "dp in step")
LONG, SPREAD = LENGTHS[2:], (LENGTHS[0], LENGTHS[2], LENGTHS[-1])


@dataclass(frozen=True)
class Ordering:
    """A sentence of a figure: how it is checked of cases, and which sides it compares.

    ``behind`` is whether a side without room for a request is just the worse one.
    """

    figure: str
    says: str
    sides: Sequence[Side]
    cases: Sequence[Case]
    check: Callable[[Served, Sequence[Case]], bool]
    behind: bool = False

    def holds(self, serve: Served) -> bool:
        """Of all its cases."""
        return self.check(serve, self.cases)


def orderings() -> Iterator[Ordering]:
    """All of the text, in its order."""
    for figure, axis in (("4.2", "prefix"), ("4.3", "decode")):
        cases = [Case(axis, tokens, most) for most in BATCHES for tokens in LONG]
        pairs: list[tuple[Side, Side]] = [("cp", "tp"), *((side, dp) for dp in ALONE for side in TEXT[:2])]
        for pair in pairs:
            says = f"{axis} of 50,000 and more: {pair[0]} above {pair[1]}"
            yield Ordering(figure, says, pair, cases, partial(_above, *pair), behind=True)
        for dp in ALONE:
            says = f"{axis}: devices of {dp} wait, more than tp's and cp's"
            yield Ordering(figure, says, (*TEXT[:2], dp), cases, partial(_waits, dp))
        says = f"{axis}: dp evicts more than tp and cp, wherever anybody does"
        yield Ordering(figure, says, TEXT, cases, _evicts_more)
    yield from _of_batches()
    yield from _of_parts()


def _of_batches() -> Iterator[Ordering]:
    """Fig. 4.4."""
    for side in TEXT[:2]:
        says = f"any prefix and batch: dp slower than {side}, and later"
        yield Ordering("4.4", says, (side, "dp"), _prefixes(*SPREAD), partial(_better, side, "dp"), behind=True)
    for tokens in SPREAD[1:]:
        says = f"prefix of {tokens:,}: cp quicker than tp, and sooner, with any batch"
        yield Ordering("4.4", says, ("cp", "tp"), _prefixes(tokens), partial(_better, "cp", "tp"), behind=True)
    says = "prefix of 10,000: tp above cp for some batch"
    yield Ordering("4.4", says, ("tp", "cp"), _prefixes(LENGTHS[0]), _wins_short, behind=True)
    says = "that is as cp's attention reaches less there: its kernels beside tp's take more than with 100,000"
    yield Ordering("4.4", says, ("cp", "tp"), _of_part("prefix", LENGTHS[0], LENGTHS[-1]), _reaches_less)
    for axis in ("prefix", "decode"):
        says = f"{axis} of 100,000: past some batch throughput falls, of all three"
        yield Ordering("4.4", says, TEXT, [Case(axis, LENGTHS[-1], most) for most in ALL_BATCHES], _falls)
    says = "decode of 100,000: with more of a batch more is evicted"
    cases = [Case("decode", LENGTHS[-1], most) for most in ALL_BATCHES]
    yield Ordering("4.4", says, TEXT, cases, _evicts_by_batch)


def _of_parts() -> Iterator[Ordering]:
    """Fig. 4.5."""
    for tokens in SPREAD:
        at, cases = f"prefix of {tokens:,}", _of_part("prefix", tokens)
        yield Ordering("4.5", f"compute, {at}: the three within a tenth", TEXT, cases, _compute_alike)
        yield Ordering("4.5", f"compute, {at}: tp slowest", TEXT, cases, _compute_slowest)
    for says, printed in (("tp sends more than cp, as printed", True), ("the same, counted alike", False)):
        yield Ordering("4.5", f"communication: {says}", (), (), partial(_sends_more, printed))
    prefixes = _of_part("prefix", *SPREAD)
    for part in ("communication", "host"):
        says = f"{part}: tp longer than cp"
        yield Ordering("4.5", says, ("tp", "cp"), prefixes, partial(_longer, part, "tp", "cp"))
    for axis, cases in (("prefix", prefixes), ("decode", _of_part("decode", SPREAD[-1]))):
        for pair in product(ALONE, TEXT[:2]):
            says = f"host, moves and waiting, {axis}: {pair[0]} longer than {pair[1]}"
            yield Ordering("4.5", says, pair, cases, partial(_longer, "host", *pair))


def _prefixes(*lengths: int) -> list[Case]:
    return [Case("prefix", tokens, most) for tokens in lengths for most in ALL_BATCHES]


def _of_part(axis: str, *lengths: int) -> list[Case]:
    return [Case(axis, tokens, None) for tokens in lengths]


# Checks --------------------------------------------------------------------------------------------------------------


def _above(side: Side, other: Side, serve: Served, cases: Sequence[Case]) -> bool:
    return all(serve(side, case).tokens_per_s > serve(other, case).tokens_per_s for case in cases)


def _better(side: Side, other: Side, serve: Served, cases: Sequence[Case]) -> bool:
    """In tokens per second and in the time of a step."""
    return _above(side, other, serve, cases) and all(
        serve(side, case).step_ns < serve(other, case).step_ns for case in cases
    )


def _waits(dp: Side, serve: Served, cases: Sequence[Case]) -> bool:
    def share(side: Side, case: Case) -> float:
        found = serve(side, case)
        return found.waited_ns / found.end_ns

    return all(share(dp, case) > 0.01 + max(share(side, case) for side in TEXT[:2]) for case in cases)


def _evicts_more(serve: Served, cases: Sequence[Case]) -> bool:
    counts = [[serve(side, case).evictions for side in TEXT] for case in cases]
    some = [each for each in counts if any(each)]
    return bool(some) and all(dp > max(others) for *others, dp in some)


def _wins_short(serve: Served, cases: Sequence[Case]) -> bool:
    return any(_above("tp", "cp", serve, [case]) for case in cases)


def _reaches_less(serve: Served, cases: Sequence[Case]) -> bool:
    short, *long = (_part("compute", "cp", serve, case) / _part("compute", "tp", serve, case) for case in cases)
    return short > 1 and all(short > each for each in long)


def _falls(serve: Served, cases: Sequence[Case]) -> bool:
    rates = ([serve(side, case).tokens_per_s for case in cases] for side in TEXT)
    return all(max(found) > found[-1] for found in rates)


def _evicts_by_batch(serve: Served, cases: Sequence[Case]) -> bool:
    counts = ([serve(side, case).evictions for case in cases] for side in TEXT)
    return all(found == sorted(found) and found[-1] > found[0] for found in counts)


def _part(part: str, side: Side, serve: Served, case: Case) -> float:
    """Ns for each token of all; the host's with moves and what others are waited for."""
    found = serve(side, case)
    ns = {
        "compute": found.busy.compute_ns,
        "communication": found.busy.communication_ns,
        "host": found.busy.host_ns + found.moved_ns + max(0.0, found.waited_ns),
    }
    return ns[part] / found.tokens


def _longer(part: str, side: Side, other: Side, serve: Served, cases: Sequence[Case]) -> bool:
    return all(_part(part, side, serve, case) > _part(part, other, serve, case) for case in cases)


def _compute_alike(serve: Served, cases: Sequence[Case]) -> bool:
    found = [_part("compute", side, serve, case) for case in cases for side in TEXT]
    return max(found) <= 1.1 * min(found)


def _compute_slowest(serve: Served, cases: Sequence[Case]) -> bool:
    (case,) = cases
    cp, tp, dp = (_part("compute", side, serve, case) for side in TEXT)
    return tp > max(cp, dp)


def _sends_more(printed: bool, *_: object) -> bool:
    """For every number of devices and requests of the table of Fig. 4.1."""
    if printed:
        sides = [[printed_volume(side, 4096, 32, count, each) for side in ("tp", "cp")] for each, count in STEPS]
    else:
        volumes = [[step_volume(side, LAYER.shape, count, each) for side in ("tp", "cp")] for each, count in STEPS]
        sides = [[each.numbers + each.statistics for each in own] for own in volumes]
    return all(tp > cp for tp, cp in sides)


# A whole model -------------------------------------------------------------------------------------------------------

NOTHING = ServingResult(0, 1.0, DecodeTime(), float("inf"), 1, 0, 0.0)
"""Of a side that has no room even for one request: no tokens, and steps without end."""


def whole(ordering: Ordering, serve: Served) -> str:
    """Whether that holds of all layers, where there is room for a request, and who has none from which length on.

    Where a side without room is just the worse one, one of them with room is enough.
    """
    if not ordering.cases:
        return "as here: of each layer"
    known: dict[tuple[Side, Case], ServingResult] = {}
    lacking = dict[Side, int]()
    for side, case in product(ordering.sides, ordering.cases):
        try:
            known[side, case] = serve(side, case)
        except InfeasibleError:
            lacking[side] = min(case.tokens, lacking.get(side, case.tokens))
    enough = any if ordering.behind else all
    cases = [case for case in ordering.cases if enough((side, case) in known for side in ordering.sides)]
    said = "no room for " + ", ".join(f"{side} from {tokens:,}" for side, tokens in lacking.items())
    if not cases:
        return said if known else "no room for anybody"
    holds = ordering.check(lambda side, case: known.get((side, case), NOTHING), cases)
    return ("yes" if holds else "no") + (f" ({said})" if lacking else "")


# Ranges --------------------------------------------------------------------------------------------------------------

TOGETHER = {"table_ns": ("table_ns", "table_bytes")}
"""An entry of the block table is made and copied."""

FITTED = ("heads",)
"""Constants chosen after the text."""


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


def at(constants: EngineConstants, texts: Texts | None = None) -> Served:
    """How one layer is served."""
    return lambda side, case: served(side, case, constants, texts=texts)


def varied_world(name: str, factor: float) -> Served:
    """How one layer is served with a constant, or a length of what is served, so many times as large."""
    constants, texts = engine_constants(), Texts.usual()
    if name in Texts._fields:
        return at(constants, texts._replace(**{name: factor * getattr(texts, name)}))
    return at(varied(constants, name, factor))


def looked_at(chosen: Sequence[Ordering], names: Sequence[str], state: Path | None) -> dict[str, list[Any]]:
    """{world: of each ordering}: as it is, of a whole model, and with each factor of each constant."""
    key = [each.says for each in chosen]
    known: dict[str, Any] = json.loads(state.read_text()) if state and state.exists() else {}
    if known.get("orderings") != key:
        known = {"orderings": key}
    usual = engine_constants()
    worlds: dict[str, Callable[[], list[Any]]] = {
        "here": partial(_all_hold, chosen, at(usual)),
        "whole": lambda: [whole(each, lambda side, case: served(side, case, usual, MODEL)) for each in chosen],
    }
    for name in names:
        for factor in (each for each in ranges()[name] if each != 1):
            worlds[f"{name} {factor:g}"] = partial(_all_hold, chosen, varied_world(name, factor))
    for world, find in worlds.items():
        if world not in known:
            known[world] = find()
            if state:
                state.write_text(json.dumps(known))
    return known


def _all_hold(chosen: Sequence[Ordering], serve: Served) -> list[bool]:
    return [each.holds(serve) for each in chosen]


def row(number: int, each: Ordering, names: Sequence[str], found: dict[str, list[Any]]) -> dict[str, str]:
    """Whether it holds, by what if by a constant that was chosen after the text, within which factors, and whole."""
    here, of_whole = found["here"][number], found["whole"][number]
    able = {
        name: {factor: here if factor == 1 else found[f"{name} {factor:g}"][number] for factor in ranges()[name]}
        for name in names
    }
    alone = [name for name in FITTED if here and name in able and not able[name][0]]
    said = f"by {alone[0]} alone" if alone else "yes" if here else "no"
    if here and (of_whole == "no" or of_whole.startswith("no (")):
        of_whole = of_whole.replace("no", "no: turned round", 1)
    cells = {name: words(factors) for name, factors in able.items()}
    return {"Fig.": each.figure, "ordering of the text": each.says, "here": said, **cells, "whole model": of_whole}


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
    parser.add_argument("--state", type=Path, metavar="FILE", help="keep what was found there, and go on from that")
    asked = parser.parse_args()
    names = [*ranges()] if asked.ranges else []
    chosen = [each for each in orderings() if asked.figure in (None, each.figure)]
    found = looked_at(chosen, names, asked.state)
    rows = [row(number, each, names, found) for number, each in enumerate(chosen)]
    lengths = [name for name in names if name in Texts._fields]
    columns = [each for each in rows[0] if each not in lengths]
    print(markdown(columns, [[each[column] for column in columns] for each in rows]))
    if lengths:
        columns = [*columns[:3], *lengths]
        print("\n" + markdown(columns, [[each[column] for column in columns] for each in rows]))
    print(machine())


if __name__ == "__main__":
    main()
