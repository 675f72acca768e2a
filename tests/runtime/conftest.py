"""Shared by the tests of what runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture
def paths_for_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that are started find the tests' own models and modules."""
    here = Path(__file__).parent
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(here), str(here.parent)]), prepend=os.pathsep)
