"""Schedules of stage graphs whose stages have micro-batch sizes of their own (GraphPipe, thesis 3.6 and 3.10).

*kFkB*: how many forwards a stage starts with follows from the stages after it (Table 3.2); then k backwards and k
forwards in turn. *Greedy* (3.10.1): backwards as soon as their gradients are there, and no more samples in flight than
the iteration time needs. Algorithm 4 as printed falls short of its own Fig. 3.5; what is different here and why is said
in ``docs/algorithms/graph-schedules.md``.

Here: orders of the devices alone. Not here: which blocks form the stages (partition.graph).

Links carry first come, first served. *Samples in flight* of a stage are those between the start of their forward and
the end of their backward (of W, where it is split).
"""

from pipeplan.schedule.stage_graph.orders import best_kfkb_orders, greedy_orders, kfkb_orders, least_ks
from pipeplan.schedule.stage_graph.stages import samples_held

__all__ = ["best_kfkb_orders", "greedy_orders", "kfkb_orders", "least_ks", "samples_held"]
