"""What ranks reduce and gather of parameters is right whatever was in the memory that they send."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from pipeplan.runtime.executor.rank_program import Division, StagePart
from pipeplan.runtime.executor.shared_parameters import Divided
from pipeplan.runtime.parallel.sharding import range_of
from pipeplan.runtime.training import sharded_state
from pipeplan.runtime.training.sharded_state import ShardedStage, StateUnit

SHAPES = [(5, 3), (2, 2), (4,)]
"""Two ranks have three and two rows of the first, and gradients of the second only on one of them, of the last none."""


@pytest.fixture(autouse=True)
def _fresh_memory_is_not_a_number() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)  # which alone lets torch fill what nobody has filled
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.zeros(1).new_empty(64).isnan().all()
    yield
    torch.utils.deterministic.fill_uninitialized_memory = filled
    torch.use_deterministic_algorithms(False)


@dataclass
class _Group:
    """One of two ranks in a process: what it waits for, both have begun."""

    rank: int
    begun: list[Tensor]
    waits: list[str] = field(default_factory=list)

    def start_gather(self, own: Tensor) -> str:
        self.begun.append(own)
        return "gather"

    def start_scatter(self, parts: Tensor) -> str:
        self.begun.append(parts)
        return "scatter"

    def finish(self, what: str, device: torch.device) -> Tensor:
        self.waits.append(what)
        return torch.cat(self.begun) if what == "gather" else torch.stack(self.begun).sum(0)[self.rank]


def units(level: int, begun: list[Tensor]) -> list[StateUnit]:
    found = []
    for rank in range(2):
        torch.manual_seed(1)
        division = Division(("b",), (0, 1), level)
        divided = [Divided(nn.Parameter(torch.rand(shape)), ("b",), division, True) for shape in SHAPES]
        found.append(StateUnit(divided, _Group(rank, begun), rank))
    return found


@pytest.mark.parametrize("level", [1, 2, 3])
def test_gradients_are_summed_where_some_ranks_have_none(level: int) -> None:
    begun: list[Tensor] = []
    both = units(level, begun)
    gradients = [torch.full(shape, float(number + 1)) for number, shape in enumerate(SHAPES)]
    for unit in both:
        unit.unshard()
    if level == 3:
        for unit in both:
            unit.ready()
    begun.clear()
    for rank, unit in enumerate(both):
        unit.rows[0].whole.grad = gradients[0].clone()
        if rank == 1:
            unit.rows[1].whole.grad = gradients[1].clone()
        unit.reduce()
    for rank, unit in enumerate(both):
        unit.reduced()
        first, second, last = unit.rows
        begin, end = (0, 3) if rank == 0 else (3, 5)
        assert first.own.grad is not None
        assert torch.equal(first.own.grad, 2 * gradients[0][begin:end])
        assert second.own.grad is not None
        assert torch.equal(second.own.grad, gradients[1][rank : rank + 1])
        assert last.own.grad is None


def test_a_rank_does_as_much_for_its_rows_however_many_have_others(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, found = list[int](), range_of

    def counted(total: int, count: int, index: int) -> tuple[int, int]:
        asked.append(count)
        return found(total, count, index)

    monkeypatch.setattr(sharded_state, "range_of", counted)
    for count in (4, 4096):
        division = Division(("b",), tuple(range(count)), 1)
        divided = [Divided(nn.Parameter(torch.ones(5000, 2)), ("b",), division, True)]
        (rows,) = StateUnit(divided, _Group(1, []), 1).rows
        assert rows.own.shape == (-(-5000 // count), 2)
    assert asked == [4, 4096]


def test_parameters_are_gathered_whole() -> None:
    begun: list[Tensor] = []
    both = units(3, begun)
    for unit in both:
        unit.unshard()
    for unit in both:
        unit.ready()
        torch.manual_seed(1)
        for each, shape in zip(unit.rows, SHAPES, strict=True):
            assert torch.equal(each.whole.data, torch.rand(shape))


def test_backward_waits_for_parameters_when_it_comes_to_their_block() -> None:
    """Of two blocks that are gathered before a backward the second one's are waited for first, and alone."""
    groups = [_Group(0, []) for _ in "ab"]
    units = []
    for name, group in zip("ab", groups, strict=True):
        parameter = nn.Parameter(torch.rand(4, 2))
        units.append(StateUnit([Divided(parameter, (name,), Division((name,), (0,), 3), True)], group, 0))
    part = StagePart(0, ("a", "b"), (), True, {}, {}, frozenset(), frozenset(), block_groups=(1, 1))
    stage = ShardedStage(part, [[unit] for unit in units], [[], []], 1)
    seen = []
    made = torch.rand(3, 2, requires_grad=True)
    for number in range(2):
        made = stage.watch(number, made * 2)
        made.register_hook(lambda _: seen.append([len(group.waits) for group in groups]))
    for unit in units:
        unit.unshard()
    stage.begin_backward(adds=False)
    assert not any(group.waits for group in groups)
    made.sum().backward()
    assert seen == [[0, 1], [1, 1]]
