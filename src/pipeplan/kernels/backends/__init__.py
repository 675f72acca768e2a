"""The backends that pipeplan knows: which groups each takes, without torch.

Here: a file for each library, with ``BACKENDS``. Not here: what builds and runs a group, in the file of that name in
``runtime/backends/``; nor backends of users, which are in modules of their own (docs/kernels.md).
"""
