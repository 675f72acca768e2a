"""Measuring: blocks alone, in rounds with others, and models in one piece."""

from pipeplan.runtime.measure.whole import Whole, WholeBench, counted_again, in_one_piece, measure_whole

__all__ = ["Whole", "WholeBench", "counted_again", "in_one_piece", "measure_whole"]
