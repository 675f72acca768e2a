"""Measuring and estimating: blocks alone, in rounds with others, models in one piece, and links.

Here: times and bytes, and profiles made of them. Not here: closed forms and fits (costs), running plans (executor).
"""
