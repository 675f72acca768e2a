"""Convolutions on tensors with channels last, in eager torch; what comes and goes has channels first."""

from pipeplan.kernels.backend import Backend
from pipeplan.kernels.operators import GraphOperator, OperatorDag
from pipeplan.kernels.rules import PatternRule, calls, check_path

_LONGEST = 6

_KEEPING = ("elementwise", "pool", "concatenation", "relu", "add", "batch-norm", "max-pool", "mean")
"""Kinds of operators that keep a layout, as captured models and the zoo's have them."""


class _Convolves(PatternRule):
    """From a convolution on, with what follows on the same tensors: the layout changes at both ends only."""

    def op_rule(self, op: GraphOperator) -> bool:
        """Convolutions, and what keeps a layout."""
        return calls(op, "conv") or _keeps_layout(op)

    def begins(self, op: GraphOperator) -> bool:
        """With a convolution."""
        return calls(op, "conv")

    def fusion_rule(self, graph: OperatorDag, kind: str, source: str, sink: str) -> bool:
        """Of few operators."""
        longest = len(graph.between(source, sink)) <= _LONGEST
        return longest and check_path(graph, source, sink, self.op_rule)


def _keeps_layout(op: GraphOperator) -> bool:
    return op.kind in _KEEPING or (op.kind == "norm" and calls(op, "batch_norm"))


BACKENDS = (Backend("channels-last", rule=_Convolves(), modules=True),)
