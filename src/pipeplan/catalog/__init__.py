"""Data and nothing else: devices, clusters of the papers, sizes of models, scheduling rules, recipes of training state.

A new member is a new file in its folder (:mod:`pipeplan.catalog.reading` lists them); what the data means, and code of
any kind, lives in the rooms that read it.
"""
