"""Training samples: texts, token files and datasets, and a generated text that a small model can learn.

Sample n of the training, counted from its first step on, is number n of a shuffled dataset, shuffled anew each time
all has been seen; the order depends only on the seed. So every rank knows which samples a mini-batch has, under every
plan; a rank whose blocks take no samples reads nothing.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Mapping, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from pipeplan.errors import UsageError
from pipeplan.runtime.models.given_names import made_by
from pipeplan.runtime.models.spec import Model, Texts

_ONES = """
    nought one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
    eighteen nineteen
"""
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_MOST = 49


def builtin_text() -> str:
    """Sentences such as ``two and forty make forty-two.``, of all pairs of numbers up to 49: 90,000 characters."""
    pairs = [(a, b) for a in range(_MOST + 1) for b in range(_MOST + 1)]
    words = [_word(number) for number in range(2 * _MOST + 1)]
    return "".join(f"{words[a]} and {words[b]} make {words[a + b]}.\n" for a, b in pairs)


def _word(number: int) -> str:
    small = _ONES.split()
    if number < len(small):
        return small[number]
    tens, ones = divmod(number, 10)
    return _TENS.split()[tens - 2] + (f"-{small[ones]}" if ones else "")


_BYTES = 256
_UINT16 = 2**16
_LARGE_BYTES, _PART_BYTES = 64 << 20, 1 << 20
_DIGITS = 16


class Dataset(Protocol):
    """As ``torch.utils.data.Dataset`` with a length: each item has the tensors of one sample by name."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True)
class _Windows:
    """A text as neighbouring windows, of which each begins with the last token of the one before."""

    tokens: np.ndarray[Any, Any]
    texts: Texts
    where: str

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // (self.texts.window - 1)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        begin = index * (self.texts.window - 1)
        window = torch.from_numpy(self.tokens[begin : begin + self.texts.window].astype(np.int64))
        if int(window.max()) >= self.texts.vocabulary:
            place = begin + int(window.argmax())
            raise UsageError(
                f"--data {self.where}: token {place} is {int(window.max())}, and the model's vocabulary has "
                f"{self.texts.vocabulary} words"
            )
        return {name: tensor[0] for name, tensor in self.texts.batch(window.unsqueeze(0)).items()}


@dataclass(frozen=True, slots=True)
class _Shuffled:
    """Makes mini-batches of a dataset; what a model calls its ``batch``."""

    dataset: Dataset

    def __call__(self, num_samples: int, step: int, seed: int) -> dict[str, Tensor]:
        numbers = range(step * num_samples, (step + 1) * num_samples)
        made: dict[str, Tensor] = default_collate([self.dataset[self._place(number, seed)] for number in numbers])
        return made

    def _place(self, number: int, seed: int) -> int:
        epoch, place = divmod(number, len(self.dataset))
        return int(_order(len(self.dataset), epoch, seed)[place])


@functools.lru_cache(maxsize=2)  # a mini-batch may have the end of one epoch and the beginning of the next
def _order(length: int, epoch: int, seed: int) -> Tensor:
    """All places of a dataset in this epoch's order."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    return torch.randperm(length, generator=generator)


def with_data(model: Model, data: str | None) -> Model:
    """The model with samples from ``data``; its own where that is None.

    Args:
        model: takes texts where ``data`` is one.
        data: ``builtin``; a file of text, or of tokens as ``.npy`` or ``.bin``; or ``pkg.mod:factory``, a function
            without arguments that returns a dataset.

    Raises:
        UsageError: the data cannot be read, or the model cannot take it.
    """
    if data is None:
        return model
    dataset = _made_by(data) if ":" in data and not os.path.exists(data) else _text_of(model, data)
    if len(dataset) < 1:
        raise UsageError(f"--data {data} has no sample; a text needs a token more than the model's sequence")
    _require_names(model, dataset[0], data)
    return replace(model, batch=_Shuffled(dataset), made_up=False)


def fingerprint(model: Model, data: str | None) -> str | None:
    """What distinguishes the data of :func:`with_data`, for people to read; None if the model makes it up.

    Name without folders, number of samples, size of a file, and a hash: of a file's content, or of its first and last
    MiB where it has 64 MiB or more; of a dataset's first and last items. Raises UsageError.
    """
    if data is None or not isinstance(model.batch, _Shuffled):
        return None
    dataset = model.batch.dataset
    count = f"{len(dataset)} samples"
    if not isinstance(dataset, _Windows):
        return f"{data} ({count}, sha256 {_digest(_bytes_of(dataset[0]) + _bytes_of(dataset[len(dataset) - 1]))})"
    size, content = _content(data)
    return f"{Path(data).name} ({count}, {size} bytes, sha256 {_digest(content)})"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:_DIGITS]


def _bytes_of(item: Mapping[str, Any]) -> bytes:
    """Names and numbers of an item."""
    collated: dict[str, Tensor] = default_collate([dict(item)])
    return b"".join(
        f"{name} {tensor.dtype} {list(tensor.shape)}".encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes()
        for name, tensor in sorted(collated.items())
    )


def _content(data: str) -> tuple[int, bytes]:
    """How many bytes a text has, and all of them, or the first and last where they are many."""
    if data == "builtin":
        text = builtin_text().encode()
        return len(text), text
    try:
        with Path(data).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            spans = [(0, size)] if size < _LARGE_BYTES else [(0, _PART_BYTES), (size - _PART_BYTES, _PART_BYTES)]
            return size, b"".join(_read(file, *span) for span in spans)
    except OSError as error:
        raise UsageError(f"--data {data} cannot be read: {error}") from error


def _read(file: BinaryIO, begin: int, count: int) -> bytes:
    file.seek(begin)
    return file.read(count)


def _made_by(path: str) -> Dataset:
    made: Dataset = made_by(path, "--data")
    if not (isinstance(made, Sized) and hasattr(made, "__getitem__")):
        raise UsageError(
            f"--data {path!r} returned {type(made).__name__}; return a dataset with a length and "
            "items, such as a DataLoader's .dataset: batches and their order are the run's"
        )
    return made


def _require_names(model: Model, item: Mapping[str, Any], data: str) -> None:
    needed = {name for block in model.blocks for name in block.samples}
    if not isinstance(item, Mapping) or not needed <= set(item):
        found = sorted(item) if isinstance(item, Mapping) else type(item).__name__
        raise UsageError(
            f"--data {data}: an item is {found}, and model {model.name!r} takes tensors named {sorted(needed)}"
        )


def _text_of(model: Model, data: str) -> _Windows:
    if model.texts is None:
        raise UsageError(
            f"--data {data}: model {model.name!r} takes no texts; give pkg.mod:factory, which makes a dataset"
        )
    return _Windows(_tokens(data, model.texts.vocabulary), model.texts, data)


def _tokens(data: str, vocabulary: int) -> np.ndarray[Any, Any]:
    """All tokens of a text, in memory only as far as they are read where the file has tokens."""
    if data == "builtin":
        return _numbered(builtin_text().encode(), vocabulary, data)
    path = Path(data)
    try:
        if path.suffix == ".npy":
            return _require_tokens(np.load(path, mmap_mode="r", allow_pickle=False), data)
        if path.suffix == ".bin":
            return np.memmap(path, dtype=np.uint16 if vocabulary <= _UINT16 else np.uint32, mode="r")
        return _numbered(path.read_bytes(), vocabulary, data)
    except (OSError, ValueError) as error:
        raise UsageError(f"--data {data} cannot be read: {error}") from error


def _require_tokens(found: np.ndarray[Any, Any], data: str) -> np.ndarray[Any, Any]:
    if found.ndim != 1 or found.dtype not in (np.uint16, np.uint32):
        raise UsageError(f"--data {data} has {found.dtype}{list(found.shape)}; tokens are a row of uint16 or uint32")
    return found


def _numbered(text: bytes, vocabulary: int, data: str) -> np.ndarray[Any, Any]:
    """Bytes as tokens; where the vocabulary is smaller than that, the bytes that the text has, numbered."""
    tokens = np.frombuffer(text, dtype=np.uint8)
    if vocabulary >= _BYTES:
        return tokens
    known, numbers = np.unique(tokens, return_inverse=True)
    if len(known) > vocabulary:
        raise UsageError(
            f"--data {data} has {len(known)} different bytes, and the model's vocabulary {vocabulary} words; give "
            "tokens as .npy or .bin, or a model with 256 words or more"
        )
    return numbers
