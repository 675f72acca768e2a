"""Configurations of operators, layouts of tensors, and what lies between them (TensorOpt sections 2.1, 4.2)."""
