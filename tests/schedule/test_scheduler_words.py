"""What screens say made a schedule, for every identifier that a search can give one."""

from __future__ import annotations

import pytest

from builders.shapes import shape_workload
from pipeplan.schedule.classic import CLASSIC
from pipeplan.schedule.rules.sweep import built_in_rules
from pipeplan.schedule.state import scheduler_words

RULES = [f"rules: {rules.name}" for rules in built_in_rules(shape_workload("v"))]


@pytest.mark.parametrize(
    ("identifier", "words"),
    [
        ("sequential", "one micro-batch after another"),
        ("repetend", "optimised repeating pattern"),
        ("rules", "list scheduling"),
        ("zb-h1", "zb-h1"),
        ("1f1b+", "1f1b+"),
        ("rules: bwd-first, true time", "rules bwd-first, true time"),
        ("rules: rules", "rules"),
        ("zb-h1+windows", "optimised, from zb-h1"),
        ("1f1b++horizon", "optimised, from 1f1b+"),
        ("repetend+windows", "optimised, from a repeating pattern"),
        ("rules+windows", "optimised, from list scheduling"),
        ("rules: mine+horizon", "optimised, from rules mine"),
        ("sequential+horizon", "optimised, from one micro-batch after another"),
        ("1f1b+slices", "1f1b, leading forwards sliced"),
        ("1f1b++slices", "1f1b+, leading forwards sliced"),
        ("zb-h1+windows+slices", "optimised, from zb-h1, leading forwards sliced"),
        ("by-hand", "by-hand"),
    ],
)
def test_words(identifier: str, words: str) -> None:
    assert scheduler_words(identifier) == words


@pytest.mark.parametrize("name", ["sequential", "repetend", "rules", *CLASSIC, *RULES])
def test_no_path_of_the_search_is_left_in_the_words(name: str) -> None:
    plain = scheduler_words(name)
    for change in ("", "+windows", "+horizon"):
        words = scheduler_words(name + change)
        assert not any(mark in words for mark in ("windows", "horizon", "repetend", "rules:"))
        assert words.startswith("optimised") == (change != "" or name == "repetend")
        assert scheduler_words(f"{name}{change}+slices") == f"{words}, leading forwards sliced"
    assert name not in CLASSIC or plain == name
