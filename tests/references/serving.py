"""Continuous batching once more, token by token: what the simulation of many steps at once is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeplan.serving.requests import ServedRequest
from pipeplan.serving.steps import StepCosts


@dataclass
class Served:
    """What came out."""

    now: float = 0.0
    steps: int = 0
    tokens: int = 0
    evictions: int = 0
    most_blocks: int = 0
    began: list[int] = field(default_factory=list)


def token_by_token(costs: StepCosts, requests: Sequence[ServedRequest], most: int, capacity: int) -> Served:
    """One engine whose blocks are counted anew at every step; requests by number, in the order of their arrival."""
    size, watermark = costs.constants.block_tokens, int(costs.constants.watermark * capacity)
    tokens = [each.prefix_tokens for each in requests]
    ends = [each.prefix_tokens + each.new_tokens for each in requests]
    waiting, running, away = list(range(len(requests))), list[int](), list[int]()
    found = Served()

    def blocks(number: int) -> int:
        whole, rest = divmod(tokens[number], costs.pieces)
        whole += rest > 0
        whole, rest = divmod(whole, size)
        return whole + (rest > 0)

    def room(number: int) -> bool:
        held = sum(map(blocks, running))
        if not running:
            return blocks(number) <= capacity
        return len(running) < most and held + blocks(number) + max(watermark, len(running) + 1) <= capacity

    while waiting or running or away:
        while away and room(away[0]):
            back = away.pop(0)
            found.now += costs.moved_ns(tokens[back])
            running.append(back)
        while not away and waiting and requests[waiting[0]].arrival_ns <= found.now and room(waiting[0]):
            found.began.append(waiting[0])
            running.append(waiting.pop(0))
        if not running:
            found.now = max(found.now, requests[waiting[0]].arrival_ns)
            continue
        for number in running:
            tokens[number] += 1
        needed = sum(map(blocks, running))
        if needed > capacity:
            for number in running:
                tokens[number] -= 1
            last = running.pop()
            found.now += costs.moved_ns(tokens[last])
            away.insert(0, last)
            found.evictions += 1
            continue
        found.most_blocks = max(found.most_blocks, needed)
        found.now += costs.step([tokens[number] - 1 for number in running]).total_ns
        found.steps += 1
        found.tokens += len(running)
        running = [number for number in running if tokens[number] < ends[number]]
    return found
