"""Training samples: texts, token files, datasets and loaders, and a generated text that a small model can learn.

Sample n of the training, counted from its first step on, is number n of a shuffled dataset, shuffled anew each time
all has been seen; the order depends only on the seed. So every rank knows which samples a mini-batch has, under every
plan; a rank whose blocks take no samples reads nothing. A loader makes the mini-batches by itself: every rank that
needs samples goes through one of its own, with random numbers that depend only on the seed, and ranks compare what they
get.
"""

from __future__ import annotations

import functools
import hashlib
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from pipeplan.errors import UsageError
from pipeplan.runtime.models.given_names import Name, PythonValue, found_at, made_by
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
                f"{self.where}: token {place} is {int(window.max())}, and the model's vocabulary has "
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


@dataclass(frozen=True, slots=True)
class _InOrder:
    """Makes mini-batches of a dataset as it stands, number ``step`` of them."""

    dataset: Dataset

    def __call__(self, num_samples: int, step: int, seed: int) -> dict[str, Tensor]:
        numbers = range(step * num_samples, (step + 1) * num_samples)
        made: dict[str, Tensor] = default_collate([self.dataset[number] for number in numbers])
        return made


@dataclass(slots=True)
class _Loaded:
    """The mini-batches of a loader, which begins anew when it has given all.

    ``names`` are those of a batch that is a tuple, ``where`` it is from. Batches from the one asked for last on are
    kept, as far as they have been read: a model is looked at with the first samples before it is trained on them.
    """

    loader: Iterable[Any]
    names: Sequence[str]
    where: str
    seed: int
    _read: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    _batches: Iterator[Any] | None = None
    _next: int = 0
    _epoch: int = 0

    def __call__(self, num_samples: int, step: int, seed: int) -> dict[str, Tensor]:
        """``num_samples`` of mini-batch number ``step``, or of several from there on, to look at."""
        self._read = {number: batch for number, batch in self._read.items() if number >= step}
        found = [self._at(step)]
        while (rows := sum(map(_num_samples, found))) < num_samples and step == 0:
            found.append(self._at(len(found)))
        if rows < num_samples or (step and rows > num_samples):
            raise UsageError(_other_size(self.where, rows, num_samples))
        return {name: torch.cat([each[name] for each in found])[:num_samples] for name in found[0]}

    def require_size(self, num_samples: int) -> None:
        """Refuse a loader of other mini-batches than the plan has. Raises UsageError."""
        if (rows := _num_samples(self._at(self._next - len(self._read)))) != num_samples:
            raise UsageError(_other_size(self.where, rows, num_samples))

    def __len__(self) -> int:
        """Mini-batches until it begins anew. Raises TypeError where it does not know."""
        return len(self.loader)  # type: ignore[arg-type]  # it raises what is said

    def _at(self, step: int) -> dict[str, Tensor]:
        if step < self._next and step not in self._read:
            self._batches, self._next, self._epoch = None, 0, 0
            self._read.clear()
        while self._next <= step:
            self._read = {number: batch for number, batch in self._read.items() if number >= step}
            made = _by_names(self._following(), self.names, f"{self.where}: a mini-batch is")
            self._read[self._next] = {name: torch.as_tensor(tensor) for name, tensor in made.items()}
            self._next += 1
        return self._read[step]

    def _following(self) -> Any:
        """The next batch; drawn with random numbers that depend on its number alone."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed((self.seed * 1_000_003 + self._next) % 2**63)
            for _ in range(2):
                if self._batches is None:
                    self._batches = self._begun()
                try:
                    return next(self._batches)
                except StopIteration:
                    self._batches, self._epoch = None, self._epoch + 1
        raise UsageError(
            f"{self.where} gives no mini-batch {self._next}: it has ended, and begins no second time; give a "
            "DataLoader, or what else can be gone through again, or fewer --steps"
        )

    def _begun(self) -> Iterator[Any]:
        """The loader from its beginning, in the order of this epoch."""
        for each in (self.loader, *(getattr(self.loader, name, None) for name in ("sampler", "batch_sampler"))):
            if isinstance(generator := getattr(each, "generator", None), torch.Generator):
                generator.manual_seed((self.seed * 1_000_003 + self._epoch) % 2**63)
            if callable(set_epoch := getattr(each, "set_epoch", None)):
                set_epoch(self._epoch)
        return iter(self.loader)


@dataclass(frozen=True, slots=True)
class _Named:
    """A dataset whose items are tuples, as dicts."""

    dataset: Any
    names: Sequence[str]
    where: str

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return _by_names(self.dataset[index], self.names, f"{self.where}: an item is")


def _by_names(made: Any, names: Sequence[str], what: str) -> dict[str, Any]:
    """A sample or a mini-batch by the names of the model's tensors. Raises UsageError."""
    given = (made,) if isinstance(made, Tensor) else made
    if isinstance(given, tuple | list) and len(given) == len(names):
        return dict(zip(names, given, strict=True))
    if isinstance(given, Mapping) and set(names) <= set(given):
        return {name: given[name] for name in names}
    found = sorted(map(str, made)) if isinstance(made, Mapping) else type(made).__name__
    size = f" of {len(made)}" if isinstance(made, tuple | list) else ""
    raise UsageError(
        f"{what} {found}{size}, and the model takes tensors named {list(names)}: give a dict of them, or as many in "
        "this order"
    )


def _num_samples(batch: Mapping[str, Tensor]) -> int:
    return next(iter(batch.values())).shape[0]


def _other_size(where: str, rows: int, num_samples: int) -> str:
    return (
        f"{where}: a mini-batch has {rows} samples, and the plan's has {num_samples}: a loader gives whole "
        f"mini-batches, DataLoader(..., batch_size={num_samples}, drop_last=True), or search with --mini-batch {rows}"
    )


@functools.lru_cache(maxsize=2)  # a mini-batch may have the end of one epoch and the beginning of the next
def _order(length: int, epoch: int, seed: int) -> Tensor:
    """All places of a dataset in this epoch's order."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    return torch.randperm(length, generator=generator)


def with_data(model: Model, data: Name | None, seed: int = 0, flag: str = "--data", *, in_order: bool = False) -> Model:
    """The model with samples from ``data``; its own where that is None.

    Args:
        model: takes texts where ``data`` is one.
        data: ``builtin``; a file of text, or of tokens as ``.npy`` or ``.bin``; or ``pkg.mod:factory``, a function
            without arguments that returns a dataset or a loader, which is anything that gives mini-batches one after
            another, such as a ``DataLoader``; or, in Python, what such a function would return.
        seed: of the random numbers that a loader draws.
        flag: names ``data`` in errors.
        in_order: a dataset as it stands, and not shuffled.

    Raises:
        UsageError: the data cannot be read, or the model cannot take it.
    """
    if data is None:
        return model
    made = isinstance(data, PythonValue) or (":" in data and not os.path.exists(data))
    found: Any = _made_by(data, flag) if made else _text_of(model, str(data), flag)
    where = f"{flag} {data}"
    needed = {name for block in model.blocks for name in block.samples}
    names = [name for name in model.batch(1, 0, 0) if name in needed]
    if not _is_dataset(found):
        return replace(model, batch=_Loaded(found, names, where, seed), made_up=False)
    if len(found) < 1:
        raise UsageError(f"{where} has no sample; a text needs a token more than the model's sequence")
    if not isinstance(found[0], Mapping):
        found = _Named(found, names, where)
    _require_names(model, found[0], where)
    return replace(model, batch=_InOrder(found) if in_order else _Shuffled(found), made_up=False)


def require_mini_batches(model: Model, num_samples: int) -> None:
    """Refuse a loader whose mini-batches have another size than the plan's. Raises UsageError."""
    if isinstance(model.batch, _Loaded):
        model.batch.require_size(num_samples)


def num_mini_batches(model: Model, num_samples: int, most: int | None, flag: str) -> int:
    """How many mini-batches the data of :func:`with_data` has, whole ones, and ``most`` at most. Raises UsageError."""
    source = model.batch
    try:
        held = len(source) if isinstance(source, _Loaded) else len(source.dataset) // num_samples  # type: ignore[attr-defined]
    except TypeError:
        if most is None:
            raise UsageError(f"{flag} does not know how many mini-batches it has; give --eval-batches") from None
        return most
    if not held:
        raise UsageError(f"{flag} has fewer samples than a mini-batch of the plan, which has {num_samples}; give more")
    return held if most is None else min(held, most)


def digest_of(model: Model, batch: Mapping[str, Tensor]) -> int | None:
    """What ranks compare of a loader's mini-batch, which they each have from their own; None of anything else."""
    if not isinstance(model.batch, _Loaded):
        return None
    digest = 0
    for name, tensor in sorted(batch.items()):
        digest = zlib.crc32(f"{name} {list(tensor.shape)}".encode(), digest)
        digest = zlib.crc32(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data, digest)
    return digest


def _is_dataset(found: object) -> bool:
    return isinstance(found, Sized) and hasattr(found, "__getitem__")


def fingerprint(model: Model, data: Name | None) -> str | None:
    """What distinguishes the data of :func:`with_data`, for people to read; None if the model makes it up.

    Name without folders, number of samples, size of a file, and a hash: of a file's content, or of its first and last
    MiB where it has 64 MiB or more; of a dataset's first and last items. Raises UsageError.
    """
    if data is None:
        return None
    if isinstance(model.batch, _Loaded):
        return f"{data} (sha256 of the first sample {_digest(_bytes_of(model.batch(1, 0, 0)))})"
    if not isinstance(model.batch, _Shuffled):
        return None
    dataset = model.batch.dataset
    count = f"{len(dataset)} samples"
    if not isinstance(dataset, _Windows):
        return f"{data} ({count}, sha256 {_digest(_bytes_of(dataset[0]) + _bytes_of(dataset[len(dataset) - 1]))})"
    size, content = _content(str(data))
    return f"{Path(str(data)).name} ({count}, {size} bytes, sha256 {_digest(content)})"


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


def _made_by(path: Name, flag: str) -> Any:
    """A dataset, or a loader."""
    found = found_at(path, flag)
    made = made_by(path, flag) if callable(found) and not _is_dataset(found) else found
    if not _is_dataset(made) and not isinstance(made, Iterable):
        said = "is" if made is found else "returned"
        raise UsageError(
            f"{flag} {str(path)!r} {said} {type(made).__name__}; give a dataset with a length and items, "
            "or a DataLoader"
        )
    return made


def _require_names(model: Model, item: Mapping[str, Any], where: str) -> None:
    needed = {name for block in model.blocks for name in block.samples}
    if not isinstance(item, Mapping) or not needed <= set(item):
        found = sorted(item) if isinstance(item, Mapping) else type(item).__name__
        raise UsageError(f"{where}: an item is {found}, and model {model.name!r} takes tensors named {sorted(needed)}")


def _text_of(model: Model, data: str, flag: str) -> _Windows:
    if model.texts is None:
        raise UsageError(
            f"{flag} {data}: model {model.name!r} takes no texts; give pkg.mod:factory, which makes a dataset"
        )
    where = f"{flag} {data}"
    return _Windows(_tokens(data, model.texts.vocabulary, where), model.texts, where)


def _tokens(data: str, vocabulary: int, where: str) -> np.ndarray[Any, Any]:
    """All tokens of a text, in memory only as far as they are read where the file has tokens."""
    if data == "builtin":
        return _numbered(builtin_text().encode(), vocabulary, where)
    path = Path(data)
    try:
        if path.suffix == ".npy":
            return _require_tokens(np.load(path, mmap_mode="r", allow_pickle=False), where)
        if path.suffix == ".bin":
            return np.memmap(path, dtype=np.uint16 if vocabulary <= _UINT16 else np.uint32, mode="r")
        return _numbered(path.read_bytes(), vocabulary, where)
    except (OSError, ValueError) as error:
        raise UsageError(f"{where} cannot be read: {error}") from error


def _require_tokens(found: np.ndarray[Any, Any], where: str) -> np.ndarray[Any, Any]:
    if found.ndim != 1 or found.dtype not in (np.uint16, np.uint32):
        raise UsageError(f"{where} has {found.dtype}{list(found.shape)}; tokens are a row of uint16 or uint32")
    return found


def _numbered(text: bytes, vocabulary: int, where: str) -> np.ndarray[Any, Any]:
    """Bytes as tokens; where the vocabulary is smaller than that, the bytes that the text has, numbered."""
    tokens = np.frombuffer(text, dtype=np.uint8)
    if vocabulary >= _BYTES:
        return tokens
    known, numbers = np.unique(tokens, return_inverse=True)
    if len(known) > vocabulary:
        raise UsageError(
            f"{where} has {len(known)} different bytes, and the model's vocabulary {vocabulary} words; give "
            "tokens as .npy or .bin, or a model with 256 words or more"
        )
    return numbers
