"""What a model is to the runtime: named blocks and edges, from the zoo, Hugging Face, capture or nn.Sequential.

Here: building models and their batches. Not here: splitting them over devices (parallel), running them (executor).
"""
