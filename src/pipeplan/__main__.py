"""``python -m pipeplan``: the command line, as torchrun starts it."""

import _thread
import signal
import sys
import time

BEGAN = time.monotonic()
"""About when the process began: what is imported from here on counts against time limits."""


def command() -> None:
    """Entry point of the ``pipeplan`` command: its process ends here."""
    try:
        main()
    except SystemExit as ended:
        from pipeplan.cli.leaving import leave

        if isinstance(ended.code, int | None):  # what else there is Python prints
            leave(ended.code or 0)
        raise


def main() -> None:
    """Run the command line in a process that goes on: SystemExit has the exit code."""
    sys.unraisablehook = _let_come_again
    try:
        from pipeplan.cli.main import main
    except KeyboardInterrupt:  # before anything there hears it, which another one may follow
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        print("pipeplan: interrupted", file=sys.stderr)
        exec("")  # as main says
        sys.exit(130)
    main(BEGAN)


def _let_come_again(ignored: "sys.UnraisableHookArgs") -> None:
    """Ctrl-C that comes while Python ignores exceptions, as where an import ends, is not lost: it comes again."""
    if ignored.exc_type is KeyboardInterrupt:
        _thread.start_new_thread(_interrupt_in_a_moment, ())
    else:
        sys.__unraisablehook__(ignored)


def _interrupt_in_a_moment() -> None:
    time.sleep(0.01)
    _thread.interrupt_main()


if __name__ == "__main__":
    command()
