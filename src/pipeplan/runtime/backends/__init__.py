"""Building and running groups of blocks by kernel backends.

Here: a file for each library, whose ``build`` makes of a module what its backend runs, with ``versions`` of what it
needs and whether it is ``DETERMINISTIC``. Not here: which groups a backend takes, in the file of the same name in
``kernels/backends/``; nor measuring, in ``profiling/``.
"""
