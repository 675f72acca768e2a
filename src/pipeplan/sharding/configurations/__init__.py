"""Configurations of operators, layouts of tensors, and what lies between them (TensorOpt sections 2.1, 4.2).

Here: which there are, and what each costs. Not here: choosing among them (elimination, tracking).
"""
