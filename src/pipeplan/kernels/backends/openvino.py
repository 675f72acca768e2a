"""OpenVINO, which reads torch's modules by itself: an extra (``pip install pipeplan[openvino]``)."""

from pipeplan.kernels.backend import Backend, calls
from pipeplan.kernels.operators import GraphOperator, OperatorDag
from pipeplan.kernels.rules import PatternRule

_LONGEST = 4


class _Reads(PatternRule):
    """Whatever its reader knows, in short groups and as a whole."""

    def op_rule(self, op: GraphOperator) -> bool:
        """All but losses, which inference does not have."""
        return not calls(op, "loss")

    def fusion_rule(self, graph: OperatorDag, kind: str, source: str, sink: str) -> bool:
        """As long as the group is short."""
        return len(graph.between(source, sink)) <= _LONGEST


BACKENDS = (
    Backend(
        "openvino",
        rule=_Reads(),
        whole=True,
        compiles_slowly=True,
        trains=False,
        devices=("cpu",),
        packages={"openvino": ("", "")},
    ),
)
