"""Shared by all tests."""

from __future__ import annotations

import signal

# A background job of a shell starts with SIGINT ignored, and so would every process the tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
