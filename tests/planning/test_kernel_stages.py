"""Plans whose stages kernel backends run: against brute force, and against eager torch with split backward."""

from __future__ import annotations
