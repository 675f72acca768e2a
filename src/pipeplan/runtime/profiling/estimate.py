"""Estimating a model's costs without running it: bytes and work are counted (:mod:`.counting`), times are those of a
device's rates, or fitted to what was measured.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import torch

from pipeplan.costs.blocks import require_row
from pipeplan.costs.calibration import Calibration, KnownRow, calibrate, likeness, measured_rows
from pipeplan.costs.communication import (
    LAUNCH_NS,
    LINK_CEILING,
    Exchange,
    LinkPath,
    Prices,
    hops_around,
    prices_in,
    prices_of,
    time_of_groups,
)
from pipeplan.costs.context import MERGED, SharedCore
from pipeplan.costs.devices import (
    CORE,
    DevicePreset,
    Kernel,
    Kernels,
    Work,
)
from pipeplan.costs.recipes import ESTIMATED, products_in_fp8, profiled_recipe
from pipeplan.costs.uniform.judging import RunsFit
from pipeplan.costs.uniform.shares import shares_reached
from pipeplan.costs.uniform.traced import FusedRates
from pipeplan.costs.wide_groups import GroupSizes, best_groups
from pipeplan.errors import UsageError
from pipeplan.files import Cluster, CostRow, Profile, Recipe, RingCosts
from pipeplan.files.row_messages import MessageTable, RowMessages, SequenceMessages, ShardMessages
from pipeplan.runtime.models.spec import Model
from pipeplan.runtime.profiling.benches import RowKey
from pipeplan.runtime.profiling.build_profile import (
    STATE_NOTES,
    AnyShare,
    Kind,
    SavedTensors,
    bare_profile,
    block_graph_of,
    kinds_of,
    priced_by,
    profile_of_kinds,
    source_of,
    split_sizes,
    splits_of,
)
from pipeplan.runtime.profiling.closed_forms import CountedBlock
from pipeplan.runtime.profiling.counting import counted
from pipeplan.runtime.profiling.expert_rows import (
    Spread,
    gathered_bytes,
    has_experts,
    parts_of_words,
    said_of_experts,
    spread_row,
    spreads_of,
    with_own_experts,
)
from pipeplan.runtime.profiling.optimizer_step import estimated_rate
from pipeplan.runtime.profiling.rounds import Progress
from pipeplan.runtime.profiling.shares import Pair, ShareCounter, pieces_of

_NOTES = " ".join(
    (
        "Estimated, not measured: bytes are what autograd would hold, times are sums over kernels of the device's "
        "roofline.",
        *STATE_NOTES,
    )
)
_FUSED = (
    "Kernels are fused: what is element-wise between products is one kernel, and what such kernels can make again is "
    "not held."
)
_EAGER = "Kernels are torch's own, operator by operator."
_OVERLAPPED = "Messages among devices that split a block overlap its products."
_WHOLE = "Sequences are only whole: {}."
"""Without rows for devices that share them, and why."""


def estimate_model(
    model: Model,
    microbatch_sizes: Sequence[int],
    *,
    device: DevicePreset,
    dtype: torch.dtype,
    shards: Sequence[int] = (1,),
    context: Sequence[int] | None = None,
    expert: Sequence[int] = (1,),
    load_factor: float = 1.0,
    etp: Sequence[int] = (1,),
    recompute: bool = False,
    calibration: Profile | None = None,
    runs: RunsFit | None = None,
    reference: Model | None = None,
    cluster: Cluster | None = None,
    recipe: Recipe | None = None,
    kernels: Kernels | None = None,
    overlap_tensor: bool = False,
    attention: str | None = None,
    progress: Progress | None = None,
    tell: Callable[[str], None] | None = None,
) -> Profile:
    """Estimate every block of a model for each micro-batch size.

    Raises UsageError where sizes, shards or calibration make no sense, and ExecutionError where a block cannot run.

    Args:
        model: what to estimate.
        microbatch_sizes: samples per micro-batch, each at least 1.
        device: whose rates are taken.
        dtype: of parameters and activations.
        shards: devices that split each block.
        context: devices that share the sequence of each sample; it is also whole. None: as many as
            :func:`pipeplan.runtime.profiling.shares.pieces_of` has of the model, where its attention is fused and
            nothing is calibrated; the profile's notes say which, or why none.
        expert: devices that share experts, each with whole ones of its own; they are also split as all else.
        etp: numbers of these devices that split each expert; 1 is whole ones.
        load_factor: of the words that experts' devices get, those of the fullest over the average.
        recompute: rows with activation checkpointing of each block, too.
        calibration: a measured profile that times are fitted to: of this model, or of some of its blocks.
        runs: what published runs reach on the device, instead of a measured profile; by default what the catalog says
            they do.
        reference: the model that ``calibration`` is of, if it is another one.
        cluster: whose links the collectives of split blocks take; without, the device's own link.
        recipe: what training keeps of every parameter; by default the usual one of the number format.
        kernels: ``eager`` ones, operator by operator as torch runs them, or ``fused``, as models are trained on
            accelerators (:mod:`pipeplan.runtime.profiling.fusion`); by default fused, but for processors, and for times
            that a measured profile calibrates.
        overlap_tensor: messages among devices that split a block overlap its products, as Megatron-LM's
            ``--tp-comm-overlap`` and torchtitan's asynchronous tensor parallelism have it; only with fused kernels.
        attention: the kernel of fused attention, whose share of the peak the catalog has; by default the device's usual
            one. Only with fused kernels.
        progress: called before every block and size.
        tell: called with what was fitted to ``calibration``.
    """
    if kernels == "fused" and calibration is not None:
        raise UsageError("--kernels fused: what was measured ran operator by operator; leave it or --calibrate out")
    fused = kernels == "fused" or (kernels is None and calibration is None and device.family != "")
    sizes = sorted(set(microbatch_sizes))
    if not sizes or sizes[0] < 1:
        raise UsageError(f"micro-batch sizes {sizes}: give at least one, each 1 or more, with --microbatch")
    recipe = recipe or profiled_recipe(ESTIMATED, str(dtype).removeprefix("torch."))[1]
    fp8 = products_in_fp8(recipe)
    if fp8 and calibration is not None:
        raise UsageError(f"--calibrate fits measured times, which say nothing of FP8; leave --precision {recipe} out")
    if fp8:
        device.fp8_peak()  # before anything is traced
    for flag, given in (("--overlap-tensor", overlap_tensor), ("--attention", attention)):
        if given and not fused:
            raise UsageError(f"{flag} is for estimates of fused kernels; leave it or --kernels eager out")
    unsplit = block_graph_of(model, dtype)
    pairs, why = _pairs_of(model, shards, context, cluster, calibrated=calibration is not None)
    spreads = spreads_of(model, unsplit.blocks, expert, load_factor, etp)
    if spreads and (not fused or calibration is not None):
        raise UsageError(
            "--expert is for estimates of fused kernels; leave --kernels eager and --calibrate PROFILE out"
        )
    counter = ShareCounter(model, unsplit, dtype, fused, recompute, progress)
    try:
        found = _Counted.of(counter, pairs, spreads, sizes)
    except UsageError as error:
        if context is not None or all(part == 1 for part, _ in pairs):
            raise
        pairs, why = [pair for pair in pairs if pair[0] == 1], str(error)
        found = _Counted.of(counter, pairs, spreads, sizes)
    splits, every, rows = [found.shares[pair] for pair in pairs], list(found.shares.values()), found.rows
    kinds = _NOTES, _FUSED if fused else _EAGER, why and _WHOLE.format(why), _OVERLAPPED * overlap_tensor
    notes = " ".join(filter(None, (*kinds, attention and f"Attention is {attention}.")))
    shares = shares_reached(device) if runs is None else runs.shares
    rates = FusedRates.of(device, shares, attention)
    if runs is not None or (calibration is None and shares.runs):
        device, notes = rates.device, f"{notes} {shares.notes if runs is None else runs.notes}"

    kernel_ns = kernel_ns_of(rates if fused else device, fp8=fp8)
    prices = prices_of(device) if cluster is None else None
    cores = {
        key: _exchanged(key, work, *found.cores[key], kernel_ns, prices, cluster) for key, (_, work) in rows.items()
    }
    timed = {key: with_exchange(_on_device(row, work, kernel_ns), cores[key]) for key, (row, work) in rows.items()}
    if calibration is not None:
        fitted = _fitted(calibration, reference or model, dtype, kernel_ns)
        timed = {key: fitted.row(*rows[key]) for key in rows}
        said = _fit_notes(calibration, fitted)
        notes = f"{notes} {said}"
        if tell is not None:
            tell(said)
    if model.remark:
        notes = f"{notes} {model.remark}."
    every_price = prices_in(cluster) if cluster is not None else prices_of(device)
    price = priced_by(every_price, dtype)
    source = source_of("estimated", device.title, dtype, f"{notes} Device: {device.source}.")
    by_kind = ((key.kind, row) for key, row in timed.items())
    known = None if calibration is None else calibration.step_bytes_per_s
    rate = known or estimated_rate(unsplit, recipe, dtype, device)
    table = MessageTable()
    more = _expert_rows(every, splits, spreads, rows, kernel_ns, every_price, links_of(device, cluster), dtype, table)
    products = {
        (key.kind, key.size): _split_products(work, kernel_ns, overlap_tensor)
        for key, (_, work) in rows.items()
        if fused and not key.recompute
    }
    messages = {
        (key.kind, key.size, key.recompute): RowMessages(
            shards=products.get((key.kind, key.size)), context=_sequences_said(core)
        )
        for key, core in cores.items()
    }
    return profile_of_kinds(
        model,
        splits,
        unsplit,
        by_kind,
        price,
        source,
        recipe,
        rate,
        more,
        said=messages,
        table=table,
        saved=found.saved,
    )


def _split_products(work: Work, kernel_ns: Callable[[Kernel], float], overlapped: bool) -> ShardMessages:
    ahead, back = (sum(map(kernel_ns, filter(_has_weights, work[name]))) for name in ("forward_ns", "input_grad_ns"))
    return ShardMessages(products_forward_ns=round(ahead), products_input_grad_ns=round(back), overlapped=overlapped)


def _has_weights(kernel: Kernel) -> bool:
    return kernel.weights


def _pairs_of(
    model: Model, shards: Sequence[int], context: Sequence[int] | None, cluster: Cluster | None, *, calibrated: bool
) -> tuple[list[Pair], str]:
    """Parts of sequences and shards that rows are for, and why sequences are only whole where nobody asked for that.

    Raises UsageError.
    """
    if context is not None:
        if calibrated and max(context) > 1:
            raise UsageError(
                "--calibrate fits measured times of whole sequences, and --context divides them; leave one of them out"
            )
        return split_sizes(model, shards, context, cluster), ""
    whole = split_sizes(model, shards, (1,), cluster)
    if calibrated:
        return whole, "times are fitted to those of whole ones"
    pieces, why = pieces_of(model)
    most = None if cluster is None else cluster.num_devices
    return [(part, n) for part in pieces for _, n in whole if most is None or part * n <= most], why


class _Counted(NamedTuple):
    """What blocks come to: their shares by pairs, their rows without times, what takes these, and keys and values with
    what attention makes of them, in bytes.
    """

    shares: Mapping[Pair, AnyShare]
    rows: Mapping[RowKey, tuple[CostRow, Work]]
    cores: Mapping[RowKey, tuple[int, int]]
    saved: Mapping[Kind, Sequence[SavedTensors]]

    @classmethod
    def of(
        cls, counter: ShareCounter, pairs: Sequence[Pair], spreads: Sequence[Spread], sizes: Sequence[int]
    ) -> _Counted:
        """Of these pairs, and of whole blocks with as many words as devices have where they share experts."""
        asked = {part for part, _ in pairs}
        found = counter.count([*pairs, *((part, 1) for part in parts_of_words(pairs, spreads))], sizes)
        rows, cores = dict[RowKey, tuple[CostRow, Work]](), dict[RowKey, tuple[int, int]]()
        saved: dict[Kind, list[SavedTensors]] = defaultdict(list)
        for each in found.blocks:
            key = each.key
            saved[key.kind] += [each.saved] * (not key.recompute)
            parts = key.context if key.context in asked else 1  # others are only for experts' words
            rows[key] = each.row, over_whole_sequences(each.work, parts, key.label)
            cores[key] = _of_key_value_heads(counter.model, each), each.mixed_bytes
        return cls(found.shares, rows, cores, saved)


def links_of(device: DevicePreset, cluster: Cluster | None) -> Callable[[int], LinkPath]:
    """A function that returns the links of a number of neighbouring devices: the cluster's, or the device's own."""
    if cluster is not None:
        return lambda devices: LinkPath.in_cluster(cluster, devices)
    return lambda devices: LinkPath(((1, LINK_CEILING * device.link_bytes_per_s),), LAUNCH_NS)


def _expert_rows(
    every: Sequence[AnyShare],
    splits: Sequence[AnyShare],
    spreads: Sequence[Spread],
    rows: Mapping[RowKey, tuple[CostRow, Work]],
    kernel_ns: Callable[[Kernel], float],
    prices: Prices,
    links: Callable[[int], LinkPath],
    dtype: torch.dtype,
    table: MessageTable,
) -> dict[str, list[CostRow]]:
    """{block: its rows where devices share experts}, whose messages are in the table."""
    found: dict[str, list[CostRow]] = defaultdict(list)
    kinds = kinds_of(every)
    of_kind: dict[Kind, list[RowKey]] = defaultdict(list)
    for key in rows:
        of_kind[key.kind].append(key)
    with_words = {share.context: share.graph.blocks for share in every if share.shards == 1}
    for split, spread in product(splits, spreads):
        parts = split.shards * split.context
        for block, words in zip(split.graph.blocks, with_words[parts], strict=True):
            spec = block.spec
            for key in of_kind[kinds[words.likeness]] if has_experts(words) else ():
                row, work = rows[key]
                timed = _on_device(row, with_own_experts(work, spread, words.spec, key.label), kernel_ns)
                own = words.spec, key.size, dtype.itemsize, spread, split
                said = said_of_experts(*own, links(spread.size), prices)
                made = spread_row(timed, split, spread, said, gathered_bytes(*own[:-1]))
                made = made.model_copy(update={"messages": table.place_of(RowMessages(expert=said))})
                require_row(f"block {spec.id!r}", dict(made))
                found[spec.id].append(made)
    return found


def kernel_ns_of(rates: DevicePreset | FusedRates, *, fp8: bool) -> Callable[[Kernel], float]:
    """What tells how long a kernel takes; with ``fp8`` products with weights run in that format."""
    if isinstance(rates, FusedRates):
        return lambda kernel: rates.kernel_ns(kernel, fp8=fp8 and kernel.weights)
    return lambda each: rates.kernel_ns(each.flops, each.moved_bytes, matrix=each.matrix, fp8=fp8 and each.weights)


def _on_device(row: CostRow, work: Work, kernel_ns: Callable[[Kernel], float]) -> CostRow:
    times: dict[str, int] = {phase: round(sum(map(kernel_ns, kernels))) for phase, kernels in work.items()}
    return row.model_copy(update={**times, "backward_ns": times["input_grad_ns"] + times["weight_grad_ns"]})


_ATTENTION = ("attention", "attention_backward")


def over_whole_sequences(work: Work, context: int, label: str) -> Work:
    """The work of a device that has one of ``context`` parts of each sequence.

    What was counted is attention of a part over itself. Queries of a part meet the keys of the whole: as many more, on
    average over parts where a causal mask leaves early ones less, since a device has an early and a late piece.

    Raises:
        UsageError: the block has attention that is not one kernel, and would have to hold its scores.
    """
    if context == 1:
        return work
    if work.get(CORE) and not any(kernel.form in _ATTENTION for kernel in work["forward_ns"]):
        raise UsageError(
            f"{label}: its attention is several kernels, which hold scores; --context is for fused attention only"
        )

    def longer(kernel: Kernel) -> Kernel:
        return replace(kernel, flops=kernel.flops * context) if kernel.form in _ATTENTION else kernel

    return {phase: [longer(kernel) for kernel in kernels] for phase, kernels in work.items()}


def _attention_ns(kernels: Sequence[Kernel], kernel_ns: Callable[[Kernel], float]) -> float:
    return sum(kernel_ns(kernel) for kernel in kernels if kernel.form in _ATTENTION)


def _of_key_value_heads(model: Model, block: CountedBlock) -> int:
    """Bytes of keys and values on a device, without copies that heads of queries have of them in what was counted."""
    heads = model.settings.get("num_key_value_heads")
    if not isinstance(heads, int) or not block.heads:
        return block.shared_bytes
    return block.shared_bytes * min(block.heads, max(1, heads // block.key.shards)) // block.heads


def _gather_and_hops_ns(key: RowKey, size: int, prices: Prices | None, cluster: Cluster | None) -> tuple[float, float]:
    """Keys and values of whole sequences, gathered by the devices that share them, and sent around a ring of these.

    The shards of a block stand beside each other, so that those with the same are as far apart.
    """
    if key.context == 1 or not size:
        return 0.0, 0.0
    exchange = Exchange("all_gather", size)
    if prices is not None:
        gather = prices(exchange, key.context)
        return gather, gather
    width = key.shards * key.context
    groups = [range(shard, width, key.shards) for shard in range(key.shards)]
    gather = time_of_groups(cluster, exchange, groups)
    wide = best_groups(cluster, GroupSizes(key.shards, key.context, 1, 1))
    return gather, gather if wide is None or not wide.context else hops_around(cluster, groups, size)


def _exchanged(
    key: RowKey,
    work: Work,
    piece: int,
    mixed: int,
    kernel_ns: Callable[[Kernel], float],
    prices: Prices | None,
    cluster: Cluster | None,
) -> SharedCore:
    """A core and what its devices exchange, of which each has a ``piece`` of keys and values and makes ``mixed`` bytes.

    Merged gradients are of queries, as large as what the core makes, and of a piece.
    """
    merge, merge_grad = (kernel_ns(Kernel(size, MERGED * size)) for size in (mixed, mixed + piece))
    ahead, back = (_attention_ns(work[phase], kernel_ns) for phase in ("forward_ns", "input_grad_ns"))
    whole = piece * key.context
    gather, hops = _gather_and_hops_ns(key, whole, prices, cluster)
    return SharedCore(key.context, ahead, back, gather, whole, mixed, merge, merge_grad, hops)


def with_exchange(row: CostRow, core: SharedCore) -> CostRow:
    """The row with what its core waits for where devices share sequences: gathered, and what a ring takes more."""
    if not core.gather_ns:
        return row
    ring, gathered = (
        RingCosts(**{name: round(float(each)) for name, each in way._asdict().items()})
        for way in (core.ring, core.gathered)
    )
    more = {name: getattr(ring, name) - getattr(gathered, name) for name in RingCosts.model_fields}
    return row.taking(gathered).model_copy(update={"ring": RingCosts(**more)})


def _sequences_said(core: SharedCore) -> SequenceMessages | None:
    """What a core says of its messages; None where there are none."""
    names = ("gather_ns", "hops_ns", "core_ns", "core_grad_ns", "merge_ns", "merge_grad_ns")
    times = {name: round(float(getattr(core, name))) for name in names}
    return SequenceMessages(bytes=core.shared_bytes, **times) if core.gather_ns else None


# Calibration ------------------------------------------------------------------------------------------------------


def _fitted(
    measured: Profile, reference: Model, dtype: torch.dtype, kernel_ns: Callable[[Kernel], float]
) -> Calibration:
    """Efficiencies by the measured rows of blocks that the reference has."""
    splits = splits_of(reference, (1,), dtype, None)
    unsplit = splits[0].graph
    bare = bare_profile(reference, unsplit)
    kinds = {likeness(block): node.kind for block, node in zip(bare.blocks, unsplit.blocks, strict=True)}
    same = measured.source.dtype in ("", str(dtype).removeprefix("torch."))
    rows = [(block, row) for block, row in measured_rows(measured) if same and likeness(block) in kinds]
    if not rows:
        raise UsageError(
            f"--calibrate: profile {measured.name!r} has no block with the operator, dimensions and parameters of one "
            f"of {reference.name!r}; measure some of its blocks, in the same --dtype and with the same --sequence"
        )
    sizes = sorted({row.microbatch_size for _, row in rows})
    works = {(each.key.block, each.key.size): each.work for each in counted(splits, sizes, dtype)}
    known = [KnownRow(block, row, works[kinds[likeness(block)], row.microbatch_size]) for block, row in rows]
    return calibrate(known, kernel_ns)


def _fit_notes(measured: Profile, fitted: Calibration) -> str:
    blocks = [block for block, _ in measured_rows(measured)]
    sizes = sorted({row.microbatch_size for _, row in measured_rows(measured)})
    return (
        f"Times are fitted to {measured.name} as measured on {measured.source.device}, micro-batch sizes {sizes}, "
        f"{len(set(map(likeness, blocks)))} kinds of blocks. {fitted.notes}"
    )
