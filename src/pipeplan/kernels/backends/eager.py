"""Eager torch: every operator alone, as any model runs. On CPUs products are MKL's, convolutions oneDNN's."""

from pipeplan.files.profile import EAGER
from pipeplan.kernels.backend import Backend
from pipeplan.kernels.rules import PatternRule

BACKENDS = (Backend(EAGER, rule=PatternRule()),)
