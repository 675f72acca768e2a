"""Rows by sample: shapes for any number of samples, cutting and joining, and outputs that cannot be cut."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from pipeplan.errors import UsageError
from pipeplan.files import PlacedStage, Plan
from pipeplan.runtime.executor.message_graph import Message
from pipeplan.runtime.executor.rank_program import programs_of
from pipeplan.runtime.executor.tensors import Made, TensorSlots, TensorSpec
from pipeplan.runtime.models.spec import BlockSpec, Model
from pipeplan.runtime.training.trainer import travelling
from runtime_support.models import Mix, SquaredError, vectors
from runtime_support.plans import placed_plan

MESSAGE = Message("F", 0, 1)


def rows_of(spec: TensorSpec) -> TensorSlots:
    return TensorSlots({MESSAGE: ("a",)}, {"a": spec})


@pytest.mark.parametrize(
    ("once", "twice", "spec", "at_five"),
    [
        ((2, 7), (4, 7), TensorSpec((1, 7), torch.float32), (5, 7)),
        ((6, 7), (12, 7), TensorSpec((3, 7), torch.float32), (15, 7)),  # tokens of all samples in one dimension
        ((7, 2), (7, 4), TensorSpec((7, 1), torch.float32, 1), (7, 5)),
        ((1, 7), (1, 7), TensorSpec((1, 7), torch.float32, None), (1, 7)),
    ],
)
def test_shapes_of_two_numbers_of_samples_give_all(
    once: tuple[int, ...], twice: tuple[int, ...], spec: TensorSpec, at_five: tuple[int, ...]
) -> None:
    found = TensorSpec.between("a", once, twice, 2, torch.float32)
    assert found == spec
    assert (found.of(2), found.of(4), found.of(5)) == (once, twice, at_five)


@pytest.mark.parametrize(("once", "twice"), [((2, 2), (4, 4)), ((3, 7), (6, 7)), ((2, 7), (3, 7)), ((2,), (4, 1))])
def test_outputs_that_grow_otherwise_are_refused(once: tuple[int, ...], twice: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match=r"block 'a' makes \[.*\] of 2 samples and \[.*\] of 4; only outputs"):
        TensorSpec.between("a", once, twice, 2, torch.float32)


@given(st.lists(st.integers(0, 11), unique=True, min_size=1).map(sorted), st.integers(1, 4), st.integers(1, 5))
def test_any_cut_of_any_pieces_has_the_rows_asked_for(wanted: list[int], width: int, taken: int) -> None:
    """Pieces of ``width`` samples, also strided ones, taken ``taken`` at a time."""
    rows = rows_of(TensorSpec((2, 3), torch.float32, 0))
    pieces = [tuple(wanted[start::width]) for start in range(width) if wanted[start::width]]
    slots = {}
    for piece in pieces:
        tensor = torch.tensor(piece, dtype=torch.float32).repeat_interleave(2)[:, None].expand(-1, 3)
        slots[rows.put(MESSAGE, piece)] = Made([tensor])
    assert rows.count == len(pieces)
    takings = []
    for begin in range(0, len(wanted), taken):
        samples = tuple(wanted[begin : begin + taken])
        takings.append(rows.take(MESSAGE, samples))
        (found,) = takings[-1].of(slots.__getitem__).tensors
        assert found.shape == (2 * len(samples), 3)
        assert found[::2, 0].tolist() == list(samples)
    assert sorted(slot for taking in takings for slot in taking.frees) == list(range(len(pieces)))
    assert rows.taken == set(slots)
    for number, taking in enumerate(takings):
        later = {slot for other in takings[number + 1 :] for slot, _, _ in other.runs}
        assert not later & set(taking.frees), "what is let go of is not needed afterwards"


def test_what_fits_is_passed_on_as_it_is() -> None:
    rows, tensors = rows_of(TensorSpec((1, 3), torch.float32)), [torch.zeros(2, 3), torch.ones(2, 3)]
    slots = {rows.put(MESSAGE, samples): Made([tensors[n]]) for n, samples in enumerate([(0, 1), (2, 3)])}
    whole, first, second = (rows.take(MESSAGE, samples) for samples in [(2, 3), (0,), (1,)])
    assert whole.of(slots.__getitem__).tensors[0] is tensors[1]
    assert [taking.is_whole for taking in (whole, first, second)] == [True, False, False]
    assert [taking.frees for taking in (whole, first, second)] == [[1], [], [0]]


def test_rows_can_be_taken_by_several_and_by_nobody() -> None:
    """What is taken again is kept till the last; what nobody takes is known."""
    rows = rows_of(TensorSpec((1, 3), torch.float32))
    slots = [rows.put(MESSAGE, samples) for samples in [(0, 1), (2, 3)]]
    takings = [rows.take(MESSAGE, samples) for samples in [(0, 1), (0,), (0, 1)]]
    assert [taking.frees for taking in takings] == [[], [], [slots[0]]]
    assert rows.taken == {slots[0]}


@given(st.sampled_from([1, 2, 3, 4, 6, 12]), st.sampled_from([1, 2, 3, 4, 6, 12]))
def test_what_is_one_for_all_samples_is_not_cut_and_its_gradients_add_up(made: int, taken: int) -> None:
    """Pieces of ``made`` of 12 samples, taken ``taken`` at a time: every gradient is used once in all."""
    upward = Message("B", 1, 0)
    rows = TensorSlots({MESSAGE: ("a",), upward: ("a",)}, {"a": TensorSpec((1, 3), torch.float64, None)})
    for message in (MESSAGE, upward):
        pieces = [tuple(range(begin, begin + made)) for begin in range(0, 12, made)]
        slots = {rows.put(message, piece): torch.full((1, 3), 1.0 + n).double() for n, piece in enumerate(pieces)}
        takings = [rows.take(message, tuple(range(begin, begin + taken))) for begin in range(0, 12, taken)]
        found = [taking.of(lambda slot: Made([slots[slot]])).tensors[0] for taking in takings]  # noqa: B023 - at once
        assert all(tensor.shape == (1, 3) for tensor in found)
        if message == upward:
            torch.testing.assert_close(torch.stack(found).sum(0), torch.stack(list(slots.values())).sum(0))
        else:
            assert all(any(tensor is each for each in slots.values()) for tensor in found)


# Models ----------------------------------------------------------------------------------------------------------


class Constant(nn.Module):
    """A row of numbers that is the same for all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.ones(1, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.row * 2


class Add(nn.Module):
    """Adds the constant row."""

    def forward(self, row: Tensor, x: Tensor) -> Tensor:
        return row + x


def constant_model() -> Model:
    blocks = (
        BlockSpec("row", "constant", Constant, samples=("x",)),
        BlockSpec("add", "add", Add, sources=("row",), samples=("x",)),
        BlockSpec("mix", "mix", lambda: Mix(1), sources=("add",)),
        BlockSpec("end", "loss", SquaredError, sources=("mix",), samples=("targets",), loss=True),
    )
    return Model("constant", blocks, vectors, lambda batch: batch["targets"].numel())


def two_stages(model: Model, size: int) -> Plan:
    """The row alone with micro-batches of 2, the rest with those of ``size``."""
    row, *others = (block.id for block in model.blocks)
    stages = [
        PlacedStage(blocks=(row,), devices=(0,)),
        PlacedStage(blocks=tuple(others), devices=(1,), microbatch_size=size),
    ]
    return placed_plan(model, stages, num_microbatches=4)


@pytest.mark.parametrize("size", [2, 4])
def test_outputs_of_one_size_have_no_dimension_of_samples(size: int) -> None:
    model = constant_model()
    program, _ = programs_of(two_stages(model, size), [b.id for b in model.blocks], model.edges, model.name)
    assert travelling(program, model, torch.float32) == {"row": TensorSpec((1, 8), torch.float32, None)}
