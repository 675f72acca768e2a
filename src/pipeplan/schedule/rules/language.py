"""The language of rules (FlexPipe, sections 4 and 5.2): how a device picks among the actions that could run next.

A schedule is what falls out when every device, whenever it is free, picks by these rules. The objects here say *what*
the rules are, in Python or in a TOML file; :mod:`pipeplan.schedule.rules.engine` runs them. Files are data from
strangers: reading one runs nothing and opens nothing else. A text in place of a table is its first key, so that
``types = "fwd-first"`` says the same as ``[types]`` with ``first = "fwd-first"``.
"""

from __future__ import annotations

import dataclasses
import math
import os
import tomllib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field, fields, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol, Self, TypeVar

import tomli_w
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    TypeAdapter,
    ValidationError,
)
from pydantic.dataclasses import dataclass

from pipeplan.catalog import names, read_text
from pipeplan.errors import FileError, PipeplanError, UsageError, choose_from
from pipeplan.files.read_write import read_bytes
from pipeplan.schedule.rules.given_order import actions_of
from pipeplan.schedule.rules.values import (
    BY_NAME,
    CountFromOne,
    CountFromZero,
    Limit,
    Samples,
    Stated,
    TableError,
    fields_of,
    in_units,
    reason_of,
    says,
    usage_errors,
)
from pipeplan.texts import on_one_line, problems_of, shown
from pipeplan.units import parse_bytes, parse_ns
from pipeplan.workload.action import is_instruction_word
from pipeplan.workload.elements import MAX_COUNT, MAX_DEVICES, MAX_TEXT, Attribute, Printable
from pipeplan.workload.kinds import Role

Name = Annotated[StrictStr, Printable(256, least=1)]
"""A text of a rules file."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReadyAction:
    """An action that a device could start: all that it depends on has been scheduled (and, in time, has arrived).

    ``microbatch`` is the number of the action among those of its stage and kind; ``task`` its number in the graph.
    """

    device: int
    kind: str
    stage: int
    microbatch: int
    task: int


class State(Protocol):
    """What user functions may ask. What others did in this step is not seen before the next (the local buffers)."""

    @property
    def now(self) -> int:
        """The step, or with ``time="true"`` the time in ns."""

    @property
    def num_devices(self) -> int:
        """How many devices the schedule has."""

    @property
    def num_microbatches(self) -> int:
        """How many micro-batches it is for."""

    def steps(self, device: int) -> int:
        """Actions that a device has started (Fig. 7's ``get_stepnum(pipeid)``)."""

    def step_of(self, kind: str, stage: int, microbatch: int) -> int | None:
        """When an action started, as :attr:`now` counts; None if it has not (Fig. 7's ``get_stepnum``)."""

    def in_flight(self, stage: int) -> int:
        """Micro-batches of a stage between the start of their forward and the start of their backward (B or I)."""

    def stages_on(self, device: int) -> Sequence[int]:
        """The stages of a device, in order."""

    def ready(self, device: int, kind: str) -> Sequence[ReadyAction]:
        """The next ready action of each of the device's stages for one kind, in the order of the stages."""


Check = Callable[[State, ReadyAction], bool]
"""Whether a device may start an action now (FlexPipe's ``cfunc``, Fig. 7 (i) and (ii))."""

TypeOrder = Callable[[State, int], Sequence[str]]
"""The kinds in the order in which a device tries them now (Fig. 7 (iii), for the first priority)."""

StageOrder = Callable[[State, Sequence[ReadyAction]], "ReadyAction | None"]
"""Which of the ready actions of one kind, one per stage, a device takes; None for none (Fig. 7 (iii), the second)."""

Ready = Callable[[int, int, int, int, int], bool]
"""Whether an action may run when a number of another operation are done: see :class:`CustomOp`."""

_Answer = TypeVar("_Answer")


def answer_of(what: str, function: Callable[..., _Answer], *arguments: object) -> _Answer:
    """What a user's function says; ``what`` it is begins errors.

    Raises:
        UsageError: it raises; with where in its code.
    """
    try:
        return function(*arguments)
    except PipeplanError:
        raise
    except Exception as error:
        ours = str(Path(__file__).parents[2])
        frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(ours)]
        where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
        raise UsageError(f"the {what} {name_of(function)} failed: {type(error).__name__}: {error}{where}") from error


def name_of(function: Callable[..., object]) -> str:
    """What a user's function is called."""
    return getattr(function, "__name__", repr(function))


First = Literal["bwd-first", "fwd-first", "interleaved"]
Direction = Literal["breadth-first", "depth-first"]

DeviceNumbers = Annotated[
    tuple[Annotated[StrictInt, Field(ge=0, le=MAX_DEVICES)], ...], says("write a list of device numbers")
]
Range = Annotated[
    tuple[CountFromZero, CountFromZero], says("write the first device and the one after the last: [0, 'D']")
]
Chunks = Annotated[StrictInt | None, Field(ge=1, le=MAX_COUNT)]


@usage_errors
@dataclass(config=BY_NAME, frozen=True)
class TypeTraversal(Stated):
    """Computation-type traversal priority: which kind a device tries first (Table 2).

    ``interleaved`` takes the other kind when ``forward_unit`` forwards (``backward_unit`` backwards) in a row have run.
    The others stay with a kind they have begun until its unit is full, then go back to their first. What is not allowed
    gives way to the next kind; what is not ready, too, unless the device is to ``wait`` for what goes first.
    """

    text_key: ClassVar[str] = "first"

    first: First | TypeOrder = "bwd-first"
    forward_unit: CountFromOne = 1
    backward_unit: CountFromOne = 1
    wait: StrictBool = False


@usage_errors
@dataclass(config=BY_NAME, frozen=True)
class StageTraversal(Stated):
    """Stage traversal priority: which stage of a device goes first among the ready actions of one kind (Table 2).

    ``breadth-first`` prefers the stage at the front of the model, ``depth-first`` the one at its end. With an
    ``interval`` a stage keeps its turn for that many actions; then the turn goes to the next stage in that direction,
    round and round. Whose turn it is is waited for, while other kinds may run; who is not allowed loses the turn.
    On unit steps a stage starts at most one action in ``every`` steps.
    """

    text_key: ClassVar[str] = "direction"

    direction: Direction | StageOrder = "breadth-first"
    interval: CountFromOne | None = None
    every: CountFromOne | None = None


@usage_errors
@dataclass(config=BY_NAME, frozen=True)
class Settings(Stated):
    """Rules that may differ from device to device and from submodule to submodule; None leaves them as they are.

    ``in_flight`` bounds, per stage, the micro-batches between their forward and their backward (B or I);
    ``in_flight_device`` the sum over a device's stages (Fig. 7 (i)), stages of all devices left out;
    ``in_flight_shared`` is the bound per stage for stages that stand on all devices of their submodule.
    Where backward is split, a device's oldest W runs as soon as more than ``weights_late`` are owed there, at once
    by default; ``weights_fill`` lets it run whenever the device had to wait. A function for ``first`` that returns W
    among its kinds places the W itself, unless ``weights_late`` is given.
    """

    types: TypeTraversal | None = None
    forward: StageTraversal | None = None
    backward: StageTraversal | None = None
    in_flight: Limit | None = None
    in_flight_device: Limit | None = None
    in_flight_shared: Limit | None = None
    weights_late: Annotated[CountFromZero | None, Field(alias="weights.late")] = None
    weights_fill: Annotated[StrictBool | None, Field(alias="weights.fill")] = None

    @property
    def places_weights(self) -> bool:
        """Whether these settings say when weight gradients run."""
        return self.weights_late is not None or self.weights_fill is not None

    @property
    def paces(self) -> bool:
        """Whether some stages' actions are to start a number of steps apart."""
        return any(each is not None and each.every is not None for each in (self.forward, self.backward))

    def under(self, other: Settings) -> Settings:
        """These settings, and wherever ``other`` says something, that."""
        both = {each.name: (getattr(self, each.name), getattr(other, each.name)) for each in fields(Settings)}
        return Settings(**{name: own if said is None else said for name, (own, said) in both.items()})


@usage_errors
@dataclass(config=BY_NAME, frozen=True)
class DeviceRules(Settings):
    """Settings of some devices (FlexPipe's ``set_cttp_for_actor``, ``set_stp_for_actor``)."""

    devices: DeviceNumbers = ()

    def __post_init__(self) -> None:
        if not self.devices:
            raise TableError("devices is empty; name the devices the rules are for")


@usage_errors
@dataclass(config=BY_NAME, frozen=True)
class SubmoduleRules(Settings):
    """Settings of the stages whose first block's name matches a pattern such as ``image.*`` (FlexPipe's modalities).

    ``placement``, ``chunks`` and ``devices`` (the first, and the one after the last) say where they stand, where the
    rules place the model, and ``microbatch_size`` how many samples each of their micro-batches has (FlexPipe's ``mbs``
    of a modality, its replicas together); None is the plan's. What comes after several submodules has the plan's.
    """

    text_key: ClassVar[str] = "blocks"

    blocks: Name = "*"
    placement: Name | None = None
    chunks: Chunks = None
    devices: Range | None = None
    microbatch_size: Samples | None = None

    def __post_init__(self) -> None:
        _require_placement(self.chunks, self.placement)
        for key in ("devices", "microbatch_size"):
            if getattr(self, key) is not None and self.placement is None:
                raise TableError(f"{key} is for the placement of the submodule; give it one, or leave out {key}")


def _require_placement(chunks: int | None, placement: str | None) -> None:
    if chunks is not None and placement is None:
        raise TableError(f"chunks = {chunks} is for a placement; add placement = 'circular', say, or leave out chunks")


def _word(text: str) -> str:
    if not is_instruction_word(text):
        raise ValueError("a kind is a word of 3 to 24 capital letters other than SEND and RECV")
    return text


def _listed(value: object) -> object:
    """A value that may be given without a list if it is alone."""
    return value if isinstance(value, list | tuple) else [value]


End = Annotated[
    Annotated[StrictInt, Field(ge=0, le=MAX_COUNT)] | Name, says("write a stage's number or the name of a block")
]
Ends = Annotated[tuple[End, ...], BeforeValidator(_listed)]


def _attributes(table: Mapping[str, Any]) -> Mapping[str, Attribute]:
    found = {key: tuple(each) if isinstance(each, list) else each for key, each in table.items()}
    stated = [each if isinstance(each, tuple) else (each,) for each in found.values()]
    if not all(_is_scalar(value) for values in stated for value in values):
        raise ValueError(
            f"attributes are texts of at most {MAX_TEXT} characters, finite numbers of 64 bits, booleans and lists of "
            "them"
        )
    for place, problem in problems_of(dict(table)):
        raise ValueError(f"{place} {problem}")
    return found


def _is_scalar(value: object) -> bool:
    if isinstance(value, int):
        return -(2**63) <= value < 2**63
    if isinstance(value, str):
        return len(value) <= MAX_TEXT
    return isinstance(value, float) and math.isfinite(value)


@usage_errors
@dataclass(config=BY_NAME, frozen=True)
class CustomOp(Stated):
    """An operation of a new kind (section 4.2). Ready ones go before forwards and backwards, or if ``last``, after.

    It runs once for ``every`` micro-batches (FlexPipe's ``sched_unit``) on all ``devices``, after the operations
    ``after`` it stands and before those it stands ``before``. These are stages by number, or by the names of their
    blocks, which may be patterns: of the stages that match ``image.*`` the last ones come first and the first ones come
    follows. They mean forwards; ``2B`` and ``GATHER`` mean that backward and that instruction. Without ``devices`` it
    runs on those of all of them, with ``before`` on those of what it stands before.

    It takes ``duration_ns``, or what the cluster needs to all-gather ``bytes_per_sample`` there (of all samples of its
    micro-batches). ``attributes`` are what its function gets (``inst_attr``).

    ``check_prev`` and ``check_next`` (Fig. 6) say otherwise than by samples when an action is ready:
    ``check_prev(stage, done, own stage, own micro-batch, every)`` whether it may run when this many actions of what
    stands before it are done, ``check_next(own stage, done, stage, micro-batch, every)`` the same for what follows.
    """

    text_key: ClassVar[str] = "kind"

    kind: Annotated[Name, AfterValidator(_word)]
    last: StrictBool = False
    after: Ends = ()
    before: Ends = ()
    devices: DeviceNumbers | Literal["before"] = ()
    every: Annotated[StrictInt, Field(ge=1, le=MAX_COUNT)] = 1
    duration_ns: Annotated[StrictInt | None, Field(alias="duration"), in_units(parse_ns)] = None
    bytes_per_sample: Annotated[StrictInt, Field(ge=0), in_units(parse_bytes)] = 0
    attributes: Annotated[Mapping[Name, Any], AfterValidator(_attributes)] = field(default_factory=dict, hash=False)
    check_prev: Annotated[Ready | None, Field(exclude=True)] = None
    check_next: Annotated[Ready | None, Field(exclude=True)] = None

    def __post_init__(self) -> None:
        if not self.after:
            raise TableError(f"after is empty; name the stages or blocks that {self.kind} waits for")
        if self.duration_ns is not None and self.bytes_per_sample:
            raise TableError(f"duration and bytes_per_sample both say how long {self.kind} takes; leave out one")


def _actions(value: object) -> object:
    """The actions of a device in one text, or in a list."""
    return tuple(value.replace(",", " ").split()) if isinstance(value, str) else value


DeviceOrder = Annotated[
    tuple[Name, ...],
    BeforeValidator(_actions),
    says("write the actions of each device, as in order = ['0F0 0F1 0B0 0B1', '1F0 1B0 1F1 1B1']"),
]
_PLACING = ("name", "placement", "chunks")


@usage_errors
@dataclass(config=BY_NAME, frozen=True)
class Rules(Settings):
    """A schedule, given by rules that pick each device's next action, or by the ``order`` of its actions.

    ``types`` says which kind a device tries first ("bwd-first", "fwd-first" or "interleaved"), ``forward`` and
    ``backward`` which of its stages goes first ("breadth-first" or "depth-first"), and ``in_flight`` how many
    micro-batches a stage may hold, such as ``"D - d"``: all as in a rules file.

    ``time`` is ``unit`` (every action takes one step, as in the paper) or ``true`` (as long as it takes). ``separate``
    asks for gradient separation: the rules see every backward whole, then its parts are put where they fit.
    ``fit_memory`` asks that no forward starts that its device has no room for. With ``shared_first`` stages on several
    devices go before all others, the first that is ready first, and a first stage only when the one after it could go
    on at once (Tessel's 1F1B+). ``placement`` and ``chunks`` say where the stages stand unless the search is given
    otherwise. ``checks`` must all agree before an action starts.

    ``order`` lists what each device runs, one action after another: texts such as ``0F0 0F1 0B0``, of stage, kind and
    micro-batch. Then only the placement of the stages may be given beside it.
    """

    name: Name = "rules"
    order: tuple[DeviceOrder, ...] = ()
    time: Literal["unit", "true"] = "unit"
    separate: StrictBool = False
    fit_memory: StrictBool = False
    shared_first: StrictBool = False
    placement: Name | None = None
    chunks: Chunks = None
    devices: Annotated[tuple[DeviceRules, ...], Field(alias="device")] = ()
    submodules: Annotated[tuple[SubmoduleRules, ...], Field(alias="submodule")] = ()
    instructions: Annotated[tuple[CustomOp, ...], Field(alias="instruction")] = ()
    checks: Annotated[tuple[Check, ...], Field(exclude=True)] = ()

    def __post_init__(self) -> None:
        everywhere = (self, *self.devices, *self.submodules)
        if self.time == "true" and any(each.paces for each in everywhere):
            raise TableError("every counts steps, and with time = 'true' there are none; leave out one of them")
        if self.separate and any(each.places_weights for each in everywhere):
            raise TableError("weights are placed by separate = true; leave out that, or late and fill")
        _require_placement(self.chunks, self.placement)
        more = next((key for key in _said(self) if key not in (*_PLACING, "order")), None) if self.order else None
        if more is not None:
            raise TableError(f"order says all that {more} would; leave out one of them")
        if self.order:
            actions_of(self.order)
        _require_different("device", [device for each in self.devices for device in each.devices])
        _require_different("submodule", [each.blocks for each in self.submodules])

    @property
    def names_devices(self) -> bool:
        """Whether something in them is for devices by their numbers, or a function, which may ask for these."""
        functions = any(callable(value) for each in (self, *self.submodules) for value in vars(each).values())
        return bool(self.order or self.devices or self.checks or functions)

    @property
    def splits_backward(self) -> bool:
        """Whether they say when weight gradients run apart from input gradients; functions may, too, unseen."""
        if self.order:
            return any(each.role is Role.WEIGHT_GRAD for actions in actions_of(self.order) for each in actions)
        return self.separate or any(each.places_weights for each in (self, *self.devices, *self.submodules))

    def but(self, **changes: object) -> Self:
        """The same rules with some changed."""
        return replace(self, **changes)  # type: ignore[arg-type]  # names are checked by the constructor

    def __str__(self) -> str:
        return self.name


@contextmanager
def naming(rules: Rules) -> Iterator[None]:
    """Lets errors that show only with the workload say which rules they are about."""
    try:
        yield
    except PipeplanError as error:
        raise type(error)(f"rules {shown(rules.name)}: {error}") from None


def _require_different(key: str, named: Sequence[object]) -> None:
    """No name occurs twice, so that its settings are in one place."""
    for index, each in enumerate(named):
        if each in named[:index]:
            raise TableError(f"{key}: there are rules for {shown(each)} twice; put them into one table [[{key}]]")


_MOST_CHARACTERS = 1_000_000


@cache
def shipped_rules() -> Mapping[str, str]:
    """{name: text} of the rules files that ship, by name."""
    return {name: read_text("rules", name) for name in names("rules")}


@cache
def named_rules(name: str) -> Rules:
    """Rules of the catalog.

    Raises:
        UsageError: there are none of this name.
    """
    if name not in shipped_rules():
        raise UsageError(f"there are no rules {name!r}, nor such a file; {choose_from(name, list(shipped_rules()))}")
    return parse_rules(shipped_rules()[name], name)


def read_rules(where: str) -> Rules:
    """The rules in a file, or those of the catalog with this name; ``-`` is stdin.

    Raises:
        FileError: the file cannot be read, or is no rules file; the text names the key.
        UsageError: there is neither a file nor an entry of the catalog.
    """
    if where != "-" and not os.path.exists(where):
        if Path(where).suffix:
            raise FileError(f"{where}: there is no such file; the rules that ship are {', '.join(shipped_rules())}")
        return named_rules(where)
    if Path(where).suffix == ".py":
        raise FileError(f"{where}: rules in Python are given by name: --rules {Path(where).stem}:NAME")
    try:
        text = read_bytes(where).decode()
    except UnicodeDecodeError as error:
        raise FileError(f"{where}: not readable as TOML: {error}") from None
    return parse_rules(text, "rules" if where == "-" else on_one_line(Path(where).stem)[:256], where)


def parse_rules(text: str, name: str, where: str | None = None) -> Rules:
    """The rules that a TOML text states; ``name`` unless it says another.

    Raises:
        FileError: the text is not TOML, or says something that the language does not know.
    """
    where = where or name
    if len(text) > _MOST_CHARACTERS:
        raise FileError(f"{where}: {len(text)} characters are more than the {_MOST_CHARACTERS} that rules may have")
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{where}: not readable as TOML: {error}") from None
    try:
        return TypeAdapter(Rules).validate_python({"name": name, **table}, context="a file")
    except ValidationError as error:
        raise FileError(f"{where}: not a valid rules file: {reason_of(error)}") from None


def to_toml(rules: Rules) -> str:
    """The text of a rules file with these rules; defaults are left out.

    Raises:
        UsageError: they have functions, which no file has.
    """
    return tomli_w.dumps(_said(rules))


_UNITS = {"duration_ns": "ns", "bytes_per_sample": "B"}


def _said(entry: Stated) -> dict[str, Any]:
    """{key: value} of what is not as it is without; of a table's first key, which says what it is, in any case."""
    said: dict[str, Any] = {}
    for name, info in fields_of(entry).items():
        value, key = getattr(entry, name), info.alias or name
        if value == info.get_default(call_default_factory=True) and name not in ("name", "first", "direction"):
            continue
        table, _, inner = key.rpartition(".")
        place = said.setdefault(table, {}) if table else said
        place[inner] = f"{value}{_UNITS[name]}" if name in _UNITS else _plain(value, key)
    return said


def _plain(value: Any, key: str) -> Any:
    if isinstance(value, Stated):
        return _said(value)
    if isinstance(value, tuple):
        return [_plain(each, key) for each in value]
    if callable(value):
        raise UsageError(f"{key} has a function, which a rules file cannot say; keep these rules in Python")
    return value
