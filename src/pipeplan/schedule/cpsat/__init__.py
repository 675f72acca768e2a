"""CP-SAT under the searches: the repetend as a modulo schedule, windows of a schedule, and the solver itself.

Here: everything that imports ortools. Not here: the order in which a search tries its steps.
"""
