"""Shared by all tests."""

from __future__ import annotations

import compileall
import contextlib
import gc
import importlib.util
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import pipeplan
from pipeplan import time_limit
from pipeplan.schedule import classic
from pipeplan.time_limit import CountedClock

QUESTION_S = 0.001
"""What a question for the time counts."""

# A background job of a shell starts with SIGINT ignored, one under nohup with SIGHUP, and so would every process the
# tests start and interrupt.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# Processes that tests start import the packages beside the tests, too.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))

# What is compiled, assertions rewritten, is kept for workers and processes to come, whatever the terminal is like.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Collecting makes millions of objects and no garbage to speak of.
gc.disable()


def pytest_collection(session: pytest.Session) -> None:
    """Where nothing is compiled yet, each worker compiles its share first, and finds the others' when it needs them.

    By itself each would compile, and rewrite the assertions of, everything at the same time as all others.
    """
    given, here = getattr(session.config, "workerinput", None), Path(__file__).parent
    if given is None or [Path(each).resolve() for each in session.config.args] != [here]:
        return
    own = slice(int(given["workerid"].removeprefix("gw")), None, given["workercount"])
    for path in sorted(path for folder in pipeplan.__path__ for path in Path(folder).rglob("*.py"))[own]:
        compileall.compile_file(path, quiet=2)  # which leaves what is compiled
    for path in sorted(here.rglob("test_*.py"))[own]:
        cached = Path(importlib.util.cache_from_source(str(path)))
        if not any(cached.parent.glob(f"{path.stem}.*")) and not pytest_ignore_collect(path, session.config):
            sys.path.insert(0, str(path.parent))
            with contextlib.suppress(Exception, pytest.skip.Exception):  # which it will say when it is collected
                importlib.import_module(path.stem)


def pytest_collection_finish() -> None:
    gc.freeze()  # or all of it would be looked through at once, for a second and more
    gc.get_freeze_count = lambda: 1  # which walks through all that is frozen, each time
    gc.unfreeze = lambda: None  # as commands do at their end: all of it would be looked through again after each
    gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``-m slow`` files that do not speak of slow tests are not imported, which is half of collecting."""
    asked = config.getoption("markexpr")
    if asked not in ("slow", "slow and not long", "long") or collection_path.suffix != ".py":
        return None
    words = ("slow",) if asked == "slow and not long" else ("slow", "one_in")  # whose others are all long
    text = collection_path.read_text(encoding="utf-8")
    return None if any(word in text for word in words) else True


def pytest_runtest_setup(item: pytest.Item) -> None:
    """What was made before a module's second test, the first's imports too, is not looked at in any other.

    Limits are of a clock of the test's own where it is to count: then no machine is too slow.
    """
    counts = item.get_closest_marker("counted")
    if counts is not None:
        classic._remembered.clear()  # what an earlier test made asks for no time
    time_limit.standard_clock = time.monotonic if counts is None else CountedClock(*counts.args or (QUESTION_S,))
    _begun[item.path] += 1
    if _begun[item.path] == 2:
        gc.collect()
        gc.freeze()


_begun = Counter[Path]()


# Two tests at a time, and ranks beside each other, on two cores: one thread each, or they would wait in circles.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What a developer's terminal is like makes no difference to what tests print.
os.environ.pop("COLUMNS", None)

# Runs are alike, so that a failure is the change's; `pytest --hypothesis-profile random` looks for new examples.
# Machines are noisy, so neither an example nor drawing one has a time limit.
for name, derandomize, examples in (("alike", True, 40), ("random", False, 100)):
    settings.register_profile(
        name,
        max_examples=examples,  # where a test says no number of its own
        derandomize=derandomize,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile("alike")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[None]:
    """Commands that run in this process handle signals as if they had it to themselves, and are deaf as they leave."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        return (yield)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
