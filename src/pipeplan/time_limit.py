"""Time limits: how long work may take, checked by every loop that may run long, on any thread.

A search holds a :class:`Limit` and asks it. Loops far below, which know of no search, call :func:`checkpoint`: it ends
them when the time of a limit that is enforced around them, on their own thread, is up.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import FrameType
from typing import TypeVar


class TimeUpError(Exception):
    """The time of a ``limit`` is up. It ends loops on the way to who set the limit, and no user sees it."""

    def __init__(self, limit: Limit) -> None:
        super().__init__(f"{limit.seconds:g} s are over")
        self.limit = limit


@dataclass(slots=True, eq=False)
class WorkClock:
    """Seconds that the process has worked, found out at most every two milliseconds: each time is a system call."""

    _seconds: float = field(default_factory=time.process_time, init=False)
    _until: float = field(default=-math.inf, init=False)

    def __call__(self) -> float:
        """Seconds since the process began, but for two milliseconds."""
        now = time.monotonic()
        if now > self._until:
            self._seconds, self._until = time.process_time(), now + _SAMPLED_S
        return self._seconds


_SAMPLED_S = 0.002


@dataclass(slots=True, eq=False)
class CountedClock:
    """Seconds that are counted, not measured: every question is one of ``each``, so that no machine is too slow.

    What ends by it ends at the same place everywhere. Whoever works without asking, as the solver does, is limited by
    what it counts itself, and charges that.
    """

    each: float
    seconds: float = 0.0

    def __call__(self) -> float:
        """What was counted, with this question."""
        self.seconds += self.each
        return self.seconds

    def charge(self, seconds: float) -> None:
        """Count what was worked without asking."""
        self.seconds += seconds


standard_clock: Callable[[], float] = time.monotonic
"""The clock of limits that are given none, and are no part of another."""


@dataclass(slots=True, eq=False)
class Limit:
    """A time limit, and the means to end work from another thread: by :meth:`interrupt`.

    Example: ``limit = Limit(60)``, then ``search(profile, devices=4, within=limit)`` on one thread and
    ``limit.interrupt()`` on another, at which the search ends with the best plan so far.

    Seconds from when it was made, or from when it ``started``, until it is interrupted; inf are no limit.

    It may be a part of a ``whole``, whose time it spends: what interrupts one of them interrupts both. ``reserved``
    seconds are kept for what must follow, ``patience`` more are waited for what must be there: enforcing ends work so
    much earlier, or later; and not before the process has worked as long as ``patient_until``, by
    :func:`time.process_time`, for which nobody waits more than ``at_most`` seconds. ``clock`` returns seconds from any
    fixed moment: by :func:`time.process_time` or a :class:`WorkClock` they are those that the process works, on all its
    threads, and by any other those that pass.
    """

    seconds: float = math.inf
    clock: Callable[[], float] = field(default_factory=lambda: standard_clock, kw_only=True)
    whole: Limit | None = field(default=None, kw_only=True)
    started: float = field(default=math.nan, kw_only=True)
    reserved: float = field(default=0.0, init=False)
    patience: float = field(default=0.0, init=False)
    patient_until: float = field(default=-math.inf, init=False)
    at_most: float = field(default=math.inf, init=False)
    _interrupted_at: float = field(default=math.inf, init=False)

    def __post_init__(self) -> None:
        if math.isnan(self.started):
            self.started = self.clock()

    @classmethod
    def part_of(cls, whole: Limit | None, seconds: float) -> Limit:
        """So many seconds of what is left of a ``whole``, or all of that if it is less; of any without a whole."""
        if whole is None:
            return cls(seconds)
        return cls(max(0.0, min(seconds, whole.left())), clock=whole.clock, whole=whole)

    @property
    def of_work(self) -> bool:
        """Whether its seconds are those that the process works: who runs beside Python's own code asks it for them."""
        return self.clock is time.process_time or isinstance(self.clock, WorkClock)

    @property
    def counted(self) -> bool:
        """Whether its seconds are no time: who runs beside Python's own code counts what it works, and charges it."""
        return isinstance(self.clock, CountedClock)

    def worked(self) -> float:
        """Seconds that the process has worked, or that were counted, where seconds are."""
        return self.clock() if self.counted else time.process_time()

    @property
    def elapsed(self) -> float:
        """Seconds by the clock since the limit started."""
        return self.clock() - self.started

    @property
    def used(self) -> float:
        """What counts against the limit."""
        return self.elapsed

    @property
    def remaining(self) -> float:
        """Seconds left, of the whole, too; 0 after an interruption."""
        return 0.0 if self.interrupted else max(0.0, self.left())

    def left(self, patience: float = 0.0) -> float:
        """Seconds left, of the whole, too, less what is reserved, plus ``patience``; negative where it is over."""
        own = self.seconds - self.used
        return (own if self.whole is None else min(own, self.whole.left())) - self.reserved + patience

    @property
    def expired(self) -> bool:
        """Whether nothing is left."""
        return self.remaining <= 0.0

    @property
    def interrupted(self) -> bool:
        """Whether somebody does not want to wait any longer."""
        return self._interrupted_at < math.inf or (self.whole is not None and self.whole.interrupted)

    @property
    def interrupted_at(self) -> float:
        """When that was, by its clock, or by that of the whole where only that was; inf where it was not."""
        whole = self.whole
        return self._interrupted_at if self._interrupted_at < math.inf or whole is None else whole.interrupted_at

    def interrupt(self) -> None:
        """End this limit and the whole that it is part of."""
        self._interrupted_at = min(self._interrupted_at, self.clock())
        if self.whole is not None:
            self.whole.interrupt()

    def check(self) -> None:
        """Go on only while there is time. Raises TimeUpError."""
        if self.over:
            raise TimeUpError(self)

    @property
    def over(self) -> bool:
        """Whether work that this limit is enforced on ends."""
        return self.interrupted or self.late

    @property
    def late(self) -> bool:
        """Whether there is no more time by the clock, with all patience."""
        if self.left(self.patience) > 0.0:
            return False
        return self.worked() >= self.patient_until or self.left(self.at_most) <= 0.0

    def wait(self, late: float, working: float, at_most: float = math.inf) -> None:
        """For a required result wait ``late`` seconds more, and until the process has worked for ``working`` seconds.

        The latter are not the clock's: on a busy machine they take longer, and without them there would be nothing. Of
        what is not quite so much needed the clock has the last word, ``at_most`` so many seconds late.
        """
        self.patience, self.patient_until, self.at_most = late, self.worked() + working, at_most

    @property
    def waiting(self) -> bool:
        """Whether there is not yet what must be there."""
        return self.patient_until > -math.inf

    def wait_no_longer(self) -> None:
        """What must be there is there."""
        self.patience, self.patient_until, self.at_most = 0.0, -math.inf, math.inf

    @contextmanager
    def enforced(self) -> Iterator[None]:
        """What runs inside, on this thread, ends by TimeUpError at its first checkpoint after the time is up."""
        before = _enforced.set((*_enforced.get(), self))
        try:
            yield
        finally:
            _enforced.reset(before)

    @contextmanager
    def ended(self) -> Iterator[None]:
        """The same, but running out of time is no error: what follows continues with what was found, as at Ctrl-C."""
        try:
            with self.enforced():
                yield
        except KeyboardInterrupt:
            self.interrupt()
        except TimeUpError as up:
            if up.limit is not self:
                raise

    @contextmanager
    def finishing(self, seconds: float) -> Iterator[None]:
        """Work inside ends as usual when time is up, but only ``seconds`` after an interruption rather than at once.

        No other limit ends it.
        """
        finishing = _Finishing(seconds, whole=self, clock=self.clock)
        try:
            with shielded(), finishing.enforced():
                yield
        except TimeUpError as up:
            raise TimeUpError(self) if up.limit is finishing else up from None

    @contextmanager
    def hearing_interrupts(self, interrupt: Callable[[], None] | None = None) -> Iterator[None]:
        """Ctrl-C, and SIGTERM and SIGHUP where they would interrupt, only leave no time, by ``interrupt``; once.

        The second one interrupts. So nothing is torn: what is at work ends at its next look at the limit. Only the main
        thread hears signals, and a handler of the program that calls us stays what it is.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handlers = {number: signal.getsignal(number) for number in INTERRUPTS}

        def hear(number: int, frame: FrameType | None) -> None:
            handler = handlers[signal.Signals(number)]
            if self.interrupted and callable(handler):
                handler(number, frame)
            else:
                (interrupt or self.interrupt)()

        heard = [number for number, handler in handlers.items() if _interrupts(handler)]
        for number in heard:
            signal.signal(number, _Hearing(hear))
        try:
            yield
        finally:
            for number in heard:
                signal.signal(number, handlers[number])


@dataclass(slots=True, eq=False)
class Telling(Limit):
    """Ends nothing; when its time is up, ``tell`` is called once, at the next checkpoint."""

    tell: Callable[[], None] = field(kw_only=True)
    told: bool = field(default=False, init=False)

    @property
    def over(self) -> bool:
        """Never."""
        if not self.told and self.elapsed > self.seconds:
            self.told = True
            self.tell()
        return False


@dataclass(slots=True, eq=False)
class _Finishing(Limit):
    """Ends when its whole does, but only ``seconds`` after an interruption."""

    @property
    def over(self) -> bool:
        """Whether there is no time to finish."""
        assert self.whole is not None
        if not self.whole.interrupted:
            return self.whole.over
        return self.clock() > self.whole.interrupted_at + self.seconds


@dataclass(frozen=True, slots=True)
class _Hearing:
    """A handler of ours."""

    hear: Callable[[int, FrameType | None], None]

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.hear(number, frame)


def _interrupts(handler: object) -> bool:
    """Whether a handler is Python's own, which raises KeyboardInterrupt, or of a limit around this one."""
    return handler is signal.default_int_handler or isinstance(handler, _Hearing)


INTERRUPTS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""Signals that end work with what there is."""

_enforced: ContextVar[tuple[Limit, ...]] = ContextVar("enforced", default=())
"""The limits that are enforced here, the outermost first."""


def clock_of(within: Limit | None) -> Callable[[], float]:
    """That of a limit, or the one that limits have which are part of none."""
    return standard_clock if within is None else within.clock


def time_left() -> float:
    """Seconds until the first of the limits here ends what is done, interruptions aside; inf without any."""
    return min((limit.left(limit.patience) for limit in _enforced.get()), default=math.inf)


def time_is_up() -> bool:
    """Whether the next checkpoint would end what runs here."""
    return any(limit.over for limit in _enforced.get())


def checkpoint() -> None:
    """Go on only while there is time, for loops that take long. Raises TimeUpError."""
    for limit in _enforced.get():
        limit.check()


@contextmanager
def shielded() -> Iterator[None]:
    """No checkpoint ends what runs inside, on this thread: for what makes something of that which was found."""
    before = _enforced.set(())
    try:
        yield
    finally:
        _enforced.reset(before)


Each = TypeVar("Each")


def checked(items: Iterable[Each], every: int = 256) -> Iterator[Each]:
    """The items, with a checkpoint before the first and then at regular distances. Raises TimeUpError."""
    for number, item in enumerate(items):
        if not number % every:
            checkpoint()
        yield item


def checked_by(items: Iterable[Each], size: Callable[[Each], int], every: int) -> Iterator[Each]:
    """The same for items of which some take much longer: a checkpoint whenever their sizes come to ``every``."""
    since = every
    for item in items:
        since += size(item)
        if since >= every:
            checkpoint()
            since = 0
        yield item
