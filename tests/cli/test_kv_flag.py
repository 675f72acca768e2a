"""``pipeplan search --kv`` as a user meets it: figures, the first screen, files that others read, errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from builders.decoders import drawn_decoder
from pipeplan.cli.main import cli
from pipeplan.files import write_file

pytestmark = pytest.mark.counted

QUICK = ("--devices", "4", "--deterministic", "--time-limit", "5s")


@pytest.fixture
def profile(tmp_path: Path) -> str:
    path = tmp_path / "decoder.json"
    write_file(drawn_decoder(5, device="RTX-A5000-24GB"), str(path))
    return str(path)


def run(*given: str) -> Result:
    return CliRunner().invoke(cli, [*given], env={"COLUMNS": "100"})


@pytest.mark.parametrize("kv", ["dp", "tp", "cp", "cp-q", "auto"])
def test_json_has_what_decode_steps_take_and_the_plan_is_valid(kv: str, profile: str, tmp_path: Path) -> None:
    plan = str(tmp_path / "plan.json")
    done = run("search", profile, "--kv", kv, *QUICK, "--json", "-o", plan)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["kv"] == kv or kv == "auto"
    assert found["tokens_per_s"] == pytest.approx(1e9 * found["batch"] / found["token_ns"])
    assert len(found["cache_bytes"]) == 4
    assert found["max_requests"] is None
    assert (found["batch"], found["context"]) == (8, 400)
    checked = run("check", plan, "--profile", profile)
    assert checked.exit_code == 0, checked.output
    assert run("simulate", plan).exit_code == 0


def test_the_first_screen_says_what_is_shared_and_sent(profile: str) -> None:
    done = run("search", profile, "--dcp", "4", "--memory", "1MB", "--explain", *QUICK)
    assert done.exit_code == 0, done.output
    text = done.stdout
    for said in (
        "optimal for decode steps on 4 devices of 1MB",
        "8 of 400 tokens at the last step",
        "between two tokens of a request",
        "--dcp 4: 4 devices share each request's cache along its text",
        "of cache on the fullest device",
        "such requests",
        "as printed (thesis, 4.4)",
        "one stage on all devices, every way that no other beats in memory and time:",
        "links between stages are free",
    ):
        assert said in text, said
    assert "samples assumed" not in text
    assert max(map(len, text.splitlines())) <= 100


def test_details_have_devices_and_stages(profile: str) -> None:
    done = run("search", profile, "--kv", "auto", "--details", *QUICK)
    assert done.exit_code == 0, done.output
    assert "shards4" in done.stdout


def test_errors_say_what_to_do(profile: str) -> None:
    small = run("search", profile, "--kv", "cp", "--memory", "60kB", *QUICK)
    assert small.exit_code != 0
    assert "there is room for" in str(small.exception)
    for given, said in (
        (("--kv", "ring"), "'ring' is not known"),
        (("--kv", "tp", "--context", "1k"), "not of 1024"),
        (
            ("--batch", "2", "--mini-batch", "8"),
            "--batch asks for a plan of decode steps, which --mini-batch is not for",
        ),
    ):
        done = run("search", profile, *given, *QUICK)
        assert done.exit_code != 0
        assert said in f"{done.output}{done.exception}", (given, done.output)


@pytest.mark.slow
@pytest.mark.long
def test_llama_on_four_devices(tmp_path: Path) -> None:
    """Estimated, then planned in each way; more requests than fit are refused with how many do."""
    profile, model = (
        str(tmp_path / "llama.json"),
        (
            "LlamaConfig(hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32, "
            "vocab_size=32000, max_position_embeddings=131072)"
        ),
    )
    of_device = ("--inference", "--estimate", "--device", "a5000-24gb")
    rows = ("--batch", "1,8,32", "--context", "1k,32k", "--shards", "1,2,4")
    assert run("profile", model, *of_device, *rows, "-o", profile).exit_code == 0
    for kv in ("tp", "cp", "dp"):
        plan = str(tmp_path / f"{kv}.json")
        done = run("search", profile, "--devices", "4", "--kv", kv, "--time-limit", "8s", "--json", "-o", plan)
        assert done.exit_code == 0, done.output
        found = json.loads(done.stdout)
        assert found["kv"] == kv
        assert sum(found["cache_bytes"]) == 32 * 32_768 * 32 * 16_384
        assert run("check", plan, "--profile", profile).exit_code == 0
    small = run("search", profile, "--devices", "4", "--kv", "tp", "--memory", "24GB", "--time-limit", "8s")
    assert "there is room for 4 such requests" in str(small.exception)
