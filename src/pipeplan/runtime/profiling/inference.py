"""Profiles of inference: forwards of any model, and of causal language models prefill, decode and what they cache.

Plain rows are of the model as it is. Those of phases are of what :attr:`Model.decoder` makes of it for so many tokens
at once, which gives logits of the next one and not a loss.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from pydantic import ValidationError

from pipeplan.costs.blocks import require_row
from pipeplan.costs.communication import LinkPath, Prices, prices_in, prices_of
from pipeplan.costs.devices import DevicePreset, Kernel, Kernels
from pipeplan.costs.quantized import WEIGHTS, WeightFormat, Weights, is_quantized, with_weights
from pipeplan.costs.recipes import inference_recipe
from pipeplan.costs.uniform.shares import shares_reached
from pipeplan.costs.uniform.traced import FusedRates, of_few_rows
from pipeplan.errors import UsageError
from pipeplan.files import Block, Cluster, CostRow, PhaseRow, Profile, Recipe, Source, TiedParameter
from pipeplan.files.profile import INFERENCE, Phase
from pipeplan.runtime.models.spec import BlockSpec, CausalDecoder, Model
from pipeplan.runtime.profiling.build_profile import (
    BlockGraph,
    BlockNode,
    CollectivePrice,
    Kind,
    ModelShare,
    block_graph_of,
    dtype_of,
    kinds_of,
    priced_by,
    source_of,
    splits_of,
    unsplit_of,
    with_experts_of_one,
)
from pipeplan.runtime.profiling.caches import Attended
from pipeplan.runtime.profiling.estimate import kernel_ns_of, links_of
from pipeplan.runtime.profiling.expert_rows import (
    EXPERTS,
    TAKEN,
    Spread,
    has_experts,
    spreads_of,
    with_own_experts,
    words_ns,
)
from pipeplan.runtime.profiling.forwards import CountedForward, ForwardBench, case_of, counted_forwards
from pipeplan.runtime.profiling.instruments import steady
from pipeplan.runtime.profiling.measure import measured_source, require_usable
from pipeplan.runtime.profiling.rounds import Benches, Progress, RunCounter, RunCounts, UnfinishedProfile
from pipeplan.workload.kinds import Role, role_of

_FORWARDS = "Forwards alone: a row's activation_bytes are what the block gives."
_ESTIMATED = (
    "Estimated, not measured: times are sums over kernels of the device's roofline, where what is element-wise between "
    "products is one kernel."
)
_CACHED = (
    "Prefill takes all tokens of a text and gives logits of the next; decode takes one token of each, whose attention "
    "meets context_tokens tokens, its own among them. Nothing is exchanged or computed of the loss."
)
_LATENT = "In decode queries meet the cached latents themselves, of which no keys and values are made again."
_TOUCHED = "Of experts a step reads those that some token chooses, on average where all are chosen evenly."


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """What a profile of inference is asked of.

    ``batches`` are requests at once, ``contexts`` lengths of texts (none: plain forwards only), ``cache_bytes`` those
    of a number of the cache where it is kept in another format than activations.
    """

    batches: tuple[int, ...]
    contexts: tuple[int, ...] = ()
    shards: tuple[int, ...] = (1,)
    weights: Weights | None = None
    cache_bytes: int | None = None

    def decoder_of(self, model: Model) -> CausalDecoder | None:
        """What writes on, where contexts are asked for.

        Raises:
            UsageError: the model is none, or a context is longer than its texts can be.
        """
        if not self.batches or min(self.batches) < 1:
            raise UsageError(f"--batch {list(self.batches)}: give at least one, each 1 or more")
        if not self.contexts:
            return None
        decoder = model.decoder
        if decoder is None:
            raise UsageError(
                f"--context: {model.name} is not known to generate text token by token (a causal language model: the "
                "zoo's GPTs, a Hugging Face configuration such as LlamaConfig, in halves of layers or layers); leave "
                "--context out for its forwards alone"
            )
        longest = max(self.contexts)
        if decoder.longest is not None and longest > decoder.longest:
            raise UsageError(
                f"--context {longest}: {model.name} takes texts of at most {decoder.longest} tokens; give less, or a "
                "configuration with more positions"
            )
        return decoder


@dataclass(slots=True)
class _Found:
    """Rows by block: plain ones and those of phases."""

    plain: dict[str, list[CostRow]] = field(default_factory=lambda: defaultdict(list))
    phases: dict[str, list[PhaseRow]] = field(default_factory=lambda: defaultdict(list))


def _split(
    model: Model, asked: InferenceRequest, dtype: torch.dtype, cluster: Cluster | None
) -> tuple[ModelShare, ...]:
    return splits_of(model, asked.shards, dtype, cluster)


def _in_windows(splits: Sequence[ModelShare], decoder: CausalDecoder) -> tuple[ModelShare, ...]:
    """The same, where blocks that look back less far are like no others."""

    def apart(block: BlockNode) -> BlockNode:
        window = decoder.windows(block.spec.id)
        return block if window is None else replace(block, likeness=(window, block.likeness))

    return tuple(
        replace(split, graph=replace(split.graph, blocks=tuple(map(apart, split.graph.blocks)))) for split in splits
    )


def _passes(
    model: Model, asked: InferenceRequest, decoder: CausalDecoder | None
) -> Iterator[tuple[Phase | None, int, Model]]:
    """What runs: the model as it is, then each phase with texts of each length."""
    yield None, 0, model
    if decoder is not None:
        step = decoder.at(1)
        for tokens in asked.contexts:
            yield "prefill", tokens, decoder.at(tokens)
            yield "decode", tokens, step


# Estimates --------------------------------------------------------------------------------------------------------


def estimate_inference(
    model: Model,
    asked: InferenceRequest,
    *,
    device: DevicePreset,
    dtype: torch.dtype,
    expert: Sequence[int] = (1,),
    load_factor: float = 1.0,
    cluster: Cluster | None = None,
    kernels: Kernels | None = None,
    progress: Progress | None = None,
) -> Profile:
    """Estimate forwards of every block, and prefill and decode where contexts are asked for.

    Args:
        model: what to estimate.
        asked: batches, contexts, shards, and formats of weights and cache.
        device: whose rates are taken.
        dtype: of activations, and of weights and cache without formats of their own.
        expert: devices that share experts in prefill and decode, each with whole ones of its own and requests of its
            own, whose tokens they exchange.
        load_factor: of the tokens that experts' devices get, those of the fullest over the average.
        cluster: whose links collectives take; without, the device's own link.
        kernels: ``fused``, as inference runs on accelerators, or ``eager``; by default fused, but for processors.
        progress: called before every block and size.

    Raises:
        UsageError: sizes, shards, contexts or formats make no sense for the model or device.
    """
    decoder = asked.decoder_of(model)
    fused = kernels == "fused" or (kernels is None and device.family != "")
    shares = shares_reached(device)
    rates = FusedRates.of(device, shares)
    if shares.runs:
        device = rates.device
    chosen = rates if fused else device
    weights = None if asked.weights is None else WEIGHTS[asked.weights]
    fp8 = weights is not None and weights.products and device.fp8_flops_per_s is not None
    usual, in_fp8 = kernel_ns_of(chosen, fp8=False), kernel_ns_of(chosen, fp8=True)
    prices = prices_in(cluster) if cluster is not None else prices_of(device)
    splits = _split(model, asked, dtype, cluster)
    unsplit = unsplit_of(splits, model, dtype)
    spreads = spreads_of(model, unsplit.blocks, expert, load_factor)
    _require_phases(spreads, decoder)
    found = _Found()
    timing = _KernelPrices(dtype, weights, usual, in_fp8 if fp8 else usual, priced_by(prices, dtype), prices)
    for phase, tokens, own in _passes(model, asked, decoder):
        shares_of = splits if phase is None else _split(own, asked, dtype, cluster)
        if decoder is not None and phase is not None:
            shares_of = _in_windows(shares_of, decoder)
        case = case_of(CountedForward, phase, tokens, decoder, asked.cache_bytes or dtype.itemsize)
        benches = counted_forwards(shares_of, asked.batches, dtype, case, progress, fused=fused)
        timing.rows(shares_of, benches, found, spreads if phase else (), links_of(device, cluster))
    notes = [_FORWARDS, _ESTIMATED if fused else _ESTIMATED.partition(",")[0] + ".", _formats(asked, device, fp8=fp8)]
    notes += [shares.notes] if shares.runs else []
    notes += [_CACHED, _TOUCHED] if decoder is not None else []
    notes += [_LATENT] if decoder is not None and decoder.latent else []
    notes.append(f"Device: {device.source}.")
    source = source_of("estimated", device.title, dtype, " ".join(filter(None, notes)))
    return _profile(model, unsplit, found, source, asked, decoder, weights)


def _formats(asked: InferenceRequest, device: DevicePreset, *, fp8: bool) -> str:
    said = ""
    if asked.weights is not None:
        how = "in which products run" if fp8 else f"of which products in {device.dtype} are made as they are read"
        said = f"Weights of layers are {WEIGHTS[asked.weights].title}, {how}; embedding and head are not."
    if asked.cache_bytes is not None:
        said += f" The cache has {asked.cache_bytes} byte a number."
    return said.strip()


@dataclass(frozen=True, slots=True)
class _KernelPrices:
    """Turns kernels into rows: of blocks ``kernel_ns``, of those with ``weights`` in another format ``products_ns``."""

    dtype: torch.dtype
    weights: WeightFormat | None
    kernel_ns: Callable[[Kernel], float]
    products_ns: Callable[[Kernel], float]
    price: CollectivePrice
    prices: Prices

    def rows(
        self,
        splits: Sequence[ModelShare],
        benches: Iterable[CountedForward],
        found: _Found,
        spreads: Sequence[Spread],
        links: Callable[[int], LinkPath],
    ) -> None:
        """Add the rows of all blocks."""
        of_kind: dict[Kind, list[CountedForward]] = defaultdict(list)
        for bench in benches:
            of_kind[bench.key.kind].append(bench)
        kinds = kinds_of(splits)
        for split in splits:
            for block in split.graph.blocks:
                for bench in of_kind[kinds[block.likeness]]:
                    waited = _exchanged(block.spec, bench.key.size, split.shards, self.price)
                    self._add(bench, block, split.shards, None, waited, found)
                    for spread in spreads if split.shards == 1 and has_experts(block) else ():
                        sent = words_ns(
                            block.spec, bench.key.size, self.dtype.itemsize, spread, links(spread.size), self.prices
                        )
                        self._add(bench, block, 1, spread, round(sent), found)

    def _add(
        self, bench: CountedForward, block: BlockNode, shards: int, spread: Spread | None, waited: int, found: _Found
    ) -> None:
        spec = block.spec
        kernels = list(map(of_few_rows, self._kernels(bench, block, spread)))
        time = self.products_ns if self.weights is not None and is_quantized(spec.operator) else self.kernel_ns
        forward = round(sum(map(time, kernels))) + waited
        core = round(sum(time(each) for each in kernels if each.form == "attention"))
        place = f"block {spec.id!r}"
        if bench.key.phase is None:
            row = bench.row().model_copy(update={"shards": shards, "forward_ns": forward, **_UNTIMED})
            require_row(place, dict(row))
            found.plain[spec.id].append(row.model_copy(update={"sequence_parallel": spec.divided}))
            return
        update = {"shards": shards, "forward_ns": forward, "core_ns": min(core, forward), "repeats": 0, "spread": 0.0}
        phase = bench.phase_row().model_copy(update=update)
        if spread is not None:
            phase = phase.model_copy(update={"expert": spread.size})
        require_row(place, dict(phase))
        found.phases[spec.id].append(phase)

    def _kernels(self, bench: CountedForward, block: BlockNode, spread: Spread | None) -> Sequence[Kernel]:
        """What runs, with one device's experts and only those that are chosen, and weights in their format."""
        kernels, spec = bench.kernels, block.spec
        if has_experts(block) and bench.key.phase is not None:
            tokens = bench.key.size * spec.dimensions["sequence"]
            if spread is not None:
                kernels = with_own_experts({"forward_ns": kernels}, spread, spec, bench.key.label)["forward_ns"]
            kernels = [_chosen(each, spec, tokens, tokens * (1 if spread is None else spread.size)) for each in kernels]
        if self.weights is None or not is_quantized(spec.operator):
            return kernels
        return [with_weights(each, self.weights, self.dtype.itemsize) for each in kernels]


_UNTIMED: dict[str, object] = {"repeats": 0, "spread": {}}


def _chosen(kernel: Kernel, spec: BlockSpec, tokens: int, all_tokens: int) -> Kernel:
    """A product of experts, of which those are read that one of ``all_tokens`` chooses, each a number of all alike.

    ``tokens`` are a device's own, which as many choose its experts as it has.
    """
    if not kernel.expert_bytes:
        return kernel
    taken, experts = spec.dimensions[TAKEN], spec.dimensions[EXPERTS]
    share = 1 - (1 - taken / experts) ** all_tokens
    product = kernel.product
    if product is not None:
        _, inner, columns, groups = product
        read = max(1, round(groups * share))
        product = (max(1, round(tokens * taken / read)), inner, columns, read)
    kept = round(kernel.expert_bytes * share)
    moved = kernel.moved_bytes - kernel.expert_bytes + kept
    return replace(kernel, moved_bytes=moved, expert_bytes=kept, product=product)


def _exchanged(spec: BlockSpec, samples: int, shards: int, price: CollectivePrice) -> int:
    """Ns of the collectives of a forward."""
    return sum(price(each, samples, shards) for each in spec.collectives if role_of(each.phase) is Role.FORWARD)


# Measurements -----------------------------------------------------------------------------------------------------


def measure_inference(
    model: Model,
    asked: InferenceRequest,
    *,
    repeats: int = 10,
    warmup: int = 3,
    cluster: Cluster | None = None,
    expert: Sequence[int] = (1,),
    load_factor: float = 1.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    progress: Progress | None = None,
) -> Profile:
    """Measure forwards of every block, and prefill and decode where contexts are asked for.

    Decode is of one token of each request, whose attention meets a cache of noise as long as the texts. Held are the
    caches of a context at a time: of one block of each kind, for every batch.

    Args:
        model: what to measure.
        asked: batches, contexts and shards; weights and cache are in ``dtype``.
        repeats: timed runs of each block and size, at least 1.
        warmup: runs of each before them.
        cluster: whose links collectives of split blocks take; without, their times are left out.
        expert: devices that share experts in prefill and decode, as in :func:`estimate_inference`; what one of them
            does is measured alone, where it has as many words for its experts as it sends away.
        load_factor: of these, how many times as many the fullest has.
        dtype: of weights, activations and cache.
        device: where to run.
        seed: of parameters and samples.
        progress: called before every run.

    Raises:
        UsageError: sizes, shards, experts or contexts make no sense, or a block cannot be built.
        ExecutionError: a block failed.
        InfeasibleError: memory ran out at the smallest size.
    """
    decoder, runs = asked.decoder_of(model), RunCounts(repeats, warmup)
    where = require_usable(sorted(asked.batches), runs, device)
    splits = _split(model, asked, dtype, cluster)
    unsplit = unsplit_of(splits, model, dtype)
    spreads = _measured_spreads(model, unsplit, expert, load_factor, decoder, cluster)
    price = priced_by(None if cluster is None else prices_in(cluster), dtype)
    found = _Found()
    for phase, tokens, own in _passes(model, asked, decoder):
        shares_of = splits if phase is None else _split(own, asked, dtype, cluster)
        of_one = tuple(_of_one(model, phase, tokens, spreads, dtype))
        if decoder is not None and phase is not None:
            shares_of, of_one = _in_windows(shares_of, decoder), _in_windows(of_one, decoder)
        case = case_of(ForwardBench, phase, tokens, decoder, dtype.itemsize)
        benches = Benches((*shares_of, *of_one), False, dtype, where, seed, UnfinishedProfile(), bench=case)
        rounds = RunCounter(progress, benches.num_of_size * len(asked.batches) * (1 + warmup + repeats))
        with steady(where):
            missing = benches.fill(asked.batches, rounds)
            missing = benches.time(runs, rounds) or missing
        if missing is not None:
            raise UsageError(f"{missing}; choose a smaller --batch or --context")
        _add_measured(shares_of, benches, price, found)
        for share, spread in zip(of_one, spreads, strict=bool(of_one)):
            _add_spread(shares_of[0], share, spread, benches, cluster, dtype, found)
    links = "not among times" if cluster is None else "among times, by the links of the cluster given"
    notes = [_FORWARDS, f"Median of {repeats} runs after {warmup} to warm up, blocks and batches taking turns."]
    notes += [f"Split blocks: one device's share was measured alone; collectives are {links}."] * (
        max(asked.shards) > 1
    )
    notes += [f"Shared experts: one device's were measured alone; what is exchanged is {links}."] * bool(spreads)
    notes += [_CACHED] if decoder is not None else []
    notes += [_LATENT] if decoder is not None and decoder.latent else []
    return _profile(model, unsplit, found, measured_source(dtype, where, " ".join(notes)), asked, decoder, None)


def _add_measured(splits: Sequence[ModelShare], benches: Benches, price: CollectivePrice, found: _Found) -> None:
    of_kind: dict[Kind, list[ForwardBench]] = defaultdict(list)
    for bench in benches.all:
        assert isinstance(bench, ForwardBench)
        of_kind[bench.key.kind].append(bench)
    for split in splits:
        for block in split.graph.blocks:
            for bench in of_kind[benches.kinds[block.likeness]]:
                waited = _exchanged(block.spec, bench.key.size, split.shards, price)
                row: CostRow | PhaseRow = bench.row() if bench.key.phase is None else bench.phase_row()
                row = row.model_copy(update={"shards": split.shards, "forward_ns": row.forward_ns + waited})
                require_row(f"block {block.spec.id!r}", dict(row))
                if isinstance(row, CostRow):
                    found.plain[block.spec.id].append(row.model_copy(update={"sequence_parallel": block.spec.divided}))
                else:
                    found.phases[block.spec.id].append(row)


def _measured_spreads(
    model: Model,
    unsplit: BlockGraph,
    expert: Sequence[int],
    load: float,
    decoder: CausalDecoder | None,
    cluster: Cluster | None,
) -> list[Spread]:
    """Experts on so many devices. Raises UsageError where that makes no sense."""
    spreads = spreads_of(model, unsplit.blocks, expert, load)
    _require_phases(spreads, decoder)
    if cluster is not None and spreads and spreads[-1].size > cluster.num_devices:
        raise UsageError(
            f"--expert {spreads[-1].size}: the cluster has {cluster.num_devices} devices; give at most that, or a "
            "larger --cluster"
        )
    return spreads


def _require_phases(spreads: Sequence[Spread], decoder: CausalDecoder | None) -> None:
    if spreads and decoder is None:
        raise UsageError("--expert is for prefill and decode of inference; give --context, too")


def _of_one(
    model: Model, phase: Phase | None, tokens: int, spreads: Sequence[Spread], dtype: torch.dtype
) -> Iterator[ModelShare]:
    """What writes texts on, with one device's experts. Raises UsageError where these are not known apart."""
    for spread in spreads if phase is not None else ():
        decoder = with_experts_of_one(model, spread.size, spread.load).decoder
        assert decoder is not None, "it is the model's, with fewer experts"
        own = decoder.at(1 if phase == "decode" else tokens)
        yield ModelShare(1, own, block_graph_of(own, dtype), expert=spread.size)


def _add_spread(
    whole: ModelShare,
    share: ModelShare,
    spread: Spread,
    benches: Benches,
    cluster: Cluster | None,
    dtype: torch.dtype,
    found: _Found,
) -> None:
    """Rows of blocks with experts, of which the ``share`` has one device's; ``whole`` has all."""
    for block, own in zip(whole.graph.blocks, share.graph.blocks, strict=True):
        for bench in benches.all if has_experts(block) else ():
            if bench.key.kind != benches.kinds[own.likeness]:
                continue
            assert isinstance(bench, ForwardBench)
            sent = 0.0
            if cluster is not None:
                links, prices = LinkPath.in_cluster(cluster, spread.size), prices_in(cluster)
                sent = words_ns(block.spec, bench.key.size, dtype.itemsize, spread, links, prices)
            row = bench.phase_row()
            row = row.model_copy(update={"expert": spread.size, "forward_ns": row.forward_ns + round(sent)})
            require_row(f"block {block.spec.id!r}", dict(row))
            found.phases[block.spec.id].append(row)


# The profile ------------------------------------------------------------------------------------------------------


def cached_of(decoder: CausalDecoder, dtype: torch.dtype) -> dict[str, list[Attended]]:
    """{block: the sizes of its attentions, unsplit}, of blocks that have any. Raises UsageError where none has."""
    splits = _in_windows(splits_of(decoder.at(1), (1,), dtype, None), decoder)
    case = case_of(CountedForward, "decode", 1, decoder, dtype.itemsize)
    of_kind = {
        bench.key.kind: bench.cached.found
        for bench in counted_forwards(splits, (1,), dtype, case, fused=True)
        if bench.cached is not None
    }
    kinds = kinds_of(splits)
    found = {block.spec.id: of_kind[kinds[block.likeness]] for block in splits[0].graph.blocks}
    attending = {id_: sizes for id_, sizes in found.items() if sizes}
    if not attending:
        raise UsageError(
            f"--context: no block of {splits[0].model.name} calls torch's scaled_dot_product_attention, so that what "
            "it would cache is not known; leave --context out for its forwards alone"
        )
    return attending


def _cache_keys(
    sizes: Sequence[Attended], decoder: CausalDecoder, block: str, cache_bytes: int | None
) -> dict[str, Any]:
    """What a block says of its cache."""
    numbers = sum(
        each.key_heads * (each.key_size + (0 if decoder.latent else each.value_size)) * (cache_bytes or each.width)
        for each in sizes
    )
    return {
        "cache_bytes_per_token": numbers,
        "cache_heads": min(each.key_heads for each in sizes),
        "cache_window_tokens": decoder.windows(block),
        "query_bytes_per_token": sum(each.heads * each.key_size * each.width for each in sizes),
        "mixture_bytes_per_token": sum(each.heads * each.value_size * each.width for each in sizes),
    }


def _profile(
    model: Model,
    graph: BlockGraph,
    found: _Found,
    source: Source,
    asked: InferenceRequest,
    decoder: CausalDecoder | None,
    weights: WeightFormat | None,
) -> Profile:
    """The profile of these rows. Raises UsageError where names do not fit one, or nothing attends to a cache."""
    dtype = dtype_of(source.dtype)
    cached = {} if decoder is None else cached_of(decoder, dtype)
    recipe = Recipe() if weights is not None else inference_recipe(source.dtype)
    width = dtype.itemsize if recipe.is_custom else None
    sizes = _weight_sizes(model, graph) if weights is not None else {}

    def block_of(node: BlockNode) -> Block:
        id_ = node.spec.id
        keys = (
            _cache_keys(cached[id_], decoder, id_, asked.cache_bytes) if decoder is not None and id_ in cached else {}
        )
        count = node.trainable + node.frozen
        if width is not None:
            kept = sizes.get(node.kind, ()) if weights is not None and is_quantized(node.spec.operator) else ()
            fewer = sum(numbers * width - weights.bytes_of(numbers, inputs) for numbers, inputs in kept if weights)
            keys |= {"parameter_bytes": count * width - fewer, "gradient_bytes": 0}
        return Block(
            id=id_,
            **node.spec.described,
            **node.counts(max(asked.shards)),
            costs=tuple(sorted(found.plain[id_], key=lambda row: row.key[:4])),
            phases=tuple(sorted(found.phases[id_], key=lambda row: row.key)),
            **keys,
        )

    def tied_of(each: TiedParameter) -> TiedParameter:
        own = {} if width is None else {"parameter_bytes": each.parameters * width, "gradient_bytes": 0}
        return each.model_copy(update=own)

    try:
        return Profile(
            name=model.name,
            mode=INFERENCE,
            source=source,
            tokens_per_sample=graph.tokens_per_sample,
            forward_flops_per_sample=graph.forward_flops_per_sample,
            recipe=recipe,
            blocks=tuple(map(block_of, graph.blocks)),
            edges=tuple(edge.model_copy(update={"gradient": False}) for edge in graph.edges),
            tied=tuple(map(tied_of, graph.tied)),
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"model {model.name!r} does not fit a profile: {place}: {first['msg']}") from error


def _weight_sizes(model: Model, graph: BlockGraph) -> Mapping[str, list[tuple[int, int]]]:
    """{kind of block: numbers and inputs of each of its weights}; what has one dimension is none."""
    found = {}
    for kind in dict.fromkeys(block.kind for block in graph.blocks):
        with torch.device("meta"):
            module = model.block(kind).build()
        found[kind] = [(each.numel(), each.shape[-1]) for each in module.parameters() if each.ndim >= 2]
    return found
