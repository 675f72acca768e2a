"""What a decode step takes of the blocks of a server's stage, and what they keep in its cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Literal, NamedTuple

from pipeplan.costs.cache_volumes import AttentionShape, Kept, printed_volume, step_volume
from pipeplan.costs.decoding import cached_bytes, phase_costs
from pipeplan.errors import UsageError
from pipeplan.files import Block, Profile

Objective = Literal["cache", "time"]
"""The most tokens in the cache, or the quickest decode step of the busiest stage."""


Sharing = Literal["auto", "dp", "tp", "cp", "cp-q"]
"""How devices share a decode step, as :data:`.Kept` has it; ``auto``: whatever is quickest, mixtures too."""


@dataclass(frozen=True, slots=True)
class ServingAsked:
    """What decode steps are asked for: of how many requests, with how long texts by then; None: open.

    Of a server's cut, what it is to be best for; of plans with decode steps, how caches are shared (``kv``), and over
    how many devices each is split along its sequence (``dcp``), and tokens of prompts that join beside every group's
    step (``prefill``).
    """

    objective: Objective | None = None
    batch: int | None = None
    context: int | None = None
    kv: Sharing | None = None
    dcp: int | None = None
    prefill: int | None = None

    @property
    def flag(self) -> str | None:
        """The first flag that says something."""
        said = {"--kv": self.kv, "--dcp": self.dcp, "--prefill": self.prefill, "--objective": self.objective}
        said |= {"--batch": self.batch, "--context": self.context}
        return next((flag for flag, value in said.items() if value is not None), None)

    @property
    def named(self) -> bool:
        """Whether the way to share caches is asked for by name."""
        return self.kv not in (None, "auto")

    @property
    def words(self) -> str:
        """What is asked of sharing caches, after a space; empty where it is open."""
        said = ("--kv", self.kv if self.named else None), ("--dcp", self.dcp)
        return "".join(f" with {flag} {value}" for flag, value in said if value is not None)


OPEN = ServingAsked()
"""Nothing is asked."""


@dataclass(frozen=True, slots=True)
class LayerVolume:
    """What a device sends in a step and layer where so many ``devices`` share it as ``kept`` says, for ``requests``.

    ``printed`` are numbers as the thesis has them, None of what it has no formula for; ``counted`` are these by rings
    and direct sends, ``bytes`` what runs send: one number of each head, for which the text has two.
    """

    kept: Kept
    devices: int
    requests: int
    printed: float | None
    counted: float
    bytes: float

    @classmethod
    def of(cls, kept: Kept, block: Block, width: int, requests: int, devices: int) -> LayerVolume:
        """Of a block with attention whose numbers have ``width`` bytes; what is cached may have fewer."""
        hidden, heads = (block.dimensions.get(name, 1) for name in ("hidden", "heads"))
        queries, written = block.query_bytes_per_token // width, block.cache_bytes_per_token // width
        shape = AttentionShape(hidden, queries, written, block.mixture_bytes_per_token // width, heads)
        counted = step_volume(kept, shape, requests, devices)
        printed = printed_volume(kept, hidden, heads, requests, devices) if kept in ("tp", "cp") else None
        return cls(
            kept,
            devices,
            requests,
            None if printed is None else float(printed),
            float(counted.numbers + counted.statistics),
            step_volume(kept, shape, requests, devices, statistics=1).bytes(width),
        )


@dataclass(frozen=True, slots=True)
class SharedPoint:
    """A way for devices to share all blocks that no other beats in both: bytes on each, ns between two tokens.

    ``blocks`` says how many blocks are shared in which way.
    """

    blocks: str
    memory_bytes: int
    token_ns: int


@dataclass(frozen=True, slots=True)
class DecodeAnswer:
    """What is to be said of a plan of decode steps: how caches are shared, over how many devices along the sequence.

    ``volumes`` are of each plain way on the plan's largest group of devices, where it has several; ``max_requests`` is
    None without a memory limit. No choice of stages, groups and ways has tokens sooner than ``token_lower_bound_ns``.
    ``frontier``, where it was asked for, is of one stage on all devices. ``prefill_tokens`` of prompts join beside
    every group's step; without them tokens would follow each other in ``alone_token_ns``.
    """

    kv: str
    dcp: int
    batch: int
    context: int
    groups: int
    token_ns: float
    token_lower_bound_ns: float
    cache_bytes: tuple[int, ...]
    max_requests: int | None
    volumes: tuple[LayerVolume, ...] = ()
    frontier: tuple[SharedPoint, ...] = ()
    prefill_tokens: int = 0
    alone_token_ns: float | None = None

    @property
    def tokens_per_s(self) -> float:
        """Of all requests."""
        return 1e9 * self.batch / self.token_ns

    def figures(self) -> dict[str, object]:
        """As in JSON."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        found |= {"tokens_per_s": self.tokens_per_s, "cache_bytes": list(self.cache_bytes)}
        found["volumes"] = [asdict(each) for each in self.volumes]
        points = [asdict(each) for each in found.pop("frontier")]
        prefill = {name: found.pop(name) for name in ("prefill_tokens", "alone_token_ns")}
        found |= prefill if self.prefill_tokens else {}
        return found | ({"frontier": points} if points else {})


class DecodeCost(NamedTuple):
    """Of some blocks on each device that splits them: ns of a step, bytes that it works in, and of a text's cache."""

    step_ns: int
    working_bytes: int
    cached_bytes: int


@dataclass(frozen=True, slots=True)
class Decoding:
    """Decode steps of ``batch`` requests, each with ``context`` tokens so far."""

    objective: Objective
    batch: int
    context: int

    def cost(self, blocks: Sequence[Block], shards: int) -> DecodeCost:
        """Of blocks in one stage. Raises UsageError where the profile has no rows for it."""
        rows = [phase_costs(block, "decode", self.batch, self.context, shards=shards) for block in blocks]
        return DecodeCost(
            sum(row.forward_ns for row in rows),
            max(row.workspace_bytes + row.activation_bytes for row in rows),
            sum(cached_bytes(block, self.context, shards) for block in blocks),
        )


def decoding_of(profile: Profile, asked: ServingAsked, *, limited: bool) -> Decoding | None:
    """Decode steps of a profile that has them, by default of what most it has; None where it has none.

    Where memory is ``limited`` the cache is what a cut is best for, else the time of a step, unless it is said.

    Raises:
        UsageError: something is asked of decode steps, and the profile has none; a cache without a limit.
    """
    rows = [row for block in profile.kinds for row in block.phases if row.phase == "decode"]
    if not rows:
        if asked.flag is not None and (asked.flag, asked.objective) != ("--objective", "time"):
            raise UsageError(
                f"{asked.flag}: {profile.where} says nothing of decode steps and their cache; profile the model with "
                "--inference --context 1k,32k, or leave it out"
            )
        return None
    if asked.objective == "cache" and not limited:
        raise UsageError("--objective cache: memory is unlimited, and so is the cache; give --memory or a --cluster")
    objective = asked.objective or ("cache" if limited else "time")
    batch = asked.batch or max(row.microbatch_size for row in rows)
    return Decoding(objective, batch, asked.context or max(row.context_tokens for row in rows))
