"""Capturing a model: from a module to named blocks and edges, by running it on tensors without data.

Here: tracing a module and grouping its operators into blocks. Not here: which module a name means (models.load), models
that come in blocks already (zoo, sequential).
"""

from pipeplan.runtime.models.capture.repeats import with_first_layers
from pipeplan.runtime.models.capture.to_blocks import capture, parameters_of

__all__ = ["capture", "parameters_of", "with_first_layers"]
