"""What a tool can run, as a search stays inside it: of its data in the catalog, and of what else is asked for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain, pairwise
from typing import Any

from pipeplan.catalog import ExportTarget, export_target, names
from pipeplan.costs.joining import JoinedProfile, joined
from pipeplan.costs.layers import by_layers, layer_of
from pipeplan.costs.recipes import state_of
from pipeplan.errors import UsageError, choose_from
from pipeplan.files import Placement, Profile


@dataclass(frozen=True, slots=True)
class Restrictions:
    """What plans for a target may have; ``name`` is the target's, and all else as :class:`ExportTarget` has it.

    ``placements`` are those of one ``schedules`` entry, or all where orders are free. Blocks recompute ``alike``, and a
    tool that trains none ``serves``.
    """

    name: str
    title: str
    placements: tuple[str, ...]
    zero: tuple[int, ...]
    zero_groups: bool
    alike: bool
    selective: bool
    whole_groups: bool
    serves: bool
    first_layers: bool
    expert_shards: str

    @classmethod
    def of(cls, name: str, target: ExportTarget, profile: Profile) -> Restrictions:
        """Those of a target, for this profile's state: what blocks share, no replicas divide block by block."""
        shares = any(state_of(each, profile.recipe).total for each in profile.tied)
        return cls(
            name,
            target.title,
            tuple(target.placements or ()),
            tuple(level for level in target.zero if level < 2 or not shares),
            target.zero_groups,
            not target.by_layer,
            "selective" in target.recompute,
            target.whole_groups,
            not target.trains,
            target.first_layers,
            target.expert_shards,
        )

    def allows(self, strategy: str, positions: int, num_microbatches: int) -> bool:
        """Whether stages may stand so: virtual ones on several ranks, for some with whole groups of micro-batches."""
        if strategy == "one-to-one":
            return True
        return positions > 1 and not (self.whole_groups and num_microbatches % positions)

    def splits_experts(self, shards: int, expert_shards: int) -> bool:
        """Whether so many devices may split each expert, where so many split all else."""
        if self.expert_shards == "any":
            return True
        return expert_shards == 1 or (self.expert_shards == "shards" and shards == expert_shards)


def search_targets() -> list[str]:
    """What ``--for`` takes: those that have limits on where stages stand."""
    return [name for name in names("targets") if export_target(name).placements is not None]


def target_named(name: str) -> ExportTarget:
    """A target that can be searched for. Raises UsageError."""
    if name not in search_targets():
        raise UsageError(f"--for {name!r}: there is no such target; {choose_from(name, search_targets())}")
    return export_target(name)


def joined_for(
    target: ExportTarget | None, profile: Profile, groups: Sequence[Sequence[str]], samples: Sequence[int]
) -> JoinedProfile:
    """The profile of what a target can place, and of what is kept together beside that.

    Raises:
        UsageError: its blocks are no row of layers; the text has the block.
    """
    if target is None:
        return joined(profile, groups, samples)
    layers = by_layers(profile.topological_order(), target.title)
    if not target.ends_apart:
        layers = _with_ends(layers)
    made = joined(
        profile,
        _merged([*layers, *groups]) if groups else layers,
        samples,
        selective="selective" in target.recompute,
        tied=not target.trains or target.sums_tied,
    )
    if target.schedules is None and target.trains:
        _require_line(made.profile, target.title)
    return made


def _with_ends(layers: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The same where no stage has a beginning or an end alone."""
    found = list(layers)
    if len(found) > 1 and layer_of(found[0][0]) is None:
        found[:2] = [found[0] + found[1]]
    if len(found) > 1 and layer_of(found[-1][0]) is None:
        found[-2:] = [found[-2] + found[-1]]
    return found


def layers_in(joined: JoinedProfile, groups: Sequence[str]) -> list[int]:
    """[group] how many layers it is."""
    return [len({layer_of(block) for block in joined.members[group]} - {None}) for group in groups]


def _merged(groups: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """Groups with a block in common are one, which stands where the last of them did."""
    found: dict[int, tuple[str, ...]] = {}
    of: dict[str, int] = {}
    for number, group in enumerate(groups):
        with_it = sorted({of[block] for block in group if block in of})
        found[number] = tuple(dict.fromkeys(chain(*(found.pop(other) for other in with_it), group)))
        of |= dict.fromkeys(found[number], number)
    return [*found.values()]


def _require_line(profile: Profile, title: str) -> None:
    """Every group of blocks hands its output to the next one alone. Raises UsageError."""
    line = set(pairwise(profile.topological_order()))
    odd = next((edge for edge in profile.edges if (edge.source, edge.target) not in line), None)
    if odd is not None:
        raise UsageError(
            f"{odd.source!r} feeds {odd.target!r}, which does not come next, and {title} hands a stage's output to the "
            "next one alone; keep what stands between them together (--keep-together), or search without --for"
        )
    fed = {(edge.source, edge.target) for edge in profile.edges}
    if missing := sorted(line - fed):
        raise UsageError(
            f"{missing[0][1]!r} takes nothing from {missing[0][0]!r}, which comes before it, and {title} runs stages "
            "one after another; search without --for"
        )


def groups_of(profile: Profile, asked: Sequence[str], more: Iterable[tuple[str, ...]] = ()) -> list[tuple[str, ...]]:
    """The groups that are kept together: the profile's, those that are asked for, and ``more``.

    One that is asked for is a number of layers, of which each so many are a group, or blocks with commas, in which
    ``*`` stands for anything.

    Raises:
        UsageError: it names no block, or one only.
    """
    found = [*profile.keep_together, *more]
    for text in asked:
        found += _layers_in(profile, int(text)) if text.isdecimal() else [_blocks_named(profile, text)]
    return _merged(found)


def _layers_in(profile: Profile, count: int) -> Iterator[tuple[str, ...]]:
    numbers = {block.id: layer for block in profile.blocks if (layer := layer_of(block.id)) is not None}
    if not numbers or count < 1:
        raise UsageError(
            f"--keep-together {count}: no block says which layer it is of, as layer0.ffn would; name blocks"
        )
    found: dict[int, list[str]] = defaultdict(list)
    for block, layer in numbers.items():
        found[layer // count].append(block)
    yield from (tuple(own) for _, own in sorted(found.items()) if len(own) > 1)


def _blocks_named(profile: Profile, text: str) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for pattern in text.split(","):
        own = [block.id for block in profile.blocks if fnmatchcase(block.id, pattern.strip())]
        if not own:
            known = choose_from(pattern, [block.id for block in profile.blocks])
            raise UsageError(f"--keep-together {text!r}: no block is called {pattern.strip()!r}; {known}")
        found.update(dict.fromkeys(own))
    if len(found) < 2:
        raise UsageError(f"--keep-together {text!r} is one block, which stands together; name two or more")
    return tuple(found)


def restricted_fields(
    name: str, target: ExportTarget, placement: Placement | str, said: Mapping[str, Any]
) -> dict[str, Any]:
    """Fields of a request for a target: what it settles where nobody says anything.

    Raises:
        UsageError: what is said is not the target's; the text says what is.
    """

    def refuse(flag: str, why: str, remedy: str) -> UsageError:
        return UsageError(f"for {target.title} (--for): {flag}, and {target.title} {why}; {remedy}")

    placements = list(target.placements or ())
    if isinstance(placement, Placement):
        raise refuse("--placement says where stages stand", "has its own limits on that", "leave --placement out")
    if placement not in ("auto", "all", *placements):
        raise refuse(f"--placement {placement}", f"places stages {' or '.join(placements)}", "choose one of these")
    zero, known = said.get("zero"), ", ".join(map(str, target.zero))
    if zero not in (None, "auto", *target.zero):
        why = target.zero_why or f"{target.title} divides no state"
        raise UsageError(f"for {target.title} (--for): --zero {zero}, and {why}; give one of --zero {known}")
    if said.get("zero_group") is not None and not target.zero_groups and target.zero != [0, 1]:
        raise refuse("--zero-group", "divides state among all replicas", "leave --zero-group out")
    kinds = {True: "all", "selective": "selective"}
    again = kinds.get(said.get("recompute") or False)
    if again is not None and again not in target.recompute:
        raise refuse(f"--recompute {again}", "does not recompute so", "choose --recompute auto")
    if said.get("split_backward") and not target.split_backward:
        raise refuse("--split-backward yes", "runs whole backwards", "leave --split-backward out")
    for field, flag, why in (
        ("num_parted", "--slices", "runs micro-batches whole"),
        ("late_inputs", "--late-inputs yes", "waits for all inputs before a stage"),
        ("spread", "--shard-shared yes", "splits all blocks alike"),
        ("max_span", "--max-span", "has a schedule of its own" if target.schedules or not target.trains else ""),
    ):
        if said.get(field) and why:
            raise refuse(flag, why, f"leave {flag.split()[0]} out")
    if said.get("planner", "auto") != "auto":
        raise refuse(f"--planner {said['planner']}", "is searched for by our own planner alone", "leave --planner out")
    if not target.experts and said.get("expert") not in (None, 1):
        raise refuse(f"--ep {said['expert']}", "is not told of shared experts", "leave --ep out")
    if not target.expert_shards and said.get("expert_shards") not in (None, 1):
        why = "has whole experts" if target.experts else "is not told of shared experts"
        raise refuse(f"--etp {said['expert_shards']}", why, "leave --etp out")
    if not target.trains and said.get("replicas") not in (None, 1):
        raise refuse(f"--dp {said['replicas']}", "is one pipeline, whose copies stand beside it", "leave --dp out")
    chunks = said.get("chunks")
    if chunks is not None:
        _require_chunks(chunks, name, target, placement, refuse)
    settled: dict[str, Any] = {"num_parted": 0, "late_inputs": False, "spread": False}
    if not target.split_backward:
        settled["split_backward"] = False
    if not target.recompute:
        settled["recompute"] = False
    if not target.experts:
        settled["expert"] = 1
    if target.experts and not target.expert_shards and said.get("expert") not in (None, 1):
        settled["expert_shards"] = 1
    if not target.trains:
        settled |= {"replicas": 1, "zero": 0}
    return settled


def _require_chunks(chunks: int, name: str, target: ExportTarget, placement: str, refuse: Any) -> None:
    chunked = [each for each in target.placements or () if each != "one-to-one"]
    if not chunked:
        raise refuse(f"--vp {chunks}", "runs one stage on each rank", "leave --vp out")
    most = target.most_chunks.get(placement)
    if most is not None and chunks > most:
        raise refuse(
            f"--vp {chunks} --placement {placement}", f"has {most} stages on each rank there", f"give --vp {most}"
        )


def require_ranks(name: str, target: ExportTarget, profile: Profile, num_devices: int, said: Mapping[str, Any]) -> None:
    """Refuse more ranks than there are groups of blocks to place. Raises UsageError."""
    most, positions = len(profile.blocks), said.get("positions")
    if positions is not None and positions > most:
        raise UsageError(
            f"for {target.title} (--for): --pp {positions} needs something to run for each rank, and whole layers"
            f"{'' if target.ends_apart else ', with embedding and head beside the layers next to them,'} are {most}; "
            f"choose --pp of at most {most}"
        )
