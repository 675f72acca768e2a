"""``python -m pipeplan``: the command line, as torchrun starts it."""

import signal
import sys
import time

BEGAN = time.monotonic()
"""About when the process began: what is imported from here on counts against time limits."""


def main() -> None:
    """Entry point of the ``pipeplan`` command."""
    try:
        from pipeplan.cli.main import main
    except KeyboardInterrupt:  # before anything there hears it, which another one may follow
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        print("pipeplan: interrupted", file=sys.stderr)
        exec("")  # as main says
        sys.exit(130)
    main(BEGAN)


if __name__ == "__main__":
    main()
