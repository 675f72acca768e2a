"""Starting the processes of a run, their status, and how a failure ends them all.

Here: what knows nothing of models and schedules; only worker.py imports torch. Not here: what the processes do.
"""
