"""Coarser parts: blocks that are never taken apart, so that less has to be searched (GraphPipe 3.5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeplan.partition.series_parallel import Part

__all__ = ["grouped"]


def grouped(tree: Part, weights: Mapping[str, int], grain: int) -> Part:
    """The tree with neighbours in a series, and parallel blocks, taken together while they weigh at most ``grain``."""
    done: list[tuple[Part, int]] = []
    for part in tree.post_order():
        if part.kind == "block":
            done.append((part, sum(weights[name] for name in part.names)))
            continue
        children = done[-len(part.parts) :]
        del done[-len(part.parts) :]
        total = sum(weight for _, weight in children)
        if total <= grain and all(child.kind == "block" for child, _ in children):
            kept = [_merged([child for child, _ in children])]
        else:
            kept = _neighbours(children, grain) if part.kind == "series" else [child for child, _ in children]
        done.append((kept[0] if len(kept) == 1 else Part(part.kind, tuple(kept)), total))
    return done[0][0]


def _neighbours(children: Sequence[tuple[Part, int]], grain: int) -> list[Part]:
    groups: list[tuple[list[Part], int]] = []
    for child, weight in children:
        open_ = groups and groups[-1][0][-1].kind == child.kind == "block"
        if open_ and groups[-1][1] + weight <= grain:
            groups[-1] = ([*groups[-1][0], child], groups[-1][1] + weight)
        else:
            groups.append(([child], weight))
    return [_merged(group) for group, _ in groups]


def _merged(parts: Sequence[Part]) -> Part:
    if len(parts) == 1:
        return parts[0]
    return Part("block", names=tuple(name for part in parts for name in part.names))
