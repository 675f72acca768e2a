"""A profile as tables: what it is of, totals, blocks, shares by kind of operator, and warnings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TextIO

from rich.table import Table
from rich.text import Text

from pipeplan.costs.inspection import (
    SUMMED,
    Inspection,
    alike,
    cautions,
    counts,
    is_disturbed,
    kept_state,
    operator_shares,
    phase_sums,
    rows_of,
    sums,
    worst,
)
from pipeplan.files import CostRow, Profile
from pipeplan.reporting.layout import Column, console_for, flowed, more, shown_rows, tables
from pipeplan.texts import counted
from pipeplan.units import format_bytes, format_ns
from pipeplan.workload.kinds import MASTER, STATE_KINDS

_MAX_KINDS = 40
_MAX_CAUTIONS = 12


def print_inspection(inspection: Inspection, file: TextIO | None = None, *, details: bool = False) -> None:
    """Print blocks, sums, shares and warnings, to stdout unless ``file`` is given; ``details`` has every row of costs.

    Where micro-batch sizes are asked for, only those are shown, of which the profile has rows.
    """
    console, profile = console_for(file), inspection.profile
    print_blocks(profile, file, details=details, asked=inspection.asked)
    if inspection.size is not None:
        once = "; of what blocks share, with the first of them" if profile.tied else ""
        shares = f"shares at micro-batch size {inspection.size}; states are all that training keeps of parameters{once}"
        console.print(flowed(shares, console.width))
        console.print(*_shares(profile, inspection.size, console.width), sep="\n")
    found = cautions(profile, inspection.asked)
    console.print(Text(counted(len(found), "warning") if found else "no warnings", style="bold"))
    for caution in found[:_MAX_CAUTIONS]:
        console.print(flowed(Text.assemble(("warning: ", "yellow"), caution.text), console.width))
    if len(found) > _MAX_CAUTIONS:
        console.print(f"... and {len(found) - _MAX_CAUTIONS} more; --json has them all")


def print_worst(profile: Profile, path: str, cause: str, file: TextIO, most: int = 3) -> None:
    """Print in a few lines that a profile is doubtful, if it is: the worst, and the ``cause`` where times vary."""
    found = cautions(profile)
    if not found:
        return
    console = console_for(file)
    rest = f", the worst of each kind first; pipeplan profile --show {path} has all" if len(found) > most else ""
    console.print(flowed(f"{counted(len(found), 'warning')}{rest}", console.width))
    for caution in worst(found, most):
        console.print(flowed(Text.assemble(("warning: ", "yellow"), caution.text), console.width))
    if is_disturbed(found):
        console.print(flowed(cause, console.width))


def print_blocks(
    profile: Profile, file: TextIO | None = None, *, details: bool = False, asked: Sequence[int] = ()
) -> None:
    """Print what a profile is of, its totals, and for each kind of block what it costs whole, at the largest size.

    With ``details`` there is a row for each kind and case. Only sizes ``asked`` for are shown, if it has any of them.
    """
    console, source = console_for(file), profile.source
    origin = " ".join(filter(None, (source.method, f"on {source.device}" if source.device else "", source.reference)))
    heading = Text.assemble((profile.name, "bold"), f": {', '.join(filter(None, (origin, source.dtype)))}")
    branches = _branches(profile)
    lines: list[str | Text] = [heading, _about(profile), *([branches] if branches else []), _cases(profile)]
    for line in lines:
        console.print(flowed(line, console.width))
    console.print(*_totals(profile, asked, console.width), sep="\n")
    console.print(*_phases(profile, console.width), sep="\n")
    console.print(*tables(_block_columns(profile, asked, details=details), console.width), sep="\n")


_MAX_EDGES = 8


def _branches(profile: Profile) -> str:
    """The edges that do not lead from a block to the next one, of a model that is no chain; the first few."""
    next_of = {block.id: other.id for block, other in pairwise(profile.blocks)}
    found = [f"{edge.source} -> {edge.target}" for edge in profile.edges if next_of.get(edge.source) != edge.target]
    more = f" and {len(found) - _MAX_EDGES} more" if len(found) > _MAX_EDGES else ""
    return f"other edges than to the next block: {', '.join(found[:_MAX_EDGES])}{more}" if found else ""


def _cases(profile: Profile) -> str:
    """Which cases there are rows of costs for, in a line."""
    rows = [row for block in profile.blocks for row in block.costs]
    sizes = [
        ("samples", {row.microbatch_size for row in rows}),
        ("tp", {row.shards for row in rows}),
        ("cp", {row.context for row in rows}),
        ("ep", {row.expert for row in rows}),
        ("etp", {row.expert_shards for row in rows}),
    ]
    said = [f"{name} {', '.join(map(str, sorted(found)))}" for name, found in sizes if found - {1} or name == "samples"]
    named = sorted({row.configuration for row in rows if row.configuration})
    said += [f"configurations {', '.join(named)}"] if named else []
    said += ["tp with * also divides the sequence"] if any(row.sequence_parallel for row in rows) else []
    said += ["with and without recomputation"] if any(row.recompute for row in rows) else []
    return f"costs for {'; '.join(said)}"


def _block_columns(profile: Profile, asked: Sequence[int], *, details: bool) -> list[Column]:
    kinds = alike(profile)
    cases: list[tuple[str, int, CostRow] | range] = []
    for number in shown_rows(len(kinds), _MAX_KINDS):
        if isinstance(number, range):
            cases.append(number)
        else:
            blocks = kinds[number]
            cases += [(blocks[0].id, len(blocks), row) for row in rows_of(blocks[0], asked, details=details)]
    rows = [case[2] for case in cases if not isinstance(case, range)]

    def column(title: str, text: Callable[[CostRow], str], *, key: bool = False, words: bool = False) -> Column:
        return Column(title, ["..." if isinstance(case, range) else text(case[2]) for case in cases], words, key)

    def figure(place: int) -> Callable[[CostRow], str]:
        return lambda row: _costs(row)[place]

    sizes: list[tuple[str, Callable[[CostRow], str], bool]] = [
        ("tp", lambda row: f"{row.shards}{'*' if row.sequence_parallel else ''}", any(row.shards > 1 for row in rows)),
        ("cp", lambda row: str(row.context), any(row.context > 1 for row in rows)),
        ("ep", lambda row: str(row.expert), any(row.expert > 1 for row in rows)),
        ("etp", lambda row: str(row.expert_shards), any(row.expert_shards > 1 for row in rows)),
        ("configuration", lambda row: row.configuration or "-", any(row.configuration for row in rows)),
        ("recompute", lambda row: "yes" if row.recompute else "no", any(row.recompute for row in rows)),
    ]
    titles = ("forward", "backward", "I", "W", "spread", "held", "for W", "workspace")
    return [
        Column("block", [more(c) if isinstance(c, range) else c[0] for c in cases], words=True, key=True),
        Column("alike", ["..." if isinstance(c, range) else str(c[1]) for c in cases]),
        column("samples", lambda row: str(row.microbatch_size), key=True),
        *(column(title, text, key=True) for title, text, varied in sizes if varied),
        *(column(title, figure(place)) for place, title in enumerate(titles)),
    ]


def _costs(row: CostRow) -> list[str]:
    times = (row.forward_ns, row.backward_ns, row.input_grad_ns, row.weight_grad_ns)
    spread = f"{max(row.spread.values()):.1%}" if row.spread else "-"
    sizes = (row.activation_bytes, row.weight_grad_bytes, row.workspace_bytes)
    return [*map(_time, times), spread, *map(format_bytes, sizes)]


def _time(ns: int | None) -> str:
    return "-" if ns is None else format_ns(ns)


def _about(profile: Profile) -> str:
    found = counts(profile)
    state = kept_state(profile)
    kept = [f"{kind.name} {format_bytes(state[kind])}" for kind in STATE_KINDS if state[kind] or kind is not MASTER]
    many = f"{found['num_blocks']} blocks of {found['num_kinds']} kinds, {found['num_edges']} edges"
    frozen = f"{found['frozen_parameters']:,} frozen" if found["frozen_parameters"] else ""
    trained = f"{found['parameters']:,} parameters" if found["parameters"] else ""
    return ", ".join(filter(None, (many, trained, frozen, f"recipe {profile.recipe}", *kept)))


def _totals(profile: Profile, asked: Sequence[int], width: int) -> list[Table]:
    """Sums over all blocks, a row for each micro-batch size, or for those that are asked for and known."""
    known = profile.microbatch_sizes
    sizes = [size for size in known if size in asked] or known
    found = [sums(profile, size) for size in sizes]
    columns = [Column("all blocks", [counted(size, "sample") for size in sizes], words=True, key=True)]
    for title, field in zip(("forward", "backward", "I", "W"), SUMMED[:4], strict=True):
        columns.append(Column(title, [_time(each[field]) for each in found]))
    for title, field in zip(("held", "for W", "largest workspace"), (*SUMMED[4:], "workspace_bytes"), strict=True):
        columns.append(Column(title, [format_bytes(each[field] or 0) for each in found]))
    return tables(columns, width)


def _phases(profile: Profile, width: int) -> list[Table]:
    """What prefill and decode of the whole model take, and the cache of all requests on a device; of the most shards
    and the fewest."""
    found = phase_sums(profile)
    shards = {each["shards"] for each in found}
    shown = [each for each in found if each["shards"] in (min(shards), max(shards))]
    named = [each["phase"] + f", ep {each['expert']}" * (each["expert"] > 1) for each in shown]
    columns = [
        Column("all blocks", named, words=True, key=True),
        Column("context", [str(each["context_tokens"]) for each in shown]),
        Column("batch", [str(each["batch"]) for each in shown]),
        Column("tp", [str(each["shards"]) for each in shown]),
        Column("forward", [format_ns(each["forward_ns"]) for each in shown]),
        Column("of it attention", [format_ns(each["core_ns"]) for each in shown]),
        Column("cache", [format_bytes(each["cache_bytes"]) for each in shown]),
    ]
    return tables(columns, width) if shown else []


def _shares(profile: Profile, size: int, width: int) -> list[Table]:
    shares = operator_shares(profile, size)
    columns = [
        Column("operator", [share.operator for share in shares], words=True, key=True),
        Column("blocks", [str(share.num_blocks) for share in shares]),
        Column("time", [format_ns(share.time_ns) for share in shares]),
        Column("share", [f"{share.time_share:.1%}" for share in shares]),
        Column("states", [format_bytes(share.state_bytes) for share in shares]),
        Column("share", [f"{share.state_share:.1%}" for share in shares]),
        Column("held", [format_bytes(share.activation_bytes) for share in shares]),
        Column("share", [f"{share.activation_share:.1%}" for share in shares]),
    ]
    return tables(columns, width)
