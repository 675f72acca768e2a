"""The language of rules (FlexPipe, sections 4 and 5.2): how a device picks among the actions that could run next.

A schedule is what falls out when every device, whenever it is free, picks by these rules. The objects here say *what*
the rules are; :mod:`pipeplan.schedule.rules.engine` runs them, :mod:`pipeplan.schedule.rules.files` reads them from a
file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Literal, Protocol, Self, get_args

from pipeplan.errors import PipeplanError, UsageError
from pipeplan.model.action import is_instruction_word
from pipeplan.model.elements import Attribute
from pipeplan.schedule.rules.numbers import Number, check_number, shown

__all__ = [
    "Candidate",
    "Check",
    "DeviceRules",
    "Direction",
    "First",
    "Instruction",
    "Limit",
    "Ready",
    "Rules",
    "Settings",
    "StageOrder",
    "StageTraversal",
    "State",
    "SubmoduleRules",
    "TypeOrder",
    "TypeTraversal",
    "naming",
]


@dataclass(frozen=True, slots=True)
class Candidate:
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

    def steps(self, device: int) -> int:
        """Actions that a device has started (Fig. 7's ``get_stepnum(pipeid)``)."""

    def step_of(self, kind: str, stage: int, microbatch: int) -> int | None:
        """When an action started, as :attr:`now` counts; None if it has not (Fig. 7's ``get_stepnum``)."""

    def in_flight(self, stage: int) -> int:
        """Micro-batches of a stage between the start of their forward and the start of their backward (B or I)."""

    def stages_on(self, device: int) -> Sequence[int]:
        """The stages of a device, in order."""

    def ready(self, device: int, kind: str) -> Sequence[Candidate]:
        """The next ready action of each of the device's stages for one kind, in the order of the stages."""


Check = Callable[[State, Candidate], bool]
"""Whether a device may start an action now (FlexPipe's ``cfunc``, Fig. 7 (i) and (ii))."""

TypeOrder = Callable[[State, int], Sequence[str]]
"""The kinds in the order in which a device tries them now (Fig. 7 (iii), for the first priority)."""

StageOrder = Callable[[State, Sequence[Candidate]], "Candidate | None"]
"""Which of the ready actions of one kind, one per stage, a device takes; None for none (Fig. 7 (iii), the second)."""

Ready = Callable[[int, int, int, int, int], bool]
"""Whether an action may run when so many of another operation are done: see :class:`Instruction`."""

First = Literal["bwd-first", "fwd-first", "interleaved"]
Direction = Literal["breadth-first", "depth-first"]

Limit = Number | tuple[Number, ...]
"""One number for all, or one for each stage (or device) of the submodule in order."""


@dataclass(frozen=True, slots=True)
class TypeTraversal:
    """Computation-type traversal priority: which kind a device tries first (Table 2).

    ``interleaved`` takes the other kind when ``forward_unit`` forwards (``backward_unit`` backwards) in a row have run.
    The others stay with a kind they have begun until its unit is full, then go back to their first. What is not allowed
    gives way to the next kind; what is not ready, too, unless the device is to ``wait`` for what goes first.
    """

    first: First | TypeOrder = "bwd-first"
    forward_unit: Number = 1
    backward_unit: Number = 1
    wait: bool = False

    def __post_init__(self) -> None:
        _require("first", self.first, get_args(First))
        check_number("forward_unit", self.forward_unit, 1)
        check_number("backward_unit", self.backward_unit, 1)


@dataclass(frozen=True, slots=True)
class StageTraversal:
    """Stage traversal priority: which stage of a device goes first among the ready actions of one kind (Table 2).

    ``breadth-first`` prefers the stage at the front of the model, ``depth-first`` the one at its end. With an
    ``interval`` a stage keeps its turn for so many actions; then the turn goes to the next stage in that direction,
    round and round. Whose turn it is is waited for, while other kinds may run; who is not allowed loses the turn.
    On unit steps a stage starts at most one action in ``every`` steps.
    """

    direction: Direction | StageOrder = "breadth-first"
    interval: Number | None = None
    every: Number | None = None

    def __post_init__(self) -> None:
        _require("direction", self.direction, get_args(Direction))
        for key in ("interval", "every"):
            if getattr(self, key) is not None:
                check_number(key, getattr(self, key), 1)


@dataclass(frozen=True, slots=True)
class Settings:
    """Rules that may differ from device to device and from submodule to submodule; None leaves them as they are.

    ``in_flight`` bounds, per stage, the micro-batches between their forward and their backward (B or I);
    ``in_flight_device`` the sum over a device's stages (Fig. 7 (i)), stages of all devices left out;
    ``in_flight_shared`` is the bound per stage for stages that stand on all devices of their submodule.
    Where backward is split, a device's oldest W runs as soon as more than ``weights_late`` are owed there, at once
    by default; ``weights_fill`` lets it run whenever the device had to wait.
    """

    types: TypeTraversal | None = None
    forward: StageTraversal | None = None
    backward: StageTraversal | None = None
    in_flight: Limit | None = None
    in_flight_device: Limit | None = None
    in_flight_shared: Limit | None = None
    weights_late: Number | None = None
    weights_fill: bool | None = None

    def __post_init__(self) -> None:
        for key in ("in_flight", "in_flight_device", "in_flight_shared"):
            _check_limit(key, getattr(self, key))
        if self.weights_late is not None:
            check_number("weights_late", self.weights_late, 0)

    @property
    def places_weights(self) -> bool:
        """Whether these settings say when weight gradients run."""
        return self.weights_late is not None or self.weights_fill is not None

    def under(self, other: Settings) -> Settings:
        """These settings, and wherever ``other`` says something, that."""
        names = [each.name for each in fields(Settings)]
        said = {name: getattr(other, name) for name in names if getattr(other, name) is not None}
        return replace(Settings(**{name: getattr(self, name) for name in names}), **said)


@dataclass(frozen=True, slots=True)
class DeviceRules(Settings):
    """Settings of some devices (FlexPipe's ``set_cttp_for_actor``, ``set_stp_for_actor``)."""

    devices: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        if not self.devices:
            raise UsageError("devices is empty; name the devices the rules are for")


@dataclass(frozen=True, slots=True)
class SubmoduleRules(Settings):
    """Settings of the stages whose first block's name matches a pattern such as ``image.*`` (FlexPipe's modalities).

    ``placement``, ``chunks`` and ``devices`` (the first, and the one behind the last) say where they stand, where the
    rules place the model.
    """

    blocks: str = "*"
    placement: str | None = None
    chunks: int | None = None
    devices: tuple[Number, Number] | None = None

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        _check_chunks(self.chunks, self.placement)
        if self.devices is not None and self.placement is None:
            raise UsageError("devices is for the placement of the submodule; give it one, or leave out devices")
        for number in self.devices or ():
            check_number("devices", number, 0)


@dataclass(frozen=True, slots=True)
class Instruction:
    """An operation of a new kind (section 4.2). Ready ones go before forwards and backwards, or if ``last``, after.

    It runs once for ``every`` micro-batches (FlexPipe's ``sched_unit``) on all ``devices``, behind the operations
    ``after`` it stands and before those it stands ``before``. These are stages by number, or by the names of their
    blocks, which may be patterns: of the stages that match ``image.*`` the last ones come first and the first ones come
    behind. They mean forwards; ``2B`` and ``GATHER`` mean that backward and that instruction. Without ``devices`` it
    runs on those of all of them, with ``before`` on those of what it stands before.

    It takes ``duration_ns``, or what the cluster needs to all-gather ``bytes_per_sample`` there (of all samples of its
    micro-batches). ``attributes`` are what its function is told (``inst_attr``).

    ``check_prev`` and ``check_next`` (Fig. 6) say otherwise than by samples when an action is ready:
    ``check_prev(stage, done, own stage, own micro-batch, every)`` whether it may run when so many actions of what
    stands before it are done, ``check_next(own stage, done, stage, micro-batch, every)`` the same for what follows.
    """

    kind: str
    last: bool = False
    after: tuple[int | str, ...] = ()
    before: tuple[int | str, ...] = ()
    devices: tuple[int, ...] | Literal["before"] = ()
    every: int = 1
    duration_ns: int | None = None
    bytes_per_sample: int = 0
    attributes: Mapping[str, Attribute] = field(default_factory=dict, hash=False)
    check_prev: Ready | None = None
    check_next: Ready | None = None

    def __post_init__(self) -> None:
        if not is_instruction_word(self.kind):
            raise UsageError(
                f"instruction {shown(self.kind)}: a kind is a word of 3 to 24 capital letters other than SEND and RECV"
            )
        if not self.after:
            raise UsageError(f"instruction {self.kind}: after is empty; name the stages or blocks it waits for")
        for key, value, least in (("every", self.every, 1), ("bytes_per_sample", self.bytes_per_sample, 0)):
            if value < least:
                raise UsageError(f"instruction {self.kind}: {key} is {value}; it must be at least {least}")
        if self.duration_ns is not None and self.bytes_per_sample:
            raise UsageError(
                f"instruction {self.kind}: duration and bytes_per_sample both say how long it takes; leave out one"
            )


@dataclass(frozen=True, slots=True)
class Rules(Settings):
    """A schedule in a few words.

    ``time`` is ``unit`` (every action takes one step, as in the paper) or ``true`` (as long as it takes). ``separate``
    asks for gradient separation: the rules see every backward whole, then its parts are put where they fit.
    ``fit_memory`` asks that no forward starts that its device has no room for. With ``shared_first`` stages on several
    devices go before all others, the first that is ready first, and a first stage only when the one behind it could go
    on at once (Tessel's 1F1B+). ``placement`` and ``chunks`` say where the stages stand unless the search is told
    otherwise. ``checks`` must all agree before an action starts.
    """

    name: str = "rules"
    time: Literal["unit", "true"] = "unit"
    separate: bool = False
    fit_memory: bool = False
    shared_first: bool = False
    placement: str | None = None
    chunks: int | None = None
    devices: tuple[DeviceRules, ...] = ()
    submodules: tuple[SubmoduleRules, ...] = ()
    instructions: tuple[Instruction, ...] = ()
    checks: tuple[Check, ...] = ()

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        _require("time", self.time, ("unit", "true"))
        if self.time == "true" and any(_paces(each) for each in (self, *self.devices, *self.submodules)):
            raise UsageError("every counts steps, and with time = 'true' there are none; leave out one of them")
        late = next((each for each in (self, *self.devices, *self.submodules) if each.places_weights), None)
        if self.separate and late is not None:
            raise UsageError("weights are placed by separate = true; leave out that, or late and fill")
        _check_chunks(self.chunks, self.placement)
        _require_different("device", [device for each in self.devices for device in each.devices])
        _require_different("submodule", [each.blocks for each in self.submodules])

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


def _paces(settings: Settings) -> bool:
    """Whether some stages' actions are to start so many steps apart."""
    return any(each is not None and each.every is not None for each in (settings.forward, settings.backward))


def _require(key: str, value: object, choices: Sequence[str]) -> None:
    if not callable(value) and value not in choices:
        raise UsageError(f"{key} is {shown(value)}; choose from {', '.join(choices)}")


def _check_chunks(chunks: int | None, placement: str | None) -> None:
    if chunks is None:
        return
    check_number("chunks", chunks, 1)
    if placement is None:
        raise UsageError(f"chunks = {chunks} is for a placement; add placement = 'circular', say, or leave out chunks")


def _require_different(key: str, named: Sequence[object]) -> None:
    """Nothing is named twice, so that its settings are said in one place."""
    for index, each in enumerate(named):
        if each in named[:index]:
            raise UsageError(f"{key}: there are rules for {shown(each)} twice; put them into one table [[{key}]]")


def _check_limit(key: str, limit: Limit | None) -> None:
    """Limits are 0 or more here; one below 1 is refused where the actions that it stops are known."""
    if isinstance(limit, tuple):
        for index, number in enumerate(limit):
            check_number(f"{key}[{index}]", number, 0)
    elif limit is not None:
        check_number(key, limit, 0)
