"""How a plan runs in time: its programs replayed, metrics, critical path, predicted and measured times.

Here: figures of a plan that exists. Not here: the engine that times orders, and memory (workload); drawing (reporting).
"""
