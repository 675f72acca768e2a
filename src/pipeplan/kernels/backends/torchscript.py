"""Frozen TorchScript with oneDNN Graph: traced, weights made constants, and what oneDNN fuses compiled by it.

torch.jit is deprecated; torch 2.14 is the first version for which nobody has tried it.
"""

from pipeplan.kernels.backend import Backend, calls
from pipeplan.kernels.operators import GraphOperator, OperatorDag
from pipeplan.kernels.rules import PatternRule

_LONGEST = 4
"""Operators of a group: oneDNN fuses what follows a product or convolution, and nothing across several layers."""


class _Fuses(PatternRule):
    """Short groups of what a trace shows whole: neither control flow by data nor recurrent layers."""

    def op_rule(self, op: GraphOperator) -> bool:
        """By what it calls."""
        return not calls(op, "lstm", "gru", "nonzero", "item")

    def fusion_rule(self, graph: OperatorDag, kind: str, source: str, sink: str) -> bool:
        """As long as the group is short."""
        return len(graph.between(source, sink)) <= _LONGEST


BACKENDS = (
    Backend(
        "torchscript",
        rule=_Fuses(),
        whole=True,
        trains=False,
        devices=("cpu",),
        packages={"torch": ("2.1", "2.14")},
    ),
)
