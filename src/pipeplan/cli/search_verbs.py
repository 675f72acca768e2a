"""``pipeplan search`` and ``pipeplan compare``: search for the best plan; compare it with every known schedule."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from pipeplan import _api
from pipeplan.cli.output import Outputs, failure_as_json, say, say_notes
from pipeplan.cli.shared import (
    EXECUTOR,
    FILE,
    LARGE_NUMBER,
    NUM_TOKENS,
    NUMBER,
    RULES_OPTION,
    SCHEDULER,
    SEARCH_TARGET,
    OneOf,
    Status,
    comparison_request,
    given_file,
    given_kernels,
    given_rules,
    limited,
    planning_options,
    read_request,
    require_one_kind_of_workers,
    seldom_collected,
)
from pipeplan.errors import UsageError

if TYPE_CHECKING:
    from pipeplan._api import Plan, Request, Result, Tuning


@click.command("search")
@planning_options
@click.option(
    "--scheduler", type=SCHEDULER, default="auto", metavar="NAME", help="auto, repetend, rules, or a classic schedule."
)
@RULES_OPTION(
    help="Scheduling rules: a TOML file, the name of a built-in set, or Rules of a module that is imported, with "
    "functions of yours.  [default: all built-in sets]"
)
@click.option(
    "--start",
    "start_path",
    type=FILE,
    metavar="PLAN",
    help="Start from this plan, such as one of import: what is found is never slower. Devices and mini-batch are its "
    "own unless said.",
)
@click.option(
    "--for",
    "for_",
    type=SEARCH_TARGET,
    metavar="TARGET",
    help="Stay inside what a tool can run, and say what that costs: torchtitan, automodel, megatron, deepspeed, "
    "galvatron, vllm, sglang or tensorrt-llm. export --to TARGET then writes the plan.",
)
@click.option(
    "--objective",
    type=click.Choice(["cache", "time"]),
    help="With --for vllm, sglang or tensorrt-llm, what a cut is best for: most tokens in the cache, or the quickest "
    "busiest stage.  [default: cache where a profile of inference says what it keeps and memory is limited, else time]",
)
@click.option(
    "--batch",
    type=LARGE_NUMBER,
    metavar="N",
    help="Requests served at once, in total, for --kv or a server's cut.  [default: the most profiled]",
)
@click.option(
    "--context",
    "context_tokens",
    type=NUM_TOKENS,
    metavar="TOKENS",
    help="Context length of each request at the last step, in tokens, as 8192 or 8k.  [default: the most profiled]",
)
@click.option(
    "--kv",
    type=OneOf(["auto", "dp", "tp", "cp", "cp-q"]),
    help="Plan decode steps, and how devices share KV caches: each has requests (dp), heads (tp), or a piece of every "
    "cache (cp; cp-q gathers queries only); auto takes whatever is quickest.  [default: auto with --batch or "
    "--context]",
)
@click.option(
    *("--dcp", "--decode-context-parallel", "dcp"),
    type=NUMBER,
    metavar="N",
    help="Decode context-parallel size: how many devices share each request's KV cache, split along its tokens; with "
    "--kv auto, cp or cp-q.",
)
@click.option(
    "--prefill",
    type=NUM_TOKENS,
    metavar="TOKENS",
    help="Tokens of new prompts to prefill alongside every decode step, as 512 or 1k (chunked prefill); as many as "
    "--context for whole prompts.",
)
@click.option(
    "--keep-together",
    multiple=True,
    metavar="BLOCKS|N",
    help="Blocks that no stage has without the others: names with commas, * for anything; or N for every N layers. May "
    "be given more than once.",
)
@click.option(
    "--kernels",
    type=FILE,
    metavar="auto|NAME,...|COVER",
    help="Let kernel backends run blocks where that is quicker: all that profile --backends measured, some by name, or "
    "those of a cover that pipeplan kernels wrote.  [default: eager torch alone]",
)
@click.option(
    "--workers",
    type=click.IntRange(min=1, max=1024),
    help="Processes that evaluate candidates.  [default: 1; for auto-tuning, one per core]",
)
@EXECUTOR
@click.option(
    "--cache",
    type=FILE,
    metavar="FILE",
    help="Cache file for auto-tuning; configurations found in it are not evaluated again.",
)
@click.option(
    "--rules-output", type=FILE, metavar="FILE", help="Where to write the best rules found, to use with --rules."
)
@click.option("-o", "--output", type=FILE, metavar="FILE", help="Where to write the plan; - for stdout.")
@click.option(
    "--placement-output",
    type=FILE,
    metavar="FILE",
    help="Where to write just the stages, for editing and passing to --placement.",
)
@click.option("--details", is_flag=True, help="Print every device and stage, the critical path, and what was proved.")
@click.option(
    "--explain",
    is_flag=True,
    help="Show the ten best plans that differ, what limits each, why common layouts lose, and what to set in "
    "torchtitan, Megatron-LM and transformers' Trainer.",
)
@seldom_collected()
def search_command(
    workers: int | None,
    executor: str | None,
    cache: str | None,
    rules_output: str | None,
    output: str | None,
    placement_output: str | None,
    details: bool,
    explain: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    """Search for the best plan for PROFILE: its stages, replicas, micro-batch size and schedule, unless flags fix them.

    The search finds a valid plan early and keeps improving it until it is proved optimal, the time limit passes, or you
    press Ctrl-C. Either way you get the best plan found. With --scheduler rules and no --rules it auto-tunes: it ranks
    all built-in rules over a grid of depths, replicas, sizes and placements.

    With --kv, or --batch and --context, it plans the decode steps of a language model instead, from a profile made with
    --inference --context.
    """
    request = search_request(flags)
    tunes = request.tunes
    if not tunes and any(given is not None for given in (cache, rules_output)):
        raise UsageError("--cache and --rules-output are for --scheduler rules without --rules; leave them out")
    require_one_kind_of_workers(request, workers, executor)
    if tunes and explain:
        raise UsageError("--explain is for searches, not for auto-tuned rules; leave it out")
    if cache == "-":
        raise UsageError("--cache is both read and written, so it cannot be stdin or stdout; name a file")
    files = {"-o": output, "--rules-output": rules_output, "--placement-output": placement_output, "--cache": cache}
    with Outputs(files, as_json=as_json, renews=("--start",)) as outputs:
        tuning: Tuning | None = None
        with limited(request.time_limit, "tune" if tunes else "search") as limit:
            with failure_as_json(as_json), Status() as progress:
                if tunes:
                    tuning = _api.tune(request, workers=workers, cache=cache, progress=progress, within=limit)
                    result = tuning.result
                else:
                    how: Any = {"progress": progress, "within": limit, "explain": explain, "workers": workers or 1}
                    result = _api.search(request, executor=executor, **how)
            # signals are still heard: one that comes now takes no file away
            if output is not None:
                outputs.write_plan(result.plan, output)
            if rules_output is not None and tuning is not None:
                outputs.write_text(_api.to_toml(tuning.rules), rules_output)
            if placement_output is not None:
                outputs.write(result.plan.placed, placement_output)
        if result.interrupted:
            say("pipeplan: interrupted; this is the best plan so far", err=True)
        alone = tuple(_rules_alone(flags))
        if as_json or outputs.on_stdout:
            say_notes((*result.notes, *alone, *_api.input_notes(request)))
        if as_json:
            say(json.dumps((tuning or result).figures()))
        elif not outputs.on_stdout:
            written = output if output is not None and outputs.has(output) else None
            print_result(request, result, tuning, written, details=details, said=alone)
        outputs.say_written("plan", None if as_json else output)


def search_request(flags: Mapping[str, Any]) -> Request:
    """The request that the flags of ``search`` make. Raises UsageError."""
    scheduler, rules = flags["scheduler"], flags["rules_path"]
    if rules is not None and scheduler not in ("auto", "rules"):
        raise UsageError(f"--rules is for --scheduler rules, not for {scheduler}; leave one of them out")
    rules = given_rules(rules)
    start = given_file("plan", flags["start_path"])
    asked = ("objective", "batch", "context_tokens", "kv", "dcp", "prefill")
    serving = _api.ServingAsked(*(flags[name] for name in asked))
    more = {"serving": serving, "for_": flags["for_"], "keep_together": tuple(flags["keep_together"] or ())}
    more["kernels"] = given_kernels(flags["kernels"])
    request = read_request(flags, scheduler if rules is None else "rules", rules, start=start, **more)
    if request.tunes and request.spares:
        raise UsageError("--spares is for searches, not for auto-tuned rules; leave it out")
    if start is not None and flags["for_"] is not None:
        _require_runs(start, flags["for_"])
    return request


def _require_runs(start: Plan, target: str) -> None:
    """Refuse to start inside a target's limits from a plan that is outside of them. Raises UsageError."""
    try:
        _api.export(start, target)
    except UsageError as error:
        raise UsageError(f"--start: {error}; start from a plan that {target} runs, or leave out --start") from None


def _rules_alone(flags: Mapping[str, Any]) -> Iterator[str]:
    """That rules leave nothing to search, where ``--scheduler auto`` was asked for beside them."""
    source = click.get_current_context().get_parameter_source("scheduler")
    if flags["rules_path"] is not None and flags["scheduler"] == "auto" and source is not ParameterSource.DEFAULT:
        yield (
            "the schedule is that of --rules alone, so --scheduler auto searches for no other; compare --rules "
            "sets it beside one that is searched"
        )


def print_result(
    request: Request,
    result: Result,
    tuning: Tuning | None,
    written: str | None,
    *,
    details: bool,
    said: Sequence[str] = (),
) -> None:
    """The answer and the timeline, or with ``details`` all there is; ``written`` is the plan's file, if it is there.

    ``said`` are notes beside those of the result and of the request.
    """
    from pipeplan.reporting.answer import print_answer
    from pipeplan.reporting.decoding import print_decoding
    from pipeplan.reporting.layout import print_notes
    from pipeplan.reporting.tables import print_ranking
    from pipeplan.reporting.terminal import (
        print_explanation,
        print_proof,
        print_simulation,
        print_stages,
        print_timeline,
    )
    from pipeplan.reporting.trainers import print_settings

    simulation = _api.simulate(result.plan)
    if result.decode is not None:
        print_decoding(result, written, file=sys.stdout)
        if details:
            print_simulation(simulation, file=sys.stdout)
            print_stages(simulation.workload, file=sys.stdout)
        print_notes([*result.notes, *said, *_api.input_notes(request)], file=sys.stdout)
        return
    notes = [*result.notes, *said, *_api.input_notes(request), *([] if details else simulation.notes)]
    print_answer(request, result, simulation, written, file=sys.stdout)
    if result.explanation is not None:
        print_explanation(result.explanation, file=sys.stdout)
        print_settings(_api.trainer_settings(simulation), file=sys.stdout)
    if tuning is not None:
        print_ranking(tuning.rows, file=sys.stdout)
        say(f"{tuning.said}\n")
    if details:
        print_simulation(simulation, file=sys.stdout)
        print_stages(simulation.workload, file=sys.stdout)
        print_proof(result, file=sys.stdout)
    else:
        print_timeline(simulation, file=sys.stdout)
        if simulation.yardstick.estimated:
            notes.append(
                "times are estimated: 5 to 6 % off on average for dense models on A100 and H100, more for others "
                "(docs/benchmarks/published-runs.md); treat plans closer than that as ties"
            )
        if simulation.throughput.model_flops_utilisation is not None:
            notes.append("% of peak counts causal attention in full, as PaLM and Megatron-LM do (docs/simulate.md)")
        notes.append("--details prints every device and stage, the critical path and what was proved")
    print_notes(notes, file=sys.stdout)


@click.command("compare")
@planning_options
@RULES_OPTION(help="Rules to add to the comparison: a TOML file, the name of a built-in set, or Rules of a module.")
@seldom_collected()
def compare_command(as_json: bool, **flags: Any) -> None:
    """Time every classic schedule that applies to PROFILE, search for a better one, and list them best first.

    If neither the profile nor --placement fixes the placement, all strategies are compared, each with the micro-batch
    size that suits it best. Schedules that do not fit in memory are also timed with recomputation, and listed below
    the table with the memory they would need as they are. --rules adds rules of your own.
    """
    from pipeplan.reporting.tables import print_comparison

    request, rules = comparison_request(flags)
    with limited(request.time_limit, "compare") as limit:
        with failure_as_json(as_json), Status() as progress:
            found = _api.compare(request, rules=rules, progress=progress, within=limit)
        if found.interrupted:
            say("pipeplan: interrupted; these are the best plans so far", err=True)
        if as_json:
            say_notes(found.notes)
            say(json.dumps(found.figures()))
        else:
            print_comparison(found, file=sys.stdout)
    if found.shortage is not None:
        raise found.shortage
