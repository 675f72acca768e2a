"""Measuring a model block by block: times, memory, and what travels between blocks.

Every block runs by itself as a stage runs it: its inputs are leaves, and its backward starts from a given gradient.
F and B are timed in one pass; F, I and W in another. The runs of all blocks and sizes take turns, so that a slow moment
of the machine falls on all of them, and each finds the caches as another left them.
"""

from __future__ import annotations

import platform
import warnings
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from pipeplan.costs.communication import prices_in
from pipeplan.costs.recipes import MEASURED, profiled_recipe
from pipeplan.errors import UsageError
from pipeplan.files import Cluster, CostRow, Profile, Recipe, Source
from pipeplan.runtime.models.losses import find_losses
from pipeplan.runtime.models.spec import Model
from pipeplan.runtime.profiling.benches import TIMES, Bench, saved_by_kind
from pipeplan.runtime.profiling.build_profile import (
    STATE_NOTES,
    Kind,
    ModelShare,
    bare_profile,
    priced_by,
    profile_of_kinds,
    source_of,
    splits_of,
    unsplit_of,
)
from pipeplan.runtime.profiling.expert_rows import measured_expert_rows, spreads_of, with_own_share
from pipeplan.runtime.profiling.instruments import drift_of, num_outliers, steady
from pipeplan.runtime.profiling.optimizer_step import measured_rate
from pipeplan.runtime.profiling.rounds import Benches, Progress, RunCounter, RunCounts, UnfinishedProfile

_DRIFT = 0.1
"""A second half of the runs that is slower or faster by more than this is noted."""


def profile_model(
    model: Model,
    microbatch_sizes: Sequence[int],
    *,
    repeats: int = 10,
    warmup: int = 3,
    max_spread: float | None = None,
    shards: Sequence[int] = (1,),
    context: Sequence[int] = (1,),
    expert: Sequence[int] = (1,),
    load_factor: float = 1.0,
    recompute: bool = False,
    cluster: Cluster | None = None,
    dtype: torch.dtype = torch.float32,
    recipe: Recipe | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
    progress: Progress | None = None,
    partial: UnfinishedProfile | None = None,
    beside: Sequence[Callable[[bool], None]] = (),
    on_mean: Callable[[str], None] = lambda text: None,
) -> Profile:
    """Measure every block of a model for each micro-batch size.

    Blocks that are alike are measured once. Held in memory are one block of each kind with its gradients, and what one
    of them needs to run. A size for which memory runs out is left out, and so are those above it, as the notes say.

    With ``partial`` what was measured is kept in its file every few seconds and when something fails, and a later
    call goes on from there, also with other sizes. The file stays until the caller has written the profile.

    Args:
        model: what to measure.
        microbatch_sizes: samples per micro-batch, each at least 1.
        repeats: timed runs of each block and size, at least 1.
        warmup: runs of each before them.
        max_spread: go on, up to 5 times ``repeats``, with blocks whose spread is above it.
        shards: devices that split each block; one device's share is measured alone.
        context: devices that share the sequence of each sample, of which one's pieces are measured alone, with
            attention over the whole; sequences are also whole.
        expert: devices that share experts, each with whole ones of its own, of which one device's are measured alone,
            with as many words as it sends to the others. They are also split as all else.
        load_factor: of these words, how many times as many the fullest has, which is the one that is measured.
        recompute: rows with activation checkpointing of each block, too.
        cluster: whose links the collectives of split blocks take; without, their times are left out.
        dtype: of parameters and activations.
        recipe: what training keeps of every parameter; by default what a plain loop does in the number format.
        device: where to run; times and memory on CUDA are taken on the device.
        seed: of parameters and samples.
        progress: called before every run.
        partial: keeps what was measured.
        beside: called once each round, with whether its times count: for what takes turns with the blocks.
        on_mean: called with what the loss is a mean over, if it is, which the notes say, too.

    Raises:
        UsageError: sizes, repeats, shards or device make no sense, the model cannot be split so, a block cannot be
            built, the loss is neither a sum nor a mean over samples (:mod:`pipeplan.runtime.models.losses`), or
            ``partial`` is of another model, device or way to measure.
        ExecutionError: a block failed; the text names it and the size.
        InfeasibleError: memory ran out at the smallest size.
    """
    sizes, runs = sorted(set(microbatch_sizes)), RunCounts(repeats, warmup, max_spread)
    recipe = recipe or profiled_recipe(MEASURED, str(dtype).removeprefix("torch."))[1]
    where = require_usable(sizes, runs, device)
    splits = splits_of(model, shards, dtype, cluster, context, alone=True)
    unsplit = unsplit_of(splits, model, dtype)
    bare_profile(model, unsplit)  # before anything runs
    spreads = spreads_of(model, unsplit.blocks, expert, load_factor)
    if cluster is not None and spreads and spreads[-1].size > cluster.num_devices:
        raise UsageError(
            f"--expert {spreads[-1].size}: the cluster has {cluster.num_devices} devices; give at most that, or a "
            "larger --cluster"
        )
    shares = tuple(with_own_share(model, splits, spreads, dtype)) if spreads else ()
    losses = find_losses(model, seed=seed, device=where)
    if not losses.sure:
        warnings.warn(losses.text, stacklevel=2)
    elif losses.text and not model.loss_of:
        on_mean(losses.text)
    partial = UnfinishedProfile() if partial is None else partial
    partial.open(_question((*splits, *shares), load_factor, runs, dtype, where, recompute=recompute, seed=seed))
    benches = Benches((*splits, *shares), recompute, dtype, where, seed, partial, beside)
    rounds = RunCounter(progress, benches.num_of_size * len(sizes) * (1 + warmup + repeats))
    try:
        with steady(where):
            missing = benches.fill(sizes, rounds)
            rounds.total = rounds.done + sum(bench.runs_left(repeats, warmup) for bench in benches.all)
            missing = benches.time(runs, rounds) or missing
    finally:
        benches.keep()
        partial.save()
    notes = [
        *_notes((*splits, *shares), load_factor, benches.kinds, runs, cluster, recompute=recompute),
        *_findings(benches.all, missing),
    ]
    notes += [f"{text[0].upper()}{text[1:]}." for text in (model.remark, losses.text) if text]
    price = priced_by(None if cluster is None else prices_in(cluster), dtype, cluster)
    rate = measured_rate(unsplit, recipe, dtype, where, repeats=repeats, warmup=warmup)
    rows = [(bench.key.kind, bench.row()) for bench in benches.all]
    of_kind: dict[Kind, list[CostRow]] = defaultdict(list)
    for kind, row in rows:
        of_kind[kind].append(row)
    more = measured_expert_rows(shares, splits, unsplit, spreads, of_kind, cluster, dtype)
    source = measured_source(dtype, where, " ".join(notes))
    rings = {(bench.key.kind, bench.key.size): ring for bench in benches.all if (ring := bench.ring()) is not None}
    saved = saved_by_kind(benches.all)
    return profile_of_kinds(model, splits, unsplit, rows, price, source, recipe, rate, more, rings, saved=saved)


def require_usable(sizes: Sequence[int], runs: RunCounts, device: torch.device | str) -> torch.device:
    """The device to measure on. Raises UsageError where it, sizes or runs make no sense."""
    if not sizes or sizes[0] < 1:
        raise UsageError(f"micro-batch sizes {list(sizes)}: give at least one, each 1 or more, with --microbatch")
    if runs.repeats < 1 or runs.warmup < 0:
        raise UsageError(f"--repeats {runs.repeats} and --warmup {runs.warmup}: at least 1 timed run and 0 before it")
    return require_device(device)


def require_device(device: torch.device | str) -> torch.device:
    """The device to measure on. Raises UsageError where it is none, or torch has none such here."""
    try:
        found = torch.device(device)
    except RuntimeError:
        raise UsageError(f"--device {device!r} is not a device; give cpu or cuda") from None
    if found.type not in ("cpu", "cuda"):
        raise UsageError(f"--device {device!r} cannot be measured; give cpu or cuda")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds no CUDA device here; give --device cpu")
    return found


def _question(
    splits: Sequence[ModelShare],
    load: float,
    runs: RunCounts,
    dtype: torch.dtype,
    device: torch.device,
    *,
    recompute: bool,
    seed: int,
) -> dict[str, str]:
    """All that a row depends on beside its block and size, by the words an error uses for it."""
    source, experts = measured_source(dtype, device), sorted({split.expert for split in splits} - {1})
    contexts = sorted({split.context for split in splits if split.expert == 1} - {1})
    return {
        "model": splits[0].model.name,
        "--shards": ",".join(str(split.shards) for split in splits if split.expert == split.context == 1),
        **({"--context": ",".join(map(str, contexts))} if contexts else {}),
        **({"--expert": ",".join(map(str, experts))} if experts else {}),
        **({"--load-factor": f"{load:g}"} if load > 1 else {}),
        "--recompute": str(recompute).lower(),
        "--dtype": source.dtype,
        "device": source.device,
        "--repeats": str(runs.repeats),
        "--warmup": str(runs.warmup),
        "--seed": str(seed),
        "largest spread": str(runs.max_spread),
        "fingerprint of the model's blocks": "-".join(split.graph.fingerprint for split in splits),
        **{f"version of {name}": version for name, version in source.versions.items()},
    }


def measured_source(dtype: torch.dtype, device: torch.device, notes: str = "") -> Source:
    """Where and when it was measured."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    return source_of("measured", name, dtype, notes)


def _processor() -> str:
    """The processor's name and how many threads operators use."""
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    except OSError:
        pass  # not Linux
    threads = torch.get_num_threads()
    return f"{name}, {threads} thread{'' if threads == 1 else 's'}"


def _notes(
    splits: Sequence[ModelShare],
    load: float,
    kinds: Mapping[Hashable, Kind],
    runs: RunCounts,
    cluster: Cluster | None,
    *,
    recompute: bool,
) -> Iterator[str]:
    """How it was measured."""
    more = "" if runs.max_spread is None else f" (more where the spread was above {runs.max_spread:g})"
    yield f"Median of {runs.repeats} runs{more} after {runs.warmup} to warm up, blocks and sizes taking turns."
    if groups := _groups(splits, kinds):
        yield f"Blocks that are alike were measured once: {', '.join(groups[:20])}."
    yield from STATE_NOTES
    if max(split.shards for split in splits) > 1:
        links = "not among their times" if cluster is None else "among their times, by the links of the cluster given"
        yield f"Split blocks: one device's share was measured alone; collectives are {links}."
    if contexts := sorted({split.context for split in splits if split.expert == 1} - {1}):
        links = "not among their times" if cluster is None else "among their times, by the links of the cluster given"
        yield (
            f"Sequences over {', '.join(map(str, contexts))} devices: an early and a late piece were measured alone, "
            "with attention over the whole, and around a ring; gathered keys and values, and their gradients, or what "
            f"attention waits for them in a ring, are {links}."
        )
    if experts := sorted({split.expert for split in splits} - {1}):
        links = "not among their times" if cluster is None else "among their times, by the links of the cluster given"
        times = "" if load == 1 else f"{load:g} times "
        yield (
            f"Experts over {', '.join(map(str, experts))} devices: one device's share of them was measured alone, with "
            f"{times}as many words as it sends to the others; what devices send each other is {links}."
        )
    if recompute:
        yield "With recomputation F keeps a block's inputs alone, and B and I run its forward again first."


def _groups(splits: Sequence[ModelShare], kinds: Mapping[Hashable, Kind]) -> list[str]:
    """Kinds that represent several blocks of one split."""
    found = []
    for split in splits:
        counts: dict[Kind, int] = {}
        for block in split.graph.blocks:
            kind = kinds[block.likeness]
            counts[kind] = counts.get(kind, 0) + 1
        if split.expert > 1:
            continue
        split_so = f" split over {split.shards}" if split.shards > 1 else ""
        found += [f"{id_} for {count} blocks{split_so}" for (*_, id_), count in counts.items() if count > 1]
    return found


def _findings(benches: Sequence[Bench], missing: str | None) -> Iterator[str]:
    """What the runs showed that a reader must know: drift, outliers, sizes that are missing."""
    series = [(bench.key.label, name, bench.series(name)) for bench in benches for name in TIMES[:2]]
    drifts = {f"{name} of {label}": drift_of(values) for label, name, values in series}
    if drifted := {what: drift for what, drift in drifts.items() if abs(drift) > _DRIFT}:
        worst = max(drifted, key=lambda what: abs(drifted[what]))
        yield (
            f"Drift: between the first and the second half of the runs {len(drifted)} of {len(drifts)} medians changed "
            f"by more than {_DRIFT:.0%}, most {worst}, by {drifted[worst]:+.0%}."
        )
    if far := sum(num_outliers(values) for _, _, values in series):
        num_runs = sum(len(values) for _, _, values in series)
        yield f"Outliers: {far} of {num_runs} forward and backward runs lie far above their like; medians ignore them."
    if missing is not None:
        yield f"Larger sizes are missing: {missing[:1000]}."
