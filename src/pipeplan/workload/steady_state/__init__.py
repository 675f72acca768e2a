"""What repeats in a run: found in a schedule, how fast it goes, and extended to more micro-batches.

Here: repetends of given orders. Not here: the search for a repetend (schedule.cpsat).
"""
