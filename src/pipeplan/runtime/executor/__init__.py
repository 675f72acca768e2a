"""Replays one rank's program of a plan: actions, messages, collectives.

Here: what a rank does between the first and the last entry of its program. Not here: optimizer, data, checkpoints
(training), models (models), starting processes (launch), waiting instead of computing (emulation).

In order of reading: message_graph says which tensors of which samples go from stage to stage, rank_program what each
rank does; interpreter does it, stage runs blocks forward and backward, tensors keeps what they make. channels carry
messages, process_groups what ranks exchange within an action; shared_parameters sums gradients of copies. custom_ops
runs actions that a plan adds.
"""
