"""What a refusal says would do, does: every flag and value that it names is tried."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from builders.chains import chain_profile
from pipeplan.cli.main import cli
from pipeplan.errors import InfeasibleError, UsageError
from pipeplan.files import CostRow, write_file

QUICK = ("--time-limit", "100ms", "--deterministic", "--scheduler", "1f1b")
SIZES = "the profile has costs for 1 to 4 samples per device; "


@pytest.fixture(scope="module")
def profile_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Six blocks alike, each with 100 MB of parameters and as much for a sample, for 1, 2 and 4 samples."""
    chain = chain_profile(6, placed=False, parameter_bytes=100_000_000)
    rows = [
        CostRow(microbatch_size=size, forward_ns=size * 1000, backward_ns=size * 2000, activation_bytes=size * 10**8)
        for size in (1, 2, 4)
    ]
    blocks = tuple(block.model_copy(update={"costs": tuple(rows)}) for block in chain.blocks)
    path = tmp_path_factory.mktemp("chain") / "profile.json"
    write_file(chain.model_copy(update={"blocks": blocks}), str(path))
    return str(path)


REFUSALS = [
    (
        "--devices 4 --microbatch-size 128",
        SIZES + "choose a --microbatch-size of at most 16, or --devices of at least 32",
    ),
    (
        "--devices 8 --microbatch-size 128",
        SIZES + "choose a --microbatch-size of at most 32, or --devices of at least 32",
    ),
    (
        "--devices 4 --microbatch-size 9 --mini-batch 36 --placement one-to-one",
        "choose a --microbatch-size of at most 4",
    ),
    ("--devices 4 --microbatch-size 64 --placement one-to-one", "choose a --microbatch-size of at most 4"),
    (
        "--devices 4 --microbatch-size 1 --replicas 4 --placement one-to-one",
        "choose a --microbatch-size of at least 4, or",
    ),
    (
        "--devices 4 --microbatch-size 2 --replicas 4",
        "choose a --microbatch-size of at least 4, or choose --replicas of 1, 2",
    ),
    ("--devices 4 --microbatch-size 1 --slices 4 --placement one-to-one", "choose a --microbatch-size of at least 2"),
    ("--devices 4 --replicas 3 --placement one-to-one", "choose --replicas of 1, 2, 4"),
    ("--devices 4 --replicas 8 --placement one-to-one", "choose --replicas of 1, 2, 4"),
    ("--devices 4 --replicas 2 --mini-batch 9", "choose --mini-batch 10"),
    ("--devices 4 --mini-batch 7 --microbatch-size 2", "choose --microbatch-size 1, or --mini-batch 6 or 8"),
    ("--devices 4 --mini-batch 4 --microbatch-size 8", "choose --microbatch-size 4, or --mini-batch 8"),
    ("--devices 4 --mini-batch 8 --microbatches 3", "choose --microbatches 2, or --mini-batch 6 or 9"),
    ("--devices 9 --placement one-to-one", "lower --devices to 6"),
    ("--devices 3 --placement circular --chunks 3 --scheduler auto", "lower --devices to 2 or --chunks to 2"),
    (
        "--devices 8 --replicas 2 --placement circular --chunks 3 --scheduler auto",
        "lower --devices to 4 or --chunks to 1",
    ),
    ("--devices 4 --placement bidirectional --microbatches 3 --scheduler auto", "give --microbatches 4"),
    ("--devices 2 --memory 2GB --placement one-to-one --recompute none --microbatch-size 4", "raise --memory to"),
    (
        "--devices 2 --memory 2GB --placement one-to-one --recompute none --microbatch-size 4",
        "give --microbatch-size 1",
    ),
    ("--devices 2 --memory 1.5GB --placement one-to-one --recompute none --microbatch-size 2", "give --recompute auto"),
]
_NUMBER = r"[0-9][0-9.]*[kMG]?B?"
_ADVICE = re.compile(rf"(--[a-z-]+)((?: (?:of|to|at|most|least|such|as))* {_NUMBER}(?:(?:,| or) [0-9]+\b)*| auto\b)")


def advised(text: str) -> Iterator[tuple[str, str]]:
    """Each flag with each value that a refusal says to choose."""
    _, _, remedies = text.rpartition("; ")
    for flag, values in _ADVICE.findall(remedies):
        for value in re.findall(rf"{_NUMBER}|auto", values):
            yield flag, value


def search(path: str, *arguments: str) -> BaseException | None:
    done = CliRunner().invoke(cli, ["search", path, *QUICK, *arguments])
    return None if done.exit_code == 0 else done.exception


@pytest.mark.parametrize(("asked", "says"), REFUSALS, ids=[f"{asked}: {says}" for asked, says in REFUSALS])
def test_what_is_advised_does(profile_path: str, asked: str, says: str) -> None:
    refused = search(profile_path, *asked.split())
    assert isinstance(refused, UsageError | InfeasibleError)
    assert says in str(refused)
    tried = 0
    for flag, value in advised(str(refused)):
        found = search(profile_path, *asked.split(), flag, value)
        assert found is None, f"{flag} {value}: {found}"
        tried += 1
    assert tried, str(refused)
