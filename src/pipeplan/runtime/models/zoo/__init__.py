"""The zoo: models in plain PyTorch, cut into blocks, by name.

Here: families of models and their layers. Not here: their sizes (catalog), their estimated profiles (examples).
"""

from pipeplan.runtime.models.zoo.registry import ZOO, zoo_model

__all__ = ["ZOO", "zoo_model"]
