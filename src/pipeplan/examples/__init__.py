"""Ready inputs: the placements of the literature and the papers' models as profiles.

Here: how blocks and edges are laid out. Not here: the models' sizes (catalog), models that run (runtime.models.zoo).
"""

from pipeplan.examples.models import MODELS, model
from pipeplan.examples.shapes import SHAPES, ShapeCosts, shape

__all__ = ["MODELS", "SHAPES", "ShapeCosts", "model", "shape"]
