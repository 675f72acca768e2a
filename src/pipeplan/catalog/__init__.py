"""Data: devices, clusters, models, scheduling rules, recipes of training state, targets; and reading it.

Here: one file per member, in a folder per kind, listed and read with only the standard library and ``errors``, so
that every room can use them. Not here: what the data means, and code of any other kind; that lives in the rooms that
read it.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

from pipeplan.errors import FileError, unknown_key
from pipeplan.texts import problems_of

__all__ = [
    "RUNNING_FAMILIES",
    "ExportTarget",
    "ModelSize",
    "NamedConfiguration",
    "configurations",
    "export_target",
    "model_sizes",
    "names",
    "read_table",
    "read_text",
    "require_known",
    "running_models",
]


def names(folder: str) -> tuple[str, ...]:
    """The names of a folder's files, without their suffix, in alphabetical order."""
    return tuple(_files(folder))


def read_text(folder: str, name: str) -> str:
    """A file's text; ``name`` is one of :func:`names`."""
    return _files(folder)[name].read_text(encoding="utf-8")


def read_table(folder: str, name: str) -> dict[str, Any]:
    """What a file holds; ``name`` is one of :func:`names`. Raises ValueError where a text is not printable."""
    is_json = _files(folder)[name].name.endswith(".json")
    table: dict[str, Any] = (json.loads if is_json else tomllib.loads)(read_text(folder, name))
    for place, problem in problems_of(table):
        raise ValueError(f"catalog/{folder}/{name}: {place}: {problem}")
    return table


def require_known(table: Mapping[str, Any], kind: Any, where: str) -> None:
    """Refuse keys that are no fields of a dataclass. Raises FileError."""
    problem = unknown_key(table, [each.name for each in fields(kind) if each.init])
    if problem is not None:
        raise FileError(f"{where}: {problem}")


@cache
def _files(folder: str) -> Mapping[str, Traversable]:
    """{name: file}"""
    found = {}
    for file in (files("pipeplan.catalog") / folder).iterdir():
        name, _, suffix = file.name.rpartition(".")
        if suffix in ("json", "toml"):
            found[name] = file
    return dict(sorted(found.items()))


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A model by the dimensions of its family; which these are, and their units, the family's class says.

    ``reference`` is where a paper gives them, empty for models of ours that are only to be run; ``notes`` say what the
    paper leaves open, ``microbatch_sizes`` and ``device`` what an example has costs for unless it is asked for others.
    """

    name: str
    family: str
    dimensions: Mapping[str, Any]
    reference: str = ""
    notes: str = ""
    microbatch_sizes: Sequence[int] = (1, 2, 4)
    device: str = "a100-80gb"


RUNNING_FAMILIES = (
    "gpt",
    "gpt-experts",
    "encoder-decoder",
    "flava",
    "mmt",
    "dlrm",
    "candle-uno",
    "vgg-operators",
    "wide-resnet-operators",
    "lstm-operators",
)
"""Families of models that can be run, too, by the zoo; the others are only profiles."""


@cache
def model_sizes() -> Mapping[str, ModelSize]:
    """Every model by name."""
    tables = _tables(read_table("models", file) for file in names("models"))
    return {name: _model_size(name, keys) for name, keys in tables.items()}


def running_models() -> list[str]:
    """The models that can be run by name alone: the zoo's, and networks."""
    zoo = [name for name, size in model_sizes().items() if size.family in RUNNING_FAMILIES]
    return [*zoo, *networks()]


@dataclass(frozen=True, slots=True)
class CapturedNetwork:
    """A network that is captured whole, and only for inference: ``input`` is the shape of a sample.

    ``source`` is where its layers stand, ``parameters`` how many numbers those are.
    """

    name: str
    source: str
    parameters: int
    input: Sequence[int]


@cache
def networks() -> Mapping[str, CapturedNetwork]:
    """Every network by name."""
    tables = _tables(read_table("networks", file) for file in names("networks"))
    return {name: CapturedNetwork(name, **keys) for name, keys in tables.items()}


def _tables(files: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The tables of some files by name. Keys before a file's first table apply to all of its tables."""
    found: dict[str, dict[str, Any]] = {}
    for file in files:
        common = {key: value for key, value in file.items() if not isinstance(value, dict)}
        found |= {name: common | own for name, own in file.items() if isinstance(own, dict)}
    return found


def _model_size(name: str, keys: Mapping[str, Any]) -> ModelSize:
    known = {each.name for each in fields(ModelSize)}
    dimensions = {key: value for key, value in keys.items() if key not in known}
    return ModelSize(name, dimensions=dimensions, **{key: value for key, value in keys.items() if key in known})


@dataclass(frozen=True, slots=True)
class NamedConfiguration:
    """A well-known model: its configuration's class in transformers with ``arguments``, and where they are published.

    ``parameters`` are as many as it is published with.
    """

    config: str
    arguments: Mapping[str, Any]
    parameters: int
    source: str

    @property
    def text(self) -> str:
        """The text of the command line."""
        return f"{self.config}({', '.join(f'{key}={value!r}' for key, value in self.arguments.items())})"


@cache
def configurations() -> Mapping[str, NamedConfiguration]:
    """Every well-known model that has a configuration, by name. Raises FileError."""
    found = {}
    for name, keys in _tables(read_table("configurations", file) for file in names("configurations")).items():
        require_known(keys, NamedConfiguration, f"configurations: {name}")
        found[name] = NamedConfiguration(**keys)
    return found


@dataclass(frozen=True, slots=True)
class ExportTarget:
    """What another tool can run: what a plan exported to it may have. Stages are whole layers, micro-batches whole.

    ``placements`` are None where stages may stand anywhere; ``schedules`` are names by placement, None where orders of
    one's own are read; ``most_chunks`` by placement where they are limited; ``source`` says where that is known from.
    With ``whole_groups`` virtual stages need as many micro-batches as ranks, or a multiple; with ``ends_apart`` a stage
    may have a model's beginning or end and no layer. ``zero`` are the levels that replicas may divide state by, in
    groups of some of them where there are ``zero_groups``, and ``zero_why`` says it; ``recompute`` are the kinds of
    recomputation ("all" and "selective"), which layers have ``by_layer`` each as it is best, or all the same, or with
    ``first_layers`` the first few of each stage; ``experts`` says that devices may share experts,
    ``expert_shards`` how many may split each: "any" number, 1 or as many as "shards" split all else, or else 1.
    ``layer_list`` is how it is told the number of layers of each stage, which stand for ``{}``; ``names`` are the
    modules that have a model's beginning, its layer N, and its end, where it has names; ``tied`` says what becomes of a
    table that stages on several ranks share, and ``sums_tied`` whether its gradients are summed as a plan has it.
    It needs a ``folder`` of files, or one file. ``names_everywhere`` are modules that every stage has, too; with
    ``top_level`` all are children of the model, or items of lists that are. A server's cache has blocks of
    ``cache_block_tokens`` tokens; 0 of single ones.
    """

    title: str
    source: str
    placements: Sequence[str] | None = None
    schedules: Mapping[str, Sequence[str]] | None = None
    most_chunks: Mapping[str, int] = field(default_factory=dict)
    split_backward: bool = False
    trains: bool = True
    layer_list: str | None = None
    separator: str = ","
    names: Sequence[str] = ()
    tied: str = ""
    sums_tied: bool = False
    folder: bool = False
    top_level: bool = False
    names_everywhere: Sequence[str] = ()
    whole_groups: bool = False
    ends_apart: bool = False
    zero: Sequence[int] = (0,)
    zero_groups: bool = False
    zero_why: str = ""
    recompute: Sequence[str] = ()
    by_layer: bool = False
    first_layers: bool = False
    experts: bool = False
    expert_shards: str = ""
    cache_block_tokens: int = 0

    @property
    def schedule_names(self) -> list[str]:
        """The schedules that it runs, wherever stages are; none where orders of one's own are read."""
        return [name for names in (self.schedules or {}).values() for name in names]


def export_target(name: str) -> ExportTarget:
    """An export target; ``name`` is one of ``names("targets")``."""
    table = read_table("targets", name)
    require_known(table, ExportTarget, f"{name}.toml")
    return ExportTarget(**table)
