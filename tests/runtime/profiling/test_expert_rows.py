"""Estimated rows of devices that share experts: fewer weights, longer products, words sent and brought back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

import pipeplan
from pipeplan.cli.profile_verb import LoadFactor
from pipeplan.costs.communication import LinkPath, counts_ns, dispatch_ns
from pipeplan.costs.devices import Kernel, device_preset
from pipeplan.costs.uniform.shares import catalog_shares, machine_of, usual_attention
from pipeplan.costs.uniform.step import step_time
from pipeplan.costs.uniform.words import Transformer, UniformLayout
from pipeplan.errors import FileError, UsageError
from pipeplan.files import Cluster, CostRow, Profile
from pipeplan.runtime.models.spec import BlockSpec
from pipeplan.runtime.profiling.expert_rows import Spread, with_own_experts
from support.marks import slow_but

CONFIG = (
    "MixtralConfig(num_hidden_layers=1, hidden_size=512, num_attention_heads=8, num_key_value_heads=2, "
    "intermediate_size=1024, vocab_size=1000, num_local_experts=8)"
)
HIDDEN, FFN, EXPERTS, TAKEN, WORDS, WIDTH = 512, 1024, 8, 2, 2048, 2
HOW = {"device": "h100-80gb", "microbatch": 1, "sequence": WORDS}
FAST = Cluster.of("fast", 16, levels=[("node", 8, 0, 10**15), ("net", 16, 0, 10**15)])
SLOW = Cluster.of("slow", 16, levels=[("node", 8, 0, 10**15), ("net", 16, 1e-6, 10**10)])


def rows(profile: Profile, split: int = 1) -> dict[tuple[int, int, int], CostRow]:
    """Without the places of their messages, which depend on what else there is."""
    (own,) = (block for block in profile.blocks if block.operator == "moe")
    assert own.expert_parameters == 3 * EXPERTS * HIDDEN * FFN == own.parameters - HIDDEN * EXPERTS - HIDDEN
    return {
        (row.shards, row.context, row.expert): row.model_copy(update={"messages": None})
        for row in own.costs
        if row.expert_shards == (split if row.expert > 1 else 1)
    }


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:pipeplan run cannot split blocks of")
def test_rows_are_of_own_words_with_fewer_weights_and_longer_products() -> None:
    parted = rows(pipeplan.estimate(CONFIG, context=(2,), expert=(8,), cluster=FAST, **HOW))
    found = parted | rows(pipeplan.estimate(CONFIG, shards=(2,), context=(1,), expert=(8,), cluster=FAST, **HOW))
    assert found.keys() == {(1, 1, 1), (1, 1, 8), (1, 2, 1), (1, 2, 8), (2, 1, 1), (2, 1, 8)}
    half, own = found[1, 2, 1], found[2, 1, 8]
    assert own == found[1, 2, 8].model_copy(update={"shards": 2, "context": 1, "sequence_parallel": True})
    assert own.activation_bytes == half.activation_bytes, "a device has half of the words"
    assert own.forward_ns < half.forward_ns, "of an eighth of the weights"
    assert own.backward_ns is not None
    assert half.backward_ns is not None
    assert own.backward_ns < half.backward_ns


@slow_but("load", [1.0, 2.0], (2.0).__eq__)
def test_words_are_sent_and_brought_back_forth_and_in_backward(load: float) -> None:
    sizes = {"expert": (1, 8), "load_factor": load, **HOW}
    slow, fast = (rows(pipeplan.estimate(CONFIG, cluster=each, **sizes))[1, 1, 8] for each in (SLOW, FAST))
    assert slow == fast, "eight devices are in one node"
    far = CONFIG.replace("num_local_experts=8", "num_local_experts=16")
    sizes["expert"] = (16,)
    slow, fast = (
        next(row for row in block.costs if row.expert == 16)
        for each in (SLOW, FAST)
        for block in pipeplan.estimate(far, cluster=each, **sizes).blocks
        if block.operator == "moe"
    )
    path, routing = LinkPath(((1, 1e15), (8, 1e10 / 8)), 1000), 2 * TAKEN
    sizes_sent = (load * WORDS * each * WIDTH for each in (HIDDEN + routing, HIDDEN))
    both = sum(dispatch_ns(size, TAKEN, 16, path) for size in sizes_sent)
    counts = counts_ns(16, path)
    assert counts == pytest.approx(1000 + 1e9 * 16 * 16 * 8 / (1e10 / 8)), (
        "of sixteen, to each of eight in the other node"
    )
    for name, more in (("forward_ns", counts), ("backward_ns", 0), ("input_grad_ns", 0)):
        assert getattr(slow, name) - getattr(fast, name) == pytest.approx(both + more, rel=1e-4)
    assert slow.weight_grad_ns == fast.weight_grad_ns


def test_products_of_one_expert_are_no_grouped_products() -> None:
    def moe(*sizes: Any) -> Kernel:
        dimensions = {"experts": 8, "experts_per_token": 2, "ffn": FFN, "hidden": HIDDEN}
        kernel = Kernel(10**9, 10**6, matrix=True, product=(512, HIDDEN, FFN, 8), form="grouped", expert_bytes=10**5)
        spec = BlockSpec(id="moe", operator="moe", build=nn.Identity, dimensions=dimensions)
        (found,) = with_own_experts({"forward_ns": [kernel]}, Spread(*sizes), spec, "moe")["forward_ns"]
        return found

    assert [moe(4).form, moe(8).form, moe(16, 1.0, 2).form] == ["grouped", "", ""]
    assert moe(8).product == (4096, HIDDEN, FFN, 1)


def test_the_fullest_device_has_more_to_do() -> None:
    even, uneven = (
        rows(pipeplan.estimate(CONFIG, expert=(4,), load_factor=load, cluster=FAST, **HOW))[1, 1, 4]
        for load in (1.0, 1.5)
    )
    assert even.forward_ns < uneven.forward_ns < 1.5 * even.forward_ns
    assert uneven.activation_bytes == 1.5 * even.activation_bytes


def test_so_it_has_of_the_zoos_experts() -> None:
    """Whose groups of rows run one by one, and are estimated as one product, with all weights."""
    how: dict[str, Any] = {"device": "h100-80gb", "microbatch": 64, "expert": (2, 8), "cluster": FAST}
    profiles = [pipeplan.estimate("gpt2-experts-tiny", load_factor=load, **how) for load in (1.0, 1.5)]
    (block, *_), (other, *_) = ([each for each in profile.blocks if each.expert_parameters] for profile in profiles)
    even, uneven = ({row.expert: row for row in each.costs} for each in (block, other))
    assert even[1].forward_ns > even[2].forward_ns > even[8].forward_ns, "fewer weights are read"
    assert uneven[1] == even[1]
    for size in (2, 8):
        assert uneven[size].activation_bytes == 1.5 * even[1].activation_bytes
        assert uneven[size].forward_ns > even[1].forward_ns


def test_devices_that_split_experts_have_the_words_of_all_of_them() -> None:
    """Twice as many words go into parts of experts; they are gathered by two, and their sums scattered.

    A word has both of its experts in one of four places one time in four, and is then gathered there once.
    """
    both_ways = pipeplan.estimate(CONFIG, expert=(2, 8, 16), etp=(1, 2), cluster=FAST, **HOW)
    whole, split = (rows(both_ways, each)[1, 1, 8] for each in (1, 2))
    assert both_ways.expert_shards == {1: (1,), 2: (1, 2), 8: (1, 2), 16: (2,)}, "sixteen can only share eight by pairs"
    alone = rows(pipeplan.estimate(CONFIG, expert=(8,), etp=2, cluster=FAST, **HOW), 2)
    assert split == alone[1, 1, 8]
    more = WORDS * TAKEN * HIDDEN * WIDTH
    assert (whole.expert_shards, split.expert_shards) == (1, 2)
    assert split.activation_bytes == whole.activation_bytes + more
    assert split.workspace_bytes == whole.workspace_bytes + more
    assert split.forward_ns == pytest.approx(whole.forward_ns, rel=0.05), "half of each product, for twice the words"
    narrow = Cluster.of("narrow", 8, levels=[("pair", 2, 0, 10**9), ("node", 8, 0, 10**15)])
    waiting = rows(pipeplan.estimate(CONFIG, expert=(8,), etp=2, cluster=narrow, **HOW), 2)[1, 1, 8]
    moved = WORDS * (2 - 1 / 4) * HIDDEN * WIDTH  # half of what is gathered comes from the other
    routing = moved * 2 * TAKEN / HIDDEN  # goes along with words, not with sums
    both = 2 * moved + routing  # as much is scattered
    assert waiting.forward_ns - split.forward_ns == pytest.approx(both, rel=1e-3)
    assert (waiting.input_grad_ns or 0) - (split.input_grad_ns or 0) == pytest.approx(both, rel=1e-3)
    assert waiting.weight_grad_ns == split.weight_grad_ns


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"expert": (3,)}, "8 experts, which 3 devices"),
        ({"expert": (2,), "load_factor": 0.0}, "load_factor='0.0'"),
        ({"expert": (2,), "kernels": "eager"}, "of fused kernels"),
        ({"expert": (8,), "etp": 3}, "width of 1024, which 3 devices"),
        ({"expert": (6,), "etp": 4}, "etp=4 does not divide it"),
        ({"expert": (64,), "etp": 4}, "8 experts, which 64 devices, each 4 of which split the same, cannot"),
        ({"expert": (8,), "etp": (1, 3)}, "width of 1024, which 3 devices"),
        ({"expert": (4, 8), "etp": (1, 16)}, "etp=16 goes with no size of expert=4,8"),
        ({"etp": 2}, "and expert, which is how many"),
    ],
)
def test_what_cannot_be_is_refused(how: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        pipeplan.estimate(CONFIG, **HOW, **how)  # type: ignore[arg-type]


def test_models_without_experts_have_no_such_rows() -> None:
    with pytest.raises(UsageError, match="has no experts"):
        pipeplan.estimate("gpt2-124m", device="h100-80gb", microbatch=1, expert=(2,))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:pipeplan run cannot split blocks of")
def test_layers_of_deepseek_v3_take_what_closed_forms_say() -> None:
    """By which published runs are predicted: latent attention, and 256 experts on eight devices of a node.

    Where two of these split each expert they gather twice its words, at shares of links that differ.
    """
    config = "DeepseekV3Config(num_hidden_layers=4)"
    found = pipeplan.estimate(config, device="h100-80gb", microbatch=1, sequence=4096, shards=(1, 2), expert=(8,))
    h100, share = device_preset("h100-80gb"), catalog_shares()["h100-80gb"]
    rate = h100.link_bytes_per_s
    machine = machine_of(
        h100, share, usual_attention(h100), node=8, link_bytes_per_s=rate, adapter_bytes_per_s=rate / 9
    )
    model = Transformer(
        layers=61, hidden=7168, heads=128, kv_heads=128, head_size=192, ffn=18432, gated=1, vocabulary=129280, tied=0,
        sequence=4096, experts=256, top_k=8, moe_ffn=2048, shared_ffn=2048, query_rank=1536, latent_rank=512,
        rotary_size=64, value_size=128,
    )  # fmt: skip
    split = pipeplan.estimate(config, device="h100-80gb", microbatch=1, sequence=4096, expert=(8,), etp=2)
    for shards, tensor in ((1, 1), (2, 1), (1, 2)):
        layout = UniformLayout(
            tensor=shards, pipeline=1, chunks=1, context=1, data=8, microbatch=1, global_batch=8, expert=8 // tensor,
            expert_tensor=tensor, sequence_parallel=int(shards > 1), recipe="bf16-mixed",
            attention=usual_attention(h100),
        )  # fmt: skip
        time = step_time(model, layout, machine)
        layer = [
            row
            for block in (found if tensor == 1 else split).blocks
            for row in block.rows(1, 8, tensor)
            if block.id.startswith("layers.3.") and row.shards == shards
        ]
        assert len(layer) == 2
        assert sum(row.forward_ns for row in layer) == pytest.approx(float(time.forward_ns), rel=0.05 * tensor)
        backward = float(time.input_grad_ns + time.weight_grad_ns)
        assert sum(row.backward_ns or 0 for row in layer) == pytest.approx(backward, rel=0.08 * tensor)


def test_a_load_may_be_what_a_run_has_counted(tmp_path: Path) -> None:
    """The output of ``run --json``; another file is refused, with what it lacks."""
    path = tmp_path / "run.json"
    path.write_text('{"plan": "p", "experts": {"load_factor": 1.5, "blocks": []}}')
    assert [LoadFactor().convert(each, None, None) for each in (str(path), path, "1.25", 2)] == [1.5, 1.5, 1.25, 2.0]
    for text, problem in (("{}", "no experts.load_factor above 0"), ("load: 2", "not JSON")):
        path.write_text(text)
        with pytest.raises(FileError, match=problem):
            LoadFactor().convert(str(path), None, None)
