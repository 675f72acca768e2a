"""The kernels of scaled dot-product attention, each forced by itself: eager torch chooses by sizes and masks."""

from pipeplan.kernels.backend import Backend
from pipeplan.kernels.operators import GraphOperator
from pipeplan.kernels.rules import PatternRule, calls


class _Attends(PatternRule):
    """What has attention in it, by torch's function for it."""

    def op_rule(self, op: GraphOperator) -> bool:
        """By what it calls."""
        return calls(op, "scaled_dot_product")


BACKENDS = (
    Backend("attention-flash", rule=_Attends()),
    Backend("attention-efficient", rule=_Attends(), devices=("cuda",)),
    Backend("attention-math", rule=_Attends()),
    Backend("attention-cudnn", rule=_Attends(), devices=("cuda",)),
)
