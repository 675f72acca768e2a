"""Published training runs beside what plans of their layouts predict.

    python benchmarks/published_runs.py                  # the tables of docs/benchmarks/published-runs.md
    python benchmarks/published_runs.py --json           # every run
    python benchmarks/published_runs.py --runs FILE      # other runs of the same form

Of every run that our words can say the profile, the placement and the cluster are made, and its plan is simulated
(``pipeplan.planning.uniform``); closed forms of the same terms stand beside it (``pipeplan.costs.uniform``). Every
number they use is in the catalog. Fits that leave sources out are made here anew, with the closed forms, to see what a
prediction of an unknown source is worth.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tables import markdown

from pipeplan.costs.uniform.fitting import layout_key
from pipeplan.costs.uniform.judging import Judged, judge, left_out_errors, read_runs
from pipeplan.errors import PipeplanError
from pipeplan.planning.uniform import judged_by_plans

RUNS = Path(__file__).parent / "data" / "published-runs.json"
FAR = 0.25


def main() -> None:
    """Print the tables, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, default=RUNS, metavar="FILE")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    try:
        judged = judged_by_plans(judge(read_runs(given.runs)))
    except PipeplanError as error:
        parser.error(str(error))
    if given.json:
        print(json.dumps({"runs": [each.figures() for each in judged], "summary": summary(judged)}, indent=1))
        return
    report(judged)
    if apart := closed_forms_apart(judged):
        worst = max(apart, key=lambda name: abs(apart[name]))
        print(f"\nClosed forms beside the plans of {len(apart)} runs: at most {percent(apart[worst])} apart ({worst}).")


def closed_forms_apart(judged: Sequence[Judged]) -> dict[str, float]:
    """The closed forms' time over that of the plan, less 1, of every run that is said."""
    both = ((each.id, each.closed_form_s, each.predicted_s) for each in judged)
    return {id_: closed / planned - 1 for id_, closed, planned in both if closed is not None and planned}


def most_apart(judged: Sequence[Judged]) -> float:
    """The most of them, either way."""
    return max(map(abs, closed_forms_apart(judged).values()), default=0.0)


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
    one_out = left_out_errors(told, [[each] for each in sources])
    halves = left_out_errors(told, [sources[::2], sources[1::2]])
    groups = {
        "dense": [each for each in told if each.is_dense and each.is_16_bit],
        "experts": [each for each in told if not each.is_dense],
    }
    found: dict[str, Any] = {"said": len(told), "of": len(judged), "closed_forms_apart": most_apart(judged)}
    for name, group in groups.items():
        found[name] = {
            "catalog": of(group, {each.id: each.error or 0.0 for each in group}),
            "catalog, closed forms": of(group, {each.id: closed_form_error(each) for each in group}),
            "source left out": of(group, one_out),
            "fitted on the other half of the sources": of(group, halves),
        }
    return found


def closed_form_error(judged: Judged) -> float:
    """Of a run that says what it took."""
    assert judged.closed_form_s is not None
    return judged.closed_form_s / judged.measured.step_s - 1


def of(group: Iterable[Judged], errors: dict[str, float]) -> dict[str, Any]:
    """Figures of a group's errors."""
    runs = list(group)
    return Errors([errors[each.id] for each in runs], [layout_key(each.known) for each in runs]).figures()


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
    print()
    print(markdown(["source", "runs", "mean error", "mean, signed", "mean error of memory"], by_source(judged)))
    far = [each for each in judged if each.error is not None and abs(each.error) > FAR]
    print(f"\nBeyond {100 * FAR:.0f} %:\n")
    print(
        markdown(
            ["run", "error", "its source does not print"],
            [[each.id, percent(each.error), ", ".join(each.assumed)] for each in far],
        )
    )


def by_source(judged: Sequence[Judged]) -> list[list[str]]:
    """A row for each source."""
    rows = []
    for source in sorted({each.source for each in judged}):
        runs = [each for each in judged if each.source == source]
        errors = [each.error for each in runs if each.error is not None]
        sizes = [each.memory_error for each in runs if each.memory_error is not None]
        rows.append(
            [
                source,
                f"{len(errors)} of {len(runs)}",
                percent(sum(map(abs, errors)) / len(errors) if errors else None, sign=False),
                percent(sum(errors) / len(errors) if errors else None),
                percent(sum(sizes) / len(sizes) if sizes else None),
            ]
        )
    return rows


def percent(value: float | None, *, sign: bool = True) -> str:
    """As tables have it."""
    return "" if value is None else f"{100 * value:{'+' if sign else ''}.1f} %"


if __name__ == "__main__":
    main()
