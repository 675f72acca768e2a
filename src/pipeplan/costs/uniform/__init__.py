"""Closed forms of a uniform layout: an iteration's time and memory, for one layout or a table of thousands at once.

Here: what a transformer, its layout and a machine are said in; time of products in waves of tiles, of attention, of
what is element-wise, of messages and what of them is exposed, of the pipeline's bubble and the optimizer; memory; the
reader of published runs, and the two shares per kind of device fitted to them. Not here: plans of their own making
(planning), times of blocks that were traced or measured (runtime.profiling).
"""
