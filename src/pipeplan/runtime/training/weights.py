"""Weights in and out: one safetensors file with the module's own names, whatever plan reads or writes it.

Every rank reads only its slices, and writes its own into one file, so that no process holds the whole model. All ranks
see the file under one path, as they do checkpoints. safetensors reads; it writes only what lies in one process's
memory, so the file is laid out here: eight bytes with the length of a JSON header, the header, then the tensors.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeplan.errors import UsageError
from pipeplan.files.read_write import temporary_beside
from pipeplan.runtime.executor.process_groups import AllRanks
from pipeplan.runtime.models.spec import Model
from pipeplan.runtime.training.checkpoint import ParameterChunk
from pipeplan.runtime.training.weight_files import OpenWeights, names_there, opened
from pipeplan.texts import shown_key

Holder = tuple[str, str]
"""A block, and the name of a parameter or buffer there."""

_FORMATS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""Formats as safetensors calls them."""

Held = Iterable[tuple[str, Sequence[ParameterChunk]]]
"""Tensors that a rank has, or parts of them, by their names in the file."""

_SHOWN = 3
_ALIGNED = 8


@dataclass(frozen=True, slots=True)
class TensorForm:
    """What a file says of a tensor before its numbers."""

    format: str
    shape: tuple[int, ...]

    @property
    def text(self) -> str:
        """In a word."""
        return f"{self.format}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class WeightNames:
    """The tensors of a model's file by name, names in a file that mean the same, and whose tensors they are."""

    forms: Mapping[str, TensorForm]
    aliases: Mapping[str, str]
    name_of: Mapping[Holder, str]

    @classmethod
    def of(cls, model: Model, dtype: torch.dtype) -> WeightNames:
        """Those of a model whose parameters have this format. Nothing is made of the tensors but their shapes."""
        first = {holder: group[0] for group in model.tied for holder in group}
        named: dict[Holder, str] = {}
        forms: dict[Holder, TensorForm] = {}
        same: dict[Holder, Holder] = {}
        for block in model.blocks:
            with torch.device("meta"):
                state = block.build().state_dict(keep_vars=True)
            seen: dict[int, Holder] = {}
            for own, tensor in state.items():
                name = f"{block.id}.{own}" if block.names is None else block.names.get(own)
                if name is None:  # a buffer that the module itself does not keep
                    continue
                holder = block.id, own
                found = seen.setdefault(id(tensor), holder)
                same[holder] = first.get(holder, first.get(found, found))
                format_ = _FORMATS[dtype if tensor.is_floating_point() else tensor.dtype]
                named[holder], forms[holder] = name, TensorForm(format_, tuple(tensor.shape))
        name_of = {holder: named[same[holder]] for holder in named}
        aliases = {named[each]: name_of[each] for each in named if named[each] != name_of[each]}
        return cls({name_of[each]: forms[same[each]] for each in named}, {**model.aliases, **aliases}, name_of)


# In ---------------------------------------------------------------------------------------------------------------


def read_weights(path: str, names: WeightNames, model: str, held: Held) -> None:
    """Fill a rank's tensors, by their names in the files, with its slices of what is there.

    Numbers of narrower formats are read as they are.

    Raises:
        UsageError: the files cannot be read, or have not exactly the model's tensors; the same on every rank.
    """
    with opened(path) as files:
        there, others = names_there(files.file_of, names.forms, names.aliases)
        found = {name: _form(files.stored(own)) for name, own in there.items()}
        if problems := list(_problems(found, names.forms, others)):
            raise UsageError(f"--init {path}: does not fit model {model!r}: {'; '.join(problems)}")
        with torch.no_grad():
            for name, pieces in held:
                for piece in pieces:
                    piece.tensor.copy_(_slice(files, there[name], piece))


def _form(stored: Any) -> TensorForm:
    return TensorForm(stored.get_dtype(), tuple(stored.get_shape()))


def _slice(files: OpenWeights, name: str, piece: ParameterChunk) -> Tensor:
    if piece.tensor.shape == piece.size:
        whole: Tensor = files.whole(name)
        return whole
    ends = zip(piece.offsets, piece.tensor.shape, strict=True)
    part: Tensor = files.stored(name)[tuple(slice(begin, begin + size) for begin, size in ends)]
    return part


_WIDER = {"BF16": ("F32", "F64"), "F16": ("F32", "F64"), "F32": ("F64",)}
"""Formats that have every number of another: what is read is the same in them."""


def _problems(
    found: Mapping[str, TensorForm], wanted: Mapping[str, TensorForm], others: Sequence[str]
) -> Iterator[str]:
    """What does not fit: how many tensors, and the first of them; ``others`` are none of the model's."""
    both = [name for name in wanted if name in found]
    shapes = [name for name in both if found[name].shape != wanted[name].shape]
    formats = [
        name
        for name in both
        if wanted[name].format not in (found[name].format, *_WIDER.get(found[name].format, ())) and name not in shapes
    ]
    yield from _listed("missing", [name for name in wanted if name not in found])
    yield from _listed("not in the model", list(map(shown_key, others)))
    yield from _listed(
        "of another shape", [f"{each}: {list(found[each].shape)}, not {list(wanted[each].shape)}" for each in shapes]
    )
    yield from _listed(
        "of another format (see --dtype)",
        [f"{each}: {found[each].format}, not {wanted[each].format}" for each in formats],
    )


def _listed(what: str, names: Sequence[str]) -> Iterator[str]:
    if names:
        more = ", ..." if len(names) > _SHOWN else ""
        yield f"{len(names)} tensor{'s' * (len(names) > 1)} {what} ({', '.join(names[:_SHOWN])}{more})"


# Out --------------------------------------------------------------------------------------------------------------


def write_weights(
    path: str,
    names: WeightNames,
    held: Held,
    all_ranks: AllRanks,
    rank: int,
) -> str:
    """Write all ranks' tensors, each of which one rank has to write, as one file. Collective.

    The file is written beside its place, or where there is room, and renamed. Returns why it is not where it should be,
    and where it is then; nothing if all went well.
    """
    header, places = _layout(names.forms)
    temporary, problem = all_ranks.gather(_begin(path, header, places) if rank == 0 else ("", ""))[0]
    if not problem:
        problem = next(filter(None, all_ranks.gather(_write(temporary, len(header), places, held))), "")
        if rank == 0:
            problem = _abandoned(temporary, problem) if problem else _publish(temporary, path)
    problem = all_ranks.gather(problem)[0]
    return f"{path}: cannot be written: {problem}" if problem else ""


def _abandoned(temporary: str, problem: str) -> str:
    with contextlib.suppress(OSError):
        os.unlink(temporary)
    return problem


Places = Mapping[str, tuple[int, TensorForm]]
"""Where the numbers of every tensor begin, after the header."""


def _layout(forms: Mapping[str, TensorForm]) -> tuple[bytes, Places]:
    """The header of the file, and the offsets of tensors: widest number formats first, so that all are aligned."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    places, end = {}, 0
    for name in sorted(forms, key=lambda name: (-_width(forms[name]), name)):
        begin, end = end, end + _width(forms[name]) * math.prod(forms[name].shape)
        places[name] = begin, forms[name]
        entries[name] = {
            "dtype": forms[name].format,
            "shape": list(forms[name].shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNED)
    return len(text).to_bytes(8, "little") + text, places


def _width(form: TensorForm) -> int:
    return _dtype(form).itemsize


def _dtype(form: TensorForm) -> torch.dtype:
    return next(dtype for dtype, name in _FORMATS.items() if name == form.format)


def _begin(path: str, header: bytes, places: Places) -> tuple[str, str]:
    """Make the file with its header and room for all tensors: its name, or why it cannot be."""
    target = Path(path).resolve()
    size = len(header) + sum(_width(form) * math.prod(form.shape) for _, form in places.values())
    problem = ""
    for folder in (target.parent, Path(tempfile.gettempdir())):
        try:
            handle, temporary = temporary_beside(folder / target.name)
        except OSError as error:
            problem = problem or str(error)
            continue
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(header)
                file.flush()
                os.posix_fallocate(file.fileno(), 0, size)  # a full disk shows now, not in the middle
            return temporary, ""
        except OSError as error:
            os.unlink(temporary)
            problem = problem or str(error)
    return "", problem


def _write(temporary: str, start: int, places: Places, held: Held) -> str:
    """Put this rank's pieces where they belong; why it could not, if so."""
    try:
        size = os.path.getsize(temporary)
        file = torch.from_file(temporary, shared=True, size=size, dtype=torch.uint8)
        for name, pieces in held:
            begin, form = places[name]
            end = begin + _width(form) * math.prod(form.shape)
            for piece in pieces:
                numbers = piece.tensor.detach().cpu()
                whole = file[start + begin : start + end].view(_dtype(form)).view(form.shape)
                for dimension, (offset, length) in enumerate(zip(piece.offsets, piece.tensor.shape, strict=True)):
                    whole = whole.narrow(dimension, offset, length)
                whole.copy_(numbers)
    except (OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _publish(temporary: str, path: str) -> str:
    """Let the file have its name; why it could not, and where it is then."""
    target = Path(path).resolve()
    try:
        if target.exists():
            os.chmod(temporary, target.stat().st_mode & 0o777)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        return f"{error.strerror or error}; what was to be there is in {temporary}"
    return ""
