"""What a plan does in time: its programs replayed, metrics, critical path, predicted beside measured.

Here: figures of a plan that exists. Not here: the engine that times orders, and memory (workload); drawing (reporting).
"""
