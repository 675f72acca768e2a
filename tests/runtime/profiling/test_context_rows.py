"""Estimated rows of devices that share sequences: parts of sequences, attention over whole ones, keys and values."""

from __future__ import annotations

import random

import pytest
import torch

import pipeplan
from pipeplan.costs.communication import Exchange, prices_in, prices_of
from pipeplan.costs.context import with_exchanges
from pipeplan.costs.devices import Kernel, device_preset
from pipeplan.costs.operators import attention_core
from pipeplan.costs.uniform.layer import attention_ns
from pipeplan.costs.uniform.shares import catalog_shares
from pipeplan.costs.uniform.traced import FusedRates
from pipeplan.errors import UsageError
from pipeplan.files import Cluster, CostRow, Profile, RingCosts
from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.models.spec import Collective
from pipeplan.runtime.profiling.build_profile import priced_by, splits_of
from pipeplan.runtime.profiling.ring_rows import MeasuredRing

CONFIG = (
    "LlamaConfig(num_hidden_layers=1, hidden_size=512, num_attention_heads=8, num_key_value_heads=2, "
    "intermediate_size=1024, vocab_size=1000, max_position_embeddings=8192)"
)
SMALL = (
    "LlamaConfig(num_hidden_layers=1, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, "
    "intermediate_size=64, vocab_size=63)"
)
PART, HEADS, KV_HEADS, SIZE, WIDTH = 2048, 8, 2, 64, 2
H100 = device_preset("h100-80gb")
LATENCY, BANDWIDTH = 1_000, 10**9
SLOW = Cluster.of("slow", 8, levels=[("all", 8, LATENCY / 1e9, BANDWIDTH)])
RATES = FusedRates.of(H100, catalog_shares()["h100-80gb"])


def rows(profile: Profile, block: str) -> dict[tuple[int, int], CostRow]:
    (own,) = (each for each in profile.blocks if each.id == block)
    return {(row.shards, row.context): row for row in own.costs}


def core_ns(context: int, shards: int, *, backward: bool) -> float:
    """Closed form: queries of a part, keys of the whole, half of them behind a causal mask."""
    operator = attention_core(1, PART, context * PART, HEADS // shards, SIZE, WIDTH, causal=True)
    kernels = operator.input_grad if backward else operator.forward
    peak = RATES.machine.matrix_flops_per_s
    return sum(float(attention_ns(RATES.machine, peak, each.flops, SIZE, backward=backward)) for each in kernels)


@pytest.mark.filterwarnings("ignore:pipeplan run cannot split blocks of")
@pytest.mark.parametrize(
    ("context", "cluster"),
    [pytest.param(2, None, id="own links"), pytest.param(4, SLOW, id="slow links", marks=pytest.mark.slow)],
)
def test_rows_are_of_shorter_sequences_with_attention_over_whole_ones(context: int, cluster: Cluster | None) -> None:
    how = {"device": "h100-80gb", "microbatch": 1, "shards": (1, 2), "cluster": cluster}
    whole = pipeplan.estimate(CONFIG, sequence=context * PART, context=(context,), **how)
    short = pipeplan.estimate(CONFIG, sequence=PART, **how)
    assert {row.context for block in whole.blocks for row in block.costs} == {1, context}
    for block in whole.blocks:
        own, other = rows(whole, block.id), rows(short, block.id)
        for shards in (1, 2):
            row, part = own[shards, context], other[shards, 1]
            assert row.activation_bytes == part.activation_bytes
            assert row.weight_grad_ns == part.weight_grad_ns
            if block.operator != "attention":
                assert (row.forward_ns, row.backward_ns) == (part.forward_ns, part.backward_ns)
                assert (row.workspace_bytes, row.ring) == (part.workspace_bytes, None)
                continue
            moved = 2 * WIDTH * context * PART * max(1, KV_HEADS // shards) * SIZE
            gather = prices_of(RATES.device)(Exchange("all_gather", moved), context)
            if cluster is not None:
                gather = (context - 1) * (LATENCY + 1e9 * moved / context / BANDWIDTH)
                assert gather > core_ns(context, shards, backward=True), "a ring does not hide it either"
            assert row.ring is not None
            assert row.workspace_bytes == part.workspace_bytes + 2 * moved
            mixed, others, hop = WIDTH * PART * HEADS // shards * SIZE, context - 1, gather / (context - 1)
            held = max(5 * moved // context + mixed, 2 * moved // context + 3 * mixed)
            assert row.workspace_bytes + row.ring.workspace_bytes == part.workspace_bytes + held
            for backward, name in ((False, "forward_ns"), (True, "input_grad_ns")):
                core = core_ns(context, shards, backward=backward)
                alone = getattr(part, name) + core * (1 - 1 / context)
                assert getattr(row, name) == pytest.approx(alone + gather * (1 + backward), rel=1e-3)
                merge = RATES.kernel_ns(Kernel(mixed, 3 * (mixed + backward * moved // context)))
                step, inner = core / context, others - 1
                around = max(0, hop - step) + inner * max(merge, hop - step) + merge
                if backward:
                    around = 2 * max(0, hop - step) + inner * max(0, 2 * hop - step) + others * merge
                assert getattr(row, name) + getattr(row.ring, name) == pytest.approx(alone + around, rel=1e-3)


def test_copies_of_keys_and_values_for_heads_of_queries_are_not_sent() -> None:
    """Attention in windows is given a mask, and keys and values that eight heads of queries have copies of."""
    windows = CONFIG.replace("Llama", "Mistral").replace("num_hidden", "sliding_window=512, num_hidden")
    quick = SLOW.model_copy(update={"levels": (SLOW.levels[0].model_copy(update={"latency_ns": 0}),)})
    slow = quick.model_copy(
        update={"levels": (quick.levels[0].model_copy(update={"bandwidth_bytes_per_s": BANDWIDTH // 4}),)}
    )
    how = {"device": "h100-80gb", "microbatch": 1, "sequence": PART, "context": 2}
    times = [
        rows(pipeplan.estimate(windows, cluster=each, **how), "layers.0.attention")[1, 2].forward_ns
        for each in (quick, slow)
    ]
    moved = 2 * WIDTH * PART * KV_HEADS * SIZE
    assert times[1] - times[0] == pytest.approx(moved / 2 * (4 - 1) * 1e9 / BANDWIDTH, abs=2)


@pytest.mark.parametrize(
    ("name", "kv_heads", "size"),
    [pytest.param("gpt2-tiny", 4, 8, id="gpt2", marks=pytest.mark.slow), pytest.param(SMALL, 2, 8, id="llama")],
)
def test_measured_rows_are_of_attention_over_whole_sequences(name: str, kv_heads: int, size: int) -> None:
    """Of pieces as they run; keys and values are gathered once in F, and in I again, before gradients are summed.

    Or go around a ring, so that searches of what is measured have both.
    """
    profile = pipeplan.profile(
        name, sequence=16, microbatch=1, context=2, shards=(1, 2), repeats=1, warmup=0, threads=1
    )
    for block in profile.blocks:
        assert {(row.shards, row.context) for row in block.costs} == {(1, 1), (2, 1), (1, 2), (2, 2)}
        around = {(row.shards, row.context) for row in block.costs if row.ring is not None}
        assert around == ({(1, 2), (2, 2)} if "attention" in block.operator else set())
        kept = {(row.shards, row.context): row.activation_bytes for row in block.costs}
        for shards in (1, 2) if block.id not in ("embedding", "head") else (1,):  # split words take more per place
            half, all_ = kept[shards, 2], kept[shards, 1]
            assert 2 * half == pytest.approx(all_, rel=0.01), "half of the places, and nothing of the other half"
    assert with_exchanges(profile, "ring").rings == {(1, 2), (2, 2)}
    assert "an early and a late piece were measured alone" in profile.source.notes
    (plain, part) = splits_of(load_model(name, sequence=16), (2,), torch.float32, None, (2,), alone=True)
    for whole, own in zip(plain.model.blocks, part.model.blocks, strict=True):
        found = [
            (each.operation, each.phase, each.bytes_per_sample) for each in own.collectives if each.over == "context"
        ]
        moved = 4 * 2 * 16 * kv_heads // 2 * size
        steps = (
            [("all_gather", "F"), ("all_gather", "I"), ("reduce_scatter", "I")] if "attention" in own.operator else []
        )
        assert found == [(*each, moved) for each in steps], whole.id
    apart = Cluster.of("two", 4, levels=[("pair", 2, 1e-6, 10**9), ("all", 4, 1e-3, 10**6)])
    price = priced_by(prices_in(apart), torch.float32, apart)
    gather = Collective("all_gather", "F", 1000, over="context")
    assert price(gather, 1, 2, 2) > 100 * price(gather, 1, 2), "devices with one share stand in different pairs"


@pytest.mark.parametrize("parts", [2, 4])
def test_a_measured_ring_waits_for_what_hops_take_longer_than_steps(parts: int) -> None:
    """By hand: steps of 100 ns ahead and 200 back, of which merging is a part, and hops of 150."""
    found = CostRow(microbatch_size=1, context=parts, forward_ns=5000, input_grad_ns=9000, weight_grad_ns=0)
    times = [(90 * parts, 190 * parts, 100 * parts, 200 * parts), (0, 0, 10 * parts, 10 * parts), (9, 9, 9999, 9999)]
    measured = MeasuredRing.of([times[0], *times], -7)
    assert measured.more == RingCosts(forward_ns=10 * parts, input_grad_ns=10 * parts, workspace_bytes=-7)
    hops = parts - 1
    ring = measured.beside(found, 150 * hops, 320 * hops)
    assert ring.forward_ns == 10 * parts + 50 * hops - 150 * hops
    assert ring.input_grad_ns == 10 * parts + 100 * (parts - 2) - 320 * hops, "all but the first and last have two"
    assert ring.workspace_bytes == -0 == 0, "a row of nothing has nothing less"
    alone = measured.beside(found, 0, 0)
    assert (alone.forward_ns, alone.input_grad_ns) == (10 * parts, 10 * parts)


def test_unsteady_times_make_rows_that_can_be_read() -> None:
    draw = random.Random(3)
    for _ in range(300):
        again, times = draw.random() < 0.5, [draw.randrange(100) for _ in range(5)]
        found = CostRow(
            microbatch_size=1,
            context=2,
            recompute=again,
            forward_ns=times[0],
            backward_ns=times[1],
            input_grad_ns=times[2],
            weight_grad_ns=times[3],
            workspace_bytes=draw.randrange(50),
            selective_ns=None if again else times[4],
            selective_activation_bytes=None if again else 0,
        )
        runs = [(draw.randrange(100), draw.randrange(100), draw.randrange(100), draw.randrange(100)) for _ in range(3)]
        measured = MeasuredRing.of(runs, draw.randrange(-60, 60))
        ring = measured.beside(found, draw.randrange(50), draw.randrange(50))
        assert CostRow(**{**dict(found), "ring": ring}).ring == ring
        assert CostRow(**dict(found.taking(ring))).ring is None


def test_what_cannot_share_sequences_is_refused() -> None:
    how = {"device": "h100-80gb", "microbatch": 1}
    with pytest.raises(UsageError, match="sequences of 2048, which 3 devices cannot share evenly"):
        pipeplan.estimate(CONFIG, sequence=PART, context=3, **how)
    with pytest.raises(UsageError, match=r"16 devices cannot have an early and a late piece each.* multiple of 32, or"):
        pipeplan.estimate("gpt2-tiny", context=16, **how)
    with pytest.raises(UsageError, match=r"measures blocks as they run.*does not say how 2 devices share"):
        pipeplan.profile("gpt2-tiny-operators", microbatch=1, context=2, repeats=1, warmup=0)
    with pytest.raises(UsageError, match="makes samples of its own"):
        pipeplan.estimate("runtime_support.models:chain", context=2, **how)


@pytest.mark.filterwarnings("ignore:pipeplan run cannot split blocks of")
def test_what_needs_more_devices_than_there_are_is_left_out() -> None:
    """Numbers that each fit may not fit together: only those that do not are left out, and that is said."""
    pair = Cluster.of("pair", 2)
    how = {"device": "h100-80gb", "microbatch": 1, "sequence": 64, "cluster": pair}
    with pytest.warns(UserWarning, match="left out, as the cluster has fewer devices: --context 2 with --shards 2"):
        profile = pipeplan.estimate(CONFIG, shards=(1, 2), context=(1, 2), **how)
    assert {(row.shards, row.context) for block in profile.blocks for row in block.costs} == {(1, 1), (2, 1), (1, 2)}
    with pytest.raises(UsageError, match="context=4 with shards=1: the cluster has 2 devices"):
        pipeplan.estimate(CONFIG, shards=(1, 2), context=(1, 4), **how)
