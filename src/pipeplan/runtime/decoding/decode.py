"""A rank's job: write texts on by a decoding plan."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import Tensor

from pipeplan.errors import UsageError
from pipeplan.runtime.decoding.choosing import WordChoice
from pipeplan.runtime.decoding.exchanges import SentBytes
from pipeplan.runtime.decoding.layouts import Placed
from pipeplan.runtime.decoding.options import DecodeOptions
from pipeplan.runtime.decoding.rank import DecodingRank, Turns
from pipeplan.runtime.decoding.requests import Pass, RequestQueue
from pipeplan.runtime.decoding.stage import DecodingStage, WrittenModel, lines_of
from pipeplan.runtime.executor.process_groups import ProcessGroups
from pipeplan.runtime.launch.status import Progress
from pipeplan.runtime.models.spec import CausalDecoder, Model

_CPU = torch.device("cpu")


def rank_of(
    placed: Sequence[Placed],
    turns: Turns,
    sizes: Sequence[int],
    model: Model,
    options: DecodeOptions,
    progress: Progress,
    planned_chunk: int = 0,
) -> tuple[DecodingRank, ProcessGroups]:
    """What a rank runs, before it is connected with others.

    Args:
        placed: all stages.
        turns: this rank's.
        sizes: slots of each group.
        model: what writes.
        options: prompts, and how they are written on.
        progress: this rank's.
        planned_chunk: words of a prompt that enter at once, 0 where nothing is planned.

    Raises:
        UsageError: model, stages and options do not go together.
    """
    decoder = require_fitting(model, options)
    windows = [found for block in model.blocks if (found := decoder.windows(block.id)) is not None]
    written = WrittenModel.of(model, options.chunk(planned_chunk, min(windows, default=None)))
    require_blocks(written.model, placed)
    queue = RequestQueue(options.prompts, sizes, options.new_tokens, written.chunk, options.stop)
    groups = ProcessGroups({line for stage in placed for line in lines_of(stage)}, progress)
    sent = SentBytes()

    def words(rows: Pass, own: range) -> Tensor:
        found = torch.zeros((len(own), rows.width), dtype=torch.long)
        for number, row in enumerate(rows.rows[own.start : own.stop]):
            found[number, rows.width - row.count :] = torch.tensor(queue.entering(row))
        return found

    dtype = getattr(torch, options.dtype or "float32")
    stages = {
        number: DecodingStage(
            *(stage, written, groups, progress, sent, sizes, options.longest, words), dtype=dtype, seed=options.seed
        )
        for number, stage in enumerate(placed)
        if progress.rank in stage.devices and stage.blocks
    }
    choice = WordChoice(options.temperature, options.top, options.seed)
    timeout = timedelta(seconds=options.timeout_ns / 1e9)
    sources = [_sources(written.model, stage) for stage in placed]
    return DecodingRank(placed, stages, sources, turns, queue, choice, progress, lambda: 0, timeout), groups


def require_fitting(model: Model, options: DecodeOptions) -> CausalDecoder:
    """Refuse prompts that the model cannot read, or write on so far; how it does. Raises UsageError."""
    decoder = WrittenModel.require(model)
    longest = decoder.longest
    words = None if model.texts is None else model.texts.vocabulary
    for number, prompt in enumerate(options.prompts, 1):
        if words is not None and (odd := [word for word in prompt if not 0 <= word < words]):
            raise UsageError(f"prompt {number} has token {odd[0]}, and {model.name} has those from 0 to {words - 1}")
        if longest is not None and len(prompt) + options.new_tokens > longest:
            raise UsageError(
                f"prompt {number} has {len(prompt)} tokens, and with --new-tokens {options.new_tokens} its text would "
                f"have {len(prompt) + options.new_tokens}; {model.name} takes texts of at most {longest}: give fewer, "
                "or a configuration with more positions"
            )
    return decoder


def require_blocks(model: Model, placed: Sequence[Placed]) -> None:
    """Refuse stages of other blocks than the model's. Raises UsageError."""
    known, there = [block.id for block in model.blocks], [id_ for stage in placed for id_ in stage.blocks]
    if odd := sorted(set(known) ^ set(there)):
        where = "the model" if odd[0] in there else "the plan"
        raise UsageError(f"block {odd[0]!r} is not in {where}; the plan must be for {model.name}, at its granularity")


def _sources(model: Model, stage: Placed) -> list[str]:
    """Blocks of other stages whose outputs a stage takes, in order."""
    taken = (source for id_ in stage.blocks for source, _ in model.block(id_).inputs)
    return list(dict.fromkeys(source for source in taken if source not in stage.blocks))
