"""When every action of a workload runs: the anytime search, and every known schedule it starts from.

Here: solver models, rules, classic schedules. Not here: which blocks form a stage (partition), timing (workload).
"""
