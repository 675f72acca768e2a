"""Checkpoint folders from strangers: damaged files, others' files, links, devices and pipes in their places, and code.

A folder has two whole checkpoints, of which the later one is damaged, and then read as ``--resume`` reads it. It is
refused with a message, or is read as what was written; the one before is there in any case, and nothing that files say
is run. In half of them the checksums are those of the damaged files, as a stranger writes them: then what is read may
be something else.
"""

from __future__ import annotations

import os
import pickle
import shutil
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from attack_part import Ended, drawn_for

from pipeplan.errors import PipeplanError

__all__ = ["Checkpoints"]

STEPS = (10, 20)
FILES = (".metadata", "__0_0.distcp", "__0_1.distcp", "checksums.json", "rest.pt")
_SIZE = 500


def flipped(path: Path, rng: Random) -> None:
    """Some bits are others."""
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 1, 1, 20))):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def cut_off(path: Path, rng: Random) -> None:
    """It ends somewhere."""
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])


def longer(path: Path, rng: Random) -> None:
    """More follows, from another place of it."""
    content = path.read_bytes()
    path.write_bytes(content + content[rng.randrange(len(content)) :])


def random_bytes(path: Path, rng: Random) -> None:
    """Nothing of it is left."""
    path.write_bytes(rng.randbytes(rng.randrange(2 * path.stat().st_size)))


def gone(path: Path, rng: Random) -> None:
    """It is not there."""
    path.unlink()


def of_another_step(path: Path, rng: Random) -> None:
    """That of the checkpoint before is in its place."""
    shutil.copy(path.parent.parent / f"step-{STEPS[0]:08}" / path.name, path)


def swapped(path: Path, rng: Random) -> None:
    """It has another file's place, and that its."""
    other = path.with_name(rng.choice([name for name in FILES if name != path.name]))
    kept = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(kept)


def link(path: Path, rng: Random) -> None:
    """A link is in its place: to a device, itself, nothing, a folder, or a file elsewhere."""
    path.unlink()
    path.symlink_to(rng.choice(["/dev/zero", "/dev/urandom", path.name, "nothing", "..", "/etc/passwd"]))


def pipe(path: Path, rng: Random) -> None:
    """A pipe that nobody writes to."""
    path.unlink()
    os.mkfifo(path)


def a_folder(path: Path, rng: Random) -> None:
    """A folder."""
    path.unlink()
    path.mkdir()


def code(path: Path, rng: Random) -> None:
    """Something that makes a file when it is unpickled: alone, or before all that was there."""
    canary = path.parent.parent / "canary"
    named = f"cos\nsystem\n(S'touch {canary}'\ntR.".encode()
    whole = path.read_bytes()
    path.write_bytes(rng.choice([named, named[:-1] + whole, pickle.PROTO + b"\x02" + named]))


def other_facts(path: Path, rng: Random) -> None:
    """What is there beside tensors says something of another kind; some bits are others of what is no such file."""
    import torch

    try:
        facts = torch.load(path, weights_only=True)
        assert isinstance(facts, dict)
    except Exception:  # of tensors, or damaged before
        flipped(path, rng)
        return
    values: tuple[object, ...] = (
        None,
        -1,
        10**30,
        1.5,
        "",
        "x",
        [],
        [1],
        {},
        {1: 2},
        {"a": 1},
        (1, 2, 3),
        ([{}], {}),
        ([1], {}),
    )
    facts[rng.choice([*facts, "more"])] = rng.choice(values)
    torch.save(rng.choice([facts, facts, [facts], None]), path)


DAMAGES = (
    *(flipped, cut_off, longer, random_bytes, gone, of_another_step, swapped, link, pipe, a_folder, code),
    other_facts,
)


@dataclass
class Checkpoints:
    """Damaged checkpoint folders, one after another."""

    name: str = "checkpoints"
    count: int = 500
    limit_s: float = 10.0
    memory_bytes: int | None = None
    files: dict[str, bytes] = field(default_factory=dict)
    known: dict[int, object] = field(default_factory=dict)

    def prepare(self, folder: Path) -> None:
        """Write both whole."""
        import torch
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        from pipeplan.runtime.training.checkpoint_folder import CheckpointFolder, write_checksums

        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        kept = CheckpointFolder(str(folder / "kept"))
        for step in STEPS:
            path = kept.begin(step)
            tensors = {f"parameters/{name}": torch.full((_SIZE,), float(step + n)) for n, name in enumerate("ab")}
            save(tensors, storage_writer=FileSystemWriter(path, thread_count=2), no_dist=True)
            torch.save(
                {"step": step, "identity": {}, "schedule": None, "numbers": {}, "checksums": True}, path / "rest.pt"
            )
            write_checksums(path, {})
            kept.publish(step)
        self.files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        missing = {f"kept/step-{STEPS[1]:08}/{name}" for name in FILES} - {*self.files}
        if missing:
            raise RuntimeError(f"a checkpoint has no {', '.join(sorted(missing))}")
        self.known = {step: _read(folder, step) for step in STEPS}

    def _write(self, folder: Path) -> None:
        for name, content in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def _damage(self, index: int, seed: int, folder: Path) -> str:
        """Write both, the later one damaged; what was done to which file."""
        self._write(folder)
        rng, done = drawn_for(self.name, seed, index), list[str]()
        for name in rng.sample(FILES, rng.choice((1, 1, 2))):
            harm, path = rng.choice(DAMAGES), folder / f"kept/step-{STEPS[1]:08}" / name
            if path.is_symlink() or not path.is_file() or (harm is swapped and done):
                continue  # the damage before may have put a pipe there
            harm(path, rng)
            done.append(f"{harm.__name__.replace('_', ' ')}: {name}")
        return ", ".join(done)

    def _sign(self, index: int, seed: int, folder: Path) -> bool:
        """Give damaged files right checksums, in half of the attacks; whether that was so."""
        from pipeplan.runtime.training.checkpoint_folder import write_checksums

        path = folder / f"kept/step-{STEPS[1]:08}"
        plain = all(each.is_file() and not each.is_symlink() for each in path.iterdir())
        signs = plain and drawn_for(f"{self.name} signed", seed, index).random() < 0.5
        if signs:
            (path / "checksums.json").unlink(missing_ok=True)
            write_checksums(path, {})
        return signs

    def show(self, index: int, seed: int, folder: Path) -> str:
        """What was done, with the files."""
        done = self._damage(index, seed, folder)
        return f"{done}{', signed' * self._sign(index, seed, folder)}"

    def attack(self, index: int, seed: int, folder: Path) -> Ended:
        """One folder."""
        done = self._damage(index, seed, folder)
        signed = self._sign(index, seed, folder)
        how, ended = f"{done.partition(':')[0]}{', signed' * signed}", "refused"
        try:
            same = _read(folder, STEPS[1]) == self.known[STEPS[1]]
            if not (same or signed):
                return Ended(how, "accepted", f"{done}: it is read as something else")
            ended = "read as it was" if same else "read"
        except PipeplanError as error:
            said = str(error)
            if "\n" in said or len(said) > 2_000 or not said.isprintable():
                return Ended(how, "control", f"{done}: {said!r}")
        if (folder / "canary").exists():
            return Ended(how, "accepted", f"{done}: it ran what a file says")
        if _read(folder, STEPS[0]) != self.known[STEPS[0]]:
            return Ended(how, "lost", f"{done}: the one before")
        return Ended(f"{how} {ended}")


def _read(folder: Path, step: int) -> object:
    """All of a checkpoint, as ``--resume`` reads it. Raises UsageError."""
    import torch
    from torch.distributed.checkpoint.state_dict_loader import load

    from pipeplan.runtime.training.checkpoint_folder import (
        CheckpointFolder,
        PlainReader,
        metadata_of,
        require_checksums,
        rest_of,
        undamaged,
    )

    kept = CheckpointFolder(str(folder / "kept"))
    path = kept.of(step)
    with undamaged(kept, step):
        require_checksums(path)
        rest, names = rest_of(path, "rest.pt", step), [*metadata_of(path).state_dict_metadata]
        room = {name: torch.zeros(_SIZE) for name in ("parameters/a", "parameters/b")}
        load(room, storage_reader=PlainReader(path), no_dist=True)
    return rest, sorted(names), {name: tensor.tolist() for name, tensor in room.items()}
