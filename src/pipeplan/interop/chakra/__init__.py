"""Plans as Chakra execution traces (MLCommons, schema 1.0.0): one file for each rank, for simulators such as ASTRA-sim.

Here: the bytes of a file, its nodes, and what they stand for in a plan. Not here: a plan's own times, which the
simulator knows.
"""
