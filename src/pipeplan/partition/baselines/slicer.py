"""AutoPipe's slicer (III-C): leading micro-batches run their warmup forwards in halves, so that startup halves.

Of the micro-batches to split, micro-batch m runs in halves on stages 0 .. p-1-m, where it is a warmup forward; on the
last of them its halves are sent together, since the next stage would let the first one wait. Backwards are whole, and
no stage holds more micro-batches than before.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from pipeplan.partition.chain.autopipe_simulator import Step, steps_in_order
from pipeplan.partition.chain.costs import StageTimes

__all__ = ["Sliced", "num_to_split", "sliced"]


@dataclass(frozen=True, slots=True)
class Sliced:
    """1F1B with the first ``num_split`` micro-batches in halves; times in ns.

    ``ends`` are those of whole actions: of a forward in halves, that of the second half. ``startup_ns`` is when the
    last stage starts.
    """

    num_split: int
    startup_ns: int
    iteration_ns: int
    ends: dict[Step, int]


def num_to_split(stages: StageTimes) -> int:
    """Algorithm 2: the fewest leading micro-batches whose splitting is enough; 0 for a single stage.

    Once the first micro-batch runs in halves, the last stage ends its forward earlier, and so the gradient comes to
    stage p-1-m earlier. Splitting the first m micro-batches is enough if micro-batch m, whole, can end its forward on
    that stage by then although it starts on stage 0 only after the halves before it. So the text; the printed test
    in line 34 is the other way round. The gradient's start counts both halves on the last stage, of which line 9
    leaves out one.
    """
    count, transfer = stages.num_stages, stages.transfer_ns
    ways = list(accumulate((time + transfer for time in stages.forwards), initial=0))
    ends = _halves(stages)
    gradient = ends[0][count - 1]
    for split in range(1, count):
        stage = count - 1 - split
        gradient += stages.backwards[stage + 1] + transfer
        latest = gradient - (ways[stage + 1] - transfer)
        if latest >= ends[split - 1][0]:
            return split
    return count if count > 1 else 0


def sliced(stages: StageTimes, num_microbatches: int, num_split: int) -> Sliced:
    """Run 1F1B with the first micro-batches in halves; a half's transfer takes half as long."""
    count = stages.num_stages
    free = [0] * count
    ends: dict[Step, int] = {}
    parts: dict[tuple[int, int], list[int]] = {}
    startup = 0
    for kind, stage, index in steps_in_order(count, num_microbatches):
        if kind == "B":
            arrival = ends["B", stage + 1, index] + stages.transfer_ns if stage < count - 1 else 0
            free[stage] = max(free[stage], arrival) + stages.backwards[stage]
        else:
            halved = index < num_split and stage < count - index
            arrivals = _arrivals(stages, parts.get((stage - 1, index), []), halved)
            parts[stage, index] = _run(free[stage], arrivals, _pieces(stages.forwards[stage], halved))
            free[stage] = parts[stage, index][-1]
            if (stage, index) == (count - 1, 0):
                startup = parts[stage, index][0] - _pieces(stages.forwards[stage], halved)[0]
        ends[kind, stage, index] = free[stage]
    return Sliced(num_split, startup, ends["B", 0, num_microbatches - 1], ends)


def _pieces(time: int, halved: bool) -> list[int]:
    """What the parts of a forward take."""
    return [time - time // 2, time // 2] if halved else [time]


def _arrivals(stages: StageTimes, sent: list[int], halved: bool) -> list[int]:
    """When the parts of an input are there: halves apart where both stages run halves, else all together."""
    if not sent:
        return [0, 0] if halved else [0]
    return [end + _pieces(stages.transfer_ns, True)[0] for end in sent] if halved else [sent[-1] + stages.transfer_ns]


def _run(free: int, arrivals: list[int], pieces: list[int]) -> list[int]:
    """The ends of parts run one after another from ``free`` on, each once it is there."""
    ends = []
    for arrival, piece in zip(arrivals, pieces, strict=True):
        free = max(free, arrival) + piece
        ends.append(free)
    return ends


def _halves(stages: StageTimes) -> list[list[int]]:
    """[micro-batch][stage] ends of forwards in halves, when all the warmup runs so and nothing else."""
    count = stages.num_stages
    free, found = [0] * count, []
    for index in range(count):
        sent: list[int] = []
        for stage in range(count - index):
            sent = _run(free[stage], _arrivals(stages, sent, True), _pieces(stages.forwards[stage], True))
            free[stage] = sent[-1]
        found.append(list(free))
    return found
