"""How Sphinx builds the site: ``sphinx-build -W docs build/site``.

The pages are plain Markdown, whose links work where a repository is read, too. What is not a page, such as a schema or
the licence, is a download of the site.
"""

from __future__ import annotations

import pipeplan

project = "pipeplan"
version = release = pipeplan.__version__
html_title = f"pipeplan {version}"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_click"]
exclude_patterns = ["schema"]

myst_heading_anchors = 4  # as a repository makes them
myst_enable_extensions = ["colon_fence"]

autodoc_member_order = "groupwise"
autodoc_typehints = "signature"
napoleon_google_docstring = True

html_theme = "furo"
html_static_path: list[str] = []
html_copy_source = False
