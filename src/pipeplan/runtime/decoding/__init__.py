"""Writing texts on by a decoding plan: caches of keys and values, requests that begin and end, and the words chosen.

Here: what a rank keeps and does of every turn of a group. Not here: how plans split it (the plan says), the models'
blocks (models), and processes (launch).
"""
