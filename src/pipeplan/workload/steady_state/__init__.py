"""The part of a run that repeats: found in a schedule, its rate, and extended to more micro-batches.

Here: repetends of given orders. Not here: the search for a repetend (schedule.cpsat).
"""
