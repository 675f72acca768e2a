"""One drawing of timelines: what is in it, as SVG, and as the data of a page's script.

``--svg``, notebooks and the report show the same lanes, bars and colours. The script beside this file moves what the
SVG has, and draws the same on a canvas where there are too many bars for one.
"""
