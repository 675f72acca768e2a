"""What makes a module run in parts: deferred weight gradients, shards of parameters, autocast, clocks.

Here: mechanisms that know torch modules alone. Not here: plans, programs, process groups (executor).
"""
