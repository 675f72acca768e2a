"""Planning: a :class:`Request` in, a result out: search, comparison, tuning and frontiers.

Here: which candidates there are, how they share the time, and the plan that is built of the best. Not here: making
schedules, partitions and splits, which have rooms of their own; tables of results (reporting).
"""
