"""A profile in figures: its blocks, their sums, shares by kind of operator, and warnings of what would spoil plans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from math import prod
from typing import Any, Literal

from pipeplan.costs.decoding import cached_bytes
from pipeplan.costs.recipes import state_of
from pipeplan.display import Displayed
from pipeplan.files import Block, CostRow, Profile
from pipeplan.units import format_ns
from pipeplan.workload.kinds import STATE_KINDS, MemoryBytes

LARGE_SPREAD = 0.1
"""Interquartile range over median from which a measurement is doubtful: plans differ by less."""
_UNLIKE = 2
"""How many times as long backward in one piece may take as in two, or the reverse."""

_COUNTS = 0.01
"""The part of the model's time below which that does not count."""

FEW_REPEATS = 3
"""Timed runs below which a spread says nothing."""
WIDE_GAP = 4
"""Two neighbouring sizes further apart than this are too far to interpolate on a straight line."""
_CLEARLY_LESS = 0.95


# Figures ----------------------------------------------------------------------------------------------------------


def alike(profile: Profile) -> list[list[Block]]:
    """Blocks that cost the same, together: same operator, dimensions, parameters and cost rows."""
    found: dict[str, list[Block]] = {}
    for block in profile.blocks:
        found.setdefault(profile.alike[block.id], []).append(block)
    return list(found.values())


SUMMED = (
    "forward_ns",
    "backward_ns",
    "input_grad_ns",
    "weight_grad_ns",
    "activation_bytes",
    "weight_grad_bytes",
)


def sums(profile: Profile, size: int) -> dict[str, int | None]:
    """Sums over all blocks at a micro-batch size, and the largest workspace.

    A time that a block does not have sums to None. Of rows for several shard counts the fewest shards count, with
    recomputation only where there is nothing else.
    """
    rows = [_row(block, size) for block in profile.blocks]
    found: dict[str, int | None] = {}
    for field in SUMMED:
        values = [getattr(row, field) for row in rows]
        found[field] = None if None in values else sum(values)
    return {**found, "workspace_bytes": max(row.workspace_bytes for row in rows)}


def rows_of(block: Block, asked: Sequence[int] = (), *, details: bool = False) -> list[CostRow]:
    """A block's rows to show, of the sizes that are ``asked`` for if it has any of them.

    All with ``details``; else one, of the largest size, on the fewest devices, without recomputation.
    """
    known = [row for row in block.costs if row.microbatch_size in asked] or list(block.costs)
    if details:
        return sorted(known, key=lambda row: row.key[:5])
    return [_row(block, max(row.microbatch_size for row in known))]


def _row(block: Block, size: int) -> CostRow:
    rows = (row for row in block.costs if row.microbatch_size == size)
    split = "shards", "context", "expert", "expert_shards"
    return min(
        rows,
        key=lambda row: (row.recompute, prod(getattr(row, name) for name in split), row.configuration or ""),
    )


def _work_ns(row: CostRow) -> int:
    return row.forward_ns + row.whole_backward_ns


@dataclass(frozen=True, slots=True)
class OperatorShare:
    """What the blocks of one operator kind take; shares are of the whole profile, 0 where that takes nothing.

    ``time_ns`` is forward and backward, ``state_bytes`` all that training keeps of parameters, ``activation_bytes``
    what one micro-batch holds.
    """

    operator: str
    num_blocks: int
    time_ns: int
    time_share: float
    state_bytes: int
    state_share: float
    activation_bytes: int
    activation_share: float


def operator_shares(profile: Profile, size: int) -> list[OperatorShare]:
    """Time and memory by operator kind at a micro-batch size, the longest time first.

    What blocks share counts with the first of them.
    """
    found: dict[str, list[int]] = {}
    counted = Counter[str]()
    for each in profile.tied:
        counted.update(dict.fromkeys(each.blocks[1:], state_of(each, profile.recipe).total))
    for block in profile.blocks:
        row = _row(block, size)
        taken = (1, _work_ns(row), state_of(block, profile.recipe).total - counted[block.id], row.activation_bytes)
        found[block.operator] = [a + b for a, b in zip(found.get(block.operator, [0] * 4), taken, strict=True)]
    totals = [max(1, sum(column)) for column in zip(*found.values(), strict=True)]
    shares = [
        OperatorShare(
            operator, count, time, time / totals[1], state, state / totals[2], activations, activations / totals[3]
        )
        for operator, (count, time, state, activations) in found.items()
    ]
    return sorted(shares, key=lambda share: (-share.time_ns, share.operator))


# Cautions ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Caution:
    """Something about the profile that makes plans wrong: the first block it is about, and what to do."""

    kind: Literal[
        "missing-size", "extrapolation", "gap", "falling", "halves", "spread", "few-repeats", "no-split", "zero-cost"
    ]
    block: str | None
    text: str


def cautions(profile: Profile, asked: Sequence[int] = ()) -> list[Caution]:
    """What makes plans wrong, the worst of a kind first; ``asked`` are micro-batch sizes to be planned with."""
    kinds = alike(profile)
    return [
        *_missing_sizes(profile, kinds),
        *_beyond(profile, asked),
        *_gaps(profile),
        *_falling(kinds),
        *_unlike_halves(kinds),
        *_spreads(kinds),
        *_few_repeats(profile),
        *_without_split(profile, kinds),
        *_zero_costs(profile, kinds),
    ]


def _missing_sizes(profile: Profile, kinds: Sequence[Sequence[Block]]) -> Iterator[Caution]:
    """Sizes that some blocks have and others not, for one of their shard counts."""
    known = {row.microbatch_size for block in profile.blocks for row in block.costs}
    for blocks in kinds:
        by_split: dict[tuple[int, int, int, int], set[int]] = {}
        for row in blocks[0].costs:
            if not row.recompute:
                split = row.shards, row.context, row.expert, row.expert_shards
                by_split.setdefault(split, set()).add(row.microbatch_size)
        for (shards, context, expert, expert_shards), sizes in by_split.items():
            if missing := sorted(known - sizes):
                said = f" on {shards} shards" if shards > 1 else ""
                said += f" with context {context}" if context > 1 else ""
                said += f" with expert {expert}" if expert > 1 else ""
                said += f" and expert_shards {expert_shards}" if expert_shards > 1 else ""
                text = f"{_names(blocks)} has no costs for micro-batch size {_listed(missing)}{said}, which others have"
                remedy = f"profile with --microbatch {_listed(sorted(known))}"
                yield Caution("missing-size", blocks[0].id, f"{text}; {remedy}")


def _beyond(profile: Profile, asked: Sequence[int]) -> Iterator[Caution]:
    """Sizes asked for that are below the smallest or above the largest that every block has."""
    sizes = profile.microbatch_sizes
    beyond = [size for size in asked if not sizes or not sizes[0] <= size <= sizes[-1]]
    if beyond:
        have = _listed(sizes) if sizes else "none that every block has"
        text = f"micro-batch size {_listed(beyond)} is beyond the profile's ({have}) and would have to be extrapolated"
        remedy = f"searches refuse that; profile with --microbatch {_listed(sorted({*sizes, *beyond}))}"
        yield Caution("extrapolation", None, f"{text}; {remedy}")


def _gaps(profile: Profile) -> Iterator[Caution]:
    sizes = profile.microbatch_sizes
    for low, high in zip(sizes, sizes[1:], strict=False):
        if high > WIDE_GAP * low:
            text = f"between micro-batch sizes {low} and {high} costs are interpolated on a straight line"
            yield Caution("gap", None, f"{text}; profile with sizes between them, such as {round((low * high) ** 0.5)}")


def _falling(kinds: Sequence[Sequence[Block]]) -> list[Caution]:
    """Blocks that are quicker with more samples: a measurement was disturbed."""
    found = []
    for blocks in kinds:
        cases: dict[object, list[CostRow]] = {}
        for row in sorted(blocks[0].costs, key=lambda row: row.microbatch_size):
            cases.setdefault(row.key[1:], []).append(row)
        for rows in cases.values():
            for low, high in zip(rows, rows[1:], strict=False):
                if _work_ns(high) < _CLEARLY_LESS * _work_ns(low):
                    text = (
                        f"{_names(blocks)} takes {format_ns(_work_ns(high))} at micro-batch size "
                        f"{high.microbatch_size}, less than {format_ns(_work_ns(low))} at {low.microbatch_size}"
                    )
                    remedy = "measure again on a quiet machine"
                    caution = Caution("falling", blocks[0].id, f"{text}; {remedy}")
                    found.append((_work_ns(high) / _work_ns(low), caution))
    return [caution for _, caution in sorted(found, key=lambda each: each[0])]


def _unlike_halves(kinds: Sequence[Sequence[Block]]) -> list[Caution]:
    """Backward in one piece and in two that differ by more than ``_UNLIKE``: what weighs most in the model first."""
    found: dict[str, tuple[float, Caution]] = {}
    for blocks in kinds:
        for row in blocks[0].costs:
            if row.backward_ns is None or row.input_grad_ns is None or row.weight_grad_ns is None:
                continue
            halves = row.input_grad_ns + row.weight_grad_ns
            low, high = sorted((row.backward_ns, halves))
            difference = len(blocks) * (high - low)
            model = sum(
                len(each) * _work_ns(other) for each in kinds for other in each[0].costs if other.key == row.key
            )
            if high <= _UNLIKE * low or difference <= _COUNTS * model:
                continue
            text = (
                f"{_names(blocks)}: backward takes {format_ns(row.backward_ns)} in one piece and {format_ns(halves)} "
                f"in two at micro-batch size {row.microbatch_size}; measure again on a quiet machine"
            )
            share = difference / max(1, model)
            if share > found.get(blocks[0].id, (0.0, None))[0]:
                found[blocks[0].id] = share, Caution("halves", blocks[0].id, text)
    return [caution for _, caution in sorted(found.values(), key=lambda each: -each[0])]


def mean_spread(profile: Profile) -> float:
    """The mean interquartile range over the median of its times, by how long they are; 0 where none is measured."""
    found: list[tuple[int, float]] = [
        (time, spread)
        for block in profile.blocks
        for row in block.costs
        for name, spread in row.spread.items()
        if (time := getattr(row, name))
    ]
    return sum(time * spread for time, spread in found) / max(1, sum(time for time, _ in found))


def _spreads(kinds: Sequence[Sequence[Block]]) -> list[Caution]:
    """For each kind the spread that concerns most time, where it is large, those first that do in the whole model."""
    found = []
    for blocks in kinds:
        cases = [
            (spread, getattr(row, name) or 0, name.removesuffix("_ns").replace("_", " "), row)
            for row in blocks[0].costs
            for name, spread in row.spread.items()
            if spread >= LARGE_SPREAD and 100 * (getattr(row, name) or 0) >= _work_ns(row)
        ]
        if cases:
            spread, time, name, row = max(cases, key=lambda case: case[0] * case[1])
            what = f"{name} at micro-batch size {row.microbatch_size}"
            found.append((spread * time * len(blocks), spread, blocks, what, row.repeats))
    found.sort(key=lambda case: -case[0])
    return [
        Caution(
            "spread",
            blocks[0].id,
            f"{_names(blocks)}: measurements of {what} spread over {spread:.1%} of their median ({repeats} runs); "
            "measure again on a quiet machine or with more --repeats",
        )
        for _, spread, blocks, what, repeats in found
    ]


def _few_repeats(profile: Profile) -> Iterator[Caution]:
    few = [row.repeats for block in profile.blocks for row in block.costs if 0 < row.repeats < FEW_REPEATS]
    if few:
        runs = f"{min(few)} timed run{'s' if min(few) > 1 else ''}"
        text = f"costs rest on {runs}, whose spread says nothing; measure with --repeats {FEW_REPEATS} or more"
        yield Caution("few-repeats", None, text)


def _without_split(profile: Profile, kinds: Sequence[Sequence[Block]]) -> Iterator[Caution]:
    """Rows without I and W where others have them."""
    has = [row.input_grad_ns is not None for block in profile.blocks for row in block.costs]
    if all(has) or not any(has):
        return
    for blocks in kinds:
        if any(row.input_grad_ns is None for row in blocks[0].costs):
            text = f"{_names(blocks)} has no input_grad_ns and weight_grad_ns where other blocks have them"
            yield Caution("no-split", blocks[0].id, f"{text}: its stages cannot split backward; profile it with them")


def _zero_costs(profile: Profile, kinds: Sequence[Sequence[Block]]) -> Iterator[Caution]:
    for blocks in kinds:
        times = {
            name: [getattr(row, f"{name}_ns") for row in blocks[0].costs]
            for name in ("forward", "whole_backward")[: 1 if profile.is_inference else 2]
        }
        zero = [name.removeprefix("whole_") for name, each in times.items() if not all(each)]
        if zero:
            yield Caution("zero-cost", blocks[0].id, f"{_names(blocks)} takes no time in {' and '.join(zero)}")
    if not any(row.activation_bytes for block in profile.blocks for row in block.costs):
        text = "no block holds activations: micro-batches in flight cost no memory, and no limit on it holds"
        yield Caution("zero-cost", None, text)
    free = [edge for edge in profile.edges if edge.bytes_per_sample == 0 and edge.transfer_ns is None]
    if free:
        first = f"{free[0].source} -> {free[0].target}"
        text = f"{len(free)} of {len(profile.edges)} edges carry nothing and take no time, the first is {first}"
        yield Caution("zero-cost", None, f"{text}; give them bytes_per_sample or transfer_ns")


def _names(blocks: Sequence[Block]) -> str:
    more = f" (and {len(blocks) - 1} like it)" if len(blocks) > 1 else ""
    return f"block {blocks[0].id!r}{more}"


def _listed(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))


# Results ----------------------------------------------------------------------------------------------------------


def worst(found: Sequence[Caution], most: int) -> list[Caution]:
    """As many as may be shown where there is little room: the worst of each kind before the next of any."""
    of_kind: dict[str, list[Caution]] = {}
    for caution in found:
        of_kind.setdefault(caution.kind, []).append(caution)
    turns = zip_longest(*of_kind.values())
    return [caution for turn in turns for caution in turn if caution is not None][:most]


def is_disturbed(found: Iterable[Caution]) -> bool:
    """Whether some of it is what something else on the machine does to times."""
    return any(caution.kind in ("falling", "halves", "spread") for caution in found)


@dataclass(frozen=True, slots=True)
class Inspection(Displayed):
    """A profile to inspect; ``asked`` are the micro-batch sizes to plan with."""

    profile: Profile
    asked: tuple[int, ...] = ()

    @property
    def size(self) -> int | None:
        """The largest size that was asked for and that every block has, or the largest of these; None without any."""
        sizes = self.profile.microbatch_sizes
        return max((size for size in sizes if size in self.asked), default=max(sizes, default=None))

    def figures(self) -> dict[str, object]:
        """The object of ``profile --show --json``; shares are at :attr:`size`."""
        profile, sizes = self.profile, self.profile.microbatch_sizes
        return {
            "profile": profile.name,
            "source": profile.source.model_dump(mode="json"),
            "recipe": profile.recipe.model_dump(mode="json"),
            **counts(profile),
            "microbatch_sizes": list(sizes),
            "sizes": _sums_by_size(profile),
            **_phase_figures(profile),
            "operators": [asdict(share) for share in operator_shares(profile, self.size)] if self.size else [],
            "blocks": [_block_figures(blocks) for blocks in alike(profile)],
            "warnings": [asdict(caution) for caution in cautions(profile, self.asked)],
        }


@dataclass(frozen=True, slots=True)
class ProfileResult:
    """A profile that was measured or estimated, and how many seconds that took."""

    profile: Profile
    seconds: float

    def figures(self) -> dict[str, object]:
        """The object of ``profile --json``: sums over all blocks, for each micro-batch size."""
        profile, found = self.profile, counts(self.profile)
        del found["num_edges"]
        return {
            "profile": profile.name,
            "device": profile.source.device,
            "dtype": profile.source.dtype,
            "recipe": profile.recipe.model_dump(mode="json"),
            **found,
            "sizes": _sums_by_size(profile),
            **_phase_figures(profile),
            "seconds": round(self.seconds, 3),
        }


def _phase_figures(profile: Profile) -> dict[str, object]:
    """Of a profile with a cache what it takes, and what prefill and decode do."""
    per_token = sum(block.cache_bytes_per_token for block in profile.blocks)
    return {"cache_bytes_per_token": per_token, "phases": phase_sums(profile)} if per_token else {}


def phase_sums(profile: Profile) -> list[dict[str, Any]]:
    """What prefill and decode of the whole model take, one row for each case that every block has."""
    rows_of = {block.id: {row.key: row for row in block.phases} for block in profile.blocks}
    found = list[dict[str, Any]]()
    for key in sorted({key for rows in rows_of.values() for key in rows}):
        phase, context, batch, shards, expert, dcp, _ = key
        if dcp > 1:  # of single blocks: others have none
            continue
        own = [
            rows_of[block.id].get(key if block.expert_parameters else (*key[:4], 1, *key[5:]))
            for block in profile.blocks
        ]
        rows = [row for row in own if row is not None]
        if len(rows) < len(own):
            continue
        case = {"phase": phase, "context_tokens": context, "batch": batch, "shards": shards, "expert": expert}
        times = {"forward_ns": sum(row.forward_ns for row in rows), "core_ns": sum(row.core_ns for row in rows)}
        cached = batch * sum(cached_bytes(block, context, shards) for block in profile.blocks)
        found.append({**case, **times, "cache_bytes": cached})
    return found


def kept_state(profile: Profile) -> MemoryBytes:
    """What training keeps of the whole model, of tied parameters once."""
    again = ((state_of(each, profile.recipe), len(each.blocks) - 1) for each in profile.tied)
    whole = sum((state_of(block, profile.recipe) for block in profile.blocks), MemoryBytes())
    return whole - sum((state * times for state, times in again), MemoryBytes())


def counts(profile: Profile) -> dict[str, int]:
    """How many blocks, kinds of blocks, edges and parameters there are, and the bytes of their states, each once."""
    again = sum(each.parameters * (len(each.blocks) - 1) for each in profile.tied)
    return {
        "num_blocks": len(profile.blocks),
        "num_kinds": len(alike(profile)),
        "num_edges": len(profile.edges),
        "parameters": sum(block.parameters for block in profile.blocks) - again,
        "frozen_parameters": sum(block.frozen_parameters for block in profile.blocks),
        **kept_state(profile).keyed(STATE_KINDS),
    }


def _sums_by_size(profile: Profile) -> list[dict[str, int | None]]:
    return [{"microbatch_size": size, **sums(profile, size)} for size in profile.microbatch_sizes]


def _block_figures(blocks: Sequence[Block]) -> dict[str, object]:
    return {**blocks[0].model_dump(mode="json"), "alike": [block.id for block in blocks]}
