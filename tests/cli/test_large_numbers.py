"""Numbers that are valid each and too large together are refused with the file, the sum and where it is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from builders.profiles import joined
from pipeplan.errors import FileError, UsageError
from pipeplan.files import Block, Cluster, CostRow, DeviceKind, Edge, LinkLevel, MeasuredCurve, Source, write_file
from pipeplan.schedule.rules.language import CustomOp, Rules, parse_rules
from support.commands import pipeplan
from support.marks import one_in

QUICK = ("--devices", 2, "--microbatches", 8, "--deterministic", "--time-limit", "1s")


def written(
    folder: Path, *, edge: dict[str, Any] | None = None, parameter_bytes: int = 0, skips: bool = False, **row: int
) -> None:
    """A profile of four blocks whose rows have these numbers."""
    costs = {"forward_ns": 10, "backward_ns": 20} | row
    cost = CostRow(microbatch_size=1, **costs)
    blocks = [Block(id=f"b{n}", operator="layer", parameter_bytes=parameter_bytes, costs=(cost,)) for n in range(4)]
    edges = [Edge(source=f"b{n}", target=f"b{n + 1}", **(edge or {})) for n in range(3)]
    edges += [Edge(source="b0", target="b2", **(edge or {}))] * skips
    write_file(joined(blocks, edges), str(folder / "large.json"))


ON = r"on stages\[\d\] \('b\d' to 'b\d'\) add up to"
SUMS: dict[str, tuple[dict[str, Any], str]] = {
    "forward": (
        {"forward_ns": 10**15},
        rf"duration_ns of \dF {ON} 2000000s, more than the 1000000s they may; have more",
    ),
    "backward": ({"backward_ns": 10**15}, rf"duration_ns of \dB {ON} 2000000s, more than the 1000000s they may"),
    "activations": ({"activation_bytes": 10**16}, rf"acquire_bytes of \dF {ON} 20PB, more than the 10PB they may"),
    "parameters": (
        {"parameter_bytes": 10**16},
        r"parameter_bytes of stages\[0\] \('b0' to 'b1'\) add up to 20PB, more than the 10PB they may",
    ),
    "peak": (
        {"activation_bytes": 10**15},
        r"memory\[0\]\.activation_bytes of 8 micro-batches add up to \d+PB, more than the 10PB .* give --memory",
    ),
    "messages": (
        {"edge": {"bytes_per_sample": 10**16}, "skips": True},
        "bytes of a message from 0F to 1F add up to 20PB, more than the 10PB they may; have more devices share them",
    ),
    "an iteration": (
        {"edge": {"transfer_ns": 10**15}},
        "times on links of all edges, in 1000 micro-batches of 1, add up to 3000000000s, more than the 1152921505s "
        "they may; choose fewer or smaller micro-batches",
    ),
}


@pytest.mark.parametrize("name", list(SUMS))
def test_sums_name_file_and_place(name: str, tmp_path: Path) -> None:
    numbers, reason = SUMS[name]
    written(tmp_path, **numbers)
    asked = (
        "--placement",
        "one-to-one",
        "--scheduler",
        "gpipe",
        "--microbatches",
        1000 if name == "an iteration" else 8,
    )
    done = pipeplan("search", "large.json", *QUICK, *asked, cwd=tmp_path)
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert re.search(rf"^pipeplan: large\.json: {reason}.*\n$", done.stderr), done.stderr


@one_in(2, "name", [name for name in SUMS if name not in ("messages", "an iteration")], first=1)
def test_placements_whose_stages_add_up_to_less_are_found(name: str, tmp_path: Path) -> None:
    """Or else there is the same error, wherever the sum is."""
    written(tmp_path, **SUMS[name][0])
    for verb in (("compare",), ("search", "--scheduler", "1f1b")):
        done = pipeplan(*verb, "large.json", *QUICK, cwd=tmp_path)
        assert done.returncode in (0, 2), (done.stdout, done.stderr)
        assert done.returncode == 0 or re.search(r"^pipeplan: large\.json: .* add up to", done.stderr), done.stderr


def test_a_repetend_of_several_stages(tmp_path: Path) -> None:
    """Each stage takes less than a duration may, all of a device together more."""
    written(tmp_path, forward_ns=4 * 10**14, backward_ns=4 * 10**14)
    done = pipeplan("search", "large.json", *QUICK, "--placement", "one-to-one", "--scheduler", "1f1b", cwd=tmp_path)
    assert done.returncode == 2
    told = (
        r"large\.json: repetend\.repetend_ns of 8 micro-batches add up to \d+s, more than the 1000000s they may; have"
    )
    assert re.search(told, done.stderr), done.stderr


def test_counts(tmp_path: Path) -> None:
    written(tmp_path)
    done = pipeplan("search", "large.json", *QUICK, "--microbatches", 10**7, "--scheduler", "gpipe", cwd=tmp_path)
    assert done.returncode == 2
    assert "'--microbatches': 10000000 is not in the range 1<=x<=1000000" in done.stderr


def test_a_slow_link(tmp_path: Path) -> None:
    written(tmp_path, edge={"bytes_per_sample": 10**15})
    level = LinkLevel(name="slow", group_size=2, latency_ns=10**15, bandwidth_bytes_per_s=1)
    source, devices = Source(method="estimated"), (DeviceKind(name="d", count=2),)
    write_file(Cluster(name="c", source=source, devices=devices, levels=(level,)), str(tmp_path / "cluster.json"))
    done = pipeplan("search", "large.json", "--cluster", "cluster.json", *QUICK, cwd=tmp_path)
    assert done.returncode == 2
    assert "large.json: times on links of all edges, in 8 micro-batches of 1, add up to" in done.stderr


def test_a_slow_curve(tmp_path: Path) -> None:
    written(tmp_path, edge={"bytes_per_sample": 10**15})
    level = LinkLevel(name="link", group_size=2, latency_ns=1, bandwidth_bytes_per_s=10**15)
    curve = MeasuredCurve(operation="send", level="link", points=((1, 10**15),))
    source, devices = Source(method="estimated"), (DeviceKind(name="d", count=2),)
    cluster = Cluster(name="c", source=source, devices=devices, levels=(level,), measured=(curve,))
    write_file(cluster, str(tmp_path / "cluster.json"))
    done = pipeplan("search", "large.json", "--cluster", "cluster.json", *QUICK, cwd=tmp_path)
    assert done.returncode == 2
    assert "large.json: times on links of all edges, in 8 micro-batches of 1, add up to" in done.stderr


def test_rows_that_are_made(tmp_path: Path) -> None:
    """They are sums, too: of a slow link's times, and of many samples'."""
    level = LinkLevel(name="slow", group_size=2, latency_ns=10**15, bandwidth_bytes_per_s=1)
    source, devices = Source(method="estimated"), (DeviceKind(name="d", count=2),)
    write_file(Cluster(name="c", source=source, devices=devices, levels=(level,)), str(tmp_path / "cluster.json"))
    split = ("gpt2-124m", "--shards", "1,2", "--cluster", "cluster.json")
    many = ("tessel-gpt-24b", "--device", "cpu", "--microbatch", 65536)
    for asked, told in (
        (
            split,
            r"'embedding': forward_ns for 1 sample on 2 devices add up to \d+s, .*; choose fewer samples or q",
        ),
        (
            many,
            "'layer0.ffn': backward_ns for 65536 samples on 1 device add up to .*; choose fewer samples with",
        ),
    ):
        done = pipeplan("example", *asked, cwd=tmp_path)
        assert done.returncode == 2, (done.stdout, done.stderr)
        assert re.search(f"^pipeplan: block {told}", done.stderr), done.stderr


def test_a_plan_timed_anew(tmp_path: Path) -> None:
    written(tmp_path)
    found = pipeplan(
        *("search", "large.json", "--devices", 2, "--placement", "one-to-one", *QUICK, "-o", "plan.json"), cwd=tmp_path
    )
    assert found.returncode == 0, found.stderr
    written(tmp_path, forward_ns=10**15)
    done = pipeplan("simulate", "plan.json", "--profile", "large.json", cwd=tmp_path)
    assert done.returncode == 2
    assert re.search(rf"^pipeplan: large\.json: duration_ns of 0F {ON} 2000000s", done.stderr), done.stderr


# Siblings in rules files ----------------------------------------------------------------------------------------

HUGE = f"0x{'f' * 9000}"
"""Valid TOML, and more digits than Python writes."""

RULES = {
    "[[instruction]]": "instruction[0].kind is missing",
    "[[instruction]]\nafter = 0": "instruction[0].kind is missing",
    f"[[instruction]]\nkind = {HUGE}": "instruction[0].kind is an integer of 36000 bits; write a text",
    f"placement = 'circular'\nchunks = {HUGE}": "chunks is an integer of 36000 bits; it must be at most 1000000",
    f"chunks = {HUGE}": "chunks is an integer of 36000 bits; it must be at most 1000000",
    f"in_flight = {HUGE}": "in_flight is an integer of 36000 bits; ",
    f"[weights]\nlate = {HUGE}": "weights.late is an integer of 36000 bits; it must be at most 1000000000000",
    f"[[device]]\ndevices = [{HUGE}]": "write a list of device numbers",
    f"[[instruction]]\nkind = 'ABC'\nafter = {HUGE}": "write a stage's number or the name of a block",
    f"[[instruction]]\nkind = 'ABC'\nafter = 0\nattributes = {{ a = {HUGE} }}": "finite numbers of 64 bits",
    f"x = {HUGE}": "x is not known",
}


@pytest.mark.parametrize("text", list(RULES), ids=range(len(RULES)))
def test_rules(text: str) -> None:
    with pytest.raises(FileError) as caught:
        parse_rules(text, "mine", "mine.toml")
    assert str(caught.value).startswith("mine.toml: not a valid rules file: ")
    assert RULES[text] in str(caught.value)
    assert len(str(caught.value)) < 600


def test_rules_in_python() -> None:
    with pytest.raises(UsageError, match="kind is missing"):
        CustomOp(after=(0,))  # type: ignore[call-arg]  # what is tried
    with pytest.raises(UsageError, match="it must be at most"):
        Rules(in_flight_device=16**9000)
