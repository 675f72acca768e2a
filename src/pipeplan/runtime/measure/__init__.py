"""Measuring: blocks alone, in rounds with others, and models in one piece."""

from pipeplan.runtime.measure.whole import Whole, WholeBench, in_one_piece, measure_whole

__all__ = ["Whole", "WholeBench", "in_one_piece", "measure_whole"]
