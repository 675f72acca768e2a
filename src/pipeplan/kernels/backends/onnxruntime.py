"""ONNX Runtime, to which torch exports a group: an extra (``pip install pipeplan[onnxruntime]``)."""

from pipeplan.kernels.backend import Backend, calls
from pipeplan.kernels.operators import GraphOperator, OperatorDag
from pipeplan.kernels.rules import PatternRule

_LONGEST = 4


class _Exports(PatternRule):
    """Whatever torch exports, in short groups and as a whole."""

    def op_rule(self, op: GraphOperator) -> bool:
        """All but losses, which inference does not have."""
        return not calls(op, "loss")

    def fusion_rule(self, graph: OperatorDag, kind: str, source: str, sink: str) -> bool:
        """As long as the group is short."""
        return len(graph.between(source, sink)) <= _LONGEST


BACKENDS = (
    Backend(
        "onnxruntime",
        rule=_Exports(),
        whole=True,
        compiles_slowly=True,
        trains=False,
        devices=("cpu",),
        packages={"onnxruntime": ("", ""), "onnxscript": ("", "")},
    ),
)
