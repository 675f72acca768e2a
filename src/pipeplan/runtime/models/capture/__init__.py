"""Capturing a model: from a module to named blocks and edges, by ``torch.export``."""

from pipeplan.runtime.models.capture.to_blocks import capture, parameters_of, replay

__all__ = ["capture", "parameters_of", "replay"]
