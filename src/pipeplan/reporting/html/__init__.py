"""The report: one HTML file that needs nothing else, and its first screen as Markdown.

Here: what the page says, as tables and lines that both forms lay out, and the page's template, which escapes the texts
of files, its style and its script. Not here: the timeline (reporting.drawing), and what the figures are (simulator).
"""
