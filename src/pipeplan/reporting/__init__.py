"""What results look like: tables, plots and a timeline for the terminal, SVG, traces.

Here: layout alone. Not here: the figures, which results have (planning, simulator, costs).
"""
