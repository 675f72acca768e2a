"""Data and nothing else: devices, clusters of the papers, sizes of models, scheduling rules, recipes of training state.

Here: one file per member, in a folder per kind, which :mod:`pipeplan.catalog.reading` lists. Not here: what the data
means, and code of any other kind; that lives in the rooms that read it.
"""
