"""Which blocks form a stage, and on which devices.

Here: cutting chains and graphs, placement strategies, mapping onto a cluster. Not here: how a stage's blocks are split
over its devices (sharding), when a stage runs (schedule), which of several placements is best (planning).
"""
