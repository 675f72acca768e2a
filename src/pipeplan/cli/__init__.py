"""The command line; :mod:`pipeplan.cli.main` puts its verbs together.

Here: the verbs, one or two to a file, which read flags, call :mod:`pipeplan._api` and print. Not here: planning,
measuring, running; tables and drawings (reporting).
"""
