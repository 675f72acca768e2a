"""Tensors cut over devices, and the moves between layouts carried out on them: what resharding is judged by."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pipeplan.costs.layouts import DIMENSIONS, Layout, Move, groups_along

__all__ = ["cut", "held_after", "senders"]

Array = npt.NDArray[np.int64]


def cut(whole: Array, layout: Layout, devices: int) -> list[Array]:
    """What every device holds. Of a partial layout the first along the split holds the sum, and the others nothing."""
    held = []
    for device in range(devices):
        piece = whole
        for axis, split in enumerate(layout[:3]):
            if split:
                piece = np.split(piece, split.extent, axis=axis)[split.coordinate(device)]
        late = layout.partial is not None and layout.partial.coordinate(device) > 0
        held.append(np.zeros_like(piece) if late else piece)
    return held


def held_after(move: Move, held: Sequence[Array], devices: int) -> list[Array]:
    """What every device holds after a move, by the collective itself."""
    if move.how == "send":
        after = dict.fromkeys(range(devices), held[0])
        for source, target in senders(move.source, move.target, devices):
            after[target] = held[source]
        return [after[device] for device in range(devices)]
    assert move.along is not None
    result = list(held)
    for group in groups_along([move.along], devices):
        pieces = [held[device] for device in group]
        for place, device in enumerate(group):
            result[device] = _at(move, pieces, place)
    return result


def senders(source: Layout, target: Layout, devices: int) -> list[tuple[int, int]]:
    """Who sends its piece to whom, so that a tensor of one layout comes to lie as another with equal pieces.

    The devices that hold the same piece before are matched with those that shall hold it, each with itself first,
    then in order of their numbers.
    """
    before, after = _holders(source, devices), _holders(target, devices)
    pairs = []
    for piece, held in before.items():
        wanted = after[piece]
        stay = sorted(set(held) & set(wanted))
        pairs += [(device, device) for device in stay]
        gone, come = [each for each in held if each not in stay], [each for each in wanted if each not in stay]
        pairs += zip(gone, come, strict=True)
    return pairs


def _holders(layout: Layout, devices: int) -> dict[tuple[int, ...], list[int]]:
    """The devices of every piece, a piece being its coordinates along the splits of the layout."""
    found: dict[tuple[int, ...], list[int]] = {}
    for device in range(devices):
        piece = tuple(split.coordinate(device) if split else 0 for split in layout)
        found.setdefault(piece, []).append(device)
    return found


def _at(move: Move, pieces: Sequence[Array], place: int) -> Array:
    """What the device at some place of a group has, from what all of the group had."""
    taken = DIMENSIONS.index(move.taken) if move.taken else 0
    given = DIMENSIONS.index(move.given) if move.given else 0
    if move.how == "gather":
        return np.concatenate(pieces, axis=given)
    if move.how == "slice":
        return np.split(pieces[place], len(pieces), axis=taken)[place]
    if move.how == "exchange":
        return np.concatenate([np.split(piece, len(pieces), axis=taken)[place] for piece in pieces], axis=given)
    total: Array = np.sum(pieces, axis=0)
    return total if move.how == "sum" else np.split(total, len(pieces), axis=taken)[place]
