"""The command line, whose verbs are joined in :mod:`pipeplan.cli.main`.

Here: one file per verb, which reads flags, calls :mod:`pipeplan._api` and prints. Not here: planning, measuring,
running; tables and drawings (reporting).
"""
