"""How much room a device's micro-batches in flight need to run to their end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Effect", "still_needed"]


@dataclass(frozen=True, slots=True)
class Effect:
    """What an operation does to the memory of each of its devices, in bytes: taken at its start, while, at its end."""

    kind: str
    acquire: int
    workspace: int
    release: int


def still_needed(effects: Sequence[Effect]) -> list[int]:
    """[operations done] bytes that one micro-batch still takes, at most, until it has given everything back.

    ``effects`` are those of a device's operations in order. Weight gradients only give back, at the end; they need
    nothing but their workspace, and are not counted as done.
    """
    others = [effect for effect in effects if effect.kind != "W"]
    at_end = max((effect.workspace for effect in effects if effect.kind == "W"), default=0)
    needs = [at_end] * (len(others) + 1)
    for done in reversed(range(len(others))):
        effect = others[done]
        after = needs[done + 1] - effect.release
        needs[done] = effect.acquire + max(effect.workspace, after, 0)
    return needs
