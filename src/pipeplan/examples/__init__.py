"""Ready inputs: the placements of the literature and the papers' models as profiles."""

from pipeplan.examples.models import MODELS, model
from pipeplan.examples.shapes import SHAPES, ShapeCosts, shape

__all__ = ["MODELS", "SHAPES", "ShapeCosts", "model", "shape"]
