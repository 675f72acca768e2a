"""Which samples actions, messages and devices hold, against sets of samples written out one by one."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipeplan.workload.samples import Slots, carried, replica_samples
from support.marks import some_of

SETTINGS = settings(max_examples=some_of(200))


@st.composite
def all_slots(draw: st.DrawFn) -> Slots:
    """On one of up to three routes; some in parts, or only some of the micro-batches."""
    in_parts = draw(st.booleans())
    size, num_routes = draw(st.sampled_from([2, 4, 6]) if in_parts else st.integers(1, 6)), draw(st.integers(1, 3))
    count = draw(st.integers(1, 7))
    where = {
        "size": size,
        "stride": size * num_routes,
        "offset": size * draw(st.integers(0, num_routes - 1)),
        "count": count,
    }
    if in_parts:
        return Slots(**where, num_parted=draw(st.integers(0, count)))
    every = draw(st.integers(1, 4))
    run = draw(st.integers(1, every))
    return Slots(**where, every=every, run=run, first=draw(st.integers(0, every - run)))


def written_out(slots: Slots) -> list[tuple[int, int | None, set[int]]]:
    """(micro-batch, part, samples) of each action in turn."""
    found: list[tuple[int, int | None, set[int]]] = []
    for m in range(slots.count):
        held = [slots.offset + m * slots.stride + index for index in range(slots.size)]
        if m < slots.num_parted:
            half = slots.size // 2
            found += [(m, 0, set(held[:half])), (m, 1, set(held[half:]))]
        elif slots.first <= m % slots.every < slots.first + slots.run:
            found.append((m, None, set(held)))
    return found


@SETTINGS
@given(all_slots())
def test_actions_are_those_written_out(slots: Slots) -> None:
    expected = written_out(slots)
    assert len(slots) == len(expected)
    for number, (microbatch, part, samples) in enumerate(expected):
        assert slots.name(number) == (microbatch, part)
        assert set(range(*slots.samples(number))) == samples
        assert slots.text(number) == (str(microbatch) if part is None else f"{microbatch}.{part}")


@SETTINGS
@given(all_slots(), st.integers(0, 12), st.sampled_from([None, 0, 1]))
def test_numbers_are_the_inverse_of_names(slots: Slots, microbatch: int, part: int | None) -> None:
    names = [(m, p) for m, p, _ in written_out(slots)]
    expected = names.index((microbatch, part)) if (microbatch, part) in names else None
    assert slots.number(microbatch, part) == expected


@SETTINGS
@given(all_slots(), st.integers(0, 140), st.integers(1, 20))
def test_sharing_is_having_a_sample_in_common(slots: Slots, begin: int, length: int) -> None:
    samples = set(range(begin, begin + length))
    expected = [number for number, (*_, held) in enumerate(written_out(slots)) if held & samples]
    assert list(slots.sharing((begin, begin + length))) == expected


@SETTINGS
@given(all_slots())
def test_every_sample_of_a_route_is_in_one_action(slots: Slots) -> None:
    held = [sample for number in range(len(slots)) for sample in range(*slots.samples(number))]
    assert len(held) == len(set(held))
    if slots.every == 1:
        assert len(held) == slots.count * slots.size


# Devices -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stands:
    """A device group."""

    devices: tuple[int, ...]
    shards: int
    replicas: int
    context: int = 1

    def held(self, samples: tuple[int, int]) -> dict[int, set[tuple[int, int]]]:
        """{device: those of an action's samples that it works on, with the part of each}, sample by sample."""
        each = (samples[1] - samples[0]) // self.replicas
        found: dict[int, set[tuple[int, int]]] = {device: set() for device in self.devices}
        for sample in range(*samples):
            replica = (sample - samples[0]) // each
            for part, shard in itertools.product(range(self.context), range(self.shards)):
                place = (replica * self.context + part) * self.shards + shard
                found[self.devices[place]].add((sample, part))
        return found


@st.composite
def groups(draw: st.DrawFn, context: int | None = None) -> Stands:
    shards, replicas = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    context = context or draw(st.integers(1, 3))
    devices = draw(st.permutations(range(18)))[: shards * context * replicas]
    return Stands(tuple(devices), shards, replicas, context)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Stands, Stands]:
    """Two groups that share sequences alike."""
    context = draw(st.integers(1, 3))
    return draw(groups(context)), draw(groups(context))


@SETTINGS
@given(groups(), st.integers(0, 9), st.integers(1, 4))
def test_replicas_share_an_action_evenly(group: Stands, begin: int, each: int) -> None:
    samples = begin, begin + each * group.replicas
    for index, device in enumerate(group.devices):
        replica, part = divmod(index // group.shards, group.context)
        share = replica_samples(samples, group.replicas, replica)
        assert {(sample, part) for sample in range(*share)} == group.held(samples)[device]


@SETTINGS
@given(pairs(), st.tuples(st.integers(0, 8), st.integers(0, 8)), st.tuples(st.integers(1, 4), st.integers(1, 4)))
def test_what_is_carried_is_what_is_missing(
    both: tuple[Stands, Stands], begins: tuple[int, int], each: tuple[int, int]
) -> None:
    """Every device gets, once and from a device that has it, what it works on of the source's and did not make."""
    source, target = both
    source_samples = begins[0], begins[0] + each[0] * source.replicas
    target_samples = begins[1], begins[1] + each[1] * target.replicas
    made, needed = source.held(source_samples), target.held(target_samples)
    got: dict[int, list[tuple[int, int]]] = {device: [] for device in target.devices}
    part_of = {d: index // target.shards % target.context for index, d in enumerate(target.devices)}
    for sender, receiver, (begin, end) in carried(source, source_samples, target, target_samples):
        assert begin < end
        assert sender != receiver
        brought = [(sample, part_of[receiver]) for sample in range(begin, end)]
        assert set(brought) <= made[sender]
        got[receiver] += brought
    for device in target.devices:
        wanted = {each for each in needed[device] if each[0] in range(*source_samples)} - made.get(device, set())
        assert sorted(got[device]) == sorted(wanted)


@SETTINGS
@given(groups(), st.integers(1, 4))
def test_shards_take_turns_in_sending(target: Stands, size: int) -> None:
    """Two devices that hold the same send to equally many, where all can."""
    assume(target.shards == 2 and target.context == 1)
    source = Stands((18, 19), 2, 1)
    samples = 0, size * target.replicas
    senders = [sender for sender, *_ in carried(source, samples, target, samples)]
    assert senders.count(18) == senders.count(19) == target.replicas


@pytest.mark.parametrize("num_routes", [1, 2, 3])
def test_routes_share_out_the_mini_batch(num_routes: int) -> None:
    routes = [Slots(size=2, stride=2 * num_routes, offset=2 * route, count=3) for route in range(num_routes)]
    held = [sample for slots in routes for n in range(len(slots)) for sample in range(*slots.samples(n))]
    assert sorted(held) == list(range(6 * num_routes))
