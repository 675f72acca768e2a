"""The rules of docs/algorithms/rules.md are rules; what the page has run is run with all other pages."""

from __future__ import annotations

import re

from pipeplan.schedule.rules.language import parse_rules
from support.paths import ROOT

TEXT = (ROOT / "docs" / "algorithms" / "rules.md").read_text()


def test_files() -> None:
    blocks = re.findall(r"^```toml\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    assert len([parse_rules(block, "example") for block in blocks]) == 3
