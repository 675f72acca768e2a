"""Which kernel backend runs each block: Collage, chapter 2 of Jeon's thesis.

Here: operators as a graph, patterns and rules of what a backend runs as one kernel, the groups that they give, and the
cheapest cover of a model by groups that were measured. Backends are in ``backends/``, one file each, without torch.
Not here: what builds and runs a group, which is in ``runtime/backends/`` and reaches this room as a function that
measures; nor the exact cover, a solver's question, in ``schedule/cpsat/``.
"""
