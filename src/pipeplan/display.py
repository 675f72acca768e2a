"""How objects show themselves, in notebooks and as text: by a renderer far above them, imported when it is needed."""

from __future__ import annotations

import importlib
from collections.abc import Iterable

_RENDERER = "pipeplan.reporting.notebook"
"""The module with ``html_of(object)`` and ``text_of(object)``."""


class Displayed:
    """Base of what a notebook shows as more than text."""

    __slots__ = ()

    def lines(self) -> Iterable[str]:
        """What is shown of an object whose type the renderer, which imports no torch, does not know."""
        return [repr(self)]

    def _repr_html_(self) -> str:
        """What IPython and Jupyter show."""
        return str(importlib.import_module(_RENDERER).html_of(self))

    def text(self) -> str:
        """What the command line prints of it, at the width of the terminal or of ``COLUMNS``."""
        return str(importlib.import_module(_RENDERER).text_of(self))
