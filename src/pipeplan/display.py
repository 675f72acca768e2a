"""How objects show themselves, printed and in a notebook: by a renderer far above them, imported when it is needed."""

from __future__ import annotations

import importlib

renderer = ""
"""The module whose ``html_of(object)`` makes HTML, and ``text_of(object)`` what is printed; ``pipeplan/__init__.py``
names it. Without one there is neither."""


class Displayed:
    """Base of what shows as more than its ``repr``."""

    __slots__ = ()

    def __str__(self) -> str:
        """What ``print`` shows: the command line's tables, and the timeline."""
        return str(importlib.import_module(renderer).text_of(self)) if renderer else repr(self)

    def _repr_html_(self) -> str | None:
        """What IPython and Jupyter show; None for the text."""
        return None if not renderer else str(importlib.import_module(renderer).html_of(self))
