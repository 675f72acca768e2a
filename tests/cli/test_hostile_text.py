"""Files from strangers, and the command line, write nothing to the terminal but their text."""

from __future__ import annotations

import io
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from xml.etree import ElementTree

import pytest

from builders.profiles import joined
from pipeplan.cli.output import say_for_now
from pipeplan.cli.profile_verb import _partial_path
from pipeplan.files import (
    Block,
    Cluster,
    CostRow,
    DeviceKind,
    Profile,
    Source,
    read_cluster,
    read_plan,
    read_profile,
    write_file,
)
from pipeplan.files.trace import trace_json
from pipeplan.interop.export import Export
from pipeplan.reporting.layout import console_for, xml_text
from pipeplan.runtime.launch.local import _Ranks
from pipeplan.runtime.launch.status import Cause, Failure, tell
from pipeplan.texts import REFUSED
from support.commands import pipeplan
from support.marks import one_in

pytestmark = pytest.mark.counted

QUICK = ("--devices", 2, "--microbatches", 2, "--deterministic", "--time-limit", "1s")
MARKUP = ("b[/nope]", "[link=https://example.org]b", ":smile:[red]", "<b>&amp;\"'")
"""Valid names: rich would end in an error, or make a link, an emoji or colours of them; SVG would not be XML."""

RULES = """
name = "[/nope]rules"
[[submodule]]
blocks = "[!x]*"
in_flight = 2
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has a profile, a cluster, rules, and a plan of these, whose every text is markup."""
    found = tmp_path_factory.mktemp("hostile")
    row = CostRow(microbatch_size=1, forward_ns=1000, backward_ns=2000, activation_bytes=10)
    blocks = [Block(id=name, operator=f"[/op]{name}", parameter_bytes=8, costs=(row,)) for name in MARKUP]
    about = "[/about]"
    source = Source(
        method="literature", device=about, dtype=about, reference=about, notes=about, versions={about: about}
    )
    profile = joined(blocks).model_copy(update={"name": "[/model]", "source": source})
    write_file(Profile.model_validate(profile.model_dump()), str(found / "profile.json"))
    cluster = Cluster(
        name="[/cluster]", source=source, devices=(DeviceKind(name="[/gpu]", count=2, memory_bytes=10**6),)
    )
    write_file(cluster, str(found / "cluster.json"))
    (found / "rules.toml").write_text(RULES)
    done = pipeplan("search", "profile.json", *QUICK, "--cluster", "cluster.json", "-o", "plan.json", cwd=found)
    assert done.returncode == 0, done.stderr
    return found


def require_plain(done: subprocess.CompletedProcess[str]) -> None:
    """No character that moves a terminal, but line breaks, on stdout or stderr."""
    for text in (done.stdout, done.stderr):
        assert not (found := re.search(f"[{REFUSED}]", text.replace("\n", ""))), (found, text)


VERBS: dict[str, tuple[tuple[object, ...], tuple[str, ...]]] = {
    "search": (("search", "profile.json", *QUICK, "--details"), ("[/model]", *MARKUP[:2])),
    "search on a cluster": (
        ("search", "profile.json", *QUICK, "--cluster", "cluster.json", "--details"),
        ("[/model]", MARKUP[0]),
    ),
    "rules": (("search", "profile.json", *QUICK, "--rules", "rules.toml"), ("[/nope]rules",)),
    "tuning": (
        ("search", "profile.json", *QUICK, "--scheduler", "rules", "--workers", 1, "--time-limit", "60s"),
        ("[/model]",),
    ),
    "compare": (("compare", "profile.json", *QUICK), ("[/model]",)),
    "frontier": (
        ("frontier", "profile.json", "--devices", "1,2", "--device", "cpu", "--svg", "frontier.svg"),
        ("[/model]",),
    ),
    "plans": (("frontier", "profile.json", "--plans", "--devices", "1,2", "--time-limit", "2s"), ("[/model]",)),
    "check": (("check", "plan.json", "--profile", "profile.json", "--cluster", "cluster.json"), ("[/cluster]",)),
    "simulate": (("simulate", "plan.json", "--svg", "timeline.svg", "--trace", "trace.json"), ("[/model]", MARKUP[0])),
    "show": (("profile", "--show", "profile.json"), ("[/model]", "[/about]", "[/op]", *MARKUP[:2])),
    "check in JSON": (("check", "plan.json", "--json"), ("true",)),
}


@one_in(2, "name", list(VERBS), first=1)
def test_names_are_shown_as_they_are(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, shown = VERBS[name]
    done = pipeplan(*arguments, cwd=folder)
    assert done.returncode == 0, done.stderr
    require_plain(done)
    together = re.sub(r"\s+", "", done.stdout)  # tables fold names
    assert all(text in together for text in shown), done.stdout
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal: with a line of progress, and colours of our own alone
    done = pipeplan(*arguments, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert not re.search(r"\x1b(?!\[[0-9;?]*[a-zA-Z])", done.stdout + done.stderr), "no links"


def test_drawings_are_xml(folder: Path) -> None:
    pipeplan("simulate", "plan.json", "--svg", "timeline.svg", cwd=folder)
    pipeplan("frontier", "profile.json", "--devices", "1,2", "--device", "cpu", "--svg", "frontier.svg", cwd=folder)
    for name in ("timeline.svg", "frontier.svg"):
        assert "[/model]" in "".join(ElementTree.parse(folder / name).getroot().itertext())
    for text in MARKUP:
        assert ElementTree.fromstring(f"<svg>{xml_text(text)}</svg>").text == text
    assert xml_text("a\x1b\u202e") == r"a\x1b\u202e"


def test_a_frontier_of_a_model_whose_name_is_xml_is_a_drawing(folder: Path) -> None:
    profile = read_profile(str(folder / "profile.json"))
    write_file(profile.model_copy(update={"name": MARKUP[-1]}), str(folder / "xml.json"))
    done = pipeplan("frontier", "xml.json", "--devices", "1,2", "--device", "cpu", "--svg", "xml.svg", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert MARKUP[-1] in "".join(ElementTree.parse(folder / "xml.svg").getroot().itertext())


@pytest.mark.parametrize("text", [*MARKUP, "http://example.org 12 'quoted'"])
def test_what_a_report_prints_as_plain_text_is_no_markup(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a terminal, whatever a report forgets to say about a text that it prints."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    out = io.StringIO()
    console_for(out, 80).print(text)
    assert out.getvalue() == text + "\n"


def test_notebooks_show_text_as_text(folder: Path) -> None:
    """Their HTML has no element that a file's text makes."""
    plan, profile = read_plan(str(folder / "plan.json")), read_profile(str(folder / "profile.json"))
    for shown in (plan, profile, read_cluster(str(folder / "cluster.json"))):
        page = ElementTree.fromstring(f"<div>{shown._repr_html_()}</div>")
        assert {each.tag.rpartition("}")[2] for each in page.iter()} <= SHOWN_IN
        assert "[/" in "".join(page.itertext())
    page = ElementTree.fromstring(f"<div>{Export('torch', MARKUP[-1], (MARKUP[-1],))._repr_html_()}</div>")
    assert [each.text for each in page] == [MARKUP[-1]] * 2


def test_what_ranks_say_and_where_they_are_is_written_out(capsys: pytest.CaptureFixture[str]) -> None:
    """Texts of a model's code, of a plan's actions, and of files that ranks read."""
    ranks: Any = SimpleNamespace(failures=[Failure(0, Cause.RAISED, "a", details="b\x1b[2J\u202e\n")])
    ranks.output, ranks._died, ranks.board, ranks.timeout_ns = mock.Mock(), list, None, 1
    for say in (
        lambda: tell("a\x1b[2J\u202e"),
        lambda: say_for_now("a\x9b2J\u202e", 80),
        lambda: _Ranks._verdict(ranks),
    ):
        say()
        said = capsys.readouterr().err.replace("\033[K\r", "").replace("\r", "")
        assert "\\u202e" in said
        assert not re.search(f"[{REFUSED}]", said.replace("\n", ""))


SHOWN_IN = {"div", "pre", "svg", "style", "g", "rect", "text", "title", "path", "circle", "line", "polyline"}

HOSTILE = {"ESC": "\x1b[2J", "CSI": "\x9b2J", "override": "\u202e", "line": "\u2028", "bell": "\x07"}

Damage = Callable[[dict[str, Any], str], object]
FIELDS: dict[str, tuple[str, tuple[str, ...], Damage]] = {
    "provenance.scheduler": ("plan", ("simulate",), lambda plan, text: plan["provenance"].update(scheduler=text)),
    "provenance.options": ("plan", ("check",), lambda plan, text: plan["provenance"]["options"].update({text: text})),
    "stages[0].blocks[0]": ("plan", ("check",), lambda plan, text: plan["stages"][0].update(blocks=[text])),
    "devices[0].name": ("plan", ("simulate",), lambda plan, text: plan["devices"][0].update(name=text)),
    "source.device": ("profile", ("profile", "--show"), lambda profile, text: profile["source"].update(device=text)),
    "source.reference": ("profile", ("compare",), lambda profile, text: profile["source"].update(reference=text)),
    "blocks[0].operator": ("profile", ("search",), lambda profile, text: profile["blocks"][0].update(operator=text)),
    "name": ("profile", ("frontier",), lambda profile, text: profile.update(name=text)),
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=list(HOSTILE))
@pytest.mark.parametrize("field", list(FIELDS))
def test_what_moves_a_terminal_is_refused(field: str, text: str, folder: Path, tmp_path: Path) -> None:
    kind, verb, damage = FIELDS[field]
    data = json.loads((folder / f"{kind}.json").read_text())
    damage(data, f"a{text}")
    (tmp_path / "bad.json").write_text(json.dumps(data))
    done = pipeplan(*verb, "bad.json", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"pipeplan: bad.json: not a valid {kind} file")
    assert re.search(rf"^  {re.escape(field)}.*: has U\+{ord(text[0]):04X} at character 2", done.stderr, re.MULTILINE)
    require_plain(done)


def test_files_of_version_1_had_any_text_which_is_written_out(folder: Path, tmp_path: Path) -> None:
    data = json.loads((folder / "profile.json").read_text()) | {"schema_version": 1}
    del data["tied"], data["tokens_per_sample"], data["forward_flops_per_sample"], data["recipe"]
    for block in data["blocks"]:
        for key in ("parameters", "frozen_parameters", "gradient_bytes", "master_bytes"):
            del block[key]
    data["source"]["notes"] = "first line\nsecond \u202eline"
    (tmp_path / "old.json").write_text(json.dumps(data))
    assert read_profile(str(tmp_path / "old.json")).source.notes == "first line\\nsecond \\u202eline"


@pytest.mark.parametrize("name", ["x\x1b[2J.json", "x\u202e.json", b"x\xff.json".decode(errors="surrogateescape")])
def test_names_of_files_are_written_out(name: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / name).write_text((folder / "plan.json").read_text())
    (tmp_path / name.replace("json", "toml")).write_text("in_flight = 2\n")
    for arguments, code in (
        (("check", name), 0),
        (("check", f"missing{name}"), 2),
        (("simulate", name, "--svg", f"nowhere{name}/x"), 2),
        (("search", name), 2),
        (("search", folder / "profile.json", "--rules", name.replace("json", "toml"), *QUICK, "-o", f"o{name}"), 0),
        (("simulate", name, f"--{name}"), 2),
        (("check", name, name), 2),
        (("example", name), 2),
        (("search", folder / "profile.json", "--scheduler", name, "--devices", 2), 2),
        (("search", folder / "profile.json", "--memory", name, "--devices", 2), 2),
    ):
        done = pipeplan(*arguments, cwd=tmp_path)
        assert done.returncode == code, done.stderr
        require_plain(done)
    read_plan(str(tmp_path / f"o{name}"))


def test_names_of_the_command_line_are_written_out_in_traces() -> None:
    """The model that was trained may be a file of any name."""
    text = trace_json([], {"model": "x\x1b\x9b2J\u202e\u2028.json"})
    assert not re.search(f"[{REFUSED}]", text.replace("\n", ""))
    assert json.loads(text)["otherData"] == {"model": r"x\x1b\x9b2J\u202e\u2028.json"}


def test_what_printed_programs_say(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "run\x1b.txt").write_text("# all_reduce_perf\x1b[2J\n# size count type\n1 2 \x1b\n")
    done = pipeplan(
        *("profile", "--communication-from", "run\x1b.txt", "--cluster", folder / "cluster.json", "-o", "out.json"),
        cwd=tmp_path,
    )
    assert done.returncode == 2
    require_plain(done)


@pytest.mark.slow
def test_a_long_text_is_not_printed_whole(folder: Path, tmp_path: Path) -> None:
    plan = json.loads((folder / "plan.json").read_text())
    for place in ("name", "schema_version", "devices", "nonsense"):
        (tmp_path / "bad.json").write_text(json.dumps(plan | {place: "x" * 10**6}))
        done = pipeplan("check", "bad.json", cwd=tmp_path)
        assert done.returncode == 2
        assert len(done.stderr) < 2000


def test_what_is_wrong_with_a_long_name_is_said() -> None:
    done = pipeplan("check", "x" * 5000)
    assert done.returncode == 2
    assert len(done.stderr) < 2100
    assert "x...x" in done.stderr
    assert done.stderr.endswith("cannot be read: File name too long\n")


def test_names_longer_than_files_have_them(tmp_path: Path) -> None:
    """A model is no file then; and what is kept beside a profile has as long a name as there may be."""
    done = pipeplan("profile", "x" * 300, "-o", tmp_path / "out.json")
    assert done.returncode == 2
    assert "is neither in the zoo nor well known" in done.stderr
    for output in ("y" * 250, "ü" * 125):
        partial = _partial_path(str(tmp_path / output))
        assert partial is not None
        partial.touch()
        assert partial.name.endswith(".partial")


def test_rich_is_asked_in_one_place() -> None:
    import pipeplan as package

    for path in Path(package.__file__).parent.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert text.count("Console(") == (path.parts[-2:] == ("reporting", "layout.py")), path
        assert text.count("click.echo(") == (path.parts[-2:] == ("cli", "output.py")), path
        assert not re.search(r"TextColumn\((?![^)]*(markup=False|percentage))", text), path
