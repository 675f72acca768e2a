"""The plans that ship, and how they are made again: each by the command line in its provenance.

    PYTHONPATH=src:tests python -m support.shipped_plans [NAME ...]

makes all of them again, or those whose name contains one of the given texts, in ``plans/``.
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

from support.commands import pipeplan
from support.paths import ROOT

SHIPPED = {path.stem: path for path in sorted((ROOT / "plans").glob("*.json"))}


def remake(name: str, folder: Path) -> None:
    """Run the command of a plan, which may be of a form that is no longer read, in a folder with ``profiles``."""
    plan = json.loads(SHIPPED[name].read_text(encoding="utf-8"))
    _, *arguments = shlex.split(plan["provenance"]["command"])
    done = pipeplan(*arguments, cwd=folder)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    for each in SHIPPED:
        if any(text in each for text in sys.argv[1:] or [""]):
            print(each, flush=True)
            remake(each, ROOT)
