"""The balanced split as a plain dynamic programme over every range, one at a time: slow, and easy to see through."""

from __future__ import annotations

from collections.abc import Callable

Cost = Callable[[int, int, int], int]


def slow_split(
    cost: Cost, num_blocks: int, num_stages: int, fits: Callable[[int, int, int], bool] = lambda *_: True
) -> tuple[int, ...] | None:
    """First block of each stage: the least dearest stage, then the least squares; of equal ones late last stages."""
    dearest = _table(cost, num_blocks, num_stages, fits, None, max)
    bottleneck = dearest[num_stages].get(num_blocks)
    if bottleneck is None:
        return None
    squares = _table(cost, num_blocks, num_stages, fits, bottleneck[0], lambda before, price: before + price * price)
    begins, end = [], num_blocks
    for stage in range(num_stages, 0, -1):
        end = squares[stage][end][1]
        begins.append(end)
    return tuple(reversed(begins))


def _table(
    cost: Cost,
    num_blocks: int,
    num_stages: int,
    fits: Callable[[int, int, int], bool],
    most: int | None,
    join: Callable[[int, int], int],
) -> list[dict[int, tuple[int, int]]]:
    """[stages][blocks] (least value of the first blocks in so many stages, where the last stage begins)."""
    table = [{0: (0, 0)}]
    for stage in range(num_stages):
        ways = [
            (end, join(before, cost(stage, begin, end)), begin)
            for begin, (before, _) in table[-1].items()
            for end in range(begin + 1, num_blocks + 1)
            if fits(stage, begin, end) and (most is None or cost(stage, begin, end) <= most)
        ]
        table.append({end: (value, begin) for end, value, begin in sorted(ways, key=lambda way: (-way[1], way[2]))})
    return table
