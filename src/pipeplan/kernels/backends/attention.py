"""The kernels of scaled dot-product attention, each forced by itself: eager torch chooses by sizes and masks."""

from pipeplan.kernels.backend import Backend
from pipeplan.kernels.patterns import is_op

_ATTENDS = is_op().has_attr({"calls": lambda names: any("scaled_dot_product" in each for each in names)})

BACKENDS = (
    Backend("attention-flash", patterns=(_ATTENDS,)),
    Backend("attention-efficient", patterns=(_ATTENDS,), devices=("cuda",)),
    Backend("attention-math", patterns=(_ATTENDS,)),
    Backend("attention-cudnn", patterns=(_ATTENDS,), devices=("cuda",)),
)
