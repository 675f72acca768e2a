"""How results look: tables, plots and a timeline for the terminal, SVG, traces.

Here: only layout. Not here: figures, which the results have (planning, simulator, costs).
"""
