"""Experts that devices share: words go to the devices of their experts, and what those make of them comes back.

Of ``count`` devices each has equally many whole experts, the first ones on the first device, and words of its own, for
which it knows which experts they have chosen. A word goes once to each device that has some of its experts, in one row
with the numbers of these and by how much each counts; there the outputs of its experts are added up, and one row comes
back. So there are two exchanges each way (dispatch and combine, GShard section 3.2, Lepikhin et al. 2021), whose sizes
depend on what words choose: how many rows there will be is exchanged first. No word is dropped, unless experts have a
capacity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from pipeplan.runtime.parallel.sharding import WHOLE, Shards

Experts = Callable[[Tensor, Tensor], Tensor]
"""(rows, ends) -> what experts make of rows: those of expert e end before row ``ends[e]``; zeros of what is behind."""


def capacity_of(factor: float, words: int, each: int, num_experts: int) -> int:
    """How many of a device's words an expert takes at most: ``factor`` times the even share, rounded up."""
    return math.ceil(factor * words * each / num_experts)


def routed(
    words: Tensor,
    chosen: Tensor,
    shares: Tensor,
    num_experts: int,
    devices: Shards,
    experts: Experts,
    *,
    capacity: int | None = None,
    parts: Shards = WHOLE,
    before: bool = False,
    load: float = 1.0,
) -> Tensor:
    """The sum of each word's experts, each by its share of it.

    Args:
        words: [words of this device, width].
        chosen: [words, experts of each], numbers below ``num_experts``, none twice for a word.
        shares: [words, experts of each].
        num_experts: of all devices.
        devices: the place of this one among those that share the experts; alone, other devices' experts are
            represented by its own, so that it does as much as each of them.
        experts: what this device's own experts make of rows.
        capacity: of this device's words, how many an expert takes; later ones get nothing of it. None: all.
        parts: the place of this device among those that have parts of the same experts, each of which makes a part of
            a sum: they gather the words of all of them.
        before: whether shares scale what experts take, in place of what they make.
        load: alone, how many times as many words it multiplies, as the fullest of devices would.

    Returns:
        [words, width].
    """
    given = words
    if _stand_in.get():
        words, chosen, shares = words[:0], chosen[:0], shares[:0]
    kept = chosen if capacity is None else _within(chosen, num_experts, capacity)
    shares = shares.to(words.dtype)
    own, each = num_experts // devices.count, chosen.shape[1]
    if devices.collectives is None and parts.count == 1:
        _note(chosen, kept, num_experts, (kept < num_experts).sum()[None], 0)
        slots = torch.where(kept < num_experts, kept % own, own)
        if load == 1:
            return _weighted(words, slots, shares, own, experts, before=before)
        every = under_load(chosen, load)
        made = _weighted(words[every], slots[every], shares[every], own, experts, before=before)
        return torch.zeros_like(given).index_add(0, every, made)
    numbers = torch.arange(devices.count, device=words.device)
    there = kept // own == numbers[:, None, None]  # [device, word, place among its experts]
    target, word = there.any(-1).nonzero(as_tuple=True)
    meant = there[target, word]
    slots = torch.where(meant, kept[word] - target[:, None] * own, own)
    counts = torch.stack((there.any(-1).sum(1), there.sum((1, 2))), dim=1)
    every = devices.everyones(counts)  # [source, target, (rows, rows of products)]
    give, get = counts[:, 0].tolist(), every[:, devices.index, 0].tolist()
    rows = every.sum(0)  # [target, the same]
    if parts.count > 1:
        rows = parts.everyones(rows)
        lengths, rows = rows[:, devices.index, 0].tolist(), rows.sum(0)
    _note(chosen, kept, num_experts, rows[:, 1], devices.index)
    digits = _digits(slots, own, words.dtype)
    came = devices.routed(torch.cat((words[word], *digits, shares[word] * meant), dim=1), give, get)
    if parts.count > 1:
        same = [len(came)] * parts.count
        came = parts.routed(came.repeat(parts.count, 1), same, lengths)
    came, *found, shares = torch.split(came, [words.shape[1], *[each] * (len(digits) + 1)], dim=1)
    slots = torch.stack([digit.detach().long() * DIGIT**place for place, digit in enumerate(found)]).sum(0)
    made = _weighted(came, slots, shares, own, experts, before=before)
    if parts.count > 1:
        made = parts.routed(made, lengths, same).view(parts.count, same[0], words.shape[1]).sum(0)
    return torch.zeros_like(given).index_add(0, word, devices.routed(made, get, give))


DIGIT = 256
"""Whole numbers up to which every format has all; bfloat16 no further."""


def _digits(numbers: Tensor, most: int, dtype: torch.dtype) -> list[Tensor]:
    """Numbers of at most so much in a format that may round larger ones: one digit of them, or two, the lower first."""
    if most <= DIGIT or dtype.itemsize > 2:
        return [numbers.to(dtype)]
    return [(numbers % DIGIT).to(dtype), (numbers // DIGIT).to(dtype)]


def under_load(chosen: Tensor, load: float) -> Tensor:
    """Numbers of words, of which there are ``load`` times as many: all, and then the first ones again."""
    count = chosen.shape[0]
    return torch.arange(math.ceil(count * load), device=chosen.device) % max(1, count)


_stand_in: ContextVar[bool] = ContextVar("stand_in", default=False)


@contextmanager
def no_words() -> Iterator[None]:
    """What a block is given meanwhile are no words of this device, which has none: none goes to an expert."""
    token = _stand_in.set(True)
    try:
        yield
    finally:
        _stand_in.reset(token)


def _within(chosen: Tensor, num_experts: int, capacity: int) -> Tensor:
    """The same, with ``num_experts`` for what is beyond an expert's capacity, in the order of words."""
    expert, order = chosen.flatten().sort(stable=True)
    first = torch.searchsorted(expert, torch.arange(num_experts, device=chosen.device))
    numbers = torch.arange(expert.shape[0], device=chosen.device) - first[expert]
    kept = torch.where(numbers < capacity, expert, num_experts)
    return torch.empty_like(expert).scatter(0, order, kept).view_as(chosen)


def _weighted(words: Tensor, slots: Tensor, shares: Tensor, count: int, experts: Experts, *, before: bool) -> Tensor:
    """The sum of what the experts with the numbers ``slots`` make of each word, by its shares; ``count`` is none."""
    each = slots.shape[1]
    numbers, order = slots.flatten().sort(stable=True)
    ends = torch.searchsorted(numbers, torch.arange(count, device=words.device), right=True)
    if has_data(words):
        order = order[: int(ends[-1])]
    word = order // each
    share = shares.flatten()[order][:, None]
    made = experts(words[word] * share, ends) if before else experts(words[word], ends) * share
    return torch.zeros_like(words).index_add(0, word, made)


def has_data(tensor: Tensor) -> bool:
    """Whether it has numbers, and not only a shape."""
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


# Load ---------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class WordCounts:
    """How a block's words have chosen on one device: words that chose each expert, and those beyond its capacity.

    Of devices that share experts ``busiest`` is what the fullest had of each micro-batch, ``average`` what one had on
    average, in rows of products, added up over micro-batches; ``own`` is what this one had.
    """

    chosen: Tensor
    dropped: Tensor
    own: Tensor
    busiest: Tensor
    average: Tensor


_counted: ContextVar[tuple[MutableMapping[str, WordCounts], str] | None] = ContextVar("counted", default=None)


@contextmanager
def counting(counts: MutableMapping[str, WordCounts], block: str) -> Iterator[None]:
    """Count the words of a block that runs meanwhile; not those that backward runs again."""
    token = _counted.set((counts, block))
    try:
        yield
    finally:
        _counted.reset(token)


def _note(chosen: Tensor, kept: Tensor, num_experts: int, rows: Tensor, place: int) -> None:
    """Count, where somebody does; ``rows`` are those of products that each device gets, this one at its ``place``."""
    found = _counted.get()
    if found is None or not has_data(chosen):
        return
    counts, block = found
    numbers, zero = chosen.flatten(), torch.zeros((), dtype=torch.int64, device=chosen.device)
    every = zero.new_zeros(num_experts)
    own = counts.setdefault(block, WordCounts(every, zero, zero, zero, zero.double()))
    own.chosen = own.chosen.scatter_add(0, numbers, torch.ones_like(numbers))
    own.dropped = own.dropped + (kept == num_experts).sum()
    own.own, own.busiest = own.own + rows[place], own.busiest + rows.max()
    own.average = own.average + rows.double().mean()
