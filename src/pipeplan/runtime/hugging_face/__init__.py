"""Models of Hugging Face configurations: a local file or a class's name with arguments, never a download."""

from pipeplan.runtime.hugging_face.blocks import collectives_of, load_configuration
from pipeplan.runtime.hugging_face.loading import LoadedModel, load

__all__ = ["LoadedModel", "collectives_of", "load", "load_configuration"]
