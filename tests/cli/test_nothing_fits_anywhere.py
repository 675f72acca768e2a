"""Where nothing fits, every verb that plans says the same, in words and as figures."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from builders.chains import split_chain
from pipeplan import _api
from pipeplan.cli.main import cli
from pipeplan.errors import InfeasibleError
from pipeplan.files import write_file

pytestmark = pytest.mark.counted(1e-4)

VERBS = ("search", "compare", "frontier --plans")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Four blocks, each with 1.8 GB of state and 100 MB for a sample, which one, two or four devices can split."""
    chain = split_chain(4, shards=(1, 2), forward_ns=1000, activation_bytes=10**8)
    where = tmp_path_factory.mktemp("chain") / "profile.json"
    write_file(chain, str(where))
    return str(where)


def said(path: str, verb: str, *asked: str) -> tuple[str, dict[str, Any]]:
    """The error, and the object printed with ``--json``."""
    flags = "--mini-batch", "8", "--time-limit", "2s", "--json"
    name, *own = verb.split()
    done = CliRunner().invoke(cli, [name, path, *own, *flags, *asked])
    assert isinstance(done.exception, InfeasibleError), done.output
    return str(done.exception), json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS[1:])
@pytest.mark.parametrize(
    ("asked", "first"),
    [("--memory 500MB", None), ("--memory 1.5GB --dp 2 --zero 0", "give --zero auto, or leave --dp out, or raise")],
)
def test_the_verbs_say_the_same_where_nothing_fits(path: str, verb: str, asked: str, first: str | None) -> None:
    flags = "--devices", "2", *asked.split()
    error, figures = said(path, "search", *flags)
    assert figures["would_do"]
    assert f"; {first or 'raise'} " in error
    own, found = said(path, verb, *flags)
    assert own == error
    assert {key: found[key] for key in figures} == figures


@pytest.mark.slow
def test_a_frontier_over_several_numbers_of_devices_has_what_would_do_on_each(path: str) -> None:
    error, found = said(path, "frontier --plans", "--devices", "1,2", "--memory", "500MB")
    of_each = {each["num_devices"]: each["memory_bytes"] for each in found["would_do"]}
    assert {1, 2} < {*of_each}
    assert f"1 device of {of_each[1] / 1e9:g}GB" in error
    assert "no plan was found for 1, 2 devices of 500MB" in error


@pytest.mark.parametrize("verb", VERBS)
def test_nothing_is_printed_twice_where_figures_are(path: str, verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ends a verb so, one object is printed."""

    def refuse(*_: object, **__: object) -> None:
        raise InfeasibleError("no", None, [{"num_devices": 3, "memory_bytes": 7, "what": "that"}])

    for name in ("search", "compare", "frontier"):
        monkeypatch.setattr(_api, name, refuse)
    error, found = said(path, verb, "--devices", "2")
    assert (error, found) == (
        "no",
        {"error": "no", "would_do": [{"num_devices": 3, "memory_bytes": 7, "what": "that"}]},
    )
