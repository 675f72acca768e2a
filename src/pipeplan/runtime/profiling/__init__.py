"""Measuring: blocks alone, in rounds with others, and models in one piece."""
