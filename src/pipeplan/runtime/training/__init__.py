"""Training with a plan: the loop, optimizer, data and checkpoints.

Here: what happens between iterations. Not here: what happens within one (executor).
"""
