"""The report: one HTML file that needs nothing else, and its first screen as Markdown.

Texts from files are escaped by the templating library; figures are laid out as tables that both share.
"""
