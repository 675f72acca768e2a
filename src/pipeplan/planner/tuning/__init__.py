"""The auto-tuner: every rule over a grid of depths, replicas, sizes and placements."""

from pipeplan.planner.tuning.tuner import Tuning, tune

__all__ = ["Tuning", "tune"]
