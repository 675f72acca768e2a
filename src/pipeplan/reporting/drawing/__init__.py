"""One drawing of timelines, for ``--svg``, notebooks and the report.

Here: what is drawn, the SVG, the data of the page's script, and that script, which moves what the SVG has and draws the
same on a canvas where there are too many bars for one. Not here: the page around it (reporting.html), and rows of text.
"""
