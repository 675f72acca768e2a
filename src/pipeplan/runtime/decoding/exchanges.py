"""What the devices of a stage exchange in a turn, and how many bytes they send: counted where they are handed over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from pipeplan.runtime.executor.channels import transfer_errors
from pipeplan.runtime.executor.process_groups import RankGroup
from pipeplan.runtime.launch.status import Phase, Progress

Form = tuple[tuple[int, ...], torch.dtype]
"""Shape and format of a tensor that comes."""


@dataclass(slots=True)
class SentBytes:
    """Bytes that a rank has sent, by what for: (block, purpose)."""

    block: str = ""
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)

    def note(self, purpose: str, num_bytes: int) -> None:
        """Count what is sent now."""
        self.counts[self.block, purpose] += num_bytes

    def texts(self) -> Mapping[str, int]:
        """As JSON has it, by ``BLOCK PURPOSE``."""
        return {f"{block} {purpose}": count for (block, purpose), count in sorted(self.counts.items()) if count}


@dataclass(frozen=True, slots=True)
class StageExchange:
    """One rank's end of exchanges among devices of its stage: ``ranks`` by their numbers there."""

    ranks: Mapping[int, int]
    group: RankGroup
    progress: Progress
    sent: SentBytes

    def trade(
        self, purpose: str, given: Mapping[int, Sequence[Tensor]], coming: Mapping[int, Sequence[Form]]
    ) -> dict[int, list[Tensor]]:
        """Give devices, by number, some tensors, and get theirs; all of them call this together.

        Sent are the tensors' bytes, directly, and nothing beside.
        """
        order = sorted(self.ranks, key=self.ranks.__getitem__)
        parts = [_bytes_of(given.get(device, ())) for device in order]
        sizes = [sum(map(_size_of, coming.get(device, ()))) for device in order]
        own = [part.numel() for part in parts]
        self.sent.note(purpose, sum(own))
        carried = torch.cat(parts) if any(own) else parts[0]
        found = carried.new_empty(sum(sizes))
        before = self.progress.board.read(self.progress.rank)
        self.progress.begin(Phase.WAITING, before.counter, self._next)
        with transfer_errors(-1):
            dist.all_to_all_single(found, carried, sizes, own, group=self.group.group)
        self.progress.begin(before.phase, before.counter)
        pieces = dict(zip(order, torch.split(found, sizes), strict=True))
        return {device: _tensors(pieces[device], forms) for device, forms in coming.items()}

    @property
    def _next(self) -> int:
        """Who is waited for: the next of the ranks, so that who does not come is found by going round."""
        order = [*self.ranks.values()]
        return order[(order.index(self.progress.rank) + 1) % len(order)]


def _bytes_of(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of some tensors, one after another."""
    flat = [each.detach().contiguous().view(-1).view(torch.uint8) for each in tensors if each.numel()]
    return torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8)


def _size_of(form: Form) -> int:
    shape, dtype = form
    return prod(shape) * dtype.itemsize


def _tensors(flat: Tensor, forms: Sequence[Form]) -> list[Tensor]:
    """Tensors of these forms, from their bytes."""
    pieces = torch.split(flat, [_size_of(form) for form in forms])
    return [
        piece.clone().view(dtype).view(shape) if piece.numel() else torch.empty(shape, dtype=dtype)
        for piece, (shape, dtype) in zip(pieces, forms, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class CountedCollectives:
    """The collectives of devices that split a block, whose bytes are counted: as rings and direct sends move them."""

    group: RankGroup
    count: int
    sent: SentBytes

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over the devices: a ring sends each number twice, but to the last."""
        self.sent.note("sums", 2 * (self.count - 1) * tensor.nbytes // self.count)
        return self.group.sum(tensor)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all devices."""
        self.sent.note("gathers", (self.count - 1) * tensor.nbytes)
        return self.group.gather(tensor)

    def scatter(self, pieces: Sequence[Tensor]) -> Tensor:
        """The sum of the pieces for this device."""
        self.sent.note("scatters", sum(each.nbytes for each in pieces[1:]))
        return self.group.scatter(pieces)

    def exchange(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """A piece for each device."""
        self.sent.note("exchanges", sum(each.nbytes for each in pieces[1:]))
        return self.group.exchange(pieces)

    def route(self, rows: Tensor, give: Sequence[int], get: Sequence[int]) -> Tensor:
        """Rows for each device, of as many as each wants."""
        before = self.group.routed.copy()
        found = self.group.route(rows, give, get)
        self.sent.note("exchanges", sum(width * count for width, count in (self.group.routed - before).items()))
        return found
