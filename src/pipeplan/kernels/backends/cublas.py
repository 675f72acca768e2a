"""cuBLAS and cuBLASLt, each preferred in eager torch, which has one of them by default: products on NVIDIA's GPUs."""

from pipeplan.kernels.backend import Backend
from pipeplan.kernels.operators import GraphOperator
from pipeplan.kernels.rules import PatternRule, calls


class _Multiplies(PatternRule):
    """What has a product in it."""

    def op_rule(self, op: GraphOperator) -> bool:
        """By what it calls."""
        return calls(op, "linear", "mm", "matmul", "einsum", "attention", "ffn", "product", "head")


BACKENDS = (
    Backend("cublas", rule=_Multiplies(), devices=("cuda",)),
    Backend("cublaslt", rule=_Multiplies(), devices=("cuda",)),
)
