"""What blocks cost in prefill and decode, between the lengths and batches of a profile, and what they cache.

This is the one place where such a row is read. Times are linear in the requests of a batch and in the tokens of their
texts between those of the profile: of a decode step both reading of weights, which does not depend on the context, and
reading of the cache, which grows with it, are straight lines; a prefill's attention grows with its square, so that
between two lengths it is overestimated, never under.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from pipeplan.errors import UsageError
from pipeplan.files import Block, Edge, PhaseRow, Profile
from pipeplan.files.profile import Phase


def phase_costs(
    block: Block,
    phase: Phase,
    batch: int,
    context_tokens: int,
    *,
    shards: int = 1,
    expert: int = 1,
    dcp: int = 1,
    by_queries: bool = False,
) -> PhaseRow:
    """The block's row for so many requests with texts of so many tokens each, interpolated where it has none.

    What takes no part in attention costs the same at every context; its rows say so. A block without experts costs the
    same however many devices share those of others. Rows with ``dcp`` are those alone that the profile has.

    Raises:
        UsageError: no rows for these shards and experts, or the batch or the context is outside the rows' range.
    """
    own = expert if block.expert_parameters else 1
    case = phase, shards, own, dcp, by_queries
    rows = [row for row in block.phases if (row.phase, *row.key[3:]) == case]
    if not rows:
        known = sorted({(row.shards, row.expert) for row in block.phases if row.phase == phase and row.dcp == 1})
        said = ", ".join(
            f"{count} shards" + (f" with expert {experts}" if experts > 1 else "") for count, experts in known
        )
        raise UsageError(
            f"block {block.id!r} has no {phase} rows for {shards} shards"
            + (f" with expert {own}" if own > 1 else "")
            + (f", only for {said}; profile it with --shards {shards}" if known else "; profile it with --context")
        )
    where = f"block {block.id!r} has {phase} rows"
    low, high = _around([row.context_tokens for row in rows], context_tokens, f"{where} for contexts", "--context")
    below, above = (
        _at_batch([row for row in rows if row.context_tokens == tokens], batch, where) for tokens in (low, high)
    )
    return _between(below, above, "context_tokens", context_tokens)


def cached_bytes(block: Block, context_tokens: int, shards: int = 1) -> int:
    """Bytes of the cache on each device of a request whose text has so many tokens, of a block split over ``shards``.

    Heads of keys and values are split, and where there are fewer than devices, copied: a latent is one, on all devices.
    """
    kept = context_tokens if block.cache_window_tokens is None else min(context_tokens, block.cache_window_tokens)
    heads = max(1, block.cache_heads // shards)
    return kept * (block.cache_bytes_per_token * heads // block.cache_heads)


def bytes_between(profile: Profile, edge: Edge, tokens: int) -> int:
    """Bytes that travel along an edge for one request, of which a step takes so many tokens.

    Raises:
        UsageError: the profile does not say how many tokens its samples have.
    """
    if profile.tokens_per_sample is None:
        raise UsageError(f"profile {profile.name!r} has no tokens_per_sample; its edges say nothing of single tokens")
    return -(-edge.bytes_per_sample * tokens // profile.tokens_per_sample)


def _at_batch(rows: Sequence[PhaseRow], batch: int, where: str) -> PhaseRow:
    sizes = {row.microbatch_size: row for row in rows}
    low, high = _around(list(sizes), batch, f"{where} for batches", "--batch")
    return _between(sizes[low], sizes[high], "microbatch_size", batch)


def _around(known: Sequence[int], asked: int, where: str, flag: str) -> tuple[int, int]:
    """The nearest of those known, from below and above. Raises UsageError."""
    below, above = [each for each in known if each <= asked], [each for each in known if each >= asked]
    if not below or not above:
        raise UsageError(
            f"{where} of {', '.join(map(str, sorted(set(known))))}, not of {asked}; choose from {min(known)} to "
            f"{max(known)}, or profile it with {flag} {asked}"
        )
    return max(below), min(above)


_LINEAR = ("forward_ns", "core_ns", "activation_bytes", "workspace_bytes")


def _between(low: PhaseRow, high: PhaseRow, axis: str, at: int) -> PhaseRow:
    """The row on the straight line between two."""
    begin: int = getattr(low, axis)
    width: int = getattr(high, axis) - begin
    if not width:
        return low

    def line(one: int, other: int) -> int:
        return one + round(Fraction((other - one) * (at - begin), width))

    values = {name: line(getattr(low, name), getattr(high, name)) for name in _LINEAR}
    values["core_ns"] = min(values["core_ns"], values["forward_ns"])  # both are rounded
    return low.model_copy(update={**values, axis: at, "repeats": 0, "spread": 0.0})
