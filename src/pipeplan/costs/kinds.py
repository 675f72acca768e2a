"""Kinds of devices that have a profile of their own: what blocks cost on one kind, on several together, and at least.

A stage on devices of one kind costs what that kind's profile says. On several kinds each of its blocks takes what it
takes on the slowest and holds what it holds on the largest, row by row: actions start together on all devices of a
stage, and those that split a block wait for each other in it.

For cutting chains and for bounds there is the *levelled* profile: one for all devices, beside which each kind has a
speed. With speeds s every row is the least of s(k) times that of kind k, so that a block never takes less on a kind
than the levelled row divided by its speed: what holds for devices of these speeds holds here. The speeds are those by
which all the work shared out evenly takes longest, the dual of sharing out blocks over kinds: of two kinds that is
exact, at one of the blocks' ratios; of more than a thousand of these some are tried.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from operator import mul
from typing import Any

import numpy as np

from pipeplan.costs.speeds import exactly
from pipeplan.errors import UsageError
from pipeplan.files import Block, Cluster, CostRow, Edge, Plan, Profile, sha256_of
from pipeplan.files.cluster import DeviceKind
from pipeplan.files.profile import COUNTS, NEEDS
from pipeplan.time_limit import checked

_TIMES = ("forward_ns", "backward_ns", "input_grad_ns", "weight_grad_ns", "selective_ns")
_SIZES = ("activation_bytes", "weight_grad_bytes", "workspace_bytes", "selective_activation_bytes")


def for_kinds(
    profile: Profile, profiles: Mapping[str, Profile], cluster: Cluster | None = None, plan: Plan | None = None
) -> Profile:
    """A profile beside those of some kinds of devices, of a cluster or a plan, of the same model.

    Raises:
        UsageError: there is no such kind, kinds have speeds too, or another model; the text says where they differ.
    """
    if not profiles:
        return profile
    devices = () if plan is None else plan.devices
    names = list(dict.fromkeys([*(() if cluster is None else cluster.names), *(device.name for device in devices)]))
    if not names:
        raise UsageError("--profile-for names kinds of devices, which a cluster file has; give --cluster, too")
    for name, own in profiles.items():
        if name not in names:
            where = f"cluster {cluster.name!r}" if cluster is not None else "the plan"
            raise UsageError(f"--profile-for {name}: {where} has devices called {_listed(names)}; give one of these")
        _require_same_model(profile, name, own)
    fast = next((kind for kind in (() if cluster is None else cluster.devices) if kind.speed != 1), None)
    if fast is not None and cluster is not None:
        raise UsageError(
            f"--profile-for: devices called {fast.name!r} have speed {fast.speed:g} in cluster {cluster.name!r}, and "
            "where kinds have profiles of their own none has a speed; leave out its speed and give its --profile-for"
        )
    every = _with_same_edges([profile, *profiles.values()])
    return every[0].with_kinds(dict(zip(profiles, every[1:], strict=True)))


def _with_same_edges(profiles: Sequence[Profile]) -> list[Profile]:
    """Profiles of the same model, whose edges say of who needs their tensors what holds on all kinds of devices."""
    edges = tuple(map(_cautious, zip(*(profile.edges for profile in profiles), strict=True)))
    return [
        each if each.edges == edges else each.model_copy(update={"edges": edges}).read_as(sha256_of(each))
        for each in profiles
    ]


def _cautious(edges: Sequence[Edge]) -> Edge:
    """The same edge on several kinds: its tensor is held where some hold it, and counted once where all count it so."""
    first, needs = edges[0], sorted((edge.need for edge in edges), key=NEEDS.index)
    saved = needs[-1] if first.gradient else needs[0]
    by_source = min((edge.saved_by_source for edge in edges), key=COUNTS.index)
    same = saved == first.model_copy(update={"saved": None}).need
    return first.model_copy(update={"saved": None if same else saved, "saved_by_source": by_source})


def _require_same_model(profile: Profile, kind: str, own: Profile) -> None:
    """Check that two profiles differ only in what blocks cost. Raises UsageError."""

    def differ(what: str, here: object, there: object) -> UsageError:
        return UsageError(
            f"--profile-for {kind}: {own.where} is not of the model of {profile.where}: {what} {there}, there {here}; "
            "profile the same model on both kinds of devices"
        )

    ids, others = ([block.id for block in each.blocks] for each in (profile, own))
    if ids != others:
        place = next((n for n, pair in enumerate(zip(ids, others, strict=False)) if len(set(pair)) > 1), None)
        if place is None:
            raise differ("it has", f"{len(ids)} blocks", f"{len(others)} blocks")
        raise differ(f"blocks[{place}] is", repr(ids[place]), repr(others[place]))
    for here, there in zip(profile.blocks, own.blocks, strict=True):
        for key in Block.model_fields:
            if key not in ("costs", "modules") and (pair := (getattr(here, key), getattr(there, key)))[0] != pair[1]:
                raise differ(f"block {here.id!r} has {key}", *pair)
        known = {row.key for row in there.costs}
        if (row := next((row for row in here.costs if row.key not in known), None)) is not None:
            raise UsageError(
                f"--profile-for {kind}: block {here.id!r} has no costs in {own.where} {_case(row)}, which it has in "
                f"{profile.where}; profile both with the same --microbatch, --shards, --context, --expert and --etp"
            )
    for key in ("edges", "tied", "recipe", "tokens_per_sample"):
        pair = _said(profile, key), _said(own, key)
        if pair[0] != pair[1]:
            raise differ(f"{key} are" if key in ("edges", "tied") else f"{key} is", *map(_short, pair))


def _said(profile: Profile, key: str) -> object:
    """What a profile says under a key; of edges all but who needs their tensors, which kinds may differ in."""
    if key != "edges":
        return getattr(profile, key)
    return tuple(edge.model_copy(update={"saved": None, "saved_by_source": "no"}) for edge in profile.edges)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) < 60 else "others"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def _case(row: CostRow) -> str:
    """What a row is for."""
    said = [f"{row.microbatch_size} samples", f"{row.shards} shards"]
    said += [f"context {row.context}"] * (row.context > 1) + [f"expert {row.expert}"] * (row.expert > 1)
    said += [f"expert_shards {row.expert_shards}"] * (row.expert_shards > 1)
    said += [f"configuration {row.configuration!r}"] * (row.configuration is not None) + ["recompute"] * row.recompute
    return f"for {', '.join(said)}"


def kinds_on(profile: Profile, names: Iterable[str]) -> tuple[str, ...]:
    """The kinds of devices with these names, where any kind of the profile has one of its own; else none."""
    return tuple(sorted(set(names))) if profile.of_kinds else ()


def on_kinds(profile: Profile, kinds: Sequence[str]) -> Profile:
    """The profile of a stage on devices of these kinds; of none the profile itself.

    Raises:
        UsageError: profiles of several of them have rows for different cases.
    """
    own = [profile.of_kinds.get(kind) for kind in kinds]
    if not any(own):
        return profile
    every = list({id(each): each for each in (one or profile for one in own)}.values())
    if len(every) == 1:
        return every[0]
    key = "on", *sorted(kinds)
    return profile.once(key, lambda: _together(every, _slowest, min))


_Joined = Callable[[Sequence[CostRow]], CostRow]


def _together(profiles: Sequence[Profile], joined: _Joined, rate: Callable[[Iterable[int]], int]) -> Profile:
    """One of several of the same model: rows for the same case are ``joined``, and so are ``rate`` of steps."""
    first, known = profiles[0], dict[tuple[str, ...], tuple[CostRow, ...]]()

    def rows(blocks: Sequence[Block]) -> tuple[CostRow, ...]:
        """Of blocks that are alike in each profile worked out once."""
        alike = tuple(profile.alike[block.id] for profile, block in zip(profiles, blocks, strict=True))
        if alike not in known:
            others = [{row.key: row for row in block.costs} for block in blocks[1:]]
            each = ([row, *(other.get(row.key) for other in others)] for row in blocks[0].costs)
            known[alike] = tuple(joined([row for row in own if row]) for own in each if None not in own)
        return known[alike]

    columns = checked(zip(*(profile.blocks for profile in profiles), strict=True))
    blocks = tuple(own[0].model_copy(update={"costs": rows(own)}) for own in columns)
    rates = [profile.step_bytes_per_s for profile in profiles]
    step = None if None in rates else rate([each for each in rates if each is not None])
    return first.model_copy(update={"blocks": blocks, "step_bytes_per_s": step})


def _slowest(rows: Sequence[CostRow]) -> CostRow:
    """Of each number the most; a split backward, and recomputing the core, where all have it."""
    found = {key: [getattr(row, key) for row in rows] for key in (*_TIMES, *_SIZES)}
    found["backward_ns"] = [row.whole_backward_ns for row in rows]
    most: dict[str, Any] = {key: None if None in values else max(values) for key, values in found.items()}
    return rows[0].model_copy(update={**most, "messages": None})


# Levelled -------------------------------------------------------------------------------------------------------------


def levelled(profile: Profile, cluster: Cluster, num_devices: int, *, roomy: bool = False) -> tuple[Profile, Cluster]:
    """One profile for all devices, and the cluster whose kinds have speeds beside it; of the least bytes, or the most.

    ``roomy``: of the most, for cuts; with the least, times and bytes are below those of every kind.
    """

    def made() -> tuple[Profile, Cluster, Cluster]:
        kinds = cluster.first(min(num_devices, cluster.num_devices)).devices
        own = {kind.name: profile.of_kinds.get(kind.name, profile) for kind in kinds}
        counts = {name: sum(kind.count for kind in kinds if kind.name == name) for name in own}
        speeds = _speeds(own, counts)
        found = _levelled(own, speeds, roomy=roomy)
        with_speeds = cluster.model_copy(
            update={"devices": tuple(_at(kind, speeds.get(kind.name, 1.0)) for kind in cluster.devices)}
        )
        return found, with_speeds, cluster  # which keeps its id

    return profile.once(("levelled", roomy, num_devices, id(cluster)), made)[:2]


def same_bytes(profile: Profile) -> bool:
    """Whether blocks hold the same on every kind of device."""
    sizes = [
        [
            tuple(getattr(row, key) for key in _SIZES)
            for block in checked(each.blocks)
            for row in _common(profile, block)
        ]
        for each in (profile, *profile.of_kinds.values())
    ]
    return all(own == sizes[0] for own in sizes)


def _common(profile: Profile, block: Block) -> Iterator[CostRow]:
    by_key = {row.key: row for row in block.costs}
    return (by_key[row.key] for row in profile.by_id[block.id].costs)


def _at(kind: DeviceKind, speed: float) -> DeviceKind:
    return kind.model_copy(update={"speed": speed})


def _speeds(own: Mapping[str, Profile], counts: Mapping[str, int]) -> dict[str, float]:
    """{kind: its speed beside the first}, with which the work, shared out evenly, takes longest."""
    names, each_count = list(own), [counts[name] for name in own]
    times = Counter(zip(*(_times_of(own[name]) for name in names), strict=True))  # [kind] of a block
    totals = tuple(sum(each[kind] * count for each, count in times.items()) for kind in range(len(names)))
    ratios = dict.fromkeys(tuple(repr(each[0] / ns) for ns in each) for each in [*times, totals] if all(each))
    tried = [tuple(map(Fraction, each)) for each in ratios][:: 1 + len(ratios) // _MOST_TRIED]
    if not tried:
        return dict.fromkeys(names, 1.0)

    def longest(speeds: Sequence[Fraction]) -> Fraction:
        work = sum((min(map(mul, speeds, each)) * count for each, count in times.items()), Fraction(0))
        return work / sum(map(mul, speeds, each_count), Fraction(0))

    columns, numbers = np.array([*times], dtype=float), np.array([*times.values()], dtype=float)
    about = [
        float(np.dot((columns * speeds).min(axis=1), numbers) / np.dot(speeds, each_count))
        for speeds in checked(np.array(tried, dtype=float), 16)
    ]
    best = max(
        (speeds for speeds, worth in zip(tried, about, strict=True) if worth >= max(about) * (1 - _FLOATS)), key=longest
    )
    return {name: float(speed) for name, speed in zip(names, best, strict=True)}


_MOST_TRIED = 1_000
"""Ratios of times that are tried as speeds: of more kinds of blocks some, evenly spaced among them."""

_FLOATS = 1e-9
"""By less than this sums of floats are off; what is as near to the most is summed exactly."""


def _times_of(profile: Profile) -> list[int]:
    """[block] ns of forward and backward, by the row of most samples on fewest devices, nothing recomputed."""
    found = {}
    for block in profile.kinds:
        row = min(block.costs, key=lambda row: (*row.key[1:4], row.recompute, -row.microbatch_size))
        found[block.id] = row.forward_ns + row.whole_backward_ns
    return [found[profile.alike[block.id]] for block in profile.blocks]


def _levelled(own: Mapping[str, Profile], speeds: Mapping[str, float], *, roomy: bool) -> Profile:
    each = list({id(one): (one, exactly(speeds[name])) for name, one in own.items()}.values())
    those, factors = [one for one, _ in each], [factor for _, factor in each]
    if len(those) == 1 and factors == [1]:
        return those[0].with_kinds({})
    scaled = [_rate_scaled(one, factor) for one, factor in each]
    return _together(scaled, lambda rows: _least(rows, factors, roomy=roomy), max)


def _rate_scaled(profile: Profile, factor: Fraction) -> Profile:
    rate = profile.step_bytes_per_s
    return profile if rate is None else profile.model_copy(update={"step_bytes_per_s": math.ceil(rate / factor)})


def _least(rows: Sequence[CostRow], factors: Sequence[Fraction], *, roomy: bool) -> CostRow:
    """Of each time the least, at the speeds; of each size too, or the most."""
    times = {key: [getattr(row, key) for row in rows] for key in _TIMES}
    times["backward_ns"] = [row.whole_backward_ns for row in rows]
    found: dict[str, Any] = {
        key: None
        if None in values
        else min(math.floor(factor * ns) for ns, factor in zip(values, factors, strict=True))
        for key, values in times.items()
    }
    most = max if roomy else min
    found |= {key: most(getattr(row, key) for row in rows) for key in _SIZES[:3]}
    held = [each for row in rows if (each := row.selective_activation_bytes) is not None]
    found["selective_activation_bytes"] = most(held) if found["selective_ns"] is not None else None
    if found["selective_ns"] is not None and not roomy:  # what backward makes again is the least, too
        again = min(row.activation_bytes - (row.selective_activation_bytes or 0) for row in rows)
        whole = min(found["activation_bytes"], found["selective_activation_bytes"] + again)
        found |= {"activation_bytes": whole, "selective_activation_bytes": whole - again}
    return rows[0].model_copy(update={**found, "messages": None})
