"""What the devices of a stage exchange in a turn, and how many bytes they send: counted where they are handed over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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


class StageExchange:
    """One rank's end of exchanges among devices of its stage: ``ranks`` by their numbers there."""

    def __init__(self, ranks: Mapping[int, int], group: RankGroup, progress: Progress, sent: SentBytes) -> None:
        self._order = sorted(ranks, key=ranks.__getitem__)
        self._group, self._progress, self._sent = group, progress, sent
        own = [*ranks.values()]
        self._next = own[(own.index(progress.rank) + 1) % len(own)]
        """Who is waited for: the next of the ranks, so that who does not come is found by going round."""

    def trade(
        self, purpose: str, given: Mapping[int, Sequence[Tensor]], coming: Mapping[int, Sequence[Form]]
    ) -> dict[int, list[Tensor]]:
        """Give devices, by number, some tensors, and get theirs; all of them call this together.

        Sent are the tensors' bytes, directly, and nothing beside.
        """
        parts, own = list[Tensor](), list[int]()
        for device in self._order:
            flat = [_bytes_of(each) for each in given.get(device, ()) if each.numel()]
            parts += flat
            own.append(sum(each.numel() for each in flat))
        sizes = [sum(map(_size_of, coming.get(device, ()))) for device in self._order]
        self._sent.note(purpose, sum(own))
        carried = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
        found = torch.empty(sum(sizes), dtype=torch.uint8)
        before = self._progress.board.read(self._progress.rank)
        self._progress.begin(Phase.WAITING, before.counter, self._next)
        self._carry(found, carried, sizes, own)
        self._progress.begin(before.phase, before.counter)
        pieces = dict(zip(self._order, torch.split(found, sizes), strict=True))
        return {device: _tensors(pieces[device], forms) for device, forms in coming.items()}

    def _carry(self, found: Tensor, carried: Tensor, sizes: list[int], own: list[int]) -> None:
        with transfer_errors(-1):
            dist.all_to_all_single(found, carried, sizes, own, group=self._group.group)


def _bytes_of(tensor: Tensor) -> Tensor:
    """A tensor's bytes, one after another."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _size_of(form: Form) -> int:
    shape, dtype = form
    return prod(shape) * dtype.itemsize


def _tensors(flat: Tensor, forms: Sequence[Form]) -> list[Tensor]:
    """Tensors of these forms, from their bytes: where they lie, but for those that numbers of their width cannot."""
    found = []
    for piece, (shape, dtype) in zip(torch.split(flat, [_size_of(form) for form in forms]), forms, strict=True):
        lies = piece if piece.storage_offset() % dtype.itemsize == 0 else piece.clone()
        found.append(lies.view(dtype).view(shape) if piece.numel() else torch.empty(shape, dtype=dtype))
    return found


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

    def begin_gather(self, tensor: Tensor) -> Callable[[], list[Tensor]]:
        """The tensors of all devices."""
        self.sent.note("gathers", (self.count - 1) * tensor.nbytes)
        return self.group.begin_gather(tensor)

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

    def begin_passing(self, tensors: Sequence[Tensor], by: int) -> Callable[[], list[Tensor]]:
        """Tensors for the device so many places on."""
        self.sent.note("exchanges", sum(each.nbytes for each in tensors))
        return self.group.begin_passing(tensors, by)
