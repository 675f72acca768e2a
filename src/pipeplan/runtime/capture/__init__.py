"""Capturing a model: from a module to named blocks and edges, by ``torch.export``."""

from pipeplan.runtime.capture.model import capture, replay

__all__ = ["capture", "replay"]
