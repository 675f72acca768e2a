"""The paged cache of an engine: blocks of tokens that requests hold, and what of them is in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pipeplan.errors import InfeasibleError


def blocks_of(tokens: int, pieces: int, block_tokens: int) -> int:
    """Blocks of the longest of so many pieces of a request's tokens."""
    return -(-tokens // (pieces * block_tokens))


@dataclass(slots=True)
class PagedCache:
    """Blocks of ``block_tokens`` tokens on each of the ``pieces`` that every request's cache is cut into.

    ``capacity`` is blocks of one piece; all pieces fill alike, to within a token.
    """

    capacity: int
    block_tokens: int
    pieces: int = 1
    used: int = field(default=0, init=False)

    def blocks(self, tokens: int) -> int:
        """Blocks of a request in one piece, the longest."""
        return blocks_of(tokens, self.pieces, self.block_tokens)

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return self.capacity - self.used

    def require_room(self, tokens: int) -> None:
        """Raises InfeasibleError where a request of so many tokens fits not even alone."""
        if self.blocks(tokens) > self.capacity:
            most = self.capacity * self.block_tokens * self.pieces
            raise InfeasibleError(
                f"a request of {tokens} tokens does not fit into the cache, which has room for {most}; give shorter "
                "ones, more devices, or devices with more memory"
            )

    def take(self, tokens: int, spare: int = 0) -> bool:
        """Hold a request's blocks, if there are enough and so many ``spare``."""
        needed = self.blocks(tokens)
        if needed + spare > self.free:
            return False
        self.used += needed
        return True

    def give_back(self, tokens: int) -> None:
        """A request that is done, or goes to host memory."""
        self.used -= self.blocks(tokens)

    def growing(self, lengths: Sequence[int] | NDArray[np.int64], steps: int) -> int:
        """Blocks that requests of these lengths need beside their own to write so many tokens each."""
        room = -self.pieces * self.block_tokens  # rounded up: less than nothing, rounded down
        held = np.asarray(lengths)
        return int(np.sum(held // room - (held + steps) // room))

    def steps_within(self, lengths: Sequence[int] | NDArray[np.int64], most: int) -> int:
        """For how many steps, at most so many, the blocks suffice."""
        lengths = np.asarray(lengths)
        if self.growing(lengths, most) <= self.free:
            return most
        if self.growing(lengths, 1) > self.free:  # as often as somebody has to be evicted
            return 0
        low, high = 0, most - 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.growing(lengths, middle) <= self.free else (low, middle - 1)
        return low
