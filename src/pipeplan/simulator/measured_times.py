"""Times that were predicted beside those that were measured."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass

from pipeplan.units import format_ns

_CLOSE = 0.03
"""Share of the predicted time that is not worth a reason."""


@dataclass(frozen=True, slots=True)
class KindTimes:
    """All actions of a kind: ``F``, ``B``, ``I`` or ``W``, or messages: ``SEND_F`` and so on.

    ``count`` is of one step. Times are ns of one action: the predicted ones' mean, the measured ones' mean and median.
    Of messages the prediction is of the transfer, while a SEND is measured as long as it is posted, and a RECV as long
    as it is waited for.
    """

    kind: str
    count: int
    predicted_ns: float
    measured_ns: float
    median_ns: float

    @property
    def ratio(self) -> float | None:
        """Measured by predicted; None of messages."""
        return self.measured_ns / self.predicted_ns if "_" not in self.kind else None


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """A device's iteration in ns: computing, waiting for messages and for other devices, sending, and the rest.

    ``outside_ns`` is before its first action and after its last one, ``other_ns`` between actions.
    """

    predicted_busy_ns: int
    busy_ns: float
    waiting_ns: float
    sending_ns: float
    outside_ns: float
    other_ns: float


class BesidePrediction:
    """Measured iterations beside the one that is predicted; times in ns."""

    __slots__ = ()

    predicted_ns: int
    iterations_ns: tuple[float, ...]

    @property
    def measured_ns(self) -> float:
        """Median over the steps."""
        return statistics.median(self.iterations_ns)

    @property
    def ratio(self) -> float:
        """Measured by predicted."""
        return self.measured_ns / self.predicted_ns


@dataclass(frozen=True, slots=True)
class MeasuredComparison(BesidePrediction):
    """Predicted against measured.

    ``iterations_ns`` are those of the steps that count, after ``num_left_out``. ``replayed_ns`` is the makespan when
    every action lasts as measured and starts as soon as it can: what is missing to ``measured_ns`` is communication
    that took longer than predicted, and the interpreter. An emulation took ``stretch`` times as long as all times here.
    """

    emulated: bool
    num_left_out: int
    predicted_ns: int
    iterations_ns: tuple[int, ...]
    replayed_ns: int
    kinds: tuple[KindTimes, ...]
    devices: tuple[DeviceTimes, ...]
    stretch: float = 1.0

    @property
    def predicted_bubble_rate(self) -> float:
        """The predicted bubble rate of the iteration."""
        return 1 - sum(device.predicted_busy_ns for device in self.devices) / (len(self.devices) * self.predicted_ns)

    @property
    def bubble_rate(self) -> float:
        """The measured bubble rate of the iteration."""
        return 1 - sum(device.busy_ns for device in self.devices) / (len(self.devices) * self.measured_ns)

    @property
    def verdict(self) -> str:
        """Where most of the time went that was not predicted, in one line.

        As long as measured, actions make the iteration ``replayed_ns`` long; the rest is devices that wait.
        """
        more = self.measured_ns - self.predicted_ns
        if abs(more) <= _CLOSE * self.predicted_ns:
            return "as predicted"
        longer = self.replayed_ns - self.predicted_ns
        busy, predicted = (
            sum(each) for each in zip(*((each.busy_ns, each.predicted_busy_ns) for each in self.devices), strict=True)
        )
        times = f"actions take {busy / predicted if predicted else 1.0:.3g} times as long"
        much = f"{format_ns(abs(more))} {'more' if more > 0 else 'less'} than predicted"
        if more < 0 or longer >= more:
            return f"{much}: {times}"
        waits = f"devices wait for messages and for each other ({format_ns(more - longer)})"
        if longer <= 0:
            return f"{much}: {waits}"
        parts = (f"{times} ({format_ns(longer)})", waits)
        first, second = parts if 2 * longer >= more else parts[::-1]
        return f"{much}; most of it: {first}; the rest: {second}"

    def figures(self) -> dict[str, object]:
        """What ``simulate --measured --json`` has under ``measured``; times of several steps are medians."""
        return {
            "emulated": self.emulated,
            "stretch": self.stretch,
            "num_steps": len(self.iterations_ns),
            "num_steps_left_out": self.num_left_out,
            "predicted_iteration_ns": self.predicted_ns,
            "iteration_ns": self.measured_ns,
            "iterations_ns": list(self.iterations_ns),
            "ratio": self.ratio,
            "replayed_ns": self.replayed_ns,
            "predicted_bubble_rate": self.predicted_bubble_rate,
            "bubble_rate": self.bubble_rate,
            "kinds": [{**asdict(kind), "ratio": kind.ratio} for kind in self.kinds],
            "devices": [asdict(device) for device in self.devices],
        }


@dataclass(frozen=True, slots=True)
class LoggedDevice:
    """What is predicted of a device, and what a log has of it; None where it says nothing. Times in ns, of one step."""

    device: int
    predicted_forward_ns: int
    predicted_backward_ns: int
    predicted_peak_bytes: int
    forward_ns: float | None
    backward_ns: float | None
    peak_bytes: int | None


@dataclass(frozen=True, slots=True)
class AcrossRanks:
    """The least and the most that devices take for forward or backward in one step, in ns, where a log says no more.

    Of a log that has the most alone, both are that.
    """

    role: str
    predicted_ns: tuple[int, int]
    measured_ns: tuple[float, float]


@dataclass(frozen=True, slots=True)
class LoggedStage:
    """What an action of a stage takes, predicted and by a log, in ns; None where it says nothing of it.

    Of a trace the median of all its actions of that kind, which include waiting for inputs. Of a log of devices with
    one stage each what these say of a step, shared by its micro-batches. ``role`` is forward or backward.
    """

    stage: int
    role: str
    predicted_ns: int
    measured_ns: float


@dataclass(frozen=True, slots=True)
class LoggedComparison(BesidePrediction):
    """Predicted beside what another trainer's log or a profiler's trace says: iterations, and devices by rank.

    ``iterations_ns`` are those that count, ``by`` says what they were read from. ``memory`` is what the log's memory is
    of: what the allocator had ``reserved``, or what was ``allocated``. ``kinds`` are of actions, where the trace has
    them, ``across_ranks`` what is not said by rank, ``stages`` what actions of each stage take, where that is known.
    """

    tool: str
    by: str
    memory: str
    num_left_out: int
    predicted_ns: int
    iterations_ns: tuple[float, ...]
    kinds: tuple[KindTimes, ...]
    devices: tuple[LoggedDevice, ...]
    across_ranks: tuple[AcrossRanks, ...] = ()
    stages: tuple[LoggedStage, ...] = ()

    def figures(self) -> dict[str, object]:
        """What ``simulate --measured --json`` has under ``measured``."""
        return {
            "tool": self.tool,
            "num_steps": len(self.iterations_ns),
            "num_steps_left_out": self.num_left_out,
            "predicted_iteration_ns": self.predicted_ns,
            "iteration_ns": self.measured_ns,
            "iterations_ns": list(self.iterations_ns),
            "ratio": self.ratio,
            "memory": self.memory,
            "kinds": [{**asdict(kind), "ratio": kind.ratio} for kind in self.kinds],
            "devices": [asdict(device) for device in self.devices],
            "across_ranks": [asdict(each) for each in self.across_ranks],
            "stages": [asdict(each) for each in self.stages],
        }
