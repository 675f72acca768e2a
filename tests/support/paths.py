"""Where the repository is, for tests that read its files."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
