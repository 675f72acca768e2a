"""Stages as a graph (GraphPipe): blocks, devices, replicas and micro-batch size of each stage, chosen together.

Here: the search over series-parallel parts, its bounds and its memory. Not here: chains (chain), schedules of stage
graphs (schedule.stage_graph).
"""
