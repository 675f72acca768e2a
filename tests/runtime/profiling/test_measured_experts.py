"""Measured rows of devices that share experts: one device's part of them, with as many words as it sends away."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import pipeplan
from pipeplan.checker import check
from pipeplan.costs.communication import LinkPath, counts_ns, dispatch_ns, places_reached
from pipeplan.errors import UsageError
from pipeplan.files import Cluster, CostRow, DeviceKind, LinkLevel, Source
from pipeplan.runtime.models.huggingface.families import with_experts_of_one
from pipeplan.runtime.models.load import load_model
from pipeplan.runtime.parallel.experts import routed
from pipeplan.runtime.parallel.grouped_rows import grouped
from pipeplan.runtime.parallel.sharding import Shards
from pipeplan.runtime.profiling.build_profile import block_graph_of, kinds_of, splits_of
from pipeplan.runtime.profiling.expert_rows import Spread, measured_expert_rows, with_own_share
from runtime_support.hugging_face import HIDDEN, SEQUENCE, batch_for, size, text, whole
from support.marks import slow_but

pytestmark = pytest.mark.counted

SPARSE = ("mixtral", "phimoe", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "llama4_text")
EXPERTS = 4
MIXTRAL = text("mixtral", num_hidden_layers=1)


def experts_of(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: each for name, each in module.named_parameters() if each.ndim == 3 and each.shape[0] <= EXPERTS}


@pytest.mark.parametrize(
    "name", ["gpt2-experts-tiny", pytest.param(MIXTRAL, marks=[pytest.mark.slow, pytest.mark.long])]
)
def test_steps_of_inference_have_rows_of_shared_experts(name: str) -> None:
    """In decode and prefill, with what is exchanged over the cluster's links: at a byte a second that is nearly all."""
    level = LinkLevel(name="wire", group_size=2, latency_ns=0, bandwidth_bytes_per_s=1)
    kinds = (DeviceKind(name="x", count=2),)
    cluster = Cluster(name="slow", source=Source(method="estimated"), devices=kinds, levels=(level,))
    asked: dict[str, Any] = {"inference": True, "batch": "1,2", "context": "4", "expert": "2", "warmup": 0}
    profile = pipeplan.profile(name, **asked, load_factor=1.5, repeats=1, threads=1, cluster=cluster)
    assert "one device's were measured alone; what is exchanged is among times" in profile.source.notes
    for block in profile.kinds:
        assert {row.expert for row in block.phases} == ({1, 2} if block.operator == "moe" else {1})
        for row in (each for each in block.phases if each.expert == 2):
            words = row.microbatch_size * (1 if row.phase == "decode" else 4)
            sent = (
                1.5 * words * (2 * HIDDEN + 2 * 2) * 4 * places_reached(2, 2)
            )  # there and back, and what is said of it
            assert row.forward_ns == pytest.approx(1e9 * (sent + 32), abs=1e9), "and how many words come"
    with pytest.raises(UsageError, match="cluster has 2 devices; give at most that"):
        pipeplan.profile(name, **(asked | {"expert": "4"}), cluster=cluster)
    with pytest.raises(UsageError, match="expert is for prefill and decode of inference; give context"):
        pipeplan.profile(name, inference=True, expert="2")


@slow_but("name", SPARSE, lambda name: name in ("mixtral", "llama4_text"))
@pytest.mark.parametrize("devices", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_one_device_multiplies_what_it_sends_by_its_own_experts(name: str, devices: int) -> None:
    """As the whole model does, whose others are copies of these: loss, and gradients summed over the copies."""
    found, own = whole(name), EXPERTS // devices
    alike, part = copy.deepcopy(found.module), with_experts_of_one(found.module, devices)
    assert experts_of(alike)
    with torch.no_grad():
        for parameter in experts_of(alike).values():
            parameter.copy_(parameter[:own].repeat(devices, 1, 1))
    batch, losses = batch_for(found, 3), []
    for module in (alike, part):
        module.zero_grad()
        losses.append(module(**batch))
        losses[-1].backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=0)
    gradients = experts_of(alike)
    for key, parameter in experts_of(part).items():
        (of_all, of_own) = (gradients[key].grad, parameter.grad)
        assert of_all is not None
        torch.testing.assert_close(of_own, of_all.unflatten(0, (devices, own)).sum(0), rtol=1e-9, atol=1e-12)
    held = sum(each.numel() for each in experts_of(found.module).values())
    assert size(part) == size(found.module) - held + held // devices
    found.module.zero_grad()


@pytest.mark.parametrize("load", [1.25, 2.5])
@pytest.mark.parametrize("before", [False, True])
def test_the_fullest_device_multiplies_more_words(load: float, before: bool) -> None:
    """All that it has, and the first ones again, of which the products are added up."""
    taken, weights = list[int](), torch.randn(2, 3, 3, dtype=torch.float64)

    def experts(rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        taken.append(len(rows))
        return grouped(rows, weights, ends)

    words, shares = torch.randn(8, 3, dtype=torch.float64), torch.rand(8, 2, dtype=torch.float64)
    chosen = torch.stack([torch.randperm(4)[:2] for _ in words])

    def made(count: int, load: float = 1.0) -> torch.Tensor:
        own = words[:count], chosen[:count], shares[:count]
        return routed(*own, 4, Shards(2), experts, before=before, load=load)

    found, expected = made(8, load), made(8)
    for begin in range(8, round(8 * load), 8):
        count = min(8, round(8 * load) - begin)
        expected[:count] += made(count)
    torch.testing.assert_close(found, expected)
    assert taken[0] == 2 * 8 * load == sum(taken[1:])


@slow_but("name", SPARSE, lambda name: name in ("mixtral", "llama4_text"))
def test_experts_of_configurations_are_measured_with_more_words(name: str) -> None:
    """Of a load of 1.5 and of 2.5 each half of the words more costs as many products, forward and backward."""
    found, flops = whole(name), dict[float, int]()
    batch = batch_for(found, 4)
    for load in (1.0, 1.5, 2.5):
        part = with_experts_of_one(found.module, 2, load)
        with FlopCounterMode(display=False) as counter:
            part(**batch).backward()
        flops[load] = counter.get_total_flops()
    assert flops[1.5] > flops[1.0]
    assert flops[2.5] - flops[1.5] == 2 * (flops[1.5] - flops[1.0])


@pytest.mark.slow
def test_rows_of_the_fullest_device_hold_more() -> None:
    """Of its own experts, by as much for each word more; other rows, and other blocks, stay as they are."""
    held = list[dict[tuple[object, ...], int]]()
    for load in (1.0, 1.5, 2.0, 2.5):
        how: dict[str, Any] = {"expert": [1, 2], "repeats": 1, "warmup": 0, "load_factor": load}
        made = pipeplan.profile("gpt2-experts-tiny", microbatch=[2], **how)
        said = f"with {load:g} times as many words" if load > 1 else "with as many words"
        assert said in made.source.notes
        held.append({(block.id, *row.key): row.activation_bytes for block in made.blocks for row in block.costs})
    spread = {key for key in held[0] if key[4] == 2}
    assert len(spread) == 2
    for key in held[0]:
        sizes = [each[key] for each in held]
        if key in spread:
            assert sizes[1] > sizes[0]
            assert sizes[3] - sizes[2] == sizes[2] - sizes[1] > 0
        else:
            assert len(set(sizes)) == 1


@pytest.mark.slow
def test_rows_are_measured_beside_those_of_all_experts() -> None:
    """Words, and so what is held of them, are as many; weights are fewer, and searches may share experts."""
    made = pipeplan.profile(MIXTRAL, microbatch=[1, 2], sequence=SEQUENCE, shards=[1, 2], expert=[2, 4], repeats=1)
    assert "Experts over 2, 4 devices: one device's share of them was measured alone" in made.source.notes
    sparse = [block for block in made.blocks if block.operator == "moe"]
    assert len(sparse) == 1
    for block in made.blocks:
        assert {row.expert for row in block.costs} == ({1, 2, 4} if block in sparse else {1})
    rows = {row.key[:4]: row for row in sparse[0].costs}
    assert rows.keys() == {(n, shards, 1, expert) for n in (1, 2) for shards in (1, 2) for expert in (1, 2, 4)}
    for samples in (1, 2):
        alone = [rows[samples, 1, 1, expert] for expert in (1, 2, 4)]
        assert len({(row.activation_bytes, row.weight_grad_bytes) for row in alone}) == 1
        half = rows[2, 2, 1, 4], rows[1, 1, 1, 4]
        assert half[0].activation_bytes == half[1].activation_bytes, "half of the words of twice as many samples"
    assert all(row.repeats == 1 and row.forward_ns for row in rows.values())
    plan = pipeplan.search(made, devices=2, mini_batch=2, ep=2, time_limit=2).plan
    assert {stage.expert for stage in plan.stages} == {2}
    assert not check(plan, made).problems


def test_what_devices_send_each_other_takes_the_links_of_the_cluster() -> None:
    """There and back, in F and in I; of half of the words where two devices split all else."""
    model = load_model(MIXTRAL, sequence=SEQUENCE, meta=True)
    splits, spreads = splits_of(model, (1, 2), torch.float32, None), [Spread(2), Spread(4, load=1.5)]
    shares = tuple(with_own_share(model, splits, spreads, torch.float32))
    assert [(share.context, share.expert) for share in shares] == [(1, 2), (1, 4), (2, 2), (2, 4)]
    row = CostRow(microbatch_size=3, forward_ns=1000, input_grad_ns=2000, weight_grad_ns=3000, backward_ns=5000)
    rows = {kind: [row] for kind in kinds_of([*splits, *shares]).values()}
    links = Cluster.of("pairs", 4, levels=[("pair", 2, 0, 10**9), ("node", 4, "1us", 10**8)])
    unsplit = block_graph_of(model, torch.float32)
    known = shares, splits, unsplit, spreads, rows
    of_links, free = (measured_expert_rows(*known, each, torch.float32) for each in (links, None))
    assert of_links.keys() == {node.spec.id for node in unsplit.blocks if node.experts}
    for own in free.values():
        assert {(each.shards, each.expert, each.forward_ns, each.weight_grad_ns) for each in own} == {
            (shards, expert, 1000, 3000) for shards in (1, 2) for expert in (2, 4)
        }
    for each in of_links["layers.0.moe"]:
        sent = 3 * SEQUENCE * HIDDEN * 4 / each.shards * (1.5 if each.expert == 4 else 1)
        routing = sent * 2 * 2 / HIDDEN  # two numbers of each of a word's two experts go there
        path = LinkPath.in_cluster(links, each.expert)
        both = round(sum(dispatch_ns(size, 2, each.expert, path) for size in (sent + routing, sent)))
        assert both > 0
        assert each.forward_ns == 1000 + both + round(counts_ns(each.expert, path))
        assert (each.input_grad_ns, each.weight_grad_ns) == (2000 + both, 3000)
        assert each.backward_ns == 5000 + both


@pytest.mark.parametrize(
    ("model", "how", "message"),
    [
        (MIXTRAL, {"expert": 3}, "4 experts, which 3 devices"),
        ("gpt2-tiny", {"expert": 2}, "has no experts"),
        (MIXTRAL, {"expert": 2, "granularity": "operator"}, "has no experts"),
        (MIXTRAL, {"expert": 2, "load_factor": 0.0}, "give a number above 0"),
        (MIXTRAL, {"load_factor": 1.5}, "load_factor='1.5' is of devices that share experts; give expert"),
        (MIXTRAL, {"expert": 2, "granularity": "layer", "shards": 2}, "attention beside experts"),
        (MIXTRAL, {"expert": 4, "cluster": Cluster.of("two", 2)}, "the cluster has 2 devices"),
    ],
)
def test_what_cannot_be_measured_is_refused(model: str, how: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        pipeplan.profile(model, microbatch=1, sequence=SEQUENCE, repeats=1, **how)
