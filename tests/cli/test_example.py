"""``pipeplan example`` from the command line: what it writes, its defaults, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import pipeplan
from pipeplan.cli.example_verb import example_command as command
from pipeplan.cli.main import main
from pipeplan.errors import UsageError
from pipeplan.examples import MODELS, SHAPES
from pipeplan.files import Cluster, Profile, parse, read_profile, to_json
from support.paths import ROOT

MS = 1_000_000


def run(*arguments: str) -> Result:
    return CliRunner().invoke(command, list(arguments), catch_exceptions=True)


def written(*arguments: str) -> Profile:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return parse(result.stdout, Profile)


@pytest.mark.parametrize("kind", SHAPES)
def test_defaults_are_tessels_example(kind: str) -> None:
    profile = written(f"shape-{kind}")
    assert profile.placement is not None
    assert profile.placement.num_devices == 4
    chunks = 2 if kind in ("circular", "zbv") else 1
    for block in profile.blocks:
        row = block.costs[0]
        expected = (MS, MS, 10**9 if kind == "k" else 0) if block.shared else (MS, 3 * MS, 10**9)
        values = (row.forward_ns, row.backward_ns, row.activation_bytes)
        assert values == (expected if block.shared else tuple(value // chunks for value in expected))
        assert (row.input_grad_ns, row.weight_grad_ns, row.weight_grad_bytes, row.workspace_bytes) == (None, None, 0, 0)
    assert all(edge.transfer_ns == 0 for edge in profile.edges)


def test_the_shipped_profiles_come_from_the_defaults() -> None:
    result = run("shape-nn", "--devices", "4")
    assert result.stdout == to_json(read_profile(str(ROOT / "profiles" / "tessel-nn.json")))


def test_every_flag_reaches_the_file(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    result = run(
        *("shape-mllm", "--devices", "2", "--forward", "2ms", "--input-grad", "3us", "--weight-grad", "4ns"),
        *("--shared-forward", "5ms", "--shared-backward", "6ms", "--comm", "7us"),
        *("--activation-bytes", "1KiB", "--weight-grad-bytes", "2kB", "-o", str(path)),
    )
    assert (result.exit_code, result.output) == (0, "")
    blocks = {block.id: block.costs[0] for block in read_profile(str(path)).blocks}
    chain = blocks["layer1"]
    assert (chain.forward_ns, chain.input_grad_ns, chain.weight_grad_ns) == (2 * MS, 3000, 4)
    assert (chain.backward_ns, chain.activation_bytes, chain.weight_grad_bytes) == (3004, 1024, 2000)
    assert (blocks["head"].forward_ns, blocks["head"].backward_ns, blocks["head"].shards) == (5 * MS, 6 * MS, 2)
    assert [edge.transfer_ns for edge in read_profile(str(path)).edges] == [0, 7000, 0]


def test_backward_and_chunks_reach_the_file() -> None:
    profile = written("shape-circular", "--devices", "3", "--chunks", "4", "--backward", "8ms")
    assert [block.costs[0].backward_ns for block in profile.blocks] == [2 * MS] * 12


def test_a_zero_backward_is_not_the_default() -> None:
    assert written("shape-v", "--backward", "0ns", "--devices", "1").blocks[0].costs[0].backward_ns == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["triangle"], "shape-v, shape-x, shape-m, shape-mllm, shape-nn, shape-k, shape-circular, shape-zbv"),
        (["v"], "there is no example 'v'"),
        (["shape-v", "--shared-forward", "1ms"], "--shared-forward does not apply to shape-v"),
        (["shape-zbv", "--shared-backward", "1ms"], "--shared-backward does not apply to shape-zbv"),
        (["shape-m", "--chunks", "2"], "--chunks does not apply to shape-m"),
        (["shape-v", "--inference", "--backward", "2ms"], "--inference is of forwards alone, and --backward"),
        (["shape-m", "--inference", "--shared-backward", "2ms"], "--shared-backward is of training, and --inference"),
        (["testbed-tessel", "--inference"], "--inference is for shapes and models, not for testbed-tessel"),
        (["shape-v", "--device", "a100-80gb"], "--device is for models, not for shape-v"),
        (["mmt", "--devices", "4"], "--devices is for shapes and clusters, not for mmt"),
        (["mmt", "--device", "tpu"], "--device 'tpu' is not a preset"),
        (["mmt", "--microbatch", "1,x"], "'1,x' is not a list of numbers"),
        (["mmt", "--microbatch", "100000"], "sizes from 1 to 65536, not [100000]"),
        (["shape-k", "--devices", "5"], "even number of devices, not 5"),
        (["shape-v", "--devices", "0"], "0 is not in the range"),
        (["shape-v", "--devices", "4097"], "1 to 4096 devices"),
        (["shape-circular", "--chunks", "0"], "0 is not in the range"),
        (["shape-v", "--input-grad", "1ms"], "come together"),
        (["shape-v", "--backward", "1ms", "--input-grad", "1ms", "--weight-grad", "1ms"], "give one of them"),
        (["shape-v", "--weight-grad-bytes", "1B"], "give --input-grad and --weight-grad too"),
        (["shape-v", "--forward", "3"], "'--forward': 3 of what? 3s, or 3 milliseconds as 3ms"),
        (["shape-v", "--activation-bytes", "-1"], "not a size"),
        (["shape-v", "-o", "/no/such/folder/p.json"], "/no/such/folder/p.json: cannot be written"),
        ([], "Missing argument 'NAME'"),
    ],
)
def test_refused_with_exit_2(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["pipeplan", "example", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    output = capsys.readouterr()
    assert (ended.value.code, output.out) == (2, "")
    assert words in " ".join(output.err.split())


@pytest.mark.parametrize("name", ["shape-k", "tessel-flava"])
def test_forwards_alone(name: str) -> None:
    profile = written(name, "--inference")
    assert profile.is_inference
    assert not any(row.has_backward for block in profile.blocks for row in block.costs)


def test_flags_are_the_documented_ones() -> None:
    flags = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    assert flags == {
        *(
            "name",
            "--devices",
            "--chunks",
            "--vp",
            "--virtual-stages",
            "--inference",
            "--forward",
            "--backward",
            "--input-grad",
            "--weight-grad",
        ),
        *("--shared-forward", "--shared-backward", "--comm", "--bytes", "--activation-bytes", "--weight-grad-bytes"),
        *("--device", "--microbatch", "--shards", "--cluster", "--nominal", "--overlap", "-o", "--output"),
        *("--rack", "--oversubscription", "--rails", "--power"),
    }


def test_racks_of_a_cluster_from_the_command_line() -> None:
    asked = (
        "cluster-h100",
        "--devices",
        "256",
        "--rack",
        "2,8",
        "--oversubscription",
        "1,2.5:1",
        "--power",
        "4",
        "--rails",
    )
    made = run(*asked)
    assert made.exit_code == 0, made.output
    content = json.loads(made.stdout)
    levels = [
        (each["group_size"], each.get("oversubscription"), each.get("rails", False)) for each in content["levels"]
    ]
    assert levels == [(8, None, False), (16, None, True), (64, 1.0, False), (256, 2.5, False)]
    assert content["failure_domains"] == [{"name": "node", "group_size": 8}, {"name": "power", "group_size": 32}]
    flat = run("cluster-h100", "--devices", "256", "--oversubscription", "4")
    assert (
        str(flat.exception) == "--oversubscription is of switches above nodes; say with --rack how many nodes each has"
    )
    wrong = run("cluster-h100", "--rack", "2", "--oversubscription", "0.5")
    assert "'0.5' is no list of ratios from 1 to 1000; write them as 4, 4:1 or 1,4" in wrong.stderr


def test_a_models_flags_reach_the_file() -> None:
    profile = written("gpt2-124m", "--device", "v100-32gb", "--microbatch", "8,2,8")
    assert (profile.source.device, profile.source.dtype) == ("V100-SXM2-32GB", "float16")
    assert (profile.microbatch_sizes, profile.placement) == ((2, 8), None)


def test_split_blocks_have_rows_timed_by_the_devices_links_or_a_clusters(tmp_path: Path) -> None:
    cluster = {
        "schema_version": 1,
        "kind": "cluster",
        "name": "slow",
        "source": {"method": "literature"},
        "devices": [{"name": "device", "count": 2}],
        "levels": [{"name": "node", "group_size": 2, "latency_ns": 0, "bandwidth_bytes_per_s": 10**6}],
    }
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(cluster), encoding="utf-8")
    asked = ("gpt2-124m", "--microbatch", "1", "--shards", "2,1")
    profile, slow = written(*asked), written(*asked, "--cluster", str(path))
    assert {tuple(row.shards for row in block.costs) for block in profile.blocks} == {(1, 2)}
    assert slow.blocks[1].costs[1].forward_ns > 10 * profile.blocks[1].costs[1].forward_ns
    assert "slow" in (slow.source.notes or "")


def test_a_model_is_the_same_file_every_time() -> None:
    assert run("mmt").stdout == run("mmt").stdout


def test_help_names_every_model() -> None:
    text = "".join(run("--help").stdout.split())
    for name in MODELS:
        family, _, size = name.rpartition("-")
        assert size in text
        assert name in text or family.removesuffix("-5b").removesuffix("-16b") in text


def test_as_a_process() -> None:
    process = subprocess.run(
        [sys.executable, "-m", "pipeplan.cli.main", "example", "shape-x", "--devices", "2"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (process.returncode, process.stderr) == (0, "")
    assert json.loads(process.stdout)["name"] == "shape-x"


def test_testbeds_are_clusters() -> None:
    from pipeplan.costs.clusters import TESTBEDS
    from pipeplan.files import Cluster, parse

    for name in TESTBEDS:
        result = CliRunner().invoke(command, [f"testbed-{name}"])
        assert parse(result.output, Cluster).num_devices > 1
    result = CliRunner().invoke(command, ["testbed-tessel", "--devices", "12"])
    assert parse(result.output, Cluster).num_devices == 12


def test_a_cluster_says_what_overlaps() -> None:
    plain, all_beside = (pipeplan.example_cluster("cluster-h100", overlap=each) for each in ("sums", "all"))
    assert plain == pipeplan.example_cluster("cluster-h100")
    assert all_beside == plain.model_copy(update={"overlap": "all"})
    done = CliRunner().invoke(command, ["cluster-h100", "--overlap", "all"])
    assert parse(done.stdout, Cluster) == all_beside
    assert isinstance(CliRunner().invoke(command, ["gpt2-345m", "--overlap", "all"]).exception, UsageError)
