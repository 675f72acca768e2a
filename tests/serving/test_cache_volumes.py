"""Bytes of a decode step between devices: the text's own numbers, and every message counted."""

from __future__ import annotations

from fractions import Fraction

import pytest

from pipeplan.costs.cache_volumes import KEPT, AttentionShape, Kept, printed_volume, step_volume

LLAMA_7B = AttentionShape.of(4096, 32)


def test_one_request_on_four_devices() -> None:
    """Printed 15,456 and 49,152 numbers; counted alike 12,336, 12,288, and 7,728 where queries alone are gathered."""
    assert [printed_volume(kept, 4096, 32, 1, 4) for kept in ("cp", "tp")] == [15456, 49152]
    own = [step_volume(kept, LLAMA_7B, 1, 4) for kept in ("cp", "tp", "cp-q")]
    assert [each.numbers + each.statistics for each in own] == [12336, 12288, 7728]
    with pytest.raises(ValueError, match="prints no volume of cp-q"):
        printed_volume("cp-q", 4096, 32, 1, 4)


def messages(kept: Kept, shape: AttentionShape, owners: list[int], devices: int) -> list[Fraction]:
    """[device] numbers sent, message by message; ``owners`` [request] whose request it is.

    Rings of an all-reduce are 2 (N - 1) steps of an N-th each. The new token's keys and values go to the device that
    the request's next block is on, any of them as likely, so that a share is counted for each.
    """
    sent = [Fraction() for _ in range(devices)]
    for own in owners:
        for device in range(devices):
            if kept == "tp":
                sent[device] += 2 * 2 * (devices - 1) * Fraction(shape.hidden, devices)
                continue
            if device == own:
                gathered = shape.queries + (2 * shape.keys if kept == "cp" else 0)
                sent[device] += (devices - 1) * gathered
                if kept == "cp-q":
                    sent[device] += sum(Fraction(2 * shape.keys, devices) for other in range(devices) if other != own)
            else:
                sent[device] += shape.queries + 2 * shape.heads
    return sent


@pytest.mark.parametrize("kept", [each for each in KEPT if each != "dp"])
@pytest.mark.parametrize("kv_heads", [32, 8, 1])
def test_every_message_counted(kept: Kept, kv_heads: int) -> None:
    shape = AttentionShape.of(4096, 32, kv_heads)
    for devices in (1, 2, 3, 4, 8):
        owners = [request % devices for request in range(24)]
        volume = step_volume(kept, shape, len(owners), devices)
        if kept != "tp" and devices > 1:  # as runs and plans have them: one exchange before attention, and one after it
            assert (volume.collectives, volume.steps) == (2, 2 * (devices - 1))
        for own in messages(kept, shape, owners, devices):
            assert volume.numbers + volume.statistics == own


def test_nothing_is_sent_alone() -> None:
    assert step_volume("dp", LLAMA_7B, 8, 4).bytes(2) == 0
    assert step_volume("cp", LLAMA_7B, 8, 1).bytes(2) == 0
    assert step_volume("cp", LLAMA_7B, 1, 2).bytes(2) == 2 * (0.5 * 4 * 4096) + 4 * (0.5 * 2 * 32)
    with pytest.raises(ValueError, match="no decode step"):
        step_volume("tp", LLAMA_7B, 0, 4)
