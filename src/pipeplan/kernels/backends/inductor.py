"""TorchInductor, torch's compiler: it takes any group, fuses what is element-wise, and compiles for seconds."""

from pipeplan.kernels.backend import Backend
from pipeplan.kernels.operators import OperatorDag
from pipeplan.kernels.rules import PatternRule


class _Compiles(PatternRule):
    """Whatever follows."""

    def fusion_rule(self, graph: OperatorDag, kind: str, source: str, sink: str) -> bool:
        """Always: what cannot be one kernel becomes several, of one call."""
        return True


BACKENDS = (Backend("inductor", rule=_Compiles(), whole=True, modules=True, compiles_slowly=True),)
