"""Stages as a graph (GraphPipe): blocks, devices, replicas and micro-batch size of each stage, chosen together."""

from pipeplan.partition.graph.search import GraphPartition, graphpipe

__all__ = ["GraphPartition", "graphpipe"]
