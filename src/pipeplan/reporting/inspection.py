"""A profile for people: tables of its blocks, their sums and shares, and what makes plans wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeplan.costs.inspection import SUMMED, Caution, Inspection, alike, cautions, counts, operator_shares, sums
from pipeplan.files import Block, CostRow, Profile
from pipeplan.units import format_bytes, format_ns

__all__ = ["print_blocks", "print_inspection"]

_PLAIN_WIDTH = 120
_MAX_KINDS = 40
_MAX_CAUTIONS = 12


def print_inspection(inspection: Inspection, file: TextIO | None = None) -> None:
    """Print blocks, sums, shares and warnings, to stdout unless ``file`` is given."""
    console, profile = _console(file), inspection.profile
    print_blocks(profile, file)
    console.print(_about(profile))
    console.print(_totals(profile))
    if sizes := profile.microbatch_sizes:
        console.print(f"shares at micro-batch size {sizes[-1]}; states are parameters, gradients and optimizer")
        console.print(_shares(profile, sizes[-1]))
    found = cautions(profile, inspection.asked)
    console.print(_conclusion(found))
    for caution in found[:_MAX_CAUTIONS]:
        console.print(Text.assemble(("warning: ", "yellow"), caution.text))
    if len(found) > _MAX_CAUTIONS:
        console.print(f"... and {len(found) - _MAX_CAUTIONS} more; --json has them all")


def _conclusion(found: Sequence[Caution]) -> Text:
    count = f"{len(found)} warning{'s' if len(found) > 1 else ''}" if found else "no warnings"
    return Text(count, style="bold")


def _console(file: TextIO | None) -> Console:
    console = Console(file=file, highlight=False)
    return console if console.is_terminal else Console(file=file, highlight=False, width=_PLAIN_WIDTH)


def print_blocks(profile: Profile, file: TextIO | None = None) -> None:
    """Print where the profile comes from and a row for each kind of block and case, identical blocks folded."""
    table = _table("block", "alike", "samples", "forward", "backward", "I", "W", "spread", "held", "for W", "workspace")
    kinds = alike(profile)
    for blocks in _shortened(kinds):
        for row in sorted(blocks[0].costs, key=lambda row: row.key[:2]) if blocks else ():
            table.add_row(blocks[0].id, str(len(blocks)), _case(row), *_costs(row))
        if not blocks:
            table.add_row("...", str(len(kinds) - _MAX_KINDS))
    console = _console(file)
    source = profile.source
    origin = " ".join(filter(None, (source.method, f"on {source.device}" if source.device else "", source.reference)))
    console.print(Text.assemble((profile.name, "bold"), f": {', '.join(filter(None, (origin, source.dtype)))}"))
    console.print(table)


def _shortened(kinds: Sequence[Sequence[Block]]) -> list[Sequence[Block]]:
    """All kinds, or the first and the last with an empty one for those between."""
    if len(kinds) <= _MAX_KINDS:
        return list(kinds)
    half = _MAX_KINDS // 2
    return [*kinds[:half], (), *kinds[-half:]]


def _case(row: CostRow) -> str:
    """What the row is for: samples, and shards, configuration and recomputation where it has them."""
    shards = f"{row.shards} shards" if row.shards > 1 else ""
    recompute = "recompute" if row.recompute else ""
    return " ".join(filter(None, (str(row.microbatch_size), shards, row.configuration, recompute)))


def _costs(row: CostRow) -> list[str]:
    times = (row.forward_ns, row.backward_ns, row.input_grad_ns, row.weight_grad_ns)
    spread = f"{max(row.spread.values()):.1%}" if row.spread else "-"
    sizes = (row.activation_bytes, row.weight_grad_bytes, row.workspace_bytes)
    return [*map(_time, times), spread, *map(format_bytes, sizes)]


def _time(ns: int | None) -> str:
    return "-" if ns is None else format_ns(ns)


def _about(profile: Profile) -> str:
    found = counts(profile)
    return (
        f"{found['num_blocks']} blocks of {found['num_kinds']} kinds, {found['num_edges']} edges, parameters "
        f"{format_bytes(found['parameter_bytes'])}, optimizer {format_bytes(found['optimizer_bytes'])}"
    )


def _totals(profile: Profile) -> Table:
    """Sums over all blocks, a row for each micro-batch size."""
    table = _table("all blocks", "forward", "backward", "I", "W", "held", "for W", "largest workspace")
    for size in profile.microbatch_sizes:
        found = sums(profile, size)
        times = [_time(found[field]) for field in SUMMED[:4]]
        held = [format_bytes(found[field] or 0) for field in (*SUMMED[4:], "workspace_bytes")]
        table.add_row(f"{size} sample{'s' if size > 1 else ''}", *times, *held)
    return table


def _shares(profile: Profile, size: int) -> Table:
    table = _table("operator", "blocks", "time", "share", "states", "share", "held", "share")
    for share in operator_shares(profile, size):
        table.add_row(
            share.operator,
            str(share.num_blocks),
            format_ns(share.time_ns),
            f"{share.time_share:.1%}",
            format_bytes(share.state_bytes),
            f"{share.state_share:.1%}",
            format_bytes(share.activation_bytes),
            f"{share.activation_share:.1%}",
        )
    return table


def _table(*headings: str) -> Table:
    """The first column to the left, all others to the right."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left")
    return table
