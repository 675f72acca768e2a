"""Everything one iteration runs, in numbers, and how time and memory follow from it.

Here: actions, samples, workloads, their timing, memory and steady state. Not here: file formats (files), costs (costs),
solvers (schedule).
"""
