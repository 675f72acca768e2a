"""A rank's job: generate text with a plan of decode steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pipeplan.errors import UsageError
from pipeplan.files import Plan, sha256_of
from pipeplan.runtime.decoding.choosing import WordChoice
from pipeplan.runtime.decoding.exchanges import SentBytes
from pipeplan.runtime.decoding.layouts import Placed
from pipeplan.runtime.decoding.options import DecodeOptions
from pipeplan.runtime.decoding.rank import DecodingRank, Turns
from pipeplan.runtime.decoding.requests import Pass, RequestQueue
from pipeplan.runtime.decoding.room import room_remarks
from pipeplan.runtime.decoding.stage import DecodingStage, WrittenModel, lines_of
from pipeplan.runtime.decoding.wire import sent_over_tcp
from pipeplan.runtime.executor.process_groups import AllRanks, ProcessGroups, require_alike
from pipeplan.runtime.launch.job import (
    OnEvent,
    RankContext,
    Report,
    RunResult,
    Started,
    WrittenText,
    longest_wait,
    run_job,
)
from pipeplan.runtime.launch.status import Phase, Progress, lost_others
from pipeplan.runtime.models.given_names import PythonValue
from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.models.spec import CausalDecoder, Model
from pipeplan.runtime.parallel.device import rank_device
from pipeplan.texts import counted

_CPU = torch.device("cpu")


def decode_job(job: Report, context: RankContext) -> None:
    """The job of a rank that writes texts on."""
    run_job(decode, DecodeOptions(**job["options"]), job, context)


def decode(plan: Plan, options: DecodeOptions, progress: Progress, on_event: OnEvent) -> RunResult:
    """Write all texts on; every rank of the process group calls this, and gets the same.

    Raises RankError where an action fails, and UsageError, the same on every rank, where plan, model and options do not
    go together.
    """
    progress.begin(Phase.LOADING)
    options = options.by_plan(plan)
    assert plan.decode is not None
    rank_device(options.device, options.transport, options.num_threads)
    name = options.model.value if isinstance(options.model, PythonValue) else options.model
    model = load_model(name, sequence=options.sequence, grain=options.grain, seed=options.seed)
    if options.stop:
        Turns.require_known(plan)
    turns = Turns.of(plan, progress.rank)
    here, groups = rank_of(plan.stages, turns, plan.decode.sizes, model, options, progress, plan.decode.prefill_tokens)
    here.counters = counters_of(plan, progress.rank)
    chunk = options.chunk(plan.decode.prefill_tokens, shortest_window(model))
    remarks = room_remarks(plan, model, options.longest, chunk, getattr(torch, options.dtype or "float32"))
    progress.begin(Phase.CONNECTING)
    timeout = longest_wait(options.timeout_ns, progress.board.machines)
    with lost_others(progress):
        all_ranks = AllRanks(_CPU, progress, timeout)
        require_alike({"plan": sha256_of(plan), **said(options)})
        groups.connect(options.transport, timeout)
    if options.init is not None:
        progress.begin(Phase.RESUMING)
        here.read_weights(options.init)
    on_event(Started(0, {"torch": torch.__version__}, remarks=remarks))
    all_ranks.begin()
    here.clock = all_ranks.passed_ns
    before = sent_over_tcp()
    here.run()
    after = sent_over_tcp()
    progress.begin(Phase.REPORTING)
    words = [(each.request, each.place, each.word, each.at_ns) for each in here.words]
    chosen = {(request, place): (word, at) for own in all_ranks.gather(words) for request, place, word, at in own}
    sent, kept = all_ranks.gather(here.sent_bytes), all_ranks.gather(here.cache_bytes)
    wire = all_ranks.gather(None if before is None or after is None else after - before)
    all_ranks.close()
    groups.close()
    progress.begin(Phase.DONE)
    requests = tuple(_text(chosen, request) for request in range(len(options.prompts)))
    versions = {"torch": torch.__version__}
    return RunResult(
        (),
        (),
        versions,
        requests=requests,
        sent_bytes=tuple(sent),
        wire_bytes=tuple(wire),
        cache_bytes=tuple(kept),
    )


def said(options: DecodeOptions) -> dict[str, object]:
    """What ranks must have been started alike with."""
    found = options.as_json()
    return {**found, "model": str(options.model), "prompts": [list(each) for each in options.prompts]}


def counters_of(plan: Plan, rank: int) -> dict[tuple[int, int], int]:
    """{(stage, group): the place in a rank's program of its first step}, by which errors say where it is."""
    assert plan.decode is not None
    places = {text: place for place, text in reversed(list(enumerate(plan.whole_programs[rank])))}
    wanted = ((number, group) for number in range(len(plan.stages)) for group in range(plan.decode.groups))
    return {key: places[f"{key[0]}F{key[1]}"] for key in wanted if f"{key[0]}F{key[1]}" in places}


def _text(chosen: Mapping[tuple[int, int], tuple[int, int]], request: int) -> WrittenText:
    own = [found for (number, _), found in sorted(chosen.items()) if number == request]
    return WrittenText(tuple(word for word, _ in own), tuple(at for _, at in own))


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
    require_fitting(model, options)
    written = WrittenModel.of(model, options.chunk(planned_chunk, shortest_window(model)))
    require_blocks(written.model, placed)
    follows = any(part == "chunk" for _, _, part in turns.entries)
    queue = RequestQueue(options.prompts, sizes, options.new_tokens, written.chunk, options.stop, follows)
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
    timeout = longest_wait(options.timeout_ns, progress.board.machines)
    sources = [_sources(written.model, stage) for stage in placed]
    return DecodingRank(placed, stages, sources, turns, queue, choice, progress, lambda: 0, timeout), groups


def shortest_window(model: Model) -> int | None:
    """How far back the block looks that looks back least; None where all look at all words."""
    decoder = WrittenModel.require(model)
    windows = (decoder.windows(block.id) for block in model.blocks)
    return min((each for each in windows if each is not None), default=None)


def require_fitting(model: Model, options: DecodeOptions) -> CausalDecoder:
    """Refuse texts that the model cannot read, write on so far or end; how it does. Raises UsageError."""
    decoder = WrittenModel.require(model)
    longest = decoder.longest
    words = None if model.texts is None else model.texts.vocabulary
    if words is not None and (odd := [word for word in options.stop if not 0 <= word < words]):
        raise UsageError(
            f"texts end after token {odd[0]} (--stop-ids, or the tokenizer's), and {model.name} has those from 0 to "
            f"{words - 1}; give one of them"
        )
    for number, prompt in enumerate(options.prompts, 1):
        if words is not None and (odd := [word for word in prompt if not 0 <= word < words]):
            raise UsageError(f"prompt {number} has token {odd[0]}, and {model.name} has those from 0 to {words - 1}")
        if longest is not None and len(prompt) + options.new_tokens > longest:
            raise UsageError(
                f"prompt {number} has {counted(len(prompt), 'token')}, and with --new-tokens {options.new_tokens} its "
                f"text would have {len(prompt) + options.new_tokens}; {model.name} takes texts of at most {longest}: "
                "give fewer, or a configuration with more positions"
            )
    return decoder


def require_blocks(model: Model, placed: Sequence[Placed]) -> None:
    """Refuse stages of other blocks than the model's, or in an order in which they cannot run. Raises UsageError."""
    known, there = [block.id for block in model.blocks], [id_ for stage in placed for id_ in stage.blocks]
    if odd := sorted(set(known) ^ set(there)):
        where = "the model" if odd[0] in there else "the plan"
        raise UsageError(f"block {odd[0]!r} is not in {where}; the plan must be for {model.name}, at its granularity")
    for stage in placed:
        for number, id_ in enumerate(stage.blocks):
            if late := set(dict(model.block(id_).inputs)) & set(stage.blocks[number:]):
                raise UsageError(
                    f"block {id_!r} takes the output of {min(late)!r}, which comes after it in its stage; the "
                    f"plan must have the blocks of a stage in the order of {model.name}"
                )


def _sources(model: Model, stage: Placed) -> list[str]:
    """Blocks of other stages whose outputs a stage takes, in order."""
    taken = (source for id_ in stage.blocks for source, _ in model.block(id_).inputs)
    return list(dict.fromkeys(source for source in taken if source not in stage.blocks))
