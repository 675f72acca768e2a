"""How long the table of uniform layouts takes: choices, rows that may fit, and seconds of the process's work.

The cases are those of ``real_clusters.py``, whose folder they share: a model on a cluster of nodes of eight, profile
and cluster made where they are not there yet. Each case in a process of its own, the first table it makes: of the
longest pipelines of everything else alike, which a large search begins with, and with ``--all`` of every length. The
blocks' costs are made in it, too, as they are in a search.

    python benchmarks/uniform_table.py --state FOLDER [--only CASES] [--all]

With ``--rows FOLDER`` every row is written there, a file a case, to compare with what another version makes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import patch

from real_clusters import CASES, Case, State
from tables import machine, markdown

from pipeplan.planning import candidates
from pipeplan.planning.request import Request
from pipeplan.planning.uniform_space import Blocks, BoundedChoice, Choice, best_first

DEFAULT = ("llama3-70b-64-h100", "llama3-70b-512-h100", "mixtral-8x22b-512-h100")


def measured(state: State, case: Case, rows: Path | None, *, every: bool) -> str:
    """The row of a case: its table of these lengths."""
    request = state.request(case).levelled
    made = list[int]()

    def counting(request: Request, choices: list[Choice], blocks: Blocks) -> list[BoundedChoice]:
        made.append(len(choices))
        return best_first(request, choices, blocks)

    make = candidates.uniform_choices if every else candidates.longest_choices
    with patch.object(candidates, "best_first", counting):
        begun = time.process_time()
        found = make(request)
        seconds = time.process_time() - begun
    if rows is not None:
        rows.mkdir(parents=True, exist_ok=True)
        with (rows / f"{case.stem}{'.all' * every}.txt").open("w", encoding="utf-8") as file:
            file.writelines(f"{each}\n" for each in found)
    return f"{case.name};{'all' if every else 'the longest'};{sum(made):,};{len(found):,};{seconds:.2f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, required=True, help="the folder of profiles and clusters")
    parser.add_argument("--only", default=",".join(DEFAULT), help="cases, with commas, as real_clusters.py names them")
    parser.add_argument("--all", action="store_true", help="pipelines of every length, not the longest alone")
    parser.add_argument("--rows", type=Path, help="a folder to write rows to")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    by_stem = {case.stem: case for case in CASES}
    if options.child:
        print(measured(State(options.state, 60.0), by_stem[options.child], options.rows, every=options.all))
        return
    own = [sys.executable, __file__, "--state", str(options.state), *(["--all"] * options.all)]
    own += ["--rows", str(options.rows)] * (options.rows is not None)
    ran = [
        subprocess.run([*own, "--child", by_stem[stem].stem], check=True, text=True, stdout=subprocess.PIPE).stdout
        for stem in options.only.split(",")
    ]
    header = ("case", "pipelines", "choices", "rows that may fit", "seconds of work")
    print(markdown(header, [each.strip().split(";") for each in ran]))
    print(f"\n{machine()}.")


if __name__ == "__main__":
    main()
