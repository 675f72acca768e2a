"""``pipeplan kernels``: which kernel backend runs each block, from a profile that has their times."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from pipeplan import _api
from pipeplan.cli.output import Outputs, say
from pipeplan.cli.shared import DURATION, FILE, MODEL, NUMBER, SEED, SEQUENCE, OneOf, Shown, granularity, limited
from pipeplan.errors import UsageError

if TYPE_CHECKING:
    from pipeplan._api import KernelChoice


@click.command("kernels")
@click.argument("profile_path", type=FILE, metavar="PROFILE")
@click.option(
    "--microbatch-size",
    type=NUMBER,
    help="Samples that the times are of.  [default: the largest at which every block can run]",
)
@click.option("--time-limit", type=DURATION, default="30s", help="Stop after this long, with the best cover so far.")
@click.option(
    "--graph-level",
    is_flag=True,
    help="Then hand operators of the cover to a library of whole graphs where the whole model is measured to gain.",
)
@click.option("--model", type=MODEL, metavar="NAME", help="With --graph-level: the model that the profile is of.")
@click.option(
    "--library",
    metavar="NAME",
    help="With --graph-level: that library.  [default: the quickest alone]",
)
@click.option(
    "--measure-limit", type=DURATION, default="10min", help="With --graph-level: begin no other cover after this long."
)
@click.option(
    "--repeats", type=click.IntRange(1, 100_000), default=5, help="With --graph-level: timed runs of a cover."
)
@click.option(
    "--device",
    type=OneOf(["cpu", "cuda"]),
    default="cpu",
    help="With --graph-level: where to measure, as in the profile.",
)
@click.option("--threads", type=click.IntRange(1, 4096), help="Threads of CPU operators.  [default: torch's choice]")
@click.option(
    "--backend-rules", multiple=True, metavar="pkg.mod", help="Module with backends of your own. May be repeated."
)
@SEQUENCE
@granularity("Granularity of a captured model's blocks, as in the profile.")
@SEED
@click.option("-o", "--output", type=FILE, metavar="COVER", help="Where to write the cover; - for stdout.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def kernels_command(
    profile_path: str, microbatch_size: int | None, time_limit: int, output: str | None, as_json: bool, **given: Any
) -> None:
    """Choose which kernel backend runs each block of PROFILE.

    PROFILE is what profile --backends wrote: it has what each backend takes for blocks and for groups of blocks that it
    runs at once. Printed are these times, and the cover of the model that takes least, changes of backend included.
    Nothing is run, but for --graph-level. PROFILE may be - for stdin.
    """
    from pipeplan.reporting.kernels import print_choice, print_graph_level

    require_graph_level(given)
    with Outputs({"-o": output}, as_json=as_json) as outputs:
        profile = _api.read_profile(profile_path)
        with limited(time_limit / 1e9, "kernels") as limit:
            choice = _api.choose_kernels(profile, microbatch_size, math.inf, limit)
            if output is not None and not given["graph_level"]:
                outputs.write(choice.file, output)

        def kept() -> None:
            if output not in (None, "-"):
                outputs.write(choice.file, output)

        try:
            found = evolved(choice, given, kept)
        except KeyboardInterrupt:
            found = choice
            say("pipeplan: interrupted before the whole model had run; this is the operator level's cover", err=True)
        if output is not None and given["graph_level"]:
            outputs.write(found.file, output)
        if as_json:
            say(json.dumps(found.figures()))
        elif not outputs.on_stdout:
            print_choice(choice)
            if found.level is not None:
                print_graph_level(found.level)
        outputs.say_written("cover", output)


_OF_GRAPH_LEVEL: dict[str, Any] = {
    **dict.fromkeys(("model", "library", "sequence", "grain", "threads")),
    "device": "cpu",
    "backend_rules": (),
}


def require_graph_level(given: Mapping[str, Any]) -> None:
    """Refuse what is of the graph level without it, and that without a model. Raises UsageError."""
    odd = next((name for name, usual in _OF_GRAPH_LEVEL.items() if given[name] != usual), None)
    if odd is not None and not given["graph_level"]:
        raise UsageError(f"--{odd.replace('_', '-')} is of --graph-level, which runs the model; give that, too")
    if given["graph_level"] and given["model"] is None:
        raise UsageError("--graph-level measures the model; give --model NAME, as profile had it")


def evolved(choice: KernelChoice, given: Mapping[str, Any], keep: Callable[[], None] = lambda: None) -> KernelChoice:
    """The choice with the graph level, measured here, where that is asked for; before that it is to ``keep``.

    Raises:
        UsageError: the profile is of another model, or of another device.
    """
    if not given["graph_level"]:
        return choice
    how = {name: given[name] for name in ("sequence", "grain")}
    model, _ = _api.load_where_even(given["model"], **how, shared=(), shards=(1,), meta=False)
    profile, size = choice.profile, choice.size
    here = {"dtype": profile.source.dtype, "device": given["device"], "inference": profile.is_inference}
    if other := _api.goes_on(profile, model, [size], threads=given["threads"], **here):
        raise UsageError(f"--model {given['model']}: the profile is not of this model measured here: {other}")
    names = ("library", "seed", "repeats", "threads", "device")
    limit, rules = given["measure_limit"] / 1e9, tuple(given["backend_rules"])
    asked = _api.EvolutionAsked(**{name: given[name] for name in names}, limit_s=limit, rules=rules)
    keep()  # a backend may take the process down
    with Shown("measuring covers") as shown:
        found = _api.evolve_kernels(
            choice, model, asked, lambda each: shown.update(0, 0, f"{each.measured} covers, best {each.best_ns} ns")
        )
    return replace(choice, level=found)
