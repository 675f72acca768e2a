"""Stages as a graph (GraphPipe): blocks, devices, replicas and micro-batch size of each stage, chosen together."""

from pipeplan.partition.graphpipe.problem import Choice, Load, Problem, Row
from pipeplan.partition.graphpipe.result import GraphStage, StageGraph, problems_of
from pipeplan.partition.graphpipe.search import Partition, partition

__all__ = ["Choice", "GraphStage", "Load", "Partition", "Problem", "Row", "StageGraph", "partition", "problems_of"]
