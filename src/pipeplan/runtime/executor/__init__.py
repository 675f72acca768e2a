"""Replays one rank's program of a plan: actions, messages, collectives, and emulation without a model.

Here: what a rank does between the first and the last entry of its program. Not here: optimizer, data, checkpoints
(training), models (models), starting processes (launch).
"""
