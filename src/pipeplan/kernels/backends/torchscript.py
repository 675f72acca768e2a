"""Frozen TorchScript with oneDNN Graph: traced, weights made constants, and what oneDNN fuses compiled by it.

torch.jit is deprecated; torch 2.14 is the first version for which nobody has tried it.
"""

from pipeplan.kernels.backend import Backend
from pipeplan.kernels.rules import ShortGroups

_LONGEST = 4
"""Operators of a group: oneDNN fuses what follows a product or convolution, and nothing across several layers."""

_NOT_TRACED = ("lstm", "gru", "nonzero", "item")
"""Recurrent layers, and control flow by data."""

BACKENDS = (
    Backend(
        "torchscript",
        rule=ShortGroups(_LONGEST, *_NOT_TRACED),
        whole=True,
        modules=True,
        trains=False,
        devices=("cpu",),
        packages={"torch": ("2.1", "2.14")},
    ),
)
