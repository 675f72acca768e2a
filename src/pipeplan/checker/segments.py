"""Rules of stages whose blocks kernel backends run: rows of their segments, and changes between backends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from decimal import Decimal

from pipeplan.checker.facts import Findings
from pipeplan.files import CostRow, Edge, Profile
from pipeplan.files.profile import EAGER
from pipeplan.workload.elements import Stage


def runs_of(stage: Stage) -> list[tuple[str, ...]]:
    """Blocks of a stage that run at once: a segment's, or each alone that eager torch runs."""
    backend = {block: each.backend for each in stage.segments for block in each.blocks}
    whole = [each.blocks for each in stage.segments if each.backend != EAGER]
    alone = [(block,) for block in stage.blocks if backend.get(block, EAGER) == EAGER]
    place = {block: at for at, block in enumerate(stage.blocks)}
    return sorted([*whole, *alone], key=lambda blocks: place[blocks[0]])


def segment_rows(
    number: int, stage: Stage, eager: Sequence[CostRow], profile: Profile, findings: Findings
) -> tuple[list[CostRow], int, int]:
    """Rows of what runs at once, ns of all changes of backend, and bytes that several of them count.

    ``eager`` are those of its blocks in eager torch. Empty, with a problem noted, where the profile lacks one.
    """
    place = f"stages[{number}].segments"
    size, own = stage.microbatch_size // stage.replicas, dict(zip(stage.blocks, eager, strict=True))
    backend = {block: each.backend for each in stage.segments for block in each.blocks}
    known = profile.kernels
    found = []
    for blocks in runs_of(stage):
        name = backend[blocks[0]]
        if name == EAGER:
            found.append(own[blocks[0]])
            continue
        rows = () if known is None else known.rows.get(blocks, ())
        plain = [
            row
            for row in rows
            if row.backend == name
            and row.microbatch_size == size
            and not row.recompute
            and (row.shards, row.context, row.expert, row.configuration) == (1, 1, 1, None)
        ]
        if not plain:
            text = f"the profile has no row of {', '.join(blocks)} by backend {name!r} for {size} samples"
            findings.add("profile", place, text)
            return [], 0, 0
        found.append(_whole(_slower(plain[0], stage.speed)))
    changes = 0
    for block, name in backend.items():
        users = {edge.target for edge in profile.edges_from.get(block, ())}
        changes += len({backend[user] for user in users if user in backend} - {name})
    ns = changes * (0 if known is None else known.change_ns)
    return found, _slow(ns, stage.speed), _counted_twice(stage, profile, size)


def _whole(row: CostRow) -> CostRow:
    """A row of a backend: its backward has no parts."""
    return row.model_copy(update={"input_grad_ns": None, "weight_grad_ns": None})


def _slower(row: CostRow, speed: float) -> CostRow:
    times = {key: getattr(row, key) for key in ("forward_ns", "backward_ns")}
    return row.model_copy(update={key: _slow(ns, speed) for key, ns in times.items() if ns is not None})


def _slow(ns: int, speed: float) -> int:
    over, under = Decimal(repr(speed)).as_integer_ratio()
    return -(-ns * under // over)


def _counted_twice(stage: Stage, profile: Profile, size: int) -> int:
    """Bytes of tensors that runs count and the stage does not hold; what a run makes for itself is inside of it.

    What a run of several blocks needs for its backward is not known: all that it takes.
    """
    runs = runs_of(stage)
    backend = {block: each.backend for each in stage.segments for block in each.blocks}
    alone = {blocks[0] for blocks in runs if backend.get(blocks[0], EAGER) == EAGER}
    counted: Counter[tuple[str, str | None, str]] = Counter()
    sizes, kept = dict[tuple[str, str | None, str], int](), set[tuple[str, str | None, str]]()
    for blocks in runs:
        entering: dict[tuple[str, str | None, str], Edge] = {}
        for block in blocks:
            for edge in profile.edges_into.get(block, ()):
                saved = edge.gradient if edge.saved is None else edge.saved == "yes"
                if edge.source in blocks or not (edge.gradient or saved):
                    continue
                tensor = edge.source, edge.tensor, edge.target if edge.tensor is None else ""
                entering.setdefault(tensor, edge)
                if saved or block not in alone or edge.source not in stage.blocks:
                    kept.add(tensor)
        for tensor, edge in entering.items():
            sizes[tensor] = edge.bytes_per_sample if edge.broadcast else edge.bytes_per_sample * size
            if not counted[tensor] and edge.source in alone and edge.saved_by_source != "no":
                counted[tensor] += 1
                kept.add(tensor)
            counted[tensor] += 1
    return sum(sizes[tensor] * (count - (tensor in kept)) for tensor, count in counted.items())
