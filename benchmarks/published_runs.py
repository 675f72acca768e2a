"""Published training runs beside what closed forms of their layouts predict.

    python benchmarks/published_runs.py                  # the tables of docs/benchmarks/published-runs.md
    python benchmarks/published_runs.py --json           # every run
    python benchmarks/published_runs.py --runs FILE      # other runs of the same form

Everything that predicts is in ``pipeplan.costs.uniform``, every number it uses in the catalog. Fits that leave sources
out are made here anew, to see what a prediction of an unknown source is worth.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tables import markdown

from pipeplan.costs.uniform.fitting import Judged, fit_shares, judge, layout_key, predicted_s, read_runs, with_shares

RUNS = Path(__file__).parent / "data" / "published-runs.json"
FAR = 0.25


def main() -> None:
    """Print the tables, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, default=RUNS, metavar="FILE")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    judged = judge(read_runs(given.runs))
    if given.json:
        print(json.dumps({"runs": [each.figures() for each in judged], "summary": summary(judged)}, indent=1))
    else:
        report(judged)


Predict = Callable[[Sequence[Judged]], Sequence[float]]


@dataclass(frozen=True, slots=True)
class Errors:
    """Signed errors of some runs, and their layouts."""

    values: Sequence[float]
    layouts: Sequence[object]

    def figures(self) -> dict[str, Any]:
        """Mean absolute error, over runs and with every layout once; shares within 10 % and 20 %; the worst."""
        if not self.values:
            return {"runs": 0}
        sizes = [abs(each) for each in self.values]
        by_layout: dict[object, list[float]] = {}
        for layout, size in zip(self.layouts, sizes, strict=True):
            by_layout.setdefault(layout, []).append(size)
        once = [sum(each) / len(each) for each in by_layout.values()]
        return {
            "runs": len(sizes),
            "mean": sum(sizes) / len(sizes),
            "layouts": len(once),
            "mean_of_layouts": sum(once) / len(once),
            "within_10": sum(each <= 0.1 for each in sizes) / len(sizes),
            "within_20": sum(each <= 0.2 for each in sizes) / len(sizes),
            "worst": max(sizes),
        }


def summary(judged: Sequence[Judged]) -> dict[str, Any]:
    """The figures of each group of runs, by how the shares were fitted."""
    told = [each for each in judged if each.run is not None and each.error is not None]
    sources = sorted({each.source for each in told})
    one_out = refitted(told, [[each] for each in sources])
    halves = refitted(told, [sources[::2], sources[1::2]])
    groups = {
        "dense": [each for each in told if each.is_dense and each.is_16_bit],
        "experts": [each for each in told if not each.is_dense],
    }
    found: dict[str, Any] = {"said": len(told), "of": len(judged)}
    for name, group in groups.items():
        found[name] = {
            "catalog": of(group, {id(each): each.error or 0.0 for each in group}),
            "source left out": of(group, one_out),
            "fitted on the other half of the sources": of(group, halves),
        }
    return found


def of(group: Iterable[Judged], errors: dict[int, float]) -> dict[str, Any]:
    """Figures of a group's errors."""
    runs = list(group)
    return Errors([errors[id(each)] for each in runs], [layout_key(each.known) for each in runs]).figures()


def refitted(told: Sequence[Judged], left_out: Sequence[Sequence[str]]) -> dict[int, float]:
    """Errors of runs of each group of sources, at shares fitted without that group."""
    errors = {}
    for sources in left_out:
        fitted = fit_shares([each.measured for each in told if each.source not in sources])
        unseen = [each for each in told if each.source in sources]
        found = predicted_s(with_shares([each.known for each in unseen], fitted))
        for each, seconds in zip(unseen, found, strict=True):
            errors[id(each)] = float(seconds) / each.measured.step_s - 1
    return errors


def report(judged: Sequence[Judged]) -> None:
    """Print everything as tables."""
    rows = [
        [
            each.id,
            f"{each.step_s:.3f}" if each.step_s else "",
            "" if each.predicted_s is None else f"{each.predicted_s:.3f}",
            percent(each.error),
            percent(each.memory_error),
            each.why_not or ", ".join(each.assumed),
        ]
        for each in judged
    ]
    print(markdown(["run", "measured, s", "predicted, s", "error", "memory", "assumed, or why not said"], rows))
    figures = summary(judged)
    print(f"\n{figures['said']} of {figures['of']} runs said.\n")
    print(
        markdown(
            ["runs", "shares of", "number", "mean error", "each layout once", "within 10 %", "within 20 %", "worst"],
            [
                [
                    group,
                    how,
                    str(each["runs"]),
                    *(percent(each[key], sign=False) for key in ("mean", "mean_of_layouts")),
                    *(f"{100 * each[key]:.0f} %" for key in ("within_10", "within_20", "worst")),
                ]
                for group in ("dense", "experts")
                for how, each in figures[group].items()
                if each["runs"]
            ],
        )
    )
    far = [each for each in judged if each.error is not None and abs(each.error) > FAR]
    print(f"\nBeyond {100 * FAR:.0f} %:\n")
    print(
        markdown(
            ["run", "error", "its source does not print"],
            [[each.id, percent(each.error), ", ".join(each.assumed)] for each in far],
        )
    )


def percent(value: float | None, *, sign: bool = True) -> str:
    """As tables have it."""
    return "" if value is None else f"{100 * value:{'+' if sign else ''}.1f} %"


if __name__ == "__main__":
    main()
