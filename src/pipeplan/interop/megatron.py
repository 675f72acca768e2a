"""Megatron-LM's pipeline layout and its order of micro-batches, as of NVIDIA/Megatron-LM d98e8a6 (2026-08-22).

A layout is what ``--pipeline-model-parallel-layout`` takes: stages between bars, of letters E (embedding), t (a layer),
m (a layer of multi-token prediction) and L (loss). ``x*3`` is a letter, or a bar, three times, ``(tt|)*3`` a group;
groups are written out first, and commas mean nothing. Stage k is chunk k // P of rank k % P.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from itertools import groupby, zip_longest
from typing import Any

from pipeplan.catalog import ExportTarget, export_target
from pipeplan.errors import UsageError
from pipeplan.files import Plan
from pipeplan.interop.layers import PlanLayers
from pipeplan.interop.ranks import order_of
from pipeplan.texts import shown
from pipeplan.workload.kinds import Role, role_of

EMBEDDING, LAYER, PREDICTION, LOSS = "EtmL"

_GROUP = re.compile(r"\(([^)]+)\)\*([0-9]+)")
_LETTER = re.compile(r"([^*])\*([0-9]+)")
_MOST = 1_000_000
"""Characters of a layout when all is written out."""
_TOO_LONG = f"layout: written out it has more than {_MOST} letters; no model has as many layers"

Layout = tuple[str, ...]
"""[stage] its letters."""


def read_layout(text: str) -> Layout:
    """The stages of a layout: of letters, or a list of lists of words as recipes of Megatron-Bridge have it.

    Raises:
        UsageError: it has something else than letters, bars and repetitions, or is longer than any model.
    """
    if text.strip().startswith("["):
        return _of_words(text.strip())
    whole = _written_out(_written_out(text.strip().replace(",", ""), _GROUP), _LETTER)
    stages = tuple(whole.split("|"))
    for number, stage in enumerate(stages):
        odd = next((letter for letter in stage if letter not in (EMBEDDING, LAYER, PREDICTION, LOSS)), None)
        if odd is not None:
            raise UsageError(f"layout: stage {number} has {odd!r}; letters are E, t, m and L, and | ends a stage")
    return stages


_WORDS = {"embedding": EMBEDDING, "decoder": LAYER, "mtp": PREDICTION, "loss": LOSS}


def _of_words(text: str) -> Layout:
    """A Python expression, which is read and not run: ``[["embedding"] + ["decoder"] * 4, ["decoder", "loss"]]``."""
    try:
        stages = _value(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UsageError(f"layout: not a list of lists of words: {error}") from None
    if not (isinstance(stages, list) and all(isinstance(stage, list) for stage in stages)):
        raise UsageError("layout: write a list for each stage, as [['embedding', 'decoder'], ['decoder', 'loss']]")
    if sum(map(len, stages)) > _MOST:
        raise UsageError(_TOO_LONG)
    odd = next((word for stage in stages for word in stage if not isinstance(word, str) or word not in _WORDS), None)
    if odd is not None:
        raise UsageError(f"layout: {shown(odd)} is none of {', '.join(_WORDS)}")
    return tuple("".join(_WORDS[word] for word in stage) for stage in stages)


def _value(node: ast.expr) -> Any:
    """Lists, texts and numbers, sums of lists, and multiples. Raises ValueError for anything else."""
    match node:
        case ast.Constant(value=str() | int() as value):
            return value
        case ast.List(elts=elements):
            return [_value(each) for each in elements]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return [*_listed(left), *_listed(right)]
        case ast.BinOp(left=left, op=ast.Mult(), right=ast.Constant(value=int(times))):
            listed = _listed(left)
            if len(listed) * times > _MOST:
                raise ValueError(f"more than {_MOST} entries")
            return listed * times
    raise ValueError(f"{ast.unparse(node)[:80]!r} is neither a list nor a word")


def _listed(node: ast.expr) -> list[Any]:
    found = _value(node)
    if not isinstance(found, list):
        raise ValueError(f"{ast.unparse(node)[:80]!r} is no list")
    return found


def _written_out(text: str, pattern: re.Pattern[str]) -> str:
    length = len(text) + sum(len(found[1]) * _times(found[2]) for found in pattern.finditer(text))
    if length > _MOST:
        raise UsageError(_TOO_LONG)
    return pattern.sub(lambda found: found[1] * _times(found[2]), text)


def _times(digits: str) -> int:
    """The number; of a longer one than any layout may have its beginning, which is more than that, too."""
    return int(digits.lstrip("0")[:9] or 0)


def require_layout(layout: Layout, positions: int, num_layers: int | None = None) -> None:
    """Refuse what Megatron-LM refuses of a layout for so many pipeline ranks. Raises UsageError."""
    letters = "".join(layout)
    chunks, rest = divmod(len(layout), positions)
    if rest:
        raise UsageError(f"layout: its {len(layout)} stages cannot be shared by {positions} ranks evenly")
    if letters[:1] != EMBEDDING or letters.count(EMBEDDING) != 1:
        raise UsageError(
            f"layout: it begins with the one E, and this has {letters.count(EMBEDDING)}, first {letters[:1]!r}"
        )
    if letters[-1:] != LOSS or letters.count(LOSS) != 1:
        raise UsageError(f"layout: it ends with the one L, and this has {letters.count(LOSS)}, last {letters[-1:]!r}")
    if num_layers is not None and letters.count(LAYER) != num_layers:
        raise UsageError(f"layout: it has {letters.count(LAYER)} layers, and the model has {num_layers}")
    predicting = [number for number, stage in enumerate(layout) if PREDICTION in stage]
    if not predicting:
        return
    if LAYER in letters[letters.index(PREDICTION) :]:
        raise UsageError("layout: a t stands after an m; layers come before those of multi-token prediction")
    if len(predicting) > 1:
        raise UsageError(f"layout: m is in stages {predicting[0]} and {predicting[1]}; all are in one stage")
    if predicting[0] // positions < chunks - 1:
        raise UsageError(f"layout: m is in stage {predicting[0]}, which is not the last stage of its rank")


def layout_text(layout: Layout) -> str:
    """The layout in short: ``Et*4|(t*4|)*14tmL``."""
    stages = [_short(stage) for stage in layout]
    found = []
    for stage, same in groupby(stages[:-1]):
        count = len(list(same))
        found.append(f"({stage}|)*{count}" if count > 2 else f"{stage}|" * count)
    return "".join([*found, stages[-1]])


def _short(stage: str) -> str:
    runs = ((letter, len(list(same))) for letter, same in groupby(stage))
    return "".join(f"{letter}*{count}" if count > 2 else letter * count for letter, count in runs)


def layout_of(layers: PlanLayers) -> Layout:
    """The layout of a plan's layers; Megatron-LM always has an embedding and a loss."""
    stages = [LAYER * stage.count for stage in layers.stages]
    stages[0] = EMBEDDING + stages[0]
    stages[-1] += LOSS
    return tuple(stages)


# The order ---------------------------------------------------------------------------------------------------------


def order(positions: int, chunks: int, microbatches: int, group: int, rank: int) -> Iterator[tuple[str, int, int]]:
    """(kind, stage, micro-batch) as a rank runs them: 1F1B, or with several chunks interleaved 1F1B.

    Micro-batches go through the chunks in groups: all of a group by the first chunk, then by the next. A rank runs
    some forwards first, then a backward after each further forward, then the backwards that are left.
    """
    steps = [
        (chunk, microbatch)
        for first in range(0, microbatches, group)
        for chunk in range(chunks)
        for microbatch in range(first, min(first + group, microbatches))
    ]
    ahead = positions - rank - 1
    if chunks > 1:
        ahead = 2 * ahead + (chunks - 1) * group
    forwards = [("F", chunk * positions + rank, microbatch) for chunk, microbatch in steps]
    backwards = [("B", (chunks - 1 - chunk) * positions + rank, microbatch) for chunk, microbatch in steps]
    ahead = min(ahead, len(steps))
    yield from forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[len(steps) - ahead :]


def group_size(plan: Plan, layers: PlanLayers, target: ExportTarget | None = None) -> int:
    """Micro-batches that go through a chunk one after another in the order that the plan has.

    Raises:
        UsageError: the plan's order is none of Megatron-LM's; the text has the place.
    """
    positions, chunks, count = len(layers.groups), layers.chunks, plan.num_microbatches
    target = target or export_target("megatron")
    orders = [order_of(plan, devices, target) for devices in layers.groups]
    programs = [[(each.kind, each.stage, each.microbatch) for each in order] for order in orders]
    group = count
    if chunks > 1:
        run = ((role_of(kind), stage) for kind, stage, _ in programs[0])
        group = next((index for index, each in enumerate(run) if each != (Role.FORWARD, 0)), count)
        _require_group(group, positions, count)
    for rank, devices in enumerate(layers.groups):
        _require_order(
            programs[rank], [*order(positions, chunks, count, group, rank)], devices[0], chunks, target.title
        )
    return group


def _require_group(group: int, positions: int, count: int) -> None:
    if positions == 1:
        raise UsageError("stages[1] is on the only rank; Megatron-LM has virtual stages only with several ranks")
    if not positions <= group <= count or 0 < count % group < positions:
        raise UsageError(
            f"programs[0] runs {group} of {count} micro-batches through its first stage before the next; Megatron-LM "
            f"takes groups of at least {positions}, the last one too; search with --scheduler interleaved-1f1b"
        )


def _require_order(
    found: Sequence[object], wanted: Sequence[tuple[str, int, int]], device: int, chunks: int, title: str
) -> None:
    for index, (own, theirs) in enumerate(zip_longest(found, wanted)):
        if own != theirs:
            name = "interleaved-1f1b" if chunks > 1 else "1f1b"
            raise UsageError(
                f"programs[{device}]: its compute action {index} is {_text(own)}, and {title} runs {_text(theirs)}"
                f"; search with --scheduler {name}"
            )


def _text(entry: object) -> str:
    if not isinstance(entry, tuple):
        return "none"
    kind, stage, microbatch = entry
    return f"{stage}{kind}{microbatch}"
