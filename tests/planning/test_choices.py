"""Plans and reports name the planner or flag that made each choice."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from builders.chains import chain_profile
from builders.profiles import profile_of
from pipeplan.files import CostRow, Plan, Profile, parse, read_plan, to_json
from pipeplan.planning.choices import choices_of
from pipeplan.planning.request import Request
from pipeplan.planning.steps import search_plan
from pipeplan.reporting.terminal import print_simulation
from pipeplan.schedule.rules.language import named_rules
from pipeplan.simulator.simulation import simulate
from support.paths import ROOT

OPEN = {
    "placement": "searched (balanced)",
    "microbatch": "searched",
    "schedule": "searched (greedy)",
    "recompute": "searched",
    "backward": "searched",
    "slices": "searched",
}


def profile(sizes: Sequence[int] = (1, 2)) -> Profile:
    """Four blocks in a line."""
    rows = [CostRow(microbatch_size=size, forward_ns=10 * size, backward_ns=20 * size) for size in sizes]
    return profile_of([rows] * 4)


def chosen(**how: Any) -> dict[str, str]:
    """Of what a search with greedy on balanced stages would make."""
    request = Request.of(profile(), **{"devices": 4, "mini_batch": 8} | how)
    return choices_of(request, "balanced", "greedy")


@pytest.mark.parametrize(
    ("how", "changed"),
    [
        ({}, {}),
        ({"planner": "pipedream"}, {"placement": "--planner pipedream", "microbatch": "--planner pipedream"}),
        (
            {"planner": "autopipe", "num_parted": "autopipe", "microbatch_size": 2},
            {"placement": "--planner autopipe", "slices": "--slices autopipe", "microbatch": "--microbatch-size 2"},
        ),
        ({"num_microbatches": 4}, {"microbatch": "--microbatches 4"}),
        ({"placement": "circular"}, {"placement": "--placement circular, stages searched (balanced)"}),
        ({"replicas": 2, "shards": 1}, {"replicas": "--dp 2", "shards": "--tp 1"}),
        (
            {"scheduler": "1f1b"},
            {"schedule": "--scheduler 1f1b", "backward": "--scheduler 1f1b", "slices": "--scheduler 1f1b"},
        ),
        (
            {"scheduler": "1f1b", "split_backward": False, "num_parted": 1},
            {"schedule": "--scheduler 1f1b", "backward": "--split-backward no", "slices": "--slices 1"},
        ),
        (
            {"scheduler": "repetend", "max_span": 3},
            {
                "schedule": "searched (greedy), --scheduler repetend, --max-span 3",
                "slices": "--max-span 3",
            },
        ),
        ({"late_inputs": False}, {"late_inputs": "--late-inputs no"}),
        ({"late_inputs": True}, {"late_inputs": "--late-inputs yes", "slices": "--late-inputs yes"}),
        ({"recompute": True, "zero": "auto"}, {"recompute": "--recompute all", "zero": "--zero auto"}),
        ({"recompute": False, "spread": True}, {"recompute": "--recompute none", "spread": "--shard-shared yes"}),
    ],
)
def test_each_choice_is_of_a_flag_a_planner_or_the_search(how: Mapping[str, Any], changed: dict[str, str]) -> None:
    assert chosen(**how) == OPEN | changed


def test_rules_that_place_stages_say_where_they_stand() -> None:
    found = chosen(rules=named_rules("zb-h1"), scheduler="rules")
    assert found["placement"] == "--rules zb-h1, stages searched (balanced)"
    assert {found[name] for name in ("schedule", "backward", "slices")} == {"--rules zb-h1"}


def test_a_placement_is_the_profiles_or_given() -> None:
    placed = chain_profile()
    own = Request.of(placed, mini_batch=8)
    assert choices_of(own, "given", "greedy")["placement"] == "the profile's placement"
    assert placed.placement is not None
    given = Request.of(chain_profile(placed=False), placement=placed.placement, mini_batch=8)
    assert choices_of(given, "given", "greedy")["placement"] == "--placement, as given"


def test_where_there_is_one_size_nobody_chose_it() -> None:
    request = Request.of(profile([2]), devices=4, mini_batch=8)
    assert choices_of(request, "given", "greedy")["microbatch"] == "the only size there is"


def test_plans_and_reports_say_it() -> None:
    """The JSON of `search` and of `simulate`, what people read, and the file, which is read as it was written."""
    asked = Request.of(
        profile(), devices=4, mini_batch=8, scheduler="1f1b", microbatch_size=2, time_limit=1.0, deterministic=True
    )
    result = search_plan(asked)
    choices = result.plan.provenance.choices
    assert choices["schedule"] == "--scheduler 1f1b"
    assert choices["microbatch"] == "--microbatch-size 2"
    assert choices["placement"].startswith("searched (")
    assert result.figures()["choices"] == choices
    again = parse(to_json(result.plan).encode(), Plan, "plan.json")
    assert again.provenance.choices == choices
    simulation = simulate(again)
    assert simulation.figures()["choices"] == choices
    shown = io.StringIO()
    print_simulation(simulation, shown, width=400)
    (line,) = [each for each in shown.getvalue().splitlines() if each.startswith("chosen by")]
    assert "microbatch: --microbatch-size 2; schedule: --scheduler 1f1b" in line


def test_plans_that_do_not_say_it_stay_as_they_were() -> None:
    plan = read_plan(str(ROOT / "plans" / "tessel-v.json"))
    assert plan.provenance.choices
    silent = plan.model_copy(update={"provenance": plan.provenance.model_copy(update={"choices": {}})})
    assert "choices" not in json.loads(to_json(silent))["provenance"]
    simulation = simulate(silent)
    assert "choices" not in simulation.figures()
    shown = io.StringIO()
    print_simulation(simulation, shown, width=120)
    assert "chosen by" not in shown.getvalue()
