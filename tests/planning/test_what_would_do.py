"""Where nothing fits: what would do is looked for in all of the time, cheapest first, and said as it is known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import pipeplan
from builders.chains import chain_profile, split_chain
from pipeplan import time_limit
from pipeplan.errors import InfeasibleError
from pipeplan.planning.infeasibility import ExplainShortage, shortage
from pipeplan.planning.request import Request
from pipeplan.planning.steps import search_plan
from pipeplan.planning.trials import unfit_by_state
from pipeplan.time_limit import CountedClock

pytestmark = pytest.mark.counted(1e-4)

IN_TIME = "that was found, and that less would not is not proved"
TIME_UP = "that was found in the time there was, and with more --time-limit less may be"
PUNCTUAL = ExplainShortage(seconds=0.0, working=0.0)
FEWER: dict[str, Any] = {"placement": "one-to-one", "replicas": 2, "zero": 0, "mini_batch": 8, "scheduler": "1f1b"}
FIXED: dict[str, Any] = {"memory_bytes": 5 * 10**8, "replicas": 4, "zero": 0, "mini_batch": 8}


def fixed(**others: Any) -> Request:
    return Request.of(split_chain(4), devices=4, **FIXED | others)


def said_in(request: Request, seconds: float) -> InfeasibleError:
    return shortage(request, InfeasibleError("no"), seconds, PUNCTUAL)


@pytest.fixture(scope="module")
def every() -> InfeasibleError:
    """What is said of 500 MB where there is all the time."""
    return said_in(fixed(), 10)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.05, 0.1, 0.2, 0.3])
def test_where_time_ran_out_that_is_said(every: InfeasibleError, seconds: float) -> None:
    """Else more time has no more to say; flags that are opened were looked for last, and lost without a word."""
    found = said_in(fixed(), seconds)
    assert IN_TIME in str(every)
    assert "or raise --devices to 8 and leave --dp out" in str(every)
    assert str(found) == str(every) or TIME_UP in str(found) or found.enough_bytes is None
    assert found.would_do or "raise --time-limit: there was no time" in str(found)


def test_opened_flags_are_looked_for_before_memory() -> None:
    """They are the cheapest, and stand first, in words and figures."""
    for seconds in (0.2, 10):
        found = said_in(fixed(memory_bytes=8 * 10**8), seconds)
        assert "; leave --dp out, or raise --memory to " in str(found)
        assert found.would_do[0] == {"num_devices": 4, "memory_bytes": 8 * 10**8, "what": "leave --dp out"}


@pytest.mark.parametrize("more", [1.05, 1.2])
def test_what_parts_of_the_time_leave_is_used(more: float) -> None:
    """Where all of it together is enough, no part of it is said to have been too little."""
    request = fixed(replicas=None, zero=None, memory_bytes=2 * 10**8)
    clock = time_limit.standard_clock
    assert isinstance(clock, CountedClock)
    begun = clock.seconds
    every = said_in(request, 10)
    assert str(said_in(request, more * (clock.seconds - begun))) == str(every)


def test_fewer_devices_with_less_fixed_are_said_beside_those_as_asked() -> None:
    """On 6 nothing has to be opened; without one of the flags 3 do, and without both of them no fewer."""
    request = Request.of(
        chain_profile(6, placed=False, parameter_bytes=100_000_000), devices=2, memory_bytes=10**9, **FEWER
    )
    found = shortage(request, InfeasibleError("no"), 60, ExplainShortage())
    assert [each["num_devices"] for each in found.would_do] == [6, 2, 3]
    assert str(found).endswith("(tp 1 dp 2 pp 3, all recomputed), or raise --devices to 3 and leave --dp out")


def test_without_any_time_necessary_conditions_are_no_advice() -> None:
    """What less cannot do is said as that, with what there was no time for; nothing has been found to do."""
    request = fixed(memory_bytes=10**8, replicas=None, zero=None)
    error = unfit_by_state(request)
    assert error is not None
    found = shortage(request, error, 0.0, PUNCTUAL)
    assert found.would_do == ()
    assert str(found).startswith(str(error))
    assert "--memory of less than 400MB cannot do, nor, of this size, fewer --devices than 16" in str(found)
    assert str(found).endswith("raise --time-limit: there was no time to find what would do")
    assert "--memory to" not in str(found)


def test_a_level_for_which_sizes_leave_no_replicas_is_advised_to_be_left_out() -> None:
    request = fixed(replicas=None, zero=1, shards=2, positions=2, memory_bytes=None, deterministic=True)
    with pytest.warns(UserWarning, match="has no replicas; --tp 2 and --pp 2 leave no room for any"):
        search_plan(replace(request, time_limit=0.1, scheduler="1f1b"))


@pytest.mark.slow
def test_python_has_arguments_in_what_would_do() -> None:
    how: dict[str, Any] = {"devices": 4, "memory": "800MB", "replicas": 4, "zero": 0, "mini_batch": 8, "time_limit": 4}
    with pytest.raises(InfeasibleError, match="leave replicas out, or raise memory to") as told:
        pipeplan.search(split_chain(4), **how)
    assert told.value.would_do[0]["what"] == "leave replicas out"
    found = pipeplan.compare(split_chain(4), **how)
    assert isinstance(found.shortage, InfeasibleError)
    assert found.shortage.would_do == told.value.would_do
    assert str(found.shortage) == str(told.value)
