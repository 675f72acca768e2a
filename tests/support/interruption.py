"""Commands that are interrupted while they search."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence


def interrupted(command: Sequence[str], number: signal.Signals) -> tuple[int, str, str]:
    """(exit code, output, errors) of a search that is sent a signal when it has run a while, and has something."""
    code, out, err = 0, "", ""
    for seconds in (5, 20, 60):  # a busy machine may have nothing yet
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            time.sleep(seconds)
            os.kill(process.pid, number)
            try:
                out, err = process.communicate(timeout=60)
            finally:
                process.kill()
        code = process.returncode
        if code == 0:
            break
    return code, out, err
