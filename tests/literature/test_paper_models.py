"""The papers' models: parameters beside what the papers state, their graphs, and that plans can be made of them."""

from __future__ import annotations

from pathlib import Path

import networkx as nx
import pytest

from pipeplan.check import check
from pipeplan.costs.presets import PRESETS, device_preset
from pipeplan.errors import UsageError
from pipeplan.examples import MODELS, model
from pipeplan.model import Profile, parse, to_json
from pipeplan.planner import Batch, Options, search_plan

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BILLION, MILLION = 10**9, 10**6

STATED = {
    "gpt2-124m": "124439808",
    "gpt2-1.3b": "1314M",
    "tessel-gpt-11b": "11B",
    "tessel-gpt-24b": "24B",
    "tessel-gpt-47b": "47B",
    "tessel-gpt-77b": "77B",
    "tessel-mt5-43b": "43B",
    "flexpipe-gpt-5b-64k": "5.4B",
    "flexpipe-gpt-5b-128k": "5.7B",
    "flexpipe-gpt-5b-256k": "6.3B",
    "flexpipe-gpt-5b-512k": "7.7B",
    "flexpipe-gpt-5b-1m": "10.2B",
    "flexpipe-gpt-16b-256k": "18.2B",
    "flexpipe-gpt-16b-512k": "20.3B",
    "flexpipe-gpt-16b-1m": "24.3B",
    "flexpipe-gpt-16b-1.1m": "25.1B",
    "flexpipe-gpt-16b-1.2m": "25.9B",
    "flexpipe-clip-9.7b": "9.7B",
}
"""What the papers state and we meet, within half a unit of the last digit given."""

EXPLAINED = {
    "gpt2-345m": (345 * MILLION, 0.0285),  # a model's published name; GPT-2 medium has 355 million
    "gpt2-762m": (762 * MILLION, 0.0158),  # a model's published name; GPT-2 large has 774 million
    "bert-large": (340 * MILLION, -0.0142),  # rounded in BERT's paper; pooler and next sentence left out
    "tessel-mt5-1.8b": (1.8e9, -0.3172),  # the table's vocabulary of 512K, tied, cannot give 1.8 billion
    "tessel-mt5-9.5b": (9.5e9, -0.0090),  # feed-forward and gates are not in the paper
    "tessel-mt5-88b": (88e9, -0.0062),  # likewise
    "flexpipe-clip-4.7b": (4.7e9, 0.0138),  # the paper adds up layers, without embeddings
    "flexpipe-clip-8.2b": (8.2e9, 0.0142),  # likewise
}
"""Where the papers' figure is not met: how far we are off, to four digits. ``docs/models.md`` says why."""

UNSTATED = {"tessel-flava", "mmt", "dlrm", "candle-uno"}

SUBMODULES = {
    ("flexpipe-clip-4.7b", "audio"): 3.0e9,
    ("flexpipe-clip-4.7b", "text"): 1.7e9,
    ("flexpipe-clip-8.2b", "video"): 5.5e9,
    ("flexpipe-clip-8.2b", "text"): 2.7e9,
    ("flexpipe-clip-9.7b", "image"): 6.5e9,
    ("flexpipe-clip-9.7b", "text"): 3.2e9,
}
"""FlexPipe, Table 4."""

SMALLEST = [
    *("gpt2-124m", "bert-large", "tessel-gpt-11b", "tessel-mt5-1.8b", "tessel-flava", "flexpipe-gpt-5b-64k"),
    *("flexpipe-gpt-16b-256k", "flexpipe-clip-9.7b", "mmt", "dlrm", "candle-uno"),
    "tensoropt-vgg16",
]
"""The one of each family with the fewest blocks."""


def parameters(profile: Profile) -> int:
    """From the file alone: bytes of 16-bit numbers, a tied table once."""
    tables = {block.tied: block.dimensions for block in profile.blocks if block.tied}
    copies = sum(block.tied is not None for block in profile.blocks) - len(tables)
    table = sum(sizes["vocabulary"] * sizes["hidden"] for sizes in tables.values())
    return sum(block.parameter_bytes for block in profile.blocks) // 2 - copies * table


def rounded(count: int, stated: str) -> str:
    """A count with as many digits as the stated one has."""
    unit, suffix = {"M": (MILLION, "M"), "B": (BILLION, "B")}.get(stated[-1], (1, ""))
    decimals = len(stated.partition(".")[2].removesuffix(suffix))
    return f"{count / unit:.{decimals}f}{suffix}"


def test_every_model_is_in_one_list() -> None:
    assert sorted([*STATED, *EXPLAINED, *UNSTATED, "tensoropt-vgg16"]) == sorted(MODELS)


def test_tensoropts_vgg16() -> None:
    """Table 1: 0.52 GB of parameters, which is float32 in units of 2^30."""
    assert f"{4 * parameters(model('tensoropt-vgg16')) / 2**30:.2f}" == "0.52"


@pytest.mark.parametrize("name", STATED)
def test_parameters_are_the_papers_within_its_rounding(name: str) -> None:
    assert rounded(parameters(model(name)), STATED[name]) == STATED[name]


def test_the_page_has_every_models_parameters() -> None:
    rows = [line.split("|") for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    shown = {row[1].strip(" `"): row[2].strip() for row in rows if len(row) == 7}
    assert shown == {name: f"{parameters(model(name, microbatch_sizes=[1])):,}" for name in MODELS}


def test_the_page_has_every_preset() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for device in map(device_preset, PRESETS):
        peaks = f"{device.matrix_flops_per_s / 1e12:g} | {device.float32_flops_per_s / 1e12:g}"
        memory = f"{device.memory_bytes // BILLION} GB | {device.bandwidth_bytes_per_s // BILLION}"
        assert f"| `{device.name}` | {device.dtype} | {peaks} | {memory} |" in text


@pytest.mark.parametrize("name", EXPLAINED)
def test_differences_are_those_explained(name: str) -> None:
    stated, difference = EXPLAINED[name]
    assert parameters(model(name)) / stated - 1 == pytest.approx(difference, abs=5e-5)


@pytest.mark.parametrize(("name", "tower"), SUBMODULES)
def test_layers_of_flexpipes_submodules(name: str, tower: str) -> None:
    layers = [block for block in model(name).blocks if block.id.startswith(f"{tower}.layer")]
    assert sum(block.parameter_bytes for block in layers) / 2 == pytest.approx(SUBMODULES[name, tower], rel=0.02)


@pytest.mark.parametrize(("size", "layers", "total"), [("5b", 64, 5.0e9), ("16b", 80, 16.1e9)])
def test_flexpipes_gpt_without_embeddings(size: str, layers: int, total: float) -> None:
    name = "flexpipe-gpt-5b-64k" if size == "5b" else "flexpipe-gpt-16b-256k"
    halves = [block for block in model(name).blocks if block.operator in ("attention", "ffn")]
    assert len(halves) == 2 * layers
    assert abs(sum(block.parameter_bytes for block in halves) / 2 - total) <= 0.05e9


@pytest.mark.parametrize(
    ("name", "layers", "hidden", "heads", "vocabulary"),
    [
        *(("tessel-gpt-11b", 32, 4096, 32, 1_000_000), ("tessel-gpt-24b", 40, 6144, 48, 1_000_000)),
        *(("tessel-gpt-47b", 48, 8192, 64, 1_000_000), ("tessel-gpt-77b", 80, 8192, 64, 1_500_000)),
        *(("tessel-mt5-1.8b", 48, 1024, 16, 512_000), ("tessel-mt5-9.5b", 48, 3072, 24, 1_000_000)),
        *(("tessel-mt5-43b", 64, 6144, 48, 1_500_000), ("tessel-mt5-88b", 80, 8192, 64, 1_500_000)),
    ],
)
def test_tessels_table_3(name: str, layers: int, hidden: int, heads: int, vocabulary: int) -> None:
    profile = model(name)
    attention = [block.dimensions for block in profile.blocks if block.operator == "attention"]
    shared = [block.dimensions for block in profile.blocks if block.shared]
    assert len(attention) == layers
    assert {(sizes["hidden"], sizes["heads"]) for sizes in attention} == {(hidden, heads)}
    assert {sizes["vocabulary"] for sizes in shared} == {vocabulary}
    assert len(shared) == (3 if "mt5" in name else 2)


@pytest.mark.parametrize("name", MODELS)
def test_graphs_are_whole_and_end_in_one_block(name: str) -> None:
    profile = model(name, microbatch_sizes=[1])
    graph = nx.DiGraph([(edge.source, edge.target) for edge in profile.edges])
    assert set(graph) == {block.id for block in profile.blocks}
    assert nx.is_weakly_connected(graph)
    assert [node for node in graph if graph.out_degree(node) == 0] == [profile.blocks[-1].id]
    assert all(edge.bytes_per_sample > 0 for edge in profile.edges)
    roots = sum(graph.in_degree(node) == 0 for node in graph)
    branches = {"tessel-flava": 2, "mmt": 4, "dlrm": 14, "candle-uno": 7}
    assert roots == branches.get(name, 2 if "clip" in name or "mt5" in name else 1)


def test_encoder_output_travels_with_the_decoder() -> None:
    profile = model("tessel-mt5-1.8b", microbatch_sizes=[1])
    unit = 512 * 1024 * 2
    sizes = {(edge.source, edge.target): edge.bytes_per_sample for edge in profile.edges}
    assert sizes["encoder.norm", "decoder.layer0.attention"] == unit
    assert sizes["decoder.layer0.attention", "decoder.layer0.cross-attention"] == 2 * unit
    assert sizes["decoder.layer22.ffn", "decoder.layer23.attention"] == 2 * unit
    assert sizes["decoder.layer23.cross-attention", "decoder.layer23.ffn"] == unit
    assert sizes["decoder.layer23.ffn", "head"] == unit


@pytest.mark.parametrize("name", SMALLEST)
def test_costs_grow_with_the_micro_batch(name: str) -> None:
    for block in model(name).blocks:
        for small, large in zip(block.costs, block.costs[1:], strict=False):
            ratio = large.microbatch_size / small.microbatch_size
            assert small.forward_ns < large.forward_ns < ratio * small.forward_ns
            assert small.activation_bytes <= large.activation_bytes <= ratio * small.activation_bytes
            assert (small.weight_grad_ns or 0) <= (large.weight_grad_ns or 0)


@pytest.mark.parametrize("name", SMALLEST)
def test_optimizer_state_is_mixed_precision_adams(name: str) -> None:
    assert all(block.optimizer_bytes == 6 * block.parameter_bytes for block in model(name).blocks)


def test_faster_devices_take_less_time() -> None:
    times = {}
    for device in PRESETS:
        rows = [block.costs[0] for block in model("gpt2-1.3b", device=device).blocks]
        times[device] = sum(row.forward_ns + (row.backward_ns or 0) for row in rows)
    assert times["h200-141gb"] <= times["h100-80gb"] < times["a100-80gb"] <= times["a100-40gb"] < times["v100-32gb"]
    assert times["a800-80gb"] == times["a100-80gb"]
    assert times["v100-16gb"] == times["v100-32gb"] < times["rtx3090-24gb"]


@pytest.mark.parametrize("name", MODELS)
def test_the_same_name_gives_the_same_file(name: str) -> None:
    text = to_json(model(name))
    assert to_json(model(name)) == text
    assert parse(text, Profile) == model(name)


@pytest.mark.parametrize("name", SMALLEST)
def test_plans_can_be_made_and_pass_check(name: str) -> None:
    profile = model(name)
    size = profile.microbatch_sizes[0]
    result = search_plan(profile, "one-to-one", Batch(4, size), Options(time_limit=1.0), num_devices=4)
    assert check(result.plan, profile).valid


@pytest.mark.parametrize(
    ("name", "sizes", "words"),
    [
        ("gpt2", None, r"there is no model 'gpt2'; choose from gpt2-124m, .*candle-uno"),
        ("gpt2-124m", [], r"from 1 to 65536, not \[\]"),
        ("gpt2-124m", [0, 2], r"from 1 to 65536, not \[0, 2\]"),
    ],
)
def test_refused(name: str, sizes: list[int] | None, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        model(name, microbatch_sizes=sizes)
