"""The zoo: models in plain PyTorch, cut into blocks; sizes of papers and tiny ones, by name."""

from pipeplan.runtime.models.zoo.registry import ZOO, zoo_model

__all__ = ["ZOO", "zoo_model"]
