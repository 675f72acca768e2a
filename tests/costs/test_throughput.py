"""Throughput: samples, tokens and model FLOP utilisation of an iteration, by hand and through the verbs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeplan.costs.devices import PRESETS, device_preset, peak_flops_per_s
from pipeplan.costs.throughput import Yardstick
from support.commands import pipeplan
from support.paths import ROOT

PROFILE = ROOT / "profiles" / "gpt2-1.3b-a100-80gb.json"
RATES = ("samples_per_second", "tokens_per_second", "model_flops_utilisation")


def test_gpt2_345m_by_hand() -> None:
    """512 samples of 1024 tokens in 10 s on 8 devices: 51.2 samples/s, of 3 x 827 GFLOP each, of 8 x 312 TFLOP/s."""
    found = Yardstick("A100-SXM4-80GB", "bfloat16", 1024, 826_951_073_792).throughput(512, 10e9, 8)
    assert (found.samples_per_second, found.tokens_per_second) == (51.2, 52_428.8)
    assert found.model_flops_utilisation == pytest.approx(3 * 826.951e9 * 51.2 / (8 * 312e12), rel=1e-5)
    assert found.words == "51.2 samples/s, 52429 tokens/s, 5.1% of peak"


@pytest.mark.parametrize(
    ("unknown", "words"),
    [
        (Yardstick("", "", None, None), "51.2 samples/s"),
        (Yardstick("A100-SXM4-80GB", "bfloat16", 1024, None), "51.2 samples/s, 52429 tokens/s"),
        (Yardstick("A100-SXM4-80GB", "float32", None, 10**9), "51.2 samples/s"),
        (Yardstick("AMD EPYC, 1 thread", "bfloat16", None, 10**9), "51.2 samples/s"),
    ],
)
def test_what_is_not_known_is_left_out(unknown: Yardstick, words: str) -> None:
    assert unknown.throughput(512, 10e9, 8).words == words
    assert unknown.throughput(512, 0, 8).words == ""


def test_peaks_are_those_of_makers_in_16_bits() -> None:
    assert peak_flops_per_s("NVIDIA H100 80GB HBM3", "bfloat16") == 989_400_000_000_000
    assert peak_flops_per_s("A100-SXM4-40GB", "float16") == 312_000_000_000_000
    assert peak_flops_per_s("Tesla V100-SXM2-16GB", "bfloat16") is None, "its matrix units take float16 alone"
    for preset in map(device_preset, PRESETS):
        real = preset.name != "cpu"  # whose figures are round ones of ours
        assert (peak_flops_per_s(preset.title, preset.dtype) == preset.matrix_flops_per_s) is real
        assert peak_flops_per_s(preset.title, "float64") is None


def test_search_and_simulate_say_the_same_and_simulate_shows_stages(tmp_path: Path) -> None:
    plan, asked = tmp_path / "plan.json", ("--devices", 4, "--microbatches", 8, "--placement", "one-to-one")
    named = ("--scheduler", "1f1b", "--deterministic", "--time-limit", "1s")
    searched = pipeplan("search", PROFILE, *asked, *named, "-o", plan, "--details")
    figures = json.loads(pipeplan("simulate", plan, "--json").stdout)
    rate = 32e9 / figures["iteration_ns"]
    expected = [rate, 1024 * rate, 3 * 2_890_852_728_832 * rate / (4 * 312e12)]
    assert [figures[key] for key in RATES] == [pytest.approx(each) for each in expected]
    shown = pipeplan("simulate", plan).stdout
    assert shown.rstrip() in searched.stdout, "the same report, before it the answer and after it what is proved"
    assert "bottleneck: stage" in shown
    assert "% of peak" in shown
    again = json.loads(pipeplan("search", PROFILE, *asked, *named, "--json").stdout)
    assert [again[key] for key in RATES] == [figures[key] for key in RATES]
    older = json.loads(
        pipeplan("simulate", plan, "--profile", ROOT / "profiles" / "gpt2-1.3b-a100-80gb.json", "--json").stdout
    )
    assert older["tokens_per_second"] == figures["tokens_per_second"]


def test_compare_and_frontier_say_it_of_every_row() -> None:
    quick = ("--deterministic", "--time-limit", "1s", "--json")
    found = json.loads(
        pipeplan("compare", PROFILE, "--devices", 2, "--microbatches", 4, "--placement", "one-to-one", *quick).stdout
    )
    for row in found["rows"]:
        samples = found["num_microbatches"] * found["microbatch_size"]
        assert row["samples_per_second"] == pytest.approx(1e9 * samples / row["iteration_ns"])
        assert 0 < row["model_flops_utilisation"] < 1
    points = json.loads(pipeplan("frontier", PROFILE, "--devices", 2, "--mini-batch", 8, "--json").stdout)["points"]
    assert all(point["samples_per_second"] == pytest.approx(8e9 / point["time_ns"]) for point in points)
    assert all(point["tokens_per_second"] == pytest.approx(1024 * point["samples_per_second"]) for point in points)
