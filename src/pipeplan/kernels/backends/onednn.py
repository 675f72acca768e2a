"""oneDNN's kernels in eager torch, on (as torch has it where it can) and off: convolutions, products, norms of CPUs."""

from pipeplan.kernels.backend import Backend
from pipeplan.kernels.operators import GraphOperator
from pipeplan.kernels.rules import PatternRule, calls


class _Library(PatternRule):
    """What has a convolution, a product or a recurrent layer in it; all else oneDNN does not run."""

    def op_rule(self, op: GraphOperator) -> bool:
        """By what it calls."""
        return calls(op, "conv", "linear", "mm", "lstm", "gru", "attention", "ffn", "product", "head")


BACKENDS = (
    Backend("onednn", rule=_Library(), devices=("cpu",)),
    Backend("onednn-off", rule=_Library(), devices=("cpu",)),
)
