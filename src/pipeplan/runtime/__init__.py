"""Everything that runs a model: measuring, training, and replaying plans, with torch.

Here: rooms for training, emulation, profiling, executor, models, launch, parallel. Not here: planning; a plan comes in
as a file.
"""
