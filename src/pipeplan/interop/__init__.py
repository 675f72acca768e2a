"""What other tools read and write: a plan's layers, placement and order in their words, and back.

Here: one module per form, read back by the module that writes it. Not here: what a tool can run, which is data of
``catalog/targets``; what pipeplan's own files look like (``files``); text for people (``reporting``).
"""
