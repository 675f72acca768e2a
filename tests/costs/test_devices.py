"""Presets: peaks that go together, and which preset free text means."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeplan.costs.devices import PRESETS, device_meant, device_preset, peak_flops_per_s

RUNS = Path(__file__).parents[2] / "benchmarks" / "data" / "published-runs.json"

MEANT = {
    ("A100 SXM", 80): "a100-80gb",
    ("A100 SXM4", None): "a100-80gb",
    ("A100 SXM", 40): "a100-40gb",
    ("A100-SXM4-40GB", None): "a100-40gb",
    ("A100-class (PG509-210)", None): "a100-80gb",
    ("A100-class (40 GB of HBM)", 40): "a100-40gb",
    ("A100 PCIe", None): "a100-pcie-80gb",
    ("A800", None): "a800-80gb",
    ("V100 SXM2", None): "v100-32gb",
    ("V100 SXM2", 16): "v100-16gb",
    ("H100", None): "h100-80gb",
    ("NVIDIA H100 80GB HBM3", None): "h100-80gb",
    ("H100SXM5", None): "h100-80gb",
    ("H100 PCIe", None): "h100-pcie-80gb",
    ("H100 NVL", None): "h100-nvl-94gb",
    ("H100", 94): "h100-nvl-94gb",
    ("H100 HBM2e", None): "h100-96gb",
    ("H100 SXM (HBM2e, 500 W limit, 2.4 TB/s)", 96): "h100-96gb",
    ("H200 SXM", 141): "h200-141gb",
    ("B200", 192): "b200-180gb",
    ("B300", None): "b300-270gb",
    ("GB200 NVL72", None): "gb200-186gb",
    ("GB300", None): "gb300-279gb",
    ("AMD Instinct MI300X", 192): "mi300x-192gb",
    ("RTX3090", None): "rtx3090-24gb",
    ("GeForce RTX 4090", 24): "rtx4090-24gb",
    ("L40S", None): "l40s-48gb",
    ("RTX A5000", None): "a5000-24gb",
}

UNKNOWN = (
    "GH200",
    "H20",
    "H800",
    "B100",
    "MI300A",
    "L40",
    "A10",
    "A6000",
    "RTX 3090 Ti",
    "4090 D",
    "TPU",
    "(A100)",
    "",
)


@pytest.mark.parametrize(("text", "memory_gb"), MEANT)
def test_family_and_form_are_meant(text: str, memory_gb: float | None) -> None:
    found = device_meant(text, memory_gb)
    assert found is not None
    assert found.name == MEANT[text, memory_gb]


@pytest.mark.parametrize("text", UNKNOWN)
def test_an_unknown_family_means_none(text: str) -> None:
    assert device_meant(text, 80) is None


def test_every_published_run_has_a_device() -> None:
    runs = json.loads(RUNS.read_text(encoding="utf-8"))
    assert len(runs) == 219
    for run in runs:
        hardware = run["hardware"]
        found = device_meant(hardware["gpu"], hardware.get("gpu_mem_gb"))
        assert found is not None, hardware["gpu"]
        assert hardware["gpu"].lower().startswith(found.family)
        stated = hardware.get("gpu_mem_gb") or found.memory_bytes / 1e9
        assert found.memory_bytes / 1e9 == pytest.approx(stated, rel=0.05)
        assert run["source_url"].startswith("https://")


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "cpu"])
def test_a_preset_means_itself_and_says_all_peaks(name: str) -> None:
    preset = device_preset(name)
    kind = f" {preset.memory_kind}" if preset.memory_kind else ""
    text = f"{preset.family} {' '.join(preset.forms[:1])}{kind}"
    assert device_meant(text, preset.memory_bytes / 1e9) == preset
    assert device_meant(preset.title) == preset
    assert 60 <= preset.multiprocessors <= 304
    assert any(word in preset.source for word in ("data sheet", "white paper", "As the A100", "torchtitan"))
    if preset.fp8_flops_per_s is not None:
        assert preset.fp8_flops_per_s == pytest.approx(2 * preset.matrix_flops_per_s, rel=0.02)
    hopper_or_later = preset.family in ("h100", "h200", "b200", "b300", "gb200", "gb300", "mi300x", "4090", "l40s")
    assert (preset.fp8_flops_per_s is not None) == hopper_or_later


def test_peaks_are_those_of_the_format() -> None:
    assert peak_flops_per_s("NVIDIA H100 80GB HBM3", "bfloat16") == 989_400_000_000_000
    assert peak_flops_per_s("NVIDIA H100 80GB HBM3", "float8_e4m3fn") == 1_978_900_000_000_000
    assert peak_flops_per_s("NVIDIA A100-SXM4-80GB", "float8_e4m3fn") is None
    assert peak_flops_per_s("NVIDIA H100 80GB HBM3", "float32") is None
