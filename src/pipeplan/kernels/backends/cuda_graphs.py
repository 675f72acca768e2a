"""CUDA graphs: the kernels of eager torch, recorded once and launched together.

Forward only: a recording has one place for every tensor, and a pipeline has several micro-batches between forward and
backward.
"""

from pipeplan.kernels.backend import Backend
from pipeplan.kernels.rules import AllBut

_NOT_RECORDED = ("nonzero", "item", "loss")
"""What the host must wait for, to know sizes or a number; and losses, which stages give one by one."""

BACKENDS = (
    Backend("cuda-graphs", rule=AllBut(*_NOT_RECORDED), whole=True, modules=True, trains=False, devices=("cuda",)),
)
