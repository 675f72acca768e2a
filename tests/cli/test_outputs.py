"""Files that a verb writes are tried before its work, and what cannot be written in the end is not lost."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from unittest import mock
from xml.etree import ElementTree

import click
import pytest

from builders.chains import chain_plan, chain_profile
from pipeplan import _api
from pipeplan.cli.main import cli
from pipeplan.errors import FileError
from pipeplan.files import read_plan, require_writable, write_file, write_text
from support.commands import pipeplan

SEARCH = ("search", "profile.json", "--microbatches", 4, "--deterministic", "--time-limit", "1s")

WRITES = {
    "search -o": (*SEARCH, "-o"),
    "search --placement-output": (*SEARCH, "--placement-output"),
    "search --rules-output": (*SEARCH, "--scheduler", "rules", "--rules-output"),
    "search --cache": (*SEARCH, "--scheduler", "rules", "--cache"),
    "frontier -o": ("frontier", "profile.json", "--devices", "2", "--plans", "-o"),
    "frontier --svg": ("frontier", "profile.json", "--devices", "2", "--plans", "--svg"),
    "simulate --svg": ("simulate", "plan.json", "--svg"),
    "simulate --trace": ("simulate", "plan.json", "--trace"),
    "example": ("example", "shape-v", "-o"),
    "example of a model": ("example", "gpt2-124m", "-o"),
    "profile --communication-from": (
        *("profile", "--communication-from", "perf.txt", "--cluster", "cluster.json", "-o"),
    ),
    "profile --estimate": ("profile", "gpt2-tiny", "--estimate", "--device", "a100-80gb", "-o"),
    "profile": ("profile", "gpt2-tiny", "-o"),
    "import": ("import", "1,1", "--from", "layers", "--profile", "profile.json", "-o"),
    "kernels": ("kernels", "profile.json", "-o"),
    "report": ("report", "plan.json", "-o"),
    "report --svg": ("report", "plan.json", "--svg"),
    "export": ("export", "plan.json", "--to", "torch", "-o"),
    "run --trace": ("run", "plan.json", "--emulate", "--local", "--trace"),
    "run --export-weights": ("run", "plan.json", "--model", "gpt2-tiny", "--local", "--export-weights"),
}
"""Every option that names a file to be written at the end."""

TRAIN = ("run", "plan.json", "--model", "gpt2-tiny", "--local")
FOLDERS = {
    "frontier --output-all": ("frontier", "profile.json", "--devices", "2", "--plans", "--output-all"),
    "run --checkpoint": (*TRAIN, "--checkpoint"),
    "run --tensorboard": (*TRAIN, "--tensorboard"),
}
"""Every one that names a folder, which is made."""

WORK = {
    "search": ("search", "tune"),
    "frontier": "frontier",
    "simulate": "simulate",
    "example": ("make_shape", "make_model"),
    "import": "imported",
    "kernels": "choose_kernels",
    "report": "report",
    "export": "write_elsewhere",  # to know its files is its work; nothing is put anywhere else
    "profile": ("profile", "estimate", "add_links"),
    "run": "run",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("outputs")
    write_file(chain_profile(2), str(found / "profile.json"))
    write_file(chain_plan(2, 4), str(found / "plan.json"))
    assert pipeplan("example", "testbed-tessel", "-o", found / "cluster.json").returncode == 0
    (found / "perf.txt").touch()
    return found


PLACES = {
    "nowhere": ("nowhere/out", "there is no folder .*nowhere"),
    "below a file": ("profile.json/out", "there is no folder .*profile.json"),
    "a folder": (".", "it is a folder"),
    "too long": ("x" * 300, "File name too long"),
}


@pytest.mark.parametrize("place", list(PLACES))
@pytest.mark.parametrize("option", list(WRITES))
def test_what_cannot_be_written_is_refused_before_the_work(
    option: str, place: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(*_: object, **__: object) -> None:
        raise AssertionError("it has begun")

    names = WORK[str(WRITES[option][0])]
    for name in (names,) if isinstance(names, str) else names:
        monkeypatch.setattr(_api, name, work)
    path, reason = PLACES[place]
    done = pipeplan(*WRITES[option], path, cwd=folder)
    assert done.returncode == 2, done.stderr
    assert re.search(rf"{re.escape(path)}: cannot be written: {reason}; .*", done.stderr), done.stderr
    asked = WRITES[option][-1]
    assert str(asked) in done.stderr, "what to give"


@pytest.mark.parametrize("option", list(FOLDERS))
def test_what_cannot_be_made_is_refused_before_the_work(
    option: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(*_: object, **__: object) -> None:
        raise AssertionError("it has begun")

    monkeypatch.setattr(_api, FOLDERS[option][0], work)
    done = pipeplan(*FOLDERS[option], "profile.json/out", cwd=folder)
    assert done.returncode == 2, done.stderr
    assert re.search(r"profile\.json/out: cannot be (made|written): ", done.stderr), done.stderr


@pytest.mark.parametrize(
    "verb", ["frontier", "search", "simulate", "import", "kernels", "report", "export", "profile", "run"]
)
def test_every_option_that_writes_is_tried(verb: str) -> None:
    """Those whose help begins so; each example has options of its own."""
    command = cli.get_command(click.Context(cli), verb)
    assert command is not None
    tried = {given[-1] for given in (*WRITES.values(), *FOLDERS.values()) if given[0] == verb}
    writing = [
        option
        for option in command.params
        if isinstance(option, click.Option)
        and isinstance(option.type, click.Path)
        and re.match(r"(Write|Where to write)\b", option.help or "")
    ]
    assert writing
    assert [option.name for option in writing if not tried & {*option.opts}] == []


RULES = ("search", "profile.json", "--microbatches", 4, "--placement", "one-to-one", "--scheduler", "rules")
FRONTIER = ("frontier", "profile.json", "--devices", "2", "--plans")
TOGETHER = {
    "one file": ((*SEARCH, "-o", "both", "--placement-output", "both"), "-o and --placement-output .* write both"),
    "one file, spelled otherwise": (
        ("simulate", "plan.json", "--svg", "both", "--trace", "./both"),
        "--svg and --trace",
    ),
    "a cache": ((*RULES, "--cache", "both", "-o", "both"), "-o and --cache would both write both; give another file"),
    "a cache nowhere": ((*RULES, "--cache", "-"), "--cache is both read and written, so it cannot be stdin or stdout"),
    "stdout": ((*SEARCH, "-o", "-", "--placement-output", "-"), "-o and --placement-output would both print to stdout"),
    "stdout and figures": ((*RULES, "--rules-output", "-", "--json"), "--rules-output and --json would both print"),
    "two drawings": ((*FRONTIER, "--svg", "-", "-o", "-"), "-o and --svg would both print to stdout"),
    "a drawing and figures": ((*FRONTIER, "--svg", "-", "--json"), "--svg and --json would both print to stdout"),
}


@pytest.mark.parametrize("name", list(TOGETHER))
def test_two_files_in_one_place_are_refused(name: str, folder: Path) -> None:
    arguments, told = TOGETHER[name]
    done = pipeplan(*arguments, cwd=folder)
    assert done.returncode == 2, done.stdout
    assert re.search(told, done.stderr), done.stderr
    assert not (folder / "both").exists()


OVER_WHAT_IS_READ = {
    "search": (("search", "profile.json", "--cluster", "cluster.json", "-o", "./profile.json"), "PROFILE .*-o"),
    "search's cluster": (("search", "profile.json", "--cluster", "cluster.json", "-o", "cluster.json"), "--cluster"),
    "simulate": (("simulate", "plan.json", "--svg", "plan.json"), "PLAN .*--svg"),
    "report": (("report", "profile.json", "plan.json", "-o", "plan.json"), "PLAN.* -o"),
    "import": (("import", "1,1", "--from", "layers", "--profile", "profile.json", "-o", "profile.json"), "--profile"),
    "profile": (("profile", "gpt2-tiny", "--estimate", "--cluster", "cluster.json", "-o", "cluster.json"), "--cluster"),
    "run": (("run", "plan.json", "--emulate", "--local", "--trace", "plan.json"), "PLAN .*--trace"),
}


@pytest.mark.parametrize("name", list(OVER_WHAT_IS_READ))
def test_no_file_is_written_over_one_that_is_read(name: str, folder: Path) -> None:
    arguments, told = OVER_WHAT_IS_READ[name]
    before = {path: path.read_bytes() for path in folder.iterdir()}
    done = pipeplan(*arguments, cwd=folder)
    assert done.returncode == 2, done.stderr
    assert re.search(f"{told}.* would write over it; give another file", done.stderr.replace("\n", " ")), done.stderr
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_what_is_renewed_takes_the_place_of_what_was_read(folder: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    for start in ((), ("--start", plan)):
        assert pipeplan(*SEARCH, *start, "-o", plan, cwd=folder).returncode == 0
    command = read_plan(str(plan)).provenance.command
    assert command is not None
    assert "--start" in command


@pytest.mark.parametrize(
    ("arguments", "reads"),
    [
        ((*SEARCH, "--placement-output", "-"), json.loads),
        ((*RULES, "--rules-output", "-"), tomllib.loads),
        ((*FRONTIER, "--svg", "-"), ElementTree.fromstring),
        (("simulate", "plan.json", "--trace", "-"), json.loads),
    ],
)
def test_what_is_written_to_stdout_is_alone_there(
    arguments: tuple[object, ...], reads: Callable[[str], object], folder: Path
) -> None:
    done = pipeplan(*arguments, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert reads(done.stdout)


def refuses_to_open(kind: type[OSError], number: int) -> Callable[..., object]:
    def refuse(*_: object, **__: object) -> object:
        raise kind(number, os.strerror(number))

    return refuse


@pytest.mark.parametrize("number", [13, 30, 28], ids=["no permission", "read-only", "full"])
def test_a_folder_in_which_no_file_can_be_made(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.TemporaryFile", refuses_to_open(OSError, number))
    reason = f"out.json: cannot be written: {os.strerror(number)}; choose another file with --svg"
    with pytest.raises(FileError, match=re.escape(reason)):
        require_writable(str(tmp_path / "out.json"), "--svg")


def test_files_that_cannot_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.json"
    path.write_text("before")
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(FileError, match="it is write-protected; choose another file with -o"):
        require_writable(str(path))
    monkeypatch.undo()
    tmp_path.chmod(0o1777)
    monkeypatch.setattr("os.geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(FileError, match=r"cannot be replaced: it is another user's"):
        require_writable(str(path))
    monkeypatch.undo()
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(FileError, match="circle: cannot be written: "):
        require_writable(str(tmp_path / "circle"))


def test_trying_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("before")
    (tmp_path / "link").symlink_to("there")
    for name in ("there", "new", "link"):
        require_writable(str(tmp_path / name))
    require_writable("/dev/null")
    require_writable("-")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "there"]
    assert (tmp_path / "there").read_text() == "before"


def test_a_disk_without_room_is_found_out_before_the_work(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file can be made there, as on a full disk, but has no room."""

    class Full(io.BytesIO):
        def write(self, data: object, /) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("pipeplan.files.read_write.tempfile.TemporaryFile", lambda *_, **__: Full())
    monkeypatch.setattr(_api, "search", mock.Mock(side_effect=AssertionError("it has begun")))
    done = pipeplan(*SEARCH, "-o", "plan.out", cwd=folder)
    assert done.returncode == 2
    assert "plan.out: cannot be written: No space left on device; choose another file with -o" in done.stderr
    assert not (folder / "plan.out").exists()


# What fails all the same ----------------------------------------------------------------------------------------


@pytest.fixture
def kept_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files are made."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_a_plan_that_finds_no_room_is_kept_and_figures_are_printed(kept_in: Path, folder: Path) -> None:
    done = pipeplan(*SEARCH, "-o", "/dev/full", cwd=folder)
    assert done.returncode == 2
    assert "per iteration" in done.stdout
    assert "/dev/full" not in done.stdout, "where no plan is"
    assert "plan written to" not in done.stderr
    said = re.search(
        r"/dev/full: cannot be written: No space left on device; what was to be there is in (\S+)\n", done.stderr
    )
    assert said is not None, done.stderr
    assert Path(said[1]).parent == kept_in
    assert pipeplan("check", said[1]).returncode == 0


def test_every_file_is_kept(kept_in: Path, folder: Path) -> None:
    done = pipeplan("simulate", "plan.json", "--svg", "/dev/full", "--trace", "trace.json", "--json", cwd=folder)
    assert done.returncode == 2
    assert '"makespan_ns"' in done.stdout
    assert (folder / "trace.json").exists()
    (kept,) = kept_in.iterdir()
    assert kept.read_text().startswith("<svg")


def test_a_folder_that_goes_away_meanwhile(
    kept_in: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    gone = tmp_path_factory.mktemp("gone")
    search = _api.search

    def and_gone(*arguments: object, **options: object) -> object:
        found = search(*arguments, **options)
        gone.rmdir()
        return found

    with mock.patch.object(_api, "search", and_gone):
        done = pipeplan(*SEARCH, "-o", gone / "plan.json", "--json", cwd=folder)
    assert done.returncode == 2
    assert '"makespan_ns"' in done.stdout
    (kept,) = kept_in.iterdir()
    assert kept.name.endswith("plan.json")
    assert str(kept) in done.stderr
    assert len(read_plan(str(kept)).devices) == 2


def test_without_room_for_a_temporary_file_it_goes_to_stdout(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeplan.files.read_write.write_elsewhere", lambda *_: None)
    monkeypatch.setattr(_api, "write_elsewhere", lambda *_: None, raising=False)
    done = pipeplan("example", "shape-v", "-o", "/dev/full", cwd=folder)
    assert done.returncode == 2
    assert done.stdout.startswith('{\n  "schema_version": 2,\n  "kind": "profile"')
    assert "what was to be there is in stdout" in done.stderr


def test_another_error_does_not_hide_where_the_plan_is(kept_in: Path, folder: Path) -> None:
    with mock.patch.object(_api, "simulate", side_effect=FileError("figures failed")):
        done = pipeplan(*SEARCH, "-o", "/dev/full", cwd=folder)
    assert done.returncode == 2
    assert str(next(kept_in.iterdir())) in done.stderr
    assert "figures failed" in done.stderr


@pytest.mark.parametrize("arguments", [("example", "shape-v"), ("simulate", "plan.json")], ids=["a file", "tables"])
def test_stdout_without_room(arguments: tuple[str, ...], folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pipeplan", *arguments]
    with open("/dev/full", "w") as full:
        own = {"stdout": full, "stderr": subprocess.PIPE, "env": {**os.environ, "TMPDIR": str(tmp_path)}}
        done = subprocess.run(command, text=True, cwd=folder, check=False, **own)
    assert done.returncode == 2, done.stderr
    assert re.match("pipeplan: stdout:? cannot be written: No space left", done.stderr), done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


def ended(arguments: tuple[object, ...], stdout: int, folder: Path) -> tuple[int, str]:
    """Exit code and standard error of a command in a process of its own."""
    command = [sys.executable, "-m", "pipeplan", *map(str, arguments)]
    done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, cwd=folder, check=False)
    return done.returncode, done.stderr


def test_a_reader_that_leaves_ends_nothing(folder: Path) -> None:
    """What is to be written is, and the exit code is that of what was done."""
    read, write = os.pipe()
    os.close(read)
    assert ended(("check", "plan.json"), write, folder) == (0, "")
    code, said = ended((*FRONTIER, "-o", "unread.json"), write, folder)
    os.close(write)
    said = "".join(line for line in said.splitlines(True) if not line.startswith("pipeplan: after "))  # no progress
    assert (code, said.count("\n")) == (0, 1), said
    assert said.endswith("is in unread.json\n")
    assert read_plan(str(folder / "unread.json"))


@pytest.mark.slow
def test_figures_without_room_do_not_take_the_plan_along(folder: Path) -> None:
    with open("/dev/full", "w") as full:
        code, said = ended((*FRONTIER, "-o", "figureless.json"), full.fileno(), folder)
    assert (code, said.count("stdout cannot be written")) == (2, 1)
    assert read_plan(str(folder / "figureless.json"))


def test_a_name_too_long_for_a_temporary_one_beside_it(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 250)
    require_writable(str(path))
    write_text("text", str(path))
    assert path.read_text() == "text"


@pytest.mark.slow
def test_letters_that_stdout_has_not_are_written_out_and_files_are_utf_8(folder: Path, tmp_path: Path) -> None:
    """Not of a terminal's encoding, whatever that is; and any number of columns is a width."""
    plan = read_plan(str(folder / "plan.json"))
    write_file(plan.model_copy(update={"name": "größer→"}), str(tmp_path / "plan.json"))
    for arguments in (
        ("simulate", "plan.json"),
        ("report", "plan.json", "--markdown"),
        ("simulate", "plan.json", "--svg", "-"),
    ):
        command = [sys.executable, "-m", "pipeplan", *arguments]
        told = {**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "9" * 20}
        done = subprocess.run(command, capture_output=True, cwd=tmp_path, env=told, check=False)
        assert done.returncode == 0, done.stderr
        assert (
            b"gr\\xf6\xdfer\\u2192".replace(b"\xdf", b"\\xdf") if len(arguments) == 2 else "größer→".encode()
        ) in done.stdout


def test_any_bytes_are_no_traceback(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is a file without an end read to its end."""
    monkeypatch.setattr("pipeplan.files.read_write.MAX_FILE_BYTES", 5000)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe1,1")
    for source in ("bytes", "/dev/zero"):
        done = pipeplan("import", source, "--from", "layers", "--profile", folder / "profile.json", cwd=tmp_path)
        assert done.returncode == 2
        assert re.search("no text in UTF-8|more than the 5000 a file may have", done.stderr), done.stderr
