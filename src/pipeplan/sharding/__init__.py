"""The cost frontier: how the blocks of a stage are split over its devices (TensorOpt).

Here: configurations of operators and the search over them, memory against time. Not here: which blocks form a stage
(partition), plans made of a frontier's points (planning).
"""
