"""The command line: one file per verb, joined in :mod:`pipeplan.cli.main`."""
