"""Which requests take part in which turn: they wait, take a place in a group, are read, written on, and leave.

Every rank keeps the same record, so that all know what comes without being told. A turn's place in it depends on what
was written before only where a word may end a text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Row:
    """What a request does in a pass: ``count`` words of its text, the first at ``begin``, enter the model.

    ``slot`` is its place in its group. After the last word of what is known of the text, ``writes``, comes a new one.
    """

    slot: int
    request: int
    begin: int
    count: int
    writes: bool


@dataclass(frozen=True, slots=True)
class Pass:
    """Rows of a group that go through the model together, each with up to ``width`` words, in order of their slots.

    One that ``reads`` is of prompts.
    """

    group: int
    width: int
    rows: tuple[Row, ...]
    reads: bool = False

    @property
    def slots(self) -> tuple[int, ...]:
        """Those of the rows."""
        return tuple(row.slot for row in self.rows)

    @property
    def writing(self) -> tuple[Row, ...]:
        """The rows of which a word comes."""
        return tuple(row for row in self.rows if row.writes)


@dataclass(slots=True)
class _TakenSlot:
    """A request in its slot: words that have entered the model, and how many have been written since the prompt."""

    request: int
    prompt: int
    entered: int = 0
    written: int = 0
    ended: bool = False


@dataclass(slots=True)
class RequestQueue:
    """The requests of a run, by their ``prompts`` of numbers, and the groups of ``sizes`` slots that serve them.

    Each is written on by ``new_words`` words, or until one of ``stop`` comes. A turn of a group is one pass in which
    prompts enter, up to ``chunk`` words of each at a time, and one in which texts that have entered are written on.
    With ``one_by_one`` a group's prompts enter one after another, as a plan has it that takes in a chunk beside every
    step.
    """

    prompts: Sequence[Sequence[int]]
    sizes: Sequence[int]
    new_words: int
    chunk: int
    stop: Sequence[int] = ()
    one_by_one: bool = False
    texts: list[list[int]] = field(init=False)
    _waiting: deque[int] = field(init=False)
    _slots: list[list[_TakenSlot | None]] = field(init=False)
    _turns: list[tuple[Pass, ...]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.texts = [list(prompt) for prompt in self.prompts]
        self._waiting = deque(range(len(self.prompts)))
        self._slots = [[None] * size for size in self.sizes]

    def turn(self, number: int) -> tuple[Pass, ...]:
        """The passes of turn ``number``, of group number % groups; with a ``stop`` all turns before the group's last
        one must have been told."""
        while len(self._turns) <= number:
            self._turns.append(self._next(len(self._turns) % len(self.sizes)))
        return self._turns[number]

    def ends_at(self, number: int) -> bool:
        """Whether nothing is left to do from this turn on."""
        self.turn(number)
        last = self._turns[max(0, number - len(self.sizes) + 1) : number + 1]
        return len(last) == len(self.sizes) and not any(last)

    def tell(self, row: Row, word: int) -> None:
        """The word that a row has written."""
        self.texts[row.request].append(word)
        if word in self.stop:
            for running in (each for slots in self._slots for each in slots):
                if running is not None and running.request == row.request:
                    running.ended = True

    def entering(self, row: Row) -> Sequence[int]:
        """The words that a row's request enters, which must have been told."""
        return self.texts[row.request][row.begin : row.begin + row.count]

    def written(self, request: int) -> list[int]:
        """What a request has been written on by."""
        return self.texts[request][len(self.prompts[request]) :]

    def _next(self, group: int) -> tuple[Pass, ...]:
        slots = self._slots[group]
        for place, running in enumerate(slots):
            if running is not None and (running.ended or running.written == self.new_words):
                slots[place] = None
            if slots[place] is None and self._waiting:
                request = self._waiting.popleft()
                slots[place] = _TakenSlot(request, len(self.prompts[request]))
        reading, writing = list[Row](), list[Row]()
        unread = [running.request for running in slots if running is not None and running.entered < running.prompt]
        for place, running in enumerate(slots):
            if running is None:
                continue
            if running.entered >= running.prompt:
                writing.append(self._row(place, running, is_read=False))
            elif not self.one_by_one or running.request == min(unread):
                reading.append(self._row(place, running, is_read=True))
        passes = ((self.chunk, reading, True), (1, writing, False))
        return tuple(Pass(group, width, tuple(rows), reads) for width, rows, reads in passes if rows)

    def _row(self, place: int, running: _TakenSlot, *, is_read: bool) -> Row:
        """A request's part of a turn. The first part of a prompt is the odd one, so that all end with whole ones."""
        begin = running.entered
        count = (running.prompt - begin - 1) % self.chunk + 1 if is_read else 1
        running.entered += count
        writes = running.entered >= running.prompt
        running.written += writes
        return Row(place, running.request, begin, count, writes)


def group_sizes(batch: int, groups: int) -> tuple[int, ...]:
    """[group] its slots: as even as can be, larger ones later."""
    return tuple(batch * (group + 1) // groups - batch * group // groups for group in range(groups))
