"""Memory for messages is used again when, and only when, nothing is on it any more."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from pipeplan.runtime.executor.channels import Buffers


def test_memory_comes_back_with_the_last_tensor_on_it() -> None:
    buffers = Buffers()
    for step in range(5):
        first, second = (buffers.lend((3, 4), torch.float64) for _ in range(2))
        first.fill_(step)
        second.fill_(-1)
        assert first.eq(step).all()
        del first, second
    assert buffers.num_made == 2


def test_a_view_holds_on_to_it() -> None:
    buffers = Buffers()
    made = buffers.lend((3, 4), torch.float32).fill_(7)
    view = made.detach().t()[1:]
    del made
    buffers.lend((4, 3), torch.float32).fill_(0)
    assert view.eq(7).all()
    assert buffers.num_made == 2
    del view
    held = [buffers.lend((3, 4), torch.float32) for _ in range(2)]
    assert buffers.num_made == len(held)


def test_what_autograd_keeps_holds_on_to_it() -> None:
    """An input from forward to backward, and a gradient that passes through as it came."""
    buffers = Buffers()
    leaf = buffers.lend((4,), torch.float64).fill_(3).requires_grad_()
    made, end = leaf.square().sum(), get_gradient_edge(leaf)
    view = leaf.view(2, 2)
    way = get_gradient_edge(view)
    del leaf, view
    buffers.lend((4,), torch.float64).fill_(0)
    (gradient,) = torch.autograd.grad(made, end)
    assert gradient.eq(6).all()
    (passed,) = torch.autograd.grad(way, end, buffers.lend((2, 2), torch.float64).fill_(5))
    buffers.lend((4,), torch.float64).fill_(0)
    assert passed.eq(5).all()


def test_other_formats_and_sizes() -> None:
    buffers = Buffers()
    shapes: list[tuple[tuple[int, ...], torch.dtype]] = [
        ((), torch.float32),
        ((0, 5), torch.float32),
        ((2, 3), torch.bfloat16),
        ((2, 3), torch.int64),
        ((7,), torch.bool),
    ]
    found: list[Tensor] = [buffers.lend(shape, dtype) for shape, dtype in shapes]
    assert [(tuple(tensor.shape), tensor.dtype) for tensor in found] == shapes
    assert all(tensor.is_contiguous() for tensor in found)
