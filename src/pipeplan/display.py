"""How objects show themselves, in notebooks and as text: by a renderer far above them, imported when it is needed."""

from __future__ import annotations

import importlib
from collections.abc import Iterable

renderer = ""
"""The module with ``html_of(object)`` and ``text_of(object)``, which ``pipeplan/__init__.py`` names; none if empty."""


class Displayed:
    """Base of what a notebook shows as more than text."""

    __slots__ = ()

    def lines(self) -> Iterable[str]:
        """What is shown of an object whose type the renderer, which imports no torch, does not know."""
        return [repr(self)]

    def _repr_html_(self) -> str | None:
        """What IPython and Jupyter show; None for the text."""
        return None if not renderer else str(importlib.import_module(renderer).html_of(self))

    def text(self) -> str:
        """What the command line prints of it, at the width of the terminal or of ``COLUMNS``."""
        return repr(self) if not renderer else str(importlib.import_module(renderer).text_of(self))
