"""Where weights are that a run starts from: one safetensors file, or a model's folder as hubs have it.

Such a folder has the tensors in one file or in several, with an index that says which is where. They are read where
they lie: nothing is joined, copied or downloaded, and of other formats, such as torch's pickles, nothing is read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeplan.errors import UsageError
from pipeplan.texts import of_json

_INDEX = ".safetensors.index.json"

_NOT_KEPT = re.compile(
    r"(\.rotary_emb\.inv_freq|\.attn\.(masked_)?bias|\.attention\.(masked_bias|bias)|\.(embeddings\.)?position_ids)$"
)
"""Buffers that older releases of transformers wrote, and that no model reads: tables and masks made from sizes."""


def files_of(path: str) -> list[Path]:
    """The safetensors files that ``--init`` means: a file, those of an index, or those of a folder.

    Raises:
        UsageError: there are none, or an index does not say which.
    """
    given = Path(path)
    if os.path.isdir(given):
        return _of_folder(given)
    if not os.path.isfile(given):
        raise UsageError(
            f"--init {path}: there is no such file; give one that --export-weights wrote, or the folder of a Hugging "
            "Face model"
        )
    return _of_index(given) if given.name.endswith(_INDEX) else [given]


def _of_folder(folder: Path) -> list[Path]:
    indices, files = sorted(folder.glob(f"*{_INDEX}")), sorted(folder.glob("*.safetensors"))
    for usual in (folder / f"model{_INDEX}", folder / "model.safetensors"):
        if usual in indices:
            return _of_index(usual)
        if usual in files:
            return [usual]
    if len(indices) == 1:
        return _of_index(indices[0])
    if len(files) == 1:
        return files
    if not files:
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth"))
        text = "only torch's pickles, which are not read; save it with safe_serialization=True" if pickled else "none"
        raise UsageError(f"--init {folder}: needs safetensors files, and has {text}")
    names = ", ".join(file.name for file in (indices or files)[:3])
    raise UsageError(f"--init {folder}: has several models' files ({names}, ...); give one, or its {_INDEX[1:]}")


def _of_index(index: Path) -> list[Path]:
    try:
        shards = of_json(index.read_text(encoding="utf-8"))["weight_map"].values()
        names = sorted(set(map(str, shards)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"--init {index}: is not an index of safetensors files with a weight_map: {type(error).__name__}: {error}"
        ) from None
    missing = [name for name in names if Path(name).name != name or not (index.parent / name).is_file()]
    if missing or not names:
        raise UsageError(
            f"--init {index}: names {len(names)} files, of which {len(missing)} are not beside it "
            f"({', '.join(missing[:3])}): download them as well"
        )
    return [index.parent / name for name in names]


@dataclass(frozen=True, slots=True)
class OpenWeights:
    """Files that are open, and the one that has each tensor by its name there."""

    file_of: Mapping[str, Any]

    def stored(self, name: str) -> Any:
        """A tensor whose form, and parts, can be read without the rest."""
        return self.file_of[name].get_slice(name)

    def whole(self, name: str) -> Any:
        """All of a tensor."""
        return self.file_of[name].get_tensor(name)


@contextmanager
def opened(path: str) -> Iterator[OpenWeights]:
    """The files that ``--init`` means, for as long as they are read. Raises UsageError."""
    safe_open, error = _library()
    with ExitStack() as stack:
        try:
            files = [stack.enter_context(safe_open(file, framework="pt")) for file in files_of(path)]
            yield OpenWeights({name: file for file in files for name in _names_in(file)})
        except (OSError, error) as problem:
            raise UsageError(f"--init {path}: cannot be read as safetensors: {problem}") from None


def _names_in(file: Any) -> list[str]:
    names: list[str] = file.keys()  # which cannot be iterated itself
    return names


def _library() -> tuple[Any, type[Exception]]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise UsageError("--init needs safetensors, which is not installed: pip install 'pipeplan[torch]'") from None
    return safe_open, SafetensorError


def names_there(
    stored: Collection[str], wanted: Collection[str], aliases: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    """{tensor of the model: its name in the files}, and names there that are none of its.

    Files may call a tensor by any of its names, and leave out, or add, the attribute in which a model has its body, as
    those do that were saved without the head. Buffers that no model reads are passed over.
    """
    ways = [_mapped(stored, wanted, aliases, "")]
    for body in sorted({name.partition(".")[0] for name in wanted}):
        ways += [_mapped(stored, wanted, aliases, f"{body}."), _mapped(stored, wanted, aliases, f"-{body}.")]
    found = max(ways, key=len)  # of equals the first: as they are
    used = set(found.values())
    known = {aliases.get(name, name) for name in found}
    others = [
        name
        for name in sorted(stored)
        if name not in used and not _NOT_KEPT.search(f".{name}") and aliases.get(name, name) not in known
    ]
    return found, others


def _mapped(
    stored: Collection[str], wanted: Collection[str], aliases: Mapping[str, str], prefix: str
) -> dict[str, str]:
    """By names with a prefix added where they are not known without, or, with ``-`` before it, left out."""
    found: dict[str, str] = {}
    for name in sorted(stored, key=wanted.__contains__):  # a tensor's own name goes before others that it has
        own = aliases.get(name, name)
        if own not in wanted and prefix:
            longer = name.removeprefix(prefix[1:]) if prefix.startswith("-") else f"{prefix}{name}"
            own = aliases.get(longer, longer)
        if own in wanted:
            found[own] = name
    return found
