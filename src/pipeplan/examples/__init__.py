"""Ready inputs: the placements of the literature as profiles, for any number of devices and any costs."""

from pipeplan.examples.shapes import SHAPES, ShapeCosts, shape

__all__ = ["SHAPES", "ShapeCosts", "shape"]
