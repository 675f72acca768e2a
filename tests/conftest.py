"""Shared by all tests."""

from __future__ import annotations

import signal

from hypothesis import settings

# A background job of a shell starts with SIGINT ignored, and so would every process the tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Runs are alike, so that a failure is the change's; `pytest --hypothesis-profile random` looks for new examples.
settings.register_profile("alike", derandomize=True)
settings.register_profile("random", derandomize=False)
settings.load_profile("alike")
