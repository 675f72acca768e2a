"""Serving simulated: requests that come and go, a paged cache that fills, and what a decode step takes meanwhile.

Here: arrivals and lengths, continuous batching, the cache of a device and what is evicted to host memory, the cost of a
step by how devices share attention. Not here: bytes between devices (``costs.cache_volumes``), what kernels reach
(``costs.devices``), constants of an engine (``catalog/serving``). Nothing runs a model; no torch.
"""
