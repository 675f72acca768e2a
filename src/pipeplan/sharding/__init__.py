"""The cost frontier: how the blocks of a stage are split over its devices (TensorOpt)."""
