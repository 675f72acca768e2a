"""pipeplan: a planner for pipeline-parallel training and inference of large neural networks."""

__version__ = "0.1.0"

__all__ = ["__version__"]
