"""Chains of blocks cut into stages: one kernel for every cut, and AutoPipe's planner on it.

Here: contiguous stages. Not here: which device runs a stage (placement), stages that form a graph (graph).
"""
