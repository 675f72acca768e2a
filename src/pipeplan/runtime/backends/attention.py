"""One kernel of scaled dot-product attention, forced."""

from functools import partial

from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from pipeplan.runtime.backends.building import BuiltGroup

DETERMINISTIC = True

_KERNELS = {
    "attention-flash": SDPBackend.FLASH_ATTENTION,
    "attention-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "attention-math": SDPBackend.MATH,
    "attention-cudnn": SDPBackend.CUDNN_ATTENTION,
}


def build(name: str, module: nn.Module, inputs: tuple[Tensor, ...], training: bool) -> BuiltGroup:
    """The module as it is, with no other kernel allowed around it."""
    return BuiltGroup(module, partial(sdpa_kernel, [_KERNELS[name]]))
