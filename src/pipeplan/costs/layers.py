"""Layers of a model by the names of its blocks: ``layer3.ffn``, ``layers.3.attention``, ``model.h.3``.

What stands before the first layer is the model's beginning (embeddings), what stands after the last one its end (norm,
head, loss).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pipeplan.errors import UsageError

LAYER = re.compile(
    r"(?:(?P<within>.*?)\.)??(?P<word>layers?|blocks?|h)\.?(?P<number>0|[1-9]\d{0,6})(?:\.(?P<part>.+))?"
)


def layer_of(block: str) -> int | None:
    """The number of the layer that a block is of, by its name; None of what no layer has."""
    found = LAYER.fullmatch(block)
    return None if found is None else int(found["number"])


def by_layers(order: Sequence[str], title: str) -> list[tuple[str, ...]]:
    """Blocks in their order as a model's beginning, each of its layers, and its end; for a tool with this ``title``.

    Raises:
        UsageError: they are not one row of layers; the text names the block.
    """
    groups: list[tuple[str, ...]] = []
    tower: tuple[str | None, str] | None = None
    count, ended = 0, False
    for block in order:
        found = LAYER.fullmatch(block)
        if found is None:
            same = bool(groups) and (ended or not count)
            ended = count > 0
        else:
            if tower not in (None, (found["within"], found["word"])):
                raise UsageError(
                    f"block {block!r} is a layer of another part of the model than those before it; {title} places one "
                    "row of layers: profile the part that it runs, or search without --for"
                )
            tower, number = (found["within"], found["word"]), int(found["number"])
            if ended or number not in (count - 1, count):
                raise UsageError(f"block {block!r} stands where layer {count} comes next; {title} runs layers in order")
            same, count = number == count - 1, number + 1
        if same:
            groups[-1] += (block,)
        else:
            groups.append((block,))
    if not count:
        raise UsageError(
            f"no block says which layer it is of, as layer0.ffn or layers.0 would (the first is {order[0]!r}); {title} "
            "places layers: name blocks so, or search without --for"
        )
    return groups
