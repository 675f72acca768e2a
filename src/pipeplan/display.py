"""How objects show themselves in a notebook: by a renderer far above them, which is imported when it is needed."""

from __future__ import annotations

import importlib

renderer = ""
"""The module whose ``html_of(object)`` makes HTML; ``pipeplan/__init__.py`` names it. Without one there is none."""


class Displayed:
    """Base of what a notebook shows as more than text."""

    __slots__ = ()

    def _repr_html_(self) -> str | None:
        """What IPython and Jupyter show; None for the text."""
        return None if not renderer else str(importlib.import_module(renderer).html_of(self))
