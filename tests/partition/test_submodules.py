"""Placement of models with several submodules: each on devices of its own, by a strategy of its own."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders.towers import towers
from pipeplan.errors import InfeasibleError, UsageError
from pipeplan.files import Placement
from pipeplan.partition.placement import Submodule, place_submodules
from support.marks import some_of

IMAGE, TEXT = Submodule("image.*"), Submodule("text.*")


def devices_of(placed: Placement, name: str) -> list[tuple[int, ...]]:
    """The devices of the stages of a tower, in order."""
    return [stage.devices for stage in placed.stages if stage.blocks[0].startswith(name)]


def test_each_has_its_devices_and_its_strategy() -> None:
    """FlexPipe, Fig. 9: circular for one submodule, one-to-one for the other; the loss where the last stages are."""
    profile = towers()
    image = Submodule("image.*", "circular", 2, positions=(0, 4))
    placed = place_submodules(profile, [image, Submodule("text.*", positions=(4, 8))], 8, microbatch_size=1)
    profile.check_placement(placed)
    assert devices_of(placed, "image") == [(device,) for device in [0, 1, 2, 3, 0, 1, 2, 3]]
    assert devices_of(placed, "text") == [(4,), (5,), (6,), (7,)]
    assert devices_of(placed, "contrast") == [(7,)]
    assert placed.strategy == "circular + one-to-one"


def test_the_loss_is_split_over_the_last_stages_where_it_can_be() -> None:
    profile = towers(loss_shards=(1, 2))
    placed = place_submodules(profile, [IMAGE, TEXT], 6, microbatch_size=1)
    (loss,) = [stage for stage in placed.stages if stage.blocks == ("contrast",)]
    assert (loss.devices, loss.shards) == ((3, 5), 2)


@settings(max_examples=some_of(40))
@given(st.lists(st.integers(1, 9), min_size=7, max_size=9), st.lists(st.integers(1, 9), min_size=7, max_size=9))
def test_devices_are_shared_out_by_work(image: list[int], text: list[int]) -> None:
    """Nobody has said: the most work per device is the least there is, by trying all ways."""
    placed = place_submodules(towers(image, text), [IMAGE, TEXT], 7, microbatch_size=1)
    counts = len(devices_of(placed, "image")), len(devices_of(placed, "text"))
    most = {(first, 7 - first): max(sum(image) / first, sum(text) / (7 - first)) for first in range(1, 7)}
    assert most[counts] == min(most.values())


def test_replicas_are_neighbours() -> None:
    placed = place_submodules(towers(), [IMAGE, TEXT], 6, microbatch_size=2, replicas=2)
    assert devices_of(placed, "image") + devices_of(placed, "text") == [(0, 1), (2, 3), (4, 5)]
    assert {stage.replicas for stage in placed.stages} == {2}


def test_memory_is_that_of_the_submodules_devices() -> None:
    """Of blocks with 100 bytes of parameters a device of 500 bytes holds two, parameters and gradients."""
    image, text = Submodule("image.*", positions=(0, 4)), Submodule("text.*", positions=(4, 5))
    profile, limits = towers(parameter_bytes=100), [500, 500, 500, 500, 1000]
    place_submodules(profile, [image, text], 5, microbatch_size=1, memory_bytes=limits)
    with pytest.raises(InfeasibleError, match=r"device 0 has 700B .*submodule 'text.*', whose device 0 is device 4"):
        place_submodules(profile, [image, text], 5, microbatch_size=1, memory_bytes=[*limits[:4], 700])


@pytest.mark.parametrize(
    ("submodules", "words"),
    [
        ([Submodule("audio.*"), TEXT], r"'audio\.\*' matches no block .* which has image\.0, image\.1"),
        ([IMAGE, TEXT, Submodule("*t.1")], r"'text\.1' is in submodules 'text\.\*' and '\*t\.1'"),
        ([IMAGE], r"'start' is in no submodule"),
        ([Submodule("image.*", "bidirectional"), TEXT], "cannot be bidirectional: submodules have one route"),
        ([Submodule("image.*", positions=(0, 9)), Submodule("text.*", positions=(4, 8))], "positions 0 to 8, but"),
        ([Submodule("image.*", positions=(0, 4)), TEXT], "either all submodules say their devices or none"),
    ],
)
def test_what_does_not_apply(submodules: list[Submodule], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        place_submodules(towers(before=len(submodules) == 1), submodules, 8, microbatch_size=1)


def test_too_few_devices() -> None:
    with pytest.raises(UsageError, match="2 submodules need as many devices"):
        place_submodules(towers(), [IMAGE, TEXT], 1, microbatch_size=1)
    with pytest.raises(UsageError, match="3 devices cannot be shared by 2 replicas"):
        place_submodules(towers(), [IMAGE, TEXT], 3, microbatch_size=2, replicas=2)


def test_every_block_once_for_all_ways_to_place() -> None:
    strategies = [("one-to-one", None), ("circular", 2), ("v-shape", 2)]
    for (first, chunks), (second, others) in itertools.product(strategies, repeat=2):
        profile = towers((1,) * 8, (1,) * 8)
        submodules = [Submodule("image.*", first, chunks), Submodule("text.*", second, others)]
        profile.check_placement(place_submodules(profile, submodules, 4, microbatch_size=1))
