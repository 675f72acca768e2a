"""Models of Hugging Face configurations: a local file or a class's name with arguments, never a download.

Here: building, splitting and feeding models of transformers. Not here: cutting them into blocks (capture).
"""

from pipeplan.runtime.models.huggingface.build import LoadedModel, collectives_of, load, load_configuration

__all__ = ["LoadedModel", "collectives_of", "load", "load_configuration"]
